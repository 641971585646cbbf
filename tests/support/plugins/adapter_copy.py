"""A copy of one of our adapters, for another package than its own: what it remembers is its own, too."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def adapter_module(name, package):
    """Return a new module of an adapter's source in which the framework's package is called otherwise."""
    spec = importlib.util.find_spec(f"dlx_{name}")
    module = importlib.util.module_from_spec(spec)
    source = Path(spec.origin).read_text(encoding="utf-8").replace(f'"{name}"', f'"{package}"')
    exec(compile(source, spec.origin, "exec"), vars(module))
    return module
