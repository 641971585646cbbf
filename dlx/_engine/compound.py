"""Compound arrays in a conversion: split one into parts that the target supports, join the results, describe them.

A part that must change (indices of another width, rows to stack) becomes a `Deferred` array whose blocker makes a copy.
So plans list the change as a step, and ``copy=False`` refuses it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from dlx._core import cuda, native
from dlx._core.array_info import ArrayInfo
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.tensor import view
from dlx._core.types import DType, contiguous, host_readable, is_at
from dlx._engine.plan import Plan
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.sources import array_info
from dlx._engine.streams import StreamSync
from dlx._protocols.arrow import Column, Offsets, in_pyarrow, null_fix
from dlx._protocols.pointer import dltensor, empty
from dlx._registry import lookup
from dlx._registry.compound import PARTS, CompoundHandler, Parts, Whole, compounds_of, find_joiner, without_private
from dlx._registry.generic import TENSOR, Deferred
from dlx._registry.handlers import Keys
from dlx._registry.registry import registry
from dlx._support.reflect import foreign_errors, type_name
from dlx.adapter.declarations import Blocker, Compound
from dlx.errors import DeviceError, DlxError, DTypeError, LayoutError, path_text

_WIDTHS = ("int32", "int64")


def split(
    obj: Any, handler: CompoundHandler, request: Request | None, nested: bool = False, *, joins: bool = True
) -> dict[str, Any]:
    """Return the parts of a compound array, as the target of a request needs them; {}: the object stays unchanged.

    Without `joins`, the parts are the result.
    """
    source, kind, target = handler.compound, handler.kind_of(obj), "" if request is None else request.target.name
    is_own = request is not None and any(each is source for each in compounds_of(request.target.source))
    joiner, is_joined = PARTS.compound, True
    if request is not None and joins:
        if is_own and _stays(obj, handler, request):
            return {}
        joiner = find_joiner(request.target.adapter, kind) or joiner
        is_joined = type(obj) is Parts or (joiner.join is not None and not (nested and "flat" in joiner.limits))
    with foreign_errors("it cannot be split:", source=name_of(obj)):
        if request is not None and request.detach and not is_own:
            path = handler.adapter and handler.adapter.fast_path
            obj = getattr(obj, path.detach())() if path and path.detach() else obj
        parts = source.split(obj) if is_joined or kind != "ragged" else {}  # refused before its data is read
        parts = parts if is_own else without_private(parts)
        if not is_own and kind in ("coo", *_MINOR):
            _check_dimensions(kind, parts, source.dense)
        if not is_joined:
            raise _unsupported(kind, source, target, nested, obj)
        first = _check_lists(parts["values"], parts["offsets"]) if kind == "ragged" else 0
        swaps, sorts, dtype = ("swapped" in source.limits) != ("swapped" in joiner.limits), False, None
        if request is not None:
            if joiner.dtypes or request.casts is not None:
                _check_dtype(parts, joiner, request)
            if not is_own:  # in its framework, padding and repeated indices keep their meaning
                sorts = _check(kind, obj, parts, source, joiner.limits, target)
            dtype = _choose_dtype(parts, joiner, request.target.dtypes())
        made: dict[str, Any] = {}
        for name, part in parts.items():
            minus, new = first if name == "offsets" else 0, dtype if name in joiner.indices else None
            whys = [f"{target} sorts it, and adds elements with equal indices"] * (sorts and name == "coords")
            made[name] = _prepare(part, new, parts, whys, swaps=swaps and name == "coords", minus=minus)
    return made | {"_is_sorted": not sorts} if "sorts" in joiner.limits else made


def _stays(obj: Any, handler: CompoundHandler, request: Request) -> bool:
    """Return whether no option of a call changes a compound array of the target framework."""
    adapter, casts, device = request.target.adapter, request.casts, request.device
    if request.copy or (request.detach and adapter.gradients is not None) or (device and adapter.placement is not None):
        return False
    info = None if casts is None and device is None else describe_compound(obj, handler)
    is_there = device is None or (info is not None and info.device is not None and is_at(info.device, device))
    return is_there and (casts is None or info is None or info.dtype is None or casts.find(info.dtype) is None)


def name_of(obj: Any) -> str:
    """Return the name of a compound array's type, or of the object that a column belongs to."""
    return f"{obj.kind} array" if type(obj) is Parts else type_name(obj.kind if isinstance(obj, Column) else type(obj))


