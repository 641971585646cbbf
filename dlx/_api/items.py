"""The arrays of a tree as items of a file, and their writing; `save` and the command `dlx convert` use both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlx._api.convert import convert
from dlx._api.describe import describe
from dlx._api.shares_memory import collision
from dlx._core.native import Tensor
from dlx._core.types import contiguous
from dlx._engine.failures import Failures
from dlx._engine.tree import Tree
from dlx._files.atomic import replace_file
from dlx._files.header import NO_ARRAYS
from dlx._files.selection import dotted_path
from dlx._files.writing import Item, write
from dlx._registry import lookup
from dlx._registry.generic import Deferred
from dlx._support.reflect import type_name
from dlx._support.text import one_line
from dlx.errors import DlxError, FileError

__all__ = ["Collected", "collect_items", "text_metadata", "write_items"]


def text_metadata(tree: Any) -> dict[str, str]:
    """Return the metadata of an opened file that is text, if `tree` is one."""
    found = getattr(tree, "metadata", None) if getattr(type(tree), "is_file", False) is True else None
    return {key: text for key, text in (found or {}).items() if isinstance(text, str)}


class Collected(NamedTuple):
    """The arrays of a tree, and the names and values of its other leaves."""

    items: list[Item]
    others: list[tuple[str, Any]]


def collect_items(tree: Any, stem: str) -> Collected:
    """Return the arrays of a tree, to be read later; one without a name is called `stem`."""
    leaves: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    others: list[tuple[str, Any]] = []
    handler = lookup.kind(type(tree)).handler
    if handler is None:
        leaves[stem] = tree, ()
    else:
        for path, child, is_array in Tree(tree, handler, Failures("")).leaves():
            name = dotted_path(path, str) or stem
            if not is_array or (isinstance(child, Deferred) and child.info.dtype_name in NO_ARRAYS):
                others.append((name, child))
            elif name in leaves:
                raise FileError(f"two arrays would be named {one_line(name, 80)!r}", fix="Rename one in the source.")
            else:
                leaves[name] = child, path
    if not leaves:
        raise FileError("it contains no array", fix="Pass an array, or a container of arrays.")
    arrays = [obj for obj, _ in leaves.values()]
    try:
        tensors = convert(arrays, to="dlx", copy=False, detach=True)
    except DlxError:
        tensors = [_share(array) for array in arrays]
    items = [_item(name, *leaf, tensor) for (name, leaf), tensor in zip(leaves.items(), tensors, strict=True)]
    return Collected(items, others)


def _share(array: Any) -> Any:
    """Return a tensor over an array's memory, or the array itself if it is copied or refused when it is read."""
    try:
        return convert(array, to="dlx", copy=False, detach=True)
    except DlxError:
        return array


def _item(name: str, obj: Any, path: tuple[Any, ...], shared: Any) -> Item:
    """Return an array as an item, without reading it if its dtype and shape are known."""
    if type(shared) is Tensor and shared.is_host:
        return Item(name, shared.dtype, shared.shape, shared.nbytes, lambda: shared, shared)

    def read() -> Tensor:
        try:
            tensor: Tensor = convert(obj, to="dlx", device="cpu", detach=True)
        except DlxError as error:
            error.complete(path=path, source=type_name(type(obj)))
            raise
        return tensor

    info = describe(obj)
    if info.dtype is None or info.shape is None:
        info = describe(read())
    assert info.dtype is not None and info.shape is not None
    nbytes = -(-math.prod(info.shape) * info.dtype.bits * info.dtype.lanes // 8)
    return Item(name, info.dtype, info.shape, nbytes, read, shared)


def write_items(
    items: Sequence[Item],
    path: Path,
    metadata: dict[str, str],
    *,
    kind: str = "",
    force: bool,
    sync: bool,
    advance: Callable[[int], object] = int,
) -> None:
    """Write arrays to a file, by default in the format of its suffix; `force` and `sync` are as in `replace_file`."""
    kind = kind or path.suffix
    if kind == ".safetensors":
        _check_ties(items)
    with replace_file(path, force=force, sync=sync) as file:
        write(file, kind, items, metadata, advance)


def _check_ties(items: Sequence[Item]) -> None:
    """Raise `FileError` for two arrays that share memory; the addresses alone tell most apart."""
    placed = sorted((item for item in items if type(item.source) is Tensor and item.nbytes), key=_address)
    if all(contiguous(item.shape, item.source.strides) for item in placed) and all(
        _address(one) + one.nbytes <= _address(other) for one, other in itertools.pairwise(placed)
    ):
        return
    pair = collision([item.source for item in placed], [])
    if pair is not None:
        one, other = sorted(one_line(placed[each].name, 80) for each in pair)
        reason = f"{one!r} and {other!r} share memory, which .safetensors cannot store"
        raise FileError(reason, fix="Leave one of them out, or copy it.")


def _address(item: Item) -> int:
    return item.source.data_ptr  # type: ignore[no-any-return]
