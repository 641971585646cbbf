"""Columns of objects with Arrow's PyCapsule interface; no Arrow library is needed.

dlx calls an object's method once. Each tensor over a column keeps the data of the whole object alive.
"""

from __future__ import annotations

import math
from itertools import repeat
from typing import Any, NamedTuple

from dlx._core import cuda, native
from dlx._core.native import Tensor
from dlx._core.types import HOST, READ_ONLY, Device, DType, host_readable, row_major
from dlx._protocols.dlpack import return_or_raise
from dlx._support.reflect import class_name, first_line, foreign_error, module_of, type_name
from dlx.errors import DlxError, LayoutError, ProtocolError

METHODS = ("__arrow_c_device_array__", "__arrow_c_device_stream__", "__arrow_c_stream__", "__arrow_c_array__")
"""In order of preference: the first two never move data between devices, and streams allow any number of chunks."""


NUMBERS = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
)
"""The dtypes with the same memory layout in Arrow and DLPack."""

PACKED = {"bool": "packs bools eight to a byte"}
"""The dtypes that need a copy in Arrow, with reasons."""

MAX_LIST = 2**31 - 1
"""The maximum size of a fixed-size list."""


class Type(NamedTuple):
    """An Arrow type of the C data interface."""

    format: str
    name: str
    metadata: dict[bytes, bytes]
    has_dictionary: bool
    children: tuple[Any, ...]

    @property
    def extension(self) -> str:
        """The name of the extension type, or ``""``."""
        return self.metadata.get(b"ARROW:extension:name", b"").decode(errors="replace")

    def child(self, i: int = 0) -> Type:
        """Return the type of child `i`."""
        return Type(*self.children[i])

    @property
    def is_list(self) -> bool:
        """Whether the values are lists of varying length."""
        return self.format in ("+l", "+L") and not self.has_dictionary and not self.extension

    @property
    def values(self) -> Type:
        """The innermost type: the elements of nested fixed-size lists."""
        is_list = not self.has_dictionary and (not self.extension or self.extension == FIXED_SHAPE)
        return self.child().values if is_list and self.format.startswith("+w:") and self.children else self

    def __str__(self) -> str:
        if self.has_dictionary:
            return f"dictionary<indices={_name(self.format)}>"
        return self.extension or _name(self.format)


FIXED_SHAPE = "arrow.fixed_shape_tensor"

_NAMES = {
    "n": "null", "b": "bool", "e": "halffloat", "f": "float", "g": "double",
    "c": "int8", "s": "int16", "i": "int32", "l": "int64", "C": "uint8", "S": "uint16", "I": "uint32", "L": "uint64",
    "z": "binary", "Z": "large_binary", "vz": "binary_view", "u": "string", "U": "large_string", "vu": "string_view",
    "tdD": "date32[day]", "tdm": "date64[ms]",
    "tiM": "interval[month]", "tiD": "interval[day, time]", "tin": "month_day_nano_interval",
    "+l": "list", "+L": "large_list", "+vl": "list_view", "+vL": "large_list_view",
    "+s": "struct", "+m": "map", "+r": "run_end_encoded",
}  # fmt: skip
_UNITS = {"s": "s", "m": "ms", "u": "us", "n": "ns"}


def _name(text: str) -> str:
    """Return Arrow's name for the type of a format string."""
    head, _, rest = text.partition(":")
    if text in _NAMES:
        return _NAMES[text]
    if head[:2] in ("tt", "ts", "tD") and head[2:] in _UNITS:
        name = {"tt": "time32" if head[2:] in "sm" else "time64", "ts": "timestamp", "tD": "duration"}[head[:2]]
        return f"{name}[{_UNITS[head[2:]]}{f', tz={rest}' if rest else ''}]"
    sized = {"d": "decimal({})", "w": "fixed_size_binary[{}]", "+w": "fixed_size_list[{}]"}
    names = {**sized, "+ud": "union", "+us": "union"}
    return names.get(head, f"of format {text!r}").format(rest)


