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


def test_what_has_not_changed_is_not_compiled_again(monkeypatch, tmp_path, capsys):
    """A changed file, header or compiler is; so is a file with a warning."""
    from support.repository import lint_c

    compiled, calls = lint_c.compiled, []
    monkeypatch.setattr(lint_c, "ROOT", tmp_path)
    monkeypatch.setattr(lint_c, "LIBRARIES", tmp_path / "build")
    monkeypatch.setattr(lint_c, "compiled", lambda path: calls.append(path) or compiled(path))
    source, header = tmp_path / "c_src" / "core" / "a.c", tmp_path / "c_src" / "core" / "a.h"
    source.parent.mkdir(parents=True)
    for text, number in ((PLANTED["an unused function"], "1"), ("extern int dlx_x;", "1"), ("extern int dlx_x;", "2")):
        source.write_text(text)
        header.write_text(f"#define N {number}\n")
        before = len(calls)
        first = lint_c.main([str(source)])
        assert len(calls) == before + 1
        assert lint_c.main([str(source)]) == first
        assert len(calls) == before + 1 + first
    monkeypatch.setattr(lint_c, "INCLUDE", (*lint_c.INCLUDE, "-I/elsewhere"))
    assert lint_c.main([str(source)]) == 0 and len(calls) == 5
    assert "1 C files, 0 with warnings" in capsys.readouterr().out.splitlines()[-1]
