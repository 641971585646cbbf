"""Calls with arguments of types that were seen before: what must be converted is known, and nothing is flattened.

Arrays of other frameworks take the fast path in, all or none; a result that is an array is converted by `convert`.
Whatever needs more, such as a container, a copy of an argument or a device, is left to `Invocation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

from dlx._engine.seam import FAST_PATH
from dlx._registry import generic, lookup
from dlx._registry.registry import registry
from dlx._registry.target import is_committed
from dlx._using.function_spec import tracked
from dlx.adapter.base import Adapter
from dlx.errors import DlxError

__all__ = ["Specialization", "specialized"]

_borrow, _load = FAST_PATH._borrow, FAST_PATH._load


class Specialization:
    """What is known of the calls of one function whose arguments are of the same types.

    Parameters
    ----------
    call
        The `Invocation` of one of them.
    types
        Of all arguments, positional ones first. They are kept, since their addresses are keys.
    others, looked
        Numbers of the arguments that are arrays of other frameworks, and of those that may be arrays.
    written
        Numbers of the arguments that the function is declared to write to, each with its adapter.
    recorded
        Numbers of the arguments whose framework may record them for gradients, each with its adapter.
    to
        The target of results; None: they are not converted.
    generation
        That of the registry before any of this was found.

    Attributes
    ----------
    is_idle
        Whether nothing is converted, in or out, and nothing is declared to be written to.
    written
        As above.
    generation
        That of the registry; in another one nothing of this holds.
    """

    __slots__ = (
        *("_last", "_looked", "_options", "_others", "_placing", "_recorded", "_spec", "_to", "_types"),
        *("generation", "is_idle", "written"),
    )

    def __init__(
        self,
        call: Any,
        types: list[type],
        others: list[int],
        looked: list[int],
        written: list[tuple[int, Adapter]],
        recorded: list[tuple[int, Adapter]],
        to: Any,
        generation: int,
    ) -> None:
        self._recorded, self.written = recorded, written
        self.generation, self.is_idle = generation, not (others or looked or written) and to is None
        self._spec, self._types, self._others, self._looked, self._to = call.spec, types, others, looked, to
        device = "cpu" if call.spec.returns is None else None  # where the caller's arrays are
        self._options: tuple[Any, Any, Any] = device, call.request.readonly, call.request.detach
        # The adapter of the caller's arrays, if results are as committed as these are.
        source = lookup.kind(types[others[0]]).part if others and to is not None and device is not None else None
        self._placing = source if isinstance(source, Adapter) and source.placement is not None else None
        # The type of the last result, and whether results of that type are returned as they are.
        self._last: tuple[type | None, bool] = None, False

    def inward(self, values: tuple[Any, ...], options: Iterable[str]) -> Any:
        """Return what to pass to the function, or None for `Invocation`.

        Parameters
        ----------
        values
            All arguments, positional ones first.
        options
            Names of the others.

        Raises
        ------
        DlxError
            If the function's framework fails to take an array.
        """
        for i in self._looked:
            if lookup.look(values[i]).part is not None:
                return None
        for i, source in self._recorded:
            if tracked(source, values[i]):
                return None
        for i, _ in self.written:
            tensor = _borrow(values[i], "dlx", True)
            if tensor is None or tensor.readonly:
                return None
        if not self._others:
            return values
        passed = [*values]
        try:
            return passed if _share(passed, values, self._others, self._spec.to) else None
        except DlxError as error:
            names, (i,) = [*options], passed
            first = len(values) - len(names)
            root, path = self._spec.place(i) if i < first else (names[i - first], ())
            error.complete(root=root, path=path)
            raise

    def outward(self, result: Any, values: tuple[Any, ...], passed: Any) -> Any:
        """Convert a result for the caller; NotImplemented for `Invocation`.

        Raises
        ------
        DlxError
            If the result cannot be converted.
        """
        for new in passed:
            if new is result:
                own = next(own for own, new in zip(values, passed, strict=True) if new is result)
                return own if self._spec.returns is None else NotImplemented
        kind, stays = self._last
        if kind is not type(result):
            kind = type(result)
            if kind is tuple or kind is list or kind is dict:
                return self._parts_outward(result, values, passed)
            found = lookup.kind(kind)
            if found.verdict in lookup.ASKED:
                found = lookup.look(result)
                return NotImplemented if found.refusal is not None or found.part is not None else result
            what = found.part
            if what is not None and not isinstance(what, Adapter):
                return NotImplemented
            stays = what is None or self._to is None or _borrow(result, self._to) is result
            self._last = kind, stays
        if stays:
            return result
        device, readonly, detach = self._options
        try:
            if self._placing is not None and not self._is_committed(values):
                parts = [result]
                return parts[0] if _share(parts, [result], [0], self._to) else NotImplemented
            return FAST_PATH(result, self._to, device=device, readonly=readonly, detach=detach)
        except DlxError as error:
            error.complete(root="result")
            raise

    def _is_committed(self, values: tuple[Any, ...]) -> bool:
        """Return whether an array of the caller's is committed, and so is a result."""
        return self._placing is not None and any(is_committed(self._placing, values[i]) for i in self._others)

    def _parts_outward(self, result: Any, values: tuple[Any, ...], passed: Any) -> Any:
        """Convert the arrays in a flat container, all or none; NotImplemented for `Invocation`."""
        is_dict, others, found = type(result) is dict, [], False
        keys, before = ([*result], [*result.values()]) if is_dict else ([*range(len(result))], [*result])
        parts, own = [*before], {id(new): old for old, new in zip(values, passed, strict=True)}
        if self._spec.lazy or (self._spec.returns is not None and any(id(part) in own for part in before)):
            return NotImplemented
        if self._is_committed(values):
            return NotImplemented
        for i, part in enumerate(before):
            kind = lookup.kind(type(part))
            what = kind.part
            if kind.verdict in lookup.ASKED or not (what is None or isinstance(what, Adapter)):
                return NotImplemented
            found = found or what is not None
            if id(part) in own:
                parts[i] = own[id(part)]
            elif what is not None and self._to is not None:
                others.append(i)
        try:
            if not _share(parts, before, others, self._to):
                return NotImplemented
        except DlxError as error:
            error.complete(root="result", path=(keys[parts[0]],))
            raise
        is_new = found and ((self._to is not None and type(result) is not tuple) or not all(map(is_, parts, before)))
        if not is_new:
            return result
        return dict(zip(keys, parts, strict=True)) if is_dict else type(result)(parts)

    def shared(self, values: tuple[Any, ...], passed: Any) -> dict[int, Any]:
        """Return address of an array of the caller's -> what was passed instead."""
        return {id(values[i]): passed[i] for i in self._others}


