"""`from_managed`: structs from C; who calls the deleter, once, and refusals that leave the struct unchanged."""

import ctypes

import cffi
import pytest

import dlx
from dlx._core.native import ffi, live
from dlx.errors import DTypeError, LayoutError, ProtocolError

other = cffi.FFI()  # not dlx's FFI
other.cdef("""
    typedef struct DLManagedTensor DLManagedTensor;
    typedef struct { int64_t first[10]; } DLManagedTensorVersioned;
    typedef struct { int x; } something;
""")
IS_COPIED = 2


def typed(address, legacy, library):
    """Return a typed pointer to a managed tensor, of dlx's FFI, of another, or of ctypes."""
    name = "DLManagedTensor" if legacy else "DLManagedTensorVersioned"
    if library == "ctypes":
        return ctypes.cast(address, ctypes.POINTER(getattr(dlx.ctypes, name)))
    return (ffi if library == "dlx" else other).cast(f"{name} *", address)


MANAGED = {
    "int": lambda address, legacy: address,
    "void": lambda address, legacy: other.cast("void *", address),
    "c_void_p": lambda address, legacy: ctypes.c_void_p(address),
    "dlx.ffi": lambda address, legacy: typed(address, legacy, "dlx"),
    "other FFI": lambda address, legacy: typed(address, legacy, "other"),
    "ctypes": lambda address, legacy: typed(address, legacy, "ctypes"),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
@pytest.mark.parametrize("kind", MANAGED)
def test_a_managed_tensor_is_taken(counting, kind, legacy):
    """Every kind of pointer to either struct is accepted, and the deleter runs once, after the last use."""
    before = counting.deleted
    address = counting.managed((2, 3), (1, 2), legacy=legacy)
    tensor = dlx.from_managed(MANAGED[kind](address, legacy), legacy=legacy)
    assert (tensor.shape, tensor.strides, str(tensor.dtype)) == ((2, 3), (1, 2), "float32")
    capsule = dlx.to_capsule(tensor)
    del tensor
    assert counting.deleted == before
    del capsule
    assert counting.deleted == before + 1


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
def test_a_borrowed_managed_tensor_stays_the_callers(counting, legacy):
    """With borrow=True the caller calls the deleter, not dlx."""
    before = counting.deleted
    address = counting.managed((2, 3), legacy=legacy)
    tensor = dlx.from_managed(address, legacy=legacy, borrow=True)
    assert tensor.shape == (2, 3)
    del tensor
    assert counting.deleted == before
    counting.delete(address, legacy=legacy)
    assert counting.deleted == before + 1


@pytest.mark.parametrize("thread", [False, True], ids=["here", "foreign-thread"])
def test_the_deleter_runs_where_the_consumer_releases(counting, thread):
    """A consumer's deleter, without the GIL and on any thread, runs the foreign one once."""
    before = counting.deleted
    address = counting.consume(dlx.to_capsule(dlx.from_managed(counting.managed()), max_version=(1, 0)))
    assert counting.deleted == before
    counting.delete(address, thread=thread)
    assert counting.deleted == before + 1


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
def test_no_deleter_is_fine(counting, legacy):
    """A struct without a deleter is accepted."""
    before = counting.deleted
    address = counting.managed(legacy=legacy, null_deleter=True)
    tensor = dlx.from_managed(address, legacy=legacy)
    assert tensor.shape == (2, 3)
    del tensor
    assert counting.deleted == before


@pytest.mark.parametrize("borrow", [False, True], ids=["take", "borrow"])
def test_a_struct_inside_a_cdata_lives_until_its_deleter_has_run(borrow):
    """A struct that the cdata owns (`ffi.new`) is not freed before its deleter has run."""
    events = []
    shape, memory = ffi.new("int64_t[]", [4]), ffi.new("float[4]")
    deleter = ffi.callback("void(DLManagedTensor *)", lambda _: events.append("deleter"))
    tensor = {"data": memory, "device": (1, 0), "ndim": 1, "dtype": (2, 32, 1), "shape": shape}
    struct = ffi.gc(
        ffi.new("DLManagedTensor *", {"dl_tensor": tensor, "deleter": deleter}), lambda _: events.append("gone")
    )
    tensor = dlx.from_managed(struct, legacy=True, borrow=borrow)
    del struct
    assert events == []
    del tensor
    assert events == (["gone"] if borrow else ["deleter", "gone"])


def test_the_struct_is_not_read_after_it_was_taken(counting):
    """Shape and strides are copied: later writes of the producer change nothing."""
    address = counting.managed((2, 3), (3, 1))
    tensor = dlx.from_managed(address)
    struct = ffi.cast("DLManagedTensorVersioned *", address)
    struct.dl_tensor.shape[0] = struct.dl_tensor.strides[0] = struct.dl_tensor.ndim = 99
    assert (tensor.shape, tensor.strides) == ((2, 3), (3, 1))


def test_flags_of_the_struct_are_kept_but_copied(counting):
    """Read-only is preserved; IS_COPIED is dropped."""
    tensor = dlx.from_managed(counting.managed(flags=1 | IS_COPIED))
    assert tensor.readonly
    assert tensor.flags == 1


BROKEN = {
    "major 2": ({"version": (2, 0)}, ProtocolError, "DLPack 2.0, dlx reads 1.x"),
    "major 0": ({"version": (0, 8)}, ProtocolError, r"or pass legacy=True"),
    "rank": ({"ndim": 200}, LayoutError, "dimensions"),
    "negative rank": ({"ndim": -1}, LayoutError, "dimensions"),
    "no shape": ({"shape": None, "ndim": 2}, ProtocolError, "shape is missing"),
    "negative extent": ({"shape": (-1,)}, ProtocolError, "negative extent"),
    "no bits": ({"dtype": (2, 0, 1)}, DTypeError, "no bits"),
    "overflow": ({"shape": (1 << 40, 1 << 40)}, LayoutError, "63 bits"),
    "null data": ({"null_data": True}, LayoutError, "null data"),
}


@pytest.mark.parametrize("borrow", [False, True], ids=["take", "borrow"])
@pytest.mark.parametrize(
    ("fault", "legacy"),
    [(fault, legacy) for fault in BROKEN for legacy in (False, True) if not (legacy and fault.startswith("major"))],
)
def test_a_refused_struct_is_untouched(counting, fault, legacy, borrow):
    """A refused struct keeps every byte, and the caller must delete it."""
    keywords, error, message = BROKEN[fault]
    keywords = {"shape": (2, 3), **keywords}
    before, counted = counting.deleted, live()
    address = counting.managed(keywords.pop("shape"), legacy=legacy, **keywords)
    size = ffi.sizeof("DLManagedTensor" if legacy else "DLManagedTensorVersioned")
    found = bytes(ffi.buffer(ffi.cast("char *", address), size))
    with pytest.raises(error, match=message):
        dlx.from_managed(address, legacy=legacy, borrow=borrow)
    assert bytes(ffi.buffer(ffi.cast("char *", address), size)) == found
    assert (counting.deleted, live()) == (before, counted)
    counting.delete(address, legacy=legacy)
    assert counting.deleted == before + 1


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
@pytest.mark.parametrize("library", ["dlx", "other", "ctypes"])
def test_a_typed_pointer_must_agree(counting, library, legacy):
    """A pointer to the other struct is refused before it is read, and the fix names the parameter."""
    before, address = counting.deleted, counting.managed(legacy=legacy)
    with pytest.raises(TypeError, match=f"Pass legacy={legacy}"):
        dlx.from_managed(typed(address, legacy, library), legacy=not legacy)
    counting.delete(address, legacy=legacy)
    assert counting.deleted == before + 1


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
def test_the_wrong_struct_is_noticed_by_its_numbers(counting, legacy):
    """An int has no type; the fields of one struct are invalid as the other."""
    before, address = counting.deleted, counting.managed(legacy=legacy)
    with pytest.raises(dlx.errors.ConversionError, match=f"pass legacy={legacy}"):
        dlx.from_managed(address, legacy=not legacy)
    counting.delete(address, legacy=legacy)
    assert counting.deleted == before + 1


@pytest.mark.parametrize(
    ("ptr", "error", "message"),
    [
        (0, ProtocolError, "DLManagedTensorVersioned \\* is NULL"),
        (None, ProtocolError, "NULL"),
        (ffi.NULL, ProtocolError, "NULL"),
        (ctypes.c_void_p(), ProtocolError, "NULL"),
        (0x10004, ProtocolError, "0x10004, which is not a multiple of 8"),
        (ffi.new("DLTensor *"), TypeError, "found a pointer to 'DLTensor'"),
        (ffi.new("DLManagedTensorVersioned **"), TypeError, r"pointer to 'DLManagedTensorVersioned \*'"),
        (other.new("something *"), TypeError, "found a pointer to 'something'"),
        (ctypes.pointer(dlx.ctypes.DLTensor()), TypeError, "found a pointer to 'DLTensor'"),
        (ffi.new("DLManagedTensorVersioned *")[0], TypeError, r"Pass ffi\.addressof"),
        (dlx.ctypes.DLManagedTensorVersioned(), TypeError, r"Pass ctypes\.pointer"),
        (b"capsule", TypeError, "found bytes"),
    ],
)
def test_what_is_no_pointer_to_a_managed_tensor_is_refused(ptr, error, message):
    """Other arguments are refused without being read."""
    with pytest.raises(error, match=message):
        dlx.from_managed(ptr)


def test_a_capsule_is_no_pointer(counting):
    """A capsule is refused unchanged; it belongs to from_dlpack."""
    capsule = counting.capsule()
    with pytest.raises(TypeError, match=r"dlx\.from_dlpack"):
        dlx.from_managed(capsule)
    assert counting.name(capsule) == "dltensor_versioned"


def test_a_managed_tensor_reaches_numpy_and_torch(counting, np, torch):
    """A struct from C becomes an array of either framework, over the same memory."""
    tensor = dlx.from_managed(counting.managed((4,)))
    dlx.convert(tensor, to="torch")[:] = 3
    assert dlx.convert(tensor, to="numpy").tolist() == [3, 3, 3, 3]
