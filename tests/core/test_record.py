"""`Record`, on which the data types of adapters and the steps of plans stand: a frozen dataclass to those who look."""

import copy
import dataclasses
import inspect
import pickle

import pytest

from dlx._core.record import Record
from dlx._engine.plan import Copy, Step
from dlx.adapter import Capabilities, FastPath, Stream


class Point(Record):
    """Two numbers."""

    x: int
    y: int = 0

    def __post_init__(self):
        if self.y < 0:
            raise ValueError("y is negative")


class Named(Point, hidden=("key",)):
    """A point with a name."""

    name: str = ""
    key: object = lambda self: self  # a function as a default is no method


def test_fields_are_those_of_the_bases_then_its_own():
    """By place and by name, defaults filled in."""
    made = Named(1, name="a")
    assert (made.x, made.y, made.name) == (1, 0, "a")
    assert made.key is vars(Named)["key"]
    assert Named._fields == ("x", "y", "name", "key")
    assert repr(made) == "Named(x=1, y=0, name='a')"


@pytest.mark.parametrize(
    ("values", "named", "said"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"x": 1}, "multiple values for argument 'x'"),
        ((1,), {"z": 1}, "unexpected keyword argument 'z'"),
        ((), {"z": 1}, "missing a required argument: 'x'"),
    ],
)
def test_a_wrong_call_is_a_type_error(values, named, said):
    """It says which argument, as Python does."""
    with pytest.raises(TypeError, match=said) as raised:
        Point(*values, **named)
    assert str(raised.value).startswith("Point() ")


def test_values_are_checked_where_the_class_does():
    """`__post_init__` runs after all fields are there, also for `_replace`."""
    with pytest.raises(ValueError, match="negative"):
        Point(1, -1)
    with pytest.raises(ValueError, match="negative"):
        Point(1)._replace(y=-1)
    with pytest.raises(TypeError, match="no such field: z"):
        Point(1)._replace(z=1)


def test_nothing_can_be_set():
    """Neither a field, nor something new."""
    made = Point(1)
    for change in (lambda: setattr(made, "x", 2), lambda: setattr(made, "z", 2), lambda: delattr(made, "x")):
        with pytest.raises(AttributeError, match=r"Point\.[xz] cannot be"):
            change()
    assert made == Point(1)


def test_equality_is_by_class_and_fields_but_hidden_ones():
    """As a dataclass with compare=False has it."""
    assert Point(1) == Point(1, 0) and hash(Point(1)) == hash(Point(1, 0))
    assert Point(1) != Named(1) and Point(1) != (1, 0)
    assert Named(1, key=1) == Named(1, key=2)
    assert Step("copy", "x") != Copy("copy", "x")
    assert Stream((2, 0), 7, "a") == Stream((2, 0), 7, "b")


def test_copies_and_pickles_are_equal():
    """Of what holds no functions."""
    made = Copy("copy", "x", 3, keep_order=True)
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made and type(again) is Copy


def test_it_is_a_dataclass_to_those_who_look():
    """`dataclasses.replace`, `fields` and signatures, as adapters' authors use them."""
    stated = Capabilities(frozenset({"int8"}), min_alignment=4)
    other = dataclasses.replace(stated, layouts=3)
    assert (other.layouts, other.min_alignment, stated.layouts) == (3, 4, 0)
    assert dataclasses.replace(FastPath(types=("a.B",)), imports=False) == FastPath(types=("a.B",), imports=False)
    assert [each.name for each in dataclasses.fields(Capabilities)] == list(inspect.signature(Capabilities).parameters)
    assert str(inspect.signature(Point)) == "(x: int, y: int = 0)"
    assert dataclasses.asdict(Point(1)) == {"x": 1, "y": 0}
