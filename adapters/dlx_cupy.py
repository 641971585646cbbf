"""CuPy for dlx: cupy.ndarray on CUDA devices, of any wheel (cupy-cuda12x, cupy-cuda13x), and on ROCm.

Versions: 13 and later. Devices: CUDA device memory and CUDA managed memory, each under its true name; on a ROCm build
ROCm's. Dtypes: those that cupy takes through DLPack; bfloat16 from 14 on, with ml_dtypes. float8 is refused: cupy would
export it under the code of an ordinary float. Shared: every layout. Copied: read-only memory, since
cupy drops the flag; memory of the host, which goes to cupy's current device. Refused: byte strides that are no whole
elements.

Streams: cupy has a current one per thread and device; dlx synchronizes streams once per conversion.
"""

from __future__ import annotations

import contextlib
import functools
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
        # cupy keeps the class of ml_dtypes that it exchanges as bfloat16, from 14 on and where that is installed.
        found = api.look_up("cupy._core.dlpack.bfloat16") if attribute == "bfloat16" else getattr(cupy, attribute)
        return None if found is None else cupy.dtype(found)


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
            raise DeviceError(f"cupy has no device {device}", fix=f"Say '{self.kind}:0'.")
        return sys.modules["cupy"].cuda.Device(device.id)

    def from_native(self, native_device: Any) -> api.Device:
        return api.Device(f"{self.kind}:{int(native_device)}")

    def new_array(self, shape: Sequence[int], dtype: api.DType, device: api.Device, strides: Sequence[int]) -> Any:
        cupy, native = sys.modules["cupy"], DTYPES.to_native(dtype)
        with self.to_native(device):
            memory = cupy.cuda.alloc(math.prod(shape) * native.itemsize)
            return cupy.ndarray(shape, native, memory, [step * native.itemsize for step in strides])

    def available(self) -> Iterable[Any]:
        runtime = sys.modules["cupy"].cuda.runtime
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError:  # there is no driver, or it sees no device
            count = 0
        return (sys.modules["cupy"].cuda.Device(number) for number in range(count))

    def default(self) -> api.Device:
        kind = api.Device(self.kind).type
        return api.Device(kind, self.current(kind))

    def current(self, device_type: int) -> int:
        try:
            return int(sys.modules["cupy"].cuda.runtime.getDevice())
        except RuntimeError:  # there is no driver: dlx raises when it needs it
            return 0

    def activate(self, device: api.Device) -> AbstractContextManager[Any]:
        # from_dlpack makes the array's device current by itself; only exports on ROCm look at the current one.
        return self.to_native(device) if self.kind == "rocm" else contextlib.nullcontext()


DEVICES = _Devices()


def _current_stream(device: api.Device) -> Any:
    return sys.modules["cupy"].cuda.get_current_stream(device.id)


def _asked_by_number() -> tuple[Any, str]:
    return sys.modules["cupy"].cuda.get_current_stream, "ptr"


@contextlib.contextmanager
def _on_stream(stream: api.Stream) -> Iterator[None]:
    """Return a context in which cupy works on a stream of another."""
    kept = stream.keep
    # cupy's own streams are entered. Others get a wrapper that never destroys the stream.
    if not (isinstance(kept, sys.modules["cupy"].cuda.Stream) and kept.ptr in (stream.handle, 0)):
        kept = _borrowed()(stream.handle, stream.device.id)
    # A stream is entered while its device is current. The current device is per thread and not to be changed.
    with DEVICES.to_native(stream.device):
        kept.__enter__()
    try:
        yield
    finally:
        with DEVICES.to_native(stream.device):
            kept.__exit__(None, None, None)


@functools.cache
def _borrowed() -> Any:
    """Return cupy's wrapper of a foreign stream without its DeprecationWarning: what replaces it destroys streams."""
    plain = sys.modules["cupy"].cuda.ExternalStream

    class Borrowed(plain):  # type: ignore[valid-type, misc]
        def __init__(self, handle: int, device_id: int) -> None:
            super(plain, self).__init__(handle, device_id)

    return Borrowed


