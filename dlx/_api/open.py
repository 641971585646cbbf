"""`open`: a saved file as a lazy read-only mapping."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlx._api import convert as convert  # the Python function of FAST_PATH, which views call
from dlx._core.public import public
from dlx._engine.request import request_of
from dlx._views.factory import lazy_view, repeat_view

if TYPE_CHECKING:
    from dlx._files.mapping import FileView
    from dlx.typing import DeviceLike, Readonly, Target


@public
def open(
    path: str | os.PathLike[str],
    to: Target = "dlx",
    *,
    device: DeviceLike | None = None,
    readonly: Readonly = "copy",
    detach: bool = False,
) -> FileView[Any]:
    r"""Map a saved file into memory: a lazy read-only mapping from names to arrays.

    The header is read and checked against the file's size; an array is converted when it is asked for, as by
    ``dlx.convert(..., lazy=True)``, over the file's own memory wherever it lies there as it is. No code in a file is
    ever run.

    Parameters
    ----------
    path
        A file: .safetensors, .npy, .npz, .gguf, and by another library, where it is installed, .pt (torch), Arrow IPC
        (pyarrow) and HDF5 (h5py). Or the folder of a checkpoint in several .safetensors files, or its index.
    to
        Target, as in `convert`.
    device
        Where the arrays shall be, as in `convert`.
    readonly
        As in `convert`: the file's memory is read-only. With ``"share"`` a target whose arrays are always writable
        shares pages that are private to this process: what is written to them never reaches the file.
    detach
        As in `convert`, for parameters of a .pt file.

    Returns
    -------
    FileView
        A mapping, and a context manager that closes the file. The key is the array's name in the file; the only array
        of a .npy file has the empty name. ``metadata`` holds what the file says about itself. Every name of the file is
        a key: a member that dlx does not read raises `DTypeError` when it is asked for.

    Raises
    ------
    FileError
        If the file is of another kind, damaged or cut off, describes what cannot be, or is one part of several. Then
        nothing is mapped.
    FrameworkNotInstalledError
        If the target, or the library that reads the file, is not installed.
    OSError
        If the file cannot be opened.
    AdapterNotFoundError, DeviceError, TypeError, ValueError
        If the call itself is wrong.

    Notes
    -----
    An array that was taken keeps its memory when the file is closed; reading another one raises `FileError`. A file
    that another program cuts off while it is mapped ends the process (SIGBUS) where the missing part is read.

    Examples
    --------
    >>> import dlx, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "x.npy"
    >>> header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (3,)}"
    >>> _ = file.write_bytes(b"\x93NUMPY\x01\x00" + bytes([len(header), 0]) + header + b"abc")
    >>> with dlx.open(file) as arrays:
    ...     arrays[""]
    dlx.Tensor(uint8[3], cpu, read-only, [97, 98, 99])
    """
    from dlx._files.mapping import FileView, mapped  # the readers of files, which few programs need

    request = request_of(to, device=device, readonly=readonly, detach=detach)
    archive = mapped(Path(path), private=readonly == "share")
    named = to if device is None and readonly == "copy" and not detach else None
    view: FileView[Any] | None = None if named is None else repeat_view(archive, named, FileView)
    if view is not None:  # a target that was asked for before
        return view
    view = lazy_view(archive, request, named, strict=False, collect=False, view=FileView)
    assert view is not None
    return view
