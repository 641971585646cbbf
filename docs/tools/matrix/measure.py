"""Measure one cell of the matrix: convert, and compare the result with the plan and the bits of the source."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import dlx
from dlx._core.native import ffi
from dlx._core.types import SUBBYTE_PADDED
from dlx._registry.registry import registry
from dlx.adapter.base import version_of
from matrix.sources import DTYPES, FRAMEWORKS, FURTHER, ODD, VALUES, make_array, memory

WRITES = frozenset({"torch", "tvm_ffi"})  # their arrays are always writable


def _pyarrow_type(name: str) -> Callable[[], Any]:
    return lambda: getattr(__import__("pyarrow"), name)


TARGETS: dict[str, Callable[[], Any]] = {name: (lambda n=name: n) for name in (*FRAMEWORKS, *FURTHER)}
TARGETS |= {f"pyarrow.{name}": _pyarrow_type(name) for name in ("Array", "Tensor")}


class Wrong(AssertionError):
    """A cell that breaks the promise."""


def list_installed(names: Sequence[str] = FRAMEWORKS) -> list[str]:
    """Return the installed targets."""
    found = []
    for name in names:
        try:
            registry.target(name)
        except dlx.errors.FrameworkNotInstalledError:
            continue
        found.append(name)
    return found


def read_versions(names: Sequence[str] = FRAMEWORKS) -> dict[str, str]:
    """Return the versions of the installed targets."""
    return {name: version_of(registry.target(name).adapter) for name in list_installed(names) if name != "dlx"}


def read_elements(tensor: Any) -> list[int]:
    """Return the bits of every element of a host tensor as integers, in row-major order."""
    bits = tensor.dtype.bits * tensor.dtype.lanes
    steps = itertools.product(*map(range, tensor.shape))
    offsets = [sum(i * stride for i, stride in zip(at, tensor.strides, strict=True)) for at in steps]
    if not offsets:
        return []
    if bits % 8 and not tensor.flags & SUBBYTE_PADDED:
        whole = int.from_bytes(ffi.buffer(ffi.cast("char *", tensor.data_ptr), tensor.nbytes), "little")
        return [whole >> offset * bits & ((1 << bits) - 1) for offset in offsets]
    size = -(-bits // 8)
    low = min(offsets) * size
    span = ffi.buffer(ffi.cast("char *", tensor.data_ptr + low), max(offsets) * size + size - low)
    values = (span[offset * size - low : offset * size - low + size] for offset in offsets)
    return [int.from_bytes(value, "little") & ((1 << bits) - 1) for value in values]


def convert_as_planned(obj: Any, target: Any, copy: bool | None) -> tuple[Any, dlx.Plan]:
    """Return (result, plan), or (error, plan) if it is refused; raise `Wrong` if they disagree."""
    plan = dlx.plan(obj, to=target, copy=copy)
    try:
        result = dlx.convert(obj, to=target, copy=copy)
    except dlx.errors.DlxError as error:
        if (plan.outcome, type(plan.error), str(plan.error)) != ("refused", type(error), str(error)):
            raise Wrong(f"planned {plan}, found {type(error).__name__}: {error}") from error
        return error, plan
    if plan.outcome not in ("same", "shared", "copied", "tree"):
        raise Wrong(f"planned {plan}, but it was converted")
    return result, plan


def measure_cell(make: Callable[[], Any], target: str, values: Callable[[], list[int]] | None = None) -> str:
    """Return the outcome for a source: same, shared, viewed, copied, tree, or the class of the error.

    Raises
    ------
    Wrong
        If values, dtype or shape changed, if plan and conversion disagree, also about sharing, or if read-only memory
        became writable.
    """
    outcomes = [_measure_call(make(), target, copy, values) for copy in (None, False, True)]
    return outcomes[0]


def _measure_call(obj: Any, target: str, copy: bool | None, values: Callable[[], list[int]] | None) -> str:
    before = _describe(obj)
    known = before is not None and before.shape is not None and before.address
    expected = values() if values is not None else read_values(obj)
    result, plan = convert_as_planned(obj, TARGETS[target](), copy)
    if plan.outcome == "refused":
        return type(result).__name__
    if plan.outcome == "tree":
        if plan.leaves or type(result) is not type(obj) or result != obj:
            raise Wrong(f"a container without arrays became {result!r}")
        return "tree"
    if plan.outcome == "same":
        if result is not obj:
            raise Wrong("planned as the same, but the result is another object")
        return "same"
    after = dlx.describe(result)
    inside = dlx.plan(obj, to="dlx").outcome == "refused"  # only its own framework can copy it
    if not inside and type(obj).__name__ != "PyCapsule":
        _compare(dlx.convert(result, to="dlx"), dlx.plan(obj, to="dlx").source, expected)
    elif expected is not None and not inside:
        _compare(dlx.convert(result, to="dlx"), plan.source, expected)
    if known and (after.address == before.address) is not (plan.outcome == "shared"):
        raise Wrong(f"{plan.outcome}, from {before.address:#x} to {after.address:#x}")
    if known and before.readonly and plan.outcome == "shared" and (target in WRITES or not after.readonly):
        raise Wrong("read-only memory became writable")
    if copy is False and plan.outcome == "copied":
        raise Wrong("copied despite copy=False")
    if copy and plan.outcome != "copied":
        raise Wrong("shared despite copy=True")
    return "viewed" if any(step.do == "view" for step in plan.steps) and plan.outcome == "shared" else plan.outcome


def _compare(result: Any, source: Any, expected: list[int] | None) -> None:
    """Raise `Wrong` if dtype, shape or the bits of an element differ from the source."""
    if expected is None:
        raise Wrong("the expected values are unknown")
    if (result.dtype, result.shape) != (source.dtype, source.shape):
        raise Wrong(f"{source} became {result}")
    if read_elements(result) != expected:
        raise Wrong(f"expected {expected}, found {read_elements(result)}")


def _describe(obj: Any) -> Any:
    try:
        return dlx.describe(obj)
    except dlx.errors.DlxError:
        return None


def read_values(obj: Any) -> list[int] | None:
    """Return the bits of the elements from the source's own library, without dlx, or None."""
    if isinstance(obj, dlx.Tensor):
        return read_elements(obj)
    library = {"ArrayImpl": "jax"}.get(type(obj).__name__)
    for kind in type(obj).__mro__:
        library = library or {"numpy": "numpy", "torch": "torch", "pyarrow": "pyarrow"}.get(
            kind.__module__.split(".")[0]
        )
    try:
        if library == "torch":
            return _of_torch(obj)
        if library == "jax":
            return _of_numpy(__import__("numpy").asarray(obj))
        if library == "numpy":
            return _of_numpy(obj)
        if library == "pyarrow":
            return _of_arrow(obj)
        with memoryview(obj) as view:
            return _split(view.tobytes(), view.itemsize)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return None


