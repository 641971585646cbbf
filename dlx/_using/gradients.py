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
from typing import TYPE_CHECKING, Any, cast

from dlx._api.shares_memory import collision, shares_memory
from dlx._core import native
from dlx._core.types import HOST, DType
from dlx._engine.compound import Compounds, name_of
from dlx._engine.executor import is_tracing
from dlx._engine.failures import Failures
from dlx._engine.planner import is_inside
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.tree import Tree
from dlx._registry.compound import CompoundHandler
from dlx._registry.lookup import TUPLE
from dlx._registry.registry import registry
from dlx._registry.target import Target as Framework
from dlx._support.reflect import foreign_error, type_name
from dlx._using.function_spec import FunctionSpec, Place, is_tracked
from dlx.adapter.base import Adapter
from dlx.adapter.gradients import GradSupport, alone
from dlx.errors import ConversionError, DlxError, DTypeError, path_text

if TYPE_CHECKING:
    from dlx.typing import Readonly, Target

FEW = 100  # pairs of arrays up to which all pairs are compared; more are sorted by address
_EXACT = {native.lib.kDLInt, native.lib.kDLUInt, native.lib.kDLBool, native.lib.kDLOpaqueHandle}
Specs = list[tuple[tuple[int, ...], DType]]
Like = Callable[[Sequence[Any]], Specs]


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
    call = RecordedCall(spec, function, request, tree, caller, args[: spec.skipped])
    like = None if spec.result_like is None else _DeclaredSpecs(spec, caller, call.result, args, options)
    try:
        return call.record([tree.arrays[i] for i in call.operands], like)
    finally:
        if like is not None:
            like.forget()


def call_traced(spec: FunctionSpec, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function in a program that its caller's framework traces, without derivatives; else NotImplemented."""
    tracing = [each for each in registry.adapters() if each.gradients and each.gradients.call and is_tracing(each)]
    if not tracing:
        return NotImplemented
    request = spec.request()
    failures = Failures(request.target.name, locate=spec.locate)
    tree = Tree((args[spec.skipped :], options), TUPLE, failures, strict=None, compounds=_Refusing(request.target.name))
    pairs = zip(tree.sources, tree.arrays, strict=True)
    callers = {source.name: source for source, array in pairs if source in tracing and is_tracked(source, array)}
    callers.pop(request.target.source.name, None)
    inner = request.target.adapter.gradients
    if len(callers) != 1 or (spec.result_like is None and (inner is None or inner.eval_shape is None)):
        return NotImplemented  # it has data, or the conversion raises an error
    ((name, caller),) = callers.items()
    used = {"lazy": spec.lazy, "returns": spec.returns, "writes": spec.writes, "device": request.device}
    if names := [name for name, value in used.items() if value]:
        reason = f"{name} traces the program, and {names[0]}= needs data"
        raise ConversionError(reason, target=request.target.name, fix=f"Leave out {names[0]}=, or call it outside.")
    call = RecordedCall(spec, function, request, tree, caller, args[: spec.skipped])
    like = None if spec.result_like is None else _DeclaredSpecs(spec, caller, call.result, args, options)
    operation = DifferentiableFunction(call, request, inner, caller, call.places, like)
    outer = caller.gradients
    assert outer is not None and outer.call is not None
    arrays = [tree.arrays[i] for i in call.operands]
    try:
        return call.result.rebuild(outer.call(operation, arrays, bool(spec.detach)))
    finally:
        if like is not None:
            like.forget()


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
        self, spec: FunctionSpec, function: Any, request: Request, tree: Tree, caller: Adapter, kept: tuple[Any, ...]
    ) -> None:
        self._function, self._request, self._caller, self._kept = function, request, caller, kept
        self._failures, self.result, arrays = tree.failures, _Result(caller.name), tree.arrays
        outside = [i for i, array in enumerate(arrays) if not is_inside(array, tree.sources[i], request.target)]
        self.operands = [i for i in outside if tree.sources[i] is caller]
        self.places = [spec.locate(tree.path(i)) for i in self.operands]
        self._constants = [i for i in outside if tree.sources[i] is not caller]
        self._parts = fill(arrays, self.operands, [None] * len(self.operands))
        for i in self._constants:  # copy, since they may change before the call is repeated
            self._parts[i] = convert_one(arrays[i], request, spec.locate(tree.path(i)), copy=True)
        what = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type_name(type(function)))}"
        self.needs = f"dlx, {request.target.name} and {what}"
        self._values = _without_arrays(tree, next(tree.nodes())[0], request.target.name)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Call the function with operands of its framework; return the arrays of its result."""
        target = self._request.target
        parts = fill(self._parts, self.operands, arrays)
        for i in () if target.adapter.arrays.immutable else self._constants:  # each call may write to its copies
            parts[i] = FAST_PATH(parts[i], cast("Target", target.adapter.name), copy=True)
        positional, named = Tree(self._values, TUPLE, self._failures).rebuild(parts, target.name)
        return self.result.take_arrays(self._function(*self._kept, *positional, **named), target.name)

    def record(self, arrays: Sequence[Any], like: Like | None) -> Any:
        """Let the caller's framework record the call with operands; return the result for the caller."""
        inner, outer = self._request.target.adapter.gradients, self._caller.gradients
        assert inner is not None and outer is not None and outer.record is not None
        operation = DifferentiableFunction(self, self._request, inner, self._caller, self.places, like)
        return self.result.rebuild(outer.record(operation, arrays))


