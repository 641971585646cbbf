"""The cost of `import dlx` over bare Python, and of a conversion in a new process."""

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.measure import compare, ratio, verdict

FRAMEWORKS = ("numpy", "torch", "cupy", "jax", "tensorflow", "paddle", "mlx", "pyarrow", "PIL", "ml_dtypes", "tvm_ffi")
IMPORT_MS = 30.0
LATER = 1.1  # goal: of `jnp.from_dlpack`, in a new process
_FRESH = """
import time, timeit, torch, jax.numpy as jnp, dlx
t = torch.ones(2, 3)
jnp.zeros(1).block_until_ready()
codes = "dlx.convert(t, to='jax')", "jnp.from_dlpack(t)"
for code in codes[::{order}]:
    start = time.thread_time()
    eval(code)
    print("first", codes.index(code), (time.thread_time() - start) * 1e6)
timers = [timeit.Timer(code, timer=time.thread_time, globals=globals()) for code in codes]
for _ in range(100):
    for i, timer in enumerate(timers):
        print("later", i, timer.timeit(10) / 10 * 1e6)
"""


def imports(rounds=11):
    """Measure `import dlx` over bare Python, each in its own process, and list the frameworks that it imports."""
    loaded = f"print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    codes = {
        "bare": "import sys",
        "import dlx": "import sys, dlx",
        "dlx.convert": "import sys, dlx; dlx.convert",
        "first convert": "import sys, dlx; dlx.convert(b'abcd', to='dlx')",
    }
    times = {name: [] for name in codes}
    frameworks = {}
    with tempfile.TemporaryDirectory() as folder:  # of byte code, like an installed dlx
        env = os.environ | {"PYTHONPYCACHEPREFIX": folder}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(rounds + 1):  # the first round writes it
            for name, code in codes.items():
                start = time.perf_counter()
                command = [sys.executable, "-c", f"{code}; {loaded}"]
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
                times[name].append((time.perf_counter() - start) * 1000)
                frameworks[name] = done.stdout.strip()
    found = {"bare_ms": (bare := min(times["bare"]))}
    print(f"\nImport: milliseconds over bare Python ({bare:.1f} ms), and the frameworks imported")
    for name in ("import dlx", "dlx.convert", "first convert"):
        over = min(times[name]) - bare
        spread = statistics.median(times[name]) - bare - over
        found[name] = {"over_ms": over, "spread_ms": spread, "frameworks": frameworks[name]}
        goal = "none"
        if name == "import dlx":  # names are loaded lazily: the first one's frameworks are printed next to it
            goal = f"<= {IMPORT_MS:.0f}, no framework  {verdict(over <= IMPORT_MS and frameworks[name] == '[]')}"
        print(f"{name:<13}{over:5.1f} (median +{spread:.1f})  {frameworks[name]}  goal {goal}")
    return found


def fresh_process(rounds=6):
    """Measure torch -> jax in new processes: the first call, and later ones."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "jax")):
        return {}
    times = {(which, i): [] for which in ("first", "later") for i in (0, 1)}
    for number in range(rounds):
        code = _FRESH.format(order=(1, -1)[number % 2])  # the first of the two pays for common imports
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            which, i, micros = line.split()
            times[which, int(i)].append(float(micros))
    first, later = (compare(times[which, 0], times[which, 1]) for which in ("first", "later"))
    print(f"\ntorch -> jax in {rounds} fresh processes, µs; dlx / jnp.from_dlpack(t)")
    print(f"first call  {first['ours']:8.1f} / {first['theirs']:<8.1f}{ratio(first)}")
    met = later["ratio"] <= LATER
    print(f"later calls {later['ours']:8.1f} / {later['theirs']:<8.1f}{ratio(later)}  <= {LATER}  {verdict(met)}")
    return {"first": first, "later": later | {"met": met}}
