"""Checks of an adapter over time: owners, leaks, threads, the fast path, and the end of the process."""

from __future__ import annotations

import builtins
import gc
import inspect
import subprocess
import sys
import weakref
from typing import Any

from dlx._api import convert as api
from dlx._api.describe import describe
from dlx._core import native
from dlx._protocols.pointer import from_pointer
from dlx._support.reflect import type_name
from dlx.errors import DlxError
from dlx.testing.check import check
from dlx.testing.checks.adapter_contract import dtypes_of, own_of, same, sources, target_of, tensor_of
from dlx.testing.checks.producer_lifetime import together_well
from dlx.testing.runner import environment
from dlx.testing.subject import Broken, NotApplicable, Subject, attempt, error_line, must
from dlx.testing.support.producers import Source


def _inside(lib: Subject) -> tuple[Any, Source]:
    """Return (an array of the framework, what it was made of)."""
    source = _plain(lib)
    return api.convert(tensor_of(source), to=lib.adapter), source


def _plain(lib: Subject) -> Source:
    return next(source for name, source in sources(target_of(lib)) if name in ("row-major", "scalar"))


def _own(lib: Subject) -> Any:
    """Return an array of the framework, whose adapter need not be a target."""
    if lib.make is not None:
        return lib.array()[0]
    return _inside(lib)[0]


@check(kind="adapter", about="contract", severity="wrong")
def adapter_describes(lib: Subject) -> None:
    """`dlx.describe` says what an export gives."""
    array = _own(lib)
    info, tensor = describe(array), api.convert(array, to="dlx")
    must(info.dtype == tensor.dtype and info.shape == tensor.shape, f"{info} is exported as {tensor!r}")
    must(info.strides is None or info.contiguous() or info.strides == tensor.strides, f"strides {info.strides}")
    must(info.address in (0, tensor.data_ptr), f"at {info.address:#x}, exported from {tensor.data_ptr:#x}")
    must(info.readonly == tensor.readonly, f"readonly={info.readonly}, exported with {tensor.readonly}")
    must(info.framework and info.dtype_name, f"no name: {info}")


@check(kind="adapter", about="copies", severity="wrong")
def adapter_identity(lib: Subject) -> None:
    """An array that is in the framework already stays what it is; `copy=True` makes another."""
    array, source = _inside(lib)
    must(api.convert(array, to=lib.adapter) is array, "another object came back")
    copied = api.convert(array, to=lib.adapter, copy=True)
    must(describe(copied).address != source.address, "copy=True shares the memory")
    must(type(copied) is type(array), f"a copy is {type_name(type(copied))}")
    same(api.convert(copied, to="dlx"), source, "copy=True")


@check(kind="adapter", about="lifetimes", severity="fatal")
def adapter_lifetimes(lib: Subject) -> None:
    """Memory lives while an array uses it, and no longer."""
    # Drop the source first, then the result; into the framework, and out of it.

    class Owner(bytearray):
        """Memory that can be watched."""

    target_of(lib)
    array, source = _inside(lib)
    owner = Owner(source.elements())
    watch = weakref.ref(owner)
    view = api.convert(memoryview(owner), to="dlx")
    given = from_pointer(view.data_ptr, source.shape, source.dtype, owner=view)
    del view, owner
    result = api.convert(given, to=lib.adapter)
    shared = describe(result).address == given.data_ptr
    del given
    gc.collect()
    must(not shared or watch() is not None, "the owner was released while the result uses its memory")
    same(api.convert(result, to="dlx"), source, "after its source was dropped")
    del result
    gc.collect()
    must(watch() is None, "the owner outlives the result: it is never released")
    back = api.convert(array, to="dlx")
    del array
    gc.collect()
    same(back, source, "after its array was dropped")


@check(kind="adapter", about="leaks", severity="wrong")
def adapter_leaks(lib: Subject) -> None:
    """Nothing is left behind, also where a conversion is refused."""
    # Convert and refuse in a loop; the count of managed tensors is as before.
    target = target_of(lib)
    made = sources(target)

    def once() -> None:
        for _, source in made:
            for options in ({}, {"copy": False}, {"copy": True}, {"readonly": "error"}, {"stream": 7}):
                for readonly in (False, True):
                    tensor = tensor_of(source, readonly=readonly)
                    result, _ = attempt(api.convert, tensor, to=lib.adapter, **options)
                    if result is not None:
                        attempt(api.convert, result, to="dlx", **options)

    once()
    gc.collect()
    before = native.live()
    for _ in range(10):
        once()
    gc.collect()
    left = native.live() - before
    must(left == 0, f"{left} managed tensors stay behind after {10 * len(made) * 10} conversions")


