"""What in a segment describes a tree: a text in JSON, of its containers, plain data and links to its arrays; and names.

Only Python's own containers and plain data can be said, so nothing that a text says makes code run. A text may come
from anybody who can make a handle: `decoded` believes nothing.
"""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from dlx._engine.tree import Tree
from dlx._support.reflect import type_name
from dlx.errors import ConversionError, DlxError, HandleError

__all__ = ["decoded", "encoded", "has_sets", "parsed"]

# A tree is [root, [node, ...]]. A node is [kind, keys, children]. The root and children are numbers, of a node from 0
# on or of an array as ~n, or a list around one plain value. Children that are arrays in a row are
# {"arrays": [first, end]}. Keys that are all text, as most are, are {"names": [first, end]}, bytes of the names, which
# zeros separate: these are read much faster.

_KINDS: dict[type, str] = {kind: kind.__name__ for kind in (list, tuple, dict, OrderedDict, deque, set, frozenset)}
_KEYED = ("dict", "OrderedDict")
_EMPTY: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (list, dict, OrderedDict, deque, set)}
_FROZEN: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "frozenset": frozenset}
MAX_DEPTH = 200  # of tuples in a key or a set: Python takes their hashes by recursion
MAX_HASHED = 1 << 20  # values that the hash of a set's member is made of; a few tuples can hold one another so often
_TOO_DEEP = f"what is in a set, or in a key, is nested more than {MAX_DEPTH} levels deep, or in itself too often"


def encoded(tree: Tree, number: list[int], fail: Callable[[DlxError, tuple[Any, ...]], None]) -> tuple[Any, bytes]:
    """Return the nodes and names of a tree, by the `number` of each array; `fail` gets errors and paths."""
    found = list(tree.nodes())
    at: dict[int, Any] = {}  # number of a node -> its number in the text, or its only child

    def linked(link: int) -> Any:
        return ~number[~link] if link < 0 else at[link]

    kept = [i for i, (_, handler, *_) in enumerate(found) if handler.kind != "wrapper"]
    at = {i: n for n, i in enumerate(kept)}
    for i in reversed(range(len(found))):  # a wrapper is replaced by its child, which comes later
        if i not in at:
            _, _, _, parts, links = found[i]
            at[i] = linked(links[0]) if links else [_plain(parts[0]) if parts else None]  # None: it failed
    nodes = []
    names = bytearray()
    for i in kept:
        obj, handler, keys, parts, links = found[i]
        kind = _KINDS.get(type(obj)) or ("tuple" if isinstance(obj, tuple) else None)
        if kind is None:
            kind = "dict" if handler.kind in ("mapping", "record") else "list"
        if kind == "deque" and obj.maxlen is not None:
            kind = f"deque {obj.maxlen}"
        children = []
        for j, part in enumerate(parts):
            try:
                children.append(linked(links[j]) if j in links else [_plain(part)])
            except ConversionError as error:
                fail(error, tree.path_in(i, j))
                children.append([None])
        try:
            said = _keys(keys or (), names) if kind in _KEYED else None
        except ConversionError as error:
            fail(error, tree.path_in(i))
            said = []
        nodes.append([kind, said, _row(children)])
    bad = _unhashable(nodes)
    if bad is not None:
        fail(ConversionError(_TOO_DEEP), tree.path_in(kept[bad]))
    return ([at[0], nodes], bytes(names)) if found else ([-1, []], b"")


def _keys(keys: Collection[Any], names: bytearray) -> Any:
    """Return keys as they are written; those that can be are put among the names."""
    if keys and {*map(type, keys)} == {str}:
        whole = "\0".join(keys)
        if whole.count("\0") == len(keys) - 1:
            first = len(names)
            with suppress(UnicodeEncodeError):  # halves of a pair
                names += whole.encode()
                return {"names": [first, len(names)]}
    return [_plain(key) for key in keys]


def _row(children: list[Any]) -> Any:
    """Return children as they are written: briefly where they are arrays in a row, as most are."""
    first = children[0] if children else 0
    if type(first) is not int or first >= 0 or children != [*range(first, first - len(children), -1)]:
        return children
    return {"arrays": [~first, ~first + len(children)]}


def _plain(value: Any, depth: int = 0) -> Any:
    """Return plain data as JSON writes it; raise `ConversionError` for anything else."""
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= 64):
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(value).decode()}
    if kind is tuple:
        if depth >= MAX_DEPTH:
            raise ConversionError(_TOO_DEEP)
        return {"tuple": [_plain(each, depth + 1) for each in value]}
    reason = "it is neither an array, nor a container, nor plain data, and no code goes from process to process"
    fix = "Take it out of what is shared, or give an array or a number in its place."
    raise ConversionError(reason, source=type_name(kind), fix=fix)


