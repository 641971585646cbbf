"""jax as source and target: exact or refused by name, sharing known in advance, read-only in both directions."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
import weakref

import pytest
from support.arrays.layouts import fill, same

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry.registry import registry

jax = pytest.importorskip("jax")
jnp = jax.numpy
np = pytest.importorskip("numpy")

WIDE = ("int64", "uint64", "float64", "complex128")
NARROW = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "float32", "complex64"),
)
EIGHTS = (
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


@pytest.fixture
def x64():
    """Run with 64-bit dtypes enabled."""
    with jax.enable_x64(True):
        yield


def aligned(array, offset=0):
    """Return a copy of an array at `offset` bytes after a multiple of 256, with the same order of dimensions."""
    block = np.zeros(array.nbytes + 512, np.uint8)
    start = -block.ctypes.data % 256 + offset
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    made = block[start : start + array.nbytes].view(array.dtype).reshape(array.shape, order=order)
    made[...] = array
    return made


def tensor(dtype, shape=(4,), strides=None, offset=0, readonly=False):
    """Return a dlx.Tensor of any dtype over consecutive bytes, at an offset from 256-byte alignment."""
    block = dlx.convert(bytearray(range(256)) * 2, to="dlx", copy=True)
    return native.tensor_new(
        block.data_ptr + offset, shape, strides, dlx.DType(dtype), (1, 0), 1 if readonly else 0, block
    )


def raw(tensor):
    """Return the bytes of a compact dlx.Tensor."""
    return ctypes.string_at(tensor.data_ptr, tensor.nbytes)


def bits(array):
    """Return the bytes of a jax array, row-major."""
    return np.asarray(array).tobytes()


def address(array):
    """Return the address of a jax or numpy array."""
    return array.unsafe_buffer_pointer() if isinstance(array, jax.Array) else array.ctypes.data


def comes_true(said):
    """Retry for a while: a jax thread may release a computation's arguments after its result is ready."""
    gc.collect()
    end = time.monotonic() + 30
    while not said() and time.monotonic() < end:
        time.sleep(0.001)
    return said()


# ---- sharing into jax ------------------------------------------------------------------------------------------------

LAYOUTS = {  # name -> (array, whether jax supports it)
    "0-d": (lambda dtype: fill(np, dtype, ()), True),
    "1-d": (lambda dtype: fill(np, dtype, (7,)), True),
    "3-d": (lambda dtype: fill(np, dtype, (2, 3, 4)), True),
    "F-order": (lambda dtype: np.asfortranarray(fill(np, dtype, (3, 4))), True),
    "size 1": (lambda dtype: fill(np, dtype, (3, 1, 2)), True),
    "40-d": (lambda dtype: fill(np, dtype, (1,) * 38 + (2, 3)), True),
}


def shown(array, layout):
    """Return another view of an aligned array."""
    return {
        "transposed": lambda: aligned(array).transpose(1, 2, 0),
        "every other": lambda: aligned(array)[..., ::2],
        "backwards": lambda: aligned(array)[::-1],
        "broadcast": lambda: np.broadcast_to(aligned(array)[:1], array.shape),
        "overlapping": lambda: np.lib.stride_tricks.as_strided(aligned(array), (4, 3), (array.itemsize,) * 2),
        "a part": lambda: aligned(array)[:, :2],
    }[layout]()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", NARROW)
def test_aligned_compact_memory_is_shared(dtype, layout):
    """Compact memory with 64-byte alignment is shared exactly, in any order of dimensions."""
    source = aligned(LAYOUTS[layout][0](dtype))
    result = dlx.convert(source, to="jax", copy=False)
    assert isinstance(result, jax.Array) and str(result.dtype) == dtype and result.shape == source.shape
    assert address(result) == address(source) and bits(result) == source.tobytes()
    assert dlx.plan(source, to="jax").outcome == "shared"


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16, 32, 48, 63, 64, 65, 96, 128])
def test_alignment_is_known_beforehand(offset):
    """Jax shares memory with 64-byte alignment and silently copies the rest; the plan and copy=False agree."""
    source = aligned(fill(np, "uint8", (64,)), offset)
    shares = offset % 64 == 0
    assert dlx.plan(source, to="jax").outcome == ("shared" if shares else "copied")
    result = dlx.convert(source, to="jax")
    assert (address(result) == address(source)) is shares and bits(result) == source.tobytes()
    if shares:
        assert address(dlx.convert(source, to="jax", copy=False)) == address(source)
    else:
        with pytest.raises(errors.CopyRequiredError, match=rf"aligned to 64 bytes, found {offset & -offset}\b"):
            dlx.convert(source, to="jax", copy=False)
    raw = jax.dlpack.from_dlpack(dlx.convert(source, to="dlx"))  # jax without dlx
    assert (address(raw) == address(source)) is shares


