"""numpy <-> torch, and dlx.Tensor as the third: exact values, shared memory, identity inside a framework."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays.examples import examples
from support.arrays.layouts import DTYPES, LAYOUTS, address, fill, same

import dlx
from dlx._registry.registry import registry

EMPTY = [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0), (1, 0, 1)]


def test_the_list_of_dtypes_is_complete(np, torch):
    """The dtypes here are all that both frameworks know; test_dtypes.py tests the dtypes of ml_dtypes."""
    own, others = (registry.target(name).adapter.dtypes for name in ("numpy", "torch"))
    assert own.known() & others.known() - set(own.names) <= set(own.table_storage)
    assert set(own.names) & others.known() == set(DTYPES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_to_torch_shares(np, torch, layout):
    """Every dtype in every layout without negative strides reaches torch in place, exact."""
    for dtype in DTYPES:
        array = LAYOUTS[layout](np, dtype)
        tensor = dlx.convert(array, to="torch", copy=False)
        assert type(tensor) is torch.Tensor and tensor.dtype is getattr(torch, dtype)
        assert tuple(tensor.shape) == array.shape and tensor.data_ptr() == address(array), dtype
        assert same(np, tensor.numpy(), array), dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_to_numpy_shares(np, torch, layout):
    """Every dtype in every layout reaches numpy in place, exact and writable."""
    for dtype in DTYPES:
        array = LAYOUTS[layout](np, dtype)
        steps = [abs(step) // array.itemsize for step in array.strides]
        tensor = torch.from_numpy(fill(np, dtype, (4096,))).as_strided(array.shape, steps, 3)
        result = dlx.convert(tensor, to="numpy", copy=False)
        assert type(result) is np.ndarray and result.dtype == np.dtype(dtype) and result.flags.writeable
        assert result.shape == array.shape and address(result) == tensor.data_ptr(), dtype
        assert same(np, result, tensor.numpy()), dtype


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_through_dlx_tensor_and_back(np, torch, layout, framework):
    """A dlx.Tensor in between has the same address, shape, strides and dtype, and gives everything back."""
    for dtype in DTYPES:
        array = LAYOUTS[layout](np, dtype)
        tensor = dlx.convert(dlx.convert(array, to=framework), to="dlx", copy=False)
        assert type(tensor) is dlx.Tensor and str(tensor.dtype) == dtype and not tensor.readonly
        assert tensor.data_ptr == address(array) and tensor.shape == array.shape, dtype
        for extent, found, step in zip(array.shape, tensor.strides, array.strides, strict=True):
            assert extent < 2 or found == step // array.itemsize
        for target in ("numpy", "torch"):
            back = dlx.convert(tensor, to=target, copy=False)
            assert address(back) == address(array), dtype
            assert same(np, np.asarray(back), array), dtype


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("source", ["numpy", "torch", "dlx"])
@pytest.mark.parametrize("target", ["numpy", "torch", "dlx"])
def test_empty_arrays_keep_shape_and_dtype(np, torch, source, target, shape):
    """An array without elements crosses with shape and dtype, never refused for its layout."""
    empty = dlx.convert(np.empty(shape, "int16"), to=source)
    result = dlx.convert(empty, to=target, copy=False)
    assert tuple(result.shape) == shape and str(result.dtype).endswith("int16")


@pytest.mark.parametrize("step", [-1, -2])
def test_empty_slices_with_negative_strides(np, torch, step):
    """A negative stride of a dimension that is empty or 1 long does not matter, not even to torch."""
    assert dlx.convert(np.ones((0, 3))[:, ::step], to="torch", copy=False).shape[0] == 0
    assert dlx.convert(np.ones(1)[::step], to="torch", copy=False).tolist() == [1.0]


@pytest.mark.parametrize("code", "?bhilqpBHILQPefdFD")
def test_every_typecode_of_numpy(np, torch, code):
    """C types with the same width (long, long long) are not generic producers."""
    array = fill(np, code, (3,))
    tensor = dlx.convert(array, to="torch", copy=False)
    assert tensor.numpy().tobytes() == array.tobytes()


def test_writes_show_on_both_sides(np, torch):
    """Writes through one array are visible through the other."""
    array = np.zeros(3)
    tensor = dlx.convert(array, to="torch")
    array[0], tensor[1] = 1, 2
    assert array.tolist() == tensor.tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("source", ["numpy", "torch", "dlx"])
@pytest.mark.parametrize("target", ["numpy", "torch", "dlx"])
def test_copy_by_address(np, torch, source, target):
    """copy=True always makes new memory, copy=False never does."""
    array = dlx.convert(fill(np, "int32", (3, 4)), to=source)
    shared, copied = (dlx.convert(array, to=target, copy=copy) for copy in (False, True))
    assert address(shared) == address(array) != address(copied)
    assert same(np, np.from_dlpack(copied), np.from_dlpack(array))


@pytest.mark.parametrize("layout", ["F-order", "transposed"])
def test_copies_keep_the_order_of_dimensions(np, torch, layout):
    """A copy for torch is compact and keeps the order in which the dimensions lie."""
    array = LAYOUTS[layout](np, "int32")
    strides = tuple(step // 4 for step in array.strides)
    assert dlx.convert(array, to="torch", copy=True).stride() == strides


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_are_exact(np, torch, layout, target):
    """copy=True gives the same bits from every layout."""
    array = LAYOUTS[layout](np, "float64")
    source = dlx.convert(array, to="torch") if target == "numpy" else array
    result = dlx.convert(source, to=target, copy=True)
    assert same(np, np.asarray(result), array)


# ---- inside one framework --------------------------------------------------------------------------------------------


def numpy_arrays(np):
    """Arrays that stay unchanged in numpy; several cannot be exported."""

    class Mine(np.ndarray):
        pass

    readonly = np.zeros(2)
    readonly.flags.writeable = False
    return [
        *(np.zeros(3), np.zeros(3)[::-1], np.zeros(3, ">f4"), readonly, np.zeros((2, 3)).view(Mine)),
        *(np.ma.array([1, 2], mask=[0, 1]), np.array(["a"]), np.zeros(2, "M8[s]"), np.zeros(2, [("x", "i4")])),
        np.rec.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]),
    ]


@pytest.mark.parametrize("options", [{}, {"copy": False}, {"device": "cpu"}, {"readonly": "error"}, {"detach": True}])
def test_numpy_stays_itself(np, options):
    """An array that is in numpy already is the result, whatever its dtype, class or flags."""
    for array in numpy_arrays(np):
        assert dlx.convert(array, to="numpy", **options) is array


def test_memmap_stays_itself(np, tmp_path):
    """A memmap is not turned into a plain array."""
    array = np.memmap(tmp_path / "file", "u1", "w+", shape=(3,))
    assert dlx.convert(array, to="numpy") is array


def torch_tensors(torch):
    """Tensors that stay unchanged in torch; several cannot be exported."""

    class Mine(torch.Tensor):
        pass

    leaf = torch.ones(2, requires_grad=True)
    return [
        *(torch.ones(3), leaf, leaf * 2, torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Mine)),
        *(torch.ones(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse(), torch.ones(2, device="meta")),
        *(torch.empty(2, dtype=torch.uint4), torch.ones(2, dtype=torch.bfloat16)),
    ]


@pytest.mark.parametrize("options", [{}, {"copy": False}, {"readonly": "error"}])
def test_torch_stays_itself(torch, options):
    """A tensor that is in torch already is the result, with its class, its graph and its bits."""
    for tensor in torch_tensors(torch):
        assert dlx.convert(tensor, to="torch", **options) is tensor


@pytest.mark.parametrize("options", [{}, {"copy": False}, {"device": "cpu"}])
def test_dlx_tensor_stays_itself(options):
    """A dlx.Tensor converted to "dlx" is the result."""
    tensor = dlx.convert(bytearray(3), to="dlx")
    assert dlx.convert(tensor, to="dlx", **options) is tensor


def test_parameters_stay_on_the_host(torch):
    """device="cpu" leaves a parameter alone that is there already."""
    parameter = torch.nn.Parameter(torch.ones(2))
    assert dlx.convert(parameter, to="torch", device="cpu") is parameter


def test_copy_inside_numpy_keeps_the_class(np):
    """copy=True inside numpy calls numpy's copy: class, dtype, order and mask are kept."""
    for array in numpy_arrays(np):
        copy = dlx.convert(array, to="numpy", copy=True)
        assert type(copy) is type(array) and copy.dtype == array.dtype and copy.tobytes() == array.tobytes()
        assert not np.shares_memory(copy, array) and copy.flags.writeable
    assert dlx.convert(np.ma.array([1, 2], mask=[0, 1]), to="numpy", copy=True).mask.tolist() == [False, True]
    assert dlx.convert(np.ones((2, 3), order="F"), to="numpy", copy=True).flags.f_contiguous


