"""Classification of types (`kind`) and objects (`look`), and look-up of one array (`source`).

Results are cached by type until an adapter is loaded, a module is imported, or a type is registered with an abstract
base class. The first match in this order is used:

1. the tables of exact types (`_EXACT`);
2. the protocol ``__dlx_tree__()`` -> ``(children, rebuild)``;
3. handlers declared by adapters (`Adapter.containers`), nearest base class first;
4. arrays listed by adapters (`Adapter.types`), then text, buffers and numbers, regardless of other bases;
5. Arrow's interface, whose method is called once;
6. known array-like types that dlx cannot read (`dlx._registry.array_like`);
7. subclasses of built-in containers; dataclasses, attrs classes, pydantic models, msgspec structs and namespaces; types
   registered as `Mapping` or `Sequence` (`dlx._registry.handlers`).

For all other types, dlx checks each object for an array protocol.

>>> kind(dict).verdict, kind(str).verdict, kind(object).verdict
('container', 'passthrough', 'unknown')
"""

from __future__ import annotations

import array
import enum
import numbers
from collections import UserString
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeGuard
from weakref import CallableProxyType, ProxyType, ref

from dlx._core import native
from dlx._core.types import Device, DType
from dlx._protocols import arrow
from dlx._registry import generic
from dlx._registry.array_like import Refusal, explain, refusal
from dlx._registry.built_in import HANDLERS
from dlx._registry.built_in import LIST as LIST
from dlx._registry.built_in import TUPLE as TUPLE
from dlx._registry.compound import PARTS, CompoundHandler, Parts, handler_of
from dlx._registry.handlers import Keys, abstract_handler, record_handler, subclass_handler
from dlx._registry.registry import CONVERT_CONTENTS, NOT_INSPECTED, registry
from dlx._support.reflect import derives, foreign_error, foreign_errors, is_key, module_of, packages_of, type_name
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import AdapterNotFoundError, DlxError


class Kind(NamedTuple):
    """The classification of a type or an object."""

    adapter: Adapter | None  # of the type, or of a protocol that the object implements
    handler: Container | None
    # passthrough: returned unchanged; refused: unless the object has a protocol; unknown: checked per object
    verdict: Literal["container", "array", "passthrough", "refused", "unknown"]
    refusal: Refusal | None = None
    compounds: tuple[CompoundHandler, ...] = ()  # of those objects that `Compound.matches`

    @property
    def part(self) -> Container | Adapter | None:
        """The handler of a container, the adapter of an array, or None for other objects."""
        if self.handler is not None:
            return self.handler
        return self.adapter if self.verdict == "array" else None


def _flatten_own(obj: Any) -> tuple[list[Any], list[Any]]:
    children, rebuild = obj.__dlx_tree__()
    named = isinstance(children, Mapping)
    if isinstance(children, str | bytes) or isinstance(look(children).part, Adapter):
        raise TypeError(f"__dlx_tree__ returns its children as {type_name(type(children))}, not as a list or dict")
    keys = Keys(children if named else range(len(children)))
    keys.context = rebuild, named
    return keys, list(children.values()) if named else list(children)


