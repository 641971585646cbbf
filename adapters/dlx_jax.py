"""JAX for dlx: jax.Array.

Versions: 0.10 and later (0.10.2 and 0.12.0 are tested). Devices: the host, and CUDA's where a plugin of jax for them
is installed. Dtypes: bool, (u)int8 to 64, float16 to 64, bfloat16, the float8 kinds, complex64 and 128; 64-bit ones are
taken with x64 on only; int2, int4, uint2, uint4 and float4 are exported, packed, and not imported.
Shared: compact data aligned to 64 bytes, in any order of dimensions; out of jax always read-only. Copied: whatever is
strided otherwise or less aligned (into memory of dlx, which jax then shares), and sub-byte integers out of jax.
Refused: what jax would narrow (x64 off), tracers, deleted and donated arrays, arrays on several devices, typed PRNG
keys, sparse arrays, mutable references; everything, where jax was told to do without the host (JAX_PLATFORMS).

Jax arrays are constant. Memory that jax shares is never written to by jax, also not when the array is donated; no other
code may write to it while the jax array lives, since jax may read it at any time.

Streams: jax has no current one. An exported device array makes the consumer's stream wait for it; an import waits on a
stream of jax's own, which jax passes to the producer.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
from collections.abc import Iterable
from typing import Any

import dlx
from dlx.adapter import (
    Adapter,
    ArrayInfo,
    Blocker,
    Capabilities,
    Defect,
    Device,
    DType,
    Layout,
    Tensor,
    look_up,
    over_memory,
    type_name,
    unmarked,
)
from dlx.errors import AdapterNotFoundError, ConversionError, DeviceError, DTypeError, LayoutError

HOST = Device("cpu")
CUDA = Device("cuda").type
_PLATFORMS = {"cpu": "cpu", "cuda": "cuda", "rocm": "rocm", "gpu": "cuda"}
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})  # narrowed by jax where x64 is off
_UNNAMED = frozenset({"int1", "uint1", "int2", "int4", "uint2", "uint4"})  # jax has them, and no DLPack dtype for them
_UNTAKEN = _UNNAMED | {"float4_e2m1fn"}


class JaxAdapter(Adapter):
    """jax.Array."""

    name = "jax"
    package = "jax"
    install = "pip install jax"
    types: tuple[str, ...] = ("jax.Array", "jax.core.Tracer", "jax.Ref", "jax.experimental.sparse.JAXSparse")
    immutable = True
    fresh_alignment = 64
    constant = False  # x64 is switched at run time
    depends_on = ("config.jax_enable_x64", "config.jax_platforms")
    dtypes = {
        "bool": "bool_",
        "int1": "int1",
        "int2": "int2",
        "int4": "int4",
        "int8": "int8",
        "int16": "int16",
        "int32": "int32",
        "int64": "int64",
        "uint1": "uint1",
        "uint2": "uint2",
        "uint4": "uint4",
        "uint8": "uint8",
        "uint16": "uint16",
        "uint32": "uint32",
        "uint64": "uint64",
        "float16": "float16",
        "float32": "float32",
        "float64": "float64",
        "bfloat16": "bfloat16",
        "complex64": "complex64",
        "complex128": "complex128",
        "float8_e3m4": "float8_e3m4",
        "float8_e4m3": "float8_e4m3",
        "float8_e4m3b11fnuz": "float8_e4m3b11fnuz",
        "float8_e4m3fn": "float8_e4m3fn",
        "float8_e4m3fnuz": "float8_e4m3fnuz",
        "float8_e5m2": "float8_e5m2",
        "float8_e5m2fnuz": "float8_e5m2fnuz",
        "float8_e8m0fnu": "float8_e8m0fnu",
        "float4_e2m1fn": "float4_e2m1fn",
    }
    defects = (
        Defect(
            does="from_dlpack narrows 64-bit data to 32 bits without a word where x64 is off, copy=False included",
            see="https://docs.jax.dev/en/latest/default_dtypes.html",
            lowers={"narrows_without_x64": _WIDE},
        ),
        Defect(
            does="gives float4 out and does not take it back: 'PjRt CPU buffers only support default layout'",
            see="tests/test_defects.py",
            lowers={"refuses": _UNTAKEN},
        ),
        Defect(
            does="gives no integers of less than a byte out, which DLPack can say; dlx reads a copy of jax's own",
            see="tests/test_defects.py",
        ),
        Defect(
            does="asks for legacy capsules only, which no producer may make of read-only memory",
            see="https://github.com/jax-ml/jax/issues/40789",
            before="0.12",
            lowers={"hears_readonly": False},
        ),
    )

    # ---- dtypes and devices -----------------------------------------------------------------------------------------

    def native_dtype(self, attribute: str) -> Any:
        numpy = self.module().numpy
        scalar = getattr(numpy, attribute, None)
        return None if scalar is None else numpy.dtype(scalar)

    def accepts(self) -> Capabilities:
        lowered = self.lowered
        narrows = (
            frozenset() if self.module().config.jax_enable_x64 else lowered.get("narrows_without_x64", frozenset())
        )
        return Capabilities(
            dtypes=self.known_dtypes() - narrows - lowered.get("refuses", frozenset()),
            narrows=narrows,
            device_types=frozenset(
                kind for kind, there in ((HOST.type, self._has_host()), (CUDA, self._has_cuda())) if there
            ),
            layouts=Layout.PERMUTED,
            min_alignment=64,
            max_ndim=64,
            keeps_readonly=True,  # jax never writes
            empty_extents="leading bytes",
        )

    def why_untaken(self, dtype: DType) -> tuple[str, str] | None:
        if self.capabilities is not None and dtype.name in self.capabilities.narrows:
            return f"jax would narrow {dtype} to {dtype.bits // 2} bits, since x64 is off", _X64_ON
        if dtype.name in _UNTAKEN:
            return f"jax has {dtype} and takes none from others", "Convert wider values and call .astype there."
        return None

    def why_not_on(self, device: Device) -> tuple[str, str] | None:
        if device.type == HOST.type and not self._has_host():
            found = self.module().config.jax_platforms
            return (
                f"jax was told to use {found!r} only, without the host",
                f'Set JAX_PLATFORMS={found},cpu, or say jax.config.update("jax_platforms", "{found},cpu") first.',
            )
        return None

    def _has_host(self) -> bool:
        """Say whether jax may use the host; asks no backend, since that would start them all."""
        platforms = self.module().config.jax_platforms
        return not platforms or "cpu" in platforms.split(",")

    def _has_cuda(self) -> bool:
        """Say whether jax may use CUDA; likewise."""
        platforms = self.module().config.jax_platforms
        named = not platforms or not {"cuda", "gpu"}.isdisjoint(platforms.split(","))
        return named and _has_cuda_plugin()

    def device_to(self, device: Device) -> Any:
        if device.type != CUDA or not self._has_cuda():
            super().device_to(device)
            return self._local(device.id)
        devices = self.module().local_devices(backend="cuda")
        for each in devices:
            if each.local_hardware_id == device.id:
                return each
        raise DeviceError(f"jax sees no device {device}", fix=f"It has {len(devices)} of CUDA: cuda:0 and so on.")

    def device_from(self, native_device: Any) -> Device:
        platform = native_device.platform
        if platform == "gpu" and "rocm" in native_device.client.platform_version:
            platform = "rocm"
        if platform not in _PLATFORMS:
            raise DeviceError(f"DLPack has no device for jax's {platform!r}", fix="Move the array to the host first.")
        return Device(f"{_PLATFORMS[platform]}:{native_device.local_hardware_id or 0}")

    def devices(self) -> Iterable[Any]:
        jax = self.module()
        yield from jax.local_devices()
        if self._has_host() and jax.default_backend() != "cpu":
            yield from jax.local_devices(backend="cpu")

    def _local(self, number: int) -> Any:
        """Return the host device of a number; the first one where there is none of it."""
        devices = self.module().local_devices(backend="cpu")
        return next((each for each in devices if each.local_hardware_id == number), devices[0])

    def narrowed(self, kind: type) -> Adapter:
        if kind is not self.module().Array:
            raise AdapterNotFoundError(f"{type_name(kind)} cannot be a target", fix="Say to='jax'.")
        return self._only_arrays

    @functools.cached_property
    def _only_arrays(self) -> Adapter:
        arrays = copy.copy(self)
        arrays.__dict__.pop("_variants", None)
        arrays.types = self.types[:1]
        arrays.part_of = self
        return arrays

    # ---- as a producer ----------------------------------------------------------------------------------------------

    def examine(self, obj: Any) -> Iterable[Blocker]:
        refused = self._without_array(obj) or self._without_memory(obj)
        if refused is not None:
            yield refused
        elif self.dtype_from(obj.dtype) is None:
            yield _refuse(f"DLPack has no dtype {obj.dtype}", "Convert the values with .astype first.", DTypeError)
        elif str(obj.dtype) in _UNNAMED:
            yield Blocker(
                f"jax gives no {obj.dtype} out, so that dlx reads a copy of jax's own",
                "Drop copy=False.",
                resolution="copy",
                copies=True,
            )
        elif str(obj.dtype) in _UNTAKEN and (_strides(obj) or ()) != _row_major(obj.shape):
            yield Blocker(
                f"its {obj.dtype} elements are packed and not in row-major order",
                "Drop copy=False.",
                resolution="copy",
                copies=True,
            )

    def _without_array(self, obj: Any) -> Blocker | None:
        """Return why something of jax is no array with values, or None."""
        if _is_a(obj, "jax.core.Tracer"):
            return _refuse(
                "inside a jax transformation (jit, grad, vmap, scan) values have no data",
                "Convert outside of it, or call back with jax.pure_callback.",
            )
        if _is_a(obj, "jax.Ref"):
            return _refuse("it is a mutable reference", "Convert its value, ref[...].", no_copy=True)
        if _is_a(obj, "jax.experimental.sparse.JAXSparse"):
            return _refuse("it is sparse", "Call .todense() first.", no_copy=True)
        if self.module().dtypes.issubdtype(obj.dtype, self.module().dtypes.extended):
            return _refuse(
                f"it holds {obj.dtype}, which is no number", "Convert jax.random.key_data(key) of a key.", DTypeError
            )
        return None

    def _without_memory(self, obj: Any) -> Blocker | None:
        """Return why an array has no memory that could be exported, or None."""
        if obj.is_deleted():
            return _refuse("it was deleted or donated", "Convert it before that, or a copy of it.", no_copy=True)
        if not obj.is_fully_addressable:
            return _refuse(
                "parts of it are in other processes", "Convert its addressable_shards one by one.", DeviceError
            )
        if len(obj.sharding.device_set) > 1:
            return _refuse(
                f"it is spread over {len(obj.sharding.device_set)} devices",
                "Gather it with jax.device_put(x, jax.devices()[0]), or convert its addressable_shards one by one.",
                DeviceError,
            )
        (device,) = obj.sharding.device_set
        if device.platform != "cpu" and self._device_of(device) != self._cuda(device):
            return _refuse(
                f"it is on {device}, and dlx converts memory of the host and of CUDA",
                "Move it with jax.device_put(x, jax.devices('cpu')[0]) first.",
                DeviceError,
            )
        return None

    def info(self, obj: Any) -> ArrayInfo:
        array = self._without_array(obj) is None
        there = array and self._without_memory(obj) is None
        devices = tuple(obj.sharding.device_set) if array else ()
        name = str(getattr(obj, "dtype", ""))
        return ArrayInfo(
            framework=self.name,
            type_name=type_name(type(obj)),
            dtype=self.dtype_from(obj.dtype) if array else _named(name),
            dtype_name=name,
            shape=tuple(getattr(obj, "shape", ())),
            strides=_strides(obj) if there else None,
            device=self._place_of(obj, devices[0]) if len(devices) == 1 else None,
            nbytes=_nbytes(obj) if array else 0,
            readonly=True,
            address=obj.unsafe_buffer_pointer() if there and obj.size else 0,
            owner=type_name(type(obj)),
            protocols=("__dlpack__",) if array else (),
        )

    def _place_of(self, obj: Any, native_device: Any) -> Device | None:
        device = self._device_of(native_device)
        if device is not None and device.type == CUDA and obj.sharding.memory_kind == "pinned_host":
            return Device(f"cuda_host:{device.id}")
        return device

    def _cuda(self, native_device: Any) -> Device:
        return Device(CUDA, native_device.local_hardware_id or 0)

    def _device_of(self, native_device: Any) -> Device | None:
        try:
            return self.device_from(native_device)
        except DeviceError:
            return None

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        if str(obj.dtype) not in _UNNAMED:
            # jax takes -1 for a handle. Without a stream it waits on the host.
            return super().export(obj, stream=None if stream == -1 else stream)
        # A copy that `examine` has asked for: it has no other references, so it cannot be deleted or donated.
        dtype = self.dtype_from(obj.dtype)
        assert dtype is not None
        obj.block_until_ready()
        address = obj.unsafe_buffer_pointer() if obj.size else 0
        return over_memory(address, obj.shape, None, dtype, self.info(obj).device or HOST, owner=obj)

    # ---- inside jax -------------------------------------------------------------------------------------------------

    def clone(self, obj: Any) -> Any:
        return obj.copy()

    def moved(self, obj: Any, device: Device) -> Any:
        return self.module().device_put(obj, self.device_to(device))

    # ---- as a consumer ----------------------------------------------------------------------------------------------

    def load(self, tensor: Tensor) -> Any:
        if tensor.readonly and not self.lowered.get("hears_readonly", True):
            tensor = unmarked(tensor)
        if tensor.device.type == HOST.type:
            number = self._local(tensor.device.id).local_hardware_id
            if tensor.device.id != number:
                device = Device(HOST.type, number)
                tensor = over_memory(tensor.data_ptr, tensor.shape, tensor.strides, tensor.dtype, device, owner=tensor)
        array = self.module().dlpack.from_dlpack(tensor)
        if array.dtype != self.dtype_to(tensor.dtype):  # another thread may see x64 switched on
            raise DTypeError(f"jax made {array.dtype} of {tensor.dtype}", fix=_X64_ON)
        return array


@functools.cache
def _has_cuda_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") is not None for major in (12, 13))


_X64_ON = 'Switch 64-bit dtypes on first: jax.config.update("jax_enable_x64", True).'


def _refuse(because: str, fix: str, error: type[ConversionError] = LayoutError, *, no_copy: bool = False) -> Blocker:
    return Blocker(because, fix, error, no_copy=no_copy)


def _nbytes(obj: Any) -> int:
    """Return the bytes of all elements; those of less than a byte are packed."""
    dtype = _named(str(obj.dtype))
    return -(-obj.size * dtype.bits // 8) if dtype is not None else int(obj.nbytes)


def _is_a(obj: Any, name: str) -> bool:
    kind = look_up(name)
    return isinstance(kind, type) and isinstance(obj, kind)


def _named(name: str) -> DType | None:
    try:
        return DType(name)
    except DTypeError:
        return None


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _strides(obj: Any) -> tuple[int, ...] | None:
    """Return the strides in elements that jax's layout stands for."""
    layout = obj.format.layout
    if layout is None:
        return None
    strides, step = [0] * obj.ndim, 1
    for axis in reversed(layout.major_to_minor):
        strides[axis] = step
        step *= obj.shape[axis]
    return tuple(strides)


@dlx.hookimpl
def dlx_adapters() -> list[Adapter]:
    """Return jax's adapter."""
    return [JaxAdapter()]
