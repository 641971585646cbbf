"""All names of a file are listed: an unsupported member raises its own error and does not affect the others."""

import ast
import contextlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays.examples import examples
from support.arrays.layouts import same
from support.files.writers import gguf, npy, safetensors, said, shards
from support.processes.command import document, refused

import dlx
from dlx._files.hdf5 import read_hdf5
from dlx._files.header import File, reader_error
from dlx.errors import DlxError, DTypeError, FileError


def fates(path, inspected=True, to="numpy"):
    """Return the array or error text for each name of a file; check that the plan and `inspect` agree."""
    file, found = dlx.open(path, to), {}
    for key in file:
        try:
            found[key] = file[key]
        except DTypeError as error:
            assert error.path == (key,)
            found[key] = str(error)
        except dlx.errors.ConversionError as error:
            found[key] = str(error)
    refusals = {key for key, value in found.items() if isinstance(value, str)}
    leaves = dlx.plan(file, to=to).leaves
    assert sum(leaf.outcome == "refused" for leaf in leaves) == len(refusals)
    (source,) = document("inspect", path)["sources"]
    names = [f"{key}.{name}" for key, value in found.items() for name in (value if is_records(value) else ())]
    assert [each["path"] for each in source["arrays"] if each["path"] not in names] == [
        key for key, value in found.items() if not is_records(value)
    ]
    assert not inspected or {each["path"] for each in source["arrays"] if each["refused"]} == refusals
    return found


def is_records(value):
    """Return whether a member is a mapping of fields."""
    return hasattr(value, "keys")


# ---- .npy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["(3L,)", "(3L, )", "(1L, 3L)", "( 3L ,1)", "(3,)"])
@pytest.mark.parametrize("version", [1, 2])
def test_headers_of_python_2(tmp_path, np, shape, version):
    """Integers in these headers end in L; numpy reads them with a warning."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    head = b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 * version, "little")
    (tmp_path / "x.npy").write_bytes(head + text + np.arange(3, dtype="f4").tobytes())
    found = dlx.open(tmp_path / "x.npy", "numpy")[""]
    assert found.ravel().tolist() == [0, 1, 2] and found.shape == tuple(ast.literal_eval(shape.replace("L", "")))


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=examples(400), deadline=None, database=None)
@given(LITERALS)
def test_literals_of_headers(value):
    """Any literal that Python writes is read as the same value."""
    from dlx._files.npy import _parse_literal

    assert _parse_literal(repr(value)) == value
    assert _parse_literal(f"  {value!r} \n") == value


@settings(max_examples=examples(400), deadline=None, database=None)
@given(st.text(alphabet="()[]{}'\"\\,:L019-+ \n.aTrueNoFls", max_size=60))
def test_texts_that_are_no_literals(text):
    """A text that Python cannot read raises one of three errors and never returns a value."""
    from dlx._files.npy import _parse_literal

    try:
        found = _parse_literal(text)
    except (ValueError, SyntaxError, TypeError):
        return
    assert found == ast.literal_eval(re.sub(r"(?<=\d)L", "", text).strip())


@pytest.mark.parametrize(
    "text", ["(" * 1000, "-" * 9000 + "1", "not " * 9000 + "1", "lambda:" * 5000 + "1", "[" * 33 + "]" * 33]
)
def test_deep_literals(text):
    """Deep literals are refused before the parser's stack overflows, which Python reports as MemoryError."""
    from dlx._files.npy import _parse_literal

    with pytest.raises(ValueError):
        _parse_literal(text)


def test_odd_npy_files(tmp_path, np):
    """Several arrays in one file are refused; structures give their fields; the byte order may be missing."""
    out = io.BytesIO()
    for value in (1, 2):
        np.save(out, np.full(3, value))
    (tmp_path / "two.npy").write_bytes(out.getvalue())
    with pytest.raises(FileError, match=r"several arrays, one after the other. Read each with numpy.load"):
        dlx.open(tmp_path / "two.npy")
    assert "several arrays" in refused("inspect", tmp_path / "two.npy")
    table = np.zeros(2, [("it's", "f4"), ("b", "i8", (2,))])
    np.save(tmp_path / "t.npy", table)
    fields = dlx.open(tmp_path / "t.npy", "numpy")[""]
    assert {name: each.shape for name, each in fields.items()} == {"it's": (2,), "b": (2, 2)}
    assert [each["path"] for each in document("inspect", tmp_path / "t.npy")["sources"][0]["arrays"]] == ["it's", "b"]
    (tmp_path / "x.npy").write_bytes(npy("f4", (2,), b"\0\0\x80?" * 2))
    assert dlx.open(tmp_path / "x.npy", "numpy")[""].tolist() == np.load(tmp_path / "x.npy").tolist() == [1, 1]


