"""`Adapter`, the class that an adapter of a framework subclasses, and helpers for its methods."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple
from weakref import ref

from dlx._core import cuda, native
from dlx._core.array_info import ArrayInfo
from dlx._core.stream import Stream
from dlx._core.tensor import Tensor
from dlx._core.types import IS_COPIED, READ_ONLY, SUBBYTE_PADDED, Device, DType, host_readable
from dlx._protocols import dlpack
from dlx._support.locks import unlocked
from dlx._support.reflect import TypeCache, type_name
from dlx.adapter.declarations import (
    OWNER_BOUNDS,
    Arrays,
    Blocker,
    Capabilities,
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

__all__ = [
    "COMMON_DTYPES", "OWNER_BOUNDS", "Adapter", "ArrayInfo", "Arrays", "Blocker", "Capabilities", "CompiledFunction",
    "Container", "DType", "DTypes", "Description", "Device", "Devices", "FastPath", "GradSupport", "Guard",
    "KnownIssue", "Layout", "Operation", "Owner", "Placement", "ReportedDevices", "Stream", "StreamSupport", "Tensor",
    "WriteTracking", "arrow_exchange", "at_rest", "buffer_exchange", "consumed", "forward", "keeping", "look_up",
    "over_memory", "tensor_info", "type_name", "unmarked", "viewed",
]  # fmt: skip

COMMON_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
"""The dtypes that nearly every framework has, under the same names."""


def installed_version(package: str) -> str:
    """Return the version of the distribution that installed a package, or nothing."""
    from importlib import metadata

    for name in (package, package.replace("_", "-")):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    names = metadata.packages_distributions().get(package.partition(".")[0])
    return metadata.version(names[0]) if names else ""


def version_of(adapter: Adapter) -> str:
    """Return the version of an imported framework, or ``"unknown"``."""
    package = adapter.package
    for module in (imported(package), sys.modules.get(package.partition(".")[0])):
        version = getattr(module, "__version__", None)
        if version is not None:
            return str(version)
    return installed_version(package) or "unknown"


def classes_of(adapter: Adapter) -> tuple[type, ...]:
    """Return the array types of an adapter whose modules are imported; importing nothing."""
    found = (look_up(name) for name in adapter.types)
    return adapter._classes or tuple(kind for kind in found if isinstance(kind, type))


def imported(package: str) -> ModuleType:
    """Return a package; raise a FrameworkNotInstalledError if it is not imported."""
    module = sys.modules.get(package)
    if module is None:
        raise FrameworkNotInstalledError(f"{package} is not imported", fix=f"Import it first: import {package}.")
    return module


class DTypes:
    """The dtypes of a framework, both ways.

    Parameters
    ----------
    package
        Importable name of the package that has them.
    names
        Names of dtypes in dlx -> attributes of the package, with dots or without: ``{"bool": "bool_"}``; or names only,
        where they are the same in both. Those that the installed version lacks are left out.
    extension
        Dtypes that another package adds, with what users call them there: ``{"bfloat16": "ml_dtypes.bfloat16"}``. A
        subclass answers for them in `to_native` and `from_native`.
    storage
        Dtypes that the framework has, but imports under another name of the same width: ``{"bfloat16": "uint16"}``.
        They are handed over under that name, and the result is given to `viewed`.
    switches
        Names within the package of everything at run time that `Adapter.capabilities` depends on, with hashable values
        (``("config.jax_enable_x64",)``); they are stated once for each combination of values.
    """

    storage: Mapping[str, str] = {}
    switches: tuple[str, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        unlocked(cls)

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
        """Return the framework's dtype object behind one value of `names`, or None where the version lacks it."""
        return look_up(f"{self.package}.{attribute}")

    @functools.cached_property
    def _to_native(self) -> dict[DType, Any]:
        imported(self.package)
        pairs = ((DType(name), self.native(attribute)) for name, attribute in self.names.items())
        return {dtype: native_dtype for dtype, native_dtype in pairs if native_dtype is not None}

    @functools.cached_property
    def _from_native(self) -> dict[Any, DType]:
        return {native_dtype: dtype for dtype, native_dtype in self._to_native.items()}

    def to_native(self, dtype: DType) -> Any:
        """Return the framework's dtype for one of dlx; raise a DTypeError if it has none."""
        found = self._to_native.get(dtype)
        if found is None:
            names = ", ".join(sorted(self.known()))
            raise DTypeError(f"{self.package} has no dtype {dtype}", fix=f"It has {names}.")
        return found

    def from_native(self, native_dtype: Any) -> DType | None:
        """Return dlx's dtype for one of the framework, or None where DLPack has none."""
        return self._from_native.get(native_dtype)

    def known(self) -> frozenset[str]:
        """Return the names in dlx of the dtypes that the installed version has."""
        return frozenset(dtype.name for dtype in self._to_native)

    def native_name(self, name: str) -> str:
        """Return what users of the framework call a dtype, or nothing; the framework is not asked."""
        return self.names.get(name) or self.extension.get(name, "")

    @property
    def table_storage(self) -> Mapping[str, str]:
        """`storage` for the fast path. Override it where the exchange table takes fewer dtypes than `Adapter.load`."""
        return self.storage

    def viewed(self, array: Any, dtype: DType) -> Any:
        """Return an array of the same memory under its true dtype, where it was loaded under its storage dtype.

        The default calls ``array.view(native dtype)``.
        """
        return array.view(self.to_native(dtype))


