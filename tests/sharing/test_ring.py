"""`dlx.ring`: frames from one producer to many readers, waiting, overwriting, dead peers and forged rings."""

import collections
import dataclasses
import fcntl
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.project import program

import dlx
from dlx import errors
from dlx._core.extension import lib
from dlx._sharing import segment

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="rings need Linux"),
    pytest.mark.filterwarnings("ignore:os.fork"),  # jax has threads
]


def frame(value):
    """Return a frame of four bytes."""
    return dlx.from_dlpack(bytearray([value] * 4))


def value(found):
    """Return the value of a frame, whose bytes are equal."""
    (only,) = set(bytes(memoryview(found)))
    return only


@pytest.fixture
def ring():
    """Return a function that creates rings of four bytes, which end with the test."""
    made = []

    def create(slots=4, **options):
        made.append(dlx.ring(slots, like=frame(0), **options))
        return made[-1]

    yield create
    while made:
        made.pop().close()


class TestFrames:
    """What readers get."""

    def test_every_reader_gets_every_frame_in_order(self, ring):
        own = ring(readers=2)
        readers = [dlx.attach(own.handle) for _ in range(2)]
        for number in range(1, 20):
            own.put(frame(number))
            assert [value(each.read(timeout=0)) for each in readers] == [number] * 2
            assert [each.number for each in readers] == [number] * 2

    def test_a_frame_is_a_tree_of_any_framework(self, np, torch):
        like = {"x": np.zeros((2, 3), np.float32), "t": [torch.zeros(2, dtype=torch.bfloat16), 1], "name": "camera"}
        with dlx.ring(2, like, to="torch") as own, dlx.attach(own.handle, to="numpy") as reader:
            own.put({"x": torch.ones(2, 3), "t": [torch.ones(2, dtype=torch.bfloat16), 1], "name": "camera"})
            found = reader.read(timeout=0)
            assert found["x"].sum() == 6 and not found["x"].flags.writeable and found["t"][1] == 1
            assert found["name"] == "camera" and str(found["t"][0].dtype) == "bfloat16"
            with own.write(timeout=0) as tree:
                tree["x"][:] = 2
            assert reader.read(timeout=0)["x"].sum() == 12

    def test_arrays_of_a_slot_are_created_once(self, ring):
        own = ring(2)
        reader = dlx.attach(own.handle)
        found = set()
        for number in range(6):
            own.put(frame(number))
            found.add(id(reader.read(timeout=0)))
        assert len(found) == 2

    def test_a_reader_gets_the_frames_after_it_joined(self, ring):
        own = ring(readers=0)
        own.put(frame(1))
        reader = dlx.attach(own.handle)
        own.put(frame(2))
        assert value(reader.read(timeout=0)) == 2

    def test_iteration_ends_with_the_ring(self, ring):
        own = ring()
        reader = dlx.attach(own.handle)
        for number in (1, 2, 3):
            own.put(frame(number))
        own.close()
        assert [value(each) for each in reader] == [1, 2, 3]
        with pytest.raises(EOFError):
            reader.read()

    def test_the_newest_frame_skips_the_others(self, ring):
        own = ring()
        reader = dlx.attach(own.handle)
        for number in (1, 2, 3):
            own.put(frame(number))
        assert value(reader.read(timeout=0, newest=True)) == 3
        with pytest.raises(TimeoutError):
            reader.read(timeout=0)

    def test_an_error_while_writing_publishes_nothing(self, ring):
        own = ring()
        reader = dlx.attach(own.handle)
        with pytest.raises(KeyError), own.write():
            raise KeyError
        with pytest.raises(errors.LayoutError):
            own.put(dlx.from_dlpack(bytearray(5)))
        with pytest.raises(TimeoutError, match="no frame arrived within 0 s"):
            reader.read(timeout=0)
        own.put(frame(7))
        assert value(reader.read(timeout=0)) == 7

    def test_a_writable_reader_shares_with_torch(self, torch, ring):
        own = ring()
        with pytest.raises(errors.ReadOnlyError, match="Pass writable=True"):
            dlx.attach(own.handle, to="torch")
        reader = dlx.attach(own.handle, to="torch", writable=True)
        own.put(frame(5))
        assert reader.read(timeout=0).tolist() == [5] * 4
        with pytest.raises(errors.ReadOnlyError, match="Pass writable=True"):
            dlx.attach(own.handle, to="torch", readonly="share")


