"""JAX for dlx: jax.Array.

Versions: 0.10 and later (0.10.2 and 0.12.0 are tested). Devices: the host, and CUDA's if a plugin of jax for them is
installed. Dtypes: bool, (u)int8 to 64, float16 to 64, bfloat16, the float8 kinds, complex64 and 128; 64-bit ones are
taken with x64 on only; int2, int4, uint2, uint4 and float4 are exported packed, and imported by a copy.
Shared: compact data aligned to 64 bytes, in any order of dimensions; out of jax always read-only; of an array that is
replicated over several devices, its first shard. Copied: other strides and alignments (into memory that jax then
shares), sub-byte integers out of jax, and sharded arrays, which are gathered. Refused: what jax would narrow (x64 off),
tracers, deleted and donated arrays, arrays with parts in other processes, typed PRNG keys, sparse arrays, mutable
references; everything, if jax may not use the host (JAX_PLATFORMS).

Placement: as by `jax.numpy.asarray`, if the call names no device: uncommitted, on jax's default device. If that is not
the host, host memory is copied there, unless ``copy=False`` keeps it. Memory is committed where it is if it is not in
row-major order, since `jit` ignores the layout of uncommitted arrays, or not on the default device. ``device=``
commits.

Jax arrays are constant: jax never writes to shared memory, not even if the array is donated, and no other code may.
Streams: jax has no current one. An exported device array makes the consumer's stream wait for it; an import waits on a
stream of jax, which jax passes to the producer.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
import sys
from collections.abc import Iterable
from typing import Any

import dlx_jax_gradients

import dlx
from dlx import adapter as api
from dlx.errors import ConversionError, DeviceError, DTypeError

HOST = api.Device("cpu")
CUDA = api.Device("cuda").type
_PLATFORMS = {"cpu": "cpu", "cuda": "cuda", "rocm": "rocm", "gpu": "cuda"}
_proven = functools.partial(api.KnownIssue, see="tests/engine/test_defects.py")
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})  # narrowed by jax where x64 is off
_shard = operator.methodcaller("addressable_data", 0)  # the first shard of an array: all of it if it is replicated
_PARTS = "dlx.convert([shard.data for shard in x.addressable_shards], to=...)"
_UNNAMED = frozenset({"int1", "uint1", "int2", "int4", "uint2", "uint4"})  # jax has them, and no DLPack dtype for them
_BROKEN = frozenset({"int1", "uint1"})  # jax makes bools of them, or fails
_UNTAKEN = (_UNNAMED - _BROKEN) | {"float4_e2m1fn"}  # imported as bytes, which jax copies into its own


# Dtypes that jax exports, and no buffer can say.
_WITHOUT_LETTERS = frozenset({"bfloat16", *(each.name for each in api.DType.all() if each.name.startswith("float8"))})
_LACKS = frozenset({"complex32", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fnx2"})


class _DTypes(api.DTypes):
    def native(self, attribute: str) -> Any:
        numpy = sys.modules["jax"].numpy
        scalar = getattr(numpy, attribute, None)
        return None if scalar is None else numpy.dtype(scalar)

    def from_native(self, native_dtype: Any) -> api.DType | None:
        if isinstance(native_dtype, type):  # a scalar type: jax.numpy.float32
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
    storage=dict.fromkeys(_UNTAKEN, "uint8"),
    switches=("config.jax_enable_x64", "config.jax_platforms", "config.jax_default_device"),
)


@functools.cache
def _device_named(platform: str, number: int) -> api.Device:
    if platform not in _PLATFORMS:
        raise DeviceError(f"DLPack has no device for jax's {platform!r}", fix="Move the array to the host first.")
    return api.Device(f"{_PLATFORMS[platform]}:{number}")


class _Devices(api.Devices):
    """The host and CUDA, each where jax may use it."""

    def has_host(self) -> bool:
        """Say whether jax may use the host; asks no backend, since that would start them all."""
        platforms = sys.modules["jax"].config.jax_platforms
        return not platforms or "cpu" in platforms.split(",")

    def has_cuda(self) -> bool:
        """Say whether jax may use CUDA; likewise."""
        platforms = sys.modules["jax"].config.jax_platforms
        named = not platforms or not {"cuda", "gpu"}.isdisjoint(platforms.split(","))
        return named and _has_cuda_plugin()

    def to_native(self, device: api.Device) -> Any:
        name = "cuda" if device.type == CUDA and self.has_cuda() else "cpu"
        if name == "cpu":
            super().to_native(device)
        devices = sys.modules["jax"].local_devices(backend=name)
        for each in devices:
            if each.local_hardware_id == device.id:
                return each
        raise DeviceError(f"jax sees no device {device}", fix=f"It has {len(devices)} of {name}: {name}:0 and so on.")

    def host(self, number: int) -> Any:
        """Return the host device of a number; if it is missing, the first one."""
        preferred = self.preferred()  # mostly that one, and found sooner
        if preferred.platform == "cpu" and preferred.local_hardware_id == number:
            return preferred
        devices = sys.modules["jax"].local_devices(backend="cpu")
        return next((each for each in devices if each.local_hardware_id == number), devices[0])

    def preferred(self) -> Any:
        """Return the device on which jax puts an array if no device is named."""
        jax = sys.modules["jax"]
        named = jax.config.jax_default_device
        return jax.local_devices(backend=named)[0] if named is None or isinstance(named, str) else named

    def preferred_host(self) -> Any:
        """Return the host device for memory of the host if no device is named."""
        device = self.preferred()
        return device if device.platform == "cpu" else self.host(0)

    def home(self) -> api.Device | None:
        """Return the default device if it is one of CUDA, else None; without CUDA no backend is started."""
        if not self.has_cuda():
            return None
        try:
            device = self.known(self.preferred())
        except RuntimeError:  # there is no such backend
            return None
        return device if device is not None and device.type == CUDA else None

    def of(self, obj: Any) -> api.Device:
        return self.from_native(obj.sharding)

    def from_native(self, native_device: Any) -> api.Device:
        devices = getattr(native_device, "device_set", None)
        if devices is not None:  # a sharding
            if len(devices) > 1:
                reason = f"dlx puts an array on one device, and this sharding spreads it over {len(devices)}"
                raise DeviceError(reason, fix="Convert without it, then call jax.device_put(result, sharding).")
            (native_device,) = devices
        platform = native_device.platform
        if platform == "gpu" and "rocm" in native_device.client.platform_version:
            platform = "rocm"
        return _device_named(platform, native_device.local_hardware_id or 0)

    def known(self, native_device: Any) -> api.Device | None:
        """Return dlx's device, or None where DLPack has none."""
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
    """Return a table that exports buffers, if there is one host device: a buffer does not name its device."""
    there = DEVICES.has_host() and len(sys.modules["jax"].local_devices(backend="cpu")) == 1
    return api.buffer_exchange() if there else None


