"""Lazy views of containers, `convert(tree, to=..., lazy=True)`: which type has which view; views of records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from types import MappingProxyType
from typing import Any

from dlx.containers import VIEW, container_of, stamp
from dlx.facts import Container
from dlx.foreign import TypeCache, derives, is_key
from dlx.lazy import Options, Path, Scope
from dlx.leaf import Request
from dlx.mappings import MappingView, MutableMappingView
from dlx.mutable_sequences import MutableSequenceView
from dlx.native import Lane
from dlx.sequences import NamedView, SequenceView, SliceView
from dlx.view import View

__all__ = ["RecordView", "lazy_view", "plain_view"]


class RecordView(View):
    """A lazy view of a dataclass, an attrs object or a namespace: its attributes are converted when asked for."""

    __slots__ = ("__weakref__", "_me", "_path", "_row", "_scope", "_slots", "_source")

    def _count(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        return [str(name) for name in self._row.open(self._source)[0] or ()]

    def _at(self, key: Any) -> Any:
        return getattr(self._source, key)

    def _children(self) -> Any:
        return (getattr(self._source, name) for name in self._names())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._touch(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
            return
        setattr(self._source, name, self._inward(value, getattr(self._source, name, None)))
        self._forget(name)

    def __delattr__(self, name: str) -> None:
        delattr(self._source, name)
        self._forget(name)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self._names()]

    def copy(self) -> Any:
        """Return an object of the source's type with what the view shows."""
        names = self._names()
        assert self._row.close is not None
        return self._row.close(self._source, names, [self._touch(name) for name in names], None)


_OWN = frozenset(("_me", "_path", "_row", "_scope", "_slots", "_source"))


# ---- which view ------------------------------------------------------------------------------------------------------

_EXACT: dict[type, Any] = {list: MutableSequenceView, tuple: SequenceView, dict: MutableMappingView}
_classes: TypeCache[Any] = TypeCache()


def make(obj: Any, row: Container, scope: Scope, path: Path) -> Any:
    """Return the view of a container; None where it has none."""
    kind = type(obj)
    cls: Any = _EXACT.get(kind) if type(kind) is type or is_key(kind) else None
    if row is VIEW:  # a view of the same source
        cls = SequenceView if isinstance(obj, SliceView) else kind
        return cls(obj._source, obj._row, scope, path)
    if cls is None:
        try:
            cls = _classes[kind]
        except KeyError:
            cls = _classes[kind] = _class_of(kind, row)
        if cls is None:
            return None
    return cls(obj if row.live is None else row.live(obj), row, scope, path)


def _class_of(kind: type, row: Container) -> Any:
    if any("__dlx_tree__" in cls.__dict__ for cls in kind.__mro__) or row.kind == "set":
        return None
    if derives(kind, Mapping) or row.kind == "mapping":
        if kind is MappingProxyType or not (derives(kind, MutableMapping) or hasattr(kind, "__setitem__")):
            return MappingView
        return MutableMappingView
    if derives(kind, tuple) and (row.kind == "record" or hasattr(kind, "n_sequence_fields")):
        return NamedView
    if derives(kind, Sequence) or row.kind == "sequence":
        if hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
            mutable = derives(kind, MutableSequence) or (row.mutable and hasattr(kind, "insert"))
            return MutableSequenceView if mutable else SequenceView
        return None
    return RecordView if row.kind == "record" and row.close is not None else None


_plain: dict[Any, tuple[Any, Options]] = {}  # target -> options of a call that asks for nothing else


def plain_view(obj: Any, to: Any) -> Any:
    """Return a view for a target that was asked for before, with no options; None where that is not the case."""
    try:
        known = _plain.get(to)
    except TypeError:  # no target at all: whoever checks the call says so
        return None
    if known is None or known[0] != stamp():
        return None
    row = container_of(type(obj))
    return None if row is None else make(obj, row, Scope(known[1]), None)


def lazy_view(
    obj: Any,
    request: Request,
    lane: Lane | None,
    to: Any,
    *,
    strict: bool,
    collect: bool,
    known: Iterable[tuple[Any, Any]] = (),
) -> Any:
    """Return a lazy view of a container; what cannot be viewed is converted now.

    Parameters
    ----------
    obj
        A container.
    request, strict, collect
        The options.
    lane, to
        The fast lane and the target as it was given, where nothing else is asked for.
    known
        Objects, and what they are to be, themselves for one; kept weakly.
    """
    row = container_of(type(obj))
    assert row is not None
    options = Options(request, make, lane, to, strict, collect)
    if lane is not None and not strict and not collect and request.target.constant and isinstance(to, str | type):
        _plain[to] = (options.known_at, options)
    scope = Scope(options)
    for old, new in known:
        scope.know(id(old), old, new)
    view = make(obj, row, scope, None)
    return scope.eager(obj, row) if view is None else view
