"""The public verbs over arrays: `convert`, `plan`, `describe`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from dlx.abi import Device
from dlx.adapter import Adapter
from dlx.containers import container_of
from dlx.errors import AdapterNotFoundError, ConversionError, DeviceError, DlxError
from dlx.foreign import exception_text, module_of
from dlx.leaf import Plan, Request
from dlx.native import Lane
from dlx.phases import convert_tree, place_of, plan_tree
from dlx.planning import begin
from dlx.registry import registry
from dlx.routes import learn
from dlx.strangers import is_proxy
from dlx.tensor import ArrayInfo, type_name
from dlx.transfer import convert_leaf, forget_frames, plan_leaf
from dlx.views import lazy_view, plain_view

if TYPE_CHECKING:
    from dlx.typing import DeviceLike, Errors, Readonly, Target

__all__ = ["convert", "describe", "plan"]


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
    lazy: bool = False,
    strict: bool = False,
    errors: Errors = "raise",
) -> Any:
    """Convert an array, or every array in a container, to another framework, sharing memory wherever that is safe.

    Values, dtype and shape always survive exactly. `dlx.plan` with the same arguments says beforehand what happens.

    Parameters
    ----------
    obj
        An array of any framework that has an adapter; anything with ``__dlpack__``, ``__array_interface__`` or the
        buffer protocol; a raw DLPack capsule, which is used up. Or a container of such: lists, tuples, dicts, their
        subclasses, dataclasses, mappings, what adapters declare, and objects with ``__dlx_tree__``, in any nesting.
    to
        Target: a name (``"torch"``), a module, or an array type that an adapter lists. ``"dlx"`` gives a `dlx.Tensor`.
    like
        Instead of `to`: an array whose framework and device are the target.
    device
        Where the result shall be: ``"cpu"``, ``"cuda:1"``, ``(2, 1)``, `dlx.Device`. None: where it is, if the target
        can hold it there, else the target's home. Beats the device of `like`.
    copy
        None: share if possible, copy if needed. False: share or raise. True: fresh memory, always.
    readonly
        For a read-only source and a target whose arrays are always writable: ``"copy"``, ``"error"``, or ``"share"`` to
        alias it all the same. Never makes a numpy result writable; does not act inside one framework.
    detach
        Whether an array that requires gradients may be converted without them. The result is always graph-free.
    stream
        The target's stream, for device memory.
    strict
        Of containers: refuse what is neither array, container nor plain data, instead of letting it pass through.
    errors
        Of containers: ``"raise"`` the first error, or ``"collect"`` all of them in an ExceptionGroup.
    lazy
        Of containers: return a view of the living container, which converts an element when it is first asked for, and
        writes through. It has no effect on a single array.

    Returns
    -------
    array or container
        An array of the target framework, with the shape of `obj`. `obj` itself, if it is one already and nothing was
        asked that changes it. Of a container: a new one of the same type around converted arrays (list or dict, where
        that type cannot hold them); an array or container that stands in it twice does so in the result.

    Raises
    ------
    CopyRequiredError, ReadOnlyError
        If ``copy=False`` (or ``readonly="error"``) forbids the copy that is needed.
    DTypeError, LayoutError, DeviceError, StreamError, ProtocolError, ConsumedError, ConversionError
        If this data cannot cross. The framework's own error, where there is one, is the cause.
    AdapterNotFoundError, FrameworkNotInstalledError, PluginError
        If nothing knows the object or the target, or the target is not installed.
    TypeError, ValueError
        If the call itself is wrong.
    ExceptionGroup
        With ``errors="collect"``: what was raised for each array of a container.

    Notes
    -----
    The result keeps the source's memory alive; the source's own metadata is not read again. Nothing is raised for
    writing later to shared memory from both sides: that is what sharing means.

    A container is never written to. Attributes of a subclass of list, dict and the like stay as they are, except those
    that are items as well. Inside a container, buffers and numbers (numpy's too) pass through, as does whatever is no
    array. An error says where it arose, as in ``obj['a'][3].x``; after it nothing is used up and nothing was converted.

    Examples
    --------
    >>> import dlx
    >>> tensor = dlx.convert(bytearray(b"abc"), to="dlx")
    >>> tensor.shape, str(tensor.dtype), tensor.readonly
    ((3,), 'uint8', False)
    >>> dlx.convert({"a": [tensor, "text"], "again": tensor}, to="dlx")["again"] is tensor
    True
    """
    if lazy and not detach and not strict:
        plain = like is device is copy is stream is None and readonly == "copy" and errors == "raise"
        view = plain_view(obj, to) if plain else None  # of a target that was asked for before
        if view is not None:
            return view
    request = request_of(to, like, device, copy, readonly, detach, stream, errors)
    row = container_of(type(obj))
    if row is None:
        return convert_leaf(begin(obj, producer_of(obj, request), request))
    # The lane shares memory and knows no options, so it may be used for arrays in a tree where those ask for nothing.
    may = to is not None and device is None and stream is None and not copy and not detach
    lane = cast("Lane", convert) if may else None
    if lazy:
        quick = lane if readonly == "copy" and copy is None else None
        return lazy_view(obj, request, quick, to, strict=strict, collect=errors == "collect")
    return convert_tree(obj, row, request, strict=strict, collect=errors == "collect", lane=lane, to=to)


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
    lazy: bool = False,
    strict: bool = False,
    errors: Errors = "raise",
    probe: bool = True,
) -> Plan:
    """Say what `convert` with the same arguments will do, and why, without doing it.

    Parameters
    ----------
    obj, to, like, device, copy, readonly, detach, stream, lazy, strict, errors
        As in `convert`.
    probe
        Whether a producer may be asked for a capsule, which is dropped, where nothing else can tell what it holds.
        An object that only has ``__dlpack__`` is of that kind; arrays with an adapter never are.

    Returns
    -------
    Plan
        Its `error` is what `convert` would raise; a refusal is never raised here.

    Raises
    ------
    TypeError, ValueError
        If the call itself is wrong.

    Examples
    --------
    >>> import dlx
    >>> dlx.plan(b"abc", to="dlx").outcome
    'shared'
    """
    try:
        request = request_of(to, like, device, copy, readonly, detach, stream, errors)
        row = container_of(type(obj))
        if row is not None:
            return plan_tree(obj, row, request, strict=strict, collect=errors == "collect", probe=probe)
        leaf = begin(obj, producer_of(obj, request), request)
    except DlxError as error:
        forget_frames(error)
        return Plan("", _described(obj), error.target or str(to), None, "refused", error=error)
    plan_leaf(leaf, probe=probe)
    assert leaf.plan is not None
    return leaf.plan


def describe(obj: Any) -> ArrayInfo:
    """Say what an array is: dtype, shape, strides, device, read-only, owner. Its memory is not touched.

    Raises
    ------
    AdapterNotFoundError
        If it is nothing that dlx knows as an array.
    ConversionError
        If it is one that cannot even be described, such as a used capsule.

    Examples
    --------
    >>> import dlx
    >>> str(dlx.describe(b"abc"))
    'bytes (uint8[3], read-only)'
    """
    source = _known(obj)
    if source is None:
        raise not_an_array(obj)
    try:
        info = source.info(obj)
    except DlxError as error:
        error.complete(source=type_name(type(obj)))
        raise
    except MemoryError:
        raise
    except Exception as error:
        reason = f"{source.name} failed: {exception_text(error)}"
        raise ConversionError(reason, source=type_name(type(obj))) from error
    return info if info is not None else ArrayInfo(source.name, type_name(type(obj)))


def _consumer_failed(obj: Any, to: Any, cause: Any, tree: Any = None) -> DlxError:
    """Return the error for a consumer that failed in the lane, after its table had been handed the memory."""
    target = registry.target(to)
    where = "" if tree is None else place_of(obj, tree)
    if isinstance(cause, DlxError):
        return cause.complete(source=str(_described(obj)), target=target.name, where=where)
    reason = exception_text(cause) if cause is not None else "without saying why"
    error = ConversionError(
        f"{target.name} refused it: {reason}", source=str(_described(obj)), target=target.name, where=where
    )
    error.__cause__ = cause
    return error


def request_of(
    to: Any,
    like: Any = None,
    device: Any = None,
    copy: Any = None,
    readonly: str = "copy",
    detach: bool = False,
    stream: Any = None,
    errors: str = "raise",
) -> Request:
    """Check the options of a call; errors of the call itself are raised in every case."""
    if (to is None) == (like is None):
        raise TypeError("give either to= (a name, a module, an array type) or like= (an array), not both or neither")
    if copy is not None and not isinstance(copy, bool):
        raise ValueError(f"copy must be None, True or False, found {copy!r}")
    if readonly not in ("copy", "error", "share"):
        raise ValueError(f"readonly must be 'copy', 'error' or 'share', found {readonly!r}")
    if errors not in ("raise", "collect"):
        raise ValueError(f"errors must be 'raise' or 'collect', found {errors!r}")
    wanted = None if device is None else Device(device)
    if like is None:
        target = registry.target(to)
    else:
        target, place = _as(like)
        wanted = wanted or place
    if isinstance(device, str) and ":" not in device and wanted is not None:
        wanted = Device(wanted.type, _current_device(target, wanted.type))
    return Request(target, wanted, copy, readonly, bool(detach), stream)


def _current_device(target: Adapter, device_type: int) -> int:
    try:
        return target.current_device(device_type)
    except (DlxError, MemoryError):
        raise
    except Exception as error:
        text = f"{target.name} failed to name its current device: {exception_text(error)}"
        raise DeviceError(text, target=target.name) from error


def _as(like: Any) -> tuple[Adapter, Device | None]:
    """Return the framework and the device of an example."""
    known = _known(like)
    adapter = registry.ready(known) if known is not None else None
    if adapter is None:
        raise AdapterNotFoundError(
            f"like= is {type_name(type(like))}, whose framework is no target",
            fix="Give an array of the target, or to=.",
        )
    info = describe(like)
    if info.device is None and info.shape is not None:
        raise DeviceError(f"like= is {info}, whose device dlx does not know", fix="Pass to= and device= instead.")
    return adapter, info.device


def producer_of(obj: Any, request: Request, where: str = "") -> Adapter:
    """Return the adapter of an array, or raise that it is none."""
    source = _known(obj)
    if source is None:
        raise not_an_array(obj).complete(target=request.target.name, where=where)
    return source


def _known(obj: Any) -> Adapter | None:
    try:
        return registry.producer(obj)
    except (DlxError, MemoryError):
        raise
    except Exception as error:  # a type that raises when it is looked at
        name = type_name(type(obj))
        reason = f"its type cannot be looked at: {exception_text(error)}"
        raise AdapterNotFoundError(reason, source=name, fix="Convert an array that it holds.") from error


def _described(obj: Any) -> ArrayInfo | None:
    try:
        return describe(obj)
    except DlxError:
        return None


def not_an_array(obj: Any) -> DlxError:
    name = type_name(type(obj))
    broken = registry.broken_for(type(obj))
    if broken is not None:
        return broken.complete(source=name)
    if is_proxy(type(obj)):
        fix = "Convert the object itself: a proxy does not keep it alive."
    elif container_of(type(obj)) is not None:
        fix = "Give one of the arrays in it; dlx.convert and dlx.plan take whole containers."
    elif module_of(type(obj)) == "builtins":
        fix = "Give an array, or an object with a buffer such as bytes."
    else:
        fix = f"Convert an array that it holds, or install an adapter for {name.partition('.')[0]!r}."
    return AdapterNotFoundError(
        "it is no array: it has no adapter, no __dlpack__, no __array_interface__ and no buffer",
        source=name,
        fix=fix,
    )


if not TYPE_CHECKING:
    # From Python 3.14 on annotations are evaluated late and not copied by name; ours are plain strings.
    _copied = dict.fromkeys([*functools.WRAPPER_ASSIGNMENTS, "__annotations__"])
    convert = functools.update_wrapper(Lane(convert, learn, _consumer_failed), convert, assigned=tuple(_copied))