# ---- .npz ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_npz_of_every_method(tmp_path, np, method):
    """Like numpy, dlx reads every compression method, 64-bit sizes, a comment, and an archive after a program."""
    noise = np.random.default_rng(1).integers(0, 256, 300_001, dtype=np.uint8)
    made = {
        "noise": noise,
        "zeros": np.zeros(5_000_000, np.uint16),
        "big": np.arange(9, dtype=">f8"),
        "none": np.ones((0, 2)),
    }
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.comment = b"made by hand" * 100
        for name, array in made.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array)
    for prefix in (b"", b"#!/bin/sh\nexec unzip $0\n" * 30):
        path.write_bytes(prefix + path.read_bytes())
        found = dlx.open(path, "numpy")
        assert list(found) == list(made)
        for name, array in made.items():
            assert same(np, found[name], array.astype(array.dtype.newbyteorder("=")))
    if method:
        packed = bytearray(path.read_bytes())
        packed[len(prefix) + 100] ^= 0xFF
        path.write_bytes(packed)
        with pytest.raises(DlxError, match=r"damaged|valid|checksum|another file|version"):
            dlx.open(path)["noise"]


def test_npz_with_odd_members(tmp_path, np):
    """Text, objects, other files, encrypted members and unknown methods each raise their own error."""
    path = tmp_path / "x.npz"
    good, out = npy("<f4", (2,), bytes(8)), io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.mkdir("folder") if hasattr(archive, "mkdir") else None
        for name, content in {
            "good.npy": good,
            "no suffix": good,
            "readme.txt": b"hello",
            "short.npy": b"abc",
            "empty.npy": b"",
            "void": b"",
            "table.npy": npy([("a", "<f4")], (2,), bytes(8)),
            "folder/in.npy": good,
            "locked.npy": good,
            "method.npy": good,
        }.items():
            archive.writestr(name, content)
    raw = bytearray(out.getvalue())
    for name, offset, value in ((b"locked.npy", 8, 1), (b"method.npy", 10, 97)):
        at = raw.rindex(b"PK\1\2", 0, raw.rindex(name))
        raw[at + offset] = value
        here = raw.index(b"PK\3\4", raw.index(name) - 40)
        raw[here + offset - 2] = value
    path.write_bytes(raw)
    found = fates(path)
    assert found.keys() == {
        "good", "no suffix", "readme.txt", "short", "empty", "void", "table", "folder/in", "locked", "method",
    }  # fmt: skip
    for name in ("good", "no suffix", "folder/in"):
        assert found[name].tolist() == [0, 0]
    for name, words in (
        ("readme.txt", "another file in the archive"),
        ("short", "another file in the archive"),
        ("empty", "it is empty, without the header of an array"),
        ("void", "another file in the archive"),
        ("locked", "it is encrypted"),
        ("method", "compressed with method 97"),
    ):
        assert words in found[name], (name, found[name])


def test_zips_that_hold_more_than_their_list(tmp_path, np):
    """Duplicate names and two concatenated archives are refused, unless all members are listed; for .npz and .pt."""
    two = io.BytesIO()
    for name in "ab":
        one = io.BytesIO()
        np.savez(one, **{name: np.ones(2)})
        two.write(one.getvalue())
    (tmp_path / "x.npz").write_bytes(two.getvalue())
    with pytest.raises(FileError, match="several zip archives"):
        dlx.open(tmp_path / "x.npz")
    with pytest.warns(UserWarning), zipfile.ZipFile(tmp_path / "y.npz", "w") as archive:
        for _ in range(2):
            archive.writestr("a.npy", npy("<f4", (2,), bytes(8)))
    with pytest.raises(FileError, match=r"its header lists 'a.npy' twice"):
        dlx.open(tmp_path / "y.npz")
    with zipfile.ZipFile(tmp_path / "z.npz", "w") as archive:
        for name in ("a.npy", "a"):
            archive.writestr(name, npy("<f4", (2,), bytes(8)))
    with pytest.raises(FileError, match=r"its header lists 'a' twice"):
        dlx.open(tmp_path / "z.npz")


def test_zip_members_in_one_another(tmp_path):
    """A list may refer to a member inside another, or beyond the file; newer zipfile versions detect it, too."""

    def parts(name, content):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr(name, content)
        raw = out.getvalue()
        listed, end = raw.rindex(b"PK\1\2"), raw.rindex(b"PK\5\6")
        return raw[:listed], bytearray(raw[listed:end]), bytearray(raw[end:])

    inner, listed, _ = parts("b.npy", npy("<f4", (2,), bytes(8)))
    outer, first, end = parts("a.npy", npy("|u1", (len(inner),), inner))
    (tmp_path / "x.npz").write_bytes(outer + first + end)
    assert [*dlx.open(tmp_path / "x.npz")] == ["a"]
    listed[42:46] = outer.index(inner).to_bytes(4, "little")
    end[8:16] = struct.pack("<HHI", 2, 2, len(first + listed))
    (tmp_path / "x.npz").write_bytes(outer + first + listed + end)
    with pytest.raises(FileError, match=r"(?i)overlap"):
        dlx.open(tmp_path / "x.npz")
    outer, first, end = parts("a.npy", npy("<f4", (2,), bytes(8)))
    first[20:28] = struct.pack("<II", 5000, 5000)
    (tmp_path / "x.npz").write_bytes(outer + first + end)
    with pytest.raises(FileError, match=r"(?i)end after the file|overlap"):
        dlx.open(tmp_path / "x.npz")