def _of_torch(obj: Any) -> list[int] | None:
    import torch

    if obj.layout is not torch.strided or obj.is_meta or obj.is_quantized or not obj.untyped_storage().data_ptr():
        return None if obj.numel() else []
    plain = obj.detach().resolve_conj().resolve_neg().contiguous().clone().flatten()
    return _split(bytes(plain.view(torch.uint8).tolist()), obj.element_size())


def _of_numpy(array: Any) -> list[int]:
    import numpy as np

    array = np.array(np.ndarray.view(array, np.ndarray) if isinstance(array, np.ndarray) else array)
    dtype = array.dtype
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    mask = (1 << dlx.DType(dtype.name).bits) - 1 if dtype.type.__module__ == "ml_dtypes" else -1
    return [value & mask for value in _split(array.tobytes(), dtype.itemsize)]


def _of_arrow(obj: Any) -> list[int]:
    import pyarrow as pa

    if isinstance(obj, pa.Tensor):
        return _of_numpy(obj.to_numpy())
    if isinstance(obj, pa.ChunkedArray):
        obj = pa.concat_arrays(obj.chunks)
    while pa.types.is_fixed_size_list(obj.type):
        obj = obj.flatten()
    return _of_numpy(obj.to_numpy(zero_copy_only=False))


def _split(raw: bytes, size: int) -> list[int]:
    return [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]


def measure_all(progress: bool = False) -> Iterator[tuple[str, str, str, str]]:
    """Yield (table, source, target, outcome) of every cell of installed frameworks; "-" for a missing source."""
    here = list_installed()
    for framework, dtype in itertools.product(here, DTYPES):
        source = Source(f"dtypes out of {framework}", dtype, lambda f=framework, d=dtype: make_array(f, d))
        bits = (lambda d=dtype: read_elements(memory(d))) if (framework, dtype) != ("pyarrow", "bool") else None
        yield from _row(source, here, bits, progress)
    if "jax" in here:
        import jax

        with jax.enable_x64(True):
            for framework, dtype in itertools.product(here, ("int64", "uint64", "float64", "complex128")):
                source = Source(
                    "into jax with x64 on", f"{framework} {dtype}", lambda f=framework, d=dtype: make_array(f, d)
                )
                yield from _row(source, ["jax"], lambda d=dtype: read_elements(memory(d)), progress)
    columns = [*here, *(name for name in TARGETS if name.partition(".")[0] in here and "." in name)]
    for name, make in ODD.items():
        yield from _row(Source("odd sources", name, make), columns, None, progress)


def measure_further(progress: bool = False) -> Iterator[tuple[str, str, str, str]]:
    """Yield the cells between dlx, numpy and each installed further framework, and its odd sources."""
    here = list_installed(FURTHER)
    for framework, dtype in itertools.product(("dlx", "numpy", *here), DTYPES):
        source = Source(f"dtypes out of {framework}", dtype, lambda f=framework, d=dtype: make_array(f, d))
        targets = ["dlx", "numpy", framework] if framework in here else here
        yield from _row(source, targets, lambda d=dtype: read_elements(memory(d)), progress)
    for name, make in ODD.items():
        if not name.startswith(("torch ", "jax ", "pyarrow ")):
            yield from _row(Source("odd sources", name, make), here, None, progress)


class Source(NamedTuple):
    """One row of a table."""

    table: str
    name: str
    make: Callable[[], Any]


def _row(
    source: Source, targets: list[str], values: Callable[[], list[int]] | None, progress: bool
) -> Iterator[tuple[str, str, str, str]]:
    values = values or VALUES.get(source.name)
    for target in targets:
        if progress:  # after a crash, the last line names the cell
            print(f"{source.table}: {source.name} -> {target}", file=sys.stderr, flush=True)
        yield source.table, source.name, target, _try_cell(source.make, target, values)


def _try_cell(make: Callable[[], Any], target: str, values: Callable[[], list[int]] | None) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # frameworks warn about experimental features
        try:
            make()
        except ImportError:
            return "?"
        except (dlx.errors.DlxError, TypeError, ValueError, RuntimeError, AttributeError):  # no such source
            return "-"
        try:
            return measure_cell(make, target, values)
        except Wrong as error:
            return f"WRONG: {error}"
