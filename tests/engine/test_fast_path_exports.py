"""Fast paths of arrays that are exported, not borrowed: buffers, jax, pyarrow, tvm_ffi; of `like`, and of options."""

from __future__ import annotations

import array
import mmap

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.arrays.agreement import agree, bits, outcome, slow
from support.arrays.examples import examples

import dlx
from dlx._core import native

TARGETS = ("numpy", "torch", "dlx", "jax", "tvm_ffi", "pyarrow")
FORMATS = ("b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "f", "d", "?", "c", "n", "N")
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "copy": st.sampled_from([None, True, False]),
        "readonly": st.sampled_from(["copy", "error", "share"]),
        "detach": st.booleans(),
        "device": st.sampled_from([None, "cpu"]),
    },
)


def there(to):
    """Skip the test if a target is not installed."""
    if to != "dlx":
        pytest.importorskip(to)


@st.composite
def buffers(draw):
    """Functions that create the same buffer again."""
    nbytes = draw(st.sampled_from([0, 8, 16, 48]))
    data = bytes(i % 2 for i in range(nbytes))
    kind = draw(st.sampled_from(["bytes", "bytearray", "view", "cast", "sliced", "array", "mmap"]))
    letter = draw(st.sampled_from(FORMATS))
    step = draw(st.sampled_from([1, 2, -1]))

    def make():
        if kind in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[kind](data)
        if kind == "array":
            return array.array("d", [1.0] * (nbytes // 8))
        if kind == "mmap":
            block = mmap.mmap(-1, 64)
            block[:nbytes] = data
            return block
        view = memoryview(bytearray(data))
        if kind == "cast":
            return view.cast(letter)
        return view[::step] if kind == "sliced" else view

    return make


@pytest.mark.parametrize("to", TARGETS)
def test_buffers(to):
    """Buffers of the standard library fare alike on both paths."""
    there(to)

    @settings(max_examples=examples(100), deadline=None)
    @given(buffers(), OPTIONS)
    @example(lambda: bytearray(), {})
    def check(make, options):
        source = make()  # only one: jax shares aligned memory
        agree(lambda: source, to, **options)

    check()


def test_a_buffer_is_held_until_the_result_is_gone():
    """A bytearray cannot be resized while the result exists, but afterwards."""
    source = bytearray(8)
    for _ in range(2):
        result = dlx.convert(source, to="dlx")
        with pytest.raises(BufferError):
            source.append(1)
        del result
        source.append(1)
        source.pop()


def test_buffers_pass_through_trees():
    """Inside of a container a buffer is plain data, on the fast path as well."""
    source = bytearray(8)
    assert dlx.convert(source, to="dlx").nbytes == 8  # a route is there
    tensor = dlx.empty((2,), "float32")
    made = dlx.convert({"a": source, "b": [tensor, memoryview(source)]}, to="numpy" if _has("numpy") else "dlx")
    assert made["a"] is source and isinstance(made["b"][1], memoryview)
    view = dlx.convert([source], to="dlx", lazy=True)
    assert view[0] is source and view[0] is source


def _has(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


JAX = ("float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64", "uint16")


@pytest.mark.few(56)
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("dtype", JAX)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_jax_arrays(to, dtype, shape):
    """Both paths agree on jax arrays, whether or not buffers can represent their dtype."""
    jnp = pytest.importorskip("jax.numpy")
    there(to)
    make = lambda: jnp.ones(shape, dtype)  # noqa: E731
    for options in ({}, {"copy": True}, {"copy": False}, {"readonly": "share"}):
        agree(make, to, **options)
    deleted = make()
    deleted.delete()
    assert outcome(dlx.convert, deleted, to, {}) == outcome(slow, deleted, to, {})


def test_jax_arrays_stay_read_only():
    """A capsule of jax may claim to be writable; dlx's result is read-only."""
    jnp, numpy = pytest.importorskip("jax.numpy"), pytest.importorskip("numpy")
    for dtype in ("float32", "bfloat16"):
        source = jnp.ones(3, dtype)
        for _ in range(2):
            assert dlx.convert(source, to="dlx").readonly
            assert not dlx.convert(source, to="numpy").flags.writeable
    assert numpy is not None


def test_jax_takes_what_its_switches_say(np):
    """A route to jax is looked up again after x64 was switched."""
    jax = pytest.importorskip("jax")
    source = np.ones(3)
    before = jax.config.jax_enable_x64
    try:
        for _ in range(2):
            jax.config.update("jax_enable_x64", False)
            for _ in range(3):
                with pytest.raises(dlx.errors.DTypeError, match="x64"):
                    dlx.convert(source, to="jax")
            assert dlx.convert(source.astype("f4"), to="jax").dtype == "float32"
            jax.config.update("jax_enable_x64", True)
            for _ in range(3):
                assert dlx.convert(source, to="jax").dtype == "float64"
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("to", TARGETS)
def test_arrow_arrays(to):
    """Arrow's arrays fare alike on both paths: sliced, with nulls, empty, of bools."""
    pa = pytest.importorskip("pyarrow")
    there(to)
    numbers = [
        pa.array([1, 2, 3, 4], kind) for kind in (pa.int8(), pa.uint64(), pa.float32(), pa.float64(), pa.int32())
    ]
    odd = [pa.array([1, None, 3]), pa.array([True, False]), pa.array([], pa.float32()), pa.array(["a"]), pa.nulls(2)]
    for source in [*numbers, *(each[1:3] for each in numbers), *odd]:
        for options in ({}, {"copy": True}, {"copy": False}, {"readonly": "error"}):
            agree(lambda source=source: source, to, **options)


@pytest.mark.parametrize("to", TARGETS)
def test_tensors_of_tvm_ffi(np, to):
    """tvm_ffi's tensors fare alike on both paths, and so does one whose handle was moved away."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    there(to)
    block = np.arange(24, dtype="f4").reshape(4, 6)
    for source in (block, block.T, block[::2, 1:], block[0, 0:1].reshape(()), block[:0], block.astype("i8")):
        for options in ({}, {"copy": True}, {"copy": False}):
            agree(lambda source=source: tvm_ffi.from_dlpack(source), to, **options)
    moved = tvm_ffi.Tensor.__new__(tvm_ffi.Tensor)
    assert outcome(dlx.convert, moved, to, {}) == outcome(slow, moved, to, {})


def test_a_moved_handle_takes_no_memory_away(np, torch):
    """The result keeps the memory even if its tensor gets another handle."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    source = tvm_ffi.from_dlpack(np.arange(1000.0))
    result = dlx.convert(source, to="torch")
    other = tvm_ffi.Tensor.__new__(tvm_ffi.Tensor)
    other.__move_handle_from__(source)
    del other, source
    assert result.tolist() == list(range(1000))


@pytest.mark.parametrize("to", ["numpy", "dlx", "tvm_ffi"])
@pytest.mark.parametrize("detach", [False, True])
def test_graphs(np, torch, to, detach):
    """Both paths remove gradients with detach=True, and refuse without it."""
    there(to)
    for make in (
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(2, 2)),
        lambda: torch.ones(3, requires_grad=True) * 2,
        lambda: torch.ones(2, dtype=torch.complex64, requires_grad=True).conj(),
        lambda: torch.ones(3),
    ):
        agree(make, to, detach=detach)


EXTENSIONS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "complex32", "float16")


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("name", EXTENSIONS)
def test_dtypes_that_are_viewed(np, torch, name):
    """Numpy imports a storage dtype and views it as the real one; both paths also convert it back."""
    pytest.importorskip("ml_dtypes")
    dtype = getattr(torch, name, None)
    if dtype is None:
        return
    for shape in ((), (3,), (2, 0), (2, 3)):
        tensor = torch.ones(shape, dtype=dtype) if name != "complex32" else torch.zeros(shape, dtype=dtype)
        for options in ({}, {"copy": True}, {"copy": False}):
            agree(lambda tensor=tensor: tensor, "numpy", **options)
            source = slow(tensor, to="numpy")
            agree(lambda source=source: source, "torch", **options)
            agree(lambda source=source: source, "dlx", **options)
        again = dlx.convert(dlx.convert(tensor, to="numpy"), to="torch")
        assert again.dtype == dtype and again.shape == tensor.shape


def test_a_consumer_that_cannot_view_is_named(np, monkeypatch):
    """An adapter whose `viewed` fails is an error with both names, and nothing leaks."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    source = dlx.convert(np.ones(3, ml_dtypes.int4), to="dlx")  # numpy cannot register it, so it is viewed
    adapter = dlx.adapters()["numpy"]

    def fails(array, dtype):
        raise RuntimeError("no view")

    live = native.live()
    native.routes_clear()
    monkeypatch.setattr(type(adapter.dtypes), "viewed", lambda self, array, dtype: fails(array, dtype))
    try:
        for _ in range(2):
            with pytest.raises(dlx.errors.ConversionError, match="no view"):
                dlx.convert(source, to="numpy")
    finally:
        monkeypatch.undo()
        native.routes_clear()
    assert native.live() == live


class Own(Exception):
    """Raised by a subclass."""


def test_subclasses_of_numpy(np, torch):
    """Subclasses take the fast path, unless they export themselves, hold a mask, or may hold a unit."""

    class Plain(np.ndarray):
        __slots__ = ()

    class Noted(np.ndarray):
        pass

    class Exporting(np.ndarray):
        def __dlpack__(self, **options):
            raise Own

    class Answering(np.ndarray):
        __slots__ = ()

        def __getattr__(self, name):
            if name == "units":
                return "m"
            raise AttributeError(name)

    def locked(array):
        array.flags.writeable = False
        return array

    for view in (np.matrix, np.recarray, np.memmap, Plain, Noted, Exporting, np.ma.MaskedArray, Answering):
        for to in ("torch", "dlx", "numpy"):
            agree(lambda view=view: np.ones((2, 2), "f4").view(view), to)
            agree(lambda view=view: locked(np.ones((2, 2), "f4").view(view)), to)
    for view in (Plain, Noted, np.recarray, np.memmap, np.matrix):
        assert dlx.convert._borrow(np.ones(3).view(view), "torch") is not None
    for view in (Exporting, np.ma.MaskedArray, Answering):
        assert dlx.convert._borrow(np.ones(3).view(view), "torch") is None
    assert dlx.convert._borrow(locked(np.ones(3).view(Noted)), "dlx") is not None


@pytest.mark.parametrize("name", ["mask", "unit", "units"])
@pytest.mark.parametrize("to", ["torch", "dlx", "numpy"])
def test_an_attribute_that_says_what_elements_mean(np, torch, name, to):
    """It is looked for in each array, also where arrays of the type went the fast path before."""

    class Noted(np.ndarray):
        pass

    def noted(view, value):
        array = np.ones((2, 2), "f4").view(view)
        setattr(array, name, value)
        return array

    for view in (Noted, np.memmap):
        for value in (None, "m", "", 0, np.zeros((2, 2), bool)):
            agree(lambda view=view, value=value: noted(view, value), to)
            taken = dlx.convert._borrow(noted(view, value), to) is not None
            assert taken == (value is None or to == "numpy")  # an array that is already there stays
        if to != "numpy":
            with pytest.raises(dlx.errors.ConversionError):
                dlx.convert([noted(view, None), noted(view, "")], to=to)
    Noted.unit = "m"
    assert dlx.convert._borrow(np.ones(2).view(Noted), to) is None
    agree(lambda: np.ones(2).view(Noted), to)


def test_a_table_without_an_adapter(np, torch):
    """A type with a table is exported by its managed slot, even without `__dlpack__`."""
    table = dlx.Tensor.__dlpack_c_exchange_api__

    class Managed:
        __dlpack_c_exchange_api__ = native.buffer_exchange()

        def __init__(self, data):
            self.data = data

        def __buffer__(self, flags):  # from Python 3.12 on
            return memoryview(self.data)

    class Wrong:
        __dlpack_c_exchange_api__ = table

    class Sub(Managed):
        pass

    assert dlx.convert._borrow(Sub(b"abc"), "torch") is None
    for _ in range(2):
        with pytest.raises(dlx.errors.DlxError):
            dlx.convert(Wrong(), to="torch")
        try:
            memoryview(Managed(b"abc"))
        except TypeError:  # Python 3.11
            with pytest.raises(dlx.errors.DlxError):
                dlx.convert(Managed(b"abc"), to="numpy")
        else:
            assert dlx.convert(Managed(b"abc"), to="numpy").tolist() == [97, 98, 99]
            assert slow(Managed(b"abc"), to="numpy").tolist() == [97, 98, 99]


# ---- like, from_dlpack, shares_memory --------------------------------------------------------------------------------


def _examples(np, torch):
    yield np.ones(2, "f4")
    locked = np.ones(2, "f4")
    locked.flags.writeable = False
    yield locked
    yield torch.ones(2)
    yield torch.ones(2, requires_grad=True)
    yield torch.nn.Parameter(torch.ones(2))
    yield torch.ones(2, device="meta")
    yield dlx.convert(np.ones(2, "f4"), to="dlx")
    yield bytearray(8)
    yield [np.ones(2)]
    yield "text"
    for name in ("jax.numpy", "tvm_ffi", "pyarrow"):
        try:
            module = __import__(name, fromlist=["x"])
        except ImportError:
            continue
        if name == "tvm_ffi":
            yield module.from_dlpack(np.ones(2, "f4"))
        else:
            yield module.array([1.0, 2.0])


def test_like(np, torch):
    """`like` names the framework and the device of an array, on both paths."""

    def result(convert, source, like):
        try:
            made = convert(source, like=like)
        except Exception as error:
            return type(error), getattr(error, "reason", str(error))
        if made is source or isinstance(made, list):
            return "same" if made is source else [type(each) for each in made]
        return type(made), str(dlx.describe(made).device)

    for source in _examples(np, torch):
        for like in _examples(np, torch):
            expected = result(slow, source, like)
            assert [result(dlx.convert, source, like) for _ in range(2)] == [expected] * 2, (source, like)


def test_from_dlpack_takes_no_trees_and_no_options(np):
    """from_dlpack is convert(obj, to="dlx") of one array."""
    source = np.ones(3)
    for _ in range(2):
        assert dlx.from_dlpack(source).data_ptr == source.ctypes.data
        with pytest.raises(dlx.errors.AdapterNotFoundError):
            dlx.from_dlpack([source])
        for to in ("numpy", "arrow"):  # to which convert has routes
            dlx.convert(source, to)
            for options in ({"to": to}, {"like": source}, {"copy": True}):
                with pytest.raises(TypeError):
                    dlx.from_dlpack(source, **options)
            with pytest.raises(TypeError):
                dlx.from_dlpack(source, to)
        with pytest.raises(TypeError):
            dlx.from_dlpack()
    assert dlx.from_dlpack.__name__ == "from_dlpack" and dlx.from_dlpack(obj=source).shape == (3,)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_shared_memory_is_found_alike(data):
    """The answer in C is the one of the whole examination."""
    np = pytest.importorskip("numpy")
    block = np.arange(64, dtype="u1")

    def draw():
        start = data.draw(st.integers(0, 40))
        shape = data.draw(st.lists(st.integers(0, 3), min_size=0, max_size=2))
        strides = data.draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
        return np.lib.stride_tricks.as_strided(block[start:], shape, strides)

    one, other = draw(), draw()
    expected = bool(np.shares_memory(one, other))
    assert dlx.shares_memory(one, other) == expected
    assert dlx.convert._overlap(one, other) in (None, expected)
    assert dlx.shares_memory(dlx.convert(one, to="dlx"), other) == expected


# ---- generic producers -----------------------------------------------------------------------------------------------


def test_a_type_that_nobody_claims_is_looked_up_once(np, monkeypatch):
    """The look-up is repeated after imports and registrations; a protocol added later is found."""
    from abc import ABC

    from dlx._registry.registry import registry

    class Producer:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    class Later:
        pass

    asked, find = [], registry.owner
    dlx.convert(Producer(np.ones(2)), to="numpy")
    monkeypatch.setattr(registry, "owner", lambda kind: asked.append(kind) or find(kind))
    for _ in range(3):
        dlx.convert(Producer(np.ones(2)), to="numpy")
    assert asked.count(Producer) <= 1
    before = asked.count(Producer)

    class Base(ABC):  # noqa: B024
        pass

    Base.register(Producer)
    dlx.convert(Producer(np.ones(2)), to="numpy")
    assert asked.count(Producer) > before

    for _ in range(2):
        with pytest.raises(dlx.errors.AdapterNotFoundError):
            dlx.convert(Later(), to="numpy")
    Later.__dlpack__ = lambda self, **options: np.ones(2).__dlpack__(**options)
    assert dlx.convert(Later(), to="numpy").tolist() == [1, 1]


def test_containers_of_others(np, torch):
    """Both paths convert tvm_ffi's containers to lists and dicts, with one result per tensor."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    one, other = (tvm_ffi.from_dlpack(np.arange(float(n))) for n in (3, 4))
    sources = [
        tvm_ffi.convert([one, other, one]),
        tvm_ffi.convert([]),
        tvm_ffi.convert([one, 1, "a"]),
        tvm_ffi.convert([[one], other]),
        tvm_ffi.Map({"a": one, "b": other, "c": one}),
        tvm_ffi.Map({1: one}),
    ]
    for source in sources:
        for to in ("torch", "numpy", "dlx", "tvm_ffi"):
            made, expected = (convert(source, to=to) for convert in (dlx.convert, slow))
            assert type(made) is type(expected) and len(made) == len(expected)
            pairs = zip(_leaves(made), _leaves(expected), strict=True)
            assert all(type(x) is type(y) and bits_of(x) == bits_of(y) for x, y in pairs)
    for to in ("torch", "numpy", "dlx"):
        first, second, third = dlx.convert(sources[0], to=to)
        assert first is third and first is not second
    with pytest.raises(dlx.errors.DlxError, match=r"obj\[1\]"):
        dlx.convert(tvm_ffi.convert([one, tvm_ffi.from_dlpack(np.ones(2, "c16")), one]), to="pyarrow")


def _leaves(tree):
    for child in tree.values() if hasattr(tree, "keys") else tree:
        yield from _leaves(child) if isinstance(child, list) or hasattr(child, "keys") else [child]


def bits_of(leaf):
    """The bytes of an array; other objects as text."""
    return bits(leaf) if hasattr(leaf, "__dlpack__") else str(leaf)
