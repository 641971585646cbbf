"""torch's DataLoader with the two lines of docs/cookbook/dataloader.md: samples of any framework, and workers."""

import subprocess
import sys

import pytest

import dlx


def collate(samples):
    """Stack each column of the samples."""
    return [dlx.stack(column, to="torch") for column in zip(*samples, strict=True)]


def loaded(samples, **options):
    """Return all batches of a loader."""
    from torch.utils.data import DataLoader

    return list(DataLoader(samples, batch_size=4, collate_fn=collate, **options))


def test_samples_that_torch_cannot_collate(np, torch):
    """bfloat16 of ml_dtypes, read-only and strided arrays are stacked."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    samples = [
        (np.full((2, 3), i, ml_dtypes.bfloat16), np.broadcast_to(np.float32(i), 3), np.array(i)) for i in range(10)
    ]
    batches = loaded(samples)
    assert [batch[2].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for images, rows, labels in batches:
        assert (images.dtype, images.shape) == (torch.bfloat16, (len(labels), 2, 3))
        assert torch.equal(images[:, 1, 2].long(), labels) and torch.equal(rows[:, 1].long(), labels)
        images += 1


def test_samples_of_jax(torch):
    """Arrays of jax are stacked, too."""
    jax = pytest.importorskip("jax")
    ((images,),) = loaded([(jax.numpy.full(3, i, "bfloat16"),) for i in range(4)])
    assert images.dtype == torch.bfloat16 and images[:, 0].tolist() == [0, 1, 2, 3]


SCRIPT = """
import sys
import ml_dtypes
import numpy as np
from torch.utils.data import DataLoader
import dlx

def collate(samples):
    return [dlx.stack(column, to="torch") for column in zip(*samples, strict=True)]

if __name__ == "__main__":
    samples = [(np.full((2, 3), i, ml_dtypes.bfloat16), np.array(i)) for i in range(10)]
    options = {"num_workers": 2, "multiprocessing_context": sys.argv[1]}
    for images, labels in DataLoader(samples, batch_size=4, collate_fn=collate, **options):
        print(images.dtype, tuple(images.shape), images[:, 1, 2].tolist(), labels.tolist())
"""


@pytest.mark.parametrize("start", ["fork", "forkserver"])  # the defaults before and since Python 3.14
@pytest.mark.slow
def test_workers(np, torch, tmp_path, start):
    """Batches of worker processes arrive in order for both start methods, which import the script again."""
    pytest.importorskip("ml_dtypes")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", start], capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "torch.bfloat16 (4, 2, 3) [0.0, 1.0, 2.0, 3.0] [0, 1, 2, 3]",
        "torch.bfloat16 (4, 2, 3) [4.0, 5.0, 6.0, 7.0] [4, 5, 6, 7]",
        "torch.bfloat16 (2, 2, 3) [8.0, 9.0] [8, 9]",
    ]
