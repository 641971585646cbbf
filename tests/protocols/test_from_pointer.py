"""`from_pointer`: memory at an address; who frees it, once, and refusals that leave it unchanged."""

import array
import ctypes
import sys
import threading
import weakref

import cffi
import pytest
from support.project import FREE_THREADED, TESTS

import dlx
from dlx._core.native import ffi, live
from dlx.errors import DeviceError, DTypeError, LayoutError

other = cffi.FFI()  # not dlx's FFI
other.cdef("""
    typedef struct DLManagedTensor DLManagedTensor;
    typedef struct { int64_t first[10]; } DLManagedTensorVersioned;
    typedef struct { int x; } something;
""")


class Owner(bytearray):
    """Bytes that support weak references."""


def floats(tensor):
    """Return a dlx.Tensor of float32 as a list."""
    return list(ffi.cast("float *", tensor.data_ptr)[0 : tensor.nbytes // 4])


POINTERS = {
    "int": lambda address: address,
    "cdata": lambda address: ffi.cast("float *", address),
    "void": lambda address: ffi.cast("void *", address),
    "other FFI": lambda address: other.cast("float *", address),
    "array": lambda address: other.cast("float (*)[3]", address)[0],
    "ctypes pointer": lambda address: ctypes.cast(address, ctypes.POINTER(ctypes.c_float)),
    "c_void_p": ctypes.c_void_p,
    "ctypes array": (ctypes.c_float * 3).from_address,
    "c_char_p": lambda address: ctypes.cast(address, ctypes.POINTER(ctypes.c_char)),
}


@pytest.mark.parametrize("kind", POINTERS)
def test_every_kind_of_pointer(kind):
    """Each kind of pointer leads to the same memory, without a copy."""
    memory = array.array("f", [1, 2, 3])
    tensor = dlx.from_pointer(POINTERS[kind](memory.buffer_info()[0]), (3,), "float32", owner=memory)
    assert tensor.data_ptr == memory.buffer_info()[0]
    assert floats(tensor) == [1, 2, 3]


def test_everything_that_was_said_is_in_the_tensor():
    """The tensor has the shape, dtype, strides (in elements), device and read-only of the call."""
    memory = (ctypes.c_double * 12)()
    tensor = dlx.from_pointer(
        ctypes.addressof(memory), (2, 3), "float64", strides=(1, 2), device="cuda_host:2", readonly=True, owner=memory
    )
    assert (tensor.shape, tensor.strides, str(tensor.dtype)) == ((2, 3), (1, 2), "float64")
    assert (tensor.device, tensor.readonly) == ((3, 2), True)


def test_negative_strides_count_from_the_pointer(np):
    """The pointer is the address of the first element, also with negative strides."""
    memory = (ctypes.c_int32 * 4)(1, 2, 3, 4)
    last = ctypes.addressof(memory) + 12
    tensor = dlx.from_pointer(last, 4, "int32", strides=(-1,), owner=memory)
    assert dlx.convert(tensor, to="numpy").tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("nothing", [0, None, ffi.NULL, ctypes.c_void_p(), ctypes.POINTER(ctypes.c_int)()])
def test_no_memory_is_refused_where_there_are_elements(nothing):
    """NULL in any form is valid for an empty tensor, and an error otherwise."""
    assert dlx.from_pointer(nothing, (0, 3), "int8").shape == (0, 3)
    with pytest.raises(LayoutError, match=r"int8\[3\] at 0x0 .*null data.*Pass an address"):
        dlx.from_pointer(nothing, (3,), "int8")


@pytest.mark.parametrize(
    "make", [lambda: other.new("float[6]"), lambda: (ctypes.c_float * 6)()], ids=["cffi", "ctypes"]
)
@pytest.mark.parametrize("strides", [(1,), (-1,), (2,)])
def test_an_array_bounds_what_may_be_described(make, strides):
    """If the length of the pointer is known, a shape that exceeds it in either direction is refused."""
    inside = 6 if strides == (1,) else 3 if strides == (2,) else 1
    assert dlx.from_pointer(make(), inside, "float32", strides=strides).shape == (inside,)
    with pytest.raises(LayoutError, match="the array has 24"):
        dlx.from_pointer(make(), inside + 1, "float32", strides=strides)


def test_an_array_of_elements_below_a_byte_is_bounded():
    """Three bytes hold six elements of four bits, not seven."""
    memory = other.new("char[3]")
    assert dlx.from_pointer(memory, 6, "float4_e2m1fn").nbytes == 3
    with pytest.raises(LayoutError, match="the array has 3"):
        dlx.from_pointer(memory, 7, "float4_e2m1fn")


@pytest.mark.parametrize(
    ("ptr", "error", "message"),
    [
        (-8, ValueError, "unsigned"),
        (1 << 64, ValueError, "64-bit"),
        (True, TypeError, "found bool"),
        (1.5, TypeError, "found float"),
        ("memory", TypeError, "found str"),
        (b"memory", TypeError, r"found bytes\. Pass arrays to dlx\.from_dlpack"),
        (ffi.new("DLDevice *")[0], TypeError, r"cdata 'DLDevice'\. Pass ffi\.addressof"),
        (ffi.cast("uintptr_t", 8), TypeError, r"cdata 'uintptr_t'\. Pass int"),
        (ctypes.c_float(1), TypeError, r"by value\. Pass ctypes\.pointer"),
        (dlx.ctypes.DLTensor(), TypeError, r"by value\. Pass ctypes\.pointer"),
        (ctypes.byref(ctypes.c_float(1)), TypeError, "expected a pointer"),
        (ffi.new("float **"), TypeError, r"one to a pointer \('float \*'\)"),
        (ffi.new("void *[2]"), TypeError, r"one to a pointer \('void \*'\)"),
        (ctypes.pointer(ctypes.pointer(ctypes.c_int())), TypeError, r"one to a pointer \('c_int \*'\)"),
        (ctypes.pointer(ctypes.c_void_p()), TypeError, "one to a pointer"),
        (ctypes.c_char_p(b"memory"), TypeError, r"by value\. Pass ctypes\.cast\(it, ctypes\.c_void_p\)"),
        (ctypes.py_object(3), TypeError, r"by value\. Pass it\.value to dlx\.convert"),
        *((ctypes.pointer(kind()), TypeError, "one to a pointer") for kind in (ctypes.c_char_p, ctypes.c_wchar_p)),
        *(((kind * 2)(), TypeError, "one to a pointer") for kind in (ctypes.py_object, ctypes.CFUNCTYPE(None))),
        (ffi.new("DLTensor *"), TypeError, r"found a DLTensor \*\. Pass its data"),
        (ffi.new("DLManagedTensor *"), TypeError, r"Call dlx\.from_managed"),
        (ctypes.pointer(dlx.ctypes.DLManagedTensorVersioned()), TypeError, r"Call dlx\.from_managed"),
    ],
)
def test_what_is_no_pointer_to_data_is_refused(ptr, error, message):
    """Other arguments are a TypeError with a fix."""
    with pytest.raises(error, match=message):
        dlx.from_pointer(ptr, (1,), "int8")


def test_an_index_is_an_extent(np, torch):
    """As in numpy and torch: numbers of theirs are a shape of one dimension, and arrays a shape of several."""
    memory = bytearray(6)
    for extent in (np.int32(6), np.array(6), torch.tensor(6), np.array([6])):
        assert dlx.empty(extent, "int8").shape == (6,)
        assert dlx.from_pointer(ffi.from_buffer(memory), extent, "int8").shape == (6,)
    assert dlx.empty(np.array([2, 3]), "int8").shape == (2, 3)


def test_an_index_is_no_address(np, torch):
    """A 0-d array has `__index__` but is not an address."""
    for number in (np.int64(64), torch.tensor(64)):
        with pytest.raises(TypeError, match=r"Pass arrays to dlx\.from_dlpack"):
            dlx.from_pointer(number, (1,), "int8")


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "error"),
    [
        ((-1,), "int8", {}, ValueError),
        (("a",), "int8", {}, TypeError),
        ((2,), "int8", {"strides": (1, 1)}, ValueError),
        ((2,), "int8", {"strides": (0.5,)}, TypeError),
        ((2,), "int8", {"strides": (1 << 63,)}, ValueError),
        ((1 << 40, 1 << 40), "int8", {}, LayoutError),
        ((2,), "int8", {"strides": (-(1 << 62),)}, LayoutError),
        ((2,), "nothing", {}, DTypeError),
        ((2,), "int8", {"device": "nowhere"}, DeviceError),
        ((2,), "int8", {"release": 7}, TypeError),
    ],
)
def test_a_refused_call_releases_nothing(shape, dtype, options, error):
    """After an error `release` is not called and the owner is dropped: the caller still owns the memory."""
    released, owner = [], Owner(64)
    gone = weakref.ref(owner)
    options = {"release": lambda: released.append(1), "owner": owner, **options}
    with pytest.raises(error):
        dlx.from_pointer(0x10000, shape, dtype, **options)
    assert released == []
    del owner, options
    assert gone() is None


