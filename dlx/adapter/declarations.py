"""The data types in which an adapter states facts about its framework. Authors import them from `dlx.adapter`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.stream import Stream
from dlx._core.types import Device
from dlx.errors import Attribute, ConversionError, LayoutError, Member

__all__ = [
    "ALIGNMENTS", "OWNER_BOUNDS", "Arrays", "Blocker", "Capabilities", "Container", "FastPath", "Guard", "KnownIssue",
    "Layout", "Owner", "StreamSupport", "WriteTracking",
]  # fmt: skip

OWNER_BOUNDS = "owner_bounds"
"""What `FastPath.guard_function` says when it compares tensors with the bytes that their owner has."""


class Layout:
    """Features of a layout that a consumer can hold; extents of 0 and 1 are ignored.

    Attributes
    ----------
    NEGATIVE, ZERO
        Strides below 0; strides of 0 (broadcasting).
    GAPS
        Unused elements between used ones, or overlap.
    PERMUTED
        Dimensions in another than row-major order.
    ANY
        All of them.
    """

    NEGATIVE: int = lib.DLX_LAYOUT_NEGATIVE
    ZERO: int = lib.DLX_LAYOUT_ZERO
    GAPS: int = lib.DLX_LAYOUT_GAPS
    PERMUTED: int = lib.DLX_LAYOUT_PERMUTED
    ANY: int = NEGATIVE | ZERO | GAPS | PERMUTED


EXTENTS = {
    "any": 0,
    "leading": lib.DLX_EXTENTS_LEADING,
    "leading bytes": lib.DLX_EXTENTS_LEADING | lib.DLX_EXTENTS_BYTES,
    "bytes": lib.DLX_EXTENTS_ALL | lib.DLX_EXTENTS_BYTES,
    "addressed": lib.DLX_EXTENTS_ALL | lib.DLX_EXTENTS_BYTES,
    "none": lib.DLX_EXTENTS_NONE,
}
"""Values of `Capabilities.empty_extents`, with what C calls them."""

ALIGNMENTS = tuple(1 << power for power in range(13))
"""What an address can be asked to be a multiple of: a page at most, by which decisions are kept (`planner.decide`)."""


@dataclass(frozen=True)
class Capabilities:
    """What a consumer takes as it is; anything else is copied or refused before it gets there.

    Attributes
    ----------
    dtypes, device_types
        Names of dtypes (`DType.name`), and DLPack device types; None for any.
    layouts
        `Layout` bits that its arrays can hold.
    min_alignment
        Bytes that the address must be a multiple of, a power of 2 up to 4096; 0 for the dtype's natural alignment.
    ndims
        Fewest and most dimensions.
    keeps_readonly
        Whether its arrays keep the read-only flag, or cannot be written at all.
    copies
        Whether it copies everything that it imports: it shares no memory, accepts read-only memory, and ``copy=False``
        is refused. A mapping names the dtypes that it copies, each with the reason:
        ``{"bool": "packs bools eight to a byte"}``.
    home
        Device to which host memory is moved if a call names no device and does not forbid a copy; None: it stays.
    subbyte
        How it holds elements of less than a byte (int4, float6): ``"packed"``, as DLPack does unless a flag says
        otherwise, ``"padded"`` to a byte each, or ``"both"``.
    empty_extents
        Limits on extents of arrays without elements: ``"any"`` none; ``"leading"`` those before the first 0 multiply to
        less than ``2**64``, with ``"leading bytes"`` to less than ``2**63`` bytes; ``"bytes"`` all but 0 make less than
        ``2**63`` bytes; ``"addressed"`` the same, and the address is not 0; ``"none"`` it takes no such array.
    refusals
        (reason, fix), by name, for dtypes and kinds of devices that the framework has but refuses, if the refusal needs
        an explanation: ``{"int64": ("it would narrow int64", "Switch x64 on.")}``.
    """

    dtypes: frozenset[str] | None
    device_types: frozenset[int] | None = frozenset({1})
    layouts: int = 0
    min_alignment: int = 0
    ndims: tuple[int, int] = (0, 64)
    keeps_readonly: bool = False
    copies: bool | Mapping[str, str] = False
    home: Device | None = None
    subbyte: str = "packed"
    empty_extents: str = "any"
    refusals: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.min_alignment and self.min_alignment not in ALIGNMENTS:
            raise ValueError(f"min_alignment must be 0 or a power of 2 up to 4096, found {self.min_alignment!r}")
        if self.subbyte not in ("packed", "padded", "both"):
            raise ValueError(f"subbyte must be 'packed', 'padded' or 'both', found {self.subbyte!r}")
        if self.empty_extents not in EXTENTS:
            raise ValueError(f"empty_extents must be one of {sorted(EXTENTS)}, found {self.empty_extents!r}")
        if both := self.refusals.keys() & (self.dtypes or ()):
            raise ValueError(f"dtypes cannot be taken and refused, found {sorted(both)} in both")


@dataclass(frozen=True)
class Blocker:
    """A property of an array, known before it is exported, that blocks its conversion.

    Attributes
    ----------
    because, fix
        The reason, as the middle of an error message, and one sentence that says what to do; empty if an option of
        `convert` is all.
    error
        Class of `dlx.errors` to raise if it cannot be resolved.
    resolution
        How to resolve it: a method name of the array, a function of it, or None: it is refused.
    needs
        What the call must allow for the resolution: ``"copy"``, since it makes new memory, ``"detach"``, or None.
    also_blocks
        What it blocks within its own framework, too: ``"copy"``, ``"detach"``, or ``"stay"``, to come back as it is.
    """

    because: str
    fix: str = ""
    error: type[ConversionError] = LayoutError
    resolution: Callable[[Any], Any] | str | None = None
    needs: Literal["copy", "detach"] | None = None
    also_blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.needs not in (None, "copy", "detach"):
            raise ValueError(f"needs must be None, 'copy' or 'detach', found {self.needs!r}")
        if isinstance(self.also_blocks, str) or not {*self.also_blocks} <= {"copy", "detach", "stay"}:
            raise ValueError(f"also_blocks must be a tuple of 'copy', 'detach', 'stay', found {self.also_blocks!r}")

    def resolve(self, obj: Any) -> Any:
        """Return the array without this blocker."""
        assert self.resolution is not None
        return getattr(obj, self.resolution)() if isinstance(self.resolution, str) else self.resolution(obj)


@dataclass(frozen=True)
class Guard:
    """A question about an array that must be answered with a false value before memory may leave.

    Attributes
    ----------
    ask
        Attribute of the array, or method without arguments.
    blocker
        What a true answer means; None: it only concerns the fast path.
    kinds
        Prefixes of the names of dtypes that it is asked of (``("complex",)``), and false for all others; empty: of all.
    optional
        Whether arrays may lack the attribute: missing, and None, are false, anything else is true.
    """

    ask: str
    blocker: Blocker | None = None
    kinds: tuple[str, ...] = ()
    optional: bool = False

    def holds(self, obj: Any) -> bool:
        """Return the answer for one array."""
        if self.optional:
            return getattr(obj, self.ask, None) is not None
        answer = getattr(obj, self.ask)
        return bool(answer() if callable(answer) else answer)


@dataclass(frozen=True)
class Owner:
    """The object that keeps an array's memory alive, if the array itself does not.

    All names are those of attributes, or of methods, which are called without arguments.

    Attributes
    ----------
    ask
        What gives it, of an array.
    type
        Importable name of its type; needed if one of its other names is given, except for `address` alone.
    address, nbytes
        Its memory: if its owner could have been resized, nothing beyond is ever read. With `address` alone, arrays
        without an exchange table are read on CUDA devices, by this address (0 without elements), and the array's
        shape, byte strides, dtype and ``__dlpack_device__()``: `Adapter.export` must make the same writable tensor.
    freeze
        ``(question, method of an array)``: while the owner says that it can be resized, this method forbids it.
    """

    ask: str
    type: str = ""
    address: str = ""
    nbytes: str = ""
    freeze: tuple[str, str] | tuple[()] = ()


@dataclass(frozen=True)
class FastPath:
    """What the C fast path may use of a framework.

    Attributes
    ----------
    types
        Importable names of exact types for which being asked twice is harmless; only these take the fast path.
    subclasses
        ``subclasses(type)`` says whether arrays of a subclass take it as well. None: none do.
    exchange
        ``exchange()`` gives an exchange table for types that carry none themselves (``__dlpack_c_exchange_api__``): a
        ``DLPackExchangeAPI`` (``dlpack.h`` 1.3) that lives as long as the process, in a capsule called
        ``"dlpack_exchange_api"``; or None. A tensor from its borrow slot is copied before dlx calls anything else.
    imports
        Whether the table, if it can import, makes arrays of the first of `Adapter.types`; else `Adapter.load` does.
        False for the table of a base class, which makes arrays of the base. `Capabilities`: only of what these allow;
        the rest takes the Python path. A framework with several array types (`Adapter.variant`) must give those that
        all of its types have.
    export
        ``export(array)`` gives a `Tensor` over an array on the host as `Adapter.export` does, or None to leave it to
        that: for types without a table, and arrays that the table refuses.
    unblocks
        Whether the fast path resolves blockers that a copy resolves, for arrays on the host that neither the table nor
        `export` hands out. True: by `Adapter.describe` and `Adapter.export`. A function: ``unblocks(array)`` gives the
        same copy, as a `Tensor` or an array of its type, or None to leave it to these. False: the Python path does.
    owner
        What keeps an array's memory alive: an `Owner`, or ``"managed"`` for what the managed slot of the table makes,
        since an array may lose its memory while it lives. None: the array.
    guards
        Questions that must be answered false before memory may leave. If ``detach=True`` is given, the method that
        resolves a guard's blocker with that option is called.
    guard_function
        ``guard_function()`` gives a C function that answers guards for arrays of `types`, in a capsule called
        ``"dlx_guard_function"``, and the names of these guards (`Guard.ask`; `OWNER_BOUNDS` if it checks that every
        tensor lies inside the memory of its owner); or None. The function (`dlx.h`) is an
        ``int (*)(void *array, const DLTensor *borrowed)``. dlx calls it with NULL before it borrows memory, then with
        the borrowed tensor. It returns 1 if all of these guards are false, and 0 to have Python ask them.
    conditions
        ``(module, attribute, value)`` that must be that very value, or Python is asked.
    checked_dtypes
        Names of dtypes for which the framework has several dtypes of its own; an array's must be the first one.
    checks_same
        Whether the table must be able to describe even an array that is in the target framework already, since some
        arrays are refused everywhere.
    describe
        ``describe(name, array, tensor)`` gives the `ArrayInfo` of an array without blockers, of which the fast path has
        made a tensor, as `Adapter.describe` does, which is asked if this is None; `name` is `Adapter.name`.
    ready
        ``ready(array)`` says whether the fast path would neither wait for an array nor change it. If not, or if it
        raises, `Adapter.describe` is asked, which does neither. None: the fast path never would.
    """

    types: tuple[str, ...]
    subclasses: Callable[[type], bool] | None = None
    exchange: Callable[[], Any] | None = None
    imports: bool | Capabilities = True
    export: Callable[[Any], Tensor | None] | None = None
    unblocks: Callable[[Any], Any] | bool = False
    owner: Owner | Literal["managed"] | None = None
    guards: tuple[Guard, ...] = ()
    guard_function: Callable[[], tuple[Any, frozenset[str]] | None] | None = None
    conditions: tuple[tuple[str, str, Any], ...] = ()
    checked_dtypes: tuple[str, ...] = ()
    checks_same: bool = False
    describe: Callable[[str, Any, Tensor], Any] | None = None
    ready: Callable[[Any], bool] | None = None

    def detach(self) -> str:
        """Return the method of an array that gives the same memory without a graph, or nothing."""
        for blocker in (guard.blocker for guard in self.guards):
            if blocker is not None and blocker.needs == "detach" and isinstance(blocker.resolution, str):
                return blocker.resolution
        return ""


@dataclass(frozen=True)
class StreamSupport:
    """How work on a device is ordered. Without it, each array's export is told the consumer's stream and orders itself.

    Attributes
    ----------
    current
        ``current(device)`` gives the framework's current stream on a device: a handle, or an object that has one; None
        if each array has its own. It is asked once per device of a call, never for host memory, both when the framework
        is the producer and when it is the consumer.
    activate
        ``activate(stream)`` gives a context in which the framework works on a `Stream` of another, and which restores
        its own. None: its current stream cannot be set.
    ready
        ``ready(obj, tensor)`` gives the `Stream` on which an array is ready, or None: it is ready. For a producer whose
        export takes no stream.
    quick
        What the fast path asks instead of `current`, on CUDA. True: ``current_work_stream`` of the exchange table,
        whose streams live as long as the process, or as their makers say. A function: it gives ``(function,
        attribute)``; ``function(number of the device)`` gives an object that keeps the stream alive, whose attribute is
        the handle. With either, no device need be current for an export or an import. None: arrays on devices take the
        Python path.
    """

    current: Callable[[Device], Any] | None = None
    activate: Callable[[Stream], AbstractContextManager[Any]] | None = None
    ready: Callable[[Any, Tensor], Stream | None] | None = None
    quick: Literal[True] | Callable[[], tuple[Callable[[int], Any], str]] | None = None


@dataclass(frozen=True)
class Arrays:
    """What is special about arrays of a framework; the defaults are those of ordinary arrays.

    Attributes
    ----------
    immutable
        Whether they count as read-only whatever they say.
    map_chunks
        ``map_chunks(obj, options)`` returns a collection, for arrays that are computed later: each chunk becomes what
        `dlx.convert` gives of it with these options, `to` among them. Both are pickled if other processes compute.
        `Adapter.describe` gives a blocker that names what to call for the data itself.
    consume
        ``consume(obj, tensor, shared)`` passes the point of no return and returns the tensor to hand over: from here on
        `obj` may be used up. `shared` says whether the consumer will read the producer's memory, or a copy of it.
    restore
        ``restore(obj, tensor)`` undoes `consume` after a consumer failed. `tensor` is what `consume` returned, or its
        argument if an interrupt ended it at an unknown point.
    alignment
        Bytes that memory of the framework's own making is at least aligned to, for plans of copies that it makes.
    """

    immutable: bool = False
    map_chunks: Callable[[Any, dict[str, Any]], Any] | None = None
    consume: Callable[[Any, Tensor, bool], Tensor] | None = None
    restore: Callable[[Any, Tensor], None] | None = None
    alignment: int = 16


@dataclass(frozen=True)
class Placement:
    """How a framework that moves arrays to where they are used keeps committed ones on their device (jax).

    A call that names the device makes a committed array. `Adapter.load` makes arrays that may be moved; copies for
    those are in row-major order.

    Attributes
    ----------
    load
        ``load(tensor, committed)`` gives an array over a tensor whose device the call names: by ``device=``, which
        commits, or by an example, which is committed or not.
    is_committed
        ``is_committed(obj)`` says whether an array stays on its device.
    """

    load: Callable[[Tensor, bool], Any]
    is_committed: Callable[[Any], bool]


@dataclass(frozen=True)
class WriteTracking:
    """How writes to an array are noticed, for functions that compute in the framework (`dlx.using`).

    Attributes
    ----------
    guarded
        ``guarded(obj, writable)`` gives the array to pass to a function instead of `obj`, a copy without other
        references, such that writes to it are refused, or counted. `writable` says whether the function is declared to
        write to it. None: `obj` is passed.
    count
        ``count(obj)`` gives how often an array was written to in place, or None if it is not counted. None: no array's
        writes are counted.
    mark_written
        ``mark_written(obj)`` tells the framework that other code has written to an array, passed on by `dlx.using`
        (``writes=``) or `dlx.borrow`, so that gradients which need the old values are refused. None: the framework does
        not track such writes.
    """

    guarded: Callable[[Any, bool], Any] | None = None
    count: Callable[[Any], int | None] | None = None
    mark_written: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Container:
    """A type that holds other objects: how to flatten and how to unflatten it.

    Attributes
    ----------
    types
        Importable names of its types; subclasses that have no handler of their own are included.
    kind
        How its children are addressed: ``"sequence"`` (``[3]``), ``"mapping"`` (``['a']``), ``"record"`` (``.x``) or
        ``"set"`` (``{3}``). ``"wrapper"``: its only child stands for it. ``"leaf"``: it is never entered, even if it is
        a sequence or mapping, and passes through; if the adapter lists the type, too, its arrays are converted only as
        the root, as scalars are.
    flatten
        ``flatten(obj)`` gives ``(keys, children)``: a list of keys or names, None if children are counted, and the list
        of children in the same order. Both lists are the caller's from then on.
    unflatten
        ``unflatten(obj, keys, children, new_empty)`` gives the new container: `new_empty`, filled, if there is one (for
        a container that holds itself), else a new one. `children` is a list that may be kept. None: there can be no new
        one, `falls_to` is used in every case; a wrapper becomes its child.
    new_empty
        ``new_empty(obj)`` gives a container that exists before its children, so that it can hold itself. None: it
        cannot, as a tuple; a cycle through it is refused.
    mutable
        Whether it can be changed in place. If not, it comes back as it is unless a child changed.
    elements
        What asking for the same child twice gives: ``"stable"``, the same object; ``"same_as"``, wrappers of the same
        thing, which `identity` can tell; ``"fresh"``, objects that cannot be told apart from others.
    identity
        For ``"same_as"``: ``identity(child)`` is a hashable key, equal for wrappers of the same thing; None for a child
        that is no such wrapper.
    holds
        Name of the one target whose arrays it can hold; None if it holds anything.
    falls_to
        ``list`` or ``dict``: what it becomes if it cannot hold the result. None: then it is refused. Of a wrapper
        without `unflatten`: the type of its child, if that is always one of the two.
    live
        ``live(obj)`` gives what a lazy view reads and writes in place of `obj`: the same storage, as a sequence or
        mapping whose elements are the container's own. None: `obj` itself.
    reader
        ``reader(live)`` gives a pair of functions that are faster than ``live[key]``. ``get(key)`` returns the child at
        an index from 0 on, or at a string, or raises. ``is_unchanged(key, child)`` says, without making a wrapper of
        the child, whether `live` still holds that very child there; False if it cannot tell. It may be None; only
        mutable containers are asked. None: dlx calls ``live[key]``.
    """

    types: tuple[str, ...] = ()
    kind: str = "sequence"
    flatten: Callable[[Any], tuple[list[Any] | None, list[Any]]] = lambda obj: (None, list(obj))
    unflatten: Callable[[Any, list[Any] | None, list[Any], Any], Any] | None = None
    new_empty: Callable[[Any], Any] | None = None
    mutable: bool = True
    elements: str = "stable"
    identity: Callable[[Any], Any] | None = None
    holds: str | None = None
    falls_to: type | None = None
    live: Callable[[Any], Any] | None = None
    reader: Callable[[Any], tuple[Callable[[Any], Any], Callable[[Any, Any], bool] | None]] | None = None

    def path(self, keys: list[Any] | None, i: int) -> tuple[Any, ...]:
        """Return where the child number `i` is, as a part of `DlxError.path`: its key; nothing for a wrapper's."""
        if self.kind == "wrapper":
            return ()
        if self.kind == "set":
            return (Member(i),)
        key = i if keys is None else keys[i]
        return (Attribute(key) if self.kind == "record" else key,)

    def plain(self, keys: list[Any] | None, children: list[Any]) -> Any:
        """Return the children in the built-in container that stands in where this one cannot hold them."""
        if self.kind == "wrapper":
            return children[0]
        names = range(len(children)) if keys is None else keys
        return dict(zip(names, children, strict=True)) if self.falls_to is dict else children


@dataclass(frozen=True)
class KnownIssue:
    """A known fault of some versions of the framework.

    Attributes
    ----------
    does
        What it does wrong.
    see
        Where that is documented.
    before
        First version without the fault; None while no such version is known. Local and pre-release builds count as
        lower than the version they lead to.
    lowers
        Facts that the fault changes: fields of `Capabilities`, or names that the adapter itself looks up in
        `Adapter.lowered`.
    """

    does: str
    see: str
    before: str | None = None
    lowers: Mapping[str, Any] = field(default_factory=dict)

    def affects(self, version: str) -> bool:
        """Return whether a version of the framework has the fault."""
        return self.before is None or _version_key(version) < _version_key(self.before)


def _version_key(version: str) -> tuple[tuple[int, ...], bool]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    release = tuple(int(part) for part in match[0].split(".")) if match else ()
    rest = version[match.end() :] if match else version
    while release and release[-1] == 0:  # 2.3 is 2.3.0
        release = release[:-1]
    return release, match is not None and (not rest or rest.startswith(".post"))
