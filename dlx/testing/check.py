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
"""Process death or unsafe memory · wrong data or rights, silently · refusal of what should work · the rest."""

WORDS = (
    "imports", "take", "array", "grid", "reshape", "unfit", "pending", "pending_bytes", "readonly", "argument", "write",
)  # fmt: skip
"""Placeholders of reproductions, which a subject's `words` fill."""


@set_module("dlx.testing")
@dataclass(frozen=True)
class Check:
    """One promise, and how a subject is held to it.

    Attributes
    ----------
    name
        The word for `--only` and for declared exceptions.
    promise
        One sentence: what a library that keeps it does.
    kind
        Who makes it: ``"producer"``, ``"consumer"`` or ``"adapter"``.
    about
        Its row of the table at a glance.
    severity
        The cost of breaking it: ``"fatal"``, ``"wrong"``, ``"refuses"`` or ``"friction"``.
    function
        ``function(subject)`` raises `Broken` or `NotApplicable`, or returns; a text that it returns is a remark. Any
        other exception is a fault of the kit.
    alone
        Whether it runs in its own process, which must end well too: it may kill the process, or is about its end.
    shows
        Code of at most ten lines that fails if the promise is broken, with the subject's words in braces.
    see
        Where the promise comes from.
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
            broken = Broken, NotACapsule, *([DlxError] if self.kind == "adapter" else [])  # a conversion by it failed
            if not isinstance(error, broken):
                return Verdict(self.name, subject.name, "error", f"{traceback.format_exc()}{_last_tried(error)}")
            tried = _last_tried(error) if self.kind == "adapter" else ""
            verdict = Verdict(self.name, subject.name, "breaks", f"{error}{tried}")
        return verdict.under(subject, self)

    def reproduction(self, subject: Subject) -> str:
        """Return stand-alone code that fails where the subject breaks the promise."""
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
            return f"{self.name}: the kit failed, which says nothing of {subject.name}\n{verdict.seen}"
        return f"{self.promise}\n{verdict.seen}\n\n{self.reproduction(subject)}"


def _last_tried(error: Exception) -> str:
    """Return the innermost array in the kit's frames of an error."""
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
        ``"keeps"``, ``"breaks"``, ``"n/a"``, ``"excepted"`` (broken, and declared so with a reason) or ``"error"`` (the
        kit failed).
    seen
        What was seen, or why it is not applicable.
    reason
        The declared one.
    """

    check: str
    subject: str
    status: str
    seen: str = ""
    reason: str = ""

    def under(self, subject: Subject, check: Check) -> Verdict:
        """Apply the subject's declared exceptions; one that is not needed any more breaks."""
        reason = subject.exceptions.get(check.name, "")
        if not reason:
            return self
        if self.status == "breaks":
            return replace(self, status="excepted", reason=reason)
        if self.status == "keeps":
            text = f"the declared exception ({reason}) is not needed any more: remove it"
            return replace(self, status="breaks", seen=text, reason=reason)
        return self


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order of the report."""


def check(
    kind: str, about: str, severity: str, *, alone: bool = False, see: str = "", name: str = ""
) -> Callable[[Callable[[Subject], str | None]], Check]:
    """Register a function as a check: its docstring is the promise, and below it the code that shows a fault."""
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
    """Return code behind its imports; where a line marked `# or raises` raises, it ends well."""
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
    """Return a subject with further declared exceptions, ``{name of the check: reason}``.

    Raises
    ------
    ValueError
        If there is no such check, or no reason.
    """
    unknown = exceptions.keys() - CHECKS.keys()
    if unknown:
        raise ValueError(f"there is no check {', '.join(sorted(unknown))}. `--list` shows all names.")
    return replace(subject, exceptions={**subject.exceptions, **exceptions})


def declared(texts: list[str]) -> dict[str, str]:
    """Return ``CHECK=reason`` texts as a mapping for `excepting`."""
    return {name: reason for name, _, reason in (text.partition("=") for text in texts)}
