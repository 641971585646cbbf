"""Read-only memory is kept read-only or copied: never dropped, never laundered."""

from __future__ import annotations

import mmap

import pytest

import dlx
from dlx import errors


def locked(np, array=None):
    """A read-only array."""
    array = np.arange(4.0) if array is None else array
    array.flags.writeable = False
    return array


SOURCES = {
    "writeable=False": locked,
    "broadcast_to": lambda np: np.broadcast_to(np.arange(4.0), (3, 4)),
    "frombuffer(bytes)": lambda np: np.frombuffer(b"12345678", "f8"),
    "bytes": lambda np: b"12345678",
    "memoryview": lambda np: memoryview(bytearray(b"1234")).toreadonly(),
    "view of read-only": lambda np: locked(np)[1:],
    "read-only view": lambda np: locked(np, np.arange(4.0)[:]),
    "dlx.Tensor": lambda np: dlx.convert(b"1234", to="dlx"),
    "0-d": lambda np: locked(np, np.array(1.0)),
    "negative strides": lambda np: locked(np)[::-1],
}


@pytest.fixture(params=SOURCES)
def make(request, np):
    """Make a read-only object of each kind."""
    return lambda: SOURCES[request.param](np)


def raw(np, obj):
    """The bytes of anything."""
    return np.asarray(dlx.convert(obj, to="numpy")).tobytes()


def address(np, array):
    """Return the address of an array."""
    return np.asarray(array).__array_interface__["data"][0]


def test_writing_into_the_result_leaves_the_source(np, torch, make):
    """A torch tensor from read-only memory is a copy: writing to it does not show in the source."""
    source = make()
    before = raw(np, source)
    tensor = dlx.convert(source, to="torch")
    assert tensor.numpy().tobytes() == before
    tensor.fill_(7)
    assert raw(np, source) == before


def test_the_plan_says_copied_and_why(np, torch, make):
    """The plan names read-only memory as the reason of the copy."""
    source = make()
    plan = dlx.plan(source, to="torch")
    assert plan.outcome == "copied" and "read-only" in str(plan) and plan.source.readonly


def test_readonly_error(np, torch, make):
    """readonly="error" refuses, and names the ways out."""
    source = make()
    with pytest.raises(errors.ReadOnlyError, match=r"read-only, and torch tensors are always writable") as caught:
        dlx.convert(source, to="torch", readonly="error")
    assert "readonly='copy'" in caught.value.fix and "readonly='share'" in caught.value.fix


def test_copy_false(np, torch, make):
    """copy=False refuses, and the fix names both ways out."""
    source = make()
    if min(dlx.describe(source).strides, default=1) < 0:
        pytest.skip("torch could not share it for another reason")
    with pytest.raises(errors.ReadOnlyError, match="without a copy") as caught:
        dlx.convert(source, to="torch", copy=False)
    assert "copy=False" in caught.value.fix and "readonly='share'" in caught.value.fix
    assert isinstance(caught.value, (BufferError, ValueError))


def test_copy_true_is_never_refused(np, torch, make):
    """copy=True makes new writable memory for every value of readonly=."""
    source = make()
    for readonly in ("copy", "error", "share"):
        tensor = dlx.convert(source, to="torch", copy=True, readonly=readonly)
        tensor.fill_(0)
    assert raw(np, source).strip(b"\0")


@pytest.mark.parametrize("copy", [None, False])
def test_readonly_share_aliases(np, torch, copy):
    """readonly="share" exports the memory as writable, at your request, and the plan shows it."""
    array = np.arange(4.0)
    source = locked(np, array[:])
    tensor = dlx.convert(source, to="torch", readonly="share", copy=copy)
    tensor[0] = 9
    assert array[0] == 9 and tensor.data_ptr() == array.__array_interface__["data"][0]
    plan = dlx.plan(source, to="torch", readonly="share", copy=copy)
    assert plan.outcome == "shared" and "do not write" in str(plan)


def test_readonly_share_still_copies_what_must_be_copied(np, torch):
    """readonly="share" lifts the read-only flag only: negative strides are copied as ever."""
    source = locked(np)[::-1]
    tensor = dlx.convert(source, to="torch", readonly="share")
    tensor.zero_()
    assert source.tolist() == [3.0, 2.0, 1.0, 0.0]
    with pytest.raises(errors.CopyRequiredError):
        dlx.convert(source, to="torch", readonly="share", copy=False)


@pytest.mark.parametrize("readonly", ["copy", "error", "share"])
@pytest.mark.parametrize("copy", [None, False])
def test_numpy_results_are_never_made_writable(np, make, readonly, copy):
    """A shared numpy result is marked read-only with every readonly=."""
    source = make()
    result = dlx.convert(dlx.convert(source, to="dlx"), to="numpy", readonly=readonly, copy=copy)
    assert not result.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        result[...] = 0


