"""The encoding of a tree in a segment: JSON with containers, plain data and array numbers, and a block of key names.

It supports only builtin containers and plain data, so that decoding never runs code from the text. `decode` checks all
of the text, since anyone who can create a handle can write it.
"""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import accumulate
from typing import Any

from dlx._engine.tree import Tree
from dlx._registry.compound import CompoundHandler, Parts, without_private
from dlx._registry.handlers import Keys
from dlx._support.reflect import type_name
from dlx.errors import ConversionError, DlxError, HandleError

__all__ = ["Packed", "decode", "encode", "encode_value", "needs_tensors", "pack_lists", "pack_rows", "parse"]

# A tree is [root, [node, ...]]. A node is [kind, keys, children]. The root and each child is the number n of a node, ~n
# for array n, or a list of one plain value. Consecutive arrays are {"arrays": [first, end]}. Keys that are all text are
# {"names": [first, end]}: a range of bytes in the names, separated by zeros, which decodes much faster.
# A node "packed KIND TYPE" is a long list of plain data: the children are the arrays of its joined bytes and offsets.

_KINDS: dict[type, str] = {kind: kind.__name__ for kind in (list, tuple, dict, OrderedDict, deque, set, frozenset)}
_PACKED, MIN_PACKED = "packed ", 256  # elements of the shortest packed list
_COMPOUND = "compound "  # then the kind of a compound array
_KEYED = ("dict", "OrderedDict", _COMPOUND)
_EMPTY: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (list, dict, OrderedDict, deque, set)}
_FROZEN: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "frozenset": frozenset}
MAX_DEPTH = 200  # of tuples in a key or a set, since Python hashes them recursively
MAX_HASHED = 1 << 20  # values that one hash covers; a few tuples that contain each other can exceed it
_TOO_DEEP = f"a member of a set, or a key, is nested more than {MAX_DEPTH} levels deep, or has too many values"
_FLATTEN = "Share its values in a list instead."


def pack_rows(rows: Collection[Any]) -> tuple[str, bytes, array[int]] | None:
    """Return the kind, the joined bytes and the offsets of a list of text, bytes or records; None for other lists."""
    kinds = {*map(type, rows)}
    if kinds == {str}:
        kind, parts = "text", [row.encode("utf-8", "surrogatepass") for row in rows]
    elif kinds == {bytes}:
        kind, parts = "bytes", [*rows]
    elif kinds <= {dict, list, tuple}:
        try:
            kind, parts = "record", [json.dumps(encode_value(row), separators=(",", ":")).encode() for row in rows]
        except ConversionError:
            return None
    else:
        return None
    return kind, b"".join(parts), array("q", accumulate(map(len, parts), initial=0))


def pack_lists(tree: Tree) -> tuple[dict[int, tuple[str, bytes, array[int]]], set[int]]:
    """Return the long lists of plain data of a tree as `pack_rows` does, by node, and the nodes inside of them."""
    nodes = list(tree.nodes())
    packed: dict[int, tuple[str, bytes, array[int]]] = {}
    inside: set[int] = set()
    if not any(len(parts) >= MIN_PACKED and type(obj) in (list, tuple) for obj, _, _, parts, _ in nodes):
        return packed, inside
    uses = Counter(link for *_, links in nodes for link in links.values())
    for i, (obj, _, _, parts, _) in enumerate(nodes):
        if i in inside or len(parts) < MIN_PACKED or type(obj) not in (list, tuple):
            continue
        below, waiting = set[int](), [i]
        while waiting:
            links = nodes[waiting.pop()][4].values()
            if any(link < 0 or (uses[link] > 1 and type(nodes[link][0]) is not tuple) for link in links):
                break  # an array, or a mutable container that is in two places
            below.update(links)
            waiting += links
        else:
            rows = pack_rows(parts)
            if rows is not None:
                packed[i] = (f"{_PACKED}{rows[0]} {type(obj).__name__}", *rows[1:])
                inside |= below
    return packed, inside


