"""Objects that are arrays to their own library, and that dlx cannot read: how they are recognized, and what to call.

They are never taken apart as records or mappings, and never pass through a tree: each is refused, with its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from dlx._core.foreign import class_name, derives, module_of, type_name
from dlx.errors import AdapterNotFoundError

__all__ = ["is_array_like", "not_readable", "remedy"]

_READS = ("__getitem__", "toarray", "todense", "to_numpy", "numpy", "asnumpy")


class _Hint(NamedTuple):
    """What to convert instead of an object that dlx cannot read."""

    attribute: str
    """Of the class; or a class's own name, where it has no attribute that tells."""
    fix: str
    package: str = ""
    """Root package of the class, where the attribute alone does not tell."""
    is_array: bool = False
    """Whether the class is an array, or holds some, and has nothing else that shows it."""


# The first one that fits is shown.
_HINTS = (
    _Hint("arrays", "Convert a dict of its arrays: {name: array[:] for name, array in group.arrays()}.", "zarr", True),
    _Hint("__getitem__", "Read it first: array[:], or a part of it.", "zarr"),
    _Hint("__getitem__", "Read it first: dataset[:], or a part of it.", "h5py"),
    _Hint("as_tensor", "Convert its .as_tensor() where its tensors have one shape, else list(it).", "nvidia", True),
    _Hint("tensors", "Convert list(batch.tensors).", "nvidia", True),
    _Hint("contiguous", "Call .contiguous() first.", "warp", True),
    _Hint("stack", "Call .stack() first.", "tensorflow", True),
    _Hint("UMat", "Call .get() first.", "cv2", True),
    _Hint(
        "to_numpy",
        "Call .to_numpy() first if its rows have one length, else convert awkward.flatten(x).to_numpy() and "
        "awkward.num(x).to_numpy() apart.",
        "awkward",
    ),
    _Hint("IterableDataset", "Convert its batches, .with_format('numpy').iter(batch_size=n).", "datasets"),
    _Hint("__getitem__", "Call .with_format('numpy')[:] first.", "datasets"),
    _Hint("to_tensordict", "Call .to_dict() first."),
    _Hint("data_vars", "Convert its variables: {name: each.values for name, each in dataset.data_vars.items()}."),
    _Hint("colnames", "Convert its columns: {name: table[name].data for name in table.colnames}.", "astropy"),
    _Hint("collect", "Call .collect() first.", "polars", True),
    _Hint("collect", "Call .collect() first.", "narwhals"),
    _Hint("magnitude", "Convert its .magnitude, and keep its .units yourself."),
    _Hint("codes", "Convert its .codes, and keep what they stand for yourself.", "pandas"),
    _Hint("to_numpy", "Call .to_numpy() first."),
    _Hint("compute", "Call .compute() first."),
    _Hint("toarray", "Call .toarray() first.", "scipy", True),
    _Hint("toarray", "Call .toarray() first, or convert the arrays that it is made of, such as .data."),
    _Hint("todense", "Call .todense() first."),
    _Hint("asnumpy", "Call .asnumpy() first."),
    _Hint("state_dict", "Convert its .state_dict()."),
    _Hint("__array__", "Call numpy.asarray(x) first: that may copy, so dlx never does."),
    _Hint("numpy", "Call .numpy() first."),
    _Hint("__getitem__", "Convert what [...] reads of it. If it is a record of arrays, give it a __dlx_tree__ method."),
)
_GUESSED = ("to_numpy", "compute", "toarray", "todense", "asnumpy", "numpy", "__getitem__")  # mean this of arrays only


def is_array_like(kind: type) -> bool:
    """Return whether objects of a type are arrays or columns to their own library.

    That is where the class has ``__array__``, or both ``dtype`` and ``shape`` and a way to read elements. Fields of a
    record that happen to have these names do not count.
    """
    names = _names(kind)
    # Not `names >= ...`: without its GIL CPython 3.14 locks both sets twice there, which takes 50 ms on a busy machine.
    if "__array__" in names or ({"dtype", "shape"} <= names and not names.isdisjoint(_READS)):
        return True
    return any(hint.is_array for hint in _fitting(kind, names))


def _names(kind: type) -> set[str]:
    """Return the names of a class's attributes, but for fields of a record and those that are None."""
    return {name for cls in kind.__mro__ for name, value in vars(cls).items() if value is not None} - {*_fields(kind)}


def _fields(kind: type) -> Iterator[str]:
    """Give the names of a record's fields: of a named tuple, a dataclass, an attrs class."""
    for attribute in ("_fields", "__dataclass_fields__", "__attrs_attrs__"):
        found = getattr(kind, attribute, None)
        if isinstance(found, tuple | dict):
            yield from (each if isinstance(each, str) else getattr(each, "name", "") for each in found)


def _fitting(kind: type, names: set[str]) -> Iterator[_Hint]:
    root = module_of(kind).partition(".")[0]
    names = names | {class_name(kind)}
    for hint in _HINTS:
        if hint.attribute in names and hint.package in ("", root):
            yield hint


def remedy(kind: type) -> str:
    """Return what to convert instead of an object of a type that dlx cannot read; empty where nothing is known."""
    if derives(kind, (str, os.PathLike)):
        return "A saved file is read by dlx.open(path)."
    is_array, hints = is_array_like(kind), _fitting(kind, _names(kind))
    return next((each.fix for each in hints if is_array or each.package or each.attribute not in _GUESSED), "")


def not_readable(kind: type) -> AdapterNotFoundError:
    """Return the error for an array of another library that implements no protocol which dlx reads."""
    return AdapterNotFoundError(
        "it is an array to its own library, and implements no protocol by which dlx reads arrays",
        source=type_name(kind),
        fix=remedy(kind),
    )
