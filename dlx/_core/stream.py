"""What a stream argument means: None, a handle, -1, or a framework's stream object, as one `Stream`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dlx._core.extension import lib
from dlx._core.types import Device, host_readable
from dlx._support.module import set_module
from dlx._support.reflect import class_name, safe_repr, type_name
from dlx.errors import StreamError

LEGACY: int = lib.DLX_STREAM_LEGACY
PER_THREAD: int = lib.DLX_STREAM_PER_THREAD
UNORDERED = -1
"""No stream: order nothing."""

_CUDA = (lib.kDLCUDA, lib.kDLCUDAManaged)


@set_module("dlx.adapter")
@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of one device.

    Attributes
    ----------
    device
        Where it is.
    handle
        CUDA: 1 (legacy), 2 (per-thread) or a handle; ROCm: 0 (default) or a handle; everywhere -1: order nothing.
    keep
        An object that keeps it alive, or None. Streams are the same where their devices and handles are.
    """

    device: Device
    handle: int
    keep: Any = field(default=None, compare=False, repr=False)

    @property
    def is_unordered(self) -> bool:
        """Whether nothing is to be ordered."""
        return self.handle == UNORDERED

    @property
    def wire(self) -> int:
        """The value for ``__dlpack__(stream=...)`` of a producer on this device."""
        return self.handle

    def __str__(self) -> str:
        if self.is_unordered:
            return "no stream"
        named = {LEGACY: "the legacy stream", PER_THREAD: "the per-thread stream"} if self.device.type in _CUDA else {}
        return f"{named.get(self.handle, f'stream {self.handle:#x}')} of {self.device}"


_kept_streams = threading.local()


@contextlib.contextmanager
def keep_streams(streams: Iterable[Stream]) -> Iterator[None]:
    """Remember, within this context, what keeps current streams alive: a framework's own object seldom owns one."""
    before = getattr(_kept_streams, "streams", {})
    _kept_streams.streams = before | {stream: stream for stream in streams}
    try:
        yield
    finally:
        _kept_streams.streams = before


def kept(stream: Stream) -> Stream:
    """Return the same stream with the object that keeps it alive, where `keep_streams` has one."""
    streams: dict[Stream, Stream] = getattr(_kept_streams, "streams", {})
    return streams.get(stream, stream)


def is_unordered(value: Any) -> bool:
    """Return whether a stream value is -1: order nothing."""
    return isinstance(value, int) and value == UNORDERED


def handle_of(value: Any) -> int | None:
    """Return the handle of a stream object of cuda.core, torch or cupy; None for other objects."""
    kind = type(value)
    if hasattr(kind, "__cuda_stream__"):
        said = value.__cuda_stream__
        said = said() if callable(said) else said
        try:
            version, handle = said
            if version == 0:
                return int(handle)
        except (TypeError, ValueError):
            pass
        raise StreamError(f"the __cuda_stream__ of {type_name(kind)} gives {safe_repr(said)}, not (0, handle)")
    for name in ("cuda_stream", "native_handle", "ptr"):
        try:
            handle = getattr(value, name, None)
        except MemoryError:
            raise
        except Exception:  # torch has the attribute where the device has no handles
            continue
        if isinstance(handle, int) and not isinstance(handle, bool):
            return handle
    return None


def meaning(value: Any, device: Device) -> Stream:
    """Return the stream that a user or framework means on a device; a raw 0 has two meanings on CUDA."""
    raw = isinstance(value, int) and not isinstance(value, bool)
    handle = value if raw else handle_of(value)
    if handle is None:
        raise StreamError(
            f"{class_name(type(value))} is no stream",
            fix="Give a handle (an int), an object with __cuda_stream__, .cuda_stream or .ptr, or -1 to order nothing.",
        )
    if handle == UNORDERED:
        return Stream(device, UNORDERED)
    if host_readable(device):
        raise StreamError(f"host memory has no stream, found stream={safe_repr(value)}", fix="Leave it out.")
    if device.type in _CUDA:
        return Stream(device, _on_cuda(handle, raw), _keeping(value, device))
    if device.type == lib.kDLROCM:
        return Stream(device, _on_rocm(handle, raw), _keeping(value, device))
    raise StreamError(f"streams of {device} are unknown to dlx, found stream={safe_repr(value)}", fix="Leave it out.")


def _on_cuda(handle: int, raw: bool) -> int:
    if handle == 0 and raw:
        raise StreamError("stream 0 is ambiguous on CUDA", fix="Say 1 for the legacy stream, 2 for the per-thread one.")
    if not 0 <= handle < 1 << 64:
        raise StreamError(f"there is no stream {handle}", fix="Give a handle, or -1 to order nothing.")
    return handle or LEGACY


def _on_rocm(handle: int, raw: bool) -> int:
    if handle in (LEGACY, PER_THREAD) and raw:
        raise StreamError(f"stream {handle} does not exist on ROCm", fix="Say 0 for the default stream.")
    if not 0 <= handle < 1 << 64:
        raise StreamError(f"there is no stream {handle}", fix="Give a handle, or -1 to order nothing.")
    return handle


def _keeping(value: Any, device: Device) -> Any:
    """Return what keeps the stream alive: the stream object, or the raw handle as given."""
    for name in ("device_index", "device_id"):
        number = getattr(value, name, None)
        if isinstance(number, int) and number >= 0 and number != device.id:
            raise StreamError(
                f"the stream is on device {number}, the memory is on {device}",
                fix=f"Give a stream of {device}, or device= to move the array.",
            )
    return value
