"""The four states of a capsule: claimed in one step, refused unchanged, freed exactly once on every path."""

import ctypes
import gc
import sys
import weakref

import pytest
from support.arrays.reference import FLOAT32, INT4, INT8, READ_ONLY

from dlx import errors
from dlx._core import native
from dlx._core.native import lib

NAMES = {False: "dltensor_versioned", True: "dltensor"}
STATES = {False: "versioned", True: "legacy"}
generations = pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
threads = pytest.mark.parametrize("thread", [False, True], ids=["here", "foreign-thread"])


class Owner:
    """A Python object that owns 64 bytes, and can fail when it is destroyed."""

    def __init__(self, *, fails=False):
        self.memory = bytearray(range(64))
        self.fails = fails

    def __del__(self):
        if self.fails:
            raise RuntimeError("the owner failed")

    def tensor(self, shape=(2, 3), strides=None, dtype=FLOAT32, flags=0):
        """Return a dlx.Tensor over the memory, owned by this object."""
        address = native.buffer_address(memoryview(self.memory))
        return native.tensor_new(address, shape, strides, dtype, (1, 0), flags, self)


class Producer:
    """An object whose __dlpack__ always returns a capsule of a dlx.Tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_):
        return self.tensor.__dlpack__(max_version=(1, 0))

    def __dlpack_device__(self):
        return (1, 0)


def odd_capsule(name):
    """Return a capsule that is not DLPack's."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(1, name, None)


@pytest.fixture
def unraisable(monkeypatch):
    """Return the exceptions passed to sys.unraisablehook."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: found.append(args.exc_type))
    return found


# ---- states ----------------------------------------------------------------------------------------------------------


@generations
def test_a_claim_takes_the_tensor_and_the_name(counting, legacy):
    """A claim returns a tensor with the capsule's metadata, renames the capsule, and takes over the deleter."""
    capsule, before = counting.capsule((2, 3), (1, 2), legacy=legacy), counting.deleted
    assert native.capsule_state(capsule) == STATES[legacy]
    tensor = native.capsule_claim(capsule)
    assert native.capsule_state(capsule) == "used"
    assert counting.name(capsule) == f"used_{NAMES[legacy]}"
    assert (tensor.shape, tensor.strides, tensor.dtype, tensor.device) == ((2, 3), (1, 2), FLOAT32, (1, 0))
    del capsule
    assert counting.deleted == before
    del tensor
    assert counting.deleted == before + 1


@generations
def test_the_used_capsule_may_outlive_the_tensor(counting, legacy):
    """A used capsule that outlives the tensor deletes nothing a second time."""
    capsule, before = counting.capsule(legacy=legacy), counting.deleted
    native.capsule_claim(capsule)
    assert counting.deleted == before + 1
    del capsule
    assert counting.deleted == before + 1


@generations
def test_a_capsule_is_used_once(counting, legacy):
    """A second claim or peek is a ConsumedError and changes nothing."""
    capsule = counting.capsule(legacy=legacy)
    tensor = native.capsule_claim(capsule)
    for again in (native.capsule_claim, native.capsule_peek):
        with pytest.raises(errors.ConsumedError):
            again(capsule)
    assert counting.name(capsule) == f"used_{NAMES[legacy]}"
    assert tensor.shape == (2, 3)


@generations
def test_a_capsule_used_by_others_is_used(counting, legacy):
    """A capsule that another consumer renamed counts as used."""
    capsule = counting.capsule(legacy=legacy)
    address = counting.consume(capsule, legacy=legacy)
    assert native.capsule_state(capsule) == "used"
    with pytest.raises(errors.ConsumedError):
        native.capsule_claim(capsule)
    counting.delete(address, legacy=legacy)


ODD = [b"arrow_array", b"dltensor_version", b"dltensor_versioned2", b"DLTENSOR", b"", b"used", None, b"\xff\xfe"]


@pytest.mark.parametrize("name", ODD)
def test_other_capsules_are_refused(name):
    """A capsule with any other name is a ProtocolError but not a ConsumedError."""
    capsule = odd_capsule(name)
    assert native.capsule_state(capsule) is None
    for read in (native.capsule_claim, native.capsule_peek):
        with pytest.raises(errors.ProtocolError, match="not a DLPack capsule") as caught:
            read(capsule)
        assert type(caught.value) is errors.ProtocolError


@pytest.mark.parametrize("thing", [None, 1, "dltensor", b"dltensor", object(), [], type])
def test_what_is_no_capsule_is_refused(thing):
    """Other objects are a ProtocolError that names their type."""
    assert native.capsule_state(thing) is None
    for read in (native.capsule_claim, native.capsule_peek):
        with pytest.raises(errors.ProtocolError, match=type(thing).__name__):
            read(thing)


