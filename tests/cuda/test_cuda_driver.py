"""Finding and losing the CUDA driver: loading, devices, forks, the end of the process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import textwrap

import pytest
from support.project import ROOT

import dlx
from dlx._core import cuda as driver
from dlx._core.native import ffi
from dlx.errors import DeviceError

N = 1024
CUDA0, CUDA1 = dlx.Device("cuda:0"), dlx.Device("cuda:1")


@pytest.mark.parametrize("ask", [driver.require, lambda: dlx.empty(3, "int8", "cuda:0")])
def test_no_driver(ask):
    """One clear sentence with a fix."""
    with pytest.raises(DeviceError, match=r"no CUDA driver here: .*no-driver.*set DLX_CUDA_DRIVER"):
        ask()
    assert driver.is_loaded() is False


def test_a_driver_that_is_too_old(monkeypatch, tmp_path):
    """The error names the missing function."""
    source, library = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text("int cuInit(unsigned f) { return (int)f; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.setenv("DLX_CUDA_DRIVER", str(library))
    with pytest.raises(DeviceError, match="too old, it lacks cuGetErrorName"):
        driver.require()


def test_a_driver_without_what_came_later(python, tmp_path):
    """Without capture ids, captures stay valid: edges within one graph are refused, too."""
    library = tmp_path / "early.so"
    later = "StreamGetCaptureInfo_v2"
    missing = [f"-Dcu{name}=static_{name}" for name in later.split()]
    source = ROOT / "tests" / "c" / "fake_cuda.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", *missing, str(source), "-o", str(library)], check=True)
    code = """
        tensor = dlx.empty(64, "uint8", device="cuda:1")
        assert dlx.convert(tensor, to="dlx", device="cpu").shape == (64,)
        moved = dlx.convert(tensor, to="dlx", device="cuda:0")
        c = cuda.stream(); cuda.stall(c)
        used_tensor, memory = used(c); cuda.read(c, memory, 64); del used_tensor
        assert driver.release_pending() == 1
        captured, other = cuda.stream(), cuda.stream()
        cuda.capture(captured, 1)
        driver.order(Stream(device, captured), Stream(device, captured))
        for pair in ((captured, other), (other, captured)):
            try:
                driver.order(*(Stream(device, handle) for handle in pair))
            except dlx.errors.StreamError as error:
                print("refused")
        assert cuda.end_capture(captured) == 0
        cuda.resume(c)
        assert driver.release_pending() == 0
        del tensor, moved
        gc.collect()
        assert driver.release_pending() == 0
        print(cuda.count("cuMemFreeAsync"), cuda.races, cuda.misuses, cuda.depth)
    """
    assert run(python, library, code)[:4] == ["refused", "refused", "gone", "2 0 0 0"]


@pytest.mark.parametrize(
    ("code", "message"),
    [(100, "sees no device"), (3, "'spawn'"), (999, r"cuInit failed with an unknown error \(999\)")],
)
def test_a_driver_that_does_not_start(cuda, monkeypatch, code, message):
    """No device, an earlier fork, any other failure: each has a message, and the next call tries again."""
    monkeypatch.setenv("FAKE_CUDA_INIT", str(code))
    with pytest.raises(DeviceError, match=message):
        driver.require()
    monkeypatch.delenv("FAKE_CUDA_INIT")
    driver.require()


def test_devices(cuda):
    """The host, and the driver's devices."""
    assert driver.devices() == {dlx.Device("cpu"): "host memory", CUDA0: "Fake device 0", CUDA1: "Fake device 1"}


def test_devices_without_a_driver():
    """Without a driver, only the host is listed."""
    assert driver.devices() == {dlx.Device("cpu"): "host memory"}


