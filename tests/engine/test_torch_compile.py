"""`dlx.convert` in functions that torch.compile traces: in the graph where a tensor stays one, else a graph break."""

import sys
import warnings

import pytest

import dlx


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


@pytest.mark.parametrize("kind", [*OUT_OF_A_GRAPH, *ANOTHER_FUNCTION])
def test_what_leaves_the_graph_says_so(np, torch, kind):
    """With ``fullgraph=True``, in a sentence of dlx."""
    function, x = (OUT_OF_A_GRAPH | ANOTHER_FUNCTION)[kind], torch.arange(3.0)
    torch._dynamo.reset()
    said = r"dlx\.convert is traced where a torch tensor stays one"
    if kind in ANOTHER_FUNCTION:
        said = rf"dlx\.{kind} is not traced: it is about memory that leaves the graph"
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
