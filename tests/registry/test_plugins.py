"""The plugin contract, tested with small real distributions.

Each test writes frameworks and plugins with their metadata into a folder, and runs code in a fresh process that has
this folder on its path: nothing of dlx is patched.
"""

from __future__ import annotations

import inspect
import json
import textwrap

import pytest
from support.plugins.distributions import FRAMEWORK, Site, adapter

import dlx
from dlx.adapter import hookspecs


@pytest.fixture
def site(tmp_path):
    """Return a folder with the framework `lib` and no plugin."""
    made = Site(tmp_path)
    made.module("lib")
    return made


# ---- the contract ----------------------------------------------------------------------------------------------------


def test_there_is_one_hook_and_it_takes_nothing():
    """The hook never gets parameters; extensions go into `Adapter`."""
    hooks = [name for name in vars(hookspecs) if name.startswith("dlx_")]
    assert hooks == ["dlx_adapters"]
    assert not inspect.signature(hookspecs.dlx_adapters).parameters


def test_a_plugin_with_containers_only(site):
    """An adapter without arrays is not a target, but its containers convert."""
    site.plugin(
        "dlx-lib",
        "lib",
        """
        import dlx
        from dlx.adapter import Adapter, Container
        class Bags(Adapter):
            name = package = "lib"
            containers = (
                Container(
                    types=("lib.Bag",),
                    flatten=lambda bag: (None, list(bag.items)),
                    unflatten=lambda bag, keys, children, blank: type(bag)(children),
                ),
            )
        @dlx.hookimpl
        def dlx_adapters(): return [Bags()]
        """,
    )
    out = site.run(
        """
        import lib
        bag = dlx.convert(lib.Bag([bytearray(b"ab"), dlx.empty((3,), "int8", "cpu")]), to="dlx")
        print(type(bag).__name__, [type(each).__name__ for each in bag.items])
        print(dlx.plan(b"ab", to="lib").error)
        view = dlx.convert(lib.Bag([dlx.empty((3,), "int8", "cpu")]), to="dlx", lazy=True)
        print(dlx.adapters()["lib"].capabilities())
        """
    )
    lines = out.splitlines()
    assert lines[0] == "Bag ['bytearray', 'Tensor']"
    assert "'lib' is a source, but not a target" in lines[1]
    assert lines[2] == "None"


# ---- found and loaded late -------------------------------------------------------------------------------------------


def test_nothing_is_loaded_until_its_package_is_needed(site):
    """Only a type of the package, the target or a listing loads it, not other conversions or unknown types."""
    for name in ("lib", "other"):
        site.module(name)
        site.plugin(f"dlx-{name}", name, adapter(name))
    out = site.run(
        """
        def loaded(): return [name for name in ("dlx_lib", "dlx_other", "lib", "other") if name in sys.modules]
        dlx.convert(bytearray(3), to="dlx"); dlx.plan(object(), to="dlx")
        class Mine: pass
        dlx.plan(Mine(), to="dlx"); dlx.plan(b"", to="nowhere")
        print(loaded())
        import lib
        print(loaded())
        tensor = dlx.empty((3,), "int8", "cpu")
        dlx.convert(lib.Array(tensor), to="dlx"); print(loaded())
        dlx.adapters(); print(loaded())
        """
    )
    assert out.splitlines() == [
        "[]",
        "['lib']",
        "['dlx_lib', 'lib']",
        "['dlx_lib', 'dlx_other', 'lib']",
    ]


def test_a_type_registered_with_a_base_of_an_imported_package(site):
    """A virtual subclass does not name its base's package: plugins of imported packages are loaded."""
    site.module("lib", "import abc\nclass Array(abc.ABC):\n    pass\n")
    site.module("other")
    site.plugin("dlx-lib", "lib", adapter())
    site.plugin("dlx-other", "other", adapter("other"))
    out = site.run(
        """
        import lib
        class Duck:
            def __init__(self): self.tensor = dlx.empty((3,), "int8", "cpu")
        lib.Array.register(Duck)
        print(dlx.convert(Duck(), to="dlx").shape, "dlx_lib" in sys.modules, "dlx_other" in sys.modules)
        """
    )
    assert out == "(3,) True False"


def test_a_type_of_a_private_module(site):
    """A type with another `__module__` than its listed name is found if the framework is imported."""
    site.module("lib", FRAMEWORK + "Array.__module__ = '_libcore'\nArray.__dlpack__ = lambda self, **keywords: 1 / 0\n")
    site.plugin("dlx-lib", "lib", adapter())
    out = site.run(
        """
        import lib
        print(dlx.describe(lib.Array(dlx.empty((3,), "int8", "cpu"))).framework)
        """
    )
    assert out == "lib"


