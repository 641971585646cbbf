"""`dlx.open`: the lifetime of mappings, and damaged or misleading files."""

import gc
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays.examples import examples
from support.files.writers import gguf, npy, safetensors, shards

import dlx
from dlx._core import native
from dlx.errors import (
    AdapterNotFoundError,
    DlxError,
    FileError,
    FrameworkNotInstalledError,
    ReadOnlyError,
)


@pytest.fixture
def checkpoint(tmp_path):
    """Write a .safetensors file with two tensors of zeros."""
    return safetensors(tmp_path / "x.safetensors", {"a": ("F32", (1 << 20,)), "b": ("BF16", (4,))})


def deflated(*names, **raw):
    """Return the bytes of an .npz file with a stored and a deflated member."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in raw.items():
            kind = zipfile.ZIP_DEFLATED if name in names else zipfile.ZIP_STORED
            archive.writestr(f"{name}.npy", data, kind)
    return out.getvalue()


ONE = npy("<f4", (2, 3), bytes(range(24)))
SMALL = {
    "x.npy": ONE,
    "x.npz": deflated("b", a=ONE, b=npy(">c16", (2,), bytes(range(32)))),
    "x.gguf": gguf({"w": (0, (3, 2), bytes(24)), "q": (2, (32,), bytes(18))}),
    "x.safetensors": (
        lambda raw: len(raw).to_bytes(8, "little") + raw + bytes(24)
    )(json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()),
}  # fmt: skip


# ---- life and death --------------------------------------------------------------------------------------------------


def test_what_was_given_out_outlives_the_file(checkpoint):
    """After the block no array can be read; arrays read before keep their memory until they are freed."""
    before = native.live()
    with dlx.open(checkpoint) as file:
        taken = file["a"]
        assert taken is file["a"] and not file._source.closed
    for read in (
        lambda: file["a"],
        lambda: file["b"],
        lambda: list(file.values()),
        lambda: file.get("b"),
        file.materialize,
    ):
        with pytest.raises(FileError, match="it is closed"):
            read()
    assert list(file) == ["a", "b"] and len(file) == 2 and "a" in file  # names are known
    assert "(closed)" in repr(file)
    file.close()  # again
    with pytest.raises(KeyError):
        file["none"]
    assert not any(memoryview(taken))
    assert str(checkpoint) in Path("/proc/self/maps").read_text()
    assert native.live() == before + 1
    del taken
    gc.collect()
    assert str(checkpoint) not in Path("/proc/self/maps").read_text()


def test_a_mapping_that_is_dropped_is_unmapped(checkpoint):
    """A dropped mapping is unmapped without close(), and no file descriptor stays open."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        dlx.open(checkpoint)["a"]
    gc.collect()
    assert str(checkpoint) not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_it_is_a_mapping_like_any_lazy_view(checkpoint, np):
    """It supports keys, values, items, get, in, ==, dict, plan, convert and materialize, but no item assignment."""
    pytest.importorskip("ml_dtypes")  # 'b' is bfloat16
    file = dlx.open(checkpoint, "numpy")
    assert [*file] == [*file.keys()] == [*dict(file)] == [key for key, _ in file.items()] == ["a", "b"]
    assert file.get("none", 3) == 3 and "none" not in file
    whole = file.materialize()
    assert type(whole) is dict and type(whole["a"]) is np.ndarray
    assert type(dlx.convert(file, to="dlx")["a"]) is dlx.Tensor
    lazy = dlx.convert(file, to="dlx", lazy=True)
    assert type(lazy["b"]) is dlx.Tensor and lazy.metadata == {}
    with pytest.raises(TypeError):
        file["a"] = 3
    assert dlx.plan(file, to="numpy").outcome == "tree"
    assert repr(file).startswith("<lazy x.safetensors[2] -> numpy, converted: ")


def test_read_only_stays_read_only(checkpoint, torch):
    """Targets that can represent read-only memory refuse writes; torch gets a copy, or private pages."""
    assert not dlx.open(checkpoint, "numpy")["a"].flags.writeable
    with pytest.raises(ReadOnlyError):
        dlx.open(checkpoint, "torch", readonly="error")["a"]
    with pytest.raises(ReadOnlyError):
        dlx.convert(dlx.open(checkpoint), to="torch", copy=False)
    whole = checkpoint.read_bytes()
    for readonly in ("copy", "share"):
        file = dlx.open(checkpoint, "torch", readonly=readonly)
        file["a"].fill_(1)
        assert checkpoint.read_bytes() == whole
    other = dlx.open(checkpoint, readonly="share")["a"]
    assert other.readonly and other.shape == (1 << 20,)