def _unhashable(nodes: list[Any]) -> int | None:
    """Return the number of a set with a member whose hash would recurse too deep or be too large, if there is one."""
    height: dict[int, int] = {}  # of tuples and frozensets that were seen; those that are open have MAX_DEPTH
    weight: dict[int, int] = {}
    for number, (kind, _, children) in enumerate(nodes):
        if kind not in ("set", "frozenset"):
            continue
        waiting = _inner(nodes, children)
        members = [*waiting]
        while waiting:
            last = waiting[-1]
            inner = _inner(nodes, nodes[last][2])
            if last not in height:
                height[last], weight[last] = MAX_DEPTH, 0
                waiting += [each for each in inner if each not in height]
                continue
            waiting.pop()
            if not weight[last]:
                height[last] = min(MAX_DEPTH, 1 + max((height[each] for each in inner), default=0))
                row = nodes[last][2]
                own = row["arrays"][1] - row["arrays"][0] if type(row) is dict else len(row)
                whole = 1 + own + sum(weight[each] for each in inner)
                weight[last] = 1 if nodes[last][0] == "frozenset" else min(MAX_HASHED, whole)  # that keeps its hash
        if any(height[each] >= MAX_DEPTH or weight[each] >= MAX_HASHED for each in members):
            return number
    return None


def _inner(nodes: list[Any], children: Any) -> list[int]:
    """Return the numbers of the tuples and frozensets among the children of a node."""
    return [each for each in children if type(each) is int and each >= 0 and nodes[each][0] in _FROZEN]


# ---- and back --------------------------------------------------------------------------------------------------------


def decoded(said: Any, names: bytes, arrays: list[Any]) -> Any:
    """Return the tree that a text describes, with names and arrays; raise `HandleError` if it describes none."""
    try:
        root, nodes = said
        if type(root) is int and root < 0:
            return arrays[~root]
        if _unhashable(nodes) is not None:
            raise HandleError("its description has a set of what is nested too deep")
        return _Builder(nodes, names, arrays).child(root)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, HandleError):
            raise
        raise HandleError("its description is that of no tree") from error


def has_sets(said: Any) -> bool:
    """Return whether a tree has a set, which cannot hold the arrays of every framework. Errors: as `decoded`."""
    try:
        return any(kind in ("set", "frozenset") for kind, _, _ in said[1])
    except (TypeError, ValueError, LookupError) as error:
        raise HandleError("its description is that of no tree") from error


class _Builder:
    """Makes containers of nodes: first those that can be empty, then tuples, inner ones first, then fills the first."""

    def __init__(self, nodes: list[Any], names: bytes, arrays: list[Any]) -> None:
        self.nodes, self.names, self.arrays = nodes, names, arrays
        self.made: list[Any] = [_new(kind) for kind, _, _ in nodes]
        for number, made in enumerate(self.made):
            if made is None:
                self._freeze(number)
        for (kind, keys, children), made in zip(nodes, self.made, strict=True):
            if type(made) in (dict, OrderedDict):
                values = self._children(children)
                if type(keys) is dict:
                    first, end = keys["names"]
                    if not 0 <= first <= end <= len(self.names):
                        raise HandleError("its description names keys that are not there")
                    made.update(zip(self.names[first:end].decode().split("\0"), values, strict=True))
                else:
                    made.update(zip(map(_value, keys), values, strict=True))
                if len(made) != len(values):
                    raise HandleError("its description has a key twice")
            elif kind not in _FROZEN:
                (made.update if type(made) is set else made.extend)(self._children(children))

    def child(self, said: Any) -> Any:
        """Return the value of a child of a node."""
        if type(said) is int:
            return self.made[said] if said >= 0 else self.arrays[~said]
        (value,) = said
        return _value(value)

    def _children(self, said: Any) -> list[Any]:
        if type(said) is not dict:
            return [self.child(each) for each in said]
        first, end = said["arrays"]
        if not 0 <= first < end <= len(self.arrays):
            raise HandleError("its description names arrays that are not there")
        return self.arrays[first:end]

    def _freeze(self, number: int) -> None:
        waiting, opened = [number], set()
        while waiting:
            last = waiting[-1]
            kind, _, children = self.nodes[last]
            inner = [each for each in children if type(each) is int and each >= 0 and self.made[each] is None]
            if self.made[last] is not None:
                waiting.pop()
            elif not inner:
                self.made[waiting.pop()] = _FROZEN[kind](self._children(children))
            elif last in opened:
                raise HandleError("its description has a tuple inside itself")
            else:
                opened.add(last)
                waiting += inner


def _new(kind: str) -> Any:
    if kind.startswith("deque "):
        return deque(maxlen=int(kind[6:]))
    return None if kind in _FROZEN else _EMPTY[kind]()


def _value(said: Any, depth: int = 0) -> Any:
    if type(said) is not dict:
        if said is None or type(said) in (bool, int, float, str):
            return said
        raise HandleError("its description has a value of no known kind")
    ((kind, inner),) = said.items()
    if kind == "tuple" and depth < MAX_DEPTH:
        return tuple(_value(each, depth + 1) for each in inner)
    if kind == "int":
        return int(inner, 16)
    if kind == "float":
        return float.fromhex(inner)
    if kind == "complex":
        return complex(*map(float.fromhex, inner))
    if kind in ("bytes", "bytearray"):
        raw = base64.b64decode(inner, validate=True)
        return raw if kind == "bytes" else bytearray(raw)
    raise HandleError("its description has a value of no known kind")


def parsed(text: bytes) -> dict[str, Any]:
    """Return a text as JSON, or raise `HandleError`."""
    try:
        said = json.loads(str(text, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise HandleError("its description is no JSON") from error
    if type(said) is not dict:
        raise HandleError("its description is that of no tree")
    return said
