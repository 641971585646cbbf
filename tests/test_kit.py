"""The conformance kit can say yes and no: each check passes what keeps its promise, and finds what breaks it."""

from __future__ import annotations

import gc

import kit_planted
import pytest

from dlx.testing import CHECKS, run

STRANGERS = [name for name, check in CHECKS.items() if check.kind != "adapter"]


@pytest.fixture(autouse=True)
def no_leaks():
    """Planted leaks are wanted; what they keep goes with the test."""
    yield
    kit_planted.KEPT.clear()
    kit_planted.BUSY.clear()
    gc.collect()


def verdict(check, subject):
    """Hold a subject to a check: in a process of its own where it could be fatal."""
    if check.alone:
        (found,) = run(subject, [check])
        return found
    return check(subject)


def test_every_check_has_a_planted_fault():
    """No check may be one that cannot fail."""
    assert {fault.partition("/")[0] for fault in kit_planted.PLANTED} == set(STRANGERS)


@pytest.mark.parametrize("name", STRANGERS)
def test_a_library_that_keeps_its_promise_is_passed(name):
    """The good one keeps it: it is neither blamed nor found inapplicable."""
    found = verdict(CHECKS[name], kit_planted.subject_good)
    assert found.status == "keeps", found.seen


@pytest.mark.parametrize("fault", kit_planted.PLANTED)
def test_a_broken_promise_is_found(fault):
    """The bad one is found by the check that it is named after, with words that say what was seen."""
    found = verdict(CHECKS[fault.partition("/")[0]], getattr(kit_planted, f"subject_{fault}"))
    assert found.status == "breaks", (found.status, found.seen)
    assert len(found.seen) > 10
