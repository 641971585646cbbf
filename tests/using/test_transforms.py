"""Functions of `dlx.using` in programs that torch or jax compiles or transforms, and calls without gradients."""

# ruff: noqa: D103

import pytest
from support.transforms import FUNCTIONS, JAX, TORCH, agree, transform

import dlx

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy
OPERATIONS = pytest.importorskip("dlx_adapters.dlx_torch_graph_operators").OPERATIONS
pytestmark = [pytest.mark.filterwarnings("ignore")]
FEW = ("sin", "product of two")


@pytest.fixture(autouse=True)
def _wide():
    """Enable 64-bit dtypes; compile quickly; release what torch.compile keeps."""
    before = {name: jax.config.values[name] for name in ("jax_enable_x64", "jax_disable_most_optimizations")}
    for name in before:
        jax.config.update(name, True)
    torch._dynamo.reset()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    torch._dynamo.reset()
    OPERATIONS.clear()


def _cells(transforms, quick):
    for function in FUNCTIONS:
        for name in transforms:
            is_quick = (function == "sin" and name in quick) or (function == "product of two" and name == quick[0])
            yield pytest.param(function, name, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("function", "name"), [*_cells(JAX, ("jit grad", "hessian", "linearize", "vmap", "scan", "remat"))]
)
def test_jax_transforms_functions_of_torch(function, name):
    """The values are those of the same function written in jax."""
    assert agree(*transform("jax", function, name))


QUICK = ("compile", "func.grad", "jvp", "vmap", "export", "export, strict", "functional_call", "checkpoint")


@pytest.mark.parametrize(("function", "name"), [*_cells(TORCH, QUICK)])
def test_torch_transforms_functions_of_jax(function, name):
    """The values are those of the same function written in torch; ``fullgraph=True`` finds one graph."""
    assert agree(*transform("torch", function, name))


# ---- functions without gradients ------------------------------------------------------------------------------------


def _counting(calls):
    def function(x):
        calls.append(x.shape)
        return np.sin(x)

    return function


def same(x):
    return x


def test_numpy_in_a_compiled_function_of_torch():
    """It runs once per call, also if its result is unused; differentiating it is refused."""
    calls, x = [], torch.linspace(0.1, 1, 4, dtype=torch.float64)
    call = dlx.using("numpy", result_like=same)(_counting(calls))
    compiled = torch.compile(lambda x: call(x * 2) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), (x * 2).sin() + 1)
    assert calls == [(4,)]
    torch.compile(lambda x: (call(x), x)[1], backend="aot_eager", fullgraph=True)(x)
    assert calls == [(4,)] * 2
    with pytest.warns(UserWarning, match="detach=True"), pytest.raises(Exception, match="nonstrict"):
        torch.compile(lambda x: call(x), backend="aot_eager", fullgraph=True)(x.clone().requires_grad_())
    dropping = dlx.using("numpy", result_like=same, detach=True)(_counting(calls))
    y = torch.compile(lambda x: dropping(x) * x, backend="aot_eager", fullgraph=True)(x.requires_grad_())
    assert torch.allclose(torch.autograd.grad(y.sum(), x)[0], x.detach().sin())


@pytest.mark.parametrize(
    ("function", "like"),
    [
        (lambda x: x.T, lambda x: x.T),
        (lambda x: x[::-1].T, lambda x: x.T),
        (lambda x: np.broadcast_to(x, (2, 2, 3)), lambda x: x.expand(2, 2, 3)),
        (np.asfortranarray, same),
    ],
    ids=["transposed", "flipped", "broadcast", "column-major"],
)
def test_results_of_any_layout_in_a_compiled_function(function, like):
    """The program gets them row-major, as it was compiled."""
    call, x = dlx.using("numpy", result_like=like)(function), torch.arange(6.0).reshape(2, 3)
    compiled = torch.compile(lambda x: call(x * 2).view(-1), backend="aot_eager", fullgraph=True)
    assert compiled(x).tolist() == function(x.numpy() * 2).ravel().tolist()


@pytest.mark.parametrize("grad", [False, True])
def test_results_of_another_dtype_than_the_declared_one_are_refused(grad):
    """Compiled programs would read their bytes as values of the declared dtype."""
    double = (lambda x: x.astype(jnp.float64)) if grad else (lambda x: x.astype("f8"))
    call = dlx.using("jax" if grad else "numpy", grad=grad, result_like=same)(double)
    compiled = torch.compile(lambda x: call(x) * 2, backend="aot_eager", fullgraph=True)
    with pytest.raises(dlx.errors.ConversionError, match=r"float64\], expected \[torch.float32\].*like="):
        compiled(torch.ones(3))


