"""Randomly generated producers that break the protocol in every detectable way: the cases of `producers.fuzz`."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import pickle
import struct
import sys
import types
from math import prod

import dlx
from dlx._core.extension import ffi
from support.producers.objects import Arrow, Pair, Trap, hostile_class, junk
from support.producers.tensors import COMMON, EXCEPTIONS, SHAPES, TRIPLES, account, elements, place, spec_of

try:
    import _testbuffer
except ImportError:  # a Python without its test modules
    _testbuffer = None

# ---- raw capsules and producers --------------------------------------------------------------------------------------


def capsule(case):
    """Return a raw capsule."""
    spec = spec_of(case)
    account(case, spec)
    struct = case.new(spec)
    case.users_capsules.append(struct)
    return struct.capsule


class Producer:
    """An object with ``__dlpack__``; its answers are in the instance."""

    def __init__(self, case, answers, devices, said=None):
        self._case, self._answers, self._devices, self._said = case, answers, devices, said

    def _give(self, options):
        case = self._case
        n = case.calls["__dlpack__"]
        case.calls["__dlpack__"] += 1
        return self._answers[min(n, len(self._answers) - 1)](options)

    def _where(self):
        n = self._case.calls["__dlpack_device__"]
        self._case.calls["__dlpack_device__"] += 1
        return self._devices[min(n, len(self._devices) - 1)]()


class Unreadable:
    """A descriptor whose function has an unreadable signature."""

    def __get__(self, obj, kind=None):
        return Method(obj)


class Method:
    """The function of the descriptor above, which accepts only ``stream``."""

    __signature__ = "none"

    def __init__(self, obj):
        self.obj = obj

    def __call__(self, **options):
        if set(options) - {"stream"}:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.obj._give(options)


async def _asynchronous(self, **options):
    return self._give(options)


def _generator(self, **options):
    yield self._give(options)


SIGNATURES = {
    "full": lambda self, *, stream=None, max_version=None, dl_device=None, copy=None: self._give({"m": max_version}),
    "versioned": lambda self, *, stream=None, max_version=None: self._give({"m": max_version}),
    "stream": lambda self, stream=None: self._give({}),
    "bare": lambda self: self._give({}),
    "keywords": lambda self, **options: self._give(options),
    "must": lambda self, *, stream, max_version, dl_device, copy: self._give({}),
    "positions": lambda self, *args: self._give({}),
    "unreadable": Unreadable(),
    # invalid ones
    "asks": lambda self, wanted: self._give({}),
    "none": None,
    "number": 3,
    "type": int,
    "static": staticmethod(lambda **options: None),
    "asynchronous": _asynchronous,
    "generator": _generator,
}
RIGHT = 8


def _plain_device(self):
    return self._where()


DEVICES = {
    "method": _plain_device,
    "missing": None,
    "keyword": lambda self, wanted: self._where(),
    "property": property(_plain_device),
    "number": 5,
}


def _said(self):
    case = self._case
    return self._said() if callable(self._said) else case.fail(ValueError)


_classes = {}


def producer_class(case):
    """Return a class of producers, and whether its signature is valid; most classes are known, a few are new."""
    rng = case.rng
    names = list(SIGNATURES)
    sign = rng.choice(names[:RIGHT] if case.chance(0.9) else names[RIGHT:])
    device = "method" if case.chance(0.85) else rng.choice(list(DEVICES))
    dtype = case.chance(0.1)
    key = sign, device, dtype
    if key not in _classes or case.chance(0.02):
        body = {"__dlpack__": SIGNATURES[sign]}
        if DEVICES[device] is not None:
            body["__dlpack_device__"] = DEVICES[device]
        if dtype:
            body["dtype"] = property(_said)
        made = type("Producer", (Producer,), body)
        if key in _classes:
            return made, key
        _classes[key] = made
    return _classes[key], key


def answer(case, spec):
    """Return a function that returns the answer of ``__dlpack__``, and whether that is a fresh capsule."""
    rng = case.rng
    kind = rng.random()
    if kind < 0.75:
        return (lambda options: case.new(spec).capsule), True
    if kind < 0.87:
        make = rng.choice(EXCEPTIONS)
        case.tell("raises", make())
        return (lambda options: case.fail(make)), False
    if kind < 0.9:
        same = case.new(spec)
        case.is_steady = False
        return (lambda options: same.capsule), False
    if kind < 0.93:
        case.is_steady = False
        side = rng.choice((
            lambda: gc.collect(0), lambda: dlx.convert(bytearray(8), to="dlx"),
            lambda: case.sources and dlx.describe(bytes(3)), lambda: sys.setrecursionlimit(sys.getrecursionlimit()),
            lambda: [each.clear() for each in case.sources if type(each) in (list, dict)],
            lambda: [each.append(None) for each in case.sources if type(each) is list],
        ))  # fmt: skip
        return (lambda options: (side(), case.new(spec).capsule)[1]), False
    given = junk(case)
    case.tell("answers", type(given))
    return (lambda options: given), False


def producer(case):
    """Return an object with ``__dlpack__`` and its related attributes."""
    rng = case.rng
    kind, key = producer_class(case)
    spec = spec_of(case)
    account(case, spec)
    give, fresh = answer(case, spec)
    answers = [give]
    if case.chance(0.06):
        other, _ = answer(case, spec_of(case))
        answers.append(other)
        case.is_steady = False
    place_said = spec.device
    devices = [lambda: place_said]
    honest = True
    if case.chance(0.12):
        honest = False
        how = rng.randrange(3)
        if how == 0:
            given = junk(case)
            case.tell("device", type(given))
            devices = [lambda: given]
        elif how == 1:
            make = rng.choice(EXCEPTIONS)
            case.tell("device raises", make())
            devices = [lambda: case.fail(make)]
        else:
            lie = rng.choice(((2, 0), (1, 0), (3, 0), (8, 0), (99, 0), (2, 1)))
            case.tell("device says", lie)
            devices = [lambda: lie]
    said = None
    if key[2]:
        thing = rng.choice(("float32", "object", "<dtype: 'string'>", 3, None, float, Trap))
        said = (lambda: Trap(case)) if thing is Trap else (lambda: thing) if case.chance(0.8) else None
    case.tell("producer", key)
    usual = fresh and honest and len(answers) == 1 and key[0] in list(SIGNATURES)[:RIGHT] and not key[2]
    usual = usual and key[1] in ("method", "missing")
    case.must_pass = case.must_pass and usual
    case.must_fail = case.must_fail and fresh and len(answers) == 1
    if key[0] == "unreadable":
        case.is_steady = False
        case.calls["allowed"] = 1  # the first call may be repeated without reaching the producer
    if not fresh or len(answers) > 1:
        case.expected = None
    if key[0] in ("asynchronous", "generator"):
        case.is_steady = False
    obj = kind(case, answers, devices, said)
    if case.chance(0.02):
        obj.__dlpack__ = lambda **options: case.fail(ValueError)  # on the instance
        case.must_pass, case.expected = False, None
    return obj


# ---- array interfaces ------------------------------------------------------------------------------------------------

TYPESTR = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "uint8": "|u1", "bool": "|b1", "int16": "<i2",
           "uint32": "<u4", "complex64": "<c8", "float16": "<f2"}  # fmt: skip


class HostileDict(dict):
    """A dict that raises, or returns wrong values, when it is read."""

    case = None

    def get(self, name, default=None):
        self.case.fail(KeyError)

    __getitem__ = get


class Interface:
    """An object whose class has an array interface."""

    def __init__(self, case, give):
        self._case, self._give = case, give

    def _ask(self):
        self._case.calls["interface"] += 1
        return self._give()


Hosted = type("Hosted", (Interface,), {"__array_interface__": property(Interface._ask)})
OnDevice = type("OnDevice", (Interface,), {"__cuda_array_interface__": property(Interface._ask)})
BothInterfaces = type("BothInterfaces", (Hosted, OnDevice), {})


def interface_dict(case):
    """Return an array interface, valid or with one or two wrong keys, and the expected result."""
    rng = case.rng
    name = rng.choice(list(TYPESTR))
    dtype, shape = TRIPLES[name], rng.choice(SHAPES)
    size, address, readonly = dtype[1] // 8, place(rng, name) + rng.choice((0, 0, 0, 1)), case.chance(0.3)
    interface = {"version": 3, "shape": shape, "typestr": TYPESTR[name], "data": (address, readonly)}
    strides = None
    if case.chance(0.4):
        strides = tuple(rng.choice((-2, -1, 0, 1, 3)) for _ in shape)
        interface["strides"] = tuple(step * size for step in strides)
    case.readonly, case.must_pass = readonly, True
    case.expected = dtype, shape, elements(address, shape, strides, dlx.DType(dtype))
    if case.chance(0.1):  # a buffer instead of an address
        held = bytes(ffi.buffer(ffi.cast("char *", address), prod(shape) * size))
        interface["data"] = rng.choice((bytes, bytearray, memoryview))(held)
        interface.pop("strides", None)
        case.readonly = type(interface["data"]) is not bytearray
        case.expected = dtype, shape, held
        case.is_own_memory = True
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        key = rng.choice(("shape", "typestr", "data", "strides", "version", "mask", "offset", "descr", "stream"))
        choices = {
            "shape": (None, (), (-1,), (1 << 62, 8), ((1 << 63) - 1,), (1 << 64,), (10**30,), "3", 5, ("2",), (2.5,),
                      (None,), ((1,),), [2], (True,), (float("nan"),), (Trap(case),), Pair((1, 2))),
            "typestr": (None, "", "<", "<f", "<f3", ">f4", "<x4", "|V8", "|O8", "|S3", "<U2", "<M8[s]", b"<f4", 4,
                        "<f4 ", "\x00f4", "<f" + "9" * 50, "<f²", "<i16", "|b2", "=f4", Trap(case)),
            "data": (None, (0, False), (-8, False), (1 << 64, False), (1 << 63, False), (), (1,), "text", b"", b"12",
                     5, (None, None), ("x", 0), bytearray(3), (1.5, 0), Trap(case), Pair((1, 2))),
            "strides": ((), (1,) * 9, (3,), (1 << 62,) * len(shape), (-(1 << 63),) * len(shape), (1 << 70,), "ab", 5,
                        (None,), (2.0,) * len(shape), Trap(case), Pair((1, 2))),
            "version": (0, 2, "x", None, 99), "mask": (3, b"", Trap(case), None), "descr": (None, 3, [("", "<f4")]),
            "offset": (-1, 1 << 62, "x", None, 0), "stream": (0, -5, "x", 7, None),
        }[key]  # fmt: skip
        value = rng.choice(choices)
        case.must_pass = False
        if key in ("shape", "data", "strides", "typestr", "offset"):
            case.expected = None
        if case.chance(0.15):
            interface.pop(key, None)
            case.tell("without", key)
        else:
            interface[key] = value
            case.tell("with", key, value if type(value) in (tuple, int, str, bytes) else type(value))
    # The rest must be in valid memory, even with dropped strides and shapes.
    return interface


def interface(case):
    """Return an object with an array interface, or a CUDA array interface."""
    rng = case.rng
    found = interface_dict(case)
    give = lambda: found  # noqa: E731
    how = rng.random()
    if how < 0.06:
        given = junk(case)
        case.tell("interface is", type(given))
        case.must_pass, case.expected, give = False, None, lambda: given
    elif how < 0.12:
        make = rng.choice(EXCEPTIONS)
        case.tell("interface raises", make())
        case.must_pass, case.expected, give = False, None, lambda: case.fail(make)
    elif how < 0.15:
        hostile = HostileDict(found)
        hostile.case, case.must_pass, case.expected = case, False, None
        give = lambda: hostile  # noqa: E731
    kind = rng.choice((Hosted, Hosted, Hosted, OnDevice, BothInterfaces))
    if kind is not Hosted:
        case.must_pass, case.expected = False, None
    case.tell(kind.__name__, found)
    if how > 0.95:
        holder = types.SimpleNamespace(__array_interface__=found)  # a container, and an array by its attribute
        case.must_pass, case.expected = False, None
        return holder
    return kind(case, give)


# ---- buffers ---------------------------------------------------------------------------------------------------------


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_double))


class Either(ctypes.Union):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_double))


LETTERS = {"b": "int8", "B": "uint8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32", "q": "int64",
           "Q": "uint64", "f": "float32", "d": "float64", "?": "bool"}  # fmt: skip
FORMATS = (*LETTERS, "c", "l", "L", "n", "N", "@i", "=i", "<h", ">h", "!d", "<d", "3s", "ii", "i2x", "e", "P", "x",
           "5i", "?B", "<q", ">b", "=f", "T{i:x:}")  # fmt: skip


def _cast(case):
    letter = case.rng.choice(list(LETTERS))
    size = dlx.DType(LETTERS[letter]).bits // 8
    held = bytes(case.rng.choice((0, 1)) if letter == "?" else case.rng.randrange(256) for _ in range(6 * size))
    kept = case.rng.choice((bytes, bytearray))(held)
    case.expected, case.must_pass = (TRIPLES[LETTERS[letter]], (6,), held), True
    case.readonly, case.is_own_memory = type(kept) is bytes, True
    view = memoryview(kept).cast(letter)
    if case.chance(0.3):
        case.expected = (case.expected[0], (2, 3), held)
        view = memoryview(kept).cast(letter, (2, 3))
    elif case.chance(0.3):
        view = view[::-2]
        case.expected = (case.expected[0], (3,), view.tobytes())
    return view


def _made_buffer(case):
    if _testbuffer is None:
        return bytes(3)
    rng = case.rng
    letters = rng.choice(FORMATS)
    shape = rng.choice(((), (1,), (4,), (2, 3), (3, 0), (2, 2, 2)))
    try:
        item = struct.unpack(letters, bytes(struct.calcsize(letters)))
        values = [item if len(item) != 1 else item[0]] * prod(shape)
        flags = _testbuffer.ND_WRITABLE if case.chance(0.5) else 0
        if case.chance(0.15) and len(shape) == 2:
            flags |= _testbuffer.ND_PIL
        if case.chance(0.2):
            flags |= _testbuffer.ND_FORTRAN
        if case.chance(0.2):
            flags |= _testbuffer.ND_REDIRECT
        return _testbuffer.ndarray(values, shape=list(shape), format=letters, flags=flags)
    except (ValueError, TypeError, struct.error, NotImplementedError, IndexError):
        return bytes(3)


def _odd_numpy(case):
    np = sys.modules.get("numpy")
    if np is None:
        return b"abc"
    dtype = case.rng.choice(("O", "S3", "U2", "V5", "g", "G", ">i4", "<f8", [("x", "i4")], "?", "F"))
    return memoryview(np.zeros(case.rng.choice(((3,), (), (2, 2))), dtype))


def _released(case):
    view = memoryview(bytearray(8))
    view.release()
    case.must_fail = True
    return view


def buffer(case):
    """Return an object with the buffer protocol."""
    rng = case.rng
    case.is_own_memory = True
    return rng.choice((
        _cast, _cast, _cast, _made_buffer, _made_buffer, _made_buffer, _odd_numpy, _released, lambda c: bytes(5),
        lambda c: bytearray(4), lambda c: b"", lambda c: array.array(rng.choice("bBhHiIlLqQfd"), [1, 2]),
        lambda c: array.array("u", "ab"), lambda c: (ctypes.c_double * 3)(1, 2), lambda c: ctypes.c_int(4),
        lambda c: (Point * 2)(), lambda c: Point(), lambda c: Either(), lambda c: (ctypes.c_char_p * 2)(),
        lambda c: (ctypes.c_int.__ctype_be__ * 3)(1, 2, 3), lambda c: ((ctypes.c_int16 * 2) * 3)(),
        lambda c: (ctypes.c_bool * 3)(), lambda c: (ctypes.c_wchar * 3)(), lambda c: (ctypes.c_int * 0)(),
        lambda c: mmap.mmap(-1, 64), lambda c: pickle.PickleBuffer(bytearray(4)),
    ))(case)  # fmt: skip


# ---- hostile objects -------------------------------------------------------------------------------------------------


class DLPackTrap(Trap):
    """A trap with ``__dlpack__``."""

    def __dlpack__(self, **options):
        own = object.__getattribute__(self, "__dict__")
        own["case"].calls["__dlpack__"] += 1
        return own["case"].new(own["spec"]).capsule

    def __dlpack_device__(self):
        return (1, 0)


class InterfaceTrap(Trap):
    """A trap with an array interface."""

    @property
    def __array_interface__(self):
        own = object.__getattribute__(self, "__dict__")
        case = own["case"]
        found = interface_dict(case)
        case.expected, case.must_pass = None, False
        return found


def hostile(case):
    """Return an object that is not an array, or one whose attributes fail."""
    rng = case.rng
    kind = rng.randrange(7)
    case.tell("hostile", kind)
    if kind == 0:
        return Trap(case)
    if kind == 1:
        trap = DLPackTrap(case)
        object.__getattribute__(trap, "__dict__")["spec"] = spec_of(case)
        return trap
    if kind == 2:
        return InterfaceTrap(case)
    if kind == 3:
        case.must_fail = True
        return Arrow(case)
    if kind == 4:
        return hostile_class(case)()
    if kind == 5:
        return hostile_class(case)
    case.is_steady = False
    return junk(case)


# ---- arrays of frameworks --------------------------------------------------------------------------------------------


def _numpy_classes(np):
    class Fails(np.ndarray):
        def __array_finalize__(self, other):
            if getattr(type(self), "armed", None) is not None:
                type(self).armed.fail(ValueError)

    class Attributes(np.ndarray):
        shape = property(lambda self: 1 / 0)
        dtype = property(lambda self: 1 / 0)
        strides = flags = property(lambda self: 1 / 0)

    class Exports(np.ndarray):
        def __dlpack__(self, **options):
            raise ValueError("no export")

        def __dlpack_device__(self):
            return "nowhere"

        __array_interface__ = property(lambda self: {"version": "x"})

    class Functions(np.ndarray):
        def __array_function__(self, *arguments):
            raise ValueError("no function")

        def __array_ufunc__(self, *arguments, **options):
            raise ValueError("no ufunc")

        def __eq__(self, other):
            raise ValueError("no eq")

        __hash__ = None

        def copy(self, *arguments, **options):
            raise ValueError("no copy")

        __getitem__ = view = astype = __bool__ = __len__ = __iter__ = copy

    return Fails, Attributes, Exports, Functions


def numpy_array(case):
    """Return a numpy array, or one of a hostile subclass."""
    np, rng = sys.modules["numpy"], case.rng
    name = rng.choice(sorted(COMMON))
    shape = rng.choice(SHAPES)
    kept = np.arange(prod(shape)).astype(name).reshape(shape)
    case.expected, case.must_pass = (TRIPLES[name], shape, kept.tobytes()), True
    case.is_own_memory = True
    how = rng.random()
    if how < 0.3:
        return kept
    if how < 0.5:
        kind = rng.choice(_numpy)
        case.must_pass = case.is_steady = False  # a plan does not call the overridden methods
        case.tell("numpy subclass", kind.__name__)
        return kept.view(kind)
    case.must_pass = False
    made = rng.choice((
        lambda: np.ma.masked_array(kept, mask=False), lambda: kept.astype("O"), lambda: np.float32(3), lambda: kept.T,
        lambda: kept.astype(kept.dtype.newbyteorder(">")), lambda: np.zeros(3, "S3"), lambda: np.zeros(3, "M8[s]"),
        lambda: np.zeros(3, [("x", "i1"), ("y", "f8")])["y"], lambda: np.rec.array([(1, 2.0)]),
        lambda: np.matrix([[1.0]]), lambda: np.broadcast_to(np.float64(3), (3, 2)), lambda: np.zeros(3, "g"),
        lambda: np.zeros(3, "V4"), lambda: np.frombuffer(b"abcdefgh", "f8"), lambda: np.char.array(["a"]),
        lambda: np.str_("a"), lambda: np.void(b"ab"),
    ))()  # fmt: skip
    case.expected = None
    return made


def _torch_classes(torch):
    class Functions(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, kinds, args=(), kwargs=None):
            raise ValueError("no function")

    class Exports(torch.Tensor):
        def __dlpack__(self, *args, **options):
            raise ValueError("no export")

        def __dlpack_device__(self):
            return "nowhere"

    class Attributes(torch.Tensor):
        shape = dtype = device = layout = property(lambda self: 1 / 0)

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, held):
            return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

        def __init__(self, held):
            self.held = held

        @classmethod
        def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
            raise RuntimeError("no dispatch")

    return Functions, Exports, Attributes, Wrapper


def torch_tensor(case):
    """Return a torch tensor, or one of a hostile subclass."""
    torch, rng = sys.modules["torch"], case.rng
    shape = rng.choice(SHAPES)
    kept = torch.arange(
        prod(shape), dtype=getattr(torch, rng.choice(("float32", "int64", "uint8", "bfloat16")))
    ).reshape(shape)
    case.is_own_memory = True
    how = rng.random()
    if how < 0.4:
        name = str(kept.dtype)[6:]
        held = ctypes.string_at(kept.data_ptr(), kept.nbytes) if kept.nbytes else b""
        case.expected, case.must_pass = (TRIPLES[name], shape, held), True
        return kept
    if how < 0.7:
        kind = rng.choice(_torch)
        case.is_steady = False  # a plan does not call the overridden methods
        case.tell("torch subclass", kind.__name__)
        return kind(kept) if kind.__name__ == "Wrapper" else kept.as_subclass(kind)
    return rng.choice((
        lambda: kept.float().requires_grad_(), lambda: kept.cfloat().conj(), lambda: kept.cfloat().conj().imag,
        lambda: kept.to("meta"), lambda: kept.float().to_sparse() if kept.ndim else kept,
        lambda: torch._efficientzerotensor(3), lambda: kept.T if kept.ndim == 2 else kept,
        lambda: kept.expand(3, *shape), lambda: torch.nn.Parameter(kept.float()),
        lambda: torch.zeros(3, dtype=torch.complex32), lambda: torch.empty(0),
    ))()  # fmt: skip


_numpy = _torch = ()


def prepare(names):
    """Create the classes that need a framework; return the families of cases for the installed ones."""
    global _numpy, _torch
    families = [(capsule, 20), (producer, 40), (interface, 15), (buffer, 10), (hostile, 10)]
    if "numpy" in names:
        _numpy = _numpy_classes(sys.modules["numpy"])
        families.append((numpy_array, 6))
    if "torch" in names:
        _torch = _torch_classes(sys.modules["torch"])
        families.append((torch_tensor, 6))
    return [family for family, weight in families for _ in range(weight)]
