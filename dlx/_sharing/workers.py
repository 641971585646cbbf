"""Pickling between the processes of multiprocessing and joblib: shared memory travels as its descriptor.

So it outlives the process that created it. Other pickles are unchanged, since they may be read at any time.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from dlx._core import native
from dlx._core.native import Tensor
from dlx._core.types import READ_ONLY
from dlx._engine.seam import FAST_PATH
from dlx._registry import lookup
from dlx._sharing.handle import Handle, create_handle
from dlx._sharing.segment import Segment, check_descriptor_limit, locate, open_segment
from dlx.errors import DlxError, HandleError

__all__ = ["register_types"]

Reduced = tuple[Any, ...]
_MODULES = ("multiprocessing.reduction", "joblib.externals.loky.backend.reduction", "loky.backend.reduction")
_registered: set[tuple[str, type]] = set()
_waiting: set[int] = set()  # this process, if it is a worker; a fork copies the numbers of its parents
MAX_WAIT, MAX_DAEMON_WAIT = 5.0, 0.5
"""Seconds that a worker waits at its end until its descriptors are received. A daemon's parent may want no more."""
_KEEP = "Keep the worker until the other process has received its results."


def register_types(arrays: Iterable[type] = ()) -> None:
    """Let the loaded picklers of workers send handles, tensors, and arrays of these types, if they are shared."""
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is None:
            continue
        for kind in (Handle, Segment, Tensor, *arrays):
            if (name, kind) in _registered:
                continue
            reduce: Any = {Handle: _reduce_handle, Segment: _reduce_segment}.get(kind)
            if reduce is None:
                make = getattr(module, "get_loky_pickler", lambda module=module: module.ForkingPickler)()
                reduce = functools.partial(_reduce_array, make(io.BytesIO()).dispatch_table.get(kind))
            module.register(kind, reduce)
            _registered.add((name, kind))
    if _registered and os.getpid() not in _waiting:
        _waiting.add(os.getpid())
        from multiprocessing import parent_process, util

        if parent_process() is not None:
            util.Finalize(None, _keep_socket, exitpriority=1)  # multiprocessing removes it with priority 0
            util.Finalize(None, _wait_for_receivers, exitpriority=-50)  # queues send the rest with priority -5


def _reduce_handle(handle: Handle[Any]) -> Reduced:
    if not handle._segments or handle._export is not None:  # device memory is freed with its process
        return handle.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return create_handle, (handle._segments[0], handle._segments[1:])  # of the process that receives it


def _reduce_array(otherwise: Callable[[Any], Reduced] | None, array: Any) -> Reduced:
    """Reduce an array to its segment and its place there; call `otherwise` if it is not in shared memory."""
    try:
        tensor = FAST_PATH(array, "dlx", copy=False)
    except DlxError:
        tensor = None
    if tensor is not None and tensor.is_host:
        extents = native.tensors_extents([tensor])
        (place,) = locate(extents)
        if place is not None:
            segment, offset = place
            offset += tensor.data_ptr - extents[0][0]
            numbers = bytes(native.tensors_pack([tensor], [offset], [None]))
            if tensor is array:
                return _restore_tensor, (segment, numbers, tensor.readonly)
            adapter = lookup.kind(type(array)).adapter
            if adapter is not None:
                return FAST_PATH, (tensor, adapter.name)
    return otherwise(array) if otherwise is not None else array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _restore_tensor(segment: Segment, numbers: bytes, readonly: bool) -> Tensor:
    """Return a tensor over a received segment."""
    mapping = segment.mapping("read" if readonly else "write")
    flags = READ_ONLY if readonly else 0
    (tensor,) = native.tensors_unpack(mapping.address, segment.size, memoryview(numbers), flags, mapping)
    return tensor


def _reduce_segment(segment: Segment) -> Reduced:
    """Reduce a segment to its descriptor. A pickle contains it once, with any number of arrays in it."""
    from multiprocessing.reduction import DupFd

    segment.check()
    try:
        sent = DupFd(segment.fd)
    except OSError as error:
        check_descriptor_limit(error)
        raise
    return _restore_segment, (sent, segment.token, segment.size)


def _sharer() -> Any:
    """Return multiprocessing's object that sends descriptors; it has no public name."""
    from multiprocessing import resource_sharer

    return getattr(resource_sharer, "_resource_sharer", None)


def _keep_socket() -> None:
    """Let other processes connect until `_wait_for_receivers`; the socket is removed with its directory."""
    unlink = getattr(getattr(getattr(_sharer(), "_listener", None), "_listener", None), "_unlink", None)
    if unlink is not None:
        unlink.cancel()


def _wait_for_receivers() -> None:
    """Let other processes receive the descriptors that this process has sent."""
    from multiprocessing import current_process

    longest = MAX_DAEMON_WAIT if current_process().daemon else MAX_WAIT
    end = time.monotonic() + longest
    while getattr(_sharer(), "_cache", None) and time.monotonic() < end:
        time.sleep(0.002)
    with contextlib.suppress(OSError, AttributeError):
        _sharer().stop(longest)  # waits for the last message


def _restore_segment(sent: Any, token: str, size: int) -> Segment:
    """Receive the descriptor of a segment from the process that sent it."""
    register_types()
    try:
        fd = sent.detach()
    except (OSError, EOFError, RuntimeError) as error:
        # The kernel drops descriptors that this process cannot open.
        cause = OSError(errno.EMFILE, "") if "ancdata" in str(error) else error
        if isinstance(cause, OSError):
            check_descriptor_limit(cause)
        raise HandleError(f"the process that sent it has ended: {error}", fix=_KEEP) from error
    try:
        return open_segment(os.getpid(), fd, token, 0, size, fd)
    finally:
        os.close(fd)
