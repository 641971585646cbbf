"""PyTorch for dlx: torch.Tensor, nn.Parameter and subclasses.

Versions: 2.9 and later. Devices: the host; CUDA's, and ROCm's, which torch calls "cuda" as well. Dtypes: all that torch
and DLPack both name. Shared: everything strided; torch has no negative strides. Copied: conj and neg bits, and zero
tensors. Refused: gradients (unless detach=True), sparse, quantized, nested, meta, fake and functorch tensors.

Graphs: an array that is made while torch traces is lifted to a constant of the graph, as by `torch.from_numpy`.
Lifetime: torch's capsules hold the tensor, whose storage `t.set_()`, `t.data = ...` or `module.half()` would free. dlx
holds the storage, and forbids to resize it, as `t.numpy()` does; torch cannot forbid that on devices.
Streams: dlx orders those of CUDA once per conversion; torch itself orders ROCm's.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import _dlx_torch
import dlx_torch_gradients

from dlx import adapter as api
from dlx.errors import ConversionError, DeviceError, DTypeError

HOST = api.Device("cpu")
_NAMES = {"mps": "metal", "xpu": "oneapi"}  # device names that differ: torch's -> dlx's

_proven = functools.partial(api.KnownIssue, see="tests/engine/test_defects.py")
_SHELL = re.compile(r"u?int[1-7]")  # dtypes that torch has no kernel for, not even to copy

_GRAD = api.Blocker("it requires gradients, which would be lost", "", ConversionError, "detach", needs="detach")
_CONJ = api.Blocker("its conj bit is set: conjugation is still pending", resolution="resolve_conj", needs="copy")
_NEG = api.Blocker("its neg bit is set: negation is still pending", resolution="resolve_neg", needs="copy")
_ZERO = api.Blocker("it is a zero tensor of autograd, without memory", resolution="clone", needs="copy")
_GUARDS = api.Guard("requires_grad", _GRAD), api.Guard("is_conj", _CONJ, kinds=("complex",)), api.Guard("is_neg", _NEG)


def _unflatten_parameters(old: Any, keys: list[str] | None, children: list[Any], new_empty: Any) -> Any:
    """Make a new ParameterList or ParameterDict, which would wrap plain tensors in parameters."""
    torch = sys.modules["torch"]
    if any(isinstance(child, torch.Tensor) and not isinstance(child, torch.nn.Parameter) for child in children):
        raise TypeError("plain tensors would become parameters")
    new = type(old)(children if keys is None else OrderedDict(zip(keys, children, strict=True)))  # it sorts a dict
    return new.train(old.training)


def _unflatten_tensordict(old: Any, keys: list[Any] | None, children: list[Any], new_empty: Any) -> Any:
    """Put the children into a copy that shares the rest: batch size, device, names of dimensions."""
    new = old.clone(recurse=False)
    is_other = sys.modules["tensordict"].is_non_tensor  # text, numbers, objects: told apart by `get` only
    for key, child in zip(keys or (), children, strict=True):
        if is_other(old.get(key)):
            new.set_non_tensor(key, child)
        elif new[key] is not child:
            new[key] = child
    return new.lock_() if old.is_locked else new


_mapping = functools.partial(api.Container, kind="mapping", flatten=api.flatten_mapping, holds="torch", falls_to=dict)
_CONTAINERS = (
    _mapping(types=("tensordict.TensorDictBase",), unflatten=_unflatten_tensordict),
    api.Container(
        types=("torch.nn.utils.rnn.PackedSequence",),
        kind="record",
        flatten=lambda packed: (list(packed._fields), list(packed)),
        unflatten=lambda old, keys, children, new_empty: tuple.__new__(type(old), children),
        mutable=False,
        holds="torch",
        falls_to=dict,
    ),
    api.Container(types=("torch.nn.ParameterList",), unflatten=_unflatten_parameters, holds="torch", falls_to=list),
    _mapping(types=("torch.nn.ParameterDict",), unflatten=_unflatten_parameters),
    api.Container(types=("torch.Size",), kind="leaf"),  # torch.zeros takes no lazy view of one
    api.Container(types=("torch.nn.Module",), kind="leaf"),  # it is changed in place by its owner, not rebuilt
)


_STRIDES: dict[str, Any] = {"layouts": api.Layout.ZERO | api.Layout.GAPS | api.Layout.PERMUTED}
_READONLY: dict[str, Any] = {"keeps_readonly": False}
_LACKS = frozenset({"float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"})
_TO_2_9 = _proven(
    "from_dlpack refuses float8 and float4; dlx hands them over as uint8",
    before="2.9.2",  # which there is not; 2.10.0+cu128, as a wheel calls itself, would count as older than 2.10
)

_UNPAIRED = {
    "float4_e2m1fn": (
        "torch has no dtype float4_e2m1fn for one value, only float4_e2m1fn_x2 for two",
        "With x = numpy.asarray(x).view('uint8'), convert x[..., ::2] | x[..., 1::2] << 4, "
        "and call .view(torch.float4_e2m1fn_x2) on the result.",
    )
}


class _DTypes(api.DTypes):
    @functools.cached_property
    def storage(self) -> Mapping[str, str]:  # type: ignore[override]
        if not _TO_2_9.affects(sys.modules["torch"].__version__):
            return {}
        return {name: "uint8" for name in self.names if name.startswith(("float8", "float4"))}


DTYPES = _DTypes(
    "torch",
    {each.name: each.name for each in api.DType.all() if each.bits >= 8 and each.name not in _LACKS}
    | {"float4_e2m1fnx2": "float4_e2m1fn_x2"},
)


# ---- devices and streams ---------------------------------------------------------------------------------------------


class _Devices(api.Devices):
    """The host, and the devices that this build of torch calls "cuda"."""

    @functools.cached_property
    def kind(self) -> str:
        """Which devices this build calls "cuda": "cuda" or "rocm"; empty if it has none."""
        version = sys.modules["torch"].version
        return "rocm" if version.hip else "cuda" if version.cuda else ""

    def to_native(self, device: api.Device) -> Any:
        torch = sys.modules["torch"]
        if self.kind and device.name == self.kind:
            return torch.device("cuda", device.id)
        if device.type != HOST.type:
            has = f"It has 'cpu' and '{self.kind}'." if self.kind else "It holds host memory only: device='cpu'."
            raise DeviceError(f"this build of torch has no device {device}", fix=has)
        return torch.device("cpu")

    def from_native(self, native_device: Any) -> api.Device:
        kind = native_device.type
        if kind == "cuda":
            kind = self.kind or kind
        return api.Device(f"{_NAMES.get(kind, kind)}:{native_device.index or 0}")

    def current(self, device_type: int) -> int:
        if not self.kind or device_type != api.Device(self.kind).type:
            return 0
        try:
            return int(sys.modules["torch"].cuda.current_device())
        except (AssertionError, RuntimeError):  # there is no driver, or none after a fork: dlx says so itself
            return 0

    def activate(self, device: api.Device) -> AbstractContextManager[Any]:
        # torch finds the device by the tensor; only exports on ROCm look at the current one. On CUDA, making another
        # one current and going back may leave the runtime on it, which other frameworks follow.
        return sys.modules["torch"].cuda.device(device.id) if self.kind == "rocm" else contextlib.nullcontext()

    def new_array(self, shape: Sequence[int], dtype: api.DType, device: api.Device, strides: Sequence[int]) -> Any:
        torch = sys.modules["torch"]
        if _is_tracing()():
            return None  # `load` lifts memory that dlx allocates
        # Plain memory, whatever mode the caller is in.
        with torch.inference_mode(mode=False):
            return torch.empty_strided(shape, strides, dtype=DTYPES.to_native(dtype), device=self.to_native(device))

    def available(self) -> Iterable[Any]:
        torch = sys.modules["torch"]
        yield torch.device("cpu")
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator().type
            yield from (torch.device(kind, number) for number in range(torch.accelerator.device_count()))


DEVICES = _Devices()


def _current_stream(device: api.Device) -> Any:
    is_gpu = DEVICES.kind and device.name == DEVICES.kind
    return sys.modules["torch"].cuda.current_stream(device.id) if is_gpu else None


@contextlib.contextmanager
def _on_stream(stream: api.Stream) -> Iterator[None]:
    """Return a context in which torch works on a stream of another."""
    cuda, number = sys.modules["torch"].cuda, stream.device.id
    kept = stream.keep
    if not isinstance(kept, cuda.Stream):
        default = stream.handle <= 1  # CUDA's legacy stream, ROCm's default one
        kept = cuda.default_stream(number) if default else cuda.ExternalStream(stream.handle, number)
    # torch makes a stream's device current as well, which a function's other arrays would follow.
    here = cuda.current_device()
    with cuda.stream(kept), cuda.device(here):
        yield


# ---- the adapter -----------------------------------------------------------------------------------------------------


def _consume(obj: Any, tensor: api.Tensor, shared: bool) -> api.Tensor:
    """Forbid a shared storage to be resized, as `t.numpy()` does: torch has no other interface for it."""
    torch, storage = sys.modules["torch"], _storage(obj) if shared else None
    if storage is not None and storage.device.type == "cpu" and storage.resizable() and "numpy" in sys.modules:
        with _plainly(torch):
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return tensor


def _keeps_memory(kind: Any) -> bool:
    """Return whether a subclass has memory as torch's own tensors have, and leaves their export to torch."""
    tensor = sys.modules["torch"].Tensor
    answers = (getattr(each.__torch_function__, "__func__", each.__torch_function__) for each in (kind, tensor))
    return (
        kind.__dlpack__ is tensor.__dlpack__
        and kind.__torch_dispatch__ == tensor.__torch_dispatch__
        and len(set(answers)) == 1  # another function would see the export
    )


