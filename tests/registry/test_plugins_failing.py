"""A failing method of an adapter affects only its framework: it raises a dlx error, or has no effect."""

from __future__ import annotations

import json
import sys
import textwrap
import types

import pytest
from support.plugins.distributions import Site, adapter
from support.plugins.registries import use

import dlx
from dlx import errors
from dlx.adapter import Adapter, Devices, DTypes


def methods(kind):
    """Return the public methods of a class."""
    return sorted(name for name, value in vars(kind).items() if not name.startswith("_") and callable(value))


HOOKS = [
    *methods(Adapter),
    *(f"dtypes.{name}" for name in methods(DTypes)),
    *(f"devices.{name}" for name in methods(Devices)),
    *("streams.current", "streams.activate", "streams.ready", "arrays.consume", "arrays.restore"),
    *("is_tracing", "placement.load", "placement.is_committed"),
    *("writes.guarded", "writes.count", "writes.mark_written", "fast_path.exchange", "fast_path.guard_function"),
]

TOLD = ("describe", "export", "load", "capabilities", "variant", "copy", "arrays.consume", "devices.current",
        "placement.load", "placement.is_committed")  # fmt: skip

UNCHECKED = ("load", "copy", "placement.load", "placement.is_committed", "devices.current")
"""Hooks whose rubbish may end in an error of Python's: what they return is passed on."""

PARTS = """\
    fast_path = FastPath(types)
    dtypes, devices = DTypes(name, {'float32': 'Array'}), Devices()
    streams, writes = StreamSupport(), WriteTracking()
    arrays = Arrays(consume=lambda obj, tensor, shared: tensor)
    placement = Placement(lambda tensor, committed: sys.modules[A.package].Array(tensor), lambda obj: True)
    def capabilities"""


def module_of(hook):
    """Return the framework whose adapter has the hook."""
    return f"lib_{hook.replace('.', '_')}"


def with_hook(hook, function):
    """Return the source of a plugin whose adapter has all parts, with one replaced method or function."""
    part, _, name = hook.rpartition(".")
    if hook == "nothing":
        line = ""
    elif not part:
        line = f"A.{name} = {function}"
    elif part in ("dtypes", "devices"):
        line = f"A.{part}.__class__ = type('Part', (type(A.{part}),), {{{name!r}: {function}}})"
    else:
        line = f"A.{part} = dataclasses.replace(A.{part}, {name}={function})"
    code = adapter(module_of(hook)).replace("    def capabilities", PARTS)
    return code.replace("@dlx.hookimpl", f"import dataclasses, rubbish\n{line}\n@dlx.hookimpl")


CODE = """
    import importlib, json, numpy as np
    found = {}
    def of(name):
        lib = importlib.import_module(name)
        tensor, halves = dlx.empty((3,), "float32", "cpu"), dlx.empty((3,), "bfloat16", "cpu")
        array, theirs = lib.Array(tensor), np.zeros(3, "f4")
        def lent():
            with dlx.borrow(array): pass
        def written():
            frozen = np.zeros(3, "f4"); frozen.flags.writeable = False
            return dlx.using(name)(lambda x: x)(frozen)
        return {
            "out": lambda: dlx.convert(array, to="dlx"),
            "out to numpy": lambda: dlx.convert(array, to="numpy"),
            "out copied": lambda: dlx.convert(array, to="dlx", copy=True),
            "same": lambda: dlx.convert(array, to=name),
            "same copied": lambda: dlx.convert(array, to=name, copy=True),
            "same detached": lambda: dlx.convert(array, to=name, detach=True),
            "in": lambda: dlx.convert(tensor, to=name),
            "in from numpy": lambda: dlx.convert(theirs, to=name),
            "in by type": lambda: dlx.convert(tensor, to=lib.Array),
            "in like": lambda: dlx.convert(tensor, like=array),
            "in of another dtype": lambda: dlx.convert(halves, to=name),
            "in on a device": lambda: dlx.convert(tensor, to=name, device="cuda"),
            "tree out": lambda: dlx.convert({"x": [array, tensor]}, to="dlx"),
            "tree in": lambda: dlx.convert({"x": [array, tensor]}, to=name),
            "tree lazily": lambda: dlx.convert({"x": [array, tensor]}, to=name, lazy=True)["x"][1],
            "plan out": lambda: dlx.plan(array, to="dlx"),
            "plan in": lambda: dlx.plan(tensor, to=name),
            "plan tree": lambda: dlx.plan([tensor, array], to=name),
            "describe": lambda: dlx.describe(array),
            "shares": lambda: dlx.shares_memory(array, tensor),
            "stack out": lambda: dlx.stack([array, array], to="dlx"),
            "stack in": lambda: dlx.stack([tensor, tensor], to=name),
            "capsule": lambda: dlx.to_capsule(array),
            "borrow": lent,
            "using": lambda: dlx.using(name)(lambda x: x)(tensor),
            "using, copied": written,
            "written": lambda: dlx.using("numpy", writes=("x",))(lambda x: None)(array),
            "using numpy": lambda: dlx.using("numpy")(lambda x: x)(array),
        }
    def tell(call):
        try:
            result = call()
            error = getattr(result, "error", None)
            return "planned" if error is not None else "fine"
        except dlx.errors.DlxError as error:
            return f"{type(error).__name__}: {error}"
        except BaseException as error:
            return f"RAW {error!r}"
    for name in NAMES:
        found[name] = {what: tell(call) for what, call in of(name).items()}
    dlx.adapters()
    print(json.dumps(found))
"""


