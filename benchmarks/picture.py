"""A bar chart of the conversions, as SVG text: one block for each pair; floor, dlx and every peer, in nanoseconds."""

from dlx.cli.render.svg import box, legend, page, text

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
    """Return the picture of what `conversions` found."""
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
    """Give the rows of one pair; a bar far beyond the others is cut, and says so."""
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
    """Return an expression without what every call of it repeats."""
    return (
        code.replace(", ab.HOST", "")
        .replace('"numpy", "torch"', "…")
        .replace('"torch", "numpy"', "…")
        .replace("View.", "StridedMemoryView.")
        .replace("ab.", "arraybridge.")
    )
