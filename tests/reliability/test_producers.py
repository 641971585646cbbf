"""Producers that lie, generated and single cases: detectable lies are refused, and nothing leaks or crashes."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest
from support.project import compiled, program

import dlx
from dlx import errors

# ---- generated -------------------------------------------------------------------------------------------------------


def fuzz(*arguments, path=None):
    """Run the program; return (exit status, output)."""
    env = {**os.environ, "PYTHONPATH": str(path or "")}
    command = program("producers.fuzz", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=250, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_generated_producers():
    """A short `nox -s fuzz-producers` with a fixed seed: random seeds would find more, but fail at random."""
    status, out = fuzz("--count", "2500", "--seed", "17", "--frameworks", "numpy")
    assert status == 0, out
    assert "2500 cases, 0 faults" in out


@pytest.mark.slow
def test_tables_that_lie(python):
    """Slots that succeed without a result, return invalid fields, or fail without an exception cause no crash."""
    pytest.importorskip("numpy")
    out = python(
        "import sys; sys.path[:0] = ['tests']; from support.foreign import lying_tables;"
        f"lying_tables.run({str(compiled('lying'))!r})"
    )
    assert sum(map(int, out.split("calls:")[1].split())) > 10_000


FAULTS = {
    "calls twice": (
        """
        from dlx._registry.generic import DLPackAdapter
        once = DLPackAdapter.export
        DLPackAdapter.export = lambda self, obj, **options: (once(obj, **options), once(obj, **options))[1]
        """,
        "the producer was called 2 times",
    ),
    "swallows": (
        """
        from dlx._registry.generic import DLPackAdapter
        from dlx.errors import ConversionError
        real = DLPackAdapter.export
        def export(self, obj, **options):
            try:
                return real(obj, **options)
            except BaseException:
                raise ConversionError("something went wrong") from None
        DLPackAdapter.export = export
        """,
        "replaced:",
    ),
    "leaks": (
        """
        from dlx._registry import generic
        kept, real = [], generic.memory.buffer
        generic.memory.buffer = lambda obj: (kept.append(real(obj)), kept[-1])[1]
        """,
        "managed tensors are left",
    ),
    "other values": (
        """
        from dlx._protocols import memory
        real = memory._interface_address
        def wrong(data, name):
            address, readonly = real(data, name)
            return address and address ^ 256, readonly
        memory._interface_address = wrong
        """,
        "other values:",
    ),
    "dies": (
        """
        import os, signal
        from dlx._registry import generic
        def die(*arguments): os.kill(os.getpid(), signal.SIGSEGV)
        generic.memory.array_interface = die
        """,
        "alone: status -11",
    ),
}


CAUGHT = pytest.mark.unsanitized("the sanitizers catch a fatal signal")


@pytest.mark.parametrize("name", [pytest.param(name, marks=CAUGHT if name == "dies" else ()) for name in FAULTS])
@pytest.mark.slow
def test_a_planted_fault_is_found(tmp_path, name):
    """A planted fault fails with the seed and the number of the case."""
    code, told = FAULTS[name]
    (tmp_path / "planted_fault.py").write_text(textwrap.dedent(code))
    arguments = ("--count", "400", "--seed", "17", "--frameworks", "numpy", "--plant", "planted_fault")
    arguments += ("--most", "1")
    status, out = fuzz(*arguments, path=tmp_path)
    assert status == 1 and told in out and "seed 17 case" in out, out


# ---- faults that they found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
@pytest.mark.parametrize("device", [(2, 0), (13, 0)], ids=str)
def test_a_capsule_of_device_memory_is_shared_without_a_driver(counting, device, legacy):
    """A dlx.Tensor wraps it, as the plan says; only readers need the driver."""
    capsule = counting.capsule((3,), device=device, legacy=legacy)
    assert dlx.plan(capsule, to="dlx").outcome == "shared"
    assert dlx.convert(capsule, to="dlx").device == device


@pytest.mark.parametrize("version", [None, (0, 8)], ids=str)
def test_a_capsule_that_cannot_become_a_legacy_one_stays_whole(counting, version):
    """Padded elements are refused before the capsule is consumed."""
    capsule = counting.capsule((3,), dtype=(0, 4, 1), flags=4)
    with pytest.raises(errors.ProtocolError, match="padded"):
        dlx.to_capsule(capsule, max_version=version)
    assert counting.name(capsule) == "dltensor_versioned"


@pytest.mark.parametrize("flags", [4, 5], ids=["padded", "padded, read-only"])
def test_whole_bytes_are_not_padded(counting, flags):
    """The padding flag has no effect on whole bytes, for legacy capsules and consumers without the flag."""
    pytest.importorskip("tvm_ffi")
    capsule = counting.capsule((0,), dtype=(0, 16, 1), flags=flags)
    assert dlx.describe(capsule).dtype == dlx.DType("int16")
    assert dlx.plan(capsule, to="tvm_ffi").outcome == "shared"
    assert tuple(dlx.convert(capsule, to="tvm_ffi").shape) == (0,)
    assert dlx.convert(counting.capsule((2,), dtype=(0, 16, 1), flags=flags), to="dlx").flags == flags & 1
    if flags == 4:
        assert "dltensor" in repr(dlx.to_capsule(counting.capsule((2,), flags=flags)))


@pytest.mark.parametrize("collect", [{}, {"errors": "collect"}], ids=["raised", "collected"])
def test_a_container_that_cannot_be_rebuilt_leaves_a_capsule_whole(counting, collect):
    """The capsule is unchanged, also with collected errors: their frames release the results."""

    class Own:
        def __init__(self, held):
            self.held = held

        def __dlx_tree__(self):
            def rebuild(children):
                raise ValueError("no")

            return [self.held], rebuild

    capsule = counting.capsule((3,))
    with pytest.raises((errors.ConversionError, ExceptionGroup)):
        dlx.convert([Own(capsule)], to="dlx", **collect)
    assert counting.name(capsule) == "dltensor_versioned"


@pytest.mark.parametrize("version", [(1, "0"), ("1", 0), (1.0, 0)], ids=str)
def test_a_version_that_is_none_leaves_a_capsule_whole(counting, version):
    """An invalid max_version is an error before anything is consumed."""
    capsule = counting.capsule((3,))
    with pytest.raises(TypeError):
        dlx.to_capsule(capsule, max_version=version)
    assert counting.name(capsule) == "dltensor_versioned"


class Agreeable(type):
    """A metaclass whose classes are equal to everything."""

    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return 1


def test_a_class_that_is_equal_to_everything_is_no_array():
    """The object is neither a dlx.Tensor nor a builtin container."""

    class Thing(metaclass=Agreeable):
        pass

    class Items(list, metaclass=Agreeable):
        pass

    thing = Thing()
    with pytest.raises(errors.AdapterNotFoundError, match="it is not an array"):
        dlx.describe(thing)
    assert dlx.convert([thing], to="dlx") == [thing]
    converted = dlx.convert(Items([dlx.empty(3, "int8")]), to="dlx")
    assert type(converted) is Items and converted[0].shape == (3,)


@pytest.mark.parametrize("options", [{}, {"copy": True}])
def test_a_table_that_succeeds_with_an_error_has_failed(np, mylib, hostile, options):
    """The exception is cleared, and the object's ``__dlpack__`` is called once."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    assert dlx.convert(mylib.Array(), to="numpy").shape == (2, 3)
    address = dlx.convert(hostile.memory, to="dlx").data_ptr
    hostile.lend(address, rc=0, error=True)
    for wrap in (lambda array: array, lambda array: [array]):
        array = mylib.Array()
        result = dlx.convert(wrap(array), to="numpy", **options)
        assert (result[0] if type(result) is list else result).shape == (2, 3) and array.asked == 1
