"""`native.register` registers Python objects for C, by name; builtins check their number of arguments."""

from __future__ import annotations

import pytest

from dlx._core import native


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"keeper": print}, "unknown hook 'keeper'"),
        ({"stream_keeper": 3}, "hook stream_keeper cannot be of type int"),
        ({"errors": []}, "hook errors cannot be of type list"),
        ({"device": (1, 0)}, "hook device cannot be of type tuple"),
    ],
)
def test_what_is_no_hook_is_refused(hooks, said):
    """Registering a wrong name or an object of the wrong type raises TypeError."""
    with pytest.raises(TypeError, match=said):
        native.register(**hooks)


def test_hooks_are_named():
    """Hooks are registered by keyword."""
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
        (native.arrow_open, (1,)),
        (native.arrow_column, (1,)),
        (native.arrow_tensor, (1, 2)),
        (native.arrow_columns, (1, 2)),
        (native.convert_slot, ({},)),
    ],
)
def test_builtins_count_their_arguments(function, arguments):
    """Too few or too many arguments raise a TypeError that names the function, before any is used."""
    with pytest.raises(TypeError, match=rf"{function.__name__} takes \d to \d arguments, found {len(arguments)}"):
        function(*arguments)
