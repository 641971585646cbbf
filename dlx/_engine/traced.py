"""What ``torch.compile`` reads in place of a call of `convert` in C, and what it leaves out of its graphs.

It traces code that is written in Python only. `type(convert).__call__` is the function here; calls themselves stay in
C. Nothing of torch is imported.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from types import CodeType
from typing import Any

from dlx._core import native
from dlx._registry.plugin import TRACING
from dlx._support.imports import when_imported

_OUTSIDE = "memory that leaves the graph, or comes from outside"
_INSTEAD = "compile without fullgraph=True, or call torch's own methods, such as x.numpy(), inside."
_NO_GRAPH = (
    "dlx.convert is traced where a torch tensor stays one: to torch, with no options but copy=True. Anything else, "
    f"another framework, device or container, is {_OUTSIDE}. Convert before or after what is compiled, {_INSTEAD}"
)
_NOT_TRACED = f"is not traced: it is about {_OUTSIDE}. Call it before or after what is compiled, {_INSTEAD}"


def _call(self: Any, *args: Any, **options: Any) -> Any:
    """Call the function; while it is traced, by what a graph can hold."""
    framework = sys.modules.get(TRACING[0])
    if framework is None or not framework.compiler.is_dynamo_compiling():
        return self(*args, **options)
    if self.__name__ == "convert":
        return _convert(framework, *args, **options)
    framework._dynamo.graph_break(msg=f"dlx.{self.__name__} {_NOT_TRACED}")
    return self(*args, **options)


def _convert(
    framework: Any, obj: Any, to: Any = None, *, like: Any = None, copy: bool | None = None, **options: Any
) -> Any:
    """Stand for `convert`: the tensor itself, or its copy, where its framework is the target and it stays in place."""
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
    """Return a function that a compiler leaves out of its graphs: it would damage state that other frameworks keep."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = f"{name} {_NOT_TRACED}"
    skip_frames(function)
    return function


def skip_frames(function: Any) -> None:
    """Let a compiler evaluate a function as Python does, and all that it calls, if it comes upon it at run time."""
    if function.__code__ not in _outside:
        _outside.add(function.__code__)
        when_imported(f"{TRACING[0]}.utils._pytree", functools.partial(_skip, function.__code__))


def _skip(code: CodeType, _: Any) -> None:
    """Have the compiler evaluate frames of a code as Python does, and all frames inside."""
    with contextlib.suppress(AttributeError, KeyError):  # a test's stand-in for torch
        dynamo = sys.modules[f"{TRACING[0]}._C"]._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))


native.set_traced(_call)
