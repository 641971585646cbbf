"""Every incompatibility bit, with a tensor that has it, and a similar one that does not."""

import pytest
from support.arrays.reference import FLOAT32, INT4, INT8, PADDED, READ_ONLY, dltensor

from dlx._core import native
from dlx._core.native import ffi, lib

ALL_LAYOUTS = 15


def code(dtype):
    """Return a dtype in the format of dlx_capabilities."""
    return dtype[0] | dtype[1] << 8 | dtype[2] << 16


def consumer(
    *,
    devices=(1,),
    layouts=ALL_LAYOUTS,
    alignment=1,
    ndim=64,
    readonly=True,
    dtypes=None,
    subbyte="packed",
    null=True,
    least=0,
    extents=0,
):
    """Return capabilities that accept everything by default."""
    caps = ffi.new("dlx_capabilities*")
    caps.device_types = 2**32 - 1 if devices is None else sum(1 << d for d in devices)
    caps.layouts, caps.min_alignment, caps.max_ndim, caps.keeps_readonly = layouts, alignment, ndim, readonly
    caps.takes_packed, caps.takes_padded = subbyte in ("packed", "both"), subbyte in ("padded", "both")
    caps.takes_null, caps.min_ndim, caps.empty_extents = null, least, extents
    caps.n_dtypes = -1 if dtypes is None else len(dtypes)
    for at, dtype in enumerate(dtypes or ()):
        caps.dtypes[at] = code(dtype)
    return caps


LEADING, BYTES = lib.DLX_EXTENTS_LEADING, lib.DLX_EXTENTS_ALL | lib.DLX_EXTENTS_BYTES
N, Z, G, P = lib.DLX_LAYOUT_NEGATIVE, lib.DLX_LAYOUT_ZERO, lib.DLX_LAYOUT_GAPS, lib.DLX_LAYOUT_PERMUTED

