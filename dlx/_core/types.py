"""`Device` and `DType` with their names, tensor flags, and helpers for strides."""

from __future__ import annotations

import functools
import importlib
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dlx._core.extension import lib
from dlx._support.display import Shown
from dlx._support.module import set_module
from dlx.errors import DeviceError, DeviceNameError, DTypeError, did_you_mean

READ_ONLY: int = lib.DLPACK_FLAG_BITMASK_READ_ONLY
IS_COPIED: int = lib.DLPACK_FLAG_BITMASK_IS_COPIED
SUBBYTE_PADDED: int = lib.DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED

_DEVICE_TYPES: dict[str, int] = {
    "cpu": lib.kDLCPU,
    "cuda": lib.kDLCUDA,
    "cuda_host": lib.kDLCUDAHost,
    "opencl": lib.kDLOpenCL,
    "vulkan": lib.kDLVulkan,
    "metal": lib.kDLMetal,
    "vpi": lib.kDLVPI,
    "rocm": lib.kDLROCM,
    "rocm_host": lib.kDLROCMHost,
    "ext_dev": lib.kDLExtDev,
    "cuda_managed": lib.kDLCUDAManaged,
    "oneapi": lib.kDLOneAPI,
    "webgpu": lib.kDLWebGPU,
    "hexagon": lib.kDLHexagon,
    "maia": lib.kDLMAIA,
    "trn": lib.kDLTrn,
}
_DEVICE_NAMES = {number: name for name, number in _DEVICE_TYPES.items()}
_ALIASES = {
    "gpu": "Use 'cuda' (NVIDIA) or 'rocm' (AMD).",
    "mps": "Use 'metal', DLPack's name.",
    "xpu": "Use 'oneapi', DLPack's name of Intel's devices.",
    "hip": "Use 'rocm', DLPack's name of AMD's devices.",
    "host": "Use 'cpu'.",
    "meta": "Create the array on a real device: meta arrays have no memory.",
    "tpu": "Move the array to the host first: DLPack has no TPU device.",
}


def _ask_registry(part: str, obj: Any) -> Any:
    """Load the registry, which replaces this function, and ask it."""
    return importlib.import_module("dlx._registry.dtypes_and_devices").read_native(part, obj)


_from_native: Callable[[str, Any], Any] = _ask_registry


def set_from_native(look_up: Callable[[str, Any], Any]) -> None:
    """Set the function that looks up dtypes and devices of frameworks: (``"dtypes"`` or ``"devices"``, object)."""
    global _from_native
    _from_native = look_up


@set_module("dlx")
class Device(Shown, tuple[int, int]):
    """A DLPack device: (device type, device id).

    Parameters
    ----------
    device
        A name (``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"cuda_host"``), a pair ``(type, id)``, a `Device`, a device type
        number, or the device object of a framework that has an adapter (``torch.device``) or of cuda.core.
    id
        Device id; only with a type number, or a name without an id.

    Raises
    ------
    DeviceError
        If the name is unknown (also a ValueError) or the numbers are invalid.

    Notes
    -----
    Device types are those of ``dlpack.h`` 1.3; other numbers are kept unchanged. Each library numbers its devices
    itself. The default id is 0.

    Examples
    --------
    >>> Device("cuda:1")
    Device('cuda:1')
    >>> Device("cuda:1") == (2, 1)
    True
    """

    __slots__ = ()

    def __new__(cls, device: Any, id: int | None = None) -> Device:
        if isinstance(device, str):
            name, _, number = device.partition(":")
            if id is not None and not number and isinstance(id, int) and id >= 0:
                number = str(int(id))  # Device("cuda", 1)
            elif id is not None:
                raise DeviceError(f"{device!r} and {id!r} are not a device", fix="Pass 'cuda:1', or 'cuda' and 1.")
            if name not in _DEVICE_TYPES or (number and not _is_id(number)):
                found = _from_native("devices", device) if id is None and "/" in device else None  # of tensorflow
                if found is not None:
                    return tuple.__new__(cls, found)
                known = f"Use one of: {', '.join(_DEVICE_TYPES)}; as in 'cuda:1'."
                fix = _ALIASES.get(name.lower()) or did_you_mean(name, _DEVICE_TYPES) or known
                raise DeviceNameError(f"unknown device {device!r}", fix=fix)
            return tuple.__new__(cls, (_DEVICE_TYPES[name], int(number or 0)))
        pair = (device, id or 0) if id is not None or isinstance(device, int) else device
        try:
            if not isinstance(pair, tuple | list):
                raise TypeError  # an array of two numbers is not a pair
            kind, ordinal = map(operator.index, pair)
            if not (-(1 << 31) <= kind < 1 << 31 and -(1 << 31) <= ordinal < 1 << 31):
                raise ValueError  # DLPack uses 32 bits
        except (TypeError, ValueError):
            native = _from_native("devices", device) if id is None else None
            if native is None:
                raise DeviceError(
                    f"{device!r} is not a device", fix="Pass a name such as 'cpu' or 'cuda:1', or a pair (type, id)."
                ) from None
            kind, ordinal = native
        return tuple.__new__(cls, (kind, ordinal))

    @property
    def type(self) -> int:
        """The DLPack device type, a number."""
        return self[0]

    @property
    def id(self) -> int:
        """The device id."""
        return self[1]

    @property
    def name(self) -> str:
        """The device type's name; ``device_type_N`` for an unknown number N."""
        return _DEVICE_NAMES.get(self[0], f"device_type_{self[0]}")

    def __str__(self) -> str:
        return self.name if self[0] == lib.kDLCPU and self[1] == 0 else f"{self.name}:{self[1]}"

    def __repr__(self) -> str:
        return f"Device({str(self)!r})" if self[0] in _DEVICE_NAMES else f"Device({self[0]}, {self[1]})"

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (tuple(self),)