def test_a_framework_in_a_namespace_package(site):
    """The entry's name may be a dotted package, so that packages of one company do not conflict."""
    (site.path / "company").mkdir()
    for name in ("arrays", "tensors"):
        (site.path / "company" / f"{name}.py").write_text(FRAMEWORK)
        site.plugin(f"dlx-{name}", f"company.{name}", adapter(f"company.{name}"))
    out = site.run(
        """
        array = dlx.convert(bytearray(3), to="company.arrays")
        print(type(array).__module__, dlx.describe(array).framework, "dlx_tensors" in sys.modules)
        print(type(dlx.convert(array, to="company.tensors")).__module__, len(dlx.adapters().broken))
        import company.tensors
        print(type(dlx.convert(array, to=company.tensors)).__module__)
        print(dlx.plan(array, to=type("Sub", (company.arrays.Array,), {})).error)
        """
    )
    first, second, third, error = out.splitlines()
    assert (first, second, third) == (
        "company.arrays company.arrays False",
        "company.tensors 0",
        "company.tensors",
    )
    assert error.endswith("Pass to='company.arrays'.")
    out = site.run(
        """
        import os
        os.remove(os.path.join(sys.path[0], "company", "arrays.py"))
        print(dlx.plan(bytearray(3), to="company.arrays").error)
        """
    )
    assert out.startswith("company.arrays is not installed. Install it: pip install company.arrays")


def test_a_module_that_converts_while_it_is_loaded(site):
    """A plugin may use dlx during its import, even for its own package."""
    code = adapter() + "\ndlx.convert(bytearray(3), to='dlx')\ndlx.plan(b'a', to='lib')\ndlx.adapters()\n"
    site.plugin("dlx-lib", "lib", code)
    assert site.run("print(type(dlx.convert(bytearray(3), to='lib')).__name__, dlx.adapters().broken)") == "Array {}"


def test_threads_that_need_a_plugin_at_a_time(site):
    """All threads get the same adapter."""
    site.plugin("dlx-lib", "lib", "import time; time.sleep(0.05)\n" + adapter())
    out = site.run(
        """
        import threading
        found, go = [], threading.Barrier(8)
        def ask():
            go.wait()
            found.append(type(dlx.convert(bytearray(3), to="lib")).__name__)
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for each in threads: each.start()
        for each in threads: each.join()
        print(found == ["Array"] * 8)
        """
    )
    assert out == "True"


# ---- broken ----------------------------------------------------------------------------------------------------------

