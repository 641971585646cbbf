"""The arithmetic on one tensor agrees with brute force over its indices, and at the limits of 63 bits."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays.examples import examples, product, shapes
from support.arrays.reference import (
    ADDRESS,
    FLOAT32,
    INT4,
    INT8,
    INT64_MAX,
    INT64_MIN,
    PADDED,
    dltensor,
    extent,
    item_bits,
    layout,
    offsets,
    row_major,
)

from dlx._core.native import ffi, lib

KINDS = [INT8, FLOAT32, (5, 128, 1), INT4, (17, 4, 2), (15, 6, 1), (1, 1, 3), (2, 32, 3)]
DTYPES = st.sampled_from(KINDS)
quick = settings(deadline=None, max_examples=examples(300))

SHAPES = shapes(range(5), 4)
# Each stride is a small number, or the compact stride of a dimension, forwards (0 to 3) or backwards (-4 to -1).
STRIDES = [
    st.tuples(*[st.sampled_from([*range(-9, 10), *((n,) for n in range(-ndim, ndim))])] * ndim) for ndim in range(5)
]
REST = product(range(5), KINDS, (0, PADDED), (False, True))


@st.composite
def described(draw):
    """Draw (shape, strides or None, dtype, flags) of a small tensor."""
    ndim, dtype, flags, strided = draw(REST)
    shape, strides = draw(SHAPES[ndim]), None
    if strided:
        compact = row_major([max(e, 1) for e in shape])
        compact = (*compact, *(-s for s in reversed(compact)))
        strides = [compact[each[0]] if isinstance(each, tuple) else each for each in draw(STRIDES[ndim])]
    return shape, strides, dtype, flags


@quick
@given(described())
def test_small_tensors_are_valid(case):
    """A small tensor is valid with any strides, dtype and known flags."""
    shape, strides, dtype, flags = case
    assert lib.dlx_validate(dltensor(shape, strides, dtype), flags) == lib.DLX_OK


PLACES = [0, 1, 2, 64, ADDRESS, ADDRESS + 4, 2**63 - 65, 2**63 - 64, 2**63, 2**64 - 64]
ANY_SHAPES = shapes([-1, 0, 1, 1, 2, 2, 3, 3, 4, 2**31, 2**61, 2**62, INT64_MAX], 3)
STRANGE = shapes([INT64_MIN, -1, 0, 1, 2, 6], 3)
DEVICES = [(1, 0)] * 4 + [(2, 0), (3, 0)]
FIRST = product(range(4), ("compact", "compact", "strange", None), PLACES)
LAST = product(DEVICES, (0, 0, 0, 8), [None] * 6 + [-1, 129], [*KINDS, (2, 0, 1), (2, 32, 0), (0, 255, 65535)])


@st.composite
def anything(draw):
    """Draw a valid or invalid DLTensor that is compact more often than by chance."""
    ndim, strides, address = draw(FIRST)
    shape = draw(ANY_SHAPES[ndim])
    if strides == "compact":
        strides = [min(max(step, INT64_MIN), INT64_MAX) for step in row_major(shape)]
    elif strides == "strange":
        strides = draw(STRANGE[ndim])
    device, byte_offset, told, dtype = draw(LAST)
    return dltensor(shape, strides, dtype, address=address, device=device, byte_offset=byte_offset, ndim=told)


@settings(deadline=None, max_examples=examples(2000))
@given(anything(), st.sampled_from([1, 2, 8, 64]))
def test_what_is_plain_is_valid_and_accepted(tensor, alignment):
    """A tensor that dlx_is_plain accepts passes validation and the strictest consumer's check."""
    if lib.dlx_is_plain(tensor, alignment):
        picky = ffi.new("dlx_capabilities*", {"device_types": 2, "min_alignment": alignment, "max_ndim": 128})
        picky.n_dtypes = -1
        assert lib.dlx_validate(tensor, 0) == lib.DLX_OK
        assert lib.dlx_check(tensor, 0, picky) == 0


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (4, 1, 5), (1, 1)])
def test_compact_tensors_are_plain(shape):
    """The common case is plain; a small change makes it not plain."""
    strides = row_major(shape)
    assert lib.dlx_is_plain(dltensor(shape, strides), 64)
    assert not lib.dlx_is_plain(dltensor(shape, strides, address=ADDRESS + 32), 64)
    assert not lib.dlx_is_plain(dltensor(shape, strides, dtype=INT4), 1)
    assert not lib.dlx_is_plain(dltensor((2, *shape), (0, *strides)), 1)
    assert not lib.dlx_is_plain(dltensor((0, *shape), (1, *strides)), 1)


