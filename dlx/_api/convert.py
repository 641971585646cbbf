"""`convert` and `plan`."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from dlx._core.public import public
from dlx._core.types import HOST
from dlx._engine import fast_path as fast_path  # binds FAST_PATH
from dlx._engine import traced as traced  # for torch.compile
from dlx._engine.seam import FAST_PATH
from dlx._registry import lookup
from dlx._registry.registry import registry
from dlx._support.late import Late
from dlx._support.tracebacks import name_action
from dlx.errors import ConversionError, DlxError

if TYPE_CHECKING:
    from dlx._engine import batch, casting, failures, preview
    from dlx._engine import plan as plans
    from dlx._engine import request as requests
    from dlx._engine.plan import Plan
    from dlx._views import factory as views
    from dlx.typing import DeviceLike, Errors, Readonly, Target
else:  # loaded by the first call that C leaves to Python
    batch, casting, failures, plans, preview, requests = map(
        Late, [f"dlx._engine.{name}" for name in ("batch", "casting", "failures", "plan", "preview", "request")]
    )
    views = Late("dlx._views.factory")
output: Any = Late("dlx._api.output")


def convert(
    obj: Any,
    to: Target | None = None,
    *,
    like: Any = None,
    device: DeviceLike | None = None,
    copy: bool | None = None,
    readonly: Readonly = "copy",
    detach: bool = False,
    stream: Any = None,
    wait: bool = True,
    lazy: bool = False,
    strict: bool = False,
    errors: Errors = "raise",
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Convert an array, or every array in a container, to another framework, sharing memory wherever that is safe.

    Values, dtype and shape never change, unless `dtype` names the change. To find out in advance what happens, call
    `dlx.plan` with the same arguments.

    Parameters
    ----------
    obj
        An array of a framework with an adapter; an object with ``__dlpack__``, ``__array_interface__``, Arrow's
        PyCapsule interface or the buffer protocol; or a raw DLPack capsule, which is consumed. Or a container of
        arrays, nested to any depth: lists, tuples, dicts, their subclasses, dataclasses, pydantic models, msgspec
        structs, mappings, tables and data frames with Arrow's interface (they become dicts of columns), containers
        that adapters declare, and objects with ``__dlx_tree__``.
    to
        Target: a name (``"torch"``), a module, or an array type that an adapter lists. ``"dlx"`` returns a
        `dlx.Tensor`, ``"arrow"`` a tensor for all libraries with Arrow's interface.
    like
        Instead of `to`: an array whose framework and device are the target.
    device
        Device of the result: ``"cpu"``, ``"cuda:1"``, ``(2, 1)``, a `dlx.Device`, or a framework's device object
        (``x.device``). None: the device of the array if the target supports it, else the target's default device. It
        takes precedence over the device of `like`. ``"cpu"`` is any host device of the target; ``"cpu:1"`` is its
        second one if it has several (jax), else the only one. ``"cuda_host"`` is pinned host memory, for torch and
        cupy. With a device, a jax array is committed to it; with None, it is uncommitted on jax's default device, as
        from `jax.numpy.asarray`.
    copy
        None: share if possible, copy if needed. False: share or raise. True: always copy to new memory.
    readonly
        For a read-only source and a target whose arrays are always writable: ``"copy"``, ``"error"``, or ``"share"`` to
        share the memory anyway. It never makes a numpy array writable, and has no effect inside one framework.
    detach
        Whether an array that requires gradients may be converted without them. The result never has a graph.
    stream
        The target's stream, for device memory.
    wait
        False: return before moves between host and CUDA memory are done. dlx keeps the source alive until then. Do not
        write to the source, and read a result in pinned memory (``device="cuda_host"``), only after you have
        synchronized the stream: for a move to the device the target's, for one to the host the source's. Moves to
        other host memory are always waited for.
    strict
        For containers: raise for objects that aren't arrays, containers or plain data, instead of passing them
        through, and for numbers without any array.
    errors
        For containers: ``"raise"`` the first error; ``"collect"`` all errors in an ExceptionGroup; ``"pass"``: objects
        and columns in them that cannot be converted (text, dates, objects, nulls) stay as they are, and `dlx.plan`
        lists each with its reason. Errors that another option would avoid are raised, also by `dtype`.
    dtype
        A floating dtype for all floating arrays: a name, a `dlx.DType`, or a framework's dtype. Other arrays keep
        theirs. Or a mapping that names each change: ``{"float64": "float32", "int64": "int32"}``. An array that changes
        is a copy. In host memory dlx casts in the same pass as it copies; the array's framework casts on devices, and
        if the array stays in it. Of a sparse or ragged array, the elements change, not the indices.
    out
        Instead of `to` and `like`: an array, or a tree of arrays, of any framework with writable memory. The values are
        copied there, in one pass. Shapes must match, dtypes too unless `dtype` changes them, and containers must hold
        arrays at the same places. Sparse and ragged arrays are refused. If one array does not fit, none is written to.
        A capsule is not consumed.
    lazy
        For containers: return a live view that converts each element at its first access, and writes through. It has
        no effect on a single array. As an argument, a view is its source; with `dtype`, its converted elements.

    Returns
    -------
    array or container
        `out`, if it is given. Else an array of the target framework, with the shape of `obj`; `obj` itself if it is one
        and no option changes it.
        For a container: a new container of the same type with the converted arrays (a list or dict, if that type cannot
        hold them). Repeated arrays and containers stay the same object in the result.

    Raises
    ------
    CopyRequiredError, ReadOnlyError
        If the conversion needs a copy that ``copy=False`` or ``readonly="error"`` forbids.
    DTypeError, LayoutError, DeviceError, StreamError, ProtocolError, ConsumedError, ConversionError
        If this data cannot be converted. The framework's error, if any, is the cause.
    AdapterNotFoundError, FrameworkNotInstalledError, PluginError
        If the object or the target is unknown, or the target is not installed. Also for arrays without any protocol,
        for objects whose arrays dlx cannot extract (a model, a data set, an iterator), even inside containers, and for
        a root without arrays, unless it is a built-in container.
    TypeError, ValueError
        If the call is invalid.
    ExceptionGroup
        With ``errors="collect"``: the errors of all arrays in a container.

    Notes
    -----
    The result keeps the source's memory alive; later changes of the source's metadata have no effect. Both sides may
    write to shared memory, and each sees the other's writes.

    A container is never written to. Attributes of subclasses of list, dict and similar types are copied unchanged,
    except for those that are items, too. Inside a container, buffers, numbers (also numpy's) and all other objects that
    aren't arrays are passed through; `dlx.plan` lists them. So a list of numbers stays a list; make an array of it
    first. An error has the path of its array, such as ``obj['a'][3].x``; after an error, no capsule is consumed and
    nothing is converted.

    Examples
    --------
    >>> import dlx
    >>> tensor = dlx.convert(bytearray(b"abc"), to="dlx")
    >>> tensor.shape, str(tensor.dtype), tensor.readonly
    ((3,), 'uint8', False)
    >>> dlx.convert({"a": [tensor, "text"], "again": tensor}, to="dlx")["again"] is tensor
    True
    """
    if out is not None:
        requests.request_of("dlx", None, device, copy, readonly, detach, None, errors, lazy, strict, wait=wait)
        if not (to is like is device is stream is None) or lazy or copy is False or errors != "raise" or not wait:
            names = "to=, like=, device=, stream=, lazy=, errors=, wait= and copy=False"
            raise TypeError(f"convert takes out= without {names}. Leave these or out= out.")
        casts = casting.read_casts(dtype)
        if casts is not None and output.fill_plain([obj], out, -1, casts):
            return out
        return output.convert_into(obj, out, casts, detach=detach, strict=strict)
    casts_only = dtype is not None and copy is not False and stream is None and detach is lazy is strict is False
    words: tuple[Any, ...] = readonly, errors
    if casts_only and wait is True and all(type(each) is str for each in words) and words == ("copy", "raise"):
        cast = _cast(obj, to, like, dtype)
        if cast is not None:
            is_copied = copy is True and cast is not obj
            given = {"to": to, "like": like, "device": device, "copy": None if is_copied else copy}
            with contextlib.suppress(DlxError):  # raised below, about obj
                return FAST_PATH(cast, **{name: value for name, value in given.items() if value is not None})
    request = requests.request_of(to, like, device, copy, readonly, detach, stream, errors, lazy, strict, dtype, wait)
    found = lookup.kind(type(obj))
    if found.compounds:
        found = lookup.kind_of(obj, found)
    target, place = request.target, request.device
    is_near = place is None or (place == HOST and target.adapter.placement is None)
    named = (target.name if to is None else to) if is_near and stream is None and wait and not detach else None
    if found.handler is None:
        source = found.adapter or lookup.source(obj, found, target=target.name)[1]
        if dtype is None:
            return batch.Batch(request, [obj], [source]).run()[0]
        return batch.Batch(request.for_root(), [obj], [source], to=named).run()[0]
    if lazy:
        has_no_options = named is not None and (dtype, copy, device) == (None, None, None) and readonly == "copy"
        return views.lazy_view(obj, request, to if has_no_options else None, strict=strict, errors=errors)
    return batch.convert_tree(obj, found.handler, request, strict=strict, errors=errors, to=named)


