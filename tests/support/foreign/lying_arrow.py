"""Arrow's structs with one or two wrong fields, thousands of them, for a separate process.

Every consumer trusts the memory behind a pointer. So pointers are NULL or valid, and bitmaps and buffers are as long as
any invalid length: lengths are small, or so large that they must be refused before anything is read.
"""

import ctypes
import gc
import random
from collections import Counter

import dlx
from dlx import errors
from dlx._core import native
from support.foreign import arrow as made
from support.foreign.arrow import Gives, GivesDevice, Streams, arrow_array, on_device, schema, stream

HUGE = (1 << 63) - 1
NUMBERS = (-HUGE - 1, -2, -1, 0, 1, 2, 3, 1 << 61, 1 << 62, HUGE)
TEXTS = (None, b"", b"+", b"+w", b"+w:", b"+w:-1", b"+w:0", b"+w:3", b"+w:99999999999999999999", b"+s", b"+l", b"+r",
         b"u", b"b", b"i", b"ii", b"\xff\xfe", b"w:7", b"d:", b"ts", b"tsn:", b"+ud:0,1", b"x" * 1000)  # fmt: skip
NUMERIC = ("length", "offset", "null_count", "n_buffers", "n_children")
POINTERS = ("buffers", "children", "dictionary", "release")
BLOCK = ctypes.create_string_buffer(4096)


def tree(choose):
    """Return (schemas, arrays) of a column, of lists, or of a table of both, from the outermost."""
    plain = lambda name="": (schema("i", name=name), arrow_array(3, None, BLOCK))  # noqa: E731
    inner_type, inner = schema("i", name="item"), arrow_array(6, None, BLOCK)
    lists = schema("+w:2", inner_type, name="y"), arrow_array(3, None, children=[inner])
    kind = choose.randrange(3)
    if kind == 0:
        each = plain()
        return [each[0]], [each[1]]
    if kind == 1:
        return [lists[0], inner_type], [lists[1], inner]
    x = plain("x")
    table = schema("+s", x[0], lists[0]), arrow_array(3, None, children=[x[1], lists[1]])
    return [table[0], x[0], lists[0], inner_type], [table[1], x[1], lists[1], inner]


def lie(choose, schemas, arrays):
    """Set one field to a wrong value."""
    if choose.random() < 0.35:
        victim = choose.choice(schemas)
        name = choose.choice(("format", "name", "children", "dictionary", "n_children", "release"))
        if name == "n_children":  # a greater number would be read: only a smaller one is tested
            victim.n_children = choose.choice((-HUGE, -1, 0, min(1, victim.n_children)))
        elif name in ("format", "name"):
            setattr(victim, name, choose.choice(TEXTS))
        else:
            setattr(victim, name, None if name != "dictionary" else ctypes.pointer(schemas[0]))
        return
    victim = choose.choice(arrays)
    if choose.random() < 0.7:
        name = choose.choice(NUMERIC)
        setattr(victim, name, choose.choice(NUMBERS))
    else:
        name = choose.choice(POINTERS)
        setattr(victim, name, ctypes.pointer(victim) if name == "dictionary" else None)


def run(count=4000, seed=19):
    """Convert and plan invalid structs; print the number of double releases."""
    choose, refused, right = random.Random(seed), 0, 0
    made._RELEASES.clear()
    for kind in (made.Schema, made.Array, made.Stream):
        made._RELEASES[kind] = made._released(kind.__name__.lower(), kind)
    for _ in range(count):
        schemas, arrays = tree(choose)
        for _ in range(choose.choice((1, 1, 2))):
            lie(choose, schemas, arrays)
        give = choose.randrange(4)
        if give == 0:
            obj = Streams(stream(schemas[0], arrays[:1]))
        elif give == 1:
            obj = GivesDevice(
                schemas[0], on_device(arrays[0], choose.choice((1, 2, 3, 99)), choose.choice((0, -1, HUGE)))
            )
        else:
            obj = Gives(schemas[0], arrays[0])
        try:
            if give == 3:
                dlx.plan(obj, to="numpy")
            else:
                result = dlx.convert(obj, to="dlx")
                for each in result.values() if isinstance(result, dict) else [result]:
                    if each.is_host and each.nbytes < 4096:
                        each.tobytes()
            right += 1
        except errors.DlxError:
            refused += 1
        result = obj = each = None
    gc.collect()
    assert refused > count // 3 and right > count // 20, (refused, right)
    assert native.live() == 0
    print(f"refused: {refused}, right: {right}, released twice: {made.released['twice']}")


# ---- streams ---------------------------------------------------------------------------------------------------------


