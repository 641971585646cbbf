"""Errors of a tree: raised at the first one, or collected for an ExceptionGroup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlx.errors import DlxError

Located = Callable[[tuple[Any, ...]], tuple[str, tuple[Any, ...]]]


class Failures:
    """Errors with their paths: raised at once, or collected. ``located(path)`` gives an error's (root, path)."""

    def __init__(self, target: str, *, collect: bool = False, located: Located | None = None) -> None:
        self.target = target
        self.collect = collect
        self.located = located
        self.errors: list[DlxError] = []

    def add(self, error: DlxError, path: tuple[Any, ...]) -> None:
        """Note an error, or raise it where errors are not collected."""
        root, path = ("", path) if self.located is None else self.located(path)
        error.complete(path=path, root=root, target=self.target)
        if not self.collect:
            try:
                raise error
            finally:
                del error  # this frame is in its traceback, and would keep it, and all that it holds, alive
        self.errors.append(error)

    def check(self) -> None:
        """Raise what was collected, if anything was."""
        if self.errors:
            errors, self.errors = self.errors, []
            try:
                raise together(errors)
            finally:
                del errors


RAISING = Failures("")
"""For conversions of one array, at the root."""


def together(errors: list[DlxError]) -> ExceptionGroup[DlxError]:
    """Return one exception for all errors of a tree."""
    return ExceptionGroup(f"{len(errors)} place{'s' * (len(errors) > 1)} in the tree cannot be converted", errors)
