"""Files whose content does not match their name: the error identifies the content and has a fix."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tarfile
import zipfile

import pytest
from support.files.writers import gguf, npy, safetensors, shards
from support.processes.command import document, refused

import dlx
from dlx._files.signatures import _FOLDERS, _OTHERS, _ZIPS
from dlx.errors import FileError

NAMES = ("x.safetensors", "x.npy", "x.npz", "x.gguf", "x.pt", "x.bin", "x.arrow", "x.h5", "x.parquet", "x")
PAGE = "\n <!-- made by a proxy -->\n<!DOCTYPE html>\n<html><body>404</body></html>"


def tar():
    """Return the bytes of a tar archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.npy"))
    return out.getvalue()


def zipped(*names):
    """Return the bytes of a zip file with empty members."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return out.getvalue()


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
BODIES = {
    "lfs": (LFS, "Git LFS pointer", "git lfs pull"),
    "annex": ("/annex/objects/SHA256E-s12--4d7a.npy\n", "git-annex pointer", "git annex get"),
    "dvc": ("outs:\n- md5: a304afb96060aad90176268345e10355\n  path: x\n", "DVC pointer", "dvc pull"),
    "html": (PAGE, "a web page", "curl -fL"),
    "html upper": ("<HTML><HEAD></HEAD></HTML>", "a web page", "curl -fL"),
    "xml": ('<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML", "curl -fL"),
    "json error": ('{"error": "Repository not found"}', "error message", "curl -fL"),
    "json": ('{"weights": [1, 2]}', "it is JSON that begins with '{\"weights\"", ""),
    "index": ('{"metadata": {}, "weight_map": {"a": "model-1.bin"}}', "index of a checkpoint", "one by one"),
    "text": ("Entry not found", "it is text that begins with 'Entry not found'", ""),
    "csv": ("a,b\n1,2\n" * 200, "it is text", ""),
    "umlauts": ("Größe, Maß\n" * 200, "it is text", ""),
    "gzip": (gzip.compress(b"x"), "compressed with gzip", "gzip -dk"),
    "bzip2": (bz2.compress(b"x"), "compressed with bzip2", "bzip2 -dk"),
    "xz": (lzma.compress(b"x"), "compressed with xz", "xz -dk"),
    "tar": (tar(), "tar archive", "tar -xf"),
    "pickle": (pickle.dumps([1]), "it is a pickle", ""),
    "old pickle": (pickle.dumps([1], 2), "it is a pickle", ""),
    "zeros": (bytes(4000), "its first 512 bytes are 0", "again"),
    "few zeros": (bytes(9), "its first 9 bytes are 0", "again"),
    "keras": (zipped("metadata.json", "config.json", "model.weights.h5"), "Keras 3", "unzip"),
    "docx": (zipped("[Content_Types].xml"), "office", ""),
    "zip": (zipped("a.txt", "b.txt"), "a zip file without arrays; it contains a.txt, b.txt", ""),
    "empty zip": (zipped(), "it contains nothing", ""),
}  # fmt: skip


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", BODIES)
def test_bytes_of_another_format(tmp_path, kind):
    """`open`, `inspect`, `plan` and `convert` give the same reason, whatever the file's name."""
    body, words, fix = BODIES[kind]
    for name in NAMES:
        path = tmp_path / name
        path.write_bytes(body if isinstance(body, bytes) else body.encode())
        with pytest.raises(FileError) as caught:
            dlx.open(path)
        assert words in caught.value.reason and fix in caught.value.fix, (name, str(caught.value))
    for command in (["inspect", path], ["plan", path, "--to", "dlx"], ["convert", path, tmp_path / "out.npz"]):
        assert words in refused(*command)


@pytest.mark.parametrize("row", [row for row in _OTHERS if isinstance(row[1], bytes)], ids=lambda row: row[2])
def test_every_signature(tmp_path, row):
    """Each row of the table is reached, and none matches a supported file."""
    offset, signature, words, fix = row
    (tmp_path / "x.npz").write_bytes(b"\xff" * offset + signature + b"\xff" * 600)
    with pytest.raises(FileError) as caught:
        dlx.open(tmp_path / "x.npz")
    assert (caught.value.reason, caught.value.fix) == (words, fix)


