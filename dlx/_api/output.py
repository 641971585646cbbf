"""The option `out`: copy to memory of any framework, in one pass. Everything is checked before the first write."""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from dlx._api.shares_memory import collision, find_extents
from dlx._core import native
from dlx._core.native import Tensor
from dlx._core.types import HOST, IS_COPIED, SUBBYTE_PADDED, DType, host_readable
from dlx._engine import trace
from dlx._engine.batch import Batch
from dlx._engine.casting import Casts, can_cast, suggest_cast
from dlx._engine.executor import mark_written
from dlx._engine.failures import Failures
from dlx._engine.plan import Step
from dlx._engine.planner import casts_itself
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.sources import adapter_call, array_info
from dlx._engine.tree import Tree
from dlx._registry import lookup
from dlx._registry.registry import registry
from dlx._registry.target import Target
from dlx._support.reflect import type_name
from dlx.adapter.base import Adapter
from dlx.errors import AdapterNotFoundError, ConversionError, DlxError, DTypeError, LayoutError, ReadOnlyError

Path = tuple[Any, ...]
Links = list[dict[Path, int]]
_WRITABLE = "Pass a writable array."
_ANY, _SAME_SHAPE, _EXACT = 0, 1, 2  # what `tensor_fill` requires


class Array(NamedTuple):
    """An array to read or to write."""

    obj: Any
    adapter: Adapter
    path: Path
    shape: tuple[int, ...]
    dtype: DType
    span: tuple[int, int] | None  # addresses of the first byte and after the last; None if unknown
    tensor: Tensor | None  # None: only its framework copies it directly (another byte order, pending conjugation)

    def is_on_host(self) -> bool:
        """Return whether dlx itself reads or writes the memory."""
        return self.tensor is not None and host_readable(self.tensor.device)


def open_output(obj: Any, path: Path = ()) -> Array:
    """Return an array to write to; raise if nothing can or may write to it."""
    array, adapter = lookup.source(obj, root="out", path=path)
    try:
        if adapter.arrays.immutable:
            raise ReadOnlyError(f"{adapter.name} arrays are never writable", fix=_WRITABLE)
        if adapter.gradients is not None and adapter.gradients.is_tracked(array):
            fix = "Write to it where recording is off, as inside torch.no_grad()."
            raise ConversionError(f"{adapter.name} records it for differentiation", fix=fix)
        found = _read(array, adapter, path, detach=True)
        tensor = found.tensor
        if (array_info(array, adapter) if tensor is None else tensor).readonly:
            raise ReadOnlyError("it is read-only", fix=_WRITABLE)
        if tensor is not None and tensor.flags & IS_COPIED:
            raise ReadOnlyError("its producer exports a copy of it", fix=_WRITABLE)
        if not (found.is_on_host() or casts_itself(adapter)):
            why = (
                f"dlx cannot write to {adapter.name} arrays like it" if tensor is None else f"it is on {tensor.device}"
            )
            raise LayoutError(why, fix=f"Pass to= {'' if tensor is None else 'and device= '}instead of out=.")
        if tensor is not None and _overlaps_itself(tensor):
            why = f"its elements overlap (strides {tensor.strides} in elements)"
            raise LayoutError(why, fix="Pass an array in which each element has its own memory.")
    except DlxError as error:
        error.root, error.path = "out", path
        raise
    return found


def check_fits(out: Array, shape: tuple[int, ...], dtype: DType, option: Any, fix: str = "") -> None:
    """Raise unless values of a shape and dtype fit into an output; `option` and `fix` change the dtype."""
    if shape != out.shape:
        why, fix = f"the values have shape {shape}, but its shape is {out.shape}", "Pass an array of that shape."
        raise LayoutError(why, root="out", path=out.path, fix=fix)
    if dtype != out.dtype:
        why = f"the values are {dtype}, but it is {out.dtype}"
        raise DTypeError(why, root="out", path=out.path, fix=fix, option=option)


