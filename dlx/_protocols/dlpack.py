"""The DLPack protocol as a consumer speaks it: call ``__dlpack__`` once, with the arguments that it takes."""

from __future__ import annotations

import inspect
import re
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ref

from dlx._core import native
from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.types import HOST, Device, host_readable
from dlx._support.reflect import TypeCache, class_name, foreign_error, is_key, message_of, truncate
from dlx.errors import DlxError, ProtocolError

__all__ = ["answered", "device_of", "export", "keywords_of", "no_numbers", "why_no_numbers"]

MAX_VERSION: tuple[int, int] = (lib.DLX_DLPACK_MAJOR, lib.DLX_DLPACK_MINOR)


class _Signature(NamedTuple):
    """How ``__dlpack__`` of a type is called."""

    function: Any  # from the class, weakly: its descriptor may make a new one each time
    keywords: dict[str, Any] | None  # sent if no stream is; None: only a call can tell
    takes_stream: bool


_signatures: TypeCache[_Signature] = TypeCache()
_ON_HOST = {"max_version": MAX_VERSION}
_ALL = dict.fromkeys(("stream", "max_version", "dl_device", "copy"), False)
"""Keywords of the standard, none of which the producer insists on."""


def device_of(obj: Any) -> Device | None:
    """Return what ``__dlpack_device__`` says, or None; the capsule's device may differ (torch's pinned memory)."""
    ask = getattr(type(obj), "__dlpack_device__", None)
    if ask is None:
        return None
    try:
        answer = ask(obj)
        is_pair = type(answer) is tuple and len(answer) == 2
        # The types come first: other objects may not allow the comparison.
        if is_pair and isinstance(answer[0], int) and isinstance(answer[1], int) and answer == HOST:
            return HOST
        if isinstance(answer, tuple) and len(answer) == 2 and answer[1] is None:  # paddle, of its host memory
            place = Device(answer[0], 0)
            answer = place if host_readable(place) else answer
        return Device(answer)
    except DlxError as error:
        raise ProtocolError(f"its __dlpack_device__ is wrong: {error.reason}") from error
    except Exception as error:
        raise foreign_error("its __dlpack_device__ raised", error) from error


# Names of dtypes that are not numbers, of which tensorflow's __dlpack__ ends the process.
_NO_NUMBERS = re.compile(r"(<dtype: ')?(object|resource|variant|string|str\d*)(_ref)?('>)?", re.IGNORECASE)


def why_no_numbers(obj: Any) -> str:
    """Return why elements are not numbers, by their ``dtype``, before ``__dlpack__`` is called; else nothing."""
    try:
        dtype = getattr(obj, "dtype", None)
    except MemoryError:
        raise
    except Exception:  # it is not known then, and `__dlpack__` will say
        return ""
    return "" if dtype is None else no_numbers(dtype)


def no_numbers(dtype: Any) -> str:
    """Return the same of a dtype."""
    try:
        name = getattr(dtype, "name", None)
        said = name if isinstance(name, str) else class_name(dtype) if isinstance(dtype, type) else str(dtype)
        is_known = _NO_NUMBERS.fullmatch(said) is not None
    except MemoryError:
        raise
    except Exception:  # as above
        return ""
    return f"its dtype is {truncate(said, 60)}, and DLPack knows numbers only" if is_known else ""


def export(obj: Any, *, stream: int | None = None) -> Tensor:
    """Ask an object for its capsule, once, and claim it; on the host without a stream, since numpy refuses even -1."""
    try:
        answer = native.producer_answer(obj)
        if answer is not None and stream is None:  # the fast path has called it
            capsule = answered(*answer)
        else:
            function, keywords, takes_stream = _signature_of(type(obj))
            ordered = {} if stream is None else {"stream": stream}
            if keywords is None:
                capsule = _called_first(obj, function, ordered)
            else:
                capsule = obj.__dlpack__(**(keywords | ordered if takes_stream else keywords))
    except DlxError:
        raise
    except Exception as error:
        raise foreign_error("its __dlpack__ raised", error) from error
    finally:
        answer = None  # else an error keeps itself, by the frame in its traceback
    if native.capsule_state(capsule) is None:
        raise ProtocolError(f"its __dlpack__ gave {class_name(type(capsule))}, not a DLPack capsule")
    return native.capsule_claim(capsule)


def answered(obj: Any, given: Any, raised: Exception | None) -> Any:
    """Return the fast path's answer from a method of an object, or raise its error."""
    try:
        if raised is not None:
            raise raised
        return given
    finally:
        del raised  # this frame is in its traceback, and would keep it, and all that it holds, alive


def _called_first(obj: Any, function: Any, stream: dict[str, int]) -> Any:
    """Return what ``__dlpack__`` gives whose signature cannot be read, and learn which keywords it takes."""
    try:
        capsule = obj.__dlpack__(max_version=MAX_VERSION, **stream)
    except TypeError as error:
        if "keyword argument" not in message_of(error):  # also "takes no keyword arguments"
            raise
        _learn(type(obj), function, {"stream": False})
        return obj.__dlpack__(**stream)
    _learn(type(obj), function, _ALL)
    return capsule


def keywords_of(kind: Any) -> dict[str, Any] | None:
    """Return what ``__dlpack__`` of a type is called with on the host; None where only a call can tell."""
    return _signature_of(kind).keywords


def _signature_of(kind: Any) -> _Signature:
    """Return how ``__dlpack__`` of a type is called, read once for each function that stands in the class."""
    function = None
    for cls in kind.__mro__:
        if "__dlpack__" in cls.__dict__:
            function = cls.__dict__["__dlpack__"]
            if type(function) is FunctionType:  # it may hold its class, which must not live by it
                function = ref(function)
            break
    known = _signatures.get(ref(kind)) if type(kind) is type or is_key(kind) else None
    if known is None or known.function is not function:
        known = _learn(kind, function, None if function is None else _read_keywords(kind.__dlpack__))
    return known


def _learn(kind: type, function: Any, accepted: dict[str, bool] | None) -> _Signature:
    """Note which keywords a function takes, and whether it insists on them; None where that cannot be read."""
    if accepted is None:
        return _signatures.keep(kind, _Signature(function, None, False))
    keywords = {name: _ON_HOST.get(name) for name, must in accepted.items() if must or name in _ON_HOST}
    return _signatures.keep(kind, _Signature(function, keywords, "stream" in accepted))


def _read_keywords(function: Any) -> dict[str, bool] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return _ALL
    return {each.name: each.default is each.empty for each in parameters if each.name in _ALL}
