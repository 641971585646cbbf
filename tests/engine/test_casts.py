"""The option `dtype`: arrays are cast in one pass, and only those that the call names."""

from __future__ import annotations

import array
import gc
import importlib.util
import itertools
import math
import random
import warnings

import pytest

import dlx
from dlx import errors
from dlx._core import native

NAMES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")


def cast(x, new):
    """Cast an array by dlx itself, not by its framework."""
    return dlx.convert(dlx.convert(x, "dlx"), "numpy", dtype={x.dtype.name: new})


@pytest.mark.parametrize("old", (*NAMES, *FLOATS))
@pytest.mark.parametrize("new", (*NAMES, *FLOATS))
def test_dlx_casts_like_numpy(np, old, new):
    """Any bits in any layout; a real number out of range becomes the nearest integer, a NaN 0."""
    if old == new:
        return
    raw = np.random.default_rng(0).integers(0, 256, 8 * 60, dtype="u1")
    whole = (raw.view(old) if old != "bool" else raw % 2 == 1)[:60].reshape(6, 10)
    for x in (whole, whole.T, whole[::2, ::-1], whole[:, 3], whole[1:1], whole[2, 2]):
        x = np.asarray(x)
        with np.errstate(all="ignore"):
            expected = x.astype(new)
        if old in FLOATS and new in NAMES[1:]:
            low, high = int(np.iinfo(new).min), int(np.iinfo(new).max)
            values = [0 if v != v else low if v <= low else high if v >= high else int(v) for v in x.ravel().tolist()]
            expected = np.array(values, new).reshape(x.shape)
        found = cast(x, new)
        assert found.dtype == expected.dtype and found.shape == x.shape
        assert np.array_equal(found, expected, equal_nan=new in FLOATS)


def test_every_half_is_rounded_like_numpy_s(np):
    """All float16 values, and the neighbours of their midpoints; bfloat16 by ml_dtypes."""
    halves = np.arange(1 << 16, dtype="u2").view("f2")
    with np.errstate(invalid="ignore"):  # some processors report NaN
        wide = halves.astype("f8")
    assert np.array_equal(cast(halves, "float64"), wide, equal_nan=True)
    with np.errstate(all="ignore"):
        middle = (wide[:-1] + wide[1:]) / 2
        for values in (wide, middle, np.nextafter(middle, 1e9), np.nextafter(middle, -1e9), wide * 1e-8):
            assert np.array_equal(cast(values, "float16"), values.astype("f2"), equal_nan=True)
            ml_dtypes = pytest.importorskip("ml_dtypes")
            expected = values.astype("f4").astype(ml_dtypes.bfloat16)
            found = cast(values.astype("f4"), "bfloat16")
            assert np.array_equal(found.astype("f4"), expected.astype("f4"), equal_nan=True)


def test_halves_have_the_same_bits_in_every_layout(np):
    """Adjacent elements are cast by other instructions; quiet NaN have the sign and payload of numpy's."""
    halves = np.arange(1 << 16, dtype="u2")
    signaling = (halves & 0x7E00 == 0x7C00) & (halves & 0x1FF != 0)
    wide = np.where(signaling, halves | 0x200, halves).view("f2").astype("f4").view("u4")
    singles = np.concatenate([wide.astype("i8") + step for step in (-1, 0, 1, 0xFFF, 0x1000, 0x1001)]).astype("u4")
    signaling = (singles & 0x7FC00000 == 0x7F800000) & (singles & 0x3FFFFF != 0)
    with np.errstate(all="ignore"):
        narrow = np.where(signaling, singles | 0x400000, singles).view("f4").astype("f2").view("u2")
    for bits, old, new, expected in ((halves, "f2", "float32", wide), (singles, "f4", "float16", narrow)):
        for x, there in ((bits, expected), (bits[3:], expected[3:]), (np.stack([bits] * 2, 1)[:, 0], expected)):
            for n in (len(x), 7, 9):
                assert np.array_equal(cast(x[:n].view(old), new).view(there.dtype), there[:n])
    doubles = np.array([0x7FF0000000000001, 0x7FF8000000000000, 0xFFFABC0000000000, 0xFFFFFFFFFFFFFFFF], "u8")
    assert (cast(doubles.view("f8"), "float16").view("u2") & 0x7E00 == 0x7E00).all()  # all are still NaN
    apart = np.stack([singles] * 2, 1)[:, 0].view("f4")
    assert np.array_equal(cast(singles.view("f4"), "uint8"), cast(apart, "uint8"))


