"""dlx.Tensor: its attributes, its exports for each request, and its consumers."""

import copy
import ctypes
import gc
import inspect
import pickle
import weakref

import pytest
from support.arrays.reference import FLOAT32, INT4, INT8, IS_COPIED, PADDED, READ_ONLY

import dlx
from dlx import errors
from dlx._core import native
from dlx._core.native import ffi
from dlx._core.tensor import tensor_from


class Owner(bytearray):
    """Memory with a weak reference."""


def over(shape=(2, 3), strides=None, dtype=FLOAT32, device=(1, 0), flags=0, *, owner=None, at=0):
    """Return a dlx.Tensor over 64 bytes 0, 1, 2, ..."""
    owner = Owner(range(64)) if owner is None else owner
    address = native.buffer_address(memoryview(owner)) + at
    return native.tensor_new(address, shape, strides, dtype, device, flags, owner)


def claimed(tensor, **request):
    """Return the contents of the capsule for a request."""
    return native.capsule_claim(tensor.__dlpack__(**request))


def read(tensor):
    """Return the bytes of a contiguous tensor."""
    return ctypes.string_at(tensor.data_ptr, tensor.nbytes)


# ---- attributes


def test_attributes():
    """The attributes have all fields of the struct, as plain values."""
    owner = Owner(range(64))
    tensor = over((2, 3), (-1, 2), (2, 16, 1), (3, 7), READ_ONLY, owner=owner, at=32)
    assert (tensor.shape, tensor.strides, tensor.ndim) == ((2, 3), (-1, 2), 2)
    assert (tensor.nbytes, tensor.readonly, tensor.flags) == (12, True, READ_ONLY)
    assert tensor.data_ptr == native.buffer_address(memoryview(owner)) + 32
    assert tensor.version == (1, 3)
    assert type(tensor.dtype) is dlx.DType
    assert type(tensor.device) is dlx.Device
    assert (tensor.dtype, tensor.device) == ((2, 16, 1), (3, 7))


@pytest.mark.parametrize(
    "name",
    [
        *("shape", "strides", "ndim", "dtype", "device", "nbytes", "readonly", "data_ptr", "byte_offset", "flags"),
        "version",
    ],
)
def test_attributes_are_documented_and_cannot_be_set(name):
    """Attributes are read-only, and each has a docstring."""
    assert getattr(dlx.Tensor, name).__doc__
    with pytest.raises((AttributeError, TypeError)):
        setattr(over(), name, 1)


@pytest.mark.parametrize(("device", "folded"), [((1, 0), 1), ((2, 0), 1), ((4, 0), 0), ((8, 0), 0)])
def test_byte_offset(counting, device, folded):
    """The offset of an address is already added to it; a handle keeps its offset."""
    address = counting.managed((2,), device=device, byte_offset=16)
    data = int(ffi.cast("uintptr_t", ffi.cast("DLManagedTensorVersioned*", address).dl_tensor.data))
    tensor = native.capsule_claim(counting.held.counting_capsule(address))
    assert (tensor.data_ptr, tensor.byte_offset) == ((data + 16, 0) if folded else (data, 16))


@pytest.mark.parametrize(
    ("shape", "dtype", "flags", "nbytes"),
    [
        ((), FLOAT32, 0, 4),
        ((0, 9), FLOAT32, 0, 0),
        ((5,), INT4, 0, 3),
        ((5,), INT4, PADDED, 5),
        ((3,), (1, 8, 3), 0, 9),
    ],
)
def test_nbytes(shape, dtype, flags, nbytes):
    """Nbytes counts elements, packed if they are packed, without gaps."""
    assert over(shape, None, dtype, flags=flags).nbytes == nbytes
    assert over(shape, [9] * len(shape), (0, 8, 1)).nbytes == over(shape, None, (0, 8, 1)).nbytes


def test_not_instantiable():
    """Only conversions create tensors."""
    with pytest.raises(TypeError):
        dlx.Tensor()
    with pytest.raises(TypeError):
        dlx.Tensor.__new__(dlx.Tensor)


