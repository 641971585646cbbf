"""Bit-exact round trips: any dtype, shape, strides, offset and flag, out of any framework and into any other.

The bits of every element are known from the start, so nothing here trusts a framework to compare. `nox -s deep`
draws 100 000 examples.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass
from math import prod

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from matrix.measure import list_installed, read_elements
from support.arrays.examples import EXAMPLES
from support.arrays.reference import PADDED, READ_ONLY, extent, row_major

import dlx
from dlx import errors
from dlx._core import native
from dlx._core.native import ffi
from dlx._registry.registry import registry

ROOM = 1 << 12
NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"),
    *("float64", "complex64", "complex128", "bfloat16", "complex32", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "float4_e2m1fnx2", "int4", "uint4", "int2", "uint2", "int1"),
    *("uint1", "int3", "float32x4", "code1_24bit", "float128"),
)


TARGETS = list_installed()
SOURCES = TARGETS + [name for name in TARGETS for _ in range(2) if name in ("dlx", "numpy")]  # these hold any layout


def shared_dtypes(source, target):
    """Return the dtypes that both ends take, so that most examples get through."""
    taken = [registry.target(name).capabilities.dtypes for name in (source, target)]
    return [name for name in NAMES if all(known is None or name in known for known in taken)] or list(NAMES)


def jax_x64(on):
    """Return a context in which jax has its 64-bit dtypes, or has not; nothing without jax."""
    if "jax" not in TARGETS:
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(on)


with jax_x64(True):
    COMMON = {(source, target): shared_dtypes(source, target) for source in TARGETS for target in TARGETS}


@dataclass(frozen=True)
class Case:
    """One array, and the way that it goes."""

    dtype: dlx.DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int  # bytes from an address of 256 bytes' alignment
    flags: int
    source: str
    target: str
    copy: bool | None
    x64: bool  # whether jax has 64-bit dtypes switched on


@st.composite
def cases(draw):
    """Draw a case whose memory fits into the room."""
    source, target = draw(st.sampled_from(SOURCES)), draw(st.sampled_from(TARGETS))
    names = COMMON[source, target] if draw(st.integers(0, 7)) else NAMES
    dtype = dlx.DType(draw(st.sampled_from(names)))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 2, 2, 3, 3, 3, 5, 7, 0]), max_size=4)))
    assume(prod(shape) <= 120)  # twice as many steps of 16 bytes fit into the room
    flags = draw(st.sampled_from([0, 0, READ_ONLY]))
    narrow = dtype.bits * dtype.lanes % 8
    if narrow and draw(st.booleans()):
        flags |= PADDED
    strides = None
    if not narrow or flags & PADDED:
        kind = draw(st.sampled_from(["compact", "compact", "permuted", "stepped", "any"]))
        if kind == "permuted":
            order = draw(st.permutations(range(len(shape))))
            inner = row_major([shape[i] for i in order])
            strides = tuple(inner[order.index(i)] for i in range(len(shape)))
        elif kind == "stepped":
            signs = draw(st.lists(st.sampled_from([-2, -1, 1, 2]), min_size=len(shape), max_size=len(shape)))
            strides = tuple(sign * step for sign, step in zip(signs, row_major(shape), strict=True))
        elif kind == "any":
            strides = tuple(draw(st.lists(st.integers(-4, 4), min_size=len(shape), max_size=len(shape))))
    natural = max(1, dtype.bits // 8)
    offset = draw(st.sampled_from([0, 0, 64, natural, 4, 1]))
    return Case(
        dtype,
        shape,
        strides,
        offset,
        flags,
        source,
        target,
        draw(st.sampled_from([None, None, False, True])),
        draw(st.booleans()),
    )


_memory = ffi.new("unsigned char[]", 3 * ROOM)
_start = int(ffi.cast("uintptr_t", _memory)) + ROOM
_start += -_start % 256
_first = _start - int(ffi.cast("uintptr_t", _memory))
_pattern = bytes((i * 167 + (i >> 5) * 59 + (i >> 3) * 13) % 256 for i in range(3 * ROOM))


def tensor_of(case):
    """Return a tensor over memory filled with a pattern; bools hold 0 and 1, as they must."""
    ffi.memmove(_memory, bytes(byte & 1 for byte in _pattern) if case.dtype.name == "bool" else _pattern, 3 * ROOM)
    low, high = extent(case.shape, case.strides, case.dtype, case.flags)
    assert high - low + case.offset < 2 * ROOM - 256
    address = _start + case.offset - low if 0 not in case.shape else 0
    return native.tensor_new(address, case.shape, case.strides, case.dtype, (1, 0), case.flags, _memory)


def writable(obj, name):
    """Return whether the framework would write to a result's memory."""
    return name in ("torch", "tvm_ffi") or (name in ("numpy", "dlx", "pyarrow") and not dlx.describe(obj).readonly)


def seen(outcomes, function, *args, **keywords):
    """Return (result, plan): what converting gives, or the error, which the plan must agree on."""
    plan = dlx.plan(*args, **keywords)
    try:
        result = function(*args, **keywords)
    except errors.DlxError as error:
        assert (plan.outcome, type(plan.error), str(plan.error)) == ("refused", type(error), str(error))
        outcomes[type(error).__name__] += 1
        return None, plan
    assert plan.outcome in ("same", "shared", "copied"), plan
    outcomes[plan.outcome] += 1
    return result, plan


def check(case, outcomes):
    """Send one array on its way, and compare what arrives."""
    tensor = tensor_of(case)
    expected = read_elements(tensor)
    source, _ = seen(outcomes, dlx.convert, tensor, to=case.source)
    if source is None:
        return
    before = dlx.describe(source)
    result, plan = seen(outcomes, dlx.convert, source, to=case.target, copy=case.copy)
    if result is None:
        return
    arrived = dlx.convert(result, to="dlx")
    assert (arrived.dtype, arrived.shape) == (case.dtype, case.shape)
    assert read_elements(arrived) == expected
    after = dlx.describe(result)
    assert (after.dtype, after.shape) == (case.dtype, case.shape)
    if plan.outcome == "same":
        assert result is source
    elif 0 not in case.shape:
        assert (after.address == before.address) is (plan.outcome == "shared"), plan
    assert case.copy is not False or plan.outcome != "copied"
    assert not case.copy or plan.outcome == "copied"
    if before.readonly and plan.outcome == "shared" and 0 not in case.shape:
        assert not writable(result, case.target), plan


@pytest.fixture(scope="module")
def outcomes():
    """Counts of the outcomes of all examples; each kind must occur."""
    counts = Counter()
    yield counts
    if len(TARGETS) > 4 and EXAMPLES >= 800:
        assert {"shared", "copied", "same", "DTypeError", "CopyRequiredError", "ReadOnlyError"} <= set(counts), counts


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.timeout(max(300, EXAMPLES // 20))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_round_trips(outcomes, case):
    """Same values, dtype and shape, or an error that the plan foretold; shared is the same address, copied another."""
    with jax_x64(case.x64):
        check(case, outcomes)
