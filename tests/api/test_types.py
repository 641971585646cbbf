"""Type checkers: mypy and pyright check the files in tests/support/typing, each once."""

import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import typing
import venv
from pathlib import Path

import pytest
from support.project import ROOT

import dlx
import dlx.typing

EXAMPLES = ROOT / "tests" / "support" / "typing"
WITH = ["targets.py", "containers.py", "mistakes.py"]
CHECKERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("mypy", "pyright")]


def is_made():
    """Tell whether this is the environment that make sets up in this checkout: checkers see in it where dlx is."""
    found = importlib.metadata.distribution("dlxarray").read_text("direct_url.json") or "{}"
    return json.loads(found).get("url") == ROOT.as_uri() and Path(sys.prefix, ".built").exists()


SEARCHED = [] if is_made() else [str(ROOT)]


def run_mypy(names, *options):
    """Run mypy as a project that has dlx installed does, in its strict mode.

    Give {(file, line) of an error: how many lines mypy prints about it}.
    """
    environment = {**os.environ, "MYPYPATH": "" if "--python-executable" in options else ":".join(SEARCHED)}
    environment |= {"MYPY_CACHE_DIR": str(ROOT / ".mypy_cache" / "examples")}
    command = [sys.executable, "-m", "mypy", "--python-version", "3.11", "--output", "json", *options, *names]
    done = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    printed = {}
    for each in found:
        if each["severity"] == "error":
            place = os.path.basename(each["file"]), each["line"]
            printed[place] = printed.get(place, 0) + 1 + len((each["hint"] or "").splitlines())
    return printed


def run_pyright(names, folder, python=sys.executable):
    """Run pyright with its defaults; return (file, line) of the errors."""
    for name in names:
        shutil.copy(EXAMPLES / name, folder)
    settings = {"include": names, "extraPaths": SEARCHED if python == sys.executable else []}
    (folder / "pyrightconfig.json").write_text(json.dumps({"pythonVersion": "3.11", **settings}))
    command = [sys.executable, "-m", "pyright", "--project", str(folder), "--outputjson", "--pythonpath", python]
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(names)
    found = [each for each in report["generalDiagnostics"] if each["severity"] == "error"]
    return {(os.path.basename(each["file"]), each["range"]["start"]["line"] + 1) for each in found}


def need(*modules):
    """Skip the test if a module is missing; do not import it."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Give a function: the errors of one checker in the files that use frameworks; of mypy with numbers of lines."""
    known = {}

    def of(checker):
        need(checker, "numpy", "torch", "jax")
        if checker not in known:
            folder = tmp_path_factory.mktemp(checker)
            known[checker] = run_mypy(WITH) if checker == "mypy" else run_pyright(WITH, folder)
        return known[checker]

    return of


def announced(name):
    """Return the lines of a file that are marked as errors."""
    lines = (EXAMPLES / name).read_text().splitlines()
    return {(name, number) for number, line in enumerate(lines, 1) if "# error: " in line}


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("name", WITH)
def test_errors_are_where_the_file_says_so_and_nowhere_else(errors, checker, name):
    """Each `assert_type` holds, each mistake is seen, and nothing that is right is refused."""
    assert {each for each in errors(checker) if each[0] == name} == announced(name)


@pytest.mark.parametrize("checker", CHECKERS)
def test_checkers_follow_the_environment_of_a_checkout(errors, checker):
    """The `.venv` of make has the types of dlx: checkers find them for the examples."""
    if not is_made():
        pytest.skip("this is not the environment that make sets up in this checkout")
    assert set(errors(checker)) == set().union(*map(announced, WITH))


@pytest.mark.slow
def test_mypy_tells_a_wrong_argument_in_one_line(errors):
    """Otherwise mypy would print every overload of `convert`: 47 lines for each mistake."""
    lines = (EXAMPLES / "mistakes.py").read_text().splitlines()
    said = ("no such option", "no such word", "copy is", "no device", "a number", "a text", "unknown object")
    said += ("a module holds", "no path", "nothing to stack")
    wrong = [number for number, line in enumerate(lines, 1) if line.partition("# error: ")[2].startswith(said)]
    assert len(wrong) >= 22
    printed = {number: errors("mypy")["mistakes.py", number] for number in wrong}
    assert all(number <= 2 for number in printed.values()), printed  # the second: the definition of a plain function


