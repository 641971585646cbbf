"""Imports go down the layers only; importing dlx is cheap; adapters use public names only."""

from __future__ import annotations

import ast
import functools
import inspect
import pickle
import re
import sys
import tomllib

import calls as calls_of
import pytest
import structure
from support.project import ROOT

import dlx
import dlx.testing

PUBLIC = {"__init__", "__main__", "_ffi", "_version", "adapter", "cli", "ctypes", "errors", "testing", "typing"}
PACKAGES = {
    "_api",
    "_core",
    "_engine",
    "_files",
    "_protocols",
    "_registry",
    "_sharing",
    "_support",
    "_using",
    "_views",
    "adapter",
}
ADAPTERS = sorted(path.stem for path in (ROOT / "dlx_adapters").glob("dlx_*.py"))
C_PURE = sorted(path for folder in ("core", "cuda") for path in (ROOT / "c_src" / folder).glob("*.[ch]"))


def imported(path):
    """Yield every module that a file imports, except imports for type checkers."""
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
    """dlx/ contains only the public modules and private packages that have a layer."""
    here = {path.stem for path in (ROOT / "dlx").glob("*.py*")}
    folders = {path.name for path in (ROOT / "dlx").iterdir() if (path / "__init__.py").exists()}
    assert here | folders <= PUBLIC | PACKAGES
    assert folders == PACKAGES | {"cli", "testing"}
    assert {structure.find_layer(module) for module in structure.build_graph()} <= structure.RANK.keys()


def test_no_import_goes_up_a_layer():
    """A module imports from its own package and from lower layers, imports for type checkers included."""
    assert structure.find_upward(structure.build_graph()) == []


def test_no_import_goes_in_a_circle():
    """Files of dlx never import each other in a cycle, including imports for type checkers."""
    assert structure.find_cycle(structure.build_graph()) == []


def test_chains_of_imports_are_short():
    """No chain of imports has more than 16 files, without the compiled extension."""
    chain = structure.find_longest_chain(structure.build_graph())
    assert len(chain) <= 17, " -> ".join(chain)


@pytest.mark.parametrize("package", ["cli", "testing"])
def test_the_command_and_the_kit_are_flat(package):
    """At most three of their files import each other in a row before one imports dlx."""
    edges = structure.build_graph()
    chain, files = {"dlx"}, {module for module in edges if structure.find_layer(module) == package}
    for _ in range(4):
        chain = {module for module in files if edges[module] & chain}
    assert not chain


def test_whoever_uses_the_fast_path_loads_what_it_leaves_calls_to():
    """The engine's object calls Python functions of two other modules, which must be loaded when it is used."""
    edges = structure.build_graph()

    @functools.cache
    def reached(module):
        return {module}.union(*map(reached, edges[module]))

    users = {module for module, others in edges.items() if "dlx._engine.seam" in others}
    assert users
    for module in users:
        if structure.find_layer(module) == "_api":
            assert "dlx._engine.fast_path" in reached(module), module
        if structure.find_layer(module) == "_using":  # the decorator loads this layer
            assert "dlx._api.convert" in reached("dlx._using.decorator")
    assert "dlx._api.convert" in reached("dlx._api.open")  # a file's views need it


@pytest.mark.parametrize("folder", ["dlx/testing", "benchmarks"])
def test_the_kit_and_the_benchmarks_do_not_use_the_command(folder):
    """A library does not depend on a command; shared code is in `dlx._support`."""
    files = [*(ROOT / folder).rglob("*.py")]
    assert files
    users = {path.name for path in files for module in imported(path) if module and module.startswith("dlx.cli")}
    assert not users


def test_only_one_module_knows_the_extension():
    """Only `dlx._core.extension` imports the compiled extension; the doctor inspects its file."""
    users = {module for module, others in structure.build_graph().items() if "dlx._ffi" in others}
    assert users == {"dlx._core.extension", "dlx.cli.commands.doctor"}


# Folders of c_src, lowest first; folders of one rank may call each other, but files must not form a cycle.
C_RANKS = {
    "include": 0,
    "platform": 1,
    "core": 2,
    "cuda": 3,
    "base": 4,
    **dict.fromkeys(("object", "interop", "view", "convert", "call"), 5),
}
BRIDGE = "c_src/base/module.c"  # adds everything to the module