def encode(
    tree: Tree,
    number: list[int],
    fail: Callable[[DlxError, tuple[Any, ...]], None],
    packed: dict[int, tuple[str, int, int]],
    inside: set[int],
) -> tuple[Any, bytes]:
    """Return the nodes and names of a tree; `number` maps its arrays to their numbers, `fail` gets errors and paths.

    `packed` has the kind and the two arrays of each packed list by node, and of each array of text by ~array; the nodes
    `inside` of packed lists are left out.
    """
    found = list(tree.nodes())
    at: dict[int, Any] = {}  # node, or ~array of text -> its number in the text; a wrapper -> its child

    def resolve(link: int) -> Any:
        return ~number[~link] if link < 0 and link not in at else at[link]

    kept = [i for i, (_, handler, *_) in enumerate(found) if handler.kind != "wrapper" and i not in inside]
    order = [*kept, *(link for link in packed if link < 0)]
    at = {i: n for n, i in enumerate(order)}
    for i in reversed(range(len(found))):  # replace each wrapper by its child, which comes later
        if i not in at and i not in inside:
            _, _, _, parts, links = found[i]
            at[i] = resolve(links[0]) if links else [encode_value(parts[0]) if parts else None]  # None: an error
    nodes = []
    names = bytearray()
    for i in order:
        if i in packed:
            nodes.append([packed[i][0], None, [~number[each] for each in packed[i][1:]]])
            continue
        obj, handler, keys, parts, links = found[i]
        kind = _KINDS.get(type(obj)) or ("tuple" if isinstance(obj, tuple) else None)
        if kind is None:
            kind = "dict" if handler.kind in ("mapping", "record") else "list"
        if kind == "deque" and obj.maxlen is not None:
            kind = f"deque {obj.maxlen}"
        if isinstance(handler, CompoundHandler):
            kind = _COMPOUND + handler.kind_of(obj)
        children = []
        for j, part in enumerate(parts):
            try:
                children.append(resolve(links[j]) if j in links else [encode_value(part)])
            except ConversionError as error:
                fail(error, tree.path_in(i, j))
                children.append([None])
        if isinstance(keys, Keys) and kind.startswith(_COMPOUND):
            others = without_private(keys.context)
            children += [[encode_value(part)] for part in others.values()]
            keys = [*keys, *others]
        try:
            encoded = _encode_keys(keys or (), names) if kind.startswith(_KEYED) else None
        except ConversionError as error:
            fail(error, tree.path_in(i))
            encoded = []
        nodes.append([kind, encoded, _encode_children(children)])
    bad = _find_unhashable(nodes)
    if bad is not None:
        fail(ConversionError(_TOO_DEEP, fix=_FLATTEN), tree.path_in(kept[bad]))
    return ([at[0], nodes], bytes(names)) if found else ([-1, []], b"")


def _encode_keys(keys: Collection[Any], names: bytearray) -> Any:
    """Encode the keys of a node; append them to `names` if all are text without zeros."""
    if keys and {*map(type, keys)} == {str}:
        whole = "\0".join(keys)
        if whole.count("\0") == len(keys) - 1:
            first = len(names)
            with suppress(UnicodeEncodeError):  # lone surrogates
                names += whole.encode()
                return {"names": [first, len(names)]}
    return [encode_value(key) for key in keys]


def _encode_children(children: list[Any]) -> Any:
    """Encode the children of a node, as a range if they are consecutive arrays."""
    first = children[0] if children else 0
    if type(first) is not int or first >= 0 or children != [*range(first, first - len(children), -1)]:
        return children
    return {"arrays": [~first, ~first + len(children)]}


def encode_value(value: Any, depth: int = 0) -> Any:
    """Encode plain data for JSON; raise `ConversionError` for anything else."""
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
    if kind in (tuple, frozenset):
        if depth >= MAX_DEPTH:
            raise ConversionError(_TOO_DEEP, fix=_FLATTEN)
        return {kind.__name__: [encode_value(each, depth + 1) for each in value]}
    if kind in (list, dict) and depth < MAX_DEPTH:  # in a record
        rows = value if kind is list else value.items()
        return {kind.__name__: [encode_value(each, depth + 1) for each in rows]}
    reason = "it is neither an array, a container nor plain data, and dlx.share does not pickle objects"
    fix = "Remove it from the shared container, or replace it by an array or a number."
    if kind is Packed:
        reason, fix = "it is a list that is read lazily", "Pass list(x) in its place."
    raise ConversionError(reason, source=type_name(kind), fix=fix)


