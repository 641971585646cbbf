"""`Target`, a framework as the consumer: its adapter, and its capabilities with known issues applied."""

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
    """A consumer; `source` is the adapter that knows its arrays, `kind` the array type that was asked for, if any."""

    def __init__(self, adapter: Adapter, capabilities: Capabilities, source: Adapter, kind: type | None) -> None:
        self.adapter, self.capabilities, self.source, self.kind = adapter, capabilities, source, kind
        self.name, self.storage = adapter.name, adapter.dtypes.storage
        self.word = word_of(adapter)
        self.arrays = f"{self.name} {self.word}s"  # what to call several of its arrays
        self._struct = as_struct(capabilities)
        self.address = int(ffi.cast("uintptr_t", self._struct))
        # Whether the tensor decides which array type is made: then the fast path serves `FastPath.imports` only.
        self.varies = kind is None and type(adapter).variant is not Adapter.variant
        self._variants: dict[Adapter, Target] = {}
        self._places = tuple(switch_places(source))  # what `capabilities` depend on
        self.switches: tuple[Any, ...] | None = None  # its values; None where they changed meanwhile
        self.decisions: dict[Any, Any] = {}  # what the planner has decided for arrays of a layout
        self.request: Any = None  # the engine's, of calls that name the target and no option

    def unswitched(self) -> bool:
        """Return whether everything that the capabilities depend on has the value, in this thread, that it had."""
        return self.switches == tuple([getattr(owner, name, None) for owner, name in self._places])

    def over(self, tensor: Tensor) -> Target:
        """Return the target to load a tensor with: itself, or one of several array types of its framework."""
        if not self.varies:
            return self
        adapter = self.adapter.variant(tensor)
        if adapter is self.adapter:
            return self
        if adapter not in self._variants:
            made = target_of(adapter, source=self.source)
            assert made is not None
            made.name, made.arrays = self.name, self.arrays  # what was asked for
            self._variants[adapter] = made
        return self._variants[adapter]

    def check(self, tensor: Tensor) -> int:
        """Return the incompatibility bits between a tensor and this consumer (0 = it may be handed over as it is)."""
        return native.tensor_check(tensor, self.address)

    def dtypes(self) -> frozenset[str]:
        """Return the names of the dtypes that it takes; of those that it has, where it takes any."""
        taken = self.capabilities.dtypes
        return self.adapter.dtypes.known() if taken is None else taken

    def storage_as_wide(self) -> dict[str, str]:
        """Return the storage dtypes of the fast path that are as wide as what they stand for."""
        stored = self.adapter.dtypes.table_storage
        return {name: wide for name, wide in stored.items() if DType(name).bits == DType(wide).bits}

    def fast_path_struct(self) -> Any:
        """Return the C struct of what the fast path may hand over, or None; its caller keeps it alive."""
        path = self.adapter.fast_path
        stated = path.imports if path is not None else None
        if not isinstance(stated, Capabilities):
            stated = None if self.varies else self.capabilities
        if stated is None or self.capabilities.home is not None:
            return None
        known = self.adapter.dtypes.names.keys() - self.storage.keys() | self.storage_as_wide().keys()
        copies = self.capabilities.copies
        if not isinstance(copies, bool):
            known -= copies.keys()
        return as_struct(stated if stated.dtypes is None else replace(stated, dtypes=stated.dtypes & known))


def word_of(adapter: Adapter) -> str:
    """Return what messages call one array of a framework: "tensor" of ``torch.Tensor``, else "array"."""
    words = re.findall("[A-Z][a-z]+", adapter.types[0].rpartition(".")[2]) if adapter.types else []
    return words[-1].lower() if words and adapter.package != "dlx" else "array"


def target_of(adapter: Adapter, kind: type | None = None, source: Adapter | None = None) -> Target | None:
    """Return an adapter as a target, for one of its types or for all; None where its framework takes no arrays."""
    made = adapter if kind is None else adapter.variant(kind)
    stated = made.capabilities()
    if stated is None:
        return None
    lowered = {name: value for name, value in made.lowered.items() if name in Capabilities.__dataclass_fields__}
    return Target(made, replace(stated, **lowered), source or adapter, kind)


def is_committed(source: Adapter, obj: Any) -> bool:
    """Return whether an array stays on its device, see `Placement`."""
    if source.placement is None:
        return True
    with foreign_errors(f"{source.name} failed:", source=type_name(type(obj))):
        return source.placement.is_committed(obj)


def switch_places(adapter: Adapter) -> Iterator[tuple[Any, str]]:
    """Give (object, attribute) for everything that the capabilities of an adapter depend on."""
    for name in adapter.dtypes.switches:
        owner, _, attribute = f"{adapter.package}.{name}".rpartition(".")
        yield look_up(owner), attribute


def switches_of(adapter: Adapter) -> tuple[Any, ...]:
    """Return the current values, in this thread, of everything that the capabilities of an adapter depend on."""
    return tuple(getattr(owner, attribute, None) for owner, attribute in switch_places(adapter))


def as_struct(stated: Capabilities) -> Any:
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
    struct.min_ndim, struct.max_ndim = stated.ndims
    struct.keeps_readonly = stated.keeps_readonly or stated.copies is True
    struct.takes_packed, struct.takes_padded = stated.subbyte != "padded", stated.subbyte != "packed"
    struct.takes_null = stated.empty_extents != "addressed"
    struct.empty_extents = EXTENTS[stated.empty_extents]
    struct.n_dtypes = -1
    if stated.dtypes is not None:
        struct.n_dtypes = len(stated.dtypes)
        for i, name in enumerate(sorted(stated.dtypes)):
            code, bits, lanes = DType(name)
            struct.dtypes[i] = code | bits << 8 | lanes << 16
    return struct
