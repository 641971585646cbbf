"""Test of an installed dlx without checkout and compiler, run by the environment's Python.

`make dist` and tests/api/test_packaging.py run it. It prints one line and exits with 0, or raises.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import dlx

HOME = Path(dlx.__file__).resolve()
assert HOME.is_relative_to(Path(sys.prefix).resolve()), f"dlx is not the installed one: {HOME}"
if sys.platform != "win32":  # where PATH also has the system's libraries
    assert not any(shutil.which(name) for name in ("cc", "gcc", "clang")), "there is a compiler on the path"

# Arrays, without any framework.
memory = bytearray(b"abc")
tensor = dlx.convert(memory, to="dlx")
memory[0] = ord("x")
assert bytes(memoryview(tensor)) == b"xbc"
assert dlx.plan(b"abc", to="dlx").outcome == "shared"
assert dlx.stack([b"ab", b"cd"], to="dlx").shape == (2, 2)
assert dlx.convert({"a": [tensor]}, to="dlx")["a"][0] is tensor
assert dlx.describe(b"abc").readonly
try:
    dlx.convert(3, to="dlx")
except TypeError as error:
    assert "it is not an array" in str(error)
else:
    raise AssertionError("a number was taken for an array")

# The installed frameworks.
for name in ("numpy", "torch"):
    if importlib.util.find_spec(name):
        array = dlx.convert(tensor, to=name)
        assert dlx.shares_memory(array, memory), name
        assert dlx.convert(array, to="dlx").shape == (3,)
listed = {*dlx.adapters()}  # a broken one would be left out
assert {"numpy", "torch", "jax", "cupy", "tvm_ffi", "pyarrow"} <= listed, listed

# For authors in C.
headers = Path(dlx.get_include())
assert headers.is_relative_to(HOME.parent), headers
assert {"dlpack_abi.h", "dlx.h", "dlx_cuda.h"} == {*os.listdir(headers)}
builder = dlx.cffi_builder()
for kind in ("DLTensor", "DLManagedTensorVersioned"):
    assert builder.sizeof(kind) == dlx.ffi.sizeof(kind)
assert ctypes.sizeof(dlx.ctypes.DLTensor) == builder.sizeof("DLTensor")
with dlx.borrow(tensor) as borrowed:
    assert borrowed.ndim == 1

# The command.
command = Path(sysconfig.get_path("scripts")) / ("dlx.exe" if sys.platform == "win32" else "dlx")
with tempfile.TemporaryDirectory() as empty:
    for arguments in (["--version"], ["doctor"], ["plan", "--help"], ["new-adapter", "no_such_package"]):
        done = subprocess.run([command, *arguments], cwd=empty, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout
    report = [sys.executable, "-m", "dlx.testing", "--gpu", "dlx", "--only", "dlx-moves"]
    done = subprocess.run(report, cwd=empty, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and ("no CUDA device here" in done.stdout or "1 passed" in done.stdout), done.stdout

print(f"dlx {dlx.__version__} works as installed, on Python {sys.version.partition(' ')[0]}")
