"""Devices and commitment of jax arrays: those of `jnp.asarray`, unless the call names a device."""

from __future__ import annotations

import os

import pytest

import dlx
from dlx import errors

jax = pytest.importorskip("jax")
np = pytest.importorskip("numpy")
jnp = jax.numpy

FOUR = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}

COMMON = """
import tempfile, pathlib
import jax, jax.numpy as jnp, numpy as np, dlx
from dlx import errors
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def aligned(values, offset=0):
    values = np.asarray(values)
    block = np.zeros(values.nbytes + 128, np.uint8)
    start = -block.ctypes.data % 64 + offset
    made = block[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made

def place(x):
    return x.devices(), x.committed

D = jax.devices()
x = aligned(np.arange(8, dtype="f4"))
sources = {
    "aligned": x,
    "unaligned": aligned(np.arange(8, dtype="f4"), 4),
    "strided": aligned(np.arange(16, dtype="f4"))[::2],
    "read-only": aligned(np.arange(8, dtype="f4")),
    "0-d": aligned(np.float32(1)),
    "empty": np.zeros((0, 3), "f4"),
    "bool": aligned(np.ones(8, bool)),
    "big-endian": np.arange(8, dtype=">f4"),
    "buffer": bytearray(64),
    "dlx": dlx.convert(x, to="dlx"),
}
sources["read-only"].flags.writeable = False
try:
    import ml_dtypes
    sources |= {name: np.ones(4, getattr(ml_dtypes, name)) for name in ("bfloat16", "int4", "float4_e2m1fn")}
except ImportError:
    pass
try:
    import torch
    sources |= {"torch": torch.arange(8.0), "torch bfloat16": torch.ones(8, dtype=torch.bfloat16)}
except ImportError:
    pass

def roads(source):
    yield "convert", lambda: dlx.convert(source, to="jax")
    yield "again", lambda: dlx.convert(source, to="jax")
    yield "copy", lambda: dlx.convert(source, to="jax", copy=True)
    yield "type", lambda: dlx.convert(source, to=jax.Array)
    yield "stack", lambda: dlx.stack([source, source], "jax")
    yield "like", lambda: dlx.convert(source, like=jnp.zeros(1))
    yield "using", lambda: dlx.using("jax")(lambda a: found.append(a))(source) or found.pop()
    if isinstance(source, bytearray):
        return  # it passes through in containers
    yield "list", lambda: dlx.convert([source], to="jax")[0]
    yield "dict", lambda: dlx.convert({"a": (source, 1)}, to="jax", readonly="error")["a"][0]
    yield "view", lambda: dlx.convert([source], to="jax", lazy=True)[0]

found = []
"""

PLAIN = """
file = pathlib.Path(tempfile.mkdtemp()) / "x.npy"
np.save(file, x)
for default in (None, D[2], D[0], "cpu"):
    jax.config.update("jax_default_device", default)
    for inner in (None, D[3]):
        with jax.default_device(inner) if inner is not None else jax.default_device(default):
            expected = place(jnp.asarray(x))
            assert expected == ({inner or (D[2] if default is D[2] else D[0])}, False)
            for name, source in sources.items():
                for road, make in roads(source):
                    if isinstance(source, bytearray) and road == "using":
                        continue  # a buffer is passed as it is
                    made = make()
                    assert place(made) == expected, (default, inner, name, road, place(made))
            with dlx.share(x) as handle:
                assert place(dlx.attach(handle, "jax")) == expected
            assert place(dlx.open(file, "jax")[""]) == expected
            shared = dlx.convert(x, to="jax", copy=False)
            assert place(shared) == expected and shared.unsafe_buffer_pointer() == x.ctypes.data
            assert shared.tolist() == x.tolist()
jax.config.update("jax_default_device", None)
w = jax.device_put(jnp.ones((4, 8)), NamedSharding(Mesh(np.array(D), ("x",)), P("x")))
assert (w * dlx.convert(x, to="jax")).sharding.device_set == set(D)
print("done")
"""

