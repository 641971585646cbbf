"""What authors of adapters import: `Adapter`, the data types in which it states facts, and the hook.

A third party's adapter, a module `dlx_mylib` with one hook, is built from this package in the same way as `dlx_numpy`
and `dlx_torch` are. An adapter imports its framework inside functions only: types are named by importable strings and
looked up when their package is there.
"""

from dlx._support.module import set_module
from dlx.adapter.arrow import ArrowSource, arrow_info
from dlx.adapter.base import *  # noqa: F403
from dlx.adapter.base import __all__ as _base
from dlx.adapter.files import file_handler, flatten_mapping
from dlx.adapter.hookspecs import offer

__all__ = [*_base, "ArrowSource", "arrow_info", "file_handler", "flatten_mapping", "offer"]

for _value in [globals()[name] for name in __all__]:
    if str(getattr(_value, "__module__", "")).startswith("dlx.adapter."):
        set_module("dlx.adapter")(_value)