class Column:
    """A column of a table, or a whole array, series or column."""

    def __init__(self, data: object, number: int, kind: type, described: Type, lists: Column | None = None) -> None:
        self._data, self.number = data, number  # index in the table; -1: not a table
        self.around = lists  # whose values it has
        self.depth: int = 0 if lists is None else lists.depth + 1  # number of lists of varying length around the values
        self.kind, self.type = kind, described  # the Python type of the object, and the Arrow type
        dtype, shape, device, self.n_nulls, self.n_chunks, self.is_packed, address = native.arrow_column(data, number)
        known = dtype is not None and not any(each.extension for each in _levels(described))
        self.dtype = DType(dtype) if known else None  # None if not numeric; shape and address are incomplete then
        self.shape: tuple[int, ...] = shape if known else shape[:1]
        self.strides = row_major(self.shape)
        self.address: int = address if known else 0
        self.device = HOST if device == HOST else Device(*device)
        self._permuted = described.extension == FIXED_SHAPE and known
        if self._permuted:
            self.shape, self.strides = _fixed_shape(described, shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, one byte per bool; 0 if not numeric."""
        return math.prod(self.shape) * self.dtype.bits // 8 if self.dtype is not None else 0

    def share(self) -> Tensor:
        """Return a read-only tensor over the memory."""
        return self._reshape(native.arrow_tensor(self._data, self.number, False))

    def share_plain(self) -> Tensor | None:
        """Return `share` for numbers of one chunk on the host, without nulls; else, or if that fails, None."""
        if self.n_nulls or self.is_packed or self.n_chunks > 1 or self.dtype is None or not host_readable(self.device):
            return None
        try:
            return self.share()
        except DlxError:  # the plan raises it
            return None

    def gather(self) -> Tensor:
        """Return a tensor over a copy, with chunks joined and bools unpacked."""
        return self._reshape(native.arrow_tensor(self._data, self.number, True))

    def extents(self) -> list[tuple[int, int]]:
        """Return the addresses of each chunk's values: of the first byte, and after the last."""
        return native.arrow_extents(self._data, self.number)

    def _reshape(self, tensor: Tensor) -> Tensor:
        if not self._permuted:
            return tensor
        flags = tensor.flags & READ_ONLY
        view = native.tensor_new(tensor.data_ptr, self.shape, self.strides, tensor.dtype, tensor.device, flags, tensor)
        ready = cuda.readiness_of(tensor)
        return view if ready is None else cuda.when(view, ready)


class Offsets(Column):
    """The offsets of a column of lists: an array of integers, which several chunks join in a copy."""

    def __init__(self, lists: Column, tensor: Tensor | None, n_chunks: int, null_row: int) -> None:
        vars(self).update(vars(lists))
        self.lists, self._tensor, self.null_row = lists, tensor, null_row  # -1: no row is null
        self.n_chunks, self.address = n_chunks, 0 if tensor is None else tensor.data_ptr
        if tensor is not None:
            self.dtype, self.shape = tensor.dtype, tensor.shape
        else:  # of several chunks, not read
            self.dtype, self.shape = DType("int64"), (lists.shape[0] + 1,)

    def share(self) -> Tensor:
        """Return the tensor over the memory of the only chunk."""
        return self.gather() if self._tensor is None else self._tensor

    def extents(self) -> list[tuple[int, int]]:
        """Return the addresses of the only chunk, or nothing."""
        if self._tensor is None or self.n_chunks == 0:  # those of an empty column are new for each call
            return []
        return [(self.address, self.address + self._tensor.nbytes)]

    def gather(self) -> Tensor:
        """Return the joined offsets, from 0."""
        joined: Any = native.arrow_lists(self.lists._data, self.lists.number, True)[1]
        return joined  # type: ignore[no-any-return]


def split_lists(obj: Any) -> dict[str, Column]:
    """Return the values and offsets of an object or column with lists of varying length."""
    lists = column(obj)
    data, tensor, *counts = native.arrow_lists(lists._data, lists.number, False)
    values = Column(data, -1, lists.kind, lists.type.child(), lists)
    return {"values": values, "offsets": Offsets(lists, tensor, *counts)}


class Table(dict[str, Column]):
    """The columns of a table or data frame, by name."""


def _levels(described: Type) -> list[Type]:
    """Return a type and its nested value types, without an outermost fixed-shape tensor."""
    levels = [described.child() if described.extension == FIXED_SHAPE and described.children else described]
    while levels[-1].format.startswith("+w:") and levels[-1].children:
        levels.append(levels[-1].child())
    return levels


def _fixed_shape(described: Type, stored: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a fixed-shape tensor array from its metadata."""
    import json

    try:
        metadata = json.loads(described.metadata[b"ARROW:extension:metadata"])
        inner = tuple(int(extent) for extent in metadata["shape"])
        order = [int(i) for i in metadata.get("permutation") or range(len(inner))]
        fits = min(inner, default=0) >= 0 and math.prod(inner) == math.prod(stored[1:])
        if not fits or sorted(order) != [*range(len(inner))]:
            raise ValueError(f"shape {inner} and permutation {order} for {math.prod(stored[1:])} values")
    except Exception as error:
        raise foreign_error(f"the metadata of {FIXED_SHAPE} are invalid:", error, ProtocolError) from error
    steps = row_major(inner)
    return (stored[0], *(inner[i] for i in order)), (math.prod(inner), *(steps[i] for i in order))


def has_interface(kind: type) -> bool:
    """Return whether a type has a method of Arrow's PyCapsule interface."""
    return any(map(hasattr, repeat(kind), METHODS))


def method_of(kind: type) -> str:
    """Return the Arrow method to call on objects of a type; raise `LayoutError` if they can be read only once."""
    if hasattr(kind, "__next__") or hasattr(kind, "read_all"):
        fix = "Read it first with .read_all() or pyarrow.table(it), and convert the result."
        raise LayoutError("it is a stream of batches, which can be read only once", source=type_name(kind), fix=fix)
    return next(name for name in METHODS if hasattr(kind, name))


def _open(obj: Any, *, as_tensors: bool = False) -> tuple[Any, Type | None]:
    """Call an object's Arrow method; return its data and type, or as in `read_columns` its tensors and None."""
    method = method_of(type(obj))
    try:
        answer = native.producer_response(obj)
        data = native.arrow_open(obj, method) if answer is None else return_or_raise(*answer)
        tensors = native.arrow_columns(None, data, True)[0] if as_tensors else None
        return (data, Type(*native.arrow_schema(data))) if tensors is None else (tensors, None)
    except DlxError as error:
        error.brief = first_line(error.brief)  # the rest may be a stream's own text
        raise
    except MemoryError:
        raise
    except Exception as error:
        raise foreign_error(f"{method}() failed:", error) from error
    finally:
        answer = None  # otherwise an error would refer to itself through its traceback


def column(obj: Any) -> Column:
    """Return the data of an object as one column; structs are refused later."""
    if isinstance(obj, Column):
        return obj
    data, described = _open(obj)
    assert described is not None
    return Column(data, -1, type(obj), described)


def read_columns(obj: Any, *, as_tensors: bool = False) -> Column | Table | dict[str, Tensor]:
    """Return a `Table` for a table, otherwise the only `Column`.

    With `as_tensors`, a host table of numbers becomes a dict of tensors, which takes a tenth of the time.
    """
    data, described = _open(obj, as_tensors=as_tensors)
    if described is None:
        return data  # type: ignore[no-any-return]
    if described.format != "+s" or described.has_dictionary or described.extension:
        return Column(data, -1, type(obj), described)
    table = Table()
    for i in range(len(described.children)):
        child = described.child(i)
        if child.name in table:
            reason = f"it has two columns named {child.name!r}, numbers {list(table).index(child.name)} and {i}"
            fix = "Rename one of them, or convert them one by one."
            raise LayoutError(reason, source=type_name(type(obj)), fix=fix)
        table[child.name] = Column(data, i, type(obj), child)
    return table


# ---- refusals --------------------------------------------------------------------------------------------------------

_CALLS = {  # calls to drop nulls, fill nulls, flatten lists, and convert dates and categories to integers
    "polars": (".drop_nulls()", ".fill_null(value)", ".explode()", ".to_physical()", ".to_physical()"),
    "pandas": (".dropna()", ".fillna(value)", ".list.flatten()", ".astype({!r})", ".astype('category').cat.codes"),
}
_INTEGERS = {"tdD": 32, "tiM": 32, "tts": 32, "ttm": 32, "tiD": 0, "tin": 0}


def null_fix(column: Column) -> str:
    """Return a fix for nulls, with calls of the object's package."""
    start, many, one = in_pyarrow(column)
    calls = f"{many}.drop_null()", f"{many}.fill_null(value)", f"{one}.flatten()"
    drop, fill, flat, *_ = _CALLS.get(_package_of(column.kind), calls)
    inside = flat + flat.removeprefix(one) * (column.depth + len(column.shape) - 2)
    if column.depth:
        call = (drop if column.type.is_list else fill).removeprefix(many)
        return f"{start} {inside}{call}, and keep the lengths of its rows yourself."
    if column.type.is_list:
        return f"{start} {drop}."
    if len(column.shape) == 1:
        return f"{start} {fill} or {drop}."
    return f"{start} {drop} if whole rows are null, else {inside}{fill.removeprefix(many)}, and reshape the result."


def _package_of(kind: type) -> str:
    """Return the root package of a type, preferably a base class's package with known calls."""
    roots = [module_of(each).partition(".")[0] for each in kind.__mro__]
    return next((root for root in roots if root in (*_CALLS, "pyarrow", "narwhals")), roots[0])


def in_pyarrow(column: Column) -> tuple[str, str, str]:
    """Return the verb for a call of pyarrow, and the prefixes of a column's and a chunk's methods."""
    package, name = _package_of(column.kind), class_name(column.kind)
    if package in _CALLS or package == "pyarrow":
        return "Call", "", ".combine_chunks()" if name in ("ChunkedArray", "Table") else ""
    while column.around is not None:
        column = column.around
    place = f"[{column.type.name!r}]" if column.number >= 0 else ""
    if package == "narwhals":
        source, is_one = f"it.to_arrow(){place}", not place
    elif not place and hasattr(column.kind, "__arrow_c_array__"):
        source, is_one = "pyarrow.array(it)", True
    else:
        source, is_one = f"pyarrow.table(it){place}" if place else "pyarrow.chunked_array(it)", False
    return f"With x = {source}, call", "x", "x" if is_one else "x.combine_chunks()"


def why_refused(column: Column, shown: str = "") -> tuple[str, str]:
    """Return (reason, fix) for a column without numbers; `shown` is the package's name of its type."""
    described, package = column.type, _package_of(column.kind)
    inner = next((each for each in _levels(described) if each.extension or each.has_dictionary), described.values)
    text, name = inner.format, shown or str(inner)
    call, many, one = in_pyarrow(column)
    depth = column.depth + sum(each.format.startswith("+w:") for each in _levels(described))
    if depth:
        many = one = one + ".flatten()" * depth
    take = "Convert its" if call == "Call" else f"{call.removesuffix('call')}convert"
    calls = _CALLS.get(package)
    if inner.has_dictionary:
        decode = f"Call {calls[4]} first." if calls else f"{take} {one}.indices, and keep its categories yourself."
        return f"it is a dictionary array ({name})", decode
    if inner.extension:
        own = _OWN_FIXES.get((package, inner.extension)) or _OWN_FIXES.get((package, _EXTENSION))
        return f"{_EXTENSION} {name}", own or _without_extension(inner.extension, column, f"{take} {one}")
    if text.startswith("t"):
        bits = _INTEGERS.get(text, 64)
        stored = "[pyarrow]" * (package == "pandas" and text[:2] in ("td", "tt"))
        integers = (calls[3] if calls else f"{many}.cast({{!r}})").format(f"int{bits}{stored}")
        fix = f"{call} {integers} first, and keep the unit yourself." if bits else _APART
        return f"DLPack has no dates, times or durations ({name})", fix
    reason, fix = next((rest for start, *rest in _REFUSED if text.startswith(start)), _OTHER)
    own = _OWN_FIXES.get((package, text[:2])) or _OWN_FIXES.get((package, reason))
    if own and calls and depth:  # its chain begins after the first space
        own = own.replace(" .", f" {calls[2] * depth}.", 1)
    values = ".value_type" * (depth + 1)
    return f"{reason} ({name})", own or fix.format(call=call, take=take, many=many, one=one, values=values)


def _without_extension(extension: str, column: Column, start: str) -> str:
    """Return a fix that converts something else than the extension array."""
    if extension.startswith("geoarrow."):
        kind = "GeoSeries" if column.number < 0 else "GeoDataFrame"
        return f"Convert geopandas.{kind}.from_arrow(it).get_coordinates()."
    return f"{start}.{'to_numpy(zero_copy_only=False)' if extension.startswith('datasets.') else 'storage'}."


_APART = "Convert its parts separately."
_TEXT = ("DLPack has no text or raw bytes", "{take} {one}.dictionary_encode().indices, which encodes it as numbers.")
_VARYING = "its values vary in length"
_NULLS = "it contains only nulls, without a type"
_EXTENSION = "DLPack has no counterpart of"
_OTHER = ("DLPack has no values of this type", "Cast it to a numeric type first.")
_OWN_FIXES = {  # for packages without pyarrow's methods
    ("polars", _TEXT[0]): "Encode it as numbers first, as .cast(pl.Categorical).to_physical() does.",
    ("polars", _VARYING): (
        "Call .list.to_array(n) first if its rows have one length n, else convert its .explode() and its .list.len() "
        "separately."
    ),
    ("polars", "vz"): "Encode it as numbers first, as .rank('dense') does.",
    ("polars", "w:"): "Convert them to numbers first, as .map_elements(float, pl.Float64) does.",
    ("polars", "DLPack has no decimals"): "Call .cast(pl.Float64) first, if that is exact enough.",
    ("polars", "DLPack has no structures"): "Convert its fields one by one: .struct.unnest().",
    ("polars", _NULLS): "Call .cast(pl.Float64).fill_null(value) first.",
    ("polars", _OTHER[0]): "Call .cast(pl.Int64) first, if its values fit.",
    ("pandas", _TEXT[0]): "Encode it as numbers first, as .astype('category').cat.codes does.",
    ("pandas", _VARYING): "Convert its .list.flatten() and its .list.len() separately.",
    ("pandas", "+v"): "With x = pyarrow.array(it), convert x.flatten() and x.sizes separately.",
    ("pandas", "DLPack has no decimals"): "Call .astype('float64') first, if that is exact enough.",
    ("pandas", "DLPack has no structures"): "Convert its fields one by one: .struct.field(0).",
    ("pandas", _NULLS): "Call .astype('float64').fillna(value) first.",
    ("pandas", "pandas.period"): "Call .astype('int64') first, and keep the frequency yourself.",
    ("pandas", "pandas.interval"): "Convert its .array.left.to_numpy() and its .array.right.to_numpy() separately.",
    ("pandas", _EXTENSION): "Call .astype with a numeric dtype first.",
}
_REFUSED = (  # beginning of the format, reason, fix
    ("d:", "DLPack has no decimals", "{call} {many}.cast('float64') first, if that is exact enough."),
    ("+r", "it is run-end encoded", "{call} pyarrow.compute.run_end_decode(x) first."),
    ("+u", "DLPack has no unions", "{take} {one}.field(0), and its other fields."),
    ("+s", "DLPack has no structures", "{take} {many}.flatten()[0], and its other fields."),
    ("+m", _VARYING, "{take} {one}.keys, {one}.items and {one}.offsets separately."),
    ("+v", _VARYING, "{take} {one}.flatten() and {one}.sizes separately."),
    (
        "+",
        _VARYING,
        "{call} {many}.cast(pyarrow.list_(x.type{values}, n)) first if its rows have one length n, else convert "
        "{one}.values and {one}.offsets separately.",
    ),
    ("n", _NULLS, "{call} {many}.cast('float64').fill_null(value) first."),
    *((start, *_TEXT) for start in ("u", "U", "z", "Z", "v", "w:")),
)
