"""Special torch tensors as sources: resolved if that is correct, else refused by name."""

from __future__ import annotations

import re

import pytest

import dlx
from dlx import errors

TARGETS = ["numpy", "dlx"]


def numbers(array):
    """Return the values of a result of either target."""
    return dlx.convert(array, to="numpy").tolist()


@pytest.mark.parametrize("device", ["cuda", "cuda_host", "rocm"])
def test_a_device_that_the_build_lacks(np, torch, device):
    """The reason and the fix are the same for arrays of any framework, also torch's own, and for plans."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this build has devices")
    for obj in (np.zeros(3), torch.zeros(3)):
        with pytest.raises(errors.DeviceError, match="supports only the host") as caught:
            dlx.convert(obj, to="torch", device=device)
        assert caught.value.fix == "Install a build for the device, or leave device out."
        assert str(dlx.plan(obj, to="torch", device=device).error) == str(caught.value)


# ---- gradients -------------------------------------------------------------------------------------------------------


def graded(torch):
    """Return tensors that require gradients."""

    class Mine(torch.Tensor):
        pass

    leaf = torch.ones(2, requires_grad=True)
    return {
        "leaf": leaf,
        "non-leaf": leaf * 1,
        "view": leaf[:],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "weight": torch.nn.Linear(2, 1).weight,
        "subclass": torch.ones(2).as_subclass(Mine).requires_grad_(),
    }


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["leaf", "non-leaf", "view", "parameter", "weight", "subclass"])
def test_gradients_need_detach(np, torch, kind, target):
    """A tensor that requires gradients is refused, also under no_grad, unless detach=True; then memory is shared."""
    tensor = graded(torch)[kind]
    with torch.no_grad(), pytest.raises(errors.ConversionError, match="requires gradients") as caught:
        dlx.convert(tensor, to=target)
    assert caught.value.fix == "Pass detach=True."
    result = dlx.convert(tensor, to=target, detach=True, copy=False)
    assert numbers(result) == tensor.tolist()
    assert dlx.describe(result).address == tensor.data_ptr()


def test_detach_is_harmless_where_there_is_no_graph(np, torch):
    """detach=True is accepted for any source."""
    tensor = torch.ones(2)
    assert dlx.describe(dlx.convert(tensor, to="numpy", detach=True)).address == tensor.data_ptr()
    assert dlx.convert(np.ones(2), to="torch", detach=True).requires_grad is False


# ---- conj and neg bits -----------------------------------------------------------------------------------------------

LAZY = {
    "conj": (lambda torch, z: z.conj(), "conj bit"),
    "conj of a slice": (lambda torch, z: z[1:].conj(), "conj bit"),
    "conj().imag": (lambda torch, z: z.conj().imag, "neg bit"),
    "neg view": (lambda torch, z: torch._neg_view(z.real), "neg bit"),
    "conj and neg": (lambda torch, z: torch._neg_view(z.conj()), "bit"),
    "0-d": (lambda torch, z: z.conj()[0], "conj bit"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", LAZY)
def test_lazy_bits_give_right_values(np, torch, kind, target):
    """Pending conjugations and negations are resolved with one copy; copy=False refuses and names the bit."""
    make, bit = LAZY[kind]
    tensor = make(torch, torch.tensor([1 + 2j, 3 - 4j, 5 + 6j]))
    expected = tensor.resolve_conj().resolve_neg().tolist()
    for copy in (None, True):
        assert numbers(dlx.convert(tensor, to=target, copy=copy)) == expected
        assert dlx.plan(tensor, to=target, copy=copy).outcome == "copied"
    with pytest.raises(errors.CopyRequiredError, match=bit) as caught:
        dlx.convert(tensor, to=target, copy=False)
    assert caught.value.fix == "Drop copy=False."


def test_lazy_bits_with_gradients(np, torch):
    """detach=True works together with resolving, and the source is not changed."""
    leaf = torch.tensor([1 + 2j], requires_grad=True)
    array = dlx.convert(leaf.conj(), to="numpy", detach=True)
    array[0] = 0
    assert leaf.tolist() == [1 + 2j]


def test_twice_conjugated_is_shared(np, torch):
    """A conjugation that was undone is shared."""
    tensor = torch.tensor([1 + 2j])
    assert dlx.plan(tensor.conj().conj(), to="numpy", copy=False).outcome == "shared"


# ---- no plain memory behind it ---------------------------------------------------------------------------------------


def fake(torch):
    """Return a tensor of FakeTensorMode, without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


