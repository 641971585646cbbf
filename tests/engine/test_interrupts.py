"""Interrupts, exits and the lack of memory go on, wherever an Exception would be forgotten for a slower way."""

from __future__ import annotations

import dis
import gc
import sys
from dataclasses import replace

import pytest
from support.foreign.hostile import Owner, tensor

import dlx
from dlx._core import native, stream
from dlx._registry import lookup
from dlx._registry.registry import registry
from dlx.adapter import Adapter, Guard, StreamSupport
from dlx.adapter import Owner as HeldBy
from dlx.errors import path_text

GO_ON = pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])


class Once:
    """A function that raises at its first call and then calls the original."""

    def __init__(self, error, function=lambda *args: False):
        self.error, self.function = error, function

    def __call__(self, *args, **options):
        error, self.error = self.error, None
        if error is not None:
            raise error("now")
        return self.function(*args, **options)


# ---- C ---------------------------------------------------------------------------------------------------------------

SHAPES = {
    "root": lambda obj: obj,
    "option": lambda obj: obj,
    "list": lambda obj: [obj],
    "dict in a tuple": lambda obj: (1, {"a": obj}),
    "batch": lambda obj: [obj, {1.5: obj}],  # the key is left to Python, which asks the fast path for each array
}


def converted(shape, obj, to):
    """Convert an array alone or in a tree."""
    options = {"copy": True} if shape == "option" else {}
    return dlx.convert(SHAPES[shape](obj), to=to, **options)


@GO_ON
@pytest.mark.parametrize("shape", SHAPES)
def test_while_a_route_is_learnt(mylib, monkeypatch, error, shape):
    """The first conversion imports the target framework, which takes seconds; an interrupt ends the call."""
    source = tensor(Owner(64))
    found = sys.modules["dlx._engine.fast_path"].registry
    monkeypatch.setattr("dlx._engine.fast_path.registry", type("R", (), {"target": Once(error, found.target)}))
    live = native.live()
    with pytest.raises(error, match="now"):
        converted(shape, source, "mylib")
    assert native.live() == live
    converted(shape, source, "mylib")


@GO_ON
def test_while_an_adapter_says_how_its_arrays_are_made(mylib, monkeypatch, error):
    """An adapter that fails there has no fast path; one that was interrupted keeps it."""
    monkeypatch.setattr(
        "dlx._engine.fast_path._target_fields", Once(error, sys.modules["dlx._engine.fast_path"]._target_fields)
    )
    with pytest.raises(error, match="now"):
        dlx.convert(tensor(Owner(64)), to="mylib")
    assert dlx.convert(tensor(Owner(64)), to="mylib")


@GO_ON
def test_while_a_type_is_asked_for_its_table(mylib, error):
    """A metaclass may run anything when the exchange table is looked for."""
    asked = Once(error, lambda: None)

    class Meta(type(mylib.Array)):
        def __getattr__(cls, name):
            if name == "__dlpack_c_exchange_api__":
                asked()
            raise AttributeError(name)

    kind = Meta("Array", (mylib.Array,), {"__module__": "mylib"})
    mylib.Array = kind
    source = kind()
    with pytest.raises(error, match="now"):
        dlx.convert(source, to="dlx")
    assert dlx.convert(source, to="dlx").shape == (2, 3)


class Doubtful:
    """An answer whose truth cannot be had."""

    def __init__(self, asked):
        self.asked = asked

    def __bool__(self):
        return self.asked()


def _facts(monkeypatch, adapter, **facts):
    monkeypatch.setattr(adapter, "fast_path", replace(adapter.fast_path, **facts))


def _ask(kind, asked, monkeypatch, adapter):
    _facts(monkeypatch, adapter, guards=(Guard("nasty"),))
    kind.nasty = property(lambda self: asked())


def _truth(kind, asked, monkeypatch, adapter):
    _facts(monkeypatch, adapter, guards=(Guard("nasty"),))
    kind.nasty = Doubtful(asked)


def _truth_with_amend(kind, asked, monkeypatch, adapter):
    _facts(monkeypatch, adapter, owner=HeldBy("itself", f"{kind.__module__}.{kind.__name__}", freeze=("nasty", "mend")))
    kind.nasty, kind.mend, kind.itself = Doubtful(asked), lambda self: None, lambda self: self


