"""What an object is: `kind` says it of a type, `look` of an object, `source` of what must be one array.

A type is looked at once, and again when an adapter is loaded, a module imported, or a type registered with an abstract
base class. The first of these decides:

1. the tables of exact types (`_EXACT`);
2. the object's own protocol, ``__dlx_tree__()`` -> ``(children, rebuild)``;
3. handlers that adapters declare (`Adapter.containers`), the nearest base class first;
4. arrays that an adapter lists (`Adapter.types`), then text, buffers and numbers, whatever they inherit from;
5. Arrow's interface: its table or column is asked for once;
6. what is refused by name (`dlx._registry.array_like`);
7. subclasses of built-in containers, which keep their attributes; dataclasses, attrs classes, pydantic's models,
   msgspec's structures and namespaces; anything registered as a `Mapping` or `Sequence` (`dlx._registry.handlers`).

Of any other type each object is asked whether it implements a protocol of arrays.

>>> kind(dict).verdict, kind(str).verdict, kind(object).verdict
('container', 'plain', 'unknown')
"""

from __future__ import annotations

import array
import enum
import numbers
from collections import UserString
from typing import Any, Literal, NamedTuple
from weakref import CallableProxyType, ProxyType, ref

from dlx._core import native
from dlx._core.types import Device, DType
from dlx._protocols import arrow
from dlx._registry import generic
from dlx._registry.array_like import Refusal, explain, refusal
from dlx._registry.built_in import HANDLERS
from dlx._registry.built_in import LIST as LIST
from dlx._registry.built_in import TUPLE as TUPLE
from dlx._registry.handlers import Keys, abstract_handler, record_handler, subclass_handler
from dlx._registry.registry import CONVERT_CONTENTS, NOT_INSPECTED, registry
from dlx._support.reflect import derives, foreign_error, foreign_errors, is_key, module_of, packages_of, type_name
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import AdapterNotFoundError, DlxError


class Kind(NamedTuple):
    """What is known of a type, or of one object."""

    adapter: Adapter | None  # one that lists the type, or that of a protocol which the object implements
    handler: Container | None
    # plain: it passes through a tree; refused: unless an object implements a protocol; unknown: each object is asked
    verdict: Literal["container", "array", "plain", "refused", "unknown"]
    refusal: Refusal | None = None

    @property
    def part(self) -> Container | Adapter | None:
        """The handler of a container, or the adapter of an array; None for what passes through a tree."""
        if self.handler is not None:
            return self.handler
        return self.adapter if self.verdict == "array" else None


def _flatten_own(obj: Any) -> tuple[list[Any], list[Any]]:
    children, rebuild = obj.__dlx_tree__()
    named = isinstance(children, dict)
    keys = Keys(children if named else range(len(children)))
    keys.context = rebuild, named
    return keys, list(children.values()) if named else list(children)


