"""Sources of the command line: files, globs, folders, stdin, objects and abstract tensors."""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
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
from dlx._files.reading import ENDS, OBJECTS, kind_of, opened, read
from dlx._files.safetensors import INDEX
from dlx._files.signatures import other_folder
from dlx._support.screen import Screen
from dlx._support.text import one_line
from dlx.cli.model import BadInput, Entry, Source, counted
from dlx.cli.objects import dotted, entries_of, read_object
from dlx.errors import DlxError, DTypeError, FileError, FrameworkNotInstalledError, sentences
from dlx.typing import Readonly

_OBJECT = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<path>[^\W\d]\w*(\.[^\W\d]\w*|\[[^\[\]]+\])*)")
_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_GLOB = re.compile(r"[*?]|\[[^\]]+\]")
_ABSTRACT = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\]")


def open_sources(
    words: list[str], screen: Screen, readonly: Readonly | None
) -> tuple[list[Source], list[BadInput | DlxError]]:
    """Return the sources that words name, and the errors of others; raise the only error if there is no source.

    With `readonly`, arrays of files are opened to be planned, as by ``dlx.open(readonly=...)``; without it a header is
    only listed.
    """
    sources: list[Source] = []
    errors: list[BadInput | DlxError] = []
    for word in words:
        try:
            for name in _names(word):
                try:
                    with stdin_file(screen) if name == "-" else contextlib.nullcontext(name) as path:
                        sources.append(_open_source(path, screen, "-" if name == "-" else "", readonly))
                except (BadInput, DlxError) as error:
                    errors.append(error)
        except BadInput as error:
            errors.append(error)
    if len(errors) == 1 and not sources:
        raise errors[0]
    return sources, errors


def _names(word: str) -> Iterator[str]:
    """Give the names of all sources that one word names."""
    shown = one_line(word, 120)
    if _URL.match(word):
        raise BadInput(f"{shown}: dlx reads files of this machine only: fetch it first, for instance with curl -LO")
    with contextlib.suppress(OSError, ValueError):  # opening it fails, too
        if os.path.isdir(word):  # noqa: PTH112
            yield from _folder(Path(word), shown)
            return
        if not os.path.lexists(word) and _GLOB.search(word):
            found = sorted(glob.glob(word, recursive=True))  # noqa: PTH207
            if not found and re.search(r"[*?]", word):
                raise BadInput(f"{shown}: no file has a name like this")
            if found:
                for each in found:
                    yield from _names(each)
                return
    yield word


def _folder(path: Path, shown: str) -> list[str]:
    """Return the files of a folder that dlx reads; the folder itself if it is one checkpoint or store."""
    names = sorted(each.name for each in path.iterdir() if each.is_file())
    if other_folder(path) is not None or any(name.endswith(INDEX) for name in names):
        return [str(path)]
    known = [str(path / name) for name in names if name.endswith(ENDS)]
    if known:
        return known
    ends = ", ".join(ENDS)
    raise BadInput(f"{shown}: none of the {len(names)} files in this folder has a name that ends in one of {ends}")


@contextlib.contextmanager
def stdin_file(screen: Screen) -> Iterator[str]:
    """Give a path of stdin, or of its contents in a file without a name if it is a pipe."""
    if sys.stdin is None:
        raise BadInput("-: stdin is closed")
    descriptor = sys.stdin.fileno()
    with contextlib.ExitStack() as stack:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            kept = stack.enter_context(tempfile.TemporaryFile())
            with screen.working("reading stdin"):
                shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.flush()
            descriptor = kept.fileno()
        yield f"/proc/self/fd/{descriptor}"


def _open_source(name: str, screen: Screen, called: str, readonly: Readonly | None) -> Source:
    """Return the source that a name means; `called` is the name to show if it is another one."""
    path, shown = Path(name), called or one_line(name, 120)
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
        reason = "it is neither pkg.mod:attr nor a dtype with a shape such as 'float32[3,4]'"
        raise BadInput(f"there is no such file, and {reason}")
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
            readers = {".pt": _read_torch, ".arrow": _read_arrow, ".parquet": _read_parquet}
            return readers[kind](file, readonly or "copy")
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
    """Return the arrays of `dlx.open`, which are planned."""
    return entries_of(mapped(path, private=readonly == "share"), lambda keys: str(keys[0]))[0]


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
    words = words if words[-1] else words[:-1]  # float32[] and float32[3,]
    if not all(word.isdecimal() for word in words):
        raise BadInput("a shape is numbers with commas between them, as in 'float32[3,4]'")
    if len(words) > MAX_NDIM:
        raise BadInput(f"it has {len(words)} dimensions, and dlx reads at most {MAX_NDIM}")
    shape = tuple(int(word) if len(word) < 20 else MAX_BYTES for word in words)
    nbytes = -(-prod(shape) * dtype.bits * dtype.lanes // 8)
    if max(nbytes, *shape, 0) >= MAX_BYTES:
        raise BadInput("it is larger than any memory: there are 2**63 bytes at most")
    notes = ("an abstract tensor: compact, aligned, writable host memory",)
    return Source(name, "abstract", (Entry("", dtype, dtype.name, shape, nbytes, "cpu", "C", notes=notes),))


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
    """Return the reason why a column is no array outside of Arrow; empty if it is one."""
    error = plan(column, to="dlx").error
    return sentences(error.reason, error.fix) if isinstance(error, DlxError) else ""


def _column(pa: Any, field: Any, rows: int) -> Entry:
    """Describe a column by its schema."""
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
