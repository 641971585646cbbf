"""First contact: an unbuilt checkout, another project's `dlx`, a machine without a compiler."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from support.project import ROOT


@pytest.fixture
def checkout(tmp_path):
    """Return an unbuilt checkout with the files in git."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "dlx", folder / "dlx", ignore=shutil.ignore_patterns("*.so", "_ffi.c", "__pycache__"))
    shutil.copy(ROOT / "build_ffi.py", folder)
    return folder


def run(folder, *words, path=()):
    """Run Python in a folder, without this environment's import hook for dlx; return the finished process."""
    packages = [each for each in sys.path if each.endswith("site-packages")]
    path = os.pathsep.join(map(str, (*path, *packages)))
    env = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120)


def shown_commands():
    """Return the code of each `python -c` and `python -m` that docs/install.md has the reader run."""
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    return re.findall(r'^\$ python -c "(.*)"$', text, re.MULTILINE)


def test_an_unbuilt_source_folder_says_what_it_is(checkout):
    """In the checkout, the folder dlx hides the installed package: the error names both solutions."""
    commands = [("-c", code) for code in shown_commands()]
    assert commands
    for words in [*commands, ("-m", "dlx.testing", "numpy"), ("-m", "dlx", "doctor")]:
        done = run(checkout, *words)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode != 0 and "No module named" not in last
        assert f"{checkout / 'dlx'} is dlx's source folder, and it is not built for Python" in last
        assert "run `make demo` there" in last and "elsewhere" in last


def test_an_install_without_its_extension_says_so(checkout):
    """The package is not a checkout: it was installed for another Python, or incompletely."""
    (checkout / "build_ffi.py").unlink()
    done = run(checkout, "-c", "import dlx; dlx.plan(b'abc', to='dlx')")
    last = done.stderr.strip().splitlines()[-1]
    assert "dlx was installed for another Python than" in last and "install dlxarray again" in last


def test_no_compiler_is_one_sentence():
    """The sentence names the missing compiler."""
    env = os.environ | {"CC": "no-such-compiler -O1"}
    command = [sys.executable, "-W", "ignore", "setup.py", "--name"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("dlx needs a C compiler, and no-such-compiler is not installed: install gcc or clang")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            "sys.version_info = (3, 10, 4)",
            "dlx needs CPython 3.11 or later, and this is cpython 3.10: run a later CPython.",
        ),
        ("sys.implementation.name = 'pypy'", "dlx needs CPython 3.11 or later, and this is pypy"),
        (
            "sys.platform = 'freebsd14'",
            "dlx supports 64-bit Linux, macOS and Windows, and this is freebsd14 with 64 bits",
        ),
        ("sys.maxsize = 2**31 - 1", "dlx supports 64-bit Linux, macOS and Windows, and this is linux with 32 bits"),
    ],
)
def test_other_systems_and_pythons_are_refused_in_one_line(change, text):
    """setup.py stops before setuptools and cffi, whose errors have forty lines."""
    code = f"import runpy, sys\n{change}\nsys.argv = ['setup.py', '--name']\nrunpy.run_path('setup.py')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1 and done.stderr.startswith(text) and len(done.stderr.splitlines()) == 1, done.stderr


def other_project(folder, *, overwrites):
    """Install PyPI's dlx next to this one: its metadata, and its package if it was installed last."""
    folder.mkdir()
    info = folder / "dlx-1.0.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dlx\nVersion: 1.0.4\n")
    if overwrites:
        (folder / "dlx").mkdir()
        for path in (ROOT / "dlx").iterdir():
            if path.name != "__init__.py":
                (folder / "dlx" / path.name).symlink_to(path)
        (folder / "dlx" / "__init__.py").write_text("class DLX:\n    pass\n")
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize("overwrites", [False, True])
def test_doctor_names_the_other_project_called_dlx(tmp_path, overwrites):
    """Both install dlx/__init__.py: whichever was last, doctor runs and has a fix."""
    site = other_project(tmp_path / "site", overwrites=overwrites)
    done = run(tmp_path, "-m", "dlx", "doctor", "--strict", path=(site, ROOT))
    assert done.returncode == 1, done.stderr
    shown = " ".join(done.stdout.split())
    assert shown.startswith("an unrelated project, dlx 1.0.4, is installed, too"), shown
    assert (
        f"Run:\n{sys.executable} -m pip uninstall --yes dlx\n" in done.stdout
    )  # this environment has a checkout, not dlx's files
    done = run(tmp_path, "-m", "dlx", "doctor", "--json", path=(site, ROOT))
    assert "dlx 1.0.4" in json.loads(done.stdout)["conflict"]


def test_doctor_sees_no_conflict_here(tmp_path):
    """There is no conflict in an environment with only dlx."""
    done = run(tmp_path, "-m", "dlx", "doctor", "--json", path=(ROOT,))
    assert done.returncode == 0 and json.loads(done.stdout)["conflict"] is None, done.stdout
