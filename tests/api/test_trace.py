"""`dlx.trace` records every conversion by the caller's line, at no cost without a trace."""

import json
import os
import sys
import threading

import pytest

import dlx
from dlx._engine import trace as module


def lines(seen):
    """Return (line, outcome, count, bytes) of the events, by line."""
    return sorted((each.line, each.outcome, each.times, each.nbytes) for each in seen.records)


def here(offset=0):
    """Return the number of the calling line."""
    return sys._getframe(1).f_lineno + offset


def test_each_line_of_the_caller_is_an_event(np):
    """An event has outcome, count, bytes and reasons."""
    array, backwards = np.ones((4, 4), np.float32), np.ones(8)[::-1]
    with dlx.trace() as seen:
        for _ in range(3):
            dlx.convert(array, to="dlx")
        start = here()
        dlx.convert(array, to="dlx", copy=True)
        dlx.convert(backwards, to="dlx")
        dlx.convert({"a": [array, backwards]}, to="dlx")
    dlx.convert(array, to="dlx", copy=True)  # afterwards nothing is recorded
    assert lines(seen) == [
        (start - 1, "shared", 3, 0),
        (start + 1, "copied", 1, 64),
        (start + 2, "shared", 1, 0),
        (start + 3, "shared", 1, 0),
        (start + 3, "shared", 1, 0),
    ]
    copied = seen.records[0]
    assert copied.file == __file__ and copied.function == "test_each_line_of_the_caller_is_an_event"
    assert "float32[4, 4]" in copied.source and copied.target == "dlx" and "copy=True" in copied.why[0]
    assert seen.nbytes == 64


def test_copies_to_an_output_are_events(np):
    """Also where `convert` needs no check, and for each array of a tree."""
    array, out = np.ones(3), np.zeros(3)
    dlx.convert(array, out=out)  # loads the fast path
    with dlx.trace() as seen:
        start = here()
        dlx.convert(array, out=out)
        dlx.convert([array, array[:2]], out=[out, np.zeros(2)])
        dlx.stack([array, array], out=np.zeros((2, 3)))
    assert lines(seen) == [
        (start + 1, "copied", 1, 24),
        (start + 2, "copied", 1, 16),
        (start + 2, "copied", 1, 24),
        (start + 3, "copied", 1, 48),
    ]


def test_results_are_those_of_the_fast_path(np, torch):
    """The same memory, the same objects: only the way is another."""
    array, tensor = np.arange(6.0), torch.ones(3)
    with dlx.trace() as seen:
        result = dlx.convert(array, to="torch")
        assert dlx.convert(tensor, to="torch") is tensor
        tree = dlx.convert([array, array, 1], to="torch")
        view = dlx.convert({"x": array}, to="torch", lazy=True)
        view["x"]
        stacked = dlx.stack([array, array], to="numpy")
        dlx.using("torch")(lambda x: x + 1)(array)
    assert result.data_ptr() == array.ctypes.data and tree[0] is tree[1] and stacked.shape == (2, 6)
    assert {each.outcome for each in seen.records} == {"shared", "same", "copied"}
    (stack,) = [each for each in seen.records if each.outcome == "copied"]
    assert stack.source == "2 arrays" and stack.nbytes == 96
    assert all(each.file == __file__ for each in seen.records)


def test_the_fast_path_is_back_afterwards(np):
    """Routes are learned again, also after an error in the context."""
    array = np.ones(2)
    with pytest.raises(ZeroDivisionError), dlx.trace():
        dlx.convert(array, to="dlx")
        assert dlx.convert._borrow(array, "dlx", True) is None
        raise ZeroDivisionError
    assert module.observers == [] and dlx.convert._borrow(array, "dlx", True) is not None


def test_traces_nest_and_see_all_threads(np):
    """Each trace has the events while it was entered."""
    array = np.ones(2)
    with dlx.trace() as outer:
        with dlx.trace() as inner:
            thread = threading.Thread(target=dlx.convert, args=(array, "dlx"))
            thread.start()
            thread.join()
        dlx.convert(array, to="dlx")
    assert sum(each.times for each in inner.records) == 1 and sum(each.times for each in outer.records) == 2


