"""The site as a browser shows it: ``make docs`` runs this over what it has built.

Each page is opened by a headless Chromium, wide and narrow, light and dark. It must not be wider than the window, cut a
block of output, lack a picture, or write an error to the console; the search must find what pages say. Where there is
no Chromium, a sentence says so, and nothing is checked. ``--screenshots FOLDER`` writes a picture of each page and way.
"""

import argparse
import functools
import http.server
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# A site of files needs nothing from elsewhere, and the browser shall not look for it.
ARGUMENTS = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
RESULT = ".md-search-result"
WIDTHS = {"wide": 1280, "narrow": 390}
SCHEMES = ("light", "dark")
WAYS = [("wide", "light"), ("narrow", "dark")]  # each width and each palette once; pictures are of all four
# What people type, and the page that the search shows first.
SEARCHES = {
    "pandas": "cookbook/pandas-polars.html",
    "polars": "cookbook/pandas-polars.html",
    "DataLoader": "cookbook/dataloader.html",
    "safetensors": "cookbook/hugging-face.html",
    "opencv": "cookbook/images.html",
    "jax": "cookbook/jax-torch.html",
    "numpy to torch": "index.html",
    "did that copy": "how-to/see-copies.html",
    "zero copy": "how-to/see-copies.html",
    "read-only": "how-to/read-only.html",
    "CUDA stream": "how-to/streams.html",
    "pickle": "how-to/distributed.html",
    "multiprocessing": "how-to/share.html",
    "shared memory": "how-to/share.html",
    "dict of arrays": "how-to/trees-and-views.html",
    "mypy": "how-to/types.html",
    "bfloat16": "quickstart.html",
    "BufferError": "quickstart.html",
    "CopyRequiredError": "reference/errors.html",
    "requires_grad": "troubleshooting.html",
}

# What is wrong with a page as it is laid out now. A part may be wider than the window if it can be scrolled, but output
# and errors are read, not scrolled.
LOOK = """() => {
    const wrong = [], root = document.documentElement;
    if (root.scrollWidth > root.clientWidth) {
        const inside = part => part.closest('.md-typeset__scrollwrap, pre > code, .md-sidebar, .md-nav, .md-search');
        const parts = [...document.querySelectorAll('main *')];
        const found = parts.find(part => !inside(part) && part.getBoundingClientRect().right > root.clientWidth + 1);
        const at = found ? ` at ${found.outerHTML.slice(0, 90)}` : '';
        wrong.push(`is ${root.scrollWidth - root.clientWidth} pixels too wide${at}`);
    }
    for (const code of document.querySelectorAll('.language-text:not(.drawing) pre > code'))
        if (code.scrollWidth > code.clientWidth + 1) wrong.push(`cuts the output ${code.innerText.slice(0, 60)}`);
    for (const image of document.images)
        if (image.complete && !image.naturalWidth) wrong.push(`lacks the picture ${image.src}`);
    return wrong;
}"""


def browser_path() -> str | None:
    """Give the Chromium of this machine, ``CHROMIUM`` first, or None."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *BROWSERS))), None)


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; give the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing: what is missing is found by the page's console."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def check_page(page: Any, address: str, name: str, picture: Path | None) -> Iterator[str]:
    """Open a page and give what is wrong with it."""
    faults: list[str] = []
    listeners = {
        "console": lambda message: faults.append(f"logs {message.text}") if message.type == "error" else None,
        "pageerror": lambda error: faults.append(f"raises {error}"),
        "requestfailed": lambda request: faults.append(f"does not get {request.url}"),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    try:
        page.goto(address + name, wait_until="load")
        page.evaluate("() => { for (const image of document.images) image.loading = 'eager' }")
        page.wait_for_function("() => [...document.images].every(image => image.complete)")
        faults += page.evaluate(LOOK)
        if picture:
            page.screenshot(path=picture, full_page=True)
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    yield from (f"{name}: {each}" for each in dict.fromkeys(faults))


def check_search(page: Any, address: str, words: str, expected: str) -> Iterator[str]:
    """Search as a reader would; say so where another page comes first than is expected."""
    page.goto(address + "index.html")
    page.fill("input[name=query]", words)
    try:
        page.wait_for_function(f"() => /match/.test(document.querySelector('{RESULT}__meta').innerText)")
        found = page.get_attribute(f"{RESULT}__item a", "href", timeout=5_000)
    except Exception as error:
        yield f"the search does not find {words}: {str(error).splitlines()[0]}"
        return
    if not found.partition("?")[0].endswith(expected):
        yield f"the search for {words} shows {found}, not {expected}"


def check(
    site: Path, executable: str, *, searches: Mapping[str, str] | None = None, screenshots: Path | None = None
) -> list[str]:
    """Give what is wrong with a site, in sentences."""
    from playwright.sync_api import sync_playwright

    names = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    with serve(site) as address, sync_playwright() as playwright:
        options = {"executable_path": executable, "args": ARGUMENTS, "chromium_sandbox": os.geteuid() != 0}
        browser = playwright.chromium.launch(**options)
        ways = WAYS if screenshots is None else [(way, scheme) for way in WIDTHS for scheme in SCHEMES]
        wrong = []
        for way, scheme in ways:
            size = {"width": WIDTHS[way], "height": 900}
            page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
            for name in names:
                file = f"{name.removesuffix('.html').replace('/', '_')}.{way}.{scheme}.png"
                found = check_page(page, address, name, screenshots / file if screenshots else None)
                wrong += [f"{way}, {scheme}: {each}" for each in found]
            if way == "wide" and scheme == "light":
                wrong += [each for words in (searches or {}).items() for each in check_search(page, address, *words)]
        browser.close()
    print(f"{len(names)} pages looked at in {executable}, {len(wrong)} complaints")
    return wrong


def main() -> int:
    """Check the site that is named; the status is 1 if something is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    executable = browser_path()
    if executable is None:
        print("note: the pages were not looked at: there is no Chromium (install chromium, or name it in CHROMIUM)")
        return 0
    if arguments.screenshots:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    wrong = check(arguments.site, executable, searches=SEARCHES, screenshots=arguments.screenshots)
    print(*wrong, sep="\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
