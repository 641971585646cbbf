"""Fill the routes of the C fast path: what it needs to convert an exact type to a target, read from adapters' data."""

from __future__ import annotations

import functools
import operator
import sys
from abc import get_cache_token
from dataclasses import dataclass
from types import WrapperDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple

from dlx._core import native
from dlx._core.extension import ffi
from dlx._core.types import DType, codes_of
from dlx._engine import trace
from dlx._engine.plan import HOST
from dlx._engine.request import described
from dlx._engine.tree import path_of
from dlx._protocols import arrow, dlpack
from dlx._registry import lookup
from dlx._registry.generic import ARROW, DLPACK, EXCHANGE, TENSOR, fast_generic_adapter, takes_fast_path
from dlx._registry.lookup import container_of, is_plain
from dlx._registry.registry import registry
from dlx._registry.target import Target, switch_places
from dlx._support.reflect import exception_text, foreign_error, type_name
from dlx.adapter.base import OWNER_BOUNDS, Adapter, Devices, DTypes, classes_of, look_up
from dlx.adapter.declarations import Container, FastPath, Layout, Placement
from dlx.errors import DlxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlx._core.array_info import ArrayInfo
    from dlx._core.native import Tensor

__all__ = ["Guard", "Question", "Route", "Switch", "consumer_failed", "exported", "learn"]


class Question(NamedTuple):
    """An attribute, or a method without arguments, of a type."""

    name: str
    type: type
    descriptor: object
    """What the type has under the name: where it is a C function, that is called without a look-up."""
    is_method: bool


class Guard(NamedTuple):
    """A question that must be answered false."""

    ask: Question
    codes: int
    """Bit n: asked where the dtype code is n; 0: whatever it is, and before anything is borrowed."""
    of_owner: bool
    """Asked of the owner, not of the array."""
    resolve: Question | None
    """Asked of the array when the answer was true, to make it false for good."""
    optional: bool
    """The attribute may be missing: that, and None, are false, anything else is true."""


class Switch(NamedTuple):
    """A value in a dict that must be this very object, or an attribute of another object that must equal it."""

    owner: Any
    name: str
    value: object


class Fields(NamedTuple):
    """Attributes of an array of device memory, of a type without an exchange table."""

    memory: Question
    """What keeps the memory alive."""
    shape: Question
    strides: Question
    """In bytes."""
    dtype: Question
    device: Question
    """As DLPack's numbers."""
    address: str
    """Attribute of what `memory` gives."""
    dtypes: dict[Any, int]
    """{dtype: code | bits << 8}."""


class Producer(NamedTuple):
    """How a type that no adapter lists is asked for a capsule."""

    names: tuple[str, ...]
    """Keywords that its ``__dlpack__`` is called with."""
    values: tuple[Any, ...]
    no_numbers: Callable[[Any], str]
    """Says of a dtype why its elements are no numbers; empty where they are."""
    modules: int
    """How many modules there were when no adapter listed the type."""
    token_of: Callable[[], object]
    token: object
    """What `token_of` gave then."""