BROKEN = {  # a plugin's code -> part of the message
    "import error": ("import nothing_of_this_name", "is broken: ModuleNotFoundError: No module named 'nothing_of_this"),
    "import raises": ("raise OSError('libx.so')", "is broken: OSError: libx.so. Repair or uninstall dlx-lib."),
    "import exits": ("raise SystemExit(3)", "is broken: SystemExit: 3"),
    "syntax": ("def (", "is broken: SyntaxError"),
    "hook raises": (
        "import dlx\n@dlx.hookimpl\ndef dlx_adapters(): return 1 / 0",
        "is broken: ZeroDivisionError: division by zero",
    ),
    "hook exits": ("import dlx\n@dlx.hookimpl\ndef dlx_adapters(): exit(1)", "is broken: SystemExit"),
    "hook takes something": ("import dlx\n@dlx.hookimpl\ndef dlx_adapters(config): return []", "PluginValidationError"),
    "hook not marked": (
        adapter().replace("@dlx.hookimpl", ""),
        "is refused: it has no hook dlx_adapters. Mark the function dlx_adapters with @dlx.hookimpl.",
    ),
    "hook misspelt": (adapter().replace("def dlx_adapters", "def dlx_adaptors"), "it has no hook dlx_adapters"),
    "hook gives None": (
        "import dlx\n@dlx.hookimpl\ndef dlx_adapters(): pass",
        "returned no adapters. Return a list of adapters.",
    ),
    "hook gives nothing": ("import dlx\n@dlx.hookimpl\ndef dlx_adapters(): return []", "returned no adapters"),
    "hook gives 3": ("import dlx\n@dlx.hookimpl\ndef dlx_adapters(): return 3", "returned 3. Return a list of"),
    "hook gives objects": ("import dlx\n@dlx.hookimpl\ndef dlx_adapters(): return [3]", "returned 3. Return inst"),
    "one adapter, no list": (adapter().replace("[A()]", "A()"), "Return a list of adapters."),
    "the class": (adapter().replace("[A()]", "[A]"), "returned the class A. Return an instance: A()."),
    "two of one name": (adapter().replace("[A()]", "[A(), A()]"), "it has two adapters named 'lib'"),
    "no name": (adapter().replace('name = "lib"', ""), "its adapter A has no name. Set it"),
    "named dlx": (adapter("dlx", package="lib"), "has the reserved name 'dlx'"),
    "types no tuple": (
        adapter().replace('("lib.Array",)', '("lib.Array")'),
        "types of its adapter 'lib' is 'lib.Array'. Use a tuple of str.",
    ),
    "guards no guards": (
        adapter().replace("pass  # facts", "fast_path = FastPath(('lib.Array',), guards=('x',))"),
        "is ('x',). Use a tuple of Guard.",
    ),
    "unknown dtype": (
        adapter().replace("pass  # facts", "dtypes = DTypes('lib', {'float': 'single'})"),
        "dtypes.names of its adapter 'lib' is invalid: unknown dtype 'float'",
    ),
    "name of a newer dlx": (
        "from dlx.adapter import Marvel",
        f"expects a different version of dlx (installed: {dlx.__version__}): cannot import name 'Marv",
    ),
    "module of a newer dlx": ("import dlx.marvels", "expects a different version of dlx"),
    "attribute of a newer dlx": ("import dlx\ndlx.marvel()", "expects a different version of dlx"),
}


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    """Return the reports {name: results} of one process with all plugins and a valid one, and the doctor's rows."""
    path = tmp_path_factory.mktemp("broken")

    site = Site(path)
    names = {case: f"lib{n}" for n, case in enumerate(BROKEN)}
    for case, (code, _) in BROKEN.items():
        site.module(names[case])
        code = code.replace('"lib"', f'"{names[case]}"').replace("lib.Array", f"{names[case]}.Array")
        site.plugin(f"dlx-{names[case]}", names[case], code)
    site.module("sound")
    site.plugin("dlx-sound", "sound", adapter("sound"))
    out = site.run(
        f"NAMES = {[*names.values()]}\n"
        + textwrap.dedent(
            """
            import importlib, json
            def tell(call):
                try:
                    return repr(call())
                except dlx.errors.PluginError as error:
                    assert error.__cause__ is not None
                    return str(error)
            answers = {}
            for name in NAMES:
                array = importlib.import_module(name).Array(None)
                answers[name] = {
                    "target": tell(lambda: dlx.convert(b"abc", to=name)),
                    "again": tell(lambda: dlx.convert(b"abc", to=name)),
                    "source": tell(lambda: dlx.convert(array, to="dlx")),
                    "in a tree": tell(lambda: dlx.convert([3, array, "a"], to="dlx")[::2]),
                }
            answers["sound"] = tell(lambda: type(dlx.convert(bytearray(3), to="sound")).__name__)
            found = dlx.adapters()
            answers["listed"] = sorted(found.keys() & {*NAMES, "sound"})
            answers["broken"] = {name: str(error) for name, error in found.broken.items()}
            print(json.dumps(answers))
            from dlx.cli import main
            main(["doctor", "--json"])
            """
        )
    )
    answers, _, doctor = out.partition("\n")
    rows = {each["module"]: each for each in json.loads(doctor)["adapters"]}
    return names, json.loads(answers), rows


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_one_clear_sentence(side_by_side, case):
    """The error is raised when the plugin is needed, recorded with its cause, and listed."""
    names, answers, rows = side_by_side
    name, (_, says) = names[case], BROKEN[case]
    says = says.replace("'lib'", f"'{name}'").replace("lib.Array", f"{name}.Array").replace("dlx-lib", f"dlx-{name}")
    said = answers[name]["target"]
    assert said.startswith(f"the adapter plugin dlx_{name} (dlx-{name}) ") and says in said
    assert "\n" not in said and len(said) < 400
    assert answers[name]["again"] == said
    assert answers[name]["source"] == f"cannot convert {name}.Array to 'dlx': {said}"
    assert answers[name]["in a tree"] == "[3, 'a']"
    assert answers["broken"][f"dlx_{name} (dlx-{name})"] == said
    row = rows[f"dlx_{name}"]
    assert (row["status"], row["distribution"], row["cause"]) == ("broken", f"dlx-{name}", said)


def test_a_broken_plugin_breaks_no_other(side_by_side):
    """The valid plugin works, and only it is listed."""
    _, answers, rows = side_by_side
    assert answers["sound"] == "'Array'" and answers["listed"] == ["sound"]
    assert rows["dlx_sound"]["status"] == "ready"


def test_a_stale_entry_point(site):
    """If metadata have no module, the message names both, and listings still work."""
    site.distribution("dlx-gone", {"gone": "dlx_gone", "lost": "lib:nothing"})
    out = site.error("dlx.convert(b'abc', to='gone')")
    assert out == (
        "the adapter plugin dlx_gone (dlx-gone) is missing: its entry point names the module dlx_gone, which does not "
        "exist. Uninstall or repair dlx-gone."
    )
    assert "lib:nothing (dlx-gone) is broken: AttributeError" in site.error("dlx.convert(b'abc', to='lost')")
    assert site.doctor()["dlx_gone"]["status"] == "broken"


