"""Readers of Arrow IPC files and torch checkpoints, which pyarrow and torch memory-map themselves."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import re
import sys
import threading
import warnings
from typing import Any

from dlx._core.array_info import ArrayInfo
from dlx._core.types import HOST
from dlx._files.header import AGAIN, File, Memory, check_names, import_reader, naming_reader, reader_error
from dlx._files.npz import find_data_start, open_zip
from dlx._files.pickles import check_pickle
from dlx._registry.generic import Deferred, RefusedCode
from dlx._support.locks import lock_of
from dlx._support.reflect import find_in
from dlx._support.text import amount, one_line
from dlx.adapter.declarations import Blocker
from dlx.errors import ConversionError, FileError

MAX_RATIO = 1 << 15  # of a buffer's size to the file's: Zstandard compresses 128 KiB of one value to 4 bytes
_DATA = re.compile(r"/data/\d+$")  # members with the data of tensors
MAX_PICKLE = 64 << 20  # bytes of a checkpoint's pickle, and of each other member that is not a tensor's data
TRUST = "If you trust the file, open it inside `with torch.serialization.safe_globals({})`."


def arrow_columns(file: File, memory: Memory) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the columns of an Arrow IPC file or stream, in its memory unless compressed, and its metadata."""
    pa = import_reader("pyarrow", ".arrow")
    with naming_reader("pyarrow"), pa.BufferReader(pa.py_buffer(memory.bytes)) as mapped:
        try:
            ipc = importlib.import_module("pyarrow.ipc")
            if mapped.read(6) == b"ARROW1":
                reader = ipc.open_file(mapped)
                _check_end(ipc, mapped, file.size)
            else:
                mapped.seek(0)
                for _ in ipc.MessageReader.open_stream(mapped):
                    pass
                if mapped.read(4) == b"\xff\xff\xff\xff":
                    fix = "Read each with pyarrow.ipc.open_stream from one open file."
                    raise FileError("it contains several Arrow streams, one after the other", fix=fix)
                mapped.seek(0)
                reader = ipc.open_stream(mapped)
            table = reader.read_all()
            table.validate()
            names = table.column_names  # raises for invalid UTF-8
        except MemoryError as error:
            claimed = int(find_in(error, r"size (\d+)") or 0)
            if claimed > MAX_RATIO * file.size:
                reason = f"it claims a buffer of {amount(claimed)}, more than {file.size:,} bytes can hold"
                raise FileError(reason, fix=AGAIN) from error
            raise
    check_names(names)
    metadata = {
        key.decode(errors="replace"): text.decode(errors="replace")
        for key, text in (table.schema.metadata or {}).items()
    }
    return dict(zip(names, map(_only_chunk, table.columns), strict=True)), metadata


def _only_chunk(column: Any) -> Any:
    """Return a column's array, if it has only one, and pyarrow has a class for it (not for intervals of months)."""
    with contextlib.suppress(KeyError):
        return column.chunk(0) if column.num_chunks == 1 else column
    return column


def _check_end(ipc: Any, mapped: Any, size: int) -> None:
    """Raise `FileError` if another Arrow file follows; pyarrow would apply its footer to the first file."""
    mapped.seek(8)
    for _ in ipc.MessageReader.open_stream(mapped):
        pass
    end = mapped.tell()
    mapped.seek(size - 10)
    rest = size - 10 - int.from_bytes(mapped.read(4), "little") - end  # 0 in a single file
    mapped.seek(end)
    if rest > 0 and b"ARROW1\0\0" in mapped.read_buffer(rest).to_pybytes():
        raise FileError("it contains several Arrow files, one after the other", fix="Split it into separate files.")


class _Globals:
    """The holder of the lock for torch's list of safe globals."""

    _lock: threading.RLock | None = None


_GLOBALS = _Globals()


