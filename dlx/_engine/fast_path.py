"""Say how the C fast path takes arrays of a type, and makes those of a target, read from adapters' data."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import weakref
from abc import get_cache_token
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard
from weakref import CallableProxyType, ProxyType

from dlx._core import native
from dlx._core.extension import ffi
from dlx._core.types import HOST, DType, codes_of
from dlx._engine import trace
from dlx._engine.seam import FAST_PATH
from dlx._engine.sources import array_info
from dlx._protocols import arrow, dlpack
from dlx._registry import lookup
from dlx._registry.generic import ARROW, BUFFER, DLPACK, EXCHANGE, INTERFACE, TENSOR, Deferred
from dlx._registry.registry import registry
from dlx._registry.target import Target, switch_places
from dlx._support.late import Late
from dlx._support.reflect import exception_text, foreign_error, is_key, type_name
from dlx.adapter.base import OWNER_BOUNDS, Adapter, Devices, DTypes, classes_of, look_up
from dlx.adapter.declarations import Capabilities, FastPath, Owner
from dlx.errors import DlxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlx._core.array_info import ArrayInfo
    from dlx._core.native import Tensor
    from dlx._engine import tree as _tree
else:
    _tree = Late("dlx._engine.tree")


class Question(NamedTuple):
    """An attribute, or a method without arguments, of an array or of what owns its memory."""

    name: str
    type: type | None  # None for the array's own, which the question must not keep alive
    descriptor: object  # what the type has under the name, if it is a C function, which is called without a look-up
    is_method: bool


class Guard(NamedTuple):
    """A question that must be answered false."""

    ask: Question
    codes: int  # bit n: asked if the dtype code is n; 0: whatever it is, and before anything is borrowed
    of_owner: bool  # asked of the owner, not of the array
    resolve: Question | None  # asked of the array when the answer was true, to make it false for good
    optional: bool  # the attribute may be missing: that, and None, are false, anything else is true


class Switch(NamedTuple):
    """A value in a dict that must be this very object, or an attribute of another object that must equal it."""

    owner: Any
    name: str
    value: object


_TABLES = ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__")
_INTERFACES = ("__array_interface__", "__cuda_array_interface__")
_PROTOCOLS = ("__dlpack__", *_TABLES, *_INTERFACES, *arrow.METHODS, "__dlx_tree__")
"""What makes an array or a container of a class that is neither."""
_NO_ARRAYS = (weakref.ProxyType, weakref.CallableProxyType, type(native.buffer_exchange()), Deferred, arrow.Column)
"""Types whose objects are looked at by Python."""


def learn(kind: type, to: Any) -> None:
    """Find how arrays of a type reach a target, and add the pair; `to` is NotImplemented for what ``like=`` names."""
    if trace.observers or (to is not NotImplemented and not isinstance(to, str | type(sys) | type)):
        return
    if isinstance(to, str):
        if type(to).__hash__ is not str.__hash__ or type(to).__eq__ is not str.__eq__:
            return  # it may equal anything
        to = sys.intern(str.__str__(to))
    source = source_of(kind)
    if source is None:
        return
    if to is NotImplemented:
        native.source_add(source, _like(kind, source.adapter))
    else:
        target = native.target_find(to) or _target(registry.target(to))
        native.pair_add(to, source, target, _pair(kind, source, target), _is_at_root(kind, source))


def _pair(kind: type, source: native.Source, target: native.Target) -> str:
    """Return what a pair is, see ``c_src/convert/pairs.h``."""
    what, adapter, consumer = source.what, source.adapter, target.consumer
    if what == "children" and adapter.kind != "wrapper" and adapter.holds in (None, consumer.name):
        return "python"  # it can hold the target's arrays
    if what not in ("converts", "produces"):
        return what
    if adapter is consumer.source and (consumer.kind is None or issubclass(kind, consumer.kind)):
        can_look = not adapter.fast_path.checks_same or adapter.fast_path.exchange is not None
        return "stays" if can_look and target.stated is not None else "python"
    return what


def _is_at_root(kind: type, source: native.Source) -> bool:
    """Return whether objects of a type are arrays at the root only, and pass through inside a container."""
    is_array = source.what in ("converts", "produces", "python") and isinstance(source.adapter, Adapter)
    return is_array and (source.adapter is BUFFER or lookup.kind(kind).verdict == "plain")


def _like(kind: type, adapter: Any) -> tuple[str, Any] | bool:
    """Return what ``like=`` an array of an exact type means; False for the Python path."""
    if not isinstance(adapter, Adapter) or not _takes_fast_path(adapter, kind):
        return False
    try:
        consumer = registry.ready(adapter)
        if consumer is None or consumer is not registry.target(adapter.name):
            return False
    except DlxError:  # Python says what it is
        return False
    place = None if adapter.placement is None else functools.partial(_stays_on_host, adapter)
    return sys.intern(adapter.name), place


def _stays_on_host(adapter: Adapter, obj: Any) -> bool | None:
    """Return whether an array on the host stays there; None for one elsewhere."""
    assert adapter.placement is not None
    return adapter.placement.is_committed(obj) if adapter.devices.of(obj) == HOST else None


def source_of(kind: type) -> native.Source | None:
    """Return the source of an exact type, which the fast path remembers; None as by `_known`."""
    source = native.source_find(kind)
    if source is None and (source := _known(kind)) is not None:
        native.source_add(source)
    return source


def _known(kind: type) -> native.Source | None:
    """Return the source of an exact type; None if only its first call shows how its ``__dlpack__`` is called."""
    stamp = len(sys.modules), get_cache_token()
    found = lookup.kind(kind)
    adapter = found.adapter or _generic_source(kind)
    # An array type may declare itself a container. What speaks Arrow is one, since a table is; the types here are none.
    if adapter not in (None, ARROW) and found.handler is not None:
        adapter = None
    try:
        if adapter is None:
            return native.Source(kind, stamp=stamp, depends_on=_PROTOCOLS, **_other_kind(kind))
        if adapter is DLPACK:
            keywords = dlpack.keywords_of(kind)
            if keywords is None:
                return None
            names = tuple(map(sys.intern, keywords))
            asked = names, tuple(keywords.values()), dlpack.no_numbers
            depends_on = ("__dlpack__", "__dlx_tree__")
            return native.Source(
                kind, what="produces", adapter=adapter, stamp=stamp, depends_on=depends_on, table=False, producer=asked
            )
        return native.Source(kind, adapter=adapter, **_arrays(kind, adapter))
    except MemoryError:
        raise
    except Exception as error:  # an adapter's declarations are wrong: conversions take the Python path
        if adapter is not None:
            registry.remark(adapter, f"the fast path from {type_name(kind)} is not used: {exception_text(error)}")
        return native.Source(kind, what="python", adapter=adapter, depends_on=_PROTOCOLS)


def _other_kind(kind: type) -> dict[str, Any]:
    """Return what is known of a type that is none of arrays."""
    found = lookup.kind(kind)
    handler = found.handler
    if handler is None:
        return {"what": _passing(kind, found)}
    if handler is lookup.ARROW:
        columns = functools.partial(native.arrow_columns, arrow.method_of(kind))
        return {"what": "children", "adapter": handler, "parts": columns}
    if handler.kind == "wrapper" and handler.unflatten is None and handler.falls_to is not None:
        return {"what": "children", "adapter": handler, "parts": lambda obj, may_copy: handler.flatten(obj)[1][0]}
    if handler.falls_to is not None and handler.falls_to is {"sequence": list, "mapping": dict}.get(handler.kind):
        parts = functools.partial(_children, handler.flatten, handler.identity)
        return {"what": "children", "adapter": handler, "parts": parts}
    # Not where the container's own code is called (what adapters declare, `__dlx_tree__`), where a child has another
    # identity than its address, and where it may become something else.
    more = handler.types or handler.holds or handler.falls_to or handler.identity or handler.unflatten is None
    if more or handler is lookup.OWN or handler.kind not in ("sequence", "mapping", "record", "set"):
        return {"what": "python"}
    return {"what": "rule", "adapter": handler, "parts": (handler.flatten, handler.unflatten, handler.mutable)}


def _passing(kind: type, found: lookup.Kind) -> str:
    """Return whether objects pass through a tree; "looks": unless the object itself has an array interface."""
    if not is_key(kind) or issubclass(kind, _NO_ARRAYS):
        return "python"
    if found.verdict == "plain":
        return "passes"
    own_dict = inspect.getattr_static(kind, "__dict__", None)
    is_usual = own_dict is None or type(own_dict) in (GetSetDescriptorType, MemberDescriptorType)
    if not is_usual or type(kind.__getattribute__) is FunctionType:  # anything may be given out for the dict
        return "python"
    if any(hasattr(kind, name) for name in _PROTOCOLS) or found.refusal is not None:
        return "python"
    return "looks" if kind.__dictoffset__ and not issubclass(kind, type) else "passes"


def _generic_source(kind: type) -> Adapter | None:
    """Return the generic adapter whose arrays of a type take the fast path; a base's own table promises nothing."""
    if "__dlpack_c_exchange_api__" in kind.__dict__:
        return EXCHANGE
    if is_key(kind) and kind not in (ProxyType, CallableProxyType) and hasattr(kind, "__dlpack__"):
        return DLPACK
    return next((adapter for adapter in (BUFFER, ARROW, INTERFACE) if _takes_fast_path(adapter, kind)), None)


