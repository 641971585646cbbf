"""Types of `convert`, `stack`, `open`, `share` and `attach`, with one overload for each kind of source and target.

- They are callable objects, as `convert` is at run time. If they were functions, pyright's strict mode would report
  them as partially unknown unless all frameworks are installed.
- Elements of a container count as arrays if they support DLPack: buffers and scalars pass through.
- mypy treats an argument with Any in its type (``NDArray[Any]``) as ambiguous if it fits overloads that differ in both
  the parameter's type and the result. So there is no overload for `object`, and all overloads of arrays use ``Array``.
- Frameworks that are not installed are Any.
- The last overloads take wrong calls. mypy reports the first overload that an argument fits after its type arguments
  are erased, pyright the last one that has the call's parameters. So both show one short error. Errors show no name
  of this file that begins with an underscore.
- A new option is a key of `dlx.typing.Options`, or of ``_Place`` or ``_Mapped``, and a parameter of the last overloads.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from os import PathLike
from types import SimpleNamespace
from typing import IO, Any, ClassVar, Generic, Literal, Never, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

import jax
import torch
import tvm_ffi
from numpy.typing import NDArray
from typing_extensions import Buffer, CapsuleType

from dlx._core.tensor import Tensor
from dlx._files.mapping import FileView
from dlx._files.selection import Names
from dlx._sharing.handle import Handle
from dlx._sharing.ring import RingReader
from dlx._views.base import View
from dlx._views.mapping import MutableMappingView
from dlx._views.sequence import MutableSequenceView, SequenceView
from dlx.typing import DeviceLike, DTypeLike, Errors, Options, Readonly, SupportsDLPack, Target, _ArrayOptions

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_K = TypeVar("_K")

# Modules, recognized by their array type: numpy and cupy, torch and tvm_ffi, jax.
class HasNDArray(Protocol[_T_co]):
    @property
    def ndarray(self) -> type[_T_co]: ...

class HasTensor(Protocol[_T_co]):
    @property
    def Tensor(self) -> type[_T_co]: ...  # noqa: N802

class HasArray(Protocol[_T_co]):
    @property
    def Array(self) -> type[_T_co]: ...  # noqa: N802

_Module: TypeAlias = HasNDArray[_T] | HasTensor[_T] | HasArray[_T]

# Arrays without DLPack. numpy's stub declares __dlpack__ only for arrays of numbers.
class NumPyArray(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...

class SupportsArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class ArrowArray(Protocol):
    def __arrow_c_array__(self) -> Any: ...

class ArrowStream(Protocol):  # columns of pandas and polars
    def __arrow_c_stream__(self) -> Any: ...

class HasShape(Protocol):  # datasets of HDF5, sparse arrays, arrays of plugins
    @property
    def shape(self) -> Sequence[Any]: ...

# Objects around arrays: xarray's keep their type for the frameworks that it supports, dask's for all.
class HasSizes(Protocol):
    @property
    def sizes(self) -> Mapping[Any, int]: ...

class HasChunks(Protocol):
    @property
    def numblocks(self) -> Any: ...
    def rechunk(self) -> Any: ...

_Labelled = TypeVar("_Labelled", bound=HasSizes)
_Chunked = TypeVar("_Chunked", bound=HasChunks)

# Tables, which become a dict of columns.
class Table(ArrowStream, Protocol):
    @property
    def columns(self) -> Any: ...

# A result never is a subclass of torch.Tensor, such as Parameter.
class HasDetach(Protocol[_T_co]):
    def detach(self) -> _T_co: ...

class NamedTuple(Protocol):
    @property
    def _fields(self) -> tuple[str, ...]: ...
    def _asdict(self) -> dict[str, Any]: ...

# Any sequence but str, whose __contains__ takes str only.
class Sequence(Protocol[_T_co]):
    def __contains__(self, value: object, /) -> bool: ...
    def __getitem__(self, index: int, /) -> _T_co: ...
    def __len__(self) -> int: ...
    def count(self, value: Any, /) -> int: ...
    def index(self, value: Any, /) -> int: ...

class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]

class Attrs(Protocol):
    __attrs_attrs__: ClassVar[Any]

class Tree(Protocol):
    def __dlx_tree__(self) -> Any: ...

class HasAttributes(Protocol):  # objects of HDF5: file["name"] may be any of them
    @property
    def attrs(self) -> Mapping[str, Any]: ...

Array: TypeAlias = SupportsDLPack | SupportsArrayInterface | Buffer | CapsuleType | ArrowArray | ArrowStream | HasShape
_Element = TypeVar("_Element", bound=SupportsDLPack | NumPyArray)
_Type = TypeVar("_Type", bound=SupportsDLPack | NumPyArray)

# Their type contains the type of their arrays, which the conversion changes, so the result is Any.
Container: TypeAlias = (
    Dataclass
    | Attrs
    | Tree
    | HasAttributes
    | SimpleNamespace
    | View
    | Sequence[Any]
    | AbstractSet[Any]
    | Mapping[Any, Any]
)

Convertible = TypeVar("Convertible", Array, Container)

# Types of wrong arguments. No object has them, but mypy, for which MYPY is true, accepts any object for a protocol
# after it erases type arguments; other checkers see the shorter definitions.
MYPY = False
if MYPY:
    class NothingElse(Protocol[_T_co]):
        def __sizeof__(self) -> _T_co: ...  # type: ignore[override]

    class NoSuchOption(NothingElse[_T_co], Protocol[_T_co]): ...
    class KeywordOnly(NothingElse[_T_co], Protocol[_T_co]): ...
    class MissingToOrLike(NothingElse[_T_co], Protocol[_T_co]): ...
    class MissingTo(NothingElse[_T_co], Protocol[_T_co]): ...
    class ArrayOrContainer(NothingElse[_T_co], Protocol[_T_co]): ...

else:
    class NothingElse(Generic[_T_co]): ...
    class NoSuchOption(Generic[_T_co]): ...
    class KeywordOnly(Generic[_T_co]): ...
    class MissingToOrLike(Generic[_T_co]): ...
    class MissingTo(Generic[_T_co]): ...
    class ArrayOrContainer(Generic[_T_co]): ...

_DLX: TypeAlias = Literal["arrow", "dlx"]
_NumPy: TypeAlias = Literal["numpy"]
_Torch: TypeAlias = Literal["torch", "pytorch"]
_Jax: TypeAlias = Literal["jax", "jaxlib"]
_TVM: TypeAlias = Literal["tvm_ffi"]

class _Free(Options, total=False):
    lazy: bool  # no effect

class _Eager(Options, total=False):
    lazy: Literal[False]

class _Passing(_ArrayOptions, total=False):
    lazy: Literal[False]

class _Place(TypedDict, total=False):
    axis: int
    dtype: DTypeLike
    pad: float | None
    device: DeviceLike | None
    stream: object

class _Mapped(TypedDict, total=False):
    only: Names
    skip: Names
    mmap: bool
    raw: str | Mapping[str, str] | None
    device: DeviceLike | None
    readonly: Readonly
    detach: bool
    dtype: DTypeLike

class _Attached(TypedDict, total=False):
    writable: bool
    device: DeviceLike | None
    readonly: Readonly
    fd: int | Sequence[int] | None
    lazy: bool

FileOrPath = TypeVar("FileOrPath", str, PathLike[str], PathLike[bytes], Buffer, IO[bytes])
FilePath: TypeAlias = str | PathLike[str] | PathLike[bytes] | Buffer | IO[bytes]

class Convert:
    """The type of `dlx.convert`."""

    __wrapped__: Callable[..., Any]
    """The Python function, without the fast path."""

    # ---- first, since mypy assumes that a class with __getattr__ has the attributes of an array

    @overload
    def __call__(self, obj: NamedTuple, to: Target, *, like: None = ..., **o: Unpack[_Free]) -> Any: ...
    @overload
    def __call__(self, obj: NamedTuple, to: None = ..., *, like: Any, **o: Unpack[_Free]) -> Any: ...

    # ---- tables and objects around arrays

    @overload
    def __call__(
        self, obj: Table, to: Target | None = ..., *, like: Any = ..., errors: Literal["pass"], **o: Unpack[_Passing]
    ) -> dict[Any, Any]: ...
    @overload
    def __call__(self, obj: Table, to: _DLX, **o: Unpack[_Free]) -> dict[Any, Tensor]: ...
    @overload
    def __call__(self, obj: Table, to: _NumPy, **o: Unpack[_Free]) -> dict[Any, NDArray[Any]]: ...
    @overload
    def __call__(self, obj: Table, to: _Torch, **o: Unpack[_Free]) -> dict[Any, torch.Tensor]: ...
    @overload
    def __call__(self, obj: Table, to: _Jax, **o: Unpack[_Free]) -> dict[Any, jax.Array]: ...
    @overload
    def __call__(self, obj: Table, to: _TVM, **o: Unpack[_Free]) -> dict[Any, tvm_ffi.Tensor]: ...
    @overload
    def __call__(self, obj: Table, to: _Module[_T], **o: Unpack[_Free]) -> dict[Any, _T]: ...
    @overload
    def __call__(self, obj: Table, to: type[_Type], **o: Unpack[_Free]) -> dict[Any, _Type]: ...
    @overload
    def __call__(self, obj: Table, to: None = ..., *, like: HasDetach[_T], **o: Unpack[_Free]) -> dict[Any, _T]: ...
    @overload
    def __call__(
        self, obj: Table, to: None = ..., *, like: NumPyArray, **o: Unpack[_Free]
    ) -> dict[Any, NDArray[Any]]: ...
    @overload
    def __call__(self, obj: Table, to: None = ..., *, like: _T, **o: Unpack[_Free]) -> dict[Any, _T]: ...
    @overload
    def __call__(self, obj: Table, to: Target, **o: Unpack[_Free]) -> dict[Any, Any]: ...
    @overload
    def __call__(self, obj: _Chunked, to: Target, *, like: None = ..., **o: Unpack[_Free]) -> _Chunked: ...
    @overload
    def __call__(self, obj: _Chunked, to: None = ..., *, like: Any, **o: Unpack[_Free]) -> _Chunked: ...
    @overload
    def __call__(self, obj: _Labelled, to: _NumPy | _Jax, **o: Unpack[_Free]) -> _Labelled: ...
    @overload
    def __call__(self, obj: HasSizes, to: _Module[Any] | type[Any], **o: Unpack[_Free]) -> Any: ...
    @overload
    def __call__(self, obj: HasSizes, to: None = ..., *, like: Any, **o: Unpack[_Free]) -> Any: ...

    # ---- an array

    @overload
    def __call__(self, obj: Array, to: _DLX, **o: Unpack[_Free]) -> Tensor: ...
    @overload
    def __call__(self, obj: Array, to: _NumPy, **o: Unpack[_Free]) -> NDArray[Any]: ...
    @overload
    def __call__(self, obj: Array, to: _Torch, **o: Unpack[_Free]) -> torch.Tensor: ...
    @overload
    def __call__(self, obj: Array, to: _Jax, **o: Unpack[_Free]) -> jax.Array: ...
    @overload
    def __call__(self, obj: Array, to: _TVM, **o: Unpack[_Free]) -> tvm_ffi.Tensor: ...
    @overload
    def __call__(self, obj: Array, to: _Module[_T], **o: Unpack[_Free]) -> _T: ...
    @overload
    def __call__(self, obj: Array, to: type[_Type], **o: Unpack[_Free]) -> _Type: ...
    @overload
    def __call__(self, obj: Array, to: None = ..., *, like: HasDetach[_T], **o: Unpack[_Free]) -> _T: ...
    @overload
    def __call__(self, obj: Array, to: None = ..., *, like: NumPyArray, **o: Unpack[_Free]) -> NDArray[Any]: ...
    @overload
    def __call__(self, obj: Array, to: None = ..., *, like: _T, **o: Unpack[_Free]) -> _T: ...
    @overload
    def __call__(
        self,
        obj: Array,
        to: None = ...,
        *,
        like: Any,
        device: DeviceLike | None = ...,
        copy: bool | NothingElse[Never] | None = ...,
        readonly: Readonly | NothingElse[Never] = ...,
        detach: bool | NothingElse[Never] = ...,
        stream: object = ...,
        wait: bool | NothingElse[Never] = ...,
        strict: bool | NothingElse[Never] = ...,
        errors: Errors | NothingElse[Never] = ...,
        dtype: DTypeLike = ...,
        lazy: bool | NothingElse[Never] = ...,
    ) -> Any: ...
    @overload
    def __call__(
        self,
        obj: Array,
        to: Target | NothingElse[Never],
        *,
        like: NothingElse[Never] | None = ...,
        device: DeviceLike | None = ...,
        copy: bool | NothingElse[Never] | None = ...,
        readonly: Readonly | NothingElse[Never] = ...,
        detach: bool | NothingElse[Never] = ...,
        stream: object = ...,
        wait: bool | NothingElse[Never] = ...,
        strict: bool | NothingElse[Never] = ...,
        errors: Errors | NothingElse[Never] = ...,
        dtype: DTypeLike = ...,
        lazy: bool | NothingElse[Never] = ...,
    ) -> Any: ...

    # ---- containers

    @overload
    def __call__(
        self,
        obj: list[Any],
        to: Target | None = ...,
        *,
        like: Any = ...,
        errors: Literal["pass"],
        **o: Unpack[_Passing],
    ) -> list[Any]: ...
    @overload
    def __call__(
        self,
        obj: tuple[Any, ...],
        to: Target | None = ...,
        *,
        like: Any = ...,
        errors: Literal["pass"],
        **o: Unpack[_Passing],
    ) -> tuple[Any, ...]: ...
    @overload
    def __call__(
        self,
        obj: dict[_K, Any],
        to: Target | None = ...,
        *,
        like: Any = ...,
        errors: Literal["pass"],
        **o: Unpack[_Passing],
    ) -> dict[_K, Any]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _DLX, **o: Unpack[_Eager]) -> list[Tensor]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _NumPy, **o: Unpack[_Eager]) -> list[NDArray[Any]]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _Torch, **o: Unpack[_Eager]) -> list[torch.Tensor]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _Jax, **o: Unpack[_Eager]) -> list[jax.Array]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _TVM, **o: Unpack[_Eager]) -> list[tvm_ffi.Tensor]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _Module[_T], **o: Unpack[_Eager]) -> list[_T]: ...
    @overload
    def __call__(self, obj: list[_Element], to: type[_Type], **o: Unpack[_Eager]) -> list[_Type]: ...
    @overload
    def __call__(
        self, obj: list[_Element], to: None = ..., *, like: HasDetach[_T], **o: Unpack[_Eager]
    ) -> list[_T]: ...
    @overload
    def __call__(
        self, obj: list[_Element], to: None = ..., *, like: NumPyArray, **o: Unpack[_Eager]
    ) -> list[NDArray[Any]]: ...
    @overload
    def __call__(self, obj: list[_Element], to: None = ..., *, like: _T, **o: Unpack[_Eager]) -> list[_T]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _DLX, **o: Unpack[_Eager]) -> tuple[Tensor, ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _NumPy, **o: Unpack[_Eager]) -> tuple[NDArray[Any], ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _Torch, **o: Unpack[_Eager]) -> tuple[torch.Tensor, ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _Jax, **o: Unpack[_Eager]) -> tuple[jax.Array, ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _TVM, **o: Unpack[_Eager]) -> tuple[tvm_ffi.Tensor, ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _Module[_T], **o: Unpack[_Eager]) -> tuple[_T, ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: type[_Type], **o: Unpack[_Eager]) -> tuple[_Type, ...]: ...
    @overload
    def __call__(
        self, obj: tuple[_Element, ...], to: None = ..., *, like: HasDetach[_T], **o: Unpack[_Eager]
    ) -> tuple[_T, ...]: ...
    @overload
    def __call__(
        self, obj: tuple[_Element, ...], to: None = ..., *, like: NumPyArray, **o: Unpack[_Eager]
    ) -> tuple[NDArray[Any], ...]: ...
    @overload
    def __call__(
        self, obj: tuple[_Element, ...], to: None = ..., *, like: _T, **o: Unpack[_Eager]
    ) -> tuple[_T, ...]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _DLX, **o: Unpack[_Eager]) -> dict[_K, Tensor]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _NumPy, **o: Unpack[_Eager]) -> dict[_K, NDArray[Any]]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _Torch, **o: Unpack[_Eager]) -> dict[_K, torch.Tensor]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _Jax, **o: Unpack[_Eager]) -> dict[_K, jax.Array]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _TVM, **o: Unpack[_Eager]) -> dict[_K, tvm_ffi.Tensor]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _Module[_T], **o: Unpack[_Eager]) -> dict[_K, _T]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: type[_Type], **o: Unpack[_Eager]) -> dict[_K, _Type]: ...
    @overload
    def __call__(
        self, obj: dict[_K, _Element], to: None = ..., *, like: HasDetach[_T], **o: Unpack[_Eager]
    ) -> dict[_K, _T]: ...
    @overload
    def __call__(
        self, obj: dict[_K, _Element], to: None = ..., *, like: NumPyArray, **o: Unpack[_Eager]
    ) -> dict[_K, NDArray[Any]]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: None = ..., *, like: _T, **o: Unpack[_Eager]) -> dict[_K, _T]: ...
    @overload
    def __call__(self, obj: list[Any], to: Target, *, like: None = ..., **o: Unpack[_Eager]) -> list[Any]: ...
    @overload
    def __call__(
        self, obj: list[Any], to: Target, *, like: None = ..., lazy: Literal[True], **o: Unpack[Options]
    ) -> MutableSequenceView[Any]: ...
    @overload
    def __call__(self, obj: list[Any], to: None = ..., *, like: Any, **o: Unpack[_Eager]) -> list[Any]: ...
    @overload
    def __call__(
        self, obj: list[Any], to: None = ..., *, like: Any, lazy: Literal[True], **o: Unpack[Options]
    ) -> MutableSequenceView[Any]: ...
    @overload
    def __call__(
        self, obj: tuple[Any, ...], to: Target, *, like: None = ..., **o: Unpack[_Eager]
    ) -> tuple[Any, ...]: ...
    @overload
    def __call__(
        self, obj: tuple[Any, ...], to: Target, *, like: None = ..., lazy: Literal[True], **o: Unpack[Options]
    ) -> SequenceView[Any]: ...
    @overload
    def __call__(self, obj: tuple[Any, ...], to: None = ..., *, like: Any, **o: Unpack[_Eager]) -> tuple[Any, ...]: ...
    @overload
    def __call__(
        self, obj: tuple[Any, ...], to: None = ..., *, like: Any, lazy: Literal[True], **o: Unpack[Options]
    ) -> SequenceView[Any]: ...
    @overload
    def __call__(self, obj: dict[_K, Any], to: Target, *, like: None = ..., **o: Unpack[_Eager]) -> dict[_K, Any]: ...
    @overload
    def __call__(
        self, obj: dict[_K, Any], to: Target, *, like: None = ..., lazy: Literal[True], **o: Unpack[Options]
    ) -> MutableMappingView[_K, Any]: ...
    @overload
    def __call__(self, obj: dict[_K, Any], to: None = ..., *, like: Any, **o: Unpack[_Eager]) -> dict[_K, Any]: ...
    @overload
    def __call__(
        self, obj: dict[_K, Any], to: None = ..., *, like: Any, lazy: Literal[True], **o: Unpack[Options]
    ) -> MutableMappingView[_K, Any]: ...
    @overload
    def __call__(
        self,
        obj: Container,
        to: None = ...,
        *,
        like: Any,
        device: DeviceLike | None = ...,
        copy: bool | NothingElse[Never] | None = ...,
        readonly: Readonly | NothingElse[Never] = ...,
        detach: bool | NothingElse[Never] = ...,
        stream: object = ...,
        wait: bool | NothingElse[Never] = ...,
        strict: bool | NothingElse[Never] = ...,
        errors: Errors | NothingElse[Never] = ...,
        dtype: DTypeLike = ...,
        lazy: bool | NothingElse[Never] = ...,
    ) -> Any: ...
    @overload
    def __call__(
        self,
        obj: Container,
        to: Target | NothingElse[Never],
        *,
        like: NothingElse[Never] | None = ...,
        device: DeviceLike | None = ...,
        copy: bool | NothingElse[Never] | None = ...,
        readonly: Readonly | NothingElse[Never] = ...,
        detach: bool | NothingElse[Never] = ...,
        stream: object = ...,
        wait: bool | NothingElse[Never] = ...,
        strict: bool | NothingElse[Never] = ...,
        errors: Errors | NothingElse[Never] = ...,
        dtype: DTypeLike = ...,
        lazy: bool | NothingElse[Never] = ...,
    ) -> Any: ...

    # ---- other objects, and calls without a target

    @overload
    def __call__(
        self, obj: ArrayOrContainer[Never] | Iterator[Never], to: Target, *, like: None = ..., **o: Unpack[_Free]
    ) -> Any: ...
    @overload
    def __call__(self, obj: ArrayOrContainer[Never], to: None = ..., *, like: Any, **o: Unpack[_Free]) -> Any: ...
    @overload
    def __call__(self, obj: Any, *, out: _T, dtype: DTypeLike = ..., detach: bool = ..., strict: bool = ...) -> _T: ...
    @overload
    def __call__(self, obj: MissingToOrLike[Never], to: None = ..., **o: Unpack[_Free]) -> Any: ...
    @overload
    def __call__(
        self,
        obj: Convertible,
        to: None = ...,
        *more: KeywordOnly[Never],
        like: Any,
        device: DeviceLike | None = ...,
        copy: bool | None = ...,
        readonly: Readonly = ...,
        detach: bool = ...,
        stream: object = ...,
        wait: bool = ...,
        strict: bool = ...,
        errors: Errors = ...,
        dtype: DTypeLike = ...,
        lazy: bool = ...,
        **unknown: NoSuchOption[Never],
    ) -> Any: ...
    @overload
    def __call__(
        self,
        obj: Convertible,
        to: Target,
        *more: KeywordOnly[Never],
        like: None = ...,
        device: DeviceLike | None = ...,
        copy: bool | None = ...,
        readonly: Readonly = ...,
        detach: bool = ...,
        stream: object = ...,
        wait: bool = ...,
        strict: bool = ...,
        errors: Errors = ...,
        dtype: DTypeLike = ...,
        lazy: bool = ...,
        **unknown: NoSuchOption[Never],
    ) -> Any: ...

convert: Convert

class Stack:
    """The type of `dlx.stack`."""

    @overload
    def __call__(self, arrays: Iterable[Any], to: _DLX, **o: Unpack[_Place]) -> Tensor: ...
    @overload
    def __call__(self, arrays: Iterable[Any], to: _NumPy, **o: Unpack[_Place]) -> NDArray[Any]: ...
    @overload
    def __call__(self, arrays: Iterable[Any], to: _Torch, **o: Unpack[_Place]) -> torch.Tensor: ...
    @overload
    def __call__(self, arrays: Iterable[Any], to: _Jax, **o: Unpack[_Place]) -> jax.Array: ...
    @overload
    def __call__(self, arrays: Iterable[Any], to: _TVM, **o: Unpack[_Place]) -> tvm_ffi.Tensor: ...
    @overload
    def __call__(self, arrays: Iterable[Any], to: _Module[_T], **o: Unpack[_Place]) -> _T: ...
    @overload
    def __call__(self, arrays: Iterable[Any], to: type[_Type], **o: Unpack[_Place]) -> _Type: ...
    @overload
    def __call__(
        self, arrays: Iterable[Any], *, out: _T, axis: int = ..., dtype: DTypeLike = ..., pad: float | None = ...
    ) -> _T: ...
    @overload
    def __call__(self, arrays: MissingTo[Never], **o: Unpack[_Place]) -> Any: ...
    @overload
    def __call__(
        self,
        arrays: Iterable[Any] | NothingElse[Never],
        to: Target | NothingElse[Never],
        *more: KeywordOnly[Never],
        axis: int | NothingElse[Never] = ...,
        dtype: DTypeLike = ...,
        pad: float | NothingElse[Never] | None = ...,
        device: DeviceLike | None = ...,
        stream: object = ...,
        **unknown: NoSuchOption[Never],
    ) -> Any: ...

stack: Stack

class Open:
    """The type of `dlx.open`."""

    @overload
    def __call__(self, path: FilePath, to: _DLX = ..., **o: Unpack[_Mapped]) -> FileView[Tensor]: ...
    @overload
    def __call__(self, path: FilePath, to: _NumPy, **o: Unpack[_Mapped]) -> FileView[NDArray[Any]]: ...
    @overload
    def __call__(self, path: FilePath, to: _Torch, **o: Unpack[_Mapped]) -> FileView[torch.Tensor]: ...
    @overload
    def __call__(self, path: FilePath, to: _Jax, **o: Unpack[_Mapped]) -> FileView[jax.Array]: ...
    @overload
    def __call__(self, path: FilePath, to: _TVM, **o: Unpack[_Mapped]) -> FileView[tvm_ffi.Tensor]: ...
    @overload
    def __call__(self, path: FilePath, to: _Module[_T], **o: Unpack[_Mapped]) -> FileView[_T]: ...
    @overload
    def __call__(self, path: FilePath, to: type[_Type], **o: Unpack[_Mapped]) -> FileView[_Type]: ...
    @overload
    def __call__(
        self,
        path: FilePath | NothingElse[Never],
        to: Target | NothingElse[Never] = ...,
        *,
        only: Names = ...,
        skip: Names = ...,
        mmap: bool = ...,
        raw: str | Mapping[str, str] | None = ...,
        device: DeviceLike | None = ...,
        readonly: Readonly | NothingElse[Never] = ...,
        detach: bool | NothingElse[Never] = ...,
        dtype: DTypeLike = ...,
    ) -> FileView[Any]: ...
    @overload
    def __call__(
        self,
        path: FileOrPath,
        to: Target = ...,
        *more: KeywordOnly[Never],
        only: Names = ...,
        skip: Names = ...,
        mmap: bool = ...,
        raw: str | Mapping[str, str] | None = ...,
        device: DeviceLike | None = ...,
        readonly: Readonly = ...,
        detach: bool = ...,
        dtype: DTypeLike = ...,
        **unknown: NoSuchOption[Never],
    ) -> FileView[Any]: ...

open: Open

# A handle knows what it refers to, one level deep. Read from JSON or received, it is a dict, and the result is Any.
_ToArray: TypeAlias = Handle[SupportsDLPack]
_ToList: TypeAlias = Handle[list[SupportsDLPack]]
_ToDict: TypeAlias = Handle[dict[_K, SupportsDLPack]]

class Share:
    """The type of `dlx.share`."""

    @overload
    def __call__(self, obj: NamedTuple, *, detach: bool = ...) -> Handle[object]: ...
    @overload
    def __call__(self, obj: Table, *, detach: bool = ...) -> _ToDict[Any]: ...
    @overload
    def __call__(self, obj: HasSizes | HasChunks, *, detach: bool = ...) -> Handle[object]: ...
    @overload
    def __call__(self, obj: Array, *, detach: bool = ...) -> _ToArray: ...
    @overload
    def __call__(self, obj: list[_Element], *, detach: bool = ...) -> _ToList: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], *, detach: bool = ...) -> _ToDict[_K]: ...
    @overload
    def __call__(
        self, obj: object = ..., *, like: object = ..., detach: bool = ..., **unknown: NoSuchOption[Never]
    ) -> Handle[object]: ...

share: Share

class Attach:
    """The type of `dlx.attach`."""

    @overload
    def __call__(self, handle: _ToArray, to: _DLX = ..., **o: Unpack[_Attached]) -> Tensor: ...
    @overload
    def __call__(self, handle: _ToArray, to: _NumPy, **o: Unpack[_Attached]) -> NDArray[Any]: ...
    @overload
    def __call__(self, handle: _ToArray, to: _Torch, **o: Unpack[_Attached]) -> torch.Tensor: ...
    @overload
    def __call__(self, handle: _ToArray, to: _Jax, **o: Unpack[_Attached]) -> jax.Array: ...
    @overload
    def __call__(self, handle: _ToArray, to: _TVM, **o: Unpack[_Attached]) -> tvm_ffi.Tensor: ...
    @overload
    def __call__(self, handle: _ToArray, to: _Module[_T], **o: Unpack[_Attached]) -> _T: ...
    @overload
    def __call__(self, handle: _ToArray, to: type[_Type], **o: Unpack[_Attached]) -> _Type: ...
    @overload
    def __call__(self, handle: _ToList, to: _DLX = ..., **o: Unpack[_Attached]) -> list[Tensor]: ...
    @overload
    def __call__(self, handle: _ToList, to: _NumPy, **o: Unpack[_Attached]) -> list[NDArray[Any]]: ...
    @overload
    def __call__(self, handle: _ToList, to: _Torch, **o: Unpack[_Attached]) -> list[torch.Tensor]: ...
    @overload
    def __call__(self, handle: _ToList, to: _Jax, **o: Unpack[_Attached]) -> list[jax.Array]: ...
    @overload
    def __call__(self, handle: _ToList, to: _TVM, **o: Unpack[_Attached]) -> list[tvm_ffi.Tensor]: ...
    @overload
    def __call__(self, handle: _ToList, to: _Module[_T], **o: Unpack[_Attached]) -> list[_T]: ...
    @overload
    def __call__(self, handle: _ToList, to: type[_Type], **o: Unpack[_Attached]) -> list[_Type]: ...
    @overload
    def __call__(self, handle: _ToDict[_K], to: _DLX = ..., **o: Unpack[_Attached]) -> dict[_K, Tensor]: ...
    @overload
    def __call__(self, handle: _ToDict[_K], to: _NumPy, **o: Unpack[_Attached]) -> dict[_K, NDArray[Any]]: ...
    @overload
    def __call__(self, handle: _ToDict[_K], to: _Torch, **o: Unpack[_Attached]) -> dict[_K, torch.Tensor]: ...
    @overload
    def __call__(self, handle: _ToDict[_K], to: _Jax, **o: Unpack[_Attached]) -> dict[_K, jax.Array]: ...
    @overload
    def __call__(self, handle: _ToDict[_K], to: _TVM, **o: Unpack[_Attached]) -> dict[_K, tvm_ffi.Tensor]: ...
    @overload
    def __call__(self, handle: _ToDict[_K], to: _Module[_T], **o: Unpack[_Attached]) -> dict[_K, _T]: ...
    @overload
    def __call__(self, handle: _ToDict[_K], to: type[_Type], **o: Unpack[_Attached]) -> dict[_K, _Type]: ...
    @overload
    def __call__(self, handle: Handle[RingReader], to: Target = ..., **o: Unpack[_Attached]) -> RingReader: ...
    @overload
    def __call__(
        self,
        handle: Mapping[str, Any] | NothingElse[Never],
        to: Target | NothingElse[Never] = ...,
        *more: KeywordOnly[Never],
        writable: bool | NothingElse[Never] = ...,
        device: DeviceLike | None = ...,
        readonly: Readonly | NothingElse[Never] = ...,
        fd: int | Sequence[int] | NothingElse[Never] | None = ...,
        lazy: bool | NothingElse[Never] = ...,
        **unknown: NoSuchOption[Never],
    ) -> Any: ...

attach: Attach
