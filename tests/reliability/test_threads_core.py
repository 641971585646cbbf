"""The pure core under ThreadSanitizer, without Python: tests/c/threads_core.c."""

import os
import shutil
import subprocess

import pytest
from support.project import ROOT
from support.stress.fuzz_core import CORE, CORE_FILES, compile_into, link

CUDA = CORE.parent / "cuda"
PROGRAMS = ROOT / "tests" / "c"
THREADS = ("-O1", "-fsanitize=thread")
ROUNDS = 1000

# A line of the core, and its broken version.
PLANTED = {
    "threads change the axes of each other": ("core/parallel.c", "first * axes[0].from, axes,",
        "first * axes[0].from, (dlx_axis*)j->axes,"),
    "a last holder does not see what others did": (
        "core/managed.c", "if (atomic_load_explicit(&self->holders, memory_order_acquire) != 1 &&",
        "if (atomic_load_explicit(&self->holders, memory_order_relaxed) != 1 &&"),
}  # fmt: skip


def run(program, driver=""):
    """Run it; reports of ThreadSanitizer are on stderr and in the status."""
    command = [str(program), str(ROUNDS)]
    if shutil.which("setarch"):  # older versions of ThreadSanitizer do not support highly random addresses
        command = ["setarch", "-R", *command]
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "TSAN_OPTIONS")}
    environment["DLX_CUDA_DRIVER"] = str(driver)
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}\n{error.stdout}\n{error.stderr}")


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Return the core, its CUDA part and the program under ThreadSanitizer."""
    folder = tmp_path_factory.mktemp("objects")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n", encoding="ascii")
    try:
        compile_into(folder, [folder / "empty.c"], *THREADS)
        done = run(link(folder / "empty", [folder / "empty.o"], *THREADS))
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no ThreadSanitizer")
    if done.returncode != 0:
        pytest.skip(f"ThreadSanitizer does not run here: {done.stderr}")
    (folder / "empty.o").unlink()
    compile_into(folder, [PROGRAMS / "threads_core.c", *CORE_FILES, *CUDA.glob("*.c")], *THREADS)
    return folder


@pytest.fixture(scope="module")
def driver(objects):
    """Return the recording driver, whose lock ThreadSanitizer can see."""
    compile_into(objects / "driver", [PROGRAMS / "fake_cuda.c"], *THREADS, "-fPIC", f"-I{PROGRAMS}")
    return link(objects / "fake_cuda.so", [objects / "driver" / "fake_cuda.o"], *THREADS, "-shared")


@pytest.mark.parametrize("has_driver", [False, True])
@pytest.mark.slow
def test_threads_share_what_the_core_shares(objects, driver, has_driver):
    """Nothing is reported, each owner is released once, and nothing is alive at the end."""
    done = run(link(objects / "threads_core", objects.glob("*.o"), *THREADS, "-ldl"), driver if has_driver else "")
    assert done.returncode == 0 and "owners released" in done.stdout, done.stderr


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.slow
def test_a_planted_fault_is_found(objects, driver, tmp_path, fault):
    """Each planted fault is found."""
    name, right, wrong = PLANTED[fault]
    if name == "core/parallel.c" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("a copy uses one thread on one core")
    source = CORE.parent / name
    text = source.read_text(encoding="utf-8")
    assert right in text
    (tmp_path / source.name).write_text(text.replace(right, wrong), encoding="utf-8")
    compile_into(tmp_path, [tmp_path / source.name], *THREADS, "-Wno-error", f"-I{source.parent}")
    others = [path for path in objects.glob("*.o") if path.stem != source.stem]
    done = run(link(tmp_path / "threads_core", [*others, *tmp_path.glob("*.o")], *THREADS, "-ldl"), driver)
    assert done.returncode != 0 and ("ThreadSanitizer" in done.stderr or "does not hold" in done.stderr), done.stderr
