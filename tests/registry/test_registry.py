"""Plugins: found late, loaded late, broken alone; targets by name, module and type."""

from __future__ import annotations

import pickle
import sys
import textwrap
import types

import pytest
from support.plugins.mylib import Array, MyLib, Special, plugin
from support.processes.calls import called

import dlx
from dlx._core import native
from dlx._registry import generic as strangers
from dlx._registry import registry as loaded
from dlx._registry.registry import Registry
from dlx.adapter import Adapter, Capabilities, DTypes, KnownIssue, Layout
from dlx.errors import AdapterNotFoundError, FrameworkNotInstalledError, PluginError


@pytest.fixture
def mylib(monkeypatch):
    """A framework `mylib` and a plugin `dlx_mylib`, both importable."""
    package = types.ModuleType("mylib")
    package.__version__ = "1.0"
    package.Array, package.Special = Array, Special
    monkeypatch.setattr(Array, "__module__", "mylib")
    monkeypatch.setattr(Special, "__module__", "mylib")
    monkeypatch.setitem(sys.modules, "mylib", package)
    return package


@pytest.fixture
def registry(monkeypatch, mylib):
    """A fresh registry that knows the plugin and nothing else."""
    adapter = MyLib()
    plugin(monkeypatch, "dlx_mylib", lambda: [adapter])
    return Registry({"mylib": "dlx_mylib", "my": "dlx_mylib"})


def test_the_registry_of_a_process_is_sent_by_name():
    """A function under `dlx.using` refers to it: cloudpickle, and so ray and dask, send that to another process."""
    assert pickle.loads(pickle.dumps(loaded.registry)) is loaded.registry


def test_producer_is_found_by_type(registry):
    """The adapter that lists a type, or a base of it, knows its objects."""
    assert registry.owner(type(Array(None))).name == "mylib"
    assert registry.owner(type(Special(None))).name == "mylib"


def test_the_nearest_listed_type_wins(monkeypatch, mylib):
    """An adapter that owns a subclass is asked before the one that owns its base."""

    class Other(MyLib):
        name = "other"
        types = ("mylib.Special",)

    plugin(monkeypatch, "dlx_mylib", lambda: [MyLib(), Other()])
    registry = Registry({"mylib": "dlx_mylib"})
    assert registry.owner(type(Special(None))).name == "other"
    assert registry.owner(type(Array(None))).name == "mylib"


def test_virtual_subclasses_are_known(monkeypatch, mylib):
    """A type that is a subclass by registration only counts (jax.Array is such a base)."""
    import abc

    base = abc.ABCMeta("Base", (), {"__module__": "mylib"})
    mylib.Array = base
    registry = Registry({"mylib": "dlx_mylib"})
    plugin(monkeypatch, "dlx_mylib", lambda: [MyLib()])
    real = type("Real", (), {"__module__": "mylib.real"})
    base.register(real)
    assert registry.owner(type(real())).name == "mylib"


@pytest.mark.parametrize("to", ["mylib", "my"])
def test_target_by_name_and_alias(registry, to):
    """A target has its root package as name, and perhaps aliases."""
    assert registry.target(to).name == "mylib"


def test_target_by_module_and_type(registry, mylib):
    """A module or a listed array type names its framework."""
    assert registry.target(mylib).name == "mylib"
    assert registry.target(Array).name == "mylib"
    assert registry.target("dlx").adapter is registry.target(dlx.Tensor).adapter is strangers.TENSOR


def test_a_subclass_is_no_target(registry):
    """Only listed types are; the message says which name to use."""
    with pytest.raises(AdapterNotFoundError, match="Pass to='mylib'"):
        registry.target(Special)


@pytest.mark.parametrize("to", [3, 1.5, ["numpy"], object()])
def test_a_target_that_is_none_of_these_is_a_type_error(registry, to):
    """A wrong kind of argument is a plain TypeError."""
    with pytest.raises(TypeError, match="must be a name, a module or an array type"):
        registry.target(to)


def test_a_target_is_resolved_once(registry, mylib):
    """From then on it is looked up, and nothing is called."""
    for to in ("mylib", "my", mylib, "dlx"):
        registry.target(to)
        found = registry.target(to)  # the first one may have loaded a plugin, which forgets all answers
        assert called(registry.target, to) == ["target"]
        assert registry.target(to) is found
    registry.target(Array)
    assert called(registry.target, Array) == ["target", "is_key"]


