"""The command as a whole: help without imports, exit statuses, pipes, and text from untrusted producers."""

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
from support.processes.command import COMMANDS, MEMORY, dlx, here, refused, shown_on

from dlx._support.screen import Screen
from dlx.cli.arguments import build_parser


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_next_to_nothing(words):
    """`dlx --help` loads neither the compiled core, nor pluggy, rich or a framework."""
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
    if len(words) == 1:  # argparse and typing take as long to import as Python to start
        code = code.replace(
            'heavy += ("zipfile",)', 'heavy += ("zipfile", "argparse", "typing", "dlx.errors", "shutil")'
        )
    status, out, err = dlx(code=code)
    assert (status, err) == (0, "[]\n")
    assert "dlx" in out


def test_the_overview_is_the_help_of_the_parser():
    """`dlx --help` is printed without argparse; other ways to ask for it show the same text."""
    from dlx.cli.overview import COMMANDS as SUMMARIES
    from dlx.cli.overview import overview

    parser = build_parser()
    assert parser.format_help() == overview()
    (commands,) = parser._subparsers._group_actions
    assert list(commands.choices) == list(SUMMARIES)
    assert {each.dest: each.help for each in commands._choices_actions} == SUMMARIES


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_the_overview_fits_the_terminal(columns, monkeypatch):
    """No line but that of an exit status is wider than the terminal; no word is lost."""
    from dlx.cli.overview import overview

    monkeypatch.setenv("COLUMNS", "10000")
    words = overview().split()
    monkeypatch.setenv("COLUMNS", str(columns))
    text = overview()
    assert text.split() == words
    assert max(map(len, text.partition("\nexit status")[0].splitlines())) <= max(columns, 44)


@pytest.mark.parametrize("kind", ["safetensors", "npz", "h5", "parquet"])
def test_listing_a_header_needs_no_engine(tmp_path, kind):
    """`dlx inspect` of a file costs little more than its library: no conversion, plugin or dataclass is imported."""
    library = {"h5": "h5py", "parquet": "pyarrow"}.get(kind)
    path = tmp_path / f"x.{kind}"
    if kind == "safetensors":
        safetensors(path, {"w": ("F32", (4,))})
    elif kind == "npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w.npy", npy("<f4", (4,), bytes(16)))
    elif kind == "h5":
        with pytest.importorskip("h5py").File(path, "w") as file:
            file["w"] = [1.0, 2.0]
    else:
        pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        pq.write_table(pa.table({"w": [1.0], "n": [1]}), path)
    code = f"""
import sys
from dlx.cli import main
status = main(["inspect", {str(path)!r}])
heavy = ["pluggy", "dlx._engine", "dlx._registry", "dlx.adapter", "dlx._views", "rich", "tempfile", "difflib"]
print([name for name in heavy if name in sys.modules and not {library!r}], file=sys.stderr)
print([name for name in heavy if name.startswith(("dlx", "pluggy")) and name in sys.modules], file=sys.stderr)
sys.exit(status)
"""
    status, out, err = dlx(code=code)
    assert (status, err.splitlines()[-1]) == (0, "[]") and "w" in out


@pytest.mark.parametrize("argument", ["", "['inspect', path]"])
def test_a_command_collects_no_garbage(tmp_path, argument):
    """As a process of its own, `dlx` never searches for garbage; a caller of `main` keeps its settings."""
    path = tmp_path / "x.safetensors"
    safetensors(path, {"w": ("F32", (4,))})
    code = f"""
import gc, sys
path = {str(path)!r}
sys.argv = ["dlx", "inspect", path]
from dlx.cli import main
before, count = gc.get_threshold(), gc.get_stats()[0]["collections"]
assert main({argument}) == 0
assert (gc.get_threshold() == before) == bool({argument})
assert bool({argument}) or gc.get_stats()[0]["collections"] <= count + 1
"""
    assert dlx(code=code)[0] == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_exit_statuses_and_fits_80_columns(command):
    """Every command's help explains its exit statuses, within 80 columns."""
    _, out, _ = dlx(command, "--help", env={**os.environ, "COLUMNS": "80"})
    assert "exit status" in out
    assert max(map(len, out.splitlines())) <= 80


