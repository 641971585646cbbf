"""Comparison of dlx's declarations of the CUDA driver with NVIDIA's cuda.h of CUDA 12 and 13: `nox -s cuda`.

    python tests/support/cuda/headers.py FOLDER

FOLDER keeps the downloaded headers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HEADERS = ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-runtime==13.5.37")


def main():
    """Run the compiler for each version; return 1 if it finds a difference."""
    failed = False
    for requirement in HEADERS:
        target = Path(sys.argv[1]) / requirement
        if not target.exists():
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--only-binary", ":all:", "--target", str(target), requirement], check=True)
        (header,) = target.glob("nvidia/*/include/cuda.h")
        includes = [f"-I{folder}" for folder in (header.parent, ROOT / "c_src", ROOT / "c_src" / "include")]
        command = ["c++", "-std=c++17", "-fsyntax-only", *includes, str(ROOT / "tests" / "c" / "cuda_headers.cpp")]
        status = subprocess.run(command, check=False).returncode
        print(f"{requirement}: {'differs' if status else 'the same'}")
        failed |= status != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
