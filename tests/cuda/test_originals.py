"""Published torch and cupy on the recording driver: conversions, lifetimes, captures, the current device."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest
from support.cuda import originals
from support.cuda.originals import handle_of, pending

import dlx
from dlx.errors import DeviceError, StreamError

N = 64

cuda, torch, cupy = originals.cuda, originals.torch, originals.cupy  # fixtures
STREAMS = ["default", "side", "per-thread", "external"]


@contextlib.contextmanager
def working(torch, cupy, side, device, name, shared):
    """Let a framework work on a stream of a device; return the stream's handle."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.device(device))
        if side == "torch":
            made = {
                "default": lambda: torch.cuda.default_stream(device),
                "side": lambda: torch.cuda.Stream(device),
                "per-thread": lambda: torch.cuda.ExternalStream(2, device),
                "external": lambda: torch.cuda.ExternalStream(shared, device),
            }
            stack.enter_context(torch.cuda.stream(stream := made[name]()))
        else:
            made = {
                "default": lambda: cupy.cuda.Stream.null,
                "side": lambda: cupy.cuda.Stream(non_blocking=True),
                "per-thread": lambda: cupy.cuda.Stream.ptds,
                "external": lambda: cupy.cuda.Stream.from_external(torch.cuda.ExternalStream(shared, device)),
            }
            stack.enter_context(stream := made[name]())
        yield handle_of(stream)


def address_of(array):
    """Return the address of an array of either framework."""
    return array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr


def made_by(torch, cupy, side, device):
    """Return an array of N floats on a device, with known values."""
    if side == "torch":
        return torch.arange(N, dtype=torch.float32).to(f"cuda:{device}")
    import numpy as np

    with cupy.cuda.Device(device):
        return cupy.asarray(np.arange(N, dtype="float32"))


def values_of(array):
    """Return the values of an array, copied by its framework."""
    return array.cpu().tolist() if hasattr(array, "cpu") else array.get().tolist()


@pytest.mark.parametrize("shape", ["one", "tree"])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("consumer", STREAMS)
@pytest.mark.parametrize("producer", STREAMS)
@pytest.mark.parametrize(("source", "target"), [("torch", "cupy"), ("cupy", "torch")])
def test_crossings(cuda, torch, cupy, source, target, producer, consumer, device, shape):
    """Shared and ordered: the consumer's kernel reads what the producer's kernel wrote."""
    shared = cuda.stream(device)
    with (
        working(torch, cupy, source, device, producer, shared) as p,
        working(torch, cupy, target, device, consumer, shared) as c,
    ):
        array = made_by(torch, cupy, source, device)
        cuda.write(p, address_of(array), N * 4, device)
        cuda.forget()
        if shape == "tree":
            results = dlx.convert({"a": [array, array], "b": array}, to=target)
            assert results["a"][0] is results["a"][1] is results["b"]
            result = results.pop("b")
            del results
        else:
            result = dlx.convert(array, to=target)
        assert cuda.ordering == (0 if p == c else 2)
        assert address_of(result) == address_of(array)
        assert not cuda.read(c, address_of(result), N * 4, device)


@pytest.mark.parametrize("consumer", STREAMS)
@pytest.mark.parametrize(("source", "target"), [("torch", "cupy"), ("cupy", "torch")])
def test_memory_comes_back_when_the_consumer_is_done(cuda, torch, cupy, source, target, consumer):
    """The producer's allocator does not get memory back while the consumer's queued work reads it."""
    with working(torch, cupy, source, 0, "side", 0), working(torch, cupy, target, 0, consumer, cuda.stream()) as c:
        array = made_by(torch, cupy, source, 0)
        address = address_of(array)
        result = dlx.convert(array, to=target)
        cuda.stall(c)
        cuda.read(c, address, N * 4)
        del result, array
        gc.collect()
        again = made_by(torch, cupy, source, 0)
        assert address_of(again) != address and pending() == 1
        cuda.resume(c)
        assert dlx.release_pending() == 0
        del again


