"""The CUDA builds of torch and cupy over the recording driver: `nox -s cuda`.

    python tests/support cuda.build_originals FOLDER

The Python of an environment with both runs it. FOLDER receives the libraries that replace NVIDIA's:

- ``libcuda.so.1``, the recording driver (tests/c/fake_cuda.c), with the other entry points that they link to;
- ``libcudart.so.13``, a CUDA runtime over it (tests/c/cudart.c);
- ``cupy``, cupy's bindings of the runtime, built from its source distribution, since those in its wheel contain
  NVIDIA's runtime. They replace the files of the wheel.

All other entry points return 0: kernels start, and do nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "tests" / "c"
PACKAGES = Path(sysconfig.get_path("purelib"))
INCLUDE = PACKAGES / "nvidia" / "cu13" / "include"
MODULE = "cupy_backends/cuda/api/runtime"


def run(*command, **options):
    """Run a command and check its status."""
    return subprocess.run([str(part) for part in command], check=True, text=True, **options)


def symbols(library, *options):
    """Return the dynamic symbols of a library, without their versions."""
    listed = run("nm", "-D", "--format=posix", *options, library, capture_output=True).stdout
    return {line.split()[0].partition("@")[0] for line in listed.splitlines() if line}


def empty(names, path):
    """Write functions that return 0 for any arguments."""
    lines = [".text"]
    for name in sorted(names):
        lines += [f".globl {name}", f".type {name}, @function", f"{name}: xor %eax, %eax", "ret"]
    path.write_text("\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""]), encoding="utf-8")


def library(folder, name, sources, wanted, *options):
    """Link C sources, with an empty function for each requested name that they lack."""
    plain, stubs = folder / f"{name}.plain", folder / f"{name}.S"
    cc = ["cc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Werror"]
    run(*cc, *sources, "-o", plain, *options, "-lpthread", "-ldl")
    empty(wanted - symbols(plain, "--defined-only"), stubs)
    linked = ["-Wl,-soname," + name, "-o", folder / name]
    if name.startswith("libcudart"):  # whose symbols have versions
        versions = folder / f"{name}.map"
        versions.write_text(name + " { global: *; };\n", encoding="utf-8")
        linked.append(f"-Wl,--version-script={versions}")
    run(*cc, *sources, stubs, *linked, *options, "-lpthread", "-ldl")
    for made in (plain, stubs):
        made.unlink()


def wanted_of_driver(folder):
    """Return the symbols that torch and cupy link to, cached for their versions."""
    versions = [importlib.metadata.version(name) for name in ("torch", "cupy-cuda13x")]
    kept = folder / f"{'-'.join(versions)}.names"
    if kept.exists():
        return set(kept.read_text(encoding="utf-8").split())
    wanted = set()
    for found in [*PACKAGES.glob("cupy*/**/*.so"), *PACKAGES.glob("torch/lib/*.so")]:
        wanted |= {name for name in symbols(found, "--undefined-only") if re.match(r"cu[A-Z]", name)}
    wanted = {name for name in wanted if not re.match(r"cu(BLAS|RAND|SOLVER|SPARSE|FFT)", name)}
    kept.write_text("\n".join(sorted(wanted)), encoding="utf-8")
    return wanted


def driver(folder):
    """Build the recording driver with all these entry points."""
    wanted = wanted_of_driver(folder)
    library(folder, "libcuda.so.1", [SOURCES / "fake_cuda.c", SOURCES / "cuda_library.c"], wanted)


def runtime(folder):
    """Build the runtime with all of NVIDIA's entry points."""
    real = PACKAGES / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    wanted = {name for name in symbols(real, "--defined-only") if re.match(r"(__)?cuda[A-Z]", name)}
    library(folder, real.name, [SOURCES / "cudart.c"], wanted, f"-I{INCLUDE}", folder / "libcuda.so.1")


def cupy(folder):
    """Build cupy's bindings over this runtime, once for each wheel."""
    (wheel,) = PACKAGES.glob(f"{MODULE}.*.so")
    if b"libcudart.so.13" in wheel.read_bytes():
        return
    version, work = importlib.metadata.version("cupy-cuda13x"), folder / "cupy-source"
    work.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    # Reading the name and version of the source distribution needs no CUDA; cupy 14 reads the first variable.
    environment = os.environ | {"READTHEDOCS": "True", "CUPY_INSTALL_NO_CUDA": "1"}
    if not list(work.glob("*.tar.gz")):
        run(*pip, "--no-binary", "cupy", "--dest", work, f"cupy=={version}", env=environment)
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(work, filter="data")
    source = work / f"cupy-{version}"
    run(sys.executable, __file__, "--cythonize", cwd=source)
    made = folder / wheel.name
    command = ["g++", "-O1", "-w", "-fPIC", "-shared", "-I.", f"-I{INCLUDE}", f"-I{sysconfig.get_path('include')}"]
    run(*command, f"{MODULE}.cpp", "-o", made, folder / "libcudart.so.13", "-ldl", cwd=source)
    wheel.unlink()
    shutil.move(made, wheel)
    shutil.rmtree(source)


def cythonize():
    """Translate the bindings to C++, with cupy's settings for CUDA 13."""
    import Cython
    from Cython.Compiler.Main import CompilationOptions, compile

    settings = {
        "CUPY_CUDA_VERSION": 13000,
        "CUPY_HIP_VERSION": 0,
        "CUPY_USE_CUDA_PYTHON": False,
        "CUPY_CUFFT_STATIC": False,
        "CUPY_CYTHON_VERSION": Cython.__version__,
    }
    options = CompilationOptions(
        cplus=True,
        include_path=["."],
        compile_time_env=settings,
        compiler_directives={"language_level": 3, "embedsignature": True},
        output_file=f"{MODULE}.cpp",
    )
    name = MODULE.replace("/", ".")
    return compile(f"{MODULE}.pyx", options=options, full_module_name=name).num_errors


def main():
    """Build everything into the folder."""
    if sys.argv[1] == "--cythonize":
        return cythonize()
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    driver(folder)
    runtime(folder)
    cupy(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
