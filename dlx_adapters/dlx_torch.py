"""The PyTorch adapter: torch.Tensor, nn.Parameter and subclasses.

Versions: 2.9 and later. Devices: the host, CUDA, and ROCm, which torch also calls "cuda". Dtypes: all that torch and
DLPack have in common. Shared: strided tensors; torch has no negative strides. Copied: conj and neg bits, zero tensors.
Refused: gradients (unless detach=True), sparse, quantized, nested, meta, fake and functorch tensors.

Graphs: arrays created while torch traces become constants of the graph, as with `torch.from_numpy`.
Lifetime: torch's capsules keep the tensor alive, but `t.set_()`, `t.data = ...` or `module.half()` would free its
storage. dlx keeps the storage and makes it non-resizable, like `t.numpy()`; on devices torch cannot do the latter.
Streams: dlx synchronizes CUDA streams once per conversion; torch synchronizes ROCm streams itself.
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

from dlx import adapter as api
from dlx.errors import ConversionError, DeviceError, DTypeError
from dlx_adapters import _dlx_torch, dlx_torch_compound, dlx_torch_gradients, dlx_torch_operators

HOST = api.Device("cpu")
_NAMES = {"mps": "metal", "xpu": "oneapi"}  # torch's device names -> dlx's

_tested_issue = functools.partial(api.KnownIssue, see="tests/engine/test_defects.py")
_SHELL = re.compile(r"u?int[1-7]")  # dtypes without any kernels in torch, even for copies

_GRAD = api.Blocker("it requires gradients, which would be lost", "", ConversionError, "detach", needs="detach")
_CONJ = api.Blocker("its conj bit is set (pending conjugation)", resolution="resolve_conj", needs="copy")
_NEG = api.Blocker("its neg bit is set (pending negation)", resolution="resolve_neg", needs="copy")
_ZERO = api.Blocker("it is a zero tensor of autograd without memory", resolution="clone", needs="copy")
_GUARDS = api.Guard("requires_grad", _GRAD), api.Guard("is_conj", _CONJ, kinds=("complex",)), api.Guard("is_neg", _NEG)


def _unflatten_parameters(old: Any, keys: list[str] | None, children: list[Any], new_empty: Any) -> Any:
    """Return a new ParameterList or ParameterDict; refuse tensors, which it would wrap in parameters."""
    torch = sys.modules["torch"]
    if any(isinstance(child, torch.Tensor) and not isinstance(child, torch.nn.Parameter) for child in children):
        raise TypeError("tensors would become parameters")
    new = type(old)(children if keys is None else OrderedDict(zip(keys, children, strict=True)))  # a dict is sorted
    return new.train(old.training)


def _unflatten_tensordict(old: Any, keys: list[Any] | None, children: list[Any], new_empty: Any) -> Any:
    """Return a shallow copy with new children."""
    new = old.clone(recurse=False)
    is_non_tensor = sys.modules["tensordict"].is_non_tensor
    for key, child in zip(keys or (), children, strict=True):
        if is_non_tensor(old.get(key)):
            new.set_non_tensor(key, child)
        elif new[key] is not child:
            new[key] = child
    return new.lock_() if old.is_locked else new


_mapping = functools.partial(api.Container, kind="mapping", flatten=api.flatten_mapping, holds="torch", falls_to=dict)
_CONTAINERS: tuple[api.Container | api.Compound, ...] = (
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
    api.Container(types=("torch.Size",), kind="leaf"),  # torch.zeros rejects lazy views of it
    api.Container(types=("torch.nn.Module",), kind="leaf"),  # cannot be rebuilt
    *dlx_torch_compound.COMPOUNDS,
)


_STRIDES: dict[str, Any] = {"layouts": api.Layout.ZERO | api.Layout.GAPS | api.Layout.PERMUTED}
_EVERY_VERSION = api.Capabilities(
    frozenset((*api.COMMON_DTYPES, "complex64", "complex128")), empty_extents="leading", **_STRIDES
)
_READONLY: dict[str, Any] = {"keeps_readonly": False}
_LACKS = frozenset({"float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"})
_TO_2_9 = _tested_issue(
    "from_dlpack refuses float8 and float4; dlx passes them as uint8",
    before="2.9.2",  # never released; with 2.10, "2.10.0+cu128" would count as older
)

_UNPAIRED = {
    "float4_e2m1fn": (
        "torch has no dtype float4_e2m1fn, only float4_e2m1fn_x2 for pairs",
        "With x = numpy.asarray(x).view('uint8'), convert x[..., ::2] | x[..., 1::2] << 4, "
        "and call .view(torch.float4_e2m1fn_x2) on the result.",
    )
}


class _DTypes(api.DTypes):
    @property
    def storage(self) -> Mapping[str, str]:  # type: ignore[override]
        torch = sys.modules.get("torch")
        if torch is None or not _TO_2_9.affects(torch.__version__):
            return {}
        return {name: "uint8" for name in self.names if name.startswith(("float8", "float4"))}

    def cast(self, array: Any, dtype: api.DType, out: Any = None) -> Any:
        if out is not None:
            with sys.modules["torch"].no_grad():
                return out.copy_(array)
        return _align(array).to(self.to_native(dtype)).resolve_conj().resolve_neg()


DTYPES = _DTypes(
    "torch",
    {each.name: each.name for each in api.DType.all() if each.bits >= 8 and each.name not in _LACKS}
    | {"float4_e2m1fnx2": "float4_e2m1fn_x2"},
)


# ---- devices and streams ---------------------------------------------------------------------------------------------


class _Devices(api.Devices):
    """The host, and CUDA or ROCm, depending on the build of torch."""

    @functools.cached_property
    def kind(self) -> str:
        """The devices that this build calls "cuda": "cuda" or "rocm"; empty without these."""
        version = sys.modules["torch"].version
        return "rocm" if version.hip else "cuda" if version.cuda else ""

    @property
    def pins(self) -> bool:  # type: ignore[override]
        return self.kind == "cuda"

    @functools.cached_property
    def _type(self) -> int | None:
        return api.Device(self.kind).type if self.kind else None

    def to_native(self, device: api.Device) -> Any:
        torch = sys.modules["torch"]
        if self.kind and device.name == self.kind:
            return torch.device("cuda", device.id)
        if device.type != HOST.type:
            fix = f"Pass device='cpu' or device='{self.kind}'." if self.kind else "Pass device='cpu'."
            raise DeviceError(f"this build of torch has no device {device}", fix=fix)
        return torch.device("cpu")

    def from_native(self, native_device: Any) -> api.Device:
        kind = native_device.type
        if kind == "cuda":
            kind = self.kind or kind
        return api.Device(f"{_NAMES.get(kind, kind)}:{native_device.index or 0}")

    def current(self, device_type: int) -> int:
        if device_type != self._type:
            return 0
        try:
            return int(sys.modules["torch"].cuda.current_device())
        except (AssertionError, RuntimeError):  # no driver, or after a fork; dlx raises later
            return 0

    def activate(self, device: api.Device) -> AbstractContextManager[Any]:
        # Only ROCm's exports use it. On CUDA, the runtime may stay on the new device and affect other frameworks.
        return sys.modules["torch"].cuda.device(device.id) if self.kind == "rocm" else contextlib.nullcontext()

    def new_array(self, shape: Sequence[int], dtype: api.DType, device: api.Device, strides: Sequence[int]) -> Any:
        torch = sys.modules["torch"]
        if _dlx_torch.is_tracing():  # bound by `capabilities`
            return None  # `load` lifts memory that dlx allocates
        place = {"pin_memory": True} if device.name == "cuda_host" else {"device": _native_device(device)}
        options = {"dtype": _native_dtype(dtype), **place}
        if not torch.is_inference_mode_enabled():
            return torch.empty_strided(shape, strides, **options)
        with torch.inference_mode(mode=False):
            return torch.empty_strided(shape, strides, **options)

    def stack(self, arrays: Sequence[Any], out: Any, axis: int) -> Any:
        torch = sys.modules["torch"]
        if out is not None:
            return torch.stack(arrays, axis, out=out)
        if _dlx_torch.is_tracing():
            return None
        if not torch.is_inference_mode_enabled():
            return torch.stack(arrays, axis).contiguous()  # torch keeps the memory format of images
        with torch.inference_mode(mode=False):
            return torch.stack(arrays, axis).contiguous()

    def available(self) -> Iterable[Any]:
        torch = sys.modules["torch"]
        yield torch.device("cpu")
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator().type
            yield from (torch.device(kind, number) for number in range(torch.accelerator.device_count()))


DEVICES = _Devices()
_native_device, _native_dtype = functools.cache(DEVICES.to_native), functools.cache(DTYPES.to_native)


def _current_stream(device: api.Device) -> Any:
    is_gpu = DEVICES.kind and device.name == DEVICES.kind
    return sys.modules["torch"].cuda.current_stream(device.id) if is_gpu else None


@contextlib.contextmanager
def _on_stream(stream: api.Stream) -> Iterator[None]:
    """Return a context in which torch uses another framework's stream."""
    cuda, number = sys.modules["torch"].cuda, stream.device.id
    native = stream.keep
    if not isinstance(native, cuda.Stream):
        default = stream.handle <= 1  # CUDA's legacy stream, ROCm's default stream
        native = cuda.default_stream(number) if default else cuda.ExternalStream(stream.handle, number)
    # torch also makes the stream's device current; keep the current one for a function's other arrays.
    here = cuda.current_device()
    with cuda.stream(native), cuda.device(here):
        yield


