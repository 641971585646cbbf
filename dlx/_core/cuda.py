"""The CUDA driver as Python sees it: devices, events, waits, and memory that is still in use by a device.

Nothing here is loaded before it is needed: `import dlx` and conversions on the host never touch the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from dlx._core import native
from dlx._core.array_protocol import typestr
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.stream import Stream
from dlx._core.types import HOST, Device, contiguous
from dlx._support.module import set_module
from dlx.errors import ConversionError, DeviceError, LayoutError, StreamError

Ready = Any
"""cdata ``dlx_ready *``, a readiness event: the point on a stream at which memory is ready."""

_FIX = {
    lib.DLX_E_NO_DRIVER: "CUDA memory needs an NVIDIA driver; DLX_CUDA_DRIVER may name its libcuda.so.1.",
    lib.DLX_E_FORKED: "Use the 'spawn' start method of multiprocessing.",
    lib.DLX_E_CAPTURE: "Use one stream for both, or convert outside of the capture.",
}


def check(status: int) -> None:
    """Raise what a status of the CUDA core means."""
    if status == lib.DLX_OK:
        return
    if status == lib.DLX_E_MEMORY:
        raise MemoryError
    fix = _FIX.get(status, "")
    if status in (lib.DLX_E_NO_DRIVER, lib.DLX_E_FORKED, lib.DLX_E_DRIVER):
        raise DeviceError(ffi.string(lib.dlx_cuda_message()).decode(errors="replace"), fix=fix)
    text = ffi.string(lib.dlx_status_text(status)).decode()
    raise (StreamError if status == lib.DLX_E_CAPTURE else ConversionError)(text, fix=fix)


def is_cuda(device: Device | None) -> bool:
    """Return whether a device's memory is ordered by CUDA streams, which dlx knows how to order."""
    return device is not None and device[0] in (lib.kDLCUDA, lib.kDLCUDAManaged)


def is_loaded() -> bool:
    """Return whether the driver has been loaded and may be called. Loads nothing."""
    return bool(lib.dlx_cuda_loaded())


def require() -> None:
    """Load the driver."""
    check(lib.dlx_cuda_load())


@set_module("dlx")
def devices() -> dict[Device, str]:
    """Return the devices that dlx can move memory to, with their names: the host, and what the CUDA driver sees.

    The CUDA driver is initialised by this, where there is one.

    Examples
    --------
    >>> import dlx
    >>> dlx.devices()[dlx.Device("cpu")]
    'host memory'
    """
    found = {HOST: "host memory"}
    count = ffi.new("int32_t *")
    if lib.dlx_cuda_count(count) == lib.DLX_OK:
        name = ffi.new("char[]", 256)
        for number in range(count[0]):
            check(lib.dlx_cuda_name(number, name, 256))
            found[Device(lib.kDLCUDA, number)] = ffi.string(name).decode(errors="replace")
    return found


def where(address: int) -> Device:
    """Return where an address is: device, pinned or managed memory with the device's number, or plain host memory."""
    device = ffi.new("DLDevice *")
    check(lib.dlx_cuda_where(ffi.cast("void *", address), device))
    return Device(device.device_type, device.device_id)


@contextlib.contextmanager
def at(device: Device) -> Iterator[None]:
    """Make a CUDA device current on this thread for a while; other devices are left alone."""
    if not is_cuda(device):
        yield
        return
    check(lib.dlx_cuda_push(device.id))
    try:
        yield
    finally:
        lib.dlx_cuda_pop()


def order(before: Stream, after: Stream) -> None:
    """Make one stream wait for the work on another; nothing is called if they are one, or one is unordered."""
    if not before.is_unordered and not after.is_unordered:
        check(lib.dlx_cuda_order(before.device.id, before.handle, after.device.id, after.handle))


def ready(stream: Stream) -> Ready:
    """Return a readiness event for what is on a stream now."""
    address = native.ready_new(stream.device.id, stream.handle, stream.keep)
    return ffi.gc(ffi.cast("dlx_ready *", address), lib.dlx_ready_drop)


def wait(point: Ready, stream: Stream) -> None:
    """Make a stream wait for a readiness event."""
    if not stream.is_unordered:
        check(lib.dlx_ready_wait(point, stream.device.id, stream.handle))


def follow(point: Ready, stream: Stream) -> None:
    """Make a readiness event's stream wait for what is on another now; the host waits where that stream may be gone."""
    check(lib.dlx_ready_follow(point, stream.device.id, stream.handle))


def synchronize(what: Stream | Ready) -> None:
    """Wait on the host for a stream, or for a readiness event."""
    if isinstance(what, Stream):
        if not what.is_unordered:
            check(lib.dlx_cuda_synchronize(what.device.id, what.handle))
    else:
        check(lib.dlx_ready_synchronize(what))


def readiness_of(tensor: Tensor) -> Ready | None:
    """Return the readiness event of a `dlx.Tensor`, None where it is ready."""
    address = native.tensor_readiness(tensor)
    return ffi.gc(ffi.cast("dlx_ready *", address), lib.dlx_ready_drop) if address else None


def identity(point: Ready) -> int:
    """Return a number of an event; whoever waited for one need not wait for another with the same number."""
    own = int(lib.dlx_ready_own_device(point))
    return -1 - own if own >= 0 else int(ffi.cast("uintptr_t", point))


def when(tensor: Tensor, point: Ready) -> Tensor:
    """Return a further tensor over the same memory with another readiness event."""
    return native.tensor_when(tensor, int(ffi.cast("uintptr_t", point)))  # `point` lives until this has returned


def check_gaps(tensor: Tensor, keep_order: bool) -> None:
    """Raise a LayoutError if the driver cannot copy device memory to dense memory with few enough calls."""
    struct = ffi.cast("DLTensor *", native.tensor_address(tensor))
    if lib.dlx_cuda_is_scattered(struct, tensor.flags, keep_order):
        reason = ffi.string(lib.dlx_status_text(lib.DLX_E_SCATTERED)).decode()
        raise LayoutError(reason, fix="Make it contiguous in its own framework first.")


def is_capturing(stream: Stream) -> bool:
    """Return whether a stream captures a graph, so that the host cannot wait for it."""
    yes = ffi.new("int *")
    check(lib.dlx_cuda_capturing(stream.device.id, stream.handle, yes))
    return bool(yes[0])


def work_stream(device: Device) -> Stream:
    """Return dlx's own stream on a device."""
    handle = ffi.new("uint64_t *")
    check(lib.dlx_cuda_work_stream(device.id, handle))
    return Stream(device, handle[0])


def as_interface(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor's ``__cuda_array_interface__``, version 3, whose ``"stream"`` is the one to wait for."""
    dtype, device = tensor.dtype, tensor.device
    name = typestr(dtype)
    if not is_cuda(device) or name is None:
        raise AttributeError(f"dlx.Tensor has no __cuda_array_interface__ here: it is {dtype} on {device}")
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
"""What else releases memory that is no longer in use, and says how many are; see `release_pending`."""


@set_module("dlx")
def release_pending() -> int:
    """Release memory whose last use on a device is done; return how many arrays are still in use.

    A converted array that was used on another stream than its producer's is not released before the device is done with
    it, nor what `share` has given to processes that have it open. dlx checks for such memory in every call that
    involves CUDA memory; this function checks now. It waits for none of it; memory of dlx's own on a device without
    memory pools goes back here, for which the driver waits.

    Examples
    --------
    >>> import dlx
    >>> dlx.release_pending()
    0
    """
    shared = sum(release() for release in pending)  # first: what these give up is released by the next line
    return shared + int(lib.dlx_cuda_release_pending())