def test_memory_that_is_touched_is_all_that_is_resident(tmp_path):
    """Only the pages of a large file that were read are in memory."""
    path = tmp_path / "x.npy"
    head = npy("<f4", (1 << 28,), b"")
    path.write_bytes(head)
    try:
        os.truncate(path, len(head) + (1 << 30))
    except OSError:
        pytest.skip("no sparse files here")
    file = dlx.open(path)
    tensor = file[""]
    assert resident(path) <= 1 << 20
    assert not any(memoryview(tensor)[1 << 20 : (1 << 20) + 2048])
    assert resident(path) <= 1 << 20


def resident(path):
    """Return the number of bytes of a mapped file that are in memory."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_pickle_and_copy(checkpoint, np):
    """Pickling an open file raises an error with an alternative."""
    pytest.importorskip("ml_dtypes")  # 'b' is bfloat16
    file = dlx.open(checkpoint, "numpy")
    with pytest.raises(TypeError, match=r"cannot pickle or copy the open file .*x.safetensors: .*materialize"):
        pickle.dumps(file)
    assert set(pickle.loads(pickle.dumps(file.materialize()))) == {"a", "b"}


def test_many_threads_read_one_file(tmp_path, np):
    """Mapped and deflated arrays have the right values in all threads."""
    made = {f"x{i}": np.full(5000, i) for i in range(20)}
    np.savez_compressed(tmp_path / "x.npz", **made)
    np.savez(tmp_path / "y.npz", **made)
    for name in ("x.npz", "y.npz"):
        file, wrong = dlx.open(tmp_path / name, "numpy"), []

        def read(file=file, wrong=wrong):
            for key, array in made.items():
                if not (file[key] == array).all():
                    wrong.append(key)

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_forked_child_reads_on(python, checkpoint):
    """A forked child shares the mapping and can open new arrays; its exit does not affect the parent."""
    code = f"""
        import os, dlx
        file = dlx.open({str(checkpoint)!r})
        a = file["a"]
        child = os.fork()
        if not child:
            good = not any(memoryview(a)[:100]) and file["b"].shape == (4,)
            file.close()
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not any(memoryview(a)[:100]) and file["b"].shape == (4,)
        print("done")
    """
    assert python(code, args=()).strip() == "done"


@pytest.mark.unsanitized("the signal is caught and reported")
def test_a_file_that_is_cut_off_later(checkpoint):
    """The kernel ends the process with SIGBUS when it reads missing pages, as documented."""
    import signal
    import subprocess

    code = f"""
import os, dlx
file = dlx.open({str(checkpoint)!r})
tensor = file["a"]
os.truncate({str(checkpoint)!r}, 4096)
print("opened", flush=True)
assert dlx.describe(tensor).shape == (1 << 20,)
sum(memoryview(tensor)[-10:])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "opened\n")
    with pytest.raises(FileError, match="truncated"):
        dlx.open(checkpoint)


def test_a_file_that_is_replaced(tmp_path):
    """Arrays of the old file stay valid after a new file gets its name."""
    path = tmp_path / "x.npy"
    path.write_bytes(npy("|u1", (3,), b"abc"))
    file = dlx.open(path)
    (tmp_path / "new").write_bytes(npy("|u1", (3,), b"def"))
    os.replace(tmp_path / "new", path)
    assert bytes(memoryview(file[""])) == b"abc" and bytes(memoryview(dlx.open(path)[""])) == b"def"


def test_importing_dlx_loads_no_reader(python, checkpoint):
    """Nor does `dlx.convert`; opening .safetensors loads neither numpy nor zipfile, and reads no entry points."""
    code = f"""
        import sys
        before = set(sys.modules)
        import dlx
        dlx.convert(b"abc", to="dlx")
        assert "dlx._files.mapping" not in sys.modules and "json" not in sys.modules.keys() - before
        dlx.open({str(checkpoint)!r})["a"]
        print({{"numpy", "zipfile", "h5py", "torch", "importlib.metadata"}} & sys.modules.keys() - before)
    """
    assert python(code, args=()).strip() == "set()"