def test_numpy_in_transformed_functions_of_jax():
    """It runs once per call, also if its result is unused, and for each element under `vmap`."""
    calls, x = [], jnp.linspace(0.1, 1, 4)
    call = dlx.using("numpy", result_like=same)(_counting(calls))
    assert np.allclose(jax.jit(lambda x: call(x * 2) + 1)(x), np.sin(x * 2) + 1)
    jax.block_until_ready(jax.jit(lambda x: (call(x), x)[1])(x))
    jax.effects_barrier()
    assert calls == [(4,)] * 2
    assert np.allclose(jax.jit(jax.vmap(call))(x), np.sin(x))
    assert calls[2:] == [()] * 4
    for jit in (jax.jit, same):
        with pytest.raises(dlx.errors.ConversionError, match="detach=True"):
            jax.grad(jit(lambda x: call(x).sum()))(x)
    with pytest.raises(dlx.errors.ConversionError, match="Pass result_like="):
        jax.jit(dlx.using("numpy")(np.sin))(x)
    assert np.allclose(jax.grad(lambda x: (dlx.using("numpy", detach=True)(np.sin)(x) * x).sum())(x), np.sin(x))


@pytest.mark.parametrize("options", [{"writes": "x"}, {"lazy": True}, {"returns": "numpy"}], ids=str)
def test_options_that_need_data_are_refused(options):
    """The error names the option."""
    call = dlx.using("numpy", result_like=same, **options)(same)
    with pytest.raises(dlx.errors.ConversionError, match=f"{next(iter(options))}= needs data"):
        jax.jit(call)(jnp.ones(2))


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [lambda x: jnp.concatenate([jnp.sin(x), x[:2]]), lambda x: x[::2] * 2, lambda x: jnp.outer(x, x).ravel()],
    ids=["longer", "half", "square"],
)
def test_two_graphs_serve_all_sizes(function):
    """Sizes stay symbols, also in the gradient."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    call = dlx.using("jax", grad=True)(function)
    compiled = torch.compile(lambda x: call(x * 2) + 1, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    for n in (3, 4, 5, 8, 13):
        x = torch.linspace(0.1, 1, n, dtype=torch.float64)
        assert np.allclose(compiled(x), function(jnp.asarray(x * 2)) + 1)
    assert len(graphs) == 2


@pytest.mark.parametrize("framework", ["jax", "numpy"])
@pytest.mark.parametrize("inside", [False, True], ids=["an argument", "in containers"])
def test_sizes_among_the_arguments_of_a_compiled_function(framework, inside):
    """The program is compiled again for other sizes: a symbol would keep the first size."""
    call = dlx.using(framework, grad=framework == "jax", result_like=lambda x, n: x)(
        lambda x, n: x * (n["shape"][0] + n["half"] * 2 if inside else 2 * int(n))
    )
    at = (lambda x: {"shape": x.shape, "half": x.shape[0] / 2}) if inside else (lambda x: x.shape[0])
    compiled = torch.compile(lambda x: call(x, at(x)), backend="aot_eager", fullgraph=True)
    for size in (3, 4, 5):
        assert compiled(torch.ones(size, dtype=torch.float64)).tolist() == [2 * size] * size


def test_shapes_that_depend_on_data():
    """They end the graph, and with ``fullgraph=True`` the warning says why."""
    call, x = dlx.using("jax", grad=True)(lambda x: x[: int(x.sum())]), torch.ones(3)
    assert torch.compile(lambda x: call(x) + 1, backend="eager")(x).tolist() == [2, 2, 2]
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="Pass result_like="), pytest.raises(Exception, match="nonstrict"):
        torch.compile(lambda x: call(x) + 1, backend="eager", fullgraph=True)(x)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_of_arguments_that_depend_on_data():
    """They work if the shapes of results follow for every size, also 0 and 1; others must be declared."""
    few = lambda x: x[:2] * 2  # noqa: E731
    for function in (jnp.sin, lambda x: jnp.concatenate([x, x]), few):
        torch._dynamo.reset()
        like = few if function is few else None
        call = dlx.using("jax", grad=True, result_like=like)(function)
        compiled = torch.compile(lambda x: call(x[x > 0]) + 1, backend="aot_eager", fullgraph=True)  # noqa: B023
        for values in ([1.0, 2.0, -1.0], [1.0, -1.0], [-1.0]):
            x = torch.tensor(values, dtype=torch.float64)
            assert np.allclose(compiled(x), function(jnp.asarray(x[x > 0])) + 1)
    torch._dynamo.reset()
    call = dlx.using("jax", grad=True)(few)
    compiled = torch.compile(lambda x: call(x[x > 0]) + 1, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="Pass result_like="), pytest.raises(Exception, match="nonstrict"):
        compiled(torch.ones(3))


def test_dtypes_that_jax_would_narrow_are_refused_before_the_program_runs():
    """Also of results without gradients."""
    jax.config.update("jax_enable_x64", False)
    call = dlx.using("torch", grad=True)(lambda x: (x, torch.argmax(x)))
    with pytest.raises(dlx.errors.DTypeError, match=r"a result is int64, .* Return a smaller dtype"):
        jax.jit(call)(jnp.ones(3))


def test_the_function_is_never_called_with_data_to_learn_shapes():
    """Each run of the program is one call, and each gradient one more."""
    values = []

    @dlx.using("torch", grad=True)
    def call(x):
        values.append(type(x).__name__)
        return x * 2

    jax.block_until_ready(jax.jit(call)(jnp.ones(3)))
    assert [name for name in values if name != "FakeTensor"] == ["Tensor"]


# ---- programs --------------------------------------------------------------------------------------------------------


def test_trees_and_modules_in_a_graph():
    """Containers of tensors are results; a module's method gets its tensors as arguments."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

        @dlx.using("jax", grad=True)
        def both(self, tree, n=2):
            return {"a": [tree["x"] * tree["w"] * n], "b": (tree["x"],)}

        def forward(self, x):
            return self.both({"x": x, "w": self.weight})["a"][0]

    layer, x = Layer(), torch.arange(3.0, dtype=torch.float64)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert layer.weight.grad.tolist() == [0, 2, 4]
    loss = lambda p: torch.func.functional_call(layer, p, (x,)).sum()  # noqa: E731
    assert torch.func.grad(loss)({"weight": torch.ones(3, dtype=torch.float64)})["weight"].tolist() == [0, 2, 4]


