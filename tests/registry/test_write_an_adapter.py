"""What docs/write-an-adapter.md shows is what happens, and its tables have everything that an adapter can say."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys

import pytest
from project import ROOT

import dlx.adapter
from dlx.adapter import (
    Adapter,
    Arrays,
    Blocker,
    Capabilities,
    Container,
    Description,
    Devices,
    DTypes,
    FastPath,
    GradSupport,
    Guard,
    KnownIssue,
    Layout,
    Owner,
    Placement,
    StreamSupport,
    WriteTracking,
)

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


def cells(title):
    """The cells of a table of the page, line by line."""
    part = PAGE.split(f"\n### {title}\n", 1)[1].split("\n### ", 1)[0]
    return [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")][2:]


def names_in(*texts):
    """The names in cells, in their order."""
    return [name for text in texts for name in re.findall(r"`(\w+)`", text)]


def public(kind):
    """What a class offers, by name; for DTypes also its parameters."""
    parameters = inspect.signature(kind).parameters if kind is DTypes else ()
    fields = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else parameters
    return {name for name in (*vars(kind), *fields) if not name.startswith("_")}


PARTS = [
    *(DTypes, Devices, Arrays, Description, Blocker, FastPath, Owner, Guard, StreamSupport, Placement, WriteTracking),
    *(GradSupport, Container, KnownIssue, Layout),
]


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Adapter: facts", set(Adapter.__annotations__)),
        ("Adapter: methods", public(Adapter) - set(Adapter.__annotations__)),
        ("Capabilities", public(Capabilities)),
        ("Beside these, in `dlx.adapter`", set(dlx.adapter.__all__) - {kind.__name__ for kind in PARTS}),
    ],
)
def test_everything_is_in_the_tables(title, names):
    """Each name once, none that is not there."""
    found = names_in(*(row[0] for row in cells(title)))
    assert len(found) == len(set(found))
    assert set(found) == names


def test_every_part_is_in_the_tables():
    """Each class of which an adapter consists, with each field and method once."""
    found = {name: names_in(members) for row in cells("Parts") for name, members in [(*names_in(row[0]), row[2])]}
    assert list(found) == [kind.__name__ for kind in PARTS]
    for kind in PARTS:
        members = found[kind.__name__]
        assert len(members) == len(set(members))
        assert set(members) == public(kind), kind


@pytest.mark.parametrize("kind", [Adapter, Capabilities, *PARTS])
def test_every_field_has_a_docstring(kind):
    """The class says what each of its fields means; every method has a docstring."""
    named = re.findall(r"^(\w+(?:, \w+)*)$", inspect.cleandoc(kind.__doc__), re.MULTILINE)
    listed = {name for line in named for name in line.split(", ")}
    if dataclasses.is_dataclass(kind):
        fields = {field.name for field in dataclasses.fields(kind)}
    else:
        fields = {name for name in inspect.get_annotations(kind) if not name.startswith("_")}
    assert fields <= listed
    for name, value in vars(kind).items():
        if not name.startswith("_") and callable(value) and name not in fields:
            assert value.__doc__, name


def test_defaults_are_those_of_the_code():
    """The column of defaults says what is so, where it is a plain value."""
    for title, kind in (("Adapter: facts", Adapter), ("Capabilities", Capabilities)):
        for row in cells(title):
            for name in names_in(row[0]):
                default = row[1].strip()
                if hasattr(kind, name) and default in ("True", "False", "None", "0", "1", "16", "64", "()", "{}"):
                    assert repr(getattr(kind, name)).replace("frozenset()", "{}") == default, name