def _takes_fast_path(adapter: Adapter, kind: type) -> bool:
    """Return whether arrays of an exact type take the fast path, by the types that an adapter names."""
    given = adapter.fast_path
    if given is None:
        return False
    listed = [look_up(name) for name in given.types]
    if kind in listed:
        return True
    base = next((base for base in listed if isinstance(base, type) and issubclass(kind, base)), None)
    if base is None or given.subclasses is None:
        return False
    # What C asks an array must be what it asks those of the base: memory follows from the answers.
    asked = {given.detach(), "dtype", *(guard.ask for guard in given.guards)}
    if isinstance(given.owner, Owner):
        asked |= {given.owner.ask, *given.owner.freeze[1:]}
    same = all(getattr(kind, name, None) is getattr(base, name, None) for name in asked if name)
    return same and given.subclasses(kind)


def _arrays(kind: type, adapter: Adapter) -> dict[str, Any]:
    """Return how arrays of an exact type are taken that an adapter lists."""
    given = adapter.fast_path
    is_own_table = adapter is EXCHANGE
    if given is None or not (is_own_table or _takes_fast_path(adapter, kind)):
        return {"what": "python", "depends_on": (*_PROTOCOLS, *_asked(given))}
    in_c, answered = (given.guard_function() if given.guard_function is not None else None) or (None, frozenset())
    owner, start, nbytes = _owner(given, kind, answered)
    detach = given.detach()
    by_adapter = {} if given.exchange is None else {"table": given.exchange()}
    return by_adapter | {
        "what": "converts",
        "depends_on": (*_asked(given), "__dlx_tree__", *(_TABLES if given.exchange is None else ())),
        "still": None if is_own_table or kind in map(look_up, given.types) else given.subclasses,
        "managed": given.owner == "managed",
        "is_own_table": True if is_own_table else None,
        "examined": given.checks_same,
        "is_host_only": type(adapter.devices) is Devices,
        "immutable": adapter.arrays.immutable,
        "export": given.export,
        "unblocked": functools.partial(_unblocked, adapter) if given.unblocks is True else given.unblocks or None,
        "fields": _fields(adapter, given, kind),
        "streams": _streams(adapter),
        "copy": _copy_of(adapter),
        "ready": given.ready,
        "guards": tuple(_guards(given, kind, answered)),
        "guard_function": in_c,
        "switches": tuple(
            Switch(sys.modules[module].__dict__, sys.intern(name), value) for module, name, value in given.conditions
        ),
        "detach": _question(kind, detach) if detach else None,
        "owner": owner,
        "start": start,
        "nbytes": nbytes,
        "dtype": _question(kind, "dtype") if given.checked_dtypes else None,
        "confirmed": {_key(each): adapter.dtypes.to_native(each) for each in map(DType, given.checked_dtypes)} or None,
    }


