"""`from_pointer` and `from_managed`: tensors over memory at an address; `empty`: over new memory.

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
"""Names of DLPack's managed tensors -> whether the struct is the legacy one."""


class Pointer(NamedTuple):
    """An address, with the type and size of its memory if known."""

    address: int  # 0 for NULL
    to: str = "void"  # the C type of the memory, without ``struct``; with a star for a pointer
    room: int | None = None  # bytes of the memory, for arrays


def look_at(ptr: Any) -> Pointer:
    """Return the address and type of a pointer; objects with ``__index__``, such as 0-d arrays, are refused."""
    if ptr is None:
        return Pointer(0)
    if isinstance(ptr, int) and not isinstance(ptr, bool):
        if not 0 <= ptr < 1 << 64:
            raise ValueError(f"an address must be an unsigned 64-bit number, found {ptr}")
        return Pointer(int(ptr))
    if isinstance(ptr, ffi.CData):
        return _cdata(ptr)
    pointer = _ctypes(ptr)
    if pointer is None:
        kinds = "an int, a cffi cdata, a ctypes pointer or array"
        raise TypeError(f"expected a pointer: {kinds}; found {type_name(type(ptr))}. Pass arrays to dlx.from_dlpack.")
    return pointer


def _cdata(ptr: Any) -> Pointer:
    kind = ffi.typeof(ptr)
    if kind.kind not in ("pointer", "array"):
        hint = "ffi.addressof(it)" if kind.kind in ("struct", "union") else "int(it), if it is an address"
        raise TypeError(f"expected a pointer, found the cdata {kind.cname!r}. Pass {hint}.")
    item = kind.item
    room = ffi.sizeof(ptr) if kind.kind == "array" else None
    name = item.cname.removeprefix("struct ")
    return Pointer(int(ffi.cast("uintptr_t", ptr)), name if item.kind != "pointer" else f"{name.rstrip(' *')} *", room)


# ctypes has no public names for these base classes of POINTER() and simple types.
_POINTER: Any = ctypes.POINTER(ctypes.c_int).__mro__[1]
_SIMPLE: Any = ctypes.c_int.__mro__[1]
_FUNCTION: Any = ctypes.CFUNCTYPE(None).__mro__[1]
_ADDRESSES = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.py_object, _FUNCTION)


def _ctypes(ptr: Any) -> Pointer | None:
    if isinstance(ptr, ctypes.c_void_p):
        return Pointer(ptr.value or 0)
    if isinstance(ptr, _POINTER):
        return Pointer(ctypes.cast(ptr, ctypes.c_void_p).value or 0, _ctypes_name(ptr._type_))
    if isinstance(ptr, ctypes.Array):
        return Pointer(ctypes.addressof(ptr), _ctypes_name(ptr._type_), ctypes.sizeof(ptr))
    if isinstance(ptr, ctypes.Structure | ctypes.Union | _SIMPLE):
        hint = "ctypes.cast(it, ctypes.c_void_p)" if isinstance(ptr, _ADDRESSES) else "ctypes.pointer(it)"
        hint = "it.value to dlx.convert" if isinstance(ptr, ctypes.py_object) else hint
        raise TypeError(f"expected a pointer, found a {type_name(type(ptr))} by value. Pass {hint}.")
    return None