@pytest.mark.parametrize("ask", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copies_are_of_the_same_kind_over_memory_of_their_own(ask):
    """A copy keeps strides without gaps, and the read-only flag."""
    for tensor in (over(), over(strides=(1, 2)), over(flags=READ_ONLY), over((4,), dtype=INT4), over((0, 3))):
        found = ask(tensor)
        assert (found.dtype, found.shape, found.strides) == (tensor.dtype, tensor.shape, tensor.strides)
        assert raw(found) == raw(tensor) and found.flags == tensor.flags
        assert not tensor.nbytes or not dlx.shares_memory(found, tensor)


def raw(tensor):
    """Return the bytes of a tensor without gaps, of any dtype."""
    return bytes(ffi.buffer(ffi.cast("char *", tensor.data_ptr), tensor.nbytes))


PICKLED = [
    lambda: over(),
    lambda: over(strides=(1, 2)),
    lambda: over(flags=READ_ONLY),
    lambda: over(dtype=(4, 16, 1)),
    lambda: over(dtype=INT4, flags=PADDED),
    lambda: over((3,), dtype=INT4),
    lambda: over((), dtype=INT8),
    lambda: over((0, 3)),
    lambda: over((2, 2), dtype=(2, 32, 2)),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("make", PICKLED, ids=range(len(PICKLED)))
def test_pickles_in_band(make, protocol):
    """Every dtype, layout and flag, with every protocol."""
    tensor = make()
    found = pickle.loads(pickle.dumps({"a": [tensor, tensor]}, protocol))["a"]
    assert found[0] is found[1]
    assert (found[0].dtype, found[0].shape, found[0].strides) == (tensor.dtype, tensor.shape, tensor.strides)
    assert found[0].flags == tensor.flags and raw(found[0]) == raw(tensor)


@pytest.mark.parametrize("make", PICKLED, ids=range(len(PICKLED)))
def test_pickles_out_of_band_without_a_copy(make):
    """With protocol 5 and a callback the memory is out of band, for any dtype."""
    tensor, buffers = make(), []
    data = pickle.dumps(tensor, 5, buffer_callback=buffers.append)
    assert len(data) < 200 and len(buffers) == 1
    found = pickle.loads(data, buffers=buffers)
    assert raw(found) == raw(tensor) and found.flags == tensor.flags
    assert not tensor.nbytes or dlx.shares_memory(found, tensor)
    kept = weakref.ref(tensor)
    del tensor, buffers
    gc.collect()
    assert (kept() is None) == (found.nbytes == 0)
    del found
    gc.collect()
    assert kept() is None


def test_a_pickle_with_gaps_is_compact():
    """A pickle contains only the tensor's elements."""
    tensor = over((2, 2), strides=(4, 2))
    found = pickle.loads(pickle.dumps(tensor))
    assert found.strides == (2, 1) and found.nbytes == 16 and len(pickle.dumps(tensor)) < 200


def test_buffers_that_are_not_aligned_are_copied():
    """A network frame may start anywhere; consumers expect natural alignment."""
    buffers = []
    data = pickle.dumps(over(), 5, buffer_callback=buffers.append)
    frame = bytearray(1) + bytes(buffers[0])
    for view in (memoryview(frame)[1:], memoryview(bytes(frame))[1:]):
        found = pickle.loads(data, buffers=[view])
        assert found.data_ptr % 4 == 0 and raw(found) == frame[1:] and found.readonly == view.readonly


@pytest.mark.parametrize("ask", [copy.copy, copy.deepcopy, *(
    lambda tensor, protocol=protocol: pickle.loads(pickle.dumps(tensor, protocol)) for protocol in (2, 5)
)], ids=["copy", "deepcopy", "protocol 2", "protocol 5"])  # fmt: skip
@pytest.mark.parametrize("flags", [0, READ_ONLY], ids=["writable", "read-only"])
def test_what_has_gaps_stays_as_writable_as_it_was(ask, flags):
    """A tensor with gaps keeps its flag although it is copied first."""
    raw = bytearray(range(6))
    tensor = native.tensor_new(native.buffer_address(memoryview(raw)), (3,), (2,), INT8, (1, 0), flags, raw)
    found = ask(tensor)
    assert found.tobytes() == bytes((0, 2, 4)) and found.readonly == bool(flags)


def test_a_pickle_that_lies_is_refused():
    """The numbers of a pickle are checked against its bytes."""
    for change in ((b"abc", (2, 32, 1), (1,), (1,), 0), (b"abcd", (2, 32, 1), (2,), (1,), 0)):
        with pytest.raises(ValueError, match="lie outside the memory"):
            tensor_from(*change)
    for change in ((b"abcd", (3, 64, 1), (0,), (1,), 0), (b"abcd", (2, 32, 1), (1,), (), 0)):
        with pytest.raises(ValueError, match="do not describe a tensor"):
            tensor_from(*change)


def test_device_memory_is_not_pickled(cuda):
    """The error says that it must be moved first."""
    with pytest.raises(errors.DeviceError, match=r"host memory.*cuda:0.*device='cpu'"):
        pickle.dumps(dlx.empty(3, "uint8", "cuda:0"))


def test_type_is_fixed():
    """The type is immutable, cannot be subclassed, and has its public name."""
    assert (dlx.Tensor.__module__, dlx.Tensor.__qualname__) == ("dlx", "Tensor")
    with pytest.raises(TypeError):
        dlx.Tensor.extra = 1
    with pytest.raises(TypeError):
        type("Sub", (dlx.Tensor,), {})


def test_weakref():
    """A tensor supports weak references, and is freed with its last reference."""
    tensor = over()
    seen = []
    watch = weakref.ref(tensor, seen.append)
    assert watch() is tensor
    del tensor
    assert seen == [watch]


def test_owner_lives_as_long_as_the_tensor():
    """Only the tensor holds the owner, and nothing else of dlx."""
    owner = Owner(range(64))
    gone = weakref.ref(owner)
    tensor = over(owner=owner)
    del owner
    gc.collect()
    assert gone() is not None
    del tensor
    assert gone() is None


def test_native_alone_describes(python):
    """dlx._core.native alone is enough for a tensor's device and dtype."""
    out = python("""
        from dlx._core import native
        tensor = native.tensor_new(0, (0,), None, (2, 32, 1), (1, 0), 0, None)
        print(tuple(tensor.device), tuple(tensor.dtype))
    """)
    assert out == "(1, 0) (2, 32, 1)\n"


# ---- __dlpack__


def test_signature_is_the_standards():
    """The array API standard's four keywords, keyword-only, None by default."""
    parameters = list(inspect.signature(dlx.Tensor.__dlpack__).parameters.values())[1:]
    assert [p.name for p in parameters] == ["stream", "max_version", "dl_device", "copy"]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in parameters)


@pytest.mark.parametrize(
    ("version", "state"),
    [
        (None, "legacy"),
        ((0, 8), "legacy"),
        ((0, 99), "legacy"),
        ((1, 0), "versioned"),
        ((1, 3), "versioned"),
        ((1, 99), "versioned"),
        ((2, 0), "versioned"),
    ],
)
@pytest.mark.parametrize("copy", [None, False, True])
def test_max_version_picks_the_generation(version, state, copy):
    """From (1, 0) on the capsule is versioned, with version 1.x even for consumers of 2."""
    capsule = over().__dlpack__(max_version=version, copy=copy)
    assert native.capsule_state(capsule) == state
    assert native.capsule_claim(capsule).version == (1, 3)


@pytest.mark.parametrize("version", [[1, 0], (1,), (), (1, 0, 0), 1, "1.0", ("1", 0), (None, 0), (1.0, 0)])
def test_max_version_is_a_pair_of_int(version):
    """Other values raise TypeError, as in numpy."""
    with pytest.raises(TypeError):
        over().__dlpack__(max_version=version)


@pytest.mark.parametrize("call", [lambda t: t.__dlpack__(None), lambda t: t.__dlpack__(1, (1, 0))])
def test_positional_arguments_are_refused(call):
    """Arguments are keyword-only."""
    with pytest.raises(TypeError):
        call(over())


@pytest.mark.parametrize("name", ["streams", "max_versio", "device", ""])
def test_unknown_keywords_are_refused(name):
    """An unknown keyword raises TypeError, which consumers can handle."""
    with pytest.raises(TypeError, match="unexpected keyword"):
        over().__dlpack__(**{name: None})


@pytest.mark.parametrize("kind", [1, 3, 11])
@pytest.mark.parametrize("stream", [None, -1])
def test_no_stream(kind, stream):
    """Host memory has no stream: None and -1 ('do not synchronize') are valid."""
    assert claimed(over(device=(kind, 0)), stream=stream).shape == (2, 3)


@pytest.mark.parametrize("kind", [1, 3, 11])
@pytest.mark.parametrize("stream", [1, 0, 2, -2, 12345, 2**63, 2**70, -(2**70), True, 1.5, "1", object()])
def test_streams_are_refused(kind, stream):
    """Any other stream raises StreamError."""
    with pytest.raises(errors.StreamError):
        over(device=(kind, 0)).__dlpack__(stream=stream)


@pytest.mark.parametrize("request_", [{}, {"dl_device": None}, {"dl_device": (1, 0)}, {"dl_device": [1, 0]}])
def test_host_memory_is_given_as_host_memory(request_):
    """Requesting the tensor's device changes nothing."""
    tensor = over()
    got = claimed(tensor, max_version=(1, 0), **request_)
    assert (got.data_ptr, got.device) == (tensor.data_ptr, (1, 0))


@pytest.mark.parametrize("kind", [3, 11])
@pytest.mark.parametrize(("asked", "given"), [(None, None), ((1, 0), (1, 0)), ("own", None)])
def test_pinned_memory_can_be_asked_as_host_memory(kind, asked, given):
    """Pinned memory is exported with its own device, or as host memory if requested; always shared."""
    tensor = over(device=(kind, 2))
    got = claimed(tensor, dl_device=(kind, 2) if asked == "own" else asked)
    assert (got.data_ptr, got.device) == (tensor.data_ptr, given or (kind, 2))


@pytest.mark.parametrize("copy", [None, False, True])
@pytest.mark.parametrize("asked", [(2, 0), (8, 0), (3, 0), (13, 0)])
def test_other_devices_are_refused(asked, copy):
    """Host memory is not exported as another device's."""
    with pytest.raises(errors.DeviceError):
        over().__dlpack__(dl_device=asked, copy=copy)


@pytest.mark.parametrize("asked", [(2, 1), (1, 0), (10, 0)])
def test_device_memory_is_not_given_as_another(asked):
    """A device tensor is exported on its own device only."""
    tensor = native.tensor_new(4096, (2,), None, FLOAT32, (2, 0), 0, None)
    assert claimed(tensor, dl_device=(2, 0)).device == (2, 0)
    with pytest.raises(errors.DeviceError):
        tensor.__dlpack__(dl_device=asked)


def test_a_copy_of_pinned_memory_is_not_called_pinned():
    """A copy has its own device: a request for a pinned copy is rejected."""
    tensor = over(device=(3, 0))
    assert claimed(tensor, copy=True, dl_device=(1, 0)).device == (1, 0)
    with pytest.raises(errors.DeviceError):
        tensor.__dlpack__(copy=True, dl_device=(3, 0))


@pytest.mark.parametrize("asked", ["cpu", (1,), (1, 0, 0), (None, 0), 1, (1.5, 0), (2**40, 0)])
def test_dl_device_is_a_pair_of_int(asked):
    """Other values raise TypeError."""
    with pytest.raises((TypeError, ValueError, OverflowError)):
        over().__dlpack__(dl_device=asked)


@pytest.mark.parametrize("copy", [None, False])
def test_sharing(copy):
    """Without copy=True the capsule shares the memory, and is not marked as copied."""
    tensor = over()
    got = claimed(tensor, max_version=(1, 0), copy=copy)
    assert (got.data_ptr, got.flags) == (tensor.data_ptr, 0)


def test_copying():
    """With copy=True the capsule has new, writable memory, is marked as copied, and keeps the order of dimensions."""
    tensor = over((2, 3), (1, 2), flags=READ_ONLY)
    got = claimed(tensor, max_version=(1, 0), copy=True)
    assert got.data_ptr != tensor.data_ptr
    assert (got.flags, got.shape, got.strides) == (IS_COPIED, (2, 3), (1, 2))
    assert read(got) == bytes(range(24))


def test_the_copied_mark_is_on_that_capsule_only():
    """IS_COPIED is set on one capsule: neither the source's later capsules nor the copy's have it."""
    tensor = over()
    copy = claimed(tensor, max_version=(1, 0), copy=True)
    assert tensor.flags == 0
    assert claimed(tensor, max_version=(1, 0)).flags == 0
    assert claimed(copy, max_version=(1, 0)).flags == 0


@pytest.mark.parametrize("copy", [None, False])
def test_read_only_stays_read_only(copy):
    """Shared memory keeps the read-only flag, repeatedly."""
    tensor = over(flags=READ_ONLY)
    for _ in range(3):
        tensor = claimed(tensor, max_version=(1, 0), copy=copy)
        assert tensor.flags == READ_ONLY


@pytest.mark.parametrize("kind", [1, 2, 3, 8, 18, 77])
def test_dlpack_device(kind):
    """__dlpack_device__ returns a pair of int."""
    pair = native.tensor_new(4096, (2,), None, FLOAT32, (kind, 5), 0, None).__dlpack_device__()
    assert pair == (kind, 5)
    assert [type(part) for part in pair] == [int, int]


def test_handles_keep_their_offset(counting):
    """A handle is exported unchanged with its offset."""
    capsule = counting.capsule((2,), device=(8, 0), byte_offset=16)
    tensor = native.capsule_claim(capsule)
    out = tensor.__dlpack__(max_version=(1, 0))
    address = counting.consume(out)
    struct = native.ffi.cast("DLManagedTensorVersioned*", address)
    assert int(native.ffi.cast("intptr_t", struct.dl_tensor.data)) == tensor.data_ptr
    assert struct.dl_tensor.byte_offset == 16
    counting.delete(address)


# ---- tensor_new


GOOD = {
    "address": 4096, "shape": (2, 3), "strides": None, "dtype": FLOAT32, "device": (1, 0), "flags": 0, "owner": None
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"address": "x"}, TypeError),
        ({"address": None}, TypeError),
        ({"address": 0}, errors.LayoutError),
        ({"address": 2**64}, OverflowError),
        ({"shape": 3}, TypeError),
        ({"shape": None}, TypeError),
        ({"shape": ("2",)}, TypeError),
        ({"shape": (2.0,)}, TypeError),
        ({"shape": (2**64,)}, OverflowError),
        ({"shape": (-1,)}, errors.ProtocolError),
        ({"shape": (1,) * 129}, errors.LayoutError),
        ({"shape": (2**62,)}, errors.LayoutError),
        ({"strides": (1,)}, ValueError),
        ({"strides": (1, 2, 3)}, ValueError),
        ({"strides": 1}, TypeError),
        ({"strides": (-(2**63), 1)}, errors.LayoutError),
        ({"dtype": (2, 32)}, ValueError),
        ({"dtype": "float32"}, (TypeError, ValueError)),
        ({"dtype": (2, 0, 1)}, errors.DTypeError),
        ({"dtype": (2, 32, 0)}, errors.DTypeError),
        ({"dtype": (256, 32, 1)}, errors.DTypeError),
        ({"dtype": (2, 256, 1)}, errors.DTypeError),
        ({"dtype": (2, 32, 65536)}, errors.DTypeError),
        ({"dtype": (-1, 32, 1)}, errors.DTypeError),
        ({"device": (1,)}, ValueError),
        ({"device": (2**31, 0)}, OverflowError),
        ({"device": 1}, TypeError),
        ({"flags": "1"}, TypeError),
        ({"flags": 8, "dtype": INT4}, errors.ProtocolError),
    ],
    ids=str,
)
def test_new_refuses(wrong, error):
    """Invalid tensors raise, without holding the owner."""
    owner = Owner()
    gone = weakref.ref(owner)
    with pytest.raises(error):
        native.tensor_new(*{**GOOD, "owner": owner, **wrong}.values())
    del owner
    assert gone() is None


