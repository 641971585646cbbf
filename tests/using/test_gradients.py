"""Gradients across frameworks: `dlx.using` with ``grad=True``, and its errors without."""

import contextlib
import functools
import gc
import threading
import warnings

import pytest
from support.processes import warm
from support.project import LIBRARIES, ROOT

import dlx
from dlx._core import native
from dlx._using.compiled import MAX_KNOWN, CompiledCalls, _add

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy
check_grads = pytest.importorskip("jax.test_util").check_grads
cache = pytest.importorskip("jax.experimental.compilation_cache.compilation_cache")
# A killed run leaves incomplete files in the cache; jax then warns and compiles again.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")

# (name, function of jax, numbers of elements of its arguments, or shapes)
TO_JAX = {
    "sin": (lambda x: jnp.sin(x), (5,)),
    "tanh times exp": (lambda x: jnp.tanh(x) * jnp.exp(x), (2, 3)),
    "power": (lambda x: (x * x + 1) ** 1.5, (4,)),
    "where": (lambda x: jnp.where(x > 0, x, 0.5 * x), (6,)),
    "matmul": (lambda x, y: x @ y, (3, 4), (4, 2)),
    "batched matmul": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 2)),
    "sum": (lambda x: x.sum(), (3, 4)),
    "mean of an axis": (lambda x: x.mean(axis=1), (3, 4)),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=0), (4, 2)),
    "max": (lambda x: x.max(axis=0), (4, 3)),
    "product": (lambda x: jnp.prod(x), (4,)),
    "broadcasting": (lambda x, y: x * y + y, (3, 1), (1, 4)),
    "scalar": (lambda x, y: x * y, (), (3,)),
    "transposed": (lambda x: x.T, (3, 2)),
    "indexed": (lambda x: x[::2, 1], (4, 3)),
    "in place": (lambda x: jnp.zeros(6).at[1:5].set(x).cumsum(), (4,)),
    "solve": (lambda x, y: jnp.linalg.solve(x + 5 * jnp.eye(3), y), (3, 3), (3,)),
    "softmax": (lambda x: jax.nn.softmax(x), (2, 5)),
    "several results": (lambda x, y: (x * y, x + y), (3,), (3,)),
    "a tree": (lambda x, y: {"a": [x * y], "b": (x, {"c": y})}, (3,), (3,)),
    "ignores one": (lambda x, y: 2 * x, (3,), (2,)),
    "its argument": (lambda x: x, (3,)),
    "the same twice": (lambda x: (x, x), (3,)),
    "compiled": (jax.jit(lambda x, y: jnp.sin(x) @ y), (3,), (3,)),
    "scan": (lambda x: jax.lax.scan(lambda c, v: (c * 0.5 + v, c), 0.0, x)[1], (5,)),
}
COMPLEX = {
    "times": lambda z, w: z * w,
    "conjugate": lambda z, w: z.conj() * w + z,
    "absolute": lambda z, w: jnp.abs(z) ** 2 + jnp.real(w),
    "exp": lambda z, w: jnp.exp(z) + w**2,
    "parts": lambda z, w: (z.real * w.imag, z.imag + w.real),
}
TO_TORCH = {
    "sin": (lambda x: torch.sin(x), (5,)),
    "tanh times exp": (lambda x: torch.tanh(x) * torch.exp(x), (2, 3)),
    "power": (lambda x: (x * x + 1) ** 1.5, (4,)),
    "where": (lambda x: torch.where(x > 0, x, 0.5 * x), (6,)),
    "matmul": (lambda x, y: x @ y, (3, 4), (4, 2)),
    "batched matmul": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 2)),
    "sum": (lambda x: x.sum(), (3, 4)),
    "mean of an axis": (lambda x: x.mean(dim=1), (3, 4)),
    "logsumexp": (lambda x: torch.logsumexp(x, 0), (4, 2)),
    "max": (lambda x: x.amax(0), (4, 3)),
    "product": (lambda x: x.prod(), (4,)),
    "broadcasting": (lambda x, y: x * y + y, (3, 1), (1, 4)),
    "scalar": (lambda x, y: x * y, (), (3,)),
    "transposed": (lambda x: x.T, (3, 2)),
    "indexed": (lambda x: x[::2, 1], (4, 3)),
    "in place": (lambda x: torch.zeros(6, dtype=x.dtype).index_copy_(0, torch.arange(4), x).cumsum(0), (4,)),
    "solve": (lambda x, y: torch.linalg.solve(x + 5 * torch.eye(3, dtype=x.dtype), y), (3, 3), (3,)),
    "softmax": (lambda x: torch.softmax(x, -1), (2, 5)),
    "several results": (lambda x, y: (x * y, x + y), (3,), (3,)),
    "a tree": (lambda x, y: {"a": [x * y], "b": (x, {"c": y})}, (3,), (3,)),
    "ignores one": (lambda x, y: 2 * x, (3,), (2,)),
    "its argument": (lambda x: x, (3,)),
    "layer": (torch.nn.functional.gelu, (2, 3)),
}
SECOND = ("tanh times exp", "matmul", "softmax", "broadcasting", "solve", "several results")


