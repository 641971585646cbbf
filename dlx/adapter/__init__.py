"""The interface for authors of adapters: `Adapter`, its parts, helpers, and the plugin hook.

A third party's adapter is a module `dlx_mylib` with one hook, like the built-in `dlx_numpy` and `dlx_torch`. An adapter
imports its framework only inside functions. It names types by importable strings, which dlx looks up once their package
is imported.
"""

from dlx._support.module import set_module
from dlx.adapter.arrow import ArrowSource, arrow_info, arrow_lists
from dlx.adapter.base import *  # noqa: F403
from dlx.adapter.base import __all__ as _base
from dlx.adapter.files import file_handler, flatten_mapping
from dlx.adapter.hookspecs import offer

__all__ = [*_base, "ArrowSource", "arrow_info", "arrow_lists", "file_handler", "flatten_mapping", "offer"]

for _value in [globals()[name] for name in __all__]:
    if str(getattr(_value, "__module__", "")).startswith("dlx.adapter."):
        set_module("dlx.adapter")(_value)


def __dir__() -> list[str]:
    return __all__