@pytest.mark.parametrize("row", _ZIPS, ids=lambda row: row[1])
def test_every_zip(tmp_path, row):
    """The archive is recognized by its characteristic member."""
    for name in (row[0], f"folder/{row[0]}"):
        (tmp_path / "x.npz").write_bytes(zipped("a", "b", "c", name))
        with pytest.raises(FileError) as caught:
            dlx.open(tmp_path / "x.npz")
        assert (caught.value.reason, caught.value.fix) == row[1:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of old formats
def test_files_of_other_libraries(tmp_path, np, torch):
    """Files are recognized as current versions of these libraries write them."""
    said = {}

    def tell(name):
        with pytest.raises(FileError) as caught:
            dlx.open(tmp_path / name)
        said[name] = f"{caught.value.reason} {caught.value.fix}"

    sqlite3.connect(tmp_path / "x.db").executescript("create table t (a);")
    tell("x.db")
    assert "SQLite" in said["x.db"]
    with contextlib.suppress(ImportError):
        import scipy.io

        scipy.io.savemat(tmp_path / "x.mat", {"a": np.ones(3)})
        tell("x.mat")
        assert "scipy.io.loadmat" in said["x.mat"]
        with scipy.io.netcdf_file(tmp_path / "x.nc", "w") as out:
            out.createDimension("d", 2)
        tell("x.nc")
        assert "xarray.open_dataset" in said["x.nc"]
    with contextlib.suppress(ImportError, TypeError, ValueError):
        import pyarrow.feather

        pyarrow.feather.write_feather(pyarrow.table({"a": [1]}), str(tmp_path / "x.feather"), version=1)
        tell("x.feather")
        assert "Feather file of version 1" in said["x.feather"]
    with contextlib.suppress(ImportError):
        import pyarrow.orc

        pyarrow.orc.write_table(pyarrow.table({"a": [1]}), str(tmp_path / "x.orc"))
        tell("x.orc")
        assert "pyarrow.orc.read_table" in said["x.orc"]
    program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "x.pt2")
    tell("x.pt2")
    assert "torch.export.load(path).state_dict" in said["x.pt2"]
    assert set(torch.export.load(tmp_path / "x.pt2").state_dict) == {"weight", "bias"}  # the fix works
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), tmp_path / "x.ts")
    tell("x.ts")
    assert "torch.jit.load(path).state_dict()" in said["x.ts"]
    torch.save({"lr": np.float64(0.1)}, tmp_path / "lr.pt")
    tell("lr.pt")
    assert "numpy.dtype" in said["lr.pt"] and "torch.serialization.safe_globals" in said["lr.pt"]
    types = [np._core.multiarray.scalar, np.dtype]
    with torch.serialization.safe_globals(types):
        tell("lr.pt")
    assert "numpy.dtypes.Float64DType" in said["lr.pt"] and "again" not in said["lr.pt"]
    with torch.serialization.safe_globals([*types, np.dtypes.Float64DType]):
        assert dict(dlx.open(tmp_path / "lr.pt")) == {"lr": 0.1}


def test_what_dlx_reads_is_not_hidden(tmp_path, np):
    """A .safetensors header length may begin with any two bytes, even the signature of gzip."""
    for length in (0x8B1F, 0x4D42, 0x2020, 0x3C3C):
        raw = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode().ljust(length)
        (tmp_path / "x").write_bytes(len(raw).to_bytes(8, "little") + raw + b"ab")
        assert bytes(memoryview(dlx.open(tmp_path / "x")["a"])) == b"ab"