def _unflatten_own(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    rebuild, named = keys.context
    return rebuild(dict(zip(keys, children, strict=True)) if named else children)


OWN = Container(kind="mapping", flatten=_flatten_own, unflatten=_unflatten_own)

# A lazy view is replaced by its source, by the slice that it shows, or, with a dtype, by what it gives.
VIEW = Container(kind="wrapper", flatten=lambda view: (None, [view._to_contents()]))


def _read_arrow(obj: Any, *, as_tensors: bool = True) -> Any:
    try:
        return arrow.read_columns(obj, as_tensors=as_tensors)
    except DlxError as error:  # pandas and xarray need pyarrow
        error.complete(fix=explain(type(obj)).fix)
        raise


def _flatten_arrow(obj: Any) -> tuple[None, list[Any]]:
    return None, [_read_arrow(obj, as_tensors=False)]


# Objects with Arrow data. Only the data shows whether they are columns or tables, which become dicts of columns.
ARROW = Container(kind="wrapper", flatten=_flatten_arrow, live=_read_arrow)

PASSTHROUGH = Kind(None, None, "passthrough")
CANNOT_FLATTEN = "the container cannot be flattened:"
_CHECKED_PER_OBJECT = ("unknown", "refused")
_UNKNOWN = Kind(None, None, "unknown")
_RAISES = Kind(None, None, "unknown")  # not cached: inspecting the type raises
_ARRAYS: dict[Adapter, Kind] = {
    each: Kind(each, None, "array")
    for each in (
        *(generic.CAPSULE, generic.DEFERRED, generic.DLPACK, generic.EXCHANGE, generic.CUDA_INTERFACE),
        *(generic.INTERFACE, generic.ARROW, generic.BUFFER),
    )
}
_EXACT: dict[type, Kind] = {
    **{each: Kind(None, handler, "container") for each, handler in HANDLERS.items()},
    **dict.fromkeys((type(None), bool, int, float, complex, str, range), PASSTHROUGH),
    **dict.fromkeys((bytes, bytearray, memoryview), Kind(generic.BUFFER, None, "passthrough")),
    type(native.buffer_exchange()): _ARRAYS[generic.CAPSULE],
    **dict.fromkeys((generic.Deferred, generic.RefusedCode), _ARRAYS[generic.DEFERRED]),
    arrow.Column: Kind(generic.ARROW, None, "array", None, (handler_of(generic.ARROW.containers[0]),)),
    arrow.Offsets: _ARRAYS[generic.ARROW],
    Parts: Kind(None, PARTS, "container"),
}

# Never flattened, although some are sequences (a string is a sequence of strings).
_LEAVES = (
    str, bytes, bytearray, memoryview, range, slice, UserString, array.array, numbers.Number, enum.Enum, Device, DType,
)  # fmt: skip
_PASSTHROUGH_MODULES = ("datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid", "zoneinfo")


def kind(cls: type) -> Kind:
    """Return the classification of an exact type, from a cache."""
    if not (type(cls) is type or is_key(cls)):
        return _classify_safely(cls)
    found: Kind | None = _EXACT.get(cls)
    if found is None:
        kinds = registry.kinds()  # if it is replaced during this call, the result is lost
        found = kinds.get(ref(cls))
        if found is None:
            found = _classify_safely(cls)
            if found is not _RAISES:
                kinds.keep(cls, found)
        handler = found.handler
        if handler is not None and not handler.types and handler is not OWN and _has_array_protocol(cls):
            return Kind(found.adapter, None, "unknown")  # the attribute may be newer than the cache
    return found


def kind_of(obj: Any, found: Kind | None = None) -> Kind:
    """Return the classification of an object by its type, and as a compound array if only the object shows that."""
    if found is None:
        found = kind(type(obj))
    try:
        for handler in found.compounds:
            if handler.compound.matches is not None and handler.compound.matches(obj):
                return Kind(found.adapter, handler, "container")
    except Exception:
        with foreign_errors("its kind cannot be read:", source=type_name(type(obj))):  # slow, as a context of the loop
            raise
    return found


def look(obj: Any, strict: bool | None = None, found: Kind | None = None) -> Kind:
    """Return an object's classification. `strict` refuses unknown objects, too; None refuses none."""
    if found is None:
        found = kind(type(obj))
    if found.compounds:
        found = kind_of(obj, found)
    if found.verdict not in _CHECKED_PER_OBJECT:
        return found
    try:
        adapter = _find_by_protocol(obj)
        if adapter is None and found.refusal is not None and _has_buffer(obj):
            adapter = generic.BUFFER
        found = found if adapter is None else _ARRAYS[adapter]
    except (DlxError, MemoryError):
        raise
    except Exception:
        found = _UNKNOWN
    if found.refusal is not None and strict is not None:
        raise found.refusal.error()
    if strict and found.verdict == "unknown" and not _has_buffer(obj):
        why = "it is not an array, a container or plain data (strict=True)"
        raise AdapterNotFoundError(why, source=type_name(type(obj)), option=(("strict", None),))
    return found


def source(obj: Any, found: Kind | None = None, **parts: Any) -> tuple[Any, Adapter]:
    """Return the array in an object (itself, or the content of a wrapper such as a DataArray), and its adapter."""
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
    """Return the adapter of an array or buffer, or None."""
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
    """Return whether a type is a built-in container, not a subclass."""
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
    compounds: tuple[CompoundHandler, ...] = ()
    if any("__dlx_tree__" in each.__dict__ for each in cls.__mro__):
        handler: Container | None = OWN
    elif getattr(cls, "is_lazy_view", False):
        handler = VIEW
    else:
        declared = registry.declared_handlers(cls)
        compounds = tuple(filter(_is_by_object, declared))
        handler = next((each for each in declared if each not in compounds), None)
    if handler is None and adapter is None and not _has_array_protocol(cls) and not derives(cls, _LEAVES):
        if arrow.has_interface(cls):
            handler = ARROW
        elif (refused := refusal(cls)) is None:
            handler = subclass_handler(cls) or record_handler(cls) or abstract_handler(cls)
    if handler is not None and handler.kind != "leaf":
        return Kind(adapter, handler, "container")
    if adapter is not None:
        return Kind(adapter, None, "array" if handler is None else "passthrough", None, compounds)
    if derives(cls, _LEAVES) or module_of(cls).partition(".")[0] in _PASSTHROUGH_MODULES:
        return PASSTHROUGH
    refused = refused or refusal(cls)
    verdict: Literal["unknown", "refused"] = "unknown" if refused is None else "refused"
    if refused is not None and compounds:  # it is not an object of its bases' frameworks, such as of a mixin of numpy
        refused = refused._replace(frameworks=frozenset(each.adapter.package for each in compounds if each.adapter))
    return Kind(None, None, verdict, refused, compounds) if refused or compounds else _UNKNOWN


def _is_by_object(handler: Container) -> TypeGuard[CompoundHandler]:
    """Return whether only some objects of a handler's types are compound arrays."""
    return isinstance(handler, CompoundHandler) and handler.compound.matches is not None


def _has_array_protocol(cls: type) -> bool:
    """Return whether a type implements an array protocol that needs no adapter."""
    return hasattr(cls, "__dlpack__") or hasattr(cls, "__array_interface__")


def _find_by_protocol(obj: Any) -> Adapter | None:
    """Return the adapter of an object's first protocol, except ``__array__``, which may copy silently."""
    cls = type(obj)
    if hasattr(cls, "__dlpack__"):
        return generic.DLPACK
    if _is_proxy(cls):
        return None
    if "__dlpack_c_exchange_api__" in cls.__dict__:
        return generic.EXCHANGE
    if not isinstance(obj, type):  # a class with this attribute is not an array itself
        own = getattr(obj, "__dict__", ())
        for name, adapter in _INTERFACES:  # no getattr: it may serialize all pixels
            if name in own:
                return adapter
            for each in cls.__mro__:
                if name in each.__dict__:
                    return adapter
    return generic.ARROW if arrow.has_interface(cls) else None


_INTERFACES = ("__cuda_array_interface__", generic.CUDA_INTERFACE), ("__array_interface__", generic.INTERFACE)


def _is_proxy(cls: type) -> bool:
    return cls is ProxyType or cls is CallableProxyType  # do not keep the object alive


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
        pass  # the export will raise the reason
    return True


def unwrap(obj: Any, **parts: Any) -> tuple[Any, Container | None]:
    """Return the content of a wrapper, or the object itself; and the handler if it is a container."""
    try:
        inside, handler = obj, kind_of(obj).handler
        while handler is not None and handler.kind == "wrapper":
            _, (inside,) = handler.flatten(inside)
            handler = kind_of(inside).handler
        return inside, handler
    except Exception:
        with foreign_errors(CANNOT_FLATTEN, source=type_name(type(obj)), **parts):
            raise


def not_an_array(obj: Any) -> DlxError:
    """Return the error for an object that is not an array."""
    name = type_name(type(obj))
    broken = registry.broken_for(packages_of(type(obj)))
    if broken is not None:
        return broken.complete(source=name)
    reason = "it is not an array: it has no adapter, no __dlpack__, no __array_interface__ and no buffer"
    inside, handler = unwrap(obj)
    if _is_proxy(type(obj)):
        fix = "Convert the object itself; a weak proxy does not keep it alive."
    elif isinstance(handler, CompoundHandler):
        reason = f"it consists of several arrays ({handler.kind_of(inside)})"
        dense = handler.compound.dense
        fix = f"Pass one of dlx.parts(x){dense and f', or call {dense} first'}."
    elif handler is not None:
        reason = "it is a container, not one array"
        fix = "Pass one of its arrays; dlx.convert and dlx.plan accept containers."
    else:
        fix = CONVERT_CONTENTS if "." in name else "Pass an array, or an object with a buffer such as bytes."
        try:
            known = explain(type(obj))
            if known.reason:
                return known.error()
            fix = known.fix or fix
        except MemoryError:
            raise
        except Exception:
            pass
    return AdapterNotFoundError(reason, source=name, fix=fix)
