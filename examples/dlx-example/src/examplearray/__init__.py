"""A small framework of arrays in host memory, for the example plugin `dlx_example`. It does not know dlx.

Arrays have strides, may be read-only, and may be negated lazily (`is_negated`). Two dtypes are special: `brain16`,
known elsewhere as bfloat16, and `posit16`, for which DLPack only has the code "opaque". `__dlpack__` does not export
`quarter8` (float8_e5m2).
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examplearray import _core

__version__ = "0.3.1"
__all__ = [
    "Array",
    "Bundle",
    "DType",
    "array",
    "brain16",
    "empty",
    "float32",
    "float64",
    "from_dlpack",
    "int32",
    "int64",
    "posit16",
    "quarter8",
    "truth8",
    "uint8",
]


@dataclass(frozen=True)
class DType:
    """The type of an element: DLPack's (code, bits), and its letter in `struct`."""

    name: str
    code: int
    bits: int
    letter: str
    travels: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.bits // 8

    def __repr__(self) -> str:
        return f"examplearray.{self.name}"


truth8 = DType("truth8", 6, 8, "?")
uint8 = DType("uint8", 1, 8, "B")
int32 = DType("int32", 0, 32, "i")
int64 = DType("int64", 0, 64, "q")
float32 = DType("float32", 2, 32, "f")
float64 = DType("float64", 2, 64, "d")
brain16 = DType("brain16", 4, 16, "H")  # values are the upper 16 bits of a float32
posit16 = DType("posit16", 3, 16, "H")  # values are bits
quarter8 = DType("quarter8", 12, 8, "B", travels=False)  # the same
_DTYPES = (truth8, uint8, int32, int64, float32, float64, brain16, posit16, quarter8)
_BY_SPELLING = {(dtype.code, dtype.bits): dtype for dtype in _DTYPES}


