"""dask: its arrays are converted chunk by chunk when they are computed, and nothing is computed before."""

import importlib.metadata
import pickle
import subprocess
import sys

import pytest

import dlx
from dlx import errors

np = pytest.importorskip("numpy")
da = pytest.importorskip("dask.array")
torch = pytest.importorskip("torch")


def unread(block):
    """Represent a chunk that must not be computed."""
    raise AssertionError("a chunk was computed")


@pytest.fixture
def source():
    """Return a two-dimensional array with chunks of several sizes."""
    return da.from_array(np.arange(60, dtype="f4").reshape(6, 10), chunks=((2, 4), (3, 3, 4)))


@pytest.mark.parametrize("target", ["torch", "jax", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64"])
def test_nothing_is_computed_before(target, dtype):
    """The result is a dask array with the same chunks, which belong to the target."""
    if target == "jax":
        pytest.importorskip("jax")
        if dtype == "int64":
            pytest.skip("jax would narrow it")
    source = da.ones((4, 6), chunks=(2, 3), dtype=dtype).map_blocks(unread, dtype=dtype, meta=np.empty((0, 0), dtype))
    new = dlx.convert(source, to=target)
    assert isinstance(new, da.Array)
    assert new.chunks == source.chunks
    assert dlx.describe(new._meta).framework == target
    assert dlx.plan(source, to=target).outcome == "deferred"
    assert "when they are computed" in str(dlx.plan(source, to=target))


@pytest.mark.parametrize("target", ["torch", "jax", "numpy"])
def test_values(source, target):
    """Each chunk is the result of `convert`; so is the concatenated array."""
    pytest.importorskip(target)
    new = dlx.convert(source, to=target)
    found = new.compute(scheduler="sync")
    assert dlx.describe(found).framework == target
    assert np.array_equal(dlx.convert(found, to="numpy"), source.compute())
    assert dlx.describe(new.blocks[1, 2].compute(scheduler="sync")).shape == (4, 4)


def test_a_function_of_torch(source):
    """Chunks return to numpy after a function of torch."""
    new = dlx.convert(source, to="torch")
    done = dlx.convert(new.map_blocks(torch.sin, meta=new._meta), to="numpy")
    assert isinstance(done._meta, np.ndarray)
    assert np.allclose(done.compute(), np.sin(source.compute()))


def cut(array, size):
    """Return a dask array whose chunks are views, which `from_array` copies."""
    parts = [array[i : i + size] for i in range(0, len(array), size)]
    chunks = (tuple(map(len, parts)),)
    return da.Array({("held", i): part for i, part in enumerate(parts)}, "held", chunks, meta=array[:0])


def test_chunks_are_not_copied():
    """The results have the addresses of dask's chunks."""
    held = np.arange(8.0)
    places = [part.ctypes.data for part in (held[:4], held[4:])]
    new = dlx.convert(cut(held, 4), to="torch")
    where = new.map_blocks(lambda part: np.array([part.data_ptr()]), dtype=np.uint64, chunks=((1, 1),))
    assert where.compute(scheduler="sync").tolist() == places


def test_as_a_target(source):
    """A dask array shares a numpy array's memory; read-only memory stays read-only."""
    tensor = torch.arange(6.0)
    new = dlx.convert(tensor, to="dask")
    assert isinstance(new, da.Array)
    tensor[0] = 5
    assert new.compute().tolist() == [5, 1, 2, 3, 4, 5]
    assert dlx.convert(source, to="dask") is source
    for options in ({"copy": True}, {"device": "cuda:0"}):
        with pytest.raises(errors.DlxError):
            dlx.convert(source, to="dask", **options)
    assert dlx.convert(torch.ones(0, 3), to="dask").compute().shape == (0, 3)
    scalar = torch.tensor(2.5)
    new = dlx.convert(scalar, to="dask")
    scalar.fill_(3.5)
    assert new.compute() == 3.5
    assert not dlx.convert(np.frombuffer(b"abcd", np.uint8), to="dask").map_blocks(writable, dtype=bool).compute().any()
    with pytest.raises(errors.DTypeError):
        dlx.convert(torch.ones(2, dtype=torch.bfloat16), to="dask")


def writable(block):
    """Return whether each element is writable."""
    return np.full(block.shape, block.flags.writeable)


def test_trees(source):
    """Trees may contain dask arrays; a view converts them on access."""
    tree = {"later": [source], "now": np.ones(2), "name": "x"}
    new = dlx.convert(tree, to="torch")
    assert isinstance(new["later"][0], da.Array) and isinstance(new["now"], torch.Tensor) and new["name"] == "x"
    assert [leaf.outcome for leaf in dlx.plan(tree, to="torch").leaves] == ["deferred", "shared"]
    assert isinstance(dlx.convert(tree, to="torch", lazy=True)["later"][0], da.Array)


@pytest.mark.parametrize(
    "verb",
    [
        lambda x: dlx.using("torch")(lambda a: a)(x),
        lambda x: dlx.stack([x, x], to="torch"),
        lambda x: dlx.share(x),
        lambda x: dlx.from_dlpack(x),
        lambda x: dlx.to_capsule(x),
        lambda x: dlx.shares_memory(x, x),
        lambda x: dlx.convert(x, to="dlx"),
        lambda x: dlx.convert(x, to="arrow"),
    ],
    ids=["using", "stack", "share", "from_dlpack", "to_capsule", "shares_memory", "dlx", "arrow"],
)
def test_what_needs_the_data(source, verb):
    """A conversion that needs the data is refused, with the call that computes it."""
    with pytest.raises(errors.ConversionError, match=r"not computed yet. Call .compute\(\) first"):
        verb(source)


def test_refused_before_anything_is_computed(source):
    """Unsupported dtypes, and options that chunks cannot have, are refused before the computation."""
    odd = da.full((4,), "text", chunks=2)
    with pytest.raises(errors.DTypeError, match=r"^cannot convert dask.array.core.Array \(<U\d\[4\]\)") as caught:
        dlx.convert(odd, to="torch")
    assert str(dlx.plan(odd, to="torch").error) == str(caught.value)
    with pytest.raises(errors.StreamError, match="each on its own stream") as caught:
        dlx.convert(source, to="torch", stream=1)
    assert caught.value.fix == "Leave stream out."
    with pytest.raises(errors.DlxError):
        dlx.convert(source, to="numpy", device="cuda:0")


def test_described_without_being_computed():
    """Unknown extents stay unknown."""
    source = da.arange(10, chunks=5).astype("i2")
    found = dlx.describe(source)
    assert (found.framework, found.shape, str(found.dtype)) == ("dask", (10,), "int16")
    unknown = dlx.describe(source[source > 3])
    assert unknown.shape is None and unknown.nbytes is None and "0 bytes" not in str(unknown) + unknown._table()
    assert dlx.convert(source[source > 3], to="torch").compute(scheduler="sync").tolist() == list(range(4, 10))


def test_options_reach_the_chunks():
    """Each chunk is converted with the options of the call."""
    held = np.arange(4.0)
    held.flags.writeable = False
    source = cut(held, 2)
    with pytest.raises(errors.ReadOnlyError):
        dlx.convert(source, to="torch", readonly="error").compute(scheduler="sync")
    assert dlx.convert(source, to="torch").compute(scheduler="sync").tolist() == [0, 1, 2, 3]


def test_names_tell_what_is_equal(source):
    """Equal conversions have equal names in dask's graph, and different ones differ."""
    names = [dlx.convert(source, to="torch", copy=copy).name for copy in (None, None, True)]
    assert names[0] == names[1] != names[2]


def test_to_backend(source):
    """The method `to_backend` finds dlx by its entry points."""
    if not any("dlx" in each.value for each in importlib.metadata.entry_points(group="dask.array.backends")):
        pytest.skip("dlx is on the path, but not installed: it has no entry points")
    new = source.to_backend("torch")
    assert isinstance(new._meta, torch.Tensor)
    assert torch.equal(new.compute(scheduler="sync"), torch.arange(60.0).reshape(6, 10))


def test_graphs_are_pickled(source):
    """Graphs survive pickle and cloudpickle."""
    new = pickle.loads(pickle.dumps(dlx.convert(source, to="torch", copy=True)))
    assert torch.equal(new.compute(scheduler="sync"), torch.arange(60.0).reshape(6, 10))


CLUSTER = """
import numpy as np, dask, dask.array as da, dlx, torch
from distributed import Client, LocalCluster


def start():
    import builtins
    builtins.told = dlx.trace()
    builtins.told.__enter__()


def stop():
    import builtins
    builtins.told.__exit__(None, None, None)
    return [(each.outcome, each.times) for each in builtins.told.records]


if __name__ == "__main__":
    # A chunk that one worker takes over from the other arrives in read-only memory, which torch copies.
    dask.config.set({"distributed.scheduler.work-stealing": False})
    with LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None) as cluster:
        with Client(cluster) as client:
            source = da.random.default_rng(0).random((1000, 8), chunks=(1, 8))
            source = source.persist()
            client.run(start)
            new = dlx.convert(source, to="torch")
            done = dlx.convert(new.map_blocks(torch.exp, meta=new._meta), to="numpy")
            assert np.allclose(done.sum().compute(), np.exp(source).sum().compute())
            counts = {}
            for records in client.run(stop).values():
                for outcome, times in records:
                    counts[outcome] = counts.get(outcome, 0) + times
            print(sorted(counts.items()))
"""


@pytest.mark.timeout(250)
def test_a_cluster(tmp_path):
    """Two processes with two threads each compute a torch function on 1,000 chunks without a copy."""
    pytest.importorskip("distributed")
    path = tmp_path / "cluster.py"
    path.write_text(CLUSTER)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines()[-1:] == ["[('shared', 2000)]"], done.stdout + done.stderr[-2000:]


SHARED = """
import dlx
from distributed import Client, LocalCluster


def address(array):
    return dlx.describe(array).address


def make(to):
    import builtins
    tensor = dlx.empty((1 << 20,), "float32", shared=True)
    memoryview(tensor)[0] = 7
    builtins.kept = tensor, dlx.share({"x": dlx.convert(tensor, to=to)})
    return dict(builtins.kept[1])


def write():
    import builtins
    memoryview(builtins.kept[0])[1] = 9


def attach(handle, to):
    import builtins
    builtins.x = x = dlx.attach(handle, to=to, writable=True)["x"]
    return type(x).__module__.partition(".")[0], dlx.shares_memory(x, dlx.attach(handle, to="dlx", writable=True)["x"])


def values():
    import builtins
    return memoryview(dlx.convert(builtins.x, to="dlx", copy=False))[:2].tolist()


def make_tensor(to):
    import numpy as np
    return dlx.convert(dlx.convert(np.full(1 << 20, 5, "f4"), to=to), to="dlx")


def take_tensor(tensor, to):  # the bytes that dask received, out of band
    same = address(dlx.convert(tensor, to=to, readonly="share")) == address(tensor)
    is_aligned = to != "jax" or address(tensor) % 64 == 0  # jax copies other memory
    return same is is_aligned, float(memoryview(tensor)[-1])


if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        with Client(cluster) as client:
            one, two = client.scheduler_info()["workers"]
            for to in ("numpy", "torch", "jax"):
                handle = client.submit(make, to, workers=one, pure=False).result()
                package, is_shared = client.submit(attach, handle, to, workers=two, pure=False).result()
                before = client.submit(values, workers=two, pure=False).result()
                client.submit(write, workers=one, pure=False).result()
                after = client.submit(values, workers=two, pure=False).result()
                tensor = client.submit(make_tensor, to, workers=one, pure=False)
                print(package, is_shared, before, after, client.submit(take_tensor, tensor, to, workers=two).result())
"""


@pytest.mark.timeout(250)
def test_workers_of_one_host_share_arrays(tmp_path):
    """A handle goes to another worker, and a tensor is used over the bytes that dask received: neither is copied."""
    for package in ("distributed", "torch", "jax"):
        pytest.importorskip(package)
    path = tmp_path / "cluster.py"
    path.write_text(SHARED)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=240, check=False)
    rows = [f"{name} True [7.0, 0.0] [7.0, 9.0] (True, 5.0)" for name in ("numpy", "torch", "jaxlib")]
    assert done.stdout.splitlines() == rows, done.stdout + done.stderr[-2000:]
