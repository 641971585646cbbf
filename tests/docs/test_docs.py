"""The pages: each block of code prints the shown output, each link has a target, and the site is complete."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import structure
from support.processes import warm
from support.project import SUPPORT
from support.repository.pages import (
    PAGES,
    ROOT,
    anchors,
    blocks,
    commands,
    file_of,
    fits,
    links,
    name_of,
    navigation,
    needed,
    prose,
    runnable,
)

READS = {page: page.read_text(encoding="utf-8") for page in PAGES}
# Blocks that other tests run because they need more than an empty folder: the page's languages, and the test.
ELSEWHERE = {
    "README.md": ({"python"}, "docs/test_readme.py"),
    "docs/conformance.md": ({"python"}, "testing/test_kit_libraries.py"),  # the code fails by design
    "docs/c-authors.md": ({"python"}, "docs/test_c_authors.py"),
    "docs/command-line.md": ({"python", "console"}, "cli/test_cli_docs.py"),
    "docs/write-an-adapter.md": ({"python"}, "registry/test_write_an_adapter.py"),
}

# These grade libraries with the whole kit, train, or run type checkers.
SLOW = {"docs/cookbook/jax-torch.md", "docs/cookbook/scikit-learn.md"}
SLOW |= {f"docs/how-to/{name}.md" for name in ("accept-any-array", "grade-a-library", "gradients", "types")}

# Run in the page's folder: blocks in turn, in one namespace; a mark separates their outputs.
RUNNER = """
import json, sys, warnings
warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # of jax, when ray starts processes
(blocks, absent), mark = json.load(sys.stdin), sys.argv[1]
sys.modules.update(dict.fromkeys(absent))  # an import raises ImportError
namespace = {"__name__": "page"}
for code in blocks:
    exec(compile(code, "page", "exec"), namespace)
    print(mark, flush=True)