@pytest.mark.parametrize("name", ["x.mat", "x.h5", "x"])
@pytest.mark.parametrize("block", [512, 1024, 2048, 4096, 1 << 16])
@pytest.mark.parametrize("words", [b"MATLAB 7.3 MAT-file, Platform: GLNXA64", b"#!/bin/sh\n", b"", b"\x1f\x8b", b"PAR"])
def test_hdf5_after_a_block_of_another_program(tmp_path, np, name, block, words):
    """MATLAB v7.3 writes its name into the first 512 bytes; the user block may contain any text."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / name
    with h5py.File(path, "w", userblock_size=block) as out:
        out["a"] = np.arange(5.0)
    with path.open("r+b") as file:
        file.write(words)
    tensor = dlx.open(path)["a"]
    assert tensor.readonly and dlx.convert(tensor, to="numpy").tolist() == [0, 1, 2, 3, 4]
    (source,) = document("inspect", path)["sources"]
    assert source["kind"] == "HDF5" and source["arrays"][0]["path"] == "a"


def test_links_that_lead_nowhere(tmp_path):
    """A dangling link of git-annex or of a cache raises an error with a fix; a missing file is FileNotFoundError."""
    for place, fix in ((".git/annex/objects/p8/MD5E-s3--ab.npy", "git annex get"), ("../blobs/4d7a", "Download it")):
        path = tmp_path / "x.npy"
        path.unlink(missing_ok=True)
        path.symlink_to(place)
        with pytest.raises(FileError, match="which does not exist") as caught:
            dlx.open(path)
        assert place in caught.value.reason and fix in caught.value.fix
        assert fix in refused("inspect", path)
    with pytest.raises(FileNotFoundError):
        dlx.open(tmp_path / "none.npy")
    for name in ("*.npy", "x?.npz", "[ab].safetensors"):
        with pytest.raises(FileNotFoundError, match=r"expands no patterns. Open each file of glob.glob\(path\)."):
            dlx.open(tmp_path / name)
    (tmp_path / "a[1].npy").write_bytes(b"")
    with pytest.raises(FileError, match="empty"):
        dlx.open(tmp_path / "a[1].npy")


@pytest.mark.parametrize("end", [".part", ".crdownload", ".incomplete", ".tmp", ""])
def test_half_downloads(tmp_path, end):
    """They are reported as truncated, whatever their suffix."""
    safetensors(tmp_path / "whole", {"a": ("F32", (100,))})
    whole = {
        "x.safetensors": (tmp_path / "whole").read_bytes(),
        "x.npy": npy("<f4", (100,), bytes(400)),
        "x.gguf": gguf({"a": (0, (100,), bytes(400))}),
    }
    for name, content in whole.items():
        path = tmp_path / f"{name}{end}"
        path.write_bytes(content[:-9])
        with pytest.raises(FileError, match="it is truncated") as caught:
            dlx.open(path)
        assert caught.value.fix == "Save or download it again."


def test_a_folder_with_one_file_of_several(tmp_path):
    """Without an index it is reported as part of a checkpoint; the file itself can be opened."""
    index = shards(tmp_path, {"a": ("F32", (2,)), "b": ("F32", (3,))})
    index.unlink()
    first = tmp_path / "model-00001-of-00002.safetensors"
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileError, match=r"with one of 2 files, .*, but no index"):
        dlx.open(tmp_path)
    assert list(dlx.open(first)) == ["a"]


@pytest.mark.parametrize("row", _FOLDERS, ids=lambda row: row[0])
def test_folders_of_other_libraries(tmp_path, row):
    """`dlx.open` and the command identify a store or model of another library."""
    (tmp_path / row[0]).touch()
    with pytest.raises(FileError) as caught:
        dlx.open(tmp_path)
    assert (caught.value.reason, caught.value.fix) == row[1:]
    assert row[1] in refused("inspect", tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch: there is only one process
def test_the_table_is_in_plain_words():
    """A reason has no full stop, a fix has one; both name the format."""
    for *_, words, fix in (*_OTHERS, *_ZIPS, *_FOLDERS):
        assert words.startswith("it is ") and not words.endswith(".")
        assert not fix or (fix.endswith(".") and fix[0].isupper())
