"""`share` and `attach`: arrays, and trees of them, in memory of several processes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dlx._api.convert import convert
from dlx._core.public import public
from dlx._engine.request import request_of
from dlx._support.late import Late

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlx._sharing import sharing
    from dlx._sharing.handle import Handle
    from dlx.typing import DeviceLike, Readonly, Target
else:
    sharing = Late("dlx._sharing.sharing")  # needed by few programs


@public
def share(obj: Any = None, *, like: Any = None, detach: bool = False) -> Handle:
    """Put an array, or every array in a container, into memory that other processes can attach.

    The arrays are copied once, into one new piece of memory; those that lie in shared memory already (of
    ``dlx.empty(..., shared=True)``, or attached) stay where they are, and nothing is copied.

    Parameters
    ----------
    obj
        Whatever `convert` takes, in memory of the host or of CUDA devices. Beside arrays a container may hold plain
        data: None, numbers, text and bytes.
    like
        In the place of `obj`: what is shared is new, of zeros, and the same otherwise: shapes, dtypes, containers.
        Nothing is copied; attach it with ``writable=True`` to fill it. Broadcasts and slices with gaps get new strides;
        a transposed array keeps its order.
    detach
        As in `convert`: whether parameters that require gradients may be shared without them. It has no
        effect with `like`, of which no value is read.

    Returns
    -------
    Handle
        A dict of a few builtin values, which goes to another process by any way: pickle, JSON, a file. In this process
        it holds the memory until it is closed or released; it is a context manager.

    Raises
    ------
    DeviceError
        If an array is in memory that no other process can open, and cannot be copied to such memory.
    ConversionError
        If an array cannot be read, or something in the container is neither array nor plain data, or is nested too
        deep in a set or a key.
    LayoutError
        If packed elements below one byte are not contiguous.
    AdapterNotFoundError
        If it is no array.
    TypeError
        If neither `obj` nor `like` is given, or both are.
    MemoryError, OSError
        If there is not enough memory, or this process may open no further file.

    Notes
    -----
    Where several things cannot be shared, the error of one is raised, an array's before that of other things, and its
    notes have the others.

    Memory of a device is shared where it lies, if others can open it, and is copied into memory that they can open
    else. It is not freed before they have closed it, and must be shared by a process that lives as long.

    The memory has no name. It goes with the last process that holds it, however that one ends. Whoever attaches must do
    so while the process that shared it holds it: keep the handle until then.

    List, tuple, dict, OrderedDict, deque, set and frozenset come back as they are, and what stands in them twice does
    so again. Of other containers no class goes to the other process, since that would be code: subclasses of tuple
    become tuples, other sequences lists, mappings and records dicts. Arrays over the same memory share it again, but
    for views with gaps whose whole is not in the container: these are copied one by one.

    Examples
    --------
    >>> import dlx
    >>> with dlx.share({"a": b"abc", "n": [1, bytearray(2)]}) as handle:
    ...     sorted(handle)
    ['dlx', 'fd', 'inode', 'pid', 'size', 'token']
    """
    if (obj is None) == (like is None):
        raise TypeError("share takes either an array, or a container of arrays, or like=")
    if like is not None:  # no value is read, so that no graph is cut
        return sharing.share_tree(like, request_of("dlx", detach=True), is_copied=False)
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
) -> Any:
    """Return what another process has shared, over the same memory.

    Parameters
    ----------
    handle
        What `share` returned, or the plain dict that it became on its way.
    to, device
        As in `convert`.
    writable
        Whether this process may write to the memory; what it writes, all see. Otherwise it is mapped read-only, and a
        write kills the process.
    readonly
        As in `convert`, where not `writable`: what becomes of memory that is read-only for a target whose arrays are
        always writable. With ``"share"`` they share pages that are private to this call: what is written to them
        never reaches other processes, or what else was attached.
    fd
        A descriptor of the memory that was sent to this process (``handle.fileno()`` there), or all of them
        (``handle.filenos()``), where it may not look at the files of the other one. They stay open, and the caller's.

    Returns
    -------
    array or container
        As it was shared; see `share` for containers.

    Raises
    ------
    HandleError
        If the handle is forged, damaged or of another version, if the memory is gone, or if this process may not open
        it. Nothing is given out then.
    ReadOnlyError, DTypeError, ConversionError, AdapterNotFoundError, FrameworkNotInstalledError
        As `convert`, if the target cannot hold it.
    MemoryError, OSError
        If there is not enough memory, or this process may open no further file.

    Notes
    -----
    Every array holds the memory: it stays when the handle is closed and when the process that shared it is gone.
    Nothing in a handle, or in the memory, is ever run as code.

    Examples
    --------
    >>> import dlx
    >>> with dlx.share([dlx.from_dlpack(b"abc"), 1.5]) as handle:
    ...     dlx.attach(handle)
    [dlx.Tensor(uint8[3], cpu, read-only, [97, 98, 99]), 1.5]
    """
    attach_tree = sharing.attach_tree
    request_of(to, device=device, readonly=readonly)  # a wrong call maps nothing
    mode = "write" if writable else "private" if readonly == "share" else "read"
    if device is not None or readonly != "copy":
        return attach_tree(handle, mode, fd, functools.partial(convert, to=to, device=device, readonly=readonly))
    if isinstance(to, str) and to == "dlx":
        return attach_tree(handle, mode, fd)
    return attach_tree(handle, mode, fd, functools.partial(convert, to=to), to)
