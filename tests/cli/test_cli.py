"""The command as a whole: help without imports, exit statuses, pipes, text from generic producers."""

import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile

import pytest
from support.files.writers import npy, safetensors
from support.processes.command import COMMANDS, dlx, here, refused, shown_on

from dlx._support.screen import Screen
from dlx.cli.arguments import parser


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
heavy = ("dlx._ffi", "dlx._registry.registry", "pluggy", "rich", "importlib.metadata", "numpy", "torch", "jax", "json")
heavy += ("zipfile",)
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


def test_without_words_it_shows_its_help():
    """As --help does, with status 0."""
    assert dlx() == dlx("--help") and dlx()[0] == 0


@pytest.mark.parametrize("words", [["nothing"], ["plan", "x.npy"], ["inspect"], ["matrix", "--sv", "x"]])
def test_a_wrong_call_ends_with_2(words):
    """One line that names the command's help; options are not abbreviated."""
    said = refused(*words)
    assert said.startswith("dlx") and said.endswith("--help")


FRAMEWORKS = ("numpy", "torch", "jax", "pyarrow", "tvm_ffi", "cupy", "ml_dtypes")


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["dtypes"], []),
        (["doctor"], []),
        (["devices", "--driver"], []),
        (["inspect", "x.npy", "x.npz", "x.safetensors", "float32[2]", "--to", "none"], []),
        (["inspect", "x.npy", "--to", "dlx"], []),
        (["plan", "x.safetensors", "--to", "numpy"], ["numpy"]),
        (["plan", "x.npz", "--to", "dlx", "--json"], []),
    ],
)
def test_what_the_command_does_not_need_is_not_imported(tmp_path, words, needed):
    """Headers need no framework, and a plan only its target; tables in a pipe need no rich."""
    for name in needed:
        pytest.importorskip(name)
    (tmp_path / "x.npy").write_bytes(npy("<f4", (2, 3), bytes(24)))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.write(tmp_path / "x.npy", "a.npy")
    safetensors(tmp_path / "x.safetensors", {"a": ("F32", (2,)), "b": ("BF16", (2,))})
    code = f"""
import sys
from dlx.cli import main
assert main({words!r}) == 0
print([name for name in {FRAMEWORKS!r} if name in sys.modules and name != "ml_dtypes"], file=sys.stderr)
assert "rich" not in sys.modules
"""
    status, _, err = dlx(code=code, cwd=tmp_path)
    assert (status, err) == (0, f"{needed}\n")