def _cast(obj: Any, to: Any, like: Any, dtype: Any) -> Any:
    """Return a host array, cast or unchanged, to convert without `dtype`; None if Python must plan it."""
    source, own = lookup.kind(type(obj)).adapter, lookup.kind(type(like)).adapter
    casts = casting.read_casts(dtype)
    if source is None or casts is None or (to is None) == (own is None):
        return None
    target = registry.target(to) if own is None else registry.ready(own)
    return None if target is None else batch.cast_host(obj, source, target, casts._replace(at_root=True))


@public
def plan(
    obj: Any,
    to: Target | None = None,
    *,
    like: Any = None,
    device: DeviceLike | None = None,
    copy: bool | None = None,
    readonly: Readonly = "copy",
    detach: bool = False,
    stream: Any = None,
    wait: bool = True,
    lazy: bool = False,
    strict: bool = False,
    errors: Errors = "raise",
    dtype: Any = None,
    probe: bool = True,
) -> Plan:
    """Return what `convert` with the same arguments will do, and why, without converting.

    Parameters
    ----------
    obj, to, like, device, copy, readonly, detach, stream, wait, lazy, strict, errors, dtype
        As in `convert`.
    probe
        Whether to export a capsule, and drop it, if the array cannot be described otherwise. This applies to objects
        that only have ``__dlpack__``, and to arrays whose adapter does not describe the shape or the address.

    Returns
    -------
    Plan
        Its `error` is the error that `convert` would raise.

    Raises
    ------
    TypeError, ValueError
        If the call is invalid.

    Examples
    --------
    >>> import dlx
    >>> dlx.plan(b"abc", to="dlx").outcome
    'shared'
    """
    try:
        request = requests.request_of(
            to, like, device, copy, readonly, detach, stream, errors, lazy, strict, dtype, wait
        )
        made = preview.plan_known(request.for_root(), obj)
        if made is None:
            made = _plan(request, obj, strict, errors, probe)
    except DlxError as error:
        failures.forget_frames(error)
        made = plans.Plan("", fast_path.try_describe(obj), error.target or str(to), None, "refused", error=error)
    if made.error is None:
        wanted = (to, like if like is None else _weakly(like))
        options = (device, copy, readonly, detach, stream, wait, lazy, strict, errors, dtype)
        made._again = (_run, _weakly(obj), wanted, options, probe)
    for refusal in filter(None, (made.error, *(leaf.error for leaf in made.leaves))):
        name_action(refusal, "convert")  # container code may call another function
    return made