def _ctypes_name(kind: Any) -> str:
    if issubclass(kind, _ADDRESSES):
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
        dlx keeps the object alive like `owner`, so memory that it owns (``ffi.new``, ``ffi.gc``, a ctypes array) needs
        no other owner.
    shape
        Extents, ``(ndim,)``; an int for one dimension.
    dtype
        A name such as ``"float32"``, a triple ``(code, bits, lanes)``, or a `dlx.DType`.
    strides
        In elements, ``(ndim,)``; None means row-major.
    device
        Where the memory is.
    readonly
        Whether the memory is read-only.
    owner
        Object that keeps the memory alive.
    release
        Called once, without arguments, when the memory is no longer used; `owner` is still alive then. It runs on the
        thread of the last release, with the GIL; its exceptions go to ``sys.unraisablehook``. It is not called while
        the interpreter finalizes (the process frees the memory), nor if `from_pointer` raises (you still own the
        memory).

    Raises
    ------
    TypeError, ValueError
        If the pointer, shape or strides are invalid.
    LayoutError
        If there are elements but no address, or if the elements exceed the address space, or the length of a cffi or
        ctypes array.
    DTypeError, DeviceError
        If the dtype or device is unknown.

    Notes
    -----
    dlx cannot check that there is memory at the address, that it contains all elements (unless `ptr` is an array with a
    length), that dtype and device are correct, that the memory is writable, and that it stays valid until `release` or
    while `owner` is alive. A mistake crashes the process.

    Examples
    --------
    >>> import dlx
    >>> samples = dlx.ffi.new("float[6]")
    >>> dlx.from_pointer(samples, (2, 3), "float32").strides
    (3, 1)
    """
    at = look_at(ptr)
    if at.to.endswith("*"):
        raise TypeError(f"expected a pointer to data, found one to a pointer ('{at.to}'). Dereference it first.")
    if at.to in MANAGED:
        raise TypeError(f"expected a pointer to data, found a {at.to} *. Call dlx.from_managed.")
    if at.to == "DLTensor":
        raise TypeError("expected a pointer to data, found a DLTensor *. Pass its data, shape and strides.")
    if release is not None and not callable(release):
        raise TypeError(f"release must be callable without arguments, found {release!r}")
    extents = extents_of(shape)
    steps = None if strides is None else _integers(strides, "strides")
    if steps is not None and len(steps) != len(extents):
        raise ValueError(f"shape has {len(extents)} numbers, strides has {len(steps)}: {extents}, {steps}")
    owners = None if isinstance(ptr, int) else ptr, owner
    # Without `release`, the deleter runs no Python code, so a consumer that calls it under a lock keeps the GIL.
    keeper = owners if release is None else _Releaser(owners)
    flags = READ_ONLY if readonly else 0
    kind, place = DType(dtype), Device(device)
    try:
        tensor = native.tensor_new(at.address, extents, steps, kind, place, flags, keeper)
        if at.room is not None:
            _check_room(tensor, at.room)
    except DlxError as error:
        fix = "Pass an address, and a shape and strides that fit its memory."
        error.complete(source=f"{kind}{list(extents)} at {at.address:#x}", target="dlx", fix=fix)
        raise
    if isinstance(keeper, _Releaser):
        keeper.release = release  # last: `from_pointer` cannot fail any more
    return tensor


class _Releaser:
    """The owner of a tensor's memory; calls a function when the memory is no longer used."""

    __slots__ = ("owners", "release")

    def __init__(self, owners: object) -> None:
        self.owners = owners
        self.release: Callable[[], object] | None = None

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        release = getattr(self, "release", None)  # missing if __init__ ran out of memory
        if release is not None and not finalizing():
            release()


def _check_room(tensor: Tensor, room: int) -> None:
    """Raise if a tensor exceeds its array of `room` bytes."""
    low, high = ffi.new("int64_t *"), ffi.new("int64_t *")
    lib.dlx_extent(dltensor(tensor), tensor.flags, low, high)
    if low[0] < 0 or high[0] > room:
        span = f"covers the bytes {low[0]} to {high[0]}, but the array has {room}"
        reason = f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.strides} {span}"
        raise LayoutError(reason, fix="Pass strides in elements, relative to the pointer.")


