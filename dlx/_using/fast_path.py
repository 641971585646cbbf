"""Calls with arguments of types that were seen before: what must be converted is known, and nothing is flattened.

Arrays of other frameworks take the fast path in, all or none; a result that is an array is converted by `convert`.
Whatever needs more, such as a container, a copy of an argument or a device, is left to `Invocation`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from dlx._api.convert import convert
from dlx._containers.lookup import kind_of, what_is
from dlx._registry.registry import registry
from dlx.adapter.base import Adapter
from dlx.errors import DlxError

if TYPE_CHECKING:
    from dlx._core.native import FastPathFunction

__all__ = ["Specialization", "specialized"]

_borrow, _load = cast("FastPathFunction", convert)._borrow, cast("FastPathFunction", convert)._load


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
    to
        The target of results; None: they are not converted.

    Attributes
    ----------
    is_idle
        Whether nothing is converted, in or out.
    generation
        That of the registry; in another one nothing of this holds.
    """

    __slots__ = ("_last", "_looked", "_options", "_others", "_spec", "_to", "_types", "generation", "is_idle")

    def __init__(self, call: Any, types: list[type], others: list[int], looked: list[int], to: Any) -> None:
        self.generation, self.is_idle = registry.generation, not others and not looked and to is None
        self._spec, self._types, self._others, self._looked, self._to = call.spec, types, others, looked, to
        device = "cpu" if call.spec.returns is None else None  # where the caller's arrays are
        self._options: tuple[Any, Any, Any] = device, call.request.readonly, call.request.detach
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
            if kind_of(values[i]) is not None:
                return None
        others, to, i = self._others, self._spec.to, 0
        if not others:
            return values
        passed = [*values]
        try:
            for i in others:
                tensor = passed[i] = _borrow(passed[i], to)
                if tensor is None:
                    return None
            if len(others) > 1 and len({id(values[i]) for i in others}) < len(others):
                return None  # an array that is passed twice is converted once
            for i in others:
                new = passed[i] = _load(passed[i], values[i], to)
                if new is NotImplemented:  # the adapters have changed since
                    return None
            return passed
        except BaseException as error:
            tensor = new = None  # this frame is in the traceback
            passed.clear()
            if isinstance(error, DlxError):
                names = list(options)
                n = len(values) - len(names)
                root, path = self._spec.place(i) if i < n else (names[i - n], ())
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
            what = what_is(kind)
            if what is kind:
                return result if kind_of(result) is None else NotImplemented
            if what is not None and not isinstance(what, Adapter):
                return NotImplemented
            stays = what is None or self._to is None or _borrow(result, self._to) is result
            self._last = kind, stays
        if stays:
            return result
        device, readonly, detach = self._options
        try:
            return convert(result, self._to, device=device, readonly=readonly, detach=detach)
        except DlxError as error:
            error.complete(root="result")
            raise

    def shared(self, values: tuple[Any, ...], passed: Any) -> dict[int, Any]:
        """Return address of an array of the caller's -> what was passed instead."""
        return {id(values[i]): passed[i] for i in self._others}


def specialized(call: Any, values: tuple[Any, ...]) -> Specialization | None:
    """Return what is known of calls like an `Invocation`, its arguments converted; None where each may need more."""
    request = call.request
    if request.device is not None or request.stream is not None:
        return None
    types, others, looked = [type(value) for value in values], [], []
    for i in range(len(call.kept), len(values)):
        what = what_is(types[i])
        if what is types[i]:
            if kind_of(values[i]) is not None:
                return None
            looked.append(i)
        elif isinstance(what, Adapter):
            if what is not request.target.source:
                others.append(i)
            elif request.target.kind not in (None, types[i]):
                return None
        elif what is not None:
            return None
    to = call.results_to()
    return None if to is NotImplemented else Specialization(call, types, others, looked, to)
