"""Run the planned steps for one array: resolve its blockers, export it, and build the target's array."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dlx._core import cuda, native
from dlx._core.native import Tensor
from dlx._core.types import HOST, READ_ONLY, SUBBYTE_PADDED, host_readable, row_major
from dlx._engine.plan import Address, Cast, Copy, Relabel, Repack, Resolve, Step, Unmark, ViewAs
from dlx._engine.sources import adapter_call
from dlx._engine.streams import Readiness, Synchronization
from dlx._support.reflect import type_name
from dlx.adapter.base import Adapter


def resolve_blockers(obj: Any, steps: tuple[Step, ...], source: Adapter) -> Any:
    """Run the steps before the export and return the array."""
    with adapter_call(source):
        for step in steps:
            if isinstance(step, Resolve) and not (isinstance(step, Cast) and step.at_end):
                obj = step.run(obj)
    return obj


def is_tracing(adapter: Adapter) -> bool:
    """Return whether the framework is recording a graph that new arrays become part of."""
    if sys.modules.get(adapter.package) is None:  # loaded by its name, and not installed
        return False
    with adapter_call(adapter, target=adapter.name):
        return adapter.is_tracing is not None and adapter.is_tracing() is not False


def mark_written(source: Any, obj: Any) -> None:
    """Tell the array's framework that other code wrote to it, if `source` is an adapter that supports this."""
    writes = source.writes if isinstance(source, Adapter) else None
    if writes is None or writes.mark_written is None:
        return
    try:
        writes.mark_written(obj)
    except Exception:
        with adapter_call(source, source=type_name(type(obj))):  # slow, as a context around each call
            raise


def is_read_in_place(steps: tuple[Step, ...]) -> bool:
    """Return whether the consumer reads the producer's memory without a copy."""
    copied = False
    for step in steps:
        if isinstance(step, Relabel) and host_readable(step.device):
            return True
        copied = copied or isinstance(step, Copy | Repack)
    return not copied


def dense_strides(tensor: Tensor, keep_order: bool) -> Sequence[int]:
    """Return the strides of a dense copy: row-major, or in the source's order if `keep_order`."""
    order = list(range(tensor.ndim))
    if keep_order and all(step > 0 for step, extent in zip(tensor.strides, tensor.shape, strict=True) if extent > 1):
        order.sort(key=lambda axis: -tensor.strides[axis] if tensor.shape[axis] > 1 else 0)
    steps = row_major([tensor.shape[axis] for axis in order])
    return [step for _, step in sorted(zip(order, steps, strict=True))]


def execute(
    steps: tuple[Step, ...], tensor: Tensor, readiness: Readiness, source: Adapter, request: Any, sync: Synchronization
) -> Any:
    """Run the steps of `planner.decide` on an exported tensor and return the target's array."""
    target = request.target
    dtype, adapter = None, (target.over(tensor) if target.varies else target).adapter
    load: Callable[..., Any] = adapter.load
    options: tuple[bool, ...] = ()
    if request.device is not None and adapter.placement is not None:
        load, options = adapter.placement.load, (request.committed,)
    writer: Adapter | None = source  # the framework that may write to the memory; None for a copy
    last = steps[-1] if steps else None
    for step in steps:
        if isinstance(step, Relabel):
            if is_read_in_place(steps):
                sync().order(tensor, readiness, step.device)  # otherwise `for_consumer` does it
            tensor = native.tensor_view(tensor, None, step.device, None, None)
        elif isinstance(step, Copy):
            is_near, pins = host_readable(tensor.device), step is last and cuda.is_pinned_device(step.device)
            if step.dtype is not None:
                tensor, readiness = native.tensor_copy(tensor, step.keep_order, 0, step.dtype), None
            elif is_near and host_readable(step.device) and not pins:
                tensor, readiness = native.tensor_copy(tensor, step.keep_order), None
                if step.device != HOST:  # such as a framework's second host device
                    tensor = native.tensor_view(tensor, None, step.device, None, None)
            elif host_readable(step.device) and not pins:
                stream = sync().choose_fetch_stream(tensor, readiness)
                tensor, readiness = native.tensor_copy(tensor, step.keep_order, stream.handle), None
            else:
                address, flags = native.lib.DLX_ALIGNMENT, tensor.flags & SUBBYTE_PADDED
                strides = dense_strides(tensor, step.keep_order)
                like = native.tensor_new(address, tensor.shape, strides, tensor.dtype, step.device, flags, None)
                allocates = pins or (step is last and tensor.nbytes > 0)
                if is_near or pins:
                    array, tensor = sync().move(tensor, readiness, like, allocates)
                else:
                    array, tensor = sync().copy([tensor], [(writer, readiness)], like, allocates, -1)
                if array is not None:
                    return array
                readiness = cuda.readiness_of(tensor)
            writer = None
        elif isinstance(step, Repack):
            tensor, writer = native.tensor_repack(tensor), None
        elif isinstance(step, Unmark):
            tensor = native.tensor_view(tensor, None, None, tensor.flags & ~READ_ONLY, None)
        elif isinstance(step, Address):
            address = native.lib.DLX_ALIGNMENT  # aligned, and never read
            tensor = native.tensor_new(
                address, tensor.shape, tensor.strides, tensor.dtype, tensor.device, tensor.flags, tensor
            )
        elif isinstance(step, ViewAs):
            dtype = tensor.dtype
            tensor = native.tensor_view(tensor, step.dtype, None, tensor.flags & ~SUBBYTE_PADDED, None)
    if tensor.is_host or not cuda.is_cuda(tensor.device):
        array = load(tensor, *options)
    else:
        tensor = sync().for_consumer(source, tensor, readiness)
        with adapter.devices.activate(tensor.device):
            array = load(tensor, *options)
    array = array if dtype is None else adapter.dtypes.viewed(array, dtype)
    if not (isinstance(last, Cast) and last.at_end):
        return array
    with sync().use(sync().consumer(tensor.device)) if cuda.is_cuda(tensor.device) else contextlib.nullcontext():
        return last.run(array)