# ---- the adapter -----------------------------------------------------------------------------------------------------


def _consume(obj: Any, tensor: api.Tensor, shared: bool) -> api.Tensor:
    """Make a shared storage non-resizable by `t.numpy()`, the only interface for it."""
    torch, storage = sys.modules["torch"], _storage(obj) if shared else None
    if storage is not None and storage.device.type == "cpu" and storage.resizable() and "numpy" in sys.modules:
        with _without_modes(torch):
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return tensor


def _keeps_memory(kind: Any) -> bool:
    """Return whether a subclass uses torch's memory and export unchanged."""
    tensor = sys.modules["torch"].Tensor
    functions = (getattr(each.__torch_function__, "__func__", each.__torch_function__) for each in (kind, tensor))
    return (
        kind.__dlpack__ is tensor.__dlpack__
        and kind.__torch_dispatch__ == tensor.__torch_dispatch__
        and len(set(functions)) == 1  # an override could intercept the export
    )


def _exchange() -> Any:
    """Return torch's exchange table, with slots of `_dlx_torch`, for tensors and subclasses."""
    _is_tracing()
    own = sys.modules["torch"].Tensor.__dlpack_c_exchange_api__
    return _dlx_torch.lifting_table(_dlx_torch.exchange_table(own, []))


def _is_tracing() -> Any:
    """Return the function that tells whether torch traces or transforms new arrays of this thread."""
    inner = sys.modules["torch"]._C

    def is_tracing() -> bool:
        try:
            depth = inner._len_torch_dispatch_stack()
            return (type(depth) is int and depth > 0) or inner._are_functorch_transforms_active() is True
        except AttributeError:  # unknown; lifting is always correct
            return True

    key = getattr(getattr(inner, "DispatchKey", None), "FuncTorchDynamicLayerFrontMode", 0)
    _dlx_torch.bind(_lift, is_tracing, int(key))
    return _dlx_torch.is_tracing


