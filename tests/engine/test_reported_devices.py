"""Frameworks that import host memory only but also have GPU arrays: each array reports its device."""

from __future__ import annotations

import pytest
from support.cuda import gpulib

import dlx
from dlx import errors
from dlx.adapter import Adapter, Blocker, Capabilities, Description, FastPath, ReportedDevices

slow = dlx.convert.__wrapped__


class HostAdapter(Adapter):
    """It knows nothing about its arrays before they are exported, like tensorflow's adapter."""

    def __init__(self, framework):
        self.framework = framework
        self.name = self.package = framework.__name__
        self.types = (f"{self.name}.Array",)
        self.devices = ReportedDevices()
        self.fast_path = FastPath(types=self.types, export=lambda array: array.tensor)

    def capabilities(self):
        return Capabilities(dtypes=frozenset({"uint8"}), min_alignment=1)

    def export(self, obj, *, stream=None):
        self.framework.heard.append(stream)
        return obj.tensor

    def load(self, tensor):
        return self.framework.Array(tensor)


class CopyingAdapter(HostAdapter):
    """It copies within the framework, like paddle's adapter."""

    def copy(self, obj, device=None):
        self.framework.copied = device
        return self.framework.Array(dlx.convert(obj.tensor, to="dlx", device=device, copy=True))


@pytest.fixture(params=[HostAdapter, CopyingAdapter])
def lib(request, monkeypatch, cuda):
    """The framework."""
    return gpulib.install(monkeypatch, "libhost", cuda, request.param)


@pytest.mark.parametrize("convert", [dlx.convert, slow], ids=["fast", "slow"])
def test_memory_on_a_gpu_is_not_the_host_s(lib, convert):
    """It is moved to the host if requested, also in the plan; on its own device it stays unchanged."""
    x = lib.made(1)
    assert convert(x, to="libhost") is x
    assert convert(x, to="libhost", device="cuda:1") is x
    assert dlx.describe(x).device == dlx.Device("cuda:1")
    plan = dlx.plan(x, to="libhost", device="cpu")
    assert plan.outcome == "copied"
    assert [step.do for step in plan.steps][-1:] == ["move"]
    result = convert(x, to="libhost", device="cpu")
    assert result is not x
    assert result.tensor.device == dlx.Device("cpu")
    assert dlx.plan(result, to="libhost", device="cpu").outcome == "same"
    assert convert(result, to="libhost", device="cpu") is result
    with pytest.raises(errors.CopyRequiredError, match="cuda:1"):
        convert(x, to="libhost", device="cpu", copy=False)


def test_what_it_does_not_move_itself_dlx_moves(monkeypatch, cuda):
    """It is exported and moved; blockers of exports apply, such as gradients in paddle; the plan shows this."""

    class Moved(CopyingAdapter):
        def __init__(self, *args):
            super().__init__(*args)
            self.devices = ReportedDevices(moves=False)

        def describe(self, obj):
            return Description(blockers=(Blocker("it requires gradients", resolution=lambda x: x, needs="detach"),))

    lib = gpulib.install(monkeypatch, "libhost", cuda, Moved)
    x, lib.copied = lib.made(1), "never"
    with pytest.raises(errors.ConversionError, match="it requires gradients") as caught:
        slow(x, to="libhost", device="cpu")
    assert caught.value.fix == "Pass detach=True."
    assert str(dlx.plan(x, to="libhost", device="cpu").error) == str(caught.value)
    plan = dlx.plan(x, to="libhost", device="cpu", detach=True)
    assert [step.do for step in plan.steps][-2:] == ["detach", "move"]
    assert slow(x, to="libhost", device="cpu", detach=True).tensor.device == dlx.Device("cpu")
    assert lib.copied == "never"
    assert slow(x, to="libhost") is x
    assert dlx.plan(x, to="libhost", copy=True).outcome == "copied"


def test_what_it_cannot_hold_is_refused(lib):
    """It takes host memory only: another GPU, and an example on one, are errors that name the device."""
    x = lib.made(0)
    with pytest.raises(errors.DeviceError, match="cuda:1"):
        dlx.convert(x, to="libhost", device="cuda:1")
    with pytest.raises(errors.DeviceError, match="cuda:0"):
        dlx.convert(b"abcd", like=x)
    with pytest.raises(errors.DeviceError, match="cuda:0"):
        slow(b"abcd", like=x)
    assert dlx.convert(b"abcd", like=dlx.convert(x, to="libhost", device="cpu")).tensor.device == dlx.Device("cpu")


def test_its_export_is_told_the_consumers_stream(lib, monkeypatch, cuda):
    """An array's device is known before its export, so dlx passes the consumer's stream."""
    consumer = gpulib.install(monkeypatch, "libgpu", cuda)
    with consumer.on(cuda.stream(), 0) as stream:
        result = dlx.convert(lib.made(0), to="libgpu")
        assert lib.heard[-1] == stream.ptr
        assert result.device == dlx.Device("cuda:0")


def test_results_of_functions_come_back_on_the_host(lib):
    """A function that computes elsewhere answers in the caller's framework, in memory that it takes."""

    @dlx.using("dlx", device="cpu")
    def copied(tensor):
        assert tensor.device == dlx.Device("cpu")
        return dlx.convert(tensor, to="dlx", copy=True)

    result = copied(lib.made(0))
    assert type(result) is lib.Array
    assert result.tensor.device == dlx.Device("cpu")


def test_a_broken_answer_is_an_error_of_dlx(lib, monkeypatch):
    """The device that an array reports is checked."""
    monkeypatch.setattr(lib.Array, "__dlpack_device__", lambda self: "gpu")
    with pytest.raises(errors.DlxError, match="__dlpack_device__"):
        dlx.convert(lib.made(0), to="libhost", device="cpu")
