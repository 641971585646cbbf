"""Development tasks besides `make demo` and `make test`.

`nox --list` lists the sessions and `nox --session NAME -- ARGUMENTS` runs one. `make nox-NAME ARGS="ARGUMENTS"` does
the same and installs nox in .venv-nox first. The Makefile builds and keeps the environments: `.venv` (VENV), or one for
the session.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = []

ROOT = Path(__file__).parent
VENV = os.environ.get("VENV", ".venv")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlx"
PYTHONS = os.environ.get("PYTHONS", "python3.12 python3.13 python3.14 python3.15").split()
CUDA_TORCH = os.environ.get("CUDA_TORCH", "torch==2.14.1")
CUDA_CUPY = os.environ.get("CUDA_CUPY", "cupy-cuda13x==14.2.0")
FRAMEWORKS = "tensorflow paddle mlx warp onnxruntime xarray pandas dask ray wide"
GRADED = "numpy torch jax tvm_ffi pyarrow pyarrow.Array array_api_strict dlx"
C_FILES = (
    *("c_src/*/*.[ch]", "dlx_adapters/*.c", "benchmarks/*.c", "tests/c/*.[ch]"),
    *("examples/*/*.c", "examples/*/*.cpp", "examples/*/*.h", "examples/*/src/*/*.c"),
)


def make(session: nox.Session, *targets: str, env: dict[str, str] | None = None, **variables: str) -> None:
    """Run targets of the Makefile."""
    words = [f"{name}={value}" for name, value in variables.items()]
    session.run("make", "--no-print-directory", *targets, *words, env=env)


def run(session: nox.Session, *arguments: str, env: dict[str, str] | None = None, **variables: str) -> None:
    """Run Python in the environment of the tests, with the sanitizers if DLX_SANITIZE is 1."""
    make(session, "run", ARGS=shlex.join(arguments), env=env, **variables)


def run_in(session: nox.Session, venv: str, *arguments: str, **options: object) -> None:
    """Run the Python of an environment."""
    session.run(f"{venv}/bin/python", *arguments, **options)


def output_of(*command: str) -> str:
    """Return the last line that a command writes to stdout."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return done.stdout.strip().rpartition("\n")[2]


def arguments_of(session: nox.Session) -> list[str]:
    """Return the arguments behind ``--``, or in the environment variable ARGS."""
    return list(session.posargs) or shlex.split(os.environ.get("ARGS", ""))


def program(session: nox.Session, name: str, *default: str) -> None:
    """Run a program of tests/support with the session's arguments."""
    run(session, "tests/support", name, *(arguments_of(session) or default))


def test(session: nox.Session, *arguments: str, env: dict[str, str] | None = None, **variables: str) -> None:
    """Run `make test` with the slow tests, in the environment that the variables describe."""
    make(session, "test", ARGS=shlex.join([*arguments, *arguments_of(session)]), SLOW="1", env=env, **variables)


def pip(session: nox.Session, venv: str, *packages: str, torch: bool = True, **options: object) -> None:
    """Install packages with the pinned versions; `torch=False`: except the pinned torch."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = ROOT / venv / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if torch or not pin.startswith("torch==")), encoding="utf-8")
    command = ["-m", "pip", "--disable-pip-version-check", "install", "--only-binary", ":all:", "--constraint"]
    run_in(session, venv, *command, str(constraints), *packages, **options)


def interpreter(name: str = "") -> str:
    """Return the interpreter with this name, or make's default one; empty if it does not run here."""
    return output_of("make", "-s", "interpreter", *([f"PYTHON={name}"] if name else []))


def interpreters(session: nox.Session, *more: str) -> dict[str, str]:
    """Return the interpreters of PYTHONS that run here, by name."""
    found = {name: interpreter(name) for name in (*more, *PYTHONS)}
    for name in [name for name, path in found.items() if not path]:
        session.log(f"{name} does not run here; left out")
        del found[name]
    return found


# Checks and builds