def _unsupported(kind: str, source: Compound, target: str, nested: bool, obj: Any) -> DlxError:
    dense = f", or call {source.dense} first" if source.dense else ""
    arrays = f"its dense arrays with dlx.parts(x, to={target!r}){dense}."
    fix = f"Convert {arrays}"
    if kind == "ragged":
        call = in_pyarrow(obj)[0] if isinstance(obj, Column) else "Call"
        fix = f"{call} dlx.stack(x, to={target!r}) for rows of one length, or convert {arrays}"
    if nested:
        return LayoutError(f"{target} supports {kind} arrays of numbers, not of {kind} arrays", fix=fix)
    return LayoutError(f"{target} has no {kind} arrays", fix=fix)


class Compounds:
    """Splits and joins the compound arrays of one call, for the target of a request; None: without a target."""

    def __init__(self, request: Request | None) -> None:
        self._request = request

    def split(self, obj: Any, handler: CompoundHandler, nested: bool, is_root: bool) -> tuple[Keys, list[Any]]:
        """Return the names of the parts that are arrays, with the other parts as their context, and these arrays."""
        request = self._request
        found = split(obj, handler, request if request is None or is_root else request.for_element(), nested)
        keys = Keys(name for name, part in found.items() if not isinstance(part, _PLAIN))
        keys.context = {name: part for name, part in found.items() if isinstance(part, _PLAIN)}
        return keys, [found[name] for name in keys]

    def join(self, keys: Any, parts: list[Any], kind: str) -> Any:
        """Return the target's compound array over converted parts; for `Parts` of another kind, a dict."""
        assert self._request is not None
        wanted = find_joiner(self._request.target.adapter, kind)
        found = dict(zip(keys, parts, strict=True)) | keys.context
        return found if wanted is None or wanted.join is None else wanted.join(found)


_PLAIN = (tuple, str, int, float, type(None))


# ---- parts ---------------------------------------------------------------------------------------------------------


def tensor_of(part: Any) -> Tensor:
    """Return the tensor of an array whose memory can be read now."""
    tensor: Tensor | None = FAST_PATH._borrow(part, TENSOR.name, True)
    if tensor is not None:
        return tensor
    array, source = lookup.source(part)
    found = source.describe(array)
    for blocker in found.blockers:
        if blocker.needs != "copy":
            raise blocker.error(blocker.because, fix=blocker.fix)
        array = blocker.resolve(array)
    return source.export(array) if found.tensor is None else found.tensor


def info_of(part: Any) -> ArrayInfo:
    """Return the description of a part."""
    return array_info(*lookup.source(part))


def _metadata_of(part: Any) -> Any:
    """Return an object with the dtype, shape and device of a part: its tensor or column, in a tenth of the time."""
    found = part if isinstance(part, Column) else FAST_PATH._borrow(part, TENSOR.name, True)
    return info_of(part) if found is None else found


def _rows(part: Any) -> list[Any]:
    return part if isinstance(part, list) else [part]


def _choose_dtype(parts: dict[str, Any], joiner: Compound, known: Collection[str]) -> DType | None:
    """Return the dtype that all indices must have; None if they have it. Without a joiner, any known one will do."""
    used = {name: accepted for name, accepted in joiner.indices.items() if name in parts}
    names = {str(_metadata_of(row).dtype) for name in used for row in _rows(parts[name])}
    found = (name for name in known if all(name in accepted for accepted in used.values()))
    common = sorted(found, key=lambda name: DType(name).bits) if used else []
    if not common or (names <= {*known} if joiner.join is None else len(names) == 1 and names <= {*common}):
        return None
    return DType(common[0] if names <= {"int8", "int16", "uint8", "uint16"} else common[-1])


