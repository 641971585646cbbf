"""Entries of arrays and trees in memory: imported objects, and what other libraries read from files."""

from __future__ import annotations

import ast
import ctypes
import difflib
import importlib
import importlib.util
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from dlx import errors
from dlx._api.convert import plan
from dlx._api.describe import describe
from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.types import IS_COPIED, READ_ONLY, SUBBYTE_PADDED, contiguous
from dlx._engine.compound import Compounds
from dlx._engine.failures import Failures
from dlx._engine.tree import Tree
from dlx._files.arrow_torch import load_checkpoint
from dlx._files.header import File
from dlx._files.mapping import map_file
from dlx._files.reading import detect_kind
from dlx._files.selection import Names, dotted_path, select_tree
from dlx._protocols import dlpack
from dlx._registry import lookup
from dlx._registry.compound import CompoundHandler
from dlx._support.reflect import exception_text, type_name
from dlx._support.text import one_line
from dlx._views.base import View
from dlx.cli.model import BadInput, Entry, Source, plural
from dlx.ctypes import DLManagedTensorVersioned
from dlx.errors import DlxError, FileError, path_text, sentences
from dlx.typing import Readonly

_STEP = re.compile(r"\.?([^\W\d]\w*)|\[([^\[\]]+)\]")
_FLAGS = {READ_ONLY: "READ_ONLY", IS_COPIED: "IS_COPIED", SUBBYTE_PADDED: "IS_SUBBYTE_TYPE_PADDED"}


def read_torch(file: File, readonly: Readonly, only: Names, skip: Names) -> Source:
    """List the tensors of a torch checkpoint."""
    loaded, saved = load_checkpoint(file)
    chosen = select_tree(loaded if isinstance(loaded, Mapping) else {"": loaded}, only, skip)
    entries, rest = entries_of(chosen if isinstance(loaded, Mapping) else loaded, dotted_path)
    notes = ["read by torch, weights_only, memory-mapped"]
    notes += [f"saved on {', '.join(saved)}"] if saved else []
    notes += [f"{plural(rest, 'value')} of other types"] if rest else []
    if not entries:
        raise FileError("it contains no tensor", fix="Pass a file that contains tensors.")
    return Source(str(file.path), ".pt", tuple(entries), file.size, tuple(notes))


def read_mapped(file: File, readonly: Readonly, only: Names, skip: Names) -> Source:
    """List the columns of an Arrow IPC file or stream, or the tensors of a folder."""
    found = map_entries(file.path, readonly, only, skip)
    entries = (each if each.obj is None else each._replace(refused=_why_no_array(each.obj)) for each in found)
    return Source(str(file.path), detect_kind(file), tuple(entries), file.size)


def map_entries(path: Path, readonly: Readonly, only: Names, skip: Names) -> list[Entry]:
    """Return entries with the arrays of `dlx.open`, for planning."""
    archive = map_file(path, private=readonly == "share", only=only, skip=skip)
    return entries_of(archive, lambda path: dotted_path(path, str))[0]


def _why_no_array(column: Any) -> str:
    """Return the reason why a column cannot be converted, or ``""``."""
    error = plan(column, to="dlx").error
    return sentences(error.reason, error.fix) if isinstance(error, DlxError) else ""


def describe_column(pa: Any, field: Any, rows: int) -> Entry:
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


def read_object(name: str, module: str, path: str) -> Source:
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
    handler = lookup.kind_of(root).handler
    if handler is None or isinstance(handler, CompoundHandler):
        entry = _describe("", root)
        return ([], 1) if entry is None else ([entry], 0)
    failures = Failures("", collect=True)
    tree = Tree(root, handler, failures, compounds=Compounds(None))
    arrays: list[tuple[int, tuple[Any, ...], Any, DlxError | None]] = [
        (i, tree.path(i), array, None) for i, array in enumerate(tree.arrays) if tree.whole(i) < 0
    ]
    wholes = tree.compounds()
    arrays += [(min(whole.numbers, default=len(tree.arrays)), whole.path, whole.obj, whole.error) for whole in wholes]
    shown = {id(whole.error) for whole in wholes}
    parts = [each for each in tree.nodes() if not isinstance(each[1], CompoundHandler)]
    known = {id(each) for each in tree.arrays} | {id(each[0]) for each in tree.nodes()}
    children = [id(child) for _, _, _, held, _ in parts for child in held]
    places = Counter(children)
    entries = []
    for _, path, array, failed in sorted(arrays, key=operator.itemgetter(0)):
        if failed is not None:  # about a compound array or its parts
            entry = _refused_entry(named(path), type_name(type(array)), failed)._replace(obj=array, error=None)
        else:
            entry = _describe(named(path), array)
        if entry is not None:
            again = (f"in {places[id(array)]} places",) if places[id(array)] > 1 else ()
            entries.append(entry._replace(notes=(*entry.notes, *again)))
    entries += [
        _refused_entry(named(error.path), error.source, error) for error in failures.errors if id(error) not in shown
    ]
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
        return _refused_entry(path, type_name(type(obj)), error)._replace(obj=obj, error=None)
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