@nox.session
def lint(session: nox.Session) -> None:
    """Check Python (ruff, mypy --strict) and C (clang-format, more warnings)."""
    make(session, f"{VENV}/.built", f"{VENV}/.extra-test", f"{VENV}/.extra-lint")
    run_in(session, VENV, "-m", "ruff", "check", ".")
    run_in(session, VENV, "-m", "ruff", "format", "--check", ".")
    session.run(f"{VENV}/bin/clang-format", "--dry-run", "--Werror", *c_files())
    run_in(session, VENV, "-m", "mypy")
    run_in(session, VENV, "tests/support", "repository.lint_c")


def c_files() -> list[str]:
    """Return the C and C++ files that clang-format formats."""
    return sorted(str(path.relative_to(ROOT)) for pattern in C_FILES for path in ROOT.glob(pattern))


@nox.session(name="format")
def format_(session: nox.Session) -> None:
    """Format Python and C, and apply ruff's safe fixes."""
    make(session, f"{VENV}/.extra-lint")
    run_in(session, VENV, "-m", "ruff", "check", "--fix", ".")
    run_in(session, VENV, "-m", "ruff", "format", ".")
    session.run(f"{VENV}/bin/clang-format", "-i", *c_files())


@nox.session
def docs(session: nox.Session) -> None:
    """Build site/, and look at its pages in Chromium if there is one (SCREENSHOTS=folder keeps pictures)."""
    make(session, ".venv-docs/.extra-docs", VENV=".venv-docs")
    run_in(session, ".venv-docs", "-m", "mkdocs", "build", "--strict", "--clean", env={"NO_MKDOCS_2_WARNING": "1"})
    folder = os.environ.get("SCREENSHOTS")
    run_in(session, ".venv-docs", "docs/tools/browser.py", *(["--screenshots", folder] if folder else []), "site")
    session.log("to read it, with its search: nox -s read-docs")


@nox.session(name="read-docs")
def read_docs(session: nox.Session) -> None:
    """Serve site/ at 127.0.0.1 (PORT=8000), until you interrupt it."""
    if not (ROOT / "site").exists():
        session.error("make docs builds the site first")
    port = os.environ.get("PORT", "8000")
    session.log(f"http://127.0.0.1:{port}")
    session.run(interpreter(), "-m", "http.server", "--directory", "site", "--bind", "127.0.0.1", port)


@nox.session
def dist(session: nox.Session) -> None:
    """Build an sdist and a wheel in dist/, and try the wheel without a compiler (PYTHON=python3.12 adds a wheel)."""
    venv = f".venv-dist-{Path(interpreter()).name}"
    make(session, f"{venv}/.extra-dist", VENV=venv)
    out, tried, empty = (ROOT / venv / name for name in ("out", "tried", "empty"))
    for folder in (out, tried, empty):
        shutil.rmtree(folder, ignore_errors=True)
    # LDSHARED: without debugging symbols, and without paths of this Python.
    env = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "LDSHARED": "cc -shared -s"}
    run_in(session, venv, "-m", "build", "--outdir", str(out), ".", env=env)
    (built,) = out.glob("*-linux_*.whl")
    env = {"PATH": f"{ROOT / venv / 'bin'}:{os.environ['PATH']}"}
    session.run(f"{venv}/bin/auditwheel", "repair", "--wheel-dir", str(out), str(built), env=env)
    built.unlink()
    (wheel,) = out.glob("*.whl")
    run_in(session, venv, "-m", "zipfile", "--list", str(wheel))
    run_in(session, venv, "-m", "venv", str(tried))
    pip(session, str(tried), "--quiet", str(wheel))
    empty.mkdir()
    smoke = str(ROOT / "tests" / "support" / "repository" / "smoke.py")
    with session.chdir(empty):
        clean = {"PATH": str(tried / "bin")}
        session.run(str(tried / "bin" / "python"), "-I", smoke, env=clean, include_outer_env=False)
    (ROOT / "dist").mkdir(exist_ok=True)
    for path in out.iterdir():
        shutil.move(path, ROOT / "dist" / path.name)


@nox.session
def wheels(session: nox.Session) -> None:
    """Cross-compile and inspect wheels for Linux, macOS and Windows with zig: `-- --only "cp313-*"`."""
    make(session, ".venv-wheels/.extra-wheels", VENV=".venv-wheels")
    run_in(session, ".venv-wheels", "tests/support", "repository.wheels", *arguments_of(session))


# Tests in other environments


