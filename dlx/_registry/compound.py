"""Handlers of compound arrays, which consist of dense arrays, and `Parts`, a compound array without a framework."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Compound, Container
from dlx.errors import Attribute, DlxError


class Parts(dict[str, Any]):
    """The parts of a compound array without a framework, from shared memory or a file."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


class CompoundHandler(Container):
    """The container handler of a `Compound`; the engine splits and joins its objects."""

    compound: Compound
    adapter: Adapter | None  # that declares it

    def kind_of(self, obj: Any) -> str:
        """Return the kind of an object."""
        return obj.kind if type(obj) is Parts else self.compound.kind

    def path(self, keys: list[Any] | None, i: int) -> tuple[Any, ...]:
        """Return the path of a part: an attribute."""
        return (Attribute(i if keys is None else keys[i]),)


class Whole(NamedTuple):
    """An outermost compound array of a tree."""

    path: tuple[Any, ...]
    obj: Any
    handler: CompoundHandler
    numbers: list[int]  # of its arrays
    error: DlxError | None  # the first one


def without_private(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the parts without what only their framework knows of them, whose names begin with an underscore."""
    return {name: part for name, part in parts.items() if not name.startswith("_")}


@functools.cache
def handler_of(compound: Compound, adapter: Adapter | None = None) -> CompoundHandler:
    """Return the handler of an adapter's declaration."""

    def flatten(obj: Any) -> tuple[list[Any], list[Any]]:
        parts = without_private(compound.split(obj))
        return list(parts), list(parts.values())

    handler = CompoundHandler(compound.types, "compound", flatten, mutable=False)
    vars(handler).update(compound=compound, adapter=adapter)  # another dataclass would take 1 ms at import
    return handler


PARTS = handler_of(Compound("", (), dict))
"""The handler of `Parts`."""


def compounds_of(adapter: Adapter) -> Iterable[Compound]:
    """Return the compound arrays that an adapter declares."""
    return (each for each in adapter.containers if isinstance(each, Compound))


def find_joiner(adapter: Adapter, kind: str) -> Compound | None:
    """Return the declaration by which a framework joins arrays of a kind, or None."""
    return next((each for each in compounds_of(adapter) if each.kind == kind and each.join is not None), None)