def load_checkpoint(file: File) -> tuple[Any, list[str]]:
    """Load a torch checkpoint of tensors and plain data, memory-mapped; return it and the devices it was saved from."""
    with open_zip(file) as archive:  # torch reads all members into memory, except for the tensors' data
        members = archive.infolist()
        data = [each for each in members if _DATA.search(each.filename)]
        largest = max((each.file_size for each in members if not _DATA.search(each.filename)), default=0)
        if any(each.endswith("/constants.pkl") for each in archive.namelist()):
            fix = "Read its tensors: dlx.convert(torch.jit.load(path).state_dict(), to=...)."
            raise FileError("it is a TorchScript archive, which contains a program; dlx runs no code in files", fix=fix)
        if any(each.compress_type for each in data):
            raise FileError("its tensors are compressed and cannot be mapped", fix="Save it again with torch.save.")
        if largest > MAX_PICKLE:
            raise FileError(f"its list of tensors claims {largest:,} bytes; dlx reads at most {MAX_PICKLE:,}")
        for each in archive.namelist():
            if each.lower().endswith("data.pkl"):  # torch ignores case
                try:
                    check_pickle(archive.read(each))
                except (ValueError, LookupError, RuntimeError) as error:
                    raise FileError("its list of tensors is damaged, or unusual for torch.save", fix=AGAIN) from error
        records = {find_data_start(file, each): each.file_size for each in data}
    package = import_reader("torch", ".pt")
    saved_on: dict[tuple[int, int], str] = {}  # the address of a storage, and its bytes according to the pickle

    def keep(storage: Any, location: str) -> Any:
        saved_on[storage.data_ptr(), storage.nbytes()] = location
        return storage

    def load() -> Any:
        options: Any = contextlib.nullcontext()
        if sys.platform != "win32":  # where torch always maps privately
            options = package.serialization.set_default_mmap_options(mmap.MAP_PRIVATE)
        saved_on.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch addresses them to callers of `load`
            with options:
                return package.load(file.location, map_location=keep, weights_only=True, mmap=True)

    try:
        try:
            loaded = load()
        except Exception:
            with lock_of(_GLOBALS):  # torch's list of safe globals belongs to all threads
                code = _find_code(package, file)
                if not code:
                    raise
                # Deferred may set its state; no pickle can name it without a dot.
                with package.serialization.safe_globals([*map(_refuse_object, code), (Deferred, "Deferred")]):
                    loaded = load()
            if not saved_on:  # no tensor
                raise
    except Exception as error:  # a damaged or hostile file can cause any exception
        raise _why_not_loaded(package, file, error) from error
    # torch trusts the pickle, so check it: one base address must map every storage to a record of the same size.
    placed = sorted((at, size) for at, size in saved_on if size)
    if placed and not any(all(records.get(at - placed[0][0] + s) == n for at, n in placed) for s in records):
        raise FileError("it is damaged: its list of tensors does not match its data", fix=AGAIN)
    return loaded, sorted({*saved_on.values()} - {"cpu"})


def _why_not_loaded(package: Any, file: File, error: Exception) -> Exception:
    failure = reader_error("torch", error)
    if isinstance(failure, FileError):
        if getattr(package._C, "_len_torch_dispatch_stack", int)():  # 0 if this torch lacks the function
            reason = "torch cannot load a checkpoint while it traces, or inside FakeTensorMode"
            return FileError(reason, fix="Open it before, and read it inside.")
        blocked = find_in(error, r"whose module (\w+) is blocked")
        fix = f"Save its tensors alone: torch blocks the module {blocked} even inside safe_globals." if blocked else ""
        if code := _find_code(package, file):
            names = one_line(", ".join(code), 120)
            reason = f"it needs code ({names}) that torch's weights_only does not allow; nothing was run"
            return FileError(reason, fix=fix or TRUST.format(f"[{names}]"))
        if why := find_in(error, r"WeightsUnpickler error:\s*(.+)"):
            fix = fix or (TRUST.format("[...]") if "allowlisted" in why else AGAIN)
            return FileError(f"torch's weights_only does not allow it: {one_line(why, 200)}", fix=fix)
    return failure


def _find_code(package: Any, file: File) -> list[str]:
    """Return the names of functions and classes in a checkpoint that torch's weights_only does not allow."""
    with contextlib.suppress(Exception):  # the file may be damaged
        return list(package.serialization.get_unsafe_globals_in_checkpoint(file.location))  # runs nothing
    return []


def _refuse_object(name: str) -> tuple[RefusedCode, str]:
    """Return what weights_only uses instead of a function or class, and its name."""
    shown = one_line(name, 80)
    info = ArrayInfo("file", shown, None, shown, None, device=HOST)
    why = f"it needs code ({shown}) that torch's weights_only does not allow; nothing was run"
    blocker = Blocker(why, f"Leave it out with skip=. {TRUST.format(f'[{shown}]')}", ConversionError)
    return RefusedCode(info, blocker), name