def test_the_owner_lives_as_long_as_the_memory_is_used(np):
    """A view of a view keeps the owner alive, and the last one releases it."""
    owner = Owner(64)
    gone = weakref.ref(owner)
    tensor = dlx.from_pointer(dlx.describe(owner).address, 16, "float32", owner=owner)
    view = dlx.convert(tensor, to="numpy")[2:4]
    del owner, tensor
    assert gone() is not None
    del view
    assert gone() is None


def test_a_pointer_that_owns_its_memory_is_an_owner():
    """A cdata with a destructor lives as long as the tensor, without another reference."""
    freed = []
    memory = other.gc(other.new("float[3]", [1, 2, 3]), lambda _: freed.append(1))
    tensor = dlx.from_pointer(memory, 3, "float32")
    del memory
    assert floats(tensor) == [1, 2, 3]
    assert freed == []
    del tensor
    assert freed == [1]


def test_release_is_called_once_after_the_last_use():
    """`release` and the owner wait for both the tensor and the capsule."""
    released, owner = [], Owner(64)
    gone = weakref.ref(owner)
    tensor = dlx.from_pointer(0x10000, 4, "int8", owner=owner, release=lambda: released.append(gone() is not None))
    capsule = dlx.to_capsule(tensor)
    del tensor, owner
    assert released == []
    del capsule
    assert released == [True]
    assert gone() is None