@pytest.mark.parametrize("layout", ["transposed", "every other", "backwards", "broadcast", "overlapping", "a part"])
def test_layouts_that_jax_cannot_hold_are_copied(layout):
    """Jax raises for strides other than permutations of a compact layout; dlx copies, or refuses with the strides."""
    source = shown(fill(np, "float32", (2, 3, 4)), layout)
    result = dlx.convert(source, to="jax")
    assert bits(result) == source.tobytes() and result.shape == source.shape
    if layout == "transposed":
        assert address(result) == address(source) and dlx.plan(source, to="jax").outcome == "shared"
        return
    assert dlx.plan(source, to="jax").outcome == "copied"
    with pytest.raises(errors.CopyRequiredError, match="jax arrays cannot have") as caught:
        dlx.convert(source, to="jax", copy=False)
    assert str(tuple(stride // 4 for stride in source.strides)) in caught.value.reason
    with pytest.raises(jax.errors.JaxRuntimeError, match="compact"):  # jax without dlx
        jax.dlpack.from_dlpack(native.tensor_view(dlx.convert(source, to="dlx"), None, None, 0, None))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize("offset", [0, 4])
def test_arrays_without_elements(shape, offset):
    """Empty arrays convert with any alignment and strides, and keep dtype and shape."""
    source = aligned(np.empty(shape, "float32"), offset)[::-1]
    result = dlx.convert(source, to="jax", copy=False)
    assert result.shape == shape and str(result.dtype) == "float32"
    back = dlx.convert(result, to="numpy", copy=False)
    assert back.shape == shape and back.dtype == "float32"


def test_odd_strides_of_extents_of_one():
    """An unused stride is ignored."""
    source = tensor("float32", (1, 4, 1), (-7, 1, 999))
    assert address(dlx.convert(source, to="jax", copy=False)) == source.data_ptr


def test_copy_true_is_memory_of_its_own():
    """Later writes to the source do not change a copy."""
    source = aligned(fill(np, "float32", (8,)))
    result, before = dlx.convert(source, to="jax", copy=True), source.tobytes()
    source[:] = 0
    assert address(result) != address(source) and bits(result) == before


def test_the_plan_says_not_to_write():
    """The plan warns not to write to shared memory."""
    source = aligned(fill(np, "float32", (8,)))
    steps = dlx.plan(source, to="jax").steps
    assert [step.do for step in steps] == ["share"] and "do not write to the source" in steps[0].why
    assert dlx.plan(source, to="jax", copy=True).steps[0].do == "copy"
    source.flags.writeable = False
    assert dlx.plan(source, to="jax").steps == ()


def test_read_only_memory_is_shared():
    """Read-only memory is shared, since jax never writes, and stays read-only on its way back."""
    source = aligned(fill(np, "float32", (8,)))
    source.flags.writeable = False
    result = dlx.convert(source, to="jax", copy=False, readonly="error")
    assert address(result) == address(source)
    assert not dlx.convert(result, to="numpy", copy=False).flags.writeable
    assert bits(dlx.convert(bytes(range(64)), to="jax")) == bytes(range(64))


@pytest.mark.parametrize("size", [3, 1024, 100_000])
def test_donated_memory_of_others_is_not_written_to(size):
    """Donating an array that shares memory never lets jax write to that memory."""
    source = aligned(np.arange(size, dtype="float32"))
    source.flags.writeable = False
    result = dlx.convert(source, to="jax", copy=False)
    for work in (lambda a: a * 2, lambda a: a.at[0].set(99)):
        donated = dlx.convert(source, to="jax", copy=False)
        made = jax.block_until_ready(jax.jit(work, donate_argnums=0)(donated))
        assert donated.is_deleted() and address(made) != address(source)
    assert source.tobytes() == np.arange(size, dtype="float32").tobytes() == bits(result)


# ---- 64 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bits_are_refused_while_x64_is_off(dtype):
    """With x64 off jax would silently narrow to 32 bits; dlx refuses and names the setting."""
    source = aligned(fill(np, dtype, (4,)))
    for copy in (None, False, True):
        with pytest.raises(errors.DTypeError, match=f"would narrow {dtype} to .* x64 is off") as caught:
            dlx.convert(source, to="jax", copy=copy)
        assert 'jax.config.update("jax_enable_x64", True)' in caught.value.fix
        plan = dlx.plan(source, to="jax", copy=copy)
        assert (type(plan.error), str(plan.error)) == (errors.DTypeError, str(caught.value))
    assert jax.dlpack.from_dlpack(dlx.convert(source, to="dlx")).dtype.itemsize == source.itemsize // 2  # without dlx


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bits_are_shared_while_x64_is_on(x64, dtype):
    """Each call reads jax's setting: with x64 on, the same arrays are shared."""
    source = aligned(fill(np, dtype, (4,)))
    result = dlx.convert(source, to="jax", copy=False)
    assert address(result) == address(source) and str(result.dtype) == dtype and bits(result) == source.tobytes()
    assert dlx.plan(source, to="jax").outcome == "shared"


def test_x64_is_read_in_every_plan():
    """A change of x64 takes effect immediately."""
    source = np.arange(4.0)
    for on in (False, True, False, True):
        with jax.enable_x64(on):
            assert (dlx.plan(source, to="jax").error is None) is on


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bits_leave_jax_also_with_x64_off(dtype):
    """An array created with x64 on keeps its dtype."""
    with jax.enable_x64(True):
        source = jnp.asarray(fill(np, dtype, (4,)))
    result = dlx.convert(source, to="numpy", copy=False)
    assert str(result.dtype) == dtype and result.tobytes() == bits(source)
    assert dlx.convert(source, to="jax") is source


def test_threads_that_disagree_on_x64():
    """Threads with different x64 settings never get 32 bits instead of 64."""
    source, wrong, done = aligned(np.arange(4.0)), [], threading.Event()

    def work(on):
        with jax.enable_x64(on):
            while not done.is_set():
                try:
                    wrong.append(str(dlx.convert(source, to="jax").dtype))
                except errors.DTypeError:
                    continue

    threads = [threading.Thread(target=work, args=(on,)) for on in (True, False, True, False)]
    for thread in threads:
        thread.start()
    done.wait(1.0)
    done.set()
    for thread in threads:
        thread.join()
    assert set(wrong) == {"float64"}


# ---- out of jax ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*NARROW, *WIDE])
def test_jax_to_numpy_is_shared_and_read_only(x64, dtype):
    """Jax arrays are read-only in numpy, and share their memory."""
    source = jnp.asarray(fill(np, dtype, (3, 4)))
    result = dlx.convert(source, to="numpy", copy=False)
    assert same(np, result, np.asarray(source)) and address(result) == address(source)
    assert not result.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        result.flags.writeable = True


def test_jax_to_torch_is_copied(torch):
    """Torch tensors are writable, so they get a copy by default."""
    source = jnp.arange(6, dtype="int32").reshape(2, 3)
    result = dlx.convert(source, to="torch")
    result.fill_(9)
    assert source.tolist() == [[0, 1, 2], [3, 4, 5]] and dlx.plan(source, to="torch").outcome == "copied"
    with pytest.raises(errors.ReadOnlyError, match="read-only"):
        dlx.convert(source, to="torch", copy=False)
    assert dlx.convert(source, to="torch", readonly="share").data_ptr() == address(source)


@pytest.mark.parametrize("dtype", ["bfloat16", *EIGHTS])
def test_small_floats_share_both_ways(dtype):
    """bfloat16 and the float8 dtypes are shared, bit for bit."""
    source = tensor(dtype, (2, 64))
    result = dlx.convert(source, to="jax", copy=False)
    assert str(result.dtype) == dtype and address(result) == source.data_ptr
    assert result.shape == (2, 64) and np.asarray(result).tobytes() == raw(source)
    back = dlx.convert(result, to="dlx", copy=False)
    assert (back.data_ptr, back.dtype, back.readonly) == (source.data_ptr, source.dtype, True)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_small_floats_between_torch_and_jax(torch, dtype):
    """Torch and jax exchange small floats exactly, including NaN payloads."""
    every = torch.arange(256, dtype=torch.uint8).repeat(2)
    result = dlx.convert(every.view(getattr(torch, dtype)), to="jax")
    assert str(result.dtype) == dtype and bits(result) == every.numpy().tobytes()
    assert dlx.convert(result, to="torch").view(torch.uint8).equal(every)


def test_strides_and_address_are_described(x64):
    """`describe` returns the export's facts without an export."""
    base = aligned(fill(np, "float32", (2, 3, 4)))
    for view in (base, base.T, base.transpose(1, 0, 2), base[:0], base[0, 0, 0]):
        array = dlx.convert(view, to="jax")
        info, given = dlx.describe(array), dlx.convert(array, to="dlx")
        assert (info.shape, info.dtype, info.device) == (given.shape, given.dtype, given.device)
        assert info.readonly and info.nbytes == given.nbytes
        if given.nbytes:
            assert (info.strides, info.address) == (given.strides, given.data_ptr)


@pytest.mark.slow
def test_describe_does_not_wait():
    """Describing an array does not wait for its computation."""
    slow = jax.jit(lambda a: jax.lax.fori_loop(0, 60, lambda i, x: (x @ x) * 0.001, a))
    start = jnp.ones((700, 700))
    slow(start).block_until_ready()
    pending = slow(start + 1)
    dlx.describe(pending)
    dlx.plan(pending, to="numpy")
    assert not pending.is_ready()
    assert dlx.convert(pending, to="numpy").tobytes() == bits(slow(start + 1))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2"])
def test_sub_byte_integers_are_copied_packed(dtype):
    """Jax does not export sub-byte integers, so dlx copies the packed memory, first value lowest."""
    low, high = (-(2 ** (int(dtype[-1]) - 1)), 2 ** (int(dtype[-1]) - 1) - 1) if dtype[0] == "i" else (0, 3)
    values = [low, high, 0, 1, high, low, 1]
    source = jnp.array(values, dtype)
    assert dlx.plan(source, to="dlx").outcome == "copied"
    result = dlx.convert(source, to="dlx")
    width = result.dtype.bits
    whole = int.from_bytes(raw(result), "little")
    found = [whole >> (width * i) & (2**width - 1) for i in range(len(values))]
    assert str(result.dtype) == dtype and found == [value & (2**width - 1) for value in values]
    with pytest.raises(errors.CopyRequiredError, match=f"does not export {dtype}"):
        dlx.convert(source, to="dlx", copy=False)


# ---- arrays without data ---------------------------------------------------------------------------------------------


def deleted():
    """Return a deleted array."""
    array = jnp.arange(3)
    array.delete()
    return array


def donated():
    """Return an array whose memory was donated to a computation."""
    array = jnp.arange(3.0)
    jax.jit(lambda a: a * 2, donate_argnums=0)(array)
    return array


def sparse():
    """Return a sparse jax matrix."""
    from jax.experimental.sparse import BCOO

    return BCOO.fromdense(jnp.eye(3))


WITHOUT = {
    "deleted": (deleted, errors.LayoutError, "deleted or donated", "Convert it earlier"),
    "donated": (donated, errors.LayoutError, "deleted or donated", "Convert it earlier"),
    "key": (lambda: jax.random.key(0), errors.DTypeError, "key<", "jax.random.key_data"),
    "keys": (lambda: jax.random.split(jax.random.key(0), 3), errors.DTypeError, "key<", "jax.random.key_data"),
    "reference": (lambda: jax.new_ref(jnp.arange(3)), errors.LayoutError, "mutable reference", "ref[...]"),
    "sparse": (sparse, errors.LayoutError, "no coo arrays", ".todense()"),
}


@pytest.mark.parametrize("target", ["numpy", "torch", "dlx"])
@pytest.mark.parametrize("kind", WITHOUT)
def test_what_has_no_memory_is_refused(kind, target):
    """Arrays without memory are refused by name, with a fix, and can be described and planned."""
    pytest.importorskip(target)
    make, error, reason, fix = WITHOUT[kind]
    source = make()
    if (kind, target) == ("sparse", "torch"):  # which has such arrays
        assert dlx.convert(source, to=target).to_dense().tolist() == source.todense().tolist()
        return
    with pytest.raises(error, match=reason) as caught:
        dlx.convert(source, to=target)
    assert type(caught.value) is error and fix in caught.value.fix
    assert str(dlx.plan(source, to=target).error) == str(caught.value)
    assert dlx.describe(source).framework == "jax"


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "scan"])
def test_tracers_are_refused(transform):
    """Tracers inside a transformation are refused; outside, the values convert."""
    seen = []

    def look(x):
        with pytest.raises(errors.LayoutError, match="inside a jax transformation") as caught:
            dlx.convert(x, to="numpy")
        assert "Convert outside of the transformation" in caught.value.fix
        assert str(dlx.plan(x, to="numpy").error) == str(caught.value)
        assert dlx.describe(x).dtype == dlx.DType("float32")
        assert dlx.convert(x, to="jax") is x and dlx.plan(x, to="jax").outcome == "same"
        assert isinstance(dlx.convert(x, to="jax", copy=True), jax.core.Tracer)
        seen.append(x.shape)
        return x.sum()

    values = jnp.ones((2, 3))
    {
        "jit": lambda: jax.jit(look)(values),
        "grad": lambda: jax.grad(look)(values),
        "vmap": lambda: jax.vmap(look)(values),
        "scan": lambda: jax.lax.scan(lambda carry, x: (carry, look(x)), 0, values),
    }[transform]()
    assert seen
    assert dlx.convert(values, to="numpy").sum() == 6


