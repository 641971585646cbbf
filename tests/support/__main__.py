"""Run a program of this package: ``python tests/support stress.soak --count 1000``."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    if len(sys.argv) < 2:
        programs = [path for path in HERE.rglob("*.py") if '\nif __name__ == "__main__":\n' in path.read_text("utf-8")]
        names = (".".join(path.relative_to(HERE).with_suffix("").parts) for path in programs)
        sys.exit("\n".join(["programs:", *sorted(set(names) - {"__main__"})]))
    sys.path[0] = str(HERE.parent)
    del sys.argv[0]
    runpy.run_module(f"support.{sys.argv[0]}", run_name="__main__", alter_sys=True)
