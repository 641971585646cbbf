"""The recipes of the Makefile: which interpreters they take, and when the extensions are built anew.

Nothing is built or installed: `make -n` says what would be done.
"""

import os
import shutil
import subprocess
import sys

import pytest
from support.project import ROOT

BROKEN = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"
# What `make` tells the programs that it runs, these tests among them: the variables that it was given.
PASSED_ON = (
    *("MAKEFLAGS", "MAKELEVEL", "DLX_SANITIZE", "ARGS", "EXTRA", "JOBS"),
    *("PYTHON", "PYTHONS", "SLOW", "TORCH", "VENV"),
)
WORKING = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'


@pytest.fixture
def made(tmp_path):
    """Run `make -n` in an empty copy of the recipes, on a path whose python3.91 and python3.92 are shims that fail."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
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
        environment = {key: value for key, value in os.environ.items() if key not in PASSED_ON}
        done = subprocess.run(
            command, cwd=tmp_path / "checkout", env=environment | changes, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.folder = tmp_path
    return run


def script(path, text):
    """Write a file that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def test_an_interpreter_that_does_not_run_is_left_out_with_a_word(made):
    """It is told before anything is tested; the others are tested."""
    printed = made("test-all", "PYTHONS=python3.91 python3.92")
    note = printed.index("note: python3.91 does not run here; left out")
    assert note < printed.index("-m venv") and note < printed.index("-m pytest")


@pytest.mark.parametrize("target", ["demo", "test"])
def test_what_may_be_missing_is_looked_for_before_anything_large_is_downloaded(made, target):
    """A compiler; `make test` says how long it takes before all else."""
    printed = made(target)
    assert printed.index("setup.py --name") < printed.index("--editable") < printed.index("--requirement")
    assert printed.index("--requirement") < printed.index("--only-binary")
    assert (target == "test") == printed.startswith('echo "note: the tests take ')


def test_the_demo_waits_for_no_byte_code_that_it_does_not_need(made):
    """Python keeps what it imports, also where that is switched off. Tests start Python often: all is compiled."""
    assert "compileall" not in made("demo") and "PYTHONDONTWRITEBYTECODE= " in made("demo")

    def without(*words):
        lines = [line for line in made(*words).splitlines() if " install " in line and "--no-compile" in line]
        return sorted("torch" if "torch" in line else line.rpartition("/")[2] for line in lines)

    assert without("demo") == [".extra-demo.txt", "torch"] and without("test") == ["torch"]
    assert without(".venv-cuda/.extra-test-bare", "VENV=.venv-cuda") == []
    printed = made("test")
    assert printed.index("--only-binary") < printed.index("compileall -qq -j 0 .venv/lib") < printed.index("-m pytest")


def test_slow_tests_are_left_out_by_make_test_alone(made):
    """Not where they are asked for, nor where tests are picked, nor by what is run seldom; CI asks for them."""

    def left_out(*arguments):
        (line,) = [line for line in made(*arguments).splitlines() if " -m pytest " in line]
        assert ("DLX_EXAMPLES=" in line) == ("slow" in line)
        return '-m "not slow"' in line

    assert left_out("test") and left_out("test", "SLOW=0")
    assert not left_out("test", "ARGS=-x") and not left_out("test", "SLOW=1")
    assert not left_out("test-bare") and not left_out("test-sanitize") and not left_out("without-gil")
    ci = ROOT / ".ci" / "run"
    assert not ci.exists() or '\n.ci/tests test "" SLOW=1\n' in ci.read_text(encoding="utf-8")


def test_an_interpreter_of_pyenv_is_found_behind_its_shim(made):
    """Stated for the further tests, and stated as the one that everything runs with."""
    found = str(made.folder / "pyenv" / "versions" / "3.92.1" / "bin" / "python3.92")
    version = "{}.{}".format(*sys.version_info)
    assert f"{found} -m venv .venv-{version}\n" in made("test-pythons", "PYTHONS=python3.91 python3.92")
    assert f"{found} -m venv .venv\n" in made("demo", "PYTHON=python3.91 python3.92")


def test_the_sanitizers_are_part_of_what_is_built(made):
    """With another DLX_SANITIZE the extensions are built anew, by each environment; with the same one they are not."""
    for name in (".made", ".built", ".torch-"):
        stamp = made.folder / "checkout" / ".venv" / name
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()

    def builds(*arguments):
        """Note what is asked for, tell whether that means to build, and act as if it were done."""
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


def test_what_builds_a_free_threaded_python_is_not_run_by_a_dry_run_and_may_fail(made):
    """It downloads and configures; without an interpreter of it nothing is tested, and where it fails make does."""
    folder = made.folder / "checkout"
    helper = folder / "tests" / "support" / "environments" / "free_threaded.sh"
    script(helper, "#!/bin/sh\ntouch called\n")
    made("test-free-threaded")
    assert not (folder / "called").exists()
    assert "-m pytest" not in made("test-free-threaded", dry=False)
    assert (folder / "called").exists()
    script(helper, "#!/bin/sh\nexit 3\n")
    with pytest.raises(AssertionError, match="Error 3"):
        made("test-free-threaded", dry=False)
