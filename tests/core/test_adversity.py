"""Objects, adapters and environments that misbehave cause neither crashes, nor foreign exceptions, nor leaks."""

from __future__ import annotations

import ctypes
import importlib.metadata
import threading
import weakref

import pytest
from support.plugins.mylib import MyLib, plugin
from support.plugins.registries import use

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry.registry import Registry
from dlx.adapter import Adapter, Capabilities, Description, DType, over_memory

pytest_plugins: list[str] = []


@pytest.mark.parametrize("copy", [0, 1, "no", 2])
def test_copy_is_a_bool_or_none(copy):
    """An object that only looks like False does not mean 'copy if needed'."""
    with pytest.raises(ValueError, match="copy must be"):
        dlx.convert(b"abc", to="dlx", copy=copy)


@pytest.mark.parametrize("value", [0, 1, "no", None, [1, 2]], ids=str)
@pytest.mark.parametrize("flag", ["detach", "lazy", "strict"])
def test_flags_are_bools(np, flag, value):
    """An array has no truth value."""
    value = np.array(value) if isinstance(value, list) else value
    for obj in (np.ones(2), [np.ones(2)], {"a": np.ones(2)}):
        for call in (dlx.convert, dlx.plan):
            with pytest.raises(ValueError, match=f"{flag} must be True or False, found"):
                call(obj, to="dlx", **{flag: value})


@pytest.mark.parametrize("flag", ["detach", "lazy", "grad"])
def test_flags_of_a_decorator_are_bools(np, flag):
    """The decorator raises where it is applied, not when the function is called."""
    with pytest.raises(ValueError, match=f"{flag} must be True or False, found"):
        dlx.using("dlx", **{flag: np.array([1, 2])})


def test_an_array_of_two_numbers_is_no_device(np):
    """Only a tuple or a list is a pair (type, id)."""
    for pair in (np.array([2, 1]), range(1, 3), {1: 0, 2: 0}):
        with pytest.raises(errors.DeviceError, match="is not a device"):
            dlx.Device(pair)
        with pytest.raises(errors.DeviceError, match="is not a device"):
            dlx.convert(np.ones(2), to="dlx", device=pair)
    assert dlx.Device([2, 1]) == dlx.Device((2, 1)) == (2, 1)


def test_copy_true_copies_what_an_interface_shares(np):
    """Memory behind an array interface is shared, even if each access creates a new wrapper."""

    class View:
        buffer = bytearray(8)

        @property
        def __array_interface__(self):
            return {"version": 3, "shape": (8,), "typestr": "|u1", "data": memoryview(self.buffer)}

    view = View()
    copied, shared = dlx.convert(view, "numpy", copy=True), dlx.convert(view, "numpy", copy=False)
    view.buffer[0] = 7
    assert (copied[0], shared[0]) == (0, 7)


def test_pixels_are_written_out_once():
    """An object that encodes its pixels on each access of its interface is accessed once."""

    class Image:
        asked = 0

        @property
        def __array_interface__(self):
            self.asked += 1
            return {"version": 3, "shape": (3,), "typestr": "|u1", "data": bytes(3)}

    image = Image()
    assert dlx.convert(image, to="dlx").shape == (3,) and image.asked == 1
    assert dlx.plan(image, to="dlx").outcome == "copied"


def test_proxies_are_refused(np):
    """A weak proxy does not keep its memory alive."""
    array = np.arange(3.0)
    with pytest.raises(errors.AdapterNotFoundError, match="Convert the object itself"):
        dlx.convert(weakref.proxy(array), to="dlx")


def test_padded_elements_do_not_pass_a_legacy_capsule():
    """Without the flag, a padded tensor would be read as a packed one."""
    padded = native.tensor_new(256, (4,), None, (0, 4, 1), (1, 0), dlx._core.types.SUBBYTE_PADDED, None)
    for options in ({}, {"copy": True}):
        with pytest.raises(errors.ProtocolError, match="padded"):
            padded.__dlpack__(**options)
    assert padded.__dlpack__(max_version=(1, 0)) is not None


def test_numbers_that_run_python_while_read(python):
    """A sequence that changes while it is read is read in its original state."""
    python("""
        from dlx.adapter import DType, Device, over_memory
        class Evil:
            def __index__(self): shape.clear(); return 1
        shape = [Evil(), Evil(), Evil()]
        print(over_memory(1 << 20, shape, None, DType("uint8"), Device("cpu"), owner=b"").shape)
    """)


def test_long_chains_are_released(python, np):
    """Releasing 200 000 nested views does not overflow the stack."""
    python(
        """
        import numpy as np, dlx
        x = dlx.convert(np.ones(3), "dlx")
        for _ in range(200_000):
            x = dlx._core.native.tensor_view(x, None, None, None, x)
        del x
        assert dlx._core.native.live() == 0
        """
    )


def test_an_unknown_device_is_not_guessed(torch, np):
    """A tensor on a device without memory is neither moved to the host, nor used as an example."""
    meta = torch.empty(3, device="meta")
    for call in (
        lambda: dlx.convert(meta, to="torch", device="cpu"),
        lambda: dlx.convert(np.ones(2), like=meta),
    ):
        with pytest.raises(errors.ConversionError, match=r"meta|device"):
            call()
    assert dlx.plan(meta, to="torch", device="cpu").outcome == "refused"
    assert dlx.convert(meta, to="torch") is meta