def match_packing(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor whose elements of less than a byte are packed, or padded to bytes, as those of another."""
    is_alike = tensor.dtype != like.dtype or tensor.dtype.bits >= 8 or not (tensor.flags ^ like.flags) & SUBBYTE_PADDED
    return tensor if is_alike else native.tensor_repack(tensor)


def fill(whole: Tensor, rows: list[Tensor], axis: int, places: list[slice] | None = None) -> None:
    """Copy tensors to the rows of another along an axis, or one to all (-1); first copy those that share its memory.

    With `places`, the last axes of matrices go to slices of the axis.
    """
    if whole.dtype.bits < 8:
        rows = [match_packing(row, whole) for row in rows]
    if native.tensor_fill(whole, rows, axis, _ANY, places):
        native.tensor_fill(whole, [native.tensor_copy(row, True) for row in rows], axis, _ANY, places)


_borrow = FAST_PATH._borrow


def fill_plain(objs: list[Any], out: Any, axis: int, casts: Casts | None = None) -> bool:
    """Copy host arrays of the fast path as `fill`; return False if anything else has to be checked.

    With `casts`, cast one array, if dlx does not have to check anything but its shape and dtype.
    """
    whole, tensors = _borrow(out, "dlx", True), [_borrow(obj, "dlx", True) for obj in objs]
    if whole is None or None in tensors or (axis >= 0 and len(objs) != dict(enumerate(whole.shape)).get(axis)):
        return False
    if casts is not None and (trace.observers or casts.dtypes.get(tensors[0].dtype.name) != whole.dtype):
        return False
    if native.tensor_fill(whole, tensors, axis, _EXACT if casts is None else _SAME_SHAPE):
        return False
    source = native.source_find(type(out))  # faster than `lookup.kind`
    adapter = lookup.kind(type(out)).adapter if source is None else source.adapter
    mark_written(adapter, out)
    return True


native.register(fill=lambda obj, out: not trace.observers and fill_plain([obj], out, -1))


def _fill_tree(obj: Any, out: Any, casts: Casts | None) -> bool:
    """Copy the host arrays of built-in containers as `fill_plain`; return False if anything else has to be checked."""
    dtypes = {} if casts is None else casts.dtypes
    pairs = [] if trace.observers else _pair_leaves(obj, out)
    types = {id(type(each)): type(each) for pair in pairs for each in pair}  # a metaclass may refuse to hash them
    kinds = {key: lookup.kind(each) for key, each in types.items()}
    pairs = [pair for pair in pairs if any(kinds[id(type(each))].verdict != "passthrough" for each in pair)]
    has_repeats = len({id(there) for _, there in pairs}) < len(pairs)
    if not pairs or has_repeats or any(kinds[id(type(x))].verdict != "array" for pair in pairs for x in pair):
        return False
    sources, wholes = ([_borrow(pair[i], "dlx", True) for pair in pairs] for i in (0, 1))
    if not all(tensor is not None and tensor.is_host for tensor in (*sources, *wholes)):
        return False
    outputs = native.tensors_extents(wholes)
    spans = [(low, high, 0) for low, high, _ in native.tensors_extents(sources)]
    spans += [(low, high, 1) for low, high, _ in outputs]
    end = end_of_outputs = 0
    for low, high, is_output in sorted(spans):
        if low < (end if is_output else end_of_outputs):  # shared memory
            return False
        end, end_of_outputs = max(end, high), max(end_of_outputs, high * is_output)
    for source, whole, (_, _, is_dense) in zip(sources, wholes, outputs, strict=True):
        old, new = source.dtype, whole.dtype
        if source.shape != whole.shape or dtypes.get(old.name, old) != new or whole.readonly or not is_dense:
            return False
        if old != new and not can_cast(old, new, HOST):
            return False
    for source, whole, (_, there) in zip(sources, wholes, pairs, strict=True):
        fill(whole, [source], -1)
        mark_written(kinds[id(type(there))].adapter, there)
    return True


def _pair_leaves(obj: Any, out: Any) -> list[tuple[Any, Any]]:
    """Return the objects at the same places of two trees of built-in containers, or nothing if the trees differ."""
    pairs, waiting, seen = [], [(obj, out)], set()
    while waiting:
        mine, its = waiting.pop()
        kind = type(its)
        if kind not in (dict, list, tuple):
            pairs.append((mine, its))
            continue
        if type(mine) is not kind or len(mine) != len(its) or id(its) in seen:
            return []
        if kind is dict and mine.keys() != its.keys():
            return []
        seen.add(id(its))
        waiting += [(mine[key], its[key]) for key in (its if kind is dict else range(len(its)))]
    return pairs if seen else []


def _read(array: Any, adapter: Adapter, path: Path, *, detach: bool) -> Array:
    """Return an array without a copy; its tensor is None if its framework must copy it."""
    tensor: Tensor | None = FAST_PATH._borrow(array, "dlx", True)
    if tensor is None:
        with adapter_call(adapter, source=type_name(type(array))):
            blockers = adapter.describe(array).blockers
        is_refused = any(each.resolution is None or (each.needs == "detach" and not detach) for each in blockers)
        if not is_refused and any(each.needs == "copy" for each in blockers):
            info: Any = array_info(array, adapter)  # with shape and dtype: only a copy is missing
            extents = find_extents(array)
            span = (min(each.start for each in extents), max(each.end for each in extents)) if extents else None
            return Array(array, adapter, path, info.shape, info.dtype, span, None)
        request = Request(registry.target("dlx"), detach=detach)
        (tensor,) = Batch(request, [array], [adapter], lambda i: path).tensors()
    low, high, _ = native.tensors_extents([tensor])[0]
    return Array(array, adapter, path, tensor.shape, tensor.dtype, (low, high), tensor)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements may overlap: an axis does not step over all smaller ones."""
    reach = 0
    axes = sorted((abs(step), extent) for step, extent in zip(tensor.strides, tensor.shape, strict=True) if extent > 1)
    for step, extent in axes if tensor.nbytes else ():
        if step <= reach:
            return True
        reach += step * (extent - 1)
    return False


def convert_into(obj: Any, out: Any, casts: Casts | None, *, detach: bool, strict: bool) -> Any:
    """Copy an array, or the arrays of a tree, to the arrays at the same places of `out`; return `out`."""
    try:
        if _fill_tree(obj, out, casts):
            return out
        pairs = [
            (_read(source, adapter, path, detach=detach), open_output(there, path))
            for source, adapter, there, path in _pair(obj, out, strict)
        ]
        for source, there in pairs:
            old = source.dtype
            new = None if casts is None else casts._replace(at_root=not source.path).find(old)
            fix, option = ("", (("dtype", None),)) if old == there.dtype else suggest_cast(old, there.dtype)
            check_fits(there, source.shape, new or old, option, fix)
        writes = _plan_writes(pairs, detach)
    except DlxError as error:
        error.target = type_name(type(out))
        error.complete(source=type_name(type(obj)))
        raise
    for write in writes:
        write()
    for source, there in pairs:
        mark_written(there.adapter, there.obj)
        if trace.observers:
            nbytes = array_info(there.obj, there.adapter).nbytes or 0
            why = Step("copy", "out= copies every array", nbytes=nbytes)
            trace.record(array_info(source.obj, source.adapter), there.adapter.name, "copied", [why], nbytes)
    return out


def _plan_writes(pairs: list[tuple[Array, Array]], detach: bool) -> list[Callable[[], Any]]:
    """Return the function that writes each output; only a framework can still fail in them."""
    outputs = [*{id(there.obj): there for _, there in pairs}.values()]
    spans = sorted(there.span for there in outputs if there.span is not None)
    if len(outputs) < len({(id(source.obj), id(there.obj)) for source, there in pairs}):
        raise LayoutError("an array of out has two places, and gets two arrays", fix="Pass different arrays.")
    if any(low < high for (_, high), (low, _) in pairwise(spans)):
        pair = collision([each.obj for each in outputs], ())
        if pair is not None:
            why, path = "it shares memory with another array of out", outputs[pair[1]].path
            raise LayoutError(why, root="out", path=path, fix="Pass arrays that do not share memory.")
    starts, ends = [low for low, _ in spans], sorted(high for _, high in spans)
    writes: list[Callable[[], Any]] = []
    for source, there in pairs:
        meets = source.span is None or bisect_right(starts, source.span[1] - 1) > bisect_right(ends, source.span[0])
        writes.append(_plan_write(source, there, detach, meets and (len(pairs) > 1 or source.tensor is None)))
    return writes


def _plan_write(source: Array, out: Array, detach: bool, is_shared: bool) -> Callable[[], Any]:
    """Return the function that copies one array; `is_shared`: other writes may change the source first."""
    tensor, whole = source.tensor, out.tensor
    if whole is None or not out.is_on_host() or not (tensor is None or source.is_on_host()):
        made = _convert(source, registry.ready(out.adapter), copy=is_shared or None, detach=detach)
        return lambda: out.adapter.dtypes.cast(made, out.dtype, out=out.obj)
    if tensor is None and casts_itself(source.adapter) and not is_shared:
        with contextlib.suppress(ConversionError):  # the framework has no array over the output
            view = _convert(out, registry.ready(source.adapter), copy=False, detach=True)
            return lambda: source.adapter.dtypes.cast(source.obj, out.dtype, out=view)
    if tensor is None or not (source.dtype == out.dtype or can_cast(source.dtype, out.dtype, whole.device)):
        casts = None if source.dtype == out.dtype else Casts({source.dtype.name: out.dtype})
        tensor = _convert(source, registry.target("dlx"), copy=True, detach=detach, casts=casts)
    elif is_shared:
        tensor = native.tensor_copy(tensor, True)
    return functools.partial(fill, whole, [match_packing(tensor, whole)], -1)


def _convert(array: Array, target: Target | None, **options: Any) -> Any:
    assert target is not None  # a framework that copies to its arrays also creates them
    return Batch(Request(target, **options), [array.obj], [array.adapter]).run()[0]


def _pair(obj: Any, out: Any, strict: bool) -> Iterator[tuple[Any, Adapter, Any, Path]]:
    """Yield (array, its adapter, array of `out`, path) of all arrays, also of repeated ones."""
    written, _, there, its_root = _list_arrays(out, "out")
    read, sources, here, root = _list_arrays(obj, "obj", strict=strict)
    if not read and not written:
        raise AdapterNotFoundError("it holds no array", fix="Pass the arrays themselves.")
    waiting: list[tuple[int | None, int | None, Path]] = [(root, its_root, ())]
    seen: set[tuple[int | None, int | None]] = set()
    while waiting:
        mine, its, path = waiting.pop()
        mine, its = _unwrap(here, mine), _unwrap(there, its)
        if mine is not None and its is not None and mine < 0 and its < 0:
            yield read[~mine], sources[~mine], written[~its], path
        elif (mine or 0) < 0 or (its or 0) < 0:
            fix = "Pass two arrays, or containers that hold arrays at the same places."
            raise LayoutError("obj and out hold arrays at different places", path=path, fix=fix)
        elif (mine, its) not in seen:
            seen.add((mine, its))
            ours, theirs = {} if mine is None else here[mine], {} if its is None else there[its]
            waiting += [(ours.get(key), theirs.get(key), (*path, *key)) for key in ours | theirs]


def _list_arrays(obj: Any, root: str, *, strict: bool = False) -> tuple[list[Any], list[Adapter], Links, int]:
    """Return the arrays of an object, their adapters, the links of its containers as in `Tree`, and that to its root.

    Raise if it has a compound array: two of them need not have indices of the same size.
    """
    inside, handler = lookup.unwrap(obj)
    if handler is None:
        array, adapter = lookup.source(inside, root=root)
        return [array], [adapter], [], ~0
    tree = Tree(inside, handler, Failures(""), strict=strict)
    for path, each, compound, *_ in tree.compounds():
        call = compound.compound.dense  # of a method, or of a function with x
        dense = f" or {'x' * call.startswith('.')}{call}" if call else ""
        fix = "Pass to= instead of out=." if root == "out" else f"Pass dlx.parts(x){dense} instead."
        why = f"it is a {compound.kind_of(each)} array, and out= takes dense ones"
        raise LayoutError(why, root=root, path=path, fix=fix)
    nodes = [(each.path, keys, links.items()) for _, each, keys, _, links in tree.nodes()]
    links = [{path(keys, i): link for i, link in found} for path, keys, found in nodes]
    return tree.arrays, tree.sources, links, 0


def _unwrap(links: Links, link: int | None) -> int | None:
    while link is not None and link >= 0 and () in links[link]:
        link = links[link][()]
    return link
