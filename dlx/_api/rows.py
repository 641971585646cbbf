"""List the arrays that `stack` joins: the elements of a list, the columns of a frame, the rows of a list column."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import islice
from typing import Any

from dlx._api.convert import convert
from dlx._core.native import Tensor
from dlx._core.tensor import view
from dlx._engine.compound import name_of, split
from dlx._registry import lookup
from dlx._registry.compound import CompoundHandler
from dlx._support.reflect import foreign_errors, type_name
from dlx.errors import Attribute, DlxError, LayoutError

Join = Callable[[Any, Tensor, Tensor, list[int]], Tensor]  # values, also as a tensor; offsets, also as a list


def open_frame(obj: Any) -> Any:
    """Return the names, matrices and places of a frame's columns, an object with them, or None."""
    frame = lookup.kind(type(obj)).handler
    if frame is None or frame.kind != "wrapper" or frame.live is None:
        return None
    try:
        return frame.live(obj)
    except Exception:
        with foreign_errors(lookup.CANNOT_FLATTEN, source=type_name(type(obj))):
            raise


def list_arrays(arrays: Any, inside: Any, join: Join) -> tuple[list[Any], Any, Tensor | None, list[slice] | None]:
    """Return the arrays and, for errors, a function of the key of number i; a whole and places, or None.

    The arrays of a frame, which `open_frame` has opened, or mapping are its values. The whole is the lists of a column:
    over its values if they have one length, else joined. With places, each array is a matrix with several columns.
    """
    if type(inside) is tuple:
        names, objs, places = inside  # some frames take microseconds for a name
        return objs, lambda i: names[places[i].start], None, places
    inside, handler = lookup.unwrap(arrays if inside is None else inside)
    keys, whole = None, None
    if isinstance(handler, CompoundHandler):
        if handler.kind_of(inside) != "ragged":
            raise lookup.not_an_array(inside)
        whole = _read_ragged(inside, handler, join)
        objs = [whole] * bool(whole.shape[0])
    elif handler is not None and handler.kind == "mapping":
        with foreign_errors(lookup.CANNOT_FLATTEN, source=type_name(type(arrays))):
            keys, objs = handler.flatten(inside)
    elif not hasattr(arrays, "__iter__") and (refusal := lookup.kind(type(arrays)).refusal) is not None:
        raise refusal.error()  # such as a model, or a lazy frame
    elif type(arrays) in (list, tuple) or lookup.adapter_of(arrays) is None:
        objs = list(arrays)
    else:
        elements = iter(arrays if hasattr(arrays, "__iter__") else ())
        objs = list(islice(elements, 1))
        if objs and (isinstance(objs[0], list | tuple) or lookup.adapter_of(objs[0]) is not None):
            objs += elements
        else:  # the elements of a column or a buffer are no arrays
            whole = convert(arrays, to="dlx", copy=True)
            objs = [whole] * bool(whole.shape and whole.shape[0])
    return objs, (keys or range(len(objs))).__getitem__, whole, None


def _read_ragged(column: Any, handler: CompoundHandler, join: Join) -> Tensor:
    """Return one tensor over all rows of a list column."""
    parts = split(column, handler, None)
    source, inner = lookup.unwrap(parts["values"])
    if isinstance(inner, CompoundHandler):
        source = _read_ragged(source, inner, functools.partial(_refuse_nested, column))
    try:
        values, offsets = convert({"values": source, "offsets": parts["offsets"]}, to="dlx").values()
    except DlxError as error:
        error.root, error.path = "arrays", tuple(map(Attribute, error.path))
        raise
    bounds = memoryview(offsets).tolist()
    length = bounds[1] - bounds[0] if len(bounds) > 1 else 0
    if bounds != (list(range(bounds[0], bounds[-1] + 1, length)) if length else bounds[:1] * len(bounds)):
        return join(source, values, offsets, bounds)
    shape, strides = (len(bounds) - 1, length, *values.shape[1:]), (length * values.strides[0], *values.strides)
    return view(values, shape, strides, bounds[0] * values.strides[0])


def _refuse_nested(column: Any, *_: Any) -> Any:
    fix = "Convert dlx.parts(x) instead."
    raise LayoutError("its lists are nested and differ in length", source=name_of(column), fix=fix)
