"""The conformance kit: hold any library to what DLPack promises, on a CPU, by name or by a `Subject` of your own.

``python -m dlx.testing numpy`` prints a table; ``python -m pytest -p dlx.testing --dlx-adapter=mylib`` makes a test of
each promise. A library that dlx has an adapter for is graded through dlx too; any other is graded
as a generic producer, through ``__dlpack__``, ``__dlpack_device__`` and its ``from_dlpack`` only.
"""

from __future__ import annotations

from dlx.testing.check import CHECKS, Check, Verdict, excepting, of_kinds
from dlx.testing.checks import (  # noqa: F401  each enters its checks
    adapter_contract,
    adapter_lifetime,
    consumer_import,
    consumer_lifetime,
    consumer_refusals,
    consumer_requests,
    producer_export,
    producer_lifetime,
    producer_requests,
)
from dlx.testing.pytest_plugin import pytest_addoption, pytest_collection_modifyitems, pytest_configure
from dlx.testing.runner import run
from dlx.testing.subject import LIBRARIES, Broken, NotApplicable, Subject, find
from dlx.testing.subjects import frameworks, others  # noqa: F401  each enters its libraries
from dlx.testing.support.capsules import Taken
from dlx.testing.support.producers import OldSource, Source, pattern

__all__ = [
    "Subject", "Source", "OldSource", "Taken", "pattern",
    "CHECKS", "Check", "Verdict", "Broken", "NotApplicable",
    "LIBRARIES", "excepting", "find", "of_kinds", "run",
    "pytest_addoption", "pytest_configure", "pytest_collection_modifyitems",
]  # fmt: skip