def _asked(given: FastPath | None) -> tuple[str, ...]:
    """Return the attributes of a class by which its arrays take the fast path."""
    if given is None:
        return ()
    names = dict.fromkeys(guard.ask for guard in given.guards)
    if any(guard.optional for guard in given.guards):
        names |= dict.fromkeys(("__getattr__", "__getattribute__"))
    names |= dict.fromkeys((given.detach(), "dtype"))
    if isinstance(given.owner, Owner):
        names |= dict.fromkeys((given.owner.ask, *given.owner.freeze[1:]))
    return tuple(map(sys.intern, filter(None, names)))


def _copy_of(adapter: Adapter) -> Callable[[Any], Any] | None:
    """Return what copies an array within its framework; None where the Python path does."""
    if adapter is TENSOR:
        return lambda tensor: native.tensor_copy(tensor, True)
    return adapter.copy if type(adapter).copy is not Adapter.copy else None


def flatten_once(flatten: Any, identity: Callable[[Any], Any] | None, obj: Any) -> tuple[Any, list[Any]]:
    """Return the keys and children of a container, all wrappers of one array as the first of them."""
    keys, children = flatten(obj)
    if identity is not None:
        names = list(map(identity, children))
        if len(set(names)) < len(names):
            first: dict[Any, Any] = {}
            pairs = zip(names, children, strict=True)
            children = [child if name is None else first.setdefault(name, child) for name, child in pairs]
    return keys, children