@nox.session(name="all")
def everything(session: nox.Session) -> None:
    """Run all tests, also under other Pythons, with the oldest numpy, and without frameworks."""
    for name in ("pythons", "debian", "old-numpy", "bare"):
        session.notify(name)
    test(session)


@nox.session
def pythons(session: nox.Session) -> None:
    """Run all tests under other interpreters (PYTHONS), without torch."""
    for name, path in interpreters(session).items():
        test(session, PYTHON=path, VENV=f".venv-{Path(name).name.removeprefix('python')}", TORCH="")


@nox.session
def debian(session: nox.Session) -> None:
    """Run all tests under Debian's Pythons, if some of PYTHONS do not run here, in a chroot (DEBIAN=folder)."""
    missing = [name for name in PYTHONS if not interpreter(name)]
    folder = os.environ.get("DEBIAN", str(CACHE / "debian"))
    env = {"ARGS": shlex.join(arguments_of(session))}
    session.run("tests/support/environments/debian.sh", folder, *missing, env=env)


@nox.session(name="test-aarch64")
def test_aarch64(session: nox.Session) -> None:
    """Run tests on aarch64, emulated by qemu in a Debian root file system (AARCH64=folder; half an hour to hours)."""
    make(session, ".venv-wheels/.extra-wheels", VENV=".venv-wheels")
    folder = os.environ.get("AARCH64", str(CACHE / "aarch64"))
    script = "tests/support/environments/aarch64.sh"
    session.run(script, folder, str(ROOT / ".venv-wheels" / "bin" / "python"), *arguments_of(session))


@nox.session(name="old-numpy")
def old_numpy(session: nox.Session) -> None:
    """Run all tests with the oldest numpy, without torch."""
    versions = "tests/support/environments/versions.py"
    packages = output_of(interpreter(), versions, "--print", "--only", "numpy==1.26").split()
    make(session, ".venv-old-numpy/.extra-test-bare", VENV=".venv-old-numpy")
    run_in(session, ".venv-old-numpy", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages)
    test(session, VENV=".venv-old-numpy", TORCH="", EXTRA="test-bare")


@nox.session
def bare(session: nox.Session) -> None:
    """Run all tests without frameworks."""
    test(session, VENV=".venv-bare", TORCH="", EXTRA="test-bare")


@nox.session
def versions(session: nox.Session) -> None:
    """Run the tests with each version in tests/versions.toml (VERSIONS="numpy torch==2.9" picks some; gigabytes)."""
    only = os.environ.get("VERSIONS", "").split()
    words = [
        "--only",
        *only,
        "--args",
        shlex.join(["-n", os.environ.get("JOBS", "auto"), "--dist", "loadfile", *arguments_of(session)]),
    ]
    run_versions(session, *words)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Run the tests of frameworks that need their own environment (FRAMEWORKS="mlx ray" picks some; gigabytes).

    The environments are kept. `wide` runs all tests next to every library that fits into one environment.
    """
    only = os.environ.get("FRAMEWORKS", FRAMEWORKS).split()
    run_versions(session, "--keep", "--only", *only, f"--args={shlex.join(arguments_of(session))}")


def run_versions(session: nox.Session, *words: str) -> None:
    """Run tests/support/environments/versions.py with the interpreters of this machine."""
    found = interpreters(session, "python3.11").values()
    session.run(interpreter(), "tests/support/environments/versions.py", "--pythons", *found, *words)


@nox.session
def cookbook(session: nox.Session) -> None:
    """Run the recipes of docs/cookbook with every library that they use (2.5 GB)."""
    test(session, "tests/docs/test_docs.py", "-k", "cookbook", VENV=".venv-cookbook", EXTRA="cookbook", JOBS="0")


@nox.session
def peers(session: nox.Session) -> None:
    """Run other libraries' DLPack tests with dlx.convert as their from_dlpack: `-- --from FOLDER`."""
    program(session, "environments.peers")


# CUDA