@contextlib.contextmanager
def _configured(**options):
    before = {name: jax.config.values[name] for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(autouse=True, scope="module")
def _compiled_once():
    """Cache jax's compiled code in build/tests for the next run, which halves the time."""
    cache.reset_cache()
    with _configured(
        jax_compilation_cache_dir=str(LIBRARIES / "jax"),
        jax_persistent_cache_min_compile_time_secs=0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    ):
        yield
    cache.reset_cache()


@pytest.fixture(autouse=True)
def _wide():
    """Enable jax's 64-bit dtypes, and disable its compiler's optimizations, which take most of the time here."""
    with _configured(jax_enable_x64=True, jax_disable_most_optimizations=True):
        yield


def _values(shapes, dtype=np.float64):
    random = np.random.default_rng(7)
    made = [random.normal(size=shape) for shape in shapes]
    if dtype is np.complex128:
        made = [real + 1j * random.normal(size=real.shape) for real in made]
    return [np.asarray(each, dtype) for each in made]


def _tensors(shapes, dtype=np.float64):
    return [torch.tensor(each, requires_grad=True) for each in _values(shapes, dtype)]


def _leaves(found):
    return tuple(jax.tree_util.tree_leaves(found))


# ---- nothing is cut silently -----------------------------------------------------------------------------------


def test_gradients_are_not_cut_without_a_word():
    """A recorded argument raises an error with its path and both fixes; an unrecorded one is passed."""
    same, x = dlx.using("jax")(lambda x: x), torch.ones(2, requires_grad=True)
    with pytest.raises(dlx.errors.ConversionError, match=r"at x: .*detach=True.*grad=True"):
        same(x)
    with pytest.raises(dlx.errors.ConversionError, match=r"at x\['a'\]\[1\]"):
        same({"a": [torch.ones(2), x]})
    with pytest.raises(dlx.errors.ConversionError, match=r"at x: .*detach=True") as caught:
        dlx.using("numpy")(lambda x: x)(x)
    assert "grad=True" not in caught.value.fix  # numpy computes no gradients
    with torch.no_grad():
        assert not (dlx.using("jax")(lambda x: x + 1)(x)).requires_grad
    assert same(torch.ones(2)).tolist() == [1, 1]
    assert dlx.using("torch")(lambda x: x * 2)(x).requires_grad  # nothing is converted


def test_detach_means_what_it_says():
    """True drops gradients, False raises as in `dlx.convert`."""
    x = torch.ones(2, requires_grad=True)
    found = dlx.using("jax", detach=True)(lambda x: x + 1)(x)
    assert found.tolist() == [2, 2]
    assert not found.requires_grad
    with pytest.raises(dlx.errors.ConversionError):
        dlx.using("jax", detach=False)(lambda x: x + 1)(x)


def test_numpy_has_no_gradients():
    """As a function's framework it is refused by name; numpy callers get results without gradients."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(dlx.errors.ConversionError, match="numpy cannot compute gradients"):
        dlx.using("numpy", grad=True)(lambda x: x)(x)
    # numpy callers get results without gradients
    assert isinstance(dlx.using("jax", grad=True)(lambda x: x * 2)(np.ones(2)), np.ndarray)
    assert isinstance(dlx.using("torch", grad=True)(lambda x: x * 2)(np.ones(2)), np.ndarray)


@pytest.mark.parametrize(
    "wrong",
    [{"lazy": True}, {"returns": "torch"}, {"writes": "x"}, {"device": "cpu"}, {"stream": 1}],
    ids=str,
)
def test_what_does_not_go_with_gradients(wrong):
    """The error names the option."""
    with pytest.raises(TypeError, match=f"cannot be combined with {next(iter(wrong))}="):
        dlx.using("jax", grad=True, **wrong)


def test_detach_does_not_go_with_gradients():
    """The error names it."""
    with pytest.raises(TypeError, match="detach="):
        dlx.using("jax", grad=True, detach=True)


def test_functions_that_return_once_only():
    """Coroutines and generators are refused when they are decorated."""

    async def coroutine(x):
        return x

    def generator(x):
        yield x

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="coroutines and generators"):
            dlx.using("jax", grad=True)(function)


# ---- torch calls jax -------------------------------------------------------------------------------------------------


@pytest.mark.few(7)
@pytest.mark.parametrize("name", TO_JAX)
def test_torch_differentiates_jax(name):
    """Numerical and computed gradients agree, and so do some second derivatives."""
    function, *shapes = TO_JAX[name]
    decorated = dlx.using("jax", grad=True)(function)
    tensors = _tensors(shapes)
    flat = lambda *tensors: _leaves(decorated(*tensors))  # noqa: E731
    assert torch.autograd.gradcheck(flat, tensors, fast_mode=True)
    if name in SECOND:
        assert torch.autograd.gradgradcheck(flat, tensors, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPLEX)
def test_torch_differentiates_complex_functions_of_jax(name):
    """Gradients follow torch's convention, which differs from jax's."""
    decorated = dlx.using("jax", grad=True)(COMPLEX[name])
    tensors = _tensors([(3,), (3,)], np.complex128)
    assert torch.autograd.gradcheck(lambda *tensors: _leaves(decorated(*tensors)), tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *tensors: _leaves(decorated(*tensors)), tensors, fast_mode=True)


def test_containers_keywords_constants_and_what_is_no_array():
    """Each argument reaches its parameter, and only differentiable ones have gradients."""
    seen = {}

    @dlx.using("jax", grad=True)
    def function(tree, n, *rest, scale, mode):
        seen.update(tree=tree, mode=mode)
        assert mode == "wide"
        return {"y": tree["x"] * n * scale + rest[0], "n": tree["i"] + 1, "mode": mode, "none": None}

    x, i = torch.ones(3, requires_grad=True), torch.arange(3)
    constant, scale = np.arange(3, dtype="f4"), torch.tensor(2.0, requires_grad=True)
    found = function({"x": x, "i": i}, 3, constant, scale=scale, mode="wide")
    assert all(isinstance(each, jax.Array) for each in (seen["tree"]["x"], seen["tree"]["i"]))
    assert found["y"].tolist() == [6, 7, 8]
    assert found["n"].tolist() == [1, 2, 3]
    assert not found["n"].requires_grad
    assert (found["mode"], found["none"]) == ("wide", None)
    found["y"].sum().backward()
    assert x.grad.tolist() == [6, 6, 6]
    assert scale.grad.item() == 9
    assert x.grad.dtype is torch.float32


def test_arrays_without_elements():
    """Their gradients are empty, too."""
    x = torch.ones((0, 3), requires_grad=True)
    y = dlx.using("jax", grad=True)(lambda x: (x * 2, x.sum()))(x)
    sum(each.sum() for each in y).backward()
    assert x.grad.shape == (0, 3)
    found = jax.grad(lambda x: dlx.using("torch", grad=True)(lambda x: x * 2)(x).sum())(jnp.ones((0, 3)))
    assert found.shape == (0, 3)


def test_methods_keep_their_object():
    """`self` is not converted."""

    class Model:
        @dlx.using("jax", grad=True)
        def forward(self, x):
            assert isinstance(self, Model)
            return x * 3

    x = torch.ones(2, requires_grad=True)
    Model().forward(x).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_a_result_used_twice_and_backward_run_twice():
    """Gradients add up, and a freed graph raises, like for functions of torch."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = dlx.using("jax", grad=True)(lambda x: x * x)(x)
    (y + 3 * y).sum().backward(retain_graph=True)
    assert x.grad.tolist() == [8, 16]
    y.sum().backward()
    assert x.grad.tolist() == [10, 20]
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_memory_crosses_without_a_copy():
    """Arguments, results and gradients in both directions share memory."""
    seen = []

    @dlx.using("jax", grad=True, readonly="share")
    def function(x):
        seen.append(x if isinstance(x, jax.core.Tracer) else x.unsafe_buffer_pointer())
        return x * 2

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient.data_ptr())
            return gradient

    with dlx_conversions() as plans:
        x = torch.ones(1024, requires_grad=True)
        function(Watched.apply(x)).backward(torch.ones(1024))
    assert plans
    assert set(plans) == {"shared"}
    assert x.grad.tolist() == [2] * 1024