class TestRefusals:
    """A frame that would not arrive as it was put is refused."""

    @pytest.mark.parametrize(
        "change",
        [
            *({"n": 2}, {"t": "b"}, {"t": ["a" * 200 + "c", None]}, {"t": [None, "a" * 200 + "b"]}, {"more": 1}),
            *(
                {"n": 1.0},
                {"n": True},
                {"n": None},
                {"set": {1, 2}},
                {"nan": 0.0},
                {"deep": ({"g": 1.5},)},
                {"n": object()},
            ),
        ],
        ids=lambda change: str(change)[:20],
    )
    def test_plain_data_is_the_same_in_all_frames(self, change):
        """A number that changes has to be an array."""
        text = "a" * 200 + "b"
        like = {"x": frame(0), "n": 1, "t": [text, None], "deep": ({"f": 1.5},), "set": {"a", "b"}, "nan": float("nan")}
        like |= {
            "pairs": {(1, 2), (3, 4), frozenset({"c", ("d",)})},
            "zero": 0.0,
            float("nan"): 5,
            (float("nan"), 1): 6,
        }
        with dlx.ring(2, like, readers=0) as own:
            reader = dlx.attach(own.handle)
            with pytest.raises(errors.ConversionError, match=r"^cannot put"):
                own.put({**like, **change})
            own.put({**dict(reversed(like.items())), "x": frame(3)})  # in another order
            found = reader.read(timeout=0)
            assert value(found["x"]) == 3 and (found["n"], found["t"], found["deep"]) == (
                1,
                [text, None],
                ({"f": 1.5},),
            )

    def test_equal_plain_data_may_be_one_object_or_several(self):
        """Constant tuples of a function are one object."""
        one = [(3, 4), {"k": [5]}]
        like, several = {"x": frame(0), "a": one, "b": one}, {"x": frame(1), "a": [(3, 4), {"k": [5]}], "b": [*one]}
        for first, second in ((like, several), (several, like)):
            with dlx.ring(2, first, readers=0) as own:
                own.put(second)
                with pytest.raises(errors.ConversionError, match=r"^cannot put"):
                    own.put({**second, "b": [(3, 4), {"k": [6]}]})

    def test_plain_data_that_like_lacks_is_refused(self):
        """Even if it has none at all; and two numbers do not trade places."""
        for like, sent in (({"x": frame(0)}, {"n": 1}), ({"x": frame(0), "low": 0, "high": 1}, {"low": 1, "high": 0})):
            with dlx.ring(2, like, readers=0) as own:
                with pytest.raises(
                    errors.ConversionError, match=r"^cannot put dict: .* Make them arrays, in like, too\.$"
                ):
                    own.put({"x": frame(1), **sent})
                own.put(like)

    def test_a_tree_without_arrays_is_refused(self):
        for like in ({"a": 1}, [], "text"):
            with pytest.raises(errors.DlxError, match=r"^cannot create a ring like"):
                dlx.ring(2, like)

    @pytest.mark.parametrize(
        "place",
        [
            lambda np, x: [x, [x]],
            lambda np, x: {"a": x[:3], "b": x[2:]},
            lambda np, x: [[x]] * 2,
            lambda np, x: [[[x], 1]] * 2,
        ],
    )
    def test_each_array_has_its_own_memory(self, np, place):
        """A write to one array of a frame changes no other; interleaved arrays get their own."""
        with pytest.raises(errors.LayoutError, match=r"^cannot create a ring like \w+: two of its arrays share memory"):
            dlx.ring(2, place(np, np.zeros(4)))
        whole = np.zeros(4)
        with dlx.ring(2, [whole[::2], whole[1::2], whole[:0], whole[:0]], readers=0) as own:
            reader = dlx.attach(own.handle, to="numpy")
            own.put([np.ones(2), np.zeros(2), np.zeros(0), np.zeros(0)])
            assert [each.tolist() for each in reader.read(timeout=0)] == [[1, 1], [0, 0], [], []]

    def test_errors_name_the_call_and_options_that_exist(self, np, torch, ring):
        """`put` has no options, so those of convert are named."""
        with dlx.ring(2, {"x": np.zeros(2)}, readers=0) as own:
            for bad, text in (
                (np.zeros(2, "f4"), r"at frame\['x'\]: .* Pass dtype=.* to dlx.convert before\.$"),
                (torch.zeros(2, dtype=torch.float64, requires_grad=True), r"Pass detach=True to dlx.convert before\.$"),
                (np.zeros(3), r"at frame\['x'\]: the values have shape \(3,\), but its shape is \(2,\)"),
            ):
                with pytest.raises(errors.DlxError, match=text) as caught:
                    own.put({"x": bad})
                assert str(caught.value).startswith("cannot put ")

    def test_records_become_tuples_and_dicts(self, np):
        """Named tuples are put as tuples, dataclasses as they are."""
        pair = collections.namedtuple("pair", "a b")
        record = dataclasses.make_dataclass("Record", ["a", "b"])
        for kind, expected in ((pair, tuple), (record, dict)):
            with dlx.ring(2, kind(np.zeros(2), [np.zeros(1)]), readers=0) as own:
                reader = dlx.attach(own.handle, to="numpy")
                sent = kind(np.ones(2), [np.full(1, 5.0)])
                own.put(tuple(sent) if kind is pair else sent)
                found = reader.read(timeout=0)
                assert type(found) is expected
                first, second = found.values() if expected is dict else found
                assert first.sum() == 2 and second[0][0] == 5

    def test_sparse_arrays_are_put_as_parts(self, np):
        """Their number of elements is that of `like`."""
        sparse = pytest.importorskip("scipy.sparse")
        with dlx.ring(2, {"m": sparse.eye(3).tocsr()}, readers=0) as own:
            reader = dlx.attach(own.handle, to="numpy")
            own.put({"m": dlx.parts(sparse.eye(3).tocsr() * 2)})
            assert reader.read(timeout=0)["m"]["data"].tolist() == [2.0] * 3

    def test_what_only_a_framework_knows_of_its_arrays_is_no_part(self, torch):
        """Such as that a sparse tensor is coalesced, which another frame need not be."""
        x = torch.eye(3).to_sparse()
        with dlx.ring(2, {"m": x.coalesce()}, readers=0) as own:
            reader = dlx.attach(own.handle, to="numpy")
            own.put({"m": dlx.parts(x * 2)})
            assert reader.read(timeout=0)["m"]["data"].tolist() == [2.0] * 3

    def test_arrays_without_elements(self, np):
        """Frames may have no bytes at all."""
        for like in (np.zeros((0, 3)), {"a": np.zeros((2, 0), "f4"), "b": np.ones(1)}):
            with dlx.ring(2, like, readers=0, to="numpy") as own, dlx.attach(own.handle, to="numpy") as reader:
                own.put(like)
                found = reader.read(timeout=0)
                assert (found["a"] if isinstance(found, dict) else found).shape in ((0, 3), (2, 0))

    def test_a_write_inside_another_is_refused(self, ring):
        """Both would fill the same slot."""
        own = ring(readers=0)
        reader = dlx.attach(own.handle)
        with pytest.raises(errors.HandleError, match="another call has published the frame"), own.write():
            own.put(frame(5))
        own.put(frame(6))
        assert [value(reader.read(timeout=0)) for _ in range(2)] == [5, 6]

    def test_both_ends_refuse_to_be_pickled(self, ring):
        """A process that is spawned gets the handle."""
        own = ring(readers=0)
        for each in (own, dlx.attach(own.handle)):
            with pytest.raises(TypeError, match=r"Send ring.handle, and call dlx.attach there\.$"):
                pickle.dumps(each)


