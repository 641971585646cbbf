"""`dlx inspect`: descriptions of objects and files, folded and with totals if there are many arrays."""

import json
import re
import subprocess
import sys
import textwrap

import pytest
from support.files.writers import npy, safetensors
from support.processes.command import dlx, document, here, refused

import dlx as package
from dlx._support.text import amount, one_line
from dlx.cli.model import Entry, fold, totals


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module `made_here` into the current folder; it is forgotten afterwards."""

    def write(text):
        (tmp_path / "made_here.py").write_text(textwrap.dedent(text))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, "made_here", raising=False)
        return tmp_path

    yield write
    sys.modules.pop("made_here", None)


def one(*words):
    """Inspect a source with one array."""
    (source,) = document("inspect", *words)["sources"]
    (found,) = source["arrays"]
    return found


def test_a_compound_array_is_one_array(module, np):
    """It has one entry with its outcomes, in a dict, twice in one, alone, or with damaged indices."""
    pytest.importorskip("scipy.sparse")
    module(
        """
        import numpy as np
        import scipy.sparse as sparse
        alone = sparse.eye(3, format="csr")
        tree = {"x": sparse.eye(3, format="coo"), "z": np.ones(3), "bad": sparse.eye(3, format="csr"), "text": "y"}
        tree["bad"].indices[0] = 7
        tree["again"] = tree["x"]
        """
    )
    assert one("made_here:alone", "--to", "none")["shape"] == [3, 3]
    (source,) = document("inspect", "made_here:tree", "--to", "numpy,scipy")["sources"]
    arrays = {each["path"]: each for each in source["arrays"]}
    assert [*arrays] == ["['x']", "['z']", "['bad']"] and "1 value of other types" in source["notes"]
    assert arrays["['x']"]["notes"] == ["coo: data, coords, shape", "in 2 places"]
    outcomes = {name: [each["outcome"] for each in found["targets"]] for name, found in arrays.items()}
    assert outcomes["['x']"] == ["refused", "same"] and outcomes["['bad']"][0] == "refused"


def test_an_array_of_numpy(module, np):
    """The output has all facts of `describe`, the capsule, and the plan for each target."""
    module("import numpy; x = numpy.zeros((4, 6), 'f8')[::-1, ::2]; x.flags.writeable = False")
    found = one("made_here:x", "--to", "dlx,numpy")
    assert (found["type"], found["dtype"], found["dlpack_dtype"]) == ("numpy.ndarray", "float64", [2, 64, 1])
    assert (found["shape"], found["strides"], found["nbytes"]) == ([4, 3], [-6, 2], 96)
    assert (found["device"], found["readonly"], found["layout"]) == ("cpu", True, "strided")
    assert found["address"] % found["alignment"] == 0
    assert "__dlpack__" in found["protocols"]
    assert [(each["target"], each["outcome"]) for each in found["targets"]] == [("dlx", "shared"), ("numpy", "same")]


@pytest.mark.numpy("2.1")
def test_the_capsule_of_an_array(module, np):
    """Name, version and flags are shown; the capsule is released (the fixture no_leaks counts)."""
    module("import numpy; x = numpy.zeros(3); x.flags.writeable = False; y = numpy.zeros(3); z = numpy.array(['a'])")
    assert one("made_here:x", "--to", "none")["capsule"]["flags"] == ["READ_ONLY"]
    found = one("made_here:y", "--to", "none")["capsule"]
    assert (found["name"], found["version"][0], found["flags"]) == ("dltensor_versioned", 1, [])
    assert "refused" in one("made_here:z", "--to", "none")["capsule"]


def test_a_tensor_of_torch(module, torch):
    """Torch's lazy bits are shown, and their effect for each target."""
    module("import torch; x = torch.zeros(2, 3, requires_grad=True); z = torch.zeros(3, dtype=torch.complex64).conj()")
    found = one("made_here:x", "--to", "dlx")
    assert "requires_grad" in found["notes"]
    assert "__dlpack_c_exchange_api__" in found["protocols"]
    (target,) = found["targets"]
    assert (target["outcome"], target["error"]) == ("refused", "ConversionError")
    assert "detach=True" in target["fix"]
    found = one("made_here:z", "--to", "dlx")
    assert found["notes"] == ["is_conj"]
    assert found["targets"][0]["outcome"] == "copied"


