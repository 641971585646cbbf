"""The kit's capsules and producers, the bit patterns that fill arrays, and the layouts and views that are tried.

Structs are raw, by cffi, names and pointers by CPython's API: a `Taken` reads a producer's capsule field by field, a
`Source` is a producer that the kit controls, an `Export` is one of its capsules.
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
    starts = [size * each for each in offsets(shape, strides)]
    low = min(starts)
    span = ffi.buffer(ffi.cast("char *", address + low), max(starts) + size - low)
    return b"".join(span[start - low : start - low + size] for start in starts)


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

    def consume(self) -> Taken:
        """Become the owner, as a consumer does: rename the capsule, whose destructor then does nothing. Return self."""
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
            deleter(self.managed)  # cffi releases the GIL around it

    def delete_at_exit(self) -> None:
        """Have the deleter called when the interpreter is gone and the process ends."""
        # atexit(3) itself is no symbol of glibc's library.
        at_exit = _function(_C, "__cxa_atexit", ctypes.c_int, _ADDRESS, _ADDRESS, _ADDRESS)
        at_exit(_address(self.managed.deleter), _address(self.managed), None)


# ---- producers -------------------------------------------------------------------------------------------------------

# Exponent and mantissa bits of the formats that have several NaNs.
_FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}


@set_module("dlx.testing")
def pattern(dtype: str, count: int) -> bytes:
    """Return `count` elements of a dtype, packed: bits that no conversion may change.

    The first floats are a NaN with every payload bit set, a signalling NaN with payload 1, -0.0, the smallest
    subnormal number and infinity; bools are 0 and 1.
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
"""Every dtype that some library has, and lanes."""

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
"""Name -> (description, shape, strides, severity if it comes in wrong)."""


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
"""Views of a row-major 4 by 6 array: name -> (shape, strides, number of the first element)."""


def offsets(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the distance of each element from the first one, in elements and in row-major order."""
    return [sum(map(operator.mul, at, strides)) for at in itertools.product(*map(range, shape))]


def spread(data: bytes, dtype: str, count: int) -> bytes:
    """Return packed elements as `elements` gives them: at least one byte each."""
    memory = ffi.new("char[]", data or 1)
    return elements(_address(memory), (count,), None, DType(dtype))


class Export:
    """One capsule of a `Source`, whose deleter counts in C, from any thread and without the GIL.

    Its destructor does nothing: the kit frees the capsule unless it is consumed.
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
        if source.poisoned:  # the fields of another ABI, which must not be read
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
        """The number of calls of the deleter."""
        return int(self._count[0])

    @property
    def consumed(self) -> bool:
        """Whether a consumer became the owner: it renamed the capsule, or cleared its destructor."""
        return name_of(self.capsule) != self.name or not _get_destructor(self.capsule)


# A consumer may hold a struct when Python ends and clears modules in any order: the list outlives them.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(Export._alive))


def swept() -> int:
    """Release the exports that no consumer can reach any more; return how many are left."""
    left = (export for export in Export._alive if not export.deleted)
    Export._alive[:] = [export for export in left if export.consumed or sys.getrefcount(export.capsule) > 2]
    return len(Export._alive)


@set_module("dlx.testing")
@dataclass(eq=False, repr=False)
class Source:
    """A producer over its own memory that does exactly what its parameters say, and logs its calls.

    Parameters
    ----------
    dtype
        Name of a dtype of dlx.
    shape, strides
        ``(ndim,)`` each; strides in elements, None for row-major.
    readonly
        Whether the memory is read-only. A legacy capsule, which could not say so, is then refused.
    legacy
        Whether all capsules are legacy ones; None: as the consumer asks.
    null_strides
        Whether the struct has no strides, as before DLPack 1.2.
    shift
        Bytes between the first element and the next lower multiple of 256.
    byte_offset
        Bytes by which the struct's data pointer is too low.
    device, says
        Device in the struct, and that of ``__dlpack_device__`` if it differs.
    data
        Address to give instead of the memory's.
    raises
        An exception for ``__dlpack__`` to raise.
    answer
        An object for ``__dlpack__`` to return instead of a capsule.
    claims, code
        Shape and dtype to state in the struct instead of the true ones.
    version, deleter, poisoned
        Version of the struct, whether it has a deleter, and whether every field behind the flags is filled with ones.
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
        count = min(high - low + 1, 1 << 20)  # absurd shapes are promised, not filled
        filling = pattern(self.dtype.name, count)
        self.memory = ffi.new("char[]", len(filling) + 1024 + self.shift + self.byte_offset)
        start = _address(self.memory) + self.shift + 256 + -_address(self.memory) % 256
        ffi.buffer(ffi.cast("char *", start), len(filling))[:] = filling
        self.address = start - low * size // 8
        self.calls: list[dict[str, Any]] = []
        self.exports: list[Export] = []

    def elements(self) -> bytes:
        """Return the elements in row-major order, as they are in memory now."""
        return elements(self.address, self.shape, self.strides, self.dtype)

    def capsule(self, *, legacy: bool = False, flags: int = 0) -> Any:
        """Return a fresh capsule."""
        self.exports.append(Export(self, legacy, flags | (READ_ONLY if self.readonly else 0)))
        return self.exports[-1].capsule

    def _export(self, keywords: dict[str, Any]) -> Any:
        """Log a call of ``__dlpack__`` and answer it."""
        self.calls.append(keywords)
        if self.raises is not None:
            raise self.raises
        if self.answer is not Ellipsis:
            return self.answer
        version = keywords.get("max_version")
        legacy = version is None or version[0] < 1 if self.legacy is None else self.legacy
        if keywords.get("dl_device") not in (None, self.device):
            raise BufferError(f"this producer is on {self.device}")
        if keywords.get("copy"):
            copied = Source(self.dtype.name, self.shape)
            ffi.buffer(ffi.cast("char *", copied.address), len(self.elements()))[:] = self.elements()
            capsule = copied.capsule(legacy=legacy, flags=IS_COPIED)
            self.exports += copied.exports
            return capsule
        if self.readonly and legacy:
            raise BufferError("this memory is read-only, and a legacy capsule cannot say so")
        return self.capsule(legacy=legacy)

    @staticmethod
    def read(array: Any) -> bytes:
        """Return the elements of any array in row-major order, by its own export."""
        return Taken(array.__dlpack__(max_version=(1, 0))).elements()

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        given = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return self._export({key: value for key, value in given.items() if value is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device if self.says is None else self.says

    def amiss(self) -> str:
        """Return the fault in the bookkeeping once every result is gone; empty if there is none.

        The deleter of a consumed capsule must be called once. A capsule that was not consumed keeps its name, and the
        consumer must not call its deleter.
        """
        for wait in range(14):  # a cycle, or a thread of a framework, may release it a little later
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
    """A producer from before DLPack 1.0: it knows `stream` only."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self._export({} if stream is None else {"stream": stream})
