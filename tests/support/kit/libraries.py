"""Producers and consumers for the conformance kit's tests: a good one, and bad ones for each promise.

Each fault has the name of the check that must find it, or `name/variant` if there are several. A fresh process finds
them as ``support.kit.libraries:subject_<fault>``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from dataclasses import replace

import dlx
from dlx._core.native import ffi, tensor_view
from dlx.testing import Source, Subject, Taken, find
from dlx.testing.capsules import VIEWS

__version__ = "1.0"
GOOD = find("dlx")
KEPT = []  # objects that the leaking subjects keep
BUSY = []  # state that thread-unsafe subjects share


def _address(function):
    return ffi.cast("void *", ctypes.cast(function, ctypes.c_void_p).value)


class Array:
    """A valid array over a dlx.Tensor, and the base of the invalid ones."""

    def __init__(self, tensor, readonly=False):
        self.tensor, self.readonly = tensor, readonly

    @property
    def shown(self):
        """Return the tensor with the array's read-only flag."""
        return _readonly(self.tensor) if self.readonly else self.tensor

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.shown.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def _readonly(t):
    return dlx.from_pointer(t.data_ptr, t.shape, t.dtype, strides=t.strides, readonly=True, owner=t)


def _cloned(t):
    return dlx.convert(t, to="dlx", copy=True)


def _pending(kind):
    def make():
        tensor = GOOD.make(b"\1\2\3\4", "uint8", (4,))
        return kind(tensor), b"\4\3\2\1"  # the pending operation: reverse

    return make


def producer(kind=Array, **facts):
    """Return a subject that is a producer only."""
    views = {name: lambda a, view=view: kind(view(a.tensor)) for name, view in GOOD.views.items()}
    given = {
        "make": lambda data, dtype, shape: kind(GOOD.make(data, dtype, shape)),
        "views": views,
        "readonly": lambda a: kind(a.tensor, True),
        "describe": lambda a: (a.tensor.data_ptr, a.tensor.shape, a.tensor.dtype.name),
        "read": lambda a: Taken(_cloned(a.tensor).__dlpack__(max_version=(1, 0))).elements(),
        "unfit": {"unfit": lambda: Unfit(GOOD.make(bytes(4), "uint8", (4,)))},
        "pending": {"turned": _pending(Turned)},
        "reshape": lambda a: setattr(a, "tensor", VIEW(a.tensor)),
        "dtypes": GOOD.dtypes,
    }
    return Subject("planted", spec="support.kit.libraries:subject", **(given | facts))


VIEW = GOOD.views["transposed"]


class Unfit(Array):
    """An array that cannot be exported, and raises."""

    def __dlpack__(self, **keywords):
        raise BufferError("this cannot be said")


class Turned(Array):
    """An array with a pending operation, which it performs before the export."""

    def __dlpack__(self, **keywords):
        turned = GOOD.make(b"\4\3\2\1", "uint8", (4,))
        return turned.__dlpack__(**keywords)


def edited(edit, base=Array):
    """Return a producer with edited capsules: ``edit(managed)``."""

    class Edited(base):
        def __dlpack__(self, **keywords):
            capsule = super().__dlpack__(**keywords)
            edit(Taken(capsule).managed)
            return capsule

    return Edited


def altered(**changes):
    """Return a producer that changes its keywords: ``keyword=function of the keywords``."""

    class Altered(Array):
        def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
            keywords = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
            for name, change in changes.items():
                keywords[name] = change(keywords)
            return super().__dlpack__(**keywords)

    return Altered


def _set_dtype(managed):
    managed.dl_tensor.dtype.code = 1 - managed.dl_tensor.dtype.code % 2


def _set_strides(managed):
    for i in range(managed.dl_tensor.ndim):
        managed.dl_tensor.strides[i] = 0


def _no_strides(managed):
    managed.dl_tensor.strides = ffi.NULL


def _bare_deleter(managed):
    managed.deleter = ffi.cast(ffi.typeof(managed.deleter), _address(ctypes.pythonapi.PyMem_Malloc))


def _python_deleter(managed):
    KEPT.append(dlx.ctypes.DLManagedTensorVersioned.Deleter(lambda managed: None))
    managed.deleter = ffi.cast(ffi.typeof(managed.deleter), _address(KEPT[-1]))


def _no_flags(managed):
    managed.flags = 0


class Elsewhere(Array):
    def __dlpack_device__(self):
        return (2, 0)


class Live(Array):
    """An array whose capsules show its current shape."""

    def __dlpack__(self, **keywords):
        capsule = super().__dlpack__(**keywords)
        KEPT.append(Taken(capsule))
        return capsule


