"""``errors="pass"``: what cannot be converted stays as it is, and the plan gives the reason."""

from __future__ import annotations

import gc
import re

import pytest

import dlx
from dlx import errors
from dlx._core import native


def batch(np, torch):
    """Return a batch with text, dates, objects and a sparse tensor."""
    return {
        "x": np.ones(3),
        "label": np.array(["a", "b"]),
        "dates": np.array(["2020"], "M8[D]"),
        "objects": np.array([object()]),
        "nested": [torch.ones(2).to_sparse(), (torch.zeros(2), np.array(["c"]))],
    }


@pytest.mark.parametrize("lazy", [False, True])
def test_what_cannot_be_converted_stays(np, torch, lazy):
    """Text, dates, objects and layouts at any depth; the others are converted, and containers are new."""
    tree = batch(np, torch)
    new = dlx.convert(tree, "torch", errors="pass", lazy=lazy)
    assert new["x"].tolist() == [1, 1, 1] and type(new["x"]) is torch.Tensor
    assert all(new[name] is tree[name] for name in ("label", "dates", "objects"))
    assert new["nested"][0] is tree["nested"][0] and new["nested"][1][1] is tree["nested"][1][1]
    with pytest.raises(errors.DTypeError):
        dlx.convert(tree, "torch", lazy=lazy)["label"]


@pytest.mark.parametrize("target", ["torch", "pyarrow", "numpy"])
def test_lists_of_text_and_nested_lists_stay(np, torch, target):
    """Ragged columns whose values or kind the target lacks, in every container, next to one that is converted."""
    pa = pytest.importorskip("pyarrow")
    whole = pa.array([[1.0], [2.0, 3.0]])
    odd = [pa.array([["a"], ["b", "c"]]), pa.array([[[1.0]], [[2.0], [3.0]]]), pa.array([[["a"]], [["b"], []]])]
    odd.append(pa.chunked_array([odd[0][:1], odd[0][1:]]))
    for x in odd:
        for tree in ({"x": x, "y": whole}, {"t": [x, x, whole]}, {"t": pa.table({"x": x, "y": whole})}):
            new = dlx.convert(tree, target, errors="pass")
            inside = new if "x" in new else dict(zip("xzy", new["t"], strict=True)) if len(new["t"]) == 3 else new["t"]
            assert inside["x"].to_pylist() == x.to_pylist()
            assert type(inside["y"]).__module__.partition(".")[0] == (target if target != "numpy" else "pyarrow")
            assert dlx.plan(tree, target, errors="pass").ok


def test_the_plan_lists_each_with_its_reason(np, torch):
    """Its leaves say "passed" and have the error; the plan is no refusal and runs."""
    tree = batch(np, torch)
    plan = dlx.plan(tree, "torch", errors="pass")
    passed = {leaf.path: leaf.error.reason for leaf in plan.leaves if leaf.outcome == "passed"}
    assert passed["obj['label']"] == "DLPack has no text (<U1)" and len(passed) == 4
    assert plan and plan.error is None and "4 passed" in repr(plan) and "DLPack has no text" in str(plan)
    assert plan.run()["label"] is tree["label"]


def test_objects_that_are_refused_by_name_stay_as_well(np, torch):
    """A module, a container that cannot be flattened: as an element they stay, as the root they are refused."""

    class Broken(dict):
        def items(self):
            raise RuntimeError("no items")

        keys = values = __iter__ = items

    for odd in (torch.nn.Linear(2, 2), Broken(a=1)):
        tree = {"x": np.ones(1), "odd": odd}
        assert dlx.convert(tree, "torch", errors="pass")["odd"] is odd
        assert [leaf.path for leaf in dlx.plan(tree, "torch", errors="pass").leaves if leaf.error] == ["obj['odd']"]
        with pytest.raises(errors.DlxError):
            dlx.convert(odd, "torch", errors="pass")
    with pytest.raises(errors.DTypeError):
        dlx.convert(np.array(["a"]), "torch", errors="pass")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda np, torch: torch.ones(2, requires_grad=True), {}),
        (lambda np, torch: np.ones(2, ">f4"), {"copy": False}),
        (lambda np, torch: np.ones(2), {"device": "cuda:0"}),
        (lambda np, torch: np.broadcast_to(1.0, 2), {"readonly": "error"}),
    ],
    ids=["detach", "copy", "device", "readonly"],
)
def test_what_another_option_would_convert_is_an_error(np, torch, make, options):
    """Otherwise a forgotten option would silently convert nothing."""
    x = make(np, torch)
    target = "numpy" if type(x) is torch.Tensor else "torch"
    for convert in (dlx.convert, lambda *args, **more: dlx.plan(*args, **more).run()):
        with pytest.raises(errors.ConversionError):
            convert({"x": x, "text": np.array(["a"])}, target, errors="pass", **options)


def test_a_dtype_that_the_target_lacks_is_an_error(torch):
    """Numbers that dtype= would convert do not stay silently."""
    pytest.importorskip("pyarrow")
    tree = {"x": torch.ones(2, dtype=torch.bfloat16), "y": torch.ones(2)}
    function = dlx.using("pyarrow", errors="pass")(dict)
    for call in (lambda: dlx.convert(tree, "pyarrow", errors="pass"), lambda: function(tree)):
        with pytest.raises(errors.DTypeError, match=r"no dtype bfloat16.* Pass dtype='float32'"):
            call()
    assert str(dlx.plan(tree, "pyarrow", errors="pass").error) == str(dlx.plan(tree, "pyarrow").error)
    assert dlx.convert(tree, "pyarrow", errors="pass", dtype="float32")["x"].to_pylist() == [1, 1]


