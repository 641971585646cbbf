"""Lazy views of containers that an adapter declares: accesses and caching."""

from __future__ import annotations

import collections
import sys
import threading
import types

import pytest

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry.registry import registry
from dlx._views.base import name_of
from dlx.adapter import Container


class Box:
    """A foreign container of lists with one array each, which are new on each access unless `whole`."""

    whole = False

    def __init__(self, *arrays):
        self.arrays, self.asked = list(arrays), []

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, i):
        self.asked.append(i)
        return self.arrays[i] if self.whole else self.arrays[i].view()


class Frozen(Box):
    pass


class Whole(Box):
    whole = True


def _getter(box):
    def get(i):
        box.asked.append(("get", i))
        return box.arrays[i] if box.whole else box.arrays[i].view()

    return get


def _unchanged(box):
    return lambda i, child: i < len(box.arrays) and child.ctypes.data == box.arrays[i].ctypes.data


@pytest.fixture(autouse=True)
def declared(np, monkeypatch):
    """Add Box, Frozen and Whole to the containers of numpy's adapter."""
    module = types.ModuleType("boxes_of_tests")
    module.Box, module.Frozen, module.Whole = Box, Frozen, Whole
    monkeypatch.setitem(sys.modules, "boxes_of_tests", module)
    common = {"flatten": lambda box: (None, list(box.arrays)), "falls_to": list}
    read = {"reader": lambda box: (_getter(box), None)}
    same = {"elements": "same_as", "identity": lambda child: child.ctypes.data if hasattr(child, "ctypes") else None}
    rows = (
        Container(types=("boxes_of_tests.Box",), reader=lambda box: (_getter(box), _unchanged(box)), **same, **common),
        Container(types=("boxes_of_tests.Frozen",), mutable=False, **same, **read, **common),
        Container(types=("boxes_of_tests.Whole",), **read, **common),
    )
    adapter = registry.target("numpy").adapter
    monkeypatch.setattr(type(adapter), "containers", (*adapter.containers, *rows))
    registry._forget()
    yield
    monkeypatch.undo()
    registry._forget()


@pytest.mark.parametrize("kind", [Box, Frozen, Whole])
def test_one_element_is_one_result_on_every_route(np, torch, kind):
    """By positive and negative index, iteration and slices, and for the same memory at two places."""
    a, b = np.ones(2), np.zeros(3)
    source = kind(a, b, a)
    for _ in range(2):  # the second view of a type uses cached facts
        view = dlx.convert(source, to="torch", lazy=True)
        results = list(view)
        assert [type(each) for each in results] == [torch.Tensor] * 3 and results[0].data_ptr() == a.ctypes.data
        assert results[0] is results[2] is view[0] is view[2] is view[-3] and view[1] is results[1] is view[1:][0]
        assert all(one is other for one, other in zip(view, results, strict=True)) and len(view) == 3
        with pytest.raises(IndexError):
            view[3]
        with pytest.raises(TypeError):
            view[1.0]


def test_what_cannot_change_is_asked_once(np):
    """Later accesses, by index or iteration, do not call the container."""
    source = Frozen(*(np.full(1, i) for i in range(300)))
    view = dlx.convert(source, to="dlx", lazy=True)
    first = list(view)
    source.asked.clear()
    assert list(view) == first and view[7] is first[7] and source.asked == []


def test_what_changes_is_noticed(np):
    """`unchanged` is called instead of the container; a different element has a different result."""
    source = Box(np.ones(1), np.ones(2))
    view = dlx.convert(source, to="dlx", lazy=True)
    one, two = view
    source.asked.clear()
    assert view[0] is one and view[1] is two and source.asked == []
    source.arrays.reverse()
    assert view[0] is two and view[1] is one
    source.arrays[0] = np.ones(5)
    assert view[0].shape == (5,) and [each.shape for each in view] == [(5,), (1,)]
    source.arrays.append(np.ones(7))
    assert view[2].shape == (7,) and len(list(view)) == 3