def test_an_entry_point_that_names_the_hook(site):
    """A common error with its own fix."""
    site.module("dlx_lib", adapter())
    site.distribution("dlx-lib", {"lib": "dlx_lib:dlx_adapters"})
    assert site.error().endswith('it has no hook dlx_adapters. Name the module in its entry point: lib = "dlx_lib".')


def test_an_array_of_a_broken_plugin_in_a_tree(site):
    """Objects with an array protocol are not treated as anything else: the error has a path."""
    site.module("lib", FRAMEWORK + "Array.__dlpack__ = lambda self, **keywords: 1 / 0\n")
    site.plugin("dlx-lib", "lib", "raise OSError('libx.so')")
    out = site.error("import lib; dlx.convert({'x': [lib.Array(None)]}, to='dlx')")
    assert "the adapter plugin dlx_lib (dlx-lib) is broken: OSError: libx.so" in out and "obj['x'][0]" in out


def test_metadata_that_cannot_be_read(site):
    """A distribution with invalid entry points does not affect conversions."""
    site.plugin("dlx-lib", "lib", adapter())
    (site.path / "bad-1.0.dist-info").mkdir()
    (site.path / "bad-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[dlx\n=\x00")
    assert site.run("print(dlx.convert(bytearray(3), to='dlx').shape); dlx.adapters()") == "(3,)"


# ---- two for one -----------------------------------------------------------------------------------------------------


def test_two_plugins_for_one_framework(site):
    """Neither is loaded; the error names both in any order, also for a type of the framework."""
    site.plugin("dlx-lib", "lib", adapter())
    site.plugin("lib-for-dlx", "lib", adapter())
    out = site.error()
    assert "dlx_lib (dlx-lib)" in out and "lib_for_dlx (lib-for-dlx)" in out, out
    assert "both have an adapter for 'lib'. Uninstall " in out
    assert out.endswith(", or set DLX_LOAD_PLUGINS to the distributions to use.")
    assert "both have an adapter" in site.error("import lib; dlx.convert(lib.Array(None), to='dlx')")
    found = site.doctor()
    assert (found["dlx_lib"]["status"], found["lib_for_dlx"]["status"]) == ("broken", "broken")
    assert "both have an adapter" in found["dlx_lib"]["cause"]
    out = site.run(
        "print(*dlx.adapters().broken); print(*[name in sys.modules for name in ('dlx_lib', 'lib_for_dlx')])"
    )
    assert sorted(out.splitlines()[0].replace(") ", ")|").split("|")) == [
        "dlx_lib (dlx-lib)",
        "lib_for_dlx (lib-for-dlx)",
    ]
    assert out.splitlines()[1] == "False False"


def test_two_plugins_for_one_of_several_packages(site):
    """A plugin for two packages is refused completely if another plugin has one of them."""
    site.module("other")
    site.module("dlx_both", adapter() + "\nclass B(A): name = package = 'other'; types = ('other.Array',)\n")
    site.distribution("dlx-both", {"lib": "dlx_both", "other": "dlx_both"})
    site.plugin("dlx-other", "other", adapter("other"))
    for name in ("lib", "other"):
        out = site.error(f"dlx.convert(b'abc', to={name!r})")
        assert "dlx_both (dlx-both)" in out and "dlx_other (dlx-other)" in out and "for 'other'" in out
    code = "print(type(dlx.convert(bytearray(3), to='other')).__name__, *dlx.adapters().broken)"
    assert site.run(code, DLX_LOAD_PLUGINS="dlx-other") == "Array"


def test_the_user_chooses_one_by_name(site):
    """DLX_LOAD_PLUGINS selects the distributions, which resolves the conflict."""
    site.plugin("dlx-lib", "lib", adapter(label="first"))
    site.plugin("Lib_for.dlx", "lib", adapter(label="second").replace("Lib_for.dlx", "x"))
    code = "print(dlx.describe(dlx.convert(bytearray(3), to='lib')).framework, len(dlx.adapters().broken))"
    assert site.run(code, DLX_LOAD_PLUGINS="dlx-lib") == "first 0"


def test_two_plugins_for_one_type(site):
    """The plugin of the type's framework keeps it; the other is refused, in any order."""
    site.module("other")
    site.plugin("dlx-lib", "lib", adapter())
    greedy = adapter("other").replace('("other.Array",)', '("other.Array", "lib.Array")')
    site.plugin("dlx-other", "other", greedy)
    for order in (("other", "lib"), ("lib", "other")):
        out = site.run(
            f"""
            import lib, other
            for name in {order}:
                print(dlx.plan(bytearray(3), to=name).error)
            print(dlx.describe(lib.Array(dlx.empty((3,), "int8", "cpu"))).framework)
            """
        ).splitlines()
        said = dict(zip(order, out, strict=False))
        assert said["lib"] == "None" and out[2] == "lib"
        assert "dlx_lib (dlx-lib) and dlx_other (dlx-other) both have an adapter for 'lib.Array'" in said["other"]


