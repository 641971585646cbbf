"""`dlx new-adapter`: the written plugin passes the conformance kit, tested with an invented array class."""

import importlib
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
    (shelf / "shelf.py").write_text("from dlx import Tensor\n")  # not its own
    assert main(["new-adapter", "shelf", "--into", "other"]) == 2
    assert "shelf has no class with __dlpack__" in capsys.readouterr().err and not (shelf / "other").exists()
    sys.modules.pop("shelf")
    (shelf / "shelf.py").write_text(SHELF, encoding="utf-8")
    importlib.invalidate_caches()
    assert main(["new-adapter", "shelf", "--into", "/proc/none"]) == 2
    assert "cannot create /proc/none" in capsys.readouterr().err
