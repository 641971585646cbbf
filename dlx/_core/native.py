"""The builtins of the compiled extension, with type hints, and the map from C status codes to error classes."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from dlx import errors
from dlx._core.array_protocol import as_array, as_interface
from dlx._core.extension import ffi as ffi
from dlx._core.extension import lib as lib
from dlx._core.types import HOST, Device, DType
from dlx.typing import READONLY

_CLASSES: dict[str, type[BaseException]] = {
    "DLX_E_VERSION": errors.ProtocolError,
    "DLX_E_NDIM": errors.LayoutError,
    "DLX_E_SHAPE": errors.ProtocolError,
    "DLX_E_DTYPE": errors.DTypeError,
    "DLX_E_OVERFLOW": errors.LayoutError,
    "DLX_E_FLAGS": errors.ProtocolError,
    "DLX_E_NULL": errors.LayoutError,
    "DLX_E_DEVICE": errors.DeviceError,
    "DLX_E_PACKED": errors.LayoutError,
    "DLX_E_MISMATCH": errors.LayoutError,
    "DLX_E_CAPSULE": errors.ProtocolError,
    "DLX_E_CONSUMED": errors.ConsumedError,
    "DLX_E_READONLY": errors.ReadOnlyError,
    "DLX_E_STREAM": errors.StreamError,
    "DLX_E_COPY": errors.CopyRequiredError,
    "DLX_E_NO_DRIVER": errors.DeviceError,
    "DLX_E_FORKED": errors.DeviceError,
    "DLX_E_DRIVER": errors.DeviceError,
    "DLX_E_CAPTURE": errors.StreamError,
    "DLX_E_SCATTERED": errors.LayoutError,
    "DLX_E_ARROW": errors.ProtocolError,
}

if lib.dlx_bind(id(sys.modules[__name__])) != 0:
    raise ImportError("dlx._ffi cannot register its builtins; the cause is printed above")
globals().pop("bind")(sys.modules[__name__])

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    class Tensor:
        """A tensor in DLPack's sense, owned by dlx: memory, dtype, shape, strides, device, flags.

        Create one with dlx.convert(obj, to='dlx'). Any DLPack consumer imports it; host memory is also a buffer.
        """

        shape: tuple[int, ...]
        """Extents, a tuple (ndim,)."""
        strides: tuple[int, ...]
        """Strides in elements, a tuple (ndim,)."""
        ndim: int
        """Number of dimensions."""
        dtype: DType
        """The dtype as dlx.DType."""
        device: Device
        """Device of the memory, as dlx.Device."""
        is_host: bool
        """Whether the memory is plain host memory, not pinned."""
        nbytes: int
        """Bytes of all elements, without gaps."""
        readonly: bool
        """Whether the memory is read-only."""
        data_ptr: int
        """Address of the first element; a handle on opaque devices."""
        byte_offset: int
        """Bytes from data_ptr to the first element; 0 if data_ptr is an address."""
        flags: int
        """The DLPack flags, as an int."""
        version: tuple[int, int]
        """The DLPack version of exported capsules."""
        __array_interface__: dict[str, Any]
        """numpy's array interface, for numbers in host memory."""
        __cuda_array_interface__: dict[str, Any]
        """The CUDA array interface, for numbers in CUDA memory."""
        __dlpack_c_exchange_api__: ClassVar[object]

        def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> Any:
            """Return a numpy array over this memory, read-only if the tensor is; a copy if dtype differs.

            Raise for device memory.
            """

        def tobytes(self) -> bytes:
            """Return the elements as bytes, in row-major order."""

        def __arrow_c_array__(self, requested_schema: object = None) -> tuple[Any, Any]:
            """Return (schema, array) capsules of Arrow's PyCapsule interface over this memory."""

        def __arrow_c_schema__(self) -> Any:
            """Return the schema of __arrow_c_array__ in a capsule."""

        def __dlpack__(
            self,
            *,
            stream: Any = None,
            max_version: tuple[int, int] | None = None,
            dl_device: tuple[int, int] | None = None,
            copy: bool | None = None,
        ) -> Any:
            """Return a new capsule over this memory (a copy if copy=True), versioned if max_version is (1, 0) or more.

            Read-only memory cannot be exported in a legacy capsule.
            """

        def __reduce_ex__(self, protocol: Any, /) -> Any:
            """Return the state for pickle and copy; with protocol 5, the values are out of band."""

        def __dlpack_device__(self) -> tuple[int, int]:
            """Return (device type, device id) as DLPack numbers."""

        def __buffer__(self, flags: int, /) -> memoryview: ...

    def register(**hooks: Any) -> None: ...
    def add_host(device: Any, /) -> None: ...
    def buffer_exchange() -> object: ...
    def letters_dtype(letters: str, itemsize: int, /) -> tuple[int, int, int] | None: ...
    def exchange_export(obj: object, /) -> Tensor: ...
    def exchange_stream(obj: object, device_type: int, device_id: int, /) -> int: ...
    def capsule_state(obj: object, /) -> str | None: ...
    def capsule_claim(capsule: object, tensor: Tensor | None = None, /) -> Tensor: ...
    def capsule_peek(capsule: object, /) -> Tensor: ...
    def capsule_restore(capsule: object, tensor: Tensor, /) -> bool: ...
    def tensor_new(
        address: int,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: Sequence[int],
        device: Sequence[int],
        flags: int,
        owner: object,
    ) -> Tensor: ...
    def tensors_unpack(address: int, size: int, numbers: Any, flags: int, owner: object, /) -> list[Tensor]: ...
    def arrays_unpack(
        address: int, size: int, numbers: Any, flags: int, owner: object, fast_path: FastPathFunction, to: Any, /
    ) -> list[Any] | None: ...
    def tensors_extents(tensors: list[Tensor], /) -> list[tuple[int, int, bool]]: ...
    def tensors_pack(tensors: list[Tensor], offsets: list[int], strides: list[tuple[int, ...] | None], /) -> bytes: ...
    def tensor_view(
        tensor: Tensor, dtype: Sequence[int] | None, device: Sequence[int] | None, flags: int | None, owner: object
    ) -> Tensor: ...
    def tensor_copy(
        tensor: Tensor, keep_order: bool, stream: int = 0, dtype: Sequence[int] | None = None, /
    ) -> Tensor: ...
    def tensor_fill(
        whole: Tensor, tensors: list[Tensor], axis: int, match: int = 0, places: list[slice] | None = None, /
    ) -> int | None: ...
    def tensor_stack(
        tensors: list[Tensor],
        capabilities: int = 0,
        axis: int = 0,
        keep: bool = False,
        dtype: Sequence[int] | None = None,
        places: list[slice] | None = None,
        /,
    ) -> Tensor | None: ...
    def tensor_join(whole: Tensor, values: Tensor, offsets: Tensor, /) -> None: ...
    def tensor_repack(tensor: Tensor, /) -> Tensor: ...
    def tensor_check(tensor: Tensor, capabilities: int, /) -> int: ...
    def producer_response(obj: object, /) -> tuple[object, Any, Exception | None] | None: ...

    class Source:
        """How the fast path reads arrays of one exact type."""

        what: str
        adapter: Any

        def __init__(self, type: type, /, **members: Any) -> None: ...

    class Target:
        """What a consumer accepts on the fast path."""

        consumer: Any
        stated: Any

        def __init__(self, **members: Any) -> None: ...

    def source_find(type: type, /) -> Source | None: ...
    def source_add(source: Source, like: tuple[str, Any] | bool | None = None, /) -> None: ...
    def target_find(to: object, /) -> Target | None: ...
    def pair_add(to: object, source: Source, target: Target, what: str, at_root: bool = False, /) -> bool: ...
    def routes_clear() -> None: ...

    class FastPathFunction:
        """A function with a fast path in C."""

        def __init__(self, wrapped: Any, learn: Any, failed: Any, to: str = ..., view: Any = ...) -> None: ...
        def __call__(self, *args: Any, **keywords: Any) -> Any: ...
        def _bind(self, *, wrapped: Any = ..., learn: Any = ..., failed: Any = ..., view: Any = ...) -> None: ...
        def _overlap(self, a: Any, b: Any, /) -> bool | None: ...
        def _borrow(
            self, obj: Any, to: Any, brief: bool = False, unmarks: bool = False, copies: bool = False, /
        ) -> Any: ...
        def _load(self, tensor: Tensor, obj: Any, to: Any, /) -> Any: ...
        def _stack(self, arrays: tuple[Any, ...], to: Any, out: Any = None, axis: int = 0, /) -> Any: ...
        def _open_frame(self, frame: Any, to: Any, dtype: Any = None, /) -> Any: ...
        def _exchange_api(self, to: str, python_path: Callable[[Any], Tensor], /) -> object: ...

    class Slots:
        """Base type of lazy views: a source and a cache of converted elements."""

        _source: Any
        _slots: dict[Any, Any]
        _fast: tuple[Any, ...] | None
        _handler: Any
        _scope: Any
        _path: Any
        _me: Any
        _is_tracing: Callable[[], bool] | None
        _fixed: type | None
        _getter: Callable[[Any], Any] | None
        _unchanged: Callable[[Any, Any], bool] | None

        def __init__(self, source: Any, handler: Any, scope: Any, path: Any, /) -> None: ...
        def __getitem__(self, key: Any) -> Any: ...
        def __len__(self) -> int: ...
        def _results(self) -> Iterator[Any]: ...

    def set_traced(function: Callable[..., Any], /) -> None: ...
    def call_converted(plan: tuple[Any, ...], args: tuple[Any, ...], options: dict[str, Any], /) -> Any: ...
    def convert_slot(slots: dict[Any, Any], fast: tuple[Any, ...], key: Any, element: Any, /) -> Any: ...
    def count_stream_contexts(change: int, /) -> None: ...
    def ready_new(device_id: int, stream: int, keep: object) -> int: ...
    def tensor_readiness(tensor: Tensor, /) -> int: ...
    def tensor_behind(tensor: Tensor, device_id: int, stream: int, keep: object, ready: int = 0) -> Tensor: ...
    def tensor_on_device(
        like: Tensor, keep_order: bool, device_id: int, stream: int = 0, keep: object = None
    ) -> Tensor: ...
    def buffer_address(view: memoryview, /) -> int: ...
    def arrow_open(obj: object, method: str, /) -> object: ...
    def arrow_schema(data: object, /) -> tuple[str, str, dict[bytes, bytes], bool, tuple[Any, ...]]: ...
    def arrow_column(data: object, column: int, /) -> tuple[Any, ...]: ...
    def arrow_extents(data: object, column: int, /) -> list[tuple[int, int]]: ...
    def arrow_tensor(data: object, column: int, copies: bool, /) -> Tensor: ...
    def arrow_exchange(by_dlpack: bool = False, /) -> object: ...
    def arrow_join(obj: object, /) -> Tensor | None: ...
    def arrow_lists(data: object, number: int, joins: bool, /) -> tuple[object, Tensor | None, int, int]: ...
    def arrow_columns(method: str | None, obj: object, joins: bool, /) -> tuple[dict[str, Tensor] | None, Any]: ...
    def managed_adopt(address: int, legacy: bool, borrow: bool, keep: object) -> Tensor: ...
    def tensor_address(tensor: Tensor, /) -> int: ...
    def tensor_empty(like: int, /) -> Tensor: ...


register(
    errors={getattr(lib, name): kind for name, kind in _CLASSES.items()},
    device=Device,
    dtype=DType,
    host=HOST,
    dtypes={dtype.code | dtype.bits << 8: dtype for dtype in DType.all() if dtype.lanes == 1},
    array=as_array,
    array_interface=functools.partial(as_interface, buffer_address),
    readonly_words=tuple(map(sys.intern, READONLY)),
)


def live() -> int:
    """Return the number of managed tensors that dlx has created or consumed and not yet released."""
    return int(lib.dlx_live())
