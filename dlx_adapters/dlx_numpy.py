"""The numpy adapter: ndarray, its subclasses, and numpy scalars as 0-d arrays.

Versions: 1.26 and later. Devices: the host. Dtypes: bool, (u)int8 to 64, float16 to 64, complex64 and 128; with
ml_dtypes also bfloat16, float8, float6 and float4 types, (u)int1, 2 and 4 (one byte each), complex32.
Shared: all layouts and alignments, with the read-only flag; dtypes of ml_dtypes as a view of the same width. Copied:
non-native byte order, strides of partial elements, scalars, packed elements of less than a byte.
Refused: masked arrays, arrays with units, dates, objects, strings, structured dtypes, longdouble.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import dlx
from dlx import adapter as api
from dlx.errors import DTypeError, LayoutError
from dlx_adapters import _dlx_numpy

HOST = api.Device("cpu")
_OWN = {name: name for name in (*api.COMMON_DTYPES, "complex64", "complex128") if name != "bfloat16"}
_OWN["bool"] = "bool_"
# Names in dlx and ml_dtypes -> storage dtype in numpy.
_ML_DTYPES = {
    each.name: f"uint{max(each.bits, 8)}" for each in api.DType.all() if each.name not in _OWN and each.lanes == 1
}


class _Interface:
    """An object with `__array_interface__` over a tensor; numpy keeps it alive as the array's base."""

    def __init__(self, tensor: api.Tensor, typestr: str) -> None:
        self.tensor = tensor
        itemsize = int(typestr[2:])
        self.__array_interface__ = {
            "version": 3,
            "shape": tensor.shape,
            "typestr": typestr,
            "data": (tensor.data_ptr, tensor.readonly),
            "strides": tuple(stride * itemsize for stride in tensor.strides),
        }


class _DTypes(api.DTypes):
    """Dtypes of numpy and ml_dtypes, which is imported when it is first needed."""

    def native(self, attribute: str) -> Any:
        np = sys.modules[self.package]
        return np.dtype(getattr(np, attribute))

    @functools.cached_property
    def _extensions(self) -> frozenset[str]:
        return frozenset(name for name in _ML_DTYPES if hasattr(_ml_dtypes(), name))

    @functools.cached_property
    def storage(self) -> Mapping[str, str]:  # type: ignore[override]
        return {name: stored for name, stored in self.table_storage.items() if not self._register(name)}

    @functools.cached_property
    def table_storage(self) -> Mapping[str, str]:
        return {name: _ML_DTYPES[name] for name in self._extensions}  # `_dlx_numpy` ignores registered dtypes

    def _register(self, name: str) -> bool:
        """Register a whole-byte dtype for DLPack (numpy 2.5 and later); return whether that succeeded."""
        register = getattr(sys.modules[self.package].dtypes, "register_dlpack_dtype", None)
        code, bits, _ = api.DType(name)
        if register is None or bits % 8:
            return False
        try:
            register((code, bits), self.to_native(api.DType(name)))
        except ValueError:  # other code has registered another dtype
            return False
        return True

    def known(self) -> frozenset[str]:
        return super().known() | self._extensions

    def to_native(self, dtype: api.DType) -> Any:
        if dtype.name in self._extensions:
            return sys.modules[self.package].dtype(getattr(_ml_dtypes(), dtype.name))
        if dtype.name in _ML_DTYPES:
            reason, fix = self.refusals()[dtype.name]
            raise DTypeError(reason, fix=fix)
        return super().to_native(dtype)

    def from_native(self, native_dtype: Any) -> api.DType | None:
        if isinstance(native_dtype, type):  # a scalar type: numpy.float32, ml_dtypes.bfloat16
            native_dtype = sys.modules[self.package].dtype(native_dtype)
        if native_dtype.type.__module__ == "ml_dtypes" and native_dtype.name in self._extensions:
            return api.DType(native_dtype.name)
        return super().from_native(native_dtype)

    def cast(self, array: Any, dtype: api.DType, out: Any = None) -> Any:
        np = sys.modules[self.package]
        if out is not None:
            np.copyto(out, array, casting="unsafe")
            return out
        array, new = np.asanyarray(array), self.to_native(dtype)  # of a scalar, too
        if not np.can_cast(array.dtype, new, "unsafe"):  # ml_dtypes lacks casts between its dtypes
            array = array.astype("int8" if "int" in array.dtype.name else "f4")
        return array.astype(new, order="K")

    def refusals(self) -> dict[str, tuple[str, str]]:
        """Return (reason, fix) for the missing dtypes of ml_dtypes."""
        missing = _ML_DTYPES.keys() - self._extensions
        if _ml_dtypes() is None:
            reason = "numpy has no {}, and ml_dtypes, which provides it, is not installed"
            return {name: (reason.format(name), "Run: pip install ml_dtypes.") for name in missing}
        reason = "neither numpy nor the installed ml_dtypes has {}"
        return {name: (reason.format(name), "Run: pip install -U ml_dtypes.") for name in missing}