class Array(_core.Head):
    """An array, created by `array`, `empty`, `from_dlpack`, indexing, and its own methods."""

    __slots__ = ("__weakref__",)

    @property
    def dtype(self) -> DType:
        """Type of the elements."""
        return _BY_SPELLING[self._spelling]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    # ---- views ------------------------------------------------------------------------------------------------------

    def _view(self, offset: int, shape: Any, strides: Any, dtype: DType | None = None, **flags: bool) -> Array:
        spelling = self._spelling if dtype is None else (dtype.code, dtype.bits)
        flags = {"readonly": self.readonly, "negated": self.is_negated} | flags
        return type(self)(self, offset, shape, strides, spelling, **flags)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, key: Any) -> Array:
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > self.ndim:
            raise IndexError(f"{self.ndim} dimensions, {len(keys)} indices")
        offset, shape, strides = 0, [], []
        for axis, (extent, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            at = keys[axis] if axis < len(keys) else slice(None)
            if isinstance(at, slice):
                start, stop, step = at.indices(extent)
                count = len(range(start, stop, step))
                offset += start * stride if count else 0
                shape.append(count)
                strides.append(stride * step)
            else:
                if not -extent <= at < extent:
                    raise IndexError(f"index {at}, extent {extent}")
                offset += at % extent * stride
        return self._view(offset * self.dtype.itemsize, shape, strides)

    @property
    def T(self) -> Array:
        """The array with its dimensions in reverse order."""
        return self._view(0, self.shape[::-1], self.strides[::-1])

    def broadcast(self, count: int) -> Array:
        """Return the array `count` times along a new first dimension, in the same memory."""
        return self._view(0, (count, *self.shape), (0, *self.strides))

    def frozen(self) -> Array:
        """Return a read-only view."""
        return self._view(0, self.shape, self.strides, readonly=True)

    def view(self, dtype: DType) -> Array:
        """Return the same memory as another dtype of the same width."""
        if dtype.bits != self.dtype.bits:
            raise ValueError(f"{dtype} has {dtype.bits} bits, {self.dtype} has {self.dtype.bits}")
        return self._view(0, self.shape, self.strides, dtype)

    def negated(self) -> Array:
        """Return a view with the negatives of the values."""
        return self._view(0, self.shape, self.strides, negated=not self.is_negated)

    # ---- values -----------------------------------------------------------------------------------------------------

    def _offsets(self) -> Iterator[int]:
        """Yield the byte offset of each element, in row-major order."""
        places = [0]
        for extent, stride in zip(self.shape, self.strides, strict=True):
            places = [place + i * stride for place in places for i in range(extent)]
        return (place * self.dtype.itemsize for place in places)

    def tobytes(self) -> bytes:
        """Return the elements' bytes in memory, in row-major order."""
        if self.strides == _row_major(self.shape):
            return ctypes.string_at(self.address, self.nbytes) if self.size else b""
        return b"".join(ctypes.string_at(self.address + place, self.dtype.itemsize) for place in self._offsets())

    def tolist(self) -> Any:
        """Return the values in nested lists."""
        items: list[Any] = [
            _decode(self.dtype, value[0]) for value in struct.iter_unpack(self.dtype.letter, self.tobytes())
        ]
        if self.is_negated:
            items = [-each for each in items]
        for extent in reversed(self.shape[1:]):
            items = [items[i : i + extent] for i in range(0, len(items), extent)] if extent else [[]] * self.shape[0]
        return items if self.shape else items[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        part = self[key]
        if part.readonly:
            raise ValueError("the array is read-only")
        bits = struct.pack(self.dtype.letter, _encode(self.dtype, -value if self.is_negated else value))
        for place in part._offsets():
            ctypes.memmove(part.address + place, bits, len(bits))

    def copy(self) -> Array:
        """Return a writable row-major copy in new memory; a negated array stays negated."""
        made = empty(self.shape, self.dtype)
        ctypes.memmove(made.address, self.tobytes(), self.nbytes)
        return made.negated() if self.is_negated else made

    def resolve(self) -> Array:
        """Return an array of the same values that is not negated: itself, or a copy."""
        if not self.is_negated:
            return self
        made = self.copy().negated()
        for place, value in zip(made._offsets(), self.copy()._flat(), strict=True):
            ctypes.memmove(
                made.address + place, struct.pack(self.dtype.letter, _encode(self.dtype, value)), self.dtype.itemsize
            )
        return made

    def _flat(self) -> list[Any]:
        return [-_decode(self.dtype, value[0]) for value in struct.iter_unpack(self.dtype.letter, self.tobytes())]

    def __repr__(self) -> str:
        return f"Array({self.tolist()}, {self.dtype})"

    # ---- DLPack -----------------------------------------------------------------------------------------------------

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        if dl_device not in (None, (1, 0)):
            raise BufferError(f"examplearray does not support the device {dl_device}")
        if stream is not None:
            raise ValueError("host memory has no streams")
        source = self.copy() if copy else self
        return _core.capsule(source, max_version is not None and max_version[0] >= 1, bool(copy))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


Array.__dlpack_c_exchange_api__ = _core.settle(
    Array, tuple((dtype.code, dtype.bits) for dtype in _DTYPES if dtype.travels)
)


class Bundle(Mapping[str, Any]):
    """Arrays by name, with a label: a container that only this framework defines."""

    def __init__(self, label: str, items: Mapping[str, Any] | None = None) -> None:
        self.label = label
        self._items = dict(items or {})

    def put(self, name: str, value: Any) -> None:
        """Set the array of a name."""
        self._items[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def empty(shape: Sequence[int], dtype: DType = float32) -> Array:
    """Return an array of zeros in new memory, aligned to 64 bytes."""
    shape = tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = bytearray(nbytes + 64)
    start = -ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory)) % 64
    return Array(memory, start, shape, _row_major(shape), (dtype.code, dtype.bits))


def array(values: Any, dtype: DType = float32) -> Array:
    """Return an array of the values in nested lists."""
    shape, part = [], values
    while isinstance(part, list | tuple):
        shape.append(len(part))
        part = part[0] if part else None
    made = empty(shape, dtype)
    items: Any = [values]
    for _ in shape:
        items = [each for part in items for each in part]
    bits = b"".join(struct.pack(dtype.letter, _encode(dtype, each)) for each in items)
    ctypes.memmove(made.address, bits, len(bits))
    return made


def from_dlpack(source: Any) -> Array:
    """Return an array over the memory of a DLPack producer, without a copy."""
    try:
        found = source.__dlpack__(max_version=(1, 3))
    except TypeError:  # a producer of the older protocol
        found = source.__dlpack__()
    return _core.consume(found)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _decode(dtype: DType, value: Any) -> Any:
    return struct.unpack("f", struct.pack("I", value << 16))[0] if dtype is brain16 else value


def _encode(dtype: DType, value: Any) -> Any:
    return struct.unpack("I", struct.pack("f", value))[0] >> 16 if dtype is brain16 else value