def test_two_checkpoints_in_one_file(tmp_path, torch):
    """It is refused; torch silently reads the last checkpoint."""
    for name in "ab":
        torch.save({name: torch.ones(2)}, tmp_path / name)
    (tmp_path / "x.pt").write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    with pytest.raises(FileError, match="several zip archives"):
        dlx.open(tmp_path / "x.pt")


# ---- .gguf -----------------------------------------------------------------------------------------------------------


def test_gguf_with_odd_tensors(tmp_path):
    """Quantized, unknown and scalar types are refused by name; metadata has builtin values."""
    path = tmp_path / "x.gguf"
    nested = struct.pack("<IQ", 9, 2) + struct.pack("<IQ2B", 0, 2, 1, 2) + struct.pack("<IQ", 8, 0)
    values = [
        said("a.list", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
        said("nested", 9, nested),
        said("e", 9, struct.pack("<IQ", 0, 0)),
    ]
    tensors = {"w": (0, (2,), bytes(8)), "q": (8, (32,), bytes(34)), "new": (77, (4,), b""), "z": (0, (), bytes(4))}
    path.write_bytes(gguf(tensors, values=values))
    found = fates(path)
    assert list(found) == list(tensors) and found["w"].shape == (2,) and found["z"].shape == ()
    assert "quantized (Q8_0)" in found["q"] and "type 77" in found["new"]
    assert dict(dlx.open(path).metadata) == {"a.list": [1, 2, 3], "nested": [[1, 2], []], "e": []}
    path.write_bytes(gguf({"a": (8, (), bytes(34))}))
    with pytest.raises(FileError, match="rows of 1 elements, but Q8_0 has blocks of 32"):
        dlx.open(path)
    for count in (0, 2, 3):
        path.write_bytes(gguf({"a": (0, (2,), bytes(8))}, values=[said("split.count", 2, struct.pack("<H", count))]))
        with pytest.raises(FileError, match=rf"one of {count} files of a model.*llama-gguf-split --merge"):
            dlx.open(path)
    path.write_bytes(gguf({"a": (0, (2,), bytes(8))}, values=[said("split.count", 2, struct.pack("<H", 1))]))
    assert list(dlx.open(path)) == ["a"]


GGUF_TENSORS = st.dictionaries(
    st.text("abcxyz.0", min_size=1, max_size=5),
    st.tuples(st.integers(0, 45), st.lists(st.integers(0, 70), max_size=4).map(tuple)),
    max_size=4,
)


def test_gguf_headers_of_any_type_and_shape(tmp_path_factory):
    """Opening returns every tensor by its name or raises one FileError."""
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"

    @settings(max_examples=examples(200), deadline=None, database=None)
    @given(GGUF_TENSORS)
    def check(tensors):
        path.write_bytes(
            gguf({name: (kind, shape, bytes(64)) for name, (kind, shape) in tensors.items()}) + bytes(1 << 12)
        )
        try:
            file = dlx.open(path)
        except FileError:
            return
        assert list(file) == list(tensors)
        for key in file:
            with contextlib.suppress(DTypeError):
                assert file[key].shape == tuple(reversed(tensors[key][1]))

    check()


# ---- .safetensors ----------------------------------------------------------------------------------------------------


def test_safetensors_of_an_unknown_dtype(tmp_path):
    """An unknown dtype is refused when it is read; a duplicate name is refused when the file is opened."""
    path = tmp_path / "x.safetensors"
    header = {
        "new": {"dtype": "F2", "shape": [4], "data_offsets": [0, 1]},
        "w": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
    }
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"abc")
    found = fates(path)
    assert found["w"].tolist() == [98, 99] and "the dtype 'F2'" in found["new"]
    raw = b'{"w": 1, "w": 2}'
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(FileError, match=r"its header lists 'w' twice"):
        dlx.open(path)