# incompatibility, capabilities, a tensor with the incompatibility, a similar tensor without it
CASES = [
    ("DEVICE", {}, {"device": (2, 0)}, {"device": (1, 7)}),
    ("DEVICE", {"devices": (1, 3)}, {"device": (11, 0)}, {"device": (3, 0)}),
    ("DEVICE", {"devices": (31,)}, {"device": (32, 0)}, {"device": (31, 0)}),
    ("DEVICE", {"devices": (1, 4)}, {"device": (33, 0)}, {"device": (4, 0)}),
    ("DEVICE", {"devices": range(31)}, {"device": (-1, 0)}, {"device": (0, 0)}),
    ("DTYPE", {"dtypes": [INT8, FLOAT32]}, {"dtype": (2, 16, 1)}, {"dtype": FLOAT32}),
    ("DTYPE", {"dtypes": [FLOAT32]}, {"dtype": (0, 32, 1)}, {"dtype": FLOAT32}),
    ("DTYPE", {"dtypes": [FLOAT32]}, {"dtype": (2, 32, 2)}, {"dtype": FLOAT32}),
    ("DTYPE", {"dtypes": []}, {"dtype": INT8}, None),
    ("NDIM", {"ndim": 2}, {"shape": (1, 1, 1)}, {"shape": (1, 1)}),
    ("NDIM", {"least": 1}, {"shape": ()}, {"shape": (1,)}),
    ("NDIM", {"ndim": 0}, {"shape": (0,)}, {"shape": ()}),
    ("PADDED", {"dtypes": [INT4]}, {"dtype": INT4, "flags": PADDED}, {"dtype": INT4}),
    ("PADDED", {}, {"dtype": INT4, "flags": PADDED}, {"dtype": INT8, "flags": PADDED}),
    ("PADDED", {"dtypes": [(17, 4, 3)]}, {"dtype": (17, 4, 3), "flags": PADDED}, {"dtype": (17, 4, 3)}),
    ("PADDED", {}, {"dtype": INT4, "flags": PADDED}, {"dtype": INT8, "flags": PADDED}),
    ("PADDED", {"subbyte": "packed"}, {"dtype": INT4, "flags": PADDED, "shape": (0,)}, {"dtype": INT4, "shape": (0,)}),
    ("PACKED", {"subbyte": "padded"}, {"dtype": INT4}, {"dtype": INT4, "flags": PADDED}),
    ("PACKED", {"subbyte": "padded"}, {"dtype": (17, 4, 3)}, {"dtype": (17, 4, 2)}),
    ("NULL", {"null": False}, {"shape": (0, 3), "address": 0}, {"shape": (0, 3)}),
    ("NULL", {"null": False}, {"shape": (0,), "address": 0, "flags": READ_ONLY}, {"shape": (1,)}),
    ("EXTENTS", {"extents": BYTES}, {"shape": (0, 2**61)}, {"shape": (0, 2**61 - 1)}),
    ("EXTENTS", {"extents": BYTES}, {"shape": (2**30, 0, 2**31)}, {"shape": (2**30, 0, 2**30)}),
    ("EXTENTS", {"extents": BYTES}, {"shape": (2**62, 2**62, 0)}, {"shape": (0, 2**62), "dtype": INT8}),
    ("EXTENTS", {"extents": BYTES}, {"shape": (0, 2**63 - 1)}, {"shape": (0, 2**63 - 1), "dtype": INT8}),
    ("EXTENTS", {"extents": BYTES}, {"shape": (0, 2**62), "dtype": (0, 12, 1)}, {"shape": (0, 2**62), "dtype": INT4}),
    ("EXTENTS", {"extents": LEADING}, {"shape": (2**62, 4, 0)}, {"shape": (2**62, 3, 0)}),
    ("EXTENTS", {"extents": LEADING}, {"shape": (2**62, 2**62, 0)}, {"shape": (0, 2**62, 2**62)}),
    ("EXTENTS", {"extents": LEADING}, {"shape": (2**32, 2**32, 0)}, {"shape": (2**32, 0, 2**32)}),
    ("EXTENTS", {"extents": BYTES}, {"shape": (2**62, 2**62, 0), "flags": READ_ONLY}, None),
    ("EXTENTS", {"extents": LEADING | BYTES}, {"shape": (2**60, 2, 0)}, {"shape": (2**60, 0, 2)}),
    ("READONLY", {"readonly": False}, {"flags": READ_ONLY}, {"flags": 0}),
    ("READONLY", {"readonly": False}, {"flags": READ_ONLY, "shape": (1,)}, {"flags": READ_ONLY, "shape": (0,)}),
    ("NEGATIVE", {"layouts": Z | G | P}, {"shape": (2,), "strides": (-1,)}, {"shape": (1,), "strides": (-1,)}),
    ("NEGATIVE", {"layouts": 0}, {"shape": (2,), "strides": (-1,)}, {"shape": (2,), "strides": (1,)}),
    ("ZERO", {"layouts": N | G | P}, {"shape": (2,), "strides": (0,)}, {"shape": (1,), "strides": (0,)}),
    ("ZERO", {"layouts": 0}, {"shape": (2, 3), "strides": (0, 1)}, {"shape": (1, 3), "strides": (0, 1)}),
    ("GAPS", {"layouts": N | Z | P}, {"shape": (2,), "strides": (2,)}, {"shape": (1,), "strides": (2,)}),
    ("GAPS", {"layouts": 0}, {"shape": (2, 3), "strides": (4, 1)}, {"shape": (2, 3), "strides": (3, 1)}),
    ("GAPS", {"layouts": 0}, {"shape": (2, 2), "strides": (1, 1)}, {"shape": (2, 2), "strides": (2, 1)}),
    ("PERMUTED", {"layouts": N | Z | G}, {"shape": (2, 3), "strides": (1, 2)}, {"shape": (1, 3), "strides": (1, 1)}),
    ("PERMUTED", {"layouts": 0}, {"shape": (2, 3), "strides": (1, 2)}, {"shape": (2, 1), "strides": (1, 2)}),
    ("UNALIGNED", {"alignment": 64}, {"address": 0x10020}, {"address": 0x10040}),
    ("UNALIGNED", {"alignment": 64}, {"byte_offset": 4}, {"byte_offset": 128}),
    ("UNALIGNED", {"alignment": 0}, {"address": 0x10002}, {"address": 0x10002, "dtype": (2, 16, 1)}),
    ("UNALIGNED", {"alignment": 0}, {"byte_offset": 1}, {"address": 0x10001, "byte_offset": 3}),
]