class dlx_conversions:
    """Record whether `dlx.convert` shared or copied each array for gradients."""

    def __enter__(self):
        from dlx._using import operation

        self._module, self._convert, found = operation, operation.FAST_PATH, []

        def convert(array, to, **options):
            result = self._convert(array, to, **options)
            found.append("shared" if dlx.shares_memory(array, result) else "copied")
            return result

        self._module.FAST_PATH = convert
        return found

    def __exit__(self, *error):
        self._module.FAST_PATH = self._convert


def test_results_and_gradients_can_be_written_to_by_themselves():
    """If jax returns the same memory twice, or an argument's, the caller gets copies."""
    a, b = torch.ones(64, requires_grad=True), torch.ones(64, requires_grad=True)
    x, y, z = dlx.using("jax", grad=True)(lambda a, b: (a, b, a))(a, b)
    assert x is z  # as in every tree
    with torch.no_grad():
        x += 1
    assert a.tolist() == b.tolist() == y.tolist() == [1] * 64
    dlx.using("jax", grad=True)(lambda a, b: a + b)(a, b).sum().backward()
    a.grad.zero_()
    assert b.grad.tolist() == [1] * 64


def test_what_was_written_to_meanwhile_is_noticed():
    """Torch detects it, like for its own functions."""
    x = torch.ones(4, requires_grad=True)
    shifted = x + 1
    y = dlx.using("jax", grad=True)(jnp.exp)(shifted)
    shifted.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = dlx.using("jax", grad=True)(jnp.exp)(x)
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_jax_keeps_is_not_handed_out_writable():
    """A constant that a function or its derivative returns is copied."""
    constant = jnp.ones(64, "float32")

    @jax.custom_vjp
    def half(x):
        return x / 2

    half.defvjp(lambda x: (half(x), None), lambda saved, gradient: (constant,))
    x = torch.ones(64, requires_grad=True)
    with torch.no_grad():
        kept = dlx.using("jax", grad=True)(lambda x: (half(x), constant))(x)[1]
        kept += 5
    kept = dlx.using("jax", grad=True)(lambda x: (half(x), constant))(x)[1].detach()
    kept += 5
    dlx.using("jax", grad=True)(half)(x).sum().backward()
    x.grad.zero_()
    assert constant.tolist() == [1] * 64


def test_constants_are_those_of_the_call():
    """Later writes to an array of a third framework have no effect."""
    x, constant = torch.ones(64, requires_grad=True), np.ones(64, "f4")
    y = dlx.using("jax", grad=True)(lambda x, c: x * c)(x, constant)
    constant[:] = 100
    y.sum().backward()
    assert x.grad.tolist() == [1] * 64


def test_only_some_arguments_require_gradients():
    """The others have no gradient."""
    x, y = torch.ones(3, requires_grad=True), torch.ones(3)
    dlx.using("jax", grad=True)(lambda x, y: x * y)(x, y).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]
    assert y.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes(dtype):
    """Gradients have the dtypes of their arguments."""
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    y = dlx.using("jax", grad=True)(lambda x: x.astype("float32") * 3)(x)
    assert y.dtype is torch.float32
    y.sum().backward()
    assert x.grad.dtype is dtype
    assert x.grad.tolist() == [3, 3, 3]


def test_under_autocast_and_checkpoint():
    """Both treat the layer like one of torch."""
    from torch.utils.checkpoint import checkpoint

    calls = []

    @dlx.using("jax", grad=True)
    def function(x):
        calls.append(1)
        return jnp.sin(x)

    layer = torch.nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    function(layer(x)).sum().backward()
    expected, x.grad = x.grad, None
    for reentrant in (True, False):
        checkpoint(lambda x: function(layer(x)).sum(), x, use_reentrant=reentrant).backward()
        assert torch.allclose(x.grad, expected)
        x.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = function(layer(x))
        assert found.dtype is torch.bfloat16
        found.sum().backward()
    assert x.grad.dtype is torch.float32


def test_in_threads():
    """Calls in several threads do not affect each other."""
    function, errors = dlx.using("jax", grad=True)(lambda x, n: jnp.sin(x) * n), []

    def work(n):
        try:
            x = torch.full((16,), float(n), requires_grad=True)
            for _ in range(5):
                function(x, n).sum().backward()
            assert torch.allclose(x.grad, 5 * n * torch.cos(x.detach()))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


class Planned(Exception):
    """The exception of the functions below."""


def test_exceptions_arrive_as_they_are():
    """Exceptions of the forward and backward pass are raised unchanged."""

    def raises(x):
        raise Planned("forward")

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(Planned, match="forward"):
        dlx.using("jax", grad=True)(raises)(x)

    @jax.custom_vjp
    def bad(x):
        return x * 2

    def backward(saved, gradient):
        raise Planned("backward")

    bad.defvjp(lambda x: (bad(x), None), backward)
    with pytest.raises(Planned, match="backward"):
        dlx.using("jax", grad=True)(bad)(x).sum().backward()


