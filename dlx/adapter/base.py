"""`Adapter`, the base class of adapters, and helpers for its methods."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from dlx._core import cuda, native
from dlx._core.array_info import ArrayInfo
from dlx._core.stream import Stream
from dlx._core.tensor import Tensor
from dlx._core.types import IS_COPIED, READ_ONLY, SUBBYTE_PADDED, Device, DType, host_readable
from dlx._protocols import dlpack
from dlx._support.locks import remove_property_locks
from dlx._support.reflect import TypeCache, type_name
from dlx.adapter.declarations import (
    OWNER_BOUNDS,
    Arrays,
    Blocker,
    Capabilities,
    Compound,
    Container,
    FastPath,
    Guard,
    KnownIssue,
    Layout,
    Owner,
    Placement,
    StreamSupport,
    WriteTracking,
)
from dlx.adapter.gradients import CompiledFunction, GradSupport, Operation
from dlx.errors import DeviceError, DTypeError, FrameworkNotInstalledError, PluginError

if TYPE_CHECKING:
    from importlib import metadata

__all__ = [
    "COMMON_DTYPES", "OWNER_BOUNDS", "Adapter", "ArrayInfo", "Arrays", "Blocker", "Capabilities", "CompiledFunction",
    "Compound", "Container", "DType", "DTypes", "Description", "Device", "Devices", "FastPath", "GradSupport", "Guard",
    "KnownIssue", "Layout", "Operation", "Owner", "Placement", "ReportedDevices", "Stream", "StreamSupport", "Tensor",
    "WriteTracking", "arrow_exchange", "at_rest", "buffer_exchange", "consumed", "forward", "keeping", "look_up",
    "over_memory", "require_cuda", "tensor_info", "type_name", "unmarked", "viewed",
]  # fmt: skip

COMMON_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
"""The dtypes that almost every framework has under these names."""


def installed_version(package: str) -> str:
    """Return the version of the distribution that installed a package, or ``""``."""
    from importlib import metadata

    for name in dict.fromkeys((package, package.replace("_", "-"), package.partition(".")[0])):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return next((each.version for each in find_distributions(package.partition(".")[0])), "")


def find_distributions(root: str) -> Iterator[metadata.Distribution]:
    """Yield the distributions that installed parts of a root package.

    `importlib.metadata.packages_distributions` would parse the file lists of all distributions.
    """
    from importlib import metadata

    for each in metadata.distributions():
        declared = (each.read_text("top_level.txt") or "").split()
        files = "" if declared else f"\n{each.read_text('RECORD')}"
        if root in declared or f"\n{root}/" in files or f"\n{root}.py" in files:
            yield each


def version_of(adapter: Adapter) -> str:
    """Return the version of an imported framework, or ``"unknown"``."""
    package = adapter.package
    for module in (get_package(package), sys.modules.get(package.partition(".")[0])):
        version = getattr(module, "__version__", None)
        if version is not None:
            return str(version)
    return installed_version(package) or "unknown"


def classes_of(adapter: Adapter) -> tuple[type, ...]:
    """Return the array types of an adapter whose modules are imported."""
    types = (look_up(name) for name in adapter.types)
    return adapter._classes or tuple(kind for kind in types if isinstance(kind, type))


def get_package(package: str) -> ModuleType:
    """Return an imported package; raise FrameworkNotInstalledError if it is not imported."""
    module = sys.modules.get(package)
    if module is None:
        raise FrameworkNotInstalledError(f"{package} is not imported", fix=f"Import it first: import {package}.")
    return module


class DTypes:
    """The dtypes of a framework, and their conversion from and to dlx's dtypes.

    Parameters
    ----------
    package
        Importable name of the package that contains them.
    names
        Mapping from dlx's names to attributes of the package, which may contain dots: ``{"bool": "bool_"}``; or only
        names, if both are equal. Dtypes that the installed version lacks are ignored.
    extension
        Dtypes of another package, with their names there: ``{"bfloat16": "ml_dtypes.bfloat16"}``. A subclass handles
        them in `to_native` and `from_native`.
    storage
        Dtypes that the framework has but cannot import, with a dtype of the same width that it can import:
        ``{"bfloat16": "uint16"}``. dlx passes the array as that dtype, and `viewed` restores the original one.
    switches
        Attributes of the package that change the result of `Adapter.capabilities` at run time, with hashable values:
        ``("config.jax_enable_x64",)``. dlx calls `capabilities` once for each combination of values.
    """

    storage: Mapping[str, str] = {}
    switches: tuple[str, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        remove_property_locks(cls)

    def __init__(
        self,
        package: str,
        names: Mapping[str, str] | Iterable[str],
        *,
        extension: Mapping[str, str] | None = None,
        storage: Mapping[str, str] | None = None,
        switches: tuple[str, ...] = (),
    ) -> None:
        self.names = names if isinstance(names, Mapping) else {name: name for name in names}
        self.package, self.extension, self.switches = package, extension or {}, switches
        if storage is not None:
            self.storage = storage

    def native(self, attribute: str) -> Any:
        """Return the framework's dtype for one value of `names`, or None if the installed version lacks it."""
        return look_up(f"{self.package}.{attribute}")

    @functools.cached_property
    def _to_native(self) -> dict[DType, Any]:
        get_package(self.package)
        pairs = ((DType(name), self.native(attribute)) for name, attribute in self.names.items())
        return {dtype: native_dtype for dtype, native_dtype in pairs if native_dtype is not None}

    @functools.cached_property
    def _from_native(self) -> dict[Any, DType]:
        return {native_dtype: dtype for dtype, native_dtype in self._to_native.items()}

    def to_native(self, dtype: DType) -> Any:
        """Return the framework's dtype for a dtype of dlx; raise DTypeError if the framework lacks it."""
        native_dtype = self._to_native.get(dtype)
        if native_dtype is None:
            names = ", ".join(sorted(self.known()))
            raise DTypeError(f"{self.package} has no dtype {dtype}", fix=f"Use one of {names}.")
        return native_dtype

    def from_native(self, native_dtype: Any) -> DType | None:
        """Return dlx's dtype for a dtype of the framework, or None if DLPack lacks it."""
        try:
            found = self._from_native.get(native_dtype)
        except TypeError:  # such as an extension type without a hash
            found = None
        # numpy's np.dtype("float32") equals np.float32, with another hash.
        return found or next((dtype for each, dtype in self._from_native.items() if each == native_dtype), None)

    def known(self) -> frozenset[str]:
        """Return dlx's names of the dtypes that the installed version has."""
        return frozenset(dtype.name for dtype in self._to_native)

    def native_name(self, name: str) -> str:
        """Return the framework's name of a dtype, or ``""``, without importing the framework."""
        return self.names.get(name) or self.extension.get(name, "")

    @property
    def table_storage(self) -> Mapping[str, str]:
        """`storage` for the fast path. Override it if the exchange table supports fewer dtypes than `Adapter.load`."""
        return self.storage

    def viewed(self, array: Any, dtype: DType) -> Any:
        """Return an array over the same memory with its original dtype, if it was loaded with a storage dtype.

        The default calls ``array.view(native dtype)``.
        """
        return array.view(self.to_native(dtype))

    def cast(self, array: Any, dtype: DType, out: Any = None) -> Any:
        """Return a copy of an array in a dtype, made by the framework, with the same class, device and graph.

        The copy has no blocker that needs a copy. With `out`, an array of the framework with this shape and dtype, the
        method writes to that instead, on any device. If a subclass does not override it, dlx casts host memory.
        """
        raise NotImplementedError


