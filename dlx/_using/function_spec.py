"""What is known of a decorated function: its options, and the names of its parameters."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from dlx._containers.tree import Tree
from dlx._registry.generic import BUFFER
from dlx._registry.registry import registry
from dlx.adapter.base import Adapter

__all__ = ["FunctionSpec", "Place", "tracked"]

Place = tuple[str, tuple[Any, ...]]
"""Where an array is: the name of a parameter, and the path from there; `root` and `path` of an error."""


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
    ) -> None:
        self.to = sys.intern(to) if type(to) is str else to  # as the fast path wants it
        self.request, self.returns, self.lazy = request, returns, lazy
        self.detach, self.result_like = detach, result_like
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # a built-in function that does not say
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

    def place(self, i: int) -> Place:
        """Return the name of a positional argument's parameter, and where the argument is in there."""
        return (self.names[i], ()) if i < len(self.names) else (self.rest, (i - len(self.names),))

    def parameter(self, path: tuple[Any, ...]) -> Place:
        """Return a path in (args, options) as one that begins at a parameter."""
        kind, key, *inside = path
        root, first = (str(key), ()) if kind else self.place(key + self.skipped)
        return root, (*first, *inside)

    def is_written(self, i: int) -> bool:
        """Return whether the function is declared to write to a positional argument."""
        return i in self.writes or self.place(i)[0] in self.writes

    def is_option_written(self, name: str) -> bool:
        """Return whether the function is declared to write to an argument that is passed by name."""
        return name in self.writes or (self.options in self.writes and name not in self.by_name)

    def written_buffers(self, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Give (path in (args, options), argument) of all plain buffers that the function is declared to write to."""
        if self.writes:
            chosen: list[tuple[tuple[Any, ...], Any]] = [
                ((0, i), each) for i, each in enumerate(args) if self.is_written(i + self.skipped)
            ]
            chosen += [((1, name), each) for name, each in options.items() if self.is_option_written(name)]
            yield from (pair for pair in chosen if registry.producer(pair[1]) is BUFFER)

    def written(self, tree: Tree) -> set[int]:
        """Return the addresses of all arrays of (args, options) in parameters that are declared to be written to."""
        if not self.writes:
            return set()
        (_, args), (_, options) = tree.entries(0)
        numbered = [(i + self.skipped, link) for i, link in tree.entries(args)]
        chosen = [link for i, link in numbered if self.is_written(i)]
        chosen += [link for name, link in tree.entries(options) if self.is_option_written(name)]
        return {id(tree.arrays[i]) for i in tree.below(chosen)}


def tracked(source: Adapter, array: Any) -> bool:
    """Return whether what is computed from an array now is recorded by its framework, to be differentiated."""
    return source.gradients is not None and source.gradients.is_tracked(array)
