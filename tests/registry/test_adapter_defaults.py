"""Defaults of a minimal adapter, and optional attributes that real adapters need."""

from __future__ import annotations

import re
import sys
import types

import pytest
from support.plugins.mylib import Array

import dlx
from dlx import errors
from dlx._core.native import tensor_copy
from dlx._registry.registry import Plugin, registry
from dlx.adapter import Adapter, ArrayInfo, Arrays, Capabilities, Compound, Description, DTypes, Layout, over_memory
from dlx.testing import CHECKS, find

HOST = dlx.Device("cpu")


class Plain(Adapter):
    """The adapter of the README."""

    name = package = "plainlib"
    types = ("plainlib.Array",)
    copies = False

    def capabilities(self):
        return Capabilities(dtypes=None, copies=self.copies)

    def load(self, tensor):
        return sys.modules["plainlib"].Array(tensor_copy(tensor, False) if self.copies else tensor)


@pytest.fixture
def plain(monkeypatch):
    """Register an adapter with some attributes for a library; return its array type."""
    library = types.ModuleType("plainlib")
    library.__version__ = "1"
    library.Array = type("Array", (Array,), {"__module__": "plainlib"})
    monkeypatch.setitem(sys.modules, "plainlib", library)

    def enter(**facts):
        adapter = type("Plain", (Plain,), facts)()
        plugin = Plugin("plainlib", object, "tests", ["plainlib"], (adapter,))
        monkeypatch.setitem(registry._loader.plugins, "plainlib", plugin)
        registry._forget()
        return library.Array

    yield enter
    registry._loader.plugins.pop("plainlib", None)
    registry._forget()


def test_an_adapter_without_describe_is_described_by_an_export(plain):
    """`dlx.describe`, `like=` and `device=` work; an array of the target is not exported."""
    array = plain()(dlx.empty((2, 3), "float32"))
    info = dlx.describe(array)
    assert (str(info.dtype), info.shape, info.readonly) == ("float32", (2, 3), False)
    assert type(dlx.convert(b"abc", like=array)) is type(array)
    array.asked = 0
    assert dlx.convert(array, to="plainlib") is array and dlx.convert(array, to="plainlib", device="cpu") is array
    assert array.asked == 0
    dlx.convert(array, to="dlx")
    assert array.asked == 1


def test_dtype_applies_to_arrays_without_a_description(plain):
    """An export finds their dtype, also in a tree and in `stack`; a plan agrees."""
    kind = plain()
    numbers, whole = (
        kind(dlx.convert(memoryview(bytes(16)).cast("d"), to="dlx", copy=True)),
        kind(dlx.empty(2, "int64")),
    )
    for array in (
        dlx.convert(numbers, to="plainlib", dtype="float32"),
        dlx.stack([numbers], to="plainlib", dtype="float32"),
    ):
        assert str(array.tensor.dtype) == "float32"
    tree = dlx.convert([numbers, whole], to="plainlib", dtype="float32")
    assert [str(each.tensor.dtype) for each in tree] == ["float32", "int64"]
    assert dlx.plan(numbers, to="plainlib", dtype="float32").outcome == "copied"
    with pytest.raises(errors.DTypeError, match="changes floating arrays only, and it is int64"):
        dlx.convert(whole, to="plainlib", dtype="float32")
    with pytest.raises(errors.CopyRequiredError):
        dlx.convert(numbers, to="plainlib", dtype="float32", copy=False)


def test_arrays_that_never_change_are_described_as_read_only(plain):
    """`immutable` also applies to descriptions from an export."""
    array = plain(arrays=Arrays(immutable=True))(dlx.empty((2, 3), "float32"))
    assert dlx.describe(array).readonly and dlx.convert(array, to="dlx").readonly
    assert dlx.plan(array, to="dlx").source.readonly


def test_a_framework_states_once_what_it_takes(plain):
    """`capabilities` is not called for each conversion."""
    asked = []
    plain(capabilities=lambda self: asked.append(self) or Capabilities(dtypes=None))
    for _ in range(3):
        dlx.convert(b"abc", to="plainlib")
    assert len(asked) == 1


