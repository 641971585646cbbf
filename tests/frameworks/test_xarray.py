"""xarray as a container: its arrays are converted, and keep dims and coords if xarray supports the result."""

from __future__ import annotations

import pytest

import dlx
from dlx import errors

np = pytest.importorskip("numpy")
xr = pytest.importorskip("xarray")


@pytest.fixture
def array():
    """Return a DataArray with an index, a coordinate of dates, a name and attributes."""
    return xr.DataArray(
        np.arange(6.0).reshape(2, 3),
        dims=("x", "y"),
        coords={"x": [10, 20], "when": ("x", np.array(["2020-01-01", "2021-01-01"], "M8[ns]"))},
        name="v",
        attrs={"unit": "m"},
    )


def test_a_target_that_xarray_cannot_hold_gives_the_array_alone(array):
    """The target's array is returned without the DataArray."""
    result = dlx.convert(array, to="dlx", copy=False)
    assert isinstance(result, dlx.Tensor) and result.data_ptr == array.data.ctypes.data
    assert isinstance(dlx.convert(xr.Variable("x", np.ones(3)), to="dlx"), dlx.Tensor)


def test_a_target_that_xarray_can_hold_keeps_dims_and_coords(array):
    """numpy, and frameworks with the array API, keep dims and coords."""
    pytest.importorskip("array_api_strict")
    result = dlx.convert(array, to="array_api_strict", copy=False)
    assert isinstance(result, xr.DataArray)
    assert (result.dims, result.name, result.attrs, list(result.coords)) == (
        ("x", "y"),
        "v",
        {"unit": "m"},
        ["x", "when"],
    )
    assert result.data._array.ctypes.data == array.data.ctypes.data
    copied = dlx.convert(array, to="numpy", copy=True)
    assert isinstance(copied, xr.DataArray) and not np.shares_memory(copied.data, array.data)
    assert copied.identical(array)


def test_a_dataset_becomes_a_dataset_or_a_dict_of_its_data_variables(array):
    """Coordinates are not converted, and the input is not changed."""
    dataset = xr.Dataset({"a": array, "b": ("y", np.ones(3, "float32"))}, attrs={"k": 1})
    held = dlx.convert(dataset, to="numpy", copy=True)
    assert held.identical(dataset) and held is not dataset
    taken = dlx.convert(dataset, to="dlx")
    assert list(taken) == ["a", "b"] and all(isinstance(each, dlx.Tensor) for each in taken.values())
    assert str(dlx.plan(dataset, to="dlx")).count("shared") == 2
    assert isinstance(dataset["a"].data, np.ndarray)
    nested = dlx.convert({"q": [dataset]}, to="dlx")
    assert list(nested["q"][0]) == ["a", "b"]


def test_a_view_of_a_dataset_converts_what_is_read(array):
    """A view converts its variables on access, by name."""
    view = dlx.convert(xr.Dataset({"a": array}), to="dlx", lazy=True)
    assert isinstance(view["a"], dlx.Tensor) and list(view) == ["a"]


def test_dates_are_refused_by_name(array):
    """Data other than numbers is refused by name."""
    with pytest.raises(errors.DTypeError):
        dlx.convert(array.coords["when"], to="dlx")


@pytest.mark.parametrize("call", [dlx.describe, lambda x: dlx.shares_memory(x, b""), lambda x: dlx.stack([x], "dlx")])
def test_an_array_is_one_for_every_function_and_a_dataset_is_a_container(array, call):
    """An array and a dataset differ, though both export Arrow data."""
    call(array)
    with pytest.raises(errors.AdapterNotFoundError, match="it is a container") as caught:
        call(array.to_dataset(name="a"))
    assert caught.value.fix.startswith("Pass one of its arrays")


def test_xarray_is_no_target(array):
    """Xarray is not a target, and is not listed as one."""
    with pytest.raises(errors.AdapterNotFoundError, match="not a target") as caught:
        dlx.convert(array, to="xarray")
    assert "xarray" not in caught.value.fix