"""
MARK = "==== end of block ===="


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Return an environment whose `python` and `dlx` belong to this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    for name, call in (("python", ""), ("dlx", "-m dlx")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        (folder / name).chmod(0o755)
    paths = os.pathsep.join([str(ROOT)])
    (folder / "mypy").mkdir()
    shutil.copy(SUPPORT / "typing" / "mypy.ini", folder / "mypy" / "config")  # read if the folder has no configuration
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return (
        environment
        | {"PATH": path, "PYTHONPATH": paths, "COLUMNS": "100", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
        | {"MYPY_CACHE_DIR": str(ROOT / ".mypy_cache" / "examples"), "XDG_CONFIG_HOME": str(folder)}
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no page shows hypothesis
    )


def run_python(codes, folder, environment, absent=()):
    """Run blocks in one interpreter without the modules in `absent`; return the output of each."""
    text, options = json.dumps([codes, absent]), {"cwd": folder, "env": environment, "timeout": 200}
    if any(re.search(r"\btorch\b", code) for code in codes):
        done = warm.run(RUNNER, MARK, text=text, **options)
    else:
        command = [sys.executable, "-c", RUNNER, MARK]
        done = subprocess.run(command, input=text, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout.split(MARK + "\n")[:-1]


def with_code():
    """Yield the pages whose blocks run here."""
    for page, text in READS.items():
        if here(page, text):
            marks = [pytest.mark.slow] if name_of(page) in SLOW else []
            if "@torch.compile" in text:
                marks.append(pytest.mark.gil("torch's compiler turns the GIL on with triton, and misses it else"))
            yield pytest.param(page, marks=marks)


def here(page, text):
    """Return the blocks of a page that run here."""
    left, _ = ELSEWHERE.get(name_of(page), (set(), ""))
    return [each for each in runnable(text) if each[0] not in left]


@pytest.mark.parametrize("page", [*with_code()], ids=name_of)
def test_blocks_print_what_the_page_shows(page, shell, tmp_path):
    """Python blocks run in order in one namespace, then commands, in an empty folder."""
    text = READS[page]
    for name in needed(text):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    python = [each for each in here(page, text) if each[0] == "python" and not file_of(each[1])]
    for kind, code, _ in here(page, text):
        if kind == "python" and file_of(code):
            (tmp_path / file_of(code)).write_text(code)
    absent = re.findall(r"Error: (\w+) is not installed", text)
    printed = run_python([code for _, code, _ in python], tmp_path, shell, absent) if python else []
    for (_, code, shown), found in zip(python, printed, strict=True):
        assert fits(shown or "", found), f"{code}\n{found}"
    for kind, code, _ in here(page, text):
        if kind == "console":
            for command, shown in commands(code):
                done = subprocess.run(
                    ["sh", "-c", command], cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=200
                )
                assert fits(shown, done.stdout + done.stderr), f"$ {command}\n{done.stdout}{done.stderr}"


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "dlx").rglob("*.py"))
    if path.stem != "__main__" and ">>> " in path.read_text(encoding="utf-8")
]


class DefinedHere(doctest.DocTestFinder):
    """A finder for classes with a public `__module__`, by the source of the module with their code."""

    def _from_module(self, module, object):
        body = ast.parse(inspect.getsource(module)).body
        named = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        return getattr(object, "__name__", "") in named or super()._from_module(module, object)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_give_what_they_show(module, np):
    """Examples in docstrings print the shown output; functions that are wrapped in C are found, too."""
    loaded = importlib.import_module(module)
    found = DefinedHere().find(loaded, module)
    if module == "dlx._api.convert":
        found += DefinedHere().find(loaded.convert.__wrapped__, "convert", module=loaded)
    examples = [each for each in found if each.examples]
    assert examples
    runner = doctest.DocTestRunner(verbose=False)
    for each in examples:
        runner.run(each, clear_globs=True)
    assert runner.failures == 0


def for_devices():
    """Yield (page, code) of the blocks that need a GPU."""
    return [(page, code) for page, text in READS.items() for kind, code, _ in blocks(text) if kind == "python gpu"]


def test_blocks_for_a_device_could_run():
    """Without a device, the called functions of dlx exist and accept the arguments."""
    import dlx

    calls = 0
    for page, code in for_devices():
        for node in ast.walk(ast.parse(code, name_of(page))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("dlx."):
                keywords = {each.arg: None for each in node.keywords}
                inspect.signature(getattr(dlx, node.func.attr)).bind(*node.args, **keywords)
                calls += 1
    assert calls >= 5


def test_what_is_run_elsewhere_is_named_there():
    """A page is skipped above only if the other test exists and names it."""
    for page, (_, test) in ELSEWHERE.items():
        if (ROOT / page).exists():
            assert page.rpartition("/")[2] in (ROOT / "tests" / test).read_text(encoding="utf-8")


def test_a_wrong_output_is_seen(shell, tmp_path):
    """The test above fails for a page with a wrong output."""
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    ((_, code, shown),) = runnable(page)
    assert run_python([code], tmp_path, shell) == ["1\n"] != [shown]
    assert fits("a\n...\nd\n", "a\nb\nc\nd\n")
    assert fits("...\n", "")
    assert not fits("a\n...\nd\n", "a\nb\nc\n")
    assert not fits("a.c\n", "abc\n")
    assert fits("a ...: b\n", "a 1.2: b\n")
    assert not fits("a ...: b\n", "a 1.2: c\n")


def test_every_fence_says_its_language():
    """Every fence names its language; otherwise the block would be neither run nor highlighted."""
    allowed = {"python", "console", "text", "c", "cpp", "sh", "toml", "yaml", "python gpu", "console gpu", "make"}
    for page, text in READS.items():
        fences = [line[3:].strip() for line in text.splitlines() if line.startswith("```")]
        opening = fences[::2]
        assert all(not each for each in fences[1::2]), name_of(page)
        unknown = {each for each in opening if each not in allowed}
        assert not unknown, f"{name_of(page)}: {unknown}"


def test_no_code_is_without_a_fence():
    """No code is only indented: these tests would not run it."""
    for page, text in READS.items():
        after = [*re.finditer(r"\n\n {4}(?![-*:])\S.*", prose(text))]
        assert not after, f"{name_of(page)}: {after[0][0].strip()}"


def test_names_and_powers_are_marked_as_code():
    """Names are marked as code; otherwise Markdown drops underscores and asterisks and prints bold text."""
    for page, text in READS.items():
        text = re.sub(r"(?m)^ {4}.*$", "", prose(text))  # options of the reference's pages
        assert bold_by_mistake(text) == [], name_of(page)
    for path in sorted((ROOT / "dlx").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (ast.get_docstring(node) or "").splitlines()
                if path.parent.name == "checks" and "" in lines:  # a program follows the promise
                    lines = lines[: lines.index("")]
                text = "\n".join(line for line in lines if not line.startswith((" " * 8, ">>>", "...")))
                where = f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
                assert len(bold_by_mistake(text)) < 2, where  # one alone is not a pair


def bold_by_mistake(text):
    """Return the marks of bold text that Markdown would find outside of code."""
    text = re.sub(r"(`+)(?:(?!\1).)+\1", "", text, flags=re.DOTALL)
    return re.findall(r"(?<![\w(])__\w+__(?!\w)|\d\*\*\d+", text)


TARGETS = {*re.findall(r"^# make (\w+) ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)}
SESSIONS = {
    name or function
    for name, function in re.findall(
        r'^@nox\.session(?:\(name="([\w-]+)"\))?\ndef (\w+)',
        (ROOT / "noxfile.py").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}


def test_contributing_lists_the_targets_of_make():
    """`make help` describes every target for users; CONTRIBUTING names these targets and every session of nox."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^\| `make .*\n", text, re.MULTILINE))
    assert {*re.findall(r"`make (\w+)`", rows)} == TARGETS
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^(?:\w+ )*{name}(?: \w+)*:", makefile, re.MULTILINE) for name in TARGETS)
    table = text.partition("| sessions |")[2].partition("\n\n")[0]
    assert {*re.findall(r"`([\w-]+)`", table)} == SESSIONS - TARGETS


