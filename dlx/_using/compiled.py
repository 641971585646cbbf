"""Gradients through compiled functions (``jax.jit``): a compiled derivative for each structure of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from dlx._engine.executor import is_tracing
from dlx._engine.failures import Failures
from dlx._engine.planner import is_inside
from dlx._engine.tree import Tree
from dlx._registry import lookup
from dlx._registry.lookup import TUPLE
from dlx._registry.registry import registry
from dlx._using.function_spec import FunctionSpec, Place, is_tracked
from dlx._using.operation import DifferentiableFunction, convert_one, fill
from dlx.adapter.base import Adapter
from dlx.adapter.gradients import CompiledFunction
from dlx.errors import DlxError

MAX_KNOWN = 64  # structures of arguments whose derivatives are cached for one function
_NUMBERS = frozenset({int, float, complex})
_PLAIN = _NUMBERS | {bool, str, bytes, FunctionType}


class CompiledCalls:
    """Calls of one function with compiled derivatives; NotImplemented for calls that need `call_recorded`."""

    def __init__(self, spec: FunctionSpec, function: Any) -> None:
        self._spec, self._function = spec, function
        self._generation: Any = None
        self._compiled: CompiledFunction | None = None
        self._known: dict[Any, tuple[Callable[..., Any], list[Place]]] = {}
        self._met: dict[Any, None] = {}

    def __call__(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the function."""
        if self._generation != registry.generation:
            self._refresh()
        compiled = self._compiled
        if compiled is None:
            return NotImplemented
        leaves, structure = compiled.flatten((args, options))
        if (sorts := self._sort(leaves)) is None:
            return NotImplemented
        key, arrays, caller, tracked = sorts
        outer = caller.gradients
        if outer is None or outer.record is None or is_tracing(caller):
            return NotImplemented
        operands = [i for i, (what, _) in enumerate(arrays) if what is caller]
        by = [i for i in tracked if outer.is_differentiable(arrays[i][1])]
        inputs, locate = [arrays[i][1] for i in operands], partial(self._locate, args, options)
        known = self._find_vjp((structure, *key, caller.name, *by, None, *operands), leaves, by, inputs, locate)
        if known is None:
            return NotImplemented
        parts: list[Any] = [None] * len(arrays)
        for i, (what, array) in enumerate(arrays):
            if is_inside(array, what, self._request.target):
                parts[i] = array
            elif what is not caller:  # it may change before the backward pass
                parts[i] = convert_one(array, self._request, lambda: locate([array])[0], copy=True)  # noqa: B023

        def flat(*inputs: Any) -> list[Any]:
            rest = iter(fill(parts, operands, inputs))
            now, named = compiled.unflatten(structure, [next(rest) if leaf is None else leaf for leaf in leaves])
            return compiled.flatten(self._function(*now, **named))[0]

        vjp, places = known
        operation = CompiledCall(flat, self._request, self._gradients, caller, places)
        operation.vjp_of, operation.parts, operation.operands = vjp, parts, operands
        results = outer.record(operation, inputs)
        return compiled.unflatten(operation.structure, results)

    def _sort(self, leaves: list[Any]) -> tuple[list[Any], list[tuple[Adapter, Any]], Adapter, list[int]] | None:
        """Return the key of plain leaves, the arrays, the framework that tracks some, and these; None if unsupported.

        Replaces each array in `leaves` by None.
        """
        key: list[Any] = []
        arrays: list[tuple[Adapter, Any]] = []
        tracked: list[int] = []
        for i, leaf in enumerate(leaves):
            kind = type(leaf)
            found = lookup.kind(kind)
            what = found.part
            if isinstance(what, Adapter):
                if found.compounds and lookup.kind_of(leaf, found).verdict == "container":
                    return None
                if is_tracked(what, leaf):
                    tracked.append(len(arrays))
                arrays.append((what, leaf))
                leaves[i] = None
                key.append(None)
            elif kind in _PLAIN:
                key.append((kind, repr(leaf) if kind in _NUMBERS else leaf))  # 0.0 and -0.0 are equal
            else:
                return None
        callers = {id(arrays[i][0]) for i in tracked}
        if len(callers) != 1 or arrays[tracked[0]][0] is self._request.target.source:
            return None  # `call_recorded` raises the error
        return key, arrays, arrays[tracked[0]][0], tracked

    def _find_vjp(
        self, key: tuple[Any, ...], leaves: list[Any], by: list[int], inputs: list[Any], locate: Any
    ) -> tuple[Callable[..., Any], list[Place]] | None:
        """Return the compiled derivative, and the places of the inputs; None for numbers that do not repeat."""
        known = self._known.get(key)
        if known is None:
            has_numbers = any(type(each) in _NUMBERS for each in leaves)
            if has_numbers and key not in self._met:
                _add(self._met, key, None)
                return None
            assert self._compiled is not None
            known = self._compiled.vjp(key[0], leaves, by), locate(inputs)
            _add(self._known, key, known)
        return known

    def _refresh(self) -> None:
        """Look up the function's framework, and whether the function is compiled."""
        self._generation, self._compiled = registry.generation, None
        self._known.clear()
        self._request = self._spec.request()
        inner = self._request.target.adapter.gradients
        if inner is not None and inner.compile is not None and self._spec.result_like is None:
            self._gradients, self._compiled = inner, inner.compile(self._function)

    def _locate(self, args: tuple[Any, ...], options: dict[str, Any], arrays: list[Any]) -> list[Place]:
        """Return the places of arrays in the arguments."""
        tree = Tree((args[self._spec.skipped :], options), TUPLE, Failures(""), strict=None)
        found = {id(array): i for i, array in enumerate(tree.arrays)}
        return [self._spec.locate(tree.path(found[id(each)])) if id(each) in found else ("", ()) for each in arrays]


def _add(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an item to a dictionary of the last `MAX_KNOWN` items."""
    if len(known) >= MAX_KNOWN:
        known.pop(list(known)[0], None)  # noqa: RUF015 - list() is atomic, an iterator is not
    known[key] = value


class CompiledCall(DifferentiableFunction):
    """The operation of one call with a compiled derivative."""

    vjp_of: Callable[..., Any]
    parts: list[Any]
    operands: list[int]
    structure: Any = None

    def vjp(
        self, arrays: Sequence[Any], wanted: Sequence[bool] | None = None
    ) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Return the results, and a function from their gradients to the gradients of the arguments."""
        inputs = [convert_one(each, self._request, at, "dlx") for each, at in zip(arrays, self._places, strict=True)]
        try:
            results, self.structure, pull = self.vjp_of(fill(self.parts, self.operands, inputs))
        except DlxError:
            self._convert_in(arrays)  # raises an error with the argument's name
            raise
        operands, to = self.operands, self._caller.name

        def pullback(gradients: Sequence[Any]) -> list[Any]:
            def convert_all(to: str | None) -> list[Any]:
                at: Place = "gradient", ()
                return [None if each is None else convert_one(each, self._request, at, to) for each in gradients]

            inner = convert_all("dlx")
            try:
                found = pull(inner)
            except DlxError:
                convert_all(None)  # raises an error with the gradient's name
                raise
            there = [found[i] for i in operands]
            made = iter(self._convert_out([each for each in there if each is not None], [], to))
            return [None if each is None else next(made) for each in there]

        return self._convert_out(results, [], to), pullback
