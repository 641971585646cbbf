"""Display dlx's objects as text, as a table in notebooks, and for rich, which is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["COLORS", "Shown", "columns", "table"]

COLORS = {
    "shared": ("#1a7f37", "#3fb950"),
    "viewed": ("#0969da", "#4493f8"),
    "copied": ("#d4a72c", "#d29922"),
    "refused": ("#cf222e", "#f85149"),
    "same": ("#d1d9e0", "#3d444d"),
}
"""Colours of outcomes on light and dark backgrounds, also for pictures; "refused" is a border colour."""

# Each word sets its background, since a notebook may be light or dark.
_ON = {"shared": "#ffffff", "viewed": "#ffffff", "copied": "#1f2328", "same": "#1f2328"}
_PADDED = "display:inline-block;padding:0 .5em;border-radius:.3em;"
_PLAIN = "color:inherit;font-size:inherit;"
_LEFT = "text-align:left;vertical-align:top;"


def escape(text: str) -> str:
    """Escape a text for HTML; `html` is imported late because it is large."""
    import html

    return html.escape(text)


class Shown:
    """An object that shows its repr at an IPython prompt, and a table or its repr in notebooks."""

    __slots__ = ()

    def _table(self) -> str:
        """Return the HTML of a table; empty to show the repr."""
        return ""

    def _repr_html_(self) -> str:
        return self._table() or f"<pre>{escape(repr(self))}</pre>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("..." if cycle else repr(self))

    def __rich_repr__(self) -> Iterator[Any]:
        yield str(self)


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return rows of cells as lines of aligned text, without empty columns."""
    rows = list(zip(*filter(any, zip(*rows, strict=True)), strict=True))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [f"{indent}{line}".rstrip() for line in aligned]


def table(caption: str, names: Sequence[str], rows: Iterable[Sequence[str]], below: Iterable[str] = ()) -> str:
    """Return an HTML table without empty columns, between a caption and lines below; all text is escaped.

    A column named outcome is coloured.
    """
    rows = list(rows)
    used = [i for i in range(len(names)) if any(row[i] for row in rows)]
    names, rows = [names[i] for i in used], [[row[i] for i in used] for row in rows]
    outcome = names.index("outcome") if "outcome" in names else -1
    parts = [f"<div>{escape(caption)}</div>"] if caption else []
    heads = "".join(f"<th style={_LEFT!r}>{escape(name)}</th>" for name in names)
    if rows:
        parts.append(f"<table style={_PLAIN!r}>{f'<tr>{heads}</tr>' if any(names) else ''}")
        for row in rows:
            cells = (_word(cell) if i == outcome else escape(cell) for i, cell in enumerate(row))
            parts.append(f"<tr>{''.join(f'<td style={_LEFT!r}>{cell}</td>' for cell in cells)}</tr>")
        parts.append("</table>")
    parts += [f"<div>{escape(line)}</div>" for line in below]
    return "".join(parts)


def _word(outcome: str) -> str:
    kind = "copied" if outcome == "moved" else outcome
    style = "border:1px solid currentColor;"
    if kind in COLORS:
        light = COLORS[kind][0]
        style = f"background:#ffffff;color:{light};border:1px solid {light};"
        if kind in _ON:
            style = f"background:{light};color:{_ON[kind]};"
    return f"<span style={_PADDED + style!r}>{escape(outcome)}</span>"
