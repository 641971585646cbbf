"""The C code compiles without warnings; a new warning fails `make lint`."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from support.project import ROOT, program

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

PLANTED = {
    "a discarded const": "int dlx_f(const int* x); int dlx_g(int* x); int dlx_f(const int* x) { return dlx_g(x); }",
    "a narrowed number": "#include <stdint.h>\nint32_t dlx_f(int64_t x); int32_t dlx_f(int64_t x) { return x; }",
    "an unset variable": "int dlx_g(int* x);\nint dlx_f(void); int dlx_f(void) { int x; return x; }",
    "an unused function": "static int dlx_f(void) { return 1; }",
}


def lint(*files):
    """Run the check; return its exit status and output."""
    command = program("repository.lint_c", *files)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["c_src/convert", "c_src/core", "dlx_adapters"])
@pytest.mark.parametrize("name", PLANTED)
def test_a_warning_is_noticed(monkeypatch, tmp_path, folder, name):
    """A warning in a file is found with the flags of its folder."""
    from support.repository import lint_c

    monkeypatch.setattr(lint_c, "ROOT", tmp_path)
    path = tmp_path / folder / "planted.c"
    path.parent.mkdir(parents=True)
    path.write_text(f"#include <Python.h>\n{PLANTED[name]}\n" if folder != "c_src/core" else PLANTED[name] + "\n")
    assert "error:" in lint_c.compiled(path)
    path.write_text("int dlx_f(const int* x);\nint dlx_f(const int* x) { return *x; }\n")
    assert lint_c.compiled(path) == ""


def test_every_c_file_is_looked_at():
    """The extensions' files, the tests' files, and cffi's generated file."""
    from support.repository import lint_c

    found = {str(path.relative_to(ROOT)) for path in lint_c.files()}
    assert {"c_src/convert/identity.c", "c_src/core/arrow.c", "c_src/cuda/ipc.c", "dlx_adapters/_dlx_torch.c",
            "tests/c/lying.c"} <= found  # fmt: skip
    assert {*ROOT.glob("c_src/**/*.c"), *ROOT.glob("dlx_adapters/*.c")} <= {*lint_c.files()}
    assert "repository.lint_c" in (ROOT / "noxfile.py").read_text().partition("\ndef lint(")[2].partition("\n\n\n")[0]


@pytest.mark.slow
def test_there_is_no_warning():
    """The check of `make lint`."""
    status, said = lint()
    assert status == 0, said
