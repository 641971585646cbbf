"""`dlx.save`: what it writes is read by the formats' own libraries; a file is replaced completely or not at all."""

import importlib
import io
import os
import subprocess
import sys
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files.samples import SHAPES, TORCH

import dlx
from dlx._api.save import collect_items, write_items
from dlx._engine.casting import read_casts
from dlx._files.atomic import replace_file
from dlx._files.writing import Item
from dlx.errors import AdapterNotFoundError, ConversionError, DTypeError, FileError

np = pytest.importorskip("numpy")

NUMPY = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "f2", "f4", "f8")


def load(path):
    """Return the arrays of a file, read by the format's own library."""
    if path.suffix == ".npy":
        return {path.stem: np.load(path)}
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".safetensors":
        return importlib.import_module("safetensors.numpy").load_file(path)
    return {
        name: np.array(column.to_pylist())
        for name, column in zip(*_columns(importlib.import_module("pyarrow"), path), strict=True)
    }


def _columns(pa, path):
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    return table.column_names, table.columns


@pytest.mark.parametrize("kind", [".npy", ".npz", ".safetensors", ".arrow"])
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "dlx"])
def test_every_framework_is_written_to_every_format(tmp_path, kind, framework):
    """The formats' own libraries read the values, dtypes and shapes."""
    pytest.importorskip(framework)
    if kind in (".safetensors", ".arrow"):
        pytest.importorskip(kind[1:].replace("arrow", "pyarrow"))
    arrays = {d: (np.arange(24).reshape(6, 2, 2) % 2).astype(d) for d in NUMPY if "64" not in d and d != "f8"}
    arrays = {"float32": arrays["f4"]} if kind == ".npy" else arrays
    made = dlx.convert(arrays, to=framework)
    dlx.save(made["float32"] if kind == ".npy" else made, path := tmp_path / f"float32{kind}")
    found = load(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].tolist() == array.tolist()
        assert kind == ".arrow" or (found[name].dtype == array.dtype and found[name].shape == array.shape), name
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_torch_reads_what_torch_had(tmp_path_factory, data):
    """bfloat16, float8, strided and empty tensors survive a .safetensors file, as safetensors.torch reads it."""
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    path = tmp_path_factory.mktemp("save") / "x.safetensors"
    tree = {}
    for i in range(data.draw(st.integers(1, 4))):
        tensor = torch.rand(data.draw(st.sampled_from(SHAPES))).to(getattr(torch, data.draw(st.sampled_from(TORCH))))
        tree[f"t{i}"] = tensor.t() if tensor.ndim == 2 and data.draw(st.booleans()) else tensor
    dlx.save(tree, path)
    found = load_file(path)
    assert found.keys() == tree.keys()
    for name, tensor in tree.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bytes(found[name].reshape(-1).contiguous().view(torch.uint8)) == bytes(
            tensor.contiguous().reshape(-1).view(torch.uint8)
        )


def test_nested_trees_are_named_by_their_paths(tmp_path):
    """An array without a name is called like the file."""
    one = np.ones(2)
    dlx.save({"a": {"b": one, 3: one + 1}, "l": [one + 2, (one + 3,)]}, tmp_path / "x.npz")
    assert {*np.load(tmp_path / "x.npz")} == {"a.b", "a[3]", "l[0]", "l[1][0]"}
    dlx.save(one, tmp_path / "y.npz")
    assert [*np.load(tmp_path / "y.npz")] == ["y"]
    dlx.save(one, bytes(tmp_path / "z"), format="npy")
    with (tmp_path / "z").open("rb") as file:
        assert np.load(file).tolist() == [1, 1]


def test_an_opened_file_is_saved_with_its_metadata(tmp_path):
    """A part of it, too; the file may be the one that is written."""
    pytest.importorskip("safetensors")
    dlx.save({"a": np.ones(2), "b": np.zeros(3)}, tmp_path / "x.safetensors", metadata={"format": "np"})
    dlx.save(dlx.open(tmp_path / "x.safetensors", only="b"), tmp_path / "x.safetensors")
    with dlx.open(tmp_path / "x.safetensors") as found:
        assert [*found] == ["b"] and found.metadata == {"format": "np"}
    with importlib.import_module("safetensors").safe_open(tmp_path / "x.safetensors", "np") as theirs:
        assert theirs.metadata() == {"format": "np"} and theirs.get_tensor("b").tolist() == [0, 0, 0]


