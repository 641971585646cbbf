"""numpy for dlx: ndarray and its subclasses, and numpy scalars as 0-d arrays.

Versions: 1.26 and later. Devices: the host. Dtypes: bool, (u)int8 to 64, float16 to 64, complex64 and 128; with
ml_dtypes bfloat16, the float8, float6 and float4 kinds, (u)int1, 2 and 4 (a byte each), complex32.
Shared: every layout, any alignment, read-only kept; the dtypes of ml_dtypes by a view of the same width. Copied: other
byte order, strides that are not whole elements, scalars, packed elements of less than a byte.
Refused: masked arrays, dates, objects, strings, structures, longdouble.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import dlx
from dlx.adapter import (
    Adapter,
    ArrayInfo,
    Blocker,
    Capabilities,
    Container,
    Defect,
    Device,
    DType,
    Layout,
    Tensor,
    over_memory,
    type_name,
)
from dlx.errors import CopyRequiredError, DTypeError, LayoutError

HOST = Device("cpu")
_ML_DTYPES = {  # names in dlx and ml_dtypes -> storage dtype in numpy
    "bfloat16": "uint16",
    "complex32": "uint32",
    "float4_e2m1fn": "uint8",
    "float6_e2m3fn": "uint8",
    "float6_e3m2fn": "uint8",
    "float8_e3m4": "uint8",
    "float8_e4m3": "uint8",
    "float8_e4m3b11fnuz": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "int1": "uint8",
    "int2": "uint8",
    "int4": "uint8",
    "uint1": "uint8",
    "uint2": "uint8",
    "uint4": "uint8",
}


class _Interface:
    """A tensor's memory as an `__array_interface__`; numpy keeps it alive as the result's base."""

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
    install = "pip install numpy"
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
    extension_dtypes = {name: f"ml_dtypes.{name}" for name in _ML_DTYPES}
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
        Defect(
            does="drops the mask of a masked array on export; dlx refuses it",
            see="tests/test_defects.py",
        ),
    )

    # ---- dtypes: numpy's own, and those of ml_dtypes, which is imported at first need ------------------------------

    def native_dtype(self, attribute: str) -> Any:
        np = self.module()
        return np.dtype(getattr(np, attribute))

    @functools.cached_property
    def _extensions(self) -> frozenset[str]:
        return frozenset(name for name in _ML_DTYPES if hasattr(_ml_dtypes(), name))

    @functools.cached_property
    def storage_dtypes(self) -> Mapping[str, str]:  # type: ignore[override]
        return {name: _ML_DTYPES[name] for name in self._extensions if not self._registered(name)}

    def _registered(self, name: str) -> bool:
        """Make numpy 2.5 and later take a dtype as what it is; whole bytes only. False where that cannot be."""
        register = getattr(self.module().dtypes, "register_dlpack_dtype", None)
        code, bits, _ = DType(name)
        if register is None or bits % 8:
            return False
        try:
            register((code, bits), self.dtype_to(DType(name)))
        except ValueError:  # already registered by other code, with another one
            return False
        return True

    def known_dtypes(self) -> frozenset[str]:
        return super().known_dtypes() | self._extensions

    def dtype_to(self, dtype: DType) -> Any:
        if dtype.name not in self._extensions:
            known = self.why_untaken(dtype)
            if known is not None:
                raise DTypeError(known[0], fix=known[1])
            return super().dtype_to(dtype)
        return self.module().dtype(getattr(_ml_dtypes(), dtype.name))

    def dtype_from(self, native_dtype: Any) -> DType | None:
        if native_dtype.type.__module__ == "ml_dtypes" and native_dtype.name in self._extensions:
            return DType(native_dtype.name)
        return super().dtype_from(native_dtype)

    def why_untaken(self, dtype: DType) -> tuple[str, str] | None:
        if dtype.name not in _ML_DTYPES:
            return None
        if _ml_dtypes() is None:
            has = f"numpy has no {dtype} of its own, and ml_dtypes, which has one, is not installed"
            return has, "Run: pip install ml_dtypes."
        return f"neither numpy nor the installed ml_dtypes has {dtype}", "Run: pip install -U ml_dtypes."

    # ---- what arrays and the arrays made of scalars have in common --------------------------------------------------

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        if self.lowered.get("exports_by") == "address" or self._plain(obj).dtype.name in _ML_DTYPES:
            return self._at_its_address(obj)
        return super().export(obj, stream=stream)

    def _at_its_address(self, obj: Any) -> Tensor:
        """Return a tensor over an array of numbers in native order and whole elements, without numpy's capsule."""
        array = self._plain(obj)
        dtype = self.dtype_from(_native(array.dtype))
        assert dtype is not None
        return over_memory(
            array.__array_interface__["data"][0] if array.size else 0,
            array.shape,
            tuple(stride // array.itemsize for stride in array.strides) if _whole_elements(array) else None,
            dtype,
            HOST,
            readonly=not array.flags.writeable,
            padded=dtype.bits < 8,
            owner=obj,
        )

    def _plain(self, obj: Any) -> Any:
        """Return an array as numpy sees it: a subclass may say of itself what is not so."""
        ndarray = self.module().ndarray
        return obj if type(obj) is ndarray or not isinstance(obj, ndarray) else ndarray.view(obj, ndarray)


# ---- files that hold numpy's arrays ----------------------------------------------------------------------------------


def _flatten_npz(npz: Any) -> tuple[list[str], list[Any]]:
    """Read every member, each once."""
    return list(npz.files), [npz[name] for name in npz.files]


def _flatten_group(group: Any) -> tuple[list[str], list[Any]]:
    names = list(group)
    return names, [group[name] for name in names]


class SafeTensors(Mapping[str, Any]):
    """What safetensors.safe_open gives, as a mapping: a tensor is read when it is asked for."""

    def __init__(self, file: Any) -> None:
        self.file: Any = file.file if isinstance(file, SafeTensors) else file
        self.names = dict.fromkeys(self.file.keys())

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        return self.file.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _flatten_safe(file: Any) -> tuple[list[str], list[Any]]:
    tensors = SafeTensors(file)
    return list(tensors), list(tensors.values())


# Whatever is read from a file is made anew on each access, and nothing is put in.
_FILES = (
    Container(
        types=("numpy.lib.npyio.NpzFile", "numpy.lib._npyio_impl.NpzFile"),
        kind="mapping",
        flatten=_flatten_npz,
        mutable=False,
        elements="fresh",
        falls_to=dict,
    ),
    Container(
        types=("h5py.Group",),  # h5py.File is one
        kind="mapping",
        flatten=_flatten_group,
        elements="fresh",
        identity=lambda child: getattr(child, "id", None),  # the same for every name of one object in the file
        falls_to=dict,
    ),
    Container(
        types=("h5py.Dataset",),
        kind="wrapper",
        flatten=lambda dataset: (None, [dataset[()]]),
        unflatten=lambda dataset, keys, children, new_empty: children[0],
    ),
    Container(
        types=("safetensors.safe_open",),
        kind="mapping",
        flatten=_flatten_safe,
        mutable=False,
        elements="fresh",
        falls_to=dict,
        live=SafeTensors,
    ),
)


class NumpyAdapter(_Numpy):
    """numpy's ndarray."""

    types = ("numpy.ndarray",)
    fast_path_types = ("numpy.ndarray",)
    identity = False  # arrays of objects are refused everywhere
    containers = _FILES

    def exchange(self) -> Any:
        return _exchange(self.module())

    def guarded(self, obj: Any, *, writable: bool) -> Any:
        if not writable:
            obj.flags.writeable = False
        return obj

    def accepts(self) -> Capabilities:
        return Capabilities(
            dtypes=self.known_dtypes(),
            layouts=Layout.ANY,
            min_alignment=1,
            max_ndim=64,
            keeps_readonly=True,
            subbyte="padded",
            empty_extents="bytes",
        )

    def examine(self, obj: Any) -> Iterable[Blocker]:
        ma = sys.modules.get("numpy.ma")
        if ma is not None and isinstance(obj, ma.MaskedArray):
            yield Blocker(
                "a masked array's mask cannot cross",
                "Call .filled(value) first, or convert .data and .mask apart.",
                LayoutError,
            )
        obj = self._plain(obj)
        refused = _why_refused(obj.dtype)
        if refused is not None:
            yield Blocker(*refused, DTypeError, always=obj.dtype.kind == "O")
        elif not obj.dtype.isnative:
            yield Blocker(
                f"its elements ({obj.dtype.str}) are in the other byte order",
                "Drop copy=False.",
                resolution=_native_order,
                copies=True,
            )
        elif not _whole_elements(obj):
            yield Blocker(
                f"its byte strides {obj.strides} are not multiples of the item size {obj.dtype.itemsize}",
                "Drop copy=False.",
                resolution=self.clone,
                copies=True,
            )

    def info(self, obj: Any) -> ArrayInfo:
        kind, base, obj = type(obj), obj.base, self._plain(obj)
        itemsize = obj.dtype.itemsize
        whole = itemsize and _whole_elements(obj)
        return ArrayInfo(
            framework=self.name,
            type_name=type_name(kind),
            dtype=self.dtype_from(_native(obj.dtype)),
            dtype_name=obj.dtype.name if obj.dtype.isnative else obj.dtype.str,
            shape=obj.shape,
            strides=tuple(stride // itemsize for stride in obj.strides) if whole else None,
            device=HOST,
            nbytes=obj.nbytes,
            readonly=not obj.flags.writeable,
            address=obj.__array_interface__["data"][0] if obj.size else 0,
            owner=type_name(kind if base is None else type(base)),
            protocols=("__dlpack__", "__array_interface__", "buffer"),
        )

    def sketch(self, obj: Any) -> Tensor | None:
        return self._at_its_address(obj) if self.dtype_from(_native(self._plain(obj).dtype)) else None

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

    def examine(self, obj: Any) -> Iterable[Blocker]:
        refused = _why_refused(obj.dtype)
        if refused is not None:
            yield Blocker(*refused, DTypeError)
        else:
            yield Blocker(
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


@functools.cache
def _ml_dtypes() -> Any:
    """Return the module that has the dtypes which numpy has not, or None. It takes 4 ms to import beside numpy."""
    try:
        return importlib.import_module("ml_dtypes")
    except ImportError:
        return None


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
    if dtype.type.__module__ == "ml_dtypes" and dtype.name in _ML_DTYPES:  # whose kinds and chars are anything
        return None
    if dtype.kind == "T":
        return f"DLPack has no text ({dtype})", "Convert the text to numbers first."
    if dtype.hasobject:
        return f"dtype {dtype} holds Python objects", "Convert to a numeric dtype with .astype first."
    if dtype.kind in "mM":
        return f"DLPack has no dates or durations ({dtype})", "Call .view('int64') first and keep the unit yourself."
    if not dtype.itemsize and dtype.kind == "V":
        return f"its elements have no bytes ({dtype})", "There is nothing to convert: jax's float0 stands for zeros."
    if dtype.names is not None:
        first = f": a[{dtype.names[0]!r}]" if dtype.names else ""
        return f"DLPack has no structures ({dtype})", f"Convert the fields one by one{first}."
    if dtype.kind in "SUV" and dtype.type.__module__ == "numpy":
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
