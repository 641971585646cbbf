"""`dlx new-adapter`: write a plugin for a framework, with its entry point and its tests, as a folder to start from."""

from __future__ import annotations

import argparse
import importlib
import keyword
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from dlx._core.types import DType
from dlx._registry.registry import registry
from dlx._support.reflect import exception_text
from dlx._support.screen import Screen
from dlx._version import __version__
from dlx.cli.model import BadInput

__all__ = ["run"]

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{distribution}"
version = "0.1"
description = "Lets dlx convert arrays of {package}."
requires-python = ">=3.11"
dependencies = ["dlxarray>={dlx}"{needs}]

[project.optional-dependencies]
test = ["pytest>=8", "pytest-timeout"]

# The line by which dlx finds the adapter: the root package of the arrays, and the module with the hook.
[project.entry-points.dlx]
"{package}" = "{module}"

[tool.setuptools]
py-modules = ["{module}"]

[tool.pytest.ini_options]
addopts = "-p dlx.testing --dlx-adapter={package}"  # dlx's conformance kit, beside the tests in tests/
"""

ADAPTER = '''\
"""The adapter by which dlx converts arrays of {package}."""

from dlx.adapter import Adapter, Capabilities, DTypes, offer


class {title}Adapter(Adapter):
    """{package}, as dlx sees it."""

    name = package = "{package}"  # what users write as the target, and what is imported
    install = "pip install {distribution}"
    types = ({types})  # importable names: nothing is imported for them
    dtypes = DTypes("{package}", {{  # dlx's name -> attribute of {package}
{dtypes}
    }})
{export}
    def capabilities(self):
        """What {package} takes as it is. Everything else is copied, or refused with a reason, before `load`."""
        return Capabilities(dtypes=self.dtypes.known())  # row-major host memory that may be written

    def load(self, tensor):
        """Return an array over a `dlx.Tensor` that `capabilities` allow."""
        {load}


dlx_adapters = offer({title}Adapter())  # asked when {package} is met first
'''

EXPORT = '''
    def export(self, obj, *, stream=None):
        """Return a tensor over the memory of one array, which has no __dlpack__."""
        raise NotImplementedError("return dlx.adapter.over_memory(address, shape, strides, dtype, device, owner=obj)")
'''

FROM_DLPACK = "import {package}\n\n        return {package}.from_dlpack(tensor)"
NO_FROM_DLPACK = 'raise NotImplementedError("make an array over tensor.data_ptr that keeps the tensor alive")'

TESTS = '''\
"""What {distribution} promises by itself; dlx's conformance kit runs beside it."""

import {package}
import pytest

import dlx

DTYPES = sorted(dlx.adapters()["{package}"].dtypes.known())


def bytes_of(tensor):
    """Return the bytes of a tensor on the host."""
    return memoryview(tensor).cast("B").tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_survive_the_way_there_and_back(dtype):
    """Dtype, shape and every byte."""
    tensor = dlx.empty((2, 3), dtype)
    memoryview(tensor).cast("B")[:] = bytes(i % 2 for i in range(tensor.nbytes))
    array = dlx.convert(tensor, to="{package}")
    assert isinstance(array, dlx.adapter.look_up(dlx.adapters()["{package}"].types[0]))
    back = dlx.convert(array, to="dlx")
    assert (back.dtype, back.shape, bytes_of(back)) == (tensor.dtype, tensor.shape, bytes_of(tensor))


def test_the_plugin_is_found():
    """dlx lists it, for this package, with nothing to say about it."""
    found = dlx.adapters()
    assert "{package}" in found and not found.broken and not found.notes
    assert {package}.__name__ == found["{package}"].package