def test_the_examples_do_announce_mistakes():
    """The test above would be empty otherwise."""
    assert len(announced("mistakes.py")) > 30
    assert not announced("targets.py")


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_framework_that_is_not_installed_is_any(checker, tmp_path):
    """Without any framework, checkers see Any instead, and still refuse objects that are not arrays."""
    need(checker)
    venv.create(tmp_path / "empty")
    (packages,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    (packages / "dlx").symlink_to(ROOT / "dlx")
    python = str(tmp_path / "empty" / "bin" / "python")
    names = ["alone.py", "strict.py"]
    if checker == "mypy":
        found = run_mypy(names, "--python-executable", python)
    else:
        found = run_pyright(names, tmp_path, python=python)
    assert set(found) == announced("alone.py")


def test_dlx_says_that_it_is_typed():
    """Type checkers need py.typed to read the annotations."""
    assert (ROOT / "dlx" / "py.typed").exists()


def test_the_options_for_checkers_are_those_of_convert():
    """`Options` has every option of `convert`; `to`, `like`, `lazy` and `out` choose the overload."""
    parameters = inspect.signature(dlx.convert).parameters
    options = [name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
    assert {*dlx.typing.Options.__annotations__} == {*options} - {"like", "lazy", "out"}
    assert {*re.findall(r"`(\w+)`", dlx.typing.Options.__doc__)} == {*dlx.typing.Options.__annotations__}
    for name in ("readonly", "errors"):
        words = typing.get_args(getattr(dlx.typing, name.capitalize()))
        assert parameters[name].default == words[0]
        for word in words:
            dlx.convert(b"abc", to="dlx", **{name: word})
        with pytest.raises(ValueError, match=f"{name} must be"):
            dlx.convert(b"abc", to="dlx", **{name: "never"})


def test_the_outcomes_for_checkers_are_those_of_plans():
    """`Outcome` has every word that `Plan` documents, and steps name what they may do."""
    from dlx._engine.plan import Plan, Step

    def words(kind, name):
        said = re.search(rf"^{name}\n((?: {{4,}}.*\n)+)", inspect.getdoc(kind) + "\n", re.MULTILINE)
        return re.findall(r'``"(\w+)"``', said[1])

    assert words(Plan, "outcome") == [*typing.get_args(dlx.typing.Outcome)]
    done = set()
    for path in (ROOT / "dlx").rglob("*.py"):
        kinds = "Step|Resolve|Relabel|Unmark|Copy|Address|ViewAs"
        done |= {*re.findall(rf'\b(?:{kinds})\(\s*(?:blocker\.option or )?"(\w+)"', path.read_text())}
    assert len(done) > 6
    assert done == {*words(Step, "do")}


def test_the_names_that_have_overloads_are_targets():
    """Each name that a checker knows is one that dlx knows."""
    from dlx._registry.registry import registry

    text = (ROOT / "dlx" / "_api" / "signatures.pyi").read_text()
    names = re.findall(r'"(\w+)"', " ".join(re.findall(r"TypeAlias = Literal\[(.*)\]", text)))
    assert {"dlx", "numpy", "torch", "jax"} <= set(names)
    for name in names:
        assert name in ("dlx", "arrow") or name in registry._loader.plugins


def test_supports_dlpack_tells_arrays_at_run_time():
    """`isinstance` looks for the method."""
    assert isinstance(dlx.empty(3, "int8"), dlx.SupportsDLPack)
    assert not isinstance(b"abc", dlx.SupportsDLPack)
    assert dlx.SupportsDLPack is dlx.typing.SupportsDLPack


def test_the_types_for_annotations_are_there_once_dlx_is_imported(python):
    """``dlx.typing.Options`` needs no second import, for a checker or at run time; `import *` does not bring it."""
    python("import dlx\nassert dlx.typing.Options.__total__ is False")
    python("from dlx import *\nassert 'typing' not in globals() and 'convert' in globals()")


def test_views_may_be_written_as_types():
    """The classes of views take arguments where they are written, as `list` does."""
    from dlx._views.mapping import MutableMappingView
    from dlx._views.sequence import MutableSequenceView, SequenceView

    for kind in (SequenceView[int], MutableSequenceView[int], MutableMappingView[str, int]):
        assert isinstance(kind.__origin__, type)