def test_legacy_and_foreign_objects(module):
    """A legacy capsule has no version and flags; used capsules and refusing producers have their own texts."""
    module(
        """
        import dlx
        tensor = dlx.from_dlpack(dlx.empty((2, 3), "float32"))
        old, new = tensor.__dlpack__(), tensor.__dlpack__(max_version=(1, 0))
        class Shy:
            def __dlpack__(self, **keywords): raise BufferError("not\\nnow")
            def __dlpack_device__(self): return (1, 0)
        shy = Shy()
        text = b"abc"
        """
    )
    assert one("made_here:old", "--to", "none")["capsule"] == {"name": "dltensor", "version": None, "flags": []}
    assert one("made_here:new", "--to", "none")["capsule"]["version"] == [1, 3]
    assert one("made_here:shy", "--to", "none")["capsule"] == {"refused": "BufferError: not"}
    assert one("made_here:text", "--to", "none")["capsule"] == {}


def test_importing_is_said(module):
    """The output and stderr mention that importing an object runs code."""
    folder = module("print('running'); x = b'abc'")
    status, out, err = dlx("inspect", "made_here:x", "--to", "none", cwd=folder)
    assert status == 0
    assert err == "dlx: importing made_here, which runs its code\nrunning\n"
    assert out.startswith("made_here:x  bytes\n") and "imported made_here, which ran its code" in out
    assert document("inspect", "made_here:x")["sources"][0]["notes"] == ["imported made_here, which ran its code"]


def test_an_interrupt_is_no_error(module):
    """Ctrl-C never prints a traceback, and gives the status that a shell expects."""
    folder = module("raise KeyboardInterrupt")
    status, out, err = dlx("inspect", "made_here:x", cwd=folder)
    assert (status, out) == (130, "")
    assert err == "dlx: importing made_here, which runs its code\n"


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("raise RuntimeError('no\\nway')", "made_here:x", "importing made_here failed: RuntimeError: no"),
        ("import sys; sys.exit(3)", "made_here:x", "importing made_here failed: SystemExit: 3"),
        (
            "x = 3",
            "made_here:y",
            "made_here has no y: AttributeError: module 'made_here' has no attribute 'y'. It has x",
        ),
        ("x = {}", "made_here:x[y]", "[y] is neither a number nor a quoted text"),
        (
            "import nothing_here",
            "made_here:x",
            "importing made_here failed: ModuleNotFoundError: No module named 'noth",
        ),
        ("x = {'a': [b'abc']}", "made_here:x['b']", "made_here has no x['b']: KeyError"),
        ("x = 3", "made_here:x", "its type is int, which is not an array and contains none"),
        ("class X:\n    def state_dict(self): raise OSError('no\\nway')\nx = X()", "made_here:x", "OSError: no"),
        (
            "class X:\n    def state_dict(self): return {}\nx = X()",
            "made_here:x",
            "whose state_dict() contains no array",
        ),
        ("x = ['a', {1: None}]", "made_here:x", "its type is list, which is not an array and contains none"),
        (
            "class X:\n    def __getattr__(self, name): raise SystemExit(7)\nx = X()",
            "made_here:x.y",
            "looking up made_here.x.y failed: SystemExit: 7",
        ),
        (
            "class X:\n    __dlpack__ = None\n    def __dlpack_device__(self): raise SystemExit(7)\nx = X()",
            "made_here:x",
            "inspecting the made_here.X failed: SystemExit: 7",
        ),
        ("x = 3", "made_here_not:x", "there is no module 'made_here_not' in this folder"),
    ],
)
def test_objects_that_cannot_be_had(module, text, name, words):
    """Errors are one line, whatever the imported code does."""
    folder = module(text)
    status, out, err = dlx("inspect", name, cwd=folder)
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1 + ("_not" not in name) and "Traceback" not in err


def test_trees(module, np):
    """Arrays in dicts, lists, tuples and cycles are listed by path; other values are counted."""
    module(
        """
        import numpy
        tree = {"a": numpy.zeros(3), "list": [numpy.zeros(2, "f4"), {"odd key": numpy.zeros(1)}], "step": 3}
        tree["raw"] = b"x"
        tree["list"].append(tree)
        """
    )
    found = document("inspect", "made_here:tree")
    (source,) = found["sources"]
    assert [each["path"] for each in source["arrays"]] == ["['a']", "['list'][0]", "['list'][1]['odd key']"]
    assert "2 values of other types" in source["notes"]
    assert one("made_here:tree['list'][0]", "--to", "none")["dtype"] == "float32"
    assert {(each["dtype"], each["arrays"], each["bytes"]) for each in found["totals"]} == {
        ("float64", 2, 32),
        ("float32", 1, 8),
    }


