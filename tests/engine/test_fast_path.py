"""The fast path of `convert` has the same results and errors as the slow path, `convert.__wrapped__`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays.agreement import address, agree, emptied, outcome, slow
from support.arrays.examples import examples, product, shapes
from support.processes.calls import called

import dlx
from dlx import errors
from dlx._core import native

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

TARGETS = ["numpy", "torch", "dlx"]
OTHERS = ("tvm_ffi", "pyarrow")  # pyarrow has no exchange table: its adapter gets a dlx.Tensor


# ---- generated sources -----------------------------------------------------------------------------------------------

COMMON = ("bool", "int8", "int64", "uint8", "uint16", "float16", "float32", "float64", "complex64", "complex128")
TORCH = (*COMMON, "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex32", "int4", "uint4", "uint1")
NUMPY = (*COMMON, ">f4", ">i2", "U2", "M8[s]", "V4", "longdouble", "q", "l", "i4,f4")
ABSENT = object()
OPTIONS = product(
    [ABSENT, ABSENT, ABSENT, None, True, False, 1],
    [ABSENT, ABSENT, "copy", "error", "share", "no"],
    [ABSENT, ABSENT, True, False],
    [ABSENT, ABSENT, ABSENT, None, "cpu", "cpu:0", (1, 0), "metal"],
    [ABSENT, None],
).map(
    lambda drawn: {
        name: value
        for name, value in zip(("copy", "readonly", "detach", "device", "stream"), drawn, strict=True)
        if value is not ABSENT
    }
)
SHAPES = shapes([1, 2, 3, 3, 4, 0], 4)


NUMPY_SOURCES = product(NUMPY, range(5), (0, 0, "item", 1), (True, False), [True] + [False] * 9, (True, False))
STEP = st.sampled_from(
    [(step, True) for step in [1] * 6 + [*range(-6, 7)]] + [(step, False) for step in range(-20, 21)]
)
NUMPY_STRIDES = [st.tuples(*[STEP] * ndim) for ndim in range(5)]


@st.composite
def numpy_sources(draw, np):
    """Functions that create the same numpy array again."""
    name, ndim, offset, writeable, subclass, strided = draw(NUMPY_SOURCES)
    dtype, shape = np.dtype(name), draw(SHAPES[ndim])
    item = dtype.itemsize
    strides = [item * math.prod(shape[i + 1 :]) for i in range(ndim)]
    if strided:
        strides = [step * item if whole else step for step, whole in draw(NUMPY_STRIDES[ndim])]
    offset = 4096 + (item if offset == "item" else offset)

    def make():
        block = np.arange(8192 * 2, dtype="u2").view("u1") % (2 if dtype.kind == "b" else 251)
        array = np.ndarray(shape, dtype, block.astype("u1").data, offset, strides)
        array.flags.writeable = writeable
        return array.view(np.memmap) if subclass else array

    return make


TORCH_SOURCES = product(
    range(5),
    (True, False),
    [True] + [False] * 5,
    ["", "", "grad", "parameter", "subclass", "conj", "neg", "inference", "frozen parameter"],
    range(4),
)
TORCH_STRIDES = [st.tuples(*[st.integers(0, 20)] * ndim) for ndim in range(5)]


@st.composite
def torch_sources(draw, torch):
    """Functions that create the same torch tensor again."""
    ndim, strided, misaligned, twist, offset = draw(TORCH_SOURCES)
    dtype = getattr(torch, draw(st.sampled_from([name for name in TORCH if hasattr(torch, name)])))
    shape, strides = draw(SHAPES[ndim]), draw(TORCH_STRIDES[ndim])

    class Mine(torch.Tensor):
        pass

    def make():
        if (
            dtype.itemsize == 1
            and str(dtype).startswith(("torch.int", "torch.uint"))
            and dtype.itemsize * 8 > _width(dtype)
        ):
            return torch.empty(shape, dtype=dtype)  # a shell: nothing can be done with it
        if misaligned:
            block = torch.frombuffer(bytearray(range(250)) * 40, dtype=torch.uint8, offset=1)
        else:
            block = torch.arange(250, dtype=torch.uint8).repeat(40)
        if dtype is torch.bool:
            block %= 2
        tensor = torch.empty(0, dtype=dtype).set_(block.untyped_storage(), offset, shape)
        if misaligned:
            tensor = torch.frombuffer(bytearray(range(250)) * 40, dtype=dtype, count=300, offset=1).as_strided(
                shape, tensor.stride()
            )
        if strided:
            tensor = tensor.as_strided(shape, strides)
        if misaligned and twist in ("conj", "neg", "inference"):
            return tensor  # torch 2.13 itself crashes when it copies complex128 from memory that is not aligned
        return TWISTS.get(twist, lambda torch, tensor, mine: tensor)(torch, tensor, Mine)

    return make


def _width(dtype):
    digits = str(dtype).removeprefix("torch.").lstrip("uint")
    return int(digits) if digits.isdigit() else 8


def _inference(torch, tensor, mine):
    with torch.inference_mode():
        return tensor.clone()


TWISTS = {
    "grad": lambda torch, t, mine: t.requires_grad_(t.is_floating_point() or t.is_complex()),
    "parameter": lambda torch, t, mine: torch.nn.Parameter(t, t.is_floating_point() or t.is_complex()),
    "frozen parameter": lambda torch, t, mine: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda torch, t, mine: t.as_subclass(mine),
    "conj": lambda torch, t, mine: t.conj(),
    "neg": lambda torch, t, mine: torch._neg_view(t) if t.is_floating_point() or t.is_complex() else t,
    "inference": _inference,
}


@pytest.mark.parametrize("target", (*TARGETS, *OTHERS))
def test_fast_path_and_python_path_agree_on_numpy(np, torch, target):
    """Any numpy array gives the same result, or the same error, by both paths, whatever the options."""

    @settings(max_examples=examples(400), deadline=None)
    @given(numpy_sources(np), OPTIONS)
    def check(make, options):
        agree(make, target, **options)

    check()


@pytest.mark.parametrize("target", (*TARGETS, *OTHERS))
def test_fast_path_and_python_path_agree_on_torch(np, torch, target):
    """Any torch tensor gives the same result, or the same error, by both paths, whatever the options."""

    @settings(max_examples=examples(400), deadline=None)
    @given(torch_sources(torch), OPTIONS)
    def check(make, options):
        agree(make, target, **options)

    check()


@pytest.mark.parametrize("target", (*TARGETS, *OTHERS))
def test_fast_path_and_python_path_agree_on_dlx_tensors(np, torch, target):
    """Any dlx.Tensor gives the same result, or the same error, by the fast path and by the slow path."""

    @settings(max_examples=examples(200), deadline=None)
    @given(st.one_of(numpy_sources(np), torch_sources(torch)), OPTIONS)
    def check(make, options):
        try:
            slow(make(), to="dlx", detach=True)
        except errors.DlxError:
            return
        agree(lambda: slow(make(), to="dlx", detach=True), target, **options)

    check()


@pytest.mark.parametrize("flags", range(8))
@pytest.mark.parametrize("target", (*TARGETS, *OTHERS))
def test_flags_of_a_tensor(np, torch, target, flags):
    """Read-only, copied and padded tensors fare alike on both paths."""
    owner = bytearray(64)
    address = native.buffer_address(memoryview(owner))
    dtype = (17, 4, 1) if flags & 4 else (2, 32, 1)
    agree(lambda: native.tensor_new(address, (3,), None, dtype, (1, 0), flags, owner), target)


@pytest.mark.parametrize("device", [(2, 0), (3, 0), (1, 1), (11, 0), (13, 0)])
@pytest.mark.parametrize("target", (*TARGETS, *OTHERS))
def test_devices_of_a_tensor(np, torch, target, device):
    """Tensors that are not plain host memory fare alike on both paths."""
    owner = bytearray(64)
    address = native.buffer_address(memoryview(owner))

    def told(convert):
        try:
            result = convert(native.tensor_new(address, (3,), None, (2, 32, 1), device, 0, owner), to=target)
        except Exception as error:
            return type(error)
        return type(result), tuple(dlx.describe(result).device)

    assert told(dlx.convert) == told(dlx.convert) == told(slow)


# ---- torch tensors without plain memory ------------------------------------------------------------------------------


def warm(torch):
    """Have routes for torch's fast-path types to every target."""
    for target in TARGETS:
        for _ in range(2):
            dlx.convert(torch.ones(2), to=target)
            dlx.convert(torch.nn.Parameter(torch.ones(2), requires_grad=False), to=target)