def test_complex_numbers(np):
    """Both parts are cast, in one run or apart; nothing drops the imaginary part."""
    whole = np.arange(24).reshape(6, 4) + 1j * np.arange(24)[::-1].reshape(6, 4)
    for old, new in (("c16", "complex64"), ("c8", "complex128")):
        for x in (whole, whole[:, ::-1], whole.T, whole[::2], whole[:, 1], whole[1:1], whole[2, 2]):
            x = np.asarray(x).astype(old, order="K")
            for each in (x, x[..., ::-1] if x.ndim else x):
                assert np.array_equal(cast(each, new), each.astype(new))
            for real in (each.real.astype("f4"), each.real.astype("i8"), each.real > 3):
                assert np.array_equal(cast(real, new), real.astype(new))
                out = np.full((*real.shape, 2), 9, new)[..., 1]
                dlx.convert(real, out=out, dtype={str(real.dtype): new})
                assert np.array_equal(out, real)
    x = whole[:, ::-1]
    with pytest.raises(errors.DTypeError, match="drop the imaginary parts"):
        dlx.convert(x, "numpy", dtype={"complex128": "float64"})


SOURCES = {
    "numpy": lambda np, torch, x: x,
    "swapped": lambda np, torch, x: x.astype(x.dtype.newbyteorder()),
    "reversed": lambda np, torch, x: x[::-1].copy()[::-1],
    "read-only": lambda np, torch, x: np.broadcast_to(x, x.shape),
    "torch": lambda np, torch, x: torch.from_numpy(x.copy()),
    "dlx": lambda np, torch, x: dlx.convert(x, "dlx"),
    "buffer": lambda np, torch, x: memoryview(x.tobytes()).cast("d"),
    "only __dlpack__": lambda np, torch, x: type("P", (), {"__dlpack__": lambda self, **o: x.__dlpack__(**o)})(),
}


@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "dlx"])
@pytest.mark.parametrize("kind", SOURCES)
def test_float64_becomes_float32_in_one_pass(np, torch, kind, target):
    """The plan shows one cast and no other copy; the result is new, writable memory with the right values."""
    pytest.importorskip(target)
    x = np.linspace(-3, 3, 7)
    source = SOURCES[kind](np, torch, x)
    plan = dlx.plan(source, target, dtype="float32")
    moved = [step for step in plan.steps if step.nbytes]
    aligned = kind == "swapped" and target == "jax"  # numpy swaps the bytes, in memory of its own
    assert plan.outcome == "copied" and [step.do for step in moved] == ["cast", "copy"][: 1 + aligned], str(plan)
    assert moved[0].nbytes == 28 and "float64 to float32" in moved[0].why and moved[0].option == ("dtype", "float32")
    for result in (dlx.convert(source, target, dtype="float32"), plan.run()):
        assert np.array_equal(np.asarray(dlx.convert(result, "numpy")), x.astype("f4"))
        assert not dlx.shares_memory(result, x)
    with pytest.raises(errors.CopyRequiredError, match="a cast from float64 to float32 makes a copy"):
        dlx.convert(source, target, dtype="float32", copy=False)


