"""The kit's command, its pytest plugin, declared exceptions, workers that die, and its messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import conformance
import pytest
from support.kit import libraries
from support.project import ROOT

import dlx
from dlx._support.screen import Screen
from dlx.testing import CHECKS, Broken, Check, NotApplicable, Source, Subject, Taken, find, of_kinds, pattern, run
from dlx.testing.check import excepting
from dlx.testing.report import ABOUT, Grades, convert_to_json, print_grades

FAST = ("copy-true", "export-strides", "export-snapshot")


def command(*args, folder=None, pytest_too=False):
    """Run the kit's command, or pytest with the kit, in a new process."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT / "tests")]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # hypothesis takes longer to import than the kit to grade
    }
    start = ["-m", "pytest", "-p", "dlx.testing", "-q"] if pytest_too else ["-m", "dlx.testing"]
    return subprocess.run(
        [sys.executable, *start, *args], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )


def only(*names):
    """Return the options that select checks."""
    return [word for name in names for word in ("--only", name)]


def test_a_reader_that_goes_away_ends_it_quietly():
    """`python -m dlx.testing --list | head` prints no message about the closed pipe."""
    code = "import runpy, sys; sys.argv[1:] = ['--list']; runpy.run_module('dlx.testing', run_name='__main__')"
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=environment
    )
    os.close(writing)
    assert (done.stderr, done.returncode) == ("", 141)


def test_all_kept_is_status_0_and_plain_text_in_a_pipe():
    """One line for each promise, no control characters."""
    done = command("support.kit.libraries:subject_good", *only(*FAST))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "planted: 3 keeps"
    assert [line.split()[2] for line in lines[1:]] == ["export-strides", "export-snapshot", "copy-true"]
    assert "\x1b" not in done.stdout


def test_a_broken_promise_is_status_1_with_its_reproduction():
    """The output has the observation and a reproduction."""
    done = command("support.kit.libraries:subject_copy-true", *only("copy-true"))
    assert done.returncode == 1
    assert "breaks   producer copy-true" in done.stdout and "copy=True shares" in done.stdout
    assert 'CHECKS["copy-true"](find("support.kit.libraries:subject_copy-true"))' in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["no_such_library"], "no_such_library"),
        (["support.kit.libraries:nothing"], "not a dlx.testing.Subject"),
        (["dlx", "--only", "no-such-check"], "there is no no-such-check"),
        (["dlx", "--kinds", "cook"], "there is no cook"),
        (["dlx", "--except", "copy-true"], "needs a reason"),
        (["dlx", "--except", "copy-tru=why"], "there is no check copy-tru"),
        ([], "name a subject"),
    ],
)
def test_what_cannot_be_graded_is_status_2(args, words):
    """Status 2 comes with one sentence about the reason."""
    done = command(*args)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr


def test_json_holds_everything():
    """JSON has promise, kind, severity, status, observation and reproduction."""
    done = command("support.kit.libraries:subject_copy-true", "--json", *only("copy-true", "copy-false"))
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    (subject,) = found["subjects"]
    by_name = {row["check"]: row for row in subject["verdicts"]}
    assert by_name["copy-true"]["status"] == "breaks" and by_name["copy-true"]["severity"] == "wrong"
    assert "reproduction" in by_name["copy-true"] and "reproduction" not in by_name["copy-false"]
    assert by_name["copy-false"]["status"] == "keeps"


def test_an_exception_is_declared_with_a_reason():
    """It is shown with its reason, and does not fail."""
    done = command(
        "support.kit.libraries:subject_copy-true", *only("copy-true"), "--except", "copy-true=it never copies"
    )
    assert done.returncode == 0
    assert "excepted" in done.stdout and "declared: it never copies" in done.stdout


def test_an_exception_that_is_not_needed_any_more_breaks():
    """Else it would hide the next fault."""
    subject = excepting(libraries.subject_good, {"copy-true": "it never copies"})
    found = CHECKS["copy-true"](subject)
    assert found.status == "breaks" and "no longer needed" in found.seen


def test_a_subject_states_its_exceptions_with_a_reason():
    """The exceptions of a `Subject` need a reason, too."""
    with pytest.raises(ValueError, match="needs a reason: copy-true"):
        Subject("bare", exceptions={"copy-true": " "})


