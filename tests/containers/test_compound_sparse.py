"""Sparse arrays are converted as one array: their parts are shared, and each change of a part is a step of the plan."""

from __future__ import annotations

import itertools
import re

import pytest

import dlx
from dlx.errors import CopyRequiredError, DlxError, DTypeError, LayoutError, ReadOnlyError

np = pytest.importorskip("numpy")
sp = pytest.importorskip("scipy.sparse")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse :UserWarning")  # torch announces its sparse tensors

FORMATS = ("csr", "csc", "coo", "bsr")


def matrix(form="csr", shape=(6, 4), dtype="float32", seed=0):
    """Return a random array of scipy."""
    found = sp.random_array(shape, density=0.4, format="csr", dtype=dtype, rng=np.random.default_rng(seed))
    return found.tobsr((2, 2)) if form == "bsr" else found.asformat(form)


def dense(obj):
    """Return the dense numpy array of a sparse array of any framework."""
    for name in ("toarray", "todense", "to_dense"):
        if hasattr(obj, name):
            return np.asarray(getattr(obj, name)())
    raise TypeError(type(obj))


def in_torch(form, **options):
    """Return `matrix` as a tensor, made by torch."""
    m = matrix(form, **options)
    if form == "coo":
        return torch.sparse_coo_tensor(torch.tensor(np.stack(m.coords)).long(), torch.tensor(m.data), m.shape)
    create = getattr(torch, f"sparse_{form}_tensor")
    return create(torch.tensor(m.indptr), torch.tensor(m.indices), torch.tensor(m.data), m.shape)


def in_jax(form, **options):
    """Return `matrix` as an array made by jax."""
    sparse, jnp = pytest.importorskip("jax.experimental.sparse"), pytest.importorskip("jax.numpy")
    m = matrix(form, **options)
    if form == "coo":
        return sparse.BCOO((jnp.asarray(m.data), jnp.asarray(np.stack(m.coords, 1))), shape=m.shape)
    if form == "csr":
        return sparse.BCSR((jnp.asarray(m.data), jnp.asarray(m.indices), jnp.asarray(m.indptr)), shape=m.shape)
    return pytest.skip(f"jax has no {form}")


MAKERS = {"scipy": matrix, "torch": in_torch, "jax": in_jax}


@pytest.mark.parametrize("to", ["scipy", "torch", "jax"])
@pytest.mark.parametrize(("name", "form"), [*itertools.product(MAKERS, FORMATS)])
def test_values_and_format_survive(name, form, to):
    """Every pair of frameworks with the format gives an equal array, and the plan says what happens to it."""
    source = MAKERS[name](form)
    if to == "jax" and form in ("csc", "bsr"):
        with pytest.raises(LayoutError, match=rf"jax has no {form} arrays.*dlx\.parts"):
            dlx.convert(source, to)
        return
    plan, result = dlx.plan(source, to), dlx.convert(source, to)
    assert np.array_equal(dense(result), matrix(form).toarray())
    assert (plan.outcome == "same") is (result is source) is (name == to)
    assert plan.source.shape == (6, 4) and plan.source.dtype.name == "float32"
    assert dlx.plan(result, to).outcome == "same"


@pytest.mark.parametrize("form", ["csr", "csc", "bsr"])
def test_all_parts_are_shared(form):
    """A compressed format is converted without a copy, there and back."""
    source = matrix(form)
    there = dlx.convert(source, "torch", copy=False)
    back = dlx.convert(there, "scipy", copy=False)
    assert back.data.ctypes.data == source.data.ctypes.data == there.values().data_ptr()
    assert back.indices.ctypes.data == source.indices.ctypes.data
    assert back.indptr.ctypes.data == source.indptr.ctypes.data
    assert dlx.shares_memory(source, there) and not dlx.shares_memory(source, matrix(form))
    assert dlx.shares_memory(source.indices, there)


def test_wide_indices_stay_wide():
    """int64 indices stay int64 in scipy, whose constructor would narrow them in a copy."""
    tensor = in_torch("csr")
    tensor = torch.sparse_csr_tensor(
        tensor.crow_indices().long(), tensor.col_indices().long(), tensor.values(), tensor.shape
    )
    back = dlx.convert(tensor, "scipy", copy=False)
    assert back.indices.dtype == back.indptr.dtype == np.int64
    assert np.array_equal((back @ np.eye(4, dtype="float32")), dense(tensor))


def test_a_cast_of_indices_is_a_step():
    """Torch's coo needs int64: the plan says so, copy=False refuses, and an own layout is shared again."""
    source = matrix("coo")
    (step,) = [step for step in dlx.plan(source, "torch").steps if step.do == "resolve"]
    assert step.why == "coords: its 2 arrays are stacked, int32 indices become int64"
    assert step.nbytes == 2 * 8 * source.nnz
    with pytest.raises(CopyRequiredError, match="int64"):
        dlx.convert(source, "torch", copy=False)
    tensor = dlx.convert(source, "torch")
    there = dlx.convert(tensor, "scipy", copy=False)
    again = dlx.convert(there, "torch", copy=False)
    assert again._indices().data_ptr() == tensor._indices().data_ptr() == there.coords[0].ctypes.data


def test_one_index_array_is_shared():
    """An array of one dimension has nothing to stack."""
    source = sp.coo_array(np.array([0, 1, 2.0]))
    source.coords = (source.coords[0].astype("i8"),)
    tensor = dlx.convert(source, "torch", copy=False)
    assert tensor._indices().data_ptr() == source.coords[0].ctypes.data