def test_c_files_include_downwards_only():
    """interop/ and similar folders use base/, cuda/ and core/; cuda/ uses core/; all use include/."""
    places = {path.name: path.parent.name for path in (ROOT / "c_src").rglob("*.h")}
    for path in (ROOT / "c_src").rglob("*.[ch]"):
        for name in re.findall(r'#include "(?:\w+/)?([\w.]+)"', path.read_text()):
            if str(path.relative_to(ROOT)) != BRIDGE:
                assert C_RANKS[places[name]] <= C_RANKS[path.parent.name], f"{path.name} includes {name}"


def test_c_headers_include_each_other_in_no_circle():
    """A header guard would hide a cycle."""
    assert structure.find_cycle(structure.find_c_includes()) == []
    assert "c_src/base/error.h" in structure.find_c_includes()["c_src/object/tensor.h"]


def test_c_files_call_downwards_only():
    """Calls between C files have no cycle, and go neither from core/ to cuda/, nor from these to Python's API."""
    calls = structure.build_c_graph()
    assert structure.find_cycle(calls) == []
    for file, others in calls.items():
        for other in others:
            assert file == BRIDGE or C_RANKS[other.split("/")[1]] <= C_RANKS[file.split("/")[1]], (
                f"{file} calls {other}"
            )
    assert "c_src/core/cast.c" in calls["c_src/interop/tensors.c"]
    assert "c_src/object/tensor.c" in calls["c_src/interop/tables.c"]
    assert "c_src/object/dlpack.c" in calls["c_src/object/type.c"]  # py_tensor_table, a variable


def test_c_files_and_structs_are_small():
    """No C file has more than 600 lines, no struct more than 24 members."""
    larger = {"cu_table"}  # one member per function of the CUDA driver
    for path in (ROOT / "c_src").rglob("*.[ch]"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 600, path.name
        for name, n in structure.count_members(text).items():
            assert n <= 24 or name in larger, f"{name} of {path.name} has {n} members"


PLATFORM = ROOT / "c_src" / "platform"
OWN_C = sorted((*(ROOT / "c_src").rglob("*.[ch]"), *(ROOT / "dlx_adapters").glob("*.c")))
SYSTEM = re.compile(
    r"\b(_WIN32|_MSC_VER|__APPLE__|__linux__|__GLIBC__|_GNU_SOURCE|_DEFAULT_SOURCE|MADV_\w+|pthread_\w+|dlopen|dlsym)\b"
    r"|#include <(sys/|unistd|pthread|dlfcn|windows|sched|mach)"
)


def test_only_the_platform_layer_knows_the_system():
    """Other C files neither test for a system nor include its headers; the layer stays small."""
    assert SYSTEM.search("#ifdef __linux__") and SYSTEM.search("#include <sys/mman.h>")
    for path in OWN_C:
        if path.parent == PLATFORM or path.name == "dlpack_abi.h":  # whose DLPACK_DLL is DLPack's
            continue
        code = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not SYSTEM.search(code), f"{path.name}: {SYSTEM.search(code)}"
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in PLATFORM.iterdir()) <= 600


IMPLICIT = re.compile(r"\batomic_(load|store|exchange|fetch_\w+?|compare_exchange_\w+?|flag_\w+?)\(")
ATOMIC = re.compile(r"^\s*(?:static |extern )?(?:_Atomic\b|atomic_\w+ )[^;/\n]*;", re.MULTILINE)
ORDER = re.compile(r"[Rr]elaxed|[Aa]cquire|[Rr]elease|acq_rel|seq_cst|fence|Orders? as|as in map\.h")


def unstated(text):
    """Return atomic operations of a C file without an order, and atomic variables without a comment about theirs."""
    found = [match[0] for match in IMPLICIT.finditer(text) if not match[0].endswith("_explicit(")]
    found += re.findall(r"__(?:atomic|sync)_\w+", text)
    for match in ATOMIC.finditer(text):
        # The comment on the line and the lines that continue it, or the one that ends above it.
        after = re.match(r"[^\n/]*(?:/\*(?:(?!\*/).)*\*/)?", text[match.start() :].lstrip("\n"), re.DOTALL)
        before = re.search(r"/\*(?:(?!\*/).)*\*/\n\Z", text[: match.start()], re.DOTALL)
        comment = after[0][len(match[0].lstrip("\n")) :] + (before[0] if before else "")
        if not ORDER.search(comment):
            found.append(match[0].strip())
    return found


