"""`using`, the decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

from dlx._api import convert as convert  # the Python function of FAST_PATH
from dlx._core.public import public
from dlx._engine.request import Request, check_flags, request_of
from dlx._engine.traced import leave_out, make_opaque
from dlx._registry.plugin import TRACING
from dlx._support.late import Late
from dlx._support.reflect import safe_repr
from dlx._using.function_spec import FunctionSpec
from dlx._using.wrappers import wrap_async_generator, wrap_coroutine, wrap_function, wrap_generator

if TYPE_CHECKING:
    from dlx._using import compiled, gradients
    from dlx.typing import DeviceLike, Readonly, Target
else:
    compiled = Late("dlx._using.compiled")
    gradients = Late("dlx._using.gradients")

P = ParamSpec("P")
R = TypeVar("R")


@public
def using(
    to: Target,
    *,
    lazy: bool = False,
    returns: Target | None = None,
    writes: str | int | Iterable[str | int] = (),
    detach: bool | None = None,
    device: DeviceLike | None = None,
    readonly: Readonly = "copy",
    stream: Any = None,
    grad: bool = False,
    result_like: Any = None,
    errors: Literal["raise", "pass"] = "raise",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to compute in one framework and return arrays of its caller's framework.

    Arrays among the arguments, and in containers there, are converted to `to`; arrays in the result are converted to
    the framework, and the device, of the caller's arrays.

    Parameters
    ----------
    to
        The framework of the function, as in `convert`.
    lazy
        Whether a container that the function creates is returned as a lazy view. The caller's containers in it become
        views, too; the caller's arrays are returned unchanged.
    returns
        The framework of the results, as in `convert`. None: the caller's, see Notes.
    writes
        Names of parameters whose arrays the function writes to in place; read-only arrays raise an error. For a
        function without a signature, as many built-in ones: names of keywords, and numbers of positional arguments.
    detach
        Whether the function may lose the gradients of its arguments. None: an argument that its framework records for
        differentiation raises an error; ``torch.no_grad()`` disables recording.
    device, readonly
        As in `convert`, for the arguments.
    stream
        As in `convert`, for the arguments; the function also works on it. None: the caller's stream, see Notes.
    grad
        Whether the caller's framework differentiates the function, with derivatives that the function's framework
        computes. If an argument is recorded, results are new arrays, even a returned argument.
    result_like
        For callers that compile or transform (``jax.jit``, ``torch.compile``), if the function cannot be tried without
        data, as functions of numpy: a tree with the shapes and dtypes of the results (arrays or
        ``jax.ShapeDtypeStruct``), or a function of the arguments that returns one.
    errors
        ``"pass"``: arguments, and objects and columns in containers there, that cannot be converted (text, dates,
        objects) are passed unchanged, and such results returned unchanged, as in `convert`. ``"raise"``: they raise an
        error.

    Returns
    -------
    decorator
        For functions, coroutine functions, generators and asynchronous generators. Name, signature and documentation
        are kept.

    Raises
    ------
    TypeError
        If `writes` names a missing parameter, `to` is not a framework (for example, because the decorator is used
        without parentheses), or `grad` is combined with `lazy`, `returns`, `writes`, `device`, `stream`,
        ``detach=True``, ``errors="pass"``, a coroutine or a generator.
    ConversionError
        By the function, if its framework or its caller's does not support gradients for other frameworks.
    ReadOnlyError
        By the function: before it runs, if an array in `writes` is read-only; afterwards, if it wrote to a copy that
        cannot be written back.
    DlxError
        By the function, as `convert`; paths begin with the parameter's name.

    Notes
    -----
    *The framework of the results* does not depend on the order of arguments. It is the framework of the arguments that
    are not in `to` already, on their device if they share one; if all are in `to`, it is `to`. If these arguments have
    several frameworks, or a framework that cannot import arrays, results are returned unchanged.

    *A returned argument*, even inside a container, is the caller's own array or container, unless `returns` names a
    framework other than its own. For a wrapper such as xarray's DataArray, it is the array inside.

    *Writes in place* reach the caller's array if its memory is shared. An array that must be copied is passed to numpy
    read-only; for torch, dlx compares the tensor's version after the call, and writes a changed tensor back, or raises
    ReadOnlyError for a sparse one. dlx does not detect writes that torch does not count (through ``x.data`` or
    ``x.numpy()``), or writes of any other framework: name the parameter in `writes`, and it is always written back. If
    two arguments share memory, one of them was copied and both were written to, dlx raises ReadOnlyError and writes
    nothing back. A copy is written back as a whole: what the caller writes to the array while a generator or coroutine
    waits is lost.

    The function gets new containers, so changes to a list do not reach the caller. Defaults are not converted, and a
    first parameter called ``self`` or ``cls`` is passed and returned unchanged. Models, data loaders and other objects
    with arrays raise an error, unless they belong to the function's framework; then they are passed unchanged.

    *On CUDA devices* the function's framework works on the current stream of its caller's framework on each device, so
    no stream has to wait; in a coroutine or generator, only while its code runs. It keeps its own stream if some
    arguments are its own arrays, if the callers use several streams of a device, or if its stream cannot be set (jax);
    then arrays are ordered in and out. Other arrays that the function reads on a device, such as global ones, must be
    ready on the caller's stream.

    Examples
    --------
    >>> import dlx
    >>> @dlx.using("dlx")
    ... def first(block):
    ...     return type(block).__name__, block
    >>> block = bytearray(2)
    >>> first(dlx.convert(block, to="dlx"))[0]
    'Tensor'
    """
    if not isinstance(to, str | ModuleType | type):
        raise TypeError(f'using takes a framework, as in @dlx.using("torch"), found {safe_repr(to)}')
    check_flags(lazy=lazy, grad=grad, detach=detach is not None and detach)

    def request() -> Request:
        checked = request_of(to, None, device, None, readonly, detach is not False, stream)
        return checked._replace(later=False)  # a function needs its data immediately

    if errors not in ("raise", "pass"):
        raise ValueError(f"errors must be 'raise' or 'pass', found {safe_repr(errors)}")
    names = frozenset((writes,) if isinstance(writes, str | int) else writes)
    if grad:
        more = {"device": device is not None, "stream": stream is not None, "errors": errors == "pass"}
        _check_combined(lazy=lazy, returns=returns, writes=names, detach=detach, **more)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, staticmethod | classmethod):
            return cast("Callable[P, R]", type(function)(decorate(function.__func__)))
        more = {"detach": detach, "result_like": result_like, "passes": errors == "pass"}
        spec = FunctionSpec(function, to, request, returns, names, lazy=lazy, **more)
        is_opaque = grad or (result_like is not None and not _returns_often(function))
        wrapper = functools.wraps(function)(_differentiable(function, spec) if grad else _wrapper(function, spec))
        return cast("Callable[P, R]", _set_tracing(wrapper, to, is_opaque))

    return decorate


