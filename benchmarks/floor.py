"""Compile floor.c, and pass it the adapters' tables and guards."""

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import dlx
from dlx._engine import fast_path as routes
from dlx._registry.registry import registry
from dlx.adapter import look_up
from dlx.adapter.declarations import Owner

HERE = Path(__file__).resolve().parent


def build():
    """Return the compiled module, or print a note and return None without a C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "floor.so"
        command = [
            "cc",
            "-std=c11",
            "-O2",
            "-fno-plt",
            "-fno-semantic-interposition",
            "-shared",
            "-fPIC",
            f"-I{HERE.parent / 'c_src' / 'include'}",
            f"-I{HERE.parent / 'c_src'}",
        ]
        command += [f"-I{sysconfig.get_path('include')}", str(HERE / "floor.c"), "-o", str(target)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"note: no C floor: {getattr(error, 'stderr', None) or error}")
            return None
        spec = importlib.util.spec_from_file_location("floor", target)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def table(kind):
    """Return the capsule of the exchange table that the fast path uses for a type."""
    facts = registry.owner(kind).fast_path
    return facts.exchange() if facts.exchange is not None else kind.__dlpack_c_exchange_api__


def floor_of(module, kind, target):
    """Return the floor of conversions between two exact types (dlx.Tensor: wrapping only)."""
    take = None if target is dlx.Tensor else table(target)
    if kind is dlx.Tensor:
        return module.create_floor(table(kind), take, (), None, (), None)
    source = registry.owner(kind)
    facts, guards = source.fast_path, []
    function, answered = (facts.guard_function and facts.guard_function()) or (None, frozenset())
    for guard in routes._guards(facts, kind, answered):
        guards.append(
            (guard.ask.descriptor, guard.codes or 0xFFFFFFFF, guard.of_owner, guard.resolve and guard.resolve.name)
        )
    switches = tuple((sys.modules[module].__dict__, name, value) for module, name, value in facts.conditions)
    owner = routes._question(kind, facts.owner.ask)[2] if isinstance(facts.owner, Owner) else None
    assert all(look_up(name) is not None for name in facts.types)
    return module.create_floor(table(kind), take, tuple(guards), function, switches, owner)


def importer_of(module, tensors, target):
    """Return a C function: it passes prepared tensors to the import slot of a type, and returns a list."""
    return module.importer(table(dlx.Tensor), table(target), tensors)
