"""Arrays whose export is blocked until their framework has copied them: both paths make the same copy."""

import pytest
from support.arrays.agreement import agree, outcome, slow

import dlx
from dlx import errors
from dlx._core import native
from dlx._engine import fast_path

in_c = native.FastPathFunction(lambda *args, **options: NotImplemented, fast_path.learn, fast_path.consumer_failed)
OPTIONS = ({}, {"copy": False}, {"copy": True}, {"readonly": "error"}, {"readonly": "share"}, {"detach": True})


def taken(source, to, **options):
    """Whether the fast path converts it."""
    return in_c(source, to=to, **options) is not NotImplemented


def check(make, to, are_taken=True):
    """Compare both paths with every option; Python handles `copy`."""
    for options in (*OPTIONS, {"device": "cpu"}):
        agree(make, to, **options)
        assert taken(make(), to, **options) == (are_taken and "copy" not in options), options


def _torch_arrays(torch):
    pairs = torch.arange(12, dtype=torch.float32).reshape(2, 3, 2)
    numbers = torch.view_as_complex(pairs)
    return {
        "conj": numbers.conj(),
        "neg": numbers.conj().imag,
        "neg and conj": torch.view_as_complex(torch.stack([numbers.conj().imag, numbers.conj().imag], -1)).conj(),
        "transposed": numbers.conj().T,
        "sliced": numbers.conj()[:, 1:],
        "empty": numbers.conj()[:0],
        "number": numbers.conj()[0, 0],
    }


@pytest.mark.torch("2.10")  # older ones have no exchange table
@pytest.mark.parametrize("to", ["numpy", "dlx", "jax"])
@pytest.mark.parametrize("name", ["conj", "neg", "neg and conj", "transposed", "sliced", "empty", "number"])
def test_conj_and_neg_bits(torch, to, name):
    """They are resolved without the Python path; the tensor keeps its bits and can still be resized."""
    if to == "jax":
        pytest.importorskip("jax")
    source = _torch_arrays(torch)[name]
    bits = source.is_conj(), source.is_neg()
    check(lambda: source, to)
    assert (source.is_conj(), source.is_neg()) == bits
    assert source.untyped_storage().resizable() or not source.numel()
    result = dlx.convert(source, to="numpy")
    assert result.flags.writeable and result.tolist() == source.resolve_conj().resolve_neg().tolist()


@pytest.mark.torch("2.10")
def test_what_python_says_of_conj_bits(torch):
    """Gradients, an address that torch cannot take, and a storage that is gone."""
    grad = torch.ones(3, dtype=torch.complex64, requires_grad=True).conj()
    for options in OPTIONS:
        agree(lambda: grad, "numpy", **options)
        assert not taken(grad, "numpy", **options)
    misaligned = torch.frombuffer(bytearray(33), dtype=torch.complex64, count=4, offset=1).conj()
    gone = torch.ones(3, dtype=torch.complex64)
    last = gone.conj()
    gone.untyped_storage().resize_(0)
    for source in (misaligned, last):
        agree(lambda source=source: source, "numpy")
        assert not taken(source, "numpy")


@pytest.mark.parametrize("to", ["torch", "dlx", "jax", "pyarrow"])
def test_the_other_byte_order(np, to):
    """Swapped elements, whatever the layout; and strides that are not whole elements."""
    if to != "dlx":
        pytest.importorskip(to)
    block = np.arange(6, dtype=">f4").reshape(2, 3)
    locked = block.copy()
    locked.flags.writeable = False
    uneven = np.zeros(3, [("a", "u1"), ("b", "f4")])["b"]
    turned = block if to == "jax" else block.T  # jax takes numpy's copy of block.T if that happens to be aligned
    for source in (block, turned, block[:, ::-1], block[::2], locked, block[:0], block[0, 0:1], uneven, block[0]):
        wide = to == "pyarrow"  # takes more than the fast path knows of
        for options in OPTIONS:
            agree(lambda source=source: source, to, **options)
            assert wide or taken(source, to, **options) == ("copy" not in options), (source.strides, options)