def cuda_environment(session: nox.Session) -> dict[str, str]:
    """Build .venv-cuda, the CUDA builds of torch and cupy over the recording driver (6 GB); return its variables."""
    venv, libraries = ".venv-cuda", str(ROOT / ".venv-cuda" / "cuda")
    make(session, f"{venv}/.built", f"{venv}/.extra-test-bare", VENV=venv)
    headers = ("cython", "nvidia-cuda-crt", "nvidia-cuda-profiler-api")
    pip(session, venv, CUDA_TORCH, CUDA_CUPY, "numpy", "ml_dtypes", *headers, torch=False)
    stamp, script = ROOT / venv / ".originals", ROOT / "tests" / "support" / "cuda" / "build_originals.py"
    sources = [script, *ROOT.glob("tests/c/fake_*.[ch]"), *ROOT.glob("tests/c/cud*.c")]
    if not stamp.exists() or stamp.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        run_in(session, venv, str(script), libraries)
        stamp.touch()
    return {
        "LD_LIBRARY_PATH": libraries,
        "LD_PRELOAD": f"{libraries}/libcudart.so.13 {libraries}/libcuda.so.1",
        "DLX_ORIGINALS": libraries,
        "FAKE_CUDA_DEVICES": "2",
    }


@nox.session
def cuda(session: nox.Session) -> None:
    """Run the CUDA tests with the published torch and cupy over the recording driver; no GPU is needed."""
    env, originals = cuda_environment(session), "tests/cuda/test_originals.py"
    adapters = ["tests/frameworks/test_cupy.py", "tests/frameworks/test_torch_devices.py"]
    run_in(session, ".venv-cuda", "tests/support/cuda/headers.py", ".venv-cuda")
    pytest = ["-m", "pytest", "-p", "no:cacheprovider"]
    arguments = arguments_of(session)
    published = [originals, "tests/cuda/test_captures.py", "tests/cuda/test_pinned_originals.py", *adapters]
    published.append("tests/testing/test_gpu_report.py::test_with_the_published_frameworks")
    run_in(session, ".venv-cuda", *pytest, *(arguments or published), env=env)
    if not arguments:
        others = ["-m", "not gpu", "--ignore", originals, "tests/cuda", *adapters]
        run_in(session, ".venv-cuda", *pytest, *others)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests with the mark `gpu` and their benchmark on a real GPU (GPU_FRAMEWORKS, 10 GB); docs/gpu.md."""
    machine = "tests/support/cuda/machine.py"
    if subprocess.run([interpreter(), machine], check=False, cwd=ROOT).returncode:
        return  # it has printed the reason
    make(session, ".venv-gpu/.built", ".venv-gpu/.extra-test-bare", VENV=".venv-gpu")
    for framework in os.environ.get("GPU_FRAMEWORKS", f"{CUDA_TORCH} {CUDA_CUPY} jax[cuda13]").split():
        pip(session, ".venv-gpu", "--quiet", "numpy", framework, torch=False, success_codes=[0, 1])
    run_in(session, ".venv-gpu", "-m", "dlx.testing", "--gpu", success_codes=[0, 1])
    files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/cuda/test_gpu*.py"))]
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-ra"]
    try:
        run_in(session, ".venv-gpu", *pytest, *files, *arguments_of(session))
    finally:
        run_in(session, ".venv-gpu", "-m", "benchmarks", "--only", "batch")


# Memory, threads and crashes


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run all tests under the address and undefined-behaviour sanitizers."""
    test(session, DLX_SANITIZE="1")


@nox.session
def allocations(session: nox.Session) -> None:
    """Let every allocation and every call of the CUDA driver fail once."""
    files = ["tests/reliability/test_allocations.py", "tests/cuda/test_driver_failures.py"]
    run(session, "-m", "pytest", *files, *arguments_of(session), env={"DLX_ALLOCATIONS": "all"})