def test_what_a_single_dtype_applies_to(np, torch):
    """Floating arrays; in a tree others stay, at the root they are refused with the mapping that would change them."""
    tree = {
        "x": np.ones(2),
        "i": np.arange(2),
        "h": [torch.ones(2, dtype=torch.bfloat16)],
        "c": np.ones(2, "c16"),
        "t": "x",
    }
    new = dlx.convert(tree, "torch", dtype="float32")
    assert [new["x"].dtype, new["h"][0].dtype] == [torch.float32] * 2
    assert (new["i"].dtype, new["c"].dtype, new["t"]) == (torch.int64, torch.complex128, "x")
    assert dlx.shares_memory(new["i"], tree["i"])
    with pytest.raises(errors.DTypeError, match=r"it is int64. Pass dtype=\{'int64': 'float32'\}"):
        dlx.convert(tree["i"], "torch", dtype="float32")
    with pytest.raises(errors.DTypeError, match=r"Pass dtype=\{'int64': 'int32'\}\. Name the dtypes of your arrays in"):
        dlx.convert(tree, "torch", dtype="int32")
    assert dlx.convert(tree["i"], "torch", dtype={"int64": "float32"}).dtype == torch.float32
    assert dlx.convert(tree["x"].astype("f4"), "numpy", dtype="float32") is not None
    same = np.ones(2, "f4")
    assert dlx.convert(same, "numpy", dtype="float32") is same
    assert dlx.convert(np.ones(2), "numpy", dtype={"int64": "int32"}).dtype == np.float64


def test_a_mapping_is_applied_once(np, torch):
    """A chain of changes is not followed, also if the framework casts."""
    chain = {"float64": "float32", "float32": "float16", "float16": "float64"}
    for x in (np.ones(2), np.ones(2, ">f8"), dlx.convert(np.ones(2), "dlx"), array.array("d", [1, 1])):
        for target in ("numpy", "dlx", "torch"):
            assert str(dlx.DType(dlx.convert(x, target, dtype=chain).dtype)) == "float32"


def test_spellings(np, torch):
    """Names, dtypes of frameworks and of dlx; unknown ones are refused."""
    jax_numpy = pytest.importorskip("jax.numpy")
    for dtype in ("float32", "f4", torch.float32, np.float32, np.dtype("f4"), jax_numpy.float32, dlx.DType("float32")):
        assert dlx.convert(np.ones(2), "torch", dtype=dtype).dtype == torch.float32
        assert dlx.convert(np.ones(2), "torch", dtype={np.float64: dtype}).dtype == torch.float32
    with pytest.raises(errors.DTypeError, match="Did you mean 'float32'"):
        dlx.convert(np.ones(2), "torch", dtype="floot32")


def test_inside_a_framework_its_own_cast_keeps_graph_and_class(np, torch):
    """Gradients flow; a subclass of ndarray stays one."""
    x = torch.ones(3, requires_grad=True)
    dlx.convert(x, "torch", dtype="float64").sum().backward()
    assert x.grad.tolist() == [1, 1, 1]
    with pytest.raises(errors.ConversionError, match="detach=True"):
        dlx.convert(x, "numpy", dtype="float64")
    assert dlx.convert(x, "numpy", dtype="float64", detach=True).dtype == np.float64
    own = type("Own", (np.ndarray,), {})
    assert type(dlx.convert(np.ones(3).view(own), "numpy", dtype="float32")) is own


def test_a_cast_that_the_framework_refuses(np):
    """The error is about the array and its place, also in a container, and the others are converted."""

    class Refuses(np.ndarray):
        def astype(self, *args, **options):
            raise ValueError("no astype")

    x = np.ones(2).view(Refuses)
    with pytest.raises(errors.ConversionError, match="to 'numpy': numpy failed: ValueError: no astype"):
        dlx.convert(x, "numpy", dtype="float32")
    with pytest.raises(errors.ConversionError, match=r"at obj\[1\]: numpy failed: ValueError: no astype"):
        dlx.convert([np.ones(2), x], "numpy", dtype="float32")
    with pytest.raises(ExceptionGroup) as caught:
        dlx.convert([x, np.ones(2), x[:1]], "numpy", dtype="float32", errors="collect")
    assert len(caught.value.exceptions) == 2


