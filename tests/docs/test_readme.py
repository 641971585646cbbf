"""The examples of README.md, of the quickstart, and the adapter of docs/supported.md do what they show."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest
from support.processes import warm
from support.project import ROOT

from dlx.testing import CHECKS

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README, SUPPORTED = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/supported.md"))


def blocks(page=README):
    """Yield (code, expected output or None) for every python block; a text block right behind it is its output."""
    found = list(BLOCK.finditer(page))
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block[1] == "python":
            shown = after is not None and after[1] == "text" and not page[block.end() : after.start()].strip()
            yield block[2], after[2] if shown else None


def test_the_readmes_examples_print_what_it_shows(np, torch):
    """Every python block runs in a new session; a text block directly after it is its output."""
    compared = 0
    for code, expected in blocks():
        namespace = {"__name__": "readme"}
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "README.md", "exec"), namespace)
        if expected is not None:
            assert out.getvalue() == expected
            compared += 1
    assert compared >= 1


def test_the_readme_counts_the_promises():
    """The counts for a library and an adapter agree with `python -m dlx.testing --list`."""
    kinds = [check.kind for check in CHECKS.values()]
    adapter = kinds.count("adapter")
    assert f"{len(kinds) - adapter} for any library and {adapter} more for an adapter" in README


def test_the_readmes_adapter_works_as_a_plugin(python, tmp_path):
    """The adapter in docs/supported.md, found by its entry point, is a source and a target."""
    (adapter,) = [code for code, _ in blocks(SUPPORTED) if "dlx_adapters" in code]
    (tmp_path / "dlx_mylib.py").write_text(adapter)
    (tmp_path / "mylib.py").write_text(
        "__version__ = '1'\n"
        "uint8, float32 = 'uint8', 'float32'\n"
        "class Array:\n"
        "    def __init__(self, of): self.of = of\n"
        "    def __dlpack__(self, **keywords): return self.of.__dlpack__(**keywords)\n"
        "    def __dlpack_device__(self): return self.of.__dlpack_device__()\n"
        "from_dlpack = Array\n"
    )
    metadata = tmp_path / "dlx_mylib-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dlx-mylib\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[dlx]\nmylib = dlx_mylib\n")
    code = """
        import dlx, mylib
        source = bytearray(b"abc")
        array = dlx.convert(source, to="mylib")
        tensor = dlx.convert(array, to="dlx")
        print(type(array).__name__, tensor.shape, tensor.data_ptr == dlx.describe(source).address)
        print(dlx.plan(b"abc", to=mylib).outcome, dlx.plan(array, to="mylib").outcome)
    """
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    assert python(code, env={**os.environ, "PYTHONPATH": path}) == "Array (3,) True\ncopied same\n"


WITHOUT = """
import runpy, sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # importing it raises ImportError
runpy.run_path("examples/quickstart.py", run_name="__main__")
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("missing", [[], ["torch"], ["PIL"], ["numpy", "torch"], ["numpy", "torch", "PIL"]])
def test_the_quickstart_runs_with_whatever_is_there(missing):
    """It exits with 0, names missing libraries, writes nothing to stderr, and fits a terminal of 80 columns."""
    options, env = ("-X", "dev"), {**os.environ, "PYTHONIOENCODING": "utf-8"}
    if "torch" in missing:
        command = [sys.executable, *options, "-c", WITHOUT, *missing]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT, env=env)
    else:
        done = warm.run(WITHOUT, *missing, options=options, cwd=ROOT, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for name in missing:
        assert f"note: {'pillow' if name == 'PIL' else name} is not installed" in done.stdout
    assert "-> dlx: shared\n  memory shared, both at" in done.stdout
    assert "raised" in done.stdout or "refused" in done.stdout
    assert "CHANGED" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