def test_a_framework_that_copies_what_it_imports(plain):
    """The plan reports it, copy=False is refused except for empty arrays, copy=True copies once."""
    plain(copies=True)
    tensor = dlx.empty((2, 3), "float32")
    for options in ({}, {"copy": True}):
        plan = dlx.plan(tensor, to="plainlib", **options)
        assert (plan.outcome, plan.nbytes, len(plan.steps)) == ("copied", 24, 1)
        assert dlx.convert(tensor, to="plainlib", **options).tensor.data_ptr != tensor.data_ptr
    assert dlx.plan(tensor, to="plainlib", copy=False).outcome == "refused"
    with pytest.raises(errors.CopyRequiredError, match="plainlib copies what it imports"):
        dlx.convert(tensor, to="plainlib", copy=False)
    assert dlx.plan(dlx.empty((0, 3), "float32"), to="plainlib", copy=False).outcome == "shared"
    frozen = dlx.from_dlpack(bytes(8))
    assert dlx.plan(frozen, to="plainlib", readonly="error").outcome == "copied"  # it is never written to


def test_a_framework_of_every_dtype_that_copies_some(plain, np):
    """`copy=False` is refused for these, in each kind of call."""
    plain(copies={"bool": "packs bools"})
    bools, numbers = np.ones(3, bool), np.ones(3)
    for obj in (bools, [bools], [numbers, {"a": bools}], [bools, bools[:2]]):
        assert dlx.plan(obj, to="plainlib", copy=False).outcome == "refused"
        with pytest.raises(errors.CopyRequiredError, match="plainlib packs bools"):
            dlx.convert(obj, to="plainlib", copy=False)
    dlx.convert(numbers, to="plainlib", copy=False)


class Parts:
    """A compound array of the library."""

    def __init__(self, **parts):
        vars(self).update(parts)


def _compound(plain, *names, **facts):
    """Register compound arrays with such parts; return their class."""
    kind = type("Parts", (Parts,), {"__module__": "plainlib"})
    sys.modules["plainlib"].Parts = kind
    split = lambda obj: {name: getattr(obj, name) for name in names}  # noqa: E731
    plain(
        dtypes=DTypes("numpy", ("int8", "uint8", "int16", "int32", "int64", "float64")),
        containers=(Compound(facts.pop("kind"), ("plainlib.Parts",), split, lambda parts: kind(**parts), **facts),),
    )
    return kind


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64"])
def test_indices_of_each_declared_dtype(plain, np, dtype):
    """All indices are cast to it, or refused if they do not fit; private parts of others never arrive."""
    scipy = pytest.importorskip("scipy")
    accepts = dict.fromkeys(("indices", "indptr"), (dtype,))
    _compound(plain, "data", "indices", "indptr", "shape", kind="csr", indices=accepts)
    matrix = scipy.sparse.csr_array(([1.0, 2.0], [1, 100], [0, 1, 2]), shape=(2, 40_000))
    made = dlx.convert(matrix, to="plainlib")
    assert {str(each.tensor.dtype) for each in (made.indices, made.indptr)} == {dtype}
    assert vars(made).keys() == {"data", "indices", "indptr", "shape"}
    assert (dlx.convert(made, to="scipy") != matrix).nnz == 0
    matrix.indices[1] = 39_999
    if dtype == "int64":
        assert memoryview(dlx.convert(matrix, to="plainlib").indices.tensor)[1] == 39_999
    else:
        with pytest.raises(errors.LayoutError, match=f"an index does not fit {dtype}"):
            dlx.convert(matrix, to="plainlib")


@pytest.mark.parametrize(("kind", "first"), [("ragged", "values"), ("palette", "colors")])
def test_compound_arrays_as_examples(plain, np, kind, first):
    """`like=` finds their framework and device, also of a kind of their own, and of rows of rows."""
    make = _compound(plain, first, "offsets", kind=kind)
    dense = sys.modules["plainlib"].Array
    numbers, offsets = (dense(dlx.convert(np.arange(n), to="dlx")) for n in (4, 2))
    example = make(**{first: numbers}, offsets=offsets)
    nested = make(**{first: example}, offsets=offsets)
    for like in (example, nested) if kind == "ragged" else (example,):
        assert type(dlx.convert(np.ones(2), like=like)) is dense


