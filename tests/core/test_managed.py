"""Managed tensors: an owner that is released exactly once, copied metadata, aligned memory."""

import itertools
import threading
from pathlib import Path

import pytest
from support.arrays.reference import ADDRESS, FLOAT32, INT4, INT8, PADDED, READ_ONLY, dltensor, row_major

from dlx._core import native
from dlx._core.native import ffi, lib


class Owner:
    """Memory that counts its releases."""

    def __init__(self):
        self.released = 0
        self.handle = ffi.new_handle(self)
        self.release = ffi.callback("void(void*)", self._release)

    def _release(self, owner):
        assert owner == self.handle
        self.released += 1


def make(function, *args):
    """Call a function that creates a managed tensor; return it."""
    out = ffi.new("DLManagedTensorVersioned**")
    assert function(*args, out) == lib.DLX_OK
    return out[0]


def foreign(counting, *args, legacy=False, **kwargs):
    """Return a foreign managed tensor as cdata."""
    kind = "DLManagedTensor*" if legacy else "DLManagedTensorVersioned*"
    return ffi.cast(kind, counting.managed(*args, legacy=legacy, **kwargs))


def adopter(legacy):
    """Return the function that imports a generation."""
    return lib.dlx_legacy_adopt if legacy else lib.dlx_managed_adopt


def numbers(pointer, n):
    """Return n numbers."""
    return tuple(pointer[i] for i in range(n))


generations = pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])


def test_new_releases_its_owner_once():
    """The owner is released with the tensor; until then the tensor counts as live."""
    owner, before = Owner(), native.live()
    made = make(lib.dlx_managed_new, dltensor((2,)), 0, owner.handle, owner.release)
    assert (native.live(), owner.released) == (before + 1, 0)
    lib.dlx_managed_release(made)
    assert (native.live(), owner.released) == (before, 1)


def test_new_without_release():
    """An owner that needs no release is left alone."""
    lib.dlx_managed_release(make(lib.dlx_managed_new, dltensor((2,)), 0, ffi.NULL, ffi.NULL))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_sharers_hold_the_owner(order):
    """The owner is released with its last tensor: the first one, or any that shares it directly or indirectly."""
    owner, like = Owner(), dltensor((2,))
    made = [make(lib.dlx_managed_new, like, 0, owner.handle, owner.release)]
    made.append(make(lib.dlx_managed_share, made[0], like, 0))
    made.append(make(lib.dlx_managed_share, made[0], like, 0))
    made.append(make(lib.dlx_managed_share, made[1], like, 0))
    for at in order:
        assert owner.released == 0
        lib.dlx_managed_release(made[at])
    assert owner.released == 1


def test_concurrent_releases_release_once(counting):
    """Four threads release sharing tensors: the last release releases the owner, once."""
    like = dltensor((2,))
    for _ in range(2):
        owner = Owner()
        made = [make(lib.dlx_managed_new, like, 0, owner.handle, owner.release)]
        made += [make(lib.dlx_managed_share, made[0], like, 0) for _ in range(40000)]
        last = made.pop()
        counting.delete_together([int(ffi.cast("intptr_t", one)) for one in made])
        assert owner.released == 0
        lib.dlx_managed_release(last)
        assert owner.released == 1


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        ("DLX_E_NDIM", {"ndim": 129}),
        ("DLX_E_SHAPE", {"shape": (-1,)}),
        ("DLX_E_DTYPE", {"dtype": (2, 0, 1)}),
        ("DLX_E_NULL", {"shape": (1,), "address": 0}),
        ("DLX_E_OVERFLOW", {"shape": (2**62,)}),
    ],
)
def test_failures_take_nothing(status, parts):
    """On failure, the caller keeps the owner, and no count changes."""
    owner, before, out = Owner(), native.live(), ffi.new("DLManagedTensorVersioned**")
    made = make(lib.dlx_managed_new, dltensor((2,)), 0, owner.handle, owner.release)
    bad = dltensor(**parts)
    assert lib.dlx_managed_new(bad, 0, owner.handle, owner.release, out) == getattr(lib, status)
    assert lib.dlx_managed_share(made, bad, 0, out) == getattr(lib, status)
    assert (out[0], owner.released, native.live()) == (ffi.NULL, 0, before + 1)
    lib.dlx_managed_release(made)
    assert owner.released == 1


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 1, 3), (0, 3), (1,) * 128])
def test_metadata_is_copied(shape):
    """Shape and strides are copied, strides are never NULL, and changes to the originals have no effect."""
    like = dltensor(shape, None)
    made = make(lib.dlx_managed_new, like, 0, ffi.NULL, ffi.NULL)
    for axis in range(len(shape)):
        like.shape[axis] = -7
    tensor = made.dl_tensor
    assert numbers(tensor.shape, len(shape)) == shape
    if 0 not in shape:
        assert numbers(tensor.strides, len(shape)) == row_major(shape)
    assert tensor.shape != like.shape
    assert tensor.strides != ffi.NULL
    lib.dlx_managed_release(made)


