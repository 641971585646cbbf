"""`dlx convert`: every value and dtype is preserved or refused, and a file is written completely or not at all."""

import errno
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import zipfile

import pytest
from support.files.writers import gguf, npy, safetensors
from support.processes.command import dlx, document, here, refused, shown_on

import dlx as library
from dlx._files import atomic
from dlx._files.writing import FORMATS
from dlx.errors import FileError

np = pytest.importorskip("numpy")

PLAIN = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
)


def arrays():
    """Return an array of the same length for each dtype that all formats support."""
    values = np.arange(24).reshape(6, 2, 2) % 2
    return {f"a {dtype}/ü": values.astype(dtype) for dtype in PLAIN}


def opened(path):
    """Return copies of the arrays of a file."""
    with library.open(path, to="numpy") as found:
        return {name: np.array(array) for name, array in found.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Enter a folder with x.npz."""
    monkeypatch.chdir(tmp_path)
    np.savez_compressed("x.npz", **arrays())
    return tmp_path


@pytest.mark.parametrize("target", [each for each in FORMATS if each != ".npy"])
@pytest.mark.parametrize("source", [".npz", ".safetensors", ".arrow"])
def test_every_value_and_dtype_arrives(folder, source, target):
    """Conversions between all formats keep names, order of elements, and dtypes."""
    if ".arrow" in (source, target):
        pytest.importorskip("pyarrow")
    if source != ".npz":
        assert here("convert", "x.npz", f"x{source}")[0] == 0
    status, out = here("convert", f"x{source}", f"y{target}")
    assert status == 0 and out.startswith(f"y{target}  12 arrays, file of ")
    found = opened(f"y{target}")
    assert found.keys() == arrays().keys()
    for name, array in arrays().items():
        assert found[name].dtype == array.dtype and found[name].tolist() == array.tolist(), name


def test_other_libraries_read_what_is_written(folder):
    """Numpy, safetensors and pyarrow read the written files."""
    for kind in FORMATS:
        if kind != ".npy":
            here("convert", "x.npz", f"y{kind}")
    expected = {name: array.tolist() for name, array in arrays().items()}
    assert {name: array.tolist() for name, array in np.load("y.npz").items()} == expected
    load = pytest.importorskip("safetensors.numpy").load_file
    assert {name: array.tolist() for name, array in load("y.safetensors").items()} == expected
    pa = pytest.importorskip("pyarrow")
    with pa.memory_map("y.arrow") as file:
        assert pa.ipc.open_file(file).read_all().to_pydict() == expected


def test_what_is_in_an_npz_can_be_mapped(folder):
    """Data begins at multiples of 64 bytes, so that no framework has to copy it."""
    here("convert", "x.npz", "y.npz")
    offsets = [each["offset"] for each in document("inspect", "y.npz")["sources"][0]["arrays"]]
    assert len(offsets) == 12 and not any(offset % 64 for offset in offsets)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("layout", ["F", "big-endian", "empty", "scalar", "complex"])
def test_one_array(folder, layout, target):
    """For any order, size and shape, values are preserved or the format refuses the array."""
    array = {
        "F": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big-endian": np.arange(3, dtype=">i4"),
        "empty": np.zeros((0, 3), "f4"),
        "scalar": np.array(2.5),
        "complex": np.array([1 + 2j]),
    }[layout]
    np.save("in.npy", array)
    if target == ".arrow":
        pytest.importorskip("pyarrow")
    status, _ = here("convert", "in.npy", f"out{target}")
    refusing = {"scalar": {".arrow"}, "complex": {".arrow", ".safetensors"}}.get(layout, set())
    assert status == (2 if target in refusing else 0)
    assert os.path.exists(f"out{target}") == (status == 0)
    if status == 0:
        (found,) = opened(f"out{target}").values()
        assert found.tolist() == array.tolist() and found.dtype == array.dtype.newbyteorder("=")
        assert layout != "F" or target != ".npy" or np.load("out.npy").flags.f_contiguous


@pytest.mark.parametrize("kind", [".npz", ".arrow"])
def test_no_dtype_is_changed(tmp_path, capsys, kind):
    """An unsupported dtype is refused, with a format that supports it, and nothing is written."""
    if kind == ".arrow":
        pytest.importorskip("pyarrow")
    path = safetensors(tmp_path / "x.safetensors", {"w": ("BF16", (4,)), "v": ("F32", (2,))}, metadata={"k": "text"})
    assert here("convert", path, tmp_path / f"y{kind}") == (2, "")
    said = capsys.readouterr().err
    assert re.search(rf"\{kind} cannot store bfloat16 \('w'\).*Write \.safetensors", said)
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]
    assert here("convert", path, tmp_path / "y.safetensors")[0] == 0
    with library.open(tmp_path / "y.safetensors") as found:
        assert {name: str(each.dtype) for name, each in found.items()} == {"w": "bfloat16", "v": "float32"}
        assert found.metadata == {"k": "text"}


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["x.npz", "y.npy"], "x.npz: a .npy file stores one array, found 12. Write .npz or .safetensors."),
        (["x.npz", "y.bin"], "y.bin: its suffix must be one of .npy, .npz, .safetensors, .arrow"),
        (["x.npz", "none/y.npz"], "does not exist. Create it first"),
        (["none.npz", "y.npz"], "none.npz: No such file or directory"),
        (["x.npz", "x.npz"], "it already exists. Pass --force to replace it, or choose another name."),
        (["two.npz", "y.arrow"], ".arrow columns must have the same length, found 2 rows of 'a' and 3 of 'b'"),
        (["objects.npz", "y.npz"], "'o': it contains pickled Python objects"),
        (["code.pkl", "y.npz"], "it is a pickle, which can run any code when it is read"),
        (["x.npz", "folder.npz", "--force"], "it exists and is not a regular file"),
    ],
)
def test_what_is_refused_in_one_line(folder, words, because, capsys):
    """No file is left behind, and no code in the source is run."""
    pytest.importorskip("pyarrow")
    np.savez("two.npz", a=np.ones(2), b=np.ones(3))
    np.savez("objects.npz", o=np.array([object], dtype=object))
    (folder / "code.pkl").write_bytes(b"\x80\x04cos\nsystem\n(S'touch ran'\ntR.")
    (folder / "folder.npz").mkdir()
    before = sorted(folder.iterdir())
    status, out = here("convert", *words)
    err = capsys.readouterr().err
    assert (status, out, err.count("\n")) == (2, "", 1) and because in err, err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize(
    ("name", "refusing"),
    [
        ("a\0b", {".npz"}),
        ("x" * 65_532, {".npz"}),
        ("x" * 65_531, set()),
        ("a\ud800", {".npz", ".safetensors", ".arrow"}),
    ],
    ids=["NUL", "too long", "long", "surrogate"],
)
def test_a_name_arrives_or_is_refused(tmp_path, name, refusing, target, capsys):
    """A name that the format cannot store is refused, not truncated; a .npy file has no names."""
    if target == ".arrow":
        pytest.importorskip("pyarrow")
    path = safetensors(tmp_path / "x.safetensors", {name: ("F32", (2,))})
    status, _ = here("convert", path, out := tmp_path / f"y{target}")
    assert status == (2 if target in refusing else 0) and out.exists() == (status == 0)
    if status:
        said = capsys.readouterr().err
        assert said.startswith(f"dlx convert: {path}: {target} cannot store the name '"), said
    elif target != ".npy":
        assert [*opened(out)] == [name]


def test_metadata_that_is_no_text_is_refused(tmp_path, capsys):
    """UTF-8 cannot store a lone surrogate."""
    path = safetensors(tmp_path / "x.safetensors", {"w": ("F32", (2,))}, metadata={"k\ud800": "text"})
    assert here("convert", path, tmp_path / "y.safetensors")[0] == 2
    assert re.search(r"x\.safetensors: its metadata .*k.*ud800.* lone surrogate", capsys.readouterr().err)
    assert here("convert", path, tmp_path / "y.npz")[0] == 0


def test_a_row_too_long_for_arrow_is_refused(tmp_path, capsys):
    """Lengths of lists have 32 bits; the test file is sparse, and its elements are not read."""
    pytest.importorskip("pyarrow")
    with open(tmp_path / "x.npy", "wb") as file:
        file.write(npy("|i1", (1, 1 << 31), b""))
        file.truncate(file.tell() + (1 << 31))
    assert here("convert", tmp_path / "x.npy", tmp_path / "y.arrow")[0] == 2
    said = capsys.readouterr().err
    assert "an .arrow row has at most 2,147,483,647 elements along a dimension" in said and "Write .npz" in said


def no_links(monkeypatch):
    """Simulate a file system without hard links."""

    def link(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)


def test_a_file_that_appears_in_between_is_kept(folder):
    """Only `--force` replaces it; the partial file is removed."""
    with pytest.raises(FileError, match="it already exists"), atomic.replace_file(folder / "z", force=False):
        (folder / "z").write_text("theirs")
    assert (folder / "z").read_text() == "theirs"
    assert {each.name for each in folder.iterdir()} == {"x.npz", "z"}


@pytest.mark.parametrize("force", [False, True])
def test_the_name_is_given_in_one_step(folder, force):
    """The last step is the only one that opens OUT or renames to it, so a kill leaves no empty file."""
    code = """
    import os, sys
    import dlx.cli
    steps = []
    def hook(event, values):
        if event in ("open", "os.link", "os.rename", "os.remove", "os.truncate"):
            if str(values[0 if event == "open" else min(1, len(values) - 1)]).endswith("/y.npz"):
                steps.append(event)
    sys.addaudithook(hook)
    status = dlx.cli.main(sys.argv[1:])
    print(*steps, file=sys.stderr)
    sys.exit(status)
    """
    words = ["--force"] * force
    status, _, err = dlx("convert", "x.npz", "y.npz", *words, code=textwrap.dedent(code), memory=None)
    assert (status, err) == (0, "os.rename\n" if force else "os.link\n")
    assert len(opened("y.npz")) == 12 and {each.name for each in folder.iterdir()} == {"x.npz", "y.npz"}


def test_without_links_it_is_refused(folder, monkeypatch, capsys):
    """Without hard links, only `--force` can write the file."""
    no_links(monkeypatch)
    assert here("convert", "x.npz", "y.npz")[0] == 2
    assert "its file system has no hard links" in (said := capsys.readouterr().err) and "Pass --force" in said
    assert {each.name for each in folder.iterdir()} == {"x.npz"}
    assert here("convert", "x.npz", "y.npz", "--force")[0] == 0 and len(opened("y.npz")) == 12
    assert {each.name for each in folder.iterdir()} == {"x.npz", "y.npz"}


@pytest.mark.parametrize("killed", [False, True])
def test_a_file_that_another_run_completed_is_not_touched(folder, monkeypatch, killed):
    """Another run completes the file after this run opened it and before it locks it; its partial name may remain."""
    partial, out, real = folder / ".out.dlx-partial", folder / "out", fcntl.flock

    def flock(handle, how):
        monkeypatch.setattr(fcntl, "flock", real)
        partial.write_text("complete")
        os.link(partial, out)
        if not killed:
            partial.unlink()
        return real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(FileError, match="it already exists"), atomic.replace_file(out, force=False) as file:
        file.write(b"ours")
    assert out.read_text() == "complete" and not partial.exists()


def test_a_partial_file_is_taken_over(folder):
    """A partial file of a killed run is replaced."""
    (folder / "y.npz").write_text("old")
    (folder / ".y.npz.dlx-partial").write_text("left" * 10_000)
    assert here("convert", "x.npz", "y.npz", "--force")[0] == 0 and len(opened("y.npz")) == 12
    assert {each.name for each in folder.iterdir()} == {"x.npz", "y.npz"}


def test_a_folder_that_cannot_be_synchronised_is_no_failure(folder, monkeypatch):
    """OUT is complete by then."""
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert here("convert", "x.npz", "y.npz")[0] == 0 and len(opened("y.npz")) == 12


def test_what_ends_the_writing_is_said_of_out(folder, monkeypatch, capsys):
    """The error names OUT and the reason, also with --json."""

    def fsync(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    status, out = here("convert", "x.npz", "y.npz", "--json")
    assert status == 2 and json.loads(out)["error"]["message"] == "y.npz: No space left on device"
    assert capsys.readouterr().err == "dlx convert: y.npz: No space left on device\n"


@pytest.mark.parametrize(
    ("saved", "because"),
    [
        ({"a.b": 1, "a": {"b": 1}}, "two arrays would be named 'a.b'. Rename one in the source"),
        ({}, "it contains no array"),
        ({"m": None}, "'m': "),
    ],
    ids=["twice", "none", "meta"],
)
def test_a_refusal_names_the_file(folder, saved, because, capsys):
    """Errors about the contents of IN name IN, too."""
    torch = pytest.importorskip("torch")

    def tensors(tree):
        if isinstance(tree, dict):
            return {key: tensors(value) for key, value in tree.items()}
        return torch.ones(2) if tree else torch.ones(2, device="meta")

    torch.save(tensors(saved), "in.pt")
    assert here("convert", "in.pt", "y.npz")[0] == 2
    assert capsys.readouterr().err.startswith(f"dlx convert: in.pt: {because}")


@pytest.mark.parametrize("pipe", [False, True])
def test_stdin(folder, pipe):
    """Stdin may be a file or a pipe."""
    words = "cat x.npz |" if pipe else ""
    command = f"{words} {sys.executable} -m dlx convert - y.npz {'' if pipe else '< x.npz'}"
    subprocess.run(["/bin/sh", "-c", command], check=True, capture_output=True)
    assert len(opened("y.npz")) == 12


def test_a_refusal_of_stdin_names_it(folder, monkeypatch, capsys):
    """The error uses the name that the user wrote."""
    (folder / "lie.npz").write_text("no file")
    with open("lie.npz") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert here("convert", "-", "y.npz")[0] == 2
    assert capsys.readouterr().err.startswith("dlx convert: -: ")


def test_force_replaces_and_keeps_the_permissions(folder):
    """A link is followed, and its target is replaced."""
    (folder / "y.npz").write_text("old")
    (folder / "y.npz").chmod(0o640)
    (folder / "link.npz").symlink_to("y.npz")
    assert here("convert", "x.npz", "link.npz", "--force")[0] == 0
    assert (folder / "link.npz").is_symlink() and len(opened("y.npz")) == 12
    assert (folder / "y.npz").stat().st_mode & 0o777 == 0o640
    assert here("convert", "y.npz", "y.npz", "--force")[0] == 0 and len(opened("y.npz")) == 12


def test_json_says_what_was_written(folder):
    """The JSON lists names, dtypes and bytes."""
    found = document("convert", "x.npz", "y.safetensors")
    assert found["bytes"] == (folder / "y.safetensors").stat().st_size
    assert found["arrays"][0] == {"path": "a bool/ü", "dtype": "bool", "shape": [6, 2, 2], "nbytes": 24}


def test_what_has_no_place_is_said(tmp_path):
    """Metadata that the target format cannot store, and values of other types, are reported."""
    torch = pytest.importorskip("torch")
    path = safetensors(tmp_path / "x.safetensors", {"w": ("F32", (4,))}, metadata={"k": "text"})
    assert "left out: 1 of metadata" in here("convert", path, tmp_path / "x.npz")[1]
    state = {"model": {"w": torch.ones(2, requires_grad=True)}, "epoch": 3}
    torch.save(state, tmp_path / "x.pt")
    assert "left out: 1 value of other types: epoch" in here("convert", tmp_path / "x.pt", tmp_path / "pt.npz")[1]
    assert opened(tmp_path / "pt.npz")["model.w"].tolist() == [1, 1]
    (tmp_path / "x.gguf").write_bytes(gguf({"w": (0, (2,), np.ones(2, "f4").tobytes())}))
    assert here("convert", tmp_path / "x.gguf", tmp_path / "w.npy")[0] == 0


STOPPED = """
import os, sys
import dlx.cli
def wait(_):
    print("written", flush=True)
    sys.stdin.read()
os.fsync = wait
sys.exit(dlx.cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_half_file(folder):
    """After SIGKILL before the last step the old file is intact, and partial files do not accumulate."""
    (folder / "y.npz").write_text("old")
    before = {each.name for each in folder.iterdir()}
    words = ["convert", "x.npz", "y.npz", "--force"]
    for _ in range(2):
        run = subprocess.Popen(
            [sys.executable, "-c", STOPPED, *words], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with run:
            assert run.stderr.readline() == "written\n"  # its stdout is the command's own
            status, _, err = dlx(*words)
            assert status == 2 and "another process or thread is writing it" in err
            run.send_signal(signal.SIGKILL)
        assert (folder / "y.npz").read_text() == "old"
        assert {each.name for each in folder.iterdir()} - before == {".y.npz.dlx-partial"}
    status, _, err = dlx(*words)
    assert status == 0, err
    assert len(opened("y.npz")) == 12 and {each.name for each in folder.iterdir()} == before


@pytest.mark.gil("memory that is freed stays with the process for a while")
@pytest.mark.slow
def test_one_array_at_a_time(tmp_path):
    """At most two of 24 compressed arrays of 8 MiB are in memory at once."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for i in range(24):
            archive.writestr(f"a{i}.npy", npy("|u1", (8 << 20,), bytes(8 << 20)))
    code = """
    import json, sys, dlx.cli
    kept = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
    import dlx._files.writing as writing
    most, real = 0, writing.write
    def write(file, kind, items, metadata, advance):
        def measure(count):
            global most
            most = max(most, kept())
            advance(count)
        real(file, kind, items, metadata, measure)
    begun = kept()
    writing.write = write
    assert dlx.cli.main(["convert", "x.npz", "y.safetensors"]) == 0
    assert most > begun
    print(json.dumps(most - begun))
    """
    # Return large freed memory to the kernel at once; otherwise the heap's gaps would be measured.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) < 24 << 10  # KiB
    (found, *_) = opened(tmp_path / "y.safetensors").values()
    assert found.shape == (8 << 20,)


@pytest.mark.parametrize("slow", [False, True])
def test_a_bar_is_shown_from_a_second_on(folder, monkeypatch, slow):
    """The bar appears on a terminal's stderr after one second."""
    from dlx._support import screen

    monkeypatch.setattr(screen, "SLOW", 0.0 if slow else 1e9)
    ours, theirs = os.openpty()
    monkeypatch.setattr(sys, "stderr", os.fdopen(theirs, "w"))
    monkeypatch.setenv("TERM", "xterm")
    here("convert", "x.npz", "y.npz")
    sys.stderr.close()
    assert (b"writing y.npz" in shown_on(ours)) == slow


def test_plain_values_of_a_library_are_left_out(tmp_path):
    """Sizes, dtypes and devices next to tensors are counted as in `dlx inspect`, at any level."""
    torch = pytest.importorskip("torch")
    plain = {"size": torch.Size([1]), "dtype": torch.float32, "device": torch.device("cpu"), "n": 1}
    torch.save({"a": torch.ones(2), "in": {**plain}, **plain}, tmp_path / "x.pt")
    (source,) = document("inspect", tmp_path / "x.pt")["sources"]
    assert "8 values of other types" in source["notes"]
    found = document("convert", tmp_path / "x.pt", tmp_path / "x.npz")
    assert [each["path"] for each in found["arrays"]] == ["a"]
    (note,) = found["notes"]
    assert note.startswith("left out: 8 values of other types: size, dtype, device, n")


def test_members_without_an_array_are_named(tmp_path, np):
    """They are left out with a note; a dangling link is reported as a link."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as out:
        out.writestr("readme.txt", b"x")
        with out.open("a.npy", "w") as member:
            np.lib.format.write_array(member, np.ones(2))
    notes = document("convert", tmp_path / "x.npz", tmp_path / "y.npz")["notes"]
    assert notes == ["left out: readme.txt, without an array"]
    (tmp_path / "gone.npy").symlink_to(".git/annex/objects/x")
    assert "git annex get FILE" in refused("inspect", tmp_path / "gone.npy")


def test_dtype_casts_while_it_writes(tmp_path, np):
    """``--dtype`` is the option of `dlx.convert`: a floating dtype, or changes; the report has the new sizes."""
    np.savez(tmp_path / "x.npz", f=np.arange(3.0), h=np.ones(2, np.float16), i=np.arange(3), b=np.ones(2, bool))
    found = document("convert", tmp_path / "x.npz", tmp_path / "y.npz", "--dtype", "float32")
    assert {each["path"]: (each["dtype"], each["nbytes"]) for each in found["arrays"]} == {
        "f": ("float32", 12), "h": ("float32", 8), "i": ("int64", 24), "b": ("bool", 2),
    }  # fmt: skip
    written = np.load(tmp_path / "y.npz")
    assert {name: str(written[name].dtype) for name in written} == {
        "f": "float32", "h": "float32", "i": "int64", "b": "bool",
    }  # fmt: skip
    assert written["f"].tolist() == [0, 1, 2]
    words = ["--dtype", "int64=int32, float16=float64", "--only", "[hi]"]
    document("convert", tmp_path / "x.npz", tmp_path / "z.npz", *words)
    written = np.load(tmp_path / "z.npz")
    assert {name: str(written[name].dtype) for name in written} == {"h": "float64", "i": "int32"}


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("int8", "Pass --dtype int64=int8."),
        ("nonsense", "unknown dtype 'nonsense'"),
        ("float64=int8,", "is no list of changes such as float64=float32,int64=int32"),
        ("bfloat16", "Pass --dtype bfloat16=float32. Write .safetensors instead."),
    ],
)
def test_a_dtype_that_is_not_possible_is_refused(tmp_path, np, dtype, said):
    """The fix names options of the command, and nothing is written."""
    np.save(tmp_path / "x.npy", np.ones(2))
    assert said in refused("convert", tmp_path / "x.npy", tmp_path / "y.npz", "--dtype", dtype)
    assert not (tmp_path / "y.npz").exists()
