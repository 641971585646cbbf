"""Gradients through `dlx.using` with ``grad=True``: calls of a function that another framework differentiates.

The call becomes an `Operation` of the caller's framework on a flat list of its arrays. That framework records the
operation (`GradSupport.record`) and requests gradients, which the function's framework computes (`GradSupport.vjp`). A
derivative is again an operation, so it can be differentiated as well.

A compiled function (``jax.jit``) has a compiled derivative for each structure of arguments, see `compiled`; other calls
use `call_recorded`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from dlx._core.types import DType
from dlx._engine.compound import Compounds, name_of
from dlx._engine.executor import is_tracing
from dlx._engine.failures import Failures
from dlx._engine.planner import is_inside
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.traced import settle
from dlx._engine.tree import Tree
from dlx._registry import lookup
from dlx._registry.compound import CompoundHandler
from dlx._registry.lookup import TUPLE
from dlx._registry.plugin import TRACING
from dlx._registry.registry import registry
from dlx._registry.target import Target as Framework
from dlx._support.reflect import type_name
from dlx._using.function_spec import FunctionSpec, is_tracked, map_leaves
from dlx._using.operation import DifferentiableFunction, Placeholder, convert_one, fill
from dlx.adapter.base import Adapter
from dlx.adapter.gradients import GradSupport
from dlx.errors import ConversionError, DlxError, path_text

if TYPE_CHECKING:
    from dlx.typing import Target

_NONE = GradSupport(lambda array: False)  # of frameworks without gradients


class _Refusing(Compounds):
    """Refuses sparse and ragged arrays: gradients of their values would not reach them."""

    def __init__(self, target: str) -> None:
        self._target = target

    def split(self, obj: Any, handler: CompoundHandler, nested: bool, is_root: bool) -> Any:
        kind = handler.kind_of(obj)
        fix = "Pass its dense arrays, such as .values(), and build the array in the function."
        reason = f"gradients do not pass through {kind} arrays"
        raise ConversionError(reason, source=name_of(obj), target=self._target, fix=fix)


def call_recorded(spec: FunctionSpec, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function as an operation that the caller's framework records; NotImplemented if it does not record."""
    request = spec.request()
    failures = Failures(request.target.name, locate=spec.locate)
    tree = Tree((args[spec.skipped :], options), TUPLE, failures, compounds=_Refusing(request.target.name))
    caller = _find_caller(tree, request.target)
    if caller is None:
        return NotImplemented
    call = RecordedCall(spec, function, request, tree, caller, args)
    assert caller.gradients is not None and caller.gradients.record is not None
    return call.run(caller.gradients.record, spec, args, options)


