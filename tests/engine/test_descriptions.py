"""Descriptions by the fast path (`FastPath.describe`) equal the adapter's, also in plans."""

from __future__ import annotations

import pytest
from support.arrays import layouts

import dlx
from dlx._engine.fast_path import export_and_describe
from dlx._engine.sources import array_info
from dlx._registry.lookup import source as source_of
from dlx._registry.registry import registry
from dlx.adapter import Container

TARGETS = ("numpy", "torch", "jax", "tvm_ffi", "pyarrow", "arrow", "dlx")
DTYPES = ("bool", "int8", "uint16", "int64", "float16", "float32", "complex64", "bfloat16", "float8_e4m3fn")


def of_numpy(np, torch):
    """Arrays of numpy by name."""
    shapes = {name: make(np, "float32") for name, make in layouts.LAYOUTS.items()}
    dtypes = {name: np.zeros((2, 3), name) for name in layouts.DTYPES}
    empty = {str(shape): np.zeros(shape, "f4") for shape in ((0,), (2, 0, 3), (0, 4))}
    (readonly := np.ones(3, "f4")).flags.writeable = False
    view = np.ones((4, 4), "f4")[1:]
    others = {"reversed": np.arange(6)[::-1], "read-only": readonly, "view": view, "swapped": np.ones(3, ">f4")}
    odd = np.zeros(12, "u1")[1:9].view("f4")
    more = {"odd": odd, "bytes": np.zeros(6, "u1"), "recarray": np.ones(2).view(np.recarray)}
    return shapes | dtypes | empty | others | more


def of_torch(np, torch):
    """Arrays of torch by name."""
    one = torch.ones(2, 3)
    plain = {name: torch.zeros(2, 3, dtype=getattr(torch, name)) for name in DTYPES if hasattr(torch, name)}
    views = {"t": one.t(), "slice": torch.ones(8)[2:6:2], "expanded": torch.ones(3, 1).expand(3, 4), "0-d": one[0, 0]}
    empty = {str(shape): torch.empty(shape) for shape in ((0,), (2, 0, 3))}
    complex_one = torch.ones(2, dtype=torch.complex64)
    blocked = {"grad": torch.ones(2, requires_grad=True), "conj": complex_one.conj(), "neg": complex_one.conj().imag}
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    return plain | views | empty | blocked | {"parameter": parameter}


def of_jax(np, torch):
    """Arrays of jax by name."""
    jnp = pytest.importorskip("jax.numpy")
    plain = {name: jnp.zeros((2, 3), name if name != "int64" else "int32") for name in DTYPES}
    deleted = jnp.ones(3)
    deleted.delete()
    return plain | {"0-d": jnp.float32(1), "empty": jnp.zeros((2, 0)), "t": jnp.ones((2, 3)).T, "deleted": deleted}


