"""Text for people: foreign text on one line, and numbers of bytes."""

from __future__ import annotations

__all__ = ["SHOWN", "amount", "one_line"]

SHOWN = 3
"""Number of objects that a text names before it shortens the list."""


def one_line(text: str, most: int = 400) -> str:
    """Return text on one line: control characters are escaped, and long text is truncated."""
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def amount(nbytes: int | None) -> str:
    """Return a number of bytes with a suitable unit."""
    if nbytes is None:
        return "?"
    if nbytes < 1024:
        return f"{nbytes} B"
    if nbytes >= 1 << 80:
        return "more than a million EiB"
    size, units = float(nbytes), ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while (size := size / 1024) >= 1023.95 and len(units) > 1:
        units.pop(0)
    return f"{size:,.1f} {units[0]}"
