"""The house: imports go up the list of layers only; importing dlx costs nothing; adapters use the public door."""

from __future__ import annotations

import ast
import re
import sys

import pytest
from conftest import ROOT

import dlx

# Lowest first; modules on one line may import each other from left to right.
LAYERS = [
    ["errors", "foreign", "typing", "locks"],
    ["headers", "ctypes"],
    ["native"],
    ["abi", "tensor", "stream", "cuda"],
    ["protocol"],
    ["facts", "adapter", "answers", "hookspecs"],
    ["strangers", "plugins", "loading", "registry"],
    ["rows", "containers"],
    ["routes", "obstacles", "crossing", "working", "leaf", "places", "planning", "transfer"],
    ["failures", "trees", "phases"],
    ["lazy", "writing", "view", "sequences", "mutable_sequences", "mappings", "views"],
    ["conversion"],
    ["stacking", "overlap", "writes", "calls", "functions"],
    ["pointers", "incoming", "doors"],
]
ORDER = [name for line in LAYERS for name in line]
CLI = [  # above them all, in dlx/cli, by the same rule
    "arguments", "output", "entries", "headers", "screen", "objects", "files", "targets", "listing", "inspection",
    "plans", "picture", "dtypes", "driver", "probe", "devices", "doctor", "bench",
]  # fmt: skip
TESTING = [  # the conformance kit, in dlx/testing, likewise
    "capsules", "check", "sources", "subject", "exporting", "requests", "owning", "importing", "asking",
    "refusing", "keeping", "adapting", "living", "catalog", "libraries", "further", "running", "reporting", "picture",
    "plugin",
]  # fmt: skip
ADAPTERS = sorted(path.stem for path in (ROOT / "adapters").glob("*.py"))


