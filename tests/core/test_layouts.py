"""numpy layouts and dtypes that a consumer does not support: copied if the values survive, otherwise rejected."""

from __future__ import annotations

import itertools

import pytest

import dlx
from dlx import errors

# ---- negative strides ------------------------------------------------------------------------------------------------

STEPS = [steps for ndim in (1, 2, 3) for steps in itertools.product((1, -1, -2), repeat=ndim) if min(steps) < 0]


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_negative_strides_are_copied_for_torch(np, torch, steps):
    """A negative stride on any axis is copied for torch, exactly; with copy=False the error names it."""
    whole = np.arange(4 ** len(steps), dtype="int16").reshape((4,) * len(steps))
    array = whole[tuple(slice(None, None, step) for step in steps)]
    assert dlx.convert(array, to="torch").tolist() == array.tolist()
    assert dlx.plan(array, to="torch").outcome == "copied"
    found = str(tuple(stride // 2 for stride in array.strides))
    with pytest.raises(errors.CopyRequiredError, match="cannot have negative strides") as caught:
        dlx.convert(array, to="torch", copy=False)
    assert found in caught.value.reason and caught.value.fix == "Drop copy=False."


def test_negative_strides_are_shared_with_numpy_and_dlx(np):
    """Numpy and dlx.Tensor support negative strides: they are shared."""
    array = np.arange(12).reshape(3, 4)[::-1, ::-2]
    tensor = dlx.convert(array, to="dlx", copy=False)
    assert tensor.strides == (-4, -2) and tensor.data_ptr == array.__array_interface__["data"][0]
    assert dlx.convert(tensor, to="numpy", copy=False).tolist() == array.tolist()


def test_negative_strides_never_abort(python, np, torch):
    """Strides that make torch abort the process are detected before torch sees them, in every function."""
    out = python(
        """
        import array
        import numpy as np
        import dlx
        class Stranger:
            def __init__(self, array):
                self.array = array
            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)
        class Interface:
            def __init__(self, array):
                self.array, self.__array_interface__ = array, array.__array_interface__
        a = np.arange(24.0).reshape(2, 3, 4)
        for axis in (0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)):
            flipped = np.flip(a, axis)
            ways = (flipped, Stranger(flipped), Interface(flipped), dlx.convert(flipped, to="dlx"))
            ways += (flipped.__dlpack__(max_version=(1, 0)), flipped.__dlpack__())
            for source in ways:
                try:
                    dlx.convert(source, to="torch", copy=False)
                except dlx.errors.CopyRequiredError:
                    pass
                else:
                    raise AssertionError(type(source))
                assert dlx.convert(source, to="torch").tolist() == flipped.tolist()
        view = memoryview(array.array("i", range(4)))[::-1]
        assert dlx.convert(view, to="torch").tolist() == [3, 2, 1, 0]
        print("alive")
        """,
        imported=True,
    )
    assert out == "alive\n"


# ---- byte order ------------------------------------------------------------------------------------------------------

SWAPPED = [">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16"]


@pytest.mark.parametrize("target", ["torch", "dlx"])
@pytest.mark.parametrize("dtype", SWAPPED)
def test_other_byte_order_is_copied(np, torch, dtype, target):
    """Elements in the other byte order are copied to the native one, with exact values."""
    array = np.array([[1, 2, 3], [250, 251, 252]], dtype)
    result = dlx.convert(dlx.convert(array, to=target), to="numpy")
    assert result.dtype == array.dtype.newbyteorder("=") and result.dtype.isnative
    assert result.tolist() == array.tolist()
    plan = dlx.plan(array, to=target)
    assert plan.outcome == "copied" and plan.nbytes == array.nbytes
    with pytest.raises(errors.CopyRequiredError, match="other byte order"):
        dlx.convert(array, to=target, copy=False)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0)], ids=str)
def test_other_byte_order_of_every_rank(np, torch, shape):
    """0-d and empty arrays in the other byte order keep their shape."""
    tensor = dlx.convert(np.ones(shape, ">f4"), to="torch")
    assert tuple(tensor.shape) == shape and tensor.dtype is torch.float32 and tensor.sum() == tensor.numel()


