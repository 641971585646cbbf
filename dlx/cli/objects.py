"""Objects in memory: `pkg.mod:attr` from the command line, and the arrays inside containers."""

from __future__ import annotations

import ast
import ctypes
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import dlx
from dlx import native
from dlx.abi import IS_COPIED, READ_ONLY, SUBBYTE_PADDED
from dlx.cli.entries import BadInput, Entry, Source, counted, one_line
from dlx.ctypes import DLManagedTensorVersioned
from dlx.errors import AdapterNotFoundError, ConversionError
from dlx.tensor import ArrayInfo, type_name

__all__ = ["capsule_facts", "entries_of", "layout", "read_object"]

_STEP = re.compile(r"\.?([^\W\d]\w*)|\[([^\[\]]+)\]")
_FLAGS = {READ_ONLY: "READ_ONLY", IS_COPIED: "IS_COPIED", SUBBYTE_PADDED: "IS_SUBBYTE_TYPE_PADDED"}


def read_object(name: str, module: str, path: str) -> Source:
    """Import a module, which runs it, and describe what one of its attributes holds."""
    print(f"dlx: importing {module}, which runs its code", file=sys.stderr)
    sys.path.insert(0, "")  # as `python -m` does: the folder that the user is in
    try:
        obj: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise BadInput(f"importing {module} failed: {type(error).__name__}: {error}") from error
    try:
        for attribute, index in _STEP.findall(path):
            obj = getattr(obj, attribute) if attribute else obj[ast.literal_eval(index)]
    except Exception as error:
        text = str(error) if attribute or not isinstance(error, ValueError) else f"[{index}] is no number and no text"
        raise BadInput(f"{module} has no {path}: {type(error).__name__}: {text}") from error
    notes = [f"imported {module}, which ran its code"]
    state = getattr(type(obj), "state_dict", None)
    if callable(state):
        obj, notes = obj.state_dict(), [*notes, "its state_dict()"]
    entries, others = entries_of(obj)
    if not entries:
        raise BadInput(f"it is {type_name(type(obj))}, which is no array and holds none")
    if others:
        notes.append(f"{counted(others, 'value')} of other kinds")
    return Source(name, "object", tuple(entries), notes=tuple(notes))


def entries_of(root: Any) -> tuple[list[Entry], int]:
    """Return (entries of the arrays in a tree of dicts, lists and tuples, the number of values that are none)."""
    entries: list[Entry] = []
    others = 0
    stack: list[tuple[str, Any]] = [("", root)]
    inside: set[int] = set()
    while stack:
        path, obj = stack.pop()
        if isinstance(obj, Mapping | list | tuple):
            if id(obj) not in inside:  # each container once: cycles end, and sharing is not counted twice
                inside.add(id(obj))
                stack.extend(reversed(list(_children(path, obj))))
            continue
        if path and isinstance(obj, bytes | bytearray | memoryview):  # plain data, inside a container
            others += 1
            continue
        try:
            entries.append(_entry(path, obj, dlx.describe(obj)))
        except AdapterNotFoundError:
            others += 1
        except ConversionError as error:
            entries.append(Entry(path, None, type_name(type(obj)), None, None, "?", refused=one_line(str(error))))
    return entries, others


def _children(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    pairs = obj.items() if isinstance(obj, Mapping) else enumerate(obj)
    for key, child in pairs:
        if isinstance(key, str) and key.replace(".", "_").replace("-", "_").isidentifier():
            yield (f"{path}.{key}" if path else key), child
        else:
            yield f"{path}[{key!r}]", child


def _entry(path: str, obj: Any, info: ArrayInfo) -> Entry:
    device = str(info.device) if info.device is not None else "?"
    nbytes = info.nbytes if info.shape is not None else None
    return Entry(
        path, info.dtype, info.dtype_name or "?", info.shape, nbytes, device, layout(info), info=info, obj=obj,
        notes=info.notes,
    )  # fmt: skip


def layout(info: ArrayInfo) -> str:
    """Return ``"C"``, ``"F"``, ``"strided"``, or nothing where it is not known."""
    if info.shape is None or info.strides is None:
        return ""
    if info.contiguous():
        return "C"
    backwards = ArrayInfo("", "", shape=info.shape[::-1], strides=info.strides[::-1])
    return "F" if backwards.contiguous() else "strided"


def capsule_facts(obj: Any) -> dict[str, Any]:
    """Ask an object for a capsule, look at it, and drop it: name, version, flags, or why there is none."""
    state = native.capsule_state(obj)
    if state is not None:
        return _of_capsule(obj) if state != "used" else {"refused": "the capsule was used before"}
    if not hasattr(type(obj), "__dlpack__"):
        return {}
    try:
        try:
            capsule = obj.__dlpack__(max_version=(native.lib.DLX_DLPACK_MAJOR, native.lib.DLX_DLPACK_MINOR))
        except TypeError:
            capsule = obj.__dlpack__()
        return _of_capsule(capsule)
    except Exception as error:  # a producer says no in its own words
        return {"refused": one_line(f"{type(error).__name__}: {error}", 200)}


def _of_capsule(capsule: Any) -> dict[str, Any]:
    if native.capsule_state(capsule) != "versioned":
        return {"name": "dltensor", "version": None, "flags": []}
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    struct = DLManagedTensorVersioned.from_address(get(capsule, b"dltensor_versioned"))
    facts = {"name": "dltensor_versioned", "version": [struct.version.major, struct.version.minor]}
    if struct.version.major != native.lib.DLX_DLPACK_MAJOR:  # what follows may lie elsewhere
        return {**facts, "flags": []}
    known = [word for bit, word in _FLAGS.items() if struct.flags & bit]
    rest = struct.flags & ~sum(_FLAGS)
    return {
        **facts,
        "flags": known + ([hex(rest)] if rest else []),
        "byte_offset": struct.dl_tensor.byte_offset,
    }
