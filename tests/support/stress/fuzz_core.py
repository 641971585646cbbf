"""Fuzzing of the pure C core with clang's libFuzzer: `nox -s fuzz`.

tests/c/fuzz_core.c holds the conditions. tests/c/fuzz_core.txt is the corpus: one input per line, in hexadecimal
digits, with an optional note about the fault that it showed. `--update` rewrites it: the lines with notes, and the
inputs of this run that reach new code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support.project import ROOT

CORE = ROOT / "c_src" / "core"
# Without casts, which none of these programs calls: compiling them takes four fifths of the time.
CORE_FILES = sorted({*CORE.glob("*.c"), *(ROOT / "c_src" / "platform").glob("*.c")} - {CORE / "cast.c"})
TARGETS = ROOT / "tests" / "c" / "fuzz_core.c"
CORPUS = TARGETS.with_suffix(".txt")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LONGEST = 256


def compile_into(folder, sources, *flags, compiler="cc"):
    """Compile C files, each into an object in the folder."""
    folder.mkdir(exist_ok=True)
    command = [compiler, "-std=c11", "-g", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'c_src'}", *flags]
    subprocess.run([*command, f"-I{ROOT / 'c_src' / 'include'}", "-c", *map(str, sources)], cwd=folder, check=True)


def link(program, objects, *flags, compiler="cc"):
    """Link objects; return the program's path."""
    subprocess.run([compiler, *flags, *map(str, objects), "-lpthread", "-o", str(program)], check=True)
    return program


def write_inputs(folder):
    """Write the corpus as libFuzzer reads it: one file per input."""
    folder.mkdir()
    for number, line in enumerate(CORPUS.read_text(encoding="ascii").splitlines()):
        (folder / str(number)).write_bytes(bytes.fromhex(line.split()[0]))


def fuzz(executions, seed, target, update, folder):
    """Build with libFuzzer, and run, starting with the corpus; return the exit status."""
    found, kept = folder / "found", folder / "kept"
    # The references take most of the time, so they are compiled without sanitizers.
    compile_into(folder, [TARGETS], "-O2", compiler="clang")
    compile_into(folder, CORE_FILES, "-O2", "-fsanitize=fuzzer-no-link", *SANITIZE, compiler="clang")
    program = link(folder / "fuzz_core", folder.glob("*.o"), "-fsanitize=fuzzer", *SANITIZE, compiler="clang")
    write_inputs(found)
    limits = [f"-max_len={LONGEST}", "-timeout=10", f"-artifact_prefix={folder}/"]
    command = [program, *limits, f"-runs={executions}", f"-seed={seed}", "-print_final_stats=1", found]
    environment = os.environ | ({"FUZZ_TARGET": target} if target else {})
    status = subprocess.run([*map(str, command)], env=environment, check=False).returncode
    for crash in [*folder.glob("crash-*"), *folder.glob("leak-*"), *folder.glob("timeout-*")]:
        print(
            f"failed: {crash.name}; a line of {CORPUS.relative_to(ROOT)} is run every time: {crash.read_bytes().hex()}"
        )
    if update and status == 0:
        kept.mkdir()
        merge = [program, f"-max_len={LONGEST}", "-merge=1", kept, found]
        subprocess.run([*map(str, merge)], check=True, stderr=subprocess.DEVNULL)
        noted = [line for line in CORPUS.read_text(encoding="ascii").splitlines() if " " in line]
        lines = noted + sorted(path.read_bytes().hex() for path in kept.iterdir())
        CORPUS.write_text("".join(line + "\n" for line in lines if line), encoding="ascii")
        print(f"{len(lines)} inputs are in {CORPUS.relative_to(ROOT)}")
    return status


def main():
    """Run `nox -s fuzz`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=0, help="0 = a random one, which is printed")
    parser.add_argument(
        "--target", help="only this one: layout, make, empty, owners, check, copy, repack, arrow or arrow_out"
    )
    parser.add_argument("--update", action="store_true", help="rewrite the corpus")
    options = parser.parse_args()
    if shutil.which("clang") is None:
        sys.exit("fuzzing needs clang with libFuzzer, and there is no clang here (Debian: apt install clang)")
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(options.executions, options.seed, options.target, options.update, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
