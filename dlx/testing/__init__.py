"""The conformance kit: hold any library to what DLPack promises, on a CPU, by name or by a `Subject` of your own.

``python -m dlx.testing numpy`` prints a table; ``python -m pytest -p dlx.testing --dlx-adapter=mylib`` makes a test of
each promise. A library that dlx has an adapter for is graded through dlx too; any other is graded as a stranger,
through ``__dlpack__``, ``__dlpack_device__`` and its ``from_dlpack`` only.
"""

from __future__ import annotations

from dlx.testing import (  # noqa: F401  each enters its checks, or its libraries
    adapting,
    asking,
    exporting,
    further,
    importing,
    keeping,
    libraries,
    living,
    owning,
    refusing,
    requests,
)
from dlx.testing.capsules import Taken
from dlx.testing.catalog import LIBRARIES, find
from dlx.testing.check import CHECKS, Broken, Check, NotApplicable, Verdict, of_kinds
from dlx.testing.plugin import pytest_addoption, pytest_collection_modifyitems, pytest_configure
from dlx.testing.running import run
from dlx.testing.sources import OldSource, Source, pattern
from dlx.testing.subject import Subject

__all__ = [
    "Subject", "Source", "OldSource", "BareSource", "Taken", "pattern",
    "CHECKS", "Check", "Verdict", "Broken", "NotApplicable",
    "LIBRARIES", "find", "of_kinds", "run",
    "adapting", "exporting", "importing",
    "pytest_addoption", "pytest_configure", "pytest_collection_modifyitems",
]  # fmt: skip
