"""The option `out` of `convert` and `stack`: memory of any framework, checked as a whole before the first write."""

from __future__ import annotations

import gc
import itertools

import pytest

import dlx
from dlx import errors
from dlx._api import output
from dlx._core import native

OUTPUTS = {
    "numpy": lambda np, torch, shape: np.full(shape, 7, "f4"),
    "swapped": lambda np, torch, shape: np.full(shape, 7, ">f4"),
    "strided": lambda np, torch, shape: np.full((*shape, 2), 7, "f4")[..., 1],
    "reversed": lambda np, torch, shape: np.full(shape, 7, "f4")[::-1],
    "permuted": lambda np, torch, shape: np.full(shape[::-1], 7, "f4").T,
    "torch": lambda np, torch, shape: torch.full(shape, 7.0),
    "dlx": lambda np, torch, shape: dlx.convert(np.full(shape, 7, "f4"), "dlx"),
    "record": lambda np, torch, shape: np.full(shape, 7, np.dtype([("x", "f4"), ("y", "u1")]))["x"],
}
SOURCES = {
    "numpy": lambda np, torch, x: x,
    "swapped": lambda np, torch, x: x.astype(">f4"),
    "strided": lambda np, torch, x: np.repeat(x, 2, -1)[..., ::2],
    "read-only": lambda np, torch, x: np.broadcast_to(x, x.shape),
    "torch": lambda np, torch, x: torch.from_numpy(x.copy()),
    "negated": lambda np, torch, x: torch.complex(torch.from_numpy(x.copy()), -torch.from_numpy(x)).conj().imag,
    "jax": lambda np, torch, x: pytest.importorskip("jax.numpy").asarray(x),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("there", OUTPUTS)
def test_any_array_into_any_memory(np, torch, kind, there):
    """Values arrive in every layout and byte order, and the result is `out` itself."""
    x = np.arange(24, dtype="f4").reshape(2, 3, 4)
    out = OUTPUTS[there](np, torch, x.shape)
    assert dlx.convert(SOURCES[kind](np, torch, x), out=out) is out
    assert (np.asarray(dlx.convert(out, "numpy")) == x).all()


@pytest.mark.parametrize("there", OUTPUTS)
def test_a_cast_on_the_way(np, torch, there):
    """Dtypes must match unless `dtype` says otherwise; nothing is written before that is known."""
    x = np.arange(6, dtype="f8").reshape(2, 3)
    out = OUTPUTS[there](np, torch, x.shape)
    with pytest.raises(errors.DTypeError, match=r"at out: the values are float64, but it is float32. Pass dtype=\{"):
        dlx.convert(x, out=out)
    with pytest.raises(errors.LayoutError, match=r"at out: the values have shape \(3, 2\), but its shape is \(2, 3\)"):
        dlx.convert(x.T, out=out, dtype="float32")
    assert (np.asarray(dlx.convert(out, "numpy")) == 7).all()
    for source in (x, x.astype(">f8"), torch.from_numpy(x), memoryview(x)):
        assert (np.asarray(dlx.convert(dlx.convert(source, out=out, dtype="float32"), "numpy")) == x).all()
    assert (
        np.asarray(dlx.convert(dlx.convert(x.astype("i4"), out=out, dtype={"int32": "float32"}), "numpy")) == x
    ).all()


def refused(np, torch):
    """Yield (output, error, words) of arrays of shape (2, 2) that are never written to."""
    readonly = np.ones((2, 2), "f4")
    readonly.flags.writeable = False
    yield readonly, errors.ReadOnlyError, "read-only"
    yield readonly.astype(">f4").view(readonly.__class__), None, ""
    swapped = readonly.astype(">f4")
    swapped.flags.writeable = False
    yield swapped, errors.ReadOnlyError, "read-only"
    yield torch.zeros(1).expand(2, 2), errors.LayoutError, "elements overlap"
    yield np.lib.stride_tricks.as_strided(np.zeros(4, "f4"), (2, 2), (4, 4)), errors.LayoutError, "elements overlap"
    yield torch.ones(2, 2, requires_grad=True), errors.ConversionError, "torch records it"
    yield torch.ones(2, 2, device="meta"), errors.LayoutError, "meta"
    yield np.array([["a", "b"]] * 2), errors.DTypeError, "text"
    yield "text", errors.AdapterNotFoundError, "not an array"


def test_what_is_refused(np, torch):
    """The error names the place in `out` and a fix."""
    jax_numpy = pytest.importorskip("jax.numpy")
    cases = [*refused(np, torch), (jax_numpy.ones((2, 2)), errors.ReadOnlyError, "never writable")]
    for out, kind, words in cases:
        if kind is None:
            continue
        for call in (
            lambda out=out: dlx.convert(np.zeros((2, 2), "f4"), out=out),
            lambda out=out: dlx.convert({"a": [np.zeros((2, 2), "f4")]}, out={"a": [out]}),
            lambda out=out: dlx.stack(np.zeros((2, 2), "f4"), out=out),
        ):
            with pytest.raises(errors.DlxError) as caught:
                call()
            if isinstance(out, str):
                continue  # in a tree, text passes through
            assert isinstance(caught.value, kind) and words in str(caught.value), str(caught.value)
            assert "at out" in str(caught.value)
    with pytest.raises(errors.ReadOnlyError):
        dlx.convert(b"ab", out=b"cd")


def test_autograd_knows_of_the_write(np, torch):
    """The version counter grows, so that a gradient that needs the old values is refused; parameters inside no_grad."""
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    y = (w * x).sum()
    dlx.convert(np.full(3, 100, "f4"), out=x)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.backward()
    y = (w * x).sum()
    dlx.stack([np.float32(1)] * 3, out=x)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.backward()
    with torch.no_grad():
        assert dlx.convert(np.full(3, 5, "f4"), out=w) is w
    assert w.tolist() == [5, 5, 5] and w.requires_grad and w.is_leaf
    with pytest.raises(errors.ConversionError, match="detach=True"):
        dlx.convert(w, out=np.zeros(3, "f4"))
    assert dlx.convert(w, out=np.zeros(3, "f4"), detach=True).tolist() == [5, 5, 5]


def test_gradients_are_not_dropped_by_a_pending_conjugation(np, torch):
    """A tensor that its framework copies is refused, too, unless detach=True."""
    z = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    for x in (z.conj(), z.conj().imag):
        out = np.full(2, 7, "c8" if x.is_complex() else "f4")
        for there in (out, torch.from_numpy(out)):
            with pytest.raises(errors.ConversionError, match="detach=True"):
                dlx.convert([x], out=[there])
        assert out.tolist() == [7, 7]
        assert dlx.convert(x, out=out, detach=True).tolist() == x.detach().tolist()


def test_a_producer_that_exports_copies(np):
    """Its values are read; what is written to such a copy would be lost."""

    class Copies:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options | {"copy": True})

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    for wrap in (lambda x: x, lambda x: [x]):
        out = np.zeros(2)
        dlx.convert(wrap(Copies(np.ones(2))), out=wrap(out))
        assert out.tolist() == [1, 1]
        with pytest.raises(errors.ReadOnlyError, match="its producer exports a copy of it"):
            dlx.convert(wrap(np.ones(2)), out=wrap(Copies(out)))