def test_detach_drops_what_jax_records():
    """With detach=True, dlx cuts off every tracer, since none shows whether it is differentiated."""
    plans = []

    def squares(x):
        plans.append(dlx.plan(x, to="jax", detach=True))
        return (dlx.convert(x, to="jax", detach=True) ** 2).sum()

    x = jnp.ones(3)
    assert jax.grad(squares)(x).tolist() == [0, 0, 0]
    assert jax.jvp(squares, (x,), (x,))[1] == 0
    assert jax.grad(lambda x: jax.vmap(squares)(x).sum())(jnp.ones((2, 3))).sum() == 0
    assert jax.jit(squares)(x) == 3
    assert {(plan.outcome, plan.steps[0].do) for plan in plans} == {("shared", "detach")}
    assert dlx.convert(x, to="jax", detach=True) is x


def test_a_tracer_has_no_device_for_like():
    """The error is one of dlx, and `plan` returns it."""
    for call in (dlx.convert, lambda *args, **options: dlx.plan(*args, **options).run()):
        with pytest.raises(errors.ConversionError, match="jax failed: AttributeError: The 'sharding' attribute"):
            jax.jit(lambda x, call=call: call(np.ones(3, "f4"), like=x))(jnp.ones(3))


def test_constants_inside_of_jit():
    """Other arrays become constants inside a transformation."""
    source = aligned(np.arange(3, dtype="float32"))
    assert jax.jit(lambda x: x + dlx.convert(source, to="jax", copy=False))(jnp.ones(3)).tolist() == [1, 2, 3]


