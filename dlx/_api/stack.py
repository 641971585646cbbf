"""`stack`: copy many arrays into one array, with one allocation."""

from __future__ import annotations

import contextlib
import functools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from numbers import Number
from operator import index
from typing import TYPE_CHECKING, Any

from dlx._api.convert import convert
from dlx._api.output import check_fits, fill, fill_plain, match_packing, open_output
from dlx._api.rows import Join, list_arrays, open_frame
from dlx._core import cuda, native
from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.public import public
from dlx._core.tensor import view
from dlx._core.types import HOST, SUBBYTE_PADDED, DType, host_readable, row_major
from dlx._engine import trace
from dlx._engine.batch import Batch
from dlx._engine.casting import can_cast, common_dtype, read_casts, read_dtype
from dlx._engine.executor import mark_written
from dlx._engine.failures import Failures
from dlx._engine.plan import Step
from dlx._engine.planner import casts_itself, keeps_order
from dlx._engine.preview import plan_one
from dlx._engine.request import Request, request_of
from dlx._engine.seam import FAST_PATH, borrow_all
from dlx._engine.streams import Readiness, StreamSync, physical
from dlx._protocols import memory
from dlx._protocols.pointer import empty
from dlx._registry import lookup
from dlx._registry.generic import BUFFER, INTERFACE, TENSOR
from dlx._registry.registry import registry
from dlx._support.reflect import is_key, safe_repr, type_name
from dlx.adapter.base import Adapter
from dlx.errors import DeviceError, DlxError, DTypeError, LayoutError, path_text

if TYPE_CHECKING:
    from dlx.typing import DeviceLike, Target


_open_frame = FAST_PATH._open_frame


@public
def stack(
    arrays: Iterable[Any],
    to: Target | None = None,
    *,
    axis: int = 0,
    dtype: Any = None,
    pad: float | None = None,
    out: Any = None,
    device: DeviceLike | None = None,
    stream: Any = None,
) -> Any:
    """Copy arrays of one shape and dtype into one new array, along a new dimension.

    All arrays must have the same shape, dtype and device (host devices may differ in number), unless `pad` or `dtype`
    is given; this is checked before the allocation. Arrays of different frameworks may be mixed.

    Parameters
    ----------
    arrays
        N arrays of shape ``(...)``, as in `convert`; none is changed or consumed. For a data frame, a table or another
        mapping: its columns in order. For a list column: its rows; if they have one length, the result shares their
        values as in `convert`. For a column of numbers: itself. Numbers, and lists of them, count as arrays of bool,
        int64 (uint64 if they are larger), float64 or complex128; scalars of numpy as arrays of their dtype.
    to
        Target, as in `convert`.
    axis
        Position of the new dimension in the result; 1 makes a matrix with the columns of a data frame.
    dtype
        The dtype of the result: every array is cast to it. Or a mapping, as in `convert`.
    pad
        The number, of the result's dtype, that fills the result where an array is shorter than the longest one; only on
        the host. None: arrays of several shapes are refused.
    out
        Instead of `to`: the array of shape ``(N, ...)`` to write to, as in `convert`.
    device
        Device of the result, as in `convert`.
    stream
        The target's stream, for device memory.

    Returns
    -------
    array
        An array of the target framework with shape ``(N, ...)`` (N at `axis`) in new memory; or `out`. It is row-major,
        except that each array's values stay adjacent for other axes than the first, if the target supports that. torch
        stacks its own arrays on a device, always row-major.

    Raises
    ------
    LayoutError, DTypeError, DeviceError
        If an array differs from the first in shape, dtype or device; the error's path is ``arrays[i]``.
    ConversionError
        If an array cannot be read, or the target does not support the result.
    AdapterNotFoundError
        If an element isn't an array.
    ValueError
        If there are no arrays, or the result has no such `axis`.

    Notes
    -----
    dlx allocates the memory (aligned to 256 bytes) and passes it to the target; the copies run without the GIL.
    There is no ``errors="pass"``: one array cannot hold text next to numbers. Leave such columns out.

    Examples
    --------
    >>> import dlx
    >>> dlx.stack([b"abc", bytearray(b"def")], to="dlx")
    dlx.Tensor(uint8[2, 3], cpu, [[97, 98, 99], [100, 101, 102]])
    >>> dlx.stack([[1, 2, 3], [4]], to="dlx", pad=0, dtype="float32")
    dlx.Tensor(float32[2, 3], cpu, [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    """
    if not (pad is None or isinstance(pad, Number)):
        raise TypeError(f"pad must be a number, found {safe_repr(pad)}")
    opened = None
    if out is pad is device is stream is None and type(to) is str and not trace.observers:
        stacked = None
        if type(arrays) is list or type(arrays) is tuple:
            if dtype is None and type(axis) is int and axis >= 0:
                stacked = FAST_PATH._stack(tuple(arrays), to, None, axis)  # on a device
        elif axis == 1 and (dtype is None or type(dtype) is str):
            opened = _open_frame(arrays, to, None if dtype is None else read_dtype(dtype))
            stacked = None if opened is None else opened[0]
        if stacked is not None:
            return stacked
    return _stack_any(arrays, opened, to, axis, dtype, pad, out, device, stream)


