"""One cell of the matrix: convert, compare with the plan and with the bits that went in, and say what became of it."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import dlx
from dlx.abi import SUBBYTE_PADDED
from dlx.native import ffi
from dlx.registry import registry
from matrix.sources import DTYPES, FRAMEWORKS, ODD, of_dtype

WRITES = frozenset({"torch", "tvm_ffi"})  # their arrays are always writable


class Wrong(AssertionError):
    """A cell that breaks the promise."""


def installed() -> list[str]:
    """Return the targets that are here."""
    found = []
    for name in FRAMEWORKS:
        try:
            registry.target(name)
        except dlx.errors.FrameworkNotInstalledError:
            continue
        found.append(name)
    return found


def versions() -> dict[str, str]:
    """Return the versions of what the cells depend on."""
    return {name: registry.target(name).version() for name in installed() if name != "dlx"}


def elements(tensor: Any) -> list[int]:
    """Return the bits of every element of a host tensor, in row-major order of their indices, as integers."""
    bits = tensor.dtype.bits * tensor.dtype.lanes
    steps = itertools.product(*map(range, tensor.shape))
    places = [sum(i * stride for i, stride in zip(at, tensor.strides, strict=True)) for at in steps]
    if not places:
        return []
    if bits % 8 and not tensor.flags & SUBBYTE_PADDED:
        whole = int.from_bytes(ffi.buffer(ffi.cast("char *", tensor.data_ptr), tensor.nbytes), "little")
        return [whole >> place * bits & ((1 << bits) - 1) for place in places]
    size = -(-bits // 8)
    low = min(places) * size
    span = ffi.buffer(ffi.cast("char *", tensor.data_ptr + low), max(places) * size + size - low)
    values = (span[place * size - low : place * size - low + size] for place in places)
    return [int.from_bytes(value, "little") & ((1 << bits) - 1) for value in values]


def converted(obj: Any, target: str, copy: bool | None) -> tuple[Any, dlx.Plan]:
    """Return (result, plan), or (error, plan) where it is refused; they must agree."""
    plan = dlx.plan(obj, to=target, copy=copy)
    try:
        result = dlx.convert(obj, to=target, copy=copy)
    except dlx.errors.DlxError as error:
        if (plan.outcome, type(plan.error), str(plan.error)) != ("refused", type(error), str(error)):
            raise Wrong(f"planned {plan}, found {type(error).__name__}: {error}") from error
        return error, plan
    if plan.outcome not in ("same", "shared", "copied"):
        raise Wrong(f"planned {plan}, and it was converted")
    return result, plan


def cell(make: Callable[[], Any], target: str) -> str:
    """Return what becomes of a source: same, shared, viewed, copied, or the class of the error.

    Raises
    ------
    Wrong
        If values, dtype or shape changed, if plan and conversion disagree, if memory is shared where it was said to be
        copied or the other way round, or if read-only memory came out writable.
    """
    outcomes = [_outcome(make(), target, copy) for copy in (None, False, True)]
    return outcomes[0]


def _outcome(obj: Any, target: str, copy: bool | None) -> str:
    before = _described(obj)
    known = before is not None and before.shape is not None and before.address
    expected = _expected(obj, before)
    result, plan = converted(obj, target, copy)
    if plan.outcome == "refused":
        return type(result).__name__
    if plan.outcome == "same":
        if result is not obj:
            raise Wrong("the same was planned, and is another object")
        return "same"
    after = dlx.describe(result)
    inside = dlx.plan(obj, to="dlx").outcome == "refused"  # copied by its own framework, and leaves it no way
    if expected is not None and not inside:
        arrived = dlx.convert(result, to="dlx")
        if (arrived.dtype, arrived.shape, elements(arrived)) != expected:
            raise Wrong(f"expected {expected}, found {(arrived.dtype, arrived.shape, elements(arrived))}")
    if known and (after.address == before.address) is not (plan.outcome == "shared"):
        raise Wrong(f"{plan.outcome}, from {before.address:#x} to {after.address:#x}")
    if known and before.readonly and plan.outcome == "shared" and (target in WRITES or not after.readonly):
        raise Wrong("read-only memory came out writable")
    if copy is False and plan.outcome == "copied":
        raise Wrong("copied in spite of copy=False")
    if copy and plan.outcome != "copied":
        raise Wrong("shared in spite of copy=True")
    return "viewed" if any(step.do == "view" for step in plan.steps) and plan.outcome == "shared" else plan.outcome


def _described(obj: Any) -> Any:
    try:
        return dlx.describe(obj)
    except dlx.errors.DlxError:
        return None


def _expected(obj: Any, before: Any) -> tuple[Any, ...] | None:
    """Return (dtype, shape, elements) as the source's own framework says them; None where it cannot be asked twice."""
    if before is None or before.shape is None or before.dtype is None:
        return None
    values = _own_values(obj, before)
    return None if values is None else (before.dtype, before.shape, values)


def _own_values(obj: Any, before: Any) -> list[int] | None:
    """Return the bits of the elements, asked for without dlx."""
    kind = type(obj).__module__.partition(".")[0]
    if isinstance(obj, dlx.Tensor):
        return elements(obj)
    if kind == "torch":
        import torch

        if obj.layout is not torch.strided or obj.requires_grad or obj.is_quantized or not before.address:
            return None
        plain = obj.resolve_conj().resolve_neg().contiguous().clone()
        return _split(bytes(plain.flatten().view(torch.uint8).tolist()), before) if plain.numel() else []
    if kind == "numpy" and before.dtype.bits >= 8:
        native = obj.astype(obj.dtype.newbyteorder("=")) if not obj.dtype.isnative else obj
        return _split(native.tobytes(), before)
    if kind in ("jax", "jaxlib") and before.dtype.bits >= 8 and before.address:
        return _split(__import__("numpy").asarray(obj).tobytes(), before)
    return None


def _split(raw: bytes, info: Any) -> list[int]:
    size = info.dtype.bits * info.dtype.lanes // 8
    return [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]


def measured(progress: bool = False) -> Iterator[tuple[str, str, str, str]]:
    """Yield (table, source, target, outcome) of every cell that can be tried here; "-" for no such source."""
    targets = installed()
    tables: list[tuple[str, str, Callable[[], Any]]] = []
    for framework, dtype in itertools.product(targets, DTYPES):
        tables.append((f"dtypes out of {framework}", dtype, lambda f=framework, d=dtype: of_dtype(f, d)))
    tables += [("odd sources", name, make) for name, make in ODD.items()]
    for table, name, make in tables:
        for target in targets:
            if progress:  # the last line names the cell that killed the process
                print(f"{table}: {name} -> {target}", file=sys.stderr, flush=True)
            yield table, name, target, _tried(make, target)


def _tried(make: Callable[[], Any], target: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks, about what they call experimental
        try:
            make()
        except ImportError:
            return "?"
        except (dlx.errors.DlxError, TypeError, ValueError, RuntimeError):  # a framework without that dtype
            return "-"
        try:
            return cell(make, target)
        except Wrong as error:
            return f"WRONG: {error}"