SEVERAL = """
import jax, jax.numpy as jnp, numpy as np, dlx
from dlx import errors
from dlx._registry.registry import registry
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def aligned(values):
    room = np.zeros(values.nbytes + 64, "u1")
    start = -room.ctypes.data % 64
    room = room[start : start + values.nbytes].view(values.dtype)
    room[:] = values
    return room

first, second = jax.devices()
mesh = Mesh([first, second], ("d",))
x = jnp.arange(8, dtype="float32")
for spec in (P("d"), P()):
    spread = jax.device_put(x, NamedSharding(mesh, spec))
    for target in ("numpy", "dlx"):
        outcome = "shared" if spec == P() else "copied"
        made, plan = dlx.convert(spread, to=target), dlx.plan(spread, to=target)
        assert plan.outcome == outcome and np.asarray(made).tolist() == list(range(8)), plan
        try:
            dlx.convert(spread, to=target, copy=False)
            assert spec == P()
        except errors.CopyRequiredError as error:
            assert "sharded over 2 devices" in error.reason and "addressable_shards" in error.fix
            assert str(dlx.plan(spread, to=target, copy=False).error) == str(error) and spec == P("d")
    assert dlx.convert(spread, to="jax") is spread and dlx.describe(spread).device is None
    parts = [dlx.convert(shard.data, to="numpy", copy=False) for shard in spread.addressable_shards]
    assert all(part[-1] in (3, 7) for part in parts)

one = jax.device_put(x, NamedSharding(Mesh([first], ("d",)), P("d")))
assert dlx.convert(one, to="numpy", copy=False).tolist() == list(range(8))

devices = registry.target("jax").adapter.devices
for number, device in enumerate((first, second)):
    there = jax.device_put(x, device)
    assert dlx.describe(there).device == (1, number) and devices.from_native(device) == (1, number)
    assert devices.to_native(dlx.Device(1, number)) == device
    tensor = dlx.convert(there, to="dlx", copy=False)
    assert tensor.device == (1, number)
    assert dlx.convert(tensor, to="jax", copy=False).devices() == {device}
    assert dlx.convert(there, to="jax", device="cpu") is there

    for said in ({"device": f"cpu:{number}"}, {"device": (1, number)}, {"device": device}, {"like": there}):
        to = {} if "like" in said else {"to": "jax"}
        for source in (aligned(np.arange(8.0, dtype="f4")), aligned(np.arange(10.0, dtype="f4"))[1:]):
            made = dlx.convert(source, **to, **said)
            assert made.devices() == {device} and made.tolist() == source.tolist(), (said, made.devices())
            assert dlx.convert([source], **to, **said)[0].devices() == {device}
            shares = made.unsafe_buffer_pointer() == source.ctypes.data
            assert shares == (dlx.plan(source, **to, **said).outcome == "shared") == (len(source) == 8)
    assert dlx.convert(jax.device_put(x, first), to="jax", device=device).devices() == {device}
    rows = dlx.stack([jax.device_put(x, first), there], "jax", device=device)
    assert rows.devices() == {device} and rows.tolist() == [x.tolist()] * 2
    for call in (dlx.convert, dlx.plan, lambda x, to, device: dlx.stack([x], to, device=device)):
        try:
            call(np.zeros(4, "f4"), to="jax", device="cpu:5")
        except errors.DeviceError as error:
            assert error.reason == "jax sees no device cpu:5" and "cpu:0" in error.fix, error
        else:
            assert call is dlx.plan

block = dlx.convert(bytes(64), to="dlx", copy=True)
far = dlx._core.native.tensor_new(block.data_ptr, (64,), None, (1, 8, 1), (1, 7), 0, block)  # a number that jax lacks
assert dlx.convert(far, to="jax", copy=False).devices() == {first}
pinned = jax.device_put(x, jax.sharding.SingleDeviceSharding(first, memory_kind="pinned_host"))
assert dlx.convert(pinned, to="numpy", copy=False).tolist() == list(range(8))
print("done")
"""


