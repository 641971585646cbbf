"""Copies of dlx's adapters for another package name, with separate caches."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def adapter_module(name, package):
    """Return a new module from an adapter's source, with another name for the framework's package."""
    spec = importlib.util.find_spec(f"dlx_adapters.dlx_{name}")
    module = importlib.util.module_from_spec(spec)
    source = Path(spec.origin).read_text(encoding="utf-8").replace(f'"{name}"', f'"{package}"')
    exec(compile(source, spec.origin, "exec"), vars(module))
    return module
