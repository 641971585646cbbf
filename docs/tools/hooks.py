"""Hooks of mkdocs: pages from outside docs/, and links to them."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent.parent

# Pages of the site that are files outside docs/.
OUTSIDE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "cffi-kernel.md": "examples/cffi_kernel/README.md",
    "cpp-dot.md": "examples/cpp_dot/README.md",
    "example-plugin.md": "examples/dlx-example/README.md",
}
# Public names in the reference, and different names there.
NAMES = re.findall(r'^    "(\w+)": ', (ROOT / "dlx" / "__init__.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
PLACES = {"convert": "dlx._api.convert.convert", "open": "dlx._api.open.open", "stack": "dlx._api.stack.stack"}
# Weights in the search: pages for users come before pages about dlx itself.
BOOSTS = {
    **dict.fromkeys(("index.md", "quickstart.md", "how-to/see-copies.md", "how-to/share.md"), 3),
    **dict.fromkeys(("changelog.md", "conformance.md", "contributing.md", "design.md", "performance.md"), 0.2),
}
BARE = {"ffi", "exchange_api", "hookimpl"}  # without an entry in the reference
FENCE = re.compile(r"^(```+).*?^\1$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<![\[`])`dlx\.(\w+)(\(\))?`(?!\])")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Drop missing pages from the navigation."""
    config.nav = [
        {name: [each for each in pages if _exists(each)]} for part in config.nav for name, pages in part.items()
    ]
    return config


def _exists(entry: Any) -> bool:
    path = entry if isinstance(entry, str) else next(iter(entry.values()))
    return path in OUTSIDE or (ROOT / "docs" / path).exists()


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages from outside docs/."""
    for name, source in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Link each picture to its file, and replace the ``::`` of docstrings before code by one colon."""
    html = re.sub(r'(<img [^>]*src="([^"]+\.svg)"[^>]*>)', r'<a class="figure" href="\2" title="large">\1</a>', html)
    return re.sub(r"::</p>(?=\s*<(?:pre|div))", ":</p>", html)


def on_post_page(output: str, **_: Any) -> str:
    """Remove tooltips that show private modules."""
    return re.sub(r'\stitle="[^"]*\bdlx\._[^"]*"', "", output)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to other files of the project into links to their pages, or into text if there is no page."""
    markdown = re.sub(r"^```(python|console) gpu$", r"```\1", markdown, flags=re.MULTILINE)  # for the tests only
    uri = page.file.src_uri
    if uri in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[uri]}
    here = ROOT / OUTSIDE[uri] if uri in OUTSIDE else ROOT / "docs" / uri

    def rewrite_link(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = (here.parent / target).resolve()
        inside = next((name for name, source in OUTSIDE.items() if ROOT / source == path), None)
        if inside is None and path.is_relative_to(ROOT / "docs"):
            inside = str(path.relative_to(ROOT / "docs"))
        if inside is None:
            inside = "index.md" if path == ROOT / "README.md" else None
        if inside is None:
            return text
        return f"[{text}]({'../' * uri.count('/')}{inside}{anchor})"

    def link_name(found: re.Match[str]) -> str:
        name = found[1]
        return f"[{found[0]}][{PLACES.get(name, f'dlx.{name}')}]" if name in NAMES and name not in BARE else found[0]

    parts, end = [], 0
    for fence in [*FENCE.finditer(markdown), None]:
        prose = LINK.sub(rewrite_link, markdown[end : fence.start() if fence else None])  # code may look like a link
        parts += [re.sub(r"^(?!#).*$", lambda line: NAME.sub(link_name, line[0]), prose, flags=re.MULTILINE)]
        if fence is not None:  # a block without a language is a drawing, which must not wrap
            parts, end = [*parts, re.sub(r"^```\n", "``` {.text .drawing}\n", fence[0])], fence.end()
    return "".join(parts)
