"""jax primitives for functions of other frameworks: calls with derivatives of any order, and calls with side effects.

One primitive represents a function, its tangents (`Operation.pushforward`) and its gradients (`Operation.derivative`).
The tangents and the gradients are linear in some operands, and each is the transpose of the other, so jax can
differentiate in every order and mode.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from dlx.adapter import DTypes, Operation
from dlx.errors import ConversionError, DTypeError

__all__ = ["call_once", "record"]


@dataclass(eq=False)
class _Step:
    """The parameter of the primitive: an operation, and how it is transposed if it is linear in some operands.

    An operation with side effects has no derivatives.
    """

    operation: Operation
    dtypes: DTypes
    avals: Sequence[Any] | None = None  # of the results; None: not known yet
    states: int = 0  # number of random states, the last results
    plain: Operation | None = None  # the operation without them
    linear: range = range(0)  # the operands in which it is linear
    adjoint: Callable[..., list[Any]] | None = None  # (operands, states, cotangents) -> cotangents of `linear`
    run: Callable[[Sequence[Any]], list[Any]] | None = None  # from concrete linear operands, without another run
    effects: Any = frozenset()

    def find_avals(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return shape and dtype of each result; refuse dtypes that jax would change."""
        if self.avals is None:
            jax, avals = sys.modules["jax"], []
            for shape, dtype in self.operation.results_like(operands):
                native = self.dtypes.to_native(dtype)
                if jax.dtypes.canonicalize_dtype(native) != native:
                    reason = f"a result is {dtype}, which jax would narrow to 32 bits because x64 is off"
                    fix = 'Return a smaller dtype, or call jax.config.update("jax_enable_x64", True) first.'
                    raise DTypeError(reason, target="jax", fix=fix)
                avals.append(jax.core.ShapedArray(shape, native))
            self.avals = avals
        return self.avals


def _let_jax_forget() -> None:
    """Have jax's caches refer to steps weakly, as to its own programs: steps hold graphs of other frameworks."""
    with contextlib.suppress(ImportError, AttributeError):  # else each cache keeps the last 2,048 steps
        sys.modules["jax"]._src.util.weakref_cache_key_types.add(_Step)


def is_tracer(array: Any) -> bool:
    """Return whether an array is traced by jax."""
    return isinstance(array, sys.modules["jax"].core.Tracer)


def is_inexact(array: Any) -> bool:
    """Return whether arrays of its dtype have gradients."""
    numpy = sys.modules["jax"].numpy
    return bool(numpy.issubdtype(array.dtype, numpy.inexact))


def conjugate(arrays: Sequence[Any]) -> list[Any]:
    """Convert gradients between the conventions of `GradSupport` and jax."""
    return [each.conj() if each is not None and each.dtype.kind == "c" else each for each in arrays]