@pytest.mark.parametrize(("narrow", "wide"), [("int32", "int64"), ("int64", "int32")])
def test_mixed_index_dtypes_become_one(narrow, wide):
    """Indices and indptr of different widths become int64."""
    m = matrix("csr")
    m.indices, m.indptr = m.indices.astype(narrow), m.indptr.astype(wide)
    tensor = dlx.convert(m, "torch")
    assert tensor.col_indices().dtype == tensor.crow_indices().dtype == torch.int64
    assert np.array_equal(dense(tensor), m.toarray())


def test_an_index_that_does_not_fit_is_refused():
    """Jax without x64 has int32 only; a larger index is refused, not wrapped around."""
    jax = pytest.importorskip("jax")
    far = sp.coo_array((np.ones(1, "f4"), (np.array([2**40]), np.array([1]))), shape=(2**41, 3))
    with jax.enable_x64(False), pytest.raises(DlxError, match="int32"):
        dlx.convert(far, "jax")


def test_unsorted_indices_and_duplicates():
    """Unsorted indices and, where the framework allows them, duplicates keep their meaning."""
    data, rows, columns = np.array([1.0, 2, 4, 8], "f4"), np.array([0, 0, 1, 0]), np.array([2, 0, 1, 0])
    coo = sp.coo_array((data, (rows, columns)), shape=(2, 3))
    for to in ("torch", "jax"):
        assert np.array_equal(dense(dlx.convert(coo, to)), coo.toarray())
    unsorted = sp.csr_array((data, np.array([2, 0, 1, 0]), np.array([0, 3, 4])), shape=(2, 3))
    assert np.array_equal(dense(dlx.convert(unsorted, "torch", copy=False)), unsorted.toarray())
    twice = sp.csr_array((data, np.array([2, 0, 0, 1]), np.array([0, 3, 4])), shape=(2, 3))
    with pytest.raises(LayoutError, match=r"indices\[2\] is. Call x\.sum_duplicates\(\) first"):
        dlx.convert(twice, "torch")
    assert not dlx.plan(twice, "torch")
    assert np.array_equal(dense(dlx.convert(twice, "jax")), twice.toarray())
    twice.sum_duplicates()
    assert np.array_equal(dense(dlx.convert(twice, "torch")), twice.toarray())


