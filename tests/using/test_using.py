"""`dlx.using`: a function computes in one framework and returns arrays of its caller's framework."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import gc
import inspect

import pytest

import dlx
from dlx import errors
from dlx._core import native

Point = collections.namedtuple("Point", "x y")


@pytest.fixture
def double(torch):
    """A function that doubles tensors and accepts nothing else."""

    @dlx.using("torch")
    def double(x, *more, y=None, **named):
        """Double."""
        for each in (x, *more, *named.values()):
            assert type(each) is torch.Tensor
        return x * 2 if y is None else {"x": x * 2, "y": y}

    return double


# ---- the framework of the results ------------------------------------------------------------------------------------


def test_results_come_back_in_the_callers_framework(np, torch, double):
    """Callers with numpy, torch and dlx get arrays of their framework."""
    assert type(double(np.ones(2))) is np.ndarray and double(np.ones(2)).tolist() == [2, 2]
    assert type(double(torch.ones(2))) is torch.Tensor
    assert type(double(dlx.convert(np.ones(2), to="dlx"))) is dlx.Tensor
    result = double(np.ones(2), y=[np.ones(1), "text", None, 3])
    assert (
        type(result["x"]) is np.ndarray and type(result["y"][0]) is np.ndarray and result["y"][1:] == ["text", None, 3]
    )


def test_mixed_callers_are_resolved_without_looking_at_the_order(np, torch, double):
    """Arguments in the function's framework do not count; two other frameworks leave the result unchanged."""
    a, t, d = np.ones(2), torch.ones(2), dlx.convert(np.ones(2), to="dlx")
    assert type(double(a, t)) is type(double(t, a)) is np.ndarray
    assert type(double(d, t)) is type(double(t, z=d)) is dlx.Tensor
    assert type(double(a, d)) is type(double(d, a)) is type(double(t, a, d)) is torch.Tensor


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_arrays_and_their_dense_framework_count_as_one(np, torch, double):
    """In any order; a sparse array and an array of another framework are two."""
    sp = pytest.importorskip("scipy.sparse")
    a, m, d = np.ones(2), sp.csr_array(np.eye(2)), dlx.convert(np.ones(2), to="dlx")
    assert type(double(a, m)) is np.ndarray and type(double(m, a)) is sp.csr_array
    assert type(double(m, d)) is type(double(d, m)) is torch.Tensor


def test_returns_names_the_framework(np, torch):
    """A name, module or type overrides the rule, even without arrays."""
    for name, kind in (("numpy", np.ndarray), (torch, torch.Tensor), (dlx.Tensor, dlx.Tensor)):
        make = dlx.using("torch", returns=name)(lambda *args: torch.ones(1))
        assert type(make()) is kind and type(make(np.ones(1), torch.ones(1))) is kind


def test_generic_producers_and_callers_without_arrays_get_what_the_function_made(np, torch, double):
    """Frameworks that cannot import arrays do not determine the results' framework."""

    class Stranger:
        def __dlpack__(self, *, max_version=None):
            return dlx.convert(np.ones(2), to="dlx").__dlpack__(max_version=max_version)

    assert type(double(Stranger())) is torch.Tensor
    assert type(dlx.using("torch")(lambda n: torch.ones(n))(2)) is torch.Tensor
    assert dlx.using("torch")(lambda n: n + 1)(2) == 3


def test_arrays_in_trees_go_in_and_come_out(np, torch):
    """Containers of arguments and results keep their types."""

    @dlx.using("torch")
    def swap(pair, table):
        assert type(pair) is Point and type(pair.x) is torch.Tensor and type(table) is collections.OrderedDict
        return Point(pair.y + 1, pair.x + 1), [table["k"] * 2]

    result, (double,) = swap(Point(np.zeros(1), np.ones(1)), table=collections.OrderedDict(k=np.ones(1)))
    assert type(result) is Point and result.x.tolist() == [2] and type(double) is np.ndarray


def test_lazy_results_are_views(np, torch):
    """A container is returned as a view; arguments in it are the caller's objects."""
    array = np.ones(2)
    view = dlx.using("torch", lazy=True)(lambda x: [x * 2, x])(array)
    assert "lazy list[2] -> numpy" in repr(view)
    assert type(view[0]) is np.ndarray and view[1] is array