def test_two_plugins_for_one_type_of_a_third(site):
    """If it belongs to neither, the first loaded plugin keeps it; the other's error names both."""
    for name in ("one", "two"):
        site.module(name)
        code = adapter(name).replace(f'("{name}.Array",)', f'("{name}.Array", "lib.Array")')
        site.plugin(f"dlx-{name}", name, code)
    out = site.run(
        """
        import lib, one, two
        for name in ("two", "one"):
            print(dlx.plan(bytearray(3), to=name).error)
        print(dlx.describe(lib.Array(dlx.empty((3,), "int8", "cpu"))).framework)
        """
    ).splitlines()
    assert out[::2] == ["None", "two"]
    assert "dlx_two (dlx-two) and dlx_one (dlx-one) both have an adapter for 'lib.Array'. Uninstall dlx-one" in out[1]


def test_containers_are_claimed_as_types_are(site):
    """Two handlers for one container type are also a conflict."""
    row = 'containers = (Container(types=("lib.Bag",)),)'
    site.plugin("dlx-lib", "lib", adapter().replace("pass  # facts", row))
    site.plugin("dlx-bags", "bags", adapter("bags", package="lib").replace('types = ("lib.Array",)', row))
    assert "both have an adapter for 'lib.Bag'" in site.error("dlx.convert(b'abc', to='bags')")


def test_a_plugin_beside_ours(site, np):
    """An installed plugin does not replace a built-in one unless the user selects it; it is refused and listed."""
    fake = adapter("numpy").replace("numpy.Array", "numpy.ndarray")
    fake = fake.replace("obj.tensor", "dlx.convert(obj.tobytes(), to='dlx')")
    site.plugin("dlx-numpy-extra", "numpy", fake)
    code = "import numpy; print(dlx.describe(numpy.zeros(3)).dtype, len(dlx.adapters().broken)); dlx.adapters()"
    assert site.run(code) == "float64 1"
    row = site.doctor()["dlx_numpy_extra"]
    assert row["status"] == "broken"
    assert (
        "dlx_adapters.dlx_numpy (dlxarray) and dlx_numpy_extra (dlx-numpy-extra) both have an adapter for 'numpy'"
        in row["cause"]
    )
    assert "Uninstall dlx-numpy-extra, or set DLX_LOAD_PLUGINS" in row["cause"]
    assert site.run(code, DLX_LOAD_PLUGINS="dlx-numpy-extra") == "uint8 0"


def test_a_plugin_that_takes_a_type_of_ours(site, np):
    """It is refused, even if it was loaded before numpy."""
    code = adapter().replace('("lib.Array",)', '("lib.Array", "numpy.ndarray")')
    site.plugin("dlx-lib", "lib", code)
    assert (
        "dlx_adapters.dlx_numpy (dlxarray) and dlx_lib (dlx-lib) both have an adapter for 'numpy.ndarray'"
        in site.error()
    )
    out = site.run(
        """
        import numpy, lib
        dlx.adapters()
        print(dlx.describe(numpy.zeros(3)).framework, type(dlx.convert(b"a", to="numpy")).__name__)
        """
    )
    assert out == "numpy ndarray"


@pytest.mark.parametrize("name", ["numpy", "torch", "numpy scalar"])
def test_a_plugin_that_takes_a_name_of_ours(site, name):
    """It is refused, like for types."""
    site.plugin("dlx-lib", "lib", adapter(name, package="lib"))
    out = site.error("print(dlx.adapters()['numpy'].package); dlx.convert(b'abc', to='lib')")
    if name != "numpy scalar":  # whose plugin may not have been loaded
        assert f"(dlxarray) and dlx_lib (dlx-lib) both have an adapter for '{name}'" in out
    found = site.run("found = dlx.adapters(); print(found['numpy'].package, found['torch'].package, *found.broken)")
    assert found == "numpy torch dlx_lib (dlx-lib)"


def test_a_plugin_that_owns_a_subclass_of_ours(site, np):
    """The nearest listed base of a type decides: no conflict."""
    site.module("lib", "import numpy\n__version__ = '1'\nclass Array(numpy.ndarray):\n    pass\n")
    code = adapter().replace("obj.tensor", "dlx.convert(obj.view(__import__('numpy').ndarray), to='dlx')")
    site.plugin("dlx-lib", "lib", code)
    out = site.run(
        """
        import numpy, lib
        a = numpy.zeros(3)
        print(dlx.describe(a).framework, dlx.describe(a.view(lib.Array)).framework, dlx.adapters().broken)
        """
    )
    assert out == "numpy lib {}"


