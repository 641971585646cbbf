"""Detection of array-like objects that dlx cannot read, and hints what to convert instead."""

from __future__ import annotations

import os
from collections.abc import ItemsView, Iterator, ValuesView
from itertools import count
from typing import NamedTuple

from dlx._support.reflect import class_name, derives, module_of, packages_of, type_name
from dlx.errors import AdapterNotFoundError

_READS = ("__getitem__", "toarray", "todense", "to_numpy", "numpy", "asnumpy")

_ARRAY = "it is an array of its library, but implements no protocol that dlx can read"
_HOLDER = "it contains arrays that dlx cannot access"
_LISTED = "Make a list of it first: list(...)."
_NUMBERS = (count, type(iter(range(0))))
_ITERATOR = "its elements can be read only by iterating over it, and dlx does not iterate"


class _Hint(NamedTuple):
    """A hint what to convert instead of an unreadable object."""

    attribute: str  # attribute of the class, or the name of the class or a base
    fix: str
    package: str = ""  # required root package of the class or a base; empty: any
    reason: str = ""  # why every function refuses it; empty: refused if it is an array, else a hint at the root
    framework: str = ""  # root package of its arrays, if it is not `package`


# The first match is used.
_HINTS = (
    _Hint(
        "arrays", "Convert a dict of its arrays: {name: array[:] for name, array in group.arrays()}.", "zarr", _ARRAY
    ),
    _Hint("__getitem__", "Read it first: array[:], or a slice.", "zarr"),
    _Hint("__getitem__", "Read it first: dataset[:], or a slice.", "h5py"),
    _Hint("as_tensor", "Convert its .as_tensor() if its tensors have one shape, else list(it).", "nvidia", _ARRAY),
    _Hint("tensors", "Convert list(batch.tensors).", "nvidia", _ARRAY),
    _Hint("contiguous", "Call .contiguous() first.", "warp", _ARRAY),
    _Hint("stack", "Call .stack() first.", "tensorflow", _ARRAY),
    _Hint("UMat", "Call .get() first.", "cv2", _ARRAY),
    _Hint("UntypedStorage", "Convert torch.empty(0, dtype=torch.uint8).set_(x).", "torch", _ARRAY),
    _Hint("TypedStorage", "Convert torch.empty(0, dtype=x.dtype).set_(x).", "torch", _ARRAY),
    _Hint("data_vars", "Convert its variables: {name: each.values for name, each in dataset.data_vars.items()}."),
    _Hint(
        "to_numpy",
        "Call .to_numpy() first, or awkward.drop_none(x) if values are missing, or convert its fields one by one.",
        "awkward",
    ),
    _Hint("colnames", "Convert its columns: {name: table[name].data for name in table.colnames}.", "astropy"),
    _Hint("Time", "Convert its .jd1 and .jd2 separately; their sum is the time.", "astropy", _ARRAY),
    _Hint("collect", "Call .collect() first.", "polars", _ARRAY),
    _Hint("collect", "Call .collect() first.", "narwhals", _HOLDER),
    _Hint("LazyGroupBy", "Call .agg(...) and .collect() first.", "polars", _HOLDER),
    _Hint("GroupBy", "Call .agg(...) first.", "polars", _HOLDER),
    _Hint("DynamicGroupBy", "Call .agg(...) first.", "polars", _HOLDER),
    _Hint("RollingGroupBy", "Call .agg(...) first.", "polars", _HOLDER),
    _Hint("BaseGroupBy", "Convert a dict of its groups: dict(list(it)).", "pandas", _HOLDER),
    _Hint("BaseWindow", "Call .agg(...) first.", "pandas", _HOLDER),
    _Hint("IterableDataset", "Convert its batches, .with_format('arrow').iter(batch_size=n).", "datasets", _HOLDER),
    _Hint(
        "Dataset",
        "Convert its .with_format('arrow')[:], or its .with_format('numpy')[:] if its lists have one length.",
        "datasets",
        _HOLDER,
    ),
    _Hint("Column", "Convert pyarrow.array(it[:]), or it[:] if the data set has a format.", "datasets", _HOLDER),
    _Hint("IterableColumn", "Convert pyarrow.array(list(it)).", "datasets", _HOLDER),
    _Hint("Table", "Convert its .table.", "datasets", _HOLDER),
    _Hint("AnnData", "Convert its arrays, such as .X.", "anndata", _HOLDER),
    _Hint("to_memory", "Call .to_memory() first.", "anndata", _ARRAY),
    _Hint("Dataset", "Call .to_table() first.", "pyarrow", _HOLDER),
    _Hint("Scanner", "Call .to_table() first.", "pyarrow", _HOLDER),
    _Hint("ParquetFile", "Call .read() first.", "pyarrow", _HOLDER),
    _Hint("ParquetDataset", "Call .read() first.", "pyarrow", _HOLDER),
    _Hint("DuckDBPyConnection", "Convert the result of a query: it.sql(query).", "_duckdb", _HOLDER),
    _Hint("DuckDBPyConnection", "Convert the result of a query: it.sql(query).", "duckdb", _HOLDER),
    _Hint("Leaf", "Call .read() first.", "tables", _ARRAY),
    _Hint("File", "Convert {leaf._v_name: leaf.read() for leaf in file.walk_nodes('/', 'Leaf')}.", "tables", _HOLDER),
    _Hint("Dataset", "Convert {name: each[:].data for name, each in x.variables.items()}.", "netCDF4", _HOLDER),
    _Hint("async_generator", "Make a list of it first: [each async for each in it].", "builtins", _ITERATOR),
    _Hint("DataLoader", "Convert each of its batches.", "torch", _HOLDER),
    _Hint("Distribution", "Convert its parameters.", "torch", _HOLDER),
    _Hint("Module", "Convert its .parameters().", "mlx", _HOLDER),
    _Hint("Module", "Convert flax.nnx.to_pure_dict(flax.nnx.state(module)).", "flax.nnx", _HOLDER, "jax"),
    _Hint("magnitude", "Convert its .magnitude, and keep its .units yourself."),
    _Hint("codes", "Convert its .codes, and keep its categories yourself.", "pandas"),
    _Hint("to_numpy", "Call .to_numpy() first."),
    _Hint("compute", "Call .compute() first.", "dask", _HOLDER),
    _Hint("compute", "Call .compute() first."),
    _Hint("tocsr", "Call .tocsr() first, or .toarray() for a dense array.", "scipy", _ARRAY),
    _Hint("toarray", "Call .toarray() first, or convert its component arrays, such as .data."),
    _Hint("todense", "Call .todense() first."),
    _Hint("asnumpy", "Call .asnumpy() first."),
    _Hint("to_tensordict", "Call .to_dict() first.", "", _HOLDER),
    _Hint("state_dict", "Convert its .state_dict().", "", _HOLDER),
    _Hint("Dataset", "Convert its items.", "torch", _HOLDER),
    _Hint("nditer", "Convert its .operands.", "numpy", _ITERATOR),
    _Hint("real", "Make an array of it first: numpy.array(x).", "builtins"),
    _Hint("range", "Make an array of it first: numpy.array(x).", "builtins"),
    _Hint("__array__", "Call numpy.asarray(x) first; dlx does not, because it may copy."),
    _Hint("numpy", "Call .numpy() first."),
    _Hint("__getitem__", "Convert the result of x[...]. If it is a record of arrays, define its __dlx_tree__ method."),
)
_GUESSED = ("to_numpy", "compute", "toarray", "todense", "asnumpy", "numpy", "__getitem__")  # hints for arrays only


