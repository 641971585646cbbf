"""What `import dlx` costs over bare Python."""

import statistics
import subprocess
import sys
import time

from benchmarks.measure import verdict

FRAMEWORKS = ("numpy", "torch", "cupy", "jax", "tensorflow", "paddle", "mlx", "pyarrow", "PIL", "ml_dtypes", "tvm_ffi")
IMPORT_MS = 30.0


def imports(rounds=11):
    """Measure `import dlx` over bare Python, in processes of their own, and list the frameworks that came with it."""
    loaded = f"print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    codes = {
        "bare": "import sys",
        "import dlx": "import sys, dlx",
        "dlx.convert": "import sys, dlx; dlx.convert",
        "first convert": "import sys, dlx; dlx.convert(b'abcd', to='dlx')",
    }
    times = {name: [] for name in codes}
    frameworks = {}
    for _ in range(rounds):
        for name, code in codes.items():
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", f"{code}; {loaded}"], capture_output=True, text=True, check=True
            )
            times[name].append((time.perf_counter() - start) * 1000)
            frameworks[name] = done.stdout.strip()
    found = {"bare_ms": (bare := min(times["bare"]))}
    print(f"\nImport: milliseconds over bare Python ({bare:.1f} ms), and the frameworks imported")
    for name in ("import dlx", "dlx.convert", "first convert"):
        over = min(times[name]) - bare
        spread = statistics.median(times[name]) - bare - over
        found[name] = {"over_ms": over, "spread_ms": spread, "frameworks": frameworks[name]}
        goal = "none"
        if name == "import dlx":  # names are loaded lazily: what comes with the first one is shown beside it
            goal = f"<= {IMPORT_MS:.0f}, no framework  {verdict(over <= IMPORT_MS and frameworks[name] == '[]')}"
        print(f"{name:<13}{over:5.1f} (median +{spread:.1f})  {frameworks[name]}  goal {goal}")
    return found
