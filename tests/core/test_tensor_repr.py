"""The repr of dlx.Tensor: one line with the values, which never crashes the process."""

import struct

import pytest
from support.arrays.reference import FLOAT32, INT4, INT8, PADDED, READ_ONLY, row_major

import dlx
from dlx._core import native


def over(data, shape, strides=None, dtype=FLOAT32, device=(1, 0), flags=0, *, at=0):
    """Return a dlx.Tensor over given bytes."""
    owner = bytearray(data)
    address = native.buffer_address(memoryview(owner)) + at
    return native.tensor_new(address, shape, strides, dtype, device, flags, owner)


def values(dtype, data):
    """Return the part of the repr that shows the values of a one-dimensional tensor."""
    dtype = dlx.DType(dtype)
    text = repr(over(data, (len(data) * 8 // dtype.bits,), None, dtype))
    head = f"dlx.Tensor({dtype.name}[{len(data) * 8 // dtype.bits}], cpu, "
    assert text.startswith(head) and text.endswith(")")
    return text[len(head) : -1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((2, 3),), "float32[2, 3], cpu, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]"),
        (((3, 2), (1, 3)), "float32[3, 2], cpu, strides=(1, 3), [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]"),
        (
            ((2, 3), None, FLOAT32, (1, 0), READ_ONLY),
            "float32[2, 3], cpu, read-only, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]",
        ),
        (((3,), (0,)), "float32[3], cpu, strides=(0,), [0.0, 0.0, 0.0]"),
        (((1, 2), (77, 1)), "float32[1, 2], cpu, [[0.0, 1.0]]"),
        (((),), "float32[], cpu, 0.0"),
        (((0,),), "float32[0], cpu"),
        (((3, 0),), "float32[3, 0], cpu"),
        (((2,), None, FLOAT32, (3, 1)), "float32[2], cuda_host:1, [0.0, 1.0]"),
        (((2,), None, FLOAT32, (1, 2)), "float32[2], cpu:2, [0.0, 1.0]"),
    ],
)
def test_one_line(arguments, text):
    """Dtype, shape and device; strides only if they add information; the read-only flag; the values."""
    assert repr(over(struct.pack("8f", *range(8)), *arguments)) == f"dlx.Tensor({text})"


def test_negative_strides():
    """Values are in the order of the indices."""
    tensor = over(bytes(range(4)), (4,), (-1,), INT8, at=3)
    assert repr(tensor) == "dlx.Tensor(int8[4], cpu, strides=(-1,), [3, 2, 1, 0])"


@pytest.mark.parametrize(
    ("dtype", "letter", "numbers"),
    [
        ("int8", "b", [-128, 127]), ("int16", "h", [-(2**15), 1]), ("int32", "i", [-(2**31), 1]),
        ("int64", "q", [-(2**63), 2**63 - 1]), ("uint8", "B", [0, 255]), ("uint16", "H", [0, 2**16 - 1]),
        ("uint32", "I", [0, 2**32 - 1]), ("uint64", "Q", [0, 2**64 - 1]), ("bool", "?", [True, False]),
        ("float16", "e", [0.1, 65500.0, -1.5, 6e-08]), ("float32", "f", [0.1, 1e20, 3.14159, 1e-45, 16777216.0]),
        ("float64", "d", [0.1, 1e300, 5e-324, 1 / 3]),
    ],
)  # fmt: skip
def test_dtypes(dtype, letter, numbers):
    """Each number is the shortest text that means it in its dtype."""
    assert values(dtype, struct.pack(f"{len(numbers)}{letter}", *numbers)) == repr(numbers)


def test_bool_is_any_byte_but_zero():
    """A bool byte that is neither 0 nor 1 is true."""
    assert values("bool", b"\0\1\2\xff") == "[False, True, True, True]"


@pytest.mark.parametrize(("dtype", "letter"), [("complex32", "e"), ("complex64", "f"), ("complex128", "d")])
def test_complex(dtype, letter):
    """Complex numbers look as in Python, each part in its own precision."""
    assert values(dtype, struct.pack(f"4{letter}", 0.1, 2, -0.0, float("inf"))) == "[(0.1+2j), (-0+infj)]"


def test_bfloat16():
    """bfloat16 is decoded: the upper half of a float32."""
    data = b"".join(struct.pack("<f", number)[2:] for number in (1.0, -0.5, float("inf"), 0.10009765625, 256.0))
    assert values("bfloat16", data) == "[1.0, -0.5, inf, 0.1, 256.0]"


@pytest.mark.parametrize(("dtype", "letter", "width"), [("float16", "e", 2), ("float32", "f", 4), ("bfloat16", "f", 2)])
def test_every_shown_number_means_the_stored_one(dtype, letter, width):
    """Parsing the text and rounding it to the dtype gives the stored bits, for numbers from the whole range."""
    for number in range(0, 2 ** (8 * width), 2 ** (8 * width) // 499):
        raw = number.to_bytes(width, "little")
        stored = bytes(4 - width) + raw if dtype == "bfloat16" else raw
        text = values(dtype, raw)[1:-1]
        if text == "nan":
            assert struct.unpack(letter, stored)[0] != struct.unpack(letter, stored)[0]
        elif dtype == "bfloat16":  # within half of the last of its 8 bits
            exact = struct.unpack(letter, stored)[0]
            assert float(text) == exact or abs(float(text) - exact) <= max(abs(exact) * 2**-8, 2**-134)
        else:
            assert struct.pack(letter, float(text)) == raw


@pytest.mark.parametrize("nan", ["float16", "float32", "float64", "bfloat16"])
def test_nan(nan):
    """NaN is shown as a value."""
    assert values(nan, b"\xff" * 16).startswith("[nan, nan")


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((8,), "[0, 1, 2, 3, 4, 5, 6, 7]"),
        ((9,), "[0, 1, 2, ..., 6, 7, 8]"),
        ((200,), "[0, 1, 2, ..., 197, 198, 199]"),
        ((2, 5), "[[0, 1, ..., 3, 4], [5, 6, ..., 8, 9]]"),
        ((10, 20), "[[0, ..., 19], ..., [180, ..., 199]]"),
        ((1, 9), "[[0, 1, 2, ..., 6, 7, 8]]"),
        ((2, 2, 2), "[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]"),
        ((3, 3, 3), "[[[0, ..., 2], ..., [6, ..., 8]], ..., [[18, ..., 20], ..., [24, ..., 26]]]"),
        ((2, 2, 2, 2), ""),
    ],
)
def test_many_values_are_shortened(shape, text):
    """At most eight values are shown, from both ends of every dimension; no values if the ends are more."""
    tensor = over(bytes(range(200)), shape, None, (1, 8, 1))
    assert repr(tensor) == f"dlx.Tensor(uint8{list(shape)}, cpu{', ' if text else ''}{text})"