class Refusal(NamedTuple):
    """The reason why dlx refuses a type, a fix, and packages whose arrays its objects may contain."""

    source: str
    reason: str
    fix: str
    frameworks: frozenset[str] = frozenset()

    def error(self) -> AdapterNotFoundError:
        """Return the exception."""
        return AdapterNotFoundError(self.reason, source=self.source, fix=self.fix)


def refusal(kind: type) -> Refusal | None:
    """Return the refusal of a type, by every function and anywhere in a tree; or None."""
    found = explain(kind)
    return found if found.reason else None


def explain(kind: type) -> Refusal:
    """Return a fix for objects that dlx cannot read, with a reason if the type is refused."""
    name, owners = type_name(kind), packages_of(kind)
    if derives(kind, (str, os.PathLike)):
        return Refusal(name, "", "Use dlx.open(path) to read a file.")
    iterates = {module_of(cls) for cls in kind.__mro__ if "__next__" in vars(cls)} & {"builtins", "itertools"}
    if derives(kind, (ValuesView, ItemsView)) or (iterates and not derives(kind, _NUMBERS)):
        return Refusal(name, _ITERATOR, _LISTED, owners)
    names = _names(kind)
    # `names >= ...` locks both sets twice on free-threaded CPython 3.14: 50 ms on a busy machine.
    is_array = "__array__" in names or ({"dtype", "shape"} <= names and not names.isdisjoint(_READS))
    hint = next(_fitting(names | {*map(class_name, kind.__mro__)}, owners, is_array), _Hint("", ""))
    reason = _ARRAY if is_array else hint.reason
    frameworks = frozenset({hint.package, hint.framework}) if hint.package else owners
    return Refusal(name, reason, hint.fix, frameworks - {""})


def _fitting(names: set[str], owners: frozenset[str], is_array: bool) -> Iterator[_Hint]:
    for hint in _HINTS:
        owned = hint.package in owners if hint.package else is_array or hint.attribute not in _GUESSED
        if owned and hint.attribute in names:
            yield hint


def _names(kind: type) -> set[str]:
    """Return the names of a class's attributes, except fields of a record and attributes set to None."""
    return {name for cls in kind.__mro__ for name, value in vars(cls).items() if value is not None} - {*_fields(kind)}


def _fields(kind: type) -> Iterator[str]:
    """Yield the field names of a named tuple, dataclass, attrs class or msgspec struct."""
    for attribute in ("_fields", "__dataclass_fields__", "__attrs_attrs__", "__struct_fields__"):
        found = getattr(kind, attribute, None)
        if isinstance(found, tuple | dict):
            yield from (each if isinstance(each, str) else getattr(each, "name", "") for each in found)
