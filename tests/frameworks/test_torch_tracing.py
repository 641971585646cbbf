"""Results of dlx while torch traces are constants of the graph and do not persist outside of it."""

# ruff: noqa: D103, RUF015

import pytest

import dlx
from dlx.errors import ConversionError, FileError

MODES = ("real", "fake", "functionalize")


def traced(torch, mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    one = torch.ones(3)
    if mode == "functionalize":
        return lambda function: make_fx(torch.func.functionalize(function))(one)
    return lambda function: make_fx(function, tracing_mode=mode)(one)


def graph_of(torch, mode, make):
    """Trace a function that writes to the result of `make`."""

    def function(x):
        constant = make()
        constant += x
        return constant * 1

    return traced(torch, mode)(function)


@pytest.fixture
def table(np):
    return np.zeros(3, np.float32)


def readonly(table):
    view = table[:]
    view.flags.writeable = False
    return view


# For an array: functions that return a torch tensor over it, or over a copy.
WAYS = {
    "convert": lambda a, torch: lambda: dlx.convert(a, to="torch"),
    "module": lambda a, torch: lambda: dlx.convert(a, to=torch),
    "type": lambda a, torch: lambda: dlx.convert(a, to=torch.Tensor),
    "like": lambda a, torch: (lambda like: lambda: dlx.convert(a, like=like))(torch.zeros(1)),
    "copy": lambda a, torch: lambda: dlx.convert(a, to="torch", copy=True),
    "no copy": lambda a, torch: lambda: dlx.convert(a, to="torch", copy=False),
    "device": lambda a, torch: lambda: dlx.convert(a, to="torch", device="cpu"),
    "detach": lambda a, torch: lambda: dlx.convert(a, to="torch", detach=True),
    "read-only": lambda a, torch: lambda: dlx.convert(readonly(a), to="torch"),
    "readonly=share": lambda a, torch: lambda: dlx.convert(readonly(a), to="torch", readonly="share"),
    "negative strides": lambda a, torch: lambda: dlx.convert(a[::-1], to="torch"),
    "big-endian": lambda a, torch: lambda: dlx.convert(a.astype(">f4"), to="torch"),
    "dlx.Tensor": lambda a, torch: lambda: dlx.convert(dlx.convert(a, to="dlx"), to="torch"),
    "capsule": lambda a, torch: lambda: dlx.convert(dlx.to_capsule(a), to="torch"),
    "memoryview": lambda a, torch: lambda: dlx.convert(memoryview(a), to="torch"),
    "list": lambda a, torch: lambda: dlx.convert([a], to="torch")[0],
    "dict": lambda a, torch: lambda: dlx.convert({"a": (a, 1)}, to="torch")["a"][0],
    "strict": lambda a, torch: lambda: dlx.convert([a], to="torch", strict=True)[0],
    "collect": lambda a, torch: lambda: dlx.convert([a], to="torch", errors="collect")[0],
    "copied list": lambda a, torch: lambda: dlx.convert([a], to="torch", copy=True)[0],
    "new view": lambda a, torch: lambda: dlx.convert([a], to="torch", lazy=True)[0],
    "list view": lambda a, torch: (lambda view: lambda: view[0])(dlx.convert([a], to="torch", lazy=True)),
    "tuple view": lambda a, torch: (lambda view: lambda: view[-1])(dlx.convert((a,), to="torch", lazy=True)),
    "dict view": lambda a, torch: (lambda view: lambda: view["a"])(dlx.convert({"a": a}, to="torch", lazy=True)),
    "values": lambda a, torch: (lambda view: lambda: [*view.values()][0])(dlx.convert({"a": a}, to="torch", lazy=True)),
    "iteration": lambda a, torch: (lambda view: lambda: [*view][0])(dlx.convert([a], to="torch", lazy=True)),
    "nested view": lambda a, torch: (lambda view: lambda: view["a"][0])(dlx.convert({"a": [a]}, to="torch", lazy=True)),
    "slice": lambda a, torch: (lambda view: lambda: view[:1][0])(dlx.convert([a], to="torch", lazy=True)),
    "record view": lambda a, torch: (lambda view: lambda: view.a)(
        dlx.convert(__import__("types").SimpleNamespace(a=a), to="torch", lazy=True)
    ),
    "materialize": lambda a, torch: (lambda view: lambda: view.materialize()[0])(
        dlx.convert([a], to="torch", lazy=True)
    ),
    "stack": lambda a, torch: lambda: dlx.stack([a, a], to="torch")[0],
    "attach": lambda a, torch: (lambda handle: lambda: dlx.attach(handle, to="torch")["a"])(dlx.share({"a": a})),
    "using, in": lambda a, torch: lambda: dlx.using("torch", returns="torch")(lambda x: x)(a),
    "using, out": lambda a, torch: lambda: dlx.using("numpy", returns="torch")(lambda: a)(),
    "using, out, list": lambda a, torch: lambda: dlx.using("numpy", returns="torch")(lambda: [a])()[0],
}


@pytest.mark.few(35)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_does_not_write_into_what_it_was_made_of(np, torch, table, way, mode):
    """Runs of the graph are independent, and the source is unchanged before, during and after the trace."""
    make = WAYS[way](table, torch)
    before = make()
    graph = graph_of(torch, mode, make)
    assert [graph(torch.ones(3)).tolist() for _ in range(2)] == [[1.0] * 3] * 2
    after = make()
    assert table.tolist() == before.tolist() == after.tolist() == [0.0] * 3
    assert type(after) is torch.Tensor and after.data_ptr() and after.add_(1).tolist() == [1.0] * 3


@pytest.mark.parametrize("way", WAYS)
def test_under_fake_tensor_mode_results_are_fake(np, torch, table, way):
    """Results are fake inside the mode and real again afterwards, from the same cache."""
    make, fake = WAYS[way](table, torch), torch._subclasses.FakeTensorMode()
    with fake:
        made = make()
        assert isinstance(made, torch._subclasses.FakeTensor) and made.add(1).shape == (3,)
    assert type(make()) is torch.Tensor and make().tolist() == [0.0] * 3
    with fake:
        assert isinstance(make(), torch._subclasses.FakeTensor)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors", "a.arrow"])
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_files_are_constants_of_a_graph(np, torch, tmp_path, name, mode):
    """Files opened inside, or opened before and read inside, become constants."""
    path = tmp_path / name
    array = np.zeros(3, np.float32)
    if name == "a.npy":
        np.save(path, array)
    elif name == "a.npz":
        np.savez(path, a=array)
    elif name == "a.safetensors":
        pytest.importorskip("safetensors.numpy").save_file({"a": array}, path)
    else:
        pa = pytest.importorskip("pyarrow")
        column = pa.table({"a": pa.array(array)})
        with pa.ipc.new_file(str(path), column.schema) as writer:
            writer.write(column)
    kept = dlx.open(path, to="torch")
    for make in (lambda: [*kept.values()][0], lambda: [*dlx.open(path, to="torch").values()][0]):
        graph = graph_of(torch, mode, make)
        assert [graph(torch.ones(3)).tolist() for _ in range(2)] == [[1.0] * 3] * 2
        assert make().tolist() == [0.0] * 3


@pytest.mark.parametrize("to", ["torch", "numpy"])
@pytest.mark.parametrize("mode", ["trace", "fake mode"])
def test_a_checkpoint_is_opened_before_a_trace(np, torch, tmp_path, mode, to):
    """torch.load fails inside a trace, and the error says so; reading inside works."""
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(3.0)}, path)
    kept = dlx.open(path, to=to)

    def run(function):
        if mode == "trace":
            return graph_of(torch, "real", function)(torch.ones(3))
        with torch._subclasses.FakeTensorMode():
            return function()

    with pytest.raises(FileError, match=r"a\.pt: torch cannot load a checkpoint while it traces.*Open it before"):
        run(lambda: dlx.open(path, to=to)["a"])
    if mode == "fake mode":
        assert run(lambda: kept["a"]).tolist() == [0.0, 1.0, 2.0]
        return
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: dlx.convert(kept["a"], to="torch") + x)(torch.zeros(3))
    assert [graph(torch.ones(3)).tolist() for _ in range(2)] == [[1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize("options", [{"copy": True}, {"detach": True}])
def test_a_real_tensor_under_fake_tensor_mode(np, torch, options):
    """A real tensor is refused, like in torch, unless the mode allows it."""
    tensor, mode = torch.ones(3, requires_grad="detach" in options), torch._subclasses.FakeTensorMode
    with mode(), pytest.raises(ConversionError, match="convert all Tensors to FakeTensors first"):
        dlx.convert(tensor, to="torch", **options)
    with mode(allow_non_fake_inputs=True):
        assert isinstance(dlx.convert(tensor, to="torch", **options), torch._subclasses.FakeTensor)
    with mode():
        assert dlx.convert(tensor.detach_(), to="torch") is tensor


def test_a_view_keeps_its_results_through_a_trace(np, torch, table):
    """A result from before the trace is the same object afterwards."""
    view = dlx.convert([table, {"a": table}], to="torch", lazy=True)
    first, inner = view[0], view[1]
    graph_of(torch, "real", lambda: view[0])
    assert view[0] is first and view[1] is inner and view[1]["a"] is first


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["fake", "real", "export"])
def test_the_first_call_of_a_process_may_be_traced(python, mode, torch):
    """Routes learnt in a traced first call work outside."""
    python(
        f"""
        import numpy as np, torch, dlx
        from torch.fx.experimental.proxy_tensor import make_fx
        table = np.zeros(3, np.float32)
        def function(x):
            constant = dlx.convert(table, to="torch")
            constant += x
            return constant * 1
        class Net(torch.nn.Module):
            forward = lambda self, x: function(x)
        one = torch.ones(3)
        if {mode!r} == "export":
            graph = torch.export.export(Net(), (one,), strict=False).module()
        else:
            graph = make_fx(function, tracing_mode={mode!r})(one)
        assert [graph(one).tolist() for _ in range(2)] == [[1.0] * 3] * 2
        shared = dlx.convert(table, to="torch")
        shared += 1
        assert type(shared) is torch.Tensor and table.tolist() == [1.0] * 3
        """,
        imported=True,
    )


def test_modes_of_other_threads_are_not_looked_at(np, torch, table):
    """A thread that traces does not affect other threads."""
    import threading

    made = []
    with torch._subclasses.FakeTensorMode():
        thread = threading.Thread(target=lambda: made.append(dlx.convert(table, to="torch")))
        thread.start()
        thread.join()
    assert type(made[0]) is torch.Tensor


def test_c_and_torch_agree_on_when_it_traces(np, torch, table):
    """The C check agrees with torch's Python interface."""
    dlx.convert(table, to="torch")
    answers = []

    def ask(x):
        inner = torch._C
        said = bool(inner._len_torch_dispatch_stack() or inner._are_functorch_transforms_active())
        answers.append((said, pytest.importorskip("dlx_adapters._dlx_torch").is_tracing()))
        return x * 1

    class Asking(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ask(torch.empty(1))
            return function(*args, **(kwargs or {}))

    ask(torch.ones(1))
    traced(torch, "real")(ask)
    torch.vmap(ask)(torch.ones(2))
    with torch._subclasses.FakeTensorMode():
        ask(torch.ones(1))
        with Asking():  # one mode is left
            torch.zeros(1)
    ask(torch.ones(1))
    with torch.inference_mode(), torch.no_grad():
        ask(torch.ones(1))
    with Asking():  # no mode is left
        torch.zeros(1)
    nothing = (False, False)
    assert answers == [nothing, *[(True, True)] * 4, *[nothing] * 3]


@pytest.mark.few(1)
@pytest.mark.parametrize("missing", [["DispatchKey"], ["DispatchKey", "_len_torch_dispatch_stack"]])
def test_a_torch_that_lacks_what_is_asked(python, missing, torch):
    """Results are correct, and constants of a graph."""
    python(
        f"""
        import numpy as np, torch, dlx
        from torch._subclasses import FakeTensorMode
        table, missing = np.zeros(3, np.float32), {missing!r}
        kept = {{name: getattr(torch._C, name) for name in missing}}
        for name in missing:
            delattr(torch._C, name)
        results = [dlx.convert(table, to="torch"), dlx.convert(table[::-1], to="torch")]
        torch._C.DispatchKey = kept["DispatchKey"]  # torch itself needs it
        assert [type(each) for each in results] == [torch.Tensor] * 2
        results[0] += 1
        assert table.tolist() == [1] * 3
        with FakeTensorMode():
            fake = type(torch.zeros(1))
            for source in (table, table[::-1]):
                assert type(dlx.convert(source, to="torch")) is fake
        """,
        imported=True,
    )


@pytest.mark.slow
def test_exported_programs(python, torch):
    """`torch.export` caches traced objects, so this runs in a new process."""
    python(
        """
        import numpy as np, torch
        from tests.frameworks.test_torch_tracing import WAYS
        for name, way in WAYS.items():
            table = np.zeros(3, np.float32)
            make = way(table, torch)
            before = make()

            class Net(torch.nn.Module):
                def forward(self, x):
                    constant = make()
                    constant += x
                    return constant * 1

            graph = torch.export.export(Net(), (torch.ones(3),), strict=False).module()
            found = [graph(torch.ones(3)).tolist() for _ in range(3)]
            assert found == [[1.0] * 3] * 3, (name, found)
            assert table.tolist() == before.tolist() == make().tolist() == [0.0] * 3, name
        """,
        imported=True,
    )


@pytest.mark.parametrize("transform", ["functionalize", "vmap", "grad"])
def test_inside_transforms_of_torch_func(np, torch, table, transform):
    """Constants work like those of `torch.from_numpy`."""
    function = getattr(torch.func, transform)
    view = dlx.convert([table], to="torch", lazy=True)
    for make in (lambda: dlx.convert(table, to="torch"), lambda: view[0], lambda: dlx.stack([table], to="torch")[0]):
        if transform == "functionalize":
            assert function(lambda x: make().add_(x) * 1)(torch.ones(3)).tolist() == [1.0] * 3  # noqa: B023
        elif transform == "vmap":
            assert function(lambda x: make() + x)(torch.ones(2)).tolist() == [[1.0] * 3] * 2  # noqa: B023
        else:
            assert function(lambda x: (make() + x).sum())(torch.ones(3)).tolist() == [1.0] * 3  # noqa: B023
        assert table.tolist() == [0.0] * 3 and type(make()) is torch.Tensor
        assert make().tolist() == [0.0] * 3
