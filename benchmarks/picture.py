"""Pictures of the results, as SVG text.

A bar chart of the conversions has a block for each pair, with floor, dlx and every peer in nanoseconds. A heat map of
every pair on the host shows the ratio to the best way by hand.
"""

from benchmarks.pairs import rows, summary, targets
from dlx._support.svg import box, legend, page, text

LEFT, WIDTH, RIGHT = 320, 400, 110  # of names, of the longest bar, of its figure
BAR, ROW, HEAD, GAP, TOP = 16, 24, 30, 14, 70
STYLE = """
svg { font-size: 13px; } .title { font-size: 17px; font-weight: 600; } .pair { font-size: 14px; font-weight: 600; }
.code { font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, monospace; font-size: 12px; }"""
FILLS = {
    "floor": ("#8c959f", "#656c76"),
    "dlx": ("#0969da", "#4493f8"),
    "own": ("#80b3f0", "#2b5c9e"),
    "peer": ("#d4a72c", "#bb8009"),
    "axis": ("#d0d7de", "#3d444d"),
}
KINDS = {
    "floor": "floor: the same calls and guards in C",
    "dlx": "dlx.convert",
    "own": "others on a dlx.Tensor",
    "peer": "peers",
}
ABOUT = "float32 (2, 3) on the CPU, memory shared; minimum, release of the result included. Shorter is better."


def draw(found):
    """Return the picture of `conversions`."""
    cases = [case for case in found["conversions"]["cases"] if case["kind"] != "bare"]
    pairs = list(dict.fromkeys(case["pair"] for case in cases))
    parts = [text(20, 30, "Nanoseconds per conversion", 'class="title"'), *legend(20, 43, KINDS)]
    y = TOP
    for pair in pairs:
        mine = [case for case in cases if case["pair"] == pair]
        y += GAP
        parts.append(text(20, y + 18, pair, 'class="pair"'))
        parts.append(box(LEFT, y + HEAD - 4, 1, ROW * len(mine) + 4, "axis"))
        parts += _bars(mine, y + HEAD)
        y += HEAD + ROW * len(mine)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts.append(text(20, y + 22, ABOUT, 'class="quiet" style="font-size:11px"'))
    title = f"Nanoseconds per conversion, dlx and its peers: {versions}"
    return page((LEFT + WIDTH + RIGHT, y + 34), title, FILLS, parts, STYLE)


def _bars(cases, y):
    """Yield the rows of one pair; a bar far beyond the others is cut, with a mark."""
    ours = next((case["ns"] for case in cases if case["kind"] == "dlx"), cases[0]["ns"])
    longest = min(max(case["ns"] for case in cases), 5 * ours)
    for case in cases:
        length = min(case["ns"] / longest, 1.0) * WIDTH
        floor = case["kind"] == "floor"
        label, kind = ("floor in C", "quiet") if floor else (_short(case["code"]), "code")
        yield text(LEFT - 10, y + 13, label, f'class="{kind}" text-anchor="end"')
        yield box(LEFT, y + 1, length, BAR, case["kind"])
        if case["ns"] > longest:  # a break in the bar
            yield f'<path class="ground" d="M{LEFT + length - 30} {y - 1}h6l-8 {BAR + 4}h-6z"/>'
        times = "" if case["kind"] == "dlx" else f" ({case['ns'] / ours:.1f} x)"
        yield text(LEFT + length + 8, y + 13, f"{case['ns']:.0f}{times}")
        y += ROW


def _short(code):
    """Return an expression without the arguments that every call repeats."""
    return (
        code.replace(", ab.HOST", "")
        .replace('"numpy", "torch"', "…")
        .replace('"torch", "numpy"', "…")
        .replace("View.", "StridedMemoryView.")
        .replace("ab.", "arraybridge.")
    )


CELL, LINE = 84, 24  # width and height of a cell
HEAT = {  # upper limit of the ratio; fills; meaning
    "half": (0.5, ("#3fb950", "#116329"), "at most 0.5"),
    "even": (1.0, ("#aceebb", "#238636"), "at most 1.0: as fast as by hand, or faster"),
    "near": (1.5, ("#eac54f", "#9e6a03"), "at most 1.5"),
    "slow": (2.0, ("#fb8f44", "#bd561d"), "at most 2.0"),
    "worse": (float("inf"), ("#fa4549", "#da3633"), "more"),
}


def heat_map(found):
    """Return the heat map of `pairs`."""
    mean, worst, words = summary(found["pairs"])
    parts = [
        text(20, 30, "Every pair on the host: time of dlx over the best way by hand", 'class="title"'),
        *legend(20, 43, {kind: meaning for kind, (_, _, meaning) in HEAT.items()}),
    ]
    left, y = 160, TOP + LINE
    parts += [
        text(left + CELL * (i + 0.5), y - 8, to, 'text-anchor="middle"') for i, to in enumerate(targets(found["pairs"]))
    ]
    for name, row in rows(found["pairs"]):
        parts.append(text(left - 10, y + 16, name, 'text-anchor="end"'))
        for i, to in enumerate(targets(found["pairs"])):
            if to in row:
                parts += _cell(left + CELL * i, y, row[to])
        y += LINE
    summary_text = f"Geometric mean {mean:.2f}, worst {worst['ratio']:.2f}. {words}."
    parts.append(text(20, y + 22, summary_text, 'class="quiet" style="font-size:11px"'))
    fills = {kind: both for kind, (_, both, _) in HEAT.items()}
    title = "Every pair of frameworks on the host: time of dlx over the best way by hand"
    return page((max(left + CELL * len(targets(found["pairs"])) + 20, 860), y + 36), title, fills, parts, STYLE)


def _cell(x, y, pair):
    kind = next(kind for kind, (most, _, _) in HEAT.items() if pair["ratio"] <= most)
    hint = f"{pair['ours']:.0f} ns vs. {pair['theirs']:.0f} ns of {pair['by_hand']}"
    yield box(x + 1, y + 1, CELL - 2, LINE - 2, kind, hint)
    yield text(x + CELL / 2, y + 16, f"{pair['ratio']:.2f}", 'text-anchor="middle"')