@dataclass(frozen=True, slots=True)
class Route:
    """What the fast path needs to convert an exact type to a target; C reads the fields by name."""

    like: str | None = None
    """In a route by which `like` is looked up: the target that an array of the type stands for."""
    is_host_only: bool = False
    """Its adapter knows no device but the host."""
    children: Callable[[Any, bool], Any] | None = None
    """Of a container that becomes a list or dict: ``children(obj, may_copy)`` gives that, around what it holds.

    Or a pair of that or None, and of what the object's own method gave or raised: then it is not called again.
    """
    is_same: bool = False
    """The object itself is the result."""
    is_examined: bool = False
    """And that only where its table can tell what it is."""
    is_root_only: bool = False
    """Objects of the type pass through inside a container."""
    is_immutable: bool = False
    """Arrays of the type are read-only, whatever their export says."""
    exports: object = None
    """The exchange table of the type, a capsule; None for the one that the type carries, False for none."""
    is_managed: bool = False
    """The table's managed slot is used, though it has a borrow slot."""
    is_borrowed: bool = False
    """The borrow slot, where there is one, may be used for the length of a call."""
    export: Callable[[Any], Tensor | None] | None = None
    """Exports an array, where there is no table or its managed slot fails; None: the Python path does."""
    unblocked: Callable[[Any], Tensor | None] | None = None
    """Exports a copy of an array that has blockers, where that resolves them; None where it does not."""
    producer: Producer | None = None
    """Of a type with ``__dlpack__`` and no adapter."""
    fields: Fields | None = None
    """Of an array of device memory, where there is no table."""
    produces_on: Any = None
    """Who tells the source's current stream: True, its table; (function, attribute), see `StreamSupport`; None."""
    consumes_on: Any = None
    """The same of the target."""
    target: type | None = None
    """The type of the target's arrays; None for dlx.Tensor."""
    imports: object = None
    """The exchange table of the target, a capsule; None for the one that `target` carries, False for none."""
    load: Callable[[Any], Any] | None = None
    """Makes the target's array of a dlx.Tensor, where no table of the target is used."""
    copy: Callable[[Any], Any] | None = None
    """Copies an array that is in the target framework already, within it."""
    ready: Callable[[Any], bool] | None = None
    """Says whether borrowing that array neither waits for it nor changes it; None: it never does."""
    guards: tuple[Guard, ...] = ()
    quick: object = None
    """A capsule of the C function that answers further guards."""
    switches: tuple[Switch, ...] = ()
    """In dicts: switches of the source's framework that are off."""
    states: tuple[Switch, ...] = ()
    """Of objects: what the target's capabilities depend on; where one has changed, the route is found anew."""
    detach: Question | None = None
    """Asked of the array for one without a graph, where a guard holds and the call says ``detach=True``."""
    owner: Question | None = None
    """What keeps the memory alive; None for the array itself."""
    start: Question | None = None
    """Asked of the owner: where its memory begins."""
    nbytes: Question | None = None
    """Asked of the owner: the bytes that it really has; None where that need not be checked."""
    dtype: Question | None = None
    """The array's own dtype, asked where `confirmed` has the DLPack dtype."""
    confirmed: dict[int, Any] | None = None
    """{code | bits << 8: the dtype that the array must have}, where a framework has several for one of DLPack's."""
    storage: dict[int, Any] | None = None
    """{code | bits << 8: (the same of the storage dtype, array -> array of the real dtype)} of the target."""
    is_narrow: bool = False
    """The target takes more than `accepts`; what is not accepted, and ``copy=True``, are left to Python."""
    always_copies: bool = False
    """The target copies whatever it imports; what ``copy=`` asks for is left to Python."""
    load_named: Callable[[Tensor], Any] | None = None
    """As `load`, if the call names the host: see `Placement`."""
    accepts: int = 0
    """The address of the dlx_capabilities of what may be handed over, which are copied."""
    struct: Any = None
    """What keeps it alive until then."""


def learn(kind: type, to: Any) -> None:
    """Find the route from an exact type to a target, and add it to the fast path.

    Called by the fast path on its first call with this pair. Only types in `FastPath.types`, and such as have a
    protocol that C speaks, have routes; for all others the fast path remembers to take the Python path, until the type
    changes.
    """
    if trace.observers or (to is not NotImplemented and not isinstance(to, str | type(sys) | type)):
        return
    stamp = len(sys.modules), get_cache_token()
    source, producer = registry.knows(kind) or fast_generic_adapter(kind), None
    # An array type may declare itself a container. What speaks Arrow is one, since a table is; the types here are none.
    if source not in (None, ARROW) and container_of(kind) is not None:
        source = None
    if source is DLPACK:
        keywords = dlpack.keywords_of(kind)
        if keywords is None:  # its first call shows them
            return
        names = tuple(map(sys.intern, keywords))
        producer = Producer(names, tuple(keywords.values()), dlpack.no_numbers, stamp[0], get_cache_token, stamp[1])
    target = None if to is NotImplemented else registry.target(to)
    try:
        route = _route(kind, source, target, producer) if target is not None else _like(kind, source)
    except MemoryError:
        raise
    except Exception as error:  # an adapter's declarations are wrong: conversions take the Python path
        route = None
        if source is not None:
            registry.remark(
                source, f"the fast path from {type_name(kind)} to {to!r} is not used: {exception_text(error)}"
            )
    native.route_add(kind, sys.intern(to) if type(to) is str else to, route)