def test_pytest_makes_a_test_of_each_promise(tmp_path):
    """Tests are named after subject and check, and have pytest's outcomes."""
    chosen = "copy-true or copy-false or export-readonly or max-version-1 or import-scalar"
    done = command(
        "--dlx-adapter=support.kit.libraries:subject_copy-true", "--dlx-except=keyword-max-version-1=it is not so",
        "-k", chosen, "-vv", pytest_too=True, folder=tmp_path,
    )  # fmt: skip
    text = done.stdout
    assert done.returncode == 1, text + done.stderr
    for line in (
        "planted::copy-false PASSED", "planted::copy-true FAILED", "planted::export-readonly PASSED",
        "planted::keyword-max-version-1 FAILED",
    ):  # fmt: skip
        assert line in text, text
    assert "`copy=True` never shares: it returns new memory" in text and "no longer needed" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_pytest_skips_and_xfails(tmp_path):
    """Checks that do not apply are skipped with the reason; declared exceptions are expected failures."""
    (tmp_path / "test_own.py").write_text("def test_mine():\n    pass\n")
    kit = [
        "--dlx-adapter=support.kit.libraries:subject_copy-true",
        "--dlx-except=copy-true=never",
        "-k",
        "copy-true and not import and not served or mine",
        "-rsx",
    ]
    alone = command(*kit, pytest_too=True, folder=tmp_path)
    assert "1 skipped" in alone.stdout and "1 xfailed" in alone.stdout and "XFAIL" in alone.stdout, alone.stdout
    assert "passed" not in alone.stdout
    both = command(*kit, "test_own.py", pytest_too=True, folder=tmp_path)
    assert "1 passed" in both.stdout and "1 xfailed" in both.stdout, both.stdout


def test_pytest_says_what_it_cannot_find(tmp_path):
    """An unknown subject is a usage error."""
    done = command("--dlx-adapter=no_such_library", pytest_too=True, folder=tmp_path)
    assert done.returncode == 4 and "no_such_library" in done.stderr + done.stdout


# ---- workers ---------------------------------------------------------------------------------------------------------


def test_a_check_that_kills_its_process_is_blamed_and_the_rest_goes_on():
    """The check that kills its process is broken, and the others are graded."""
    names = ("asks-for-version", "newer-minor", "old-producer", "deleter-once")
    found = list(run(libraries.subject_dies, [CHECKS[name] for name in names]))
    assert [verdict.check for verdict in found] == list(names)
    assert [verdict.status for verdict in found] == ["keeps", "breaks", "keeps", "keeps"]
    assert "SIGABRT" in found[1].seen


@pytest.mark.slow
def test_a_check_that_never_ends_is_blamed(monkeypatch):
    """A check that hangs is broken, and its process is killed."""
    monkeypatch.setattr("dlx.testing.runner.PATIENCE", 5)
    (found,) = run(libraries.subject_hangs, [CHECKS["newer-minor"]])
    assert found.status == "breaks" and "hangs" in found.seen


def test_a_worker_that_never_begins_is_said_to_be_slow(monkeypatch):
    """The error reports a slow start, for instance on a busy machine."""
    monkeypatch.setattr("dlx.testing.runner.STARTING", 0)
    with pytest.raises(RuntimeError, match="did not begin within 0 seconds"):
        list(run(libraries.subject_hangs, [CHECKS["newer-minor"]]))


def test_a_fresh_process_must_be_able_to_find_the_subject():
    """A subject that exists only in this process is refused."""
    with pytest.raises(ValueError, match="no spec"):
        list(run(Subject("here"), [CHECKS["copy-true"]]))


# ---- checks and their words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_a_check_says_what_it_promises(check):
    """A promise is one sentence in a known row; its code has ten lines at most."""
    assert check.promise.endswith(".") and check.promise.count(". ") == 0
    assert check.about in ABOUT
    assert len(check.shows.strip().splitlines()) <= 10
    assert check.function.__doc__ or check.name.startswith(("import-", "keyword-max-version-"))


def test_a_fault_of_the_kit_is_no_grade():
    """Only `Broken` breaks a promise, and only `NotApplicable` skips it; other exceptions are errors of the kit."""
    subject = Subject("any")

    def raising(error):
        def function(lib):
            raise error

        return Check("own", "It does.", "producer", "dtypes", "wrong", function)(subject).status

    assert raising(Broken("seen")) == "breaks"
    assert raising(NotApplicable("none")) == "n/a"
    assert raising(KeyError("kit")) == "error"
    assert Grades(subject, "", (Check("copy-true", "", "producer", "", "", lambda lib: 1 / 0)(subject),)).status == 2


def test_patterns_hold_what_conversions_lose():
    """Patterns contain NaN payloads, a signalling NaN, -0.0, subnormals and infinity; bools are 0 and 1."""
    words = [int.from_bytes(pattern("float32", 6)[4 * i : 4 * i + 4], "little") for i in range(5)]
    assert words == [0xFFFFFFFF, 0x7F800001, 0x80000000, 1, 0x7F800000]
    assert set(pattern("bool", 24)) == {0, 1}
    assert len(pattern("int4", 3)) == 2 and len(pattern("complex64", 3)) == 24


