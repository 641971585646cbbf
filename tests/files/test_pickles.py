"""Pickles in files: a hostile one costs neither the process nor years of its time, an ordinary one is read."""

import pickle
import zipfile

import pytest

import dlx
from dlx._files.pickles import check_pickle
from dlx.errors import FileError

torch = pytest.importorskip("torch")

KEY = b"\x80\x02}(%sK\x01u."  # {key: 1}
SHARED = b")q\x00" + b"h\x00h\x00\x86q\x00" * 60  # 2 ** 60 tuples, in pairs
HOSTILE = {
    "shared": KEY % SHARED,
    "wide": KEY % (b")q\x00" + (b"(" + b"h\x00" * 1000 + b"tq\x00") * 4),
    "chain": KEY % (b")" + b"\x85" * 500_000),
    "pairs": KEY % (b")" + b"K\x01\x86" * 500_000),
    "no key": b"\x80\x02]" + SHARED + b"a.",
    "doubled": KEY % (b")" + b"2\x86" * 60),
    "popped": KEY % (b")q\x00" + b"h\x00h\x00\x86(0q\x00" * 60),
    "long places": KEY % (b")r\x00\x00\x00\x00" + b"h\x00j\x00\x00\x00\x00\x86r\x00\x00\x00\x00" * 60),
    "as text": KEY % (b")p0\n" + b"g0\ng0\n\x86p0\n" * 60),
    "memoized": b"\x80\x04" + KEY[2:] % (b")\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(60))),
    "sets": b"\x80\x04" + KEY[2:] % (b"(" * 250_000 + b")" + b"\x85\x91" * 250_000),
    "claimed place": b"\x80\x02}r\xff\xff\xff\xff.",
    "claimed bytes": b"\x80\x03B\xff\xff\xff\xff.",
    "claimed number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "extension": b"\x80\x02\x82\x01.",
    "cut off": b"\x80\x02}(",
    "empty": b"",
    "unknown": b"\x80\x02\xff.",
}


def save_hostile(folder):
    """Write each pickle as a .pt file and as the metadata of a distributed checkpoint."""
    torch.save({"a": torch.ones(3)}, folder / "good.pt")
    for name, raw in HOSTILE.items():
        with zipfile.ZipFile(folder / "good.pt") as good, zipfile.ZipFile(folder / f"{name}.pt", "w") as changed:
            for member in good.infolist():
                changed.writestr(member, raw if member.filename.endswith("data.pkl") else good.read(member))
        (folder / name).mkdir()
        (folder / name / ".metadata").write_bytes(raw)


def test_hostile_pickles_are_refused(tmp_path, python):
    """Each in a moment, without a crash."""
    save_hostile(tmp_path)
    code = """
    import pathlib, time, dlx
    for path in sorted(pathlib.Path(FOLDER).iterdir()):
        begun = time.process_time()
        try:
            dict(dlx.open(path))
            print("read", path.name)
        except dlx.errors.FileError as error:
            pass
        assert time.process_time() - begun < 20, path
    """
    assert python(code.replace("FOLDER", repr(str(tmp_path)))) == "read good.pt\n"


def test_ordinary_tuples_are_read(tmp_path):
    """Many of them, as keys, shared, and in each other."""
    deep = ()
    for _ in range(200):
        deep = (deep, 1)
    pair = (1, "x")
    tree = {"a": torch.ones(3), pair: pair, "many": ((1, 2),) * 1000, "deep": deep}
    torch.save({**tree, "all": tuple((i, i) for i in range(50_000))}, tmp_path / "x.pt")
    with dlx.open(tmp_path / "x.pt", to="torch") as file:
        assert (
            file["many"][999][1] == 2 and file["all"][-1][0] == 49_999 and file[pair][0] == 1 and file["a"].sum() == 3
        )
        assert len(file["deep"]) == 2


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_object_of_pickle_passes(protocol):
    """The check follows all opcodes that Python writes, except for those that it refuses by name."""
    inner = [1, -1, 300, 70_000, 1 << 40, 1 << 3000, 0.5, True, False, None, b"x", b"y" * 300, "ü" * 300, "s"]
    tree = {
        "a": inner,
        (1, (2, 3)): tuple(inner),
        "c": {1: {2: [inner, inner]}},
        "f": frozenset([1, 2]),
        "s": {3, (4,)},
    }
    tree["objects"] = [complex(1, 2), range(3), bytearray(b"x" * 300), slice(1, 2), FileError]
    check_pickle(pickle.dumps(tree, protocol))
    with pytest.raises((ValueError, LookupError)):
        check_pickle(pickle.dumps(tree, protocol)[:-1])