@pytest.mark.parametrize("arguments", [(), (1,) * 6, (1,) * 8])
def test_new_wants_seven_arguments(arguments):
    """A wrong number of arguments raises TypeError."""
    with pytest.raises(TypeError):
        native.tensor_new(*arguments)


@pytest.mark.parametrize("shape", [[2, 3], (2, 3), range(2, 4)])
def test_new_takes_any_sequence(shape):
    """Shape and strides may be any sequence of int."""
    assert native.tensor_new(4096, shape, [3, 1], list(FLOAT32), [1, 0], 0, None).shape == (2, 3)


def test_128_dimensions():
    """The maximal number of dimensions."""
    assert over((1,) * 128).ndim == 128


# ---- tensor_view


def test_views_share_memory_and_owner():
    """A view shares the memory and keeps it alive, in any order of release."""
    owner = Owner(range(64))
    gone = weakref.ref(owner)
    tensor = over(owner=owner)
    view = native.tensor_view(tensor, None, None, None, None)
    assert (view.data_ptr, view.shape, view.dtype, view.flags) == (tensor.data_ptr, (2, 3), FLOAT32, 0)
    del owner, tensor
    assert gone() is not None
    del view
    assert gone() is None


def test_views_hold_a_second_owner():
    """A view keeps a second owner alive, as long as itself."""
    first, second = Owner(range(64)), Owner()
    gone = weakref.ref(first), weakref.ref(second)
    view = native.tensor_view(over(owner=first), None, None, None, second)
    references = gc.get_referrers(second)
    del first, second, references
    assert None not in (gone[0](), gone[1]())
    del view
    assert (gone[0](), gone[1]()) == (None, None)