def _children(flatten: Any, identity: Any, obj: Any, may_copy: bool) -> list[Any] | dict[Any, Any]:
    """Return what a container holds as a list or dict."""
    keys, children = flatten_once(flatten, identity, obj)
    return children if keys is None else dict(zip(keys, children, strict=True))


def _unblocked(source: Adapter, obj: Any) -> Tensor | None:
    """Return the tensor of a copy without blockers, on the host; None where the Python path says or does more."""
    _, blockers, _, _, device = source.describe(obj)
    on_host = device == HOST if device is not None else type(source.devices) is Devices
    if not (blockers and on_host and all(each.needs == "copy" for each in blockers)):
        return None
    for blocker in blockers:
        obj = blocker.resolve(obj)
    tensor: Tensor | None = FAST_PATH._borrow(obj, "dlx", True)  # as of what nobody else can resize
    return source.export(obj) if tensor is None else tensor


def _fields(source: Adapter, given: FastPath, kind: type) -> tuple[Any, ...] | None:
    """Return the questions for arrays on devices without a table: owner, shape, strides, dtype, device, and codes."""
    owner = given.owner
    if not _is_read(owner):
        return None
    dtypes = {source.dtypes.to_native(dtype): _key(dtype) for dtype in map(DType, source.dtypes.known())}
    names = owner.ask, "shape", "strides", "dtype", "__dlpack_device__"
    return (*(_question(kind, name) for name in names), sys.intern(owner.address), dtypes)


def _is_read(owner: Any) -> TypeGuard[Owner]:
    """Return whether arrays on devices are read by their owner's address."""
    return isinstance(owner, Owner) and bool(owner.address) and not owner.nbytes


def _owner(given: FastPath, kind: type, answered: frozenset[str]) -> Iterator[Question | None]:
    """Give the questions for an array's owner, where its memory begins, and how much it is."""
    owner = given.owner
    if not isinstance(owner, Owner) or _is_read(owner):
        yield from (None, None, None)
        return
    yield _question(kind, owner.ask)
    checks = owner.nbytes and OWNER_BOUNDS not in answered
    for name in (owner.address, owner.nbytes):
        yield _question(kind, name, of=owner.type) if checks else None


def _streams(adapter: Adapter) -> Any:
    """Return how the fast path asks a framework for its current stream on a device; see `StreamSupport.quick`."""
    quick = adapter.streams.quick if adapter.streams is not None else None
    return quick() if callable(quick) else quick


def _question(kind: type, name: str, *, of: str = "", is_attribute: bool = False) -> Question:
    """Return a question for arrays of a type, or for what owns their memory, `of` a type with an importable name."""
    owner: Any = look_up(of) if of else None
    cls = owner if of else kind
    found = next((each.__dict__[name] for each in cls.__mro__ if name in each.__dict__), None)
    is_of_c = type(found) in (GetSetDescriptorType, MethodDescriptorType)
    is_method = not is_attribute and callable(getattr(cls, name, None))
    return Question(sys.intern(name), owner, found if is_of_c else None, is_method)


def _may_have(kind: type, name: str) -> bool:
    """Return whether objects of an exact type may have an attribute: their class, their own dict, or Python code."""
    in_c = type(kind.__getattribute__) is WrapperDescriptorType and not hasattr(kind, "__getattr__")
    return not in_c or bool(kind.__dictoffset__) or hasattr(kind, name)