@pytest.mark.parametrize("thread", [False, True], ids=["here", "foreign-thread"])
def test_release_runs_on_the_thread_that_releases(counting, thread):
    """A deleter without the GIL, here or on a foreign thread, calls `release` on that thread.

    A free-threaded build leaves objects of another thread to that thread when their count is 0.
    """
    where = []
    tensor = dlx.from_pointer(0x10000, 4, "int8", release=lambda: where.append(threading.get_ident()))
    address = counting.consume(dlx.to_capsule(tensor, max_version=(1, 0)))
    del tensor
    assert where == []
    counting.delete(address, thread=thread)
    assert len(where) == 1
    assert (where[0] == threading.get_ident()) is (not thread or FREE_THREADED)


def test_an_exception_in_release_is_unraisable(monkeypatch):
    """An exception in `release` goes to sys.unraisablehook, and the memory counts as released."""
    caught = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: caught.append(found.exc_type))

    def release():
        raise KeyError("in release")

    before = live()
    tensor = dlx.from_pointer(0x10000, 4, "int8", release=release)
    del tensor
    assert caught == [KeyError]
    assert live() == before


def test_release_keeps_a_pending_error(counting):
    """A consumer's pending error survives `release`."""
    released = []
    held = [dlx.to_capsule(dlx.from_pointer(0x10000, 4, "int8", release=lambda: released.append(1)))]
    with pytest.raises(KeyError, match="pending"):
        counting.clear_with_error(held)
    assert released == [1]


@pytest.mark.parametrize(
    "hold",
    [
        "held = tensor",
        "import builtins; builtins.held = tensor",
        "class N: pass\nn = N(); n.n = n; n.t = tensor; del n",
    ],
    ids=["globals", "builtins", "cycle"],
)
def test_release_is_not_called_at_the_end(python, hold):
    """While the interpreter finalizes, `release` is not called, and the exit is silent."""
    code = (
        "import os, dlx\n"
        "tensor = dlx.from_pointer(65536, 4, 'int8', release=lambda write=os.write: write(1, b'released\\n'))\n"
        f"{hold}\ndel tensor\nprint('done', flush=True)\n"
    )
    assert python(code) == "done\n"


def test_release_is_not_called_after_the_end(python, counting):
    """A deleter called from C atexit, on a new thread, does not call `release` and does not crash."""
    code = f"""
import sys, dlx
sys.path.insert(0, {str(TESTS)!r})
from support.foreign.counting import Counting
counting = Counting({counting.path!r})
tensor = dlx.from_pointer(65536, 4, 'int8', release=lambda: print('released', flush=True))
counting.delete_at_exit(elsewhere=counting.consume(dlx.to_capsule(tensor, max_version=(1, 0))))
del tensor
"""
    assert python(code) == "at exit: interpreter 0, deleted 0\n"