def _exchange() -> Any:
    """Return torch's own table, which its subclasses do not carry themselves, with the slots of `_dlx_torch`."""
    _is_tracing()
    own = sys.modules["torch"].Tensor.__dlpack_c_exchange_api__
    return _dlx_torch.lifting_table(_dlx_torch.exchange_table(own, []))


def _is_tracing() -> Any:
    """Return the function that says whether torch traces, or transforms, new arrays of this thread."""
    inner = sys.modules["torch"]._C

    def ask() -> bool:
        try:
            depth = inner._len_torch_dispatch_stack()
            return (type(depth) is int and depth > 0) or inner._are_functorch_transforms_active() is True
        except AttributeError:  # a torch that cannot say it: to lift is right for all
            return True

    key = getattr(getattr(inner, "DispatchKey", None), "FuncTorchDynamicLayerFrontMode", 0)
    _dlx_torch.bind(_lift, ask, int(key))
    return _dlx_torch.is_tracing


def _lift(tensor: Any) -> Any:
    """Return a tensor as a constant of the graph that torch traces, as `torch.from_numpy` does."""
    return sys.modules["torch"].ops.aten.lift_fresh.default(tensor)


def _guarded(obj: Any, writable: bool) -> Any:
    if not obj.is_inference():
        return obj
    with sys.modules["torch"].inference_mode(False):  # inference tensors do not count writes
        return obj.clone()


