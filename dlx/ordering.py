"""Which streams must have been waited for before the arrays of a tree are read: collected first, ordered once each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dlx.abi import Device, host_readable
from dlx.errors import DeviceError
from dlx.planning import Leaf, Request

__all__ = ["ORDERERS", "Group", "groups_of", "order"]


@dataclass(frozen=True, slots=True)
class Group:
    """Arrays on one device whose producers work on one stream: one record and one wait are enough for all of them.

    Attributes
    ----------
    device
        Where the arrays are.
    producer
        Handle of the stream that their producers work on; None where they say of none.
    """

    device: Device
    producer: int | None


def groups_of(leaves: Iterable[Leaf]) -> list[Group]:
    """Return every pair of device and producer's stream among exported arrays, each once, in the order they are met.

    All arrays are looked at: a tree may begin on the host and end on two devices. Host memory has no stream and gives
    no group. An adapter is asked for its stream once per device.
    """
    streams: dict[tuple[int, Device], int | None] = {}
    groups: dict[Group, None] = {}
    for leaf in leaves:
        if leaf.tensor is None or host_readable(leaf.tensor.device):
            continue
        device = leaf.tensor.device
        asked = (id(leaf.source), device)
        if asked not in streams:
            streams[asked] = leaf.source.work_stream(device)
        groups[Group(device, streams[asked])] = None
    return list(groups)


ORDERERS: dict[int, Callable[[Device, int, int | None], None]] = {}
"""DLPack device type -> ``order(device, producer, consumer)``: makes the consumer's stream wait for the producer's.

Handles; consumer None: the target says of no stream of its own. Called once per group of a tree, before any import.
"""


def order(groups: Iterable[Group], request: Request) -> None:
    """Make the consumer's stream wait for the streams of all groups, once each.

    Nothing is done for a group without a stream, for one that works on the consumer's stream itself, and where
    ``stream=-1`` says so.

    Raises
    ------
    DeviceError
        If work on a device cannot be waited for here.
    """
    if request.stream == -1:
        return
    for group in groups:
        consumer = request.stream if request.stream is not None else request.target.work_stream(group.device)
        if group.producer is None or group.producer == consumer:
            continue
        orderer = ORDERERS.get(group.device.type)
        if orderer is None:
            reason = f"work on stream {group.producer:#x} of {group.device} cannot be waited for"
            raise DeviceError(reason, fix="Synchronise the device, then pass stream=-1.")
        orderer(group.device, group.producer, consumer)