def _prepare(part: Any, dtype: DType | None, parts: dict[str, Any], whys: list[str], *, swaps: bool, minus: int) -> Any:
    """Return a part, or its copy as a `Deferred` array for reasons, or if its rows are stacked or its values change.

    With `swaps`, a matrix is transposed; `minus` is subtracted.
    """
    stacks = isinstance(part, list)
    if swaps and not stacks:
        tensor = tensor_of(part)
        on_device = cuda.is_cuda(tensor.device)
        swaps = on_device and dtype not in (None, tensor.dtype)  # the framework casts first
        if not swaps:
            part = _swap(FAST_PATH(part, to="dlx") if on_device else tensor)
    if dtype is None and not (whys or stacks or minus):
        return part
    rows = _rows(part)
    info = info_of(rows[0])
    casts = dtype is not None and info.dtype != dtype
    whys += [f"its {len(rows)} arrays are stacked"] * stacks + [f"{info.dtype} indices become {dtype}"] * casts
    whys += [f"it begins with {minus}, not 0"] * bool(minus)
    if not whys:
        return part
    made: Any = dtype or info.dtype
    if info.device is not None and not host_readable(info.device):
        fits = not casts or made.bits == 64 or _bound_of(parts) < 1 << (made.bits - 1)
        if minus or not fits or not cuda.is_cuda(info.device):
            why = f"{', '.join(whys)}, which dlx does only on the host"
            raise DeviceError(why, fix="Move it to the host in its own framework first.")
    shape = (len(rows), *(info.shape or ())) if stacks else info.shape or ()
    after = shape[::-1] if swaps else shape
    nbytes = math.prod(shape) * made.bits // 8
    new = info._replace(dtype=made, dtype_name=made.name, shape=after, strides=None, nbytes=nbytes, address=0)
    run = functools.partial(_gather, rows, stacks, made if casts or minus else None, swaps, minus)
    return Deferred(new, Blocker(", ".join(whys), resolution=run, needs="copy"))


def _gather(rows: list[Any], stacks: bool, dtype: DType | None, swaps: bool, minus: int, _: Any = None) -> Tensor:
    """Return a new tensor over stacked or transposed rows; if `dtype` is named, of these integers less `minus`."""
    tensors = [tensor_of(row) for row in rows]
    one = tensors[0]
    if any((each.dtype, each.shape, each.device) != (one.dtype, one.shape, one.device) for each in tensors):
        raise LayoutError("its index arrays differ in length, dtype or device")
    shape = (*one.shape, len(rows)) if swaps else (len(rows), *one.shape)
    if one.is_host:
        tensors = tensors if dtype is None else [_subtract(tensor, minus, dtype) for tensor in tensors]
        if stacks:
            return native.tensor_stack(tensors, 0, int(swaps), False, dtype or one.dtype)  # type: ignore[return-value]
        return tensors[0] if dtype in (None, tensors[0].dtype) else native.tensor_copy(tensors[0], False, 0, dtype)
    casts = None if dtype is None else {str(one.dtype): dtype}
    tensors = [FAST_PATH(row, to="dlx", dtype=casts) for row in rows]  # by its framework
    if not stacks:
        return _swap(tensors[0]) if swaps else tensors[0]
    like = native.tensor_new(lib.DLX_ALIGNMENT, shape, None, dtype or one.dtype, one.device, 0, None)
    sources = [(TENSOR, cuda.readiness_of(each)) for each in tensors]
    return StreamSync(registry.target("dlx")).copy(tensors, sources, like, False, int(swaps))[1]


