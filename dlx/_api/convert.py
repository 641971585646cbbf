"""`convert` and `plan`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from dlx._core.public import public
from dlx._engine import fast_path as fast_path  # which learns the pairs of FAST_PATH
from dlx._engine import traced as traced  # torch.compile finds it
from dlx._engine.seam import FAST_PATH
from dlx._registry import lookup
from dlx._support.late import Late
from dlx._support.tracebacks import name_action
from dlx.errors import ConversionError, DlxError

if TYPE_CHECKING:
    from dlx._engine import batch, executor, preview
    from dlx._engine import plan as plans
    from dlx._engine import request as requests
    from dlx._engine.plan import Plan
    from dlx._views import factory as views
    from dlx.typing import DeviceLike, Errors, Readonly, Target
else:  # loaded with the first call that is not answered in C
    batch, executor, plans, preview, requests = map(
        Late, [f"dlx._engine.{name}" for name in ("batch", "executor", "plan", "preview", "request")]
    )
    views = Late("dlx._views.factory")


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
        An array of any framework that has an adapter; anything with ``__dlpack__``, ``__array_interface__``, Arrow's
        PyCapsule interface or the buffer protocol; a raw DLPack capsule, which is used up. Or a container of
        such: lists, tuples, dicts, their subclasses, dataclasses, models of pydantic, structures of msgspec, mappings,
        tables and data frames that Arrow's interface gives out (they become dicts of their columns), what adapters
        declare, and objects with ``__dlx_tree__``, in any nesting.
    to
        Target: a name (``"torch"``), a module, or an array type that an adapter lists. ``"dlx"`` gives a `dlx.Tensor`,
        ``"arrow"`` one that every library takes which speaks Arrow's interface.
    like
        Instead of `to`: an array whose framework and device are the target: everything follows it.
    device
        Where the result shall be: ``"cpu"``, ``"cuda:1"``, ``(2, 1)``, `dlx.Device`. None: where it is, if the target
        can hold it there, else the target's default device. Beats the device of `like`. ``"cpu"`` is any host
        device of the target, ``"cpu:1"`` its second one, where it has several (jax); one device has any number. The
        device objects of frameworks (``x.device``) are taken. A jax array is committed to a device that is named here;
        with None it is uncommitted, on jax's default device, as `jax.numpy.asarray` gives it.
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
        Of containers: refuse what is neither array, container nor plain data, instead of letting it pass through, and
        numbers without any array.
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
        If this data cannot be converted. The framework's own error, where there is one, is the cause.
    AdapterNotFoundError, FrameworkNotInstalledError, PluginError
        If nothing knows the object or the target, or the target is not installed. Also for an array of a library that
        speaks no protocol, and for what holds arrays that dlx cannot take out of it (a model, a data set, an iterator),
        wherever it is, and for a root that holds no array, unless it is a built-in container.
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
    array: `dlx.plan` lists it. So a list of numbers comes back as a list: make an array of it first. An error says
    where it arose, as in ``obj['a'][3].x``; after it nothing is used up and nothing was converted.

    Examples
    --------
    >>> import dlx
    >>> tensor = dlx.convert(bytearray(b"abc"), to="dlx")
    >>> tensor.shape, str(tensor.dtype), tensor.readonly
    ((3,), 'uint8', False)
    >>> dlx.convert({"a": [tensor, "text"], "again": tensor}, to="dlx")["again"] is tensor
    True
    """
    request = requests.request_of(to, like, device, copy, readonly, detach, stream, errors, lazy, strict)
    found = lookup.kind(type(obj))
    if found.handler is None:
        source = found.adapter or lookup.source(obj, found, target=request.target.name)[1]
        return batch.Batch(request, [obj], [source]).run()[0]
    # The fast path shares memory and takes no options: arrays of a tree use it where no option is set.
    named = to if device is None and stream is None and not copy and not detach else None
    is_plain = named is not None and readonly == "copy" and copy is None
    if lazy:
        return views.lazy_view(obj, request, to if is_plain else None, strict=strict, collect=errors == "collect")
    return batch.convert_tree(obj, found.handler, request, strict=strict, collect=errors == "collect", to=named)


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
        An object that only has ``__dlpack__`` is of that kind; arrays with an adapter are where it does not say the
        shape, or the address.

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
        request = requests.request_of(to, like, device, copy, readonly, detach, stream, errors, lazy, strict)
        made = preview.plan_known(request, obj)
        if made is None:
            made = _plan(request, obj, strict, errors, probe)
    except DlxError as error:
        executor.forget_frames(error)
        made = plans.Plan("", fast_path.described(obj), error.target or str(to), None, "refused", error=error)
    if made.error is None:
        given = (to, like if like is None else _weakly(like))
        options = (device, copy, readonly, detach, stream, lazy, strict, errors)
        made._again = (_run, _weakly(obj), given, options, probe)
    for refusal in filter(None, (made.error, *(leaf.error for leaf in made.leaves))):
        name_action(refusal, "convert")  # code of a container may have called another function
    return made


def _plan(request: requests.Request, obj: Any, strict: bool, errors: str, probe: bool) -> Plan:
    handler = lookup.kind(type(obj)).handler
    if handler is None:
        return preview.plan_one(request, *lookup.source(obj, target=request.target.name), probe=probe)[0]
    return preview.plan_tree(obj, handler, request, strict=strict, collect=errors == "collect", probe=probe)


def _weakly(obj: Any) -> Any:
    """Return what gives an object, or None once it is gone; it is kept alive where it allows no weak reference."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return lambda: obj


def _run(made: Plan, source: Any, given: tuple[Any, Any], values: tuple[Any, ...], probe: bool) -> Any:
    """Convert what a plan was made of: see `Plan.run`."""
    obj, (to, like) = source(), given
    example = None if like is None else like()
    if obj is None or (like is not None and example is None):
        gone = "what was planned" if obj is None else "the array passed as like"
        raise ConversionError(f"{gone} is not alive any more", fix="Keep it, or plan again.")
    names = ("device", "copy", "readonly", "detach", "stream", "lazy", "strict", "errors")
    options = {"like": example, **dict(zip(names, values, strict=True))}
    now = plan(obj, to, probe=probe, **options)
    if made.differs(now):
        found = repr(now).removeprefix("<dlx.Plan ").partition(">\n")[0]
        raise ConversionError(f"what was planned has changed: now it is {found}", fix="Plan again, or convert it.")
    return convert(obj, to, **options)


def _view(obj: Any, to: Any) -> Any:
    FAST_PATH._bind(view=views.repeat_view)
    return views.repeat_view(obj, to)


if not TYPE_CHECKING:
    FAST_PATH._bind(wrapped=convert, view=_view)
    convert = public(convert, FAST_PATH)
