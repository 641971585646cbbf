"""The frameworks of the checks on CUDA devices: their functions for arrays, streams and graphs."""

from __future__ import annotations

import contextlib
import importlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from dlx._api.convert import convert
from dlx.adapter.base import installed_version

N = 1024  # elements of an array, float32
HOST = array("f", range(N))
HOLD = 0.1  # seconds for which `hold` makes a stream busy, about

_WAIT = """extern "C" __global__ void dlx_wait(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;);
}"""
_CYCLES = 200_000_000  # HOLD at 2 GHz, longer on slower devices


class Framework:
    """dlx itself, and the base class of the frameworks. It has no current stream."""

    name = "dlx"
    to_device: Callable[[Any], Any] | None = None
    """Moves a numpy array to the device by the framework's own function."""
    to_host: Callable[[Any], Any] | None = None
    """Moves an array to numpy by the framework's own function."""

    def version(self) -> str:
        """Return the versions of the framework and its CUDA."""
        return installed_version(self.name)

    def make(self, values: Sequence[float] = HOST) -> Any:
        """Return a device array of float32."""
        return convert(array("f", values), to="dlx", device="cuda")

    def make_unpooled(self) -> Any:
        """Return a device array whose memory goes back to the driver at once, if the framework can make one."""
        return self.make()

    def read(self, x: Any) -> list[float]:
        """Return the elements, read on the current stream."""
        return [*memoryview(convert(x, to="dlx", device="cpu"))]

    def address(self, x: Any) -> int:
        """Return the address of an array."""
        return int(x.data_ptr)

    def stream(self) -> Any:
        """Return a new stream, or None if the framework has no streams."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a stream is current."""
        return contextlib.nullcontext()

    def synchronize(self, result: Any = None) -> None:
        """Wait for the device; for `result` only, if the framework has no other way."""


class _Torch(Framework):
    """torch."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.module: Any = torch
        torch.zeros(1, device="cuda")
        self.to_device = lambda a: torch.from_numpy(a).cuda()
        self.to_host = lambda x: x.cpu().numpy()
        self.from_dlpack = torch.from_dlpack

    def version(self) -> str:
        cuda = self.module.cuda
        return f"{self.module.__version__}, built for CUDA {self.module.version.cuda}, {cuda.device_count()} device(s)"

    def make(self, values: Sequence[float] = HOST) -> Any:
        return self.module.tensor(list(values), dtype=self.module.float32).cuda()

    def read(self, x: Any) -> list[float]:
        return list(x.cpu().tolist())

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def stream(self) -> Any:
        return self.module.cuda.Stream()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self.module.cuda.stream(stream)  # type: ignore[no-any-return]

    def is_busy(self, stream: Any) -> bool:
        """Return whether a stream has unfinished work."""
        return not stream.query()

    def hold(self) -> None:
        """Make the current stream busy for some time."""
        self.module.cuda._sleep(_CYCLES)

    def write(self, x: Any, y: Any) -> None:
        """Copy `y` to `x` on the current stream."""
        x.copy_(y)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture a function in a graph; return the function that replays it."""
        graph, before = self.module.cuda.CUDAGraph(), self.module.cuda.current_stream()
        try:
            with self.module.cuda.graph(graph):
                body()
        finally:
            self.module.cuda.set_stream(before)  # a broken capture leaves its stream behind
        return graph.replay  # type: ignore[no-any-return]

    def synchronize(self, result: Any = None) -> None:
        self.module.cuda.synchronize()


class _Cupy(Framework):
    """cupy."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy
        import numpy

        self.module: Any = cupy
        self.numpy: Any = numpy
        self.make()
        self.to_device = cupy.asarray
        self.to_host = cupy.asnumpy
        self.from_dlpack = cupy.from_dlpack

    def version(self) -> str:
        runtime = self.module.cuda.runtime
        return f"{self.module.__version__}, runtime {runtime.runtimeGetVersion()}, {runtime.getDeviceCount()} device(s)"

    def make(self, values: Sequence[float] = HOST) -> Any:
        return self.module.asarray(self.numpy.asarray(values, "float32"))

    def make_unpooled(self) -> Any:
        with self.module.cuda.using_allocator(None):
            return self.make()

    def read(self, x: Any) -> list[float]:
        return list(x.get().tolist())

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def stream(self) -> Any:
        return self.module.cuda.Stream(non_blocking=True)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return stream  # type: ignore[no-any-return]

    def is_busy(self, stream: Any) -> bool:
        """Return whether a stream has unfinished work."""
        return not stream.done

    def hold(self) -> None:
        """Make the current stream busy for some time."""
        self.module.RawKernel(_WAIT, "dlx_wait")((1,), (1,), (self.numpy.int64(_CYCLES),))

    def write(self, x: Any, y: Any) -> None:
        """Copy `y` to `x` on the current stream."""
        x.data.copy_from_device_async(y.data, y.nbytes)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture a function in a graph; return the function that replays it."""
        with self.stream() as stream:
            stream.begin_capture()
            try:
                body()
            finally:
                graph = stream.end_capture()

        def replay() -> None:
            with stream:
                graph.launch()

        return replay

    def synchronize(self, result: Any = None) -> None:
        self.module.cuda.runtime.deviceSynchronize()


class _Jax(Framework):
    """jax, which has streams of its own."""

    name = "jax"

    def __init__(self) -> None:
        import jax
        import numpy

        self.module: Any = jax
        self.numpy: Any = numpy
        device = jax.local_devices(backend="cuda")[0]
        self.to_device = lambda a: jax.device_put(a, device)
        self.from_dlpack = jax.dlpack.from_dlpack

    def version(self) -> str:
        return f"{self.module.__version__}, {len(self.module.local_devices(backend='cuda'))} device(s)"

    def make(self, values: Sequence[float] = HOST) -> Any:
        assert self.to_device
        return self.to_device(self.numpy.asarray(values, "float32")).block_until_ready()

    def read(self, x: Any) -> list[float]:
        return list(self.numpy.asarray(x).tolist())

    def address(self, x: Any) -> int:
        return int(x.unsafe_buffer_pointer())

    def synchronize(self, result: Any = None) -> None:
        self.module.block_until_ready(result)


class _Numba(Framework):
    """numba, as a producer with `__cuda_array_interface__`."""

    name = "numba"

    def __init__(self) -> None:
        import numpy

        self.module: Any = importlib.import_module("numba.cuda")
        self.numpy: Any = numpy
        self.make()

    def make(self, values: Sequence[float] = HOST) -> Any:
        return self.module.to_device(self.numpy.asarray(values, "float32"))

    def read(self, x: Any) -> list[float]:
        return list(x.copy_to_host().tolist())

    def address(self, x: Any) -> int:
        return int(x.device_ctypes_pointer.value)


FRAMEWORKS: dict[str, type[Framework]] = {
    "dlx": Framework, "torch": _Torch, "cupy": _Cupy, "jax": _Jax, "numba": _Numba,
}  # fmt: skip