NAMED = """
for default in (None, D[2]):
    with jax.default_device(default):
        for device in D:
            for name, source in sources.items():
                made = dlx.convert(source, to="jax", device=device)
                assert place(made) == ({device}, True), (name, device, place(made))
                for example in (jax.device_put(jnp.zeros(2), device),):
                    assert place(dlx.convert(source, like=example)) == ({device}, True)
            assert place(dlx.stack([x, x], "jax", device=device)) == ({device}, True)
            assert place(dlx.convert([x], to="jax", device=device)[0]) == ({device}, True)
            assert place(dlx.convert([x], to="jax", device=device, lazy=True)[0]) == ({device}, True)
            assert place(dlx.convert(x, to="jax", device=f"cpu:{device.id}")) == ({device}, True)
        own = jnp.zeros(3)
        made = dlx.convert(own, to="jax", device="cpu")  # the device is named: it is committed, over the same memory
        assert place(made) == (own.devices(), True) and made.unsafe_buffer_pointer() == own.unsafe_buffer_pointer()
        assert dlx.plan(own, to="jax", device="cpu").outcome == "shared"
        assert dlx.convert(made, to="jax", device="cpu") is made and dlx.convert(own, to="jax") is own
        assert place(dlx.convert([own], to="jax", device="cpu")[0]) == (own.devices(), True)
        assert place(dlx.convert(x, to="jax", device="cpu")) == ({D[0]}, True)
mesh = Mesh(np.array(D), ("x",))
spread = jax.device_put(x, NamedSharding(mesh, P("x")))
for options in ({"to": "jax", "device": spread.sharding}, {"like": spread}):
    for call in (dlx.convert, lambda *a, **o: dlx.plan(*a, **o).run()):
        try:
            call(x, **options)
        except errors.DeviceError as error:
            assert "jax.device_put(result, sharding)" in str(error)
        else:
            raise AssertionError(options)
assert place(jax.device_put(dlx.convert(x, to="jax"), NamedSharding(mesh, P("x"))))[0] == set(D)
print("done")
"""

USING = """
torch_too = ["torch"] if "torch" in sources else []
for default in (None, D[2]):
    with jax.default_device(default):
        fresh = jnp.arange(4.0)
        for given in (fresh, *(jax.device_put(fresh, device) for device in D)):
            for target in ("numpy", "dlx", *torch_too):
                functions = {
                    "copy": lambda a: dlx.convert(a, to=target, copy=True),
                    "list": lambda a: [dlx.convert(a, to=target, copy=True), 1],
                    "lazy": lambda a: [dlx.convert(a, to=target, copy=True)],
                }
                for name, function in functions.items():
                    f = dlx.using(target, lazy=name == "lazy")(function)
                    for _ in range(3):
                        made = f(given)
                        made = made if name == "copy" else made[0]
                        assert place(made) == place(given), (target, name, place(made), place(given))
                        assert made.tolist() == [0, 1, 2, 3]
                def steps(a):
                    yield dlx.convert(a, to=target, copy=True)
                assert place(next(dlx.using(target)(steps)(given))) == place(given)
            for target in torch_too:
                bridge = dlx.using(target, grad=True)(lambda a: a * 2)
                made, pull = jax.vjp(bridge, given)
                for each in (bridge(given), made, *pull(fresh), jax.grad(lambda a: bridge(a).sum())(given)):
                    assert place(each) == place(given), (place(each), place(given))
                assert place(jax.jit(bridge)(given)) == place(jax.jit(lambda a: a * 2)(given))
        there = jax.device_put(fresh, D[1])
        add = dlx.using("numpy")(lambda a, b: a + b)
        for _ in range(3):
            assert add(fresh, there).committed and add(fresh, there).tolist() == [0, 2, 4, 6]
            assert place(add(fresh, fresh)) == place(fresh)
print("done")
"""

