"""Compile adapters' declarations into the data by which the C fast path exports and imports arrays."""

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
from dlx._core.extension import ffi, lib
from dlx._core.types import HOST, Device, DType, codes_of
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
    """An attribute, or a method without arguments, of an array or of its memory's owner."""

    name: str
    type: type | None  # None: the array's type, which the question must not keep alive
    descriptor: object  # the type's C function of that name, called without a look-up; else None
    is_method: bool


class Guard(NamedTuple):
    """A question whose answer must be false."""

    ask: Question
    codes: int  # bit n: ask if the dtype code is n; 0: ask always, before anything is borrowed
    of_owner: bool  # ask the owner, not the array
    resolve: Question | None  # a call on the array that makes a true answer false for good
    optional: bool  # the attribute may be missing; a missing one and None are false, other values true


class Switch(NamedTuple):
    """A dict entry that must be this object, or an attribute of another object that must equal it."""

    owner: Any
    name: str
    value: object


_TABLES = ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__")
_INTERFACES = ("__array_interface__", "__cuda_array_interface__")
_PROTOCOLS = ("__dlpack__", *_TABLES, *_INTERFACES, *arrow.METHODS, "__dlx_tree__")
"""Names that turn a class into an array or a container."""
_CURRENT = Device("cuda")  # compared by identity: the framework's current device
_NO_ARRAYS = (weakref.ProxyType, weakref.CallableProxyType, type(native.buffer_exchange()), Deferred, arrow.Column)
"""Types whose objects take the Python path."""


def learn(kind: type, to: Any) -> None:
    """Add the pair of an array type and a target to the fast path; `to` is NotImplemented for arrays of ``like=``."""
    if trace.observers or (to is not NotImplemented and not isinstance(to, str | type(sys) | type)):
        return
    if isinstance(to, str):
        if type(to).__hash__ is not str.__hash__ or type(to).__eq__ is not str.__eq__:
            return  # a subclass of str may equal anything
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
    """Return the kind of a pair, see ``c_src/convert/pairs.h``."""
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
    """Return whether objects of a type are arrays only at the root, and pass through inside a container."""
    is_array = source.what in ("converts", "produces", "python") and isinstance(source.adapter, Adapter)
    return is_array and (source.adapter is BUFFER or lookup.kind(kind).verdict == "passthrough")


def _like(kind: type, adapter: Any) -> tuple[str, Any] | bool:
    """Return the target and placement for ``like=`` an array of an exact type; False for the Python path."""
    if not isinstance(adapter, Adapter) or not _takes_fast_path(adapter, kind):
        return False
    try:
        consumer = registry.ready(adapter)
        if consumer is None or consumer is not registry.target(adapter.name):
            return False
    except DlxError:  # the Python path raises it
        return False
    place = None if adapter.placement is None else functools.partial(_stays_on_host, adapter)
    return sys.intern(adapter.name), place


def _stays_on_host(adapter: Adapter, obj: Any) -> bool | None:
    """Return whether an array on the host stays there; None for an array on another device."""
    assert adapter.placement is not None
    return adapter.placement.is_committed(obj) if adapter.devices.of(obj) == HOST else None


def source_of(kind: type) -> native.Source | None:
    """Return the source of an exact type and store it in the fast path; None as in `_find_source`."""
    source = native.source_find(kind)
    if source is None and (source := _find_source(kind)) is not None:
        native.source_add(source)
    return source


def _find_source(kind: type) -> native.Source | None:
    """Return the source of an exact type; None if only its first call shows how its ``__dlpack__`` is called."""
    stamp = len(sys.modules), get_cache_token()
    found = lookup.kind(kind)
    adapter = found.adapter or _generic_source(kind)
    # An array type may declare itself a container. Tables of Arrow are containers; the other types here are not.
    if adapter not in (None, ARROW) and found.handler is not None:
        adapter = None
    try:
        if adapter is None:
            return native.Source(kind, stamp=stamp, depends_on=_PROTOCOLS, **_other_fields(kind))
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
        return native.Source(kind, adapter=adapter, **_array_fields(kind, adapter))
    except MemoryError:
        raise
    except Exception as error:  # an adapter's declarations are wrong: use the Python path
        if adapter is not None:
            registry.remark(adapter, f"the fast path from {type_name(kind)} is not used: {exception_text(error)}")
        return native.Source(kind, what="python", adapter=adapter, depends_on=_PROTOCOLS)