def test_a_view_with_a_dtype_is_saved_with_it(tmp_path):
    """`dlx.open(dtype=)` and a lazy view name the change."""
    dlx.save({"a": np.ones(2, "f4"), "i": np.ones(2, "i4")}, tmp_path / "x.npz")
    dlx.save(dlx.open(tmp_path / "x.npz", dtype="float16"), tmp_path / "y.npz")
    assert {name: str(each.dtype) for name, each in np.load(tmp_path / "y.npz").items()} == {
        "a": "float16",
        "i": "int32",
    }


@pytest.mark.parametrize("make", [lambda view: {"m": view}, lambda view: [{"m": (view,)}]])
def test_a_view_with_a_dtype_inside_of_a_tree(tmp_path, make):
    """It keeps the dtype; arrays outside of the view keep theirs."""
    dlx.save({"a": np.ones(2, "f4"), "in": {"i": np.ones(2, "i4"), "b": np.ones(3, "f8")}}, tmp_path / "x.npz")
    lazy = dlx.convert({"a": np.ones(2), "in": [np.ones(3)]}, to="numpy", lazy=True, dtype="float32")
    tree = {"file": make(dlx.open(tmp_path / "x.npz", dtype="float16")), "lazy": make(lazy), "other": np.ones(1)}
    dlx.save(tree, tmp_path / "y.npz")
    found = {name: str(each.dtype) for name, each in np.load(tmp_path / "y.npz").items()}
    assert sorted(found.values()) == ["float16"] * 2 + ["float32"] * 2 + ["float64", "int32"] and len(found) == 6
    assert found["other"] == "float64"


@pytest.mark.parametrize("library", ["pyarrow", "chunked", "nested", "polars", "pandas", "awkward", "table", "view"])
def test_a_slice_of_a_list_column_is_saved_as_its_parts(tmp_path, library):
    """The offsets begin at 0, and the values are those of the slice, as in `dlx.parts`."""
    pa, rows = pytest.importorskip("pyarrow"), [[1, 2], [3], [4, 5]]
    if library in ("polars", "pandas", "awkward"):
        module = pytest.importorskip(library)
    make = {
        "pyarrow": lambda: pa.array(rows)[1:],
        "chunked": lambda: pa.chunked_array([[[9]], rows])[2:],
        "nested": lambda: pa.array([[[9]], [[1], [2, 3]]])[1:],
        "polars": lambda: module.Series(rows)[1:],
        "pandas": lambda: module.Series(pa.array(rows), dtype=module.ArrowDtype(pa.list_(pa.int64())))[1:],
        "awkward": lambda: module.Array(rows)[1:],
        "table": lambda: pa.table({"x": rows}).slice(1),
        "view": lambda: dlx.convert({"x": pa.array(rows)[1:]}, to="numpy", lazy=True),
    }
    whole = make[library]()
    dlx.save({"r": whole}, tmp_path / "r.npz")
    with dlx.open(tmp_path / "r.npz", to="numpy") as file:
        found = {name: array.tolist() for name, array in file.items()}
    parts = dlx.parts(make["pyarrow"]() if library in ("table", "view") else whole, to="numpy")
    if library == "nested":
        assert found["r.offsets"] == [0, 2] and found["r.values.offsets"] == [0, 1, 3]
        assert found["r.values.values"] == [1, 2, 3]
    else:
        assert [*found.values()] == [parts["values"].tolist(), parts["offsets"].tolist()] == [[3, 4, 5], [0, 1, 3]]


def test_an_empty_name_is_kept_among_others(tmp_path):
    """Only a single array without a name is called like the file."""
    pytest.importorskip("safetensors")
    for kind in (".npz", ".safetensors", ".arrow"):
        if kind == ".arrow":
            pytest.importorskip("pyarrow")
        dlx.save({"": np.ones(2), "b": np.zeros(2)}, path := tmp_path / f"x{kind}")
        assert load(path)[""].tolist() == [1, 1]
        dlx.save(dlx.open(path), other := tmp_path / f"y{kind}")
        assert {*load(other)} == {"", "b"}
    dlx.save(dlx.open(tmp_path / "x.npz", only=""), tmp_path / "z.npz")
    assert [*np.load(tmp_path / "z.npz")] == ["z"]


