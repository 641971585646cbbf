"""The site of `make docs`: complete, usable without a network, and equal to the pages and the code."""

import html
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository.pages import PAGES, ROOT, blocks, navigation

pytestmark = pytest.mark.slow  # these tests build the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the site, built by the environment of `make docs`, or by this one if it has mkdocs."""
    python = ROOT / ".venv-docs" / "bin" / "python"
    if not python.exists():
        if importlib.util.find_spec("mkdocs") is None:
            pytest.skip("mkdocs is not installed; `make docs` installs it in .venv-docs")
        python = Path(sys.executable)
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [str(python), "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_is_whole_and_needs_no_network(site):
    """The build has no warning; local links, anchors and pictures exist; nothing is loaded from elsewhere."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert len(pages) >= len(PAGES) - 2
    ids = {page: {*re.findall(r'\bid="([^"]+)"', text)} for page, text in pages.items()}
    for page, text in pages.items():
        for tag, target in re.findall(r'<(a|img|script|link)\b[^>]*?\b(?:href|src)="([^"]*)"', text):
            if "://" in target or target.startswith(("mailto:", "data:", "javascript:")):
                assert tag == "a" or 'rel="canonical"' in text, f"{page.name} loads {target}"
                continue
            if page.name == "404.html":
                continue  # its links start at the root of a server
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            found = found / "index.html" if found.is_dir() else found
            assert found.exists(), f"{page.name}: there is no {target}"
            if anchor and found in ids and anchor != "__skip":
                assert anchor in ids[found], f"{page.name}: there is no {target}"


def test_the_site_shows_code_as_it_stands(site):
    """Each block of code is unchanged: no part becomes a link or a name."""
    hooks = (ROOT / "docs" / "tools" / "hooks.py").read_text(encoding="utf-8")
    outside = re.findall(r'"([\w-]+\.md)": "([\w./-]+\.md)"', hooks)
    source = {name: ROOT / path for name, path in outside}
    seen = 0
    for name in navigation():
        page = source.get(name, ROOT / "docs" / name)
        built = (site / name).with_suffix(".html").read_text(encoding="utf-8")
        shown = html.unescape(re.sub(r"<[^>]*>", "", built))
        for _, code, _ in blocks(page.read_text(encoding="utf-8")):
            assert code.strip() in shown, f"{name}: {code}"
            seen += 1
    assert len(outside) == 6 and seen > 100


def test_the_reference_has_every_public_name(site):
    """Each name in `dlx.__all__` is in the reference, with its docstring."""
    import dlx

    text = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    for name in {*dlx.__all__} - {"__version__"}:
        assert re.search(rf">(?:\s|<[^>]*>)*dlx\.{name}\b", text), name


def test_the_reference_names_no_module_that_nobody_imports_from(site):
    """Private module paths appear only in addresses within a page, not in headings or tooltips."""
    for page in (site / "reference").glob("*.html"):
        text = re.sub(r'\b(?:id|href|for|class|name)="[^"]*"', "", page.read_text(encoding="utf-8"))
        assert re.findall(r"\bdlx\._\w+[^<]{0,40}", text) == [], page.name


def test_the_reference_gives_each_parameter_its_own_default(site):
    """Parameters that share a docstring line have their own defaults, and no markup of the docstring is left."""
    import dlx

    for call in ("convert", "plan", "stack", "open", "using", "share", "attach"):
        text = (site / "reference" / f"{call}.html").read_text(encoding="utf-8")
        shown = html.unescape(re.sub(r"<[^>]*>", " ", text))
        for name, each in inspect.signature(getattr(dlx, call)).parameters.items():
            if each.default is not each.empty:
                default = re.escape(repr(each.default))
                found = re.findall(rf"\b{name}\s+\([^()]*default:\s+{default}\s+\)", shown)
                assert len(found) == 1, (call, name, default)
    for page in (site / "reference").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "::</p>" not in text, page.name
        assert "<blockquote" not in text, f"{page.name}: an example is taken for a quotation"
