"""Capsules and producers of the kit, the bit patterns of its arrays, and its layouts and views.

Structs are accessed with cffi, capsule names and pointers with CPython's API. A `Taken` reads a producer's capsule
field by field, a `Source` is a producer that the kit controls, and an `Export` is one of its capsules.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import operator
import sys
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from dlx._core.extension import ffi, lib
from dlx._core.types import IS_COPIED, READ_ONLY, SUBBYTE_PADDED, DType, contiguous, row_major
from dlx._support.module import set_module

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
_NAMES: dict[bytes, Any] = {}  # never freed: a capsule keeps the pointer to its name, even after the interpreter ends
_C = ctypes.CDLL(None)
_api = ctypes.PyDLL(None)  # not ctypes.pythonapi: all users of the process share its argument types


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
_NOTHING = ctypes.cast(_api.Py_IsInitialized, _ADDRESS)
_CAPSULE = type(_new(1, None, None))


class NotACapsule(TypeError):
    """The object is not a DLPack capsule."""


def _name(text: bytes) -> int:
    if text not in _NAMES:
        _NAMES[text] = _strdup(text)
    return int(_NAMES[text])


def name_of(capsule: Any) -> bytes:
    """Return a capsule's name."""
    if type(capsule) is not _CAPSULE:
        raise NotACapsule(f"a {type(capsule).__name__} instead of a capsule")
    return _get_name(capsule) or b""


def elements(
    address: int, shape: Sequence[int], strides: Sequence[int] | None, dtype: DType, *, padded: bool = False
) -> bytes:
    """Return the elements of a host tensor in row-major order, in whole bytes each; `strides` of None are row-major.

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
    starts = [size * each for each in offsets(shape, strides)]
    low = min(starts)
    span = ffi.buffer(ffi.cast("char *", address + low), max(starts) + size - low)
    return b"".join(span[start - low : start - low + size] for start in starts)


def _on_foreign_thread(function: Any, argument: Any) -> None:
    """Call a C function with one pointer on a thread that Python did not create, and join it."""
    thread = _ADDRESS()
    start = _function(_C, "pthread_create", ctypes.c_int, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS)
    join = _function(_C, "pthread_join", ctypes.c_int, _ADDRESS, _ADDRESS)
    if start(ctypes.byref(thread), None, _address(function), _address(argument)):
        raise OSError("cannot start a thread")
    join(thread, None)  # ctypes releases the GIL


def _address(cdata: Any) -> int:
    return int(ffi.cast("uintptr_t", cdata))


@set_module("dlx.testing")
class Taken:
    """A producer's capsule, read field by field.

    Attributes
    ----------
    legacy
        Whether the capsule holds a ``DLManagedTensor``.
    version, flags
        Fields of the struct; None and 0 if legacy.
    shape, strides
        Copies, ``(ndim,)`` each; strides are None if the pointer is NULL.
    dtype, device
        Fields of the struct.
    address
        Address of the first element, including the byte offset.
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
        """Read the struct again."""
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
        """Whether the flags mark the memory read-only."""
        return bool(self.flags & READ_ONLY)

    def elements(self) -> bytes:
        """Return the elements in memory now, in row-major order."""
        return elements(self.address, self.shape, self.strides, self.dtype, padded=bool(self.flags & SUBBYTE_PADDED))

    def consume(self) -> Taken:
        """Rename the capsule, as a consumer does, so that its destructor does nothing; return self."""
        _set_name(self.capsule, _name(b"used_" + (LEGACY if self.legacy else VERSIONED)))
        return self

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
            deleter(self.managed)  # cffi releases the GIL

    def delete_at_exit(self) -> None:
        """Register the deleter to be called when the process ends, after the interpreter."""
        # atexit(3) is not a symbol of glibc's shared library.
        at_exit = _function(_C, "__cxa_atexit", ctypes.c_int, _ADDRESS, _ADDRESS, _ADDRESS)
        at_exit(_address(self.managed.deleter), _address(self.managed), None)


# ---- producers -------------------------------------------------------------------------------------------------------

# Exponent and mantissa bits of the formats with several NaNs.
_FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}