def _lift(tensor: Any) -> Any:
    """Return a tensor as a constant of the traced graph, like `torch.from_numpy`."""
    return sys.modules["torch"].ops.aten.lift_fresh.default(tensor)


def _clone_inference_tensor(obj: Any, writable: bool) -> Any:
    if not obj.is_inference():
        return obj
    with sys.modules["torch"].inference_mode(False):  # inference tensors do not count writes
        return obj.clone()


def _mark_written(obj: Any) -> None:
    if not obj.is_inference():  # inference tensors do not count writes
        sys.modules["torch"].autograd.graph.increment_version(obj)


@functools.cache
def _guard_function() -> tuple[Any, frozenset[str]] | None:
    """Return the function of `_dlx_torch`, if its results for sample tensors are correct."""
    torch, function = sys.modules["torch"], _dlx_torch.guard_function()
    if function is None:
        return None
    with _without_modes(torch):
        real, grad = torch.zeros(4, 3, device="cpu"), torch.zeros(2, device="cpu", requires_grad=True)
        conj = torch.zeros(3, dtype=torch.complex64, device="cpu").conj()
        samples = [real, real[1:], real.T[1], torch.nn.Parameter(real), grad, grad.detach(), conj, conj.imag, conj.real]
        for tensor in samples:
            if _dlx_torch.handle(tensor) != tensor._cdata:
                return None
            expected = (tensor.requires_grad, tensor.is_neg(), tensor.is_conj())
            if _dlx_torch.read_facts(tensor) != (*expected, tensor.untyped_storage().nbytes(), tensor.storage_offset()):
                return None
        names = DTYPES.known() - {"complex32"}  # torch warns about it
        samples += [torch.empty(3, dtype=DTYPES.to_native(api.DType(name)), device="cpu") for name in names]
        _dlx_torch.exchange_table(torch.Tensor.__dlpack_c_exchange_api__, samples)
    return function, frozenset({"requires_grad", "is_neg", "is_conj", api.OWNER_BOUNDS})


