"""DLPack's structs for ctypes, with the names, fields and layout of ``dlpack_abi.h``.

Declare functions that take or return a managed tensor with ``ctypes.POINTER(DLManagedTensorVersioned)``, and pass the
returned tensor to `dlx.from_managed`. `dlx.Device` and `dlx.DType` have the numbers.

A deleter that is a Python function (``DLManagedTensorVersioned.Deleter(f)``) must outlive every tensor that may call
it, and must not be called after the interpreter's end. Deleters written in C have neither restriction.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

__all__ = [
    "DLPackVersion", "DLDevice", "DLDataType", "DLTensor", "DLManagedTensor", "DLManagedTensorVersioned",
    "DLPackExchangeAPIHeader", "DLPackExchangeAPI",
]  # fmt: skip


class DLPackVersion(ctypes.Structure):
    """ABI version of a struct."""

    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class DLDevice(ctypes.Structure):
    """Device of memory: device type and device id."""

    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    """Data type of an element: type code, bits of one lane, number of lanes."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    """A tensor without an owner; shape and strides have ndim entries each, strides are in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """A tensor with a deleter, before DLPack 1.0; ``legacy=True`` in `dlx.from_managed`."""

    Deleter: ClassVar[Any]


DLManagedTensor.Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (
    ("dl_tensor", DLTensor),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", DLManagedTensor.Deleter),
)


class DLManagedTensorVersioned(ctypes.Structure):
    """A tensor with version, flags and deleter, since DLPack 1.0."""

    Deleter: ClassVar[Any]


DLManagedTensorVersioned.Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensorVersioned))
DLManagedTensorVersioned._fields_ = (
    ("version", DLPackVersion),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", DLManagedTensorVersioned.Deleter),
    ("flags", ctypes.c_uint64),
    ("dl_tensor", DLTensor),
)


class DLPackExchangeAPIHeader(ctypes.Structure):
    """Header of an exchange table: its version, and an older table of the same type or NULL."""


DLPackExchangeAPIHeader._fields_ = (("version", DLPackVersion), ("prev_api", ctypes.POINTER(DLPackExchangeAPIHeader)))

_OUT = ctypes.POINTER(ctypes.POINTER(DLManagedTensorVersioned))
_SET_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_ALLOCATOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(DLTensor), _OUT, ctypes.c_void_p, _SET_ERROR)


class DLPackExchangeAPI(ctypes.Structure):
    """The table of ``type(array).__dlpack_c_exchange_api__``; any slot may be NULL.

    Slots with Python objects are called with the GIL and raise the exception that they set; the allocator and the
    stream slot are called without the GIL.
    """

    _fields_ = (
        ("header", DLPackExchangeAPIHeader),
        ("managed_tensor_allocator", _ALLOCATOR),
        ("managed_tensor_from_py_object_no_sync", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, _OUT)),
        (
            "managed_tensor_to_py_object_no_sync",
            ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(DLManagedTensorVersioned), ctypes.POINTER(ctypes.c_void_p)),
        ),
        (
            "dltensor_from_py_object_no_sync",
            ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor)),
        ),
        (
            "current_work_stream",
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)),
        ),
    )
