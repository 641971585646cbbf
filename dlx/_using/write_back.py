"""Write-back: detect a function's writes to copied arguments, and copy them to the caller's arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlx._api.describe import describe
from dlx._api.shares_memory import collision
from dlx._engine.batch import Batch, not_writable
from dlx._engine.compound import name_of
from dlx._engine.executor import mark_written
from dlx._engine.request import request_of
from dlx._engine.sources import adapter_call
from dlx._registry import lookup
from dlx._registry.generic import Deferred
from dlx._registry.registry import registry
from dlx._registry.target import Target
from dlx._using.function_spec import Place
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import WriteTracking
from dlx.errors import ReadOnlyError, path_text


@dataclass
class PassedArray:
    """An array passed to the function."""

    old: Any  # the caller's array
    new: Any  # the function's array
    version: int | None  # the write counter of `new`, if its framework has one
    at: Place
    declared: bool  # named in `writes`


class Writes:
    """The arrays of one call to which the function may write."""

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
        """Register a copied array; return the array to pass to the function."""
        if declared and not _is_writable(old):
            error = not_writable(old.blocker.because) if isinstance(old, Deferred) else not_writable()
            raise error.complete(source=describe(old).type_name, target=self.target.name, root=at[0], path=at[1])
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
        """Register a caller's array that the function is declared to write to."""
        self._declared.append((source, old))

    def _count(self, new: Any, at: Place) -> int | None:
        """Return the write counter of an array, or None without a counter."""
        with adapter_call(self.target.adapter, target=self.target.name, root=at[0], path=at[1]):
            return None if self._tracking.count is None else self._tracking.count(new)

    def write_back(self) -> None:
        """Copy the function's writes to the caller's arrays."""
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
                    "the function wrote to a copy of it that cannot be written back",
                    source=name_of(each.old),
                    target=self.target.name,
                    root=each.at[0],
                    path=each.at[1],
                    fix="Pass a writable array, or let the function return a new one.",
                )
                failed.__cause__ = cause
        if failed is not None:
            raise failed

    def _is_written(self, passed: PassedArray) -> bool:
        """Return whether the function wrote to an array, or is declared to, since some writes are not counted."""
        now = self._count(passed.new, passed.at)
        return passed.declared or (now is not None and now != passed.version)

    def _check_overlap(self, written: list[PassedArray]) -> None:
        """Raise `ReadOnlyError` if writing back would overwrite writes to another argument with the same memory."""
        others = [each for each in self._others if self._is_written(each)]
        pair = collision([each.old for each in written], [each.old for each in others])
        if pair is None:
            return
        copy, other = ((*written, *others)[i] for i in pair)
        root, path = other.at
        raise ReadOnlyError(
            f"the function wrote to it and to {path_text(path, root)}; they share memory and one was copied, so "
            "writing it back would overwrite the other's writes",
            source=name_of(copy.old),
            target=self.target.name,
            root=copy.at[0],
            path=copy.at[1],
            fix="Pass arrays that do not share memory.",
        )


def _is_writable(obj: Any) -> bool:
    """Return whether an array supports item assignment and is writable."""
    source = lookup.look(obj).part
    if not isinstance(source, Adapter) or source.arrays.immutable or not hasattr(type(obj), "__setitem__"):
        return False
    return registry.ready(source) is not None and not describe(obj).readonly


def _copy_into(old: Any, new: Any) -> None:
    """Copy an array into another of any framework, in place."""
    if not _is_writable(old):
        raise TypeError(f"{name_of(old)} is not writable")
    request = request_of(None, like=old)
    new, source = lookup.source(new, target=request.target.name)
    (old[...],) = Batch(request, [new], [source]).run()
