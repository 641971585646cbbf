"""Torch's autograd detects writes of other frameworks to a tensor: `writes=`, and `dlx.borrow`."""

# ruff: noqa: B008, D103

import asyncio
import dataclasses

import pytest

import dlx


def fill(a):
    a.fill(100)


def yielding(a):
    a.fill(100)
    yield 1


async def waiting(a):
    a.fill(100)


async def streaming(a):
    a.fill(100)
    yield 1


def failing(a):
    a.fill(100)
    raise KeyError


class Owner:
    @dlx.using("numpy", writes="a")
    def method(self, a):
        a.fill(100)


async def drained(function, x):
    return [each async for each in function(x)]


def suppressed(function, x):
    with pytest.raises(KeyError):
        function(x)


def borrowed(x):
    with dlx.borrow(x) as tensor:
        dlx.ffi.cast("float*", tensor.data)[0] = 100


using = dlx.using("numpy", writes="a")
WRITERS = {
    "numpy": using(fill),
    "keyword": lambda x, f=using(fill): f(a=x),
    "rest": lambda x, f=using(lambda *a: a[1].fill(100)): f(1, x),
    "options": lambda x, f=using(lambda **a: a["b"].fill(100)): f(b=x),
    "options beside the same name": lambda x, f=using(lambda b, /, **a: a["b"].fill(100)): f(1, b=x),
    "list in options": lambda x, f=using(lambda b=None, **a: a["c"][0].fill(100)): f(b=1, c=[x]),
    "by number": dlx.using("numpy", writes=0)(lambda *a: a[0].fill(100)),
    "list": lambda x, f=using(lambda a: a[0].fill(100)): f([x]),
    "dict": lambda x, f=using(lambda a: a["b"][0].fill(100)): f({"b": (x,)}),
    "lazy": dlx.using("numpy", writes="a", lazy=True)(fill),
    "method": lambda x, owner=Owner(): owner.method(x),
    "generator": lambda x, f=using(yielding): list(f(x)),
    "unfinished generator": lambda x, f=using(yielding): next(f(x)),
    "coroutine": lambda x, f=using(waiting): asyncio.run(f(x)),
    "asynchronous generator": lambda x, f=using(streaming): asyncio.run(drained(f, x)),
    "failing": lambda x, f=using(failing): suppressed(f, x),
    "same framework": dlx.using("torch", writes="a")(lambda a: a.detach().numpy().fill(100)),
    "dlx": dlx.using("dlx", writes="a")(lambda a: dlx.convert(a, to="numpy").fill(100)),
    "borrow": borrowed,
}
READERS = {
    "not declared": dlx.using("numpy")(lambda a: None),
    "another parameter": dlx.using("numpy", writes="b")(lambda a, b=None: None),
    "borrow": lambda x: dlx.borrow(x, readonly=True).__enter__() and None,
    "convert": lambda x: dlx.convert(x, to="numpy") is None,
    "plan": lambda x: dlx.plan(x, to="numpy") is None,
}


def saved(torch, x):
    weight = torch.ones(3, requires_grad=True)
    return weight, (weight * x).sum()


@pytest.mark.parametrize("kind", WRITERS)
def test_gradients_that_need_old_values_are_refused(np, torch, kind):
    """It holds for the first call and for later ones on the fast path."""
    for _ in range(3):
        x = torch.ones(3)
        _, loss = saved(torch, x)
        WRITERS[kind](x)
        assert x[0] == 100
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("kind", READERS)
def test_what_is_only_read_is_not_marked(np, torch, kind):
    """Gradients still work."""
    for _ in range(3):
        x = torch.ones(3)
        weight, loss = saved(torch, x)
        READERS[kind](x)
        loss.backward()
        assert weight.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_read_only_options_are_refused(np, torch, target):
    """`writes=` may name the parameter that collects options."""
    function = dlx.using(target, writes="options")(lambda a=None, **options: None)
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    for _ in range(3):
        function(a=frozen)
        for passed in (frozen, b"abc", [frozen]):
            with pytest.raises(dlx.errors.ReadOnlyError):
                function(b=passed)


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_names_of_options_decide_what_is_written(np, torch, target):
    """Cached results of one call are not used for a call with other names."""
    function = dlx.using(target, writes="b")(lambda a=None, b=None: None)
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    for _ in range(3):
        x, y = torch.ones(3), torch.ones(3)
        function(a=x)
        function(b=y)
        assert (x._version, y._version) == (0, 1)
        function(a=x, b=y)
        function(b=x, a=y)
        assert (x._version, y._version) == (1, 2)
        function(a=frozen)
        with pytest.raises(dlx.errors.ReadOnlyError):
            function(b=frozen)


def test_options_that_had_to_be_copied_are_written_back(np, torch):
    """They are treated like named parameters, even if torch counts no write."""
    a = np.zeros(3, np.float32)
    dlx.using("torch", writes="options")(lambda **options: options["b"].numpy().fill(100) and None)(b=a[::-1])
    assert a.tolist() == [100.0] * 3


@pytest.mark.parametrize("writes", [1, -1, [0, 7], 0.5, b"a", [None], "b"], ids=repr)
def test_what_is_no_parameter_is_refused(writes):
    """Invalid names and numbers of arguments are refused."""
    with pytest.raises(TypeError, match=r"has no parameter .* \(writes=\)|not iterable"):
        dlx.using("dlx", writes=writes)(lambda a: None)
    if writes in (1, [0, 7]):
        dlx.using("dlx", writes=writes)(lambda *a: None)


def test_only_the_declared_argument_is_marked(np, torch):
    """Tested with two tensors of one type, the same tensor twice, and two tensors again."""
    function = dlx.using("numpy", writes="a")(lambda a, b: a.fill(100))
    for _ in range(3):
        x, y = torch.ones(3), torch.ones(3)
        function(x, y)
        assert (x._version, y._version) == (1, 0)
        function(x, x)
        assert x._version == 2


def test_tensors_of_inference_mode_count_no_writes(np, torch):
    """They are still written."""
    with torch.inference_mode():
        x = torch.zeros(3)
    WRITERS["numpy"](x)
    borrowed(x)
    assert x.tolist() == [100.0] * 3


def test_any_adapter_may_keep_account(np, torch, monkeypatch):
    """`WriteTracking.mark_written` of any adapter is called; its errors name the adapter."""
    from dlx._registry.registry import registry

    adapter = registry.owner(np.ndarray)
    marked = []
    tracking = dataclasses.replace(adapter.writes, mark_written=marked.append)
    monkeypatch.setattr(adapter, "writes", tracking)
    x = np.ones(3, np.float32)
    function = dlx.using("torch", writes="a")(lambda a: None)
    for _ in range(2):
        function(x)
    borrowed(x)
    assert len(marked) == 3 and all(each is x for each in marked)

    def refuse(obj):
        raise ValueError("no account")

    monkeypatch.setattr(adapter, "writes", dataclasses.replace(tracking, mark_written=refuse))
    with pytest.raises(dlx.errors.DlxError, match=r"numpy failed.*no account"):
        borrowed(x)


def test_borrow_marks_the_array_that_an_object_stands_for(torch, monkeypatch):
    """For a DataArray of xarray, that is its data."""
    from dlx._registry import lookup
    from dlx.adapter import Container

    class Holder:
        pass

    tensor = torch.ones(3)
    wrapper = Container(kind="wrapper", flatten=lambda obj: (None, [tensor]))
    monkeypatch.setitem(lookup._EXACT, Holder, lookup.Kind(None, wrapper, "container"))
    before = tensor._version
    with dlx.borrow(Holder()):
        pass
    assert tensor._version == before + 1
