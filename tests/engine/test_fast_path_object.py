"""`dlx.convert` looks like a function; unusual calls reach Python unchanged."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import pydoc
import re
import sys
import weakref

import pytest
from support.processes import warm
from support.processes.calls import called
from support.stress import storage_actions

import dlx
from dlx._core import native

slow = dlx.convert.__wrapped__


def spy():
    """A fast path around a function that tells its arguments, with no route to anywhere."""
    return native.FastPathFunction(lambda *args, **keywords: (args, keywords), lambda kind, to: None, None)


# ---- unusual calls ---------------------------------------------------------------------------------------------------

CALLS = {
    "nothing": ((), {}),
    "object only": ((1,), {}),
    "object by name": ((), {"obj": 1, "to": "dlx"}),
    "to only": ((), {"to": "dlx"}),
    "positional to": ((1, "dlx"), {}),
    "to": ((1,), {"to": "dlx"}),
    "three positional": ((1, "dlx", 3), {}),
    "two and a keyword": ((1, "dlx"), {"copy": True}),
    "to twice": ((1, "dlx"), {"to": "dlx"}),
    "more keywords": ((1,), {"to": "dlx", "copy": None}),
    "keywords the other way": ((1,), {"copy": None, "to": "dlx"}),
    "like": ((1,), {"like": 2}),
    "another keyword": ((1,), {"too": "dlx"}),
    "many": (tuple(range(20)), {f"k{n}": n for n in range(20)}),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_reach_python_as_they_are(call):
    """Calls that the fast path leaves to Python have the same arguments in the same order."""
    args, keywords = CALLS[call]
    found = spy()(*args, **keywords)
    assert found == (args, keywords) and list(found[1]) == list(keywords)


@pytest.mark.parametrize("call", ["nothing", "to only", "three positional", "to twice", "another keyword"])
def test_wrong_calls_have_pythons_error(call):
    """A call with wrong arguments raises the Python function's TypeError."""
    args, keywords = CALLS[call]
    texts = []
    for convert in (dlx.convert, slow):
        with pytest.raises(TypeError) as caught:
            convert(*args, **keywords)
        texts.append(str(caught.value))
    meant = ". Did you mean 'to'?" if call == "another keyword" else ""
    assert texts[0] == texts[1].removesuffix(meant) + meant  # once, also where Python says it itself


class Odd:
    """Neither hashable nor comparable."""

    __hash__ = None

    def __eq__(self, other):
        raise ZeroDivisionError

    def __getattr__(self, name):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "to",
    [3, None, [], {}, Odd(), b"numpy", ("numpy",), "nampy", "", int, sys, object()],
    ids=lambda to: type(to).__name__,
)
def test_odd_targets_have_pythons_error(to):
    """An invalid target raises the error of the Python path, as keyword and as positional argument."""
    texts = []
    for convert in (lambda: dlx.convert(b"x", to=to), lambda: dlx.convert(b"x", to), lambda: slow(b"x", to=to)):
        with pytest.raises(Exception) as caught:
            convert()
        texts.append((type(caught.value), str(caught.value)))
    assert texts[0] == texts[1] == texts[2]


def test_by_position_and_by_keyword(np):
    """The fast path accepts its target by position and by keyword."""
    array = np.arange(3)
    for _ in range(2):
        assert dlx.convert(array, "dlx").data_ptr == dlx.convert(array, to="dlx").data_ptr == array.ctypes.data


def test_like_and_options_after_a_warm_fast_path(np, torch):
    """like=, copy=, readonly= and detach= work if the pair has a route."""
    array = np.arange(3.0)
    for _ in range(2):
        dlx.convert(array, to="torch")
    assert dlx.convert(array, to="torch", copy=True).data_ptr() != array.ctypes.data
    assert dlx.convert(array, like=torch.ones(1)).data_ptr() == array.ctypes.data
    assert dlx.convert(torch.ones(2, requires_grad=True), to="numpy", detach=True).tolist() == [1, 1]


# ---- name, repr and signature ----------------------------------------------------------------------------------------


def test_signature():
    """inspect.signature gives the function's."""
    assert inspect.signature(dlx.convert) == inspect.signature(slow)
    assert list(inspect.signature(dlx.convert).parameters)[:4] == ["obj", "to", "like", "device"]


