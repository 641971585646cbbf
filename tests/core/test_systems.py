"""dlx on other systems: Python's `os`, `mmap` and `fcntl` as macOS and Windows have them."""

import pytest

# Imported first: the standard library must not see the other system.
OTHER = """
import argparse, contextlib, ctypes, importlib.metadata, io, json, mmap, os, pathlib, platform, shutil, signal
import asyncio, subprocess, sys, tempfile, concurrent.futures, multiprocessing, socket, typing, zipfile, numpy as np
import pluggy, rich.console, rich.progress, rich.text
name = {name!r}
LACKS = {{
    "darwin": ["memfd_create", "sched_getaffinity", "pidfd_open"],
    "win32": ["memfd_create", "sched_getaffinity", "pidfd_open", "register_at_fork", "fork", "pread", "preadv"]
    + ["pwrite", "fchmod", "geteuid", "getuid", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY"],
}}[name]
for each in LACKS:
    if hasattr(os, each):
        delattr(os, each)
if name == "win32":
    sys.modules["fcntl"] = None
    for each in [each for each in vars(mmap) if each.startswith(("PROT_", "MAP_", "MADV_"))]:
        delattr(mmap, each)
sys.platform = name
assert not any(each.partition(".")[0] == "dlx" for each in sys.modules)
import dlx
"""

SYSTEMS = pytest.mark.parametrize("name", ["darwin", "win32"])


@SYSTEMS
def test_everything_but_sharing_works(np, python, tmp_path, name):
    """Conversions, trees, views, decorated functions, files and the command."""
    code = (
        OTHER.format(name=name)
        + """
    a = np.arange(6.0).reshape(2, 3)
    t = dlx.convert(a, to="dlx")
    assert dlx.shares_memory(t, a) and (dlx.convert({"a": [t]}, to="numpy")["a"][0] == a).all()
    assert dlx.stack([a, a], to="dlx").shape == (2, 2, 3)
    assert (np.asarray(dlx.using("numpy")(lambda x: x + 1)(t)) == a + 1).all()
    assert dlx.convert([t], to="numpy", lazy=True)[0].tolist() == a.tolist()
    big = np.arange(3_000_000.0)[::2]  # a copy in parts
    assert (dlx.convert(dlx.convert(big, to="dlx", copy=True), to="numpy") == big).all()
    repr(t)
    os.chdir(FOLDER)
    np.save("a.npy", a)
    np.savez("b.npz", x=a, y=a[0])
    with dlx.open("a.npy", to="numpy") as file:
        (kept,) = file.values()
    assert (kept == a).all()
    with dlx.open("b.npz", to="numpy") as file:
        assert (file["x"] == a).all()
    from dlx.cli import main
    assert main(["convert", "b.npz", "c.npz"]) == 0 and (np.load("c.npz")["x"] == a).all()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(["convert", "b.npz", "c.npz"]) == 2
    assert "it already exists" in said.getvalue()
    assert main(["convert", "b.npz", "c.npz", "--force"]) == 0
    assert sorted(os.listdir()) == ["a.npy", "b.npz", "c.npz"]  # and no partial file
    assert main(["inspect", "b.npz"]) == 0
    print("done")
    """.replace("\n    ", "\n").replace("FOLDER", repr(str(tmp_path)))
    )
    assert python(code, args=()).rstrip().endswith("done")


@pytest.mark.few(1)
@SYSTEMS
def test_sharing_is_refused_in_one_sentence(np, python, name):
    """share, attach and empty(shared=True) name the system and another way; the doctor lists what is missing."""
    code = (
        OTHER.format(name=name)
        + """
    for call in (lambda: dlx.share(b"abc"), lambda: dlx.share(like=np.ones(2)), lambda: dlx.attach({}),
                 lambda: dlx.empty((2,), "float32", shared=True)):
        try:
            call()
        except dlx.errors.DeviceError as error:
            print(error)
    from dlx.cli import main
    main(["doctor", "--json"])
    """.replace("\n    ", "\n")
    )
    said = python(code, args=())
    shown = {"darwin": "macOS", "win32": "Windows"}[name]
    reason = f"this needs the anonymous memory files of Linux, and this system is {shown}."
    lines = [line for line in said.splitlines() if line.startswith("cannot ")]
    assert len(lines) == 4 and all(reason in line and "dlx.open in the other process." in line for line in lines), said
    assert reason.removesuffix(".") in said.partition('"missing"')[2]
