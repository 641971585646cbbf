"""Calls that stay on the fast path: options, arrays that are in the target already, and sources that users meet."""

import ctypes
import itertools
import sys
import types

import pytest
from support.arrays.agreement import agree, facts, outcome

import dlx
from dlx._core import native
from dlx._engine import fast_path
from dlx._registry.registry import registry

in_c = native.FastPathFunction(lambda *args, **options: NotImplemented, fast_path.learn, fast_path.consumer_failed)


def check(make, to, taken=True, **options):
    """Compare both paths; return whether the second call of the fast path needs Python."""
    agree(make, to, **options)
    assert (in_c(make(), to=to, **options) is not NotImplemented) == taken


@pytest.fixture
def locked(np):
    """Return a read-only array."""
    array = np.ones((2, 3), "f4")
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("to", ["torch", "numpy", "dlx", "tvm_ffi"])
@pytest.mark.parametrize("copy", [None, False, True])
def test_memory_that_is_shared_though_it_is_read_only(np, locked, to, copy):
    """`readonly="share"`, and the other two values."""
    pytest.importorskip(to)
    check(lambda: locked, to, readonly="share", copy=copy)
    if to in ("torch", "tvm_ffi"):
        check(lambda: locked, to, taken=copy is not False, copy=copy)
        check(lambda: locked, to, taken=copy is True, readonly="error", copy=copy)
    assert not locked.flags.writeable


def test_memory_of_jax_and_arrow_that_is_shared(torch):
    """All of it is read-only."""
    jnp, pa = pytest.importorskip("jax.numpy"), pytest.importorskip("pyarrow")
    for source in (jnp.arange(6.0), pa.array([1.0, 2.0])):
        check(lambda source=source: source, "torch", readonly="share")
        assert dlx.shares_memory(dlx.convert(source, to="torch", readonly="share"), source)
        assert not dlx.shares_memory(dlx.convert(source, to="torch"), source)


def test_a_read_only_producer_is_shared(np, torch, locked):
    """Its capsule is marked read-only."""

    class Producer:
        def __dlpack__(self, **options):
            return locked.__dlpack__(**options)

        def __dlpack_device__(self):
            return (1, 0)

    check(Producer, "torch", readonly="share")
    assert dlx.shares_memory(dlx.convert(Producer(), to="torch", readonly="share"), locked)


def test_an_array_that_stays_in_its_framework(np, torch):
    """The fast path returns or detaches it; Python moves it and resolves conjugation."""
    grad, conj = torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.complex64).conj()
    for make in (lambda: torch.ones(3), lambda: torch.ones(2, 3).T, lambda: torch.nn.Parameter(torch.ones(3))):
        check(make, "torch", device="cpu")
        check(make, "torch", detach=True)
    assert dlx.convert(grad, to="torch", device="cpu") is grad
    found = dlx.convert(grad, to="torch", detach=True)
    assert not found.requires_grad and dlx.shares_memory(found, grad)
    check(lambda: grad, "torch", detach=True)
    check(lambda: conj, "torch", taken=False, detach=True)
    check(lambda: torch.ones(3, device="meta"), "torch", taken=False, device="cpu")
    check(lambda: dlx.empty((2,), "float32"), "dlx", device="cpu")


def test_an_array_that_is_copied_in_its_framework(np, torch):
    """Its framework copies it, and only the adapter runs Python; arrays with blockers take the Python path."""
    for make in (lambda: np.ones((2, 3)), lambda: np.ones(3)[::-1], lambda: np.array(1.0), lambda: np.ones(3).T):
        check(make, "numpy", copy=True)
    locked = np.ones(3)
    locked.flags.writeable = False
    check(lambda: locked, "numpy", copy=True)
    check(lambda: np.ones(3, ">f4"), "numpy", taken=False, copy=True)
    for make in (lambda: torch.ones(3), lambda: torch.ones(2, 3).T, lambda: torch.nn.Parameter(torch.ones(3)).detach()):
        check(make, "torch", copy=True)
        check(make, "torch", copy=True, device="cpu")
        check(make, "torch", taken=False, copy=True, detach=True)
    check(lambda: torch.ones(3, requires_grad=True), "torch", taken=False, copy=True)
    check(lambda: torch.ones(3, dtype=torch.complex64).conj(), "torch", taken=False, copy=True)
    source = torch.ones(3)
    fresh = dlx.convert([source, source], to="torch", copy=True)
    assert fresh[0] is fresh[1] and not dlx.shares_memory(fresh[0], source)
    assert source.untyped_storage().resizable()