def refused(make, error=errors.LayoutError, targets=("numpy", "dlx")):
    """Both paths refuse a source with this class of error."""
    for target in targets:
        assert agree(make, target)[0] is error


SHAPED = pytest.mark.parametrize("shape", [(3,), (2, 3), (), (0,), (2, 0)], ids=str)


@SHAPED
def test_functionalize(np, torch, shape):
    """A tensor inside functionalize() has no data, even if it has no elements; both paths refuse it."""
    warm(torch)
    torch.func.functionalize(lambda t: (refused(lambda: t), t + 1)[1])(torch.ones(shape))


@SHAPED
def test_vmap(np, torch, shape):
    """A tensor inside vmap() is refused by both paths."""
    warm(torch)
    torch.func.vmap(lambda t: (refused(lambda: t), t)[1])(torch.ones((2, *shape)))


@SHAPED
def test_func_grad(np, torch, shape):
    """A tensor inside func.grad() is refused by both paths."""
    warm(torch)
    torch.func.grad(lambda t: (refused(lambda: t), t.sum())[1])(torch.ones(shape))


@SHAPED
def test_jvp(np, torch, shape):
    """A tensor inside jvp() is refused by both paths."""
    warm(torch)
    torch.func.jvp(lambda t: (refused(lambda: t), t)[1], (torch.ones(shape),), (torch.ones(shape),))