def _unflatten_own(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    rebuild, named = keys.context
    return rebuild(dict(zip(keys, children, strict=True)) if named else children)


OWN = Container(kind="mapping", flatten=_flatten_own, unflatten=_unflatten_own)

# A lazy view stands for its source, or for the part of it that a slice shows.
VIEW = Container(kind="wrapper", flatten=lambda view: (None, [view._stored()]))


def _flatten_arrow(obj: Any) -> tuple[None, list[Any]]:
    try:
        return None, [arrow.read_columns(obj)]
    except DlxError as error:  # pandas and xarray need pyarrow for it
        error.complete(fix=explain(type(obj)).fix)
        raise


# What gives out Arrow data: only that shows whether it is a table, whose columns become a dict, or a column.
ARROW = Container(kind="wrapper", flatten=_flatten_arrow)

PLAIN = Kind(None, None, "plain")
NOT_TAKEN_APART = "the container cannot be taken apart:"
_CHECKED_PER_OBJECT = ("unknown", "refused")  # verdicts of types whose objects are asked
_UNKNOWN = Kind(None, None, "unknown")
_RAISES = Kind(None, None, "unknown")  # a type that raises when it is looked at: it is looked at again
_ARRAYS: dict[Adapter, Kind] = {
    each: Kind(each, None, "array")
    for each in (
        *(generic.CAPSULE, generic.DEFERRED, generic.DLPACK, generic.EXCHANGE, generic.CUDA_INTERFACE),
        *(generic.INTERFACE, generic.ARROW, generic.BUFFER),
    )
}
_EXACT: dict[type, Kind] = {
    **{each: Kind(None, handler, "container") for each, handler in HANDLERS.items()},
    **dict.fromkeys((type(None), bool, int, float, complex, str, range), PLAIN),
    **dict.fromkeys((bytes, bytearray, memoryview), Kind(generic.BUFFER, None, "plain")),
    type(native.buffer_exchange()): _ARRAYS[generic.CAPSULE],
    generic.Deferred: _ARRAYS[generic.DEFERRED],
    arrow.Column: _ARRAYS[generic.ARROW],
}

# Never entered, though some are sequences (a string is a sequence of strings).
_LEAVES = (
    str, bytes, bytearray, memoryview, range, slice, UserString, array.array, numbers.Number, enum.Enum, Device, DType,
)  # fmt: skip
_PLAIN_MODULES = ("datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid", "zoneinfo")


def kind(cls: type) -> Kind:
    """Return what is known of an exact type. Looked up once per type."""
    if not (type(cls) is type or is_key(cls)):
        return _classify_safely(cls)
    found: Kind | None = _EXACT.get(cls)
    if found is None:
        kinds = registry.kinds()  # a look-up that is overtaken leaves its answer in what was dropped
        found = kinds.get(ref(cls))
        if found is None:
            found = _classify_safely(cls)
            if found is not _RAISES:
                kinds.keep(cls, found)
        handler = found.handler
        if handler is not None and not handler.types and handler is not OWN and _has_array_protocol(cls):
            return Kind(found.adapter, None, "unknown")  # the attribute may have been added since
    return found


def look(obj: Any, strict: bool | None = None, found: Kind | None = None) -> Kind:
    """Return what an object is. `strict`: refuse what is unknown, too; None: refuse nothing, not even by name."""
    if found is None:
        found = kind(type(obj))
    if found.verdict not in _CHECKED_PER_OBJECT:
        return found
    try:
        adapter = _find_by_protocol(obj)
        if adapter is None and found.refusal is not None and _has_buffer(obj):
            adapter = generic.BUFFER
        found = found if adapter is None else _ARRAYS[adapter]
    except (DlxError, MemoryError):
        raise
    except Exception:  # an object whose attributes raise is of no known kind
        found = _UNKNOWN
    if found.refusal is not None and strict is not None:
        raise found.refusal.error()
    if strict and found.verdict == "unknown" and not _has_buffer(obj):
        why = "it is neither array, container nor plain data (strict=True)"
        raise AdapterNotFoundError(why, source=type_name(type(obj)), option=(("strict", None),))
    return found


def source(obj: Any, found: Kind | None = None, **parts: Any) -> tuple[Any, Adapter]:
    """Return the array that an object is or stands for (as a DataArray of xarray does), and its adapter."""
    if found is None:
        found = kind(type(obj))
    adapter = _find_adapter(obj, found)
    if adapter is not None and not (adapter is generic.ARROW and found.handler is not None):
        return obj, adapter
    inside, handler = unwrap(obj, **parts)
    if inside is not obj and handler is None:
        return source(inside, None, **parts)
    raise not_an_array(obj).complete(**parts)


def adapter_of(obj: Any) -> Adapter | None:
    """Return the adapter of an object that is an array, a buffer included; None for any other object."""
    return _find_adapter(obj, kind(type(obj)))


def _find_adapter(obj: Any, found: Kind) -> Adapter | None:
    try:
        adapter = registry.owner(type(obj)) if found is _RAISES else found.adapter
        return adapter or _find_by_protocol(obj) or (generic.BUFFER if _has_buffer(obj) else None)
    except DlxError:
        raise
    except Exception as error:
        name = type_name(type(obj))
        raise foreign_error(NOT_INSPECTED, error, AdapterNotFoundError, source=name, fix=CONVERT_CONTENTS) from error


def is_built_in(cls: type) -> bool:
    """Return whether a type is one of Python's own containers, no subclass."""
    return (type(cls) is type or is_key(cls)) and cls in HANDLERS


def _classify_safely(cls: type) -> Kind:
    try:
        return _classify(cls)
    except AdapterNotFoundError:
        return _RAISES
    except (DlxError, MemoryError):
        raise
    except Exception:
        return _RAISES


def _classify(cls: type) -> Kind:
    adapter, refused = registry.owner(cls), None
    if any("__dlx_tree__" in each.__dict__ for each in cls.__mro__):
        handler: Container | None = OWN
    elif getattr(cls, "is_lazy_view", False):
        handler = VIEW
    else:
        handler = registry.declared_handler(cls)
    if handler is None and adapter is None and not _has_array_protocol(cls) and not derives(cls, _LEAVES):
        if arrow.has_interface(cls):
            handler = ARROW
        elif (refused := refusal(cls)) is None:
            handler = subclass_handler(cls) or record_handler(cls) or abstract_handler(cls)
    if handler is not None and handler.kind != "leaf":
        return Kind(adapter, handler, "container")
    if adapter is not None:
        return Kind(adapter, None, "array" if handler is None else "plain")
    if derives(cls, _LEAVES) or module_of(cls).partition(".")[0] in _PLAIN_MODULES:
        return PLAIN
    refused = refused or refusal(cls)
    return _UNKNOWN if refused is None else Kind(None, None, "refused", refused)


def _has_array_protocol(cls: type) -> bool:
    """Return whether objects of a type are arrays by a protocol that needs no adapter."""
    return hasattr(cls, "__dlpack__") or hasattr(cls, "__array_interface__")


def _find_by_protocol(obj: Any) -> Adapter | None:
    """Return the adapter of an object's first protocol; never ``__array__``, which may copy or move without saying."""
    cls = type(obj)
    if hasattr(cls, "__dlpack__"):
        return generic.DLPACK
    if _is_proxy(cls):
        return None
    if "__dlpack_c_exchange_api__" in cls.__dict__:
        return generic.EXCHANGE
    if not isinstance(obj, type):  # a class that gives its objects an interface has none itself
        own = getattr(obj, "__dict__", ())
        for name, adapter in _INTERFACES:  # not asked for: some write their pixels out then
            if name in own:
                return adapter
            for each in cls.__mro__:
                if name in each.__dict__:
                    return adapter
    return generic.ARROW if arrow.has_interface(cls) else None


_INTERFACES = ("__cuda_array_interface__", generic.CUDA_INTERFACE), ("__array_interface__", generic.INTERFACE)


def _is_proxy(cls: type) -> bool:
    return cls is ProxyType or cls is CallableProxyType  # they forward to objects that they do not keep alive


def _has_buffer(obj: Any) -> bool:
    if _is_proxy(type(obj)):
        return False
    try:
        memoryview(obj).release()
    except TypeError:
        return False
    except MemoryError:
        raise
    except Exception:
        pass  # it cannot be exported at present: the export says why
    return True


def unwrap(obj: Any, **parts: Any) -> tuple[Any, Container | None]:
    """Return what a wrapper stands for, or any other object itself, and its handler if that is a container."""
    try:
        inside, handler = obj, kind(type(obj)).handler
        while handler is not None and handler.kind == "wrapper":
            _, (inside,) = handler.flatten(inside)
            handler = kind(type(inside)).handler
        return inside, handler
    except Exception:
        with foreign_errors(NOT_TAKEN_APART, source=type_name(type(obj)), **parts):
            raise


def not_an_array(obj: Any) -> DlxError:
    """Return the error for an object that is no array."""
    name = type_name(type(obj))
    broken = registry.broken_for(packages_of(type(obj)))
    if broken is not None:
        return broken.complete(source=name)
    reason = "it is no array: it has no adapter, no __dlpack__, no __array_interface__ and no buffer"
    if _is_proxy(type(obj)):
        fix = "Convert the object itself: a proxy does not keep it alive."
    elif kind(type(obj)).handler is not None:
        reason = "it is a container, and one array is needed"
        fix = "Give one of the arrays in it; dlx.convert and dlx.plan take whole containers."
    else:
        fix = CONVERT_CONTENTS if "." in name else "Give an array, or an object with a buffer such as bytes."
        try:
            known = explain(type(obj))
            if known.reason:
                return known.error()
            fix = known.fix or fix
        except MemoryError:
            raise
        except Exception:  # a class that raises when it is looked at
            pass
    return AdapterNotFoundError(reason, source=name, fix=fix)