def call_traced(spec: FunctionSpec, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function in a program that its caller's framework traces, without derivatives; else NotImplemented."""
    tracing = [each for each in _find_tracers(registry.generation) if is_tracing(each)]
    if not tracing:
        return NotImplemented
    request = spec.request()
    failures = Failures(request.target.name, locate=spec.locate)
    tree = Tree((args[spec.skipped :], options), TUPLE, failures, strict=None, compounds=_Refusing(request.target.name))
    pairs = zip(tree.sources, tree.arrays, strict=True)
    callers = {source.name: source for source, array in pairs if source in tracing and is_tracked(source, array)}
    callers.pop(request.target.source.name, None)
    if len(callers) != 1:
        return NotImplemented  # it has data, or the conversion raises an error
    ((name, caller),) = callers.items()
    used = {"lazy": spec.lazy, "returns": spec.returns, "writes": spec.writes, "device": request.device}
    if names := [name for name, value in used.items() if value]:
        reason = f"{name} traces the program, and {names[0]}= needs data"
        raise ConversionError(reason, target=request.target.name, fix=f"Leave out {names[0]}=, or call it outside.")
    call = RecordedCall(spec, function, request, tree, caller, args)
    outer = caller.gradients
    assert outer is not None and outer.call is not None
    record = outer.call
    return call.run(lambda operation, arrays: record(operation, arrays, bool(spec.detach)), spec, args, options)


@lru_cache(maxsize=1)
def _find_tracers(generation: Any) -> list[Adapter]:
    """Return the adapters whose frameworks trace programs with calls of other frameworks."""
    return [each for each in registry.adapters() if each.gradients and each.gradients.call]


def _find_caller(tree: Tree, target: Framework) -> Adapter | None:
    """Return the framework, other than the function's, that records arguments, if any; raise if several do."""
    pairs = zip(tree.sources, tree.arrays, strict=True)
    callers = {source.name: source for source, array in pairs if is_tracked(source, array)}
    if not callers.keys() - {target.source.name}:
        return None
    if len(callers) > 1:
        raise ConversionError(
            f"{' and '.join(sorted(callers))} both record their arguments for differentiation",
            target=target.name,
            fix="Pass recorded arrays of one framework, and detach the others.",
        )
    ((name, caller),) = callers.items()
    inner, outer = target.adapter.gradients, caller.gradients
    if outer is None or outer.record is None:
        raise _gradient_error(f"{name} cannot use gradients of other frameworks", target.name)
    if inner is None or inner.vjp is None:
        raise _gradient_error(f"{target.name} cannot compute gradients for other frameworks", target.name)
    return caller


def _gradient_error(reason: str, target: str) -> ConversionError:
    return ConversionError(reason, target=target, fix="Use dlx.using(..., detach=True) to drop the gradients.")


class RecordedCall:
    """A call as a function of the caller's arrays only, which are its operands; it does not keep them alive."""

    def __init__(
        self, spec: FunctionSpec, function: Any, request: Request, tree: Tree, caller: Adapter, args: tuple[Any, ...]
    ) -> None:
        self._function, self._request, self._caller, self._kept = function, request, caller, args[: spec.skipped]
        self._failures, self.result, self._arrays = tree.failures, _Result(caller.name), tree.arrays
        outside = [i for i, array in enumerate(tree.arrays) if not is_inside(array, tree.sources[i], request.target)]
        self.operands = [i for i in outside if tree.sources[i] is caller]
        self.places = [spec.locate(tree.path(i)) for i in self.operands]
        self._constants = [i for i in outside if tree.sources[i] is not caller]
        self._parts = fill(tree.arrays, self.operands, [None] * len(self.operands))
        for i in self._constants:  # copy, since they may change before the call is repeated
            self._parts[i] = convert_one(tree.arrays[i], request, spec.locate(tree.path(i)), copy=True)
        what = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type_name(type(function)))}"
        self.needs = f"dlx, {request.target.name} and {what}"
        nodes = [*tree.nodes()]
        self._values = _without_arrays(tree, nodes[0][0], request.target.name)
        # Of each argument that is an array: whether it is named, its place, the array's number. None: containers.
        slots = (
            (is_named, place if keys is None else keys[place], ~link)
            for is_named, (_, _, keys, _, links) in enumerate(nodes[1:])
            for place, link in links.items()
        )
        self._slots = [*slots] if len(nodes) == 3 else None

    def __call__(self, *arrays: Any) -> list[Any]:
        """Call the function with operands of its framework; return the arrays of its result."""
        target = self._request.target
        parts = fill(self._parts, self.operands, arrays)
        for i in () if target.adapter.arrays.immutable else self._constants:  # each call may write to its copies
            parts[i] = FAST_PATH(parts[i], cast("Target", target.adapter.name), copy=True)
        if self._slots is None:
            positional, named = Tree(self._values, TUPLE, self._failures).rebuild(parts, target.name)
        else:
            both: tuple[Any, Any] = [*self._values[0]], {**self._values[1]}
            for is_named, place, number in self._slots:
                both[is_named][place] = parts[number]
            positional, named = both
        return self.result.take_arrays(self._function(*self._kept, *positional, **named), target.name)

    def run(
        self, record: Callable[..., Sequence[Any]], spec: FunctionSpec, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Let the caller's framework record the call with its operands; return the result for the caller."""
        arrays, self._arrays = [self._arrays[i] for i in self.operands], []
        like, tracing = None, is_tracing(self._caller)
        if tracing and self._caller.package in TRACING:
            self._values = settle(self._values)  # they are constants of the operation
        if spec.result_like is not None and tracing:  # computed now: it may use the tracers
            shown = spec.result_like(*args, **options) if callable(spec.result_like) else spec.result_like
            declared = self.result.take_arrays(map_leaves(shown, partial(_abstract, self._caller)), "dlx")
            specs = [(each.shape, each.dtype) for each in declared]
            like = lambda arrays: specs  # noqa: E731
        inner = self._request.target.adapter.gradients or _NONE
        operation = DifferentiableFunction(self, self._request, inner, self._caller, self.places, like)
        return self.result.rebuild(record(operation, arrays))


def _without_arrays(tree: Tree, values: Any, target: str) -> Any:
    """Return the containers of a tree with placeholders, since operations outlive calls; or unchanged."""
    try:
        return tree.rebuild([Placeholder(tuple(getattr(array, "shape", ()))) for array in tree.arrays], target)
    except DlxError:
        return values


def _abstract(caller: Adapter, value: Any) -> Any:
    """Replace an object with a shape and a dtype by a placeholder."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return value
    dtype = caller.dtypes.from_native(value.dtype) or DType(value.dtype)
    return Placeholder(tuple(value.shape), dtype)


def _as_array(value: Any) -> Any:
    """Return an array for a scalar of numpy, to which it reduces arrays without dimensions."""
    return value.__array__() if getattr(value, "shape", None) == () and hasattr(value, "__array_interface__") else value


class _Result:
    """The containers of a function's result, without its arrays."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._value: Any = None
        self._paths: list[tuple[Any, ...]] | None = None  # of the first result's arrays, which later ones must match

    def take_arrays(self, value: Any, target: str) -> list[Any]:
        """Return the arrays of a result, in the order of the first result, whose containers are kept."""
        if self._paths == [(0,)] and lookup.kind_of(value).verdict == "array":
            return [value]
        if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
            if hasattr(value, "close"):
                value.close()  # otherwise Python warns that it was never awaited
            what = type_name(type(value))
            raise ConversionError(
                f"the function returned a {what}; gradients are supported for functions that return once",
                fix="Decorate the coroutine or generator function itself, without grad=True.",
            )
        failures = Failures(target, locate=lambda path: ("result", path[1:]))
        tree = Tree((value,), TUPLE, failures, compounds=_Refusing(target))
        if self._paths is not None and len(tree.arrays) < len(self._paths):
            tree = Tree((map_leaves(value, _as_array),), TUPLE, failures, compounds=_Refusing(target))
        paths = [tree.path(i) for i in range(len(tree.arrays))]
        arrays = tree.arrays
        if self._paths is None:
            self._value, self._paths = _without_arrays(tree, (value,), self._caller), paths
        if paths == self._paths:
            return arrays
        if len(paths) != len(self._paths) or set(paths) != set(self._paths):
            expected, found = (
                ", ".join(path_text(path[1:], "result") for path in each) for each in (self._paths, paths)
            )
            raise ConversionError(
                f"the function returned arrays at {found}, expected {expected}",
                fix="Return the same containers in every call, those of result_like= if you pass it.",
            )
        return [arrays[paths.index(path)] for path in self._paths]

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Return the result with other arrays."""
        value, self._value = self._value, None
        return Tree(value, TUPLE, Failures(self._caller)).rebuild(list(arrays), self._caller)[0]
