"""Resolve a source on the command line: a file, recognized by its first bytes, an object, or an abstract tensor."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import re
import stat
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from dlx._core.foreign import exception_text
from dlx._core.types import DType
from dlx.cli.model import BadInput, Entry, Source, counted, one_line
from dlx.cli.render.screen import Screen
from dlx.cli.sources.formats import (
    MAGIC_NPY,
    MAX_BYTES,
    MAX_NDIM,
    SAFE,
    opened_zip,
    read_npy,
    read_npz,
    read_safetensors,
)
from dlx.errors import DlxError, DTypeError, sentences

__all__ = ["open_source"]

_OBJECT = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<path>[^\W\d]\w*(\.[^\W\d]\w*|\[[^\[\]]+\])*)")
_ABSTRACT = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\]")


def open_source(name: str, screen: Screen) -> Source:
    """Return what a word of the command line stands for; reading a file is shown on the screen.

    Raises
    ------
    BadInput
        If it stands for nothing, or is not what it says it is; the message names it.
    """
    path, shown = Path(name), one_line(name, 120)
    try:
        if not name:
            raise BadInput("an empty name stands for nothing")
        if _exists(path):
            with screen.working(f"reading {name}"):
                return _file(path)
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
    except OSError as error:
        raise BadInput(f"{shown}: {error.strerror or error}") from error
    except ValueError as error:  # a name with a null byte
        raise BadInput(f"{shown}: {error}") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # a long way into an object is no file
            return False
        raise


def _file(path: Path) -> Source:
    if not stat.S_ISREG(path.stat().st_mode):
        raise BadInput("it is a folder: name files in it" if path.is_dir() else "it is no regular file")
    with path.open("rb") as file:
        start = file.read(16)
    return _reader(path, start)(path)


def _reader(path: Path, start: bytes) -> Callable[[Path], Source]:
    """Return the reader for a file by its first bytes; the name decides only where these are ambiguous."""
    if not start:
        raise BadInput("it is empty")
    if start.startswith(MAGIC_NPY):
        return read_npy
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _read_torch if _is_torch(path) else read_npz
    if start.startswith(b"ARROW1"):
        return _read_arrow
    if start.startswith(b"PAR1"):
        return _read_parquet
    if path.suffix == ".safetensors" or (start[8:9] == b"{" and len(start) > 8):
        return read_safetensors
    if (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05") or path.suffix in (".pkl", ".pickle"):
        old = path.suffix in (".pt", ".pth", ".ckpt", ".bin")
        fix = "dlx does not. Save it anew: torch.save(torch.load(..., weights_only=True), ...)" if old else SAFE
        raise BadInput(f"it is a pickle, and reading one runs whatever code is in it; {fix}")
    known = {
        ".npy": read_npy,
        ".npz": read_npz,
        ".parquet": _read_parquet,
        ".arrow": _read_arrow,
        ".arrows": _read_arrow,
    }
    if path.suffix in known:  # let its reader say what is wrong
        return known[path.suffix]
    raise BadInput("it is none of .npy, .npz, .safetensors, .pt, .arrow and .parquet, by its first bytes")


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


def _needed(package: str, kind: str) -> Any:
    """Import what reads a kind of file, or say how to get it."""
    if importlib.util.find_spec(package) is None:
        raise BadInput(f"{kind} files are read by {package}, which is not installed: pip install {package}")
    try:
        return importlib.import_module(package)
    except Exception as error:
        raise BadInput(f"{package}, which reads {kind} files, fails to import: {exception_text(error, 240)}") from error


# ---- torch -----------------------------------------------------------------------------------------------------------

MAX_PICKLE = 64 << 20  # bytes of the pickle that lists a checkpoint's tensors, and of each other part but data


def _is_torch(path: Path) -> bool:
    try:
        with opened_zip(path) as archive:
            return any(each.endswith("data.pkl") for each in archive.namelist()[:4])
    except BadInput:
        return path.suffix in (".pt", ".pth", ".ckpt", ".bin")


def _read_torch(path: Path) -> Source:
    """Read a checkpoint of torch: tensors and plain data only, memory-mapped."""
    with opened_zip(path) as archive:  # torch reads whole what is not a tensor's data
        others = [each.file_size for each in archive.infolist() if not re.search(r"/data/\d+$", each.filename)]
        if any(each.endswith("/constants.pkl") for each in archive.namelist()):
            raise BadInput("it is a TorchScript archive, a program with its tensors, and dlx runs none")
    if max(others, default=0) > MAX_PICKLE:
        raise BadInput(f"its list of tensors claims {max(others):,} bytes, and dlx reads at most {MAX_PICKLE:,}")
    torch = _needed("torch", ".pt")
    from dlx.cli.sources.objects import dotted, entries_of

    saved_on: dict[int, str] = {}

    def keep(storage: Any, location: str) -> Any:
        saved_on[storage.data_ptr()] = location
        return storage

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings for users of `load`
            loaded = torch.load(path, map_location=keep, weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged or hostile file brings about
        raise BadInput(_why_not_loaded(torch, path, error)) from error
    entries, rest = entries_of(loaded, dotted)
    saved = sorted({*saved_on.values()} - {"cpu"})
    notes = ["read by torch, weights_only, memory-mapped"]
    notes += [f"saved on {', '.join(saved)}"] if saved else []
    notes += [f"{counted(rest, 'value')} of other kinds"] if rest else []
    if not entries:
        raise BadInput("there is no tensor in it")
    return Source(str(path), ".pt", tuple(entries), path.stat().st_size, tuple(notes))


def _why_not_loaded(torch: Any, path: Path, error: Exception) -> str:
    with contextlib.suppress(Exception):  # of a damaged file, again
        code = torch.serialization.get_unsafe_globals_in_checkpoint(path)  # what its pickle names; nothing is run
        if code:
            named = one_line(", ".join(code), 120)
            return f"it wants to run code ({named}), which weights_only refuses; nothing was run"
    return f"torch cannot read it: {one_line(exception_text(error, 200), 260)}"


# ---- arrow -----------------------------------------------------------------------------------------------------------


def _read_arrow(path: Path) -> Source:
    """Read the schema of an Arrow IPC file, or of a stream in a file."""
    pa = _needed("pyarrow", ".arrow")
    try:
        ipc = importlib.import_module("pyarrow.ipc")
        with pa.memory_map(str(path)) as file:
            if file.read(6) == b"ARROW1":
                reader = ipc.open_file(file)
                batches = reader.num_record_batches
                note = f"record batches: {batches:,}"
            else:
                file.seek(0)
                reader, batches, note = ipc.open_stream(file), 1, "a stream: its record batches are not counted"
            entries = tuple(_column(pa, field, None, batches) for field in reader.schema)
    except Exception as error:
        raise BadInput(_no_arrow(error)) from error
    return Source(str(path), ".arrow", entries, path.stat().st_size, ("the schema only", note))


def _read_parquet(path: Path) -> Source:
    """Read the schema and the number of rows of a Parquet file."""
    pa = _needed("pyarrow", ".parquet")
    try:
        with importlib.import_module("pyarrow.parquet").ParquetFile(path) as file:
            rows, groups = file.metadata.num_rows, file.metadata.num_row_groups
            entries = tuple(_column(pa, field, rows, groups) for field in file.schema_arrow)
    except Exception as error:
        raise BadInput(_no_arrow(error)) from error
    notes = ("the schema only", f"row groups: {groups:,}")
    return Source(str(path), ".parquet", entries, path.stat().st_size, notes)


def _no_arrow(error: Exception) -> str:
    return f"pyarrow cannot read it: {one_line(exception_text(error, 200), 260)}"


def _column(pa: Any, field: Any, rows: int | None, parts: int) -> Entry:
    """Return the entry of a column, which fares as a column of a few values does."""
    from dlx._api import convert as api
    from dlx._engine.request import describe

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
