"""The advice of an error can be followed: every name in it exists, and what it gives is converted."""

from __future__ import annotations

import warnings

import advice
import pytest
from refused import CASES, modules

import dlx
from dlx import errors


def refusal(obj, to="dlx"):
    """Return the error of a conversion, or of the first column that is refused."""
    try:
        dlx.convert(obj, to=to)
    except errors.DlxError as error:
        return error
    return None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_advice_can_be_followed(name):
    """Methods, functions and options are those of the real object; one of the expressions gives what dlx takes."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = modules(case.needs, lambda module: pytest.importorskip(module, exc_type=ImportError))
        obj = case.make(**found)
        error = refusal(obj, case.to)
        assert error is not None, "it is converted now: take the case out"
        for key in error.path:  # of a column
            obj = obj[key] if hasattr(obj, "__getitem__") and error.fix[:4] != "With" else obj
        results = advice.tried(error.fix, obj)
        advice.check_options(error.fix, error.action)
        assert not case.works or any(_converts(result) for result in results), (error.fix, results)


def _converts(result):
    """Return whether dlx converts what the advice gave."""
    if isinstance(result, (str, bytes, int, float)):
        return False
    try:
        made = dlx.convert(result, to="dlx")
    except errors.DlxError:
        return False
    return made is not result or isinstance(made, dlx.Tensor)


@pytest.mark.parametrize(
    "text",
    [
        "Call .no_such() first.",
        "Call .real.no_such first.",
        "Convert its .real and its .no_such apart.",
        "Call numpy.no_such(x) first.",
        "Call no_such_module.call(x) first.",
        "Convert {name: x[name].data for name in x.no_such}.",
        "With x = numpy.no_such(it), call x.sum().",
        "With x = numpy.asarray(it), call x.no_such().",
        "Call .sum(no_such=1) first.",
        "Read x[...].no_such.",
    ],
)
def test_a_wrong_method_is_noticed(np, text):
    """By its name alone, also behind others."""
    with pytest.raises(AssertionError):
        advice.tried(text, np.ones(3))


@pytest.mark.parametrize(
    "text", ["Pass no_such=True.", "Leave no_such= out.", "Call dlx.convert(x, no_such=1).", "Say dlx.using(..., no=1)."]
)
def test_a_wrong_option_is_noticed(text):
    """One that the function lacks."""
    with pytest.raises(AssertionError):
        advice.check_options(text)


@pytest.mark.parametrize(
    "text",
    [
        "Pass detach=True.",
        "Drop copy=False, or pass readonly='share'.",
        "Call dlx.convert(tensor, to='numpy'), which copies it to the host.",
        "Say dlx.using(..., detach=True) to do without.",
    ],
)
def test_a_right_option_passes(text):
    """As the function has it."""
    advice.check_options(text)


def test_what_right_advice_gives(np):
    """Each expression's value."""
    array = np.ones((2, 2))
    made = advice.tried("Call .sum() first, else convert its .T.copy() and numpy.ravel(x) apart, .astype('i4').", array)
    assert [np.shape(each) for each in made] == [(), (2, 2), (4,), (2, 2)]