class Devices:
    """The devices of a framework, and their conversion from and to dlx's devices. The default: host memory only.

    Parameters
    ----------
    read
        ``read(native_device)`` returns the `Device` for a device object of the framework, for `from_native`. None: the
        framework has no device objects.
    moves
        Whether `Adapter.copy` can copy to another device of the framework. If not, dlx moves its arrays.

    Attributes
    ----------
    pins
        Whether `new_array` can allocate pinned host memory, for ``device="cuda_host"``.
    """

    moves: bool = True
    pins: bool = False
    _read: Callable[[Any], Device] | None = None

    def __init__(self, read: Callable[[Any], Device] | None = None, *, moves: bool = True) -> None:
        self._read, self.moves = read, moves

    def to_native(self, device: Device) -> Any:
        """Return the framework's device object for a device of dlx; raise DeviceError if the framework lacks it."""
        if not host_readable(device):
            raise DeviceError(f"it supports only host memory, not {device}", fix="Pass device='cpu'.")
        return "cpu"

    def from_native(self, native_device: Any) -> Device:
        """Return dlx's device for a device of the framework; raise DeviceError if DLPack lacks it."""
        has_name = self._read is None or isinstance(native_device, str)
        return Device(native_device) if has_name else self._read(native_device)  # type: ignore[misc]

    def of(self, obj: Any) -> Device | None:
        """Return the device of an array without an export, or None if unknown.

        dlx calls this if `Adapter.describe` returns no device. The default is the host; None in a subclass.
        """
        return Device("cpu") if type(self) is Devices else None

    def default(self) -> Device:
        """Return the device for arrays from devices that the framework lacks. The default is the host."""
        return Device("cpu")

    def current(self, device_type: int) -> int:
        """Return the id of the framework's current device of a type, for ``device="cuda"``."""
        return 0

    def activate(self, device: Device) -> AbstractContextManager[Any]:
        """Return a context that makes a device current for the driver and the framework."""
        return cuda.at(device)

    def new_array(self, shape: Sequence[int], dtype: DType, device: Device, strides: Sequence[int]) -> Any:
        """Return a new, uninitialized array on a device, from the framework's allocator and on its current stream.

        dlx copies into it. `strides` are in elements and describe a dense array. None, the default: dlx allocates the
        memory itself; with pinned memory it raises an error.
        """
        return None

    def stack(self, arrays: Sequence[Any], out: Any, axis: int) -> Any:
        """Copy arrays of the framework along a new axis of `out`, or of a new array if it is None; return that.

        They have one shape, dtype and device, and any strides. The copies run on the framework's current stream.
        Override this if the framework does it with one kernel. The default: dlx copies each array. None: the same.
        """
        raise NotImplementedError

    def available(self) -> Iterable[Any]:
        """Return the framework's objects for the devices of this machine; the default returns the host's.

        `dlx devices` prints them. The call may initialize the devices.
        """
        yield self.to_native(Device("cpu"))


