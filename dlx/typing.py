"""Types for annotations: what dlx takes, for functions that pass it on.

Examples
--------
>>> import dlx
>>> isinstance(dlx.empty(3, "int8"), dlx.SupportsDLPack), isinstance([1, 2], dlx.SupportsDLPack)
(True, False)
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, get_args, runtime_checkable

__all__ = ["DeviceLike", "Errors", "Options", "Outcome", "Readonly", "SupportsDLPack", "Target"]


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of any framework: whatever can hand its memory over by DLPack.

    Arrays of numpy, torch, jax, cupy and tvm-ffi are of this type, and `dlx.Tensor`. Annotate with it what your
    function takes from anybody: ``def norm(x: dlx.SupportsDLPack) -> float``.

    Notes
    -----
    The array API asks for ``__dlpack_device__`` as well. It is no part of the type, since type checkers do not see it
    in ``jax.Array``. How ``__dlpack__`` wants to be called has changed over the years; `dlx.convert` knows, so that
    nothing is said of it here but that it can be called.
    """

    def __dlpack__(self) -> Any:
        """Return a capsule that holds a DLPack tensor."""


Target: TypeAlias = "str | ModuleType | type[Any]"
"""The target of a conversion: a name (``"torch"``), a module, or an array type that an adapter lists."""

DeviceLike: TypeAlias = "str | int | tuple[int, int]"
"""Where an array is or shall be: ``"cuda:1"``, ``(2, 1)``, a `dlx.Device`, or a DLPack device type."""

Readonly: TypeAlias = Literal["copy", "error", "share"]
"""What becomes of read-only memory where the target's arrays are always writable."""

READONLY: tuple[str, ...] = get_args(Readonly)

Errors: TypeAlias = Literal["raise", "collect"]
"""Raise the first error of a container, or all of them in an ExceptionGroup."""

ERRORS: tuple[str, ...] = get_args(Errors)

Outcome: TypeAlias = Literal["same", "shared", "copied", "refused", "tree", "deferred", "unknown"]
"""What `dlx.plan` says will become of an array or container: see `dlx.Plan`."""


class Options(TypedDict, total=False):
    """The options of `dlx.convert`, for functions that pass them on: ``**options: Unpack[Options]``.

    They are `device`, `copy`, `readonly`, `detach`, `stream`, `strict` and `errors`; each may be left out.
    """

    device: DeviceLike | None
    copy: bool | None
    readonly: Readonly
    detach: bool
    stream: object
    strict: bool
    errors: Errors
