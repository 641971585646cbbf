"""Generated cases, and managed tensors whose fields are wrong in every detectable way; for `producers.cases`.

All memory that a consumer could read is valid, so that a right consumer never reads invalid memory: a wrong but
plausible pointer, or an extent beyond the memory, cannot be detected.
"""

from __future__ import annotations

import asyncio
import collections
import random
from math import prod

import dlx
from dlx import errors
from dlx._core.extension import ffi, lib
from dlx.testing.capsules import _address, _name, _new, elements, name_of

READ_ONLY, IS_COPIED, PADDED = 1, 2, 4
HOST_READABLE = (1, 3, 11)

# ---- memory ----------------------------------------------------------------------------------------------------------

ROOM = 1 << 20
MEMORY = ffi.new("unsigned char[]", 2 * ROOM)  # the first half any bytes, the second one 0 and 1
START = _address(MEMORY)
START += -START % 256
ffi.memmove(MEMORY, bytes((i * 167 + (i >> 5) * 59 + (i >> 3) * 13) % 256 for i in range(ROOM)), ROOM)
ffi.memmove(MEMORY + ROOM, bytes((i * 167 + (i >> 5) * 59) % 2 for i in range(ROOM)), ROOM)


def place(rng, name):
    """Return an address in the middle of memory that holds values of a dtype."""
    return START + (ROOM if name == "bool" else 0) + ROOM // 2 + 256 * rng.randrange(64)


def is_inside(address):
    """Return True if an address is in that memory."""
    return START <= address < START + 2 * ROOM


# ---- errors ----------------------------------------------------------------------------------------------------------


class Unsayable(Exception):
    """An object without a text."""

    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


class Interrupt(BaseException):
    """An exception that must not be swallowed."""


EXCEPTIONS = (
    lambda: ValueError("planted"),
    lambda: TypeError("planted"),
    lambda: TypeError("__dlpack__() got an unexpected keyword argument 'max_version'"),
    lambda: AttributeError("planted"),
    lambda: KeyError("planted"),
    lambda: IndexError(),
    lambda: StopIteration(3),
    lambda: BufferError("planted"),
    lambda: RuntimeError("planted " * 300),
    lambda: RecursionError("planted"),
    lambda: OSError(5, "planted"),
    lambda: AssertionError(),
    lambda: NotImplementedError("planted"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "planted"),
    lambda: ExceptionGroup("planted", [ValueError("inside")]),
    lambda: errors.LayoutError("planted"),
    lambda: ImportError("planted"),
    lambda: DeprecationWarning("planted"),
    Unsayable,
    lambda: MemoryError("planted"),
    lambda: MemoryError("planted"),
    lambda: KeyboardInterrupt("planted"),
    lambda: KeyboardInterrupt("planted"),
    lambda: SystemExit(3),
    lambda: GeneratorExit("planted"),
    lambda: asyncio.CancelledError("planted"),
    lambda: BaseExceptionGroup("planted", [KeyboardInterrupt()]),
    Interrupt,
)


def is_final(error):
    """Return True for an exception that must not be swallowed or replaced."""
    return isinstance(error, MemoryError) or not isinstance(error, Exception)


# ---- a case ----------------------------------------------------------------------------------------------------------


class Struct:
    """A managed tensor with a counted deleter, and its capsule."""

    def __init__(self, spec):
        legacy = spec.legacy
        self.managed = managed = ffi.new("DLManagedTensor *" if legacy else "DLManagedTensorVersioned *")
        self.count = ffi.new("uint64_t *")
        room = 1 if 0 <= spec.ndim <= len(spec.shape or ()) else 300
        self.numbers = []
        tensor = managed.dl_tensor
        for name, values in (("shape", spec.shape), ("strides", spec.strides)):
            if values is not None:
                numbers = ffi.new("int64_t[]", [*values, *[1] * (room - len(values))])
                self.numbers.append(numbers)
                setattr(tensor, name, numbers)
        tensor.data, tensor.ndim, tensor.byte_offset = ffi.cast("void *", spec.data), spec.ndim, spec.offset
        tensor.device.device_type, tensor.device.device_id = spec.device
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = spec.dtype
        managed.manager_ctx = self.count
        if spec.deleter:
            managed.deleter = ffi.addressof(lib, "dlx_count_legacy" if legacy else "dlx_count_managed")
        if not legacy:
            managed.version.major, managed.version.minor = spec.version
            managed.flags = spec.flags
        self.has_deleter = spec.deleter
        self.name = spec.name
        name = 0 if spec.name is None else _name(spec.name)
        self.capsule = _new(_address(managed), name or None, None)

    @property
    def deleted(self):
        """The number of calls of the deleter."""
        return int(self.count[0])

    @property
    def is_consumed(self):
        """True if a consumer renamed the capsule."""
        return name_of(self.capsule) != (self.name or b"")

    def scribble(self):
        """Change the numbers that a consumer must not read again."""
        for numbers in self.numbers:
            ffi.buffer(numbers)[:] = b"\x5a" * ffi.sizeof(numbers)


