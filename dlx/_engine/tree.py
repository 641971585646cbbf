"""Flatten a tree of containers into its arrays with their paths, and unflatten it around the results.

The walk keeps its stack in a list, so any depth works. It visits each container and array once, even if
the tree has it several times. A container that contains itself does so in the result, too. The source is never written
to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from numbers import Number
from typing import Any

from dlx._engine.failures import Failures
from dlx._protocols.arrow import Column
from dlx._registry import lookup
from dlx._registry.compound import CompoundHandler, Whole
from dlx._registry.lookup import PASSTHROUGH, Kind, is_built_in
from dlx._support.reflect import foreign_error, is_key, type_name
from dlx._support.text import SHOWN
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import PATH_ENDS, AdapterNotFoundError, ConversionError, DlxError, path_text

Leaf = tuple[tuple[Any, ...], Any, bool, int]
MAX_DEPTH = 1_000_000  # levels of nesting, a limit for containers that generate children endlessly


class Node:
    """One container of a tree."""

    __slots__ = (
        *("at", "cursor", "cyclic", "handler", "is_kept", "is_open", "keys", "links", "obj", "parent", "parts"),
        *("result", "whole"),
    )

    def __init__(self, obj: Any, handler: Container, parent: int, at: int) -> None:
        self.obj, self.handler = obj, handler
        self.parent, self.at = parent, at  # number of the parent node, and the index there
        self.keys: list[Any] | None = None
        self.parts: list[Any] = []
        self.links: list[tuple[int, int]] = []  # (index, number of a node, or ~number of an array)
        self.cursor = 0
        self.is_open = True  # the walk is inside
        self.cyclic = False  # it contains itself
        self.is_kept = False  # it cannot be flattened, and is not changed
        self.result: Any = None
        self.whole = -1  # number of the outermost compound array that it is in, or is


class Tree:
    """A flattened container: its arrays, each once, and their adapters; `strict` as in `lookup.look`.

    `compounds` splits and joins compound arrays (see `compound.Compounds`); without it, they are containers of parts.
    """

    def __init__(
        self,
        root: Any,
        handler: Container,
        failures: Failures,
        *,
        strict: bool | None = False,
        compounds: Any = None,
    ) -> None:
        self.failures, self.strict, self._compounds = failures, strict, compounds
        self.arrays: list[Any] = []
        self.sources: list[Adapter] = []
        self._spots: list[tuple[int, int]] = []  # of each array: (node, index)
        self._nodes: list[Node] = []
        self._closed: list[Node] = []  # children before parents
        self._met: dict[Any, int] = {}  # array or container -> its number, as in Node.links
        self._kinds: dict[type, Kind] = {}  # by type
        self._refused: set[tuple[int, int]] = set()  # (node, index) of refused children
        self._firsts: dict[int, tuple[Any, ...]] = {0: ()}  # node -> the first steps of its path
        self._walk(root, handler)

    def _walk(self, root: Any, handler: Container) -> None:
        stack = [self._enter(root, handler, _key(root, handler, None), -1, 0)]
        while stack:
            number = stack[-1]
            node = self._nodes[number]
            parts, inside = node.parts, node.handler if node.handler.identity is not None else None
            while node.cursor < len(parts):
                i = node.cursor
                node.cursor += 1
                child = parts[i]
                cls = type(child)
                try:
                    kind = self._kinds[cls] if type(cls) is type else self._kind(cls, number, i)
                except KeyError:
                    kind = self._kind(cls, number, i)
                if kind.verdict == "passthrough":
                    continue
                if kind.compounds:
                    kind = self._kind_of(child, kind, number, i)
                if kind.handler is not None:
                    key = _key(child, kind.handler, node.handler)
                    link = self._met.get(key)
                    if link is None:
                        if len(stack) >= MAX_DEPTH:
                            self._refuse(f"it is nested more than {MAX_DEPTH:,} levels deep", number, i)
                            continue
                        link = self._enter(child, kind.handler, key, number, i)
                        node.links.append((i, link))
                        stack.append(link)
                        break
                    if self._nodes[link].is_open and not self._closes(link, number, i):
                        continue
                else:
                    key = id(child) if inside is None else _key(child, None, inside)
                    if node.whole >= 0 and _is_index(node, i):  # it keeps its dtype
                        key = "index", key
                    link = self._met.get(key)
                    if link is None:
                        source = kind.adapter if kind.verdict == "array" else self._look(child, kind, number, i)
                        if source is None:  # not an array
                            continue
                        link = self._met[key] = ~len(self.arrays)
                        self.arrays.append(child)
                        self.sources.append(source)
                        self._spots.append((number, i))
                node.links.append((i, link))
            else:
                node.is_open = False
                self._closed.append(node)
                stack.pop()

    def _enter(self, obj: Any, handler: Container, key: Any, parent: int, at: int) -> int:
        """Flatten one container; return its number."""
        number = len(self._nodes)
        node = Node(obj, handler, parent, at)
        self._nodes.append(node)
        self._met[key] = number
        is_compound, above = isinstance(handler, CompoundHandler), self._nodes[parent].whole if parent >= 0 else -1
        node.whole = number if above < 0 and is_compound else above
        try:
            if is_compound and self._compounds is not None:
                is_root = above < 0 and not self._path(parent, at)
                node.keys, node.parts = self._compounds.split(obj, handler, above >= 0, is_root)
            else:
                node.keys, node.parts = handler.flatten(obj)
        except Exception as error:
            error = _failure(node, error, "cannot be flattened")
            node.is_kept = self._keep(error, self._path(parent, at), node.whole)
        return number

    def _keep(self, error: DlxError, path: tuple[Any, ...], whole: int) -> bool:
        """Return whether an object is left unchanged; if it is a part of a compound array, so does this one."""
        try:
            is_kept = self.failures.keep(error, path, whole, path if whole < 0 else self.path_in(whole))
        finally:
            del error  # break the cycle with this frame
        if is_kept and whole >= 0:
            self._nodes[whole].is_kept = True
        return is_kept

    def _kind(self, cls: type, number: int, i: int) -> Kind:
        try:
            found = lookup.kind(cls)
        except DlxError as error:  # a broken plugin
            self._fail(error.complete(source=type_name(cls)), number, i)
            found = PASSTHROUGH
        if is_key(cls):
            self._kinds[cls] = found
        return found

    def _kind_of(self, obj: Any, kind: Kind, number: int, i: int) -> Kind:
        """Return the kind of an object whose type has compound arrays."""
        try:
            return lookup.kind_of(obj, kind)
        except DlxError as error:
            self._fail(error, number, i)
            return PASSTHROUGH

    def _look(self, obj: Any, kind: Kind, number: int, i: int) -> Adapter | None:
        """Return the adapter of an array that only its instance identifies; None for other objects."""
        try:
            return lookup.look(obj, self.strict, kind).adapter
        except AdapterNotFoundError as error:
            self._fail(error, number, i)
            return None

    def _closes(self, link: int, number: int, i: int) -> bool:
        """Mark a container that contains itself; return False if its type does not allow that."""
        node = self._nodes[link]
        if node.handler.new_empty is None:
            name = type(node.obj).__name__
            reason = f"it contains itself, and a {name} cannot exist before its elements"
            self._refuse(reason, number, i, node.obj, "Make it a list, or break the cycle.")
            return False
        node.cyclic = True
        return True

    def is_one_array(self) -> bool:
        """Return whether the root is a wrapper of one array, such as a Series."""
        return len(self.arrays) == 1 and not self.path(0)

    def path(self, i: int) -> tuple[Any, ...]:
        """Return the first path of array number `i`, as in `DlxError.path`."""
        return self._path(*self._spots[i])

    def place(self, i: int) -> tuple[Any, ...]:
        """Return the path of array number `i`, or of the outermost compound array that it is a part of."""
        return self.path(i) if self.whole(i) < 0 else self.path_in(self.whole(i))

    def path_in(self, number: int, i: int | None = None) -> tuple[Any, ...]:
        """Return the path of child number `i` of a container, or of the container itself; `number` is as in `nodes`."""
        node = self._nodes[number]
        return self._path(number, i) if i is not None else self._path(node.parent, node.at)

    def whole(self, i: int) -> int:
        """Return the number of the outermost compound array that array number `i` is a part of, or -1."""
        return self._nodes[self._spots[i][0]].whole

    def is_index(self, i: int) -> bool:
        """Return whether array number `i` has the indices or offsets of a compound array."""
        number, at = self._spots[i]
        return _is_index(self._nodes[number], at)

    def path_text(self, i: int) -> str:
        """Return the path of array number `i` as text."""
        return self._path_text(*self._spots[i])

    def iter_passed(self) -> Iterator[tuple[str, Any]]:
        """Yield (path as text, object) of all objects that pass through, in the order of the containers."""
        for number, node in enumerate(self._nodes):
            met = {i for i, _ in node.links}
            for i, child in enumerate(node.parts):
                if i not in met and (number, i) not in self._refused:
                    yield self._path_text(number, i), child

    def leaves(self) -> Iterator[Leaf]:
        """Yield (path, object, whether it is an array, `whole`) for each place; raise for a container in two places.

        The parts of a compound array are yielded at its place, the elements first.
        """
        entered = {0}
        for number, node in enumerate(self._nodes):
            if node.whole < 0 or number == 0:
                yield from self._leaves_of(number, node, entered)

    def _leaves_of(self, number: int, node: Node, entered: set[int]) -> Iterator[Leaf]:
        links, above = dict(node.links), self.path_in(number)
        for i, child in sorted(enumerate(node.parts), key=lambda part: _is_index(node, part[0])):
            link = links.get(i)
            if link is None or link < 0:
                yield (*above, *node.handler.path(node.keys, i)), child, link is not None, node.whole
            elif link in entered:
                reason = f"it is the same container as {path_text(self.path_in(link))}"
                self._refuse(reason, number, i, child, "Copy it, or leave one of them out.")
            else:
                entered.add(link)
                if self._nodes[link].whole >= 0:
                    yield from self._leaves_of(link, self._nodes[link], entered)

    def check_found(self) -> None:
        """Report a root without arrays; a built-in container only if it has numbers and the call is `strict`."""
        if self.arrays or self._refused or any(node.whole >= 0 for node in self._nodes):
            return
        root = next((node for node in self._nodes if node.handler.kind != "wrapper"), self._nodes[0])
        found = list(islice(self.iter_passed(), SHOWN + 1))
        has_numbers = self.strict and any(isinstance(child, Number) for _, child in self.iter_passed())
        if (is_built_in(type(root.obj)) and not has_numbers) or not (found or root.handler.kind == "record"):
            return
        held = ", ".join(f"{path} is {type_name(type(child))}" for path, child in found[:SHOWN])
        reason = f"it holds no array{': ' if held else ''}{held}{', ...' if len(found) > SHOWN else ''}"
        fix = "Pass the arrays themselves, or give its class a __dlx_tree__ method that returns them."
        if has_numbers:
            fix = "Make an array of the numbers first, such as numpy.array(numbers)."
        self.failures.add(AdapterNotFoundError(reason, source=type_name(type(root.obj)), fix=fix), ())

    def _path(self, number: int, i: int) -> tuple[Any, ...]:
        steps: list[Any] = []
        while number >= 0:
            node = self._nodes[number]
            steps += node.handler.path(node.keys, i)
            number, i = node.parent, node.at
        return tuple(reversed(steps))

    def _path_text(self, number: int, i: int) -> str:
        """Return the text of a path; only its ends are looked up, for deep trees."""
        steps: list[Any] = []
        while number >= 0 and len(steps) <= 2 * PATH_ENDS:
            node = self._nodes[number]
            steps += node.handler.path(node.keys, i)
            top, number, i = number, node.parent, node.at
        first = self._first_steps(top) if number >= 0 else ()
        return path_text((*first, *reversed(steps)))

    def _first_steps(self, number: int) -> tuple[Any, ...]:
        """Return the first `PATH_ENDS` steps of a container's path, and cache those of its parents."""
        way = [number]
        while way[-1] not in self._firsts:
            way.append(self._nodes[way[-1]].parent)
        steps = self._firsts[way.pop()]
        for each in reversed(way):
            node = self._nodes[each]
            if len(steps) < PATH_ENDS:
                steps += self._nodes[node.parent].handler.path(self._nodes[node.parent].keys, node.at)
            self._firsts[each] = steps
        return steps

    def _refuse(self, reason: str, number: int, i: int, obj: Any = None, fix: str = "") -> None:
        source = "" if obj is None else type_name(type(obj))
        self._fail(ConversionError(reason, source=source, fix=fix), number, i)

    def _fail(self, error: DlxError, number: int, i: int) -> None:
        """Report a refused child of a container."""
        self._refused.add((number, i))
        try:
            self._keep(error, self._path(number, i), self._nodes[number].whole)
        finally:
            del error  # break the cycle with this frame

    def _report_failure(self, node: Node, cause: Exception, what: str) -> None:
        """Report a container whose code failed."""
        self.failures.add(_failure(node, cause, what), self._path(node.parent, node.at))

    def containers(self) -> list[tuple[Any, list[Any] | None, list[Any], Any]]:
        """Return (container, keys, a copy of the children, result) of all nodes."""
        return [(node.obj, node.keys, list(node.parts), node.result) for node in self._nodes]

    def compounds(self) -> list[Whole]:
        """Return the outermost compound arrays, without those that stay as they are."""
        found: dict[int, Whole] = {}
        for number, node in enumerate(self._nodes):
            if node.whole == number and not node.is_kept:
                handler: Any = node.handler
                error = self.failures.wholes.get(number)
                found[number] = Whole(self.path_in(number), node.obj, handler, [], error)
            if node.whole in found:
                found[node.whole].numbers.extend(~link for _, link in node.links if link < 0)
        return [*found.values()]

    def compound_of(self, i: int) -> CompoundHandler | None:
        """Return the handler of the compound array that array number `i` is a part of, or None."""
        handler = self._nodes[self._spots[i][0]].handler
        return handler if isinstance(handler, CompoundHandler) else None

    def nodes(self) -> Iterator[tuple[Any, Container, list[Any] | None, list[Any], dict[int, int]]]:
        """Yield (container, handler, keys, children, {index: link}) of all nodes by number; the root is number 0."""
        for node in self._nodes:
            yield node.obj, node.handler, node.keys, node.parts, dict(node.links)

    def rebuild(
        self, results: list[Any], target: str, replace: Callable[[Any, Any, list[Any]], Any] | None = None
    ) -> Any:
        """Return the tree rebuilt around the results; ``replace(container, keys, children)`` may replace containers."""
        for node in self._nodes:
            if node.cyclic:
                node.result = self._new_empty(node, target)
        for node in self._closed:
            parts, changed = node.parts, node.cyclic
            for i, link in node.links:
                new = results[~link] if link < 0 else self._nodes[link].result
                if type(new) is Column and not isinstance(node.handler, CompoundHandler):  # `errors="pass"`
                    new = self._find_column(node, i)
                if new is not parts[i]:
                    parts[i] = new
                    changed = True
            if node.is_kept:
                node.result = node.obj
            elif replace is not None and not node.cyclic and (new := replace(node.obj, node.keys, parts)) is not None:
                node.result = new
            elif changed or node.handler.mutable:
                node.result = self._unflatten(node, target)
            else:
                node.result = node.obj
        return self._nodes[0].result

    def _find_column(self, node: Node, i: int) -> Any:
        """Return a column as the object that its table has for it; a series, or a table without one, stays whole."""
        outer = node if node.handler.kind == "wrapper" else self._nodes[node.parent]
        try:
            if outer is not node and node.keys is not None:
                return outer.obj[node.keys[i]]
        except MemoryError:
            raise
        except Exception:
            pass  # such as a series of structures
        outer.is_kept = True
        return node.parts[i]

    def _new_empty(self, node: Node, target: str) -> Any:
        assert node.handler.new_empty is not None
        if not _holds(node.handler, target):
            return {} if node.handler.falls_to is dict else []
        try:
            return node.handler.new_empty(node.obj)
        except Exception as error:
            self._report_failure(node, error, "cannot be built again")
            return None

    def _unflatten(self, node: Node, target: str) -> Any:
        handler, keys, parts = node.handler, node.keys, node.parts
        if isinstance(handler, CompoundHandler):
            node.is_kept = self._compounds is None or node.whole in self.failures.kept
            if self._compounds is None or node.is_kept:
                return node.obj
            try:
                return self._compounds.join(keys, parts, handler.kind_of(node.obj))
            except Exception as error:
                self._report_failure(node, error, "cannot be joined")
                return None
        if not _holds(handler, target):
            return _build_built_in(node)
        assert handler.unflatten is not None
        try:
            new = handler.unflatten(node.obj, keys, list(parts), node.result)
            if handler.falls_to is None or not self._has_lost_arrays(node, new):
                return new
            raise TypeError("it lost the converted arrays")
        except Exception as error:
            if handler.falls_to is None or node.cyclic or isinstance(error, MemoryError):
                self._report_failure(node, error, "cannot hold the result")
                return None
        try:
            return _build_built_in(node)
        except Exception as error:  # such as keys that cannot be compared
            self._report_failure(node, error, "cannot hold the result")
            return None

    def forget(self) -> None:
        """Release all containers and results."""
        self._nodes.clear()
        self._closed.clear()

    def _has_lost_arrays(self, node: Node, new: Any) -> bool:
        """Return whether a new container holds other objects than the converted arrays."""
        handler = node.handler
        if handler.types or handler.elements != "stable" or handler.kind not in ("sequence", "mapping"):
            return False  # the handler's author is responsible for `unflatten`
        keys = node.keys
        return any(new[i if keys is None else keys[i]] is not node.parts[i] for i, link in node.links if link < 0)