def _check_combined(**options: Any) -> None:
    """Refuse options that ``grad=True`` excludes."""
    if used := [name for name, value in options.items() if value]:
        raise TypeError(f"using: grad=True cannot be combined with {used[0]}=")


def _set_tracing(wrapper: Any, to: Any, is_opaque: bool) -> Any:
    """Have ``torch.compile`` call a decorated function, leave it out of its graph, or trace it; return it."""
    if is_opaque:
        return make_opaque(wrapper)
    if getattr(to, "__name__", to) not in TRACING:
        return leave_out(wrapper, "what dlx.using returns")
    wrapper.__code__ = wrapper.__code__.replace()  # the shared one is skipped
    return wrapper


def _differentiable(function: Any, spec: FunctionSpec) -> Any:
    """Wrap a function so that the caller's framework can differentiate it."""
    if _returns_often(function):
        raise TypeError("using: grad=True is for functions that return once, not for coroutines and generators")
    wrapped, calls = _wrapper(function, spec), compiled.CompiledCalls(spec, function)

    def calling(*args: Any, **options: Any) -> Any:
        result = calls(args, options)
        if result is NotImplemented:
            result = gradients.call_recorded(spec, function, args, options)
        return wrapped(*args, **options) if result is NotImplemented else result

    return calling


def _returns_often(function: Any) -> bool:
    """Return whether a function is a coroutine function or a generator."""
    several = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return any(is_one(function) for is_one in several)


def _wrapper(function: Any, spec: FunctionSpec) -> Any:
    """Wrap a function in a function of the same kind."""
    if inspect.iscoroutinefunction(function):
        return wrap_coroutine(function, spec)
    if inspect.isasyncgenfunction(function):
        return wrap_async_generator(function, spec)
    return (wrap_generator if inspect.isgeneratorfunction(function) else wrap_function)(function, spec)