class _DeclaredSpecs:
    """Shapes and dtypes of results, as declared with ``result_like=``."""

    def __init__(
        self, spec: FunctionSpec, caller: Adapter, result: _Result, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._shown, self._caller, self._result = spec.result_like, caller, result
        self._arguments, self._specs = (args, options), cast("Specs | None", None)

    def __call__(self, arrays: Sequence[Any]) -> Specs:
        """Return the shape and dtype of each result."""
        if self._specs is None:
            args, options = self._arguments
            shown = self._shown(*args, **options) if callable(self._shown) else self._shown
            self._specs = [
                (each.shape, each.dtype) for each in self._result.take_arrays(_abstract(shown, self._caller), "dlx")
            ]
        return self._specs

    def forget(self) -> None:
        """Release the arguments after the call; they may be tracers."""
        self._arguments = (), {}


class _Placeholder:
    """A placeholder for an array in the containers of an operation. It is never read."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any = None) -> None:
        self.shape, self.dtype = shape, dtype

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("it has no memory")

    def __dlpack_device__(self) -> tuple[int, int]:
        return HOST.type, 0


def _without_arrays(tree: Tree, values: Any, target: str) -> Any:
    """Return the containers of a tree with placeholders, since operations outlive calls; or unchanged."""
    try:
        return tree.rebuild([_Placeholder(tuple(getattr(array, "shape", ()))) for array in tree.arrays], target)
    except DlxError:
        return values


def _abstract(value: Any, caller: Adapter) -> Any:
    """Replace each object with a shape and a dtype by a tensor without memory."""
    if isinstance(value, dict):
        return {key: _abstract(each, caller) for key, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [_abstract(each, caller) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return value
    dtype = caller.dtypes.from_native(value.dtype) or DType(value.dtype)
    return native.tensor_new(16, tuple(value.shape), None, dtype, HOST, 0, None)  # never read


class _Result:
    """The containers of a function's result, without its arrays."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._value: Any = None
        self._paths: list[tuple[Any, ...]] | None = None  # of the first result's arrays, which later ones must match

    def take_arrays(self, value: Any, target: str) -> list[Any]:
        """Return the arrays of a result, in the order of the first result, whose containers are kept."""
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


class DifferentiableFunction:
    """An `Operation` of the caller's framework over a function of another framework that returns a list of arrays."""

    def __init__(
        self,
        function: Callable[..., list[Any]],
        request: Request,
        inner: GradSupport | None,
        caller: Adapter,
        places: list[Place],
        like: Like | None = None,
    ) -> None:
        self._function, self._request, self._inner, self._caller = function, request, inner, caller
        self.needs: str = getattr(function, "needs", "")
        self._places, self._like, self._readonly = places, like, cast("Readonly", request.readonly)
        assert caller.gradients is not None
        self._is_differentiable = caller.gradients.is_differentiable
        # A mutable caller gets copies of immutable arrays, unless readonly="share".
        constant = request.target.adapter.arrays.immutable and request.readonly == "copy"
        self._may_share = not caller.arrays.immutable and not constant

    def __call__(self, arrays: Sequence[Any], to: str | None = None) -> list[Any]:
        """Return the results without preparing gradients."""
        inside = self._convert_in(arrays)
        return self._convert_out(self._function(*inside), inside, to or self._caller.name)

    def vjp(
        self, arrays: Sequence[Any], wanted: Sequence[bool] | None = None
    ) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Return the results, and a function from their gradients to the gradients of the wanted arguments."""
        inside, chosen = self._convert_in(arrays), self._choose(arrays, wanted)
        results, pull = _vjp(self._function, self._inner, inside, chosen)

        def pullback(gradients: Sequence[Any]) -> list[Any]:
            inner = [None if each is None else convert_one(each, self._request, ("gradient", ())) for each in gradients]
            found: list[Any] = [None] * len(arrays)
            for i, new in zip(chosen, self._convert_out(pull(inner), inner, self._caller.name), strict=True):
                found[i] = new
            return found

        return self._convert_out(results, inside, self._caller.name), pullback

    def derivative(
        self, gradients: Sequence[Any], wanted: Sequence[bool] | None = None, state: Sequence[Any] = ()
    ) -> tuple[DifferentiableFunction, list[Any]]:
        """Return the operation (arguments, gradients of results, state) -> gradients, and its last two operands."""
        there = [i for i, each in enumerate(gradients) if each is not None]
        function, inner, n, states = self._function, self._inner, len(gradients), len(state)

        def flat(*arrays: Any) -> list[Any]:
            last = len(arrays) - states
            inside, inputs, before = arrays[: last - len(there)], arrays[last - len(there) : last], arrays[last:]
            chosen = [i for i, array in enumerate(inside) if inner.is_differentiable(array)]
            if wanted is not None:
                chosen = [i for i in chosen if wanted[i]]
            with inner.replayed(before):
                _, pull = _vjp(function, inner, inside, chosen)
            every: list[Any] = [None] * n
            for i, each in zip(there, inputs, strict=True):
                every[i] = each
            return list(pull(every))

        def like(arrays: Sequence[Any]) -> Specs:
            operands = arrays[: len(arrays) - len(there) - states]
            specs = [self._spec_of(each) for i, each in enumerate(operands) if wanted is None or wanted[i]]
            return [spec for spec in specs if _is_inexact(spec[1])]

        made = self._derive(flat, [("gradient", ())] * (len(there) + states), like)
        return made, [*(gradients[i] for i in there), *state]

    def pushforward(
        self, tangents: Sequence[Any], wanted: Sequence[bool], state: Sequence[Any] = ()
    ) -> tuple[DifferentiableFunction, list[Any]]:
        """Return the operation (arguments, tangents, state) -> tangents of results, and its last two operands."""
        function, inner, states, n = self._function, self._inner, len(state), len(tangents)
        if inner is None or inner.jvp is None:
            fix = "Use reverse mode, such as jax.grad or torch.func.grad."
            raise ConversionError(f"{self._request.target.name} has no forward-mode derivatives", fix=fix)
        jvp = inner.jvp

        def flat(*arrays: Any) -> list[Any]:
            last = len(arrays) - states
            inside, moved, before = arrays[: last - n], arrays[last - n : last], arrays[last:]
            chosen = [i for i, array in enumerate(inside) if wanted[i] and inner.is_differentiable(array)]
            with inner.replayed(before):
                over = _fix(function, inside, chosen)
                return list(jvp(over, [inside[i] for i in chosen], moved)[1])

        def like(arrays: Sequence[Any]) -> Specs:
            return [spec for spec in self.results_like(arrays[: len(arrays) - n - states]) if _is_inexact(spec[1])]

        return self._derive(flat, [("tangent", ())] * n + [("state", ())] * states, like), [*tangents, *state]

    def batch(self, axes: Sequence[int | None], size: int) -> DifferentiableFunction:
        """Return the operation over arrays with an additional axis each (None: without)."""
        if self._inner is None or self._inner.vmap is None:
            fix = "Call it for each element, or for the whole array outside of vmap."
            raise ConversionError(f"{self._request.target.name} cannot vectorize functions", fix=fix)

        def like(arrays: Sequence[Any]) -> Specs:
            pairs = list(zip(arrays, axes, strict=True))
            specs = [_Placeholder(_without(each.shape, axis), each.dtype) for each, axis in pairs]
            return [((size, *shape), dtype) for shape, dtype in self.results_like(specs)]

        return self._derive(self._inner.vmap(self._function, axes), [], like)

    def compile(self) -> DifferentiableFunction:
        """Return an operation to run many times."""
        if self._inner is None or self._inner.jit is None:
            return self
        return self._derive(self._inner.jit(self._function), [], self.results_like)

    def _derive(self, flat: Callable[..., list[Any]], places: list[Place], like: Like) -> DifferentiableFunction:
        """Return another operation of the same frameworks, with more operands."""
        places = [*self._places, *places]
        made = DifferentiableFunction(flat, self._request, self._inner, self._caller, places, like)
        made.needs = self.needs
        return made

    def replayable(self) -> tuple[DifferentiableFunction, int]:
        """Return an operation whose last results are the random states before and after it, and their number."""
        state_of, function = None if self._inner is None else self._inner.random_state, self._function
        if state_of is None:
            return self, 0

        def flat(*arrays: Any) -> list[Any]:
            with alone():
                before = state_of()
                return [*function(*arrays), before, state_of()]

        def like(arrays: Sequence[Any]) -> Specs:
            state = state_of()
            dtype = self._request.target.adapter.dtypes.from_native(state.dtype)
            assert dtype is not None
            return [*self.results_like(arrays), *[(tuple(state.shape), dtype)] * 2]

        return self._derive(flat, [], like), 2

    def _choose(self, arrays: Sequence[Any], wanted: Sequence[bool] | None) -> list[int]:
        """Return the indices of the arguments to differentiate by."""
        some = range(len(arrays)) if wanted is None else [i for i, is_one in enumerate(wanted) if is_one]
        return [i for i in some if self._is_differentiable(arrays[i])]

    def results_like(self, arrays: Sequence[Any]) -> Specs:
        """Return the shape and dtype of each result, using only those of `arrays`."""
        if self._like is not None:
            return self._like(arrays)
        if self._inner is None or self._inner.eval_shape is None:
            reason = f"{self._request.target.name} cannot determine the function's results without calling it"
            raise ConversionError(reason, fix="Pass result_like=, arrays with the shapes and dtypes of the results.")
        try:
            return self._inner.eval_shape(self._function, [self._spec_of(each) for each in arrays])
        except DlxError:
            raise
        except Exception as error:
            fix = "Pass result_like=, arrays with the shapes and dtypes of the results."
            raise foreign_error("the function cannot be tried without data:", error, fix=fix) from error

    def _spec_of(self, array: Any) -> tuple[tuple[int, ...], DType]:
        dtype = self._caller.dtypes.from_native(array.dtype)
        if dtype is None:
            raise DTypeError(f"DLPack has no dtype {array.dtype}", source=self._caller.name)
        return tuple(array.shape), dtype

    def _convert_in(self, arrays: Sequence[Any]) -> list[Any]:
        """Convert arguments to the function's framework."""
        return [convert_one(array, self._request, at) for array, at in zip(arrays, self._places, strict=True)]

    def _convert_out(self, results: Sequence[Any], inside: Sequence[Any], to: str) -> list[Any]:
        """Convert results; copy them if one shares memory with another, or with an array of `inside`."""
        try:
            made = [FAST_PATH(each, to, detach=True, readonly=self._readonly) for each in results]
            if self._may_share and _share_memory(made, inside):
                made = [FAST_PATH(each, to, detach=True, copy=True) for each in results]
            return made
        except DlxError as error:
            raise error.complete(root="result") from None


def _share_memory(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether an array of `some` shares memory with another array."""
    others = [each for each in others if each is not None]
    if len(some) * (len(some) + len(others)) > FEW:
        return collision(some, others) is not None
    return any(shares_memory(each, other) for i, each in enumerate(some) for other in (*some[:i], *others))


def _vjp(function: Callable[..., list[Any]], inner: GradSupport, arrays: Sequence[Any], chosen: list[int]) -> Any:
    """Differentiate a function by some of its arguments."""
    assert inner.vjp is not None
    return inner.vjp(_fix(function, arrays, chosen), [arrays[i] for i in chosen])


def _fix(function: Callable[..., list[Any]], arrays: Sequence[Any], chosen: list[int]) -> Callable[..., list[Any]]:
    """Return a function of some of the arguments; the others are constants."""
    return lambda *some: function(*fill(arrays, chosen, some))


def _is_inexact(dtype: DType) -> bool:
    """Return whether arrays of a dtype have gradients."""
    return dtype.code not in _EXACT


def _without(shape: Sequence[Any], axis: int | None) -> tuple[Any, ...]:
    """Return a shape without an axis."""
    return tuple(shape) if axis is None else tuple(n for i, n in enumerate(shape) if i != axis % len(shape))


def convert_one(
    array: Any, request: Request, at: Place | Callable[[], Place], to: str | None = None, *, copy: bool | None = None
) -> Any:
    """Convert one array for the function, or to the intermediate framework `to`."""
    target, readonly = cast("Target", to or request.target.adapter.name), cast("Readonly", request.readonly)
    try:
        return FAST_PATH(array, target, detach=True, readonly=readonly, copy=copy)
    except DlxError as error:
        if to is not None:
            return convert_one(array, request, at, copy=copy)  # its error names the function's framework
        root, path = at() if callable(at) else at
        raise error.complete(root=root, path=path) from None


def fill(parts: Sequence[Any], places: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
    """Return a copy of a list with arrays at some indices."""
    found = [*parts]
    for i, array in zip(places, arrays, strict=True):
        found[i] = array
    return found
