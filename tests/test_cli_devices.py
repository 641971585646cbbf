"""`dlx devices` and `dlx bench`: what the driver says, asked elsewhere; figures that mean what they are called."""

import subprocess
import sys
import sysconfig

import pytest
from command import document, here, refused

from dlx.cli import bench, driver, probe

# Two devices that reach each other; the second has no managed memory.
FAKE = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { (void)flags; return STATUS; }
int cuGetErrorName(int error, const char** name) { *name = "CUDA_ERROR_NO_DEVICE"; return error != 100; }
int cuDriverGetVersion(int* version) { *version = 12080; return 0; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int place) { *device = 40 + place; return 0; }
int cuDeviceGetName(char* name, int length, int device) {
  (void)length;
  strcpy(name, "Fake 0");
  name[5] += device - 40;
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { (void)device; *bytes = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 83 ? device == 40 : 1;
  return 0;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) { *can = device != peer; return 0; }
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """Build a driver whose cuInit gives a status; return its path."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "fake.c").write_text(FAKE)

    def build(status):
        path = folder / f"fake{status}.so"
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        command = [compiler, "-shared", "-fPIC", f"-DSTATUS={status}", "-o", str(path), str(folder / "fake.c")]
        subprocess.run(command, check=True)
        return str(path)

    return build


def test_devices_without_a_driver(monkeypatch):
    """The host, and one line on what is missing."""
    monkeypatch.setattr(driver, "LIBRARY", "lib-that-is-not-there.so.1")
    monkeypatch.delenv("DLX_CUDA_DRIVER", raising=False)
    assert driver.driver() == {"missing": "no CUDA driver was found", "devices": []}
    monkeypatch.setenv("DLX_CUDA_DRIVER", "lib-that-is-not-there.so.1")
    found = document("devices")
    assert found["driver"] == {"missing": "no CUDA driver was found", "devices": []}
    _, out = here("devices")
    assert "cpu     (1, 0)  host memory" in out and "CUDA: no CUDA driver was found" in out


def test_devices_of_a_driver(monkeypatch, fake):
    """Names, sizes, what they can, and which reach each other; pinned and managed memory by their names."""
    monkeypatch.setenv("DLX_CUDA_DRIVER", fake(0))
    found = document("devices")["driver"]
    assert found["version"] == "12.8"
    first, second = found["devices"]
    assert (first["name"], first["bytes"], first["compute_capability"]) == ("Fake 0", 80 << 30, "9.0")
    assert (first["managed_memory"], second["managed_memory"]) == (True, False)
    assert (first["peers"], second["peers"]) == (["cuda:1"], ["cuda:0"])
    rows = [line.split(maxsplit=3) for line in here("devices")[1].splitlines()]
    assert ["cuda:1", "(2,", "1)", "Fake 1, 80.0 GiB"] in rows
    assert ["cuda_managed", "(13,", "0)", "CUDA managed memory"] in rows


def test_a_driver_that_cannot_be_used(monkeypatch, fake):
    """Its own name for the reason."""
    monkeypatch.setenv("DLX_CUDA_DRIVER", fake(100))
    assert document("devices")["driver"]["missing"].endswith("cuInit gave CUDA_ERROR_NO_DEVICE")


def test_a_driver_that_lacks_functions(monkeypatch, tmp_path):
    """It is no driver, which is said."""
    (tmp_path / "x.c").write_text("int cuInit(unsigned flags) { return 0; }")
    path = str(tmp_path / "x.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, str(tmp_path / "x.c")], check=True)
    monkeypatch.setenv("DLX_CUDA_DRIVER", path)
    assert "not whole" in document("devices")["driver"]["missing"]


def test_devices_of_frameworks(np, monkeypatch):
    """Each framework's own object, its name in dlx, and whether dlx brings arrays there."""
    monkeypatch.setattr("dlx.cli.targets.installed", lambda: ["dlx", "numpy"])
    (found,) = document("devices", "--load")["frameworks"]["numpy"]["devices"]
    assert found == {"device": "cpu", "dlpack": [1, 0], "native": "'cpu'", "taken": True}
    assert "numpy" in here("devices", "--load")[1]


def test_torchs_devices(torch):
    """The adapter names what torch sees."""
    found = driver.framework_devices("torch")["devices"]
    assert found[0] == {"device": "cpu", "dlpack": [1, 0], "native": "device(type='cpu')", "taken": True}
    assert len(found) == 1 + (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def test_a_probe_that_fails(monkeypatch):
    """Its last line is the cause, all of it the details; waiting ends."""
    assert "AdapterNotFoundError" in probe.ask("devices", "nothing")["broken"]
    monkeypatch.setattr(probe, "PATIENCE", 0.001)
    assert probe.ask("driver")["broken"] == "no answer within 0.001 seconds"


def test_bench(np):
    """Figures of the pairs asked for, with the outcome; nothing leaks (no_leaks)."""
    found = document("bench", "--quick", "--pairs", "numpy:dlx,dlx:numpy")["pairs"]
    assert [(each["from"], each["to"], each["outcome"]) for each in found] == [
        ("numpy", "dlx", "shared"),
        ("dlx", "numpy", "shared"),
    ]
    assert all(each["convert_ns"] > 0 and each["copy_bytes_per_ns"] > 0 for each in found)
    assert found[0]["from_dlpack_ns"] is None and found[1]["from_dlpack_ns"] > 0
    assert "numpy → dlx" in here("bench", "--quick", "--pairs", "numpy:dlx")[1]
    assert "is no pair" in refused("bench", "--pairs", "numpy")
    assert "no target 'nothing'" in refused("bench", "--pairs", "numpy:nothing")


def test_bench_measures_the_fast_lane(np):
    """Targets that come from the command line are the same objects as those in a program."""
    (pair,) = bench._pairs(":".join(("numpy", "dlx")))
    assert pair[1] is sys.intern("dlx")