DAMAGES = {
    "index": lambda m: m.indices.__setitem__(0, 400),
    "negative": lambda m: m.indices.__setitem__(-1, -1),
    "descent": lambda m: m.indptr.__setitem__(2, m.indptr[1] - 1),
    "start": lambda m: m.indptr.__setitem__(0, 1),
    "short": lambda m: setattr(m, "indptr", m.indptr[:-1]),
    "lengths": lambda m: setattr(m, "indices", m.indices[:-1]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("form", ["csr", "csc", "bsr"])
def test_damaged_indices_are_refused(form, damage):
    """Indices outside of the array would make another framework read or write outside of its memory."""
    m = matrix(form)
    damage(m)
    for to in ("torch",):
        with pytest.raises(DlxError):
            dlx.convert(m, to)
        assert not dlx.plan(m, to)


def test_padding_of_jax_is_refused():
    """BCOO pads with indices outside of its shape, on which scipy would write outside of its memory."""
    sparse, jnp = pytest.importorskip("jax.experimental.sparse"), pytest.importorskip("jax.numpy")
    padded = sparse.BCOO.fromdense(jnp.eye(2), nse=4)
    for to in ("torch", "scipy"):
        with pytest.raises(LayoutError, match=r"coords\[0\]\[2\] is outside"):
            dlx.convert(padded, to)


def test_padding_stays_in_jax():
    """A copy inside jax keeps the padding; the parts for another framework are checked, those for jax are not."""
    sparse, jnp = pytest.importorskip("jax.experimental.sparse"), pytest.importorskip("jax.numpy")
    for padded in (sparse.BCOO.fromdense(jnp.eye(2), nse=4), sparse.BCSR.fromdense(jnp.eye(2), nse=4)):
        made = dlx.convert(padded, "jax", copy=True)
        assert made.nse == padded.nse == 4 and np.array_equal(dense(made), np.eye(2))
        assert dlx.plan(padded, "jax", copy=True).outcome == "copied" and not dlx.shares_memory(made, padded)
        assert len(dlx.parts(padded)["data"]) == 4
        for to in ("numpy", "dlx", "torch"):
            with pytest.raises(LayoutError, match=r"\(padding, or damage\). Remove .* sum_duplicates"):
                dlx.parts(padded, to)
            assert dlx.parts(padded.sum_duplicates(), to)["data"].shape == (2,)


def test_the_fix_for_unsorted_indices_exists():
    """Scipy and jax sum equal indices in place; torch and pydata's sparse make a dense array."""
    sparse = pytest.importorskip("sparse")
    data, indices, indptr = np.array([1, 2, 4], "f4"), np.array([1, 0, 0]), np.array([0, 3])
    in_order = map(torch.tensor, (indptr, indices, data))
    made = {
        "scipy": sp.csr_array((data, indices, indptr), shape=(1, 2)),
        "torch": torch.sparse_csr_tensor(*in_order, (1, 2), check_invariants=False),
        "sparse": sparse.GCXS((data, indices, indptr), shape=(1, 2), compressed_axes=(0,)),
    }
    for name in made:
        for to in {"torch", "sparse"} - {name}:
            x = made[name].copy() if name == "scipy" else made[name]
            with pytest.raises(LayoutError, match=r"indices\[\d\] .*Call (x?\.\w+\(\)) first, or") as caught:
                dlx.convert(x, to)
            call = re.search(r"Call x?(\S+) first", caught.value.fix)[1]
            fixed = eval(f"x{call}", {"x": x})
            result = dlx.convert(x if fixed is None else fixed, to)
            assert (result if type(result) is np.ndarray else dense(result)).tolist() == [[6, 1]]
    with dlx.share({"x": made["scipy"]}) as handle:
        with pytest.raises(
            LayoutError, match=r"cannot attach csr array to 'torch' at obj\['x'\]: .* Convert it to coo in its own"
        ):
            dlx.attach(handle, "torch")["x"]
        back = dlx.attach(handle, "scipy")["x"].copy()
    back.sum_duplicates()
    assert dense(dlx.convert(back, "torch")).tolist() == [[6, 1]]


def test_arrays_without_dimensions():
    """Scipy has none; the fix gives a dense one."""
    x = torch.sparse_coo_tensor(torch.zeros((0, 1), dtype=torch.int64), torch.tensor([5.0]), ())
    with pytest.raises(LayoutError, match=r"without dimensions. Call \.to_dense\(\) first"):
        dlx.convert(x, "scipy")
    assert dlx.convert(x.to_dense(), "scipy") == 5


def many_dimensions():
    """Return batched and hybrid arrays of torch and jax."""
    sparse, jnp = pytest.importorskip("jax.experimental.sparse"), pytest.importorskip("jax.numpy")
    return [
        torch.ones(2, 3).to_sparse(1),
        torch.ones(2, 3, 4).to_sparse_csr(),
        torch.ones(3, 4, 2).to_sparse_csr(dense_dim=1),
        torch.ones(2, 4, 4).to_sparse_bsr((2, 2)),
        sparse.BCOO.fromdense(jnp.ones((2, 3, 4)), n_batch=1),
        sparse.BCOO.fromdense(jnp.ones((2, 3)), n_dense=1),
        sparse.BCSR.fromdense(jnp.ones((2, 3, 4)), n_batch=1),
    ]


@pytest.mark.parametrize("options", ({"copy": True}, {"dtype": "float16"}, {"detach": True}, {"device": "cpu"}))
def test_batches_and_dense_dimensions_stay_in_their_framework(options):
    """Options work inside the framework; others refuse such arrays, which can be described."""
    for source in many_dimensions():
        made, plan = dlx.convert(source, like=source, **options), dlx.plan(source, like=source, **options)
        assert plan.ok and np.array_equal(dense(made), dense(source))
        assert dlx.shares_memory(made, source) is ("copy" not in options)  # a cast shares the indices
        assert dlx.describe(source).shape == tuple(source.shape)
        with pytest.raises(LayoutError, match=r"batches or dense dimensions. Call \.to_?dense\(\) first"):
            dlx.convert(source, "scipy")
        with pytest.raises(LayoutError, match="batches or dense dimensions"), dlx.share(source):
            pass


def test_batches_get_advice_that_works():
    """dlx.parts refuses them for another framework, so the fix is a dense array."""
    for source in many_dimensions():
        for call in (lambda x=source: dlx.convert(x, "numpy"), lambda x=source: dlx.parts(x, "numpy")):
            with pytest.raises(LayoutError, match=r"batches or dense dimensions\. Call \.to_?dense\(\) first\.$"):
                call()
        assert np.array_equal(dlx.convert(getattr(source, "to_dense", getattr(source, "todense", None))(), "numpy"),
                              dense(source))  # fmt: skip


def test_parts_of_jax_have_one_row_for_each_dimension():
    """Also inside jax, whose own coordinates are (count, ndim), and for each matrix of a batch."""
    sparse, jnp = pytest.importorskip("jax.experimental.sparse"), pytest.importorskip("jax.numpy")
    x = jnp.asarray([[0.0, 2, 0], [3, 0, 4]])
    for to in (None, "jax", "numpy", "torch"):
        found = dlx.parts(sparse.BCOO.fromdense(x), to)
        assert np.asarray(found["coords"]).tolist() == [[0, 1, 1], [1, 0, 2]]
    batch = dlx.parts(sparse.BCOO.fromdense(jnp.stack([x, x]), n_batch=1))
    assert np.asarray(batch["coords"]).tolist() == [[[0, 1, 1], [1, 0, 2]]] * 2


@pytest.mark.parametrize("form", ["csr", "coo"])
def test_indices_in_the_other_byte_order(form):
    """They are copied in native order."""
    m = matrix(form)
    if form == "coo":
        m.coords = tuple(row.astype(">i4") for row in m.coords)
    else:
        m.indices, m.indptr = m.indices.astype(">i4"), m.indptr.astype(">i8")
    assert np.array_equal(dense(dlx.convert(m, "torch")), m.toarray())
    with pytest.raises(CopyRequiredError):
        dlx.convert(m, "torch", copy=False)


def test_writes_to_stacked_coordinates_are_refused_with_the_reason():
    """The error names the caller's type, not a class of dlx, and why there is no way back."""
    function = dlx.using("torch", writes=["x"])(lambda x: x._values().mul_(2) and None)
    with pytest.raises(
        DlxError, match=r"cannot convert numpy\.ndarray to 'torch' at x\.coords: the function"
    ) as refused:
        function(matrix("coo"))
    assert "its 2 arrays are stacked" in refused.value.reason
    assert refused.value.fix == "Return a new array from the function."


COPIED = {
    "read-only": lambda data: np.frombuffer(data.tobytes(), data.dtype).reshape(data.shape),
    "swapped": lambda data: data.astype(">f4"),
    "reversed": lambda data: data[::-1].copy()[::-1],
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("how", COPIED)
def test_writes_to_copied_elements_are_not_lost_silently(form, how):
    """Torch counts them as writes to the sparse tensor. Reading is no write, nor are writes to shared elements."""
    m, expected = matrix(form), matrix(form).toarray()
    m.data = COPIED[how](m.data)
    writes = {
        "values": lambda x: (x._values() if form == "coo" else x.values()).mul_(2).sum(),
        "whole": lambda x: x.neg_().to_dense(),
    }
    for write in writes.values():
        for function, arg in ((write, m), (lambda d, write=write: write(d["a"][0]), {"a": [m], "b": np.ones(2)})):
            with pytest.raises(ReadOnlyError, match=r"cannot convert scipy\.sparse.* the function wrote to a copy"):
                dlx.using("torch")(function)(arg)
    assert np.array_equal(dlx.using("torch", returns="numpy")(lambda x: x.to_dense())(m), expected)
    shared = matrix(form)
    dlx.using("torch")(writes["values"])(shared)
    assert np.array_equal(shared.toarray(), 2 * expected)


def test_coalesced_tensors_stay_coalesced():
    """Torch refuses `.values()` of others."""
    source = torch.eye(3).to_sparse()
    for options in ({"copy": True}, {"dtype": "float64"}, {"detach": True}):
        assert dlx.convert(source, "torch", **options).values().tolist() == [1, 1, 1]
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.ones(2), (2, 2))
    assert not dlx.convert(twice, "torch", copy=True).is_coalesced()
    assert list(dlx.parts(source)) == ["data", "coords", "shape"]
    with dlx.share(source) as handle:
        assert list(dlx.attach(handle)) == ["data", "coords", "shape"]


def test_what_sparse_assumes():
    """COO sorts coordinates in a copy, as the plan says; GCXS reads unsorted rows wrongly, so dlx refuses them."""
    pytest.importorskip("sparse")
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 0, 0], [1, 1, 1]]), torch.tensor([1.0, 2, 3]), (2, 3))
    for source in (twice, sp.coo_array((np.ones(2, "f4"), ([1, 0], [0, 2])), shape=(2, 3))):
        plan = dlx.plan(source, "sparse")
        assert plan.outcome == "copied" and "coords: " in str(plan) and "sparse sorts it" in str(plan)
        assert np.array_equal(dense(dlx.convert(source, "sparse")), dense(source))
        with pytest.raises(CopyRequiredError):
            dlx.convert(source, "sparse", copy=False)
    assert dlx.convert(twice.coalesce(), "sparse", copy=False).nnz == 2
    for indices in ([2, 0, 1], [0, 0, 1]):
        odd = sp.csr_array((np.ones(3, "f4"), np.array(indices), np.array([0, 2, 3])), shape=(2, 3))
        with pytest.raises(LayoutError, match=r"rise, and indices\[1\] does not. Call x\.sum_duplicates"):
            dlx.convert(odd, "sparse")
        odd.sum_duplicates()
        made = dlx.convert(odd, "sparse")
        assert [[made[i, j] for j in range(3)] for i in range(2)] == odd.toarray().tolist()