def test_other_byte_order_keeps_the_order_of_dimensions(np, torch):
    """The copy to the native byte order keeps the order of dimensions."""
    array = np.asfortranarray(np.arange(6, dtype=">f8").reshape(2, 3))
    assert dlx.convert(array, to="torch").stride() == (1, 2)


# ---- fields, alignment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["torch", "dlx"])
def test_fields_with_odd_strides_are_copied(np, torch, target):
    """A field of a packed structure is copied if its byte stride is not a multiple of its size."""
    records = np.zeros(3, [("tag", "u1"), ("value", "f4")])
    records["value"] = [1, 2, 3]
    result = dlx.convert(records["value"], to=target)
    assert dlx.convert(result, to="numpy").tolist() == [1, 2, 3]
    with pytest.raises(errors.CopyRequiredError, match=r"\(5,\) are not multiples of the item size 4"):
        dlx.convert(records["value"], to=target, copy=False)


def test_fields_with_whole_strides_are_shared(np, torch):
    """A field with strides of whole elements is shared, including gaps."""
    records = np.zeros(3, [("key", "i4"), ("value", "f4")])
    dlx.convert(records["value"], to="torch", copy=False)[:] = 5
    assert records["value"].tolist() == [5, 5, 5] and records["key"].tolist() == [0, 0, 0]


def misaligned(np, dtype, off):
    """An array whose address is `off` bytes past a multiple of 64."""
    dtype = np.dtype(dtype)
    block = np.zeros(256, "u1")
    start = -block.__array_interface__["data"][0] % 64 + off
    array = block[start : start + 3 * dtype.itemsize].view(dtype)
    array[...] = [1, 2, 3]
    return array


@pytest.mark.parametrize("off", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["bool", "u1", "i2", "f4", "i8", "f8", "c8", "c16"])
def test_alignment(np, torch, dtype, off):
    """Data without natural alignment is copied for torch, and shared with numpy and dlx.Tensor."""
    array = misaligned(np, dtype, off)
    natural = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
    tensor = dlx.convert(array, to="torch")
    assert tensor.tolist() == array.tolist()
    assert (tensor.data_ptr() == array.__array_interface__["data"][0]) == (off % natural == 0)
    if off % natural:
        with pytest.raises(errors.CopyRequiredError, match=rf"aligned to {natural} bytes, found {off}\b"):
            dlx.convert(array, to="torch", copy=False)
    back = dlx.convert(dlx.convert(array, to="dlx", copy=False), to="numpy", copy=False)
    assert back.__array_interface__["data"] == array.__array_interface__["data"]


# ---- masked arrays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [[False, True, False], False, True])
@pytest.mark.parametrize("options", [{}, {"copy": True}, {"copy": False}])
def test_masked_arrays_are_refused(np, torch, mask, options):
    """A masked array is rejected with any mask, because masks cannot be converted; the error has a fix."""
    array = np.ma.array([1.0, 2.0, 3.0], mask=mask)
    for target in ("torch", "dlx"):
        with pytest.raises(errors.LayoutError, match="mask") as caught:
            dlx.convert(array, to=target, **options)
        assert ".filled(" in caught.value.fix
    assert dlx.convert(array.filled(0), to="torch").shape == (3,)


def test_the_masked_constant_is_refused(np, torch):
    """numpy.ma.masked is a masked array, too."""
    with pytest.raises(errors.LayoutError, match="mask"):
        dlx.convert(np.ma.masked, to="torch")


# ---- dtypes that DLPack does not know --------------------------------------------------------------------------------

