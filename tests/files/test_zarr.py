"""Zarr stores in local folders: groups, arrays, both versions of the format; codecs that run code are refused."""

import json
import os
import pickle
import shutil

import pytest
from support.processes.command import here

import dlx
from dlx.errors import DTypeError, FileError

np = pytest.importorskip("numpy")
zarr = pytest.importorskip("zarr", minversion="3.0")


@pytest.mark.parametrize("version", [2, 3])
def test_a_group(tmp_path, version):
    """Arrays of any dtype and codec are read by their paths when they are used."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    arrays = {"a": np.arange(6.0).reshape(2, 3), "in/b": np.ones(5, "i2"), "in/c": np.zeros((0, 2)), "s": np.array(3)}
    for name, array in arrays.items():
        group.create_array(name, data=array)
    group.create_array("swapped", data=np.arange(3, dtype=">i4"))
    group.attrs["title"] = "x"
    with dlx.open(tmp_path / "x.zarr", "numpy") as file:
        assert {*file} == {*arrays, "swapped"} and file.metadata == {"title": "x"}
        for name, array in arrays.items():
            assert file[name].dtype == array.dtype and file[name].tolist() == array.tolist()
        assert file["swapped"].tolist() == [0, 1, 2]
    assert [*dlx.open(tmp_path / "x.zarr", only="in/*")] == ["in/b", "in/c"]
    assert here("inspect", tmp_path / "x.zarr")[0] == 0
    assert here("convert", tmp_path / "x.zarr", tmp_path / "x.npz")[0] == 0
    assert np.load(tmp_path / "x.npz")["in/b"].tolist() == [1] * 5


@pytest.mark.parametrize("version", [2, 3])
def test_an_array(tmp_path, version):
    """It has the empty name."""
    array = zarr.create_array(tmp_path / "x.zarr", shape=(4,), dtype="u1", zarr_format=version, chunks=(2,))
    array[:] = [1, 2, 3, 4]
    assert dlx.open(tmp_path / "x.zarr", "numpy")[""].tolist() == [1, 2, 3, 4]


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_no_code_of_a_store_is_run(tmp_path, monkeypatch):
    """A filter that unpickles is refused by its name, and the other arrays are read."""
    monkeypatch.chdir(tmp_path)
    group = zarr.open_group("x.zarr", mode="w", zarr_format=2)
    group.create_array("good", data=np.ones(2))
    group.create_array("evil", data=np.ones(2))
    path = tmp_path / "x.zarr" / "evil"
    metadata = json.loads((path / ".zarray").read_text())
    (path / ".zarray").write_text(json.dumps({**metadata, "filters": [{"id": "pickle"}], "compressor": None}))
    (path / "0").write_bytes(pickle.dumps(Evil()))
    for consolidated in (tmp_path / "x.zarr").glob(".zmetadata"):
        consolidated.unlink()
    file = dlx.open("x.zarr", "numpy")
    assert file["good"].tolist() == [1, 1]
    with pytest.raises(DTypeError, match=r"codec 'pickle'|'object_codec_id': 'pickle'"):
        file["evil"]
    assert not os.path.exists("ran")


def test_a_damaged_store(tmp_path):
    """The error names the store."""
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / "zarr.json").write_text("{")
    with pytest.raises(FileError, match=r"cannot open .*x\.zarr.*: zarr cannot read it"):
        dlx.open(tmp_path / "x.zarr")


@pytest.mark.parametrize("version", [2, 3])
def test_a_damaged_array_is_refused_alone(tmp_path, version):
    """The others are read, also in a damaged group's neighbour."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    for name in ("a", "in/b", "z"):
        group.create_array(name, data=np.ones(2))
    name = "zarr.json" if version == 3 else ".zarray"
    (tmp_path / "x.zarr" / "a" / name).write_text("{")
    for path in (tmp_path / "x.zarr").rglob(".zmetadata"):
        path.unlink()
    file = dlx.open(tmp_path / "x.zarr", "numpy")
    assert [*file] == ["a", "in/b", "z"] and file["in/b"].tolist() == file["z"].tolist() == [1, 1]
    with pytest.raises(DTypeError, match="zarr cannot read it"):
        file["a"]
    assert [*dlx.open(tmp_path / "x.zarr", skip="a")] == ["in/b", "z"]


