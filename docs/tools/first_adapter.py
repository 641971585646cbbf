"""Measure the time to write, install, test and grade an adapter of an invented framework.

Run it from the root of a checkout: ``python docs/tools/first_adapter.py``. It runs the commands of
``docs/write-an-adapter.md`` and the conformance kit in a temporary folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELF = '''
"""An invented framework: arrays over dlx tensors, in row-major host memory."""
import dlx

float32, int64, uint8, bool = "float32", "int64", "uint8", "bool"
__version__ = "3.1"


class Array:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def from_dlpack(producer):
    tensor = dlx.from_dlpack(producer)
    if tensor.readonly:
        raise BufferError("arrays of shelf are writable")
    return Array(tensor)
'''


def steps(folder: Path) -> list[tuple[str, Path, list[str]]]:
    """Return (title, working folder, command) of each step."""
    pip = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    return [
        ("dlx new-adapter shelf", folder, ["dlx", "new-adapter", "shelf"]),
        ("pip install", folder, [*pip, "--target", "site", "./dlx-shelf"]),
        ("python -m pytest", folder / "dlx-shelf", ["pytest", "-q", "-p", "no:cacheprovider"]),
        ("python -m dlx.testing shelf", folder, ["dlx.testing", "shelf"]),
    ]


def main() -> None:
    """Run all steps and print the seconds of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shelf.py").write_text(SHELF, encoding="utf-8")
        path = os.pathsep.join(map(str, (folder, folder / "site", ROOT)))
        begin = time.perf_counter()
        for title, cwd, command in steps(folder):
            before = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", *command],
                cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            print(f"{title:30}{time.perf_counter() - before:6.1f} s  {''.join(last)}")
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
        print(f"{'in all':30}{time.perf_counter() - begin:6.1f} s")


if __name__ == "__main__":
    main()