def _other_fields(kind: type) -> dict[str, Any]:
    """Return the fields of `native.Source` for a type that is not an array type."""
    found = lookup.kind(kind)
    handler = found.handler
    if handler is None:
        return {"what": _classify_leaf(kind, found)}
    if handler is lookup.ARROW:
        columns = functools.partial(native.arrow_columns, arrow.method_of(kind))
        return {"what": "children", "adapter": handler, "parts": columns}
    if handler.kind == "wrapper" and handler.unflatten is None and handler.falls_to is not None:
        parts = lambda obj, may_copy: handler.flatten(obj)[1][0]  # noqa: E731
        return {"what": "children", "adapter": handler, "parts": parts, "open": handler.live}
    if handler.falls_to is not None and handler.falls_to is {"sequence": list, "mapping": dict}.get(handler.kind):
        parts = functools.partial(_list_children, handler.flatten, handler.identity)
        return {"what": "children", "adapter": handler, "parts": parts}
    # The Python path takes containers with code (of adapters, or `__dlx_tree__`), with identities, or with fallbacks.
    more = handler.types or handler.holds or handler.falls_to or handler.identity or handler.unflatten is None
    if more or handler is lookup.OWN or handler.kind not in ("sequence", "mapping", "record", "set"):
        return {"what": "python"}
    return {"what": "rule", "adapter": handler, "parts": (handler.flatten, handler.unflatten, handler.mutable)}


def _classify_leaf(kind: type, found: lookup.Kind) -> str:
    """Return whether objects pass through a tree; "looks": only if the instance has no array interface."""
    if not is_key(kind) or issubclass(kind, _NO_ARRAYS):
        return "python"
    if found.verdict == "passthrough":
        return "passes"
    own_dict = inspect.getattr_static(kind, "__dict__", None)
    is_usual = own_dict is None or type(own_dict) in (GetSetDescriptorType, MemberDescriptorType)
    if not is_usual or type(kind.__getattribute__) is FunctionType:  # the dict may be computed
        return "python"
    if any(hasattr(kind, name) for name in _PROTOCOLS) or found.refusal is not None:
        return "python"
    return "looks" if kind.__dictoffset__ and not issubclass(kind, type) else "passes"


def _generic_source(kind: type) -> Adapter | None:
    """Return the generic adapter for a type on the fast path; a table of a base class does not count."""
    if "__dlpack_c_exchange_api__" in kind.__dict__:
        return EXCHANGE
    if is_key(kind) and kind not in (ProxyType, CallableProxyType) and hasattr(kind, "__dlpack__"):
        return DLPACK
    return next((adapter for adapter in (BUFFER, ARROW, INTERFACE) if _takes_fast_path(adapter, kind)), None)


def _takes_fast_path(adapter: Adapter, kind: type) -> bool:
    """Return whether an adapter lists an exact type, or a compatible base of it, for the fast path."""
    declared = adapter.fast_path
    if declared is None:
        return False
    listed = [look_up(name) for name in declared.types]
    if kind in listed:
        return True
    base = next((base for base in listed if isinstance(base, type) and issubclass(kind, base)), None)
    if base is None or declared.subclasses is None:
        return False
    # C derives the memory from these attributes, so a subclass must not override them.
    names = {declared.detach(), "dtype", *(guard.ask for guard in declared.guards)}
    if isinstance(declared.owner, Owner):
        names |= {declared.owner.ask, *declared.owner.freeze[1:]}
    same = all(getattr(kind, name, None) is getattr(base, name, None) for name in names if name)
    return same and declared.subclasses(kind)


def _array_fields(kind: type, adapter: Adapter) -> dict[str, Any]:
    """Return the fields of `native.Source` for an exact type that an adapter lists."""
    declared = adapter.fast_path
    is_own_table = adapter is EXCHANGE
    if declared is None or not (is_own_table or _takes_fast_path(adapter, kind)):
        return {"what": "python", "depends_on": (*_PROTOCOLS, *_list_attributes(declared))}
    in_c, answered = (declared.guard_function() if declared.guard_function is not None else None) or (None, frozenset())
    owner, start, nbytes = _owner(declared, kind, answered)
    detach = declared.detach()
    by_adapter = {} if declared.exchange is None else {"table": declared.exchange()}
    return by_adapter | {
        "what": "converts",
        "depends_on": (*_list_attributes(declared), "__dlx_tree__", *(_TABLES if declared.exchange is None else ())),
        "still": None if is_own_table or kind in map(look_up, declared.types) else declared.subclasses,
        "managed": declared.owner == "managed",
        "is_own_table": True if is_own_table else None,
        "examined": declared.checks_same,
        "is_host_only": type(adapter.devices) is Devices,
        "immutable": adapter.arrays.immutable,
        "export": declared.export,
        "unblocked": _unblocked(kind, adapter, declared),
        "fields": _fields(adapter, declared, kind),
        "streams": _streams(adapter),
        "copy": _find_copy(adapter),
        "ready": declared.ready,
        "guards": tuple(_guards(declared, kind, answered)),
        "guard_function": in_c,
        "switches": tuple(
            Switch(sys.modules[module].__dict__, sys.intern(name), value) for module, name, value in declared.conditions
        ),
        "detach": _question(kind, detach) if detach else None,
        "owner": owner,
        "start": start,
        "nbytes": nbytes,
        "dtype": _question(kind, "dtype") if declared.checked_dtypes else None,
        "confirmed": {_key(each): adapter.dtypes.to_native(each) for each in map(DType, declared.checked_dtypes)}
        or None,
    }