def test_invalid_calls_with_a_cast(np):
    """They get the same errors as without one."""
    for copy in ("no", 0, 1, []):
        with pytest.raises(ValueError, match="copy must be None, True or False"):
            dlx.convert(np.ones(2), "dlx", dtype="float32", copy=copy)
    for like in (5, [np.ones(2)], np):
        with pytest.raises(errors.AdapterNotFoundError, match=r"like= is .*, not an array of a target"):
            dlx.convert(np.ones(2), like=like, dtype="float32")
        with pytest.raises(TypeError, match="give either to="):
            dlx.convert(np.ones(2), "dlx", like=like, dtype="float32")


def test_no_advice_to_read_device_memory_with_numpy(cuda):
    """A tensor without a framework on the host becomes an array of numpy; on a device that fails."""
    with pytest.raises(errors.DTypeError, match="neither its framework nor dlx casts float32 to float16") as caught:
        dlx.convert(dlx.empty((2,), "float32", "cuda"), "dlx", dtype="float16")
    assert "numpy.asarray" not in str(caught.value)


def test_unaligned_complex_numbers_of_torch(python, torch):
    """Torch's own cast and copy of them crash."""
    python("""
    import numpy as np, torch, dlx
    x = np.zeros(33, "u1")[1:].view("c16")
    x[:] = [1 + 2j, 3]
    tensor = torch.from_numpy(x)
    for source in (tensor, [tensor]):
        made = dlx.convert(source, "torch", dtype={"complex128": "complex64"})
        assert (made[0] if type(made) is list else made).tolist() == [1 + 2j, 3]
    for options in ({"copy": True}, {"dtype": {"complex128": "complex64"}}):
        try:
            dlx.convert(tensor.conj(), "torch", **options)
        except dlx.errors.LayoutError as error:
            assert "its data is unaligned" in str(error)
        else:
            raise AssertionError(options)
    """)


def test_like_a_sparse_array(np):
    """An array that consists of others names their framework."""
    sparse = pytest.importorskip("scipy.sparse").csr_array(np.eye(2))
    assert dlx.convert(np.ones(2), like=sparse, dtype="float32").dtype == np.float32


def test_bits_that_torch_has_not_resolved(torch):
    """A conjugated, a negated and a zero tensor are resolved by the cast."""
    z = torch.tensor([1 + 2j])
    cases = (z.conj(), z.conj().imag, torch._efficientzerotensor(2))
    casts = ("complex128", "float64", "float64")
    for x, new in zip(cases, casts, strict=True):
        found = dlx.convert(x, "numpy", dtype={str(x.dtype).removeprefix("torch."): new})
        assert found.tolist() == x.clone().tolist() and found.dtype.name == new


def test_what_only_a_framework_casts(np):
    """float8 by numpy with ml_dtypes as source or target; without a framework that has it, it is refused."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    small = np.array([1, 2, 448], ml_dtypes.float8_e4m3fn)
    assert dlx.convert(small, "dlx", dtype="float32").dtype.name == "float32"
    buffer = array.array("d", [1, 2])
    plan = dlx.plan(buffer, "numpy", dtype="float8_e4m3fn")
    assert plan.steps[-1].do == "cast" and "by numpy" in plan.steps[-1].why
    assert plan.run().astype("f4").tolist() == [1, 2]
    with pytest.raises(errors.DTypeError, match="neither its framework nor dlx casts float64 to float8"):
        dlx.convert(array.array("d", [1, 2]), "dlx", dtype="float8_e4m3fn")


def test_dtypes_of_ml_dtypes_between_which_it_has_no_cast(np):
    """They are cast by way of a dtype that has all their values, as the plan says."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    pairs = [
        ("float8_e8m0fnu", "float8_e5m2"),
        ("float8_e4m3fn", "float8_e8m0fnu"),
        ("int4", "uint4"),
        ("uint4", "int4"),
    ]
    for old, new in [*pairs, ("float8_e8m0fnu", "int4"), ("int4", "float8_e8m0fnu")]:
        x = np.array([1, 2, 4], "f4").astype(getattr(ml_dtypes, old))
        for source in (x, x[::-1], x[:0], x[0]):
            plan = dlx.plan(source, "numpy", dtype={old: new})
            found = dlx.convert(source, "numpy", dtype={old: new})
            assert plan.outcome == "copied" and found.dtype.name == new
            assert np.array_equal(np.asarray(found).astype("f4"), np.asarray(source).astype("f4"))
    whole = np.arange(-8, 8).astype(ml_dtypes.int4)
    found = dlx.convert(whole, "numpy", dtype={"int4": "uint4"})
    assert found.astype("i4").tolist() == [*range(8, 16), *range(8)]