def _export(obj: Any) -> api.Tensor | None:
    """Return the tensor of an array of the host whose dtype no buffer can say."""
    return api.consumed(obj.__dlpack__(max_version=(1, 0))) if obj.dtype.name in _WITHOUT_LETTERS else None


@functools.cache
def _importer() -> Any:
    """Return the private function behind `jax.dlpack.from_dlpack`, 4 times as fast; None if it behaves differently."""
    jax, probe = sys.modules["jax"], dlx.empty((16,), "float32", "cpu")
    try:
        device = jax.local_devices(backend="cpu")[-1]
        take = sys.modules["jaxlib"]._jax.dlpack_managed_tensor_to_buffer
        array = take(probe.__dlpack__(), device, None, None)
        same = isinstance(array, jax.Array) and array.devices() == {device} and array.dtype == "float32"
        return take if same and array.unsafe_buffer_pointer() == probe.data_ptr else None
    except MemoryError:
        raise
    except Exception:
        return None


@functools.cache
def _handler() -> Any:
    """Return a function that makes an imported array uncommitted (jax has no public one); None if none works."""
    jax, probe = sys.modules["jax"], dlx.empty((16,), "float32", "cpu")
    for options in ((True,), ()):  # before 0.11 an argument says that no check is needed
        try:
            make = sys.modules["jaxlib"]._jax.array_result_handler
            array = jax.dlpack.from_dlpack(probe)
            made = make(array.aval, array.sharding, False, *options)(array)
            same = made.unsafe_buffer_pointer() == probe.data_ptr and made.sharding == array.sharding
            if same and not made.committed and (made.dtype, made.shape) == ("float32", (16,)):
                return lambda array: make(array.aval, array.sharding, False, *options)(array)
        except MemoryError:
            raise
        except Exception:
            continue
    return None