HOSTILE = """
import gc, numpy as np, xarray as xr, dlx
from dlx.testing import Source

class Duck:
    "An array to xarray, whose __dlpack__ is that of a producer that lies, or raises."
    ndim, dtype, size = 2, np.dtype("float32"), 24
    shape = (4, 6)
    def __init__(self, source): self.source = source
    def __array_namespace__(self, api_version=None): return np
    def __array_function__(self, *args, **options): return NotImplemented
    def __getitem__(self, key): return self
    def __dlpack__(self, **options): return self.source.__dlpack__(**options)
    def __dlpack_device__(self): return self.source.__dlpack_device__()

class Raises:
    def __dlpack__(self, **options): raise ZeroDivisionError("unseal it first")
    def __dlpack_device__(self): return (1, 0)

class Closed(xr.backends.BackendArray):
    "Data in a file that is gone."
    shape, dtype = (4, 6), np.dtype("float32")
    def __getitem__(self, key): raise OSError("the file is closed")

unaligned = np.zeros(97, "u1")[1:].view("f4").reshape(4, 6)
expected = np.zeros((4, 6), "f4")
arrays = {name: Duck(Source("float32", **({"shape": (4, 6)} | options))) for name, options in {
    "null": {"data": 0}, "negative": {"claims": (-4, 6)}, "overflow": {"claims": (2**62, 16)},
    "version": {"version": (2, 0), "legacy": False}}.items()}
arrays |= {"raises": Duck(Raises()), "closed": xr.core.indexing.LazilyIndexedArray(Closed()), "unaligned": unaligned,
    "swapped": expected.astype(">f4"), "broadcast": np.broadcast_to(np.float32(0), (4, 6)), "reversed": expected[::-1],
    "objects": expected.astype(object), "dates": expected.astype("M8[ns]")}
for name, data in arrays.items():
    for around in (lambda d: xr.DataArray(d, dims=("x", "y")), lambda d: xr.Variable(("x", "y"), d),
                   lambda d: xr.Dataset({"v": (("x", "y"), d)})):
        try:
            result = dlx.convert(around(data), to="torch")
        except dlx.errors.DlxError as error:
            said = type(error).__name__
        else:
            result = result["v"] if isinstance(result, dict) else result
            said = "right" if np.array_equal(np.asarray(result), expected) else "WRONG"
            del result
        print(name, said)
del arrays, data
gc.collect()
print("alive", dlx._core.native.live())
"""


def test_hostile_arrays_in_them(python):
    """Producers that lie or raise, missing data and odd memory, in a new process, are refused or read correctly."""
    pytest.importorskip("torch")
    lines = [line.split() for line in python(HOSTILE, args=("-W", "ignore")).splitlines()]
    assert lines.pop() == ["alive", "0"]
    right = {"unaligned", "swapped", "broadcast", "reversed"}
    for name, said in lines:
        assert (said == "right") if name in right else said.endswith("Error"), lines
    assert len(lines) == 36


LAYOUTS = {
    "0-d": lambda: np.array(7.0),
    "empty": lambda: np.zeros((0, 3)),
    "gaps": lambda: np.arange(12.0)[::2],
    "the other order": lambda: np.arange(6.0).reshape(2, 3).T,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_shared(layout):
    """Memory is shared by address, and read-only is preserved."""
    base = LAYOUTS[layout]()
    dims = "xy"[: base.ndim]
    result = dlx.convert(xr.DataArray(base, dims=tuple(dims)), to="numpy", copy=False).data
    assert result.shape == base.shape and np.array_equal(result, base)
    assert np.shares_memory(result, base) == (base.size > 0)
    base = base.copy()
    base.flags.writeable = False
    assert not dlx.convert(xr.Variable(tuple(dims), base), to="numpy", copy=False).data.flags.writeable
