"""Checks, their verdicts, and the registry of all checks."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from dlx._support.module import set_module
from dlx.errors import DlxError
from dlx.testing.capsules import NotACapsule, Source
from dlx.testing.subject import Broken, NotApplicable, Subject

KINDS = ("producer", "consumer", "adapter")
SEVERITIES = ("fatal", "wrong", "refuses", "friction")
"""Process death or unsafe memory · wrong data or rights, silently · refusal of valid data · the rest."""

WORDS = (
    "imports", "take", "array", "grid", "reshape", "unfit", "pending", "pending_bytes", "readonly", "argument", "write",
)  # fmt: skip
"""Placeholders of reproductions; a subject's `words` fill them."""


@set_module("dlx.testing")
@dataclass(frozen=True)
class Check:
    """A promise, and a function that checks it.

    Attributes
    ----------
    name
        Name for `--only` and for declared exceptions.
    promise
        One sentence about a library that keeps the promise.
    kind
        Who makes the promise: ``"producer"``, ``"consumer"`` or ``"adapter"``.
    about
        Its row of the summary table.
    severity
        The cost of breaking it: ``"fatal"``, ``"wrong"``, ``"refuses"`` or ``"friction"``.
    function
        ``function(subject)`` raises `Broken` or `NotApplicable`, or returns; a returned text is a remark. Any other
        exception is a bug of the kit.
    alone
        Whether it runs in its own process, which must exit cleanly: it may kill the process, or tests the exit.
    shows
        Code of at most ten lines that fails if the promise is broken, with the subject's words in braces.
    see
        Source of the promise.
    """

    name: str
    promise: str
    kind: str
    about: str
    severity: str
    function: Callable[[Subject], str | None] = field(repr=False)
    alone: bool = False
    shows: str = ""
    see: str = ""

    def __call__(self, subject: Subject) -> Verdict:
        """Check the promise for a subject, in this process."""
        try:
            verdict = Verdict(self.name, subject.name, "keeps", self.function(subject) or "")
        except NotApplicable as error:
            return Verdict(self.name, subject.name, "n/a", str(error))
        except Exception as error:
            broken = Broken, NotACapsule, *([DlxError] if self.kind == "adapter" else [])  # the conversion failed
            if not isinstance(error, broken):
                return Verdict(self.name, subject.name, "error", f"{traceback.format_exc()}{_last_tried(error)}")
            tried = _last_tried(error) if self.kind == "adapter" else ""
            verdict = Verdict(self.name, subject.name, "breaks", f"{error}{tried}")
        return verdict.under(subject, self)

    def reproduction(self, subject: Subject) -> str:
        """Return stand-alone code that fails if the subject breaks the promise."""
        text = subject.words.get(self.name, self.shows).strip("\n")
        argument = "source.capsule()" if subject.takes_capsules else "source"
        for word, code in {"argument": argument, **subject.words}.items():
            text = text.replace(f"{{{word}}}", code)
        if not text or any(f"{{{word}}}" in text for word in WORDS):
            return (
                "from dlx.testing import CHECKS, find\n"
                f'verdict = CHECKS["{self.name}"](find("{subject.spec or subject.name}"))\n'
                'assert verdict.status == "keeps", verdict.seen'
            )
        return text

    def explain(self, subject: Subject, verdict: Verdict) -> str:
        """Return the promise, the fault, and code that shows it; or the failure of the kit."""
        if verdict.status == "error":
            return f"{self.name}: the kit failed, not {subject.name}\n{verdict.seen}"
        return f"{self.promise}\n{verdict.seen}\n\n{self.reproduction(subject)}"


def _last_tried(error: Exception) -> str:
    """Return the last array in the kit's frames of an error's traceback."""
    last = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith("dlx.testing."):
            last = next((each for each in frame.f_locals.values() if isinstance(each, Source)), last)
    return "" if last is None else f"; tried last: {last.dtype}, shape {last.shape}, strides {last.strides}"


@set_module("dlx.testing")
@dataclass(frozen=True)
class Verdict:
    """The result of one check on one subject.

    Attributes
    ----------
    check, subject
        Their names.
    status
        ``"keeps"``, ``"breaks"``, ``"n/a"``, ``"excepted"`` (broken, with a declared reason) or ``"error"`` (the kit
        failed).
    seen
        The observation, or the reason why the check is not applicable.
    reason
        Reason of the declared exception.
    """

    check: str
    subject: str
    status: str
    seen: str = ""
    reason: str = ""

    def under(self, subject: Subject, check: Check) -> Verdict:
        """Apply the subject's declared exceptions; an exception without a broken promise breaks the check."""
        reason = subject.exceptions.get(check.name, "")
        if not reason:
            return self
        if self.status == "breaks":
            return replace(self, status="excepted", reason=reason)
        if self.status == "keeps":
            text = f"the declared exception ({reason}) is no longer needed: remove it"
            return replace(self, status="breaks", seen=text, reason=reason)
        return self


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order of the report."""


def check(
    kind: str, about: str, severity: str, *, alone: bool = False, see: str = "", name: str = ""
) -> Callable[[Callable[[Subject], str | None]], Check]:
    """Register a function as a check. Its docstring is the promise, followed by the code that shows a fault."""
    assert kind in KINDS and severity in SEVERITIES

    def enter(function: Callable[[Subject], str | None]) -> Check:
        called = name or function.__name__.replace("_", "-")
        promise, _, code = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        shows = _reproduction(code) if code else ""
        assert called not in CHECKS
        CHECKS[called] = Check(called, promise, kind, about, severity, function, alone, shows, see)
        return CHECKS[called]

    return enter


def _reproduction(text: str) -> str:
    """Return code with its imports; it exits with success if a line marked `# or raises` raises."""
    lines: list[str] = []
    for line in text.splitlines():
        step, mark, _ = line.partition("  # or raises")
        lines += ["try:", f"    {step}", "except Exception:", "    raise SystemExit(0)"] if mark else [line]
    own = [line for line in lines if line.startswith(("import ", "from "))]
    named = ", ".join(name for name in ("OldSource", "Source", "Taken") if re.search(rf"\b{name}\b", text))
    kit = [f"from dlx.testing import {named}"] if named else []
    return "\n".join(["{imports}", *own, *kit, *lines[len(own) :]])


@set_module("dlx.testing")
def of_kinds(subject: Subject, kinds: tuple[str, ...] = KINDS, only: tuple[str, ...] = ()) -> list[Check]:
    """Return the checks that apply to a subject, in order."""
    wanted = [CHECKS[name] for name in only] if only else list(CHECKS.values())
    return [each for each in wanted if each.kind in kinds and each.kind in subject.kinds]


@set_module("dlx.testing")
def excepting(subject: Subject, exceptions: Mapping[str, str]) -> Subject:
    """Return a subject with more declared exceptions, ``{name of the check: reason}``.

    Raises
    ------
    ValueError
        If a check is unknown, or a reason is missing.
    """
    unknown = exceptions.keys() - CHECKS.keys()
    if unknown:
        raise ValueError(f"there is no check {', '.join(sorted(unknown))}. `--list` shows all names.")
    return replace(subject, exceptions={**subject.exceptions, **exceptions})


def parse_exceptions(texts: list[str]) -> dict[str, str]:
    """Return texts ``CHECK=reason`` as a mapping for `excepting`."""
    return {name: reason for name, _, reason in (text.partition("=") for text in texts)}