def two(torch):
    """Return a wrapper subclass."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(3), torch.ones(3))


def masked(torch):
    """Return a MaskedTensor, which is a wrapper subclass."""
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


def emptied(torch):
    """Return a tensor whose storage was freed."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


MATRIX = [[1.0, 0.0], [0.0, 2.0]]
REFUSED = {  # function, error, the kind, the method to call
    "coo": (lambda t: t.tensor(MATRIX).to_sparse(), "LayoutError", "no coo arrays", r"\.to_dense\(\)"),
    "csr": (lambda t: t.tensor(MATRIX).to_sparse_csr(), "LayoutError", "no csr arrays", r"\.to_dense\(\)"),
    "csc": (lambda t: t.tensor(MATRIX).to_sparse_csc(), "LayoutError", "no csc arrays", r"\.to_dense\(\)"),
    "bsr": (lambda t: t.tensor(MATRIX).to_sparse_bsr((1, 1)), "LayoutError", "no bsr arrays", r"\.to_dense\(\)"),
    "empty coo": (lambda t: t.zeros(0, 2).to_sparse(), "LayoutError", "no coo arrays", r"\.to_dense\(\)"),
    "mkldnn": (lambda t: t.tensor(MATRIX).to_mkldnn(), "LayoutError", "mkldnn", r"\.to_dense\(\)"),
    "quantized": (
        lambda t: t.quantize_per_tensor(t.ones(3), 0.1, 0, t.qint8),
        "DTypeError",
        "quantized",
        r"\.dequantize\(\)",
    ),
    "per channel": (
        lambda t: t.quantize_per_channel(t.ones(2, 2), t.ones(2), t.zeros(2), 0, t.quint8),
        "DTypeError",
        "quantized",
        r"\.int_repr\(\)",
    ),
    "nested strided": (
        lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)]),
        "LayoutError",
        "nested",
        r"\.to_padded_tensor\(",
    ),
    "nested jagged": (
        lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)], layout=t.jagged),
        "LayoutError",
        "no ragged arrays",
        r"\.to_padded_tensor\(",
    ),
    "meta": (lambda t: t.empty(3, device="meta"), "LayoutError", "meta", r"torch\.empty_like\("),
    "empty meta": (lambda t: t.empty(0, device="meta"), "LayoutError", "meta", r"torch\.empty_like\("),
    "fake": (fake, "LayoutError", "FakeTensor", "FakeTensorMode"),
    "functional": (lambda t: t._to_functional_tensor(t.ones(3)), "LayoutError", "functionalize", "outside"),
    "two tensor": (two, "LayoutError", "wrapper subclass", "inside|wraps"),
    "masked tensor": (masked, "LayoutError", "wrapper subclass", "inside|wraps"),
    "emptied storage": (emptied, "LayoutError", r"storage was emptied \(resize_\(0\)\)", "before"),
}
only_warns = pytest.mark.filterwarnings("ignore")  # torch warns that half of these are experimental or deprecated


@only_warns
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_without_memory_are_refused(np, torch, kind, target):
    """The error names the kind of tensor and the method to call, for all options; the plan agrees."""
    make, error, because, fix = REFUSED[kind]
    tensor = make(torch)
    for options in ({}, {"copy": True}, {"copy": False}, {"detach": True}):
        with pytest.raises(getattr(errors, error), match=because) as caught:
            dlx.convert(tensor, to=target, **options)
        assert re.search(fix, caught.value.fix)
        assert str(dlx.plan(tensor, to=target, **options).error) == str(caught.value)


@only_warns
@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_without_memory_can_be_described(np, torch, kind):
    """The description has the known facts without reading missing memory."""
    info = dlx.describe(REFUSED[kind][0](torch))
    assert info.framework == "torch" and info.address == 0


@only_warns
@pytest.mark.parametrize("kind", ["coo", "csr", "mkldnn", "quantized"])
def test_the_method_that_the_error_names_helps(np, torch, kind):
    """The call in the fix makes the tensor convertible."""
    make, _, _, fix = REFUSED[kind]
    method = fix.strip("\\.()").replace("\\", "").replace("(", "")
    assert dlx.convert(getattr(make(torch), method)(), to="numpy").size


