"""Check the built site in a browser (``make docs``).

A headless Chromium opens each page, wide and narrow, light and dark. A page must not be wider than the window, cut a
block of output, lack a picture, or write an error to the console, and the search must find the expected pages. Without
a Chromium, nothing is checked. ``--screenshots FOLDER`` writes a picture of each page, width and palette.
"""

import argparse
import contextlib
import functools
import http.server
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The site needs no network, so the browser must not use it.
ARGUMENTS = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
RESULT = ".md-search-result"
WIDTHS = {"wide": 1280, "narrow": 390}
SCHEMES = ("light", "dark")
WAYS = [("wide", "light"), ("narrow", "dark")]  # screenshots use all four combinations
# Searches of readers, and the page that must come first.
SEARCHES = {
    "pandas": "cookbook/pandas-polars.html",
    "pandas to torch": "cookbook/pandas-polars.html",
    "xarray": "supported.html",
    "tensorflow": "supported.html",
    "polars": "cookbook/pandas-polars.html",
    "DataLoader": "cookbook/dataloader.html",
    "safetensors": "cookbook/hugging-face.html",
    "opencv": "cookbook/images.html",
    "jax": "cookbook/jax-torch.html",
    "numpy to torch": "index.html",
    "torch to numpy": "index.html",
    "from_numpy": "index.html",
    "float64": "troubleshooting.html",
    "stack": "reference/stack.html",
    "batch": "cookbook/dataloader.html",
    "pad": "cookbook/dataloader.html",
    "convert": "reference/convert.html",
    "gradients": "how-to/gradients.html",
    "detach": "how-to/gradients.html",
    "performance": "performance.html",
    "speed": "performance.html",
    "torch.compile": "how-to/accept-any-array.html",
    "did that copy": "how-to/see-copies.html",
    "zero copy": "how-to/see-copies.html",
    "read-only": "how-to/read-only.html",
    "copy=False": "how-to/see-copies.html",
    "CUDA stream": "how-to/streams.html",
    "pinned memory": "how-to/streams.html",
    "pickle": "how-to/distributed.html",
    "multiprocessing": "how-to/share.html",
    "shared memory": "how-to/share.html",
    "share between processes": "how-to/share.html",
    "dict of arrays": "how-to/trees-and-views.html",
    "mypy": "how-to/types.html",
    "bfloat16": "quickstart.html",
    "BufferError": "quickstart.html",
    "CopyRequiredError": "reference/errors.html",
    "requires_grad": "troubleshooting.html",
    "install": "install.html",
    "pip install": "install.html",
    "hdf5": "files.html",
    "h5py": "files.html",
    "npz": "files.html",
    "command line": "command-line.html",
    "arrow": "how-to/tables-and-columns.html",
    "jax to torch": "cookbook/jax-torch.html",
    "plugin": "write-an-adapter.html",
    "thread safe": "how-to/threads.html",
    "dtype": "how-to/dtype-and-memory.html",
    "dtype cast": "how-to/dtype-and-memory.html",
    "out=": "how-to/dtype-and-memory.html",
    "sparse": "how-to/sparse-and-ragged.html",
    "ragged": "how-to/sparse-and-ragged.html",
    "checkpoint": "how-to/lazy-checkpoints.html",
    "negative strides": "troubleshooting.html",
    "capsule": "explanation/lifecycle.html",
    "ctypes": "c-authors.html",
    "from_dlpack": "index.html",
}

# Faults of the current layout. Only a table may scroll sideways, and no part may be wider than the window.
LOOK = """() => {
    const wrong = [], root = document.documentElement;
    document.querySelectorAll('main details').forEach(part => part.open = true);
    const inside = part => part.closest('.md-typeset__scrollwrap, .md-sidebar, .md-nav, .md-search');
    const parts = [...document.querySelectorAll('main *')].filter(part => !inside(part));
    if (root.scrollWidth > root.clientWidth) {
        const found = parts.find(part => part.getBoundingClientRect().right > root.clientWidth + 1);
        const at = found ? ` at ${found.outerHTML.slice(0, 90)}` : '';
        wrong.push(`is ${root.scrollWidth - root.clientWidth} pixels too wide${at}`);
    }
    const cuts = part => part.clientWidth > 20 && part.scrollWidth > part.clientWidth + 1
        && getComputedStyle(part).overflowX !== 'visible';
    for (const part of parts.filter(cuts))
        wrong.push(`cuts ${part.tagName.toLowerCase()} ${part.innerText.slice(0, 60)}`);
    for (const image of document.images)
        if (image.complete && !image.naturalWidth) wrong.push(`lacks the picture ${image.src}`);
    return wrong;
}"""


def browser_path() -> str | None:
    """Return the path of Chromium, from ``CHROMIUM`` first, or None."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *BROWSERS))), None)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on localhost and yield the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Log nothing: the console of the page reports missing files."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def check_page(page: Any, address: str, name: str, picture: Path | None) -> Iterator[str]:
    """Open a page and yield its faults."""
    faults: list[str] = []

    def note_failure(request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # what the page before still loaded when the browser left it
            faults.append(f"does not get {request.url}")

    listeners = {
        "console": lambda message: faults.append(f"logs {message.text}") if message.type == "error" else None,
        "pageerror": lambda error: faults.append(f"raises {error}"),
        "requestfailed": note_failure,
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
    """Search as a reader does, and yield a fault if the first page is not the expected one."""
    page.goto(address + "index.html")
    try:
        for attempt in (1, 2, 3):  # the page may not listen yet at the first
            page.fill("input[name=query]", "")
            page.fill("input[name=query]", words)
            page.press("input[name=query]", "End")  # the search listens for keys and focus, not for the text
            with contextlib.suppress(Exception if attempt < 3 else ()):
                wait = f"() => /match/.test(document.querySelector('{RESULT}__meta').innerText)"
                page.wait_for_function(wait, timeout=15_000)
                break
        found = page.get_attribute(f"{RESULT}__item a", "href", timeout=5_000)
    except Exception as error:
        yield f"the search does not find {words}: {str(error).splitlines()[0]}"
        return
    if not found.partition("?")[0].endswith(expected):
        yield f"the search for {words} shows {found}, not {expected}"


def check(
    site: Path, executable: str, *, searches: Mapping[str, str] | None = None, screenshots: Path | None = None
) -> list[str]:
    """Return the faults of a site."""
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
    print(f"checked {len(names)} pages in {executable}: {len(wrong)} faults")
    return wrong


def main() -> int:
    """Check the named site; return 1 if it has faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    executable = browser_path()
    if executable is None:
        print("note: skipped the check of the pages: there is no Chromium. Install chromium or set CHROMIUM.")
        return 0
    if arguments.screenshots:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    wrong = check(arguments.site, executable, searches=SEARCHES, screenshots=arguments.screenshots)
    print(*wrong, sep="\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
