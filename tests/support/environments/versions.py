"""Run tests with versions of frameworks, one after the other: `nox -s versions`, `nox -s frameworks`.

    python tests/support/versions.py --pythons PYTHON... [--only NAME...] [--keep] [--args "..."]

tests/versions.toml says which, and with which tests. dlx is built once for each Python, in ``.venv-versions-3.11``; a
run has an environment of its own on top of that, ``.venv-versions``, made anew each time, so that no run finds what
another one installed. With ``--keep`` it is called after what the run is about, and used again.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TABLE = tomllib.loads((ROOT / "tests" / "versions.toml").read_text(encoding="utf-8"))
TOP = ROOT / ".venv-versions"


def project(requirement):
    """Return the name in a requirement, or in a line of constraints.txt, as indexes spell it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", requirement)[0]).lower()


def title(run):
    """Return the name of a run, or the requirement that it is about."""
    return run.get("name", run["install"][0])


def base(python, version):
    """Build dlx for an interpreter, with what tests need and no framework; return that environment's packages."""
    name = f".venv-versions-{version}"
    make = [
        "make",
        "--no-print-directory",
        f"{name}/.extra-test-bare",
        f"{name}/.built",
        f"PYTHON={python}",
        f"VENV={name}",
    ]
    subprocess.run(make, cwd=ROOT, check=True)
    return ROOT / name / "lib" / f"python{version}" / "site-packages"


def installed(requirements, python, version, *, keep=""):
    """Make an environment with these on top of the one with dlx; return its interpreter."""
    below = base(python, version)
    top = TOP.with_name(f".venv-framework-{keep}") if keep else TOP
    made, stamp = top / ".made", " ".join([*requirements, version])
    if keep and made.exists() and made.read_text(encoding="utf-8") == stamp:
        return top / "bin" / "python"
    shutil.rmtree(top, ignore_errors=True)
    subprocess.run([python, "-m", "venv", "--without-pip", str(top)], check=True)
    (packages,) = top.glob("lib/python*/site-packages")
    # Its own packages come first, then those below, whose .pth files are read, too: dlx is an editable install.
    (packages / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n", encoding="utf-8")
    named = {project(each) for each in requirements if "==" in each}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = top / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if project(line) not in named), encoding="utf-8")
    pip = [str(top / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--only-binary", ":all:", "--constraint", str(constraints), *requirements], check=True)
    made.write_text(stamp, encoding="utf-8")
    return top / "bin" / "python"


def tested(python, tests, arguments):
    """Run the tests; return pytest's status and the line that counts them."""
    command = [str(python), "-m", "pytest", "-q", "-rfE", *arguments, *tests]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        line = ""
        for line in process.stdout:
            print(line, end="", flush=True)
    return process.returncode, line.strip()


def main():
    """Run what is asked for; status 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", nargs="*", default=[sys.executable], help="interpreters that run here")
    parser.add_argument("--only", nargs="*", default=[], help="how a run begins, such as numpy or torch==2.9")
    parser.add_argument("--keep", action="store_true", help="keep each environment for the next time")
    parser.add_argument("--print", action="store_true", help="show what would be installed, and nothing else")
    parser.add_argument("--args", default="", help="arguments for pytest")
    options = parser.parse_args()
    runs = [run for run in TABLE["runs"] if title(run).startswith(tuple(options.only) or "")]
    if options.print:
        print(*(" ".join(run["install"]) for run in runs), sep="\n")
        return 0
    pythons = {Path(each).name.removeprefix("python"): each for each in options.pythons}
    told, failed = [], False
    for run in runs:
        about, version = title(run), run["python"]
        if version not in pythons:
            told.append(f"{about}: left out, python{version} does not run here")
            continue
        print(f"== {about}, Python {version}", flush=True)
        at = installed(run["install"], pythons[version], version, keep=about if options.keep else "")
        status, line = tested(at, run.get("tests", TABLE["tests"]), shlex.split(options.args))
        told.append(f"{about}, Python {version}: {line}")
        failed |= status != 0
    print("==", *told, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
