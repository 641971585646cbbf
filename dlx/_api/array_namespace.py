"""`array_namespace`: the module with a framework's array functions."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from dlx._core.public import public
from dlx._registry.lookup import adapter_of, not_an_array
from dlx._support.reflect import exception_text, foreign_error, type_name
from dlx.errors import AdapterNotFoundError, PluginError


@public
def array_namespace(*arrays: Any) -> Any:
    """Return the namespace of arrays of one framework: the module with their functions.

    This is the module of array-api-compat, which follows the Python array API standard, if that is installed and
    supports the framework. Otherwise it is the framework's module.

    Parameters
    ----------
    *arrays
        Arrays of one framework. None and Python's numbers are ignored.

    Returns
    -------
    module
        Or another object, if the framework's ``__array_namespace__`` returns one.

    Raises
    ------
    TypeError
        If there is no array, or if the frameworks differ.
    AdapterNotFoundError
        If an argument isn't an array, or its framework has no array functions.
    PluginError
        If the adapter names a module that cannot be imported.

    Examples
    --------
    >>> import dlx, numpy
    >>> xp = dlx.array_namespace(numpy.ones(3), 2.0, None)
    >>> float(xp.sum(xp.ones(3)))
    3.0
    """
    found: dict[int, tuple[Any, str]] = {}  # by id, since a namespace may be unhashable
    for array in arrays:
        if array is not None and type(array) not in (bool, int, float, complex):
            namespace = _namespace(array)
            found.setdefault(id(namespace), (namespace, type_name(type(array))))
    if not found:
        raise TypeError("array_namespace takes at least one array, found 0. Pass an array.")
    if len(found) > 1:
        held = ", ".join(sorted(kind for _, kind in found.values()))
        fix = "Convert them to one of these first: dlx.convert(y, like=x)."
        raise TypeError(f"array_namespace takes arrays of one framework, found {held}. {fix}")
    ((namespace, _),) = found.values()
    return namespace


def _namespace(array: Any) -> Any:
    """Return the namespace of one array."""
    adapter = adapter_of(array)
    if adapter is None:
        raise not_an_array(array)
    for name in adapter.namespaces:
        try:
            if importlib.util.find_spec(name) is not None:
                return importlib.import_module(name)
        except ModuleNotFoundError:  # the parent package
            continue
        except Exception as error:
            reason = f"its namespace {name} cannot be imported: {exception_text(error, 200)}"
            raise PluginError(reason, fix=f"Repair the installation of {name.partition('.')[0]}.") from error
    ask = getattr(type(array), "__array_namespace__", None)
    if ask is not None:
        try:
            return ask(array)
        except Exception as error:
            raise foreign_error("its __array_namespace__ failed:", error, source=type_name(type(array))) from error
    raise AdapterNotFoundError(
        "its framework has no array functions: no namespace in its adapter, and no __array_namespace__",
        source=type_name(type(array)),
        fix="Convert it to a framework with array functions, such as dlx.convert(x, to='numpy').",
    )
