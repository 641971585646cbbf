"""`stack`: copy many arrays into one new array, with one allocation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dlx._api.convert import convert
from dlx._core import cuda, native
from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.public import public
from dlx._core.types import HOST, SUBBYTE_PADDED, host_readable
from dlx._engine import trace
from dlx._engine.batch import Batch
from dlx._engine.failures import Failures
from dlx._engine.plan import Step
from dlx._engine.preview import plan_one
from dlx._engine.request import Request, request_of
from dlx._engine.seam import borrow_all
from dlx._engine.streams import Readiness, StreamSync, physical
from dlx._protocols import memory
from dlx._registry import lookup
from dlx._registry.generic import INTERFACE, TENSOR
from dlx._registry.registry import registry
from dlx._support.reflect import foreign_errors, type_name
from dlx.adapter.base import Adapter
from dlx.errors import DeviceError, DlxError, DTypeError, LayoutError, path_text

if TYPE_CHECKING:
    from dlx.typing import DeviceLike, Target


@public
def stack(arrays: Iterable[Any], to: Target, *, device: DeviceLike | None = None, stream: Any = None) -> Any:
    """Copy arrays of one shape and dtype into one new array, along a new first dimension.

    All arrays must have the same shape, dtype and device (host devices may differ in number), which is checked before
    the allocation. Arrays of different frameworks may be mixed.

    Parameters
    ----------
    arrays
        N arrays of shape ``(...)``, as in `convert`; none is changed or consumed. For a data frame, a table or another
        mapping: its columns in order.
    to
        Target, as in `convert`.
    device
        Device of the result, as in `convert`.
    stream
        The target's stream, for device memory.

    Returns
    -------
    array
        An array of the target framework with shape ``(N, ...)``, row-major, in new memory.

    Raises
    ------
    LayoutError, DTypeError, DeviceError
        If an array differs from the first in shape, dtype or device; the error's path is ``arrays[i]``.
    ConversionError
        If an array cannot be read, or the target does not support the result.
    AdapterNotFoundError
        If an element isn't an array.
    ValueError
        If there are no arrays.

    Notes
    -----
    dlx allocates the memory (aligned to 256 bytes) and passes it to the target; the copies run without the GIL.

    Examples
    --------
    >>> import dlx
    >>> dlx.stack([b"abc", bytearray(b"def")], to="dlx")
    dlx.Tensor(uint8[2, 3], cpu, [[97, 98, 99], [100, 101, 102]])
    """
    objs, keys = _list_arrays(arrays)
    if type(to) is str and objs and device is None and stream is None and not trace.observers:
        stacked = _stack_in_c(objs, to)
        if stacked is not None:
            return convert(stacked, to)
    request = request_of(to, device=device, stream=stream)
    if not objs:
        raise ValueError("stack takes at least one array, found 0. Pass an array.")
    tensors, sources = _tensors(objs, keys, request.target.name)
    shape = (len(tensors), *tensors[0].shape)
    _check_target(request, tensors[0], shape)
    try:
        if cuda.is_cuda(tensors[0].device):
            whole = _stack_on_device(tensors, sources, shape, request)
        else:
            whole = native.tensor_stack(tensors)
    except DlxError as error:
        error.complete(source=f"{len(objs)} arrays", target=request.target.name)
        raise
    if isinstance(whole, int):
        raise _difference_error(tensors, whole, keys).complete(source=f"{len(objs)} arrays", target=request.target.name)
    if trace.observers and whole is not None:
        why = Step("copy", "stack copies every array into one", nbytes=whole.nbytes)
        trace.record(f"{len(objs)} arrays", request.target.name, "copied", [why], whole.nbytes)
    return convert(whole, to, device=device, stream=stream)


def _list_arrays(arrays: Any) -> tuple[list[Any], Sequence[Any]]:
    """Return the arrays and, for errors, their keys; the arrays of a frame or mapping are its values."""
    inside, handler = lookup.unwrap(arrays)
    if handler is not None and handler.kind == "mapping":
        with foreign_errors(lookup.CANNOT_FLATTEN, source=type_name(type(arrays))):
            keys, objs = handler.flatten(inside)
        return objs, keys or range(len(objs))
    if not hasattr(arrays, "__iter__") and (refusal := lookup.kind(type(arrays)).refusal) is not None:
        raise refusal.error()  # such as a model, or a lazy frame
    objs = list(arrays)
    return objs, range(len(objs))


def _stack_in_c(objs: list[Any], to: str) -> Tensor | None:
    """Stack host arrays of the fast path; None if the Python path is needed."""
    target = registry.target(to)
    if target.varies:
        return None
    try:
        tensors = None if hasattr(type(objs[0]), "__dlpack__") else _interfaces(objs)
        tensors = tensors or borrow_all(objs, TENSOR.name)
        if tensors is None or not tensors[0].is_host:
            return None
        if len(tensors) == 1 < len(objs):  # `_interfaces` has stacked them
            return None if target.check(tensors[0]) else tensors[0]
        whole = native.tensor_stack(tensors, target.address)
    except MemoryError:
        raise
    except Exception:  # the Python path raises it
        return None
    return whole if isinstance(whole, Tensor) else None


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


def _stack_on_device(
    tensors: list[Tensor], sources: list[tuple[Adapter, Readiness]], shape: tuple[int, ...], request: Request
) -> Any:
    """Copy CUDA tensors into one array, or return the index of a tensor that differs."""
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if any(getattr(first, word) != getattr(tensor, word) for word in ("dtype", "shape", "device")):
            return i
    device, flags = physical(first.device), first.flags & SUBBYTE_PADDED
    if first.nbytes * 8 != math.prod(first.shape) * first.dtype.bits * first.dtype.lanes and not flags:
        raise LayoutError("its elements are packed below one byte, and its size is not a whole number of bytes")
    like = native.tensor_new(lib.DLX_ALIGNMENT, shape, None, first.dtype, device, flags, None)
    is_last = request.device is None or physical(request.device) == device
    sync = StreamSync(request.target, request.stream, request.device)
    array, whole, ready = sync.copy(tensors, sources, like, is_last and first.nbytes > 0)
    return array if array is not None else whole if ready is None else cuda.when(whole, ready)


def _tensors(objs: list[Any], keys: Sequence[Any], target: str) -> tuple[list[Tensor], list[tuple[Adapter, Readiness]]]:
    """Return the tensors, their adapters and readiness; each array is exported once, and errors have its key."""
    first: dict[int, int] = {}
    for i, obj in enumerate(objs):
        first.setdefault(id(obj), i)
    numbers = list(first.values())
    request = Request(registry.target("dlx"))
    try:
        found = [lookup.source(objs[i], target=target, root="arrays", path=(keys[i],)) for i in numbers]
        each, sources = [array for array, _ in found], [source for _, source in found]
        failures = Failures(TENSOR.name, locate=lambda path: ("arrays", path))
        batch = Batch(request, each, sources, lambda i: (keys[numbers[i]],), failures, TENSOR.name)
        tensors = batch.tensors()
    except DlxError as error:
        error.target = target
        error.complete(via="to dlx.convert(array, to='dlx') and stack its result")
        raise
    number = {i: n for n, i in enumerate(numbers)}
    ready = [(source, batch.readiness(n)) for n, source in enumerate(sources)]
    each = [number[first[id(obj)]] for obj in objs]
    return [tensors[n] for n in each], [ready[n] for n in each]


def _check_target(request: Request, like: Tensor, shape: tuple[int, ...]) -> None:
    """Raise if the target does not support the result, before the allocation."""
    device = HOST if host_readable(like.device) else like.device  # of the result
    abstract = native.tensor_new(lib.DLX_ALIGNMENT, shape, None, like.dtype, device, like.flags & ~1, None)
    has_no_options = request.device is request.stream is None and not request.target.varies and like.is_host
    if has_no_options and not request.target.check(abstract):
        return
    error = plan_one(request, abstract, TENSOR, probe=False)[0].error
    try:
        if error is not None:
            raise error
    finally:
        del error  # break the cycle with this frame


_ODD: dict[str, tuple[type[DlxError], str]] = {
    "dtype": (DTypeError, "Cast it in its own framework first."),
    "shape": (LayoutError, "Pass arrays of one shape."),
    "device": (DeviceError, "Move it in its own framework first."),
    "flags": (LayoutError, "Pass arrays whose elements are all packed, or all padded."),
}


def _comparable(tensor: Tensor, word: str) -> Any:
    """Return an attribute for comparison; host devices are compared by type."""
    found = getattr(tensor, word)
    return found.type if word == "device" and host_readable(found) else found


def _difference_error(tensors: list[Tensor], i: int, keys: Sequence[Any]) -> DlxError:
    """Return the error for an array that differs from the first one."""
    one, other = tensors[0], tensors[i]
    word = next(word for word in _ODD if _comparable(one, word) != _comparable(other, word))
    kind, fix = _ODD[word]
    reason = f"its {word} is {getattr(other, word)}, but {path_text((keys[0],), 'arrays')} has {getattr(one, word)}"
    return kind(reason, root="arrays", path=(keys[i],), fix=fix)
