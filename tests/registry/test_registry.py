"""The registry: lazy discovery and loading of plugins, broken plugins, targets by name, module and type."""

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
    """Create an importable framework `mylib` and a plugin `dlx_mylib`."""
    package = types.ModuleType("mylib")
    package.__version__ = "1.0"
    package.Array, package.Special = Array, Special
    monkeypatch.setattr(Array, "__module__", "mylib")
    monkeypatch.setattr(Special, "__module__", "mylib")
    monkeypatch.setitem(sys.modules, "mylib", package)
    return package


@pytest.fixture
def registry(monkeypatch, mylib):
    """Return a new registry with this plugin only."""
    adapter = MyLib()
    plugin(monkeypatch, "dlx_mylib", lambda: [adapter])
    return Registry({"mylib": "dlx_mylib", "my": "dlx_mylib"})


def test_the_registry_of_a_process_is_sent_by_name():
    """Functions under `dlx.using` refer to it, and cloudpickle (ray, dask) pickles these."""
    assert pickle.loads(pickle.dumps(loaded.registry)) is loaded.registry


def test_producer_is_found_by_type(registry):
    """An adapter is found by a listed type or its subclass."""
    assert registry.owner(type(Array(None))).name == "mylib"
    assert registry.owner(type(Special(None))).name == "mylib"


def test_the_nearest_listed_type_wins(monkeypatch, mylib):
    """The adapter of a subclass has precedence over the adapter of its base."""

    class Other(MyLib):
        name = "other"
        types = ("mylib.Special",)

    plugin(monkeypatch, "dlx_mylib", lambda: [MyLib(), Other()])
    registry = Registry({"mylib": "dlx_mylib"})
    assert registry.owner(type(Special(None))).name == "other"
    assert registry.owner(type(Array(None))).name == "mylib"


def test_virtual_subclasses_are_known(monkeypatch, mylib):
    """Registered subclasses count (jax.Array is such a base)."""
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
    """A target's name is its root package; it may have aliases."""
    assert registry.target(to).name == "mylib"


def test_target_by_module_and_type(registry, mylib):
    """A module or a listed array type is also a target."""
    assert registry.target(mylib).name == "mylib"
    assert registry.target(Array).name == "mylib"
    assert registry.target("dlx").adapter is registry.target(dlx.Tensor).adapter is strangers.TENSOR


def test_a_subclass_is_no_target(registry):
    """Only listed types are targets; the message suggests the name."""
    with pytest.raises(AdapterNotFoundError, match="Pass to='mylib'"):
        registry.target(Special)


@pytest.mark.parametrize("to", [3, 1.5, ["numpy"], object()])
def test_a_target_that_is_none_of_these_is_a_type_error(registry, to):
    """An argument of another type is a TypeError."""
    with pytest.raises(TypeError, match="must be a name, a module or an array type"):
        registry.target(to)


def test_a_target_is_resolved_once(registry, mylib):
    """Later calls only read the cache."""
    for to in ("mylib", "my", mylib, "dlx"):
        registry.target(to)
        found = registry.target(to)  # the first one may have loaded a plugin, which forgets all answers
        assert called(registry.target, to) == ["target"]
        assert registry.target(to) is found
    registry.target(Array)
    assert called(registry.target, Array) == ["target", "is_key"]


def test_what_a_target_names_is_forgotten_when_a_plugin_is_loaded(registry, mylib):
    """Loading a plugin clears the cache of targets."""
    assert registry.target("mylib") is registry.target("mylib")
    other = MyLib()
    plugin = registry._loader.plugins["mylib"]
    plugin.adapters = ()
    plugin.load = lambda: types.SimpleNamespace(dlx_adapters=dlx.hookimpl(specname="dlx_adapters")(lambda: [other]))
    registry._loader.load("mylib")
    assert {registry.target(to).adapter for to in ("mylib", mylib, Array)} == {other}


def test_a_framework_that_is_imported_anew(monkeypatch, registry, mylib, tmp_path):
    """A target is resolved again if its module was replaced or removed; old types are not targets."""
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
    """The look-up is cached but not its result, even if it cannot be a target now."""

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
    """Unhashable objects and custom hashes are handled like other objects."""

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
    with pytest.raises(AdapterNotFoundError, match=r"unknown target 'nampy'. Use one of: .*dlx.*mylib"):
        registry.target("nampy")


