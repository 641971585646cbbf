"""Another registry of plugins for the duration of a test."""

from __future__ import annotations

import sys

from dlx._registry import registry as module


def use(registry, setattr=setattr):
    """Replace the registry in every module of dlx that uses it; `setattr` may be monkeypatch's."""
    for name, user in list(sys.modules.items()):
        if name.startswith("dlx.") and user is not module and getattr(user, "registry", None) is module.registry:
            setattr(user, "registry", registry)
    return registry