def _route(kind: type, source: Adapter | None, target: Target, producer: Producer | None) -> Route | None:
    """Return what the fast path needs; None for the Python path."""
    if source is None:
        handler = container_of(kind)
        if handler is lookup.ARROW:
            return Route(children=functools.partial(native.arrow_columns, arrow.method_of(kind)))
        if handler is None:
            return Route(is_root_only=True) if is_plain(kind) else None
        return _container(handler, target)
    given = source.fast_path
    is_own_table = source is EXCHANGE
    if given is None or not (is_own_table or producer is not None or takes_fast_path(source, kind)):
        return None
    adapter = target.adapter
    taken = adapter.fast_path
    accepts = target.fast_path_struct()
    if accepts is None:
        return None
    copies = target.capabilities.copies
    by_table = taken is not None and taken.imports
    load = None if adapter is TENSOR else adapter.load
    is_same = source is target.source and (target.kind is None or issubclass(kind, target.kind))
    is_examined = is_same and not given.returns_same
    if not (is_same or by_table or load is not None) or (is_examined and given.exchange is None):
        return None
    quick, answered = (given.guard_function() if given.guard_function is not None else None) or (None, frozenset())
    bounds = () if OWNER_BOUNDS in answered else given.owner_bounds
    start, nbytes = (
        (_question(look_up(given.owner_type), name, call=True) for name in bounds) if bounds else (None, None)
    )
    return Route(
        is_same=is_same,
        is_examined=is_examined,
        is_host_only=type(source.devices) is Devices,
        is_root_only=source.root_only if producer is None else is_plain(kind),
        is_immutable=source.immutable,
        is_managed=is_own_table or given.managed,
        is_borrowed=not is_own_table,
        export=given.export,
        unblocked=functools.partial(_unblocked, source) if given.unblocks is True else given.unblocks or None,
        producer=producer,
        fields=_fields(source, given, kind),
        produces_on=_told(source),
        consumes_on=_told(adapter) if by_table or load is not None else None,
        exports=False if producer is not None else given.exchange() if given.exchange is not None else None,
        target=None if adapter is TENSOR else classes_of(adapter)[0],
        imports=(taken.exchange() if taken is not None and taken.exchange is not None else None) if by_table else False,
        load=load,
        copy=_copies(source, target) if is_same else None,
        ready=given.ready if is_same else None,
        guards=tuple(_guards(given, kind, answered)),
        quick=quick,
        switches=tuple(
            Switch(sys.modules[module].__dict__, sys.intern(name), value) for module, name, value in given.switches
        ),
        states=tuple(_states(target.source)),
        detach=_question(kind, given.detach, call=True) if given.detach else None,
        owner=_question(kind, given.owner, call=True) if given.owner else None,
        start=start,
        nbytes=nbytes,
        dtype=_question(kind, given.dtype_attribute, call=False) if given.confirmed else None,
        confirmed=_confirmed(source, given),
        storage=_storage(target),
        is_narrow=target.varies or (taken is not None and taken.takes is not None),
        always_copies=copies is True,
        load_named=None if adapter.placement is None else _load_named(adapter.placement),
        accepts=int(ffi.cast("uintptr_t", accepts)),
        struct=accepts,
    )


def _load_named(placement: Placement) -> Callable[[Tensor], Any]:
    return lambda tensor: placement.load(tensor, True)


def _copies(source: Adapter, target: Target) -> Callable[[Any], Any] | None:
    """Return what copies an array within its framework; None where the Python path does."""
    if source is TENSOR:
        keep_order = bool(target.capabilities.layouts & Layout.PERMUTED)
        return lambda tensor: native.tensor_copy(tensor, keep_order)
    return source.copy if type(source).copy is not Adapter.copy else None


def _like(kind: type, source: Adapter | None) -> Route | None:
    """Return the route by which ``like=`` an array of an exact type is looked up; None for the Python path."""
    given = source.fast_path if source is not None else None
    if source is None or given is None or not takes_fast_path(source, kind):
        return None
    target = registry.ready(source)
    if target is None or target is not registry.target(source.name) or source.placement is not None:
        return None
    return Route(
        like=sys.intern(source.name),
        is_host_only=type(source.devices) is Devices,
        exports=given.exchange() if given.exchange is not None else None,
    )


def _container(handler: Container, target: Target) -> Route | None:
    """Return the route of a container that cannot hold the target's arrays; None for the Python path."""
    if handler.kind == "wrapper" and handler.unflatten is None and handler.falls_to is not None:
        return Route(children=lambda obj, may_copy: handler.flatten(obj)[1][0])
    falls_to = {"sequence": list, "mapping": dict}.get(handler.kind)
    if handler.holds in (None, target.name) or falls_to is None or handler.falls_to is not falls_to:
        return None
    return Route(children=functools.partial(_children, handler.flatten, handler.identity))


def _children(
    flatten: Any, identity: Callable[[Any], Any] | None, obj: Any, may_copy: bool
) -> list[Any] | dict[Any, Any]:
    """Return what a container holds, wrappers of one thing as one object."""
    keys, children = flatten(obj)
    if identity is not None:
        names = list(map(identity, children))
        if len(set(names)) < len(names):
            first: dict[Any, Any] = {}
            pairs = zip(names, children, strict=True)
            children = [child if name is None else first.setdefault(name, child) for name, child in pairs]
    return children if keys is None else dict(zip(keys, children, strict=True))


