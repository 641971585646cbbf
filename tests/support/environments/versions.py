"""Tests with versions of frameworks, one after the other: `nox -s versions`, `nox -s frameworks`.

    python tests/support environments.versions --pythons PYTHON... [--only NAME...] [--keep] [--args "..."]

tests/versions.toml lists the versions and their tests. dlx is built once for each Python, in ``.venv-versions-3.11``. A
run installs its packages on top of that, in a new ``.venv-versions``, so that no run sees another run's packages. With
``--keep`` the environment has the run's name and is used again.
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
    """Return the normalized project name in a requirement, or in a line of constraints.txt."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", requirement)[0]).lower()


def title(run):
    """Return the name of a run, or its first requirement."""
    return run.get("name", run["install"][0])


def base(python, version):
    """Build dlx for an interpreter, with the tests' packages and without frameworks; return its site-packages."""
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
    """Create an environment with these packages on top of the one with dlx; return its interpreter."""
    below = base(python, version)
    top = TOP.with_name(f".venv-framework-{keep}") if keep else TOP
    made, stamp = top / ".made", " ".join([*requirements, version])
    if keep and made.exists() and made.read_text(encoding="utf-8") == stamp:
        return top / "bin" / "python"
    shutil.rmtree(top, ignore_errors=True)
    subprocess.run([python, "-m", "venv", "--without-pip", str(top)], check=True)
    (packages,) = top.glob("lib/python*/site-packages")
    # These packages come first, then those below, with their .pth files: dlx is an editable install.
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
    """Run the tests; return pytest's status and its closing line."""
    command = [str(python), "-m", "pytest", "-q", "-rfE", *arguments, *tests]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        line = ""
        for line in process.stdout:
            print(line, end="", flush=True)
    return process.returncode, line.strip()


def main():
    """Run the selected versions; the status is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", nargs="*", default=[sys.executable], help="interpreters on this machine")
    parser.add_argument("--only", nargs="*", default=[], help="start of a run's name, such as numpy or torch==2.9")
    parser.add_argument("--keep", action="store_true", help="keep each environment for the next run")
    parser.add_argument("--print", action="store_true", help="only print the requirements")
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