def _uncommitted(array: Any) -> Any:
    """Return an array over the same memory that jax moves to where it is used."""
    free = _handler()
    return array if free is None else free(array)


def _imported(tensor: api.Tensor, native_device: Any = None, committed: bool = False) -> Any:
    """Return an array on a host device; None if `jax.dlpack.from_dlpack` must be asked."""
    address, (_, bits, _) = tensor.data_ptr, tensor.dtype
    if not address or address % 64 or not tensor.is_host or bits < 8:
        return None
    if bits >= 64 and tensor.dtype.name in _WIDE and not sys.modules["jax"].config.jax_enable_x64:
        return None
    take = _importer()
    if take is None:
        return None
    try:
        array = take(tensor.__dlpack__(), native_device or DEVICES.preferred_host(), None, None)
    except MemoryError:
        raise
    except Exception:  # strided, or read-only: the public function says why
        return None
    return array if committed or not _is_row_major(tensor) else _uncommitted(array)


def _is_ready(obj: Any) -> bool:
    """Return whether no one would wait for an array, in one call: jax dies if it is deleted in between."""
    return any(map(operator.call, (obj.is_deleted, obj.is_ready)))


def _detached(obj: Any) -> Any:
    return sys.modules["jax"].lax.stop_gradient(obj)


# What traces may differentiate: nothing tells.
_GRAPH = api.Blocker("its gradients would be lost", "", ConversionError, resolution=_detached, needs="detach")


