"""Functions for C, cffi and ctypes authors: `from_dlpack`, `empty`, `to_capsule`, `borrow`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from dlx._api.convert import convert
from dlx._api.describe import describe
from dlx._core import cuda, native
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.public import public
from dlx._core.stream import Stream
from dlx._core.types import Device, DType
from dlx._engine.batch import Batch
from dlx._engine.executor import mark_written
from dlx._engine.fast_path import consumer_failed, learn
from dlx._engine.request import request_of
from dlx._engine.seam import FAST_PATH
from dlx._engine.traced import leave_out
from dlx._protocols import pointer
from dlx._protocols.pointer import dltensor, extents_of
from dlx._registry import lookup
from dlx._support.module import set_module
from dlx._support.system import check_sharing
from dlx._support.tracebacks import name_action, shorten
from dlx.errors import CopyRequiredError, DlxError, ReadOnlyError


def from_dlpack(obj: Any) -> Tensor:
    """Return any array as a `dlx.Tensor`, like ``dlx.convert(obj, to="dlx")`` without options.

    Parameters
    ----------
    obj
        An array as in `dlx.convert`: of a framework, an object with ``__dlpack__``, a buffer, or a capsule.

    Raises
    ------
    ConversionError
        If `obj` cannot be converted; the class of the error gives the reason.
    AdapterNotFoundError
        If `obj` is not an array.

    Examples
    --------
    >>> import dlx
    >>> dlx.from_dlpack(b"abc").readonly
    True
    """
    return _tensor(obj)


if not TYPE_CHECKING:
    fast = native.FastPathFunction(from_dlpack, learn, consumer_failed, to="dlx")
    from_dlpack = public(from_dlpack, fast)

exchange_api: Final = FAST_PATH._exchange_api("dlx", from_dlpack)
"""DLPack's C exchange table for arrays of all frameworks, in a capsule; see its reference page."""


@public
def empty(shape: int | Sequence[int], dtype: Any, device: Any = "cpu", *, shared: bool = False) -> Tensor:
    """Return a writable, row-major tensor over new, uninitialized memory.

    Parameters
    ----------
    shape
        Extents, ``(ndim,)``; an int means one dimension.
    dtype
        A name such as ``"float32"``, a triple ``(code, bits, lanes)``, or a `dlx.DType`.
    device
        ``"cpu"``, or a CUDA device such as ``"cuda:1"``.
    shared
        Whether other processes can attach the memory; then `dlx.share` does not copy it. Shared host memory is filled
        with zeros and takes one file descriptor of this process (two before Python 3.13).

    Returns
    -------
    Tensor
        Its memory is aligned to 256 bytes; an empty tensor has no memory. Device memory comes from the driver's
        stream-ordered allocator if the device has one; consumers wait for it automatically.

    Raises
    ------
    TypeError, ValueError
        If the shape is invalid.
    DTypeError, DeviceError, LayoutError
        If the dtype or device does not exist, the size exceeds 63 bits, or the driver cannot allocate it.
    MemoryError
        If there is not enough memory.
    OSError
        If `shared`, and the process has too many open files.

    Notes
    -----
    ``dlpack.h`` recommends an alignment of 256 bytes to producers, but consumers must not rely on it.

    Examples
    --------
    >>> import dlx
    >>> dlx.empty((2, 3), "bfloat16").nbytes
    12
    """
    if not shared:
        return pointer.empty(shape, dtype, device)
    check_sharing("shared memory")
    from dlx._sharing.sharing import shared_empty  # most programs do not need it

    return shared_empty(extents_of(shape), DType(dtype), Device(device))


@public
def to_capsule(obj: Any, *, max_version: tuple[int, int] | None = None) -> Any:
    """Return any array as a raw DLPack capsule, for a consumer that requires one.

    Parameters
    ----------
    obj
        An array as in `dlx.convert`.
    max_version
        Highest DLPack version that the consumer supports. None or major 0: a legacy capsule, named ``"dltensor"``;
        ``(1, 0)`` and above: a versioned capsule, named ``"dltensor_versioned"``.

    Returns
    -------
    PyCapsule
        It can be consumed once. A capsule that is never consumed releases the memory when it is destroyed.

    Raises
    ------
    ReadOnlyError
        If the memory is read-only and the capsule is a legacy one, which cannot express that.
    ConversionError, AdapterNotFoundError
        As `dlx.convert`.
    TypeError
        If `max_version` is not a pair.

    Notes
    -----
    Names and versions follow the Python specification of DLPack; `max_version` is as in ``__dlpack__`` of the array API
    standard.

    Examples
    --------
    >>> import dlx
    >>> "dltensor_versioned" in repr(dlx.to_capsule(b"abc", max_version=(1, 0)))
    True
    """
    if max_version is not None and not (isinstance(max_version, tuple) and len(max_version) == 2):
        raise TypeError(f"max_version must be None or a tuple (major, minor), found {max_version!r}")
    version = (0, 0) if max_version is None else (index(max_version[0]), index(max_version[1]))
    options: dict[str, Any] = {}
    if version[0] >= 1:
        options["max_version"] = version
        tensor = _tensor(obj)
    else:
        peeked = _peek(obj)
        if peeked is not None and not peeked.readonly:
            peeked.__dlpack__()  # raise what a legacy capsule cannot express before consuming a capsule
        reason = "it is read-only, which a legacy capsule cannot express"
        tensor = _writable(obj, "capsule", reason, "Pass max_version=(1, 0), or a copy.")
    try:
        return tensor.__dlpack__(**options)
    except BaseException as error:
        native.capsule_restore(obj, tensor)  # if it is a capsule
        if isinstance(error, DlxError):
            error.complete(source=str(describe(tensor)), target="capsule")
        raise