# ---- refusals --------------------------------------------------------------------------------------------------------

BOTH = [
    ("null data", {"null_data": True}, errors.LayoutError),
    ("negative shape", {"shape": (2, -3)}, errors.ProtocolError),
    ("negative shape beside zero", {"shape": (0, -3)}, errors.ProtocolError),
    ("129 dims", {"ndim": 129}, errors.LayoutError),
    ("negative ndim", {"ndim": -1}, errors.LayoutError),
    ("no shape", {"shape": (), "ndim": 9}, errors.ProtocolError),
    ("no bits", {"dtype": (2, 0, 1)}, errors.DTypeError),
    ("no lanes", {"dtype": (2, 32, 0)}, errors.DTypeError),
    ("overflow", {"shape": (2**62, 8)}, errors.LayoutError),
    ("stride overflow", {"strides": (2**62, 2**62)}, errors.LayoutError),
    ("offset overflow", {"byte_offset": 2**63}, errors.LayoutError),
]
VERSIONED = [
    ("major 0", {"version": (0, 9)}, errors.ProtocolError),
    ("major 2", {"version": (2, 0)}, errors.ProtocolError),
    ("major 2 and garbage", {"version": (2, 0), "ndim": 1 << 30, "null_data": True}, errors.ProtocolError),
    ("unknown flags", {"dtype": INT4, "flags": 1 << 7}, errors.ProtocolError),
]
REFUSED = [(legacy, *case) for legacy in (False, True) for case in BOTH] + [(False, *case) for case in VERSIONED]


@pytest.mark.parametrize("read", [native.capsule_claim, native.capsule_peek], ids=["claim", "peek"])
@pytest.mark.parametrize(
    ("legacy", "kwargs", "error"), [(c[0], *c[2:]) for c in REFUSED], ids=[f"{STATES[c[0]]} {c[1]}" for c in REFUSED]
)
def test_a_refused_capsule_stays_the_owner(counting, legacy, kwargs, error, read):
    """A refused capsule keeps its name, and its destructor frees its memory once."""
    capsule, before = counting.capsule(legacy=legacy, **kwargs), counting.deleted
    with pytest.raises(error) as caught:
        read(capsule)
    assert type(caught.value) is error
    del caught
    assert counting.name(capsule) == NAMES[legacy]
    assert counting.deleted == before
    del capsule
    assert counting.deleted == before + 1


@pytest.mark.parametrize("version", [(2, 5), (0, 8)])
def test_a_refused_version_is_named(counting, version):
    """The message contains the version."""
    with pytest.raises(errors.ProtocolError, match="{}.{}".format(*version)):
        native.capsule_claim(counting.capsule(version=version))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"version": (1, 99)},
        {"flags": 1 << 7},
        {"flags": READ_ONLY},
        {"shape": (0, 3), "null_data": True},
        {"shape": (), "strides": None},
        {"dtype": (99, 32, 1)},
        {"device": (77, 5)},
        {"dtype": INT4},
    ],
    ids=str,
)
def test_what_is_odd_but_clear_is_claimed(counting, kwargs):
    """A newer minor version, unknown flags on whole bytes, unknown codes and empty tensors are accepted."""
    before = counting.deleted
    tensor = native.capsule_claim(counting.capsule(**kwargs))
    assert tensor.shape == kwargs.get("shape", (2, 3))
    assert tensor.flags == kwargs.get("flags", 0)
    del tensor
    assert counting.deleted == before + 1


# ---- looking, and giving back ----------------------------------------------------------------------------------------


@generations
def test_a_look_does_not_consume(counting, legacy):
    """A peek returns the metadata and leaves the capsule fresh, so that it can be claimed."""
    capsule, before = counting.capsule((4,), legacy=legacy, byte_offset=8), counting.deleted
    seen = native.capsule_peek(capsule)
    assert (seen.shape, native.capsule_state(capsule)) == ((4,), STATES[legacy])
    claimed = native.capsule_claim(capsule)
    assert claimed.data_ptr == seen.data_ptr
    del seen, capsule
    assert counting.deleted == before
    del claimed
    assert counting.deleted == before + 1


@generations
def test_a_look_keeps_the_capsule_alive(counting, legacy):
    """Peeked data stays valid: it keeps the capsule alive."""
    before = counting.deleted
    seen = native.capsule_peek(counting.capsule(legacy=legacy))
    gc.collect()
    assert counting.deleted == before
    del seen
    assert counting.deleted == before + 1