@pytest.mark.parametrize("alignment", [64, 256])
def test_copies_have_the_alignment_that_a_framework_requires(plain, alignment):
    """256 bytes are the most that an adapter can declare."""
    plain(capabilities=lambda self: Capabilities(dtypes=None, min_alignment=alignment))
    for size in (1, 3, 100, 5000, 100_001):
        block = memoryview(bytearray(size + 1))[1:]
        for array in (dlx.convert(block, to="plainlib"), dlx.stack([block, block], to="plainlib")):
            assert array.tensor.data_ptr % alignment == 0


@pytest.mark.parametrize("copies", [True, False])
def test_the_kit_holds_a_framework_to_that(plain, copies):
    """The kit compares the declared copies with the actual ones."""
    plain(copies=copies, dtypes=DTypes("builtins", {}))
    subject = find("plainlib")
    for name in ("adapter-describes", "adapter-identity", "adapter-round-trips"):
        verdict = CHECKS[name](subject)
        assert verdict.status == "keeps", verdict.seen
    verdict = CHECKS["adapter-capabilities"](subject)
    assert verdict.seen.startswith("copies" if copies else "shares")


@pytest.mark.parametrize("address", ["left out", "None"])
def test_an_address_that_is_not_told_is_unknown(plain, address):
    """An unknown address is not a null pointer: the plan exports the array."""
    told = {} if address == "left out" else {"address": None}

    def describe(self, obj):
        info = ArrayInfo("plainlib", "plainlib.Array", dlx.DType("int32"), "int32", (2, 3), (3, 1), HOST, 24, **told)
        return Description(info)

    array = plain(describe=describe)(dlx.empty((2, 3), "int32"))
    assert dlx.describe(array).address is None and dlx.describe(array).alignment == 0
    planned = dlx.plan(array, to="dlx")
    assert (planned.outcome, planned.error) == ("shared", None)
    assert dlx.plan([array], to="dlx").leaves[0].outcome == "shared"
    assert dlx.plan(array, to="dlx", probe=False).outcome == "unknown"
    assert dlx.shares_memory(planned.run(), array)


def test_the_kit_accepts_an_unknown_address(plain):
    """Arrays without plain memory, such as compressed ones, have no address before their export."""

    def describe(self, obj):
        info = dlx.describe(obj.tensor)
        return Description(ArrayInfo("plainlib", "plainlib.Array", info.dtype, "float", info.shape, device=HOST))

    plain(describe=describe)
    verdict = CHECKS["adapter-describes"](find("plainlib"))
    assert verdict.status == "keeps", verdict.seen


def test_what_a_framework_does_not_take_can_be_stated(plain):
    """A single dtype, no empty arrays: dlx refuses others before `load`, and the kit agrees."""
    stated = Capabilities(dtypes=frozenset({"int64"}), empty_extents="none", layouts=Layout.ANY, min_alignment=1)
    plain(capabilities=lambda self: stated, dtypes=DTypes("builtins", {}))
    assert dlx.convert(dlx.empty((2,), "int64"), to="plainlib")
    for refused in (dlx.empty((2,), "float32"), dlx.empty((0, 2), "int64")):
        with pytest.raises(errors.ConversionError):
            dlx.convert(refused, to="plainlib")
        assert not dlx.plan(refused, to="plainlib")
    for name in ("adapter-narrowing", "adapter-round-trips"):
        verdict = CHECKS[name](find("plainlib"))
        assert verdict.status == "keeps", verdict.seen


@pytest.mark.parametrize("name", ["adapter-capabilities", "adapter-round-trips", "adapter-layouts"])
def test_the_kit_says_what_it_tried(plain, name):
    """A failure of the adapter reports dtype, shape and strides."""

    def load(self, tensor):
        raise KeyError("inside the adapter")

    plain(load=load)
    seen = CHECKS[name](find("plainlib")).seen
    assert "inside the adapter" in seen
    assert re.search(r"tried last: \w+, shape \([\d, ]+\), strides \([-\d, ]+\)", seen), seen


