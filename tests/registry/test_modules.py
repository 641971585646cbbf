"""Modules with `from_dlpack` as targets, with capabilities from a probe."""

from __future__ import annotations

import sys
import types

import pytest
from support.plugins.distributions import Site

import dlx
from dlx import errors
from dlx._core.native import tensor_copy, tensor_view
from dlx._registry.registry import registry
from dlx.adapter import Layout

COMPACT = ((2, 3), None)


class Array:
    """An array of the modules here, around a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.fixture
def module(request, monkeypatch):
    """Create a module with a given `from_dlpack`, and clear the caches."""
    made = []

    def make(from_dlpack, name="madexp"):
        found = types.ModuleType(name)
        found.from_dlpack = from_dlpack
        monkeypatch.setitem(sys.modules, name, found)
        made.append(found)
        return found

    yield make
    for each in made:
        registry._modules.pop(each, None)
    registry._forget()


def floats(shape=(2, 3), readonly=False):
    """Return a tensor of float32."""
    tensor = dlx.empty(shape, "float32")
    return tensor_view(tensor, None, None, tensor.flags | 1, None) if readonly else tensor


def taken(tensor):
    """Import anything unchanged."""
    return Array(dlx.from_dlpack(tensor))


def test_a_module_and_its_name_are_targets(module):
    """Its arrays stay unchanged, work as like=, and share memory."""
    xp, source = module(taken), floats()
    result = dlx.convert(source, to=xp, copy=False)
    assert isinstance(result, Array) and result.tensor.data_ptr == source.data_ptr
    assert isinstance(dlx.convert(source, to="madexp"), Array)
    assert dlx.convert(result, to=xp) is result
    assert isinstance(dlx.convert(source, like=result), Array)
    assert dlx.describe(result).framework == "madexp" and dlx.describe(result).shape == (2, 3)
    assert dlx.adapters()["madexp"].capabilities().keeps_readonly


def test_it_is_asked_once(module):
    """The result of the probe is cached; a conversion calls `from_dlpack` once."""
    calls = []

    def counted(tensor):
        calls.append(tensor)
        return taken(tensor)

    xp = module(counted)
    dlx.convert(floats(), to=xp)
    probed = len(calls)
    assert 10 < probed < 60
    for _ in range(3):
        dlx.convert(floats(), to=xp)
    assert len(calls) == probed + 3
    calls.clear()


def test_what_the_probe_does_not_pass_is_copied(module):
    """Negative strides are not tried, because they crash consumers."""

    def dies(tensor):
        assert all(stride >= 0 for stride in tensor.strides), "the process would end here"
        return taken(tensor)

    xp = module(dies)
    assert registry.target(xp).capabilities.layouts == Layout.PERMUTED | Layout.GAPS | Layout.ZERO
    backwards = dlx.from_pointer(floats().data_ptr + 20, (6,), "float32", strides=(-1,), owner=floats())
    assert dlx.plan(backwards, to=xp).outcome == "copied"


def test_a_module_that_copies_is_one_that_copies(module):
    """copy=False is refused, and the plan names the module that copies."""
    xp = module(lambda tensor: Array(tensor_copy(dlx.from_dlpack(tensor), False)))
    plan = dlx.plan(floats(), to=xp)
    assert plan.outcome == "copied" and "made by madexp" in str(plan) and plan.nbytes == 24
    with pytest.raises(errors.CopyRequiredError, match="copies what it imports"):
        dlx.convert(floats(), to=xp, copy=False)
    assert dlx.plan(floats(readonly=True), to=xp).nbytes == 24  # it never writes to the source


def test_a_module_that_copies_one_dtype_is_one_that_copies(module):
    """It counts as sharing only if it shares all dtypes; modules over numpy may copy bools."""

    def bools_copied(tensor):
        return Array(tensor_copy(dlx.from_dlpack(tensor), False)) if tensor.dtype.name == "bool" else taken(tensor)

    xp = module(bools_copied)
    assert dlx.plan(dlx.empty((2,), "bool"), to=xp).outcome == "copied"
    with pytest.raises(errors.CopyRequiredError):
        dlx.convert(dlx.empty((2,), "bool"), to=xp, copy=False)


@pytest.mark.parametrize(
    ("change", "fact", "value"),
    [
        (lambda t: t.dtype.name in ("float64", "bool"), "dtypes", {"float64", "bool"}),
        (lambda t: t.ndim > 0, "ndims", (1, 64)),
        (lambda t: t.ndim <= 8, "ndims", (0, 8)),
        (lambda t: not t.readonly, "keeps_readonly", False),
        (lambda t: t.data_ptr % 64 == 0, "min_alignment", 64),
        (lambda t: t.strides == tuple(sorted(t.strides, reverse=True)), "layouts", Layout.GAPS | Layout.ZERO),
    ],
    ids=["dtypes", "0-d", "dimensions", "read-only", "alignment", "layouts"],
)
def test_what_it_refuses_it_is_not_given(module, change, fact, value):
    """The probe determines each capability."""

    def picky(tensor):
        if not change(tensor) or (fact == "layouts" and tensor.shape == (2, 3) and tensor.strides == (0, 1)):
            raise BufferError("not that")
        return taken(tensor)

    stated = registry.target(module(picky)).capabilities
    expected = Layout.GAPS if fact == "layouts" else value
    assert getattr(stated, fact) == (frozenset(value) if fact == "dtypes" else expected)


class Placed(Array):
    """An array of a module with `__dlpack_device__`, which records the arguments of its export."""

    def __init__(self, tensor, device=None):
        super().__init__(tensor)
        self.device, self.streams = device, []

    def __dlpack__(self, *, stream=None, **keywords):
        self.streams.append(stream)
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self):
        if self.device is None:
            raise RuntimeError("deleted")
        return self.device


@pytest.fixture
def placed(module):
    """Return a module with such arrays."""
    return module(lambda tensor: Placed(dlx.from_dlpack(tensor), (1, 0)))


@pytest.mark.parametrize("device", [None, "nonsense", (1 << 70, 0)], ids=str)
def test_an_array_that_does_not_say_where_it_is_stays_as_it_is(placed, device):
    """It is unchanged in its framework; for other targets its export has the device."""
    array = dlx.convert(floats(), to=placed)
    array.device = device
    for convert in (dlx.convert, dlx.convert.__wrapped__):
        assert convert(array, to=placed) is array and convert([array], to=placed)[0] is array
        assert convert(array, to="dlx").data_ptr == array.tensor.data_ptr
    assert dlx.plan(array, to=placed).outcome == "same" and not dlx.plan(array, to=placed).error
    assert dlx.plan(array, to="dlx").outcome == "shared"


def test_a_plan_says_where_an_array_of_a_module_is(np, placed):
    """Without an export; `device=` is checked."""
    array = dlx.convert(floats(), to=placed)
    array.device = (2, 0)
    plan = dlx.plan(array, to="numpy")
    assert isinstance(plan.error, errors.DeviceError) and plan.source.device == dlx.Device("cuda:0")
    plan = dlx.plan(array, to=placed)
    assert plan.outcome == "same" and plan.source.device == plan.device == dlx.Device("cuda:0")
    assert dlx.convert(array, to=placed, device="cuda:0") is array
    for convert in (dlx.convert, dlx.convert.__wrapped__):
        with pytest.raises(errors.DeviceError):
            convert(array, to=placed, device="cpu")
    assert array.streams == []


def test_an_array_of_a_module_on_a_device_is_given_a_stream(cuda, placed):
    """The caller's stream or dlx's default stream; memory is moved if requested."""
    array = dlx.convert(floats(), to=placed)
    address = cuda.alloc(24)
    array.tensor = dlx.from_pointer(address, (2, 3), "float32", device="cuda:0", owner=array)
    array.device = (2, 0)
    stream = cuda.stream()
    for convert in (dlx.convert, dlx.convert.__wrapped__):
        array.streams.clear()
        assert convert(array, to="dlx", stream=stream).data_ptr == address
        assert convert([array, array], to="dlx", stream=stream)[0].data_ptr == address
        assert len(array.streams) == 2 and None not in array.streams
        moved = convert(array, to=placed, device="cpu")
        assert moved is not array and moved.tensor.device == dlx.Device("cpu")
        assert len(array.streams) == 3 and None not in array.streams
    del moved, array
    cuda.free(address)


def test_one_that_changes_values_is_refused(module):
    """The probe compares values, and refuses modules whose results it cannot read."""

    def zeros(tensor):
        return Array(dlx.convert(bytes(dlx.from_dlpack(tensor).nbytes), to="dlx"))

    for function in (zeros, lambda tensor: object(), lambda tensor: 1 / 0):
        with pytest.raises(errors.AdapterNotFoundError, match="accepts no array in host memory"):
            dlx.convert(floats(), to=module(function))


def test_a_module_around_a_framework_is_that_framework(module, np):
    """array_api_compat.torch is the target torch."""
    xp = module(lambda tensor: np.from_dlpack(tensor))
    assert registry.target(xp) is registry.target("numpy")


@pytest.mark.parametrize("name", ["json", "this", "__main__", "no such", "dlx_no_such_module", "a..b", ""])
def test_names_that_are_no_array_modules(name):
    """They are not imported."""
    before = {"this"} & sys.modules.keys()
    with pytest.raises(errors.AdapterNotFoundError, match="unknown target"):
        dlx.convert(b"abc", to=name)
    assert {"this"} & sys.modules.keys() == before


def test_a_mistyped_name_runs_no_module_of_the_working_folder(tmp_path, monkeypatch):
    """An unrelated script is not run by its name; the imported module is a target."""
    (tmp_path / "trainxp.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("trainxp", "trainxp.sub"):
        with pytest.raises(errors.AdapterNotFoundError, match="unknown target"):
            dlx.convert(b"abc", to=name)


def test_a_known_one_that_is_missing_has_an_install_line(monkeypatch):
    """A failing import is reported with its reason."""
    with pytest.raises(errors.FrameworkNotInstalledError, match="pip install dpnp"):
        dlx.convert(b"abc", to="dpnp")


def test_a_known_ones_submodule_is_imported_too(tmp_path, np):
    """A missing submodule is an unknown target; a failing import is reported."""
    (tmp_path / "ndonnx" / "sub").mkdir(parents=True)
    (tmp_path / "ndonnx" / "__init__.py").write_text("")
    (tmp_path / "ndonnx" / "sub" / "__init__.py").write_text("from numpy import from_dlpack\n")
    (tmp_path / "ndonnx" / "bad.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "ndonnx" / "worse.py").write_text("from ndonnx.worse import missing\n")
    out = Site(tmp_path).run("""
        print(type(dlx.convert(bytearray(3), to="ndonnx.sub")).__name__)
        for name in ("nope", "nope.sub", "sub.nope", "bad", "worse"):
            error = dlx.plan(bytearray(3), to=f"ndonnx.{name}").error
            print(type(error).__name__, error)
    """)
    first, *missing, bad, worse = out.splitlines()
    assert first == "ndarray"
    assert all(line.startswith("AdapterNotFoundError unknown target 'ndonnx.") for line in missing), missing
    assert bad.startswith("FrameworkNotInstalledError ndonnx.bad is installed but fails to import: ModuleNotFound")
    assert worse.startswith("FrameworkNotInstalledError ndonnx.worse is installed but fails to import: ImportError")


def test_one_that_fails_to_import_says_why(tmp_path, monkeypatch):
    """The error has a cause."""
    (tmp_path / "ndonnx.py").write_text("raise OSError('libx.so')\n")
    monkeypatch.delitem(sys.modules, "ndonnx", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.FrameworkNotInstalledError, match=r"fails to import.*libx\.so"):
        dlx.convert(b"abc", to="ndonnx")


def test_loaded_adapters_without_their_frameworks_disturb_no_call(python):
    """A failed conversion loads an adapter, and `dlx.adapters()` all; other calls only ask imported frameworks."""
    python(
        """
        import sys
        import numpy as np, dlx

        for name in ("torch", "jax", "tensorflow", "cupy", "paddle", "mlx", "warp"):
            assert name not in sys.modules
            sys.modules[name] = None  # importing it fails
        for name in dlx.adapters():
            try:
                dlx.plan(np.ones(2), to=name)
            except dlx.errors.DlxError:
                pass
        class Producer:
            def __init__(self):
                self.array = np.ones(3)

            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        def double(x, y=None):
            return x + x

        for one in (Producer(), np.ones(3), dlx.convert(np.ones(3), to="dlx")):
            for obj in (one, [one], {"a": (one, 1)}):
                dlx.convert(obj, to="numpy")
                dlx.convert(obj, to="dlx", lazy=True)
                dlx.plan(obj, to="numpy")
                dlx.convert(obj, like=np.ones(1), detach=True)
            assert dlx.shares_memory(one, one)
            assert dlx.stack([one, one], to="numpy").shape == (2, 3)
            for options in ({}, {"returns": "numpy"}, {"lazy": True}, {"device": "cpu"}, {"grad": True}):
                dlx.using("numpy", **options)(double)(one)
        """,
    )