def test_a_tensor_of_dlx_that_is_copied():
    """The core copies it: the order of dimensions is kept, and the copy is writable."""
    base = dlx.empty((6,), "int16")
    permuted = dlx.from_pointer(base.data_ptr, (2, 3), "int16", strides=(1, 2), owner=base)
    for source in (dlx.empty((2, 3), "float32"), permuted, dlx.convert(b"abc", to="dlx"), dlx.empty((0, 3), "int8")):
        check(lambda source=source: source, "dlx", copy=True)
        fresh, again = in_c([source, {"again": source}], to="dlx", copy=True)
        assert again["again"] is fresh and not fresh.readonly and not dlx.shares_memory(fresh, source)
    packed = dlx.empty((4,), "int4")
    check(lambda: packed, "dlx", copy=True)


def test_empty_tensors_of_torch(np, torch):
    """They have no address; neither do tensors that claim to be empty."""
    for to in ("numpy", "dlx"):
        for make in (lambda: torch.empty(0, 3), lambda: torch.ones(3)[1:1], lambda: torch.empty(0, dtype=torch.int8)):
            check(make, to)
            assert len(in_c([make(), make()], to=to)) == 2
        check(lambda: torch._efficientzerotensor((0,)), to, taken=False)
        check(lambda: torch.empty(0, device="meta"), to, taken=False)
        check(lambda: torch.empty(0, requires_grad=True), to, taken=False)
    held = torch.empty(0)
    found = dlx.convert(held, to="numpy")
    assert not held.untyped_storage().resizable() and found.shape == (0,)
    seen = []
    torch.func.vmap(lambda x: (seen.append(in_c(x, to="numpy") is NotImplemented), x)[1])(torch.empty(3, 0))
    assert seen == [True]


@pytest.fixture
def copies(torch, monkeypatch):
    """Return the tensors that torch's adapter copies, in a list."""
    kind, seen = type(registry.target("torch").adapter), []
    copy = kind.copy

    def noted(self, obj, device=None):
        seen.append(obj)
        return copy(self, obj, device)

    monkeypatch.setattr(kind, "copy", noted)
    native.routes_clear()
    yield seen
    native.routes_clear()


def test_nothing_is_copied_before_the_whole_tree_was_looked_at(np, torch, copies):
    """One whose last array is left to Python is copied once, one that is refused not at all."""
    left, refused = torch.ones(3, requires_grad=True), np.array(["text"])
    for _ in range(2):  # the second call finds the routes
        dlx.convert([torch.ones(3), left], to="torch", copy=True)
        assert len(copies) == 2
        copies.clear()
        with pytest.raises(dlx.errors.DTypeError):
            dlx.convert([torch.ones(3), refused], to="torch", copy=True)
        assert copies == []
    tree = [torch.ones(3), torch.zeros(2), np.ones(3)]
    assert in_c(tree, to="torch", copy=True) is not NotImplemented
    assert len(copies) == 2


def test_a_copy_within_torch_leaves_a_lazy_clone_lazy(torch):
    """Borrowing a copy-on-write tensor would copy its memory."""
    if not hasattr(torch._C, "_is_cow_tensor"):
        pytest.skip("this torch has no copy-on-write tensors")
    dlx.convert(torch.ones(3), to="torch", copy=True)
    for wrap in (lambda tensor: tensor, lambda tensor: [tensor]):
        source = torch.ones(3)
        clone = torch._lazy_clone(source)
        dlx.convert(wrap(clone), to="torch", copy=True)
        assert torch._C._is_cow_tensor(clone) and torch._C._is_cow_tensor(source)


@pytest.mark.parametrize(
    "options", [{}, {"copy": True}, {"copy": False}, {"detach": True}, {"readonly": "share"}], ids=str
)
def test_an_example_is_as_good_as_a_name_and_a_device(np, torch, locked, options):
    """Both paths agree for each source and each example; an array that is refused by name is refused by example."""
    sources = {
        "objects": lambda: np.array([None]),
        "text": lambda: np.array(["a"]),
        "dates": lambda: np.array(["2026-11-27"], "M8[D]"),
        "records": lambda: np.zeros(2, "i4, f4"),
        "swapped": lambda: np.ones(3, ">f4"),
        "locked": lambda: locked,
        "reversed": lambda: np.ones((2, 3), "f4")[::-1],
        "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
        "recorded": lambda: torch.ones(2, requires_grad=True),
        "without data": lambda: torch.ones(2, device="meta"),
        "tensor": lambda: dlx.convert(np.ones(2, "f4"), to="dlx"),
        "bytes": lambda: bytearray(b"ab"),
    }
    examples = {"numpy": np.ones(1), "torch": torch.ones(1), "dlx": dlx.convert(np.ones(1), to="dlx")}
    for make in sources.values():
        for to, example in examples.items():
            assert agree(make, None, like=example, **options) == agree(make, to, device="cpu", **options)