def test_strides_are_kept():
    """Existing strides are copied unchanged."""
    like = dltensor((2, 3, 1), (-1, 2, 77))
    made = make(lib.dlx_managed_new, like, READ_ONLY, ffi.NULL, ffi.NULL)
    like.strides[0] = 5
    assert numbers(made.dl_tensor.strides, 3) == (-1, 2, 77)
    assert made.flags == READ_ONLY
    assert (made.version.major, made.version.minor) == (1, 3)
    lib.dlx_managed_release(made)


@generations
def test_live_metadata_of_a_producer_is_never_read(counting, legacy):
    """Changes of a producer to its struct after the import have no effect."""
    peer = foreign(counting, (2, 3), (3, 1), legacy=legacy)
    made = make(adopter(legacy), peer)
    peer.dl_tensor.shape[0], peer.dl_tensor.strides[0], peer.dl_tensor.ndim = 99, -99, 1
    peer.dl_tensor.dtype.bits, peer.dl_tensor.data = 64, ffi.NULL
    tensor = made.dl_tensor
    assert (numbers(tensor.shape, 2), numbers(tensor.strides, 2)) == ((2, 3), (3, 1))
    assert (tensor.ndim, tensor.dtype.bits, tensor.data != ffi.NULL) == (2, 32, True)
    lib.dlx_managed_release(made)


@generations
def test_sharers_outlive_the_producer_struct(counting, legacy):
    """A tensor that shares memory has its own metadata, which survives the original tensor."""
    before = counting.deleted
    made = make(adopter(legacy), foreign(counting, (2, 3), legacy=legacy))
    shared = make(lib.dlx_managed_share, made, ffi.addressof(made.dl_tensor), 0)
    lib.dlx_managed_release(made)
    assert numbers(shared.dl_tensor.shape, 2) == (2, 3)
    assert counting.deleted == before
    lib.dlx_managed_release(shared)
    assert counting.deleted == before + 1


@generations
def test_adopted_tensors_are_deleted_once(counting, legacy):
    """An imported tensor calls the foreign deleter once, at its release."""
    before = counting.deleted
    made = make(adopter(legacy), foreign(counting, legacy=legacy))
    assert counting.deleted == before
    lib.dlx_managed_release(made)
    assert counting.deleted == before + 1


@generations
def test_a_missing_deleter_is_no_deleter(counting, legacy):
    """A NULL deleter, valid in both generations, is not called."""
    peer = foreign(counting, legacy=legacy, null_deleter=True)
    lib.dlx_managed_release(make(adopter(legacy), peer))
    assert numbers(peer.dl_tensor.shape, 2) == (2, 3)
    (lib.dlx_legacy_release if legacy else lib.dlx_managed_release)(peer)