def test_what_wraps_it_is_called_itself():
    """functools.wraps copies the attributes; calls do not depend on any of them."""

    @functools.wraps(dlx.convert)
    def wrapper(*args, **options):
        return args, options

    assert wrapper.__call__(1, to=2) == wrapper(1, to=2) == ((1,), {"to": 2})


def test_names_and_doc():
    """Name, qualified name, module, doc and annotations are the function's; __wrapped__ is the function."""
    assert inspect.isfunction(dlx.convert.__wrapped__)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(dlx.convert, name) == getattr(slow, name)
    assert dlx.convert.__name__ == "convert" and "Parameters" in dlx.convert.__doc__
    assert inspect.getdoc(dlx.convert) == inspect.getdoc(slow) and callable(dlx.convert)
    assert inspect.unwrap(dlx.convert) is slow and inspect.getsource(dlx.convert) == inspect.getsource(slow)


def test_help():
    """help(dlx.convert) shows signature and documentation, like for a function."""
    text = pydoc.render_doc(dlx.convert, renderer=pydoc.plaintext)
    assert "Convert an array, or every array in a container" in text
    assert re.search("readonly: '?Readonly'? = 'copy'", text)  # in quotes before Python 3.14
    assert inspect.isroutine(dlx.convert)


def test_a_repr_whose_names_go_meanwhile(python):
    """`repr` keeps both names alive: the text of one runs Python, which may delete the other."""
    python("""
        import dlx
        from dlx._core import native

        class Module:
            def __str__(self):
                function.__dict__.clear()
                return "module"

        class Name:
            def __str__(self):
                return "name"

        function = native.FastPathFunction(lambda obj: obj, None, None)
        for attributes in ({}, {"__qualname__": Name()}, {"__module__": Module()}):
            function.__dict__ = attributes
            assert repr(function).startswith("<function at 0x"), function
        function.__dict__ = {"__qualname__": Name(), "__module__": Module()}
        assert repr(function) == "<function module.name>"
    """)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_by_name(protocol):
    """It is pickled by its name, in every protocol."""
    assert pickle.loads(pickle.dumps(dlx.convert, protocol)) is dlx.convert


def test_copies_are_itself():
    """`copy` and `deepcopy` return the object itself, like for functions."""
    assert copy.copy(dlx.convert) is dlx.convert and copy.deepcopy([dlx.convert])[0] is dlx.convert


def test_as_a_class_attribute_it_binds_as_a_function():
    """As a class attribute it binds like a function or an lru_cache: the first argument is the instance."""
    cached = functools.lru_cache(lambda *args, **keywords: args)
    fast_path = spy()

    class Holder:
        ours, theirs, static = fast_path, cached, staticmethod(fast_path)

    holder = Holder()
    assert type(holder.ours) is type(holder.theirs) and holder.ours.__self__ is holder
    assert holder.ours(1, to=2) == ((holder, 1), {"to": 2}) and holder.theirs(1) == (holder, 1)
    assert Holder.ours is fast_path and Holder.theirs is cached and Holder.static is fast_path
    assert holder.static(1) == ((1,), {})


def test_a_bound_fast_path_is_taken():
    """Bound, it converts the instance itself."""

    class Holder(bytes):
        convert = dlx.convert

    assert Holder(b"abc").convert(to="dlx").shape == (3,)


def test_partial_and_map(np):
    """functools.partial, map and starred calls work as on a function."""
    arrays = [np.arange(n) for n in range(3)]
    to_dlx = functools.partial(dlx.convert, to="dlx")
    assert [t.shape for t in map(to_dlx, arrays)] == [(0,), (1,), (2,)]
    assert dlx.convert(*[arrays[1]], to="dlx").shape == (1,)
    assert dlx.convert.__call__(arrays[2], to="dlx").shape == (2,)


def test_weak_references():
    """It can be weakly referenced, and the callback runs when it is deleted."""
    fast_path, gone = spy(), []
    reference = weakref.ref(fast_path, gone.append)
    assert reference() is fast_path
    del fast_path
    gc.collect()  # without the GIL references to it are only counted then
    assert gone == [reference] and weakref.ref(dlx.convert)() is dlx.convert


def test_a_cycle_is_collected():
    """A fast path that is part of a cycle, through each of its parts, is collected."""
    for part in range(4):
        held = []
        parts = [lambda held=held: held, lambda held=held: held, lambda held=held: held]
        fast_path = native.FastPathFunction(*parts)
        if part < 3:
            parts[part].me = fast_path
        else:
            fast_path.me = fast_path
        gone = weakref.ref(fast_path)
        del fast_path, parts
        gc.collect()
        assert gone() is None, part


