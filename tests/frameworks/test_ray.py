"""ray: any framework uses arrays of its store in place, in the driver, in tasks and in actors."""

import os
import sys

import pytest

import dlx
from dlx import errors

np = pytest.importorskip("numpy")
ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.timeout(250),
    pytest.mark.filterwarnings("ignore:os.fork"),  # jax has threads
]
SIZE = 1 << 18  # elements: ray sends small objects without the store
STORE = 200 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster on this machine with two worker processes."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes cannot import this module
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    # A niceness of 15 would starve the workers on a busy machine.
    ray.init(num_cpus=2, object_store_memory=STORE, _system_config={"worker_niceness": 0}, **options)
    yield
    ray.shutdown()


def got(refs):
    """Return the objects of references, with a time limit."""
    return ray.get(refs, timeout=200)


def address(array):
    """Return the address of an array of any framework."""
    return dlx.describe(array).address


def in_store(array):
    """Return whether an array is in the part of ray's store that this process has mapped."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(each, 16) for each in line.split()[0].split("-"))
            if low <= address(array) < high:
                return "plasma" in line
    return False


def tree():
    """Return arrays of two frameworks; numpy lacks the dtype of one."""
    return {"w": torch.arange(SIZE, dtype=torch.bfloat16), "x": [np.arange(SIZE, dtype=np.float32)]}


@ray.remote(num_cpus=0)
class Worker:
    """Another process."""

    def look(self, sent, to):
        """Return the process, whether the arrays are in the store, and their sums."""
        found = dlx.convert(sent, to=to, readonly="share")
        arrays = [found["w"], found["x"][0]]
        sums = [float(dlx.convert(each, to="torch", readonly="share").sum(dtype=torch.float64)) for each in arrays]
        return os.getpid(), [in_store(each) for each in arrays], sums

    def make(self):
        """Return arrays that are created here."""
        return dlx.convert(tree(), to="dlx")

    def attached(self, handle):
        """Return the sum of the driver's shared array."""
        return float(dlx.attach(handle, to="numpy").sum())


@pytest.fixture(scope="module")
def workers(cluster):
    """Return two other processes."""
    return [Worker.remote() for _ in range(2)]


@pytest.mark.parametrize("target", ["dlx", "torch", "jax"])
def test_what_was_got_is_used_in_place(target):
    """Two calls return the same memory of the store."""
    pytest.importorskip(target)
    ref = ray.put(dlx.convert(tree(), to="dlx"))
    first, second = (dlx.convert(got(ref), to=target, readonly="share") for _ in range(2))
    for one, other in ((first["w"], second["w"]), (first["x"][0], second["x"][0])):
        assert in_store(one) and address(one) == address(other)
        assert dlx.describe(one).framework == target and dlx.shares_memory(one, other)
    assert torch.equal(dlx.convert(first["w"], to="torch"), tree()["w"])
    assert np.array_equal(dlx.convert(first["x"][0], to="numpy"), tree()["x"][0])


def test_arrays_of_numpy_need_no_word():
    """Ray stores them and returns read-only memory; targets without read-only arrays get a copy."""
    stored = got(ray.put(np.arange(SIZE, dtype=np.float32)))
    assert in_store(stored) and not stored.flags.writeable
    for target in ("dlx", "jax"):
        pytest.importorskip(target)
        assert address(dlx.convert(stored, to=target, copy=False)) == address(stored)
    assert dlx.convert(stored, to="dlx").readonly
    assert not in_store(dlx.convert(stored, to="torch"))
    with pytest.raises(errors.ReadOnlyError):
        dlx.convert(stored, to="torch", copy=False)
    assert address(dlx.convert(stored, to="torch", readonly="share")) == address(stored)