def test_a_zero_tensor_of_autograd(np, torch):
    """It has no memory; its framework copies it."""
    x = torch._efficientzerotensor(2)
    assert dlx.convert(x, out=np.ones(2, "f4")).tolist() == [0, 0]
    assert dlx.convert([x, x + 1], out=[np.ones(2, "f4"), torch.ones(2)])[0].tolist() == [0, 0]
    assert dlx.convert(x, out=np.ones(2), dtype="float64").tolist() == [0, 0]


def test_the_dtype_that_out_has_already(np):
    """The values fit without the option."""
    with pytest.raises(errors.DTypeError, match=r"values are float32, but it is float64\. Leave dtype out\."):
        dlx.convert(np.ones(2), out=np.ones(2), dtype="float32")


def test_all_or_nothing(np, torch):
    """One leaf that does not fit, anywhere: no leaf is written to."""
    tree = {"a": np.ones(3), "b": [torch.ones(2), (np.ones(1),)], "t": "text"}

    def outputs():
        return {"a": torch.zeros(3).double(), "b": [np.zeros(2, "f4"), (np.zeros(1),)], "t": None}

    assert dlx.convert(tree, out=outputs())["b"][1][0].tolist() == [1]
    odd = [
        ("b", [np.zeros(2, "f8"), (np.zeros(1),)]),
        ("b", [np.zeros(3, "f4"), (np.zeros(1),)]),
        ("b", [np.zeros(2, "f4"), ()]),
        ("b", [np.zeros(2, "f4"), (np.zeros(1), np.zeros(1))]),
        ("b", np.zeros(2, "f4")),
        ("b", [np.zeros(2, "f4"), (np.broadcast_to(0.0, 1),)]),
        ("c", np.zeros(1)),
    ]
    for key, value in odd:
        out = outputs() | {key: value}
        with pytest.raises(errors.DlxError) as caught:
            dlx.convert(tree, out=out)
        assert not out["a"].any() and str(caught.value).count("out"), str(caught.value)
    for one, other in ((np.ones(1), [np.ones(1)]), ([np.ones(1)], np.ones(1)), ({}, {}), ([1], [2])):
        with pytest.raises(errors.DlxError):
            dlx.convert(one, out=other)