ZERO = {
    "plain": lambda zero: zero,
    "part": lambda zero: zero[1:],
    "transposed": lambda zero: zero.T,
    "empty part": lambda zero: zero[2:],
    "conj": lambda zero: zero.conj(),
}


@pytest.mark.parametrize("part", ZERO)
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64"])
@pytest.mark.parametrize("target", TARGETS)
def test_zero_tensors_are_copied(np, torch, part, dtype, target):
    """Zero tensors without memory are created, unless copy=False."""
    dlx.convert(torch.ones(2), to=target)  # a route is known
    zero = ZERO[part](torch._efficientzerotensor((2, 3), dtype=getattr(torch, dtype)))
    assert zero._is_zerotensor()
    plan = dlx.plan(zero, to=target)
    assert plan.outcome == "copied" and "zero tensor" in str(plan)
    made = [dlx.convert(zero, to=target), dlx.convert([zero], to=target)[0], dlx.stack([zero, zero], to=target)]
    for each in made:
        array = dlx.convert(each, to="numpy")
        assert array.shape[-2:] == tuple(zero.shape) and not array.any() and str(array.dtype) == dtype
    with dlx.borrow(zero, readonly=True) as tensor:
        assert tensor.ndim == 2
    if zero.numel():
        for refused in (lambda: dlx.convert(zero, to=target, copy=False), lambda: dlx.borrow(zero).__enter__()):
            with pytest.raises(errors.CopyRequiredError, match=r"zero tensor|conj bit"):
                refused()
    assert dlx.convert(zero, to="torch") is zero


@only_warns
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
def test_values_inside_transforms_are_refused(np, torch, transform):
    """Values inside torch.func have no data; the error says so and has a fix."""
    found = []

    def function(x):
        for target in TARGETS:
            with pytest.raises(errors.LayoutError, match=r"inside functionalize|inside a torch\.func") as caught:
                dlx.convert(x, to=target)
            found.append((caught.value.fix, dlx.plan(x, to=target).outcome))
        return (x * x).sum()

    x = torch.ones(2, 3)
    func = torch.func
    calls = {
        "vmap": lambda: func.vmap(function)(x),
        "grad": lambda: func.grad(function)(x),
        "jvp": lambda: func.jvp(function, (x,), (x,)),
        "functionalize": lambda: func.functionalize(function)(x),
    }
    calls[transform]()
    assert found == [("Convert outside of it.", "refused")] * 2


def test_tensors_from_outside_a_transform_convert_inside(np, torch):
    """Inside a transform, tensors from outside still convert."""
    outside, found = torch.ones(2), []
    torch.func.vmap(lambda x: found.append(dlx.convert(outside, to="numpy").tolist()) or x)(torch.ones(2))
    assert found == [[1.0, 1.0]]


@only_warns
@pytest.mark.parametrize("target", TARGETS)
def test_forward_mode_duals_are_refused(np, torch, target):
    """A dual is refused; its primal and other tensors of the level convert."""
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        dual = forward.make_dual(torch.ones(2), torch.ones(2))
        for options in ({}, {"detach": True}, {"copy": True}):
            with pytest.raises(errors.ConversionError, match="forward-mode tangent") as caught:
                dlx.convert(dual, to=target, **options)
            assert "unpack_dual(t).primal" in caught.value.fix
        assert numbers(dlx.convert(forward.unpack_dual(dual).primal, to=target)) == [1.0, 1.0]
        assert numbers(dlx.convert(torch.zeros(1), to=target)) == [0.0]
    assert numbers(dlx.convert(dual, to=target)) == [1.0, 1.0]