def told(words):
    """Return words as a line, with class names for objects without a text."""
    try:
        return " ".join(map(str, words))
    except BaseException:
        return " ".join(str(word) if isinstance(word, str) else object.__repr__(word) for word in words)


class Case:
    """A generated case: its objects, and a record of the calls."""

    is_loud = False  # a single case: its facts are printed while it is generated

    def __init__(self, seed, number):
        self.rng = random.Random(seed * 1_000_000_007 + number)
        self.structs, self.raised, self.story = [], [], []
        self.is_steady = True  # returns the same answer each time
        self.must_fail = False  # a fault that every consumer detects
        self.must_pass = False  # valid, and the target "dlx" accepts it
        self.expected = None  # the expected (dtype triple, shape, bytes)
        self.readonly = False
        self.is_copied = False  # the producer reports a copy
        self.calls = collections.Counter()
        self.users_capsules = []  # raw capsules: an error leaves their names unchanged
        self.sources = []  # generated objects, released at the end

    def __deepcopy__(self, memo):
        return self  # dlx copies containers of unknown storage deeply

    def tell(self, *words):
        """Record a generated fact, for the report of a failure."""
        self.story.append(words)
        if self.is_loud:
            print("   ", told(words), flush=True)

    def fail(self, make):
        """Raise a planted exception, and record it."""
        error = make()
        self.raised.append(error)
        raise error

    def chance(self, share):
        """Return True in this share of cases."""
        return self.rng.random() < share

    def new(self, spec):
        """Return a fresh struct."""
        struct = Struct(spec)
        self.structs.append(struct)
        return struct


# ---- tensors ---------------------------------------------------------------------------------------------------------

NAMES = (
    *(
        "float32",
        "float32",
        "float64",
        "int64",
        "uint8",
        "bool",
        "int8",
        "int16",
        "int32",
        "uint16",
        "uint32",
        "uint64",
    ),
    *("float16", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "int4", "uint2", "float4_e2m1fnx2"),
)
TRIPLES = {name: tuple(dlx.DType(name)) for name in NAMES}
COMMON = frozenset(NAMES[:12]) | {"float16", "complex64", "complex128"}  # dtypes that numpy has
SHAPES = ((), (1,), (3,), (7,), (2, 3), (4, 1), (2, 2, 2), (0,), (3, 0, 2), (1, 1, 1, 1, 1), (5, 4))


