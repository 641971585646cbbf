"""Where the result of one array will be: on its own device, relabelled, copied, or moved to another device."""

from __future__ import annotations

from dlx._core.array_info import contiguous
from dlx._core.cuda import is_cuda
from dlx._core.extension import ffi, lib
from dlx._core.foreign import safe_repr
from dlx._core.native import tensor_address
from dlx._core.stream import is_unordered
from dlx._core.tensor import Tensor
from dlx._core.types import SUBBYTE_PADDED, Device, host_readable, same_device
from dlx._engine.plan import Step
from dlx._engine.request import HOST
from dlx._engine.transfer import Leaf
from dlx.adapter.base import Layout
from dlx.errors import CopyRequiredError, DeviceError, DlxError, LayoutError, StreamError

__all__ = ["decide_place", "note_copy", "result_device"]


def decide_place(leaf: Leaf, tensor: Tensor) -> DlxError | None:
    """Decide where the result will be. Pinned memory is host memory to a consumer that knows the host only."""
    request, device = leaf.request, tensor.device
    accepted = request.target.capabilities.device_types if request.target.capabilities else None
    wanted = request.device
    if wanted is None and accepted is not None and device.type not in accepted:
        wanted = _nearest(leaf, device, accepted)
    if wanted is not None and not same_device(wanted, device):
        if wanted.type == HOST.type and (host_readable(device) or device.type == lib.kDLCUDAManaged):
            leaf.view_device = HOST
            leaf.steps.append(Step("relabel", f"{device} memory is read by the host as it is"))
        elif (device.type, *wanted) == (lib.kDLCUDAManaged, lib.kDLCUDA, device.id):
            leaf.view_device = wanted
            leaf.steps.append(Step("relabel", f"{device} memory is memory of {wanted}"))
        else:
            error = _move(leaf, tensor, wanted)
            if error is not None:
                return error
    result = leaf.copy_device if leaf.copy_order is not None else result_device(leaf, tensor)
    if not (request.stream is None or is_unordered(request.stream)) and host_readable(result):
        return leaf.error(
            StreamError, f"host memory has no stream, found stream={safe_repr(request.stream)}", "Leave it out."
        )
    return None


def result_device(leaf: Leaf, tensor: Tensor) -> Device:
    """Return the device that the memory is presented as, unless it is copied."""
    return leaf.view_device or tensor.device


def _nearest(leaf: Leaf, device: Device, accepted: frozenset[int]) -> Device | None:
    """Return the device to move memory to that the consumer cannot hold on its own; None where there is none."""
    if device.type == lib.kDLCUDAManaged and lib.kDLCUDA in accepted:
        return Device(lib.kDLCUDA, device.id)
    if not (host_readable(device) or is_cuda(device)):
        return None
    default = leaf.request.target.home()
    return default if default.type in accepted else None


def _move(leaf: Leaf, tensor: Tensor, wanted: Device) -> DlxError | None:
    """Note that the array is copied to another device, or return why it cannot be."""
    device, target = tensor.device, leaf.request.target
    accepted = target.capabilities.device_types if target.capabilities is not None else None
    if accepted is not None and wanted.type not in accepted:
        known = target.why_not_on(wanted)
        reason, fix = known or (f"{target.name} {target.display_name}s cannot be on {wanted}", "Leave device out.")
        return leaf.error(DeviceError, reason, fix)
    reachable = wanted == HOST or wanted.type == lib.kDLCUDA
    if not reachable or not (host_readable(device) or is_cuda(device)):
        reason = f"it is on {device}, and dlx cannot move it to {wanted}"
        return leaf.error(DeviceError, reason, "Leave device out, or move it in its own framework first.")
    if leaf.request.copy is False:
        return leaf.error(CopyRequiredError, f"it is on {device}, and the result is on {wanted}", "Drop copy=False.")
    error = note_copy(leaf, tensor, "")
    if error is None:
        leaf.copy_device = wanted
        del leaf.steps[-1]
        if is_cuda(device) and is_cuda(wanted) and _has_gaps(tensor, permuted=not leaf.copy_order):
            leaf.gather = True
            leaf.steps.append(Step("copy", f"made compact on {device}, devices copy runs to each other", tensor.nbytes))
        leaf.steps.append(Step("move", f"from {device} to {wanted}", tensor.nbytes))
    return error


def _has_gaps(tensor: Tensor, *, permuted: bool) -> bool:
    """Return whether the elements are not one run of memory, or not in row-major order if that counts as well."""
    layout = lib.dlx_layout(ffi.cast("DLTensor *", tensor_address(tensor)))
    odd = Layout.GAPS | Layout.ZERO | Layout.NEGATIVE
    return bool(layout & (odd | Layout.PERMUTED if permuted else odd))


def note_copy(leaf: Leaf, tensor: Tensor, why: str) -> DlxError | None:
    """Note that dlx makes a copy, or return why it cannot."""
    if not (host_readable(tensor.device) or is_cuda(tensor.device)):
        reason = f"it is on {tensor.device}, and dlx copies memory of the host and of CUDA devices only"
        return leaf.error(DeviceError, reason, "Copy it in its own framework first.")
    packed = tensor.dtype.bits * tensor.dtype.lanes % 8 and not tensor.flags & SUBBYTE_PADDED
    if leaf.repack and (tensor.dtype.bits >= 8 or tensor.dtype.lanes != 1):
        reason = f"dlx does not pack or unpack {tensor.dtype}"
        return leaf.error(LayoutError, reason, "Convert to 'dlx', which holds both.")
    device = result_device(leaf, tensor) if leaf.copy_order is None else leaf.copy_device
    if leaf.repack and is_cuda(tensor.device) and is_cuda(device):
        reason = (
            f"dlx packs and unpacks {tensor.dtype} on the host only, and it would go from {tensor.device} to {device}"
        )
        return leaf.error(LayoutError, reason, "Pass device='cpu', and move the result, or convert to 'dlx'.")
    if packed and not contiguous(tensor.shape, tensor.strides):
        reason = f"its {tensor.dtype} elements are packed below one byte and not contiguous"
        return leaf.error(LayoutError, reason, "Make it contiguous in its own framework first.")
    capabilities = leaf.request.target.capabilities
    if leaf.copy_order is None:  # else it is moved, which copies it
        leaf.copy_device = HOST if host_readable(device) else Device(lib.kDLCUDA, device.id)
        leaf.copy_order = bool(capabilities and capabilities.layouts & Layout.PERMUTED)
        leaf.steps.append(Step("copy", why, tensor.nbytes))
    return None
