"""Gradients of functions that their users had compiled (``jax.jit``): the way there and the way back are compiled, too.

Each structure of arguments has its derivative, made once; a call does not trace, and takes no container apart by dlx.
Whatever needs more, such as an argument that is neither an array nor plain data, is left to `differentiated`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from dlx._containers.failures import Failures
from dlx._containers.lookup import TUPLE, what_is
from dlx._containers.tree import Tree
from dlx._engine.planner import is_inside
from dlx._registry.registry import registry
from dlx._using.function_spec import FunctionSpec, Place, tracked
from dlx._using.gradients import DifferentiableFunction, moved
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import CompiledFunction
from dlx.errors import DlxError

__all__ = ["CompiledCalls"]

MAX_KNOWN = 64  # structures of arguments whose derivatives are kept of one function
_NUMBERS = frozenset({int, float, complex})
_PLAIN = _NUMBERS | {bool, str, bytes, FunctionType}


class CompiledCalls:
    """Calls of one function, for callers that record; NotImplemented for those that need `differentiated`."""

    def __init__(self, spec: FunctionSpec, function: Any) -> None:
        self._spec, self._function = spec, function
        self._generation: Any = None
        self._compiled: CompiledFunction | None = None
        self._known: dict[Any, tuple[Callable[..., Any], list[Place]]] = {}
        self._met: set[Any] = set()
        self._kinds: dict[int, tuple[type, Any]] = {}  # address of a type -> it, and how it is treated

    def __call__(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the function.

        Raises
        ------
        DlxError
            If an argument or a result cannot be converted.
        """
        if self._generation != registry.generation:
            self._renew()
        compiled = self._compiled
        if compiled is None:
            return NotImplemented
        target = self._request.target
        leaves, structure = compiled.flatten((args, options))
        key, arrays, chosen = [structure], [], []
        caller, has_numbers = None, False
        for i, leaf in enumerate(leaves):
            kind = type(leaf)
            _, what = self._kinds.get(id(kind)) or self._look_up(kind)
            if isinstance(what, Adapter):
                leaves[i] = None
                if tracked(what, leaf):
                    if what is target.source or what is not (caller or what):
                        return NotImplemented  # which says why not
                    caller = what
                    chosen.append(True)
                else:
                    chosen.append(False)
                arrays.append((what, leaf))
                key.append(None)
            elif kind in _PLAIN:
                has_numbers = has_numbers or kind in _NUMBERS
                key.append((kind, repr(leaf) if kind in _NUMBERS else leaf))  # 0.0 and -0.0 are equal
            else:
                return NotImplemented
        if caller is None or caller.gradients is None or caller.gradients.record is None:
            return NotImplemented
        operands = [i for i, (what, _) in enumerate(arrays) if what is caller]
        is_differentiable = caller.gradients.is_differentiable
        by = [i for i, is_one in enumerate(chosen) if is_one and is_differentiable(arrays[i][1])]
        key += [caller.name, *by, None, *operands]
        where = tuple(key)
        known = self._known.get(where)
        if known is None:
            if has_numbers and where not in self._met:  # a number may be another one in each call
                if len(self._met) >= MAX_KNOWN:
                    self._met.clear()
                self._met.add(where)
                return NotImplemented
            known = compiled.vjp(structure, leaves, by), self._located(args, options, [arrays[i][1] for i in operands])
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[where] = known
        parts: list[Any] = [None] * len(arrays)
        for i, (what, array) in enumerate(arrays):
            if is_inside(array, what, target):
                parts[i] = array
            elif what is not caller:
                parts[i] = moved(array, self._request, ("", ()), copy=True)  # it may change meanwhile
        vjp, located = known

        def flat(*given: Any) -> list[Any]:
            rest = iter(_filled(parts, operands, given))
            now, named = compiled.unflatten(structure, [next(rest) if leaf is None else leaf for leaf in leaves])
            return compiled.flatten(self._function(*now, **named))[0]

        operation = CompiledCall(flat, self._request, self._gradients, caller, located)
        operation.vjp_of, operation.parts, operation.operands = vjp, parts, operands
        results = caller.gradients.record(operation, [arrays[i][1] for i in operands])
        return compiled.unflatten(operation.structure, results)

    def _look_up(self, kind: type) -> tuple[type, Any]:
        """Return a type and what `what_is` says of it."""
        if len(self._kinds) >= MAX_KNOWN:
            self._kinds.clear()
        found = self._kinds[id(kind)] = kind, what_is(kind)
        return found

    def _renew(self) -> None:
        """Look the function's framework up, and whether it says that the function is compiled."""
        self._generation, self._compiled = registry.generation, None
        self._known.clear()
        self._kinds.clear()
        self._request = self._spec.request()
        inner = self._request.target.adapter.gradients
        if inner is not None and inner.compile is not None and self._spec.result_like is None:
            self._gradients, self._compiled = inner, inner.compile(self._function)

    def _located(self, args: tuple[Any, ...], options: dict[str, Any], arrays: list[Any]) -> list[Place]:
        """Return where arrays stand among the arguments."""
        tree = Tree((args[self._spec.skipped :], options), TUPLE, Failures(""))
        found = {id(array): i for i, array in enumerate(tree.arrays)}
        return [self._spec.parameter(tree.path(found[id(each)])) if id(each) in found else ("", ()) for each in arrays]


def _filled(parts: Sequence[Any], places: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
    """Return a list with arrays put in some places."""
    found = [*parts]
    for i, array in zip(places, arrays, strict=True):
        found[i] = array
    return found


class CompiledCall(DifferentiableFunction):
    """The operation of one call.

    Attributes
    ----------
    vjp_of
        The compiled derivative.
    parts, operands
        The arrays of the function's framework, and the numbers of those that the caller gives.
    structure
        Of the results, once the function has run.
    """

    vjp_of: Callable[..., Any]
    parts: list[Any]
    operands: list[int]
    structure: Any = None

    def vjp(
        self, arrays: Sequence[Any], wanted: Sequence[bool] | None = None
    ) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Return the results, and what takes their gradients to those of the arguments."""
        given = [moved(each, self._request, at, "dlx") for each, at in zip(arrays, self._located, strict=True)]
        try:
            results, self.structure, pull = self.vjp_of(_filled(self.parts, self.operands, given))
        except DlxError:
            self._inside(arrays)  # says which one it is about
            raise
        operands, to = self.operands, self._caller.name

        def pullback(gradients: Sequence[Any]) -> list[Any]:
            given = [
                None if each is None else moved(each, self._request, ("gradient", ()), "dlx") for each in gradients
            ]
            found = pull(given)
            there = [found[i] for i in operands]
            made = iter(self._outside([each for each in there if each is not None], [], to))
            return [None if each is None else next(made) for each in there]

        return self._outside(results, [], to), pullback