def _share(arrays: list[Any], before: Sequence[Any], which: Sequence[int], to: Any) -> bool:
    """Replace some arrays by those of a target that share their memory, all or none; False where that cannot be.

    After an error `arrays` holds the number of the one that it is about.
    """
    i = 0
    try:
        for i in which:
            new = arrays[i] = _borrow(before[i], to)
            if new is None:
                return False
        if len(which) > 1 and len({id(before[i]) for i in which}) < len(which):
            return False  # an array that stands there twice is converted once
        for i in which:
            if arrays[i] is not before[i]:
                new = arrays[i] = _load(arrays[i], before[i], to)
                if new is NotImplemented:  # the adapters have changed since
                    return False
        return True
    except BaseException:
        new, arrays[:] = None, [i]  # this frame is in the traceback
        raise


def specialized(call: Any, values: tuple[Any, ...]) -> Specialization | None:
    """Return what is known of calls like an `Invocation`, its arguments converted; None where each may need more."""
    generation, request = registry.generation, call.request
    if request.device is not None or request.stream is not None:
        return None
    if call.spec.writes and any(lookup.adapter_of(value) is generic.BUFFER for value in values):
        return None  # it may be read-only in the next call
    types, others, looked, recorded = [type(value) for value in values], [], [], []
    to = call.results_to()
    if to is NotImplemented:
        return None
    names, first, written = [*call.options], len(values) - len(call.options), []
    for i in range(len(call.kept), len(values)):
        kind = lookup.kind(types[i])
        what = kind.part
        if kind.verdict in lookup.ASKED:
            if lookup.look(values[i]).part is not None:
                return None
            looked.append(i)
        elif isinstance(what, Adapter):
            if call.spec.is_written(i) if i < first else call.spec.is_option_written(names[i - first]):
                written.append((i, what))
            if what is not request.target.source:
                others.append(i)
            elif request.target.kind not in (None, types[i]):
                return None
            leaves = to is not None if what is request.target.source else not _guarded(what)
            if leaves and what.gradients is not None and call.spec.detach is None:
                recorded.append((i, what))
        elif what is not None:
            return None
    return Specialization(call, types, others, looked, written, recorded, to, generation)


def _guarded(source: Adapter) -> bool:
    """Return whether the fast path exports no array that is recorded: by a guard, or since those have another type."""
    guards = source.fast_path.guards if source.fast_path is not None else ()
    by_type = source.gradients is not None and source.gradients.by_type
    return by_type or any(each.blocker is not None and each.blocker.needs == "detach" for each in guards)