def test_the_format_coo_has_no_order():
    """What the error about unsorted or repeated indices advises works for frameworks without sum_duplicates."""
    sparse = pytest.importorskip("sparse")
    rows, columns = torch.tensor([0, 2]), torch.tensor([1, 0])
    twice = sparse.GCXS((np.ones(2), np.array([1, 1]), np.array([0, 2])), shape=(1, 2), compressed_axes=(0,))
    for odd, call, to in (
        (torch.sparse_csr_tensor(rows, columns, torch.ones(2), (1, 2)), "to_sparse_coo", "sparse"),
        (torch.sparse_csc_tensor(rows, columns, torch.ones(2), (2, 1)), "to_sparse_coo", "sparse"),
        (twice, "tocoo", "torch"),
    ):
        for convert in (dlx.convert, lambda odd, to: dlx.attach(dlx.share(odd), to=to)):
            with pytest.raises(LayoutError, match=r"onvert it to coo( in its own|\.$)") as caught:
                convert(odd, to)
            assert "Parts" not in str(caught.value)
        assert np.array_equal(dense(dlx.convert(getattr(odd, call)(), to)), dense(odd))


@pytest.mark.parametrize("form", FORMATS)
def test_dtypes_that_scipy_lacks(form):
    """Refused before the conversion, with a dtype that works."""
    source = in_torch(form).to(torch.float16)
    with pytest.raises(DTypeError, match=rf"scipy has no {form} arrays of float16. Pass dtype="):
        dlx.convert(source, "scipy")
    assert not dlx.plan(source, "scipy") and not dlx.plan(matrix(form), "scipy", dtype="float16")
    made = dlx.convert(source, "scipy", dtype={"float16": "float32"})
    assert made.dtype == np.float32 and np.allclose(dense(made), matrix(form).toarray(), atol=1e-3)


def test_room_for_more_is_not_passed_on():
    """Scipy's arrays may have more room than elements."""
    m = matrix("csr")
    m.data, m.indices = np.append(m.data, [7, 7]).astype("f4"), np.append(m.indices, [9, 9]).astype("i4")
    assert np.array_equal(dense(dlx.convert(m, "torch")), m.toarray())


def test_other_formats_and_targets_are_refused_with_a_fix():
    """The message names dlx.parts and a dense alternative, and both work."""
    m = matrix("csr")
    for to in ("numpy", "dlx", "pyarrow", "tvm_ffi"):
        with pytest.raises(
            LayoutError, match=rf"{to} has no csr arrays.*dlx\.parts\(x, to='{to}'\), or call \.toarray"
        ):
            dlx.convert({"m": [m]}, to)
        assert set(dlx.parts(m, to=to)) == {"data", "indices", "indptr", "shape"}
    for other in (m.tolil(), m.todok(), m.todia()):
        with pytest.raises(DlxError, match=r"Call .tocsr\(\) first"):
            dlx.convert(other, "torch")
    with pytest.raises(LayoutError, match="dense dimensions"):
        dlx.convert(torch.ones(2, 3).to_sparse(1), "scipy")


