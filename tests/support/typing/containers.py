"""Types of containers: the container's type is kept, one level deep, if the elements are certainly arrays."""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import dlx
from dlx._views.mapping import MutableMappingView
from dlx._views.sequence import MutableSequenceView, SequenceView

samples = np.zeros((2, 3), np.float32)
more = np.ones((4, 3), np.float32)
tensor = torch.zeros(3)

# lists, tuples and dicts of arrays
assert_type(dlx.convert([samples, more], to="torch"), list[torch.Tensor])
assert_type(dlx.convert([tensor, tensor], to="numpy"), list[NDArray[Any]])
assert_type(dlx.convert([samples], to=torch), list[torch.Tensor])
assert_type(dlx.convert([samples], to=torch.Tensor), list[torch.Tensor])
assert_type(dlx.convert((samples, tensor), to="torch"), tuple[torch.Tensor, ...])
assert_type(dlx.convert({"a": samples}, to="torch"), dict[str, torch.Tensor])
assert_type(dlx.convert({1: tensor}, to="numpy", copy=True), dict[int, NDArray[Any]])
first, second = dlx.convert((samples, tensor), to="torch")
assert_type(first, torch.Tensor)

# an example as the target
assert_type(dlx.convert([samples], like=tensor), list[torch.Tensor])
assert_type(dlx.convert((tensor, tensor), like=samples), tuple[NDArray[Any], ...])
assert_type(dlx.convert({"a": samples}, like=dlx.empty(3, "int8")), dict[str, dlx.Tensor])

# other elements pass through, so that nothing is claimed of them
assert_type(dlx.convert([1, 2], to="torch"), list[Any])
assert_type(dlx.convert([b"abc"], to="torch"), list[Any])
assert_type(dlx.convert([np.float32(1)], to="torch"), list[Any])
assert_type(dlx.convert([[samples]], to="torch"), list[Any])
assert_type(dlx.convert({"a": {"b": samples}}, to="torch"), dict[str, Any])
assert_type(dlx.convert((samples, 3), to="torch"), tuple[Any, ...])
assert_type(dlx.convert([samples], to="mylib"), list[Any])
ordered: OrderedDict[str, NDArray[np.float32]] = OrderedDict(a=samples)
assert_type(dlx.convert(ordered, to="torch"), dict[str, torch.Tensor])


class Pair(NamedTuple):
    """Fields that would be forgotten."""

    x: NDArray[Any]
    y: NDArray[Any]


@dataclass
class Batch:
    """Fields annotated as numpy arrays."""

    x: NDArray[Any]


assert_type(dlx.convert(Pair(samples, samples), to="torch"), Any)
assert_type(dlx.convert(Batch(samples), to="torch"), Any)


# a sequence or mapping of any kind, whose type at run time is not known
def any_kind(sequence: Sequence[torch.Tensor], mapping: Mapping[str, NDArray[Any]], rows: deque[torch.Tensor]) -> None:
    """Parameters of library functions are of these types."""
    assert_type(dlx.convert(sequence, to="numpy"), Any)
    assert_type(dlx.convert(mapping, to="torch"), Any)
    assert_type(dlx.convert(rows, like=samples, lazy=True), Any)
    assert_type(dlx.stack(sequence, to="numpy"), NDArray[Any])


class Attributes(dict[str, NDArray[Any]]):
    """Its type is kept at run time; to mypy, a class with a __getattr__ has every method of an array as well."""

    def __getattr__(self, name: str) -> Any:
        """Give an item."""
        return self[name]


dlx.convert(Attributes(a=samples), to="torch")["a"]
assert_type(dlx.convert(SimpleNamespace(a=samples), to="torch"), Any)

# lazily: a view with the container's methods
lazy = dlx.convert([samples, samples], to="torch", lazy=True)
assert_type(lazy, MutableSequenceView[Any])
assert_type(lazy[:1], SequenceView[Any])
lazy.append(tensor)
lazy.refresh()
view: MutableSequenceView[torch.Tensor] = lazy
assert_type(view[0], torch.Tensor)
assert_type([each.shape for each in view], list[torch.Size])
assert_type(dlx.convert((samples,), to="torch", lazy=True), SequenceView[Any])
state: MutableMappingView[str, NDArray[Any]] = dlx.convert({"w": tensor}, to=np, lazy=True)
assert_type(state["w"], NDArray[Any])
for name, array in state.items():
    assert_type(name, str)
    assert_type(array, NDArray[Any])
assert_type(dlx.convert({"w": tensor}, like=samples, lazy=True), MutableMappingView[str, Any])


def either(x: NDArray[np.float32] | list[NDArray[np.float32]], later: bool) -> None:
    """A union gives a union; a flag that is known only at run time claims nothing."""
    assert_type(dlx.convert(x, to="torch"), torch.Tensor | list[torch.Tensor])
    assert_type(dlx.convert([samples], to="torch", lazy=later), Any)
    assert_type(dlx.convert(samples, to="torch", lazy=later), torch.Tensor)


# the decorator keeps a function's parameters and its result
@dlx.using("torch")
def norm(x: dlx.SupportsDLPack, order: int = 2, *, axis: int | None = None) -> float:
    """Any array is accepted."""
    return 0.0


assert_type(norm(samples, 1, axis=0), float)
assert_type(norm(tensor), float)
