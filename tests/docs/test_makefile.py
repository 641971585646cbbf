"""The Makefile and noxfile.py: the interpreters that they choose, and when the extensions are built again.

Nothing is built or installed: `make -n` prints the commands, and sessions of nox run with a session that records them.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
from support.project import ROOT

BROKEN = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"
# Variables that `make` exports to the programs that it runs, these tests among them.
EXPORTED = (
    *("MAKEFLAGS", "MAKELEVEL", "DLX_SANITIZE", "ARGS", "EXTRA", "JOBS"),
    *("PYTHON", "PYTHONS", "SLOW", "TORCH", "VENV", "FREE_THREADED_PYTHON"),
)
WORKING = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'


@pytest.fixture
def made(tmp_path):
    """Run `make -n` in a copy of the Makefile, on a path whose python3.91 and python3.92 are shims that fail."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("python3.91", "python3.92"):
        script(tmp_path / "shims" / name, BROKEN)
    script(tmp_path / "pyenv" / "versions" / "3.92.1" / "bin" / "python3.92", WORKING)
    (tmp_path / "checkout").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path / "checkout")
    for name in ("build_ffi.py", "setup.py", "pyproject.toml", "constraints.txt", "dlx/_core/headers.py"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout" / name).touch()

    def run(*arguments, dry=True):
        changes = {"PATH": f"{tmp_path / 'shims'}:{os.environ['PATH']}", "PYENV_ROOT": str(tmp_path / "pyenv")}
        command = ["make", *(["-n"] if dry else []), f"PYTHON={sys.executable}", *arguments]
        environment = {key: value for key, value in os.environ.items() if key not in EXPORTED}
        done = subprocess.run(
            command, cwd=tmp_path / "checkout", env=environment | changes, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.folder = tmp_path
    return run


class Recorder(list):
    """A session of nox that records the commands, as text."""

    class Skip(Exception):
        """The session was skipped."""

    def __init__(self, *posargs):
        self.posargs = posargs

    def run(self, *command, **_):
        self.append(" ".join(command))

    def log(self, text):
        self.append(f"note: {text}")

    def notify(self, name):
        self.append(f"nox -s {name}")

    def skip(self, reason):
        raise self.Skip(reason)


@pytest.fixture
def sessions(made, monkeypatch):
    """Load noxfile.py, which finds interpreters as the fixture `made` does; return (the module, a session)."""
    session = lambda *arguments, **_: arguments[0] if arguments else lambda function: function  # noqa: E731
    monkeypatch.setitem(
        sys.modules, "nox", types.SimpleNamespace(session=session, options=types.SimpleNamespace(), Session=Recorder)
    )
    for name in EXPORTED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONS", "python3.91 python3.92")
    monkeypatch.setenv("PYENV_ROOT", str(made.folder / "pyenv"))
    monkeypatch.setenv("PATH", f"{made.folder / 'shims'}:{os.environ['PATH']}")
    spec = importlib.util.spec_from_file_location("sessions", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, Recorder()


def script(path, text):
    """Write an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def test_an_interpreter_that_does_not_run_is_left_out_with_a_word(sessions):
    """A note comes before the tests under the other interpreters."""
    module, session = sessions
    module.pythons(session)
    note, tests = session
    assert note == "note: python3.91 does not run here; left out"
    assert tests.startswith("make --no-print-directory test ") and "VENV=.venv-3.92" in tests


def test_all_runs_every_environment(sessions):
    """All tests here, then the sessions for other environments."""
    module, session = sessions
    module.everything(session)
    assert [each.split()[-1] for each in session[:4]] == ["pythons", "debian", "old-numpy", "bare"]
    assert "test" in session[4].split()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_what_may_be_missing_is_looked_for_before_anything_large_is_downloaded(made, target):
    """A missing compiler is found before any download; `make test` first prints how long it takes."""
    printed = made(target)
    assert printed.index("setup.py --name") < printed.index("--editable") < printed.index("--requirement")
    assert printed.index("--requirement") < printed.index("--only-binary")
    assert (target == "test") == printed.startswith('echo "note: the tests take ')


def test_the_demo_waits_for_no_byte_code_that_it_does_not_need(made):
    """The demo compiles no byte code; the tests, which start Python often, compile all."""
    assert "compileall" not in made("demo") and "PYTHONDONTWRITEBYTECODE= " in made("demo")

    def without(*words):
        lines = [line for line in made(*words).splitlines() if " install " in line and "--no-compile" in line]
        return sorted("torch" if "torch" in line else line.rpartition("/")[2] for line in lines)

    assert without("demo") == [".extra-demo.txt", "torch"] and without("test") == ["torch"]
    assert without(".venv-cuda/.extra-test-bare", "VENV=.venv-cuda") == []
    printed = made("test")
    assert printed.index("--only-binary") < printed.index("compileall -qq -j 0 .venv/lib") < printed.index("-m pytest")


def test_slow_tests_are_left_out_by_make_test_alone(made, sessions):
    """`make test` leaves them out, except with SLOW=1 or ARGS; sessions of nox and CI run them."""

    def left_out(*arguments):
        (line,) = [line for line in made(*arguments).splitlines() if " -m pytest " in line]
        assert ("DLX_EXAMPLES=" in line) == ("slow" in line)
        return '-m "not slow"' in line

    assert left_out("test") and left_out("test", "SLOW=0")
    assert not left_out("test", "ARGS=-x") and not left_out("test", "SLOW=1")
    module, session = sessions
    for run in (module.bare, module.sanitize, module.cookbook):
        run(session)
    assert len(session) == 3 and all(" SLOW=1" in each for each in session)
    ci = ROOT / ".ci" / "run"
    assert not ci.exists() or "\n.ci/tests make test SLOW=1\n" in ci.read_text(encoding="utf-8")


def test_an_interpreter_of_pyenv_is_found_behind_its_shim(made, sessions):
    """The session `pythons` and make's variable PYTHON find it."""
    found = str(made.folder / "pyenv" / "versions" / "3.92.1" / "bin" / "python3.92")
    module, session = sessions
    module.pythons(session)
    assert f" PYTHON={found} VENV=.venv-3.92" in session[-1]
    assert f"{found} -m venv .venv\n" in made("demo", "PYTHON=python3.91 python3.92")


def test_arguments_reach_the_tests(made, sessions, monkeypatch):
    """A session passes on the arguments behind `--`, or the variable ARGS of `make nox-NAME ARGS=...`."""
    module, _ = sessions
    session = Recorder("-k", "two words")
    module.bare(session)
    module.soak(session)
    assert "ARGS=-k 'two words'" in session[0] and "ARGS=tests/support stress.soak -k 'two words'" in session[1]
    monkeypatch.setenv("ARGS", "-x -q")
    module.bare(session := Recorder())
    assert "ARGS=-x -q" in session[0]
    assert ".venv-nox/bin/nox --session bare\n" in made("nox-bare", "ARGS=-x -q")


def test_sessions_describe_themselves(sessions):
    """`nox --list` shows the first line of each docstring, in one line of a terminal."""
    module, _ = sessions
    source = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    found = re.findall(r"^@nox\.session.*\ndef (\w+)", source, re.MULTILINE)
    assert len(found) > 25
    for name in found:
        assert getattr(module, name).__doc__.partition("\n")[0].endswith("."), name


def test_the_sanitizers_are_part_of_what_is_built(made):
    """A changed DLX_SANITIZE rebuilds the extensions in each environment; an unchanged one does not."""
    for name in (".made", ".built", ".torch-"):
        stamp = made.folder / "checkout" / ".venv" / name
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()

    def builds(*arguments):
        """Record the request, return whether it builds, and act as if it were done."""
        made("build/sanitize", *arguments, dry=False)
        printed = made("test", "TORCH=", *arguments)
        (made.folder / "checkout" / ".venv" / ".built").touch()
        assert ("libasan.so" in printed) == ("DLX_SANITIZE=1" in arguments)
        return "--editable" in printed

    builds()
    assert not builds()
    assert builds("DLX_SANITIZE=1")
    assert not builds("DLX_SANITIZE=1")
    assert builds()
    assert not builds("DLX_SANITIZE=0")


def test_what_builds_a_free_threaded_python_is_not_run_by_a_dry_run_and_may_fail(made, sessions, monkeypatch):
    """Without an interpreter the session is skipped; if the build fails, the session fails."""
    module, session = sessions
    folder = made.folder / "checkout"
    monkeypatch.setattr(module, "ROOT", folder)
    helper = folder / "tests" / "support" / "environments" / "free_threaded.sh"
    script(helper, "#!/bin/sh\ntouch called\n")
    with pytest.raises(Recorder.Skip):
        module.free_threaded(session)
    assert not session and (folder / "called").exists()
    script(helper, "#!/bin/sh\nexit 3\n")
    with pytest.raises(subprocess.CalledProcessError):
        module.free_threaded(session)
    script(helper, "#!/bin/sh\necho a-python\n")
    module.free_threaded(session)
    assert len(session) == 2 and all("PYTHON=a-python" in each for each in session)