def test_a_storage_too_small_for_its_tensor_is_refused(torch):
    """A storage that is too small for its tensor is refused."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(16)
    with pytest.raises(errors.LayoutError, match="storage"):
        dlx.convert(tensor, to="dlx")


@pytest.mark.parametrize("to", ["dlx", "numpy"])
@pytest.mark.parametrize("options", [{}, {"detach": True}, {"device": "cpu"}])
@pytest.mark.parametrize("name", ["UninitializedParameter", "UninitializedBuffer"])
def test_what_has_no_shape_yet_is_refused(torch, name, options, to):
    """A parameter or buffer of a lazy module is refused, for every option."""
    lazy = getattr(torch.nn.parameter, name)()
    with pytest.raises(errors.ConversionError, match="it is not initialized yet"):
        dlx.convert(lazy, to=to, **options)
    assert dlx.describe(lazy).shape is None
    for inside in ({}, {"device": "cpu"}):
        assert dlx.convert(lazy, "torch", **inside) is lazy
        assert dlx.plan(lazy, "torch", **inside).outcome == "same"
    with pytest.raises(errors.ConversionError, match="it is not initialized yet"):
        dlx.convert(lazy, "torch", copy=True)
    assert "it is not initialized yet" in str(dlx.plan(lazy, "torch", copy=True).error)


# ---- subclasses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_subclasses_export_through_torch_function(np, torch, target):
    """A subclass sees its export once."""

    class Watched(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.calls += function is torch.Tensor.__dlpack__
            return super().__torch_function__(function, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Watched)
    assert numbers(dlx.convert(tensor, to=target, copy=False)) == [1.0, 1.0]
    assert Watched.calls == 1


def test_a_subclass_is_described_without_its_torch_function(np, torch):
    """__torch_function__ is not called: it would run for forty attributes."""

    class Watched(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.calls += 1
            return super().__torch_function__(function, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Watched)
    before = Watched.calls
    info = dlx.describe(tensor)
    assert (info.shape, info.nbytes, info.readonly) == ((2,), 8, False)
    assert dlx.plan(tensor, to="numpy", probe=False).ok
    assert Watched.calls == before


@pytest.mark.parametrize("target", TARGETS)
def test_subclasses_export_through_their_own_method(np, torch, target):
    """A subclass's own export is used."""

    class Doubled(torch.Tensor):
        def __dlpack__(self, *, max_version=None):
            return (self.as_subclass(torch.Tensor) * 2).__dlpack__(max_version=max_version)

    assert numbers(dlx.convert(torch.ones(2).as_subclass(Doubled), to=target)) == [2.0, 2.0]


def test_subclasses_are_checked_like_tensors(np, torch):
    """Gradients, lazy bits and missing memory of a subclass are checked."""

    class Mine(torch.Tensor):
        pass

    conjugated = torch.tensor([1 + 2j]).conj().as_subclass(Mine)
    assert numbers(dlx.convert(conjugated, to="numpy")) == [1 - 2j]
    with pytest.raises(errors.LayoutError, match="meta"):
        dlx.convert(torch.empty(1, device="meta").as_subclass(Mine), to="numpy")


# ---- dtypes ----------------------------------------------------------------------------------------------------------

SHELLS = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
BITS = ["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"]


@only_warns
@pytest.mark.parametrize("dtype", SHELLS + BITS)
def test_shell_dtypes_are_refused(np, torch, dtype):
    """A dtype that torch would export as bytes of another name is refused by its name."""
    tensor = torch.empty(2, dtype=getattr(torch, dtype))
    for target in TARGETS:
        with pytest.raises(errors.DTypeError, match=rf"torch\.{dtype} ") as caught:
            dlx.convert(tensor, to=target)
        assert ".view(torch.uint8)" in caught.value.fix


ONLY_TORCH = {
    "bfloat16": (4, 16, 1),
    "complex32": (5, 32, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}


@only_warns
@pytest.mark.parametrize("dtype", ONLY_TORCH)
def test_dtypes_of_torch_cross_to_dlx_and_back(torch, dtype):
    """A dtype that numpy lacks converts to dlx.Tensor with its DLPack numbers and back, bit for bit."""
    tensor = torch.arange(248, 256, dtype=torch.uint8).view(getattr(torch, dtype))
    middle = dlx.convert(tensor, to="dlx", copy=False)
    assert middle.dtype == ONLY_TORCH[dtype] and middle.shape == tuple(tensor.shape)
    for copy in (False, True):
        back = dlx.convert(middle, to="torch", copy=copy)
        assert back.dtype is tensor.dtype and (back.data_ptr() == tensor.data_ptr()) is (copy is False)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    copy = dlx.convert(tensor, to="torch", copy=True)
    assert copy.dtype is tensor.dtype and copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8))


@only_warns
def test_two_numbers_in_a_byte_are_refused_by_numpy(np, torch):
    """A dtype that numpy lacks is refused with its name and numpy's dtypes."""
    with pytest.raises(errors.DTypeError, match=r"numpy has no dtype float4_e2m1fnx2; it has (bfloat16, )?bool, "):
        dlx.convert(torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), to="numpy")


