"""Sources of the command line: files, globs, folders, stdin, objects and abstract tensors."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import difflib
import errno
import glob
import importlib
import importlib.util
import os
import re
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from dlx import errors
from dlx._api.convert import plan
from dlx._api.describe import describe
from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.types import IS_COPIED, READ_ONLY, SUBBYTE_PADDED, DType, contiguous
from dlx._engine.failures import Failures
from dlx._engine.tree import Tree
from dlx._files.arrow_torch import load_checkpoint
from dlx._files.header import MAX_BYTES, MAX_NDIM, File, Stored, import_reader, reader_error
from dlx._files.mapping import map_file
from dlx._files.npy import read_fields
from dlx._files.reading import LIBRARY_KINDS, SUFFIXES, detect_kind, open_file, read_contents
from dlx._files.safetensors import BIN_INDEX, DCP, INDEX, ZARR
from dlx._files.selection import dotted_path
from dlx._files.signatures import identify_folder
from dlx._protocols import dlpack
from dlx._registry import lookup
from dlx._support.reflect import exception_text, type_name
from dlx._support.screen import Screen
from dlx._support.text import one_line
from dlx._views.base import View
from dlx.cli.model import BadInput, Entry, Source, plural
from dlx.ctypes import DLManagedTensorVersioned
from dlx.errors import DlxError, FileError, path_text, sentences
from dlx.typing import Readonly

_OBJECT = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<path>[^\W\d]\w*(\.[^\W\d]\w*|\[[^\[\]]+\])*)")
_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_GLOB = re.compile(r"[*?]|\[[^\]]+\]")
_ABSTRACT = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\]")
_STEP = re.compile(r"\.?([^\W\d]\w*)|\[([^\[\]]+)\]")
_FLAGS = {READ_ONLY: "READ_ONLY", IS_COPIED: "IS_COPIED", SUBBYTE_PADDED: "IS_SUBBYTE_TYPE_PADDED"}


def open_sources(
    words: list[str], screen: Screen, readonly: Readonly | None
) -> tuple[list[Source], list[BadInput | DlxError]]:
    """Open the sources that `words` name, and collect errors; raise if there is one error and no source.

    With `readonly`, files are opened as by ``dlx.open(readonly=...)``, for planning; without, headers are listed.
    """
    sources: list[Source] = []
    failed: list[BadInput | DlxError] = []
    for word in words:
        try:
            for name in _expand_word(word):
                try:
                    with stdin_file(screen) if name == "-" else contextlib.nullcontext(name) as path:
                        sources.append(_open_source(path, screen, "-" if name == "-" else "", readonly))
                except (BadInput, DlxError) as error:
                    failed.append(error)
        except BadInput as error:
            failed.append(error)
    if len(failed) == 1 and not sources:
        raise failed[0]
    return sources, failed


def _expand_word(word: str) -> Iterator[str]:
    """Yield the names of all sources that one argument names."""
    shown = one_line(word, 120)
    if _URL.match(word):
        raise BadInput(f"{shown}: dlx cannot read URLs. Download the file first, for example with curl -LO")
    with contextlib.suppress(OSError, ValueError):  # opening it raises the error
        if os.path.isdir(word):  # noqa: PTH112
            yield from _list_folder(Path(word), shown)
            return
        if not os.path.lexists(word) and _GLOB.search(word):
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
    if identify_folder(path) is not None or any(name.endswith((INDEX, BIN_INDEX, DCP, *ZARR)) for name in names):
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


def _open_source(name: str, screen: Screen, called: str, readonly: Readonly | None) -> Source:
    """Open the source that a name refers to; `called` is the name to show, if it differs."""
    path, shown = Path(name), called or one_line(name, 120)
    try:
        if not name:
            raise BadInput("the name of a source is empty")
        if _exists(path):
            with screen.working(f"reading {name}"):
                source = _open_file(path, readonly)
                return replace(source, name=called) if called else source
        if re.search(r"\.py(:|$)", name):
            raise BadInput("write an object as module and name, without folders and .py: 'mod:x' or 'pkg.mod:x'")
        abstract, named = _ABSTRACT.fullmatch(name), _OBJECT.fullmatch(name)
        if abstract is not None:
            return _abstract(name, abstract)
        if named is not None:
            return _read_object(name, named["module"], named["path"])
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


def _open_file(path: Path, readonly: Readonly | None) -> Source:
    with open_file(path) as file:
        kind = detect_kind(file)
        if kind in LIBRARY_KINDS:
            readers = {".pt": _read_torch, ".parquet": _read_parquet}
            return readers.get(kind, _read_mapped)(file, readonly or "copy")
        arrays = {} if readonly is None else {each.path: each.obj for each in _map_entries(path, readonly)}
        with read_contents(file, kind) as (parts, places):
            entries = tuple(
                _stored_entry(
                    field if field is each else field._replace(name=f"{name}.{field.name}".removeprefix(".")), arrays
                )
                for i, (_, contents) in enumerate(parts)
                for name, each in contents.entries.items()
                if places is None or places.get(name) == i
                for field in (read_fields(each) if each.fields else (each,))
            )
            for _, contents in parts:
                if contents.close is not None:
                    contents.close()
            metadata = {
                key: f"an array of {len(value):,} values" if isinstance(value, list) else str(value)
                for _, contents in reversed(parts)
                for key, value in contents.metadata.items()
            }
            size, notes = sum(each.size for each, _ in parts), tuple(note for _, each in parts for note in each.notes)
            return Source(str(path), kind.removesuffix(".index.json"), entries, size, notes, metadata)


def _map_entries(path: Path, readonly: Readonly) -> list[Entry]:
    """Return entries with the arrays of `dlx.open`, for planning."""
    return entries_of(
        map_file(path, private=readonly == "share"), lambda keys: ".".join(map(str, keys)).removeprefix(".")
    )[0]


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


# ---- read by another library -----------------------------------------------------------------------------------------


def _read_torch(file: File, readonly: Readonly) -> Source:
    """List the tensors of a torch checkpoint."""
    loaded, saved = load_checkpoint(file)
    entries, rest = entries_of(loaded, dotted_path)
    notes = ["read by torch, weights_only, memory-mapped"]
    notes += [f"saved on {', '.join(saved)}"] if saved else []
    notes += [f"{plural(rest, 'value')} of other types"] if rest else []
    if not entries:
        raise FileError("it contains no tensor", fix="Pass a file that contains tensors.")
    return Source(str(file.path), ".pt", tuple(entries), file.size, tuple(notes))


def _read_mapped(file: File, readonly: Readonly) -> Source:
    """List the columns of an Arrow IPC file or stream, or the tensors of a folder."""
    entries = tuple(replace(each, refused=_why_no_array(each.obj)) for each in _map_entries(file.path, readonly))
    return Source(str(file.path), detect_kind(file), entries, file.size)


def _read_parquet(file: File, _: Readonly) -> Source:
    """List the columns of a Parquet file, which `dlx.open` does not support."""
    pa = import_reader("pyarrow", ".parquet")
    try:
        with importlib.import_module("pyarrow.parquet").ParquetFile(file.path) as found:
            rows, groups = found.metadata.num_rows, found.metadata.num_row_groups
            entries = tuple(_describe_column(pa, field, rows) for field in found.schema_arrow)
    except Exception as error:
        raise reader_error("pyarrow", error) from error
    try:
        map_file(file.path)
    except FileError as error:
        entries = tuple(replace(each, error=error) for each in entries)
    notes = ("the schema only", f"row groups: {groups:,}")
    return Source(str(file.path), ".parquet", entries, file.size, notes)


def _why_no_array(column: Any) -> str:
    """Return the reason why a column cannot be converted, or ``""``."""
    error = plan(column, to="dlx").error
    return sentences(error.reason, error.fix) if isinstance(error, DlxError) else ""


def _describe_column(pa: Any, field: Any, rows: int) -> Entry:
    """Describe a column by the schema."""
    empty, name = pa.nulls(0, field.type), str(field.type)
    refused = _why_no_array(empty)
    notes = ("nulls are allowed",) if field.nullable else ()
    if refused:
        return Entry(field.name, None, name, (rows,), None, refused=refused, notes=notes)
    info = describe(empty)
    assert info.dtype is not None and info.shape is not None
    shape = (rows, *info.shape[1:])
    nbytes = -(-prod(shape) * info.dtype.bits // 8)
    return Entry(field.name, info.dtype, name, shape, nbytes, order="C", notes=notes)


# ---- objects in memory -----------------------------------------------------------------------------------------------


def _read_object(name: str, module: str, path: str) -> Source:
    """Import a module, which runs its code, and describe the arrays in one of its attributes."""
    sys.path.insert(0, "")  # the current folder, as `python -m` does
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:  # otherwise no code runs
            print(f"dlx: importing {module}, which runs its code", file=sys.stderr)
        obj: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            fix = "Run dlx in the folder that contains it, or set PYTHONPATH"
            raise BadInput(f"there is no module {error.name!r} in this folder or on Python's path. {fix}") from error
        raise BadInput(f"importing {module} failed: {_one_line(error)}") from error
    try:
        for attribute, index in _STEP.findall(path):
            obj = getattr(obj, attribute) if attribute else obj[ast.literal_eval(index)]
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError | SyntaxError) and not attribute:
            raise BadInput(f"[{index}] is neither a number nor a quoted text") from error
        if isinstance(error, AttributeError | LookupError):
            raise BadInput(
                f"{module} has no {path}: {_one_line(error)}{_suggest_names(module, path, attribute)}"
            ) from error
        raise BadInput(f"looking up {module}.{path} failed: {_one_line(error)}") from error
    found = type_name(type(obj))
    notes = [f"imported {module}, which ran its code"]
    try:
        state = callable(getattr(type(obj), "state_dict", None)) and lookup.kind(type(obj)).handler is None
        if state:
            obj, notes = obj.state_dict(), [*notes, "its state_dict()"]
        elif isinstance(obj, View):
            notes.append("a lazy view: these are the unconverted arrays of its source")
        entries, others = entries_of(obj, dotted_path if state else lambda path: path_text(path, ""))
    except (DlxError, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # of the object's code
        raise BadInput(f"inspecting the {found} failed: {_one_line(error)}") from error
    if not entries:
        held = "whose state_dict() contains no array" if state else "which is not an array and contains none"
        raise BadInput(f"its type is {found}, {held}")
    if others:
        notes.append(f"{plural(others, 'value')} of other types")
    return Source(name, "object", tuple(entries), notes=tuple(notes))


def _one_line(error: BaseException) -> str:
    """Return an error in one line."""
    return one_line(exception_text(error, 240), 300)


def _suggest_names(module: str, path: str, attribute: str) -> str:
    """Return a sentence with similar names of a module, or its data, or ``""``."""
    if path != attribute:
        return ""
    names = {key: each for key, each in vars(sys.modules[module]).items() if key[:1] != "_"}
    near = difflib.get_close_matches(attribute, names, 3)
    found = near or [key for key, each in names.items() if not isinstance(each, ModuleType) and not callable(each)]
    return f". It has {', '.join(found[:8])}" if found else ""


def entries_of(root: Any, named: Callable[[tuple[Any, ...]], str]) -> tuple[list[Entry], int]:
    """Return entries for an array or the arrays in a tree, without converting, and the number of other values.

    ``named(path)`` returns the name of an entry. For a lazy view, the entries come from its source.
    """
    handler = lookup.kind(type(root)).handler
    if handler is None:
        entry = _describe("", root)
        return ([], 1) if entry is None else ([entry], 0)
    failures = Failures("", collect=True)
    tree = Tree(root, handler, failures)
    parts = tree.containers()
    known = {id(each) for each in tree.arrays} | {id(part[0]) for part in parts}
    children = [id(child) for _, _, held, _ in parts for child in held]
    places = Counter(children)
    entries = []
    for i, array in enumerate(tree.arrays):
        entry = _describe(named(tree.path(i)), array)
        if entry is not None:
            again = (f"in {places[id(array)]} places",) if places[id(array)] > 1 else ()
            entries.append(replace(entry, notes=(*entry.notes, *again)))
    entries += [_refused_entry(named(error.path), error.source, error) for error in failures.errors]
    return entries, sum(each not in known for each in children)


def _refused_entry(path: str, what: str, error: DlxError) -> Entry:
    refused = one_line(sentences(error.reason, error.fix))
    return Entry(path, None, what, None, None, "?", refused=refused, error=error)


def _describe(path: str, obj: Any) -> Entry | None:
    """Describe an object; return None if it is not an array."""
    try:
        info = describe(obj)
    except errors.AdapterNotFoundError:
        return None
    except errors.ConversionError as error:
        return replace(_refused_entry(path, type_name(type(obj)), error), obj=obj, error=None)
    device = "?" if info.device is None else str(info.device)
    known = info.shape is not None and (info.dtype is not None or info.nbytes)
    return Entry(
        path, info.dtype, info.dtype_name or "?", info.shape, info.nbytes if known else None, device, _layout(info),
        info=info, obj=obj, notes=info.notes,
    )  # fmt: skip


def _layout(info: ArrayInfo) -> str:
    """Return ``"C"``, ``"F"``, ``"strided"``, or ``""`` if the layout is unknown."""
    if info.shape is None or info.strides is None:
        return ""
    if info.contiguous():
        return "C"
    return "F" if contiguous(info.shape[::-1], info.strides[::-1]) else "strided"


def capsule_facts(obj: Any) -> dict[str, Any]:
    """Request a capsule from an object and drop it; return its name, version and flags, or why it was refused."""
    state = native.capsule_state(obj)
    if state is not None:
        return _read_capsule(obj) if state != "used" else {"refused": "the capsule has been used already"}
    if not hasattr(type(obj), "__dlpack__"):
        return {}
    reason = dlpack.why_no_numbers(obj)
    if reason:
        return {"refused": reason}
    try:
        try:
            capsule = obj.__dlpack__(max_version=(native.lib.DLX_DLPACK_MAJOR, native.lib.DLX_DLPACK_MINOR))
        except TypeError:
            capsule = obj.__dlpack__()
        return _read_capsule(capsule)
    except (Exception, SystemExit) as error:
        return {"refused": _one_line(error)}


def _read_capsule(capsule: Any) -> dict[str, Any]:
    if native.capsule_state(capsule) != "versioned":
        return {"name": "dltensor", "version": None, "flags": []}
    get = ctypes.PyDLL(None).PyCapsule_GetPointer  # ctypes.pythonapi is shared, so its types must not be changed
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    struct = DLManagedTensorVersioned.from_address(get(capsule, b"dltensor_versioned"))
    facts = {"name": "dltensor_versioned", "version": [struct.version.major, struct.version.minor]}
    if struct.version.major != native.lib.DLX_DLPACK_MAJOR:  # later fields may have other offsets
        return {**facts, "flags": []}
    known = [word for bit, word in _FLAGS.items() if struct.flags & bit]
    rest = struct.flags & ~sum(_FLAGS)
    return {**facts, "flags": [*known, *([hex(rest)] if rest else [])], "byte_offset": struct.dl_tensor.byte_offset}
