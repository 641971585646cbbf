"""`Adapter`, the class that an adapter of a framework subclasses, and helpers for its methods.

Nothing here imports a framework.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any

from dlx._core import cuda, native
from dlx._core.array_info import ArrayInfo
from dlx._core.extension import ffi
from dlx._core.module import set_module
from dlx._core.stream import Stream
from dlx._core.tensor import Tensor, type_name
from dlx._core.types import IS_COPIED, READ_ONLY, SUBBYTE_PADDED, Device, DType, host_readable
from dlx._protocols import dlpack
from dlx.adapter.declarations import EXTENTS, Blocker, Capabilities, Container, Defect, Guard, Layout
from dlx.errors import DeviceError, DTypeError, FrameworkNotInstalledError

__all__ = [
    "API",
    "OLDEST_API",
    "OWNER_BOUNDS",
    "Adapter",
    "ArrayInfo",
    "Capabilities",
    "Container",
    "Defect",
    "Device",
    "DType",
    "Guard",
    "Blocker",
    "Layout",
    "Stream",
    "Tensor",
    "at_rest",
    "keeping",
    "look_up",
    "over_memory",
    "type_name",
    "unmarked",
]

OWNER_BOUNDS = "owner_bounds"
"""What `Adapter.guard_function` says when it compares tensors with the bytes that their owner has."""

API = 1
"""Version of this contract, the newest that this dlx speaks. It changes only where an older adapter would go wrong:
attributes and methods that are added have defaults, and those that an older dlx does not know are not read by it."""

OLDEST_API = 1
"""The oldest version that this dlx speaks as well. An adapter that speaks any other is refused by name."""


@set_module("dlx.adapter")
class Adapter:
    """One framework, as dlx sees it. Subclass it, fill in the facts, override what data cannot say.

    Attributes
    ----------
    api
        Version of the contract that the adapter was written for, as a number of its own; 1 where it does not say.
    name
        What users write: ``convert(x, to=name)``.
    package
        Importable name of the framework; imported only when it is a target.
    priority
        Which adapter is taken where several plugins have one for the same name or type: the highest. Equal ones are
        refused, by both names.
    install
        What to tell a user who does not have it: ``pip install ...``.
    types
        Importable names of array types, most general ones; tested with `issubclass` once per type.
    fast_path_types
        Exact types for which being asked twice is harmless; only these take the fast path.
    fast_path_imports
        Whether the exchange table, `exchange` or that of the type, makes arrays of the first of `types`. False where it
        is that of a base, which makes arrays of the base: it is used for export only, and imports go through `load`.
    guards
        Questions that must be answered false before memory may leave.
    immutable
        Whether its arrays count as read-only whatever they say.
    containers
        Containers of the framework.
    dtypes
        Names of dtypes in dlx -> attributes of the package: ``{"bool": "bool_"}``.
    extension_dtypes
        Dtypes that another package adds to the framework: ``{"bfloat16": "ml_dtypes.bfloat16"}``.
    storage_dtypes
        Dtypes that the framework has, but takes under another name of the same width: ``{"bfloat16": "uint16"}``. They
        are handed over under that name, and what comes out is given to `viewed_as`.
    defects
        Known faults of versions.
    display_name
        What its users call one of its arrays, for messages.
    describes_by_export
        Whether `info` makes an export, so that it is only called where nothing else will do.
    constant
        False where capabilities change at run time; they are then computed per conversion, and there is no fast path.
    depends_on
        Where `constant` is False: names within the package of all that capabilities depend on, with hashable values
        (``("config.jax_enable_x64",)``); capabilities are stated once for each. Empty: anew in every conversion.
    identity
        Whether an array that is in the target framework already may come back without being examined.
    is_own
        Whether its arrays are `dlx.Tensor`; for dlx itself.
    takes_stream
        Whether `export` is passed the consumer's stream for device memory.
    root_only
        Whether its objects are converted where they are what `convert` is given, but pass through inside a container,
        as numpy's scalars and plain buffers do.
    owner
        For the fast path: method of an array that gives the object which keeps its memory alive. Empty: the array does.
    owner_type
        Importable name of that object's type.
    owner_bounds
        Methods of that object that give its address and its bytes: where it could have been resized, memory beyond is
        never read.
    switches
        For the fast path: ``(module, attribute, value)`` that must be that very value, or Python is asked.
    confirmed
        For the fast path: dtypes for which the framework has several of its own; the array's must be the first one.
    dtype_attribute
        Attribute of an array that is its dtype.
    part_of
        For an adapter of one array type of a framework that has several, as a target: the adapter of them all. See
        `narrowed`.
    fresh_alignment
        Bytes that memory of its own making is at least aligned to, for plans of copies that it makes.
    """

    api: int = 1  # never changes: an adapter that does not say was written for version 1
    name: str
    package: str
    priority: int = 0
    install: str = ""
    types: tuple[str, ...] = ()
    fast_path_types: tuple[str, ...] = ()
    fast_path_imports: bool = True
    guards: tuple[Guard, ...] = ()
    immutable: bool = False
    containers: tuple[Container, ...] = ()
    dtypes: Mapping[str, str] = {}
    extension_dtypes: Mapping[str, str] = {}
    storage_dtypes: Mapping[str, str] = {}
    defects: tuple[Defect, ...] = ()
    display_name: str = "array"
    describes_by_export: bool = False
    constant: bool = True
    depends_on: tuple[str, ...] = ()
    identity: bool = True
    is_own: bool = False
    takes_stream: bool = True
    root_only: bool = False
    owner: str = ""
    owner_type: str = ""
    owner_bounds: tuple[str, ...] = ()
    switches: tuple[tuple[str, str, Any], ...] = ()
    confirmed: tuple[str, ...] = ()
    dtype_attribute: str = "dtype"
    part_of: Adapter | None = None
    fresh_alignment: int = 16

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _without_locks(cls)

    # ---- facts, looked up --------------------------------------------------------------------------------------

    def module(self) -> ModuleType:
        """Return the framework's package.

        Raises
        ------
        FrameworkNotInstalledError
            If it has not been imported yet.
        """
        try:
            return sys.modules[self.package]
        except KeyError:
            raise FrameworkNotInstalledError(
                f"{self.package} is not imported", target=self.name, fix=f"Import it first: import {self.package}."
            ) from None

    def version(self) -> str:
        """Return the framework's version."""
        return str(self.module().__version__)

    def classes(self) -> tuple[type, ...]:
        """Return those of `types` whose modules are imported; importing nothing."""
        found = (look_up(name) for name in self.types)
        return tuple(kind for kind in found if isinstance(kind, type))

    @functools.cached_property
    def lowered(self) -> dict[str, Any]:
        """Facts that the defects of the installed version change."""
        changed: dict[str, Any] = {}
        for defect in self.defects:
            if defect.affects(self.version()):
                changed.update(defect.lowers)
        return changed

    @functools.cached_property
    def capabilities(self) -> Capabilities | None:
        """What the framework takes as it is, defects applied; None where it cannot be a target."""
        stated = self.accepts()
        if stated is None:
            return None
        known = {name: value for name, value in self.lowered.items() if name in Capabilities.__dataclass_fields__}
        return replace(stated, **known)

    def current(self) -> Adapter:
        """Return the adapter to ask in one conversion: itself, or one that has stated what may change meanwhile.

        What changes may differ from thread to thread (jax's x64): there is one for each combination of values that
        `depends_on` has had. Without `depends_on` every conversion has its own.
        """
        if self.constant:
            return self
        values = self._values()
        made = self._variants.get(values) if values else None
        if made is None:
            made = copy.copy(self)
            for stated in ("capabilities", "_capabilities_struct", "_lane_struct", "_variants"):
                made.__dict__.pop(stated, None)
            made.part_of = self
            if values:
                made.capabilities  # noqa: B018  # read while the values hold
                if self._values() == values:  # else another thread has switched meanwhile
                    made = self._variants.setdefault(values, made)
        return made

    def _values(self) -> tuple[Any, ...]:
        """Return the current values of `depends_on`, in this thread."""
        return tuple(
            getattr(look_up(f"{self.package}.{owner}" if owner else self.package), name, None)
            for owner, _, name in _parted(self.depends_on)
        )

    @functools.cached_property
    def _variants(self) -> dict[tuple[Any, ...], Adapter]:
        return {}

    def accepts(self) -> Capabilities | None:
        """State what the framework takes as it is. None, the default: it cannot be a target."""
        return None

    def narrowed(self, kind: type) -> Adapter:
        """Return the adapter for one of `types` as a target; itself, the default, where all are made alike."""
        return self

    def holds(self, obj: Any, source: Adapter) -> bool:
        """Return whether an array, which `source` knows, is one of this target already."""
        whole = self.part_of
        if source is self or whole is None:
            return source is self
        return (source is whole or source is whole.part_of) and isinstance(obj, self.classes())

    # ---- dtypes and devices, both ways --------------------------------------------------------------------------

    def native_dtype(self, attribute: str) -> Any:
        """Return the framework's dtype object behind one value of `dtypes`, or None where the version lacks it."""
        return getattr(self.module(), attribute, None)

    @functools.cached_property
    def _to_native(self) -> dict[DType, Any]:
        pairs = ((DType(name), self.native_dtype(attribute)) for name, attribute in self.dtypes.items())
        return {dtype: native_dtype for dtype, native_dtype in pairs if native_dtype is not None}

    @functools.cached_property
    def _from_native(self) -> dict[Any, DType]:
        return {native_dtype: dtype for dtype, native_dtype in self._to_native.items()}

    def known_dtypes(self) -> frozenset[str]:
        """Return the names of those `dtypes` that the installed version has."""
        return frozenset(dtype.name for dtype in self._to_native)

    def native_name(self, dtype: str) -> str:
        """Return what users of the framework call a dtype, or nothing; the framework is not asked."""
        return self.dtypes.get(dtype) or self.extension_dtypes.get(dtype, "")

    def dtype_to(self, dtype: DType) -> Any:
        """Return the framework's dtype for one of dlx.

        Raises
        ------
        DTypeError
            If the framework has none.
        """
        try:
            return self._to_native[dtype]
        except KeyError:
            raise DTypeError(f"{self.name} has no dtype {dtype}", fix=f"It has {self.dtype_names()}.") from None

    def dtype_from(self, native_dtype: Any) -> DType | None:
        """Return dlx's dtype for one of the framework, or None where DLPack has none."""
        return self._from_native.get(native_dtype)

    def dtype_names(self) -> str:
        """Return the dtypes that the framework takes, as text."""
        taken = self.capabilities.dtypes if self.capabilities is not None else None
        return ", ".join(sorted(self.known_dtypes() if taken is None else taken))

    def why_untaken(self, dtype: DType) -> tuple[str, str] | None:
        """Return (reason, fix) for a dtype that the framework has and does not take; None, the default, else."""
        return None

    def why_not_on(self, device: Device) -> tuple[str, str] | None:
        """Return (reason, fix) for a device that the framework has and does not take; None, the default, else."""
        return None

    def device_to(self, device: Device) -> Any:
        """Return the framework's device object for one of dlx. The default knows the host only."""
        if not host_readable(device):
            raise DeviceError(f"{self.name} has no device {device}", fix="It holds host memory only: device='cpu'.")
        return "cpu"

    def device_from(self, native_device: Any) -> Device:
        """Return dlx's device for one of the framework. The default knows the host only."""
        return Device(native_device)

    def devices(self) -> Iterable[Any]:
        """Give the framework's own objects for the devices that it sees here; the default gives the host's.

        For people to look at (`dlx devices`). It may initialise them.
        """
        yield self.device_to(Device("cpu"))

    # ---- as a producer --------------------------------------------------------------------------------------------

    def examine(self, obj: Any) -> Iterable[Blocker]:
        """Yield the blockers of exporting one array. The default asks the guards."""
        for guard in self.guards:
            if guard.blocker is not None and guard.holds(obj):
                yield guard.blocker

    def info(self, obj: Any) -> ArrayInfo | None:
        """Describe one array: no data touched, nothing synchronised, also for what cannot be exported.

        None, the default: only an export could tell.
        """
        return None

    def sketch(self, obj: Any) -> Tensor | None:
        """Return the tensor that `export` would give, by description only; None where only an export could tell.

        An abstract tensor for planning, never passed to a consumer. The default makes it from `info`.
        """
        info = self.info(obj)
        if info is None or info.shape is None or info.dtype is None or info.device is None:
            return None
        return over_memory(
            info.address, info.shape, info.strides, info.dtype, info.device, readonly=info.readonly, owner=obj
        )

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        """Return a tensor over one array's memory that keeps the memory alive. Asked once per conversion.

        The default speaks the DLPack protocol. `stream` is the consumer's, None on the host; -1 where nothing is to be
        ordered, since dlx does that (see `work_stream`).
        """
        return dlpack.export(obj, stream=stream)

    def ready_on(self, obj: Any, tensor: Tensor, asked: Stream | None) -> Stream | None:
        """Return the stream on which an exported array is ready; None: it is ready.

        The default is `asked`, the stream passed to `export`: its producer made it wait. For pinned memory no stream is
        passed and `asked` is None; the host waits for the stream that is returned.
        """
        return asked

    def take(self, obj: Any, tensor: Tensor, *, shared: bool) -> Tensor:
        """Pass the point of no return: from here on `obj` may be used up. The default does nothing.

        `shared` says whether the consumer will read the producer's memory, or a copy of it.
        """
        return tensor

    def give_back(self, obj: Any, tensor: Tensor) -> None:
        """Undo `take` after a consumer failed. The default does nothing.

        `tensor` is what `take` returned; what it was given, where an interrupt ended it at an unknown point.
        """

    # ---- devices and streams --------------------------------------------------------------------------------------

    def device_of(self, obj: Any) -> Device | None:
        """Return where one array is; None where only an export could tell. The default asks `info`."""
        info = self.info(obj)
        return None if info is None else info.device

    def home(self) -> Device:
        """Return the default device, for arrays on a device that the framework cannot use. The default is the host."""
        return Device("cpu")

    def current_device(self, device_type: int) -> int:
        """Return the id of the framework's current device of a type: what ``device="cuda"`` means."""
        return 0

    def on_device(self, device: Device) -> AbstractContextManager[Any]:
        """Make a device current, for the driver and for the framework, as long as the context is entered."""
        return cuda.at(device)

    def work_stream(self, device: Device) -> Any:
        """Return the framework's current stream on a device: a handle, or an object that has one.

        None, the default: each array has its own, or it is unknown. It is asked once per device of a call, never for
        host memory; as a producer and as a consumer.
        """
        return None

    def on_stream(self, stream: Stream) -> AbstractContextManager[Any] | None:
        """Return a context in which the framework works on a stream of another; what was before comes back after it.

        None, the default: its current stream cannot be set.
        """
        return None

    # ---- inside the framework -------------------------------------------------------------------------------------

    def detached(self, obj: Any) -> Any:
        """Return the array without its graph; itself, the default, where it has none."""
        return obj

    def clone(self, obj: Any) -> Any:
        """Return a copy made by the framework, class and graph kept. NotImplemented, the default: go through dlx."""
        return NotImplemented

    def moved(self, obj: Any, device: Device) -> Any:
        """Return the array on another device of its framework."""
        raise DeviceError(f"{self.name} cannot move an array to {device}", fix="Leave device out.")

    # ---- for functions that compute in the framework ----------------------------------------------------------------

    def guarded(self, obj: Any, *, writable: bool) -> Any:
        """Return a copy that is about to be given to a function, such that writes to it are refused, or counted.

        Parameters
        ----------
        obj
            An array without other references.
        writable
            Whether the function is declared to write to it.
        """
        return obj

    def writes_to(self, obj: Any) -> int | None:
        """Return how often an array was written to in place; None, the default, where writes are not counted."""
        return None

    # ---- as a consumer --------------------------------------------------------------------------------------------

    def load(self, tensor: Tensor) -> Any:
        """Return an array over a tensor that `capabilities` allow; the tensor has ``__dlpack__``."""
        raise NotImplementedError(f"{self.name} cannot be a target")

    @functools.cached_property
    def _capabilities_struct(self) -> Any:
        assert self.capabilities is not None
        return _as_struct(self.capabilities)

    def capabilities_address(self) -> int:
        """Return where the C side finds the capabilities."""
        return int(ffi.cast("uintptr_t", self._capabilities_struct))

    @functools.cached_property
    def _fast_path_struct(self) -> Any:
        stated = self.capabilities
        assert stated is not None
        if stated.dtypes is None:
            return self._capabilities_struct
        return _as_struct(replace(stated, dtypes=stated.dtypes & set(self.dtypes) - set(self.storage_dtypes)))

    def fast_path_capabilities_address(self) -> int:
        """Return where the C side finds what the framework's table takes: its own dtypes, none re-viewed."""
        return int(ffi.cast("uintptr_t", self._fast_path_struct))

    def check(self, tensor: Tensor) -> int:
        """Return the incompatibility bits between a tensor and this consumer (0 = it may be handed over as it is).

        The fast path compares with the capabilities alone, so that a target which overrides this has none.
        """
        return native.tensor_check(tensor, self.capabilities_address())

    def constant_over(self, tensor: Tensor) -> bool:
        """Return whether an array over a tensor is constant, so that nothing else should write to its memory either."""
        return self.immutable

    def viewed_as(self, array: Any, dtype: DType) -> Any:
        """Return an array of the same memory under its true dtype, where `load` took it under its storage dtype.

        The default calls ``array.view(native dtype)``.
        """
        return array.view(self.dtype_to(dtype))

    # ---- the fast path --------------------------------------------------------------------------------------------

    def exchange(self) -> Any:
        """Return an exchange table in a capsule for types that carry none themselves, or None.

        The capsule is called ``"dlpack_exchange_api"`` and holds a ``DLPackExchangeAPI`` (``dlpack.h`` 1.3) that lives
        as long as the process. What its borrow slot gives is copied before anything else is called.
        """
        return None

    def guard_function(self) -> tuple[Any, frozenset[str]] | None:
        """Return a C function that answers guards for arrays of `fast_path_types`, and which ones; None, the default.

        A capsule called ``"dlx_guard_function"`` with an ``int (*)(void *array, const DLTensor *borrowed)`` (`dlx.h`):
        first asked without a tensor, before memory is borrowed, then with it; 1 = all of these guards are false, 0 =
        let Python ask. Names are those of `guards` (`Guard.ask`), and `OWNER_BOUNDS` where the function checks, for
        every tensor, that it lies inside the memory of its owner.
        """
        return None


