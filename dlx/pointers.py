"""What a pointer of Python's C libraries points at: an int, a cffi cdata of any FFI, a ctypes pointer or array."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from dlx.native import ffi
from dlx.tensor import type_name

__all__ = ["MANAGED", "Pointer", "look_at"]

MANAGED = {"DLManagedTensor": True, "DLManagedTensorVersioned": False}
"""Names of managed tensors -> whether they are the legacy one."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address, and what its type says about the memory there.

    Attributes
    ----------
    address
        A number; 0 for NULL.
    to
        Name of the C type behind it, without ``struct``; ``"void"`` where nothing is said, with a star for a pointer.
    room
        Bytes behind it, where the type says so (arrays); else None.
    """

    address: int
    to: str = "void"
    room: int | None = None


def look_at(ptr: Any) -> Pointer:
    """Return what a pointer says about itself; its memory is not read.

    Raises
    ------
    TypeError
        If it is no pointer. Objects with ``__index__`` are none either: a 0-d array is a number, not an address.
    ValueError
        If it is a number that no address can be.
    """
    if ptr is None:
        return Pointer(0)
    if isinstance(ptr, int) and not isinstance(ptr, bool):
        if not 0 <= ptr < 1 << 64:
            raise ValueError(f"an address has 64 bits and no sign, found {ptr}")
        return Pointer(int(ptr))
    if isinstance(ptr, ffi.CData):
        return _cdata(ptr)
    found = _ctypes(ptr)
    if found is None:
        raise TypeError(
            f"expected a pointer: an int, a cffi cdata, a ctypes pointer or array; "
            f"found {type_name(type(ptr))}. Arrays go to dlx.from_dlpack."
        )
    return found


def _cdata(ptr: Any) -> Pointer:
    kind = ffi.typeof(ptr)
    if kind.kind not in ("pointer", "array"):
        hint = "ffi.addressof(it)" if kind.kind in ("struct", "union") else "int(it), if it is an address"
        raise TypeError(f"expected a pointer, found the cdata {kind.cname!r}. Give {hint}.")
    item = kind.item
    room = ffi.sizeof(ptr) if kind.kind == "array" else None
    name = item.cname.removeprefix("struct ")
    return Pointer(int(ffi.cast("uintptr_t", ptr)), name if item.kind != "pointer" else f"{name.rstrip(' *')} *", room)


# ctypes has no public name for the classes of pointers and functions; they are what POINTER() and CFUNCTYPE() derive.
_POINTER: Any = ctypes.POINTER(ctypes.c_int).__mro__[1]
_SIMPLE: Any = ctypes.c_int.__mro__[1]


def _ctypes(ptr: Any) -> Pointer | None:
    if isinstance(ptr, ctypes.c_void_p):
        return Pointer(ptr.value or 0)
    if isinstance(ptr, _POINTER):
        return Pointer(ctypes.cast(ptr, ctypes.c_void_p).value or 0, _ctypes_name(ptr._type_))
    if isinstance(ptr, ctypes.Array):
        return Pointer(ctypes.addressof(ptr), _ctypes_name(ptr._type_), ctypes.sizeof(ptr))
    if isinstance(ptr, ctypes.Structure | ctypes.Union | _SIMPLE):
        raise TypeError(f"expected a pointer, found a {type_name(type(ptr))} by value. Give ctypes.pointer(it).")
    return None


def _ctypes_name(kind: Any) -> str:
    if issubclass(kind, ctypes.c_void_p):
        return "void *"
    return f"{_ctypes_name(kind._type_)} *" if issubclass(kind, _POINTER) else str(kind.__name__)