class CupyAdapter(api.Adapter):
    """cupy.ndarray."""

    name = package = "cupy"
    types = ("cupy.ndarray",)
    namespaces = ("array_api_compat.cupy", "cupy")
    dtypes = DTYPES
    devices = DEVICES
    fast_path = api.FastPath(types=types, owner=api.Owner("data", address="ptr"))
    streams = api.StreamSupport(current=_current_stream, activate=_on_stream, quick=_asked_by_number)
    containers = (
        api.file_handler("cupy._io.npz.NpzFile", names=lambda npz: npz.npz_file.files, read=lambda npz, key: npz[key]),
    )

    def describe(self, obj: Any) -> api.Description:
        info, blocker = functools.partial(self._info, obj), self._blocker(obj)
        if blocker is not None:
            return api.Description(info, (blocker,))
        return api.Description(info, (), None if DEVICES.kind == "rocm" else self.export(obj))

    def _blocker(self, obj: Any) -> api.Blocker | None:
        if DTYPES.from_native(obj.dtype) is None:
            fix = "Call .view('uint8') or .view('uint16') if the bytes are what you need."
            return api.Blocker(f"cupy's {obj.dtype} has no DLPack dtype that cupy exports truly", fix, DTypeError)
        if not _whole_elements(obj):
            because = f"its byte strides {obj.strides} are not multiples of the item size {obj.dtype.itemsize}"
            return api.Blocker(because, resolution=self.copy, needs="copy")
        return None

    def _info(self, obj: Any) -> api.ArrayInfo:
        itemsize = obj.dtype.itemsize
        whole = _whole_elements(obj)
        return api.ArrayInfo(
            framework=self.name,
            type_name=api.type_name(type(obj)),
            dtype=DTYPES.from_native(obj.dtype),
            dtype_name=str(obj.dtype),
            shape=tuple(obj.shape),
            strides=tuple(step // itemsize for step in obj.strides) if whole else None,
            device=api.Device(obj.__dlpack_device__()),
            nbytes=obj.size * itemsize,
            address=int(obj.data.ptr) if obj.size else 0,
            owner=api.type_name(type(obj.data.mem)),
            protocols=("__dlpack__", "__cuda_array_interface__"),
        )

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        if DEVICES.kind == "rocm":  # whose streams cupy orders itself
            return super().export(obj, stream=stream)
        dtype = DTYPES.from_native(obj.dtype)
        assert dtype is not None
        strides = [step // obj.dtype.itemsize for step in obj.strides]
        # Its owner is the memory, not the array: whose shape and strides may be changed.
        address = int(obj.data.ptr) if obj.size else 0
        return api.over_memory(address, obj.shape, strides, dtype, api.Device(obj.__dlpack_device__()), owner=obj.data)

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
        here, event = api.Device(f"{DEVICES.kind}:{obj.data.device_id}"), sys.modules["cupy"].cuda.Event
        if device is None or device.id == here.id:
            with DEVICES.to_native(here):
                return obj.copy()
        # cupy orders nothing between the streams of two devices: the copy comes after what writes to the source now,
        # and before what does so next.
        with DEVICES.to_native(device):
            target, read = _current_stream(device), event(disable_timing=True)
            captures = _is_capturing(target)
        with DEVICES.to_native(here):
            source, written = _current_stream(here), event(disable_timing=True)
            if _is_capturing(source) or captures:
                why = "a stream is capturing a graph, which no copy between devices can be a part of"
                raise StreamError(why, fix="Move it before the capture begins.")
            source.record(written)
        with DEVICES.to_native(device):
            target.wait_event(written)
            result = obj.copy()
            target.record(read)
        with DEVICES.to_native(here):
            source.wait_event(read)
        return result


def _is_capturing(stream: Any) -> bool:
    return bool(stream.ptr and stream.is_capturing())  # the default stream cannot, and must not be asked then


def _whole_elements(obj: Any) -> bool:
    itemsize = obj.dtype.itemsize
    return all(step % itemsize == 0 for step, extent in zip(obj.strides, obj.shape, strict=True) if extent > 1)


dlx_adapters = api.offer(CupyAdapter())