def test_views_and_files(np, torch, tmp_path):
    """A lazy view and a file cast each array when it is read; writes to a view keep the source's dtypes."""
    tree = {"x": np.ones(2), "i": np.arange(2)}
    view = dlx.convert(tree, "torch", dtype="float32", lazy=True)
    assert view["x"].dtype == torch.float32 and view["i"].dtype == torch.int64 and view["x"] is view["x"]
    view["x"] = torch.zeros(2, dtype=torch.float64)
    assert tree["x"].dtype == np.float64 and view["x"].dtype == torch.float32
    assert dlx.convert(tree, "torch", dtype="float32").keys() == view.materialize().keys()
    np.savez(tmp_path / "x.npz", x=np.ones(3), i=np.arange(3))
    with dlx.open(tmp_path / "x.npz", "torch", dtype="float32") as file:
        assert file["x"].dtype == torch.float32 and file["i"].dtype == torch.int64
    np.save(tmp_path / "x.npy", np.ones(3, ">f8"))
    with dlx.open(tmp_path / "x.npy", "jax" if pytest.importorskip("jax") else "", dtype="float32") as file:
        assert file[""].dtype == np.float32


@pytest.mark.parametrize("target", ("numpy", "torch", "dlx", "jax"))
def test_numbers_of_numpy(np, torch, target):
    """A scalar is cast as a 0-d array is."""
    pytest.importorskip("jax")
    for number, dtype in itertools.product(
        (np.int8(3), np.float32(2), np.complex64(1), np.bool_(True)), ("int16", "float16", "bfloat16", "complex64")
    ):
        outcomes = []
        for x in (number, np.array(number)):
            try:
                found = dlx.convert(x, target, dtype={number.dtype.name: dtype})
                info = dlx.describe(found)
                outcomes.append((str(info.dtype), info.shape))
                assert complex(dlx.convert(found, "torch")) == complex(number)
                assert dlx.plan(x, target, dtype={number.dtype.name: dtype}).ok
            except errors.DTypeError as error:
                outcomes.append(error.reason)
        assert outcomes[0] == outcomes[1]


def test_a_cast_to_a_dtype_that_the_target_lacks_is_planned_as_it_ends(np, torch):
    """The plan of a cast by the source's framework sees the new dtype."""
    pytest.importorskip("pyarrow")
    for source in (np.ones(2), torch.ones(2), np.ones(2, ">f4"), np.ones((2, 2)).T):
        for target, dtype in itertools.product(("pyarrow", "arrow", "numpy"), ("complex64", "int32", "bfloat16")):
            options = {"to": target, "dtype": {"float64": dtype, "float32": dtype}}
            planned = dlx.plan(source, **options)
            if planned.ok:
                planned.run()
            else:
                with pytest.raises(errors.DlxError) as caught:
                    dlx.convert(source, **options)
                assert str(caught.value) == str(planned.error)


