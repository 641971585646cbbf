"""Filling the lane's table: how an exact type reaches a target in C, read from the adapters' data."""

from __future__ import annotations

import sys
from typing import Any

from dlx import native
from dlx.abi import DType, codes_of
from dlx.adapter import OWNER_BOUNDS, Adapter, look_up
from dlx.foreign import exception_text
from dlx.registry import registry
from dlx.tensor import type_name

__all__ = ["learn"]

_EVERY_CODE = 0xFFFFFFFF


def learn(kind: type, to: Any) -> None:
    """Look for a route from an exact type to a target, and tell the lane.

    Called by the lane on its first call with this pair. Only types that an adapter lists in `Adapter.lane` have routes;
    for all others the lane remembers that Python is to be asked, until the type changes.
    """
    if not isinstance(to, str | type(sys) | type):
        return
    source = registry.knows(kind)
    target = registry.target(to)
    try:
        row = _row(kind, to, source, target)
    except MemoryError:
        raise
    except Exception as error:  # what an adapter says of its types is wrong: the Python road goes on without it
        assert source is not None
        row = None
        registry.remark(source, f"the lane from {type_name(kind)} to {to!r} is not used: {exception_text(error)}")
    if row is None:
        native.route_add(kind, to, False, (), None, (), None, (), None, (), None, (), None, None, 0)
    else:
        native.route_add(*row)


def _row(kind: type, to: Any, source: Adapter | None, target: Adapter) -> tuple[Any, ...] | None:
    """Return what the lane needs; None where Python is to be asked."""
    capabilities = target.capabilities
    if source is None or capabilities is None or not any(look_up(name) is kind for name in source.lane):
        return None
    if not (source.constant and target.constant) or type(target).check is not Adapter.check:
        return None
    # Without dtypes of its own to go by, the lane would let through what is reviewed after `load`.
    reviewed = bool(target.carried) and capabilities.dtypes is None
    load = None if target.is_own or reviewed else target.load
    if not (source.identity if source is target else target.lane_imports or load is not None):
        return None
    quick, answered = source.guard_function() or (None, frozenset())
    bounds = () if OWNER_BOUNDS in answered else source.owner_bounds
    return (
        kind,
        to,
        source is target,
        source.exchange(),
        None if target.is_own else target.classes()[0],
        target.exchange() if target.lane_imports else False,
        load,
        tuple(_guard(source, kind, guard) for guard in source.guards if guard.ask not in answered),
        quick,
        tuple(_switches(source)),
        _question(kind, source.owner, call=True) if source.owner else None,
        tuple(_question(look_up(source.owner_type), name, call=True) for name in bounds),
        _question(kind, source.dtype_attribute, call=False) if source.confirmed else None,
        _confirmed(source),
        target.lane_address(),
    )


def _question(kind: type, name: str, *, call: bool) -> tuple[Any, ...]:
    for cls in kind.__mro__:
        if name in cls.__dict__:
            return (sys.intern(name), kind, cls.__dict__[name], call)
    return (sys.intern(name), kind, None, call)


def _guard(source: Adapter, kind: type, guard: Any) -> tuple[Any, ...]:
    asked = look_up(source.owner_type) if guard.of_owner else kind
    codes = sum(1 << code for code in codes_of(guard.kinds)) if guard.kinds else _EVERY_CODE
    amend = _question(kind, guard.amend, call=True) if guard.amend else None
    return (_question(asked, guard.ask, call=guard.call), codes, guard.of_owner, amend)


def _switches(source: Adapter) -> Any:
    for module, name, value in source.switches:
        yield sys.modules[module].__dict__, sys.intern(name), value


def _confirmed(source: Adapter) -> dict[int, Any] | None:
    if not source.confirmed:
        return None
    dtypes = [DType(name) for name in source.confirmed]
    return {dtype.code | dtype.bits << 8: source.dtype_to(dtype) for dtype in dtypes}