def test_what_cannot_cross_is_refused_by_its_place():
    """The error has the path and the reason."""
    with pytest.raises(dlx.errors.ConversionError, match=r"at x\[1\]"):
        sparse = torch.eye(2).to_sparse().requires_grad_()
        dlx.using("jax", grad=True)(lambda x: x)([torch.ones(1), sparse])
    jax.config.update("jax_enable_x64", False)
    with pytest.raises(dlx.errors.DTypeError, match="jax_enable_x64"):
        dlx.using("jax", grad=True)(lambda x: x)(torch.ones(2, dtype=torch.float64, requires_grad=True))


# ---- torch calls functions compiled by jax ---------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name", ["matmul", "max", "scalar", "transposed", "several results", "a tree", "ignores one", "its argument"]
)
def test_torch_differentiates_compiled_functions(name):
    """Both passes are compiled; numerical and computed gradients agree, and so do some second derivatives."""
    function, *shapes = TO_JAX[name]
    decorated = dlx.using("jax", grad=True)(jax.jit(function))
    flat = lambda *tensors: _leaves(decorated(*tensors))  # noqa: E731
    assert torch.autograd.gradcheck(flat, _tensors(shapes), fast_mode=True)
    if name in SECOND:
        assert torch.autograd.gradgradcheck(flat, _tensors(shapes), fast_mode=True)


def test_torch_differentiates_compiled_complex_functions():
    """Gradients follow torch's convention."""
    decorated = dlx.using("jax", grad=True)(jax.jit(lambda z, w: (COMPLEX["conjugate"](z, w), jnp.abs(w))))
    assert torch.autograd.gradcheck(decorated, _tensors([(3,), (3,)], np.complex128), fast_mode=True)


def test_compiled_functions_are_traced_once_for_arguments_of_a_kind():
    """The function and its derivative are traced again only if jit distinguishes the arguments."""
    traced = []

    @dlx.using("jax", grad=True)
    @functools.partial(jax.jit, static_argnames="mode")
    def function(tree, mode="wide"):
        traced.append(mode)
        return jnp.sin(tree["x"]) * tree["n"] if mode == "wide" else -tree["x"]

    def call(shape, dtype=torch.float32, **options):
        x = torch.ones(shape, dtype=dtype, requires_grad=True)
        function({"x": x, "n": torch.tensor(2, dtype=torch.int32)}, **options).sum().backward()
        return x.grad.flatten()[0].item()

    assert [call(3) for _ in range(3)] == [pytest.approx(2 * np.cos(1.0))] * 3
    first = len(traced)
    assert call(3) == pytest.approx(2 * np.cos(1.0))
    assert len(traced) == first
    assert call((2, 2)) == pytest.approx(2 * np.cos(1.0))
    assert len(traced) > first
    assert call(3, torch.float64) == pytest.approx(2 * np.cos(1.0), abs=1e-12)
    assert call(3, mode="minus") == -1
    jax.config.update("jax_enable_x64", False)
    assert call(3) == pytest.approx(2 * np.cos(1.0))
    with pytest.raises(dlx.errors.DTypeError, match=r"at tree\['x'\].*jax_enable_x64"):
        call(3, torch.float64)


def test_numbers_among_the_arguments_of_compiled_functions():
    """Each number has its effect, even if it changes in every call, or differs only in sign or type."""
    function = dlx.using("jax", grad=True)(jax.jit(lambda x, n: x * n + jnp.arctan2(n, -1.0)))
    for n in (2, 2, 2, 2.5, 2.5, 2.0, 3, 0.0, 0.0, -0.0, -0.0):
        x = torch.ones(3, requires_grad=True)
        y = function(x, n)
        y.sum().backward()
        assert x.grad.tolist() == [n] * 3
        assert y.tolist() == pytest.approx([n + np.arctan2(n, -1.0)] * 3)


def test_compiled_functions_get_and_give_memory_without_a_copy(monkeypatch):
    """Arguments and gradients become jax arrays at the same address; results and their gradients are jax's memory."""
    from dlx_adapters import dlx_jax_gradients

    taken, handed, take, hand = [], [], dlx_jax_gradients._import, dlx_jax_gradients._export_results

    def noted(tensor):
        array = take(tensor)
        taken.append((tensor.data_ptr, array.unsafe_buffer_pointer()))
        return array

    def given(arrays, own, host):
        handed.extend(each.unsafe_buffer_pointer() for each in arrays)
        return hand(arrays, own, host)

    monkeypatch.setattr(dlx_jax_gradients, "_import", noted)
    monkeypatch.setattr(dlx_jax_gradients, "_export_results", given)
    function = dlx.using("jax", grad=True)(jax.jit(lambda a, b: a * b))
    for dtype in (torch.float32, torch.float64):
        taken.clear()
        handed.clear()
        a, b = (torch.randn(1024, dtype=dtype, requires_grad=True) for _ in range(2))
        y, gradient = function(a, b), torch.randn(1024, dtype=dtype)
        found = torch.autograd.grad(y, (a, b), gradient)
        assert [given for given, _ in taken] == [a.data_ptr(), b.data_ptr(), gradient.data_ptr()]
        assert all(given == got for given, got in taken)
        assert handed == [y.data_ptr(), *(each.data_ptr() for each in found)]
        assert torch.allclose(found[0], b * gradient)
        assert torch.allclose(found[1], a * gradient)


