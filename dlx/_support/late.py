"""Import modules of dlx when they are needed: `Late` and `load_name`."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any

from dlx._support.module import restore_modules

__all__ = ["Late", "load_name"]


def load_name(module: str, name: str) -> Any:
    """Import a module of dlx and return one of its names.

    An ImportError means that the call interrupts the import of the module, as a signal handler may, or Python ends.
    """
    collects = gc.isenabled()
    try:
        gc.disable()  # finalizers of a collection may convert, and would find half a module
        restore_modules()
        loaded = importlib.import_module(module)
    except ImportError as error:
        if sys.meta_path is None:
            raise ImportError(f"cannot load {module} while Python ends. Convert something before that.") from error
        raise
    finally:
        if collects:
            gc.enable()
    try:
        return getattr(loaded, name)
    except AttributeError:
        message = f"cannot load dlx.{name}: this call interrupts the import of {module}, as a signal handler may."
        raise ImportError(f"{message} Run 'from dlx import {name}' before.") from None


class Late:
    """A module of dlx that is imported when one of its names is first read."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` and `doctest` look for such names
            raise AttributeError(name)
        value = self.__dict__[name] = load_name(self._module, name)
        return value
