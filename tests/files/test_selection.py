"""`dlx.open(only=, skip=)`: a part of a file, for every format."""

import importlib

import pytest
from support.files.writers import safetensors, shards
from support.processes.command import document

import dlx
from dlx.errors import FileError

NAMES = ["enc.w", "enc.b", "dec.w", "head"]


@pytest.fixture(params=["safetensors", "shards", "npz", "h5", "arrow", "pt"])
def path(request, tmp_path):
    """Write a file with the four `NAMES`."""
    kind = request.param
    if kind in ("safetensors", "shards"):
        tensors = dict.fromkeys(NAMES, ("F32", (4,)))
        return shards(tmp_path, tensors) if kind == "shards" else safetensors(tmp_path / "x.safetensors", tensors)
    np = pytest.importorskip("numpy")
    arrays = {name: np.ones(4, "f4") for name in NAMES}
    path = tmp_path / f"x.{kind}"
    if kind == "h5":
        with pytest.importorskip("h5py").File(path, "w") as file:
            file.update(arrays)
    elif kind == "pt":
        torch = pytest.importorskip("torch")
        torch.save({name: torch.ones(4) for name in NAMES}, path)
    else:
        if kind == "arrow":
            pytest.importorskip("pyarrow")
        dlx.save(arrays, path)
    return path


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"only": "head"}, {"head"}),
        ({"only": "enc.*"}, {"enc.w", "enc.b"}),
        ({"only": ["*.w", "head"]}, {"enc.w", "dec.w", "head"}),
        ({"skip": "*.w"}, {"enc.b", "head"}),
        ({"only": "enc.*", "skip": ["enc.b"]}, {"enc.w"}),
        ({"only": lambda name: name.endswith("b")}, {"enc.b"}),
        ({"skip": lambda name: True}, set()),
        ({"only": ()}, set()),
    ],
)
def test_what_is_selected(path, options, kept):
    """The others are not members, and cannot be read."""
    with dlx.open(path, **options) as file:
        assert {*file} == kept and len(file) == len(kept)
        assert all(each.shape == (4,) for each in file.values())
        with pytest.raises(KeyError):
            file[next(iter({*NAMES} - kept))]
        assert file.materialize().keys() == kept


@pytest.mark.parametrize("option", ["only", "skip"])
@pytest.mark.parametrize("wrong", ["haed", "x*", ["head", "haed"]])
def test_an_unknown_name_raises(path, option, wrong):
    """The error names the option and a name that is close."""
    with pytest.raises(FileError, match=rf"cannot open .*no member '(haed|x\*)', which '{option}' names"):
        dlx.open(path, **{option: wrong})
    if wrong == "haed":
        with pytest.raises(FileError, match=r"Did you mean 'head'\?"):
            dlx.open(path, **{option: wrong})
    for wrong_type in (3, [3], 1.5, b"head"):
        with pytest.raises(TypeError, match=f"{option} must be a name, a pattern"):
            dlx.open(path, **{option: wrong_type})


def test_a_name_with_special_characters_is_a_name_first(tmp_path):
    """A member 'a[0]' is not taken for a pattern."""
    file = safetensors(tmp_path / "x.safetensors", {"a[0]": ("F32", (4,)), "a0": ("F32", (4,))})
    assert [*dlx.open(file, only="a[0]")] == ["a[0]"]
    assert [*dlx.open(file, only="a?")] == ["a0"]


def test_paths_in_a_checkpoint(tmp_path):
    """A dict's name selects all in it; lists are selected as a whole."""
    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else pytest.skip("torch")
    one = torch.ones(2)
    tree = {"model": {"w": one, "in": {"b": one}}, "optim": {"state": [one, one], "lr": 0.1}, "epoch": 3}
    torch.save(tree, tmp_path / "x.pt")

    def names(**options):
        def below(found, at=""):
            for key, value in found.items():
                yield from below(value, f"{at}{key}.") if hasattr(value, "items") else [f"{at}{key}"]

        return [*below(dlx.open(tmp_path / "x.pt", "torch", **options))]

    assert names(only="model") == ["model.w", "model.in.b"]
    assert names(only="model.*", skip="model.in") == ["model.w"]
    assert names(only=["model.in.b", "optim.state"]) == ["model.in.b", "optim.state"]
    assert names(skip="model") == ["optim.state", "optim.lr", "epoch"]
    assert names(skip=["*.w", "optim"]) == ["model.in.b", "epoch"]