def _bound_of(parts: dict[str, Any]) -> int:
    """Return a number that no index of a compound array exceeds, by the shapes of its parts."""
    return int(max((*parts.get("shape", ()), *(_metadata_of(arrays_of(parts)[0]).shape or (1 << 62,)))))


def _subtract(tensor: Tensor, minus: int, dtype: DType) -> Tensor:
    """Return the integers of a host tensor, less `minus`; raise if one does not fit a dtype."""
    wide = made = _widen(tensor)
    if minus:
        made = empty(wide.shape, wide.dtype)
        lib.dlx_subtract(dltensor(wide), minus, dltensor(made))
    may_not_fit = tensor.dtype.name == "uint64" or dtype.bits < made.dtype.bits
    most = min(1 << (dtype.bits - (dtype.code == lib.kDLInt)), 2**63 - 1)
    if may_not_fit and lib.dlx_find_outside(dltensor(made), most) >= 0:
        raise LayoutError(f"an index does not fit {dtype}", fix="Call dlx.parts(x) and convert its indices yourself.")
    return made


def _widen(tensor: Tensor) -> Tensor:
    """Return a compact tensor with the integers of a host tensor as int32 or int64."""
    if tensor.dtype.code not in (lib.kDLInt, lib.kDLUInt):
        raise LayoutError(f"its indices are {tensor.dtype}, not integers")
    if tensor.dtype.name not in _WIDTHS:
        return native.tensor_copy(tensor, False, 0, DType("int64"))
    return tensor if contiguous(tensor.shape, tensor.strides) else native.tensor_copy(tensor, False)


def _swap(tensor: Tensor) -> Tensor:
    """Return a transposed view of a matrix, or of each matrix of a batch."""
    shape, strides = ((*each[:-2], each[-1], each[-2]) for each in (tensor.shape, tensor.strides))
    swapped = view(tensor, shape, strides)
    return cuda.when(swapped, cuda.readiness_of(tensor)) if cuda.is_cuda(tensor.device) else swapped


# ---- checks --------------------------------------------------------------------------------------------------------

_MINOR = {"csr": 1, "csc": 0, "bsr": 1}  # the axis of the indices


def _check_dimensions(kind: str, parts: dict[str, Any], dense: str) -> None:
    """Raise if the elements or indices of a sparse array have more dimensions than those of a matrix."""
    coords = parts.get("coords", [])
    ndim = 2 if isinstance(coords, list) else len(_metadata_of(coords).shape or ())
    if ndim != 2 or len(_metadata_of(parts["data"]).shape or ()) != (3 if kind == "bsr" else 1):
        raise LayoutError("it has batches or dense dimensions", fix=f"Call {dense} first." if dense else "")


def _check_dtype(parts: dict[str, Any], joiner: Compound, request: Request) -> None:
    """Raise if a joiner does not support the dtype that the elements will have."""
    old = _metadata_of(arrays_of(parts)[0]).dtype
    new = old if old is None or request.casts is None else request.casts.find(old) or old
    if new is not None and old is not None and joiner.dtypes and new.name not in joiner.dtypes:
        why, option = f"{request.target.name} has no {joiner.kind} arrays of {new}", {old.name: "float32"}
        raise DTypeError(why, option=(("dtype", option),) if "float" in new.name else ())


