"""The matrix of dtypes as a picture: one column per pair of frameworks, one row per dtype, for light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

__all__ = ["picture"]

_SIZE, _GAP, _LEFT, _TOP = 15, 14, 150, 92
_STYLE = """
svg { font-family: system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif; font-size: 12px; }
.ground { fill: #ffffff; } text { fill: #1f2328; } .quiet { fill: #59636e; }
.same { fill: #d1d9e0; } .shared { fill: #1a7f37; } .viewed { fill: #0969da; } .copied { fill: #d4a72c; }
.refused { fill: #ffffff; stroke: #cf222e; stroke-width: 1.2; }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117; } text { fill: #f0f6fc; } .quiet { fill: #9198a1; }
.same { fill: #3d444d; } .shared { fill: #3fb950; } .viewed { fill: #4493f8; } .copied { fill: #d29922; }
.refused { fill: #0d1117; stroke: #f85149; } }
"""


def _kind(outcome: str) -> str:
    return "refused" if outcome.endswith("Error") else outcome


def picture(cells: Mapping[tuple[str, str, str], str]) -> str:
    """Return {(framework, dtype, target): outcome} as one SVG; an outcome may be empty, or the name of an error."""
    frameworks, dtypes, targets = (list(dict.fromkeys(key[place] for key in cells)) for place in range(3))
    block = len(targets) * _SIZE + _GAP
    width, height = _LEFT + block * len(frameworks) + 10, _TOP + len(dtypes) * _SIZE + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>What becomes of each dtype</title><style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    for row, dtype in enumerate(dtypes):
        parts.append(f'<text x="{_LEFT - 8}" y="{_TOP + row * _SIZE + 11}" text-anchor="end">{escape(dtype)}</text>')
    for number, name in enumerate(frameworks):
        x = _LEFT + number * block
        parts.append(f'<text x="{x}" y="18" font-weight="600">{escape(name)} →</text>')
        for column, target in enumerate(targets):
            at = x + column * _SIZE + 11
            parts.append(
                f'<text class="quiet" transform="translate({at},{_TOP - 6}) rotate(-90)">{escape(target)}</text>'
            )
            for row, dtype in enumerate(dtypes):
                outcome = cells.get((name, dtype, target), "-")
                if outcome not in ("", "-", "?"):
                    parts.append(
                        f'<rect class="{_kind(outcome)}" x="{x + column * _SIZE + 1}" y="{_TOP + row * _SIZE + 1}" '
                        f'width="{_SIZE - 3}" height="{_SIZE - 3}" rx="2"/>'
                    )
    x, y = _LEFT, height - 24
    for kind in ("shared", "viewed", "copied", "refused", "same"):
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{_SIZE - 3}" height="{_SIZE - 3}" rx="2"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{kind}</text>')
        x += 84
    return "\n".join([*parts, "</svg>", ""])
