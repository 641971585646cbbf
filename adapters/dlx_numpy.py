"""numpy for dlx: ndarray and its subclasses, and numpy scalars as 0-d arrays.

Versions: 1.26 and later. Devices: the host. Dtypes: bool, (u)int8 to 64, float16 to 64, complex64 and 128.
Shared: every layout, any alignment, read-only kept. Copied: other byte order, strides that are not whole elements,
scalars. Refused: masked arrays, dates, objects, strings, structures, longdouble.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import dlx
from dlx.adapter import (
    Adapter,
    ArrayInfo,
    Capabilities,
    Container,
    Defect,
    Device,
    Hindrance,
    Layout,
    Tensor,
    type_name,
)
from dlx.errors import CopyRequiredError, DTypeError, LayoutError

HOST = Device("cpu")


class _Interface:
    """Memory of a tensor in the words of the array interface; numpy keeps it alive as the result's base."""

    def __init__(self, tensor: Tensor, typestr: str) -> None:
        self.tensor = tensor
        itemsize = int(typestr[2:])
        self.__array_interface__ = {
            "version": 3,
            "shape": tensor.shape,
            "typestr": typestr,
            "data": (tensor.data_ptr, tensor.readonly),
            "strides": tuple(stride * itemsize for stride in tensor.strides),
        }


class _Numpy(Adapter):
    """What arrays and scalars have in common."""

    name = "numpy"
    package = "numpy"
    install = 'pip install "dlx[numpy]"'
    dtypes = {
        "bool": "bool_",
        "int8": "int8",
        "int16": "int16",
        "int32": "int32",
        "int64": "int64",
        "uint8": "uint8",
        "uint16": "uint16",
        "uint32": "uint32",
        "uint64": "uint64",
        "float16": "float16",
        "float32": "float32",
        "float64": "float64",
        "complex64": "complex64",
        "complex128": "complex128",
    }
    defects = (
        Defect(
            does="np.from_dlpack gives read-only arrays: before 2.1 (legacy capsules) always, up to 2.2.4 by mistake",
            see="https://github.com/numpy/numpy/issues/28599",
            before="2.2.5",
            lowers={"imports_by": "array interface"},
        ),
        Defect(
            does="exports legacy capsules only, and no read-only array at all",
            see="https://numpy.org/doc/2.1/release/2.1.0-notes.html",
            before="2.1",
            lowers={"exports_by": "address"},
        ),
        Defect(
            does="holds at most 32 dimensions",
            see="https://numpy.org/doc/2.0/release/2.0.0-notes.html",
            before="2.0",
            lowers={"max_ndim": 32},
        ),
    )

    def native_dtype(self, attribute: str) -> Any:
        np = self.module()
        return np.dtype(getattr(np, attribute))


def _open_npz(npz: Any) -> tuple[list[str], list[Any]]:
    """Read every member, each once."""
    return list(npz.files), [npz[name] for name in npz.files]