def _plan(request: requests.Request, obj: Any, strict: bool, errors: str, probe: bool) -> Plan:
    handler = lookup.kind_of(obj).handler
    if handler is None:
        return preview.plan_one(request.for_root(), *lookup.source(obj, target=request.target.name), probe=probe)[0]
    return preview.plan_tree(obj, handler, request, strict=strict, errors=errors, probe=probe)


def _weakly(obj: Any) -> Any:
    """Return a weak reference to an object, or a function that keeps it alive if its type allows none."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return lambda: obj


def _run(made: Plan, source: Any, wanted: tuple[Any, Any], values: tuple[Any, ...], probe: bool) -> Any:
    """Run a plan, see `Plan.run`."""
    obj, (to, like) = source(), wanted
    example = None if like is None else like()
    if obj is None or (like is not None and example is None):
        gone = "the planned object" if obj is None else "the array passed as like="
        raise ConversionError(f"{gone} no longer exists", fix="Keep a reference to it, or plan again.")
    names = ("device", "copy", "readonly", "detach", "stream", "wait", "lazy", "strict", "errors", "dtype")
    options = {"like": example, **dict(zip(names, values, strict=True))}
    now = plan(obj, to, probe=probe, **options)
    if made.differs(now):
        found = repr(now).removeprefix("<dlx.Plan ").partition(">\n")[0]
        raise ConversionError(f"the planned object has changed, it is now {found}", fix="Plan again, or call convert.")
    return convert(obj, to, **options)


def _view(obj: Any, to: Any) -> Any:
    FAST_PATH._bind(view=views.repeat_view)
    return views.repeat_view(obj, to)


if not TYPE_CHECKING:
    FAST_PATH._bind(wrapped=convert, view=_view)
    convert = public(convert, FAST_PATH)
