"""The JAX adapter: jax.Array.

Versions: 0.10 and later (tested: 0.10.2 and 0.12.0). Devices: the host, and CUDA if jax's plugin is installed. Dtypes:
bool, (u)int8 to 64, float16 to 64, bfloat16, float8 types, complex64 and 128; imports of 64-bit dtypes require x64;
int2, int4, uint2, uint4 and float4 are exported packed, and copied on import.
Shared: compact data aligned to 64 bytes, in any order of dimensions; exports are always read-only; the first shard of
replicated arrays. Copied: other strides and alignments (into memory that jax then shares), exported sub-byte integers,
sharded arrays, which are gathered. Refused: dtypes that jax would narrow (x64 off), tracers, deleted and donated
arrays, arrays with parts in other processes, typed PRNG keys, sparse arrays, mutable references; all arrays if jax may
not use the host (JAX_PLATFORMS).

Placement: without ``device=``, as with `jax.numpy.asarray`: uncommitted, on jax's default device. If that is not the
host, host memory is copied there, unless ``copy=False`` is passed. Arrays are committed to the device of their memory
if it is not the default device, or if they are not in row-major order, because `jit` ignores the layout of uncommitted
arrays. With ``device=``, arrays are committed.

Jax arrays are constant: jax never writes to shared memory, even if an array is donated, and other code must not.
Streams: jax has no current stream. Exporting a device array makes the consumer's stream wait for it; importing waits on
a stream that jax passes to the producer.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
import sys
from collections.abc import Iterable
from typing import Any

import dlx
from dlx import adapter as api
from dlx.errors import ConversionError, DeviceError, DTypeError
from dlx_adapters import dlx_jax_gradients

HOST = api.Device("cpu")
CUDA = api.Device("cuda").type
_PLATFORMS = {"cpu": "cpu", "cuda": "cuda", "rocm": "rocm", "gpu": "cuda"}
_tested_issue = functools.partial(api.KnownIssue, see="tests/engine/test_defects.py")
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})  # narrowed by jax if x64 is off
_shard = operator.methodcaller("addressable_data", 0)  # the first shard, which is complete if replicated
_PARTS = "dlx.convert([shard.data for shard in x.addressable_shards], to=...)"
_UNNAMED = frozenset({"int1", "uint1", "int2", "int4", "uint2", "uint4"})  # jax does not export these dtypes
_BROKEN = frozenset({"int1", "uint1"})  # jax converts them to bool, or fails
_COPIED = (_UNNAMED - _BROKEN) | {"float4_e2m1fn"}  # imported as bytes and copied


# Dtypes that jax exports but the buffer protocol lacks.
_WITHOUT_LETTERS = frozenset({"bfloat16", *(each.name for each in api.DType.all() if each.name.startswith("float8"))})
_LACKS = frozenset({"complex32", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fnx2"})


class _DTypes(api.DTypes):
    def native(self, attribute: str) -> Any:
        numpy = sys.modules["jax"].numpy
        scalar = getattr(numpy, attribute, None)
        return None if scalar is None else numpy.dtype(scalar)

    def cast(self, array: Any, dtype: api.DType, out: Any = None) -> Any:
        return array.astype(self.to_native(dtype))

    def from_native(self, native_dtype: Any) -> api.DType | None:
        if isinstance(native_dtype, type):
            native_dtype = sys.modules["jax"].numpy.dtype(native_dtype)
        return super().from_native(native_dtype)

    def viewed(self, array: Any, dtype: api.DType) -> Any:
        jax = sys.modules["jax"]
        with jax.ensure_compile_time_eval():
            elements = sys.modules["numpy"].asarray(array).view(self.to_native(dtype))
            if array.committed:
                return jax.device_put(elements, array.device)
            with jax.default_device(array.device):
                return jax.numpy.asarray(elements)


DTYPES = _DTypes(
    "jax",
    {"bool": "bool_"} | {each.name: each.name for each in api.DType.all()[1:] if each.name not in _LACKS},
    storage=dict.fromkeys(_COPIED, "uint8"),
    switches=("config.jax_enable_x64", "config.jax_platforms", "config.jax_default_device"),
)


@functools.cache
def _create_device(platform: str, number: int) -> api.Device:
    if platform not in _PLATFORMS:
        raise DeviceError(f"DLPack has no device for jax's {platform!r}", fix="Move the array to the host first.")
    return api.Device(f"{_PLATFORMS[platform]}:{number}")


class _Devices(api.Devices):
    """The host and CUDA, if jax may use them."""

    def has_host(self) -> bool:
        """Return whether jax may use the host, without starting backends."""
        platforms = sys.modules["jax"].config.jax_platforms
        return not platforms or "cpu" in platforms.split(",")

    def has_cuda(self) -> bool:
        """Return whether jax may use CUDA, without starting backends."""
        platforms = sys.modules["jax"].config.jax_platforms
        is_allowed = not platforms or not {"cuda", "gpu"}.isdisjoint(platforms.split(","))
        return is_allowed and _has_cuda_plugin()

    def to_native(self, device: api.Device) -> Any:
        name = "cuda" if device.type == CUDA and self.has_cuda() else "cpu"
        if name == "cpu":
            super().to_native(device)
        devices = sys.modules["jax"].local_devices(backend=name)
        for each in devices:
            if each.local_hardware_id == device.id:
                return each
        raise DeviceError(f"jax sees no device {device}", fix=f"Use one of its {len(devices)}, such as {name}:0.")

    def find_host(self, number: int) -> Any:
        """Return the host device with a number, or the first one."""
        default = self.find_default()  # usually the same, and faster
        if default.platform == "cpu" and default.local_hardware_id == number:
            return default
        devices = sys.modules["jax"].local_devices(backend="cpu")
        return next((each for each in devices if each.local_hardware_id == number), devices[0])

    def find_default(self) -> Any:
        """Return jax's default device."""
        jax = sys.modules["jax"]
        default = jax.config.jax_default_device
        return jax.local_devices(backend=default)[0] if default is None or isinstance(default, str) else default

    def find_default_host(self) -> Any:
        """Return the default device for host memory."""
        device = self.find_default()
        return device if device.platform == "cpu" else self.find_host(0)

    def home(self) -> api.Device | None:
        """Return the default device if it is a CUDA device, else None; start no backend without CUDA."""
        if not self.has_cuda():
            return None
        try:
            device = self.find_known(self.find_default())
        except RuntimeError:
            return None
        return device if device is not None and device.type == CUDA else None

    def of(self, obj: Any) -> api.Device:
        return self.from_native(obj.sharding)

    def from_native(self, native_device: Any) -> api.Device:
        devices = getattr(native_device, "device_set", None)
        if devices is not None:
            if len(devices) > 1:
                reason = f"the sharding has {len(devices)} devices, and dlx places an array on one"
                raise DeviceError(reason, fix="Convert without it, then call jax.device_put(result, sharding).")
            (native_device,) = devices
        platform = native_device.platform
        if platform == "gpu" and "rocm" in native_device.client.platform_version:
            platform = "rocm"
        return _create_device(platform, native_device.local_hardware_id or 0)

    def find_known(self, native_device: Any) -> api.Device | None:
        """Return dlx's device, or None if DLPack lacks it."""
        try:
            return self.from_native(native_device)
        except DeviceError:
            return None

    def available(self) -> Iterable[Any]:
        jax = sys.modules["jax"]
        yield from jax.local_devices()
        if self.has_host() and jax.default_backend() != "cpu":
            yield from jax.local_devices(backend="cpu")


