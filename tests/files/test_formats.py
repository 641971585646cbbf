"""`dlx.open` for every format, dtype and layout: arrays share the file's memory, or the plan reports a copy."""

import contextlib
import itertools
import json
import struct
import zipfile

import pytest
from support.arrays.layouts import DTYPES, address, fill, same
from support.files.writers import gguf, npy, safetensors, said, shards

import dlx
from dlx.errors import CopyRequiredError, DTypeError, FileError

SHAPES = [(), (7,), (2, 3, 4), (0,), (3, 0, 2)]
SAFETENSORS = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn": "F4",
    "float6_e2m3fn": "F6_E2M3",
    "float6_e3m2fn": "F6_E3M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"{kind}int{bits}": f"{'U' if kind else 'I'}{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
}


def bytes_of(tensor):
    """Return the bytes of a row-major tensor of any dtype."""
    return bytes(dlx.ffi.buffer(dlx.ffi.cast("char *", tensor.data_ptr), tensor.nbytes)) if tensor.nbytes else b""


def in_map(tensor, path):
    """Return the offset in the file of a tensor's memory, which must be in a mapping of that file."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(str(path)):
                span, _, offset = line.split()[:3]
                low, high = (int(each, 16) for each in span.split("-"))
                if low <= tensor.data_ptr < high or (not tensor.nbytes and tensor.data_ptr == high):
                    return tensor.data_ptr - low + int(offset, 16)
    return None


@pytest.mark.parametrize("dtype", DTYPES)
def test_npy(tmp_path, np, dtype):
    """Values, shapes and strides match numpy's; arrays use the file's memory, read-only."""
    for number, (shape, order) in enumerate(itertools.product(SHAPES, "CF")):
        path, made = tmp_path / f"{number}.npy", np.array(fill(np, dtype, shape), order=order)
        np.save(path, made)
        with dlx.open(path) as file:
            (tensor,) = file.values()
            assert list(file) == [""]
            assert tensor.readonly and (not made.size or in_map(tensor, path) == path.stat().st_size - made.nbytes)
            found = dlx.convert(tensor, to="numpy")
        assert same(np, found, made) and address(found) == tensor.data_ptr
        assert not found.flags.writeable
        assert made.size < 2 or tensor.strides == tuple(step // made.itemsize for step in made.strides)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in ("bool", "int8", "uint8")])
def test_the_other_byte_order(tmp_path, np, dtype):
    """Arrays in the other byte order are copied; the plan reports it and copy=False raises."""
    for shape in SHAPES:
        made = np.asfortranarray(fill(np, dtype, shape)).astype(np.dtype(dtype).newbyteorder(">"))
        np.save(tmp_path / "x.npy", made)
        np.savez_compressed(tmp_path / "x.npz", a=made)
        for name, key in (("x.npy", ""), ("x.npz", "a")):
            file = dlx.open(tmp_path / name, "numpy")
            found = file[key]
            assert found.dtype == np.dtype(dtype) and found.flags.writeable
            assert same(np, found, made.astype(dtype))
            (leaf,) = dlx.plan(file, to="numpy").leaves
            assert leaf.outcome == "copied" and "in the other byte order" in str(leaf)
            if made.size:
                with pytest.raises(CopyRequiredError):
                    dlx.convert(file, to="numpy", copy=False)


def test_npz(tmp_path, np):
    """Stored members are shared at any offset, deflated ones are read; text and objects are refused."""
    made = {dtype: fill(np, dtype, (5, 3)) for dtype in DTYPES} | {"none": np.zeros((0, 3)), "one": np.float32(3)}
    np.savez(tmp_path / "x.npz", **made)
    np.savez_compressed(tmp_path / "c.npz", **made)
    for name, outcome in (("x.npz", "shared"), ("c.npz", "copied")):
        with dlx.open(tmp_path / name) as file:
            assert list(file) == list(made)
            for key, array in made.items():
                tensor = file[key]
                assert same(np, dlx.convert(tensor, to="numpy"), np.asarray(array))
                assert tensor.readonly == (outcome == "shared")
                assert (in_map(tensor, tmp_path / name) is not None) == tensor.readonly or not tensor.nbytes
            assert {leaf.outcome for leaf in dlx.plan(file, to="numpy").leaves if leaf.source.nbytes} == {outcome}
    np.savez(tmp_path / "o.npz", a=np.zeros(2), o=np.array([{}], dtype=object), t=np.array(["x"]))
    file = dlx.open(tmp_path / "o.npz")
    assert file["a"].shape == (2,)
    for key, words in (("o", "pickled Python objects"), ("t", "no text")):
        with pytest.raises(DTypeError, match=words) as caught:
            file[key]
        assert caught.value.path == (key,)


def test_a_large_deflated_member(tmp_path, np):
    """A deflated member that spans several pieces of input and output is read correctly."""
    noise = np.random.default_rng(1).integers(0, 256, 3_000_001, dtype=np.uint8)
    np.savez_compressed(tmp_path / "x.npz", noise=noise, zeros=np.zeros(5_000_000, np.uint16))
    file = dlx.open(tmp_path / "x.npz", "numpy")
    assert (file["noise"] == noise).all() and not file["zeros"].any() and file["zeros"].shape == (5_000_000,)


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(tmp_path, name):
    """Every dtype of the format is bit-exact and uses the file's memory, without numpy or torch."""
    bits, path = dlx.DType(name).bits, tmp_path / "x.safetensors"
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for key, shape, count in (("a", [2, 4], 8), ("none", [0, 4], 0), ("b", [8], 8), ("one", [], 1)):
        raw = bytes(range(65, 65 + -(-count * bits // 8))) if name != "bool" else b"\1\0\1\1\0\0\1\0"[:count]
        header[key] = {"dtype": SAFETENSORS[name], "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    with dlx.open(path) as file:
        assert file.metadata == {"format": "pt"}
        assert list(file) == ["a", "none", "b", "one"]
        for key, tensor in file.items():
            start, end = header[key]["data_offsets"]
            assert tensor.readonly and tensor.dtype == dlx.DType(name) and list(tensor.shape) == header[key]["shape"]
            assert in_map(tensor, path) == 8 + len(raw) + start
            assert bytes_of(tensor) == data[start:end]


def test_safetensors_as_its_library_writes_it(tmp_path, torch):
    """A file saved by torch is opened unchanged for torch; an unaligned tensor is copied."""
    save = pytest.importorskip("safetensors.torch").save_file
    made = {
        "w": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16),
        "q": torch.ones(5).to(torch.float8_e4m3fn),
        "x": torch.arange(3.0),
    }
    save(made, tmp_path / "x.safetensors")
    file = dlx.open(tmp_path / "x.safetensors", to="torch")
    for key, tensor in made.items():
        assert file[key].dtype == tensor.dtype and torch.equal(file[key].view(torch.uint8), tensor.view(torch.uint8))
        assert {leaf.outcome for leaf in dlx.plan(file, to="torch").leaves} == {"copied"}
    shared = dlx.open(tmp_path / "x.safetensors", to="torch", readonly="share")
    where = dlx.open(tmp_path / "x.safetensors")
    assert torch.equal(shared["x"], made["x"])
    shared["w"].zero_()  # private pages
    assert bytes_of(where["w"]) == bytes(made["w"].view(torch.uint8).flatten().tolist())


def test_a_checkpoint_in_several_files(tmp_path):
    """Opening the folder or its index gives the same tensors, each from the right file."""
    index = shards(tmp_path, {"a": ("F32", (2, 3)), "b": ("BF16", (4,)), "none": ("I64", (0,))})
    for path in (tmp_path, index):
        with dlx.open(path) as file:
            assert {key: (str(each.dtype), each.shape) for key, each in file.items()} == {
                "a": ("float32", (2, 3)), "b": ("bfloat16", (4,)), "none": ("int64", (0,)),
            }  # fmt: skip
            assert in_map(file["b"], tmp_path / "model-00002-of-00003.safetensors")
            assert file.metadata == {"total_size": "1"}
    index.unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(FileError, match="it is a folder"):
        dlx.open(tmp_path)
    (tmp_path / "alone").mkdir()
    safetensors(tmp_path / "alone" / "x.safetensors", {"a": ("F32", (2,))})
    assert list(dlx.open(tmp_path / "alone")) == ["a"]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b'X"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":"[1]","data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,01]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}\0',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
        b'{"__metadata__":{"a":"b","a":"c"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"__metadata__":{},"__metadata__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '\ufeff{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.encode(),
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.encode("utf-16"),
        b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[\u0661],"data_offsets":[0,1]}}'.encode(),
    ],
    ids=range(14),
)
def test_headers_that_are_almost_right(tmp_path, header):
    """The safetensors library refuses them, too."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(FileError, match=r"its (header|metadata)|the metadata|0 bytes"):
        dlx.open(path)
    if b'"a":"b","a"' not in header and b'"a":{"dtype":"U8","shape":[0]' not in header:
        with pytest.raises(Exception):  # noqa: B017 - an extension's own class
            pytest.importorskip("safetensors").safe_open(path, "np")


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("metadata", [None, {}, {"a": "{}", "é": "\u2028"}])
def test_headers_of_other_writers(tmp_path, spaces, metadata):
    """Any order of keys, spaces, escapes, and metadata anywhere."""
    entries = {"é": ("F32", [2]), "b\n": ("U8", []), "c": ("BF16", [0, 3]), "d": ("F32", [2])}
    for reverse in (False, True):
        for last in (False, True):
            at, header = 0, {} if metadata is None or last else {"__metadata__": metadata}
            for name, (dtype, shape) in entries.items():
                end = at + {"F32": 8, "U8": 1, "BF16": 0}[dtype]
                entry = [("dtype", dtype), ("shape", shape), ("data_offsets", [at, end])]
                header[name], at = dict(entry[::-1] if reverse else entry), end
            header |= {} if metadata is None or not last else {"__metadata__": metadata}
            raw = json.dumps(header, ensure_ascii=reverse, separators=None if spaces else (",", ":")).encode()
            path = tmp_path / "x.safetensors"
            path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(at))
            file = dlx.open(path)
            assert file.metadata == (metadata or {})
            assert {name: (str(each.dtype), list(each.shape)) for name, each in file.items()} == {
                name: ({"F32": "float32", "U8": "uint8", "BF16": "bfloat16"}[dtype], shape)
                for name, (dtype, shape) in entries.items()
            }


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"a": "../x.safetensors"}, "not a .safetensors file in its folder"),
        ({"a": "/etc/passwd"}, "not a .safetensors file in its folder"),
        ({"a": "gone.safetensors"}, "cannot open .*: No such file"),
        ({"z": "model-00001-of-00001.safetensors"}, "no tensor 'z'"),
        ({"a": "a\0.safetensors"}, "not a .safetensors file in its folder"),
        ({"a": "\ud800.safetensors"}, "cannot open .*surrogates"),
        ({"a": 3}, "no 'weight_map'"),
        (None, "no 'weight_map'"),
    ],
)
def test_an_index_that_lies(tmp_path, places, words):
    """An index may refer only to existing files in its folder."""
    index = shards(tmp_path, {"a": ("F32", (2, 3))})
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(FileError, match=words):
        dlx.open(index)
    index.write_text("{")
    with pytest.raises(FileError, match="not valid JSON"):
        dlx.open(index)


def test_gguf(tmp_path):
    """Unquantized tensors use the file's memory, with reversed extents; quantized ones are refused."""
    path, numbers = tmp_path / "x.gguf", struct.pack("<6f", *range(6))
    vocabulary = struct.pack("<IQQ2sQ1s", 8, 2, 2, b"ab", 1, b"c")
    values = [
        said("general.name", 8, struct.pack("<Q4s", 4, b"tiny")),
        said("tokens", 9, vocabulary),
        said("n", 4, struct.pack("<I", 7)),
        said("flags", 9, struct.pack("<IQ3B", 7, 3, 1, 0, 1)),
    ]
    tensors = {
        "w": (0, (3, 2), numbers),
        "b": (30, (2,), b"\x80\x3f\0\x40"),
        "q": (2, (32, 2), bytes(36)),
        "i": (24, (3,), b"\1\2\3"),
        "new": (99, (4,), b""),
    }
    path.write_bytes(gguf(tensors, values=values))
    with dlx.open(path) as file:
        assert dict(file.metadata) == {
            "general.name": "tiny",
            "tokens": ["ab", "c"],
            "n": 7,
            "flags": [True, False, True],
        }
        assert list(file) == list(tensors)
        assert file["w"].shape == (2, 3) and bytes_of(file["w"]) == numbers
        assert str(file["b"].dtype) == "bfloat16" and bytes_of(file["b"]) == tensors["b"][2]
        assert in_map(file["w"], path) % 32 == 0 and in_map(file["i"], path) % 32 == 0
        for key, words in (("q", r"x.gguf \(Q4_0\[2, 32\]\).*it is quantized \(Q4_0\)"), ("new", "type 99")):
            with pytest.raises(DTypeError, match=words):
                file[key]
        assert [leaf.outcome for leaf in dlx.plan(file, to="dlx").leaves].count("refused") == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gguf({}, version=1), "has format version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian"),
        (gguf({"a": (0, (2,), bytes(8))})[:-1], "it is truncated: its tensors need"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors; dlx reads at most"),
        (gguf({"a": (0, (1 << 62, 4), b"")}), "invalid entry for 'a'"),
        (gguf({"a": (2, (33,), b"")}), "Q4_0 has blocks of 32"),
        (gguf({"a": (0, (1,) * 9, b"")}), "9 dimensions"),
        (gguf({}, values=[said("x", 13, b"")]), "unknown type 13"),
        (gguf({}, values=[said("x", 9, struct.pack("<IQ", 8, 1 << 62))]), "in the middle of its header"),
        (gguf({}, values=[said("x", 9, struct.pack("<IQ", 0, 1 << 62))]), "in the middle of its header"),
        (gguf({}, values=[said("general.alignment", 4, struct.pack("<I", 3))]), "not a power of two"),
        (gguf({}, values=[said("x", 0, b"1")] * 2), "'x' twice"),
        (gguf({name: (0, (2,), bytes(8)) for name in "ab"}).replace(b"b\1", b"a\1"), "twice"),
        (gguf({"a": (0, (16,), bytes(8)), "b": (0, (2,), bytes(64))}), "overlap"),
    ],
)  # fmt: skip
def test_gguf_files_that_lie(tmp_path, content, words):
    """Invalid numbers are refused when the file is opened."""
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(FileError, match=words):
        dlx.open(tmp_path / "x.gguf")


