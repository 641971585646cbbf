"""Words that this project once had for itself do not come back; it uses the field's words."""

from __future__ import annotations

import functools
import re

import pytest
from support.project import ROOT

# Old word -> the word of numpy, torch or tvm-ffi. Add a word when it is gone from the project.
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
FOLDERS = ("dlx", "dlx_adapters", "c_src", "docs", "examples", "benchmarks")
MADE = {"docs/conformance.md", "docs/matrix.md"}  # generated


@functools.cache
def pages():
    """Return every text of the project for readers and writers, {name: text}."""
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    for folder in FOLDERS:
        found = (ROOT / folder).rglob("*")
        paths += sorted(path for path in found if path.suffix in {".py", ".pyi", ".c", ".h", ".md"})
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    return {name: text for name, text in texts.items() if name not in MADE}


@pytest.mark.parametrize("old", OLD)
def test_an_old_word_is_gone(old):
    """Neither code nor comments nor pages use it."""
    pattern = re.compile(rf"(?<![\w/])(?:{old})(?![\w/])")
    for name, text in pages().items():
        for found in pattern.finditer(text):
            raise AssertionError(f"{name}:{text.count(chr(10), 0, found.start()) + 1}: say {OLD[old]}")
