"""The browser check of `make docs`: it finds each fault, planted in a small site."""

import json
import subprocess
import sys
from pathlib import Path

import browser
import pytest
from support.project import ROOT

HEAD = '<!doctype html><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
CODE = f"<main><pre><code style='display: block; overflow: auto'>{'x' * 400}</code></pre></main>"
TABLE = f"<main><div class=md-typeset__scrollwrap style='overflow: auto'><table><td>{'x' * 400}</table></div></main>"
FAULTS = {
    "good": ("<p>good</p><img src='there.svg'>", ""),
    "wide": ("<main><p style='width: 2000px'>wide</p></main>", "pixels too wide"),
    "code": (CODE, "cuts code"),
    "table": (TABLE, ""),
    "picture": ("<img src='gone.svg'>", "lacks the picture"),
    "console": ("<script>console.error('planted')</script>", "logs planted"),
    "raises": ("<script>throw new Error('planted')</script>", "raises"),
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """Return the faults in a site of these pages, found by the environment of `make docs` or by this one."""
    executable = browser.browser_path()
    if executable is None:
        pytest.skip("Chromium is missing; install chromium")
    folder = tmp_path_factory.mktemp("planted")
    for name, (body, _) in FAULTS.items():
        (folder / f"{name}.html").write_text(HEAD + body)
    (folder / "there.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>")
    python = ROOT / ".venv-docs" / "bin" / "python"
    script = (
        "import browser, json, pathlib, sys; print(json.dumps(browser.check(pathlib.Path(sys.argv[1]), sys.argv[2])))"
    )
    command = [str(python if python.exists() else sys.executable), "-c", script, str(folder), executable]
    done = subprocess.run(
        command, cwd=ROOT / "docs" / "tools", capture_output=True, text=True, timeout=200, check=False
    )
    if "No module named 'playwright'" in done.stderr:
        pytest.skip("playwright is not installed; `make docs` installs it in .venv-docs")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_page_and_in_no_other(complaints, name):
    """Each fault is found, wide and narrow, light and dark; a page without a fault has no report."""
    _, fault = FAULTS[name]
    found = [each for each in complaints if f"{name}.html" in each]
    assert any(fault in each for each in found) if fault else not found


def test_a_machine_without_a_browser_is_told(monkeypatch, capsys):
    """Without a browser the check prints one sentence and succeeds."""
    monkeypatch.setenv("CHROMIUM", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["browser.py", str(Path("site"))])
    assert browser.main() == 0
    assert "there is no Chromium" in capsys.readouterr().out
