"""The data types in which an adapter states facts. Authors import them from `dlx.adapter`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlx.errors import ConversionError, CopyRequiredError
from dlx.native import lib

__all__ = ["Capabilities", "Container", "Defect", "Guard", "Hindrance", "Layout"]


class Layout:
    """Features of a layout that a consumer can hold; extents of 0 and 1 are ignored.

    Attributes
    ----------
    NEGATIVE
        Strides below 0.
    ZERO
        Strides of 0 (broadcasting).
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


@dataclass(frozen=True)
class Capabilities:
    """What a consumer takes as it is; anything else is copied or refused before it gets there.

    Attributes
    ----------
    dtypes
        Names of dtypes (`DType.name`), or None for any.
    device_types
        DLPack device types, or None for any.
    layouts
        `Layout` bits that its arrays can hold.
    min_alignment
        Bytes that the address must be a multiple of; 0 for the dtype's natural alignment, 1 for any address.
    min_ndim, max_ndim
        Fewest and most dimensions.
    keeps_readonly
        Whether its arrays keep the read-only flag, or cannot be written at all.
    subbyte
        How it holds elements of less than a byte (int4, float6): ``"packed"`` next to each other, as DLPack does unless
        a flag says otherwise, ``"padded"`` in a byte each, or ``"both"``.
    null_data
        Whether it takes address 0 where there is no element, which DLPack allows.
    narrows
        Dtypes that it would change to smaller ones without a word; they are in no case in `dtypes`.
    """

    dtypes: frozenset[str] | None
    device_types: frozenset[int] | None = frozenset({1})
    layouts: int = 0
    min_alignment: int = 0
    min_ndim: int = 0
    max_ndim: int = 64
    keeps_readonly: bool = False
    subbyte: str = "packed"
    null_data: bool = True
    narrows: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.subbyte not in ("packed", "padded", "both"):
            raise ValueError(f"subbyte must be 'packed', 'padded' or 'both', found {self.subbyte!r}")
        if self.narrows and (self.dtypes is None or self.narrows & self.dtypes):
            both = sorted(self.narrows & self.dtypes) if self.dtypes is not None else "any dtype"
            raise ValueError(f"what is narrowed is not taken, found {both} in both")


@dataclass(frozen=True)
class Hindrance:
    """Something about an array, known before a tensor exists, that stands in the way.

    Attributes
    ----------
    because
        The reason, as the middle of an error message.
    fix
        One sentence that says what the user can do.
    error
        Class of `dlx.errors` to raise where it cannot be cured.
    cure
        How to lift it: a method name of the array, a function of it, or None where it is refused.
    copies
        Whether the cure makes new memory (then ``copy=False`` refuses).
    option
        Option of `convert` that must be set for the cure (``"detach"``), or None.
    always
        Whether it also stands in the way of an array that is in the target framework already.
    no_copy
        Whether not even its own framework can copy such an array (its memory is gone).
    """

    because: str
    fix: str
    error: type[ConversionError] = CopyRequiredError
    cure: Callable[[Any], Any] | str | None = None
    copies: bool = False
    option: str | None = None
    always: bool = False
    no_copy: bool = False

    def lift(self, obj: Any) -> Any:
        """Return the array without this hindrance."""
        assert self.cure is not None
        return getattr(obj, self.cure)() if isinstance(self.cure, str) else self.cure(obj)


@dataclass(frozen=True)
class Guard:
    """A question that must be answered with a false value before memory may leave.

    Attributes
    ----------
    ask
        Attribute of the array.
    hindrance
        What a true answer means; None where it only concerns the lane.
    call
        Whether the attribute is a method without arguments.
    of_owner
        Whether the question is for the owner of the memory (`Adapter.owner`), not for the array.
    amend
        Method of the array that makes the answer false for good, or None; then the guard hinders nobody.
    kinds
        Kinds of dtypes that the question makes sense for, as prefixes of names (``("complex",)``); empty for all. The
        answer must be false for every other dtype.
    """

    ask: str
    hindrance: Hindrance | None = None
    call: bool = False
    kinds: tuple[str, ...] = ()
    of_owner: bool = False
    amend: str | None = None

    def holds(self, obj: Any) -> bool:
        """Return the answer for one array."""
        answer = getattr(obj, self.ask)
        return bool(answer() if self.call else answer)


@dataclass(frozen=True)
class Container:
    """A container type of the framework, and how to take it apart and together.

    Attributes
    ----------
    types
        Importable names of its types.
    open
        ``open(obj)`` gives ``(place, child)`` pairs; a place is what follows the object in an error (``"['a']"``).
    close
        ``close(obj, children, blank)`` gives the new container.
    blank
        ``blank(obj)`` gives an empty one that exists before its children, or None.
    lazy
        ``"sequence"``, ``"mapping"`` or None: the kind of view it can have.
    falls_to
        Built-in type that is used when the container cannot hold the target's arrays.
    """

    types: tuple[str, ...]
    open: Callable[[Any], Iterable[tuple[str, Any]]]
    close: Callable[[Any, list[Any], Any], Any]
    blank: Callable[[Any], Any] | None = None
    lazy: str | None = None
    falls_to: type | None = None


@dataclass(frozen=True)
class Defect:
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
        Facts that the fault changes: fields of `Capabilities`, or names that the adapter itself looks up in `lowered`.
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
