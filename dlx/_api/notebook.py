"""Completion in IPython: of targets, ``dlx.convert(x, to="``, and of the modules of dlx, ``dlx.errors.``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["complete_targets", "install"]

# A call may span lines: an unfinished one ends in a comma or an open bracket.
_CALL = re.compile(
    r"""\b(?:convert|plan|stack|open|attach|parts)\((?:(?:[^\n]|(?<=[,(\[{])\n)*[,\n])?\s*to\s*=\s*["'](?P<start>\w*)$"""
    r"""|\busing\(\s*(?:to\s*=\s*)?["'](?P<first>\w*)$"""
)


def install(settle: Callable[[], None]) -> None:
    """Add the completion to the running IPython, if any.

    `settle` makes dlx an ordinary module: IPython does not complete attributes of modules with a `__getattr__`.
    """
    shell = sys.modules["IPython"].get_ipython()
    completer: Any = sys.modules.get("IPython.core.completer")
    matchers = getattr(getattr(shell, "Completer", None), "custom_matchers", None)
    if not hasattr(completer, "context_matcher") or not isinstance(matchers, list):
        return

    @completer.context_matcher(identifier="dlx.targets")  # type: ignore[untyped-decorator]
    def match_targets(context: Any) -> Any:
        settle()
        lines = context.full_text.split("\n")[: context.cursor_line]
        names = complete_targets("\n".join([*lines, context.text_until_cursor]))
        found = [completer.SimpleCompletion(text=name, type="param") for name in names]
        return {"completions": found, "suppress": bool(found)}

    matchers.append(match_targets)


def complete_targets(text: str) -> list[str]:
    """Return the targets that complete the text before the cursor; no framework is imported."""
    call = _CALL.search(text)
    if call is None:
        return []
    from dlx._registry.listing import adapters, can_be_target

    start = call["start"] or call["first"] or ""
    return [name for name, adapter in adapters().items() if name.startswith(start) and can_be_target(adapter)]