@pytest.mark.parametrize("version", [(0, 9), (2, 0), (2**31 - 1, 3)])
def test_other_major_versions_are_not_adopted(counting, version):
    """Another major version is rejected, and its tensor stays the caller's."""
    before, out = counting.deleted, ffi.new("DLManagedTensorVersioned**")
    peer = foreign(counting, version=version)
    assert lib.dlx_managed_adopt(peer, out) == lib.DLX_E_VERSION
    assert counting.deleted == before
    lib.dlx_managed_release(peer)


@pytest.mark.parametrize("minor", [0, 2, 3, 4, 99])
def test_other_minor_versions_are_adopted(counting, minor):
    """Newer and older minor versions are readable; exports have dlx's version."""
    made = make(lib.dlx_managed_adopt, foreign(counting, version=(1, minor)))
    assert (made.version.major, made.version.minor) == (1, 3)
    lib.dlx_managed_release(made)


@generations
@pytest.mark.parametrize("kind", [1, 2, 3, 10, 11, 13])
def test_byte_offset_is_folded_into_addresses(counting, kind, legacy):
    """If data is an address, the offset is added to it, so that no consumer can ignore it."""
    peer = foreign(counting, device=(kind, 1), byte_offset=24, legacy=legacy)
    made = make(adopter(legacy), peer)
    assert (made.dl_tensor.data - peer.dl_tensor.data, made.dl_tensor.byte_offset) == (24, 0)
    lib.dlx_managed_release(made)


@generations
@pytest.mark.parametrize("kind", [4, 7, 8, 12, 15])
def test_byte_offset_is_kept_beside_handles(counting, kind, legacy):
    """Offsets of handles, such as Metal's and OpenCL's, are kept."""
    peer = foreign(counting, device=(kind, 0), byte_offset=24, legacy=legacy)
    made = make(adopter(legacy), peer)
    assert (made.dl_tensor.data, made.dl_tensor.byte_offset) == (peer.dl_tensor.data, 24)
    lib.dlx_managed_release(made)


def test_nothing_is_folded_into_null():
    """The NULL data of an empty tensor stays NULL, with any offset."""
    made = make(lib.dlx_managed_new, dltensor((0,), address=0, byte_offset=8), 0, ffi.NULL, ffi.NULL)
    assert (made.dl_tensor.data, made.dl_tensor.byte_offset) == (ffi.NULL, 0)
    lib.dlx_managed_release(made)


@pytest.mark.parametrize("keep_order", [0, 1])
@pytest.mark.parametrize("shape", [(), (1,), (63,), (64,), (65,), (1024,), (1025,), (1000, 1100), (3, 500, 701)])
def test_fresh_memory_is_aligned(shape, keep_order):
    """Memory that dlx allocates is host memory, aligned to 256 bytes, and writable to its end."""
    made = make(lib.dlx_managed_empty, dltensor(shape, device=(8, 3), byte_offset=4), 0, keep_order)
    tensor = made.dl_tensor
    assert int(ffi.cast("uintptr_t", tensor.data)) % lib.DLX_ALIGNMENT == 0
    assert lib.DLX_ALIGNMENT == 256
    assert (tensor.device.device_type, tensor.device.device_id, tensor.byte_offset) == (1, 0, 0)
    nbytes = lib.dlx_nbytes(ffi.addressof(tensor), 0)
    ffi.memmove(tensor.data, bytes(nbytes), nbytes)
    lib.dlx_managed_release(made)


@pytest.mark.parametrize(
    ("shape", "strides", "ordered"),
    [
        ((2, 3), (1, 2), (1, 2)),
        ((2, 3), (3, 1), (3, 1)),
        ((2, 3), (10, 100), (1, 2)),
        ((2, 3), (-1, -2), (1, 2)),
        ((2, 3, 4), (1, 8, 2), (1, 8, 2)),
        ((2, 3, 4), (4, 0, 1), (12, 4, 1)),
        ((2, 3), None, (3, 1)),
        ((0, 3), (1, 2), (3, 1)),
    ],
)
def test_fresh_memory_keeps_the_order(shape, strides, ordered):
    """With keep_order the order of dimensions is kept without gaps; broadcast and empty tensors are row-major."""
    for keep_order, wanted in ((1, ordered), (0, row_major(shape) if 0 not in shape else ordered)):
        made = make(lib.dlx_managed_empty, dltensor(shape, strides), 0, keep_order)
        assert numbers(made.dl_tensor.strides, len(shape)) == wanted
        lib.dlx_managed_release(made)