def test_what_was_got_keeps_its_memory():
    """The memory stays valid after the reference is gone and the store was filled with other objects."""
    ref = ray.put(dlx.convert(tree(), to="dlx"))
    found = dlx.convert(got(ref), to="torch", readonly="share")["w"]
    del ref
    for _ in range(4):
        ray.put(np.zeros(STORE // 3, np.uint8))
    assert in_store(found) and torch.equal(found, tree()["w"])


@pytest.mark.parametrize("target", ["torch", "jax", "dlx"])
def test_actors_are_sent_any_dtype_in_place(target, workers):
    """Objects that the driver puts or passes, and results, are in the store."""
    pytest.importorskip(target)
    whole = dlx.convert(tree(), to="dlx")
    sums = [float(whole_sum) for whole_sum in (tree()["w"].sum(dtype=torch.float64), tree()["x"][0].sum(dtype="f8"))]
    ref = ray.put(whole)
    found = got([worker.look.remote(given, target) for given in (ref, whole) for worker in workers])
    assert len({pid for pid, *_ in found} | {os.getpid()}) == 3
    assert [(placed, total) for _, placed, total in found] == [([True, True], sums)] * 4
    made = [worker.make.remote() for worker in workers]
    assert [got(workers[0].look.remote(each, target))[1] for each in made] == [[True, True]] * 2
    weights = got(made[0])["w"]
    assert in_store(weights) and weights.readonly and torch.equal(dlx.convert(weights, to="torch"), tree()["w"])


def test_a_handle_goes_to_an_actor(workers):
    """Both processes use memory outside of the store."""
    with dlx.share(np.ones(SIZE)) as handle:
        assert got(workers[0].attached.remote(handle)) == SIZE


def test_a_task_under_using():
    """The task computes in torch and returns the caller's framework."""

    @ray.remote
    @dlx.using("torch", readonly="share")
    def doubled(x):
        assert isinstance(x, torch.Tensor)
        return x * 2

    found = got(doubled.remote(np.arange(SIZE, dtype=np.float32)))
    assert isinstance(found, np.ndarray) and in_store(found) and found[-1] == 2 * (SIZE - 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_batches_under_using():
    """`map_batches` passes and accepts a dict of numpy arrays."""
    data = pytest.importorskip("ray.data")
    data.DataContext.get_current().enable_progress_bars = False

    @dlx.using("torch", readonly="share")
    def doubled(batch):
        assert isinstance(batch["data"], torch.Tensor)
        return {"data": batch["data"] * 2}

    rows = data.from_numpy(np.arange(4000.0).reshape(1000, 4))
    found = rows.map_batches(doubled, batch_size=100).take_batch(1000)["data"]
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found[np.argsort(found[:, 0])], 2 * np.arange(4000.0).reshape(1000, 4))


@pytest.mark.parametrize(
    "verb",
    [
        lambda x: dlx.convert(x, to="torch"),
        lambda x: dlx.convert(x, to="dlx", lazy=True),
        lambda x: dlx.using("torch")(lambda a: a)(x),
        lambda x: dlx.stack([x, x], to="torch"),
        lambda x: dlx.share(x),
        lambda x: dlx.from_dlpack(x),
        lambda x: dlx.shares_memory(x, x),
    ],
    ids=["convert", "lazy", "using", "stack", "share", "from_dlpack", "shares_memory"],
)
def test_a_reference_is_refused(verb):
    """A reference is refused with the call that fetches its object, and with its path in a tree."""
    ref = ray.put(np.ones(3))
    with pytest.raises(errors.ConversionError, match=r"ray\.get\(x\)"):
        verb(ref)


def test_a_reference_in_a_tree_is_refused_with_its_path():
    """A reference in a tree is refused, not passed through."""
    ref = ray.put(np.ones(3))
    with pytest.raises(errors.ConversionError, match=r"obj\['a'\]\[1\].*an object of ray.*ray\.get\(x\)") as caught:
        dlx.convert({"a": [np.ones(2), ref]}, to="torch")
    assert str(dlx.plan({"a": [np.ones(2), ref]}, to="torch").error) == str(caught.value)
    with pytest.raises(errors.ConversionError, match=r"obj\[0\].*ray\.get\(x\)"):
        dlx.share([ref])
    assert dlx.describe(ref).framework == "ray" and dlx.describe(ref).nbytes is None


def test_ray_is_no_target():
    """The error suggests an alternative."""
    with pytest.raises(errors.AdapterNotFoundError, match="ray"):
        dlx.convert(np.ones(3), to="ray")


@pytest.mark.parametrize("to", ("numpy", "torch", "jax"))
def test_actors_exchange_arrays_in_shared_memory(to):
    """The registered transport sends a handle: a later write of the sender is visible to the receiver."""
    if to == "jax":
        pytest.importorskip("jax")
    pytest.importorskip("ray.experimental.rdt", reason="this ray has no tensor transports")
    from dlx_adapters.dlx_ray import register_transport

    name = register_transport(to)

    @ray.remote(num_cpus=0)
    class Source:
        @ray.method(tensor_transport=name)
        def make(self, is_shared):
            self.tensor = dlx.empty((1000,), "float32", shared=True)
            memoryview(self.tensor)[0] = 7
            return {"x": dlx.convert(self.tensor, to=to, copy=None if is_shared else True), "n": [1, "text"]}

        def write(self):
            memoryview(self.tensor)[1] = 9

    @ray.remote(num_cpus=0, enable_tensor_transport=True)
    class Sink:
        def take(self, tree):
            self.x = tree["x"]
            with open("/proc/self/maps") as maps:  # the segment's own memory
                ranges = [line.split()[0].split("-") for line in maps if "memfd:dlx" in line]
            is_inside = any(int(low, 16) <= address(self.x) < int(high, 16) for low, high in ranges)
            return type(self.x).__module__.partition(".")[0], is_inside, tree["n"], self.values()

        def values(self):
            return memoryview(dlx.convert(self.x, to="dlx", copy=False))[:2].tolist()

    source, sink = Source.remote(), Sink.remote()
    for is_shared, seen in ((True, 9), (False, 0)):
        package, is_inside, rest, values = got(sink.take.remote(source.make.remote(is_shared)))
        assert package in (to, "jaxlib") and is_inside and rest == [1, "text"] and values == [7, 0]
        got(source.write.remote())
        assert got(sink.values.remote()) == [7, seen]  # of one memory, if it was shared before