@pytest.mark.parametrize("transform", ["functionalize", "vmap", "grad", "jvp"])
def test_a_plain_tensor_inside_a_transform(np, torch, transform):
    """A tensor from outside that a transformed function reads fares alike on both paths."""
    warm(torch)
    outside = torch.ones(3)
    seen = []

    def inside(t):
        seen.extend(outcome(convert, outside, "dlx", {}) for convert in (dlx.convert, slow))
        return t.sum()

    run = getattr(torch.func, transform)
    if transform == "jvp":
        run(inside, (torch.ones(3),), (torch.ones(3),))
    else:
        run(inside)(torch.ones(3))
    assert seen[0] == seen[1]


@SHAPED
def test_forward_mode_dual(np, torch, shape):
    """A dual tensor is refused by both paths; without its tangent it is shared, also while the level is open."""
    warm(torch)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(shape), torch.ones(shape))
        refused(lambda: dual)
        assert agree(lambda: forward_ad.unpack_dual(dual).primal, "numpy")[1] == dlx.DType("float32")
    assert agree(lambda: torch.ones(shape), "numpy")[1] == dlx.DType("float32")


@SHAPED
def test_zero_tensor(np, torch, shape):
    """A zero tensor of autograd has no data: both paths make zeros."""
    warm(torch)
    assert agree(lambda: torch._efficientzerotensor(shape), "numpy")[1] == dlx.DType("float32")


@pytest.mark.parametrize(
    ("nbytes", "frozen"),
    [
        (0, False),
        (8, False),
        (399_999, False),
        (0, True),
        (8, True),
        (399_999, True),
    ],
)
def test_cut_storage(np, torch, nbytes, frozen):
    """A tensor that needs more bytes than its storage has is refused by both paths: nothing beyond is ever read."""
    warm(torch)
    refused(lambda: emptied(torch, nbytes, frozen))