@pytest.mark.parametrize(("bit", "takes", "meets", "misses"), CASES)
def test_each_obstacle_and_its_neighbour(bit, takes, meets, misses):
    """A tensor has exactly the expected incompatibility; the similar one has no incompatibility."""

    def found(flags=0, **parts):
        return lib.dlx_check(dltensor(**{"shape": (2,), **parts}), flags, consumer(**takes))

    assert found(**meets) == getattr(lib, f"DLX_INCOMPATIBLE_{bit}")
    assert misses is None or found(**misses) == 0


@pytest.mark.parametrize("bit", [n for n in dir(lib) if n.startswith("DLX_INCOMPATIBLE_")])
def test_every_obstacle_has_a_case(bit):
    """Every incompatibility has a case above and a unique bit."""
    assert bit.removeprefix("DLX_INCOMPATIBLE_") in {case[0] for case in CASES}
    values = [getattr(lib, n) for n in dir(lib) if n.startswith("DLX_INCOMPATIBLE_")]
    assert values.count(getattr(lib, bit)) == 1
    assert getattr(lib, bit).bit_count() == 1


@pytest.mark.parametrize(
    ("dtype", "bytes_"),
    [
        (INT8, 1),
        ((6, 8, 1), 1),
        ((2, 16, 1), 2),
        ((4, 16, 1), 2),
        (FLOAT32, 4),
        ((2, 64, 1), 8),
        ((2, 128, 1), 16),
        ((5, 32, 1), 2),
        ((5, 64, 1), 4),
        ((5, 128, 1), 8),
        ((2, 80, 1), 1),
        (INT4, 1),
        ((10, 8, 1), 1),
        ((2, 32, 4), 4),
        ((0, 24, 1), 1),
    ],
)
def test_natural_alignment(dtype, bytes_):
    """Elements are aligned like a machine word: one part of a complex number, one lane of a vector."""
    assert lib.dlx_natural_alignment(dltensor((), None, dtype).dtype) == bytes_
    takes = consumer(alignment=0)
    assert lib.dlx_check(dltensor((2,), None, dtype, address=0x10000 + bytes_), 0, takes) == 0
    if bytes_ > 1:
        tensor = dltensor((2,), None, dtype, address=0x10000 + bytes_ // 2)
        assert lib.dlx_check(tensor, 0, takes) == lib.DLX_INCOMPATIBLE_UNALIGNED


@pytest.mark.parametrize("address", range(0x10000, 0x10008))
def test_any_alignment(address):
    """A consumer with min_alignment 1 takes every address."""
    assert lib.dlx_check(dltensor((2,), address=address), 0, consumer(alignment=1)) == 0


@pytest.mark.parametrize("strides", [(-1, 7, 0), (0, 0, 0), (1, 5, -9)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 5, 5), (5, 5, 0)])
def test_extents_of_zero_and_one_have_no_layout(shape, strides):
    """Strides of extents 0 and 1, and the address of an empty tensor, are never incompatible."""
    strict = consumer(layouts=0, alignment=64)
    assert lib.dlx_check(dltensor(shape, strides), 0, strict) == 0


def test_address_of_nothing_is_aligned():
    """An empty tensor needs no alignment."""
    assert lib.dlx_check(dltensor((0,), address=1), 0, consumer(alignment=64)) == 0


