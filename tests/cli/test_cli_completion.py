"""`dlx completion`: completion of commands and options, tested in the shells."""

import argparse
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time

import pytest
from support.processes.command import COMMANDS, document, here

from dlx.cli.arguments import SHELLS, build_parser

pytest.importorskip("shtab")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write the script of a shell into a folder with a file to complete."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights and more.npy").write_bytes(b"")
    (tmp_path / "plan.npy").write_bytes(b"")

    def write(shell):
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        status, out = here("completion", shell)
        assert status == 0
        (tmp_path / "script").write_text(out)
        return "./script"

    return write


CASES = [  # typed words, and the completions
    (["ins"], {"inspect"}),
    ([""], set(COMMANDS)),
    (["--v"], {"--version"}),
    (["plan", "--co"], {"--copy"}),
    (["plan", "--copy", ""], {"auto", "never", "always"}),
    (["plan", "x.npy", "--readonly", "s"], {"share"}),
    (["inspect", "wei"], {"weights and more.npy"}),
    (["inspect", "plan.npy", "--js"], {"--json"}),
    (["completion", ""], set(SHELLS)),
    (["doctor", "--st"], {"--strict"}),
    (["convert", "plan"], {"plan.npy"}),
    (["plan", "--device", "pl"], set()),
    (["nothing", "--al"], set()),
]


def parsers():
    """Return the parsers of `dlx` and of each command."""
    top = build_parser()
    (commands,) = (each for each in top._actions if each.nargs == argparse.PARSER)
    return [top, *commands.choices.values()]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_made_from_the_parser(shell):
    """It contains every option of every command; --json returns it as text."""
    found = document("completion", shell)["script"]
    for command in parsers():
        for action in command._actions:
            for name in action.option_strings:
                assert (
                    name if shell != "fish" else f" -l {name[2:]}" if name[:2] == "--" else f" -s {name[1]}"
                ) in found


def test_without_shtab(monkeypatch):
    """The error names the command that installs shtab."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, out = here("completion", "bash", "--json")
    error = {"kind": "BadInput", "message": "`dlx completion` needs shtab: pip install shtab"}
    assert (status, json.loads(out)["error"]) == (2, error)


def test_bash(script):
    """One bash process completes all cases."""
    lines = [f"source {script('bash')}"]
    for words, _ in CASES:
        given = " ".join(f"'{each}'" for each in ["dlx", *words])
        lines += [
            f"COMP_WORDS=({given}); COMP_CWORD={len(words)}; _shtab_dlx",
            'printf "%s\\n" "${COMPREPLY[@]}" =====',
        ]
    done = subprocess.run(["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    offered = [set(filter(None, part.splitlines())) for part in done.stdout.split("=====\n")[:-1]]
    extra = {"plan.npy", "weights and more.npy"}
    for (words, expected), found in zip(CASES, offered, strict=True):
        assert found - (extra - expected) == expected, words


def test_fish(script):
    """One fish process completes all cases; it lists options after a dash."""
    lines = [f"source {script('fish')}"]
    cases = [(words, expected) for words, expected in CASES if words != ["nothing", "--al"]]
    for words, _ in cases:
        lines += [f"complete -C 'dlx {' '.join(words)}'", "echo ====="]
    env = {**os.environ, "HOME": os.getcwd(), "XDG_CONFIG_HOME": os.getcwd()}
    done = subprocess.run(["fish", "-c", "\n".join(lines)], capture_output=True, text=True, check=True, env=env)
    parts = done.stdout.split("=====\n")[:-1]
    for (words, expected), part in zip(cases, parts, strict=True):
        found = {line.partition("\t")[0].replace("\\ ", " ") for line in part.splitlines()}
        assert found == expected, words


def test_zsh(script):
    """A zsh on a terminal completes the word before Tab, as the stub command then shows."""
    typed = ["dlx ins\tplan\t--js\t", "dlx pl\t--cop\tne\t", "dlx completion fi\t", "dlx doctor --str\t"]
    expected = ["inspect plan.npy --json", "plan --copy never", "completion fish", "doctor --strict"]
    name = script("zsh")
    terminal = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", "zsh", "-f", "-i"]
    env = {**os.environ, "PS1": "> ", "TERM": "dumb", "ZDOTDIR": os.getcwd()}
    child = subprocess.Popen(terminal, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env)
    shown = ""

    def until(mark):
        nonlocal shown
        end = time.monotonic() + 60
        while not re.search(mark, shown):
            ready, _, _ = select.select([child.stdout], [], [], max(end - time.monotonic(), 0))
            assert ready, shown
            shown += os.read(child.stdout.fileno(), 1 << 16).decode("utf-8", "replace").replace("\r", "")

    try:
        start = f'unsetopt zle prompt_sp; autoload -Uz compinit; compinit -u -D; eval "$(<{name})"; setopt zle'
        child.stdin.write(f"{start}; dlx() {{ print -r -- \"called $*.\" }}; print rea''dy\n".encode())
        until(r"ready\n")
        for number, words in enumerate(typed, 1):
            child.stdin.write(f"{words}\n".encode())
            until(rf"(?s)(called .*?\.\n.*){{{number}}}")
    finally:
        child.kill()  # this closes its terminal, which ends zsh
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert re.findall(r"called (.*?) ?\.\n", shown) == expected
