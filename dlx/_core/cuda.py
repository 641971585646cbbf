"""Python interface to the CUDA driver: devices, events, waits, and pending releases of memory.

The driver is loaded at first use; `import dlx` and conversions on the host never load it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dlx._core import native
from dlx._core.array_protocol import typestr
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.stream import Stream
from dlx._core.types import HOST, Device, contiguous
from dlx._support.module import set_module
from dlx.errors import ConversionError, DeviceError, LayoutError

Ready = Any
"""A readiness event: cdata ``dlx_ready *``, the point on a stream after which memory is ready."""

_FIX = {
    lib.DLX_E_NO_DRIVER: "Install an NVIDIA driver, or set DLX_CUDA_DRIVER to its libcuda.so.1.",
    lib.DLX_E_FORKED: "Use the 'spawn' start method of multiprocessing.",
    lib.DLX_E_CAPTURE: "Convert before the capture starts, or use one stream for both.",
}


_KINDS: dict[int, Any] = {getattr(lib, name): kind for name, kind in native._CLASSES.items()}


def check(status: int) -> None:
    """Raise the exception for a status of the CUDA core."""
    if status == lib.DLX_OK:
        return
    if status == lib.DLX_E_MEMORY:
        raise MemoryError
    fix = _FIX.get(status, "")
    if status in (lib.DLX_E_NO_DRIVER, lib.DLX_E_FORKED, lib.DLX_E_DRIVER):
        raise DeviceError(ffi.string(lib.dlx_cuda_message()).decode(errors="replace"), fix=fix)
    text = ffi.string(lib.dlx_status_text(status)).decode()
    raise _KINDS.get(status, ConversionError)(text, fix=fix)


def is_cuda(device: Device | None) -> bool:
    """Return whether CUDA streams order the device's memory."""
    return device is not None and device[0] in (lib.kDLCUDA, lib.kDLCUDAManaged)


def is_loaded() -> bool:
    """Return whether the driver is loaded and can be called."""
    return bool(lib.dlx_cuda_loaded())


def is_pinned_device(device: Device | None) -> bool:
    """Return whether a device is pinned host memory."""
    return device is not None and device[0] == lib.kDLCUDAHost


def require() -> None:
    """Load the driver."""
    check(lib.dlx_cuda_load())


@set_module("dlx")
def devices() -> dict[Device, str]:
    """Return the devices that dlx can move memory to, with their names: the host and CUDA devices.

    This call initializes the CUDA driver, if one is installed.

    Examples
    --------
    >>> import dlx
    >>> dlx.devices()[dlx.Device("cpu")]
    'host memory'
    """
    names = {HOST: "host memory"}
    count = ffi.new("int32_t *")
    if lib.dlx_cuda_count(count) == lib.DLX_OK:
        name = ffi.new("char[]", 256)
        for number in range(count[0]):
            check(lib.dlx_cuda_name(number, name, 256))
            names[Device(lib.kDLCUDA, number)] = ffi.string(name).decode(errors="replace")
    return names


def where(address: int) -> Device:
    """Return the device of an address: CUDA device, pinned or managed memory with its number, or the host."""
    device = ffi.new("DLDevice *")
    check(lib.dlx_cuda_where(ffi.cast("void *", address), device))
    return Device(device.device_type, device.device_id)


@contextlib.contextmanager
def at(device: Device) -> Iterator[None]:
    """Make a CUDA device current on this thread within the context; ignore other devices."""
    if not is_cuda(device):
        yield
        return
    check(lib.dlx_cuda_push(device.id))
    try:
        yield
    finally:
        lib.dlx_cuda_pop()


def order(before: Stream, after: Stream) -> None:
    """Make stream `after` wait for the work on `before`, unless they are equal or one is unordered."""
    if not before.is_unordered and not after.is_unordered:
        check(lib.dlx_cuda_order(before.device.id, before.handle, after.device.id, after.handle))


def ready(stream: Stream) -> Ready:
    """Return a readiness event after the work that is on a stream now."""
    address = native.ready_new(stream.device.id, stream.handle, stream.keep)
    return ffi.gc(ffi.cast("dlx_ready *", address), lib.dlx_ready_drop)


def wait(point: Ready, stream: Stream) -> None:
    """Make a stream wait for a readiness event."""
    if not stream.is_unordered:
        check(lib.dlx_ready_wait(point, stream.device.id, stream.handle))


def stream_of(point: Ready) -> Stream | None:
    """Return the stream of a readiness event, or None if it may be destroyed."""
    device_id = ffi.new("int32_t *")
    handle = lib.dlx_ready_stream(point, device_id)
    return Stream(Device(lib.kDLCUDA, device_id[0]), handle, point) if handle else None


def synchronize(what: Stream | Ready) -> None:
    """Make the host wait for a stream or a readiness event."""
    if isinstance(what, Stream):
        if not what.is_unordered:
            check(lib.dlx_cuda_synchronize(what.device.id, what.handle))
    else:
        check(lib.dlx_ready_synchronize(what))


