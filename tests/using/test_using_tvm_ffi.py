"""`dlx.using` with functions of tvm-ffi: their containers return the caller's arrays, eagerly and lazily."""

from __future__ import annotations

import gc
import weakref

import pytest

import dlx
from dlx._core import native
from dlx._using import plan, wrappers

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
tvm_ffi = pytest.importorskip("tvm_ffi")

CALLERS = {
    "torch": lambda n: torch.full((4,), float(n)),
    "numpy": lambda n: np.full(4, n, dtype="f4"),
    "jax": lambda n: pytest.importorskip("jax.numpy").full(4, n, dtype="float32"),
    "dlx": lambda n: dlx.convert(np.full(4, n, dtype="f4"), to="dlx"),
}


@pytest.fixture
def fast(monkeypatch):
    """Fail if a call of known types is made in Python."""

    def refuse(*args):
        raise AssertionError("the complete way was taken")

    def use():
        monkeypatch.setattr(wrappers.calls, "Invocation", refuse)
        monkeypatch.setattr(plan.outputs, "Outputs", refuse)

    return use


def echo(**options):
    """Return a decorated tvm-ffi function that returns its argument."""
    return dlx.using("tvm_ffi", **options)(tvm_ffi.get_global_func("testing.echo"))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("n", [1, 3, 40])
def test_elements_of_a_container_are_the_callers_own(fast, caller, n, lazy):
    """Elements are recognized although each access creates a new wrapper, also repeated ones."""
    function, arrays = echo(lazy=lazy), [CALLERS[caller](i) for i in range(n)]
    arrays += arrays[:1]
    function([CALLERS[caller](0)])
    list(function(arrays))
    if caller != "jax":  # its arrays are read-only: tvm-ffi gets copies
        fast()
    result = function(arrays)
    assert len(result) == len(arrays) and (lazy or type(result) is list)
    assert all(new is own for new, own in zip(result, arrays, strict=True))
    if lazy and n:
        assert result[-1] is arrays[-1] and result[0] is arrays[0] and result[:2][0] is arrays[0]


@pytest.mark.parametrize("lazy", [False, True])
def test_new_elements_are_converted(fast, lazy):
    """Each new element is converted once, next to passed ones."""
    new = tvm_ffi.from_dlpack(torch.full((2,), 7.0))
    made = dlx.using("tvm_ffi", lazy=lazy)(lambda x: tvm_ffi.Array([new, x[0], new, 3, "text", x[0]]))
    own = torch.ones(2)
    made([own])
    fast()
    result = made([own])
    assert result[1] is own and result[5] is own and list(result)[3:5] == [3, "text"]
    assert type(result[0]) is torch.Tensor and result[0].tolist() == [7, 7] and result[2] is result[0]


@pytest.mark.parametrize("lazy", [False, True])
def test_mappings_and_nested_containers(lazy):
    """Containers of tvm-ffi and Python are supported."""
    a, b = torch.ones(2), torch.zeros(2)
    result = echo(lazy=lazy)({"a": a, "deep": [b, {"k": a}], "n": 1})
    assert result["a"] is a and result["deep"][0] is b and result["deep"][1]["k"] is a and result["n"] == 1
    wrapped = dlx.using("tvm_ffi", lazy=lazy)(lambda x: [tvm_ffi.Array([x[0]]), {"k": tvm_ffi.Map({"m": x[1]})}])
    result = wrapped([a, b])
    assert result[0][0].tolist() == [1, 1] and result[1]["k"]["m"].tolist() == [0, 0]
    assert lazy or (result[0][0] is a and result[1]["k"]["m"] is b)  # a list may be given other containers


def test_a_single_array_that_is_wrapped_anew_is_the_callers_own(fast):
    """Its wrapper is new, the tensor is the same."""
    own, function = torch.ones(2), echo()
    function(own)
    fast()
    assert function(own) is own


def test_a_copy_that_comes_back_is_the_callers_own():
    """It also holds for copies of read-only arrays, and in lazy views of calls in Python."""
    own = np.ones(2)
    own.flags.writeable = False
    assert echo()([own])[0] is own


def test_a_view_does_not_keep_the_callers_arrays():
    """An argument that the function dropped is freed with its caller's reference."""
    first = dlx.using("tvm_ffi", lazy=True)(lambda x: tvm_ffi.Array([x[0]]))
    for make in (CALLERS["torch"], CALLERS["numpy"]):
        one, other = make(1), make(2)
        first([one, other])
        live = native.live()
        result = first([one, other])
        gone = weakref.ref(other)
        del other
        gc.collect()
        assert gone() is None and result[0] is one
        del result
        gc.collect()
        assert native.live() <= live


def test_an_array_of_the_callers_that_is_gone_is_converted_again():
    """The container keeps the memory alive."""
    function, own = echo(lazy=True), torch.full((2,), 5.0)
    function([own])
    result = function([own])
    gone = weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None and result[0].tolist() == [5, 5] and result[0] is result[0]


def test_a_container_that_changes_is_read_again():
    """A later element of a list may have the address of a freed argument."""
    kept = []

    def fill(x):
        kept.append(tvm_ffi.List([tvm_ffi.from_dlpack(torch.zeros(2))]))
        return kept[-1]

    function, own = dlx.using("tvm_ffi", lazy=True)(fill), torch.ones(2)
    for n in range(100):
        view = function([own])
        kept[-1][0] = tvm_ffi.from_dlpack(torch.full((2,), float(n)))
        assert view[0] is not own and view[0].tolist() == [n, n]


def test_returns_names_another_framework():
    """Arguments are then converted, too."""
    own = torch.ones(2)
    for lazy in (False, True):
        function = echo(lazy=lazy, returns="numpy")
        for _ in range(2):
            (result,) = function([own])
            assert type(result) is np.ndarray and result.tolist() == [1, 1]
        assert echo(lazy=lazy, returns="torch")([own])[0] is own
