"""`writes=` refuses read-only arrays before the function runs, for each target and form of call."""

from __future__ import annotations

import asyncio
import contextlib
import mmap

import pytest

import dlx
from dlx import errors

np = pytest.importorskip("numpy")

TARGETS = ("numpy", "torch", "jax", "dlx", "tvm_ffi", "array_api_strict", "tensorflow", "mlx", "paddle", "warp")


def locked(array):
    """Return a read-only array."""
    array.flags.writeable = False
    return array


def torch():
    """Return torch, or skip."""
    return pytest.importorskip("torch")


def mapped(access):
    """Return an array over a mapping of a file or of memory."""
    block = mmap.mmap(-1, 64) if access == mmap.ACCESS_WRITE else None
    if block is None:
        import tempfile

        with tempfile.TemporaryFile() as file:
            file.write(bytes(64))
            file.flush()
            block = mmap.mmap(file.fileno(), 64, access=access)
    return np.frombuffer(block, "f4")


READ_ONLY = {
    "numpy": lambda: locked(np.ones(4, "f4")),
    "a view": lambda: locked(np.ones((4, 4), "f4"))[::2],
    "over bytes": lambda: np.frombuffer(bytes(16), "f4"),
    "broadcast": lambda: np.broadcast_to(np.ones(3, "f4"), (2, 3)),
    "big-endian": lambda: locked(np.ones(4, ">f4")),
    "over a map": lambda: mapped(mmap.ACCESS_READ),
    "jax": lambda: pytest.importorskip("jax").numpy.ones(4),
    "jax, committed": lambda: dlx.convert(np.ones(4, "f4"), to=pytest.importorskip("jax"), device="cpu"),
    "dlx": lambda: dlx.convert(bytes(16), to="dlx"),
    "pyarrow": lambda: pytest.importorskip("pyarrow").array(np.ones(4, "f4")),
    "tensorflow": lambda: pytest.importorskip("tensorflow").ones(4),
    "xarray": lambda: pytest.importorskip("xarray").DataArray(locked(np.ones(4, "f4"))),
    "bytes": lambda: bytes(16),
    "memoryview": lambda: memoryview(bytes(16)).cast("f"),
    "mmap": lambda: memoryview(mapped(mmap.ACCESS_READ)),
}
WRITABLE = {
    "numpy": lambda: np.ones(4, "f4"),
    "torch": lambda: torch().ones(4),
    "dlx": lambda: dlx.convert(bytearray(16), to="dlx"),
    "bytearray": lambda: bytearray(16),
    "memoryview": lambda: memoryview(bytearray(16)),
}


class Holder:
    """An object with methods."""

    def __init__(self, to, ran):
        def method(self, x, *rest, y=None):
            ran.append(1)

        self.method = dlx.using(to, writes=("x", "y"))(method).__get__(self)


def forms(to, ran):
    """Yield the name and function of each form of call."""
    writes = {"writes": ("x", "rest", "named")}

    @dlx.using(to, **writes)
    def plain(x, *rest, named=None, other=None):
        ran.append(1)

    @dlx.using(to, **writes, lazy=True)
    def lazy(x, *rest, named=None):
        ran.append(1)
        return [x]

    @dlx.using(to, writes="x")
    def steps(x):
        ran.append(1)
        yield 1

    @dlx.using(to, writes="x")
    async def awaited(x):
        ran.append(1)

    @dlx.using(to, writes="x")
    async def stream(x):
        ran.append(1)
        yield 1

    @dlx.using(to, writes=0)
    def numbered(x):
        ran.append(1)

    @dlx.using(to, writes="x", readonly="share")
    def sharing(x):
        ran.append(1)

    @dlx.using(to, writes="x", detach=True)
    def detached(x=None):
        ran.append(1)

    @dlx.using(to, writes="y", returns="dlx")
    def second(x, y):
        ran.append(1)

    async def collected(x):
        return [each async for each in stream(x)]

    class Static:
        @staticmethod
        @dlx.using(to, writes="x")
        def static(x):
            ran.append(1)

        @dlx.using(to, writes="x")
        @classmethod
        def of_class(cls, x):
            ran.append(1)

    holder = Holder(to, ran)
    yield "positional", plain
    yield "keyword", lambda x: plain(1, named=x)
    yield "keywords in another order", lambda x: plain(1, other=None, named=x)
    yield "rest", lambda x: plain(1, 2, x)
    yield "lazy", lazy
    yield "generator", lambda x: list(steps(x))
    yield "coroutine", lambda x: asyncio.run(awaited(x))
    yield "asynchronous generator", lambda x: asyncio.run(collected(x))
    yield "numbered", numbered
    yield "readonly=share", sharing
    yield "detach", detached
    yield "default", lambda x: detached(x=x)
    yield "next to a number", lambda x: second(1, x)
    yield "method", holder.method
    yield "method, keyword", lambda x: holder.method(1, y=x)
    yield "static method", Static.static
    yield "class method", Static.of_class
    yield "in a list", lambda x: plain([x])
    yield "in a dict", lambda x: plain({"a": (1, x)})
    yield "in a keyword's dict", lambda x: plain(1, named={"a": [x]})
    yield "twice", lambda x: plain([x, x])


