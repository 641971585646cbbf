"""Types for annotations of functions that pass arrays and options to dlx.

Examples
--------
>>> import dlx
>>> isinstance(dlx.empty(3, "int8"), dlx.SupportsDLPack), isinstance([1, 2], dlx.SupportsDLPack)
(True, False)
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, get_args, runtime_checkable

__all__ = [
    "AnyArray",
    "DTypeLike",
    "DeviceLike",
    "Errors",
    "Options",
    "Outcome",
    "Readonly",
    "SupportsDLPack",
    "Target",
]


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of any framework that supports DLPack.

    Arrays of numpy, torch, jax, cupy and tvm-ffi have this type, and `dlx.Tensor`. Use it in functions that accept
    arrays of any framework: ``def norm(x: dlx.SupportsDLPack) -> float``.

    Notes
    -----
    The array API also requires ``__dlpack_device__``. It is not part of the type, since type checkers do not find it in
    ``jax.Array``. The parameters of ``__dlpack__`` have changed over the years and are not part of the type either;
    `dlx.convert` supports all versions.
    """

    def __dlpack__(self) -> Any:
        """Return a capsule that holds a DLPack tensor."""


AnyArray: TypeAlias = Any
"""An array of any framework, whose attributes are not checked: for functions that compute with arrays of any type.

Use it where `SupportsDLPack` is too strict: ``@dlx.using("numpy") def center(x: AnyArray) -> AnyArray``.
"""

Target: TypeAlias = "str | ModuleType | type[Any]"
"""The target of a conversion: a name (``"torch"``), a module, or an array type that an adapter lists."""

DeviceLike: TypeAlias = object
"""A device: ``"cuda:1"``, ``(2, 1)``, a `dlx.Device`, a DLPack device type, or a framework's own device object.

Frameworks' device objects, such as `torch.device`, have no common attributes, so type checkers accept any object.
"""

DTypeLike: TypeAlias = object
"""A floating dtype by name, a `dlx.DType`, a framework's dtype, or a mapping: ``{"float64": "float32"}``."""

Readonly: TypeAlias = Literal["copy", "error", "share"]
"""How targets whose arrays are always writable get read-only memory."""

READONLY: tuple[str, ...] = get_args(Readonly)

Errors: TypeAlias = Literal["raise", "collect", "pass"]
"""Raise the first error of a container, or all errors in an ExceptionGroup; or keep what cannot be converted."""

ERRORS: tuple[str, ...] = get_args(Errors)

Outcome: TypeAlias = Literal["same", "shared", "copied", "refused", "passed", "tree", "deferred", "unknown"]
"""The outcome of a conversion, see `dlx.Plan`."""


class _ArrayOptions(TypedDict, total=False):
    """The options that have the same meaning for an array and a container."""

    device: DeviceLike | None
    copy: bool | None
    readonly: Readonly
    detach: bool
    stream: object
    wait: bool
    strict: bool
    dtype: DTypeLike


class Options(_ArrayOptions, total=False):
    """The options of `dlx.convert`, for functions that pass them on: ``**options: Unpack[Options]``.

    They are `device`, `copy`, `readonly`, `detach`, `stream`, `wait`, `strict`, `errors` and `dtype`; each is optional.
    """

    errors: Errors


def __dir__() -> list[str]:
    return __all__
