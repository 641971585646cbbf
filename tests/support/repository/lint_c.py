"""Compile every C file of this project with warnings as errors, and discard the result; `make lint` runs this.

    python tests/support repository.lint_c [FILE ...]

The compiler of `pip install` warns as well, but pip hides its output. cudart.c needs a CUDA header and is left out.
If all files compiled without warnings, a file in build/tests says so, and the same files are not compiled again.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.project import LIBRARIES, ROOT

FLAGS = ("-std=c11", "-O2", "-fPIC", "-c", "-Werror", "-Wall", "-Wextra")
STRICT = ("-Wconversion", "-Wno-sign-conversion")
INCLUDE = tuple(f"-I{path}" for path in (ROOT / "c_src", ROOT / "c_src" / "include", sysconfig.get_path("include")))
LEFT_OUT = {"cudart.c"}


def files():
    """Return the C files of the project, including benchmarks and tests."""
    found = [path for pattern in ("c_src/*/*.c", "dlx_adapters/*.c", "benchmarks/*.c", "tests/c/*.c")
             for path in ROOT.glob(pattern)]  # fmt: skip
    return sorted(path for path in found if path.name not in LEFT_OUT)


def flags_of(path):
    """Return the warnings for a file; warnings in Python's headers are off."""
    inside = path.relative_to(ROOT).parts[:2] if path.is_relative_to(ROOT) else ()
    if inside in (("c_src", "core"), ("c_src", "cuda")):
        return (*FLAGS, *STRICT, "-Wpedantic")
    if inside[:1] in (("c_src",), ("dlx_adapters",)):
        return (*FLAGS, *STRICT, "-Wno-unused-parameter")  # Python's functions have them
    return (*FLAGS, "-Wno-unused-parameter")


def compiled(path):
    """Compile a file; return the compiler's output, empty without warnings."""
    command = ["cc", *flags_of(path), *INCLUDE, str(path), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr or (f"{path}: status {done.returncode}" if done.returncode else "")


def generated(folder):
    """Return the file that cffi generates from the headers."""
    path = Path(folder, "_ffi").with_suffix(".c")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        runpy.run_path(str(ROOT / "build_ffi.py"), run_name="recipe")["ffibuilder"].emit_c_code(str(path))
    finally:
        os.chdir(before)
    return path


def stamp(paths):
    """Return the file that exists if these files, with these headers, flags and compiler, have no warnings."""
    version = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout
    made_of = hashlib.sha256("\0".join([version, sys.version, *INCLUDE]).encode())
    headers = [*ROOT.glob("c_src/*/*.h"), *ROOT.glob("tests/c/*.h")]
    for path in [Path(__file__), *sorted(headers), *paths]:
        made_of.update(f"\0{path.name} {flags_of(path)}\0".encode() + path.read_bytes())
    return LIBRARIES / f"lint_c-{made_of.hexdigest()[:16]}"


def main(arguments):
    """Print the warnings of the given files, or of all; return the exit status."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = [Path(each).resolve() for each in arguments] or [*files(), generated(folder)]
        unchanged = stamp(paths)
        if unchanged.exists():
            print(f"{len(paths)} C files, unchanged since they had no warnings")
            return 0
        said = list(filter(None, pool.map(compiled, paths)))
    print("".join(said) + f"{len(paths)} C files, {len(said)} with warnings")
    if not said:
        LIBRARIES.mkdir(parents=True, exist_ok=True)
        unchanged.touch()
    return bool(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
