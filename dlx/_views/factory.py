"""View classes by type, views of records, and the entry points `lazy_view` and `repeat_view`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from types import MappingProxyType
from typing import Any

from dlx._engine.batch import Batch, convert_tree
from dlx._engine.failures import Failures
from dlx._engine.request import Request
from dlx._registry import lookup
from dlx._registry.lookup import VIEW
from dlx._registry.registry import registry
from dlx._support.reflect import TypeCache, derives
from dlx._support.tracebacks import REFUSALS, name_action
from dlx._views.base import Options, Path, Scope, View, keys_of
from dlx._views.mapping import MappingView, MutableMappingView
from dlx._views.sequence import MutableSequenceView, NamedView, SequenceView, SliceView
from dlx.adapter.base import Adapter, look_up
from dlx.adapter.declarations import Container

__all__ = ["RecordView", "ViewMaker", "lazy_view", "repeat_view", "view_maker"]


class RecordView(View):
    """A lazy view of a dataclass, an attrs object or a namespace; it converts attributes when they are read."""

    __slots__ = ("__weakref__", "_fast", "_handler", "_is_tracing", "_me", "_path", "_scope", "_slots", "_source")

    def __init__(self, source: Any, handler: Container, scope: Scope, path: Path) -> None:
        self._source, self._handler, self._scope, self._path = source, handler, scope, path
        self._slots = {}
        self._me = self._fast = self._is_tracing = None

    def _count(self) -> int:
        return len(self._names())

    def _names(self) -> tuple[str, ...]:
        return tuple(str(name) for name in self._handler.flatten(self._source)[0] or ())

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
        new = self._inward(value, getattr(self._source, name, None))
        self._forget(name)
        setattr(self._source, name, new)

    def __delattr__(self, name: str) -> None:
        self._forget(name)
        delattr(self._source, name)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self._names()]

    def copy(self) -> Any:
        """Return an object of the source's type with the view's elements."""
        names = list(self._names())
        assert self._handler.unflatten is not None
        return self._handler.unflatten(self._source, names, [self._touch(name) for name in names], None)


_OWN = frozenset(RecordView.__slots__)


# ---- selection of the view class -------------------------------------------------------------------------------------

_EXACT: dict[type, Any] = {list: MutableSequenceView, tuple: SequenceView, dict: MutableMappingView}
_classes: TypeCache[Any] = TypeCache()


def create_view(obj: Any, handler: Container, scope: Scope, path: Path) -> Any:
    """Return the view of a container, or None if it cannot have one."""
    if handler.kind == "compound":
        return None
    kind = type(obj)
    cls: Any = _EXACT.get(kind) if type(kind) is type else None
    if handler is VIEW:
        cls = SequenceView if isinstance(obj, SliceView) else kind
        return cls(obj._source, obj._handler, scope, path)
    if cls is None:
        cls = _classes.find(kind) or _classes.keep(kind, _class_of(kind, handler))
        if cls is None:
            return None
    return _choose(cls, handler)(obj, handler, scope, path)


def _choose(cls: Any, handler: Container) -> Any:
    """Return the function that creates views of a class: the class, or one that also sets a handler's functions."""
    live, reader, fixed = handler.live, handler.reader, None
    if not handler.types or handler.elements == "fresh" or cls is RecordView:
        reader = None
    elif not handler.mutable:
        fixed = str if handler.kind == "mapping" else int
    if live is None and reader is None and fixed is None:
        return cls

    def create(obj: Any, handler: Container, scope: Scope, path: Path) -> Any:
        source = obj if live is None else live(obj)
        view = cls(source, handler, scope, path)
        if fixed is not None:
            view._fixed = fixed
        if reader is not None:
            view._getter, is_unchanged = reader(source)
            if fixed is None and is_unchanged is not None:
                view._unchanged = is_unchanged
        return view

    return create


