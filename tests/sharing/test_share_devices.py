"""`share` and `attach` of device memory between two processes with the recording driver of fake_cuda_ipc.c."""

import json
import signal
import subprocess
import sys

import pytest
from support.project import ROOT, compiled

import dlx
from dlx import errors

WRITE = "cuMemcpyAsync"

CHILD = """
import json, os, sys
sys.path.insert(0, {tests!r})
import dlx
from dlx import errors
from support.cuda.fake_cuda import FakeCuda

cuda = FakeCuda(os.environ["DLX_CUDA_DRIVER"])
handle = json.loads(sys.argv[1])
fds = json.loads(sys.argv[2])


def values(tensor):
    return cuda.peek(tensor.data_ptr, tensor.nbytes)


"""


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    """Configure the recording driver for shared memory; the fixture `cuda` uses it."""
    return compiled("fake_cuda_ipc")


@pytest.fixture
def other(cuda):
    """Run code with a handle in another process, and return its output."""

    def start(code, handle, fds=(), wait=True):
        whole = CHILD.format(tests=str(ROOT / "tests")) + code
        command = [sys.executable, "-c", whole, json.dumps(handle), json.dumps(list(fds))]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, pass_fds=fds, **pipes)
        if not wait:
            return process
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and not err, out + err
        return out

    return start


def filled(cuda, data, device="cuda:0"):
    """Return a tensor in dlx's pool on a device, with these bytes."""
    tensor = dlx.empty(len(data), "uint8", device)
    cuda.poke(tensor.data_ptr, data)
    return tensor


class Block:
    """Memory that a framework allocates without a pool: it has a handle."""

    def __init__(self, cuda, nbytes, device):
        self.cuda, self.address = cuda, cuda.alloc(nbytes, device)

    def __del__(self):
        self.cuda.free(self.address)


def unpooled(cuda, data, device=0):
    """Return a tensor in memory outside dlx's pools, with these bytes."""
    block = Block(cuda, len(data), device)
    cuda.poke(block.address, data)
    return dlx.from_pointer(block.address, len(data), "uint8", device=f"cuda:{device}", owner=block)


def test_memory_is_opened_once_and_nothing_is_copied(cuda, other):
    """A tree has two tensors in one allocation, one on another device, and host arrays."""
    whole = unpooled(cuda, bytes(range(64)))
    part = dlx.from_pointer(whole.data_ptr + 16, (2, 3), "uint16", device="cuda:0", owner=whole, strides=(4, 1))
    second = unpooled(cuda, b"abc", 1)
    empty = dlx.empty((0, 3), "float32", "cuda:0")
    cuda.forget()
    tree = {"whole": whole, "part": [part, whole], "second": second, "none": None, "empty": empty}
    tree["host"] = dlx.from_dlpack(b"xyz")
    with dlx.share(tree) as handle:
        assert cuda.count(WRITE) == 0 and cuda.count("cuIpcGetMemHandle") == 3
        out = other(
            """
first, again = dlx.attach(handle, writable=True), dlx.attach(handle)
print(values(first["whole"]) == bytes(range(64)), values(first["second"]), first["host"].tobytes(), first["none"])
part = first["part"][0]
print(part.data_ptr - first["whole"].data_ptr, part.shape, part.strides, part.dtype, part.device, part.readonly)
print(first["part"][1] is first["whole"], again["whole"].readonly, again["whole"].data_ptr == first["whole"].data_ptr)
print(first["empty"].shape, first["second"].device, cuda.count("cuIpcOpenMemHandle"), cuda.opened)
cuda.poke(part.data_ptr, b"!")
del first, again, part
print(cuda.count("cuIpcCloseMemHandle"), cuda.opened, cuda.misuses, cuda.report)
""",
            handle,
        )
    assert out.splitlines() == [
        "True b'abc' b'xyz' None",
        "16 (2, 3) (4, 1) uint16 cuda:0 False",
        "True True True",
        "(0, 3) cuda:1 3 3",
        "3 0 0 ",
    ]
    assert cuda.peek(whole.data_ptr + 16, 1) == b"!"