def test_results_of_compiled_functions_can_be_written_to():
    """Even arguments, constants and equal results are writable; torch watches the memory for the backward pass."""
    constant = jnp.ones(64, "float32")
    function = dlx.using("jax", grad=True)(jax.jit(lambda a, b: (a, a + b, constant, a, b * 1)))
    a, b = torch.ones(64, requires_grad=True), torch.ones(64, requires_grad=True)
    results = [each.detach() for each in function(a, b)]
    for i, each in enumerate(results):
        each += i + 1
    assert [each[0].item() for each in results] == [2, 4, 4, 5, 6]
    assert constant.tolist() == a.tolist() == b.tolist() == [1] * 64
    sum(each.sum() for each in function(a, b)).backward()
    a.grad.zero_()
    assert b.grad.tolist() == [2] * 64
    y = dlx.using("jax", grad=True)(jax.jit(jnp.tanh))(a)
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_arguments_that_compiled_functions_get_by_copying():
    """Strided, unaligned and read-only memory is copied, and so are constants of numpy and jax."""
    function = dlx.using("jax", grad=True)(jax.jit(lambda x, c, d: x * c + d))
    base, constant = torch.arange(17.0), np.arange(4, dtype="f4")
    constant.flags.writeable = False
    for x in (base[1:9:2], base[1:5], base[3:4].expand(4), base[:16].reshape(4, 4).T[0]):
        x = x.detach().requires_grad_()
        y = function(x, constant, jnp.ones(4))
        y.sum().backward()
        assert y.tolist() == [n * value + 1 for n, value in enumerate(x.tolist())]
        assert x.grad.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_way_back_keeps_goes_with_the_graph(compiled):
    """It is freed after backward, like torch's saved tensors, unless the graph is retained, even if results live on."""
    function = lambda x: jnp.sin(x) * jnp.exp(x)  # noqa: E731
    decorated = dlx.using("jax", grad=True)(jax.jit(function) if compiled else function)
    x = torch.zeros(12345, requires_grad=True)
    kept = lambda: sum(each.nbytes for each in jax.live_arrays() if each.shape == (12345,))  # noqa: E731
    y = decorated(x)
    assert kept()
    y.sum().backward(retain_graph=True)
    assert kept()
    y.sum().backward()
    assert x.grad.tolist() == [2] * 12345
    x.grad = None
    gc.collect()
    assert kept() <= y.nbytes  # the result itself
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_tensors_saved_elsewhere():
    """Hooks that move saved tensors to the host or disk lose the pullback; it is computed again."""
    for function in (jnp.exp, jax.jit(jnp.exp)):
        x = torch.zeros(3, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            y = dlx.using("jax", grad=True)(function)(x)
        y.sum().backward()
        assert x.grad.tolist() == [1] * 3


def test_functions_whose_result_is_a_coroutine_or_generator():
    """They are refused by name, without a warning that a coroutine was never awaited."""

    class Callable:
        async def __call__(self, x):
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function, what in ((Callable(), "coroutine"), (lambda x: (each for each in x), "generator")):
            with pytest.raises(dlx.errors.ConversionError, match=f"returned a {what}"):
                dlx.using("jax", grad=True)(function)(torch.ones(2, requires_grad=True))


def test_arguments_that_the_function_records_itself():
    """They are refused if results leave the framework, or another framework records; otherwise gradients are kept."""
    own, times = torch.ones(2, requires_grad=True), lambda x, w: x * w
    for function in (dlx.using("torch")(times), dlx.using("torch", grad=True)(times)):
        assert isinstance(function(np.ones(2), own.detach()), np.ndarray)  # the same types as below
        with pytest.raises(dlx.errors.ConversionError, match=r"at result: .*records w .*detach=True"):
            function(np.ones(2), own)
        with torch.no_grad():
            assert isinstance(function(np.ones(2), own), np.ndarray)
        assert function(torch.ones(2), own).requires_grad
    assert isinstance(dlx.using("torch", detach=True)(times)(np.ones(2), own), np.ndarray)
    with pytest.raises(dlx.errors.ConversionError, match="jax and torch both"):
        jax.grad(lambda x: dlx.using("torch", grad=True)(times)(x, own).sum())(jnp.ones(2))


def test_a_step_of_training_returns_no_graph():
    """A training step keeps its graph inside and returns numbers; only results that lose a graph are refused."""
    for grad in (False, True):
        weight = torch.nn.Parameter(torch.zeros(2))

        @dlx.using("torch", grad=grad)
        def step(weight, x, y):
            loss = ((x @ weight - y) ** 2).mean()
            loss.backward()
            return loss.item(), loss.detach()

        x, y = np.ones((3, 2), "float32"), np.ones(3, "float32")
        for _ in range(2):
            assert step(weight, x, y) == (1.0, 1.0)
        assert weight.grad.tolist() == [-4, -4]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_graph_is_not_cut_in_containers_nor_by_a_name_of_the_results(lazy):
    """It also holds after calls with unrecorded tensors of the same types."""
    for returns, given in ((None, (np.ones(2),)), ("numpy", ())):
        call = dlx.using("torch", returns=returns, lazy=lazy)(lambda w, *others: {"a": w * 2})
        assert isinstance(call(torch.ones(2), *given)["a"], np.ndarray)
        with pytest.raises(dlx.errors.ConversionError, match="detach"):
            call(torch.ones(2, requires_grad=True), *given)["a"]
        plain = dlx.using("torch", returns=returns)(lambda w, *others: w * 2)
        assert isinstance(plain(torch.ones(2), *given), np.ndarray)
        with pytest.raises(dlx.errors.ConversionError, match=r"at result: .*detach=True"):
            plain(torch.ones(2, requires_grad=True), *given)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_is_sent_to_generators_keeps_its_graph(framework):
    """Sent values are treated like arguments."""

    @dlx.using(framework)
    def generator(x):
        while True:
            x = x * (yield x)

    steps = generator(np.ones(2, "float32"))
    next(steps)
    assert isinstance(steps.send(torch.ones(2)), np.ndarray)
    with pytest.raises(dlx.errors.ConversionError, match="detach=True"):
        steps.send(torch.ones(2, requires_grad=True))


def test_compiled_functions_inside_of_a_trace():
    """Inside a trace everything is traced; the error is the same without jit."""
    given, said = torch.ones(64, requires_grad=True), []
    for jit in (jax.jit, lambda function: function):
        call = dlx.using("jax", grad=True)(jit(lambda x: x * 2))

        def traced(c, call=call):
            with pytest.raises(dlx.errors.LayoutError, match="at result: inside a jax transformation") as caught:
                call(given)
            said.append(str(caught.value))
            return c

        for _ in range(2):
            jax.jit(traced)(1.0)
            assert call(given).tolist() == [2] * 64
    assert len(set(said)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda call: call(torch.ones(2, requires_grad=True), {"k": np.ones(2)}),
        lambda call: call(torch.ones(2, requires_grad=True), [torch.ones(2, dtype=torch.float64)]),
        lambda call: call(torch.ones(2, requires_grad=True), torch.ones(2).to_sparse()),
    ],
    ids=["numpy in a dictionary", "torch in a list", "sparse"],
)
def test_compiled_functions_name_what_cannot_cross(wrong):
    """The error has the path and the framework, as without jit."""
    said = []
    with jax.enable_x64(False):
        for jit in (jax.jit, lambda function: function):
            with pytest.raises(dlx.errors.DlxError) as caught:
                wrong(dlx.using("jax", grad=True)(jit(lambda x, y: x)))
            said.append(str(caught.value))
    assert said[0] == said[1]
    assert "to 'jax' at y" in said[0]