def test_what_a_target_names_is_forgotten_when_a_plugin_is_loaded(registry, mylib):
    """Each plugin that is loaded may change the answer."""
    assert registry.target("mylib") is registry.target("mylib")
    other = MyLib()
    plugin = registry._loader.plugins["mylib"]
    plugin.adapters = ()
    plugin.load = lambda: types.SimpleNamespace(dlx_adapters=dlx.hookimpl(specname="dlx_adapters")(lambda: [other]))
    registry._loader.load("mylib")
    assert {registry.target(to).adapter for to in ("mylib", mylib, Array)} == {other}


def test_a_framework_that_is_imported_anew(monkeypatch, registry, mylib, tmp_path):
    """A target is resolved again where its package is another module, or gone; a type of the old one is no target."""
    assert [registry.target(to).name for to in ("mylib", mylib, Array) * 2] == ["mylib"] * 6
    monkeypatch.delitem(sys.modules, "mylib")
    with pytest.raises(FrameworkNotInstalledError, match="mylib is not installed"):
        registry.target("mylib")
    (tmp_path / "mylib.py").write_text("class Array: pass")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.target("mylib").name == registry.target("mylib").name == "mylib"
    assert "mylib" in sys.modules and sys.modules["mylib"] is not mylib
    assert registry.target(sys.modules["mylib"].Array).name == "mylib"
    with pytest.raises(AdapterNotFoundError, match="no adapter lists the type"):
        registry.target(Array)


def test_a_target_whose_capabilities_change_is_asked_each_time(monkeypatch, mylib):
    """The look-up is remembered, the answer is not; also where it is no target at present."""

    class Changing(MyLib):
        dtypes = DTypes("mylib", {}, switches=("taken",))

        def capabilities(self):
            return None if mylib.taken is None else Capabilities(dtypes=mylib.taken)

    adapter = Changing()
    plugin(monkeypatch, "dlx_mylib", lambda: [adapter])
    registry = Registry({"mylib": "dlx_mylib"})
    for to in ("mylib", mylib, Array) * 2:
        for taken in (frozenset({"float32"}), frozenset({"int8"})):
            mylib.taken = taken
            assert registry.target(to).capabilities.dtypes == taken
        mylib.taken = None
        with pytest.raises(AdapterNotFoundError):
            registry.target(to)
    mylib.taken = frozenset({"int8"})
    registry.target("mylib")
    assert "_by_name" not in called(registry.target, "mylib")


def test_a_target_that_is_no_key(registry, mylib):
    """What cannot be hashed, or hashes by code of its own, is answered as anything else."""

    class Odd(type):
        def __hash__(cls):
            raise RuntimeError("no hash")

    class Unhashable:
        def __hash__(self):
            raise RuntimeError("no hash")

    for _ in range(2):
        with pytest.raises(AdapterNotFoundError, match="no adapter lists the type"):
            registry.target(Odd("Strange", (), {}))
        with pytest.raises(TypeError, match="to must be a name"):
            registry.target(Unhashable())


def test_unknown_targets_name_the_known_ones(registry):
    """Whoever mistypes a name reads the list."""
    with pytest.raises(AdapterNotFoundError, match=r"unknown target 'nampy'. Known targets: .*dlx.*mylib"):
        registry.target("nampy")