SPREAD = """
mesh = Mesh(np.array(D), ("x",))
square = Mesh(np.array(D).reshape(2, 2), ("a", "b"))
base = np.arange(64, dtype="f4").reshape(8, 8)
targets = ["numpy", "dlx", *[name for name in ("torch", "tvm_ffi") if __import__("importlib").util.find_spec(name)]]
specs = [(mesh, P()), (mesh, P("x")), (square, P("a")), (square, P("a", "b")), (square, P(None, "b")), (square, P())]
for over, spec in specs:
    for dtype in ("float32", "bfloat16", "int4", "bool"):
        s = jax.device_put(jnp.asarray(base).astype(dtype), NamedSharding(over, spec))
        whole = spec == P()
        assert s.is_fully_replicated == whole
        for target in targets:
            if target == "torch" and dtype == "int4":
                continue  # torch has none
            expected = dlx.convert(jnp.asarray(base).astype(dtype), to="numpy")
            plan = dlx.plan(s, to=target)
            for made in (
                dlx.convert(s, to=target),
                dlx.convert({"a": [s]}, to=target)["a"][0],
                dlx.convert([s], to=target, lazy=True)[0],
            ):
                assert np.array_equal(dlx.convert(made, to="numpy"), expected), (spec, dtype, target)
            if dtype == "float32" and target in ("numpy", "dlx"):
                assert plan.outcome == ("shared" if whole else "copied"), plan
                first = s.addressable_data(0).unsafe_buffer_pointer()
                assert (dlx.describe(dlx.convert(s, to=target)).address == first) is whole
                for call in (dlx.convert, lambda *a, **o: dlx.plan(*a, **o).run()):
                    try:
                        call(s, to=target, copy=False)
                        assert whole
                    except errors.DlxError as error:
                        assert not whole and isinstance(error, errors.CopyRequiredError)
                        assert "sharded over 4 devices" in str(error)
    s = jax.device_put(jnp.asarray(base), NamedSharding(over, spec))
    assert dlx.convert(s, to="jax") is s and dlx.convert([s], to="jax")[0] is s
    for device in D:
        made = dlx.convert(s, to="jax", device=device)
        assert place(made) == ({device}, True) and np.array_equal(made, base)
    assert dlx.shares_memory(s, dlx.convert(s, to="numpy")) == whole
    assert np.array_equal(dlx.stack([s, s], "numpy"), [base, base])
    with dlx.share({"a": s}) as handle:
        assert np.array_equal(dlx.attach(handle, "numpy")["a"], base)
    for _ in range(3):
        made = dlx.using("numpy")(lambda a: a + 1)(s)
        assert np.array_equal(made, base + 1) and not made.committed
    with dlx.borrow(s, readonly=True) as tensor:
        assert tensor.ndim == 2
    try:
        with dlx.borrow(s):
            raise AssertionError
    except (errors.ReadOnlyError, errors.CopyRequiredError):
        pass
assert dlx._core.native.live() <= 20
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [PLAIN, NAMED, USING, SPREAD], ids=["plain", "named", "using", "spread"])
def test_four_devices(python, code):
    """All ways, sources, default devices, named devices, `using` and sharded arrays give the right placement."""
    assert python(COMMON + code, args=(), env=FOUR) == "done\n"


def test_one_device():
    """The array is uncommitted without a device, committed with one, over the same memory."""
    block = np.zeros(192, "uint8")
    x = block[-block.ctypes.data % 64 :][:64]
    for _ in range(2):
        free, held = dlx.convert(x, to="jax"), dlx.convert(x, to="jax", device="cpu")
        assert not free.committed and held.committed
        assert free.unsafe_buffer_pointer() == held.unsafe_buffer_pointer() == x.ctypes.data
        assert not dlx.convert(x, like=free).committed and dlx.convert(x, like=held).committed
    del free, held


def test_a_named_device_by_every_road():
    """Named devices work alone, in trees and views, in C and in Python; committed copies keep their order."""
    torch = pytest.importorskip("torch")
    block = np.zeros((9, 7), "f4")
    free = jnp.ones(3)
    for source in (block, block.T, block[:, ::-1], torch.ones(5, 3).T, torch.ones(4), dlx.convert(block, to="dlx")):
        for _ in range(2):
            for options, committed in (({"device": "cpu"}, True), ({}, False), ({"like": free}, False)):
                options = {"to": "jax", **options} if "like" not in options else options
                found = [
                    dlx.convert([source], **options)[0],
                    dlx.convert({"a": [source]}, **options)["a"][0],
                    dlx.convert([source], lazy=True, **options)[0],
                    dlx.convert.__wrapped__(source, **options),
                    dlx.convert(source, **options),
                ]
                for made in found:
                    assert np.array_equal(np.asarray(made), np.asarray(source))
                    row_major = made.format.layout.major_to_minor == tuple(range(made.ndim))
                    assert made.committed == (committed or not row_major)
    for order in ({"like": free}, {"to": "jax", "device": "cpu"}, {"like": free}):  # each decision is separate
        made = dlx.convert.__wrapped__(np.zeros((9, 7), "f4")[:, 1:].T, **order)
        assert made.committed == ("to" in order), order
        assert (made.format.layout.major_to_minor == (0, 1)) == ("like" in order)


@pytest.mark.few(9)
@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2", "float4_e2m1fn"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (3, 2, 1)])
def test_elements_of_less_than_a_byte(name, shape):
    """Numpy's sub-byte arrays convert to jax with a reported copy, and back unchanged."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, name)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 4
    plain = values.astype(dtype) if shape else np.array(1, dtype)
    for source in (plain, np.asfortranarray(plain), plain[..., ::-1] if shape else plain):
        made, plan = dlx.convert(source, to="jax"), dlx.plan(source, to="jax")
        assert made.dtype == jnp.asarray(source).dtype and made.shape == source.shape
        assert made.committed == any(step.do == "place" for step in plan.steps)
        assert not made.committed or not source.flags.c_contiguous
        assert np.asarray(made).astype("f4").tolist() == source.astype("f4").tolist()
        assert plan.outcome == "copied" and any("jax, which copies" in step.why for step in plan.steps)
        assert dlx.convert(source, to="jax", device="cpu").committed
        back = dlx.convert(made, to="numpy")
        assert back.dtype == source.dtype and back.astype("f4").tolist() == source.astype("f4").tolist()
        if source.size:
            with pytest.raises(errors.CopyRequiredError):
                dlx.convert(source, to="jax", copy=False)
        assert (
            jax.jit(lambda a, source=source: a + dlx.convert(source, to="jax").astype("float32"))(1.0).shape
            == source.shape
        )


