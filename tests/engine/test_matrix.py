"""The matrix: every dtype and every odd source towards every target, as docs/matrix.md says."""

import subprocess
import sys
from pathlib import Path

import pytest
from matrix.measure import versions
from matrix.render import page, picture, read_page

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def measured():
    """The cells as they are here; what kills the process is named by the last line of its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "matrix"],
        cwd=ROOT / "docs" / "tools",
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-3:]
    assert done.returncode == 0, f"exit status {done.returncode} at {last}\n{done.stdout[-3000:]}"
    return done.stdout


def test_every_cell_is_as_the_page_says(measured):
    """Cells between frameworks of the page's versions are as they are on the page; no other may be wrong either."""
    cells, _ = read_page(measured)
    wanted, written = read_page((ROOT / "docs" / "matrix.md").read_text())
    other = {name for name, version in versions().items() if written.get(name) != version}

    def comparable(table, source, target):
        frameworks = {target, table.removeprefix("dtypes out of "), source.split()[0]}
        return not frameworks & other and not (other and "numpy" in other)  # numpy speaks for many

    changed = {
        at: (wanted.get(at), outcome)
        for at, outcome in cells.items()
        if comparable(*at) and outcome != "?" and outcome != wanted.get(at)
    }
    assert not changed, "run `make matrix` and look at the difference"
    assert cells


def test_the_page_is_whole(measured):
    """With all frameworks of the page in its versions, it is what the command writes, picture included."""
    text = (ROOT / "docs" / "matrix.md").read_text()
    cells, written = read_page(text)
    if versions() != written:
        pytest.skip(f"the page is about {written}, found {versions()}")
    assert measured.strip() == text.strip()
    assert page(cells, written) == text
    assert (ROOT / "docs" / "matrix.svg").read_text() == picture(cells)
