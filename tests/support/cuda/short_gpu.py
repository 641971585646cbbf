"""The GPU checks that are newest, in under four minutes, for a machine with torch, cupy and a device.

Run `python tests/support/cuda/short_gpu.py` in an environment where dlx, numpy and pytest are installed, too. It prints
what it runs, writes everything to `dlx-gpu-short.txt`, and ends with status 0 if all passed or there is no device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIMIT = 235  # seconds for all steps
TESTS = "test_gpu_moves.py", "test_gpu_captures.py", "test_gpu_streams.py"
STEPS = (
    ("the machine", 10, ["tests/support/cuda/machine.py"]),
    ("the report of the wheel", 60, ["-m", "dlx.testing", "--gpu", "torch", "cupy"]),
    (
        "the tests",
        150,
        ["-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-ra", *(f"tests/cuda/{name}" for name in TESTS)],
    ),
    ("the figures", 60, ["-m", "benchmarks", "--quick", "--only", "moves"]),
)


def main():
    """Run the steps; return 1 if one failed or took too long."""
    end, failed = time.monotonic() + LIMIT, []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    with (ROOT / "dlx-gpu-short.txt").open("w", encoding="utf-8") as file:
        for name, seconds, words in STEPS:
            left = min(seconds, end - time.monotonic())
            title = f"==== {name}: python {' '.join(words)}"
            print(title, flush=True)
            try:
                done = subprocess.run(
                    [sys.executable, *words],
                    cwd=ROOT,
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=max(left, 1),
                )
                text, code = done.stdout + done.stderr, done.returncode
            except subprocess.TimeoutExpired as error:
                text, code = f"{_text(error.stdout)}{_text(error.stderr)}\nstopped after {left:.0f} s", 124
            file.write(f"{title}\n{text}\nstatus {code}\n")
            file.flush()
            print(text, flush=True)
            if name == "the machine" and code == 3:
                return 0
            if code:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed", "(dlx-gpu-short.txt)")
    return int(bool(failed))


def _text(output):
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main())
