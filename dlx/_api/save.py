"""`save`: write an array, or the arrays of a tree, to a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dlx._core.public import public
from dlx._support.reflect import type_name
from dlx._support.text import one_line
from dlx.errors import DlxError, FileError

__all__ = ["save"]


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
        or metadata, or if two arrays share memory and the format is .safetensors, which cannot express that.
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
    from dlx._api.items import collect_items, text_metadata, write_items  # most programs save no file
    from dlx._files.writing import FORMATS, WITH_METADATA

    target = Path(os.fsdecode(path))
    kind = target.suffix if format is None else f".{format.removeprefix('.')}"
    if kind not in FORMATS:
        reason = f"unknown format {one_line(kind, 20)!r} (supported: {', '.join(FORMATS)})"
        raise FileError(reason, source=str(target), fix="Pass format=, or a path with one of these suffixes.")
    if metadata is None:
        kept = text_metadata(tree) if kind in WITH_METADATA else {}
    else:
        kept = dict(metadata)
        if not all(isinstance(each, str) for pair in kept.items() for each in pair):
            raise TypeError("metadata must map text to text")
        if kept and kind not in WITH_METADATA:
            raise FileError(f"{kind} cannot store metadata", source=str(target), fix="Write .safetensors or .arrow.")
    try:
        found = collect_items(tree, target.stem)
        if found.others:
            name, value = found.others[0]
            reason = f"it contains {one_line(name, 80)!r}, a {type_name(type(value))}, which is not an array"
            raise FileError(reason, fix="Leave it out, or make it an array.")
        write_items(found.items, target, kept, kind=kind, force=True, sync=False)
    except DlxError as error:
        error.complete(source=type_name(type(tree)))
        if error.source != str(target):
            error.target = kind
        raise