def _class_of(kind: type, handler: Container) -> Any:
    if any("__dlx_tree__" in cls.__dict__ for cls in kind.__mro__) or handler.kind == "set":
        return None
    if derives(kind, Mapping) or handler.kind == "mapping":
        if handler.live is None and not (hasattr(kind, "keys") and hasattr(kind, "__getitem__")):
            return None
        if kind is MappingProxyType or not (derives(kind, MutableMapping) or hasattr(kind, "__setitem__")):
            return MappingView
        return MutableMappingView
    if derives(kind, tuple) and (handler.kind == "record" or hasattr(kind, "n_sequence_fields")):
        return NamedView
    if derives(kind, Sequence) or handler.kind == "sequence":
        if hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
            mutable = derives(kind, MutableSequence) or (handler.mutable and hasattr(kind, "insert"))
            return MutableSequenceView if mutable else SequenceView
        return None
    return RecordView if handler.kind == "record" and handler.unflatten is not None else None


def _convert(obj: Any, what: Container | Adapter, options: Options, path: Path) -> Any:
    """Convert an array or a whole container (see `Options`)."""
    request = options.request
    try:
        if isinstance(what, Adapter):
            return Batch(request, [obj], [what], lambda i: keys_of(path), Failures(request.target.name)).run()[0]

        def locate(inside: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
            return "", keys_of(path) + inside

        strict, errors, to = options.strict, options.errors, options.to
        if what.kind == "compound" and errors == "collect":
            errors = "raise"  # one array has one error
        return convert_tree(obj, what, request, strict=strict, errors=errors, to=to, locate=locate)
    except REFUSALS as error:
        name_action(error, "convert")  # a container may have called another function
        raise


class ViewMaker:
    """Creates lazy views with the same options."""

    __slots__ = ("generation", "listed", "options")

    def __init__(self, options: Options, generation: int) -> None:
        self.options, self.generation = options, generation  # the registry's, before their creation
        # Address of a built-in or declared type -> the type, its handler, the function that creates its view.
        self.listed: dict[int, tuple[type, Any, Callable[..., Any]]] = {
            id(kind): (kind, lookup.kind(kind).handler, cls) for kind, cls in _EXACT.items()
        }

    def view(self, obj: Any, owned: dict[Any, Any] | None = None) -> Any:
        """Return a view or None. `owned`: as in `Scope`."""
        kind, scope = type(obj), Scope(self.options, owned)
        found = self.listed.get(id(kind))
        if found is not None:
            return found[2](obj, found[1], scope, None)
        handler = lookup.kind(kind).handler
        new = None if handler is None else create_view(obj, handler, scope, None)
        if handler is not None and new is not None and id(kind) in map(id, map(look_up, handler.types)):
            self.listed[id(kind)] = kind, handler, _choose(type(new), handler)
        return new


_makers: dict[Any, ViewMaker] = {}  # by target, for calls without options


def repeat_view(obj: Any, to: Any, view: Any = None) -> Any:
    """Return a view, of the class `view` if passed, for a target used before without options; else None."""
    try:
        maker = _makers.get(to)
    except TypeError:  # not a target; the caller raises
        return None
    if maker is None or maker.generation != registry.generation:
        return None
    found = maker.listed.get(id(type(obj))) if view is None else None
    if found is not None:
        return found[2](obj, found[1], Scope(maker.options), None)
    if view is None:
        return maker.view(obj)
    handler = lookup.kind(type(obj)).handler
    return None if handler is None else view(obj, handler, Scope(maker.options), None)


def view_maker(request: Request, to: str | None, flags: int) -> ViewMaker:
    """Return the maker of views of a decorated function's results. `flags`: options of the fast path."""
    options = Options(request, create_view, _convert, request.target.adapter.is_tracing, to, flags=flags)
    return ViewMaker(options, registry.generation)


def lazy_view(
    obj: Any,
    request: Request,
    to: Any,
    *,
    strict: bool,
    errors: str = "raise",
    known: Iterable[tuple[Any, Any]] = (),
    owned: dict[Any, Any] | None = None,
    view: Any = None,
) -> Any:
    """Return a lazy view of a container, or convert it if it cannot have a view."""
    generation, handler = registry.generation, lookup.kind_of(obj).handler
    assert handler is not None
    options = Options(request, create_view, _convert, request.target.adapter.is_tracing, to, strict, errors)
    if isinstance(to, str | type) and not strict and errors == "raise" and not request.target.adapter.dtypes.switches:
        _makers[to] = ViewMaker(options, generation)
    scope = Scope(options, owned)
    for old, new in known:
        scope.record_result(id(old), old, new)
    found = (view or create_view)(obj, handler, scope, None)
    return scope.eager(obj, handler) if found is None else found