def _amend(kind, asked, monkeypatch, adapter):
    _facts(monkeypatch, adapter, owner=HeldBy("itself", f"{kind.__module__}.{kind.__name__}", freeze=("nasty", "mend")))
    kind.nasty, kind.mend, kind.itself = True, lambda self: asked(), lambda self: self


FREEZING = (_truth_with_amend, _amend)
"""What is not asked of an array that is copied: its memory need not stay where it is."""


def _owner(kind, asked, monkeypatch, adapter):
    _facts(monkeypatch, adapter, owner=HeldBy("whose"))
    kind.whose = lambda self: (asked(), self.owner)[1]


def _quick_guard(kind, asked, monkeypatch, adapter):
    _facts(monkeypatch, adapter, guards=(Guard("nasty", kinds=("float",)),))
    kind.nasty = property(lambda self: asked())


@GO_ON
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", [_ask, _quick_guard, _truth, _truth_with_amend, _amend, _owner])
def test_while_an_array_is_examined(mylib, hostile, monkeypatch, error, where, shape):
    """Each question that the fast path asks may be interrupted: the call ends, and nothing is kept."""
    if shape == "option" and where in FREEZING:
        pytest.skip("a copy is asked for")
    asked = Once(None)
    where(mylib.Array, asked, monkeypatch, type(mylib.adapter))
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    source = mylib.Array()
    converted(shape, source, "dlx")
    asked_before = source.asked
    before, live = sys.getrefcount(source), native.live()
    asked.error = error
    with pytest.raises(error, match="now"):
        converted(shape, source, "dlx")
    assert (source.asked, sys.getrefcount(source), native.live()) == (asked_before, before, live)


@pytest.mark.parametrize("shape", ["root", "option"])
@pytest.mark.parametrize("where", [_ask, _quick_guard, _truth, _truth_with_amend, _amend, _owner])
def test_a_question_that_fails_is_left_to_python(mylib, hostile, monkeypatch, where, shape):
    """An Exception leaves the array to Python, which calls the producer."""
    if shape == "option" and where in FREEZING:
        pytest.skip("a copy is asked for")
    asked = Once(None)
    where(mylib.Array, asked, monkeypatch, type(mylib.adapter))
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    source = mylib.Array()
    converted(shape, source, "dlx")
    asked_before = source.asked
    asked.error = ValueError
    converted(shape, source, "dlx")
    assert source.asked == asked_before + 1


@GO_ON
def test_while_a_stream_is_looked_for(cuda, error):
    """Python finds the owner of a consumer's stream when device memory is exported."""
    source, own = dlx.empty((4,), "float32", "cuda:0"), cuda.stream()
    live = native.live()
    native.register(stream_keeper=Once(error, registry.stream_keeper))
    try:
        with pytest.raises(error, match="now"):
            source.__dlpack__(stream=own, max_version=(1, 0))
        assert native.live() == live
    finally:
        native.register(stream_keeper=registry.stream_keeper)


# ---- capsules --------------------------------------------------------------------------------------------------------

CALLS = {
    "dlx": lambda obj: dlx.convert(obj, to="dlx"),
    "numpy": lambda obj: dlx.convert(obj, to="numpy"),
    "copied": lambda obj: dlx.convert(obj, to="numpy", copy=True),
    "list": lambda obj: dlx.convert([obj, b"abc"], to="numpy"),
    "tree": lambda obj: dlx.convert({"a": (obj, b"abc")}, to="dlx"),
}
FILES = ("executor.py", "generic.py", "batch.py", "failures.py")


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_anywhere_gives_a_capsule_back(np, counting, call):
    """At every instruction of a capsule's conversion where Python can be interrupted."""
    state = [0, None, False]
    deaf = {dis.opmap.get(name) for name in ("RETURN_VALUE", "NOT_TAKEN")}  # the latter is in no `try`, from 3.14 on

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        frame.f_trace_opcodes = True
        is_deaf = event == "return" or (event == "opcode" and frame.f_code.co_code[frame.f_lasti] in deaf)
        state[0] -= not is_deaf
        if state[0] == 0 and not is_deaf:
            state[0], state[1], state[2] = -1, (frame.f_code.co_name, frame.f_lineno, event), True
            raise KeyboardInterrupt
        return trace

    CALLS[call](counting.capsule((3,)))
    before, n, seen = sys.gettrace(), 0, 0
    while True:
        n += 1
        state[:] = n, None, False
        capsule, deleted = counting.capsule((3,)), counting.deleted
        try:
            sys.settrace(trace)
            CALLS[call](capsule)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if not state[2]:
            break
        seen += counting.name(capsule) == "dltensor_versioned"
        assert counting.name(capsule) == "dltensor_versioned", state[1]
        del capsule
        if counting.deleted == deleted:
            gc.collect(0)  # frames of the error refer to each other
        assert counting.deleted == deleted + 1, state[1]
    assert seen == n - 1 > 100