def test_a_closed_pipe_is_no_error():
    """`dlx dtypes | head -1` prints no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dlx", "dtypes"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "colour"),
    [(["--all"], ""), (["--all", "--json"], ""), pytest.param(["--all"], "1", marks=pytest.mark.slow)],
)
def test_a_pipe_that_closes_half_way(tmp_path, words, colour):
    """`dlx inspect … | head -1`: the rest is written to nobody, and nobody is told of it; in colours, too."""
    tensors = {f"w{i}x": ("F32", (i % 50,)) for i in range(8000)}  # more than a pipe and its reader hold
    path = safetensors(tmp_path / "x.safetensors", tensors)
    done = subprocess.Popen(
        [sys.executable, "-m", "dlx", "inspect", str(path), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "FORCE_COLOR": colour},
    )
    with done:
        assert done.stdout.readline()
        done.stdout.close()
        assert (done.wait(60), done.stderr.read()) == (141, b"")


def test_progress_is_shown_on_a_terminal_only(tmp_path):
    """On stderr, where that is a terminal, and wiped out in the end; stdout has the result alone."""
    path = safetensors(tmp_path / "x.safetensors", {f"w{i}": ("F32", (i,)) for i in range(30)})
    command = [sys.executable, "-m", "dlx", "plan", str(path), "--to", "dlx"]
    ours, theirs = os.openpty()
    env = {key: each for key, each in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=env, check=True)
    os.close(theirs)
    shown = shown_on(ours)
    assert b"planning for dlx" in shown and b"100%" in shown
    assert shown.rstrip().endswith(b"\x1b[2K") or b"\x1b[2K" in shown[-40:]
    quiet = subprocess.run(command, capture_output=True, check=True)
    assert (quiet.stdout, quiet.stderr) == (done.stdout, b"")


@pytest.mark.parametrize("width", [40, *(pytest.param(width, marks=pytest.mark.slow) for width in (80, 140))])
def test_screens_fit_a_terminal(tmp_path, width):
    """No line is wider, and names are broken behind their dots, not in a word."""
    long = "a_rather_long_prefix.of_some.deep_model.with_layers.{}.and_a_long_tail.weight"
    tensors = {long.format(f"block{i}x"): ("F32", (i, 70000, 12)) for i in range(8)} | {"b": ("F4", (8,))}
    path = safetensors(tmp_path / "x.safetensors", {name: each for name, each in tensors.items() if 0 not in each[1]})
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name in "ab":
            archive.writestr(f"{name}.npy", npy("|S3", (2,), bytes(6)))
    for words in (
        ["inspect", str(path), "--to", "dlx"],
        ["inspect", str(tmp_path / "x.npz"), "--to", "dlx"],
        ["plan", str(path), "--to", "dlx", "--copy", "always"],
        ["plan", "bfloat16[3,4]", "--to", "dlx", "--device", "cuda:0"],
        ["dtypes"],
        ["matrix", "--from", "dlx", "--to", "dlx"],
        ["doctor"],
        ["devices", "--driver"],
    ):
        shown = io.StringIO()
        arguments = parser().parse_args(words)
        module = importlib.import_module(f"dlx.cli.commands.{arguments.module}")
        assert module.run(arguments, Screen(arguments.command, file=shown, width=width)) == 0
        lines = re.sub(r"\x1b\[\d*m", "", shown.getvalue()).splitlines()
        if words == ["doctor"]:
            lines = lines[: lines.index("to paste into a report:")]  # what is pasted is not folded
        assert lines and max(map(len, lines)) <= width
        _, plain = here(*words)
        if words[0] in ("inspect", "plan", "dtypes", "matrix"):  # nothing is cut off, however narrow
            shown = "".join("".join(lines).split())
            gone = [word for word in re.findall(r"[^\s./\]]+", plain) if word not in shown]
            headings = {"name", "dtype", "why"} if width == 40 else set()  # of a first column, of an empty cell
            assert {*gone} <= headings
        if words[0] == "inspect" and width > 40:
            cells = [line.strip().split("  ")[0] for line in lines if "long" in line or "tail" in line]
            assert all(
                cell.startswith(("a_rather", "and_a", "deep_model", "with_layers", "weight")) for cell in cells
            ), cells


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
    assert "\x1b[" in out  # the command's own
    assert "\x1b[31mred" not in out
    assert "\\x1b[31mred\\x1b[0m\\nsecond [bold]line[/bold]" in out
    assert refused("inspect", "no\nsuch\x1b[31mfile").startswith("dlx inspect: no\\nsuch\\x1b[31mfile: ")


@pytest.mark.parametrize("colour", ["", "1"])
def test_metadata_of_others_is_text(tmp_path, colour):
    """Keys as well as values."""
    path = safetensors(tmp_path / "x.safetensors", {"b": ("F32", (2,))}, metadata={"\x1b[31mkey": "\x1b]0;title\x07"})
    env = {**os.environ, "FORCE_COLOR": colour, "COLUMNS": "140"}
    status, out, err = dlx("inspect", path, env=env)
    assert (status, err) == (0, "")
    assert "\\x1b[31mkey" in out and "\\x1b]0;title\\x07" in out
    assert "\x1b[31mkey" not in out and "\x1b]0" not in out and "\x07" not in out


def test_wide_characters_keep_columns_aligned(tmp_path):
    """A character of East Asia takes two columns of a terminal, an accent none."""
    path = safetensors(
        tmp_path / "x.safetensors", {"日本": ("F32", (2,)), "e\u0301": ("F32", (3,)), "abcd": ("F32", (4,))}
    )
    _, out = here("inspect", path)
    lines = out.splitlines()[2:5]
    assert [line.index("float32") for line in lines] == [2 + 2, 2 + 3 + 2, 4 + 2]


# ---- where it writes to ----------------------------------------------------------------------------------------------

WRITING = (["dtypes"], ["dtypes", "--json"], ["inspect", "float32[2]", "--to", "none"], ["--help"], ["--version"])


def shell(words, redirection):
    """Run the command as a shell does; return (exit status, stdout, stderr)."""
    command = f"exec {sys.executable} -m dlx {shlex.join(words)} {redirection}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", WRITING)
def test_a_full_disk_is_one_line(words):
    """Exit status 2: the output is not whole."""
    status, _, err = shell(words, "> /dev/full")
    name = f"dlx {words[0]}" if words[0][0] != "-" else "dlx"
    assert (status, err) == (2, f"{name}: stdout could not be written: No space left on device\n")


@pytest.mark.parametrize("words", WRITING[:3])
def test_a_closed_stdout_is_one_line(words):
    """It is not taken for success."""
    assert shell(words, ">&-") == (2, "", f"dlx {words[0]}: stdout could not be written: it is closed\n")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_an_error_that_cannot_be_said_goes_nowhere_else(redirection):
    """The status says it."""
    if "full" in redirection and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    assert shell(["inspect", "nosuch"], redirection) == (2, "", "")


NOISY = """
import os, sys
print("printed")
os.system("echo of a program")
os.write(1, b"of C\\n")
class Array:
    def __dlpack__(self, **_):
        print("exported")
        raise BufferError("not now")
    def __dlpack_device__(self):
        os.write(1, b"asked\\n")
        return (1, 0)
