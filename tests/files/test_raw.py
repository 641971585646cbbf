"""Members that a file stores as raw bytes or as records: `raw=` names dtypes, fields are read by name."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlx
from dlx.errors import DTypeError, FileError

np = pytest.importorskip("numpy")

FIELDS = ("<f4", ">f8", "<i2", "|u1", "?", "<c8", "S3", "<U1", "<M8[s]", (2,), [("x", "<f4")])


def write(folder, kind, arrays):
    """Write arrays to a file of a kind; return its path."""
    path = folder / f"x.{kind.removeprefix('packed ')}"
    if kind == "npz":
        np.savez(path, **arrays)
    elif kind == "packed npz":
        np.savez_compressed(path, **arrays)
    else:
        with pytest.importorskip("h5py").File(path, "w") as file:
            for name, array in arrays.items():
                array = array.view(f"V{array.itemsize}") if array.dtype.type.__module__ == "ml_dtypes" else array
                chunks = {"chunks": array.shape} if kind == "packed h5" and array.size else {}
                file.create_dataset(name, data=array, **chunks)
    return path


KINDS = ["npz", "packed npz", "h5", "packed h5"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_what_the_file_forgot(tmp_path, kind, mapped, dtype):
    """For all void members, or by name, also for integers; values and shapes are right."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, dtype))
    integers = array.view(f"u{array.itemsize}")
    path = write(tmp_path, kind, {"w": array, "v": array[:0], "u": integers, "n": np.ones(2)})
    if dtype == "bfloat16":
        with dlx.open(path, mmap=mapped) as file, pytest.raises(DTypeError, match=r"raw bytes.*raw='bfloat16'"):
            file["w"]
    with dlx.open(path, "numpy", mmap=mapped, raw={"[wv]": dtype, "u": dtype}) as file:
        for name in "wu":
            assert file[name].dtype == array.dtype and file[name].tolist() == array.tolist()
        assert file["v"].shape == (0, 3) and file["n"].tolist() == [1, 1]
    if dtype == "bfloat16":
        file = dlx.open(path, "numpy", mmap=mapped, raw=dtype)
        assert file["w"].tolist() == array.tolist() and file["u"].tolist() == integers.tolist()


def test_wrong_dtypes(tmp_path):
    """A size that differs, a name that is not there, and a format that names its dtypes."""
    path = write(tmp_path, "npz", {"w": np.zeros(3, "V2"), "n": np.ones(2)})
    with pytest.raises(DTypeError, match=r"w has the dtype .*V2, whose size is not that of float32"):
        dlx.open(path, raw="float32")
    with pytest.raises(FileError, match="no member 'q', which raw= names"):
        dlx.open(path, raw={"q": "bfloat16"})
    with pytest.raises(DTypeError):
        dlx.open(path, raw={"w": "nonsense"})
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(FileError, match="raw= cannot name dtypes"):
        dlx.open(tmp_path / "x.pt", raw="bfloat16")


def test_other_byte_order():
    """The bytes are swapped as the file says."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(5).astype(ml_dtypes.bfloat16)
    np.save(data := io.BytesIO(), array.view("u2").astype(">u2"))
    found = dlx.open(data.getvalue(), "numpy", raw={"": "bfloat16"})[""]
    assert found.dtype == array.dtype and found.tolist() == array.tolist()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_fields_of_records(tmp_path_factory, kind, data):
    """Fields of any dtype and shape, aligned or not, in any container; text is refused by its name."""
    kinds = data.draw(st.lists(st.sampled_from(FIELDS[:-2]), min_size=1, max_size=5))
    inner = [data.draw(st.sampled_from([(), (2,), (1, 2)])) for _ in kinds]
    names = [f"f{i}" for i in range(len(kinds))]
    align = data.draw(st.booleans())
    if "h5" in kind:
        kinds = ["<i4" if each[1:2] in "UM" else each for each in kinds]
    dtype = np.dtype([*zip(names, kinds, inner, strict=True)], align=align)
    shape = data.draw(st.sampled_from([(), (0,), (5,), (2, 3)]))
    array = np.zeros(shape, dtype)
    for name in names:
        size = array[name].size
        values = np.arange(size).reshape(array[name].shape)
        array[name] = values.astype(array[name].dtype.base) if array[name].dtype.kind != "M" else 0
    path = write(tmp_path_factory.mktemp("fields"), kind, {"t": array})
    with dlx.open(path, "numpy", mmap=data.draw(st.booleans())) as file:
        assert [*file["t"]] == names
        for name in names:
            expected = array[name]
            if expected.dtype.kind in "SUM":
                with pytest.raises(DTypeError, match=rf"at obj\['t'\]\['{name}'\]"):
                    file["t"][name]
                continue
            found = file["t"][name]
            assert found.dtype == expected.dtype.newbyteorder("=") and found.tolist() == expected.tolist()


def test_aligned_fields_are_views(tmp_path):
    """Nothing is copied, and the file's memory is shared."""
    array = np.zeros(4, [("a", "<f4"), ("b", "<i4")])
    np.save(tmp_path / "x.npy", array)
    fields = dlx.open(tmp_path / "x.npy", "numpy")[""]
    assert not fields["a"].flags.owndata and fields["a"].strides == (8,)
    assert fields["b"].ctypes.data - fields["a"].ctypes.data == 4
    assert "shared" in str(dlx.plan(dlx.open(tmp_path / "x.npy"), to="numpy"))
    nested = np.zeros(2, [("in", [("x", "<f4")]), ("y", "<f4")])
    np.save(tmp_path / "y.npy", nested)
    with pytest.raises(DTypeError, match="structures"):
        dlx.open(tmp_path / "y.npy", "numpy")[""]["in"]
    assert dlx.open(tmp_path / "y.npy", "numpy")[""]["y"].tolist() == [0, 0]
    np.save(tmp_path / "z.npy", np.asfortranarray(np.zeros((2, 2), array.dtype)))
    with pytest.raises(DTypeError, match=r"structures \(fields: a, b\)"):
        dlx.open(tmp_path / "z.npy", "numpy")[""]


def test_records_are_saved_by_field(tmp_path):
    """`dlx.save` and `dlx convert` name them with a dot."""
    array = np.zeros(4, [("a", "<f4"), ("b", ">i4")])
    array["b"] = range(4)
    np.savez(tmp_path / "x.npz", t=array)
    dlx.save(dlx.open(tmp_path / "x.npz"), tmp_path / "y.npz")
    assert np.load(tmp_path / "y.npz")["t.b"].tolist() == [0, 1, 2, 3]
