"""torch operators for functions of other frameworks in programs that torch compiles, exports or transforms.

`torch.ops.dlx.call` is the node of a graph. `record` adds what the operator cannot express: forward-mode derivatives.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from dlx.adapter import GradSupport, Operation
from dlx.errors import ConversionError, DlxError

__all__ = ["backward", "call_once", "fake", "is_inexact", "is_traced", "is_tracing", "keep", "record", "run", "vmap"]

_OPERATIONS: dict[int, Operation] = {}  # compiled programs refer to these numbers, and may run until the process ends
_NUMBERS = itertools.count(1)


def is_tracing() -> bool:
    """Return whether torch traces or transforms what this thread computes."""
    inner = sys.modules["torch"]._C
    return bool(inner._len_torch_dispatch_stack() > 0 or inner._are_functorch_transforms_active())


def is_traced(tensor: Any) -> bool:
    """Return whether a tensor has no data because torch traces or transforms it."""
    torch = sys.modules["torch"]
    if _is_abstract(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and forward.unpack_dual(tensor).tangent is not None:
        return True
    modes = torch._C._TorchDispatchModeKey
    return torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(modes.PROXY) is not None


def _is_abstract(tensor: Any) -> bool:
    """Return whether a tensor stands for the tensors of a compiled program."""
    torch = sys.modules["torch"]
    kinds = torch._subclasses.FakeTensor | torch._subclasses.functional_tensor.FunctionalTensor
    return type(tensor) is not torch.Tensor and isinstance(tensor, kinds)


def _find_translator() -> Any:
    """Return what ``torch.compile`` translates in this thread; raise AttributeError or KeyError if it does not."""
    return sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Warn with the reason if ``torch.compile(fullgraph=True)`` fails, since torch drops it."""
    with contextlib.suppress(AttributeError, KeyError):
        if (translator := _find_translator()).export:
            for node in translator.output.graph.nodes:  # strict torch.export takes other constants for tensors
                if node.op == "get_attr" and not isinstance(
                    node.meta.get("example_value"), sys.modules["torch"].Tensor
                ):
                    node.meta.setdefault("val", None)
    try:
        yield
    except DlxError as error:
        with contextlib.suppress(AttributeError, KeyError):
            if _find_translator().one_graph:
                warnings.warn(f"torch.compile fails: {error}", stacklevel=2)
        raise


def random_state() -> Any:
    """Return the state of the host's generator."""
    return sys.modules["torch"].get_rng_state()


class _Draws:
    """The random states before and after a call, if it ran; not a list, which torch.func would copy."""

    states: Sequence[Any] = ()


@contextlib.contextmanager
def at_random_state(state: Any) -> Iterator[None]:
    """Return a context with a state of the host's generator."""
    random = sys.modules["torch"].random
    with random.fork_rng(devices=[]):
        random.set_rng_state(state)
        yield


replayed = GradSupport(lambda array: False, random_state=random_state, at_random_state=at_random_state).replayed


@_explained()
def record(operation: Operation, tensors: Sequence[Any], draws: _Draws | None = None) -> list[Any]:
    """Call an operation so that torch can trace and transform it."""
    return list(_node().apply(operation, _Draws() if draws is None else draws, *tensors))


@_explained()
def call_once(operation: Operation, tensors: Sequence[Any], detach: bool) -> list[Any]:
    """Call an operation, without derivatives, once per run of a traced program."""
    if not detach and sys.modules["torch"].is_grad_enabled() and any(each.requires_grad for each in tensors):
        reason = "torch records it for differentiation, and its gradients would be lost"
        fix = "Use dlx.using(..., detach=True) to drop them, or dlx.using(..., grad=True) to keep them."
        raise ConversionError(reason, source="torch", fix=fix)
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
        fix = "Export the program in this process, with dlx and the function's framework."
        raise ConversionError(reason, source="torch", fix=fix) from None