array = Array()
"""


def test_what_imported_code_prints_is_no_part_of_the_output(tmp_path):
    """Neither what Python prints, nor C, nor a program that it starts: JSON stays JSON."""
    (tmp_path / "noisy.py").write_text(NOISY)
    status, out, err = dlx("inspect", "noisy:array", "--to", "dlx", "--json", cwd=tmp_path)
    assert status == 0
    (source,) = json.loads(out)["sources"]
    assert source["arrays"][0]["capsule"] == {"refused": "BufferError: not now"}
    for said in ("printed", "of a program", "of C", "exported", "asked"):
        assert said in err


# ---- errors for programs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "command", "kind"),
    [
        (["inspect", "nosuch"], "inspect", "BadInput"),
        (["plan", "float32[2]", "--to", "nosuch"], "plan", "BadInput"),
        (["plan", "float32[2]", "--to", "dlx", "--device", "nonsense"], "plan", "DeviceNameError"),
        (["inspect"], "inspect", "WrongCall"),
        (["nothing"], None, "WrongCall"),
    ],
)
def test_errors_are_json_too(words, command, kind):
    """With a schema version, on stdout; the line on stderr and the exit status are as ever."""
    status, out, err = dlx(*words, "--json")
    found = json.loads(out)
    assert status == 2 and err.count("\n") == 1
    assert list(found) == ["schema", "command", "dlx", "error"]
    assert (found["schema"], found["command"], found["error"]["kind"]) == (1, command, kind)
    assert found["error"]["message"] in err


def test_a_fault_of_dlx_is_one_line(monkeypatch, capsys):
    """Its traceback is shown where that is asked for."""
    from dlx.cli import main
    from dlx.cli.commands import doctor

    def run(*_):
        raise KeyError("a\nb")

    monkeypatch.setattr(doctor, "run", run)
    monkeypatch.delenv("DLX_TRACEBACK", raising=False)
    assert main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a fault of dlx: KeyError: 'a\\nb'" in said and "DLX_TRACEBACK=1" in said
    monkeypatch.setenv("DLX_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["doctor"])


def test_errors_in_a_pipe_are_in_colour_where_that_is_forced():
    """As all else is; in one line, and without escape sequences otherwise."""
    env = {key: each for key, each in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")} | {"TERM": "xterm"}
    _, _, plain = dlx("inspect", "nowhere.npy", env=env)
    _, _, coloured = dlx("inspect", "nowhere.npy", env=env | {"FORCE_COLOR": "1"})
    assert plain.startswith("dlx inspect: nowhere.npy") and plain.count("\n") == 1
    assert coloured == plain.replace("dlx inspect:", "\x1b[1;31mdlx inspect:\x1b[0m")


@pytest.mark.parametrize("width", [20, 40, 200])
def test_errors_on_a_terminal_are_in_colour_and_wrapped_between_words(monkeypatch, width):
    """Every word is whole on its line, however narrow; without colours where the user wants none."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for colours in (True, False):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if not colours:
            monkeypatch.setenv("NO_COLOR", "1")
        ours, theirs = os.openpty()
        with os.fdopen(theirs, "w") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            assert here("inspect", "a-file_that.is/not_there.npy") == (2, "")
        shown.append(shown_on(ours).decode().replace("\r\n", "\n"))
    coloured, plain = shown
    assert coloured.startswith("\x1b[1;31mdlx inspect:\x1b[0m") and "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    words = ["dlx", "inspect:", "a-file_that.is/not_there.npy:", "there", "is", "no", "such", "file,"]
    assert plain.split()[: len(words)] == words
    assert all(len(line) <= width or len(line.split()) == 1 for line in plain.splitlines())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["inspekt", "x"], "inspect"),
        (["conver", "a", "b"], "convert"),
        (["completon", "bash"], "completion"),
        (["inspect", "x", "--jsn"], "--json"),
        (["convert", "a", "b", "--forse"], "--force"),
        (["plan", "x", "--tto", "torch"], "--to"),
        (["plan", "x", "--tto=torch", "--device=cpu"], "--to"),
    ],
)
def test_misspelt_words_are_answered_with_the_nearest(words, meant, capsys):
    """Subcommands and options, in the one line that says what is wrong."""
    assert here(*words) == (2, "")
    assert f"did you mean {meant!r}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["--device=cpu"], ["--copy=never"], ["--device", "cpu"], ["--detach", "--", "--y"]], ids=" ".join
)
def test_a_missing_option_is_named_beside_correct_ones(words, capsys):
    """However these are written; what follows `--` is no option."""
    assert here("plan", "x", *words) == (2, "")
    assert capsys.readouterr().err.startswith("dlx plan: the following arguments are required: --to;")
