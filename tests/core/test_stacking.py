"""`tensor_stack` and `tensor_fill` in C, which copy rows and matrices to their places, against numpy."""

import itertools
import random

import pytest

import dlx
from dlx._core import native
from dlx._core.types import DType

np = pytest.importorskip("numpy")

KINDS = ("f8", "f4", "i8", "i2", "u1", "?", "c16")


def tensor(x):
    """Return a dlx.Tensor over an array."""
    return dlx.convert(x, "dlx")


def strided(rng, shape, kind):
    """Return an array of any layout."""
    x = (np.arange(np.prod([2 * n for n in shape], dtype=int)) * 7 % 100).reshape([2 * n for n in shape]).astype(kind)
    x = x[tuple(slice(None, None, rng.choice([2, -2])) for _ in shape)]
    return x.swapaxes(0, -1).copy().swapaxes(0, -1) if len(shape) > 1 and rng.random() < 0.3 else x


def cut(rng, n):
    """Return slices that share `n` indices out, some backwards, and the columns of each."""
    if n and rng.random() < 0.4:
        step = rng.randint(1, 3)
        places = [slice(i, None, step) for i in range(min(step, n))]
    else:
        bounds = sorted({0, n, *(rng.randint(0, n) for _ in range(2))})
        places = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    return [(each, len(range(n)[each])) for each in places]


@pytest.mark.parametrize("seed", range(200))
def test_rows_and_matrices_reach_their_places(seed):
    """Any axis, dtype and layout; the elements of a row stay adjacent with `keep`."""
    rng = random.Random(seed)
    row = tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3)))
    axis, keep, kind = rng.randint(0, len(row)), rng.random() < 0.5, rng.choice(KINDS)
    to = rng.choice([None, "complex128" if kind == "c16" else "float32"])
    n = rng.randint(1, 6)
    places = cut(rng, n) if rng.random() < 0.5 else None
    shapes = [row] * n if places is None else [(*row, columns) for _, columns in places]
    rows = [strided(rng, shape, kind) for shape in shapes]
    slices = None if places is None else [place for place, _ in places]
    wanted = np.zeros((*row[:axis], n, *row[axis:]), to or kind)
    for i, each in enumerate(rows):
        np.moveaxis(wanted, axis, -1)[..., i if slices is None else slices[i]] = each
    tensors = [tensor(each) for each in rows]
    dtype = None if to is None else DType(to)
    made = native.tensor_stack(tensors, 0, axis, keep, dtype, slices)
    found = np.asarray(made)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype and (found == wanted).all()
    if wanted.size:
        fresh = np.moveaxis(found, axis, 0) if keep else found
        assert fresh.flags.c_contiguous
    whole = np.zeros([2 * extent for extent in wanted.shape], wanted.dtype)[
        tuple(slice(None, None, 2) for _ in wanted.shape)
    ]
    assert native.tensor_fill(tensor(whole), tensors, axis, 0, slices) is None and (whole == wanted).all()


def test_odd_rows_are_refused_before_a_write():
    """Other shapes, dtypes and devices, and slices that do not fit, are refused; nothing is written."""
    a, b = tensor(np.ones((2, 3))), tensor(np.ones((2, 2)))
    for odd in (tensor(np.ones((3, 2))), tensor(np.ones(2)), tensor(np.ones((2, 2), "f4"))):
        assert native.tensor_stack([b, odd]) is None
    assert native.tensor_stack([b, tensor(np.ones((2, 2), "c16"))], 0, 0, False, DType("float32")) is None
    far = dlx.from_pointer(b.data_ptr, (2, 2), "float64", device="cuda_host", owner=b)
    assert native.tensor_stack([b, far]) is None and native.tensor_stack([far, far]) is not None
    whole = np.zeros((2, 5))
    for places in (
        [slice(0, 3)], [slice(0, 3), slice(3, 4)], [slice(0, 3), slice(4, 6)], [slice(0, 3), slice(3, 9, 2)],
        [slice(0, 3), None], [slice(0, 3), slice("a", None)], [slice(0, 3), 3], [slice(0, 3), slice(0, 0)],
    ):  # fmt: skip
        with pytest.raises(TypeError):
            native.tensor_fill(tensor(whole), [a, b], 1, 0, places)
        with pytest.raises(TypeError):
            native.tensor_stack([a, b], 0, 1, False, None, places)
    assert native.tensor_stack([a, tensor(np.ones((3, 2)))], 0, 1, False, None, [slice(0, 3), slice(3, 5)]) is None
    assert native.tensor_stack([a, tensor(np.ones(2))], 0, 1, False, None, [slice(0, 3), slice(3, 5)]) is None
    assert not whole.any()
    for axis in (-1, 3):
        with pytest.raises(dlx.errors.DlxError):
            native.tensor_stack([a, a], 0, axis)
    for wrong in ((), ([],), ([1],), ([a], 0, "x"), ([a], 0, 0, False, 3)):
        with pytest.raises((TypeError, ValueError)):
            native.tensor_stack(*wrong)
    locked = np.zeros((1, 2, 3))
    locked.flags.writeable = False
    with pytest.raises(dlx.errors.ReadOnlyError):
        native.tensor_fill(tensor(locked), [a], 0)
    assert native.tensor_fill(tensor(locked), [a], 0, 2) == -2
    assert native.tensor_fill(a, [a], -1) is None and native.tensor_fill(a, [tensor(np.asarray(a)[::-1])], -1) == -1