@nox.session
def deep(session: nox.Session) -> None:
    """Run the property tests with EXAMPLES=100000 examples, and the thread tests for ROUNDS=10000 rounds."""
    files = [path for path in ROOT.glob("tests/*/test_*.py") if "arrays.examples import" in path.read_text("utf-8")]
    names, arguments = sorted(str(path.relative_to(ROOT)) for path in files), arguments_of(session)
    run(session, "-m", "pytest", *names, *arguments, env={"DLX_EXAMPLES": os.environ.get("EXAMPLES", "100000")})
    threads = ["tests/core/test_leaks.py", "tests/engine/test_fast_path_object.py", "-k", "threads"]
    env = {"DLX_ROUNDS": os.environ.get("ROUNDS", "10000")}
    run(session, "-m", "pytest", "--timeout", "3600", *threads, *arguments, env=env)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz the pure C core with libFuzzer (clang): `-- --executions 20000000 --seed 7 --update`."""
    session.run(interpreter(), "tests/support", "stress.fuzz_core", *arguments_of(session))


@nox.session(name="fuzz-producers")
def fuzz_producers(session: nox.Session) -> None:
    """Convert from a million producers that break the protocol: `-- --count 2500 --seed 17`, `-- --only 4711`."""
    program(session, "producers.fuzz", "--count", "1000000", "--seed", "1")


@nox.session(name="fuzz-files")
def fuzz_files(session: nox.Session) -> None:
    """Read 100,000 mutated files of each format: `-- --count 1000 --only .npy`, `-- --start 47 --count 1`."""
    program(session, "files.fuzz", "--count", "100000")


@nox.session(name="fuzz-rings")
def fuzz_rings(session: nox.Session) -> None:
    """Write random words to 100,000 rings in shared memory: `-- --count 1000 --seed 7`."""
    program(session, "stress.forged_rings", "--count", "100000")


@nox.session
def soak(session: nox.Session) -> None:
    """Make ten million calls of every kind; nothing may leak or slow down: `-- --count 100000 --seed 7`."""
    program(session, "stress.soak")


@nox.session
def exits(session: nox.Session) -> None:
    """End processes in 41 ways while results are alive, with six sets of frameworks."""
    program(session, "stress.exits")


@nox.session
def kills(session: nox.Session) -> None:
    """Kill processes that share memory at random, in a thousand rounds: `-- --count 100 --seed 7`."""
    program(session, "stress.kills")


@nox.session(name="ring-kills")
def ring_kills(session: nox.Session) -> None:
    """Kill producers and readers of rings before each step, then at random, in a thousand rounds: `-- --count 100`."""
    run(session, "tests/support", "stress.ring_steps")
    program(session, "stress.ring_kills")


@nox.session
def interrupts(session: nox.Session) -> None:
    """Interrupt calls wherever Python checks for signals."""
    program(session, "stress.interrupts")
    run(session, "tests/support", "stress.interrupts", "cold", "--sample", "1000", *arguments_of(session))


STRESS = ("tests/support", "stress.threads", "--threads", "8")
FREE_THREADED = {"VENV": ".venv-free-threaded", "TORCH": os.environ.get("FREE_THREADED_TORCH", "")}


def free_threaded_python(session: nox.Session, kind: str) -> str:
    """Build a free-threaded CPython from source once, outside of the checkout; return its interpreter."""
    folder = os.environ.get("FREE_THREADED", str(CACHE / "free-threaded"))
    path = output_of("tests/support/environments/free_threaded.sh", folder, kind)
    if not path:
        session.skip("there is no free-threaded Python here")
    return path


@nox.session(name="free-threaded")
def free_threaded(session: nox.Session) -> None:
    """Run all tests and the thread stress without the GIL (FREE_THREADED_TORCH="torch==2.14.1" adds torch, 5.3 GB).

    FREE_THREADED_PYTHON names an interpreter; otherwise CPython is built from source (PYTHON_SOURCES are its versions).
    """
    python = os.environ.get("FREE_THREADED_PYTHON") or free_threaded_python(session, "nogil")
    variables = {**FREE_THREADED, "PYTHON": python, "EXTRA": "test-free-threaded"}
    test(session, **variables)
    run(session, *STRESS, "--seconds", "60", "--frameworks", "numpy,torch,jax,tvm_ffi", **variables)


@nox.session
def tsan(session: nox.Session) -> None:
    """Run the thread stress for 10 s, and a ring, under ThreadSanitizer, with a CPython built for it by clang."""
    without_gil, python = free_threaded_python(session, "nogil"), free_threaded_python(session, "tsan")
    make(session, "env", **FREE_THREADED, PYTHON=without_gil, EXTRA="test-free-threaded")
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = output_of(".venv-free-threaded/bin/python", "-c", purelib)
    # This old ThreadSanitizer fails among addresses that are too random.
    fixed = subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0 if shutil.which("setarch") else False
    around = ["setarch", "-R"] if fixed else []
    shutil.rmtree(ROOT / "build" / "tsan", ignore_errors=True)
    build = ["setup.py", "--quiet", "build", "--build-base", "build/tsan", "--build-lib", "build/tsan/lib"]
    env = {"PYTHONPATH": packages, "TSAN_OPTIONS": "report_bugs=0"}
    session.run(*around, python, "-W", "ignore", *build, env=env)
    paths = f"{ROOT / 'build' / 'tsan' / 'lib'}:{packages}"
    env = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "TSAN_OPTIONS": "history_size=4"}
    words = ["--seconds", "10", "--frameworks", "numpy,tvm_ffi", *arguments_of(session)]
    session.run(*around, python, *STRESS, *words, env=env)
    session.run(*around, python, "tests/support", "stress.ring_threads", env=env)


# Measurements and pages that are computed


@nox.session
def bench(session: nox.Session) -> None:
    """Measure dlx and its peers: `-- --quick`, `-- --json FILE`; `-- --count` counts instructions under valgrind."""
    make(session, "env")
    for name in ("apache-tvm-ffi", "cuda-core", "cuda-bindings", "arraybridge", "optree"):
        pip(session, VENV, "--quiet", name, success_codes=[0, 1])  # a missing peer is left out
    run(session, "-m", "benchmarks", *arguments_of(session))


@nox.session(name="bench-cuda")
def bench_cuda(session: nox.Session) -> None:
    """Measure the host's work for device arrays, over the recording driver."""
    env = cuda_environment(session)
    env["DLX_CUDA_DRIVER"] = f"{env['LD_LIBRARY_PATH']}/libcuda.so.1"
    del env["DLX_ORIGINALS"], env["FAKE_CUDA_DEVICES"]
    run_in(session, ".venv-cuda", "-m", "benchmarks", "--only", "cuda", *arguments_of(session), env=env)


