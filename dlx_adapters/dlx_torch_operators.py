"""torch operators for functions of other frameworks in programs that torch compiles, exports or transforms.

`torch.ops.dlx.call` is the node of a graph. `record` adds what the operator cannot express: forward-mode derivatives.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from dlx.adapter import Operation
from dlx.errors import ConversionError

__all__ = ["call_once", "is_traced", "is_tracing", "record"]

_OPERATIONS: dict[int, Operation] = {}  # compiled programs refer to these numbers, and may run until the process ends
_NUMBERS = itertools.count(1)


def is_tracing() -> bool:
    """Return whether torch traces or transforms what this thread computes."""
    inner = sys.modules["torch"]._C
    return bool(inner._len_torch_dispatch_stack() > 0 or inner._are_functorch_transforms_active())


def is_traced(tensor: Any) -> bool:
    """Return whether a tensor has no data because torch traces or transforms it."""
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor:
        subclasses = torch._subclasses
        if isinstance(tensor, subclasses.FakeTensor | subclasses.functional_tensor.FunctionalTensor):
            return True
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    modes = torch._C._TorchDispatchModeKey
    return torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(modes.PROXY) is not None


def record(operation: Operation, tensors: Sequence[Any]) -> list[Any]:
    """Call an operation so that torch can trace and transform it."""
    return list(_node().apply(operation, *tensors))


def call_once(operation: Operation, tensors: Sequence[Any], detach: bool) -> list[Any]:
    """Call an operation, without derivatives, once per run of a traced program."""
    torch = sys.modules["torch"]
    if not detach and torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        reason = "torch records it for differentiation, and its gradients would be lost"
        fix = "Use dlx.using(..., detach=True) to drop them, or dlx.using(..., grad=True) to keep them."
        raise ConversionError(reason, source="torch", fix=fix)
    with torch.no_grad():
        return list(_operators().run([each.detach() for each in tensors], _number(operation), operation.needs))


def _number(operation: Operation) -> int:
    """Register an operation for a graph."""
    number = next(_NUMBERS)
    _OPERATIONS[number] = operation.compile()
    return number


def _find(number: int, needs: str) -> Operation:
    try:
        return _OPERATIONS[number]
    except KeyError:
        reason = f"it calls {needs}, which this process has not compiled"
        fix = "Compile or export the program in this process, with dlx and the function's framework."
        raise ConversionError(reason, source="torch", fix=fix) from None


def _call(operation: Operation, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Call an operation, as a node of the graph if torch traces."""
    if is_tracing():
        return tuple(_operators().call(list(tensors), _number(operation), operation.needs))
    return tuple(operation(tensors))


@functools.cache
def _operators() -> Any:
    """Define the operators, and return their namespace."""
    torch = sys.modules["torch"]
    library = torch.library.Library("dlx", "FRAGMENT")
    for name in ("call", "run"):
        library.define(f"{name}(Tensor[] tensors, int number, str needs) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
        library.impl(name, _run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dlx::{name}", _fake, lib=library)
        torch.library.register_vmap(f"dlx::{name}", _vmap, lib=library)
    torch.library.register_autograd("dlx::call", _backward, setup_context=_keep, lib=library)
    kinds = torch._library.effects.EffectType
    torch.library._register_effectful_op("dlx::run", kinds.ORDERED)
    torch.ops.dlx.library = library  # it removes its operators when it is collected
    return torch.ops.dlx


def _run(tensors: Sequence[Any], number: int, needs: str) -> list[Any]:
    return _find(number, needs)(tensors)


def _fake(tensors: Sequence[Any], number: int, needs: str) -> list[Any]:
    operation = _find(number, needs)
    device = tensors[0].device if tensors else None
    empty, to_native = sys.modules["torch"].empty, sys.modules["dlx_adapters.dlx_torch"].DTYPES.to_native
    return [empty(shape, dtype=to_native(dtype), device=device) for shape, dtype in operation.results_like(tensors)]


def _vmap(info: Any, axes: Any, tensors: Sequence[Any], number: int, needs: str) -> Any:
    batched = _find(number, needs).batch(axes[0], info.batch_size)
    results = record(batched, tensors)
    return results, [0] * len(results)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.number, ctx.needs = inputs
    ctx.save_for_backward(*tensors)
    ctx.wanted = [each.requires_grad for each in tensors]


def _backward(ctx: Any, gradients: Sequence[Any]) -> Any:
    return _differentiate(_find(ctx.number, ctx.needs), ctx.saved_tensors, ctx.wanted, gradients), None, None


def _differentiate(operation: Operation, tensors: Sequence[Any], wanted: Sequence[bool], gradients: Any) -> list[Any]:
    """Return the gradient of each tensor, or None."""
    wanted = [is_one and _is_inexact(each) for each, is_one in zip(tensors, wanted, strict=True)]
    if not any(wanted) or all(each is None for each in gradients):
        return [None] * len(tensors)
    derived, extra = operation.derivative(gradients, wanted)
    found = iter(record(derived, (*tensors, *extra)))
    return [next(found) if is_one else None for is_one in wanted]


def _is_inexact(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


@functools.cache
def _node() -> Any:
    """Return the class of graph nodes for functions of other frameworks in transformed programs."""
    torch = sys.modules["torch"]

    class Traced(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(operation: Operation, *tensors: Any) -> Any:
            return _call(operation, tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.operation, *tensors = inputs
            ctx.exact = [not _is_inexact(each) for each in output]
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.mark_non_differentiable(*(each for each, is_one in zip(output, ctx.exact, strict=True) if is_one))
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return None, *_differentiate(ctx.operation, ctx.saved_tensors, ctx.needs_input_grad[1:], gradients)

        @staticmethod
        def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
            tensors = ctx.saved_tensors
            wanted = [each is not None and _is_inexact(of) for each, of in zip(tangents, tensors, strict=True)]
            moved = [each for each, is_one in zip(tangents, wanted, strict=True) if is_one]
            pushed, extra = ctx.operation.pushforward(moved, wanted)
            found = iter(record(pushed, (*tensors, *extra)))
            return tuple(None if is_one else next(found) for is_one in ctx.exact)

        @staticmethod
        def vmap(info: Any, axes: Any, operation: Operation, *tensors: Any) -> Any:
            results = record(operation.batch(axes[1:], info.batch_size), tensors)
            return tuple(results), (0,) * len(results)

    return Traced
