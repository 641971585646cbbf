"""The storage is pinned: whatever is done to a torch tensor after a conversion, results keep values and layout."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import dlx
from dlx import errors

# ---- 200 MB in a process of its own, since a broken promise is a crash -----------------------------------------------

PRELUDE = """
import gc
import sys
import torch
import dlx

N = 50_000_000  # float32: 200 MB, which the allocator gives back to the system at once
kept = []


def source():
    return torch.ones(5, 1, N // 5)


def watch(result, shape=(5, 1, N // 5), strides=(N // 5, N // 5, 1), value=1):
    kept.append((result, shape, strides, value))


def check():
    # Memory of the same size, filled with something else, lands where freed memory was.
    filler = torch.full((N,), 7.0)
    for result, shape, strides, value in kept:
        array = dlx.convert(result, to="numpy", copy=False)
        assert array.shape == shape, array.shape
        assert tuple(step // 4 for step in array.strides)[::2] == strides[::2], array.strides
        assert array.min() == array.max() == value, (array.min(), array.max())
    kept.clear()
    del filler
    gc.collect()


def refused(action):
    try:
        action()
    except RuntimeError as error:
        assert "not resizable" in str(error), error
    else:
        raise AssertionError("resized")
"""

ACTIONS = {
    "set_": "t = source(); watch(dlx.convert(t, to=target)); t.set_()",
    "data =": "t = source(); watch(dlx.convert(t, to=target)); t.data = torch.zeros(1)",
    "data = on a parameter": """
        t = torch.nn.Parameter(source())
        watch(dlx.convert(t, to=target, detach=True))
        t.data = torch.zeros(1)
    """,
    "module.half()": """
        module = torch.nn.Linear(N // 5, 5, bias=False)
        with torch.no_grad():
            module.weight.fill_(1)
        watch(dlx.convert(module.weight, to=target, detach=True)[:, None] if target == "numpy" else
              dlx.convert(module.weight.detach()[:, None], to=target))
        module.half()
    """,
    "swap_tensors": """
        t = source()
        watch(dlx.convert(t, to=target))
        other = torch.zeros(1)
        torch.utils.swap_tensors(t, other)
        del other
    """,
    "squeeze_, transpose_, unsqueeze_, as_strided_": """
        t = source()
        watch(dlx.convert(t, to=target))
        t.squeeze_().transpose_(0, 1)
        for _ in range(20):
            t.unsqueeze_(0)
        t.as_strided_((1,), (1,))
    """,
    "del": "t = source(); watch(dlx.convert(t, to=target)); del t",
    "subclass set_": """
        class Mine(torch.Tensor):
            pass
        t = torch.Tensor._make_subclass(Mine, source())
        watch(dlx.convert(t, to=target))
        t.set_()
    """,
    "view and base": "t = source(); watch(dlx.convert(t[:, :, :], to=target)); t.set_(); del t",
    "raw capsule": """
        t = source()
        watch(dlx.convert(t, to="dlx").__dlpack__(max_version=(1, 0)))
        t.set_()
    """,
    "resize_": """
        t = source()
        watch(dlx.convert(t, to=target))
        refused(lambda: t[1:].resize_(N + 1))
        refused(lambda: t.untyped_storage().resize_(0))
        refused(lambda: t.resize_(2 * N))
        del t
    """,
}

FORKS = """
import os
import traceback

for name, code in actions.items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for target in ("numpy", "dlx"):
                exec(code)
                check()
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(status)
    print(f"== {name}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
"""


@pytest.fixture(scope="module")
def outcomes():
    """What became of every action, each in a process of its own; torch is imported once for all of them."""
    pytest.importorskip("numpy")
    pytest.importorskip("torch")
    code = f"{PRELUDE}\nactions = { {name: textwrap.dedent(code) for name, code in ACTIONS.items()}!r}\n{FORKS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("action", ACTIONS)
def test_results_survive(outcomes, action):
    """After the action on its source a result has its values, shape and strides, whatever memory is used next."""
    assert f"== {action}: 0\n" in outcomes, outcomes


def test_these_tests_can_fail(np, torch):
    """A capsule of torch holds the tensor only: np.from_dlpack(t) loses its memory at t.set_(), dlx does not."""
    from torch.multiprocessing.reductions import StorageWeakRef

    def lost(convert):
        tensor = torch.ones(1000)
        storage = StorageWeakRef(tensor.untyped_storage())
        result = convert(tensor)
        tensor.set_()
        return storage.expired(), result  # nobody reads the result

    assert lost(np.from_dlpack)[0]
    for target in ("numpy", "dlx"):
        assert not lost(lambda tensor: dlx.convert(tensor, to=target))[0]  # noqa: B023


# ---- what pinning costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["numpy", "dlx"])
def test_the_storage_goes_with_the_last_result(np, torch, target):
    """The pin ends with the last result: nothing is kept for longer."""
    from torch.multiprocessing.reductions import StorageWeakRef

    tensor = torch.ones(1000)
    storage = StorageWeakRef(tensor.untyped_storage())
    first, second = dlx.convert(tensor, to=target), dlx.convert(tensor[5:], to=target)
    del tensor, first
    assert not storage.expired()
    del second
    assert storage.expired()


def test_a_copy_pins_nothing(np, torch):
    """A copy leaves nothing behind: the source may go, or be resized as before."""
    from torch.multiprocessing.reductions import StorageWeakRef

    tensor = torch.ones(1000)
    result = dlx.convert(tensor, to="numpy", copy=True)
    tensor.resize_(2000)
    storage = StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert storage.expired() and result.sum() == 1000


@pytest.mark.parametrize("options", [{}, {"copy": True}, {"copy": False}])
def test_a_refusal_pins_nothing(np, torch, options):
    """A conversion that is refused leaves its source resizable."""
    tensor = torch.ones(1000, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(errors.DTypeError):
        dlx.convert(tensor, to="numpy", **options)
    tensor.untyped_storage().resize_(2000)


@pytest.mark.parametrize("target", ["numpy", "dlx"])
def test_looking_pins_nothing(np, torch, target):
    """Both plan and describe leave their source resizable."""
    tensor = torch.ones(1000)
    assert dlx.plan(tensor, to=target).outcome == "shared" and dlx.describe(tensor).nbytes == 4000
    tensor.resize_(2000)


def test_metadata_is_a_snapshot(np, torch):
    """Shape and strides of a dlx.Tensor are its own: in-place changes of the source's metadata do not show."""
    tensor = torch.arange(6.0).reshape(2, 1, 3)
    result = dlx.convert(tensor, to="dlx")
    tensor.squeeze_().transpose_(0, 1)
    for _ in range(30):
        tensor.unsqueeze_(0)
    assert (result.shape, result.strides) == ((2, 1, 3), (3, 3, 1))
    assert dlx.convert(result, to="numpy").tolist() == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]]
