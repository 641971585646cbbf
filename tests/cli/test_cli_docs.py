"""docs/command-line.md matches the command: its examples, keys, commands and statuses; the screens are current."""

import html
import re
import runpy
import tomllib
import xml.etree.ElementTree
from pathlib import Path

import pytest
from support.files.writers import npy
from support.processes.command import COMMANDS, document, here

from dlx.cli import main

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
TEXT = (DOCS / "command-line.md").read_text(encoding="utf-8")
SCREENS = runpy.run_path(str(DOCS / "tools" / "screens" / "__main__.py"), run_name="screens")


@pytest.mark.parametrize("block", re.findall(r"```console\n\$ dlx (.*?)```", TEXT, re.DOTALL))
def test_examples_print_what_is_written(block, tmp_path, monkeypatch):
    """Each example runs in a folder with the files of the screens."""
    command, _, written = block.partition("\n")
    monkeypatch.chdir(tmp_path)
    SCREENS["write_images"](Path("images.npy"))
    Path("weights.npy").write_bytes(npy("<f4", (1000, 64), bytes(256_000)))
    assert here(*command.split()) == (0, written)


CALLS = {
    "convert": ["images.npy", "images.safetensors"],
    "completion": ["bash"],
    "inspect": ["float32[2]", "--to", "none"],
    "plan": ["float32[2]", "--to", "dlx"],
    "dtypes": [],
    "matrix": ["--from", "dlx", "--to", "dlx"],
    "devices": ["--driver"],
    "doctor": [],
    "new-adapter": ["no_such_package"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_json_has_the_documented_keys(command, tmp_path, monkeypatch):
    """Every command's JSON has a schema version and exactly the documented top-level keys."""
    if command == "completion":
        pytest.importorskip("shtab")
    monkeypatch.chdir(tmp_path)
    Path("images.npy").write_bytes(npy("<f4", (2,), bytes(8)))
    (line,) = re.findall(rf"^\| `{command}` \| (.*) \|$", TEXT, re.MULTILINE)
    found = document(command, *CALLS[command])
    assert list(found)[:3] == ["schema", "command", "dlx"]
    named = re.findall(r"`(\w+)`", line)
    assert set(found) - {"schema", "command", "dlx"} <= set(named)
    first = next((each for each in found.values() if isinstance(each, list) and each), None)
    if command not in ("convert", "devices", "doctor", "new-adapter") and first is not None:
        assert set(named) & set(first[0]), (named, first[0])
        missing = [key for key in named if key not in found and key not in first[0]]
        assert set(missing) <= {"error", "matrix", "arrays", "target", "name", "kind", "bytes", "notes", "metadata"}


def test_every_command_and_status_is_documented():
    """The tables of commands and exit statuses match --help."""
    assert tuple(re.findall(r"^\| `dlx ([\w-]+)", TEXT, re.MULTILINE)) == COMMANDS
    from dlx.cli.arguments import build_parser

    statuses = re.findall(r"^  ([\d, ]+?)  ", build_parser().format_help().partition("exit status\n")[2], re.MULTILINE)
    table = TEXT.partition("## Exit status")[2].partition("##")[0]
    assert [each.strip() for each in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)] == statuses


def test_the_command_is_installed_as_dlx():
    """The script in a wheel calls the function that these tests call."""
    scripts = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"dlx": f"{main.__module__}:{main.__name__}"}


@pytest.mark.parametrize("name", sorted(SCREENS["SCREENS"]))
def test_screens(name):
    """Each screen is in the page, well-formed, loads nothing, and supports light and dark."""
    text = (DOCS / "screens" / f"{name}.svg").read_text(encoding="utf-8")
    assert xml.etree.ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert f"(screens/{name}.svg)" in TEXT
    assert "url(http" not in text and "prefers-color-scheme: dark" in text
    assert f"dlx&#160;{SCREENS['SCREENS'][name].split()[0]}" in text


def text_of(svg):
    """Return the words of a picture, in order."""
    return [html.unescape(each) for each in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


@pytest.mark.parametrize("name", sorted(SCREENS["SCREENS"]))
def test_screens_show_what_the_command_prints(name, tmp_path, monkeypatch):
    """Each screen has the text that the command prints now; `nox -s screens` draws them again."""
    command = SCREENS["SCREENS"][name]
    targets = re.search(r"--to (\S+)", command)[1].split(",")
    for each in {*targets, *re.findall(r"--from (\w+)", command)} - {"dlx"}:
        pytest.importorskip(each)
    monkeypatch.chdir(tmp_path)
    SCREENS["write_model"](Path("model.safetensors"))
    SCREENS["write_images"](Path("images.npy"))
    written = (DOCS / "screens" / f"{name}.svg").read_text(encoding="utf-8")
    assert text_of(SCREENS["draw_screen"](command)) == text_of(written), "run nox -s screens"


def test_a_screen_is_drawn(tmp_path, monkeypatch):
    """The command draws a screen, 80 columns wide."""
    text = SCREENS["draw_screen"]("plan float32[2] --to dlx")
    xml.etree.ElementTree.fromstring(text)
    assert "shared" in text and "@media (prefers-color-scheme: dark)" in text
