"""Tensors from the buffer protocol, ``__array_interface__`` and ``__cuda_array_interface__``."""

from __future__ import annotations

import functools
import math
import sys
from operator import index
from typing import Any

from dlx._core import cuda, native
from dlx._core.array_protocol import NUMBERS
from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.stream import Stream, parse_stream
from dlx._core.types import HOST, IS_COPIED, READ_ONLY, Device, DType
from dlx._support.reflect import foreign_error, safe_repr
from dlx.errors import DTypeError, LayoutError, ProtocolError, StreamError

__all__ = ["array_interface", "buffer", "cuda_array_interface", "cuda_interface_stream"]

_FOREIGN_ORDER = ">!" if sys.byteorder == "little" else "<"


def _check_dtype(dtype: tuple[int, int, int] | None, order: str, itemsize: int, shown: str) -> DType:
    """Return the dtype; raise `DTypeError` if it is unknown or in the other byte order."""
    if itemsize > 1 and order and order in _FOREIGN_ORDER:
        raise DTypeError(f"its elements ({shown!r}) are in the other byte order", fix="Swap their bytes first.")
    if dtype is None:
        raise DTypeError(f"DLPack has no dtype for its elements ({shown!r})", fix="View them as numbers first.")
    return DType(dtype)


def buffer(obj: Any) -> Tensor:
    """Return a tensor over an object's buffer (PEP 3118); the tensor holds the buffer."""
    try:
        view = memoryview(obj)
    except (BufferError, ValueError) as error:
        fix = "" if isinstance(error, BufferError) else "Convert it before it is released or closed."
        raise foreign_error("cannot acquire its buffer:", error, fix=fix) from error
    order = view.format[0] if view.format[:1] in ("@", "=", "<", ">", "!") else ""
    found = native.letters_dtype(view.format[len(order) :], view.itemsize)
    dtype = _check_dtype(found, order, view.itemsize, view.format)
    if view.suboffsets:
        raise LayoutError("its buffer is indirect (suboffsets)", fix="Copy it into one block first.")
    address = native.buffer_address(view)
    flags = READ_ONLY if view.readonly else 0
    strides = _whole_elements(view.strides, view.shape, view.itemsize)
    return native.tensor_new(address, view.shape or (), strides, dtype, HOST, flags, view)


def _whole_elements(byte_strides: Any, shape: Any, itemsize: int) -> tuple[int, ...] | None:
    if byte_strides is None or 0 in shape:  # without elements, strides have no meaning
        return None
    if any(stride % itemsize for stride, extent in zip(byte_strides, shape, strict=True) if extent > 1):
        reason = f"its byte strides {tuple(byte_strides)} are not multiples of the item size {itemsize}"
        raise LayoutError(reason, fix="Copy it into contiguous memory first.")
    return tuple(stride // itemsize for stride in byte_strides)


def _integers(numbers: Any, bits: int = 63) -> tuple[int, ...]:
    """Return integers of at most `bits` bits; raise for fractions and text, which `int` would accept."""
    found = tuple(map(index, numbers))
    if max(map(int.bit_length, found), default=0) > bits:
        raise OverflowError("a number of more than 64 bits")
    return found


def _entries(interface: Any, name: str) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...] | None, DType, int]:
    """Return the entries of an interface, and its validated shape, byte strides, dtype and item size."""
    try:
        entries = dict(interface)
    except Exception as error:
        raise foreign_error(f"its {name} is not a dict:", error, ProtocolError) from error
    try:
        shape, strides = _integers(entries["shape"]), entries.get("strides")
        steps = None if strides is None else _integers(strides)
        text = str(entries["typestr"])
        if len(text) < 2:
            raise ValueError(f"a typestr of {len(text)} letters")
        if steps is not None and len(steps) != len(shape):
            raise ValueError(f"{len(shape)} extents and {len(steps)} strides")
    except Exception as error:
        raise foreign_error(f"its {name} is incomplete:", error, ProtocolError) from error
    if entries.get("mask") is not None:
        raise LayoutError("it has a mask, which DLPack cannot carry", fix="Fill the masked elements first.")
    dtype, itemsize = _element(text)
    return entries, shape, steps, dtype, itemsize