def test_sources_that_overlap_with_outputs(np):
    """The result is as if all values had been read first; outputs that overlap each other are refused."""
    for source, there in itertools.product(
        (lambda x: x[:-1], lambda x: x[1:], lambda x: x[:0:-1], lambda x: x[:-1].astype("f8")), repeat=2
    ):
        x = np.arange(8.0)
        values, out = source(x), there(x)
        expected = values.copy()
        dlx.convert(values, out=out)
        assert (out == expected).all()
    x = np.arange(6.0)
    dlx.convert({"a": x[:3], "b": x[3:]}, out={"a": x[3:], "b": x[:3]})
    assert x.tolist() == [3, 4, 5, 0, 1, 2]
    dlx.convert([x[::2], x[1::2]], out=[x[1::2], x[::2]])
    assert x.tolist() == [4, 3, 0, 5, 2, 1]
    y = np.arange(4, dtype=">f8")
    dlx.convert([y[:2], y[2:]], out=[y[2:], y[:2]])
    assert y.tolist() == [2, 3, 0, 1]
    rows = np.arange(6.0).reshape(2, 3)
    assert dlx.stack([rows[1], rows[0]], out=rows).tolist() == [[3, 4, 5], [0, 1, 2]]
    assert dlx.stack([rows[0, :1], rows[1]], out=rows, pad=9).tolist() == [[3, 9, 9], [0, 1, 2]]
    with pytest.raises(errors.LayoutError, match="shares memory with another"):
        dlx.convert([x[:3], x[3:]], out=[x[1:4], x[:3]])
    with pytest.raises(errors.LayoutError, match="two places"):
        dlx.convert([x[:3], x[3:]], out=[x[:3]] * 0 + [(z := np.zeros(3)), z])
    same = np.ones(2)
    assert dlx.convert([same, same], out=[z[:2], z[1:]] and [(w := np.zeros(2)), w])[0].tolist() == [1, 1]