def test_trees_as_convert_walks_them(module, np):
    """Records, views and loops are walked as by `convert`, each array once; refused objects are listed."""
    module(
        """
        import collections, dataclasses, numpy, dlx
        @dataclasses.dataclass
        class Batch:
            x: object
        Pair = collections.namedtuple("Pair", "a b")
        w = numpy.zeros(3)
        tree = {"batch": Batch(w), "pair": Pair(w, [numpy.ones(2)])}
        view = dlx.convert(tree, to="dlx", lazy=True)
        loop = ([],)
        loop[0].append(loop)
        loop[0].append(w)
        class Module:
            def state_dict(self): return {"0.weight": w, "step": 1}
        net = Module()
        """
    )
    for name in ("tree", "view"):
        (source,) = document("inspect", f"made_here:{name}", "--to", "dlx")["sources"]
        found = [(each["path"], each["notes"]) for each in source["arrays"]]
        assert found == [("['batch'].x", ["in 2 places"]), ("['pair'].b[0]", [])]
        assert [each["targets"][0]["outcome"] for each in source["arrays"]] == ["shared", "shared"]
        assert any("a lazy view" in note for note in source["notes"]) == (name == "view")
    assert "converted: nothing yet" in repr(sys.modules["made_here"].view)
    (source,) = document("inspect", "made_here:loop", "--to", "none")["sources"]
    assert [(each["path"], bool(each["refused"])) for each in source["arrays"]] == [("[0][1]", False), ("[0][0]", True)]
    (source,) = document("inspect", "made_here:net", "--to", "none")["sources"]
    assert [each["path"] for each in source["arrays"]] == ["0.weight"]
    assert "its state_dict()" in source["notes"]
    plans = document("plan", "made_here:view", "--to", "dlx")["plans"]
    assert [each["path"] for each in plans[0]["arrays"]] == ["['batch'].x", "['pair'].b[0]"]


def test_large_trees_are_folded(tmp_path):
    """Layer numbers become #, common ones stay; --all and JSON have every array."""
    tensors = {f"model.layers.{i}.w": ("BF16", (2, 2)) for i in range(40)} | {"model.0.embed": ("F32", (3,))}
    path = safetensors(tmp_path / "x.safetensors", tensors)
    _, out = here("inspect", path)
    rows = [line.split() for line in out.splitlines()]
    assert ["model.layers.#.w", "×40", "bfloat16", "[2,", "2]", "320", "B"] in rows
    assert ["model.0.embed", "float32", "[3]", "12", "B"] in rows
    assert ["total", "41", "332", "B"] in rows
    _, out = here("inspect", path, "--all")
    assert sum("model.layers." in line for line in out.splitlines()) == 40
    assert len(document("inspect", path)["sources"][0]["arrays"]) == 41


def test_long_lists_are_cut(tmp_path):
    """If folding does not help, most rows are left out with a note; totals include them."""
    path = safetensors(tmp_path / "x.safetensors", {f"w{i}x": ("F32", (i,)) for i in range(100)})
    _, out = here("inspect", path)
    assert "… 40 more rows: --all shows them" in out
    assert out.splitlines()[0].endswith(".safetensors, 100 arrays, file of " + amount(path.stat().st_size))


def test_targets_of_files(tmp_path):
    """No targets by default; with --to, the outcomes of `dlx plan`."""
    path = tmp_path / "x.npy"
    path.write_bytes(npy("<f4", (2, 3), bytes(24)))
    assert one(path)["targets"] == []
    assert [each["outcome"] for each in one(path, "--to", "dlx,tvm_ffi")["targets"]] == ["same", "copied"]
    assert "unknown target 'nothing'" in refused("inspect", path, "--to", "nothing")