DEVICES = _Devices()


def _exchange() -> Any:
    """Return a table that exports buffers; None with several host devices, because buffers do not name theirs."""
    is_single = DEVICES.has_host() and len(sys.modules["jax"].local_devices(backend="cpu")) == 1
    return api.buffer_exchange() if is_single else None


def _export(obj: Any) -> api.Tensor | None:
    """Return the tensor of a host array whose dtype the buffer protocol lacks."""
    return api.consumed(obj.__dlpack__(max_version=(1, 0))) if obj.dtype.name in _WITHOUT_LETTERS else None


@functools.cache
def _find_importer() -> Any:
    """Return the private function behind `jax.dlpack.from_dlpack`, 4 times as fast; None if a probe fails."""
    jax, probe = sys.modules["jax"], dlx.empty((16,), "float32", "cpu")
    try:
        device = jax.local_devices(backend="cpu")[-1]
        take = sys.modules["jaxlib"]._jax.dlpack_managed_tensor_to_buffer
        array = take(probe.__dlpack__(), device, None, None)
        is_valid = isinstance(array, jax.Array) and array.devices() == {device} and array.dtype == "float32"
        return take if is_valid and array.unsafe_buffer_pointer() == probe.data_ptr else None
    except MemoryError:
        raise
    except Exception:
        return None