def test_a_further_stream_is_waited_for_by_the_first(cuda, torch, cupy):
    """Torch's `record_stream` has no effect on foreign memory; `wait_stream` is respected at the release."""
    with working(torch, cupy, "cupy", 0, "side", 0), working(torch, cupy, "torch", 0, "side", 0):
        array = made_by(torch, cupy, "cupy", 0)
        address, further = address_of(array), torch.cuda.Stream()
        result = dlx.convert(array, to="torch")
        further.wait_stream(torch.cuda.current_stream())
        cuda.forget()
        result.record_stream(further)
        assert cuda.ordering == 0
        cuda.stall(further.cuda_stream)
        cuda.read(further.cuda_stream, address, N * 4)
        torch.cuda.current_stream().wait_stream(further)
        del result, array
        gc.collect()
        assert pending() == 1
        cuda.resume(further.cuda_stream)
        assert dlx.release_pending() == 0


@pytest.mark.parametrize(("source", "target"), [("torch", "cupy"), ("cupy", "torch")])
def test_what_frameworks_do_by_themselves(cuda, torch, cupy, source, target):
    """The test above can fail: their `from_dlpack` releases memory while it is read."""
    with working(torch, cupy, source, 0, "side", 0), working(torch, cupy, target, 0, "side", 0) as c:
        array = made_by(torch, cupy, source, 0)
        address = address_of(array)
        result = {"torch": torch, "cupy": cupy}[target].from_dlpack(array)
        cuda.stall(c)
        cuda.read(c, address, N * 4)
        del result, array
        gc.collect()
        again = made_by(torch, cupy, source, 0)
        assert address_of(again) == address
        cuda.resume(c)
    assert cuda.races > 0
    cuda.clear_report()


@pytest.mark.parametrize("to", ["torch", "cupy", "dlx"])
@pytest.mark.parametrize("source", ["torch", "cupy"])
@pytest.mark.parametrize("device", [0, 1])
def test_values_through_the_host_and_back(cuda, torch, cupy, np, source, to, device):
    """The driver copies: values survive to the host, and to the other device."""
    expected = list(range(N))
    array = made_by(torch, cupy, source, device)
    assert dlx.convert(array, to="numpy").tolist() == expected
    moved = dlx.convert(array, to=to, device=f"cuda:{1 - device}")
    assert dlx.describe(moved).device == (2, 1 - device)
    assert dlx.convert(moved, to="numpy").tolist() == expected
    back = dlx.convert(dlx.convert(array, to="numpy"), to=source, device=f"cuda:{device}")
    assert values_of(back) == expected


def test_capture_by_torch(cuda, torch, cupy):
    """Within a capture of torch: the same stream is shared, another one is refused, and the capture continues."""
    tensor, graph, other = torch.zeros(N, device="cuda"), torch.cuda.CUDAGraph(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        with cupy.cuda.Stream.from_external(here):
            inside = dlx.convert(tensor, to="cupy")
            assert inside.data.ptr == tensor.data_ptr()
            del inside
        with other, pytest.raises(StreamError, match="capturing"):
            dlx.convert(tensor, to="cupy")
        pinned = torch.empty(4, pin_memory=True)
        assert dlx.convert(dlx.convert(pinned, to="dlx"), to="torch").data_ptr() == pinned.data_ptr()


def test_capture_by_cupy(cuda, torch, cupy):
    """The same within a capture of cupy."""
    array, stream = cupy.empty(N, "float32"), cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            result = dlx.convert(array, to="torch")
        with pytest.raises(StreamError, match="capturing"):
            dlx.convert(array, to="torch")
        stream.end_capture()
    assert result.data_ptr() == array.data.ptr


def test_managed_and_pinned_memory(cuda, torch, cupy, np):
    """Managed memory keeps its kind; pinned memory is host memory."""
    memory = cupy.cuda.MemoryPointer(cupy.cuda.ManagedMemory(N * 4), 0)
    array = cupy.ndarray(N, "float32", memory)
    assert dlx.describe(array).device.name == "cuda_managed"
    assert dlx.convert(array, to="dlx").device.name == "cuda_managed"
    assert dlx.convert(array, to="torch").device.type == "cuda"
    pinned = torch.arange(4.0).pin_memory()
    assert dlx.convert(pinned, to="numpy").ctypes.data == pinned.data_ptr()


def test_the_array_interface(cuda, torch, cupy):
    """An object with only `__cuda_array_interface__`: its stream is waited for."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.empty(N, "float32")
        cuda.write(stream.ptr, array.data.ptr, N * 4)

        class Spoken:
            """Has only the interface."""

            __cuda_array_interface__ = array.__cuda_array_interface__
            owner = array

    result = dlx.convert(Spoken(), to="torch")
    assert result.data_ptr() == array.data.ptr and not cuda.read(1, array.data.ptr, N * 4)


@pytest.mark.parametrize("device", [0, 1])
def test_using(cuda, torch, cupy, device):
    """A function works on its caller's stream: no ordering, in or out."""

    @dlx.using("cupy")
    def compute(array):
        assert isinstance(array, cupy.ndarray)
        return array, cupy.cuda.get_current_stream().ptr

    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)) as _:
        tensor = torch.zeros(N, device=f"cuda:{device}")
        cuda.forget()
        result, stream = compute(tensor)
        assert cuda.ordering == 0 and stream == torch.cuda.current_stream().cuda_stream
    assert isinstance(result, torch.Tensor) and result.data_ptr() == tensor.data_ptr()