def _is_index(node: Node, i: int) -> bool:
    """Return whether child number `i` of a container has the indices or offsets of a compound array."""
    if node.keys is None or not isinstance(node.handler, CompoundHandler):
        return False
    return node.keys[i] in node.handler.compound.indices


def _failure(node: Node, cause: Exception, what: str) -> DlxError:
    """Return the error for a container whose code failed."""
    if isinstance(cause, DlxError):
        return cause.complete(source=type_name(type(node.obj)))
    is_set = node.handler.kind == "set" and isinstance(cause, TypeError)
    fix = "Pass its elements in a list: such arrays cannot be hashed." * is_set
    return foreign_error(f"the container {what}:", cause, fix=fix).complete(source=type_name(type(node.obj)))


def _key(obj: Any, handler: Container | None, inside: Container | None) -> Any:
    """Return the identity of an object: from a handler's `identity`, else its address."""
    for container in (handler, inside):
        if container is not None and container.identity is not None:
            key = container.identity(obj)
            if key is not None:
                return "same_as", key
    return id(obj)


def _holds(handler: Container, target: str) -> bool:
    return handler.unflatten is not None and handler.holds in (None, target)


def _build_built_in(node: Node) -> Any:
    """Return the built-in container that replaces a container that cannot hold the results."""
    new = node.handler.plain(node.keys, node.parts)
    if not node.cyclic:
        return new
    if isinstance(new, dict):
        node.result.update(new)
    else:
        node.result.extend(new)
    return node.result


def path_of(array: Any, root: Any) -> tuple[Any, ...]:
    """Return the path of an array in a container; empty if it is no longer there."""
    handler = lookup.kind_of(root).handler
    tree = None if handler is None else Tree(root, handler, Failures("", collect=True))
    for i, other in enumerate(tree.arrays if tree is not None else ()):
        if tree is not None and other is array:
            return tree.path(i)
    return ()