@pytest.mark.parametrize("shape", [(0,), (5, 0), (0, 2**62, 2**62)])
def test_fresh_nothing_has_no_memory(shape):
    """A tensor without elements has no memory: data is NULL, as DLPack requires."""
    made = make(lib.dlx_managed_empty, dltensor(shape), 0, 0)
    assert made.dl_tensor.data == ffi.NULL
    lib.dlx_managed_release(made)


@pytest.mark.parametrize(("shape", "status"), [((2**52,), "DLX_E_MEMORY"), ((2**62,), "DLX_E_OVERFLOW")])
def test_fresh_memory_that_is_not_there(shape, status):
    """A failed allocation returns a status and leaks nothing."""
    out = ffi.new("DLManagedTensorVersioned**")
    before = native.live()
    assert lib.dlx_managed_empty(dltensor(shape), 0, 0, out) == getattr(lib, status)
    assert (out[0], native.live()) == (ffi.NULL, before)


@pytest.mark.parametrize(("flags", "nbytes"), [(0, 3), (PADDED, 5)])
def test_fresh_sub_byte_memory(flags, nbytes):
    """Allocated memory keeps the flag for padded elements."""
    made = make(lib.dlx_managed_empty, dltensor((5,), None, INT4), flags, 0)
    assert (made.flags, lib.dlx_nbytes(ffi.addressof(made.dl_tensor), made.flags)) == (flags, nbytes)
    lib.dlx_managed_release(made)


def test_disowned_owners_are_not_released():
    """A tensor whose owner was removed is released without it."""
    owner, before = Owner(), native.live()
    made = make(lib.dlx_managed_new, dltensor((2,)), 0, owner.handle, owner.release)
    lib.dlx_managed_own(made, ffi.NULL, ffi.NULL)
    lib.dlx_managed_release(made)
    assert (owner.released, native.live()) == (0, before)


def test_the_owner_is_named_by_its_release():
    """The owner is returned for its release function, or for any."""
    owner, other = Owner(), Owner()
    made = make(lib.dlx_managed_new, dltensor((2,)), 0, owner.handle, owner.release)
    assert lib.dlx_managed_owner(made, ffi.NULL) == owner.handle == lib.dlx_managed_owner(made, owner.release)
    assert lib.dlx_managed_owner(made, other.release) == ffi.NULL
    lib.dlx_managed_release(made)
    assert owner.released == 1


def test_a_count_that_is_held():
    """Each holder adds a count; the owner is released with the last."""
    owner, before = Owner(), native.live()
    made = make(lib.dlx_managed_new, dltensor((2,)), 0, owner.handle, owner.release)
    lib.dlx_managed_hold(made)
    lib.dlx_managed_release(made)
    assert owner.released == 0
    lib.dlx_managed_release(made)
    assert (owner.released, native.live()) == (1, before)


def test_shared_tensors_have_other_holders(counting):
    """The caller is not the sole holder of shared or foreign tensors; after the others are released it is."""
    like = dltensor((2,))
    made = make(lib.dlx_managed_new, like, 0, ffi.NULL, ffi.NULL)
    shared = make(lib.dlx_managed_share, made, like, 0)
    assert not lib.dlx_managed_is_sole(made) and lib.dlx_managed_is_sole(shared)
    assert not lib.dlx_managed_hold_sole(made)  # no count was added
    lib.dlx_managed_release(shared)
    assert lib.dlx_managed_is_sole(made)
    assert lib.dlx_managed_hold_sole(made) and not lib.dlx_managed_is_sole(made)
    lib.dlx_managed_release(made)
    assert lib.dlx_managed_is_sole(made)
    lib.dlx_managed_release(made)
    theirs = foreign(counting)
    assert not lib.dlx_managed_is_sole(theirs)
    lib.dlx_managed_release(theirs)