# ---- the caller's own objects ----------------------------------------------------------------------------------------


def test_an_argument_that_is_handed_back_is_the_callers_own(np, torch):
    """It is returned alone, in a container, from a container, and if results stay in the function's framework."""
    a, b, inner = np.ones(2), np.ones(2)[::-1], [np.ones(1)]
    same = dlx.using("torch")(lambda *args: args[0] if len(args) == 1 else args)
    assert same(a) is a and same(b) is b
    result = same(a, b, inner)
    assert result[0] is a and result[1] is b and result[2] is inner
    table = {"k": [a, {"d": b}], "n": 1}
    assert same(table) is table and same([table, 1])[0] is table

    def grow(tree):
        tree["k"].append(3)
        return tree

    grown = dlx.using("torch")(grow)(table)
    assert grown is not table and grown["k"][2] == 3 and grown["k"][0] is a and grown["k"][1] is table["k"][1]
    d = dlx.convert(a, to="dlx")
    mixed = dlx.using("torch")(lambda x, y: {"x": x, "y": y, "sum": torch.ones(1)})(a, d)
    assert mixed["x"] is a and mixed["y"] is d and type(mixed["sum"]) is torch.Tensor


def test_what_is_there_already_is_not_touched(torch):
    """Tensors of the function's framework keep their graph, and so do results."""
    leaf = torch.ones(2, requires_grad=True)
    result = dlx.using("torch")(lambda x: x * 2)(leaf)
    result.sum().backward()
    assert leaf.grad.tolist() == [2, 2]


def test_gradients_stay_in_the_function(np, torch):
    """By default, results with gradients are detached; detach=False raises."""
    weight = torch.ones(2, requires_grad=True)
    assert type(dlx.using("torch")(lambda x: x * weight)(np.ones(2, "f4"))) is np.ndarray
    with pytest.raises(errors.ConversionError, match="grad") as caught:
        dlx.using("torch", detach=False)(lambda x: [x * weight])(np.ones(2, "f4"))
    assert caught.value.where == "result[0]"


# ---- writes ----------------------------------------------------------------------------------------------------------


def test_writes_to_shared_memory_are_there(np, torch):
    """They need no write-back."""
    array = np.zeros(3)
    dlx.using("torch")(lambda x: x.add_(1))(array)
    assert array.tolist() == [1, 1, 1]


@pytest.mark.parametrize("inference", [False, True])
def test_writes_to_a_copied_tensor_are_written_back(np, torch, inference):
    """A copied tensor is written back if torch counted a write."""
    base = np.arange(4.0)
    reverse = base[::-1]
    add = dlx.using("torch")(lambda x, times: [x.add_(10) for _ in range(times)])
    with torch.inference_mode(inference):
        add(reverse, 0)
        assert base.tolist() == [0, 1, 2, 3]
        add({"k": [reverse]}["k"][0], 1)
    assert base.tolist() == [10, 11, 12, 13]
    dlx.using("torch")(lambda tree: tree["k"][0].zero_())({"k": [reverse]})
    assert base.tolist() == [0] * 4


def test_writes_that_cannot_be_written_back_are_an_error(np, torch):
    """Read-only memory is copied for torch, so a write would be lost."""
    locked = np.broadcast_to(np.float32(1), (3,))
    assert dlx.using("torch")(lambda x: x + 1)(locked).tolist() == [2, 2, 2]
    with pytest.raises(errors.ReadOnlyError, match="wrote to a copy of it") as caught:
        dlx.using("torch")(lambda first, x: x.add_(1))(1, locked)
    assert caught.value.where == "x"
    with pytest.raises(errors.ReadOnlyError) as caught:
        dlx.using("torch")(lambda tree: tree["k"][1].add_(1))({"k": [1, locked]})
    assert caught.value.where == "tree['k'][1]" and locked.tolist() == [1, 1, 1]


def test_numpy_gets_copies_that_cannot_be_written_to(np, torch):
    """Copies are read-only, since numpy does not count writes; shared arrays stay writable."""
    conj = torch.ones(2, dtype=torch.complex64).conj()
    seen = []

    @dlx.using("numpy")
    def write(x):
        seen.append(x.flags.writeable)
        x += 1

    with pytest.raises(ValueError, match="read-only"):
        write(conj)
    plain = torch.ones(2)
    write(plain)
    assert seen == [False, True] and plain.tolist() == [2, 2]