@pytest.mark.parametrize("to", ["numpy", "torch", "dlx"])
def test_what_numpy_is_refused_for(np, to):
    """Text, dates and masks are refused by the Python path, swapped or not."""
    if to == "torch":
        pytest.importorskip(to)
    masked = np.ma.masked_array(np.ones(3, ">f4"), [0, 1, 0])
    for source in (
        masked,
        np.array(["a"]),
        np.zeros(2, ">M8[s]"),
        np.zeros(2, ">f4").view(type("Mine", (np.ndarray,), {})),
    ):
        agree(lambda source=source: source, to)


@pytest.mark.parametrize("to", ["numpy", "torch", "dlx"])
def test_chunks_of_arrow(to):
    """Chunks are joined and bools unpacked; nulls and text are refused."""
    pa = pytest.importorskip("pyarrow")
    if to == "torch":
        pytest.importorskip(to)
    numbers = pa.array([1.0, 2.0, 3.0])
    joined = (
        pa.chunked_array([numbers, numbers[1:]]),
        pa.chunked_array([numbers[:0], numbers, numbers[2:]]),
        pa.chunked_array([pa.array([True, False, True])[1:], pa.array([True])]),
        pa.chunked_array([pa.array([1, 2], pa.uint16()), pa.array([3], pa.uint16())]),
        pa.chunked_array([pa.array([[1, 2]], pa.list_(pa.int8(), 2))] * 2),
    )
    for source in joined:
        check(lambda source=source: source, to)
        assert dlx.convert(source, to="dlx").readonly is slow(source, to="dlx").readonly
    for source in (
        pa.chunked_array([numbers, pa.array([None], pa.float64())]),
        pa.chunked_array([pa.array(["a"]), pa.array(["b"])]),
        pa.chunked_array([pa.array([0, 1], pa.timestamp("s"))] * 2),
    ):
        agree(lambda source=source: source, to)
        assert not taken(source, to)
    for source in (pa.chunked_array([], pa.float32()), pa.chunked_array([numbers])):
        agree(lambda source=source: source, to)


@pytest.mark.torch("2.10")
@pytest.mark.parametrize("to", ["numpy", "torch", "dlx"])
def test_trees(np, torch, to):
    """In trees, too: repeated arrays are copied once, and nothing is copied if another array is refused."""
    pa = pytest.importorskip("pyarrow")
    conj, swapped = torch.ones(3, dtype=torch.complex64).conj(), np.arange(3, dtype="<f4" if to == "numpy" else ">f4")
    chunks = pa.chunked_array([pa.array([1.0]), pa.array([2.0])])

    def tree():
        return {"a": [conj, swapped, chunks], "b": (swapped, np.ones(2), torch.ones(2)), "c": conj}

    def leaves(found):
        made = [*found["a"], *found["b"], found["c"]]
        return [(type(each), dlx.convert(each, to="numpy").tolist(), dlx.describe(each).readonly) for each in made]

    for options in OPTIONS:
        inside = to == "torch" and "detach" in options  # Python detaches arrays of the target that have bits
        assert taken(tree(), to, **options) == ("copy" not in options and not inside), options
        if options.get("copy") is False:
            assert outcome(dlx.convert, tree(), to, options) == outcome(slow, tree(), to, options)
        else:
            assert leaves(dlx.convert(tree(), to=to, **options)) == leaves(slow(tree(), to=to, **options)), options
    result = dlx.convert(tree(), to=to)
    assert result["a"][0] is result["c"]
    assert to == "numpy" or result["a"][1] is result["b"][0]


class Asked:
    """A collection that calls a function when it is searched, just before the fast path copies an array."""

    def __init__(self, contains):
        self.contains = contains

    def __contains__(self, item):
        return self.contains(item)


