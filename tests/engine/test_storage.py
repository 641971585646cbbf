"""The storage is pinned: whatever is done to a torch tensor after a conversion, results keep values and layout."""

from __future__ import annotations

import textwrap

import pytest
from support.processes import warm
from support.stress.storage_actions import ACTIONS, FORKS, PRELUDE

import dlx
from dlx import errors

# ---- 40 MB in a separate process, since a broken promise is a crash --------------------------------------------------


@pytest.fixture(scope="module")
def outcomes():
    """Outcomes of all actions, each in a separate process that is forked after the import of torch."""
    pytest.importorskip("numpy")
    pytest.importorskip("torch")
    code = f"{PRELUDE}\nactions = { {name: textwrap.dedent(code) for name, code in ACTIONS.items()}!r}\n{FORKS}"
    done = warm.run(code, timeout=250)
    return done.stdout + done.stderr


@pytest.mark.few(4)
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
        return storage.expired(), result  # the result is not read

    assert lost(np.from_dlpack)[0]
    for target in ("numpy", "dlx"):
        assert not lost(lambda tensor: dlx.convert(tensor, to=target))[0]  # noqa: B023


# ---- the cost of pinning ---------------------------------------------------------------------------------------------


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
    """A dlx.Tensor copies shape and strides: in-place changes of the source's metadata have no effect."""
    tensor = torch.arange(6.0).reshape(2, 1, 3)
    result = dlx.convert(tensor, to="dlx")
    tensor.squeeze_().transpose_(0, 1)
    for _ in range(30):
        tensor.unsqueeze_(0)
    assert (result.shape, result.strides) == ((2, 1, 3), (3, 3, 1))
    assert dlx.convert(result, to="numpy").tolist() == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]]