@set_module("dlx.testing")
def pattern(dtype: str, count: int) -> bytes:
    """Return `count` packed elements of a dtype, with bits that no conversion may change.

    The first floats are a NaN with every payload bit set, a signalling NaN with payload 1, -0.0, the smallest subnormal
    number and infinity; bools are 0 and 1.
    """
    kind = DType(dtype)
    bits = kind.bits * kind.lanes
    nbytes = -(-count * bits // 8)
    if dtype == "bool":
        return (bytes((0, 1, 0)) * (count // 3 + 1))[:count]
    raw = bytearray((bytes((i * 73 + 9) & 0xFF for i in range(256)) * (nbytes // 256 + 1))[:nbytes])
    part = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    if part in _FORMATS:
        exponent, mantissa = _FORMATS[part]
        width = 1 + exponent + mantissa
        top = ((1 << exponent) - 1) << mantissa
        specials = [(1 << width) - 1, top | 1, 1 << (width - 1), 1, top]
        for i, special in enumerate(specials[: nbytes * 8 // width]):
            raw[i * width // 8 : (i + 1) * width // 8] = special.to_bytes(width // 8, "little")
    return bytes(raw)


OTHERS = (*(dtype.name for dtype in DType.all()), "float32x4")
"""Every dtype of the libraries, and lanes."""

LAYOUTS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], str]] = {
    "transposed": ("An array in column-major order", (6, 4), (1, 6), "wrong"),
    "negative": ("An array with negative strides", (4,), (-1,), "fatal"),
    "zero": ("An array whose rows are one and the same", (4, 6), (0, 1), "wrong"),
    "gaps": ("An array with gaps between its elements", (4, 3), (12, 2), "wrong"),
    "overlapping": ("An array whose rows overlap", (4, 3), (1, 1), "wrong"),
    "size-1": ("An array with odd strides where an extent is 1", (1, 4, 1), (-7, 1, 400), "wrong"),
    "empty": ("An array without elements", (0, 3), (3, 1), "refuses"),
    "scalar": ("An array without dimensions", (), (), "refuses"),
}
"""Name -> (description, shape, strides, severity of a wrong import)."""


VIEWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "transposed": ((6, 4), (1, 6), 0),
    "every other column": ((4, 3), (6, 2), 0),
    "backwards": ((4, 6), (-6, 1), 18),
    "one row": ((6,), (1,), 6),
    "one column": ((4,), (6,), 2),
    "no row": ((0, 6), (6, 1), 0),
    "one element": ((1, 1), (6, 1), 9),
    "one row for all": ((4, 6), (0, 1), 0),
    "overlapping": ((4, 3), (1, 1), 0),
    "no dimension": ((), (), 8),
}
"""Views of a row-major 4 by 6 array: name -> (shape, strides, index of the first element)."""


def offsets(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the distance of each element from the first, in elements, in row-major order."""
    return [sum(map(operator.mul, at, strides)) for at in itertools.product(*map(range, shape))]


def spread(data: bytes, dtype: str, count: int) -> bytes:
    """Return packed elements in the format of `elements`: at least one byte each."""
    memory = ffi.new("char[]", data or 1)
    return elements(_address(memory), (count,), None, DType(dtype))


class Export:
    """A capsule of a `Source`. Its deleter counts calls in C, from any thread, without the GIL.

    Its destructor does nothing: the kit frees the capsule unless a consumer takes ownership.
    """

    _alive: ClassVar[list[Export]] = []  # structs that a consumer may still use

    def __init__(self, source: Source, legacy: bool, flags: int) -> None:
        self.legacy, self.keep = legacy, source.memory
        self.managed = ffi.new("DLManagedTensor *" if legacy else "DLManagedTensorVersioned *")
        self._count = ffi.new("uint64_t *")
        shape = source.shape if source.claims is None else source.claims
        strides = None if source.null_strides else source.strides
        self._numbers = [ffi.new("int64_t[]", list(shape) or 1)]
        self._numbers += [ffi.NULL if strides is None else ffi.new("int64_t[]", list(strides) or 1)]
        tensor = self.managed.dl_tensor
        if source.poisoned:  # the fields of another ABI must not be read
            ffi.buffer(ffi.addressof(tensor))[:] = b"\xff" * ffi.sizeof("DLTensor")
        else:
            data = source.address if source.data is None else source.data
            tensor.data = ffi.cast("void *", data and data - source.byte_offset)
            tensor.ndim, tensor.byte_offset = len(shape), source.byte_offset
            tensor.shape, tensor.strides = self._numbers
            tensor.device.device_type, tensor.device.device_id = source.device
            tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = source.code or source.dtype
        self.managed.manager_ctx = self._count
        if source.deleter:
            self.managed.deleter = ffi.addressof(lib, "dlx_count_legacy" if legacy else "dlx_count_managed")
        if not legacy:
            self.managed.version.major, self.managed.version.minor = source.version
            self.managed.flags = flags
        self.name = source.name or (LEGACY if legacy else VERSIONED)
        self.capsule = _new(_address(self.managed), _name(self.name), _NOTHING)
        self._alive.append(self)

    @property
    def deleted(self) -> int:
        """Number of calls of the deleter."""
        return int(self._count[0])

    @property
    def consumed(self) -> bool:
        """Whether a consumer took ownership: it renamed the capsule, or cleared the destructor."""
        return name_of(self.capsule) != self.name or not _get_destructor(self.capsule)


# A consumer may hold a struct while Python clears modules at exit: the list outlives them.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(Export._alive))


def swept() -> int:
    """Release the exports that consumers can no longer reach; return the number of the others."""
    left = (export for export in Export._alive if not export.deleted)
    Export._alive[:] = [export for export in left if export.consumed or sys.getrefcount(export.capsule) > 2]
    return len(Export._alive)


@set_module("dlx.testing")
@dataclass(eq=False, repr=False)
class Source:
    """A producer of known memory that follows its parameters exactly, and logs its calls.

    Parameters
    ----------
    dtype
        Name of a dtype of dlx.
    shape, strides
        ``(ndim,)`` each; strides in elements, None for row-major.
    readonly
        Whether the memory is read-only. Requests for a legacy capsule, which has no such flag, then fail.
    legacy
        Whether all capsules are legacy ones; None: the consumer decides.
    null_strides
        Whether the struct has no strides, as before DLPack 1.2.
    shift
        Bytes between the first element and the next lower multiple of 256.
    byte_offset
        Bytes by which the struct's data pointer is too low.
    device, says
        Device in the struct, and the result of ``__dlpack_device__`` if it differs.
    data
        Data pointer for the struct instead of the memory's address.
    raises
        Exception that ``__dlpack__`` raises.
    answer
        Object that ``__dlpack__`` returns instead of a capsule.
    claims, code
        Shape and dtype for the struct instead of the true ones.
    version, deleter, poisoned
        Version of the struct, whether it has a deleter, and whether all fields after the flags are filled with ones.
    name
        Name of the capsule, if it is an invalid one.

    Attributes
    ----------
    calls
        Keywords of every call of ``__dlpack__``.
    exports
        All exported capsules.
    """

    dtype: Any = "float32"
    shape: Sequence[int] = (4,)
    strides: Sequence[int] | None = None
    _: KW_ONLY
    readonly: bool = False
    legacy: bool | None = None
    null_strides: bool = False
    shift: int = 0
    byte_offset: int = 0
    device: tuple[int, int] = (1, 0)
    says: tuple[int, int] | None = None
    data: int | None = None
    raises: BaseException | None = None
    answer: Any = Ellipsis
    claims: Sequence[int] | None = None
    code: tuple[int, int, int] | None = None
    version: tuple[int, int] = (1, 0)
    deleter: bool = True
    poisoned: bool = False
    name: bytes = b""

    def __post_init__(self) -> None:
        self.dtype, self.shape = DType(self.dtype), tuple(self.shape)
        self.strides = row_major(self.shape) if self.strides is None else tuple(self.strides)
        size = self.dtype.bits * self.dtype.lanes
        spans = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True) if extent > 1]
        low, high = sum(span for span in spans if span < 0), sum(span for span in spans if span > 0)
        count = min(high - low + 1, 1 << 20)  # absurd shapes are declared, not filled
        filling = pattern(self.dtype.name, count)
        self.memory = ffi.new("char[]", len(filling) + 1024 + self.shift + self.byte_offset)
        start = _address(self.memory) + self.shift + 256 + -_address(self.memory) % 256
        ffi.buffer(ffi.cast("char *", start), len(filling))[:] = filling
        self.address = start - low * size // 8
        self.calls: list[dict[str, Any]] = []
        self.exports: list[Export] = []

    def elements(self) -> bytes:
        """Return the elements in memory now, in row-major order."""
        return elements(self.address, self.shape, self.strides, self.dtype)

    def capsule(self, *, legacy: bool = False, flags: int = 0) -> Any:
        """Return a new capsule."""
        self.exports.append(Export(self, legacy, flags | (READ_ONLY if self.readonly else 0)))
        return self.exports[-1].capsule

    def _export(self, keywords: dict[str, Any]) -> Any:
        """Log the call and return a capsule, as the keywords request."""
        self.calls.append(keywords)
        if self.raises is not None:
            raise self.raises
        if self.answer is not Ellipsis:
            return self.answer
        version = keywords.get("max_version")
        legacy = version is None or version[0] < 1 if self.legacy is None else self.legacy
        if keywords.get("dl_device") not in (None, self.device):
            raise BufferError(f"the producer is on {self.device}")
        if keywords.get("copy"):
            copied = Source(self.dtype.name, self.shape)
            ffi.buffer(ffi.cast("char *", copied.address), len(self.elements()))[:] = self.elements()
            capsule = copied.capsule(legacy=legacy, flags=IS_COPIED)
            self.exports += copied.exports
            return capsule
        if self.readonly and legacy:
            raise BufferError("the memory is read-only, and a legacy capsule has no such flag")
        return self.capsule(legacy=legacy)

    @staticmethod
    def read(array: Any) -> bytes:
        """Return the elements of an array in row-major order, read from its export."""
        return Taken(array.__dlpack__(max_version=(1, 0))).elements()

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        keywords = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return self._export({key: value for key, value in keywords.items() if value is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device if self.says is None else self.says

    def amiss(self) -> str:
        """Return the fault in the releases after every result is gone, or an empty text.

        A consumer calls the deleter of a consumed capsule once. A capsule that keeps its name was not consumed, and the
        consumer must not call its deleter.
        """
        for wait in range(14):  # a cycle, or a framework's thread, may release it later
            if all(export.deleted or not export.consumed for export in self.exports):
                break
            gc.collect()
            time.sleep(0.01 * wait)
        for export in self.exports:
            if export.consumed and export.deleted != 1:
                return f"a capsule was taken, and its deleter called {export.deleted} times"
            if not export.consumed and export.deleted:
                return f"a deleter was called {export.deleted} times, and the capsule kept its name: freed twice"
        return ""


@set_module("dlx.testing")
class OldSource(Source):
    """A producer from before DLPack 1.0, whose `__dlpack__` accepts `stream` only."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self._export({} if stream is None else {"stream": stream})
