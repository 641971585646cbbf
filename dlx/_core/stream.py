"""`Stream`, and its construction from a handle, -1, or a framework's stream object."""

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
"""The stream value for "no synchronization"."""

_CUDA = (lib.kDLCUDA, lib.kDLCUDAManaged)


@set_module("dlx.adapter")
@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of one device.

    Attributes
    ----------
    device
        The stream's device.
    handle
        CUDA: 1 (legacy), 2 (per-thread) or a handle; ROCm: 0 (default) or a handle; -1: no synchronization.
    keep
        An object that keeps the stream alive, or None. It is ignored when streams are compared.
    """

    device: Device
    handle: int
    keep: Any = field(default=None, compare=False, repr=False)

    @property
    def is_unordered(self) -> bool:
        """Whether the handle is -1: no synchronization."""
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
    """Remember the objects that keep current streams alive; frameworks' stream objects often own no stream."""
    before = getattr(_kept_streams, "streams", {})
    _kept_streams.streams = before | {stream: stream for stream in streams}
    try:
        yield
    finally:
        _kept_streams.streams = before


def with_keeper(stream: Stream) -> Stream:
    """Return the stream with its object from `keep_streams`, if there is one."""
    streams: dict[Stream, Stream] = getattr(_kept_streams, "streams", {})
    return streams.get(stream, stream)


def is_unordered(value: Any) -> bool:
    """Return whether a stream value is -1: no synchronization."""
    return isinstance(value, int) and value == UNORDERED


def handle_of(value: Any) -> int | None:
    """Return the handle of a stream object of cuda.core, torch or cupy; None for other objects."""
    kind = type(value)
    if hasattr(kind, "__cuda_stream__"):
        answer = value.__cuda_stream__
        answer = answer() if callable(answer) else answer
        try:
            version, handle = answer
            if version == 0:
                return int(handle)
        except (TypeError, ValueError):
            pass
        raise StreamError(f"the __cuda_stream__ of {type_name(kind)} returned {safe_repr(answer)}, not (0, handle)")
    for name in ("cuda_stream", "native_handle", "ptr"):
        try:
            handle = getattr(value, name, None)
        except MemoryError:
            raise
        except Exception:  # torch: the device has no handles
            continue
        if isinstance(handle, int) and not isinstance(handle, bool):
            return handle
    return None


def parse_stream(value: Any, device: Device) -> Stream:
    """Return the `Stream` for a stream value on a device; a raw 0 is ambiguous on CUDA."""
    raw = isinstance(value, int) and not isinstance(value, bool)
    handle = value if raw else handle_of(value)
    if handle is None:
        raise StreamError(
            f"{class_name(type(value))} is not a stream",
            fix="Pass a handle, an object with __cuda_stream__, .cuda_stream or .ptr, or -1 for no synchronization.",
        )
    if handle == UNORDERED:
        return Stream(device, UNORDERED)
    if host_readable(device):
        raise StreamError(f"host memory has no stream, found stream={safe_repr(value)}", fix="Leave it out.")
    if device.type in _CUDA:
        return Stream(device, _on_cuda(handle, raw), _check_device(value, device))
    if device.type == lib.kDLROCM:
        return Stream(device, _on_rocm(handle, raw), _check_device(value, device))
    raise StreamError(f"dlx does not support streams of {device}, found stream={safe_repr(value)}", fix="Leave it out.")


def _on_cuda(handle: int, raw: bool) -> int:
    if handle == 0 and raw:
        raise StreamError(
            "stream 0 is ambiguous on CUDA", fix="Pass 1 for the legacy stream, 2 for the per-thread one."
        )
    if not 0 <= handle < 1 << 64:
        raise StreamError(f"stream {handle} is invalid", fix="Pass a handle, or -1 for no synchronization.")
    return handle or LEGACY


def _on_rocm(handle: int, raw: bool) -> int:
    if handle in (LEGACY, PER_THREAD) and raw:
        raise StreamError(f"stream {handle} does not exist on ROCm", fix="Pass 0 for the default stream.")
    if not 0 <= handle < 1 << 64:
        raise StreamError(f"stream {handle} is invalid", fix="Pass a handle, or -1 for no synchronization.")
    return handle


def _check_device(value: Any, device: Device) -> Any:
    """Return the stream object, which keeps the stream alive; raise if it is on another device."""
    for name in ("device_index", "device_id"):
        number = getattr(value, name, None)
        if isinstance(number, int) and number >= 0 and number != device.id:
            raise StreamError(
                f"the stream is on device {number}, the memory is on {device}",
                fix=f"Pass a stream of {device}, or device= to move the array.",
            )
    return value
