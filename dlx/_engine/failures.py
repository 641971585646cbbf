"""Raise the errors of a tree immediately, or collect them in an ExceptionGroup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlx.errors import DlxError

Locate = Callable[[tuple[Any, ...]], tuple[str, tuple[Any, ...]]]


class Failures:
    """Adds paths to errors and raises or collects them; ``locate(path)`` returns an error's (root, path)."""

    def __init__(self, target: str, *, collect: bool = False, locate: Locate | None = None) -> None:
        self.target = target
        self.collect = collect
        self.locate = locate
        self.errors: list[DlxError] = []

    def add(self, error: DlxError, path: tuple[Any, ...]) -> None:
        """Collect an error, or raise it unless `collect`."""
        root, path = ("", path) if self.locate is None else self.locate(path)
        error.complete(path=path, root=root, target=self.target)
        if not self.collect:
            try:
                raise error
            finally:
                del error  # break the cycle with this frame
        self.errors.append(error)

    def check(self) -> None:
        """Raise the collected errors, if any."""
        if self.errors:
            errors, self.errors = self.errors, []
            try:
                raise group_errors(errors)
            finally:
                del errors


RAISING = Failures("")
"""For conversions of one array, at the root."""


def group_errors(errors: list[DlxError]) -> ExceptionGroup[DlxError]:
    """Return the errors of a tree as one exception."""
    return ExceptionGroup(f"{len(errors)} place{'s' * (len(errors) > 1)} in the tree cannot be converted", errors)
