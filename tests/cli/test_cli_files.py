"""Files on the command line: only headers are read; damaged, hostile and unsupported files are refused in one line."""

import errno
import io
import json
import os
import random
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
from support.arrays.examples import examples
from support.files.writers import npy, safetensors
from support.processes.command import dlx, document, refused

import dlx as package
from dlx.cli import main

GB100 = 100 << 30


def array(path):
    """Inspect a file with one array."""
    (source,) = document("inspect", path)["sources"]
    (found,) = source["arrays"]
    return found


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    ("descr", "dtype"),
    [("<f4", "float32"), ("|b1", "bool"), ("<c16", "complex128"), ("<u2", "uint16"), ("|i1", "int8")],
)
def test_npy_headers(tmp_path, version, descr, dtype):
    """Dtype, shape, order and offset are read without numpy."""
    path = tmp_path / "x"  # recognized by its first bytes
    path.write_bytes(npy(descr, (2, 3), bytes(6 * int(descr[2:])), order=True, version=version))
    found = array(path)
    assert (found["dtype"], found["shape"], found["layout"]) == (dtype, [2, 3], "F")
    assert found["nbytes"] == 6 * int(descr[2:])
    assert found["offset"] % 64 == 0


def test_npy_as_numpy_writes_it(tmp_path, np):
    """Every dtype that numpy saves is read correctly, or reported as unsupported by DLPack."""
    letters = "?bhilqBHILQefdFD"
    arrays = [np.zeros((3, 2), letter) for letter in letters] + [np.zeros(5, ">i4"), np.zeros((2, 3, 4), order="F")]
    for made in arrays:
        np.save(tmp_path / "x.npy", made)
        found = array(tmp_path / "x.npy")
        assert (found["dtype"], tuple(found["shape"])) == (made.dtype.newbyteorder("=").name, made.shape)
        assert found["nbytes"] == made.nbytes
        assert found["byte_order_swapped"] == (not made.dtype.isnative)
    for made in (np.array(["a"]), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "S4")])):
        np.save(tmp_path / "x.npy", made)
        found = array(tmp_path / "x.npy")
        assert found["dtype"] is None and found["refused"]


def test_npz(tmp_path, np):
    """Every member is listed by its header, compressed or not, in order."""
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", a=np.zeros((300, 4), "f4"), b=np.ones(3, "c8"))
        (source,) = document("inspect", tmp_path / "x.npz")["sources"]
        found = [(each["path"], each["dtype"], each["shape"]) for each in source["arrays"]]
        assert found == [("a", "float32", [300, 4]), ("b", "complex64", [3])]


def test_safetensors(tmp_path):
    """Dtype, shape, offset and metadata are listed; sub-byte dtypes count bits."""
    path = safetensors(
        tmp_path / "x.safetensors",
        {"w": ("BF16", (2, 3)), "q": ("F8_E4M3", (4,)), "z": ("F32", (0, 3)), "n": ("F4", (4, 2))},
        metadata={"format": "pt"},
    )
    (source,) = document("inspect", path)["sources"]
    assert source["metadata"] == {"format": "pt"}
    found = {each["path"]: (each["dtype"], each["nbytes"]) for each in source["arrays"]}
    assert found == {"w": ("bfloat16", 12), "q": ("float8_e4m3fn", 4), "z": ("float32", 0), "n": ("float4_e2m1fn", 4)}
    start = source["arrays"][0]["offset"]
    assert [each["offset"] - start for each in source["arrays"]] == [0, 12, 16, 16]


class Call:
    """Its repr in a header is a call."""

    def __repr__(self):
        return "__import__('os').system('touch PWNED')"