@pytest.mark.parametrize(("kind", "name"), [(1, "cuda_host:1"), (2, "cuda:1"), (3, "cuda_managed:1")])
def test_where_memory_is(cuda, kind, name):
    """The driver knows the device of each address."""
    assert driver.where(cuda.alloc(N, 1, kind)) == dlx.Device(name)
    buffer = ffi.new("char[]", 8)
    assert driver.where(int(ffi.cast("uintptr_t", buffer))) == dlx.Device("cpu")


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_driver_that_cannot_say_where(cuda, after):
    """A broken device does not make memory plain host memory."""
    memory = cuda.alloc(N, 1)
    with driver.at(CUDA1):
        cuda.fail("cuPointerGetAttribute", 700, after)
        with pytest.raises(DeviceError, match=r"cuPointerGetAttribute failed with CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
            driver.where(memory)
        cuda.mend()
        assert driver.where(memory) == CUDA1


def test_current_device(cuda):
    """A device is current only inside the block, even if the block raises."""
    with driver.at(CUDA1):
        assert cuda.current == 1
        with driver.at(CUDA0):
            assert cuda.current == 0
        assert cuda.current == 1
    with pytest.raises(KeyError), driver.at(CUDA1):
        raise KeyError
    assert cuda.depth == 0


def calls_on(cuda, np, device):
    """Yield dlx's operations on device memory, by name; one driver call of each kind fails."""
    tensor = dlx.empty(N, "uint8", device)
    other = "cuda:0" if device == "cuda:1" else "cuda:1"
    stream = cuda.stream(int(device[-1]))
    return {
        "empty": lambda: dlx.empty(N, "uint8", device),
        "from the host": lambda: dlx.convert(np.zeros(N), to="dlx", device=device),
        "to the host": lambda: dlx.convert(tensor, to="numpy"),
        "to another device": lambda: dlx.convert(tensor, to="dlx", device=other),
        "a copy": lambda: dlx.convert(tensor, to="dlx", copy=True),
        "a plan": lambda: dlx.plan(tensor, to="numpy"),
        "what it is": lambda: dlx.describe(tensor),
        "a tree": lambda: dlx.convert([tensor, np.zeros(2)], to="dlx", device=device),
        "stacked": lambda: dlx.stack([tensor, tensor], to="dlx"),
        "a capsule": lambda: tensor.__dlpack__(stream=stream),
        "its interface": lambda: tensor.__cuda_array_interface__,
        "where it is": lambda: driver.where(tensor.data_ptr),
        "devices": driver.devices,
        "release": driver.release_pending,
    }


@pytest.mark.parametrize("fails", [None, "cuMemcpyAsync", "cuMemcpyPeerAsync", "cuEventRecord", "cuStreamSynchronize"])
@pytest.mark.parametrize("current", ["none", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_the_current_device_stays(cuda, np, device, current, fails):
    """After each operation, successful or not, this thread's current device is unchanged."""
    with contextlib.ExitStack() as stack:
        if current != "none":
            stack.enter_context(driver.at(dlx.Device(current)))
        before, failures = (cuda.depth, cuda.current), 0
        for name, call in calls_on(cuda, np, device).items():
            if fails is not None:
                cuda.fail(fails, 2)
            try:
                call()
            except DeviceError as error:
                failures += f"{fails} failed" in str(error)
            assert (cuda.depth, cuda.current) == before, name
        assert bool(failures) is (fails is not None)
        cuda.mend()


PRELUDE = """
    import gc, os, sys
    import dlx
    from dlx._core import native, cuda as driver
    from dlx._core.stream import Stream
    from support.cuda.fake_cuda import FakeCuda
    cuda = FakeCuda(os.environ["DLX_CUDA_DRIVER"])
    device = dlx.Device("cuda:0")
    class Owner:
        def __del__(self):
            print("gone", flush=True)
    def used(c):
        memory = cuda.alloc(64)
        tensor = native.tensor_new(memory, (64,), None, dlx.DType("uint8"), device, 0, Owner())
        return native.tensor_behind(tensor, 0, c, "kept"), memory
"""


def run(python, fake_driver, code, prelude=PRELUDE):
    """Run code in a new process with the recording driver; return its output lines."""
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "DLX_CUDA_DRIVER": str(fake_driver), "PYTHONPATH": path}
    return python(textwrap.dedent(prelude) + textwrap.dedent(code), env=env).split("\n")


def test_a_forked_child_leaves_the_driver_alone(python, fake_driver):
    """Deleters in the child do not call it (it would complain on stderr), and calls raise; the parent continues."""
    code = """
        c = cuda.stream(); cuda.stall(c)
        tensor, memory = used(c)
        cuda.read(c, memory, 64)
        pending, more = used(c)
        cuda.read(c, more, 64); del pending
        point, kept = driver.ready(Stream(device, c)), driver.ready(Stream(device, c, Owner()))
        pid = os.fork()
        if pid == 0:
            del tensor, point, kept; gc.collect(); driver.release_pending()
            try:
                driver.order(Stream(device, 1), Stream(device, 2))
            except dlx.errors.DeviceError as error:
                print(error, flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print("parent", flush=True)
        del tensor, point, kept
        cuda.resume(c)
        assert driver.release_pending() == 0
    """
    out = run(python, fake_driver, code)
    assert "a forked child cannot use it" in out[0] and "'spawn'" in out[0]
    assert out[1:5] == ["parent", "gone", "gone", "gone"]


def test_a_child_with_memory_of_dlx(python, fake_driver):
    """With live or pending memory, the child calls nothing, raises with an explanation, and works on the host."""
    code = """
        alive, dropped = (dlx.empty(64, "uint8", "cuda:1") for _ in range(2))
        del dropped
        before = cuda.count()
        pid = os.fork()
        if pid == 0:
            del alive; gc.collect(); driver.release_pending()
            for ask in (dlx.empty, dlx.convert):
                try:
                    ask(3, "uint8", "cuda:1") if ask is dlx.empty else ask(b"abc", to="dlx", device="cuda:0")
                except dlx.errors.DeviceError as error:
                    print("spawn" in str(error), flush=True)
            assert dlx.convert(b"abc", to="dlx").shape == (3,) and len(dlx.devices()) == 1
            print(cuda.count() - before, flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        del alive
        assert driver.release_pending() == 0
        print(cuda.count("cuMemFree", "cuMemFreeAsync"))
    """
    assert run(python, fake_driver, code)[:4] == ["True", "True", "0", "2"]


def test_a_child_may_start_the_driver_itself(python, fake_driver):
    """A fork before the first use of the driver has no effect."""
    code = """
        pid = os.fork()
        if pid == 0:
            driver.order(Stream(device, cuda.stream()), Stream(device, cuda.stream()))
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert run(python, fake_driver, code)[0] == "7"


def test_a_child_that_is_forked_while_the_driver_is_loaded(python, tmp_path):
    """The fork waits for the thread that loads the driver, so that the child inherits no locked lock."""
    library, source = tmp_path / "slow.so", tmp_path / "slow.c"
    source.write_text(
        f"""
        #define cuInit quick_init
        #include "{ROOT / "tests" / "c" / "fake_cuda.c"}"
        #undef cuInit
        #include <unistd.h>
        int cuInit(unsigned flags) {{ usleep(300000); return quick_init(flags); }}
        """
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True)
    code = """
        import threading, time, warnings
        from dlx.errors import DeviceError
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks with threads
        loading = threading.Thread(target=driver.require)
        loading.start()
        time.sleep(0.1)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                driver.require()
            except DeviceError as error:
                print(error, flush=True)
            os._exit(0)
        loading.join()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    out = run(python, library, code, "import os, signal\nfrom dlx._core import cuda as driver\n")
    assert "a forked child cannot use it" in out[0] and out[1] == "0"


def test_exit_with_memory_in_every_state(python, fake_driver):
    """Tensors live, wait or have events when the process ends: the driver is not called after its end."""
    code = """
        import atexit, threading
        c = cuda.stream(); cuda.stall(c)
        alive, memory = used(c)
        cuda.read(c, memory, 64)
        pending, more = used(c)
        cuda.read(c, more, 64); del pending
        point = driver.ready(Stream(device, c))
        sys.dlx_kept = [alive, point]
        sys.dlx_kept.append(sys.dlx_kept)
        del alive, point
    """
    run(python, fake_driver, code)


@pytest.mark.parametrize("again", [False, True], ids=["and left", "and used again"])
def test_a_device_that_was_reset(python, fake_driver, again):
    """After `cudaDeviceReset` with memory, streams, events and a pending release, calls raise, and nothing leaks.

    dlx's objects on the device are gone with the context, even if it is created again; everything else works.
    """
    code = f"""
        import ctypes
        api = ctypes.CDLL(cuda.path)
        c = cuda.stream(); cuda.stall(c)
        point, own = driver.ready(Stream(device, c)), dlx.empty(64, "uint8", "cuda:0")
        tensor, memory = used(c)
        waiting, more = used(c)
        cuda.read(c, more, 64); del waiting
        print(driver.release_pending(), api.cuDevicePrimaryCtxReset_v2(0), flush=True)
        if {again}:
            api.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
        for call in (
            lambda: dlx.empty(64, "uint8", "cuda:0"), lambda: dlx.convert(own, to="dlx", device="cpu"),
            lambda: own.__dlpack__(stream=1), lambda: driver.wait(point, Stream(device, 1)),
        ):
            try:
                print(call())
            except dlx.errors.DeviceError as error:
                print("CONTEXT_IS_DESTROYED (709)" in str(error) or "INVALID_HANDLE (400)" in str(error), flush=True)
        del tensor, own, point
        gc.collect()
        print(driver.release_pending(), native.live(), cuda.depth, cuda.mode)
        print(dlx.empty(3, "uint8", "cuda:1").device, dlx.from_dlpack(b"abc").tobytes())
    """
    out = run(python, fake_driver, code)
    assert out[0] == "1 0" and sorted(out[1:7]) == ["True"] * 4 + ["gone"] * 2, out
    assert out[7:9] == ["0 0 0 0", "cuda:1 b'abc'"]


def test_host_work_loads_no_driver(python, fake_driver):
    """Import, plan, describe, listing and conversions of host memory do not load the driver; a CUDA request does."""
    code = """
        import os, pathlib
        import dlx

        def is_loaded():
            maps = pathlib.Path("/proc/self/maps").read_text()
            return os.path.basename(os.environ["DLX_CUDA_DRIVER"]) in maps or "libcuda" in maps

        tensor = dlx.convert(bytearray(8), to="dlx")
        dlx.plan(b"abc", to="dlx"); dlx.describe(tensor); dlx.empty(3, "float32"); dlx.release_pending()
        memoryview(tensor); tensor.__dlpack__(max_version=(1, 0)); repr(tensor); del tensor
        print(is_loaded()); print(len(dlx.devices())); print(is_loaded())
    """
    assert run(python, fake_driver, code, prelude="")[:3] == ["False", "3", "True"]


# ---- captures elsewhere ----------------------------------------------------------------------------------------------

STRICT = """
    #include "{root}/tests/c/fake_cuda.c"
    static void strict(const char* name) {{
      for (int i = 1; i < n_captures; i++)
        if (captures[i].state == ACTIVE && thread_mode != RELAXED) {{
          misuses++;
          complain("%s in the mode of a capture; ", name);
        }}
    }}
"""
ANY = {
    "cuDevicePrimaryCtxRetain": "void** a, int b",
    "cuStreamCreate": "void** a, unsigned b",
    "cuStreamQuery": "uint64_t a",
    "cuStreamSynchronize": "uint64_t a",
    "cuEventCreate": "event** a, unsigned b",
    "cuEventQuery": "event* a",
    "cuEventSynchronize": "event* a",
    "cuEventDestroy_v2": "event* a",
    "cuMemAlloc_v2": "uint64_t* a, size_t b",
    "cuMemFree_v2": "uint64_t a",
    "cuMemFreeAsync": "uint64_t a, uint64_t b",
    "cuMemPoolCreate": "pool** a, const pool_facts* b",
    "cuMemAllocFromPoolAsync": "uint64_t* a, size_t b, pool* c, uint64_t d",
    "cuMemcpyAsync": "uint64_t a, uint64_t b, size_t c, uint64_t d",
    "cuMemcpy2DAsync_v2": "const box* a, uint64_t b",
}
"""Entry points that a capture may forbid, or that are unknown: each must be called in relaxed mode."""


def test_all_that_may_be_the_first_is_relaxed(python, tmp_path):
    """A process first uses dlx while another thread's stream captures in the strictest mode."""
    head = "".join(f"#define {name} inner_{name}\n" for name in ANY)
    wraps = "".join(
        f'#undef {name}\nint {name}({args}) {{ strict("{name}"); return inner_{name}({", ".join("abcd"[:n])}); }}\n'
        for name, args in ANY.items()
        if (n := args.count(",") + 1)
    )
    source, library = tmp_path / "strict.c", tmp_path / "strict.so"
    source.write_text(head + STRICT.format(root=ROOT) + wraps)
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True)
    code = """
        import numpy as np
        c = cuda.stream()
        cuda.capture(c, 0)
        tensor = dlx.convert(np.zeros((8, 8), "uint8")[:, ::2], to="dlx", device="cuda:0")
        moved = dlx.convert(tensor, to="dlx", device="cuda:1")
        d, e = cuda.stream(), cuda.stream()
        cuda.stall(d)
        used_tensor, memory = used(d); cuda.read(d, memory, 64); del used_tensor
        driver.order(Stream(device, d), Stream(device, e))
        point = driver.ready(Stream(device, e))
        assert driver.release_pending() == 1
        cuda.resume(d)
        assert driver.release_pending() == 0
        driver.synchronize(point)
        dlx.convert(moved, to="numpy")
        del tensor, moved
        gc.collect()
        assert driver.release_pending() == 0
        print(cuda.end_capture(c), cuda.misuses, cuda.report)
    """
    assert [line.strip() for line in run(python, library, code)[:2]] == ["gone", "0 0"]
