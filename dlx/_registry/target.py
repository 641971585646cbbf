"""`Target`, a framework as the consumer: its adapter, and its capabilities after known issues."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dlx._core import native
from dlx._core.extension import ffi
from dlx._core.native import Tensor
from dlx._core.types import DType
from dlx._support.reflect import foreign_errors, type_name
from dlx.adapter.base import Adapter, look_up
from dlx.adapter.declarations import EXTENTS, Capabilities


class Target:
    """A consumer. `source` is the adapter of its arrays, `kind` the requested array type or None."""

    def __init__(self, adapter: Adapter, capabilities: Capabilities, source: Adapter, kind: type | None) -> None:
        self.adapter, self.capabilities, self.source, self.kind = adapter, capabilities, source, kind
        self.name, self.storage = adapter.name, adapter.dtypes.storage
        self.word = word_of(adapter)
        self.arrays = f"{self.name} {self.word}s"  # plural, for messages
        self._struct = build_struct(capabilities)
        self.address = int(ffi.cast("uintptr_t", self._struct))
        # Whether the array type depends on the tensor; then the fast path supports only `FastPath.imports`.
        self.varies = kind is None and type(adapter).variant is not Adapter.variant
        self._variants: dict[Adapter, Target] = {}
        self._places = tuple(switch_places(source))  # which `capabilities` depend on
        self.switches: tuple[Any, ...] | None = None  # their values; None if another thread changed them
        self.decisions: dict[Any, Any] = {}  # cache of the planner, by layout
        self.request: Any = None  # the engine's request for calls without options

    def is_current(self) -> bool:
        """Return whether the switches have the same values in this thread as at creation."""
        return self.switches == tuple([getattr(owner, name, None) for owner, name in self._places])

    def over(self, tensor: Tensor) -> Target:
        """Return the target that loads a tensor: itself, or the target of another array type."""
        if not self.varies:
            return self
        adapter = self.adapter.variant(tensor)
        if adapter is self.adapter:
            return self
        if adapter not in self._variants:
            consumer = target_of(adapter, source=self.source)
            assert consumer is not None
            consumer.name, consumer.arrays = self.name, self.arrays
            self._variants[adapter] = consumer
        return self._variants[adapter]

    def check(self, tensor: Tensor) -> int:
        """Return the incompatibility bits of a tensor with this consumer; 0: it can be imported unchanged."""
        return native.tensor_check(tensor, self.address)

    def dtypes(self) -> frozenset[str]:
        """Return the names of the dtypes that it imports; all its dtypes if it has no limit."""
        names = self.capabilities.dtypes
        return self.adapter.dtypes.known() if names is None else names

    def equal_width_storage(self) -> dict[str, str]:
        """Return the storage dtypes of the fast path with the same width as the original dtype."""
        pairs = self.adapter.dtypes.table_storage.items()
        return {name: storage for name, storage in pairs if DType(name).bits == DType(storage).bits}

    def fast_path_struct(self) -> Any:
        """Return the C struct of the capabilities of the fast path, or None; the caller keeps it alive."""
        path = self.adapter.fast_path
        limits = path.imports if path is not None else None
        if not isinstance(limits, Capabilities):
            limits = None if self.varies else self.capabilities
        if limits is None or self.capabilities.home is not None:
            return None
        equal, copies = self.equal_width_storage().keys(), self.capabilities.copies
        barred = (self.storage.keys() - equal) | (set() if isinstance(copies, bool) else copies.keys())
        if limits.dtypes is None:
            return None if barred else build_struct(limits)
        known = self.adapter.dtypes.names.keys() | equal
        return build_struct(replace(limits, dtypes=limits.dtypes & known - barred))


def word_of(adapter: Adapter) -> str:
    """Return the word for one array in messages: "tensor" for ``torch.Tensor``, else "array"."""
    words = re.findall("[A-Z][a-z]+", adapter.types[0].rpartition(".")[2]) if adapter.types else []
    return words[-1].lower() if words and adapter.package != "dlx" else "array"


def target_of(adapter: Adapter, kind: type | None = None, source: Adapter | None = None) -> Target | None:
    """Return the target of an adapter for one type or all; None if the adapter cannot be a target."""
    consumer = adapter if kind is None else adapter.variant(kind)
    capabilities = consumer.capabilities()
    if capabilities is None:
        return None
    lowered = {name: value for name, value in consumer.lowered.items() if name in Capabilities.__dataclass_fields__}
    return Target(consumer, replace(capabilities, **lowered), source or adapter, kind)


def is_committed(source: Adapter, obj: Any) -> bool:
    """Return whether an array stays on its device (see `Placement`)."""
    if source.placement is None:
        return True
    with foreign_errors(f"{source.name} failed:", source=type_name(type(obj))):
        return source.placement.is_committed(obj)


def switch_places(adapter: Adapter) -> Iterator[tuple[Any, str]]:
    """Yield (object, attribute) of each switch that an adapter's capabilities depend on."""
    for name in adapter.dtypes.switches:
        owner, _, attribute = f"{adapter.package}.{name}".rpartition(".")
        yield look_up(owner), attribute


def switches_of(adapter: Adapter) -> tuple[Any, ...]:
    """Return the values of an adapter's switches in this thread."""
    return tuple(getattr(owner, attribute, None) for owner, attribute in switch_places(adapter))


def build_struct(capabilities: Capabilities) -> Any:
    """Return the C struct of capabilities."""
    struct = ffi.new("dlx_capabilities *")
    if capabilities.dtypes is not None and len(capabilities.dtypes) > len(struct.dtypes):
        raise ValueError(f"capabilities have at most {len(struct.dtypes)} dtypes, found {len(capabilities.dtypes)}")
    if capabilities.device_types is not None and not all(0 <= number < 32 for number in capabilities.device_types):
        raise ValueError(f"device types must be from 0 to 31, found {sorted(capabilities.device_types)}")
    struct.device_types = (
        0xFFFFFFFF if capabilities.device_types is None else sum(1 << number for number in capabilities.device_types)
    )
    struct.layouts = capabilities.layouts
    struct.min_alignment = capabilities.min_alignment
    struct.min_ndim, struct.max_ndim = capabilities.ndims
    struct.keeps_readonly = capabilities.keeps_readonly or capabilities.copies is True
    struct.takes_packed, struct.takes_padded = capabilities.subbyte != "padded", capabilities.subbyte != "packed"
    struct.takes_null = capabilities.empty_extents != "addressed"
    struct.empty_extents = EXTENTS[capabilities.empty_extents]
    struct.n_dtypes = -1
    if capabilities.dtypes is not None:
        struct.n_dtypes = len(capabilities.dtypes)
        for i, name in enumerate(sorted(capabilities.dtypes)):
            code, bits, lanes = DType(name)
            struct.dtypes[i] = code | bits << 8 | lanes << 16
    return struct