def test_copy_inside_torch_keeps_class_and_graph(torch):
    """copy=True inside torch calls torch's copy: the class is kept and gradients flow through it."""

    class Mine(torch.Tensor):
        pass

    mine = torch.ones(2).as_subclass(Mine)
    copy = dlx.convert(mine, to="torch", copy=True)
    assert type(copy) is Mine and copy.data_ptr() != mine.data_ptr()
    leaf = torch.ones(2, requires_grad=True)
    dlx.convert(leaf, to="torch", copy=True).sum().backward()
    assert leaf.grad.tolist() == [1.0, 1.0]


def test_detach_inside_torch(torch):
    """detach=True returns a tensor without a graph over the same memory, or the tensor itself if it has no graph."""

    class Mine(torch.Tensor):
        pass

    leaf = torch.ones(2, requires_grad=True)
    for tensor in (leaf, leaf * 2, torch.nn.Parameter(torch.ones(2)), leaf.as_subclass(Mine)):
        result = dlx.convert(tensor, to="torch", detach=True)
        assert not result.requires_grad and result.data_ptr() == tensor.data_ptr()
    assert type(result) is Mine
    plain = torch.ones(2)
    assert dlx.convert(plain, to="torch", detach=True) is plain


def test_detach_and_copy_inside_torch(torch):
    """detach=True with copy=True gives fresh memory without a graph."""
    leaf = torch.ones(2, requires_grad=True)
    result = dlx.convert(leaf, to="torch", detach=True, copy=True)
    assert not result.requires_grad and result.data_ptr() != leaf.data_ptr()


