"""Working on somebody else's stream: a framework's current stream is set to the caller's, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dlx import cuda
from dlx.abi import Device
from dlx.adapter import Adapter
from dlx.crossing import Crossing, physical
from dlx.stream import Stream

__all__ = ["work_streams", "working"]


def work_streams(arrays: Iterable[tuple[Adapter, Any]], stream: Any = None) -> dict[Device, Stream]:
    """Return the stream that callers work on, for each CUDA device that their arrays are on; nothing is exported.

    Parameters
    ----------
    arrays
        Adapters and arrays of theirs, all of a call: the first one with a current stream decides for its device.
    stream
        What the user said instead; for every device.

    Returns
    -------
    dict
        Empty where no array is on a device, or nobody has a current stream there.

    Raises
    ------
    StreamError
        If the user named a stream that is none.
    """
    found: dict[Device, Stream] = {}
    crossings: dict[int, Crossing] = {}
    for source, obj in arrays:
        info = source.info(obj)
        if info is None or info.device is None or not cuda.is_cuda(info.device):
            continue
        device = physical(info.device)
        if device not in found:
            asked = crossings.setdefault(id(source), Crossing(source, stream)).consumer(device)
            if asked is not None and not asked.is_unordered:
                found[device] = asked
    return found


@contextlib.contextmanager
def working(adapter: Adapter, streams: Mapping[Device, Stream]) -> Iterator[None]:
    """Let a framework work on streams, one for each device; what was current comes back when the block is left.

    A framework whose current stream cannot be set is left alone: its arrays are ordered in and out as any others.

    Parameters
    ----------
    adapter
        The framework's.
    streams
        Device -> stream, as `work_streams` gives them.
    """
    with contextlib.ExitStack() as stack:
        for stream in streams.values():
            context = adapter.on_stream(stream)
            if context is not None:
                stack.enter_context(context)
        yield