def test_gradients_that_cannot_cross_say_so():
    """A gradient is wider than jax now allows; the error is the same with jit."""
    said = []
    for jit in (jax.jit, lambda function: function):
        y = dlx.using("jax", grad=True)(jit(lambda x: x * 2))(torch.ones(3, dtype=torch.float64, requires_grad=True))
        with jax.enable_x64(False), pytest.raises(dlx.errors.DTypeError) as caught:
            y.backward(torch.ones(3, dtype=torch.float64))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "to 'jax' at gradient" in said[0]


def test_vectorized_jacobians_of_the_old_interface_are_refused():
    """The error names the functions to call."""
    call = dlx.using("jax", grad=True)(jnp.sin)
    with pytest.raises(dlx.errors.ConversionError, match=r"Use torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(call, torch.ones(2), vectorize=True)
    assert torch.autograd.functional.jacobian(call, torch.zeros(2)).tolist() == [[1, 0], [0, 1]]
    assert torch.func.jacrev(call)(torch.zeros(2)).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("size", [64, 1 << 16])
def test_donated_arguments_are_not_overwritten(size):
    """Their memory belongs to torch, which did not donate it."""
    call = dlx.using("jax", grad=True)(jax.jit(lambda x: x * 2 + 1, donate_argnums=0))
    x = torch.ones(size, requires_grad=True)
    for _ in range(3):
        y = call(x)
        y.sum().backward()
        assert (x == 1).all()
        assert (y == 3).all()
    assert (x.grad == 6).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_weak_types(dtype, jit):
    """Python numbers take the dtype of the array, as in jax."""
    call = dlx.using("jax", grad=True)(jit(lambda x, n: x * n * 2.0))
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    for _ in range(3):
        x.grad = None
        y = call(x, 1.5)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == dtype
        assert x.grad.tolist() == [3, 3, 3]


def test_the_latest_compiled_derivatives_are_kept():
    """An additional one replaces only the oldest."""
    call = CompiledCalls(None, None)
    for n in range(MAX_KNOWN + 1):
        _add(call._known, n, n)
    assert list(call._known) == list(range(1, MAX_KNOWN + 1))


# ---- jax calls torch -------------------------------------------------------------------------------------------------


@pytest.mark.few(10)
@pytest.mark.parametrize("name", TO_TORCH)
def test_jax_differentiates_torch(name):
    """Numerical and computed gradients agree, and so do some second derivatives."""
    function, *shapes = TO_TORCH[name]
    decorated = dlx.using("torch", grad=True)(function)
    arrays = [jnp.asarray(each) for each in _values(shapes)]
    check_grads(decorated, arrays, 2 if name in SECOND else 1, modes=["rev"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [lambda z, w: z * w, lambda z, w: z.conj() * w + z, lambda z, w: torch.exp(z) + w**2],
    ids=["times", "conjugate", "exp"],
)
def test_jax_differentiates_complex_functions_of_torch(function):
    """Gradients follow jax's convention, which differs from torch's."""
    arrays = [jnp.asarray(each) for each in _values([(3,), (3,)], np.complex128)]
    check_grads(dlx.using("torch", grad=True)(function), arrays, 1, modes=["rev"], rtol=1e-5, atol=1e-5)


def _layer(x, w):
    return torch.tanh(x @ w).sum(-1)


def _twin(x, w):
    return jnp.tanh(x @ w).sum(-1)


def test_under_jit_grad_and_vmap():
    """In any order, and twice, results match an equal function in jax."""
    layer = dlx.using("torch", grad=True)(_layer)
    x, w = (jnp.asarray(each) for each in _values([(4, 3), (3, 2)]))
    loss = lambda function: lambda x, w: (function(x, w) ** 2).mean()  # noqa: E731
    expected = jax.grad(loss(_twin), (0, 1))(x, w)
    for found in (
        jax.grad(loss(layer), (0, 1))(x, w),
        jax.jit(jax.grad(loss(layer), (0, 1)))(x, w),
        jax.grad(jax.jit(loss(layer)), (0, 1))(x, w),
    ):
        assert all(map(np.allclose, found, expected))
    assert np.allclose(jax.jit(layer)(x, w), _twin(x, w))
    assert np.allclose(jax.vmap(layer, (0, None))(x, w), _twin(x, w))
    assert np.allclose(layer(x, w), _twin(x, w))
    hessian = jax.jit(jax.jacrev(jax.jacrev(lambda x: loss(layer)(x, w))))
    assert np.allclose(hessian(x), jax.jacrev(jax.jacrev(lambda x: loss(_twin)(x, w)))(x))


def test_trees_integers_and_keywords_from_jax():
    """They work with and without jit."""

    @dlx.using("torch", grad=True)
    def function(tree, *, n, kind):
        return {"y": tree["x"] * n, "n": n + 1, "kind": kind}

    def loss(x):
        found = function({"x": x}, n=jnp.arange(3), kind="k")
        assert found["kind"] == "k"
        return found["y"].sum() + found["n"].sum()

    for each in (jax.grad(loss), jax.jit(jax.grad(loss))):
        assert each(jnp.ones(3)).tolist() == [0, 1, 2]


def test_a_function_that_cannot_be_tried_without_data():
    """It works outside `jit`, and inside with result_like=."""

    def picked(x):
        return x[: int(x.sum().item())]

    x = jnp.ones(3)
    assert jax.grad(lambda x: dlx.using("torch", grad=True)(picked)(x).sum())(x).tolist() == [1, 1, 1]
    with pytest.raises(Exception, match=r"(?s)result_like="):
        jax.jit(dlx.using("torch", grad=True)(picked))(x)
    for like in (jax.ShapeDtypeStruct((3,), "float64"), np.ones(3), lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)):
        declared = dlx.using("torch", grad=True, result_like=like)(picked)
        assert jax.jit(declared)(x).tolist() == [1, 1, 1]
        assert jax.jit(jax.grad(lambda x, f=declared: f(x).sum()))(x).tolist() == [1, 1, 1]


def test_results_stand_where_they_were_declared():
    """Results are matched by key, in any order."""
    spec = jax.ShapeDtypeStruct((3,), "float64")
    swapped = dlx.using("torch", grad=True, result_like={"a": spec, "b": spec})(lambda x: {"b": x * 2, "a": x * 10})
    found = jax.jit(swapped)(jnp.ones(3))
    assert (found["a"].tolist(), found["b"].tolist()) == ([10] * 3, [2] * 3)


def test_torch_cannot_write_to_arrays_of_jax():
    """Detaching does not help either."""
    x = jnp.ones(64)

    def function(x):
        x.data.mul_(3)
        return x * 2

    jax.grad(lambda x: dlx.using("torch", grad=True)(function)(x).sum())(x)
    assert x.tolist() == [1] * 64


def test_in_inference_mode():
    """The mode belongs to the caller; the function is still differentiated."""
    with torch.inference_mode():
        found = jax.grad(lambda x: dlx.using("torch", grad=True)(lambda x: x * 3)(x).sum())(jnp.ones(3))
    assert found.tolist() == [3, 3, 3]


FRESH = """
import jax, jax.numpy as jnp, torch, dlx
like = lambda x: jax.ShapeDtypeStruct((2,), x.dtype)
print(jax.jit(dlx.using("torch", grad=True, result_like=like)(lambda x: x[:2]))(jnp.ones(3)))
"""


def test_results_are_declared_in_a_fresh_process(python):
    """No adapter has been loaded before."""
    assert python(FRESH, args=(), imported=True).strip() == "[1. 1.]"


@pytest.mark.parametrize("compiled", [False, True])
def test_random_numbers_are_the_same_on_the_way_back(compiled):
    """Dropout uses the same mask, also in second derivatives and under `vmap`; the caller's generator is unaffected."""
    dropped = dlx.using("torch", grad=True)(lambda x: torch.nn.functional.dropout(x * x, 0.5))

    def both(x):
        y, pull = jax.vjp(dropped, x)
        return y, pull(jnp.ones_like(y))[0]

    def second(x):
        first, pull = jax.vjp(lambda x: jax.grad(lambda x: dropped(x).sum())(x), x)
        return first, pull(jnp.ones_like(first))[0]

    x = jnp.arange(1.0, 65.0)
    jit = jax.jit if compiled else lambda function: function
    masks = []
    for function in (both, jax.vmap(both)):
        now = x if function is both else x.reshape(4, 16)
        y, gradient = jit(function)(now)
        assert np.allclose(np.where(y > 0, 4 * now, 0), gradient)
        masks.append(np.asarray(y).ravel() > 0)
    assert 0 < masks[0].sum() < 64
    assert not np.array_equal(*masks)
    first, then = jit(second)(x)
    assert np.allclose(np.asarray(then) * x, first)


@pytest.mark.parametrize("outer", ["torch", "jax"])
@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_random_numbers_of_nested_functions(outer, jit):
    """Torch draws once within a function of jax, whichever framework differentiates."""
    drawn = []

    def drop(x):
        mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
        drawn.append(mask)
        return mask * x * x

    like = {"result_like": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)}
    inner = dlx.using("torch", grad=True, **like)(drop)
    middle = dlx.using("jax", grad=True)(jit(lambda x: inner(x) * 2))
    if outer == "torch":
        x = torch.arange(1.0, 65.0).requires_grad_()
        y = middle(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    else:
        x = jnp.arange(1.0, 65.0)
        y, pull = jax.vjp(dlx.using("torch", grad=True, **like)(lambda x: middle(x * 1)), x)
        (gradient,) = pull(jnp.ones_like(y))
    y, x = np.asarray(dlx.convert(y, "numpy", detach=True)), np.arange(1.0, 65.0)
    assert 0 < (y > 0).sum() < 64
    assert np.allclose(np.asarray(dlx.convert(gradient, "numpy")), 2 * y / x)
    assert all(torch.equal(drawn[0], each) for each in drawn)


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_random_numbers_of_nested_functions_in_second_derivatives(jit):
    """They are the same there, and torch's generator is not affected."""
    like = {"result_like": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)}
    inner = dlx.using("torch", grad=True, **like)(lambda x: torch.nn.functional.dropout(x, 0.5) * x * x)
    middle = dlx.using("jax", grad=True)(jit(lambda x: inner(x) * 2))
    x = torch.arange(1.0, 65.0, dtype=torch.float32).requires_grad_()
    y = middle(x)
    state = torch.get_rng_state()
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(torch.get_rng_state(), state)
    y, x = y.detach(), x.detach()
    assert 0 < (y > 0).sum() < 64
    assert torch.allclose(first, 3 * y / x)
    assert torch.allclose(second, 6 * y / x**2)