def test_an_array_of_numpy_that_stays_there(np):
    """Arrays of objects are refused all the same."""
    for make in (
        lambda: np.ones((2, 3)),
        lambda: np.ones(3)[::-1],
        lambda: np.float32(1).reshape(()),
        lambda: np.ones(3).T,
    ):
        check(make, "numpy")
        check(make, "numpy", device="cpu")
        check(make, "numpy", detach=True)
    check(lambda: np.array([1, 2], ">i4"), "numpy", taken=False)
    with pytest.raises(dlx.errors.DTypeError):
        dlx.convert(np.array([object()]), to="numpy")
    with pytest.raises(dlx.errors.DTypeError):
        dlx.convert([np.ones(2), np.array([object()])], to="numpy")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_forward_mode_has_a_graph(torch):
    """Python detaches arrays that may have a tangent."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        check(lambda: dual, "torch", taken=False, detach=True)


def test_objects_that_stand_for_the_host(np, torch):
    """They are known from the first call on; Python reads all other descriptions of a device."""
    array = np.ones(3)
    for device in (torch.device("cpu"), torch.ones(1).device, dlx.Device("cpu")):
        check(lambda: array, "torch", device=device)
    check(lambda: array, "torch", taken=False, device="cpu:0")
    check(lambda: array, "torch", taken=False, device=torch.device("meta"))
    check(lambda: array, "torch", taken=False, device="cuda:7")


@pytest.mark.parametrize(
    "options", [{"device": "cpu"}, {"copy": True}, {"copy": False}, {"detach": True}, {"readonly": "share"}]
)
def test_trees_with_options(np, torch, options):
    """Trees accept the same options as arrays."""
    array, grad = np.ones(3), torch.ones(2, requires_grad=True)
    tree = {"a": [array, array], "b": (torch.ones(2), 3)}
    for convert in (dlx.convert, dlx.convert.__wrapped__):
        for to in ("torch", "dlx"):
            found = convert(tree, to=to, **options)
            assert found["a"][0] is found["a"][1] and found["b"][1] == 3
            shared = dlx.shares_memory(found["a"][0], array), dlx.shares_memory(found["b"][0], tree["b"][0])
            assert shared == ((False, False) if options.get("copy") else (True, True))
    assert in_c(tree, to="torch", **options) is not NotImplemented
    if "detach" in options:
        assert not in_c([grad], to="torch", **options)[0].requires_grad
        assert not in_c([grad], to="numpy", **options)[0].flags.owndata
    else:
        with pytest.raises(dlx.errors.ConversionError):
            dlx.convert([grad], to="numpy", **options)


@pytest.mark.parametrize("name", ["numpy", "torch", "dlx", "tvm_ffi", "jax", "committed"])
def test_trees_by_an_example(np, torch, locked, name):
    """Each array of a tree becomes what it becomes alone, in both paths; errors name its place."""
    kind = "jax" if name == "committed" else name
    example = dlx.convert(torch.ones(1), to=pytest.importorskip(kind))
    if name == "committed":
        jax = sys.modules["jax"]
        example = jax.device_put(example, jax.devices()[0])
    shared, recorded = np.ones((3, 2), "f4"), torch.ones(2, requires_grad=True)
    arrays = [shared, shared.T, locked, torch.ones(3), dlx.convert(np.ones(2, "f4"), to="dlx"), example, shared]
    if kind == "jax":
        jax = sys.modules["jax"]
        arrays[1:1] = [jax.numpy.ones(2), jax.device_put(jax.numpy.ones(2), jax.devices()[0])]
    for convert in (dlx.convert, dlx.convert.__wrapped__):
        found = convert({"a": arrays, "b": (arrays[:2], "text", 3)}, like=example)
        assert found["a"][0] is found["a"][-1] is found["b"][0][0] and found["b"][1:] == ("text", 3)
        for new, old in zip(found["a"], arrays, strict=True):
            alone = dlx.convert.__wrapped__(old, like=example)
            assert facts(new, old) == facts(alone, old)
            assert getattr(new, "committed", None) == getattr(alone, "committed", None)
        if kind != "torch":
            with pytest.raises(dlx.errors.ConversionError) as caught:
                convert({"a": [shared, recorded]}, like=example)
            assert caught.value.path == ("a", 1)
    if name in ("numpy", "torch", "dlx", "tvm_ffi"):
        assert in_c([arrays], like=example) is not NotImplemented


@pytest.mark.parametrize(
    "options", [{}, {"copy": True}, {"copy": False}, {"readonly": "share"}, {"readonly": "error"}, {"device": "cpu"}]
)
@pytest.mark.parametrize("dtype", [None, {"float64": "float32", "int64": "int32"}])
def test_trees_that_python_walks(np, torch, locked, options, dtype):
    """Each array becomes what it becomes alone."""
    wide = np.ones((3, 2))
    arrays = [
        wide,
        wide.T,
        wide[::-1],
        np.ones(3, "f4"),
        torch.ones(3),
        np.arange(3),
        locked,
        locked.T,
        np.array(["a"]),
    ]
    examples = {"torch": torch.ones(1), "numpy": np.ones(1), "dlx": dlx.convert(np.ones(1), to="dlx")}
    for array, to in itertools.product(arrays, ("torch", "numpy", "dlx", "tvm_ffi")):
        if to in examples or pytest.importorskip(to):
            options = options | {"dtype": dtype}
            expected = outcome(dlx.convert.__wrapped__, array, to, options)
            found = outcome(lambda x, **given: dlx.convert([x], strict=True, **given)[0], array, to, options)
            assert found == expected, (array, to)
            if to in examples and "device" not in options:
                like = options | {"like": examples[to]}
                found = outcome(lambda x, **given: dlx.convert([x], strict=True, **given)[0], array, None, like)
                assert found == outcome(dlx.convert.__wrapped__, array, None, like), (array, to)
    assert not locked.flags.writeable


def test_a_list_that_was_given_as_one_array(np):
    """It is a tree for other functions all the same."""
    with pytest.raises(dlx.errors.AdapterNotFoundError):
        dlx.from_dlpack([np.ones(2)])
    assert dlx.convert._borrow([np.ones(2)], "dlx") is None
    assert in_c([np.ones(2)], to="dlx") is not NotImplemented


def test_read_only_arrays_in_trees(locked, torch):
    """Memory is shared, copied or refused, according to the options."""
    shared = in_c([locked], to="torch", readonly="share")[0]
    assert dlx.shares_memory(shared, locked)
    assert not dlx.shares_memory(in_c([locked], to="torch")[0], locked)
    with pytest.raises(dlx.errors.ReadOnlyError):
        dlx.convert([locked], to="torch", readonly="error")


def test_what_passes_through_a_tree(np, torch):
    """Buffers and numpy's scalars, which are arrays at the root only."""
    scalar, buffer = np.float32(1), bytearray(3)
    found = in_c({"a": np.ones(2), "b": scalar, "c": [buffer]}, to="torch")
    assert found["b"] is scalar and found["c"][0] is buffer
    assert dlx.convert([scalar], to="torch")[0] is scalar


