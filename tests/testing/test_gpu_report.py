"""`python -m dlx.testing --gpu` over the recording driver, and with faults; on a GPU: docs/gpu.md."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig

import pytest
from support.cuda import originals
from support.kit import gpu_stand_in
from support.project import ROOT, compiled

import dlx
from dlx._core import cuda as cuda_core
from dlx._engine.streams import StreamSync
from dlx.testing.check import Check
from dlx.testing.checks import gpu
from dlx.testing.gpu_report import FILE
from dlx.testing.runner import environment
from dlx.testing.subject import attempt

OWN = [name for name in gpu.GPU if name.startswith("dlx-")]
TOGETHER = [name for name in OWN if not gpu.GPU[name].alone]


def report(folder, driver, *args, **variables):
    """Run the command in a folder; return the finished process."""
    env = environment() | {"DLX_CUDA_DRIVER": str(driver)} | variables
    command = [sys.executable, "-m", "dlx.testing", "--gpu", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env)


def build(folder, code):
    """Return the path of the recording driver with changes in C."""
    source, made = folder / "driver.c", folder / "driver.so"
    source.write_text(code.replace("FAKE", f'"{ROOT / "tests" / "c" / "fake_cuda.c"}"'), encoding="utf-8")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-w", "-o", str(made), str(source)], check=True)
    return made


def test_without_a_device_it_is_one_sentence(tmp_path):
    """The status is 0, and no file is written."""
    done = report(tmp_path, "no-driver.so")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert done.stdout.startswith("note: no CUDA device here, so nothing was checked: there is no CUDA driver here:")
    assert not list(tmp_path.iterdir())


def test_over_the_recording_driver(tmp_path):
    """Without frameworks the checks of dlx pass; the file has the same text, and no more than 60 lines."""
    done = report(tmp_path, compiled("fake_cuda_ipc"), "dlx")
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / FILE).read_text(encoding="utf-8")
    assert text == done.stdout and len(text.splitlines()) <= 60
    found = {line.split()[1]: line.split()[0] for line in text.splitlines() if line.startswith(("pass", "fail"))}
    assert found == dict.fromkeys([name for name in OWN if name not in ("dlx-share", "dlx-figures")], "pass")
    for words in (
        "please attach it to an issue of dlx", f"dlx {dlx.__version__}, CPython", "2 device(s)", "cuda:1 Fake device 1",
        f"{len(found) + 1} passed, 1 not shown, 0 failed", "not shown dlx-share", "to host 64 MiB",
    ):  # fmt: skip
        assert words in text, words


def test_a_fault_is_named_and_the_others_go_on(tmp_path):
    """A driver that copies one byte less: checks of values fail, checks of errors pass."""
    driver = build(
        tmp_path,
        "#define cuMemcpyAsync whole_copy\n#include FAKE\n#undef cuMemcpyAsync\n"
        "int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, uint64_t stream) {\n"
        "  return whole_copy(to, from, n > 2048 ? n - 2000 : n, stream);\n}\n",
    )
    done = report(tmp_path, driver, "dlx", "--only", "dlx-moves", "--only", "dlx-errors", "--only", "dlx-leaks")
    assert done.returncode == 1
    assert "1 passed, 0 not shown, 2 failed" in done.stdout
    assert "fail      dlx-moves              the values changed" in done.stdout
    assert "pass      dlx-leaks" in done.stdout


@pytest.mark.slow
def test_a_lost_device_fails_one_check(tmp_path):
    """Error 700 ends the process of a check; the next checks get a new one."""
    driver = build(
        tmp_path,
        "#define cuMemcpyAsync whole_copy\n#include FAKE\n#undef cuMemcpyAsync\n"
        "int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, uint64_t stream) {\n"
        "  static int lost;\n  if (n == 1 << 20) lost = 1;\n"
        "  return lost ? 700 : whole_copy(to, from, n, stream);\n}\n",
    )
    done = report(tmp_path, driver, "dlx", "--only", "dlx-moves", "--only", "dlx-leaks", "--only", "dlx-devices")
    assert done.returncode == 1 and "2 passed, 0 not shown, 1 failed" in done.stdout, done.stdout
    assert "fail      dlx-leaks              the process ended with status 1: the device is lost: " in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["torhc"], "there is no torhc here. The report can check dlx"),
        (["dlx", "--only", "dlx-nothing"], "--only names a check of dlx-moves, "),
        (["--json"], "--gpu takes only the names of frameworks and --only"),
    ],
)
def test_wrong_calls(tmp_path, fake_driver, args, words):
    """The status is 2, with one line."""
    done = report(tmp_path, fake_driver, *args)
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr


def test_a_folder_that_cannot_be_written(tmp_path, fake_driver):
    """The text is printed, with the reason."""
    (tmp_path / FILE).mkdir()
    done = report(tmp_path, fake_driver, "dlx", "--only", "dlx-errors")
    assert done.returncode == 0 and "1 passed" in done.stdout
    assert f"{FILE}: Is a directory. Please copy this text into an issue of dlx." in done.stderr


@pytest.mark.parametrize("name", [name for name in TOGETHER if name not in ("dlx-share", "dlx-figures", "dlx-leaks")])
def test_wrong_values_break_a_check(cuda, monkeypatch, name):
    """Each check of values fails if the device has other values."""
    assert gpu.GPU[name](gpu.SUBJECT).status == "keeps"
    monkeypatch.setattr(gpu, "values", lambda x: [0.0])
    monkeypatch.setattr(gpu.find("dlx"), "read", lambda x: [0.0])
    assert gpu.GPU[name](gpu.SUBJECT).status == "breaks"


@pytest.mark.slow
def test_a_leak_breaks_its_check(cuda, monkeypatch):
    """An array that stays alive is found."""
    assert gpu.GPU["dlx-leaks"](gpu.SUBJECT).status == "keeps"
    kept = []
    convert = dlx.convert
    monkeypatch.setattr(gpu.dlx, "convert", lambda *args, **options: kept.append(convert(*args, **options)) or kept[-1])
    assert gpu.GPU["dlx-leaks"](gpu.SUBJECT).status == "breaks"


@pytest.fixture
def stand_in(cuda, monkeypatch):
    """A framework over the recording driver that finishes work late."""
    with gpu_stand_in.checked(monkeypatch, cuda, gpu) as framework:
        yield framework


def verdict(check, framework):
    """Return the status of a check and its text."""
    found = Check("x", "", "gpu", "", "wrong", lambda _: check(framework))(gpu.SUBJECT)
    return found.status, found.seen


STREAMS = [
    gpu.order, gpu.to_host, gpu.unrelated, gpu.lifetime,
    gpu.capture_same, gpu.capture_other, gpu.capture_host, gpu.capture_release,
]  # fmt: skip


@pytest.mark.parametrize("check", STREAMS)
def test_a_good_framework_passes(stand_in, check):
    """The checks of streams and captures are shown, and pass."""
    assert verdict(check, stand_in) == ("keeps", "")


def break_order(monkeypatch, stand_in):
    """Leave out every wait between streams."""
    monkeypatch.setattr(StreamSync, "wait", lambda self, readiness, waiting: None)
    monkeypatch.setattr(cuda_core, "when", lambda tensor, point, behind=None: tensor)
    monkeypatch.setattr(cuda_core, "wait", lambda point, stream: None)
    monkeypatch.setattr(cuda_core, "order", lambda before, after: None)


def break_lifetime(monkeypatch, stand_in):
    """Say that no memory waits for a device."""
    monkeypatch.setattr(gpu.dlx, "release_pending", lambda: 0)


def wait_for_all(monkeypatch, stand_in):
    """Let every conversion wait for the device."""
    convert = dlx.convert
    monkeypatch.setattr(
        gpu.dlx, "convert", lambda *args, **options: (stand_in.synchronize(), convert(*args, **options))[1]
    )


def wait_in_moves(monkeypatch, stand_in):
    """Let a move to the host wait for all streams."""
    values = gpu.values
    monkeypatch.setattr(gpu, "values", lambda x: (stand_in.synchronize(), values(x))[1])


def break_capture(monkeypatch, stand_in):
    """End every capture with an error."""
    end = type(stand_in.cuda).end_capture
    monkeypatch.setattr(
        stand_in.cuda, "end_capture", lambda stream: (end(stand_in.cuda, stream), 901)[1], raising=False
    )


def allow_all(monkeypatch, stand_in):
    """Refuse nothing."""
    monkeypatch.setattr(
        gpu,
        "attempt",
        lambda call, *args, **options: (call, None) if call is gpu.dlx.convert else attempt(call, *args, **options),
    )


def hold_nothing(monkeypatch, stand_in):
    """Let every stream finish at once."""
    monkeypatch.setattr(stand_in, "hold", lambda: None)


def copy_nothing(monkeypatch, stand_in):
    """Let graphs and copies do nothing."""
    monkeypatch.setattr(stand_in, "write", lambda target, source: None)


@pytest.mark.parametrize(
    ("check", "fault", "status", "words"),
    [
        (gpu.order, break_order, "breaks", "liba read unfinished data"),
        (gpu.order, wait_for_all, "n/a", "without order the data was finished, too"),
        (gpu.unrelated, wait_in_moves, "breaks", "dlx waited for the other stream"),
        (gpu.lifetime, break_lifetime, "breaks", "the memory was released early"),
        (gpu.lifetime, wait_for_all, "keeps", ""),
        (gpu.to_host, hold_nothing, "n/a", "the stream was done at once"),
        (gpu.lifetime, hold_nothing, "n/a", "the stream was done at once"),
        (gpu.capture_other, hold_nothing, "n/a", "the stream was done at once"),
        (gpu.capture_release, hold_nothing, "n/a", "the stream was done at once"),
        (gpu.capture_same, break_capture, "breaks", "the capture is broken: "),
        (gpu.capture_same, copy_nothing, "n/a", "graphs are not replayed here"),
        (gpu.capture_other, allow_all, "breaks", "no StreamError, but nothing"),
        (gpu.capture_host, allow_all, "breaks", "no StreamError: a result"),
        (gpu.capture_release, break_capture, "breaks", "the capture is broken: "),
    ],
)
def test_a_planted_fault_is_found(stand_in, monkeypatch, check, fault, status, words):
    """Each check of streams and captures fails with a fault, or says that it shows nothing."""
    fault(monkeypatch, stand_in)
    found, seen = verdict(check, stand_in)
    monkeypatch.undo()
    assert found == status and words in seen, seen


@pytest.mark.skipif(not originals.FOLDER, reason="nox -s cuda")
def test_with_the_published_frameworks(tmp_path):
    """Torch and cupy over the recording driver: nothing fails but what that driver lacks."""
    done = report(tmp_path, f"{originals.FOLDER}/libcuda.so.1", "dlx", "torch", "cupy")
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("fail")]
    assert failed == ["dlx-processes"], done.stdout  # it has no calls between processes
    assert len(done.stdout.splitlines()) <= 60


def test_the_facts_about_the_driver(tmp_path, monkeypatch):
    """NVML has the release, the free memory and MIG; a driver without it has fewer facts."""
    (tmp_path / "nvml.c").write_text(
        "#include <string.h>\n#include <stdint.h>\n"
        "int nvmlInit_v2(void) { return 0; }\n"
        'int nvmlSystemGetDriverVersion(char* text, unsigned room) { strncpy(text, "580.82.07", room); return 0; }\n'
        'int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** at) { *at = at; return strcmp(bus, "0:1"); }\n'
        "int nvmlDeviceGetMemoryInfo(void* at, uint64_t* all) { all[0] = 3; all[1] = 5 << 20; return at == 0; }\n"
        "int nvmlDeviceGetMigMode(void* at, unsigned* now, unsigned* next) { *now = 1; *next = 0; return at == 0; }\n"
    )
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "nvml.c")], check=True)
    driver = build(
        tmp_path,
        "#define cuDeviceGetAttribute fewer\n#include FAKE\n#undef cuDeviceGetAttribute\n#include <string.h>\n"
        'int cuDeviceGetPCIBusId(char* text, int room, int device) { strcpy(text, device ? "no" : "0:1"); return 0; }\n'
        "int cuDeviceGetAttribute(int* value, int attribute, int device) {\n"
        "  if (attribute == 20) { *value = 3; return 0; }\n  if (attribute == 133) { *value = 1; return 0; }\n"
        "  return fewer(value, attribute, device);\n}\n",
    )
    code = (
        "import json; from dlx._core.driver import *; d = query_driver(); each = d['devices']\n"
        "print(json.dumps([d['release'], [*map(format_memory, each)], [*map(format_device, each)], format_version(d)]))"
    )
    env = environment() | {"DLX_CUDA_DRIVER": str(driver), "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    release, memory, modes, version = json.loads(done.stdout)
    assert (release, version) == ("580.82.07", "driver 580.82.07 (CUDA ?)")
    assert memory == ["Fake device 0, 5.0 MiB free", "Fake device 1"]
    assert "compute mode exclusive process, MIG on, MPS on, memory pools" in modes[0] and "MIG" not in modes[1]
