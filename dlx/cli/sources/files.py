"""Resolve a source on the command line: a file, recognized by its first bytes, an object, or an abstract tensor."""

from __future__ import annotations

import errno
import importlib
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from dlx._api.convert import plan
from dlx._api.describe import describe
from dlx._core.types import DType
from dlx._files.header import MAX_BYTES, MAX_NDIM, File, Stored, needed, unreadable
from dlx._files.mapping import mapped
from dlx._files.objects import load_checkpoint
from dlx._files.reading import OBJECTS, kind_of, opened, read
from dlx._support.screen import Screen
from dlx._support.text import one_line
from dlx.cli.model import BadInput, Entry, Source, counted
from dlx.cli.sources.objects import dotted, entries_of, read_object
from dlx.errors import DlxError, DTypeError, FileError, FrameworkNotInstalledError, sentences
from dlx.typing import Readonly

__all__ = ["open_source"]

_OBJECT = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<path>[^\W\d]\w*(\.[^\W\d]\w*|\[[^\[\]]+\])*)")
_ABSTRACT = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\]")


def open_source(name: str, screen: Screen, *, shown: str = "", readonly: Readonly | None = None) -> Source:
    """Return what a word of the command line stands for; reading a file is shown on the screen.

    `shown` is what the source is called where that is another name. With `readonly`, arrays of files are opened to be
    planned, as by ``dlx.open(readonly=...)``; without it a header is only listed.

    Raises
    ------
    BadInput
        If it stands for nothing, or is not what it says it is; the message names it.
    """
    path, called = Path(name), shown
    shown = shown or one_line(name, 120)
    try:
        if not name:
            raise BadInput("an empty name stands for nothing")
        if _exists(path):
            with screen.working(f"reading {name}"):
                source = _file(path, readonly)
                return replace(source, name=called) if called else source
        if re.search(r"\.py(:|$)", name):
            raise BadInput("an object is named by its module, without folders and .py, as in 'mod:x' or 'pkg.mod:x'")
        abstract, named = _ABSTRACT.fullmatch(name), _OBJECT.fullmatch(name)
        if abstract is not None:
            return _abstract(name, abstract)
        if named is not None:
            return read_object(name, named["module"], named["path"])
        raise BadInput(
            "there is no such file, and it is neither pkg.mod:attr nor a dtype with a shape such as 'float32[3,4]'"
        )
    except BadInput as error:
        raise BadInput(": ".join(filter(None, (shown, str(error))))) from error.__cause__
    except (FileError, FrameworkNotInstalledError) as error:
        raise BadInput(f"{shown}: {sentences(error.reason, error.fix)}") from error.__cause__
    except OSError as error:
        raise BadInput(f"{shown}: {error.strerror or error}") from error
    except ValueError as error:  # a name with a null byte
        raise BadInput(f"{shown}: {error}") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists() or path.is_symlink()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # a long way into an object is no file
            return False
        raise


def _file(path: Path, readonly: Readonly | None) -> Source:
    with opened(path) as file:
        kind = kind_of(file)
        if kind in OBJECTS:
            reader = {".pt": _read_torch, ".arrow": _read_arrow, ".parquet": _read_parquet}[kind]
            return reader(file, readonly or "copy")
        arrays = {} if readonly is None else {each.path: each.obj for each in _opened(path, readonly)}
        with read(file, kind) as parts:
            entries = tuple(_entry(each, arrays) for _, contents in parts for each in contents.entries)
            for _, contents in parts:
                if contents.close is not None:
                    contents.close()
            metadata = {
                key: f"an array of {len(value):,}" if isinstance(value, list) else str(value)
                for _, contents in reversed(parts)
                for key, value in contents.metadata.items()
            }
            size, notes = sum(each.size for each, _ in parts), tuple(note for _, each in parts for note in each.notes)
            return Source(str(path), kind.removesuffix(".index.json"), entries, size, notes, metadata)


def _opened(path: Path, readonly: Readonly) -> list[Entry]:
    """Return the arrays that `dlx.open` gives, which are those that are planned."""
    entries, _ = entries_of(mapped(path, private=readonly == "share"), lambda keys: str(keys[0]))
    return entries


