"""The matrix: every dtype and every odd source towards every target, as docs/matrix.md says."""

import subprocess
import sys
from pathlib import Path

import pytest
from matrix.measure import read_versions
from matrix.render import draw_picture, format_page, is_further, read_page
from matrix.sources import FURTHER

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def measured():
    """The page for the installed frameworks."""
    return tried()


def tried(*arguments):
    """Measure the cells; what kills the process is named by the last line of its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "matrix", *arguments],
        cwd=ROOT / "docs" / "tools",
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-3:]
    assert done.returncode == 0, f"exit status {done.returncode} at {last}\n{done.stdout[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_every_cell_is_as_the_page_says(measured):
    """Cells between frameworks of the page's versions equal the page; no other cell is wrong."""
    cells, _ = read_page(measured)
    wanted, written = read_page((ROOT / "docs" / "matrix.md").read_text())
    other = {name for name, version in read_versions().items() if written.get(name) != version}

    def comparable(table, source, target):
        frameworks = {target, table.removeprefix("dtypes out of "), source.split()[0]}
        return not frameworks & other and not (other and "numpy" in other)  # numpy speaks for many

    changed = {
        at: (wanted.get(at), outcome)
        for at, outcome in cells.items()
        if comparable(*at) and outcome != "?" and outcome != wanted.get(at)
    }
    assert not changed, "run `nox -s matrix` and look at the difference"
    assert cells


@pytest.mark.slow
def test_the_page_is_whole(measured):
    """With all frameworks in the page's versions, the command writes the page and its picture."""
    text = (ROOT / "docs" / "matrix.md").read_text()
    cells, written = read_page(text)
    assert format_page(cells, written) == text
    assert (ROOT / "docs" / "matrix.svg").read_text() == draw_picture(cells)
    mine = {name: version for name, version in written.items() if name not in FURTHER}
    if read_versions() != mine:
        pytest.skip(f"the page is about {mine}, found {read_versions()}")
    assert read_page(measured)[0] == {at: each for at, each in cells.items() if not is_further(at) and each != "?"}


def test_cells_of_further_frameworks_are_as_the_page_says():
    """Each framework is measured in its environment, which has its cells on the page."""
    wanted, written = read_page((ROOT / "docs" / "matrix.md").read_text())
    here = {name: version for name, version in read_versions(FURTHER).items() if written.get(name) == version}
    if not here:
        pytest.skip("none of them is here in the page's version")
    cells, _ = read_page(tried("--further"))
    found = {at: each for at, each in cells.items() if not here.keys().isdisjoint((at[2], at[0].split()[-1]))}
    assert found and {at: (wanted.get(at), each) for at, each in found.items() if wanted.get(at) != each} == {}