def test_names_that_an_index_forgets(tmp_path):
    """Unlisted tensors belong to the checkpoint, stale copies do not; the files' metadata is kept."""
    index = shards(tmp_path, {"a": ("F32", (2, 3)), "b": ("I64", (4,))})
    first = "model-00001-of-00002.safetensors"
    safetensors(
        tmp_path / first, {"a": ("F32", (2, 3)), "b": ("F32", (1,)), "c": ("F32", (5,))}, metadata={"format": "pt"}
    )
    for path in (tmp_path, index):
        file = dlx.open(path)
        assert {key: file[key].shape for key in file} == {"a": (2, 3), "c": (5,), "b": (4,)}
        assert dict(file.metadata) == {"format": "pt", "total_size": "1"}
    second = "model-00002-of-00002.safetensors"
    safetensors(tmp_path / second, {"b": ("I64", (4,)), "c": ("F32", (5,))})
    with pytest.raises(FileError, match="two of its files contain 'c'"):
        dlx.open(index)


# ---- HDF5 ------------------------------------------------------------------------------------------------------------


def test_hdf5_with_odd_members(tmp_path, np):
    """Links, types, second names, dimensions, structures, external data and unknown filters are all listed."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as out:
        out["g/a"] = np.arange(3.0)
        out["hard"], out["second"], out["g/self"] = out["g/a"], out["g"], out["g"]
        out["soft"], out["a link"] = h5py.SoftLink("/g/a"), h5py.SoftLink("/g")
        out["loop"], out["nowhere"] = h5py.SoftLink("/loop"), h5py.SoftLink("/none/x")
        out["outside"] = h5py.ExternalLink("other.h5", "/x")
        out["through"], out["twice"] = h5py.SoftLink("/outside"), h5py.SoftLink("/soft")
        out["pipe"], out["to the pipe"] = h5py.ExternalLink("pipe.h5", "/x"), h5py.SoftLink("/pipe")
        out["soft type"] = h5py.SoftLink("/type")
        out["type"] = np.dtype("f4")
        out["table"] = np.zeros(2, [("a", "f4"), ("b", "i8")])
        out["text"], out["ref"] = "abc", np.array([out["g"].ref], dtype=h5py.ref_dtype)
        out["long"] = np.ones(2, np.longdouble)
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource("other.h5", "x", (3,))
        out.create_virtual_dataset("virtual", layout)
        scale = out.create_dataset("dimension", (3,), "f4")
        scale.make_scale("This is a netCDF dimension but not a netCDF variable.         3")
        out["scale"] = np.arange(2.0)
        out["scale"].make_scale("x")
        h5py.h5d.create(out.id, b"bits", h5py.h5t.NATIVE_B8, h5py.h5s.create_simple((2,)))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((2,))
        plist.set_filter(32123, h5py.h5z.FLAG_OPTIONAL)
        h5py.h5d.create(out.id, b"filtered", h5py.h5t.NATIVE_INT8, h5py.h5s.create_simple((2,)), plist)
        out["filtered"].id.write_direct_chunk((0,), b"??")
        h5py.h5d.create(out.id, b"unwritten", h5py.h5t.NATIVE_INT8, h5py.h5s.create_simple((2,)), plist)
        out.attrs["title"], out.attrs["n"], out.attrs["list"] = "abc", np.float32(2), np.arange(3)
        out.attrs["bytes"], out.attrs["texts"], out.attrs["ok"] = np.bytes_(b"x"), ["a", "b"], True
        out.attrs["ref"], out.attrs["null"], out.attrs["none"] = out["g"].ref, h5py.Empty("f4"), h5py.Empty("S1")
        out.attrs["record"] = np.zeros(2, [("a", "f4")])
        out["scale"].attrs["scale_factor"] = 0.5
        names = set(out) - {"g"} | {"g/a", "g/self"}
    with h5py.File(tmp_path / "other.h5", "w") as out:
        out["x"] = np.arange(3.0)
    os.mkfifo(tmp_path / "pipe.h5")  # opening it would block forever
    found = fates(path)
    assert found.keys() == names
    for name in ("g/a", "hard", "soft"):
        assert found[name].tolist() == [0, 1, 2]
    assert found["virtual"].tolist() == [0, 1, 2]
    assert found["scale"].tolist() == [0, 1] and found["bits"].shape == (2,)
    assert found["unwritten"].tolist() == [0, 0]  # no chunk, so its filter is not needed
    for name, words in {
        "second": "another name of the group", "g/self": "another name of the group '/",
        "a link": "a link to the group '/g'", "loop": "which is missing",
        "nowhere": "a link to '/none/x', which is missing", "outside": "a link to another file, 'other.h5'",
        "through": "behind another link", "twice": "behind another link", "to the pipe": "behind another link",
        "pipe": "a link to another file, 'pipe.h5'", "soft type": "a named type, without data",
        "type": "a named type, without data", "text": "variable length",
        "ref": "variable length, or are references",
        "dimension": "a netCDF dimension of 3, without values",
        "filtered": "it needs the filter 32123", "long": "<f16",
    }.items():  # fmt: skip
        assert any(word in found[name] for word in words.split("|")), (name, found[name])
    metadata = dict(dlx.open(path).metadata)
    unread = "(unsupported value)"
    assert {key: value for key, value in metadata.items() if "@" not in key} == {
        "title": "abc", "n": 2.0, "list": [0, 1, 2], "bytes": "x", "texts": ["a", "b"], "ok": True, "ref": unread,
        "null": unread, "none": "", "record": [unread, unread],
    }  # fmt: skip
    assert metadata["scale@scale_factor"] == 0.5
    json.dumps(metadata)


def test_attributes_are_read_on_demand(tmp_path, monkeypatch):
    """Neither listed nor read when the file is opened; not after it is closed."""
    np, h5py = pytest.importorskip("numpy"), pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as out:
        out["g/a"] = np.arange(3)
        out["g"].attrs["n"], out["g/a"].attrs["m"], out.attrs["k"] = 1, 2, 3
    read = []
    real = h5py.AttributeManager.__getitem__
    monkeypatch.setattr(h5py.AttributeManager, "__getitem__", lambda self, key: read.append(key) or real(self, key))
    file = dlx.open(tmp_path / "x.h5")
    metadata = file.metadata
    assert metadata["g@n"] == 1 and read == ["n"]
    assert metadata == {"k": 3, "g@n": 1, "g/a@m": 2}
    file.close()
    with pytest.raises(FileError, match=r"it is closed, so its attributes cannot be read\. Open it again\."):
        metadata["k"]
    file = dlx.open(tmp_path / "x.h5")
    file.close()
    with pytest.raises(FileError, match="it is closed, so its attributes cannot be read"):
        list(file.metadata)


@pytest.mark.parametrize("failing", ["only", "skip", "raw", "size", "memory"])
def test_a_failed_open_closes_the_reader(tmp_path, failing, monkeypatch):
    """The file can be written again while the error is kept."""
    np, h5py = pytest.importorskip("numpy"), pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as out:
        out["a"] = np.arange(3)
    options = {"only": "typo", "skip": "typo", "raw": {"typo": "int8"}, "size": {"a": "int8"}}
    if failing == "memory":
        monkeypatch.setattr("dlx._files.mapping.Memory", lambda *_, **__: 1 / 0)
    with pytest.raises((FileError, DTypeError, ZeroDivisionError)) as kept:
        dlx.open(
            tmp_path / "x.h5", **{{"size": "raw"}.get(failing, failing): options[failing]} if failing in options else {}
        )
    with h5py.File(tmp_path / "x.h5", "w") as out:
        out["b"] = np.arange(3)
    assert kept


def test_virtual_datasets(tmp_path, np):
    """Sources in the same file or folder are read; those elsewhere, or in raw files, links and pipes are refused."""
    h5py = pytest.importorskip("h5py")
    (tmp_path / "in").mkdir()
    for path in ("s.h5", "in/s.h5"):
        with h5py.File(tmp_path / path, "w") as out:
            out["g/x"], out["link"] = np.arange(3.0), h5py.ExternalLink("other.h5", "/x")
            out["soft"] = h5py.SoftLink("/g/x")
            out.create_dataset("raw", (3,), "f8", external=[("/etc/passwd", 0, 24)])
    os.mkfifo(tmp_path / "pipe.h5")
    sources = {
        "same folder": ("s.h5", "g/x"), "missing": ("none.h5", "g/x"), "no set": ("s.h5", "q"), "raw": ("s.h5", "raw"),
        "below": ("in/s.h5", "g/x"), "absolute": (f"{tmp_path}/s.h5", "g/x"), "above": ("../in/s.h5", "g/x"),
        "link": ("s.h5", "link"), "soft": ("s.h5", "soft"), "pipe": ("pipe.h5", "x"), "chain": ("v.h5", "same folder"),
    }  # fmt: skip
    with h5py.File(tmp_path / "v.h5", "w") as out:
        out["own"] = np.ones(3)
        for name, source in {**sources, "own twice": (".", "own")}.items():
            layout = h5py.VirtualLayout((3,), "f8")
            layout[:] = h5py.VirtualSource(*source, (3,))
            out.create_virtual_dataset(name, layout)
    file = dlx.open(tmp_path / "v.h5", "numpy")
    assert file["same folder"].tolist() == [0, 1, 2] and file["own twice"].tolist() == [1, 1, 1]
    for name in sources:
        if name != "same folder":
            with pytest.raises(DTypeError, match="its elements are in other files"):
                file[name]


def test_hdf5_that_is_deep_or_wide(tmp_path, np):
    """With 2^40 paths or 3,000 levels, each name is listed once, in time proportional to the file."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "wide.h5", "w") as out:
        group = out
        for level in range(40):
            inner = group.create_group(f"a{level}")
            group[f"b{level}"] = inner
            group = inner
        group["x"] = np.ones(2)
    found = fates(tmp_path / "wide.h5")
    assert len(found) == 41 and sum(not isinstance(each, str) for each in found.values()) == 1
    with h5py.File(tmp_path / "deep.h5", "w") as out:
        group = out
        for _ in range(3000):
            group = group.create_group("g")
        group["x"] = np.ones(2)
    (name,) = dlx.open(tmp_path / "deep.h5")
    assert name.count("/") == 3000 and dlx.open(tmp_path / "deep.h5", "numpy")[name].tolist() == [1, 1]