@pytest.mark.parametrize("form", FORMATS)
def test_parts(form):
    """The parts are arrays of the framework, or of the target, over the same memory."""
    m = matrix(form)
    own, there = dlx.parts(m), dlx.parts(dlx.convert(m, "torch"), to="numpy")
    names = ["data", "coords", "shape"] if form == "coo" else ["data", "indices", "indptr", "shape"]
    assert list(own) == list(there) == names and own["shape"] == there["shape"] == (6, 4)
    assert all(type(own[name]) is np.ndarray for name in names[:-1])
    assert all(np.array_equal(own[name], there[name]) for name in names[:-1])
    assert np.shares_memory(own["data"], m.data)
    for bad in (np.ones(3), [m], 3, "x"):
        with pytest.raises(LayoutError, match=r"cannot split .*not a sparse or ragged array"):
            dlx.parts(bad)
    for other in (sp.dia_array(m), torch.eye(2).to_sparse_bsc((1, 1))):
        with pytest.raises(LayoutError, match=r"of a known format\. Convert another format to csr"):
            dlx.parts(other)
    assert list(dlx.parts(sp.dia_array(m).tocsr())) == ["data", "indices", "indptr", "shape"]
    vector = sp.csr_array(np.array([0, 1.5], "f4"))
    with pytest.raises(LayoutError, match=r": dlx converts csr arrays of two dim.*Convert it to the format coo first"):
        dlx.parts(vector, to="numpy")
    assert dlx.parts(vector.tocoo(), to="numpy")["coords"].tolist() == [[1]]


def test_inside_trees_views_and_functions():
    """Trees, lazy views, dlx.using and errors="collect" treat it as one array."""
    m, x = matrix("csr"), np.ones(4, "f4")
    tree = dlx.convert({"m": m, "again": [m], "x": x}, "torch")
    assert tree["m"] is tree["again"][0] and tree["m"].layout is torch.sparse_csr
    view = dlx.convert({"m": m}, "torch", lazy=True)
    assert view["m"] is view["m"] and np.array_equal(dense(view["m"]), m.toarray())
    assert np.array_equal(dense(dlx.convert(in_torch("csr"), "scipy", lazy=True)), m.toarray())
    product, same = dlx.using("torch")(lambda a, b: (a @ b, a))(m, x)
    assert type(product) is np.ndarray and same is m and np.allclose(product, m @ x)
    doubled = dlx.using("scipy")(lambda a: a * 2)(in_torch("csr"))
    assert doubled.layout is torch.sparse_csr and np.allclose(dense(doubled), 2 * m.toarray())
    assert type(dlx.using("torch")(lambda a: a * 2)(m)) is sp.csr_array
    with pytest.raises(ExceptionGroup) as failed:
        dlx.convert([m, matrix("coo")], "numpy", errors="collect")
    assert [each.path for each in failed.value.exceptions] == [(0,), (1,)]
    plan = dlx.plan({"m": m, "x": x}, "torch")
    assert [leaf.path for leaf in plan.leaves] == ["obj['m']", "obj['x']"] and not plan.passed
    assert type(plan.run()["m"]) is torch.Tensor


@pytest.mark.parametrize("to", ["scipy", "torch", "jax"])
@pytest.mark.parametrize(("name", "form"), [*itertools.product(MAKERS, ("csr", "coo"))])
def test_using_gives_the_framework_of_the_argument(name, form, to):
    """Also if the parts of the argument, or of the result, change on the way."""
    source = MAKERS[name](form)
    seen = []
    doubles = (to, form) != ("jax", "csr")  # jax does not compute with BCSR
    made = dlx.using(to)(lambda x: seen.append(x) or (x * 2 if doubles else x))(source)
    assert np.array_equal(dense(seen[0]), matrix(form).toarray()) and type(made) is type(source)
    assert np.array_equal(dense(made), matrix(form).toarray() * (1 + doubles))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_shared_between_processes(make):
    """Share keeps the format; attach gives the target's array, or its parts if the target has none."""
    tree = {"m": make("csr"), "c": [make("coo")]}
    with dlx.share(tree) as handle:
        for to, options in (("torch", {"readonly": "share"}), ("scipy", {}), ("torch", {"writable": True})):
            made = dlx.attach(handle, to, **options)
            assert np.array_equal(dense(made["m"]), dense(tree["m"]))
            assert np.array_equal(dense(made["c"][0]), dense(tree["c"][0]))
        assert set(dlx.attach(handle)["c"][0]) == {"data", "coords", "shape"}
        assert type(dlx.attach(handle, "numpy")["m"]["data"]) is np.ndarray


def test_described():
    """The description has the shape and the dtype of the whole."""
    m = matrix("csr")
    info = dlx.describe(m)
    assert (info.shape, info.dtype.name, info.notes) == ((6, 4), "float32", ("csr: data, indices, indptr, shape",))
    assert info.nbytes == m.data.nbytes + m.indices.nbytes + m.indptr.nbytes
    assert dlx.describe(in_torch("csr")).shape == (6, 4)


