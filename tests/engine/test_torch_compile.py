"""`dlx.convert` under torch.compile: part of the graph if a tensor stays a tensor, otherwise a graph break."""

# ruff: noqa: B008, D103, RUF015

import asyncio
import sys
import warnings

import pytest

import dlx
from dlx._using import wrappers

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about the code that it makes


@pytest.fixture(autouse=True)
def forget():
    """Reset torch.compile: compiled code keeps the objects in its guards alive."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()


def in_a_graph(x):
    """Every conversion that is traced."""
    x = dlx.convert(x.sin(), to="torch") + dlx.convert(x.sin(), "pytorch")
    x = dlx.convert(x, to=sys.modules["torch"]) + dlx.convert(x, to=type(x), copy=False)
    return dlx.convert(x, to="torch", copy=True).mul_(2) + dlx.convert(x, like=x)


OUT_OF_A_GRAPH = {
    "numpy": lambda x: dlx.convert(x.sin(), to="numpy") * 2,
    "from numpy": lambda x: dlx.convert(x.sin().numpy(), to="torch") * 2,
    "tree": lambda x: dlx.convert([x.sin()], to="torch")[0] * 2,
    "option": lambda x: dlx.convert(x.sin(), to="torch", device="cpu") * 2,
    "like numpy": lambda x: dlx.convert(x.sin(), like=x.numpy()) * 2,
}
ANOTHER_FUNCTION = {
    "from_dlpack": lambda x: dlx.convert(dlx.from_dlpack(x.sin()), to="torch") * 2,
    "empty": lambda x: dlx.empty((3,), "float32", "cpu") and x * 2,
    "plan": lambda x: x * 2 if dlx.plan(x, to="numpy") else x,
    "stack": lambda x: dlx.stack([x, x], to="torch") * 2,
}


def doubled(a):
    return a * 2


def doubling(a):
    yield a * 2


async def doubling_later(a):
    return a * 2


async def doubling_each(a):
    yield a * 2


def step(coroutine):
    """Run a coroutine that never waits, in a frame of a plain function."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value


class Layer:
    @dlx.using("numpy")
    def numpy(self, a):
        return a * 2

    @dlx.using("jax", grad=True)
    def jax(self, a):
        return a * 2

    @staticmethod
    @dlx.using("numpy")
    def static(a):
        return a * 2


def decorated(**options):
    return {
        "function": dlx.using("numpy", **options)(doubled),
        "generator": lambda x, f=dlx.using("numpy", **options)(doubling): next(iter(f(x))),
        "coroutine": lambda x, f=dlx.using("numpy", **options)(doubling_later): asyncio.run(f(x)),
        "asynchronous generator": lambda x, f=dlx.using("numpy", **options)(doubling_each): step(f(x).__anext__()),
    }


