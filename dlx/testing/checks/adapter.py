"""Checks of an adapter through dlx: its declarations are true, and conversions follow their plans."""

from __future__ import annotations

import array
import builtins
import gc
import inspect
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from dlx._api import convert as api
from dlx._api.describe import describe
from dlx._api.parts import parts as split_parts
from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.native import Tensor
from dlx._core.stream import Stream
from dlx._core.types import HOST, SUBBYTE_PADDED, Device, DType
from dlx._protocols.pointer import from_pointer
from dlx._registry.compound import Parts, compounds_of
from dlx._registry.registry import registry
from dlx._support.reflect import safe_repr, type_name
from dlx.adapter.base import Adapter, Description, classes_of, look_up, version_of
from dlx.adapter.declarations import Blocker, Capabilities
from dlx.errors import DlxError, ReadOnlyError
from dlx.testing.capsules import LAYOUTS, OTHERS, Source, elements
from dlx.testing.check import check
from dlx.testing.checks.producer import check_threads
from dlx.testing.runner import environment
from dlx.testing.subject import Broken, Subject, adapter_of, attempt, error_line, must
from dlx.typing import READONLY


def get_adapter(lib: Subject) -> Adapter:
    """Return the subject's adapter."""
    found = adapter_of(lib.adapter)
    if found is None:
        raise Broken(f"there is no adapter {lib.adapter!r}")
    return found


def get_target(lib: Subject) -> Any:
    """Return the adapter as a target, or raise `NotApplicable`."""
    lib.needs(get_adapter(lib).capabilities() is not None, f"{lib.adapter} cannot be a target")
    return registry.target(lib.adapter)


def make_tensor(source: Source, *, readonly: bool = False) -> Any:
    """Return the memory of a source as a dlx.Tensor."""
    return from_pointer(
        source.address, source.shape, source.dtype, strides=source.strides, readonly=readonly, owner=source.memory
    )


def list_dtypes(target: Any) -> list[str]:
    """Return the dtypes that a target supports."""
    taken = target.capabilities.dtypes
    return sorted((target.adapter.dtypes.known() or OTHERS) if taken is None else taken)


def _shape(target: Any) -> tuple[int, ...]:
    return (24,) if target.capabilities.ndims[1] < 2 else (4, 6)


