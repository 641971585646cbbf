"""Containers of tvm_ffi: flattened, rebuilt and viewed lazily, with any framework tag."""

from __future__ import annotations

import gc
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence

import pytest

import dlx
from dlx import errors
from dlx._core import native

tvm_ffi = pytest.importorskip("tvm_ffi")


@pytest.fixture
def echo():
    """A function that returns its argument; next to torch tensors, the container is tagged with torch."""
    return tvm_ffi.get_global_func("testing.echo")


@pytest.fixture(params=["plain", "tagged"])
def made(request, echo, torch):
    """Return a function that creates a tvm_ffi container, tagged with torch or not."""

    def make(kind, obj):
        new = getattr(tvm_ffi, kind)(obj)
        return echo(new) if request.param == "plain" else echo([new, torch.ones(1)])[0]

    return make


# ---- eagerly ---------------------------------------------------------------------------------------------------------


def test_they_become_lists_and_dicts_of_other_frameworks(np, torch, made):
    """Values, scalars, text and nesting are kept; memory is shared; keys are unchanged."""
    x, y = torch.arange(2.0), torch.arange(3)
    source = made("Dict", {"a": [x, 1, "text"], "b": {"c": y}, 3: None, (1, 2): x})
    result = dlx.convert(source, to="numpy")
    assert type(result) is dict and list(map(str, result)) == list(map(str, source.keys()))
    assert type(result["a"]) is list and result["a"][1:] == [1, "text"] and result[3] is None
    assert type(result["b"]) is dict and dlx.shares_memory(result["b"]["c"], y)
    assert type(result["a"][0]) is np.ndarray and dlx.shares_memory(result["a"][0], x)
    for kind in ("Array", "List"):
        result = dlx.convert({"in": made(kind, [x, [y]])}, to="torch")["in"]
        assert type(result) is list and [type(result[0]), type(result[1][0])] == [torch.Tensor] * 2
        assert result[0].data_ptr() == x.data_ptr()
    assert dlx.convert(made("Map", {"a": x}), to="dlx")["a"].shape == (2,)
    assert dlx.convert(made("List", []), to="numpy") == [] and dlx.convert(made("Dict", {}), to="numpy") == {}
    for source in (made("Array", [1]), made("Map", {})):
        assert dlx.convert([source], to="numpy")[0] is source  # nothing in it changed, and it cannot be written to


def test_inside_tvm_ffi_they_stay_what_they_are(torch, made):
    """Immutable containers are returned unchanged; others are new, with the same tensors."""
    x = torch.ones(2)
    for kind, obj in (("Array", [x, "t"]), ("Map", {"k": x, "n": [x]})):
        source = made(kind, obj)
        assert dlx.convert(source, to="tvm_ffi") is source
    source = made("List", [x, [x], 1])
    result = dlx.convert(source, to="tvm_ffi")
    assert type(result) is tvm_ffi.List and not result.same_as(source) and result[2] == 1
    result.append(5)
    assert len(source) == 3
    copied = dlx.convert(made("Dict", {"k": (y := tvm_ffi.from_dlpack(x)), "n": [y]}), to="tvm_ffi", copy=True)
    assert type(copied) is tvm_ffi.Dict and type(copied["n"]) is tvm_ffi.Array
    assert not dlx.shares_memory(copied["k"], x) and copied["k"].same_as(copied["n"][0])


def test_one_tensor_or_container_is_one_result_however_often_it_is_wrapped(torch, made):
    """Wrappers are new on each access; their handle identifies the object."""
    x, y = tvm_ffi.from_dlpack(torch.ones(2)), tvm_ffi.from_dlpack(torch.ones(2))
    inner = tvm_ffi.List([x])
    result = dlx.convert(made("Array", [x, y, x, inner, inner]), to="torch")
    assert result[0] is result[2] is result[3][0] and result[0] is not result[1] and result[3] is result[4]


def test_a_list_that_holds_itself_does_so_in_the_result(torch):
    """tvm_ffi crashes for tagged ones; dlx treats it as a cycle."""
    source = tvm_ffi.List([torch.ones(1)])
    source.append(source)
    try:
        result = dlx.convert(source, to="torch")
        assert result[1] is result and type(result[0]) is torch.Tensor
        again = dlx.convert(source, to="tvm_ffi")
        assert again[1].same_as(again) and not again.same_as(source)
        again.pop()
        view = dlx.convert(source, to="torch", lazy=True)
        assert view[1] is view and view[1][0] is view[0]
        table = tvm_ffi.Dict({"x": torch.ones(1)})
        table["self"] = table
        result = dlx.convert(table, to="torch")
        assert result["self"] is result
        del table["self"]
    finally:
        source.pop()