def _find_unhashable(nodes: list[Any]) -> int | None:
    """Return the number of a set with a member that is too deep or too large to hash; None if all are fine."""
    height: dict[int, int] = {}  # of visited tuples and frozensets; MAX_DEPTH while they are open
    weight: dict[int, int] = {}
    for number, (kind, _, children) in enumerate(nodes):
        if kind not in ("set", "frozenset"):
            continue
        waiting = _frozen_children(nodes, children)
        members = [*waiting]
        while waiting:
            last = waiting[-1]
            inner = _frozen_children(nodes, nodes[last][2])
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
                weight[last] = 1 if nodes[last][0] == "frozenset" else min(MAX_HASHED, whole)  # a frozenset caches it
        if any(height[each] >= MAX_DEPTH or weight[each] >= MAX_HASHED for each in members):
            return number
    return None


def _frozen_children(nodes: list[Any], children: Any) -> list[int]:
    """Return the numbers of those children that are tuples or frozensets."""
    return [each for each in children if type(each) is int and each >= 0 and nodes[each][0] in _FROZEN]


class Packed:
    """A list of text, bytes or records in shared memory, which creates an element when it is read."""

    __slots__ = ("_data", "_decode", "_kind", "_offsets", "_tensors")

    def __init__(self, kind: str, data: Any, offsets: Any) -> None:
        self._kind, self._tensors, self._decode = kind, (data, offsets), _DECODE[kind]
        self._data, self._offsets = memoryview(data).cast("B"), memoryview(offsets)
        if self._offsets.format not in ("l", "q") or self._offsets.ndim != 1 or not self._offsets:
            raise HandleError("its description of a packed list is invalid")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        i = range(len(self))[i]
        first, end = self._offsets[i], self._offsets[i + 1]
        try:
            if 0 <= first <= end <= len(self._data):
                return self._decode(bytes(self._data[first:end]))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            pass  # no error here has a cause that the reader could act on
        raise HandleError(f"its element {i} is invalid")

    def __repr__(self) -> str:
        return f"<{len(self):,} packed elements: {self._kind}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, (self._kind, *self._tensors)  # between workers, the tensors travel as a descriptor


# ---- decode ----------------------------------------------------------------------------------------------------------


def decode(tree: Any, names: bytes, arrays: list[Any], *, joins: bool = False, lazy: bool = False) -> Any:
    """Build the encoded tree with these names and arrays; raise `HandleError` if the encoding is invalid.

    A compound array becomes `Parts` if dlx `joins` them later, otherwise a dict of its parts. Packed lists stay
    `Packed` if `lazy`.
    """
    try:
        root, nodes = tree
        if type(root) is int and root < 0:
            return arrays[~root]
        if _find_unhashable(nodes) is not None:
            raise HandleError("its description has a set with a member that is nested too deeply")
        return _Builder(nodes, names, arrays, joins, lazy).build_child(root)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, HandleError):
            raise
        raise HandleError("its description is invalid") from error


def needs_tensors(tree: Any) -> bool:
    """Return whether an encoded tree has packed lists, `Parts`, or a set, which cannot contain all kinds of arrays."""
    try:
        return any(kind.startswith(("set", "frozenset", _COMPOUND, _PACKED)) for kind, _, _ in tree[1])
    except (TypeError, ValueError, LookupError) as error:
        raise HandleError("its description is invalid") from error