@set_module("dlx.adapter")
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


@set_module("dlx.adapter")
def keeping(tensor: Tensor, owner: object) -> Tensor:
    """Return the same tensor with a further object that it keeps alive."""
    return native.tensor_view(tensor, None, None, None, owner)


@set_module("dlx.adapter")
def unmarked(tensor: Tensor) -> Tensor:
    """Return the same tensor without the read-only flag, for a consumer that never writes and cannot take the flag."""
    return native.tensor_view(tensor, None, None, tensor.flags & ~READ_ONLY, None)


@set_module("dlx.adapter")
def at_rest(tensor: Tensor) -> Tensor:
    """Return the tensor without the flag that its producer copied for the hand-over, which says nothing later on."""
    if tensor.flags & IS_COPIED:
        return native.tensor_view(tensor, None, None, tensor.flags & ~IS_COPIED, None)
    return tensor


@functools.cache
def _parted(names: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    return tuple(name.rpartition(".") for name in names)


@set_module("dlx.adapter")
def look_up(name: str) -> Any:
    """Return what an importable name stands for, or None; imports nothing."""
    package, *rest = name.split(".")
    found: Any = sys.modules.get(package)
    for attribute in rest:
        if found is None:
            return None
        package = f"{package}.{attribute}"
        # Modules first: a package may define __getattr__ that imports.
        found = sys.modules.get(package) or found.__dict__.get(attribute) or getattr(found, attribute, None)
    return found


def _without_locks(cls: type) -> None:
    """Let the cached properties of a class be computed without a lock, as they are from Python 3.12 on.

    Python 3.11 has one lock for all objects: a thread that imports a framework meanwhile blocks all others, and a child
    that is forked meanwhile deadlocks.
    """
    for value in vars(cls).values():
        if isinstance(value, functools.cached_property) and hasattr(value, "lock"):
            value.lock = contextlib.nullcontext()


_without_locks(Adapter)


def _as_struct(stated: Capabilities) -> Any:
    """Fill the C struct by field name."""
    struct = ffi.new("dlx_capabilities *")
    if stated.dtypes is not None and len(stated.dtypes) > len(struct.dtypes):
        raise ValueError(f"at most {len(struct.dtypes)} dtypes can be told apart, found {len(stated.dtypes)}")
    if stated.device_types is not None and not all(0 <= number < 32 for number in stated.device_types):
        raise ValueError(f"device types are numbers from 0 to 31, found {sorted(stated.device_types)}")
    struct.device_types = (
        0xFFFFFFFF if stated.device_types is None else sum(1 << number for number in stated.device_types)
    )
    struct.layouts = stated.layouts
    struct.min_alignment = stated.min_alignment
    struct.min_ndim, struct.max_ndim = stated.min_ndim, stated.max_ndim
    struct.keeps_readonly = stated.keeps_readonly
    struct.takes_packed, struct.takes_padded = stated.subbyte != "padded", stated.subbyte != "packed"
    struct.takes_null = stated.null_data
    struct.empty_extents = EXTENTS[stated.empty_extents]
    struct.n_dtypes = -1
    if stated.dtypes is not None:
        struct.n_dtypes = len(stated.dtypes)
        for i, name in enumerate(sorted(stated.dtypes)):
            code, bits, lanes = DType(name)
            struct.dtypes[i] = code | bits << 8 | lanes << 16
    return struct
