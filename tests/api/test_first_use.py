"""Calls in the middle of the first use of dlx: finalizers and callbacks work, signal handlers get a clear error."""

from __future__ import annotations

import pytest

CALLBACK = """
import gc, sys, weakref
import numpy as np
import dlx

problems, calls = [], 0

def convert(*_):
    global calls
    calls += 1
    try:
        if dlx.convert(bytearray(b"abc"), to="numpy").tolist() != [97, 98, 99]:
            problems.append("wrong")
        if dlx.convert(np.arange(3), to="dlx").device != dlx.Device("cpu"):
            problems.append("another Device")
    except BaseException as error:
        problems.append(repr(error))

class Cycle:
    def __init__(self):
        self.me = self

class Finalized(Cycle):
    __del__ = convert

def litter(kind):
    made = kind()
    if kind is Cycle:
        kept.append(weakref.ref(made, convert))

kept = []
"""
EACH = {
    "callback": "gc.callbacks.append(convert)",
    "weakref": "[litter(Cycle) for _ in range(50)]",
    "finalizer": "[litter(Finalized) for _ in range(50)]",
}


FIRST = """
called = 0
for threshold in (10, 300, 1000, 3000, 9000):  # allocations until the first collection
    child = os.fork()
    if not child:
        try:
            gc.collect()
            EACH
            gc.set_threshold(threshold, 1, 1)
            FIRST
            gc.set_threshold(700, 10, 10)
            assert dlx.convert is dlx.convert and gc.isenabled() and type(dlx) is type(sys)
            gc.collect()
            assert calls and not problems, (threshold, calls, set(problems))
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("first", ["dlx.convert(np.arange(3), to='dlx')", "dlx.Device"])
@pytest.mark.parametrize("how", EACH)
def test_what_the_collector_calls_may_convert(python, how, first):
    """A garbage collection during the first use may call a conversion."""
    pytest.importorskip("numpy")
    python(f"import os{CALLBACK}{FIRST.replace('EACH', EACH[how]).replace('FIRST', first)}")


INTERRUPTED = """
import os, sys
import numpy as np
import dlx

class Calls:
    def __init__(self, at):
        self.at, self.count, self.said = at, 0, ""
    def __call__(self, frame, event, arg):
        if f"{os.sep}dlx{os.sep}" not in frame.f_code.co_filename and "dlx_adapters" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                try:
                    assert dlx.convert(bytearray(b"abc"), to="numpy").tolist() == [97, 98, 99]
                    self.said = "right"
                except Exception as error:
                    self.said = str(error)
        return self

def first_use(at):
    calls = Calls(at)
    sys.settrace(calls)
    try:
        tensor = dlx.convert(np.arange(3), to="dlx")
    finally:
        sys.settrace(None)
    assert tensor.shape == (3,) and type(tensor.device) is dlx.Device
    assert dlx.convert(tensor, to="numpy").tolist() == [0, 1, 2]
    assert dlx.convert(bytearray(b"abc"), to="numpy").tolist() == [97, 98, 99]
    try:
        dlx.convert(object(), to="numpy")
    except dlx.errors.DlxError:
        pass
    return calls

def forked(at):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            calls = first_use(at)
            os.write(write, f"{calls.count} {calls.said}".encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as said:
        count, _, words = said.read().partition(" ")
    assert os.waitpid(child, 0)[1] == 0, at
    return int(count), words

lines, _ = forked(0)
known = {"right": 0, "Run 'from dlx import convert' before": 0, "Convert an array to it earlier": 0}
for at in range(1, lines + 1, lines // PLACES):
    _, words = forked(at)
    (kind,) = [each for each in known if each in words] or [words]
    known[kind] += 1
print(known)
assert all(known.values()), known
"""


@pytest.mark.slow
def test_a_call_that_interrupts_the_first_use_is_right_or_told_so(python):
    """Like a signal handler, at each line of the first use: later calls and the interrupted call are right."""
    pytest.importorskip("numpy")
    python(INTERRUPTED.replace("PLACES", "60"))


def test_the_module_can_be_pickled_before_its_first_use(python):
    """Functions that use it can be sent by cloudpickle (dask, ray), which recognises modules by their exact class."""
    python(
        """
        import importlib.util, pickle, types, dlx
        assert type(dlx) is not types.ModuleType
        assert pickle.loads(pickle.dumps(dlx)) is dlx
        if importlib.util.find_spec("cloudpickle"):
            import cloudpickle
            assert pickle.loads(cloudpickle.dumps(lambda: dlx))() is dlx
        dlx.convert, dlx.convert
        assert type(dlx) is types.ModuleType
        """
    )