def _mark_written(obj: Any) -> None:
    if not obj.is_inference():  # those do not count writes
        sys.modules["torch"].autograd.graph.increment_version(obj)


@functools.cache
def _guard_function() -> tuple[Any, frozenset[str]] | None:
    """Return the function of `_dlx_torch`, if its answers about real tensors are right."""
    torch, function = sys.modules["torch"], _dlx_torch.guard_function()
    if function is None:
        return None
    with _plainly(torch):
        real, grad = torch.zeros(4, 3, device="cpu"), torch.zeros(2, device="cpu", requires_grad=True)
        conj = torch.zeros(3, dtype=torch.complex64, device="cpu").conj()
        samples = [real, real[1:], real.T[1], torch.nn.Parameter(real), grad, grad.detach(), conj, conj.imag, conj.real]
        for tensor in samples:
            if _dlx_torch.handle(tensor) != tensor._cdata:
                return None
            said = (tensor.requires_grad, tensor.is_neg(), tensor.is_conj())
            if _dlx_torch.read_facts(tensor) != (*said, tensor.untyped_storage().nbytes(), tensor.storage_offset()):
                return None
        names = DTYPES.known() - {"complex32"}  # torch warns of it
        samples += [torch.empty(3, dtype=DTYPES.to_native(api.DType(name)), device="cpu") for name in names]
        _dlx_torch.exchange_table(torch.Tensor.__dlpack_c_exchange_api__, samples)
    return function, frozenset({"requires_grad", "is_neg", "is_conj", api.OWNER_BOUNDS})