def test_many_dimensions():
    """128 dimensions of extent 1 are still one line."""
    text = repr(over(b"\7", (1,) * 128, None, INT8))
    assert text.endswith("[" * 128 + "7" + "]" * 128 + ")") and "\n" not in text


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [(INT4, 0), (INT4, PADDED), ((10, 8, 1), 0), ((12, 8, 1), 0), ((17, 4, 1), 0), ((2, 32, 2), 0), ((3, 64, 1), 0),
     ((99, 7, 3), 0), ((2, 128, 1), 0), ((0, 128, 1), 0), ((5, 16, 1), 0)],
)  # fmt: skip
def test_other_dtypes_are_named_only(dtype, flags):
    """Unsupported dtypes are shown without values."""
    assert repr(over(bytes(64), (2,), None, dtype, flags=flags)) == f"dlx.Tensor({dlx.DType(dtype)}[2], cpu)"


@pytest.mark.parametrize("device", [(2, 0), (2, 3), (8, 0), (10, 0), (13, 0), (77, 1)])
def test_devices_are_not_read(device):
    """Device memory is named but not read."""
    tensor = native.tensor_new(0x10, (2,), None, FLOAT32, device, 0, None)
    assert repr(tensor) == f"dlx.Tensor(float32[2], {dlx.Device(device)})"


def test_memory_that_is_not_there(python):
    """The repr of a tensor with a bad address does not crash: debuggers call it without asking."""
    code = """
        from dlx._core import native, tensor
        print(native.tensor_new(256, (2,), None, (2, 32, 1), (1, 0), 0, None))
    """
    assert python(code) == "dlx.Tensor(float32[2], cpu)\n"


def test_native_alone(python):
    """dlx._core.native alone is enough for the same repr."""
    out = python("""
        from dlx._core import native, tensor
        print(native.tensor_new(0, (0,), None, (2, 32, 1), (1, 0), 0, None))
    """)
    assert out == "dlx.Tensor(float32[0], cpu)\n"


def test_a_repr_holds_nothing():
    """A repr leaves no count and no open file behind."""
    tensor = over(bytes(12), (3,), row_major((3,)))
    before = native.live()
    for _ in range(2000):
        repr(tensor)
    assert native.live() == before