def test_read_now(tmp_path):
    """Without a mapping the arrays do not depend on the store."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    group.create_array("a", data=np.arange(3))
    group.create_array("r", data=np.ones(2, [("x", "i4"), ("y", "f8")]))
    file = dlx.open(tmp_path / "x.zarr", "numpy", mmap=False)
    shutil.rmtree(tmp_path / "x.zarr")
    assert file["a"].tolist() == [0, 1, 2] and file["r"]["y"].tolist() == [1, 1]
    file["a"][:] = 7


@pytest.mark.parametrize("order", ["C", "F"])
def test_named_dtypes(tmp_path, order):
    """`raw` keeps the order of the elements, and gives no dtype to an array whose codec is refused."""
    array = np.arange(6, dtype="i2").reshape(2, 3)
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    for name, dtype in (("n", "i2"), ("b", ">i2"), ("v", "V2"), ("evil", "i2")):
        made = group.create_array(name, shape=(2, 3), dtype=dtype, chunks=(1, 3), order=order)
        made[...] = array.view("V2") if dtype == "V2" else array
    path = tmp_path / "x.zarr" / "evil" / ".zarray"
    metadata = json.loads(path.read_text())
    path.write_text(json.dumps({**metadata, "filters": [{"id": "astype", "encode_dtype": "i2", "decode_dtype": "i2"}]}))
    for consolidated in (tmp_path / "x.zarr").rglob(".zmetadata"):
        consolidated.unlink()
    file = dlx.open(tmp_path / "x.zarr", "numpy", raw={"[nbv]": "uint16", "evil": "uint16"})
    for name in "nbv":
        assert file[name].dtype == np.uint16 and file[name].tolist() == array.tolist()
    with pytest.raises(DTypeError, match="codec 'astype'"):
        file["evil"]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("shuffle", ["noshuffle", "shuffle", "bitshuffle"])
def test_chunks_of_blosc(tmp_path, python, version, shuffle):
    """They are read; one whose length is wrong is refused, since c-blosc reads beyond it."""
    if version == 3:
        codec = zarr.codecs.BloscCodec(shuffle=shuffle)
    else:
        from numcodecs import Blosc

        codec = Blosc(shuffle=getattr(Blosc, shuffle.upper()))
    arrays = {
        "a": np.arange(100_000).reshape(1000, 100),
        "small": np.ones(3, "i2"),
        "r": np.random.default_rng(1).random(500),
    }
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    for name, array in arrays.items():
        made = group.create_array(name, shape=array.shape, dtype=array.dtype, chunks="auto", compressors=codec)
        made[...] = array
        made.attrs["unit"] = "m"
    with dlx.open(tmp_path / "x.zarr", "numpy") as file:
        assert all(file[name].tolist() == array.tolist() for name, array in arrays.items())
    names = ("zarr.json", ".zarray", ".zattrs")
    chunk = next(each for each in (tmp_path / "x.zarr" / "a").rglob("*") if each.is_file() and each.name not in names)
    for length in (0, chunk.stat().st_size - 1, 1 << 30, (1 << 32) - 1):
        data = bytearray(chunk.read_bytes())
        data[12:16], data[16:20] = length.to_bytes(4, "little"), (1 << 29).to_bytes(4, "little")
        chunk.write_bytes(data)
        code = f"""
        import dlx
        with dlx.open({str(tmp_path / "x.zarr")!r}, "numpy") as file:
            try:
                file["a"]
            except dlx.errors.FileError as error:
                print("is damaged" in str(error), file["small"].tolist())
        """
        assert python(code) == "True [1, 1, 1]\n"