@pytest.mark.parametrize("name", ["adapter-describes", "adapter-end"])
def test_the_kit_blames_an_adapter_that_fails(plain, name):
    """An exception of the adapter's conversion is not a failure of the kit."""

    def export(self, obj, *, stream=None):
        raise KeyError("inside the adapter")

    plain(export=export)
    verdict = CHECKS[name](find("plainlib"))
    assert verdict.status == "breaks" and "inside the adapter" in verdict.seen and "Traceback" not in verdict.seen


def test_one_that_copies_and_does_not_say_so_is_found(plain):
    """The kit compares addresses."""
    plain(load=lambda self, tensor: sys.modules["plainlib"].Array(tensor_copy(tensor, False)))
    verdict = CHECKS["adapter-capabilities"](find("plainlib"))
    assert verdict.status == "breaks" and "copied by the framework" in verdict.seen


def test_dtypes_that_are_words():
    """Strings can be the framework's dtypes; attribute names may contain dots."""
    words = type("Words", (DTypes,), {"native": lambda self, word: word})("sys", {"float32": "tensor(float)"})
    assert words.to_native(dlx.DType("float32")) == "tensor(float)"
    assert words.from_native("tensor(float)") == dlx.DType("float32")
    dotted = DTypes("sys", {"int64": "hash_info.width", "int32": "no.such"})
    assert dotted.known() == {"int64"} and dotted.to_native(dlx.DType("int64")) == sys.hash_info.width


def test_dtypes_that_numpy_s_dtypes_equal():
    """A library may export numpy's scalar classes and give its arrays numpy's dtypes, which equal them."""
    np = pytest.importorskip("numpy")
    assert DTypes("numpy", ["float32"]).from_native(np.dtype("float32")) == dlx.DType("float32")
    assert DTypes("numpy", ["float32"]).from_native(np.dtype("float64")) is None


def test_a_tensor_over_memory_needs_a_dtype(plain):
    """An `export` that passes on the None of `from_native` is refused with the dtype as the reason."""

    def export(self, obj, *, stream=None):
        return over_memory(4096, (1,), None, self.dtypes.from_native("odd"), HOST, owner=obj)

    array = plain(export=export, dtypes=DTypes("sys", {}))(b"1")
    with pytest.raises(errors.DTypeError, match="its dtype is unknown to the adapter"):
        dlx.convert(array, to="dlx")


def test_a_third_party_s_adapter_is_graded_under_a_name_that_the_kit_knows(plain, monkeypatch):
    """The kit checks the adapter and the library."""
    plain()
    monkeypatch.setitem(sys.modules["dlx.testing"].LIBRARIES, "plainlib", lambda: dlx.testing.Subject("plainlib"))
    assert find("plainlib").adapter == "plainlib"


def test_a_failure_of_the_kit_is_not_blamed_on_the_library():
    """An error of the kit is reported as such by pytest."""
    subject = dlx.testing.Subject("plainlib")
    verdict = dlx.testing.Verdict("copy-true", "plainlib", "error", "KeyError: 'kit'")
    said = CHECKS["copy-true"].explain(subject, verdict)
    assert "the kit failed, not plainlib" in said and "KeyError" in said


def test_an_adapter_names_its_namespace(plain, monkeypatch):
    """`dlx.array_namespace` returns the first installed module of `Adapter.namespaces`, or raises."""
    array = plain(namespaces=("no_such_package.deep", "plainlib"))(dlx.empty(3, "float32"))
    monkeypatch.setattr(sys.modules["plainlib"], "__spec__", object(), raising=False)
    assert dlx.array_namespace(array) is sys.modules["plainlib"]
    array = plain(namespaces=("this_fails",))(dlx.empty(3, "float32"))
    monkeypatch.setitem(sys.modules, "this_fails", types.ModuleType("this_fails"))  # without a spec
    with pytest.raises(errors.PluginError, match="its namespace this_fails cannot be imported: ValueError"):
        dlx.array_namespace(array)
    array = plain()(dlx.empty(3, "float32"))
    with pytest.raises(errors.AdapterNotFoundError, match="no namespace in its adapter"):
        dlx.array_namespace(array)