def test_readers_wait_for_the_work_that_was_shared(cuda, other):
    """A driver event orders readers: an unordered stream races, a stream ordered by an export does not."""
    with dlx.share(unpooled(cuda, b"abcd")) as handle:
        out = other(
            """
found = dlx.attach(handle)
told, untold = cuda.stream(), cuda.stream()
capsule = found.__dlpack__(stream=told, max_version=(1, 3))
print(cuda.read(told, found.data_ptr, 4), cuda.read(untold, found.data_ptr, 4))
cuda.clear_report()
del capsule, found
print(cuda.count("cuIpcOpenEventHandle"), cuda.opened, cuda.events)
""",
            handle,
        )
    assert out.splitlines()[0] == "False True" and out.splitlines()[1].startswith("1 0")


def test_memory_of_a_pool_is_copied_once(cuda, other):
    """It has no handle; overlapping arrays overlap in the copy, too."""
    whole = filled(cuda, bytes(range(100)))
    half = dlx.from_pointer(whole.data_ptr + 50, 50, "uint8", device="cuda:0", owner=whole)
    cuda.forget()
    with dlx.share([whole, half, whole]) as handle:
        assert cuda.count(WRITE) == 1 and cuda.count("cuMemAlloc", "cuIpcGetMemHandle") == 2
        out = other(
            """
whole, half, again = dlx.attach(handle)
print(values(whole) == bytes(range(100)), half.data_ptr - whole.data_ptr, again is whole)
""",
            handle,
        )
        assert out == "True 50 True\n"
    assert cuda.peek(whole.data_ptr, 100) == bytes(range(100))


@pytest.mark.parametrize("sent", [False, True], ids=["taken", "sent"])
def test_allocations_behind_descriptors(cuda, other, sent):
    """On a device without handles, the descriptor is taken from the other process or received."""
    cuda._lib.fake_set_sharing(0, 1)
    tensor = filled(cuda, b"abcdef")
    with dlx.share({"x": tensor}) as handle:
        assert cuda.count("cuMemCreate", "cuMemExportToShareableHandle") == 2
        fds = handle.filenos()
        assert len(fds) == 2 and fds[0] == handle.fileno()
        code = """
found = dlx.attach(handle, fd=fds or None)["x"]
again = dlx.attach(handle, fd=fds or None)["x"]
print(values(found), found.device, cuda.count("cuMemImportFromShareableHandle"), cuda.allocations)
left = len(os.listdir("/proc/self/fd"))
del found, again
print(cuda.count("cuMemUnmap", "cuMemAddressFree"), cuda.allocations, cuda.misuses, cuda.report)
"""
        out = other(code, handle, fds if sent else ())
    assert out.splitlines() == ["b'abcdef' cuda:0 1 1", "2 0 0 "]
    assert cuda.allocations == 0 and cuda.peek(tensor.data_ptr, 6) == b"abcdef"


def test_memory_of_others_behind_descriptors_is_not_copied(cuda, other):
    """Sharing attached memory again uses the same allocation and descriptor."""
    cuda._lib.fake_set_sharing(0, 1)
    with dlx.share(filled(cuda, b"abcdef")) as handle:
        out = other(
            """
found = dlx.attach(handle)
cuda.forget()
with dlx.share([found]) as passed:
    print(cuda.count("cuMemcpyAsync"), len(passed.filenos()), dlx.attach(passed)[0].data_ptr == found.data_ptr)
""",
            handle,
        )
    assert out == "0 2 True\n"


def test_what_was_attached_is_passed_on_by_its_handle(cuda, other):
    """A third process opens the first one's memory while the second one keeps it alive."""
    with dlx.share(unpooled(cuda, b"abc")) as handle:
        second = other(
            """
found = dlx.attach(handle)
passed = dlx.share({"again": found})
print(json.dumps(passed), cuda.count("cuMemcpyAsync"), flush=True)
sys.stdin.read()
""",
            handle,
            wait=False,
        )
        text, _, copies = second.stdout.readline().rpartition(" ")
        third = other("print(values(dlx.attach(handle)['again']))", json.loads(text))
        second.communicate(timeout=60)
    assert (third, copies, second.returncode) == ("b'abc'\n", "0\n", 0)


