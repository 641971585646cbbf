"""Hooks of mkdocs: pages from outside docs/, links to them and to the source, bars, the version."""

import html
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
    **dict.fromkeys(("reference/convert.md", "install.md", "how-to/threads.md", "how-to/streams.md"), 3),
    **dict.fromkeys(("cookbook/jax-torch.md", "files.md"), 2),
    **dict.fromkeys(("troubleshooting.md", "write-an-adapter.md", "cookbook/pandas-polars.md"), 1.5),
    "how-to/dtype-and-memory.md": 1.5,
    **dict.fromkeys(("reference/adapters.md", "reference/ctypes.md", "matrix.md", "performance.md"), 0.4),
    **dict.fromkeys(("changelog.md", "conformance.md", "contributing.md", "design.md"), 0.2),
}
WIDE = {"matrix.md", "conformance.md"}  # pages whose figures and tables need the place of their contents
BARE = {"ffi", "exchange_api", "hookimpl"}  # without an entry in the reference
VERSION = re.findall(r'__version__ = "(.+)"', (ROOT / "dlx" / "_version.py").read_text(encoding="utf-8"))[0]
FENCE = re.compile(r"^(```+).*?^\1$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<![\[`])`dlx\.(\w+)(\(\))?`(?!\])")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Drop missing pages from the navigation, and add the version to the footer."""
    config.nav = _existing(config.nav)
    config.copyright = f"dlx {VERSION} · {config.copyright}"
    return config


def _existing(entries: list[Any]) -> list[Any]:
    """Return the entries of a navigation whose pages exist."""
    kept: list[Any] = []
    for entry in entries:
        name, value = ("", entry) if isinstance(entry, str) else next(iter(entry.items()))
        if isinstance(value, list):
            kept.append({name: _existing(value)})
        elif value in OUTSIDE or (ROOT / "docs" / value).exists():
            kept.append(entry)
    return kept


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
    """Remove tooltips that show private modules, and show the version next to the name."""
    output = re.sub(r'\stitle="[^"]*\bdlx\._[^"]*"', "", output)
    return re.sub(r'(<span class="md-ellipsis">\s*dlx)(?=\s*</span>)', rf"\1 <small>{VERSION}</small>", output, count=1)


def find_source(name: str) -> tuple[str, int] | None:
    """Return the file and the line of a documented name, such as ``dlx._api.convert.convert`` or ``dlx.plan``."""
    module, _, word = name.rpartition(".")
    if module == "dlx":
        names = (ROOT / "dlx" / "__init__.py").read_text(encoding="utf-8")
        found = re.search(rf'^    "([\w.]*)": \(.*"{word}"', names, flags=re.MULTILINE)
        module = f"dlx.{found[1]}" if found else module
    for path in (module.replace(".", "/") + ".py", name.replace(".", "/") + ".py"):
        if (ROOT / path).exists():
            text = (ROOT / path).read_text(encoding="utf-8")
            start = re.search(rf"^(?:class|def) {word}\b", text, flags=re.MULTILINE)
            return path, text.count("\n", 0, start.start()) + 1 if start else 1
    return None


def link_source(markdown: str, repository: str | None) -> str:
    """Return the last line of a reference page: the file of its first name, linked if there is a repository."""
    first = re.search(r"^::: ([\w.]+)$", markdown, flags=re.MULTILINE)
    found = find_source(first[1]) if first else None
    if found is None:
        return ""
    path, line = found
    where = f"`{path}`, line {line}" if line > 1 else f"`{path}`"
    link = f"[{where}]({repository.rstrip('/')}/blob/main/{path}#L{line})" if repository else where
    return f"\n\nSource: {link}\n{{ .source }}\n"


def draw_bars(pairs: str) -> str:
    """Return bars as HTML, from the figures of docs/performance.md: nanoseconds of dlx and by hand for each pair."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+ → \S+) \| (\d+) \| `([^`]+)` \| (\d+) \|", text, flags=re.MULTILINE)
    parts = []
    for pair in pairs.split(", "):
        target = pair.rpartition(" ")[2]
        mine = [(f'dlx.convert(x, to="{target}")', int(ours)) for name, ours, _, _ in rows if name == pair][:1]
        bars = mine + [(code, int(theirs)) for name, _, code, theirs in rows if name == pair]
        longest = max(time for _, time in bars)
        parts += [f'<figure class="bars"><figcaption>{pair}</figcaption>']
        parts += [
            f'<p><code>{html.escape(code)}</code> <span>{time} ns</span><i style="width: {time / longest:.0%}"></i></p>'
            for code, time in bars
        ]
        parts.append("</figure>")
    return f'<div class="charts">{"".join(parts)}</div>'


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Turn links to other files of the project into links to their pages, or into text if there is no page."""
    markdown = re.sub(r"^```(python|console) gpu$", r"```\1", markdown, flags=re.MULTILINE)  # for the tests only
    markdown = re.sub(r"^<!-- bars: (.*) -->$", lambda found: draw_bars(found[1]), markdown, flags=re.MULTILINE)
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        markdown += link_source(markdown, config.repo_url)
    if uri in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[uri]}
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
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
        if fence is not None:
            parts, end = [*parts, fence[0]], fence.end()
    return "".join(parts)