@pytest.mark.parametrize(
    ("tensor", "change", "wanted"),
    [
        ({}, {"dtype": (0, 32, 1)}, {"dtype": (0, 32, 1)}),
        ({}, {"dtype": (2, 16, 2)}, {"dtype": (2, 16, 2)}),
        ({"dtype": (1, 16, 1)}, {"dtype": (4, 16, 1)}, {"dtype": (4, 16, 1)}),
        ({"dtype": INT4}, {"dtype": (17, 4, 1)}, {"dtype": (17, 4, 1)}),
        ({"dtype": INT8}, {"dtype": (17, 4, 1), "flags": PADDED}, {"dtype": (17, 4, 1), "flags": PADDED}),
        ({}, {"device": (3, 1)}, {"device": (3, 1)}),
        ({}, {"flags": READ_ONLY}, {"flags": READ_ONLY, "readonly": True}),
        ({"flags": READ_ONLY}, {"flags": 0}, {"flags": 0, "readonly": False}),
        ({"flags": READ_ONLY}, {}, {"flags": READ_ONLY, "readonly": True}),
    ],
    ids=str,
)
def test_views_describe_anew(tensor, change, wanted):
    """A view replaces dtype, device and flags, and leaves the tensor unchanged."""
    tensor = over(**tensor)
    before = tensor.dtype, tensor.device, tensor.flags
    parts = {"dtype": None, "device": None, "flags": None, "owner": None, **change}
    view = native.tensor_view(tensor, *parts.values())
    assert {name: getattr(view, name) for name in wanted} == wanted
    assert (tensor.dtype, tensor.device, tensor.flags) == before