def hostile():
    """Yield the name, bytes and error text of files with a wrong content."""
    good = npy("<f4", (2, 3), bytes(24))
    claims = npy("<f8", (GB100 // 8,), bytes(64))
    nested = b"\x93NUMPY\x02\0" + (1 << 20).to_bytes(4, "little") + b"(" * (1 << 20)
    yield "empty.npy", b"", "it is empty"
    yield "cut.npy", good[:40], "ends in the middle of its header"
    yield "short.npy", good[:-1], "claims 24 B of data, found 23 B"
    yield "claims.npy", claims, "claims 100.0 GiB of data, found 64 B"
    yield "long.npy", b"\x93NUMPY\x02\0\xff\xff\xff\xff", "its header claims 4.0 GiB"
    yield "nested.npy", nested, "its header does not describe an array"
    yield "code.npy", npy("<f4", Call(), b""), "does not describe an array"
    yield "negative.npy", npy("<f4", (-1,), b""), "does not describe an array"
    yield "many.npy", npy("<f4", (1,) * 500, bytes(4), version=2), "does not describe an array"
    yield "wide.npy", npy("<f4", (10**4000,), b"", version=2), "does not describe an array"
    yield "vast.npy", npy("<f4", (1 << 62,) * 128, b"", version=2), "claims more than a million EiB of data"
    yield "dtype.npy", npy("<q99", (1,), bytes(8)), "its header has the invalid dtype '<q99'"
    yield "version.npy", b"\x93NUMPY\x09\0" + bytes(64), "version 9"
    yield "text.npy", b"hello, world, this is text", "it is text that begins with 'hello, world, this is text'"
    yield "text.npz", b"hello, world, this is text", "it is text that begins with"
    yield "other.npy", bytes(range(200, 250)), "it does not begin with the .npy signature"
    yield "other.npz", bytes(range(200, 250)), "it is not a valid zip file"
    yield (
        "object.npy",
        npy("|O", (1,), b"\x80\x04cposix\nsystem\n(S'touch PWNED'\ntR."),
        "can run any code when they are read",
    )
    yield "old.pt", b"\x80\x02cposix\nsystem\n(S'touch PWNED'\ntR.", "weights_only=True"
    yield "text.txt", b"hello, world, this is text", "it is text that begins with"
    yield "other.dat", bytes(range(200, 250)), "unknown file format (supported: .npy,"
    yield "x.pkl", b"\x80\x04cposix\nsystem\n(S'touch PWNED'\ntR.", "can run any code"
    for name, members, words in zips(good, claims):
        yield name, members, words
    for name, header, data, words in tensors():
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        yield name, len(raw).to_bytes(8, "little") + raw + data, words
    yield "huge.safetensors", GB100.to_bytes(8, "little") + b"{}", "its header claims 100.0 GiB"
    yield "top.safetensors", b"\xff" * 8 + b"{}", "its header claims 16.0 EiB"
    yield "empty.safetensors", b"", "it is empty"
    yield "eight.safetensors", b"\5\0\0\0\0", "ends in the middle of its header"
    yield "zeros.safetensors", bytes(999), "its first 512 bytes are 0, as in an incomplete download"


def zipped(**members):
    """Return the bytes of an .npz file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return out.getvalue()


def bomb():
    """Return a file of 256 MiB of blanks; it is created in the test, since each process collects all tests."""
    return zipped(a=b"\x93NUMPY\x02\0" + (1 << 20).to_bytes(4, "little") + b" " * (1 << 28))


def zips(good, claims):
    """Yield hostile .npz files."""
    whole = zipped(a=good, b=good)
    yield "cut.npz", whole[: len(whole) // 2], "not a valid zip file"
    yield "none.npz", zipped(), "without arrays"
    yield "claims.npz", zipped(a=good, big=claims), "member 'big.npy': it is truncated: its header claims 100.0 GiB"
    yield (
        "broken.npz",
        whole.replace(b"\x50\x4b\x03\x04", b"\x50\x4b\x03\x05", 2).replace(b"K\x03\x05", b"K\x03\x04", 1),
        "zip",
    )
    yield "bomb.npz", bomb, "member 'a.npy': its header does not describe an array"
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 1 << 30, 64, 0)  # a list of files of 1 GiB, in a sparse file
    yield "list.npz", (b"PK\3\4", 64 + (1 << 30), end), "its list of files claims more than 16.0 MiB"


def tensors():
    """Yield the name, header, data and error text of hostile .safetensors files."""
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    yield "cut.safetensors", {"a": one}, bytes(7), "it is truncated"
    yield "more.safetensors", {"a": one}, bytes(9), "1 bytes follow its last tensor"
    yield "claims.safetensors", {"a": {**one, "shape": [GB100 // 4], "data_offsets": [0, GB100]}}, b"", "truncated"
    yield "shape.safetensors", {"a": {**one, "shape": [3]}}, bytes(8), "12 bytes by its shape, 8 by its offsets"
    yield "overlap.safetensors", {"a": one, "b": one}, bytes(8), "overlap, or leave a gap"
    yield "gap.safetensors", {"a": {**one, "data_offsets": [8, 16]}}, bytes(16), "leave a gap"
    yield "list.safetensors", [1, 2], b"", "does not describe tensors"
    yield "kind.safetensors", {"a": 3}, b"", "invalid entry for 'a'"
    yield "float.safetensors", {"a": {**one, "shape": [2.0]}}, bytes(8), "invalid entry for 'a'"
    yield "dims.safetensors", {"a": {**one, "shape": [10**18] * 100_000}}, bytes(8), "invalid entry for 'a'"
    yield "json.safetensors", b"{{{{", b"", "not valid JSON"
    yield "deep.safetensors", b'{"a":' * 100_000, b"", "nested too deeply"
    yield "wide.safetensors", {"a": {**one, "shape": [1 << 63, 0]}}, bytes(8), "invalid entry for 'a'"
    yield "vast.safetensors", {"a": {**one, "shape": [1 << 62] * 128}}, bytes(8), "too many bytes"
    yield "twice.safetensors", b'{"a": 1, "a": 2}', b"", "its header lists 'a' twice"
    yield "digits.safetensors", b'{"a": ' + b"9" * 10_000 + b"}", b"", "not valid JSON"


@pytest.mark.few(17)
@pytest.mark.parametrize(("name", "content", "words"), [pytest.param(*each, id=each[0]) for each in hostile()])
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, words):
    """The status is 2, one line names the file, memory is bounded, and nothing is executed."""
    path = tmp_path / name
    content = content() if callable(content) else content
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        start, length, end = content
        path.write_bytes(start)
        os.truncate(path, length)
        with path.open("ab") as file:
            file.write(end)
    said = refused("inspect", path, cwd=tmp_path)
    assert said.startswith(f"dlx inspect: {path}: ")
    assert words in said
    assert sorted(os.listdir(tmp_path)) == [name]


@pytest.mark.parametrize("kind", ["x.npy", "x.npz", "x.safetensors"])
def test_files_with_bytes_changed_by_chance(tmp_path, capsys, kind):
    """For any header, the command answers or prints an error in one line."""
    whole = {
        "x.npy": npy("<f4", (2, 3), bytes(24)),
        "x.npz": zipped(a=npy("<f4", (2, 3), bytes(24)), b=npy(">c16", (2,), bytes(32))),
        "x.safetensors": safetensors(
            tmp_path / "x", {"a.0": ("F32", (2, 3)), "b": ("F4", (4, 2))}, metadata={"format": "pt"}
        ).read_bytes(),
    }[kind]
    chance = random.Random(8)
    path = tmp_path / kind
    statuses = set()
    for _ in range(examples(400)):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.randrange(min(len(content), chance.choice((32, len(content)))))
            new = chance.choice((b"", b"\xff" * 8, b"9" * 30, b"-1", b"[", b"(" * 9, bytes((chance.randrange(256),))))
            content[at : at + chance.randrange(3)] = new
        path.write_bytes(content)
        statuses.add(main(["inspect", str(path)]))
        out, err = capsys.readouterr()
        assert (bool(out), err.count("\n")) in ((True, 0), (False, 1)), bytes(content)
    assert statuses == {0, 2}


def test_what_is_no_file(tmp_path):
    """Missing files, folders, devices and invalid names are refused."""
    os.mkfifo(tmp_path / "pipe")
    assert "no such file" in refused("inspect", tmp_path / "nothing.npy")
    assert "none of the 0 files in this folder has one of the suffixes" in refused("inspect", tmp_path)
    assert "not a regular file" in refused("inspect", tmp_path / "pipe")
    assert "not a regular file" in refused("inspect", "/dev/zero")
    assert "without folders and .py" in refused("inspect", "folder/mod.py:x")
    assert "no file matches this pattern" in refused("plan", "what is this?", "--to", "dlx")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch, capsys):
    """The error has the system's reason, even if it occurs late."""
    path = tmp_path / "x.npy"
    path.write_bytes(npy("<f4", (1,), bytes(4)))

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", denied)
    assert main(["inspect", str(path)]) == 2
    assert capsys.readouterr().err == f"dlx inspect: {path}: Permission denied\n"
    monkeypatch.undo()
    path.chmod(0)
    if not os.access(path, os.R_OK):  # root may read everything
        assert "Permission denied" in refused("inspect", path)


def test_a_large_file_is_not_read(tmp_path):
    """Inspecting 100 GiB of (sparse) data takes no memory and no time."""
    path = tmp_path / "x.npy"
    path.write_bytes(npy("<f8", (GB100 // 8,), b""))
    start = path.stat().st_size
    try:
        os.truncate(path, start + GB100)
    except OSError:
        pytest.skip("no sparse files here")
    status, out, err = dlx("inspect", path)
    assert (status, err) == (0, "")
    assert "100.0 GiB" in out


def test_objects_inside_an_npz(tmp_path, np):
    """They are listed next to the arrays as objects; nothing is unpickled."""
    np.savez(tmp_path / "x.npz", a=np.zeros(3), b=np.array([Evil()], dtype=object))
    (source,) = document("inspect", tmp_path / "x.npz")["sources"]
    assert [(each["path"], each["dtype"], each["refused"]) for each in source["arrays"]] == [
        ("a", "float64", None),
        ("b", None, "it contains pickled Python objects"),
    ]
    assert sorted(os.listdir(tmp_path)) == ["x.npz"]


class Evil:
    """An object whose pickle runs a command when it is read."""

    def __reduce__(self):
        return os.system, ("touch PWNED",)


def test_torch_checkpoints(tmp_path, torch):
    """Nested tensors have dotted names; saved devices and the strides of views are shown."""
    weight = torch.zeros(4, 3, dtype=torch.bfloat16)
    torch.save({"model": {"w": weight, "t": weight.T}, "step": 3}, tmp_path / "x.pt")
    (source,) = document("inspect", tmp_path / "x.pt")["sources"]
    found = {each["path"]: (each["dtype"], each["shape"], each["layout"]) for each in source["arrays"]}
    assert found == {"model.w": ("bfloat16", [4, 3], "C"), "model.t": ("bfloat16", [3, 4], "F")}
    assert "1 value of other types" in source["notes"]


@pytest.mark.slow
def test_a_checkpoint_that_wants_to_run_code(tmp_path, torch):
    """The error names the code, and nothing is run."""
    torch.save({"x": Evil()}, tmp_path / "x.pt")
    said = refused("inspect", tmp_path / "x.pt", cwd=tmp_path, imported=True)
    assert "it needs code" in said and "system" in said
    assert os.listdir(tmp_path) == ["x.pt"]


def test_damaged_checkpoints(tmp_path, torch):
    """Truncated checkpoints, those without tensors, and the old format are refused."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.zeros(1000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not a valid zip file" in refused("inspect", path, imported=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}.")
        archive.writestr("x/byteorder", bytes(65 << 20))
    said = refused("inspect", path)
    assert "claims 68,157,440 bytes; dlx reads at most 67,108,864" in said
    torch.save({"step": 3}, path)
    assert "it contains no tensor" in refused("inspect", path, imported=True)
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    assert "it is a pickle" in refused("inspect", path, imported=True)


@pytest.mark.parametrize("claimed", [b"M\xff\xff", b"\x8a\x08" + (1 << 40).to_bytes(8, "little"), b"J\xff\xff\xff\xff"])
def test_checkpoints_that_claim_what_is_not_there(tmp_path, torch, claimed):
    """Storages larger than the file, of 4 TiB, or of negative size are refused."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data.replace(b"M\xe8\x03", claimed) if name.endswith("data.pkl") else data)
    assert "torch cannot read it" in refused("inspect", path, imported=True)


def test_a_checkpoint_without_torch(tmp_path):
    """The error names the missing package and how to install it."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}.")
    code = """
import sys
sys.meta_path.insert(0, type("Block", (), {"find_spec": lambda name, *rest: None})())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else real(name, package)
import dlx as package
from dlx.cli import main
from dlx.cli.targets import installed_targets
sys.exit(main(sys.argv[1:]))
"""
    status, _, err = dlx("inspect", tmp_path / "x.pt", code=code)
    assert status == 2
    assert "pip install torch" in err


def test_arrow_and_parquet(tmp_path):
    """Names, types and rows are listed."""
    pa = pytest.importorskip("pyarrow")
    parquet, ipc = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.ipc")
    table = pa.table({"a": pa.array([1, 2, 3], pa.int32()), "s": ["x", "y", "z"]})
    parquet.write_table(table, tmp_path / "x.parquet")
    with ipc.new_file(tmp_path / "x.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("x.parquet", "x.arrow"):
        (source,) = document("inspect", tmp_path / name)["sources"]
        numbers, text = source["arrays"]
        assert (numbers["path"], numbers["dtype"], numbers["shape"], numbers["nbytes"]) == ("a", "int32", [3], 12)
        assert text["dtype"] is None and text["shape"] == [3] and "DLPack has no text" in text["refused"]
        assert text["nbytes"] is None
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        assert "pyarrow cannot read it" in refused("inspect", tmp_path / name, memory=None)


def test_parquet_is_refused_as_open_refuses_it(tmp_path):
    """Its columns are listed; each plan has the error of `dlx.open`."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"a": [1, None], "s": ["x", "y"]}), path)
    with pytest.raises(package.errors.FileError) as raised:
        package.open(path)
    for words in (["plan", path, "--to", "dlx"], ["inspect", path, "--to", "dlx"]):
        found = document(*words)
        arrays = found["plans"][0]["arrays"] if words[0] == "plan" else found["sources"][0]["arrays"]
        assert [each["path"] for each in arrays] == ["a", "s"]
        for each in arrays:
            fate = each if words[0] == "plan" else each["targets"][0]
            assert (fate["outcome"], fate["error"]) == ("refused", "FileError")
            assert (fate["why"], fate["fix"]) == (raised.value.reason, raised.value.fix)


def test_a_torchscript_archive(tmp_path, torch):
    """It contains a program, which is not run; torch's advice is not part of the line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.pt")
    assert "it is a TorchScript archive" in refused("inspect", tmp_path / "x.pt", imported=True)


def test_warnings_of_torch_are_left_out(tmp_path, torch):
    """Torch addresses them to programmers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), tmp_path / "x.pt")
    status, out, err = dlx("inspect", tmp_path / "x.pt", imported=True)
    assert (status, err) == (0, "") and "qint8" in out


def test_no_legal_column_ends_the_process_or_hides_the_others(tmp_path, python):
    """Each column type of pyarrow is one row, even nested empty fixed-size lists."""
    pytest.importorskip("pyarrow")
    out = python(
        f"""
        import contextlib, io, json, sys
        import pyarrow as pa
        from pyarrow import ipc, parquet
        from dlx.cli import main
        number = pa.int32()
        union = pa.dense_union([pa.field("a", number)])
        kinds = [
            pa.list_(number, 0), pa.list_(pa.list_(number, 0), 3), pa.list_(pa.list_(number, 3), 0),
            pa.list_(pa.string(), 0), pa.list_(pa.bool_(), 0), pa.list_(pa.null(), 2), pa.list_(pa.string(), 2),
            pa.list_(pa.list_(number, 0)), pa.struct([("a", pa.list_(number, 0))]),
            pa.dictionary(pa.int8(), pa.string()),
            pa.dictionary(pa.int8(), pa.list_(number, 0)), pa.list_(number, 2**31 - 1),
            pa.list_(pa.list_(pa.int64(), 2**31 - 1), 2**31 - 1), pa.fixed_shape_tensor(number, (2, 0)),
            pa.fixed_shape_tensor(number, (2, 3)), pa.run_end_encoded(number, number), union, pa.list_(union, 2),
            pa.list_view(number), pa.map_(number, number), pa.month_day_nano_interval(), pa.decimal256(40, 2),
            pa.null(),
            pa.binary(0), pa.binary(3), pa.struct([]), pa.string_view(), pa.timestamp("ns", "UTC"), pa.uuid(),
            pa.bool8(), pa.list_(pa.bool8(), 0), number,
        ]
        for kind in kinds:
            found = []
            schema = pa.schema([("x", kind), ("y", number)])
            table = pa.Table.from_arrays([pa.nulls(0, kind), pa.nulls(0, number)], schema=schema)
            with ipc.new_file({str(tmp_path / "x.arrow")!r}, schema) as file:
                file.write_table(table)
            names = [{str(tmp_path / "x.arrow")!r}]
            try:
                parquet.write_table(table, {str(tmp_path / "x.parquet")!r})
                names.append({str(tmp_path / "x.parquet")!r})
            except (pa.ArrowException, OSError):  # Parquet has no such type
                pass
            for name in names:
                for words in (["inspect", name, "--to", "none"], ["plan", name, "--to", "dlx"]):
                    with contextlib.redirect_stdout(io.StringIO()) as said:
                        status = main([*words, "--json"])
                    assert status == 0, (kind, words, said.getvalue())
                    found = json.loads(said.getvalue())
                    arrays = found["sources"][0]["arrays"] if words[0] == "inspect" else found["plans"][0]["arrays"]
                    assert [each["path"] for each in arrays] == ["x", "y"], (kind, arrays)
                    assert arrays[1]["dtype"] == "int32"
        print("done")
        """,
        args=(),
    )
    assert out.strip() == "done"