@pytest.mark.parametrize("how", ["hooks", "checkpoint"])
def test_random_numbers_of_nested_functions_that_run_again(how):
    """Replaced saved tensors make the function run again with the same random numbers."""
    like = {"result_like": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)}
    inner = dlx.using("torch", grad=True, **like)(lambda x: torch.nn.functional.dropout(x, 0.5) * x)
    middle = dlx.using("jax", grad=True)(lambda x: inner(x) * 2)
    x = torch.arange(1.0, 65.0).requires_grad_()
    if how == "checkpoint":
        y = torch.utils.checkpoint.checkpoint(middle, x, use_reentrant=False)
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            y = middle(x)
    y.sum().backward()
    assert 0 < (y > 0).sum() < 64
    assert torch.allclose(x.grad, 2 * y.detach() / x.detach())


def test_random_numbers_in_threads():
    """Dropout uses the same mask in each thread, or raises an error."""
    dropped = dlx.using("torch", grad=True)(lambda x: torch.nn.functional.dropout(x, 0.5) * x)
    x, wrong = jnp.arange(1.0, 17.0), []

    def run():
        def both(x):
            y, pull = jax.vjp(dropped, x)
            return y, pull(jnp.ones_like(y))[0]

        function = jax.jit(both)
        for _ in range(20):
            y, gradient = function(x)
            wrong.append(not np.allclose(gradient, 2 * y / x))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == [False] * 40


