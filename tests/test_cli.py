"""The command as a whole: help without imports, exit statuses, pipes, text from strangers."""

import os
import subprocess
import sys

import pytest
from command import dlx, here, refused

COMMANDS = ("inspect", "plan", "dtypes", "matrix", "devices", "doctor", "bench")


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_next_to_nothing(words):
    """Neither the compiled core, nor pluggy, rich or a framework is loaded to say what there is."""
    code = f"""
import sys
from dlx.cli import main
try:
    main({words!r})
except SystemExit as end:
    assert not end.code
heavy = ("dlx._ffi", "dlx.registry", "pluggy", "rich", "importlib.metadata", "numpy", "torch", "jax", "json", "zipfile")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""
    status, out, err = dlx(code=code)
    assert (status, err) == (0, "[]\n")
    assert "dlx" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_exit_statuses_and_fits_80_columns(command):
    """Every command's help says what its exit status means, within 80 columns."""
    _, out, _ = dlx(command, "--help", env={**os.environ, "COLUMNS": "80"})
    assert "exit status" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("words", [[], ["nothing"], ["plan", "x.npy"], ["inspect"], ["matrix", "--sv", "x"]])
def test_a_wrong_call_ends_with_2(words):
    """One line that names the command's help; options are not abbreviated."""
    said = refused(*words)
    assert said.startswith("dlx") and said.endswith("--help")


def test_what_the_command_does_not_need_is_not_imported(tmp_path):
    """dtypes, doctor and a file's header import no framework; tables in a pipe need no rich."""
    (tmp_path / "x.npy").write_bytes(npy("<f4", (2, 3), bytes(24)))
    for words in (["dtypes"], ["doctor"], ["inspect", str(tmp_path / "x.npy")]):
        code = f"""
import sys
from dlx.cli import main
assert main({words!r}) == 0
names = ("numpy", "torch", "jax", "pyarrow", "tvm_ffi", "ml_dtypes", "rich")
print([name for name in names if name in sys.modules], file=sys.stderr)
"""
        status, _, err = dlx(code=code)
        assert (status, err) == (0, "[]\n")


def test_a_closed_pipe_is_no_error():
    """`dlx dtypes | head -1` prints no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dlx", "dtypes"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_c_locale_prints_what_it_can():
    """Where stdout speaks ASCII only, other characters are written out."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    status, out, err = dlx("dtypes", env=env)
    assert (status, err) == (0, "")
    assert "\\u2713" in out


def test_output_in_a_pipe_is_plain(tmp_path):
    """No escape sequences, no frames, nothing cut or wrapped, however long."""
    name = "a" * 150
    path = safetensors(tmp_path / "x.safetensors", {name: ("F32", (2,)), "b": ("F32", (2,))})
    status, out = here("inspect", path)
    assert status == 0
    assert "\x1b" not in out and name in out
    assert max(map(len, out.splitlines())) > 150


def test_a_terminal_gets_colours_and_no_control_characters_of_others(tmp_path):
    """Names from a file are text: neither rich's markup nor escape sequences nor lines of their own."""
    evil = "\x1b[31mred\x1b[0m\nsecond [bold]line[/bold]"
    path = safetensors(tmp_path / "x.safetensors", {evil: ("F32", (2,)), "b": ("F32", (2,))})
    status, out, err = dlx("inspect", path, env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "140"})
    assert (status, err) == (0, "")
    assert "\x1b[" in out  # rich's own
    assert "\x1b[31mred" not in out
    assert "\\x1b[31mred\\x1b[0m\\nsecond [bold]line[/bold]" in out
    assert refused("inspect", "no\nsuch\x1b[31mfile").startswith("dlx inspect: no\\nsuch\\x1b[31mfile: ")


def npy(descr, shape, data, *, order=False, version=1):
    """Return the bytes of a .npy file, made without numpy."""
    header = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape!r}, }}".encode()
    width = 2 if version == 1 else 4
    header += b" " * (-(len(header) + 9 + width) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(width, "little") + header + data


def safetensors(path, tensors, *, metadata=None, cut=0):
    """Write a .safetensors file of zeros: {name: (dtype, shape)}."""
    import json
    import math

    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8, "F4": 0.5}
    header, at = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + int(math.prod(shape) * sizes[dtype])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    whole = len(raw).to_bytes(8, "little") + raw + bytes(at)
    path.write_bytes(whole[: len(whole) - cut])
    return path