def _guards(given: FastPath, kind: type, answered: frozenset[str]) -> Iterator[Guard]:
    """Give the guards of an exact type, but those that its function in C has answered."""
    for guard in given.guards:
        if guard.ask in answered or (guard.optional and not _may_have(kind, guard.ask)):
            continue
        codes = sum(1 << code for code in codes_of(guard.kinds))
        yield Guard(_question(kind, guard.ask, is_attribute=guard.optional), codes, False, None, guard.optional)
    if isinstance(given.owner, Owner) and given.owner.freeze:
        question, method = given.owner.freeze
        ask = _question(kind, question, of=given.owner.type)
        yield Guard(ask, 0, True, _question(kind, method), False)


def _target(consumer: Target) -> native.Target:
    """Return what a consumer takes, and how its arrays are made."""
    try:
        accepts = consumer.fast_path_struct()
        if accepts is None:
            return native.Target(consumer=consumer)
        return native.Target(
            consumer=consumer, stated=accepts, accepts=int(ffi.cast("uintptr_t", accepts)), **_making(consumer)
        )
    except MemoryError:
        raise
    except Exception as error:  # an adapter's declarations are wrong: conversions take the Python path
        registry.remark(consumer.source, f"the fast path to {consumer.name!r} is not used: {exception_text(error)}")
        return native.Target(consumer=consumer)


def _making(consumer: Target) -> dict[str, Any]:
    adapter, copies = consumer.adapter, consumer.capabilities.copies
    path = adapter.fast_path
    made: dict[str, Any] = {
        "is_narrow": consumer.varies or (path is not None and isinstance(path.imports, Capabilities)),
        "always_copies": copies is True,
        "storage": _storage(consumer),
        "states": tuple(
            Switch(owner, sys.intern(name), getattr(owner, name, None))
            for owner, name in switch_places(consumer.source)
        ),
        "streams": _streams(adapter),
        "place": None if adapter.placement is None else adapter.placement.load,
    }
    if adapter is not TENSOR:
        made |= {"arrays": classes_of(adapter)[0], "load": adapter.load}
    if path is not None and path.imports and adapter is not TENSOR:
        made |= {"depends_on": _TABLES} if path.exchange is None else {"table": path.exchange()}
    return made


def _storage(target: Target) -> dict[int, Any] | None:
    """Return how dtypes are imported that the target takes under the name of a storage dtype of the same width."""
    dtypes = target.adapter.dtypes
    pairs = [(DType(name), DType(storage)) for name, storage in target.storage_as_wide().items()]
    return {_key(dtype): (_key(stored), _viewed(dtypes, dtype)) for dtype, stored in pairs} or None


def _viewed(dtypes: DTypes, dtype: DType) -> Callable[[Any], Any]:
    """Return what views an array of its storage dtype as the real one."""
    if type(dtypes).viewed is DTypes.viewed and dtype.name in dtypes.known():
        return operator.methodcaller("view", dtypes.to_native(dtype))  # the same, looked up once
    return functools.partial(dtypes.viewed, dtype=dtype)


def _key(dtype: DType) -> int:
    return dtype.code | dtype.bits << 8


def described(obj: Any) -> ArrayInfo | None:
    """Return the description of an array, or None where there is none."""
    try:
        return array_info(*lookup.source(obj))
    except DlxError:
        return None


def consumer_failed(obj: Any, to: Any, cause: Any, tree: Any = None) -> DlxError:
    """Return the error for a consumer that failed in the fast path, after its exchange table had taken the memory."""
    target = registry.target(to)
    error = cause if isinstance(cause, DlxError) else foreign_error(f"{target.name} refused it:", cause)
    path = () if tree is None else _tree.path_of(obj, tree)
    return error.complete(source=str(described(obj)), target=target.name, path=path)


FAST_PATH._bind(learn=learn, failed=consumer_failed)


def exported(obj: Any) -> tuple[Adapter, ArrayInfo, Tensor] | None:
    """Return adapter, description and tensor of an array without blockers; None if its adapter must be asked."""
    source = lookup.kind(type(obj)).adapter
    path = None if source is None else source.fast_path
    if source is None or path is None or path.describe is None:
        return None
    try:
        if path.ready is not None and not path.ready(obj):
            return None
        tensor = FAST_PATH._borrow(obj, "dlx", True)
        return None if tensor is None else (source, path.describe(source.name, obj, tensor), tensor)
    except MemoryError:
        raise
    except Exception:  # the adapter says why
        return None
