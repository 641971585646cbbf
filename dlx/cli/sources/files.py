"""Resolve a source on the command line: a file, recognized by its first bytes, an object, or an abstract tensor."""

from __future__ import annotations

import errno
import importlib
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from dlx._core.text import one_line
from dlx._core.types import DType
from dlx._files.header import MAX_BYTES, MAX_NDIM, File, Stored, needed, unreadable
from dlx._files.objects import load_checkpoint, opened_arrow
from dlx._files.reading import OBJECTS, kind_of, opened, read
from dlx.cli.model import BadInput, Entry, Source, aligned_to, counted
from dlx.cli.render.screen import Screen
from dlx.errors import DlxError, DTypeError, FileError, FrameworkNotInstalledError, sentences

__all__ = ["open_source"]

_OBJECT = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<path>[^\W\d]\w*(\.[^\W\d]\w*|\[[^\[\]]+\])*)")
_ABSTRACT = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\]")


def open_source(name: str, screen: Screen, *, shown: str = "") -> Source:
    """Return what a word of the command line stands for; reading a file is shown on the screen.

    `shown` is what the source is called where that is another name.

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
                source = _file(path)
                return replace(source, name=called) if called else source
        if re.search(r"\.py(:|$)", name):
            raise BadInput("an object is named by its module, without folders and .py, as in 'mod:x' or 'pkg.mod:x'")
        abstract, named = _ABSTRACT.fullmatch(name), _OBJECT.fullmatch(name)
        if abstract is not None:
            return _abstract(name, abstract)
        if named is not None:
            from dlx.cli.sources.objects import read_object

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


def _file(path: Path) -> Source:
    with opened(path) as file:
        kind = kind_of(file)
        if kind in OBJECTS:
            return {".pt": _read_torch, ".arrow": _read_arrow, ".parquet": _read_parquet}[kind](file)
        with read(file, kind) as parts:
            entries = [_entry(each, contents.kind) for _, contents in parts for each in contents.entries]
            for _, contents in parts:
                if contents.close is not None:
                    contents.close()
            metadata = {
                key: f"an array of {len(value):,}" if isinstance(value, list) else str(value)
                for _, contents in reversed(parts)
                for key, value in contents.metadata.items()
            }
            size, notes = sum(each.size for each, _ in parts), tuple(note for _, each in parts for note in each.notes)
            return Source(str(path), kind.removesuffix(".index.json"), tuple(entries), size, notes, metadata)


NUMPY_ALIGNMENT = 16  # bytes: what malloc promises, and numpy asks for no more


def _entry(stored: Stored, kind: str) -> Entry:
    """Return the entry of an array in a file, as loading the file would give it."""
    loader, offset = {".npy": "numpy", ".npz": "numpy"}.get(kind, ""), stored.offset
    # Some libraries read a file into memory of their own, others map it.
    alignment = NUMPY_ALIGNMENT if loader or offset is None else min(aligned_to(offset), NUMPY_ALIGNMENT)
    return Entry(
        stored.name, stored.dtype, stored.dtype_name, stored.shape, stored.nbytes, "file", stored.order, offset,
        stored.swapped, loader, alignment, sentences(stored.refused, stored.fix), stored.notes,
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


def _read_torch(file: File) -> Source:
    """List a checkpoint of torch."""
    from dlx.cli.sources.objects import dotted, entries_of

    loaded, saved = load_checkpoint(file)
    entries, rest = entries_of(loaded, dotted)
    notes = ["read by torch, weights_only, memory-mapped"]
    notes += [f"saved on {', '.join(saved)}"] if saved else []
    notes += [f"{counted(rest, 'value')} of other kinds"] if rest else []
    if not entries:
        raise FileError("there is no tensor in it")
    return Source(str(file.path), ".pt", tuple(entries), file.size, tuple(notes))


def _read_arrow(file: File) -> Source:
    """Read the schema of an Arrow IPC file, or of a stream in a file."""
    with opened_arrow(file) as (reader, batches, note):
        pa = needed("pyarrow", ".arrow")
        entries = tuple(_column(pa, field, None, batches) for field in reader.schema)
    return Source(str(file.path), ".arrow", entries, file.size, ("the schema only", note))


def _read_parquet(file: File) -> Source:
    """Read the schema and the number of rows of a Parquet file."""
    pa = needed("pyarrow", ".parquet")
    try:
        with importlib.import_module("pyarrow.parquet").ParquetFile(file.path) as found:
            rows, groups = found.metadata.num_rows, found.metadata.num_row_groups
            entries = tuple(_column(pa, field, rows, groups) for field in found.schema_arrow)
    except Exception as error:
        raise unreadable("pyarrow", error) from error
    notes = ("the schema only", f"row groups: {groups:,}")
    return Source(str(file.path), ".parquet", entries, file.size, notes)


def _column(pa: Any, field: Any, rows: int | None, parts: int) -> Entry:
    """Return the entry of a column, which fares as a column of a few values does."""
    from dlx._api import convert as api
    from dlx._api.describe import describe

    count = 1 if rows is None else min(rows, 1)
    one = _few(pa, field.type, count)
    sample = pa.chunked_array([one] * min(max(parts, 1), 2), field.type)
    notes = ("nulls are allowed",) if field.nullable else ()
    shape: tuple[int, ...] | None = None if rows is None else (rows,)
    error = api.plan(sample, to="dlx").error
    if isinstance(error, DlxError):
        refused = sentences(error.reason, error.fix)
        return Entry(field.name, None, str(field.type), shape, None, refused=refused, notes=notes, sample=sample)
    info = describe(one)
    assert info.dtype is not None and info.shape is not None
    shape = shape and (*shape, *info.shape[1:])
    nbytes = None if shape is None else -(-prod(shape) * info.dtype.bits // 8)
    return Entry(field.name, info.dtype, str(field.type), shape, nbytes, order="C", notes=notes, sample=sample)


MAX_SAMPLE = 1 << 20  # elements of a fixed-size list whose values are made up; larger ones are planned as empty


def _few(pa: Any, kind: Any, count: int) -> Any:
    """Return an array of a type, with some values that are zero where it holds numbers, else empty."""
    if pa.types.is_fixed_size_list(kind):
        count = count if kind.list_size * count <= MAX_SAMPLE else 0
        inside = _few(pa, kind.value_type, count * kind.list_size)
        if len(inside) < count * kind.list_size:
            count = 0
        # Not FixedSizeListArray.from_arrays, which divides by a size that may be 0, and ends the process.
        return pa.Array.from_buffers(kind, count, [None], children=[inside])
    if pa.types.is_primitive(kind):
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(bytes(16 * max(count, 1)))])
    return pa.nulls(0, kind)