def test_parts_are_released():
    """A deleted fast path releases each of its three parts once."""
    parts = [lambda: 1, lambda: 2, lambda: 3]
    before = [sys.getrefcount(part) for part in parts]
    for _ in range(100):
        native.FastPathFunction(*parts)
    gc.collect()
    assert [sys.getrefcount(part) for part in parts] == before


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2), (1, 2, 3, 4)])
def test_a_fast_path_needs_its_parts(arguments):
    """The constructor requires all three parts."""
    with pytest.raises(TypeError):
        native.FastPathFunction(*arguments)


# ---- memory ----------------------------------------------------------------------------------------------------------

PAIRS = ["numpy dlx", "numpy torch", "torch dlx", "torch numpy", "dlx numpy", "dlx torch", "dlx dlx", "torch torch"]


@pytest.mark.parametrize("pair", PAIRS)
def test_calls_leave_nothing_behind(np, torch, pair):
    """10,000 calls leak no reference, and no memory block except free lists."""
    source, target = map(sys.intern, pair.split())
    array = dlx.convert(np.ones(3), to=source)
    convert = dlx.convert
    for _ in range(100):
        convert(array, to=target)
    gc.collect()
    references = sys.getrefcount(array), sys.getrefcount(target)
    blocks = sys.getallocatedblocks()
    for _ in range(10_000):
        convert(array, to=target)
    grown = sys.getallocatedblocks() - blocks
    assert grown < 500 and (sys.getrefcount(array), sys.getrefcount(target)) == references


ALLOCATIONS = """
import gc, sys, tracemalloc
import numpy as np
import dlx

array, convert = np.ones(3), dlx.convert
results = [None] * 1000


def allocated(work):
    # The bytes that work() held at its highest, the measuring itself included: the second of two calls.
    for _ in range(2):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        work()
        _, peak = tracemalloc.get_traced_memory()
    return peak - before


for _ in range(10):
    convert(array, to="dlx")
gc.collect()
gc.disable()
blocks = sys.getallocatedblocks()
for n in range(1000):
    results[n] = convert(array, to="dlx")
assert sys.getallocatedblocks() - blocks <= 1000 + 20
tracemalloc.start()
idle, called = allocated(lambda: None), allocated(lambda: convert(array, to="dlx"))
assert called - idle <= sys.getsizeof(results[0]) + 16, (called, idle)
"""


def test_a_keyword_call_allocates_its_result_only(np, python):
    """A warm call with to= allocates one Python object, the result: no tuple, dict or frame.

    It runs in a new process, since free lists that other tests have filled or emptied would change the count.
    """
    python(ALLOCATIONS, args=())


# ---- storage stays pinned, through the fast path ------------------------------------------------------------------

WARM = """
warm = torch.zeros(3), torch.nn.Parameter(torch.zeros(3), requires_grad=False)
for target in ("numpy", "dlx"):
    for _ in range(3):
        for tensor in warm:
            dlx.convert(tensor, to=target)
import dlx._api.convert
slow = dlx.convert.__wrapped__
def tell(*args, **keywords):
    raise AssertionError("not by the fast path")
lane = dlx.convert
from dlx._core import native
from dlx._engine import fast_path as routes
fast = native.FastPathFunction(tell, routes.learn, dlx._engine.fast_path.consumer_failed)
real = dlx.convert
dlx.convert = lambda x, to, **options: real(x, to=to, **options) if options else fast(x, to=to)
"""
ACTIONS = {
    name: code
    for name, code in storage_actions.ACTIONS.items()
    if name not in ("data = on a parameter", "subclass set_")
} | {
    "data = on a parameter": """
        t = torch.nn.Parameter(source(), requires_grad=False)
        watch(dlx.convert(t, to=target))
        t.data = torch.zeros(1)
    """,
    "module.half()": """
        module = torch.nn.Linear(N // 5, 5, bias=False).requires_grad_(False)
        module.weight.fill_(1)
        watch(dlx.convert(module.weight, to=target), (5, N // 5), (N // 5, 1))
        module.half()
    """,
}