def test_a_missing_framework_is_said_with_its_remedy(monkeypatch, registry):
    """FrameworkNotInstalledError, an ImportError, gives the command that installs it."""
    monkeypatch.delitem(sys.modules, "mylib")
    with pytest.raises(
        FrameworkNotInstalledError, match=r"mylib is not installed\. Install it: pip install mylib"
    ) as info:
        registry.target("mylib")
    assert isinstance(info.value, ImportError)
    assert isinstance(info.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("cause", [OSError("libx.so: cannot open"), RuntimeError("broken"), ImportError("half")])
def test_a_half_installed_framework_is_said_so(monkeypatch, registry, cause):
    """A framework whose import fails is one clear error with the cause, of a class that callers catch."""
    monkeypatch.delitem(sys.modules, "mylib")

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "mylib":
                raise cause

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(FrameworkNotInstalledError, match="installed but fails to import") as info:
        registry.target("mylib")
    assert info.value.__cause__ is cause


def raising(error):
    """Return a function that raises."""

    def hook():
        raise error

    return hook


BROKEN = {
    "hook raises": raising(ZeroDivisionError("1/0")),
    "hook raises OSError": raising(OSError("no such library")),
    "not an adapter": lambda: [object()],
    "not iterable": lambda: 3,
    "nothing": lambda: [],  # noqa: PIE807 (a type cannot be marked)
}


@pytest.mark.parametrize("hook", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plugin_breaks_nothing_else(monkeypatch, mylib, hook):
    """It is raised, with its cause, by whoever needs it, and only then; other targets go on working."""
    plugin(monkeypatch, "dlx_mylib", hook)
    registry = Registry({"mylib": "dlx_mylib", "numpy": "dlx_numpy"})
    assert registry.target("dlx").adapter is strangers.TENSOR
    assert registry.owner(bytes) is None
    for _ in range(2):  # remembered, not forgotten
        with pytest.raises(PluginError, match=r"plugin dlx_mylib \(dlxarray\) is (broken|refused)") as info:
            registry.target("mylib")
        assert info.value.__cause__ is not None
        with pytest.raises(PluginError):
            registry.owner(Array)


@pytest.mark.parametrize("error", [ImportError("no"), OSError("no"), SyntaxError("no"), RuntimeError("no")])
def test_a_plugin_that_does_not_import_is_remembered(mylib, error):
    """Whatever its import raises is the cause of the PluginError."""
    registry = Registry({"mylib": "dlx_mylib"})
    registry._loader.plugins["mylib"].load = raising(error)
    with pytest.raises(PluginError) as info:
        registry.target("mylib")
    assert info.value.__cause__ is error


def test_an_unmarked_hook_is_reported(monkeypatch, mylib):
    """Forgetting @dlx.hookimpl has a message that says so."""
    plugin(monkeypatch, "dlx_mylib", lambda: [MyLib()], mark=False)
    with pytest.raises(PluginError, match="hookimpl"):
        Registry({"mylib": "dlx_mylib"}).target("mylib")


def test_ours_are_loaded_as_theirs_are(np):
    """dlx_numpy comes through the same function and hook as a third party's module."""
    registry = Registry()
    loaded = registry._loader.load("numpy")
    assert loaded.module == "dlx_numpy"
    assert [adapter.name for adapter in loaded.adapters] == ["numpy", "numpy scalar"]


FRAMEWORK = """
__version__ = "1.0"
class Array:
    def __init__(self, tensor): self.tensor = tensor
    def __dlpack__(self, **keywords): return self.tensor.__dlpack__(**keywords)
    def __dlpack_device__(self): return (1, 0)
"""
PLUGIN = """
import dlx
from dlx.adapter import Adapter, Capabilities, Layout
class MyLib(Adapter):
    name = package = "mylib"
    types = ("mylib.Array",)
    install = "pip install mylib"
    def capabilities(self): return Capabilities(dtypes=None, layouts=Layout.ANY, min_alignment=1, keeps_readonly=True)
    def load(self, tensor):
        import mylib
        return mylib.Array(tensor)
@dlx.hookimpl
def dlx_adapters(): return [MyLib()]
"""


@pytest.fixture
def published(python, tmp_path):
    """Run code where a framework and three plugins are installed: a good one, a broken one, a stale entry point."""
    (tmp_path / "mylib.py").write_text(FRAMEWORK)
    (tmp_path / "dlx_mylib.py").write_text(PLUGIN)
    (tmp_path / "dlx_bad.py").write_text("raise OSError('bad library')")
    for name in ("mylib", "bad", "gone"):
        info = tmp_path / f"dlx_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dlx-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dlx]\n{name} = dlx_{name}\n")
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dlx, importlib.metadata\n"
    return lambda code: python(start + textwrap.dedent(code), args=())


def test_a_third_party_is_found_by_entry_point(published):
    """A published plugin works as source and target, and is loaded only when it is asked for."""
    out = published(
        """
    array = dlx.convert(bytearray(b"abc"), to="dlx")
    print("dlx_mylib" in sys.modules)
    array = dlx.convert(array, to="mylib")
    print(type(array).__name__, dlx.plan(array, to="dlx").source.framework, dlx.convert(array, to="dlx").shape)
    print("dlx_bad" in sys.modules)
    """,
    )
    assert out.split() == ["False", "Array", "mylib", "(3,)", "False"]


def test_entry_points_are_scanned_once_and_late(published):
    """Known types and targets scan nothing; the first unknown type scans, and no other scans again."""
    out = published(
        """
    calls = []
    real = importlib.metadata.entry_points
    importlib.metadata.entry_points = lambda **keywords: calls.append(keywords) or real(**keywords)
    dlx.convert(b"abc", to="dlx"); dlx.plan(memoryview(b"abc"), to="dlx"); print(len(calls))
    class Unknown: pass
    print(dlx.plan(Unknown(), to="dlx").outcome, len(calls))
    dlx.plan(Unknown(), to="nowhere"); dlx.plan(b"abc", to="mylib"); print(len(calls))
    """,
    )
    assert out.split() == ["0", "refused", "1", "1"]


def test_broken_third_parties_are_reported_by_distribution(published):
    """A plugin that fails to import, and a stale entry point, are each one PluginError that names its distribution."""
    out = published(
        """
    for name in ("bad", "gone"):
        print(dlx.plan(b"abc", to=name).error)
    print(dlx.convert(bytearray(3), to="mylib").tensor.shape)
    """,
    )
    bad, gone, shape = out.strip().splitlines()
    assert "dlx_bad (dlx-bad) is broken: OSError: bad library" in bad
    assert "dlx_gone (dlx-gone) is missing: its entry point names the module dlx_gone, which does not exist" in gone
    assert shape == "(3,)"


def test_two_adapters_for_one_name_are_both_named(monkeypatch, registry):
    """What dlx has stays; the other is remembered as broken, with both in the text."""
    import importlib.metadata

    class Entry:
        name, value = "mylib", "dlx_other"
        dist = types.SimpleNamespace(name="dlx-other")

        def load(self):
            raise AssertionError("must not be loaded")

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()])
    assert registry.target("mylib").name == "mylib"
    clash = registry.load_all()["mylib (dlx-other)"]
    assert "dlx_mylib (dlxarray) and dlx_other (dlx-other) both have an adapter for 'mylib'" in str(clash.broken)