def test_without_words_it_shows_its_help():
    """Without arguments, dlx prints its help with status 0."""
    assert dlx() == dlx("--help") and dlx()[0] == 0


@pytest.mark.parametrize("words", [["nothing"], ["plan", "x.npy"], ["inspect"], ["matrix", "--sv", "x"]])
def test_a_wrong_call_ends_with_2(words):
    """Errors are one line that names the command's help; options cannot be abbreviated."""
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
        (["plan", "x.safetensors", "float32[2]", "--to", "torch", "--dtype", "float32"], []),
        (["inspect", "x.npz", "bfloat16[2]", "--to", "torch"], []),
        pytest.param(
            ["plan", "x.safetensors", "--to", "torch", "--device", "cpu"], ["numpy", "torch"], marks=pytest.mark.slow
        ),
        (["plan", "float8_e5m2[2]", "--to", "torch"], ["numpy", "torch"]),
    ],
)
def test_what_the_command_does_not_need_is_not_imported(tmp_path, words, needed):
    """Reading headers imports no framework, a plan only its target, and tables in a pipe no rich."""
    for name in {*needed, *words} & {"numpy", "torch"}:
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
    status, out, err = dlx(code=code, cwd=tmp_path, memory=None if "torch" in needed else MEMORY)
    assert (status, err) == (0, f"{needed}\n")
    assert ("note: torch was imported to plan " in out) == ("torch" in needed)


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
    """In `dlx inspect … | head -1`, a closed pipe causes no error message, with and without colours."""
    tensors = {f"w{i}x": ("F32", (i % 50,)) for i in range(8000)}  # more than a pipe can buffer
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
    """Progress is drawn on stderr if it is a terminal, and erased at the end; stdout only has the result."""
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
    """No line is wider than the terminal, and names are only broken after their dots."""
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
        arguments = build_parser().parse_args(words)
        module = importlib.import_module(f"dlx.cli.commands.{arguments.module}")
        assert module.run(arguments, Screen(arguments.command, file=shown, width=width)) == 0
        lines = re.sub(r"\x1b\[\d*m", "", shown.getvalue()).splitlines()
        if words == ["doctor"]:
            lines = lines[: lines.index("for bug reports:")]  # the block is not wrapped
        assert lines and max(map(len, lines)) <= width
        _, plain = here(*words)
        if words[0] in ("inspect", "plan", "dtypes", "matrix"):  # nothing is truncated, however narrow
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
    """If stdout supports only ASCII, other characters are escaped."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    status, out, err = dlx("dtypes", env=env)
    assert (status, err) == (0, "")
    assert "\\u2713" in out


def test_output_in_a_pipe_is_plain(tmp_path):
    """Output in a pipe has no escape sequences and no frames, and is neither truncated nor wrapped."""
    name = "a" * 150
    path = safetensors(tmp_path / "x.safetensors", {name: ("F32", (2,)), "b": ("F32", (2,))})
    status, out = here("inspect", path)
    assert status == 0
    assert "\x1b" not in out and name in out
    assert max(map(len, out.splitlines())) > 150


def test_a_terminal_gets_colours_and_no_control_characters_of_others(tmp_path):
    """Names from a file are printed as text: no rich markup, no escape sequences, no line breaks."""
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
    """Keys and values of metadata are printed as text."""
    path = safetensors(tmp_path / "x.safetensors", {"b": ("F32", (2,))}, metadata={"\x1b[31mkey": "\x1b]0;title\x07"})
    env = {**os.environ, "FORCE_COLOR": colour, "COLUMNS": "140"}
    status, out, err = dlx("inspect", path, env=env)
    assert (status, err) == (0, "")
    assert "\\x1b[31mkey" in out and "\\x1b]0;title\\x07" in out
    assert "\x1b[31mkey" not in out and "\x1b]0" not in out and "\x07" not in out


def test_wide_characters_keep_columns_aligned(tmp_path):
    """East Asian characters are two columns wide in a terminal, accents have no width."""
    path = safetensors(
        tmp_path / "x.safetensors", {"日本": ("F32", (2,)), "e\u0301": ("F32", (3,)), "abcd": ("F32", (4,))}
    )
    _, out = here("inspect", path)
    lines = out.splitlines()[2:5]
    assert [line.index("float32") for line in lines] == [2 + 2, 2 + 3 + 2, 4 + 2]


# ---- output and errors -----------------------------------------------------------------------------------------------

WRITING = (["dtypes"], ["dtypes", "--json"], ["inspect", "float32[2]", "--to", "none"], ["--help"], ["--version"])


def shell(words, redirection):
    """Run a command in a shell; return its exit status, stdout and stderr."""
    command = f"exec {sys.executable} -m dlx {shlex.join(words)} {redirection}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", WRITING)
def test_a_full_disk_is_one_line(words):
    """The exit status is 2, since the output is incomplete."""
    status, _, err = shell(words, "> /dev/full")
    name = f"dlx {words[0]}" if words[0][0] != "-" else "dlx"
    assert (status, err) == (2, f"{name}: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize("words", WRITING[:3])
def test_a_closed_stdout_is_one_line(words):
    """It is reported as an error."""
    assert shell(words, ">&-") == (2, "", f"dlx {words[0]}: cannot write to stdout: it is closed\n")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_an_error_that_cannot_be_said_goes_nowhere_else(redirection):
    """If stderr cannot be written, only the exit status reports the error."""
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
    """Output of imported Python code, C code and child processes does not reach stdout, so JSON stays valid."""
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
    """Errors are printed as JSON with a schema version on stdout; the line on stderr and the status stay the same."""
    status, out, err = dlx(*words, "--json")
    found = json.loads(out)
    assert status == 2 and err.count("\n") == 1
    assert list(found) == ["schema", "command", "dlx", "error"]
    assert (found["schema"], found["command"], found["error"]["kind"]) == (1, command, kind)
    assert found["error"]["message"] in err


def test_a_fault_of_dlx_is_one_line(monkeypatch, capsys):
    """Its traceback is shown on request."""
    from dlx.cli import main
    from dlx.cli.commands import doctor

    def run(*_):
        raise KeyError("a\nb")

    monkeypatch.setattr(doctor, "run", run)
    monkeypatch.delenv("DLX_TRACEBACK", raising=False)
    assert main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "internal error of dlx: KeyError: 'a\\nb'" in said and "DLX_TRACEBACK=1" in said
    monkeypatch.setenv("DLX_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["doctor"])


def test_errors_in_a_pipe_are_in_colour_where_that_is_forced():
    """Errors in a pipe are one line without escape sequences, unless colours are forced."""
    env = {key: each for key, each in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")} | {"TERM": "xterm"}
    _, _, plain = dlx("inspect", "nowhere.npy", env=env)
    _, _, coloured = dlx("inspect", "nowhere.npy", env=env | {"FORCE_COLOR": "1"})
    assert plain.startswith("dlx inspect: nowhere.npy") and plain.count("\n") == 1
    assert coloured == plain.replace("dlx inspect:", "\x1b[1;31mdlx inspect:\x1b[0m")


@pytest.mark.parametrize("width", [20, 40, 200])
def test_errors_on_a_terminal_are_in_colour_and_wrapped_between_words(monkeypatch, width):
    """Words are never broken, however narrow the terminal; colours can be disabled."""
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
    words = ["dlx", "inspect:", "a-file_that.is/not_there.npy:", "no", "such", "file,"]
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
    """The error suggests the closest subcommand or option."""
    assert here(*words) == (2, "")
    assert f"did you mean {meant!r}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["--device=cpu"], ["--copy=never"], ["--device", "cpu"], ["--detach", "--", "--y"]], ids=" ".join
)
def test_a_missing_option_is_named_beside_correct_ones(words, capsys):
    """The missing option is named next to valid options in any form; arguments after `--` are not options."""
    assert here("plan", "x", *words) == (2, "")
    assert capsys.readouterr().err.startswith("dlx plan: the following arguments are required: --to;")
