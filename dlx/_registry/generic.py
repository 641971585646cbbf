"""Adapters for `dlx.Tensor`, capsules, and objects that implement a protocol without a registered framework."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from dlx._core import cuda, native
from dlx._core.array_info import ArrayInfo
from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.stream import Stream, parse_stream
from dlx._core.types import READ_ONLY, Device
from dlx._protocols import arrow, dlpack, memory
from dlx._registry.array_like import refusal
from dlx._support.reflect import module_of, type_name
from dlx.adapter.arrow import ArrowSource, arrow_lists
from dlx.adapter.base import Adapter, Description, Devices, DTypes, at_rest, tensor_info
from dlx.adapter.declarations import Arrays, Blocker, Capabilities, FastPath, Layout, StreamSupport
from dlx.adapter.files import file_handler
from dlx.errors import ConsumedError, DeviceError, DlxError, DTypeError, LayoutError


class ProtocolAdapter(Adapter):
    """A source described by its export, which has no side effects."""

    package = "builtins"

    def __init__(self, name: str, protocol: str, export: Callable[[Any], Tensor], **facts: Any) -> None:
        self.name, self._protocols, self._export = name, (protocol,), export
        vars(self).update(facts)

    def describe(self, obj: Any) -> Description:
        tensor = self.export(obj)
        info = functools.partial(ArrayInfo.of_tensor, tensor, self.name, type(obj), self._protocols)
        return Description(info, (), tensor)

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        return self._export(obj)


class _NoDevice(Devices):
    """Devices that need no driver: a `dlx.Tensor` only refers to their memory."""

    def to_native(self, device: Device) -> Any:
        return device

    def activate(self, device: Device) -> AbstractContextManager[Any]:
        return nullcontext()


class TensorAdapter(ProtocolAdapter):
    """`dlx.Tensor`, as a source and as the target "dlx"; it represents every DLPack tensor."""

    package = "dlx"
    types = ("dlx.Tensor",)
    _classes = (Tensor,)
    devices = _NoDevice()
    fast_path = FastPath(types=("dlx.Tensor",), describe=tensor_info("__dlpack__"))
    containers = (file_handler("dlx._files.mapping.Archive"),)
    streams = StreamSupport(ready=lambda obj, tensor: None)

    def __init__(self) -> None:
        super().__init__("dlx", "__dlpack__", lambda obj: obj)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=None,
            device_types=None,
            layouts=Layout.ANY,
            min_alignment=1,
            ndims=(0, 128),
            keeps_readonly=True,
            subbyte="both",
        )

    def load(self, tensor: Tensor) -> Any:
        return at_rest(tensor)


def _legacy_stream(obj: Any, tensor: Tensor) -> Stream | None:
    """Return the legacy stream, the most likely one; a capsule does not record its stream."""
    if not cuda.is_cuda(tensor.device):
        return None
    try:
        cuda.require()
    except DeviceError:  # no driver, no work
        return None
    return Stream(Device(lib.kDLCUDA, tensor.device.id), lib.DLX_STREAM_LEGACY)


def _restore(capsule: Any, tensor: Tensor) -> None:
    native.capsule_restore(capsule, tensor)


def _peek(obj: Any) -> Tensor:
    try:
        return at_rest(native.capsule_peek(obj))
    except ConsumedError as error:
        error.complete(fix="Convert the object that created it, not the capsule.")
        raise


class DLPackAdapter(Adapter):
    """Objects whose type has ``__dlpack__``; describing them requires an export."""

    name = "dlpack"
    package = "builtins"
    fast_path = FastPath(types=())

    export = staticmethod(dlpack.export)

    def describe(self, obj: Any) -> Description:
        reason = dlpack.why_no_numbers(obj)
        if reason:
            fix = "Convert its elements to numbers in its own framework first."
            return Description(lambda: self._info(obj, dlpack.device_of(obj)), (Blocker(reason, fix, DTypeError),))
        try:
            device = dlpack.device_of(obj)
        except DlxError:  # only an export raises it: the array may not need one
            return Description(lambda: self._info(obj, dlpack.device_of(obj)), needs_export=True)
        return Description(functools.partial(self._info, obj, device), needs_export=True, device=device)

    def _info(self, obj: Any, device: Device | None) -> ArrayInfo:
        return ArrayInfo(self.name, type_name(type(obj)), device=device, protocols=("__dlpack__",))


def _interface_tensor(obj: Any) -> Tensor:
    return memory.array_interface(obj, obj.__array_interface__)


def _named_stream(obj: Any, tensor: Tensor) -> Stream | None:
    device = Device(lib.kDLCUDA, tensor.device.id)
    return memory.cuda_interface_stream(obj.__cuda_array_interface__, device)


def _work_stream(obj: Any, tensor: Tensor) -> Stream | None:
    """Return the current work stream from the exchange table of the object's type."""
    if not cuda.is_cuda(tensor.device):
        return None
    device = Device(lib.kDLCUDA, tensor.device.id)
    return parse_stream(native.exchange_stream(obj, *device) or lib.DLX_STREAM_LEGACY, device)


class ExchangeAdapter(Adapter):
    """Objects whose type has an exchange table (``__dlpack_c_exchange_api__``) but no ``__dlpack__``."""

    name = "exchange"
    package = "builtins"
    fast_path = FastPath(types=())
    streams = StreamSupport(ready=_work_stream)

    def describe(self, obj: Any) -> Description:
        return Description(ArrayInfo(self.name, type_name(type(obj)), protocols=("__dlpack_c_exchange_api__",)))

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        return native.exchange_export(obj)


