"""`DifferentiableFunction`: an operation of the caller's framework that calls a function of another framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dlx._api.shares_memory import collision, shares_memory
from dlx._core import native
from dlx._core.types import HOST, DType
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._support.reflect import foreign_error
from dlx._support.tracebacks import name_action
from dlx._using.function_spec import Place
from dlx.adapter.base import Adapter
from dlx.adapter.gradients import GradSupport, alone
from dlx.errors import ConversionError, DlxError, DTypeError

if TYPE_CHECKING:
    from dlx.typing import Readonly, Target

FEW = 100  # pairs of arrays up to which all pairs are compared; more are sorted by address
_EXACT = {native.lib.kDLInt, native.lib.kDLUInt, native.lib.kDLBool, native.lib.kDLOpaqueHandle}
Specs = list[tuple[tuple[int, ...], DType]]
Like = Callable[[Sequence[Any]], Specs]


class Placeholder:
    """A placeholder for an array in the containers of an operation. It is never read."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any = None) -> None:
        self.shape, self.dtype = shape, dtype

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("it has no memory")

    def __dlpack_device__(self) -> tuple[int, int]:
        return HOST.type, 0


class DifferentiableFunction:
    """An `Operation` of the caller's framework over a function of another framework that returns a list of arrays."""

    def __init__(
        self,
        function: Callable[..., list[Any]],
        request: Request,
        inner: GradSupport,
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
        inside, pairs = self._convert_in(arrays), enumerate(arrays)
        chosen = [i for i, each in pairs if (wanted is None or wanted[i]) and self._is_differentiable(each)]
        results, pull = _vjp(self._function, self._inner, inside, chosen)

        def pullback(gradients: Sequence[Any]) -> list[Any]:
            inner = [None if each is None else convert_one(each, self._request, ("gradient", ())) for each in gradients]
            found = self._convert_out(pull(inner), inner, self._caller.name)
            return fill([None] * len(arrays), chosen, found)

        return self._convert_out(results, inside, self._caller.name), pullback

    def derivative(
        self, gradients: Sequence[Any], wanted: Sequence[bool], state: Sequence[Any] = ()
    ) -> tuple[DifferentiableFunction, list[Any]]:
        """Return the operation (arguments, gradients of results, state) -> gradients, and its last two operands."""
        there = [i for i, each in enumerate(gradients) if each is not None]
        function, inner, every = self._function, self._inner, [None] * len(gradients)

        def start(inside: Sequence[Any], inputs: Sequence[Any], chosen: list[int]) -> Callable[[], Any]:
            return partial(_vjp(function, inner, inside, chosen)[1], fill(every, there, inputs))

        def like(operands: Sequence[Any]) -> Specs:
            return [self._spec_of(each) for each, is_one in zip(operands, wanted, strict=True) if is_one]

        return self._extend(start, like, "gradient", [gradients[i] for i in there], wanted, state)

    def pushforward(
        self, tangents: Sequence[Any], wanted: Sequence[bool], state: Sequence[Any] = ()
    ) -> tuple[DifferentiableFunction, list[Any]]:
        """Return the operation (arguments, tangents, state) -> tangents of results, and its last two operands."""
        function, jvp = self._function, self._inner.jvp
        if jvp is None:
            fix = "Use reverse mode, such as jax.grad or torch.func.grad."
            raise ConversionError(f"{self._request.target.name} has no forward-mode derivatives", fix=fix)

        def start(inside: Sequence[Any], inputs: Sequence[Any], chosen: list[int]) -> Callable[[], Any]:
            moved = jvp(_fix(function, inside, chosen), [inside[i] for i in chosen], inputs)[1]
            return lambda: moved

        return self._extend(start, self.results_like, "tangent", tangents, wanted, state)

    def _extend(
        self, start: Any, like: Like, what: str, inputs: Sequence[Any], wanted: Sequence[bool], state: Sequence[Any]
    ) -> tuple[DifferentiableFunction, list[Any]]:
        """Return a derivative, and its operands after the arguments; `start` runs in the call's random state."""
        inner, n, states = self._inner, len(inputs), len(state)

        def flat(*arrays: Any) -> list[Any]:
            last = len(arrays) - states
            inside, given, before = arrays[: last - n], arrays[last - n : last], arrays[last:]
            chosen = [i for i, array in enumerate(inside) if wanted[i] and inner.is_differentiable(array)]
            with inner.replayed(before):
                finish = start(inside, given, chosen)
            return list(finish())

        def specs(arrays: Sequence[Any]) -> Specs:
            return [spec for spec in like(arrays[: len(arrays) - n - states]) if spec[1].code not in _EXACT]

        return self._derive(flat, [(what, ())] * n + [("state", ())] * states, specs), [*inputs, *state]

    def batch(self, axes: Sequence[int | None], size: int) -> DifferentiableFunction:
        """Return the operation over arrays with an additional axis each (None: without)."""
        if self._inner.vmap is None:
            fix = "Call it for each element, or for the whole array outside of vmap."
            raise ConversionError(f"{self._request.target.name} cannot vectorize functions", fix=fix)

        def like(arrays: Sequence[Any]) -> Specs:
            pairs = list(zip(arrays, axes, strict=True))
            specs = [Placeholder(_without(each.shape, axis), each.dtype) for each, axis in pairs]
            return [((size, *shape), dtype) for shape, dtype in self.results_like(specs)]

        return self._derive(self._inner.vmap(self._function, axes), [], like)

    def compile(self) -> DifferentiableFunction:
        """Return an operation to run many times."""
        if self._inner.jit is None:
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
        state_of, function = self._inner.random_state, self._function
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

    def results_like(self, arrays: Sequence[Any]) -> Specs:
        """Return the shape and dtype of each result, using only those of `arrays`."""
        if self._like is not None:
            return self._like(arrays)
        if self._inner.eval_shape is None:
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
            name_action(error, "convert", ("detach", "readonly"))
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
