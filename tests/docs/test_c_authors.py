"""docs/c-authors.md: its C compiles, its shell line runs, and its Python prints the shown output."""

import os
import re
import subprocess
import sys

import pytest
from support.project import ROOT

PAGE = (ROOT / "docs" / "c-authors.md").read_text(encoding="utf-8")
BLOCKS = [(found[1], found[2]) for found in re.finditer(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
PYTHON = [
    (code, BLOCKS[i + 1][1])
    for i, (kind, code) in enumerate(BLOCKS)
    if kind == "python" and i + 1 < len(BLOCKS) and BLOCKS[i + 1][0] == "text"
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a folder with the page's C, compiled by the page's command, and the environment."""
    folder = tmp_path_factory.mktemp("decoder")
    (source,) = [code for kind, code in BLOCKS if kind == "c"]
    (command,) = [code for kind, code in BLOCKS if kind == "sh"]
    (folder / "decoder.c").write_text(source)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT)])}
    shell = command.replace("$(python", f'$("{sys.executable}"')
    done = subprocess.run(["sh", "-ec", shell], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder, env


def test_every_python_block_shows_its_output():
    """Every Python block has an output, so that the test below runs it."""
    assert len(PYTHON) == sum(kind == "python" for kind, _ in BLOCKS) == 4


def test_its_cpp_is_that_of_the_example():
    """The page shows lines of the C++ example, which tests/core/test_cpp_example.py builds and runs."""
    (code,) = [code for kind, code in BLOCKS if kind == "cpp"]
    whole = [line.strip() for line in (ROOT / "examples" / "cpp_dot" / "dot.cpp").read_text("utf-8").splitlines()]
    lines = [line.strip() for line in code.splitlines()]
    assert lines == whole[(start := whole.index(lines[0])) : start + len(lines)]


@pytest.mark.parametrize("block", range(len(PYTHON)), ids=["ctypes", "cffi", "plain", "lending"])
def test_the_pages_examples_print_what_it_shows(built, block):
    """Each block runs in a new interpreter, prints the shown output, and writes nothing to stderr."""
    pytest.importorskip("numpy")
    folder, env = built
    code, expected = PYTHON[block]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == expected
    assert done.returncode == 0