@pytest.mark.parametrize("owner", [None, "held"])
@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        ({}, {"dtype": (2, 16, 1)}),
        ({}, {"dtype": (2, 64, 1)}),
        ({}, {"dtype": (2, 32, 2)}),
        ({"dtype": INT4}, {"dtype": INT8}),
        ({"dtype": INT4}, {"dtype": (1, 7, 1)}),
        ({"dtype": INT4}, {"dtype": (1, 2, 1)}),
        ({"dtype": INT4}, {"flags": PADDED}),
        ({"dtype": INT4, "flags": PADDED}, {"flags": 0}),
    ],
    ids=str,
)
def test_views_keep_the_element_size(tensor, change, owner):
    """A dtype of another size would exceed the memory: it is rejected."""
    parts = {"dtype": None, "device": None, "flags": None, **change}
    with pytest.raises(errors.LayoutError):
        native.tensor_view(over((5,), **tensor), *parts.values(), owner)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, None, None, None, None), TypeError),
        (("tensor",), TypeError),
        (("tensor", "f4", None, None, None), (TypeError, ValueError)),
        (("tensor", None, (1,), None, None), ValueError),
        (("tensor", None, None, "1", None), TypeError),
        (("tensor", None, None, -1, None), OverflowError),
        (("tensor", (2, 0, 1), None, None, None), errors.ConversionError),
    ],
)
def test_view_refuses(arguments, error):
    """A wrong call raises, and holds nothing."""
    tensor = over()
    with pytest.raises(error):
        native.tensor_view(*(tensor if a == "tensor" else a for a in arguments))