def test_sessions_of_nox_exist():
    """Pages name sessions of noxfile.py."""
    for page, text in READS.items():
        for name in re.findall(r"\b(?:nox -s |make nox-)([\w-]+)", text):
            assert name in SESSIONS, f"{name_of(page)}: {name}"


def test_contributing_maps_the_packages_as_their_docstrings_do():
    """The rows are the output of `python docs/tools/structure.py map`."""
    assert structure.format_map() in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_shell_blocks_name_what_is_there():
    """They take long, or install: they are not run, but targets of make, modules and files in them exist."""
    seen = 0
    for page, text in READS.items():
        for line in "".join(code for kind, code, _ in blocks(text) if kind == "sh").splitlines():
            command = line.partition("  #")[0]
            for name in re.findall(r"\bmake ([\w-]+)", command):
                assert name in TARGETS, f"{name_of(page)}: {line}"
            for module in re.findall(r"python -m ([\w.]+)", command):
                assert importlib.util.find_spec(module), f"{name_of(page)}: {line}"
            for file in re.findall(r"python (\w+\.py)", command):
                assert (page.parent / file).exists() or (ROOT / file).exists(), f"{name_of(page)}: {line}"
            seen += 1
    assert seen > 10


PATH = re.compile(r"(?<![\w/.-])(?:dlx|c_src|tests|dlx_adapters|docs|examples|benchmarks)/[\w./*-]*[\w/*](?![\w<])")
FILE = re.compile(r"(?<![\w./*<-])(?:\w+/)*[a-z_]\w*\.(?:py|pyi|c|h)(?!\w)")
FOLDERS = ("dlx", "c_src", "dlx_adapters", "benchmarks", "examples", "docs/tools", "tests/support")
FILES = [path for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.*")] + [*ROOT.glob("*.*")]
TEXTS = [
    path
    for path in sorted({*FILES, ROOT / "Makefile"})
    if (path.suffix in (".py", ".pyi", ".c", ".h", ".toml", ".yml") or path.name == "Makefile")
    and "test_" not in path.name
]
# Files of others, and those that the reader of a page writes.
OTHERS = {
    "dlpack.h",
    "cuda.h",
    "pyconfig.h",
    "PC/pyconfig.h",
    "math.h",
    "decoder.c",
    "program.py",
    "name.py",
    "mylib.py",
    "shelf.py",
    "test_dlpack.py",
    "test_ndarray.py",
    "array_interoperability_test.py",
}
OTHERS |= {"PC/pyconfig.h", "_ffi.c", "b.c"}  # of CPython; made by cffi; a name in a saved file
OTHERS |= {"_core/tests/test_dlpack.py", "dlx_mylib.py", "dlx_labelled.py"}


def test_paths_of_the_repository_are_there():
    """Each file or folder that a page, a comment or a docstring names exists, including patterns."""
    missing = []
    for page in [*PAGES, *TEXTS]:
        text = re.sub(r"^#include <.*>|\*\.egg-info", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        named = {path for path in PATH.findall(text) if not any(ROOT.glob(path))}
        named |= {f for f in {*FILE.findall(text)} - OTHERS if not any(str(each).endswith(f"/{f}") for each in FILES)}
        missing += [f"{name_of(page)}: there is no {name}" for name in sorted(named)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    """Linked files and headings exist. Network addresses are not checked."""
    for link in links(READS[page]):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: there is no {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name_of(page)}: there is no {link}"


def test_every_page_is_in_the_navigation_once():
    """Every page is in the navigation once."""
    named = navigation()
    assert len(named) == len({*named})
    written = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert written - {*named} == set()


def test_each_public_name_has_a_page_of_the_reference():
    """A page in docs/reference begins with an example; results and modules are on the pages of their calls."""
    import dlx

    reference = {page: text for page, text in READS.items() if page.parent.name == "reference"}
    for name in {*dlx.__all__, "open"} - {"__version__"}:
        headings = [page for page, text in reference.items() if re.search(rf"^#.*\bdlx\.{name}\b", text, re.MULTILINE)]
        documented = [page for page, text in reference.items() if re.search(rf"^::: dlx\.{name}$", text, re.MULTILINE)]
        assert headings or documented, f"dlx.{name} has no page in docs/reference"
    for page, text in reference.items():
        if page.name != "index.md":
            first = next(iter(blocks(text)), ("", "", None))
            assert (first[0], text.find("```") < text.find("\n:::") or "\n:::" not in text) == ("python", True), (
                page.name
            )


def test_pages_name_public_names_that_exist():
    """Each `dlx.something` on a page exists."""
    import dlx

    modules = {"h", "include"} | {path.stem for path in (ROOT / "dlx").glob("*")}
    for page, text in READS.items():
        for name in {*re.findall(r"\bdlx\.([A-Za-z][A-Za-z_]*)\b", text)}:
            assert hasattr(dlx, name) or name in modules, f"{name_of(page)}: there is no dlx.{name}"


def test_the_stub_of_tensor_says_what_the_type_says():
    """`dlx/_core/native.py`, which checkers, editors and the site read, repeats the C documentation."""
    import dlx

    tree = ast.parse((ROOT / "dlx" / "_core" / "native.py").read_text(encoding="utf-8"))
    (stub,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Tensor"]
    words = lambda text: " ".join(textwrap.dedent(text).split())  # noqa: E731
    assert words(ast.get_docstring(stub)) == words(dlx.Tensor.__doc__)
    for here, after in zip(stub.body, stub.body[1:], strict=False):
        if isinstance(here, ast.AnnAssign) and isinstance(after, ast.Expr) and not here.target.id.startswith("_"):
            assert words(after.value.value) == words(getattr(dlx.Tensor, here.target.id).__doc__), here.target.id