@functools.cache
def _find_result_handler() -> Any:
    """Return a private function of jax that makes an array uncommitted; None if a probe fails."""
    jax, probe = sys.modules["jax"], dlx.empty((16,), "float32", "cpu")
    for options in ((True,), ()):  # before 0.11 an argument skips checks
        try:
            make = sys.modules["jaxlib"]._jax.array_result_handler
            array = jax.dlpack.from_dlpack(probe)
            result = make(array.aval, array.sharding, False, *options)(array)
            is_valid = result.unsafe_buffer_pointer() == probe.data_ptr and result.sharding == array.sharding
            if is_valid and not result.committed and (result.dtype, result.shape) == ("float32", (16,)):
                return lambda array: make(array.aval, array.sharding, False, *options)(array)
        except MemoryError:
            raise
        except Exception:
            continue
    return None


def _uncommit(array: Any) -> Any:
    """Return an uncommitted array over the same memory."""
    uncommit = _find_result_handler()
    return array if uncommit is None else uncommit(array)


def _import_host(tensor: api.Tensor, native_device: Any = None, committed: bool = False) -> Any:
    """Return an array on a host device, or None if only `jax.dlpack.from_dlpack` can import or raise."""
    address, (_, bits, _) = tensor.data_ptr, tensor.dtype
    if not address or address % 64 or not tensor.is_host or bits < 8:
        return None
    if bits >= 64 and tensor.dtype.name in _WIDE and not sys.modules["jax"].config.jax_enable_x64:
        return None
    take = _find_importer()
    if take is None:
        return None
    try:
        array = take(tensor.__dlpack__(), native_device or DEVICES.find_default_host(), None, None)
    except MemoryError:
        raise
    except Exception:  # strided or read-only; the public function raises the reason
        return None
    return array if committed or not _is_row_major(tensor) else _uncommit(array)


def _is_ready(obj: Any) -> bool:
    """Return whether an array is computed or deleted, in one call: jax crashes if it is deleted in between."""
    return any(map(operator.call, (obj.is_deleted, obj.is_ready)))


def _stop_gradient(obj: Any) -> Any:
    return sys.modules["jax"].lax.stop_gradient(obj)


# Whether a trace is differentiated is unknown.
_GRAPH = api.Blocker("its gradients would be lost", "", ConversionError, resolution=_stop_gradient, needs="detach")


# ---- sparse arrays -----------------------------------------------------------------------------------------------


_PROMISES = ("indices_sorted", "unique_indices")  # which jax's operations use


def _sparse(kind: str, name: str, attributes: dict[str, str], limits: tuple[str, ...] = ()) -> api.Compound:
    """Return the declaration of a class whose arrays are attributes, by the name of the part."""
    module = "jax.experimental.sparse"

    def split(obj: Any) -> dict[str, Any]:
        flags = {f"_{name}": bool(getattr(obj, name)) for name in _PROMISES}
        return {part: getattr(obj, own) for part, own in attributes.items()} | {"shape": tuple(obj.shape)} | flags

    def join(parts: dict[str, Any]) -> Any:
        arrays = tuple(parts[part] for part in attributes)
        flags = {name: parts.get(f"_{name}", False) for name in _PROMISES}
        return getattr(importlib.import_module(module), name)(arrays, shape=parts["shape"], **flags)

    return api.Compound(kind, (f"{module}.{name}",), split, join, dense=".todense()", limits=limits)


_SPARSE = (
    _sparse("coo", "BCOO", {"data": "data", "coords": "indices"}, ("swapped",)),
    _sparse("csr", "BCSR", {"data": "data", "indices": "indices", "indptr": "indptr"}),
)


