"""Import modules of dlx on first use: `Late` and `load_name`."""

from __future__ import annotations

import gc
import importlib
import sys

from dlx._support.module import restore_modules

TYPE_CHECKING = False  # see `dlx`
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Late", "load_name"]


def load_name(module: str, name: str) -> Any:
    """Import a module of dlx and return one of its names.

    It raises an ImportError if the call interrupts the import of the module (in a signal handler) or Python is exiting.
    """
    collects = gc.isenabled()
    try:
        gc.disable()  # finalizers may convert, and would see a partial module
        restore_modules()
        loaded = importlib.import_module(module)
    except ImportError as error:
        if sys.meta_path is None:
            raise ImportError(f"cannot load {module}: Python is exiting. Convert something before that.") from error
        raise
    finally:
        if collects:
            gc.enable()
    try:
        return getattr(loaded, name)
    except AttributeError:
        message = f"cannot load dlx.{name}: this call, such as in a signal handler, interrupts the import of {module}."
        raise ImportError(f"{message} Run 'from dlx import {name}' before.") from None


class Late:
    """A module of dlx that is imported at the first access to a name."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` and `doctest` look for such names
            raise AttributeError(name)
        value = self.__dict__[name] = load_name(self._module, name)
        return value