def _list_attributes(declared: FastPath | None) -> tuple[str, ...]:
    """Return the class attributes on which the fast path of a type depends."""
    if declared is None:
        return ()
    names = dict.fromkeys(guard.ask for guard in declared.guards)
    if any(guard.optional for guard in declared.guards):
        names |= dict.fromkeys(("__getattr__", "__getattribute__"))
    names |= dict.fromkeys((declared.detach(), "dtype"))
    if isinstance(declared.owner, Owner):
        names |= dict.fromkeys((declared.owner.ask, *declared.owner.freeze[1:]))
    return tuple(map(sys.intern, filter(None, names)))


def _find_copy(adapter: Adapter) -> Callable[[Any], Any] | None:
    """Return a function that copies an array inside its framework; None for the Python path."""
    if adapter is TENSOR:
        return lambda tensor: native.tensor_copy(tensor, True)
    return adapter.copy if type(adapter).copy is not Adapter.copy else None


def flatten_once(flatten: Any, identity: Callable[[Any], Any] | None, obj: Any) -> tuple[Any, list[Any]]:
    """Return the keys and children of a container; all wrappers of one array become the first of them."""
    keys, children = flatten(obj)
    if identity is not None:
        names = list(map(identity, children))
        if len(set(names)) < len(names):
            first: dict[Any, Any] = {}
            pairs = zip(names, children, strict=True)
            children = [child if name is None else first.setdefault(name, child) for name, child in pairs]
    return keys, children


def _list_children(flatten: Any, identity: Any, obj: Any, may_copy: bool) -> list[Any] | dict[Any, Any]:
    """Return the children of a container as a list or dict."""
    keys, children = flatten_once(flatten, identity, obj)
    return children if keys is None else dict(zip(keys, children, strict=True))


def _unblocked(kind: type, adapter: Adapter, declared: FastPath) -> Callable[[Any], Any] | None:
    """Return the function for arrays of a type with blockers; a declared one is not for subclasses."""
    if not callable(declared.unblocks):
        return functools.partial(_export_unblocked, adapter) if declared.unblocks else None
    return declared.unblocks if kind in map(look_up, declared.types) else None


def _export_unblocked(source: Adapter, obj: Any) -> Tensor | None:
    """Return the tensor of a host copy without blockers; None if the Python path is needed."""
    _, blockers, _, _, device = source.describe(obj)
    on_host = device == HOST if device is not None else type(source.devices) is Devices
    if not (blockers and on_host and all(each.needs == "copy" for each in blockers)):
        return None
    for blocker in blockers:
        obj = blocker.resolve(obj)
    tensor: Tensor | None = FAST_PATH._borrow(obj, "dlx", True)  # no other code can resize the copy
    return source.export(obj) if tensor is None else tensor


def _fields(source: Adapter, declared: FastPath, kind: type) -> tuple[Any, ...] | None:
    """Return the questions for device arrays without a table: owner, shape, strides, dtype, device, and codes."""
    owner = declared.owner
    if not _is_read(owner):
        return None
    dtypes = {source.dtypes.to_native(dtype): _key(dtype) for dtype in map(DType, source.dtypes.known())}
    names = owner.ask, "shape", "strides", "dtype", "__dlpack_device__"
    return (*(_question(kind, name) for name in names), sys.intern(owner.address), dtypes)


def _is_read(owner: Any) -> TypeGuard[Owner]:
    """Return whether the fast path reads device arrays by their owner's address."""
    return isinstance(owner, Owner) and bool(owner.address) and not owner.nbytes


def _owner(declared: FastPath, kind: type, answered: frozenset[str]) -> Iterator[Question | None]:
    """Yield the questions for an array's owner, the start of its memory, and its size."""
    owner = declared.owner
    if not isinstance(owner, Owner) or _is_read(owner):
        yield from (None, None, None)
        return
    yield _question(kind, owner.ask)
    checks = owner.nbytes and OWNER_BOUNDS not in answered
    for name in (owner.address, owner.nbytes):
        yield _question(kind, name, of=owner.type) if checks else None


def _streams(adapter: Adapter) -> Any:
    """Return the fast way to a framework's current stream on a device; see `StreamSupport.quick`."""
    getter = adapter.streams.quick if adapter.streams is not None else None
    return getter() if callable(getter) else getter


def _question(kind: type, name: str, *, of: str = "", is_attribute: bool = False) -> Question:
    """Return a question for arrays of a type, or for their owner if `of` has the importable name of its type."""
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


