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
from support.repository.pages import blocks

import dlx
import dlx.typing

EXAMPLES = ROOT / "tests" / "support" / "typing"
WITH = ["targets.py", "containers.py", "mistakes.py"]
CHECKERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("mypy", "pyright")]


def is_made():
    """Tell whether this is the environment that make sets up in this checkout: checkers see in it where dlx is."""
    found = [each.read_text("direct_url.json") or "{}" for each in importlib.metadata.distributions(name="dlxarray")]
    return ROOT.as_uri() in [json.loads(each).get("url") for each in found] and Path(sys.prefix, ".built").exists()


SEARCHED = [] if is_made() else [str(ROOT)]


def report_of_mypy(names, *options, folder=EXAMPLES):
    """Run mypy as a project that has dlx installed does, in its strict mode: (severity, file, line, text) of each."""
    environment = {**os.environ, "MYPYPATH": "" if "--python-executable" in options else ":".join(SEARCHED)}
    environment |= {"MYPY_CACHE_DIR": str(ROOT / ".mypy_cache" / "examples")}
    command = [sys.executable, "-m", "mypy", "--config-file", str(EXAMPLES / "mypy.ini"), "--python-version", "3.11"]
    command += ["--output", "json", *options, *names]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    place = [(each["severity"], os.path.basename(each["file"]), each["line"]) for each in found]
    return [
        (*at, "\n".join(filter(None, (each["message"], each["hint"])))) for at, each in zip(place, found, strict=True)
    ]


def report_of_pyright(names, folder, python=sys.executable):
    """Run pyright with its defaults: (severity, file, line, text) of each message."""
    settings = {"include": names, "extraPaths": SEARCHED if python == sys.executable else []}
    (folder / "pyrightconfig.json").write_text(json.dumps({"pythonVersion": "3.11", **settings}))
    command = [sys.executable, "-m", "pyright", "--project", str(folder), "--outputjson", "--pythonpath", python]
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(names)
    return [
        (each["severity"], os.path.basename(each["file"]), each["range"]["start"]["line"] + 1, each["message"])
        for each in report["generalDiagnostics"]
    ]


def report_of(checker, names, folder, *, python=sys.executable):
    """Copy the examples into the folder and check them there; return the lines of each error, by (file, line)."""
    for name in names:
        shutil.copy(EXAMPLES / name, folder)
    if checker == "mypy":
        options = () if python == sys.executable else ("--python-executable", python)
        report = report_of_mypy(names, *options, folder=folder)
    else:
        report = report_of_pyright(names, folder, python)
    errors = {}
    for severity, name, line, text in report:
        if severity == "error":
            errors[name, line] = [*errors.get((name, line), []), *text.splitlines()]
    return errors


def need(*modules):
    """Skip the test if a module is missing; do not import it."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Give a function: the errors of one checker in the files that use frameworks."""
    known = {}

    def of(checker):
        need(checker, "numpy", "torch", "jax")
        if checker not in known:
            known[checker] = report_of(checker, WITH, tmp_path_factory.mktemp(checker))
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


SHORT = (
    "neither to", "both to", "a number", "a text", "copy is", "no such word", "no such option", "no path", "no target",
    "nothing to stack", "unknown object",
    "may be nothing", "options are named",
    "a generator", "a module holds",
)  # fmt: skip


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_wrong_call_is_one_short_error(errors, checker):
    """Otherwise mypy would print every overload of `convert`, and pyright the attributes of protocols."""
    lines = (EXAMPLES / "mistakes.py").read_text().splitlines()
    wrong = [number for number, line in enumerate(lines, 1) if line.partition("# error: ")[2].startswith(SHORT)]
    assert len(wrong) >= 28
    printed = {number: errors(checker)["mistakes.py", number] for number in wrong}
    most = 2 if checker == "mypy" else 9  # the second: the definition of a plain function
    assert all(len(text) <= most for text in printed.values()), printed
    options = [number for number in wrong if "# error: no such option" in lines[number - 1]]
    assert len(options) >= 12
    assert all(sum("NoSuchOption" in each for each in printed[number]) <= 2 for number in options)  # pyright repeats it
    assert not any("overload" in line.lower() for number in options for line in printed[number]), printed


@pytest.mark.parametrize("checker", CHECKERS)
def test_errors_show_no_private_name(errors, checker):
    """Readers could not look up names of the stub that begin with an underscore."""
    stub = (ROOT / "dlx" / "_api" / "signatures.pyi").read_text()
    private = {*re.findall(r"^\s*(?:class )?(_\w+)(?:[:(]| =)", stub, re.MULTILINE)}
    assert {"_Free", "_Module", "_Torch"} <= private
    lines = (EXAMPLES / "mistakes.py").read_text().splitlines()
    texts = {place: text for place, text in errors(checker).items() if "# error: nothing" not in lines[place[1] - 1]}
    said = {(place, name) for place, text in texts.items() for name in re.findall(r"\b_\w+", "\n".join(text))}
    assert {(place, name) for place, name in said if name in private} == set()


