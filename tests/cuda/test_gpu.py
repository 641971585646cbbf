"""On a real CUDA device: `pytest -m gpu`. Skipped without one. docs/gpu.md has the results and the machines.

Shared memory, kinds of memory, moves; test_gpu_order.py has streams, lifetimes and captures.
"""

from __future__ import annotations

import importlib.util
import os
import threading

import pytest
from support.cuda.real_gpu import N, cupy, gpu, jax, quiet, torch  # noqa: F401
from support.processes.memory import resident
from support.repository import pages

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx.errors import CopyRequiredError, DeviceError, DTypeError

pytestmark = pytest.mark.gpu


# ---- the driver alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, -3])
def test_there_and_back_without_a_framework(np, step):
    """Dlx's memory, with strided sources; the plan has the bytes."""
    source = np.arange(120, dtype="int32").reshape(10, 12)[:, ::step]
    plan = dlx.plan(source, "dlx", device="cuda")
    there = dlx.convert(source, to="dlx", device="cuda")
    assert (plan.outcome, plan.nbytes, plan.device) == ("copied", source.nbytes, there.device)
    assert there.device == (2, 0) and np.array_equal(dlx.convert(there, to="numpy"), source)
    with pytest.raises(CopyRequiredError, match="cuda:0"):
        dlx.convert(there, to="numpy", copy=False)


def test_devices():
    """They have names."""
    found = dlx.devices()
    assert found[dlx.Device("cuda")] and len(found) > 1