def commit_like(results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Return results, moved to the operands' device if an operand is committed."""
    devices = {each.device for each in operands if _is_committed(each)}
    return sys.modules["jax"].device_put([*results], devices.pop()) if len(devices) == 1 else [*results]


def _is_committed(array: Any) -> bool:
    known = isinstance(array, sys.modules["jax"].Array) and not is_tracer(array)
    return known and array.committed and len(array.sharding.device_set) == 1


def as_arrays(objs: Sequence[Any]) -> list[Any]:
    """Return a function's arguments as arrays; jax may pass Python numbers."""
    jax = sys.modules["jax"]
    return [each if isinstance(each, jax.Array) else jax.numpy.asarray(each) for each in objs]


def fill(parts: Sequence[Any], places: Iterable[int], arrays: Sequence[Any]) -> list[Any]:
    """Return a copy of a list with arrays at some indices."""
    found = [*parts]
    for i, array in zip(places, arrays, strict=True):
        found[i] = array
    return found


def record(dtypes: DTypes, operation: Operation, arrays: Sequence[Any]) -> list[Any]:
    """Call an operation so that jax can transform it."""
    replayable, states = operation.replayable()
    results = _primitive().bind(*arrays, step=_Step(replayable, dtypes, states=states, plain=operation))
    return list(results[: len(results) - states])


@functools.cache
def _primitive() -> Any:
    """Return the primitive for functions of other frameworks."""
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir, partial_eval

    _let_jax_forget()
    primitive = Primitive("dlx_call")
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_effectful_abstract_eval(lambda *avals, step: (step.find_avals(avals), step.effects))
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.primitive_batchers[primitive] = _batch
    mlir.register_lowering(primitive, _lower, cacheable=False)
    partial_eval.dce_rules[primitive] = _drop_states
    return primitive


def _run(*operands: Any, step: _Step) -> list[Any]:
    if step.run is not None:
        return step.run([operands[i] for i in step.linear])
    return commit_like(step.operation(as_arrays(operands)), operands)


def _lower(context: Any, *operands: Any, step: _Step) -> Any:
    """Call the host. `jax.pure_callback` would create jax arrays there, which takes longer and can deadlock."""
    from jax.interpreters import mlir

    if getattr(context.module_context.axis_context, "num_devices", 1) != 1:
        reason = "the program runs on several devices, with sharded or replicated arrays"
        raise ConversionError(
            reason, source="jax", fix="Pass arrays on one device, as jax.device_put(x, jax.devices()[0])."
        )

    def call(*arrays: Any) -> list[Any]:
        return step.operation([*map(_as_writable, arrays)], "numpy")

    pair = context.avals_in, context.avals_out
    return mlir.emit_python_callback(context, call, None, operands, *pair, has_side_effect=bool(step.effects))[0]


def _as_writable(array: Any) -> Any:
    """Return a numpy array of a callback as an array that may outlive the callback, and be written to."""
    if not array.flags.owndata:
        return array.copy()
    array.flags.writeable = True  # only the callback refers to it
    return array


def _drop_states(used: Sequence[bool], equation: Any) -> Any:
    """Leave the random states out of a program that does not run the operation again, and the unused call itself."""
    step, count = equation.params["step"], len(used)
    if not any(used) and not step.effects:
        return [False] * len(equation.invars), None
    if step.states and not any(used[count - step.states :]):
        kept = slice(count - step.states)
        avals = None if step.avals is None else step.avals[kept]
        step = replace(step, operation=step.plain, plain=None, states=0, avals=avals)
        equation = equation.replace(outvars=equation.outvars[kept], params={"step": step})
    return [True] * len(equation.invars), equation


def _batch(args: Sequence[Any], axes: Sequence[int | None], *, step: _Step) -> Any:
    """Call the operation for each element, since each may draw its own random numbers."""
    jax, primitive = sys.modules["jax"], _primitive()
    mapped = [i for i, axis in enumerate(axes) if axis is not None]
    if not {*mapped} <= {*step.linear}:
        step = replace(step, run=None)
    rows = [jax.numpy.moveaxis(args[i], axes[i], 0) for i in mapped]

    def call(parts: Sequence[Any]) -> Any:
        return primitive.bind(*fill(args, mapped, parts), step=step)

    if not rows[0].shape[0] or any(map(is_tracer, args)):
        results = jax.lax.map(call, rows)
    else:
        results = [jax.numpy.stack(each) for each in zip(*map(call, zip(*rows, strict=True)), strict=True)]
    return results, [0] * len(results)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, step: _Step) -> Any:
    from jax.interpreters import ad

    if step.effects:
        reason = "jax records it for differentiation, and its gradients would be lost"
        fix = "Use dlx.using(..., detach=True) to drop them, or dlx.using(..., grad=True) to keep them."
        raise ConversionError(reason, source="jax", fix=fix)
    is_zero = [type(each) is ad.Zero for each in tangents]
    wanted = [not zero and is_inexact(each) for each, zero in zip(primals, is_zero, strict=True)]
    moved = [each for each, is_one in zip(tangents, wanted, strict=True) if is_one]
    run = None
    if any(map(is_tracer, moved)) and not any(map(is_tracer, primals)):  # one run for the results and the gradients
        with sys.modules["jax"].core.eval_context():  # otherwise the tangents' trace records what this computes
            results, pullback = step.operation.vjp(as_arrays(primals), wanted)
            results = commit_like(results, primals)
        count, held = len(results), [each for each in primals if _is_committed(each)]

        def run(there: list[int], given: Sequence[Any]) -> list[Any]:
            found = pullback(fill([None] * count, there, given))
            return commit_like([each for each, is_one in zip(found, wanted, strict=True) if is_one], held)

    else:
        results = _primitive().bind(*primals, step=step)
    state, avals = results[len(results) - step.states :], [sys.modules["jax"].typeof(each) for each in results]
    pair = _Linear(step, primals, avals, wanted, state, run)
    found = iter(pair.push(moved) if moved else ())
    zero = cast("Any", ad.Zero)
    return results, [next(found) if moved and is_inexact(each) else zero(each.to_tangent_aval()) for each in avals]