def test_arrow(tmp_path, np):
    """Columns of one batch are shared, several batches are joined; text, nulls and similar columns are refused."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table(
        {
            "x": pa.array(range(5), pa.int32()),
            "d": pa.array([0.5] * 5),
            "s": pa.array(list("abcde")),
            "n": pa.array([1, None, 3, 4, 5]),
            "b": pa.array([True] * 5),
        }
    )
    for name, size, make in (
        ("one.arrow", None, pa.ipc.new_file),
        ("two.arrow", 3, pa.ipc.new_file),
        ("s.arrows", None, pa.ipc.new_stream),
    ):
        with make(str(tmp_path / name), table.schema) as sink:
            sink.write_table(table, max_chunksize=size)
        with dlx.open(tmp_path / name) as file:
            assert list(file) == table.column_names
            assert (in_map(file["d"], tmp_path / name) is None) == (size is not None)
            held = file["x"]
            for key, words in (("s", "no text"), ("n", "1 null")):
                with pytest.raises(dlx.errors.ConversionError, match=words):
                    file[key]
            assert dlx.convert(file["b"], to="numpy").all()
        assert dlx.convert(held, to="numpy").tolist() == [0, 1, 2, 3, 4]
    whole = (tmp_path / "one.arrow").read_bytes()
    for end in range(6, len(whole), 97):
        (tmp_path / "cut.arrow").write_bytes(whole[:end])
        with pytest.raises(FileError):
            dlx.open(tmp_path / "cut.arrow")
    twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pa.ipc.new_file(str(tmp_path / "twice.arrow"), twice.schema) as sink:
        sink.write_table(twice)
    with pytest.raises(FileError, match="twice"):
        dlx.open(tmp_path / "twice.arrow")


def test_checkpoints_of_torch(tmp_path, torch):
    """Tensors are mapped by torch, nested containers become views; code and old formats are refused."""
    weight = torch.arange(12.0).reshape(4, 3).to(torch.bfloat16)
    path = tmp_path / "x.pt"
    torch.save({"model": {"w": weight, "t": weight.T}, "step": 3, "list": [weight]}, path)
    with dlx.open(path) as file:
        assert file["step"] == 3 and list(file) == ["model", "step", "list"]
        tensor = file["model"]["w"]
        assert in_map(tensor, path) and torch.equal(dlx.convert(tensor, to="torch"), weight)
        assert file["list"][0].data_ptr == tensor.data_ptr
    assert bytes_of(tensor) == bytes(weight.view(torch.uint8).flatten().tolist())
    torch.save(weight, path)
    assert list(dlx.open(path)) == [""] and dlx.open(path, "torch")[""].dtype == torch.bfloat16
    torch.save({"x": contextlib.nullcontext()}, path)
    with pytest.raises(FileError, match="needs code"):
        dlx.open(path)
    torch.save({"w": weight}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(FileError, match="it is a pickle"):
        dlx.open(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "constants.pkl"):
            archive.writestr(f"x/{name}", b"\x80\x02}.")
    with pytest.raises(FileError, match="TorchScript"):
        dlx.open(path)


@pytest.mark.parametrize("userblock", [0, 512])
def test_hdf5(tmp_path, np, userblock):
    """Contiguous datasets are shared; chunked, swapped and converted ones are read; names are full paths."""
    h5py = pytest.importorskip("h5py")
    path, made = tmp_path / "x.h5", np.arange(1000.0).reshape(10, 100)
    with h5py.File(path, "w", userblock_size=userblock) as out:
        for dtype in DTYPES:
            out[f"all/{dtype}"] = fill(np, dtype, (3, 4))
        out["scalar"], out["none"] = np.float32(3), np.zeros((0, 2))
        out.create_dataset("chunked", data=made, chunks=(3, 7))
        out.create_dataset("packed", data=made, chunks=(10, 10), compression="gzip", shuffle=True)
        out["swapped"] = made.astype(">f8")
        kind = h5py.h5t.STD_I16LE.copy()
        kind.set_precision(10)
        own = h5py.h5d.create(out.id, b"own", kind, h5py.h5s.create_simple((4,)))
        own.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1, -2, 3, -4], np.int16))
        out.create_dataset("unwritten", (3,), "i4", fillvalue=7)
        out["text"], out["records"] = "abc", np.zeros(2, [("a", "f4")])
        out.create_dataset("outside", (4,), "f4", external=[(str(path), 0, 16)])
        out["empty"] = h5py.Empty("f4")
        out["link"] = h5py.SoftLink("/scalar")
    with dlx.open(path) as file:
        for dtype in DTYPES:
            found = file[f"all/{dtype}"]
            assert found.readonly and in_map(found, path)
            assert same(np, dlx.convert(found, to="numpy"), fill(np, dtype, (3, 4)))
        assert file["scalar"].readonly and file["scalar"].shape == () and file["none"].shape == (0, 2)
        for key, words in (
            ("chunked", "in chunks"), ("packed", "compressed \\(gzip\\)"), ("swapped", "in the other byte order"),
        ):  # fmt: skip
            assert (dlx.convert(file[key], to="numpy") == made).all() and not file[key].readonly
            with pytest.raises(CopyRequiredError, match=words):
                dlx.convert({key: file._source[key]}, to="dlx", copy=False)
        assert dlx.convert(file["records"]["a"], to="numpy").tolist() == [0, 0]
        assert dlx.convert(file["own"], to="numpy").tolist() == [1, -2, 3, -4]
        assert dlx.convert(file["unwritten"], to="numpy").tolist() == [7, 7, 7]
        for key, words in (
            ("text", "variable length"), ("outside", "in other files"), ("empty", "null"),
        ):  # fmt: skip
            with pytest.raises(DTypeError, match=words):
                file[key]
        assert dlx.convert(file["link"], to="numpy") == 3
    with pytest.raises(ValueError, match="closed"):
        file["chunked"]


def test_fortran_order_and_unaligned_data(tmp_path, np, torch):
    """Strides are kept; unaligned data is shared if the target supports it, otherwise copied."""
    made = fill(np, "float64", (3, 4, 5))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for length in range(8):
            archive.writestr("x" * (length + 1) + ".npy", npy("<f8", (3, 4, 5), made.tobytes("F"), order=True))
    with dlx.open(tmp_path / "x.npz") as file:
        starts = {tensor.data_ptr % 8 for tensor in file.values()}
        assert len(starts) > 1
        for tensor in file.values():
            assert tensor.strides == (1, 3, 12)
            assert same(np, dlx.convert(tensor, to="numpy"), made)
            assert (dlx.convert(tensor, to="torch").numpy().view(np.uint64) == made.view(np.uint64)).all()


def test_the_command_inspects_the_same_kinds(tmp_path, np):
    """`dlx inspect` lists the arrays that `dlx.open` returns."""
    from support.processes.command import document

    shards(tmp_path, {"a": ("F32", (2, 3)), "b": ("BF16", (4,))})
    (tmp_path / "x.gguf").write_bytes(gguf({"w": (0, (3, 2), bytes(24)), "q": (2, (32, 2), bytes(36))}))
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros((300, 4), "f4"), b=np.ones(3, ">c8"))
    names = [tmp_path, tmp_path / "x.gguf", tmp_path / "x.npz"]
    with contextlib.suppress(ImportError):
        import h5py

        with h5py.File(tmp_path / "x.h5", "w") as out:
            out["a"] = np.zeros(3)
            out.create_dataset("b", data=np.zeros(3), chunks=(3,), compression="gzip")
        names.append(tmp_path / "x.h5")
    for name in names:
        (source,) = document("inspect", name)["sources"]
        file = dlx.open(name)
        assert [each["path"] for each in source["arrays"]] == list(file)
        for each in source["arrays"]:
            if each["refused"]:
                with pytest.raises(DTypeError):
                    file[each["path"]]
            else:
                assert (each["dtype"], tuple(each["shape"])) == (
                    str(file[each["path"]].dtype),
                    file[each["path"]].shape,
                )
                assert (each["offset"] is not None and not each["byte_order_swapped"]) == file[each["path"]].readonly


def test_a_column_whose_name_is_no_text(tmp_path):
    """Arrow does not check the bytes of names."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"name_of_it": [1.0]})
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        with new(tmp_path / "x.arrow", table.schema) as writer:
            writer.write_table(table)
        path = tmp_path / "x.arrow"
        path.write_bytes(path.read_bytes().replace(b"name_of_it", b"name\xff\xfef_it"))
        with pytest.raises(FileError, match="pyarrow cannot read it: UnicodeDecodeError"):
            dlx.open(path)