def _buffer_tensor(obj: Any) -> Tensor:
    try:
        return memory.buffer(obj)
    except DlxError as error:
        if (refused := refusal(type(obj))) is not None:  # such as a tensor list that claims to have a buffer
            error.complete(fix=refused.fix)
        raise


class Deferred:
    """An array in a file: its description, and a blocker that reads or refuses it."""

    __slots__ = ("__weakref__", "blocker", "info")

    def __init__(self, info: ArrayInfo, blocker: Blocker) -> None:
        self.info, self.blocker = info, blocker

    def __setstate__(self, state: object) -> None:
        """Ignore the state that a pickle holds for it."""


class RefusedCode(Deferred):
    """A function or class that a checkpoint names, and that is refused when read; so are the objects that it makes."""

    __slots__ = ("reader",)

    def __new__(cls, *args: Any) -> Any:
        """Create one. torch calls this with one as `cls` for an object of the class that it stands for."""
        return cls(*args) if isinstance(cls, RefusedCode) else super().__new__(cls)

    def __init__(self, info: ArrayInfo, blocker: Blocker) -> None:
        super().__init__(info, blocker)
        self.reader = threading.get_ident()

    def __call__(self, *args: Any) -> Deferred:
        if threading.get_ident() != self.reader:  # torch.load in another thread
            from pickle import UnpicklingError

            raise UnpicklingError(self.blocker.because)
        return Deferred(self.info, self.blocker)


class DeferredAdapter(Adapter):
    """`Deferred`; the blocker's resolution returns the tensor."""

    name = "file"
    package = "builtins"
    arrays = Arrays(alignment=lib.DLX_ALIGNMENT)

    def describe(self, obj: Any) -> Description:
        return Description(obj.info, (obj.blocker,))

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        return obj  # type: ignore[no-any-return]


class ArrowAdapter(ArrowSource):
    """Objects with a method of Arrow's PyCapsule interface, and columns of their tables."""

    name = "arrow"
    package = "builtins"
    fast_path = FastPath(
        types=("polars.Series", "nanoarrow.Array", "narwhals.Series"),
        exchange=native.arrow_exchange,
        unblocks=ArrowSource.joined,
    )
    streams = StreamSupport(ready=lambda obj, tensor: None)
    containers = (arrow_lists((), lambda column: column.type.is_list),)  # columns, see `lookup._EXACT`


class ArrowTarget(Adapter):
    """The target "arrow": a `dlx.Tensor` for consumers of Arrow's PyCapsule interface."""

    name = "arrow"
    package = "dlx"
    _classes = (Tensor,)
    arrays = Arrays(immutable=True)
    dtypes = DTypes("dlx", {name: name for name in ("bool", *arrow.NUMBERS)})
    _capabilities = Capabilities(
        dtypes=frozenset(dtypes.names), ndims=(1, 64), keeps_readonly=True, copies=arrow.PACKED
    )
    fast_path = FastPath(types=(), exchange=native.arrow_exchange, imports=replace(_capabilities, ndims=(1, 1)))

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def variant(self, wanted: type | Tensor) -> Adapter:
        if isinstance(wanted, Tensor):
            for extent in wanted.shape[1:]:
                if extent > arrow.MAX_LIST:
                    why = f"Arrow's fixed-size lists have at most {arrow.MAX_LIST} values, found an extent of {extent}"
                    raise LayoutError(why, fix="Reshape it to one dimension, or to smaller extents after the first.")
        return self

    def load(self, tensor: Tensor) -> Any:
        tensor = at_rest(tensor)
        if tensor.dtype.name in arrow.PACKED:  # `__arrow_c_array__` packs later: the source may change until then
            tensor = native.tensor_copy(tensor, False)
        return native.tensor_view(tensor, None, None, READ_ONLY, None)


ARROW = ArrowAdapter()
ARROW_TARGET = ArrowTarget()
TENSOR = TensorAdapter()
DEFERRED = DeferredAdapter()
DLPACK = DLPackAdapter()
EXCHANGE = ExchangeAdapter()
CAPSULE = ProtocolAdapter(
    "capsule",
    "PyCapsule",
    _peek,  # single-use: `consume` claims it when nothing else can fail
    streams=StreamSupport(ready=_legacy_stream),
    arrays=Arrays(consume=lambda obj, tensor, shared: native.capsule_claim(obj, tensor), restore=_restore),
)
INTERFACE = ProtocolAdapter(
    "array_interface",
    "__array_interface__",
    _interface_tensor,
    fast_path=FastPath(
        types=("PIL.Image.Image",),
        subclasses=lambda kind: True,  # image files, which are read at the first access
        export=_interface_tensor,
    ),
)
CUDA_INTERFACE = ProtocolAdapter(
    "cuda_array_interface",
    "__cuda_array_interface__",
    lambda obj: memory.cuda_array_interface(obj, obj.__cuda_array_interface__),
    streams=StreamSupport(ready=_named_stream),
)
BUFFER = ProtocolAdapter(
    "buffer",
    "buffer",
    _buffer_tensor,
    fast_path=FastPath(
        types=(
            "builtins.bytes",
            "builtins.bytearray",
            "builtins.memoryview",
            "array.array",
            "mmap.mmap",
            "_ctypes.Array",
        ),
        # ctypes has a type per length; an array interface takes precedence.
        subclasses=lambda kind: module_of(type(kind)) == "_ctypes" and not hasattr(kind, "__array_interface__"),
        exchange=native.buffer_exchange,
    ),
)