@pytest.fixture(scope="module")
def outcomes():
    """Return the outcome of each action of test_storage if the fast path converts, or the error."""
    import textwrap

    pytest.importorskip("numpy")
    pytest.importorskip("torch")
    actions = {name: textwrap.dedent(code) for name, code in ACTIONS.items()}
    code = f"{storage_actions.PRELUDE}\n{WARM}\nactions = {actions!r}\n{storage_actions.FORKS}"
    done = warm.run(code, timeout=250)
    return done.stdout + done.stderr


@pytest.mark.few(4)
@pytest.mark.torch("2.10")  # older ones have no exchange table
@pytest.mark.parametrize("action", ACTIONS)
def test_results_of_the_fast_path_survive(torch, outcomes, action):
    """After the action on its source, a result of the fast path still has its values, shape and strides."""
    assert f"== {action}: 0\n" in outcomes, outcomes


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_a_route_that_left_the_table_stays_while_a_thread_runs_on_it(python):
    """It is freed when that call is over, and not before: another thread has cleared the routes many times by then."""
    out = python(
        """
        import threading, weakref
        import dlx
        from dlx._core import native
        class Box: pass
        class Kept:
            def __call__(self, tensor): raise AssertionError
        opened, go_on, results = threading.Event(), threading.Event(), []
        def children(box, may_copy):
            opened.set()
            assert go_on.wait(60)
            return [dlx.empty((2,), "float32")]
        kept = Kept()
        dlx.convert(dlx.empty((2,), "float32"), to="dlx")
        target = native.target_find("dlx")
        source = native.Source(Box, what="children", parts=children, export=kept)
        native.pair_add("dlx", source, target, "children")
        del source
        known, kept = weakref.ref(kept), None
        thread = threading.Thread(target=lambda: results.append(dlx.convert(Box(), to="dlx")))
        thread.start()
        assert opened.wait(60)
        for _ in range(100):
            native.routes_clear()
            native.pair_add("dlx", native.Source(Box), target, "python")
        there = known() is not None
        go_on.set()
        thread.join()
        native.routes_clear()
        print(there, known() is None, results[0][0].shape)
        """,
        args=(),
    )
    assert out == "True True (2,)\n"


def test_ten_threads_and_routes_that_are_cleared(np, torch, python):
    """Ten threads convert shared and private arrays while routes are cleared; nothing leaks.

    `nox -s deep` sets DLX_ROUNDS, how often.
    """
    out = python(
        """
        import gc, os, sys, threading
        import numpy as np
        import torch
        import dlx
        from dlx._core import native
        sys.setswitchinterval(1e-5)
        shared = {"numpy": np.arange(1000.0), "torch": torch.arange(1000.0)}
        shared["dlx"] = dlx.convert(np.arange(1000.0), to="dlx")
        failures, rounds = [], int(os.environ.get("DLX_ROUNDS", "100"))
        def work(number):
            try:
                names = ("numpy", "torch", "dlx")
                for _ in range(rounds):
                    for source in names:
                        for target in names:
                            private = dlx.convert(np.full((4, 5), number), to=source)
                            for array in (shared[source], private):
                                result = dlx.convert(array, to=target)
                                back = dlx.convert(result, to="numpy")
                                expected = (1000,) if array is shared[source] else (4, 5)
                                assert back.shape == expected, back.shape
                                assert back.flat[-1] == (999 if len(expected) == 1 else number), back
                    if number == 0:
                        native.routes_clear()
            except BaseException as error:
                failures.append(repr(error))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(10)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not failures, failures
        shared.clear()
        gc.collect()
        print(native.live())
        """,
        args=(),
        imported=True,
    )
    assert out == "0\n"


def test_a_type_without_a_route_is_not_kept(python):
    """The fast path's record of a type of the Python path does not keep the type alive."""
    python(
        """
        import gc, weakref
        import dlx

        class Array(bytearray):
            pass

        for options in ({}, {"copy": True}):
            dlx.convert(Array(b"ab"), to="dlx", **options)
        kept = weakref.ref(Array)
        del Array
        gc.collect()
        assert kept() is None
        """
    )


def test_a_name_that_was_read_takes_the_fast_path(np):
    """A target out of a file or an argument equals the literal and is another object: nothing runs in Python."""
    array = np.ones(2)
    dlx.convert(array, to="dlx")
    for name in ("".join(["d", "lx"]), bytes([100, 108, 120]).decode()):
        assert name is not sys.intern(name)
        assert called(lambda to=name: (dlx.convert(array, to=to), dlx.convert([array, array], to=to))) == ["<lambda>"]