def _call(operation: Operation, draws: _Draws, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Call an operation, as a node of the graph if torch traces."""
    torch = sys.modules["torch"]
    if is_tracing():
        is_dual = torch.autograd.forward_ad._current_level >= 0 and not torch._C._are_functorch_transforms_active()
        if is_dual and not any(map(_is_abstract, tensors)):
            fix = "Use torch.func.jvp, or torch.func.vjp."
            raise ConversionError("torch.func.linearize cannot trace functions of other frameworks", fix=fix)
        return tuple(_operators().call(list(tensors), _number(operation), operation.needs))
    before = random_state()
    results = tuple(operation(tensors))
    draws.states = before, random_state()  # the function may draw random numbers
    return results


def _operators() -> Any:
    """Return the namespace of the operators, which the first import of their module defines in one thread."""
    from dlx_adapters.dlx_torch_graph_operators import operators

    return operators


def run(tensors: Sequence[Any], number: int, needs: str) -> list[Any]:
    """Run an operation."""
    return _find(number, needs)(tensors)


def fake(tensors: Sequence[Any], number: int, needs: str) -> list[Any]:
    """Return results without data, for the shapes that the operation states."""
    operation = _find(number, needs)
    device = tensors[0].device if tensors else None
    empty, to_native = sys.modules["torch"].empty, sys.modules["dlx_adapters.dlx_torch"].DTYPES.to_native
    return [empty(shape, dtype=to_native(dtype), device=device) for shape, dtype in operation.results_like(tensors)]


def vmap(info: Any, axes: Any, tensors: Sequence[Any], number: int, needs: str) -> Any:
    """Run an operation on batches."""
    results = record(_find(number, needs).batch(axes[0], info.batch_size), tensors)
    return results, [0] * len(results)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep what the backward pass needs."""
    tensors, ctx.number, ctx.needs = inputs
    ctx.save_for_backward(*tensors)
    ctx.wanted = [each.requires_grad for each in tensors]


def backward(ctx: Any, gradients: Sequence[Any]) -> Any:
    """Return the gradients of the tensors."""
    return _differentiate(_find(ctx.number, ctx.needs), (), ctx.saved_tensors, ctx.wanted, gradients), None, None


def _differentiate(
    operation: Operation, states: Sequence[Any], tensors: Sequence[Any], wanted: Sequence[bool], gradients: Any
) -> list[Any]:
    """Return the gradient of each tensor, or None."""
    wanted = [is_one and is_inexact(each) for each, is_one in zip(tensors, wanted, strict=True)]
    if not any(wanted) or all(each is None for each in gradients):
        return [None] * len(tensors)
    derived, extra = operation.derivative(gradients, wanted)
    with replayed(states):
        found = iter(record(derived, (*tensors, *extra)))
    return [next(found) if is_one else None for is_one in wanted]


def is_inexact(tensor: Any) -> bool:
    """Return whether a tensor's dtype has gradients."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


@functools.cache
def _node() -> Any:
    """Return the class of graph nodes for functions of other frameworks in transformed programs."""
    torch = sys.modules["torch"]

    class Traced(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(operation: Operation, draws: _Draws, *tensors: Any) -> Any:
            return _call(operation, draws, tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.operation, ctx.draws, *tensors = inputs
            ctx.exact = [not is_inexact(each) for each in output]
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.mark_non_differentiable(*(each for each, is_one in zip(output, ctx.exact, strict=True) if is_one))
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            wanted = ctx.needs_input_grad[2:]
            return None, None, *_differentiate(ctx.operation, ctx.draws.states, ctx.saved_tensors, wanted, gradients)

        @staticmethod
        def jvp(ctx: Any, _: Any, draws: Any, *tangents: Any) -> Any:
            tensors = ctx.saved_tensors
            wanted = [each is not None and is_inexact(of) for each, of in zip(tangents, tensors, strict=True)]
            moved = [each for each, is_one in zip(tangents, wanted, strict=True) if is_one]
            pushed, extra = ctx.operation.pushforward(moved, wanted)
            with replayed(ctx.draws.states):
                found = iter(record(pushed, (*tensors, *extra)))
            return tuple(None if is_one else next(found) for is_one in ctx.exact)

        @staticmethod
        def vmap(info: Any, axes: Any, operation: Operation, draws: _Draws, *tensors: Any) -> Any:
            results = record(operation.batch(axes[2:], info.batch_size), tensors, draws)
            return tuple(results), (0,) * len(results)

    return Traced
