"""Speaking DLPack, the buffer protocol and the array interface to anybody: object in, `Tensor` out."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from dlx import cuda, native
from dlx.abi import IS_COPIED, READ_ONLY, Device, DType, host_readable
from dlx.errors import ConversionError, DlxError, DTypeError, LayoutError, ProtocolError, StreamError
from dlx.foreign import TypeCache, class_name, cut, exception_text, message_of, safe_repr
from dlx.native import Tensor, lib
from dlx.stream import Stream, meaning

__all__ = ["array_interface", "buffer", "cuda_array_interface", "cuda_interface_stream", "device_of", "export"]
__all__ += ["why_no_numbers"]

MAX_VERSION: tuple[int, int] = (lib.DLX_DLPACK_MAJOR, lib.DLX_DLPACK_MINOR)
HOST = Device("cpu")

# A type's __dlpack__ and the keywords that it takes -> whether it insists on them; None where its signature cannot be
# read. Weak: types may go. The function is compared, since a type may be given another one.
_keywords: TypeCache[tuple[Any, dict[str, bool] | None]] = TypeCache()
_ALL = dict.fromkeys(("stream", "max_version", "dl_device", "copy"), False)


def device_of(obj: Any) -> Device | None:
    """Return what ``__dlpack_device__`` says, as numbers; None where the object has none.

    The answer may differ from the capsule's device (torch's pinned memory, arrays that numpy imported).
    """
    ask = getattr(type(obj), "__dlpack_device__", None)
    if ask is None:
        return None
    try:
        answer = ask(obj)
        if isinstance(answer, tuple) and len(answer) == 2 and answer[1] is None:  # paddle, of its host memory
            place = Device(answer[0], 0)
            answer = place if host_readable(place) else answer
        return Device(answer)
    except DlxError as error:
        raise ProtocolError(f"its __dlpack_device__ gives {error.reason}") from error
    except Exception as error:
        raise producer_failed("__dlpack_device__", error) from error


# What a framework calls elements that are no numbers. Tensorflow's __dlpack__ ends the process where it has such.
_NO_NUMBERS = re.compile(r"(<dtype: ')?(object|resource|variant|string|str\d*)(_ref)?('>)?", re.IGNORECASE)


def why_no_numbers(obj: Any) -> str:
    """Return why an object's elements are no numbers, by its ``dtype`` attribute; empty where that says nothing of it.

    Asked of those whose ``__dlpack__`` nobody knows, before it is called.
    """
    try:
        dtype = getattr(obj, "dtype", None)
        name = getattr(dtype, "name", None)
        said = name if isinstance(name, str) else class_name(dtype) if isinstance(dtype, type) else str(dtype)
        is_known = _NO_NUMBERS.fullmatch(said) is not None
    except MemoryError:
        raise
    except Exception:  # it is not known then, and `__dlpack__` will say
        return ""
    return f"its dtype is {cut(said, 60)}, and DLPack knows numbers only" if is_known else ""


def export(obj: Any, *, stream: int | None = None) -> Tensor:
    """Ask an object for its capsule, once, and take ownership of what is in it.

    Parameters
    ----------
    obj
        Anything whose type has ``__dlpack__``: with all keywords of the standard, with ``stream`` only, or with none.
    stream
        The consumer's stream; None on the host, where no keyword is sent (numpy refuses even -1).

    Raises
    ------
    ConversionError
        If the producer raises; its error is the cause.
    ProtocolError
        If what comes back is no fresh DLPack capsule of major version 1, or a broken one.

    Notes
    -----
    Keywords are those of the array API standard's ``__dlpack__``. A signature is learnt once per type, so that a
    `TypeError` raised inside a producer is never taken for an old signature; only where it cannot be read may the
    very first call be repeated, and only on "unexpected keyword argument".
    """
    wanted: dict[str, Any] = {"max_version": MAX_VERSION}
    if stream is not None:
        wanted["stream"] = stream
    try:
        capsule = _call(obj, wanted)
    except DlxError:
        raise
    except Exception as error:
        raise producer_failed("__dlpack__", error) from error
    if native.capsule_state(capsule) is None:
        raise ProtocolError(f"its __dlpack__ gave {class_name(type(capsule))}, not a DLPack capsule")
    return native.capsule_claim(capsule)


def producer_failed(method: str, error: Exception) -> ConversionError:
    """Return the error to raise for an exception that came out of a producer."""
    if isinstance(error, MemoryError):
        raise error
    said = exception_text(error) if message_of(error) else f"{class_name(type(error))}: without a message"
    return ConversionError(f"its {method} raised {said}")


def _call(obj: Any, wanted: dict[str, Any]) -> Any:
    kind: Any = type(obj)
    function = _own_function(kind)
    learnt = _keywords.get(kind)
    if learnt is None or learnt[0] is not function:
        learnt = _keywords[kind] = (function, _read_keywords(kind.__dlpack__))
    accepted = learnt[1]
    if accepted is not None:
        return obj.__dlpack__(**{name: wanted.get(name) for name, must in accepted.items() if must or name in wanted})
    try:
        capsule = obj.__dlpack__(**wanted)
    except TypeError as error:
        if "keyword argument" not in message_of(error):  # also "takes no keyword arguments"
            raise
        _keywords[kind] = (function, {"stream": False})
        return obj.__dlpack__(**{name: value for name, value in wanted.items() if name == "stream"})
    _keywords[kind] = (function, _ALL)
    return capsule


def _own_function(kind: type) -> Any:
    """Return what stands in the class, which stays the same object, and not what its descriptor makes of it."""
    return next((cls.__dict__["__dlpack__"] for cls in kind.__mro__ if "__dlpack__" in cls.__dict__), None)


def _read_keywords(function: Any) -> dict[str, bool] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return _ALL
    return {each.name: each.default is each.empty for each in parameters if each.name in _ALL}


# Letters of PEP 3118 and `struct`: the kind, and the widths in bytes that it may have. A native 'l' may be marked '<'
# (ctypes does) without being 4 bytes wide; a union calls itself 'B' without being bytes.
_INTEGER_WIDTHS = ((1,), (2,), (4,), (4, 8), (8,), (8,))
_LETTERS = {
    "?": ("bool", (1,)),
    **{letter: ("int", widths) for letter, widths in zip("bhilqn", _INTEGER_WIDTHS, strict=True)},
    **{letter: ("uint", widths) for letter, widths in zip("BHILQN", _INTEGER_WIDTHS, strict=True)},
    "c": ("uint", (1,)),
    **{letter: ("float", (width,)) for letter, width in zip("efd", (2, 4, 8), strict=True)},
    **{letter: ("complex", (width,)) for letter, width in (("Ze", 4), ("Zf", 8), ("Zd", 16), ("F", 8), ("D", 16))},
}
_FOREIGN_ORDER = ">!" if sys.byteorder == "little" else "<"


def _dtype_of_letters(letters: str, order: str, itemsize: int, shown: str) -> DType:
    if itemsize > 1 and order and order in _FOREIGN_ORDER:
        raise DTypeError(f"its elements ({shown!r}) are in the other byte order", fix="Swap their bytes first.")
    kind, widths = _LETTERS.get(letters, ("", ()))
    if itemsize not in widths:
        raise DTypeError(
            f"its elements ({shown!r}) are no numbers that DLPack knows", fix="View them as numbers first."
        )
    return DType(kind if kind == "bool" else f"{kind}{8 * itemsize}")


def buffer(obj: Any) -> Tensor:
    """Return a tensor over anything with the buffer protocol; the buffer is held until the tensor is released.

    Raises
    ------
    DTypeError
        If the format is not one number per element, or in the other byte order.
    LayoutError
        If the buffer is indirect, or its strides are not whole elements.

    Notes
    -----
    Formats are those of PEP 3118.
    """
    try:
        view = memoryview(obj)
    except (BufferError, ValueError) as error:
        raise ConversionError(f"its buffer cannot be had: {message_of(error)}".rstrip(".")) from error
    order = view.format[0] if view.format[:1] in ("@", "=", "<", ">", "!") else ""
    dtype = _dtype_of_letters(view.format[len(order) :], order, view.itemsize, view.format)
    if view.suboffsets:
        raise LayoutError("its buffer is indirect (suboffsets)", fix="Copy it into one block first.")
    address = native.buffer_address(view)
    flags = READ_ONLY if view.readonly else 0
    strides = _whole_elements(view.strides, view.shape, view.itemsize)
    return native.tensor_new(address, view.shape or (), strides, dtype, HOST, flags, view)


def _whole_elements(byte_strides: Any, shape: Any, itemsize: int) -> tuple[int, ...] | None:
    if byte_strides is None:
        return None
    if any(stride % itemsize for stride, extent in zip(byte_strides, shape, strict=True) if extent > 1):
        raise LayoutError(
            f"its byte strides {tuple(byte_strides)} are not multiples of the item size {itemsize}",
            fix="Copy it into contiguous memory first.",
        )
    return tuple(stride // itemsize for stride in byte_strides)


# The same for the array interface's kinds: (kind, width in bytes) -> letter.
_INTERFACE_LETTERS = {
    ("b", 1): "?",
    **{("i", 1 << n): letter for n, letter in enumerate("bhiq")},
    **{("u", 1 << n): letter for n, letter in enumerate("BHIQ")},
    **{("f", 2 << n): letter for n, letter in enumerate("efd")},
    **{("c", 8 << n): letter for n, letter in enumerate("FD")},
}


def _interface_facts(interface: dict[str, Any], name: str) -> tuple[tuple[int, ...], DType, int]:
    """Return shape, dtype and bytes of an element."""
    try:
        shape = tuple(int(extent) for extent in interface["shape"])
        typestr = str(interface["typestr"])
        order, letter, width = typestr[0], typestr[1], typestr[2:]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ProtocolError(f"its {name} is incomplete ({exception_text(error)})") from error
    if interface.get("mask") is not None:
        raise LayoutError("it has a mask, which DLPack cannot carry", fix="Fill the masked elements first.")
    itemsize = int(width) if width.isdecimal() else 0  # dates carry their unit: '<M8[s]'
    dtype = _dtype_of_letters(_INTERFACE_LETTERS.get((letter, itemsize), typestr), order, itemsize, typestr)
    return shape, dtype, itemsize


def _interface_address(data: Any, name: str) -> tuple[int, bool]:
    """Return address and read-only bit."""
    try:
        return int(data[0]), bool(data[1])
    except (IndexError, TypeError, ValueError) as error:
        raise ProtocolError(f"the data of its {name} is {safe_repr(data)}, not (address, readonly)") from error


def array_interface(obj: Any, interface: dict[str, Any]) -> Tensor:
    """Return a tensor over an object with ``__array_interface__`` (version 3), its read-only bit honoured.

    Raises
    ------
    ProtocolError
        If the description is incomplete.
    DTypeError, LayoutError
        If it describes what DLPack cannot: masks, other byte order, structures, strides that are not whole elements.
    """
    name = "__array_interface__"
    shape, dtype, itemsize = _interface_facts(interface, name)
    data, strides = interface.get("data"), interface.get("strides")
    owner: Any = obj
    if isinstance(data, tuple):
        address, readonly = _interface_address(data, name)
    else:  # a buffer, or the object itself as one; its length bounds what may be read
        view = memoryview(obj if data is None else data)
        start = int(interface.get("offset") or 0)
        needed = itemsize
        for extent in shape:
            needed *= extent
        if not view.c_contiguous or strides is not None or start + needed > view.nbytes or start < 0:
            raise ProtocolError(f"its buffer of {view.nbytes} bytes does not hold {needed} bytes from {start} on")
        address, readonly = native.buffer_address(view) + start, view.readonly
        owner = (obj, view)
    flags = READ_ONLY if readonly else 0
    if type(data) is bytes:
        flags |= IS_COPIED  # nobody keeps pixels in bytes: its producer has just written them out (pillow does)
    return native.tensor_new(address, shape, _whole_elements(strides, shape, itemsize), dtype, HOST, flags, owner)


def cuda_array_interface(obj: Any, interface: dict[str, Any]) -> Tensor:
    """Return a tensor over an object with ``__cuda_array_interface__`` (versions 2 and 3); the driver says where it is.

    Raises
    ------
    ProtocolError
        If the description is incomplete, or the address is none of CUDA's.
    DTypeError, LayoutError
        As `array_interface`.
    DeviceError
        If there is no driver to ask.
    """
    name = "__cuda_array_interface__"
    shape, dtype, itemsize = _interface_facts(interface, name)
    address, readonly = _interface_address(interface.get("data"), name)
    device = cuda.where(address) if address else Device("cuda")  # without an element there is no address
    if device == HOST:
        raise ProtocolError(f"the address {address:#x} in its {name} is plain host memory")
    strides = _whole_elements(interface.get("strides"), shape, itemsize)
    return native.tensor_new(address, shape, strides, dtype, device, READ_ONLY if readonly else 0, obj)


def cuda_interface_stream(interface: dict[str, Any], device: Device) -> Stream | None:
    """Return the stream that ``__cuda_array_interface__`` asks consumers to wait for; None where it asks for none.

    Notes
    -----
    Version 3 has the key ``stream``. Before it, work was understood to be on the legacy stream.
    """
    if int(interface.get("version", 0)) < 3:
        return Stream(device, lib.DLX_STREAM_LEGACY)
    said = interface.get("stream")
    if said is None:
        return None
    try:
        return meaning(said, device)
    except StreamError as error:
        raise ProtocolError(
            f"the stream of its __cuda_array_interface__ is {safe_repr(said)}: {error.reason}"
        ) from error