# ---- consumers


SHAPES = [
    ((), None),
    ((6,), None),
    ((2, 3), None),
    ((3, 2), (1, 3)),
    ((2, 2), (3, 1)),
    ((2, 0), None),
    ((3, 2), (0, 1)),
]


@pytest.mark.numpy("2.2.5")
@pytest.mark.parametrize(("shape", "strides"), SHAPES)
@pytest.mark.parametrize("flags", [0, READ_ONLY])
def test_numpy_takes_it(np, shape, strides, flags):
    """numpy.from_dlpack shares the memory and keeps the read-only bit."""
    owner = Owner(range(64))
    gone = weakref.ref(owner)
    tensor = over(shape, strides, (0, 32, 1), flags=flags, owner=owner)
    array = np.from_dlpack(tensor)
    assert (array.shape, array.dtype.name, array.flags.writeable) == (shape, "int32", not flags)
    assert array.size == 0 or array.__array_interface__["data"][0] == tensor.data_ptr
    whole = np.frombuffer(owner, "i4")
    wanted = np.lib.stride_tricks.as_strided(whole, shape, [4 * s for s in tensor.strides])
    assert (array == wanted).all()
    del owner, tensor, whole, wanted
    assert gone() is not None
    del array
    assert gone() is None


@pytest.mark.parametrize(("shape", "strides"), SHAPES)
def test_torch_takes_it(torch, shape, strides):
    """torch.from_dlpack shares the memory."""
    owner = Owner(range(64))
    gone = weakref.ref(owner)
    tensor = over(shape, strides, (0, 32, 1), owner=owner)
    got = torch.from_dlpack(tensor)
    assert (tuple(got.shape), got.dtype) == (shape, torch.int32)
    assert got.numel() == 0 or got.data_ptr() == tensor.data_ptr
    wanted = torch.frombuffer(bytearray(owner), dtype=torch.int32).as_strided(shape, tensor.strides)
    assert torch.equal(got, wanted)
    del owner, tensor
    assert gone() is not None
    del got
    assert gone() is None


