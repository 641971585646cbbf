"""The adapter contract stays small, and one table describes dlx's own adapters."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib

import pytest
from support.project import ROOT

import dlx.adapter
from dlx._registry.plugin import FRAMEWORKS, SOURCES, install_of
from dlx._registry.registry import Registry, registry
from dlx.adapter import Adapter, Blocker, Capabilities, Container, Description, Devices, DTypes, FastPath, Guard

PARTS = [
    kind
    for name, kind in vars(dlx.adapter).items()
    if dataclasses.is_dataclass(kind) and name in dlx.adapter.__all__ and kind is not dlx.adapter.Stream
]


def members(kind):
    """Return the public fields, parameters and members of a class."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if kind in (DTypes, Devices):
        return list(inspect.signature(kind).parameters)
    if kind is Description:
        return list(kind._fields)
    return [name for name in {**inspect.get_annotations(kind), **vars(kind)} if not name.startswith("_")]


def test_an_adapter_fits_on_a_screen():
    """`Adapter` has at most 24 public members."""
    assert len(members(Adapter)) <= 24, members(Adapter)


@pytest.mark.parametrize("kind", PARTS)
def test_no_part_has_more_than_14_fields(kind):
    """A larger class should be split."""
    assert len(members(kind)) <= 14, members(kind)


def test_the_contract_does_not_grow():
    """The six most common classes had 100 members, all classes 135; `Compound` has 9, transformations 4."""
    six = (Adapter, FastPath, Capabilities, Container, Guard, Blocker)
    assert sum(len(members(kind)) for kind in six) <= 70
    assert sum(len(members(kind)) for kind in (Adapter, DTypes, Devices, Description, *PARTS)) <= 127


def test_the_hook_s_page_is_one_screen():
    """The docstring shows a complete adapter and names every part."""
    from dlx.adapter import hookspecs

    text = hookspecs.__doc__
    assert len(text.splitlines()) <= 60
    for name in members(Adapter):
        assert name in text, name


def test_the_modules_of_our_adapters_are_shipped():
    """The package has exactly the modules of the table and their imports, and is in the wheel."""
    assert "dlx_adapters" in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {f"dlx_adapters.{path.stem}" for path in (ROOT / "dlx_adapters").glob("dlx_*.py")}
    helpers = {name for name in there if name.endswith(("_gradients", "_compound", "_primitives", "_operators"))}
    assert {row.module for row in FRAMEWORKS.values()} == there - helpers


def test_the_table_is_true_of_the_adapters():
    """Root package, target or source, tracing, and the install command are correct."""
    loaded = Registry().load_all()
    for root, row in FRAMEWORKS.items():
        first = next(each for each in loaded[root].adapters if f"{each.package}.".startswith(f"{root}."))
        assert loaded[root].module == row.module
        assert (root not in SOURCES) is (type(first).capabilities is not Adapter.capabilities), root
        assert install_of(first) == f"pip install {row.install}"
        assert all(loaded[name] is loaded[root] for name in row.names)
    known = registry._list_targets()
    targets = [(root, *row.names) for root, row in FRAMEWORKS.items() if root not in SOURCES]
    assert all(any(f" {name}" in known for name in names) for names in targets)
    assert not any(f" {root}," in known for root in SOURCES)