@pytest.mark.parametrize(
    ("framework", "name"),
    [("numpy", "float4_e2m1fn"), ("numpy", "float6_e2m3fn"), ("numpy", "float6_e3m2fn"), ("jax", "float4_e2m1fn")],
)
def test_elements_below_a_byte_are_packed(tmp_path, framework, name):
    """In numpy and jax each has its own byte; the format packs them, and dlx reads the same values."""
    ml_dtypes, safetensors = pytest.importorskip("ml_dtypes"), pytest.importorskip("safetensors")
    array = (np.arange(24) % 8).astype(getattr(ml_dtypes, name)).reshape(2, 3, 4)
    if framework == "jax":
        jnp = pytest.importorskip("jax.numpy")
        tree = {"a": jnp.asarray(array), "t": jnp.asarray(array.T), "b": jnp.ones(3, "u1")}
    else:
        tree = {"a": array, "t": array.copy().T, "b": np.ones(3, "u1")}
    path = tmp_path / "x.safetensors"
    dlx.save(tree, path)
    sizes = {key: len(each["data"]) for key, each in safetensors.deserialize(path.read_bytes())}
    bits = 4 if "4" in name[:6] else 6
    assert sizes == {"a": 24 * bits // 8, "t": 24 * bits // 8, "b": 3}
    for _ in range(2):
        found = dlx.open(path, to="numpy")
        assert found["a"].tolist() == array.tolist() and found["t"].tolist() == array.T.tolist()
        dlx.save(found, path)
    with pytest.raises(FileError, match="the 3 elements of 'a' do not fill whole bytes"):
        dlx.save({"a": array[0, :, 0]}, path)
    assert dlx.open(path)["a"].shape == (2, 3, 4)


def test_more_names_than_readers_allow(tmp_path, monkeypatch):
    """A file that dlx or the format's own library refuses is not written."""
    monkeypatch.setattr("dlx._files.writing.MAX_MEMBERS", 3)
    with pytest.raises(FileError, match=r"dlx\.open reads \.npz files of at most 3 arrays and 16\.0 MiB of names"):
        dlx.save({str(i): np.ones(1) for i in range(4)}, tmp_path / "x.npz")
    monkeypatch.setattr("dlx._files.writing.MAX_DIRECTORY", 1000)
    with pytest.raises(FileError, match="at most 3 arrays and 1000 B of names"):
        dlx.save({"n" * 1000: np.ones(1)}, tmp_path / "x.npz")
    tree, text = {"a": np.ones(1)}, {"k": "v" * 100_000_000}  # the limit of the safetensors library
    with pytest.raises(FileError, match=r"at most 100,000,000 bytes, and this one would have 100,000,"):
        dlx.save(tree, tmp_path / "x.safetensors", metadata=text)
    assert not [*tmp_path.iterdir()]


def test_arrow_keeps_metadata(tmp_path):
    """Pyarrow and dlx read it."""
    pa = pytest.importorskip("pyarrow")
    dlx.save({"a": np.ones(2)}, tmp_path / "x.arrow", metadata={"k": "text"})
    with pa.memory_map(str(tmp_path / "x.arrow")) as file:
        assert pa.ipc.open_file(file).schema.metadata == {b"k": b"text"}
    assert dlx.open(tmp_path / "x.arrow").metadata == {"k": "text"}


def twice():
    """Return a list in two places."""
    arrays = [np.ones(2)]
    return {"a": arrays, "b": arrays}


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: {"a": 1}, FileError, r"cannot save dict to '\.safetensors': it contains no array"),
        (dict, FileError, "it contains no array"),
        (lambda: 3, AdapterNotFoundError, "cannot save int"),
        (lambda: {"a": np.ones(2), "n": None}, FileError, "'n' is not an array: it is of the type NoneType"),
        (lambda: {"a": np.array(["x"])}, ConversionError, r"cannot save numpy.ndarray .* at obj\['a'\]"),
        (lambda: {"a": np.ones(2, "c16")}, DTypeError, r"cannot store complex128 \('a'\)"),
        (lambda: {"a.b": np.ones(2), "a": {"b": np.zeros(2)}}, FileError, "two arrays would be named 'a.b'"),
        (lambda: {"__metadata__": np.ones(2)}, FileError, "reserves"),
        (
            twice,
            ConversionError,
            r"at obj\['b'\].* the same container as obj\['a'\]",
        ),
    ],
)
def test_refusals_name_the_array_and_write_nothing(tmp_path, make, error, match):
    """An existing file stays as it was."""
    (tmp_path / "x.safetensors").write_text("old")
    with pytest.raises((error, FileError), match=match) as caught:
        dlx.save(make(), tmp_path / "x.safetensors")
    assert isinstance(caught.value, error) and caught.value.action == "save"
    assert (tmp_path / "x.safetensors").read_text() == "old" and len([*tmp_path.iterdir()]) == 1


