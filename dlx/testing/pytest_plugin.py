"""``pytest -p dlx.testing --dlx-adapter=NAME``: one test for each promise. pytest itself is imported by its hook."""

from __future__ import annotations

from typing import Any

from dlx._support.module import set_module
from dlx.testing.check import CHECKS, KINDS, Verdict, declared, excepting, of_kinds
from dlx.testing.runner import run
from dlx.testing.subject import Subject, find


@set_module("dlx.testing")
def pytest_addoption(parser: Any) -> None:
    """Add the kit's options."""
    group = parser.getgroup("dlx", "conformance of an adapter, or of any DLPack library")
    group.addoption(
        "--dlx-adapter", action="append", default=[], metavar="NAME",
        help="an adapter of dlx, a library that the kit knows, or module:attribute of a dlx.testing.Subject",
    )  # fmt: skip
    group.addoption(
        "--dlx-except", action="append", default=[], metavar="CHECK=REASON", help="a promise known to be broken"
    )
    group.addoption("--dlx-kinds", default=",".join(KINDS), metavar="KINDS", help="of: producer, consumer, adapter")


@set_module("dlx.testing")
def pytest_configure(config: Any) -> None:
    """Run the kit alone, unless the caller's own tests are named too."""
    if config.option.dlx_adapter and config.args_source is not config.ArgsSource.ARGS:
        config.args = []


@set_module("dlx.testing")
def pytest_collection_modifyitems(session: Any, config: Any, items: list[Any]) -> None:
    """Add one test for each promise of each subject."""
    import pytest

    class Failed(Exception):
        """A verdict that fails a test."""

    class Promise(pytest.Item):
        """One promise of one subject."""

        verdicts: Verdicts
        check: str

        def runtest(self) -> None:
            verdict = self.verdicts[self.check]
            if verdict.status == "n/a":
                pytest.skip(verdict.seen)
            if verdict.status == "excepted":
                pytest.xfail(verdict.reason)
            if verdict.status != "keeps":
                raise Failed(CHECKS[self.check].explain(self.verdicts.subject, verdict))

        def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
            return str(excinfo.value) if isinstance(excinfo.value, Failed) else super().repr_failure(excinfo)

        def reportinfo(self) -> tuple[Any, int | None, str]:
            return self.path, None, self.name

    kinds = tuple(config.option.dlx_kinds.split(","))
    for spec in config.option.dlx_adapter:
        try:
            subject = excepting(find(spec), declared(config.option.dlx_except))
        except (LookupError, ImportError, ValueError) as error:
            raise pytest.UsageError(f"--dlx-adapter={spec}: {error}") from error
        verdicts = Verdicts(subject, kinds)
        for check in of_kinds(subject, kinds):
            name = f"{subject.name}::{check.name}"
            item = Promise.from_parent(session, name=name, nodeid=name)
            item.verdicts, item.check = verdicts, check.name
            items.append(item)


class Verdicts:
    """The verdicts on one subject, one by one; the checks that share a process run at the first."""

    def __init__(self, subject: Subject, kinds: tuple[str, ...]) -> None:
        self.subject, self.kinds = subject, kinds
        self.known: dict[str, Verdict] = {}

    def __getitem__(self, name: str) -> Verdict:
        if name not in self.known:
            together = [each for each in of_kinds(self.subject, self.kinds) if not each.alone]
            checks = [CHECKS[name]] if CHECKS[name].alone else together
            self.known |= {verdict.check: verdict for verdict in run(self.subject, checks)}
        return self.known[name]
