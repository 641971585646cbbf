"""Adapters for the conformance kit's tests: a good one, and a bad one for each promise.

Each is the adapter of a tiny framework whose arrays wrap a dlx.Tensor, with the name of the check that must find its
fault. A fresh process finds them as ``support.kit.adapters:subject_<fault>``.
"""

from __future__ import annotations

import os
import sys
import time
import types
from dataclasses import replace

import dlx
from dlx._core.native import tensor_view
from dlx._registry.registry import Plugin, registry
from dlx.adapter import Adapter, ArrayInfo, Capabilities, Compound, Description, DTypes, Layout
from dlx.testing import Subject

__version__ = "1.0"
KEPT = []
BUSY = []
NAMES = ("float32", "float64", "int32", "int64", "uint8")


class Grid:
    """An array of the imaginary framework."""

    def __init__(self, tensor):
        self.tensor = tensor


class Rows:
    """A ragged array of the imaginary framework."""

    def __init__(self, values, offsets):
        self.values, self.offsets = values, offsets


class Names(DTypes):
    """Dtypes whose native objects are strings."""

    def native(self, attribute):
        return f"<{attribute}>"


class Misnames(Names):
    """Dtypes that do not translate back."""

    def from_native(self, native_dtype):
        return super().from_native("<float32>")


class Good(Adapter):
    """An adapter with correct facts."""

    package = "support.kit.adapters"
    install = "it is part of the tests"
    dtypes = Names(__name__, {name: name for name in NAMES})
    layouts = Layout.ANY

    def __init__(self, fault):
        self.name = f"planted_{fault}".replace("-", "_")
        self.kind = type(f"Grid_{fault}".replace("-", "_"), (Grid,), {"__module__": __name__})
        setattr(sys.modules[__name__], self.kind.__name__, self.kind)
        self.types = (f"{__name__}.{self.kind.__name__}",)
        rows = type(f"Rows_{self.name}", (Rows,), {"__module__": __name__})
        setattr(sys.modules[__name__], rows.__name__, rows)
        types, indices = (f"{__name__}.{rows.__name__}",), {"offsets": ("int64",)}
        join = lambda parts: rows(parts[self.joined], parts["offsets"])  # noqa: E731
        self.containers = (Compound("ragged", types, lambda obj: vars(obj).copy(), join, indices=indices),)

    joined = "values"

    def capabilities(self):
        return Capabilities(dtypes=frozenset(NAMES), layouts=self.layouts, min_alignment=1, keeps_readonly=True)

    def describe(self, obj):
        return Description(ArrayInfo.of_tensor(obj.tensor, self.name, type(obj)))

    def export(self, obj, *, stream=None):
        return obj.tensor

    def load(self, tensor):
        return self.kind(tensor)

    def copy(self, obj, device=None):
        return self.kind(dlx.convert(obj.tensor, to="dlx", copy=True))


class Contract(Good):
    """An adapter whose dtypes do not translate back."""

    dtypes = Misnames(__name__, {name: name for name in NAMES})


class Compounds(Good):
    """An adapter that joins a wrong part."""

    joined = "offsets"


class RoundTrips(Good):
    """An adapter that confuses two dtypes."""

    def load(self, tensor):
        return self.kind(tensor_view(tensor, (1, 32, 1), None, None, None) if tensor.dtype == "int32" else tensor)

    def export(self, obj, *, stream=None):
        t = obj.tensor
        return tensor_view(t, (1, t.dtype.bits, 1), None, None, None) if t.dtype.name == "int32" else t


class Narrowing(Good):
    """An adapter that accepts dtypes which it lacks, and changes them."""

    dtypes = Names(__name__, {name: name for name in NAMES if name != "int64"})

    def capabilities(self):
        return Capabilities(dtypes=None, layouts=Layout.ANY, min_alignment=1, keeps_readonly=True, subbyte="both")

    def load(self, tensor):
        return self.kind(tensor_view(tensor, (1, 64, 1), None, None, None) if tensor.dtype.name == "int64" else tensor)


