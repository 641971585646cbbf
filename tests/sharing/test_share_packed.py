"""Lists of text, bytes and records in shared memory, which a lazy attach reads without an object for each."""

import collections
import json
import pickle
import random
import sys
import time
from multiprocessing.reduction import ForkingPickler

import pytest

import dlx
from dlx import errors
from dlx._sharing.description import MIN_PACKED, Packed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
N = MIN_PACKED

ROWS = {
    "text": lambda i: "x" * (i % 5) + "é\0\ud800"[i % 3 :],
    "bytes": lambda i: bytes([i % 256]) * (i % 4),
    "record": lambda i: {"id": i << 60, "box": [1.5 * i, None, float("inf")], "name": f"n{i}", ("k", 1): (b"x", True)},
    "list": lambda i: [i, {"a": [{}]}, []],
    "tuple": lambda i: (i, "x"),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("container", (list, tuple))
def test_long_lists_are_views_and_equal_lists(kind, container):
    """With `lazy` they are read one by one; without it they come back as they were."""
    rows = container(ROWS[kind](i) for i in range(N))
    with dlx.share({"rows": rows, "x": dlx.from_dlpack(b"abc")}) as handle:
        view, same = dlx.attach(handle, lazy=True)["rows"], dlx.attach(handle)["rows"]
    assert type(same) is container and same == rows
    assert type(view) is Packed and len(view) == N and "packed elements" in repr(view)
    assert list(view) == list(rows) and view[-1] == rows[-1] and view[3:9:2] == list(rows[3:9:2])
    assert list(map(type, view)) == list(map(type, rows))
    for bad in (N, -N - 1):
        with pytest.raises(IndexError):
            view[bad]


def test_other_lists_stay_lists():
    """Short or mixed lists, subclasses, arrays in records, and records that are in two places."""
    shared, array = [1], dlx.from_dlpack(bytearray(b"abc"))
    trees = [
        ["a"] * (N - 1),
        ["a", 1] * N,
        [collections.OrderedDict(a=1) for _ in range(N)],
        [{"x": array, "n": "a"} for _ in range(N)],
        [{"same": shared} for _ in range(N)],
        [1.5] * N,
        collections.deque(["a"] * N),
    ]
    with dlx.share([*trees, shared]) as handle:
        found = dlx.attach(handle, lazy=True)
    assert [type(each) for each in found[:-1]] == [*(list,) * 6, collections.deque]
    assert found[2] == trees[2] and found[4][0]["same"] is found[4][-1]["same"] is found[-1]
    assert found[3][0]["x"] is found[3][-1]["x"]


def test_numpy_arrays_of_text_become_packed_lists(np, torch):
    """Their elements have no dtype that other frameworks know."""
    kinds = [np.array(["aé", "", "b"]), np.array([b"x", b"yz"]), np.array([[1.0]])]
    if hasattr(np.dtypes, "StringDType"):
        kinds.append(np.array(["long" * 50, "b"], dtype=np.dtypes.StringDType()))
    with dlx.share({"all": kinds, "t": torch.ones(2)}) as handle:
        plain, lazy = dlx.attach(handle, to="torch"), dlx.attach(handle, to="numpy", lazy=True)
    assert plain["all"][0] == ["aé", "", "b"] and plain["all"][1] == [b"x", b"yz"]
    assert type(plain["all"][2]) is type(plain["t"]) is torch.Tensor
    assert type(lazy["all"][0]) is Packed and lazy["all"][0][0] == "aé" and lazy["t"].sum() == 2
    for row, source in zip(plain["all"][3:], kinds[3:], strict=True):
        assert row == source.tolist()


def test_a_million_texts_are_attached_without_reading_them():
    """The time does not depend on the number of texts."""
    rows = [f"path/{i}" for i in range(200_000)]
    with dlx.share(rows) as handle:
        start = time.thread_time()
        view = dlx.attach(handle, lazy=True)
        assert time.thread_time() - start < 0.05  # benchmarks/sharing.py measures it
    assert view[199_999] == "path/199999"


def test_views_are_pickled_between_workers_without_their_bytes():
    """They are sent as a descriptor; a plain pickle contains the bytes."""
    with dlx.share(["some text"] * 10_000) as handle:
        view = dlx.attach(handle, lazy=True)
        data = bytes(ForkingPickler.dumps(view))
    assert len(data) < 2000 and ForkingPickler.loads(data)[9_999] == "some text"
    assert list(pickle.loads(pickle.dumps(view)))[:2] == ["some text"] * 2


def test_forged_packed_lists_are_refused():
    """Random bytes in offsets and data raise HandleError, or give other values."""
    draw, refused = random.Random(1), 0
    for kind in ("text", "record"):
        for _ in range(60):
            with dlx.share([ROWS[kind](i) for i in range(N)]) as handle:
                with open(f"/proc/self/fd/{handle.fileno()}", "r+b", buffering=0) as file:
                    for _ in range(20):
                        file.seek(draw.randrange(512, handle["size"] - 8))
                        file.write(draw.choice((b"\xff" * 8, b"\0" * 8, b"{[", b"\x80")))
                try:
                    view = dlx.attach(json.loads(json.dumps(handle)), lazy=True)
                    list(view)
                except errors.HandleError:
                    refused += 1
    assert refused > 20


def test_an_array_of_text_alone(np):
    """What a container may contain may also be shared alone."""
    for array in (np.array(["a", "é", ""] * 200), np.array([b"a", b"bc"]), np.array([], "U3")):
        with dlx.share(array) as handle:
            assert dlx.attach(handle) == array.tolist() and [*dlx.attach(handle, lazy=True)] == array.tolist()


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("options", [{}, {"to": "numpy"}, {"to": "numpy", "device": "cpu", "readonly": "share"}])
def test_a_list_alone(np, kind, options):
    """It is read lazily for any target, and shared again as a list."""
    rows = [ROWS[kind](i) for i in range(N)]
    with dlx.share(rows) as handle:
        view = dlx.attach(handle, lazy=True, **options)
        assert type(view) is Packed and list(view) == rows == dlx.attach(handle, **options)
        with pytest.raises(errors.ConversionError, match=r"Pass list\(x\) in its place"):
            dlx.share({"rows": view})
        with dlx.share({"rows": list(view)}) as again:
            assert dlx.attach(again)["rows"] == rows
