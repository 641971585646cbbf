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
from dlx._core.types import SUBBYTE_PADDED, DType
from dlx._engine.casting import Casts
from dlx._engine.failures import Failures
from dlx._engine.tree import Tree
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
        dots: ``"model.layers[0].weight"``. A single array is named like the file, without its suffix.
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
        kept = text_metadata(tree) if kind in WITH_METADATA else {}
    else:
        kept = dict(metadata) if isinstance(metadata, Mapping) else {0: metadata}
        if not all(isinstance(each, str) for pair in kept.items() for each in pair):
            raise TypeError("metadata must map text to text")
        if kept and kind not in WITH_METADATA:
            raise FileError(f"{kind} cannot store metadata", source=target, fix="Write .safetensors or .arrow.")
    try:
        items, others = collect_items(tree, stem)
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


def collect_items(tree: Any, stem: str) -> tuple[list[Item], list[tuple[str, Any]]]:
    """Return the arrays of a tree, to be read later, and its other leaves; an array without a name is called `stem`."""
    items: dict[str, Item] = {}
    others: list[tuple[str, Any]] = []
    handler = lookup.kind_of(tree).handler
    leaves: Iterable[tuple[tuple[Any, ...], Any, bool]] = [((), tree, True)]
    casting: list[tuple[tuple[Any, ...], Any]] = []  # views that change dtypes; of others the source is written
    if handler is not None:
        found = Tree(tree, handler, Failures(""))
        for path, obj, compound, *_ in found.compounds():
            if compound.kind_of(obj) in ("csr", "csc", "bsr", "coo"):
                reason = f"{one_line(dotted_path(path, str) or stem, 80)!r} is sparse: several arrays and a shape"
                dense = f", or call {compound.compound.dense} first" if compound.compound.dense else ""
                raise FileError(reason, fix=f"Save the arrays of dlx.parts(x) without 'shape'{dense}.")
        leaves = found.leaves()
        views = [(i, obj) for i, (obj, *_) in enumerate(found.containers()) if is_view(obj)]
        casting = [(found.path_in(i), casts) for i, obj in views if (casts := obj._scope.options.request.casts)]
    for path, child, is_array in leaves:
        name = dotted_path(path, str)
        if not is_array or (isinstance(child, Deferred) and child.info.dtype_name in NO_ARRAYS):
            others.append((name, child))
        elif name in items:
            raise FileError(f"two arrays would be named {one_line(name, 80)!r}", fix="Rename one in the source.")
        else:
            casts = next((casts for above, casts in casting if path[: len(above)] == above), None)
            items[name] = cast_item(_create_item(name, child, path), casts)
    if not items:
        raise FileError("it contains no array", fix="Pass an array, or a container of arrays.")
    return [each._replace(name=stem) for each in items.values()] if {*items} == {""} else [*items.values()], others


def cast_item(item: Item, casts: Casts | None) -> Item:
    """Return an item with the dtype that a call gives it; it is cast when it is read."""
    new = None if casts is None else casts.find(item.dtype)
    if new is None:
        return item
    change = {item.dtype.name: new}
    nbytes = _count_bytes(item.shape, new)
    return Item(item.name, new, item.shape, nbytes, None, lambda: convert(item.read(), to="dlx", dtype=change))


def _count_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    return -(-math.prod(shape) * dtype.bits * dtype.lanes // 8)


def _create_item(name: str, obj: Any, path: tuple[Any, ...]) -> Item:
    """Return an array as an item; one that is copied or refused is read later, if its dtype and shape are known."""
    try:
        shared = convert(obj, to="dlx", copy=False, detach=True)
        if shared.is_host and not shared.flags & SUBBYTE_PADDED:
            return Item(name, shared.dtype, shared.shape, shared.nbytes, shared, None)
    except DlxError:
        shared = obj

    def read() -> Tensor:
        try:
            tensor: Tensor = convert(obj, to="dlx", device="cpu", detach=True)
        except DlxError as error:
            error.complete(path=path, source=type_name(type(obj)))
            raise
        return tensor_repack(tensor_copy(tensor, False)) if tensor.flags & SUBBYTE_PADDED else tensor

    info = describe(obj)
    if info.dtype is None or info.shape is None:
        info = describe(read())
    assert info.dtype is not None and info.shape is not None
    return Item(name, info.dtype, info.shape, _count_bytes(info.shape, info.dtype), shared, read)


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
    kinds = {kind: kind is Tensor or hasattr(kind, "__array_interface__") for kind in {type(x.source) for x in items}}
    found = [item for item in items if item.nbytes and kinds[type(item.source)]]
    placed = sorted((item for item in found if type(item.source) is Tensor), key=lambda item: item.source.data_ptr)
    starts = [item.source.data_ptr for item in placed]
    ends = map(operator.add, starts, [item.source.nbytes for item in placed])
    are_rows = all(is_row_major(item.shape, item.source.strides) for item in placed)
    if are_rows and all(map(operator.le, ends, starts[1:])) and len(placed) == len(found):
        return
    if pair := collision([item.source for item in found], []):
        one, other = sorted(one_line(found[each].name, 80) for each in pair)
        reason = f"{one!r} and {other!r} share memory, which .safetensors cannot store"
        raise FileError(reason, fix="Leave one of them out, or copy it.")