def test_every_value_of_less_than_a_byte():
    """Every value is exact, from numpy and from dlx's packed memory."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, bits in (("int4", 4), ("uint4", 4), ("int2", 2), ("uint2", 2), ("float4_e2m1fn", 4)):
        dtype = getattr(ml_dtypes, name)
        source = np.arange(1 << bits, dtype="uint8").view(dtype).astype("f4").astype(dtype)
        made = dlx.convert(source, to="jax")
        assert np.asarray(made).astype("f4").tobytes() == source.astype("f4").tobytes()
        packed = dlx.convert(made, to="dlx")
        assert np.asarray(dlx.convert(packed, to="jax")).astype("f4").tobytes() == source.astype("f4").tobytes()


ORDERS = {
    "transposed": lambda x: x.T,
    "permuted": lambda x: np.moveaxis(x.reshape(2, 2, 4), 0, 2),
    "odd strides of extents of one": lambda x: x.reshape(1, 16).T,
    "row-major": lambda x: x,
}
OPERATIONS = [lambda a: a * 2, lambda a: a.T, lambda a: a.sum(0), lambda a: a[1:], lambda a: a @ a.T]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("options", [{}, {"copy": True}, {"device": "cpu"}], ids=str)
def test_other_orders_of_memory_have_the_right_values_in_every_operation(order, offset, options):
    """`jit` ignores the layout of uncommitted arrays: other orders are committed, and the plan says so."""
    block = np.zeros(256, "uint8")
    start = -block.ctypes.data % 64 + offset
    x = block[start : start + 64].view("f4").reshape(4, 4)
    x[...] = np.arange(16).reshape(4, 4)
    source = ORDERS[order](x)
    for _ in range(2):
        made, plan = dlx.convert(source, to="jax", **options), dlx.plan(source, to="jax", **options)
        inside = dlx.convert([source], to="jax", **options)[0]
        for array in (made, inside, dlx.using("jax")(lambda a: a + 0)(source), dlx.stack([source], "jax")[0]):
            for operation in OPERATIONS if source.ndim == 2 else ():  # `jit` compiles each once for every kind of array
                assert np.array_equal(np.asarray(jax.jit(operation)(array)), operation(source))
            assert np.array_equal(np.asarray(array + 1), source + 1) and np.array_equal(np.asarray(array), source)
        is_other = order in ("transposed", "permuted") and plan.outcome == "shared"
        assert made.committed == ("device" in options or is_other)
        assert any("row-major" in step.why for step in plan.steps) == (is_other and not options)


def test_copies_are_uncommitted_in_every_order(torch):
    """Copies of dlx for jax are row-major, for all calls, also from torch's column-major results."""
    source = torch.linalg.inv(torch.eye(3)[None].repeat(2, 1, 1) * 2)
    for array in (source.mT, source.mT[1], source[:, 1:].mT):
        made = dlx.convert(array, to="jax", copy=True)
        assert not made.committed and np.array_equal(np.asarray(jax.jit(lambda a: a * 2)(made)), array * 2)