class TestWaiting:
    """Back-pressure, overwriting and time limits."""

    def test_a_full_ring_waits_for_the_slowest_reader(self, ring):
        own = ring(2, readers=2)
        quick, slow = (dlx.attach(own.handle) for _ in range(2))
        own.put(frame(1))
        own.put(frame(2))
        quick.read(), quick.read(), quick.release()
        with pytest.raises(TimeoutError, match="no reader joined or released a frame within 0"):
            own.put(frame(3), timeout=0)
        assert value(slow.read()) == 1
        with pytest.raises(TimeoutError):  # it is still reading
            own.put(frame(3), timeout=0.01)
        slow.release()
        own.put(frame(3), timeout=0)

    def test_the_first_frame_waits_for_readers(self, ring):
        own = ring()
        with pytest.raises(TimeoutError):
            own.put(frame(1), timeout=0)
        with pytest.raises(TimeoutError):
            own.put(frame(1), timeout=0.06)
        reader = dlx.attach(own.handle)
        own.put(frame(1), timeout=0)
        reader.close()
        own.put(frame(2), timeout=0)

    def test_overwriting_never_waits_and_never_touches_a_frame_that_is_read(self, ring):
        own = ring(3, overwrite=True)
        reader = dlx.attach(own.handle)
        own.put(frame(1))
        held = reader.read(timeout=0)
        for number in range(2, 50):
            own.put(frame(number), timeout=0)
            assert value(held) == 1
        assert value(reader.read(timeout=0)) == 48 and reader.number == 48
        assert value(reader.read(timeout=0)) == 49

    def test_threads_wake_each_other(self, ring):
        own = ring(2)
        reader, found = dlx.attach(own.handle), []
        thread = threading.Thread(target=lambda: found.extend(value(each) for each in reader))
        thread.start()
        for number in range(200):
            own.put(frame(number), timeout=20)
            if number % 50 == 0:
                time.sleep(0.06)
        own.close()
        thread.join(20)
        assert found == list(range(200))

    def test_a_closed_ring_and_reader_say_so(self, ring):
        own = ring()
        reader = dlx.attach(own.handle)
        reader.close()
        own.close()
        with pytest.raises(errors.HandleError, match="is closed"):
            reader.read()
        with pytest.raises(errors.HandleError, match="is closed"):
            own.put(frame(1))

    def test_another_thread_ends_a_wait(self, ring):
        """A reader that is closed meanwhile keeps its number until its call has returned."""
        own = ring()
        reader, found = dlx.attach(own.handle), []

        def read():
            try:
                reader.read()
            except errors.HandleError as error:
                found.append(str(error))

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.02)
        reader.close()
        others = [dlx.attach(own.handle) for _ in range(3)]
        own.put(frame(1))
        thread.join(20)
        assert "is closed" in found[0] and reader.number == 0
        assert [value(each.read(timeout=0)) for each in others] == [1] * 3

    def test_a_fork_waits_for_a_lock_that_is_being_opened(self, ring, monkeypatch):
        """The child would keep it, and with it a reader that is dead."""
        own, started = ring(readers=0), threading.Event()

        class Slow(segment.Descriptor):
            __slots__ = ()

            def __init__(self, *arguments):
                started.set()
                time.sleep(0.2)
                super().__init__(*arguments)

        monkeypatch.setattr(segment, "Descriptor", Slow)
        readers = []
        thread = threading.Thread(target=lambda: readers.append(dlx.attach(own.handle)))
        thread.start()
        assert started.wait(20)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            thread.join()
            number = readers.pop()._number
            gc.collect()
            end = time.monotonic() + 20
            while own._change_lock(1 + number) == -1:
                assert time.monotonic() < end
                time.sleep(0.01)  # until the child has begun
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    @pytest.mark.parametrize("slots", (0, 1, 1025))
    def test_the_number_of_slots_is_limited(self, slots):
        with pytest.raises(ValueError, match="takes 2 to 1,024 slots"):
            dlx.ring(slots, like=frame(0))

    def test_too_many_readers_are_refused(self, ring):
        own = ring()
        readers = [dlx.attach(own.handle) for _ in range(lib.DLX_RING_READERS)]
        with pytest.raises(errors.HandleError, match="the most that a ring can have"):
            dlx.attach(own.handle)
        readers.pop().close()
        dlx.attach(own.handle).close()


