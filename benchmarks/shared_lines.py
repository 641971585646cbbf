"""Cache lines that two threads with separate arrays both use and at least one writes.

    python3.14t benchmarks/shared_lines.py [numpy-dlx | dlx-numpy | tree]

gdb steps each thread through one turn of a loop, from a call of `dlx.convert` to the next, and records the reads and
writes of every instruction, except on the stacks. That needs no hardware counters and no quiet machine.
"""

import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

LINE = 64  # bytes of a cache line
STACK = 1 << 16  # around the stack pointer
CASES = ("numpy-dlx", "dlx-numpy", "tree")


def loop(case):
    """Convert forever in two threads; print their numbers first."""
    import numpy as np

    import dlx

    def work():
        array = np.arange(4.0)
        sources = {"numpy-dlx": array, "dlx-numpy": dlx.convert(array, to="dlx"), "tree": {"a": [array, array + 1]}}
        source, to = sources[case], "numpy" if case == "dlx-numpy" else "dlx"
        while True:
            dlx.convert(source, to=to)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    print(*(thread.native_id for thread in threads), flush=True)
    time.sleep(3600)


def main(case):
    """Run the loop, let gdb step it with this file, and print the result."""
    running = subprocess.Popen([sys.executable, __file__, "loop", case], stdout=subprocess.PIPE, text=True)
    try:
        numbers = running.stdout.readline().split()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report")
            step = f"import runpy; runpy.run_path({__file__!r}, run_name='gdb')['step']({numbers}, {str(report)!r})"
            command = ["gdb", "-batch", "-p", str(running.pid), "-ex", f"python {step}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
            print(report.read_text() if report.exists() else done.stderr)
    finally:
        running.kill()


# ---- inside gdb ------------------------------------------------------------------------------------------------------

ADDRESS = re.compile(r"(?:%(fs):)?(-?0x[0-9a-f]+)?(?:\((%\w+)?(?:,(%\w+),(\d))?\))?$")
READ_ONLY = ("cmp", "test", "push", "call", "mul", "imul", "div", "idiv", "ucomis", "comis", "bt")


def step(numbers, report):
    """Write the lines that the threads with these numbers share."""
    import gdb

    for setting in ("pagination off", "confirm off", "scheduler-locking on"):
        gdb.execute(f"set {setting}")
    turns = [_turn(gdb, int(number)) for number in numbers]
    wrote, used = (
        [{a // LINE for a, kind, _ in t if kind != "r"} for t in turns],
        [{a // LINE for a, *_ in t} for t in turns],
    )
    shared = (wrote[0] & used[1]) | (wrote[1] & used[0])
    lines = [f"{len(shared)} cache lines that both threads use are written"]
    for line in sorted(shared):
        lines.append(f"{line * LINE:#x}")
        for number, turn in zip(numbers, turns, strict=True):
            lines += sorted({f"   thread {number} {kind} {where}" for at, kind, where in turn if at // LINE == line})
    locked = [where for at, kind, where in turns[1] if kind == "locked"]
    lines += [
        f"{len(locked)} locked instructions of a turn, on memory of the thread",
        *(f"   {each}" for each in locked),
    ]
    Path(report).write_text("\n".join(lines) + "\n")


def _turn(gdb, number):
    """Step a thread through one turn of its loop; return (address, "r", "w" or "locked", where) of each access."""
    next(t for t in gdb.selected_inferior().threads() if t.ptid[1] == number).switch()
    stop = gdb.Breakpoint("fast_path_call", internal=True)
    gdb.execute("continue", to_string=True)
    stop.delete()

    def register(name):
        return int(gdb.parse_and_eval(f"${name}").cast(gdb.lookup_type("unsigned long")))

    first, stack, found, known = register("rip"), register("rsp"), [], {}
    while not found or register("rip") != first:
        at = register("rip")
        if at not in known:
            instruction = gdb.selected_frame().architecture().disassemble(at)[0]
            text = instruction["asm"].split("#")[0].split("<")[0].strip()
            where = gdb.execute(f"info symbol {at}", to_string=True).split(" in section")[0].strip()
            known[at] = [*_operands(text)], instruction["length"], f"{where}: {text}"
        operands, length, where = known[at]
        for kind, (segment, offset, base, index, scale) in operands:
            address = int(offset or "0", 0) + (at + length if base == "%rip" else register(base[1:]) if base else 0)
            address += register(index[1:]) * int(scale) if index else 0
            address += register("fs_base") if segment else 0
            if abs(address - stack) > STACK:
                found.append((address, kind, where))
        gdb.execute("stepi", to_string=True)
    return found


def _operands(text):
    """Yield ("r", "w" or "locked", parts of the address) for each operand in memory of an instruction."""
    is_locked = text.startswith(("lock ", "xchg"))
    name, _, rest = text.removeprefix("lock ").partition(" ")
    if "nop" in text or name.startswith(("lea", "prefetch", "j", "rep", "endbr")):
        return
    operands = re.split(r",(?![^(]*\))", rest.strip())
    for i, operand in enumerate(operands):
        match = ADDRESS.match(operand)
        if not operand.startswith("$") and match and (match[3] or match[4] or match[1]):
            is_written = i == len(operands) - 1 and not name.startswith(READ_ONLY)
            yield "locked" if is_locked else "w" if is_written else "r", match.groups()


if __name__ == "__main__":
    (loop if sys.argv[1:2] == ["loop"] else main)(sys.argv[-1] if len(sys.argv) > 1 else CASES[0])