@public
@set_module("dlx")
def from_managed(ptr: Any, *, legacy: bool = False, borrow: bool = False) -> Tensor:
    """Return a tensor from a ``DLManagedTensorVersioned *``, or from a ``DLManagedTensor *`` if `legacy`.

    Parameters
    ----------
    ptr
        Address of the struct: an int, a cffi cdata (of any ``FFI``), a ctypes pointer or ``c_void_p``. dlx keeps the
        object alive until the deleter has run.
    legacy
        Whether the struct is older than DLPack 1.0. A typed pointer must have the matching type.
    borrow
        False: the tensor owns the struct and calls its deleter once, on the thread of the last release. True: dlx never
        calls the deleter, and you keep the memory alive while it is used.

    Returns
    -------
    Tensor
        It copies shape and strides; later, dlx reads only the deleter of the struct.

    Raises
    ------
    TypeError
        If `ptr` is not a pointer to this struct.
    ProtocolError, LayoutError, DTypeError
        If the pointer is NULL or misaligned, or the struct has another major version or is invalid. You still own the
        struct then; dlx has only read it.

    Notes
    -----
    dlx cannot check that an untyped address points to this struct, that its shape and strides pointers are valid, and
    that no other consumer uses it. It can detect the wrong kind of struct only by implausible values. Layout and
    versions are those of ``dlpack.h`` 1.3.
    """
    at = look_at(ptr)
    name = "DLManagedTensor" if legacy else "DLManagedTensorVersioned"
    if at.to in MANAGED and at.to != name:
        raise TypeError(f"with legacy={bool(legacy)} expected a {name} *, found a {at.to} *. Pass legacy={not legacy}.")
    if at.to not in (name, "void"):
        raise TypeError(f"expected a {name} *, found a pointer to '{at.to}'. Cast it first.")
    alignment = ffi.alignof(name)
    if at.address == 0 or at.address % alignment:
        found = "NULL" if at.address == 0 else f"{at.address:#x}, which is not a multiple of {alignment}"
        raise ProtocolError(f"the {name} * is {found}", fix="Check for errors of the function that returned it.")
    try:
        return native.managed_adopt(at.address, legacy, borrow, None if isinstance(ptr, int) else ptr)
    except DlxError as error:
        fix = f"Fix its producer, or pass legacy={not legacy} if it is the other struct."
        error.complete(source=f"the {name} at {at.address:#x}", target="dlx", fix=fix)
        raise


def dltensor(tensor: Tensor) -> Any:
    """Return a tensor's DLTensor; it is valid while the tensor is alive."""
    return ffi.cast("DLTensor *", native.tensor_address(tensor))


def extents_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a validated shape; an int means one dimension."""
    try:
        extents = _integers((index(shape),), "shape")  # type: ignore[arg-type]
    except TypeError:
        extents = _integers(shape, "shape")  # type: ignore[arg-type]
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape must not have a negative extent, found {extents}")
    return extents


def _integers(numbers: Sequence[int], what: str) -> tuple[int, ...]:
    try:
        integers = tuple(index(number) for number in numbers)
    except TypeError:
        raise TypeError(f"{what} must be a sequence of int, found {numbers!r}") from None
    if any(not -(1 << 63) <= number < 1 << 63 for number in integers):
        raise ValueError(f"{what} must contain 64-bit integers, found {integers}")
    return integers


def empty(shape: int | Sequence[int], dtype: Any, device: Any = "cpu") -> Tensor:
    """Return a writable, row-major tensor over uninitialized memory: `dlx.empty` without options."""
    extents = extents_of(shape)
    kind, where = DType(dtype), Device(device)
    on_device = where.type == lib.kDLCUDA
    if not on_device and where != HOST:
        reason = f"dlx cannot allocate memory on {where}"
        raise DeviceError(reason, fix="Pass 'cpu' or 'cuda:0'.")
    # tensor_new validates the arguments; dlx never reads this tensor's memory.
    like = native.tensor_new(lib.DLX_ALIGNMENT, extents, None, kind, where, 0, None)
    if on_device:
        cuda.require()
        return native.tensor_on_device(like, False, where.id)
    return native.tensor_empty(native.tensor_address(like))