def _guards(declared: FastPath, kind: type, answered: frozenset[str]) -> Iterator[Guard]:
    """Yield the guards of an exact type, except for those that its function in C has answered."""
    for guard in declared.guards:
        if guard.ask in answered or (guard.optional and not _may_have(kind, guard.ask)):
            continue
        codes = sum(1 << code for code in codes_of(guard.kinds))
        yield Guard(_question(kind, guard.ask, is_attribute=guard.optional), codes, False, None, guard.optional)
    if isinstance(declared.owner, Owner) and declared.owner.freeze:
        question, method = declared.owner.freeze
        ask = _question(kind, question, of=declared.owner.type)
        yield Guard(ask, 0, True, _question(kind, method), False)


def _target(consumer: Target) -> native.Target:
    """Return the native target of a consumer: its accepted arrays, and the function that loads them."""
    try:
        accepts = consumer.fast_path_struct()
        if accepts is None or not classes_of(consumer.adapter):
            return native.Target(consumer=consumer)
        return native.Target(
            consumer=consumer, stated=accepts, accepts=int(ffi.cast("uintptr_t", accepts)), **_target_fields(consumer)
        )
    except MemoryError:
        raise
    except Exception as error:  # an adapter's declarations are wrong: use the Python path
        registry.remark(consumer.source, f"the fast path to {consumer.name!r} is not used: {exception_text(error)}")
        return native.Target(consumer=consumer)


def _target_fields(consumer: Target) -> dict[str, Any]:
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
    if adapter.streams is not None and type(adapter.devices).new_array is not Devices.new_array:
        made |= {
            "where": functools.partial(_find_device, adapter, {}),
            "allocate": lambda like, device: adapter.devices.new_array(like.shape, like.dtype, device, like.strides),
            "stack": None if type(adapter.devices).stack is Devices.stack else adapter.devices.stack,
        }
    if adapter is not TENSOR:
        made |= {"arrays": classes_of(adapter)[0], "load": adapter.load}
    if path is not None and path.imports and adapter is not TENSOR:
        made |= {"depends_on": _TABLES} if path.exchange is None else {"table": path.exchange()}
    return made


def _find_device(adapter: Adapter, known: dict[Any, Device | None], wanted: Any) -> Device | None:
    """Return the CUDA device that an option names, or the framework's default or current one; None for others."""
    if type(wanted) is int:
        return _cuda_device(wanted)
    device = known.get(wanted, HOST)
    if device is HOST:
        device = adapter.devices.default() if wanted is None else Device(wanted)
        is_named = not (wanted is None or (type(wanted) is str and ":" not in wanted))
        device = known[wanted] = None if device.type != lib.kDLCUDA else device if is_named else _CURRENT
    return _cuda_device(adapter.devices.current(lib.kDLCUDA)) if device is _CURRENT else device


@functools.cache
def _cuda_device(number: int) -> Device:
    return Device(lib.kDLCUDA, number)


def _storage(target: Target) -> dict[int, Any] | None:
    """Return the views for dtypes that the target imports as a storage dtype of the same width."""
    dtypes = target.adapter.dtypes
    pairs = [(DType(name), DType(storage)) for name, storage in target.equal_width_storage().items()]
    return {_key(dtype): (_key(stored), _make_view(dtypes, dtype)) for dtype, stored in pairs} or None


def _make_view(dtypes: DTypes, dtype: DType) -> Callable[[Any], Any]:
    """Return a function that views an array of the storage dtype as the real dtype."""
    if type(dtypes).viewed is DTypes.viewed and dtype.name in dtypes.known():
        return operator.methodcaller("view", dtypes.to_native(dtype))  # with the dtype looked up once
    return functools.partial(dtypes.viewed, dtype=dtype)


def _key(dtype: DType) -> int:
    return dtype.code | dtype.bits << 8


def try_describe(obj: Any) -> ArrayInfo | None:
    """Return the description of an array, or None if it fails."""
    try:
        return array_info(*lookup.source(obj))
    except DlxError:
        return None


def consumer_failed(obj: Any, to: Any, cause: Any, tree: Any = None) -> DlxError:
    """Return the error for a consumer whose exchange table failed in the fast path."""
    target = registry.target(to)
    error = cause if isinstance(cause, DlxError) else foreign_error(f"{target.name} refused it:", cause)
    path = () if tree is None else _tree.path_of(obj, tree)
    return error.complete(source=str(try_describe(obj)), target=target.name, path=path)


FAST_PATH._bind(learn=learn, failed=consumer_failed)


def export_and_describe(obj: Any) -> tuple[Adapter, ArrayInfo, Tensor] | None:
    """Return adapter, description and tensor of an array without blockers; None if only its adapter knows."""
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
    except Exception:  # the adapter raises it again
        return None
