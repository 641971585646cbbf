"""Other libraries' own tests of DLPack, run with their `from_dlpack` answered by `dlx.convert`: `make test-peers`.

Nothing of theirs is kept here: numpy's tests are in its wheel, the others' are fetched for the version that is
installed (`--from FOLDER` takes them from there). What is not to be had is left out with a sentence.
tests/support/peers.toml lists the tests that fail on purpose, each with its reason; a test that fails and is not listed
ends the run with status 1, and so does one that is listed and passes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

PLUGIN = Path(__file__).stem
DIFFERENCES = Path(__file__).with_suffix(".toml")


class Suite(NamedTuple):
    """One library's tests."""

    file: str
    """Its name; of numpy's, the path inside the package."""
    url: str
    """Where it is for a version; empty: in the package."""
    functions: tuple[str, ...]
    """What `dlx.convert` stands in for."""
    needs: str = ""
    """A further module that the tests import."""


SUITES = {
    "numpy": Suite("_core/tests/test_dlpack.py", "", ("numpy.from_dlpack",)),
    "torch": Suite(
        "test_dlpack.py",
        "https://raw.githubusercontent.com/pytorch/pytorch/v{}/test/test_dlpack.py",
        ("torch.from_dlpack", "torch.utils.dlpack.from_dlpack"),
    ),
    "jax": Suite(
        "array_interoperability_test.py",
        "https://raw.githubusercontent.com/jax-ml/jax/jax-v{}/tests/array_interoperability_test.py",
        ("jax.dlpack.from_dlpack", "jax.numpy.from_dlpack"),
        needs="absl",
    ),
}


def pytest_configure(config):
    """Put dlx in the place of a library's function, in the process of its tests."""
    import dlx

    name = os.environ["DLX_PEER"]

    def around(theirs):
        def from_dlpack(x, /, device=None, copy=None, **options):
            if isinstance(x, dlx.Tensor):  # it is dlx that calls
                return theirs(x, **options)
            return dlx.convert(x, to=name, device=device, copy=copy)

        return from_dlpack

    for path in SUITES[name].functions:
        module, _, function = path.rpartition(".")
        owner = importlib.import_module(module)
        setattr(owner, function, around(getattr(owner, function)))


def found(name, suite, given, folder):
    """Return the path of a suite's file, or a sentence that says why there is none."""
    try:
        version = importlib.metadata.version(name).partition("+")[0]
        package = Path(importlib.import_module(name).__file__).parent
    except ImportError:
        return f"{name} is not installed here"
    if suite.needs and importlib.util.find_spec(suite.needs) is None:
        return f"{suite.needs} is not installed here, which its tests import"
    path = package / suite.file if not suite.url else Path(given or folder) / suite.file
    if not path.exists() and suite.url and not given:
        url = suite.url.format(version)
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                path.write_bytes(answer.read())
        except OSError as error:
            return f"{url} cannot be had ({error}); --from takes a folder with {suite.file}"
    return path if path.exists() else f"there is no {path}"


def results(name, path, folder):
    """Run the tests of a file; return {test: "passed", "failed" or "skipped"}."""
    report = folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", "--junitxml", str(report)]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"DLX_PEER": name, "PYTHONPATH": paths}
    options = ["-c", os.devnull, "--rootdir", str(path.parent), str(path)]
    done = subprocess.run(
        [*command, *options], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    if not report.exists():
        sys.exit(f"the tests of {name} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = outcome
    return outcomes


def main():
    """Run the suites, and compare what fails with what is listed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="only these")
    parser.add_argument("--from", dest="given", help="a folder with the files of the suites")
    options = parser.parse_args()
    reasons, status = tomllib.loads(DIFFERENCES.read_text(encoding="utf-8")), 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in options.suites or SUITES:
            path = found(name, SUITES[name], options.given, folder)
            if isinstance(path, str):
                print(f"{name}: left out, since {path}")
                continue
            outcomes, listed = results(name, path, folder), reasons.get(name, {})
            failed = {test for test, outcome in outcomes.items() if outcome == "failed"}
            counts = {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")}
            print(
                f"{name} {importlib.metadata.version(name)}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items())
            )
            for test in sorted(failed):
                print(f"  {test}: {listed.get(test, 'NOT LISTED')}")
            stale = [test for test in listed if outcomes.get(test) == "passed"]
            for test in stale:
                print(f"  {test}: passes, and is listed as a difference")
            status |= bool(failed - listed.keys() or stale)
    return status


if __name__ == "__main__":
    sys.exit(main())