DTYPES = _DTypes("numpy", _OWN, extension={name: f"ml_dtypes.{name}" for name in _ML_DTYPES})


class _Numpy(api.Adapter):
    """Base class of the adapters for arrays and scalars."""

    name = package = "numpy"
    dtypes = DTYPES
    known_issues = (
        api.KnownIssue(
            does="np.from_dlpack returns read-only arrays: before 2.1 (legacy capsules) always, up to 2.2.4 by a bug",
            see="https://github.com/numpy/numpy/issues/28599",
            before="2.2.5",
            lowers={"imports_by": "array interface"},
        ),
        api.KnownIssue(
            does="exports only legacy capsules, and no read-only arrays",
            see="https://numpy.org/doc/2.1/release/2.1.0-notes.html",
            before="2.1",
            lowers={"exports_by": "address"},
        ),
        api.KnownIssue(
            does="supports at most 32 dimensions",
            see="https://numpy.org/doc/2.0/release/2.0.0-notes.html",
            before="2.0",
            lowers={"ndims": (0, 32)},
        ),
        api.KnownIssue("drops the mask of a masked array on export; dlx refuses it", "tests/engine/test_defects.py"),
    )

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        array = _as_ndarray(obj)
        if _has_own_export(obj) and "exports_by" not in self.lowered and array.dtype.name not in _ML_DTYPES:
            return super().export(obj, stream=stream)
        dtype = DTYPES.from_native(array.dtype)
        assert dtype is not None
        strides, readonly = [stride // array.itemsize for stride in array.strides], not array.flags.writeable
        facts = _address(array), array.shape, strides, dtype, HOST
        return api.over_memory(*facts, readonly=readonly, padded=dtype.bits < 8, owner=obj)


# ---- files with arrays -----------------------------------------------------------------------------------------------


_FILES = (
    api.file_handler("numpy.lib.npyio.NpzFile", "numpy.lib._npyio_impl.NpzFile"),
    # h5py.File is a group. All names of one object have the same id.
    api.file_handler("h5py.Group", identity=lambda child: getattr(child, "id", None)),
    api.file_handler(
        "safetensors.safe_open", names=lambda file: file.keys(), read=lambda file, name: file.get_tensor(name)
    ),
    api.Container(types=("h5py.Dataset",), kind="wrapper", flatten=lambda dataset: (None, [dataset[()]])),
)


def _protect(obj: Any, writable: bool) -> Any:
    if not writable:
        obj.flags.writeable = False
    return obj


def _exchange() -> Any:
    """Return the table of `_dlx_numpy`, if it reads sample arrays correctly."""
    np = sys.modules["numpy"]
    core = sys.modules.get("numpy._core._multiarray_umath") or sys.modules["numpy.core._multiarray_umath"]
    capsule = _dlx_numpy.exchange_api(core._ARRAY_API)
    for name in ("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "complex128"):
        if not _reads_correctly(np.zeros((3, 4, 5), dtype=name)[1:, ::-1, ::2], api.DType(name)):
            return None
    return capsule


def _reads_correctly(array: Any, dtype: api.DType) -> bool:
    """Return whether `_dlx_numpy` and numpy describe an array equally."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    expected = (array.__array_interface__["data"][0], array.shape, strides, tuple(dtype))
    return bool(_dlx_numpy.read_facts(array) == expected)


def _keeps_export(kind: Any) -> bool:
    """Return whether a subclass uses numpy's export and has no attribute that would be lost."""
    for base in kind.__mro__:
        attributes = base.__dict__  # hasattr of a class formats an error for each missing name
        for name in _LOST_NAMES:
            if name in attributes:
                return False
    return kind.__dlpack__ is sys.modules["numpy"].ndarray.__dlpack__


def _export_extension(obj: Any) -> api.Tensor | None:
    """Return the tensor of an array with a whole-byte dtype of ml_dtypes; the table exports the next ones."""
    native_dtype = obj.dtype
    if not native_dtype.isnative:
        return None
    scalar = native_dtype.type  # hashing a dtype crashes numpy if memory runs out
    known = scalar.__module__ == "ml_dtypes" and obj.size
    dtype = _extension_of(scalar) if known else None
    if dtype is None:
        return None
    return api.viewed(dlx.convert(_as_ndarray(obj).view(f"u{obj.itemsize}"), to="dlx"), dtype)


_CHARS = "?bBhHiIlLqQefdFD"  # dtypes that DLPack supports in native byte order


def _export_copy(obj: Any) -> Any:
    """Return a copy in native byte order, or None to leave the array to the Python path."""
    dtype = obj.dtype
    if dtype.isnative and _whole_elements(obj):
        return None
    return obj.astype(dtype.type) if dtype.char in _CHARS else None


@functools.cache
def _extension_of(scalar: type) -> api.DType | None:
    """Return the dtype for a whole-byte scalar type of ml_dtypes, or None."""
    np = sys.modules["numpy"]
    dtype = DTYPES.from_native(np.dtype(scalar))
    if dtype is None or dtype.bits % 8:
        return None
    code, bits, _ = dtype
    _dlx_numpy.extend(scalar, code, bits)
    if not _reads_correctly(np.zeros((2, 3), scalar)[:, ::-1], dtype):
        _dlx_numpy.extend(scalar, code, 0)
    return dtype


def _export_scalar(obj: Any) -> api.Tensor:
    """Return the tensor of a new 0-d array of a scalar."""
    return api.consumed(sys.modules["numpy"].array(obj).__dlpack__(max_version=(1, 0), copy=True))


_PROTOCOLS = ("__dlpack__", "__array_interface__", "buffer")

# Attributes of subclasses that a conversion would lose: (attribute, reason, fix).
_LOST_ATTRIBUTES = (
    ("mask", "a masked array's mask would be lost", "Call .filled(value) first, or convert .data and .mask."),
    ("unit", "its unit ({}) would be lost", "Convert its .value, and keep its .unit yourself."),
    ("units", "its units ({}) would be lost", "Convert its .view(numpy.ndarray), and keep its .units yourself."),
)
_LOST_NAMES = tuple(name for name, *_ in _LOST_ATTRIBUTES)


def _describe_exported(framework: str, obj: Any, tensor: api.Tensor) -> api.ArrayInfo:
    """Describe an array, mostly from its tensor."""
    base, kind, name = obj.base, type(obj), "numpy.ndarray"
    if kind is not sys.modules["numpy"].ndarray:
        obj, name = _as_ndarray(obj), api.type_name(kind)
    return api.ArrayInfo(
        framework,
        name,
        tensor.dtype,
        _name_of(obj.dtype),
        tensor.shape,
        tensor.strides if obj.size else tuple(stride // obj.itemsize for stride in obj.strides),
        HOST,
        tensor.nbytes,
        tensor.readonly,
        tensor.data_ptr if obj.size else 0,
        name if base is None else api.type_name(type(base)),
        _PROTOCOLS,
    )


@functools.lru_cache(maxsize=64)  # numpy does not cache the text
def _name_of(native_dtype: Any) -> str:
    return str(native_dtype)


class NumpyAdapter(_Numpy):
    """numpy.ndarray."""

    types = ("numpy.ndarray",)
    namespaces = ("array_api_compat.numpy", "numpy")
    containers = _FILES
    fast_path = api.FastPath(
        types=("numpy.ndarray",),
        subclasses=_keeps_export,
        exchange=_exchange,
        export=_export_extension,
        unblocks=_export_copy,
        checks_same=True,  # object arrays are refused for every target
        guards=tuple(api.Guard(name, optional=True) for name, *_ in _LOST_ATTRIBUTES),  # instance attributes
        describe=_describe_exported,
    )
    writes = api.WriteTracking(guarded=_protect)

    def describe(self, obj: Any) -> api.Description:
        if type(obj) is sys.modules["numpy"].ndarray and obj.dtype.isbuiltin == 1 and "exports_by" not in self.lowered:
            try:  # the fastest way, without side effects
                tensor = api.consumed(obj.__dlpack__(max_version=(1, 0)))
                return api.Description(functools.partial(_describe_exported, self.name, obj, tensor), (), tensor)
            except BufferError:
                pass
        info = functools.partial(self._info, obj)
        blockers = tuple(self._blockers(obj))
        own = _has_own_export(obj)
        return api.Description(info, blockers, None if blockers or own else self.export(obj), needs_export=own)

    def _blockers(self, obj: Any) -> Iterator[api.Blocker]:
        for name, because, fix in _LOST_ATTRIBUTES if type(obj) is not sys.modules["numpy"].ndarray else ():
            value = None if callable(getattr(type(obj), name, None)) else getattr(obj, name, None)
            if value is not None:
                yield api.Blocker(because.format(value), fix, LayoutError if name == "mask" else DTypeError)
        obj = _as_ndarray(obj)
        refused = _find_refusal(obj.dtype)
        if refused is not None:
            yield api.Blocker(*refused, DTypeError, also_blocks=("stay",) if obj.dtype.kind == "O" else ())
        elif not obj.dtype.isnative:
            because = f"its elements ({obj.dtype.str}) are in the other byte order"
            yield api.Blocker(because, resolution=_native_order, needs="copy")
        elif not _whole_elements(obj):
            because = f"its byte strides {obj.strides} are not multiples of the item size {obj.dtype.itemsize}"
            yield api.Blocker(because, resolution=self.copy, needs="copy")

    def _info(self, obj: Any) -> api.ArrayInfo:
        kind, base, obj = type(obj), obj.base, _as_ndarray(obj)
        itemsize = obj.dtype.itemsize
        whole = itemsize and _whole_elements(obj)
        return api.ArrayInfo(
            framework=self.name,
            type_name=api.type_name(kind),
            dtype=DTYPES.from_native(_native(obj.dtype)),
            # Not cached for structured dtypes: long, and their classes may be temporary.
            dtype_name=_name_of(obj.dtype) if obj.dtype.names is None else obj.dtype.name,
            shape=obj.shape,
            strides=tuple(stride // itemsize for stride in obj.strides) if whole else None,
            device=HOST,
            nbytes=obj.nbytes,
            readonly=not obj.flags.writeable,
            address=_address(obj),
            owner=api.type_name(kind if base is None else type(base)),
            protocols=_PROTOCOLS,
        )

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(
            dtypes=DTYPES.known(),
            layouts=api.Layout.ANY,
            min_alignment=1,
            keeps_readonly=True,
            subbyte="padded",
            empty_extents="bytes",
            refusals=DTYPES.refusals(),
        )

    def load(self, tensor: api.Tensor) -> Any:
        np = sys.modules["numpy"]
        if "imports_by" not in self.lowered:
            array = np.from_dlpack(tensor)
        elif tensor.data_ptr:
            return np.asarray(_Interface(tensor, DTYPES.to_native(tensor.dtype).str))
        else:
            array = np.empty(tensor.shape, DTYPES.to_native(tensor.dtype))  # the interface needs an address
        if tensor.readonly and array.flags.writeable:  # numpy allocates memory for empty arrays
            array.flags.writeable = False
        return array

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        return obj.copy(order="K")


class NumpyScalarAdapter(_Numpy):
    """numpy scalars; each conversion creates a new 0-d array."""

    name = "numpy scalar"
    types = ("numpy.generic",)
    namespaces = ("array_api_compat.numpy", "numpy")
    containers = (api.Container(types=types, kind="leaf"),)  # converted only at the root
    fast_path = api.FastPath(types=("numpy.generic",), subclasses=lambda kind: True, export=_export_scalar)

    def describe(self, obj: Any) -> api.Description:
        refused = _find_refusal(obj.dtype)
        because, new = "a scalar has no memory to share", sys.modules["numpy"].array
        blocker = api.Blocker(*refused, DTypeError) if refused else api.Blocker(because, resolution=new, needs="copy")
        return api.Description(functools.partial(self._info, obj), (blocker,))

    def _info(self, obj: Any) -> api.ArrayInfo:
        kind, dtype = api.type_name(type(obj)), DTYPES.from_native(_native(obj.dtype))
        facts = (), (), HOST, obj.nbytes, True
        return api.ArrayInfo(self.name, kind, dtype, obj.dtype.name, *facts, owner=kind, protocols=("buffer",))


@functools.cache
def _ml_dtypes() -> Any:
    """Return ml_dtypes, or None if it is not installed. Its import takes 4 ms after numpy's."""
    try:
        return importlib.import_module("ml_dtypes")
    except ImportError:
        return None


def _as_ndarray(obj: Any) -> Any:
    """Return an array as ndarray, because a subclass may override attributes."""
    ndarray = sys.modules["numpy"].ndarray
    return obj if type(obj) is ndarray or not isinstance(obj, ndarray) else ndarray.view(obj, ndarray)


def _has_own_export(obj: Any) -> bool:
    """Return whether a subclass overrides ``__dlpack__``."""
    return type(obj).__dlpack__ is not sys.modules["numpy"].ndarray.__dlpack__


def _address(array: Any) -> int:
    return array.__array_interface__["data"][0] if array.size else 0


def _whole_elements(obj: Any) -> bool:
    """Return whether all strides of extents above 1 are multiples of the item size."""
    itemsize = obj.dtype.itemsize
    steps = (stride for stride, extent in zip(obj.strides, obj.shape, strict=True) if extent > 1)
    return not obj.size or not any(stride % itemsize for stride in steps)


def _native(dtype: Any) -> Any:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _native_order(obj: Any) -> Any:
    return obj.astype(obj.dtype.type)


_ENCODE = "Encode it as numbers first, for example with numpy.unique(x, return_inverse=True)[1]."
_OBJECTS = "Call numpy.array(list(x)) first, or dlx.stack(x, to=...) if they are arrays of one shape."


def _find_refusal(dtype: Any) -> tuple[str, str] | None:
    """Return (reason, fix) for a dtype that DLPack lacks, or None."""
    if dtype.type.__module__ == "ml_dtypes" and dtype.name in _ML_DTYPES:  # with arbitrary kinds and chars
        return None
    if dtype.kind == "T":
        return f"DLPack has no text ({dtype})", _ENCODE
    if dtype.kind in "mM":
        return f"DLPack has no dates or durations ({dtype})", "Call .view('int64') first and keep the unit yourself."
    if not dtype.itemsize and dtype.kind == "V":
        return f"its elements have no bytes ({dtype})", "Use zeros of another dtype; jax's float0 represents zeros."
    if dtype.names is not None:
        first = f": a[{dtype.names[0]!r}]" if dtype.names else ""
        return f"DLPack has no structures ({dtype})", f"Convert the fields one by one{first}."
    if dtype.hasobject:
        return f"dtype {dtype} contains Python objects", _OBJECTS
    if dtype.kind in "SU" and dtype.type.__module__ == "numpy":
        return f"DLPack has no text ({dtype})", _ENCODE
    if dtype.kind == "V" and dtype.type.__module__ == "numpy":
        return f"DLPack has no raw bytes ({dtype})", "Call .view('uint8') if the bytes are what you need."
    if dtype.char in "gG" and dtype.itemsize != (8 if dtype.char == "g" else 16):
        wide = "float64" if dtype.char == "g" else "complex128"
        return f"{dtype} has no counterpart in other frameworks", f"Call .astype('{wide}') first."
    if dtype.type.__module__ not in ("numpy", "numpy.dtypes"):
        return f"dtype {dtype} is not a numpy dtype", f"View it as an integer of {8 * dtype.itemsize} bits first."
    return None


dlx_adapters = api.offer(NumpyAdapter(), NumpyScalarAdapter())