def test_threads(cuda, torch, cupy):
    """Threads that never used CUDA convert, each on its own streams."""
    tensor, found = torch.zeros(N, device="cuda:1"), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream(1)):
            for _ in range(20):
                array = dlx.convert(tensor, to="cupy")
                back = dlx.convert(array, to="torch")
                found.append(back.data_ptr() == tensor.data_ptr())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


@pytest.fixture
def async_pool(cupy):
    """Let cupy allocate from a pool of the driver, on the requesting stream."""
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        yield


def test_memory_of_a_pool_of_the_driver(cuda, torch, cupy, np, async_pool):
    """It is shared, moves to a device that cannot access it, and returns to the pool when torch has read it."""
    expected = list(range(N))
    array = cupy.asarray(np.arange(N, dtype="float32"))
    assert cuda.count("cuMemAllocAsync") + cuda.count("cuMemAllocFromPoolAsync") == 1
    moved = dlx.convert(array, to="torch", device="cuda:1")
    assert moved.tolist() == expected and cuda.count("cuMemcpyPeerAsync") == 1
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        c, address = handle_of(torch.cuda.current_stream()), array.data.ptr
        result = dlx.convert(array, to="torch")
        cuda.stall(c)
        cuda.read(c, address, N * 4)
        del result, array
        assert pending() == 1 and cuda.is_alive(address)
        cuda.resume(c)
        assert dlx.release_pending() == 0 and not cuda.is_alive(address)


@pytest.mark.parametrize("stream", ["default", "side"])
@pytest.mark.parametrize("side", ["torch", "cupy"])
def test_a_framework_moves_its_own(cuda, torch, cupy, side, stream):
    """From one device to the other, after the writes on the first device's current stream."""
    with working(torch, cupy, side, 1, stream, 0) as p, working(torch, cupy, side, 0, stream, 0) as c:
        with torch.cuda.device(1):
            array = made_by(torch, cupy, side, 1)
        cuda.write(p, address_of(array), N * 4, 1)
        result = dlx.convert(array, to=side, device="cuda:0")
        assert not cuda.read(c, address_of(result), N * 4)
        assert cuda.races == 0, cuda.report
        assert values_of(result) == list(range(N))


@pytest.mark.parametrize("device", [0, 1])
def test_other_contexts(cuda, torch, cupy, device):
    """A thread with a non-primary current context converts, and the context stays current."""
    import ctypes

    library, made = ctypes.CDLL(cuda.path), ctypes.c_void_p()
    tensor = made_by(torch, cupy, "torch", device)
    assert library.cuCtxCreate_v2(ctypes.byref(made), 0, 1 - device) == 0
    depth = cuda.depth
    assert dlx.convert(tensor, to="dlx").data_ptr == tensor.data_ptr()
    assert dlx.convert(tensor, to="numpy").tolist() == list(range(N))
    assert cuda.depth == depth and cuda.current == 1 - device
    assert library.cuCtxDestroy_v2(made) == 0


