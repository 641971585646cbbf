"""Checks of an adapter, through dlx alone: its declarations are true, and what dlx plans is what happens."""

from __future__ import annotations

from typing import Any

from dlx._api import convert as api
from dlx._api.describe import describe
from dlx._core.native import Tensor
from dlx._core.types import SUBBYTE_PADDED, Device, DType
from dlx._protocols.pointer import from_pointer
from dlx._registry.registry import registry
from dlx.adapter.base import Adapter, classes_of, look_up, version_of
from dlx.errors import DlxError, ReadOnlyError
from dlx.testing.check import check
from dlx.testing.subject import Broken, NotApplicable, Subject, adapter_of, attempt, error_line, must
from dlx.testing.support.answers import check_answers
from dlx.testing.support.capsules import elements
from dlx.testing.support.producers import LAYOUTS, OTHERS, Source
from dlx.typing import READONLY

__all__ = ["converted", "own_of", "same", "sources", "target_of", "tensor_of"]


def own_of(lib: Subject) -> Adapter:
    """Return the subject's adapter."""
    found = adapter_of(lib.adapter)
    must(found is not None, f"there is no adapter {lib.adapter!r}")
    assert found is not None
    return found


def target_of(lib: Subject) -> Any:
    """Return the adapter as a target, or say that it is none."""
    if own_of(lib).capabilities() is None:
        raise NotApplicable(f"{lib.adapter} cannot be a target")
    return registry.target(lib.adapter)


def tensor_of(source: Source, *, readonly: bool = False) -> Any:
    """Return a source's memory as a dlx.Tensor."""
    return from_pointer(
        source.address, source.shape, source.dtype, strides=source.strides, readonly=readonly, owner=source.memory
    )


def dtypes_of(target: Any) -> list[str]:
    """Return the dtypes that a target takes."""
    taken = target.capabilities.dtypes
    return sorted((target.adapter.dtypes.known() or OTHERS) if taken is None else taken)