def test_options():
    """copy=True makes all parts new; gradients are kept or named; an empty array has no memory to share."""
    m = matrix("csr")
    made = dlx.convert(m, "torch", copy=True)
    assert not dlx.shares_memory(made, m)
    own = in_torch("csr")
    copied = dlx.convert(own, "torch", copy=True)
    assert copied is not own and not dlx.shares_memory(own, copied) and np.array_equal(dense(own), dense(copied))
    tracked = torch.sparse_csr_tensor(
        own.crow_indices(), own.col_indices(), own.values(), own.shape, requires_grad=True
    )
    with pytest.raises(DlxError, match="gradients"):
        dlx.convert(tracked, "scipy")
    assert np.array_equal(dense(dlx.convert(tracked, "scipy", detach=True)), m.toarray())
    for shape in ((0, 3), (3, 0), (0, 0), (3, 3)):
        empty = sp.csr_array(shape, dtype="f4")
        assert dlx.convert(empty, "torch").shape == shape
        assert dlx.convert(dlx.convert(empty.tocoo(), "torch"), "scipy").shape == shape


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr"])
@pytest.mark.parametrize("options", [{"copy": True}, {"dtype": "float64"}], ids=str)
def test_a_matrix_of_scipy_stays_a_matrix_in_scipy(form, options):
    """Its operator * multiplies matrices, and an array's elements; in another framework and back it is an array."""
    for kind in (f"{form}_matrix", f"{form}_array"):
        m = getattr(sp, kind)(np.arange(4, dtype="f4").reshape(2, 2))
        made = dlx.convert(m, "scipy", **options)
        assert type(made) is type(m) and np.array_equal((made * made).toarray(), (m * m).toarray())
        assert not any(name.startswith("_") for name in dlx.parts(m))
        assert type(dlx.convert(dlx.convert(m, "torch"), "scipy")).__name__ == f"{form}_array"
        own = type("Own", (type(m),), {})(m)  # a subclass is converted as its class
        assert type(dlx.convert(own, "scipy", **options)) is type(m)


@pytest.mark.parametrize("form", ["csr", "coo"])
@pytest.mark.parametrize("flags", [*itertools.product([False, True], repeat=2)])
def test_an_array_of_jax_keeps_what_is_known_of_its_indices(form, flags):
    """In jax: which ones are sorted and unique, as jax's own operations keep it."""
    known = dict(zip(("indices_sorted", "unique_indices"), flags, strict=True))
    x = in_jax(form)
    args = (x.data, x.indices, x.indptr) if form == "csr" else (x.data, x.indices)
    x = type(x)(args, shape=x.shape, **known)
    for options in ({"copy": True}, {"dtype": "float16"}):
        made = dlx.convert(x, "jax", **options)
        assert made is not x and {name: getattr(made, name) for name in known} == known
    assert not any(name.startswith("_") for name in dlx.parts(x))
    back = dlx.convert(dlx.convert(x, "scipy"), "jax")
    assert not any(getattr(back, name) for name in known) and np.array_equal(dense(back), dense(x))


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr"])
def test_the_default_device_of_torch_has_no_effect(form):
    """As for dense arrays: the parts have a device."""
    m, own = matrix(form), in_torch(form)
    with torch.device("meta"):
        made = [dlx.convert(m, "torch"), dlx.convert(own, "torch", copy=True)]
    for each in made:
        assert each.device.type == "cpu" and np.array_equal(dense(each), m.toarray())


def test_like_names_the_framework_in_a_fresh_process(python):
    """An example of a type that dlx has not met gives the same target as later."""
    code = """
    import dlx, numpy as np, scipy.sparse as sp
    for kind in (sp.csr_array, sp.csc_matrix, sp.coo_array, sp.bsr_array):
        example = kind(np.eye(2))
        assert dlx.plan(np.ones(2), like=example).target == dlx.plan([example], like=example).target == "scipy"
    """
    python(code)


def test_like_takes_every_kind():
    """The elements have the device of the example."""
    examples = [*many_dimensions(), in_torch("coo"), in_jax("coo"), in_jax("csr"), matrix("bsr")]
    for example in examples:
        assert type(dlx.convert(np.ones(2, "f4"), like=example)) is type(dlx.parts(example)["data"])
        assert dlx.convert(example, like=example) is example


def test_like_needs_no_parts_of_an_array_that_its_adapter_describes(torch):
    """Such as one that cannot be split, because it would lose gradients."""
    zeros = torch.zeros((2, 2), dtype=torch.int64)
    example = torch.sparse_coo_tensor(zeros, torch.ones(2), check_invariants=True).requires_grad_()
    assert type(dlx.convert(np.ones(2, "f4"), like=example)) is torch.Tensor


@pytest.mark.parametrize("target", ("torch", "jax"))
@pytest.mark.parametrize("count", (0, 1, 9))
def test_coordinates_without_elements(target, count):
    """Index arrays and data of different lengths are refused, and planned as such."""
    pytest.importorskip("jax")
    damaged = sp.coo_array(np.eye(3, dtype="f4"))
    damaged.data = np.ones(count, "f4")
    assert dlx.plan(damaged, target, copy=True).outcome == "refused"
    with pytest.raises(LayoutError, match=rf"coords\[0\] has the shape \(3,\), and its data the shape \({count},\)"):
        dlx.convert(damaged, target, copy=True)


def test_unsorted_rows_of_any_width(python):
    """The search for repeated indices needs memory for the longest row only (the heap was overwritten)."""
    code = """
    import dlx, numpy as np, scipy.sparse as sp, torch, warnings
    warnings.simplefilter("ignore")
    rng, indptr = np.random.default_rng(0), np.array([0, 50, 50, 100, 101])
    for columns in (1 << 30, 1 << 41, 1 << 60):
        for i in (None, 49, 80):
            indices = rng.integers(0, columns, 101)
            if i is not None:
                indices[i] = indices[i - 5]
            matrix = sp.csr_array((np.ones(101), indices, indptr), shape=(4, columns))
            try:
                made = dlx.convert(matrix, "torch")
                assert i is None and (made.col_indices().numpy() == indices).all()
            except dlx.errors.LayoutError as error:
                assert i is not None and f"indices[{i}] is" in str(error), error
    """
    python(code, imported=True)