class Devices:
    """The devices of a framework, both ways. The default is a framework that holds host memory only.

    Parameters
    ----------
    read
        ``read(native_device)`` gives the `Device` of one of the framework's device objects, for `from_native`. None:
        it has none.
    moves
        Whether `Adapter.copy` copies to another device of the framework; else dlx moves its arrays.
    """

    moves: bool = True
    _read: Callable[[Any], Device] | None = None

    def __init__(self, read: Callable[[Any], Device] | None = None, *, moves: bool = True) -> None:
        self._read, self.moves = read, moves

    def to_native(self, device: Device) -> Any:
        """Return the framework's device object for one of dlx; raise a DeviceError if it has none."""
        if not host_readable(device):
            raise DeviceError(f"there is no device {device}", fix="It holds host memory only: device='cpu'.")
        return "cpu"

    def from_native(self, native_device: Any) -> Device:
        """Return dlx's device for one of the framework; raise a DeviceError if DLPack has none."""
        return Device(native_device) if self._read is None else self._read(native_device)

    def of(self, obj: Any) -> Device | None:
        """Return where an array is, without an export of it; None where that is not known.

        Asked where `Adapter.describe` does not say it. The default is the host, and None in a subclass.
        """
        return Device("cpu") if type(self) is Devices else None

    def default(self) -> Device:
        """Return the default device, for arrays on a device that the framework cannot use. The default is the host."""
        return Device("cpu")

    def current(self, device_type: int) -> int:
        """Return the id of the framework's current device of a type: what ``device="cuda"`` means."""
        return 0

    def activate(self, device: Device) -> AbstractContextManager[Any]:
        """Make a device current, for the driver and for the framework, as long as the context is entered."""
        return cuda.at(device)

    def new_array(self, shape: Sequence[int], dtype: DType, device: Device, strides: Sequence[int]) -> Any:
        """Return a new array on a device, of any values, from the framework's own allocator and on its current stream.

        dlx copies into it. `strides` are those of a dense array, in elements. None, the default: dlx allocates the
        memory itself and hands it over.
        """
        return None

    def available(self) -> Iterable[Any]:
        """Give the framework's own objects for the devices that it sees here; the default gives the host's.

        For people to look at (`dlx devices`). It may initialise them.
        """
        yield self.to_native(Device("cpu"))


def reads_natives(devices: Devices) -> bool:
    """Return whether `Devices.from_native` knows objects of the framework."""
    return devices._read is not None or type(devices).from_native is not Devices.from_native


class ReportedDevices(Devices):
    """The devices of a framework that takes host memory only, and whose arrays say in ``__dlpack_device__`` where.

    Pinned memory counts as host memory.
    """

    def of(self, obj: Any) -> Device | None:
        """Return where an array says that it is; None where its type has no ``__dlpack_device__``."""
        found = dlpack.device_of(obj)
        return Device("cpu") if found is not None and host_readable(found) else found


class Description(NamedTuple):
    """What an adapter knows of one array before it is exported. No data is touched, nothing is synchronised.

    Attributes
    ----------
    info
        What there is to say of it; or a function without arguments that says it when it is asked for, which is faster
        where a conversion does not need it. None: it is said of `tensor`, or only an export could tell.
    blockers
        What blocks its conversion.
    tensor
        What `Adapter.export` would return, where that needs no call of the producer: the export is not made again. None
        where there are blockers, or the export calls the producer.
    needs_export
        Whether an export may give something else than `info` says, as that of a subclass with its own ``__dlpack__``.
    device
        Where its memory is, where that is known sooner than `info`. None: `tensor`, `info` or `Devices.of` says it.
    """

    info: Any = None
    blockers: tuple[Blocker, ...] = ()
    tensor: Tensor | None = None
    needs_export: bool = False
    device: Device | None = None