def test_random_numbers_that_others_draw_meanwhile():
    """They make a replay fail with an error; a function without random numbers is not affected."""
    others = []

    def function(x, drops=True):
        y = torch.nn.functional.dropout(x, 0.5) if drops else x
        if not others:  # in the first run only
            others.append(torch.rand(1))
        return y * x

    x = jnp.arange(1.0, 17.0)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = dlx.using("torch", grad=True, result_like=like)(function)
    with pytest.raises(Exception, match="drew other random numbers in the backward pass"):
        jax.block_until_ready(jax.jit(jax.grad(lambda x: call(x).sum()))(x))
    others.clear()
    plain = dlx.using("torch", grad=True, result_like=like)(functools.partial(function, drops=False))
    assert np.allclose(jax.jit(jax.grad(lambda x: plain(x).sum()))(x), 2 * x)


def test_operations_keep_no_tracers():
    """Jax's leak checker confirms it."""
    call = dlx.using("torch", grad=True)(lambda tree, n: {"y": tree["x"].sin() * n})
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    declared = dlx.using("torch", grad=True, result_like=like)(torch.sin)
    loss = lambda x: call({"x": x}, 2.0)["y"].sum() + declared(x).sum()  # noqa: E731
    with jax.checking_leaks():
        x = jnp.ones(3)
        found = [jax.grad(loss)(x), jax.jit(jax.grad(loss))(x), jax.grad(jax.jit(loss))(x)]
        jax.vmap(lambda x: call({"x": x}, 2.0)["y"])(jnp.ones((2, 3)))
        jax.jit(jax.jacrev(jax.grad(loss)))(x)
        for function in (jnp.sin, jax.jit(jnp.sin)):
            given = torch.ones(3, dtype=torch.float64, requires_grad=True)
            dlx.using("jax", grad=True)(function)(given).sum().backward()
            assert given.grad.tolist() == pytest.approx([np.cos(1.0)] * 3)
    assert all(np.allclose(each, 3 * np.cos(1.0)) for each in found)


def test_modules_that_keep_what_they_computed():
    """A trial would leave abstract tensors in them, so it is refused; `result_like` avoids it."""

    class Keeping(torch.nn.Module):
        def forward(self, x):
            self.kept = x * 2
            return x + 1

    x = jnp.ones(3)
    with pytest.raises(Exception, match=r"(?s)keeps a tensor of its trial.*float64\[3\] in Keeping.kept.*result_like="):
        jax.jit(dlx.using("torch", grad=True)(Keeping()))(x)
    module = Keeping()
    assert jax.jit(dlx.using("torch", grad=True, result_like=x)(module))(x).tolist() == [2] * 3
    assert module.kept.tolist() == [2] * 3


def test_only_the_gradients_that_are_asked_for_are_computed():
    """The other arguments are constants to the function's framework."""
    seen = []

    def times(x, y):
        seen.append((x.requires_grad, y.requires_grad))
        return x * y

    x = jnp.ones(3)
    for jit in (lambda function: function, jax.jit):
        seen.clear()
        assert jit(jax.grad(lambda x, y: dlx.using("torch", grad=True)(times)(x, y).sum()))(x, x).tolist() == [1] * 3
        assert (True, True) not in seen
        assert (True, False) in seen


def test_exceptions_of_torch_arrive_in_jax():
    """They are raised unchanged."""

    def raises(x):
        raise Planned("inside")

    with pytest.raises(Planned, match="inside"):
        jax.grad(dlx.using("torch", grad=True)(raises))(1.0)


def test_two_that_record_are_refused():
    """No framework could differentiate both."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(dlx.errors.ConversionError, match="jax and torch both"):
        jax.grad(lambda y: dlx.using("numpy", grad=True)(lambda x, y: y)(x, y).sum())(jnp.ones(2))


def test_parameters_of_a_module_are_its_own():
    """Passed parameters have gradients in their framework; the module's parameters have none."""
    module = torch.nn.Linear(3, 2).double()

    @dlx.using("torch", grad=True)
    def called(parameters, x):
        return torch.func.functional_call(module, parameters, (x,))

    parameters = {name: jnp.asarray(each.detach().numpy()) for name, each in module.named_parameters()}
    x = jnp.ones((4, 3))
    found = jax.grad(lambda parameters: called(parameters, x).sum())(parameters)
    assert found["bias"].tolist() == [4, 4]
    assert np.allclose(found["weight"], 4)
    assert all(each.grad is None for each in module.parameters())
    assert np.allclose(dlx.using("torch", grad=True)(module)(x), module(torch.ones(4, 3).double()).detach())


def test_nothing_is_left_behind():
    """Calls with and without a backward pass leave nothing behind."""
    function, live = dlx.using("jax", grad=True)(lambda x: jnp.sin(x)), native.live()
    for _ in range(20):
        x = torch.ones(100, requires_grad=True)
        function(x).sum().backward()
        function(x)
        del x
    gc.collect()
    assert native.live() <= live


def test_no_warnings():
    """No framework warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.ones(3, requires_grad=True)
        dlx.using("jax", grad=True)(jnp.sin)(x).sum().backward()
        jax.grad(lambda x: dlx.using("torch", grad=True)(torch.sin)(x).sum())(jnp.ones(3))


@pytest.mark.parametrize("name", ["torch_with_jax", "jax_with_torch"])
@pytest.mark.slow
def test_the_examples_agree_with_their_twins(name):
    """Losses of 200 steps agree to 1e-5."""
    pytest.importorskip("sklearn")
    if name == "jax_with_torch":
        pytest.importorskip("optax")
    path = ROOT / "examples" / "train_across" / f"{name}.py"
    done = warm.run(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the twin" in done.stdout