def _reshape_live(array):
    KEPT.pop().managed.dl_tensor.shape[0] = 24


class Writable(Array):
    """An array that drops its read-only flag."""

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(**keywords)


class ForgetsOld(Array):
    """An array that drops its read-only flag in legacy capsules."""

    def __dlpack__(self, *, max_version=None, **keywords):
        return (self.shown if max_version else self.tensor).__dlpack__(max_version=max_version, **keywords)


class Failing(Array):
    """An array that raises for one version."""

    version = None

    def __dlpack__(self, *, max_version=None, **keywords):
        if max_version == self.version:
            raise AttributeError("not implemented")
        return super().__dlpack__(max_version=max_version, **keywords)


class NoCopy(Array):
    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None):
        return super().__dlpack__(max_version=max_version)


class NoDevice(Array):
    def __dlpack__(self, *, dl_device=None, **keywords):
        if dl_device is not None:
            raise BufferError("no device may be named")
        return super().__dlpack__(**keywords)


class Greedy(Array):
    def __dlpack__(self, *, not_a_keyword=None, no_such_keyword=None, **keywords):
        return super().__dlpack__(**keywords)


class CopiesSilently(Array):
    def __dlpack__(self, *, copy=None, **keywords):
        return (_cloned(self.tensor) if copy else self.tensor).__dlpack__(**keywords)


class NeverCopies(Array):
    def __dlpack__(self, *, copy=None, **keywords):
        if copy:
            raise BufferError("copies are not there yet")
        return super().__dlpack__(**keywords)


class Leaking(Array):
    def __dlpack__(self, **keywords):
        KEPT.append(self)
        return super().__dlpack__(**keywords)


class TwiceReleased(Array):
    """An array that is also released by its capsule after the capsule was consumed."""

    def __dlpack__(self, **keywords):
        capsule = super().__dlpack__(**keywords)
        KEPT.append(self)
        return capsule


class Unowned(Array):
    """An array that exports memory which it wipes in its destructor."""

    def __dlpack__(self, **keywords):
        t = self.tensor
        KEPT.append(t)  # the test must not read freed memory
        return dlx.from_pointer(t.data_ptr, t.shape, t.dtype, strides=t.strides).__dlpack__(**keywords)

    def __del__(self):
        ffi.memmove(ffi.cast("char *", self.tensor.data_ptr), bytes(self.tensor.nbytes), self.tensor.nbytes)


class OneAtATime(Array):
    """An array that fails if a second thread enters."""

    def __dlpack__(self, **keywords):
        if BUSY:
            raise RuntimeError("busy")
        BUSY.append(self)
        try:
            time.sleep(0.0001)
            return super().__dlpack__(**keywords)
        finally:
            BUSY.clear()


def _unfit_passes():
    return Array(GOOD.make(bytes(4), "uint8", (4,)))


PRODUCERS = {
    "export-dtypes": producer(edited(_set_dtype)),
    "export-layouts": producer(edited(_set_strides)),
    "export-strides": producer(edited(_no_strides)),
    "export-device": producer(Elsewhere),
    "export-snapshot": producer(Live, reshape=_reshape_live),
    "export-unfit": producer(unfit={"unfit": _unfit_passes}),
    "export-pending": producer(pending={"turned": _pending(Array)}),
    "export-readonly": producer(Writable),
    "export-readonly/flag": producer(edited(_no_flags)),
    "export-readonly-legacy": producer(ForgetsOld),
    "keyword-max-version-none": producer(altered(max_version=lambda k: k["max_version"] or (1, 0))),
    "keyword-max-version-0": producer(type("Failing0", (Failing,), {"version": (0, 8)})),
    "keyword-max-version-0/versioned": producer(altered(max_version=lambda k: k["max_version"] and (1, 0))),
    "keyword-max-version-1": producer(altered(max_version=lambda k: None)),
    "keyword-max-version-2": producer(type("Failing2", (Failing,), {"version": (2, 0)})),
    "keyword-none": producer(NoCopy),
    "keyword-own-device": producer(NoDevice),
    "keyword-other-device": producer(altered(dl_device=lambda k: None)),
    "keyword-unknown": producer(Greedy),
    "copy-true": producer(altered(copy=lambda k: None)),
    "copy-true-served": producer(NeverCopies),
    "copy-true-flag": producer(CopiesSilently),
    "copy-false": producer(altered(copy=lambda k: True if k["copy"] is False else k["copy"])),
    "owner-unconsumed": producer(Leaking),
    "owner-released": producer(TwiceReleased),
    "owner-outlives": producer(Unowned),
    "deleter-without-gil": producer(edited(_bare_deleter)),
    "deleter-foreign-thread": producer(edited(_bare_deleter)),
    "deleter-at-exit": producer(edited(_python_deleter)),
    "export-leaks": producer(Leaking),
    "export-threads": producer(OneAtATime),
}


