"""Frameworks and plugins with metadata, written into a folder, and code that runs with the folder on the path."""

from __future__ import annotations

import json
import os
import textwrap

from support.processes import warm
from support.project import ROOT

FRAMEWORK = """
__version__ = "1.0"
class Array:
    def __init__(self, tensor): self.tensor = tensor
class Sub(Array): pass
class Bag:
    def __init__(self, items): self.items = items
"""


ADAPTER = """
import dlx, sys
from dlx.adapter import *
class A(Adapter):
    name = "{name}"
    package = "{package}"
    types = ("{package}.Array",)
    pass  # facts
    def capabilities(self): return Capabilities(dtypes=None, layouts=Layout.ANY, min_alignment=1, keeps_readonly=True)
    def describe(self, obj): return Description(ArrayInfo.of_tensor(obj.tensor, "{label}", type(obj), ()))
    def export(self, obj, *, stream=None): return obj.tensor
    def load(self, tensor):
        return sys.modules[self.package].Array(tensor)
@dlx.hookimpl
def dlx_adapters(): return [A()]
"""


def adapter(name="lib", *, package=None, label=None):
    """Return the source of a plugin with one adapter; `label` is the framework in its descriptions."""
    return ADAPTER.format(name=name, package=package or name, label=label or name)


class Site:
    """A folder of installed distributions."""

    def __init__(self, path):
        self.path = path

    def module(self, name, code=FRAMEWORK):
        (self.path / f"{name}.py").write_text(textwrap.dedent(code))

    def distribution(self, name, entries, *, version="1.0"):
        """Write metadata only: entries are {entry's name: module}."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = "".join(f"{entry} = {module}\n" for entry, module in entries.items())
        (info / "entry_points.txt").write_text(f"[dlx]\n{lines}")

    def plugin(self, name, entry, code):
        """Write a plugin of one module with the name of its distribution."""
        module = name.replace("-", "_")
        self.module(module, code)
        self.distribution(name, {entry: module})

    def run(self, code, **environment):
        """Run code with everything here installed; return the printed words or lines."""
        start = f"import sys; sys.path.insert(0, {str(self.path)!r}); import dlx\n"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT)]), **environment}
        return warm.python(start + textwrap.dedent(code), args=(), env=env, imported=warm.PLAIN).strip()

    def error(self, code="dlx.convert(b'abc', to='lib')", **environment):
        """Run code that must raise a PluginError; return its message."""
        return self.run(
            f"""
            try:
                {code}
            except dlx.errors.PluginError as error:
                assert "\\n" not in str(error) and len(str(error)) < 400, str(error)
                print(error)
            else:
                print("nothing raised")
            """,
            **environment,
        )

    def doctor(self, **environment):
        """Return the report of `dlx doctor` for each plugin, by module."""
        out = self.run(
            "from dlx.cli import main; main(['doctor', '--json', '--verbose'])",
            **environment,
        )
        return {each["module"]: each for each in json.loads(out)["adapters"]}
