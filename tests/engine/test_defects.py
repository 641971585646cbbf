"""Known defects of frameworks: each row of an adapter is reproduced, or shown to be fixed, on the installed version.

A proof returns whether the fault exists. It must agree with the row's versions: when a framework fixes a fault, the
proof fails, and the row needs the first good version.
"""

import sys
import warnings

import pytest
from support.processes import warm

import dlx
from dlx import errors
from dlx._core.native import ffi
from dlx._registry.registry import registry
from dlx.adapter.base import version_of

FRAMEWORKS = ("numpy", "torch", "jax", "tvm_ffi", "pyarrow")


def framework(name):
    """Return the adapter of a framework that is installed here, or None."""
    try:
        return registry.target(name).adapter
    except errors.FrameworkNotInstalledError:
        return None


def dies(code):
    """Return whether a process is killed by this code."""
    done = warm.run(code)
    assert done.returncode <= 0, done.stderr
    return done.returncode < 0


def raises(kinds, function, *args, **keywords):
    """Return whether a call raises one of these."""
    try:
        function(*args, **keywords)
    except kinds:
        return True
    return False


class Producer:
    """A producer of a tensor that records the arguments of its calls."""

    def __init__(self, tensor=None, error=None):
        self.tensor, self.error, self.calls = tensor, error, []

    def __dlpack__(self, **options):
        self.calls.append(options)
        if self.error is not None:
            raise self.error
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return (1, 0)


def memory(dtype="float32", *, readonly=False, count=4):
    """Return a tensor over 64-byte aligned memory."""
    whole = ffi.new("char[]", 64 + 8 * count)
    start = int(ffi.cast("intptr_t", whole))
    return dlx.from_pointer(start + -start % 64, (count,), dtype, readonly=readonly, owner=whole)


# ---- numpy -----------------------------------------------------------------------------------------------------------


def numpy_readonly(np):
    """The array is read-only over writable memory."""
    return not np.from_dlpack(memory()).flags.writeable


def numpy_legacy(np):
    """With a keyword that it does not know."""
    return raises(TypeError, np.zeros(3).__dlpack__, max_version=(1, 0))


def numpy_ndim(np):
    """One dimension too many."""
    return raises(ValueError, np.zeros, (1,) * 33)


def numpy_masks(np):
    """The masked value is exported."""
    return np.from_dlpack(np.ma.masked_array([1, 2], [False, True])).tolist() == [1, 2]


# ---- torch -----------------------------------------------------------------------------------------------------------


def torch_negative(torch):
    """In a separate process; torch 2.14 raises."""
    pytest.importorskip("numpy")
    return dies("""if True:
        import numpy, os, torch
        try:
            torch.from_dlpack(numpy.arange(3)[::-1])
        except RuntimeError:
            os.abort()
    """)


def torch_readonly(torch):
    """Writing reaches the array."""
    np = pytest.importorskip("numpy")
    array = np.zeros(3)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_dlpack(array)[0] = 1
    return array[0] == 1


def torch_shells(torch):
    """According to a capsule's metadata."""
    capsule = torch.empty(2, dtype=torch.uint8).view(torch.int4).__dlpack__()
    return dlx.describe(capsule).dtype == dlx.DType("int8")


def torch_neg(torch):
    """The exported memory has the opposite sign."""
    negative = torch.tensor([1 + 2j]).conj().imag
    given = dlx.convert(negative.__dlpack__(), to="dlx")
    return negative.item() == -2 and memoryview(given)[0] == 2


def torch_calls(torch):
    """The producer counts the calls."""
    source = Producer(error=TypeError("no"))
    assert raises(Exception, torch.from_dlpack, source)
    return len(source.calls) > 1


def torch_misaligned(torch):
    """In a separate process: two complex128 at an odd address."""
    odd = "torch.frombuffer(bytearray(33), dtype=torch.complex128, count=2, offset=1)"
    return dies(f"import torch; {odd}.conj().resolve_conj()")


def torch_odd(torch):
    """In a separate process: one complex128 at an odd address."""
    return dies(
        "import torch; torch.frombuffer(bytearray(33), dtype=torch.complex128, count=1, offset=1).view(()).clone()"
    )


def torch_emptied(torch):
    """In a separate process."""
    return dies("import torch; t = torch.zeros(1000); t.untyped_storage().resize_(0); t.clone()")


def torch_narrow(torch):
    """The result is the same for every float8 and for float4."""
    names = [name for name in dir(torch) if name.startswith(("float8", "float4"))]
    arrays = [dlx.convert(torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name)), to="dlx") for name in names]
    (fault,) = {raises(BufferError, torch.from_dlpack, array) for array in arrays}
    return fault