def _protocols(kind: type) -> tuple[str, ...]:
    table = "__dlpack_c_exchange_api__"
    return ("__dlpack__", table) if hasattr(kind, table) else ("__dlpack__",)


def _is_materialised(obj: Any) -> bool:
    """Return whether a tensor is not copy-on-write: an export would copy it."""
    return not sys.modules["torch"]._C._is_cow_tensor(obj)


def _describe_exported(framework: str, obj: Any, tensor: api.Tensor) -> api.ArrayInfo:
    """Describe a host tensor without blockers, mostly from its `dlx.Tensor`."""
    nbytes, kind = tensor.nbytes, type(obj)
    return api.ArrayInfo(
        framework,
        _torch_class_names().get(kind) or api.type_name(kind),
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
def _torch_class_names() -> dict[type, str]:
    """Return the names of torch's own classes."""
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
        conditions=(("torch.autograd.forward_ad", "_current_level", -1),),
        checked_dtypes=("int8", "uint8"),  # dtypes below 8 bits are exported as these
        describe=_describe_exported,
        ready=_is_materialised,
    )
    streams = api.StreamSupport(current=_current_stream, activate=_on_stream, quick=True)  # streams are never destroyed
    arrays = api.Arrays(consume=_consume, alignment=64)
    writes = api.WriteTracking(
        guarded=_clone_inference_tensor,
        count=lambda obj: None if obj.is_inference() else int(obj._version),
        mark_written=_mark_written,
    )
    gradients = dlx_torch_gradients.support(DTYPES)
    is_tracing = staticmethod(dlx_torch_operators.is_tracing)  # until `ready` sets a faster one
    known_issues = (
        _TO_2_9,
        _tested_issue("from_dlpack aborts the process on negative strides (2.14: it raises)", lowers=_STRIDES),
        _tested_issue("from_dlpack ignores the read-only flag: the tensor is writable", lowers=_READONLY),
        _tested_issue("exports int1 to int7 and uint1 to uint7 as int8 or uint8; dlx refuses them"),
        _tested_issue("exports tensors with the neg bit without negating them; dlx resolves it first"),
        _tested_issue("crashes when it copies unaligned complex128; dlx copies it as float64"),
        _tested_issue("crashes when it resolves a conj or neg bit of unaligned data; dlx refuses that"),
        _tested_issue("crashes when it copies a tensor whose storage was resized to 0; dlx refuses that"),
        _tested_issue("its exchange table exports tensors that require gradients; dlx checks its guards first"),
        _tested_issue("from_dlpack calls a producer that raises TypeError up to four times; dlx calls it once"),
    )

    # ---- as a producer ----------------------------------------------------------------------------------------------

    def describe(self, obj: Any) -> api.Description:
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():  # a subclass's would run for each attribute
            return self._describe(obj)

    def _describe(self, obj: Any) -> api.Description:
        torch = sys.modules["torch"]
        info = functools.partial(self._info, obj)
        refused = self._find_memory_blocker(obj)
        if refused is not None:
            return api.Description(info, (refused, *_graph(torch, obj)))
        if obj._is_zerotensor():
            return api.Description(info, (*_blockers(obj), _ZERO), device=HOST if obj.is_cpu else None)
        dtype, storage = DTYPES.from_native(obj.dtype), _storage(obj)
        refused = self._find_dlpack_blocker(obj, dtype, storage)
        if refused is not None:
            return api.Description(info, (refused, *_graph(torch, obj)))
        own = type(obj).__dlpack__ is not torch.Tensor.__dlpack__  # a subclass may override it
        if obj.requires_grad or obj.is_conj() or obj.is_neg():
            return api.Description(info, _blockers(obj), needs_export=own, device=HOST if obj.is_cpu else None)
        is_lazy = getattr(torch._C, "_is_cow_tensor", None)
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or is_lazy is None or is_lazy(obj):
            return api.Description(info, needs_export=own)  # an export copies a copy-on-write tensor
        if DEVICES.kind == "rocm" and not obj.is_cpu:
            return api.Description(info)
        assert dtype is not None
        device = HOST if obj.is_cpu else DEVICES.from_native(obj.device)
        tensor = api.over_memory(obj.data_ptr(), obj.shape, obj.stride(), dtype, device, owner=storage)
        on_host = functools.partial(_describe_exported, self.name, obj, tensor)
        return api.Description(on_host if device is HOST else info, (), tensor)

    def _find_memory_blocker(self, obj: Any) -> api.Blocker | None:
        """Return the blocker of a tensor without strided memory, or None, without accessing data."""
        torch = sys.modules["torch"]
        exact = type(obj) is torch.Tensor or type(obj) is torch.nn.Parameter
        if not exact and (fake := api.look_up("torch._subclasses.fake_tensor.FakeTensor")) and isinstance(obj, fake):
            return api.Blocker("a FakeTensor has no data", "Convert outside of FakeTensorMode.")
        if torch._C._functorch.is_functorch_wrapped_tensor(obj):
            because = "inside a torch.func transform (vmap, grad, jvp), tensors have no data"
            return api.Blocker(because, "Convert outside of it.")
        if torch._is_functional_tensor(obj):
            return api.Blocker("inside functionalize(), tensors have no data", "Convert outside of it.")
        if not exact and torch.nn.parameter.is_lazy(obj):
            blocks = ("copy", "detach") if obj.requires_grad else ("copy",)  # torch also refuses both
            return api.Blocker("it is not initialized yet", "Run the module once first.", also_blocks=blocks)
        if obj.is_nested:
            fix = "Call .to_padded_tensor(value), or .unbind() and convert the parts."
            return api.Blocker("it is nested (ragged)", fix)
        if obj.is_meta:
            fix = "Create a tensor with data: torch.empty_like(x, device='cpu')."
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
            because = f"it is on {obj.device}, and dlx supports only host, CUDA and ROCm memory"
            return api.Blocker(because, "Call .cpu() first.")
        return None

    def _find_dlpack_blocker(self, obj: Any, dtype: api.DType | None, storage: Any) -> api.Blocker | None:
        torch = sys.modules["torch"]
        if obj.dtype is torch.complex32 and obj.is_conj() and obj.is_neg():
            because = "its conj and neg bits are both set, and torch cannot resolve them for complex32"
            return api.Blocker(
                because, "Call .conj().resolve_neg() first, and conjugate the result.", also_blocks=("copy",)
            )
        if dtype is None:
            name = _name_of(obj.dtype)
            because = f"torch.{name} has no DLPack dtype (torch would export bytes)"
            fix, blocks = "Call .view(torch.uint8) if the bytes are what you need.", ("copy",)
            return api.Blocker(because, fix, DTypeError, also_blocks=blocks if _SHELL.fullmatch(name) else ())
        extent = obj.numel()
        if not extent:
            return None
        nbytes = 0 if storage is None else storage.nbytes()
        address = _address(torch, obj)
        if storage is None or (nbytes and not address):
            if hasattr(obj, "full_tensor"):
                fix = "Call .to_local() for this process's part, or .full_tensor() to gather all parts."
                return api.Blocker("it is distributed over several processes", fix)
            fix = "Convert the tensors that it wraps."
            return api.Blocker("it is a wrapper subclass without memory", fix)
        if not obj.is_contiguous():
            strides = obj.stride()
            extent = sum(map(operator.mul, obj.shape, strides)) - sum(strides) + 1
        itemsize = obj.element_size()
        needed = (obj.storage_offset() + extent) * itemsize
        if (obj.is_conj() or obj.is_neg()) and address % min(itemsize, 16):
            because = "its conj or neg bit is set and its data is unaligned: torch crashes when it resolves that"
            fix = "Copy it into aligned memory before taking .conj() or .imag."
            return api.Blocker(because, fix, also_blocks=("copy",) * (obj.dtype is torch.complex128))
        if nbytes < needed:
            found = "emptied (resize_(0))" if not nbytes else f"resized to {nbytes} bytes"
            because = f"its storage was {found}, but the tensor needs {needed} bytes"
            return api.Blocker(because, "Convert it before it is resized.", also_blocks=("copy",))  # torch would crash
        return None

    def _info(self, obj: Any) -> api.ArrayInfo:
        torch = sys.modules["torch"]
        kind = type(obj)
        with torch._C.DisableTorchFunctionSubclass():
            if torch.nn.parameter.is_lazy(obj):  # all attributes raise
                return api.ArrayInfo(self.name, api.type_name(kind), device=_device_of(obj), protocols=_protocols(kind))
            strided = obj.layout is torch.strided and not obj.is_nested
            has_memory = self._find_memory_blocker(obj) is None
            return api.ArrayInfo(
                framework=self.name,
                type_name=api.type_name(kind),
                dtype=DTYPES.from_native(obj.dtype),
                dtype_name=_name_of(obj.dtype),
                shape=tuple(obj.shape) if not obj.is_nested else None,
                strides=tuple(obj.stride()) if strided else None,
                device=_device_of(obj),
                nbytes=obj.numel() * obj.element_size() if not obj.is_nested else 0,
                address=_address(torch, obj) if has_memory and obj.numel() else 0,
                owner="torch.UntypedStorage",
                protocols=_protocols(kind),
                notes=tuple(guard.ask for guard in _GUARDS if guard.holds(obj)),
            )

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        torch, storage, device = sys.modules["torch"], _storage(obj), _device_of(obj)
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or device is None or device.name == "rocm":
            # A subclass may override __dlpack__; on ROCm torch synchronizes streams.
            tensor = super().export(obj, stream=stream)
            return tensor if storage is None else api.keeping(tensor, storage)
        dtype = DTYPES.from_native(obj.dtype)
        assert dtype is not None
        return api.over_memory(obj.data_ptr(), obj.shape, obj.stride(), dtype, device, owner=storage)

    # ---- as a consumer ----------------------------------------------------------------------------------------------

    def capabilities(self) -> api.Capabilities:
        if "torch" not in sys.modules:
            return _EVERY_VERSION
        self.is_tracing = _is_tracing()
        kind = DEVICES.kind
        version, fix = sys.modules["torch"].__version__, "Install a build for the device, or leave device out."
        why = f"this torch ({version}) supports only the host", fix
        return api.Capabilities(
            dtypes=DTYPES.known(),
            # Not whether a device exists: that would initialize CUDA, which breaks forked workers.
            device_types=frozenset(api.Device(name).type for name in ("cpu", kind) if name),
            layouts=_EVERY_VERSION.layouts,
            empty_extents=_EVERY_VERSION.empty_extents,
            refusals=_UNPAIRED | ({} if kind else dict.fromkeys(("cuda", "cuda_host", "rocm"), why)),
        )

    def load(self, tensor: api.Tensor) -> Any:
        array = sys.modules["torch"].from_dlpack(tensor)
        return _lift(array) if self.is_tracing is not None and self.is_tracing() else array

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        torch = sys.modules["torch"]
        if obj.dtype is getattr(torch, "float4_e2m1fn_x2", ()):
            return self.copy(obj.view(torch.uint8), device).view(obj.dtype)
        if device is not None:
            return obj.to(DEVICES.to_native(device))
        aligned = _align(obj)
        return obj.clone() if aligned is obj else aligned


