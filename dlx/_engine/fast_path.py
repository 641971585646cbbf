"""Fill the routes of the C fast path: what it needs to convert an exact type to a target, read from adapters' data."""

from __future__ import annotations

import sys
from typing import Any

from dlx._core import native
from dlx._core.foreign import exception_text, foreign_error
from dlx._core.tensor import type_name
from dlx._core.types import DType, codes_of
from dlx._engine.batch import path_of
from dlx._engine.request import described
from dlx._registry.generic import TENSOR
from dlx._registry.registry import registry
from dlx._registry.target import Target
from dlx.adapter.base import OWNER_BOUNDS, Adapter, look_up
from dlx.adapter.declarations import FastPath
from dlx.errors import DlxError

__all__ = ["consumer_failed", "learn"]

_EVERY_CODE = 0xFFFFFFFF


def learn(kind: type, to: Any) -> None:
    """Find the route from an exact type to a target, and add it to the fast path.

    Called by the fast path on its first call with this pair. Only types in `FastPath.types` have routes;
    for all others the fast path remembers to take the Python path, until the type changes.
    """
    if not isinstance(to, str | type(sys) | type):
        return
    source = registry.knows(kind)
    target = registry.target(to)
    try:
        route = _route(kind, to, source, target)
    except MemoryError:
        raise
    except Exception as error:  # an adapter's declarations are wrong: conversions take the Python path
        assert source is not None
        route = None
        registry.remark(source, f"the fast path from {type_name(kind)} to {to!r} is not used: {exception_text(error)}")
    if route is None:
        native.route_add(kind, to, False, (), None, (), None, (), None, (), None, (), None, None, 0)
    else:
        native.route_add(*route)


def _route(kind: type, to: Any, source: Adapter | None, target: Target) -> tuple[Any, ...] | None:
    """Return what the fast path needs; None for the Python path."""
    exports = source.fast_path if source is not None else None
    if source is None or exports is None or not any(look_up(name) is kind for name in exports.types):
        return None
    adapter = target.adapter
    if source.switches or adapter.switches or target.varies:
        return None
    imports = adapter.fast_path
    by_table = imports is not None and imports.imports
    # Without a list of dtypes, the fast path would pass what must be viewed as its real dtype after `load`.
    viewed = bool(target.storage) and target.capabilities.dtypes is None
    load = None if adapter is TENSOR or viewed else adapter.load
    if not (exports.returns_same if source is target.source else by_table or load is not None):
        return None
    quick, answered = (exports.guard_function() if exports.guard_function is not None else None) or (None, frozenset())
    bounds = () if OWNER_BOUNDS in answered else exports.owner_bounds
    return (
        kind,
        to,
        source is target.source,
        exports.exchange() if exports.exchange is not None else None,
        None if adapter is TENSOR else adapter.classes()[0],
        (imports.exchange() if imports is not None and imports.exchange is not None else None) if by_table else False,
        load,
        tuple(_guard(exports, kind, guard) for guard in exports.guards if guard.ask not in answered),
        quick,
        tuple(_switches(exports)),
        _question(kind, exports.owner, call=True) if exports.owner else None,
        tuple(_question(look_up(exports.owner_type), name, call=True) for name in bounds),
        _question(kind, exports.dtype_attribute, call=False) if exports.confirmed else None,
        _confirmed(source, exports),
        target.fast_path_address(),
    )


def _question(kind: type, name: str, *, call: bool) -> tuple[Any, ...]:
    for cls in kind.__mro__:
        if name in cls.__dict__:
            return (sys.intern(name), kind, cls.__dict__[name], call)
    return (sys.intern(name), kind, None, call)


def _guard(exports: FastPath, kind: type, guard: Any) -> tuple[Any, ...]:
    asked = look_up(exports.owner_type) if guard.of_owner else kind
    codes = sum(1 << code for code in codes_of(guard.kinds)) if guard.kinds else _EVERY_CODE
    resolve = _question(kind, guard.resolve, call=True) if guard.resolve else None
    return (_question(asked, guard.ask, call=guard.call), codes, guard.of_owner, resolve)


def _switches(exports: FastPath) -> Any:
    for module, name, value in exports.switches:
        yield sys.modules[module].__dict__, sys.intern(name), value


def _confirmed(source: Adapter, exports: FastPath) -> dict[int, Any] | None:
    if not exports.confirmed:
        return None
    dtypes = [DType(name) for name in exports.confirmed]
    return {dtype.code | dtype.bits << 8: source.dtypes.to_native(dtype) for dtype in dtypes}


def consumer_failed(obj: Any, to: Any, cause: Any, tree: Any = None) -> DlxError:
    """Return the error for a consumer that failed in the fast path, after its exchange table had taken the memory."""
    target = registry.target(to)
    error = cause if isinstance(cause, DlxError) else foreign_error(f"{target.name} refused it:", cause)
    path = () if tree is None else path_of(obj, tree)
    return error.complete(source=str(described(obj)), target=target.name, path=path)