REFUSED = {
    "M8[s]": ("dates", ".view('int64')", lambda a: a.view("int64")),
    "M8[ns]": ("dates", ".view('int64')", lambda a: a.view("int64")),
    "m8[ms]": ("durations", ".view('int64')", lambda a: a.view("int64")),
    ">M8[s]": ("dates", ".view('int64')", lambda a: a.astype("M8[s]").view("int64")),
    "O": ("Python objects", "numpy.array(list(x))", lambda a: a.astype("i8")),
    "U3": ("no text", "numpy.unique(x", lambda a: numpy_unique(a)),
    "S3": ("no text", "numpy.unique(x", lambda a: numpy_unique(a)),
    "V4": ("raw bytes", ".view('uint8')", lambda a: a.view("uint8")),
    "i4,f4": ("structures", "a['f0']", lambda a: a["f0"]),
    "O,i4": ("structures", "a['f0']", lambda a: a["f1"]),
    "g": ("no counterpart", ".astype('float64')", lambda a: a.astype("float64")),
    "G": ("no counterpart", ".astype('complex128')", lambda a: a.astype("complex128")),
}


def numpy_unique(array):
    """Return the codes of an array's values."""
    import numpy

    return numpy.unique(array, return_inverse=True)[1]


@pytest.mark.parametrize("target", ["torch", "dlx"])
@pytest.mark.parametrize("dtype", REFUSED)
def test_dtypes_without_counterpart_are_refused(np, torch, dtype, target):
    """The DTypeError names the reason and a fix; the fix works."""
    array = np.zeros(3, dtype)
    because, fix, resolution = REFUSED[dtype]
    for options in ({}, {"copy": True}, {"copy": False}):
        with pytest.raises(errors.DTypeError) as caught:
            dlx.convert(array, to=target, **options)
        assert because in caught.value.reason and fix in caught.value.fix and isinstance(caught.value, TypeError)
    if resolution:
        assert dlx.convert(resolution(array), to=target).ndim == 1


def test_variable_width_strings_are_refused(np, torch):
    """Numpy 2's StringDType is rejected as a dtype, and stays unchanged for numpy."""
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("needs numpy 2")
    array = np.array(["a"], np.dtypes.StringDType())
    with pytest.raises(errors.DTypeError):
        dlx.convert(array, to="torch")
    assert dlx.convert(array, to="numpy") is array


# ---- numpy scalars ---------------------------------------------------------------------------------------------------

SCALARS = [
    *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "longlong"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("target", ["numpy", "torch", "dlx"])
@pytest.mark.parametrize("kind", SCALARS)
def test_scalars_become_0d(np, torch, kind, target):
    """A numpy scalar becomes a new 0-d array, with exact value and dtype."""
    scalar = getattr(np, kind)(1)
    result = dlx.convert(scalar, to=target)
    array = dlx.convert(result, to="numpy")
    assert array.shape == () and array.dtype == scalar.dtype and array[()] == scalar
    assert dlx.plan(scalar, to=target).outcome == "copied"


def test_scalars_cannot_be_shared(np, torch):
    """copy=False rejects a scalar, which has no shareable memory."""
    with pytest.raises(errors.CopyRequiredError, match="scalar"):
        dlx.convert(np.float32(1), to="torch", copy=False)


def test_scalars_give_fresh_writable_memory(np, torch):
    """Each conversion of a scalar allocates new memory."""
    scalar = np.int64(5)
    first, second = dlx.convert(scalar, to="torch"), dlx.convert(scalar, to="torch")
    first.fill_(9)
    assert (scalar, second.item()) == (5, 5)


@pytest.mark.parametrize(
    ("make", "because"),
    [
        (lambda np: np.datetime64("2020-01-01"), "dates"),
        (lambda np: np.timedelta64(3, "s"), "durations"),
        (lambda np: np.str_("abc"), "text"),
        (lambda np: np.bytes_(b"abc"), "no text"),
        (lambda np: np.void(b"abc"), "raw bytes"),
        (lambda np: np.zeros(1, "i4,f4")[0], "structures"),
        (lambda np: np.longdouble(1), "no counterpart"),
        (lambda np: np.clongdouble(1), "no counterpart"),
    ],
    ids=["datetime64", "timedelta64", "str_", "bytes_", "void", "record", "longdouble", "clongdouble"],
)
@pytest.mark.parametrize("target", ["numpy", "torch", "dlx"])
def test_scalars_without_counterpart_are_refused(np, torch, make, because, target):
    """A scalar of an unsupported dtype raises DTypeError for every target."""
    with pytest.raises(errors.DTypeError, match=because):
        dlx.convert(make(np), to=target)