class Adapter:
    """One framework, as dlx sees it. Subclass it, fill in the facts, override what data cannot say.

    Attributes
    ----------
    name
        What users write: ``convert(x, to=name)``.
    package
        Importable name of the framework; imported only when it is a target.
    install
        What to tell a user who does not have it: ``pip install ...``.
    types
        Importable names of array types, most general ones; tested with `issubclass` once per type.
    namespaces
        Importable modules whose functions take its arrays, for `dlx.array_namespace`: the first that is installed.
        None: arrays that have ``__array_namespace__`` tell.
    dtypes, devices
        Its dtypes and devices, both ways.
    arrays
        What is special about its arrays.
    containers
        Containers of the framework.
    known_issues
        Known faults of versions.
    is_tracing
        ``is_tracing()`` says whether arrays that are made now, in this thread, become part of a graph: lazy views keep
        none of them. A function in C costs the least. None: never.
    fast_path, streams, placement, writes, gradients
        Optional parts: what the C fast path may use, how streams are ordered, which arrays stay on their device, how
        writes are noticed, and how gradients are computed.
    """

    name: str
    package: str
    install: str = ""
    types: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    dtypes: DTypes = DTypes("builtins", {})
    devices: Devices = Devices()
    arrays: Arrays = Arrays()
    containers: tuple[Container, ...] = ()
    known_issues: tuple[KnownIssue, ...] = ()
    is_tracing: Callable[[], bool] | None = None
    fast_path: FastPath | None = None
    streams: StreamSupport | None = None
    placement: Placement | None = None
    writes: WriteTracking | None = None
    gradients: GradSupport | None = None

    _classes: tuple[type, ...] = ()  # of an adapter of dlx whose types cannot be looked up by name

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        unlocked(cls)

    def __repr__(self) -> str:
        return f"<{type_name(type(self))} {getattr(self, 'name', '')!r}>"

    # ---- as a producer --------------------------------------------------------------------------------------------

    def describe(self, obj: Any) -> Description:
        """Describe one array, also one that cannot be exported. The default knows nothing: `dlx.describe` exports it.

        `Description.tensor` saves the export where that calls no producer.
        """
        return Description()

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        """Return a tensor over one array's memory that keeps the memory alive. Asked once per conversion.

        The default speaks the DLPack protocol. `stream` is the consumer's, None on the host; -1 where nothing is to be
        ordered, since dlx does that (see `StreamSupport.current`).

        Raises
        ------
        PluginError
            If the array has no ``__dlpack__`` and the adapter does not override this method.
        """
        if not hasattr(type(obj), "__dlpack__"):
            raise PluginError(
                f"the adapter {self.name!r} has no export of its own, and {type_name(type(obj))} has no __dlpack__",
                fix="Override Adapter.export; dlx.adapter.over_memory makes a tensor over an address.",
            )
        return dlpack.export(obj, stream=stream)

    # ---- as a consumer --------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities | None:
        """State what the framework, which is imported, takes as it is. None, the default: it cannot be a target.

        Called when it first becomes a target: get it ready here if it needs that. dlx applies what `known_issues`
        lower.
        """
        return None

    def variant(self, wanted: type | Tensor) -> Adapter:
        """Return the adapter to load with, for a framework with several array types; itself, the default, else.

        Parameters
        ----------
        wanted
            One of `types`, if a user named it as the target, or the tensor to be loaded.

        Raises
        ------
        AdapterNotFoundError
            If arrays of that type cannot be made.
        """
        return self

    def load(self, tensor: Tensor) -> Any:
        """Return an array over a tensor that `capabilities` allow; the tensor has ``__dlpack__``.

        If it raises, a capsule that the tensor came from gets its name back; whoever holds the tensor may read it.
        """
        raise NotImplementedError(f"{self.name} cannot be a target")

    # ---- inside the framework -------------------------------------------------------------------------------------

    def copy(self, obj: Any, device: Device | None = None) -> Any:
        """Return a copy made by the framework, class and graph kept, on another of its devices if one is given.

        An adapter that does not override this has its arrays copied by dlx.
        """
        raise NotImplementedError(f"{self.name} does not copy")

    # ---- for subclasses to read -----------------------------------------------------------------------------------

    @functools.cached_property
    def lowered(self) -> dict[str, Any]:
        """Facts that the known issues of the installed version change."""
        version = version_of(self)
        return {
            name: value for issue in self.known_issues if issue.affects(version) for name, value in issue.lowers.items()
        }