def make_sources(target: Any) -> list[tuple[str, Source]]:
    """Return sources of every layout and alignment with a supported number of dimensions."""
    stated = target.capabilities
    names = list_dtypes(target)
    dtype = "float32" if "float32" in names else names[0]
    whole = DType(dtype).bits % 8 == 0
    low, high = stated.ndims
    made = [
        (name, Source(dtype, shape, strides))
        for name, (_, shape, strides, _) in LAYOUTS.items()
        if low <= len(shape) <= high and (whole or name == "empty")
    ]
    shape = _shape(target)
    shifts = {"row-major": 0, **({"off 64 bytes": DType(dtype).bits // 8, "misaligned": 1} if whole else {})}
    if low <= len(shape):
        made += [(name, Source(dtype, shape, shift=shift)) for name, shift in shifts.items()]
    return made


def convert_as_planned(source: Any, to: Any, **options: Any) -> tuple[Any, DlxError | None]:
    """Return (result, None) or (None, error); raise `Broken` if `dlx.plan` predicts another outcome."""
    plan = api.plan(source, to=to, **options)
    result, error = attempt(api.convert, source, to=to, **options)
    if error is None:
        must(plan.outcome in ("same", "shared", "copied"), f"planned: {plan}, but it was converted")
        before, after = describe(source), describe(result)
        if plan.outcome != "same" and before.nbytes and before.address and after.address:
            shared = before.address == after.address
            must(shared == (plan.outcome == "shared"), f"planned: {plan}, but {'shared' if shared else 'copied'}")
        return result, None
    if not isinstance(error, DlxError):
        raise Broken(f"convert raised {error_line(error)}, not an error of dlx") from error
    must(plan.outcome == "refused", f"planned: {plan}, but it was refused: {error}")
    must(type(plan.error) is type(error), f"planned {type(plan.error).__name__}, raised {type(error).__name__}")
    must(error.reason and error.fix, f"an error without reason or fix: {error!r}")
    return None, error


def check_equal(back: Any, source: Source, what: str) -> None:
    """Raise `Broken` unless a dlx.Tensor has the dtype, shape and elements of a source."""
    must(back.dtype == source.dtype, f"{what}: {source.dtype} became {back.dtype}")
    must(back.shape == source.shape, f"{what}: shape {source.shape} became {back.shape}")
    padded = bool(back.flags & SUBBYTE_PADDED)
    found = elements(back.data_ptr, back.shape, back.strides, back.dtype, padded=padded)
    must(found == source.elements(), f"{what}: the elements changed")


@check("adapter", "contract", "refuses")
def adapter_contract(lib: Subject) -> None:
    """Every declared name exists, and dtypes and devices translate both ways."""
    adapter = get_adapter(lib)
    must(adapter.name == lib.adapter or lib.adapter in (adapter.package,), f"its name is {adapter.name!r}")
    must(str(version_of(adapter)), "it does not return the version of its framework")
    for name in (*adapter.types, *(adapter.fast_path.types if adapter.fast_path is not None else ())):
        found = look_up(name)
        must(found is None or isinstance(found, type), f"{name} is {found!r}, not a type")
    must(not adapter.types or classes_of(adapter), f"its types do not exist: {', '.join(adapter.types)}")
    dtypes, devices = adapter.dtypes, adapter.devices
    for name in (*dtypes.names, *dtypes.extension, *dtypes.storage):
        must(DType(name).name == name, f"the name of {name!r} is {DType(name).name!r}")
    for name in sorted(dtypes.known()):
        again = dtypes.from_native(dtypes.to_native(DType(name)))
        must(again == DType(name), f"{name} becomes {dtypes.to_native(DType(name))!r}, and that {again}")
    stated = adapter.capabilities()
    if stated is not None and stated.dtypes is not None:
        strange = [name for name in stated.dtypes if attempt(DType, name)[1] is not None]
        must(not strange, f"unknown dtypes: {strange}")
    host = devices.from_native(devices.to_native(HOST))
    must(host == HOST, f"the host becomes {host}")
    tensor = None if stated is None else _find_supported(registry.target(lib.adapter))
    if lib.make is not None:
        check_results(adapter, lib.array()[0], tensor)
    elif tensor is not None:
        check_results(adapter, adapter.variant(tensor).load(tensor), tensor)


def _find_supported(target: Any) -> Tensor | None:
    """Return a tensor that a target can share."""
    return next((made for _, source in make_sources(target) if not target.check(made := make_tensor(source))), None)


@check("adapter", "dtypes", "wrong")
def adapter_round_trips(lib: Subject) -> None:
    """Every supported dtype is converted to the framework and back with all bits."""
    target = get_target(lib)
    for dtype in list_dtypes(target):
        source = Source(dtype, _shape(target))
        inside, error = convert_as_planned(make_tensor(source), lib.adapter)
        must(error is None, f"{dtype}, a declared dtype: {error}")
        back, error = convert_as_planned(inside, "dlx")
        must(error is None, f"{dtype} is not converted back: {error}")
        check_equal(back, source, dtype)


@check("adapter", "dtypes", "wrong")
def adapter_narrowing(lib: Subject) -> None:
    """An unsupported dtype is refused."""
    target = get_target(lib)
    for dtype in sorted(set(OTHERS) - set(list_dtypes(target))):
        source = Source(dtype, _shape(target))
        inside, error = convert_as_planned(make_tensor(source), lib.adapter)
        if error is None:
            check_equal(api.convert(inside, to="dlx"), source, dtype)


@check("adapter", "layouts", "wrong", alone=True)
def adapter_layouts(lib: Subject) -> None:
    """Every layout is converted correctly: shared or copied, as `dlx.plan` predicts."""
    target = get_target(lib)
    for name, source in make_sources(target):
        for copy in (None, False, True):
            tensor = make_tensor(source)
            result, error = convert_as_planned(tensor, lib.adapter, copy=copy)
            if error is not None:
                must(copy is False, f"{name}: refused with copy={copy}: {error}")
                continue
            check_equal(api.convert(result, to="dlx"), source, f"{name}, copy={copy}")
            address = describe(result).address
            if not source.elements() or not address:
                continue
            must(copy is not True or address != source.address, f"{name}: shared despite copy=True")
            must(copy is not False or address == source.address, f"{name}: copied despite copy=False")


@check("adapter", "layouts", "fatal", alone=True)
def adapter_capabilities(lib: Subject) -> str:
    """Arrays that the capabilities allow are shared, or copied if the capabilities declare it."""
    target = get_target(lib)
    taken = []
    for name, source in make_sources(target):
        tensor = make_tensor(source)
        if target.check(tensor):
            continue
        result, error = attempt(target.over(tensor).adapter.load, tensor)
        must(error is None, f"{name}, allowed by its capabilities: {error_line(error)}")
        check_equal(api.convert(result, to="dlx"), source, name)
        address = describe(result).address
        moved = address and address != source.address and source.elements()
        copies = target.capabilities.copies
        may_copy = copies is True or (copies and tensor.dtype.name in copies)
        must(not moved or may_copy, f"{name} was copied by the framework")
        taken.append(name)
    must(taken, "its capabilities allow no layout at all")
    return f"{'copies' if target.capabilities.copies is True else 'shares'}: {', '.join(taken)}"


@check("adapter", "read-only", "wrong")
def adapter_readonly(lib: Subject) -> None:
    """Read-only memory cannot be written through a result; `readonly="error"` may refuse it."""
    source = make_source(lib)
    for policy in READONLY:
        result, error = convert_as_planned(make_tensor(source, readonly=True), lib.adapter, readonly=policy)
        if error is not None:
            must(policy == "error", f"readonly={policy!r}: {error}")
            must(isinstance(error, ReadOnlyError), f"refused with {error_line(error)}")
            continue
        info = describe(result)
        shared = info.address == source.address
        must(policy == "share" or not shared or info.readonly, f"readonly={policy!r}: shared and writable")
        if lib.write is not None and policy != "share":
            before = source.elements()
            attempt(lib.write, result)
            must(source.elements() == before, f"readonly={policy!r}: the result writes to the source")


def make_source(lib: Subject) -> Source:
    """Return a row-major source for an adapter."""
    return next(source for name, source in make_sources(get_target(lib)) if name in ("row-major", "scalar"))


def make_array(lib: Subject) -> tuple[Any, Source]:
    """Return (an array of the framework, its source)."""
    source = make_source(lib)
    return api.convert(make_tensor(source), to=lib.adapter), source


@check("adapter", "contract", "wrong")
def adapter_describes(lib: Subject) -> None:
    """`dlx.describe` agrees with the exported tensor."""
    array = make_array(lib)[0] if lib.make is None else lib.array()[0]  # not every adapter is a target
    info, tensor = describe(array), api.convert(array, to="dlx")
    must(info.dtype == tensor.dtype and info.shape == tensor.shape, f"{info} is exported as {tensor!r}")
    must(info.strides is None or info.contiguous() or info.strides == tensor.strides, f"strides {info.strides}")
    must(info.address in (None, 0, tensor.data_ptr), f"at {info.address}, exported from {tensor.data_ptr}")
    must(info.readonly == tensor.readonly, f"readonly={info.readonly}, exported with {tensor.readonly}")
    must(info.framework and info.dtype_name, f"no name: {info}")


@check("adapter", "copies", "wrong")
def adapter_identity(lib: Subject) -> None:
    """An array of the framework is returned unchanged; `copy=True` makes a new one."""
    array, source = make_array(lib)
    must(api.convert(array, to=lib.adapter) is array, "it was not returned unchanged")
    copied = api.convert(array, to=lib.adapter, copy=True)
    must(describe(copied).address != source.address, "copy=True shares the memory")
    must(type(copied) is type(array), f"the type of a copy is {type_name(type(copied))}")
    check_equal(api.convert(copied, to="dlx"), source, "copy=True")


@check("adapter", "lifetimes", "fatal")
def adapter_lifetimes(lib: Subject) -> None:
    """Memory is released with the last array that uses it, not earlier or later."""

    class Owner(bytearray):
        """Memory with a weak reference."""

    array, source = make_array(lib)
    owner = Owner(source.elements())
    watch = weakref.ref(owner)
    view = api.convert(memoryview(owner), to="dlx")
    borrowed = from_pointer(view.data_ptr, source.shape, source.dtype, owner=view)
    del view, owner
    result = api.convert(borrowed, to=lib.adapter)
    shared = describe(result).address == borrowed.data_ptr
    del borrowed
    gc.collect()
    must(not shared or watch() is not None, "the owner was released while the result uses its memory")
    check_equal(api.convert(result, to="dlx"), source, "after its source was dropped")
    del result
    gc.collect()
    must(watch() is None, "the owner is not released after the result")
    back = api.convert(array, to="dlx")
    del array
    gc.collect()
    check_equal(back, source, "after its array was dropped")


@check("adapter", "leaks", "wrong")
def adapter_leaks(lib: Subject) -> None:
    """No memory leaks, even if a conversion is refused."""
    target = get_target(lib)
    made = make_sources(target)

    def once() -> None:
        for _, source in made:
            for options in ({}, {"copy": False}, {"copy": True}, {"readonly": "error"}, {"stream": 7}):
                for readonly in (False, True):
                    tensor = make_tensor(source, readonly=readonly)
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
    must(left == 0, f"{left} managed tensors are alive after {10 * len(made) * 10} conversions")


@check("adapter", "threads", "fatal")
def adapter_threads(lib: Subject) -> None:
    """Many threads may convert at once."""
    array, source = make_array(lib)
    mine = [make_source(lib) for _ in range(8)]
    before = native.live()

    def work(i: int) -> None:
        for _ in range(50):
            check_equal(api.convert(array, to="dlx"), source, "exported")
            check_equal(api.convert(api.convert(make_tensor(mine[i]), to=lib.adapter), to="dlx"), mine[i], "imported")

    check_threads(work)
    gc.collect()
    must(native.live() == before, f"{native.live() - before:+} managed tensors are alive")


@check("adapter", "contract", "wrong")
def adapter_fast_path(lib: Subject) -> None:
    """The fast path gives the same result as the Python path."""
    adapter = get_adapter(lib)
    lib.needs(adapter.fast_path is not None and adapter.fast_path.types, "it lists no fast-path types")
    slow = inspect.unwrap(api.convert)
    target = get_target(lib)
    for dtype in list_dtypes(target):
        array = api.convert(make_tensor(Source(dtype, _shape(target))), to=lib.adapter)
        for to in ("dlx", lib.adapter):
            pair = [attempt(path, array, to=to) for path in (api.convert, api.convert, slow)]
            raised = {type(error) for _, error in pair}
            must(len(raised) == 1, f"{dtype} to {to}: {', '.join(error_line(error) for _, error in pair if error)}")
            if pair[0][1] is None:
                is_new = api.plan(array, to=to).outcome == "copied"  # then each result has its own address
                infos = [describe(result) for result, _ in pair]
                said = {str(info) if is_new else f"{info}{info.address}" for info in infos}
                must(len(said) == 1, f"{dtype} to {to}: the paths differ: {' and '.join(sorted(said))}")


@check("adapter", "contract", "wrong")
def adapter_containers(lib: Subject) -> None:
    """Containers keep their type and paths, and every array in them is converted."""
    lib.needs(lib.containers, "no containers are declared")
    for name, make in lib.containers.items():
        tree = make(api.convert(make_tensor(Source("float32", (4, 6))), to="dlx"))
        plan = api.plan(tree, to="dlx")
        must(plan.outcome == "tree" and len(plan.leaves) >= 1, f"{name}: it contains no array: {plan}")
        try:
            result = api.convert(tree, to="dlx", copy=True)
        except DlxError as error:
            raise Broken(f"{name}: {error_line(error)}") from error
        again = api.plan(result, to="dlx")
        before, after = ([leaf.path for leaf in each.leaves] for each in (plan, again))
        must(before == after, f"{name}: paths {before} became {after}")
        must(type(result) is type(tree), f"{name} became {type_name(type(result))}")


_COMPRESSED = {"data": ("f", (3,), [1, 2, 3]), "indices": ("i", (3,), [0, 2, 1]), "indptr": ("i", (3,), [0, 2, 3])}
_PARTS: dict[str, dict[str, Any]] = {  # of the usual kinds: (type code, shape, numbers), or a plain value
    "csr": {**_COMPRESSED, "shape": (2, 3)},
    "csc": {**_COMPRESSED, "shape": (3, 2)},
    "coo": {"data": ("f", (2,), [1, 2]), "coords": ("q", (2, 2), [0, 1, 2, 0]), "shape": (2, 3)},
    "ragged": {"values": ("f", (3,), [1, 2, 3]), "offsets": ("q", (4,), [0, 2, 2, 3])},
}


@check("adapter", "contract", "wrong")
def adapter_compounds(lib: Subject) -> None:
    """Sparse and ragged arrays are joined from parts, split into the same parts, and unchanged in their framework."""
    kinds = [each.kind for each in compounds_of(get_adapter(lib)) if each.join is not None and each.kind in _PARTS]
    lib.needs(kinds, "it joins no sparse or ragged arrays of a usual kind")
    for kind in kinds:
        whole = Parts(kind)
        for name, part in _PARTS[kind].items():
            whole[name] = _numbers(*part) if isinstance(part[0], str) else part
        joined, error = attempt(api.convert, whole, to=lib.adapter)
        must(error is None and type(joined) is not dict, f"{kind}: cannot join its parts: {error_line(error)}")
        must(api.convert(joined, to=lib.adapter) is joined, f"{kind}: it changes inside its framework")
        for name, part in split_parts(joined, to="dlx").items():
            expected = whole[name] if isinstance(part, tuple) else memoryview(whole[name]).tolist()
            found = part if isinstance(part, tuple) else memoryview(part).tolist()
            must(found == expected, f"{kind}: the part {name!r} is {found} instead of {expected}")


def _numbers(code: str, shape: tuple[int, ...], values: list[int]) -> Tensor:
    memory = memoryview(array.array(code, values).tobytes())
    return api.convert(memory.cast("B").cast(code, shape), to="dlx")  # type: ignore[no-any-return, call-overload]


@check("adapter", "contract", "friction", alone=True)
def adapter_imports_nothing(lib: Subject) -> None:
    """Finding and loading the adapter does not import its framework."""
    adapter = get_adapter(lib)
    lib.needs(adapter.package != "dlx", "it belongs to dlx")
    code = f"""
import importlib, sys
module = importlib.import_module({type(adapter).__module__!r})
getattr(module, "dlx_adapters", list)()
print({adapter.package!r} in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    must(done.returncode == 0, f"cannot load it: {done.stderr.strip().splitlines()[-1:]}")
    must(done.stdout.strip() == "False", f"loading the adapter imports {adapter.package}")


@check("adapter", "threads", "fatal", alone=True)
def adapter_end(lib: Subject) -> None:
    """The process exits cleanly while converted arrays are alive."""
    array, _ = make_array(lib)
    cycle: list[Any] = [array, api.convert(array, to="dlx"), make_array(lib)[0]]
    cycle.append(cycle)
    builtins.held_by_the_kit = [make_array(lib)[0], api.convert(array, to="dlx")]  # type: ignore[attr-defined]


# ---- types of the hooks' results, which conversions do not check ----------------------------------

_NONE = type(None)
_INFO: dict[str, Any] = {
    **dict.fromkeys(("framework", "type_name", "dtype_name", "owner"), str),
    **dict.fromkeys(("protocols", "notes"), tuple),
    **dict.fromkeys(("shape", "strides"), (tuple, _NONE)),
    **dict.fromkeys(("nbytes", "address"), (int, _NONE)),
    "dtype": (DType, _NONE),
    "device": (Device, _NONE),
}


def check_results(adapter: Adapter, array: Any, tensor: Tensor | None) -> None:
    """Call every hook with an array, and a tensor if the adapter is a target; raise `Broken` on a wrong type."""
    for hook, kinds, function, *arguments in _iter_calls(adapter, array, tensor):
        answer, error = attempt(function, *arguments)
        if error is None:  # the checks that convert report exceptions
            _check_type(adapter, hook, answer, kinds)


def _check_type(adapter: Adapter, hook: str, answer: Any, kinds: Any) -> None:
    named = kinds if isinstance(kinds, tuple) else (kinds,)
    wanted = " or ".join("None" if kind is _NONE else kind.__name__ for kind in named)
    # The exact type too: __class__ of a wrong result may raise.
    found, error = attempt(lambda: type(answer) in named or isinstance(answer, kinds))
    must(found and error is None, f"{hook} of {adapter.name!r} returned {safe_repr(answer)}, not {wanted}")
    if type(answer) is Description:
        for blocker in answer.blockers if isinstance(answer.blockers, tuple) else (answer.blockers,):
            _check_type(adapter, f"{hook}, blockers", blocker, Blocker)
        _check_type(adapter, f"{hook}, tensor", answer.tensor, (Tensor, _NONE))
        info = answer.info() if callable(answer.info) else answer.info
        _check_type(adapter, f"{hook}, info", info, (ArrayInfo, _NONE))
        for field, kind in _INFO.items() if info is not None else ():
            _check_type(adapter, f"{hook}, info.{field}", getattr(info, field), kind)
    elif type(answer) is Capabilities:
        for name, pair in answer.refusals.items():
            right = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, str) for each in (name, *pair))
            must(right, f"{hook} of {adapter.name!r} refuses {name!r} with {safe_repr(pair)}, not (reason, fix)")


def _iter_calls(adapter: Adapter, array: Any, tensor: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield (name, types, function, arguments...) for each hook of an array."""
    exact, dtypes, devices = classes_of(adapter) or object, adapter.dtypes, adapter.devices
    yield "describe", Description, adapter.describe, array
    yield "export", Tensor, adapter.export, array
    yield "capabilities", (Capabilities, _NONE), adapter.capabilities
    if tensor is not None:
        yield "variant", Adapter, adapter.variant, tensor
        yield "load", exact, registry.target(adapter.name).over(tensor).adapter.load, tensor
    if type(adapter).copy is not Adapter.copy:
        yield "copy", exact, adapter.copy, array
    yield "dtypes.known", frozenset, dtypes.known
    for name in sorted(dtypes.names):
        yield "dtypes.native_name", str, dtypes.native_name, name
        yield "dtypes.from_native", (DType, _NONE), lambda name=name: dtypes.from_native(dtypes.to_native(DType(name)))
    yield "devices.from_native", Device, lambda: devices.from_native(devices.to_native(HOST))
    yield "devices.of", (Device, _NONE), devices.of, array
    yield "devices.default", Device, devices.default
    yield "devices.current", int, devices.current, HOST.type
    yield "devices.activate", AbstractContextManager, devices.activate, HOST
    yield "devices.available", Iterable, devices.available
    if tensor is None:
        return
    streams, placement, writes = adapter.streams, adapter.placement, adapter.writes
    if streams is not None and streams.ready is not None:
        yield "streams.ready", (Stream, _NONE), streams.ready, array, tensor
    if adapter.arrays.consume is not None:
        yield "arrays.consume", Tensor, adapter.arrays.consume, array, tensor, False
    if placement is not None:
        yield "placement.load", exact, placement.load, tensor, True
        yield "placement.is_committed", bool, placement.is_committed, array
    if writes is not None and writes.guarded is not None:
        yield "writes.guarded", exact, writes.guarded, array, True
    if writes is not None and writes.count is not None:
        yield "writes.count", (int, _NONE), writes.count, array
    if adapter.is_tracing is not None:
        yield "is_tracing", bool, adapter.is_tracing
