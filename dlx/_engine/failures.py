"""Raise the errors of a tree immediately, collect them in an ExceptionGroup, or keep what cannot be converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlx.errors import (
    AdapterNotFoundError,
    ConsumedError,
    ConversionError,
    DeviceError,
    DlxError,
    ReadOnlyError,
    StreamError,
    path_text,
)

Locate = Callable[[tuple[Any, ...]], tuple[str, tuple[Any, ...]]]


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and its causes, so that a plan keeps no array alive."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            waiting += [error.__cause__, error.__context__]
            if isinstance(error, BaseExceptionGroup):
                waiting += error.exceptions


_OF_THE_CALL = frozenset({"copy", "readonly", "detach", "device", "dtype", "stream", "strict"})


def concerns_object(error: DlxError) -> bool:
    """Return whether the object cannot be converted, not only with the options of this call."""
    is_of_object = isinstance(error, ConversionError | AdapterNotFoundError)
    is_of_call = isinstance(error, ConsumedError | DeviceError | ReadOnlyError | StreamError) or any(
        name in _OF_THE_CALL for name, _ in error.option
    )
    return is_of_object and not is_of_call


def _hashable(path: tuple[Any, ...]) -> Any:
    """Return a path, or its text if a container has keys without a hash."""
    try:
        hash(path)
    except TypeError:
        return path_text(path)
    return path


class Failures:
    """Adds paths to errors and raises or collects them; ``locate(path)`` returns an error's (root, path).

    With `passes`, objects inside a container that cannot be converted stay as they are. With `can_pass`, errors about
    such an object say that `convert` can do so.
    """

    def __init__(
        self,
        target: str,
        *,
        collect: bool = False,
        passes: bool = False,
        can_pass: bool = False,
        locate: Locate | None = None,
    ) -> None:
        self.target, self.can_pass = target, can_pass
        self.collect = collect
        self.passes = passes
        self.locate = locate
        self.errors: list[DlxError] = []
        self.passed: list[tuple[tuple[Any, ...], DlxError]] = []  # (path, reason)
        self._places: set[Any] = set()  # of `passed`
        self.wholes: dict[int, DlxError] = {}  # the first error of each compound array, by its number in the tree

    def keep(self, error: DlxError, path: tuple[Any, ...], whole: int, place: tuple[Any, ...]) -> bool:
        """Return whether the object at a place stays as it is; if not, `add` the error, with its path there."""
        if self.passes and place and concerns_object(error):
            forget_frames(error)
            self.passed.append((place, error.complete(path=path, target=self.target)))
            self._places.add(_hashable(place))
            return True
        try:
            self.add(error, path, whole, place)
        finally:
            del error  # break the cycle with this frame
        return False

    def has_passed(self, path: tuple[Any, ...]) -> bool:
        """Return whether the object at a path is left unchanged."""
        return bool(self._places) and _hashable(path) in self._places

    def add(
        self, error: DlxError, path: tuple[Any, ...], whole: int = -1, place: tuple[Any, ...] | None = None
    ) -> None:
        """Collect an error, or raise it unless `collect`. Of the parts of a compound array, only one error is kept."""
        is_inside = bool(path if place is None else place)
        root, path = ("", path) if self.locate is None else self.locate(path)
        error.complete(path=path, root=root, target=self.target)
        is_data = isinstance(error, ConversionError) and not error.option and concerns_object(error)
        error.can_stay = self.can_pass and is_inside and is_data
        if not self.collect:
            try:
                raise error
            finally:
                del error  # break the cycle with this frame
        if whole < 0 or self.wholes.setdefault(whole, error) is error:
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
