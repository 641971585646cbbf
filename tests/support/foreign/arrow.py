"""Producers of Arrow's PyCapsule interface in ctypes, valid and invalid, with counted releases."""

from __future__ import annotations

import array
import ctypes
import itertools
from collections import Counter

# Other libraries change the argtypes of `ctypes.pythonapi.PyCapsule_New`.
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Schema(ctypes.Structure):
    """ArrowSchema."""


class Array(ctypes.Structure):
    """ArrowArray."""


class DeviceArray(ctypes.Structure):
    """ArrowDeviceArray."""


class Stream(ctypes.Structure):
    """ArrowArrayStream."""


class DeviceStream(ctypes.Structure):
    """ArrowDeviceArrayStream."""


Schema._fields_ = [
    ("format", ctypes.c_char_p),
    ("name", ctypes.c_char_p),
    ("metadata", ctypes.c_char_p),
    ("flags", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("children", ctypes.POINTER(ctypes.POINTER(Schema))),
    ("dictionary", ctypes.POINTER(Schema)),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]
Array._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(Array))),
    ("dictionary", ctypes.POINTER(Array)),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]
DeviceArray._fields_ = [
    ("array", Array),
    ("device_id", ctypes.c_int64),
    ("device_type", ctypes.c_int32),
    ("sync_event", ctypes.c_void_p),
    ("reserved", ctypes.c_int64 * 3),
]
_GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_SAY = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
DeviceStream._fields_ = [
    ("device_type", ctypes.c_int32),
    ("get_schema", _GET),
    ("get_next", _GET),
    ("get_last_error", _SAY),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]
Stream._fields_ = [
    ("get_schema", _GET),
    ("get_next", _GET),
    ("get_last_error", _SAY),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]

alive: dict[int, object] = {}
"""Objects that the structs point to, by number, until they are released."""
released: Counter[str] = Counter()
"""How often schemas, arrays and streams were released."""
_numbers = itertools.count(1)


def _released(kind, structure):
    def release(address):
        made = structure.from_address(address)
        _, _, children = alive.pop(made.private_data, (None, None, None))
        if children is None:
            released["twice"] += 1
        for child in children or ():
            if child is not None and child.release:
                release(ctypes.addressof(child))
        released[kind] += 1
        made.release = None

    return _RELEASE(release)


_RELEASES = {each: _released(each.__name__.lower(), each) for each in (Schema, Array, Stream, DeviceStream)}
NO_RELEASE = object()


def _children(kind, children):
    pointers = (ctypes.POINTER(kind) * len(children))(
        *(ctypes.POINTER(kind)() if each is None else ctypes.pointer(each) for each in children)
    )
    return ctypes.cast(pointers, ctypes.POINTER(ctypes.POINTER(kind))), pointers


def _finish(made, keep, fields, children=()):
    """Set the fields of a test, and keep objects alive."""
    kind, number = type(made), next(_numbers)
    made.private_data, made.release = number, ctypes.cast(_RELEASES[kind], ctypes.c_void_p).value
    for name, value in fields.items():
        setattr(made, name, None if value is NO_RELEASE else value)
    alive[number] = (made, keep, children)
    return made


def schema(text, *children, name="", metadata=None, **fields):
    """Return an ArrowSchema; `fields` replace valid values."""
    made = Schema(format=text.encode(), name=name.encode(), n_children=len(children))
    keep = [children]
    if metadata is not None:
        packed = b"".join(
            len(part).to_bytes(4, "little") + part for pair in metadata.items() for part in pair
        )  # native byte order
        text = ctypes.create_string_buffer(len(metadata).to_bytes(4, "little") + packed)
        made.metadata, keep = ctypes.cast(text, ctypes.c_char_p), [*keep, text]
    if children:
        made.children, pointers = _children(Schema, children)
        keep.append(pointers)
    return _finish(made, keep, fields, children)


