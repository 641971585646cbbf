"""The matrix of dtypes as a picture: one column per pair of frameworks, one row per dtype."""

from __future__ import annotations

from collections.abc import Mapping

from dlx._support.display import COLORS
from dlx._support.svg import box, legend, page, text

__all__ = ["picture"]

_SIZE, _GAP, _LEFT, _TOP = 15, 14, 150, 92
_LIGHT, _DARK = COLORS["refused"]
_REFUSED = f"#ffffff; stroke: {_LIGHT}; stroke-width: 1.2", f"#0d1117; stroke: {_DARK}"
_FILLS = {**COLORS, "refused": _REFUSED}


def picture(cells: Mapping[tuple[str, str, str], str]) -> str:
    """Return {(framework, dtype, target): outcome} as one SVG; an outcome may be empty, or the name of an error."""
    frameworks, dtypes, targets = (list(dict.fromkeys(key[i] for key in cells)) for i in range(3))
    block = len(targets) * _SIZE + _GAP
    width, height = _LEFT + block * len(frameworks) + 10, _TOP + len(dtypes) * _SIZE + 44
    parts = [text(_LEFT - 8, _TOP + row * _SIZE + 11, each, 'text-anchor="end"') for row, each in enumerate(dtypes)]
    for number, name in enumerate(frameworks):
        left = _LEFT + number * block
        parts.append(text(left, 18, f"{name} →", 'font-weight="600"'))
        for column, target in enumerate(targets):
            x = left + column * _SIZE
            parts.append(text(0, 0, target, f'class="quiet" transform="translate({x + 11},{_TOP - 6}) rotate(-90)"'))
            for row, dtype in enumerate(dtypes):
                outcome = cells.get((name, dtype, target), "-")
                if outcome not in ("", "-", "?"):
                    kind = "refused" if outcome.endswith("Error") else outcome
                    parts.append(box(x + 1, _TOP + row * _SIZE + 1, _SIZE - 3, _SIZE - 3, kind))
    parts += legend(_LEFT, height - 24, {kind: kind for kind in _FILLS})
    return page((width, height), "What becomes of each dtype", _FILLS, parts)