def row_major(shape):
    """Return row-major strides in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


class Spec:
    """The fields of a managed tensor: valid at first, then `lies` may change them."""

    def __init__(self, rng):
        self.dtype_name = rng.choice(NAMES)
        self.dtype = TRIPLES[self.dtype_name]
        self.shape = rng.choice(SHAPES)
        self.ndim = len(self.shape)
        self.strides = row_major(self.shape)
        self.flags = rng.choice((0, 0, 0, READ_ONLY))
        kind = rng.random()
        if kind < 0.15:
            self.strides = None
        elif kind < 0.4 and self.dtype[1] * self.dtype[2] % 8 == 0:
            self.strides = tuple(rng.choice((-3, -2, -1, 0, 1, 2, 5, 100)) for _ in self.shape)
        self.legacy = rng.random() < 0.3
        if self.legacy:
            self.flags = 0
        self.device, self.version = (1, 0), (1, rng.choice((0, 1, 3, 77)))
        self.offset = rng.choice((0, 0, 0, 8, 64, 1))
        self.data = place(rng, self.dtype_name) + rng.choice((0, 0, 0, 0, 8, 4, 1))
        self.deleter = rng.random() < 0.95
        self.name = b"dltensor" if self.legacy else b"dltensor_versioned"
        self.told = []
        self.is_fatal = False  # no consumer may accept it
        self.is_odd = False  # its values cannot be compared, or some targets may refuse it

    def expected(self):
        """Return the expected content of a result, or None if it is unknown."""
        bits = self.dtype[1] * self.dtype[2]
        if self.is_fatal or self.is_odd or (bits % 8 and bits > 8) or self.device[0] not in HOST_READABLE:
            return None
        dtype = dlx.DType(self.dtype)
        padded = bool(self.flags & PADDED)
        held = elements(self.data + self.offset, self.shape, self.strides, dtype, padded=padded)
        return self.dtype, self.shape, held

    def __repr__(self):
        skipped = ("is_odd", "dtype_name")
        return " ".join(f"{name}={value!r}" for name, value in vars(self).items() if name not in skipped)


def _no_memory(rng, spec):
    spec.data = 0
    spec.is_fatal = 0 not in spec.shape
    spec.offset = rng.choice((0, spec.offset))


def _bad_extent(rng, spec):
    if not spec.shape:
        return
    at = rng.randrange(len(spec.shape))
    spec.shape = (*spec.shape[:at], rng.choice((-1, -7, -(1 << 63), 1 << 62, (1 << 63) - 1)), *spec.shape[at + 1 :])
    spec.is_fatal = any(extent < 0 for extent in spec.shape) or 0 not in spec.shape
    if not spec.is_fatal:
        spec.is_odd = True


def _bad_strides(rng, spec):
    steps = tuple(rng.choice((1 << 62, -(1 << 62), (1 << 63) - 1, -(1 << 63))) for _ in spec.shape)
    spec.strides = steps
    # A dimension of one element is never stepped over, but for the stride that has no magnitude.
    spec.is_fatal = 0 not in spec.shape and any(extent > 1 for extent in spec.shape)
    spec.is_odd = not spec.is_fatal


def _bad_rank(rng, spec):
    spec.ndim = rng.choice((-1, -(1 << 31), 129, 1000, (1 << 31) - 1))
    spec.is_fatal = True


def _high_rank(rng, spec):
    spec.ndim = rng.choice((33, 64, 65, 127, 128))
    spec.shape, spec.strides = (1,) * spec.ndim, None


def _no_shape(rng, spec):
    spec.is_fatal = spec.is_fatal or spec.ndim > 0
    spec.shape = None if spec.ndim > 0 else spec.shape


def _bad_dtype(rng, spec):
    code, bits, lanes = spec.dtype
    kind = rng.randrange(5)
    if kind == 0:
        spec.dtype, spec.is_fatal = (code, 0, lanes), True
    elif kind == 1:
        spec.dtype, spec.is_fatal = (code, bits, 0), True
    elif kind == 2:
        spec.dtype = (rng.choice((3, 7, 18, 99, 128, 255)), bits, lanes)
    elif kind == 3:
        spec.dtype = (code, rng.choice((1, 3, 7, 12, 24, 80, 128, 255)), rng.choice((1, 1, 2, 3)))
    else:
        spec.dtype = (code, bits, rng.choice((2, 4, 16, 1000)))
    spec.is_odd = True


def _bad_version(rng, spec):
    if not spec.legacy:
        spec.version, spec.is_fatal = rng.choice(((0, 0), (0, 8), (2, 0), (99, 1), ((1 << 32) - 1, 0))), True


def _flags(rng, spec):
    if not spec.legacy:
        spec.flags |= rng.choice((IS_COPIED, PADDED, 8, 1 << 40, (1 << 64) - 8))
        if spec.flags & ~7 and spec.dtype[1] * spec.dtype[2] % 8:
            spec.is_fatal = True
        if spec.flags & PADDED and spec.strides is None and spec.dtype[1] * spec.dtype[2] % 8:
            spec.strides = row_major(spec.shape)


def _device(rng, spec):
    spec.device = rng.choice(((2, 0), (3, 0), (4, 1), (7, 0), (8, 0), (10, 0), (11, 0), (13, 0), (14, 2), (17, 0),
                              (0, 0), (-1, 0), (99, 0), (1, 5), (1, -3), (2, -1), (2, 99)))  # fmt: skip


def _offset(rng, spec):
    if spec.device[0] in HOST_READABLE:
        spec.offset, spec.is_fatal = rng.choice((1 << 57, 1 << 62, 1 << 63, (1 << 64) - 4096)), True


def _name_of_capsule(rng, spec):
    names = (
        b"used_dltensor",
        b"used_dltensor_versioned",
        b"dltensor_",
        b"DLTENSOR",
        b"",
        None,
        b"arrow_array",
        b"x\xff",
    )
    spec.name, spec.is_fatal = rng.choice(names), True


def _other_name(rng, spec):
    """Put a struct of one generation into a capsule of the other: flags 0 are read as a shape pointer."""
    if not spec.flags:
        spec.name = b"dltensor_versioned" if spec.legacy else b"dltensor"
        spec.is_fatal = True


LIES = (
    *(_no_memory, _bad_extent, _bad_strides, _bad_rank, _high_rank, _no_shape, _bad_dtype, _bad_dtype, _bad_version),
    *(_flags, _flags, _device, _device, _offset, _name_of_capsule, _other_name),
)


def spec_of(case, honest=0.45):
    """Return the fields of a tensor, valid in this share of cases."""
    rng, spec = case.rng, Spec(case.rng)
    if not case.chance(honest):
        lie = rng.choice(LIES)
        lie(rng, spec)
        spec.told.append(lie.__name__)
    case.tell("tensor", spec)
    return spec


def account(case, spec):
    """Record the expected behaviour of a consumer."""
    case.must_fail = spec.is_fatal
    case.expected = spec.expected()
    case.readonly, case.is_copied = bool(spec.flags & READ_ONLY), bool(spec.flags & IS_COPIED)
    case.must_pass = not spec.told
