"""`using`, the decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from dlx._api import convert as convert  # the Python function of FAST_PATH
from dlx._core.public import public
from dlx._engine.request import Request, check_flags, request_of
from dlx._engine.traced import leave_out
from dlx._registry.plugin import TRACING
from dlx._support.late import Late
from dlx._support.reflect import safe_repr
from dlx._using.function_spec import FunctionSpec
from dlx._using.wrappers import wrap_async_generator, wrap_coroutine, wrap_function, wrap_generator

if TYPE_CHECKING:
    from dlx._using import gradients
    from dlx.typing import DeviceLike, Readonly, Target
else:
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
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to compute in one framework and return arrays of its caller's framework.

    Arrays among the arguments, and in containers there, are converted to `to`; arrays in the result are converted to
    the framework, and the device, of the caller's arrays.

    Parameters
    ----------
    to
        The framework of the function, as in `convert`.
    lazy
        Whether a container that the function made comes back as a lazy view. Containers of its caller's in there are
        views then, too; arrays of its caller's are the caller's own all the same.
    returns
        The framework of the results, as in `convert`. None: the caller's, see Notes.
    writes
        Names of parameters whose arrays the function writes to in place; read-only ones are refused. Of a function
        without a signature, as many built-in ones are, names of keywords, and numbers of positional arguments.
    detach
        Whether the function may lose the gradients of its arguments. None: an argument whose framework records what
        becomes of it is refused; where it does not (under ``torch.no_grad()``) nothing is lost.
    device, readonly
        As in `convert`, for the way in.
    stream
        As in `convert`, for the way in; the function works on it, too. None: on its caller's, see Notes.
    grad
        Whether gradients are computed: the caller's framework differentiates the function, by derivatives that the
        function's framework computes. Where an argument is recorded, results are new arrays, also those that are
        arguments.
    result_like
        With `grad`, for callers that compile (``jax.jit``) and functions that cannot be tried without data: a tree with
        the shapes and dtypes of the results, of arrays or ``jax.ShapeDtypeStruct``, or a function of the arguments
        that gives one.

    Returns
    -------
    decorator
        For functions, coroutine functions, generators and asynchronous generators. Name, signature and documentation
        stay.

    Raises
    ------
    TypeError
        If `writes` names no parameter, `to` is no framework, as where the
        decorator is written without parentheses, or `grad` is combined with what it excludes: `lazy`, `returns`,
        `writes`, `device`, `stream`, ``detach=True``, coroutines and generators.
    ConversionError
        By the function, if its framework, or its caller's, has no gradients for others.
    ReadOnlyError
        By the function: before it runs, if an array in `writes` is read-only; after that, if it wrote to an array that
        had to be copied, and that cannot be written back.
    DlxError
        By the function, as `convert`; paths begin with the parameter's name.

    Notes
    -----
    *The framework of the results* does not depend on the order of arguments. Arrays that are in `to` already do not
    count where there are others. If the rest are of one framework, it is that one, on their device if they have one in
    common.
    If they are of several, or of none that can take arrays, results stay as the function made them.

    *An argument that is returned*, also inside a container, comes back as the caller's own object, unless `returns`
    names another framework than its own.

    *Writes in place* reach the caller's array where its memory is shared. An array that had to be copied is passed to
    numpy read-only; of torch, the tensor's version is looked at afterwards, and the tensor is written back if it was
    changed. Writes that torch does not count (through ``x.data`` or ``x.numpy()``), and those of every other framework,
    are not seen: name the parameter in `writes`, which is always written back. Where two arguments share memory, one
    of them was copied and both were written to, nothing is written back: ReadOnlyError says so. A copy is written back
    whole: what its caller writes to the array meanwhile, while a generator or coroutine waits, is lost.

    Containers are passed as new ones, so what is put into a list stays there. Defaults of the function are its own, and
    a first parameter called ``self`` or ``cls`` is passed as it is, and comes back so. Models, data loaders and other
    objects that hold arrays are refused, unless they belong to the function's own framework: those are passed as they
    are.

    *On CUDA devices* the function's framework works on the current stream of its caller's framework, device by device,
    so that nothing has to be ordered; around each step of a coroutine or generator, never while that waits. It stays on
    its own where it has arrays among the arguments itself, where callers work on several streams of a device, and where
    it cannot be set (jax); then arrays are ordered in and out. Whatever else the function reads on a device, a global
    array say, must be ready on the caller's stream.

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
        return checked._replace(later=False)  # a function needs its data

    names = frozenset((writes,) if isinstance(writes, str | int) else writes)
    if result_like is not None and not grad:
        raise TypeError("using: result_like= is for grad=True")
    if grad:
        excluded = {
            "lazy": lazy,
            "returns": returns,
            "writes": names,
            "detach": detach,
            "device": device is not None,
            "stream": stream is not None,
        }
        if said := [name for name, value in excluded.items() if value]:
            raise TypeError(f"using: grad=True does not go with {said[0]}=")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, staticmethod | classmethod):
            return cast("Callable[P, R]", type(function)(decorate(function.__func__)))
        spec = FunctionSpec(function, to, request, returns, names, lazy=lazy, detach=detach, result_like=result_like)
        wrapper = functools.wraps(function)(_differentiable(function, spec) if grad else _wrapper(function, spec))
        if grad or getattr(to, "__name__", to) not in TRACING:
            leave_out(wrapper, "what dlx.using returns")
        else:
            wrapper.__code__ = wrapper.__code__.replace()  # type: ignore[attr-defined]  # others' is not traced
        return cast("Callable[P, R]", wrapper)

    return decorate


def _differentiable(function: Any, spec: FunctionSpec) -> Any:
    """Return a function with derivatives for the caller's framework, where the caller wants any."""
    several = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(is_one(function) for is_one in several):
        raise TypeError("using: grad=True is for functions that return once, not for coroutines and generators")
    plain, compiled = _wrapper(function, spec), gradients.CompiledCalls(spec, function)

    def calling(*args: Any, **options: Any) -> Any:
        result = compiled(args, options)
        if result is NotImplemented:
            result = gradients.call_recorded(spec, function, args, options)
        return plain(*args, **options) if result is NotImplemented else result

    return calling


def _wrapper(function: Any, spec: FunctionSpec) -> Any:
    """Return a function of the same kind."""
    if inspect.iscoroutinefunction(function):
        return wrap_coroutine(function, spec)
    if inspect.isasyncgenfunction(function):
        return wrap_async_generator(function, spec)
    return (wrap_generator if inspect.isgeneratorfunction(function) else wrap_function)(function, spec)