def has_device_objects(devices: Devices) -> bool:
    """Return whether `Devices.from_native` supports device objects of the framework."""
    return devices._read is not None or type(devices).from_native is not Devices.from_native


class ReportedDevices(Devices):
    """The devices of a framework that imports only host memory and whose arrays have ``__dlpack_device__``.

    Pinned memory counts as host memory.
    """

    def of(self, obj: Any) -> Device | None:
        """Return the device from ``__dlpack_device__``, or None without that method."""
        device = dlpack.device_of(obj)
        return Device("cpu") if device is not None and host_readable(device) else device


class Description(NamedTuple):
    """An array before its export, described without reading data or synchronizing.

    Attributes
    ----------
    info
        Its `ArrayInfo`, or a function without arguments that returns it; the function is faster, because most
        conversions do not call it. None: dlx describes `tensor`, or exports the array.
    blockers
        The reasons that block its conversion.
    tensor
        The result of `Adapter.export`, if the export calls no function of the producer; dlx then does not call
        `export`. None if there are blockers, or if the export calls the producer.
    needs_export
        Whether the export may differ from `info`, as for a subclass with its own ``__dlpack__``.
    device
        The device, if it is known without `info`. None: dlx uses `tensor`, `info` or `Devices.of`.
    """

    info: Any = None
    blockers: tuple[Blocker, ...] = ()
    tensor: Tensor | None = None
    needs_export: bool = False
    device: Device | None = None


