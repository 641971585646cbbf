"""The conformance kit: hold any library to what DLPack promises, on a CPU, by name or by a `Subject` of your own.

``python -m dlx.testing numpy`` prints a table; ``python -m pytest -p dlx.testing --dlx-adapter=mylib`` makes a test of
each promise. A library that dlx has an adapter for is graded through dlx too; any other is graded as a stranger,
through ``__dlpack__``, ``__dlpack_device__`` and its ``from_dlpack`` only.
"""

from __future__ import annotations

from dlx.testing.catalog import LIBRARIES, find
from dlx.testing.check import CHECKS, Broken, Check, NotApplicable, Verdict, of_kinds
from dlx.testing.checks import adapter_contract as adapting
from dlx.testing.checks import adapter_lifetime as living
from dlx.testing.checks import consumer_import as importing
from dlx.testing.checks import consumer_lifetime as keeping
from dlx.testing.checks import consumer_refusals as refusing
from dlx.testing.checks import consumer_requests as asking
from dlx.testing.checks import producer_export as exporting
from dlx.testing.checks import producer_lifetime as owning
from dlx.testing.checks import producer_requests as requests
from dlx.testing.pytest_plugin import pytest_addoption, pytest_collection_modifyitems, pytest_configure
from dlx.testing.runner import run
from dlx.testing.subject import Subject
from dlx.testing.subjects import frameworks as libraries
from dlx.testing.subjects import others as further
from dlx.testing.support.capsules import Taken
from dlx.testing.support.producers import OldSource, Source, pattern

__all__ = [
    "Subject", "Source", "OldSource", "BareSource", "Taken", "pattern",
    "CHECKS", "Check", "Verdict", "Broken", "NotApplicable",
    "LIBRARIES", "find", "of_kinds", "run",
    "adapting", "exporting", "importing",
    "pytest_addoption", "pytest_configure", "pytest_collection_modifyitems",
]  # fmt: skip
