"""OpenVINO's tensors, and DALI's tensors, lists and batches, as sources and targets."""

from __future__ import annotations

import gc
import weakref

import pytest

import dlx
from dlx.errors import DTypeError

np = pytest.importorskip("numpy")
MATRIX = np.arange(6, dtype="f4").reshape(2, 3)


@pytest.fixture
def ov():
    """Return openvino, or skip."""
    return pytest.importorskip("openvino")


@pytest.fixture
def dali():
    """Return DALI's backend, or skip."""
    return pytest.importorskip("nvidia.dali.backend")


def test_openvino_shares_both_ways(ov):
    """The memory is shared and lives as long as the tensor."""
    source = MATRIX.copy()
    made = dlx.convert(source, "openvino", copy=False)
    assert type(made) is ov.Tensor and made.data.ctypes.data == source.ctypes.data
    back = dlx.convert(made, "numpy", copy=False)
    assert back.ctypes.data == source.ctypes.data and dlx.convert(made, "openvino") is made
    alive = weakref.ref(source)
    del source, back
    gc.collect()
    assert alive() is not None and made.data.tolist() == MATRIX.tolist()
    del made
    gc.collect()
    assert alive() is None


def test_openvino_takes_read_only_arrays_without_elements(ov):
    """There is nothing to copy; openvino itself refuses them."""
    source = MATRIX[:0].copy()
    source.flags.writeable = False
    assert dlx.plan(source, "openvino").error is None
    assert tuple(dlx.convert(source, "openvino", copy=False).shape) == source.shape


DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_openvino_survive(ov, dtype):
    """Every dtype keeps its name and its bytes."""
    bits = dlx.DType(dtype).bits
    source = dlx.empty((4,), dtype)
    memoryview(dlx.from_pointer(source.data_ptr, (4 * bits // 8,), "uint8", owner=source))[:] = bytes(
        [0, 1] * (bits // 4)
    )
    made = dlx.convert(source, "openvino")
    back = dlx.convert(made, "dlx")
    assert (str(back.dtype), back.data_ptr) == (dtype, source.data_ptr)
    assert dlx.describe(made).dtype.name == dtype


def test_openvino_layouts_and_refusals(ov):
    """Strided and read-only arrays are copied; text and elements below a byte are refused, in trees as well."""
    readonly = MATRIX.copy()
    readonly.flags.writeable = False
    for source in (MATRIX.T, MATRIX[:, ::2], readonly, np.array(3.0), np.ones((0, 3))):
        assert np.array_equal(dlx.convert(source, "openvino").data, source)
    assert dlx.plan(readonly, "openvino").outcome == dlx.plan(MATRIX.T, "openvino").outcome == "copied"
    for odd in (ov.Tensor(ov.Type.u4, [4]), ov.Tensor(["a"])):
        with pytest.raises(DTypeError, match=r"\.data"):
            dlx.convert([odd], "numpy")
        assert dlx.describe(odd).dtype is None
    assert dlx.convert({"x": ov.Tensor(MATRIX)}, "numpy")["x"].tolist() == MATRIX.tolist()
    assert dlx.stack([ov.Tensor(MATRIX)] * 2, "numpy").shape == (2, 2, 3)
    assert type(dlx.using("numpy")(lambda x: x * 2)(ov.Tensor(MATRIX))) is ov.Tensor


def test_dali_shares_both_ways(dali):
    """TensorCPU shares memory, in both directions; others are copied by dlx, since DALI refuses them."""
    source = MATRIX.copy()
    made = dlx.convert(source, "dali", copy=False)
    assert type(made) is dali.TensorCPU and made.data_ptr() == source.ctypes.data
    assert dlx.convert(made, "numpy", copy=False).ctypes.data == source.ctypes.data
    for other in (MATRIX.T, MATRIX[:, ::2], np.array(3.0), np.ones((0, 3)), np.ones(2, bool), np.ones(2, "f2")):
        assert np.array_equal(np.asarray(dlx.convert(other, "dali")), other)
    with pytest.raises(DTypeError, match="complex64"):
        dlx.convert(np.ones(2, "c8"), "dali")


def test_lists_and_batches_of_dali(dali):
    """Tensor lists and batches become lists of arrays, in trees as well; a list of arrays becomes a batch."""
    dynamic = pytest.importorskip("nvidia.dali.experimental.dynamic")
    rows = [MATRIX, MATRIX + 1]
    made = dlx.convert(rows, "dali")
    listed = dali.TensorListCPU(made)
    batch = dynamic.as_batch(made)
    for source in (listed, batch, dynamic.as_batch([np.ones(2), np.ones(3)])):
        found = dlx.convert({"x": source}, "numpy")["x"]
        assert type(found) is list and len(found) == 2
        assert len(dlx.plan(source, "numpy").leaves) == 2
    assert [each.tolist() for each in dlx.convert(batch, "numpy")] == [each.tolist() for each in rows]
    assert np.array_equal(dlx.convert(dynamic.Tensor(MATRIX), "numpy"), MATRIX)
    assert type(dlx.convert(MATRIX, like=made[0])) is dali.TensorCPU