def test_two_numbers_in_a_byte_by_hand(np, torch):
    """The fixes give the same values, from numpy and jax to torch and back."""
    float4 = pytest.importorskip("ml_dtypes").float4_e2m1fn
    values = np.array([[0, 0.5, 1, 1.5, 2, 3], [4, 6, -0.5, -1, -6, -0.0]], float4)
    with pytest.raises(errors.DTypeError, match=r"With x = numpy.asarray\(x\).view\('uint8'\), convert x\[..., ::2\]"):
        dlx.convert(values, to="torch")
    x = values.view("uint8")
    packed = dlx.convert(x[..., ::2] | x[..., 1::2] << 4, to="torch").view(torch.float4_e2m1fn_x2)
    tensor = dlx.convert(packed, to="dlx")
    assert tensor.shape == (2, 3) and str(tensor.dtype) == "float4_e2m1fnx2"
    with pytest.raises(errors.DTypeError, match=r"Convert its bytes, x.view\(torch.uint8\); the low four bits"):
        dlx.convert(packed, to="numpy")
    read = dlx.convert(packed.view(torch.uint8), to="numpy")
    back = np.stack([read & 15, read >> 4], axis=-1).reshape(2, 6).view(float4)
    assert back.tobytes() == values.tobytes()


@only_warns
def test_complex32_with_both_bits(torch):
    """Torch cannot resolve conj and neg together; the plan says so, and the fix works."""
    source = torch._neg_view(torch.tensor([1 + 2j], dtype=torch.complex32).conj())
    for options in ({"to": "dlx"}, {"to": "torch", "copy": True}):
        with pytest.raises(errors.LayoutError, match="both set"):
            dlx.convert(source, **options)
        assert type(dlx.plan(source, **options).error) is errors.LayoutError
    assert dlx.convert(source.conj().resolve_neg(), to="dlx").shape == (1,)


# ---- copy on write ---------------------------------------------------------------------------------------------------


def lazy_clone(torch, tensor):
    """Return a clone on write, under its name in this version of torch."""
    if not hasattr(torch._C, "_is_cow_tensor"):
        pytest.skip("this torch has no copy-on-write tensors")
    return torch._lazy_clone(tensor)


@pytest.mark.parametrize("target", TARGETS)
def test_looking_does_not_materialise(np, torch, target):
    """Plans and descriptions do not materialise a copy-on-write tensor."""
    tensor = torch.ones(4)
    clone = lazy_clone(torch, tensor)
    for each in (tensor, clone):
        assert dlx.plan(each, to=target).outcome == "shared"
        assert dlx.describe(each).address
        assert torch._C._is_cow_tensor(each)


@pytest.mark.parametrize("target", TARGETS)
def test_converting_does_not_write_to_the_other_clone(np, torch, target):
    """Writing to the result of one copy-on-write clone does not change the other clone."""
    tensor = torch.ones(4)
    clone = lazy_clone(torch, tensor)
    result = dlx.convert(clone, to=target)
    dlx.convert(result, to="numpy")[:] = 7
    assert clone.tolist() == [7.0] * 4 and tensor.tolist() == [1.0] * 4
    assert numbers(dlx.convert(tensor, to=target)) == [1.0] * 4


def test_a_view_is_described_where_it_begins(torch):
    """The address of a view is its first element's, not its storage's."""
    view = torch.ones(10)[3:]
    assert dlx.describe(view).address == view.data_ptr()
    assert dlx.plan(view, to="dlx").source.address == view.data_ptr()


def test_complex_numbers_at_an_odd_address_are_copied(torch, python):
    """complex128 at an odd address, which torch 2.13 crashes on, is copied with its class, strides and gradients."""
    code = """
        import torch, dlx

        class Mine(torch.Tensor):
            pass

        block = bytearray(range(200))
        for shape, strides in (((), ()), ((3,), (2,)), ((2, 3), (1, 2)), ((2, 2), (0, 1)), ((0, 3), (3, 1))):
            odd = torch.frombuffer(block, dtype=torch.complex128, count=8, offset=1).as_strided(shape, strides)
            copy = dlx.convert(odd.as_subclass(Mine), to="torch", copy=True)
            assert type(copy) is Mine and copy.shape == odd.shape and copy.tolist() == odd.tolist()
            assert not copy.numel() or copy.data_ptr() % 16 == 0
            leaf = odd.requires_grad_()
            assert dlx.convert(leaf, to="torch", copy=True).grad_fn is not None
    """
    assert python(code, args=(), imported=True) == ""