def test_a_failing_method_is_reported_by_dlx(tmp_path, np):
    """All public functions raise only errors of dlx, for each overridable method."""
    site = Site(tmp_path)
    raising = "def raising(*a, **k): raise RuntimeError(f'BOOM in {hook}')"
    site.module("rubbish", f"def boom(hook):\n    {raising}\n    return raising")
    hooks = {module_of(hook): hook for hook in ("nothing", *HOOKS)}
    for name, hook in hooks.items():
        site.module(name)
        site.plugin(f"dlx-{name}", name, with_hook(hook, f"rubbish.boom({hook!r})"))
    found = json.loads(site.run(f"NAMES = {list(hooks)}\n" + textwrap.dedent(CODE)))
    raw = {(name, what): said for name, ways in found.items() for what, said in ways.items() if said.startswith("RAW")}
    assert not raw
    sound = found.pop("lib_nothing")
    assert {what for what, said in sound.items() if said != "fine"} == {"in on a device"}
    said = {
        (name, what): text
        for name, ways in found.items()
        for what, text in ways.items()
        if text not in ("fine", "planned", sound[what].replace("lib_nothing", name))
    }
    looked_up = {key for key, text in said.items() if f"BOOM in {hooks[key[0]]}" not in text}
    assert not looked_up
    for hook in TOLD:
        assert any(name == module_of(hook) for name, _ in said), hook


def test_the_cause_of_a_failing_consumer_keeps_its_traceback(tmp_path, np):
    """On the fast path and in trees, it leads to the line that raised, without keeping memory alive."""
    site = Site(tmp_path)
    site.module("lib")
    raising = "def deep(): raise ValueError('deep')\nA.load = lambda self, tensor: deep()\n@dlx.hookimpl"
    site.plugin("dlx-lib", "lib", adapter().replace("@dlx.hookimpl", raising))
    code = """
        import gc, lib, numpy as np, traceback
        from dlx._core import native
        array = np.arange(3.0)
        for obj in (array, array, dlx.empty((3,), "int8"), [array, array], {"a": [array]}, memoryview(b"abc")):
            try: dlx.convert(obj, to="lib")
            except dlx.errors.ConversionError as error:
                frames = traceback.extract_tb(error.__cause__.__traceback__)
                print(type(obj).__name__, [frame.name for frame in frames][-1])
        del obj
        gc.collect()
        print(native.live())
    """
    names = ["ndarray", "ndarray", "Tensor", "list", "dict", "memoryview"]
    assert site.run(code).splitlines() == [*(f"{name} deep" for name in names), "0"]


RUBBISH = ("42", "-1", "'text'", "object()", "[1, 2]", "(1, 2)", "int", "Odd()", "Odd", "None")

RUBBISH_MODULE = """
value = None
class Odd:
    def __getattribute__(self, name): raise RuntimeError('no ' + name)
    __bool__ = __len__ = __iter__ = __repr__ = __eq__ = __hash__ = lambda self, *a: 1 / 0
"""


def test_a_process_survives_rubbish_from_any_hook(tmp_path, np):
    """Each hook, whatever it returns: nothing dies or leaks, and nothing but arrays and numbers reaches the caller.

    The conformance kit says which hook it is (`tests/testing/test_kit_answers.py`).
    """
    site = Site(tmp_path)
    site.module("rubbish", RUBBISH_MODULE)
    hooks = [hook for hook in HOOKS if hook != "arrays.restore"]
    for hook in hooks:
        name = module_of(hook)
        site.module(name)
        site.plugin(f"dlx-{name}", name, with_hook(hook, "lambda *a, **k: rubbish.value"))
    names = [module_of(hook) for hook in hooks]
    in_a_loop = """
    import rubbish
    every = {}
    for text in RUBBISH:
        rubbish.value = eval(text, vars(rubbish))
        for name in NAMES:
            for what, call in of(name).items():
                every[f"{text} {name} {what}"] = tell(call)
    del call
    gc.collect()
    print(json.dumps([every, native.live()]))
    """
    start, _, _ = CODE.partition("    for name in NAMES:\n")
    start = textwrap.dedent(start).replace("found = {}", "import gc\nfrom dlx._core import native")
    code = f"NAMES, RUBBISH = {names}, {RUBBISH}\n" + start + textwrap.dedent(in_a_loop)
    found, live = json.loads(site.run(code))
    raw = {key.split()[1] for key, said in found.items() if said.startswith("RAW")}
    assert raw <= {module_of(hook) for hook in UNCHECKED}, {key: said for key, said in found.items() if "RAW" in said}
    assert live == 0