class Adapter:
    """The adapter of one framework. Subclass it, set the attributes, and override methods if necessary.

    Attributes
    ----------
    name
        The target's name: ``convert(x, to=name)``.
    package
        Importable name of the framework; dlx imports it only as a target.
    install
        The command that installs it: ``pip install ...``.
    types
        Importable names of the most general array types; dlx calls `issubclass` once per type.
    namespaces
        Importable modules with functions of its arrays, for `dlx.array_namespace`: the first that is installed. Empty:
        ``__array_namespace__`` of the arrays.
    dtypes, devices
        Its dtypes and devices.
    arrays
        Unusual properties of its arrays.
    containers
        Containers of the framework, and its arrays that consist of dense arrays.
    known_issues
        Known faults of its versions.
    is_tracing
        ``is_tracing()`` returns whether new arrays of this thread become part of a graph; lazy views do not cache
        these. A C function is fastest. None: never.
    fast_path, streams, placement, writes, gradients
        Optional parts: support for the C fast path, for streams, for arrays that stay on their device, for detecting
        writes, and for gradients.
    """

    name: str
    package: str
    install: str = ""
    types: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    dtypes: DTypes = DTypes("builtins", {})
    devices: Devices = Devices()
    arrays: Arrays = Arrays()
    containers: tuple[Container | Compound, ...] = ()
    known_issues: tuple[KnownIssue, ...] = ()
    is_tracing: Callable[[], bool] | None = None
    fast_path: FastPath | None = None
    streams: StreamSupport | None = None
    placement: Placement | None = None
    writes: WriteTracking | None = None
    gradients: GradSupport | None = None

    _classes: tuple[type, ...] = ()  # types of a built-in adapter that have no importable name

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        remove_property_locks(cls)

    def __repr__(self) -> str:
        return f"<{type_name(type(self))} {getattr(self, 'name', '')!r}>"

    # ---- as a producer --------------------------------------------------------------------------------------------

    def describe(self, obj: Any) -> Description:
        """Describe an array, even if it cannot be exported. The default is empty: `dlx.describe` exports the array.

        `Description.tensor` avoids a second export if the export calls no producer.
        """
        return Description()

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        """Return a tensor over an array's memory that keeps the memory alive. Called once per conversion.

        The default uses DLPack. `stream` is the consumer's stream; None on the host, -1 if dlx synchronizes itself (see
        `StreamSupport.current`).

        Raises
        ------
        PluginError
            If the array has no ``__dlpack__`` and the adapter does not override this method.
        """
        if not hasattr(type(obj), "__dlpack__"):
            raise PluginError(
                f"the adapter {self.name!r} does not override export, and {type_name(type(obj))} has no __dlpack__",
                fix="Override Adapter.export; dlx.adapter.over_memory returns a tensor over an address.",
            )
        return dlpack.export(obj, stream=stream)

    # ---- as a consumer --------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities | None:
        """Return which tensors the framework imports unchanged. None, the default: it cannot be a target.

        Called with the framework imported, when it is first a target; initialize it here if necessary. dlx applies the
        changes of `known_issues`. ``dlx plan`` also calls it without the framework, to plan conversions of files: then
        return what every version and build imports, or raise any error, and the framework is imported.
        """
        return None

    def variant(self, wanted: type | Tensor) -> Adapter:
        """Return the adapter that loads a tensor, for frameworks with several array types. The default is `self`.

        Parameters
        ----------
        wanted
            One of `types`, if the user passed it as the target, or the tensor to load.

        Raises
        ------
        AdapterNotFoundError
            If the framework cannot create arrays of that type.
        """
        return self

    def load(self, tensor: Tensor) -> Any:
        """Return an array over a tensor that satisfies `capabilities`; the tensor has ``__dlpack__``.

        If this method raises, dlx restores the capsule that the tensor came from; the tensor stays valid.
        """
        raise NotImplementedError(f"{self.name} cannot be a target")

    # ---- inside the framework -------------------------------------------------------------------------------------

    def copy(self, obj: Any, device: Device | None = None) -> Any:
        """Return a copy made by the framework, with the same class and graph, on `device` if it is given.

        If an adapter does not override this method, dlx copies its arrays.
        """
        raise NotImplementedError(f"{self.name} cannot copy")

    # ---- for subclasses -----------------------------------------------------------------------------------

    @functools.cached_property
    def lowered(self) -> dict[str, Any]:
        """Values that the known issues of the installed version change."""
        version = version_of(self)
        return {
            name: value for issue in self.known_issues if issue.affects(version) for name, value in issue.lowers.items()
        }


