"""Fill the routes of the C fast path: what it needs to convert an exact type to a target, read from adapters' data."""

from __future__ import annotations

import sys
from typing import Any

from dlx._core import native
from dlx._core.foreign import exception_text
from dlx._core.tensor import type_name
from dlx._core.types import DType, codes_of
from dlx._engine.batch import place_of
from dlx._engine.request import _described
from dlx._registry.registry import registry
from dlx.adapter.base import OWNER_BOUNDS, Adapter, look_up
from dlx.errors import ConversionError, DlxError

__all__ = ["learn"]

_EVERY_CODE = 0xFFFFFFFF


def learn(kind: type, to: Any) -> None:
    """Find the route from an exact type to a target, and add it to the fast path.

    Called by the fast path on its first call with this pair. Only types in `Adapter.fast_path_types` have routes;
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


def _route(kind: type, to: Any, source: Adapter | None, target: Adapter) -> tuple[Any, ...] | None:
    """Return what the fast path needs; None for the Python path."""
    capabilities = target.capabilities
    if source is None or capabilities is None or not any(look_up(name) is kind for name in source.fast_path_types):
        return None
    if not (source.constant and target.constant) or type(target).check is not Adapter.check:
        return None
    # Without a list of dtypes, the fast path would pass what must be viewed as its real dtype after `load`.
    viewed_as = bool(target.storage_dtypes) and capabilities.dtypes is None
    load = None if target.is_own or viewed_as else target.load
    if not (source.identity if source is target else target.fast_path_imports or load is not None):
        return None
    quick, answered = source.guard_function() or (None, frozenset())
    bounds = () if OWNER_BOUNDS in answered else source.owner_bounds
    return (
        kind,
        to,
        source is target,
        source.exchange(),
        None if target.is_own else target.classes()[0],
        target.exchange() if target.fast_path_imports else False,
        load,
        tuple(_guard(source, kind, guard) for guard in source.guards if guard.ask not in answered),
        quick,
        tuple(_switches(source)),
        _question(kind, source.owner, call=True) if source.owner else None,
        tuple(_question(look_up(source.owner_type), name, call=True) for name in bounds),
        _question(kind, source.dtype_attribute, call=False) if source.confirmed else None,
        _confirmed(source),
        target.fast_path_capabilities_address(),
    )


def _question(kind: type, name: str, *, call: bool) -> tuple[Any, ...]:
    for cls in kind.__mro__:
        if name in cls.__dict__:
            return (sys.intern(name), kind, cls.__dict__[name], call)
    return (sys.intern(name), kind, None, call)


def _guard(source: Adapter, kind: type, guard: Any) -> tuple[Any, ...]:
    asked = look_up(source.owner_type) if guard.of_owner else kind
    codes = sum(1 << code for code in codes_of(guard.kinds)) if guard.kinds else _EVERY_CODE
    resolve = _question(kind, guard.resolve, call=True) if guard.resolve else None
    return (_question(asked, guard.ask, call=guard.call), codes, guard.of_owner, resolve)


def _switches(source: Adapter) -> Any:
    for module, name, value in source.switches:
        yield sys.modules[module].__dict__, sys.intern(name), value


def _confirmed(source: Adapter) -> dict[int, Any] | None:
    if not source.confirmed:
        return None
    dtypes = [DType(name) for name in source.confirmed]
    return {dtype.code | dtype.bits << 8: source.dtype_to(dtype) for dtype in dtypes}


def _consumer_failed(obj: Any, to: Any, cause: Any, tree: Any = None) -> DlxError:
    """Return the error for a consumer that failed in the fast path, after its exchange table had taken the memory."""
    target = registry.target(to)
    where = "" if tree is None else place_of(obj, tree)
    if isinstance(cause, DlxError):
        return cause.complete(source=str(_described(obj)), target=target.name, where=where)
    reason = exception_text(cause) if cause is not None else "without saying why"
    error = ConversionError(
        f"{target.name} refused it: {reason}", source=str(_described(obj)), target=target.name, where=where
    )
    error.__cause__ = cause
    return error