def test_the_command_writes_a_part(tmp_path, capsys):
    """`dlx convert --only` and `--skip`, also for a file with a member that no format stores."""
    np = pytest.importorskip("numpy")
    from support.processes.command import here

    np.savez(tmp_path / "x.npz", w=np.ones(2), b=np.zeros(2), o=np.array([None]), t=np.array(["x"]))
    assert here("convert", tmp_path / "x.npz", tmp_path / "y.npz")[0] == 2
    assert here("convert", tmp_path / "x.npz", tmp_path / "y.npz", "--skip", "o", "--skip", "t")[0] == 0
    assert {*np.load(tmp_path / "y.npz")} == {"w", "b"}
    assert here("convert", tmp_path / "x.npz", tmp_path / "z.npz", "--only", "[wb]", "--skip", "b")[0] == 0
    assert {*np.load(tmp_path / "z.npz")} == {"w"}
    capsys.readouterr()
    assert here("convert", tmp_path / "x.npz", tmp_path / "q.npz", "--only", "q")[0] == 2
    assert "no member 'q'" in capsys.readouterr().err


def fields(value):
    """Return the values of all fields of a record, by their paths."""
    return {
        ".".join(filter(None, (name, at))): found
        for name, inner in value.items()
        for at, found in (fields(inner) if not hasattr(inner, "shape") else {"": inner}).items()
    }


@pytest.mark.parametrize("kind", ["npz", "h5"])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"only": "t.b"}, {"b"}),
        ({"only": "t.in.*"}, {"in.x", "in.y"}),
        ({"only": "t.in", "skip": "t.in.x"}, {"in.y"}),
        ({"skip": ["t.b", "t.in.y"]}, {"a", "in.x"}),
        ({"only": "t"}, {"a", "b", "in.x", "in.y"}),
        ({"only": lambda name: name.endswith((".b", ".x"))}, {"b", "in.x"}),
    ],
)
def test_fields_of_records(tmp_path, kind, mapped, options, kept):
    """Fields are named by their paths, and a record's name selects all of them."""
    np = pytest.importorskip("numpy")
    records = np.zeros(3, [("a", "<f4"), ("b", "<i4"), ("in", [("x", ">i2"), ("y", "<f8")])])
    records["b"], records["in"]["x"], records["in"]["y"] = [1, 2, 3], [4, 5, 6], [7, 8, 9]
    path = tmp_path / f"x.{kind}"
    if kind == "h5":
        with pytest.importorskip("h5py").File(path, "w") as file:
            file["t"] = records
    else:
        np.savez(path, t=records)
    with dlx.open(path, "numpy", mmap=mapped, **options) as file:
        found = fields(file["t"])
    assert found.keys() == kept
    for name, value in found.items():
        outer, _, inner = name.rpartition(".")
        assert value.tolist() == (records[outer] if outer else records)[inner].tolist()


@pytest.mark.parametrize("kind", ["npy", "npz", "h5", "pt", "safetensors"])
@pytest.mark.parametrize("command", [["inspect"], ["plan", "--to", "dlx"]])
@pytest.mark.parametrize("option", ["only", "skip"])
def test_commands_select_as_open_does(tmp_path, kind, command, option):
    """By every name in the file, names of records and dicts included."""
    np = pytest.importorskip("numpy")
    records = np.zeros(3, [("a", "<f4"), ("in", [("x", ">i2"), ("y.z", "<f8")])])
    path = tmp_path / f"x.{kind}"
    known = ["t", "t.a", "t.in", "t.in.x", "t.in.y.z", "w.v"]
    if kind == "npy":
        np.save(path, records)
        known = ["", "a", "in", "in.x", "in.y.z"]
    elif kind == "npz":
        np.savez(path, **{"t": records, "w.v": np.ones(2)})
    elif kind == "h5":
        with pytest.importorskip("h5py").File(path, "w") as file:
            file["t"], file["w.v"] = records, np.ones(2)
    elif kind == "pt":
        torch = pytest.importorskip("torch")
        one = torch.ones(3)
        torch.save({"t": {"a": one, "in": {"x": one * 2, "y.z": one + 1}}, "w.v": one + 2}, path)
    else:
        known = ["t", "t.a", "w.v"]
        safetensors(path, dict.fromkeys(known, ("F32", (4,))))
    for name in known[command != ["inspect"] :]:
        with dlx.open(path, "numpy", **{option: name}) as file:
            kept = fields(file)
        if not kept:
            continue
        (found,) = document(*command, path, f"--{option}", name)["sources" if command == ["inspect"] else "plans"]
        assert {each["path"] for each in found["arrays"]} == kept.keys()


def test_fields_that_are_missing_or_alone(tmp_path):
    """A name that no field has is an error, as for members; the fields of a .npy file have no prefix."""
    np = pytest.importorskip("numpy")
    np.savez(path := tmp_path / "x.npz", t=np.zeros(2, "f4,f4"), w=np.ones(3))
    with pytest.raises(FileError, match=r"no member 't\.f9', which 'only' names"):
        dlx.open(path, only="t.f9")
    assert [*dlx.open(path, only=["t.f1", "w"])["t"]] == ["f1"]
    assert [*dlx.open(path, skip="t")] == ["w"]
    np.save(path := tmp_path / "x.npy", np.array([(1, 2)], "i4,i4"))
    (record,) = dlx.open(path, "numpy", only="f1").values()
    assert {name: each.tolist() for name, each in record.items()} == {"f1": [2]}
