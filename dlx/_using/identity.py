"""`Identity`: maps arguments that the function received to the caller's own objects, for when it returns them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Set
from typing import Any
from weakref import ref

from dlx._engine.compound import Compounds
from dlx._engine.failures import Failures
from dlx._engine.planner import is_inside
from dlx._engine.tree import Tree
from dlx._protocols.arrow import Column
from dlx._registry import lookup
from dlx._registry.compound import CompoundHandler
from dlx._registry.lookup import Kind, look
from dlx._registry.target import Target
from dlx._support.reflect import derives
from dlx._using.function_spec import Place, find_wrapper
from dlx._views.base import name_of
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container

WHOLE = Container(flatten=lambda obj: (None, []), mutable=False)


class CallTree(Tree):
    """A flattened argument or result; models and other objects of the function's framework are not flattened."""

    def __init__(
        self,
        root: Any,
        handler: Container,
        failures: Failures,
        package: str,
        whole: tuple[Any, ...] = (),
        *,
        strict: bool | None = False,
        compounds: Compounds | None = None,
    ) -> None:
        self._package, self._whole = package, whole  # `whole`: arguments passed unchanged, which are not flattened
        super().__init__(root, handler, failures, strict=strict, compounds=compounds)

    def _enter(self, obj: Any, handler: Container, key: Any, parent: int, at: int) -> int:
        return super()._enter(obj, WHOLE if any(obj is each for each in self._whole) else handler, key, parent, at)

    def _look(self, obj: Any, kind: Kind, number: int, i: int) -> Adapter | None:
        refusal = kind.refusal
        if any(obj is each for each in self._whole) or refusal is None or self._package in refusal.frameworks:
            return look(obj, None, kind).adapter
        return super()._look(obj, kind, number, i)


class Identity:
    """The arrays and containers passed to a function, and the caller's object for each."""

    def __init__(self, kept: tuple[Any, ...], target: Target) -> None:
        self.kept = kept
        self.recorded: Place | None = None  # an argument that the function's framework records
        self._arrays: dict[int, tuple[Any, Any]] = {id(each): (each, each) for each in kept}
        self._containers: dict[int, tuple[Any, Any, Any, list[Any]]] = {}  # passed, own, keys, children
        self._source, self._wrapping = target.source, find_wrapper(target)
        self._named: dict[Any, Any] | None = None

    def add(self, passed: Any, own: Any) -> None:
        """Record the array passed in place of the caller's."""
        self._arrays[id(passed)] = passed, own
        self._named = None

    def add_container(self, passed: Any, own: Any, keys: Any, children: list[Any]) -> None:
        """Record the container passed in place of the caller's, with the caller's keys and children."""
        known = self._containers.get(id(passed))
        own = known[1] if known is not None and known[0] is passed else own  # a view represents its source
        self._containers[id(passed)] = passed, own, keys, children

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield the passed and the caller's array of each pair."""
        yield from self._arrays.values()

    def weak_owners(self, known: list[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return `Scope.owned` for pairs of a passed and the caller's array."""
        owned: dict[Any, Any] = {}
        for passed, own in known:
            if self._wrapping is not None and look(passed).part is self._source:
                with contextlib.suppress(TypeError):  # no weak references
                    owned[name_of(passed, self._wrapping)] = ref(own)
        return owned

    def whole(self, target: Target | None) -> tuple[Any, ...]:
        """Return the objects that are not flattened in a result; `target` comes from ``returns=``."""
        passed = (each for each, *_ in self._containers.values() if target is None)
        return *self.kept, *(each for each in passed if isinstance(lookup.kind_of(each).handler, CompoundHandler))

    def is_trivial(self) -> bool:
        """Return whether the function got the caller's own arrays, and no containers."""
        return not self._containers and all(passed is own for passed, own in self._arrays.values())

    def find_passed(self, array: Any) -> Any:
        """Return the passed array that a result is, or that it wraps, too; None for a new array."""
        found = self._arrays.get(id(array))
        if found is not None and found[0] is array:
            return array
        if self._wrapping is None or look(array).part is not self._source:
            return None
        if self._named is None:
            pairs = [passed for passed, _ in self._arrays.values() if look(passed).part is self._source]
            self._named = {name_of(each, self._wrapping): each for each in pairs}
        return self._named.get(name_of(array, self._wrapping))

    def own(self, array: Any) -> Any:
        """Return the caller's array for a passed one; a column is returned unchanged: the caller has a table."""
        passed = self.find_passed(array)
        own = array if passed is None else self._arrays[id(passed)][1]
        return array if type(own) is Column else own

    def stays(self, array: Any, target: Target | None) -> bool:
        """Return whether an array was passed and is returned unconverted; `target` comes from ``returns=``."""
        passed = self.find_passed(array)
        if passed is None or target is None:
            return passed is not None
        own = self._arrays[id(passed)][1]
        what = look(own).part
        return not isinstance(what, Adapter) or is_inside(own, what, target)

    def is_own(self, made: Any, container: Any) -> bool:
        """Return whether `made` is the caller's object for a passed container."""
        passed, own, _, _ = self._containers.get(id(container), (None, None, None, []))
        return passed is container and own is made

    def has_container(self, container: Any) -> bool:
        """Return whether a container was passed."""
        return id(container) in self._containers

    def own_container(self, target: Target | None, container: Any, keys: Any, children: list[Any]) -> Any:
        """Return the caller's container for a passed one if it still has the caller's children, or None."""
        passed, own, old_keys, old = self._containers.get(id(container), (None, None, None, []))
        if passed is container and isinstance(lookup.kind_of(container).handler, CompoundHandler):
            return own
        if passed is not container or len(old) != len(children):
            return None
        if derives(type(container), Set):  # unordered
            return own if {id(child) for child in children} == {id(child) for child in old} else None
        if any(self.find_passed(child) is not None and not self.stays(child, target) for child in children):
            return None
        same = keys is None or all(map(_is_key, keys, old_keys or ()))
        return own if same and all(a is b for a, b in zip(old, children, strict=True)) else None


def _is_key(one: Any, other: Any) -> bool:
    """Return whether two keys are the same object, or equal plain data; arrays are not compared by value."""
    if one is other or type(one) is not type(other):
        return one is other
    return lookup.kind(type(one)).verdict == "passthrough" and bool(one == other)