def test_several_sources_are_summed_up(tmp_path):
    """Each source is shown, then the totals."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.npy").write_bytes(npy("<f4", (2, 3), bytes(24)))
    _, out = here("inspect", tmp_path / "a.npy", tmp_path / "b.npy")
    assert "in all  2 sources" in out
    (total,) = document("inspect", tmp_path / "a.npy", tmp_path / "b.npy")["totals"]
    assert (total["arrays"], total["bytes"]) == (2, 48)


def test_folding():
    """Only separate numbers are folded, and only between otherwise equal entries."""

    def entry(path, shape=(2,)):
        return Entry(path, package.DType("float32"), "F32", shape, 8)

    paths = ["a.0.conv1.w", "a.1.conv1.w", "a.1.conv2.w", "b[0]", "b[1]"]
    folded = {each.path: len(each.entries) for each in fold([*map(entry, paths), entry("b[2]", (3,))])}
    assert folded == {"a.#.conv1.w": 2, "a.1.conv2.w": 1, "b[#]": 2, "b[2]": 1}
    assert totals(map(entry, paths)) == [("float32", "file", 5, 40)]


def test_texts():
    """Sizes have suitable units; text stays on its line."""
    assert [amount(n) for n in (0, 1023, 1024, 1 << 20, (1 << 20) - 1, 100 << 30, None)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.0 MiB", "100.0 GiB", "?",
    ]  # fmt: skip
    assert amount(10**30).endswith("EiB")
    assert one_line("a\nb\x1b\u202e é") == "a\\nb\\x1b\\u202e é"
    assert one_line("x" * 500, 10) == "xxxxxxxxx…"


# ---- several sources -------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Enter a folder with good and bad files."""
    (tmp_path / "folder").mkdir()
    for name in ("a.npy", "b1.npy", "folder/c.npy", "folder/d.npy", "folder/notes.txt"):
        (tmp_path / name).write_bytes(npy("<f4", (2,), bytes(8)))
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [["inspect"], ["plan", "--to", "dlx"]])
def test_one_bad_file_spoils_no_other(shelf, capsys, command):
    """Good files are shown, errors are on stderr, and the status is 2."""
    status, out = here(*command, "bad.npy", "a.npy", "none.npy", "folder")
    err = capsys.readouterr().err
    assert status == 2 and [name for name in ("a.npy", "folder/c.npy", "folder/d.npy") if name not in out] == []
    first, second = err.splitlines()
    assert first.startswith(f"dlx {command[0]}: bad.npy: it is truncated") and "none.npy: no such file" in second


def test_json_has_what_was_wrong(shelf, capsys):
    """The key ``errors`` is next to the sources if there were errors."""
    status, out = here("inspect", "a.npy", "bad.npy", "--json")
    found = json.loads(out)
    assert status == 2 and [each["name"] for each in found["sources"]] == ["a.npy"]
    assert [each["kind"] for each in found["errors"]] == ["BadInput"] and "bad.npy" in found["errors"][0]["message"]
    assert "errors" not in document("inspect", "a.npy")


def test_folders_and_globs(shelf):
    """All supported files are listed by name; a glob that the shell did not expand is expanded."""
    names = lambda *words: [each["name"] for each in document("inspect", *words)["sources"]]  # noqa: E731
    assert names("folder") == ["folder/c.npy", "folder/d.npy"]
    assert names("[a]*.npy") == ["a.npy"]
    assert names("b?.npy", "b[0-9].npy", "fold*", "**/c.npy") == ["b1.npy", "b1.npy", *names("folder"), "folder/c.npy"]
    assert names("float32[3,4]") == ["float32[3,4]"]
    safetensors(shelf / "folder" / "x.safetensors", {"w": ("F32", (2,))})
    assert len(names("folder")) == 3


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("none*.npy", "no file matches this pattern"),
        ("https://host.org/a.npy", "Download the file first, for example with curl"),
        ("s3://bucket/a.npy", "Download the file first"),
        ("empty", "none of the 1 files in this folder"),
        ("model.onnx", "an ONNX model, a program with its weights. Read its weights: onnx.numpy_helper.to_array"),
        ("two.zarr", "(needs|by) zarr|zarr cannot read it"),
        ("three.zarr", "(needs|by) zarr|zarr cannot read it"),
    ],
)
def test_what_dlx_does_not_read_is_named(shelf, capsys, word, said):
    """The error has a fix."""
    (shelf / "model.onnx").write_bytes(b"\x08\x07\x12\x07pytorch")
    for folder, name in (("empty", "x.txt"), ("two.zarr", ".zgroup"), ("three.zarr", "zarr.json")):
        (shelf / folder).mkdir()
        (shelf / folder / name).write_text("{")
    assert here("inspect", word) == (2, "")
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("through", ["a pipe", "a file"])
def test_stdin(shelf, through):
    """``-`` is recognized by its content."""
    content = (shelf / "a.npy").read_bytes()
    words = [sys.executable, "-m", "dlx", "inspect", "-", "--to", "dlx"]
    with (shelf / "a.npy").open("rb") as file:
        given = {"input": content} if through == "a pipe" else {"stdin": file}
        done = subprocess.run(words, capture_output=True, check=True, **given)
    assert done.stdout.startswith(b"-  .npy\n") and b"dlx  same" in done.stdout and done.stderr == b""
    done = subprocess.run(words, capture_output=True, input=content[:20], check=False)
    assert done.returncode == 2 and done.stderr.startswith(b"dlx inspect: -: it is truncated")