class Layouts(Good):
    """An adapter that drops strides."""

    def load(self, t):
        return self.kind(dlx.from_pointer(t.data_ptr, t.shape, t.dtype, readonly=t.readonly, owner=t))


class Copies(Good):
    """An adapter that copies layouts which it claims to accept."""

    def load(self, tensor):
        return self.kind(dlx.convert(tensor, to="dlx", copy=True))


class DropsFlag(Good):
    """An adapter that claims to keep the read-only flag, and drops it."""

    def load(self, t):
        return self.kind(tensor_view(t, None, None, t.flags & ~1, None))


class Misdescribes(Good):
    """An adapter that describes its arrays as read-only."""

    def describe(self, obj):
        return Description(ArrayInfo.of_tensor(tensor_view(obj.tensor, None, None, 1, None), self.name, type(obj)))


class Shares(Good):
    """An adapter that returns the array itself as a copy."""

    def copy(self, obj, device=None):
        return self.kind(obj.tensor)


class Unowned(Good):
    """An adapter that keeps no owner alive."""

    def load(self, t):
        return self.kind(dlx.from_pointer(t.data_ptr, t.shape, t.dtype, strides=t.strides, readonly=t.readonly))


class Leaks(Good):
    """An adapter that keeps everything alive."""

    def load(self, tensor):
        KEPT.append(tensor)
        return self.kind(tensor)


class OneAtATime(Good):
    """An adapter that fails if a second thread enters."""

    def load(self, tensor):
        if BUSY:
            raise RuntimeError("busy")
        BUSY.append(tensor)
        try:
            time.sleep(0.0001)
            return self.kind(tensor)
        finally:
            BUSY.clear()


class EndsBadly(Good):
    """An adapter whose arrays end the process if they are released too late."""

    def __init__(self, fault):
        super().__init__(fault)
        self.kind.__del__ = lambda array: os._exit(3) if sys is None or sys.is_finalizing() else None


FAULTS = {
    "good": Good,
    "adapter-contract": Contract,
    "adapter-round-trips": RoundTrips,
    "adapter-compounds": Compounds,
    "adapter-narrowing": Narrowing,
    "adapter-layouts": Layouts,
    "adapter-capabilities": Copies,
    "adapter-readonly": DropsFlag,
    "adapter-describes": Misdescribes,
    "adapter-identity": Shares,
    "adapter-lifetimes/early": Unowned,
    "adapter-lifetimes/late": Leaks,
    "adapter-leaks": Leaks,
    "adapter-threads": OneAtATime,
    "adapter-end": EndsBadly,
}


class Bag:
    """A container that dlx does not know."""

    def __init__(self, array):
        self.array = array


PLUGINS = {}  # only a grading process registers them


def _enter(fault, made):
    module = types.ModuleType(f"dlx_{made.name}")
    module.dlx_adapters = dlx.hookimpl(lambda: [made])
    PLUGINS[made.name] = Plugin(module.__name__, lambda: module, "tests")
    containers = {"list": lambda a: [a, {"b": (a, 1)}]} if fault == "good" else {"bag": Bag}
    return Subject("planted", package=__name__, adapter=made.name, containers=containers)


SUBJECTS = {fault: _enter(fault.replace("/", "_"), kind(fault.replace("/", "_"))) for fault, kind in FAULTS.items()}
SUBJECTS["adapter-containers"] = SUBJECTS["adapter-contract"]


def named(fault):
    """Return the subject that a fresh process can find."""
    return replace(SUBJECTS[fault], spec=f"support.kit.adapters:subject_{fault}")


def __getattr__(name):
    """Return ``subject_<fault>`` for a fresh process."""
    fault = name.removeprefix("subject_")
    if fault == name or fault not in SUBJECTS:
        raise AttributeError(name)
    registry._loader.plugins.update(PLUGINS)
    return named(fault)