def _transpose(cotangents: Sequence[Any], *operands: Any, step: _Step) -> list[Any]:
    from jax.interpreters import ad

    if step.adjoint is None:
        raise ConversionError("it is not linear in its arguments", fix="Use jax.vjp instead of jax.linear_transpose.")
    given = [None if type(each) is ad.Zero else each for each in cotangents]
    rest = operands[: step.linear.start], operands[step.linear.stop :]
    return fill([None] * len(operands), step.linear, step.adjoint(*rest, given))


@dataclass(eq=False)
class _Linear:
    """The tangents and gradients of one operation at some operands, which are transposes of each other."""

    step: _Step
    operands: Sequence[Any]
    avals: Sequence[Any]  # of the results
    wanted: Sequence[bool]  # the operands with tangents
    state: Sequence[Any]
    run: Callable[[list[int], Sequence[Any]], list[Any]] | None  # returns the gradients without another run

    def push(self, tangents: Sequence[Any]) -> list[Any]:
        """Return the tangents of the differentiable results."""
        operation, extra = self.step.operation.pushforward(tangents, self.wanted, self.state)
        avals, free = [each for each in self.avals if is_inexact(each)], replace(self, operands=(), state=())

        def adjoint(operands: Sequence[Any], state: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            rest = iter(cotangents)
            given = [next(rest) if is_inexact(each) else None for each in free.avals]
            return replace(free, operands=operands, state=state).pull(given)

        return self._bind(operation, extra, avals, len(tangents), adjoint, None)

    def pull(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of the wanted operands."""
        wanted, there = self.wanted, [i for i, each in enumerate(gradients) if each is not None]
        operation, extra = self.step.operation.derivative(conjugate(gradients), wanted, self.state)
        avals = [sys.modules["jax"].typeof(each) for each, is_one in zip(self.operands, wanted, strict=True) if is_one]
        free = replace(self, operands=(), state=(), run=None)
        run = None if self.run is None else functools.partial(self.run, there)

        def adjoint(operands: Sequence[Any], state: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            zeros = sys.modules["jax"].numpy.zeros
            pairs = zip(cotangents, avals, strict=True)
            tangents = [zeros(aval.shape, aval.dtype) if each is None else each.conj() for each, aval in pairs]
            found = replace(free, operands=operands, state=state).push(tangents)
            places = [i for i, each in enumerate(free.avals) if is_inexact(each)]
            return conjugate([found[places.index(i)] for i in there])

        return conjugate(self._bind(operation, extra, avals, len(there), adjoint, run))

    def _bind(
        self, operation: Operation, extra: Sequence[Any], avals: Sequence[Any], linear: int, adjoint: Any, run: Any
    ) -> list[Any]:
        first = len(self.operands)
        step = _Step(
            operation,
            self.step.dtypes,
            avals,
            linear=range(first, first + linear),
            adjoint=adjoint,
            run=run,
        )
        return list(_primitive().bind(*self.operands, *extra, step=step))


def call_once(dtypes: DTypes, operation: Operation, arrays: Sequence[Any], detach: bool) -> Any:
    """Call an operation, without derivatives, once per run of a traced program."""
    given = [sys.modules["jax"].lax.stop_gradient(each) if detach else each for each in arrays]
    return _primitive().bind(*given, step=_Step(operation, dtypes, effects=_effects()))


@functools.cache
def _effects() -> Any:
    """Return the effects of jax's own callbacks with side effects."""
    from jax.experimental import io_callback

    return sys.modules["jax"].make_jaxpr(lambda: io_callback(lambda: None, None))().effects