@pytest.mark.parametrize("to", ["torch", "numpy", "dlx"])
def test_scalars_of_numpy(np, to):
    """Each conversion copies a value, which `copy=False` forbids."""
    pytest.importorskip(to)
    for scalar in (np.float32(1.5), np.float64(2), np.int8(-3), np.bool_(True), np.complex64(1j)):
        check(lambda scalar=scalar: scalar, to)
        check(lambda scalar=scalar: scalar, to, taken=False, copy=False)
        check(lambda scalar=scalar: scalar, to, taken=False, copy=True)
    for other in (np.datetime64("2026-01-01"), np.str_("a"), np.bytes_(b"a")):
        check(lambda other=other: other, to, taken=False)


@pytest.mark.parametrize("to", ["torch", "numpy", "dlx"])
def test_arrays_of_ctypes(to):
    """Each length has a separate type."""
    pytest.importorskip(to)
    for kind in (ctypes.c_float, ctypes.c_uint8, ctypes.c_int64, ctypes.c_bool):
        check(lambda kind=kind: (kind * 6)(), to)
    check(lambda: ((ctypes.c_double * 3) * 2)(), to)
    check(lambda: (ctypes.c_float.__ctype_be__ * 2)(), to, taken=False)

    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_int))

    check(lambda: (Pair * 2)(), to, taken=False)