def torch_table(torch):
    """With a library that uses only the table."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    return not raises(Exception, tvm_ffi.from_dlpack, torch.ones(2, requires_grad=True))


# ---- jax -------------------------------------------------------------------------------------------------------------


def jax_narrows(jax):
    """With x64 off, which is the default."""
    return str(jax.dlpack.from_dlpack(memory("float64")).dtype) == "float32"


def jax_float4(jax):
    """Importing its export raises."""
    source = jax.numpy.zeros(4, "float4_e2m1fn")
    return raises(Exception, jax.dlpack.from_dlpack, source)


def jax_legacy(jax):
    """Seen in the keywords that it passes."""
    source = Producer(memory())
    jax.dlpack.from_dlpack(source)
    return "max_version" not in source.calls[0]


def jax_deleted(jax):
    """is_ready() reads an array that was already deleted."""
    return dies("import jax; x = jax.numpy.ones(3); x.delete(); x.is_ready()")


def jax_int4(jax):
    """Its export raises."""
    return raises(Exception, jax.numpy.zeros(4, "int4").__dlpack__)


# ---- tvm_ffi, pyarrow ------------------------------------------------------------------------------------------------


def tvm_readonly(tvm_ffi):
    """According to its capsule's metadata."""
    return not dlx.convert(tvm_ffi.from_dlpack(memory(readonly=True)).__dlpack__(max_version=(1, 0)), to="dlx").readonly


def tvm_complex(tvm_ffi):
    """Asked for the dtype."""
    return raises(ValueError, lambda: tvm_ffi.from_dlpack(memory("complex64")).dtype)


def tvm_version(tvm_ffi):
    """Asked for a version before 1."""
    return raises(AttributeError, tvm_ffi.from_dlpack(memory()).__dlpack__, max_version=(0, 8))


def tvm_handle(tvm_ffi):
    """In a separate process."""
    return dies("import tvm_ffi; tvm_ffi.Tensor.__new__(tvm_ffi.Tensor).shape")


def pyarrow_nulls(pa):
    """The export does not raise."""
    kind = pa.fixed_shape_tensor(pa.int64(), [2])
    storage = pa.array([[1, None]], pa.list_(pa.int64(), 2))
    array = pa.ExtensionArray.from_storage(kind, storage)
    return not raises(Exception, lambda: dlx.convert(array.__dlpack__(max_version=(1, 0)), to="dlx"))


def pyarrow_tensor(pa):
    """It has no `__dlpack__`, no `from_dlpack`, or no read-only flag."""
    np = pytest.importorskip("numpy")
    array = np.zeros(3)
    array.flags.writeable = False
    tensor = pa.Tensor.from_numpy(array)
    give = getattr(tensor, "__dlpack__", None)
    return give is None or not hasattr(pa.Tensor, "from_dlpack") or not dlx.describe(give(max_version=(1, 0))).readonly


PROOFS = {
    ("torch", "bit of unaligned data"): torch_misaligned,
    ("torch", "unaligned complex128"): torch_odd,
    ("torch", "resized to 0"): torch_emptied,
    ("torch", "refuses float8"): torch_narrow,
    ("torch", "exchange table"): torch_table,
    ("jax", "less than a byte"): jax_int4,
    ("jax", "deleted array"): jax_deleted,
    ("numpy", "returns read-only arrays"): numpy_readonly,
    ("numpy", "only legacy capsules"): numpy_legacy,
    ("numpy", "at most 32 dimensions"): numpy_ndim,
    ("numpy", "drops the mask"): numpy_masks,
    ("torch", "aborts the process"): torch_negative,
    ("torch", "ignores the read-only flag"): torch_readonly,
    ("torch", "as int8 or uint8"): torch_shells,
    ("torch", "without negating"): torch_neg,
    ("torch", "up to four times"): torch_calls,
    ("jax", "narrows"): jax_narrows,
    ("jax", "float4"): jax_float4,
    ("jax", "requests legacy capsules"): jax_legacy,
    ("tvm_ffi", "read-only"): tvm_readonly,
    ("tvm_ffi", "complex"): tvm_complex,
    ("tvm_ffi", "(0, 8)"): tvm_version,
    ("tvm_ffi", "without a handle"): tvm_handle,
    ("pyarrow", "nulls inside"): pyarrow_nulls,
    ("pyarrow", "without the read-only flag"): pyarrow_tensor,
}
ROWS = [(name, defect) for name in FRAMEWORKS if (found := framework(name)) for defect in found.known_issues]


def proofs_of(name, defect):
    """Return the proofs of a row."""
    return [proof for (owner, words), proof in PROOFS.items() if owner == name and words in defect.does]


CAUGHT = pytest.mark.unsanitized("a deadly signal is caught and reported")
MARKED = [pytest.param(*row, marks=CAUGHT if row[1].does.startswith("crashes") else ()) for row in ROWS]


@pytest.mark.parametrize(("name", "defect"), MARKED, ids=lambda part: getattr(part, "does", part))
def test_the_row_is_true_of_the_version_installed(name, defect, counting):
    """The fault is there in the versions that the row names, and only in those."""
    adapter = framework(name)
    if "other major versions" in defect.does:  # needs a capsule that no library makes
        fault = not raises(Exception, sys.modules[adapter.package].from_dlpack, counting.capsule(version=(2, 0)))
    else:
        (proof,) = proofs_of(name, defect)
        fault = bool(proof(sys.modules[adapter.package]))
    assert fault is defect.affects(version_of(adapter)), f"{name} {version_of(adapter)}: {defect.does}"


def test_every_row_says_where_to_read_on():
    """A row names its source: a page, or the test that proves it."""
    for name, defect in ROWS:
        assert defect.see.startswith("https://") or defect.see.startswith("tests/"), (name, defect)


def test_no_proof_without_a_row():
    """Every proof belongs to a row."""
    there = {name for name, _ in ROWS}
    for owner, words in PROOFS:
        assert owner not in there or any(words in defect.does for name, defect in ROWS if name == owner), words