def test_generated_trees(np, torch, monkeypatch):
    """Trees of plain arrays are written without `Tree`: same values, or the same error and no write."""
    import random

    random.seed(0)
    dtypes, taken = ["f4", "f8", ">f4"], []

    def place(memory):
        """Return a new array over some of the memory, or another leaf."""
        start, step, count = random.randrange(40), random.choice([1, 1, 1, 2, -1, 0]), random.randrange(4)
        array = memory[8 * start :].view(random.choice(dtypes[:1] * 4 + dtypes))[: 2 * count]
        array = np.lib.stride_tricks.as_strided(array[:1], (2,), (0,)) if step == 0 and count else array[:: step or 1]
        leaf = torch.from_numpy(array) if random.random() < 0.3 and array.dtype.isnative and step > 0 else array
        return random.choice([leaf] * 20 + [3, "text", bytearray(4), None, dlx.convert(bytearray(4), "dlx")])

    def grow(memory, depth=2):
        n = random.randrange(1, 4)
        kind = random.choice([list, tuple, dict, None]) if depth else None
        if kind is None:
            return place(memory)
        return (
            kind(enumerate(grow(memory, depth - 1) for _ in range(n)))
            if kind is dict
            else kind(grow(memory, depth - 1) for _ in range(n))
        )

    quick = output._fill_tree
    monkeypatch.setattr(output, "_fill_tree", lambda *args: taken.append(quick(*args)) or taken[-1])
    for seed in range(3000):
        found = []
        for is_quick in (True, False):
            random.seed(seed)
            memory, other = np.arange(48, dtype="f8").view("u1"), np.full(48, 7.0).view("u1")
            state = random.getstate()
            obj = grow(memory)
            random.setstate(state)
            out = grow(memory if seed % 3 == 0 else other)
            if seed % 5 == 0 and type(out) is list:
                out.append(grow(other))
            with monkeypatch.context() as patch:
                if not is_quick:
                    patch.setattr(output, "_fill_tree", lambda *args: False)
                try:
                    dlx.convert(obj, out=out, dtype=(None, "float32", {"float32": "float64"})[seed % 7 % 3])
                    error = None
                except Exception as caught:
                    error = type(caught), str(caught)
            found.append((error, memory.tobytes(), other.tobytes(), repr(out)))
        assert found[0] == found[1], seed
    assert 200 < sum(taken) < len(taken)


def test_trees_of_plain_arrays_with_odd_leaves(np):
    """A class that cannot be hashed passes through; an array at two places gets one, even without elements."""

    class Meta(type):
        def __eq__(self, other):
            return self is other

    out = [np.zeros(3), Meta("Odd", (), {})()]
    assert dlx.convert([np.ones(3), Meta("Odd", (), {})()], out=out)[0].tolist() == [1, 1, 1]
    with pytest.raises(errors.LayoutError, match="an array of out has two places, and gets two arrays"):
        dlx.convert([np.zeros(0), np.zeros(0)], out=[out[0][:0]] * 2)


def test_containers_of_other_types_and_repeated_arrays(np, torch):
    """Places decide, not types; an array at two places is written to both."""
    from collections import namedtuple
    from dataclasses import dataclass

    @dataclass
    class Pair:
        a: object
        b: object

    one = np.arange(3.0)
    out = namedtuple("Out", "a b")(torch.zeros(3).double(), [np.zeros(3)])
    assert dlx.convert(Pair(one, (one,)), out=out) is out
    assert out.a.tolist() == out.b[0].tolist() == [0, 1, 2]
    cyclic, there = [one], [np.zeros(3)]
    cyclic.append(cyclic)
    there.append(there)
    assert dlx.convert(cyclic, out=there)[0].tolist() == [0, 1, 2]
    empty = ()
    for other in ([], {}, [empty, {"a": (1, "x")}], [[[]]]):  # containers without arrays need no counterpart
        there = {"a": np.zeros(3), "c": [np.zeros(3), empty]}
        assert dlx.convert({"a": one, "b": other, "c": [one, [empty]]}, out=there)["c"][0].tolist() == [0, 1, 2]


def test_a_capsule_is_not_consumed(np, torch):
    """Like dlx.stack, `out` only reads; a later conversion consumes it."""
    capsule = np.arange(3.0).__dlpack__()
    for out in (np.zeros(3), torch.zeros(3).double()):
        assert dlx.convert(capsule, out=out).tolist() == [0, 1, 2]
    assert dlx.stack([capsule, capsule], "numpy").tolist() == [[0, 1, 2]] * 2
    assert dlx.convert(capsule, "numpy").tolist() == [0, 1, 2]
    for options in ({"to": "numpy"}, {"out": np.zeros(3)}):
        with pytest.raises(errors.ConsumedError):
            dlx.convert(capsule, **options)