class JaxAdapter(api.Adapter):
    """jax.Array."""

    name = package = "jax"
    types = ("jax.Array", "jax.core.Tracer", "jax.Ref", "jax.experimental.sparse.JAXSparse")
    namespaces = ("jax.numpy",)
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
    gradients = dlx_jax_gradients.support(DTYPES, _imported)
    known_issues = (
        api.KnownIssue(
            does="from_dlpack narrows 64-bit data to 32 bits silently where x64 is off, copy=False included",
            see="https://docs.jax.dev/en/latest/default_dtypes.html",
            lowers={"narrows_without_x64": _WIDE},
        ),
        _proven(
            "gives float4 out and does not take it back: 'PjRt CPU buffers only support default layout'; dlx copies"
        ),
        _proven(
            "is_ready() of an array that was deleted kills the process; dlx asks is_deleted() before it",
            before="0.11.2",
        ),
        _proven("gives no integers of less than a byte out, which DLPack can say; dlx reads a copy of jax's own"),
        api.KnownIssue(
            does="asks for legacy capsules only, which no producer may make of read-only memory",
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
        blocker, device = self._without_array(obj) or self._without_memory(obj), None
        blockers = [] if blocker is None else [blocker]
        if blocker is None or blocker.resolution is not None:
            dtype = self._without_dlpack(obj)
            if dtype is not None and not (dtype.needs == "copy" and blockers and blockers[0].needs == "copy"):
                blockers.append(dtype)
            device = DEVICES.known(_first_device(obj)) if blocker is not None else None
        if _is_a(obj, "jax.core.Tracer"):
            blockers.append(_GRAPH)
        return api.Description(functools.partial(self._info, obj), tuple(blockers), device=device)

    def _without_array(self, obj: Any) -> api.Blocker | None:
        """Return why something of jax is no array with values, or None."""
        if _is_a(obj, "jax.core.Tracer"):
            fix = "Convert outside of it, or call back with jax.pure_callback."
            return api.Blocker("inside a jax transformation (jit, grad, vmap, scan) values have no data", fix)
        if _is_a(obj, "jax.Ref"):
            return api.Blocker("it is a mutable reference", "Convert its value, ref[...].", also_blocks=("copy",))
        if _is_a(obj, "jax.experimental.sparse.JAXSparse"):
            return api.Blocker("it is sparse", "Call .todense() first.", also_blocks=("copy",))
        if sys.modules["jax"].dtypes.issubdtype(obj.dtype, sys.modules["jax"].dtypes.extended):
            fix = "Convert jax.random.key_data(key) of a key."
            return api.Blocker(f"it holds {obj.dtype}, which is no number", fix, DTypeError)
        return None

    def _without_memory(self, obj: Any) -> api.Blocker | None:
        """Return why an array has no memory that could be exported, or has it on several devices; or None."""
        if obj.is_deleted():
            fix = "Convert it before that, or a copy of it."
            return api.Blocker("it was deleted or donated", fix, also_blocks=("copy",))
        if not obj.is_fully_addressable:
            fix = f"Convert what is in this one: {_PARTS}."
            return api.Blocker("parts of it are in other processes", fix, DeviceError)
        device = _first_device(obj)
        if device.platform != "cpu" and DEVICES.known(device) != api.Device(CUDA, device.local_hardware_id or 0):
            fix = "Move it with jax.device_put(x, jax.devices('cpu')[0]) first."
            return api.Blocker(f"it is on {device}, and dlx converts memory of the host and of CUDA", fix, DeviceError)
        count = len(obj.sharding.device_set)
        if count > 1 and obj.is_fully_replicated:
            return api.Blocker(f"it is replicated over {count} devices, and its first shard is read", resolution=_shard)
        if count > 1:
            fix = f"Convert its parts: {_PARTS}."
            return api.Blocker(f"it is spread over {count} devices", fix, resolution=_gathered, needs="copy")
        return None

    def _without_dlpack(self, obj: Any) -> api.Blocker | None:
        """Return why jax cannot export an array of numbers, or None."""
        if DTYPES.from_native(obj.dtype) is None:
            return api.Blocker(f"DLPack has no dtype {obj.dtype}", "Convert the values with .astype first.", DTypeError)
        if str(obj.dtype) in _UNNAMED:
            because = f"jax gives no {obj.dtype} out, so that dlx reads a copy of jax's own"
            return api.Blocker(because, resolution="copy", needs="copy")
        if str(obj.dtype) in _UNTAKEN and (_strides(obj) or ()) != _row_major(obj.shape):
            because = f"its {obj.dtype} elements are packed and not in row-major order"
            return api.Blocker(because, resolution="copy", needs="copy")
        return None

    def _info(self, obj: Any) -> api.ArrayInfo:
        array = self._without_array(obj) is None
        there = array and self._without_memory(obj) is None
        devices = tuple(obj.sharding.device_set) if array else ()
        name = str(getattr(obj, "dtype", ""))
        return api.ArrayInfo(
            framework=self.name,
            type_name=api.type_name(type(obj)),
            dtype=DTYPES.from_native(obj.dtype) if array else _named(name),
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
            # jax takes -1 for a handle. Without a stream it waits on the host.
            return super().export(obj, stream=None if stream == -1 else stream)
        # A copy that `describe` has asked for: it has no other references, so it cannot be deleted or donated.
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
            keeps_readonly=True,  # jax never writes
            copies=dict.fromkeys(_UNTAKEN, "copies elements of less than a byte"),
            home=DEVICES.home(),
            subbyte="padded",
            empty_extents="leading bytes",
            refusals=_refusals(narrows, "" if DEVICES.has_host() else config.jax_platforms),
        )

    def load(self, tensor: api.Tensor) -> Any:
        if tensor.device == HOST:
            return self._made(tensor, DEVICES.preferred_host(), False)
        device = self._device_of(tensor)
        return self._made(tensor, device, device != DEVICES.preferred())

    def _load_on(self, tensor: api.Tensor, committed: bool) -> Any:
        return self._made(tensor, self._device_of(tensor), committed)

    @staticmethod
    def _device_of(tensor: api.Tensor) -> Any:
        device = tensor.device
        return DEVICES.host(device.id) if device.type == HOST.type else DEVICES.to_native(device)

    def _made(self, tensor: api.Tensor, native_device: Any, committed: bool) -> Any:
        """Return an array on the device of jax that has the tensor's memory."""
        if tensor.readonly and not self.lowered.get("hears_readonly", True):
            tensor = api.unmarked(tensor)
        found = _imported(tensor, native_device, committed) if tensor.device == HOST else None
        if found is not None:
            return found
        if tensor.is_host and tensor.device.id != native_device.local_hardware_id:
            device = api.Device(HOST.type, native_device.local_hardware_id)
            tensor = api.over_memory(tensor.data_ptr, tensor.shape, tensor.strides, tensor.dtype, device, owner=tensor)
        array = sys.modules["jax"].dlpack.from_dlpack(tensor)
        if array.dtype != DTYPES.to_native(tensor.dtype):  # another thread may see x64 switched on
            raise DTypeError(f"jax made {array.dtype} of {tensor.dtype}", fix=_X64_ON)
        return array if committed or not _is_row_major(tensor) else _uncommitted(array)

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        return obj.copy() if device is None else sys.modules["jax"].device_put(obj, DEVICES.to_native(device))


@functools.cache
def _has_cuda_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") is not None for major in (12, 13))


_X64_ON = 'Switch 64-bit dtypes on first: jax.config.update("jax_enable_x64", True).'


def _refusals(narrows: frozenset[str], platforms: str) -> dict[str, tuple[str, str]]:
    """Return (reason, fix) for dtypes that jax does not take; `platforms` is set if the host is not among them."""
    found = {name: (f"jax makes no arrays of {name}", "Convert bools or wider integers instead.") for name in _BROKEN}
    for name in narrows:
        found[name] = f"jax would narrow {name} to {api.DType(name).bits // 2} bits, since x64 is off", _X64_ON
    if platforms:
        found[HOST.name] = (
            f"jax was told to use {platforms!r} only, without the host",
            f'Set JAX_PLATFORMS={platforms},cpu, or say jax.config.update("jax_platforms", "{platforms},cpu") first.',
        )
    return found


def _first_device(obj: Any) -> Any:
    """Return the device of an array, or of its first shard."""
    devices = obj.sharding.device_set
    (device,) = devices if len(devices) == 1 else _shard(obj).sharding.device_set
    return device


def _is_committed(obj: Any) -> bool:
    return bool(getattr(obj, "committed", True)) and len(obj.sharding.device_set) == 1


def _gathered(obj: Any) -> Any:
    return sys.modules["jax"].device_put(obj, _first_device(obj))


def _place_of(obj: Any, native_device: Any) -> api.Device | None:
    device = DEVICES.known(native_device)
    if device is not None and device.type == CUDA and obj.sharding.memory_kind == "pinned_host":
        return api.Device(f"cuda_host:{device.id}")
    return device


def _nbytes(obj: Any) -> int:
    """Return the bytes of all elements; those of less than a byte are packed."""
    dtype = _named(str(obj.dtype))
    return -(-obj.size * dtype.bits // 8) if dtype is not None else int(obj.nbytes)


def _is_a(obj: Any, name: str) -> bool:
    kind = api.look_up(name)
    return isinstance(kind, type) and isinstance(obj, kind)


def _named(name: str) -> api.DType | None:
    try:
        return api.DType(name)
    except DTypeError:
        return None


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _is_row_major(tensor: api.Tensor) -> bool:
    """Return whether jax reads a tensor right without its layout, which `jit` ignores in uncommitted arrays."""
    shape = tensor.shape
    if len(shape) < 2 or 0 in shape:
        return True
    return all(n == 1 or one == other for n, one, other in zip(shape, tensor.strides, _row_major(shape), strict=True))


def _strides(obj: Any) -> tuple[int, ...] | None:
    """Return the strides of jax's layout, in elements."""
    layout = obj.format.layout
    if layout is None:
        return None
    strides, step = [0] * obj.ndim, 1
    for axis in reversed(layout.major_to_minor):
        strides[axis] = step
        step *= obj.shape[axis]
    return tuple(strides)


dlx_adapters = api.offer(JaxAdapter())