def test_memory_of_its_own():
    """dlx.empty on the device; a copy on it; an unknown device."""
    tensor = dlx.empty((4, N // 4), "float32", device="cuda:0")
    assert driver.where(tensor.data_ptr) == tensor.device == (2, 0)
    assert dlx.convert(tensor, to="dlx", copy=True).data_ptr != tensor.data_ptr
    with pytest.raises(DeviceError):
        dlx.empty(4, "float32", device="cuda:63")


def test_too_much_memory():
    """The driver's message; existing memory stays valid."""
    with pytest.raises(DeviceError, match="bytes on cuda:0 failed with CUDA_ERROR"):
        dlx.empty(1 << 46, "uint8", device="cuda")
    assert dlx.empty(16, "uint8", device="cuda").device == (2, 0)


def test_moves_leak_nothing(np):
    """Neither memory of the device nor of the process, over 2000 moves of a megabyte."""
    source = np.zeros(1 << 18, dtype="float32")

    def both(times):
        for _ in range(times):
            dlx.convert(dlx.convert(source, to="dlx", device="cuda"), to="numpy")
        assert quiet() == 0

    both(50)
    live, before = native.live(), resident()
    both(2000)
    assert native.live() == live
    assert resident() - before < 16 << 20


def test_exit_with_memory_in_every_state(python):
    """The process exits normally: with live, exported and pending memory."""
    env = {name: value for name, value in os.environ.items() if name != "DLX_CUDA_DRIVER"}
    python(
        """
        import dlx
        held = dlx.empty(1 << 20, "float32", device="cuda")
        capsule = held.__dlpack__(stream=1, max_version=(1, 0))
        class Cycle: pass
        cycle = Cycle(); cycle.own, cycle.held = cycle, dlx.convert(held, to="dlx", copy=True)
        """,
        env=env,
    )


def test_a_forked_child_leaves_the_driver_alone(python):
    """The error says to use 'spawn'; inherited memory is released without the driver."""
    env = {name: value for name, value in os.environ.items() if name != "DLX_CUDA_DRIVER"}
    out = python(
        """
        import os, warnings, dlx
        warnings.simplefilter("ignore")  # the driver has threads, which fork does not like
        held = dlx.empty(1 << 20, "float32", device="cuda")
        if os.fork() == 0:
            try:
                dlx.empty(4, "float32", device="cuda")
            except dlx.errors.DeviceError as error:
                print("spawn" in str(error), flush=True)
            del held
            os._exit(0)
        os.wait()
        assert dlx.convert(held, to="dlx", copy=True).device == (2, 0)
        """,
        args=(),
        env=env,
    )
    assert out.split() == ["True"]


# ---- shared by address -----------------------------------------------------------------------------------------------


def test_torch_and_cupy(torch, cupy):  # noqa: F811
    """In both directions, with views."""
    tensor = torch.arange(12, dtype=torch.float32, device="cuda").reshape(3, 4)
    array = dlx.convert(tensor.T, to="cupy", copy=False)
    assert array.data.ptr == tensor.data_ptr() and array.T.tolist() == tensor.tolist()
    back = dlx.convert(array[::2], to="torch", copy=False)
    assert back.data_ptr() == tensor.data_ptr() and back.tolist() == tensor.T[::2].tolist()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int64", "uint8", "bool", "complex64"])
def test_torch_and_dlx(torch, name):  # noqa: F811
    """In both directions, with each dtype."""
    tensor = torch.ones(5, dtype=getattr(torch, name), device="cuda")
    middle = dlx.convert(tensor, to="dlx")
    back = dlx.convert(middle, to="torch", copy=False)
    assert middle.data_ptr == back.data_ptr() == tensor.data_ptr() and back.tolist() == tensor.tolist()


def test_cupy_and_dlx(cupy):  # noqa: F811
    """In both directions; reversed, which torch does not support."""
    array = cupy.arange(12, dtype="int16")[::-1]
    middle = dlx.convert(array, to="dlx", copy=False)
    back = dlx.convert(middle, to="cupy", copy=False)
    assert middle.data_ptr == back.data.ptr == array.data.ptr and back.tolist() == array.tolist()


def test_torch_and_jax(torch, jax):  # noqa: F811
    """To jax by address; from jax, read-only if jax says so."""
    tensor = torch.arange(N, dtype=torch.float32, device="cuda")
    array = dlx.convert(tensor, to="jax", copy=False)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() and float(array[N - 1]) == N - 1
    array = jax.device_put(jax.numpy.arange(12.0).reshape(3, 4), jax.local_devices(backend="cuda")[0])
    shared = dlx.convert(array, to="torch", readonly="share")
    assert shared.data_ptr() == array.unsafe_buffer_pointer() and shared.tolist() == array.tolist()
    copied = dlx.convert(array, to="torch")
    assert copied.data_ptr() != shared.data_ptr() and copied.tolist() == array.tolist()
    assert dlx.convert(array, to="dlx").data_ptr == array.unsafe_buffer_pointer()


@pytest.mark.parametrize("start", [0, 4], ids=["aligned", "unaligned"])
def test_host_memory_in_jax(np, jax, start):  # noqa: F811
    """It is placed like by `jax.numpy.asarray`, uncommitted; `device=` commits it, and ``copy=False`` rejects it."""
    block = np.zeros(4096 + 64, "uint8")
    source = block[-block.ctypes.data % 64 + start :][:4096].view("float32")
    cuda, cpu = jax.local_devices(backend="cuda")[0], jax.local_devices(backend="cpu")[0]
    for device in (cuda, cpu):
        with jax.default_device(device):
            by_hand, array = jax.numpy.asarray(source), dlx.convert(source, to="jax")
            assert array.devices() == by_hand.devices() == {device}
            assert not array.committed and not by_hand.committed
            assert dlx.plan(source, "jax").device == (2 if device is cuda else 1, 0)
        for name, wanted in (("cuda", cuda), ("cpu", cpu), (device, device)):
            array = dlx.convert(source, to="jax", device=name)
            assert array.devices() == {wanted} and array.committed
    if not start:
        assert dlx.convert(source, to="jax", copy=False).devices() == {cpu}


def test_cupy_and_jax(cupy, jax):  # noqa: F811
    """In both directions, also through dlx.Tensor."""
    source = cupy.arange(64, dtype="float32").reshape(8, 8)
    array = dlx.convert(dlx.convert(source, to="dlx"), to="jax", copy=False)
    assert array.unsafe_buffer_pointer() == source.data.ptr and array.tolist() == source.tolist()
    assert dlx.convert(array, to="cupy", readonly="share").data.ptr == source.data.ptr


def test_containers(torch, cupy):  # noqa: F811
    """All arrays of a tree by address; a lazy view, too."""
    tensors = {"a": [torch.zeros(3, device="cuda"), (torch.ones(3, device="cuda"),)]}
    for tree in (dlx.convert(tensors, to="cupy"), dlx.convert(tensors, to="cupy", lazy=True)):
        assert tree["a"][0].data.ptr == tensors["a"][0].data_ptr()
        assert tree["a"][1][0].tolist() == [1, 1, 1]


def test_interface(torch):  # noqa: F811
    """An object with only __cuda_array_interface__ is a source."""
    tensor = torch.arange(8, device="cuda")
    plain = type("Plain", (), {"__cuda_array_interface__": tensor.__cuda_array_interface__, "keep": tensor})()
    assert dlx.convert(plain, to="torch").data_ptr() == tensor.data_ptr()


def test_dtypes_that_cupy_would_misname(torch, cupy):  # noqa: F811
    """They are rejected, not misread."""
    with pytest.raises(DTypeError, match="float8_e4m3fn"):
        dlx.convert(torch.ones(3, device="cuda").to(torch.float8_e4m3fn), to="cupy")


def test_bfloat16_of_cupy(torch, cupy):  # noqa: F811
    """With cupy 14 and ml_dtypes it is shared in both directions; otherwise rejected."""
    tensor = torch.tensor([1, 2.5, -3], dtype=torch.bfloat16, device="cuda")
    if int(cupy.__version__.partition(".")[0]) < 14 or importlib.util.find_spec("ml_dtypes") is None:
        with pytest.raises(DTypeError, match="bfloat16"):
            dlx.convert(tensor, to="cupy")
        return
    array = dlx.convert(tensor, to="cupy", copy=False)
    assert array.data.ptr == tensor.data_ptr() and array.dtype.name == "bfloat16"
    assert dlx.convert(array, to="torch", copy=False).tolist() == [1, 2.5, -3]


# ---- kinds of memory, moves ------------------------------------------------------------------------------------------


def test_managed_memory(cupy, np):  # noqa: F811
    """With its DLPack device code; the host reads it directly after the kernels."""
    memory = cupy.cuda.malloc_managed(4 * N)
    array = cupy.ndarray((N,), "float32", memory)
    array.fill(2)
    assert dlx.describe(array).device.name == driver.where(memory.ptr).name == "cuda_managed"
    result = dlx.convert(array, to="numpy", copy=False)
    assert result.ctypes.data == memory.ptr and (result == 2).all()


def test_pinned_memory(torch, np):  # noqa: F811
    """Pinned tensors of torch are host memory, and are copied to the device."""
    tensor = torch.ones(N, pin_memory=True)
    assert driver.where(tensor.data_ptr()).name == "cuda_host"
    assert np.shares_memory(dlx.convert(tensor, to="numpy"), tensor.numpy())
    assert dlx.convert(dlx.convert(tensor, to="numpy"), to="torch", device="cuda").sum().item() == N
    pinned = dlx.from_pointer(tensor.data_ptr(), (N,), "float32", device="cuda_host", owner=tensor)
    assert np.shares_memory(dlx.convert(pinned, to="numpy", copy=False), tensor.numpy())


@pytest.mark.parametrize("to", ["torch", "cupy", "jax"])
@pytest.mark.parametrize("step", [1, 2, -3])
def test_numpy_to_the_device_and_back(np, request, to, step):
    """Values survive, also of strided views; the source may be written immediately."""
    request.getfixturevalue(to)
    source = np.arange(120, dtype="int32").reshape(10, 12)[:, ::step]
    values = source.tolist()
    assert dlx.plan(source, to, device="cuda").nbytes == source.nbytes
    there = dlx.convert(source, to=to, device="cuda")
    source[:] = -1
    assert dlx.describe(there).device == (2, 0)
    back = dlx.convert(there, to="numpy")
    assert back.tolist() == values


def test_two_devices(torch):  # noqa: F811
    """From cuda:1 while cuda:0 is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    tensor = torch.arange(8, device="cuda:1")
    middle = dlx.convert(tensor, to="dlx")
    assert middle.device == (2, 1) and torch.cuda.current_device() == 0
    assert dlx.convert(middle, to="torch").data_ptr() == tensor.data_ptr()
    assert dlx.convert(middle, to="torch", device="cuda:0").tolist() == list(range(8))
    assert torch.cuda.current_device() == 0


def test_dlx_memory_in_torch(torch):  # noqa: F811
    """Used immediately; released on another thread, which has no context."""
    tensor = dlx.convert(dlx.empty((4, N // 4), "float32", device="cuda"), to="torch")
    assert tensor.fill_(3).sum().item() == 3.0 * N
    held = [dlx.convert(dlx.empty(N, "float32", device="cuda"), to="torch")]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    torch.cuda.synchronize()


def test_the_how_to_on_streams_runs(torch, cupy):  # noqa: F811
    """Its code blocks, in the order of the page."""
    namespace = {"__name__": "page"}
    for kind, code, _ in pages.blocks((pages.ROOT / "docs" / "how-to" / "streams.md").read_text(encoding="utf-8")):
        if kind == "python gpu":
            exec(compile(code, "streams.md", "exec"), namespace)
    assert type(namespace["result"]) is cupy.ndarray
    assert namespace["weights"].sum().item() == 20