@pytest.mark.slow
def test_several_devices(python):
    """Arrays on several devices are refused by name; one device of several is preserved."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert python(SEVERAL, args=(), env=env) == "done\n"


PARTS = """
import jax, numpy as np, dlx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
base = np.arange(64, dtype=np.float32).reshape(8, 8)
for spec in (P("a", "b"), P("b", "a"), P("a"), P(None, "b"), P(("a", "b")), P()):
    x = jax.device_put(base, NamedSharding(mesh, spec))
    is_whole = x.is_fully_replicated
    try:
        dlx.convert({"w": x}, to="numpy", copy=False)
    except dlx.errors.CopyRequiredError as error:
        assert not is_whole
        call = error.fix.partition("Convert its parts: ")[2].rstrip(".")
    parts = eval(call.replace("to=...", "to='numpy'"))
    with dlx.share([shard.data for shard in x.addressable_shards]) as handle:
        attached = dlx.attach(handle, "numpy")
    assert len(parts) == len(attached) == 8
    for shard, part, other in zip(x.addressable_shards, parts, attached):
        assert np.array_equal(part, base[shard.index]) and np.array_equal(other, part)
        assert part.ctypes.data == shard.data.unsafe_buffer_pointer()
    made = dlx.convert({"w": x}, to="numpy")["w"]
    assert np.array_equal(made, base)
    assert (made.ctypes.data in {each.data.unsafe_buffer_pointer() for each in x.addressable_shards}) is is_whole
