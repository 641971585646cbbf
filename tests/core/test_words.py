"""One word a thing, and the field's own: words that this project once had for itself do not come back."""

from __future__ import annotations

import re

import pytest
from project import ROOT

# Old word -> what a reader of numpy, torch or tvm-ffi knows it as. One line a word; a word is added when it is gone.
OLD = {
    r"hindrances?": "blocker",
    r"obstacles?": "incompatibility",
    r"cures?|cured|amend\w*": "resolution, resolve",
    r"strangers?": "generic producer, unregistered type",
    r"fast lane|the lane|lane_\w+|py_lane\w*|LaneObject": "fast path",
    r"roads?": "fast path, Python path",
    r"doors?": "entry point, C interop",
    r"(?:Crossing|crossings?(?! frameworks))": "stream synchronization, conversion",
    r"moments?": "readiness event",
    r"lent|let(?:s|ting)? go of": "exported, borrowed, released",
    r"(?:gives?|given) back": "return, release, restore",
    r"(?:an?|the) sketch|sketches": "abstract tensor",
    r"noun|word_for": "display_name, native_name",
    r"DEEPEST|MOST_[A-Z]\w*": "MAX_DEPTH, MAX_...",
    r"import_keeps|take_keeps": "nothing: it is gone",
    r"\w+_lend|is_lent|Lane|_place_doc|Places(?:View|Object)?": "export, borrow; FastPathFunction; Slots",
    r"Leaf\.carried|carried|reviewed": "storage dtype, viewed as",
    r"Bulk|Passed|\bWay\b": "Batch, PassedArray, FunctionSpec",
    r"told\(": "error_line",
    r"without a word|(?:its|their) kin": "silently; similar, such as",
    r"cross(?:es|ed)?(?! the)|lend(?:s|ing)?|lend_\w+|lending": "convert; export; keep alive",
}
FOLDERS = ("dlx", "adapters", "c_src", "docs", "examples", "benchmarks")
MADE = {"docs/conformance.md", "docs/matrix.md"}  # by commands, in their own words


def pages():
    """Give every text of the project that people read or write."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".pyi", ".c", ".h", ".md"} and str(path.relative_to(ROOT)) not in MADE:
                yield path


@pytest.mark.parametrize("old", OLD)
def test_an_old_word_is_gone(old):
    """Neither code nor comments nor pages use it."""
    pattern = re.compile(rf"(?<![\w/])(?:{old})(?![\w/])")
    for path in pages():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not pattern.search(line), f"{path.relative_to(ROOT)}:{number}: say {OLD[old]}"
