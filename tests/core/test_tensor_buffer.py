"""The buffer protocol of dlx.Tensor agrees with numpy's, and with the rules for each request."""

import array
import ctypes
import gc
import io
import weakref
from collections import Counter

import pytest
from support.arrays.reference import FLOAT32, INT4, PADDED, READ_ONLY

import dlx
from dlx import errors
from dlx._core import native

SIMPLE, WRITABLE, FORMAT, ND = 0, 1, 4, 8
STRIDES = 0x10 | ND
C_ORDER, F_ORDER, ANY_ORDER = 0x20 | STRIDES, 0x40 | STRIDES, 0x80 | STRIDES

DTYPES = ["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]


class Owner(bytearray):
    """Memory with a weak reference."""


def over(shape=(2, 3), strides=None, dtype=FLOAT32, device=(1, 0), flags=0, *, owner=None, at=0):
    """Return a dlx.Tensor over 64 bytes 0, 1, 2, ..."""
    owner = Owner(range(64)) if owner is None else owner
    address = native.buffer_address(memoryview(owner)) + at
    return native.tensor_new(address, shape, strides, dtype, device, flags, owner)


class Buffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


def ask(tensor, flags):
    """Return the buffer for these flags: (format, shape, strides in bytes, length, itemsize, ndim)."""
    view = Buffer()
    pointer = ctypes.byref(view)
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(tensor), pointer, flags)
    try:
        assert view.obj == id(tensor) and not view.suboffsets
        shape, strides = (tuple(part[: view.ndim]) if part else None for part in (view.shape, view.strides))
        return view.format, shape, strides, view.len, view.itemsize, view.ndim
    finally:
        ctypes.pythonapi.PyBuffer_Release(pointer)


# ---- values, dtypes, strides


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(np, dtype):
    """A memoryview of each plain dtype equals numpy's, and numpy reads the same memory, dtype and values."""
    source = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = dlx.convert(source, to="dlx")
    mine, its = memoryview(tensor), memoryview(source)
    for name in ("format", "itemsize", "shape", "strides", "ndim", "nbytes", "readonly", "c_contiguous"):
        assert getattr(mine, name) == getattr(its, name), name
    back = np.asarray(tensor)
    assert back.dtype == source.dtype and (back == source).all() and np.shares_memory(back, source)


LAYOUTS = {
    "row-major": lambda a: a,
    "transposed": lambda a: a.T,
    "gaps": lambda a: a[:, ::2],
    "reversed": lambda a: a[::-1],
    "reversed twice": lambda a: a[::-1, ::-3],
    "permuted": lambda a: a.reshape(2, 3, 4).transpose(2, 0, 1),
    "one row": lambda a: a[1:2],
    "one column": lambda a: a[:, 1:2],
    "no rows": lambda a: a[:0],
    "no columns": lambda a: a[:, :0],
    "0-d": lambda a: a[1, 1, ...],
    "64-d": lambda a: a[0, :2].reshape((1,) * 63 + (2,)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.numpy("2.0") if name == "64-d" else ()) for name in LAYOUTS]
)
@pytest.mark.parametrize("readonly", [False, True])
def test_layouts(np, name, readonly):
    """Strides of either sign, empty and 0-d tensors equal numpy's view, including the read-only flag."""
    source = LAYOUTS[name](np.arange(24, dtype="i4").reshape(4, 6))
    source.flags.writeable = not readonly
    view = memoryview(dlx.convert(source, to="dlx"))
    back = np.asarray(view)
    assert view.readonly is readonly and back.shape == source.shape
    assert back.tobytes() == source.tobytes()
    for order in ("c_contiguous", "f_contiguous", "contiguous"):
        assert getattr(view, order) == getattr(memoryview(source), order), order
    if source.size:
        assert back.__array_interface__["data"][0] == source.__array_interface__["data"][0]


def test_broadcast(np):
    """A stride of 0 is exported unchanged."""
    source = np.broadcast_to(np.arange(3.0), (2, 3))
    view = memoryview(dlx.convert(source, to="dlx"))
    assert (view.shape, view.strides, view.tolist()) == ((2, 3), (0, 8), source.tolist())


