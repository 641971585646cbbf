"""Where the kit finds a subject: among the libraries that it knows, dlx's adapters, or a module of the caller's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

from dlx._registry.listing import adapters
from dlx._registry.registry import registry
from dlx._support.module import set_module
from dlx.adapter.base import Adapter
from dlx.errors import AdapterNotFoundError
from dlx.testing.subject import Subject

__all__ = ["LIBRARIES", "adapter_of", "find", "library"]

LIBRARIES: dict[str, Callable[[], Subject]] = {}
"""Name -> function that imports the library and describes it."""


def library(name: str) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Register a function that makes a subject."""

    def enter(make: Callable[[], Subject]) -> Callable[[], Subject]:
        LIBRARIES[name] = make
        return make

    return enter


def adapter_of(name: str) -> Adapter | None:
    """Return the adapter of a name or a package, its framework imported; it need not be a target."""
    try:
        return registry.target(name).adapter
    except AdapterNotFoundError:
        found = next((each for each in adapters().values() if name in (each.name, each.package)), None)
    if found is not None:
        importlib.import_module(found.package)
    return found


@set_module("dlx.testing")
def find(spec: str) -> Subject:
    """Return a subject: a library known here, an adapter's name, or ``module:attribute``.

    Raises
    ------
    LookupError
        If there is no such thing.
    ImportError
        If it is not installed.
    """
    if ":" in spec:
        module, _, attribute = spec.partition(":")
        found = getattr(importlib.import_module(module), attribute, None)
        found = found() if callable(found) and not isinstance(found, Subject) else found
        if not isinstance(found, Subject):
            raise LookupError(f"{spec} is {found!r}, not a dlx.testing.Subject")
        return replace(found, spec=spec)
    if spec in LIBRARIES:
        known = replace(LIBRARIES[spec](), spec=spec)
        own = adapter_of(spec) if not known.adapter else None  # a third party's
        return known if own is None else replace(known, adapter=own.name)
    adapter = adapter_of(spec)
    if adapter is None:
        others = ", ".join(name for name in adapters() if name not in LIBRARIES)
        more = f"; further adapters of dlx: {others}" if others else ""
        raise LookupError(
            f"the kit knows no {spec!r}. It knows {', '.join(LIBRARIES)}{more}; or give module:attribute of a Subject."
        )
    return Subject(adapter.name, package=adapter.package, adapter=adapter.name, spec=spec)