'''


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Write the files of a plugin for one framework; look at the framework where it is installed."""
    package = arguments.name
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in package.split(".")):
        raise BadInput(f"{package!r} is no package: give the name by which the framework is imported, as in mylib")
    if (known := registry.load_all().get(package)) is not None:
        raise BadInput(f"{package} has an adapter already: {known}")
    words = package.replace(".", "_")
    distribution = f"dlx-{words.replace('_', '-')}"
    folder = Path(arguments.into or distribution)
    if folder.exists():
        raise BadInput(f"{folder} is there already: nothing is overwritten. Name another folder: --into FOLDER")
    module, left = _imported(package)
    types = _types(module, package)
    dtypes = [each.name for each in DType.all() if hasattr(module, each.name)] or [
        "float32",
        "float64",
        "int32",
        "int64",
    ]
    exports = module is None or all(hasattr(getattr(module, each), "__dlpack__") for each in types)
    loads = module is None or callable(getattr(module, "from_dlpack", None))
    root = package.partition(".")[0]
    providers = [*dict.fromkeys(metadata.packages_distributions().get(root, []))]
    if len(providers) != 1:  # several share a namespace package: which of them has this one is not told
        found = f"{len(providers)} installed distributions have parts of {root}" if providers else ""
        found = found or f"no installed distribution has {package}"
        left.append(f"dependencies in pyproject.toml: {found}")
    left += [] if exports else ["export: its arrays have no __dlpack__"]
    left += [] if loads else [f"load: there is no {package}.from_dlpack"]
    facts = {
        "package": package,
        "needs": f', "{providers[0]}"' if len(providers) == 1 else "",
        "module": f"dlx_{words}",
        "distribution": distribution,
        "dlx": __version__,
        "title": "".join(part.capitalize() for part in words.split("_")),
        "types": "".join(f'"{package}.{each}", ' for each in types).strip(),
        "dtypes": "\n".join(f'        "{each}": "{each}",' for each in dtypes),
        "export": "" if exports else EXPORT,
        "load": FROM_DLPACK.format(package=package) if loads else NO_FROM_DLPACK,
    }
    files = {
        "pyproject.toml": PROJECT,
        f"dlx_{words}.py": ADAPTER,
        "/".join(("tests", f"test_dlx_{words}.py")): TESTS,
    }
    try:
        (folder / "tests").mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"{folder} cannot be made: {error.strerror}") from error
    for name, text in files.items():
        (folder / name).write_text(text.format(**facts), encoding="utf-8")
    _show(folder, [*files], left, screen)
    return 0


def _imported(package: str) -> tuple[ModuleType | None, list[str]]:
    """Return a package, or None with a word about what had to be guessed without it."""
    try:
        return importlib.import_module(package), []
    except Exception as error:
        said = "is not installed" if isinstance(error, ModuleNotFoundError) else f"fails ({exception_text(error, 80)})"
        return None, [f"types and dtypes: {package} {said} here, so they are a guess"]


def _types(module: ModuleType | None, package: str) -> list[str]:
    """Return the names of the array types in a package: classes with __dlpack__, or what they are mostly called."""
    if module is None:
        return ["Array"]
    classes = {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, type) and name[0] != "_" and registry.knows(each) is None
    }
    found = [name for name, each in classes.items() if hasattr(each, "__dlpack__")]
    found = found or [name for name in ("Array", "Tensor", "ndarray", "NDArray") if name in classes]
    if not found:
        raise BadInput(f"{package} has no class with __dlpack__, nor one called Array, Tensor or ndarray")
    return found


def _show(folder: Path, files: list[str], left: list[str], screen: Screen) -> None:
    screen.line(f"{folder} has a plugin:")
    for name in files:
        screen.line("  ", (name, "name"))
    for each in left:
        screen.line(("to fill in: ", "warn"), each)
    screen.line("")
    screen.line("then, where dlx and the framework are installed:")
    commands = [f"pip install --no-build-isolation --editable {folder} pytest", f"cd {folder} && python -m pytest"]
    for command in commands:
        screen.line("  ", command)
    document: dict[str, Any] = {"folder": str(folder), "files": files, "to_fill_in": left, "commands": commands}
    screen.document(document)
