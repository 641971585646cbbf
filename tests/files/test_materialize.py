"""`materialize()` and conversion of a whole file, and of views of any kind, return plain containers for any target."""

import copy
import io
import pickle

import pytest
from support.files.writers import gguf, safetensors

import dlx


def made(np, torch, folder):
    """Write a file of each installed format; return their paths."""
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4, "f4")}
    np.save(folder / "x.npy", arrays["a"])
    np.savez(folder / "x.npz", **arrays)
    np.savez_compressed(folder / "c.npz", **arrays)
    safetensors(folder / "x.safetensors", {"a": ("F32", (2, 3)), "b": ("I64", (4,))})
    (folder / "x.gguf").write_bytes(gguf({"w": (0, (3, 2), bytes(24))}))
    torch.save({key: torch.from_numpy(value) for key, value in arrays.items()}, folder / "flat.pt")
    torch.save(torch.nn.Linear(2, 3).state_dict(), folder / "state.pt")
    nested = {
        "model": {"w": torch.ones(2)},
        "list": [torch.ones(1), (torch.zeros(1), 3)],
        "step": 3,
        "n": torch.Size([2]),
    }
    torch.save(nested, folder / "nested.pt")
    torch.save([torch.ones(2), torch.zeros(3)], folder / "list.pt")
    torch.save(torch.ones(2), folder / "tensor.pt")
    for package in ("h5py", "pyarrow"):
        try:
            library = __import__(package)
        except ImportError:
            continue
        if package == "h5py":
            with library.File(folder / "x.h5", "w") as out:
                out["g/a"], out["b"] = arrays["a"], arrays["b"]
        else:
            table = library.table({"x": [1.0, 2.0], "y": [3, 4]})
            with library.ipc.new_file(str(folder / "x.arrow"), table.schema) as sink:
                sink.write_table(table)
    return sorted(folder.iterdir())


def types_of(tree):
    """Return the types of all containers in a tree."""
    if isinstance(tree, dict):
        return {type(tree)}.union(*map(types_of, tree.values()))
    if isinstance(tree, list | tuple):
        return {type(tree)}.union(*map(types_of, tree))
    return {type(tree)} if dlx._views.base.is_view(tree) or "dlx._files" in type(tree).__module__ else set()


@pytest.mark.parametrize("to", [None, "dlx", "numpy", "torch"])
@pytest.mark.parametrize("way", ["materialize", "convert", "inside", "copy", "lazy", "again"])
def test_what_a_file_becomes(tmp_path, np, torch, to, way):
    """The root is a dict, whether or not anything was converted, and it contains no view."""
    for path in made(np, torch, tmp_path):
        file = dlx.open(path) if to is None else dlx.open(path, to)
        to_name = to or "dlx"
        tree = {
            "materialize": file.materialize,
            "convert": lambda file=file, to=to_name: dlx.convert(file, to=to),
            "inside": lambda file=file, to=to_name: dlx.convert([file], to=to)[0],
            "copy": lambda file=file: copy.deepcopy(file),
            "lazy": lambda file=file, to=to_name: dlx.convert(file, to=to, lazy=True).materialize(),
            "again": lambda file=file, to=to_name: dlx.convert({"x": file}, to=to, lazy=True)["x"].materialize(),
        }[way]()
        assert type(tree) is dict, (path.name, type(tree))
        assert types_of(tree) <= {dict, list, tuple, torch.Size}, (path.name, types_of(tree))
        assert list(tree) == list(file) and tree | {} == {**tree}
        if to == "torch":
            torch.save(tree, io.BytesIO())
        if to in ("torch", "numpy"):
            assert pickle.loads(pickle.dumps(tree)).keys() == copy.deepcopy(tree).keys() == tree.keys()


def test_what_safetensors_saves(tmp_path, np, torch):
    """The state dict of a .pt file is materialized for torch and for numpy."""
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "x.pt")
    for to in ("torch", "numpy"):
        save = pytest.importorskip(f"safetensors.{to}").save_file
        save(dlx.open(tmp_path / "x.pt", to).materialize(), tmp_path / "x.safetensors")
        assert sorted(dlx.open(tmp_path / "x.safetensors")) == ["bias", "weight"]


def test_files_that_other_libraries_opened(tmp_path, np, torch):
    """Files of other libraries become dicts even if their arrays are in the target already; each is read once."""
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    with np.load(tmp_path / "x.npz") as file:
        for tree in (dlx.convert(file, to="numpy"), dlx.convert(file, to="numpy", lazy=True).materialize()):
            assert type(tree) is dict and type(tree["a"]) is np.ndarray
    safe = pytest.importorskip("safetensors")
    safetensors(tmp_path / "x.safetensors", {"a": ("F32", (2, 3))})
    with safe.safe_open(tmp_path / "x.safetensors", "pt") as file:
        for tree in (dlx.convert(file, to="torch"), dlx.convert(file, to="torch", lazy=True).materialize()):
            assert type(tree) is dict and type(tree["a"]) is torch.Tensor


def test_shapes_and_dtypes_are_no_containers(tmp_path, torch):
    """A view returns shapes and dtypes unchanged, since C code accepts only tuples: `torch.zeros(view["size"])`."""
    torch.save({"size": torch.Size([2, 3]), "w": torch.ones(2)}, tmp_path / "x.pt")
    for view in (dlx.open(tmp_path / "x.pt"), dlx.open(tmp_path / "x.pt", "torch")):
        assert type(view["size"]) is torch.Size and torch.zeros(view["size"]).shape == (2, 3)
    plain = {"device": dlx.Device("cpu"), "dtype": dlx.DType("float32"), "size": torch.Size([2])}
    view = dlx.convert(plain, to="torch", lazy=True)
    assert {key: view[key] for key in plain} == plain
    assert all(type(view[key]) is type(value) for key, value in plain.items())