def sources(target: Any) -> list[tuple[str, Source]]:
    """Return sources of every layout and alignment, as far as the target has so many dimensions."""
    stated = target.capabilities
    names = dtypes_of(target)
    dtype = "float32" if "float32" in names else names[0]
    whole = DType(dtype).bits % 8 == 0
    made = []
    for name, (_, shape, strides, _) in LAYOUTS.items():
        if stated.ndims[0] <= len(shape) <= stated.ndims[1] and (whole or name == "empty"):
            made.append((name, Source(dtype, shape, strides)))
    shape = (24,) if stated.ndims[1] < 2 else (4, 6)
    if stated.ndims[0] <= len(shape):
        made.append(("row-major", Source(dtype, shape)))
        if whole:
            step = max(DType(dtype).bits // 8, 1)
            made.append(("off 64 bytes", Source(dtype, shape, shift=step)))
            made.append(("misaligned", Source(dtype, shape, shift=1)))
    return made


def converted(source: Any, to: Any, **options: Any) -> tuple[Any, DlxError | None]:
    """Return (result, None) or (None, error); what `dlx.plan` said must be what happens.

    Raises
    ------
    Broken
        If plan and conversion differ, or an error is none of dlx's, or says no reason or fix.
    """
    plan = api.plan(source, to=to, **options)
    result, error = attempt(api.convert, source, to=to, **options)
    if error is None:
        must(plan.outcome in ("same", "shared", "copied"), f"planned: {plan}. It was converted")
        before, after = describe(source), describe(result)
        if plan.outcome != "same" and before.nbytes and before.address and after.address:
            shared = before.address == after.address
            must(shared == (plan.outcome == "shared"), f"planned: {plan}. It was {'shared' if shared else 'copied'}")
        return result, None
    if not isinstance(error, DlxError):
        raise Broken(f"convert raised {error_line(error)}, which is no error of dlx") from error
    must(plan.outcome == "refused", f"planned: {plan}. It was refused: {error}")
    must(type(plan.error) is type(error), f"planned {type(plan.error).__name__}, raised {type(error).__name__}")
    must(error.reason and error.fix, f"an error without reason or fix: {error!r}")
    return None, error


def same(back: Any, source: Source, what: str) -> None:
    """Raise `Broken` unless a dlx.Tensor shows what a source has."""
    must(back.dtype == source.dtype, f"{what}: {source.dtype} became {back.dtype}")
    must(back.shape == source.shape, f"{what}: shape {source.shape} became {back.shape}")
    padded = bool(back.flags & SUBBYTE_PADDED)
    found = elements(back.data_ptr, back.shape, back.strides, back.dtype, padded=padded)
    must(found == source.elements(), f"{what}: the elements changed")


@check(kind="adapter", about="contract", severity="refuses")
def adapter_contract(lib: Subject) -> None:
    """What the adapter declares can be looked up, and its dtypes and devices translate both ways."""
    adapter = own_of(lib)
    must(adapter.name == lib.adapter or lib.adapter in (adapter.package,), f"it is called {adapter.name!r}")
    must(str(version_of(adapter)), "it does not know its framework's version")
    for name in (*adapter.types, *(adapter.fast_path.types if adapter.fast_path is not None else ())):
        found = look_up(name)
        must(found is None or isinstance(found, type), f"{name} is {found!r}, not a type")
    must(not adapter.types or classes_of(adapter), f"none of its types exists: {', '.join(adapter.types)}")
    dtypes, devices = adapter.dtypes, adapter.devices
    for name in (*dtypes.names, *dtypes.extension, *dtypes.storage):
        must(DType(name).name == name, f"{name!r} is called {DType(name).name!r}")
    for name in sorted(dtypes.known()):
        again = dtypes.from_native(dtypes.to_native(DType(name)))
        must(again == DType(name), f"{name} becomes {dtypes.to_native(DType(name))!r}, and that {again}")
    stated = adapter.capabilities()
    if stated is not None and stated.dtypes is not None:
        strange = [name for name in stated.dtypes if attempt(DType, name)[1] is not None]
        must(not strange, f"dtypes that dlx does not know: {strange}")
    host = devices.from_native(devices.to_native(Device("cpu")))
    must(host == Device("cpu"), f"the host becomes {host}")
    tensor = None if stated is None else _taken(registry.target(lib.adapter))
    if lib.make is not None:
        check_answers(adapter, lib.array()[0], tensor)
    elif tensor is not None:
        check_answers(adapter, adapter.variant(tensor).load(tensor), tensor)


def _taken(target: Any) -> Tensor | None:
    """Return a tensor that a target takes as it is."""
    return next((made for _, source in sources(target) if not target.check(made := tensor_of(source))), None)


@check(kind="adapter", about="dtypes", severity="wrong")
def adapter_round_trips(lib: Subject) -> None:
    """Every dtype that the adapter takes goes in and comes back with every bit."""
    # From dlx.Tensor into the framework and back, for each dtype of its capabilities.
    target = target_of(lib)
    shape = (24,) if target.capabilities.ndims[1] < 2 else (4, 6)
    for dtype in dtypes_of(target):
        source = Source(dtype, shape)
        inside, error = converted(tensor_of(source), lib.adapter)
        must(error is None, f"{dtype}, which it declares: {error}")
        back, error = converted(inside, "dlx")
        must(error is None, f"{dtype} does not come back: {error}")
        same(back, source, dtype)


@check(kind="adapter", about="dtypes", severity="wrong")
def adapter_narrowing(lib: Subject) -> None:
    """A dtype that the adapter does not take is refused."""
    # Convert every other dtype; the round trip must be exact.
    target = target_of(lib)
    for dtype in sorted(set(OTHERS) - set(dtypes_of(target))):
        source = Source(dtype, (24,) if target.capabilities.ndims[1] < 2 else (4, 6))
        inside, error = converted(tensor_of(source), lib.adapter)
        if error is None:
            same(api.convert(inside, to="dlx"), source, dtype)


@check(kind="adapter", about="layouts", severity="wrong", alone=True)
def adapter_layouts(lib: Subject) -> None:
    """Every layout comes in right: shared or copied, as `dlx.plan` says."""
    # Convert sources of every layout, with every value of copy=.
    target = target_of(lib)
    for name, source in sources(target):
        for copy in (None, False, True):
            tensor = tensor_of(source)
            result, error = converted(tensor, lib.adapter, copy=copy)
            if error is not None:
                must(copy is False, f"{name}: refused with copy={copy}: {error}")
                continue
            same(api.convert(result, to="dlx"), source, f"{name}, copy={copy}")
            address = describe(result).address
            if not source.elements() or not address:
                continue
            must(copy is not True or address != source.address, f"{name}: shared in spite of copy=True")
            must(copy is not False or address == source.address, f"{name}: copied in spite of copy=False")


@check(kind="adapter", about="layouts", severity="fatal", alone=True)
def adapter_capabilities(lib: Subject) -> str:
    """What its capabilities allow is taken as it is: shared, unless they say that it copies."""
    # Load every layout that `check` accepts, without a copy of dlx.
    target = target_of(lib)
    taken = []
    for name, source in sources(target):
        tensor = tensor_of(source)
        if target.check(tensor):
            continue
        result, error = attempt(target.over(tensor).adapter.load, tensor)
        must(error is None, f"{name}, which its capabilities allow: {error_line(error)}")
        same(api.convert(result, to="dlx"), source, name)
        address = describe(result).address
        moved = address and address != source.address and source.elements()
        copies = target.capabilities.copies
        may_copy = copies is True or (copies and tensor.dtype.name in copies)
        must(not moved or may_copy, f"{name} was copied by the framework")
        taken.append(name)
    must(taken, "its capabilities allow no layout at all")
    return f"{'copies' if target.capabilities.copies is True else 'shares'}: {', '.join(taken)}"


@check(kind="adapter", about="read-only", severity="wrong")
def adapter_readonly(lib: Subject) -> None:
    """Read-only memory cannot be written through what comes in, and is refused where it says so."""
    target = target_of(lib)
    source = next(source for name, source in sources(target) if name in ("row-major", "scalar"))
    for policy in READONLY:
        result, error = converted(tensor_of(source, readonly=True), lib.adapter, readonly=policy)
        if error is not None:
            must(policy == "error", f"readonly={policy!r}: {error}")
            must(isinstance(error, ReadOnlyError), f"refused with {error_line(error)}")
            continue
        info = describe(result)
        shared = info.address == source.address
        must(policy == "share" or not shared or info.readonly, f"readonly={policy!r}: shared, and says it is writable")
        if lib.write is not None and policy != "share":
            before = source.elements()
            attempt(lib.write, result)
            must(source.elements() == before, f"readonly={policy!r}: the result writes to the source")
