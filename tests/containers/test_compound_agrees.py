"""Plans of compound arrays agree with conversions: every kind, every target, every option."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

import dlx
from dlx._api.shares_memory import _extents, _overlaps

np = pytest.importorskip("numpy")
sp = pytest.importorskip("scipy.sparse")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch announces its tensors

TARGETS = ("numpy", "torch", "jax", "scipy", "sparse", "awkward", "pyarrow", "tensorflow", "dlx")
OPTIONS = (
    *({}, {"copy": True}, {"copy": False}, {"readonly": "share"}, {"readonly": "share", "copy": False}),
    *({"detach": True}, {"detach": True, "copy": True}, {"device": "cpu"}, {"readonly": "error"}),
    *({"dtype": "float32"}, {"dtype": {"float32": "float64"}, "copy": False}),
    {"dtype": {"int64": "int32", "float32": "float64", "float64": "float16"}},
)
ROWS = [[1, 2], [], [3, 4, 5], []]


def lib(name):
    """Return a library, or skip."""
    return pytest.importorskip(name)


def matrix(form="csr", **parts):
    """Return a random array of scipy, with some attributes replaced."""
    found = sp.random_array((6, 4), density=0.4, format="csr", dtype="float32", rng=np.random.default_rng(0))
    found = found.tobsr((2, 2)) if form == "bsr" else found.asformat(form).copy()
    for name, change in parts.items():
        setattr(found, name, change(getattr(found, name)))
    return found


def freeze(array):
    """Return a read-only view."""
    view = array[:]
    view.flags.writeable = False
    return view


def jagged(rows, **options):
    """Return a jagged tensor, made by torch."""
    return torch.nested.nested_tensor([torch.tensor(row, **options) for row in rows], layout=torch.jagged)


def lists(rows=ROWS, value="int64", kind="list_"):
    """Return a pyarrow array of lists."""
    pa = lib("pyarrow")
    return pa.array(rows, getattr(pa, kind)(getattr(pa, value)()))


def chunked(*chunks):
    """Return a pyarrow column of lists."""
    return lib("pyarrow").chunked_array(chunks, lists().type)


SOURCES = {
    **{f"scipy {form}": lambda form=form: matrix(form) for form in ("csr", "csc", "coo", "bsr")},
    "scipy wide": lambda: matrix(indices=lambda x: x.astype("i8"), indptr=lambda x: x.astype("i8")),
    "scipy mixed": lambda: matrix(indices=lambda x: x.astype("i8")),
    "scipy read-only": lambda: matrix(data=freeze, indices=freeze),
    "scipy with gaps": lambda: matrix(data=lambda x: np.repeat(x, 2)[::2]),
    "scipy big-endian": lambda: matrix(data=lambda x: x.astype(">f4")),
    "scipy bool": lambda: matrix().astype(bool),
    "scipy float64": lambda: matrix().astype("f8"),
    "scipy adjacent": lambda: matrix("coo", coords=lambda x: tuple(np.stack(x).astype("i8"))),
    "scipy 1-d": lambda: sp.coo_array(np.array([0, 1.0, 0, 2])),
    "scipy csr 1-d": lambda: sp.csr_array(np.array([0, 1.0, 0, 2])),
    "scipy 3-d": lambda: sp.coo_array((np.ones(2, "f4"), ([0, 1], [1, 1], [0, 2])), shape=(2, 2, 3)),
    "scipy unsorted": lambda: sp.csr_array((np.arange(4.0), np.array([2, 0, 1, 0]), np.array([0, 3, 4]))),
    "scipy twice": lambda: sp.csr_array((np.arange(4.0), np.array([2, 0, 0, 1]), np.array([0, 3, 4]))),
    "torch coo": lambda: torch.eye(3).to_sparse(),
    "torch coo 0-d": lambda: torch.tensor(2.0).to_sparse(),
    "torch coo 1-d": lambda: torch.ones(3).to_sparse(),
    "torch uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [1.0, 2, 3], (3, 4)),
    "torch hybrid": lambda: torch.ones(2, 3).to_sparse(1),
    "torch csr": lambda: torch.eye(4).to_sparse_csr(),
    "torch csc": lambda: torch.eye(4).to_sparse_csc(),
    "torch bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "torch batched": lambda: torch.ones(2, 3, 4).to_sparse_csr(),
    "torch csr hybrid": lambda: torch.ones(3, 4, 2).to_sparse_csr(dense_dim=1),
    "torch csr grad": lambda: torch.eye(4).to_sparse_csr().requires_grad_(),
    "torch jagged": lambda: jagged([[0, 1], [2, 3, 4]]),
    "torch jagged 2-d": lambda: jagged([[[0.0]], [[1.0], [2.0]]]),
    "torch jagged bfloat16": lambda: jagged([[0.0], [1.0, 2.0]]).bfloat16(),
    "torch jagged complex": lambda: jagged([[0.0], [1.0, 2.0]]).to(torch.complex64),
    "torch jagged transposed": lambda: jagged([[[0.0]], [[1.0], [2.0]]]).transpose(1, 2),
    "jax coo": lambda: lib("jax.experimental.sparse").BCOO.fromdense(np.eye(3, dtype="f4")),
    "jax 0-d": lambda: lib("jax.experimental.sparse").BCOO.fromdense(np.float32(2)),
    "jax 1-d": lambda: lib("jax.experimental.sparse").BCOO.fromdense(np.ones(3, "f4")),
    "jax padded": lambda: lib("jax.experimental.sparse").BCOO.fromdense(np.eye(2, dtype="f4"), nse=4),
    "jax batched": lambda: lib("jax.experimental.sparse").BCOO.fromdense(np.ones((2, 3, 4), "f4"), n_batch=1),
    "jax csr": lambda: lib("jax.experimental.sparse").BCSR.fromdense(np.eye(3, dtype="f4")),
    "jax csr padded": lambda: lib("jax.experimental.sparse").BCSR.fromdense(np.eye(3, dtype="f4"), nse=5),
    "lists": lists,
    "lists, large": lambda: lists(kind="large_list", value="float32"),
    "lists of bools": lambda: lists([[True], [], [False]], "bool_"),
    "lists, sliced": lambda: lists([[9], *ROWS])[1:],
    "lists, nested": lambda: lib("pyarrow").array([[[1], [2, 3]], []]),
    "lists, null": lambda: lists([[1], None]),
    "lists, null inside": lambda: lists([[1, None]]),
    "lists of text": lambda: lists([["a"]], "string"),
    "lists, one chunk": lambda: chunked(ROWS),
    "lists, two chunks": lambda: chunked(ROWS, ROWS),
    "list views": lambda: lists(kind="list_view"),
    "awkward": lambda: lib("awkward").Array([[1.0, 2], [], [3]]),
    "awkward without a type": lambda: lib("awkward").Array([[], []]),
    "awkward nested": lambda: lib("awkward").Array([[[1], [2, 3]], []]),
    "awkward unordered": lambda: lib("awkward").Array([[1.0, 2], [], [3]])[[2, 0]],
    "polars": lambda: lib("polars").Series([[1, 2], [], [3]]),
    "pandas": lambda: lib("pandas").Series(lists(), dtype=lib("pandas").ArrowDtype(lists().type)),
    "sparse coo": lambda: lib("sparse").COO.from_numpy(np.eye(3, dtype="f4")),
    "sparse 0-d": lambda: lib("sparse").COO(np.zeros((0, 1), int), np.ones(1, "f4"), ()),
    "sparse 0-d, empty": lambda: lib("sparse").COO(np.zeros((0, 0), int), np.ones(0, "f4"), ()),
    "sparse 1-d": lambda: lib("sparse").COO.from_numpy(np.array([0, 1, 2], "f4")),
    "sparse without elements": lambda: lib("sparse").COO.from_numpy(np.zeros(0, "f4")),
    "sparse csr": lambda: lib("sparse").GCXS.from_numpy(np.eye(3), compressed_axes=(0,)),
    "sparse csc": lambda: lib("sparse").GCXS.from_numpy(np.eye(3), compressed_axes=(1,)),
    "sparse filled": lambda: lib("sparse").COO.from_numpy(np.eye(3), fill_value=1),
    "tf coo": lambda: lib("tensorflow").sparse.from_dense(np.eye(3, dtype="f4")),
    "tf ragged": lambda: lib("tensorflow").ragged.constant(ROWS),
}


def run(call, *args, **options):
    """Return the result of a call and its error."""
    try:
        return call(*args, **options), None
    except dlx.errors.DlxError as error:
        return None, error


@pytest.mark.parametrize("name", SOURCES)
def test_the_plan_says_what_happens(name):
    """The plan has the error of the conversion, or its outcome: the same object, shared parts, or a copied part."""
    source, checked = SOURCES[name](), 0
    extents = None
    for to, options in itertools.product(TARGETS, OPTIONS):
        if to != "dlx" and importlib.util.find_spec(to) is None:
            continue
        where = f"{to}, {options}"
        plan = dlx.plan(source, to, **options)
        made, error = run(dlx.convert, source, to, **options)
        if error is not None:
            assert str(plan.error) == str(error), where
            continue
        assert plan.error is None, f"{where}: {plan.error}"
        checked += 1
        if made is source:
            assert plan.outcome == "same", where
            continue
        if (
            name in ("list views", "torch csr grad") and plan.outcome == "copied"
        ):  # a copy that only its framework reads
            continue
        if "0-d" in name or "without" in name:  # parts without elements have no memory
            continue
        extents = [*_extents(source)] if extents is None else extents
        are_shared = [any(_overlaps(each, other) for other in extents) for each in _extents(made)]
        assert are_shared and plan.outcome == ("shared" if all(are_shared) else "copied"), f"{where}: {plan}"
        assert not (options.get("copy") is True and any(are_shared)), where
    assert checked or name in ("lists, null", "lists, null inside", "lists of text", "sparse filled")


@pytest.mark.parametrize("name", SOURCES)
def test_a_function_of_numpy_gets_no_compound_array(name):
    """Numpy has none: `using` refuses each, or gives a dense array; `stack` takes lists only."""
    source = SOURCES[name]()
    kind, error = run(dlx.using("numpy")(type), source)
    assert error is not None or kind is np.ndarray
    _, error = run(dlx.stack, source, "numpy", pad=0)
    if not name.startswith(("list", "awkward", "polars", "pandas", "tf ragged", "nested", "torch jagged")):
        assert isinstance(error, dlx.errors.AdapterNotFoundError) and "dlx.parts(x)" in error.fix, error
