"""The foreign program of exchange.c, which calls the slots of an exchange table."""

from __future__ import annotations

import ctypes

import dlx
from dlx._core.native import ffi


class Allocation(ctypes.Structure):
    """The struct `allocation` of exchange.c."""

    _fields_ = (
        ("api", ctypes.c_void_p),
        ("prototype", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rc", ctypes.c_int),
        ("had_gil", ctypes.c_int),
        ("reports", ctypes.c_int),
        ("kind", ctypes.c_char * 64),
        ("message", ctypes.c_char * 256),
    )


class Exchange:
    """The foreign program of exchange.c at the table of dlx.Tensor or another holder."""

    def __init__(self, path, holder=dlx.Tensor):
        self.free, self.held = ctypes.CDLL(path), ctypes.PyDLL(path)
        self.free.exchange_allocate.argtypes = [ctypes.POINTER(Allocation), ctypes.c_int]
        for name, arguments in {
            "find": [ctypes.py_object],
            "export": [ctypes.c_void_p, ctypes.py_object],
            "import": [ctypes.c_void_p, ctypes.c_void_p],
            "borrow": [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p],
            "stream": [ctypes.c_void_p, ctypes.c_int, ctypes.c_int],
        }.items():
            function = getattr(self.held, f"exchange_{name}")
            function.restype, function.argtypes = ctypes.py_object, arguments
        self.address = self.held.exchange_find(holder)
        self.api = ffi.cast("DLPackExchangeAPI*", self.address)

    def export(self, obj):
        """Return a managed tensor (cdata) that the caller owns."""
        return ffi.cast("DLManagedTensorVersioned*", self.held.exchange_export(self.address, obj))

    def take(self, managed):
        """Return the object that a managed tensor (cdata or address) becomes."""
        return self.held.exchange_import(self.address, int(ffi.cast("uintptr_t", managed)))

    def borrow(self, obj):
        """Return a DLTensor (cdata) that views an object."""
        out = ffi.new("DLTensor*")
        self.held.exchange_borrow(self.address, obj, int(ffi.cast("uintptr_t", out)))
        return out

    def stream(self, device):
        """Return the address of the current stream."""
        return self.held.exchange_stream(self.address, *device)

    def allocate(self, prototype, *, thread=False):
        """Call the allocator without the GIL; return the report."""
        call = Allocation(api=self.address, prototype=int(ffi.cast("uintptr_t", prototype)))
        assert self.free.exchange_allocate(ctypes.byref(call), thread) == 0
        assert not call.had_gil
        return call
