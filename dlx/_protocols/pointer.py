"""`from_pointer` and `from_managed`: tensors over memory that C code gives as an address; `empty`: over new memory.

A pointer may be an int, a cffi cdata of any FFI, or a ctypes pointer or array.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

from dlx._core import cuda, native
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.public import public
from dlx._core.types import HOST, READ_ONLY, Device, DType
from dlx._support.module import set_module
from dlx._support.reflect import type_name
from dlx.errors import DeviceError, DlxError, LayoutError, ProtocolError

__all__ = ["MANAGED", "Pointer", "dltensor", "empty", "extents_of", "from_managed", "from_pointer", "look_at"]

MANAGED = {"DLManagedTensor": True, "DLManagedTensorVersioned": False}
"""Names of managed tensors -> whether they are the legacy one."""


class Pointer(NamedTuple):
    """An address, and facts about its memory from the pointer's type."""

    address: int  # 0 for NULL
    to: str = "void"  # the C type behind it, without ``struct``; with a star for a pointer
    room: int | None = None  # bytes behind it, if the type says so, as arrays do


def look_at(ptr: Any) -> Pointer:
    """Return the address and type of a pointer; ``__index__`` is refused: a 0-d array is a number, not an address."""
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
        kinds = "an int, a cffi cdata, a ctypes pointer or array"
        raise TypeError(f"expected a pointer: {kinds}; found {type_name(type(ptr))}. Arrays go to dlx.from_dlpack.")
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


@public
@set_module("dlx")
def from_pointer(
    ptr: Any,
    shape: int | Sequence[int],
    dtype: Any,
    *,
    strides: Sequence[int] | None = None,
    device: Any = "cpu",
    readonly: bool = False,
    owner: object = None,
    release: Callable[[], object] | None = None,
) -> Tensor:
    """Return a tensor over memory at an address.

    Parameters
    ----------
    ptr
        Address of the first element: an int, a cffi cdata (of any ``FFI``), a ctypes pointer, ``c_void_p`` or array.
        The object is kept alive as `owner` is, so that memory which it owns itself (``ffi.new``, ``ffi.gc``, a ctypes
        array) needs no other owner.
    shape
        Extents, ``(ndim,)``; an int means one dimension.
    dtype
        A name such as ``"float32"``, a triple ``(code, bits, lanes)``, or a `dlx.DType`.
    strides
        In elements, ``(ndim,)``; None means row-major.
    device
        Where the memory is.
    readonly
        Whether writing is forbidden.
    owner
        Object that lives as long as the memory is used.
    release
        Called without arguments, exactly once, when nothing uses the memory any more; `owner` is still alive then. It
        runs on the thread of the last release, with the GIL; what it raises goes to ``sys.unraisablehook``. It is not
        called once the interpreter is finalizing: the memory goes with the process. If this function raises, it is not
        called: the memory is still the caller's.

    Raises
    ------
    TypeError, ValueError
        If the pointer, shape or strides are none.
    LayoutError
        If there are elements but no address, if their bytes do not fit the address space, or if they do not fit a cffi
        or ctypes array whose length is known.
    DTypeError, DeviceError
        If there is no such dtype or device.

    Notes
    -----
    What cannot be checked: that there is memory at the address, that it is as large as shape and strides say (unless
    `ptr` is an array with a length), that its elements are of this dtype, that it is writable, that it is on that
    device, and that it stays there until `release` or while `owner` lives. A mistake in these kills the process.

    Examples
    --------
    >>> import dlx
    >>> samples = dlx.ffi.new("float[6]")
    >>> dlx.from_pointer(samples, (2, 3), "float32").strides
    (3, 1)
    """
    at = look_at(ptr)
    if at.to.endswith("*"):
        raise TypeError(f"expected a pointer to data, found one to a pointer ('{at.to}'). Give what it points at.")
    if at.to in MANAGED:
        raise TypeError(f"expected a pointer to data, found a {at.to} *. Call dlx.from_managed.")
    if at.to == "DLTensor":
        raise TypeError("expected a pointer to data, found a DLTensor *. Give its data, and its shape and strides.")
    if release is not None and not callable(release):
        raise TypeError(f"release must be callable without arguments, found {release!r}")
    extents = extents_of(shape)
    steps = None if strides is None else _integers(strides, "strides")
    if steps is not None and len(steps) != len(extents):
        raise ValueError(f"shape has {len(extents)} numbers, strides has {len(steps)}: {extents}, {steps}")
    held = None if isinstance(ptr, int) else ptr, owner
    # Without `release` no Python code runs in the deleter, so that a consumer that calls it under a lock keeps the GIL.
    kept = held if release is None else _Released(held)
    flags = READ_ONLY if readonly else 0
    kind, place = DType(dtype), Device(device)
    try:
        tensor = native.tensor_new(at.address, extents, steps, kind, place, flags, kept)
        if at.room is not None:
            _fits(tensor, at.room)
    except DlxError as error:
        fix = "Give an address, and a shape and strides that its memory holds."
        error.complete(source=f"{kind}{list(extents)} at {at.address:#x}", target="dlx", fix=fix)
        raise
    if isinstance(kept, _Released):
        kept.release = release  # from here on it is owed; nothing above could have called it
    return tensor


