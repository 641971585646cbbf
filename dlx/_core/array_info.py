"""`ArrayInfo`: the description of an array, made without reading its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dlx._core.native import Tensor, lib
from dlx._core.types import Device, DType, contiguous
from dlx._support.display import Shown, table
from dlx._support.module import set_module
from dlx._support.reflect import type_name
from dlx._support.text import one_line


class _Fields(NamedTuple):
    framework: str
    type_name: str
    dtype: DType | None = None
    dtype_name: str = ""
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    device: Device | None = None
    nbytes: int | None = 0
    readonly: bool = False
    address: int | None = None
    owner: str = ""
    protocols: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@set_module("dlx")
class ArrayInfo(Shown, _Fields):
    """The description of an array, obtained without an export or a synchronization.

    Attributes
    ----------
    framework
        Name of the array's adapter: ``"numpy"``; ``"dlpack"`` for a generic producer.
    type_name
        The Python type.
    dtype
        The dtype of the values; None if DLPack lacks it.
    dtype_name
        The framework's name of the dtype (``">f4"``).
    shape
        Extents, ``(ndim,)``; None if only an export can determine them.
    strides
        In elements, ``(ndim,)``; None if unknown or not multiples of the item size.
    device
        Where the memory is; None if unknown.
    nbytes
        Bytes of all elements, without gaps; None if unknown.
    readonly
        Whether the memory is read-only.
    address
        Of the first element; 0 without memory, None if only an export can determine it.
    owner
        Type of the object that keeps the memory alive.
    protocols
        Protocols that the object supports.
    notes
        Other properties that affect conversions (``"requires_grad"``).
    """

    __slots__ = ()

    @property
    def alignment(self) -> int:
        """Largest power of two, up to 4096 bytes, that divides the address; 0 without an address."""
        return min(self.address & -self.address, 4096) if self.address else 0

    @classmethod
    def of_tensor(
        cls,
        tensor: Tensor,
        framework: str,
        kind: type | str,
        protocols: tuple[str, ...] = (),
        dtype_name: str | None = None,
    ) -> ArrayInfo:
        """Return the description of a tensor; `framework` and `kind` (a type or its name) are those of its source."""
        name, dtype, nbytes = kind if isinstance(kind, str) else type_name(kind), tensor.dtype, tensor.nbytes
        fields = (
            framework,
            name,
            dtype,
            dtype_name or dtype.name,
            tensor.shape,
            tensor.strides,
            tensor.device,
            nbytes,
            tensor.readonly,
            tensor.data_ptr if nbytes else 0,
            name,
            protocols,
            (),  # no notes
        )
        return tuple.__new__(cls, fields)  # twice as fast as calling the class

    def contiguous(self) -> bool:
        """Return whether the elements are in row-major order without gaps, ignoring extents of 1."""
        return self.shape is None or self.strides is None or contiguous(self.shape, self.strides)

    def __str__(self) -> str:
        if self.shape is None:
            return self.type_name
        parts = [f"{self.dtype_name}[{', '.join(map(str, self.shape))}]"]
        if not self.contiguous():
            parts.append(f"strides={self.strides}")
        if self.device is not None and self.device[0] != lib.kDLCPU:
            parts.append(str(self.device))
        if self.readonly:
            parts.append("read-only")
        return f"{self.type_name} ({', '.join(parts)})"

    def __repr__(self) -> str:
        return f"<dlx.ArrayInfo {one_line(str(self))}>"

    def _non_defaults(self) -> list[tuple[str, Any]]:
        """Return the names and values of the fields that differ from their defaults."""
        default = _Fields._field_defaults
        return [(name, value) for name, value in zip(self._fields, self, strict=True) if value != default.get(name)]

    def _table(self) -> str:
        rows = [
            (name, one_line(value if isinstance(value, str) else _text(value))) for name, value in self._non_defaults()
        ]
        return table(one_line(str(self)), ("", ""), rows)

    def __rich_repr__(self) -> Iterator[Any]:
        yield from self._non_defaults()


def _text(value: Any) -> str:
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        return ", ".join(value)
    return str(value)