class JaxAdapter(api.Adapter):
    """jax.Array."""

    name = package = "jax"
    types = ("jax.Array", "jax.core.Tracer", "jax.Ref", "jax.experimental.sparse.JAXSparse")
    namespaces = ("jax.numpy",)
    containers = _SPARSE
    arrays = api.Arrays(immutable=True, alignment=64)
    dtypes = DTYPES
    devices = DEVICES
    fast_path = api.FastPath(
        types=("jaxlib._jax.ArrayImpl",),
        exchange=_exchange,
        export=_export,
        describe=api.tensor_info("__dlpack__"),
        ready=_is_ready,
    )
    gradients = dlx_jax_gradients.support(DTYPES)
    is_tracing = staticmethod(dlx_jax_gradients.is_tracing)
    known_issues = (
        api.KnownIssue(
            does="from_dlpack narrows 64-bit data to 32 bits silently if x64 is off, even with copy=False",
            see="https://docs.jax.dev/en/latest/default_dtypes.html",
            lowers={"narrows_without_x64": _WIDE},
        ),
        _tested_issue(
            "exports float4 but cannot import it: 'PjRt CPU buffers only support default layout'; dlx copies"
        ),
        _tested_issue(
            "is_ready() of a deleted array crashes the process; dlx checks is_deleted() first",
            before="0.11.2",
        ),
        _tested_issue("does not export integers of less than a byte; dlx exports a copy made by jax"),
        api.KnownIssue(
            does="requests legacy capsules, which producers must not create for read-only memory",
            see="https://github.com/jax-ml/jax/issues/40789",
            before="0.12",
            lowers={"hears_readonly": False},
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self.placement = api.Placement(self._load_on, _is_committed)

    # ---- as a producer ----------------------------------------------------------------------------------------------

    def describe(self, obj: Any) -> api.Description:
        blocker, device = self._find_value_blocker(obj) or self._find_memory_blocker(obj), None
        blockers = [] if blocker is None else [blocker]
        if blocker is None or blocker.resolution is not None:
            dtype = self._find_dlpack_blocker(obj)
            if dtype is not None and not (dtype.needs == "copy" and blockers and blockers[0].needs == "copy"):
                blockers.append(dtype)
            device = DEVICES.find_known(_first_device(obj)) if blocker is not None else None
        if _is_a(obj, "jax.core.Tracer"):
            blockers.append(_GRAPH)
        return api.Description(functools.partial(self._info, obj), tuple(blockers), device=device)

    def _find_value_blocker(self, obj: Any) -> api.Blocker | None:
        """Return the blocker of an object without values, or None."""
        if _is_a(obj, "jax.core.Tracer"):
            fix = "Convert outside of the transformation, or in jax.pure_callback."
            return api.Blocker("inside a jax transformation (jit, grad, vmap, scan), arrays have no data", fix)
        if _is_a(obj, "jax.Ref"):
            return api.Blocker("it is a mutable reference", "Convert its value, ref[...].", also_blocks=("copy",))
        if _is_a(obj, "jax.experimental.sparse.JAXSparse"):
            return api.Blocker("it is sparse", "Call .todense() first.", also_blocks=("copy",))
        if sys.modules["jax"].dtypes.issubdtype(obj.dtype, sys.modules["jax"].dtypes.extended):
            fix = "Convert jax.random.key_data(x)."
            return api.Blocker(f"its elements are {obj.dtype}, not numbers", fix, DTypeError)
        return None

    def _find_memory_blocker(self, obj: Any) -> api.Blocker | None:
        """Return the blocker of an array without memory on one device, or None."""
        if obj.is_deleted():
            fix = "Convert it earlier, or convert a copy."
            return api.Blocker("it was deleted or donated", fix, also_blocks=("copy",))
        if not obj.is_fully_addressable:
            fix = f"Convert the parts in this process: {_PARTS}."
            return api.Blocker("parts of it are in other processes", fix, DeviceError)
        device = _first_device(obj)
        if device.platform != "cpu" and DEVICES.find_known(device) != api.Device(CUDA, device.local_hardware_id or 0):
            fix = "Move it with jax.device_put(x, jax.devices('cpu')[0]) first."
            return api.Blocker(f"it is on {device}, and dlx supports only host and CUDA memory", fix, DeviceError)
        count = len(obj.sharding.device_set)
        if count > 1 and obj.is_fully_replicated:
            return api.Blocker(f"it is replicated over {count} devices; its first shard is used", resolution=_shard)
        if count > 1:
            fix = f"Convert its parts: {_PARTS}."
            return api.Blocker(f"it is sharded over {count} devices", fix, resolution=_gather, needs="copy")
        return None

    def _find_dlpack_blocker(self, obj: Any) -> api.Blocker | None:
        """Return the blocker of an array that jax cannot export, or None."""
        if DTYPES.from_native(obj.dtype) is None:
            return api.Blocker(f"DLPack has no dtype {obj.dtype}", "Call .astype with another dtype first.", DTypeError)
        if str(obj.dtype) in _UNNAMED:
            because = f"jax does not export {obj.dtype}, and dlx exports a copy made by jax"
            return api.Blocker(because, resolution="copy", needs="copy")
        if str(obj.dtype) in _COPIED and (_strides(obj) or ()) != _row_major(obj.shape):
            because = f"its {obj.dtype} elements are packed and not in row-major order"
            return api.Blocker(because, resolution="copy", needs="copy")
        return None

    def _info(self, obj: Any) -> api.ArrayInfo:
        array = self._find_value_blocker(obj) is None
        there = array and self._find_memory_blocker(obj) is None
        devices = tuple(obj.sharding.device_set) if array else ()
        name = str(getattr(obj, "dtype", ""))
        return api.ArrayInfo(
            framework=self.name,
            type_name=api.type_name(type(obj)),
            dtype=DTYPES.from_native(obj.dtype) if array else _parse_dtype(name),
            dtype_name=name,
            shape=tuple(getattr(obj, "shape", ())),
            strides=_strides(obj) if there else None,
            device=_place_of(obj, devices[0]) if len(devices) == 1 else None,
            nbytes=_nbytes(obj) if array else 0,
            readonly=True,
            address=obj.unsafe_buffer_pointer() if there and obj.size else 0,
            owner=api.type_name(type(obj)),
            protocols=("__dlpack__",) if array else (),
        )

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        if str(obj.dtype) not in _UNNAMED:
            # jax would use -1 as a handle. Without a stream it waits on the host.
            return super().export(obj, stream=None if stream == -1 else stream)
        # A copy from a resolved blocker: without other references, it cannot be deleted or donated.
        dtype = DTYPES.from_native(obj.dtype)
        assert dtype is not None
        obj.block_until_ready()
        address = obj.unsafe_buffer_pointer() if obj.size else 0
        return api.over_memory(address, obj.shape, None, dtype, self._info(obj).device or HOST, owner=obj)

    # ---- as a consumer ----------------------------------------------------------------------------------------------

    def capabilities(self) -> api.Capabilities:
        config, lowered = sys.modules["jax"].config, self.lowered
        narrows = frozenset() if config.jax_enable_x64 else lowered.get("narrows_without_x64", frozenset())
        places = ((HOST.type, DEVICES.has_host()), (CUDA, DEVICES.has_cuda()))
        return api.Capabilities(
            dtypes=DTYPES.known() - narrows - _BROKEN,
            device_types=frozenset(kind for kind, there in places if there),
            layouts=api.Layout.PERMUTED,
            min_alignment=64,
            keeps_readonly=True,
            copies=dict.fromkeys(_COPIED, "copies elements of less than a byte"),
            home=DEVICES.home(),
            subbyte="padded",
            empty_extents="leading bytes",
            refusals=_refusals(narrows, "" if DEVICES.has_host() else config.jax_platforms),
        )

    def load(self, tensor: api.Tensor) -> Any:
        if tensor.device == HOST:
            return self._load_to(tensor, DEVICES.find_default_host(), False)
        device = self._device_of(tensor)
        return self._load_to(tensor, device, device != DEVICES.find_default())

    def _load_on(self, tensor: api.Tensor, committed: bool) -> Any:
        return self._load_to(tensor, self._device_of(tensor), committed)

    @staticmethod
    def _device_of(tensor: api.Tensor) -> Any:
        device = tensor.device
        return DEVICES.find_host(device.id) if device.type == HOST.type else DEVICES.to_native(device)

    def _load_to(self, tensor: api.Tensor, native_device: Any, committed: bool) -> Any:
        """Return an array over a tensor on a device of jax."""
        if tensor.readonly and not self.lowered.get("hears_readonly", True):
            tensor = api.unmarked(tensor)
        found = _import_host(tensor, native_device, committed) if tensor.device == HOST else None
        if found is not None:
            return found
        if tensor.is_host and tensor.device.id != native_device.local_hardware_id:
            device = api.Device(HOST.type, native_device.local_hardware_id)
            tensor = api.over_memory(tensor.data_ptr, tensor.shape, tensor.strides, tensor.dtype, device, owner=tensor)
        array = sys.modules["jax"].dlpack.from_dlpack(tensor)
        if array.dtype != DTYPES.to_native(tensor.dtype):  # x64 may be on in another thread only
            raise DTypeError(
                f"jax returned {array.dtype} for {tensor.dtype}",
                fix='Call jax.config.update("jax_enable_x64", True) first.',
            )
        return array if committed or not _is_row_major(tensor) else _uncommit(array)

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        return obj.copy() if device is None else sys.modules["jax"].device_put(obj, DEVICES.to_native(device))


@functools.cache
def _has_cuda_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") is not None for major in (12, 13))


def _refusals(narrows: frozenset[str], platforms: str) -> dict[str, tuple[str, str]]:
    """Return (reason, fix) for refused dtypes; for the host, too, if `platforms` are the others that jax may use."""
    found = {name: (f"jax has no arrays of {name}", "Convert bools or wider integers instead.") for name in _BROKEN}
    for name in narrows:
        bits = api.DType(name).bits // 2
        fix = 'Or call jax.config.update("jax_enable_x64", True) first.'
        found[name] = f"jax would narrow {name} to {bits} bits because x64 is off", fix
    if platforms:
        found[HOST.name] = (
            f"jax may use only {platforms!r}, not the host",
            f'Set JAX_PLATFORMS={platforms},cpu, or call jax.config.update("jax_platforms", "{platforms},cpu") first.',
        )
    return found


def _first_device(obj: Any) -> Any:
    """Return the device of an array, or of its first shard."""
    devices = obj.sharding.device_set
    (device,) = devices if len(devices) == 1 else _shard(obj).sharding.device_set
    return device


def _is_committed(obj: Any) -> bool:
    return bool(getattr(obj, "committed", True)) and len(obj.sharding.device_set) == 1


def _gather(obj: Any) -> Any:
    return sys.modules["jax"].device_put(obj, _first_device(obj))


def _place_of(obj: Any, native_device: Any) -> api.Device | None:
    device = DEVICES.find_known(native_device)
    if device is not None and device.type == CUDA and obj.sharding.memory_kind == "pinned_host":
        return api.Device(f"cuda_host:{device.id}")
    return device


def _nbytes(obj: Any) -> int:
    """Return the size in bytes; elements of less than a byte are packed."""
    dtype = _parse_dtype(str(obj.dtype))
    return -(-obj.size * dtype.bits // 8) if dtype is not None else int(obj.nbytes)


def _is_a(obj: Any, name: str) -> bool:
    kind = api.look_up(name)
    return isinstance(kind, type) and isinstance(obj, kind)


def _parse_dtype(name: str) -> api.DType | None:
    try:
        return api.DType(name)
    except DTypeError:
        return None


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _is_row_major(tensor: api.Tensor) -> bool:
    """Return whether a tensor is in row-major order; `jit` assumes this for uncommitted arrays."""
    shape = tensor.shape
    if len(shape) < 2 or 0 in shape:
        return True
    return all(n == 1 or one == other for n, one, other in zip(shape, tensor.strides, _row_major(shape), strict=True))


def _strides(obj: Any) -> tuple[int, ...] | None:
    """Return the strides of jax's layout in elements, or None if unknown."""
    layout = obj.format.layout
    if layout is None:
        return None
    strides, step = [0] * obj.ndim, 1
    for axis in reversed(layout.major_to_minor):
        strides[axis] = step
        step *= obj.shape[axis]
    return tuple(strides)


dlx_adapters = api.offer(JaxAdapter())
