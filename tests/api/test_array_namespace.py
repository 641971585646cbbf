"""`dlx.array_namespace`: the functions for arrays of one framework, from array-api-compat if it is installed."""

import subprocess
import sys
import textwrap

import pytest
from support.processes import warm
from support.project import TESTS

import dlx
from dlx.errors import AdapterNotFoundError

MADE = {
    "numpy": ("numpy", lambda m: m.ones(3)),
    "numpy's scalar": ("numpy", lambda m: m.float32(3)),
    "torch": ("torch", lambda m: m.ones(3)),
    "jax": ("jax.numpy", lambda m: m.ones(3)),
    "cupy": ("cupy", lambda m: m.ones(3)),
    "mlx": ("mlx.core", lambda m: m.ones(3)),
    "paddle": ("paddle", lambda m: m.ones([3])),
    "tensorflow": ("tensorflow.experimental.numpy", lambda m: m.ones(3)),
    "array_api_strict": ("array_api_strict", lambda m: m.ones(3)),
}


@pytest.mark.parametrize("name", MADE)
def test_namespace_of_each_framework(name):
    """Its functions take the array, and give arrays of the same framework."""
    module, make = MADE[name]
    framework = pytest.importorskip(module)
    array = make(framework)
    xp = dlx.array_namespace(array, None, 2.0)
    assert float(xp.sum(array)) == 3
    assert type(xp.ones(3)) is type(make(framework)) or name == "numpy's scalar"


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_array_api_compat_comes_first(module):
    """Its functions have the names of the standard."""
    framework, compat = pytest.importorskip(module), pytest.importorskip("array_api_compat")
    array = framework.ones(3)
    assert dlx.array_namespace(array) is compat.array_namespace(array)
    assert dlx.array_namespace(array).__name__ == f"array_api_compat.{module}"


def test_the_framework_itself_without_array_api_compat(np):
    """The framework itself is returned if the package is missing or has no such module."""
    code = """
    import sys
    sys.modules["array_api_compat"] = None
    import numpy, dlx
    assert dlx.array_namespace(numpy.ones(3)) is numpy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_arrays_of_several_frameworks_are_refused(np, torch):
    """The error names all of them and a fix; numbers belong to no framework."""
    with pytest.raises(TypeError, match=r"one framework, found numpy.ndarray, torch.Tensor. Convert .*like=x"):
        dlx.array_namespace(np.ones(3), 1, torch.ones(3), np.ones(2))


@pytest.mark.parametrize("arrays", [(), (None,), (1, 2.0, True, 3j)], ids=repr)
def test_no_array_is_refused(arrays):
    """Without an array, no namespace is right."""
    with pytest.raises(TypeError, match="takes at least one array, found 0"):
        dlx.array_namespace(*arrays)


@pytest.mark.parametrize(
    "array", ["text", [1.0], {}, b"abc", memoryview(b"abc"), object()], ids=lambda array: type(array).__name__
)
def test_what_is_no_array_or_has_no_functions_is_refused(array):
    """The error has the same reason as `dlx.convert`."""
    with pytest.raises(AdapterNotFoundError, match=r"not an array|no array functions|not one array"):
        dlx.array_namespace(array)


def test_everything_follows_x(np, torch):
    """`like=x` converts to the framework and device of x."""
    x, y = torch.ones(3, dtype=torch.float64), np.arange(3.0)
    xp = dlx.array_namespace(x)
    result = xp.linalg.vector_norm(x + dlx.convert(y, like=x))
    assert isinstance(result, torch.Tensor) and result.tolist() == pytest.approx(14**0.5)


@pytest.mark.slow
def test_move_to_of_scikit_learn_by_dlx():
    """A replacement of three lines with dlx passes scikit-learn's tests."""
    for name in ("sklearn", "array_api_strict", "torch"):
        pytest.importorskip(name)
    code = f"""
import runpy, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(TESTS)!r})
runpy.run_module("support.environments.sklearn_move_to", run_name="__main__")
"""
    done = warm.run(code, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