# ---- how a target is named -------------------------------------------------------------------------------------------


def test_names_of_torch(np, torch):
    """A name, its alias, the module, a submodule and the type mean the same."""
    for to in ("torch", "pytorch", torch, torch.nn, torch.Tensor):
        assert type(dlx.convert(np.ones(2), to=to)) is torch.Tensor


def test_names_of_numpy(np, torch):
    """A name, the module, a submodule and the type mean the same."""
    for to in ("numpy", np, np.linalg, np.ndarray):
        assert type(dlx.convert(torch.ones(2), to=to)) is np.ndarray


def test_names_of_dlx():
    """The package itself is a target by name, module and type."""
    for to in ("dlx", dlx, dlx.Tensor):
        assert type(dlx.convert(b"abc", to=to)) is dlx.Tensor


def test_like(np, torch):
    """like= uses the framework of an example, not its class, dtype or shape."""
    array = np.ones(2)
    assert type(dlx.convert(array, like=torch.zeros(3, dtype=torch.int8))) is torch.Tensor
    assert type(dlx.convert(array, like=torch.nn.Parameter(torch.ones(1)))) is torch.Tensor
    assert type(dlx.convert(torch.ones(2), like=np.zeros(0))) is np.ndarray
    assert type(dlx.convert(torch.ones(2), like=dlx.convert(b"x", to="dlx"))) is dlx.Tensor
    assert dlx.convert(array, like=array) is array


@pytest.mark.parametrize("device", ["cpu", "cpu:0", (1, 0), dlx.Device("cpu")])
def test_device_cpu(np, torch, device):
    """All spellings of the host are accepted, and have no effect."""
    array = np.ones(2)
    assert dlx.convert(array, to="torch", device=device, copy=False).data_ptr() == address(array)


# ---- any array at all ------------------------------------------------------------------------------------------------


@st.composite
def arrays(draw):
    """A recipe for a numpy array: its data and the view of it."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim)))
    steps = st.builds(slice, st.none() | st.integers(-5, 5), st.none() | st.integers(-5, 5), st.sampled_from([1, 2, 3]))
    backward = st.builds(slice, st.none(), st.none(), st.sampled_from([-1, -2]))
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "shape": shape,
        "offset": draw(st.sampled_from([0, 0, 0, 1, 2, 4, 8])),
        "slices": tuple(draw(st.lists(steps | steps | backward, min_size=ndim, max_size=ndim))),
        "order": draw(st.permutations(range(ndim))),
        "readonly": draw(st.booleans()),
        "copy": draw(st.sampled_from([None, None, True])),
    }


def build(np, recipe):
    """Make the array of a recipe, possibly not aligned to its items."""
    whole = fill(np, recipe["dtype"], recipe["shape"])
    block = np.empty(whole.nbytes + 64, np.uint8)
    part = block[recipe["offset"] : recipe["offset"] + whole.nbytes]
    array = part.view(whole.dtype).reshape(whole.shape)
    array[...] = whole
    array = array[recipe["slices"]].transpose(recipe["order"]) if array.ndim else array
    array.flags.writeable = not recipe["readonly"]
    return array


@settings(max_examples=examples(300), deadline=None, database=None)
@given(arrays())
def test_any_array_crosses_exactly(recipe):
    """Any numpy array keeps its bits through torch, dlx and numpy; addresses agree with the plan's outcome."""
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    array, copy = build(np, recipe), recipe["copy"]
    before = array.tobytes()
    for target in ("torch", "dlx"):
        outcome = dlx.plan(array, to=target, copy=copy).outcome
        result = dlx.convert(array, to=target, copy=copy)
        if array.size:
            assert (outcome == "shared") == (address(result) == address(array))
        assert outcome in ("shared", "copied")
        back = dlx.convert(result, to="numpy", copy=False)
        assert same(np, back, array)
        assert not back.size or back.flags.writeable == (outcome == "copied" or array.flags.writeable)
    tensor = dlx.convert(array, to="torch", copy=copy)
    if array.flags.writeable is False:
        tensor.zero_()
    assert array.tobytes() == before and type(tensor) is torch.Tensor