def test_the_host_is_one_device(np):
    """A framework ignores the id of the host; a dlx.Tensor keeps it."""
    array = np.ones(2)
    assert dlx.convert(array, to="numpy", device="cpu:1") is array
    assert dlx.plan(array, to="dlx", device="cpu:1").outcome == "shared"
    for like in ({"device": "cpu:1"}, {"device": (1, 1)}, {"device": dlx.Device("cpu:1")}):
        tensor = dlx.convert(array, to="dlx", copy=False, **like)
        assert tensor.device == (1, 1) and tensor.data_ptr == array.ctypes.data
        copy = dlx.convert(tensor, to="dlx", copy=True, **like)
        assert copy.device == (1, 1) and copy.data_ptr != tensor.data_ptr
        assert dlx.convert(tensor, to="dlx", **like) is tensor
        assert dlx.convert(array, like=tensor).device == (1, 1)
    assert dlx.convert(tensor, to="dlx", device="cpu:2").device == (1, 2)
    assert dlx.convert(tensor, to="numpy", device="cpu", copy=False).ctypes.data == array.ctypes.data


def test_arrays_on_devices_of_the_host_are_stacked(np):
    """They share memory; other differences are still reported."""
    far = dlx.convert(np.arange(4.0), to="dlx", device="cpu:1")
    assert dlx.stack([np.ones(4), far], "numpy").tolist() == [[1.0] * 4, [0.0, 1.0, 2.0, 3.0]]
    assert dlx.stack([far, np.ones(4)], "dlx", device="cpu:1").device == (1, 1)
    assert dlx.stack([far, far], "dlx").device == (1, 0)
    with pytest.raises(errors.LayoutError, match=r"arrays\[1\].*its shape is \(5,\)"):
        dlx.stack([far, np.ones(5)], "numpy")
    with pytest.raises(errors.DeviceError, match=r"arrays\[1\].*its device is cuda_host"):
        dlx.stack([far, dlx.from_pointer(far.data_ptr, (4,), "float64", device="cuda_host", owner=far)], "numpy")
    packed, padded = (dlx.convert(np.array(x, "uint8"), to="dlx") for x in ([0x21], [3, 4]))
    packed = dlx._core.native.tensor_new(packed.data_ptr, (2,), None, (1, 4, 1), (1, 0), 0, packed)
    padded = dlx._core.native.tensor_new(padded.data_ptr, (2,), None, (1, 4, 1), (1, 1), 4, padded)
    for rows, whole in (([packed, padded], b"\x21\x43"), ([padded, packed], bytes([3, 4, 1, 2]))):  # as the first one
        found = dlx.stack(rows, "dlx")
        assert found.shape == (2, 2) and ctypes.string_at(found.data_ptr, len(whole)) == whole


def test_tracing_modes_do_not_hinder(torch):
    """A plain tensor is converted while torch traces something else."""
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    plain = torch.arange(4.0)
    with fake.FakeTensorMode():
        assert dlx.convert(plain, to="dlx").shape == (4,)
    seen = []
    torch.func.grad(lambda x: (seen.append(dlx.convert(plain, to="dlx").shape), x.sum())[1])(torch.ones(2))
    assert seen == [(4,)]


def test_strides_that_are_never_taken_do_not_matter(np):
    """A structure's field with at most one element is shared."""
    field = np.zeros(3, [("a", "i1"), ("b", "f8")])["b"]
    assert dlx.plan(field[:1], to="dlx", copy=False).outcome == "shared"
    assert dlx.plan(field[:0], to="dlx", copy=False).outcome == "shared"
    assert dlx.plan(field, to="dlx", copy=False).outcome == "refused"


def test_a_type_that_learns_new_keywords_is_asked_anew(counting):
    """Replacing a type's __dlpack__ resets its known keywords."""

    class Producer:
        def __dlpack__(self):
            return counting.capsule((2,), legacy=True)

    dlx.convert(Producer(), to="dlx")
    seen = []
    Producer.__dlpack__ = lambda self, *, max_version=None: seen.append(max_version) or counting.capsule((2,))
    dlx.convert(Producer(), to="dlx")
    assert seen == [(1, 3)]


def test_device_memory_without_a_word_is_refused(counting):
    """A producer that hides its device is detected by its capsule."""

    class Hidden:
        def __dlpack__(self, **keywords):
            return counting.capsule((2,), device=(2, 0))

    with pytest.raises(errors.DeviceError, match="no CUDA driver"):
        dlx.convert(Hidden(), to="dlx")


@pytest.mark.parametrize("numbers", [(1.9, 0.5), ("a", 0), (1,), (1, 2, 3)])
def test_devices_are_whole_numbers(numbers):
    """No number is rounded to a device."""
    with pytest.raises(errors.DeviceError):
        dlx.Device(numbers)


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mylib(monkeypatch):
    """A framework for which a plugin can be created."""
    import sys
    import types

    package = types.ModuleType("mylib")
    package.__version__ = "1.0"
    package.Array = type("Array", (), {"__module__": "mylib"})
    monkeypatch.setitem(sys.modules, "mylib", package)
    return package


