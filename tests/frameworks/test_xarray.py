"""xarray as a container: its arrays are converted, dims and coords stay where it can hold the result."""

from __future__ import annotations

import pytest

import dlx
from dlx import errors

np = pytest.importorskip("numpy")
xr = pytest.importorskip("xarray")


@pytest.fixture
def array():
    """A DataArray with an index, a coordinate of dates, a name and attributes."""
    return xr.DataArray(
        np.arange(6.0).reshape(2, 3),
        dims=("x", "y"),
        coords={"x": [10, 20], "when": ("x", np.array(["2020-01-01", "2021-01-01"], "M8[ns]"))},
        name="v",
        attrs={"unit": "m"},
    )


def test_a_target_that_xarray_cannot_hold_gives_the_array_alone(array):
    """In place."""
    result = dlx.convert(array, to="dlx", copy=False)
    assert isinstance(result, dlx.Tensor) and result.data_ptr == array.data.ctypes.data
    assert isinstance(dlx.convert(xr.Variable("x", np.ones(3)), to="dlx"), dlx.Tensor)


def test_a_target_that_xarray_can_hold_keeps_dims_and_coords(array):
    """numpy, and what follows the array API."""
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
    """Coordinates are never converted; the input is never changed."""
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
    """Lazily, by name."""
    view = dlx.convert(xr.Dataset({"a": array}), to="dlx", lazy=True)
    assert isinstance(view["a"], dlx.Tensor) and list(view) == ["a"]


def test_dates_are_refused_by_name(array):
    """Data that is no number."""
    with pytest.raises(errors.DTypeError):
        dlx.convert(array.coords["when"], to="dlx")


def test_xarray_is_no_target(array):
    """And is not listed as one."""
    with pytest.raises(errors.AdapterNotFoundError, match="no target") as caught:
        dlx.convert(array, to="xarray")
    assert "xarray" not in caught.value.fix