def test_atomics_state_their_order_and_its_reason():
    """Each operation names its order, and each variable has a comment about it: not every processor orders like x86."""
    planted = "static atomic_int a; /* a count */\nvoid f(void) {\n  atomic_store(&a, 1);\n}\n"
    assert unstated(planted) == ["atomic_store(", "static atomic_int a;"]
    assert unstated("/* Relaxed: a hint. */\nstatic _Atomic(int*) b;\nint c = 1;\n") == []
    for path in OWN_C:
        assert unstated(path.read_text(encoding="utf-8")) == [], path.name


def test_members_of_structs_are_counted():
    """Counts all declarators, except in function parameters, comments and unions."""
    text = """
        typedef struct { /* int x; */
          PyObject_HEAD PyObject *a, *b;
          int (*c)(int, int), d[2], e;
          union { int f; float g; } h;
        } counted;
        struct named { ROWS(ROW) int i; };
    """
    assert structure.count_members(text) == {"counted": 6, "named": 1}
    rows = "#define ROWS(ROW) \\\n  ROW(a, (int x)) \\\n  ROW(b, (int y))\n#define ROW(n, p) int(*n) p;\n"
    assert structure.count_members(rows + "struct s { ROWS(ROW) int c; };") == {"s": 3}


def test_circles_of_calls_in_c_are_found(tmp_path):
    """Counts definitions, including static ones, but not names in comments, strings and prototypes."""
    sources = {
        "a.c": "/* b() */\nint a(void) {\n  return c[0];\n}\nstatic int b(void) {\n  return 1;\n}\n",
        "b.c": '#include "a.h"\nint a(void);\nconst char* b(int n,\n              int m) {\n  return "c";\n}\n',
        "c.c": "typedef struct {\n  int b;\n} a_type;\nint c[] = {1};\nstruct s {\n  int c;\n};\n",
    }
    (tmp_path / "c_src").mkdir()
    for name, text in sources.items():
        (tmp_path / "c_src" / name).write_text(text)
    assert structure.build_c_graph(tmp_path) == {
        "c_src/a.c": {"c_src/b.c", "c_src/c.c"},
        "c_src/b.c": {"c_src/a.c"},
        "c_src/c.c": {"c_src/b.c"},
    }
    assert structure.find_cycle(structure.build_c_graph(tmp_path))


def test_c_imports_no_python_module_of_dlx_by_name():
    """C gets Python objects of dlx by registration."""
    for path in (ROOT / "c_src").rglob("*.c"):
        assert not re.search(r'PyImport_\w+\("dlx', path.read_text()), path.name


def test_public_names_say_their_public_module():
    """Names, pickles and messages show `dlx.Device`, not the private module."""
    for name in set(dlx.__all__) - {"__version__", "ffi", "exchange_api", "hookimpl", "ctypes", "adapter", "errors"}:
        assert getattr(dlx, name).__module__ in ("dlx", "dlx.typing"), name
    for module in (dlx.adapter, dlx.errors, dlx.testing):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) or inspect.isfunction(value):
                assert value.__module__ in ("dlx", module.__name__), name
    device = pickle.loads(pickle.dumps(dlx.Device("cuda:1")))
    assert device == dlx.Device("cuda:1") and type(device) is dlx.Device


def test_the_kit_needs_neither_pytest_nor_a_framework(python):
    """`import dlx.testing` loads no framework, and pytest only for pytest itself."""
    loaded = python("import dlx.testing, sys; print(*sys.modules)", args=()).split()
    for name in ("numpy", "torch", "jax", "tvm_ffi", "pyarrow", "pytest", "rich"):
        assert name not in loaded


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_use_the_public_names(adapter):
    """Dlx's adapters use only names that third parties can use, and import no framework at module level."""
    path = ROOT / "dlx_adapters" / f"{adapter}.py"
    found = {name for name in imported(path) if name.partition(".")[0] == "dlx"}
    assert all(name == "dlx" or name.startswith(("dlx.adapter", "dlx.errors")) for name in found), found
    taken = {name.removeprefix("dlx.adapter.") for name in found if name.startswith("dlx.adapter.")}
    assert taken <= set(dlx.adapter.__all__), "a name that no third party is promised"
    top = {
        name.partition(".")[0]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom) and node.module != "dlx_adapters"
            else [alias.name for alias in node.names]
        )
    }
    # The compiled part, and other parts of the same adapter.
    parts = {each for each in ADAPTERS if each.startswith("_".join(adapter.split("_")[:2]))}
    assert top <= {"dlx", f"_{adapter}", *parts, *sys.stdlib_module_names}