def _unblocked(source: Adapter, obj: Any) -> Tensor | None:
    """Return the tensor of a copy without blockers, on the host; None where the Python path says or does more."""
    _, blockers, _, _, device = source.describe(obj)
    on_host = device == HOST if device is not None else type(source.devices) is Devices
    if not (blockers and on_host and all(each.copies and each.option is None for each in blockers)):
        return None
    for blocker in blockers:
        obj = blocker.resolve(obj)
    tensor: Tensor | None = _borrow(obj, "dlx", True)  # as of what nobody else can resize
    return source.export(obj) if tensor is None else tensor


def _fields(source: Adapter, given: FastPath, kind: type) -> Fields | None:
    """Return how arrays in device memory are read that have no table."""
    if not given.memory:
        return None
    memory, address = given.memory
    dtypes = {source.dtypes.to_native(dtype): _key(dtype) for dtype in map(DType, source.dtypes.known())}
    memory_of, shape, strides, dtype = (
        _question(kind, name, call=False) for name in (memory, "shape", "strides", given.dtype_attribute)
    )
    device = _question(kind, "__dlpack_device__", call=True)
    return Fields(memory_of, shape, strides, dtype, device, sys.intern(address), dtypes)


def _told(adapter: Adapter) -> Any:
    """Return who tells the fast path a framework's current stream on a device."""
    quick = adapter.streams.quick if adapter.streams is not None else None
    return quick() if callable(quick) else quick


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


def _states(adapter: Adapter) -> Iterator[Switch]:
    """Give what the capabilities of a target depend on, with its present values."""
    for owner, attribute in switch_places(adapter):
        yield Switch(owner, sys.intern(attribute), getattr(owner, attribute, None))


def _question(kind: type, name: str, *, call: bool) -> Question:
    descriptor = next((cls.__dict__[name] for cls in kind.__mro__ if name in cls.__dict__), None)
    return Question(sys.intern(name), kind, descriptor, call)


def _may_have(kind: type, name: str) -> bool:
    """Return whether objects of an exact type may have an attribute: their class, their own dict, or Python code."""
    in_c = type(kind.__getattribute__) is WrapperDescriptorType and not hasattr(kind, "__getattr__")
    return not in_c or bool(kind.__dictoffset__) or hasattr(kind, name)


def _guards(given: FastPath, kind: type, answered: frozenset[str]) -> Iterator[Guard]:
    """Give the guards of an exact type, but those that its function in C has answered."""
    for guard in given.guards:
        if guard.ask in answered or (guard.optional and not _may_have(kind, guard.ask)):
            continue
        asked = look_up(given.owner_type) if guard.of_owner else kind
        codes = sum(1 << code for code in codes_of(guard.kinds))
        resolve = _question(kind, guard.resolve, call=True) if guard.resolve else None
        yield Guard(_question(asked, guard.ask, call=guard.call), codes, guard.of_owner, resolve, guard.optional)


def _confirmed(source: Adapter, given: FastPath) -> dict[int, Any] | None:
    if not given.confirmed:
        return None
    dtypes = [DType(name) for name in given.confirmed]
    return {_key(dtype): source.dtypes.to_native(dtype) for dtype in dtypes}


def consumer_failed(obj: Any, to: Any, cause: Any, tree: Any = None) -> DlxError:
    """Return the error for a consumer that failed in the fast path, after its exchange table had taken the memory."""
    target = registry.target(to)
    error = cause if isinstance(cause, DlxError) else foreign_error(f"{target.name} refused it:", cause)
    path = () if tree is None else path_of(obj, tree)
    return error.complete(source=str(described(obj)), target=target.name, path=path)


_borrow = native.FastPathFunction(None, learn, consumer_failed)._borrow


def exported(obj: Any) -> tuple[Adapter, ArrayInfo, Tensor] | None:
    """Return the adapter of an array without blockers, its description and its tensor.

    None where its adapter must be asked, or is not known yet.
    """
    source = registry.known(type(obj))
    path = None if source is None else source.fast_path
    if source is None or path is None or path.describe is None:
        return None
    try:
        if path.ready is not None and not path.ready(obj):
            return None
        tensor = _borrow(obj, "dlx", True)
        return None if tensor is None else (source, path.describe(source.name, obj, tensor), tensor)
    except MemoryError:
        raise
    except Exception:  # the adapter says why
        return None