def test_a_trace_is_entered_once_at_a_time(np):
    """Entering twice at once raises and changes nothing; entering later continues the counts."""
    seen = dlx.trace()
    with seen:
        with pytest.raises(RuntimeError, match="active already"), seen:
            pass
        dlx.convert(np.ones(2), to="dlx")
    assert module.observers == []
    with seen:
        dlx.convert(np.ones(2), to="dlx")
    assert sum(each.times for each in seen.records) == 2


@pytest.mark.parametrize("name", ["dlx_torch_train", "dlx_numpy2", "dlxtools"])
def test_a_users_module_may_be_named_like_an_adapter(np, name):
    """Its line is the caller's."""
    names = {"__name__": name, "dlx": dlx, "array": np.ones(3)}
    with dlx.trace() as seen:
        exec(compile("def run():\n    dlx.convert(array, to='dlx')\nrun()", f"{name}.py", "exec"), names)
    (event,) = seen.records
    assert (event.file, event.line, event.function) == (f"{name}.py", 2, "run")


def test_it_prints_as_a_table_html_and_json(np):
    """Text with where, how often and why; HTML that is escaped; JSON with the fields."""
    with dlx.trace() as seen:
        dlx.convert(np.ones(3, np.float32), to="dlx", copy=True)
    head, row = str(seen).splitlines()
    assert head == "12 B copied or moved by 1 conversion" and "test_trace.py:" in row and "copied" in row
    assert repr(seen) == str(seen)
    shown = seen._repr_html_()
    assert "<table" in shown and "-&gt; dlx" in shown and "background:#d4a72c" in shown
    (event,) = json.loads(seen.json())
    assert event["outcome"] == "copied" and event["nbytes"] == 12 and event["times"] == 1
    assert str(dlx.trace()) == "0 B copied or moved by 0 conversions"


def test_a_failed_conversion_is_no_event(np):
    """Nothing was shared or copied."""
    with dlx.trace() as seen, pytest.raises(dlx.errors.ConversionError):
        dlx.convert([np.ones(2), np.array(["x"], object)], to="dlx")
    assert seen.records == []


WARNS = """
import warnings
import numpy as np
import dlx

array = np.ones(200_000)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        dlx.convert(array, to="dlx", copy=True)
    dlx.convert(array, to="dlx")
    dlx.convert(array[:9], to="dlx", copy=True)
print(len(said), said[0].lineno, said[0].message)
"""


def test_large_copies_are_warned_of_once_a_line(python, np):
    """DLX_WARN_COPIES=1MiB warns with the caller's line, not a line of dlx."""
    out = python(WARNS, args=(), env={**os.environ, "DLX_WARN_COPIES": "1MiB"})
    assert out.startswith("1 10 dlx copied 1.5 MiB here: numpy.ndarray (float64[200000]) -> dlx: copy=True")
    env = {**os.environ, "DLX_WARN_COPIES": "0"}
    assert python("from dlx._engine import trace; print(trace.observers)", args=(), env=env) == "[]\n"
    out = python(
        "import dlx\ntry: dlx.convert\nexcept ValueError as error: print(error)",
        env={**os.environ, "DLX_WARN_COPIES": "big"},
    )
    assert out == "DLX_WARN_COPIES='big' is not a number of bytes. Set it to a number, such as 1MiB.\n"


@pytest.mark.parametrize("to", ["numpy", "torch", "scipy", "sparse", "awkward", "openvino", "pyarrow"])
@pytest.mark.parametrize("source", ["numpy", "pandas", "pyarrow", "PIL"])
def test_a_part_of_a_conversion_is_no_event(np, source, to):
    """Some adapters convert by numpy: one call is one event, with the bytes of its plan."""
    module = pytest.importorskip("PIL.Image" if source == "PIL" else source)
    pytest.importorskip(to if to != "scipy" else "scipy.sparse")
    whole = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    make = {
        "numpy": lambda: whole,
        "pandas": lambda: module.Series(whole[0, 0]),
        "pyarrow": lambda: module.array(whole[0, 0]),
        "PIL": lambda: module.fromarray(whole),
    }
    obj = make[source]()
    plan = dlx.plan(obj, to=to)
    if plan.outcome == "refused":
        pytest.skip(str(plan.error))
    with dlx.trace() as seen:
        dlx.convert(obj, to=to)
    assert [(each.target, each.times, each.nbytes) for each in seen.records] == [(to, 1, plan.nbytes)]