@pytest.mark.parametrize("form", FORMATS)
def test_a_dtype_inside_one_framework(form):
    """The elements are cast, also if no other option is given; the indices stay."""
    for made in (matrix(form), in_torch(form)):
        for x in (made, [made]):
            found = dlx.convert(x, like=made, dtype="float64")
            found = found[0] if isinstance(x, list) else found
            assert "float64" in str(found.dtype) and np.array_equal(dense(found), dense(made))
            assert dlx.plan(x, like=made, dtype="float64").nbytes >= 2 * dlx.parts(made)["data"].nbytes


@pytest.mark.parametrize("options", ({"copy": True}, {"dtype": "float64"}, {"device": "cpu"}))
def test_a_graph_is_never_cut(options):
    """The gradients of a new sparse tensor reach the source, or the conversion is refused."""
    for source in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), in_torch("coo")):
        leaf = source.requires_grad_()
        try:
            found = dlx.convert(leaf * 2, "torch", **options)
        except LayoutError as error:
            assert "Call .coalesce() or .detach() first." in str(error) and not (leaf * 2).is_coalesced()
            found = dlx.convert((leaf * 2).coalesce(), "torch", **options)
        found.to_dense().sum().backward()
        assert leaf.grad is not None


@pytest.mark.parametrize("to", ["scipy", "jax"])
def test_repeated_indices_are_detached(to):
    """detach=True applies to uncoalesced tensors, whose elements torch gives only without the graph."""
    pytest.importorskip(to)
    source = in_torch("coo").requires_grad_()
    assert not source.is_coalesced()
    with pytest.raises(LayoutError, match=r"Call \.coalesce\(\) or \.detach\(\) first"):
        dlx.convert(source, to)
    for tree in (source, [source]):
        made = dlx.convert(tree, to, detach=True)
        assert np.array_equal(dense(made if tree is source else made[0]), dense(source.detach()))
    assert dlx.plan(source, to, detach=True).steps == dlx.plan(source.detach(), to).steps


def test_a_failure_releases_everything():
    """A tree that fails after a sparse array was split leaks nothing (the fixture counts), and changes nothing."""
    m = matrix("coo")
    before = m.data.copy()
    with pytest.raises(DlxError, match=r"obj\[1\]"):
        dlx.convert([m, np.array(["text"])], "torch")
    assert np.array_equal(m.data, before)


def test_errors_pass_keeps_the_whole_array():
    """An array that the target lacks, or with one refused part, stays as it is; the plan says so."""
    m, odd = matrix("csr"), matrix("csr").astype("g")
    for to, tree in (("numpy", {"m": m, "x": np.ones(2)}), ("torch", {"m": odd, "x": np.ones(2)})):
        plan, made = dlx.plan(tree, to, errors="pass"), dlx.convert(tree, to, errors="pass")
        assert made["m"] is tree["m"] and plan
        assert [leaf.outcome for leaf in plan.leaves if "'m'" in leaf.path] == ["passed"]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("to", ["scipy", "torch", "jax"])
@pytest.mark.parametrize(("name", "form"), [*itertools.product(MAKERS, ("csr", "coo"))])
def test_dtype_casts_the_elements(name, form, to, lazy):
    """dtype= changes the elements, not the indices, also inside one framework; the plan has the one cast."""
    jax = pytest.importorskip("jax")
    with jax.enable_x64():
        source = MAKERS[name](form, dtype="float64")
        before = dlx.parts(dlx.convert(source, to), to="numpy")
        for dtype, where in (("float32", source), ({"float64": "float32", "int64": "int8", "int32": "int8"}, [source])):
            made = dlx.convert(where, to, dtype=dtype, lazy=lazy)
            made = made if where is source else made[0]
            after = dlx.parts(made, to="numpy")
            assert dlx.describe(made).dtype.name == "float32"
            assert np.allclose(dense(made), matrix(form, dtype="float64").toarray())
            for part in after.keys() - {"data", "shape"}:
                assert after[part].dtype == before[part].dtype and np.array_equal(after[part], before[part])
            plan = dlx.plan(where, to, dtype=dtype)
            steps = plan.steps if where is source else plan.leaves[0].steps
            assert [step.why.partition(":")[0] for step in steps if step.do == "cast"] == ["data"]
            assert plan.outcome in ("copied", "tree") and dlx.describe(source).dtype.name == "float64"
        assert dlx.convert(source, name, dtype={"int64": "int8", "float32": "float16"}) is source
        with pytest.raises(CopyRequiredError):
            dlx.convert(source, to, dtype="float32", copy=False)


@pytest.mark.parametrize("to", ["scipy", "torch"])
@pytest.mark.parametrize("name", ["scipy", "torch"])
def test_a_dtype_that_the_root_lacks_is_refused(name, to):
    """A string does not apply to integers: refused at the root, unchanged in a tree; the advice works."""
    source = MAKERS[name]("csr", dtype="int64")
    for call in (dlx.convert, lambda *args, **options: dlx.plan(*args, **options).run()):
        with pytest.raises(DTypeError, match=r"it is int64. Pass dtype=\{'int64': 'float32'\}\.") as failed:
            call(source, to, dtype="float32")
        assert failed.value.path == ()
    for tree in ([source], {"m": {"m": source}}):
        made = dlx.convert(tree, to, dtype="float32")
        while type(made) is not type(dlx.convert(source, to)):
            (made,) = made.values() if type(made) is dict else made
        assert dlx.describe(made).dtype.name == "int64"
    assert dlx.describe(dlx.convert([source], to, dtype="float32", lazy=True)[0]).dtype.name == "int64"
    assert dlx.describe(dlx.convert(source, to, dtype={"int64": "float32"})).dtype.name == "float32"