@pytest.mark.parametrize("end", ["end", "kill"])
def test_memory_stays_while_another_process_has_it_open(cuda, other, end):
    """It is freed once that process releases it or is killed; the driver forbids freeing it earlier."""
    tensor = unpooled(cuda, b"abc")
    address = tensor.data_ptr
    handle = dlx.share(tensor)
    process = other("found = dlx.attach(handle)\nprint(1, flush=True)\nsys.stdin.read()", handle, wait=False)
    assert process.stdout.readline() == "1\n", process.communicate()
    plain = dict(handle)
    handle.close()
    del tensor, handle
    assert dlx.release_pending() == 1 and cuda.is_alive(address)
    if end == "kill":
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert dlx.release_pending() == 0 and not cuda.is_alive(address)
    with pytest.raises(errors.HandleError):
        dlx.attach(plain)


def test_the_process_that_shared_attaches_without_opening(cuda):
    """The driver cannot open a handle in the process that created it."""
    tensor = unpooled(cuda, b"abc")
    with dlx.share(tensor) as handle:
        found = dlx.attach(dict(handle))
        assert found.data_ptr == tensor.data_ptr and found.readonly and cuda.count("cuIpcOpenMemHandle") == 0
    address = tensor.data_ptr
    del tensor, handle
    assert cuda.is_alive(address)
    del found
    assert dlx.release_pending() == 0 and not cuda.is_alive(address)


def test_pages_of_ones_own_are_no_property_of_devices(cuda):
    """`readonly="share"` promises that no other process sees writes."""
    with dlx.share(unpooled(cuda, b"abc")) as handle, pytest.raises(errors.DeviceError, match="private"):
        dlx.attach(handle, readonly="share")


def test_a_device_that_shares_nothing(cuda):
    """The error is reported for each array, with its path and a fix."""
    cuda._lib.fake_set_sharing(0, 0)
    tree = {"a": [filled(cuda, b"abc")], "b": filled(cuda, b"d", "cuda:1")}
    with pytest.raises(errors.DeviceError, match=r"obj\['a'\]\[0\].*cuda:0 cannot be shared.*device='cpu'") as caught:
        dlx.share(tree)
    assert "obj['b']" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "name",
    ["cuDeviceGetUuid", "cuIpcGetMemHandle", "cuIpcGetEventHandle", "cuEventCreate", "cuEventRecord", "cuMemAlloc"],
)
def test_failures_of_the_driver_leave_nothing(cuda, name):
    """Each driver call that sharing needs fails once."""
    tensor = filled(cuda, b"abc")
    blocks = cuda.blocks
    dlx.share(tensor).close()
    cuda.fail(name, 2)
    with pytest.raises(errors.DeviceError, match=name):
        dlx.share([tensor])
    assert cuda.blocks == blocks and dlx.release_pending() == 0


@pytest.mark.parametrize("by", ["handle", "descriptor"])
def test_failures_of_the_driver_while_attaching(cuda, other, by):
    """Each call fails once in the other process; nothing stays open there."""
    cuda._lib.fake_set_sharing(by == "handle", 1)
    names = ["cuIpcOpenMemHandle", "cuPointerGetAttribute", "cuIpcOpenEventHandle", "cuStreamWaitEvent"]
    if by == "descriptor":
        names = ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
    with dlx.share(filled(cuda, b"abc")) as handle:
        out = other(
            f"""
dlx.release_pending()
dlx.attach(handle)
for name in {names}:
    cuda.fail(name, 2)
    try:
        dlx.attach(handle)
    except errors.HandleError as error:
        told = name in str(error)
    print(told, cuda.opened, cuda.allocations, cuda.misuses)
print(values(dlx.attach(handle)))
""",
            handle,
        )
    assert out.splitlines() == ["True 0 0 0"] * 4 + ["b'abc'"]