def test_converting_a_file_with_links(tmp_path, np):
    """Names without data are left out and listed; unsupported data raises an error with its name."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as out:
        out["a"], out["type"], out["outside"] = np.ones(2), np.dtype("f4"), h5py.ExternalLink("y.h5", "/x")
    done = document("convert", tmp_path / "x.h5", tmp_path / "x.npz")
    assert [each["path"] for each in done["arrays"]] == ["a"]
    assert done["notes"] == ["left out: outside, type, without an array"]
    with h5py.File(tmp_path / "x.h5", "a") as out:
        out["table"] = np.zeros(2, [("a", "f4")])
        out["text"] = np.zeros(2, "S3")
    assert "'text': DLPack has no text" in refused("convert", tmp_path / "x.h5", tmp_path / "y.npz")
    done = document("convert", tmp_path / "x.h5", tmp_path / "y.npz", "--skip", "text")
    assert [each["path"] for each in done["arrays"]] == ["a", "table.a"]


# ---- Arrow -----------------------------------------------------------------------------------------------------------


def columns(pa):
    """Return {name: (column, whether it is supported)} for each type of pyarrow."""
    lists = pa.list_(pa.int64(), 2)
    tensors = pa.fixed_shape_tensor(pa.int32(), [2])
    return {
        "number": (pa.array([1, 2]), True),
        "half": (pa.array([1.0, 2.0], pa.float16()), True),
        "bool": (pa.array([True, False]), True),
        "pairs": (pa.array([[1, 2], [3, 4]], lists), True),
        "tensor": (pa.ExtensionArray.from_storage(tensors, pa.array([[1, 2], [3, 4]], tensors.storage_type)), True),
        "": (pa.array([1, 2]), True),
        "null": (pa.nulls(2), False),
        "nulls": (pa.array([1, None]), False),
        "dictionary": (pa.array(["a", "b"]).dictionary_encode(), False),
        "list": (pa.array([[1], [2, 3]]), False),
        "large list": (pa.array([[1], [2, 3]], pa.large_list(pa.int8())), False),
        "struct": (pa.array([{"a": 1}, {"a": 2}]), False),
        "map": (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int8())), False),
        "text": (pa.array(["a", "b"]), False),
        "bytes": (pa.array([b"a", b"b"]), False),
        "fixed": (pa.array([b"ab", b"cd"], pa.binary(2)), False),
        "decimal": (pa.array([1, 2], pa.decimal128(5)), False),
        "date": (pa.array([1, 2], pa.date32()), False),
        "time": (pa.array([1, 2], pa.timestamp("us", "UTC")), False),
        "runs": (pa.RunEndEncodedArray.from_arrays([2], [1.0]), False),
        "union": (
            pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [pa.array([1, 2])]),
            False,
        ),
    }


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_columns_of_every_type(tmp_path, np, kind):
    """Each column is read, or refused by name; a file may have no column; duplicate names are refused."""
    pa = pytest.importorskip("pyarrow")
    made, path = columns(pa), tmp_path / "x.arrow"

    def write(table, where=path):
        with getattr(pa.ipc, f"new_{kind}")(str(where), table.schema) as sink:
            sink.write_table(table)

    write(pa.table({name: column for name, (column, _) in made.items()}))
    found = fates(path, inspected=False)  # it reads only the schema, without nulls
    assert list(found) == list(made)
    assert {name: not isinstance(value, str) for name, value in found.items()} == {
        name: read for name, (_, read) in made.items()
    }
    write(pa.table({}))
    assert dlx.open(path).materialize() == {}
    write(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]))
    with pytest.raises(FileError, match=r"its header lists 'a' twice"):
        dlx.open(path)


def test_several_arrow_streams_in_one_file(tmp_path, np):
    """It is refused; pyarrow silently reads the first stream; a stream without an end mark is read."""
    pa = pytest.importorskip("pyarrow")
    table, path = pa.table({"a": [1, 2]}), tmp_path / "x.arrows"
    with pa.ipc.new_stream(str(path), table.schema) as sink:
        sink.write_table(table)
        sink.write_table(table)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    assert dlx.convert(dlx.open(path)["a"], to="numpy").tolist() == [1, 2, 1, 2]
    path.write_bytes(whole + whole)
    for call in (lambda: dlx.open(path), lambda: pytest.fail(refused("inspect", path))):
        with pytest.raises((FileError, pytest.fail.Exception), match="several Arrow streams"):
            call()


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_the_best_that_compression_does(tmp_path, np, method):
    """bzip2 compresses 64 MiB of zeros to 181 bytes, within dlx's limit on claimed sizes."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as out, out.open("a.npy", "w") as member:
        np.lib.format.write_array(member, np.zeros(1 << 26, np.uint8))
    assert dlx.describe(dlx.open(tmp_path / "x.npz", to="numpy")["a"]).shape == (1 << 26,)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("pyarrow", "Unknown error: Failed to launch worker thread: Resource temporarily unavailable"),
        ("torch", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
        ("torch", "[enforce fail at alloc_cpu.cpp:117]\nDefaultCPUAllocator: can't allocate memory"),
        ("h5py", "Can't synchronously read data (can't allocate memory for the buffer)"),
        ("pyarrow", "Memory mapping file failed: [errno 12] Cannot allocate memory"),
    ],
)
def test_a_library_that_lacks_memory_or_threads(package, words):
    """These errors become MemoryError, whatever their class; the texts were recorded under a memory limit."""
    assert type(reader_error(package, OSError(words))) is MemoryError
    assert type(reader_error(package, OSError("Invalid: the file is cut off"))) is FileError


