"""A bar chart of the conversions, as SVG text: one block for each pair; floor, dlx and every peer, in nanoseconds."""

from xml.sax.saxutils import escape

LEFT, WIDTH, RIGHT = 320, 400, 110  # of names, of the longest bar, of its figure
BAR, ROW, HEAD, GAP, TOP = 16, 24, 30, 14, 70
# The card brings its own background, so that it can be read on any page.
STYLE = """
svg { font-family: system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif; font-size: 13px; }
.card { fill: #ffffff; stroke: #d0d7de; } text { fill: #1f2328; } .quiet { fill: #59636e; }
.title { font-size: 17px; font-weight: 600; } .pair { font-size: 14px; font-weight: 600; }
.code { font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, monospace; font-size: 12px; }
.floor { fill: #8c959f; } .dlx { fill: #0969da; } .own { fill: #80b3f0; }
.peer { fill: #d4a72c; } .axis { stroke: #d0d7de; }
@media (prefers-color-scheme: dark) {
  .card { fill: #0d1117; stroke: #3d444d; } text { fill: #f0f6fc; } .quiet { fill: #9198a1; }
  .floor { fill: #656c76; } .dlx { fill: #4493f8; } .own { fill: #2b5c9e; }
  .peer { fill: #bb8009; } .axis { stroke: #3d444d; }
}
"""
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
    height = TOP + sum(HEAD + GAP + ROW * sum(case["pair"] == pair for case in cases) for pair in pairs) + 34
    width = LEFT + WIDTH + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="Nanoseconds per conversion, dlx and its peers">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        _text(20, 30, "Nanoseconds per conversion", "title"),
    ]
    x = 20.0
    for kind, name in KINDS.items():
        parts += [f'<rect class="{kind}" x="{x:.0f}" y="43" width="12" height="12" rx="2"/>']
        parts += [_text(x + 18, 54, name, "quiet")]
        x += 44 + 7.0 * len(name)
    y = TOP
    for pair in pairs:
        mine = [case for case in cases if case["pair"] == pair]
        y += GAP
        parts.append(_text(20, y + 18, pair, "pair"))
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{y + HEAD - 4}" y2="{y + HEAD + ROW * len(mine)}"/>'
        )
        parts += _bars(mine, y + HEAD)
        y += HEAD + ROW * len(mine)
    versions = ", ".join(f"{name} {text}" for name, text in found["versions"].items())
    parts += [_text(20, y + 22, f"{ABOUT}", "quiet", size=11), f"<desc>{escape(versions)}</desc>", "</svg>"]
    return "\n".join(parts) + "\n"


def _bars(cases, y):
    """Give the rows of one pair; a bar far beyond the others is cut, and says so."""
    ours = next((case["ns"] for case in cases if case["kind"] == "dlx"), cases[0]["ns"])
    longest = min(max(case["ns"] for case in cases), 5 * ours)
    for case in cases:
        length = min(case["ns"] / longest, 1.0) * WIDTH
        cut = case["ns"] > longest
        label = "floor in C" if case["kind"] == "floor" else _short(case["code"])
        yield _text(LEFT - 10, y + 13, label, "quiet" if case["kind"] == "floor" else "code", anchor="end")
        yield f'<rect class="{case["kind"]}" x="{LEFT}" y="{y + 1}" width="{length:.1f}" height="{BAR}" rx="2"/>'
        if cut:  # a break in the bar
            at = LEFT + length - 30
            yield f'<path class="card" style="stroke:none" d="M{at} {y - 1}h6l-8 {BAR + 4}h-6z"/>'
        times = "" if case["kind"] == "dlx" else f" ({case['ns'] / ours:.1f} x)"
        yield _text(LEFT + length + 8, y + 13, f"{case['ns']:.0f}{times}", "")
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


def _text(x, y, text, kind, *, anchor="start", size=None):
    style = f' style="font-size:{size}px"' if size else ""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