@pytest.mark.unsanitized("freed memory is kept for a while, so that resident memory grows")
def test_memory_that_dlx_allocated_is_given_back():
    """Memory is freed with its tensor: ten times 64 MiB, written, leave less than 64 MiB behind."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("no /proc to read the resident memory from")
    zeros = bytes(64 << 20)
    before = int(status.read_text().split()[1])
    for _ in range(10):
        made = make(lib.dlx_managed_empty, dltensor((64 << 20,), None, INT8), 0, 0)
        ffi.memmove(made.dl_tensor.data, zeros, len(zeros))
        lib.dlx_managed_release(made)
    assert (int(status.read_text().split()[1]) - before) * 4096 < 64 << 20


def test_exported_shells_own_what_they_wrap(counting):
    """The legacy shell of a managed tensor releases it once, and has the same fields."""
    before = counting.deleted
    made = make(lib.dlx_managed_adopt, foreign(counting, byte_offset=8))
    out = ffi.new("DLManagedTensor**")
    assert lib.dlx_legacy_export(made, out) == lib.DLX_OK
    tensor = out[0].dl_tensor
    assert (tensor.data, tensor.byte_offset) == (made.dl_tensor.data, 0)
    assert (numbers(tensor.shape, 2), numbers(tensor.strides, 2)) == ((2, 3), (3, 1))
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == FLOAT32
    lib.dlx_legacy_release(out[0])
    assert counting.deleted == before + 1


def test_described_memory_is_not_touched():
    """Creating, sharing and releasing tensors never reads their memory."""
    made = make(lib.dlx_managed_new, dltensor((1000,), address=ADDRESS), 0, ffi.NULL, ffi.NULL)
    shared = make(lib.dlx_managed_share, made, dltensor((10,), (-1,)), 0)
    lib.dlx_managed_release(made)
    lib.dlx_managed_release(shared)


def test_the_count_is_of_all_threads():
    """Tensors of ended threads count as live until any thread releases them."""
    before, made = native.live(), []

    def work():
        made.extend(native.tensor_new(ADDRESS, (1,), None, FLOAT32, (1, 0), 0, None) for _ in range(100))

    for _ in range(2):  # the second round reuses the first threads' counters
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert native.live() == before + 1600
    made.clear()
    assert native.live() == before


# ---- a consumer that may fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", ["never", "before", "after"])
def test_given_up_tensors_release_their_owner_once(consumer):
    """The owner is released once, whether the failed consumer has released, does so later, or never."""
    owner, before = Owner(), native.live()
    made = make(lib.dlx_managed_new, dltensor((2,)), 0, owner.handle, owner.release)
    lib.dlx_managed_hold(made)
    if consumer == "before":
        lib.dlx_managed_release(made)
        assert (owner.released, native.live()) == (0, before + 1)
    lib.dlx_managed_abandon(made)
    assert (owner.released, native.live()) == (1, before)
    if consumer == "after":
        lib.dlx_managed_release(made)
        assert (owner.released, native.live()) == (1, before)


@pytest.mark.unsanitized("freed memory is kept for a while, so that resident memory grows")
def test_a_late_release_frees_what_was_given_up():
    """The struct of an abandoned tensor is freed when its consumer releases it: 20,000 of 2 KB leave nothing."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("no /proc to read the resident memory from")
    like = dltensor((1,) * 128)

    def work(times):
        for _ in range(times):
            made = make(lib.dlx_managed_new, like, 0, ffi.NULL, ffi.NULL)
            lib.dlx_managed_hold(made)
            lib.dlx_managed_abandon(made)
            lib.dlx_managed_release(made)

    work(1000)
    before = int(status.read_text().split()[1])
    work(20_000)
    assert (int(status.read_text().split()[1]) - before) * 4096 < 8 << 20


