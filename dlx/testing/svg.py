"""The report as a picture: a row for each promise, a column for each library, for light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dlx.testing.report import ABOUT, Grades, ordered

__all__ = ["picture"]

_SIZE, _LEFT, _TOP, _WIDE = 17, 190, 136, 24
_STYLE = """
svg { font-family: system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif; font-size: 12px; }
.ground { fill: #ffffff; } text { fill: #1f2328; } .quiet { fill: #59636e; }
.keeps { fill: #aceebb; } .na { fill: #eaeef2; } .fatal { fill: #a40e26; } .wrong { fill: #e5534b; }
.refuses { fill: #d4a72c; } .friction { fill: #f2d98a; }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117; } text { fill: #f0f6fc; } .quiet { fill: #9198a1; }
.keeps { fill: #1f6f34; } .na { fill: #21262d; } .fatal { fill: #ff4d43; stroke: #ffd8d3; } .wrong { fill: #a8322c; }
.refuses { fill: #d29922; } .friction { fill: #8a6d1d; } }
"""


def picture(grades: Sequence[Grades]) -> str:
    """Return which library breaks which promise as one SVG; colours say what a broken one costs."""
    checks = [check for check in ordered(grades) if check.kind != "adapter"]
    columns = [[check for check in checks if check.kind == kind] for kind in ("producer", "consumer")]
    columns = [column for column in columns if column]
    block = _LEFT + _WIDE * len(grades) + 86  # the last name leans over
    rows = max((len(column) + len({check.about for check in column}) for column in columns), default=0)
    width, height = block * len(columns) + 10, _TOP + rows * _SIZE + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>Which library breaks which promise</title><style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    for number, column in enumerate(columns):
        left = number * block + _LEFT
        parts.append(f'<text x="{number * block + 12}" y="22" font-weight="600">as a {column[0].kind}</text>')
        for i, each in enumerate(grades):
            at = f"translate({left + i * _WIDE + 16},{_TOP - 8}) rotate(-55)"
            parts.append(f'<text transform="{at}">{escape(each.title[:22])}</text>')
        y = _TOP
        for about in ABOUT:
            inside = [check for check in column if check.about == about]
            if not inside:
                continue
            parts.append(f'<text class="quiet" x="{number * block + 12}" y="{y + 12}">{about}</text>')
            y += _SIZE
            for check in inside:
                parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(check.name)}</text>')
                for i, each in enumerate(grades):
                    verdict = each.of(check.name)
                    if verdict is None:
                        continue
                    kind = {"breaks": check.severity, "excepted": check.severity, "keeps": "keeps"}
                    parts.append(
                        f'<rect class="{kind.get(verdict.status, "na")}" x="{left + i * _WIDE + 2}" y="{y + 1}" '
                        f'width="{_WIDE - 4}" height="{_SIZE - 3}" rx="2"><title>'
                        f"{escape(f'{each.title}, {check.name}: {verdict.status}')}</title></rect>"
                    )
                y += _SIZE
    x, y = 12, height - 26
    legend = {
        "keeps": "kept", "fatal": "broken: fatal", "wrong": "broken: wrong", "refuses": "broken: refuses",
        "friction": "broken: friction", "na": "not applicable",
    }  # fmt: skip
    for mark, text in legend.items():
        parts.append(f'<rect class="{mark}" x="{x}" y="{y}" width="14" height="12" rx="2"/>')
        parts.append(f'<text x="{x + 19}" y="{y + 10}">{text}</text>')
        x += 34 + 7 * len(text)
    return "\n".join([*parts, "</svg>", ""])
