"""Selection of the members of a file by names, patterns or a predicate."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dlx._support.text import one_line
from dlx.errors import Attribute, FileError, did_you_mean, path_text

Names = str | Iterable[str] | Callable[[str], bool] | None
"""A name, a pattern such as ``"model.*"``, several of them, or a predicate; None: no restriction."""

MAX_DEPTH = 64  # of mappings whose members can be selected
MAX_NAMES = 1_000_000  # in nested mappings, which a hostile file shares in exponentially many places


def dotted_path(path: tuple[Any, ...], write: Callable[[str], str] = one_line) -> str:
    """Return a path in a file or state dict as text, with dots instead of brackets around names."""
    if len(path) == 1 and type(path[0]) is str:
        return write(path[0])
    path = path[1:] if path[:1] == ("",) and len(path) > 1 else path  # records in a file of one array
    steps = [f".{write(key)}" if type(key) in (str, Attribute) else path_text((key,), "") for key in path]
    return "".join(steps).removeprefix(".")


def match_names(names: Collection[str], which: Names, option: str) -> set[str] | None:
    """Return the names that an option matches; raise `FileError` for a name or a pattern that matches none."""
    if which is None or callable(which):
        return None if which is None else {name for name in names if which(name)}
    matched: set[str] = set()
    for each in which if isinstance(which, Iterable) and not isinstance(which, str) else (which,):
        if not isinstance(each, str):
            raise TypeError(f"{option} must be a name, a pattern, an iterable of them or a function, got {each!r}")
        found = {each} if each in names else set(fnmatch.filter(names, each))
        if not found:
            fix = did_you_mean(each, names) if len(names) < 10_000 else ""
            known = ", ".join(name or "''" for name in itertools.islice(names, 8))
            few = f"Choose from its {len(names):,} names: {one_line(known, 120)}."
            raise FileError(f"it has no member {one_line(each, 80)!r}, which {option!r} names", fix=fix or few)
        matched |= found
    return matched


def select_tree(tree: Mapping[Any, Any], only: Names, skip: Names) -> Mapping[Any, Any]:
    """Return the selected members of nested mappings; their names are paths with dots. A parent selects all below."""
    if only is None and skip is None:
        return tree
    members: dict[tuple[Any, ...], tuple[tuple[str, ...], Any]] = {}  # names from the outermost dict on, and values

    def list_names(inside: Mapping[Any, Any], path: tuple[Any, ...], above: tuple[str, ...]) -> None:
        for key, value in inside.items():
            here = *above, dotted_path((*path, key), str)
            members[*path, key] = here, value
            if path and len(members) > MAX_NAMES:
                raise FileError(f"it has more than {MAX_NAMES:,} names", fix="Open it without only= and skip=.")
            if isinstance(value, Mapping) and len(path) < MAX_DEPTH:
                list_names(value, (*path, key), here)

    list_names(tree, (), ())
    known = dict.fromkeys(here[-1] for here, _ in members.values())
    wanted, dropped = match_names(known, only, "only"), match_names(known, skip, "skip") or set()
    kept: dict[Any, Any] = {}
    for path, (here, value) in members.items():
        if (wanted is None or not wanted.isdisjoint(here)) and dropped.isdisjoint(here):
            at = kept
            for key in path[:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = {} if isinstance(value, Mapping) and len(path) <= MAX_DEPTH else value
    return kept