@quick
@given(described())
def test_sizes_agree_with_counting(case):
    """Number of elements, itemsize and bytes agree with counting."""
    shape, strides, dtype, flags = case
    tensor = dltensor(shape, strides, dtype)
    count, bits = len(offsets(shape, strides)), item_bits(dtype, flags)
    assert lib.dlx_size(tensor) == count
    assert lib.dlx_itemsize(tensor.dtype, flags) == (0 if bits % 8 else bits // 8)
    assert lib.dlx_nbytes(tensor, flags) == -(-count * bits // 8)


@quick
@given(described())
def test_extent_is_what_the_elements_touch(case):
    """The extent contains all elements, and ends with them."""
    shape, strides, dtype, flags = case
    low, high = ffi.new("int64_t*"), ffi.new("int64_t*")
    lib.dlx_extent(dltensor(shape, strides, dtype), flags, low, high)
    assert (low[0], high[0]) == extent(shape, strides, dtype, flags)


@pytest.mark.parametrize("dtype", [INT4, (1, 1, 1), (15, 6, 1), (1, 1, 3), (0, 7, 1)])
@pytest.mark.parametrize(("shape", "strides"), [((2,), (-1,)), ((4,), (-3,)), ((3, 2), (-2, 1)), ((9,), (1,))])
def test_extent_of_packed_elements(shape, strides, dtype):
    """The extent contains the bytes that packed elements only partly use, also before the first element."""
    low, high = ffi.new("int64_t*"), ffi.new("int64_t*")
    lib.dlx_extent(dltensor(shape, strides, dtype), 0, low, high)
    assert (low[0], high[0]) == extent(shape, strides, dtype)


@quick
@given(described())
def test_layout_features_agree_with_brute_force(case):
    """Negative, zero, gaps and permuted are found exactly if the index sets show them."""
    shape, strides, _, _ = case
    assert lib.dlx_layout(dltensor(shape, strides)) == layout(shape, strides)


@quick
@given(st.lists(st.integers(1, 5), max_size=5))
def test_compact_strides_are_row_major(shape):
    """Compact strides visit memory in order, without gaps."""
    strides = ffi.new("int64_t[]", max(len(shape), 1))
    lib.dlx_compact_strides(len(shape), ffi.new("int64_t[]", shape), strides)
    assert tuple(strides[i] for i in range(len(shape))) == row_major(shape)
    assert lib.dlx_layout(dltensor(shape, row_major(shape))) == 0


EXTENTS = [0, 1, 2, 3, 2**20, 2**31, 2**32, 2**61, 2**62, INT64_MAX]
STEPS = [0, 1, -1, 7, 2**31, -(2**31), 2**61, -(2**61), 2**62, INT64_MAX, -INT64_MAX]
DIMENSIONS = product(EXTENTS, STEPS)


@quick
@given(st.lists(DIMENSIONS, max_size=4), st.booleans(), DTYPES)
def test_overflow_is_found_and_only_overflow(dims, strided, dtype):
    """Every size that exceeds 63 bits is rejected; clearly smaller ones are not."""
    shape = [e for e, _ in dims]
    strides = [s for _, s in dims] if strided else row_major(shape)
    bits, reach = item_bits(dtype), [(e - 1) * s for e, s in zip(shape, strides, strict=True)]
    largest = max(prod(shape), -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + 1) * bits
    status = lib.dlx_validate(dltensor(shape, strides if strided else None, dtype, device=(8, 0)), 0)
    if 0 in shape or largest < 2**62:
        assert status == lib.DLX_OK
    elif largest > INT64_MAX:
        assert status == lib.DLX_E_OVERFLOW


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        ("DLX_E_NDIM", {"ndim": -1}),
        ("DLX_E_NDIM", {"shape": [1] * 129}),
        ("DLX_OK", {"shape": [1] * 128}),
        ("DLX_E_SHAPE", {"shape": None, "ndim": 1}),
        ("DLX_OK", {"shape": None, "ndim": 0}),
        ("DLX_E_SHAPE", {"shape": (2, -1)}),
        ("DLX_E_SHAPE", {"shape": (0, -1)}),
        ("DLX_E_DTYPE", {"dtype": (2, 0, 1)}),
        ("DLX_E_DTYPE", {"dtype": (2, 32, 0)}),
        ("DLX_OK", {"dtype": (200, 255, 65535)}),
        ("DLX_E_NULL", {"shape": (2,), "address": 0}),
        ("DLX_E_NULL", {"shape": (), "address": 0}),
        ("DLX_E_NULL", {"shape": (2,), "address": 0, "device": (8, 0)}),
        ("DLX_OK", {"shape": (0,), "address": 0}),
        ("DLX_OK", {"shape": (0, 2**62, 2**62), "address": 0}),
        ("DLX_OK", {"shape": (2**62, 2**62, 0), "strides": (INT64_MAX, INT64_MIN, 1)}),
        ("DLX_OK", {"shape": (2**27,)}),
        ("DLX_E_OVERFLOW", {"shape": (2**62,)}),
        ("DLX_E_OVERFLOW", {"shape": (2**32, 2**32)}),
        ("DLX_E_OVERFLOW", {"shape": (2**60, 2), "strides": (0, 1)}),
        ("DLX_E_OVERFLOW", {"shape": (3,), "strides": (2**58,)}),
        ("DLX_OK", {"shape": (2,), "strides": (2**57,)}),
        ("DLX_E_OVERFLOW", {"shape": (2,), "strides": (INT64_MAX,)}),
        ("DLX_E_OVERFLOW", {"shape": (2,), "strides": (INT64_MIN,)}),
        ("DLX_E_OVERFLOW", {"shape": (2,), "strides": (INT64_MIN,), "dtype": (1, 1, 1), "device": (8, 0)}),
        ("DLX_OK", {"shape": (2,), "strides": (-INT64_MAX,), "dtype": (1, 1, 1), "device": (8, 0)}),
        ("DLX_E_OVERFLOW", {"shape": (2, 2), "strides": (2**62, 2**62)}),
        ("DLX_OK", {"byte_offset": 2**40}),
        ("DLX_OK", {"byte_offset": 2**56 - ADDRESS - 4}),
        ("DLX_E_OVERFLOW", {"byte_offset": 2**56 - ADDRESS}),
        ("DLX_E_OVERFLOW", {"byte_offset": 2**62}),
        ("DLX_E_OVERFLOW", {"byte_offset": 2**62, "device": (2, 0)}),
        ("DLX_OK", {"byte_offset": 64, "address": 2**60 + ADDRESS}),
        ("DLX_OK", {"shape": (0,), "byte_offset": 2**40}),
        ("DLX_OK", {"shape": (0,), "byte_offset": 8, "address": 0}),
        ("DLX_E_OVERFLOW", {"shape": (0,), "byte_offset": 2**62}),
        ("DLX_E_OVERFLOW", {"shape": (0,), "byte_offset": 2**64 - 1}),
        ("DLX_E_OVERFLOW", {"shape": (3, 0), "byte_offset": 2**64 - 1, "address": 0}),
        ("DLX_E_OVERFLOW", {"shape": (0,), "byte_offset": 2**63, "device": (8, 0)}),
        ("DLX_OK", {"shape": (0,), "byte_offset": 2**62, "device": (8, 0)}),
        ("DLX_E_OVERFLOW", {"byte_offset": 2**63}),
        ("DLX_E_OVERFLOW", {"byte_offset": 2**64 - 4}),
        ("DLX_E_OVERFLOW", {"byte_offset": 2**63 - 1}),
        ("DLX_E_OVERFLOW", {"byte_offset": 2**63, "device": (8, 0)}),
        ("DLX_OK", {"byte_offset": 2**62, "device": (8, 0)}),
        ("DLX_E_OVERFLOW", {"address": 2**63}),
        ("DLX_OK", {"address": 2**63, "device": (8, 0)}),
        ("DLX_E_OVERFLOW", {"shape": (2,), "strides": (-ADDRESS,)}),
        ("DLX_OK", {"shape": (2,), "strides": (-ADDRESS // 4,)}),
    ],
)
def test_validate_at_the_edges(status, parts):
    """An unsafe tensor is rejected with its status; a similar safe one is valid."""
    assert lib.dlx_validate(dltensor(**parts), 0) == getattr(lib, status)


@pytest.mark.parametrize("flags", [8, 1 << 40, 1 << 63, 15])
@pytest.mark.parametrize(
    ("dtype", "status"),
    [(INT4, "DLX_E_FLAGS"), ((15, 6, 3), "DLX_E_FLAGS"), (INT8, "DLX_OK"), ((17, 4, 2), "DLX_OK"), (FLOAT32, "DLX_OK")],
)
def test_unknown_flags_matter_below_a_byte_only(flags, dtype, status):
    """An unknown flag may change the packing, but nothing else."""
    assert lib.dlx_validate(dltensor((2,), None, dtype), flags) == getattr(lib, status)


@pytest.mark.parametrize(
    ("dtype", "flags", "itemsize", "nbytes"),
    [
        (INT4, 0, 0, 3),
        (INT4, PADDED, 1, 5),
        ((17, 4, 2), 0, 1, 5),
        ((15, 6, 1), 0, 0, 4),
        ((15, 6, 1), PADDED, 1, 5),
        ((1, 1, 1), 0, 0, 1),
        ((15, 6, 3), PADDED, 3, 15),
        ((2, 32, 4), 0, 16, 80),
        (FLOAT32, PADDED, 4, 20),
    ],
)
def test_sub_byte_sizes(dtype, flags, itemsize, nbytes):
    """Five elements below a byte are packed, or have one byte each if they are padded."""
    tensor = dltensor((5,), None, dtype)
    assert (lib.dlx_itemsize(tensor.dtype, flags), lib.dlx_nbytes(tensor, flags)) == (itemsize, nbytes)


def test_size_of_an_empty_tensor_never_overflows():
    """A zero extent makes the size 0, even if the other extents overflow."""
    tensor = dltensor((2**62, 2**62, 0), (1, 1, 1))
    assert (lib.dlx_size(tensor), lib.dlx_nbytes(tensor, 0), lib.dlx_layout(tensor)) == (0, 0, 0)


@pytest.mark.parametrize("shape", [(2**62, 0, 2**62, 2**62), (0, INT64_MAX, INT64_MAX)])
def test_compact_strides_of_an_empty_tensor_are_harmless(shape):
    """Strides outside an empty dimension have no meaning, but are never negative or zero."""
    strides = ffi.new("int64_t[]", len(shape))
    lib.dlx_compact_strides(len(shape), ffi.new("int64_t[]", shape), strides)
    assert min(strides[i] for i in range(len(shape))) > 0


@pytest.mark.parametrize("kind", [0, 4, 7, 8, 9, 12, 14, 15, 16, 17, 18, 20, 32, -1, 1 << 30])
def test_opaque_devices_are_not_addresses(kind):
    """Arithmetic never accesses a handle, nor data on an unknown device."""
    assert not lib.dlx_data_is_address(kind)
    assert not lib.dlx_host_readable(kind)


@pytest.mark.parametrize(("kind", "readable"), [(1, 1), (3, 1), (11, 1), (2, 0), (10, 0), (13, 0)])
def test_address_devices(kind, readable):
    """The host can read host memory directly, but not device memory, managed or not; both have addresses."""
    assert lib.dlx_data_is_address(kind)
    assert lib.dlx_host_readable(kind) == readable


@pytest.mark.parametrize("name", sorted(n for n in dir(lib) if n.startswith("DLX_E_")))
def test_every_status_has_a_text(name):
    """Every status has a unique text."""
    text = ffi.string(lib.dlx_status_text(getattr(lib, name))).decode()
    others = {ffi.string(lib.dlx_status_text(n)).decode() for n in range(-40, 1) if n != getattr(lib, name)}
    assert text not in others
