"""The program of `nox -s fuzz-files`, for a few files of each format."""

import subprocess
from collections import Counter

import pytest
from support.files import fuzz
from support.project import program


@pytest.mark.parametrize("kind", [*fuzz.ALL])
@pytest.mark.slow
def test_mutated_files(kind, tmp_path):
    """Only errors of dlx come out, nothing is run, and no process is killed."""
    command = program("files.fuzz", "--count", "60", "--seed", "3", "--only", kind, "--folder", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused" in done.stdout or "skipped" in done.stdout


@pytest.mark.filterwarnings("ignore:os.fork")  # jax has threads
def test_a_fault_is_found(tmp_path, monkeypatch):
    """An error that is not dlx's fails the run, and its file is kept."""

    def fail(path, rng):
        raise KeyError(path.name)

    pytest.importorskip("numpy")
    monkeypatch.setattr(fuzz, "attempt", fail)
    assert fuzz.fuzz(".npy", 0, 3, 1, tmp_path, 0) == {"FAILED": 3}
    assert {each.name for each in tmp_path.glob("*.npy")} >= {"0.npy", "1.npy", "2.npy"}
    monkeypatch.setattr(fuzz, "attempt", lambda path, rng: __import__("os").system("true"))
    assert fuzz.run_batch(range(2), 1, ".npy", [{"": b"x"}], tmp_path / "work", 0) == (Counter(FAILED=1), 0)