def test_declared_writes_are_written_back(np, torch):
    """Copies for `writes=` are writable and always written back."""
    base = torch.ones(2, dtype=torch.complex64)

    @dlx.using("numpy", writes="x")
    def write(n, x=None):
        x += n

    write(1, base.conj())
    write(1, x=base.conj())
    assert base.tolist() == [3, 3]
    locked = np.broadcast_to(np.float32(1), (3,))
    ran = []
    with pytest.raises(errors.ReadOnlyError, match="read-only") as caught:
        dlx.using("torch", writes=("x",))(lambda x: ran.append(1))(locked)
    assert caught.value.where == "x" and not ran
    with pytest.raises(TypeError, match="no parameter z"):
        dlx.using("torch", writes="z")(lambda x: x)


def test_writes_before_an_error_are_written_back_as_well(np, torch):
    """The function's error is raised, as with shared memory."""
    base, locked = np.zeros(3), np.broadcast_to(np.float64(1), (3,))

    @dlx.using("torch")
    def fail(*args):
        for x in args:
            x.add_(1)
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        fail(base[::-1], locked)
    assert base.tolist() == [1, 1, 1]


# ---- decorated functions ---------------------------------------------------------------------------------------------


def test_name_signature_and_documentation_survive(torch):
    """Tools see the original function."""

    def function(x: int, /, y: str = "a", *args, key=3, **rest) -> list:
        """Explain."""

    wrapped = dlx.using("torch")(function)
    assert wrapped.__name__ == "function" and wrapped.__doc__ == "Explain." and wrapped.__wrapped__ is function
    assert inspect.signature(wrapped) == inspect.signature(function) and wrapped.__module__ == __name__
    assert dlx.using("torch")(functools.partial(function, 1)) is not None
    assert dlx.using("torch")(max)(1, 2) == 2


def test_methods(np, torch):
    """`self` is passed unchanged, and so is the class of a class method."""

    @dataclasses.dataclass
    class Model:
        weight: object
        calls: int = 0

        @dlx.using("torch")
        def forward(self, x):
            self.calls += 1
            return x * 2

        @classmethod
        @dlx.using("torch")
        def make(cls, x):
            return cls, type(x)

        @dlx.using("torch")
        @staticmethod
        def free(x):
            return type(x).__name__, x + 1

    model = Model(np.ones(1))
    assert model.forward(np.ones(1)).tolist() == [2] and model.calls == 1 and type(model.weight) is np.ndarray
    assert Model.make(np.ones(1)) == (Model, torch.Tensor)
    name, result = Model.free(np.ones(1))
    assert name == "Tensor" and type(result) is np.ndarray


def test_coroutines(np, torch):
    """A coroutine function stays one; writes are written back at the end."""

    @dlx.using("torch")
    async def later(x):
        await asyncio.sleep(0)
        x.add_(1)
        return x * 2

    assert inspect.iscoroutinefunction(later)
    base = np.zeros(2)
    result = asyncio.run(later(base[::-1]))
    assert type(result) is np.ndarray and result.tolist() == [2, 2] and base.tolist() == [1, 1]


def test_generators(np, torch):
    """Yielded, sent, thrown and returned values are converted like arguments and results."""

    @dlx.using("torch")
    def steps(x):
        try:
            sent = yield x * 2
            assert type(sent) is torch.Tensor
            x.add_(1)
            try:
                yield sent
            except ValueError:
                yield x
            return [x + 1]
        finally:
            closed.append(1)

    closed = []
    assert inspect.isgeneratorfunction(steps)
    base, other = np.zeros(2), np.ones(1)
    running = steps(base[::-1])
    assert type(next(running)) is np.ndarray
    assert running.send(other) is other and base.tolist() == [1, 1]
    assert running.throw(ValueError()).tolist() == [1, 1]
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert type(stop.value.value[0]) is np.ndarray and closed == [1]
    running = steps(base)
    next(running)
    running.close()
    assert closed == [1, 1]
    with pytest.raises(errors.AdapterNotFoundError, match=r"at result: .*iterating"):  # its arrays would stay torch's
        dlx.using("torch")(lambda x: iter([x * 2]))(base)