# ---- consumers -------------------------------------------------------------------------------------------------------


def consumer(take, **facts):
    """Return a subject that only consumes, including raw capsules."""
    given = {
        "from_dlpack": take, "takes_capsules": True, "takes_copy": True, "dtypes": GOOD.dtypes, "views": GOOD.views,
    }  # fmt: skip
    return Subject("planted", spec="support.kit.libraries:subject", **(given | facts))


def good(obj, *, copy=None):
    """Accept everything that dlx accepts."""
    return dlx.convert(obj, to="dlx", copy=copy)


def _taken(obj, *, copy=None):
    tensor = good(obj, copy=copy)
    return Array(tensor, tensor.readonly)


def then(change):
    """Return a consumer that changes its result."""

    def take(obj, *, copy=None):
        return change(good(obj, copy=copy))

    return take


def _shifted(t):
    """Return a maker of results with wrong positions."""
    if t.ndim == 0 or 0 in t.shape:
        return dlx.from_pointer(t.data_ptr, (*t.shape, 1), t.dtype, owner=t)
    return dlx.from_pointer(t.data_ptr + t.dtype.bits // 8, t.shape, t.dtype, strides=t.strides, owner=t)


def _narrowed(t):
    code, bits, lanes = t.dtype
    return tensor_view(t, (1, 64, lanes), None, None, None) if (code, bits) == (0, 64) else t


def _refusing(when):
    def take(obj, *, copy=None):
        found = good(obj, copy=copy)
        if when(found):
            raise ValueError("not that")
        return found

    return take


def _calling(**keywords):
    """Return a consumer that calls the producer with exactly these keywords."""

    def take(obj, *, copy=None):
        return good(obj.__dlpack__(**keywords) if hasattr(obj, "__dlpack__") else obj, copy=copy)

    return take


def _read(obj, *, copy=None):
    """Return the content of a capsule, with correct ownership."""
    capsule = obj.__dlpack__(max_version=(1, 0)) if hasattr(obj, "__dlpack__") else obj
    return Taken(capsule)


def _no_null_strides(obj, *, copy=None):
    taken = _read(obj)
    if taken.strides is None:
        raise TypeError("strides are missing")
    return good(taken.capsule)


def _no_offset(obj, *, copy=None):
    taken = _read(obj)
    taken.managed.dl_tensor.byte_offset = 0
    return good(taken.capsule)


def _no_legacy(obj, *, copy=None):
    taken = _read(obj)
    if taken.legacy:
        raise ValueError("too old")
    return good(taken.capsule)


def _no_newer(obj, *, copy=None):
    taken = _read(obj)
    if taken.version is not None and taken.version[1] > 3:
        raise ValueError("too new")
    return good(taken.capsule)


def _four_times(obj, *, copy=None):
    for _ in range(3):
        try:
            return good(obj.__dlpack__())
        except TypeError:
            pass
    return good(obj.__dlpack__())


def _swallowing(obj, *, copy=None):
    failed = False
    try:
        return good(obj, copy=copy)
    except Exception:
        failed = True
    assert failed
    raise RuntimeError("something went wrong")


def _credulous(obj, *, copy=None):
    """Accept everything."""
    try:
        return good(obj, copy=copy)
    except Exception:
        return dlx.empty((4, 6), "float32")


def _hostward(obj, *, copy=None):
    taken = _read(obj)
    taken.managed.dl_tensor.device.device_type = 1
    return good(taken.capsule)


def _owning(release):
    """Return a consumer with its own bookkeeping: ``release(taken)`` handles the owner."""

    def take(obj, *, copy=None):
        if not hasattr(obj, "__dlpack__") and "dltensor" not in repr(obj):
            return good(obj)
        taken = _read(obj)
        taken.consume()
        keep = release(taken)
        return dlx.from_pointer(taken.address, taken.shape, taken.dtype, strides=taken.strides, owner=keep)

    return take


def _early(taken):
    taken.delete()
    return taken


def _twice(taken):
    return _Release(taken, 2)


class _Release:
    def __init__(self, taken, times):
        self.taken, self.times = taken, times

    def __del__(self):
        for _ in range(self.times):
            self.taken.delete()


def _unrenamed(obj, *, copy=None):
    taken = _read(obj)
    return dlx.from_pointer(taken.address, taken.shape, taken.dtype, strides=taken.strides, owner=taken)


def _unowned_view(t):
    return dlx.from_pointer(t.data_ptr + 24, (6,), t.dtype)


def _dies_of_null(obj, *, copy=None):
    if _read(obj).managed.deleter == ffi.NULL:
        os.abort()
    return good(obj)


def _takes_and_raises(obj, *, copy=None):
    taken = _read(obj)
    if taken.dtype.code == 99:
        taken.consume()
        raise ValueError("no such dtype")
    return good(taken.capsule)


def _keeping(obj, *, copy=None):
    KEPT.append(good(obj, copy=True))
    return KEPT[-1]


def _one_at_a_time(obj, *, copy=None):
    if BUSY:
        raise RuntimeError("busy")
    BUSY.append(obj)
    try:
        time.sleep(0.0001)
        return good(obj, copy=copy)
    finally:
        BUSY.clear()


class _EndsBadly:
    """An array that ends the process if it is released too late."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __del__(self):
        if sys.is_finalizing() or not threading.main_thread().is_alive():
            os._exit(3)


LAYOUTS = ("transposed", "negative", "zero", "gaps", "overlapping", "size-1", "empty", "scalar")
CONSUMERS = {
    "import-dtypes": consumer(then(lambda t: tensor_view(t, (1, 8, 1), None, None, None) if t.dtype.bits == 8 else t)),
    "import-dtypes/bits": consumer(then(_shifted)),
    "import-narrowing": consumer(then(_narrowed), dtypes=("float32", "uint8")),
    **{f"import-{name}": consumer(then(_shifted), dtypes=("float32",)) for name in LAYOUTS},
    "import-null-strides": consumer(_no_null_strides),
    "import-offset": consumer(_no_offset),
    "import-alignment": consumer(_refusing(lambda t: t.data_ptr % 64)),
    "import-misaligned": consumer(then(_shifted)),
    "import-copy-true": consumer(lambda obj, copy=None: good(obj)),
    "import-copy-false": consumer(lambda obj, copy=None: good(obj, copy=True if copy is False else copy)),
    "import-readonly": consumer(then(lambda t: tensor_view(t, None, None, t.flags & ~1, None))),
    "import-legacy-writable": consumer(then(_readonly)),
    "asks-for-version": consumer(_calling()),
    "asks-without-stream": consumer(_calling(max_version=(1, 0), stream=-1)),
    "old-producer": consumer(_calling(max_version=(1, 0))),
    "legacy-producer": consumer(_no_legacy),
    "newer-minor": consumer(_no_newer),
    "asked-once": consumer(_four_times),
    "errors-shown": consumer(_swallowing),
    "not-a-capsule": consumer(_credulous),
    "no-producer": consumer(_credulous),
    "other-major": consumer(_credulous),
    "wrong-name": consumer(_credulous),
    "used-capsule": consumer(_credulous),
    "null-data": consumer(_credulous),
    "negative-extent": consumer(_credulous),
    "overflow": consumer(_credulous),
    "other-device": consumer(_hostward),
    "refusal-releases": consumer(_takes_and_raises),
    "deleter-once/early": consumer(_owning(_early)),
    "deleter-once/never": consumer(_owning(lambda taken: taken)),
    "deleter-once/twice": consumer(_owning(_twice)),
    "deleter-once/unrenamed": consumer(_unrenamed),
    "view-keeps": consumer(good, views={"one row": _unowned_view}),
    "null-deleter": consumer(_dies_of_null),
    "import-leaks": consumer(_keeping),
    "import-leaks/never": consumer(_owning(lambda taken: taken)),
    "race-for-one": consumer(_unrenamed),
    "import-threads": consumer(_one_at_a_time),
    "end-holding": consumer(lambda obj, copy=None: _EndsBadly(good(obj))),
}


def _dies(obj, *, copy=None):
    if isinstance(obj, Source) and obj.version == (1, 99):
        os.abort()
    return good(obj, copy=copy)


def _hangs(obj, *, copy=None):
    time.sleep(60)


MORE = {"dies": consumer(_dies), "hangs": consumer(_hangs)}
PLANTED = {**PRODUCERS, **CONSUMERS}


def __getattr__(name):
    """Return ``subject_<fault>`` for a fresh process."""
    fault = name.removeprefix("subject_")
    spec = f"support.kit.libraries:{name}"
    if name == "subject_good":
        return replace(producer(), from_dlpack=_taken, takes_capsules=True, takes_copy=True, spec=spec)
    if name.startswith("subject_") and fault in PLANTED | MORE:
        return replace((PLANTED | MORE)[fault], spec=spec)
    raise AttributeError(name)


assert set(VIEWS) == set(GOOD.views)
