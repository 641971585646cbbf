"""Reader of the folders of torch.distributed.checkpoint: ``.metadata`` and ``.distcp`` files.

The metadata is a pickle, which is read without its code: each class in it becomes a `_Record`. Each item of a
``.distcp`` file is a small torch checkpoint, a chunk of a tensor or another object.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Mapping
from math import prod
from typing import Any

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.native import Tensor
from dlx._core.types import HOST, DType, row_major
from dlx._engine.seam import FAST_PATH
from dlx._files.arrow_torch import load_checkpoint
from dlx._files.header import AGAIN, File, Memory, Named, are_extents, copy_to_memory, is_sibling
from dlx._files.pickles import check_pickle
from dlx._files.reading import naming_part
from dlx._files.selection import Names, select_tree
from dlx._protocols.pointer import empty
from dlx._registry.generic import Deferred
from dlx._support.text import one_line
from dlx.adapter.base import over_memory
from dlx.adapter.declarations import Blocker
from dlx.errors import DlxError, FileError

MAX_METADATA = 256 << 20  # bytes
_OTHER = "Read it with torch.distributed.checkpoint.load."
MAX_CORNERS = 1 << 24  # of the chunks of a tensor


class _Record:
    """An object of a pickle; its class has the name of the object's class, and no code."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = {}  # noqa: RUF012 - never written to

    def __new__(cls, *args: Any) -> Any:
        record = super().__new__(cls)
        record.arguments = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Builds lists, dicts, tuples, numbers, text and `_Record`s."""

    def find_class(self, module: str, name: str) -> Any:
        return type("_Record", (_Record,), {"name": f"{module}.{name}"})


def read_dcp(file: File, only: Names, skip: Names, *, private: bool, mapped: bool) -> Mapping[str, Any]:
    """Read the metadata of a checkpoint, and map or read the selected members."""
    if file.size > MAX_METADATA:
        raise FileError(f"its metadata has {file.size:,} bytes; dlx reads at most {MAX_METADATA:,}", fix=_OTHER)
    try:
        raw = file.read_at(file.size, 0)
        check_pickle(raw)
        root = _Unpickler(io.BytesIO(raw)).load().state
        members = {_text(name): _Member(info.state) for name, info in root["state_dict_metadata"].items()}
        for index, info in root["storage_data"].items():
            members[_text(index.state["fqn"])].add(index.state.get("offset"), info.state)
    except MemoryError:
        raise
    except Exception as error:  # a damaged or hostile pickle can cause any exception
        why = one_line(f"{type(error).__name__}: {error}", 100)
        raise FileError(f"its metadata does not describe a checkpoint: {why}", fix=AGAIN) from error
    members = dict(select_tree(members, only, skip))
    spans: dict[str, list[tuple[int, int]]] = {}
    for name, begin, end in (place for member in members.values() for place in member.places.values()):
        spans.setdefault(name, []).append((begin, end))
    memories: dict[str, Memory] = {}
    for name, wanted in spans.items():
        if not is_sibling(name):
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
        if self.dtype is not None and self.dtype.lanes != 1:
            raise ValueError("unusual dtype")
        self.places: dict[tuple[int, ...] | None, tuple[str, int, int]] = {}

    def add(self, offset: Any, place: Any) -> None:
        """Add the place of a chunk: a file, its first byte and the number of bytes."""
        begin, length = _numbers(place["offset"], place["length"])
        if place.get("transform_descriptors"):
            raise ValueError("a file is compressed")
        places = None if offset is None else _extents(offset)
        self.places[places] = _text(place["relative_path"]), begin, begin + length


def _extents(size: Any) -> tuple[int, ...]:
    """Return the extents of a pickled ``torch.Size``."""
    return _numbers(*size.arguments[0]) if size.arguments else ()


def _numbers(*values: Any) -> tuple[int, ...]:
    """Return sizes or offsets; errors do not quote them, since the text of nested tuples takes years, too."""
    if not are_extents(values):
        raise ValueError("unusual sizes")
    return values


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("unusual name")
    return value


def _cover(shape: tuple[int, ...], chunks: Mapping[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Return whether chunks, sizes by offsets, cover each element of a tensor exactly once.

    They do if each corner of a chunk, with the sign of its parity, is cancelled by corners of others or of the whole.
    """
    whole = (0,) * len(shape), shape
    split = [i for i, n in enumerate(shape) if any((at[i], sizes[i]) != (0, n) for at, sizes in chunks.items())]
    if len(chunks) << len(split) > MAX_CORNERS:
        return False
    corners: dict[tuple[int, ...], int] = {}
    for sign, (at, sizes) in [(-1, whole), *((1, each) for each in chunks.items())]:
        for ends in itertools.product((0, 1), repeat=len(split)):
            corner = tuple(at[i] + end * sizes[i] for i, end in zip(split, ends, strict=True))
            corners[corner] = corners.get(corner, 0) + sign * (-1) ** sum(ends)
    return not any(corners.values())


class _Members(Named):
    """The members of a checkpoint by name; each is read when it is used."""

    def __init__(self, file: str, members: Mapping[str, _Member], memories: dict[str, Memory]) -> None:
        self._names, self._file, self._memories = members, file, memories

    def __getitem__(self, name: str) -> Any:
        member = self._names[name]
        if member.shape is None or member.dtype is None:
            try:
                return self._read_item(member.places.get(None))
            except FileError as error:  # the other members can be read
                info = ArrayInfo("file", self._file, None, "object", None, device=HOST, nbytes=0)
                return Deferred(info, Blocker(error.reason, error.fix, FileError))
        nbytes = prod(member.shape) * member.dtype.bits // 8
        info = ArrayInfo("file", self._file, member.dtype, member.dtype.name, member.shape, device=HOST, nbytes=nbytes)
        return Deferred(info, Blocker("it is in chunks", resolution=lambda _: self._join(name, member), needs="copy"))

    def _join(self, name: str, member: _Member) -> Tensor:
        """Return a tensor with the values of all chunks, which must cover it exactly."""
        assert member.shape is not None and member.dtype is not None
        nbytes = prod(member.shape) * member.dtype.bits // 8
        if nbytes > sum(len(self._memories[place].bytes) for place in {name for name, _, _ in member.places.values()}):
            raise FileError(f"its files are smaller than the {nbytes:,} bytes of {one_line(name, 80)!r}", fix=AGAIN)
        if nbytes and not _cover(member.shape, member.chunks):
            raise FileError(f"the chunks of {one_line(name, 80)!r} overlap or leave gaps", fix=AGAIN)
        whole, steps = empty(member.shape, member.dtype), row_major(member.shape)
        for offsets, sizes in member.chunks.items():
            try:
                chunk = FAST_PATH(self._read_item(member.places.get(offsets)), "dlx")
                if chunk.shape != sizes or chunk.dtype != member.dtype:
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
