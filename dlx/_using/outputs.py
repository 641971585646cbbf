"""`Outputs`: converts the result of a call for its caller."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from dlx._core.types import HOST, Device
from dlx._engine.batch import Batch
from dlx._engine.compound import Compounds
from dlx._engine.failures import Failures
from dlx._engine.planner import is_inside
from dlx._engine.request import Request
from dlx._engine.sources import device_of
from dlx._registry import lookup
from dlx._registry.compound import compounds_of
from dlx._registry.lookup import TUPLE
from dlx._registry.registry import registry
from dlx._registry.target import Target, is_committed
from dlx._support.reflect import type_name
from dlx._support.tracebacks import REFUSALS, name_action, shorten
from dlx._using.function_spec import FunctionSpec, Place, fast_path_name, is_tracked
from dlx._using.identity import CallTree, Identity
from dlx._views.factory import lazy_view, view_maker
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import ConversionError, path_text


class Caller(NamedTuple):
    """The framework and device of results, and whether they are committed to the device."""

    target: Target
    device: Device | None
    committed: bool

    @classmethod
    def of(cls, spec: FunctionSpec, inside: Target, seen: Sequence[tuple[Adapter, Any, bool]]) -> Caller | None:
        """Determine the framework and device of results; None if they are not converted.

        `seen` is `Inputs.seen`. A framework of sparse arrays counts as one with the framework of their dense parts.
        """
        if spec.returns is not None:
            return cls(registry.target(spec.returns), None, True)
        others = {id(source): source for source, array, _ in seen if not is_inside(array, source, inside)}
        found = sorted(others.values(), key=lambda source: not any(compounds_of(source)))
        if not found:
            return None
        adapter, *rest = found
        if (rest and not any(compounds_of(adapter))) or any(each.package != adapter.dtypes.package for each in rest):
            return None
        target = registry.ready(adapter)
        if target is None:
            return None
        arrays = [(array, on_host) for source, array, on_host in seen if id(source) in others]
        held_there = [pair for pair in arrays if is_committed(adapter, pair[0])]
        devices = {HOST if on_host else device_of(adapter, array) for array, on_host in held_there or arrays}
        devices.discard(None)
        held, device = target.capabilities.device_types, devices.pop() if len(devices) == 1 else None
        # Results go to the device of the caller's arrays, unless the framework cannot import arrays there.
        device = device if device is None or held is None or device.type in held else None
        return cls(target, device, bool(held_there))


def target_name(request: Request) -> str | None:
    """Return the target's name if the fast path can convert results to it, or None."""
    if request.device is not None and (request.device != HOST or request.target.adapter.placement is not None):
        return None
    name = fast_path_name(request.target)
    return None if name is NotImplemented else name


class Views:
    """Creates lazy views of the containers that one function returns."""

    def __init__(self, spec: FunctionSpec, inside: Request) -> None:
        self._device, self._inside = HOST if spec.returns is None else None, inside
        self.makers: dict[str, Any] = {}  # target -> `ViewMaker.view`, for committed elements

    def create_maker(self, to: str, flags: int, committed: bool) -> Any:
        """Return the function that creates views for a target; `flags` are the options of the fast path."""
        inside, target = self._inside, registry.target(to)
        request = Request(target, self._device, None, inside.readonly, inside.detach, committed=bool(committed))
        view = view_maker(request, target_name(request), flags).view
        if committed:
            self.makers[to] = view
        return view