def readiness_of(tensor: Tensor) -> Ready | None:
    """Return the readiness event of a `dlx.Tensor`, or None if it is ready."""
    address = native.tensor_readiness(tensor)
    return ffi.gc(ffi.cast("dlx_ready *", address), lib.dlx_ready_drop) if address else None


def identity(point: Ready) -> int:
    """Return an event's number: after a wait for one event, others with the same number need no wait."""
    own = int(lib.dlx_ready_own_device(point))
    return -1 - own if own >= 0 else int(ffi.cast("uintptr_t", point))


def when(tensor: Tensor, point: Ready | None, behind: Stream | None = None) -> Tensor:
    """Return a new tensor over the same memory with another readiness event, or without one.

    The memory's release waits for the stream `behind`. Without an event, that already waits for the memory.
    """
    address = 0 if point is None else int(ffi.cast("uintptr_t", point))
    device_id, handle, keep = (0, 0, None) if behind is None else (behind.device.id, behind.handle, behind.keep)
    return native.tensor_behind(tensor, device_id, handle, keep, address)  # `point` stays alive until the call returns


def transfer(tensor: Tensor, target: Tensor, stream: Stream | None, wait: bool = True) -> None:
    """Copy all elements between the host and a device on a stream, or on the host (None)."""
    structs = [ffi.cast("DLTensor *", native.tensor_address(each)) for each in (tensor, target)]
    if stream is None:
        check(lib.dlx_copy(*structs, target.flags))
    else:
        check(lib.dlx_cuda_transfer(*structs, target.flags, stream.handle, wait))


def stack(rows: Sequence[Tensor], whole: Tensor, axis: int, stream: Stream) -> None:
    """Copy device memory along an axis of other device memory, or one tensor to it (-1), on a stream of the latter."""
    structs = [ffi.cast("DLTensor *", native.tensor_address(each)) for each in (*rows, whole)]
    pointers = ffi.new("DLTensor *[]", structs[:-1])
    check(lib.dlx_cuda_stack(pointers, len(rows), structs[-1], whole.flags, axis, stream.handle))


def check_gaps(tensor: Tensor, keep_order: bool) -> None:
    """Raise a LayoutError if a copy of device memory to dense memory needs too many driver calls."""
    struct = ffi.cast("DLTensor *", native.tensor_address(tensor))
    if lib.dlx_cuda_is_scattered(struct, tensor.flags, keep_order):
        reason = ffi.string(lib.dlx_status_text(lib.DLX_E_SCATTERED)).decode()
        raise LayoutError(reason, fix="Make it contiguous in its own framework first.")


def can_order(before: Stream, after: Stream | None) -> None:
    """Raise a StreamError if a stream, or the host (None), may not wait for another one during a graph capture."""
    device_id, handle = (-1, 0) if after is None else (after.device.id, after.handle)
    check(lib.dlx_cuda_can_order(before.device.id, before.handle, device_id, handle))


def work_stream(device: Device) -> Stream:
    """Return dlx's own stream on a device."""
    handle = ffi.new("uint64_t *")
    check(lib.dlx_cuda_work_stream(device.id, handle))
    return Stream(device, handle[0])


def as_interface(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor's ``__cuda_array_interface__``, version 3; consumers wait for its ``"stream"``."""
    dtype, device = tensor.dtype, tensor.device
    name = typestr(dtype)
    if not is_cuda(device) or name is None:
        raise AttributeError(f"this dlx.Tensor has no __cuda_array_interface__: it is {dtype} on {device}")
    point, stream, size = readiness_of(tensor), None, dtype.bits // 8
    if point is not None and tensor.nbytes:
        work = work_stream(Device(lib.kDLCUDA, device.id))
        wait(point, work)
        stream = work.handle
    dense = contiguous(tensor.shape, tensor.strides)
    return {
        "version": 3,
        "shape": tensor.shape,
        "strides": None if dense else tuple(step * size for step in tensor.strides),
        "typestr": name,
        "data": (tensor.data_ptr + tensor.byte_offset if tensor.nbytes else 0, tensor.readonly),
        "stream": stream,
    }


native.register(cuda_interface=as_interface)

pending: list[Callable[[], int]] = []
"""Further functions for `release_pending`: each releases unused memory and returns how many arrays are in use."""


@set_module("dlx")
def release_pending() -> int:
    """Release memory that devices have finished using; return how many arrays are still in use.

    dlx keeps an array until the device has finished using it on streams other than its producer's, and keeps shared
    memory while other processes have it open. Every call that involves CUDA memory checks for finished work; this
    function only checks, without waiting for the device.

    Examples
    --------
    >>> import dlx
    >>> dlx.release_pending()
    0
    """
    shared = sum(release() for release in pending)  # first: the next line frees what they release
    return shared + int(lib.dlx_cuda_release_pending())
