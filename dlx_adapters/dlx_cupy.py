"""The CuPy adapter: cupy.ndarray on CUDA, of any wheel (cupy-cuda12x, cupy-cuda13x), and on ROCm.

Versions: 13 and later. Devices: CUDA device memory and CUDA managed memory; ROCm with a ROCm build. Dtypes: those that
cupy imports by DLPack; bfloat16 from 14 on, with ml_dtypes. float8 is refused: cupy would export it with the code of an
ordinary float. Shared: all layouts. Copied: read-only memory, because cupy drops the flag; host memory, to cupy's
current device; byte strides of partial elements.

Streams: cupy has a current stream per thread and device; dlx synchronizes streams once per conversion.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dlx import adapter as api
from dlx.errors import DeviceError, DTypeError, StreamError


class _DTypes(api.DTypes):
    def native(self, attribute: str) -> Any:
        cupy = sys.modules["cupy"]
        # From 14 on, if ml_dtypes is installed, cupy has its class for bfloat16.
        found = api.look_up("cupy._core.dlpack.bfloat16") if attribute == "bfloat16" else getattr(cupy, attribute)
        return None if found is None else cupy.dtype(found)

    def cast(self, array: Any, dtype: api.DType, out: Any = None) -> Any:
        with array.device if out is None else out.device:
            if out is not None:
                out[...] = array
                return out
            return array.astype(self.to_native(dtype))


_NAMES = (*api.COMMON_DTYPES, "complex64", "complex128")
DTYPES = _DTypes("cupy", {name: name for name in _NAMES} | {"bool": "bool_"})


# ---- devices and streams ---------------------------------------------------------------------------------------------


class _Devices(api.Devices):
    @functools.cached_property
    def kind(self) -> str:
        """The device of this build: "cuda" or "rocm"."""
        return "rocm" if sys.modules["cupy"].cuda.runtime.is_hip else "cuda"

    def to_native(self, device: api.Device) -> Any:
        if device.name not in (self.kind, "cuda_managed"):
            raise DeviceError(f"cupy has no device {device}", fix=f"Pass device='{self.kind}:0'.")
        return sys.modules["cupy"].cuda.Device(device.id)

    def from_native(self, native_device: Any) -> api.Device:
        return api.Device(f"{self.kind}:{int(native_device)}")

    @property
    def pins(self) -> bool:  # type: ignore[override]
        return self.kind == "cuda"

    def new_array(self, shape: Sequence[int], dtype: api.DType, device: api.Device, strides: Sequence[int]) -> Any:
        cupy, native = sys.modules["cupy"], DTYPES.to_native(dtype)
        if _is_capturing(_current_stream(device)):
            return None  # memory of cupy's pool does not belong to the graph
        nbytes = math.prod(shape) * native.itemsize
        if device.name == "cuda_host":  # cupy has no type for it, and reads it by the address
            pinned = cupy.cuda.alloc_pinned_memory(nbytes)
            memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pinned.ptr, nbytes, pinned, device.id), 0)
        else:
            with self.to_native(device):
                memory = cupy.cuda.alloc(nbytes)
        return cupy.ndarray(shape, native, memory, [step * native.itemsize for step in strides])

    def available(self) -> Iterable[Any]:
        cuda = sys.modules["cupy"].cuda
        with contextlib.suppress(cuda.runtime.CUDARuntimeError):
            return [cuda.Device(number) for number in range(cuda.runtime.getDeviceCount())]
        return ()

    def default(self) -> api.Device:
        kind = api.Device(self.kind).type
        return api.Device(kind, self.current(kind))

    def current(self, device_type: int) -> int:
        try:
            return int(sys.modules["cupy"].cuda.runtime.getDevice())
        except RuntimeError:  # no driver; dlx raises later if it needs one
            return 0

    def activate(self, device: api.Device) -> AbstractContextManager[Any]:
        # from_dlpack sets the current device itself; only exports on ROCm use it.
        return self.to_native(device) if self.kind == "rocm" else contextlib.nullcontext()


DEVICES = _Devices(moves=False)  # cupy does not synchronize two devices


def _current_stream(device: api.Device) -> Any:
    return sys.modules["cupy"].cuda.get_current_stream(device.id)


def _find_stream_getter() -> tuple[Any, str]:
    return sys.modules["cupy"].cuda.get_current_stream, "ptr"


@contextlib.contextmanager
def _on_stream(stream: api.Stream) -> Iterator[None]:
    """Return a context in which cupy uses another framework's stream."""
    native = stream.keep
    # Streams of other frameworks get a wrapper that does not destroy them.
    if not (isinstance(native, sys.modules["cupy"].cuda.Stream) and native.ptr in (stream.handle, 0)):
        base = sys.modules["cupy"].cuda.ExternalStream
        native = base.__new__(base)
        super(base, native).__init__(stream.handle, stream.device.id)  # its own __init__ says that it is deprecated
    # cupy requires the stream's device to be current; restore the thread's current device.
    with DEVICES.to_native(stream.device):
        native.__enter__()
    try:
        yield
    finally:
        with DEVICES.to_native(stream.device):
            native.__exit__(None, None, None)


