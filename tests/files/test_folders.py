"""Folders: shards without an index, torch's shards, torch.distributed's checkpoints, and Hugging Face's snapshots."""

import importlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings

import pytest
from support.files.writers import safetensors, shards
from support.processes.command import document, here

import dlx
from dlx._files.header import is_sibling
from dlx.errors import FileError

NAME = "model-{:05}-of-{:05}.safetensors"


def numbered(folder, count, *missing):
    """Write shards without an index, each with one tensor, named by its number."""
    for i in range(1, count + 1):
        if i not in missing:
            safetensors(folder / NAME.format(i, count), {f"t{i}": ("F32", (4,))})


@pytest.mark.parametrize("mapped", [True, False])
def test_shards_without_an_index(tmp_path, mapped):
    """They are opened together if all are there; one alone if its path is passed."""
    numbered(tmp_path, 3)
    (tmp_path / "config.json").write_text("{}")
    with dlx.open(tmp_path, "numpy", mmap=mapped) as file:
        assert [*file] == ["t1", "t2", "t3"] and file["t3"].shape == (4,)
    assert [*dlx.open(tmp_path / NAME.format(2, 3))] == ["t2"]
    assert [*dlx.open(tmp_path, only="t[13]")] == ["t1", "t3"]


def test_incomplete_duplicate_and_foreign_shards(tmp_path):
    """A missing shard, a name in two shards, or another file: the error names the files."""
    numbered(tmp_path, 3, 2)
    with pytest.raises(FileError, match=r"found 2 candidates: model-00001-of-00003"):
        dlx.open(tmp_path)
    safetensors(tmp_path / NAME.format(2, 3), {"t1": ("F32", (4,))})
    with pytest.raises(FileError, match="two of its files contain 't1'"):
        dlx.open(tmp_path)
    safetensors(tmp_path / NAME.format(2, 3), {"t2": ("F32", (4,))}, cut=3)
    with pytest.raises(FileError, match=r"model-00002-of-00003.safetensors: it is truncated"):
        dlx.open(tmp_path)
    safetensors(tmp_path / "other.safetensors", {"x": ("F32", (4,))})
    with pytest.raises(FileError, match="4 candidates"):
        dlx.open(tmp_path)


def test_contents_in_memory_have_no_folder(tmp_path, monkeypatch):
    """A file object whose name is that of an index opens no file of the working folder."""
    numbered(tmp_path, 2)
    index = json.dumps({"weight_map": {"t1": NAME.format(1, 2)}}).encode()
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors.index.json", "x.bin.index.json", "zarr.json", ".zgroup", ".metadata"):
        source = io.BytesIO(index)
        source.name = name
        with pytest.raises(FileError, match=r"but these contents are in memory\. Pass a path\."):
            dlx.open(source)
    assert [*dlx.open(io.BytesIO((tmp_path / NAME.format(1, 2)).read_bytes()))] == ["t1"]


@pytest.mark.parametrize("name", ["notes.metadata", "a.zarray", "my.zarr.json"])
def test_names_that_only_end_like_a_checkpoint(tmp_path, name):
    """The command lists the files of the folder; the API opens its only file."""
    (tmp_path / name).write_text("x")
    safetensors(tmp_path / "x.safetensors", {"a": ("F32", (2,))})
    (source,) = document("inspect", tmp_path)["sources"]
    assert [each["path"] for each in source["arrays"]] == ["a"] == [*dlx.open(tmp_path)]


@pytest.mark.parametrize("module", ["posixpath", "ntpath"])
def test_names_that_leave_the_folder(module, monkeypatch):
    """On Windows, a backslash and a drive do, too."""
    monkeypatch.setattr(os, "path", importlib.import_module(module))
    assert all(is_sibling(name) for name in ("a.bin", "...", "a..b", "ä", "-", "a b", " "))
    assert not any(is_sibling(name) for name in ("", ".", "..", "/", "a/", "/a", "a/b", "../a", "a/..", "a\0"))
    for name in ("a\\b", "..\\a", "c:a", "\\\\host\\share\\a"):
        assert is_sibling(name) == (module == "posixpath")


@pytest.fixture
def bins(tmp_path):
    """Write a folder of torch shards with an index, as transformers does; return the tensors."""
    torch = pytest.importorskip("torch")
    tensors = {f"layer.{i}": torch.full((3,), float(i)) for i in range(4)}
    places = {}
    for number in (1, 2):
        place = f"pytorch_model-{number:05}-of-00002.bin"
        names = [*tensors][2 * number - 2 : 2 * number]
        torch.save({name: tensors[name] for name in names}, tmp_path / place)
        places |= dict.fromkeys(names, place)
    index = {"metadata": {"total_size": 48}, "weight_map": places}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("mapped", [True, False])