def _blockers(obj: Any) -> tuple[api.Blocker, ...]:
    return tuple(guard.blocker for guard in _GUARDS if guard.blocker and guard.holds(obj))


def _align(obj: Any) -> Any:
    """Return a tensor that torch can copy: it crashes for unaligned complex128, but not for float64."""
    torch = sys.modules["torch"]
    is_resolved = obj.dtype is torch.complex128 and obj.device.type == "cpu" and not (obj.is_conj() or obj.is_neg())
    is_aligned = not is_resolved or not _address(torch, obj) % 16
    return obj if is_aligned else torch.view_as_complex(torch.view_as_real(obj).clone())


def _graph(torch: Any, obj: Any) -> tuple[api.Blocker, ...]:
    """Return the gradient blocker of a tensor without memory that may have a graph."""
    may_have_graph = (
        obj.requires_grad
        or torch._C._functorch.is_functorch_wrapped_tensor(obj)  # of unknown inner levels
        or torch.autograd.forward_ad._current_level >= 0
    )
    return (_GRAD,) if may_have_graph else ()


def _address(torch: Any, obj: Any) -> int:
    """Return a tensor's address or 0. The public function would copy a copy-on-write tensor."""
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
    """Return a tensor's storage, or None for wrapper subclasses."""
    try:
        return obj.untyped_storage()
    except RuntimeError as error:
        if "Failed to allocate" in str(error):
            raise MemoryError from error
        return None


@contextlib.contextmanager
def _without_modes(torch: Any) -> Iterator[None]:
    """Suspend active tracing and transforms."""
    with api.look_up("torch.utils._python_dispatch")._disable_current_modes(), torch._C._DisableFuncTorch():
        yield


dlx_adapters = api.offer(TorchAdapter())
