"""numpy for dlx: ndarray and its subclasses, and numpy scalars as 0-d arrays.

Versions: 1.26 and later. Devices: the host. Dtypes: bool, (u)int8 to 64, float16 to 64, complex64 and 128; with
ml_dtypes bfloat16, the float8, float6 and float4 kinds, (u)int1, 2 and 4 (a byte each), complex32.
Shared: every layout, any alignment, read-only kept; the dtypes of ml_dtypes by a view of the same width. Copied: other
byte order, strides that are not whole elements, scalars, packed elements of less than a byte.
Refused: masked arrays, arrays with a unit, dates, objects, strings, structures, longdouble.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import _dlx_numpy

import dlx
from dlx import adapter as api
from dlx.errors import DTypeError, LayoutError

HOST = api.Device("cpu")
_OWN = {name: name for name in (*api.COMMON_DTYPES, "complex64", "complex128") if name != "bfloat16"}
_OWN["bool"] = "bool_"
# Names in dlx and ml_dtypes -> storage dtype in numpy.
_ML_DTYPES = {
    each.name: f"uint{max(each.bits, 8)}" for each in api.DType.all() if each.name not in _OWN and each.lanes == 1
}


class _Interface:
    """A tensor's memory as an `__array_interface__`; numpy keeps it alive as the result's base."""

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
    """numpy's own dtypes, and those of ml_dtypes, which is imported at first need."""

    def native(self, attribute: str) -> Any:
        np = sys.modules[self.package]
        return np.dtype(getattr(np, attribute))

    @functools.cached_property
    def _extensions(self) -> frozenset[str]:
        return frozenset(name for name in _ML_DTYPES if hasattr(_ml_dtypes(), name))

    @functools.cached_property
    def storage(self) -> Mapping[str, str]:  # type: ignore[override]
        return {name: stored for name, stored in self.table_storage.items() if not self._registered(name)}

    @functools.cached_property
    def table_storage(self) -> Mapping[str, str]:
        return {name: _ML_DTYPES[name] for name in self._extensions}  # what numpy was told, `_dlx_numpy` was not

    def _registered(self, name: str) -> bool:
        """Make numpy 2.5 and later take a dtype of whole bytes under its name; return whether it does."""
        register = getattr(sys.modules[self.package].dtypes, "register_dlpack_dtype", None)
        code, bits, _ = api.DType(name)
        if register is None or bits % 8:
            return False
        try:
            register((code, bits), self.to_native(api.DType(name)))
        except ValueError:  # already registered by other code, with another one
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

    def refusals(self) -> dict[str, tuple[str, str]]:
        """Return (reason, fix) for the dtypes that ml_dtypes would add."""
        missing = _ML_DTYPES.keys() - self._extensions
        if _ml_dtypes() is None:
            has = "numpy has no {} of its own, and ml_dtypes, which has one, is not installed"
            return {name: (has.format(name), "Run: pip install ml_dtypes.") for name in missing}
        has = "neither numpy nor the installed ml_dtypes has {}"
        return {name: (has.format(name), "Run: pip install -U ml_dtypes.") for name in missing}


DTYPES = _DTypes("numpy", _OWN, extension={name: f"ml_dtypes.{name}" for name in _ML_DTYPES})


