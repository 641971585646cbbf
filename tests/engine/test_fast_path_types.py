"""Types on the fast path: array types without number, classes that change, plain and unknown objects in trees."""

import abc
import array
import collections
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import fractions
import gc
import ipaddress
import pathlib
import types
import uuid
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays.agreement import slow
from support.arrays.examples import examples

import dlx
from dlx import errors
from dlx._core import native
from dlx._engine import fast_path

in_c = native.FastPathFunction(lambda *args, **options: NotImplemented, fast_path.learn, fast_path.consumer_failed)


class Colour(enum.Enum):
    RED = 1


class Text(str):
    pass


class Sizes(collections.namedtuple("Sizes", "height width")):
    pass


Plain = collections.namedtuple("Plain", "a b")


@dataclasses.dataclass
class Pair:
    a: object
    b: object


class Hooked:
    """It answers for attributes that it does not have."""

    def __getattr__(self, name):
        raise AttributeError(name)


class Slotted:
    __slots__ = ("x",)


def plain_objects():
    """Return {name: object} for objects in batches that aren't arrays."""
    return {
        "date": datetime.date(2026, 1, 1),
        "timedelta": datetime.timedelta(1),
        "Path": pathlib.Path("a"),
        "Enum": Colour.RED,
        "Decimal": decimal.Decimal(1),
        "Fraction": fractions.Fraction(1, 2),
        "UUID": uuid.UUID(int=1),
        "address": ipaddress.ip_address("::1"),
        "function": plain_objects,
        "lambda": lambda: None,
        "builtin": len,
        "method": [].append,
        "class": Pair,
        "module": types,
        "set": {1, 2},
        "frozenset": frozenset((1, 2)),
        "range": range(3),
        "slice": slice(3),
        "object": object(),
        "SimpleNamespace": types.SimpleNamespace(a=1),
        "str subclass": Text("a"),
        "named tuple": Plain(1, 2),
        "dataclass": Pair(1, 2),
        "slots": Slotted(),
        "array": array.array("i", [1]),
        "memoryview": memoryview(b"ab"),
        "dtype": dlx.DType("float32"),
        "device": dlx.Device("cpu"),
        "error": ValueError("a"),
        "weak reference": weakref.ref(Pair),
        "hook": Hooked(),
    }


