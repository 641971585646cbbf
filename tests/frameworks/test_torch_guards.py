"""torch's guards asked in C: they answer what torch says, are used only where they do, and can be done without."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from agreement import agree, emptied

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry.registry import registry

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")


@pytest.fixture
def guards(torch):
    """The compiled guards, with torch's functions found."""
    module = pytest.importorskip("_dlx_torch")
    if module.guard_function() is None:
        pytest.skip("this torch lacks a function that the guards call")
    return module


@pytest.fixture
def adapter(torch):
    """Torch's adapter; what it remembers of its guards, and every route, is forgotten before and after."""
    found = registry.target("torch").adapter

    def forget():
        found.fast_path.guard_function.cache_clear()
        native.routes_clear()

    forget()
    yield found
    forget()


def tensors(torch):
    """Tensors of every kind that the guards are about, and plain ones."""
    base = torch.arange(24.0).reshape(2, 3, 4)
    grad = torch.ones(3, requires_grad=True)
    conj = torch.ones(2, 2, dtype=torch.complex64).conj()
    plain = [base, base[1:], base[..., ::2], base.mT, base[0, 0, 0], torch.empty(0, 3), torch.ones(3, dtype=torch.int8)]
    return [*plain, grad, grad * 2, grad.detach(), torch.nn.Parameter(base), conj, conj.imag, conj.real, conj.T]


@pytest.mark.torch("2.10")  # older ones keep a tensor elsewhere
def test_answers_are_those_of_torch(torch, guards):
    """Gradient, neg bit, conj bit, storage bytes and offset, for every kind of tensor."""
    for tensor in tensors(torch):
        assert guards.handle(tensor) == tensor._cdata
        bits = (tensor.requires_grad, tensor.is_neg(), tensor.is_conj())
        storage = tensor.untyped_storage().nbytes(), tensor.storage_offset()
        assert guards.answers(tensor) == (*bits, *storage)


@pytest.mark.torch("2.10")  # older ones keep a tensor elsewhere
def test_they_are_used(torch, guards, adapter):
    """What answers rightly is used: torch's own methods are left to Python."""
    function, answered = adapter.fast_path.guard_function()
    assert "dlx_guard_function" in repr(function)
    assert answered == {"requires_grad", "is_neg", "is_conj", dlx.adapter.OWNER_BOUNDS}


@pytest.mark.parametrize("wrong", ["handle", "answers"])
def test_a_wrong_answer_is_noticed(torch, guards, adapter, monkeypatch, wrong):
    """Guards that read something else than torch says, in any one point, are not used."""
    real = getattr(guards, wrong)
    spoilt = {
        "handle": lambda tensor: real(tensor) + 16,
        "answers": lambda tensor: (*real(tensor)[:1], not real(tensor)[1], *real(tensor)[2:]),
    }
    monkeypatch.setattr(guards, wrong, spoilt[wrong])
    assert adapter.fast_path.guard_function() is None


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("to", ["numpy", "dlx"])
def test_with_and_without_them_the_fast_path_is_right(np, torch, adapter, monkeypatch, to, in_c):
    """Asked in C or through Python, the fast path gives what the slow path gives, and refuses what it refuses."""
    if not in_c:
        monkeypatch.setattr(adapter, "fast_path", replace(adapter.fast_path, guard_function=None))
    for i in range(len(tensors(torch))):
        agree(lambda i=i: tensors(torch)[i], to)
    for nbytes, frozen in [(0, False), (8, False), (0, True), (8, True)]:
        assert agree(lambda n=nbytes, f=frozen: emptied(torch, n, f), to)[0] is errors.LayoutError


@pytest.mark.torch("2.10")  # older ones keep a tensor elsewhere
def test_first_learnt_inside_a_transform(np, torch, guards, adapter):
    """A route that is learnt while something transforms has its guards in C all the same."""
    outside = torch.ones(3)
    torch.func.vmap(lambda t: (dlx.convert(outside, to="numpy"), t)[1])(torch.ones(2, 3))
    learnt = adapter.fast_path.guard_function
    assert learnt.cache_info().currsize == 1 and learnt() is not None


def test_nothing_leaks_where_they_refuse(np, torch, guards, adapter):
    """A tensor that reaches beyond its storage, found after it was borrowed, leaves nothing behind."""
    cut, before = emptied(torch, 8, True), native.live()
    for _ in range(100):
        with pytest.raises(errors.LayoutError):
            dlx.convert(cut, to="numpy")
    gc.collect()
    assert native.live() == before