# ---- a framework imported too early ----------------------------------------------------------------------------------


def test_a_plugin_that_imports_its_framework(site):
    """The import is measured and reported by listings and the doctor; strict mode refuses the plugin."""
    site.module("lib", "import time; time.sleep(0.05)\n" + FRAMEWORK)
    site.plugin("dlx-lib", "lib", "import lib\n" + adapter())
    (note,) = site.run("print(*dlx.adapters().notes, sep='\\n')").splitlines()
    start, rest = note.split(" when it is loaded (")
    assert start == "dlx_lib (dlx-lib) imports lib"
    milliseconds, rest = rest.split(" ms, ")
    assert int(milliseconds) >= 50
    assert rest.endswith("Import lib only inside functions, and keep the plugin out of its framework's package.")
    assert "imports lib when it is loaded" in site.doctor()["dlx_lib"]["cause"]
    assert "dlx_lib (dlx-lib) is refused: dlx_lib (dlx-lib) imports" in site.error(DLX_STRICT_PLUGINS="1")


def test_a_plugin_that_imports_another_framework(site, np):
    """The import is reported, too, unless the framework was imported before."""
    site.plugin("dlx-lib", "lib", "import numpy\n" + adapter())
    assert "imports numpy when it is loaded" in site.run("print(*dlx.adapters().notes)")
    assert site.run("import numpy, lib; print(*dlx.adapters().notes)") == ""


# ---- the environment -------------------------------------------------------------------------------------------------


def test_plugins_can_be_left_out(site):
    """DLX_LOAD_PLUGINS: unset loads all plugins, empty only built-in ones, else the named ones."""
    site.module("other")
    site.plugin("dlx-lib", "lib", adapter())
    site.plugin("dlx-other", "other", adapter("other"))
    code = "found = dlx.adapters(); print('lib' in found, 'other' in found, 'torch' in found, len(found.broken))"
    assert site.run(code) == "True True True 0"
    assert site.run(code, DLX_LOAD_PLUGINS="") == "False False True 0"
    assert site.run(code, DLX_LOAD_PLUGINS="DLX_lib") == "True False True 0"
    assert site.run(code, DLX_LOAD_PLUGINS="dlx-lib, dlx.other, dlxarray") == "True True True 0"
    assert site.run(code, DLX_LOAD_PLUGINS="dlx-lib,dlx-nothing") == "True False True 1"
    out = site.run("print(*dlx.adapters().notes)", DLX_LOAD_PLUGINS="dlx-lib")
    assert out == "DLX_LOAD_PLUGINS='dlx-lib' excludes dlx-other, which provides 'other'"
    out = site.run("print(dlx.plan(b'a', to='other').error)", DLX_LOAD_PLUGINS="dlx-lib")
    assert "unknown target 'other'. DLX_LOAD_PLUGINS='dlx-lib' excludes dlx-other" in out
    out = site.run("print(*dlx.adapters().broken.values())", DLX_LOAD_PLUGINS="dlx-nothing")
    assert "DLX_LOAD_PLUGINS names 'dlx-nothing', but no such distribution has adapters" in out


@pytest.mark.slow
def test_strict_raises_at_once(site, np):
    """With DLX_STRICT_PLUGINS, loading a broken plugin raises; "0" and empty disable it."""
    site.plugin("dlx-lib", "lib", "raise OSError('libx.so')")
    site.plugin("dlx-numpy-extra", "numpy", adapter("numpy"))
    listing = "dlx.adapters()"
    unknown = "import lib; dlx.convert([lib.Array(None)], to='dlx')"
    beside = (
        "import numpy; dlx.adapters.__module__; dlx.plan(b'', to='nowhere'); dlx.convert([numpy.zeros(1)], to='dlx')"
    )
    for value in ("1", "yes"):
        assert "broken" in site.error(listing, DLX_STRICT_PLUGINS=value)
        assert "is broken: OSError: libx.so" in site.error(unknown, DLX_STRICT_PLUGINS=value)
        assert "both have an adapter for 'numpy'" in site.error(beside, DLX_STRICT_PLUGINS=value)
    for value in ("", "0"):
        for code in (listing, unknown, beside):
            assert site.error(code, DLX_STRICT_PLUGINS=value) == "nothing raised"
    assert site.doctor(DLX_STRICT_PLUGINS="1")["dlx_lib"]["status"] == "broken"


# ---- the fast path, for a subclass that a plugin owns ----------------------------------------------------------------

