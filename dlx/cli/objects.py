"""Objects in memory: `pkg.mod:attr` of the command line, and the arrays in containers."""

from __future__ import annotations

import ast
import ctypes
import difflib
import importlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from dlx._api.describe import describe
from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.types import IS_COPIED, READ_ONLY, SUBBYTE_PADDED, contiguous
from dlx._engine.failures import Failures
from dlx._engine.tree import Tree
from dlx._protocols import dlpack
from dlx._registry import lookup
from dlx._support.reflect import exception_text, type_name
from dlx._support.text import one_line
from dlx._views.base import View
from dlx.cli.model import BadInput, Entry, Source, counted
from dlx.ctypes import DLManagedTensorVersioned
from dlx.errors import AdapterNotFoundError, Attribute, ConversionError, DlxError, path_text, sentences

_STEP = re.compile(r"\.?([^\W\d]\w*)|\[([^\[\]]+)\]")
_FLAGS = {READ_ONLY: "READ_ONLY", IS_COPIED: "IS_COPIED", SUBBYTE_PADDED: "IS_SUBBYTE_TYPE_PADDED"}


def read_object(name: str, module: str, path: str) -> Source:
    """Import a module, which runs it, and describe the arrays of one of its attributes."""
    sys.path.insert(0, "")  # as `python -m` does: the folder that the user is in
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:  # else nothing is run
            print(f"dlx: importing {module}, which runs its code", file=sys.stderr)
        obj: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            here = "in this folder or where Python looks; run dlx where it is, or set PYTHONPATH"
            raise BadInput(f"there is no module {error.name!r} {here}") from error
        raise BadInput(f"importing {module} failed: {_said(error)}") from error
    try:
        for attribute, index in _STEP.findall(path):
            obj = getattr(obj, attribute) if attribute else obj[ast.literal_eval(index)]
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError | SyntaxError) and not attribute:
            raise BadInput(f"[{index}] is no number and no text in quotes") from error
        if isinstance(error, AttributeError | LookupError):
            raise BadInput(f"{module} has no {path}: {_said(error)}{_instead(module, path, attribute)}") from error
        raise BadInput(f"{module}.{path} fails when it is looked up: {_said(error)}") from error
    found = type_name(type(obj))
    notes = [f"imported {module}, which ran its code"]
    try:
        state = callable(getattr(type(obj), "state_dict", None)) and lookup.kind(type(obj)).handler is None
        if state:
            obj, notes = obj.state_dict(), [*notes, "its state_dict()"]
        elif isinstance(obj, View):
            notes.append("a lazy view: these are the arrays of its source, and nothing was converted")
        entries, others = entries_of(obj, dotted if state else lambda path: path_text(path, ""))
    except (DlxError, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # of the object's own code
        raise BadInput(f"{found} cannot be looked at: {_said(error)}") from error
    if not entries:
        held = "whose state_dict() holds no array" if state else "which is no array and holds none"
        raise BadInput(f"its type is {found}, {held}")
    if others:
        notes.append(f"{counted(others, 'value')} of other kinds")
    return Source(name, "object", tuple(entries), notes=tuple(notes))


def _said(error: BaseException) -> str:
    """Return an error in one line."""
    return one_line(exception_text(error, 240), 300)


def _instead(module: str, path: str, attribute: str) -> str:
    """Return a sentence that names what a module has instead of a missing name."""
    if path != attribute:
        return ""
    names = {key: each for key, each in vars(sys.modules[module]).items() if key[:1] != "_"}
    near = difflib.get_close_matches(attribute, names, 3)
    found = near or [key for key, each in names.items() if not isinstance(each, ModuleType) and not callable(each)]
    return f". It has {', '.join(found[:8])}" if found else ""


def dotted(path: tuple[Any, ...]) -> str:
    """Return a path in a file, or in a state dict, without Python's brackets around names."""
    steps = [f".{one_line(key)}" if type(key) in (str, Attribute) else path_text((key,), "") for key in path]
    return "".join(steps).removeprefix(".")


def entries_of(root: Any, named: Callable[[tuple[Any, ...]], str]) -> tuple[list[Entry], int]:
    """Return (entries of an array or of the arrays in a tree, the number of other values); nothing is converted.

    ``named(path)`` is the name of an entry. A lazy view means its source.
    """
    handler = lookup.kind(type(root)).handler
    if handler is None:
        entry = _entry("", root)
        return ([], 1) if entry is None else ([entry], 0)
    failures = Failures("", collect=True)
    tree = Tree(root, handler, failures)
    parts = tree.containers()
    known = {id(each) for each in tree.arrays} | {id(part[0]) for part in parts}
    children = [id(child) for _, _, held, _ in parts for child in held]
    stands = Counter(children)
    entries = []
    for i, array in enumerate(tree.arrays):
        entry = _entry(named(tree.path(i)), array)
        if entry is not None:
            again = (f"in {stands[id(array)]} places",) if stands[id(array)] > 1 else ()
            entries.append(replace(entry, notes=(*entry.notes, *again)))
    entries += [_refused(named(error.path), error.source, error) for error in failures.errors]
    return entries, sum(each not in known for each in children)


def _refused(path: str, what: str, error: DlxError) -> Entry:
    refused = one_line(sentences(error.reason, error.fix))
    return Entry(path, None, what, None, None, "?", refused=refused, error=error)


def _entry(path: str, obj: Any) -> Entry | None:
    """Describe an object; None if it is no array."""
    try:
        info = describe(obj)
    except AdapterNotFoundError:
        return None
    except ConversionError as error:
        return replace(_refused(path, type_name(type(obj)), error), obj=obj, error=None)
    device = "?" if info.device is None else str(info.device)
    known = info.shape is not None and (info.dtype is not None or info.nbytes)
    return Entry(
        path, info.dtype, info.dtype_name or "?", info.shape, info.nbytes if known else None, device, _layout(info),
        info=info, obj=obj, notes=info.notes,
    )  # fmt: skip


def _layout(info: ArrayInfo) -> str:
    """Return ``"C"``, ``"F"``, ``"strided"``, or nothing if it is unknown."""
    if info.shape is None or info.strides is None:
        return ""
    if info.contiguous():
        return "C"
    return "F" if contiguous(info.shape[::-1], info.strides[::-1]) else "strided"


def capsule_facts(obj: Any) -> dict[str, Any]:
    """Ask an object for a capsule, and drop it: return name, version and flags, or the reason why there is none."""
    state = native.capsule_state(obj)
    if state is not None:
        return _read_capsule(obj) if state != "used" else {"refused": "the capsule was used before"}
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
        return {"refused": _said(error)}


def _read_capsule(capsule: Any) -> dict[str, Any]:
    if native.capsule_state(capsule) != "versioned":
        return {"name": "dltensor", "version": None, "flags": []}
    get = ctypes.PyDLL(None).PyCapsule_GetPointer  # ctypes.pythonapi belongs to everybody
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    struct = DLManagedTensorVersioned.from_address(get(capsule, b"dltensor_versioned"))
    facts = {"name": "dltensor_versioned", "version": [struct.version.major, struct.version.minor]}
    if struct.version.major != native.lib.DLX_DLPACK_MAJOR:  # later fields may lie elsewhere
        return {**facts, "flags": []}
    known = [word for bit, word in _FLAGS.items() if struct.flags & bit]
    rest = struct.flags & ~sum(_FLAGS)
    return {**facts, "flags": [*known, *([hex(rest)] if rest else [])], "byte_offset": struct.dl_tensor.byte_offset}