def over_memory(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: DType,
    device: Device,
    *,
    readonly: bool = False,
    padded: bool = False,
    owner: object,
) -> Tensor:
    """Return a tensor over memory that an object keeps alive: what an adapter exports when it knows the facts itself.

    Parameters
    ----------
    address
        Of the first element; may be 0 where there is none.
    shape, strides
        ``(ndim,)`` each, strides in elements; None means row-major.
    dtype, device
        As DLPack says them.
    readonly
        Whether writing is forbidden.
    padded
        Whether elements of less than a byte take a whole one each.
    owner
        Object that must live as long as the memory is used.

    Raises
    ------
    LayoutError
        If there are elements but no address, or the size overflows.
    """
    flags = (READ_ONLY if readonly else 0) | (SUBBYTE_PADDED if padded else 0)
    return native.tensor_new(address, shape, strides, dtype, device, flags, owner)


_names: TypeCache[str] = TypeCache()


def tensor_info(*protocols: str) -> Callable[[str, Any, Tensor], ArrayInfo]:
    """Return a `FastPath.describe` for arrays that their tensor and their type describe completely.

    Parameters
    ----------
    protocols
        Protocols by which the type exports memory, such as ``"__dlpack__"`` or ``"buffer"``.
    """

    def describe(framework: str, obj: Any, tensor: Tensor) -> ArrayInfo:
        kind: Any = type(obj)
        name = _names.get(ref(kind)) or _names.keep(kind, type_name(kind))
        return ArrayInfo.of_tensor(tensor, framework, name, protocols)

    return describe


consumed = native.capsule_claim
"""``consumed(capsule)`` returns the tensor of a capsule that the framework has just made, which is used up."""


buffer_exchange = native.buffer_exchange
"""``buffer_exchange()`` returns an exchange table for `FastPath` that exports the buffer of any object."""


arrow_exchange = native.arrow_exchange
"""``arrow_exchange()`` returns an exchange table for `FastPath` that exports numbers on the host of any object with
``__arrow_c_array__`` or ``__arrow_c_stream__``; ``arrow_exchange(True)`` by ``__dlpack__(max_version=...)`` where its
type has that, which must know read-only memory on the host from all other."""


def keeping(tensor: Tensor, owner: object) -> Tensor:
    """Return the same tensor with a further object that it keeps alive."""
    return native.tensor_view(tensor, None, None, None, owner)


def unmarked(tensor: Tensor) -> Tensor:
    """Return the same tensor without the read-only flag, for a consumer that never writes and cannot take the flag."""
    return native.tensor_view(tensor, None, None, tensor.flags & ~READ_ONLY, None)


def viewed(tensor: Tensor, dtype: DType) -> Tensor:
    """Return the same tensor under another dtype of the same width."""
    return native.tensor_view(tensor, dtype, None, None, None)


def forward(tensor: Tensor) -> Tensor:
    """Return the same tensor without negative strides, for a consumer that refuses even those of extents of 1 or 0.

    Others are not to be there: `Capabilities.layouts` says that they are not taken.
    """
    strides = tensor.strides
    if min(strides, default=0) >= 0:
        return tensor
    strides = tuple(max(stride, 0) for stride in strides)
    flags = tensor.flags & (READ_ONLY | SUBBYTE_PADDED)
    return native.tensor_new(tensor.data_ptr, tensor.shape, strides, tensor.dtype, tensor.device, flags, tensor)


def at_rest(tensor: Tensor) -> Tensor:
    """Return the tensor without the flag that its producer copied for the hand-over, which says nothing later on."""
    if tensor.flags & IS_COPIED:
        return native.tensor_view(tensor, None, None, tensor.flags & ~IS_COPIED, None)
    return tensor


def look_up(name: str) -> Any:
    """Return what an importable name stands for, or None; imports nothing."""
    package, *rest = name.split(".")
    found: Any = sys.modules.get(package)
    for attribute in rest:
        if found is None:
            return None
        package = f"{package}.{attribute}"
        # Modules first: a package may define __getattr__ that imports.
        found = (
            sys.modules.get(package) or getattr(found, "__dict__", {}).get(attribute) or getattr(found, attribute, None)
        )
    return found


unlocked(DTypes)
unlocked(Adapter)
