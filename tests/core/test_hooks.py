"""`native.register`: what C needs of dlx's Python code, by name; and how builtins count their arguments."""

from __future__ import annotations

import pytest

from dlx._core import native


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"keeper": print}, "there is no hook 'keeper'"),
        ({"stream_keeper": 3}, "the hook stream_keeper cannot be a int"),
        ({"errors": []}, "the hook errors cannot be a list"),
        ({"device": (1, 0)}, "the hook device cannot be a tuple"),
    ],
)
def test_what_is_no_hook_is_refused(hooks, said):
    """A wrong name, or what C could not call or look into, is said at once."""
    with pytest.raises(TypeError, match=said):
        native.register(**hooks)


def test_hooks_are_named():
    """There is no order among them."""
    with pytest.raises(TypeError, match="register takes 0 to 0 arguments, found 1"):
        native.register(print)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (native.tensor_copy, (1,)),
        (native.tensor_check, (1, 2, 3)),
        (native.tensor_stack, ()),
        (native.capsule_claim, ()),
        (native.capsule_restore, (1,)),
        (native.tensors_unpack, (1,) * 4),
        (native.arrays_unpack, (1,) * 8),
        (native.tensor_when, (1,)),
        (native.arrow_open, (1,)),
        (native.arrow_column, (1,)),
        (native.arrow_tensor, (1, 2)),
        (native.arrow_columns, (1, 2)),
        (native.convert_slot, ({},)),
    ],
)
def test_builtins_count_their_arguments(function, arguments):
    """Too few or too many are a TypeError that names the function, before any is looked at."""
    with pytest.raises(TypeError, match=rf"{function.__name__} takes \d to \d arguments, found {len(arguments)}"):
        function(*arguments)