def test_an_index_array_that_is_an_array_as_well():
    """dtype= changes the array of the tree, and not the indices, which are the same object."""
    sparse, jnp = pytest.importorskip("jax.experimental.sparse"), pytest.importorskip("jax.numpy")
    data, coords = jnp.ones(2), jnp.asarray([[0, 1], [1, 0]], "int32")
    m = sparse.BCOO((data, coords), shape=(2, 2))
    for tree in ({"i": coords, "m": m}, {"m": m, "i": coords}):
        made = dlx.convert(tree, "scipy", dtype={"int32": "float64"})
        assert made["i"].dtype == np.float64 and np.array_equal(dense(made["m"]), [[0, 1], [1, 0]])


def test_one_error_for_each_array():
    """An array of which several parts are refused has one error, in the call and in the plan."""
    pa = pytest.importorskip("pyarrow")
    odd = matrix("csr").astype("g")
    for part in (odd.data, odd.indices, odd.indptr):
        part.flags.writeable = False
    tree = {"text": pa.array([["a"]]), "x": np.array(["a"]), "odd": odd, "again": [odd, pa.array([["b"]])], "y": 1}
    for tries in (tree, [tree], {"d": tree, "e": tree["text"]}):
        with pytest.raises(ExceptionGroup) as failed:
            dlx.convert(tries, "torch", errors="collect", copy=False)
        plan = dlx.plan(tries, "torch", errors="collect", copy=False)
        assert [*map(str, plan.error.exceptions)] == [*map(str, failed.value.exceptions)]
        assert len(plan.leaves) == len(plan.error.exceptions) == 4
        assert all(leaf.error in plan.error.exceptions for leaf in plan.leaves)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "uint32", "int64", "uint64"])
def test_parts_have_indices_that_the_target_has(kind, x64):
    """Jax without x64 gets int32 indices from int64 ones, as parts, in shared trees and as an array."""
    jax, pa = pytest.importorskip("jax"), pytest.importorskip("pyarrow")
    m = matrix("csr")
    expected = m.toarray()
    m.indices, m.indptr = m.indices.astype(kind), m.indptr.astype(kind)
    lists = pa.LargeListArray.from_arrays(pa.array([0, 2, 3]), pa.array([1, 2, 3], pa.int32()))
    with jax.enable_x64(x64):
        found = dlx.parts(m, to="jax")
        narrows = not x64 and kind.endswith("64")
        assert found["indices"].dtype.name == found["indptr"].dtype.name == ("int32" if narrows else kind)
        assert np.array_equal(found["indices"], m.indices) and np.array_equal(found["indptr"], m.indptr)
        with pytest.raises(LayoutError, match=r"dlx\.parts\(x, to='jax'\)"):
            dlx.convert(lists, "jax")
        assert dlx.parts(lists, to="jax")["offsets"].tolist() == [0, 2, 3]
        with dlx.share({"l": lists, "m": m}) as handle:
            made = dlx.attach(handle, "jax")
            assert made["l"]["offsets"].tolist() == [0, 2, 3] and np.array_equal(dense(made["m"]), expected)
        assert np.array_equal(dense(dlx.convert(m, "jax")), expected)


@pytest.mark.parametrize("form", ["csr", "csc", "dense"])
def test_anndata(form, tmp_path):
    """`AnnData.X` in memory, a view of it, and the sparse data set of a backed file, which is read first."""
    anndata = pytest.importorskip("anndata")
    m = matrix("csr", shape=(8, 5))
    data = anndata.AnnData(m.toarray() if form == "dense" else m.asformat(form))
    data.obs.index, data.var.index = (index.astype(object) for index in (data.obs.index, data.var.index))
    part = data[2:6, 1:4]
    for source, expected in ((data.X, m.toarray()), (part.X, m.toarray()[2:6, 1:4])):
        made = dlx.convert({"x": source}, "torch")["x"]
        assert np.array_equal(dense(made) if form != "dense" else made.numpy(), expected)
        if form != "dense":
            assert made.layout is getattr(torch, f"sparse_{form}")
    whole = dlx.convert(data.X, "torch", copy=False)
    assert dlx.shares_memory(data.X, whole)
    data.write_h5ad(tmp_path / "a.h5ad")
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r")
    try:
        if form == "dense":
            assert np.array_equal(dlx.convert(backed.X[:], "torch").numpy(), m.toarray())
            return
        with pytest.raises(DlxError, match=r"Call \.to_memory\(\) first"):
            dlx.convert([backed.X], "torch")
        assert np.array_equal(dense(dlx.convert(backed.X.to_memory(), "torch")), m.toarray())
        with pytest.raises(DlxError):
            dlx.convert(backed, "torch")
    finally:
        backed.file.close()


def test_compressed_arrays_of_one_dimension():
    """Other frameworks have compressed matrices only, and would read a vector as something else."""
    vector = sp.csr_array(np.array([0, 1.5, 0, 2], "f4"))
    for to in ("torch", "jax"):
        pytest.importorskip(to)
        assert "two dimensions only" in str(dlx.plan(vector, to).error)
        with pytest.raises(LayoutError, match=r"two dimensions only, and it has 1\. Convert it to the format coo"):
            dlx.convert(vector, to)
        found = dlx.convert(vector.tocoo(), to)
        assert (found.to_dense() if to == "torch" else found.todense()).tolist() == [0, 1.5, 0, 2]
    assert (dlx.convert(vector, "scipy", copy=True).toarray() == vector.toarray()).all()
