"""Adapters for objects of no registered framework: raw capsules, `dlx.Tensor`, and whatever speaks a protocol."""

from __future__ import annotations

import functools
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
from dlx.adapter.arrow import ArrowSource
from dlx.adapter.base import Adapter, Description, Devices, DTypes, at_rest, tensor_info
from dlx.adapter.declarations import Arrays, Blocker, Capabilities, FastPath, Layout, StreamSupport
from dlx.adapter.files import file_handler
from dlx.errors import ConsumedError, DeviceError, DlxError, DTypeError, LayoutError


class ProtocolAdapter(Adapter):
    """A source whose export is harmless, so that its description is an export."""

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
    """A `dlx.Tensor` is made around memory of any device without the device's driver."""

    def to_native(self, device: Device) -> Any:
        return device

    def activate(self, device: Device) -> AbstractContextManager[Any]:
        return nullcontext()


class TensorAdapter(ProtocolAdapter):
    """`dlx.Tensor`, as a source and as the target "dlx": it can hold whatever DLPack can say."""

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
    """Return the legacy stream: a capsule does not say which stream it was made for, and most work is there."""
    if not cuda.is_cuda(tensor.device):
        return None
    try:
        cuda.require()
    except DeviceError:  # then nothing can be on it
        return None
    return Stream(Device(lib.kDLCUDA, tensor.device.id), lib.DLX_STREAM_LEGACY)


def _restore(capsule: Any, tensor: Tensor) -> None:
    native.capsule_restore(capsule, tensor)


def _peek(obj: Any) -> Tensor:
    try:
        return at_rest(native.capsule_peek(obj))
    except ConsumedError as error:
        error.complete(fix="Convert the object that it came from, not the capsule.")
        raise


class DLPackAdapter(Adapter):
    """Any object whose type has ``__dlpack__``. Only an export can describe it."""

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
        except DlxError:  # raised again where it is asked for: an array may stay as it is
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
    """Return the stream that the table of an object's type says its work is on."""
    if not cuda.is_cuda(tensor.device):
        return None
    device = Device(lib.kDLCUDA, tensor.device.id)
    return parse_stream(native.exchange_stream(obj, *device) or lib.DLX_STREAM_LEGACY, device)


class ExchangeAdapter(Adapter):
    """An object whose type carries an exchange table (``__dlpack_c_exchange_api__``) and no ``__dlpack__``."""

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
        if (refused := refusal(type(obj))) is not None:  # a list of tensors, which says that it has a buffer
            error.complete(fix=refused.fix)
        raise


class Deferred:
    """An array that has yet to be read: what is known of it, and the blocker that reads it, or refuses to."""

    __slots__ = ("__weakref__", "blocker", "info")

    def __init__(self, info: ArrayInfo, blocker: Blocker) -> None:
        self.info, self.blocker = info, blocker


class DeferredAdapter(Adapter):
    """`Deferred`. Its blocker's resolution gives the tensor."""

    name = "file"
    package = "builtins"

    def describe(self, obj: Any) -> Description:
        return Description(obj.info, (obj.blocker,))

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        return obj  # type: ignore[no-any-return]


class ArrowAdapter(ArrowSource):
    """An object with a method of Arrow's PyCapsule interface, or a column of a table that has one."""

    name = "arrow"
    package = "builtins"
    fast_path = FastPath(
        types=("polars.Series", "nanoarrow.Array", "narwhals.Series"),
        exchange=native.arrow_exchange,
        unblocks=ArrowSource.joined,
    )
    streams = StreamSupport(ready=lambda obj, tensor: None)


class ArrowTarget(Adapter):
    """The target "arrow": a `dlx.Tensor` that every consumer of Arrow's PyCapsule interface takes."""

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
                    why = f"Arrow's fixed-size lists have up to {arrow.MAX_LIST} values, found an extent of {extent}"
                    raise LayoutError(why, fix="Reshape it to one dimension, or to smaller extents but for the first.")
        return self

    def load(self, tensor: Tensor) -> Any:
        tensor = at_rest(tensor)
        if (
            tensor.dtype.name in arrow.PACKED
        ):  # packed by `__arrow_c_array__`, whatever is written to the source until then
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
    _peek,  # it is single-use, so it is only looked at until nothing else can fail
    streams=StreamSupport(ready=_legacy_stream),
    arrays=Arrays(consume=lambda obj, tensor, shared: native.capsule_claim(obj, tensor), restore=_restore),
)
INTERFACE = ProtocolAdapter(
    "array_interface",
    "__array_interface__",
    _interface_tensor,
    fast_path=FastPath(
        types=("PIL.Image.Image",),
        subclasses=lambda kind: True,  # of images in files, which are read when they are first asked
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
        # Each length has a type of its own. An array interface is read first.
        subclasses=lambda kind: module_of(type(kind)) == "_ctypes" and not hasattr(kind, "__array_interface__"),
        exchange=native.buffer_exchange,
    ),
)