class _Numpy(api.Adapter):
    """What arrays and scalars have in common: a scalar is exported as an array made of it."""

    name = package = "numpy"
    dtypes = DTYPES
    known_issues = (
        api.KnownIssue(
            does="np.from_dlpack gives read-only arrays: before 2.1 (legacy capsules) always, up to 2.2.4 by mistake",
            see="https://github.com/numpy/numpy/issues/28599",
            before="2.2.5",
            lowers={"imports_by": "array interface"},
        ),
        api.KnownIssue(
            does="exports legacy capsules only, and no read-only array at all",
            see="https://numpy.org/doc/2.1/release/2.1.0-notes.html",
            before="2.1",
            lowers={"exports_by": "address"},
        ),
        api.KnownIssue(
            does="holds at most 32 dimensions",
            see="https://numpy.org/doc/2.0/release/2.0.0-notes.html",
            before="2.0",
            lowers={"ndims": (0, 32)},
        ),
        api.KnownIssue("drops the mask of a masked array on export; dlx refuses it", "tests/engine/test_defects.py"),
    )

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        array = _plain(obj)
        if _has_own_export(obj) and "exports_by" not in self.lowered and array.dtype.name not in _ML_DTYPES:
            return super().export(obj, stream=stream)
        dtype = DTYPES.from_native(array.dtype)
        assert dtype is not None
        strides, readonly = [stride // array.itemsize for stride in array.strides], not array.flags.writeable
        facts = _address(array), array.shape, strides, dtype, HOST
        return api.over_memory(*facts, readonly=readonly, padded=dtype.bits < 8, owner=obj)


# ---- files that hold numpy's arrays ----------------------------------------------------------------------------------


_FILES = (
    api.file_handler("numpy.lib.npyio.NpzFile", "numpy.lib._npyio_impl.NpzFile"),
    # h5py.File is a group. The id is the same for every name of one object in the file.
    api.file_handler("h5py.Group", identity=lambda child: getattr(child, "id", None)),
    api.file_handler(
        "safetensors.safe_open", names=lambda file: file.keys(), read=lambda file, name: file.get_tensor(name)
    ),
    api.Container(types=("h5py.Dataset",), kind="wrapper", flatten=lambda dataset: (None, [dataset[()]])),
)


def _guarded(obj: Any, writable: bool) -> Any:
    if not writable:
        obj.flags.writeable = False
    return obj


def _exchange() -> Any:
    """Return the table of `_dlx_numpy`, if it reads real arrays right."""
    np = sys.modules["numpy"]
    core = sys.modules.get("numpy._core._multiarray_umath") or sys.modules["numpy.core._multiarray_umath"]
    capsule = _dlx_numpy.exchange_api(core._ARRAY_API)
    for name in ("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "complex128"):
        if not _reads_right(np.zeros((3, 4, 5), dtype=name)[1:, ::-1, ::2], api.DType(name)):
            return None
    return capsule


def _reads_right(array: Any, dtype: api.DType) -> bool:
    """Return whether `_dlx_numpy` reads in an array what numpy says of it."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    expected = (array.__array_interface__["data"][0], array.shape, strides, tuple(dtype))
    return bool(_dlx_numpy.read_facts(array) == expected)


def _keeps_export(kind: Any) -> bool:
    """Return whether a subclass exports its memory as numpy does, and its class says nothing of the elements."""
    for name in _MEANT:  # a loop: it is asked whenever the class has changed
        if hasattr(kind, name):
            return False
    return kind.__dlpack__ is sys.modules["numpy"].ndarray.__dlpack__


def _export_extension(obj: Any) -> api.Tensor | None:
    """Return the tensor of an array whose dtype is one of ml_dtypes of whole bytes; the table does it from then on."""
    native_dtype = obj.dtype
    if not native_dtype.isnative:  # `_export_copy` does it; what follows takes as long as the copy of a small one
        return None
    scalar = native_dtype.type  # numpy dies of the hash of a dtype where memory is lacking
    known = scalar.__module__ == "ml_dtypes" and obj.size
    dtype = _extension_of(scalar) if known else None
    if dtype is None:
        return None
    return api.viewed(dlx.convert(_plain(obj).view(f"u{obj.itemsize}"), to="dlx"), dtype)


_CHARS = "?bBhHiIlLqQefdFD"  # numpy's letters for the dtypes that a copy in native order makes DLPack's


def _export_copy(obj: Any) -> Any:
    """Return a copy in native byte order; None if the Python path must explain a refusal."""
    dtype = obj.dtype
    if type(obj) is not sys.modules["numpy"].ndarray or dtype.char not in _CHARS:
        return None
    if dtype.isnative and _whole_elements(obj):  # the table refused it for another reason
        return None
    return _native_order(obj)


@functools.cache  # these types live as long as ml_dtypes
def _extension_of(scalar: type) -> api.DType | None:
    """Return the dtype of dlx for one of ml_dtypes that takes whole bytes, or None."""
    np = sys.modules["numpy"]
    dtype = DTYPES.from_native(np.dtype(scalar))
    if dtype is None or dtype.bits % 8:
        return None
    code, bits, _ = dtype
    _dlx_numpy.extend(scalar, code, bits)
    if not _reads_right(np.zeros((2, 3), scalar)[:, ::-1], dtype):
        _dlx_numpy.extend(scalar, code, 0)
    return dtype


def _export_scalar(obj: Any) -> api.Tensor:
    """Return a tensor over a new array for a scalar."""
    return api.consumed(sys.modules["numpy"].array(obj).__dlpack__(max_version=(1, 0), copy=True))


_PROTOCOLS = ("__dlpack__", "__array_interface__", "buffer")

# Attributes of subclasses that no other framework keeps: (attribute, reason, fix).
_MEANINGS = (
    (
        "mask",
        "a masked array's mask would be lost",
        "Call .filled(value) first, or convert .data and .mask.",
    ),
    ("unit", "its unit ({}) would be lost", "Convert its .value, and keep its .unit yourself."),
    ("units", "its units ({}) would be lost", "Convert its .view(numpy.ndarray), and keep its .units yourself."),
)
_MEANT = tuple(name for name, *_ in _MEANINGS)


def _exported_info(framework: str, obj: Any, tensor: api.Tensor) -> api.ArrayInfo:
    """Return the description of an array that has a tensor, which answers most of it."""
    base, kind, name = obj.base, type(obj), "numpy.ndarray"
    if kind is not sys.modules["numpy"].ndarray:
        obj, name = _plain(obj), api.type_name(kind)
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


@functools.lru_cache(maxsize=64)  # numpy makes the text each time
def _name_of(native_dtype: Any) -> str:
    return str(native_dtype)


class NumpyAdapter(_Numpy):
    """numpy's ndarray."""

    types = ("numpy.ndarray",)
    namespaces = ("array_api_compat.numpy", "numpy")
    containers = _FILES
    fast_path = api.FastPath(
        types=("numpy.ndarray",),
        subclasses=_keeps_export,
        exchange=_exchange,
        export=_export_extension,
        unblocks=_export_copy,
        checks_same=True,  # arrays of objects are refused everywhere
        guards=tuple(api.Guard(name, optional=True) for name, *_ in _MEANINGS),  # attributes of one array
        describe=_exported_info,
    )
    writes = api.WriteTracking(guarded=_guarded)

    def describe(self, obj: Any) -> api.Description:
        if type(obj) is sys.modules["numpy"].ndarray and obj.dtype.isbuiltin == 1 and "exports_by" not in self.lowered:
            try:  # numpy's own export is harmless, knows best, and is the fastest way
                tensor = api.consumed(obj.__dlpack__(max_version=(1, 0)))
                return api.Description(functools.partial(_exported_info, self.name, obj, tensor), (), tensor)
            except BufferError:
                pass
        info = functools.partial(self._info, obj)
        blockers = tuple(self._blockers(obj))
        own = _has_own_export(obj)
        return api.Description(info, blockers, None if blockers or own else self.export(obj), needs_export=own)

    def _blockers(self, obj: Any) -> Iterator[api.Blocker]:
        for name, because, fix in _MEANINGS if type(obj) is not sys.modules["numpy"].ndarray else ():
            said = None if callable(getattr(type(obj), name, None)) else getattr(obj, name, None)
            if said is not None:
                yield api.Blocker(because.format(said), fix, LayoutError if name == "mask" else DTypeError)
        obj = _plain(obj)
        refused = _why_refused(obj.dtype)
        if refused is not None:
            yield api.Blocker(*refused, DTypeError, also_blocks=("stay",) if obj.dtype.kind == "O" else ())
        elif not obj.dtype.isnative:
            because = f"its elements ({obj.dtype.str}) are in the other byte order"
            yield api.Blocker(because, resolution=_native_order, needs="copy")
        elif not _whole_elements(obj):
            because = f"its byte strides {obj.strides} are not multiples of the item size {obj.dtype.itemsize}"
            yield api.Blocker(because, resolution=self.copy, needs="copy")

    def _info(self, obj: Any) -> api.ArrayInfo:
        kind, base, obj = type(obj), obj.base, _plain(obj)
        itemsize = obj.dtype.itemsize
        whole = itemsize and _whole_elements(obj)
        return api.ArrayInfo(
            framework=self.name,
            type_name=api.type_name(kind),
            dtype=DTYPES.from_native(_native(obj.dtype)),
            # A structure's is long, and it may be of a class that goes.
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
        if tensor.readonly and array.flags.writeable:  # without an address numpy makes new memory
            array.flags.writeable = False
        return array

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        return obj.copy(order="K")


class NumpyScalarAdapter(_Numpy):
    """numpy's scalars: values, not memory, so each conversion makes a new 0-d array."""

    name = "numpy scalar"
    types = ("numpy.generic",)
    namespaces = ("array_api_compat.numpy", "numpy")
    containers = (api.Container(types=types, kind="leaf"),)  # they are converted only as the root
    fast_path = api.FastPath(types=("numpy.generic",), subclasses=lambda kind: True, export=_export_scalar)

    def describe(self, obj: Any) -> api.Description:
        refused = _why_refused(obj.dtype)
        because, make = "a scalar is a value, not memory to share", sys.modules["numpy"].array
        blocker = api.Blocker(*refused, DTypeError) if refused else api.Blocker(because, resolution=make, needs="copy")
        return api.Description(functools.partial(self._info, obj), (blocker,))

    def _info(self, obj: Any) -> api.ArrayInfo:
        kind, dtype = api.type_name(type(obj)), DTYPES.from_native(_native(obj.dtype))
        facts = (), (), HOST, obj.nbytes, True
        return api.ArrayInfo(self.name, kind, dtype, obj.dtype.name, *facts, owner=kind, protocols=("buffer",))


@functools.cache
def _ml_dtypes() -> Any:
    """Return the module that has the dtypes which numpy has not, or None. It takes 4 ms to import beside numpy."""
    try:
        return importlib.import_module("ml_dtypes")
    except ImportError:
        return None


def _plain(obj: Any) -> Any:
    """Return an array as numpy sees it: attributes of a subclass may be wrong."""
    ndarray = sys.modules["numpy"].ndarray
    return obj if type(obj) is ndarray or not isinstance(obj, ndarray) else ndarray.view(obj, ndarray)


def _has_own_export(obj: Any) -> bool:
    """Return whether a subclass may export something else than its memory."""
    return type(obj).__dlpack__ is not sys.modules["numpy"].ndarray.__dlpack__


def _address(array: Any) -> int:
    return array.__array_interface__["data"][0] if array.size else 0


def _whole_elements(obj: Any) -> bool:
    """Return whether every stride that is ever taken is a multiple of the item size."""
    itemsize = obj.dtype.itemsize
    steps = (stride for stride, extent in zip(obj.strides, obj.shape, strict=True) if extent > 1)
    return not obj.size or not any(stride % itemsize for stride in steps)


def _native(dtype: Any) -> Any:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _native_order(obj: Any) -> Any:
    return obj.astype(obj.dtype.type)


_ENCODE = "Encode it as numbers first, as numpy.unique(x, return_inverse=True)[1] does."
_OBJECTS = "Call numpy.array(list(x)) first, or dlx.stack(x, to=...) if they are arrays of one shape."


def _why_refused(dtype: Any) -> tuple[str, str] | None:
    """Return (reason, fix) for a dtype that DLPack cannot say, or None."""
    if dtype.type.__module__ == "ml_dtypes" and dtype.name in _ML_DTYPES:  # whose kinds and chars are anything
        return None
    if dtype.kind == "T":
        return f"DLPack has no text ({dtype})", _ENCODE
    if dtype.kind in "mM":
        return f"DLPack has no dates or durations ({dtype})", "Call .view('int64') first and keep the unit yourself."
    if not dtype.itemsize and dtype.kind == "V":
        return f"its elements have no bytes ({dtype})", "There is nothing to convert: jax's float0 stands for zeros."
    if dtype.names is not None:
        first = f": a[{dtype.names[0]!r}]" if dtype.names else ""
        return f"DLPack has no structures ({dtype})", f"Convert the fields one by one{first}."
    if dtype.hasobject:
        return f"dtype {dtype} holds Python objects", _OBJECTS
    if dtype.kind in "SU" and dtype.type.__module__ == "numpy":
        return f"DLPack has no text ({dtype})", _ENCODE
    if dtype.kind == "V" and dtype.type.__module__ == "numpy":
        return f"DLPack has no raw bytes ({dtype})", "Call .view('uint8') if the bytes are what you need."
    if dtype.char in "gG" and dtype.itemsize != (8 if dtype.char == "g" else 16):
        wide = "float64" if dtype.char == "g" else "complex128"
        return f"{dtype} has no counterpart in other frameworks", f"Call .astype('{wide}') first."
    if dtype.type.__module__ not in ("numpy", "numpy.dtypes"):
        return f"dtype {dtype} is not one of numpy's own", f"View it as an integer of {8 * dtype.itemsize} bits first."
    return None


dlx_adapters = api.offer(NumpyAdapter(), NumpyScalarAdapter())
