"""Grades of real libraries: the kit finds their known faults and no others, and its page can be reproduced."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import subprocess
import sys

import pytest
from support.processes import warm
from support.project import ROOT

from dlx.testing import CHECKS, find, of_kinds, run

PAGE = ROOT / "docs" / "conformance.md"
SECTION = re.compile(r"^### (\S+) (\S+)$", re.MULTILINE)
PIECE = re.compile(r"^\*\*`([a-z0-9-]+)`\*\*:.*?\n```python\n(.*?)```", re.MULTILINE | re.DOTALL)

# From the libraries' issues and manual tests: library -> (version without the fault, check).
KNOWN = {
    "numpy": ["import-legacy-writable"],
    "torch": ["import-negative", "export-pending", "import-readonly", "asked-once", "export-snapshot", "overflow"],
    "jax": ["import-narrowing", "keyword-max-version-1", "asks-for-version", "export-readonly"],
    "tvm_ffi": ["keyword-max-version-0", "import-readonly", "other-major", "negative-extent"],
    "pyarrow.Array": ["export-readonly-legacy"],
}
# Promises that they are known to keep: the same checks must pass.
KEPT = {
    "numpy": ["import-negative", "import-readonly", "asked-once", "other-major", "import-narrowing", "export-readonly"],
    "torch": ["keyword-max-version-0", "other-major", "import-narrowing", "import-legacy-writable", "deleter-at-exit"],
    "jax": ["import-negative", "asked-once", "import-readonly", "export-layouts", "keyword-max-version-0"],
    "tvm_ffi": ["import-negative", "asked-once", "import-narrowing", "keyword-max-version-1", "import-legacy-writable"],
    "pyarrow.Array": ["import-negative", "other-major", "import-readonly", "export-readonly", "asks-for-version"],
}


def page():
    """Yield (library, version, check, code) of every reproduction in docs/conformance.md."""
    text = PAGE.read_text(encoding="utf-8")
    parts = SECTION.split(text)[1:]
    for name, version, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        for check, code in PIECE.findall(body):
            yield name, version, check, code


def installed(name, version=None):
    """Return a library as a subject, or skip if it is missing or has another version than the page."""
    try:
        subject = find(name)
        here = subject.version()
    except ImportError:
        pytest.skip(f"{name} is not installed")
    if version is not None and here != version:
        pytest.skip(f"the page is about {name} {version}, found {here}")
    return subject


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.slow
def test_known_faults_are_found_and_nothing_else_is_blamed(name, monkeypatch):
    """The kit finds known faults of the pinned versions; better versions are skipped."""
    if name in ("torch", "tvm_ffi"):  # tvm_ffi imports torch: seconds in each process
        warm.fork_workers(monkeypatch, *warm.FRAMEWORKS)
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    root = name.partition(".")[0]
    subject = installed(name)
    wanted = pinned["apache-tvm-ffi" if root == "tvm_ffi" else root]
    if subject.version().partition("+")[0] != wanted:
        pytest.skip(f"needs {name} {wanted}")
    checks = [CHECKS[check] for check in (*KNOWN[name], *KEPT[name])]
    found = {verdict.check: verdict for verdict in run(subject, checks)}
    assert {check: found[check].status for check in KNOWN[name]} == dict.fromkeys(KNOWN[name], "breaks")
    assert {check: found[check].status for check in KEPT[name]} == dict.fromkeys(KEPT[name], "keeps")


@pytest.mark.unsanitized("freed memory is kept for a while: resident memory grows")
@pytest.mark.gil("numpy itself gives one capsule to two threads")
@pytest.mark.slow
def test_the_page_is_what_numpy_does():
    """Every verdict on numpy equals the page's: the page is generated and current."""
    version = importlib.import_module("numpy").__version__ if find_spec("numpy") else None
    rows = [(check, code) for name, at, check, code in page() if name == "numpy" and at == version]
    if not rows:
        pytest.skip(f"the page is not about numpy {version}")
    subject = installed("numpy")
    found = list(run(subject, of_kinds(subject, ("producer", "consumer"))))
    assert {verdict.check for verdict in found if verdict.status == "breaks"} == {check for check, _ in rows}
    assert not [verdict for verdict in found if verdict.status == "error"]
    for check, code in rows:
        assert CHECKS[check].reproduction(subject).strip() == code.strip()


def find_spec(name):
    """Return whether a package can be imported, without importing it."""
    return importlib.util.find_spec(name)


RUNNER = """
import json, sys, traceback, warnings
warnings.simplefilter("ignore")
for name, code in json.load(sys.stdin):
    print("begin", name, flush=True)
    try:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        ended = "passes" if not end.code else "fails"
    except (ImportError, NameError, SyntaxError):
        ended = "is no reproduction: " + traceback.format_exc().replace(chr(10), " ")
    except BaseException:
        ended = "fails"
    else:
        ended = "passes"
    print("end", ended, flush=True)
"""


def outcomes(pieces):
    """Run (name, code) pieces in turn; return {name: outcome}. A piece that ends its process fails."""
    found, pieces = {}, list(pieces)
    while pieces:
        text = json.dumps(pieces)
        if "torch" in text:
            done = warm.run(RUNNER, text=text, timeout=240)
        else:
            command = [sys.executable, "-c", RUNNER]
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=240)
        words = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("begin ", "end "))]
        for (_, name), ended in zip(words[::2], [*words[1::2], ("end", "fails")], strict=False):
            found[name] = ended[1]
        assert words, done.stderr
        pieces = [piece for piece in pieces if piece[0] not in found]
    return found


@functools.cache
def shown(name):
    """Return the outcomes of the reproductions of one library."""
    return outcomes((check, code) for library, _, check, code in page() if library == name)


@pytest.mark.parametrize(
    ("name", "version", "check", "code"), [pytest.param(*row, id=f"{row[0]}-{row[2]}") for row in page()]
)
@pytest.mark.slow
def test_a_reproduction_on_the_page_shows_the_fault(name, version, check, code):
    """A reproduction has ten lines at most and fails, but not because a package is missing."""
    assert len(code.strip().splitlines()) <= 10
    installed(name, version)
    assert shown(name)[check] == "fails"


@pytest.mark.unsanitized("freed memory is kept for a while: resident memory grows")
def test_a_reproduction_passes_where_the_promise_is_kept():
    """Reproductions of the page pass for dlx itself."""
    subject = find("dlx")
    nothing = {"export-snapshot", "export-unfit", "export-pending"}  # dlx.Tensor has no such arrays
    checks = [check for check in CHECKS.values() if check.kind != "adapter" and check.name not in nothing]
    found = outcomes((check.name, check.reproduction(subject)) for check in checks)
    assert {name: ended for name, ended in found.items() if ended != "passes"} == {}


def test_the_page_is_dated_versioned_and_complete():
    """The page shows its date, versions, and every promise of generic producers."""
    text = PAGE.read_text(encoding="utf-8")
    assert re.search(r"Graded on \d{4}-\d\d-\d\d by `python -m dlx\.testing", text)
    for name, check in CHECKS.items():
        assert f"| `{name}` |" in text or check.kind == "adapter", name
    assert (PAGE.with_suffix(".svg")).read_text(encoding="utf-8").startswith("<svg")
