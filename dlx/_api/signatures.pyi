"""Types of `convert`, `stack` and `open`, with one overload for each kind of source and target.

- They are callable objects, as `convert` is at run time. If they were functions, pyright's strict mode would report
  them as partially unknown unless all frameworks are installed.
- Elements of a container count as arrays if they support DLPack: buffers and scalars pass through.
- mypy treats an argument with Any in its type (``NDArray[Any]``) as ambiguous if it fits overloads that differ in both
  the parameter's type and the result. So there is no overload for `object`, and all overloads use ``_Array``.
- Frameworks that are not installed are Any.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from os import PathLike
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Never, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

import jax
import torch
import tvm_ffi
from numpy.typing import NDArray
from typing_extensions import Buffer, CapsuleType

from dlx._core.tensor import Tensor
from dlx._files.mapping import FileView
from dlx._views.base import View
from dlx._views.mapping import MutableMappingView
from dlx._views.sequence import MutableSequenceView, SequenceView
from dlx.typing import DeviceLike, Errors, Options, Readonly, SupportsDLPack, Target

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_K = TypeVar("_K")

# Modules, recognized by their array type: numpy and cupy, torch and tvm_ffi, jax.
class _HasNDArray(Protocol[_T_co]):
    @property
    def ndarray(self) -> type[_T_co]: ...

class _HasTensor(Protocol[_T_co]):
    @property
    def Tensor(self) -> type[_T_co]: ...  # noqa: N802

class _HasArray(Protocol[_T_co]):
    @property
    def Array(self) -> type[_T_co]: ...  # noqa: N802

_Module: TypeAlias = _HasNDArray[_T] | _HasTensor[_T] | _HasArray[_T]

# numpy's stub declares __dlpack__ only for arrays of numbers, so this uses other attributes.
class _NumPyArray(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...

class _SupportsArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class _NamedTuple(Protocol):
    @property
    def _fields(self) -> tuple[str, ...]: ...
    def _asdict(self) -> dict[str, Any]: ...

# Any sequence but str, whose __contains__ takes str only.
class _Sequence(Protocol[_T_co]):
    def __contains__(self, value: object, /) -> bool: ...
    def __getitem__(self, index: int, /) -> _T_co: ...
    def __len__(self) -> int: ...
    def count(self, value: Any, /) -> int: ...
    def index(self, value: Any, /) -> int: ...

class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]

class _Attrs(Protocol):
    __attrs_attrs__: ClassVar[Any]

class _Tree(Protocol):
    def __dlx_tree__(self) -> Any: ...

# No object has this type, but mypy accepts any object for it after it erases type arguments. It then reports the first
# overload that takes a wrong argument as this type, in one line, instead of all overloads.
class _NoSuchOption(Protocol[_T_co]):
    def __sizeof__(self) -> _T_co: ...  # type: ignore[override]

class _ArrayOrContainer(_NoSuchOption[_T_co], Protocol[_T_co]): ...  # mypy shows this name

_Wrong: TypeAlias = _NoSuchOption[Never]
_WrongObject: TypeAlias = _ArrayOrContainer[Never]

# Their type contains the type of their arrays, which the conversion changes, so the result is Any.
_Container: TypeAlias = (
    _Dataclass | _Attrs | _Tree | SimpleNamespace | View | _Sequence[Any] | AbstractSet[Any] | Mapping[Any, Any]
)

_DLX: TypeAlias = Literal["arrow", "dlx"]
_NumPy: TypeAlias = Literal["numpy"]
_Torch: TypeAlias = Literal["torch", "pytorch"]
_Jax: TypeAlias = Literal["jax", "jaxlib"]
_TVM: TypeAlias = Literal["tvm_ffi"]

class _Free(Options, total=False):
    lazy: bool  # no effect

class _Eager(Options, total=False):
    lazy: Literal[False]

class _Place(TypedDict, total=False):
    axis: int
    dtype: object
    pad: float | None
    device: DeviceLike | None
    stream: object

class _Mapped(TypedDict, total=False):
    device: DeviceLike | None
    readonly: Readonly
    detach: bool
    dtype: object

_Path: TypeAlias = str | PathLike[str]
_Array: TypeAlias = SupportsDLPack | _SupportsArrayInterface | Buffer | CapsuleType
_Element = TypeVar("_Element", bound=SupportsDLPack | _NumPyArray)
_Type = TypeVar("_Type", bound=SupportsDLPack | _NumPyArray)

class Convert:
    """The type of `dlx.convert`."""

    __wrapped__: Callable[..., Any]
    """The Python function, without the fast path."""

    # ---- first, since mypy assumes that a class with __getattr__ has the attributes of an array

    @overload
    def __call__(self, obj: _NamedTuple, to: Target | None = ..., *, like: Any = ..., **o: Unpack[_Free]) -> Any: ...

    # ---- an array

    @overload
    def __call__(self, obj: _Array, to: _DLX, **o: Unpack[_Free]) -> Tensor: ...
    @overload
    def __call__(self, obj: _Array, to: _NumPy, **o: Unpack[_Free]) -> NDArray[Any]: ...
    @overload
    def __call__(self, obj: _Array, to: _Torch, **o: Unpack[_Free]) -> torch.Tensor: ...
    @overload
    def __call__(self, obj: _Array, to: _Jax, **o: Unpack[_Free]) -> jax.Array: ...
    @overload
    def __call__(self, obj: _Array, to: _TVM, **o: Unpack[_Free]) -> tvm_ffi.Tensor: ...
    @overload
    def __call__(self, obj: _Array, to: _Module[_T], **o: Unpack[_Free]) -> _T: ...
    @overload
    def __call__(self, obj: _Array, to: type[_Type], **o: Unpack[_Free]) -> _Type: ...
    @overload
    def __call__(self, obj: _Array, to: None = ..., *, like: Tensor, **o: Unpack[_Free]) -> Tensor: ...
    @overload
    def __call__(self, obj: _Array, to: None = ..., *, like: NDArray[Any], **o: Unpack[_Free]) -> NDArray[Any]: ...
    @overload
    def __call__(self, obj: _Array, to: None = ..., *, like: torch.Tensor, **o: Unpack[_Free]) -> torch.Tensor: ...
    @overload
    def __call__(self, obj: _Array, to: None = ..., *, like: jax.Array, **o: Unpack[_Free]) -> jax.Array: ...
    @overload
    def __call__(
        self,
        obj: _Array,
        to: Target | _Wrong,
        *,
        like: None = ...,
        device: DeviceLike | _Wrong | None = ...,
        copy: bool | _Wrong | None = ...,
        readonly: Readonly | _Wrong = ...,
        detach: bool | _Wrong = ...,
        stream: object = ...,
        strict: bool | _Wrong = ...,
        errors: Errors | _Wrong = ...,
        dtype: object = ...,
        lazy: bool | _Wrong = ...,
        **unknown: _Wrong,
    ) -> Any: ...
    @overload
    def __call__(self, obj: _Array, to: Target | None = ..., *, like: Any, **o: Unpack[_Free]) -> Any: ...

    # ---- containers

    @overload
    def __call__(self, obj: list[_Element], to: _DLX, **o: Unpack[_Eager]) -> list[Tensor]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _NumPy, **o: Unpack[_Eager]) -> list[NDArray[Any]]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _Torch, **o: Unpack[_Eager]) -> list[torch.Tensor]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _Jax, **o: Unpack[_Eager]) -> list[jax.Array]: ...
    @overload
    def __call__(self, obj: list[_Element], to: _Module[_T], **o: Unpack[_Eager]) -> list[_T]: ...
    @overload
    def __call__(self, obj: list[_Element], to: type[_Type], **o: Unpack[_Eager]) -> list[_Type]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _DLX, **o: Unpack[_Eager]) -> tuple[Tensor, ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _NumPy, **o: Unpack[_Eager]) -> tuple[NDArray[Any], ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _Torch, **o: Unpack[_Eager]) -> tuple[torch.Tensor, ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _Jax, **o: Unpack[_Eager]) -> tuple[jax.Array, ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: _Module[_T], **o: Unpack[_Eager]) -> tuple[_T, ...]: ...
    @overload
    def __call__(self, obj: tuple[_Element, ...], to: type[_Type], **o: Unpack[_Eager]) -> tuple[_Type, ...]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _DLX, **o: Unpack[_Eager]) -> dict[_K, Tensor]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _NumPy, **o: Unpack[_Eager]) -> dict[_K, NDArray[Any]]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _Torch, **o: Unpack[_Eager]) -> dict[_K, torch.Tensor]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _Jax, **o: Unpack[_Eager]) -> dict[_K, jax.Array]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: _Module[_T], **o: Unpack[_Eager]) -> dict[_K, _T]: ...
    @overload
    def __call__(self, obj: dict[_K, _Element], to: type[_Type], **o: Unpack[_Eager]) -> dict[_K, _Type]: ...
    @overload
    def __call__(
        self, obj: list[Any], to: Target | None = ..., *, like: Any = ..., **o: Unpack[_Eager]
    ) -> list[Any]: ...
    @overload
    def __call__(
        self, obj: list[Any], to: Target | None = ..., *, like: Any = ..., lazy: Literal[True], **o: Unpack[Options]
    ) -> MutableSequenceView[Any]: ...
    @overload
    def __call__(
        self, obj: tuple[Any, ...], to: Target | None = ..., *, like: Any = ..., **o: Unpack[_Eager]
    ) -> tuple[Any, ...]: ...
    @overload
    def __call__(
        self,
        obj: tuple[Any, ...],
        to: Target | None = ...,
        *,
        like: Any = ...,
        lazy: Literal[True],
        **o: Unpack[Options],
    ) -> SequenceView[Any]: ...
    @overload
    def __call__(
        self, obj: dict[_K, Any], to: Target | None = ..., *, like: Any = ..., **o: Unpack[_Eager]
    ) -> dict[_K, Any]: ...
    @overload
    def __call__(
        self, obj: dict[_K, Any], to: Target | None = ..., *, like: Any = ..., lazy: Literal[True], **o: Unpack[Options]
    ) -> MutableMappingView[_K, Any]: ...
    @overload
    def __call__(
        self,
        obj: list[Any] | tuple[Any, ...] | dict[Any, Any],
        to: Target | None = ...,
        *,
        like: Any = ...,
        lazy: bool,
        **o: Unpack[Options],
    ) -> Any: ...
    @overload
    def __call__(
        self,
        obj: _Container,
        to: Target | _Wrong | None = ...,
        *,
        like: Any = ...,
        device: DeviceLike | _Wrong | None = ...,
        copy: bool | _Wrong | None = ...,
        readonly: Readonly | _Wrong = ...,
        detach: bool | _Wrong = ...,
        stream: object = ...,
        strict: bool | _Wrong = ...,
        errors: Errors | _Wrong = ...,
        dtype: object = ...,
        lazy: bool | _Wrong = ...,
        **unknown: _Wrong,
    ) -> Any: ...

    # ---- into memory of the caller

    @overload
    def __call__(self, obj: Any, *, out: _T, dtype: object = ..., detach: bool = ..., strict: bool = ...) -> _T: ...

    # ---- other objects

    @overload
    def __call__(self, obj: _WrongObject, to: Target, **o: Unpack[_Free]) -> Any: ...

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
        self,
        arrays: Iterable[Any] | _Wrong,
        to: Target | _Wrong,
        *,
        axis: int = ...,
        dtype: object = ...,
        pad: float | None = ...,
        device: DeviceLike | None = ...,
        stream: object = ...,
        **unknown: _Wrong,
    ) -> Any: ...
    @overload
    def __call__(
        self, arrays: Iterable[Any], *, out: _T, axis: int = ..., dtype: object = ..., pad: float | None = ...
    ) -> _T: ...

stack: Stack

class Open:
    """The type of `dlx.open`."""

    @overload
    def __call__(self, path: _Path, to: _DLX = ..., **o: Unpack[_Mapped]) -> FileView[Tensor]: ...
    @overload
    def __call__(self, path: _Path, to: _NumPy, **o: Unpack[_Mapped]) -> FileView[NDArray[Any]]: ...
    @overload
    def __call__(self, path: _Path, to: _Torch, **o: Unpack[_Mapped]) -> FileView[torch.Tensor]: ...
    @overload
    def __call__(self, path: _Path, to: _Jax, **o: Unpack[_Mapped]) -> FileView[jax.Array]: ...
    @overload
    def __call__(self, path: _Path, to: _TVM, **o: Unpack[_Mapped]) -> FileView[tvm_ffi.Tensor]: ...
    @overload
    def __call__(self, path: _Path, to: _Module[_T], **o: Unpack[_Mapped]) -> FileView[_T]: ...
    @overload
    def __call__(self, path: _Path, to: type[_Type], **o: Unpack[_Mapped]) -> FileView[_Type]: ...
    @overload
    def __call__(
        self,
        path: _Path | _Wrong,
        to: Target | _Wrong = ...,
        *,
        device: DeviceLike | None = ...,
        readonly: Readonly = ...,
        detach: bool = ...,
        dtype: object = ...,
        **unknown: _Wrong,
    ) -> FileView[Any]: ...

open: Open