# ---- calls that are wrong --------------------------------------------------------------------------------------------


def test_calls_that_are_wrong(tmp_path, checkpoint, monkeypatch):
    """Invalid targets, devices and files raise the right errors before anything is opened."""
    with pytest.raises(AdapterNotFoundError):
        dlx.open(tmp_path / "none", "nonsense")
    with pytest.raises(ValueError, match="readonly must be"):
        dlx.open(checkpoint, readonly="maybe")
    with pytest.raises(dlx.errors.DeviceError):
        dlx.open(checkpoint, device="nonsense")
    for missing in (tmp_path / "none.npy", ""):  # Path("") is the current folder
        with pytest.raises(FileNotFoundError):
            dlx.open(missing)
    with pytest.raises(TypeError):
        dlx.open(3)
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "pipe", "not a regular file"), ("/dev/zero", "not a regular file")):
        with pytest.raises(FileError, match=words):
            dlx.open(path)
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + bytes(20))
    with pytest.raises(FileError, match="Parquet"):
        dlx.open(tmp_path / "x.parquet")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(FrameworkNotInstalledError, match="pip install h5py"):
        dlx.open(tmp_path / "x.h5")


def test_the_device_is_that_of_convert(checkpoint, cuda):
    """`device=` moves each array when it is read."""
    file = dlx.open(checkpoint, device="cuda:1")
    assert str(file["b"].device) == "cuda:1"
    assert str(dlx.open(checkpoint, device="cpu")["b"].device) == "cpu"


# ---- truncated, damaged and mislabelled files ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_a_file_that_is_cut_off_anywhere(tmp_path, name):
    """A file truncated at any byte is refused when it is opened."""
    whole, path = SMALL[name], tmp_path / name
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(FileError) as caught:
            dlx.open(path)
        assert str(caught.value).startswith(f"cannot open {path}: ")
    (tmp_path / "x").write_bytes(whole)  # recognized by its first bytes
    assert len(read(tmp_path / "x")) > 0


@pytest.mark.parametrize("name", ["x.h5", "x.pt"])
def test_a_file_of_another_library_that_is_cut_off(tmp_path, name, request):
    """A file truncated at many places is refused or complete, and never ends the process."""
    path, whole = tmp_path / name, tmp_path / "whole"
    if name == "x.h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(whole, "w") as out:
            out.create_dataset("a", (3000,), "u1", data=list(bytes(3000)))
            out["b"] = list(range(100))
    else:
        request.getfixturevalue("torch").save({"w": request.getfixturevalue("torch").ones(100)}, whole)
    content = whole.read_bytes()
    for end in range(1, len(content), 61):
        path.write_bytes(content[:end])
        with pytest.raises(FileError):
            dlx.open(path)


DAMAGED = """
import random, sys
from pathlib import Path
import numpy as np, dlx

def arrow(path):
    import pyarrow as pa
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(100)), 2)
    table = pa.table({"x": pa.array(np.arange(50.0)), "l": lists, "b": pa.array([True] * 50)})
    with pa.ipc.new_file(str(path), table.schema) as sink:
        sink.write_table(table)

def pt(path):
    import torch
    torch.save({"w": torch.arange(50.0), "v": torch.arange(12).reshape(3, 4).T}, path)

def h5(path):
    import h5py
    with h5py.File(path, "w") as file:
        file["a"], file["b"] = np.arange(50.0), np.arange(12).reshape(3, 4)

kind, folder = sys.argv[1:]
path, told, chance = Path(folder) / f"x.{kind}", set(), random.Random(7)
globals()[kind](path)
whole = path.read_bytes()
for number in range(120):
    data = bytearray(whole)
    for _ in range(chance.choice((1, 2, 8))):
        data[chance.randrange(len(data))] = chance.choice((0, 1, 127, 128, 255))
    path = Path(folder) / f"{number}.{kind}"
    path.write_bytes(data)
    try:
        with dlx.open(path, to="numpy") as file:
            told.update("read" for key in file if file[key].sum() is not None)
    except dlx.errors.DlxError:
        told.add("refused")
print(*sorted(told))
"""


