"""scikit-learn's `move_to`, written with dlx, and scikit-learn's tests of it from its wheel.

    python tests/support environments.sklearn_move_to [arguments of pytest]

It needs scikit-learn 1.9 or later, pytest, scipy, array-api-strict, torch and dlx; if one is missing it prints a note
and ends with status 0.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import tempfile
from pathlib import Path

import dlx
from support.project import TESTS

NEEDED = ("sklearn", "scipy", "pytest", "array_api_strict", "torch")
LEAST = 3  # the least number of tests: from numpy to torch and back, sparse arrays, negative strides

os.environ["SCIPY_ARRAY_API"] = "1"  # before scipy is imported


def move_to(*arrays, xp, device):
    """Move all arrays to a namespace and a device; None, and sparse arrays for numpy, stay unchanged."""
    like = xp.empty(0, device=device)
    moved = [array if array is None or stays(array, xp) else dlx.convert(array, like=like) for array in arrays]
    return moved[0] if len(moved) == 1 else tuple(moved)


def stays(array, xp):
    """Return True for a sparse array; scikit-learn refuses these for namespaces other than numpy."""
    from scipy import sparse

    if sparse.issparse(array) and not isinstance(xp.empty(0), importlib.import_module("numpy").ndarray):
        raise TypeError("Sparse arrays are only accepted (and passed through) when the target namespace is Numpy")
    return sparse.issparse(array)


class Ran:
    """A counter of passed tests."""

    passed = 0

    def pytest_runtest_logreport(self, report):
        """Count one test."""
        self.passed += report.when == "call" and report.passed


def main() -> int:
    """Replace scikit-learn's function, also in the processes that its tests start."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    module = None if missing else importlib.import_module("sklearn.utils._array_api")
    if not hasattr(module, "move_to"):
        print(f"left out: {', '.join(missing) or 'scikit-learn has no move_to'}: not here")
        return 0
    import pytest

    testing = importlib.import_module("sklearn.utils._testing")
    run_script = testing.assert_run_python_script_without_output
    if "timeout" in inspect.signature(run_script).parameters:  # 60 s are too few on a busy machine
        testing.assert_run_python_script_without_output = functools.partial(run_script, timeout=250)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize").with_suffix(".py").write_text(
            "import importlib.abc, sys\n"
            f"sys.path.append({str(TESTS)!r})\n"
            "class Late(importlib.abc.MetaPathFinder):\n"
            "    def find_spec(self, name, path, target=None):\n"
            "        if name != 'sklearn.utils._array_api': return None\n"
            "        sys.meta_path.remove(self)\n"
            "        import importlib.util\n"
            "        spec = importlib.util.find_spec(name); run = spec.loader.exec_module\n"
            "        def both(module):\n"
            "            run(module)\n"
            "            from support.environments import sklearn_move_to\n"
            "            module.move_to = sklearn_move_to.move_to\n"
            "        spec.loader.exec_module = both\n"
            "        return spec\n"
            "sys.meta_path.insert(0, Late())\n"
        )
        paths = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        module.move_to = move_to
        ran = Ran()
        tests = ["--pyargs", "sklearn.utils.tests.test_array_api", "-k", "move_to"]
        settings = ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider"]  # ignore this project's settings
        status = int(pytest.main([*tests, *settings, "-q", *sys.argv[1:]], plugins=[ran]))
    print(f"scikit-learn {importlib.import_module('sklearn').__version__}: {ran.passed} tests of move_to pass by dlx")
    return status or int(ran.passed < LEAST)


if __name__ == "__main__":
    sys.exit(main())
