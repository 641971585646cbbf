"""Functions of other frameworks in programs that torch compiles, exports or transforms.

`dlx_torch_graph_operators` defines their node and operators; the import system runs it once, in one thread.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from dlx.adapter import GradSupport, Operation
from dlx.errors import ConversionError, DlxError


def is_tracing() -> bool:
    """Return whether torch traces or transforms what this thread computes."""
    inner = sys.modules["torch"]._C
    return bool(inner._len_torch_dispatch_stack() > 0 or inner._are_functorch_transforms_active())


def is_traced(tensor: Any) -> bool:
    """Return whether a tensor has no data because torch traces or transforms it."""
    torch = sys.modules["torch"]
    if is_abstract(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and forward.unpack_dual(tensor).tangent is not None:
        return True
    modes = torch._C._TorchDispatchModeKey
    return torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(modes.PROXY) is not None


def is_abstract(tensor: Any) -> bool:
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


@contextlib.contextmanager
def at_random_state(state: Any) -> Iterator[None]:
    """Return a context with a state of the host's generator."""
    random = sys.modules["torch"].random
    with random.fork_rng(devices=[]):
        random.set_rng_state(state)
        yield


replayed = GradSupport(lambda array: False, random_state=random_state, at_random_state=at_random_state).replayed


def refuse_batches(gradients: Sequence[Any]) -> None:
    """Refuse gradients of vectorized Jacobians, which have no memory."""
    is_batched = sys.modules["torch"]._C._functorch.is_legacy_batchedtensor
    if any(each is not None and is_batched(each) for each in gradients):
        raise ConversionError(
            "torch.autograd cannot vectorize functions of other frameworks",
            fix="Use torch.func.jacrev or torch.func.jacfwd, or leave out vectorize=True or is_grads_batched=True.",
        )


@_explained()
def record(operation: Operation, tensors: Sequence[Any], *draws: Any) -> list[Any]:
    """Call an operation so that torch can trace and transform it."""
    from dlx_adapters.dlx_torch_graph_operators import Draws, Traced

    return list(Traced.apply(operation, *(draws or (Draws(),)), *tensors))


@_explained()
def call_once(operation: Operation, tensors: Sequence[Any], detach: bool) -> list[Any]:
    """Call an operation, without derivatives, once per run of a traced program."""
    if not detach and sys.modules["torch"].is_grad_enabled() and any(each.requires_grad for each in tensors):
        reason = "torch records it for differentiation, and its gradients would be lost"
        fix = "Use dlx.using(..., detach=True) to drop them, or dlx.using(..., grad=True) to keep them."
        raise ConversionError(reason, source="torch", fix=fix)
    from dlx_adapters.dlx_torch_graph_operators import operators, register

    return list(operators.run([each.detach() for each in tensors], register(operation), operation.needs))


def is_inexact(tensor: Any) -> bool:
    """Return whether a tensor's dtype has gradients."""
    return bool(tensor.is_floating_point() or tensor.is_complex())
