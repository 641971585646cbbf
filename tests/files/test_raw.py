"""Members that a file stores as raw bytes or as records: `raw=` names dtypes, fields are read by name."""

import inspect
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.command import document, here

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
    with pytest.raises(FileError, match="no member 'q', which 'raw' names"):
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


INNER = [("a", "<f4"), ("b", ">i2", (2,))]
RECORDS = [
    [("x", "|u1"), ("in", INNER), ("y", "<f8")],
    [("in", INNER, (3,)), ("z", [("in", INNER), ("c", "<c8")], (2, 1))],
    [("e", "<f4", (0,)), ("in", [("e", INNER, (0, 2)), ("k", "|i1")])],
]


def leaves(array, path=()):
    """Yield each field without fields, and its path."""
    for name in array.dtype.names:
        inner = array[name]
        yield from leaves(inner, (*path, name)) if inner.dtype.names else [((*path, name), inner)]


@pytest.mark.parametrize("kind", [*KINDS, "npy"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("align", [False, True])
def test_records_in_records_and_in_columns(tmp_path, kind, order, align):
    """Nested fields, packed or aligned, in either order, in any container; also in the command and in saved files."""
    for number, fields in enumerate(RECORDS):
        for shape in [(), (5,), (2, 3), (0, 2)]:
            dtype = np.dtype(fields, align=align)
            size = int(np.prod(shape)) * dtype.itemsize
            raw = np.random.default_rng(number).integers(0, 255, size, "u1")
            array = np.zeros(shape, dtype) if not size else raw.view(dtype).reshape(shape)
            array = np.asfortranarray(array) if order == "F" else array
            if kind == "npy":
                np.save(path := tmp_path / "x.npy", array)
            elif "h5" in kind and number == 2:
                continue  # HDF5 has no empty fields
            else:
                path = write(tmp_path, kind, {"": array} if "h5" not in kind else {"t": array})
            with dlx.open(path, "numpy", mmap=number % 2 == 0) as file:
                for names, expected in leaves(array):
                    found = next(iter(file.values()))
                    for name in names:
                        found = found[name]
                    native = expected.dtype.newbyteorder("=")
                    assert found.dtype == native and found.shape == expected.shape
                    assert found.tobytes() == expected.astype(native).tobytes()
                dlx.save(file, tmp_path / "y.npz")
            prefix = "t." if "h5" in kind else ""
            expected = {prefix + ".".join(names) for names, _ in leaves(array)}
            assert {*dlx.open(tmp_path / "y.npz")} == expected
    listed = document("inspect", path)["sources"][0]["arrays"]
    assert {each["path"] for each in listed if not each["refused"]} == expected


def test_raw_fields(tmp_path):
    """Void fields get dtypes as void members do: all, or by name."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16)
    array = np.zeros(3, [("n", "<i4"), ("in", [("w", "V2", (2,)), ("t", "<M8[s]")])])
    array["in"]["w"] = values.view("V2")
    np.savez(path := tmp_path / "x.npz", t=array, w=values.view("V2"))
    for raw in ("bfloat16", {"t.in.w": "bfloat16", "t.in.t": "int64"}):
        file = dlx.open(path, "numpy", raw=raw)
        assert file["t"]["in"]["w"].dtype == values.dtype and file["t"]["in"]["w"].tolist() == values.tolist()
    assert file["t"]["in"]["t"].tolist() == [0, 0, 0]
    with pytest.raises(DTypeError, match=r"t\.n has the dtype int32, whose size is not that of int8"):
        dlx.open(path, raw={"*.n": "int8"})


def test_raw_of_copied_arrays(tmp_path):
    """Order, shape and byte order are right in chunks, and for text; a dtype with lanes counts them."""
    h5py = pytest.importorskip("h5py")
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("c", data=array, chunks=(1, 3))
        file.create_dataset("v", data=array.astype("u1").view("V1"), chunks=(1, 3))
        file.create_dataset("s", data=np.array([b"abcd", b"efgh"]))
        file["n"] = array
    file = dlx.open(tmp_path / "x.h5", "numpy", raw={"[cn]": "uint16", "v": "uint8", "s": "uint32"})
    assert file["c"].tolist() == file["n"].tolist() == file["v"].tolist() == array.tolist()
    assert file["s"].tobytes() == b"abcdefgh"
    np.save(data := io.BytesIO(), np.arange(4, dtype="f4"))
    with pytest.raises(DTypeError, match="whose size is not that of float32x4"):
        dlx.open(data.getvalue(), raw={"": "float32x4"})
    assert dlx.open(data.getvalue(), raw={"": "float16x2"})[""].nbytes == 16
    for stored, word in ((">c8", "float64"), (">f8", "complex64")):  # the bytes are swapped as the file says
        np.save(data := io.BytesIO(), np.arange(4).astype(stored))
        found = dlx.open(data.getvalue(), "numpy", raw={"": word})[""]
        assert found.tobytes() == np.arange(4).astype(stored[1:]).tobytes()


def npy(descr, shape=(2,), body=b"x" * 64):
    """Return a .npy file with any header."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


BAD = [
    *([(1, "<f4")], [((), "<f4")], [("a", ())], [("a", None)], [("a", {"n": 1})], [(b"a", "<f4")], [["a", "<f4"], 3]),
    *([("a", "<f4", (extent,))] for extent in (-1, 1.0, True, None, "1", 1 << 63, (1,))),
    *([("a", "<f4", inner)] for inner in (3, (1,) * 128, (1 << 40, 1 << 40))),
    [("a", "|V1", (-64,)), ("b", "<f4"), ("c", "|V1", (64,))],
    [("a", "|V1", (-(1 << 40),)), ("b", "<f4"), ("c", "|V1", (1 << 40,))],
    [("in", [("a", "|V1", (-64,)), ("b", "<f4")]), ("c", "|V1", (60,))],
    [("a", "<f4"), ("a", "<f4")],
]


HOSTILE = """
import dlx

for descr in BAD:
    for shape in ((2,), (0,), (1 << 40, 0), (1 << 61,)):
        try:
            dlx.open(npy(descr, shape))[""]
        except dlx.errors.FileError as error:
            assert "its header" in str(error), error
        else:
            raise AssertionError(descr, shape)
print("done")
"""


def test_hostile_structures(python):
    """No header of records is trusted: reading it would read foreign memory, or kill the process."""
    start = f"BAD = {BAD!r}\n{inspect.getsource(npy)}"
    assert python(start + HOSTILE, args=()).strip() == "done"


def test_odd_structures():
    """Without fields, without bytes, or with empty fields of impossible sizes."""
    with pytest.raises(DTypeError, match="DLPack has no structures"):
        dlx.open(npy([], (1 << 40,)))[""]
    with pytest.raises(DTypeError, match="raw bytes"):
        dlx.open(npy([("a", "|V0")], (1 << 62, 1 << 62)))[""]["a"]
    found = dlx.open(npy([("a", "<f4", (0, 1 << 62))], (1 << 62,)))[""]["a"]
    assert found.shape == (1 << 62, 0, 1 << 62)


@pytest.mark.parametrize("inner", [[("o", "O")], [("o", "O", (0,))], [("in", [("x", "<i4"), ("o", "O")])]])
def test_records_with_objects(tmp_path, inner):
    """The file holds a pickle, so no field can be read."""
    array = np.zeros(2, [("a", "<i4"), *inner])
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(FileError, match="pickled Python objects"):
        dlx.open(tmp_path / "x.npy")
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", t=array, b=np.ones(2))
        file = dlx.open(tmp_path / "x.npz", "numpy", raw="bfloat16")
        with pytest.raises(DTypeError, match=r"at obj\['t'\]: it contains pickled Python objects"):
            file["t"]
        assert file["b"].tolist() == [1, 1]


def test_records_are_saved_by_field(tmp_path):
    """`dlx.save` and `dlx convert` name them with a dot."""
    array = np.zeros(4, [("a", "<f4"), ("b", ">i4")])
    array["b"] = range(4)
    np.savez(tmp_path / "x.npz", t=array)
    dlx.save(dlx.open(tmp_path / "x.npz"), tmp_path / "y.npz")
    assert np.load(tmp_path / "y.npz")["t.b"].tolist() == [0, 1, 2, 3]
    np.save(tmp_path / "x.npy", array)
    dlx.save(dlx.open(tmp_path / "x.npy"), tmp_path / "y.npz")
    assert np.load(tmp_path / "y.npz")["b"].tolist() == [0, 1, 2, 3]
    assert here("convert", tmp_path / "x.npy", tmp_path / "y.npz", "--force")[0] == 0
    assert [*np.load(tmp_path / "y.npz")] == ["a", "b"]
    assert [each["path"] for each in document("inspect", tmp_path / "x.npy")["sources"][0]["arrays"]] == ["a", "b"]