def test_several_arrow_files_in_one(tmp_path, np):
    """It is refused, since pyarrow would apply the last footer to the first file; data may contain the signature."""
    pa = pytest.importorskip("pyarrow")
    wholes = []
    for name, values in (("a", [1, 2]), ("b", [3, 4, 5])):
        table, path = pa.table({name: values}, metadata={"note": "ARROW1\0\0" * 9}), tmp_path / f"{name}.arrow"
        with pa.ipc.new_file(str(path), table.schema) as sink:
            for _ in values:
                sink.write_table(table)
        assert dlx.convert(dlx.open(path)[name], to="numpy").tolist() == values * len(values)
        wholes.append(path.read_bytes())
    for parts in (wholes, wholes[::-1], [wholes[0]] * 3):
        path.write_bytes(b"".join(parts))
        with pytest.raises(FileError, match="several Arrow files"):
            dlx.open(path)
        assert "several Arrow files" in refused("plan", path, "--to", "numpy")


@pytest.mark.parametrize("pad", [False, True])
def test_several_gguf_files_in_one(tmp_path, pad):
    """It is refused, since the second model would be ignored."""
    whole = gguf({"a": (24, (3,), b"abc")})
    (tmp_path / "one.gguf").write_bytes(whole + bytes(29 * pad))
    assert [*dlx.open(tmp_path / "one.gguf")] == ["a"]
    (tmp_path / "two.gguf").write_bytes(whole + bytes(29 * pad) + whole)
    with pytest.raises(FileError, match="several models"):
        dlx.open(tmp_path / "two.gguf")