DECORATED = {
    **decorated(),
    **{f"lazy {name}": function for name, function in decorated(lazy=True).items()},
    "method": lambda x, layer=Layer(): layer.numpy(x),
    "static method": lambda x: Layer.static(x),
    "list": lambda x, f=dlx.using("numpy")(lambda a: [each * 2 for each in a]): f([x])[0],
    "writes": lambda x, f=dlx.using("numpy", writes="a")(lambda a: a.__imul__(2)): f(x.clone()),
    "torch": dlx.using("torch")(doubled),
}
BRIDGES = {
    "jax": dlx.using("jax", grad=True)(doubled),
    "torch": dlx.using("torch", grad=True)(doubled),
    "method": lambda x, layer=Layer(): layer.jax(x),
    "tree": lambda x, f=dlx.using("jax", grad=True)(lambda tree: {"b": tree["a"] * 2}): f({"a": x})["b"],
    "made inside": lambda x: dlx.using("jax", grad=True)(doubled)(x),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind.startswith("lazy") else []) for kind in DECORATED]
)
def test_what_using_returns_ends_the_graph(np, torch, kind):
    """The values are right, on the first call and on later ones, and for another shape."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: DECORATED[kind](x + 1) - 1, backend="eager")
    for n in (3, 3, 4):
        assert compiled(torch.arange(float(n))).tolist() == [2.0 * i + 1 for i in range(n)]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in DECORATED if kind != "torch"])
def test_what_using_returns_says_that_it_ends_the_graph(np, torch, kind, is_first):
    """With ``fullgraph=True``, also if the call is the first of all; a function of torch itself is traced."""
    torch._dynamo.reset()
    if is_first:
        wrappers.calls.__dict__.pop("Invocation", None)
        wrappers.gradients.__dict__.pop("call_traced", None)
    else:
        assert wrappers.calls.Invocation
        assert wrappers.gradients.call_traced
    message = r"cannot trace (what dlx\.using returns|the first use of a part of dlx): it uses memory outside of the"
    with pytest.raises(Exception, match=message) as caught:
        torch.compile(lambda x: DECORATED[kind](x + 1), fullgraph=True, backend="eager")(torch.ones(3))
    assert type(caught.value).__name__ == "Unsupported"


@pytest.mark.parametrize("value", ["tensor", "list"])
@pytest.mark.parametrize("uses", ["nothing", "plan", "all"])
def test_the_first_call_of_a_function_of_torch_ends_the_graph(torch, value, uses):
    """With ``fullgraph=True``: whatever the call has to load or plan first, the error says what ends the graph."""
    torch._dynamo.reset()
    for late in (wrappers.calls, wrappers.gradients):
        vars(late).pop("Invocation", None)
        vars(late).pop("call_traced", None)
    function, pack = dlx.using("torch")(lambda x: x[0] * 2), {"tensor": torch.clone, "list": lambda x: [x]}[value]
    if uses != "nothing":
        function(torch.ones(3))
    if uses == "all":
        function([torch.ones(3)])
    compiled = torch.compile(lambda x: function(pack(x)), fullgraph=True, backend="eager")
    if value == "tensor" and uses != "nothing":
        assert compiled(torch.ones(3)).item() == 2
    else:
        message = r"cannot trace (the first .* of|what dlx\.using returns)"
        with pytest.raises(Exception, match=message) as caught:
            compiled(torch.ones(3))
        assert type(caught.value).__name__ == "Unsupported"
    free = torch.compile(lambda x: function(pack(x)), backend="eager")
    assert free(torch.ones(3)).tolist() == ([2.0] * 3 if value == "list" else 2.0)


def test_a_function_of_torch_stays_in_the_graph(torch):
    """`using("torch")` does nothing to tensors of torch, once it has seen their types."""
    function, x = dlx.using("torch")(doubled), torch.ones(3, requires_grad=True)
    function(x)
    torch._dynamo.reset()
    result = torch.compile(lambda x: function(x + 1), fullgraph=True, backend="eager")(x)
    assert result.tolist() == [4.0] * 3
    result.sum().backward()
    assert x.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("returns", ["numpy", "torch", None])
def test_results_for_another_framework_end_the_graph(np, torch, returns):
    """They are converted: `returns=` also holds in compiled functions."""
    function, expected = (
        dlx.using("torch", returns=returns)(doubled),
        np.ndarray if returns == "numpy" else torch.Tensor,
    )
    function(torch.ones(3))
    torch._dynamo.reset()
    result = torch.compile(lambda x: function(x + 1), fullgraph=returns != "numpy", backend="eager")(torch.ones(3))
    assert type(result) is expected and result.tolist() == [4.0] * 3


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", BRIDGES)
@pytest.mark.parametrize("recorded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_pass_through_a_compiled_function(torch, kind, recorded):
    """A gradient bridge gives right values and right gradients, also when it is compiled before its first call."""
    pytest.importorskip("jax")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: BRIDGES[kind](x * x) + 1, backend="aot_eager")
    for n in (3, 3, 4):
        x = torch.arange(float(n), requires_grad=recorded)
        result = compiled(x)
        assert result.tolist() == [2.0 * i * i + 1 for i in range(n)]
        if recorded:
            (gradient,) = torch.autograd.grad(result.sum(), x)
            assert gradient.tolist() == [4.0 * i for i in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param("torch", marks=pytest.mark.slow), "dlx"])
def test_a_bridge_may_be_compiled_before_it_is_called(python, first, torch):
    """Whichever of the two is imported first."""
    python(
        f"""
        import {first}
        import dlx, jax.numpy as jnp
        function = dlx.using("jax", grad=True)(lambda x: jnp.sin(x))
        import torch
        x = torch.arange(3.0, requires_grad=True)
        result = torch.compile(lambda x: function(x * 2) + 1, backend="eager")(x)
        assert torch.allclose(result, (x * 2).sin() + 1)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.allclose(gradient, 2 * (x * 2).cos())
        """
    )


READ = {
    "list view": lambda a: (lambda view: lambda x: x * view[0])(dlx.convert([a], to="torch", lazy=True)),
    "dict view": lambda a: (lambda view: lambda x: x * view["a"])(dlx.convert({"a": a}, to="torch", lazy=True)),
    "iteration": lambda a: (lambda view: lambda x: [x * each for each in view][0])(
        dlx.convert([a], to="torch", lazy=True)
    ),
    "materialize": lambda a: (lambda view: lambda x: x * view.materialize()[0])(
        dlx.convert([a], to="torch", lazy=True)
    ),
    "attach": lambda a: (lambda handle: lambda x: x * dlx.attach(handle, to="torch")["a"])(dlx.share({"a": a})),
    "stack": lambda a: lambda x: x * dlx.stack([a, a], to="torch")[0],
    "borrow": lambda a: lambda x: borrowing(x),
    "describe": lambda a: lambda x: x * 3 if dlx.describe(x).shape == (3,) else x,
    "shares_memory": lambda a: lambda x: x * 3 if dlx.shares_memory(x, x) else x,
}


def borrowing(x):
    with dlx.borrow(x) as tensor:
        return x * 3 * tensor.ndim


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", READ)
def test_other_functions_and_views_end_the_graph(np, torch, kind):
    """They return correct values; with ``fullgraph=True`` they raise."""
    function, x = READ[kind](np.full(3, 3, np.float32)), torch.arange(3.0)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x + 1) - 1, backend="eager")
    assert [compiled(x).tolist() for _ in range(2)] == [[2.0, 5.0, 8.0]] * 2
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"cannot trace (dlx\.\w+|a lazy view)|View") as caught:
        torch.compile(function, fullgraph=True, backend="eager")(x)
    assert type(caught.value).__name__ == "Unsupported"


def test_a_tensor_stays_in_the_graph(torch):
    """`torch.compile(fullgraph=True)` traces conversions from torch to torch: one graph, gradients included."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.arange(3.0, requires_grad=True)
    torch._dynamo.reset()
    result = torch.compile(in_a_graph, fullgraph=True, backend=backend)(x)
    assert torch.equal(result, in_a_graph(x)) and len(graphs) == 1
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, 12 * x.detach().cos())


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [*OUT_OF_A_GRAPH, *ANOTHER_FUNCTION])
def test_what_leaves_the_graph_says_so(np, torch, kind):
    """With ``fullgraph=True``, dlx raises an error with a reason."""
    function, x = (OUT_OF_A_GRAPH | ANOTHER_FUNCTION)[kind], torch.arange(3.0)
    torch._dynamo.reset()
    said = r"cannot trace dlx\.convert: torch\.compile supports it only from torch to torch"
    if kind in ANOTHER_FUNCTION:
        said = rf"cannot trace dlx\.{kind}: it uses memory outside of the graph"
    with pytest.raises(Exception, match=said) as caught:
        torch.compile(function, fullgraph=True, backend="eager")(x)
    assert type(caught.value).__name__ == "Unsupported"


@pytest.mark.slow
def test_compiled_functions(np, torch):
    """Under torch.compile a conversion is a graph break with the right result, for either direction."""

    def function(x):
        array = dlx.convert(x * 2, to="numpy", copy=True)
        shared = dlx.convert(x + 1, to="numpy")
        return dlx.convert(array, to="torch") + dlx.convert(dlx.convert(shared, to="dlx"), to="torch")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager")
        for n in (3, 4):
            x = torch.arange(float(n))
            assert compiled(x).tolist() == function(x).tolist() == (x * 3 + 1).tolist()


def test_what_torch_reads_is_no_other_function(np):
    """`__call__` of the type, called from Python, is a call like any other."""
    call = type(dlx.convert).__call__
    x = np.arange(3.0)
    assert call(dlx.convert, x, to="numpy") is x
    with pytest.raises(TypeError, match="Did you mean 'copy'"):
        call(dlx.convert, x, to="numpy", copi=True)
