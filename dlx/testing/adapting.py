"""What an adapter of dlx is held to, through dlx alone: what it declares is so."""

from __future__ import annotations

from typing import Any

import dlx
from dlx.registry import registry
from dlx.testing.check import Broken, NotApplicable, check, must, told
from dlx.testing.sources import Source
from dlx.testing.subject import Subject

__all__ = ["target_of", "tensor_of"]


def target_of(lib: Subject) -> Any:
    """Return the adapter as a target, or say that it is none."""
    target = registry.target(lib.adapter)
    if target.capabilities is None:
        raise NotApplicable(f"{lib.adapter} cannot be a target")
    return target


def tensor_of(source: Source, *, readonly: bool = False) -> Any:
    """Return a source's memory as a dlx.Tensor."""
    return dlx.from_pointer(
        source.address, source.shape, source.dtype, strides=source.strides, readonly=readonly, owner=source.memory
    )


@check(
    "adapter-round-trips", "Every dtype that the adapter takes goes in and comes back with every bit, and is shared.",
    kind="adapter", about="dtypes", severity="wrong",
)  # fmt: skip
def adapter_round_trips(lib: Subject) -> None:
    """From dlx.Tensor into the framework and back, for each dtype of its capabilities."""
    target = target_of(lib)
    taken = target.capabilities.dtypes
    for dtype in sorted(target.known_dtypes() if taken is None else taken):
        source = Source(dtype, lib.shape(4, 6))
        try:
            inside = dlx.convert(tensor_of(source), to=lib.adapter)
            back = dlx.convert(inside, to="dlx")
        except dlx.errors.DlxError as error:
            raise Broken(f"{dtype}, which it declares: {told(error)}") from error
        must(back.dtype == source.dtype and back.shape == source.shape, f"{dtype} came back as {back}")
        must(_elements(back) == source.elements(), f"the elements of {dtype} changed")


def _elements(tensor: Any) -> bytes:
    from dlx.testing.capsules import elements

    padded = bool(tensor.flags & 4)
    return elements(tensor.data_ptr, tensor.shape, tensor.strides, tensor.dtype, padded=padded)
