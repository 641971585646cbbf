"""`save`: write an array, or the arrays of a tree, to a file. The command `dlx convert` uses the same functions."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlx._api.convert import convert
from dlx._api.describe import describe
from dlx._api.shares_memory import collision
from dlx._core.native import Tensor, tensor_copy, tensor_repack
from dlx._core.public import public
from dlx._core.types import SUBBYTE_PADDED
from dlx._engine.casting import Casts
from dlx._engine.compound import Compounds
from dlx._engine.failures import Failures
from dlx._engine.tree import Leaf, Tree
from dlx._files.atomic import replace_file
from dlx._files.header import NO_ARRAYS
from dlx._files.selection import dotted_path
from dlx._files.writing import FORMATS, WITH_METADATA, Item, is_row_major, write
from dlx._registry import lookup
from dlx._registry.generic import Deferred
from dlx._support.reflect import type_name
from dlx._support.text import one_line
from dlx._views.base import is_view
from dlx.errors import DlxError, FileError


@public
def save(tree: Any, path: str | bytes | os.PathLike[Any], *, format: str | None = None, metadata: Any = None) -> None:
    """Write an array, or the arrays of a tree, to a file that `open` and the format's own library read.

    The arrays may belong to any framework. Those in host memory are written without a copy. The file appears under its
    name once it is complete: if the call fails or the process is killed, an existing file stays unchanged.

    Parameters
    ----------
    tree
        An array, a container of arrays, or an opened file. An array in nested containers is named by its path, with
        dots: ``"model.layers[0].weight"``. A single array is named like the file, without its suffix. A ragged array
        is a column of lists in .arrow; elsewhere its parts are saved, as ``"x.values"`` and ``"x.offsets"``.
    path
        The file to write; an existing file is replaced.
    format
        ``"safetensors"``, ``"npy"``, ``"npz"`` or ``"arrow"``; default: the suffix of `path`.
    metadata
        A mapping from text to text, for .safetensors and .arrow. Default: the metadata of an opened file that `tree`
        is, if the format can store it.

    Raises
    ------
    FileError
        If the tree contains no array or an object that is not an array, if the format cannot store its names, shapes
        or metadata, if two arrays share memory and the format is .safetensors, which cannot express that, or if another
        process or thread is writing the file.
    DTypeError
        If the format lacks a dtype: dlx does not change dtypes.
    ConversionError
        If an array has no ordinary memory.
    OSError
        If the file cannot be written.
    AdapterNotFoundError, TypeError
        If the call is invalid.

    Notes
    -----
    A file is complete even if the process is killed, but after a power failure only once the system has written it
    to the disk (``os.sync()``).

    Examples
    --------
    >>> import dlx, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "x.safetensors"
    >>> dlx.save({"a": dlx.empty(3, "uint8"), "b": {"c": dlx.empty((2, 2), "float16")}}, file)
    >>> sorted(dlx.open(file))
    ['a', 'b.c']
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"path must be a path, found {type_name(type(path))}. Save to a path, and read that file.")
    target = os.fsdecode(path)
    stem, suffix = os.path.splitext(os.path.basename(target))  # noqa: PTH119, PTH122 - pathlib takes longer
    kind = suffix if format is None else f".{str(format).removeprefix('.')}"
    if kind not in FORMATS:
        reason = f"unknown format {one_line(kind, 20)!r} (supported: {', '.join(FORMATS)})"
        raise FileError(reason, source=target, fix="Pass format=, or a path with one of these suffixes.")
    if metadata is None:
        kept: dict[Any, str] = text_metadata(tree) if kind in WITH_METADATA else {}
    else:
        kept = dict(metadata) if isinstance(metadata, Mapping) else {0: metadata}
        if not all(isinstance(each, str) for pair in kept.items() for each in pair):
            raise TypeError("metadata must map text to text")
        if kept and kind not in WITH_METADATA:
            raise FileError(f"{kind} cannot store metadata", source=target, fix="Write .safetensors or .arrow.")
    try:
        items, others = collect_items(tree, stem, has_lists=kind == ".arrow")
        if others:
            name, value = others[0]
            is_refused = isinstance(value, Deferred)  # such as a link in HDF5
            what = value.blocker.because if is_refused else f"it is of the type {type_name(type(value))}"
            reason = f"{one_line(name, 80)!r} is not an array: {what}"
            raise FileError(reason, fix="Leave it out, or make it an array.")
        write_items(items, target, kept, kind=kind, force=True, sync=False)
    except DlxError as error:
        error.complete(source=type_name(type(tree)))
        if error.source != target:
            error.target = kind
        raise


def text_metadata(tree: Any) -> dict[str, str]:
    """Return the metadata of an opened file that is text, if `tree` is one."""
    found = getattr(tree, "metadata", None) if getattr(type(tree), "is_file", False) is True else None
    return {key: text for key, text in (found or {}).items() if isinstance(text, str)}