def of_tvm_ffi(np, torch):
    """Arrays of tvm_ffi by name."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    return {name: tvm_ffi.from_dlpack(each) for name, each in of_numpy(np, torch).items() if name in KEPT}


KEPT = ("0-d", "1-d", "3-d", "transposed", "sliced", "broadcast", "float16", "int8", "bool", "complex64", "(2, 0, 3)")


def of_pyarrow(np, torch):
    """Arrays of pyarrow by name."""
    pa = pytest.importorskip("pyarrow")
    plain = {name: pa.array(np.zeros(5, name)) for name in layouts.DTYPES if not name.startswith("complex")}
    chunked = pa.chunked_array([pa.array([1, 2]), pa.array([3])])
    more = {"slice": pa.array([1, 2, 3, 4])[1:3], "empty": pa.array([], pa.float32()), "nulls": pa.array([1, None])}
    tensor = pa.Tensor.from_numpy(np.ones((2, 3)))
    return plain | more | {"one chunk": pa.chunked_array([pa.array([1.5, 2])]), "chunks": chunked, "tensor": tensor}


def of_dlx(np, torch):
    """Arrays of dlx by name."""
    kept = [(name, each) for name, each in of_numpy(np, torch).items() if name in (*KEPT, "read-only", "reversed")]
    return {name: dlx.convert(each, to="dlx") for name, each in kept}


SOURCES = {"numpy": of_numpy, "torch": of_torch, "jax": of_jax, "tvm_ffi": of_tvm_ffi, "pyarrow": of_pyarrow}
SOURCES["dlx"] = of_dlx


def say(function, *args, **options):
    """Return the result of a function, or its error, as text."""
    try:
        return function(*args, **options)
    except dlx.errors.DlxError as error:
        return type(error), str(error)


def plain(plan):
    """A plan without the error object, of which there is one a plan."""
    return plan._replace(error=str(plan.error))


@pytest.mark.parametrize("source", SOURCES)
def test_the_fast_path_describes_as_the_adapter_does(np, torch, source):
    """Every field is equal, for every dtype and layout; arrays with blockers are described by the adapter."""
    described = 0
    for name, array in SOURCES[source](np, torch).items():
        described += export_and_describe(array) is not None
        assert say(dlx.describe, array) == say(lambda array: array_info(*source_of(array)), array), name
    assert described >= 8


@pytest.mark.parametrize("source", SOURCES)
def test_plans_by_the_fast_path_are_those_of_the_complete_way(np, torch, monkeypatch, source):
    """They agree for every target and option; a second plan of the same layout equals the first."""
    found = SOURCES[source](np, torch)
    targets = [to for to in TARGETS if to in ("numpy", "torch", "dlx", "arrow") or _there(to)]
    calls = [{}, {"copy": True}, {"copy": False}, {"readonly": "share"}, {"readonly": "error"}, {"device": "cpu"}]
    first = {}
    for name, array in found.items():
        for to in targets:
            for i, options in enumerate(calls):
                once = plain(dlx.plan(array, to=to, **options))
                assert plain(dlx.plan(array, to=to, **options)) == once
                first[name, to, i] = once
    monkeypatch.setattr("dlx._engine.preview.export_and_describe", lambda obj: None)
    for name, array in found.items():
        for to in targets:
            registry.target(to).decisions.clear()
            for i, options in enumerate(calls):
                assert first[name, to, i] == plain(dlx.plan(array, to=to, **options)), (name, to, options)


def _there(package):
    try:
        __import__(package)
    except ImportError:
        return False
    return True


def test_plans_that_are_kept_tell_layouts_and_options_apart(np):
    """Plans for a consumer that copies read-only memory have the bytes of their array, and no address."""
    torch = pytest.importorskip("torch")
    assert torch is not None
    for n in range(1, 200):  # more than are kept
        (array := np.ones(n, "f4")).flags.writeable = False
        plan = dlx.plan(array, to="torch")
        assert (plan.outcome, plan.nbytes, plan.source.shape) == ("copied", 4 * n, (n,))
        assert dlx.plan(array, to="torch", readonly="share").outcome == "shared"
        assert dlx.plan(array, to="torch", copy=False).outcome == "refused"


def test_nothing_is_made_unresizable_or_called_by_a_plan(np, torch):
    """A plan and a description leave a torch tensor's storage as it was."""
    tensor = torch.ones(4)
    dlx.describe(tensor), dlx.plan(tensor, to="numpy")
    assert tensor.untyped_storage().resizable()


def test_a_kept_decision_copies_each_array_anew(np, torch):
    """The Python path reuses the decision of a plan or of an earlier conversion of the same layout."""
    convert = dlx.convert.__wrapped__
    arrays = [np.full(5, n, "f4")[::-1] for n in range(3)]
    assert dlx.plan(arrays[0], to="torch").outcome == "copied"
    made = [convert(array, to="torch") for array in (*arrays, arrays[0])]
    assert [each.tolist() for each in made] == [[n] * 5 for n in (0, 1, 2, 0)]
    assert len({each.data_ptr() for each in made}) == 4
    made[3][:] = 9
    assert (made[0].tolist(), arrays[0].tolist()) == ([0] * 5, [0] * 5)
    with pytest.raises(dlx.errors.CopyRequiredError):
        convert(arrays[0], to="torch", copy=False)


def own_tree(np, monkeypatch):
    """An array with `__dlx_tree__`."""

    class OfArray(np.ndarray):
        def __dlx_tree__(self):
            return {"a": np.asarray(self)}, lambda children: children

    return np.arange(3.0).view(OfArray)


def declared(np, monkeypatch):
    """An array of a type that an adapter declares as a container."""

    class Declared(np.ndarray):
        pass

    container = Container(
        types=("tests:Declared",),
        kind="mapping",
        flatten=lambda obj: (["a"], [np.asarray(obj)]),
        unflatten=lambda obj, keys, children, new_empty: dict(zip(keys, children, strict=True)),
    )
    known = registry.declared_handlers
    monkeypatch.setattr(registry, "declared_handlers", lambda kind: [container] if kind is Declared else known(kind))
    return np.arange(3.0).view(Declared)


@pytest.mark.parametrize("to", ["numpy", "torch"])
@pytest.mark.parametrize("make", [own_tree, declared])
def test_an_array_that_is_a_container_stays_one(np, torch, monkeypatch, make, to):
    """It is taken apart by every verb, whichever came before."""
    array = make(np, monkeypatch)
    for call in (lambda: None, lambda: dlx.describe(array), lambda: dlx.convert(array, to=to, copy=True)):
        call()
        plan = dlx.plan(array, to=to)
        assert plan.outcome == "tree"
        for found in (plan.run(), dlx.convert(array, to=to), dlx.convert(array, to=to, copy=True)):
            assert type(found) is dict and type(found["a"]) is (np.ndarray if to == "numpy" else torch.Tensor)
            assert found["a"].tolist() == [0, 1, 2]
