"""Array-like objects without a protocol are refused with their path, not flattened or passed through."""

import collections
import ctypes
import dataclasses
import typing

import pytest

import dlx
from dlx import errors
from dlx._registry.array_like import refusal

# ---- made classes, with the attributes of real ones ------------------------------------------------------------------


@dataclasses.dataclass
class Chunked:
    """Like a zarr array: a dataclass with unrelated fields."""

    store: object = None
    dtype = property(lambda self: "float32")
    shape = property(lambda self: (2,))

    def __getitem__(self, index):
        raise AssertionError("it was read")


class Labelled(collections.abc.Mapping):
    """Like an xarray dataset: a mapping with `__array__`."""

    def __array__(self, *arguments, **options):
        raise AssertionError("__array__ was called")

    def __getitem__(self, key):
        raise AssertionError("it was flattened")

    def __iter__(self):
        raise AssertionError("it was flattened")

    __len__ = __iter__


class Rows(list):
    def __array__(self, *arguments, **options):
        raise AssertionError("__array__ was called")


class Lazy:
    """Like a dask array."""

    def __array__(self, *arguments, **options):
        raise AssertionError("__array__ was called")

    def compute(self):
        raise AssertionError("compute was called")


class Sparse:
    dtype = shape = property(lambda self: None)

    def toarray(self):
        raise AssertionError("toarray was called")


class UMat:
    """Like OpenCV's: no attribute identifies it."""


UMat.__module__ = "cv2"


class pybind11_static_property(property):
    """Like pybind11's descriptor of class attributes."""

    def __get__(self, obj, kind):
        return super().__get__(kind, kind)


class TensorListCPU(metaclass=type("pybind11_type", (type,), {})):
    """Like DALI's: created by pybind11, and renamed."""

    __module__ = pybind11_static_property(lambda kind: "nvidia.dali.tensors")
    dtype = shape = property(lambda self: None)

    def as_tensor(self):
        raise AssertionError("as_tensor was called")

    def __getitem__(self, index):
        raise AssertionError("it was read")


class Batch:
    """Like a batch of DALI's dynamic mode, which has no index."""

    dtype = shape = tensors = property(lambda self: None)


Batch.__module__ = "nvidia.dali.experimental.dynamic._batch"

ARRAYS = {
    "dataclass": (Chunked, "the result of x[...]"),
    "mapping": (Labelled, "numpy.asarray"),
    "list subclass": (lambda: Rows([1.0]), "numpy.asarray"),
    "lazy": (Lazy, ".compute()"),
    "sparse": (Sparse, ".toarray()"),
    "by its name": (UMat, ".get()"),
    "list of tensors": (TensorListCPU, ".as_tensor()"),
    "batch": (Batch, "list(batch.tensors)"),
}


class Spec(typing.NamedTuple):
    """A record whose fields are named dtype and shape, with elements like every tuple."""

    shape: tuple
    dtype: str


@dataclasses.dataclass
class Described:
    shape: tuple = (1,)
    dtype: str = "float32"
    data: object = None

    def __getitem__(self, index):
        raise AssertionError("it was read")


class Shape:
    """It has dtype and shape, but no elements."""

    dtype = shape = property(lambda self: None)


class NoArray:
    __array__ = None


RECORDS = {"named tuple": lambda x: Spec((1,), x), "dataclass": lambda x: Described(data=x)}
OTHERS = [Shape, NoArray, Spec, Described, dict, list, str, object]


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ARRAYS)
def test_it_is_refused_with_its_place(name, strict):
    """At the root and in a tree, by `convert`, `plan` and lazy views, without accessing its data."""
    make, words = ARRAYS[name]
    obj = make()
    with pytest.raises(errors.AdapterNotFoundError) as root:
        dlx.convert(obj, to="dlx", strict=strict)
    assert words in root.value.fix and "install" not in str(root.value)
    tree = {"a": [b"", obj]}
    with pytest.raises(errors.AdapterNotFoundError) as inside:
        dlx.convert(tree, to="dlx", strict=strict)
    assert inside.value.where == "obj['a'][1]" and inside.value.fix == root.value.fix
    with pytest.raises(errors.AdapterNotFoundError) as lazily:
        dlx.convert(tree, to="dlx", lazy=True, strict=strict)["a"][1]
    assert lazily.value.where == "obj['a'][1]"
    plan = dlx.plan(tree, to="dlx", strict=strict)
    assert (plan.outcome, plan.error.where) == ("refused", "obj['a'][1]") and words in str(plan)
    assert ("obj['a'][1]", inside.value.source) not in plan.passed