@pytest.mark.parametrize(("shape", "strides"), SHAPES)
def test_tvm_ffi_takes_it(shape, strides):
    """tvm_ffi, which calls a bare __dlpack__(), shares the memory."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    owner = Owner(range(64))
    gone = weakref.ref(owner)
    tensor = over(shape, strides, owner=owner)
    got = tvm_ffi.from_dlpack(tensor)
    assert tuple(got.shape) == shape
    back = claimed(got, max_version=(1, 0))
    assert (back.shape, back.dtype, back.data_ptr) == (shape, FLOAT32, tensor.data_ptr)
    del owner, tensor, back
    assert gone() is not None
    del got
    gc.collect()
    assert gone() is None


def test_pickled_buffers_in_a_cycle_are_collected(python):
    """With such a buffer over a memoryview, Python's collector would crash or print an error."""
    out = python("""
        import gc, pickle, dlx
        for data in (bytearray(64), b"x" * 64):
            tensor, buffers = dlx.from_dlpack(data), []
            text = pickle.dumps(tensor, 5, buffer_callback=buffers.append)
            assert pickle.loads(text, buffers=buffers).readonly == isinstance(data, bytes)
            assert type(memoryview(buffers[0]).obj) is dlx.Tensor
            buffers.append(buffers)
            del tensor, buffers
            gc.collect()
        print("done")
    """)
    assert out == "done\n"