@pytest.mark.parametrize(
    "stated",
    [
        lambda: 1 / 0,
        lambda: Capabilities(dtypes=frozenset(f"uint{n}" for n in range(1, 70))),
        lambda: Capabilities(dtypes=None, device_types=frozenset({40})),
    ],
    ids=["raises", "too many dtypes", "no device type"],
)
def test_an_adapter_that_cannot_say_what_it_accepts(monkeypatch, mylib, stated):
    """Raises a PluginError that names the adapter, not a foreign exception."""
    adapter = MyLib()
    adapter.capabilities = stated
    plugin(monkeypatch, "dlx_mylib", lambda: [adapter])
    with pytest.raises(PluginErrorType, match="the mylib adapter cannot return its capabilities"):
        Registry({"mylib": "dlx_mylib"}).target("mylib")


PluginErrorType = errors.PluginError


def test_one_module_may_answer_to_several_names(monkeypatch, mylib):
    """Two entry points with one value are one plugin; each of its adapters is a target by its name."""

    class Second(MyLib):
        name = "second"

    plugin(monkeypatch, "dlx_mylib", lambda: [MyLib(), Second()])

    class Entry:
        value, dist = "dlx_mylib", None

        def __init__(self, name):
            self.name = name

        def load(self):
            return importlib.import_module(self.value)

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry("mylib"), Entry("second")])
    registry = Registry({})
    assert (registry.target("mylib").name, registry.target("second").name) == ("mylib", "second")


def test_broken_metadata_of_others_breaks_nothing(monkeypatch):
    """Unreadable entry points are recorded; the error for an unknown type stays the same."""

    def entry_points(group):
        raise TypeError("malformed")

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    registry = Registry()
    assert registry.owner(object) is None
    assert any(isinstance(found.broken, TypeError) for found in registry.load_all().values())


def test_threads_load_a_plugin_once(monkeypatch, mylib):
    """Concurrent first uses get the same adapter."""
    for _ in range(50):
        plugin(monkeypatch, "dlx_mylib", lambda: [MyLib()])
        registry, found, barrier = Registry({"mylib": "dlx_mylib"}), [], threading.Barrier(4)

        def use(registry=registry, found=found, barrier=barrier):
            barrier.wait()
            found.append(registry.target("mylib").adapter)

        threads = [threading.Thread(target=use) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(found) == 4 and len(set(map(id, found))) == 1


def test_a_failed_hand_over_is_undone_by_the_adapter(monkeypatch, np):
    """`restore` is called after any failure of `consume`."""
    from dlx._registry import generic as strangers
    from dlx._registry.registry import registry
    from dlx.adapter import Arrays

    calls = []
    arrays = Arrays(consume=lambda obj, tensor, shared: tensor, restore=lambda obj, tensor: calls.append(obj))
    monkeypatch.setattr(strangers.BUFFER, "arrays", arrays)
    numpy_adapter = registry.target("numpy").adapter
    monkeypatch.setattr(numpy_adapter, "load", lambda tensor: 1 / 0)
    with pytest.raises(errors.ConversionError, match="numpy refused it: ZeroDivisionError"):
        dlx.convert.__wrapped__(b"abc", to="numpy")
    assert calls == [b"abc"]


@pytest.mark.parametrize(
    "kind",
    [
        lambda: type("NoModule", (), {"__module__": None}),
        lambda: type("Meta", (type,), {"__getattr__": lambda cls, name: 1 / 0})("Odd", (), {}),
    ],
    ids=["no module", "raising metaclass"],
)
def test_odd_types_are_no_arrays(kind):
    """A type that raises on inspection is reported like any other type."""
    with pytest.raises(errors.DlxError):
        dlx.convert(kind()(), to="dlx")


def test_an_adapter_needs_no_description_for_a_copying_resolution(monkeypatch, mylib):
    """If only a conversion can decide, a plan says 'unknown'."""
    from dlx.adapter import Blocker

    class Opaque(MyLib):
        def describe(self, obj):
            return Description(blockers=(Blocker("it is scrambled", resolution=lambda obj: obj, needs="copy"),))

        def export(self, obj, *, stream=None):
            return over_memory(256, (0,), None, DType("uint8"), dlx.Device("cpu"), owner=obj)

    plugin(monkeypatch, "dlx_mylib", lambda: [Opaque()])
    use(Registry({"mylib": "dlx_mylib"}), monkeypatch.setattr)
    array = mylib.Array()
    assert dlx.plan(array, to="dlx").outcome == "unknown"
    assert dlx.convert.__wrapped__(array, to="dlx").shape == (0,)


def test_base_adapter_refuses_by_default():
    """An adapter without declarations supports nothing."""
    assert Adapter().capabilities() is None
    assert Adapter().describe(object()) == Description()
    for call in (MyLib.__base__.copy, MyLib.__base__.load):
        with pytest.raises(NotImplementedError):
            call(MyLib(), object())