_EMPTY = ffi.new("DLTensor *")  # created once: `__exit__` must not allocate
_EMPTY_STRUCT = _EMPTY[0]


@set_module("dlx")
class borrow:  # noqa: N801
    """Borrow an array as a ``DLTensor *`` for calls of C code that keep no pointer; a context manager.

    Parameters
    ----------
    obj
        An array as in `dlx.convert`. It is converted on entry and kept alive until the exit.
    readonly
        Promise that the C code only reads: read-only memory is borrowed, too, and arrays that need a copy (pending conj
        and neg bits) are copied. Otherwise memory is always shared, and on exit the array's framework is notified of a
        write: torch then refuses gradients that need the old values.
    stream
        The stream of the C code, as in `dlx.convert`. None: the legacy stream of a CUDA device. Not for host memory.

    Returns
    -------
    cdata
        ``DLTensor *`` of `dlx.ffi`, with a separate shape and strides. Do not use it after the block: the cdata is
        emptied (NULL, no dimension), and pointers that C kept dangle.

    Raises
    ------
    ReadOnlyError
        If the memory is read-only and `readonly` is False.
    CopyRequiredError
        If the array needs a copy and `readonly` is False.
    ConversionError, AdapterNotFoundError
        As `dlx.convert`.
    RuntimeError
        If the same object is entered twice.

    Examples
    --------
    >>> import dlx
    >>> with dlx.borrow(bytearray(b"abc")) as tensor:
    ...     tensor.ndim, tensor.shape[0]
    (1, 3)
    """

    # In lower case like contextlib.suppress: it is used as a function.
    __slots__ = ("_entered", "_held", "_obj", "_options")

    def __init__(self, obj: Any, *, readonly: bool = False, stream: Any = None) -> None:
        self._obj = obj
        self._options = bool(readonly), stream
        self._entered = False
        self._held: Any = None

    def __enter__(self) -> Any:
        if self._entered:
            raise RuntimeError("cannot enter this borrow again. Call dlx.borrow again.")
        self._entered = True
        obj, self._obj = self._obj, None
        readonly, stream = self._options
        try:
            if readonly:
                tensor = _tensor(obj, stream=stream)
            else:
                fix = "Pass readonly=True if you only read it."
                tensor = _writable(obj, "DLTensor *", "it is read-only", fix, stream=stream, copy=False)
        except DlxError as error:
            name_action(error, "borrow", ("copy", "readonly", "stream"))
            if isinstance(error, CopyRequiredError) and ("copy", None) in error.option:  # not an option here
                error.option = (("readonly", True),)
                error.via = "to read a copy, or pass a copy to write to"
            raise
        written = None if readonly else obj
        try:
            if stream is None and cuda.is_cuda(tensor.device):
                _for_legacy(tensor)
            borrowed = ffi.new("DLTensor *")
            borrowed[0] = dltensor(tensor)[0]
            numbers = ffi.new("int64_t[]", tensor.shape), ffi.new("int64_t[]", tensor.strides)
            borrowed.shape, borrowed.strides = numbers
            self._held = tensor, borrowed, numbers, written
        except BaseException:
            native.capsule_restore(obj, tensor)  # if it is a capsule
            raise
        return borrowed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        if held is not None:
            held[1][0] = _EMPTY_STRUCT
            if held[3] is not None:
                array, source = lookup.source(held[3])
                mark_written(source, array)


for _method in (borrow.__init__, borrow.__enter__, borrow.__exit__):
    leave_out(_method, "dlx.borrow")


def _for_legacy(tensor: Tensor) -> None:
    """Make the legacy stream, the default of C code, wait for the memory."""
    ready = cuda.readiness_of(tensor)
    if ready is not None:
        cuda.wait(ready, Stream(Device(lib.kDLCUDA, tensor.device.id), lib.DLX_STREAM_LEGACY))


def _tensor(obj: Any, **options: Any) -> Tensor:
    try:
        if lookup.kind(type(obj)).handler is None:
            return convert(obj, to="dlx", **options)  # type: ignore[no-any-return]
        array, source = lookup.source(obj, target="dlx")  # a wrapper of one array, such as a Series
        return Batch(request_of("dlx", **options), [array], [source]).run()[0]  # type: ignore[no-any-return]
    except DlxError as error:
        shorten(error, own=False)
        raise


def _peek(obj: Any) -> Tensor | None:
    """Return the tensor of a capsule without consuming it; None for other objects."""
    return native.capsule_peek(obj) if native.capsule_state(obj) in ("versioned", "legacy") else None


def _writable(obj: Any, target: str, reason: str, fix: str, **options: Any) -> Tensor:
    """Return a writable tensor, or raise; a read-only capsule is not consumed."""
    tensor = _peek(obj)
    if tensor is None or not tensor.readonly:
        tensor = _tensor(obj, **options)
    if tensor.readonly:
        raise ReadOnlyError(reason, source=str(describe(obj)), target=target, fix=fix)
    return tensor