class NumpyAdapter(_Numpy):
    """numpy's ndarray."""

    types = ("numpy.ndarray",)
    lane = ("numpy.ndarray",)
    identity = False  # arrays of objects are refused everywhere
    import_keeps = True
    containers = (
        # What np.load gives for an .npz file: each access reads a member anew, and nothing can be put in.
        Container(
            types=("numpy.lib.npyio.NpzFile", "numpy.lib._npyio_impl.NpzFile"),
            kind="mapping",
            open=_open_npz,
            mutable=False,
            elements="fresh",
            falls_to=dict,
        ),
    )

    def exchange(self) -> Any:
        return _exchange(self.module())

    def guarded(self, obj: Any, *, writable: bool) -> Any:
        if not writable:
            obj.flags.writeable = False
        return obj

    def accepts(self) -> Capabilities:
        return Capabilities(
            dtypes=self.known_dtypes(), layouts=Layout.ANY, min_alignment=1, max_ndim=64, keeps_readonly=True
        )

    def examine(self, obj: Any) -> Iterable[Hindrance]:
        ma = sys.modules.get("numpy.ma")
        if ma is not None and isinstance(obj, ma.MaskedArray):
            yield Hindrance(
                "a masked array's mask cannot cross",
                "Call .filled(value) first, or convert .data and .mask apart.",
                LayoutError,
            )
        refused = _why_refused(obj.dtype)
        if refused is not None:
            yield Hindrance(*refused, DTypeError, always=obj.dtype.kind == "O")
        elif not obj.dtype.isnative:
            yield Hindrance(
                f"its elements ({obj.dtype.str}) are in the other byte order",
                "Drop copy=False.",
                cure=_native_order,
                copies=True,
            )
        elif not _whole_elements(obj):
            yield Hindrance(
                f"its byte strides {obj.strides} are not multiples of the item size {obj.dtype.itemsize}",
                "Drop copy=False.",
                cure=self.clone,
                copies=True,
            )

    def info(self, obj: Any) -> ArrayInfo:
        itemsize = obj.dtype.itemsize
        whole = itemsize and _whole_elements(obj)
        return ArrayInfo(
            framework=self.name,
            type_name=type_name(type(obj)),
            dtype=self.dtype_from(_native(obj.dtype)),
            dtype_name=obj.dtype.name if obj.dtype.isnative else obj.dtype.str,
            shape=obj.shape,
            strides=tuple(stride // itemsize for stride in obj.strides) if whole else None,
            device=HOST,
            nbytes=obj.nbytes,
            readonly=not obj.flags.writeable,
            address=obj.__array_interface__["data"][0] if obj.size else 0,
            owner=type_name(type(obj if obj.base is None else obj.base)),
            protocols=("__dlpack__", "__array_interface__", "buffer"),
        )

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        if self.lowered.get("exports_by") == "address":
            tensor = self.sketch(obj)
            assert tensor is not None
            return tensor
        return super().export(obj, stream=stream)

    def clone(self, obj: Any) -> Any:
        return obj.copy(order="K")

    def load(self, tensor: Tensor) -> Any:
        np = self.module()
        if self.lowered.get("imports_by") == "array interface":
            dtype = self.dtype_to(tensor.dtype)
            if tensor.data_ptr == 0:  # no element, no address: the interface cannot say so
                return np.empty(tensor.shape, dtype)
            return np.asarray(_Interface(tensor, dtype.str))
        return np.from_dlpack(tensor)


def _exchange(np: Any) -> Any:
    """Return the table of `_dlx_numpy`, if what it reads in real arrays is what numpy says of them."""
    import _dlx_numpy

    core = sys.modules.get("numpy._core._multiarray_umath") or sys.modules["numpy.core._multiarray_umath"]
    capsule = _dlx_numpy.exchange_api(core._ARRAY_API)
    for name in ("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "complex128"):
        array = np.zeros((3, 4, 5), dtype=name)[1:, ::-1, ::2]
        strides = tuple(stride // array.itemsize for stride in array.strides)
        expected = (array.__array_interface__["data"][0], array.shape, strides, tuple(dlx.DType(name)))
        if _dlx_numpy.facts(array) != expected:
            return None
    return capsule


class NumpyScalarAdapter(_Numpy):
    """numpy's scalars: values, not memory, so each conversion makes a 0-d array of its own."""

    name = "numpy scalar"
    types = ("numpy.generic",)
    root_only = True

    def examine(self, obj: Any) -> Iterable[Hindrance]:
        refused = _why_refused(obj.dtype)
        if refused is not None:
            yield Hindrance(*refused, DTypeError)
        else:
            yield Hindrance(
                "a scalar is a value, not memory to share",
                "Drop copy=False.",
                CopyRequiredError,
                self.module().array,
                copies=True,
            )

    def info(self, obj: Any) -> ArrayInfo:
        return ArrayInfo(
            framework=self.name,
            type_name=type_name(type(obj)),
            dtype=self.dtype_from(_native(obj.dtype)),
            dtype_name=obj.dtype.name,
            shape=(),
            strides=(),
            device=HOST,
            nbytes=obj.nbytes,
            readonly=True,
            owner=type_name(type(obj)),
            protocols=("buffer",),
        )


def _whole_elements(obj: Any) -> bool:
    """Return whether every stride that is ever taken is a multiple of the item size."""
    itemsize = obj.dtype.itemsize
    steps = (stride for stride, extent in zip(obj.strides, obj.shape, strict=True) if extent > 1)
    return not obj.size or not any(stride % itemsize for stride in steps)


def _native(dtype: Any) -> Any:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _native_order(obj: Any) -> Any:
    return obj.astype(_native(obj.dtype), order="K")


def _why_refused(dtype: Any) -> tuple[str, str] | None:
    """Return (reason, fix) for a dtype that DLPack cannot say, or None."""
    if dtype.hasobject and dtype.kind != "T":
        return f"dtype {dtype} holds Python objects", "Convert to a numeric dtype with .astype first."
    if dtype.kind in "mM":
        return f"DLPack has no dates or durations ({dtype})", "Call .view('int64') first and keep the unit yourself."
    if dtype.names is not None:
        first = f": a[{dtype.names[0]!r}]" if dtype.names else ""
        return f"DLPack has no structures ({dtype})", f"Convert the fields one by one{first}."
    if dtype.kind in "SUTV" and dtype.type.__module__ == "numpy":
        return f"DLPack has no text or raw bytes ({dtype})", "Call .view('uint8') if the bytes are what you need."
    if dtype.char in "gG" and dtype.itemsize != (8 if dtype.char == "g" else 16):
        wide = "float64" if dtype.char == "g" else "complex128"
        return f"{dtype} has no counterpart in other frameworks", f"Call .astype('{wide}') first."
    if dtype.type.__module__ not in ("numpy", "numpy.dtypes"):
        return f"dtype {dtype} is not one of numpy's own", f"View it as an integer of {8 * dtype.itemsize} bits first."
    return None


@dlx.hookimpl
def dlx_adapters() -> list[Adapter]:
    """Return numpy's adapters."""
    return [NumpyAdapter(), NumpyScalarAdapter()]