def _protocols(kind: type) -> tuple[str, ...]:
    table = "__dlpack_c_exchange_api__"
    return ("__dlpack__", table) if hasattr(kind, table) else ("__dlpack__",)


def _is_materialised(obj: Any) -> bool:
    """Return whether a tensor owns its memory: the export of a copy-on-write one would copy it."""
    return not sys.modules["torch"]._C._is_cow_tensor(obj)


def _exported_info(framework: str, obj: Any, tensor: api.Tensor) -> api.ArrayInfo:
    """Return the description of a host tensor without blockers; the tensor of dlx answers most of it."""
    nbytes, kind = tensor.nbytes, type(obj)
    return api.ArrayInfo(
        framework,
        _own_names().get(kind) or api.type_name(kind),
        tensor.dtype,
        _name_of(obj.dtype),
        tensor.shape,
        tensor.strides if nbytes else tuple(obj.stride()),
        HOST,
        nbytes,
        False,
        tensor.data_ptr if nbytes else 0,
        "torch.UntypedStorage",
        _protocols(kind),
    )


@functools.cache
def _own_names() -> dict[type, str]:
    """Return the names of torch's own classes, which live as long as torch."""
    torch = sys.modules["torch"]
    return {kind: api.type_name(kind) for kind in (torch.Tensor, torch.nn.Parameter)}


@functools.cache
def _name_of(native_dtype: Any) -> str:
    return str(native_dtype).removeprefix("torch.")


