"""Where this project is, and its C files compiled for tests."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SUPPORT = ROOT / "tests" / "support"


def compiled(name, folder):
    """Compile one C file of the tests as a library; return its path."""
    target = folder / f"{name}.so"
    command = ["cc", "-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / 'c_src' / 'include'}", f"-I{sysconfig.get_path('include')}"]
    command.append(str(ROOT / "tests" / "c" / f"{name}.c"))
    subprocess.run([*command, "-o", str(target), "-lpthread"], check=True)
    return target