def test_interrupts_by_a_timer(python, np):
    """A signal may come whenever it likes: where dlx raised, the capsule is whole again."""
    out = python(
        """
        import random, signal, traceback
        import dlx
        from dlx._core import native
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        memory, interrupted = bytearray(64), 0
        for to in ("dlx", "numpy"):
            dlx.convert(dlx.to_capsule(memory), to)
        random.seed(1)
        for n in range(4000):
            to, options = random.choice([("dlx", {}), ("numpy", {}), ("numpy", {"copy": True})])
            capsule = dlx.to_capsule(memory)
            inside = False
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 2e-4))
                dlx.convert(capsule, to, **options)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt as error:
                inside = any("/dlx/" in f.filename for f in traceback.extract_tb(error.__traceback__))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if inside:
                interrupted += 1
                assert native.capsule_state(capsule) != "used", n
        print(interrupted)
        """,
        args=(),
    )
    assert int(out) > 100


# ---- Python ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_memory(monkeypatch):
    """Make a name of dlx run out of memory."""

    def fail(*args, **options):
        raise MemoryError("now")

    return lambda *names: [monkeypatch.setattr(name, fail, raising=False) for name in names]


class Meta(type):
    """A type that runs out of memory when it is looked at."""

    def __getattr__(cls, name):
        raise MemoryError("now")


class Looked(metaclass=Meta):
    pass


@pytest.mark.parametrize("shape", ["root", "list", "dict in a tuple", "lazily", "strictly", "plan"])
def test_memory_that_runs_out_while_a_type_is_looked_at(shape):
    """An object that raises on inspection is unknown to dlx; a MemoryError propagates."""
    calls = {
        "lazily": lambda: dlx.convert([Looked()], to="dlx", lazy=True)[0],
        "strictly": lambda: dlx.convert([Looked()], to="dlx", strict=True),
        "plan": lambda: dlx.plan([Looked()], to="dlx"),
    }
    with pytest.raises(MemoryError, match="now"):
        calls.get(shape, lambda: converted(shape, Looked(), "dlx"))()


def test_memory_that_runs_out_in_the_tables_of_types():
    """The same during their lookup."""
    with pytest.raises(MemoryError, match="now"):
        lookup.kind(Looked)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_memory_that_runs_out_while_an_object_is_looked_at(no_memory, lazy, strict):
    """An object without a protocol in a tree is checked for each of them."""

    class Thing:
        pass

    no_memory(f"dlx._registry.lookup.{'_has_buffer' if strict else '_find_by_protocol'}")
    with pytest.raises(MemoryError, match="now"):
        tree = dlx.convert([Thing()], to="dlx", lazy=lazy, strict=strict)
        tree[0]


def test_memory_that_runs_out_where_a_buffer_is_asked_for(no_memory):
    """An object whose buffer is unavailable still has one; a MemoryError is passed on."""
    no_memory("dlx._registry.lookup.memoryview")
    with pytest.raises(MemoryError, match="now"):
        lookup._has_buffer(b"")


