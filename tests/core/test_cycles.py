"""Reference cycles through dlx.Tensor are collected if the tensor alone keeps its owner alive."""

from __future__ import annotations

import gc
import weakref

import pytest

import dlx
from dlx._core import native

CPU = (1, 0)


class Owner:
    """Keeps memory alive, and all its attributes."""

    def __init__(self):
        self.memory = bytearray(64)

    @property
    def address(self):
        return native.buffer_address(memoryview(self.memory))


def over(owner):
    """Return a tensor over an owner's memory."""
    return native.tensor_new(owner.address, (4,), None, (2, 32, 1), CPU, 0, owner)


def _plain(owner):
    owner.tensor = over(owner)


def _by_pointer(owner):
    owner.tensor = dlx.from_pointer(owner.address, (4,), "float32", owner=owner)


def _two(owner):
    owner.tensors = {"a": over(owner), "b": [over(owner)]}


def _through_another(owner):
    other = Owner()
    owner.tensor, other.tensor = over(other), over(owner)


def _used_before(owner):
    owner.tensor = over(owner)
    assert dlx.convert(owner.tensor, to="dlx") is owner.tensor
    memoryview(owner.tensor).release()
    owner.tensor.__dlpack__(max_version=(1, 0))


def _buffer(owner):
    class Bytes(bytearray):
        pass

    owner.bytes = Bytes(64)
    owner.bytes.owner = owner
    owner.bytes.tensor = dlx.convert(owner.bytes, to="dlx")


@pytest.mark.parametrize("tie", [_plain, _by_pointer, _two, _through_another, _used_before, _buffer])
def test_an_owner_that_keeps_its_own_tensor_is_collected(tie):
    """An unreachable cycle and its memory are collected; repeated, since tensor structs are reused."""
    gc.collect()
    live = native.live()
    for _ in range(40):
        owner = Owner()
        tie(owner)
        gone = weakref.ref(owner)
        del owner
        gc.collect()
        assert gone() is None and native.live() == live


def test_what_is_reached_is_kept():
    """A reachable tensor keeps its owner alive; a result keeps the owner alive without the tensor."""
    owner = Owner()
    owner.tensor = over(owner)
    gone, tensor = weakref.ref(owner), owner.tensor
    del owner
    gc.collect()
    assert gone() is not None and tensor.shape == (4,)
    held = memoryview(tensor)
    del tensor
    gc.collect()
    assert gone() is not None and held[0] == 0.0
    del held
    gc.collect()
    assert gone() is None


def test_a_capsule_keeps_a_cycle_until_it_is_dropped():
    """The collector cannot see other holders of the memory, and keeps the cycle."""
    owner = Owner()
    owner.tensor = over(owner)
    capsule, gone = owner.tensor.__dlpack__(), weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is not None
    assert native.capsule_claim(capsule).shape == (4,)
    del capsule
    gc.collect()
    assert gone() is None


def test_a_finalizer_may_bring_a_tensor_back():
    """A finalizer may resurrect the tensor, which stays valid, and is collected when it is dropped again."""
    kept = []

    class Back(Owner):
        def __del__(self):
            kept.append(self.tensor)

    live, owner = native.live(), Back()
    owner.tensor = over(owner)
    del owner
    gc.collect()
    assert kept[0].shape == (4,) and memoryview(kept[0])[0] == 0.0
    kept.clear()
    gc.collect()
    assert native.live() == live


def test_only_owners_that_the_collector_knows_cost_it_anything(np):
    """The collector does not track a tensor over memory that cannot be in a cycle."""
    assert not gc.is_tracked(dlx.convert(np.ones(3), to="dlx"))
    assert not gc.is_tracked(dlx.empty((3,), "float32", "cpu"))
    assert gc.is_tracked(over(Owner()))