def arrow_array(n, *buffers, children=(), **fields):
    """Return an ArrowArray of n values over buffers (None, addresses or objects); `fields` replace valid values."""
    addresses = [
        each if each is None or isinstance(each, int) else ctypes.addressof(ctypes.c_char.from_buffer(each))
        for each in buffers
    ]
    pointers = (ctypes.c_void_p * max(len(buffers), 1))(*addresses)
    made = Array(length=n, n_buffers=len(buffers), n_children=len(children))
    made.buffers = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
    keep = [pointers, buffers, children]
    if children:
        made.children, inner = _children(Array, children)
        keep.append(inner)
    return _finish(made, keep, fields, children)


def on_device(made, device_type, device_id=0, event=None):
    """Return an ArrowDeviceArray around an array."""
    return DeviceArray(array=made, device_id=device_id, device_type=device_type, sync_event=event)


def stream(kind, batches, *, fails=None, device=None, **fields):
    """Return an ArrowArrayStream; `fails` is its error instead of the batch after the last.

    With a device type it is an ArrowDeviceArrayStream of ArrowDeviceArrays.
    """
    empty = Array if device is None else DeviceArray
    left, said = list(batches), ctypes.create_string_buffer((fails or "").encode())

    def get_schema(_, out):
        ctypes.memmove(out, ctypes.byref(kind), ctypes.sizeof(kind))
        return 0

    def get_next(_, out):
        if not left and fails is not None:
            return 5
        found = left.pop(0) if left else empty()
        ctypes.memmove(out, ctypes.byref(found), ctypes.sizeof(found))
        return 0

    callbacks = _GET(get_schema), _GET(get_next), _SAY(lambda _: ctypes.addressof(said))
    made = Stream(*callbacks) if device is None else DeviceStream(device, *callbacks)
    return _finish(made, (callbacks, said, kind, batches), fields)


def capsule(made, name):
    """Return a capsule without a destructor, since tests count releases."""
    return _new(ctypes.addressof(made), name, None)


class Gives:
    """An object whose ``__arrow_c_array__`` returns a schema and an array; the second call returns nothing new."""

    names = (b"arrow_schema", b"arrow_array")

    def __init__(self, *made, names=None):
        self.made, self.names, self.asked = made, names or self.names, 0

    def __arrow_c_array__(self, requested_schema=None):
        self.asked += 1
        return tuple(capsule(each, name) for each, name in zip(self.made, self.names, strict=True))


class GivesDevice:
    """An object whose ``__arrow_c_device_array__`` returns a schema and an array."""

    def __init__(self, *made):
        self.made = made

    def __arrow_c_device_array__(self, requested_schema=None, **kwargs):
        return capsule(self.made[0], b"arrow_schema"), capsule(self.made[1], b"arrow_device_array")


class Streams:
    """An object whose ``__arrow_c_stream__`` returns a stream."""

    def __init__(self, made):
        self.made, self.asked = made, 0

    def __arrow_c_stream__(self, requested_schema=None):
        self.asked += 1
        return capsule(self.made, b"arrow_array_stream")


def numbers(*values, code="i"):
    """Return (format, buffer) of numbers."""
    return {"i": "i", "d": "g", "q": "l"}[code], array.array(code, values)


def column(*values, code="i", **fields):
    """Return an object with a column of numbers."""
    text, memory = numbers(*values, code=code)
    return Gives(schema(text), arrow_array(len(values), None, memory, **fields))


class GivesDeviceStream:
    """An object whose ``__arrow_c_device_stream__`` returns a stream."""

    def __init__(self, made):
        self.made = made

    def __arrow_c_device_stream__(self, requested_schema=None, **kwargs):
        return capsule(self.made, b"arrow_device_array_stream")


def shared_types(levels, width=2):
    """Return a structure type whose levels each contain the next one `width` times."""
    inner = schema("i", name="x")
    for _ in range(levels):
        inner = schema("+s", *[inner] * width, name="x")
    return inner


class Pair:
    """An object that returns existing capsules."""

    def __init__(self, pair):
        self._pair = pair

    def __arrow_c_array__(self, requested_schema=None):
        return self._pair
