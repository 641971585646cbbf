"""A tensor passed to a consumer's exchange table is released once, even if the consumer fails."""

from __future__ import annotations

import gc
import sys

import pytest

import dlx
from dlx._core import native

FAILING = """
import gc, sys
import _testcapi
import numpy as np
import torch
import dlx
from dlx._core import native

def attempts(make, most=40):
    # Every allocation of the conversion fails once: number 1, then number 2, ...; the source is made before.
    for n in range(most):
        obj = make()
        _testcapi.set_nomemory(n, n + 1)
        try:
            result = dlx.convert(obj, "torch")
        except (MemoryError, dlx.errors.ConversionError):  # it says RuntimeError, which is the cause
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


@pytest.mark.few(4)
@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("source", ["np.arange(4.0)", "dlx.convert(np.arange(4.0), 'dlx')"])
def test_no_memory_for_the_result(np, torch, python, form, source):
    """A consumer releases tensors that it cannot wrap: whichever allocation fails, nothing is freed twice or leaked."""
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
""",
        imported=True,
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
""",
        imported=True,
    )
    assert out == "alive\n"


def test_what_somebody_else_holds_is_handed_over_as_well(np, torch):
    """A buffer of the consumed tensor and the result both keep the memory alive, whichever is deleted first."""
    array = np.arange(4.0)
    dlx.convert(array, to="torch")
    before, live = sys.getrefcount(array), native.live()
    for first in ("buffer", "result"):
        tensor = dlx.convert._borrow(array, "torch")
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


HUGE = {  # shapes without elements, strides, and whether torch and numpy hold int8 arrays of them
    "all": ((2**62, 2**62, 0), None, False, False),
    "before": ((2**62, 4, 0), None, False, False),
    "narrowly": ((2**62, 2, 0), None, True, False),
    "behind": ((0, 2**62, 4), None, True, False),
    "fits": ((0, 2**62), None, True, True),
    "strides": ((2, 3, 0), (-1, 2**62, 1), True, True),
    "strides first": ((0, 2, 3), (-1, 2**62, 1), True, True),
    "products of strides": ((0, 2**31, 2**31), (-1, -1, 2**31), True, True),
}
FORMS = {**SHAPES, "nested": "[[[x]], {'k': (x,)}]"}


@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_extents_that_do_not_fit(np, torch, python, target):
    """Empty tensors that a consumer cannot hold are refused before it sees them, also in plans; others are shared."""
    out = python(
        f"""
        import numpy as np
        import dlx
        good = np.arange(3.0)
        for case, (shape, strides, *held) in {HUGE}.items():
            x = dlx.from_pointer(0, shape, "int8", strides=strides)
            for obj in ({", ".join(FORMS.values())}):
                for convert in (dlx.convert, dlx.convert, dlx.convert.__wrapped__):
                    plan = dlx.plan(obj, to={target!r})
                    try:
                        convert(obj, to={target!r})
                        told = None
                    except dlx.errors.LayoutError as error:
                        told = str(error)
                        assert "Reshape it first." in told, (case, told)
                    assert (told is None) == held[{target == "numpy"}], (case, told)
                    assert (plan.error is None) == (told is None), (case, plan)
        """,
        imported=True,
    )
    assert out == ""


@pytest.mark.parametrize(("source", "target"), [("torch", "numpy"), ("numpy", "torch")])
def test_empty_arrays_of_frameworks(np, torch, source, target):
    """Plan and conversion refuse empty arrays that the target cannot represent."""
    if source == "numpy":  # whatever numpy holds torch holds
        for shape in ((0, 2**59), (2**30, 2**29, 0)):
            assert dlx.convert(np.zeros(shape), to="torch").shape == shape
            assert dlx.plan(np.zeros(shape), to="torch").error is None
        return
    array = torch.zeros((0, 1 << 62))
    assert isinstance(dlx.plan(array, to="numpy").error, dlx.errors.LayoutError)
    with pytest.raises(dlx.errors.LayoutError, match="4611686018427387904"):
        dlx.convert(array, to="numpy")
    assert dlx.convert(torch.zeros((0, 1 << 60)), to="numpy").shape == (0, 1 << 60)
    assert dlx.convert(array, to="dlx").shape == (0, 1 << 62)


def test_empty_arrays_of_jax(np):
    """Products that jax refuses are refused before the import; others are converted."""
    pytest.importorskip("jax")
    for shape, held in (((2**61, 2, 0), False), ((2**62, 2**62, 0), False), ((0, 2**62, 2**62), True)):
        empty = dlx.from_pointer(0, shape, "float32")
        assert (dlx.plan(empty, to="jax").error is None) is held
        if held:
            assert dlx.convert(empty, to="jax").shape == shape
        else:
            with pytest.raises(dlx.errors.LayoutError, match="Reshape it first"):
                dlx.convert(empty, to="jax")


def test_what_extents_must_keep_to_is_checked():
    """An unknown value raises immediately."""
    with pytest.raises(ValueError, match="found 'some'"):
        dlx.adapter.Capabilities(dtypes=None, empty_extents="some")


def test_no_memory_for_a_storage_dtype(np, python):
    """Memory runs out before any consumer has seen the tensor: other holders keep their data."""
    pytest.importorskip("ml_dtypes")
    out = python(
        """
        import gc, sys, weakref
        import _testcapi
        import numpy
        import dlx
        from dlx._core import native

        class Owner(bytearray):
            pass

        for n in range(4):
            owner = Owner(b"\\x80\\x3f" * 4)
            gone = weakref.ref(owner)
            address = native.buffer_address(memoryview(owner))
            source = dlx.from_pointer(address, (4,), "bfloat16", owner=owner)
            dlx.convert(source, to="numpy")
            tensor = dlx.convert._borrow(source, "numpy")
            capsule = tensor.__dlpack__(max_version=(1, 0))
            _testcapi.set_nomemory(n, n + 1)
            try:
                dlx.convert._load(tensor, source, "numpy")
            except (MemoryError, dlx.errors.ConversionError):
                pass
            finally:
                _testcapi.remove_mem_hooks()
            del owner, source, tensor
            gc.collect()
            assert gone() is not None, n
            assert dlx.convert(capsule, to="numpy").astype("f4").tolist() == [1, 1, 1, 1]
            del capsule
            gc.collect()
        print("alive")
        """
    )
    assert out == "alive\n"