def test_complex_tensors_without_memory_are_copied_by_torch(torch):
    """Alignment is checked only if there is data: a fake tensor is copied."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3, dtype=torch.complex128)
        copy = dlx.convert(fake, to="torch", copy=True)
        assert type(copy) is type(fake) and copy is not fake and copy.shape == (3,)


def test_a_graph_is_dropped_inside_torch_of_what_has_no_memory(torch):
    """`detach=True` drops the graph of meta, sparse and emptied tensors without an export."""
    emptied = torch.zeros(3, requires_grad=True)
    emptied.untyped_storage().resize_(0)
    for tensor in (
        torch.zeros(3, device="meta", requires_grad=True),
        torch.zeros(3, 3).to_sparse().requires_grad_(),
        emptied,
    ):
        assert dlx.convert(tensor, to="torch") is tensor
        assert not dlx.convert(tensor, to="torch", detach=True).requires_grad
        assert dlx.plan(tensor, to="torch", detach=True).steps[0].do == "detach"


@pytest.mark.parametrize("convert", [dlx.convert, dlx.convert.__wrapped__], ids=["fast", "slow"])
@pytest.mark.parametrize("transform", ["grad", "grad of vmap", "jvp", "dual"])
@only_warns
def test_a_graph_is_dropped_inside_torch_within_transforms(torch, transform, convert):
    """The graph is dropped even if only an inner level records it."""
    func, forward, found = torch.func, torch.autograd.forward_ad, []

    def function(x):
        assert convert(x, to="torch") is x
        found.append(dlx.plan(x, to="torch", detach=True).steps[0].do)
        return (convert(x, to="torch", detach=True) ** 2).sum()

    x = torch.ones(2, 3)
    if transform == "dual":
        with forward.dual_level():
            result = function(forward.make_dual(x, x))
            assert forward.unpack_dual(result).tangent is None
    elif transform == "jvp":
        assert func.jvp(function, (x,), (x,))[1] == 0
    else:
        inner = function if transform == "grad" else lambda x: func.vmap(function)(x).sum()
        assert not func.grad(inner)(x).any()
    assert found == ["detach"]


@pytest.mark.parametrize("convert", [dlx.convert, dlx.convert.__wrapped__], ids=["fast", "slow"])
def test_a_graph_that_torch_does_not_drop_is_refused(torch, convert):
    """An uninitialized parameter is refused with detach; without gradients nothing is dropped."""
    lazy = torch.nn.parameter
    with pytest.raises(errors.LayoutError, match="it is not initialized yet") as caught:
        convert(lazy.UninitializedParameter(), to="torch", detach=True)
    assert caught.value.fix == "Run the module once first."
    plan = dlx.plan(lazy.UninitializedParameter(), to="torch", detach=True)
    assert (plan.outcome, str(plan.error)) == ("refused", str(caught.value))
    for plain in (lazy.UninitializedParameter(requires_grad=False), lazy.UninitializedBuffer()):
        assert convert(plain, to="torch", detach=True) is plain
        assert dlx.plan(plain, to="torch", detach=True).outcome == "same"


def test_distributed_tensors_name_the_call(np, torch):
    """A DTensor has no single memory; the fix names the calls for its parts."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dtensor, mesh = (pytest.importorskip(f"torch.distributed.{name}") for name in ("tensor", "device_mesh"))
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    try:
        part = torch.arange(4.0).reshape(2, 2)
        whole = dtensor.DTensor.from_local(part, mesh.init_device_mesh("cpu", (2,)), [dtensor.Shard(0)])
        for place, source in (("", whole), (" at obj['weight']", {"weight": whole})):
            with pytest.raises(errors.LayoutError, match=r"\.to_local\(\) .* \.full_tensor\(\)") as caught:
                dlx.convert(source, to="numpy")
            assert f"(float32[4, 2]) to 'numpy'{place}: " in str(caught.value)
        shared = dlx.convert(whole.to_local(), to="numpy")
        assert shared.ctypes.data == part.data_ptr()
    finally:
        torch.distributed.destroy_process_group()