def test_asynchronous_generators(np, torch):
    """They behave like generators."""

    @dlx.using("torch")
    async def steps(x):
        for i in range(3):
            x.add_(1)
            yield x + i

    async def run(array):
        return [y async for y in steps(array)]

    base = np.zeros(2)
    results = asyncio.run(run(base[::-1]))
    assert inspect.isasyncgenfunction(steps) and [y.tolist() for y in results] == [[1, 1], [3, 3], [5, 5]]
    assert all(type(y) is np.ndarray for y in results) and base.tolist() == [3, 3]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors_name_the_parameter(np, torch):
    """The path of an error about an argument begins with the parameter's name."""
    bad = np.array(["x"])
    take = dlx.using("torch")(lambda x, y=0, *rest, **named: None)
    for args, options, where in (
        ((bad,), {}, "x"),
        ((1, [2, bad]), {}, "y[1]"),
        ((1, 2, 3, bad), {}, "rest[1]"),
        ((1,), {"k": {"a": bad}}, "k['a']"),
        ((1,), {"y": Point(1, bad)}, "y.y"),
    ):
        with pytest.raises(errors.DTypeError) as caught:
            take(*args, **options)
        assert caught.value.where == where
    with pytest.raises(errors.AdapterNotFoundError, match="unknown target"):
        dlx.using("nosuch")(lambda x: x)(1)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x]], ids=["alone", "in a list"])
def test_advice_for_a_result_names_convert(np, grad, wrap):
    """`using` has no option that changes the dtype of a result."""
    jax_numpy = pytest.importorskip("jax.numpy")
    if grad:
        torch = pytest.importorskip("torch")
        function, x = dlx.using("torch", grad=True)(lambda x: wrap(x.to(torch.float64))), jax_numpy.ones(2)
    else:
        function, x = dlx.using("numpy")(lambda x: wrap(x.astype("f8"))), jax_numpy.ones(2)
    with pytest.raises(
        errors.DTypeError, match=r"at result.*Pass dtype='float32' to dlx\.convert\(x, to=\.\.\.\) first"
    ):
        function(x)


def test_a_failing_call_leaves_nothing_behind(np, torch):
    """No managed tensors and no used capsules remain."""
    gc.collect()
    live = native.live()
    capsule = dlx.convert(np.ones(1), to="dlx").__dlpack__(max_version=(1, 0))
    take = dlx.using("torch")(lambda *args: 1 / 0)
    with pytest.raises(errors.DTypeError):
        take(capsule, np.array(["x"]))
    assert torch.from_dlpack(capsule).tolist() == [1]
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            take(np.ones(3), np.ones(3)[::-1])
        take_ok = dlx.using("torch")(lambda *args: [x * 2 for x in args])
        take_ok(np.ones(3), np.ones(3)[::-1])
    del capsule
    gc.collect()
    assert native.live() == live


def test_a_call_that_is_refused_gives_capsules_back(np, torch):
    """It also holds for a refusal after arguments were converted, since the function never got them."""
    tensor, locked = dlx.from_dlpack(bytearray(4)), np.arange(4.0)
    locked.flags.writeable = False
    called = []
    for options, arguments in (
        ({"writes": "x"}, (locked,)),
        ({"writes": "x"}, (locked, [1, {"a": 2}])),
        ({"returns": "nosuch"}, (1,)),
    ):
        take = dlx.using("torch", **options)(lambda x, *rest: called.append(1))
        capsule = tensor.__dlpack__(max_version=(1, 0))
        with pytest.raises(errors.DlxError):
            take(*arguments, capsule, {"b": [capsule]})
        assert not called and torch.from_dlpack(capsule).shape == (4,)


# ---- writes, once more -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["data", "numpy", "view"])
def test_a_declared_write_is_written_back_however_it_was_made(np, torch, path):
    """Torch does not count writes through .data or .numpy(); a parameter in `writes` is written back anyway."""

    @dlx.using("torch", writes="x")
    def fill(x):
        if path == "numpy":
            x.numpy()[:] = 5
        else:
            (x.data if path == "data" else x[:]).fill_(5)

    base = np.zeros(3, "f4")
    fill(base[::-1])
    assert base.tolist() == [5, 5, 5]


