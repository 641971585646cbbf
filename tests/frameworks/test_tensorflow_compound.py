"""Sparse and ragged tensors of tensorflow."""

from __future__ import annotations

import pytest

import dlx

np = pytest.importorskip("numpy")
tf = pytest.importorskip("tensorflow")
pa = pytest.importorskip("pyarrow")
ROWS = [[1, 2], [], [3, 4, 5]]


def test_sparse_tensors():
    """SparseTensor and scipy's coo are converted into each other."""
    sp = pytest.importorskip("scipy.sparse")
    source = tf.sparse.from_dense([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
    made = dlx.convert(source, "scipy")
    assert type(made) is sp.coo_array and made.toarray().tolist() == [[0, 2, 0], [1, 0, 3]]
    back = dlx.convert(made, "tensorflow")
    assert type(back) is tf.SparseTensor and tf.sparse.to_dense(back).numpy().tolist() == made.toarray().tolist()
    assert dlx.convert(source, "tensorflow") is source
    for to in (None, "numpy"):
        assert np.asarray(dlx.parts(source, to)["coords"]).tolist() == [[0, 1, 1], [1, 0, 2]]
    with pytest.raises(dlx.errors.LayoutError, match=r"Pass dlx\.parts\(x\) or tf\.sparse\.to_dense\(x\) instead"):
        dlx.convert(source, out=np.zeros((2, 3)))


@pytest.mark.parametrize("rows", [ROWS, [], [[]], [[[1], [2, 3]], [], [[]]]])
def test_ragged_tensors(rows):
    """RaggedTensor and Arrow's lists are converted into each other, nested ones as well."""
    kind = pa.list_(pa.int64())
    if rows and rows[0] and isinstance(rows[0][0], list):
        kind = pa.list_(kind)
    source = pa.array(rows, kind)
    made = dlx.convert(source, "tensorflow")
    assert type(made) is tf.RaggedTensor and made.to_list() == rows
    assert dlx.convert(made, "pyarrow").to_pylist() == rows
    assert dlx.plan(source, "tensorflow") and dlx.convert(made, "tensorflow") is made
    assert dlx.describe(made).dtype.name == "int64"