def test_a_failing_restore_replaces_nothing(tmp_path):
    """The consumer's error is raised with a note; all other capsules are restored."""
    site = Site(tmp_path)
    site.module("lib")
    site.module("bad")
    raising = """
A.load = lambda self, tensor: 1 / 0
@dlx.hookimpl"""
    giving = """
A.arrays = Arrays(consume=lambda obj, tensor, shared: tensor, restore=lambda obj, tensor: [].missing)
@dlx.hookimpl"""
    site.plugin("dlx-lib", "lib", adapter().replace("@dlx.hookimpl", raising))
    site.plugin("dlx-bad", "bad", adapter("bad").replace("@dlx.hookimpl", giving))
    out = site.run(
        """
        import bad, gc, lib
        from dlx._core import native
        array = bad.Array(dlx.empty((3,), "int8"))
        capsules = [dlx.to_capsule(b"abc", max_version=(1, 0)) for _ in range(2)]
        for obj in (array, [capsules[0], array, capsules[1]], [array, array, capsules[0]], {"a": [capsules[1], array]}):
            try: dlx.convert(obj, to="lib")
            except dlx.errors.ConversionError as error:
                assert "lib refused it: ZeroDivisionError" in str(error), error
                print(getattr(error, "__notes__", None) if obj is array else "")
        print([dlx.convert(capsule, to="dlx").shape for capsule in capsules])
        del obj, array, capsules
        gc.collect()
        print(native.live())
        """
    )
    lines = out.splitlines()
    assert "bad failed to restore it: AttributeError" in lines[0]
    assert lines[-2:] == ["[(3,), (3,)]", "0"]


def test_a_description_that_raises_when_it_is_read_is_an_error_of_dlx(monkeypatch):
    """An exception of a function in `Description.info` neither escapes nor hides a refusal."""
    from support.plugins.mylib import Array, MyLib, plugin

    from dlx._registry.registry import Registry
    from dlx.adapter import Capabilities, Description

    def info():
        raise ZeroDivisionError("info")

    class Faulty(MyLib):
        def describe(self, obj):
            return Description(info, (), obj.tensor)

        def capabilities(self):
            return Capabilities(dtypes=None)

        def load(self, tensor):
            raise ZeroDivisionError("load")

    package = types.ModuleType("mylib")
    package.Array, package.__version__ = Array, "1.0"
    monkeypatch.setitem(sys.modules, "mylib", package)
    monkeypatch.setattr(Array, "__module__", "mylib")
    plugin(monkeypatch, "dlx_mylib", lambda: [Faulty()])
    use(Registry({"mylib": "dlx_mylib"}), monkeypatch.setattr)
    array = Array(dlx.from_dlpack(bytearray(8)))
    error = dlx.plan(array, to="dlx").error
    assert type(error) is errors.ConversionError and "mylib failed: ZeroDivisionError: info" in str(error)
    with pytest.raises(errors.ConversionError, match="mylib refused it: ZeroDivisionError: load") as caught:
        dlx.convert.__wrapped__(bytearray(8), to="mylib")
    assert caught.value.source == "bytearray (uint8[8])"
    with pytest.raises(errors.ConversionError, match="mylib refused it: ZeroDivisionError: load") as caught:
        dlx.convert.__wrapped__(array, to="mylib", copy=True)
    assert caught.value.source == "mylib.Array"


def test_a_failing_consumer_of_a_tree_names_its_array(np, monkeypatch):
    """Not the tensor that dlx has made of it: its cast, or that of a table's column."""
    from support.plugins.mylib import Array, MyLib, plugin

    from dlx._registry.registry import Registry

    class Faulty(MyLib):
        def load(self, tensor):
            raise ZeroDivisionError("load")

    pa, package = pytest.importorskip("pyarrow"), types.ModuleType("mylib")
    package.Array, package.__version__ = Array, "1.0"
    monkeypatch.setitem(sys.modules, "mylib", package)
    monkeypatch.setattr(Array, "__module__", "mylib")
    plugin(monkeypatch, "dlx_mylib", lambda: [Faulty()])
    dlx.convert([np.ones(2)], to="numpy", errors="pass")  # loads all modules that use the registry
    use(Registry({"mylib": "dlx_mylib", "numpy": "dlx_adapters.dlx_numpy"}), monkeypatch.setattr)
    for tree, source in (([np.ones(2)], "numpy.ndarray (float64[2])"), (pa.table({"a": [1.0]}), "pyarrow.lib.Table")):
        with pytest.raises(errors.ConversionError, match="mylib refused it: ZeroDivisionError: load") as caught:
            dlx.convert(tree, to="mylib", strict=True, dtype="float32" if type(tree) is list else None)
        assert caught.value.source.startswith(source)