@pytest.mark.parametrize("kind", [Box, Whole])
def test_iteration_follows_a_container_that_grows_and_shrinks(np, kind):
    """Like for a list, the length is checked before each element."""
    source, seen = kind(*(np.ones(i) for i in range(4))), []
    for result in dlx.convert(source, to="dlx", lazy=True):
        seen.append(result.shape[0])
        if len(seen) == 1:
            source.arrays.append(np.ones(9))
        if len(seen) == 3:
            del source.arrays[4:]
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [Box, Frozen])
def test_a_refusal_has_its_place_and_is_raised_again(np, torch, kind):
    """By index and by iteration; later elements are converted."""
    view = dlx.convert({"in": kind(np.ones(1), np.array(["x"]), np.ones(2))}, to="torch", lazy=True)["in"]
    for _ in range(2):
        with pytest.raises(errors.DTypeError, match=r"at obj\['in'\]\[1\]"):
            view[1]
        with pytest.raises(errors.DTypeError, match=r"at obj\['in'\]\[1\]"):
            list(view)
    assert view[2].shape == (2,)


def test_what_getter_and_unchanged_raise_is_left_to_the_container(np, monkeypatch):
    """An Exception is handled by the container; an interrupt ends the access."""
    source = Box(np.ones(1), np.ones(2))
    view = dlx.convert(source, to="dlx", lazy=True)

    def broken(error):
        def fail(*_):
            raise error

        return fail

    view._begin()
    view._getter = broken(ValueError("no"))
    first = view[0]
    view._unchanged = broken(LookupError("no"))
    assert view[0] is first and source.asked == [0, 0]
    view._unchanged = broken(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        view[0]
    view._getter = broken(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        view[1]


@pytest.mark.parametrize("kind", [list, Box, Frozen, Whole])
def test_threads_that_read_one_view_get_one_result(np, torch, kind):
    """By index or by iteration, all threads get the result of the first one."""
    arrays = [np.full(1, i) for i in range(200)]
    view = dlx.convert(kind(arrays) if kind is list else kind(*arrays), to="torch", lazy=True)
    found, begin = [], threading.Barrier(6)

    def read(i):
        begin.wait()
        found.append(list(view) if i % 2 else [view[k] for k in range(200)])

    threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(one is other for each in found for one, other in zip(each, found[0], strict=True))


def test_elements_of_tvm_ffi_are_told_without_a_wrapper(torch):
    """The function compares elements, and returns False for other objects."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    x, y = (tvm_ffi.from_dlpack(torch.ones(n)) for n in (1, 2))
    for source, key, other in ((tvm_ffi.List([x, y, 5]), 0, 1), (tvm_ffi.Dict({"a": x, "é": y}), "a", "é")):
        unchanged = dlx.convert([source], to="torch", lazy=True)[0]._unchanged
        assert unchanged(key, x) is True and unchanged(other, y) is True
        for wrong in ((key, y), (other, x), (2, 5), (9, x), ("z", x), (-1, x), (1.5, x), ("a\0b", x), (1 << 80, x)):
            assert unchanged(*wrong) is False
        assert unchanged(key, object()) is False and unchanged(key, None) is False
        source[key] = y
        assert unchanged(key, x) is False and unchanged(key, y) is True
        with pytest.raises(TypeError):
            unchanged(key)
    from dlx_adapters import _dlx_tvm_ffi

    assert _dlx_tvm_ffi.handle(x) == x.__chandle__() and _dlx_tvm_ffi.handle(5) is None
    with pytest.raises(ValueError, match="expected an open container"):
        _dlx_tvm_ffi.create_child_check(5, 6)


@pytest.mark.parametrize("kind", ["Array", "List", "Map", "Dict"])
def test_second_accesses_of_tvm_ffi_s_containers_make_no_wrapper(torch, monkeypatch, kind):
    """They do not call the container either."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    tensors = [torch.full((1,), float(i)) for i in range(5)]
    made = {str(i): each for i, each in enumerate(tensors)} if kind in ("Map", "Dict") else tensors
    source = getattr(tvm_ffi, kind)(made)
    view, keys = dlx.convert(source, to="torch", lazy=True), list(made) if kind in ("Map", "Dict") else range(5)
    first = [view[key] for key in keys]
    assert [each.item() for each in first] == [0, 1, 2, 3, 4]
    monkeypatch.setattr(getattr(tvm_ffi, kind), "__getitem__", None)
    view._getter = None
    assert all(view[key] is result for key, result in zip(keys, first, strict=True))


@pytest.mark.parametrize("told", [0, 7, -1, sys.maxsize, sys.maxsize + 1, True, "name", None])
def test_c_and_python_know_an_element_by_one_name(np, told):
    """Identities of a container are distinct, and never equal to an address."""
    element, known, slots, identity = np.ones(2), {}, {}, lambda child: told
    dlx.convert(element, to="dlx")  # finds the route
    fast = (dlx.convert, "dlx", types.SimpleNamespace(back=None), known, {}, identity, None, False, None, 0)
    assert native.convert_slot(slots, fast, 0, element) is slots[0][1]
    name = name_of(element, types.SimpleNamespace(identity=identity))
    assert known == {name: 0} and [type(each) for each in known] == [type(name)]
    assert (name == id(element)) is (told is None) and (told is None or type(name) is tuple or name < 0)


@pytest.mark.parametrize("live", [None, lambda folder: folder.arrays])
def test_a_mapping_without_its_methods_has_no_view(np, torch, monkeypatch, live):
    """It is converted at once, alone and in a tree, unless it declares `live`."""

    class Folder:
        __module__ = "boxes_of_tests"

        def __init__(self, **arrays):
            self.arrays = arrays

    def rebuild(folder, keys, children, new_empty):
        return Folder(**dict(zip(keys, children, strict=True)))

    sys.modules["boxes_of_tests"].Folder = Folder
    adapter = registry.target("numpy").adapter
    flatten = lambda folder: ([*folder.arrays], [*folder.arrays.values()])  # noqa: E731
    declared = Container(("boxes_of_tests.Folder",), "mapping", flatten, rebuild, live=live)
    monkeypatch.setattr(type(adapter), "containers", (*adapter.containers, declared))
    registry._forget()
    folder = Folder(x=np.ones(2))
    found, inside = dlx.convert(folder, to="torch", lazy=True), dlx.convert([folder], to="torch", lazy=True)[0]
    for each in (found, inside):
        arrays = each.arrays if live is None else each
        assert isinstance(arrays["x"], torch.Tensor) and list(arrays) == ["x"]
        assert isinstance(each, Folder) == (live is None)


@pytest.mark.parametrize("times", [-1, 0, 1, 3])
@pytest.mark.parametrize("make", [list, collections.deque, lambda arrays: collections.deque(arrays, maxlen=3)])
def test_a_view_is_repeated_in_place(np, torch, times, make):
    """As its list: the source gets the elements again."""
    source, expected = make([np.ones(2), 5]), make([1, 5])
    view = same = dlx.convert(source, to="torch", lazy=True)
    view *= times
    expected *= times
    assert view is same and len(view) == len(source) == len(expected)
    assert [type(each) is int for each in source] == [each == 5 for each in expected]
    assert all(isinstance(each, int | torch.Tensor) for each in view)


def test_advice_for_a_write_names_convert(np, torch):
    """An assignment has no options."""
    view = dlx.convert({"a": np.ones(2), "b": [np.ones(2)]}, to="numpy", lazy=True)
    value = torch.ones(2, requires_grad=True)
    for write in (lambda: view.update(a=value), lambda: view["b"].append(value)):
        with pytest.raises(errors.ConversionError, match=r"Pass detach=True to dlx\.convert\(x, to=\.\.\.\) first\.$"):
            write()