def _stack_any(
    arrays: Any, opened: Any, to: Any, axis: int, dtype: Any, pad: Any, out: Any, device: Any, stream: Any
) -> Any:
    """Stack arrays or the columns of a frame, which C may have opened."""
    is_usual = pad is device is stream is None and not trace.observers and type(axis) is int and axis >= 0
    is_simple = is_usual and out is None and type(to) is str and (dtype is None or type(dtype) is str)
    try:
        inside = open_frame(arrays) if opened is None else opened[1]
        if is_simple and type(inside) is tuple:
            stacked = _stack_plainly(inside[1], inside[2], to, axis, dtype)
            if stacked is not None:
                return stacked
        join = functools.partial(_join_lists, pad, dtype)
        objs, key_of, whole, places = list_arrays(arrays, inside, join)
        if places is None and objs and (_is_list(objs[0]) or _is_number(type(objs[0]))):
            whole = _pack_lists(objs, join)
    except DlxError as error:
        error.target = request_of(to).target.name if out is None else type_name(type(out))
        error.complete(source=type_name(type(arrays)))
        raise
    if is_simple and objs and whole is None and places is None:
        stacked = _stack_plainly(objs, None, to, axis, dtype)
        if stacked is not None:
            return stacked
    is_filled = is_usual and out is not None and to is dtype is places is None and objs
    if is_filled and (fill_plain(objs, out, axis) or _fill_on_device(objs, out, axis)):
        return out
    if whole is None and places is None and objs and _is_scalar(type(objs[0])):
        whole = _pack_numbers(objs)
    if out is None:
        request = request_of(to, device=device, stream=stream)
        target = request.target.name
    else:
        if not (to is device is stream is None):
            raise TypeError("stack takes out= alone, or to= with device= and stream=. Leave out= or the others out.")
        request, target = request_of("dlx"), type_name(type(out))
    if not objs:
        raise ValueError("stack takes at least one array, found 0. Pass an array.")
    if whole is not None:
        whole = _move_axis(whole, _find_axis(axis, whole.ndim))
        if dtype is device is stream is out is None:
            return convert(whole, to)
        casts = dtype if dtype is None or isinstance(dtype, Mapping) else {whole.dtype: dtype}
        return convert(whole, to, out=out, device=device, stream=stream, dtype=casts)
    tensors = _borrow_host(objs)
    sources: list[tuple[Adapter, Readiness]] = []  # of device memory
    if tensors is None:
        is_empty = [_is_list(obj) and not obj for obj in objs]
        cast = None if isinstance(dtype, Mapping) else dtype
        objs = [_read_lists(obj, key_of(i), target, pad, cast) for i, obj in enumerate(objs)]
        tensors = _borrow_host(objs)
        if tensors is None:
            tensors, sources = _tensors(objs, key_of, target)
        if not all(is_empty):  # empty lists have the dtype of the other arrays
            like = tensors[is_empty.index(False)].dtype
            tensors = [empty((0,), like) if each else one for each, one in zip(is_empty, tensors, strict=True)]
    try:
        output = None if out is None else open_output(out)
        is_far = not all(map(host_readable, {tensor.device for tensor in tensors}))
        dtypes, shapes = [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
        wanted = _find_dtype(dtypes, key_of, dtype)
        if places is None:
            row, n = _find_shape(shapes, key_of, is_padded=pad is not None, is_far=is_far), len(shapes)
        else:
            row, n = shapes[0][:1], sum(shape[1] for shape in shapes)
        _check_devices(tensors, key_of)
        at = _find_axis(axis, len(row) + 1)
        shape = (*row[:at], n, *row[at:])
        if output is not None:
            check_fits(output, shape, wanted, (("dtype", output.dtype.name),))
        place = None if output is None else output.tensor
        if is_far and output is None:
            whole = _stack_on_device(objs, tensors, sources, request, at, shape, wanted)
        elif output is not None and (is_far or not output.is_on_host()):
            rows, name = objs if places is None else arrays, output.adapter.name if is_far else "dlx"
            return convert(stack(rows, name, axis=at, dtype=wanted, pad=pad), out=out)
        else:
            for i, old in enumerate(dtypes):
                if old is not wanted and old != wanted and not can_cast(old, wanted, HOST):
                    (tensors[i],) = convert({key_of(i): objs[i]}, to="dlx", dtype={old: wanted}).values()
            whole = _allocate(request, tensors[0], at, shape, wanted) if place is None else place
            number = _read_pad(pad, wanted) if places is None and any(each != row for each in shapes) else None
            _fill_rows(whole, tensors, at, number, places, is_new=place is None)
            whole = match_packing(whole, tensors[0]) if place is None else whole
    except DlxError as error:
        error.source, error.target, error.root = f"{len(objs)} arrays", target, error.root or "arrays"
        raise
    if trace.observers:
        why = Step("copy", "stack copies every array into one", nbytes=whole.nbytes)
        trace.record(f"{len(objs)} arrays", target, "copied", [why], whole.nbytes)
    if output is not None:
        mark_written(output.adapter, output.obj)
        return out
    return convert(whole, to) if device is stream is None else convert(whole, to, device=device, stream=stream)


def _borrow_host(objs: list[Any]) -> list[Tensor] | None:
    """Return the tensors of host arrays of the fast path; None for others."""
    tensors = borrow_all(objs, TENSOR.name)
    return tensors if tensors is not None and all(tensor.is_host for tensor in tensors) else None


def _fill_on_device(objs: list[Any], out: Any, axis: int) -> bool:
    """Copy device arrays of the fast path to `out` on the device; return False if anything else has to be checked."""
    adapter = lookup.kind(type(out)).adapter
    if adapter is None or adapter.streams is None or not casts_itself(adapter):
        return False
    if FAST_PATH._stack(tuple(objs), adapter.name, out, axis) is None:
        return False
    mark_written(adapter, out)
    return True


def _stack_on_device(
    objs: list[Any], tensors: list[Tensor], sources: list[Any], request: Request, at: int, shape: Any, wanted: DType
) -> Any:
    """Stack arrays in memory that the host cannot read; their frameworks cast them."""
    first, n = tensors[0], len(tensors)
    if any(tensor.dtype != wanted for tensor in tensors):
        to, stream = request.target.name, request.stream
        pairs = zip(objs, tensors, strict=True)
        rows = [convert(obj, to, dtype={tensor.dtype: wanted}, stream=stream) for obj, tensor in pairs]
        return stack(rows, to, axis=at, stream=stream)
    _check_target(request, first, shape, wanted)
    if math.prod(first.shape) * wanted.bits * wanted.lanes % 8 and not first.flags & SUBBYTE_PADDED:
        reason = "its elements are packed below one byte, and its size is not a whole number of bytes"
        raise LayoutError(reason, root="arrays", fix="Pass arrays of numpy, whose elements have a byte each.")
    device, flags = physical(first.device), first.flags & SUBBYTE_PADDED
    strides = [*row_major([n, *first.shape])] if keeps_order(request.target) else [*row_major(shape)]
    if keeps_order(request.target):  # the values of each array stay adjacent
        strides.insert(at, strides.pop(0))
    like = native.tensor_new(lib.DLX_ALIGNMENT, shape, strides, wanted, device, flags, None)
    is_last = request.device is None or physical(request.device) == device
    sync = StreamSync(request.target, request.stream, request.device)
    array, whole = sync.copy(tensors, sources, like, is_last and first.nbytes > 0, at)
    if is_last and request.target.adapter is TENSOR:  # `convert` returns it unchanged
        return sync.for_consumer(TENSOR, whole, cuda.readiness_of(whole))
    return whole if array is None else array


def _allocate(request: Request, like: Tensor, at: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
    """Return new host memory for the result."""
    _check_target(request, like, shape, dtype)
    is_ordered = keeps_order(request.target)  # faster: the values of each array stay adjacent
    whole: Tensor = empty((shape[at], *shape[:at], *shape[at + 1 :]) if is_ordered else shape, dtype)
    if dtype.bits < 8:  # a row may begin inside a byte
        whole = native.tensor_repack(whole)
    return _move_axis(whole, at) if is_ordered else whole


def _fill_rows(whole: Tensor, tensors: list[Tensor], at: int, number: Any, places: Any, *, is_new: bool) -> None:
    """Copy host tensors to the rows of another, cast and padded with a number; `places` as in `output.fill`."""
    if whole.dtype.bits < 8 and not whole.flags & SUBBYTE_PADDED:
        reason = "its elements are packed below one byte, and a row may begin inside a byte"
        raise LayoutError(reason, root="out", fix="Pass an array of numpy, whose elements have a byte each.")
    if number is not None:
        tensors = tensors if is_new else [native.tensor_copy(tensor, True) for tensor in tensors]
        _fill_everywhere(whole, number)
    fill(whole, tensors, at, places)


def _fill_everywhere(whole: Tensor, number: Tensor) -> None:
    everywhere = native.tensor_new(number.data_ptr, whole.shape, (0,) * whole.ndim, whole.dtype, HOST, 0, number)
    fill(whole, [everywhere], -1)


def _join_lists(pad: Any, dtype: Any, source: Any, values: Tensor, offsets: Tensor, bounds: list[int]) -> Tensor:
    """Return lists, or the lists of a column, as one tensor of a dtype, padded to the longest."""
    wanted = _find_dtype([values.dtype], (0,).__getitem__, dtype)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if pad is None:
        shapes = [(length, *values.shape[1:]) for length in lengths]
        _find_shape(shapes, range(len(shapes)).__getitem__, is_padded=False, is_far=False)  # raises
    if wanted != values.dtype and not can_cast(values.dtype, wanted, HOST):
        values = convert(source, to="dlx", dtype={values.dtype: wanted})  # its framework casts
    whole: Tensor = empty((len(lengths), max(lengths), *values.shape[1:]), wanted)
    _fill_everywhere(whole, _read_pad(pad, wanted))
    native.tensor_join(whole, values, native.tensor_copy(offsets, False, 0, DType("int64")))
    return whole


_KINDS = {lib.kDLBool: bool, lib.kDLInt: int, lib.kDLUInt: int, lib.kDLComplex: complex}  # of dtypes; others: float


def _read_pad(pad: Any, dtype: DType) -> Tensor:
    """Return the number of the option `pad` as a tensor without dimensions."""
    kind, made = _KINDS.get(dtype.code, float), None
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # such as NaN for integers
        number = _read_lists(kind(pad))
        made = native.tensor_copy(number, False, 0, dtype) if can_cast(number.dtype, dtype, HOST) else None
    if made is None or (kind in (bool, int) and memoryview(made)[()] != pad):
        reason, fix = f"pad={safe_repr(pad)} is not a value of {dtype}", "Pass another number, or arrays of one shape."
        raise DTypeError(reason, root="arrays", fix=fix)
    return made


def _move_axis(whole: Tensor, at: int) -> Tensor:
    """Return a host tensor with its first axis at another position."""
    if at == 0:
        return whole
    (n, *shape), (step, *steps) = whole.shape, whole.strides
    return view(whole, (*shape[:at], n, *shape[at:]), (*steps[:at], step, *steps[at:]))


def _stack_plainly(objs: list[Any], places: list[slice] | None, to: Any, axis: int, dtype: str | None) -> Any:
    """Return the stack of host arrays of the fast path, cast by dlx; None if the Python path is needed."""
    try:
        target, is_plain = registry.target(to), axis == 0 and dtype is None and places is None
        if target.varies:
            return None
        tensors = _interfaces(objs) if is_plain and not hasattr(type(objs[0]), "__dlpack__") else None
        tensors = tensors or borrow_all(objs, TENSOR.name)
        if tensors is None or not tensors[0].is_host:
            return None
        whole: Tensor | None = tensors[0]
        if len(tensors) == len(objs):  # else `_interfaces` has stacked them
            wanted = None if dtype is None else read_dtype(dtype)
            whole = native.tensor_stack(tensors, target.address, axis, keeps_order(target), wanted, places)
        return None if whole is None or target.check(whole) else convert(whole, to)
    except MemoryError:
        raise
    except Exception:  # the Python path raises it
        return None


def _interfaces(objs: list[Any]) -> list[Tensor]:
    """Return the tensors of objects with an array interface, read once per object since it may serialize the data."""
    kind = type(objs[0])
    if lookup.adapter_of(objs[0]) is not INTERFACE or any(type(obj) is not kind for obj in objs):
        return []
    by_id = {each: obj.__array_interface__ for each, obj in {id(obj): obj for obj in objs}.items()}
    interfaces = [by_id[id(obj)] for obj in objs]
    one = memory.array_interface(objs[0], interfaces[0])
    data = [each.get("data") for each in interfaces]
    whole = len(objs) > 1 and one.dtype.bits >= 8 and interfaces[0].keys() == {"shape", "typestr", "version", "data"}
    whole = whole and all({**each, "data": data[0]} == interfaces[0] for each in interfaces)
    if whole and all(type(each) is bytes and len(each) == one.nbytes > 0 for each in data):
        flat: Any = native.tensor_stack(borrow_all(data, TENSOR.name) or [])
        return [native.tensor_new(flat.data_ptr, (len(objs), *one.shape), None, one.dtype, one.device, 0, flat)]
    return [one, *(memory.array_interface(obj, each) for obj, each in zip(objs[1:], interfaces[1:], strict=True))]


def _tensors(objs: list[Any], key_of: Any, target: str) -> tuple[list[Tensor], list[tuple[Adapter, Readiness]]]:
    """Return the tensors, their adapters and readiness; each array is exported once, and errors have its key."""
    numbers = sorted({id(obj): i for i, obj in reversed([*enumerate(objs)])}.values())  # the first place of each array
    try:
        found = [lookup.source(objs[i], target=target, root="arrays", path=(key_of(i),)) for i in numbers]
        each, sources = [array for array, _ in found], [source for _, source in found]
        failures = Failures(TENSOR.name, locate=lambda path: ("arrays", path))
        to_dlx = Request(registry.target("dlx"))
        batch = Batch(to_dlx, each, sources, lambda i: (key_of(numbers[i]),), failures, TENSOR.name)
        tensors = batch.tensors()
    except DlxError as error:
        error.target = target
        error.complete(via="to dlx.convert(array, to='dlx') and stack its result")
        raise
    made = {id(objs[i]): (tensors[n], (sources[n], batch.readiness(n))) for n, i in enumerate(numbers)}
    pairs = [made[id(obj)] for obj in objs]
    return [tensor for tensor, _ in pairs], [ready for _, ready in pairs]


def _check_target(request: Request, like: Tensor, shape: tuple[int, ...], dtype: DType) -> None:
    """Raise if the target does not support the result, before the allocation."""
    device = HOST if host_readable(like.device) else like.device  # of the result
    abstract = native.tensor_new(lib.DLX_ALIGNMENT, shape, None, dtype, device, like.flags & ~1, None)
    has_no_options = request.device is request.stream is None and not request.target.varies and like.is_host
    if has_no_options and not request.target.check(abstract):
        return
    error = plan_one(request, abstract, TENSOR, probe=False)[0].error
    try:
        if error is not None:
            raise error
    finally:
        del error  # break the cycle with this frame


def _find_dtype(found: list[DType], key_of: Any, dtype: Any) -> DType:
    """Return the dtype of the result; all tensors must have it, unless `dtype` changes them."""
    if not (dtype is None or isinstance(dtype, Mapping)):
        return read_dtype(dtype)
    casts = read_casts(dtype)
    found = found if casts is None else [casts.find(each) or each for each in found]
    if found.count(found[0]) < len(found):
        common = common_dtype(found)
        advice: dict[str, Any] = {"fix": "Pass arrays of one dtype."}
        if common is not None:
            note = f"{common[0]} rounds integers beyond 2**53, and no dtype holds all values exactly."
            advice = {"option": (("dtype", common[0].name),), "fix": "" if common[1] else note}
        raise _odd(DTypeError, "dtype", found, key_of, found, **advice)
    return found[0]


def _find_shape(shapes: list[tuple[int, ...]], key_of: Any, *, is_padded: bool, is_far: bool) -> tuple[int, ...]:
    """Return the shape of one row: of all arrays, or the largest extents."""
    sizes = [*map(len, shapes)]
    found: list[Any] = sizes if is_padded and not is_far else shapes
    if found.count(found[0]) < len(found):
        advice: dict[str, Any] = {"fix": "Pass arrays of one shape." + " Only arrays on the host are padded." * is_far}
        if not is_far and len({*sizes}) == 1:
            advice = {"option": (("pad", 0),)}
        raise _odd(LayoutError, "shape", found, key_of, shapes, **advice)
    return shapes[0] if found is shapes else tuple(map(max, zip(*shapes, strict=True)))


def _check_devices(tensors: list[Tensor], key_of: Any) -> None:
    """Raise for the first array on another device, or in another kind of host memory, than the first one."""
    devices = [tensor.device for tensor in tensors]
    kinds = {device: device.type if host_readable(device) else device for device in {*devices}}
    if len({*kinds.values()}) > 1:
        found = [kinds[device] for device in devices]
        raise _odd(DeviceError, "device", found, key_of, devices, fix="Move it in its own framework first.")


def _find_axis(axis: int, ndim: int) -> int:
    at = index(axis)
    if not -ndim <= at < ndim:
        raise ValueError(f"axis must be from {-ndim} to {ndim - 1} for these arrays, found {at}")
    return at % ndim


_NUMBERS: dict[type, dict[str, str]] = {  # letters of `array`
    bool: {"B": "bool"}, int: {"q": "int64", "Q": "uint64"}, float: {"d": "float64"}, complex: {"d": "complex128"},
}  # fmt: skip


def _is_number(kind: type) -> bool:
    return is_key(kind) and kind in _NUMBERS


def _is_scalar(kind: type) -> bool:
    """Return whether a type is a Python number, or a scalar of a framework, such as numpy.float32."""
    found = lookup.kind(kind)
    return _is_number(kind) or (found.verdict == "passthrough" and found.adapter not in (None, BUFFER))


def _is_list(obj: Any) -> bool:
    return type(obj) is list or type(obj) is tuple


def _pack_lists(objs: list[Any], join: Join) -> Tensor | None:
    """Return scalars, or lists of scalars of one dtype, as a tensor; None if something else is in the lists."""
    shape, rows, elements, bounds = [len(objs)], [objs], objs, [0]
    while len(bounds) == 1 and elements and all(map(_is_list, elements)):
        lengths = [*map(len, elements)]
        if min(lengths) < max(lengths):
            if len(shape) > 1:
                return None
            bounds += accumulate(lengths)
        shape.append(lengths[0])
        if len(shape) > lib.DLX_MAX_NDIM:
            raise LayoutError(
                f"its lists are nested deeper than {lib.DLX_MAX_NDIM} dimensions", fix="Pass at most that many."
            )
        rows, elements = elements, [*chain.from_iterable(elements)]
    has_one_type = len({*map(id, map(type, elements))}) == 1  # by identity: a class may have no hash
    packed: Any = _pack_numbers(elements) if has_one_type or len({*map(_find_number, rows)}) == 1 else None
    if packed is None or len(bounds) == 1:
        return packed and view(packed, tuple(shape), row_major(shape))
    offsets: Any = _pack_numbers(bounds)
    return join(packed, packed, offsets, bounds)


def _find_number(objs: Sequence[Any]) -> type | None:
    """Return the type of numbers that holds all of a list; None if something else is in it."""
    kinds = {id(kind): kind for kind in map(type, objs)}.values()
    is_of_numbers = kinds and all(map(_is_number, kinds))
    return next(kind for kind in (complex, float, int, bool) if kind in kinds) if is_of_numbers else None


def _pack_numbers(objs: Sequence[Any]) -> Tensor | None:
    """Return scalars as a tensor of one dimension; None if something else is in the list."""
    kind = _find_number(objs)
    if kind is None:
        return _pack_scalars(objs) if len({*map(id, map(type, objs))}) == 1 and _is_scalar(type(objs[0])) else None
    parts = [part for each in objs for part in (each.real, each.imag)] if kind is complex else objs
    for letter, name in _NUMBERS[kind].items():
        with contextlib.suppress(OverflowError):
            memory: Any = native.tensor_copy(BUFFER.export(array(letter, parts)), False)
            return native.tensor_new(memory.data_ptr, (len(objs),), None, read_dtype(name), HOST, 0, memory)
    fix = "Pass an array of another dtype, such as numpy.array(numbers)."
    raise DTypeError("the numbers fit neither int64 nor uint64", fix=fix)


def _pack_scalars(objs: Sequence[Any]) -> Tensor | None:
    """Return scalars of a framework, of one type, as a tensor; None unless each is a buffer."""
    try:
        one: Any = convert(objs[0], to="dlx")
        memory: Any = native.tensor_copy(BUFFER.export(b"".join(objs)), False)
    except (DlxError, TypeError, BufferError):
        return None
    is_whole = one.shape == () and memory.nbytes == len(objs) * one.nbytes
    return native.tensor_new(memory.data_ptr, (len(objs),), None, one.dtype, HOST, 0, memory) if is_whole else None


def _read_lists(obj: Any, key: Any = 0, target: str = "", pad: Any = None, dtype: Any = None) -> Any:
    """Return a scalar, or a list, as a tensor; other objects unchanged."""
    if not _is_list(obj):
        packed: Any = _pack_numbers([obj]) if _is_scalar(type(obj)) else None
        return obj if packed is None else view(packed, (), ())
    try:
        return stack(obj, "dlx", pad=pad, dtype=dtype) if obj else empty((0,), DType("float64"))
    except DlxError as error:
        error.target = target
        error.path, error.root = (key, *error.path), "arrays"
        raise


def _odd(kind: type[DlxError], word: str, found: list[Any], key_of: Any, shown: list[Any], **advice: Any) -> DlxError:
    """Return the error for the first array whose dtype, shape or device differs from the first one's."""
    i = next(i for i, each in enumerate(found) if each != found[0])
    reason = f"its {word} is {shown[i]}, but {path_text((key_of(0),), 'arrays')} has {shown[0]}"
    return kind(reason, root="arrays", path=(key_of(i),), **advice)
