"""``pytest -p dlx.testing --dlx-adapter=NAME``: one test per promise. Only the hooks import pytest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from dlx._support.module import set_module
from dlx.testing.check import KINDS, Check, Verdict, excepting, of_kinds, parse_exceptions
from dlx.testing.runner import run
from dlx.testing.subject import Subject, find


@set_module("dlx.testing")
def pytest_addoption(parser: Any) -> None:
    """Add the kit's options."""
    group = parser.getgroup("dlx", "conformance of an adapter or of any DLPack library")
    group.addoption(
        "--dlx-adapter", action="append", default=[], metavar="NAME",
        help="adapter of dlx, library that the kit knows, or module:attribute of a dlx.testing.Subject",
    )  # fmt: skip
    group.addoption(
        "--dlx-except", action="append", default=[], metavar="CHECK=REASON", help="accept this broken promise"
    )
    group.addoption("--dlx-kinds", default=",".join(KINDS), metavar="KINDS", help="of: producer, consumer, adapter")


@set_module("dlx.testing")
def pytest_configure(config: Any) -> None:
    """Run the kit alone, unless the caller names tests too."""
    if config.option.dlx_adapter and config.args_source is not config.ArgsSource.ARGS:
        config.args = []


@set_module("dlx.testing")
def pytest_collection_modifyitems(session: Any, config: Any, items: list[Any]) -> None:
    """Collect one test per promise of each subject."""
    import pytest

    class Failed(Exception):
        """A verdict that fails a test."""

    class Promise(pytest.Item):
        """One promise of one subject."""

        subject: Subject
        check: Check
        verdicts: Callable[[str], dict[str, Verdict]]

        def runtest(self) -> None:
            verdict = self.verdicts(self.check.name if self.check.alone else "")[self.check.name]
            if verdict.status == "n/a":
                pytest.skip(verdict.seen)
            if verdict.status == "excepted":
                pytest.xfail(verdict.reason)
            if verdict.status != "keeps":
                raise Failed(self.check.explain(self.subject, verdict))

        def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
            return str(excinfo.value) if isinstance(excinfo.value, Failed) else super().repr_failure(excinfo)

        def reportinfo(self) -> tuple[Any, int | None, str]:
            return self.path, None, self.name

    kinds = tuple(config.option.dlx_kinds.split(","))
    for spec in config.option.dlx_adapter:
        try:
            subject = excepting(find(spec), parse_exceptions(config.option.dlx_except))
        except (LookupError, ImportError, ValueError) as error:
            raise pytest.UsageError(f"--dlx-adapter={spec}: {error}") from error
        checks = of_kinds(subject, kinds)
        verdicts = functools.cache(functools.partial(_run, subject, checks))
        for check in checks:
            name = f"{subject.name}::{check.name}"
            item = Promise.from_parent(session, name=name, nodeid=name)
            item.subject, item.check, item.verdicts = subject, check, verdicts
            items.append(item)


def _run(subject: Subject, checks: Sequence[Check], name: str) -> dict[str, Verdict]:
    """Run the named check in its own process, or, without a name, all checks that share one."""
    wanted = [each for each in checks if (each.name == name if name else not each.alone)]
    return {verdict.check: verdict for verdict in run(subject, wanted)}