@pytest.mark.parametrize("rows", ([["a"]], [[1, None]], [[1], None], [[[1, None]]], [[[1]]], [1, None], ["a"]))
@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_the_root_never_stays(np, torch, target, rows):
    """Not even a ragged array with one refused part, or a series that wraps one: the option is for containers."""
    pa = pytest.importorskip("pyarrow")
    odd = [pa.array(rows), pa.chunked_array([pa.array(rows)])]
    for name in ("polars", "pandas"):
        try:
            module = __import__(name)
        except ImportError:
            continue
        kind = {} if name == "polars" else {"dtype": module.ArrowDtype(odd[0].type)}
        odd.append(module.Series(rows if name == "polars" else odd[0], **kind))
    for x in odd:
        plan = dlx.plan(x, target, errors="pass")
        assert plan.outcome == "refused"
        for option in ("raise", "pass"):
            with pytest.raises(errors.DlxError) as failed:
                dlx.convert(x, target, errors=option)
            assert str(failed.value) == str(plan.error) and "errors=" not in str(plan.error)
        assert dlx.convert([x], target, errors="pass")[0] is x


def test_frames_keep_their_own_columns(np):
    """A column of text stays a Series of its library."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0, 2.0], "t": ["a", "b"]})
    new = dlx.convert(frame, "numpy", errors="pass")
    assert new["x"].tolist() == [1, 2] and type(new["t"]) is pandas.Series


def test_columns_of_arrow_tables(np):
    """Columns that dlx reads by Arrow's interface become the table's own objects again."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": [1.0, 2.0], "t": ["a", "b"], "n": [1, None]})
    new = dlx.convert({"table": table}, "numpy", errors="pass")["table"]
    assert new["x"].tolist() == [1, 2] and new["t"].equals(table["t"]) and new["n"].equals(table["n"])


class Columnar:
    """An object that only has Arrow's interface."""

    def __init__(self, array):
        self.array = array

    def __arrow_c_array__(self, requested_schema=None):
        return self.array.__arrow_c_array__(requested_schema)


STRUCTURES = [{"a": "x", "b": 1.0}]


@pytest.mark.parametrize("rows", ([1, None], ["a"], [[1, None]], [[1], None], [["a"]], STRUCTURES))
def test_whole_columns_stay_the_same_objects(np, torch, rows):
    """A series of polars, and an object with Arrow's interface, anywhere in a tree."""
    pa = pytest.importorskip("pyarrow")
    odd = [Columnar(pa.array(rows))]
    try:
        import polars
    except ImportError:
        pass
    else:
        odd.append(polars.Series(rows))
    for x in odd:
        for tree in ([np.ones(2), x], {"q": np.ones(2), 1: x}, (np.ones(2), [x])):
            new = dlx.convert(tree, "torch", errors="pass")
            first, last = new.values() if isinstance(new, dict) else new
            assert (last[0] if isinstance(last, list) else last) is x and type(first) is torch.Tensor
            assert dlx.plan(tree, "torch", errors="pass").run() is not tree
        assert dlx.plan(x, "torch", errors="pass").outcome in ("refused", "tree")  # as the root


def test_a_capsule_that_the_consumer_refuses_stays_usable(np, torch, monkeypatch):
    """It gets its name back."""
    capsule, real = np.ones(2).__dlpack__(), torch.from_dlpack

    def refuse(x, **options):
        raise RuntimeError("no")

    monkeypatch.setattr(torch, "from_dlpack", refuse)
    try:
        new = dlx.convert({"c": [capsule]}, "torch", errors="pass")
    finally:
        monkeypatch.setattr(torch, "from_dlpack", real)
    if new["c"][0] is capsule:
        assert dlx.convert(capsule, "torch").tolist() == [1, 1]


def test_nothing_leaks(np, torch):
    """Neither results nor errors keep tensors."""
    gc.collect()
    live = native.live()
    for lazy in (False, True):
        new = dlx.convert(batch(np, torch), "torch", errors="pass", lazy=lazy)
        new["x"], new["label"]
    plan = dlx.plan(batch(np, torch), "torch", errors="pass")
    del new, plan
    gc.collect()
    assert native.live() == live


def test_messages_name_the_option(np, torch):
    """An error about an object in a container names errors="pass" where it helps, and only in `convert` and `plan`."""
    text, refused = np.array(["a"]), np.ones(2)
    refused.flags.writeable = False
    words = r" Pass errors='pass' to leave it as it is\.$"
    for tree in ({"a": text}, [np.ones(2), [text]], {"a": np.array([None])}, {"a": np.ma.array([1], mask=[1])}):
        for option in ("raise", "collect"):
            with pytest.raises((errors.DlxError, ExceptionGroup)) as failed:
                dlx.convert(tree, "torch", errors=option)
            (error,) = getattr(failed.value, "exceptions", (failed.value,))
            assert re.search(words, str(error)) and "errors=" not in error.fix
            assert re.search(words, str(dlx.plan(tree, "torch").error))
        assert dlx.convert(tree, "torch", errors="pass") is not None
    others = (
        lambda: dlx.convert(text, "torch"),
        lambda: dlx.convert([refused], "torch", copy=False),
        lambda: dlx.convert([np.ones(2), torch.ones(2, requires_grad=True)], "numpy"),
        lambda: dlx.convert([torch.ones(2, dtype=torch.float8_e4m3fn)], "tvm_ffi", copy=False, device="meta"),
        lambda: dlx.stack([text, text], "torch"),
        lambda: dlx.share([np.array([None])]),
        lambda: dlx.using("torch")(lambda x: x)([text]),
    )
    for call in others:
        with pytest.raises((errors.DlxError, ValueError)) as failed:
            call()
        assert "errors=" not in str(failed.value)
