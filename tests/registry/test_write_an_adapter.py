"""What docs/write-an-adapter.md shows is what happens, and its tables have everything that an adapter can say."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

import dlx.adapter
from dlx.adapter import Adapter, Blocker, Capabilities, Container, Defect, Guard, Layout

PAGE = (ROOT / "docs" / "write-an-adapter.md").read_text(encoding="utf-8")
BLOCKS = [(found[1], found[2]) for found in re.finditer(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
FILE = re.compile(r"# (\w+\.(?:py|toml))\b.*\n")


def test_the_page_runs(tmp_path, np):
    """Its files are installed by their own entry point; each block prints what the page shows, in order."""
    files, runs = {}, []
    for n, (kind, code) in enumerate(BLOCKS):
        name = FILE.match(code)
        if name is not None:
            files[name[1]] = files.get(name[1], "") + code
        elif kind == "python":
            assert BLOCKS[n + 1][0] == "text", "a block shows its output"
            runs.append((code, BLOCKS[n + 1][1]))
    assert set(files) == {"pyproject.toml", "mylib.py", "dlx_mylib.py", "dlx_labelled.py"}
    assert len(runs) == 5
    files["labelled.py"] = "import numpy\nclass Labelled(numpy.ndarray):\n    pass\n"
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    entries = {"mylib": "dlx_mylib", "labelled": "dlx_labelled"}
    (toml,) = [code for kind, code in BLOCKS if kind == "toml"]
    assert 'mylib = "dlx_mylib"' in toml
    for name, module in entries.items():
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dlx-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dlx]\n{name} = {module}\n")
    mark = "-- next --"
    program = f"\nprint({mark!r})\n".join(code for code, _ in runs)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "adapters")])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120, check=False
    )
    assert done.stderr == ""
    for shown, (code, expected) in zip(done.stdout.split(f"{mark}\n"), runs, strict=True):
        assert shown == expected, code


def rows(title):
    """The names in the first column of a table of the page."""
    part = PAGE.split(f"\n### {title}\n", 1)[1].split("\n### ", 1)[0]
    cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("|")][2:]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def public(kind):
    """What a class offers, by name."""
    return {name for name in vars(kind) if not name.startswith("_")}


METHODS = {name for name in public(Adapter) if name not in Adapter.__annotations__}


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Adapter: facts", set(Adapter.__annotations__)),
        ("Adapter: methods", METHODS),
        *((kind.__name__, public(kind)) for kind in (Layout,)),
        *(
            (kind.__name__, {field.name for field in dataclasses.fields(kind)} | public(kind))
            for kind in (Capabilities, Blocker, Guard, Container, Defect)
        ),
        ("Beside these, in `dlx.adapter`", set(dlx.adapter.__all__)),
    ],
)
def test_everything_is_in_the_tables(title, names):
    """Each name once, none that is not there."""
    found = rows(title)
    assert len(found) == len(set(found))
    assert set(found) == names


@pytest.mark.parametrize("kind", [Adapter, Capabilities, Blocker, Guard, Container, Defect, Layout])
def test_every_field_has_a_docstring(kind):
    """The class says what each of its fields means; every method has a docstring."""
    named = re.findall(r"^(\w+(?:, \w+)*)$", inspect.cleandoc(kind.__doc__), re.MULTILINE)
    listed = {name for line in named for name in line.split(", ")}
    if dataclasses.is_dataclass(kind):
        fields = {field.name for field in dataclasses.fields(kind)}
    else:
        fields = set(kind.__annotations__)
    assert fields <= listed
    for name, value in vars(kind).items():
        if not name.startswith("_") and callable(value) and name not in fields:
            assert value.__doc__, name


def test_defaults_are_those_of_the_code():
    """The column of defaults says what is so, where it is a plain value."""
    for title, kind in (("Adapter: facts", Adapter), ("Capabilities", Capabilities), ("Guard", Guard)):
        part = PAGE.split(f"\n### {title}\n", 1)[1].split("\n### ", 1)[0]
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            name = cells[0].strip("`")
            if hasattr(kind, name) and cells[1] in ("True", "False", "None", "0", "1", "16", "64", "()", "{}"):
                assert repr(getattr(kind, name)).replace("frozenset()", "{}") == cells[1], name
