"""`FunctionSpec`: the options and parameters of a decorated function; and helpers about frameworks."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from dlx._registry.generic import BUFFER
from dlx._registry.lookup import adapter_of
from dlx._registry.registry import registry
from dlx._registry.target import Target
from dlx.adapter.base import Adapter, Container

if TYPE_CHECKING:
    from dlx._engine.tree import Tree

Place = tuple[str, tuple[Any, ...]]
"""The place of an array: a parameter's name and the path from it, as in `DlxError.root` and `DlxError.path`."""


_ANY = (("args", inspect.Parameter.VAR_POSITIONAL), ("options", inspect.Parameter.VAR_KEYWORD))


class FunctionSpec:
    """The options and the parameters of a decorated function."""

    def __init__(
        self,
        function: Any,
        to: Any,
        request: Any,
        returns: Any,
        writes: frozenset[str | int],
        *,
        lazy: bool,
        detach: bool | None = None,
        result_like: Any = None,
        passes: bool = False,
    ) -> None:
        self.to = sys.intern(to) if type(to) is str else to  # the fast path compares by identity
        self.request, self.returns, self.lazy = request, returns, lazy
        self.detach, self.result_like, self.passes = detach, result_like, passes
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # a built-in function without a signature
            parameters = [inspect.Parameter(name, kind) for name, kind in _ANY]
        known = {p.name for p in parameters}
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = [p.name for p in positional]
        rest, options = (
            next((p.name for p in parameters if p.kind is kind), None)
            for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        )
        self.rest, self.options = rest or "args", options
        self.by_name = known - {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}
        numbers = sys.maxsize if rest else len(positional)
        missing = [
            str(each)
            for each in writes
            if not (options or each in known if isinstance(each, str) else each in range(numbers))
        ]
        if missing:
            name = getattr(function, "__name__", function)
            raise TypeError(f"{name} has no parameter {', '.join(sorted(missing))} (writes=)")
        self.skipped = 1 if self.names[:1] in (["self"], ["cls"]) else 0
        self.writes = writes

    def locate_argument(self, i: int) -> Place:
        """Return the parameter of a positional argument, and the argument's path in it."""
        return (self.names[i], ()) if i < len(self.names) else (self.rest, (i - len(self.names),))

    def locate(self, path: tuple[Any, ...]) -> Place:
        """Convert a path in (args, options) to a parameter and a path from it."""
        kind, key, *inside = path
        root, first = (str(key), ()) if kind else self.locate_argument(key + self.skipped)
        return root, (*first, *inside)

    def is_written(self, i: int) -> bool:
        """Return whether the function is declared to write to a positional argument."""
        return i in self.writes or self.locate_argument(i)[0] in self.writes

    def is_option_written(self, name: str) -> bool:
        """Return whether the function is declared to write to a keyword argument."""
        return name in self.writes or (self.options in self.writes and name not in self.by_name)

    def find_written(self, tree: Tree) -> tuple[set[int], list[tuple[tuple[Any, ...], Any]]]:
        """Return the addresses of arrays and the (path, buffer) of buffers in parameters declared as written."""
        arrays: set[int] = set()
        buffers: list[tuple[tuple[Any, ...], Any]] = []
        if not self.writes:
            return arrays, buffers
        nodes, met = list(tree.nodes()), set()
        args, options = nodes[0][-1].values()
        spots = [(args, i) for i in range(len(nodes[args][3])) if self.is_written(i + self.skipped)]
        spots += [(options, i) for i, name in enumerate(nodes[options][2] or ()) if self.is_option_written(name)]
        for number, i in spots:
            *_, parts, links = nodes[number]
            link = links.get(i)
            if link is None:
                if adapter_of(parts[i]) is BUFFER:
                    buffers.append((tree.path_in(number, i), parts[i]))
            elif link < 0:
                arrays.add(id(tree.arrays[~link]))
            elif link not in met:
                met.add(link)
                spots += [(link, k) for k in range(len(nodes[link][3]))]
        return arrays, buffers


def is_tracked(source: Adapter, array: Any) -> bool:
    """Return whether the array's framework records computations with it for differentiation."""
    return source.gradients is not None and source.gradients.is_tracked(array)


def fast_path_name(target: Target) -> Any:
    """Return the target's name for the fast path, or NotImplemented if the fast path does not support it."""
    is_known = target.adapter.fast_path is not None and registry.target(target.name) is target
    return target.name if is_known else NotImplemented


def find_wrapper(target: Target) -> Any:
    """Return the framework's container that creates a new wrapper of the same array on each access, if it has one."""
    source = target.source
    declared = (each for each in source.containers if isinstance(each, Container))
    return next((each for each in declared if each.elements == "same_as" and each.holds == source.name), None)