@functools.lru_cache(maxsize=64)  # bounded: structures have unlimited typestrs
def _element(text: str) -> tuple[DType, int]:
    """Return the dtype and the item size."""
    width = text[2:]
    itemsize = int(width) if width.isdecimal() and len(width) < 10 else 0  # dates include a unit: '<M8[s]'
    return _check_dtype(NUMBERS.get(f"{text[1]}{itemsize}"), text[0], itemsize, text), itemsize


def _interface_address(data: Any, name: str) -> tuple[int, bool]:
    """Return the address, and whether it is read-only."""
    try:
        (address,), readonly = _integers(data[:1], 64), bool(data[1])
        if address >= 0:
            return address, readonly
    except MemoryError:
        raise
    except Exception as error:
        raise foreign_error(f"the data of its {name} is {safe_repr(data)}:", error, ProtocolError) from error
    raise ProtocolError(f"the data of its {name} is {safe_repr(data)}, not (address, readonly)")


def array_interface(obj: Any, interface: dict[str, Any]) -> Tensor:
    """Return a tensor over an object with ``__array_interface__`` (version 3)."""
    name = "__array_interface__"
    entries, shape, strides, dtype, itemsize = _entries(interface, name)
    data = entries.get("data")
    owner: Any = obj
    if isinstance(data, tuple):
        address, readonly = _interface_address(data, name)
    else:  # a buffer, or the object itself; its length limits the reads
        try:
            view, start = memoryview(obj if data is None else data), index(entries.get("offset") or 0)
            if not view.c_contiguous:
                raise ValueError("it is not contiguous")
        except Exception as error:
            raise foreign_error(f"cannot acquire the data of its {name}:", error, ProtocolError) from error
        size = math.prod(shape)
        pairs = [(size, itemsize)] if strides is None else zip(shape, strides, strict=True)
        reach = [(extent - 1) * step for extent, step in pairs]
        first, end = start + sum(n for n in reach if n < 0), start + sum(n for n in reach if n > 0) + itemsize
        if size and (first < 0 or end > view.nbytes):
            needed = end - first
            raise ProtocolError(f"its buffer of {view.nbytes} bytes does not hold {needed} bytes at offset {first}")
        address, readonly = native.buffer_address(view) + start, view.readonly
        owner = (obj, view)
    flags = READ_ONLY if readonly else 0
    if type(data) is bytes:
        flags |= IS_COPIED  # bytes are a copy for this export (pillow)
    return native.tensor_new(address, shape, _whole_elements(strides, shape, itemsize), dtype, HOST, flags, owner)


def cuda_array_interface(obj: Any, interface: dict[str, Any]) -> Tensor:
    """Return a tensor over an object with ``__cuda_array_interface__`` (2 and 3); the driver finds the device."""
    name = "__cuda_array_interface__"
    entries, shape, strides, dtype, itemsize = _entries(interface, name)
    address, readonly = _interface_address(entries.get("data"), name)
    device = cuda.where(address) if address else Device("cuda")  # no address without elements
    if device == HOST:
        raise ProtocolError(f"the address {address:#x} in its {name} is plain host memory")
    flags = READ_ONLY if readonly else 0
    return native.tensor_new(address, shape, _whole_elements(strides, shape, itemsize), dtype, device, flags, obj)


def cuda_interface_stream(interface: dict[str, Any], device: Device) -> Stream | None:
    """Return the stream of a ``__cuda_array_interface__`` to wait for, or None; the legacy stream before version 3."""
    if int(interface.get("version", 0)) < 3:
        return Stream(device, lib.DLX_STREAM_LEGACY)
    stream = interface.get("stream")
    if stream is None:
        return None
    try:
        return parse_stream(stream, device)
    except StreamError as error:
        reason = f"the stream of its __cuda_array_interface__ is {safe_repr(stream)}: {error.reason}"
        raise ProtocolError(reason) from error