print("done")
"""


@pytest.mark.slow
def test_parts_of_an_array_on_eight_devices(python):
    """The call in the error's fix works: each part shares its memory and has the values of its index."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    assert python(PARTS, args=(), env=env) == "done\n"


@pytest.mark.slow
def test_jax_without_the_host(python):
    """Without the host platform, host memory is refused in advance, with the fix."""
    out = python(
        """
        import dlx, numpy as np
        source = np.zeros(4, "f4")
        try:
            dlx.convert(source, to="jax")
        except dlx.errors.DeviceError as error:
            assert str(dlx.plan(source, to="jax").error) == str(error)
            print(error.reason, "|", error.fix)
        import jax
        jax.config.update("jax_platforms", "cuda,cpu")
        print(dlx.plan(source, to="jax").error)
        """,
        args=(),
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
    )
    told, free = out.splitlines()
    assert "only 'cuda', not the host | Set JAX_PLATFORMS=cuda,cpu" in told and free == "None"


def test_devices_both_ways():
    """The host is jax's first host device, in both directions."""
    devices = registry.target("jax").adapter.devices
    (device,) = jnp.zeros(1).devices()
    assert devices.from_native(device) == (1, 0) and devices.to_native(dlx.Device("cpu")) == device
    with pytest.raises(errors.DeviceError, match="supports only host memory, not cuda:0"):
        devices.to_native(dlx.Device("cuda"))


def test_dtypes_both_ways():
    """Every dtype of the adapter exists in jax, in both directions."""
    dtypes = registry.target("jax").adapter.dtypes
    for name in dtypes.names:
        native_dtype = dtypes.to_native(dlx.DType(name))
        assert native_dtype == jnp.dtype(getattr(jnp, dtypes.names[name]))
        assert dtypes.from_native(native_dtype) == dlx.DType(name)
    assert dtypes.from_native(jax.random.key(0).dtype) is None


@pytest.mark.parametrize("dtype", ["complex32", "float6_e2m3fn", "int3", "float32x4", "float128", "float4_e2m1fnx2"])
def test_dtypes_that_jax_lacks(dtype):
    """Unsupported dtypes are refused by name before jax is called."""
    source = tensor(dtype, (2,))
    with pytest.raises(errors.DTypeError, match=f"jax has no dtype {dtype}"):
        dlx.convert(source, to="jax")


# ---- inside jax ------------------------------------------------------------------------------------------------------


def test_jax_stays_itself():
    """A jax array is the result itself; copy=True is jax's copy, of the same class."""
    for source in (jnp.arange(3), jax.random.key(0), jnp.zeros(2, "int4"), jnp.float32(1)):
        assert dlx.convert(source, to="jax") is source
        assert dlx.convert(source, to="jax", copy=False, readonly="error", detach=True) is source
        copied = dlx.convert(source, to="jax", copy=True)
        assert copied is not source and copied.dtype == source.dtype
    source = jnp.arange(3)
    assert address(dlx.convert(source, to="jax", copy=True)) != address(source)


def test_names_of_jax():
    """The name, the package, its numpy, and the type are the same target."""
    for to in ("jax", "jaxlib", jax, jnp, jax.Array):
        assert isinstance(dlx.convert(np.zeros(2, "float32"), to=to), jax.Array)
    assert isinstance(dlx.convert(np.zeros(2, "float32"), like=jnp.zeros(3)), jax.Array)


# ---- lifetime --------------------------------------------------------------------------------------------------------


def test_the_result_keeps_the_source():
    """The source's memory lives exactly as long as the jax array or a computation on it."""
    live = native.live()
    source = aligned(np.arange(1000, dtype="float32"))
    alive = weakref.ref(source.base)
    result = dlx.convert(source, to="jax", copy=False)
    del source
    gc.collect()
    assert alive() is not None and float(result[999]) == 999 and native.live() > live
    pending = jax.jit(lambda a: a * 2)(result)
    del result
    assert float(pending[999]) == 1998
    del pending
    assert comes_true(lambda: alive() is None and native.live() == live)


