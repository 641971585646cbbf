"""The tvm-ffi adapter: tvm_ffi.Tensor and containers.

Versions: 0.1.15 and later. Devices: the host, CUDA. Dtypes: all of DLPack, with lanes and packed sub-byte elements;
also complex dtypes, which have no Python dtype in tvm_ffi (`t.dtype` raises ValueError). Shared: all layouts and
alignments. Copied: read-only memory, because tvm_ffi.Tensor has no such flag.
Refused: elements padded to whole bytes, and tensors whose handle was moved away.

Containers: Array, List, Map and Dict contain only tensors of tvm_ffi, and become lists and dicts for other targets. A
container returned by a function may be tagged with a framework, to which it converts its elements (not its `values`);
dlx reads the elements unconverted. Each access creates a new wrapper; dlx compares elements by their handle.

Streams: the stream of tvm_ffi's environment, one per thread and device (`tvm_ffi.use_raw_stream`); dlx synchronizes
streams once per conversion.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
from collections.abc import Iterator
from types import MethodType
from typing import Any

import dlx
from dlx import adapter as api
from dlx.errors import DTypeError
from dlx_adapters import _dlx_tvm_ffi

COMPLEX = api.DType("complex64").code
_tested_issue = functools.partial(api.KnownIssue, see="tests/engine/test_defects.py")
_DEVICE_TYPES = frozenset(api.Device(name).type for name in ("cpu", "cuda", "cuda_host", "rocm_host", "cuda_managed"))


def _untag(obj: Any) -> Any:
    """Return the container in a new wrapper without a tag; only calls set tags."""
    kind: Any = type(obj)
    new = kind.__new__(kind)
    new.__init_handle_by_constructor__(_bind(), obj)
    return new


def _elements(name: str, obj: Any) -> tuple[None, list[Any]]:
    """Return the elements, faster than by iteration in Python."""
    return None, list(map(_look_up(name), itertools.repeat(_untag(obj)), range(len(obj))))


def _items(obj: Any) -> tuple[list[Any], list[Any]]:
    pairs = list(obj.items())
    return [key for key, _ in pairs], [value for _, value in pairs]


@functools.cache
def _look_up(name: str) -> Any:
    """Return tvm_ffi's function that returns a container's child at an index or key."""
    return getattr(sys.modules["tvm_ffi"]._ffi_api, f"{name}GetItem")


@functools.cache
def _bind() -> Any:
    """Bind `_dlx_tvm_ffi` to tvm-ffi's C interface; return a function of tvm-ffi that returns its argument."""
    names = ("TVMFFIFunctionCall", "TVMFFIObjectIncRef", "TVMFFIObjectDecRef", "TVMFFIErrorMoveFromRaised")
    found = _dlx_tvm_ffi.bind(*(_address(name) for name in names))
    return sys.modules["tvm_ffi"].core.Function.__from_extern_c__(found)


def _address(name: str) -> int | None:
    return ctypes.cast(getattr(sys.modules["tvm_ffi"].LIB, name), ctypes.c_void_p).value


