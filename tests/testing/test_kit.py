"""The conformance kit: each check passes a library that keeps its promise, and finds one that breaks it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest
from support.kit import adapters, libraries
from support.processes import warm

import dlx
from dlx.testing import CHECKS, find, run

STRANGERS = [name for name, check in CHECKS.items() if check.kind != "adapter"]


@pytest.fixture(autouse=True)
def no_leaks():
    """Planted leaks are intentional, and their memory ends with the test."""
    yield
    kept = [libraries.KEPT, libraries.BUSY, adapters.KEPT, adapters.BUSY]
    if any(kept):
        for each in kept:
            each.clear()
        gc.collect()


@pytest.fixture
def verdict(monkeypatch):
    """Run a check of a subject in another process, so that other tests' changes of the registry do not matter.

    The process is a fork, which starts faster. The good subjects are graded as a user does it.
    """
    warm.fork_workers(monkeypatch, "dlx.testing", "support.kit.libraries", "support.kit.adapters")

    def of(check, subject):
        (found,) = run(subject, [check])
        return found

    return of


def test_every_check_has_a_planted_fault():
    """Every check has a subject that fails it."""
    assert {fault.partition("/")[0] for fault in libraries.PLANTED} == set(STRANGERS)


@pytest.fixture(scope="module")
def good():
    """Return the verdicts on the good library, by check, from one run of the command."""
    return {found.check: found for found in run(libraries.subject_good, [CHECKS[name] for name in STRANGERS])}


KEEPS = pytest.mark.unsanitized("freed memory is kept for a while: resident memory grows")
DIES = pytest.mark.unsanitized("Python's memory comes from malloc, which needs no GIL")
MARKS = {"export-leaks": KEEPS, "import-leaks": KEEPS, "deleter-without-gil": DIES, "deleter-foreign-thread": DIES}


def marked(names):
    """Return parameters, marked if they fail under the sanitizers."""
    return [pytest.param(name, marks=MARKS.get(name, ())) for name in names]


@pytest.mark.parametrize("name", marked(STRANGERS))
@pytest.mark.slow
def test_a_library_that_keeps_its_promise_is_passed(good, name):
    """The good library passes each check, and each check applies to it."""
    found = good[name]
    assert found.status == "keeps", found.seen


@pytest.mark.parametrize("fault", marked(libraries.PLANTED))
def test_a_broken_promise_is_found(fault, verdict):
    """The bad library fails the check that it is named after, and the message describes the fault."""
    found = verdict(CHECKS[fault.partition("/")[0]], getattr(libraries, f"subject_{fault}"))
    assert found.status == "breaks", (found.status, found.seen)
    assert len(found.seen) > 10


# ---- adapters --------------------------------------------------------------------------------------------------------

ADAPTERS = [name for name, check in CHECKS.items() if check.kind == "adapter"]
ELSEWHERE = {"adapter-fast-path", "adapter-imports-nothing"}  # tested below


def test_every_check_of_an_adapter_has_a_planted_fault():
    """Every check of an adapter has an adapter that fails it."""
    planted = {fault.partition("/")[0] for fault in adapters.SUBJECTS}
    assert planted - {"good"} | ELSEWHERE == set(ADAPTERS)


@pytest.fixture(scope="module")
def good_adapter():
    """Return the verdicts on the good adapter, by check, from one run of the command."""
    checks = [CHECKS[name] for name in ADAPTERS if name not in ELSEWHERE]
    return {found.check: found for found in run(adapters.named("good"), checks)}


@pytest.mark.parametrize("name", sorted(set(ADAPTERS) - ELSEWHERE))
@pytest.mark.slow
def test_an_adapter_that_says_what_is_so_is_passed(good_adapter, name):
    """The good adapter passes each check."""
    found = good_adapter[name]
    assert found.status == "keeps", found.seen


@pytest.mark.parametrize("fault", [fault for fault in adapters.SUBJECTS if fault != "good"])
def test_an_adapter_that_breaks_its_word_is_found(fault, verdict):
    """The bad adapter fails the check that it is named after."""
    found = verdict(CHECKS[fault.partition("/")[0]], adapters.named(fault))
    assert found.status == "breaks", (found.status, found.seen)


def test_paths_that_differ_are_found(monkeypatch):
    """A difference between the fast path and the Python path is reported."""
    check, subject = CHECKS["adapter-fast-path"], find("dlx")
    assert check(subject).status == "keeps"

    class Differs:
        """An adapter whose Python path always copies, unlike its fast path."""

        def __init__(self, convert):
            self.convert = convert

        def __call__(self, *args, **options):
            return self.convert(*args, **options)

        def __wrapped__(self, obj, to, **options):
            return self.convert(obj, to=to, copy=True)

    monkeypatch.setattr("dlx._api.convert.convert", Differs(dlx.convert))
    assert check(subject).status == "breaks"


@pytest.mark.parametrize(("line", "status"), [("import sys", "keeps"), ("import kit_framework", "breaks")])
def test_an_adapter_that_imports_its_framework_is_found(line, status, tmp_path, monkeypatch):
    """A plugin that imports its framework in a new interpreter breaks its promise."""
    (tmp_path / "kit_framework.py").write_text("__version__ = '1'\n")
    (tmp_path / "dlx_kit_framework.py").write_text(
        f"{line}\nimport dlx\nfrom dlx.adapter import Adapter\n\n\nclass Own(Adapter):\n"
        "    name = package = 'kit_framework'\n\n\n@dlx.hookimpl\ndef dlx_adapters():\n    return [Own()]\n"
    )
    info = tmp_path / "dlx_kit_framework-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dlx-kit-framework\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[dlx]\nkit_framework = dlx_kit_framework\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "dlx.testing", "kit_framework", "--json", "--only", "adapter-imports-nothing"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert done.returncode < 2, done.stderr
    (subject,) = json.loads(done.stdout)["subjects"]
    assert [found["status"] for found in subject["verdicts"]] == [status], done.stdout
    assert done.returncode == (status == "breaks")
