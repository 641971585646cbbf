"""An adapter whose method raises hurts its own framework only: an error of dlx that says it, or no effect at all."""

from __future__ import annotations

import json
import textwrap

from test_plugins import Site, adapter

from dlx.adapter import Adapter

METHODS = sorted(name for name, value in vars(Adapter).items() if not name.startswith("_") and callable(value))

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


def test_a_failing_method_is_told_by_dlx(tmp_path, python, np):
    """Every public way in, for each method that an adapter may override: nothing but errors of dlx comes out."""
    site = Site(tmp_path, python)
    for method in ("nothing", *METHODS):
        name = f"lib_{method}"
        site.module(name)
        code = adapter(name).replace(
            "    priority = 0\n",
            f"    priority = 0\n    lane = ('{name}.Array',)\n    dtypes = {{'float32': 'Array'}}\n",
        )
        raising = f"def boom(self, *a, **k): raise RuntimeError('BOOM in {method}')\nA.{method} = boom\n@dlx.hookimpl"
        site.plugin(f"dlx-{method}", name, code if method == "nothing" else code.replace("@dlx.hookimpl", raising))
    names = [f"lib_{method}" for method in ("nothing", *METHODS)]
    found = json.loads(site.run(f"NAMES = {names}\n" + textwrap.dedent(CODE)))
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
    looked_up = {key for key, text in said.items() if f"BOOM in {key[0].removeprefix('lib_')}" not in text}
    assert {name for name, _ in looked_up} <= {"lib_classes"}  # types that cannot be looked up are none
    for method in ("examine", "info", "export", "load", "accepts", "current", "take", "holds", "clone", "check"):
        assert any(name == f"lib_{method}" for name, _ in said), method


def test_the_cause_of_a_failing_consumer_keeps_its_traceback(tmp_path, python, np):
    """By the fast path too, for arrays and in trees: it leads to the line that raised, and holds no memory for ever."""
    site = Site(tmp_path, python)
    site.module("lib")
    raising = "def deep(): raise ValueError('deep')\nA.load = lambda self, tensor: deep()\n@dlx.hookimpl"
    site.plugin("dlx-lib", "lib", adapter().replace("@dlx.hookimpl", raising))
    code = """
        import gc, lib, numpy as np, traceback
        from dlx import native
        array = np.arange(3.0)
        for obj in (array, array, dlx.empty((3,), "int8"), [array, array], {"a": [array]}, memoryview(b"abc")):
            try: dlx.convert(obj, to="lib")
            except dlx.errors.ConversionError as error:
                print(type(obj).__name__, [frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)][-1])
        del obj
        gc.collect()
        print(native.live())
    """
    names = ["ndarray", "ndarray", "Tensor", "list", "dict", "memoryview"]
    assert site.run(code).splitlines() == [*(f"{name} deep" for name in names), "0"]