OWNER = """
import dlx, sys
from dataclasses import replace
from dlx_adapters.dlx_numpy import NumpyAdapter
class Owner(NumpyAdapter):
    name = "lib"
    package = "lib"
    types = ("lib.Array",)
    containers = ()
    fast_path = replace(NumpyAdapter.fast_path, types=types, imports=False)
    def load(self, tensor): return super().load(tensor).view(sys.modules["lib"].Array)
@dlx.hookimpl
def dlx_adapters(): return [Owner()]
"""
SUBCLASS = "import numpy\n__version__ = '1'\nclass Array(numpy.ndarray):\n    pass\n"
ROADS = """
    import lib, numpy as np
    from dlx._core import native
    from dlx._engine.fast_path import learn
    slow, path = [], dlx.convert.__wrapped__
    def counting(*args, **options):
        slow.append(args)
        return path(*args, **options)
    lane = native.FastPathFunction(counting, learn, dlx._engine.fast_path.consumer_failed)
    array = np.arange(6.0).view(lib.Array)
"""


def test_a_subclass_of_ours_takes_the_fast_path(site, np):
    """Exported by numpy's table and imported by the adapter, as its type; numpy is unaffected."""
    site.module("lib", SUBCLASS)
    site.plugin("dlx-lib", "lib", OWNER)
    out = site.run(
        textwrap.dedent(ROADS)
        + textwrap.dedent(
            """
            tensor = lane(array, to="dlx"); back = lane(array, to="numpy")
            print(len(slow), type(back).__name__, back.ctypes.data == array.ctypes.data, lane(array, to="lib") is array)
            inside = lane(np.arange(6.0), to="lib")
            print(len(slow), type(inside).__name__, inside.tolist() == array.tolist(), dlx.describe(inside).framework)
            print(type(lane(tensor, to="lib")).__name__, type(lane(np.arange(3), to="numpy")).__name__)
            print(dlx.adapters().broken, dlx.adapters().notes)
            """
        )
    )
    assert out.splitlines() == ["0 ndarray True True", "0 Array True lib", "Array ndarray", "{} []"]


@pytest.mark.slow
def test_a_subclass_of_torchs_takes_the_fast_path(site, np, torch):
    """The same with torch's adapter: guards in C, kept storage, refusals; only names differ."""
    site.module("lib", "import torch\n__version__ = '1'\nclass Array(torch.Tensor):\n    pass\n")
    code = OWNER.replace("dlx_numpy", "dlx_torch").replace("NumpyAdapter", "TorchAdapter").replace('"numpy"', '"torch"')
    site.plugin("dlx-lib", "lib", code.replace(".view(", ".as_subclass("))
    out = site.run(
        textwrap.dedent(ROADS).replace("np.arange(6.0).view", "__import__('torch').arange(6.0).as_subclass")
        + textwrap.dedent(
            """
            back = lane(array, to="numpy")
            print(type(lane(array, to="dlx")).__name__, type(lane(array, to="torch")).__name__, len(slow))
            print(back.ctypes.data == array.data_ptr(), lane(array, to="lib") is array, len(slow))
            print(type(lane(np.arange(3.0), to="lib")).__name__, dlx.describe(array).framework)
            print(dlx.plan(array.requires_grad_(), to="numpy").error.reason)
            """
        )
    )
    assert out.splitlines() == [
        "Tensor Tensor 0",
        "True True 0",
        "Array lib",
        "it requires gradients, which would be lost",
    ]


def test_a_table_of_a_base_is_found_out(site, np):
    """A table that creates arrays of another type is an error, never a wrong type."""
    site.module("lib", SUBCLASS)
    site.plugin("dlx-lib", "lib", OWNER.replace("imports=False", "imports=True"))
    out = site.run(
        textwrap.dedent(ROADS)
        + textwrap.dedent(
            """
            for _ in range(2):
                try:
                    lane(np.arange(6.0), to="lib")
                except dlx.errors.ConversionError as error:
                    print(error)
            import gc; gc.collect()
            print(native.live())
            """
        )
    )
    first, second, live = out.splitlines()
    assert first == second and "its exchange table returned a numpy.ndarray" in first and live == "0"


