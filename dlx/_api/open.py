"""`open`: map a saved file as a lazy read-only mapping."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any

from dlx._api import convert as convert  # binds the Python function of FAST_PATH for views
from dlx._core.public import public
from dlx._engine.request import request_of
from dlx._views.factory import lazy_view, repeat_view

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer

    from dlx._files.mapping import FileView
    from dlx._files.selection import Names
    from dlx.typing import DeviceLike, Readonly, Target


@public
def open(
    path: str | os.PathLike[Any] | Buffer | IO[bytes],
    to: Target = "dlx",
    *,
    only: Names = None,
    skip: Names = None,
    mmap: bool = True,
    raw: str | Mapping[str, str] | None = None,
    device: DeviceLike | None = None,
    readonly: Readonly = "copy",
    detach: bool = False,
    dtype: Any = None,
) -> FileView[Any]:
    r"""Map a saved file into memory and return a lazy read-only mapping from names to arrays.

    The header is read and checked against the file's size. Each array is converted at its first access, as by
    ``dlx.convert(..., lazy=True)``, and shares the file's memory if its data is stored unchanged there. Code in files
    is never run.

    Parameters
    ----------
    path
        A file: .safetensors, .npy, .npz, .gguf, and, if the library is installed, .pt (torch), Arrow IPC (pyarrow) and
        HDF5 (h5py). Or the folder or the index of a checkpoint in several .safetensors or torch files, the folder of a
        torch.distributed checkpoint, or a Zarr store (zarr). Or the contents of a file: bytes, or another object with a
        buffer, or a binary file object, which is read to its end. ``bytes`` without the signature of a format are a
        path.
    to
        Target, as in `convert`.
    only, skip
        The members to open, or to leave out: a name, a pattern such as ``"encoder.*"``, several of them, or a function
        of a name that returns a bool. In the nested dicts of a .pt file, and for fields of records, names are paths
        with dots, ``"table.field"``; a dict's or record's name selects all in it. Members that are
        left out are neither read nor listed.
    mmap
        False: read the members into memory now, with large reads in several threads, for network and fused file
        systems. The arrays do not depend on the file, and are writable, except for columns of Arrow files. Arrays that
        the file stores unchanged share one block of memory.
    raw
        The dtype of members that their file stores as raw bytes or as integers, such as bfloat16 in .npz and HDF5:
        ``"bfloat16"`` for all void members, or a mapping from names or patterns to dtypes of the same size. Fields of
        records are named with dots, ``"table.field"``. Values are not converted.
    device
        Device of the arrays, as in `convert`.
    readonly
        As in `convert`: the file's memory is read-only. With ``"share"``, a target whose arrays are always writable
        shares pages that are private to this process, so writes never reach the file.
    detach
        As in `convert`, for parameters of a .pt file.
    dtype
        As in `convert`. An array that changes is copied when it is read.

    Returns
    -------
    FileView
        A mapping, and a context manager that closes the file. The keys are the arrays' names in the file; the array of
        a .npy file has the empty name. ``metadata`` is the metadata of the file. Members that dlx cannot read are keys,
        too; access to them raises a `ConversionError`.

    Raises
    ------
    FileError
        If the file has an unsupported format, is damaged or truncated, has an impossible header, or is one part of
        several, or if it has no member that `only` or `skip` names. Then nothing is mapped.
    FrameworkNotInstalledError
        If the target, or the library that reads the file, is not installed.
    OSError
        If the file cannot be opened.
    AdapterNotFoundError, DeviceError, TypeError, ValueError
        If the call is invalid.

    Notes
    -----
    Arrays keep their memory after the file is closed; access to other arrays then raises `FileError`. If another
    program truncates the mapped file, reading the missing part kills the process (SIGBUS).

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
    from dlx._files.mapping import FileView, map_file  # most programs open no file

    request = request_of(to, device=device, readonly=readonly, detach=detach, dtype=dtype)
    archive = map_file(path, private=readonly == "share", only=only, skip=skip, mapped=mmap, raw=raw)
    named = to if device is dtype is None and readonly == "copy" and not detach else None
    view: FileView[Any] | None = None if named is None else repeat_view(archive, named, FileView)
    if view is not None:  # a known target
        return view
    view = lazy_view(archive, request, named, strict=False, view=FileView)
    assert view is not None
    return view