@pytest.mark.parametrize("block", [0, 512, 2048])
@pytest.mark.parametrize("version", ["earliest", "v108", "v110"])  # of the superblock: 0, 2, 3
def test_several_hdf5_files_in_one(tmp_path, np, version, block):
    """It is refused; h5py silently reads the first file; the signature inside data is no second file."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver=(version, "latest"), userblock_size=block) as made:
        made["a"] = np.frombuffer(b"\x89HDF\r\n\x1a\n" * 200, "u1")
    whole = path.read_bytes()
    for extra in (b"", b"\0", b"\0" + whole):
        path.write_bytes(whole + extra)
        assert dlx.convert(dlx.open(path)["a"], to="numpy").size == 1600
    path.write_bytes(whole + whole[block:])
    with pytest.raises(FileError, match="several HDF5 files"):
        dlx.open(path)
    assert "several HDF5 files" in refused("inspect", path)


@pytest.mark.parametrize("missing", [0, 1])
def test_an_hdf5_file_that_is_not_as_long_as_its_data(tmp_path, np, missing):
    """Older HDF5 versions trust the address of a dataset, and a file may have grown since it was opened."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as made:
        made["a"] = np.arange(1000)
        end = made["a"].id.get_offset() + 8000
    with File(tmp_path / "x.h5") as file:
        file.size = end - missing
        if missing:
            with pytest.raises(FileError, match=r"it is truncated: 'a' ends after the file"):
                read_hdf5(file)
        else:
            contents = read_hdf5(file)
            assert next(iter(contents.entries.values())).offset == end - 8000
            contents.close()