@generations
def test_restore_gives_back_name_and_duty(counting, legacy):
    """A restored capsule is fresh again, can be claimed, and owns the deleter."""
    capsule, before = counting.capsule(legacy=legacy), counting.deleted
    tensor = native.capsule_claim(capsule)
    assert native.capsule_restore(capsule, tensor) is True
    assert counting.name(capsule) == NAMES[legacy]
    del tensor
    assert counting.deleted == before
    again = native.capsule_claim(capsule)
    del capsule
    assert counting.deleted == before
    del again
    assert counting.deleted == before + 1


@generations
def test_a_restored_capsule_deletes_by_itself(counting, legacy):
    """A restored capsule that is not claimed again frees its tensor once."""
    capsule, before = counting.capsule(legacy=legacy), counting.deleted
    native.capsule_restore(capsule, native.capsule_claim(capsule))
    assert counting.deleted == before
    del capsule
    assert counting.deleted == before + 1


SHARERS = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: native.tensor_view(tensor, None, None, None, None),
    "capsule": lambda tensor: tensor.__dlpack__(max_version=(1, 0)),
    "buffer": memoryview,
}


@generations
@pytest.mark.parametrize("share", SHARERS)
def test_what_shares_the_memory_outlives_a_restore(counting, legacy, share):
    """Users of the memory continue after a restore, and the last one frees it."""
    capsule, before = counting.capsule(legacy=legacy), counting.deleted
    tensor = native.capsule_claim(capsule)
    sharer = SHARERS[share](tensor)
    assert native.capsule_restore(capsule, tensor) is True
    assert tensor.shape == (2, 3)
    again = native.capsule_claim(capsule)
    assert (again.shape, again.strides, again.data_ptr) == (tensor.shape, tensor.strides, tensor.data_ptr)
    del capsule, tensor, again
    assert counting.deleted == before
    del sharer
    assert counting.deleted == before + 1


@generations
def test_a_capsule_is_restored_again_and_again(counting, legacy):
    """Each claim can be undone, and the capsule frees its tensor once."""
    capsule, before, live = counting.capsule(legacy=legacy), counting.deleted, native.live()
    for _ in range(200):
        assert native.capsule_restore(capsule, native.capsule_claim(capsule)) is True
    assert (counting.deleted, native.live()) == (before, live + 1)
    del capsule
    assert (counting.deleted, native.live()) == (before + 1, live)


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
def test_a_restored_capsule_runs_its_own_destructor_once(python, legacy):
    """The producer's destructor sees a used capsule, as after any consumer, and never dlx's pointer."""
    python(f"""
        import ctypes
        import dlx
        from dlx._core import native
        api = ctypes.pythonapi
        kind = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
        api.PyCapsule_SetDestructor.argtypes = [ctypes.py_object, kind]
        api.PyCapsule_GetName.argtypes, api.PyCapsule_GetName.restype = [ctypes.c_void_p], ctypes.c_char_p
        seen = []
        destructor = kind(lambda capsule: seen.append(api.PyCapsule_GetName(capsule)))
        memory = bytearray(b"abcd")
        capsule = dlx.from_dlpack(memory).__dlpack__(max_version={None if legacy else (1, 0)})
        api.PyCapsule_SetDestructor(capsule, destructor)
        tensor = native.capsule_claim(capsule)
        assert native.capsule_restore(capsule, tensor) and len(seen) == 1 and seen[0].startswith(b"used_dltensor")
        del capsule
        assert len(seen) == 1 and bytes(tensor) == b"abcd"
        del tensor
        memory.append(0)  # nothing holds it
        assert native.live() == 0
    """)


@pytest.mark.parametrize("claims", [False, True], ids=["restores", "claims"])
@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
def test_a_destructor_that_restores_the_capsule_itself(python, legacy, claims):
    """A capsule gets one count on the tensor, also with a restore and a claim inside its destructor."""
    state = "used" if claims else "legacy" if legacy else "versioned"
    python(f"""
        import ctypes
        import dlx
        from dlx._core import native
        kind = ctypes.PYFUNCTYPE(None, ctypes.py_object)
        ctypes.pythonapi.PyCapsule_SetDestructor.argtypes = [ctypes.py_object, kind]
        restored = []

        def restore(capsule):
            restored.append(native.capsule_restore(capsule, tensor))
            if {claims}:
                restored.append(native.capsule_claim(capsule))

        destructor = kind(restore)
        capsule = dlx.from_dlpack(bytearray(b"abcd")).__dlpack__(max_version={None if legacy else (1, 0)})
        ctypes.pythonapi.PyCapsule_SetDestructor(capsule, destructor)
        tensor = native.capsule_claim(capsule)
        assert native.capsule_restore(capsule, tensor) is False and restored[0] is True
        assert native.capsule_state(capsule) == {state!r}
        if {claims}:
            assert bytes(restored[1]) == b"abcd"
        restored.clear()
        del capsule, tensor
        assert native.live() == 0, native.live()
    """)


