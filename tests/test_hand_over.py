"""What is handed over to a consumer's exchange table is released once, whatever the consumer does when it fails."""

from __future__ import annotations

import gc
import sys

import pytest

import dlx
from dlx import native

FAILING = """
import gc, sys
import _testcapi
import numpy as np
import torch
import dlx
from dlx import native

def attempts(make, most=40):
    # Every allocation of the conversion fails once: number 1, then number 2, ...; the source is made before.
    for n in range(most):
        obj = make()
        _testcapi.set_nomemory(n, n + 1)
        try:
            result = dlx.convert(obj, "torch")
        except (MemoryError, dlx.errors.ConversionError):  # torch says RuntimeError, which is the cause
            result = None
        finally:
            _testcapi.remove_mem_hooks()
        yield obj, result
"""

SHAPES = {
    "one": "x",
    "list": "[x, x]",
    "dict": "{'a': x, 'b': 1}",
    "tuple": "(1, x)",
    "tree": "{'a': [x, (x, {'b': [good, x]})], 'c': good}",
}


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("source", ["np.arange(4.0)", "dlx.convert(np.arange(4.0), 'dlx')"])
def test_no_memory_for_the_result(np, torch, python, form, source):
    """torch releases what it cannot wrap: nothing is freed twice, and nothing is kept, whichever allocation fails."""
    out = python(
        FAILING
        + f"""
good = np.arange(3.0)
def make():
    x = {source}
    return {SHAPES[form]}
dlx.convert(make(), "torch")
gc.collect()
live, references = native.live(), sys.getrefcount(good)
failed = 0
for obj, result in attempts(make):
    failed += result is None
    del obj, result
gc.collect()
assert (native.live(), sys.getrefcount(good)) == (live, references), (native.live(), live)
print("alive", failed > 0)
"""
    )
    assert out == "alive True\n"


def test_no_memory_for_the_result_by_copy(np, torch, python):
    """The same for copies that dlx made: read-only memory, and copy=True."""
    out = python(
        FAILING
        + """
source = np.arange(4.0)
locked = source.copy()
locked.flags.writeable = False
for obj, options in ((locked, {}), (source, {"copy": True})):
    dlx.convert(obj, "torch", **options)
    gc.collect()
    live, references = native.live(), sys.getrefcount(obj)
    for n in range(12):
        _testcapi.set_nomemory(n, n + 1)
        try:
            dlx.convert(obj, "torch", **options)
        except (MemoryError, dlx.errors.ConversionError):
            pass
        finally:
            _testcapi.remove_mem_hooks()
    gc.collect()
    assert (native.live(), sys.getrefcount(obj)) == (live, references)
print("alive")
"""
    )
    assert out == "alive\n"


def test_what_somebody_else_holds_is_handed_over_as_well(np, torch):
    """A buffer of the tensor that is handed over keeps its memory, and so does the result, whichever goes first."""
    array = np.arange(4.0)
    dlx.convert(array, to="torch")
    before, live = sys.getrefcount(array), native.live()
    for first in ("buffer", "result"):
        tensor = dlx.convert._lend(array, "torch")
        buffer = memoryview(tensor)
        result = dlx.convert._load(tensor, array, "torch")
        del tensor
        if first == "buffer":
            buffer.release()
            assert sys.getrefcount(array) > before and result.tolist() == [0, 1, 2, 3]
            del result
        else:
            del result
            gc.collect()
            assert sys.getrefcount(array) > before and buffer.tolist() == [0, 1, 2, 3]
            buffer.release()
        assert (sys.getrefcount(array), native.live()) == (before, live)