TREES = {  # dtypes of the arrays of a tree, and the option
    "a cast to it": (["int64"], {"int64": "bfloat16"}),
    "to several": (["int64", "float64", "int32"], {"int64": "bfloat16", "int32": "bfloat16", "float64": "float32"}),
    "a cast to float64": (["int32"], {"int32": "float64"}),
    "a cast to int64": (["float32"], {"float32": "int64"}),
    "only a wider dtype": (["float32"], {"float32": "float64"}),
    "a wide dtype of a tree": (["float32", "float64"], "float64"),
    "labels": (["float64", "int64"], "float32"),
    "labels first": (["int64", "float64"], None),
    "others": (["float64", "int64"], {"int64": "int32"}),
    "as well": (["float64", "float32"], {"float32": "float64"}),
    "bfloat16": (["bfloat16", "int64"], {"int64": "int32"}),
    "one floating dtype": (["float32", "float64"], "bfloat16"),
    "complex": (["complex128", "float64"], "float32"),
}


@pytest.mark.parametrize("target", ["jax", "pyarrow"])
@pytest.mark.parametrize("name", TREES)
def test_the_advice_about_a_dtype_is_followed_to_the_end(np, target, name):
    """Each names the dtypes of the arrays, and keeps what the option says of others; the last one works."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if pytest.importorskip(target).__name__ == "jax" and pytest.importorskip("jax").config.jax_enable_x64:
        pytest.skip("jax has all dtypes")
    old, dtype = TREES[name]
    if target == "pyarrow" and name == "complex":
        pytest.skip("pyarrow has no complex numbers")
    tree = [np.ones(2).astype(ml_dtypes.bfloat16 if each == "bfloat16" else each) for each in old]
    for x in (tree, *(tree if len(tree) == 1 else ())):
        option, tries = dtype, 0
        while (error := dlx.plan(x, target, dtype=option).error) is not None:
            with pytest.raises(errors.DTypeError) as caught:
                dlx.convert(x, target, dtype=option)
            assert str(caught.value) == str(error)
            tries += 1
            assert tries < (2 if len(old) == 1 else 4), error
            option = dict(error.option)["dtype"]
        made = dlx.convert(x, target, dtype=option)
        if len(old) == 1:
            new = (option or {}).get(old[0], old[0])
            assert dlx.describe(made[0] if x is tree else made).dtype.name == new


def test_no_advice_drops_imaginary_parts(np):
    """A cast from a complex to a real dtype is refused, so no error suggests it."""
    x = np.ones(2, "c8")
    for call in (
        lambda: dlx.convert(x, "numpy", dtype="float32"),
        lambda: dlx.convert(x, "numpy", dtype={"complex64": "float32"}),
        lambda: dlx.convert(x, out=np.ones(2)),
    ):
        with pytest.raises(errors.DTypeError, match=r"Convert x\.real and x\.imag instead\."):
            call()


def test_collections_are_checked_at_the_call(np):
    """A dtype that does not apply, or a copy that a cast needs, is refused before the chunks are computed."""
    array = pytest.importorskip("dask.array")
    whole, real = array.from_array(np.arange(6), chunks=2), array.from_array(np.arange(6.0), chunks=2)
    for x, options in ((whole, {"dtype": "float32"}), (real, {"dtype": "float32", "copy": False})):
        with pytest.raises(errors.DlxError) as caught:
            dlx.convert(x, "torch", **options)
        assert str(dlx.plan(x, "torch", **options).error) == str(caught.value)
    assert dlx.convert(real, "numpy", dtype="float32").compute().dtype == np.float32
    assert dlx.convert([whole, real], "numpy", dtype="float32")[0].compute().dtype == np.int64
    assert dlx.convert(real, "numpy", wait=False).compute().tolist() == [0, 1, 2, 3, 4, 5]


def _draw(np, torch, rng):
    """Return an array of some framework, dtype and layout, and options of a call with `dtype`."""
    shape = rng.choice([(), (0, 3), (5,), (4, 3), (2, 3, 4)])
    old = rng.choice(["float32", "float64", "float16", "int8", "int64", "uint8", "bool", "complex64", "complex128"])
    x = (np.arange(math.prod(shape)) % 5 - 1).astype(old).reshape(shape)
    x = rng.choice([lambda: x, lambda: x.T, lambda: x[..., ::-2] if shape else x, lambda: np.array(x, order="F")])()
    made = rng.choice(["numpy", "read-only", "swapped", "matrix", "torch", "graph", "parameter", "conj", "jax", "dlx"])
    if made == "read-only":
        x.flags.writeable = False
    elif made == "swapped":
        x = x.astype(x.dtype.newbyteorder())
    elif made == "matrix":
        x = np.asmatrix(x) if x.ndim < 3 else x
    elif made == "jax":
        x = dlx.convert(x.copy(), "jax") if "jax" in EXAMPLE and x.itemsize < 8 else x
    elif made == "dlx":
        x = dlx.convert(x, "dlx")
    elif made != "numpy":
        x = torch.from_numpy(np.array(x, order="C")).mT if x.ndim > 1 else torch.tensor(x.copy())
        if made == "conj":
            x = x.conj()
        elif made == "parameter":
            x = torch.nn.Parameter(x, requires_grad=rng.random() < 0.5 and x.is_floating_point())
        else:
            x.requires_grad_(made == "graph" and x.is_floating_point())
    to = rng.choice([each for each in EXAMPLE if made != "swapped" or each != "jax"])  # its order depends on alignment
    options = {"like": EXAMPLE[to](np)} if rng.random() < 0.3 and EXAMPLE[to] else {"to": to}  # jax: order by alignment
    for name, values in {"device": ["cpu", torch.device("cpu"), "cuda"], "copy": [True, True, False]}.items():
        if rng.random() < 0.3:
            options[name] = rng.choice(values)
    changes = {"float64": "float32"}, {"int64": "float32", "float32": "int8"}, {"complex128": "complex64"}
    options["dtype"] = rng.choice([*FLOATS, "bfloat16", "float8_e4m3fn", "int32", torch.float32, np.float64, *changes])
    return x, options


EXAMPLE = {"numpy": lambda np: np.ones(2), "torch": lambda np: dlx.convert(np.ones(2), "torch")}
EXAMPLE |= {"dlx": lambda np: dlx.convert(np.ones(2), "dlx")}
for _name in ("jax", "pyarrow"):
    if importlib.util.find_spec(_name):
        EXAMPLE[_name] = None


def _outcome(x, options):
    try:
        made = dlx.convert(x, **options)
    except errors.DlxError as error:
        return type(error), str(error)
    grad = getattr(made, "requires_grad", False)
    tensor = dlx.convert(made.detach() if grad else made, "dlx")
    strides = tensor.strides if 0 not in tensor.shape else None
    return made is x, type(made), grad, str(tensor.dtype), tensor.shape, strides, tensor.readonly, repr(tensor)


@pytest.mark.parametrize("seed", range(20))
def test_the_fast_cast_does_what_the_planned_one_does(np, torch, seed):
    """A cast of one host array is not planned; results and errors are the same as those of a planned call."""
    rng = random.Random(seed)
    for _ in range(20):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x, options = _draw(np, torch, rng)
            assert _outcome(x, options) == _outcome(x, options | {"errors": "collect"}), (x, options)


def test_plans_agree_and_nothing_leaks(np, torch):
    """The plan of every combination says what `convert` does, also for refusals."""
    gc.collect()
    live = native.live()
    sources = [np.ones(3), np.arange(3), np.ones(3, ">f4"), torch.ones(3), b"abc", dlx.empty((0, 2), "float64")]
    options = [{"copy": c, "dtype": d} for c in (None, True, False) for d in ("float32", {"int64": "int8"}, {})]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source, target, option in itertools.product(sources, ("numpy", "torch", "dlx"), options):
            plan = dlx.plan(source, target, **option)
            if not plan:
                with pytest.raises(type(plan.error)) as caught:
                    dlx.convert(source, target, **option)
                assert str(caught.value) == str(plan.error)
                continue
            result = dlx.convert(source, target, **option)
            assert (result is source) == (plan.outcome == "same")
            if plan.outcome == "copied" and len(bytes(dlx.convert(result, "dlx").tobytes())):
                assert not dlx.shares_memory(result, source)
    result = source = plan = caught = sources = None
    gc.collect()
    assert native.live() == live
