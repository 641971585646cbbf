"""The checks of index arrays in C, `c_src/core/indices.c`, against numpy."""

from __future__ import annotations

import pytest

import dlx
from dlx._core.extension import lib
from dlx._protocols.pointer import dltensor


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_first_bad_index_is_found(np, dtype):
    """Lengths with and without a rest for vectors; ends beyond the dtype; negative and huge indices."""
    rng = np.random.default_rng(0)
    for _ in range(3000):
        least, most = rng.choice([0, 0, -1]), rng.choice([1, 5, 100, 2**31 - 1])
        array = rng.integers(least, most, int(rng.integers(0, 40)), endpoint=True)
        if dtype == "int64" and array.size and rng.random() < 0.1:
            array[rng.integers(array.size)] = 2**40
        array = np.sort(array) if rng.random() < 0.3 else array
        indices = dlx.convert(array.astype(dtype), to="dlx")
        end = int(rng.choice([0, 1, 5, 100, 2**31 - 1, 2**31, 2**33]))
        outside = np.flatnonzero((array < 0) | (array >= end))
        descents = np.flatnonzero(array[1:] < array[:-1]) + 1
        assert lib.dlx_find_outside(dltensor(indices), end) == (outside[0] if outside.size else -1)
        assert lib.dlx_find_descent(dltensor(indices)) == (descents[0] if descents.size else -1)