PEERS = """
import multiprocessing, os, signal, sys, time
import dlx
like = dlx.from_dlpack(bytearray(4))
context = multiprocessing.get_context("spawn")

def read(handle, pipe):
    reader = dlx.attach(handle)
    pipe.send(bytes(memoryview(reader.read())))
    time.sleep(60)  # it holds the frame

def fill(pipe):
    ring = dlx.ring(4, like, readers=0)
    pipe.send(ring.handle)
    pipe.recv()
    ring.put(dlx.from_dlpack(b"abcd"))
    pipe.send(None)
    time.sleep(60)

def main():
    here, there = context.Pipe()
    with dlx.ring(2, like) as ring:
        process = context.Process(target=read, args=(ring.handle, there))
        process.start()
        ring.put(dlx.from_dlpack(b"abcd"))
        assert here.recv() == b"abcd"
        ring.put(like)
        try:
            ring.put(like, timeout=0.2)
            raise AssertionError
        except TimeoutError:
            pass
        process.kill()
        start = time.monotonic()
        ring.put(like, timeout=20)  # the dead reader is removed
        print("reader", time.monotonic() - start < 5)
        if os.fork() == 0:
            try:
                ring.put(like)
            except dlx.errors.HandleError as error:
                print("fork", error)
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        process.join()
    process = context.Process(target=fill, args=(there,))
    process.start()
    reader = dlx.attach(here.recv())
    here.send(None)
    here.recv()
    if os.fork() == 0:  # a child of a reader holds none of its locks
        time.sleep(60)
    process.kill()
    print("frame", bytes(memoryview(reader.read(timeout=20))))
    try:
        reader.read(timeout=20)
    except dlx.errors.HandleError as error:
        print("producer", error)
    process.join()

if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os.killpg(0, signal.SIGKILL)
"""