@pytest.mark.parametrize(
    ("version", "before", "affected"),
    [
        ("2.2.4", "2.2.5", True),
        ("2.2.5", "2.2.5", False),
        ("2.2.5+cpu", "2.2.5", True),
        ("2.2.5rc1", "2.2.5", True),
        ("2.2.5.dev0+git", "2.2.5", True),
        ("2.10.0", "2.9", False),
        ("2.9", "2.9.0", False),
        ("3.0", "2.2.5", False),
        ("1.26.4", "2.0", True),
        ("2.13.0+cpu", None, True),
        ("unknown", "1.0", True),
    ],
)
def test_known_issues_are_open_until_the_fixed_version(version, before, affected):
    """Local and pre-release builds count as lower; without a known fix every version has the fault."""
    assert KnownIssue("does", "see", before=before).affects(version) is affected


def test_known_issues_lower_capabilities(monkeypatch, mylib):
    """A fault of an old version changes what the framework is trusted with."""

    class Old(MyLib):
        known_issues = (
            KnownIssue("drops the flag", "see", before="2.0", lowers={"keeps_readonly": False, "ndims": (0, 4)}),
            KnownIssue("fixed long ago", "see", before="0.5", lowers={"layouts": 0}),
        )

    plugin(monkeypatch, "dlx_mylib", lambda: [Old()])
    capabilities = Registry({"mylib": "dlx_mylib"}).target("mylib").capabilities
    assert (capabilities.keeps_readonly, capabilities.ndims, capabilities.layouts) == (False, (0, 4), Layout.ANY)


def test_capabilities_that_change_are_asked_each_time(monkeypatch, mylib):
    """An adapter that names its switches is remembered for each of their values only (jax's x64 switch)."""

    class Changing(MyLib):
        dtypes = DTypes("mylib", {}, switches=("allowed",))

        def capabilities(self):
            return Capabilities(dtypes=sys.modules[self.package].allowed)

    plugin(monkeypatch, "dlx_mylib", lambda: [Changing()])
    registry, mylib.allowed = Registry({"mylib": "dlx_mylib"}), frozenset({"float32"})
    tensor = dlx.convert(memoryview(bytes(8)).cast("d"), to="dlx")
    before = registry.target("mylib")
    assert before.check(tensor) & native.lib.DLX_INCOMPATIBLE_DTYPE
    address = before.address
    mylib.allowed = frozenset({"float64"})
    assert not registry.target("mylib").check(tensor) & native.lib.DLX_INCOMPATIBLE_DTYPE
    assert before.check(tensor) & native.lib.DLX_INCOMPATIBLE_DTYPE and before.address == address


