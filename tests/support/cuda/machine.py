"""The driver and devices of a machine for `nox -s gpu`, or a sentence and status 3."""

from __future__ import annotations

import ctypes
import sys


def main():
    """Query the driver itself, before anything is installed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(f"note: no CUDA device here ({error}): `nox -s gpu` ran nothing, and nothing failed")
        return 3
    code, version, count = driver.cuInit(0), ctypes.c_int(), ctypes.c_int()
    if code or driver.cuDriverGetVersion(ctypes.byref(version)) or driver.cuDeviceGetCount(ctypes.byref(count)):
        print(f"note: no CUDA device here (cuInit gives {code}): `nox -s gpu` ran nothing, and nothing failed")
        return 3
    print(f"driver of CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count.value} device(s)")
    if version.value < 13000:
        print("note: noxfile.py installs torch and cupy for CUDA 13, which this driver cannot run; use other versions:")
        print('note: GPU_FRAMEWORKS="torch==2.9.1 cupy-cuda12x jax[cuda12]" nox -s gpu')
    for number in range(count.value):
        name, major, minor = ctypes.create_string_buffer(100), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetName(name, 100, number)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, number)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, number)
        reach = ctypes.c_int()
        peers = [
            other
            for other in range(count.value)
            if other != number and driver.cuDeviceCanAccessPeer(ctypes.byref(reach), number, other) == 0 and reach.value
        ]
        print(f"cuda:{number} {name.value.decode()}, {major.value}.{minor.value}, reaches {peers or 'no other'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