def test_an_error_has_its_path_and_nothing_is_left(np, made):
    """The error reports an element that tvm_ffi would silently leave unconverted."""
    live = native.live()
    source = made("Map", {"a": [1, np.zeros((2, 4), "f4")]})
    wide = tvm_ffi.from_dlpack(dlx.convert(np.zeros(4, "f4"), to="dlx"))
    odd = tvm_ffi.Array([wide, {"k": tvm_ffi.from_dlpack(_lanes(np))}])
    with pytest.raises(errors.DTypeError, match=r"at obj\['in'\]\[1\]\['k'\]: .*float32x4"):
        dlx.convert({"in": odd}, to="numpy")
    with pytest.raises(errors.DTypeError, match=r"at obj\[1\]\['k'\]: "):
        dlx.convert(odd, to="numpy", lazy=True)[1]["k"]
    assert dlx.convert(source, to="numpy")["a"][1].shape == (2, 4)
    del odd, wide, source
    gc.collect()
    assert native.live() == live


def _lanes(np):
    """Return a tensor of float32x4."""
    data = np.zeros(4, "f4")
    return dlx.from_pointer(data.ctypes.data, (1,), dlx.DType("float32x4"), owner=data)


# ---- lazily ----------------------------------------------------------------------------------------------------------


def test_views_of_them_convert_on_every_route(torch, made):
    """values() and items() convert, unlike in tagged containers; each element is one object."""
    x, y = torch.ones(2), torch.zeros(3)
    view = dlx.convert(made("Array", [x, [y], 3]), to="torch", lazy=True)
    assert isinstance(view, Sequence) and not isinstance(view, MutableSequence)
    assert type(view[0]) is torch.Tensor and view[0] is view[0] is view[-3] is next(iter(view)) is tuple(view)[-3]
    assert view[1] is view[1] and view[1][0] is view[1][0] and view[1][0].data_ptr() == y.data_ptr()
    assert view[0] in view and view[:1][0] is view[0] and [*reversed(view)][2] is view[0] and view[2] == 3
    assert view.materialize()[1][0].data_ptr() == y.data_ptr()
    for kind in ("Map", "Dict"):
        table = dlx.convert(made(kind, {"a": x, "n": {"b": y}}), to="torch", lazy=True)
        assert isinstance(table, MutableMapping if kind == "Dict" else Mapping)
        assert table["a"] is table.get("a") is dict(table)["a"] is dict(table.items())["a"]
        assert any(value is table["a"] for value in table.values()) and table["n"]["b"] is table["n"]["b"]
        assert "a" in table and "z" not in table and table.get("z", 7) == 7 and len(table) == 2
        with pytest.raises(KeyError):
            table["z"]


def test_writing_through_a_view_is_seen_by_every_wrapper(np, torch, made):
    """Values are stored as tvm_ffi tensors; cached results follow moved elements."""
    x, y, z = torch.ones(2), torch.zeros(3), torch.full((1,), 7.0)
    source = made("List", [x, y])
    view = dlx.convert(source, to="numpy", lazy=True)
    first = view[0]
    view[1] = z.numpy()
    view.insert(0, y)
    assert type(view._source[1]) is tvm_ffi.Tensor and len(source) == 3
    assert view[1] is first and view[2].tolist() == [7] and view[0].tolist() == [0, 0, 0]
    view[0] = first
    assert view[0] is first and view.pop() is not first and len(source) == 2
    source.append(torch.full((2,), 9.0))
    assert view[2].tolist() == [9, 9]
    del view[0]
    view.extend([np.ones(1)])
    assert [each.shape for each in view] == [(2,), (2,), (1,)] and type(view[-1]) is np.ndarray
    source.clear()
    assert len(view) == 0 and list(view) == []
    table = dlx.convert(made("Dict", {"a": x}), to="numpy", lazy=True)
    table["a"] = z
    table["b"] = np.ones(3)
    assert type(table._source["b"]) is tvm_ffi.Tensor and table["a"].tolist() == [7] and table.pop("b").shape == (3,)


def test_a_handle_that_moved_is_not_taken_for_what_took_its_place(torch):
    """A tensor's result is never returned for another one after overwrites."""
    x, y = torch.ones(2), torch.zeros(2)
    source = tvm_ffi.List([x])
    kept = source[0]
    view = dlx.convert(source, to="torch", lazy=True)
    first = view[0]
    source[0] = y
    assert view[0].data_ptr() == y.data_ptr()
    source.append(kept)
    assert view[1].data_ptr() == x.data_ptr() == first.data_ptr() and view[0].data_ptr() == y.data_ptr()


def test_a_dict_that_grows_while_it_is_iterated_raises(torch):
    """Like Python's dict; tvm_ffi stops silently."""
    source = tvm_ffi.Dict({"a": torch.ones(1), "b": torch.ones(1)})
    view = dlx.convert(source, to="torch", lazy=True)
    for route in (view, view.keys(), view.values(), view.items()):
        with pytest.raises(RuntimeError, match="changed size during iteration"):
            for n, _ in enumerate(route):
                source[f"more{n}{len(source)}"] = 1


def test_views_of_them_leak_nothing(torch):
    """Nor do their results."""
    live = native.live()
    for _ in range(20):
        view = dlx.convert(tvm_ffi.List([torch.ones(2), [torch.ones(2)]]), to="torch", lazy=True)
        view[0], view[1][0], view.materialize()
        view.append(torch.ones(1))
        view[2]
    del view
    gc.collect()
    assert native.live() == live
