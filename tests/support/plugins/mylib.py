"""The adapter of an imaginary framework, and plugins built from functions."""

from __future__ import annotations

import sys
import types

import dlx
from dlx.adapter import Adapter, Capabilities, Layout


class Array:
    """An array of an imaginary framework that implements DLPack through dlx."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.asked = 0

    def __dlpack__(self, **keywords):
        self.asked += 1
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class Special(Array):
    """A subclass that another adapter may own."""


class MyLib(Adapter):
    """The adapter of the imaginary framework."""

    name = package = "mylib"
    install = "pip install mylib"
    types = ("mylib.Array",)

    def capabilities(self):
        return Capabilities(dtypes=None, layouts=Layout.ANY, min_alignment=1, keeps_readonly=True)

    def load(self, tensor):
        return Array(tensor)


def plugin(monkeypatch, name, hook, mark=True):
    """Add a module to sys.modules whose hook is this function."""
    module = types.ModuleType(name)
    if mark:
        hook = dlx.hookimpl(specname="dlx_adapters")(hook)
    module.dlx_adapters = hook
    monkeypatch.setitem(sys.modules, name, module)
    return module