@pytest.mark.parametrize("end", ["del", "delete", "donate"])
def test_memory_is_released_once(end):
    """The memory of dlx is released once, for every end of the jax array."""
    live = native.live()
    for _ in range(20):
        result = dlx.convert(aligned(np.ones(64, "float32")), to="jax", copy=False)
        if end == "delete":
            result.delete()
        elif end == "donate":
            jax.block_until_ready(jax.jit(lambda a: a + 1, donate_argnums=0)(result))
    del result
    assert comes_true(lambda: native.live() == live)


def test_exports_survive_deletion():
    """Exports stay readable after the jax array was deleted or donated."""
    for end in (lambda array: array.delete(), jax.jit(lambda a: a * 0 - 1, donate_argnums=0)):
        source = jnp.arange(1000, dtype="float32")
        result, packed = dlx.convert(source, to="numpy", copy=False), dlx.convert(jnp.ones(8, "int4"), to="dlx")
        end(source)
        del source
        jnp.zeros(1000).block_until_ready()
        assert result.tobytes() == np.arange(1000, dtype="float32").tobytes() and raw(packed) == b"\x11" * 4


def test_no_leaks_over_many():
    """Many conversions, including failing ones, leak nothing."""
    live = native.live()
    shared, strided, wide, gone = aligned(np.ones(64, "f4")), np.ones((8, 8), "f4")[:, ::2], np.ones(3), deleted()
    for _ in range(200):
        dlx.convert(dlx.convert(shared, to="jax"), to="numpy")
        dlx.convert(strided, to="jax")
        for source, target in ((wide, "jax"), (gone, "numpy"), (jax.random.key(0), "dlx")):
            with pytest.raises(errors.ConversionError):
                dlx.convert(source, to=target)
    gc.collect()
    assert native.live() == live


def test_results_live_at_exit(python):
    """Arrays that are alive at the interpreter's exit, also during a computation, do no harm."""
    out = python(
        """
        import threading, numpy as np, jax, jax.numpy as jnp, dlx
        block = np.zeros(4096, np.uint8)
        start = -block.ctypes.data % 64
        kept = dlx.convert(block[start : start + 1024].view(np.float32), to="jax", copy=False)
        back = dlx.convert(jnp.arange(3), to="numpy")
        loop = [kept]; loop.append(loop)
        pending = jax.jit(lambda a: jax.lax.fori_loop(0, 30, lambda i, x: (x @ x) * 0.001, a))(jnp.ones((500, 500)))
        print("done")
        """,
        args=(),
    )
    assert out == "done\n"


# ---- defects ---------------------------------------------------------------------------------------------------------


class Asked:
    """A producer that stores the requested keywords."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        self.options = options
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_defect_legacy_capsules():
    """Before 0.12 jax requests legacy capsules only, so producers cannot pass read-only memory."""
    source = Asked(tensor("float32", readonly=True))
    if registry.target("jax").adapter.lowered.get("hears_readonly", True):
        assert jax.dlpack.from_dlpack(source).shape == (4,) and source.options["max_version"] >= (1, 0)
    else:
        with pytest.raises(errors.ReadOnlyError, match="legacy"):
            jax.dlpack.from_dlpack(source)
        assert "max_version" not in source.options


def test_defect_float4_is_given_and_not_taken():
    """Jax exports packed float4 but refuses to import it; dlx has jax copy it."""
    source = jnp.array([0, 0.5, 1, 6, -1, -6], "float4_e2m1fn")
    given = dlx.convert(source, to="dlx", copy=False)
    assert given.dtype == dlx.DType("float4_e2m1fn") and raw(given) == b"\x10\x72\xfa"
    with pytest.raises(jax.errors.JaxRuntimeError, match="layout"):
        jax.dlpack.from_dlpack(native.tensor_view(given, None, None, 0, None))
    assert (dlx.convert(given, to="jax") == source).all()
    with pytest.raises(errors.CopyRequiredError, match="float4_e2m1fn"):
        dlx.convert(given, to="jax", copy=False)


# ---- x64 differs between threads and calls ---------------------------------------------------------------------------


def test_x64_is_read_in_every_thread(python):
    """Each conversion uses its own thread's setting."""
    out = python(
        """
        import sys, threading
        import jax, dlx
        sys.setswitchinterval(1e-6)
        wide = dlx.convert(memoryview(bytearray(64)).cast("d"), to="dlx")
        wrong = []

        def work(on):
            with jax.enable_x64(on):
                for _ in range(400):
                    plan = dlx.plan(wide, to="jax")
                    try:
                        result = str(dlx.convert(wide, to="jax").dtype)
                    except dlx.errors.DTypeError as error:
                        result = "x64 is off" if "because x64 is off" in str(error) else str(error)
                    if result != ("float64" if on else "x64 is off") or (plan.error is None) is not on:
                        wrong.append((on, result, str(plan)))

        threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(wrong), wrong[:1])
        """,
        args=(),
    )
    assert out == "0 []\n"


