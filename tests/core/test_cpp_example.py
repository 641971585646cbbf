"""The C++ example builds as its README says, and accepts arrays of any framework."""

import os
import shutil
import subprocess
import sys

import pytest
from support.processes import warm
from support.project import ROOT

EXAMPLE = ROOT / "examples" / "cpp_dot"
USE = """
import array, sys
import dot, dlx
doubles = array.array("d", [1, 2, 3])
assert dot.dot(doubles, doubles) == 14 == dot.dot(memoryview(doubles), dlx.from_dlpack(doubles))
if "numpy" in sys.argv:
    import numpy as np
    base = np.arange(12, dtype=np.float32)
    strided, reverse = base[::4], base[8::-4]
    assert dot.dot(strided, reverse) == 16  # the strides of the first are not those of the second
    reverse.flags.writeable = False
    assert dot.dot(reverse, doubles) == 8 + 4 * 2
    for wrong in (np.ones((2, 2)), np.ones(3, "i4"), base, 3):
        try:
            dot.dot(strided, wrong)
        except (TypeError, ValueError):
            continue
        raise SystemExit(f"{wrong!r} was taken")
if "torch" in sys.argv:
    import torch
    assert dot.dot(torch.arange(3.0), doubles) == 8
    assert dot.dot(torch.tensor([1 + 2j, 1 + 4j, 1 + 6j]).conj().imag, doubles) == -28
if "jax" in sys.argv:
    import jax.numpy as jnp
    assert dot.dot(jnp.arange(3.0), doubles) == 8
"""


pytestmark = pytest.mark.slow  # compiles


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a folder with the example, built by its Makefile, and the environment for it."""
    if not (shutil.which("make") and shutil.which("c++")):
        pytest.skip("no make, or no C++ compiler")
    folder = tmp_path_factory.mktemp("cpp") / "dot"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT)])}
    run(folder, env, "make", f"PYTHON={sys.executable}", "CXX=c++")
    return folder, env


def run(folder, env, *command):
    """Run a command that must succeed; return its output."""
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_its_readme(built):
    """The README's command prints the README's output."""
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    code = next(line for line in text.splitlines() if line.startswith("python -c ")).split('"')[1]
    assert run(*built, sys.executable, "-c", code) == "14.0\n"
    assert "prints `14.0`" in text


@pytest.mark.parametrize("framework", ["", "numpy", "torch", "jax"])
def test_it_takes_any_array(built, framework):
    """The product is correct for strided, read-only, lazily negated and converted arrays; other ranks are rejected."""
    if framework:
        pytest.importorskip(framework)
    folder, env = built
    done = warm.run(USE, framework, cwd=folder, env=env)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
