"""`Tensor`, the type that the C core makes, with its repr."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

from dlx._core.extension import lib
from dlx._core.native import Tensor, set_tensor_reduce, set_tensor_repr
from dlx._core.pickling import reduced
from dlx._core.types import contiguous, host_readable

__all__ = ["Tensor"]

# ---- the repr of dlx.Tensor: one line, the values where they are few and can be read

MAX_VALUES = 8


def _shortest(value: float, raw: bytes, pack: Callable[[float], bytes]) -> float:
    """Return the float with the shortest text that packs to the same bytes as `value`."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if pack(short) == raw:
                return short
        except OverflowError:  # rounded up beyond the largest number
            continue
    return value


def _plain(letter: str) -> Callable[[bytes], Any]:
    return lambda raw: struct.unpack(f"={letter}", raw)[0]


def _real(letter: str) -> Callable[[bytes], float]:
    packer = struct.Struct(f"={letter}")
    return lambda raw: _shortest(packer.unpack(raw)[0], raw, packer.pack)


def _complex(part: Callable[[bytes], float]) -> Callable[[bytes], complex]:
    return lambda raw: complex(part(raw[: len(raw) // 2]), part(raw[len(raw) // 2 :]))


def _pack_bfloat16(value: float) -> bytes:
    (bits,) = struct.unpack("=I", struct.pack("=f", value))
    return struct.pack("=H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF)  # to nearest, ties to even


def _bfloat16(raw: bytes) -> float:
    (upper,) = struct.unpack("=H", raw)
    return _shortest(struct.unpack("=f", struct.pack("=I", upper << 16))[0], raw, _pack_bfloat16)


# (code, bits) -> one element's bytes to a value whose repr is shown. What is missing is shown without values.
_READERS: dict[tuple[int, int], Callable[[bytes], Any]] = {
    (lib.kDLBool, 8): lambda raw: raw != b"\0",
    **{(lib.kDLInt, bits): _plain(letter) for bits, letter in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))},
    **{(lib.kDLUInt, bits): _plain(letter) for bits, letter in ((8, "B"), (16, "H"), (32, "I"), (64, "Q"))},
    **{(lib.kDLFloat, bits): read for bits, read in ((16, _real("e")), (32, _real("f")), (64, _plain("d")))},
    **{
        (lib.kDLComplex, 2 * bits): _complex(read)
        for bits, read in ((16, _real("e")), (32, _real("f")), (64, _plain("d")))
    },
    (lib.kDLBfloat, 16): _bfloat16,
}


def _edge(shape: tuple[int, ...]) -> int:
    """Return how many values to show at either end of a dimension, so that they are few in all; 0: show none."""
    for edge in (MAX_VALUES, 3, 2, 1):
        shown = 1
        for extent in shape:
            shown *= min(extent, 2 * edge)
        if 0 < shown <= MAX_VALUES:
            return edge
    return 0


def _nested(tensor: Tensor, edge: int, read: Callable[[int], Any], at: int = 0, axis: int = 0) -> str:
    if axis == tensor.ndim:
        return repr(read(at))
    extent, stride = tensor.shape[axis], tensor.strides[axis]
    whole = extent <= 2 * edge
    places = range(extent) if whole else [*range(edge), *range(extent - edge, extent)]
    rows = [_nested(tensor, edge, read, at + place * stride, axis + 1) for place in places]
    if not whole:
        rows.insert(edge, "...")
    return f"[{', '.join(rows)}]"


def _values(tensor: Tensor) -> str:
    """Return the values as text, or nothing where they are many, or cannot be read."""
    code, bits, lanes = tensor.dtype
    reader, edge = _READERS.get((code, bits)), _edge(tensor.shape)
    if reader is None or edge == 0 or lanes != 1 or not host_readable(tensor.device):
        return ""
    itemsize = bits // 8
    try:
        # Through the kernel, which refuses where there is no memory: a repr in a debugger must not crash the process.
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:

        def read(at: int) -> Any:
            return reader(os.pread(memory, itemsize, tensor.data_ptr + at * itemsize))

        return _nested(tensor, edge, read)
    except (OSError, struct.error):
        return ""
    finally:
        os.close(memory)


def _repr(tensor: Tensor) -> str:
    parts = [f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]", str(tensor.device)]
    if not contiguous(tensor.shape, tensor.strides):
        parts.append(f"strides={tensor.strides}")
    if tensor.readonly:
        parts.append("read-only")
    values = _values(tensor)
    return f"dlx.Tensor({', '.join([*parts, values] if values else parts)})"


set_tensor_repr(_repr)
set_tensor_reduce(reduced)