def test_a_consumer_may_release_while_it_is_given_up(counting):
    """Two concurrent threads release the owner once, in either order."""
    deleted, live, n = counting.deleted, native.live(), 2000
    made = [make(lib.dlx_managed_adopt, foreign(counting)) for _ in range(n)]
    for each in made:
        lib.dlx_managed_hold(each)
    start = threading.Barrier(2)

    def consumer():
        start.wait()
        for each in made:
            lib.dlx_managed_release(each)

    thread = threading.Thread(target=consumer)
    thread.start()
    start.wait()
    for each in made:
        lib.dlx_managed_abandon(each)
    thread.join()
    assert (counting.deleted, native.live()) == (deleted + n, live)


# ---- manager_ctx -----------------------------------------------------------------------------------------------------


@generations
def test_consumers_that_look_at_manager_ctx_release_as_well(counting, legacy):
    """Paddle calls a deleter only if manager_ctx is not NULL: dlx never leaves it NULL, in either generation."""
    memory, before = bytearray(64), native.live()
    address = native.buffer_address(memoryview(memory))
    for flags, owner in ((0, memory), (0, None)):
        tensor = native.tensor_new(address, (2,), None, FLOAT32, (1, 0), flags, owner)
        given = [tensor, native.tensor_copy(tensor, True), native.tensor_view(tensor, None, None, None, None)]
        capsules = [each.__dlpack__(max_version=None if legacy else (1, 3)) for each in given]
        del tensor, given
        for capsule in capsules:
            managed = counting.consume(capsule, legacy=legacy)
            assert counting.delete_by_context(managed, legacy=legacy)
        del capsules, capsule
        assert native.live() == before
    del owner
    memory.append(0)  # no buffer of it is left


@pytest.mark.unsanitized("freed memory is kept for a while, so that resident memory grows")
@generations
def test_bytes_go_where_a_consumer_looks_at_manager_ctx(counting, legacy):
    """200 times 1 MB through such a consumer leave less than 32 MB behind."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("no /proc to read the resident memory from")
    million = bytearray(b"x" * 10**6)
    source = native.tensor_new(native.buffer_address(memoryview(million)), (10**6,), None, INT8, (1, 0), 0, million)
    before = int(status.read_text().split()[1])
    for _ in range(200):
        capsule = native.tensor_copy(source, True).__dlpack__(max_version=None if legacy else (1, 3))
        counting.delete_by_context(counting.consume(capsule, legacy=legacy), legacy=legacy)
    assert (int(status.read_text().split()[1]) - before) * 4096 < 32 << 20


@pytest.mark.parametrize(
    ("shape", "strides", "written"),
    [
        ((2, 3, 0), (-1, 2**62, 1), (3, 1, 1)),
        ((2, 3, 0), (1, 2**62, 1), (3, 1, 1)),
        ((2, 0, 3), (1, -1, 1), (3, 3, 1)),
        ((0, 2**31, 2**31), (-1, -1, 2**31), (2**62, 2**31, 1)),
        ((2, 0, 3), (7, 5, 2), (7, 5, 2)),
        ((0, 3), (0, 2**60), (0, 2**60)),
        ((3, 2), (-2, -1), (-2, -1)),
        ((1, 3, 2), (2**62, 4, 2), (12, 4, 2)),
        ((1, 1), (-(2**63) + 1, 2**63 - 1), (1, 1)),
        ((3, 1, 1), (5, 2**59, 7), (5, 7, 7)),
        ((3, 1, 1), (5, 2**57, -7), (5, 2**57, -7)),
    ],
)
def test_strides_of_nothing_are_tame(shape, strides, written):
    """Strides without meaning are small numbers if they could overflow in a consumer's arithmetic."""
    made = make(lib.dlx_managed_new, dltensor(shape, strides), 0, ffi.NULL, ffi.NULL)
    assert numbers(made.dl_tensor.strides, len(shape)) == written
    lib.dlx_managed_release(made)
