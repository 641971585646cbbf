"""Fill the routes of the C fast path: what it needs to convert an exact type to a target, read from adapters' data."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dlx._core import native
from dlx._core.foreign import exception_text
from dlx._core.tensor import type_name
from dlx._core.types import DType, codes_of
from dlx._engine.batch import place_of
from dlx._engine.request import _described
from dlx._registry.registry import registry
from dlx.adapter.base import OWNER_BOUNDS, Adapter, look_up
from dlx.errors import ConversionError, DlxError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Guard", "Question", "Route", "Switch", "learn"]


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


class Switch(NamedTuple):
    """A value in a dict that must be this very object: a switch of the framework that is off."""

    dict: dict[str, Any]
    name: str
    value: object


@dataclass(frozen=True, slots=True)
class Route:
    """What the fast path needs to convert an exact type to a target; C reads the fields by name."""

    is_same: bool = False
    """The object itself is the result."""
    exports: object = None
    """The exchange table of the type, a capsule; None for the one that the type carries."""
    target: type | None = None
    """The type of the target's arrays; None for dlx.Tensor."""
    imports: object = None
    """The exchange table of the target, a capsule; None for the one that `target` carries, False for none."""
    load: Callable[[Any], Any] | None = None
    """Makes the target's array of a dlx.Tensor, where no table of the target is used."""
    guards: tuple[Guard, ...] = ()
    quick: object = None
    """A capsule of the C function that answers further guards."""
    switches: tuple[Switch, ...] = ()
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
    accepts: int = 0
    """The address of the target's dlx_capabilities."""


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
        route = _route(kind, source, target)
    except MemoryError:
        raise
    except Exception as error:  # an adapter's declarations are wrong: conversions take the Python path
        assert source is not None
        route = None
        registry.remark(source, f"the fast path from {type_name(kind)} to {to!r} is not used: {exception_text(error)}")
    native.route_add(kind, to, route)


def _route(kind: type, source: Adapter | None, target: Adapter) -> Route | None:
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
    start, nbytes = (
        (_question(look_up(source.owner_type), name, call=True) for name in bounds) if bounds else (None, None)
    )
    return Route(
        is_same=source is target,
        exports=source.exchange(),
        target=None if target.is_own else target.classes()[0],
        imports=target.exchange() if target.fast_path_imports else False,
        load=load,
        guards=tuple(_guard(source, kind, guard) for guard in source.guards if guard.ask not in answered),
        quick=quick,
        switches=tuple(
            Switch(sys.modules[module].__dict__, sys.intern(name), value) for module, name, value in source.switches
        ),
        owner=_question(kind, source.owner, call=True) if source.owner else None,
        start=start,
        nbytes=nbytes,
        dtype=_question(kind, source.dtype_attribute, call=False) if source.confirmed else None,
        confirmed=_confirmed(source),
        accepts=target.fast_path_capabilities_address(),
    )


def _question(kind: type, name: str, *, call: bool) -> Question:
    descriptor = next((cls.__dict__[name] for cls in kind.__mro__ if name in cls.__dict__), None)
    return Question(sys.intern(name), kind, descriptor, call)


def _guard(source: Adapter, kind: type, guard: Any) -> Guard:
    asked = look_up(source.owner_type) if guard.of_owner else kind
    codes = sum(1 << code for code in codes_of(guard.kinds))
    resolve = _question(kind, guard.resolve, call=True) if guard.resolve else None
    return Guard(_question(asked, guard.ask, call=guard.call), codes, guard.of_owner, resolve)


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