def _entry(stored: Stored, arrays: dict[str, Any]) -> Entry:
    return Entry(
        stored.name, stored.dtype, stored.dtype_name, stored.shape, stored.nbytes, "file", stored.order, stored.offset,
        stored.swapped, sentences(stored.refused, stored.fix), stored.notes, obj=arrays.get(stored.name),
    )  # fmt: skip


def _abstract(name: str, match: re.Match[str]) -> Source:
    try:
        dtype = DType(match["dtype"])
    except DTypeError as error:
        raise BadInput(str(error)) from error
    words = [each.strip() for each in match["shape"].split(",")]
    if not words[-1]:
        words.pop()  # float32[] and float32[3,]
    if not all(word.isdecimal() for word in words):
        raise BadInput("a shape is numbers with commas between them, as in 'float32[3,4]'")
    if len(words) > MAX_NDIM:
        raise BadInput(f"it has {len(words)} dimensions, and dlx reads at most {MAX_NDIM}")
    shape = tuple(int(word) if len(word) < 20 else MAX_BYTES for word in words)
    nbytes = -(-prod(shape) * dtype.bits * dtype.lanes // 8)
    if max(nbytes, *shape, 0) >= MAX_BYTES:
        raise BadInput("it is larger than any memory: there are 2**63 bytes at most")
    note = "an abstract tensor: compact, aligned, writable host memory"
    return Source(name, "abstract", (Entry("", dtype, dtype.name, shape, nbytes, "cpu", "C", notes=(note,)),))


# ---- read by another library -----------------------------------------------------------------------------------------


def _read_torch(file: File, readonly: Readonly) -> Source:
    """List a checkpoint of torch."""
    loaded, saved = load_checkpoint(file)
    entries, rest = entries_of(loaded, dotted)
    notes = ["read by torch, weights_only, memory-mapped"]
    notes += [f"saved on {', '.join(saved)}"] if saved else []
    notes += [f"{counted(rest, 'value')} of other kinds"] if rest else []
    if not entries:
        raise FileError("there is no tensor in it")
    return Source(str(file.path), ".pt", tuple(entries), file.size, tuple(notes))


def _read_arrow(file: File, readonly: Readonly) -> Source:
    """List the columns of an Arrow IPC file, or of a stream in a file."""
    entries = tuple(replace(each, refused=_refusal(each.obj)) for each in _opened(file.path, readonly))
    return Source(str(file.path), ".arrow", entries, file.size)


def _read_parquet(file: File, _: Readonly) -> Source:
    """List the columns of a Parquet file, which `dlx.open` refuses."""
    pa = needed("pyarrow", ".parquet")
    try:
        with importlib.import_module("pyarrow.parquet").ParquetFile(file.path) as found:
            rows, groups = found.metadata.num_rows, found.metadata.num_row_groups
            entries = tuple(_column(pa, field, rows) for field in found.schema_arrow)
    except Exception as error:
        raise unreadable("pyarrow", error) from error
    try:
        mapped(file.path)
    except FileError as error:
        entries = tuple(replace(each, error=error) for each in entries)
    notes = ("the schema only", f"row groups: {groups:,}")
    return Source(str(file.path), ".parquet", entries, file.size, notes)


def _refusal(column: Any) -> str:
    """Return why a column is no array outside of Arrow; empty if it is one."""
    error = plan(column, to="dlx").error
    return sentences(error.reason, error.fix) if isinstance(error, DlxError) else ""


def _column(pa: Any, field: Any, rows: int) -> Entry:
    """Return what the schema says of a column."""
    empty, name = pa.nulls(0, field.type), str(field.type)
    refused = _refusal(empty)
    notes = ("nulls are allowed",) if field.nullable else ()
    if refused:
        return Entry(field.name, None, name, (rows,), None, refused=refused, notes=notes)
    info = describe(empty)
    assert info.dtype is not None and info.shape is not None
    shape = (rows, *info.shape[1:])
    nbytes = -(-prod(shape) * info.dtype.bits // 8)
    return Entry(field.name, info.dtype, name, shape, nbytes, order="C", notes=notes)
