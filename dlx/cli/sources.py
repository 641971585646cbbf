"""Sources of the command line: files, globs, folders, stdin, objects and abstract tensors.

Headers of files are listed without the engine of conversions, which takes longer to import than most headers to read.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import stat
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from dlx import errors
from dlx._core.types import DType
from dlx._files.header import MAX_BYTES, MAX_NDIM, File, Stored, import_reader, naming_reader
from dlx._files.npy import list_leaves, select_entries
from dlx._files.reading import LIBRARY_KINDS, SUFFIXES, detect_kind, open_file, read_contents
from dlx._files.safetensors import BIN_INDEX, DCP, INDEX, ZARR
from dlx._files.selection import Names, select_tree
from dlx._files.signatures import identify_folder
from dlx._support.screen import Screen
from dlx._support.text import one_line
from dlx.cli.model import BadInput, Entry, Source
from dlx.errors import DlxError, FileError, sentences
from dlx.typing import Readonly

# Patterns, compiled at their first use: most words are names of files.
_OBJECT = r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<path>[^\W\d]\w*(\.[^\W\d]\w*|\[[^\[\]]+\])*)"
_URL = r"(?i:[a-z][a-z0-9+.-]+://)"
_GLOB = r"[*?]|\[[^\]]+\]"
_ABSTRACT = r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\]"


def open_sources(
    words: list[str], screen: Screen, readonly: Readonly | None, only: Names = None, skip: Names = None
) -> tuple[list[Source], list[BadInput | DlxError]]:
    """Open the sources that `words` name, and collect errors; raise if there is one error and no source.

    `only` and `skip` select arrays by name, as in `dlx.open`. With `readonly`, files are opened as by
    ``dlx.open(readonly=...)``, for planning; without, headers are listed.
    """
    sources: list[Source] = []
    failed: list[BadInput | DlxError] = []
    for word in words:
        try:
            for name in _expand_word(word):
                try:
                    with stdin_file(screen) if name == "-" else contextlib.nullcontext(name) as path:
                        called = "-" if name == "-" else ""
                        sources.append(_open_source(path, screen, called, readonly, only, skip))
                except (BadInput, DlxError) as error:
                    failed.append(error)
        except BadInput as error:
            failed.append(error)
    if len(failed) == 1 and not sources:
        raise failed[0]
    return sources, failed


def _select(source: Source, only: Names, skip: Names) -> Source:
    """Return a source without members in members, with the arrays whose names the options select."""
    names = select_tree({each.path: None for each in source.entries}, only, skip)
    return source._replace(entries=tuple(each for each in source.entries if each.path in names))


def _expand_word(word: str) -> Iterator[str]:
    """Yield the names of all sources that one argument names."""
    shown = one_line(word, 120)
    if "://" in word and re.match(_URL, word):
        raise BadInput(f"{shown}: dlx cannot read URLs. Download the file first, for example with curl -LO")
    with contextlib.suppress(OSError, ValueError):  # opening it raises the error
        if os.path.isdir(word):  # noqa: PTH112
            yield from _list_folder(Path(word), shown)
            return
        if not os.path.lexists(word) and re.search(_GLOB, word):
            import glob

            found = sorted(glob.glob(word, recursive=True))  # noqa: PTH207
            if not found and re.search(r"[*?]", word):
                raise BadInput(f"{shown}: no file matches this pattern")
            if found:
                for each in found:
                    yield from _expand_word(each)
                return
    yield word


def _list_folder(path: Path, shown: str) -> list[str]:
    """Return the supported files of a folder, or the folder itself if it is a checkpoint or store."""
    names = sorted(each.name for each in path.iterdir() if each.is_file())
    if identify_folder(path) is not None or any(
        name.endswith((INDEX, BIN_INDEX)) or name in (DCP, *ZARR) for name in names
    ):
        return [str(path)]
    known = [str(path / name) for name in names if name.endswith(SUFFIXES)]
    if known:
        return known
    ends = ", ".join(SUFFIXES)
    raise BadInput(f"{shown}: none of the {len(names)} files in this folder has one of the suffixes {ends}")


@contextlib.contextmanager
def stdin_file(screen: Screen) -> Iterator[str]:
    """Yield a path to stdin, or to an unnamed temporary file with its contents if it is a pipe."""
    if sys.stdin is None:
        raise BadInput("-: stdin is closed")
    descriptor = sys.stdin.fileno()
    with contextlib.ExitStack() as stack:
        import shutil
        import tempfile

        if sys.platform == "win32":  # descriptors have no paths
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)), "stdin")
            with screen.working("reading stdin"), copy.open("wb") as named:
                shutil.copyfileobj(sys.stdin.buffer, named)
            yield str(copy)
            return
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            kept = stack.enter_context(tempfile.TemporaryFile())
            with screen.working("reading stdin"):
                shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.flush()
            descriptor = kept.fileno()
        yield f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else f"/dev/fd/{descriptor}"


def _open_source(name: str, screen: Screen, called: str, readonly: Readonly | None, only: Names, skip: Names) -> Source:
    """Open the source that a name refers to; `called` is the name to show, if it differs."""
    path, shown = Path(name), called or one_line(name, 120)
    try:
        if not name:
            raise BadInput("the name of a source is empty")
        if _exists(path):
            with screen.working(f"reading {name}"):
                source = _open_file(path, readonly, only, skip)
                return source._replace(name=called) if called else source
        if re.search(r"\.py(:|$)", name):
            raise BadInput("write an object as module and name, without folders and .py: 'mod:x' or 'pkg.mod:x'")
        abstract, named = re.fullmatch(_ABSTRACT, name), re.fullmatch(_OBJECT, name)
        if abstract is not None:
            return _select(_abstract(name, abstract), only, skip)
        if named is not None:
            from dlx.cli.objects import read_object

            return _select(read_object(name, named["module"], named["path"]), only, skip)
        raise BadInput("no such file, and neither pkg.mod:attr nor a dtype with a shape, such as 'float32[3,4]'")
    except BadInput as error:
        raise BadInput(": ".join(filter(None, (shown, str(error))))) from error.__cause__
    except (FileError, errors.FrameworkNotInstalledError) as error:
        raise BadInput(f"{shown}: {sentences(error.reason, error.fix)}") from error.__cause__
    except OSError as error:
        raise BadInput(f"{shown}: {error.strerror or error}") from error
    except ValueError as error:  # a null byte in the name
        raise BadInput(f"{shown}: {error}") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists() or path.is_symlink()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # a long path into an object
            return False
        raise


def _open_file(path: Path, readonly: Readonly | None, only: Names, skip: Names) -> Source:
    with open_file(path) as file:
        kind = detect_kind(file)
        if kind == ".parquet":
            return _select(_read_parquet(file, readonly), only, skip)
        arrays: dict[str, Any] = {}
        if kind in LIBRARY_KINDS or readonly is not None:
            from dlx.cli import objects

            if kind in LIBRARY_KINDS:
                read = objects.read_torch if kind == ".pt" else objects.read_mapped
                return read(file, readonly or "copy", only, skip)
            arrays = {each.path: each.obj for each in objects.map_entries(path, readonly or "copy", only, skip)}
        with read_contents(file, kind) as (files, contents):
            chosen = select_entries(contents.entries, only, skip)
            entries = tuple(_stored_entry(each, arrays) for each in list_leaves(chosen))
            metadata = {
                key: f"an array of {len(value):,} values" if isinstance(value, list) else str(value)
                for key, value in contents.metadata.items()
            }
            contents.close()
            size = sum(each.size for each in files)
            return Source(str(path), kind.removesuffix(".index.json"), entries, size, contents.notes, metadata)


def _stored_entry(stored: Stored, arrays: dict[str, Any]) -> Entry:
    return Entry(
        stored.name, stored.dtype, stored.dtype_name, stored.shape, stored.nbytes, "file", stored.order, stored.offset,
        stored.swapped, sentences(stored.refused, stored.fix), stored.notes, obj=arrays.get(stored.name),
    )  # fmt: skip


def _abstract(name: str, match: re.Match[str]) -> Source:
    try:
        dtype = DType(match["dtype"])
    except errors.DTypeError as error:
        raise BadInput(str(error)) from error
    words = [each.strip() for each in match["shape"].split(",")]
    words = words if words[-1] else words[:-1]  # float32[] and float32[3,]
    if not all(word.isdecimal() for word in words):
        raise BadInput("a shape consists of numbers and commas, as in 'float32[3,4]'")
    if len(words) > MAX_NDIM:
        raise BadInput(f"it has {len(words)} dimensions; dlx supports at most {MAX_NDIM}")
    shape = tuple(int(word) if len(word) < 20 else MAX_BYTES for word in words)
    nbytes = -(-prod(shape) * dtype.bits * dtype.lanes // 8)
    if max(nbytes, *shape, 0) >= MAX_BYTES:
        raise BadInput("its size is 2**63 bytes or more")
    notes = ("an abstract tensor: compact, aligned, writable host memory",)
    return Source(name, "abstract", (Entry("", dtype, dtype.name, shape, nbytes, "cpu", "C", notes=notes),))


# The common types of Arrow and their dtypes. `describe_column` knows all, and imports the engine.
_ARROW = {"halffloat": "float16", "float": "float32", "double": "float64"}
_ARROW |= {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def _read_parquet(file: File, readonly: Readonly | None) -> Source:
    """List the columns of a Parquet file, which `dlx.open` does not support."""
    pa = import_reader("pyarrow", ".parquet")
    with naming_reader("pyarrow"), importlib.import_module("pyarrow.parquet").ParquetFile(file.path) as found:
        rows, groups = found.metadata.num_rows, found.metadata.num_row_groups
        entries = tuple(_list_column(pa, field, rows) for field in found.schema_arrow)
    if readonly is not None:  # for planning
        from dlx._files.mapping import map_file

        try:
            map_file(file.path)
        except FileError as error:
            entries = tuple(each._replace(error=error) for each in entries)
    notes = ("the schema only", f"row groups: {groups:,}")
    return Source(str(file.path), ".parquet", entries, file.size, notes)


def _list_column(pa: Any, field: Any, rows: int) -> Entry:
    """Describe a column by the schema."""
    name = str(field.type)
    if name not in _ARROW:
        from dlx.cli.objects import describe_column

        return describe_column(pa, field, rows)
    dtype = DType(_ARROW[name])
    notes = ("nulls are allowed",) if field.nullable else ()
    return Entry(field.name, dtype, name, (rows,), rows * dtype.bits // 8, order="C", notes=notes)
