"""DLPack's structs for ctypes: the same names, fields and layout as in ``dlpack_abi.h``.

A function that takes or gives a managed tensor is declared with ``ctypes.POINTER(DLManagedTensorVersioned)``; what it
gives goes to `dlx.from_managed`. Numbers come from `dlx.Device` and `dlx.DType`.

A deleter that is a Python function (``DLManagedTensorVersioned.Deleter(f)``) must outlive every tensor that may call
it, and must not be called once the interpreter is gone. Deleters written in C have neither problem.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

__all__ = [
    "DLPackVersion", "DLDevice", "DLDataType", "DLTensor", "DLManagedTensor", "DLManagedTensorVersioned",
    "DLPackExchangeAPIHeader", "DLPackExchangeAPI",
]  # fmt: skip


class DLPackVersion(ctypes.Structure):
    """Version of the ABI that a struct follows."""

    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class DLDevice(ctypes.Structure):
    """Where memory is: device type by number, device id."""

    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    """What an element is: type code by number, bits of one lane, lanes."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    """A tensor without an owner: shape and strides have ndim numbers each, strides are in elements."""

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
    """A tensor with its deleter, as before DLPack 1.0; ``legacy=True`` in `dlx.from_managed`."""

    Deleter: ClassVar[Any]


DLManagedTensor.Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (
    ("dl_tensor", DLTensor),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", DLManagedTensor.Deleter),
)


class DLManagedTensorVersioned(ctypes.Structure):
    """A tensor with its version, flags and deleter, since DLPack 1.0."""

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
    """Start of an exchange table: its version, and an older table of the same type or NULL."""


DLPackExchangeAPIHeader._fields_ = (("version", DLPackVersion), ("prev_api", ctypes.POINTER(DLPackExchangeAPIHeader)))

_OUT = ctypes.POINTER(ctypes.POINTER(DLManagedTensorVersioned))
_SET_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_ALLOCATOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(DLTensor), _OUT, ctypes.c_void_p, _SET_ERROR)


class DLPackExchangeAPI(ctypes.Structure):
    """The table behind ``type(array).__dlpack_c_exchange_api__``; any slot may be NULL.

    Slots that touch Python objects are called with the GIL held and raise what they set; the allocator and the stream
    are asked without it.
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
