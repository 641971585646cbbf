"""Plans for `native.call_converted`, which converts arguments, calls a function and converts its result in C.

It supports arguments whose memory is shared. Calls that need more (a copy of an argument, a device, an unusual
container) go to `Invocation` before anything is converted; results that need more go to `Outputs`.
"""

from __future__ import annotations

import functools
from typing import Any

from dlx._engine.fast_path import flatten_once, source_of
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._registry import lookup
from dlx._registry.built_in import HANDLERS
from dlx._registry.registry import registry
from dlx._support.late import Late
from dlx._support.reflect import is_key
from dlx._using.function_spec import FunctionSpec, fast_path_name, find_wrapper
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import DlxError
from dlx.typing import READONLY

identities: Any = Late("dlx._using.identity")  # both are loaded with the first result that C does not convert
outputs: Any = Late("dlx._using.outputs")
MAX_KNOWN = 64  # types cached for one function


def build_plan(spec: FunctionSpec, function: Any) -> tuple[Any, ...] | None:
    """Return the plan of a function for c_src/call/arguments.c; None if it always needs `Invocation`."""
    try:
        request = spec.request()
        results = None if spec.returns is None else fast_path_name(registry.target(spec.returns))
    except DlxError:  # raised again by the call
        return None
    is_plain = request.device is None and request.stream is None and not (spec.lazy and spec.passes)
    if not is_plain or results is NotImplemented:
        return None
    wrapper = find_wrapper(request.target)
    kinds, views = _Kinds(spec, request), outputs.Views(spec, request) if spec.lazy else None
    return (
        function,
        FAST_PATH,
        spec.to,
        kinds.known,
        kinds.learn,
        spec.skipped,
        results,
        READONLY.index(request.readonly),
        request.detach,
        None if views is None else views.makers,
        None if views is None else views.create_maker,
        None if wrapper is None else wrapper.identity,
        functools.partial(_convert_result, spec, request),
        functools.partial(_locate, spec),
        spec,
    )


class _Kinds:
    """A cache of how a function's arguments and results are treated, by type."""

    def __init__(self, spec: FunctionSpec, request: Request) -> None:
        self._spec, self._target, self._generation = spec, request.target, registry.generation
        self.known: dict[type, tuple[Any, Any]] = {}

    def learn(self, kind: type) -> Any:
        """Return the kind of a type, and cache it with its source, unless the lookup loaded an adapter."""
        source = None
        try:
            source = source_of(kind) if is_key(kind) else None  # first, so that the next call detects a change
            found = self._find(kind, source)
        except (DlxError, MemoryError):
            raise
        except Exception:  # a class whose attributes raise
            found = False
        if registry.generation != self._generation:
            return False
        if source is not None:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[kind] = found, source
        return found

    def _find(self, kind: type, source: Any) -> Any:
        found = lookup.kind(kind)
        what = found.part
        if isinstance(what, Adapter):
            return self._find_array_kind(kind, what)
        if found.verdict == "passthrough":
            return None
        if found.refusal is not None:  # ...: pass it unchanged, such as a model of the function's framework
            return ... if self._target.adapter.package in found.refusal.frameworks else False
        if isinstance(what, Container) and what.holds == self._target.name and what.falls_to is not None:
            once = functools.partial(flatten_once, what.flatten, what.identity)
            flatten = what.flatten if what.identity is None else once
            return flatten, HANDLERS[what.falls_to].unflatten, True, True
        if source is not None and source.what == "rule":
            return source.adapter.flatten, source.adapter.unflatten, source.adapter.mutable
        return {"passes": None, "looks": ...}.get(source and source.what, False)

    def _find_array_kind(self, kind: type, adapter: Adapter) -> Any:
        is_inside = adapter is self._target.source
        if is_inside and self._target.kind not in (None, kind):
            return False
        target = None if is_inside else registry.ready(adapter)
        is_tracked = None
        if adapter.gradients is not None and self._spec.detach is None and (is_inside or not _is_guarded(adapter)):
            is_tracked = adapter.gradients.is_tracked
        is_committed = None if adapter.placement is None else adapter.placement.is_committed
        return adapter, is_inside, None if target is None else fast_path_name(target), is_tracked, is_committed


def _is_guarded(source: Adapter) -> bool:
    """Return whether the fast path never exports a recorded array, due to a guard or a different type."""
    guards = source.fast_path.guards if source.fast_path is not None else ()
    by_type = source.gradients is not None and source.gradients.by_type
    return by_type or any(each.blocker is not None and each.blocker.needs == "detach" for each in guards)


def _convert_result(spec: FunctionSpec, request: Request, args: tuple[Any, ...], pairs: list[Any], result: Any) -> Any:
    """Convert a result that C does not support; `pairs`: (passed, caller's object, whether it is a container)."""
    identity, seen = identities.Identity(args[: spec.skipped], request.target), []
    for passed, own, is_container in pairs:
        what = lookup.look(own).part
        if is_container and isinstance(what, Container):  # otherwise its class has changed
            identity.add_container(passed, own, *what.flatten(own))
        else:
            identity.add(passed, own)
            if isinstance(what, Adapter):
                seen.append((what, own, True))
    return outputs.Outputs(spec, request, identity, outputs.Caller.of(spec, request.target, seen)).convert(result)


def _locate(spec: FunctionSpec, error: Exception, is_result: bool) -> None:
    """Make the path of an error begin at a parameter, or at the result."""
    if isinstance(error, DlxError) and error.path:
        error.root, error.path = ("result", error.path[1:]) if is_result else spec.locate(error.path)
