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


@pytest.mark.parametrize("version", [2, 3])
def test_names_that_begin_with_dots(tmp_path, version):
    """They are not those of other arrays."""
    group = zarr.open_group(tmp_path / "x", mode="w", zarr_format=version)
    names = [".hidden", "hidden", "in/.b", "...x"]
    for i, name in enumerate(names):
        group.create_array(name, data=np.full(2, i))
    found = dlx.open(tmp_path / "x", to="numpy")
    assert {name: found[name].tolist() for name in found} == {name: [i, i] for i, name in enumerate(names)}


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
@pytest.mark.parametrize("shape", [[1 << 63, 2], [1 << 70], [0, 1 << 65]])
def test_impossible_extents(tmp_path, version, shape):
    """An array whose extents do not fit into 64 bits is refused; the plan says so, and the others are read."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    group.create_array("a", data=np.ones((2,) * len(shape)))
    group.create_array("b", data=np.ones(2))
    path = tmp_path / "x.zarr" / "a" / ("zarr.json" if version == 3 else ".zarray")
    path.write_text(json.dumps({**json.loads(path.read_text()), "shape": shape}))
    with dlx.open(tmp_path / "x.zarr", "numpy") as file:
        assert "its shape is damaged" in str(dlx.plan(file, to="numpy")) and file["b"].tolist() == [1, 1]
        with pytest.raises(DTypeError, match="its shape is damaged"):
            file["a"]


def _damage(data, length):
    """Return bytes with another length in the header of each of Blosc's chunks, and more bytes in it."""
    starts = [at for at in range(len(data) - 16) if data[at] == 2 and data[at + 3] == 8]
    assert starts
    for at in starts:
        data[at + 12 : at + 20] = length.to_bytes(4, "little") + (1 << 29).to_bytes(4, "little")
    return data


@pytest.mark.parametrize("kind", ["version 2", "version 2, filter", "version 3", "checksum", "shards", "nested shards"])
@pytest.mark.parametrize("shuffle", ["noshuffle", "shuffle", "bitshuffle"])
def test_chunks_of_blosc(tmp_path, python, kind, shuffle):
    """They are read; one whose length is wrong is refused, since c-blosc reads beyond it."""
    import google_crc32c
    from numcodecs import LZ4, Blosc

    old = Blosc(shuffle=getattr(Blosc, shuffle.upper()))
    codec = zarr.codecs.BloscCodec(shuffle=shuffle, typesize=8)
    options = {
        "version 2": {"compressors": old},
        "version 2, filter": {"filters": [old], "compressors": LZ4()},
        "version 3": {"compressors": codec},
        "checksum": {"compressors": [codec, zarr.codecs.Crc32cCodec()]},
        "shards": {"compressors": codec, "shards": (500, 50), "chunks": (100, 10)},
    }
    if kind == "nested shards":
        inner = zarr.codecs.ShardingCodec(chunk_shape=(50, 10), codecs=[zarr.codecs.BytesCodec(), codec])
        options[kind] = {"serializer": inner, "compressors": None, "shards": (500, 50), "chunks": (100, 10)}
    array = np.arange(100_000).reshape(1000, 100)
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2 if "2" in kind else 3)
    group.create_array("a", shape=array.shape, dtype=array.dtype, **options[kind])[...] = array
    group.create_array("small", data=np.ones(3, "i2"))
    group["a"].attrs["unit"] = "m"
    with dlx.open(tmp_path / "x.zarr", "numpy") as file:
        assert file["a"].tolist() == array.tolist() and file["small"].tolist() == [1, 1, 1]
    names = ("zarr.json", ".zarray", ".zattrs")
    chunk = next(each for each in (tmp_path / "x.zarr" / "a").rglob("*") if each.is_file() and each.name not in names)
    whole, lengths = chunk.read_bytes(), (0, chunk.stat().st_size - 1, 1 << 30, (1 << 32) - 1)
    for i, length in enumerate(lengths):
        if kind == "checksum":
            data = _damage(bytearray(whole[:-4]), length)
            data += google_crc32c.value(bytes(data)).to_bytes(4, "little")
        elif kind == "version 2, filter":
            data = LZ4().encode(_damage(bytearray(LZ4().decode(whole)), length))
        else:
            data = _damage(bytearray(whole), length)
        chunk.write_bytes(data)
        shutil.copytree(tmp_path / "x.zarr", tmp_path / f"{i}.zarr")
    code = f"""
    import os
    import dlx
    for i in range({len(lengths)}):
        with dlx.open(f"{tmp_path}/{{i}}.zarr", "numpy") as file:
            try:
                file["a"]
            except dlx.errors.FileError as error:
                print("is damaged" in str(error), file["small"].tolist(), flush=True)
    os._exit(0)  # asyncio would report zarr's reads of other chunks, which it leaves pending
    """
    assert python(code, args=()) == "True [1, 1, 1]\n" * len(lengths)


def test_another_codec_of_blosc(tmp_path, monkeypatch):
    """An implementation of Blosc's codec that dlx cannot check is refused."""
    zarr.open_group(tmp_path / "x.zarr", mode="w").create_array(
        "a", data=np.arange(6), compressors=zarr.codecs.BloscCodec()
    )
    monkeypatch.setattr(zarr.codecs.BloscCodec, "_blosc_codec", None)
    with pytest.raises(DTypeError, match="codec 'blosc'"):
        dlx.open(tmp_path / "x.zarr", "numpy")["a"]