class LyingStream:
    """A stream of two batches of two numbers, which calls `lie(function, number of the call, struct, out)` first.

    Its return value is the result of the call, which does nothing else; None: the call is valid.
    """

    def __init__(self, lie, device):
        self.released, self.lie, self.device, self.given = 0, lie, device, Counter()
        self.late = []  # calls of a released stream
        kind = made.Stream if device is None else made.DeviceStream
        whole = made.Array if device is None else made.DeviceArray
        self.calls = dict.fromkeys(("get_schema", "get_next", "get_last_error"), 0)
        self.text = ctypes.create_string_buffer(b"no more disk")

        def step(name, right):
            def function(address, *out):
                struct = kind.from_address(address)
                if self.released or not struct.release:
                    self.late.append(name)  # ctypes swallows exceptions
                self.calls[name] += 1
                answer = self.lie(name, self.calls[name], struct, *out)
                return right(*out) if answer is None else answer

            return function

        def get_schema(out):
            ctypes.memmove(out, ctypes.byref(schema("i")), ctypes.sizeof(made.Schema))
            self.given["schema"] += 1
            return 0

        def get_next(out):
            ctypes.memset(out, 0, ctypes.sizeof(whole))
            if self.calls["get_next"] <= 2:
                batch = arrow_array(2, None, BLOCK)
                batch = batch if device is None else on_device(batch, device)
                ctypes.memmove(out, ctypes.byref(batch), ctypes.sizeof(whole))
                self.given["array"] += 1
            return 0

        def release(address):
            self.released += 1
            kind.from_address(address).release = None

        self.keep = (
            made._GET(step("get_schema", get_schema)),
            made._GET(step("get_next", get_next)),
            made._SAY(step("get_last_error", lambda: ctypes.addressof(self.text))),
            made._RELEASE(release),
        )
        self.made = kind() if device is None else kind(device_type=device)
        self.made.get_schema, self.made.get_next, self.made.get_last_error = self.keep[:3]
        self.made.release = ctypes.cast(self.keep[3], ctypes.c_void_p).value

    def object(self):
        """Return an object with this stream."""
        return Streams(self.made) if self.device is None else made.GivesDeviceStream(self.made)


def _clears(*names, answer=None):
    def lie(struct, *out):
        for name in names:
            setattr(struct, name, type(getattr(struct, name))(0) if name.startswith("get") else None)
        return answer

    return lie


def _writes(size, value, answer=0):
    def lie(struct, out):
        ctypes.memset(out, value, size)
        return answer

    return lie


def _unreleased(struct, out):
    """Write a type that is already released."""
    ctypes.memmove(out, ctypes.byref(made.Schema(format=b"i")), ctypes.sizeof(made.Schema))
    return 0


TEXTS_SAID = {"NULL": None, "none": b"", "no UTF-8": b"\xff\xfe%s%n", "long": b"x" * 5000}


def _says(text):
    kept = None if text is None else ctypes.create_string_buffer(text)
    return lambda struct: 0 if kept is None else ctypes.addressof(kept)


FUNCTIONS = ("get_schema", "get_next", "get_last_error")
STREAM_LIES = {}
"""{name: ({(function, number of the call, or 0 for all): lie}, whether the values are right after all)}."""
for function, nth in (("get_schema", 1), ("get_next", 1), ("get_next", 2), ("get_next", 3)):
    at = f"{function} {nth}"
    for answer in (None, 5):  # it continues, or fails
        how = "fails" if answer else "goes on"
        is_end = nth == 3 and not answer
        STREAM_LIES[f"{at} releases, {how}"] = {(function, nth): _clears("release", answer=answer)}, is_end
        for name in FUNCTIONS:
            is_right = not answer and (is_end or name != "get_next")
            STREAM_LIES[f"{at} clears {name}, {how}"] = {(function, nth): _clears(name, answer=answer)}, is_right
        everything = _clears(*FUNCTIONS, "release", "private_data", answer=answer)
        STREAM_LIES[f"{at} clears all, {how}"] = {(function, nth): everything}, is_end
    for said, text in TEXTS_SAID.items():
        fails = {(function, nth): lambda struct, out: -1, ("get_last_error", 0): _says(text)}
        STREAM_LIES[f"{at} fails, says {said}"] = fails, False
    fails = {(function, nth): lambda struct, out: 5}
    STREAM_LIES[f"{at} fails, get_last_error releases"] = {**fails, ("get_last_error", 0): _clears("release")}, False
    if function == "get_next":
        STREAM_LIES[f"{at} fails, having written"] = {(function, nth): _writes(80, 0x5A, 5)}, False
        STREAM_LIES[f"{at} writes nothing"] = {(function, nth): lambda struct, out: 0}, True  # the end of the stream
STREAM_LIES["get_schema writes nothing"] = {("get_schema", 1): lambda struct, out: 0}, False
STREAM_LIES["get_schema writes zeros"] = {("get_schema", 1): _writes(72, 0)}, False
STREAM_LIES["get_schema fails, having written"] = {("get_schema", 1): _writes(72, 0x5A, 5)}, False
STREAM_LIES["get_schema gives a released type"] = {("get_schema", 1): _unreleased}, False


def streams():
    """Read every invalid stream, in host and device memory; print their number."""
    count = 0
    for name, (lies, is_right) in STREAM_LIES.items():
        for device in (None, 1):
            for call in (lambda obj: dlx.convert(obj, to="dlx"), lambda obj: dlx.plan(obj, to="dlx")):

                def lie(function, number, struct, *out, lies=lies):
                    does = lies.get((function, number)) or lies.get((function, 0))
                    return does and does(struct, *out)

                made.alive.clear()
                made.released.clear()
                one = LyingStream(lie, device)
                try:
                    result = call(one.object())
                    refused = getattr(result, "outcome", "") == "refused"
                except errors.DlxError:
                    refused = True
                assert refused != is_right, (name, device)
                result = None
                gc.collect()
                by_itself = "releases" in name or "clears all" in name
                assert one.released == (not by_itself) and not one.late, (name, device, one.released, one.late)
                assert made.released["twice"] == 0 and native.live() == 0, (name, device)
                for each in ("schema", "array"):
                    assert made.released[each] == one.given[each], (name, device, each)
                count += 1
    print("streams:", count)
