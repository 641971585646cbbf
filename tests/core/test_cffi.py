"""Another cffi project includes dlx's headers, from the checkout and from an installed wheel."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import cffi
import pytest
from support.project import ROOT

import dlx
from dlx._core import headers
from dlx._core.native import ffi

EXAMPLE = ROOT / "examples" / "cffi_kernel"
USE = """
import sys
from array import array
import _scale, dlx, scaling
assert _scale.ffi.typeof("DLTensor *") is dlx.ffi.typeof("DLTensor *")
buffer = array("d", [1, 2, 3])
scaling.scale(buffer, 2)
assert list(buffer) == [2, 4, 6]
if "numpy" in sys.argv:
    import numpy as np
    strided = np.arange(12, dtype=np.float32).reshape(3, 4)[::-1, ::2]
    expected = strided * 0.5
    scaling.scale(strided, 0.5)
    assert (strided == expected).all()
    strided.flags.writeable = False
    try:
        scaling.scale(strided, 2)
    except dlx.errors.ReadOnlyError:
        assert (strided == expected).all()
    else:
        raise SystemExit("read-only memory was written")
    try:
        scaling.scale(np.ones(3, np.int8), 2)
    except TypeError as error:
        assert "int8[3]" in str(error)
    else:
        raise SystemExit("int8 was scaled")
if "torch" in sys.argv:
    import torch
    tensor = torch.ones(2, 3).T
    scaling.scale(tensor, 3)
    assert (tensor == 3).all()
print("include:", dlx.get_include())
"""


def run(*command, cwd, env=None):
    """Run a command that must succeed; return its output."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built_and_run(python, folder, env, *frameworks):
    """Copy, build and run the example as its README says; return the folder of the headers."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("_scale*", "__pycache__", "*.o"))
    run(python, "build_scale.py", cwd=folder, env=env)
    assert run(python, "scaling.py", cwd=folder, env=env) == "[10.0, 20.0, 30.0]\n"
    return run(python, "-c", USE, *frameworks, cwd=folder, env=env).strip().removeprefix("include: ")


def there(*names):
    """Return the installed ones of some frameworks."""
    from importlib.util import find_spec

    return [name for name in names if find_spec(name)]


@pytest.mark.slow
def test_the_example_works_in_the_checkout(tmp_path):
    """The example builds and scales arrays of numpy and torch in place, from the source tree."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT)])}
    include = built_and_run(sys.executable, tmp_path / "kernel", env, *there("numpy", "torch"))
    assert Path(include) == ROOT / "c_src" / "include"


def test_the_example_works_with_an_installed_wheel(wheel, tmp_path):
    """In a new environment with the wheel, the example uses the wheel's headers, builds and runs."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    zipfile.ZipFile(wheel).extractall(site)
    # Otherwise this environment; its .pth files, including editable installs, are not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n" + sysconfig.get_path("platlib") + "\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    include = built_and_run(python, tmp_path / "kernel", env, *there("numpy", "torch"))
    assert Path(include) == site / "dlx" / "include"


def test_the_builder_gives_the_compiled_types():
    """Cffi computes the same sizes from the header as the compiler."""
    builder = dlx.cffi_builder()
    for name in ("DLTensor", "DLManagedTensor", "DLManagedTensorVersioned", "DLPackExchangeAPI"):
        assert builder.sizeof(name) == ffi.sizeof(name)


def test_the_builder_is_anew_each_time():
    """Additions to one project's builder are not in the next builder."""
    dlx.cffi_builder().cdef("typedef struct { int x; } mine;")
    with pytest.raises(cffi.CDefError):
        dlx.cffi_builder().typeof("mine")


def test_the_builder_knows_no_function_of_the_core():
    """The builder declares no functions that a C author cannot link."""
    assert "dlx_" not in headers.declarations(headers.ABI)
    with pytest.raises(cffi.CDefError):
        dlx.cffi_builder().typeof("dlx_capabilities")


def test_the_header_compiles_alone(tmp_path):
    """A C or C++ file can include dlpack_abi.h alone."""
    source = '#include "dlpack_abi.h"\nint rank(const DLTensor* t) { return t->ndim + kDLCPU; }\n'
    (tmp_path / "alone.c").write_text(source)
    flags = ("-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{dlx.get_include()}", "alone.c")
    run("cc", "-std=c99", *flags, cwd=tmp_path)
    if shutil.which("c++"):
        run("c++", "-x", "c++", "-std=c++11", *flags, cwd=tmp_path)