def kept_frameworks(session: nox.Session, *left_out: str) -> list[str]:
    """Return the frameworks whose environment the session `frameworks` has kept."""
    names = [name for name in FRAMEWORKS.split() if name not in ("pandas", "dask", "ray", "wide", *left_out)]
    kept = [name for name in names if (ROOT / f".venv-framework-{name}" / ".made").exists()]
    session.log(f"in their own environments: {', '.join(kept) or 'no framework'}")
    return kept


@nox.session
def matrix(session: nox.Session) -> None:
    """Write docs/matrix.md and its picture; the rows of frameworks whose environment is missing stay unchanged."""
    env = {"PYTHONPATH": "docs/tools"}
    run(session, "-m", "matrix", "--write", "docs", env=env)
    for name in kept_frameworks(session, "xarray"):
        command = ["-W", "ignore", "-m", "matrix", "--further", "--write", "docs"]
        run_in(session, f".venv-framework-{name}", *command, env=env)


@nox.session
def conformance(session: nox.Session) -> None:
    """Grade DLPack libraries (LIBRARIES), and write docs/conformance.md and its picture."""
    make(session, "env")
    reports = ROOT / "build" / "conformance"
    reports.mkdir(parents=True, exist_ok=True)
    graded = {name: (f".venv-framework-{name}", [name]) for name in kept_frameworks(session)}
    graded["here"] = (VENV, os.environ.get("LIBRARIES", GRADED).split())
    for name, (venv, libraries) in graded.items():
        command = ["-W", "ignore", "-m", "dlx.testing", "--json", *libraries]
        with (reports / f"{name}.json").open("w", encoding="utf-8") as file:
            run_in(session, venv, *command, stdout=file, success_codes=[0, 1])  # 1: a library breaks a promise
    files = [f"build/conformance/{name}.json" for name in ("here", *(name for name in graded if name != "here"))]
    run(session, "-m", "conformance", "docs/conformance.md", *files, env={"PYTHONPATH": "docs/tools"})


@nox.session
def screens(session: nox.Session) -> None:
    """Draw the pictures of the command line in docs/screens."""
    run(session, "-m", "screens", "docs/screens", env={"PYTHONPATH": "docs/tools"})
