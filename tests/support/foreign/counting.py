"""The foreign producer of counting.c."""

from __future__ import annotations

import ctypes

HOST = 1


class Counting:
    """The foreign producer and consumer of counting.c, with keyword defaults."""

    def __init__(self, path):
        self.path = str(path)
        self.free = ctypes.CDLL(self.path)  # calls without the GIL
        self.held = ctypes.PyDLL(self.path)  # calls with the GIL
        for name in ("counting_versioned", "counting_legacy"):
            getattr(self.free, name).restype = ctypes.c_void_p
        for name in ("counting_capsule", "counting_legacy_capsule"):
            function = getattr(self.held, name)
            function.restype, function.argtypes = ctypes.py_object, [ctypes.c_void_p]
        for name in ("counting_consume", "counting_consume_legacy"):
            function = getattr(self.held, name)
            function.restype, function.argtypes = ctypes.c_void_p, [ctypes.py_object]
        self.held.counting_name.restype, self.held.counting_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
        clear = self.held.counting_clear_with_error
        clear.restype, clear.argtypes = ctypes.py_object, [ctypes.py_object]
        self.free.counting_delete_at_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.free.counting_deleted.restype = ctypes.c_long
        for name in ("counting_delete_on_thread", "counting_delete", "counting_delete_by_context"):
            getattr(self.free, name).argtypes = [ctypes.c_void_p, ctypes.c_int]

    @property
    def deleted(self):
        """The number of calls of counting deleters in this process."""
        return self.free.counting_deleted()

    @staticmethod
    def _numbers(values):
        return None if values is None else (ctypes.c_int64 * max(len(values), 1))(*values)

    def managed(
        self, shape=(2, 3), strides=None, dtype=(2, 32, 1), device=(HOST, 0), *, ndim=None, legacy=False, flags=0,
        version=(1, 0), byte_offset=0, null_data=False, null_deleter=False,
    ):  # fmt: skip
        """Return the address of a fresh managed tensor over 4096 zero bytes."""
        rank = ctypes.c_int(len(shape) if ndim is None else ndim)
        common = (rank, self._numbers(shape), self._numbers(strides), *map(ctypes.c_int, (*dtype, *device)))
        common += (ctypes.c_uint64(byte_offset), ctypes.c_int(null_data))
        if legacy:
            return self.free.counting_legacy(*common, ctypes.c_int(null_deleter))
        return self.free.counting_versioned(
            *common, ctypes.c_uint64(flags), *map(ctypes.c_int, version), ctypes.c_int(null_deleter)
        )

    def capsule(self, *args, legacy=False, **kwargs):
        """Return a fresh capsule, versioned or legacy, around a managed tensor that counts its deletion."""
        address = self.managed(*args, legacy=legacy, **kwargs)
        return (self.held.counting_legacy_capsule if legacy else self.held.counting_capsule)(address)

    def name(self, capsule):
        """Return a capsule's name."""
        return self.held.counting_name(capsule).decode()

    def consume(self, capsule, *, legacy=False):
        """Consume a capsule as a foreign consumer would; return the address of its managed tensor."""
        return (self.held.counting_consume_legacy if legacy else self.held.counting_consume)(capsule)

    def delete(self, address, *, legacy=False, thread=False):
        """Call a managed tensor's deleter without the GIL, here or on a thread that has never seen Python."""
        (self.free.counting_delete_on_thread if thread else self.free.counting_delete)(address, legacy)

    def delete_by_context(self, address, *, legacy=False):
        """Call a managed tensor's deleter without the GIL, unless its manager_ctx is NULL; return True if it ran."""
        return bool(self.free.counting_delete_by_context(address, legacy))

    def delete_together(self, addresses):
        """Call the deleters of versioned managed tensors, a multiple of four, from four threads at once."""
        assert len(addresses) % 4 == 0
        assert self.free.counting_delete_together((ctypes.c_void_p * len(addresses))(*addresses), len(addresses)) == 0

    def clear_with_error(self, held):
        """Empty a list while KeyError('pending') is set, and raise whatever is set afterwards."""
        self.held.counting_clear_with_error(held)

    def delete_at_exit(self, here=None, elsewhere=None):
        """Call the deleters of versioned managed tensors after finalisation: on the main thread, and on a fresh one."""
        self.free.counting_delete_at_exit(here, elsewhere)
