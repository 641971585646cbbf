"""Parser of Markdown pages: code blocks and their output, headings and links.

A ``python`` block right before a ``text`` block prints that text. A ``console`` block holds commands behind ``$`` and
their output; a line ``...`` matches any lines, ``...`` within a line any text. A ``python`` block that begins with
``# name.py`` is a file and does not run. Blocks of a page run in order, in one folder and one namespace. A word after
the language excludes a block: ``python gpu``, ``console gpu``.
"""

import re

from support.project import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])

_FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
FRAMEWORKS = (
    "numpy",
    "torch",
    "jax",
    "cupy",
    "tvm_ffi",
    "pyarrow",
    "dask",
    "ml_dtypes",
    "PIL",
    "cffi",
    "mypy",
    "attrs",
    "safetensors",
    "pandas",
    "polars",
    "cv2",
    "datasets",
    "sklearn",
    "optax",
    "dask",
    "ray",
    "scipy",
)


def name_of(page):
    """Return a page's path in the project."""
    return str(page.relative_to(ROOT))


def blocks(text):
    """Yield (info, code, output or None) for every fenced block; the output is a ``text`` block right behind it."""
    found = list(_FENCE.finditer(text))
    for block, after in zip(found, [*found, None][1:], strict=True):
        shown = after is not None and after["info"] == "text" and not text[block.end() : after.start()].strip()
        yield block["info"].strip(), block["code"], after["code"] if shown else None


def runnable(text):
    """Return the blocks that run: (language, code, output or None)."""
    return [each for each in blocks(text) if each[0] in ("python", "console")]


def needed(text):
    """Return the frameworks in the blocks of a page, as modules or targets."""
    code = "\n".join(code for _, code, _ in runnable(text))
    return [
        name for name in FRAMEWORKS if re.search(rf'\bimport {name}\b|\bfrom {name}\b|"{name}["\.]|-m {name}\b', code)
    ]


def commands(code):
    """Yield (command, expected output) for each command of a console block."""
    parts = re.split(r"^\$ ", code, flags=re.MULTILINE)
    assert not parts[0].strip(), f"a console block begins with '$ ', found {parts[0]!r}"
    for part in parts[1:]:
        command, _, output = part.partition("\n")
        while command.endswith("\\"):
            more, _, output = output.partition("\n")
            command = command[:-1] + more.lstrip()
        yield command, output


def file_of(code):
    """Return the file name in the first line of a block, or None."""
    found = re.match(r"# (\w+\.py)\n", code)
    return found and found[1]


def fits(shown, printed):
    """Return True if the printed text matches the shown text, where ``...`` matches anything."""
    lines = shown.splitlines()
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else ".*".join(map(re.escape, line.split("..."))) + "\n"
        for line in lines
    )
    return re.fullmatch(pattern, re.sub(r"[ \t]+$", "", printed, flags=re.MULTILINE)) is not None


def prose(text):
    """Return a page without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def links(text):
    """Return the targets of links and images."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"(?<![`\[])`[^`\n]*`", lambda code: code[0] if "](" not in code[0] else "", text)
    return [*_LINK.findall(text), *_IMAGE.findall(text)]


def anchors(text):
    """Return the anchors of a page's headings, as GitHub and mkdocs build them."""
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", _FENCE.sub("", text), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip()))
    return found


def navigation():
    """Return the pages in mkdocs.yml, without a YAML parser."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r"([\w./-]+\.md)$", text, flags=re.MULTILINE)