def _split(obj: Any) -> dict[str, Any]:
    shape = tuple(map(int, obj.shape))
    if obj.format == "coo":
        return {"data": obj.data, "coords": [obj.row, obj.col], "shape": shape}
    return {"data": obj.data, "indices": obj.indices, "indptr": obj.indptr, "shape": shape}


def _join(kind: str, parts: dict[str, Any]) -> Any:
    create = getattr(importlib.import_module("cupyx.scipy.sparse"), f"{kind}_matrix")
    data = parts["data"]
    arrays = (data, tuple(parts["coords"])) if kind == "coo" else (data, parts["indices"], parts["indptr"])
    return create(arrays, shape=parts["shape"])


def _sparse(kind: str) -> api.Compound:
    """Return the declaration of cupyx's matrices of one kind, whose indices are int32."""
    types, indices = (f"cupyx.scipy.sparse.{kind}_matrix",), dict.fromkeys(("coords", "indices", "indptr"), ("int32",))
    return api.Compound(kind, types, _split, functools.partial(_join, kind), None, indices, ".toarray()")


class CupyAdapter(api.Adapter):
    """cupy.ndarray."""

    name = package = "cupy"
    types = ("cupy.ndarray",)
    namespaces = ("array_api_compat.cupy", "cupy")
    dtypes = DTYPES
    devices = DEVICES
    fast_path = api.FastPath(types=types, owner=api.Owner("data", address="ptr"))
    streams = api.StreamSupport(current=_current_stream, activate=_on_stream, quick=_find_stream_getter)
    containers = (
        api.file_handler("cupy._io.npz.NpzFile", names=lambda npz: npz.npz_file.files, read=lambda npz, key: npz[key]),
        *map(_sparse, ("csr", "csc", "coo")),
    )

    def describe(self, obj: Any) -> api.Description:
        info = functools.partial(self._info, obj)
        if DTYPES.from_native(obj.dtype) is None:
            fix = "Call .view('uint8') or .view('uint16') if you need the bytes."
            return api.Description(info, (api.Blocker(f"cupy does not export {obj.dtype} correctly", fix, DTypeError),))
        if _strides_of(obj) is None:
            because = f"its byte strides {obj.strides} are not multiples of the item size {obj.dtype.itemsize}"
            return api.Description(info, (api.Blocker(because, resolution=self.copy, needs="copy"),))
        return api.Description(info, (), None if DEVICES.kind == "rocm" else self.export(obj))

    def _info(self, obj: Any) -> api.ArrayInfo:
        return api.ArrayInfo(
            framework=self.name,
            type_name=api.type_name(type(obj)),
            dtype=DTYPES.from_native(obj.dtype),
            dtype_name=str(obj.dtype),
            shape=tuple(obj.shape),
            strides=_strides_of(obj),
            device=_device_of(obj),
            nbytes=obj.size * obj.dtype.itemsize,
            address=_address_of(obj),
            owner=api.type_name(type(obj.data.mem)),
            protocols=("__dlpack__", "__cuda_array_interface__"),
        )

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        if DEVICES.kind == "rocm":  # cupy synchronizes these streams itself
            return super().export(obj, stream=stream)
        dtype = DTYPES.from_native(obj.dtype)
        assert dtype is not None
        strides = [step // obj.dtype.itemsize for step in obj.strides]
        # The owner is the memory, because the array's shape and strides may change.
        return api.over_memory(_address_of(obj), obj.shape, strides, dtype, _device_of(obj), owner=obj.data)

    def capabilities(self) -> api.Capabilities:
        kinds = ("rocm",) if DEVICES.kind == "rocm" else ("cuda", "cuda_managed")
        return api.Capabilities(
            dtypes=DTYPES.known(),
            device_types=frozenset(api.Device(kind).type for kind in kinds),
            layouts=api.Layout.ANY,
            ndims=(0, 64 if int(sys.modules["cupy"].__version__.partition(".")[0]) >= 14 else 32),
        )

    def load(self, tensor: api.Tensor) -> Any:
        return sys.modules["cupy"].from_dlpack(tensor)

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        here = api.Device(f"{DEVICES.kind}:{obj.data.device_id}")
        with DEVICES.to_native(here):
            if _is_capturing(_current_stream(here)):
                why = "its stream is capturing a graph, and a copy in cupy's memory would not belong to the graph"
                raise StreamError(why, fix="Copy it before the capture starts.")
            return obj.copy()


def _device_of(obj: Any) -> api.Device:
    if DEVICES.kind == "cuda":  # cupy asks the driver, also in a forked child
        api.require_cuda()
    return api.Device(obj.__dlpack_device__())


def _is_capturing(stream: Any) -> bool:
    return bool(stream.ptr and stream.is_capturing())  # must not be called on the default stream


def _address_of(obj: Any) -> int:
    return int(obj.data.ptr) if obj.size else 0


def _strides_of(obj: Any) -> tuple[int, ...] | None:
    """Return the strides in elements; None for partial elements."""
    itemsize = obj.dtype.itemsize
    odd = any(step % itemsize for step, extent in zip(obj.strides, obj.shape, strict=True) if extent > 1)
    return None if odd else tuple(step // itemsize for step in obj.strides)


dlx_adapters = api.offer(CupyAdapter())