def imported(path):
    """Give every module that a file imports, wherever it stands; what only type checkers read is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_a_layer():
    """A new file is given its place in the list above."""
    assert {path.stem for path in (ROOT / "dlx").glob("*.py")} == {*ORDER, "__init__", "__main__"}
    assert {path.stem for path in (ROOT / "dlx" / "cli").glob("*.py")} == {*CLI, "__init__"}


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_up_the_layers_only(module):
    """A module imports from modules before it in the list, and only native knows the extension."""
    found = {name.split(".")[1] for name in imported(ROOT / "dlx" / f"{module}.py") if name.startswith("dlx.")}
    allowed = set(ORDER[: ORDER.index(module)]) | ({"_ffi"} if module == "native" else set())
    assert found & {*ORDER, "_ffi"} <= allowed


@pytest.mark.parametrize("module", CLI)
def test_the_command_is_above_all_and_imports_up_its_own_list(module):
    """A module of the command imports from those before it; nothing below knows it."""
    found = {
        name.split(".")[2] for name in imported(ROOT / "dlx" / "cli" / f"{module}.py") if name.startswith("dlx.cli.")
    }
    assert found & set(CLI) <= set(CLI[: CLI.index(module)])
    for name in ORDER:
        assert not any(each.startswith("dlx.cli") for each in imported(ROOT / "dlx" / f"{name}.py"))


@pytest.mark.parametrize("module", TESTING)
def test_the_kit_is_above_all_and_imports_up_its_own_list(module):
    """A module of the kit imports from those before it; nothing below knows it."""
    assert {path.stem for path in (ROOT / "dlx" / "testing").glob("*.py")} == {*TESTING, "__init__", "__main__"}
    found = {
        name.split(".")[2]
        for name in imported(ROOT / "dlx" / "testing" / f"{module}.py")
        if name.startswith("dlx.testing.")
    }
    assert found & set(TESTING) <= set(TESTING[: TESTING.index(module)])
    for name in ORDER:
        assert not any(each.startswith("dlx.testing") for each in imported(ROOT / "dlx" / f"{name}.py"))


def test_the_kit_needs_neither_pytest_nor_a_framework(python):
    """`import dlx.testing` loads no framework, and pytest only where pytest loads it."""
    loaded = python("import dlx.testing, sys; print(*sys.modules)", args=()).split()
    for name in ("numpy", "torch", "jax", "tvm_ffi", "pyarrow", "pytest", "rich"):
        assert name not in loaded


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_use_the_public_door(adapter):
    """Ours have no way in that a third party's adapter has not, and import no framework at module level."""
    path = ROOT / "adapters" / f"{adapter}.py"
    found = {name for name in imported(path) if name.partition(".")[0] == "dlx"}
    assert all(name == "dlx" or name.startswith(("dlx.adapter", "dlx.errors")) for name in found), found
    taken = {name.removeprefix("dlx.adapter.") for name in found if name.startswith("dlx.adapter.")}
    assert taken <= set(dlx.adapter.__all__), "a name that no third party is promised"
    top = {
        name.partition(".")[0]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert top <= {"dlx", *sys.stdlib_module_names}


@pytest.mark.parametrize("framework", ["numpy", "torch", "cupy", "jax"])
def test_the_core_names_no_framework_in_code(framework):
    """C and the modules of dlx know frameworks from adapters' data only (comments and texts may name them)."""
    for path in (ROOT / "c_src").glob("*.[ch]"):
        code = re.sub(r'/\*.*?\*/|"(?:\\.|[^"])*"', "", path.read_text(), flags=re.DOTALL)
        assert framework not in code, path.name
    for name in set(ORDER) - {"plugins"}:  # the table of our own adapters stands there
        tree = ast.parse((ROOT / "dlx" / f"{name}.py").read_text())
        words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert framework not in words, name


def test_only_legacy_c_looks_inside_the_legacy_struct():
    """Elsewhere a DLManagedTensor is a pointer that is passed on."""
    for path in (ROOT / "c_src").glob("*.c"):
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        if path.name != "legacy.c":
            assert not re.search(r"\bDLManagedTensor\s+\w", code), path.name


@pytest.mark.parametrize("path", sorted((ROOT / "c_src").glob("[!p]*.c")), ids=lambda path: path.name)
def test_the_pure_core_knows_no_python(path):
    """Only py_ files include Python.h."""
    assert "Python.h" not in path.read_text()


def test_importing_dlx_imports_no_framework_and_scans_nothing(python):
    """Neither a framework, nor pluggy, nor importlib.metadata, nor the compiled core is loaded by `import dlx`."""
    loaded = python("import dlx, sys; print(*sys.modules)").split()
    frameworks = ("numpy", "torch", "jax", "jaxlib", "tvm_ffi", "pyarrow", "ml_dtypes")
    for name in (*frameworks, "pluggy", "importlib.metadata", "dataclasses", "cffi", "rich"):
        assert name not in loaded


def test_host_only_work_imports_no_other_framework(python):
    """Converting bytes to dlx, listing nothing and planning load no framework."""
    code = """
        import sys, dlx
        dlx.convert(b"abc", to="dlx"); dlx.plan(bytearray(3), to="dlx"); dlx.describe(b"abc")
        names = ("numpy", "torch", "jax", "tvm_ffi", "pyarrow", "cupy", "importlib.metadata")
        print([name for name in names if name in sys.modules])
    """
    assert python(code).strip() == "[]"


def test_a_source_does_not_load_other_frameworks(python, np):
    """Converting a numpy array to dlx does not import torch."""
    code = "import sys, numpy, dlx; dlx.convert(numpy.zeros(3), to='dlx'); print('torch' in sys.modules)"
    assert python(code, args=()).strip() == "False"


def test_public_names_are_all_there():
    """Everything in __all__ can be had, has a docstring, and dir() lists it."""
    for name in dlx.__all__:
        value = getattr(dlx, name)
        assert value is not None
        if name not in ("__version__", "ffi"):
            assert value.__doc__
    assert set(dlx.__all__) <= set(dir(dlx))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dlx.nothing


def test_convert_and_plan_take_the_same_options():
    """`plan` has every option of `convert`, with the same defaults, and `probe`."""
    import inspect

    convert = inspect.signature(dlx.convert).parameters
    plan = dict(inspect.signature(dlx.plan).parameters)
    assert plan.pop("probe").default is True
    assert plan == convert


def test_no_machine_path_or_registry_host_in_the_project():
    """Nothing that is committed names a machine's folders or a package registry's host."""
    pattern = re.compile(r"/(?:work|farm|root|home/\w+)/|pypi\.org|files\.pythonhosted")
    for folder in ("dlx", "adapters", "c_src", "tests", "docs", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".c", ".h", ".md"} and path.name != "test_architecture.py":
                assert not pattern.search(path.read_text(encoding="utf-8")), path