@pytest.mark.parametrize("kind", ["generator", "asynchronous"])
@pytest.mark.parametrize("writes", [(), "x"], ids=["counted", "declared"])
def test_a_later_step_writes_back_what_it_wrote_only(np, torch, writes, kind):
    """The caller's writes between two steps are kept; an array in `writes` is written back after each step."""
    base, seen = np.zeros(2, "f4"), []

    if kind == "generator":

        @dlx.using("torch", writes=writes)
        def steps(x):
            x.add_(1)
            yield
            yield  # nothing is written in this step
            x.add_(1)
            yield

        step = functools.partial(next, steps(base[::-1]))
    else:

        @dlx.using("torch", writes=writes)
        async def steps(x):
            x.add_(1)
            yield
            yield
            x.add_(1)
            yield

        running, loop = steps(base[::-1]), asyncio.new_event_loop()
        step = lambda: loop.run_until_complete(anext(running))  # noqa: E731
    for _ in range(3):
        step()
        seen.append(base.tolist())
        base[:] = 7
    assert seen == ([[1, 1], [1, 1], [2, 2]] if writes else [[1, 1], [7, 7], [2, 2]])
    if kind == "asynchronous":
        loop.run_until_complete(running.aclose())
        loop.close()


def test_a_declared_write_does_not_depend_on_where_else_the_array_stands(np, torch):
    """The same array may be in other parameters, in any order and depth."""

    @dlx.using("numpy", writes="x")
    def add(y, x, *, z=None):
        x["a"] += 1

    for where in ({"y": 0, "x": 1}, {"x": 1, "y": 0}, {"z": 1, "y": 0, "x": 1}):
        odd = torch.zeros(2, dtype=torch.complex64).conj()
        add(**{name: {"a": odd} if name == "x" else [odd] for name in where})
        assert odd.tolist() == [1, 1]
    odd = torch.zeros(2, dtype=torch.complex64).conj()
    with pytest.raises(ValueError, match="read-only"):
        dlx.using("numpy", writes="x")(lambda y, x: y.__iadd__(1))(odd, np.ones(1))


def test_writes_to_arguments_that_share_memory_are_never_lost_silently(np, torch):
    """If one of them is a copy, writes to both raise; writes to one are written back."""

    @dlx.using("torch")
    def both(x, y, *, write_y=True):
        x += 1
        if write_y:
            y += 10

    for pick in (lambda b: (b[::-1][:3], b[::-1][1:]), lambda b: (b, b[::-1]), lambda b: (b[::-1], b)):
        base = np.zeros(4, "f4")
        with pytest.raises(errors.ReadOnlyError, match=r"wrote to it and to [xy]; they share memory"):
            both(*pick(base))
    base = np.zeros(4, "f4")
    both(base[::-1][:3], base[::-1][1:], write_y=False)
    assert base.tolist() == [0, 1, 1, 1]
    base = np.zeros((2, 2), "f4")
    both(base[0, ::-1], base[1, ::-1])
    assert base.tolist() == [[1, 1], [10, 10]]
    base = np.zeros(4, "f4")
    twice = base[::-1]
    both(twice, twice)
    assert base.tolist() == [11] * 4


def test_inference_mode_counts_nothing_and_loses_nothing(np, torch):
    """There, shared arguments have no version, but copied ones do."""
    base, other = np.zeros(3, "f4"), np.zeros(3, "f4")
    with torch.inference_mode():
        dlx.using("torch")(lambda x, y: [x.add_(1), y.add_(2)])(base[::-1], other)
    assert base.tolist() == [1, 1, 1] and other.tolist() == [2, 2, 2]


def test_the_framework_that_was_asked_for_holds_for_unchanged_arguments(np, torch):
    """returns= also applies to the caller's arrays and containers."""
    a, t = np.ones(2), torch.ones(2)
    for name, kind, own in (("numpy", np.ndarray, a), ("torch", torch.Tensor, t)):
        same = dlx.using("torch", returns=name)(lambda *args: list(args))
        result = same(a, t)
        assert [type(each) for each in result] == [kind, kind] and any(each is own for each in result)
        assert dlx.shares_memory(result[0], a) and dlx.shares_memory(result[1], t)
        assert type(dlx.using("torch", returns=name)(lambda x: x)([a, t])[0]) is kind
        view = dlx.using("torch", returns=name, lazy=True)(lambda *args: list(args))(a, t)
        assert [type(each) for each in view] == [kind, kind] and any(each is own for each in view)


