"""`dlx.open(mmap=False)`, and contents that are bytes or a binary file object, for every format."""

import gzip
import io
import os
import warnings
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.files.samples import WRITERS
from support.files.writers import safetensors, shards

import dlx
from dlx.errors import FileError

np = pytest.importorskip("numpy")


@pytest.fixture(params=["npy", "npz", "compressed", "safetensors", "arrow", "pt", "h5"])
def path(request, tmp_path):
    """Write a file with an array "a" of 2 x 3 float32."""
    kind, array = request.param, np.arange(6, dtype="f4").reshape(2, 3)
    path = tmp_path / f"x.{kind.replace('compressed', 'npz')}"
    if kind == "compressed":
        np.savez_compressed(path, a=array, b=np.ones(4))
    elif kind == "h5":
        with pytest.importorskip("h5py").File(path, "w") as file:
            file.update({"a": array, "b": np.ones(4)})
            file.create_dataset("c", data=np.ones(100), chunks=(10,))
    elif kind == "pt":
        torch = pytest.importorskip("torch")
        torch.save({"a": torch.tensor(array), "b": torch.ones(4)}, path)
    else:
        if kind == "arrow":
            pytest.importorskip("pyarrow")
        dlx.save(array if kind == "npy" else {"a": array, "b": np.ones(2)}, path)
    return path


def a_of(file):
    """Return the array "a", or the only one."""
    return file["" if [*file] == [""] else "a"]


class Plain:
    """A binary file object with nothing but `read`, such as a network response."""

    def __init__(self, data):
        self.rest = io.BytesIO(data)

    def read(self, count=-1):
        return self.rest.read(min(count, 100))


SOURCES = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "array": lambda data: np.frombuffer(data, "u1"),
    "BytesIO": io.BytesIO,
    "plain": Plain,
    "gzip": lambda data: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(data))),
    "second half": lambda data: _at_half(io.BytesIO(bytes(len(data)) + data)),
}


def _at_half(stream):
    stream.seek(len(stream.getvalue()) // 2)
    return stream


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_contents_are_read_like_a_file(path, source, mapped):
    """For bytes, buffers, and file objects from their position on; results outlive the source."""
    data = SOURCES[source](path.read_bytes())
    with dlx.open(data, "numpy", mmap=mapped) as found, dlx.open(path, "numpy") as file:
        assert [*found] == [*file]
        array, expected = a_of(found), a_of(file)
        assert "c" not in found or found["c"].sum() == 100
    del data, found
    assert array.tolist() == expected.tolist() == [[0, 1, 2], [3, 4, 5]] and array.dtype == expected.dtype


def test_without_mapping_a_file_may_change_and_disappear(path):
    """The arrays stay as they were; torch takes them without a copy."""
    with dlx.open(path, "numpy", mmap=False) as file:
        os.truncate(path, 0)
        path.unlink()
        assert a_of(file).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert a_of(file).flags.writeable or path.suffix == ".arrow"


def test_writes_do_not_reach_the_file_nor_bytes(path):
    """With mmap=False the arrays are writable; bytes are immutable."""
    before = path.read_bytes()
    for source, options in ((path, {"mmap": False}), (before, {"mmap": False}), (before, {"readonly": "share"})):
        torch = pytest.importorskip("torch")
        tensor = a_of(dlx.open(source, "torch", **options))
        assert isinstance(tensor, torch.Tensor)
        tensor.fill_(7)
        assert path.read_bytes() == before
    assert a_of(dlx.open(before, "numpy")).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_bytes_are_shared_and_stay_alive():
    """Arrays over a bytearray are writable and write to it; those over bytes are read-only."""
    data = io.BytesIO()
    np.save(data, np.arange(100, dtype="u1"))
    raw = bytearray(data.getvalue())
    array = dlx.open(raw, "numpy")[""]
    array[5] = 77
    assert raw[-95] == 77 and not dlx.open(bytes(raw), "numpy")[""].flags.writeable
    with pytest.raises(BufferError):
        raw.clear()


def test_only_the_selected_part_is_read(tmp_path, python):
    """Of a sparse file of 64 GiB; the memory that is used is that of the part."""
    file = safetensors(tmp_path / "x.safetensors", {"a": ("F32", (4,)), "z": ("F32", (4,))})
    raw, size = file.read_bytes(), 1 << 34
    length = int.from_bytes(raw[:8], "little")
    header = (
        raw[8 : 8 + length]
        .replace(b"[16, 32]", b"[16,%d]" % (16 + size))
        .replace(b'"z": {"dtype": "F32", "shape": [4]', b'"z": {"dtype": "U8", "shape": [%d]' % size)
    )
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + 16 + size)
    code = f"""
        import dlx
        with dlx.open({str(file)!r}, mmap=False, only="a") as found:
            print(found["a"].shape, [*found])
    """
    assert python(code, args=()).strip() == "(4,) ['a']"