@check(kind="adapter", about="threads", severity="fatal")
def adapter_threads(lib: Subject) -> None:
    """Many threads may convert at once."""
    # Eight threads, both ways; one array, and a source for each, so that two imports of one memory do not meet.
    array, source = _inside(lib)
    mine = [_plain(lib) for _ in range(8)]
    before = native.live()

    def work(i: int) -> None:
        for _ in range(50):
            same(api.convert(array, to="dlx"), source, "out of it")
            same(api.convert(api.convert(tensor_of(mine[i]), to=lib.adapter), to="dlx"), mine[i], "and into it")

    together_well(work)
    gc.collect()
    must(native.live() == before, f"{native.live() - before:+} managed tensors stay behind")


@check(kind="adapter", about="contract", severity="wrong")
def adapter_fast_path(lib: Subject) -> None:
    """Its fast-path types take the fast path to the same result as the Python path."""
    # Convert arrays of fast-path types by both paths: type, address, dtype, rights.
    adapter = own_of(lib)
    if adapter.fast_path is None or not adapter.fast_path.types:
        raise NotApplicable("it lists no fast-path types")
    slow = inspect.unwrap(api.convert)
    target = target_of(lib)
    for dtype in dtypes_of(target):
        array = api.convert(
            tensor_of(Source(dtype, (4, 6) if target.capabilities.ndims[1] > 1 else (24,))), to=lib.adapter
        )
        for to in ("dlx", lib.adapter):
            pair = [attempt(path, array, to=to) for path in (api.convert, api.convert, slow)]
            raised = {type(error) for _, error in pair}
            must(len(raised) == 1, f"{dtype} to {to}: {', '.join(error_line(error) for _, error in pair if error)}")
            if pair[0][1] is None:
                said = {str(describe(result)) + str(describe(result).address) for result, _ in pair}
                must(len(said) == 1, f"{dtype} to {to}: the paths differ: {' and '.join(sorted(said))}")


@check(kind="adapter", about="contract", severity="wrong")
def adapter_containers(lib: Subject) -> None:
    """Containers keep their type and paths, and every array in them is converted."""
    lib.needs(lib.containers, "no containers are given")
    for name, make in lib.containers.items():
        array = api.convert(tensor_of(Source("float32", (4, 6))), to="dlx")
        tree = make(array)
        plan = api.plan(tree, to="dlx")
        must(plan.outcome == "tree" and len(plan.leaves) >= 1, f"{name}: no array is found in it: {plan}")
        try:
            result = api.convert(tree, to="dlx", copy=True)
        except DlxError as error:
            raise Broken(f"{name}: {error_line(error)}") from error
        again = api.plan(result, to="dlx")
        before, after = ([leaf.path for leaf in each.leaves] for each in (plan, again))
        must(before == after, f"{name}: paths {before} became {after}")
        must(type(result) is type(tree), f"{name} became {type_name(type(result))}")


@check(kind="adapter", about="contract", severity="friction", alone=True)
def adapter_imports_nothing(lib: Subject) -> None:
    """Finding and loading the adapter does not import its framework."""
    # Load it in a fresh interpreter, and look at what is imported.
    adapter = own_of(lib)
    if adapter.package == "dlx":
        raise NotApplicable("it is dlx's own")
    code = f"""
import importlib, sys
module = importlib.import_module({type(adapter).__module__!r})
getattr(module, "dlx_adapters", list)()
print({adapter.package!r} in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    must(done.returncode == 0, f"loading it fails: {done.stderr.strip().splitlines()[-1:]}")
    must(done.stdout.strip() == "False", f"loading the adapter imports {adapter.package}")


@check(kind="adapter", about="threads", severity="fatal", alone=True)
def adapter_end(lib: Subject) -> None:
    """The process ends well while converted arrays are still held."""
    # Hold arrays of both directions in a module and in a cycle.
    array, _ = _inside(lib)
    cycle: list[Any] = [array, api.convert(array, to="dlx"), _inside(lib)[0]]
    cycle.append(cycle)
    builtins.held_by_the_kit = [_inside(lib)[0], api.convert(array, to="dlx")]  # type: ignore[attr-defined]