class TorchAdapter(api.Adapter):
    """torch.Tensor."""

    name = package = "torch"
    types = ("torch.Tensor",)
    namespaces = ("array_api_compat.torch", "torch")
    dtypes = DTYPES
    devices = DEVICES
    containers = _CONTAINERS
    fast_path = api.FastPath(
        types=("torch.Tensor", "torch.nn.Parameter"),
        subclasses=_keeps_memory,
        exchange=_exchange,
        unblocks=True,
        guards=_GUARDS,
        guard_function=_guard_function,
        owner=api.Owner("untyped_storage", "torch.UntypedStorage", "data_ptr", "nbytes", freeze=("resizable", "numpy")),
        conditions=(("torch.autograd.forward_ad", "_current_level", -1),),  # no dual numbers about
        checked_dtypes=("int8", "uint8"),  # int4 and smaller call themselves these
        describe=_exported_info,
        ready=_is_materialised,
    )
    streams = api.StreamSupport(current=_current_stream, activate=_on_stream, quick=True)  # they are never destroyed
    arrays = api.Arrays(consume=_consume, alignment=64)
    writes = api.WriteTracking(
        guarded=_guarded,
        count=lambda obj: None if obj.is_inference() else int(obj._version),
        mark_written=_mark_written,
    )
    gradients = dlx_torch_gradients.support(DTYPES)
    known_issues = (
        _TO_2_9,
        _proven("from_dlpack aborts the process on negative strides; from 2.14 on it raises", lowers=_STRIDES),
        _proven("from_dlpack ignores that memory is read-only, and gives a tensor that writes to it", lowers=_READONLY),
        _proven("gives int1 to int7 and uint1 to uint7, shells around bytes, out as int8 or uint8; dlx refuses them"),
        _proven("gives memory out without negating it where the neg bit is set; dlx resolves it first"),
        _proven("crashes when it copies complex128 at an odd address; dlx has it copied as float64"),
        _proven("crashes when it resolves a conj or neg bit over data that is not aligned; dlx refuses that"),
        _proven("crashes when it copies a tensor whose storage was resized to nothing; dlx refuses that"),
        _proven("its exchange table exports tensors that require gradients; dlx asks its guards first"),
        _proven("from_dlpack asks a producer up to four times where it raises TypeError; dlx asks once"),
    )

    # ---- as a producer ----------------------------------------------------------------------------------------------

    def describe(self, obj: Any) -> api.Description:
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():  # a subclass's would run for every attribute
            return self._description(obj)

    def _description(self, obj: Any) -> api.Description:
        torch = sys.modules["torch"]
        info = functools.partial(self._info, obj)
        refused = self._without_memory(obj)
        if refused is not None:
            return api.Description(info, (refused, *_graph(torch, obj)))
        if obj._is_zerotensor():
            return api.Description(info, (*_blockers(obj), _ZERO), device=HOST if obj.is_cpu else None)
        dtype, storage = DTYPES.from_native(obj.dtype), _storage(obj)
        refused = self._without_dlpack(obj, dtype, storage)
        if refused is not None:
            return api.Description(info, (refused, *_graph(torch, obj)))
        own = type(obj).__dlpack__ is not torch.Tensor.__dlpack__  # a subclass may export something else
        if obj.requires_grad or obj.is_conj() or obj.is_neg():
            return api.Description(info, _blockers(obj), needs_export=own, device=HOST if obj.is_cpu else None)
        is_lazy = getattr(torch._C, "_is_cow_tensor", None)
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or is_lazy is None or is_lazy(obj):
            return api.Description(info, needs_export=own)  # an export materialises a copy-on-write tensor
        if DEVICES.kind == "rocm" and not obj.is_cpu:
            return api.Description(info)
        assert dtype is not None
        device = HOST if obj.is_cpu else DEVICES.from_native(obj.device)
        tensor = api.over_memory(obj.data_ptr(), obj.shape, obj.stride(), dtype, device, owner=storage)
        on_host = functools.partial(_exported_info, self.name, obj, tensor)
        return api.Description(on_host if device is HOST else info, (), tensor)

    def _without_memory(self, obj: Any) -> api.Blocker | None:
        """Return why there is no plain memory behind a tensor, or None. Asked before anything touches data."""
        torch = sys.modules["torch"]
        exact = type(obj) is torch.Tensor or type(obj) is torch.nn.Parameter
        if not exact and (fake := api.look_up("torch._subclasses.fake_tensor.FakeTensor")) and isinstance(obj, fake):
            return api.Blocker("a FakeTensor has no data", "Convert outside of FakeTensorMode.")
        if torch._C._functorch.is_functorch_wrapped_tensor(obj):
            because = "inside a torch.func transform (vmap, grad, jvp) values have no data"
            return api.Blocker(because, "Convert outside it.")
        if torch._is_functional_tensor(obj):
            return api.Blocker("inside functionalize() values have no data", "Convert outside it.")
        if not exact and torch.nn.parameter.is_lazy(obj):
            blocks = ("copy", "detach") if obj.requires_grad else ("copy",)  # torch refuses both as well
            return api.Blocker("it is not initialized yet", "Run the module once first.", also_blocks=blocks)
        if obj.is_nested:
            fix = "Call .to_padded_tensor(value), or .unbind() and convert the parts."
            return api.Blocker("it is nested (ragged)", fix)
        if obj.is_meta:
            fix = "Fill a new one: torch.empty_like(x, device='cpu')."
            return api.Blocker("it is on the meta device, which has no data", fix)
        if obj.layout is not torch.strided:
            kind = str(obj.layout).removeprefix("torch.")
            return api.Blocker(f"its layout is {kind}, not strided", "Call .to_dense() first.")
        if obj.is_quantized:
            fix = "Call .dequantize(), or .int_repr() for the stored integers."
            return api.Blocker("it is quantized", fix, DTypeError)
        forward = torch.autograd.forward_ad
        if forward._current_level >= 0 and forward.unpack_dual(obj).tangent is not None:
            fix = "Convert torch.autograd.forward_ad.unpack_dual(t).primal."
            return api.Blocker("it carries a forward-mode tangent, which would be lost", fix)
        if not obj.is_cpu and obj.device.type != "cuda":
            because = f"it is on {obj.device}, and dlx converts memory of the host, of CUDA and of ROCm"
            return api.Blocker(because, "Call .cpu() first.")
        return None

    def _without_dlpack(self, obj: Any, dtype: api.DType | None, storage: Any) -> api.Blocker | None:
        torch = sys.modules["torch"]
        if obj.dtype is torch.complex32 and obj.is_conj() and obj.is_neg():
            because = "its conj and neg bits are both set, which torch itself cannot resolve for complex32"
            return api.Blocker(
                because, "Call .conj().resolve_neg() first, and conjugate the result.", also_blocks=("copy",)
            )
        if dtype is None:
            name = _name_of(obj.dtype)
            because = f"torch.{name} has no DLPack dtype of its own (torch would export plain bytes)"
            fix, blocks = "Call .view(torch.uint8) if the bytes are what you need.", ("copy",)
            return api.Blocker(because, fix, DTypeError, also_blocks=blocks if _SHELL.fullmatch(name) else ())
        extent = obj.numel()
        if not extent:
            return None
        held = 0 if storage is None else storage.nbytes()
        address = _address(torch, obj)
        if storage is None or (held and not address):
            if hasattr(obj, "full_tensor"):
                fix = "Call .to_local() for the part of this process, or .full_tensor() to gather all of it."
                return api.Blocker("it is spread over the processes of a mesh", fix)
            fix = "Convert the tensors that it wraps."
            return api.Blocker("it is a wrapper subclass, with no memory of its own", fix)
        if not obj.is_contiguous():
            strides = obj.stride()
            extent = sum(map(operator.mul, obj.shape, strides)) - sum(strides) + 1
        itemsize = obj.element_size()
        needed = (obj.storage_offset() + extent) * itemsize
        if (obj.is_conj() or obj.is_neg()) and address % min(itemsize, 16):
            because = "its conj or neg bit is set and its data is not aligned, which torch itself crashes on"
            return api.Blocker(because, "Copy it into aligned memory before taking .conj() or .imag.")
        if held < needed:
            found = "emptied (resize_(0))" if not held else f"resized to {held} bytes"
            because = f"its storage was {found}, and it needs {needed} bytes"
            return api.Blocker(because, "Convert it before that happens.", also_blocks=("copy",))  # torch would crash
        return None

    def _info(self, obj: Any) -> api.ArrayInfo:
        torch = sys.modules["torch"]
        kind = type(obj)
        with torch._C.DisableTorchFunctionSubclass():  # as in `describe`
            if torch.nn.parameter.is_lazy(obj):  # every question raises
                return api.ArrayInfo(self.name, api.type_name(kind), device=_device_of(obj), protocols=_protocols(kind))
            strided = obj.layout is torch.strided and not obj.is_nested
            plain = self._without_memory(obj) is None
            return api.ArrayInfo(
                framework=self.name,
                type_name=api.type_name(kind),
                dtype=DTYPES.from_native(obj.dtype),
                dtype_name=_name_of(obj.dtype),
                shape=tuple(obj.shape) if not obj.is_nested else None,
                strides=tuple(obj.stride()) if strided else None,
                device=_device_of(obj),
                nbytes=obj.numel() * obj.element_size() if not obj.is_nested else 0,
                address=_address(torch, obj) if plain and obj.numel() else 0,
                owner="torch.UntypedStorage",
                protocols=_protocols(kind),
                notes=tuple(guard.ask for guard in _GUARDS if guard.holds(obj)),
            )

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        torch, storage, device = sys.modules["torch"], _storage(obj), _device_of(obj)
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or device is None or device.name == "rocm":
            # A subclass may have its own __dlpack__; on ROCm torch orders the streams.
            tensor = super().export(obj, stream=stream)
            return tensor if storage is None else api.keeping(tensor, storage)
        dtype = DTYPES.from_native(obj.dtype)
        assert dtype is not None
        return api.over_memory(obj.data_ptr(), obj.shape, obj.stride(), dtype, device, owner=storage)

    # ---- as a consumer ----------------------------------------------------------------------------------------------

    def capabilities(self) -> api.Capabilities:
        self.is_tracing = _is_tracing()
        kind = DEVICES.kind
        version, fix = sys.modules["torch"].__version__, "Install one for the device, or leave device out."
        why = f"this torch ({version}) is built for the host only", fix
        return api.Capabilities(
            dtypes=DTYPES.known(),
            # Whether there is a device is not asked: that would initialise CUDA, which forked workers do not survive.
            device_types=frozenset(api.Device(name).type for name in ("cpu", kind) if name),
            layouts=api.Layout.ZERO | api.Layout.GAPS | api.Layout.PERMUTED,
            empty_extents="leading",
            refusals=_UNPAIRED | ({} if kind else dict.fromkeys(("cuda", "rocm"), why)),
        )

    def load(self, tensor: api.Tensor) -> Any:
        array = sys.modules["torch"].from_dlpack(tensor)
        return _lift(array) if self.is_tracing is not None and self.is_tracing() else array

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        torch = sys.modules["torch"]
        if obj.dtype is getattr(torch, "float4_e2m1fn_x2", ()):  # torch 2.9 has no kernel to copy it
            return self.copy(obj.view(torch.uint8), device).view(obj.dtype)
        if device is not None:
            return obj.to(DEVICES.to_native(device))
        plain = obj.dtype is torch.complex128 and obj.device.type == "cpu" and not (obj.is_conj() or obj.is_neg())
        if plain and _address(torch, obj) % 16:  # torch would die of it, and does not of float64
            return torch.view_as_complex(torch.view_as_real(obj).clone())
        return obj.clone()