def test_an_empty_member_is_not_left_out(tmp_path):
    """An empty .npy member is a lost array and refused; an empty file with another suffix is not an array."""
    for name in ("void", "a.npy"):
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("good.npy", npy("<f4", (2,), bytes(8)))
            archive.writestr(name, b"")
        command = ("convert", tmp_path / "x.npz", tmp_path / f"{name}.safetensors")
        if name == "void":
            assert document(*command)
        else:
            assert "'a': it is empty, without the header of an array" in refused(*command)


def test_arrow_buffers_that_end_too_early(tmp_path, np):
    """After a change of any bit in the buffer list, no column is opened that extends beyond its buffer."""
    pa = pytest.importorskip("pyarrow")
    table, path, reasons = pa.table({"a": [1, 2, 3], "b": [4, 5, 6]}), tmp_path / "x.arrow", []
    with pa.ipc.new_file(str(path), table.schema) as sink:
        sink.write_table(table)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            dlx.open(path)
        except FileError as error:
            reasons.append(error.reason)
    assert any("too small in array of type int64 and length 3" in each for each in reasons)


def test_arrow_lengths_that_lie(tmp_path, np):
    """An impossible length of a compressed buffer is an error of the file, not a MemoryError."""
    pa = pytest.importorskip("pyarrow")
    table, path = pa.table({"a": np.zeros(10_000)}), tmp_path / "x.arrow"
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as sink:
        sink.write_table(table)
    whole = path.read_bytes()
    at = whole.index((80_000).to_bytes(8, "little") + b"\x04\x22\x4d\x18")
    path.write_bytes(whole[:at] + (1 << 55).to_bytes(8, "little") + whole[at + 8 :])
    with pytest.raises(FileError, match=r"claims a buffer of 32\.0 PiB, more than [\d,]+ bytes can hold"):
        dlx.open(path)


# ---- memory ----------------------------------------------------------------------------------------------------------

MEMORY = """
import resource, sys
import numpy, dlx
for name in sys.argv[2].split():
    __import__(name)
path = sys.argv[1]
with dlx.open(sys.argv[3]) as file:  # imports first, since they need memory, too
    list(file.values())
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 25),) * 2)
try:
    list(dlx.open(path).values())
    print("read")
except MemoryError:
    print("memory")
"""


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "gguf", "pt", "arrow", "h5"])
@pytest.mark.native("it does not bound the address space")
@pytest.mark.unsanitized("the sanitizer needs its own memory")
def test_lack_of_memory_is_a_memory_error(tmp_path, np, kind):
    """It is never reported as a damaged file, which a caller may delete."""
    large, needs = 1 << 27, ""
    for name, size in (("small", 100), ("large", large)):
        path, array = tmp_path / f"{name}.{kind}", np.zeros(size, np.uint8)
        if kind == "npy":
            np.save(path, array)
        elif kind == "npz":
            np.savez_compressed(path, a=array)
        elif kind == "safetensors":
            raw = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
            path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(size))
        elif kind == "gguf":
            path.write_bytes(gguf({"a": (24, (size,), bytes(size))}))
        elif kind == "pt":
            needs = "torch"
            pytest.importorskip("torch").save({"a": __import__("torch").from_numpy(array)}, path)
        elif kind == "arrow":
            needs = "pyarrow pyarrow.ipc"
            pa = pytest.importorskip("pyarrow")
            table = pa.table({"a": array})
            with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as sink:
                sink.write_table(table)
        else:
            needs = "h5py"
            with pytest.importorskip("h5py").File(path, "w") as out:
                out.create_dataset("a", data=array, compression="gzip", chunks=(min(size, 1 << 20),))
    command = [sys.executable, "-W", "ignore", "-c", MEMORY, str(path), needs, str(tmp_path / f"small.{kind}")]
    env = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the other pools reserve a gigabyte in advance
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert (done.returncode, done.stdout) == (0, "memory\n"), done.stderr


def test_a_file_that_shrinks_while_it_is_opened(tmp_path, monkeypatch):
    """Mmap raises a ValueError for the length; dlx raises a FileError with the path."""
    from dlx._files import header

    path = tmp_path / "x.npy"
    path.write_bytes(npy("<f4", (9000,), bytes(36_000)))
    plain = header.Memory.__init__

    def later(self, file, **options):
        path.write_bytes(path.read_bytes()[:100])
        plain(self, file, **options)

    monkeypatch.setattr(header.Memory, "__init__", later)
    with pytest.raises(FileError, match=r"x\.npy: another program truncated it"):
        dlx.open(path)


def test_every_error_of_a_file_names_it(tmp_path):
    """The message contains the path, the reason and one fix."""
    (tmp_path / "x.npz").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(DlxError) as caught:
        dlx.open(tmp_path / "x.npz")
    assert str(tmp_path / "x.npz") in str(caught.value) and caught.value.fix == "Save or download it again."