def test_the_examples_do_announce_mistakes():
    """The test above would be empty otherwise."""
    assert len(announced("mistakes.py")) > 30
    assert not announced("targets.py")


LINE = re.compile(r"(?P<call>\w.*?)  # (?!type: )(?P<type>[^#]+?)(?:  # mypy: (?P<mypy>.+))?")


def calls(text):
    """Return {number of a line: match} of the lines that have their type beside them."""
    return {number: match for number, line in enumerate(text.splitlines(), 1) if (match := LINE.fullmatch(line))}


@pytest.fixture(scope="module")
def installed():
    """The sections of libraries.py whose libraries are installed."""
    need("numpy", "torch", "jax")
    first, *others = re.split(r"(?m)^(?=# ---- )", (EXAMPLES / "libraries.py").read_text())
    found = [first]
    for section in others:
        modules = re.findall(r"(?m)^(?:import|from) (\w+)", section)
        if all(importlib.util.find_spec(name) for name in modules):
            found.append(section)
    return "".join(found)


def shorten(text):
    """Return a type as the examples write it: without modules, and with the names of numpy and dlx for two of them."""
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("Unknown", "Any")
    text = re.sub(r"ndarray\[(?:tuple\[Any, \.\.\.\]|Any), (?:dtype\[Any\]|Any)\]", "NDArray[Any]", text)
    return re.sub(r"Literal\['same'.*'unknown'\]", "Outcome", text)


@pytest.mark.parametrize("checker", CHECKERS)
def test_checkers_know_calls_with_objects_of_many_libraries(installed, checker, tmp_path):
    """Each is accepted, and has the type beside it."""
    need(checker)
    wanted = calls(installed)
    assert len(wanted) >= 60
    lines = installed.splitlines()
    for number, match in wanted.items():
        lines[number - 1] = f"reveal_type({match['call']})"
    (tmp_path / "libraries.py").write_text("\n".join(lines) + "\n")
    if checker == "mypy":
        report = report_of_mypy(["libraries.py"], "--disable-error-code", "import-untyped", folder=tmp_path)
    else:
        report = report_of_pyright(["libraries.py"], tmp_path)
    assert [each for each in report if each[0] == "error"] == []
    shown = {
        line: text[text.index('"', text.rindex(" is ")) + 1 : -1] for _, _, line, text in report if ' is "' in text
    }
    untyped = importlib.util.find_spec("pandas-stubs") is None  # pandas' own annotations give other types
    for number, match in wanted.items():
        expected = (checker == "mypy" and match["mypy"]) or match["type"]
        assert shorten(shown[number]) == expected or (untyped and re.search(r"frame|pd\.", match["call"])), match[0]


def test_calls_with_objects_of_many_libraries_run(installed, python, tmp_path):
    """Each returns an object of the type beside it."""
    lines = installed.splitlines()
    for number, match in calls(installed).items():
        name = re.match(r"\w+", match["type"])[0].replace("NDArray", "ndarray").replace("Outcome", "str")
        if name != "Any":
            lines[number - 1] = (
                f"assert {name!r} in [each.__name__.removesuffix('Impl') for each in type({match['call']}).__mro__]"
            )
    python(
        "import os\nos.chdir(os.environ['FOLDER'])\n" + "\n".join(lines),
        args=(),
        env={**os.environ, "FOLDER": str(tmp_path)},
    )


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_framework_that_is_not_installed_is_any(checker, tmp_path):
    """Without any framework, checkers see Any instead, and still refuse objects that are not arrays."""
    need(checker)
    venv.create(tmp_path / "empty")
    (packages,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    (packages / "dlx").symlink_to(ROOT / "dlx")
    python = str(tmp_path / "empty" / "bin" / "python")
    folder = tmp_path / "examples"
    folder.mkdir()
    assert set(report_of(checker, ["alone.py", "strict.py"], folder, python=python)) == announced("alone.py")


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("page", ["accept-any-array", "types"])
def test_checkers_accept_the_functions_of_a_page(checker, page, tmp_path):
    """All functions that the pages for library authors define are complete and right to strict checkers."""
    need(checker, "numpy", "torch", "jax")
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    parts = [code for info, code, _ in blocks(text) if info == "python" and re.search(r"(?m)^(def|import) ", code)]
    assert sum(code.count("def ") for code in parts) >= 3
    (tmp_path / "page.py").write_text("\n".join(parts))
    report = (
        report_of_mypy(["page.py"], folder=tmp_path) if checker == "mypy" else report_of_pyright(["page.py"], tmp_path)
    )
    assert [each for each in report if each[0] == "error"] == []


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