def test_an_exported_program_names_what_it_needs(tmp_path, python):
    """Its graph does, and the error in a process that has not compiled it."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return dlx.using("jax", grad=True)(jnp.sin)(x)

    program = torch.export.export(Module(), (torch.ones(3),))
    assert "dlx, jax and jax" in str(program)
    assert torch.allclose(program.module()(torch.zeros(3)), torch.zeros(3))
    torch.export.save(program, tmp_path / "program.pt2")
    python(
        f"""
        import torch, dlx
        dlx.convert(torch.ones(1), to="torch")
        import dlx_adapters.dlx_torch_graph_operators
        program = torch.export.load({str(tmp_path / "program.pt2")!r})
        try:
            program.module()(torch.ones(3))
        except dlx.errors.ConversionError as error:
            assert "dlx, jax and jax" in str(error), error
        else:
            raise AssertionError
        """,
        imported=True,
    )


def test_exported_programs_are_transformed():
    """An exported program has derivatives of any order, and can be vectorized, as the function itself."""
    call, x = dlx.using("jax", grad=True)(lambda x: jnp.sin(x) * x), torch.linspace(0.1, 1, 3, dtype=torch.float64)

    class Module(torch.nn.Module):
        def forward(self, x):
            return call(x) * 2

    program, both = torch.export.export(Module(), (x,)).module(), torch.stack([x, 3 * x])
    slope, total = (lambda x: 2 * (x.cos() * x + x.sin())), lambda x: program(x).sum()
    assert torch.allclose(torch.func.grad(total)(x), slope(x))
    assert torch.allclose(torch.func.jvp(program, (x,), (torch.ones_like(x),))[1], slope(x))
    assert torch.allclose(torch.func.jacfwd(program)(x).diag(), slope(x))
    assert torch.allclose(torch.func.vmap(program)(both), 2 * both.sin() * both)
    assert torch.allclose(torch.func.vmap(torch.func.grad(total))(both), slope(both))
    assert torch.allclose(torch.func.hessian(total)(x).diag(), 2 * (2 * x.cos() - x.sin() * x))
    assert torch.autograd.gradgradcheck(program, (x.requires_grad_(),))
    with pytest.raises(dlx.errors.ConversionError, match="cannot vectorize"):
        torch.autograd.functional.jacobian(program, x, vectorize=True)
    with pytest.raises(dlx.errors.ConversionError, match="leave out vectorize=True or is_grads_batched=True"):
        torch.autograd.grad(program(x), x, torch.eye(3, dtype=x.dtype), is_grads_batched=True)


def test_forward_mode_of_functions_without_differentiable_results():
    """Their tangents are zeros, and those of results that do not depend on the argument."""
    x, one = jnp.ones(3), jnp.ones(3)
    assert jax.jvp(dlx.using("torch", grad=True)(lambda x: x > 0), (x,), (one,))[1].dtype == jax.dtypes.float0
    call = dlx.using("torch", grad=True)(lambda x: (x * 2, x > 0, torch.ones(2)))
    assert [each.tolist() for each in jax.jvp(call, (x,), (one,))[1][::2]] == [[2] * 3, [0] * 2]


def test_sharded_arrays_are_refused(python):
    """By name, when the program is compiled."""
    python(
        """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp, torch, dlx
        from jax.sharding import NamedSharding, PartitionSpec
        mesh = jax.make_mesh((2,), ("i",))
        x = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("i")))
        call = dlx.using("torch", grad=True)(torch.sin)
        try:
            jax.jit(call)(x)
        except dlx.errors.ConversionError as error:
            assert "sharded" in str(error), error
        else:
            raise AssertionError
        assert jax.jit(call)(jnp.zeros(4)).tolist() == [0] * 4
        """,
        imported=True,
    )


@pytest.mark.parametrize("jit", [jax.jit, same], ids=["jit", "eager"])
def test_random_numbers_in_forward_mode(jit):
    """The tangents are those of the values: both draw the same mask."""
    dropped = dlx.using("torch", grad=True)(lambda x: torch.nn.functional.dropout(x, 0.5) * x)
    x = jnp.arange(1.0, 33.0)
    y, moved = jit(lambda x: jax.jvp(dropped, (x,), (jnp.ones_like(x),)))(x)
    assert 0 < (y > 0).sum() < 32
    assert np.allclose(moved, 2 * y / x)


@pytest.mark.parametrize("name", ["vjp", "jvp", "vmap"])
def test_random_numbers_of_torch_in_a_function_of_jax(name):
    """`torch.func` differentiates the values that it returns: derivatives use the same mask."""
    masked = lambda x: x * x * jnp.asarray((torch.rand(32) > 0.5).numpy())  # noqa: E731
    call, x, ones = dlx.using("jax", grad=True)(masked), torch.arange(1.0, 33), torch.ones(32)
    if name == "vjp":
        y, pull = torch.func.vjp(call, x)
        moved = pull(ones)[0]
    elif name == "jvp":
        y, moved = torch.func.jvp(call, (x,), (ones,))
    else:
        y, pull = torch.func.vjp(torch.func.vmap(call), x[None])
        moved = pull(ones[None])[0]
    assert 0 < (y > 0).sum() < 32
    assert torch.equal(moved, 2 * y / x)


def test_programs_without_derivatives_keep_no_random_states():
    """The state is a result of the call only if a derivative needs it."""
    call, x = dlx.using("torch", grad=True)(torch.sin), jnp.ones(3)
    size = f"tensor<{torch.get_rng_state().shape[0]}xui8>"
    assert size not in jax.jit(call).lower(x).as_text()
    assert size in jax.jit(jax.grad(lambda x: call(x).sum())).lower(x).as_text()


def test_arguments_of_a_call_outlive_it():
    """A function under `jax.jit` may keep its arguments and write to them."""
    kept = []

    @dlx.using("torch", grad=True, readonly="share")
    def call(x):
        if type(x) is torch.Tensor:  # not the trial run
            kept.append(x.mul_(2))
        return x + 0

    jitted, x = jax.jit(call), jnp.ones(1000)
    for n in range(3):
        assert jitted(x + n).tolist() == [2 * (n + 1)] * 1000
    assert [each.tolist()[0] for each in kept] == [2, 4, 6]


def test_transformed_calls_register_no_operations():
    """Only compiled programs keep operations."""
    call, x = dlx.using("jax", grad=True)(jnp.sin), torch.ones(2, dtype=torch.float64)
    torch.func.hessian(lambda x: call(x).sum())(x)
    torch.func.vmap(torch.func.grad(call))(x)
    torch.func.jvp(call, (x,), (x,))
    assert not OPERATIONS


def test_threads_define_the_operators_once(python):
    """They may compile their first programs at the same time."""
    python(
        """
        import sys, threading, torch, dlx
        dlx.convert(torch.ones(1), to="torch")
        sys.setswitchinterval(1e-4)
        found, barrier = [], threading.Barrier(4)
        def define():
            barrier.wait()
            from dlx_adapters.dlx_torch_graph_operators import operators
            found.append(operators)
        threads = [threading.Thread(target=define) for _ in range(4)]
        for each in threads: each.start()
        for each in threads: each.join()
        assert len(found) == 4
        """,
        imported=True,
    )


@pytest.mark.slow
def test_inductor():
    """The real compiler gives the same values and gradients."""
    call = dlx.using("jax", grad=True)(lambda x: jnp.sin(x) * x)
    x = torch.linspace(0.1, 1, 4, requires_grad=True)
    y = torch.compile(lambda x: call(x * 2) + 1, fullgraph=True)(x)
    expected = (x * 2).sin() * x * 2 + 1
    assert torch.allclose(y, expected)
    pair = (torch.autograd.grad(each.sum(), x)[0] for each in (y, expected))
    assert torch.allclose(*pair)
