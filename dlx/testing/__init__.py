"""The conformance kit: grade a library against DLPack's promises, on a CPU, by its name or by a `Subject`.

``python -m dlx.testing numpy`` prints a table; ``python -m pytest -p dlx.testing --dlx-adapter=mylib`` runs one test
per promise. A library with an adapter of dlx is also graded through dlx. Other libraries are graded as generic
producers, through ``__dlpack__``, ``__dlpack_device__`` and their ``from_dlpack``.
"""

from __future__ import annotations

from dlx.testing import libraries  # noqa: F401  registers the libraries
from dlx.testing.capsules import OldSource, Source, Taken, pattern
from dlx.testing.check import CHECKS, Check, Verdict, excepting, of_kinds
from dlx.testing.checks import adapter, consumer, producer, refusals  # noqa: F401  they register their checks
from dlx.testing.pytest_plugin import pytest_addoption, pytest_collection_modifyitems, pytest_configure
from dlx.testing.runner import run
from dlx.testing.subject import LIBRARIES, Broken, NotApplicable, Subject, find

__all__ = [
    "Subject", "Source", "OldSource", "Taken", "pattern",
    "CHECKS", "Check", "Verdict", "Broken", "NotApplicable",
    "LIBRARIES", "excepting", "find", "of_kinds", "run",
    "pytest_addoption", "pytest_configure", "pytest_collection_modifyitems",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