@pytest.mark.parametrize("name", RECORDS)
def test_fields_that_are_called_so_make_no_array(name):
    """Records with these fields are converted like other records."""
    result = dlx.convert(RECORDS[name](dlx.empty((2,), "float32")), to="dlx", copy=True)
    assert type(result) is type(RECORDS[name](None))


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_none(kind):
    """Only one of these attributes does not make an array."""
    assert refusal(kind) is None


def test_what_has_a_buffer_is_converted():
    """In a tree a buffer passes through; array-like objects with a buffer are converted."""

    class Pixels(ctypes.c_uint8 * 3):
        def __array__(self, *arguments, **options):
            raise AssertionError("__array__ was called")

    plain, pixels = bytearray(3), Pixels()
    result = dlx.convert([plain, pixels], to="dlx")
    assert result[0] is plain and type(result[1]) is dlx.Tensor and dlx.shares_memory(result[1], pixels)


def test_all_are_collected():
    """Each has its path."""
    with pytest.raises(ExceptionGroup) as caught:
        dlx.convert({"a": Lazy(), "b": [Sparse(), 1]}, to="dlx", errors="collect")
    assert [error.where for error in caught.value.exceptions] == ["obj['a']", "obj['b'][0]"]


def test_what_is_no_array_says_what_to_do(tmp_path):
    """Paths of files and similar objects have a fix."""
    for obj, words in (("model.npz", "dlx.open"), (tmp_path, "dlx.open")):
        with pytest.raises(errors.AdapterNotFoundError) as caught:
            dlx.convert(obj, to="dlx")
        assert words in caught.value.fix
        assert dlx.convert([obj], to="dlx") == [obj]


# ---- objects without arrays ------------------------------------------------------------------------------------------


class Bag(dict):
    pass


@pytest.mark.parametrize("root", [Described(), Spec((), ""), Bag(a=1)], ids=["dataclass", "named tuple", "subclass"])
def test_a_root_without_an_array_says_so(root):
    """Except built-in containers; inside a container it passes through."""
    with pytest.raises(errors.AdapterNotFoundError, match="it holds no array: obj") as caught:
        dlx.convert(root, to="dlx")
    assert caught.value.target == "dlx"
    assert str(dlx.plan(root, to="dlx").error) == str(caught.value)
    with pytest.raises(ExceptionGroup):
        dlx.convert(root, to="dlx", errors="collect")
    assert dlx.convert([root], to="dlx") == [root]


@pytest.mark.parametrize("root", [[], {}, (), {"a": 1}, Bag(), collections.deque([1])], ids=repr)
def test_a_root_that_may_hold_none(root):
    """Built-in containers, and empty ones."""
    assert dlx.convert(root, to="dlx") == root and dlx.plan(root, to="dlx").outcome == "tree"


def test_a_plan_lists_what_passes_through():
    """The plan lists each object once, with path and type."""
    tensor, record = dlx.empty((2,), "float32"), Spec((3,), "f4")
    plan = dlx.plan({"a": [1, tensor, 2], "s": record, "again": record, "b": b"1"}, to="dlx")
    assert plan.passed == (
        ("obj['b']", "bytes"),
        ("obj['a'][0]", "int"),
        ("obj['a'][2]", "int"),
        ("obj['s'].dtype", "str"),
        ("obj['s'].shape[0]", "int"),
    )
    assert "passes through: int at obj['a'][0], obj['a'][2], obj['s'].shape[0]" in str(plan)
    assert len(plan.leaves) == 1 and dlx.plan(tensor, to="dlx").passed == ()
    many = str(dlx.plan(list(range(9)), to="dlx"))
    assert many.endswith("passes through: int at obj[0], obj[1], obj[2], and 6 more")
    assert "nothing is converted: no array is in it" in many and "nothing is converted" not in str(plan)


