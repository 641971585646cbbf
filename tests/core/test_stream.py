"""The meaning of stream values on each platform."""

from __future__ import annotations

import pytest

import dlx
from dlx._core.stream import LEGACY, PER_THREAD, UNORDERED, Stream, handle_of, parse_stream
from dlx.errors import StreamError

CUDA, MANAGED, ROCM, HOST, PINNED, METAL = map(
    dlx.Device, ("cuda:1", "cuda_managed:1", "rocm:1", "cpu", "cuda_host:1", "metal")
)


class Core:
    """A stream of cuda.core: a method."""

    def __init__(self, *said):
        self.said = said

    def __cuda_stream__(self):
        return self.said


class CoreAttribute:
    """An older version of it: an attribute."""

    __cuda_stream__ = (0, 7)


class Torch:
    """A stream of torch."""

    def __init__(self, handle, device_index=1):
        self.cuda_stream, self.device_index = handle, device_index


class AnyTorch:
    """A stream of torch for any device, as torch.accelerator returns it."""

    def __init__(self, handle, device_index=1):
        self.handle, self.device_index = handle, device_index

    @property
    def native_handle(self):
        if self.handle is None:
            raise RuntimeError("this backend has no handles")
        return self.handle


class Cupy:
    """A stream of cupy; default streams belong to no device."""

    def __init__(self, handle, device_id=-1):
        self.ptr, self.device_id = handle, device_id


@pytest.mark.parametrize("device", [CUDA, MANAGED], ids=str)
@pytest.mark.parametrize(
    ("value", "handle"),
    [
        (-1, UNORDERED),
        (1, LEGACY),
        (2, PER_THREAD),
        (4096, 4096),
        (2**64 - 2, 2**64 - 2),
        (Core(0, 9), 9),
        (Core(0, 0), LEGACY),
        (CoreAttribute(), 7),
        (Torch(0), LEGACY),
        (Torch(5), 5),
        (AnyTorch(0), LEGACY),
        (AnyTorch(5), 5),
        (Cupy(0), LEGACY),
        (Cupy(2), PER_THREAD),
        (Cupy(8, 1), 8),
    ],
)
def test_on_cuda(device, value, handle):
    """Numbers are handles, objects have handles; an object with handle 0 means the legacy stream."""
    stream = parse_stream(value, device)
    assert (stream.handle, stream.wire, stream.device) == (handle, handle, device)
    assert stream.is_unordered is (handle == UNORDERED)
    if handle != UNORDERED:
        assert stream.keep is value


@pytest.mark.parametrize(
    ("value", "handle"), [(-1, UNORDERED), (0, 0), (4096, 4096), (Torch(0), 0), (Torch(2), 2), (Cupy(9), 9)]
)
def test_on_rocm(value, handle):
    """0 is the default stream on ROCm."""
    assert parse_stream(value, ROCM).wire == handle


@pytest.mark.parametrize(
    ("device", "value", "message"),
    [
        (CUDA, 0, "ambiguous on CUDA. Pass 1"),
        (CUDA, -2, "stream -2 is invalid"),
        (CUDA, 2**64, "stream 18446744073709551616 is invalid"),
        (CUDA, True, "bool is not a stream"),
        (CUDA, "1", "str is not a stream"),
        (CUDA, 1.0, "float is not a stream"),
        (CUDA, object(), "object is not a stream. Pass a handle"),
        (CUDA, Core(1, 5), r"returned \(1, 5\), not \(0, handle\)"),
        (CUDA, Core(5), r"returned \(5,\), not"),
        (CUDA, Torch(5, 0), "stream is on device 0, the memory is on cuda:1"),
        (CUDA, AnyTorch(5, 0), "stream is on device 0"),
        (CUDA, AnyTorch(None), "AnyTorch is not a stream"),
        (CUDA, Cupy(5, 3), "stream is on device 3"),
        (ROCM, 1, "stream 1 does not exist on ROCm. Pass 0"),
        (ROCM, 2, "stream 2 does not exist on ROCm"),
        (ROCM, -2, "stream -2 is invalid"),
        (HOST, 1, "host memory has no stream, found stream=1"),
        (HOST, 0, "host memory has no stream"),
        (PINNED, Torch(5), "host memory has no stream"),
        (METAL, 5, "does not support streams of metal:0"),
    ],
)
def test_what_is_no_stream_is_refused(device, value, message):
    """Invalid streams are rejected before the producer is called, with a fix."""
    with pytest.raises(StreamError, match=message):
        parse_stream(value, device)


@pytest.mark.parametrize("device", [HOST, METAL, ROCM, CUDA], ids=str)
def test_no_order_is_for_everybody(device):
    """-1 means no synchronization on any device."""
    assert parse_stream(-1, device).is_unordered


def test_streams_are_equal_by_device_and_handle():
    """The object that keeps a stream alive does not matter."""
    assert Stream(CUDA, 5, "a") == Stream(CUDA, 5, "b") != Stream(CUDA, 6, "a")
    assert len({Stream(CUDA, 5, "a"), Stream(CUDA, 5, "b"), Stream(ROCM, 5)}) == 2


def test_streams_have_names():
    """Plans and errors use the names."""
    assert str(Stream(CUDA, 1)) == "the legacy stream of cuda:1"
    assert str(Stream(CUDA, 2)) == "the per-thread stream of cuda:1"
    assert str(Stream(ROCM, 1)) == "stream 0x1 of rocm:1"
    assert str(Stream(CUDA, 255)) == "stream 0xff of cuda:1"
    assert str(Stream(CUDA, -1)) == "no stream"


def test_handles_of_real_streams():
    """An object without a handle has no handle; a class is not a stream."""
    assert handle_of(object()) is None and handle_of(5) is None
    assert handle_of(type("Pointer", (), {"ptr": True})()) is None
