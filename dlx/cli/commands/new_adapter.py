"""`dlx new-adapter`: create a plugin for a framework from templates, with its entry point and tests."""

from __future__ import annotations

import argparse
import importlib
import keyword
import string
from pathlib import Path
from types import ModuleType

from dlx._core.types import DType
from dlx._registry.registry import registry
from dlx._support.reflect import exception_text
from dlx._support.screen import Screen
from dlx._version import __version__
from dlx.adapter import look_up
from dlx.adapter.base import find_distributions
from dlx.cli.model import BadInput
from dlx.errors import did_you_mean

_TEMPLATES = Path(__file__).parent.parent / "templates"

# The arguments of over_memory are in a comment: no attribute of an unknown class is known.
EXPORT = '''
    {head}
    # def export(self, obj, *, stream=None):
    #     """Return a tensor over the memory of one array, which it keeps alive."""
    #     address = obj.address  # of the first element
    #     strides = None  # row-major; otherwise a tuple, in elements
    #     dtype = self.dtypes.from_native(obj.dtype)
    #     return over_memory(address, obj.shape, strides, dtype, Device("cpu"), readonly=False, owner=obj)
'''
HAS_DLPACK = "# For classes without __dlpack__:"
NO_DLPACK = """def export(self, obj, *, stream=None):
        \"\"\"Return a tensor over the memory of one array, whose class has no __dlpack__.\"\"\"
        raise NotImplementedError("fill in the address, shape and dtype of the array")

    # In place of the method above:"""

FROM_DLPACK = "import {package}\n\n        return {package}.from_dlpack(tensor)"
NO_FROM_DLPACK = """# If your framework copies here, as asarray does, pass copies=True to Capabilities, too.
        raise NotImplementedError("return an array over tensor.data_ptr that keeps the tensor alive")"""


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Write the files of a plugin for a framework; inspect the framework if it is installed."""
    package = arguments.name
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in package.split(".")):
        raise BadInput(f"{package!r} is not a package name. Pass the framework's import name, such as mylib")
    if (known := registry.load_all().get(package)) is not None:
        raise BadInput(f"{package} already has an adapter: {known}")
    words = package.replace(".", "_")
    distribution = f"dlx-{words.replace('_', '-')}"
    folder = Path(arguments.into or distribution)
    if folder.exists():
        raise BadInput(f"{folder} already exists, and dlx does not overwrite it. Pass another one: --into FOLDER")
    framework, left = _import(package)
    types, guessed = _array_types(framework, package, arguments.type)
    left += guessed
    dtypes = [each.name for each in DType.all() if hasattr(framework, each.name)]
    dtypes = dtypes or ["float32", "float64", "int32", "int64"]
    classes = [look_up(f"{package}.{each}") for each in types] if framework is not None else []
    exports = all(hasattr(each, "__dlpack__") for each in classes if each is not None)
    loads = framework is None or callable(getattr(framework, "from_dlpack", None))
    root = package.partition(".")[0]
    providers = [*{each.metadata["Name"]: None for each in find_distributions(root)}]
    if len(providers) != 1:  # several distributions may share a namespace package
        several = f"{len(providers)} installed distributions have parts of {root}"
        found = several if providers else f"no installed distribution has {package}"
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
        "export": EXPORT.format(head=HAS_DLPACK if exports else NO_DLPACK),
        "load": FROM_DLPACK.format(package=package) if loads else NO_FROM_DLPACK,
    }
    module = facts["module"]
    test = "/".join(("tests", f"test_{module}.py"))
    files = {"pyproject.toml": "pyproject", f"{module}.py": "adapter", test: "tests"}
    try:
        (folder / "tests").mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"cannot create {folder}: {error.strerror}") from error
    for name, template in files.items():
        text = (_TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
        (folder / name).write_text(string.Template(text).substitute(facts), encoding="utf-8")
    screen.line(f"created a plugin in {folder}:")
    for name in files:
        screen.line("  ", (name, "name"))
    for each in left:
        screen.line(("to fill in: ", "warn"), each)
    screen.line("")
    screen.line("then, with dlx and the framework installed:")
    commands = [f"pip install --no-build-isolation --editable {folder} pytest", f"cd {folder} && python -m pytest"]
    for command in commands:
        screen.line("  ", command)
    screen.document({"folder": str(folder), "files": [*files], "to_fill_in": left, "commands": commands})
    return 0


def _import(package: str) -> tuple[ModuleType | None, list[str]]:
    """Import a package; return None and a note if that fails, since types and dtypes are then guesses."""
    try:
        return importlib.import_module(package), []
    except Exception as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"fails ({exception_text(error, 80)})"
        return None, [f"types and dtypes: {package} {why}, so they are guesses"]


def _array_types(module: ModuleType | None, package: str, named: str | None) -> tuple[list[str], list[str]]:
    """Return the names of the array types of a package, and a note if they are guesses."""
    if named is not None:
        types = [each.strip().removeprefix(f"{package}.") for each in named.split(",")]
        for each in types:
            if not all(part.isidentifier() for part in each.split(".")):
                raise BadInput(f"--type {each!r} is not a class name. Pass names such as Array or core.Array")
            if module is not None and not isinstance(look_up(f"{package}.{each}"), type):
                names = [name for name, value in vars(module).items() if isinstance(value, type) and name[0] != "_"]
                raise BadInput(f"{package} has no class {each}. {_suggest(each, names)}".rstrip())
        return types, []
    if module is None:
        return ["Array"], []
    classes = {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, type)
        and name[0] != "_"
        and registry.owner(each) is None
        and not getattr(each, "_is_protocol", False)  # an interface
    }
    found = [name for name, each in classes.items() if hasattr(each, "__dlpack__")]
    found = found or [name for name in ("Array", "Tensor", "ndarray", "NDArray") if name in classes]
    if found:
        return found, []
    likely = [name for name, each in classes.items() if hasattr(each, "shape") or hasattr(each, "dtype")]
    likely = likely or [*classes][:1] if len(classes) == 1 else likely
    has = f"; its classes: {', '.join([*classes][:8])}" if classes else ""
    note = f"types: {package} has no class with __dlpack__, and none named Array, Tensor, ndarray or NDArray{has}"
    return likely or ["Array"], [f"{note}. {', '.join(likely) or 'Array'} is a guess; --type names another"]


def _suggest(name: str, names: list[str]) -> str:
    """Return the advice for a class that does not exist."""
    return did_you_mean(name, names) or (f"Pass one of {', '.join(names[:8])}" if names else "")