@pytest.mark.parametrize(
    ("fact", "says"),
    [
        ("guards=(Guard('no_such', kinds=('nothing',)),)", "DTypeError: no dtype's name begins with 'nothing'"),
        ("owner=Owner('base', 'lib.Nothing', 'x', 'y')", "AttributeError"),
        ("guard_function=lambda: 3", "TypeError"),
        ("exchange=fails", "OSError: libx.so"),
        ("conditions=(('no.such.module', 'x', 1),)", "KeyError: 'no.such.module'"),
    ],
)
def test_a_fast_path_that_cannot_be_set_up_is_not_used(site, np, fact, says):
    """The array converts by the Python path, and the listing has a note."""
    site.module("lib", SUBCLASS)
    code = OWNER.replace("imports=False", f"imports=False, {fact}")
    head = "from dlx.adapter import Guard, Owner\ndef fails(): raise OSError('libx.so')\n"
    site.plugin("dlx-lib", "lib", code.replace("class Owner", f"{head}class Owner"))
    out = site.run(
        textwrap.dedent(ROADS)
        + textwrap.dedent(
            """
            print([lane(array, to="dlx").shape for _ in range(2)], len(slow))
            print(*dlx.adapters().notes)
            """
        )
    )
    lines = out.splitlines()
    assert lines[0] == "[(6,), (6,)] 2"
    assert f"the fast path from lib.Array is not used: {says}" in lines[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dlx-lib", "dlx_lib"])
def test_an_entry_point_named_after_the_distribution(site, name):
    """The name must be the package of the arrays: error and doctor show the correct line."""
    site.module("lib")
    site.plugin("dlx-lib", name, adapter())
    said = site.error()
    assert f"its entry point is named '{name}', which is not a package of its adapters" in said
    assert said.endswith('Name it after the package of the arrays: lib = "dlx_lib".')
    assert site.run("import lib; print(dlx.plan(b'a', to=lib).error)").startswith(
        "the adapter plugin dlx_lib (dlx-lib)"
    )
    assert said in site.error("import lib; dlx.convert(lib.Array(None), to='dlx')")
    assert site.doctor()["dlx_lib"]["status"] == "broken"


def test_a_distribution_whose_name_only_has_the_word_is_not_blamed(site):
    """Distributions named after modules of Python or dlx are not loaded either."""
    for name in ("data", "foo"):
        site.module(name, "class Row: pass")
    for name in ("dlx-foo-data", "dlx-json", "dlx-dlx"):
        site.module(f"bad_{name.replace('-', '_')}", f"import sys; sys.loaded = {name!r}; raise RuntimeError('broken')")
        site.distribution(name, {name: f"bad_{name.replace('-', '_')}"})
    out = site.run(
        """
        import sys, json, data
        for each in (data.Row(), dlx.trace(), json.JSONDecodeError("", "", 0)):
            print(dlx.plan(each, to="dlx").error)
        for name in ("data", "foo", "json", "no"):
            print(dlx.plan(b"", to=name).error)
        print(getattr(sys, "loaded", "nothing loaded"))
        """
    )
    assert "RuntimeError" not in out and out.endswith("nothing loaded")


def test_a_plugin_of_another_package_is_not_loaded_for_its_distribution(site):
    """The entry point's package was not requested."""
    site.module("lib", "class Row: pass")
    site.plugin("dlx-lib", "other", "raise RuntimeError('broken')")
    out = site.run(
        """
        import lib
        for _ in range(2):
            print("broken" in str(dlx.plan(lib.Row(), to="dlx").error), "broken" in str(dlx.plan(b"", to="lib").error))
            dlx.adapters()  # loads it
        """
    )
    assert out.splitlines() == ["False False", "True True"]


def test_an_entry_point_named_after_another_package(site):
    """After loading, the packages of its adapters are known: the doctor shows the correct line."""
    site.module("lib")
    site.plugin("dlx-lib", "library", adapter())
    row = site.doctor()["dlx_lib"]
    assert row["status"] == "broken" and 'of the arrays: lib = "dlx_lib".' in row["cause"]


def test_a_framework_without_a_version_is_served(site):
    """The version comes from its distribution or is unknown; known issues apply to unknown versions."""
    site.module("lib", FRAMEWORK.replace('__version__ = "1.0"', ""))
    site.plugin("dlx-lib", "lib", adapter())
    code = "import lib; print(type(dlx.convert(b'a', to=lib)).__name__, repr(dlx.adapters()))"
    assert site.run(code).startswith("Array ") and "lib unknown" in site.run(code)
    assert site.doctor()["dlx_lib"]["status"] in ("installed", "ready")
    site.distribution("lib", {}, version="2.5")
    assert "lib 2.5" in site.run(code)


def test_arrays_that_nobody_exports(site):
    """If neither adapter nor arrays have an export, the error names both."""
    site.module("lib")
    site.plugin("dlx-lib", "lib", adapter().replace("def export", "def unused").replace("def describe", "def never"))
    said = site.error("import lib; dlx.convert(lib.Array(None), to='dlx')")
    assert (
        "the adapter 'lib' does not override export, and lib.Array has no __dlpack__. Override Adapter.export" in said
    )


def test_a_framework_that_brings_its_own_adapter(site):
    """The entry point's module may be the framework."""
    site.module("lib", adapter() + textwrap.dedent(FRAMEWORK))
    site.distribution("lib", {"lib": "lib"})
    assert site.run("import lib; print(type(dlx.convert(b'a', to='lib')).__name__)") == "Array"
