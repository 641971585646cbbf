"""`dlx new-adapter`: the written plugin passes the conformance kit, tested with an invented array class."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from first_adapter import SHELF
from support.project import ROOT

from dlx.cli import main


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Return the folder of an importable framework called shelf."""
    (tmp_path / "shelf.py").write_text(SHELF, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("shelf", None)


def install(folder):
    """Register an entry point as pip does."""
    (entry,) = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]["dlx"].items()
    info = folder / "dlx_shelf-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dlx-shelf\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[dlx]\n{} = {}\n".format(*entry))


@pytest.mark.slow
def test_what_it_writes_passes_the_conformance_kit(shelf, capsys):
    """The unchanged module, entry point and tests pass, and so does the kit."""
    assert main(["new-adapter", "shelf", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    folder = shelf / said["folder"]
    assert folder.name == "dlx-shelf"
    assert said["to_fill_in"] == ["dependencies in pyproject.toml: no installed distribution has shelf"]
    assert sorted(said["files"]) == ["dlx_shelf.py", "pyproject.toml", "tests/test_dlx_shelf.py"]
    written = (folder / "dlx_shelf.py").read_text()
    assert '"shelf.Array",' in written and '"int64": "int64",' in written and "float64" not in written
    install(folder)
    path = os.pathsep.join(map(str, (shelf, folder, ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 12, done.stdout


@pytest.mark.parametrize("providers", [[], ["shelf-arrays"], ["shelf-arrays", "shelf-tools"]])
def test_it_depends_on_the_distribution_that_has_the_framework(shelf, providers, capsys):
    """It has no dependency if no distribution, or several, provide the package: pip could install an unrelated one."""
    for provider in providers:
        info = shelf / f"{provider.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {provider}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text("shelf\n")
    assert main(["new-adapter", "shelf"]) == 0
    needs = tomllib.loads((shelf / "dlx-shelf" / "pyproject.toml").read_text())["project"]["dependencies"]
    assert needs[0].startswith("dlxarray") and needs[1:] == (providers if len(providers) == 1 else [])
    assert ("to fill in: dependencies" in (shown := capsys.readouterr().out)) == (len(providers) != 1)
    assert ("2 installed distributions have parts of shelf" in shown) == (len(providers) == 2)


def test_a_framework_that_is_not_installed(tmp_path, monkeypatch, capsys):
    """The output says that types and dtypes are guesses."""
    monkeypatch.chdir(tmp_path)
    assert main(["new-adapter", "no.such_thing"]) == 0
    assert "no.such_thing is not installed, so they are guesses" in capsys.readouterr().out
    project = tomllib.loads((tmp_path / "dlx-no-such-thing" / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["dlx"] == {"no.such_thing": "dlx_no_such_thing"}
    assert '"no.such_thing.Array",' in (tmp_path / "dlx-no-such-thing" / "dlx_no_such_thing.py").read_text()


def test_a_framework_without_the_protocol(shelf, capsys):
    """The output lists the missing parts."""
    (shelf / "shelf.py").write_text("class Tensor: pass\n")
    assert main(["new-adapter", "shelf"]) == 0
    shown = capsys.readouterr().out
    assert "to fill in: export: its arrays have no __dlpack__" in shown
    assert "to fill in: load: there is no shelf.from_dlpack" in shown
    assert "over_memory" in (shelf / "dlx-shelf" / "dlx_shelf.py").read_text()


@pytest.mark.parametrize(
    ("source", "types", "said"),
    [
        ("class Arr:\n    shape = dtype = None\nclass Config: pass\n", '"shelf.Arr",', "Arr is a guess"),
        ("class Arr:\n    def __init__(self): self.shape = ()\n", '"shelf.Arr",', "its classes: Arr"),
        ("class A: pass\nclass B: pass\n", '"shelf.Array",', "its classes: A, B. Array is a guess"),
        (  # an interface has no arrays
            "from typing import Protocol\nclass Array(Protocol): pass\nclass NDArray: pass\n",
            '= ("shelf.NDArray",)',
            "load: there is no shelf.from_dlpack",
        ),
        ("from dlx import Tensor\n", '"shelf.Array",', "Array is a guess; --type names another"),  # not its own
        ("x = 1\n", '"shelf.Array",', "to fill in: types: shelf has no class with __dlpack__"),
    ],
)
def test_an_installed_framework_without_a_usual_class_gets_a_plugin(shelf, capsys, source, types, said):
    """The files are written, importable, and the output says what is a guess."""
    (shelf / "shelf.py").write_text(source)
    assert main(["new-adapter", "shelf"]) == 0
    assert said in capsys.readouterr().out
    written = (shelf / "dlx-shelf" / "dlx_shelf.py").read_text()
    assert types in written
    compile(written, "dlx_shelf.py", "exec")


@pytest.mark.parametrize("named", ["Arr", "shelf.Arr", "Arr, part.Other"])
def test_type_names_the_array_types(shelf, named, capsys):
    """--type takes one name or several, with or without the package."""
    (shelf / "shelf.py").write_text("class Arr: pass\nclass part:\n    class Other: pass\n")
    assert main(["new-adapter", "shelf", "--type", named]) == 0
    written = (shelf / "dlx-shelf" / "dlx_shelf.py").read_text()
    assert '"shelf.Arr",' in written and ('"shelf.part.Other"' in written) == ("Other" in named)
    assert "guess" not in capsys.readouterr().out
    for bad, said in (("Ar", "Did you mean"), ("1x", "is not a class name"), ("zzz", "Pass one of Arr, part")):
        assert main(["new-adapter", "shelf", "--type", bad, "--into", "other"]) == 2
        assert said in capsys.readouterr().err and not (shelf / "other").exists()


@pytest.mark.slow
def test_the_commented_export_works(shelf, capsys):
    """Once its three lines are filled in, the plugin of a class without __dlpack__ passes the conformance kit."""
    (shelf / "shelf.py").write_text(TINY)
    assert main(["new-adapter", "shelf", "--type", "Arr"]) == 0
    folder = shelf / "dlx-shelf"
    written = (folder / "dlx_shelf.py").read_text()
    commented = re.search(r"    # In place of the method above:\n((?:    # .*\n)+)", written)
    start = written.index("    def export(")
    method = re.sub(r"(?m)^    # ", "    ", commented[1])
    method = method.replace("obj.address  # of the first element", "obj.data.ctypes.data")
    written = written[:start] + method + written[commented.end() :]
    written = written.replace("offer  # and Device, over_memory for `export`", "offer, Device, over_memory")
    written = re.sub(
        r"raise NotImplementedError\(\"return an array.*", "import shelf\n\n        return shelf.wrap(tensor)", written
    )
    (folder / "dlx_shelf.py").write_text(written)
    install(folder)
    path = os.pathsep.join(map(str, (shelf, folder, ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


TINY = """
import numpy as np

float32, float64, int32, int64 = "float32", "float64", "int32", "int64"


class Arr:
    def __init__(self, data):
        self.data = data

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: str(self.data.dtype))


def wrap(tensor):
    return Arr(np.from_dlpack(tensor))
"""


def test_bad_names_and_folders(shelf, capsys):
    """Existing folders are not overwritten, and supported packages are refused."""
    for name in ("my-lib", "class", "..", ".a", "a..b"):
        assert main(["new-adapter", name]) == 2
        assert f"{name!r} is not a package name" in capsys.readouterr().err
    assert main(["new-adapter", "numpy"]) == 2
    assert "numpy already has an adapter: dlx_adapters.dlx_numpy (dlxarray)" in capsys.readouterr().err
    (shelf / "dlx-shelf").mkdir()
    assert main(["new-adapter", "shelf"]) == 2
    assert "dlx does not overwrite it" in capsys.readouterr().err
    assert main(["new-adapter", "shelf", "--into", "/proc/none"]) == 2
    assert "cannot create /proc/none" in capsys.readouterr().err
