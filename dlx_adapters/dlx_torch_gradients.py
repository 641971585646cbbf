"""Gradients for the PyTorch adapter: functions of other frameworks in torch's graph, and torch functions for others."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Sequence
from typing import Any
from weakref import ref

from dlx.adapter import DTypes, GradSupport, Operation
from dlx.errors import ConversionError
from dlx_adapters import dlx_torch_operators as operators

__all__ = ["support"]


def _is_tracked(tensor: Any) -> bool:
    return bool(tensor.requires_grad and sys.modules["torch"].is_grad_enabled()) or operators.is_traced(tensor)


def _vjp(function: Any, tensors: Sequence[Any]) -> tuple[Any, Any]:
    torch = sys.modules["torch"]
    with torch.inference_mode(mode=False), torch.enable_grad():
        normal = [each.clone() if each.is_inference() else each for each in tensors]
        operands = [each if each.requires_grad else each.detach().requires_grad_() for each in normal]
        is_outer = any(each.requires_grad for each in normal)
        results = function(*operands)

    def pullback(gradients: Sequence[Any]) -> list[Any]:
        both = zip(results, gradients, strict=True)
        pairs = [(result, each) for result, each in both if each is not None and result.requires_grad]
        if not (pairs and operands):
            return [torch.zeros_like(each) for each in operands]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            operands,
            [gradient for _, gradient in pairs],
            create_graph=torch.is_grad_enabled() and (is_outer or any(each.requires_grad for _, each in pairs)),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return list(found)

    return results, pullback


def _jvp(function: Any, tensors: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the results, and the tangents of the differentiable results."""
    torch = sys.modules["torch"]
    results: list[Any] = []

    def differentiable(*operands: Any) -> tuple[Any, ...]:
        results[:] = function(*operands)
        return tuple(filter(operators.is_inexact, results)) or operands[:1]  # torch fails without results

    is_outer = any(each.requires_grad for each in (*tensors, *tangents))
    with torch.inference_mode(mode=False):
        normal = [tuple(each.clone() if each.is_inference() else each for each in some) for some in (tensors, tangents)]
        _, moved = torch.autograd.functional.jvp(differentiable, *normal, create_graph=is_outer)
    return results, list(moved[: sum(map(operators.is_inexact, results))])


@functools.cache
def _node() -> Any:
    """Return the class of graph nodes for functions of other frameworks."""
    torch = sys.modules["torch"]

    class Using(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, operation: Operation, *tensors: Any) -> Any:
            wanted, before = ctx.needs_input_grad[1:], operators.random_state()
            results, pullback = operation.vjp(tensors, wanted)
            ctx.random = before, operators.random_state()  # the function may draw random numbers
            # Unlike attributes, saved tensors are released after backward, unless retain_graph is set.
            holder = torch.empty(0, device="cpu")
            holder.pullback = pullback
            ctx.operation, ctx.count, ctx.wanted = operation, len(tensors), wanted
            ctx.save_for_backward(holder, *tensors, *results)
            ctx.mark_non_differentiable(*(each for each in results if not operators.is_inexact(each)))
            ctx.set_materialize_grads(False)
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            operators.refuse_batches(gradients)
            holder, *saved = ctx.saved_tensors
            tensors = saved[: ctx.count]
            if all(each is None for each in gradients):
                return (None,) * (1 + len(tensors))
            if not torch.is_grad_enabled():
                pullback = getattr(holder, "pullback", None)
                if pullback is None:  # hooks replaced the holder: checkpoints, save_on_cpu
                    with operators.replayed(ctx.random):
                        _, pullback = ctx.operation.vjp(tensors, ctx.wanted)
                return None, *pullback(gradients)
            operation, operands = ctx.operation.derivative(gradients, ctx.wanted)
            with operators.replayed(ctx.random):
                found = iter(_record(operation, (*tensors, *operands)))
            pairs = zip(tensors, ctx.wanted, strict=True)
            return None, *(next(found) if wanted and operators.is_inexact(each) else None for each, wanted in pairs)

    return Using


def _record(operation: Operation, tensors: Sequence[Any]) -> Any:
    if operators.is_tracing() or any(map(operators.is_traced, tensors)):
        return operators.record(operation, tensors)
    return _node().apply(operation, *tensors)


def _eval_shape(dtypes: DTypes, function: Any, specs: Any) -> Any:
    torch = sys.modules["torch"]
    references: list[Any] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = operator(*args, **(kwargs or {}))
            parts = found if isinstance(found, tuple | list) else (found,)
            references.extend(ref(each) for each in parts if isinstance(each, torch.Tensor))
            return found

    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), Watch():
        results = function(*(torch.empty(shape, dtype=dtypes.to_native(dtype)) for shape, dtype in specs))
    found = [(tuple(each.shape), dtypes.from_native(each.dtype)) for each in results]
    results = None
    if any(each() is not None for each in references):
        gc.collect()
    leaked = [tensor for each in references if (tensor := each()) is not None]
    if leaked:
        keeper, tensor = next(((name, each) for each in leaked if (name := _keeper(each))), ("", leaked[0]))
        shown = f"{dtypes.from_native(tensor.dtype)}{list(tensor.shape)}"
        raise ConversionError(
            f"the function keeps a tensor of its trial run, which has no data ({shown}{keeper})",
            fix="Reset that tensor, then pass result_like= to avoid the trial run.",
        )
    return found


def _keeper(tensor: Any) -> str:
    """Return the module attribute that contains a tensor, for a message; or ``""``."""
    module = sys.modules["torch"].nn.Module
    for each in gc.get_objects():
        if not issubclass(type(each), module):
            continue
        for name, value in {**vars(each), **each._parameters, **each._buffers}.items():
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if name[0] != "_" and any(part is tensor for part in (value, *parts)):
                return f" in {type(each).__name__}.{name}"
    return ""


def support(dtypes: DTypes) -> GradSupport:
    """Return torch's `GradSupport`, given the dtypes of its adapter."""
    return GradSupport(
        _is_tracked,
        operators.is_inexact,
        _vjp,
        _record,
        functools.partial(_eval_shape, dtypes),
        jvp=_jvp,
        call=operators.call_once,
        random_state=operators.random_state,
        at_random_state=operators.at_random_state,
    )