@pytest.mark.parametrize(("kind", "package"), [("arrow", "pyarrow"), ("pt", "torch"), ("h5", "h5py")])
@pytest.mark.slow
def test_damaged_files_of_other_libraries(tmp_path, kind, package):
    """A file with random changes is read or refused; each runs in a separate process, which may crash."""
    pytest.importorskip(package)
    pytest.importorskip("numpy")
    command = [sys.executable, "-W", "ignore", "-c", DAMAGED, kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    assert done.stdout == "read refused\n"


def read(path):
    """Read all arrays of a file with their bytes; return arrays and errors by name."""
    found = {}
    with dlx.open(path) as file:
        for key in file:
            try:
                tensor = found[key] = file[key]
                bytes(dlx.ffi.buffer(dlx.ffi.cast("char *", tensor.data_ptr), tensor.nbytes)) if tensor.nbytes else b""
            except DlxError as error:
                found[key] = error
    return found


EVIL = b"\x80\x04cposix\nsystem\n(S'touch PWNED'\ntR."  # a pickle that leaves a file behind


@pytest.mark.parametrize("name", ["x.npy", "x.pkl", "x.pt", "x.bin", "o.npy", "o.npz"])
def test_no_pickle_is_read(tmp_path, name, monkeypatch):
    """Objects and pickles are refused, and none of their code runs."""
    monkeypatch.chdir(tmp_path)
    objects = npy("|O", (1,), EVIL)
    (tmp_path / name).write_bytes({"o.npy": objects, "o.npz": deflated("o", o=objects)}.get(name, EVIL))
    with pytest.raises(DlxError, match=r"pickle|does not begin with"):
        dlx.open(tmp_path / name)["o"]
    assert os.listdir(tmp_path) == [name]


@pytest.mark.filterwarnings("ignore:Overlapped entries")  # by zipfile, from Python 3.14 on
def test_headers_that_lie(tmp_path):
    """Invalid lengths, shapes, offsets and names are refused; more cases are in the tests of `dlx inspect`."""
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for header, data, words in (
        ({"a": {**one, "shape": [3]}}, 8, "12 bytes by its shape, 8 by its offsets"),
        ({"a": {**one, "data_offsets": [-8, 0]}}, 8, "invalid entry"),
        ({"a": {**one, "data_offsets": [8, 0]}}, 8, "invalid entry"),
        ({"a": {**one, "shape": [1 << 62] * 4}}, 8, "too many bytes"),
        ({"a": {**one, "shape": [True, 2]}}, 8, "invalid entry"),
        ({"a": one, "b": {**one, "data_offsets": [4, 12]}}, 12, "overlap"),
        ({"a": {**one, "data_offsets": [8, 16]}}, 16, "gap"),
        ({"a": one}, 7, "truncated"),
        ({"a": one}, 9, "follow its last tensor"),
    ):
        raw = json.dumps(header).encode()
        (tmp_path / "x.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
        with pytest.raises(FileError, match=words):
            dlx.open(tmp_path / "x.safetensors")
    whole = deflated("b", a=ONE, b=ONE)
    at = whole.rindex(b"PK\1\2")
    for place, value, words in (
        (at + 42, struct.pack("<I", 0), "overlap|valid|differ"),  # the offset of the first member
        (at + 24, struct.pack("<I", 1 << 30), r"claims 1\.0 GiB, more than"),  # the inflated length
        (at + 24, struct.pack("<I", 200), "length is wrong|CRC"),
        (at + 16, b"\0\0\0\0", "checksum|CRC"),
    ):
        lying = bytearray(whole)
        lying[place : place + 4] = value
        (tmp_path / "x.npz").write_bytes(lying)
        with pytest.raises(DlxError, match=words):
            dlx.open(tmp_path / "x.npz")["b"]
    twice = deflated(a=ONE, b=ONE).replace(b"b.npy", b"a.npy")
    (tmp_path / "x.npz").write_bytes(twice)
    with pytest.raises(FileError, match="twice"):
        dlx.open(tmp_path / "x.npz")


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.sampled_from([b"", b"\xff" * 8, b"\0" * 4, b"9" * 20, b"-", b"[", b'"', b"\1\0\0\0\0\0\0\x80"])
        | st.binary(max_size=3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_files_changed_by_chance(tmp_path_factory, name):
    """Whatever byte was changed, opening returns arrays inside the file or raises a `DlxError`."""
    path = tmp_path_factory.mktemp("chance") / name

    @settings(max_examples=examples(40), deadline=None, database=None)
    @given(CHANGES)
    def change(changes):
        content = bytearray(SMALL[name])
        for at, new, gone in changes:
            at %= len(content) or 1
            content[at : at + gone] = new
        path.write_bytes(content)
        try:
            read(path)
        except DlxError as error:
            assert isinstance(error, FileError), repr(error)

    change()


def test_opening_reads_no_tensor(tmp_path):
    """Opening 300 tensors of 2 GiB touches few of their 524,288 pages; for its time see the benchmark `files`."""
    resource = pytest.importorskip("resource")
    header, at, each = {}, 0, 7 << 20
    for number in range(300):
        header[f"layers.{number}.weight"] = {"dtype": "BF16", "shape": [each // 2], "data_offsets": [at, at + each]}
        at += each
    raw = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    try:
        os.truncate(path, 8 + len(raw) + at)
    except OSError:
        pytest.skip("no sparse files here")
    dlx.open(path)["layers.7.weight"]  # imports
    before = resource.getrusage(resource.RUSAGE_SELF)
    dlx.open(path)["layers.7.weight"]
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt < 5000


def test_a_folder_of_shards_is_mapped_as_one(tmp_path):
    """Each file is mapped once; all are unmapped with the last array."""
    shards(tmp_path, {f"x{i}": ("F32", (100,)) for i in range(5)})
    file = dlx.open(tmp_path)
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 5
    kept = file["x3"]
    file.close()
    gc.collect()
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 1
    assert not any(memoryview(kept))


# ---- checkpoints of torch, files of pyarrow --------------------------------------------------------------------------


def test_a_checkpoint_whose_data_are_not_what_its_list_says(tmp_path, torch):
    """Mapped tensors must match the file's records, compressed or not."""
    good, packed, cut = (tmp_path / f"{name}.pt" for name in ("good", "packed", "cut"))
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(20000)}, good)
    with zipfile.ZipFile(good) as archive, zipfile.ZipFile(packed, "w") as out, zipfile.ZipFile(cut, "w") as short:
        for each in archive.infolist():
            data, first = archive.read(each), each.filename.endswith("data/0")
            out.writestr(each.filename, data, compress_type=zipfile.ZIP_DEFLATED if first else zipfile.ZIP_STORED)
            short.writestr(each.filename, data[: len(data) // 2] if first else data)
    assert dlx.open(good, to="torch")["a"].equal(torch.arange(1000.0))
    with pytest.raises(FileError, match="compressed"):
        dlx.open(packed)
    with pytest.raises(FileError, match="does not match"):
        dlx.open(cut)


def test_a_checkpoint_is_not_changed_whatever_torch_is_told(tmp_path, torch):
    """A file is not changed even if torch's default for mapped files is shared pages."""
    import mmap

    torch.save({"a": torch.zeros(1000)}, tmp_path / "x.pt")
    before = (tmp_path / "x.pt").read_bytes()
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        dlx.open(tmp_path / "x.pt", to="torch")["a"][0] = 9
    assert (tmp_path / "x.pt").read_bytes() == before


def test_parameters_of_a_checkpoint(tmp_path, torch, np):
    """The error's fix works."""
    torch.save({"p": torch.nn.Parameter(torch.ones(3))}, tmp_path / "x.pt")
    with pytest.raises(DlxError, match="detach=True"):
        dlx.open(tmp_path / "x.pt", to="numpy")["p"]
    assert dlx.open(tmp_path / "x.pt", to="numpy", detach=True)["p"].tolist() == [1, 1, 1]


def test_columns_of_a_file_that_are_written_to(tmp_path, torch):
    """With readonly="share", writes go to private pages and do not change the file."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": pa.array([1.5, 2.5])})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    before = (tmp_path / "x.arrow").read_bytes()
    column = dlx.open(tmp_path / "x.arrow", to="torch", readonly="share")["x"]
    column[0] = 7
    assert column.tolist() == [7, 2.5] and (tmp_path / "x.arrow").read_bytes() == before


def test_a_dtype_of_five_thousand_digits(tmp_path):
    """Python refuses to parse such a number; the error is a FileError."""
    (tmp_path / "x.npy").write_bytes(npy("<f" + "9" * 5000, (2,), bytes(8)))
    with pytest.raises(FileError, match=r"x\.npy"):
        dlx.open(tmp_path / "x.npy")