@pytest.mark.parametrize("to", ["torch", "numpy", "dlx"])
def test_images_of_pillow(to):
    """Each export is a copy."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip(to)
    for mode in ("L", "RGB", "F", "I"):
        check(lambda mode=mode: image.new(mode, (5, 4)), to)
        check(lambda mode=mode: image.new(mode, (5, 4)), to, taken=False, copy=False)
    check(lambda: image.new("1", (5, 4)), to, taken=image.new("1", (5, 4)).__array_interface__["typestr"] == "|b1")


@pytest.mark.parametrize("to", ["torch", "numpy", "dlx"])
def test_a_column_of_polars(monkeypatch, to):
    """A library of this name is planted."""
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip(to)

    class Series:
        def __init__(self, chunks):
            self.chunks = pa.chunked_array(chunks)

        def __arrow_c_stream__(self, requested_schema=None):
            return self.chunks.__arrow_c_stream__(requested_schema)

    planted = types.ModuleType("polars")
    planted.Series = Series
    Series.__module__ = "polars"
    monkeypatch.setitem(sys.modules, "polars", planted)
    check(lambda: Series([[1.0, 2.0, 3.0]]), to)
    check(lambda: Series([[1.0], [2.0, 3.0]]), to)
    with pytest.raises(dlx.errors.DTypeError):
        dlx.convert(Series([["text"]]), to=to)


@pytest.mark.few(8)
@pytest.mark.parametrize("to", ["numpy", "dlx", "torch"])
@pytest.mark.parametrize(
    "body",
    [
        "def detach(self): return super().detach(), 'mask'",
        "def detach(self): return 'abc'",
        "def untyped_storage(self): return self.as_subclass(torch.Tensor).clone().untyped_storage()",
        "def untyped_storage(self): return 5",
        "requires_grad = False",
        "dtype = torch.int8",
        "def is_conj(self): return 3",
    ],
)
def test_a_subclass_that_answers_for_itself(python, torch, body, to):
    """C calls no method that a subclass of torch.Tensor may override."""
    python(
        f"""
        import contextlib, numpy as np, torch, dlx

        class Own(torch.Tensor):
            {body}

        def made(*, grad):
            return torch.full((1000,), 7.0).as_subclass(Own).requires_grad_(grad)

        for options in ({{}}, {{"detach": True}}, {{"copy": True}}):
            for grad in (False, True):
                for tree in (False, True):
                    x = made(grad=grad)
                    said = []
                    for convert in (dlx.convert, dlx.convert.__wrapped__):
                        try:
                            y = convert([x] if tree else x, to={to!r}, **options)
                            said.append("done")
                        except dlx.errors.DlxError as error:
                            said.append(str(error))
                    assert said[0] == said[1], said
                    if said[0] == "done":
                        del x
                        others = [np.full(1000, 9.0, np.float32) for _ in range(50)]
                        y = y[0] if tree else y
                        if {to!r} != "torch":
                            assert dlx.convert(y, to="numpy").tolist() == [7.0] * 1000
        """,
        imported=True,
    )


@pytest.mark.parametrize("to", ["numpy", "dlx", "torch"])
def test_subclasses_of_tensors(torch, to):
    """Subclasses with torch's memory; overridden methods are called."""

    class Image(torch.Tensor):
        pass

    class Exporting(torch.Tensor):
        def __dlpack__(self, **options):
            return torch.zeros(3).__dlpack__(**options)

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    inside = to == "torch"
    for make in (lambda: torch.ones(2, 3), lambda: torch.ones(4)[::2]):
        check(lambda make=make: make().as_subclass(Image), to)
    check(lambda: torch.ones(2, requires_grad=True).as_subclass(Image), to, taken=inside)
    check(lambda: torch.ones(2, requires_grad=True).as_subclass(Image), to, detach=True)
    for own in (Exporting, Watching):
        check(lambda own=own: torch.ones(3).as_subclass(own), to, taken=False)
    check(lambda: torch.Tensor._make_wrapper_subclass(Wrapper, (2,)), to, taken=False)
    if not inside:
        with pytest.raises(dlx.errors.DlxError):
            dlx.convert(torch.nn.UninitializedParameter(), to=to)
    tensor = torch.ones(4).as_subclass(Image)
    kept = dlx.convert(tensor, to="dlx")
    with pytest.raises(RuntimeError, match="resize"):
        tensor.untyped_storage().resize_(0)
    assert kept.shape == (4,)