def test_invalid_calls(np):
    """`out` replaces the options that choose a target."""
    x = np.ones(2)
    for options in (
        {"to": "numpy"},
        {"like": x},
        {"device": "cpu"},
        {"lazy": True},
        {"copy": False},
        {"errors": "pass"},
    ):
        with pytest.raises(TypeError, match="convert takes out= without"):
            dlx.convert(x, out=x.copy(), **options)
    for invalid in ({"wait": False}, {"errors": "collect"}, {"lazy": 1}, {"copy": "x"}, {"detach": "no"}, {"strict": 3},
                    {"readonly": "x"}, {"wait": None}, {"errors": "x"}):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=next(iter(invalid))):
            dlx.convert(x, out=x.copy(), **invalid)
    for harmless in ({"copy": True}, {"detach": True}, {"strict": True}, {"readonly": "error"}):
        assert dlx.convert(x, out=np.zeros(2), **harmless).tolist() == [1, 1]
    with pytest.raises(TypeError, match="stack takes out= alone"):
        dlx.stack([x], "numpy", out=np.ones((1, 2)))
    with pytest.raises(TypeError, match="give either to="):
        dlx.stack([x])


def test_compound_arrays_are_refused(np, torch):
    """Their indices differ, and a csr array must not be written to a csc array: both sides name what to pass."""
    sp = pytest.importorskip("scipy.sparse")
    x = np.array([[1.0, 2, 0], [3, 0, 0], [0, 0, 0]])
    csr, csc, wide = sp.csr_array(x), sp.csc_array(x), sp.csr_array(np.eye(3, 5))
    for one, out in itertools.product((csr, csc, csr.tocoo(), {"a": csr}), (csr, csc, wide, [csc])):
        with pytest.raises(errors.LayoutError, match=r"at out.*: it is a cs[rc] array.* Pass to= instead of out=\."):
            dlx.convert(one, out=out)
    lists = pytest.importorskip("pyarrow").array([[1.0], [2.0, 3.0]])
    for one, out, fix in ((csr, np.zeros((3, 3)), "x.toarray()"), (lists, np.zeros(3), "Pass dlx.parts(x) instead.")):
        with pytest.raises(errors.LayoutError, match="out= takes dense ones") as caught:
            dlx.convert(one, out=out)
        assert fix in str(caught.value)
    assert dlx.convert(csr.toarray(), out=np.zeros((3, 3))).tolist() == x.tolist()
    out = {"data": np.zeros(3), "indices": np.zeros(3, "i4"), "indptr": np.zeros(4, "i4")}
    assert dlx.convert(dlx.parts(csr), out=out)["indices"].tolist() == [0, 1, 0]
    found = dlx.parts(lists, "numpy")
    assert (
        dlx.convert(found, out={"values": np.zeros(3), "offsets": np.zeros(3, found["offsets"].dtype)})["values"][2]
        == 3
    )


def test_nothing_leaks(np, torch):
    """Neither success nor failure keeps tensors."""
    gc.collect()
    live = native.live()
    out = {"a": torch.zeros(2).double(), "b": np.zeros(2, ">f8")}
    for _ in range(3):
        dlx.convert({"a": np.ones(2), "b": torch.ones(2).double()}, out=out)
        with pytest.raises(errors.DlxError):
            dlx.convert({"a": np.ones(3), "b": np.ones(2)}, out=out)
    gc.collect()
    assert native.live() == live


def test_memory_of_a_device(cuda, np):
    """It is read by a move; dlx.Tensors on a device are not written, and the error names out."""
    values = np.arange(6, dtype="f4").reshape(2, 3)
    there, out = dlx.convert(values, to="dlx", device="cuda"), np.zeros((2, 3), "f4")
    assert dlx.convert(there, out=out) is out and (out == values).all()
    for call in (
        lambda: dlx.convert(values, out=dlx.empty((2, 3), "float32", device="cuda")),
        lambda: dlx.stack([values], out=dlx.empty((1, 2, 3), "float32", device="cuda")),
    ):
        with pytest.raises(errors.LayoutError, match="at out"):
            call()
