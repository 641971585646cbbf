"""SVG pages, boxes, texts and legends for dlx's pictures, in light and dark style."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

__all__ = ["box", "legend", "page", "text"]

_STYLE = """
svg {{ font-family: system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif; font-size: 12px; }}
.ground {{ fill: #ffffff; }} svg {{ background: #ffffff; }} text {{ fill: #1f2328; }} .quiet {{ fill: #59636e; }}
{light} {more}
@media (prefers-color-scheme: dark) {{
.ground {{ fill: #0d1117; }} svg {{ background: #0d1117; }} text {{ fill: #f0f6fc; }} .quiet {{ fill: #9198a1; }}
{dark} }}
"""


def page(
    size: tuple[int, int], title: str, fills: Mapping[str, tuple[str, str]], parts: Iterable[str], more: str = ""
) -> str:
    """Return a picture of (width, height) pixels.

    `fills` maps a class to its light and dark colours, each with optional declarations after a semicolon; `more` has
    additional CSS rules.
    """
    light, dark = ("\n".join(f".{kind} {{ fill: {both[i]}; }}" for kind, both in fills.items()) for i in (0, 1))
    width, height = size
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{escape(title)}</title><style>{_STYLE.format(light=light, dark=dark, more=more)}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def box(x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> str:
    """Return a box of a class of `fills`, with an optional tooltip."""
    shape = f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" rx="2"'
    return f"{shape}><title>{escape(hint)}</title></rect>" if hint else f"{shape}/>"


def text(x: float, y: float, words: str, attributes: str = "") -> str:
    """Return a text element with additional attributes."""
    return f'<text x="{x:.0f}" y="{y:.0f}" {attributes}>{escape(words)}</text>'


def legend(x: float, y: float, meanings: Mapping[str, str]) -> list[str]:
    """Return a line of boxes, each with the meaning of its class."""
    parts = []
    for kind, meaning in meanings.items():
        parts += [box(x, y, 12, 12, kind), text(x + 18, y + 10, meaning)]
        x += 40 + 7 * len(meaning)
    return parts