def test_a_checkpoint_in_several_files(tmp_path):
    """Each shard is read."""
    shards(tmp_path, {"a": ("F32", (4,)), "b": ("I64", (2, 4))})
    with dlx.open(tmp_path, "numpy", mmap=False, skip="a") as file:
        assert [*file] == ["b"] and file["b"].shape == (2, 4) and file["b"].flags.writeable


def test_zip_members_and_fsspec(tmp_path):
    """Members of zip files, and fsspec's files in memory and on the disk."""
    np.save(tmp_path / "x.npy", np.arange(3))
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "x.npy", "x.npy")
    with zipfile.ZipFile(tmp_path / "x.zip") as archive, archive.open("x.npy") as member:
        assert dlx.open(member, "numpy")[""].tolist() == [0, 1, 2]
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://x.npy", "wb") as file:
        file.write((tmp_path / "x.npy").read_bytes())
    for url in ("memory://x.npy", f"file://{tmp_path}/x.npy"):
        with fsspec.open(url, "rb") as file:
            assert dlx.open(file, "numpy")[""].tolist() == [0, 1, 2]


def test_paths_and_wrong_arguments(tmp_path):
    """Paths of bytes are opened; text and other objects are refused."""
    np.save(tmp_path / "x.npy", np.arange(3))
    assert dlx.open(os.fsencode(tmp_path / "x.npy"), "numpy")[""].tolist() == [0, 1, 2]
    with pytest.raises(FileNotFoundError):
        dlx.open(b"none.npy")
    with pytest.raises(FileError, match="it is text"):  # no file's name is as long
        dlx.open(b"folder/" + b"x" * 256)
    with pytest.raises(FileNotFoundError):
        dlx.open(b"x" * 255)
    with pytest.raises(TypeError, match="text mode"):
        dlx.open(io.StringIO("x"))
    for wrong in (None, 3, [b"x"]):
        with pytest.raises(TypeError, match="path must be a path, bytes, or a binary file object, found"):
            dlx.open(wrong)
    for empty in (b"", bytearray(), io.BytesIO()):
        with pytest.raises(FileError, match="it is empty"):
            dlx.open(empty)
    with pytest.raises(FileError, match="cannot open bytes: it is truncated"):
        dlx.open((tmp_path / "x.npy").read_bytes()[:-1])


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind not in (".shards", ".parquet")])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_files_are_the_same_in_memory(tmp_path, kind, data):
    """Members, values and refusals agree with those of the mapped file."""
    writer, packages = WRITERS[kind]
    for package in packages:
        pytest.importorskip(package)
    path = tmp_path / f"x{kind}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the writers
        writer(path, data.draw)

    def outcomes(source, **options):
        def below(value):
            if hasattr(value, "items"):
                return {key: _try(value.__getitem__, key, below) for key in value}
            if isinstance(value, list | tuple) or type(value).__name__.endswith("View"):
                return [below(each) for each in value]
            return (str(value.dtype), bytes(value.tobytes())) if hasattr(value, "dtype") else str(value)

        try:
            with dlx.open(source, "dlx", detach=True, **options) as found:
                return below(found)
        except FileError as error:
            return error.reason

    expected = repr(outcomes(path))
    assert repr(outcomes(path, mmap=False)) == expected
    assert repr(outcomes(path.read_bytes())) == expected


def _try(read, key, below):
    try:
        return below(read(key))
    except dlx.errors.DlxError as error:
        return error.reason