def test_no_small_copies(cuda, torch, cupy, np):
    """Conversions and moves use few large copies, none below the size of an array."""
    arrays = [made_by(torch, cupy, side, 0) for side in ("torch", "cupy")] * 10
    cuda.forget()
    for array in arrays:
        dlx.convert(array, to="numpy")
        dlx.convert(array[::-1] if hasattr(array, "get") else array[::3], to="numpy")
        dlx.convert(array, to="torch" if hasattr(array, "get") else "cupy", device="cuda:1")
    assert cuda.copies() <= 6 * len(arrays) and cuda.copies(below=64) == 0


@pytest.mark.parametrize("code", [700, 719])
def test_a_device_that_is_lost(cuda, torch, cupy, np, code):
    """After a kernel fault every conversion raises, and pending memory is released."""
    with working(torch, cupy, "torch", 0, "side", 0), working(torch, cupy, "cupy", 0, "side", 0) as c:
        tensor = made_by(torch, cupy, "torch", 0)
        result = dlx.convert(tensor, to="cupy")
        cuda.stall(c)
        cuda.read(c, address_of(result), N * 4)
        del result
        assert pending() == 1
        cuda.fail("cuStreamIsCapturing", code)
        for target in ("cupy", "numpy"):
            with pytest.raises(DeviceError, match=str(code)):
                dlx.convert(tensor, to=target)
        assert dlx.release_pending() == 0
        cuda.mend()
        cuda.resume(c)


MOVES = ["host", "pinned", "other device", "copy"]