def _blockers(obj: Any) -> tuple[api.Blocker, ...]:
    return tuple(guard.blocker for guard in _GUARDS if guard.blocker and guard.holds(obj))


def _graph(torch: Any, obj: Any) -> tuple[api.Blocker, ...]:
    """Return the blocker of a tensor that may have a graph, which torch itself can drop of one without plain memory."""
    recorded = (
        obj.requires_grad
        or torch._C._functorch.is_functorch_wrapped_tensor(obj)  # which says nothing of the levels inside
        or torch.autograd.forward_ad._current_level >= 0
    )
    return (_GRAD,) if recorded else ()


def _address(torch: Any, obj: Any) -> int:
    """Return a tensor's address, 0 without one; the public way would copy a copy-on-write tensor."""
    try:
        start = int(torch._C._data_address(obj))  # of the storage
        return start + obj.storage_offset() * obj.element_size() if start else 0
    except (NotImplementedError, RuntimeError):
        return 0


def _device_of(obj: Any) -> api.Device | None:
    if obj.device.type == "cpu":
        return HOST
    try:
        return DEVICES.from_native(obj.device)
    except DeviceError:
        return None


def _storage(obj: Any) -> Any:
    """Return the storage behind a tensor; None for wrapper subclasses."""
    try:
        return obj.untyped_storage()
    except RuntimeError as error:  # and NotImplementedError
        if "Failed to allocate" in str(error):
            raise MemoryError from error
        return None


@contextlib.contextmanager
def _plainly(torch: Any) -> Iterator[None]:
    """Suspend active tracing and transforms: this is about memory."""
    with api.look_up("torch.utils._python_dispatch")._disable_current_modes(), torch._C._DisableFuncTorch():
        yield


dlx_adapters = api.offer(TorchAdapter())