def collect_items(
    tree: Any, stem: str, casts: Casts | None = None, *, has_lists: bool = False
) -> tuple[list[Item], list[tuple[str, Any]]]:
    """Return the arrays of a tree, to be read later, and its other leaves; an array without a name is called `stem`.

    With `has_lists`, a ragged array is one item, else one for each of its parts.
    """
    items: dict[str, Item] = {}
    others: list[tuple[str, Any]] = []
    columns: dict[int, list[Item]] = {}  # the parts of ragged arrays that are one item
    if is_view(tree):  # else all its arrays would be cast at once
        casts, tree = casts or tree._scope.options.request.casts, tree._to_stored()
    handler = lookup.kind_of(tree).handler
    leaves: Iterable[Leaf] = [((), tree, True, -1)]
    if handler is not None:
        found = Tree(tree, handler, Failures(""), compounds=Compounds(None))
        for path, obj, compound, *_ in found.compounds():
            if compound.kind_of(obj) in ("csr", "csc", "bsr", "coo"):
                reason = f"{one_line(dotted_path(path, str) or stem, 80)!r} is sparse: several arrays and a shape"
                dense = f", or call {compound.compound.dense} first" if compound.compound.dense else ""
                fix = f"Save the arrays of dlx.parts(x) without 'shape' to .npz or .safetensors{dense}."
                raise FileError(reason, fix=fix)
        leaves = found.leaves()
    for path, child, is_array, whole in leaves:
        is_column = has_lists and whole >= 0
        name = dotted_path(found.path_in(whole) if is_column else path, str)
        if not is_array or (isinstance(child, Deferred) and child.info.dtype_name in NO_ARRAYS):
            others.append((name, child))
        elif name in items and whole not in columns:
            raise FileError(f"two arrays would be named {one_line(name, 80)!r}", fix="Rename one in the source.")
        else:
            is_offsets = whole >= 0 and path[-1] == "offsets"
            items[name] = _create_item(name, child, path, None if is_offsets else casts)
            if is_column:
                columns.setdefault(whole, []).append(items[name])
                values, *lists = columns[whole]
                nbytes = sum(part.nbytes for part in columns[whole])
                items[name] = values._replace(lists=tuple(lists), nbytes=nbytes)
    if not items:
        raise FileError("it contains no array", fix="Pass an array, or a container of arrays.")
    return [items[""]._replace(name=stem)] if [*items] == [""] else [*items.values()], others


def _create_item(name: str, obj: Any, path: tuple[Any, ...], casts: Casts | None) -> Item:
    """Return an array as an item, which is read later if it is copied, cast or refused, and its dtype is known."""
    try:
        source = convert(obj, to="dlx", copy=False, detach=True)
        if source.is_host and not source.flags & SUBBYTE_PADDED and not (casts and casts.find(source.dtype)):
            return Item(name, source.dtype, source.shape, source.nbytes, source, None)
    except DlxError:
        source = obj

    def read(dtype: Any = casts and casts.dtypes) -> Tensor:
        try:
            tensor: Tensor = convert(obj, to="dlx", device="cpu", detach=True, dtype=dtype)
        except DlxError as error:
            error.complete(path=path, source=type_name(type(obj)))
            raise
        return tensor_repack(tensor_copy(tensor, False)) if tensor.flags & SUBBYTE_PADDED else tensor

    info = describe(obj)
    if info.dtype is None or info.shape is None:
        info = describe(read(None))
    assert info.dtype is not None and info.shape is not None
    dtype = (casts and casts.find(info.dtype)) or info.dtype
    nbytes = -(-math.prod(info.shape) * dtype.bits * dtype.lanes // 8)
    return Item(name, dtype, info.shape, nbytes, source if dtype == info.dtype else None, read)


def write_items(
    items: Sequence[Item],
    path: str | Path,
    metadata: dict[str, str],
    *,
    kind: str = "",
    force: bool,
    sync: bool,
    advance: Callable[[int], object] = int,
) -> None:
    """Write arrays to a file, by default in the format of its suffix; `force` and `sync` are as in `replace_file`."""
    kind = kind or Path(path).suffix
    if kind == ".safetensors":
        _check_ties(items)
    with replace_file(path, force=force, sync=sync) as file:
        write(file, kind, items, metadata, advance)


def _check_ties(items: Sequence[Item]) -> None:
    """Raise `FileError` for two arrays that share memory; the addresses alone tell most apart."""
    found = [x for x in items if x.nbytes and (x.load is None or hasattr(type(x.source), "__array_interface__"))]
    placed = sorted((x.source for x in found if type(x.source) is Tensor), key=lambda each: each.data_ptr)
    are_rows = len(placed) == len(found) and all(is_row_major(each.shape, each.strides) for each in placed)
    starts = [each.data_ptr for each in placed]
    if are_rows and all(map(operator.le, map(operator.add, starts, [each.nbytes for each in placed]), starts[1:])):
        return
    if pair := collision([item.source for item in found], []):
        one, other = sorted(one_line(found[each].name, 80) for each in pair)
        reason = f"{one!r} and {other!r} share memory, which .safetensors cannot store"
        raise FileError(reason, fix="Leave one of them out, or copy it.")