@pytest.mark.parametrize("asked", [False, True], ids=["current", "asked"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("target", ["torch", "cupy"])
def test_moved_memory_is_the_consumers(cuda, torch, cupy, np, target, move, asked):
    """The consumer's allocator provides it on its stream, and gets it back; nothing else is allocated."""
    consumer = {"torch": torch, "cupy": cupy}[target]
    source = {
        "host": lambda: np.arange(N, dtype="float32"),
        "pinned": lambda: torch.arange(N, dtype=torch.float32).pin_memory(),
        "other device": lambda: made_by(torch, cupy, "cupy" if target == "torch" else "torch", 1),
        "copy": lambda: made_by(torch, cupy, "cupy" if target == "torch" else "torch", 0),
    }[move]()

    def used():
        return torch.cuda.memory_allocated(0) if target == "torch" else cupy.get_default_memory_pool().used_bytes()

    with working(torch, cupy, target, 0, "side", 0) as c:
        before = used()
        own = consumer.cuda.Stream()
        options = {"stream": own} if asked else {}
        reader = handle_of(own) if asked else c
        cuda.forget()
        result = dlx.convert(source, to=target, device="cuda:0", copy=True if move == "copy" else None, **options)
        assert cuda.count("cuMemAllocFromPoolAsync") == 0 and used() >= before + N * 4
        assert cuda.count("cuMemcpyAsync", "cuMemcpyPeerAsync") == 1
        assert not cuda.read(reader, address_of(result), N * 4)
        (stream,) = {line.split()[1] for line in cuda.log if line.startswith("cuMemcpy")}
        assert all(line.split()[1] == stream for line in cuda.log if line.startswith("cuStreamSynchronize"))
        if asked:  # the caller orders other streams
            consumer.cuda.get_current_stream().wait_event(own.record()) if target == "cupy" else (
                torch.cuda.current_stream().wait_stream(own)
            )
        assert dlx.convert(result, to="numpy").tolist() == list(range(N))
        address = address_of(result)
        del result
        if not asked:
            again = dlx.convert(np.zeros(N, "float32"), to=target, device="cuda:0")
            assert address_of(again) == address  # the allocator reuses the block
            del again


def test_a_loop_of_moves_makes_few_calls(cuda, torch, np):
    """The copies and waits of `tensor.cuda()`, without allocations or events of dlx."""
    array = np.zeros(1 << 12, "float32")
    dlx.convert(array, to="torch", device="cuda")
    cuda.forget()
    for _ in range(3):
        dlx.convert(array, to="torch", device="cuda")
    assert cuda.count("cuMemcpyAsync") == cuda.count("cuStreamSynchronize") == 3
    assert cuda.ordering == cuda.count("cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuMemAlloc") == 0


GAPS = {
    "reversed": lambda array: array[::-1],
    "strided": lambda array: array[::2],
    "columns": lambda array: array.reshape(-1, 10)[:, ::3],
    "broadcast": lambda array: array.reshape(1, -1)[[0]][:, :1],
}


@pytest.mark.parametrize("call", ["shared", "copied", "moved"])
@pytest.mark.parametrize("gap", ["reversed", "strided", "columns"])
@pytest.mark.parametrize("size", [100, 100_000])
def test_arrays_with_gaps(cuda, torch, cupy, gap, size, call):
    """Its framework makes an array contiguous, with one kernel; the plan says so."""
    array = GAPS[gap](cupy.empty(size, "float32"))
    options = {"shared": {}, "copied": {"copy": True}, "moved": {"device": "cuda:1"}}[call]
    plan = dlx.plan(array, to="torch", **options)
    cuda.forget()
    result = dlx.convert(array, to="torch", **options)
    assert tuple(result.shape) == array.shape
    shared = call == "shared" and gap != "reversed"
    assert plan.outcome == ("shared" if shared else "copied")
    assert cuda.count("cuMemcpyAsync", "cuMemcpyPeerAsync", "cuMemcpy2DAsync") == (call == "moved")
    assert shared or "made contiguous by cupy" in str(plan)


@pytest.mark.parametrize("target", ["torch", "cupy", "numpy"])
@pytest.mark.parametrize("source", ["torch", "cupy", "numpy"])
def test_bfloat16(cuda, torch, cupy, np, source, target):
    """It is shared bit by bit, if the other framework supports it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    host = np.arange(N).astype(ml_dtypes.bfloat16)
    array = host if source == "numpy" else dlx.convert(host, to=source, device="cuda")
    result = dlx.convert(array, to=target)
    assert str(result.dtype).removeprefix("torch.") == "bfloat16"
    assert dlx.convert(result, to="numpy").tobytes() == host.tobytes()


def test_an_interface_of_dlx(cuda, torch, cupy):
    """A dlx.Tensor is read by its `__cuda_array_interface__`, whose stream is waited for."""
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.arange(6, dtype=torch.float32, device="cpu").reshape(2, 3).cuda().T
        middle = dlx.convert(tensor, to="dlx")
        cuda.write(handle_of(torch.cuda.current_stream()), tensor.data_ptr(), 24)
        middle = dlx.convert(tensor, to="dlx")
    said = middle.__cuda_array_interface__
    assert said["version"] == 3 and said["strides"] == (4, 12) and said["typestr"] == "<f4"
    array = cupy.asarray(middle)
    assert array.data.ptr == tensor.data_ptr() and array.shape == (3, 2) and array.strides == (4, 12)
    assert not cuda.read(1, array.data.ptr, 24)
    assert not hasattr(dlx.empty(3, "float32"), "__cuda_array_interface__")
    assert not hasattr(dlx.empty(3, "bfloat16", "cuda"), "__cuda_array_interface__")


def in_fresh_process(python, code):
    """Run code with both frameworks before any device is used."""
    return python("import torch, cupy, dlx, numpy as np\n" + textwrap.dedent(code), args=("-W", "ignore")).strip()


@pytest.mark.parametrize("question", ["devices", "framework"])
def test_without_a_device(cuda, question):
    """Without a device, cupy is not broken: the error says that it has no device."""
    command = [sys.executable, "-W", "ignore", "-m", "dlx.cli.probe", question, "cupy"]
    done = subprocess.run(
        command, env=os.environ | {"FAKE_CUDA_DEVICES": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer == {"devices": []} if question == "devices" else answer["no_device"]


@pytest.mark.parametrize(("ndim", "crosses"), [(64, True), (65, False)])
def test_dimensions(cuda, torch, cupy, ndim, crosses):
    """Up to the maximal number of dimensions of cupy."""
    array = dlx.from_pointer(torch.zeros(1, device="cuda").data_ptr(), (1,) * ndim, "float32", device="cuda")
    assert (dlx.plan(array, to="cupy").outcome == "shared") is crosses
    if crosses:
        assert dlx.convert(array, to="cupy").ndim == ndim


def test_no_call_in_a_child(cuda, torch, cupy, python):
    """A forked child gets an error with a fix, and makes no driver call."""
    code = """
    import os, sys
    tensor = torch.zeros(3, device="cuda")
    array = dlx.convert(tensor, to="cupy")
    child = os.fork()
    if not child:
        try:
            dlx.convert(tensor, to="cupy")
        except dlx.errors.DeviceError as error:
            print("spawn" in str(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    """
    assert in_fresh_process(python, code) == "True"


@pytest.mark.parametrize("used", [True, False])
def test_cupy_is_not_asked_in_a_child(cuda, torch, cupy, python, used):
    """An array of cupy is refused before cupy asks the driver for its device, whether dlx used CUDA before or not."""
    code = f"""
    import os, sys
    array = cupy.zeros(3)
    if {used}:
        dlx.convert(array, to="dlx")
    type(array).__dlpack_device__  # exists
    child = os.fork()
    if not child:
        for call in (lambda: dlx.convert(array, to="torch"), lambda: dlx.stack([array, array], "cupy"),
                     lambda: dlx.describe(array), lambda: dlx.convert(array, to="numpy")):
            try:
                call()
            except dlx.errors.DeviceError as error:
                assert "spawn" in str(error), error
                print("refused", end=" ", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    """
    assert in_fresh_process(python, code).split() == ["refused"] * 4


def test_casts_and_indices_on_the_device(cuda, torch, cupy, python):
    """By the array's framework or the target's, on its stream; sparse indices of another width and shape, too."""
    code = """
    import cupyx.scipy.sparse as sparse
    wide = torch.zeros(4, dtype=torch.float64, device="cuda")
    for source in (wide, cupy.zeros(4), dlx.convert(wide, to="dlx")):
        for to in ("torch", "cupy"):
            assert str(dlx.convert(source, to=to, dtype="float32").dtype).endswith("float32")
    for options in ({}, {"axis": 1}):
        whole = dlx.stack([wide, wide.float()], "torch", dtype="float32", **options)
        assert whole.dtype == torch.float32 and whole.device.index == 0 and whole.numel() == 8
    empty = torch.zeros(0, dtype=torch.int64, device="cuda")
    csr = torch.sparse_csr_tensor(torch.zeros(5, dtype=torch.int64, device="cuda"), empty, empty.float(), (4, 4),
                                  check_invariants=False)
    found = dlx.convert(csr, to="cupy")
    assert (found.indices.dtype, found.indptr.dtype) == ("int32", "int32"), found.indices.dtype
    huge = torch.sparse_csr_tensor(torch.zeros(5, dtype=torch.int64, device="cuda"), empty, empty.float(), (4, 1 << 32),
                                   check_invariants=False)
    try:
        dlx.convert(huge, to="cupy")
    except dlx.errors.DeviceError as error:
        assert "int64 indices become int32" in str(error)
    coo = sparse.coo_matrix((4, 4), dtype="float32")
    coo.row, coo.col, coo.data = cupy.zeros(3, "int32"), cupy.ones(3, "int32"), cupy.ones(3, "float32")
    step, = (step for step in dlx.plan(coo, to="torch").steps if "stacked" in step.why)
    moved = dlx.convert(coo, to="torch")
    assert moved._indices().shape == (2, 3) and moved.device.type == "cuda" and moved._indices().dtype == torch.int64
    """
    in_fresh_process(python, code)


CURRENT = """
fresh = lambda: dlx.empty(3, "float32", "cuda:1")
calls = {
    "from dlx": lambda: dlx.convert(fresh(), to="torch"),
    "from dlx to cupy": lambda: dlx.convert(fresh(), to="cupy"),
    "moved to cupy": lambda: dlx.convert(np.ones(3, "float32"), to="cupy", device="cuda:1"),
    "tree": lambda: dlx.convert([fresh(), fresh()], to="torch"),
    "back": lambda: dlx.convert(dlx.convert(fresh(), to="torch"), to="cupy"),
}
for name, call in calls.items():
    result = call()
    device = cupy.cuda.runtime.getDevice()
    if device:
        print(name, "leaves device", device)
"""


def test_the_current_device_stays(cuda, torch, cupy, python):
    """Conversions on another device leave the runtime's current device unchanged: cupy allocates there next.

    No call may use the first device: once it has a context, torch itself switches to it. torch's own allocation on
    another device may change it, and is left out.
    """
    assert in_fresh_process(python, CURRENT) == ""