def test_cut_storage_after_a_view_was_converted(np, torch):
    """Converting a part that is still there does not open the way to the part that is gone."""
    warm(torch)
    tensor = torch.ones(100_000)
    tensor.untyped_storage().resize_(8)
    assert dlx.convert(tensor[:2], to="numpy").shape == (2,)
    with pytest.raises(errors.LayoutError, match="resized to 8 bytes"):
        dlx.convert(tensor, to="numpy")


def test_part_of_a_cut_storage(np, torch):
    """Both paths share tensors inside the remaining bytes."""
    warm(torch)
    for target in ("numpy", "dlx"):
        assert agree(lambda: emptied(torch, 400, False)[:100], target)[5]
        assert agree(lambda: emptied(torch, 400, False)[5:100:3], target)[5]


@SHAPED
def test_fake_tensor(np, torch, shape):
    """A FakeTensor is refused by both paths, inside its mode and outside."""
    warm(torch)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = torch.ones(shape)
        refused(lambda: fake)
    refused(lambda: fake)
    plain = torch.ones(shape)
    with mode:
        for target in ("numpy", "dlx"):
            agree(lambda: plain, target)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested(np, torch):
    """Nested tensors of either layout are refused by both paths."""
    warm(torch)
    for layout in (torch.strided, torch.jagged):
        refused(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))  # noqa: B023


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "mkldnn"])
def test_sparse(np, torch, kind):
    """Sparse and opaque layouts are refused by both paths."""
    warm(torch)
    make = {
        "coo": lambda: torch.eye(4).to_sparse(),
        "csr": lambda: torch.eye(4).to_sparse_csr(),
        "csc": lambda: torch.eye(4).to_sparse_csc(),
        "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        "mkldnn": lambda: torch.eye(4).to_mkldnn(),
    }
    refused(make[kind])


@SHAPED
def test_meta(np, torch, shape):
    """Meta tensors are refused by both paths."""
    warm(torch)
    refused(lambda: torch.empty(shape, device="meta"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized(np, torch):
    """Quantized tensors are refused by both paths."""
    warm(torch)
    refused(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), errors.DTypeError)


@SHAPED
@pytest.mark.parametrize("name", ["int1", "int4", "int7", "uint1", "uint4", "uint7"])
def test_shells(np, torch, name, shape):
    """Both paths refuse tensors with dtypes below a byte; they never export them as bytes."""
    warm(torch)
    refused(lambda: torch.empty(shape, dtype=getattr(torch, name)), errors.DTypeError)


def test_copy_on_write(np, torch):
    """A lazy clone is exported with separate memory: writes to the result do not change the original."""
    warm(torch)
    for target in ("numpy", "dlx"):
        original = torch.ones(1000)
        clone = torch._lazy_clone(original)
        result = dlx.convert(clone, to=target)
        dlx.convert(result, to="numpy")[:] = 7
        assert original.sum() == 1000 and clone.sum() == 7000
        agree(lambda: torch._lazy_clone(torch.ones(1000)), target)


def test_a_refused_lazy_clone_stays_lazy(np, torch):
    """A refusal does not materialise a copy-on-write tensor."""
    warm(torch)
    clone = torch._lazy_clone(torch.ones(1000)).requires_grad_()
    with pytest.raises(errors.ConversionError):
        dlx.convert(clone, to="numpy")
    assert torch._C._is_cow_tensor(clone)


def test_inference_tensor(np, torch):
    """Inference tensors fare alike on both paths, inside the mode and outside."""
    warm(torch)
    with torch.inference_mode():
        tensor = torch.ones(3)
        inside = agree(lambda: tensor, "numpy")
    assert inside == agree(lambda: tensor, "numpy")
    assert inside[5]


def test_no_grad_does_not_hide_gradients(np, torch):
    """Under no_grad a leaf still requires gradients: both paths refuse it."""
    warm(torch)
    with torch.no_grad():
        refused(lambda: torch.ones(3, requires_grad=True), errors.ConversionError)


def test_default_device(np, torch):
    """A default device of torch does not change the result of a conversion."""
    warm(torch)
    tensor = torch.ones(3)
    with torch.device("meta"):
        assert agree(lambda: tensor, "numpy")[5] and agree(lambda: np.ones(3), "torch")[5]


def test_a_parameter_without_gradient_is_shared(np, torch):
    """A frozen Parameter takes the fast path and gives the same as the slow path."""
    for target in ("numpy", "dlx"):
        assert agree(lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False), target)[5]