def test_like_reads_x64_as_well():
    """like= reads the setting, too."""
    example, wide = jnp.zeros(3), tensor("float64")
    assert type(dlx.plan(wide, like=example).error) is errors.DTypeError
    with jax.enable_x64(True):
        assert dlx.plan(wide, like=example).error is None
        assert dlx.convert(wide, like=example).dtype == "float64"
    assert type(dlx.plan(wide, like=example).error) is errors.DTypeError


def test_types_that_are_no_targets():
    """Only jax.Array is a target; tracers and references are not, and sparse arrays stay in jax."""
    assert dlx.convert(tensor("float32"), to=jax.Array).shape == (4,)
    result = jnp.ones(3)
    assert dlx.convert(result, to=jax.Array) is result
    with pytest.raises(errors.AdapterNotFoundError, match="Pass to='jax'"):
        dlx.convert(tensor("float32"), to=jax.core.Tracer)
    from jax.experimental import sparse

    array = sparse.BCOO.fromdense(jnp.eye(2))
    assert dlx.convert(array, to=jax.Array) is array


@pytest.mark.parametrize("dtype", ["int4", "uint2", "float4_e2m1fn"])
def test_packed_elements_in_another_order(np, dtype):
    """Packed elements convert in order, even if jax stores them column-major."""
    from jax.experimental.layout import Format, Layout

    plain = jnp.asarray(np.arange(6).reshape(2, 3) % 4, dtype)
    turned = jax.device_put(plain, Format(Layout((1, 0)), plain.sharding))
    for target in ("numpy", "dlx"):
        assert dlx.plan(turned, to=target).outcome == "copied"
    assert (dlx.convert(turned, to="numpy") == np.asarray(plain)).all()
    assert dlx.describe(turned).nbytes == dlx.convert(turned, to="dlx").nbytes


def test_what_jax_takes_is_stated_once_for_each_value_of_its_switches(python):
    """Capabilities are built once for each value of the setting, and changes take effect immediately."""
    out = python(
        """
        import dlx
        from dlx._registry.registry import registry
        adapter = dlx.adapters()["jax"]
        counts = {"capabilities": 0, "native": 0}
        for kind, name in zip((type(adapter), type(adapter.dtypes)), counts):
            def counted(self, *arguments, name=name, old=getattr(kind, name)):
                counts[name] += 1
                return old(self, *arguments)
            setattr(kind, name, counted)
        wide = dlx.convert(memoryview(bytearray(64)).cast("d"), to="dlx")
        small = dlx.convert(memoryview(bytearray(64)).cast("f"), to="dlx")
        import jax
        def taken():
            for to in ("jax", jax.Array):
                assert dlx.convert(small, to=to).dtype == "float32"
                error = dlx.plan(wide, to=to).error
                try: assert error is None and dlx.convert(wide, to=to).dtype == "float64"
                except (AssertionError, dlx.errors.DTypeError): assert "because x64 is off" in str(error), error
            return error is None
        found = []
        for on in (False, True, False, True, True):
            jax.config.update("jax_enable_x64", on)
            found.append(taken())
            with jax.enable_x64(not on):
                found.append(taken())
        print(found == [False, True, True, False, False, True, True, False, True, False])
        names = len(adapter.dtypes.names)
        print(counts["capabilities"], counts["native"] <= 4 * names)  # for two values, for jax.Array as well
        assert all(registry.target(to) is registry.target(to) for to in ("jax", jax.Array))
        """,
        args=(),
    )
    assert out.split() == ["True", "4", "True"]


def test_a_switch_that_is_thrown_meanwhile_is_not_remembered(monkeypatch):
    """Capabilities computed while the setting changed are not cached."""
    import types

    from dlx._registry.registry import Registry
    from dlx.adapter import Adapter, Capabilities, DTypes

    lib = types.ModuleType("lib_with_a_switch")
    lib.switch = 0

    class Switched(Adapter):
        name = package = "lib_with_a_switch"
        dtypes = DTypes("lib_with_a_switch", {}, switches=("switch",))

        def capabilities(self):
            dtypes = frozenset({f"int{8 << lib.switch}"})
            if lib.thrown:
                lib.switch, lib.thrown = 1, False
            return Capabilities(dtypes=dtypes)

    plugin = types.ModuleType("dlx_lib_with_a_switch")
    plugin.dlx_adapters = dlx.hookimpl(specname="dlx_adapters")(lambda: [Switched()])
    monkeypatch.setitem(sys.modules, lib.__name__, lib)
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    registry, name, lib.thrown = Registry({lib.__name__: plugin.__name__}), lib.__name__, True
    assert registry.target(name).capabilities.dtypes == {"int8"}
    assert registry.target(name).capabilities.dtypes == {"int16"}
    lib.switch = 0
    assert registry.target(name).capabilities.dtypes == {"int8"}
    assert registry.target(name) is registry.target(name)