def test_forged_descriptions(cuda, other):
    """Invented sizes, keys and devices in a description are refused."""
    with dlx.share([unpooled(cuda, b"abcd"), b"x"]) as handle:
        out = other(
            """
from dlx._sharing import sharing
import copy
parse = sharing.parse
changes = {
    "size": lambda m: [m[0], m[1], -1, m[3], m[4]],
    "key": lambda m: [m[0], m[1], m[2], "00" * 64, m[4]],
    "short": lambda m: [m[0], m[1], m[2], "00", m[4]],
    "kind": lambda m: [0, m[1], m[2], m[3], m[4]],
    "none": lambda m: [m[0], m[1], m[2], None, m[4]],
    "descriptor": lambda m: [2, m[1], m[2], "00" * 16, 0],
}
for name, change in changes.items():
    def forged(text):
        said = parse(text)
        said["memories"] = [change(each) for each in said["memories"]]
        return said
    sharing.parse = forged
    try:
        print(name, dlx.attach(handle))
    except errors.HandleError:
        print(True, cuda.opened)
sharing.parse = lambda text: {**parse(text), "numbers": [9] + parse(text)["numbers"][1:]}
try:
    dlx.attach(handle)
except errors.HandleError:
    print(True, cuda.opened)
elsewhere = lambda text: [[m[0], "00" * 16, *m[2:]] for m in parse(text)["memories"]]
sharing.parse = lambda text: {**parse(text), "memories": elsewhere(text)}
try:
    dlx.attach(handle)
except errors.DeviceError as error:
    print("CUDA_VISIBLE_DEVICES" in str(error))
""",
            handle,
        )
    assert out.splitlines() == ["True 0"] * 7 + ["True"]


def test_shared_memory_is_made_on_a_device(cuda, other):
    """`dlx.empty(..., shared=True)` copies nothing and uses no pool."""
    tensor = dlx.empty((2, 3), "bfloat16", "cuda:0", shared=True)
    assert (tensor.shape, str(tensor.dtype), str(tensor.device)) == ((2, 3), "bfloat16", "cuda:0")
    cuda.poke(tensor.data_ptr, b"twelve bytes")
    cuda.forget()
    with dlx.share(tensor) as handle:
        assert cuda.count(WRITE) == 0
        assert other("print(values(dlx.attach(handle)))", handle) == "b'twelve bytes'\n"
    del tensor, handle
    assert cuda.blocks == 0


def test_attaching_makes_no_context_on_other_devices(cuda, other):
    """A context takes some hundred megabytes of its device; finding the device of shared memory needs none."""
    tensor = dlx.empty(4, "uint8", "cuda:1", shared=True)
    with dlx.share(tensor) as handle:
        out = other(
            """
attached = dlx.attach(handle, writable=True)
print(attached.device, [line for line in cuda.log if "cuDevicePrimaryCtxRetain" in line])
""",
            handle,
        )
    assert out.split("[")[0].strip() == "cuda:1" and "Retain 0" not in out and "Retain 1" in out, out


def test_a_forked_child_takes_nothing_from_its_parent(cuda, other):
    """A child that drops inherited memory and exits does not affect it; other processes can still attach."""
    with dlx.share(unpooled(cuda, b"abc")) as handle:
        sharing = """
import gc
tensor = dlx.empty(3, "uint8", "cuda:0", shared=True)
cuda.poke(tensor.data_ptr, b"xyz")
held = dlx.share(tensor)
child = os.fork()
if child == 0:
    held.close()
    del held
    gc.collect()
    sys.exit(0)
print(os.waitpid(child, 0)[1], json.dumps(held), flush=True)
sys.stdin.read()
cycle = [held, tensor]
cycle.append(cycle)
"""
        process = other(sharing, handle, wait=False)
        status, _, text = process.stdout.readline().partition(" ")
        assert other("print(values(dlx.attach(handle)))", json.loads(text)) == "b'xyz'\n"
        out, err = process.communicate(timeout=60)
    assert (status, process.returncode, err) == ("0", 0, ""), out + err


def test_a_process_that_keeps_handles_of_devices_ends_quietly(cuda, other):
    """Its own handles and attached memory may outlive all modules."""
    with dlx.share(unpooled(cuda, b"abcd")) as handle:
        out = other(
            """
found = dlx.attach(handle)
def make():
    return [dlx.share(found), dlx.share([dlx.empty(4, "uint8", "cuda:0")]), dlx.attach(handle)]
os.kept, dlx.kept, errors.kept, json.kept = make(), make(), make(), make()
print(values(found))
""",
            handle,
        )
    assert out == "b'abcd'\n"