def test_the_text_of_zip_errors_is_short(tmp_path):
    """Names of any length are quoted by zipfile."""
    np = pytest.importorskip("numpy")
    np.savez(path := tmp_path / "x.npz", **{"a" * 60_000: np.ones(2)})
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileError, match="not a valid zip file") as caught:
        dlx.open(path)
    assert len(str(caught.value)) < 1000


def test_arrays_of_impossible_size(tmp_path):
    """A chunked dataset may claim any shape: its memory is refused by its name, and too many chunks at once."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path := tmp_path / "x.h5", "w") as file:
        file.create_dataset("large", shape=(1 << 47,), dtype="f8", chunks=(1 << 25,))
        file.create_dataset("many", shape=(1 << 16, 1 << 16), dtype="u1", chunks=(1, 1))
        file["other"] = [1, 2, 3]
    with dlx.open(path, "numpy") as file:
        with pytest.raises(
            MemoryError, match=r"cannot allocate 1\.0 PiB for 'large', whose shape is \[140737488355328\]"
        ):
            file["large"]
        with pytest.raises(FileError, match=r"at obj\['many'\]: it has 4,294,967,296 chunks"):
            file["many"]
        assert file["other"].tolist() == [1, 2, 3]


def test_nested_metadata_of_gguf_is_bounded():
    """A million empty arrays in an array are refused; they would take seconds."""
    count = 1_000_000
    key, empty = struct.pack("<Q", 1) + b"a", struct.pack("<IQ", 0, 0)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, 9, count) + empty * count
    with pytest.raises(FileError, match="too many nested arrays"):
        dlx.open(data)


def test_months_in_an_arrow_file_are_refused_alone(tmp_path):
    """The library pyarrow has no class for arrays of them and raises KeyError; the other columns are read."""
    pa = pytest.importorskip("pyarrow")
    from support.foreign.arrow import Streams, arrow_array, schema, stream

    month, number = (arrow_array(2, None, bytearray(8)) for _ in range(2))
    kind = schema("+s", schema("tiM", name="months"), schema("i", name="x"))
    made = stream(kind, [arrow_array(2, None, children=(month, number))])
    table = pa.RecordBatchReader.from_stream(Streams(made)).read_all()
    with pa.ipc.new_file(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    file = dlx.open(tmp_path / "x.arrow", "numpy")
    assert file["x"].tolist() == [0, 0]
    with pytest.raises(DTypeError, match="month_interval"):
        file["months"]