def test_adapters_are_listed_without_their_frameworks(python):
    """dlx.adapters() gives them by name and imports no framework; asked about one that nobody imported, it says so."""
    python("""
        import sys, dlx
        found = dlx.adapters()
        assert list(found)[0] == "dlx" and {"numpy", "torch", "jax", "tvm_ffi", "pyarrow"} <= set(found)
        assert not {"numpy", "torch", "jax", "tvm_ffi", "pyarrow"} & set(sys.modules)
        try:
            found["torch"].dtypes.to_native(dlx.DType("bfloat16"))
        except dlx.errors.FrameworkNotInstalledError as error:
            assert "import torch" in str(error)
        else:
            raise SystemExit("no error")
    """)


def test_dtypes_map_both_ways(np):
    """Each adapter's table gives the framework's dtype for dlx's, and back; what a version lacks is left out."""
    dtypes = Registry().target("numpy").adapter.dtypes
    for name in dtypes.known():
        dtype = dlx.DType(name)
        assert dtypes.from_native(dtypes.to_native(dtype)) == dtype
    with pytest.raises(dlx.errors.DTypeError, match="numpy has no dtype code2_24bit"):
        dtypes.to_native(dlx.DType(2, 24, 1))


def test_torch_dtypes_map_both_ways(torch):
    """As for numpy; shells without a dtype of their own are in neither direction."""
    dtypes = Registry().target("torch").adapter.dtypes
    assert {"bfloat16", "float8_e4m3fn", "uint16", "complex32"} <= dtypes.known()
    for name in dtypes.known():
        assert dtypes.from_native(dtypes.to_native(dlx.DType(name))) == dlx.DType(name)
    assert dtypes.from_native(torch.uint4) is None


def test_devices_map_both_ways(np, torch):
    """A host device has a name in each framework; another is refused by name."""
    for name in ("numpy", "torch"):
        devices = Registry().target(name).adapter.devices
        assert devices.from_native(devices.to_native(dlx.Device("cpu"))) == (1, 0)
        with pytest.raises(dlx.errors.DeviceError, match="hexagon:1"):
            devices.to_native(dlx.Device("hexagon:1"))


def test_a_package_that_is_imported_anew_is_looked_at_anew(monkeypatch):
    """Whatever stands for the dtypes and devices of its adapter: something without attributes is left alone."""
    adapter = type("Other", (Adapter,), {"package": "dlx_made_up", "devices": {"cpu": "host"}, "dtypes": ()})()
    renewed = Registry()
    for _ in range(2):
        monkeypatch.setitem(sys.modules, "dlx_made_up", types.ModuleType("dlx_made_up"))
        before = renewed.generation
        renewed._renew(adapter)
    assert renewed.generation == before + 1


@pytest.mark.slow
def test_a_mock_of_a_framework_leaves_nothing_behind(python, torch):
    """What is computed of it is dropped when the framework itself is there, and dlx has one copy of each module."""
    out = python(
        """
        import sys
        from unittest import mock
        import dlx
        double = mock.MagicMock(__version__="2.0")
        with mock.patch.dict(sys.modules, {"torch": double}):
            assert dlx.convert(bytearray(4), to="torch") is double.from_dlpack.return_value
            dlx.adapters()["torch"].dtypes.known()
        import torch
        tensor = dlx.convert(bytearray(4), to="torch")
        assert type(tensor) is torch.Tensor and tensor.dtype == torch.uint8
        assert dlx.convert(tensor, to="dlx").shape == (4,)
        assert dlx.adapters()["torch"].dtypes.to_native(dlx.DType("float32")) is torch.float32
        with mock.patch.dict(sys.modules, {"torch": double}):
            pass
        found = dlx.adapters()
        assert not found.broken and len(found) > 5, found.broken
        print("well")
        """
    )
    assert out.strip() == "well"


def test_a_framework_that_is_imported_anew_is_asked_again(registry, mylib, monkeypatch):
    """Its adapter has computed facts of the old module."""
    adapter = registry.target("mylib").source
    assert adapter.lowered == {} and "lowered" in vars(adapter)
    other = types.ModuleType("mylib")
    other.__version__, other.Array = "2.0", Array
    monkeypatch.setitem(sys.modules, "mylib", other)
    before = registry.generation
    vars(adapter)["lowered"] = {"ndims": (0, 3)}
    assert registry.target("mylib").source is adapter
    assert adapter.lowered == {} and registry.generation != before