class _Builder:
    """Builds the containers of nodes: mutable ones empty, then frozen ones from inside out, then fills the mutable."""

    def __init__(self, nodes: list[Any], names: bytes, arrays: list[Any], joins: bool, lazy: bool) -> None:
        self.nodes, self.names, self.arrays = nodes, names, arrays
        self.made: list[Any] = [
            _unpack(kind, [arrays[~each] for each in children], lazy)
            if kind.startswith(_PACKED)
            else _new_container(kind, joins)
            for kind, _, children in nodes
        ]
        for number, made in enumerate(self.made):
            if made is None:
                self._build_frozen(number)
        for (kind, keys, children), made in zip(nodes, self.made, strict=True):
            if isinstance(made, dict):
                values = self._build_children(children)
                if type(keys) is dict:
                    first, end = keys["names"]
                    if not 0 <= first <= end <= len(self.names):
                        raise HandleError("its description refers to missing keys")
                    made.update(zip(self.names[first:end].decode().split("\0"), values, strict=True))
                else:
                    made.update(zip(map(_decode_value, keys), values, strict=True))
                if len(made) != len(values):
                    raise HandleError("its description has a duplicate key")
            elif kind not in _FROZEN and not kind.startswith(_PACKED):
                (made.update if type(made) is set else made.extend)(self._build_children(children))

    def build_child(self, child: Any) -> Any:
        """Return the container, array or value that an encoded child refers to."""
        if type(child) is int:
            return self.made[child] if child >= 0 else self.arrays[~child]
        (value,) = child
        return _decode_value(value)

    def _build_children(self, children: Any) -> list[Any]:
        if type(children) is not dict:
            return [self.build_child(each) for each in children]
        first, end = children["arrays"]
        if not 0 <= first < end <= len(self.arrays):
            raise HandleError("its description refers to missing arrays")
        return self.arrays[first:end]

    def _build_frozen(self, number: int) -> None:
        waiting, opened = [number], set()
        while waiting:
            last = waiting[-1]
            kind, _, children = self.nodes[last]
            inner = [each for each in children if type(each) is int and each >= 0 and self.made[each] is None]
            if self.made[last] is not None:
                waiting.pop()
            elif not inner:
                self.made[waiting.pop()] = _FROZEN[kind](self._build_children(children))
            elif last in opened:
                raise HandleError("its description has a tuple inside itself")
            else:
                opened.add(last)
                waiting += inner


def _unpack(kind: str, arrays: list[Any], lazy: bool) -> Any:
    _, rows, container = kind.split(" ")
    packed = Packed(rows, *arrays)
    return packed if lazy else {"list": list, "tuple": tuple}[container](packed)


def _new_container(kind: str, joins: bool) -> Any:
    if kind.startswith(_COMPOUND):
        return Parts(kind.removeprefix(_COMPOUND)) if joins else {}
    if kind.startswith("deque "):
        return deque(maxlen=int(kind[6:]))
    return None if kind in _FROZEN else _EMPTY[kind]()


def _decode_value(value: Any, depth: int = 0) -> Any:
    if type(value) is not dict:
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise HandleError("its description has a value of an unknown type")
    ((kind, inner),) = value.items()
    if kind in _FROZEN and depth < MAX_DEPTH:
        return _FROZEN[kind]([_decode_value(each, depth + 1) for each in inner])
    if kind in ("list", "dict") and depth < MAX_DEPTH:
        return _EMPTY[kind]([_decode_value(each, depth + 1) for each in inner])  # type: ignore[call-arg]
    if kind == "int":
        return int(inner, 16)
    if kind == "float":
        return float.fromhex(inner)
    if kind == "complex":
        return complex(*map(float.fromhex, inner))
    if kind in ("bytes", "bytearray"):
        raw = base64.b64decode(inner, validate=True)
        return raw if kind == "bytes" else bytearray(raw)
    raise HandleError("its description has a value of an unknown type")


_DECODE: dict[str, Callable[[bytes], Any]] = {
    "text": lambda raw: raw.decode("utf-8", "surrogatepass"),
    "bytes": lambda raw: raw,
    "record": lambda raw: _decode_value(json.loads(raw)),
}


def parse(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; raise `HandleError` if the text is anything else."""
    try:
        fields = json.loads(str(text, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise HandleError("its description is not valid JSON") from error
    if type(fields) is not dict:
        raise HandleError("its description is invalid")
    return fields
