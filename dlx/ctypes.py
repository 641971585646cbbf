"""DLPack's structs for ctypes: the same names, fields and layout as in ``dlpack_abi.h``.

A function that takes or gives a managed tensor is declared with ``ctypes.POINTER(DLManagedTensorVersioned)``; what it
gives goes to `dlx.from_managed`. Numbers come from `dlx.Device` and `dlx.DType`.

A deleter that is a Python function (``DLManagedTensorVersioned.Deleter(f)``) must outlive every tensor that may call
it, and must not be called once the interpreter is gone. Deleters written in C have neither problem.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, ClassVar

__all__ = [
    "DLPackVersion",
    "DLDevice",
    "DLDataType",
    "DLTensor",
    "DLManagedTensor",
    "DLManagedTensorVersioned",
    "DLPackExchangeAPIHeader",
    "DLPackExchangeAPI",
]


class DLPackVersion(Structure):
    """Version of the ABI that a struct follows."""

    _fields_ = (("major", c_uint32), ("minor", c_uint32))


class DLDevice(Structure):
    """Where memory is: device type by number, device id."""

    _fields_ = (("device_type", c_int32), ("device_id", c_int32))


class DLDataType(Structure):
    """What an element is: type code by number, bits of one lane, lanes."""

    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class DLTensor(Structure):
    """A tensor without an owner: shape and strides have ndim numbers each, strides are in elements."""

    _fields_ = (
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class DLManagedTensor(Structure):
    """A tensor with its deleter, as before DLPack 1.0; ``legacy=True`` in `dlx.from_managed`."""

    Deleter: ClassVar[Any]


DLManagedTensor.Deleter = ctypes.CFUNCTYPE(None, POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (
    ("dl_tensor", DLTensor),
    ("manager_ctx", c_void_p),
    ("deleter", DLManagedTensor.Deleter),
)


class DLManagedTensorVersioned(Structure):
    """A tensor with its version, flags and deleter, since DLPack 1.0."""

    Deleter: ClassVar[Any]


DLManagedTensorVersioned.Deleter = ctypes.CFUNCTYPE(None, POINTER(DLManagedTensorVersioned))
DLManagedTensorVersioned._fields_ = (
    ("version", DLPackVersion),
    ("manager_ctx", c_void_p),
    ("deleter", DLManagedTensorVersioned.Deleter),
    ("flags", c_uint64),
    ("dl_tensor", DLTensor),
)


class DLPackExchangeAPIHeader(Structure):
    """Start of an exchange table: its version, and an older table of the same type or NULL."""


DLPackExchangeAPIHeader._fields_ = (("version", DLPackVersion), ("prev_api", POINTER(DLPackExchangeAPIHeader)))

_OUT = POINTER(POINTER(DLManagedTensorVersioned))
_SET_ERROR = ctypes.CFUNCTYPE(None, c_void_p, c_char_p, c_char_p)


class DLPackExchangeAPI(Structure):
    """The table behind ``type(array).__dlpack_c_exchange_api__``; any slot may be NULL.

    Slots that touch Python objects are called with the GIL held and raise what they set; the allocator and the stream
    are asked without it.
    """

    _fields_ = (
        ("header", DLPackExchangeAPIHeader),
        ("managed_tensor_allocator", ctypes.CFUNCTYPE(c_int, POINTER(DLTensor), _OUT, c_void_p, _SET_ERROR)),
        ("managed_tensor_from_py_object_no_sync", ctypes.PYFUNCTYPE(c_int, ctypes.py_object, _OUT)),
        (
            "managed_tensor_to_py_object_no_sync",
            ctypes.PYFUNCTYPE(c_int, POINTER(DLManagedTensorVersioned), POINTER(c_void_p)),
        ),
        ("dltensor_from_py_object_no_sync", ctypes.PYFUNCTYPE(c_int, ctypes.py_object, POINTER(DLTensor))),
        ("current_work_stream", ctypes.CFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))),
    )
