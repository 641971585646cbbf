"""Every pair of streams, for one array, many, a nested container and a lazy view: no races, no duplicate work.

The grid runs again without the wait: then every pair that needs an order races.
"""

from __future__ import annotations

import itertools

import pytest
from support.cuda.fake_cuda import LEGACY, PER_THREAD

import dlx
from dlx._core import cuda as driver
from dlx.errors import StreamError

pytestmark = pytest.mark.filterwarnings("error")

STREAMS = ["shared", "own", "legacy", "per-thread", "capturing"]
SHAPES = {
    "one": lambda made: made(),
    "many": lambda made: [made() for _ in range(20)],
    "nested": lambda made: {"a": [made(), (made(), {"b": made()})], "c": made()},
    "lazy": lambda made: [made(), made()],
}
PAIRS = list(itertools.product(STREAMS, STREAMS))


def flat(tree):
    """Return all arrays of a container."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [array for child in tree for array in flat(child)] if isinstance(tree, list | tuple) else [tree]


def handles(cuda, producer, consumer):
    """Return the streams of a pair; `shared` and `capturing` ones are the same."""
    shared, capturing = cuda.stream(), cuda.stream()
    known = {"shared": shared, "legacy": LEGACY, "per-thread": PER_THREAD, "capturing": capturing}
    return known.get(producer) or cuda.stream(), known.get(consumer) or cuda.stream()


def converted(tree, shape):
    """Return all arrays of a conversion; a view converts them now."""
    if shape != "lazy":
        return flat(dlx.convert(tree, to="libb"))
    view = dlx.convert(tree, to="libb", lazy=True)
    return [view[0], view[1]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
def test_the_grid(cuda, lib_a, lib_b, producer, consumer, shape):
    """One stream: no ordering call. Two: a record and a wait. Across a capture: refused, and the capture continues."""
    p, c = handles(cuda, producer, consumer)
    with lib_a.on(p), lib_b.on(c):
        tree = SHAPES[shape](lib_a.made)
        if "capturing" in (producer, consumer):
            capturing = p if producer == "capturing" else c
            cuda.capture(capturing)
        cuda.forget()
        if "capturing" in (producer, consumer) and p != c:
            with pytest.raises(StreamError, match="capturing a graph"):
                converted(tree, shape)
            assert cuda.ordering == 0 and cuda.end_capture(capturing) == 0
            cuda.forget()
        arrays = converted(tree, shape)
        assert cuda.ordering == (0 if p == c else 2 * (2 if shape == "lazy" else 1))
        assert not any(lib_b.read(array) for array in arrays) and cuda.races == 0
        assert [array.ptr for array in arrays] == [array.ptr for array in flat(tree)]
        if producer == consumer == "capturing":
            assert cuda.end_capture(p) == 0
    assert lib_a.freed == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("producer", "consumer"), [pair for pair in PAIRS if "capturing" not in pair])
def test_the_grid_with_the_wait_left_out(cuda, lib_a, lib_b, monkeypatch, producer, consumer, shape):
    """Every pair of different streams races, except those that CUDA orders implicitly."""
    p, c = handles(cuda, producer, consumer)
    monkeypatch.setattr(driver, "order", lambda before, after: None)
    with lib_a.on(p), lib_b.on(c):
        arrays = converted(SHAPES[shape](lib_a.made), shape)
        by_itself = {producer, consumer} == {"legacy", "per-thread"}  # the per-thread stream is a blocking one
        assert all(lib_b.read(array) is (p != c and not by_itself) for array in arrays)
    cuda.clear_report()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("producer", "consumer"), [pair for pair in PAIRS if "capturing" not in pair])
def test_the_grid_of_what_is_released(cuda, lib_a, lib_b, producer, consumer, shape):
    """The producer's allocator reuses memory immediately, and gets it only when the consumer's stream is done."""
    p, c = handles(cuda, producer, consumer)
    with lib_a.on(p), lib_b.on(c):
        tree = SHAPES[shape](lib_a.made)
        n = len(flat(tree))
        arrays = converted(tree, shape)
        cuda.stall(c)
        for array in arrays:
            lib_b.read(array)
        del array, arrays, tree
        assert lib_a.freed == (n if p == c else 0)
        cuda.resume(c)
        assert dlx.release_pending() == 0 and lib_a.freed == n
    assert lib_a.reused_too_early == 0 and cuda.races == 0