@pytest.mark.parametrize("kind", [4, 7, 8, 12])
def test_handles_have_no_alignment(kind):
    """The data of an opaque device is a handle and needs no alignment."""
    tensor = dltensor((2,), device=(kind, 0), address=3, byte_offset=1)
    assert lib.dlx_check(tensor, 0, consumer(devices=(kind,), alignment=64)) == 0


@pytest.mark.parametrize("kind", [1, 18, 31, 32, 33, 1 << 20, -1])
def test_any_device(kind):
    """All 32 bits mean any device, including devices without a bit."""
    assert lib.dlx_check(dltensor((2,), device=(kind, 0)), 0, consumer(devices=None)) == 0


@pytest.mark.parametrize(("dtype", "flags"), [(INT4, PADDED), ((200, 77, 9), 0), (FLOAT32, PADDED)])
def test_any_dtype(dtype, flags):
    """A consumer of any dtype accepts unknown codes and padded elements."""
    assert lib.dlx_check(dltensor((2,), None, dtype), flags, consumer(subbyte="both")) == 0


def test_padded_whole_bytes_are_plain():
    """The padded flag has no meaning for elements of whole bytes."""
    assert lib.dlx_check(dltensor((2,)), PADDED, consumer(dtypes=[FLOAT32])) == 0


def test_the_last_of_64_dtypes_is_seen():
    """The list of dtypes is searched to its end, and not beyond."""
    many = consumer(dtypes=[(0, bits, 1) for bits in range(1, 64)] + [FLOAT32])
    assert lib.dlx_check(dltensor((2,)), 0, many) == 0
    many.n_dtypes = 63
    assert lib.dlx_check(dltensor((2,)), 0, many) == lib.DLX_INCOMPATIBLE_DTYPE


def test_obstacles_add_up():
    """One call finds all incompatibilities of a tensor."""
    strict = consumer(layouts=0, alignment=64, ndim=1, readonly=False, dtypes=[INT8])
    tensor = dltensor((2, 3, 4, 2), (1, -64, 0, 99), INT4, device=(2, 0), address=0x10001)
    every = [getattr(lib, n) for n in dir(lib) if n.startswith("DLX_INCOMPATIBLE_")]
    never_at_once = lib.DLX_INCOMPATIBLE_PACKED | lib.DLX_INCOMPATIBLE_NULL | lib.DLX_INCOMPATIBLE_EXTENTS
    assert lib.dlx_check(tensor, READ_ONLY | PADDED, strict) == sum(every) - never_at_once


def test_check_of_a_tensor_object():
    """native.tensor_check returns the same for a dlx.Tensor."""
    owner = bytearray(64)
    at = native.buffer_address(memoryview(owner))
    tensor = native.tensor_new(at, (2, 3), (1, 2), INT8, (1, 0), READ_ONLY, owner)
    caps = consumer(layouts=0, readonly=False)
    wanted = lib.DLX_INCOMPATIBLE_PERMUTED | lib.DLX_INCOMPATIBLE_READONLY
    assert native.tensor_check(tensor, int(ffi.cast("uintptr_t", caps))) == wanted


@pytest.mark.parametrize(
    ("arguments", "error"), [((None, 1), TypeError), ((), TypeError), ((1,), TypeError), ((1, 2, 3), TypeError)]
)
def test_check_wants_a_tensor_and_an_address(arguments, error):
    """A wrong call raises TypeError."""
    with pytest.raises(error):
        native.tensor_check(*arguments)


def test_what_a_plain_copy_resolves_is_what_the_table_says():
    """The fast path resolves the table's incompatibilities by a copy, except repacking."""
    from dlx._engine.incompatibility import REPACKED, RULES

    cured = sum(rule.bit for rule in RULES if rule.copy_resolves)
    assert cured & ~REPACKED == lib.DLX_COPY_RESOLVES
