"""Wrappers of functions, coroutine functions and generators, which `using` returns."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from dlx._core import native
from dlx._engine.executor import mark_written
from dlx._engine.seam import FAST_PATH
from dlx._engine.traced import leave_out
from dlx._registry import lookup
from dlx._registry.generic import BUFFER
from dlx._registry.plugin import TRACING
from dlx._registry.registry import registry
from dlx._support.imports import when_imported
from dlx._support.late import Late
from dlx._using.function_spec import FunctionSpec
from dlx._using.plan import build_plan
from dlx.adapter.base import Adapter

calls: Any = Late("dlx._using.call")  # loaded with the first call that C does not support
gradients: Any = Late("dlx._using.gradients")
TRIES = range(3)  # a call restarts if it loads an adapter
leave_out(build_plan, "the first call of what dlx.using returns")


def wrap_function(function: Any, spec: FunctionSpec) -> Any:
    """Wrap a function; calls run in C if its plan supports them."""
    known: tuple[Any, Any] = None, None  # generation of the registry, plan

    def calling(*args: Any, **options: Any) -> Any:
        nonlocal known
        for _ in TRIES:
            generation, plan = known
            if generation != registry.generation:
                generation = registry.generation
                plan = build_plan(spec, function)
                known = generation, plan
            if plan is None:
                break
            make_call = _call_writing if spec.writes else native.call_converted
            result = make_call(plan, args, options)
            if result is not plan:
                return result
            if generation == registry.generation:
                break
        result = gradients.call_traced(spec, function, args, options)
        if result is not NotImplemented:
            return result
        call = calls.Invocation(spec, args, options)
        with call.work.step():
            with call:
                result = function(*call.args, **call.options)
            return call.convert_result(result)

    return calling


def _call_traced(plan: tuple[Any, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Replace `native.call_converted` in a compiled graph, whose tensors need no conversion."""
    passes = (sys.modules[TRACING[0]].Tensor, bool, int, float, str, type(None))
    stays = all(isinstance(each, passes) for each in (*args, *options.values()))
    return plan[0](*args, **options) if stays and plan[6] in (None, *TRACING) else plan  # the target of the results


def _substitute(dynamo: Any) -> None:
    """Make torch.compile trace `_call_traced` instead of `native.call_converted`."""
    with contextlib.suppress(AttributeError):  # a fake torch in tests
        dynamo.substitute_in_graph(native.call_converted, skip_signature_check=True)(_call_traced)


when_imported(f"{TRACING[0]}._dynamo", _substitute)


def _call_writing(plan: tuple[Any, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function that writes with `native.call_converted`, if all arrays that it writes to are writable."""
    spec, written = plan[-1], []
    values = [value for i, value in enumerate(args) if spec.is_written(i)]
    values += [value for name, value in options.items() if spec.is_option_written(name)]
    for value in values:
        what = lookup.look(value).part
        if isinstance(what, Adapter):
            tensor = FAST_PATH._borrow(value, "dlx", True)
            if tensor is None or tensor.readonly:
                return plan
            written.append((what, value))
        elif what is not None or lookup.adapter_of(value) is BUFFER:
            return plan
    result = None
    try:
        result = native.call_converted(plan, args, options)
    finally:
        if result is not plan:
            for source, array in written:
                mark_written(source, array)
    return result


def wrap_coroutine(function: Any, spec: FunctionSpec) -> Any:
    """Wrap a coroutine function."""

    async def awaiting(*args: Any, **options: Any) -> Any:
        call = calls.Invocation(spec, args, options)
        with call:
            result = await call.work.wrap_awaitable(function(*call.args, **call.options))
        with call.work.step():
            return call.convert_result(result)

    return awaiting


def wrap_async_generator(function: Any, spec: FunctionSpec) -> Any:
    """Wrap an asynchronous generator function."""

    async def streaming(*args: Any, **options: Any) -> AsyncIterator[Any]:
        call = calls.Invocation(spec, args, options)
        with call:
            inner = function(*call.args, **call.options)
            step: Any = functools.partial(inner.asend, None)
            try:
                while True:
                    try:
                        result = await call.work.wrap_awaitable(step())
                    except StopAsyncIteration:
                        return
                    with call.work.step():
                        call.write_back()
                        made = [call.convert_result(result)]
                    try:
                        sent = yield made.pop()  # keep no reference to the result
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = functools.partial(inner.athrow, error)
                    else:
                        step = functools.partial(inner.asend, call.convert_sent(sent))
            finally:
                await call.work.wrap_awaitable(inner.aclose())

    return streaming


def wrap_generator(function: Any, spec: FunctionSpec) -> Any:
    """Wrap a generator function."""

    def yielding(*args: Any, **options: Any) -> Any:
        call = calls.Invocation(spec, args, options)
        with call:
            inner = function(*call.args, **call.options)
            step: Callable[[], Any] = functools.partial(next, inner)
            try:
                while True:
                    with call.work.step():
                        try:
                            result = step()
                        except StopIteration as stop:
                            return call.convert_result(stop.value)
                        call.write_back()
                        made = [call.convert_result(result)]
                    try:
                        sent = yield made.pop()  # keep no reference to the result
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = functools.partial(inner.throw, error)
                    else:
                        step = functools.partial(inner.send, call.convert_sent(sent))
            finally:
                with call.work.step():
                    inner.close()

    return yielding