def test_torch_shards(tmp_path, bins, mapped):
    """By the folder or the index; a part of them; without the files afterwards if they are read."""
    torch = importlib.import_module("torch")
    for path in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        file = dlx.open(path, "torch", mmap=mapped)
        assert [*file] == [*bins] and all(torch.equal(file[name], bins[name]) for name in bins)
    assert [*dlx.open(tmp_path, only="layer.3")] == ["layer.3"]
    assert here("convert", tmp_path, tmp_path / "x.npz")[0] == 0
    status, out = here("inspect", tmp_path)
    assert (status == 0 and "layer.#" in out) or "layer.0" in out


def test_torch_shards_that_are_wrong(tmp_path, bins):
    """A missing file, a stale index, and names that leave the folder."""
    index = tmp_path / "pytorch_model.bin.index.json"
    good = json.loads(index.read_text())
    for place, match in (
        ("none.bin", "cannot open none.bin, which it lists"),
        ("../x.bin", r"lists '\.\./x\.bin', which is not a \.bin file in its folder"),
        ("pytorch_model-00001-of-00002.bin", r"has no tensor 'layer.3', which its index lists"),
    ):
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], "layer.3": place}}))
        with pytest.raises(FileError, match=match):
            dlx.open(tmp_path)


def test_a_snapshot(tmp_path):
    """The hub's folder of links; safetensors are preferred to torch's files."""
    torch = pytest.importorskip("torch")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    torch.save({"old": torch.ones(2)}, blobs / "1")
    safetensors(blobs / "2", {"new": ("BF16", (4,))})
    for name, blob in (("pytorch_model.bin", "1"), ("model.safetensors", "2")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
        (snapshot / "config.json").write_text("{}")
        (snapshot / "training_args.bin").write_bytes(b"x")
        assert [*dlx.open(snapshot)] == ["old" if blob == "1" else "new"]
    shards(snapshot, {"a": ("F32", (4,)), "b": ("F32", (4,))})
    assert [*dlx.open(snapshot)] == ["a", "b"]


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a checkpoint of one process, and its contents."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    folder = tmp_path_factory.mktemp("dcp") / "x"
    whole = torch.arange(12.0).reshape(3, 4)
    tree = {
        "model": {
            "w": whole,
            "t": whole.t(),
            "b": torch.ones(2, dtype=torch.bfloat16),
            "f": torch.ones(3).to(torch.float8_e4m3fn),
            "z": torch.zeros(0, 3),
            "s": torch.tensor(3, dtype=torch.int64),
            "u": torch.ones(2, dtype=torch.uint16),
            "bool": torch.tensor([True, False]),
        },
        "opt": [whole + 1, {"lr": 0.5}],
        "step": 3,
        "text": "x",
        "code": importlib.import_module("argparse").Namespace(a=1),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder, tree["model"]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_distributed_checkpoint(saved, mapped):
    """Tensors, mapped or read; plain values; an object that needs code is refused by name."""
    torch = importlib.import_module("torch")
    folder, model = saved
    file = dlx.open(folder, "torch", mmap=mapped)
    for name, tensor in model.items():
        found = file[f"model.{name}"]
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        one, other = (each.reshape(-1).contiguous().view(torch.uint8) for each in (found, tensor))
        assert torch.equal(one, other), name
    assert file["step"] == 3 and file["text"] == "x" and file["opt.1.lr"] == 0.5
    with pytest.raises(FileError, match=r"it needs code \(argparse.Namespace\)"):
        file["code"]
    assert ": copied" in str(dlx.plan(dlx.open(folder, only="model.w"), to="numpy"))
    assert [*dlx.open(folder / ".metadata", only="model.?", skip="*.w", mmap=mapped)] == [
        *(f"model.{name}" for name in model if len(name) == 1 and name != "w")
    ]
    with pytest.raises(FileError, match=r"no member 'model\.q'"):
        dlx.open(folder, only="model.q")


def test_the_command_reads_a_distributed_checkpoint(saved, tmp_path):
    """`dlx inspect` and `dlx convert`."""
    folder, _ = saved
    status, out = here("inspect", folder)
    assert status == 0 and "model.w" in out
    (source,) = document("inspect", folder)["sources"]
    (code,) = [each for each in source["arrays"] if each["refused"]]
    assert code["path"] == "code" and "it needs code (argparse.Namespace)" in code["refused"]
    assert here("convert", folder, tmp_path / "x.safetensors", "--only", "model.[wtbf]")[0] == 0
    assert {*dlx.open(tmp_path / "x.safetensors")} == {f"model.{name}" for name in "wtbf"}


TWO = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

def work(rank, folder):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}.rendezvous")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh, full = init_device_mesh("cpu", (2,)), torch.arange(40.0).reshape(5, 8)
    places = {"rows": [Shard(0)], "columns": [Shard(1)], "whole": [Replicate()]}
    dcp.save({name: distribute_tensor(full, mesh, place) for name, place in places.items()}, checkpoint_id=folder)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_tensors_in_chunks_of_two_processes(tmp_path):
    """Chunks of rows and of columns in two files are joined in a copy."""
    pytest.importorskip("torch.distributed.tensor")
    np = pytest.importorskip("numpy")
    (tmp_path / "two.py").write_text(TWO)
    subprocess.run([sys.executable, tmp_path / "two.py", tmp_path / "x"], check=True, timeout=240, capture_output=True)
    expected = np.arange(40.0, dtype="f4").reshape(5, 8).tolist()
    for options in ({}, {"mmap": False}):
        file = dlx.open(tmp_path / "x", "numpy", **options)
        assert {name: file[name].tolist() for name in file} == dict.fromkeys(["rows", "columns", "whole"], expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_distributed_checkpoint(saved, tmp_path, seed):
    """Any byte of the metadata or of the items may be wrong: an error of dlx, or values of the right size."""
    random = importlib.import_module("random").Random(seed)
    folder = tmp_path / "x"
    shutil.copytree(saved[0], folder)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    for _ in range(150):
        path = random.choice([*files])
        data = bytearray(files[path])
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        path.write_bytes(data[: random.choice([len(data)] * 9 + [random.randrange(len(data))])])
        try:
            with dlx.open(folder) as file:
                for name in file:
                    try:
                        value = file[name]
                        assert not hasattr(value, "tobytes") or len(value.tobytes()) == value.nbytes
                    except dlx.errors.DlxError:
                        pass
        except dlx.errors.DlxError:
            pass
        path.write_bytes(files[path])


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_no_code_of_a_distributed_checkpoint_is_run(saved, tmp_path, monkeypatch):
    """Each class of its metadata is read without its code."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved[0], "x")
    for content in (Evil(), {"state_dict_metadata": Evil()}, {frozenset([1]): 1}):
        (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(FileError, match="its metadata does not describe a checkpoint"):
            dlx.open("x")
    assert not os.path.exists("ran")


def record(state, *arguments):
    """Return the opcodes of an object with a state, whose class is none of Python's."""
    return b"cm\nC\n" + (b"(" + b"".join(arguments) + b"t" if arguments else b")") + b"R" + state + b"b"


def text(word):
    """Return the opcodes of a text."""
    return b"X" + len(word).to_bytes(4, "little") + word.encode()


def mapping(*pairs):
    """Return the opcodes of a dict."""
    return b"}(" + b"".join(pairs) + b"u"


DEEP = b")" + b"2\x86" * 60  # a tuple of two, which are the same tuple, and so on: its text takes years
SHAPE = b"cm\nC\n(K\x01ttR"  # torch.Size([1])
EMPTY = mapping()
HOSTILE = {
    "bytes that the file does not have": b"\x96" + (1 << 34).to_bytes(8, "little"),
    "a dict of tuples": b"(" + DEEP + b"Nd",
    "a set of tuples": b"\x8f(" + DEEP + b"\x90",
    "a name that is a tuple": mapping(text("state_dict_metadata"), mapping(text("a"), record(EMPTY)),
                                      text("storage_data"), mapping(record(mapping(text("fqn"), DEEP)), record(EMPTY))),
    "a member that is a tuple": mapping(text("state_dict_metadata"), b"}" + record(EMPTY) + record(EMPTY) + b"s",
                                        text("storage_data"), EMPTY),
    "a size that is a tuple": mapping(text("state_dict_metadata"), mapping(text("a"), record(mapping(
        text("size"), b"cm\nC\n(" + DEEP + b"ttR", text("properties"), record(b"N")))), text("storage_data"), EMPTY),
    "an offset that is a tuple": mapping(
        text("state_dict_metadata"), mapping(text("a"), record(EMPTY)),
        text("storage_data"), mapping(record(mapping(text("fqn"), text("a"))), record(mapping(
            text("relative_path"), text("f"), text("offset"), DEEP, text("length"), b"K\x01")))),
    "a root that is a tuple": DEEP,
}  # fmt: skip
TRY = """
import resource, sys
sys.path.insert(0, "tests")
from support.processes.memory import most_resident
import dlx
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for name in {names!r}:
    try:
        dlx.open(f"{folder}/{{name}}")
    except dlx.errors.FileError as error:
        assert "its metadata does not describe a checkpoint" in str(error) and len(str(error)) < 400, error
    else:
        raise AssertionError(name)
assert most_resident() < 2000 << 20, most_resident()
print("done")
"""


def test_hostile_metadata(python, tmp_path):
    """It takes neither years nor memory, and no error quotes what is in it."""
    pytest.importorskip("torch")
    contents = HOSTILE | {f"{name}, in an object": record(content) for name, content in HOSTILE.items()}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(b"\x80\x04" + content + b".")
    assert python(TRY.format(names=[*contents], folder=tmp_path), args=(), timeout=60).strip() == "done"


def claim(folder, size, chunks, *, stored=None, name="f.distcp", dtype="float32"):
    """Write a checkpoint of a tensor "w": {offsets: (sizes, a tensor)}."""
    torch = importlib.import_module("torch")
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    info = importlib.import_module("torch.distributed.checkpoint.filesystem")._StorageInfo
    folder.mkdir(exist_ok=True)
    places, data = {}, b""
    for at, (_, tensor) in chunks.items():
        item = io.BytesIO()
        torch.save(tensor, item)
        index = metadata.MetadataIndex("w", torch.Size(at))
        places[index] = info(name, len(data), len(item.getvalue()))
        data += item.getvalue()
    (folder / "f.distcp").write_bytes(data)
    boxes = [metadata.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, (sizes, _) in chunks.items()]
    properties = metadata.TensorProperties(getattr(torch, dtype))
    tensors = {"w": metadata.TensorStorageMetadata(properties, torch.Size(size), boxes)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(tensors, storage_data=places | (stored or {}))))
    return folder


@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_any_form(tmp_path, seed):
    """A tensor is cut into boxes; if one is moved, missing or of another size, no value is invented."""
    torch = pytest.importorskip("torch")
    random = importlib.import_module("random").Random(seed)

    def cut(at, sizes, depth):
        axis = random.randrange(len(sizes))
        if not depth or sizes[axis] < 2:
            return [(at, sizes)]
        n = random.randrange(1, sizes[axis])
        rest = (*at[:axis], at[axis] + n, *at[axis + 1 :])
        one, other = ((*sizes[:axis], m, *sizes[axis + 1 :]) for m in (n, sizes[axis] - n))
        return cut(at, one, depth - 1) + cut(rest, other, depth - 1)

    for _ in range(8):
        size = [random.randrange(1, 6) for _ in range(random.randrange(1, 4))]
        whole = torch.arange(float(torch.Size(size).numel())).reshape(size)
        boxes = cut((0,) * len(size), tuple(size), 3)

        def part(at, sizes, whole=whole):
            return whole[tuple(slice(o, o + n) for o, n in zip(at, sizes, strict=True))].clone()

        chunks = {at: (sizes, part(at, sizes)) for at, sizes in boxes}
        file = dlx.open(claim(tmp_path / "x", size, chunks), "torch", only="w")
        assert torch.equal(file["w"], whole)
        at, (sizes, tensor) = random.choice([*chunks.items()])
        axis = random.randrange(len(size))
        moved = (*at[:axis], at[axis] + random.choice([1, -1, 7]), *at[axis + 1 :])
        less = {key: value for key, value in chunks.items() if key != at}
        more = (*sizes[:axis], sizes[axis] + 1, *sizes[axis + 1 :])
        for wrong in (less, {**less, moved: (sizes, tensor)}, {**chunks, at: (more, torch.zeros(more))}):
            with pytest.raises(FileError, match=r"overlap|smaller|does not describe|does not fit"):
                dlx.open(claim(tmp_path / "x", size, wrong), "torch")["w"]


def test_claims_of_chunks(tmp_path):
    """Two chunks that overlap, a tensor that repeats one element, and a place outside of the folder."""
    torch = pytest.importorskip("torch")
    one, other = ((2,), torch.tensor([1.0, 2.0])), ((2,), torch.tensor([3.0, 4.0]))
    with pytest.raises(FileError, match="the chunks of 'w' overlap or leave gaps"):
        dlx.open(claim(tmp_path / "x", [4], {(0,): one, (1,): other}))["w"]
    count = 1 << 40
    with pytest.raises(FileError, match=r"its files are smaller than the 4,398,046,511,104 bytes of 'w'"):
        dlx.open(claim(tmp_path / "x", [count], {(0,): ((count,), torch.zeros(1).expand(count))}))["w"]
    for name in ("../f.distcp", "a/b", "..", "", "a\0b", "\ud800"):
        with pytest.raises(FileError, match=r"not a file in its folder|which it lists"):
            dlx.open(claim(tmp_path / "x", [2], {(0,): one}, name=name))