def test_defaults_and_decorated_builtins_and_partials(np, torch):
    """Defaults are not converted; any callable can be decorated."""
    default = np.ones(2, "f4")

    @dlx.using("torch")
    def own(x, w=default, *, k=None):
        return type(x), type(w), k

    assert own(np.ones(2)) == (torch.Tensor, np.ndarray, None)
    assert own(np.ones(2), np.ones(2), k="k") == (torch.Tensor, torch.Tensor, "k")
    assert dlx.using("torch")(torch.add)(np.ones(2), np.ones(2)).tolist() == [2, 2]
    assert type(dlx.using("torch")(functools.partial(torch.mul, torch.ones(2) * 3))(np.ones(2))) is np.ndarray


def test_a_generator_that_is_closed_writes_back(np, torch):
    """Writes of its finally clause are written back, too."""

    @dlx.using("torch")
    def steps(x):
        try:
            yield 1
        finally:
            x += 1

    base = np.zeros(2, "f4")
    running = steps(base[::-1])
    next(running)
    running.close()
    assert base.tolist() == [1, 1]


def test_a_refused_write_back_is_not_swallowed_when_a_generator_is_closed(np, torch):
    """The caller of close() gets the error, as at the normal end."""

    @dlx.using("torch")
    def steps(x):
        try:
            yield 1
        finally:
            x.add_(1)

    @dlx.using("torch")
    async def later(x):
        try:
            yield 1
        finally:
            x.add_(1)

    async def close_later(x):
        running = later(x)
        await anext(running)
        await running.aclose()

    def close(x):
        running = steps(x)
        next(running)
        running.close()

    locked = np.broadcast_to(np.float32(1), (3,))
    for run in (close, lambda x: asyncio.run(close_later(x)), lambda x: list(steps(x))):
        with pytest.raises(errors.ReadOnlyError, match="wrote to a copy of it") as caught:
            run(locked)
        assert caught.value.where == "x" and locked.tolist() == [1, 1, 1]


def test_arrays_that_a_parameter_makes_anew_are_declared_as_well(np, torch):
    """It refers to the arrays of this call, not of an earlier flattening."""

    class Pair:
        def __init__(self, base):
            self.base = base

        def __dlx_tree__(self):
            return [self.base[::-1]], lambda children: children

    @dlx.using("torch", writes="x")
    def unseen(x):
        x[0].data[0] = 9

    base = np.zeros(4)
    unseen(Pair(base))
    assert base.tolist() == [0, 0, 0, 9]


def test_many_written_copies_are_compared_in_order_of_address(np, torch, monkeypatch):
    """Not all pairs are compared, but overlapping memory is found."""
    from dlx._api import shares_memory as overlap

    compared = []
    monkeypatch.setattr(overlap, "_meet", lambda a, b, meet=overlap._meet: compared.append(1) or meet(a, b))

    @dlx.using("torch")
    def fill(arrays):
        for array in arrays:
            array += 1

    arrays = [np.zeros(4)[::-1] if i % 2 else np.zeros(4) for i in range(300)]
    fill(arrays)
    assert len(compared) == 0 and all(array.tolist() == [1] * 4 for array in arrays)
    block = np.zeros(8)
    with pytest.raises(errors.ReadOnlyError, match="share memory"):
        fill([*arrays, block[:6], block[:1:-1]])
    assert not block[6:].any()
    fill([block[:4], block[:3:-1]])
    assert block.all()


def test_a_view_that_is_handed_back_is_the_callers_view(np, torch):
    """The result is not the view's container."""
    source = [np.zeros(2), [np.zeros(1)]]
    view = dlx.convert(source, to="torch", lazy=True)
    same = dlx.using("torch")(lambda x: (x, x[1]))
    whole, part = same(view)
    assert whole is view and part is source[1]
    assert same(source)[0] is source


# ---- arrays of other libraries, and calls that are wrong -------------------------------------------------------------


class Computed:
    """An array of another library, unreadable for dlx."""

    def __array__(self, *arguments, **options):
        raise AssertionError("__array__ was called")

    @dlx.using("numpy")
    def method(self, x):
        return self

    @dlx.using("numpy")
    def methods(self, x):
        return [self, x]