def test_writes_through_the_fast_path_show(np, torch):
    """The fast path shares memory in both directions."""
    tensor = torch.zeros(3)
    dlx.convert(tensor, to="numpy")[0] = 5
    dlx.convert(tensor, to="numpy")[1] = 6
    assert tensor.tolist() == [5, 6, 0]
    array = np.zeros(3)
    dlx.convert(array, to="torch")[0] = 5
    dlx.convert(array, to="torch")[1] = 6
    assert array.tolist() == [5, 6, 0]


def test_overwritten_strides_do_not_show(np):
    """Results keep their strides even if the table overwrites the borrowed ones."""
    first = dlx.convert(np.zeros((3, 4))[:, ::2], to="dlx")
    second = dlx.convert(np.zeros((2, 5)), to="dlx")
    assert first.strides == (4, 2) and second.strides == (5, 1)


# ---- copies and options ----------------------------------------------------------------------------------------------


@pytest.mark.torch("2.10")  # older ones have no exchange table
@pytest.mark.parametrize(
    "options",
    [{"copy": True}, {"copy": False}, {"copy": None}, {"readonly": "error"}, {"detach": True}, {"device": "cpu"}],
    ids=str,
)
def test_plain_options_stay_on_the_fast_path(np, torch, options):
    """copy=, readonly=, detach= and device="cpu" are understood in C."""
    array, tensor = np.ones(3), torch.ones(3)
    for source, to in ((array, "torch"), (tensor, "numpy"), (array, "dlx"), (tensor, "dlx")):
        dlx.convert(source, to=to)

        def call(source=source, to=to):
            assert (address(dlx.convert(source, to=to, **options)) == address(source)) is not options.get("copy", False)

        assert called(call) in (["call"], ["call"] + ["address"] * 2)


@pytest.mark.torch("2.10")  # older ones have no exchange table
def test_what_a_copy_resolves_is_copied_on_the_fast_path(np, torch):
    """Read-only, negative and unaligned arrays, and lists of them, are copied in C; other policies are Python's."""
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    unaligned = np.frombuffer(bytearray(33), "f8", 4, 1)
    dlx.convert(np.ones(3), to="torch")
    for array in (frozen, np.arange(4)[::-1], unaligned):
        for source in (array, [array, {"a": (array,)}]):
            results = []
            assert called(lambda s=source, r=results: r.append(dlx.convert(s, to="torch"))) == ["<lambda>"]
            result = results[0] if source is array else results[0][0]
            assert result.tolist() == array.tolist() and result.data_ptr() != array.ctypes.data
    assert dlx.convert(frozen, to="torch", readonly="share").data_ptr() == frozen.ctypes.data
    with pytest.raises(errors.ReadOnlyError):
        dlx.convert(frozen, to="torch", readonly="error")
    with pytest.raises(errors.CopyRequiredError):
        dlx.convert(np.arange(4)[::-1], to="torch", copy=False)
    assert dlx.convert(frozen, to="dlx").readonly and not dlx.convert(frozen, to="dlx", copy=True).readonly


def test_a_copied_tensor_is_not_pinned(np, torch):
    """A storage that was only read may be resized afterwards; one that is shared may not."""
    tensor = torch.ones(4)
    dlx.convert(tensor, to="numpy", copy=True)
    tensor.untyped_storage().resize_(64)
    dlx.convert(tensor, to="numpy")
    with pytest.raises(RuntimeError):
        tensor.untyped_storage().resize_(128)


def test_a_tree_that_is_refused_later_copies_nothing(np, torch):
    """The last leaf is refused: the error names it, though others would have been copied."""
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    with pytest.raises(errors.DTypeError, match=r"at obj\[1\]"):
        dlx.convert([frozen, np.array([None])], to="torch")