def test_dlx_tensor_keeps_the_bit(np, make):
    """Memory stays shared and read-only from numpy to dlx and back."""
    source = make()
    tensor = dlx.convert(source, to="dlx", copy=False)
    assert tensor.readonly and tensor.flags & 1
    back = dlx.convert(tensor, to="numpy", copy=False)
    assert not back.flags.writeable and address(np, back) == tensor.data_ptr


def test_a_copy_is_writable(np, make):
    """copy=True gives numpy and dlx memory that may be written."""
    source = make()
    assert dlx.convert(dlx.convert(source, to="dlx"), to="numpy", copy=True).flags.writeable
    assert not dlx.convert(source, to="dlx", copy=True).readonly


def test_legacy_capsules_are_refused():
    """A legacy capsule (before DLPack 1.0) has no read-only flag, so it is refused, and a copy is exported."""
    tensor = dlx.convert(b"1234", to="dlx")
    for options in ({}, {"max_version": None}, {"max_version": (0, 8)}):
        with pytest.raises(errors.ReadOnlyError, match="legacy"):
            tensor.__dlpack__(**options)
    assert dlx.convert(tensor.__dlpack__(copy=True), to="dlx").readonly is False


def test_versioned_capsules_keep_the_bit():
    """A raw capsule of a read-only tensor is read-only on the other side."""
    tensor = dlx.convert(b"1234", to="dlx")
    assert dlx.convert(tensor.__dlpack__(max_version=(1, 0)), to="dlx").readonly


def test_a_writable_source_stays_writable(np, torch):
    """Writable memory is shared as writable, also with readonly="error"."""
    array = np.zeros(2)
    tensor = dlx.convert(array, to="torch", readonly="error", copy=False)
    result = dlx.convert(tensor, to="numpy", readonly="error")
    result[0] = 1
    assert array.tolist() == [1.0, 0.0]


def test_readonly_does_not_act_inside_a_framework(np):
    """Inside one framework, a read-only array is returned unchanged."""
    source = locked(np)
    assert dlx.convert(source, to="numpy", readonly="error", copy=False) is source


def test_readonly_does_not_act_where_it_can_be_said(np):
    """readonly="error" affects only consumers without read-only arrays; dlx.Tensor and numpy have them."""
    assert dlx.convert(b"1234", to="dlx", readonly="error", copy=False).readonly
    assert not dlx.convert(b"1234", to="numpy", readonly="error", copy=False).flags.writeable


@pytest.mark.parametrize(("access", "readonly"), [(mmap.ACCESS_READ, True), (mmap.ACCESS_WRITE, False)])
def test_mmap_access(tmp_path, access, readonly):
    """A file mapped for reading is read-only, one mapped for writing is not."""
    (tmp_path / "file").write_bytes(b"1234")
    with (tmp_path / "file").open("r+b") as file, mmap.mmap(file.fileno(), 4, access=access) as mapped:
        assert dlx.convert(mapped, to="dlx").readonly is readonly


def test_mapped_files_survive(np, torch, python, tmp_path):
    """Writing to a tensor from a file that is mapped read-only neither crashes nor changes the file."""
    path = tmp_path / "file.npy"
    np.save(path, np.arange(1000.0))
    before = path.read_bytes()
    python(
        f"""
        import mmap, os
        import numpy as np
        import dlx
        path = {str(path)!r}
        sources = (
            np.load(path, mmap_mode="r"),
            np.load(path, mmap_mode="r")[::-2],
            np.memmap(path, "f8", "r", offset=128),
            mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ),
            memoryview(mmap.mmap(os.open(path, os.O_RDONLY), 0, prot=mmap.PROT_READ)),
            dlx.convert(np.load(path, mmap_mode="r"), to="dlx"),
            dlx.convert(np.load(path, mmap_mode="r"), to="dlx").__dlpack__(max_version=(1, 0)),
            np.load(path, mmap_mode="r").__dlpack__(max_version=(1, 0)),
        )
        for source in sources:
            tensor = dlx.convert(source, to="torch")
            tensor.fill_(7)
            assert tensor.tolist() == [7] * tensor.numel()
        """,
        imported=True,
    )
    assert path.read_bytes() == before


def test_copy_on_write_files_are_shared(np, torch, tmp_path):
    """A file mapped copy-on-write is writable memory: it is shared, and the file stays."""
    np.save(tmp_path / "file.npy", np.arange(4.0))
    array = np.load(tmp_path / "file.npy", mmap_mode="c")
    dlx.convert(array, to="torch", copy=False).fill_(7)
    assert array.tolist() == [7.0] * 4
    assert np.load(tmp_path / "file.npy").tolist() == [0.0, 1.0, 2.0, 3.0]
