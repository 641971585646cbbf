"""Arrow's structs with one or two fields wrong, thousands of them: to be run in a process of its own.

What lies behind a pointer is believed by everybody, so pointers are NULL or right, and no bitmap or buffer is shorter
than what a lie can claim: lengths are small, or so large that they must be refused before anything is read.
"""

import ctypes
import gc
import random

import madearrow as made
from madearrow import Gives, GivesDevice, Streams, arrow_array, on_device, schema, stream

import dlx
from dlx import errors
from dlx._core import native

HUGE = (1 << 63) - 1
NUMBERS = (-HUGE - 1, -2, -1, 0, 1, 2, 3, 1 << 61, 1 << 62, HUGE)
TEXTS = (None, b"", b"+", b"+w", b"+w:", b"+w:-1", b"+w:0", b"+w:3", b"+w:99999999999999999999", b"+s", b"+l", b"+r",
         b"u", b"b", b"i", b"ii", b"\xff\xfe", b"w:7", b"d:", b"ts", b"tsn:", b"+ud:0,1", b"x" * 1000)  # fmt: skip
NUMERIC = ("length", "offset", "null_count", "n_buffers", "n_children")
POINTERS = ("buffers", "children", "dictionary", "release")
BLOCK = ctypes.create_string_buffer(4096)


def tree(choose):
    """Return (schemas, arrays) of a column, of lists, or of a table of both, from the outermost on."""
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
    """Set one field wrong."""
    if choose.random() < 0.35:
        victim = choose.choice(schemas)
        name = choose.choice(("format", "name", "children", "dictionary", "n_children", "release"))
        if name == "n_children":  # more children than there are would be read: only fewer can be said
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
    """Convert and plan what lies; print how often what was released was released again."""
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