def over_memory(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: DType | None,
    device: Device,
    *,
    readonly: bool = False,
    padded: bool = False,
    owner: object,
) -> Tensor:
    """Return a tensor over memory that an object keeps alive, for `Adapter.export`.

    Parameters
    ----------
    address
        Of the first element; may be 0 without elements.
    shape, strides
        ``(ndim,)`` each, strides in elements; None means row-major.
    dtype, device
        Of the elements. None, if the adapter's dtypes lack it, is an error.
    readonly
        Whether the memory is read-only.
    padded
        Whether each element of less than a byte takes a whole byte.
    owner
        Object that keeps the memory alive.

    Raises
    ------
    LayoutError
        If there are elements but no address, or if the size overflows.
    DTypeError
        If the dtype is None.
    """
    if dtype is None:
        raise DTypeError("its dtype is unknown to the adapter")
    flags = (READ_ONLY if readonly else 0) | (SUBBYTE_PADDED if padded else 0)
    return native.tensor_new(address, shape, strides, dtype, device, flags, owner)


def require_cuda() -> None:
    """Raise a DeviceError if the CUDA driver cannot be used here, such as in a forked child.

    Call this before functions of a framework that use the driver.
    """
    cuda.require()


_names: TypeCache[str] = TypeCache()


def tensor_info(*protocols: str) -> Callable[[str, Any, Tensor], ArrayInfo]:
    """Return a `FastPath.describe` for arrays that are fully described by their tensor and type.

    Parameters
    ----------
    protocols
        Protocols that the type supports, such as ``"__dlpack__"`` or ``"buffer"``.
    """

    def describe(framework: str, obj: Any, tensor: Tensor) -> ArrayInfo:
        kind: Any = type(obj)
        name = _names.get(ref(kind)) or _names.keep(kind, type_name(kind))
        return ArrayInfo.of_tensor(tensor, framework, name, protocols)

    return describe


consumed = native.capsule_claim
"""``consumed(capsule)`` consumes a new capsule of the framework and returns its tensor."""


buffer_exchange = native.buffer_exchange
"""``buffer_exchange()`` returns an exchange table for `FastPath` that exports the buffers of objects."""


arrow_exchange = native.arrow_exchange
"""``arrow_exchange()`` returns an exchange table for `FastPath` that exports numbers on the host from objects with
``__arrow_c_array__`` or ``__arrow_c_stream__``. ``arrow_exchange(True)`` prefers ``__dlpack__(max_version=...)``, which
must then set the read-only flag correctly for host memory."""


def keeping(tensor: Tensor, owner: object) -> Tensor:
    """Return the tensor with another object that it keeps alive."""
    return native.tensor_view(tensor, None, None, None, owner)


def unmarked(tensor: Tensor) -> Tensor:
    """Return the tensor without the read-only flag, for a consumer that never writes and rejects the flag."""
    return native.tensor_view(tensor, None, None, tensor.flags & ~READ_ONLY, None)


def viewed(tensor: Tensor, dtype: DType) -> Tensor:
    """Return the tensor with another dtype of the same width."""
    return native.tensor_view(tensor, dtype, None, None, None)


def forward(tensor: Tensor) -> Tensor:
    """Return the tensor without negative strides of extents of 0 and 1, for a consumer that rejects even these.

    Other negative strides must be excluded by `Capabilities.layouts`.
    """
    strides = tensor.strides
    if min(strides, default=0) >= 0:
        return tensor
    strides = tuple(max(stride, 0) for stride in strides)
    flags = tensor.flags & (READ_ONLY | SUBBYTE_PADDED)
    return native.tensor_new(tensor.data_ptr, tensor.shape, strides, tensor.dtype, tensor.device, flags, tensor)


def at_rest(tensor: Tensor) -> Tensor:
    """Return the tensor without the flag IS_COPIED, which is meaningful only during a conversion."""
    if tensor.flags & IS_COPIED:
        return native.tensor_view(tensor, None, None, tensor.flags & ~IS_COPIED, None)
    return tensor


def look_up(name: str) -> Any:
    """Return the object with an importable name, or None; imports nothing."""
    package, *rest = name.split(".")
    value: Any = sys.modules.get(package)
    for attribute in rest:
        if value is None:
            return None
        package = f"{package}.{attribute}"
        # Modules first: a package may define __getattr__ that imports.
        value = (
            sys.modules.get(package) or getattr(value, "__dict__", {}).get(attribute) or getattr(value, attribute, None)
        )
    return value


remove_property_locks(DTypes)
remove_property_locks(Adapter)
