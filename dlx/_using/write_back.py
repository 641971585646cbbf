"""Detect what a decorated function writes to its arguments, and copy it back where an argument was a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlx._api.describe import describe
from dlx._api.shares_memory import collision
from dlx._engine.batch import Batch, not_writable
from dlx._engine.executor import mark_written
from dlx._engine.request import request_of
from dlx._engine.sources import adapter_call
from dlx._registry import lookup
from dlx._registry.registry import registry
from dlx._registry.target import Target
from dlx._using.function_spec import Place
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import WriteTracking
from dlx.errors import ReadOnlyError, path_text


@dataclass
class PassedArray:
    """An array that was passed to the function."""

    old: Any  # the caller's
    new: Any  # what the function got
    version: int | None  # the write counter of `new`, where its framework has one
    at: Place
    declared: bool  # to be written to


class Writes:
    """The arrays of one call whose writes may have to be written back."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._tracking = target.adapter.writes or WriteTracking()
        self._copies: list[PassedArray] = []
        self._others: list[PassedArray] = []
        self._declared: list[tuple[Adapter, Any]] = []

    def __bool__(self) -> bool:
        """Return whether any array was copied."""
        return bool(self._copies)

    def add_copy(self, old: Any, new: Any, at: Place, *, declared: bool) -> Any:
        """Register an array that had to be copied; return what to pass to the function."""
        if declared and not _is_writable(old):
            raise not_writable().complete(source=type(old).__name__, target=self.target.name, root=at[0], path=at[1])
        guarded = self._tracking.guarded
        with adapter_call(self.target.adapter, target=self.target.name, root=at[0], path=at[1]):
            new = new if guarded is None else guarded(new, declared)
        self._copies.append(PassedArray(old, new, self._count(new, at), at, declared))
        return new

    def add_shared(self, old: Any, new: Any, at: Place, *, declared: bool) -> None:
        """Register an array whose memory is shared with the function; call this after all `add_copy`."""
        if self._copies and all(new is not each.new for each in self._copies):
            self._others.append(PassedArray(old, new, self._count(new, at), at, declared))

    def add_declared(self, source: Adapter, old: Any) -> None:
        """Register an array of the caller's that the function is declared to write to."""
        self._declared.append((source, old))

    def _count(self, new: Any, at: Place) -> int | None:
        """Return the write counter of an array, or None."""
        with adapter_call(self.target.adapter, target=self.target.name, root=at[0], path=at[1]):
            return None if self._tracking.count is None else self._tracking.count(new)

    def write_back(self) -> None:
        """Write what the function wrote to copies into the caller's arrays."""
        for source, old in self._declared:
            mark_written(source, old)
        failed = None
        written = [each for each in self._copies if self._is_written(each)]
        if written:
            self._check_overlap(written)
        for each in written:
            each.version = self._count(each.new, each.at)
            try:
                _copy_into(each.old, each.new)
            except MemoryError:
                raise
            except Exception as cause:
                failed = ReadOnlyError(
                    "the function wrote to it, and that could not be written back",
                    source=type(each.old).__name__,
                    target=self.target.name,
                    root=each.at[0],
                    path=each.at[1],
                    fix="Pass an array that can be written to, or let the function return a new one.",
                )
                failed.__cause__ = cause
        if failed is not None:
            raise failed

    def _is_written(self, passed: PassedArray) -> bool:
        """Return whether the function wrote to an array, or was declared to, since some writes are not counted."""
        now = self._count(passed.new, passed.at)
        return passed.declared or (now is not None and now != passed.version)

    def _check_overlap(self, written: list[PassedArray]) -> None:
        """Refuse to write a copy over what the function wrote to another argument that has the same memory."""
        others = [each for each in self._others if self._is_written(each)]
        pair = collision([each.old for each in written], [each.old for each in others])
        if pair is None:
            return
        copy, other = ((*written, *others)[i] for i in pair)
        root, path = other.at
        raise ReadOnlyError(
            f"the function wrote to it and to {path_text(path, root)}, which share memory, and one of them was copied, "
            "so that its writes would overwrite the others",
            source=type(copy.old).__name__,
            target=self.target.name,
            root=copy.at[0],
            path=copy.at[1],
            fix="Pass arrays that have no memory in common.",
        )


def _is_writable(obj: Any) -> bool:
    """Return whether an array can be written to by its own item assignment."""
    source = lookup.look(obj).part
    if not isinstance(source, Adapter) or source.arrays.immutable or not hasattr(type(obj), "__setitem__"):
        return False
    return registry.ready(source) is not None and not describe(obj).readonly


def _copy_into(old: Any, new: Any) -> None:
    """Copy one array into another of any framework, in place."""
    if not _is_writable(old):
        raise TypeError(f"{type(old).__name__} cannot be written to")
    request = request_of(None, like=old)
    new, source = lookup.source(new, target=request.target.name)
    (old[...],) = Batch(request, [new], [source]).run()