class _Released:
    """The owner of a tensor's memory, and the function that is called when the memory is no longer used."""

    __slots__ = ("held", "release")

    def __init__(self, held: object) -> None:
        self.held = held
        self.release: Callable[[], object] | None = None

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        release = getattr(self, "release", None)  # it was not made whole where memory ran out
        if release is not None and not finalizing():
            release()


def _fits(tensor: Tensor, room: int) -> None:
    """Refuse a tensor that leaves the array which it was made over, of `room` bytes."""
    low, high = ffi.new("int64_t *"), ffi.new("int64_t *")
    lib.dlx_extent(dltensor(tensor), tensor.flags, low, high)
    if low[0] < 0 or high[0] > room:
        taken = f"takes the bytes {low[0]} to {high[0]}, and the array has {room}"
        reason = f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.strides} {taken}"
        raise LayoutError(reason, fix="Strides are in elements, counted from where the pointer points.")


@public
@set_module("dlx")
def from_managed(ptr: Any, *, legacy: bool = False, borrow: bool = False) -> Tensor:
    """Return a tensor from a ``DLManagedTensorVersioned *``, or a ``DLManagedTensor *`` where `legacy`.

    Parameters
    ----------
    ptr
        Address of the struct: an int, a cffi cdata (of any ``FFI``), a ctypes pointer or ``c_void_p``. The object is
        kept alive until the deleter has run.
    legacy
        Whether it is the struct from before DLPack 1.0. A typed pointer must agree.
    borrow
        False: the tensor takes the struct, and its deleter is called exactly once, on the thread of the last release.
        True: the deleter is never called, and the caller keeps the memory alive for as long as anything uses it.

    Returns
    -------
    Tensor
        With a shape and strides of its own; of the struct nothing is read later but the deleter.

    Raises
    ------
    TypeError
        If it is no pointer, or one to something else.
    ProtocolError, LayoutError, DTypeError
        If it is NULL or not aligned, of another major version, or describes no tensor. The struct was then only read,
        and is still the caller's.

    Notes
    -----
    What cannot be checked: that there is such a struct at an address without a type, that its shape and strides
    pointers are good, and that nothing else consumes it. The two structs differ in layout, and one that is read as the
    other is noticed by its numbers only. Layout and versions are those of ``dlpack.h`` 1.3.
    """
    at = look_at(ptr)
    name = "DLManagedTensor" if legacy else "DLManagedTensorVersioned"
    if at.to in MANAGED and at.to != name:
        raise TypeError(f"with legacy={bool(legacy)} expected a {name} *, found a {at.to} *. Pass legacy={not legacy}.")
    if at.to not in (name, "void"):
        raise TypeError(f"expected a {name} *, found a pointer to '{at.to}'. Cast it, if it is one all the same.")
    alignment = ffi.alignof(name)
    if at.address == 0 or at.address % alignment:
        found = "NULL" if at.address == 0 else f"{at.address:#x}, which is not a multiple of {alignment}"
        raise ProtocolError(f"there is no {name} at {found}", fix="Look at what the function that gave it reports.")
    try:
        return native.managed_adopt(at.address, legacy, borrow, None if isinstance(ptr, int) else ptr)
    except DlxError as error:
        fix = f"Mend it where it is made, or pass legacy={not legacy} if it is of the other kind."
        error.complete(source=f"the {name} at {at.address:#x}", target="dlx", fix=fix)
        raise


def dltensor(tensor: Tensor) -> Any:
    """Return a tensor's own DLTensor, which lives as long as the tensor."""
    return ffi.cast("DLTensor *", native.tensor_address(tensor))


def extents_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape as the caller gave it, checked; an int means one dimension."""
    extents = _integers((shape,) if isinstance(shape, int) else shape, "shape")
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape must not have a negative extent, found {extents}")
    return extents


def _integers(numbers: Sequence[int], what: str) -> tuple[int, ...]:
    try:
        found = tuple(index(number) for number in numbers)
    except TypeError:
        raise TypeError(f"{what} must be a sequence of int, found {numbers!r}") from None
    if any(not -(1 << 63) <= number < 1 << 63 for number in found):
        raise ValueError(f"{what} must hold numbers of 64 bits, found {found}")
    return found


def empty(shape: int | Sequence[int], dtype: Any, device: Any = "cpu") -> Tensor:
    """Return a writable, row-major tensor over new, uninitialized memory: `dlx.empty` without options."""
    extents = extents_of(shape)
    kind, where = DType(dtype), Device(device)
    on_device = where.type == lib.kDLCUDA
    if not on_device and where != HOST:
        reason = f"dlx allocates on the host and on CUDA devices, asked for {where}"
        raise DeviceError(reason, fix="Say 'cpu' or 'cuda:0'.")
    # tensor_new checks every number; the memory of this tensor is never read.
    like = native.tensor_new(lib.DLX_ALIGNMENT, extents, None, kind, where, 0, None)
    if on_device:
        cuda.require()
        return native.tensor_on_device(like, False, where.id)
    return native.tensor_empty(native.tensor_address(like))
