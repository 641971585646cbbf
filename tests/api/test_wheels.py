"""The cross-compiler of wheels, without compiling: headers, contents, and what it refuses."""

import base64
import csv
import hashlib
import tomllib
import zipfile

import pytest
from support.project import ROOT
from support.repository import wheels
from support.repository.wheels import Build, Failed, check_contents, python_names, write_wheel


@pytest.fixture
def parts(tmp_path):
    """Return the folders of the shared modules and of one wheel's extensions."""
    pure, folder = tmp_path / "pure", tmp_path / "extensions"
    files = {
        "dlx/__init__.py": "x",
        "dlx_adapters/__init__.py": "",
        "dlxarray-0.1.dist-info/METADATA": "Name: dlxarray\n",
    }
    for name, text in files.items():
        (pure / name).parent.mkdir(parents=True, exist_ok=True)
        (pure / name).write_text(text)
    (folder / "dlx").mkdir(parents=True)
    (folder / "dlx" / "_ffi.cp313-win_amd64.pyd").write_bytes(b"MZ")
    return pure, folder


@pytest.mark.parametrize("target", wheels.TARGETS, ids=lambda target: target.tag)
def test_a_wheel_records_its_files_and_its_tags(tmp_path, parts, target):
    """RECORD has the hash and size of each file; the name and WHEEL have the same tags; a second build is equal."""
    build = Build("3.13", target)
    path = write_wheel(build, *parts, tmp_path / "out")
    tags = path.stem.split("-", 2)[2].removeprefix("cp313-cp313-").split(".")
    with zipfile.ZipFile(path) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]
        rows = {name: (digest, size) for name, digest, size in csv.reader(archive.read(record).decode().splitlines())}
        assert {*rows} == {*archive.namelist()} and rows[record] == ("", "")
        for name in {*rows} - {record}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
            assert rows[name] == (f"sha256={digest}", str(len(archive.read(name))))
        stated = archive.read(record.replace("RECORD", "WHEEL")).decode()
    assert [line for line in stated.splitlines() if line.startswith("Tag")] == [
        f"Tag: cp313-cp313-{tag}" for tag in tags
    ]
    assert target.tag in tags
    before = path.read_bytes()
    assert write_wheel(build, *parts, tmp_path / "out").read_bytes() == before
    check_contents(path)


@pytest.mark.parametrize("name", ["dlx_numpy.py", "dlx/core.c", "dlx/lib.lib"])
def test_a_wheel_with_further_names_or_sources_is_refused(tmp_path, parts, name):
    """Site-packages stays clean."""
    (parts[0] / name).write_text("")
    with pytest.raises(Failed, match=name.split("/")[-1]):
        check_contents(write_wheel(Build("3.13", wheels.TARGETS[-1]), *parts, tmp_path / "out"))


def test_a_path_of_this_checkout_is_refused(tmp_path, parts):
    """A compiler may store paths of its sources."""
    (parts[0] / "dlx" / "__init__.py").write_text(f"# {ROOT}")
    with pytest.raises(Failed, match="the path of this checkout"):
        check_contents(write_wheel(Build("3.13", wheels.TARGETS[-1]), *parts, tmp_path / "out"))


def test_missing_headers_are_named(monkeypatch, tmp_path):
    """Without any headers nothing is built; with this machine's, the result is a check, and says what a wheel needs."""
    monkeypatch.setattr(wheels, "SOURCES", tmp_path / "none")
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(wheels, "GIVEN", str(tmp_path / "given"))
    monkeypatch.setattr(wheels, "include_of", lambda version: None)
    build = Build("3.13", next(each for each in wheels.TARGETS if each.tag == "macosx_11_0_arm64"))
    with pytest.raises(
        Failed, match=r"Provide Python.h and pyconfig.h of cp313-macosx_11_0_arm64 in .*/given/cp313-mac"
    ):
        _ = build.headers
    here = tmp_path / "include"
    here.mkdir()
    (here / "Python.h").write_text("")
    (here / "pyconfig.h").write_text("/* Linux */")
    monkeypatch.setattr(wheels, "include_of", lambda version: here)
    found = Build("3.13", build.target).headers
    assert found.origin == "check" and "cp313-macosx_11_0_arm64" in found.missing
    (tmp_path / "given" / build.name).mkdir(parents=True)
    (tmp_path / "given" / build.name / "Python.h").write_text("")
    assert Build("3.13", build.target).headers.origin == "own"


def test_configure_needs_no_python_of_its_version(monkeypatch, tmp_path):
    """It asks this machine's Python for its version, and that one need not be installed."""
    source = tmp_path / "3.99"
    (source / "Include").mkdir(parents=True)
    (source / "Include" / "Python.h").write_text("")
    (source / "configure").write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do case $word in --with-build-python=*) python=${word#*=};; esac; done\n'
        "case $READELF in readelf) exit 1;; esac\n"  # 3.11 takes that for a missing one
        'echo "#define ASKED $($python -c "import sys")" >pyconfig.h\n'
    )
    (source / "configure").chmod(0o755)
    monkeypatch.setattr(wheels, "SOURCES", tmp_path)
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(wheels, "GIVEN", None)
    for target in wheels.TARGETS:
        found = Build("3.99", target).headers
        assert found.origin == ("configured" if target.system == "linux" else "check"), target
        assert (found.folder / "pyconfig.h").read_text() == "#define ASKED 3.99\n"
        assert (found.folder / "Python.h").exists()


def test_windows_has_its_own_configuration_in_the_source(monkeypatch, tmp_path):
    """PC/pyconfig.h, or .h.in since 3.13, replaces the one of the machine that builds."""
    (tmp_path / "3.13" / "Include").mkdir(parents=True)
    (tmp_path / "3.13" / "Include" / "Python.h").write_text(
        "PyAPI_FUNC(int) PyNew_Function(void);\nPyAPI_DATA(int) Py_Data;"
    )
    (tmp_path / "3.13" / "PC").mkdir()
    (tmp_path / "3.13" / "PC" / "pyconfig.h.in").write_text("#define MS_WIN32")
    monkeypatch.setattr(wheels, "SOURCES", tmp_path)
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(wheels, "GIVEN", None)
    found = Build("3.13", wheels.TARGETS[-1]).headers
    assert found.origin == "own" and (found.folder / "pyconfig.h").read_text() == "#define MS_WIN32"
    names, data = python_names(found.folder)
    assert {"PyNew_Function", "_PyNew_Function_SizeT", "Py_Data"} <= names and data == {"Py_Data"}


def test_the_lists_of_symbols_repeat_nothing():
    """A name that one system provides is not repeated for every system."""
    table = tomllib.loads(wheels.SYMBOLS.read_text(encoding="utf-8"))
    common = table.pop("every system")
    for name, names in {"every system": common, **{key: each["names"] for key, each in table.items()}}.items():
        assert len(names) == len({*names}), name
        assert name == "every system" or not {*names} & {*common}, name