def test_what_cannot_be_restored_for_lack_of_memory(counting):
    """Without memory for the legacy struct, the capsule stays used and owned by the tensor."""
    capsule, before = counting.capsule(legacy=True), counting.deleted
    tensor = native.capsule_claim(capsule)
    lib.dlx_fail_allocation(1)
    assert native.capsule_restore(capsule, tensor) is False
    assert lib.dlx_fail_allocation(0) == 0
    assert native.capsule_state(capsule) == "used"
    del tensor
    assert counting.deleted == before + 1


@pytest.mark.parametrize("other", ["fresh", "odd", "none"])
def test_restore_wants_the_used_capsule(counting, other):
    """Only a used capsule can be restored."""
    tensor = native.capsule_claim(counting.capsule())
    capsule = {"fresh": counting.capsule(), "odd": odd_capsule(b"x"), "none": None}[other]
    assert native.capsule_restore(capsule, tensor) is False
    assert tensor.shape == (2, 3)


def test_restore_wants_the_tensor_of_that_capsule(python):
    """A used capsule refuses another capsule's tensor: two owners would free the memory twice."""
    python("""
        from dlx._core import native
        memory = bytearray(64)
        whole = native.tensor_new(native.buffer_address(memoryview(memory)), (4,), None, (2, 32, 1), (1, 0), 0, memory)
        capsules = [whole.__dlpack__(max_version=(1, 0)) for _ in range(2)]
        tensors = [native.capsule_claim(capsule) for capsule in capsules]
        restored = native.capsule_restore(capsules[0], tensors[1])
        state = native.capsule_state(capsules[0])
        if restored:
            import os
            os._exit(3)
        assert state == "used"
    """)


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3), (None, None), (None, "tensor")])
def test_restore_wants_a_capsule_and_a_tensor(arguments):
    """A wrong argument is a TypeError."""
    with pytest.raises(TypeError):
        native.capsule_restore(*arguments)


# ---- capsules that dlx makes -----------------------------------------------------------------------------------------


def max_version(legacy):
    """Return the max_version that requests a generation."""
    return None if legacy else (1, 0)


@generations
def test_our_names_are_exact(counting, legacy):
    """The capsules of dlx have exactly DLPack's names, and are fresh."""
    capsule = Owner().tensor().__dlpack__(max_version=max_version(legacy))
    assert counting.name(capsule) == NAMES[legacy]
    assert native.capsule_state(capsule) == STATES[legacy]


@generations
def test_our_unconsumed_capsules_free_once(counting, legacy):
    """An unconsumed capsule releases the memory at its end, before or after the tensor."""
    for capsule_first in (False, True):
        before = counting.deleted
        held = [native.capsule_claim(counting.capsule())]
        held.append(held[0].__dlpack__(max_version=max_version(legacy)))
        del held[capsule_first]
        assert counting.deleted == before
        held.clear()
        assert counting.deleted == before + 1


@generations
@threads
def test_our_consumed_capsules_are_freed_by_the_consumer(counting, legacy, thread):
    """A consumed capsule frees nothing; the consumer's call of the deleter does, once, on any thread."""
    before = counting.deleted
    tensor = native.capsule_claim(counting.capsule())
    capsule = tensor.__dlpack__(max_version=max_version(legacy))
    address = counting.consume(capsule, legacy=legacy)
    del capsule, tensor
    gc.collect()
    assert counting.deleted == before
    counting.delete(address, legacy=legacy, thread=thread)
    assert counting.deleted == before + 1


@generations
@threads
def test_python_owners_are_released(counting, legacy, thread):
    """A deleter without the GIL, on any thread, releases a Python owner once."""
    owner = Owner()
    references, gone = sys.getrefcount(owner), weakref.ref(owner)
    tensor = owner.tensor()
    assert sys.getrefcount(owner) == references + 1
    address = counting.consume(tensor.__dlpack__(max_version=max_version(legacy)), legacy=legacy)
    del tensor
    assert sys.getrefcount(owner) == references + 1
    counting.delete(address, legacy=legacy, thread=thread)
    assert sys.getrefcount(owner) == references
    del owner
    assert gone() is None


