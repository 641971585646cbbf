"""DLPack as a consumer: call ``__dlpack__`` once, with the keywords that it supports."""

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

__all__ = ["device_of", "export", "keywords_of", "no_numbers", "return_or_raise", "why_no_numbers"]

MAX_VERSION: tuple[int, int] = (lib.DLX_DLPACK_MAJOR, lib.DLX_DLPACK_MINOR)


class _Signature(NamedTuple):
    """How to call ``__dlpack__`` of a type."""

    function: Any  # from the class: a descriptor may return a new object at each access
    keywords: dict[str, Any] | None  # without a stream; None: unknown until the first call
    takes_stream: bool


_signatures: TypeCache[_Signature] = TypeCache()
_ON_HOST = {"max_version": MAX_VERSION}
_ALL = dict.fromkeys(("stream", "max_version", "dl_device", "copy"), False)
"""The standard's keywords; False: the producer does not require it."""


def device_of(obj: Any) -> Device | None:
    """Return the device from ``__dlpack_device__``, or None; the capsule's may differ (torch's pinned memory)."""
    ask = getattr(type(obj), "__dlpack_device__", None)
    if ask is None:
        return None
    try:
        answer = ask(obj)
        is_pair = type(answer) is tuple and len(answer) == 2
        # Check the types first: other objects may not support the comparison.
        if is_pair and isinstance(answer[0], int) and isinstance(answer[1], int) and answer == HOST:
            return HOST
        if isinstance(answer, tuple) and len(answer) == 2 and answer[1] is None:  # paddle's host memory
            place = Device(answer[0], 0)
            answer = place if host_readable(place) else answer
        return Device(answer)
    except DlxError as error:
        raise ProtocolError(f"its __dlpack_device__ is invalid: {error.reason}") from error
    except Exception as error:
        raise foreign_error("its __dlpack_device__ raised", error) from error


# Names of non-numeric dtypes: tensorflow's __dlpack__ aborts the process for them.
_NO_NUMBERS = re.compile(r"(<dtype: ')?(object|resource|variant|string|str\d*)(_ref)?('>)?", re.IGNORECASE)


def why_no_numbers(obj: Any) -> str:
    """Return the reason if the ``dtype`` of an object is not numeric, else ``""``; call it before ``__dlpack__``."""
    try:
        dtype = getattr(obj, "dtype", None)
    except MemoryError:
        raise
    except Exception:  # unknown; `__dlpack__` decides
        return ""
    return "" if dtype is None else no_numbers(dtype)


def no_numbers(dtype: Any) -> str:
    """Return the reason if a dtype is not numeric, else ``""``."""
    try:
        name = getattr(dtype, "name", None)
        text = name if isinstance(name, str) else class_name(dtype) if isinstance(dtype, type) else str(dtype)
        is_known = _NO_NUMBERS.fullmatch(text) is not None
    except MemoryError:
        raise
    except Exception:  # unknown, as above
        return ""
    return f"its dtype is {truncate(text, 60)}, and DLPack supports only numbers" if is_known else ""


def export(obj: Any, *, stream: int | None = None) -> Tensor:
    """Call an object's ``__dlpack__`` once and claim its capsule; on the host without a stream (numpy refuses -1)."""
    try:
        answer = native.producer_response(obj)
        if answer is not None and stream is None:  # the fast path has called it already
            capsule = return_or_raise(*answer)
        else:
            function, keywords, takes_stream = _signature_of(type(obj))
            ordered = {} if stream is None else {"stream": stream}
            if keywords is None:
                capsule = _call_first(obj, function, ordered)
            else:
                capsule = obj.__dlpack__(**(keywords | ordered if takes_stream else keywords))
    except DlxError:
        raise
    except Exception as error:
        raise foreign_error("its __dlpack__ raised", error) from error
    finally:
        answer = None  # otherwise an error would refer to itself through its traceback
    if native.capsule_state(capsule) is None:
        raise ProtocolError(f"its __dlpack__ returned {class_name(type(capsule))}, not a DLPack capsule")
    return native.capsule_claim(capsule)


def return_or_raise(obj: Any, result: Any, error: Exception | None) -> Any:
    """Return the result of a method that the fast path called, or raise its error."""
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # this frame is in its traceback: a reference cycle


def _call_first(obj: Any, function: Any, stream: dict[str, int]) -> Any:
    """Call a ``__dlpack__`` without a readable signature, and learn which keywords it supports."""
    try:
        capsule = obj.__dlpack__(max_version=MAX_VERSION, **stream)
    except TypeError as error:
        if "keyword argument" not in message_of(error):  # or "takes no keyword arguments"
            raise
        _learn(type(obj), function, {"stream": False})
        return obj.__dlpack__(**stream)
    _learn(type(obj), function, _ALL)
    return capsule


def keywords_of(kind: Any) -> dict[str, Any] | None:
    """Return the keywords for ``__dlpack__`` of a type on the host; None if unknown until the first call."""
    return _signature_of(kind).keywords


def _signature_of(kind: Any) -> _Signature:
    """Return how to call ``__dlpack__`` of a type; the result is cached for each function in the class."""
    function = None
    for cls in kind.__mro__:
        if "__dlpack__" in cls.__dict__:
            function = cls.__dict__["__dlpack__"]
            if type(function) is FunctionType:  # a strong reference could keep the class alive
                function = ref(function)
            break
    known = _signatures.get(ref(kind)) if type(kind) is type or is_key(kind) else None
    if known is None or known.function is not function:
        known = _learn(kind, function, None if function is None else _read_keywords(kind.__dlpack__))
    return known


def _learn(kind: type, function: Any, accepted: dict[str, bool] | None) -> _Signature:
    """Cache which keywords a function supports and requires (None: unknown)."""
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
