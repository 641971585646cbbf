"""torch operators for functions of other frameworks in its graphs: ``dlx::call``, and ``dlx::run`` with side effects.

`Traced` is the node of their derivatives.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from dlx.adapter import Operation
from dlx.errors import ConversionError
from dlx_adapters import dlx_torch_operators as own

torch: Any = sys.modules["torch"]
OPERATIONS: dict[int, Operation] = {}  # compiled programs refer to these numbers, and may run until the process ends
_DTYPES: dict[int, list[Any]] = {}  # of the results, as compiled programs expect them
_NUMBERS = itertools.count(1)


def register(operation: Operation) -> int:
    """Register an operation for a graph."""
    number = next(_NUMBERS)
    OPERATIONS[number] = operation.compile()
    return number


def _find(number: int, needs: str) -> Operation:
    try:
        return OPERATIONS[number]
    except KeyError:
        reason = f"it calls {needs}, which this process has not compiled"
        fix = "Export the program in this process, with dlx and the function's framework."
        raise ConversionError(reason, source="torch", fix=fix) from None


class Draws:
    """The random states before and after a call, if it ran; not a list, which torch.func would copy."""

    states: Sequence[Any] = ()


class Traced(torch.autograd.Function):  # type: ignore[misc]
    """A call of an operation, as an operator of the graph if torch traces."""

    @staticmethod
    def forward(operation: Operation, draws: Draws, *tensors: Any) -> Any:
        if not own.is_tracing():
            before = own.random_state()
            results = operation(tensors)
            draws.states = before, own.random_state()  # the function may draw random numbers
            return tuple(results)
        is_dual = torch.autograd.forward_ad._current_level >= 0 and not torch._C._are_functorch_transforms_active()
        if is_dual and not any(map(own.is_abstract, tensors)):
            fix = "Use torch.func.jvp, or torch.func.vjp."
            raise ConversionError("torch.func.linearize cannot trace functions of other frameworks", fix=fix)
        with torch._C._AutoDispatchBelowAutograd():  # otherwise it would call this node again
            return tuple(operators.call(list(tensors), register(operation), operation.needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operation, ctx.draws, *tensors = inputs
        ctx.exact = [not own.is_inexact(each) for each in output]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(each for each, is_one in zip(output, ctx.exact, strict=True) if is_one))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        own.refuse_batches(gradients)
        tensors = ctx.saved_tensors
        wanted = [is_one and own.is_inexact(of) for is_one, of in zip(ctx.needs_input_grad[2:], tensors, strict=True)]
        if not any(wanted) or all(each is None for each in gradients):
            return (None,) * (2 + len(tensors))
        derived, extra = ctx.operation.derivative(gradients, wanted)
        with own.replayed(ctx.draws.states):
            found = iter(own.record(derived, (*tensors, *extra)))
        return None, None, *(next(found) if is_one else None for is_one in wanted)

    @staticmethod
    def jvp(ctx: Any, _: Any, draws: Any, *tangents: Any) -> Any:
        tensors = ctx.saved_tensors
        wanted = [each is not None and own.is_inexact(of) for each, of in zip(tangents, tensors, strict=True)]
        moved = [each for each, is_one in zip(tangents, wanted, strict=True) if is_one]
        pushed, extra = ctx.operation.pushforward(moved, wanted)
        with own.replayed(ctx.draws.states):
            found = iter(own.record(pushed, (*tensors, *extra)))
        return tuple(None if is_one else next(found) for is_one in ctx.exact)

    @staticmethod
    def vmap(info: Any, axes: Any, operation: Operation, draws: Draws, *tensors: Any) -> Any:
        results = own.record(operation.batch(axes[2:], info.batch_size), tensors, draws)
        return tuple(results), (0,) * len(results)


def _check(results: list[Any], number: int) -> list[Any]:
    """Return results; raise if a compiled program expects other dtypes, by which it would read their memory."""
    found = [each.dtype for each in results]
    if found != (expected := _DTYPES.get(number, found)):
        fix = "Return the same dtypes in every call, those of result_like= if you pass it."
        raise ConversionError(f"the function returned {found}, expected {expected}", fix=fix)
    return results


def _run(tensors: Sequence[Any], number: int, needs: str) -> list[Any]:
    """Run an operation; its results are row-major, as those of `_fake`."""
    return _check([each.contiguous() for each in _find(number, needs)(tensors)], number)


def _record(tensors: Sequence[Any], number: int, needs: str) -> list[Any]:
    """Run an operation, which has derivatives if torch records or transforms it."""
    is_recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if is_recorded or own.is_tracing() or torch.autograd.forward_ad._current_level >= 0:
        return _check(own.record(_find(number, needs), tensors), number)
    return _run(tensors, number, needs)


def _fake(tensors: Sequence[Any], number: int, needs: str) -> list[Any]:
    """Return results without data, for the shapes that the operation states."""
    operation = _find(number, needs)
    device = tensors[0].device if tensors else None
    to_native = sys.modules["dlx_adapters.dlx_torch"].DTYPES.to_native
    specs = [(shape, to_native(dtype)) for shape, dtype in operation.results_like(tensors)]
    _DTYPES[number] = [dtype for _, dtype in specs]
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]


def _vmap(info: Any, axes: Any, tensors: Sequence[Any], number: int, needs: str) -> Any:
    """Run an operation on batches."""
    results = own.record(_find(number, needs).batch(axes[0], info.batch_size), tensors)
    return results, [0] * len(results)


_LIBRARY = torch.library.Library("dlx", "FRAGMENT")  # it removes its operators when it is collected
for _name in ("call", "run"):
    _LIBRARY.define(f"{_name}(Tensor[] tensors, int number, str needs) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dlx::{_name}", _fake, lib=_LIBRARY)
_LIBRARY.impl("call", _record, "Autograd")
_LIBRARY.impl("call", _record, "FuncTorchDynamicLayerFrontMode")  # torch.func, for exported programs
torch.library.register_vmap("dlx::run", _vmap, lib=_LIBRARY)
torch.library._register_effectful_op("dlx::run", torch._library.effects.EffectType.ORDERED)

operators = torch.ops.dlx