def _check(kind: str, obj: Any, parts: dict[str, Any], source: Compound, limits: tuple[str, ...], target: str) -> bool:
    """Check the indices of a sparse array in host memory: another framework may read or write outside of an array.

    Return whether the framework sorts them.
    """
    if kind not in ("coo", *_MINOR):
        return False
    shape, elements = parts["shape"], tuple(_metadata_of(parts["data"]).shape or ())
    if not shape and "axes" in limits:
        fix = f"Call {source.dense} first." if source.dense else ""
        raise LayoutError(f"{target} has no {kind} arrays without dimensions", fix=fix)
    if kind == "coo":
        coords = parts["coords"]
        rows = coords if isinstance(coords, list) else _split_rows(tensor_of(coords), "swapped" in source.limits)
        if len(rows) != len(shape):
            raise LayoutError(f"it has {len(rows)} index arrays for {len(shape)} dimensions")
        wide = []
        for axis, (row, extent) in enumerate(zip(rows, shape, strict=True)):
            length = _metadata_of(row).shape
            if length != elements:
                raise LayoutError(f"coords[{axis}] has the shape {length}, and its data the shape {elements}")
            wide.append(_check_range(row, extent, f"coords[{axis}]"))
        return "sorts" in limits and not _is_ordered(wide)
    if len(shape) != 2:
        why = f"dlx converts {kind} arrays of two dimensions only, and it has {len(shape)}"
        raise LayoutError(why, fix="Convert it to the format coo first.")
    minor, count = _MINOR[kind], elements[0]
    block = elements[1:] or (1, 1)
    major, extent = (shape[axis] // (block[axis] or 1) for axis in (1 - minor, minor))
    indptr, indices = tensor_of(parts["indptr"]), tensor_of(parts["indices"])
    for name, part, size in (("indptr", indptr, major + 1), ("indices", indices, count)):
        if part.shape != (size,):
            raise LayoutError(f"its {name} should have the shape ({size},), found {part.shape}")
    pointers = _check_offsets(indptr, count, "indptr")
    rising = "rising" in limits
    ends = _wide(indices) if count and (rising or "unique" in limits) else None
    if pointers is None or ends is None:
        _check_range(indices, extent, "indices")
        return False
    bad = lib.dlx_find_repeat(dltensor(pointers), dltensor(ends), extent, rising)
    if bad == -2:
        raise MemoryError
    if bad >= 0:
        _check_range(ends, extent, "indices")
        why = f"no index is repeated within a row or column, and indices[{bad}] is"
        if rising:
            why = f"the indices of each row or column rise, and indices[{bad}] does not"
        call = "x.sum_duplicates()" if hasattr(obj, "sum_duplicates") else source.dense
        fix = f"Call {call} first, or convert it to coo." if call else "Convert it to coo in its own framework first."
        raise LayoutError(f"{target} assumes that {why}", fix=fix)
    return False


def _padded(why: str) -> LayoutError:
    fix = "Remove such elements in its own framework first, such as with sum_duplicates."
    return LayoutError(f"{why} (padding, or damage)", fix=fix)


def _split_rows(tensor: Tensor, swapped: bool) -> list[Tensor]:
    tensor = _swap(tensor) if swapped else tensor
    shape, (step, *steps) = tensor.shape[1:], tensor.strides
    return [view(tensor, shape, steps, i * step) for i in range(tensor.shape[0])]


def _wide(part: Any) -> Tensor | None:
    """Return a compact tensor of int32 or int64 with the integers of a part, or None if the host cannot read it."""
    tensor = tensor_of(part)
    return _widen(tensor) if tensor.is_host else None


def _check_range(part: Any, end: int, name: str) -> Tensor | None:
    tensor = _wide(part)
    bad = -1 if tensor is None or not tensor.nbytes else lib.dlx_find_outside(dltensor(tensor), end)
    if bad >= 0:
        raise _padded(f"{name}[{bad}] is outside of its shape")
    return tensor


def _is_ordered(rows: list[Tensor | None]) -> bool:
    """Return whether coordinates rise; False if the host cannot read them."""
    structs = [dltensor(row) for row in rows if row is not None]
    is_read = len(structs) == len(rows)
    return is_read and (not rows or lib.dlx_find_disorder(ffi.new("DLTensor *[]", structs), len(rows)) < 0)


def _check_lists(values: Any, offsets: Any) -> int:
    """Check the offsets of a ragged array, and return the first."""
    if isinstance(offsets, Offsets):  # checked in C
        if offsets.null_row >= 0:
            raise LayoutError(f"its row {offsets.null_row} is null", fix=null_fix(offsets.lists))
        tensor = None if offsets.n_chunks > 1 else offsets.share()
    else:
        inside, handler = lookup.unwrap(values)
        inner = handler.compound.split(inside)["offsets"] if isinstance(handler, CompoundHandler) else None
        count = (_metadata_of(values).shape or (0,))[0] if inner is None else (_metadata_of(inner).shape or (1,))[0] - 1
        tensor = _check_offsets(offsets, count, "offsets")
    return 0 if tensor is None else int(memoryview(tensor)[0])


def _check_offsets(part: Any, count: int, name: str) -> Tensor | None:
    """Check that offsets rise by `count`, those of a sparse array from 0."""
    tensor = _wide(part)
    if tensor is None:
        return None
    rows, found = tensor.shape[0] - 1, memoryview(tensor)
    start = found[0] if rows >= 0 and name == "offsets" else 0
    if rows >= 0 and name == "indptr" and found[0] == 0 <= found[rows] < count:
        raise _padded(f"its indptr end at {found[rows]}, and it has {count} elements")
    if rows < 0 or found[0] != start or start < 0 or found[rows] - start != count:
        raise LayoutError(f"its {name} do not rise from 0 to {count}")
    bad = lib.dlx_find_descent(dltensor(tensor))
    if bad >= 0:
        raise LayoutError(f"{name}[{bad}] is less than the value before it")
    return tensor


# ---- descriptions --------------------------------------------------------------------------------------------------


def arrays_of(parts: dict[str, Any]) -> list[Any]:
    """Return the dense arrays among the parts of a compound array, also of inner ones; the elements come first."""
    found: list[Any] = []
    for name in sorted(parts, key=lambda name: name not in ("data", "values")):
        for row in [] if isinstance(parts[name], _PLAIN) else _rows(parts[name]):
            inside, inner = lookup.unwrap(row)
            found += arrays_of(inner.compound.split(inside)) if isinstance(inner, CompoundHandler) else [row]
    return found


def describe_compound(obj: Any, handler: CompoundHandler) -> ArrayInfo:
    """Return the description of a compound array, from those of its arrays."""
    kind, name = handler.kind_of(obj), name_of(obj)
    with foreign_errors("it cannot be described:", source=name):
        parts = handler.compound.split(obj)
        infos = [info_of(each) for each in arrays_of(parts)]
    devices = {info.device for info in infos}
    return infos[0]._replace(
        type_name=name,
        shape=tuple(parts["shape"]) if "shape" in parts else None,
        strides=None,
        device=devices.pop() if len(devices) == 1 else None,
        nbytes=sum(info.nbytes or 0 for info in infos),
        readonly=any(info.readonly for info in infos),
        address=0,
        owner=name,
        protocols=(),
        notes=(f"{kind}: {', '.join(name for name in parts if not name.startswith('_'))}",),
    )


def fold(whole: Whole, leaves: list[Plan], target: str) -> Plan:
    """Return the plan of a compound array from the plans of its parts."""
    error = whole.error or next((leaf.error for leaf in leaves if leaf.error is not None), None)
    try:
        info = describe_compound(whole.obj, whole.handler)
    except DlxError:
        info = None
    outcomes = [leaf.outcome for leaf in leaves] + ["refused"] * (whole.error is not None)
    outcome = next((each for each in ("refused", "passed", "unknown", "copied", "shared") if each in outcomes), "same")
    steps = tuple(
        replace(step, why=": ".join(filter(None, (leaf.path.rpartition(".")[2], step.why))))
        for leaf in leaves
        for step in leaf.steps
    )
    device = next((leaf.device for leaf in leaves), None if info is None else info.device)
    nbytes = sum(leaf.nbytes for leaf in leaves)
    return Plan(path_text(whole.path), info, target, None if error else device, outcome, steps, nbytes, error)  # type: ignore[arg-type]