def _is_id(number: str) -> bool:
    return number.isdecimal() and len(number) <= 10 and int(number) < 1 << 31


def is_at(device: Device | None, wanted: Device) -> bool:
    """Return whether a device equals `wanted`; ``cpu:0`` matches every host device of a framework."""
    return device == wanted or (wanted == (lib.kDLCPU, 0) and device is not None and device.type == lib.kDLCPU)


def host_readable(device: Device) -> bool:
    """Return whether the host may read the device's memory without asking the device first."""
    return bool(lib.dlx_host_readable(device[0]))


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements are in row-major order without gaps, ignoring extents of 1."""
    if 0 in shape:
        return True
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a compact row-major array, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


# Names that determine code and bits. The names of int, uint, float and complex contain the bits.
_EXACT: dict[str, tuple[int, int]] = {
    "bool": (lib.kDLBool, 8),
    "bfloat16": (lib.kDLBfloat, 16),
    "float8_e3m4": (lib.kDLFloat8_e3m4, 8),
    "float8_e4m3": (lib.kDLFloat8_e4m3, 8),
    "float8_e4m3b11fnuz": (lib.kDLFloat8_e4m3b11fnuz, 8),
    "float8_e4m3fn": (lib.kDLFloat8_e4m3fn, 8),
    "float8_e4m3fnuz": (lib.kDLFloat8_e4m3fnuz, 8),
    "float8_e5m2": (lib.kDLFloat8_e5m2, 8),
    "float8_e5m2fnuz": (lib.kDLFloat8_e5m2fnuz, 8),
    "float8_e8m0fnu": (lib.kDLFloat8_e8m0fnu, 8),
    "float6_e2m3fn": (lib.kDLFloat6_e2m3fn, 6),
    "float6_e3m2fn": (lib.kDLFloat6_e3m2fn, 6),
    "float4_e2m1fn": (lib.kDLFloat4_e2m1fn, 4),
}
_EXACT_NAMES = {pair: name for name, pair in _EXACT.items()}
_WIDE: dict[str, int] = {"int": lib.kDLInt, "uint": lib.kDLUInt, "float": lib.kDLFloat, "complex": lib.kDLComplex}
_WIDE_NAMES = {code: name for name, code in _WIDE.items()}
_SPELLING = re.compile(r"(?P<kind>int|uint|float|complex)(?P<bits>[1-9]\d{0,2})")
_INTEGERS = {*range(1, 9), 16, 32, 64, 128}
_WIDTHS = {"int": _INTEGERS, "uint": _INTEGERS, "float": {16, 32, 64, 128}, "complex": {32, 64, 128, 256}}
# Every dtype of a framework, in the order that users see; float4 also exists as pairs of two lanes.
_LISTED = (
    *("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))),
    *("float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128"),
    *(name for name in _EXACT if name.startswith("float")),
    *("float4_e2m1fnx2", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 4))),
)
_UNNAMED = re.compile(r"code(?P<code>\d{1,3})_(?P<bits>\d{1,3})bit")
_CODE = re.compile(r"[<>=|]?(?:b1|(?P<kind>[iufc])(?P<bytes>[1-9]\d?))")  # numpy's codes
_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_OTHER_ORDER = ">" if sys.byteorder == "little" else "<"
_PYTHON: dict[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_LANES = re.compile(r"(?P<scalar>.+?)x(?P<lanes>\d+)")


@set_module("dlx")
class DType(Shown, tuple[int, int, int]):
    """A DLPack dtype: (code, bits, lanes).

    Parameters
    ----------
    dtype
        A name (``"float32"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ``"float32x4"`` for four lanes), numpy's code
        (``"f4"``, ``"<i8"``), a triple, a `DType`, a type code, or the dtype object or scalar type of a framework that
        has an adapter (``torch.float32``, ``numpy.float32``, ``ml_dtypes.bfloat16``, Python's ``float``).
    bits, lanes
        Bits per lane and lanes; only with a type code.

    Raises
    ------
    DTypeError
        If the name is unknown or the numbers are invalid.

    Notes
    -----
    Type codes are those of ``dlpack.h`` 1.3; other codes are kept unchanged.

    Examples
    --------
    >>> tuple(DType("float32"))
    (2, 32, 1)
    >>> DType(4, 16, 1).name
    'bfloat16'
    """

    __slots__ = ()

    def __new__(cls, dtype: Any, bits: int | None = None, lanes: int = 1) -> DType:
        if isinstance(dtype, str):
            found = _parse(dtype)
            if found is None or bits is not None:
                known = "Use for example 'float32', 'bool' or 'bfloat16'; `dlx dtypes` lists all."
                swapped = "Swap the bytes first, as numpy's byteswap() does: DLPack has only the native byte order."
                fix = swapped if dtype[:1] == _OTHER_ORDER else did_you_mean(dtype, _LISTED) or known
                raise DTypeError(f"unknown dtype {dtype!r}", fix=fix)
            return tuple.__new__(cls, found)
        triple = dtype if bits is None else (dtype, bits, lanes)
        try:
            code, width, width_lanes = map(operator.index, triple)
        except (TypeError, ValueError):
            name = _PYTHON.get(dtype) if isinstance(dtype, type) else None
            native = DType(name) if name else _from_native("dtypes", dtype) if bits is None else None
            if native is None:
                raise DTypeError(
                    f"{dtype!r} is not a dtype of DLPack",
                    fix="Pass a name such as 'float32', or a triple (code, bits, lanes).",
                ) from None
            code, width, width_lanes = native
        return tuple.__new__(cls, (code, width, width_lanes))

    @classmethod
    def all(cls) -> tuple[DType, ...]:
        """Return every dtype of a framework, in the order of `dlx dtypes`."""
        return tuple(map(cls, _LISTED))

    @property
    def code(self) -> int:
        """The DLPack type code."""
        return self[0]

    @property
    def bits(self) -> int:
        """Bits of one lane."""
        return self[1]

    @property
    def lanes(self) -> int:
        """Lanes of one element; 1 for scalars."""
        return self[2]

    @property
    @functools.lru_cache(maxsize=64)  # noqa: B019
    def name(self) -> str:
        """The name, which `DType` accepts."""
        code, bits, lanes = self
        scalar = _EXACT_NAMES.get((code, bits))
        if scalar is None:
            scalar = f"{_WIDE_NAMES[code]}{bits}" if _is_wide(code, bits) else f"code{code}_{bits}bit"
        return scalar if lanes == 1 else f"{scalar}x{lanes}"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        known = (self[0], self[1]) in _EXACT_NAMES or _is_wide(self[0], self[1])
        return f"DType({self.name!r})" if known else f"DType({self[0]}, {self[1]}, {self[2]})"

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (tuple(self),)


def codes_of(kinds: Iterable[str]) -> frozenset[int]:
    """Return the type codes of the dtypes whose names begin with one of the prefixes: ``("complex",)``."""
    found: set[int] = set()
    for kind in kinds:
        codes = {code for name, code in _WIDE.items() if name.startswith(kind) or kind.startswith(name)}
        codes |= {code for name, (code, _) in _EXACT.items() if name.startswith(kind)}
        if not codes:
            raise DTypeError(f"no dtype's name begins with {kind!r}")
        found |= codes
    return frozenset(found)


def _is_wide(code: int, bits: int) -> bool:
    """Return whether int, uint, float or complex exists in this width (float33 does not)."""
    return code in _WIDE_NAMES and bits in _WIDTHS[_WIDE_NAMES[code]]


def _parse(name: str) -> tuple[int, int, int] | None:
    if name in _EXACT:
        return (*_EXACT[name], 1)
    match = _SPELLING.fullmatch(name)
    if match and int(match["bits"]) in _WIDTHS[match["kind"]]:
        return (_WIDE[match["kind"]], int(match["bits"]), 1)
    match = _UNNAMED.fullmatch(name)
    if match and int(match["code"]) < 256 and 0 < int(match["bits"]) < 256:
        return (int(match["code"]), int(match["bits"]), 1)
    match = _CODE.fullmatch(name)
    if match and (name[0] != _OTHER_ORDER or match["bytes"] in (None, "1")):
        return _parse(f"{_KINDS[match['kind']]}{8 * int(match['bytes'])}" if match["kind"] else "bool")
    match = _LANES.fullmatch(name)
    scalar = _parse(match["scalar"]) if match else None
    if match and scalar and scalar[2] == 1 and 0 < int(match["lanes"]) < 65536:
        return (scalar[0], scalar[1], int(match["lanes"]))
    return None


HOST = Device("cpu")
"""The host."""