def test_calls_that_are_wrong(tmp_path):
    """Formats, metadata and folders."""
    for options in ({"format": "zip"}, {"format": 3}, {}):
        with pytest.raises(FileError, match=r"unknown format .* \(supported: \.npy"):
            dlx.save(np.ones(2), tmp_path / "x.zip", **options)
    with pytest.raises(FileError, match="cannot store metadata"):
        dlx.save(np.ones(2), tmp_path / "x.npz", metadata={"a": "b"})
    for path in (io.BytesIO(), 3, None):
        with pytest.raises(TypeError, match=r"path must be a path, found .*Save to a path"):
            dlx.save({"a": dlx.empty(3, "uint8")}, path)
    for metadata in (3, "text", [("a",)], {"a": 1}):
        with pytest.raises(TypeError, match="metadata must map text to text"):
            dlx.save(np.ones(2), tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(FileError, match=r"the folder .* does not exist"):
        dlx.save(np.ones(2), tmp_path / "none" / "x.npz")
    assert not [*tmp_path.iterdir()]


def tied():
    """Yield trees in which 'a' and 'z' have memory in common."""
    x = np.arange(12.0).reshape(3, 4)
    yield {"a": x, "z": x}
    yield {"a": x, "m": np.ones(2), "z": x.T}
    yield {"a": x[:2], "z": x[1:]}
    yield {"a": x[:, ::2], "z": x[1]}
    yield {"a": x, "z": x[2, 3:]}
    swapped = x.astype(">f8")  # copied
    yield {"a": swapped, "m": np.ones(2), "z": swapped[1:]}


@pytest.mark.parametrize("tree", [*tied()], ids=range(6))
def test_tied_arrays_are_named_or_written_twice(tmp_path, tree):
    """The .safetensors format forbids them; the others store both."""
    with pytest.raises(FileError, match="'a' and 'z' share memory"):
        dlx.save(tree, tmp_path / "x.safetensors")
    assert not [*tmp_path.iterdir()]
    dlx.save(tree, tmp_path / "x.npz")
    assert {name: each.tolist() for name, each in np.load(tmp_path / "x.npz").items()} == {
        name: each.tolist() for name, each in tree.items()
    }


def test_parts_without_common_memory_are_not_tied(tmp_path):
    """Also if their ranges of addresses overlap."""
    x = np.arange(12.0)
    dlx.save({"a": x[::2], "b": x[1::2], "c": x[:0]}, tmp_path / "x.safetensors")
    assert dlx.open(tmp_path / "x.safetensors", "numpy")["b"].tolist() == x[1::2].tolist()


KILLED = """
import os, sys
import numpy as np, dlx
dlx.save({"a": np.ones(2)}, sys.argv[1])
real = os.replace
os.fchmod = lambda *_: os.kill(os.getpid(), 9)
dlx.save({"a": np.zeros(1 << 20)}, sys.argv[1])
"""


def test_a_killed_process_leaves_the_old_file(tmp_path):
    """The next call replaces the partial file."""
    path = tmp_path / "x.npz"
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert done.returncode == -9 and np.load(path)["a"].tolist() == [1, 1]
    dlx.save({"a": np.zeros(3)}, path)
    assert os.listdir(tmp_path) == ["x.npz"] and np.load(path)["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("place", ["dlx._files.atomic._lock_partial", "zipfile.ZipFile.open", "os.replace"])
def test_an_interrupt_leaves_the_old_file_alone(tmp_path, monkeypatch, place):
    """It stays a KeyboardInterrupt, and no partial file stays, even if it comes before the file is locked."""
    path, opened = tmp_path / "x.npz", []
    dlx.save({"a": np.ones(2)}, path)
    real = zipfile.ZipFile.open

    def interrupt(*args, **options):
        if place == "zipfile.ZipFile.open":
            opened.append(real(*args, **options))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as caught:
        patched.setattr(place, interrupt)
        dlx.save({"a": np.zeros(3)}, path)
    assert type(caught.value) is KeyboardInterrupt and caught.value.__context__ is None
    assert os.listdir(tmp_path) == ["x.npz"] and np.load(path)["a"].tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["scipy", "torch"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "arrow"])
def test_sparse_arrays_are_refused_by_name(tmp_path, kind, nested, suffix):
    """Both ways out work: the dense array, and the arrays of `dlx.parts`."""
    if kind == "scipy":
        sparse = pytest.importorskip("scipy.sparse").csr_array(np.eye(3))
    else:
        sparse = pytest.importorskip("torch").eye(3).to_sparse()
    path, name = tmp_path / f"x.{suffix}", "in.s" if nested else "x"
    tree = {"in": {"s": sparse}, "w": np.ones(2)} if nested else sparse
    with pytest.raises(
        FileError, match=rf"'{name}' is sparse: .*dlx\.parts\(x\) without 'shape' to .npz or .safetensors, or call \.to"
    ) as caught:
        dlx.save(tree, path)
    assert not path.exists()
    dense = getattr(sparse, caught.value.fix.split("call .")[1].split("(")[0])()
    dlx.save({"s": dense}, path)
    (whole,) = dlx.open(path).values()
    assert np.asarray(whole).tolist() == np.eye(3).tolist()
    found = dlx.parts(sparse)
    shape = found.pop("shape")
    for other in ("npz", "safetensors"):
        dlx.save(found, path.with_suffix(f".{other}"))
        assert {*dlx.open(path.with_suffix(f".{other}"))} == {*found} and tuple(shape) == (3, 3)


RAGGED = {
    "lists": lambda pa: pa.array([[1.5, 2.0], [], [3.0]]),
    "a slice": lambda pa: pa.array([[9], [1, 2], [], [3], [9]])[1:4],
    "chunks": lambda pa: pa.chunked_array([[[1.0]], [[2.0, 3.0], []]]),
    "large": lambda pa: pa.array([[1], [2, 3], []], pa.large_list(pa.int16())),
    "nested": lambda pa: pa.array([[[1.0], []], [], [[2.0, 3.0]]]),
    "matrices": lambda pa: pa.array([[[1.0, 2.0]], [], [[3.0, 4.0]]], pa.list_(pa.list_(pa.float64(), 2))),
    "bools": lambda pa: pa.array([[True], [], [False, True]]),
    "no rows": lambda pa: pa.array([], pa.list_(pa.int32())),
}


@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("nested", [False, True])
def test_ragged_arrays_are_columns_of_lists(tmp_path, kind, nested):
    """In .arrow, with other columns; elsewhere their parts are saved, and sparse arrays are refused there, too."""
    pa, path = pytest.importorskip("pyarrow"), tmp_path / "x.arrow"
    ragged = RAGGED[kind](pa)
    rows = np.arange(len(ragged))
    dlx.save({"n": rows, "r": ragged, "m": rows}, path)
    assert pa.ipc.open_file(path).read_all().column_names == ["n", "r", "m"]
    tree = {"a": {"r": ragged}, "n": rows} if nested else ragged
    dlx.save(tree, path)
    table = pa.ipc.open_file(path).read_all()
    assert table["a.r" if nested else "x"].to_pylist() == ragged.to_pylist()
    with dlx.open(path, to="pyarrow") as file:
        assert [*file] == table.column_names
        assert file["a.r" if nested else "x"].to_pylist() == ragged.to_pylist()
        dlx.save(file, tmp_path / "y.arrow")
    assert pa.ipc.open_file(tmp_path / "y.arrow").read_all().equals(table)
    if nested and len(ragged):
        with pytest.raises(FileError, match="the same length, found 3 rows of 'n'"):
            dlx.save(tree | {"m": np.arange(2)}, path)
        with pytest.raises(FileError, match=r"two arrays would be named 'a\.r'"):
            dlx.save(tree | {"a.r": np.arange(3)}, path)
    if kind in ("lists", "large"):
        dlx.save(tree, tmp_path / "x.npz")
        assert {"a.r.values", "a.r.offsets"} <= {*dlx.open(tmp_path / "x.npz")} or not nested


def test_columns_of_lists_among_others(tmp_path):
    """They keep their places in a table; other arrays may have the names of their parts."""
    pa, path, rows = pytest.importorskip("pyarrow"), tmp_path / "x.arrow", np.arange(2)
    ragged = pa.array([[[1.0, 2.0]], []])
    dlx.save({"t": pa.table({"n": rows, "r": ragged, "m": rows})}, path)
    assert pa.ipc.open_file(path).read_all().column_names == ["t.n", "t.r", "t.m"]
    dlx.save({"r": ragged, "r.values": rows, "r.offsets": rows}, path)
    found = pa.ipc.open_file(path).read_all()
    assert found.to_pydict() == {"r": ragged.to_pylist(), "r.values": [0, 1], "r.offsets": [0, 1]}


def test_the_progress_of_columns_of_lists_ends_with_their_bytes(tmp_path):
    """Their offsets count once."""
    pa, written = pytest.importorskip("pyarrow"), []
    items, _ = collect_items({"r": pa.array([[1, 2], [3]])}, "x", has_lists=True)
    write_items(items, tmp_path / "x.arrow", {}, force=False, sync=False, advance=written.append)
    assert sum(written) == sum(item.nbytes for item in items) == 3 * 8 + 3 * 4


def test_casts_change_no_offsets(tmp_path):
    """Of a ragged array, in both kinds of format."""
    pa = pytest.importorskip("pyarrow")
    ragged = pa.array([[1, 2], [3]], pa.large_list(pa.int64()))
    dlx.save({"r": ragged}, tmp_path / "x.arrow")
    for suffix in ("arrow", "npz"):
        command = [sys.executable, "-m", "dlx", "convert", tmp_path / "x.arrow", tmp_path / f"y.{suffix}"]
        subprocess.run([*command, "--dtype", "int64=int32"], check=True, capture_output=True)
    assert pa.ipc.open_file(tmp_path / "y.arrow").read_all()["r"].type == pa.large_list(pa.int32())
    found = dlx.open(tmp_path / "y.npz", to="numpy")
    assert (found["r.values"].dtype, found["r.offsets"].dtype) == ("int32", "int64")
    tree = {"r": ragged, "r.x": {"offsets": np.arange(2)}}
    items, _ = collect_items(tree, "x", read_casts({"int64": "int32"}))
    dtypes = {item.name: item.dtype.name for item in items}
    assert dtypes == {"r.values": "int32", "r.offsets": "int64", "r.x.offsets": "int32"}


@pytest.mark.parametrize("name", ["n" * 251 + ".npy", "é" * 125 + ".npy", "n" * 236 + ".npy"])
def test_names_as_long_as_the_file_system_allows(tmp_path, name):
    """The partial file beside it has a shorter name."""
    dlx.save(dlx.empty(3, "uint8"), tmp_path / name)
    dlx.save(dlx.empty(4, "uint8"), tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert dlx.open(tmp_path / name)[""].shape == (4,)


@pytest.mark.parametrize("kind", [".npy", ".npz", ".safetensors", ".arrow"])
def test_an_array_that_changed_is_refused(tmp_path, kind):
    """An array that is read late may have another shape by then; nothing is written."""
    if kind == ".arrow":
        pytest.importorskip("pyarrow")
    item = Item("a", dlx.DType("float32"), (4,), 16, None, lambda: dlx.empty((2,), "float32"))
    with pytest.raises(FileError, match="'a' changed while dlx read it"):
        write_items([item], tmp_path / f"x{kind}", {}, force=True, sync=False)
    assert not any(tmp_path.iterdir())


def test_a_failed_save_leaves_nothing_while_a_child_has_its_file(tmp_path):
    """A forked child keeps the file and its lock, as a duplicate does; the next save is not refused."""
    kept = []
    with pytest.raises(ValueError, match="stop"), replace_file(tmp_path / "x.npy", force=True) as handle:
        kept.append(os.dup(handle.fileno()))
        raise ValueError("stop")
    try:
        assert not [*tmp_path.iterdir()]
        dlx.save(np.ones(2), tmp_path / "x.npy")
    finally:
        os.close(*kept)
