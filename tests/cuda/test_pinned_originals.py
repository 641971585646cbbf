"""The published torch and cupy on the recording driver: pinned results, and moves that the host does not wait for."""

from __future__ import annotations

import gc

import pytest
from support.cuda import originals
from support.cuda.originals import pending

import dlx
from dlx._core.cuda import where

N = 64

cuda, torch, cupy = originals.cuda, originals.torch, originals.cupy  # fixtures


def address_of(array):
    """Return the address of an array of either framework."""
    return array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr


@pytest.mark.parametrize("to", ["torch", "cupy"])
@pytest.mark.parametrize("kind", ["numpy", "strided", "torch", "torch cuda", "cupy", "dlx"])
def test_results_are_pinned(cuda, torch, cupy, np, to, kind):
    """From the host and the device, by the framework's own allocator; the plan agrees."""
    whole = np.arange(2 * N, dtype="float32")
    source = {
        "numpy": lambda: whole[:N],
        "strided": lambda: whole[::-2],
        "torch": lambda: torch.from_numpy(whole),
        "torch cuda": lambda: torch.from_numpy(whole).cuda(),
        "cupy": lambda: cupy.asarray(whole),
        "dlx": lambda: dlx.convert(whole, to="dlx", device="cuda"),
    }[kind]()
    plan = dlx.plan(source, to, device="cuda_host")
    result = dlx.convert(source, to=to, device="cuda_host")
    assert (plan.outcome, str(plan.device), type(result).__module__.partition(".")[0]) == ("copied", "cuda_host:0", to)
    assert where(address_of(result)).name == "cuda_host"
    assert to == "cupy" or (result.is_pinned() and result.device.type == "cpu")
    wanted = dlx.convert(source, to="numpy").tobytes()
    assert cuda.peek(address_of(result), len(wanted)) == wanted


def test_a_pinned_tensor_is_shared(cuda, torch):
    """It is pinned already; torch's own `pin_memory` returns it, too."""
    tensor = torch.arange(N).pin_memory()
    assert dlx.plan(tensor, "torch", device="cuda_host").outcome == "shared"
    assert dlx.convert(tensor, to="torch", device="cuda_host", copy=False).data_ptr() == tensor.data_ptr()
    assert dlx.convert(tensor, to="torch", device="cuda_host", copy=True).is_pinned()


@pytest.mark.parametrize("to", ["torch", "cupy"])
def test_the_source_of_a_move_lives_until_it_is_done(cuda, torch, cupy, to):
    """Torch's pinned allocator gets the memory back after the copy, though only dlx knows of it."""
    stream = torch.cuda.Stream()
    shared = cupy.cuda.Stream.from_external(stream)
    source = torch.arange(N, dtype=torch.float32).pin_memory()
    where_it_was = source.data_ptr()
    with torch.cuda.stream(stream), shared:
        cuda.stall(stream.cuda_stream)
        blocked = cuda.blocked
        result = dlx.convert(source, to=to, device="cuda", wait=False)
        assert cuda.blocked == blocked, "the host waited"
        del source
        gc.collect()
        others = [torch.empty(N).pin_memory() for _ in range(3)]
        assert pending() == 1 and where_it_was not in [each.data_ptr() for each in others]
    cuda.resume_all()
    dlx.release_pending()
    assert pending() == 0
    values = dlx.convert(result, to="numpy")
    assert values.tolist() == [*range(N)]


def test_a_dropped_result_lives_until_the_copy_is_done(cuda, torch):
    """Else torch would give the pinned memory to the next tensor, which the copy overwrites."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        source = torch.zeros(N, device="cuda")
        dlx.convert(source, to="torch", device="cuda_host")
        cuda.stall(stream.cuda_stream)
        result = dlx.convert(source, to="torch", device="cuda_host", wait=False)
    address = result.data_ptr()
    del result
    gc.collect()
    others = [torch.empty(N).pin_memory() for _ in range(3)]
    assert pending() and address not in [each.data_ptr() for each in others]
    cuda.resume_all()
    dlx.release_pending()
    assert pending() == 0