def test_memory_that_runs_out_in_somebody_elses_attribute():
    """Handles of streams, and keys in an error's place."""

    class Nasty:
        __hash__ = object.__hash__

        @property
        def cuda_stream(self):
            raise MemoryError("now")

        def __repr__(self):
            raise MemoryError("now")

    with pytest.raises(MemoryError, match="now"):
        stream.handle_of(Nasty())
    with pytest.raises(MemoryError, match="now"):
        path_text((Nasty(),))


def test_memory_that_runs_out_in_an_adapter(mylib, monkeypatch):
    """In any call of an adapter, a MemoryError neither disables the framework nor becomes another error."""

    def fail(*args, **options):
        raise MemoryError("now")

    kind = type(mylib.adapter)
    with monkeypatch.context() as patch:
        once = Once(MemoryError, kind.variant)
        patch.setattr(kind, "variant", lambda *args: once(*args))
        with pytest.raises(MemoryError, match="now"):
            dlx.convert(tensor(Owner(64)), to="mylib")
    with monkeypatch.context() as patch:
        patch.setattr("dlx._registry.registry.classes_of", fail)
        with pytest.raises(MemoryError, match="now"):
            registry._classes(mylib.adapter)
    with monkeypatch.context() as patch:
        patch.setattr(mylib.adapter, "describe", Once(MemoryError, mylib.adapter.describe))
        with pytest.raises(MemoryError, match="now"):
            dlx.plan(mylib.Array(), to="dlx")


@pytest.mark.parametrize("what", ["entry points", "framework", "plugin"])
def test_memory_that_runs_out_while_something_is_imported(mylib, monkeypatch, no_memory, what):
    """Nothing is remembered as broken."""
    if what == "entry points":
        no_memory("importlib.metadata.entry_points")
        with pytest.raises(MemoryError, match="now"):
            list(sys.modules["dlx._registry.plugin"].discover())
    elif what == "framework":
        no_memory("dlx._registry.modules.importlib.import_module")
        mylib.adapter.package = "mylib_that_is_not_there"
        with pytest.raises(MemoryError, match="now"):
            sys.modules["dlx._registry.registry"]._import(mylib.adapter)
    else:
        found = sys.modules["dlx._engine.fast_path"].registry
        plugin = sys.modules["dlx_mylib"]
        once = Once(MemoryError, lambda: [mylib.adapter])
        plugin.dlx_adapters = dlx.hookimpl(specname="dlx_adapters")(lambda: once())
        with pytest.raises(MemoryError, match="now"):
            found.target("mylib")
        assert found.target("mylib").name == "mylib"


def test_an_interrupt_before_a_plugin_is_loaded(mylib):
    """It is loaded by the next call; else the thread would take itself for the one that is loading it."""

    class Loading(set):
        def add(self, each):
            super().add(each)
            once()

    found = sys.modules["dlx._engine.fast_path"].registry
    plugin, once = found._loader.plugins["mylib"], Once(KeyboardInterrupt)
    plugin.loading = Loading()
    with pytest.raises(KeyboardInterrupt, match="now"):
        found.target("mylib")
    assert found.target("mylib").name == "mylib"


def test_memory_that_runs_out_while_an_argument_is_written_back(np, torch, monkeypatch):
    """The MemoryError propagates; the argument is not blamed."""
    function = dlx.using("torch", writes="x")(lambda x: x.add_(1))
    monkeypatch.setattr("dlx._using.write_back._copy_into", Once(MemoryError))
    with pytest.raises(MemoryError, match="now"):
        function(np.arange(4.0)[::-1])


def test_memory_that_runs_out_while_streams_are_named(cuda, monkeypatch):
    """A MemoryError propagates from a framework's current stream, and from one that may keep a consumer's stream."""

    class Streams(Adapter):
        name = package = "sys"

        def __init__(self):
            self.streams = StreamSupport(current=self.current)

        def current(self, device):
            raise MemoryError("now")

    with pytest.raises(MemoryError, match="now"):
        sys.modules["dlx._engine.streams"].StreamSync(registry.target("dlx")).producer(Streams(), dlx.Device("cuda:0"))
    monkeypatch.setattr(registry, "adapters", lambda: [Streams()])
    with pytest.raises(MemoryError, match="now"):
        registry.stream_keeper(0, 0x5000)