class Outputs:
    """Converts the result of one call; `inside` has the options for the arguments."""

    def __init__(self, spec: FunctionSpec, inside: Request, identity: Identity, caller: Caller | None) -> None:
        self._spec, self._inside, self._identity, self._caller = spec, inside, identity, caller
        self._named = None if caller is None or spec.returns is None else caller.target  # converts arguments, too

    def convert(self, value: Any) -> Any:
        """Convert a result for the caller."""
        what = lookup.look(value).part
        if self._caller is None and (what is None or self._identity.is_trivial()):
            return value
        if what is None and lookup.kind(type(value)).refusal is None:
            return value
        request = None
        if self._caller is not None:
            detach = self._inside.detach and (self._identity.recorded is None or not self._spec.lazy)
            target, device, committed = self._caller
            request = Request(target, device, None, self._inside.readonly, detach, committed=committed)
            if self._spec.lazy and isinstance(what, Container) and not self._is_own(value, what):
                return self._view(value, request)
        try:
            if isinstance(what, Container):
                return self._convert(value, what, request)
            return self._convert((value,), TUPLE, request, wrapped=True)[0]
        except REFUSALS as error:
            name_action(error, "convert", ("detach", "readonly"))
            shorten(error, own=False)
            raise

    def _is_own(self, value: Any, handler: Container) -> bool:
        """Return whether a container and everything in it are the caller's objects."""
        identity = self._identity
        if identity.find_passed(value) is not None or not identity.has_container(value):
            return identity.find_passed(value) is not None
        return identity.is_own(self._convert(value, handler, None), value)

    def _view(self, value: Any, request: Request) -> Any:
        """Return a lazy view of a container in which the caller's arrays appear unchanged."""
        identity = self._identity
        known = [(new, identity.own(new)) for new, _ in identity.pairs() if identity.stays(new, self._named)]
        owned = identity.weak_owners(known)
        errors = "pass" if self._spec.passes else "raise"
        return lazy_view(value, request, None, strict=False, errors=errors, known=known, owned=owned)

    def _convert(self, value: Any, handler: Container, request: Request | None, *, wrapped: bool = False) -> Any:
        """Convert a container, or an array wrapped in one; without a request, only restore the caller's arrays."""
        identity, target = self._identity, self._inside.target if request is None else request.target
        locate = lambda path: ("result", path[1:] if wrapped else path)  # noqa: E731
        failures = Failures(target.name, passes=self._spec.passes, locate=locate)
        package, strict = self._inside.target.adapter.package, None if request is None else False
        compounds = None if request is None else Compounds(request)
        whole = identity.whole(self._named)
        tree = CallTree(value, handler, failures, package, whole, strict=strict, compounds=compounds)
        results = [identity.own(array) for array in tree.arrays]
        has_own = any(identity.has_container(container) for container, *_ in tree.containers())
        has_own = has_own or any(own is not array for own, array in zip(results, tree.arrays, strict=True))
        if not has_own and (request is None or not results):
            return value
        if request is not None:
            rest = [i for i, array in enumerate(tree.arrays) if not identity.stays(array, self._named)]
            for i, new in zip(rest, self._batch(tree, results, rest, request).run(), strict=True):
                results[i] = new
        return tree.rebuild(results, target.name, functools.partial(identity.own_container, self._named))

    def _batch(self, tree: CallTree, results: list[Any], rest: list[int], request: Request) -> Batch:
        """Return the batch that converts some arrays of a result; lost gradients are added to the failures."""
        some = [results[i] for i in rest]
        sources = [
            source
            if array is not tree.arrays[i] and isinstance(source := lookup.look(array).part, Adapter)
            else tree.sources[i]
            for i, array in zip(rest, some, strict=True)
        ]
        if self._identity.recorded is not None:
            for i, array, source in zip(rest, some, sources, strict=True):
                if is_tracked(source, array) and not is_inside(array, source, request.target):
                    tree.failures.add(_gradient_error(source, array, self._identity.recorded), tree.path(i))
        return Batch(request, some, sources, lambda n: tree.path(rest[n]), tree.failures, target_name(request))


def _gradient_error(source: Adapter, array: Any, at: Place) -> ConversionError:
    """Return the error for a recorded result of a recorded argument that would leave its framework."""
    root, path = at
    what = path_text(path, root or "the sent value")
    return ConversionError(
        f"{source.name} records {what} for differentiation, and this result would lose its gradients",
        source=type_name(type(array)),
        fix="Use dlx.using(..., detach=True) to drop them, detach the result, or pass arrays of one framework.",
    )
