"""Reader of the folders of torch.distributed.checkpoint: ``.metadata`` and ``.distcp`` files.

The metadata is a pickle, which is read without its code: each class in it becomes a `_Record`. Each item of a
``.distcp`` file is a small torch checkpoint, a chunk of a tensor or another object.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.native import Tensor
from dlx._core.types import HOST, DType, row_major
from dlx._engine.seam import FAST_PATH
from dlx._files.arrow_torch import load_checkpoint
from dlx._files.header import AGAIN, File, Memory, Named, copy_to_memory
from dlx._files.reading import naming_part
from dlx._protocols.pointer import empty, extents_of
from dlx._registry.generic import Deferred
from dlx._support.text import one_line
from dlx.adapter.base import over_memory
from dlx.adapter.declarations import Blocker
from dlx.errors import DlxError, FileError

__all__ = ["read_dcp"]

MAX_METADATA = 256 << 20  # bytes
_OTHER = "Read it with torch.distributed.checkpoint.load."
_REMOVED = (pickle.ADDITEMS, pickle.FROZENSET, pickle.EXT1, pickle.EXT2, pickle.EXT4)


class _Record:
    """An object of a pickle; its class has the name of the object's class, and no code."""

    name = ""
    args: tuple[Any, ...] = ()
    state: Any = {}  # noqa: RUF012 - never written to

    def __new__(cls, *args: Any) -> Any:
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):  # the one in C allocates what a file claims
    """Builds lists, dicts, tuples, numbers, text and `_Record`s."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        return type("_Record", (_Record,), {"name": f"{module}.{name}"})

    def load_setitems(self, items: list[Any] | None = None) -> None:
        items = self.pop_mark() if items is None else items
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and not isinstance(key, _Record):  # nested tuples take years to hash
                raise TypeError("unusual key")
            self.stack[-1][key] = value

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self.load_setitems([self.stack.pop(), value])

    dispatch: ClassVar[dict[int, Any]] = {
        code: function for code, function in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REMOVED
    } | {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems}


def read_dcp(file: File, pick: Callable[[Any], list[str]], *, private: bool, mapped: bool) -> Mapping[str, Any]:
    """Read the metadata of a checkpoint, and map or read the members that ``pick(names)`` returns."""
    if file.size > MAX_METADATA:
        raise FileError(f"its metadata has {file.size:,} bytes; dlx reads at most {MAX_METADATA:,}", fix=_OTHER)
    try:
        root = _Unpickler(io.BytesIO(file.read_at(file.size, 0))).load().state
        members = {name: _Member(info.state) for name, info in root["state_dict_metadata"].items()}
        for index, info in root["storage_data"].items():
            members[index.state["fqn"]].add(index.state.get("offset"), info.state)
    except MemoryError:
        raise
    except Exception as error:  # a damaged or hostile pickle can cause any exception
        why = one_line(f"{type(error).__name__}: {error}", 100)
        raise FileError(f"its metadata does not describe a checkpoint: {why}", fix=AGAIN) from error
    members = {name: members[name] for name in pick(members)}
    spans: dict[str, list[tuple[int, int]]] = {}
    for name, begin, end in (place for member in members.values() for place in member.places.values()):
        spans.setdefault(name, []).append((begin, end))
    memories: dict[str, Memory] = {}
    for name, wanted in spans.items():
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise FileError(f"it lists {one_line(name, 80)!r}, which is not a file in its folder")
        with naming_part(name), File(file.path.parent / name) as part:
            if max(end for _, end in wanted) > part.size:
                raise FileError("it is truncated", fix=AGAIN)
            memories[name] = Memory(part, private=private, spans=None if mapped else wanted)
    return _Members(file.path.parent.name, members, memories)


class _Member:
    """A tensor or another object, and the places of its chunks by their offsets; None: of another object."""

    def __init__(self, state: Any) -> None:
        self.chunks = {_extents(e.state["offsets"]): _extents(e.state["sizes"]) for e in state.get("chunks", ())}
        self.shape = _extents(state["size"]) if "size" in state else None
        self.dtype = DType(state["properties"].state[0].name.removeprefix("torch.")) if "size" in state else None
        self.places: dict[tuple[int, ...] | None, tuple[str, int, int]] = {}

    def add(self, offset: Any, place: Any) -> None:
        """Add the place of a chunk: a file, its first byte and the number of bytes."""
        name, begin, length = place["relative_path"], place["offset"], place["length"]
        if type(name) is not str or min(extents_of((begin, length))) < 0 or place.get("transform_descriptors"):
            raise ValueError("a file is compressed or invalid")
        self.places[None if offset is None else _extents(offset)] = name, begin, begin + length


def _extents(size: Any) -> tuple[int, ...]:
    """Return the extents of a pickled ``torch.Size``."""
    extents, *_ = size.args or ((),)
    return extents_of(tuple(extents))


class _Members(Named[Any]):
    """The members of a checkpoint by name; each is read when it is used."""

    _names: dict[str, _Member]

    def __init__(self, file: str, members: dict[str, _Member], memories: dict[str, Memory]) -> None:
        self._file, self._names, self._memories = file, members, memories

    def __getitem__(self, name: str) -> Any:
        member = self._names[name]
        if member.shape is None or member.dtype is None:
            return self._read_item(member.places.get(None))
        nbytes = prod(member.shape) * member.dtype.bits // 8
        info = ArrayInfo("file", self._file, member.dtype, member.dtype.name, member.shape, device=HOST, nbytes=nbytes)
        return Deferred(info, Blocker("it is in chunks", resolution=lambda _: self._join(name), needs="copy"))

    def _join(self, name: str) -> Tensor:
        """Return a tensor with the values of all chunks, which must cover it exactly."""
        member = self._names[name]
        assert member.shape is not None and member.dtype is not None
        whole, steps = empty(member.shape, member.dtype), row_major(member.shape)
        if sum(map(prod, member.chunks.values())) != prod(member.shape):
            raise FileError(f"the chunks of {one_line(name, 80)!r} overlap or leave gaps", fix=AGAIN)
        for offsets, sizes in member.chunks.items():
            try:
                chunk = FAST_PATH(self._read_item(member.places.get(offsets)), "dlx")
                inside = all(o + n <= extent for o, n, extent in zip(offsets, sizes, member.shape, strict=True))
                if chunk.shape != sizes or chunk.dtype != member.dtype or not inside:
                    raise FileError("it does not fit")
            except (DlxError, ValueError) as error:
                why = getattr(error, "reason", "") or error
                raise FileError(f"a chunk of {one_line(name, 80)!r} is damaged: {why}", fix=AGAIN) from error
            at = whole.data_ptr + sum(o * s for o, s in zip(offsets, steps, strict=True)) * member.dtype.bits // 8
            if prod(sizes):
                box = over_memory(at, (1, *sizes), (1, *steps), member.dtype, HOST, owner=whole)
                native.tensor_fill(box, [chunk], 0)
        return whole

    def _read_item(self, place: tuple[str, int, int] | None) -> Any:
        if place is None:
            raise FileError("its metadata does not say where it is", fix=AGAIN)
        data = self._memories[place[0]].bytes[place[1] : place[2]]
        with File(data, place[0]) as part, copy_to_memory(part, needs_path=True) as copy:  # for torch's checks
            return load_checkpoint(copy)[0]