@pytest.mark.parametrize(
    ("source", "is_advised"),
    [
        ([], False),
        ({"a": "x"}, False),
        (((), [{}]), False),
        ({"a": "x", "b": [None, 1]}, True),
        ([1.0], True),
        ([1j], True),
        ([True], True),
    ],
    ids=str,
)
def test_a_plan_without_an_array_says_so(source, is_advised):
    """If there are numbers, it shows how to create an array of them."""
    said = str(dlx.plan(source, to="dlx")).splitlines()[1]
    advice = " Make an array of the numbers first: numpy.array(numbers)." * is_advised
    assert said == f"nothing is converted: no array is in it.{advice}"


# ---- real libraries --------------------------------------------------------------------------------------------------


def _of(module):
    return pytest.importorskip(module)


REAL = {
    "flatiter": (lambda np: np.ones(2).flat, "numpy.asarray"),
    "scipy": (lambda np: _of("scipy.sparse").csr_array(np.eye(2)), ".toarray()"),
    "zarr": (lambda np: _of("zarr").zeros((2, 3)), "[:]"),
    "zarr group": (lambda np: _of("zarr").group(), ".arrays()"),
    "xarray": (lambda np: _of("xarray").DataTree(), ".data_vars"),
    "pandas index": (lambda np: _of("pandas").Index([1, 2]), ".to_numpy()"),
    "pint": (lambda np: _of("pint").UnitRegistry().Quantity(np.ones(2), "m"), ".magnitude"),
}


@pytest.mark.parametrize("name", REAL)
def test_arrays_of_real_libraries_are_refused(np, name):
    """The error suggests a call that works."""
    make, words = REAL[name]
    for tree, where in ((make(np), ""), ({"a": make(np)}, "obj['a']")):
        with pytest.raises(errors.DlxError) as caught:
            dlx.convert(tree, to="numpy")
        assert words in caught.value.fix and caught.value.where == where


# ---- arrays whose elements mean more than numbers --------------------------------------------------------------------


def made(np, **members):
    """Return an array of a subclass with these properties."""
    kind = type("Meaning", (np.ndarray,), {name: property(lambda self, v=v: v) for name, v in members.items()})
    return np.ones(3).view(kind)


@pytest.mark.parametrize("name", ["unit", "units", "mask"])
def test_an_array_with_a_unit_is_refused(np, name):
    """A unit or mask is never lost silently; inside numpy the array is unchanged."""
    array = made(np, **{name: "m"})
    for obj, where in ((array, ""), ([array], "obj[0]")):
        with pytest.raises(errors.ConversionError, match=f"its {name}|a masked array's mask") as caught:
            dlx.convert(obj, to="dlx")
        assert caught.value.fix and caught.value.where == where
    assert dlx.convert(array, to="numpy") is array
    assert dlx.convert(array.view(np.ndarray), to="dlx").shape == (3,)


@pytest.mark.parametrize("options", [{}, {"copy": True}])
def test_a_unit_of_one_array_is_seen(np, options):
    """Arrays may have the attribute even if the class lacks it (unyt)."""
    kind = type("Noted", (np.ndarray,), {})
    plain, array = np.ones(3).view(kind), np.ones(3).view(kind)
    array.units = "m"
    for _ in range(2):
        assert dlx.convert(plain, to="dlx", **options).shape == (3,)
        with pytest.raises(errors.DTypeError, match=r"its units \(m\)"):
            dlx.convert(array, to="dlx", **options)


def test_an_array_without_its_unit_is_shared(np):
    """Like a column of astropy without a unit; a method of that name is ignored."""
    kind = type("Method", (np.ndarray,), {"mask": lambda self: 1})
    for array in (made(np, unit=None), np.ones(3).view(kind)):
        assert dlx.shares_memory(dlx.convert(array, to="dlx"), array)


@pytest.mark.parametrize("package", ["quantities", "astropy.units"])
def test_quantities_of_real_libraries(np, package):
    """The suggested fix returns the numbers."""
    quantity = pytest.importorskip(package).Quantity(np.ones(2), "m")
    with pytest.raises(errors.DTypeError, match="unit"):
        dlx.convert(quantity, to="dlx")
    assert dlx.convert(quantity.view(np.ndarray), to="dlx").shape == (2,)
