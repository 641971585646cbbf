"""Tests of a plugin: its own promises here, dlx's in the conformance kit."""

import examplearray as ea
import pytest

import dlx


def test_memory_is_shared():
    """An array is converted to dlx and back over the same memory."""
    array = ea.array([[1, 2], [3, 4]])
    back = dlx.convert(dlx.convert(array, to="dlx"), to="examplearray")
    assert back.address == array.address and back.tolist() == [[1, 2], [3, 4]]


def test_a_negated_array_is_resolved():
    """A negated array is copied; copy=False refuses it."""
    array = ea.array([1, -2]).negated()
    assert dlx.convert(dlx.convert(array, to="dlx"), to="examplearray").tolist() == [-1, 2]
    with pytest.raises(dlx.errors.CopyRequiredError):
        dlx.convert(array, to="dlx", copy=False)


def test_a_bundle_is_a_container():
    """A bundle's arrays are converted, and its label is kept."""
    bundle = dlx.convert(ea.Bundle("b", {"x": ea.array([1])}), to="dlx")
    assert bundle.label == "b" and isinstance(bundle["x"], dlx.Tensor)


def test_nothing_is_amiss():
    """The plugin is listed without a warning."""
    found = dlx.adapters()
    assert "examplearray" in found and not found.broken and not found.notes
