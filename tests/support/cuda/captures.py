"""Conversions inside a graph capture of torch, for the recording driver and for a device."""

from __future__ import annotations

import contextlib
import gc

import dlx
from dlx.errors import StreamError

N = 64
OK, REFUSED = "ok", "StreamError"


class Arrays:
    """The arrays of both frameworks, and of the host, that exist before a capture."""

    def __init__(self, np, torch, cupy):
        self.np, self.torch, self.cupy = np, torch, cupy
        self.static = torch.zeros(N, device="cuda")
        self.static += 1  # loads the kernel
        self.static.zero_()
        self.host = np.ones(N, "float32")
        self.pinned = torch.arange(N, dtype=torch.float32).pin_memory()
        self.cupy0 = cupy.zeros(N, "float32")
        torch.cuda.synchronize()
        cupy.cuda.runtime.deviceSynchronize()
        self.middle = dlx.convert(self.static, to="dlx")
        self.own = dlx.convert(self.host, to="dlx", device="cuda")
        self.devices = torch.cuda.device_count()
        for number in range(min(self.devices, 2)):  # contexts, pools and streams
            for to in ("torch", "cupy", "dlx"):
                dlx.convert(dlx.convert(self.host, to=to, device=f"cuda:{number}"), to="numpy")
        if self.devices > 1:
            self.torch1 = torch.zeros(N, device="cuda:1")
            self.middle1 = dlx.convert(self.torch1, to="dlx")
            with cupy.cuda.Device(1):
                self.cupy1 = cupy.zeros(N, "float32")
            torch.cuda.synchronize(1)
        torch.cuda.synchronize()

    @contextlib.contextmanager
    def one_stream(self):
        """Let cupy work on torch's current stream."""
        with self.cupy.cuda.Stream.from_external(self.torch.cuda.current_stream()):
            yield


def _to(name, to, **options):
    return lambda a: dlx.convert(getattr(a, name), to=to, **options)


def _joined(call):
    """Let cupy work on torch's stream during a conversion."""

    def run(arrays):
        with arrays.one_stream():
            return call(arrays)

    return run


def _reversed(arrays):
    return dlx.convert(arrays.cupy0[::-1], to="torch")


TWO = "two devices"
"""(what it needs besides one device, what it must say, the conversion), by name."""
CONVERSIONS = {
    "torch to dlx": ("", OK, _to("static", "dlx")),
    "dlx to torch": ("", OK, _to("middle", "torch")),
    "dlx to torch, copy": ("", REFUSED, _to("middle", "torch", copy=True)),
    "own to torch": ("", OK, _to("own", "torch")),
    "own to torch, copy": ("", REFUSED, _to("own", "torch", copy=True)),
    "torch to torch, copy": ("", OK, _to("static", "torch", copy=True)),
    "torch to dlx, copy": ("", REFUSED, _to("static", "dlx", copy=True)),
    "torch to cupy, one stream": ("", OK, _joined(_to("static", "cupy"))),
    "torch to cupy, one stream, copy": ("", REFUSED, _joined(_to("static", "cupy", copy=True))),
    "cupy to torch, one stream": ("", OK, _joined(_to("cupy0", "torch"))),
    "cupy to torch, one stream, copy": ("", OK, _joined(_to("cupy0", "torch", copy=True))),
    "cupy to torch, one stream, reversed": ("", REFUSED, _joined(_reversed)),
    "cupy to cupy, one stream, copy": ("", REFUSED, _joined(_to("cupy0", "cupy", copy=True))),
    "cupy to torch, two streams": ("", REFUSED, _to("cupy0", "torch")),
    "cupy to torch, two streams, reversed": ("", REFUSED, _reversed),
    "numpy to torch": ("", REFUSED, _to("host", "torch", device="cuda")),
    "list of numpy to torch": ("", REFUSED, lambda a: dlx.convert([a.host], to="torch", device="cuda")),
    "numpy to cupy, one stream": ("", REFUSED, _joined(_to("host", "cupy"))),
    "numpy to dlx": ("", OK, _to("host", "dlx", device="cuda")),
    "pinned torch to torch": ("", REFUSED, _to("pinned", "torch", device="cuda")),
    "pinned numpy to torch": ("", REFUSED, lambda a: dlx.convert(a.pinned.numpy(), to="torch", device="cuda")),
    "host torch to torch": ("", REFUSED, lambda a: dlx.convert(a.torch.ones(N), to="torch", device="cuda")),
    "torch to the host": ("", REFUSED, _to("static", "torch", device="cpu")),
    "torch to numpy": ("", REFUSED, _to("static", "numpy")),
    "torch 1 to torch 0": (TWO, REFUSED, _to("torch1", "torch", device="cuda:0")),
    "torch 0 to torch 1": (TWO, REFUSED, _to("static", "torch", device="cuda:1")),
    "torch 1 to numpy": (TWO, OK, _to("torch1", "numpy")),
    "cupy 1 to torch 0": (TWO, REFUSED, _to("cupy1", "torch", device="cuda:0")),
    "dlx 1 to torch 0": (TWO, REFUSED, _to("middle1", "torch", device="cuda:0")),
    "cupy 1 to cupy 0, one stream": (TWO, REFUSED, _joined(_to("cupy1", "cupy", device="cuda:0"))),
    "stack": ("", OK, lambda a: dlx.stack([a.static, a.static], "torch")),
    "stack in cupy, one stream": ("", REFUSED, _joined(lambda a: dlx.stack([a.static, a.static], "cupy"))),
    "stack of two streams": ("", REFUSED, lambda a: dlx.stack([a.static, a.cupy0], "torch")),
    "stack in dlx": ("", REFUSED, lambda a: dlx.stack([a.static, a.static], "dlx")),
    "list": ("", OK, lambda a: dlx.convert([a.static, a.middle, a.own], to="torch")),
    "empty": ("", OK, lambda a: dlx.empty(N, "float32", "cuda")),
    "capsule": ("", REFUSED, lambda a: dlx.to_capsule(a.static, max_version=(1, 0))),
    "interface of dlx": ("", OK, lambda a: a.middle.__cuda_array_interface__),
    "interface of own memory": ("", OK, lambda a: a.own.__cuda_array_interface__),
    "from_dlpack of own memory": ("", OK, lambda a: a.torch.from_dlpack(a.own)),
    "plan": ("", OK, lambda a: dlx.plan(a.static, to="numpy")),
    "release_pending": ("", OK, lambda a: dlx.release_pending()),
}
NODES = {  # conversions that add copies to the graph, in memory of the graph
    "torch to torch, copy",
    "cupy to torch, one stream, copy",
}


def capture(arrays, call):
    """Run a conversion inside a capture that torch begins; return what it said, and the graph.

    A broken capture raises here.
    """
    graph = arrays.torch.cuda.CUDAGraph()
    with arrays.torch.cuda.graph(graph):
        arrays.static.add_(1)
        try:
            result = call(arrays)
            said = OK
        except StreamError as error:
            said, result = REFUSED, None
            assert str(error).startswith("cannot "), error
        arrays.static.add_(1)
    del result
    gc.collect()
    return said, graph