def test_dead_peers_are_removed_and_named(tmp_path):
    """A killed reader frees its frame; a killed producer leaves its frames, and then an error."""
    file = tmp_path / "peers.py"
    file.write_text(PEERS)
    command = [sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, start_new_session=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["reader", "fork", "frame", "producer"], done.stdout + done.stderr
    assert lines[0] == "reader True" and lines[2] == "frame b'abcd'" and done.stderr == ""
    assert "belongs to the parent of this process" in lines[1]
    assert "has ended without closing it" in lines[3]


POLLS = """
import json, os, sys, time
import dlx
like = bytearray(4)

def poll(call, timeout):
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            return call(timeout=timeout)
        except TimeoutError:
            pass
    raise SystemExit("stuck")

for timeout in (0, 0.01):
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        ring = dlx.ring(4, like, readers=0)
        os.write(sender, json.dumps(ring.handle).encode())
        time.sleep(60)
    reader = dlx.attach(json.loads(os.read(receiver, 1000)))
    os.kill(child, 9)
    os.waitpid(child, 0)
    try:
        poll(reader.read, timeout)
    except dlx.errors.HandleError as error:
        assert "has ended without closing it" in str(error)
    ring = dlx.ring(2, like)
    child = os.fork()
    if child == 0:
        reader = dlx.attach(dict(ring.handle))
        reader.read()
        time.sleep(60)
    ring.put(like)
    ring.put(like)
    os.kill(child, 9)
    os.waitpid(child, 0)
    poll(lambda timeout: ring.put(like, timeout=timeout), timeout)
"""


def test_polls_find_dead_peers(python):
    """Calls that do not wait, or wait for less than a check takes, look from time to time."""
    python(POLLS)


AT_EXIT = """
import threading, time
import dlx
ring = dlx.ring(2, bytearray(4), readers=0)
reader, full = dlx.attach(ring.handle), dlx.ring(2, bytearray(4))
held = [ring, reader, full]
held.append(held)  # a cycle
threading.Thread(target=reader.read, daemon=True).start()
threading.Thread(target=full.put, args=(bytearray(4),), daemon=True).start()
block = full.write(timeout=0)
frames = iter(dlx.attach(ring.handle))
time.sleep(0.1)
"""


def test_open_rings_end_quietly(python):
    """Threads that wait in a ring are daemons of a process that ends."""
    python(AT_EXIT)


@pytest.mark.unsanitized("a process takes its time to be killed")
def test_killed_processes_leave_no_stuck_peer_and_no_memory():
    """A part of `nox -s ring-kills`."""
    command = program("stress.ring_kills", "--count", 8)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong; " in done.stdout  # multiprocessing itself prints connections that a kill has cut


def test_threads_of_one_process_exchange_frames():
    """A part of `nox -s tsan`, without ThreadSanitizer."""
    command = program("stress.ring_threads", "--frames", 200)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and done.stdout.count("frames") == 2, done.stdout + done.stderr


def test_the_memory_is_private_and_sealed(ring):
    """A ring is a segment as any other: mode 0600, no name, and a size that no process can change."""
    number = ring().handle.fileno()
    assert os.fstat(number).st_mode & 0o777 == 0o600 and os.fstat(number).st_nlink == 0
    assert fcntl.fcntl(number, 1034) & 7 == 7  # F_GET_SEALS: seal, shrink, grow
    for size in (1, 1 << 20):
        with pytest.raises(OSError):
            os.ftruncate(number, size)


def test_nothing_is_left(np):
    """Rings and readers close their descriptors and mappings."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        own = dlx.ring(4, like=np.zeros((64, 1024)), readers=0)
        reader = dlx.attach(own.handle, to="numpy")
        own.put(np.ones((64, 1024)))
        kept = reader.read()
        del own, reader
        gc.collect()
        assert kept.sum() == 65536  # an array keeps its memory
        del kept
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as maps:
        assert not any("memfd:dlx" in line for line in maps)


MEMORY = """
import gc, sys, tracemalloc
import dlx

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) << 12

like = bytearray(1 << 16)
ring = dlx.ring(4, like)
reader = dlx.attach(ring.handle)

def send(n):
    for _ in range(n):
        ring.put(like)
        reader.read()
        with ring.write() as frame:
            del frame
        reader.read()

send(2000)
gc.collect()
before = resident()
send(50_000)
print(resident() - before)
tracemalloc.start()
send(100)
gc.collect()
before, _ = tracemalloc.get_traced_memory()
tracemalloc.reset_peak()
send(1000)
after, peak = tracemalloc.get_traced_memory()
print(after - before, peak - before)
"""


@pytest.mark.unsanitized("the sanitizers keep freed memory")
def test_frames_take_no_memory(python):
    """After 100,000 frames of 64 KiB the process is as large as before; a call uses less than 2 KB for its objects."""
    resident, kept, peak = map(int, python(MEMORY).split())
    assert resident < 1 << 19 and kept < 1024 and peak < 2048, (resident, kept, peak)


def test_forged_rings_are_refused_or_harmless():
    """Random words in the control block or the description; `nox -s fuzz-rings` writes to 100,000 rings."""
    command = program("stress.forged_rings", "--count", 500, "--seed", 7)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'used'" in done.stdout and "'refused'" in done.stdout and done.stderr == ""
