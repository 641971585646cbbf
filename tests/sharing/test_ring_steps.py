"""The protocol of rings in many orders of its steps, with deaths before them, and under ThreadSanitizer."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
from support.stress import ring_steps

import dlx

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="rings need Linux"),
    pytest.mark.filterwarnings("ignore:os.fork"),  # jax has threads
]
# ring_steps.c switches contexts by ucontext.h, which musl does not implement.
needs_contexts = pytest.mark.skipif(
    sys.platform == "linux" and not hasattr(ctypes.CDLL(None), "swapcontext"), reason="the C library has no swapcontext"
)

TAKE, CHANGE = (
    "uint32_t is_asleep = atomic_exchange_explicit(sleeps, 0, memory_order_seq_cst);",
    "atomic_fetch_add_explicit(word, 1, memory_order_seq_cst);",
)
LEAVE, JOIN = (f"\n}}\n\nvoid dlx_ring_{name}" for name in ("leave", "join"))
# A line of the protocol, its broken version, and the run that finds it.
PLANTED = {
    "a reader does not look again": ("if (LOAD(r->numbers[slot]) == found) return slot;", "return slot;", "1 2"),
    "a reader looks once at slots that change": ("if (!newest && found != seen)", "if (0)", "0 1"),
    "the producer does not look again": ("if (can_replace(r, least, overwrite)) return slot;", "return slot;", "1 2"),
    "a frame that is read may be replaced": ("if (LOAD(each->held) == number ||", "if (0 ||", "1 2"),
    "a frame of a slow reader may be replaced": ("(!overwrite && LOAD(each->wanted) <= number)", "0", "0 0"),
    "a released frame is wanted again": ("STORE(own->wanted, held + 1);", "", "0 0"),
    "the producer looks before it says that it sleeps": ("if (tries > 1) STORE(r->producer_sleeps, 1);", "", "0 2"),
    "readers look before they say that they sleep": ("if (tries > 1) STORE(r->readers_sleep, 1);", "", "0 2"),
    "a release does not wake": (f"wake(&r->released, &r->producer_sleeps);{LEAVE}", LEAVE, "0 0"),
    "a wake takes the flag after it changes the word": (f"{TAKE}\n  {CHANGE}", f"{CHANGE}\n  {TAKE}", "0 3 wakes"),
    "the end does not wake": (f"wake(&r->published, &r->readers_sleep);{JOIN}", JOIN, "0 2"),
    "a new reader keeps the frame of a dead one": ("STORE(own->held, 0);\n  STORE(own", "STORE(own", "0 0 kill"),
    "a dead reader stays": ("STORE(r->readers[number].is_active, 0);", "(void)number;", "0 0 kill"),
}  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return the program that tries orders."""
    return ring_steps.build(tmp_path_factory.mktemp("orders"))


@needs_contexts
@pytest.mark.parametrize("overwrite", "01")
def test_all_orders_of_steps(program, overwrite):
    """Frames are whole and in order, none is lost, and no wake is missing, also after a death; `nox -s ring-kills`."""
    for words in (["1"], ["0", "kill"]):
        assert int(ring_steps.explore(program, overwrite, *words).split()[0]) > 1000


@needs_contexts
@pytest.mark.few(3)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(tmp_path, fault):
    """Each line of the protocol is necessary."""
    right, wrong, words = PLANTED[fault]
    broken = ring_steps.build(tmp_path, "ring_steps", "-w", right=right, wrong=wrong)
    with pytest.raises(AssertionError, match="does not hold"):
        ring_steps.explore(broken, *words.split())


@pytest.mark.parametrize("order", ["seq_cst", "relaxed"])
def test_threads_under_the_thread_sanitizer(tmp_path, order):
    """The memory of a frame is written and read without a race; with relaxed orders there is one."""
    change = {"right": "memory_order_seq_cst", "wrong": f"memory_order_{order}"}
    try:
        built = ring_steps.build(tmp_path, "ring_steps", "-fsanitize=thread", **change)
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no ThreadSanitizer")
    around = ["setarch", "-R"] if shutil.which("setarch") else []  # as in test_threads_core.py
    env = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "TSAN_OPTIONS")}
    reports = []
    for overwrite in "01":
        command = [*around, str(built), "threads", overwrite, "2000"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=200)
        reports.append(done.stderr)
        assert order == "relaxed" or done.returncode == 0, done.stderr
    assert ("data race" in "".join(reports)) is (order == "relaxed")


@pytest.fixture(scope="module")
def stepping(tmp_path_factory):
    """Return the functions that stop a process."""
    with dlx.ring(2, ring_steps.LIKE) as ring:  # loads everything, for the forks
        dlx.attach(ring.handle).close()
    return ring_steps.Stepping(ring_steps.build(tmp_path_factory.mktemp("deaths"), "ring_deaths", "-shared", "-fPIC"))


@pytest.mark.unsanitized("a process takes its time to be killed")
@pytest.mark.few(3)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ring_steps.SIGNALS)
@pytest.mark.parametrize("role", ring_steps.ROLES)
def test_a_death_before_a_step(stepping, role, name, overwrite):
    """The survivor continues within a second, whatever the other one was doing; a part of `nox -s ring-kills`."""
    first = 1 + (len(role + name) + overwrite) % 11
    assert ring_steps.stop_at_steps(stepping, role, overwrite, name, first=first, every=11) > 8
