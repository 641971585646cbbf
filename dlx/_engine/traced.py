"""Support for ``torch.compile``: a Python version of calls that it can trace, and functions that it must not trace.

`type(convert).__call__` is the function here, since torch traces Python code only; calls themselves stay in C. Nothing
imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from types import CodeType
from typing import Any

from dlx._core import native
from dlx._registry.plugin import TRACING
from dlx._support.imports import when_imported
from dlx._support.late import load_name

_INSTEAD = "compile without fullgraph=True, or call torch's own methods, such as x.numpy(), inside."
_NO_GRAPH = (
    "cannot trace dlx.convert: torch.compile supports it only from torch to torch, with no option but copy=True. "
    f"Convert before or after the compiled function, {_INSTEAD}"
)
_NOT_TRACED = f"it uses memory outside of the graph. Call it before or after the compiled function, {_INSTEAD}"


def _call(self: Any, *args: Any, **options: Any) -> Any:
    """Call self as a function."""
    framework = sys.modules.get(TRACING[0])
    if framework is None or not framework.compiler.is_dynamo_compiling():
        return self(*args, **options)
    if self.__name__ == "convert":
        return _convert(framework, *args, **options)
    framework._dynamo.graph_break(msg=f"cannot trace dlx.{self.__name__}: {_NOT_TRACED}")
    return self(*args, **options)


# IPython shows the signature and the docstring of `__call__` next to the function's own, unless the signature cannot be
# read and the docstring is that of every function's `__call__`.
_call.__signature__ = False  # type: ignore[attr-defined]


def _convert(
    framework: Any, obj: Any, to: Any = None, *, like: Any = None, copy: bool | None = None, **options: Any
) -> Any:
    """Trace `convert` of a torch tensor to torch on its device: return the tensor, or a copy."""
    kind = framework.Tensor
    if isinstance(like, kind):
        fits = to is None and isinstance(obj, kind) and obj.device == like.device
    else:
        fits = like is None and (to in TRACING if isinstance(to, str) else to is framework or to is kind)
    if not fits or options or not isinstance(obj, kind) or not (copy is None or copy is True or copy is False):
        framework._dynamo.graph_break(msg=_NO_GRAPH)
    return obj.clone() if copy else obj


_outside: set[CodeType] = set()


def leave_out(function: Any, name: str) -> Any:
    """Keep a function out of the compiler's graphs, which would damage state of other frameworks."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = f"cannot trace {name}: {_NOT_TRACED}"
    skip_frames(function)
    return function


_opaque: weakref.WeakSet[Any] = weakref.WeakSet()


def make_opaque(function: Any) -> Any:
    """Have the compiler call a function instead of tracing it: with tensors without data, and later in its graph."""
    skip_frames(function)
    _opaque.add(function)
    when_imported(f"{TRACING[0]}._dynamo", _mark)
    return function


def _mark(dynamo: Any) -> None:
    with contextlib.suppress(AttributeError):  # a fake torch of a test
        rules = dynamo.trace_rules
        for numbers in (rules._allowed_callable_ids, rules._nonstrict_trace_callable_ids):
            for function in [*_opaque]:
                if id(function) not in numbers():
                    numbers.add(id(function))
                    weakref.finalize(function, numbers.remove, id(function)).atexit = False


def settle(values: Any) -> Any:
    """Replace the symbolic numbers of a graph in containers by their values; the graph then serves only these."""
    framework = sys.modules[TRACING[0]]
    symbols = framework.SymInt, framework.SymFloat, framework.SymBool
    return framework.utils._pytree.tree_map_only(symbols, lambda each: each.node.pytype(each), values)


def skip_frames(function: Any) -> None:
    """Have the compiler run a function, and all functions that it calls, as ordinary Python."""
    if function.__code__ not in _outside:
        _outside.add(function.__code__)
        when_imported(f"{TRACING[0]}.utils._pytree", functools.partial(_skip, function.__code__))


def _skip(code: CodeType, _: Any) -> None:
    """Have the compiler run frames of a code object, and all frames inside, as ordinary Python."""
    with contextlib.suppress(AttributeError, KeyError):  # a fake torch of a test
        dynamo = sys.modules[f"{TRACING[0]}._C"]._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))


native.set_traced(_call)
leave_out(load_name, "the first use of a part of dlx")