@pytest.mark.parametrize("stride", [2**62, -(2**62), 7, 0])
@pytest.mark.parametrize(("shape", "compact"), [((1, 3), (12, 4)), ((3, 1), None), ((0, 5), (4, 4)), ((1,), (4,))])
def test_strides_that_do_not_matter(shape, compact, stride):
    """A stride that no element depends on is replaced by the compact one, which cannot overflow."""
    strides = [stride if extent < 2 or 0 in shape else 1 for extent in shape]
    view = memoryview(over(shape, strides))
    assert view.strides == (compact or (4, 4)) and view.c_contiguous


def test_writing_goes_through(np):
    """Writing to a view writes to the source."""
    source = np.zeros((2, 2), "i8")
    memoryview(dlx.convert(source.T, to="dlx"))[1, 0] = 7
    assert source[0, 1] == 7


def test_without_numpy():
    """Views, casts and struct-like reading need no framework."""
    values = array.array("d", [1.5, -2.0, 3.25])
    tensor = dlx.convert(values, to="dlx")
    assert memoryview(tensor).tolist() == values.tolist()
    assert bytes(tensor) == bytes(memoryview(tensor).cast("B")) == values.tobytes()
    assert io.BytesIO(tensor).getvalue() == values.tobytes()


def test_empty_tensors_have_an_address():
    """A view without elements has length 0 and reads as empty, with any memory."""
    tensor = native.tensor_new(0, (0, 3), None, FLOAT32, (1, 0), 0, None)
    view = memoryview(tensor)
    assert (view.shape, view.nbytes, view.tobytes(), bytes(tensor)) == ((0, 3), 0, b"", b"")
    assert native.buffer_address(view) != 0


# ---- requests


@pytest.mark.parametrize(
    ("flags", "format", "shape", "strides", "ndim"),
    [
        (ND, None, (2, 3), None, 2),
        (ND | FORMAT, b"f", (2, 3), None, 2),
        (STRIDES, None, (2, 3), (12, 4), 2),
        (STRIDES | FORMAT | WRITABLE, b"f", (2, 3), (12, 4), 2),
        (C_ORDER, None, (2, 3), (12, 4), 2),
        (ANY_ORDER | FORMAT, b"f", (2, 3), (12, 4), 2),
        (0x100 | STRIDES | FORMAT, b"f", (2, 3), (12, 4), 2),
    ],
)
def test_only_what_was_asked(flags, format, shape, strides, ndim):
    """Fields that were not requested are NULL; length and itemsize are always set."""
    assert ask(over(), flags) == (format, shape, strides, 24, 4, ndim)


ROWS, COLUMNS, GAPS = ((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 2), (3, 1))


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        (ND, {ROWS}),
        (C_ORDER, {ROWS}),
        (F_ORDER, {COLUMNS}),
        (ANY_ORDER, {ROWS, COLUMNS}),
        (STRIDES, {ROWS, COLUMNS, GAPS}),
    ],
)
@pytest.mark.parametrize("layout", [ROWS, COLUMNS, GAPS])
def test_contiguity(flags, allowed, layout):
    """A requested order is guaranteed, or a BufferError; consumers without strides get row-major memory only."""
    tensor = over(*layout)
    if layout in allowed:
        assert ask(tensor, flags)[3] == 4 * layout[0][0] * layout[0][1]
    else:
        with pytest.raises(BufferError, match="major"):
            ask(tensor, flags)


@pytest.mark.parametrize("flags", [ND | WRITABLE, STRIDES | FORMAT | WRITABLE])
def test_read_only_is_honoured(flags):
    """A writable view of read-only memory is rejected, a read-only one works."""
    tensor = over(flags=READ_ONLY)
    with pytest.raises(errors.ReadOnlyError, match="read-only"):
        ask(tensor, flags)
    assert ask(tensor, flags & ~WRITABLE)[3] == 24


def test_read_only_views_cannot_be_written(np):
    """memoryview, numpy and ctypes see the flag."""
    tensor = over((4,), flags=READ_ONLY)
    with pytest.raises(TypeError, match="read-only"):
        memoryview(tensor)[0] = 1.0
    assert not np.asarray(tensor).flags.writeable and not np.frombuffer(tensor, "f4").flags.writeable
    with pytest.raises(TypeError, match="not writable"):
        (ctypes.c_float * 4).from_buffer(tensor)
    with pytest.raises((TypeError, BufferError)):
        io.BytesIO(b"1234").readinto(tensor)


@pytest.mark.parametrize("flags", [SIMPLE, WRITABLE, FORMAT])
def test_plain_bytes_are_refused(flags):
    """Memory is never exported without its shape: torch.asarray would read the bytes as float32."""
    with pytest.raises(BufferError, match=r"its dtype and shape. Pass memoryview\(tensor\)"):
        ask(over(), flags)


