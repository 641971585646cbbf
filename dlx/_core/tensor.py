"""The repr, pickling and copying of `Tensor`, the type of the C core."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

from dlx._core import native
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor as Tensor
from dlx._core.native import register
from dlx._core.types import HOST, READ_ONLY, SUBBYTE_PADDED, contiguous, host_readable
from dlx._support.system import read_at
from dlx.errors import DeviceError


def view(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], start: int = 0) -> Tensor:
    """Return a view of a tensor from element number `start`; elements below a byte must have a byte each."""
    dtype, address = tensor.dtype, tensor.data_ptr
    if start and tensor.nbytes:
        address += start * max(dtype.bits * dtype.lanes // 8, 1)
    return native.tensor_new(address, shape, strides, dtype, tensor.device, tensor.flags, tensor)


# ---- repr: one line, with the values if they are few and readable

MAX_VALUES = 8


def _shortest(value: float, raw: bytes, pack: Callable[[float], bytes]) -> float:
    """Return the float with the shortest text that packs to the same bytes as `value`."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if pack(short) == raw:
                return short
        except OverflowError:  # rounded up to infinity
            continue
    return value


def _unpack(letter: str) -> Callable[[bytes], Any]:
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


# (code, bits) -> function from an element's bytes to a value. The repr omits the values of other dtypes.
_READERS: dict[tuple[int, int], Callable[[bytes], Any]] = {
    (lib.kDLBool, 8): lambda raw: raw != b"\0",
    **{(lib.kDLInt, bits): _unpack(letter) for bits, letter in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))},
    **{(lib.kDLUInt, bits): _unpack(letter) for bits, letter in ((8, "B"), (16, "H"), (32, "I"), (64, "Q"))},
    **{(lib.kDLFloat, bits): read for bits, read in ((16, _real("e")), (32, _real("f")), (64, _unpack("d")))},
    **{
        (lib.kDLComplex, 2 * bits): _complex(read)
        for bits, read in ((16, _real("e")), (32, _real("f")), (64, _unpack("d")))
    },
    (lib.kDLBfloat, 16): _bfloat16,
}


def _edge(shape: tuple[int, ...]) -> int:
    """Return how many values to show at each end of a dimension (0: none), at most `MAX_VALUES` in all."""
    for edge in (MAX_VALUES, 3, 2, 1):
        shown = 1
        for extent in shape:
            shown *= min(extent, 2 * edge)
        if 0 < shown <= MAX_VALUES:
            return edge
    return 0


def _format_nested(tensor: Tensor, edge: int, read: Callable[[int], Any], at: int = 0, axis: int = 0) -> str:
    if axis == tensor.ndim:
        return repr(read(at))
    extent, stride = tensor.shape[axis], tensor.strides[axis]
    whole = extent <= 2 * edge
    places = range(extent) if whole else [*range(edge), *range(extent - edge, extent)]
    rows = [_format_nested(tensor, edge, read, at + place * stride, axis + 1) for place in places]
    if not whole:
        rows.insert(edge, "...")
    return f"[{', '.join(rows)}]"


def _values(tensor: Tensor) -> str:
    """Return the values as text, or ``""`` if they are too many or unreadable."""
    code, bits, lanes = tensor.dtype
    reader, edge = _READERS.get((code, bits)), _edge(tensor.shape)
    if reader is None or edge == 0 or lanes != 1 or not host_readable(tensor.device):
        return ""
    itemsize = bits // 8
    try:
        # The kernel checks the address: a repr in a debugger must not crash the process.
        memory = os.open("/proc/self/mem", os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return ""
    try:

        def read(at: int) -> Any:
            return reader(read_at(memory, itemsize, tensor.data_ptr + at * itemsize))

        return _format_nested(tensor, edge, read)
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


register(represent=_repr)

# ---- pickling and copying: bytes (out of band with protocol 5) and their description

_UINT8 = (lib.kDLUInt, 8, 1)


def dense(tensor: Tensor) -> bool:
    """Return whether the elements have no gaps and no overlap, in any order of dimensions."""
    struct = ffi.cast("DLTensor *", native.tensor_address(tensor))
    return not lib.dlx_layout(struct) & (lib.DLX_LAYOUT_GAPS | lib.DLX_LAYOUT_NEGATIVE | lib.DLX_LAYOUT_ZERO)


def reduce_tensor(tensor: Tensor, protocol: int) -> tuple[Any, ...]:
    """Implement `Tensor.__reduce_ex__`."""
    if not tensor.is_host:
        raise DeviceError(
            f"only host memory can be pickled, and it is on {tensor.device}",
            source=repr(tensor),
            fix="Move it first: dlx.convert(tensor, to='dlx', device='cpu').",
        )
    readonly = tensor.readonly
    if not dense(tensor):
        tensor = native.tensor_copy(tensor, True)
    from pickle import PickleBuffer

    flags = READ_ONLY if readonly else 0
    raw = native.tensor_new(tensor.data_ptr, (tensor.nbytes,), None, _UINT8, HOST, flags, tensor)
    # Not a memoryview: Python's collector may clear it before its exporter and crash.
    data: Any = PickleBuffer(raw) if protocol >= 5 else bytes(raw) if readonly else bytearray(raw)
    return tensor_from, (data, tuple(tensor.dtype), tensor.shape, tensor.strides, tensor.flags & SUBBYTE_PADDED)


def tensor_from(
    data: Any, dtype: tuple[int, int, int], shape: tuple[int, ...], strides: tuple[int, ...], flags: int
) -> Tensor:
    """Return a tensor over the bytes of a pickle, read-only if they are."""
    with memoryview(data) as whole:
        empty = b"" if whole.readonly else bytearray()
        view = whole.cast("B") if whole.nbytes else memoryview(empty)
    itemsize = max(1, dtype[1] // 8)
    address = native.buffer_address(view)
    if address % min(16, itemsize & -itemsize):  # such as in a network packet; consumers rely on natural alignment
        view = memoryview(bytes(view) if view.readonly else bytearray(view))
        address = native.buffer_address(view)
    try:  # the layout is defined by `numbers` in c_src/interop/packed.c
        numbers = struct.pack(f"=q2BH2B2x{len(shape) + len(strides)}q", 0, *dtype, len(shape), flags, *shape, *strides)
    except struct.error as error:
        raise ValueError("its description of a tensor is invalid") from error
    (tensor,) = native.tensors_unpack(address, view.nbytes, numbers, READ_ONLY if view.readonly else 0, view)
    return tensor


register(reduce=reduce_tensor)
