"""The fast path of generic producers: called once, by the same calls, with the same results as on the Python path."""

from __future__ import annotations

import abc
import enum
import gc
import sys
import threading
import weakref

import pytest
from support.arrays.agreement import agree, outcome, slow

import dlx
from dlx import errors
from dlx._core import native

TARGETS = ("dlx", "numpy", "torch", "jax", "tvm_ffi", "pyarrow")
OPTIONS = (
    {},
    {"copy": True},
    {"copy": False},
    {"readonly": "share"},
    {"readonly": "error"},
    {"detach": True},
    {"device": "cpu"},
)


def there(to):
    """Skip the test if a target is not installed."""
    if to != "dlx":
        pytest.importorskip(to)


class Producer:
    """A producer around a numpy array that records the order of its calls."""

    def __init__(self, array):
        self.array, self.asked = array, []

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.asked.append(("__dlpack__", stream, max_version, dl_device, copy))
        return self.array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        self.asked.append("device")
        return (1, 0)

    @property
    def dtype(self):
        self.asked.append("dtype")
        return self.array.dtype


def arrays(np):
    """Arrays of every kind that numpy exports."""
    base = np.arange(24, dtype="f4").reshape(4, 6)
    locked = base.view()
    locked.flags.writeable = False
    odd = np.frombuffer(bytearray(17), "u1", offset=1).view("f4")
    yield from (base, locked, base.T, base[::2, ::3], base[::-1], base[0, :1].reshape(()), base[:0], odd)
    yield from (np.broadcast_to(base[0], (3, 6)), np.array([True, False]), np.arange(3) * 1j, np.arange(3, dtype="i8"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("to", TARGETS)
def test_both_paths_agree(np, to, options):
    """Both paths have the same result for every producer, and call it once."""
    there(to)
    for array in arrays(np):
        made = []

        def make(array=array, made=made):
            made.append(Producer(array))
            return made[-1]

        agree(make, to, **options)
        calls = [[each for each in producer.asked if isinstance(each, tuple)] for producer in made]
        assert calls[0] == calls[1] == calls[2] and len(calls[0]) <= 1


def test_a_producer_is_asked_the_same_in_the_same_order(np):
    """The dtype, the device, the capsule: as the Python path asks."""
    fast, by_python, planned, *many = [Producer(np.ones(3)) for _ in range(5)]
    dlx.convert(Producer(np.ones(3)), to="numpy")
    dlx.convert(fast, to="numpy")
    slow(by_python, to="numpy")
    dlx.plan(planned, to="numpy")
    slow(many, to="numpy", strict=True)
    once = ["dtype", "device", ("__dlpack__", None, (1, 3), None, None)]
    assert [each.asked for each in (fast, by_python, planned, *many)] == [once] * 5


ANSWERS = {
    "raises": lambda producer, capsule: 1 / 0,
    "raises an error of dlx": lambda producer, capsule: (_ for _ in ()).throw(errors.DeviceError("gone")),
    "raises TypeError": lambda producer, capsule: (_ for _ in ()).throw(TypeError("unexpected keyword argument 'x'")),
    "no capsule": lambda producer, capsule: 3,
    "None": lambda producer, capsule: None,
    "an exception": lambda producer, capsule: ValueError("given, not raised"),
    "a used capsule": lambda producer, capsule: (native.capsule_claim(capsule), capsule)[1],
    "another capsule": lambda producer, capsule: (
        type(sys.modules["datetime"].datetime_CAPI) and sys.modules["datetime"].datetime_CAPI
    ),
}


@pytest.mark.parametrize("in_list", [False, True], ids=["alone", "in a list"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_that_are_no_capsules(np, answer, in_list):
    """The Python path handles a producer's errors and invalid results, without a second call."""

    class Odd(Producer):
        def __dlpack__(self, **options):
            return ANSWERS[answer](self, super().__dlpack__(**options))

    first, made = Producer(np.ones(2)), []

    def make():
        made.append(Odd(np.ones(3)))
        return [first, made[-1]] if in_list else made[-1]

    agree(make, "dlx")
    assert [sum(isinstance(each, tuple) for each in odd.asked) for odd in made] == [1, 1, 1]
    assert sum(isinstance(each, tuple) for each in first.asked) == 3 * in_list


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize("where", ["__dlpack__", "__dlpack_device__", "dtype"])
def test_interrupts_pass(np, error, where):
    """An interrupt, an exit or a lack of memory in a producer ends the call unchanged."""

    def fail(self, **options):
        raise error("now")

    class Interrupted(Producer):
        pass

    setattr(Interrupted, where, property(fail) if where == "dtype" else fail)
    for _ in range(2):
        with pytest.raises(error, match="now"):
            dlx.convert(Interrupted(np.ones(3)), to="dlx")
        with pytest.raises(error, match="now"):
            dlx.convert([Producer(np.ones(3)), Interrupted(np.ones(3))], to="dlx")


class Kind(enum.IntEnum):
    """Device types, as torch names them."""

    HOST = 1


class Unequal:
    """An object that cannot be compared, like a numpy array."""

    __hash__ = None

    def __eq__(self, other):
        raise ValueError("ambiguous")

    def __repr__(self):
        return "Unequal"


DEVICES = [(1, 0), (1, 1), (2, 0), (1, None), [1, 0], (True, 0), (1.0, 0), (1,), None, (1 << 70, 0), ("1", 0)]
DEVICES += [(Kind.HOST, 0), (1, 0.0), (Unequal(), 0), (1, Unequal()), ()]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_devices_that_producers_name(np, device):
    """Both paths read a producer's device in the same way."""

    class Placed(Producer):
        def __dlpack_device__(self):
            return device

    agree(lambda: Placed(np.ones(3)), "dlx")
    if isinstance(device, tuple) and {float, Unequal} & set(map(type, device)):  # no numbers of DLPack
        with pytest.raises(errors.ProtocolError, match="is not a device"):
            slow(Placed(np.ones(3)), to="dlx")


def test_elements_that_are_no_numbers(np):
    """A non-numeric dtype is refused before the producer is called, even after a numeric one."""

    class Kind:
        def __init__(self, name):
            self.name = name

    class Typed(Producer):
        dtype = None

    for name in ("float32", "string", "float32", "resource"):
        producer = Typed(np.ones(3))
        producer.dtype = Kind(name)
        told = outcome(dlx.convert, producer, "dlx", {})
        assert told == outcome(slow, producer, "dlx", {})
        calls = sum(isinstance(each, tuple) for each in producer.asked)
        assert calls == (2 if name == "float32" else 0)


def test_a_tree_calls_each_producer_once(np, torch):
    """Even if the fast path gives up after some calls, or if two producers return the same capsule."""

    class Shared(Producer):
        capsule = None

        def __dlpack__(self, **options):
            self.asked.append(())
            return self.capsule

    def asked(*producers):
        return [sum(isinstance(each, tuple) for each in each.asked) for each in producers]

    one, other, last = (Producer(np.arange(float(n))) for n in (2, 3, 4))
    tree = {"a": one, "b": [other, one, "text"], "c": (last, np.ones(2))}
    made = dlx.convert(tree, to="torch")
    assert made["b"][1] is made["a"] and made["c"][0].tolist() == [0, 1, 2, 3] and asked(one, other, last) == [1, 1, 1]
    with pytest.raises(errors.DTypeError):  # nothing was called: the object array is refused first
        dlx.convert([one, np.array([None])], to="torch")
    assert asked(one) == [1]
    read_only = Producer(np.broadcast_to(np.float32(1), (3,)))
    strict = dlx.convert([one, read_only, last], to="torch", strict=True)  # by the Python path
    assert len(strict) == 3 and asked(one, read_only, last) == [2, 1, 2]
    bad = Producer(np.ones(2))
    bad.array = None  # its __dlpack__ raises AttributeError
    with pytest.raises(errors.ConversionError, match="AttributeError") as caught:
        dlx.convert([one, [bad], last], to="torch")
    assert caught.value.path == (1, 0) and asked(one, bad, last) == [3, 1, 2]
    first, second = Shared(None), Shared(None)
    Shared.capsule = np.ones(3).__dlpack__(max_version=(1, 0))
    with pytest.raises(errors.ConsumedError):
        dlx.convert([first, second], to="dlx")
    assert asked(first, second) == [1, 1]


def test_a_conversion_inside_a_producer(np):
    """A producer whose __dlpack__ converts, itself too, and one that a conversion is left to."""

    class Inner(Producer):
        def __dlpack__(self, **options):
            super().__dlpack__(**options)
            if len(self.asked) > 3 and self.asked.count("inside") == 0:
                self.asked.append("inside")
                dlx.convert(self, to="numpy")
            return dlx.convert(self.array, to="dlx").__dlpack__(max_version=(1, 3), copy=True)

    for to in ("numpy", "dlx"):
        producer = Inner(np.ones(3))
        for _ in range(3):
            assert dlx.convert(producer, to=to).shape == (3,)
        assert sum(isinstance(each, tuple) for each in producer.asked) == 4


def test_other_entry_points_call_once(np):
    """Functions that use the fast path inside ask a producer once each."""
    producer, other = Producer(np.ones(3)), Producer(np.ones(3))
    calls = lambda: sum(isinstance(each, tuple) for each in producer.asked)  # noqa: E731
    for done, call in enumerate(
        (
            lambda: dlx.from_dlpack(producer),
            lambda: dlx.convert(producer, like=np.ones(2)),
            lambda: dlx.convert([producer], to="numpy", lazy=True)[0],
            lambda: dlx.stack([producer, other], to="numpy"),
            lambda: dlx.shares_memory(producer, other),
            lambda: dlx.using("numpy")(lambda x: None)(producer),
            lambda: dlx.convert({"a": [producer]}, to="numpy", detach=True),
        ),
        start=1,
    ):
        call()
        assert calls() == done


def test_a_type_that_is_changed(np):
    """A route holds until the type changes: its methods, or its framework."""

    class Changing(Producer):
        pass

    producer = Changing(np.ones(3))
    for _ in range(2):
        assert dlx.convert(producer, to="dlx").shape == (3,)
    Changing.__dlpack__ = lambda self: np.ones(5).__dlpack__(max_version=(1, 0))
    for _ in range(2):
        assert dlx.convert(producer, to="dlx").shape == (5,)
    del Changing.__dlpack__
    Changing.__bases__ = (Other,)
    for _ in range(2):
        with pytest.raises(errors.AdapterNotFoundError):
            dlx.convert(producer, to="dlx")


class Other:
    """A base without protocols."""

    def __init__(self, array):
        self.array, self.asked = array, []


def test_a_type_may_go(np):
    """The fast path keeps no class alive, and does not confuse it with a later class at the same address."""
    gone = []
    for n in range(300):

        class Brief(Producer):
            def __dlpack__(self, **options):
                return super().__dlpack__(**options)  # `super` has the function hold the class

        kind = type("Briefer", (Producer,), {}) if n % 2 else Brief
        del Brief
        assert dlx.convert(kind(np.ones(n % 3)), to="numpy").shape == (n % 3,)
        gone.append(weakref.ref(kind))
        del kind
    gc.collect()
    assert sum(each() is not None for each in gone) <= 1


def test_a_class_registered_later(np):
    """After any registration with an abstract base class, the type is looked up again."""
    producer = Producer(np.ones(3))
    for _ in range(2):
        dlx.convert(producer, to="dlx")
    abstract = abc.ABCMeta("Abstract", (), {})
    abstract.register(int)
    before = len(producer.asked)
    assert dlx.convert(producer, to="dlx").shape == (3,)
    assert sum(isinstance(each, tuple) for each in producer.asked[before:]) == 1


def test_plain_data_with_a_capsule_passes_through_trees(np):
    """A number that has __dlpack__ is converted at the root, and passes through inside a container."""

    class Number(float):
        def __dlpack__(self, **options):
            return np.ones(1).__dlpack__(max_version=(1, 0))

    number = Number(3)
    for convert in (dlx.convert, dlx.convert, slow):
        assert convert(number, to="dlx").shape == (1,)
        assert convert([number, np.ones(2)], to="dlx")[0] is number


def test_threads(np):
    """The exports left to the Python path stay in their thread."""

    class Odd(Producer):
        def __dlpack__(self, **options):
            super().__dlpack__(**options)
            raise ValueError(self.array)

    producers, wrong = [Odd(n) for n in range(4)], []
    for producer in producers:
        producer.array = np.full(2, producers.index(producer))

    def work(producer):
        for _ in range(200):
            try:
                dlx.convert(producer, to="dlx")
            except errors.ConversionError as error:
                if error.__cause__.args[0] is not producer.array:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(producer,)) for producer in producers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert {sum(isinstance(each, tuple) for each in producer.asked) for producer in producers} == {200}


def test_nothing_is_lost(np, counting):
    """Every capsule is released once, whether consumed, refused, restored, or left to a failing Python path."""

    class Counted(Producer):
        def __dlpack__(self, **options):
            return counting.capsule((3,), **self.array)

    live, before = native.live(), counting.deleted
    for _ in range(3):
        dlx.convert(Counted({}), to="numpy")
        dlx.convert([Counted({}), Counted({"legacy": True})], to="numpy")
        with pytest.raises(errors.ConversionError):
            dlx.convert([Counted({}), Counted({}), Producer(None)], to="numpy")
    gc.collect()
    assert (native.live(), counting.deleted - before) == (live, 15)


def test_answers_that_convert_while_they_are_released(python):
    """Releasing a producer's unused export may run Python code that converts the same object."""
    python("""
        import numpy as np
        import dlx

        class Converts:
            def __del__(self):
                global mode
                mode = "ok"
                inner.append(dlx.convert(producer, to="numpy"))

        class Producer:
            array = np.arange(4.0)

            def __dlpack_device__(self):
                if mode == "interrupted":
                    raise KeyboardInterrupt
                return (1, 0)

            def __dlpack__(self, *, max_version=None, stream=None, dl_device=None, copy=None):
                global mode
                if mode == "raises":
                    mode = "interrupted"
                    raise ValueError("no", Converts())
                return self.array.__dlpack__(max_version=(1, 0))

        mode, inner, producer = "ok", [], Producer()
        for _ in range(3):
            dlx.convert(producer, to="numpy")
        for _ in range(50):
            mode = "raises"
            try:
                dlx.convert(producer, to="numpy")
            except KeyboardInterrupt:
                pass
        assert len(inner) == 50, len(inner)
    """)


def test_a_release_that_converts_takes_no_answer_of_another_call():
    """Memory that is released between the fast path and the Python path of a tree may run Python, which converts."""
    np = pytest.importorskip("numpy")
    calls, tree, armed = [], [], []

    class Owner:
        def __init__(self):
            self.array = np.arange(3.0)
            self.__array_interface__ = self.array.__array_interface__

        def __del__(self):
            dlx.convert(other, to="dlx", strict=True)

    class Named:
        def __init__(self, name):
            self.name, self.array = name, np.arange(4.0)

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, *, max_version=None):
            calls.append(self.name)
            if armed and len(tree) == 2:
                tree.pop()
                raise ValueError("no")
            return self.array.__dlpack__(max_version=(1, 0))

    one, other = Named("one"), Named("other")
    for _ in range(3):
        dlx.convert(one, to="dlx")
        dlx.convert([one, np.arange(2.0)], to="dlx")
    armed.append(1)
    calls.clear()
    tree += [one, np.asarray(Owner())]
    with pytest.raises(errors.DlxError):
        dlx.convert(tree, to="dlx")
    assert calls.count("one") == 1, calls


def test_routes_that_go_before_the_arrays_are_loaded(np, torch, mylib):
    """A producer may load a plugin, which drops all routes; earlier exports are loaded by Python."""
    pytest.importorskip("ml_dtypes")  # numpy uses a storage dtype, or Python registers bfloat16

    class Clears(Producer):
        def __dlpack__(self, **options):
            native.routes_clear()
            return super().__dlpack__(**options)

    def tree(first):
        """Return a list that Python converts, since it has a capsule."""
        return [first, Clears(np.ones(2)), np.ones(2).__dlpack__()]

    source = torch.ones(3, dtype=torch.bfloat16)
    for _ in range(3):
        dlx.convert([source], to="numpy")
        assert dlx.convert(tree(source), to="numpy")[0].dtype.name == "bfloat16"

    def load(tensor):
        raise ValueError("hostile")

    mylib.adapter.load = load
    dlx.convert([np.ones(2)], to="dlx")
    live = native.live()
    for _ in range(3):
        with pytest.raises(errors.ConversionError, match="mylib refused it: ValueError: hostile"):
            dlx.convert(tree(np.ones(2)), to="mylib")
    assert native.live() == live


def test_greenlets_that_end_in_another_order_than_they_began(np, python):
    """An export left to the Python path belongs to its call, even if another call of the thread ends first."""
    pytest.importorskip("greenlet")
    python("""
        import gc
        import dlx
        import greenlet

        class Producer:
            def __init__(self):
                self.is_asked = False

            def __dlpack_device__(self):
                if self.is_asked:  # by the Python path
                    main.switch()
                return (1, 0)

            def __dlpack__(self, *, max_version=None, stream=None, dl_device=None, copy=None):
                self.is_asked = True
                raise ValueError("no")

        def convert():
            try:
                dlx.convert(Producer(), to="numpy")
            except dlx.errors.ConversionError:
                refused.append(1)

        main, refused = greenlet.getcurrent(), []
        for _ in range(3):  # in the main one, which switches to itself: the route is learnt
            convert()
        for first in (0, 1) * 10:
            both = [greenlet.greenlet(convert) for _ in range(2)]
            for each in both:
                each.switch()
            for each in (both[first], both[1 - first]):
                while not each.dead:
                    each.switch()
                gc.collect()
        assert len(refused) == 43, refused
    """)