def test_a_missing_framework_is_said_with_its_remedy(monkeypatch, registry):
    """FrameworkNotInstalledError, an ImportError, contains the install command."""
    monkeypatch.delitem(sys.modules, "mylib")
    with pytest.raises(
        FrameworkNotInstalledError, match=r"mylib is not installed\. Install it: pip install mylib"
    ) as info:
        registry.target("mylib")
    assert isinstance(info.value, ImportError)
    assert isinstance(info.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("cause", [OSError("libx.so: cannot open"), RuntimeError("broken"), ImportError("half")])
def test_a_half_installed_framework_is_said_so(monkeypatch, registry, cause):
    """A failing import of a framework is one error with the cause."""
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
    """The error and its cause are raised only if the plugin is needed; other targets work."""
    plugin(monkeypatch, "dlx_mylib", hook)
    registry = Registry({"mylib": "dlx_mylib", "numpy": "dlx_adapters.dlx_numpy"})
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
    """The exception of its import is the cause of the PluginError."""
    registry = Registry({"mylib": "dlx_mylib"})
    registry._loader.plugins["mylib"].load = raising(error)
    with pytest.raises(PluginError) as info:
        registry.target("mylib")
    assert info.value.__cause__ is error


def test_an_unmarked_hook_is_reported(monkeypatch, mylib):
    """A missing @dlx.hookimpl has its own message."""
    plugin(monkeypatch, "dlx_mylib", lambda: [MyLib()], mark=False)
    with pytest.raises(PluginError, match="hookimpl"):
        Registry({"mylib": "dlx_mylib"}).target("mylib")


def test_ours_are_loaded_as_theirs_are(np):
    """dlx_numpy is loaded by the same function and hook as a third party's module."""
    registry = Registry()
    loaded = registry._loader.load("numpy")
    assert loaded.module == "dlx_adapters.dlx_numpy"
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
    """Run code with a framework and three plugins: a valid one, a broken one, a stale entry point."""
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
    """An installed plugin works as source and target, and is loaded only on demand."""
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
    """The first unknown type scans the entry points; known types and targets never do."""
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
    """A failing import and a stale entry point are each a PluginError with the distribution's name."""
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
    """The built-in one stays; the other is recorded as broken, with both names."""
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
    """Local and pre-release builds count as lower; without a fixed version, all versions are affected."""
    assert KnownIssue("does", "see", before=before).affects(version) is affected


def test_known_issues_lower_capabilities(monkeypatch, mylib):
    """A known issue of an old version changes the capabilities."""

    class Old(MyLib):
        known_issues = (
            KnownIssue("drops the flag", "see", before="2.0", lowers={"keeps_readonly": False, "ndims": (0, 4)}),
            KnownIssue("fixed long ago", "see", before="0.5", lowers={"layouts": 0}),
        )

    plugin(monkeypatch, "dlx_mylib", lambda: [Old()])
    capabilities = Registry({"mylib": "dlx_mylib"}).target("mylib").capabilities
    assert (capabilities.keeps_readonly, capabilities.ndims, capabilities.layouts) == (False, (0, 4), Layout.ANY)


def test_capabilities_that_change_are_asked_each_time(monkeypatch, mylib):
    """Capabilities are cached by the values of an adapter's switches (jax's x64 switch)."""

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
    """dlx.adapters() imports no framework; dtypes of one that is not imported raise."""
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
    """Each adapter converts dtypes in both directions; missing dtypes of a version are ignored."""
    dtypes = Registry().target("numpy").adapter.dtypes
    for name in dtypes.known():
        dtype = dlx.DType(name)
        assert dtypes.from_native(dtypes.to_native(dtype)) == dtype
    with pytest.raises(dlx.errors.DTypeError, match="numpy has no dtype code2_24bit"):
        dtypes.to_native(dlx.DType(2, 24, 1))


def test_torch_dtypes_map_both_ways(torch):
    """They map like numpy's; dtypes without a DLPack equivalent are in neither direction."""
    dtypes = Registry().target("torch").adapter.dtypes
    assert {"bfloat16", "float8_e4m3fn", "uint16", "complex32"} <= dtypes.known()
    for name in dtypes.known():
        assert dtypes.from_native(dtypes.to_native(dlx.DType(name))) == dlx.DType(name)
    assert dtypes.from_native(torch.uint4) is None


def test_devices_map_both_ways(np, torch):
    """The host has a name in each framework; unsupported devices are refused by name."""
    for name in ("numpy", "torch"):
        devices = Registry().target(name).adapter.devices
        assert devices.from_native(devices.to_native(dlx.Device("cpu"))) == (1, 0)
        with pytest.raises(dlx.errors.DeviceError, match="hexagon:1"):
            devices.to_native(dlx.Device("hexagon:1"))


def test_a_package_that_is_imported_anew_is_looked_at_anew(monkeypatch):
    """Cached properties of dtypes and devices are cleared; objects without `__dict__` are ignored."""
    adapter = type("Other", (Adapter,), {"package": "dlx_made_up", "devices": {"cpu": "host"}, "dtypes": ()})()
    renewed = Registry()
    for _ in range(2):
        monkeypatch.setitem(sys.modules, "dlx_made_up", types.ModuleType("dlx_made_up"))
        before = renewed.generation
        renewed._renew(adapter)
    assert renewed.generation == before + 1


@pytest.mark.slow
def test_a_mock_of_a_framework_leaves_nothing_behind(python, torch):
    """Its cached data is cleared once the framework is imported; dlx keeps one copy of each module."""
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
    """Its adapter has cached data of the old module."""
    adapter = registry.target("mylib").source
    assert adapter.lowered == {} and "lowered" in vars(adapter)
    other = types.ModuleType("mylib")
    other.__version__, other.Array = "2.0", Array
    monkeypatch.setitem(sys.modules, "mylib", other)
    before = registry.generation
    vars(adapter)["lowered"] = {"ndims": (0, 3)}
    assert registry.target("mylib").source is adapter
    assert adapter.lowered == {} and registry.generation != before


def test_targets_are_forgotten_by_another_thread(np, monkeypatch):
    """A look-up that is in progress keeps the targets that it found."""

    class Overtaken(dict):
        def __contains__(self, key):
            found = super().__contains__(key)
            loaded.registry._forget()  # as another thread does
            return found

    adapter = loaded.registry.target("numpy").adapter
    target = loaded.registry.ready(adapter)
    monkeypatch.setattr(loaded.registry, "_ready", Overtaken(loaded.registry._ready))
    assert loaded.registry.ready(adapter) is target
