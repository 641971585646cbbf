"""Claims of pages about errors and other libraries agree with the code and the conformance report."""

import re

import pytest
from support.project import ROOT
from support.repository.pages import blocks

HOME, TROUBLES, GRADES = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("index.md", "troubleshooting.md", "conformance.md")
)
LIBRARIES = {"torch": "torch", "np": "numpy", "jnp": "jax"}
CLAIMS = re.findall(r"^\| `(\w+)\.from_dlpack`.*\[`([\w-]+)`\]", HOME, re.MULTILINE)
SECTIONS = re.findall(r"^### (.+)\n((?:(?!^##).*\n)*)", TROUBLES, re.MULTILINE)
SOURCES = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "dlx").rglob("*.py"))


@pytest.mark.parametrize(("module", "promise"), CLAIMS)
def test_the_home_page_blames_a_library_for_what_it_breaks(module, promise):
    """docs/conformance.md has a cross for each promise in the table of the home page."""
    (row,) = re.findall(rf"^\| `{promise}` \|(.*)\|$", GRADES, re.MULTILINE)
    (header,) = {
        head
        for head, rows in re.findall(r"^(\|  \| .*promise.*)\n((?:\|.*\n)+)", GRADES, re.MULTILINE)
        if f"`{promise}`" in rows
    }
    names = [name.strip() for name in header.split("|")[2:-1]]
    assert "✗" in row.split("|")[names.index(LIBRARIES[module])]


def test_the_home_page_has_claims():
    """The pattern above matches the claims."""
    assert len(CLAIMS) == HOME.count("](conformance.md#what-a-") >= 6


@pytest.mark.parametrize(("heading", "text"), SECTIONS, ids=[heading[:40] for heading, _ in SECTIONS])
def test_each_trouble_is_headed_by_the_sentence_that_a_user_meets(heading, text):
    """Each heading is in the output of the block below it (tested by tests/docs/test_docs.py) or in the code."""
    printed = [shown for kind, _, shown in blocks(text) if kind == "python"]
    if heading == "module 'dlx' has no attribute 'convert'":  # Python's own, of another project's dlx
        return
    assert heading in (" ".join(filter(None, printed)) or SOURCES)
