"""`share`, `attach` and `ring`: arrays, and containers of arrays, in shared memory of several processes."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from dlx._api.convert import convert
from dlx._core.public import public
from dlx._engine.request import request_of
from dlx._support.late import Late
from dlx._support.system import check_sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlx._sharing import sharing
    from dlx._sharing.handle import Handle
    from dlx._sharing.ring import Ring
    from dlx.typing import DeviceLike, Readonly, Target
else:
    sharing = Late("dlx._sharing.sharing")  # most programs share nothing


@public
def share(obj: Any = None, *, like: Any = None, detach: bool = False) -> Handle[Any]:
    """Put an array, or every array in a container, into memory that other processes can attach.

    The arrays are copied once, into one new block of memory. Arrays in shared memory are not copied (attached ones, and
    those of ``dlx.empty(..., shared=True)``).

    Parameters
    ----------
    obj
        An array or a container as in `convert`, in host or CUDA memory. Besides arrays, a container may hold plain
        data: None, numbers, text and bytes.
    like
        Instead of `obj`: share new arrays of zeros with the same shapes, dtypes and containers. Nothing is copied;
        attach the handle with ``writable=True`` to fill them. Broadcasts and slices with gaps get new strides; a
        transposed array keeps its order.
    detach
        As in `convert`: whether parameters that require gradients may be shared without them. It has no effect with
        `like`, whose values are not read.

    Returns
    -------
    Handle
        A dict of a few builtin values. Send it to the other process by pickle, JSON or a file. In this process it
        keeps the memory until it is closed or released; it is a context manager.

    Raises
    ------
    DeviceError
        If other processes cannot open the memory of an array, and dlx cannot copy it to shared memory.
    ConversionError
        If an array cannot be read, an object in the container is neither an array nor plain data, or an object is
        nested too deep in a set or a key.
    LayoutError
        If packed elements below one byte are not contiguous.
    AdapterNotFoundError
        If `obj` is not an array.
    TypeError
        If the call has neither `obj` nor `like`, or both.
    MemoryError, OSError
        If there is not enough memory, or the process has too many open files.

    Notes
    -----
    If several objects cannot be shared, one error is raised, preferably of an array; its notes have the others.

    Device memory is shared without a copy if other processes can open it; otherwise it is copied to memory that they
    can open. It is not freed before they close it, so the sharing process must live at least as long.

    The memory has no name. It is freed with its last process, even if that is killed. Other processes can attach it
    only while the sharing process keeps it, so keep the handle until then.

    List, tuple, dict, OrderedDict, deque, set and frozenset keep their types, and repeated objects stay the same
    object. Classes of other containers are not sent, since they would be code: subclasses of tuple become tuples, other
    sequences lists, mappings and records dicts. Arrays over the same memory share it again, except for views with gaps
    whose base is not in the container; each of these is copied.

    Examples
    --------
    >>> import dlx
    >>> with dlx.share({"a": b"abc", "n": [1, bytearray(2)]}) as handle:
    ...     sorted(handle)
    ['dlx', 'fd', 'inode', 'pid', 'size', 'token']
    """
    if (obj is None) == (like is None):
        raise TypeError("share takes either an array, or a container of arrays, or like=. Pass one of them.")
    check_sharing("the arrays")
    if like is not None:  # no value is read, so no graph is lost
        return sharing.share_tree(like, request_of("dlx", detach=True), with_values=False)
    return sharing.share_tree(obj, request_of("dlx", detach=detach))


@public
def attach(
    handle: dict[str, Any],
    to: Target = "dlx",
    *,
    writable: bool = False,
    device: DeviceLike | None = None,
    readonly: Readonly = "copy",
    fd: int | Sequence[int] | None = None,
    lazy: bool = False,
) -> Any:
    """Return the arrays of another process over the same memory.

    Parameters
    ----------
    handle
        The handle that `share` returned, or the dict received from the other process.
    to, device
        As in `convert`.
    writable
        Whether this process may write to the memory; all processes see its writes. Otherwise the memory is mapped
        read-only, and a write kills the process.
    readonly
        As in `convert`, without `writable`: how a target whose arrays are always writable gets read-only memory. With
        ``"share"``, its arrays share pages that are private to this call: writes never reach other processes or other
        attached arrays.
    fd
        A descriptor of the memory that the other process sent (``handle.fileno()`` there), or all descriptors
        (``handle.filenos()``), if this process may not open the other one's files. They stay open and belong to the
        caller.
    lazy
        Whether lists of 256 or more texts, bytes or records (dicts, lists and tuples of plain data) are views, which
        create an element when it is read. Otherwise they are lists.

    Returns
    -------
    array or container
        As passed to `share`; see there for containers. A `RingReader` for the handle of a ring.

    Raises
    ------
    HandleError
        If the handle is forged, damaged or of another version, if the memory no longer exists, or if this process may
        not open it. Then no array is returned.
    ReadOnlyError, DTypeError, ConversionError, AdapterNotFoundError, FrameworkNotInstalledError
        As `convert`, if the target does not support an array.
    MemoryError, OSError
        If there is not enough memory, or the process has too many open files.

    Notes
    -----
    Every array keeps the memory alive, even after the handle is closed or the sharing process ends. Nothing in a handle
    or in the memory is run as code.

    Examples
    --------
    >>> import dlx
    >>> with dlx.share([dlx.from_dlpack(b"abc"), 1.5]) as handle:
    ...     dlx.attach(handle)
    [dlx.Tensor(uint8[3], cpu, read-only, [97, 98, 99]), 1.5]
    """
    check_sharing("the handle")
    attach_tree = sharing.attach_tree
    request_of(to, device=device, readonly=readonly)  # before anything is mapped
    mode = "write" if writable else "private" if readonly == "share" else "read"
    if device is not None or readonly != "copy":
        whole = functools.partial(convert, to=to, device=device, readonly=readonly)
        return attach_tree(handle, mode, fd, whole, lazy=lazy)
    if isinstance(to, str) and to == "dlx":
        return attach_tree(handle, mode, fd, lazy=lazy)
    return attach_tree(handle, mode, fd, functools.partial(convert, to=to), to, lazy)


@public
def ring(slots: int, like: Any, *, to: Target = "dlx", overwrite: bool = False, readers: int = 1) -> Ring:
    """Create a ring: a fixed number of frames in shared memory, from this process to any number of readers.

    A frame is a tree of arrays. Nothing is pickled, and no memory is allocated per frame. Send ``ring.handle`` to the
    readers; there, ``dlx.attach(handle, to=...)`` returns an iterator over the frames. Every reader gets all frames
    that are published after it has joined.

    Parameters
    ----------
    slots
        Number of frames, 2 to 1,024.
    like
        An array or a container of arrays with the shapes and dtypes of a frame. Its values are not read; plain data in
        it is the same in all frames.
    to
        Framework of the arrays that ``ring.write()`` returns. `put` takes arrays of any framework.
    overwrite
        What happens when a reader is slow. False: the producer waits for it. True: the producer replaces the oldest
        frame that no reader currently reads; with at least two slots more than readers it never waits.
    readers
        The first frame waits until so many readers have joined; 0 does not wait.

    Returns
    -------
    Ring
        Its method `put` copies a frame, and its context manager `write` returns the arrays of the next frame to fill.

    Raises
    ------
    DeviceError
        If the system is not Linux, or an array is not in host memory.
    ConversionError, LayoutError, ReadOnlyError, DTypeError
        As `share`, and as `convert` with ``copy=False`` for the framework `to`; or if arrays of `like` share memory.
    ValueError, MemoryError, OSError
        If a number is out of range, there is not enough memory, or the process has too many open files.

    Notes
    -----
    If a process is killed, at most the frame that it was writing or reading is lost: the others remove a dead reader,
    and get a HandleError for a dead producer, within about 0.1 s.

    Examples
    --------
    >>> import dlx
    >>> with dlx.ring(4, like=b"...") as ring:
    ...     reader = dlx.attach(ring.handle)
    ...     ring.put(b"abc")
    ...     reader.read()
    dlx.Tensor(uint8[3], cpu, read-only, [97, 98, 99])
    """
    check_sharing("the arrays")
    slots, readers = operator.index(slots), operator.index(readers)
    if not 2 <= slots <= 1024 or not 0 <= readers < 1 << 30:
        raise ValueError(f"ring takes 2 to 1,024 slots and 0 or more readers; found {slots} and {readers}")
    request_of(to)
    options = (slots, int(bool(overwrite)), readers)
    return sharing.create_ring(options, like, request_of("dlx", detach=True), functools.partial(convert, to=to))