def test_an_argument_that_cannot_be_read_is_refused(np, torch):
    """Every call raises the error of `convert`, with the parameter's name."""
    function = dlx.using("numpy")(lambda x, m=None: x)
    for call in (lambda: function(torch.ones(2), Computed()), lambda: function(torch.ones(2), m=[Computed()])):
        for _ in range(2):
            with pytest.raises(errors.AdapterNotFoundError) as caught:
                call()
            assert caught.value.where.startswith("m")


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": [x]}], ids=["root", "list", "tree"])
def test_a_result_that_cannot_be_read_is_refused(np, torch, wrap):
    """It is refused only if it must be converted."""
    made = Computed()
    function = dlx.using("numpy")(lambda x: wrap(made))
    for _ in range(2):
        with pytest.raises(errors.AdapterNotFoundError) as caught:
            function(torch.ones(2))
        assert caught.value.where.startswith("result")
        assert function(np.ones(2)) == function([np.ones(2)]) == wrap(made)


def test_self_is_what_it_is(torch):
    """It holds even if its class is an array of another library."""
    thing, tensor = Computed(), torch.ones(2)
    for _ in range(2):
        assert thing.method(tensor) is thing
        same, back = thing.methods(tensor)
        assert same is thing and back is tensor


@pytest.mark.parametrize("to", [len, lambda x: x, functools.partial(len), 3, None])
def test_a_decorator_without_parentheses_says_how_it_is_written(to):
    """The error is raised immediately, not when the function is called."""
    with pytest.raises(TypeError, match=r'@dlx\.using\("torch"\)'):
        dlx.using(to)


@pytest.mark.parametrize("writes", ["out", 1, (1, "out")])
def test_writes_of_a_function_without_a_signature(np, torch, writes):
    """Keywords are named, positional arguments are numbered."""

    class Unsigned:
        __signature__ = "none"  # inspect refuses it

        def __call__(self, x, out):
            out.copy_(x)

    function = dlx.using("torch", writes=writes)(Unsigned())
    backwards = np.zeros(3)[::-1]
    if writes == "out":
        function(np.arange(3.0), out=backwards)
    else:
        function(np.arange(3.0), backwards)
    assert backwards.tolist() == [0, 1, 2]


@pytest.mark.parametrize("lazy", [False, True])
def test_what_cannot_be_converted_passes(np, torch, lazy):
    """errors="pass": text and objects reach the function and the caller unchanged; they do not choose the framework."""
    batch = {"x": np.ones(2), "label": np.array(["a", "b"]), "day": np.array(["2020-01-01"], "M8[D]")}

    @dlx.using("torch", errors="pass", lazy=lazy)
    def step(batch, *more, **named):
        made = {"y": batch["x"] * 2, "label": batch["label"], "own": np.array(["z"]), "more": more[0], "n": named["n"]}
        return made, [type(each).__name__ for each in batch.values()]

    odd = np.array([None])
    made, kinds = step(batch, odd, n=odd)
    assert kinds == ["Tensor", "ndarray", "ndarray"] and made["y"].tolist() == [2, 2]
    assert type(made["y"]) is np.ndarray and made["own"].tolist() == ["z"]
    assert made["label"] is batch["label"] and made["more"] is made["n"] is odd
    own = dlx.using("torch", errors="pass", returns="torch")(lambda x: {"x": x, "t": np.array(["z"])})(np.ones(1))
    assert type(own["x"]) is torch.Tensor and own["t"].tolist() == ["z"]
    assert type(dlx.using("torch", errors="pass")(lambda x, t: x)(torch.ones(1), odd)) is torch.Tensor
    frozen = np.ones(2)
    frozen.flags.writeable = False
    with pytest.raises(errors.ReadOnlyError):
        dlx.using("torch", errors="pass", writes="x")(lambda x: x)(frozen)
    with pytest.raises(errors.DTypeError):
        dlx.using("torch", lazy=lazy)(lambda batch: batch)(batch)
    with pytest.raises(TypeError, match="errors="):
        dlx.using("torch", errors="pass", grad=True)
    with pytest.raises(ValueError, match="errors must be"):
        dlx.using("torch", errors="collect")