@generations
@threads
def test_the_last_owner_goes_with_the_deleter(counting, legacy, thread):
    """If the tensor has the only reference, the deleter runs the owner's finaliser."""
    owner = Owner()
    gone = weakref.ref(owner)
    address = counting.consume(owner.tensor().__dlpack__(max_version=max_version(legacy)), legacy=legacy)
    del owner
    gc.collect()
    assert gone() is not None
    counting.delete(address, legacy=legacy, thread=thread)
    assert gone() is None


@generations
def test_many_capsules_share_one_owner(legacy):
    """The last of many capsules, claimed again and again, releases the memory."""
    owner = Owner()
    gone, held = weakref.ref(owner), [owner.tensor()]
    del owner
    for _ in range(20):
        held.append(native.capsule_claim(held[-1].__dlpack__(max_version=max_version(legacy))))
    while held:
        assert gone() is not None
        held.pop(len(held) // 2)
    assert gone() is None


# ---- a pending exception ---------------------------------------------------------------------------------------------


@generations
@pytest.mark.parametrize("what", ["capsule", "tensor", "foreign capsule", "claimed"])
def test_a_pending_exception_survives(counting, legacy, what):
    """A pending error survives the release of a capsule or tensor."""
    before = counting.deleted
    held = [counting.capsule(legacy=legacy)]
    if what != "foreign capsule":
        held = [native.capsule_claim(held[0])]
    if what == "capsule":
        held = [held[0].__dlpack__(max_version=max_version(legacy))]
    with pytest.raises(KeyError, match="pending"):
        counting.clear_with_error(held)
    assert (held, counting.deleted) == ([], before + 1)


@generations
@pytest.mark.parametrize("what", ["capsule", "tensor"])
def test_a_pending_exception_survives_an_owner_that_fails(counting, legacy, what, unraisable):
    """The owner's exception goes to sys.unraisablehook and does not replace the pending one."""
    held = [Owner(fails=True).tensor()]
    if what == "capsule":
        held = [held[0].__dlpack__(max_version=max_version(legacy))]
    with pytest.raises(KeyError, match="pending"):
        counting.clear_with_error(held)
    assert unraisable == [RuntimeError]


@generations
@threads
def test_an_owner_that_fails_does_not_escape_the_deleter(counting, legacy, thread, unraisable):
    """Without a pending exception, too, a failing owner is reported and nothing is raised."""
    address = counting.consume(Owner(fails=True).tensor().__dlpack__(max_version=max_version(legacy)), legacy=legacy)
    counting.delete(address, legacy=legacy, thread=thread)
    assert unraisable == [RuntimeError]


@pytest.mark.numpy("2.2.5")
@pytest.mark.parametrize("fails", [False, True])
def test_numpys_refusal_survives_our_destructor(np, unraisable, fails):
    """Numpy sets its error and then drops dlx's capsule: the error arrives, and the owner is released."""
    owner = Owner(fails=fails)
    gone = weakref.ref(owner)
    producer = Producer(owner.tensor((4,), None, (0, 4, 1)))
    del owner
    with pytest.raises((RuntimeError, BufferError), match=r"(?i)dtype|data type"):
        np.from_dlpack(producer)
    assert gone() is not None
    del producer
    assert gone() is None
    assert unraisable == [RuntimeError] * fails


@pytest.mark.numpy("2.2.5")
@pytest.mark.parametrize("fails", [False, True])
def test_numpys_refusal_of_the_last_reference(np, unraisable, fails):
    """The same if numpy's capsule has the last reference to the memory."""
    producer = Producer(Owner(fails=fails).tensor((4,), None, (0, 4, 1)))
    whole, producer.tensor = producer.tensor, None
    capsules = [whole.__dlpack__(max_version=(1, 0))]
    del whole
    producer.__class__ = type("Once", (Producer,), {"__dlpack__": lambda self, **_: capsules.pop()})
    with pytest.raises((RuntimeError, BufferError), match=r"(?i)dtype|data type"):
        np.from_dlpack(producer)
    assert capsules == []
    assert unraisable == [RuntimeError] * fails


def test_bytes_are_where_the_tensor_says():
    """The address of a claimed tensor includes the producer's byte offset."""
    owner = Owner()
    address = native.buffer_address(memoryview(owner.memory))
    view = native.tensor_new(address + 8, (4,), (-2,), INT8, (1, 0), 0, owner)
    claimed = native.capsule_claim(view.__dlpack__(max_version=(1, 0)))
    assert (claimed.data_ptr, claimed.strides) == (address + 8, (-2,))
    assert [ctypes.c_uint8.from_address(claimed.data_ptr - 2 * i).value for i in range(4)] == [8, 6, 4, 2]