def same(one, other, np):
    """Say whether two results have the same types, values and plain objects."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b, np) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key], np) for key in one)
    if hasattr(one, "__dlpack__"):
        return np.array_equal(dlx.convert(one, to="numpy"), dlx.convert(other, to="numpy"))
    if isinstance(one, set | frozenset | Pair | types.SimpleNamespace):
        return one == other
    return one is other


def agree(make, to, np, **options):
    """Compare both paths; the first of two fast-path calls learns the types."""
    results = [convert(make(), to=to, **options) for convert in (dlx.convert, dlx.convert, slow)]
    assert same(results[0], results[2], np) and same(results[1], results[2], np), results


class Learns:
    """A fast path that counts what it learns."""

    def __init__(self):
        self.pairs = []
        self.convert = native.FastPathFunction(dlx.convert.__wrapped__, self.learn, fast_path.consumer_failed)

    def learn(self, kind, to):
        self.pairs.append((kind, to))
        fast_path.learn(kind, to)


@pytest.fixture
def learns():
    """Return a fast path that has learned nothing."""
    native.routes_clear()
    return Learns()


# ---- many types ------------------------------------------------------------------------------------------------------


def test_a_thousand_types_are_learned_once(np, torch, learns):
    """No pair is forgotten because there are many."""
    arrays = [np.ones(2).view(type(f"Kind{i}", (np.ndarray,), {})) for i in range(1000)]
    for each in arrays:
        learns.convert(each, to="torch")
    learned = len(learns.pairs)
    assert learned == 1000
    for _ in range(2):
        assert all(learns.convert(each, to="torch").shape == (2,) for each in arrays)
    assert len(learns.pairs) == learned


def test_types_that_come_and_go_leave_nothing_behind(np, torch):
    """Deleted types take no memory, and none is kept alive."""
    gone = []
    for i in range(700):
        kind = type(f"Kind{i}", (np.ndarray,), {})
        assert in_c(np.ones(2).view(kind), to="torch") is not NotImplemented
        assert in_c([np.ones(2).view(kind), np.ones(2)], to="numpy") is not NotImplemented
        gone.append(weakref.ref(kind))
        del kind
    gc.collect()
    assert sum(each() is not None for each in gone) <= 1


@pytest.mark.parametrize("base", ["unknown", "producer", "record", "list", "text", "target"])
def test_a_class_that_was_converted_can_be_collected(np, torch, base):
    """Nothing that dlx remembers of a class keeps it alive."""

    def make():
        if base == "producer":
            return type("Brief", (), {"__dlpack__": lambda self, **options: np.ones(2).__dlpack__(**options)})
        if base == "record":
            return dataclasses.dataclass(type("Brief", (), {"__annotations__": {"a": object, "b": object}}))
        return type("Brief", {"list": (list,), "text": (str,), "target": (np.ndarray,)}.get(base, ()), {})

    kind = make()
    obj = kind(np.ones(1), 2) if base == "record" else np.ones(2).view(kind) if base == "target" else kind()
    for to in ("numpy", "torch"):
        for _ in range(2):
            dlx.convert([obj, np.ones(2)], to=to)
    gone = weakref.ref(kind)
    del kind, obj
    gc.collect()
    assert gone() is None


def test_a_name_that_is_a_subclass_of_str(np, torch, learns):
    """Each object of it is the same target."""
    for _ in range(3):
        assert type(learns.convert(np.ones(2), to=Text("torch"))) is torch.Tensor
    assert len(learns.pairs) == 1


# ---- classes that change ---------------------------------------------------------------------------------------------


def test_a_class_attribute_that_is_written_between_calls(np, torch, learns):
    """The pair is not learned again, however often: CPython gives such a class no version any more at some time."""
    counted = type("Counted", (np.ndarray,), {"n": 0})
    array = np.ones(2).view(counted)
    for _ in range(2500):
        counted.n += 1
        assert learns.convert(array, to="torch").shape == (2,)
    assert len(learns.pairs) == 1


def test_a_producer_whose_class_is_written_between_calls(np, learns):
    """The calls are the same."""

    class Producer:
        n = 0

        def __dlpack__(self, **options):
            Producer.n += 1
            return np.ones(2).__dlpack__(**options)

    for _ in range(50):
        assert learns.convert(Producer(), to="numpy").shape == (2,)
    assert len(learns.pairs) == 1 and Producer.n == 50


def test_the_class_of_the_target_that_is_written_between_calls(np, torch, learns, monkeypatch):
    """The target accepts the same arrays as before."""
    for n in range(50):
        monkeypatch.setattr(torch.Tensor, "_written_by_a_test", n, raising=False)
        assert type(learns.convert(np.ones(2), to="torch")) is torch.Tensor
    assert len(learns.pairs) == 1


def test_an_attribute_that_matters_is_seen(np, torch, learns):
    """A class with a new export method is exported by it."""
    kind = type("Kind", (np.ndarray,), {})
    array, asked = np.ones(2).view(kind), []
    assert learns.convert(array, to="torch").shape == (2,)

    def export(self, **options):
        asked.append(self)
        return np.ones(5).__dlpack__(**options)

    kind.__dlpack__ = export
    for _ in range(2):
        assert learns.convert(array, to="torch").shape == (5,)
    del kind.__dlpack__
    assert learns.convert(array, to="torch").shape == (2,)
    assert len(asked) == 2


def test_bases_that_change(np, torch, learns):
    """A class that becomes a subclass of another one is looked up again."""

    class Before:
        pass

    class After(dict):
        pass

    class Kind(Before):
        pass

    obj = Kind()
    assert learns.convert([obj, np.ones(2)], to="torch")[0] is obj

    class Exports:
        def __dlpack__(self, **options):
            return np.ones(3).__dlpack__(**options)

    Kind.__bases__ = (Exports,)
    for _ in range(2):
        assert learns.convert([obj, np.ones(2)], to="torch")[0].shape == (3,)
    Kind.__bases__ = (Before,)
    assert learns.convert([obj, np.ones(2)], to="torch")[0] is obj


# ---- plain and unknown objects in trees ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", plain_objects())
def test_a_plain_object_leaves_a_tree_on_the_fast_path(np, torch, name):
    """It passes through, or is made again as the Python path does."""
    obj = plain_objects()[name]
    for _ in range(2):
        found = in_c([np.ones(2), obj, {"a": obj}], to="torch")
    assert found is not NotImplemented and type(found[0]) is torch.Tensor
    agree(lambda: [np.ones(2), obj, {"a": obj}], "torch", np)


def test_objects_of_torch_leave_a_tree_on_the_fast_path(np, torch):
    """Its dtypes, devices and sizes."""
    for obj in (torch.float32, torch.device("cpu"), torch.strided, torch.Size([2]), torch.Generator()):
        for _ in range(2):
            assert in_c([np.ones(2), obj], to="torch") is not NotImplemented, obj
        assert dlx.convert([np.ones(2), obj], to="torch")[1] is obj


def test_unknown_classes_are_learned_once(np, torch, learns):
    """A hundred classes that nothing is known of."""
    tree = [np.ones(2), *(type(f"Unknown{i}", (), {})() for i in range(100))]
    learns.convert(tree, to="torch")
    learned = len(learns.pairs)
    for _ in range(3):
        assert learns.convert(tree, to="torch")[1:] == tree[1:]
    assert len(learns.pairs) == learned <= 102
    assert in_c(tree, to="torch") is not NotImplemented


def test_an_unknown_class_that_becomes_an_array(np, torch):
    """Its class may get a protocol later, or one object of it."""
    kind = type("Late", (), {})
    obj = kind()
    for _ in range(2):
        assert dlx.convert([np.ones(2), obj], to="torch")[1] is obj
    kind.__dlpack__ = lambda self, **options: np.ones(3).__dlpack__(**options)
    assert type(dlx.convert([np.ones(2), obj], to="torch")[1]) is torch.Tensor
    del kind.__dlpack__
    assert dlx.convert([np.ones(2), obj], to="torch")[1] is obj
    obj.__array_interface__ = np.ones(4).__array_interface__
    obj.kept = np.ones(4)
    assert type(dlx.convert([np.ones(2), obj], to="torch")[1]) is torch.Tensor
    assert dlx.convert([np.ones(2), kind()], to="torch")[1] is not None


def test_an_unknown_class_that_becomes_a_container(np, torch):
    """It is registered as a mapping."""

    class Late:
        def __init__(self, **children):
            self.children = children

        def __getitem__(self, key):
            return self.children[key]

        def __iter__(self):
            return iter(self.children)

        def __len__(self):
            return len(self.children)

        def keys(self):
            return self.children.keys()

    late = Late(a=np.ones(3))
    for _ in range(2):
        assert dlx.convert([np.ones(2), late], to="torch")[1] is late
    collections.abc.Mapping.register(Late)
    found = dlx.convert([np.ones(2), late], to="torch")[1]
    assert type(found["a"]) is torch.Tensor and found["a"].shape == (3,)


def test_a_plain_class_that_is_registered_as_a_number(np, torch):
    """A registration with any abstract base class lets every type be looked at again, once."""
    learns = Learns()
    tree = [np.ones(2), object(), datetime.date(2026, 1, 1)]
    for _ in range(2):
        learns.convert(tree, to="torch")
    learned = len(learns.pairs)
    abc.ABCMeta("Abstract", (), {}).register(int)
    for _ in range(2):
        learns.convert(tree, to="torch")
    assert learned < len(learns.pairs) <= 2 * learned + 1


def test_what_is_refused_by_name_is_refused_in_a_tree(np, torch):
    """A data set, a model, an iterator: with and without arrays of other types, at every call."""
    kinds = [torch.nn.Linear(1, 1), (each for each in ()), iter([]), torch.utils.data.TensorDataset(torch.ones(1))]
    for obj in kinds:
        for _ in range(3):
            for tree in ([np.ones(2), obj], {"a": [obj, np.ones(2)]}, (obj,) * 2 + (np.ones(2),)):
                with pytest.raises(errors.AdapterNotFoundError):
                    dlx.convert(tree, to="torch")


OBJECTS = tuple(sorted(plain_objects()))


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.sampled_from(OBJECTS), max_size=6), st.sampled_from(["torch", "numpy", "dlx"]), st.booleans())
def test_trees_with_objects_agree(names, to, copy):
    """Both paths have the same result for any objects among the arrays."""
    np = pytest.importorskip("numpy")
    pytest.importorskip(to)
    objects = plain_objects()
    tree = [np.ones(2), *(objects[name] for name in names), {name: objects[name] for name in names}]
    agree(lambda: tree, to, np, copy=copy)


# ---- the collector ---------------------------------------------------------------------------------------------------


class Function:
    """A function of an adapter."""

    def __call__(self, obj):
        return None


def test_sources_and_targets_are_seen_by_the_collector():
    """A cycle through a function of an adapter is collected."""
    for make in (
        lambda known: native.Source(Function, export=known),
        lambda known: native.Target(load=known),
    ):
        function = Function()
        made = function.made = make(function)
        assert gc.is_tracked(made)
        gone = weakref.ref(function)
        del function, made
        gc.collect()
        assert gone() is None


def test_a_dtype_of_less_than_a_byte_divides_nothing_by_zero(python):
    """Its array, read by attributes on a device, is left to Python; a plugin may declare such a dtype."""
    said = python(
        """
        import dlx
        from dlx._core import native
        from dlx._engine.fast_path import Question

        class Array:
            shape, strides, dtype, memory = (2,), (1,), "int4", None
            def __dlpack_device__(self):
                return 2, 0

        def ask(name, is_method=False):
            return Question(name, None, None, is_method)

        dlx.convert(bytearray(2), to="dlx")
        asked = [ask(name) for name in ("memory", "shape", "strides", "dtype")]
        fields = (*asked, ask("__dlpack_device__", True), "ptr", {"int4": 4 << 8})
        source = native.Source(Array, what="converts", table=False, fields=fields)
        native.source_add(source)
        native.pair_add("dlx", source, native.target_find("dlx"), "converts")
        print(dlx.convert._borrow(Array(), "dlx"))
        """
    )
    assert said == "None\n"
