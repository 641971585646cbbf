"""docs/write-an-adapter.md is correct and complete."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys

import pytest
from support.project import ROOT

import dlx.adapter
from dlx.adapter import Adapter, Devices, DTypes

PAGE = (ROOT / "docs" / "write-an-adapter.md").read_text(encoding="utf-8")
BLOCKS = [(found[1], found[2]) for found in re.finditer(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
FILE = re.compile(r"# (\w+\.(?:py|toml))\b.*\n")


def test_the_page_runs(tmp_path, np):
    """Its files are installed with their entry point; each block prints the shown output, in order."""
    files, runs = {}, []
    for n, (kind, code) in enumerate(BLOCKS):
        name = FILE.match(code)
        if name is not None:
            files[name[1]] = files.get(name[1], "") + code
        elif kind == "python":
            assert BLOCKS[n + 1][0] == "text", "a block shows its output"
            runs.append((code, BLOCKS[n + 1][1]))
    assert set(files) == {"pyproject.toml", "mylib.py", "dlx_mylib.py", "dlx_labelled.py"}
    assert len(runs) == 6
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
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120, check=False
    )
    assert done.stderr == ""
    for shown, (code, expected) in zip(done.stdout.split(f"{mark}\n"), runs, strict=True):
        assert shown == expected, code


PARTS = [dlx.adapter.Description, dlx.adapter.Layout] + [
    kind for name, kind in vars(dlx.adapter).items() if name in dlx.adapter.__all__ and dataclasses.is_dataclass(kind)
]


def test_every_name_is_in_the_table():
    """The table lists each name of `dlx.adapter` once."""
    table = PAGE.split("\n## Reference\n", 1)[1]
    rows = [line.strip("|").split("|")[0] for line in table.splitlines() if line.startswith("|")][2:]
    found = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(found) == len(set(found)) and set(found) == set(dlx.adapter.__all__)


@pytest.mark.parametrize("kind", [Adapter, DTypes, Devices, *PARTS])
def test_every_field_has_a_docstring(kind):
    """Class docstrings describe all fields; every method has a docstring."""
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
