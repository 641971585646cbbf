"""Dataclasses that describe a framework in an adapter. Authors import them from `dlx.adapter`."""

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
from dlx._support.frozen import Frozen
from dlx.errors import Attribute, DlxError, LayoutError, Member

__all__ = [
    "ALIGNMENTS", "OWNER_BOUNDS", "Arrays", "Blocker", "Capabilities", "Compound", "Container", "FastPath", "Guard",
    "KnownIssue", "Layout", "Owner", "StreamSupport", "WriteTracking",
]  # fmt: skip

OWNER_BOUNDS = "owner_bounds"
"""Name of the guard that a tensor lies inside its owner's memory, for `FastPath.guard_function`."""


class Layout:
    """Layout features that a consumer supports; extents of 0 and 1 are ignored.

    Attributes
    ----------
    NEGATIVE, ZERO
        Negative strides; strides of 0 (broadcasting).
    GAPS
        Unused memory between elements, or overlapping elements.
    PERMUTED
        Dimensions not in row-major order.
    ANY
        All of these.
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
"""Values of `Capabilities.empty_extents` and their constants in C."""

ALIGNMENTS = tuple(1 << power for power in range(9))
"""Possible alignments, up to that of dlx's copies; `planner.decide` caches decisions by them."""


@dataclass(eq=False, repr=False)
class Capabilities(Frozen):
    """The tensors that a consumer imports unchanged; dlx copies or refuses all others.

    Attributes
    ----------
    dtypes, device_types
        Names of dtypes (`DType.name`), and DLPack device types; None: all.
    layouts
        `Layout` bits that its arrays support.
    min_alignment
        Required alignment of the address in bytes, a power of 2 up to 256; 0: the dtype's natural alignment.
    ndims
        Minimum and maximum number of dimensions.
    keeps_readonly
        Whether its arrays keep the read-only flag, or are never writable.
    copies
        Whether it copies everything that it imports: it accepts read-only memory, and dlx refuses ``copy=False``. A
        mapping lists the dtypes that it copies, with reasons: ``{"bool": "packs bools eight to a byte"}``.
    home
        Device to which dlx moves host memory, unless a call names a device or forbids copies; None: no move.
    subbyte
        How it stores elements of less than a byte (int4, float6): ``"packed"``, DLPack's default, ``"padded"`` to a
        byte each, or ``"both"``.
    empty_extents
        Limit on the extents of arrays without elements. ``"any"``: no limit. ``"leading"``: the product of the extents
        before the first 0 is less than ``2**64``; with ``"leading bytes"``, less than ``2**63`` bytes. ``"bytes"``: the
        product of all extents except 0 is less than ``2**63`` bytes. ``"addressed"``: the same, and the address must
        not be 0. ``"none"``: such arrays are not supported.
    refusals
        Explanations (reason, fix) for dtypes and device kinds that the framework has but rejects:
        ``{"int64": ("it would narrow int64", "Switch x64 on.")}``.
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
        super().__post_init__()
        if self.min_alignment and self.min_alignment not in ALIGNMENTS:
            raise ValueError(f"min_alignment must be 0 or a power of 2 up to 256, found {self.min_alignment!r}")
        if self.subbyte not in ("packed", "padded", "both"):
            raise ValueError(f"subbyte must be 'packed', 'padded' or 'both', found {self.subbyte!r}")
        if self.empty_extents not in EXTENTS:
            raise ValueError(f"empty_extents must be one of {sorted(EXTENTS)}, found {self.empty_extents!r}")
        if both := self.refusals.keys() & (self.dtypes or ()):
            raise ValueError(f"dtypes and refusals must not overlap, found {sorted(both)} in both")


@dataclass(eq=False, repr=False)
class Blocker(Frozen):
    """A property of an array that blocks its conversion, known before the export.

    Attributes
    ----------
    because, fix
        The reason, for the middle of an error message, and one sentence with a solution; empty if an option of
        `convert` is the solution.
    error
        Class of `dlx.errors` to raise if the blocker is not resolved.
    resolution
        A method of the array, by name, or a function of it, that resolves the blocker; None: it is refused.
    needs
        What the call must allow: ``"copy"`` if the resolution makes new memory, ``"detach"``, or None.
    also_blocks
        What the blocker also prevents if the target is the array's framework: ``"copy"``, ``"detach"``, or ``"stay"``
        (returning the array unchanged).
    """

    because: str
    fix: str = ""
    error: type[DlxError] = LayoutError
    resolution: Callable[[Any], Any] | str | None = None
    needs: Literal["copy", "detach"] | None = None
    also_blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.needs not in (None, "copy", "detach"):
            raise ValueError(f"needs must be None, 'copy' or 'detach', found {self.needs!r}")
        if isinstance(self.also_blocks, str) or not {*self.also_blocks} <= {"copy", "detach", "stay"}:
            raise ValueError(f"also_blocks must be a tuple of 'copy', 'detach', 'stay', found {self.also_blocks!r}")

    def resolve(self, obj: Any) -> Any:
        """Return the array without this blocker."""
        assert self.resolution is not None
        return getattr(obj, self.resolution)() if isinstance(self.resolution, str) else self.resolution(obj)


@dataclass(eq=False, repr=False)
class Guard(Frozen):
    """An attribute or method of an array that must be false before dlx exports its memory.

    Attributes
    ----------
    ask
        Name of the attribute, or of the method without arguments.
    blocker
        The blocker if it is true; None: only the fast path skips the array.
    kinds
        Prefixes of dtype names for which dlx checks it (``("complex",)``); it is false for others. Empty: all dtypes.
    optional
        Whether arrays may lack the attribute: missing and None are false, all other values true.
    """

    ask: str
    blocker: Blocker | None = None
    kinds: tuple[str, ...] = ()
    optional: bool = False

    def holds(self, obj: Any) -> bool:
        """Return whether the guard is true for an array."""
        if self.optional:
            return getattr(obj, self.ask, None) is not None
        value = getattr(obj, self.ask)
        return bool(value() if callable(value) else value)


@dataclass(eq=False, repr=False)
class Owner(Frozen):
    """The object that keeps an array's memory alive, if the array itself does not.

    All names are names of attributes, or of methods without arguments.

    Attributes
    ----------
    ask
        Attribute of the array that is the owner.
    type
        Importable name of its type; required with the other names, except `address` alone.
    address, nbytes
        The owner's memory: dlx never reads outside of it, even if the owner was resized. With `address` alone, dlx
        reads CUDA arrays without an exchange table by this address (0 without elements) and the array's shape, byte
        strides, dtype and ``__dlpack_device__()``; `Adapter.export` must return the same writable tensor.
    freeze
        ``(attribute of the owner, method of the array)``: if the owner is resizable, the method makes it fixed.
    """

    ask: str
    type: str = ""
    address: str = ""
    nbytes: str = ""
    freeze: tuple[str, str] | tuple[()] = ()


@dataclass(eq=False, repr=False)
class FastPath(Frozen):
    """How the C fast path reads and creates a framework's arrays.

    Attributes
    ----------
    types
        Importable names of the exact types on the fast path; exporting these twice must be harmless.
    subclasses
        ``subclasses(type)`` returns whether arrays of a subclass take the fast path. None: no subclass does.
    exchange
        ``exchange()`` returns an exchange table for types without ``__dlpack_c_exchange_api__``: a capsule
        ``"dlpack_exchange_api"`` with a ``DLPackExchangeAPI`` (``dlpack.h`` 1.3) that is never freed; or None. dlx
        copies a tensor from its borrow slot before it makes any other call.
    imports
        Whether the table can import, as the first of `Adapter.types`; otherwise dlx calls `Adapter.load`. False for the
        table of a base class, which imports as the base. `Capabilities`: only tensors that satisfy these; others take
        the Python path. A framework with several array types (`Adapter.variant`) must pass what all its types support.
    export
        ``export(array)`` returns a `Tensor` over a host array, like `Adapter.export`, or None: then dlx calls
        `Adapter.export`. It serves types without a table, and arrays that the table refuses.
    unblocks
        Whether the fast path makes the copies that resolve blockers, for host arrays that neither the table nor
        `export` exports. True: with `Adapter.describe` and `Adapter.export`. A function: ``unblocks(array)`` returns
        that copy of an array of a listed type (not of a subclass), as a `Tensor` or an array, or None: then dlx calls
        these methods. False: the Python path makes them.
    owner
        The object that keeps an array's memory alive: an `Owner`, or ``"managed"`` for the result of the table's
        managed slot, if an array can lose its memory. None: the array.
    guards
        Conditions that must be false before dlx exports memory. With ``detach=True``, dlx calls the method that
        resolves a guard's blocker.
    guard_function
        ``guard_function()`` returns a capsule ``"dlx_guard_function"`` with a C function that checks guards of arrays
        of `types`, and the names of these guards (`Guard.ask`; `OWNER_BOUNDS` if it checks that tensors lie inside
        their owner's memory); or None. The function (`dlx.h`) is an ``int (*)(void *array, const DLTensor *borrowed)``.
        dlx calls it with NULL before it borrows memory, then with the borrowed tensor. It returns 1 if all these guards
        are false, and 0 if Python must check them.
    conditions
        ``(module, attribute, value)``: if the attribute is not this object, dlx takes the Python path.
    checked_dtypes
        Names of dtypes for which the framework has several dtypes; the fast path takes only the first one.
    checks_same
        Whether the table must describe an array even if it is in the target framework already, because some arrays are
        refused everywhere.
    describe
        ``describe(name, array, tensor)`` returns the `ArrayInfo` of an array without blockers that the fast path has
        exported as `tensor`; `name` is `Adapter.name`. None: dlx calls `Adapter.describe`.
    ready
        ``ready(array)`` returns whether an export neither waits for the array nor changes it. If it is false or raises,
        dlx calls `Adapter.describe`. None: always true.
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
        """Return the name of the method that detaches an array from its graph, or ``""``."""
        for blocker in (guard.blocker for guard in self.guards):
            if blocker is not None and blocker.needs == "detach" and isinstance(blocker.resolution, str):
                return blocker.resolution
        return ""


@dataclass(eq=False, repr=False)
class StreamSupport(Frozen):
    """How a framework synchronizes streams. Without it, dlx passes the consumer's stream to each array's export.

    Attributes
    ----------
    current
        ``current(device)`` returns the framework's current stream on a device: a handle, or an object with a handle;
        None if each array has its own stream. dlx calls it once per device and call, for producers and consumers, and
        never for host memory.
    activate
        ``activate(stream)`` returns a context in which the framework works on another framework's `Stream`. None: its
        current stream cannot be set.
    ready
        ``ready(obj, tensor)`` returns the `Stream` that computes the array, or None if it is ready. For producers whose
        export takes no stream.
    quick
        Replaces `current` on the fast path, on CUDA. True: ``current_work_stream`` of the exchange table; its streams
        must stay valid. A function: it returns ``(function, attribute)``; ``function(device id)`` returns an object
        that keeps the stream alive, and the attribute is the handle. With either, exports and imports must not require
        a current device. None: arrays on devices take the Python path.
    """

    current: Callable[[Device], Any] | None = None
    activate: Callable[[Stream], AbstractContextManager[Any]] | None = None
    ready: Callable[[Any, Tensor], Stream | None] | None = None
    quick: Literal[True] | Callable[[], tuple[Callable[[int], Any], str]] | None = None


@dataclass(eq=False, repr=False)
class Arrays(Frozen):
    """Unusual properties of a framework's arrays.

    Attributes
    ----------
    immutable
        Whether arrays are always treated as read-only.
    map_chunks
        ``map_chunks(obj, options)`` returns a collection, for arrays that are computed later: each chunk becomes
        ``dlx.convert(chunk, **options)``. Collection and options must pickle if other processes compute the chunks.
        `Adapter.describe` returns a blocker that names the method that computes the data.
    consume
        ``consume(obj, tensor, shared)`` returns the tensor to pass on; after this call, `obj` may be unusable. `shared`
        is True if the consumer reads the producer's memory, False if it reads a copy.
    restore
        ``restore(obj, tensor)`` undoes `consume` if the consumer fails. `tensor` is the result of `consume`, or its
        argument if an interrupt ended the call.
    alignment
        Minimum alignment of the framework's own memory in bytes, for plans.
    """

    immutable: bool = False
    map_chunks: Callable[[Any, dict[str, Any]], Any] | None = None
    consume: Callable[[Any, Tensor, bool], Tensor] | None = None
    restore: Callable[[Any, Tensor], None] | None = None
    alignment: int = 16


@dataclass(eq=False, repr=False)
class Placement(Frozen):
    """How a framework keeps committed arrays on their device, if it moves others to where they are used (jax).

    A call that names the device returns a committed array. `Adapter.load` returns uncommitted arrays; copies for these
    are in row-major order.

    Attributes
    ----------
    load
        ``load(tensor, committed)`` returns an array over a tensor if the call names its device: by ``device=``
        (committed) or by ``like=`` (committed if the example is).
    is_committed
        ``is_committed(obj)`` returns whether an array stays on its device.
    """

    load: Callable[[Tensor, bool], Any]
    is_committed: Callable[[Any], bool]


@dataclass(eq=False, repr=False)
class WriteTracking(Frozen):
    """How dlx detects writes to arrays, for functions that compute in the framework (`dlx.using`).

    Attributes
    ----------
    guarded
        ``guarded(obj, writable)`` returns the array to pass to the function in place of `obj`, an unshared copy, so
        that writes are refused or counted. `writable`: whether the function is declared to write to it. None: dlx
        passes `obj`.
    count
        ``count(obj)`` returns the number of in-place writes to an array, or None if unknown. None: writes are not
        counted.
    mark_written
        ``mark_written(obj)`` tells the framework that other code has written to an array (`dlx.using` with ``writes=``,
        `dlx.borrow`), so that it refuses gradients that need the old values. None: the framework does not track writes.
    """

    guarded: Callable[[Any, bool], Any] | None = None
    count: Callable[[Any], int | None] | None = None
    mark_written: Callable[[Any], None] | None = None


@dataclass(eq=False, repr=False)
class Container(Frozen):
    """A container type: how to flatten and unflatten it.

    Attributes
    ----------
    types
        Importable names of its types, including subclasses without another handler.
    kind
        How children are addressed: ``"sequence"`` (``[3]``), ``"mapping"`` (``['a']``), ``"record"`` (``.x``) or
        ``"set"`` (``{3}``). ``"wrapper"``: it has one child, with the same path. ``"leaf"``: dlx does not look inside
        and passes it through unchanged; if the adapter also lists the type in `Adapter.types`, its arrays are converted
        only as the root, like scalars.
    flatten
        ``flatten(obj)`` returns ``(keys, children)``: a new list of keys or names (None for indices) and a new list of
        children in the same order.
    unflatten
        ``unflatten(obj, keys, children, new_empty)`` returns the new container: `new_empty`, filled, if it is not None
        (for a container that contains itself), otherwise a new one. It may keep the list `children`. None: dlx always
        uses `falls_to`; a wrapper becomes its child.
    new_empty
        ``new_empty(obj)`` returns an empty container, so that it can contain itself. None: it cannot (a tuple), and dlx
        refuses cycles through it.
    mutable
        Whether it is mutable. If not, dlx returns it unchanged unless a child changes.
    elements
        What two reads of a child return: ``"stable"``: the same object; ``"same_as"``: wrappers that `identity`
        recognizes as equal; ``"fresh"``: unrelated objects.
    identity
        For ``"same_as"``: ``identity(child)`` returns a hashable key that is equal for wrappers of the same object;
        None for other children.
    holds
        Name of the only target whose arrays it can contain; None: any object.
    falls_to
        ``list`` or ``dict``: the result if it cannot contain the converted children. None: dlx refuses it then. For a
        wrapper without `unflatten`: the type of its child, if it is always a list or a dict.
    live
        ``live(obj)`` returns the sequence or mapping over the same storage that a lazy view reads and writes in place
        of `obj`. None: `obj` itself, if it has their methods; otherwise it has no view. For a wrapper: what `dlx.stack`
        reads instead of the child, if that is faster, or None: a dict of columns; or ``(names, arrays, slices)`` if the
        rows of each array are an ascending slice of the columns.
    reader
        ``reader(live)`` returns two functions that are faster than ``live[key]``. ``get(key)`` returns the child at a
        non-negative index or a string. ``is_unchanged(key, child)`` returns whether `live` still contains this child at
        the key (False if unknown), without creating a wrapper; dlx calls it for mutable containers, and it may be None.
        None: dlx calls ``live[key]``.
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
        """Return the keys of child `i` for `DlxError.path`; empty for a wrapper."""
        if self.kind == "wrapper":
            return ()
        if self.kind == "set":
            return (Member(i),)
        key = i if keys is None else keys[i]
        return (Attribute(key) if self.kind == "record" else key,)

    def plain(self, keys: list[Any] | None, children: list[Any]) -> Any:
        """Return the children in a list or dict, if this container cannot contain them."""
        if self.kind == "wrapper":
            return children[0]
        names = range(len(children)) if keys is None else keys
        return dict(zip(names, children, strict=True)) if self.falls_to is dict else children


_INDICES = dict.fromkeys(("indices", "indptr", "coords", "offsets"), ("int32", "int64"))


@dataclass(eq=False, repr=False)
class Compound(Frozen):
    """A type whose objects consist of several dense arrays: sparse and ragged arrays.

    dlx converts the parts and joins them in the target, if the target's adapter declares the same kind.

    Attributes
    ----------
    kind
        The format: ``"csr"``, ``"csc"`` or ``"bsr"`` with the parts data, indices, indptr and shape; ``"coo"`` with
        data, coords ``(ndim, count)`` and shape; ``"ragged"`` with values and offsets; or another name and its parts.
    types
        Importable names of its types, including subclasses without another handler.
    split
        ``split(obj)`` returns the parts by name: arrays, lists of arrays of one shape and dtype (dlx stacks them), and
        plain values. Plain values whose names begin with an underscore are only for this declaration's `join`.
    join
        ``join(parts)`` returns an object of this kind over arrays of the framework, without a copy. None: the framework
        is only a source.
    matches
        ``matches(obj)`` returns whether an object of `types` is of this kind. None: all are.
    indices
        Names of the parts that are indices -> names of the dtypes that the framework supports for them. dlx casts all
        of them to one of these. The default: int32 and int64 for indices, indptr, coords and offsets.
    dense
        A call that returns a dense array, for errors: ``".toarray()"``.
    limits
        Restrictions of `join`. ``"unique"``: no index twice in a row; ``"rising"``: the indices of a row rise (csr, csc
        and bsr). ``"sorts"``: it sorts coords that do not rise, in a copy, by the part ``_is_sorted``; ``"axes"``: it
        has an axis at least; ``"swapped"``: its coords are ``(count, ndim)``, in `split` as well (coo). ``"flat"``: the
        parts are dense.
    dtypes
        Names of the dtypes that `join` supports for the elements; empty: those of the framework's arrays.
    """

    kind: str
    types: tuple[str, ...]
    split: Callable[[Any], dict[str, Any]]
    join: Callable[[dict[str, Any]], Any] | None = None
    matches: Callable[[Any], bool] | None = None
    indices: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _INDICES)
    dense: str = ""
    limits: tuple[str, ...] = ()
    dtypes: frozenset[str] = frozenset()


@dataclass(eq=False, repr=False)
class KnownIssue(Frozen):
    """A known fault of the framework.

    Attributes
    ----------
    does
        What the framework does wrong.
    see
        Where the fault is documented.
    before
        First version without the fault; None if every version has it. Local and pre-release builds count as older than
        their version.
    lowers
        Values that the fault changes: fields of `Capabilities`, or names that the adapter reads from
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