def test_nothing_is_copied_beside_what_the_consumer_refuses(np, monkeypatch):
    """Arrays are copied only after every exportable array was accepted."""
    pytest.importorskip("torch")
    from dlx_adapters import dlx_numpy

    copies, is_copied = [], dlx_numpy._CHARS.__contains__
    monkeypatch.setattr(dlx_numpy, "_CHARS", Asked(lambda char: copies.append(1) or is_copied(char)))
    swapped = np.arange(3, dtype=">f4")
    assert dlx.convert([swapped], to="torch")[0].tolist() == [0, 1, 2]
    assert copies == [1]
    refused = dlx.empty((2,), "float8_e3m4")
    for _ in range(2):
        with pytest.raises(errors.DTypeError):
            dlx.convert([swapped, refused], to="torch")
    del refused
    assert copies == [1]


def test_a_trace_counts_the_copy(np):
    """While arrays are traced, the Python path tells of the copy."""
    pytest.importorskip("torch")
    source = np.arange(3, dtype=">f4")
    dlx.convert(source, to="torch")
    with dlx.trace() as seen:
        dlx.convert(source, to="torch")
    assert [(record.outcome, record.nbytes) for record in seen.records] == [("copied", 12)]
    assert dlx.plan(source, to="torch").outcome == "copied"
    with pytest.raises(errors.CopyRequiredError):
        dlx.convert(source, to="torch", copy=False)


def test_a_resolution_that_fails(np, monkeypatch):
    """A MemoryError ends the call; the Python path reports any other failure."""
    pytest.importorskip("torch")
    from dlx_adapters import dlx_numpy

    source = np.arange(3, dtype=">f4")
    for cause, wanted in (
        (MemoryError(), MemoryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError("no"), errors.DlxError),
    ):

        def fail(*asked, cause=cause):
            raise cause

        with monkeypatch.context() as patch:
            patch.setattr(dlx_numpy, "_CHARS", Asked(fail))
            patch.setattr(dlx_numpy, "_native_order", fail)
            for tree in (source, [source, np.ones(2)]):
                with pytest.raises(wanted):
                    dlx.convert(tree, to="torch")
    assert dlx.convert(source, to="torch").tolist() == [0, 1, 2]


@pytest.mark.slow
def test_nothing_is_left(python, torch):
    """Copies are freed with their results: counted, and by the bytes of the process."""
    python("""
import gc, sys
sys.path.insert(0, "tests")
from support.processes.memory import resident
import numpy as np, torch, pyarrow as pa
import dlx
from dlx._core import native

n = 1 << 17
sources = [
    torch.ones(n, dtype=torch.complex64).conj(), torch.ones(n, dtype=torch.complex64).conj().imag,
    np.ones(n, ">f4"), pa.chunked_array([pa.array(np.ones(n)), pa.array(np.ones(n))]),
]
jobs = [lambda s=s, to=to: dlx.convert(s, to=to) for s in (*sources, sources) for to in ("numpy", "torch", "dlx")]


def run(times):
    for _ in range(times):
        for job in jobs:
            job()
    gc.collect()


run(5)
live, before = native.live(), resident()
run(40)
assert native.live() == live, (native.live(), live)
assert resident() - before < 40 << 20, resident() - before
""")


@pytest.mark.parametrize("letter", ["g", "G", ">g"])
def test_a_copy_that_is_refused_too_is_made_once(python, letter):
    """Long doubles have no counterpart in native order either: no copy of a copy."""
    python(f"""
import sys
import numpy as np
import dlx
sys.setrecursionlimit(1_000_000)
array = np.zeros(3, "{letter}")
for source in (array, [array]):
    try:
        dlx.convert(source, to="dlx")
    except dlx.errors.DTypeError as error:
        assert "no counterpart" in str(error), error
    else:
        raise AssertionError("not refused")
""")


def test_an_empty_array_of_an_extension_stays_read_only(np):
    """It has no elements to copy, so it keeps the source's strides and read-only flag."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    source = np.zeros((2, 0), ml_dtypes.float8_e5m2)
    source.flags.writeable = False
    assert dlx.convert(source, to="dlx").readonly
    assert all(each.readonly for each in dlx.convert([source, source[1:]], to="dlx"))
