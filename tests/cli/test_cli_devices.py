"""`dlx devices`: the driver and the frameworks, queried in separate processes."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.processes.command import document, here, refused

from dlx.cli import probe

ROOT = Path(__file__).resolve().parent.parent.parent

# The recording driver, with functions that only `dlx devices` calls.
MORE = """
int cuDriverGetVersion(int* version) { *version = 12080; return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { (void)device; *bytes = (size_t)80 << 30; return 0; }
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the path of a recording driver that supports all queries."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "whole.c").write_text(f'#include "{ROOT / "tests" / "c" / "fake_cuda.c"}"\n{MORE}')
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    command = [compiler, "-shared", "-fPIC", "-pthread", "-o", str(folder / "whole.so"), str(folder / "whole.c")]
    subprocess.run(command, check=True)
    return str(folder / "whole.so")


def test_devices_without_a_driver(monkeypatch):
    """The output shows the host, and one line with the missing library and a fix."""
    monkeypatch.setenv("DLX_CUDA_DRIVER", "lib-that-is-not-there.so.1")
    found = document("devices", "--driver")
    assert found["driver"]["devices"] == [] and found["frameworks"] == {}
    assert "there is no CUDA driver here: lib-that-is-not-there.so.1" in found["driver"]["missing"]
    _, out = here("devices", "--driver")
    assert "cpu     (1, 0)  host memory" in out
    assert "\nCUDA: there is no CUDA driver here: lib-that-is-not-there.so.1: cannot open" in out
    assert "set DLX_CUDA_DRIVER to the path of its libcuda.so.1" in out
    assert max(map(len, out.splitlines())) <= 80


def test_devices_of_a_driver(monkeypatch, whole):
    """The output lists the devices of `dlx.devices` with sizes, abilities and peers; memory kinds have names."""
    monkeypatch.setenv("DLX_CUDA_DRIVER", whole)
    monkeypatch.setenv("FAKE_CUDA_PEERS", "1")
    found = document("devices", "--driver")["driver"]
    assert found["version"] == "12.8"
    first, second = found["devices"]
    assert (first["device"], second["device"]) == ("cuda:0", "cuda:1")
    assert (first["name"], first["bytes"]) == ("Fake device 0", 80 << 30)
    assert (first["peers"], second["peers"]) == (["cuda:1"], ["cuda:0"])
    _, out = here("devices", "--driver")
    rows = [line.split() for line in out.splitlines()]
    assert ["cuda:1", "(2,", "1)", "Fake", "device", "1,", "80.0", "GiB"] in rows
    assert ["cuda_host", "(3,", "0)", "pinned", "host", "memory"] in rows
    assert "peer access to cuda:0" in out
    code = "import dlx; print([str(each) for each in dlx.devices()])"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert listed.strip() == str(["cpu", *(each["device"] for each in found["devices"])])


def test_doctor_shows_the_driver_and_its_devices(monkeypatch, whole):
    """They are in the block for bug reports and in the JSON; a missing driver has its reason, without folders."""
    monkeypatch.setenv("DLX_CUDA_DRIVER", whole)
    block = here("doctor")[1].partition("for bug reports:")[2]
    assert "\n    CUDA: driver of CUDA 12.8\n    cuda:0: Fake device 0, 80.0 GiB, compute capability" in block
    assert "\n    cuda:1: Fake device 1" in block
    assert [each["device"] for each in document("doctor")["driver"]["devices"]] == ["cuda:0", "cuda:1"]
    monkeypatch.setenv("DLX_CUDA_DRIVER", "/no/such/folder/libcuda.so.1")
    block = here("doctor")[1].partition("for bug reports:")[2]
    assert "\n    CUDA: there is no CUDA driver here: libcuda.so.1: cannot open" in block and "/" not in block
    assert max(map(len, block.splitlines())) <= 80


def test_a_driver_that_says_less(monkeypatch, fake_driver):
    """Missing facts are left out, the others are shown."""
    monkeypatch.setenv("DLX_CUDA_DRIVER", str(fake_driver))
    found = document("devices", "--driver")["driver"]
    assert found["version"] is None
    assert [(each["device"], each["bytes"], each["peers"]) for each in found["devices"]] == [
        ("cuda:0", None, []),
        ("cuda:1", None, []),
    ]
    assert "no peer access" in here("devices", "--driver")[1]


def test_a_driver_that_lacks_functions(monkeypatch, tmp_path):
    """The output says that it is not a usable driver."""
    (tmp_path / "x.c").write_text("int cuInit(unsigned flags) { return 0; }")
    path = str(tmp_path / "x.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, str(tmp_path / "x.c")], check=True)
    monkeypatch.setenv("DLX_CUDA_DRIVER", path)
    assert "cuGetErrorName" in document("devices", "--driver")["driver"]["missing"]


def test_devices_of_frameworks(np, monkeypatch):
    """The output shows each framework's object, dlx's name, and whether dlx can convert to the device."""
    monkeypatch.setattr("dlx.cli.targets.installed_targets", lambda: ["dlx", "numpy"])
    (found,) = document("devices")["frameworks"]["numpy"]["devices"]
    assert found == {"device": "cpu", "dlpack": [1, 0], "native": "'cpu'", "taken": True}
    rows = [line.split() for line in here("devices", "numpy")[1].splitlines()]
    assert ["cpu", "numpy", "'cpu'", "to", "and", "from"] in rows
    assert "'nothing' is not an installed framework. Installed: " in refused("devices", "nothing")


def test_torchs_devices(torch):
    """The adapter lists the devices that torch sees."""
    found = probe.framework_devices("torch")["devices"]
    assert found[0] == {"device": "cpu", "dlpack": [1, 0], "native": "device(type='cpu')", "taken": True}
    assert len(found) == 1 + (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def test_a_probe_that_fails(monkeypatch):
    """The cause is the last line of stderr, the details are all of it; a timeout ends the wait."""
    assert "AdapterNotFoundError" in probe.ask("devices", "nothing")["broken"]
    monkeypatch.setattr(probe, "PATIENCE", 0.001)
    assert probe.ask("driver")["broken"] == "no answer within 0.001 seconds"