def test_a_memoryview_of_it_is_plain_bytes(tmp_path):
    """Consumers of bytes accept a memoryview, which has the dtype and shape."""
    tensor = over((4,), None, (1, 8, 1))
    assert io.BytesIO(b"wxyz").readinto(memoryview(tensor)) == 4
    (tmp_path / "out").write_bytes(memoryview(tensor))
    assert (tmp_path / "out").read_bytes() == tensor.tobytes() == bytes(tensor) == b"wxyz"


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int4",
        "float4_e2m1fn",
        "float128",
        "complex32",
        "float32x4",
        "int128",
    ],
)
def test_dtypes_without_a_letter(dtype):
    """A dtype without a buffer format raises a DTypeError that names it."""
    tensor = over((2,), None, dlx.DType(dtype))
    with pytest.raises(errors.DTypeError, match=rf"{dtype}\. Convert"):
        memoryview(tensor)
    with pytest.raises(BufferError):
        ask(tensor, SIMPLE)


def test_padded_elements_have_no_letter():
    """A padded int4 is not an int8."""
    with pytest.raises(errors.DTypeError, match="int4"):
        memoryview(over((2,), None, INT4, flags=PADDED))


@pytest.mark.parametrize("device", [(2, 0), (4, 0), (8, 0), (10, 1), (13, 0), (99, 0)])
def test_devices(device):
    """Memory that the host cannot read directly has no buffer."""
    with pytest.raises(errors.DeviceError, match=rf"\({device[0]}, {device[1]}\)"):
        memoryview(over(device=device))


@pytest.mark.parametrize("device", [(1, 0), (3, 0), (11, 2)])
def test_host_memory_of_any_kind(device):
    """Pinned memory is host memory."""
    assert memoryview(over((64,), None, (1, 8, 1), device)).tolist() == list(range(64))


def test_too_many_dimensions():
    """Buffers have at most 64 dimensions."""
    assert memoryview(over((1,) * 64)).ndim == 64
    with pytest.raises(BufferError, match="64"):
        memoryview(over((1,) * 65))


# ---- lifetime


def test_a_view_keeps_the_memory():
    """The owner lives until the last view is released."""
    owner = Owner(range(64))
    gone = weakref.ref(owner)
    view = memoryview(over(owner=owner))
    del owner
    gc.collect()
    assert gone() is not None and view.tobytes() == bytes(range(24))
    part = view[1:]
    view.release()
    assert gone() is not None
    part.release()
    assert gone() is None


def test_shape_and_strides_belong_to_the_view():
    """Two views of one tensor have independent metadata, each valid as long as the view."""
    tensor = over((2, 3), (1, 2))
    first, second = memoryview(tensor), memoryview(tensor)
    first.release()
    assert (second.shape, second.strides, tensor.strides) == ((2, 3), (4, 8), (1, 2))


def test_views_leave_no_count_behind():
    """A view adds one holder, a rejected request adds none."""
    tensor = over(flags=READ_ONLY)
    before = native.live()
    views = [memoryview(tensor) for _ in range(3)]
    assert native.live() == before + 3
    for flags in (WRITABLE, FORMAT, F_ORDER):
        with pytest.raises(BufferError):
            ask(tensor, flags)
    del views
    assert native.live() == before


# ---- consumers


def test_numpy_frombuffer(np):
    """np.frombuffer reads and writes the same memory."""
    owner = Owner(range(64))
    back = np.frombuffer(over(owner=owner), "u1")
    back[0] = 77
    assert owner[0] == 77 and back.size == 24


def test_ctypes_from_buffer():
    """Ctypes structs use writable memory, and hold it."""
    owner = Owner(range(64))
    gone = weakref.ref(owner)
    block = (ctypes.c_uint8 * 24).from_buffer(over(owner=owner))
    block[1] = 99
    assert owner[1] == 99
    del owner
    assert gone() is not None
    del block
    gc.collect()
    assert gone() is None


def test_the_types_own_road_comes_first():
    """Dlx converts a dlx.Tensor directly, not as a buffer."""
    tensor = over((2,), None, (4, 16, 1))
    assert dlx.convert(tensor, to="dlx") is tensor
    assert Counter(dlx.describe(tensor).protocols) == {"__dlpack__": 1}