def ready(to):
    """Skip if the framework is missing or cannot be a target."""
    if to != "dlx":
        pytest.importorskip("mlx.core" if to == "mlx" else to, exc_type=ImportError)
    return pytest.importorskip(to) if to == "array_api_strict" else to


def contents(x):
    """Return the bytes of an array or buffer."""
    return np.asarray(dlx.convert(x, to="dlx")).tobytes() if not isinstance(x, bytes | bytearray) else bytes(x)


@pytest.mark.few(50)
@pytest.mark.parametrize("source", READ_ONLY)
@pytest.mark.parametrize("to", TARGETS)
def test_read_only_arrays_are_refused(to, source):
    """The error has the parameter's name and is raised before the function runs, in first and later calls."""
    to, x, ran = ready(to), READ_ONLY[source](), []
    before = contents(x)
    for name, call in forms(to, ran):
        for _ in range(3):
            with pytest.raises(errors.DlxError) as caught:
                call(x)
            assert isinstance(caught.value, errors.ReadOnlyError) or "writes" not in str(caught.value), name
            if isinstance(caught.value, errors.ReadOnlyError):
                assert "the function writes to it (writes=), and it is read-only" in str(caught.value), name
            else:  # refused for another reason, such as the dtype
                assert to in ("jax", "mlx", "warp", "tensorflow", "paddle") or not isinstance(to, str), caught.value
            assert ran == [], name
    assert contents(x) == before


def test_the_refusal_of_a_column_names_its_table():
    """Not dlx's own column."""
    pa = pytest.importorskip("pyarrow")
    function = dlx.using("numpy", writes="a")(lambda a: a)
    for _ in range(2):
        with pytest.raises(errors.ReadOnlyError) as caught:
            function(pa.table({"x": [1.0]}))
        assert caught.value.source.startswith("pyarrow.lib.Table")


@pytest.mark.parametrize("source", WRITABLE)
@pytest.mark.parametrize("to", ["numpy", "torch", "dlx", "tvm_ffi"])
def test_writable_arrays_are_passed(to, source):
    """All forms and calls accept them, also before and after a read-only array of the same type."""
    to, ran = ready(to), []
    x, lock = WRITABLE[source](), READ_ONLY.get(source, lambda: None)()
    for name, call in forms(to, ran):
        for _ in range(2):
            call(x)
            assert ran.pop() == 1 and not ran, name
            if lock is not None:
                with pytest.raises(errors.ReadOnlyError):
                    call(lock)
                assert not ran, name


def test_writes_reach_what_is_writable_in_every_call():
    """Writable arrays are written to, and a read-only second argument is only read."""
    fill = dlx.using("numpy", writes="x")(lambda x, y: x.__setitem__(..., y))
    for _ in range(3):
        for make in (lambda: np.zeros(3), lambda: torch().zeros(3), lambda: bytearray(3)):
            x = make()
            with contextlib.suppress(TypeError):
                fill(x if not isinstance(x, bytearray) else np.frombuffer(x, "uint8"), locked(np.ones(3)))
                assert list(map(float, x)) == [1, 1, 1]
        with pytest.raises(errors.ReadOnlyError, match="x"):
            fill(locked(np.zeros(3)), np.ones(3))


def test_a_write_to_a_column_names_the_object():
    """The error names the table or array that the caller has, not dlx's class for a column."""
    pa, double = pytest.importorskip("pyarrow"), dlx.using("torch")
    torch()
    for x, write, words in (
        (pa.array([1.0, 2.0]), lambda x: x.mul_(2), r"pyarrow\.lib\.DoubleArray to 'torch' at x:"),
        (pa.array([[1.0, 2.0], [3.0]]), lambda x: x.values().mul_(2), r"pyarrow\.lib\.ListArray .* at x\.values:"),
        (pa.table({"a": [1.0]}), lambda x: x["a"].mul_(2), r"pyarrow\.lib\.Table .* at x\['a'\]:"),
    ):
        with pytest.raises(errors.ReadOnlyError, match=f"cannot convert {words} the function wrote to a copy"):
            double(write)(x)


@pytest.mark.parametrize("source", READ_ONLY)
def test_a_writable_borrow_of_read_only_memory_is_refused(source):
    """A read-only borrow is allowed."""
    x = READ_ONLY[source]()
    with contextlib.suppress(errors.CopyRequiredError), pytest.raises(errors.ReadOnlyError), dlx.borrow(x):
        raise AssertionError("borrowed")
    with dlx.borrow(x, readonly=True) as tensor:
        assert tensor.ndim
