"""Capsules as the kit makes and reads them: raw structs by cffi, names and pointers by CPython's API.

A `Taken` reads a producer's capsule field by field, an `Export` is a capsule of the kit.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import Any

from dlx._core.extension import ffi
from dlx._core.types import READ_ONLY, SUBBYTE_PADDED, DType, contiguous
from dlx._support.module import set_module

__all__ = ["LEGACY", "VERSIONED", "NotACapsule", "Taken", "elements", "has_destructor", "name_of", "new_capsule"]

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
_NAMES: dict[bytes, Any] = {}  # never freed: a capsule keeps the pointer to its name, also beyond the interpreter
_C = ctypes.CDLL(None)
_api = ctypes.PyDLL(None)  # not ctypes.pythonapi, whose argument types belong to everybody in the process


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function


_ADDRESS, _OBJECT = ctypes.c_void_p, ctypes.py_object
_strdup = _function(_C, "strdup", _ADDRESS, ctypes.c_char_p)
_new = _function(_api, "PyCapsule_New", _OBJECT, _ADDRESS, _ADDRESS, _ADDRESS)
_get_name = _function(_api, "PyCapsule_GetName", ctypes.c_char_p, _OBJECT)
_get_pointer = _function(_api, "PyCapsule_GetPointer", _ADDRESS, _OBJECT, ctypes.c_char_p)
_set_name = _function(_api, "PyCapsule_SetName", ctypes.c_int, _OBJECT, _ADDRESS)
_get_destructor = _function(_api, "PyCapsule_GetDestructor", _ADDRESS, _OBJECT)
_NOTHING = ctypes.cast(_api.Py_IsInitialized, _ADDRESS)  # a destructor that does nothing
_CAPSULE = type(_new(1, None, None))


class NotACapsule(TypeError):
    """An object is no DLPack capsule."""


def _name(text: bytes) -> int:
    if text not in _NAMES:
        _NAMES[text] = _strdup(text)
    return int(_NAMES[text])


def new_capsule(managed: Any, name: bytes) -> Any:
    """Return a capsule of a struct, with a destructor that does nothing."""
    return _new(_address(managed), _name(name), _NOTHING)


def has_destructor(capsule: Any) -> bool:
    """Return whether a capsule has a destructor; some consumers clear it instead of renaming the capsule."""
    return bool(_get_destructor(capsule))


def name_of(capsule: Any) -> bytes:
    """Return a capsule's name."""
    if type(capsule) is not _CAPSULE:
        raise NotACapsule(f"a {type(capsule).__name__} instead of a capsule")
    return _get_name(capsule) or b""


def elements(
    address: int, shape: Sequence[int], strides: Sequence[int] | None, dtype: DType, *, padded: bool = False
) -> bytes:
    """Return the elements of a host tensor in row-major order, whole bytes each; strides None for row-major.

    Elements below 8 bits are packed unless `padded`; each is returned in its own byte.
    """
    if 0 in shape:
        return b""
    bits = dtype.bits * dtype.lanes
    count = math.prod(shape)
    if bits < 8 and not padded:
        whole = int.from_bytes(ffi.buffer(ffi.cast("char *", address), -(-count * bits // 8)), "little")
        return bytes(whole >> i * bits & (1 << bits) - 1 for i in range(count))
    if bits < 8:  # only the lowest bits count
        return bytes(value & (1 << bits) - 1 for value in elements(address, shape, strides, DType("uint8")))
    size = -(-bits // 8)
    if strides is None or contiguous(tuple(shape), tuple(strides)):
        return bytes(ffi.buffer(ffi.cast("char *", address), count * size))
    indices = itertools.product(*map(range, shape))
    offsets = [size * sum(i * step for i, step in zip(at, strides, strict=True)) for at in indices]
    low = min(offsets)
    span = ffi.buffer(ffi.cast("char *", address + low), max(offsets) + size - low)
    return b"".join(span[offset - low : offset - low + size] for offset in offsets)


def _on_foreign_thread(function: Any, argument: Any) -> None:
    """Call a C function with one pointer on a thread that Python did not create, and wait for its end."""
    thread = _ADDRESS()
    start = _function(_C, "pthread_create", ctypes.c_int, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS)
    join = _function(_C, "pthread_join", ctypes.c_int, _ADDRESS, _ADDRESS)
    if start(ctypes.byref(thread), None, _address(function), _address(argument)):
        raise OSError("no thread can be started")
    join(thread, None)  # ctypes releases the GIL meanwhile


def _address(cdata: Any) -> int:
    return int(ffi.cast("uintptr_t", cdata))


@set_module("dlx.testing")
class Taken:
    """One capsule of a producer, read field by field.

    Attributes
    ----------
    legacy
        Whether it holds a ``DLManagedTensor``.
    version, flags
        Of the struct; None and 0 for a legacy one.
    shape, strides
        ``(ndim,)`` each, copied; strides None where the pointer is NULL.
    dtype, device
        As the struct says.
    address
        Of the first element, byte offset included.
    """

    def __init__(self, capsule: Any) -> None:
        name = name_of(capsule)
        if name not in (LEGACY, VERSIONED):
            raise NotACapsule(f"a capsule named {name.decode(errors='replace')!r}")
        self.capsule = capsule
        self.legacy = name == LEGACY
        struct = "DLManagedTensor *" if self.legacy else "DLManagedTensorVersioned *"
        self.managed = ffi.cast(struct, _get_pointer(capsule, name))
        self.version = None if self.legacy else (self.managed.version.major, self.managed.version.minor)
        self.flags = 0 if self.legacy else int(self.managed.flags)
        self.reread()

    def reread(self) -> None:
        """Read the tensor again: what is in the struct now."""
        tensor = self.managed.dl_tensor
        ndim = tensor.ndim
        self.shape = tuple(tensor.shape[i] for i in range(ndim)) if ndim else ()
        missing = tensor.strides == ffi.NULL and ndim > 0
        self.strides = None if missing else tuple(tensor.strides[i] for i in range(ndim))
        self.dtype = DType((tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes))
        self.device = (tensor.device.device_type, tensor.device.device_id)
        self.address = _address(tensor.data) + tensor.byte_offset

    @property
    def readonly(self) -> bool:
        """Whether it is marked read-only."""
        return bool(self.flags & READ_ONLY)

    def elements(self) -> bytes:
        """Read the elements from memory now, in row-major order."""
        return elements(self.address, self.shape, self.strides, self.dtype, padded=bool(self.flags & SUBBYTE_PADDED))

    def consume(self) -> None:
        """Become the owner, as a consumer does, by renaming the capsule."""
        _set_name(self.capsule, _name(b"used_" + (LEGACY if self.legacy else VERSIONED)))

    def delete(self, *, gil: bool = False, thread: bool = False) -> None:
        """Call the deleter with the GIL, without it, or on a thread that Python did not create."""
        deleter = self.managed.deleter
        if deleter == ffi.NULL:
            return
        if thread:
            _on_foreign_thread(deleter, self.managed)
        elif gil:
            ctypes.PYFUNCTYPE(None, _ADDRESS)(_address(deleter))(_address(self.managed))
        else:
            deleter(self.managed)  # cffi releases the GIL around it

    def delete_at_exit(self) -> None:
        """Have the deleter called when the interpreter is gone and the process ends."""
        # atexit(3) itself is no symbol of glibc's library.
        at_exit = _function(_C, "__cxa_atexit", ctypes.c_int, _ADDRESS, _ADDRESS, _ADDRESS)
        at_exit(_address(self.managed.deleter), _address(self.managed), None)