def test_a_source_keeps_account():
    """A source records its exports and the calls of their deleters."""
    source = Source("int32", (2, 3), (1, 2))
    assert source.amiss() == ""
    taken = Taken(source.__dlpack__(max_version=(1, 0)))
    assert (taken.shape, taken.strides, taken.elements()) == ((2, 3), (1, 2), source.elements())
    assert source.amiss() == ""
    taken.consume()
    assert "called 0 times" in source.amiss()
    taken.delete(thread=True)
    assert source.amiss() == ""
    taken.delete()
    assert "called 2 times" in source.amiss()


def test_what_others_do_with_ctypes_does_not_matter():
    """Other users of ctypes.pythonapi do not affect the kit's function types."""
    import ctypes

    functions = [getattr(ctypes.pythonapi, f"PyCapsule_{name}") for name in ("SetName", "GetName", "GetPointer", "New")]
    before = [(function.restype, function.argtypes) for function in functions]
    try:
        for function in functions:
            function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double]
        test_a_source_keeps_account()
    finally:
        for function, (restype, argtypes) in zip(functions, before, strict=True):
            function.restype, function.argtypes = restype, argtypes


def test_a_page_tells_what_was_found():
    """The page shows versions, the summary table, and each fault with its code; the picture is well-formed XML."""
    from xml.etree import ElementTree

    graded = [
        Grades(subject, "1.5", tuple(CHECKS[name](subject) for name in ("copy-true", "export-snapshot")))
        for subject in (libraries.subject_good, getattr(libraries, "subject_copy-true"))
    ]
    reports = conformance.read(json.loads(json.dumps(convert_to_json(graded))))
    page = conformance.as_page(reports, "picture.svg")
    assert "planted 1.5" in page and "![" in page
    assert "| producer: copies | ✓ | **✗ 1** of 1 |" in page
    assert page.count("```python") == 1
    ElementTree.fromstring(conformance.as_picture(reports))


def test_a_terminal_shows_the_same(capsys, monkeypatch):
    """A terminal shows a table of marks, promises, faults and reproductions."""
    monkeypatch.setenv("NO_COLOR", "1")
    names = ("copy-true", "copy-false", "export-snapshot")
    subject = getattr(libraries, "subject_copy-true")
    print_grades(Grades(subject, "1.5", tuple(CHECKS[name](subject) for name in names)), Screen("", width=120))
    shown = capsys.readouterr().out
    assert "planted 1.5: 2 keeps, 1 breaks" in shown
    assert re.search("✗ +copy-true", shown) and re.search("✓ +copy-false", shown)
    assert 'CHECKS["copy-true"]' in shown


def test_every_library_known_here_describes_itself():
    """Each installed library creates the arrays that its subject declares."""
    subject = find("dlx")
    assert {check.kind for check in of_kinds(subject)} == {"producer", "consumer", "adapter"}
    for dtype in subject.dtypes:
        assert subject.array(dtype)[0].dtype == dlx.DType(dtype)


def test_what_nobody_reads_is_no_error():
    """A closed pipe and a full disk cause at most one line, and no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    start = [sys.executable, "-m", "dlx.testing", "--list"]
    done = subprocess.run(start, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            done = subprocess.run(start, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        said = "python -m dlx.testing: writing failed: No space left on device\n"
        assert (done.returncode, done.stderr) == (2, said)


def test_the_page_is_written(tmp_path):
    """The documentation's tool writes the page from printed grades; a failed kit is status 2."""
    done = command("support.kit.libraries:subject_good", "--json", *only("copy-true"))
    (tmp_path / "grades.json").write_text(done.stdout)
    failed = json.loads(done.stdout)
    failed["subjects"][0]["verdicts"][0]["status"] = "error"
    (tmp_path / "failed.json").write_text(json.dumps(failed))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "docs" / "tools"), *filter(None, sys.path)])}
    for name, status in (("grades", 0), ("failed", 2)):
        words = [sys.executable, "-m", "conformance", str(tmp_path / f"{name}.md"), str(tmp_path / f"{name}.json")]
        written = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        assert (written.returncode, written.stderr) == (status, "")
        assert f"{name}.md: 1 libraries, 1 promises" in written.stdout
        assert f"({name}.svg)" in (tmp_path / f"{name}.md").read_text() and (tmp_path / f"{name}.svg").exists()


def test_a_name_that_is_not_known_shows_those_that_are():
    """An unknown name lists the kit's libraries and other adapters, also with --json."""
    done = command("nosuch", "--json")
    assert done.returncode == 2
    for name in ("numpy", "mlx", "cupy", "module:attribute"):
        assert name in done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["subjects"]) == (1, [])
    (error,) = found["errors"]
    assert error["subject"] == "nosuch" and error["message"] in done.stderr


def test_the_list_of_checks_as_json():
    """`--list --json` prints all checks as data."""
    found = json.loads(command("--list", "--json").stdout)
    assert found["schema"] == 1
    assert {each["name"] for each in found["checks"]} == {*CHECKS}