def _unflatten(old: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    content: Any = children if keys is None else dict(zip(keys, children, strict=True))
    if new_empty is None:
        return type(old)(content)
    (new_empty.extend if keys is None else new_empty.update)(content)
    return new_empty


def _handler(name: str, kind: str, *, mutable: bool) -> api.Container:
    sequence = kind == "sequence"

    def read(obj: Any) -> tuple[Any, Any]:
        get = _look_up(name)
        # `_untag` has bound `_dlx_tvm_ffi`.
        return MethodType(get, obj), _dlx_tvm_ffi.create_child_check(obj, get) if mutable else None

    return api.Container(
        types=(f"tvm_ffi.{name}",),
        kind=kind,
        flatten=functools.partial(_elements, name) if sequence else _items,
        unflatten=_unflatten,
        new_empty=(lambda obj: type(obj)()) if mutable else None,
        mutable=mutable,
        elements="same_as",
        identity=_dlx_tvm_ffi.handle,
        holds="tvm_ffi",
        falls_to=list if sequence else dict,
        live=_untag,
        reader=read,
    )


class _DTypes(api.DTypes):
    def native(self, attribute: str) -> Any:
        return sys.modules["tvm_ffi"].dtype(attribute)

    def to_native(self, dtype: api.DType) -> Any:
        try:
            return sys.modules["tvm_ffi"].dtype.from_dlpack_data_type(tuple(dtype))
        except ValueError:
            fix = "Convert the array; its tensors support it."
            raise DTypeError(f"tvm_ffi has no dtype object for {dtype}", fix=fix) from None

    def from_native(self, native_dtype: Any) -> api.DType | None:
        return api.DType((native_dtype.type_code, native_dtype.bits, native_dtype.lanes))


class _Devices(api.Devices):
    def to_native(self, device: api.Device) -> Any:
        if device.type not in _DEVICE_TYPES:
            super().to_native(device)
        return sys.modules["tvm_ffi"].device(device.type, device.id)

    def from_native(self, native_device: Any) -> api.Device:
        return api.Device((native_device.dlpack_device_type(), native_device.index))


DTYPES = _DTypes("tvm_ffi", {each.name: each.name for each in api.DType.all() if each.code != COMPLEX})
DEVICES = _Devices()


def _current_stream(device: api.Device) -> Any:
    """Return the stream of tvm_ffi's environment; its `__dlpack__` does not synchronize."""
    return sys.modules["tvm_ffi"].get_raw_stream(DEVICES.to_native(device)) if device.name == "cuda" else None


@contextlib.contextmanager
def _on_stream(stream: api.Stream) -> Iterator[None]:
    """Return a context in which tvm_ffi uses another framework's stream."""
    with sys.modules["tvm_ffi"].use_raw_stream(DEVICES.to_native(stream.device), stream.handle):
        yield


def _exchange() -> Any:
    """Return the table of `_dlx_tvm_ffi`, which exports by tvm-ffi's C interface and imports by tvm-ffi's table."""
    tvm_ffi = sys.modules["tvm_ffi"]
    wrapper = getattr(tvm_ffi.core, "DLTensorTestWrapper", None)  # the only type with a table in 0.1.15
    maker = getattr(wrapper, "__dlpack_c_exchange_api__", None)
    export = _address("TVMFFITensorToDLPackVersioned")
    borrows = _reads_tensors(tvm_ffi)
    return _dlx_tvm_ffi.exchange_api(tvm_ffi.Tensor.__chandle__, export, maker, borrows)


def _reads_tensors(tvm_ffi: Any) -> bool:
    """Return whether `_dlx_tvm_ffi` reads sample tensors correctly."""
    kinds = (3, "float32"), ((2, 5), "int8"), ((), "bool")
    tensors = [tvm_ffi.from_dlpack(dlx.empty(shape, name)) for shape, name in kinds]
    if not _dlx_tvm_ffi.find_handles([*tensors, tvm_ffi.Tensor.__new__(tvm_ffi.Tensor)]):
        return False
    for each in tensors:
        dtype, device = DTYPES.from_native(each.dtype), DEVICES.from_native(each.device)
        assert dtype is not None
        if _dlx_tvm_ffi.read_facts(each) != (each.data_ptr(), each.shape, each.strides, tuple(dtype), tuple(device)):
            return False
    return True


_describe = api.tensor_info("__dlpack__")


class TvmFfiAdapter(api.Adapter):
    """tvm_ffi.Tensor."""

    name = package = "tvm_ffi"
    types = ("tvm_ffi.Tensor",)
    dtypes = DTYPES
    devices = DEVICES
    fast_path = api.FastPath(types=types, exchange=_exchange, owner="managed", describe=_describe)
    streams = api.StreamSupport(current=_current_stream, activate=_on_stream, quick=True)
    containers = (
        _handler("Array", "sequence", mutable=False),
        _handler("List", "sequence", mutable=True),
        _handler("Map", "mapping", mutable=False),
        _handler("Dict", "mapping", mutable=True),
    )
    known_issues = (
        _tested_issue("drops the read-only flag on import", lowers={"keeps_readonly": False}),
        _tested_issue(
            "has no complex dtype objects: t.dtype and tvm_ffi.dtype('complex64') raise ValueError",
            lowers={"names_complex": False},
        ),
        _tested_issue("__dlpack__(max_version=(0, 8)) raises AttributeError; dlx always asks for version 1"),
        _tested_issue("imports capsules of other major versions unchecked; dlx checks them first"),
        _tested_issue("accessing a tensor without a handle (moved away or never set) crashes the process"),
    )

    def describe(self, obj: Any) -> api.Description:
        if not obj.__chandle__():
            because = "it has no handle: it was moved away or never set"
            blocker = api.Blocker(because, "Convert the tensor that now has the handle.")
            return api.Description(api.ArrayInfo(self.name, api.type_name(type(obj))), (blocker,))
        tensor = self.export(obj)  # no side effects; also describes complex dtypes
        return api.Description(functools.partial(_describe, self.name, obj, tensor), (), tensor)

    def capabilities(self) -> api.Capabilities:
        every = api.Layout.ANY
        return api.Capabilities(None, _DEVICE_TYPES, layouts=every, min_alignment=1, keeps_readonly=True)

    def load(self, tensor: api.Tensor) -> Any:
        return sys.modules["tvm_ffi"].from_dlpack(tensor)


dlx_adapters = api.offer(TvmFfiAdapter())