def test_the_core_names_no_framework_in_code():
    """C and dlx's modules know frameworks only from adapters' data (comments and strings may name them)."""
    frameworks = {"numpy", "torch", "cupy", "jax"}
    for path in (ROOT / "c_src").rglob("*.[ch]"):
        code = re.sub(r'/\*.*?\*/|"(?:\\.|[^"])*"', "", path.read_text(), flags=re.DOTALL)
        assert not [name for name in frameworks if name in code], path.name
    for name, path in structure.list_modules().items():
        if structure.find_layer(name) in ("cli", "testing") or path.suffix == ".pyi":
            continue
        if name == "dlx._registry.plugin":  # the table of built-in adapters
            continue
        tree = ast.parse(path.read_text())
        words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not frameworks & words, name


def test_only_legacy_c_looks_inside_the_legacy_struct():
    """Other files only pass pointers to a DLManagedTensor."""
    for path in (ROOT / "c_src").rglob("*.c"):
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        if path.name != "legacy.c":
            assert not re.search(r"\bDLManagedTensor\s+\w", code), path.name


@pytest.mark.parametrize("path", C_PURE, ids=lambda path: path.name)
def test_the_pure_core_knows_no_python(path):
    """Neither core/ nor cuda/ includes Python.h."""
    assert "Python.h" not in path.read_text()


def test_importing_dlx_imports_no_framework_and_scans_nothing(python):
    """`import dlx` loads neither a framework, nor pluggy, nor importlib.metadata, nor the compiled core."""
    loaded = python("import dlx, sys; print(*sys.modules)").split()
    frameworks = ("numpy", "torch", "jax", "jaxlib", "tvm_ffi", "pyarrow", "ml_dtypes")
    for name in (*frameworks, "pluggy", "importlib.metadata", "dataclasses", "cffi", "rich"):
        assert name not in loaded


def test_host_only_work_imports_no_other_framework(python):
    """Converting bytes to dlx, listing and planning load no framework."""
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
    """Every name in __all__ exists, has a docstring, and is in dir()."""
    for name in dlx.__all__:
        value = getattr(dlx, name)
        assert value is not None
        if name not in ("__version__", "ffi"):
            assert value.__doc__
    assert set(dlx.__all__) <= set(dir(dlx))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dlx.nothing


def test_convert_and_plan_take_the_same_options():
    """`plan` has every option of `convert` but `out`, with the same defaults, and `probe`."""
    convert = dict(inspect.signature(dlx.convert).parameters)
    assert convert.pop("out").default is None
    plan = dict(inspect.signature(dlx.plan).parameters)
    assert plan.pop("probe").default is True
    assert plan == convert


def test_one_conversion_by_the_python_path_is_short(np, torch):
    """Convert a numpy array to torch outside the fast path."""
    calls, files = calls_of.count_conversion()
    assert len(calls) <= 23, calls
    assert len(files) <= 9, files


def test_one_conversion_of_an_unknown_producer_is_short(np, torch):
    """Convert an object that only has ``__dlpack__``: only its methods are called in Python."""
    calls, files = calls_of.count_conversion(calls_of.Producer, by_python=False)
    assert len(calls) <= 2, calls
    assert not files, files


def test_one_conversion_of_an_unknown_producer_by_the_python_path(np, torch):
    """The same with an option that the fast path does not support; two calls are the object's, one is torch's."""
    calls, files = calls_of.count_conversion(calls_of.Producer)
    assert len(calls) <= 30, calls
    assert len(files) <= 10, files


def test_tests_share_helpers_in_support_only():
    """Tests import neither other tests nor conftest.py; shared helpers are in tests/support."""
    names = {path.stem for path in (ROOT / "tests").glob("*/test_*.py")} | {"conftest"}
    for path in (ROOT / "tests").rglob("*.py"):
        found = re.findall(r"^ *(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not names & {*found}, path.name
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert settings["pythonpath"] == ["tests", "docs/tools"]


def test_no_machine_path_or_registry_host_in_the_project():
    """No committed file names a machine's folders or the host of a package registry."""
    pattern = re.compile(r"/(?:work|farm|root|home/\w+)/|pypi\.org|files\.pythonhosted")
    for folder in ("dlx", "dlx_adapters", "c_src", "tests", "docs", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".c", ".h", ".md"} and path.name != "test_architecture.py":
                assert not pattern.search(path.read_text(encoding="utf-8")), path
