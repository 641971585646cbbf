"""Threads that share arrays, containers, views and capsules; `nox -s free-threaded` runs them without the GIL."""

from __future__ import annotations

import gc
import subprocess
import threading
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes.concurrent import at_once
from support.project import program

import dlx
from dlx import errors
from dlx._core import native


@given(
    st.integers(2, 6),
    st.sampled_from([None, (1, 0)]),
    st.lists(st.sampled_from(["from_dlpack", "convert", "claim"]), min_size=6, max_size=6),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_thread_gets_a_capsule(threads, version, ways):
    """One thread gets the memory, and the others a ConsumedError, for every function."""
    block = bytearray(b"abcdefgh")
    live = native.live()
    capsule = dlx.from_dlpack(block).__dlpack__(max_version=version)
    ask = {"from_dlpack": dlx.from_dlpack, "convert": partial(dlx.convert, to="dlx"), "claim": native.capsule_claim}
    found = at_once(*(partial(ask[way], capsule) for way in ways[:threads]))
    got = [each for each in found if isinstance(each, dlx.Tensor)]
    assert len(got) == 1 and bytes(memoryview(got[0])) == block
    assert all(isinstance(each, errors.ConsumedError) for each in found if each is not got[0])
    del got, found, capsule
    if native.live() != live:  # a collection takes longer than the rest of the test
        gc.collect()
    assert native.live() == live


def test_a_tensor_that_others_read_while_its_capsule_is_restored(python):
    """A tensor that a failed consumer passed on stays readable during and after the restore."""
    python("""
        import sys, threading
        import dlx
        from dlx._core import native
        sys.setswitchinterval(1e-5)
        errors, latest, done = [], [None], threading.Event()

        def read():
            try:
                while not done.is_set():
                    if (tensor := latest[0]) is not None:
                        assert tensor.shape == (4096,) and bytes(memoryview(tensor)[:2]) == b"ab"
                        assert bytes(memoryview(dlx.convert(tensor, to="dlx", copy=True))[:2]) == b"ab"
                        assert native.capsule_claim(tensor.__dlpack__(max_version=(1, 0))).shape == (4096,)
                        del tensor
            except BaseException as error:
                errors.append(error)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for number in range(2000):
            capsule = dlx.from_dlpack(bytearray(b"ab" * 2048)).__dlpack__(max_version=(None, (1, 0))[number % 2])
            latest[0] = native.capsule_claim(capsule)
            assert native.capsule_restore(capsule, latest[0])
            if number % 3:
                native.capsule_claim(capsule)
            del capsule
        done.set()
        for reader in readers:
            reader.join()
        latest.clear()
        assert not errors, errors
        assert native.live() == 0
    """)


def test_threads_that_convert_the_same_array(python):
    """A dlx.Tensor and a numpy array of its memory are converted and dropped repeatedly, in lists and buffers."""
    python("""
        import importlib.util, sys, threading
        import dlx
        from dlx._core import native
        sys.setswitchinterval(1e-5)
        errors, values = [], bytes(range(64))
        targets = ["dlx", *filter(importlib.util.find_spec, ["numpy"])]
        base = dlx.from_dlpack(bytearray(values))
        shared = [base, *(dlx.convert(base, to=name) for name in targets[1:])]
        live = native.live()

        def work(number):
            try:
                for turn in range(400):
                    array, to = shared[turn % len(shared)], targets[(number + turn // 2) % len(targets)]
                    made = dlx.convert(array, to=to)
                    both = dlx.convert([array, {"a": array}], to=to)
                    tensor = dlx.convert(both[1]["a"], to="dlx")
                    buffer = memoryview(tensor)
                    again = dlx.using(to)(lambda x: x)(tensor)
                    assert bytes(buffer) == bytes(memoryview(made)) == bytes(memoryview(again)) == values
                    del made, both, tensor, buffer, again
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert native.live() == live, (native.live(), live)
    """)


def test_a_container_that_changes_meanwhile():
    """A list that other threads change is converted in one consistent state."""
    array = dlx.from_dlpack(bytearray(8))
    shared, stop = [array] * 8, threading.Event()

    def change():
        while not stop.is_set():
            shared.extend([array] * 50)
            del shared[8:]

    def convert():
        try:
            for _ in range(300):
                found = dlx.convert(shared, to="dlx")
                assert len(found) >= 8 and all(each is array for each in found)
        finally:
            stop.set()

    assert at_once(change, convert, convert) == [None] * 3


@pytest.mark.slow
def test_everything_at_once():
    """Every public call in four threads that change shared objects, in a separate process."""
    command = program("stress.threads", "--threads", 4, "--seconds", 3, "--seed", 1, options=("-X", "faulthandler"))
    done = subprocess.run([*command, "--frameworks", "numpy"], capture_output=True, text=True, timeout=250, check=False)
    if "numpy is not installed" in done.stdout:
        pytest.skip("numpy is not installed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 managed tensors alive at the end." in done.stdout
