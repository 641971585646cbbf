"""What is stored in the source for a value that is given to a lazy view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from dlx import strangers
from dlx.adapter import Adapter
from dlx.containers import what_is
from dlx.errors import DlxError
from dlx.facts import Container
from dlx.lazy import Path, Scope
from dlx.leaf import adapter_failed
from dlx.phases import convert_tree
from dlx.registry import registry

__all__ = ["home", "inward", "kind_of"]

SAMPLE = 16  # children that are looked at to find out which framework a container's arrays are of


def kind_of(obj: Any) -> Container | Adapter | None:
    """Return the row of a container, the adapter of an array, or None."""
    kind = type(obj)
    what = what_is(kind)
    if what is not kind:
        return what  # type: ignore[return-value]  # it is no type then
    try:
        return strangers.array_stranger(obj)
    except (DlxError, MemoryError):
        raise
    except Exception:  # it raises when it is looked at, so it is nothing that we know
        return None


def inward(scope: Scope, value: Any, old: Any, children: Iterable[Any], path: Path) -> Any:
    """Return what is to be stored in the source for a value.

    A result of the scope stands for the source's own object. An array goes to the framework and device of the array
    that it replaces; a new one, and those in a container, to the one framework of the arrays among the first children.
    Where there is none, the value is stored as given.

    Parameters
    ----------
    scope
        The view's.
    value
        What is to be stored.
    old
        What it replaces, or None.
    children
        Of the container that it is stored in, from the first on; read as far as is needed.
    path
        For errors.
    """
    value = scope.source_of(value)
    what = kind_of(value)
    if what is None:
        return value
    target, device = home(old, children)
    if target is None or target is what or registry.ready(target) is None:
        return value
    request = replace(scope.options.request, target=target, device=device, copy=None, stream=None)
    if isinstance(what, Container):
        return convert_tree(value, what, request, strict=False, collect=False, lane=None, to=None)
    return scope.run(value, what, request, path)


def home(old: Any, children: Iterable[Any]) -> tuple[Adapter | None, Any]:
    """Return the framework, and the device, of an array that is replaced; else the one framework of the first few."""
    what = None if old is None else kind_of(old)
    if isinstance(what, Adapter):
        try:
            info = what.info(old)
        except (DlxError, MemoryError):
            raise
        except Exception as error:
            raise adapter_failed(what, error) from error
        return what, info.device if info is not None else None
    homes = {found for child in islice(children, SAMPLE) if isinstance(found := kind_of(child), Adapter)}
    return (homes.pop() if len(homes) == 1 else None), None
