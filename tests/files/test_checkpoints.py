"""Torch checkpoints whose other objects need code: their tensors are read, the objects are refused by name."""

import argparse
import collections
import contextlib
import datetime
import enum
import fractions
import os
import pathlib
import subprocess
import sys
import threading
import zipfile
from functools import partial

import pytest

import dlx
from dlx.errors import ConversionError, FileError

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")


class Color(enum.Enum):
    """An enum."""

    RED = 1


OBJECTS = {
    "namespace": lambda: argparse.Namespace(a=1),
    "path": lambda: pathlib.PurePosixPath("x"),
    "scalar": lambda: np.float64(0.1),
    "array": lambda: np.ones(3),
    "date": lambda: datetime.date(2020, 1, 1),
    "fraction": lambda: fractions.Fraction(1, 2),
    "enum": lambda: Color.RED,
    "function": lambda: torch.nn.functional.relu,
    "class": lambda: argparse.Namespace,
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("options", [{}, {"mmap": False}], ids=["mapped", "read"])
def test_one_refused_object_does_not_cost_the_tensors(tmp_path, name, options):
    """The object raises when it is read, with its class and `safe_globals`; `skip` leaves it out."""
    one = torch.arange(4.0)
    tree = {"w": one, "tied": one, "v": one[1:], "in": {"o": OBJECTS[name](), "n": 3}, "l": [one, OBJECTS[name]()]}
    torch.save(tree, path := tmp_path / "x.pt")
    file = dlx.open(path, "torch", **options)
    assert torch.equal(file["w"], one) and file["tied"] is file["w"] and file["in"]["n"] == 3
    assert file["v"].data_ptr() == file["w"].data_ptr() + 4 and torch.equal(file["l"][0], one)
    inner, items = file["in"], file["l"]
    for read in (partial(inner.__getitem__, "o"), partial(items.__getitem__, 1), file.materialize):
        with pytest.raises(ConversionError, match=r"needs code \(.*safe_globals"):
            read()
    plan = dlx.plan(file, to="numpy")
    assert plan.outcome == "refused" and "needs code" in str(plan)
    del file, inner, items, read
    part = dlx.open(path, "numpy", skip=["in.o", "l"], **options).materialize()
    assert part.keys() == {"w", "tied", "v", "in"} and part["in"] == {"n": 3} and part["v"].tolist() == [1, 2, 3]


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, function, *args):
        self.made = function, args

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize(
    "function", [os.system, eval, print, getattr, __import__, torch.load], ids=lambda function: function.__name__
)
def test_no_code_is_run(tmp_path, function, monkeypatch):
    """Neither when the file is opened, nor when the member is read."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "e": Evil(function, "touch ran; __import__('os').mkdir('ran')")}, "x.pt")
    try:
        file = dlx.open("x.pt", "torch")
    except FileError as error:  # torch blocks some modules, whatever is allowed
        assert "needs code" in error.reason or "weights_only" in error.reason
    else:
        with pytest.raises(ConversionError, match="needs code"):
            file["e"]
        assert file["w"].tolist() == [1, 1]
    assert not pathlib.Path("ran").exists()


BLOCKED = """
import os, sys
import dlx, torch

called = []
sys.addaudithook(lambda event, _: called.append(event) if event == "os.system" else None)
for allowed in ([], [os.system]):
    with torch.serialization.safe_globals(allowed):
        try:
            dlx.open("x.pt")
        except dlx.errors.FileError as error:
            print(error)
print(called)
"""


def test_the_advice_for_a_blocked_module(tmp_path):
    """No `safe_globals` helps with a function of `os`, so the error does not advise it; nothing is called."""
    torch.save({"w": torch.ones(2), "e": Evil(os.system, "touch ran"), "a": argparse.Namespace()}, tmp_path / "x.pt")
    path = os.pathsep.join([str(pathlib.Path(dlx.__file__).parents[1]), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    untrusted, trusted, called = run.stdout.splitlines()
    for said in (untrusted, trusted):
        assert f"Save its tensors alone: torch blocks the module {os.name}" in said and "inside `with" not in said
    assert "it needs code (" in untrusted and f"{os.name}.system" in untrusted
    assert called == "[]" and not (tmp_path / "ran").exists()


def test_a_file_without_tensors_is_refused_as_a_whole(tmp_path):
    """The error names the code; likewise if an object has elements of its own, which torch gives only to lists."""
    torch.save({"e": argparse.Namespace()}, tmp_path / "x.pt")
    torch.save({"w": torch.ones(2), "d": collections.deque([1])}, tmp_path / "y.pt")
    with pytest.raises(FileError, match=r"it needs code \(collections.deque\).*safe_globals"):
        dlx.open(tmp_path / "y.pt")
    with pytest.raises(FileError, match=r"it needs code \(argparse.Namespace\).*safe_globals"):
        dlx.open(tmp_path / "x.pt")


def test_what_the_user_trusts_is_read(tmp_path):
    """Inside `safe_globals`, as the error says."""
    torch.save({"w": torch.ones(2), "a": argparse.Namespace(a=1)}, tmp_path / "x.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        file = dlx.open(tmp_path / "x.pt", "numpy")
    assert file["a"].a == 1 and file["w"].tolist() == [1, 1]


def test_what_is_refused_is_not_left_allowed(tmp_path):
    """torch.load still refuses the class afterwards."""
    torch.save({"w": torch.ones(2), "a": argparse.Namespace(a=1)}, tmp_path / "x.pt")
    dlx.open(tmp_path / "x.pt")
    assert not any("dlx" in repr(each) for each in torch.serialization.get_safe_globals())
    with pytest.raises(Exception, match=r"argparse\.Namespace"):
        torch.load(tmp_path / "x.pt", weights_only=True)


class Config:
    """A class that weights_only refuses."""


def test_other_threads(tmp_path):
    """Threads that open such a file agree; torch.load in another thread gets no object that dlx refused."""
    torch.save({"w": torch.ones(3), "c": Config()}, path := tmp_path / "x.pt")
    failed, loaded = [], []

    def work():
        for _ in range(40):
            try:
                dlx.open(path)["w"]
            except Exception as error:
                failed.append(error)

    kept = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            with contextlib.suppress(Exception):
                loaded.append(torch.load(path, weights_only=True))
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(kept)
    assert not failed and not loaded


class Named:
    """Pickled as a call of something by its name."""

    def __init__(self, name, *args):
        self.name, self.args = name, args


@pytest.mark.parametrize("name", ["dlx Deferred", " Deferred", "Deferred ", "dlx._registry.generic Deferred"])
def test_no_pickle_makes_a_deferred(tmp_path, name):
    """Its arguments would be the file's."""
    torch.save({"w": torch.ones(2), "e": argparse.Namespace(), "d": "HERE"}, path := tmp_path / "x.pt")
    module, word = name.split(" ")
    call = b"c%s\n%s\n(K\x01K\x02tR" % (module.encode(), word.encode())
    with zipfile.ZipFile(path) as archive:
        parts = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in parts.items():
            if each.endswith("data.pkl"):
                data = data.replace(b"X\x04\x00\x00\x00HERE", call)
                assert call in data
            archive.writestr(each, data)
    try:
        file = dlx.open(path, "numpy")
    except FileError as error:
        assert "weights_only" in str(error)
    else:
        with pytest.raises(ConversionError, match="needs code"):
            file["d"]
