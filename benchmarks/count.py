"""Instructions per conversion, counted by callgrind, which do not depend on the load of the machine.

The program below runs once under valgrind. It runs each expression N times and then 2 N times; the difference over N
is the count of one conversion. Counting begins after imports, warm-up and specialisation.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.conversions import scene

N = 200
PROGRAM = f"""
from benchmarks.conversions import scene
names, cases = scene()
mark = names["_floor"].mark
codes = [case.code for case in cases]
loops = []
for code in codes:  # a loop that CPython specialises, like timeit's
    exec("def loop(times):\\n for _ in times:\\n  " + code, names)
    loops.append(names["loop"])
once, twice = [0] * {N}, [0] * {2 * N}
for loop in loops:
    loop(twice)
mark("begin")
for i, loop in enumerate(loops):
    mark(f"skip {{i}}"); loop(once); mark(f"once {{i}}"); loop(twice); mark(f"twice {{i}}")
"""


def count():
    """Count one conversion of each kind under callgrind; print and return the instructions."""
    if shutil.which("valgrind") is None:
        print("note: valgrind is not installed")
        return None
    names, cases = scene()
    if names["_floor"] is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:])
            return None
        totals = {}
        for path in Path(folder).iterdir():
            text = path.read_text(encoding="utf-8", errors="replace")
            label = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            if label and total:
                totals[label[1].strip()] = totals.get(label[1].strip(), 0) + int(total[1])
    print(f"\nInstructions of one conversion, by callgrind: ({2 * N} runs - {N} runs) / {N}")
    found, pair = [], None
    for i, case in enumerate(cases):
        each = (totals[f"twice {i}"] - totals[f"once {i}"]) / N
        if case.pair != pair:
            print(f"-- {case.pair}")
            pair = case.pair
        print(f"{each:9.0f}  {case.kind:<6}{case.code}")
        found.append({"pair": case.pair, "kind": case.kind, "code": case.code, "instructions": each})
    return found
