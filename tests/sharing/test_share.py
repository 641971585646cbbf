"""`share` and `attach`: the tree in the other process, access to its memory, and the memory's lifetime."""

import collections
import dataclasses
import errno
import gc
import json
import math
import multiprocessing
import os
import pickle
import platform
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import typing
import weakref
from multiprocessing import resource_sharer, resource_tracker

import pytest
from support.arrays.reference import INT4
from support.project import compiled, program

import dlx
from dlx import errors
from dlx._core import native
from dlx._sharing import segment as segments


def descriptors():
    """Return the number of open descriptors of this process, and of mapped memfds of dlx."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:dlx" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mapped


def names():
    """Return the files in /dev/shm, except those of multiprocessing, torch and ray, which others may use."""
    with os.scandir("/dev/shm") as found:  # folders are of other programs, such as joblib
        files = [each.name for each in found if not each.is_dir()]
    return {name for name in files if not name.startswith(("sem.", "psm_", "torch_", "plasma"))}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check that no test leaves a descriptor, a mapping, or a name in /dev/shm."""
    resource_tracker.ensure_running()  # it keeps a descriptor
    before = descriptors(), names()
    yield
    if descriptors() != before[0]:
        gc.collect()
    assert (descriptors(), names()) == before


def values(tensor):
    """Return the bytes of a tensor."""
    return bytes(memoryview(tensor).cast("B")) if tensor.nbytes else b""


class TestTree:
    """The attached tree."""

    def test_an_array_comes_back_with_its_values(self):
        with dlx.share(b"abc") as handle:
            found = dlx.attach(handle)
        assert type(found) is dlx.Tensor and values(found) == b"abc" and found.readonly

    def test_containers_and_plain_data_come_back_as_they_are(self):
        array = dlx.from_dlpack(bytearray(b"abc"))
        tree = {
            "list": [array, (array, 1, True, None, "x", b"y", 2.5, 1j, 1 << 70, -0.0)],
            ("key", 1): collections.OrderedDict(z=array, a=collections.deque([1, 2], maxlen=2)),
            None: {frozenset({1}), 2.5},
            "inf": [math.inf, -math.inf],
            3: bytearray(b"q"),
        }
        with dlx.share(tree) as handle:
            found = dlx.attach(handle)
        assert list(found) == list(tree)
        inner = found["list"][1]
        assert inner[1:] == tree["list"][1][1:] and [*map(type, inner[1:])] == [*map(type, tree["list"][1][1:])]
        assert str(inner[-1]) == "-0.0" and values(inner[0]) == b"abc"
        assert type(found["key", 1]) is collections.OrderedDict and list(found["key", 1]) == ["z", "a"]
        assert found["key", 1]["a"] == collections.deque([1, 2], maxlen=2) and found["key", 1]["a"].maxlen == 2
        assert found[None] == {frozenset({1}), 2.5} and found["inf"] == [math.inf, -math.inf]
        assert found[3] == b"q" and type(found[3]) is bytearray

    def test_nan_stays_one(self):
        with dlx.share([b"", math.nan]) as handle:
            assert math.isnan(dlx.attach(handle)[1])

    def test_the_same_twice_is_the_same_twice_and_cycles_stay(self):
        array, inner = dlx.from_dlpack(bytearray(4)), []
        tree = [array, array, inner, (inner, array), {"again": inner}]
        inner.append(tree)
        with dlx.share(tree) as handle:
            found = dlx.attach(handle)
        assert found[0] is found[1] is found[3][1]
        assert found[2] is found[3][0] is found[4]["again"] and found[2][0] is found

    def test_frozen_sets_are_keys(self, np):
        tree = {frozenset({1, (2, frozenset({"a"}))}): np.ones(1), (frozenset(), 2): frozenset({frozenset({3})})}
        with dlx.share(tree) as handle:
            found = dlx.attach(handle, "numpy")
        assert list(found) == list(tree) and found[frozenset(), 2] == frozenset({frozenset({3})})
        key = frozenset()
        for _ in range(300):
            key = frozenset({key})
        with pytest.raises(errors.ConversionError, match="nested more than 200 levels"):
            dlx.share({key: np.ones(1)})

    def test_views_of_one_memory_share_it_again(self, np):
        base = np.arange(100.0)
        part, gaps, turned = base[10:20], base[::3], base.reshape(10, 10).T
        with dlx.share([part, gaps, base, turned, base.copy()]) as handle:
            found = dlx.attach(handle, "numpy", writable=True)
            size = handle["size"]
        for one, other in zip(found, [part, gaps, base, turned, base], strict=True):
            assert np.array_equal(one, other)
        assert all(np.shares_memory(found[2], each) for each in (found[0], found[1], found[3]))
        assert not np.shares_memory(found[2], found[4])
        assert 1600 < size < 1600 + 4096

    def test_chained_overlaps_share(self, np):
        base = np.arange(100.0)
        with dlx.share([base[:40], base[30:60], base[60:]]) as handle:
            a, b, c = dlx.attach(handle, "numpy")
        assert np.shares_memory(a, b) and not np.shares_memory(b, c) and np.array_equal(b, base[30:60])

    def test_what_nobody_asked_to_share_is_not_copied(self, np):
        base = np.zeros((1000, 1000))
        column = base[:, 3]
        column[:] = range(1000)
        with dlx.share({"x": column, "again": base[:, 3], "other": base[:, 4]}) as handle:
            found = dlx.attach(handle, "numpy")
        assert handle["size"] < 40_000
        assert np.array_equal(found["x"], column) and found["x"].strides == (8,)
        assert np.shares_memory(found["x"], found["again"]) and not np.shares_memory(found["x"], found["other"])

    def test_a_view_with_gaps_does_not_part_the_others(self, np):
        base = np.arange(100.0)
        square = base[:4].reshape(2, 2)
        with dlx.share([square, square.T, base[2::2], base[50:60], base[55:65]]) as handle:
            found = dlx.attach(handle, "numpy")
        assert np.array_equal(found[2], base[2::2]) and np.array_equal(found[1], square.T)
        assert np.shares_memory(found[0], found[1]) and np.shares_memory(found[3], found[4])
        assert not any(np.shares_memory(found[2], found[i]) for i in (0, 1, 3, 4))

    def test_an_empty_array_does_not_part_the_others(self, np):
        base = bytearray(range(80))
        address = native.buffer_address(memoryview(base))
        tree = [dlx.from_pointer(address + at, n, "uint8", owner=base) for at, n in ((0, 50), (20, 0), (30, 50))]
        with dlx.share(tree) as handle:
            found = dlx.attach(handle, writable=True)
        assert dlx.shares_memory(found[0], found[2]) and found[1].nbytes == 0 and values(found[2]) == base[30:]

    @pytest.mark.parametrize("at", (0, 8, 64, 192))
    def test_an_array_beside_a_view_of_it_is_aligned(self, np, at):
        base = np.zeros(1024, np.uint8)
        base = base[-base.ctypes.data % 256 + at :][:512].view(np.float64)
        with dlx.share([base[5:9], base, base[::-1], base.view(np.uint8)[3:]]) as handle:
            found = dlx.attach(handle, "numpy")
        assert found[1].ctypes.data % 256 == 0 and all(each.flags.aligned for each in found)
        assert [each.ctypes.data - found[1].ctypes.data for each in found] == [40, 0, 504, 3]

    @pytest.mark.parametrize(
        ("first", "at", "dtype", "aligned"),
        (
            (1, 8, "float64", 8),
            (2, 4, "float64", 4),  # unaligned, and the copy is aligned no less
            (6, 8, "complex128", 8),
            (1, 12, "float32x3", 4),
            (1, 256, "float64x1024", 256),
            (1, 7, "uint8", 0),
            (3, 16, "int4", 0),
        ),
    )
    def test_overlapping_arrays_keep_their_alignment(self, first, at, dtype, aligned):
        raw = bytearray(9216)
        address = native.buffer_address(memoryview(raw))
        address += -address % 256
        whole = dlx.from_pointer(address + first, 8704, "uint8", owner=raw)
        part = dlx.from_pointer(address + at, 1, dtype, owner=raw)
        with dlx.share([whole, part]) as handle:
            one, other = dlx.attach(handle)
        assert other.data_ptr - one.data_ptr == at - first
        if aligned:
            assert other.data_ptr % aligned == 0
        else:  # bytes need no alignment
            assert one.data_ptr % 256 == 0

    def test_packed_elements_with_gaps_are_refused_with_their_path(self):
        raw = bytearray(64)
        packed = native.tensor_new(native.buffer_address(memoryview(raw)), (3,), (2,), INT4, (1, 0), 0, raw)
        with pytest.raises(errors.LayoutError, match=r"obj\['a'\]\[0\].*packed below one byte and not contiguous"):
            dlx.share({"a": [packed]})

    def test_negative_strides_and_broadcasts(self, np):
        arrays = [np.arange(6)[::-1], np.broadcast_to(np.arange(3), (4, 3)), np.zeros((0, 3)), np.array(2.0)]
        with dlx.share(arrays) as handle:
            for one, other in zip(dlx.attach(handle, "numpy"), arrays, strict=True):
                assert np.array_equal(one, other) and one.dtype == other.dtype and one.shape == other.shape

    @pytest.mark.parametrize("dtype", dlx.DType.all(), ids=str)
    def test_every_dtype_is_exact(self, dtype):
        bits = dtype.bits * dtype.lanes
        raw = bytearray(range(1, 1 + 5 * 32))
        tensor = dlx.from_pointer(native.buffer_address(memoryview(raw)), (5,), dtype, owner=raw)
        with dlx.share([b"x", tensor]) as handle:
            found = dlx.attach(handle)[1]
        assert (found.dtype, found.shape, found.flags & ~1) == (dtype, (5,), tensor.flags & ~1)
        assert found.data_ptr % 256 == 0
        nbytes = -(-5 * bits // 8)
        one = dlx.from_pointer(found.data_ptr, nbytes, "uint8", owner=found)
        assert values(one) == bytes(raw[:nbytes])

    def test_padded_elements_stay_padded(self):
        raw = bytearray(range(8))
        padded = native.tensor_new(native.buffer_address(memoryview(raw)), (8,), None, INT4, (1, 0), 1 << 2, raw)
        with dlx.share(padded) as handle:
            assert dlx.attach(handle).flags == padded.flags | 1

    def test_other_containers_become_builtin_ones(self, np):
        @dataclasses.dataclass
        class Record:
            x: typing.Any
            y: int = 3

        class Pair(typing.NamedTuple):
            a: typing.Any
            b: int

        class Own(list):
            pass

        x = np.arange(3)
        tree = [Record(x), Pair(x, 2), Own([x]), collections.defaultdict(int, k=x)]
        with dlx.share(tree) as handle:
            found = dlx.attach(handle)
        assert [*map(type, found)] == [dict, tuple, list, dict]
        assert list(found[0]) == ["x", "y"] and found[1][1] == 2 and list(found[3]) == ["k"]
        assert found[0]["x"] is found[1][0] is found[2][0] is found[3]["k"]

    def test_lazy_views_and_tables_are_what_they_stand_for(self):
        view = dlx.convert({"a": [dlx.from_dlpack(b"x")]}, to="dlx", lazy=True)
        tree = [view, dlx.from_dlpack(b"y")]
        with dlx.share({"v": view["a"], "t": tree}) as handle:
            found = dlx.attach(handle)
        assert found["t"][0]["a"] is found["v"] and values(found["t"][1]) == b"y"

    @pytest.mark.parametrize("odd", [object(), print, 1 << 5000, iter(range(2))], ids=lambda odd: type(odd).__name__)
    def test_what_is_no_data_is_refused_with_its_path(self, odd):
        if type(odd) is int:
            with dlx.share([b"", odd]) as handle:
                assert dlx.attach(handle)[1] == odd
            return
        with pytest.raises(errors.ConversionError, match=r"obj\['a'\]\[1\].*plain data.*does not pickle"):
            dlx.share({"a": [b"", odd]})
        with pytest.raises(errors.ConversionError, match="plain data"):
            dlx.share({"a": {(odd,): dlx.from_dlpack(b"")}})

    def test_deep_trees(self):
        tree = b"\0"
        for _ in range(10_000):
            tree = [tree]
        tree = (dlx.from_dlpack(b"x"), tree)
        with dlx.share(tree) as handle:
            found = dlx.attach(handle)[1]
        for _ in range(10_000):
            (found,) = found
        assert found == b"\0"

    def test_parameters_want_detach(self, torch):
        parameter = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(errors.ConversionError, match="detach"):
            dlx.share({"w": parameter})
        with dlx.share({"w": parameter}, detach=True) as handle:
            assert dlx.attach(handle, "torch", writable=True)["w"].tolist() == [1, 1, 1]

    def test_tied_parameters_and_their_views(self, torch):
        w = torch.arange(6.0)
        with dlx.share({"w": w, "tied": w, "again": w.view(2, 3)}) as handle:
            found = dlx.attach(handle, "torch", writable=True)
        assert found["w"] is found["tied"]
        found["w"][0] = 7
        assert found["again"][0, 0] == 7 and w[0] == 0

    def test_device_memory_is_refused_where_the_driver_is_too_old(self, cuda):
        with pytest.raises(
            errors.DeviceError, match=r"obj\['a'\].*cannot be shared: .* failed with CUDA_ERROR_\w+.*device='cpu'"
        ):
            dlx.share({"a": dlx.empty(3, "uint8", "cuda:0")})

    def test_all_that_cannot_be_shared_is_listed(self, np):
        """The first error is raised, with its class; its notes contain the others, each with its path."""
        pinned = native.tensor_new(256, (3,), None, (1, 8, 1), (3, 0), 0, None)
        tree = {"good": b"x", "a": [np.array([["text"]]), object()], "b": pinned, "c": (print, np.ones(3))}
        with pytest.raises(errors.DTypeError, match=r"obj\['a'\]\[0\]") as caught:
            dlx.share(tree)
        told = "\n".join(caught.value.__notes__)
        assert all(place in told for place in ("obj['a'][1]", "obj['b']", "obj['c'][0]")) and "good" not in told
        with pytest.raises(errors.ConversionError) as caught:
            dlx.share([object() for _ in range(100)])
        assert len(caught.value.__notes__) == 21 and "79 more errors" in caught.value.__notes__[-1]

    def test_no_array_is_an_error(self):
        with pytest.raises(errors.AdapterNotFoundError):
            dlx.share(3)
        with dlx.share([]) as handle:
            assert dlx.attach(handle) == []


class TestMemory:
    """Access to the memory, and its lifetime."""

    def test_nothing_is_copied_of_what_is_shared_already(self, np):
        tensor = dlx.empty((1000, 1000), "float32", shared=True)
        array = dlx.convert(tensor, "numpy")
        array[:] = 1
        with dlx.share({"a": array[1:], "b": array.T}) as handle:
            assert handle["size"] < 2000
            found = dlx.attach(handle, "numpy")
            array[1, 2] = 5
            assert found["a"][0, 2] == found["b"][2, 1] == 5 and found["a"][1, 1] == 1
            with dlx.share([found["a"], b"new"]) as second:
                again = dlx.attach(second, "numpy")
        array[1, 2] = 6
        assert again[0][0, 2] == 6 and again[1] == b"new"

    def test_memory_like_a_tree(self, np, torch):
        """The memory is new and zero, even for shared arrays; nothing is copied."""
        tensor = dlx.empty(1000, "float32", shared=True)
        np.asarray(tensor)[:] = 7
        weights = torch.ones(100, 50, requires_grad=True)
        big = np.broadcast_to(np.int8(1), (1 << 28,))
        tree = {"w": weights, "tied": weights, "there": [tensor], "name": "x", "b": dlx.empty(3, "bfloat16")}
        with dlx.share(like=tree) as handle:
            found = dlx.attach(handle, "torch", writable=True)
            assert found["name"] == "x" and found["w"] is found["tied"] and found["b"].dtype == torch.bfloat16
            assert found["w"].shape == (100, 50) and not found["w"].any() and not found["there"][0].any()
            found["w"].fill_(2)
            assert dlx.attach(handle, "numpy")["w"].sum() == 10_000
        assert np.asarray(tensor).sum() == 7000 and weights.sum() == 5000
        with dlx.share(like=big) as handle:  # row-major, and no page of zeros is touched
            assert dlx.attach(handle).nbytes == 1 << 28
            assert os.fstat(handle.fileno()).st_blocks * 512 < 1 << 25  # the first page may have 2 MiB

    def test_either_arrays_or_what_is_like_them(self, np):
        for options in ({}, {"obj": np.ones(3), "like": np.ones(3)}):
            with pytest.raises(TypeError, match="like="):
                dlx.share(**options)
        with pytest.raises(errors.DeviceError, match=r"obj\['a'\].*shared=True"):
            dlx.share(like={"a": native.tensor_new(256, (3,), None, (1, 8, 1), (2, 0), 0, None)})

    @pytest.mark.parametrize("how", ("obj", "like"))
    def test_pinned_memory_is_moved_by_the_call_that_the_error_names(self, np, how):
        base = np.arange(3.0)
        pinned = native.tensor_new(base.ctypes.data, (3,), None, (2, 64, 1), (3, 0), 0, base)
        with pytest.raises(errors.DeviceError, match=r"obj\['a'\].* is on cuda_host:0.*device='cpu'"):
            dlx.share(**{how: {"a": pinned}})
        with dlx.share(**{how: dlx.convert({"a": pinned}, to="dlx", device="cpu")}) as handle:
            found = dlx.attach(handle, "numpy")["a"]
        assert found.tolist() == ([0, 1, 2] if how == "obj" else [0, 0, 0])

    def test_memory_of_empty(self):
        tensor = dlx.empty((3,), "bfloat16", shared=True)
        assert tensor.data_ptr % 256 == 0 and not tensor.readonly and tensor.shape == (3,)
        assert dlx.empty(0, "float32", shared=True).nbytes == 0
        with pytest.raises(errors.DeviceError, match="CUDA"):
            dlx.empty(3, "float32", "cuda:0", shared=True)
        with pytest.raises(errors.DeviceError, match="only host and CUDA memory can be shared"):
            dlx.empty(3, "float32", (10, 0), shared=True)

    def test_writable_is_everybodys_and_private_is_not(self, np, torch):
        with dlx.share(np.zeros(4)) as handle:
            reader = dlx.attach(handle, "numpy")
            assert not reader.flags.writeable
            writer = dlx.attach(handle, "torch", writable=True)
            writer[0] = 1
            private = dlx.attach(handle, "torch", readonly="share")
            private[1] = 2
            assert reader.tolist() == [1, 0, 0, 0] and private.tolist() == [1, 2, 0, 0]
            copy = dlx.attach(handle, "torch")
            assert not dlx.shares_memory(copy, private)
            with pytest.raises(errors.ReadOnlyError):
                dlx.attach(handle, "torch", readonly="error")

    def test_private_pages_are_of_each_who_attaches(self, torch):
        with dlx.share(bytearray(3)) as handle:
            one = dlx.attach(handle, "torch", readonly="share")
            one[0] = 7
            assert dlx.attach(handle, "torch", readonly="share").tolist() == [0, 0, 0] and one.tolist() == [7, 0, 0]

    @pytest.mark.unsanitized("the deadly signal is caught and reported")
    @pytest.mark.native("the emulator reports the fault on stderr")
    def test_the_mapping_itself_is_read_only(self, python):
        out = python("""
            import ctypes, os, signal, dlx
            found = dlx.attach(dlx.share(bytearray(b"abc")))
            child = os.fork()
            if child == 0:
                import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                import faulthandler; faulthandler.disable()
                ctypes.memset(found.data_ptr, 0, 1)
                os._exit(0)
            print(os.waitpid(child, 0)[1] & 127 == signal.SIGSEGV)
        """)
        assert out == "True\n"

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: one thread writes")
    def test_a_thread_that_helps_takes_faults_and_no_other_signals(self, python):
        """A helper thread handles page faults and no other signals; small files, and one core, need one thread."""
        program = """
            import ctypes, os, signal, dlx
            from dlx._sharing import sharing
            sharing.has_huge_pages = lambda size: True  # at this moment the machine may have none
            noted = ctypes.CDLL(None)
            def started(size):
                before = noted.threads_started()
                dlx.share(bytearray(size)).close()
                return noted.threads_started() - before
            print(started(1 << 20), started(32 << 20))
            print(*(noted.last_takes(each) for each in (signal.SIGSEGV, signal.SIGBUS, signal.SIGALRM, signal.SIGINT)))
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            print(started(32 << 20))
        """
        preloaded = [*os.environ.get("LD_PRELOAD", "").split(), str(compiled("threads_started"))]
        out = python(program, env=os.environ | {"LD_PRELOAD": " ".join(preloaded)})
        assert out == "0 1\n1 1 0 0\n0\n"

    def test_the_size_can_be_changed_by_nobody(self):
        with dlx.share(bytearray(10)) as handle:
            for size in (0, 1 << 20):
                with pytest.raises(PermissionError):
                    os.ftruncate(handle.fileno(), size)
            assert os.fstat(handle.fileno()).st_mode & 0o777 == 0o600

    def test_what_reads_keeps_its_memory(self):
        handle = dlx.share(bytearray(b"abc"))
        found = dlx.attach(handle)
        handle.close()
        handle.close()
        assert values(found) == b"abc"
        assert dlx.shares_memory(dlx.attach(dict(handle)), found)  # the attached array keeps the memory alive
        del found
        with pytest.raises(errors.HandleError, match="its memory was freed"):
            dlx.attach(dict(handle))
        with pytest.raises(errors.HandleError, match="closed"):
            handle.fileno()

    def test_attaching_twice_maps_once(self):
        with dlx.share(bytearray(3)) as handle:
            before = descriptors()[1]
            one, other = dlx.attach(handle), dlx.attach(handle)
            assert dlx.shares_memory(one, other) and descriptors()[1] == before + 1

    def test_one_descriptor_is_open_for_what_is_attached(self):
        with dlx.share(bytearray(3)) as handle:
            fd = os.open(f"/proc/self/fd/{handle.fileno()}", os.O_RDONLY)
            plain = dict(handle)
        before = descriptors()[0]
        found = dlx.attach(plain, fd=fd)
        assert descriptors()[0] == before + 1
        del found
        os.close(fd)

    @pytest.mark.native("its kernel calls are not passed on")
    @pytest.mark.few(1)
    @pytest.mark.parametrize("kernel", ["unchanged", "no huge pages", "no process_vm_readv"])
    def test_large_memory_is_copied_into_huge_pages_where_the_kernel_makes_them(self, np, python, kernel):
        """With or without huge pages, two threads copy all runs of bytes and all single elements."""
        refused = {"x86_64": 310, "aarch64": 270}.get(platform.machine())  # the number of process_vm_readv
        if kernel == "no process_vm_readv" and refused is None:
            pytest.skip(f"the number of process_vm_readv on {platform.machine()} is not known here")
        out = python(f"""
            import ctypes, os, pathlib, re, struct
            import numpy as np
            import dlx
            from dlx._core.extension import ffi, lib
            from dlx._sharing import sharing

            sharing.has_huge_pages = lambda size: True  # free memory depends on other processes
            libc = ctypes.CDLL(None, use_errno=True)
            if {kernel == "no huge pages"}:
                assert libc.prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
            if {kernel == "no process_vm_readv"}:  # with a seccomp filter, as in containers
                # load the call's number; unless it is this one, skip one; EPERM; allow
                steps = (0x20, 0, 0, 0), (0x15, 0, 1, {refused}), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)
                code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
                assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
                assert libc.prctl(22, 2, struct.pack("H6xQ", len(steps), ctypes.addressof(code)), 0, 0) == 0
                assert libc.process_vm_readv(0, None, 0, None, 0, 0) == -1 and ctypes.get_errno() == 1

            def probe(size=64 << 20, huge=2 << 20):  # twice the size shared below; returns errno or 0
                fd = os.memfd_create("probe")
                os.ftruncate(fd, size)
                pages = lib.dlx_map(fd, size, lib.DLX_MAP_WRITE)
                address = int(ffi.cast("uintptr_t", pages))
                for at in range(address, address + size, huge):
                    ctypes.memset(at, 1, 1)
                failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), 25)  # MADV_COLLAPSE
                error = ctypes.get_errno() if failed else 0
                lib.dlx_unmap(pages, size)
                os.close(fd)
                return error

            run = np.random.default_rng(1).integers(0, 256, (17 << 20) + 3, np.uint8)
            small = [run[i : i + 70].copy() for i in range(0, 3 << 20, 300)]
            odd = run[: 3 << 20].reshape(-1, 3)[::2, 1].astype("f8"), np.arange(1 << 20).reshape(4, -1)[:, ::3]
            tree = [run, *small, *odd, run[: 5 << 20].copy()]
            before = probe()
            with dlx.share(tree) as handle:
                found = dlx.attach(handle, "numpy")
            after = probe()
            assert all(np.array_equal(a, b) for a, b in zip(found, tree, strict=True))
            maps = pathlib.Path("/proc/self/smaps").read_text()
            huge = re.findall(r"memfd:dlx.*?ShmemPmdMapped: +([0-9]+)", maps, re.DOTALL)
            print(before, after, int(any(map(int, huge))))
        """)
        before, after, is_huge = map(int, out.split())
        if kernel == "no huge pages":
            assert before
            assert not is_huge
        elif {before, after} & {errno.ENOMEM, errno.EAGAIN, errno.EBUSY}:
            pytest.skip("the kernel makes huge pages on request, and finds no memory for them now")
        else:
            assert is_huge == (before == 0)

    def test_arrays_are_made_where_the_target_takes_them(self, np, torch):
        """Arrays are created without a dlx.Tensor; None if one must be copied or is refused."""
        from dlx._core.types import READ_ONLY
        from dlx._sharing.handle import find_segment

        fast_path = dlx.convert
        with dlx.share({"a": np.arange(3.0), "b": [np.ones((2, 2), np.int8).T]}) as handle:
            segment = find_segment(handle, None, os.O_RDWR)
            numbers, _, _ = segments.read_description(segment)
            mapping = segment.mapping("write")
            given = mapping.address + segment.start, segment.size - segment.start, numbers
            one, other = native.arrays_unpack(*given, 0, mapping, fast_path, "torch")
            assert one.tolist() == [0, 1, 2] and other.shape == (2, 2) and one.data_ptr() % 256 == 0
            found = native.arrays_unpack(*given, READ_ONLY, mapping, fast_path, "numpy")
            assert not found[0].flags.writeable and found[0].ctypes.data == one.data_ptr()
            assert native.arrays_unpack(*given, READ_ONLY, mapping, fast_path, "torch") is None
            assert native.arrays_unpack(*given, 0, mapping, fast_path, "dlx") is None
            wrong = numbers[:24].tobytes() + (1 << 40).to_bytes(8, "little") + numbers[32:].tobytes()
            with pytest.raises(ValueError):
                native.arrays_unpack(*given[:2], wrong, 0, mapping, fast_path, "torch")
            with dlx.trace() as told:
                dlx.attach(handle, "torch", writable=True)
            assert [each.times for each in told.records if each.outcome == "shared"]

    def test_a_refused_array_is_told_by_its_place(self, np, torch):
        tree, place = {"a": [np.ones(2), dlx.empty(3, "int4")]}, r"obj\['a'\]\[1\]"
        with dlx.share(tree) as handle, pytest.raises(errors.DTypeError, match=place):
            dlx.attach(handle, "torch", writable=True)

    def test_a_target_that_fails_leaves_nothing(self, torch):
        with dlx.share(dlx.empty(3, "int4")) as handle, pytest.raises(errors.DTypeError):
            dlx.attach(handle, "torch")
        with pytest.raises(errors.AdapterNotFoundError):
            dlx.attach(handle, "nothing_of_this_name")


class TestHandle:
    """Handles, and ways to send them."""

    def test_it_is_a_few_builtin_values(self):
        with dlx.share({"a": [dlx.empty(5, "uint8")] * 1000}) as handle:
            assert {*map(type, handle.values())} == {int, str} and len(json.dumps(handle)) < 200
            assert json.loads(json.dumps(handle)) == dict(handle)
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                found = pickle.loads(pickle.dumps(handle, protocol))
                assert type(found) is dict and found == handle
            assert b"dlx." not in pickle.dumps(handle)
            assert repr(handle).startswith("Handle({") and dlx.attach(found)["a"][0].nbytes == 5

    def test_a_forked_process(self, python, np):
        """It reads the parent's arrays, and writes to them if allowed."""
        out = python(
            """
            import multiprocessing
            import numpy as np
            import dlx

            tensor = dlx.empty((4,), "int64", shared=True)
            array = np.asarray(tensor)
            array[:] = range(4)

            def double(handle):
                dlx.attach(handle, to="numpy", writable=True)["a"][:] *= 2

            with dlx.share({"a": array, "b": np.arange(3.0)}) as handle:
                worker = multiprocessing.get_context("fork").Process(target=double, args=(handle,))
                worker.start()
                worker.join(60)
            print(worker.exitcode, array.tolist())
        """,
            args=(),
        )
        assert out == "0 [0, 2, 4, 6]\n"

    def test_a_spawned_process(self, np):
        """It reads and writes this process's arrays, and keeps them alive after this process exits."""
        context = multiprocessing.get_context("spawn")
        tensor = dlx.empty((4,), "int64", shared=True)
        array = np.asarray(tensor)
        array[:] = range(4)
        with dlx.share({"a": array, "b": np.arange(3.0)}) as handle:
            worker = context.Process(target=_double, args=(handle,))
            worker.start()
            worker.join(60)
        assert worker.exitcode == 0 and array.tolist() == [0, 2, 4, 6]

    def test_a_descriptor_by_a_socket(self, python, tmp_path):
        """A sent descriptor can be attached after the process that shared it has exited."""
        out = python("""
            import json, os, socket, dlx
            a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            child = os.fork()
            if child == 0:
                handle = dlx.share({"x": dlx.from_dlpack(b"abc")})
                socket.send_fds(b, [json.dumps(handle).encode()], [handle.fileno()])
                os._exit(0)
            os.waitpid(child, 0)
            text, (fd,), _, _ = socket.recv_fds(a, 1000, 1)
            handle = json.loads(text)
            try:
                dlx.attach(handle)
            except dlx.errors.HandleError as error:
                print("no process" in str(error))
            found = dlx.attach(handle, fd=fd)
            os.close(fd)
            a.close(); b.close()
            print(found["x"].tobytes(), dlx.attach(dlx.share(found), fd=None)["x"].tobytes())
        """)
        assert out == "True\nb'abc' b'abc'\n"

    def test_send_handle_of_multiprocessing(self):
        from multiprocessing import reduction

        a, b = multiprocessing.Pipe()
        with dlx.share(b"abc") as handle:
            # From Python 3.14 on the sender waits until it was received.
            sending = threading.Thread(target=reduction.send_handle, args=(a, handle.fileno(), os.getpid()))
            sending.start()
            fd = reduction.recv_handle(b)
            sending.join()
            a.send(handle)
            received = b.recv()  # its descriptor, too
        found = dlx.attach(dict(received), fd=fd)
        os.close(fd)
        a.close()
        b.close()
        resource_sharer.stop(5)  # the thread that sent the handle
        assert values(found) == values(dlx.attach(received)) == b"abc"

    def test_several_pieces_have_no_one_descriptor(self):
        with dlx.share([dlx.empty(3, "uint8", shared=True), b"x"]) as handle:
            with pytest.raises(errors.HandleError, match="1 pieces of memory that were shared before"):
                handle.fileno()
            assert len(dlx.attach(handle)) == 2
        with pytest.raises(errors.HandleError, match=r"it is closed\. Share the arrays again\.$"):
            handle.fileno()

    def test_a_file_carries_it(self, tmp_path, python):
        file = tmp_path / "handle.json"
        with dlx.share({"x": dlx.from_dlpack(b"abc")}) as handle:
            file.write_text(json.dumps(handle))
            code = f"import dlx, json; print(dlx.attach(json.load(open({str(file)!r})))['x'].tobytes())"
            assert python(f"import warnings; warnings.simplefilter('ignore')\n{code}") == "b'abc'\n"


def _double(handle):
    """Double shared numbers in place; runs in another process."""
    found = dlx.attach(handle, "numpy", writable=True)
    assert found["b"].tolist() == [0, 1, 2] and dlx.attach(handle, "numpy")["a"].tolist() == [0, 1, 2, 3]
    found["a"] *= 2


class TestForeign:
    """Invalid handles, and handles whose memory was freed."""

    @pytest.mark.parametrize("change", [
        {"pid": -1}, {"pid": 1 << 80}, {"fd": -1}, {"fd": 10**6}, {"inode": 1}, {"size": 300}, {"size": -1},
        {"token": "0" * 32}, {"token": "../../x"}, {"dlx": 2}, {"dlx": "1"}, {"pid": "self"}, {"pid": True},
        {"extra": 1}, {"fd": 0.5}, {"token": None},
    ], ids=str)  # fmt: skip
    def test_a_changed_handle_is_refused(self, change, monkeypatch):
        """A process that has not opened the segment refuses it."""
        with dlx.share(bytearray(b"abc")) as handle:
            monkeypatch.setattr(segments, "_held", weakref.WeakValueDictionary())
            assert dlx.attach(handle).nbytes == 3
            segments._held.clear()
            with pytest.raises(errors.HandleError):
                dlx.attach({**handle, **change})

    @pytest.mark.parametrize("handle", [None, 3, "text", b"", [], object()], ids=lambda each: type(each).__name__)
    def test_no_handle_at_all(self, handle):
        with pytest.raises(TypeError, match=r"a handle of dlx\.share"):
            dlx.attach(handle)
        with pytest.raises(errors.HandleError, match=r"not a handle of dlx\.share with dlx, pid"):
            dlx.attach({})

    @pytest.mark.parametrize("kind", ["file", "memfd", "sealed", "pipe", "socket", "tty", "closed"])
    def test_a_descriptor_of_something_else(self, kind, tmp_path):
        """Descriptors of other files are refused, whether taken from another process or received."""
        held = []
        if kind == "file":
            (tmp_path / "x").write_bytes(bytes(4096))
            fd = os.open(tmp_path / "x", os.O_RDWR)
        elif kind in ("memfd", "sealed"):
            fd = os.memfd_create("dlx", os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, 4096)
            if kind == "sealed":
                import fcntl

                fcntl.fcntl(fd, 1033, 7)
        elif kind == "pipe":
            fd, other = os.pipe()
            held.append(lambda: os.close(other))
        elif kind == "socket":
            pair = socket.socketpair()
            fd = os.dup(pair[0].fileno())
            held += [each.close for each in pair]
        elif kind == "tty":
            fd, other = os.openpty()
            held.append(lambda: os.close(other))
        else:
            fd = os.dup(0)
            os.close(fd)
        handle = {"dlx": 1, "pid": os.getpid(), "fd": fd, "inode": 1, "size": 4096, "token": "1" * 32}
        if kind != "closed":
            handle["inode"] = os.fstat(fd).st_ino
            held.append(lambda: os.close(fd))
        for given in (None, fd):
            with pytest.raises(errors.HandleError):
                dlx.attach(handle, fd=given)
        for close in held:
            close()

    def test_every_seal_is_needed(self, monkeypatch):
        """A copy of a segment is refused unless it has all seals."""
        import fcntl

        monkeypatch.setattr(segments, "_held", weakref.WeakValueDictionary())
        with dlx.share(bytearray(b"abc")) as handle:
            content = os.pread(handle.fileno(), handle["size"], 0)
            for seals in range(8):
                segments._held.clear()
                fd = os.memfd_create("dlx", os.MFD_ALLOW_SEALING)
                os.write(fd, content)
                fcntl.fcntl(fd, 1033, seals)
                plain = {**handle, "fd": fd, "inode": os.fstat(fd).st_ino}
                for given in (None, fd):
                    if seals == 7:
                        assert values(dlx.attach(plain, fd=given)) == b"abc"
                    else:
                        with pytest.raises(errors.HandleError, match="it is not sealed"):
                            dlx.attach(plain, fd=given)
                os.close(fd)

    def test_a_segment_of_huge_pages_is_refused(self, monkeypatch):
        """A reader would be killed if the system lacked a huge page."""
        import fcntl

        try:
            fd = os.memfd_create("dlx", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
        except OSError:
            pytest.skip("no huge pages here")
        os.ftruncate(fd, 1 << 30)
        fcntl.fcntl(fd, 1033, 7)
        plain = {"dlx": 1, "pid": os.getpid(), "fd": fd, "inode": os.fstat(fd).st_ino, "size": 1 << 30}
        for given in (None, fd):
            with pytest.raises(errors.HandleError, match="huge pages"):
                dlx.attach({**plain, "token": "1" * 32}, fd=given)
        os.close(fd)

    def test_a_descriptor_closed_behind_our_back_is_noticed_and_never_closed_twice(self):
        handle = dlx.share(b"abc")
        fd = handle.fileno()
        os.close(fd)
        other = os.open("/dev/null", os.O_RDONLY)
        assert other == fd
        with pytest.raises(errors.HandleError, match="other code has closed"):
            handle.fileno()
        handle.close()
        gc.collect()
        os.close(other)  # it is still open

    @pytest.mark.parametrize("text", [
        b"", b"{", b"[]", b"{}", b"null", b"[" * 100_000,
        b'{"numbers":[0],"segments":[],"tree":[0,[["list",null,[5]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["tuple",null,[0]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["tuple",null,[1]],["tuple",null,[0]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["os.system",null,[]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["dict",["a","a"],[[1],[2]]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["dict",["a"],[]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["dict",[{"bytes":"!"}],[[1]]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["set",null,[1]],["list",null,[]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["list",null,[[[1]]]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["deque -3",null,[]]]]}',
        b'{"numbers":[0],"segments":[],"tree":[-1,[]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["list",null,{"arrays":[0,1]}]]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["tuple",null,{"arrays":[-1,0]}]]]}',
        b'{"numbers":[-1],"segments":[],"tree":[0,[]]}', b'{"numbers":[],"segments":[],"tree":[0,[]]}',
        b'{"numbers":[true],"segments":[],"tree":[0,[]]}', b'{"numbers":[1],"segments":[],"tree":[0,[]]}',
        b'{"numbers":[0,0],"segments":[[0,0,0,"x"]],"tree":[0,[]]}',
        b'{"numbers":[0,0],"segments":[["0",0,0,"x"]],"tree":[0,[]]}',
        b'{"numbers":[0],"segments":[],"tree":[0,[["list",null,[[1]]]]]}]',
        b'{"numbers":[0],"segments":[],"tree":[0,[["list",null,[[1]]]]]}{}',
        b'{"numbers":[0],"segments":7,"tree":[0,[]]}', b'{"numbers":[0],"segments":[],"tree":null}',
    ], ids=lambda text: text[:60].decode())  # fmt: skip
    def test_a_forged_description_is_refused(self, text):
        from dlx._sharing.handle import create_handle

        handle = create_handle(segments.new_segment(256, b"", text), ())
        with pytest.raises(errors.HandleError):
            dlx.attach(handle)

    @pytest.mark.parametrize("numbers", [
        # offset, code, bits, lanes, ndim, flags, is row-major, 0; shape; strides
        (0, 1, 8, 1, 1, 0, 1, 0, 1 << 20), (0, 1, 8, 1, 1, 0, 0, 0, 1 << 20, 1), (1 << 40, 1, 8, 1, 1, 0, 1, 0, 1),
        (-1, 1, 8, 1, 1, 0, 1, 0, 1), (0, 1, 8, 1, 1, 0, 1, 0, -1), (0, 1, 8, 1, 2, 0, 1, 0, 1 << 62, 1 << 62),
        (0, 1, 8, 1, 2, 0, 0, 0, 1 << 62, 1 << 62, 1, 1), (0, 1, 8, 1, 1, 0, 0, 0, 2, 1 << 61),
        (0, 1, 8, 1, 1, 0, 0, 0, 2, -1), (64, 1, 8, 1, 1, 0, 0, 0, 100, -1), (0, 1, 8, 1, 129, 0, 1, 0, *[1] * 129),
        (0, 1, 8, 1, 3, 0, 1, 0, 1, 1), (0, 1, 8, 1, 1, 0, 0, 0, 1), (0, 1, 8, 1, 1, 1, 1, 0, 1),
        (0, 1, 8, 1, 1, 0, 2, 0, 1), (0, 1, 8, 1, 1, 0, 1, 1, 1), (0, 3, 64, 1, 1, 0, 1, 0, 1),
        (0, 1, 0, 1, 1, 0, 1, 0, 1), (0, 1, 8, 0, 1, 0, 1, 0, 1), (1 << 62, 1, 64, 1, 1, 0, 1, 0, 1 << 62),
        (0, 1, 255, 1 << 15, 1, 0, 1, 0, 1 << 62),
        (0, 1, 8, 1, 1, 0, 1, 0, 1, 1), (0, 1, 4, 1, 1, 4, 1, 0, 257), (0, 1, 4, 1, 1, 0, 1, 0, 513),
    ], ids=str)  # fmt: skip
    def test_forged_numbers_are_refused(self, numbers):
        import struct

        from dlx._sharing.handle import create_handle

        raw = struct.pack(f"=q2BH4B{len(numbers) - 8}q", *numbers)
        text = json.dumps({"numbers": [len(raw)], "segments": [], "tree": [-1, []]}).encode()
        handle = create_handle(segments.new_segment(256, raw, text), ())
        with pytest.raises(errors.HandleError, match=r"its description is invalid: ."):
            dlx.attach(handle)

    def test_numbers_that_are_cut_off_are_refused(self):
        from dlx._sharing.handle import create_handle

        text = json.dumps({"numbers": [8], "segments": [], "tree": [-1, []]}).encode()
        with pytest.raises(errors.HandleError, match=r"its description is invalid: ."):
            dlx.attach(create_handle(segments.new_segment(256, bytes(8), text), ()))

    def test_numbers_that_are_left_over_are_written_nowhere(self, python):
        """The shortest numbers, of arrays without dimensions, come first; a debug allocator detects overflows."""
        out = python("""
            import json, struct, dlx
            from dlx._sharing.handle import create_handle
            from dlx._sharing.segment import new_segment

            for n in (0, 1, 2, 4, 6, 31):
                raw = struct.pack("=q2BH4B", 0, 2, 32, 1, 0, 0, 1, 0) * n + bytes(8)
                said = {"tree": [-1, []], "segments": [], "numbers": [len(raw)]}
                segment = new_segment(256, raw, json.dumps(said).encode())
                try:
                    dlx.attach(create_handle(segment, ()))
                except dlx.errors.HandleError as error:
                    print("its description is invalid: " in str(error))
        """)
        assert out == "True\n" * 6

    @pytest.mark.parametrize(("names", "first", "end"), [
        (b"a\0b", 0, 1), (b"a\0b\0c", 0, 5), (b"a\0a", 0, 3), (b"a\0\xff", 0, 3), (b"", 0, 0), (b"a\0b", 0, "3"),
        (b"a\0b", 5, 9), (b"a\0b\0", 0, 4), (b"a\0b", 0, 4), (b"a\0b", -3, 3), (b"a\0b", 3, 0),
    ], ids=str)  # fmt: skip
    def test_forged_names_are_refused(self, names, first, end):
        from dlx._sharing.handle import create_handle

        said = {"numbers": [0], "segments": [], "tree": [0, [["dict", {"names": [first, end]}, [[1], [2]]]]]}
        handle = create_handle(segments.new_segment(256, b"", json.dumps(said).encode(), names), ())
        with pytest.raises(errors.HandleError):
            dlx.attach(handle)

    @pytest.mark.parametrize("keys", [
        ["a", "b"], ["", "\ud800"], ["a\0b", "c"], ["é", "日本"], [""], ["a" * 300, ""], [1, "a"], [],
    ], ids=ascii)  # fmt: skip
    def test_keys_of_any_text(self, keys):
        for kind in (dict, collections.OrderedDict):
            tree = kind((key, dlx.from_dlpack(bytearray([n]))) for n, key in enumerate(keys))
            with dlx.share([tree, {"x": 1}]) as handle:
                found, other = dlx.attach(handle)
            assert type(found) is kind and list(found) == keys and other == {"x": 1}
            assert [values(each) for each in found.values()] == [bytes([n]) for n in range(len(keys))]

    def test_random_damage_kills_nobody(self, python):
        """After random changes of a description, attaching raises an error or returns readable arrays."""
        out = python("""
            import os, random, dlx
            random.seed(4)
            tree = {"a": [dlx.empty(100, "uint8"), dlx.from_dlpack(b"xy")], "b": (dlx.empty((3, 4), "float32"), 1.5)}
            tree["c"] = {"d": None}
            refused = 0
            for _ in range(300):
                handle = dlx.share(tree)
                fd = handle.fileno()
                for _ in range(random.choice((1, 1, 2, 8))):
                    os.pwrite(fd, random.randbytes(random.choice((1, 1, 8))), random.randrange(256, 900))
                try:
                    found = [dlx.attach(handle)]
                except dlx.errors.HandleError:
                    refused += 1
                    continue
                while found:
                    each = found.pop()
                    if isinstance(each, dlx.Tensor):
                        dlx.convert(each, "dlx", copy=True)
                    elif isinstance(each, (list, tuple)):
                        found += each
                    elif isinstance(each, dict):
                        found += each.values()
            print(50 < refused < 300)
        """)
        assert out == "True\n"

    def test_whatever_is_changed_in_a_handle(self):
        """Thousands of changed handles, also with other descriptors, raise an error or attach, and leak nothing."""
        command = program("stress.forged_handles")
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith(" 0 descriptors left\n") and done.stderr == ""

    def test_a_forged_header_is_refused(self, python):
        """A process that has not opened the segment refuses it."""
        out = python("""
            import os, dlx
            def refused(at, raw):
                handle = dlx.share(bytearray(b"abc"))
                os.pwrite(handle.fileno(), raw, at)
                child = os.fork()
                if child == 0:
                    from dlx._sharing import segment
                    segment._held.clear()
                    try:
                        dlx.attach(dict(handle))
                    except dlx.errors.HandleError as error:
                        os._exit(0)
                    os._exit(1)
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            big = (1 << 62).to_bytes(8, "little")
            print(refused(0, b"x"), refused(8, b"\\x01"), refused(8, b"\\x03"), refused(16, bytes(16)))
            print(refused(32, big), refused(40, big), refused(48, big), refused(48, b"\\x01"), refused(1000, b""))
        """)
        assert out == "True True True True\nTrue True True True False\n"

    def test_a_recycled_descriptor_number_is_noticed(self):
        first = dlx.share(b"first")
        plain = dict(first)
        first.close()
        del first
        with dlx.share(b"other") as second:
            assert second["fd"] == plain["fd"]
            with pytest.raises(errors.HandleError):
                dlx.attach(plain)


class TestLeaks:
    """Descriptors and memory are released on every path."""

    def test_failures_leave_nothing(self):
        before = descriptors()
        for _ in range(20):
            with pytest.raises(errors.ConversionError):
                dlx.share([bytearray(10), object()])
            with dlx.share(bytearray(5)) as handle, pytest.raises(errors.HandleError):
                dlx.attach({**handle, "inode": 0, "token": "1" * 32})
        assert descriptors() == before

    def test_no_descriptor_left(self, python):
        """If no file can be opened, the error is an OSError with advice."""
        out = python("""
            import os, resource, dlx
            tensor = dlx.from_dlpack(bytearray(4))
            dlx.attach(dlx.share(tensor))
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, 100))
            for call in (lambda: dlx.share(tensor), lambda: dlx.empty(3, "uint8", shared=True)):
                try:
                    call()
                except OSError as error:
                    print(type(error).__name__, error.errno, error.strerror)
        """)
        first, second = out.splitlines()
        assert first == second and first.startswith("OSError 24 this process cannot open more files, and each handle")
        assert "ulimit -n" in first

    def test_no_descriptor_left_on_the_machine(self, monkeypatch):
        """The error names the machine's limit, both in share and in attach."""

        def fail(*_):
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

        with dlx.share(bytearray(b"abc")) as handle:
            monkeypatch.setattr(segments, "_held", weakref.WeakValueDictionary())
            monkeypatch.setattr(os, "memfd_create", fail)
            monkeypatch.setattr(os, "open", fail)
            for call in (lambda: dlx.share(bytearray(b"abc")), lambda: dlx.attach(handle)):
                with pytest.raises(OSError, match="this machine cannot open more files, and each handle") as caught:
                    call()
                assert caught.value.errno == errno.ENFILE
            monkeypatch.undo()

    def test_processes_end_with_results_in_globals(self, python):
        python("""
            import dlx, os, sys
            held = dlx.share({"a": bytearray(10)})
            found = dlx.attach(held, writable=True)
            made = dlx.empty(3, "float32", shared=True)
            cycle = [held, found, made]; cycle.append(cycle)
            child = os.fork()
            if child == 0:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
        """)

    @pytest.mark.parametrize("kind", ["set", "frozenset"])
    @pytest.mark.parametrize("shape", [pytest.param("chain", marks=pytest.mark.slow), "doubled"])
    def test_a_set_of_what_is_nested_too_deep_is_refused(self, kind, shape, python):
        """Python hashes nested tuples recursively, and repeated ones each time."""
        out = python(f"""
            import json, dlx
            from dlx._sharing.handle import create_handle
            from dlx._sharing.segment import new_segment
            count, times = (200_000, 1) if {shape!r} == "chain" else (100, 2)
            nodes = [[{kind!r}, None, [1]]] + [["tuple", None, [i + 1] * times] for i in range(1, count)]
            text = json.dumps({{"tree": [0, nodes + [["tuple", None, []]]], "segments": [], "numbers": [0]}})
            try:
                dlx.attach(create_handle(new_segment(0, b"", text.encode()), ()))
            except dlx.errors.HandleError as error:
                print("nested" in str(error))
        """)
        assert out == "True\n"

    @pytest.mark.parametrize("place", ["key", "set"])
    @pytest.mark.parametrize("depth", [190, 250, 3000])
    def test_what_could_not_be_attached_is_not_shared(self, place, depth):
        deep = ()
        for _ in range(depth):
            deep = (deep,)
        tree = [b"", {deep: 1} if place == "key" else {deep}]
        if depth < 200:
            with dlx.share(tree) as handle:
                assert dlx.attach(handle)[1] == tree[1]
            return
        with pytest.raises(errors.ConversionError, match=r"obj\[1\].*200 levels"):
            dlx.share(tree)


class TestThreads:
    """Other threads attach and release at the same time."""

    def test_a_segment_that_is_released_is_not_found_again(self, monkeypatch):
        """While its descriptor is closed, no other thread gets it: the number may be another segment next."""
        found = []
        real, *others = segments.Descriptor.__del__.__defaults__
        handle = dlx.share(b"first")
        token, fd = handle["token"], handle["fd"]

        def close(number):
            if number == fd:
                found.append(segments._held.get(token))
            real(number)

        monkeypatch.setattr(segments.Descriptor.__del__, "__defaults__", (close, *others))
        handle.close()
        assert found == [None]

    def test_what_is_mapped_is_the_segment(self, monkeypatch):
        """Another segment takes the descriptor's number after the last check and before mapping."""
        real = segments._Pages
        other = dlx.share(b"other")

        def replaced(fd, *args):
            os.dup2(other.fileno(), fd)
            return real(fd, *args)

        with other, dlx.share(b"first") as handle:
            fd = handle["fd"]
            monkeypatch.setattr(segments, "_Pages", replaced)
            with pytest.raises(errors.HandleError, match="other code has closed"):
                dlx.attach(handle)
        os.close(fd)

    def test_what_is_mapped_is_the_segment_though_it_is_back_at_once(self, monkeypatch):
        """As above, but the descriptor is restored before the next check."""
        real = segments._Pages
        other = dlx.share(b"other")

        def replaced(fd, *args):
            kept = os.dup(fd)
            os.dup2(other.fileno(), fd)
            try:
                return real(fd, *args)
            finally:
                os.dup2(kept, fd)
                os.close(kept)

        with other, dlx.share(b"first") as handle:
            monkeypatch.setattr(segments, "_Pages", replaced)
            with pytest.raises(errors.HandleError, match="header overwritten"):
                dlx.attach(handle)

    def test_a_header_that_another_process_wrote_over(self):
        with dlx.share(b"first") as handle:
            os.pwrite(handle.fileno(), bytes(16), 16)
            with pytest.raises(errors.HandleError, match="header overwritten"):
                dlx.attach(handle)

    def test_mappings_come_and_go_meanwhile(self, python):
        """Sharing iterates over all mappings while other threads create and drop some."""
        out = python("""
            import sys, threading, dlx
            sys.setswitchinterval(1e-6)
            failed = []

            def work():
                kept = []
                try:
                    for i in range(150):
                        with dlx.share(bytearray(4)) as handle:
                            kept.append(dlx.attach(handle))
                        if i % 30 == 29:
                            kept.clear()
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=work) for _ in range(5)]
            [each.start() for each in threads]
            [each.join() for each in threads]
            print(failed)
        """)
        assert out == "[]\n"


class TestLimits:
    """Exhausted resources, and invalid numbers."""

    def test_another_user(self, python):
        """Another user can neither open the process's files nor use a received descriptor."""
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        out = python("""
            import os, dlx
            from dlx._sharing import segment
            handle = dlx.share(b"abc")
            segment._held.clear()
            for fd in (None, os.open("/dev/null", os.O_RDONLY)):
                try:  # import first: the other user may lack access
                    dlx.attach(dict(handle, fd=1 << 20), fd=fd)
                except dlx.errors.HandleError as error:
                    assert error.reason
            child = os.fork()
            if child == 0:
                os.setuid(65534)
                for fd in (None, handle["fd"]):
                    try:
                        dlx.attach(dict(handle), fd=fd)
                    except dlx.errors.HandleError as error:
                        print(error.reason, flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        """)
        first, second = out.splitlines()
        assert first.startswith("this process may not open the files of process")
        assert second == "its segment belongs to user 0, and this process to user 65534"

    def test_nothing_depends_on_what_is_mounted(self, python, tmp_path):
        """A full /dev/shm does not affect memfds; without /proc, the descriptor must be sent."""
        code = """
            import os, subprocess, dlx
            from dlx._sharing import segment
            handle = dlx.share(bytearray(8 << 20))
            tensor = dlx.share(dlx.empty(8 << 20, "uint8", shared=True))
            print(os.statvfs("/dev/shm").f_blocks < 1000, handle["size"] > 8 << 20)
            subprocess.run(["mount", "-t", "tmpfs", "none", "/proc"], check=True)
            segment._held.clear()
            try:
                dlx.attach(dict(handle))
            except dlx.errors.HandleError as error:
                print("/proc" in error.reason, "fd=" in error.fix)
            found = dlx.attach(dict(handle), fd=handle["fd"])
            print(found.nbytes)
        """
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(code))
        mounted = f"mount -t tmpfs -o size=64k none /dev/shm && exec {shlex.join([sys.executable, str(file)])}"
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounted]
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            pytest.skip("only root may mount, and unshare has to be there")
        if subprocess.run([*command[:-1], "mount -t tmpfs none /dev/shm"], check=False).returncode:
            pytest.skip("this process may mount nothing")
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.stdout.split() == ["True", "True", "True", "True", str(8 << 20)], done.stderr

    def test_a_limit_on_the_size_of_files(self, python):
        """The limit applies to segments and raises an error instead of a signal."""
        out = python("""
            import resource, dlx
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            for call in (lambda: dlx.share(bytearray(2 << 20)), lambda: dlx.empty(2 << 20, "uint8", shared=True)):
                try:
                    call()
                except OSError as error:
                    print(error.strerror)
            print(dlx.attach(dlx.share(b"abc")).nbytes)
        """)
        assert out == "File too large\nFile too large\n3\n"

    @pytest.mark.native("it does not bound the address space")
    @pytest.mark.unsanitized("the address space that it bounds is what they need")
    def test_no_descriptor_and_no_memory_left_are_no_fault_of_the_handle(self, python):
        with dlx.share(bytearray(3)) as handle:
            out = python(f"""
                import os, resource, dlx
                plain = {dict(handle)}
                dlx.attach(plain)
                given = os.open(f"/proc/{{plain['pid']}}/fd/{{plain['fd']}}", os.O_RDWR)
                top = given + 1
                for more in (0, 1):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (top + more, 100))
                    for fd in (None, given):
                        try:
                            print(dlx.attach(plain, fd=fd).nbytes)
                        except OSError as error:
                            print(error.errno)
                resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
                resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
                try:
                    dlx.empty((8 << 30,), "uint8", shared=True)
                except MemoryError as error:
                    print("memory")
            """)
        lines = out.split()
        assert lines[:2] == ["24", "24"] and {*lines[2:4]} <= {"24", "3"} and lines[4:] == ["memory"]

    @pytest.mark.parametrize("name", ["pid", "fd", "size", "inode"])
    @pytest.mark.parametrize("value", [-1, 1 << 64, 10**5000], ids=["negative", "64 bits", "huge"])
    def test_numbers_that_nothing_has(self, name, value):
        with dlx.share(bytearray(3)) as handle, pytest.raises(errors.HandleError):
            dlx.attach({**handle, name: value})

    @pytest.mark.parametrize("fd", [-1, 1 << 40, 10**5000], ids=["negative", "large", "huge"])
    def test_descriptors_that_nobody_has(self, fd, monkeypatch):
        with dlx.share(bytearray(3)) as handle:
            monkeypatch.setattr(segments, "_held", weakref.WeakValueDictionary())
            with pytest.raises(errors.HandleError):
                dlx.attach(handle, fd=fd)

    def test_a_descriptor_that_cannot_be_read(self, monkeypatch):
        with dlx.share(bytearray(3)) as handle:
            monkeypatch.setattr(segments, "_held", weakref.WeakValueDictionary())
            for flag in (os.O_WRONLY, os.O_PATH):
                fd = os.open(f"/proc/self/fd/{handle.fileno()}", flag)
                with pytest.raises(errors.HandleError):
                    dlx.attach(handle, fd=fd)
                os.close(fd)

    def test_a_text_that_was_never_written_is_not_read(self, monkeypatch):
        """Reading it would allocate a terabyte of zeros."""
        from dlx._sharing.handle import create_handle

        size = 1 << 40
        segment = segments.new_segment(size, b"", b"{}")
        token = bytes.fromhex(segment.token)
        head = segments._HEAD.pack(segments._MAGIC, segments.VERSION, token, segment.size, 0, size, 0)
        os.pwrite(segment.fd, head, 0)
        plain = dict(create_handle(segment, ()))
        monkeypatch.setattr(segments, "_held", weakref.WeakValueDictionary())
        with pytest.raises(errors.HandleError, match="larger than the allocated memory"):
            dlx.attach(plain)


@pytest.mark.parametrize("size", [1 << 20, 4 << 20, 20 << 20])
def test_memory_whose_file_has_become_shorter_is_refused(python, np, tmp_path, size):
    """The kernel copies the memory and reports the error; a read would kill the process."""
    python(
        f"""
        import os, numpy as np, dlx
        memory = np.memmap({str(tmp_path / "file")!r}, np.uint8, "w+", shape={size})
        os.truncate({str(tmp_path / "file")!r}, 4096)
        try:
            dlx.share(np.asarray(memory))
        except dlx.errors.DlxError as error:
            assert "cannot be read" in str(error), error
        else:
            raise AssertionError("it was shared")
        """
    )


def test_a_descriptor_that_was_closed_is_named(python, np):
    """The HandleError names it, also when the memory is mapped for writing."""
    python(
        """
        import os, dlx
        from dlx._sharing.segment import new_segment

        segment = new_segment(100, b"", b"{}")
        kept = os.dup(segment.fd)
        os.close(segment.fd)
        try:
            segment.mapping("write")
        except dlx.errors.HandleError:
            os.dup2(kept, segment.fd)  # it is closed with the segment
        else:
            raise AssertionError("it was mapped")
        """
    )


FIELDS = [  # offset, bits, shape, strides of a tensor in 64 bytes: every offset and extent up to one too many
    *((offset, 8, (extent,), None) for offset in range(-2, 67) for extent in (0, 1, 2, 31, 32, 33, 62, 63, 64, 65)),
    *((offset, 32, (2, extent), None) for offset in range(0, 68, 2) for extent in range(10)),
    *((offset, 16, (3,), (stride,)) for offset in range(66) for stride in (-33, -16, -1, 0, 1, 2, 15, 16, 30, 31, 32)),
    *((offset, 4, (extent,), None) for offset in (0, 1, 31, 62, 63, 64) for extent in (1, 2, 3, 125, 127, 128, 129)),
    *((offset, 64, (1 << 61, 8, 0), None) for offset in (0, 64, 65)),
    *((offset, 8, (1 << 62, 4), None) for offset in (0, 1, 63)),
    *((0, 8, (1 << bits,), None) for bits in range(7, 63)),
    *((1 << bits, 8, (1,), None) for bits in range(7, 63)),
]  # fmt: skip


def test_every_number_of_a_forged_description(np):
    """A tensor is returned if all its elements are inside the memory, and refused otherwise."""
    from dlx._sharing.handle import create_handle

    data, given = bytes(range(64)), 0
    for offset, bits, shape, strides in FIELDS:
        said = struct.pack("=q2BH4B", offset, 1, bits, 1, len(shape), 0, strides is None, 0)
        said += struct.pack(f"={len(shape)}q", *shape) + struct.pack(f"={len(strides or ())}q", *strides or ())
        text = json.dumps({"numbers": [len(said)], "segments": [], "tree": [-1, []]}).encode()
        segment = segments.new_segment(len(data), said, text)
        segments.write(segment.fd, memoryview(data), segment.start)
        steps = strides or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        empty = 0 in shape
        reach = [(extent - 1) * step * bits for extent, step in zip(shape, steps, strict=True)]
        low = 8 * offset + sum(min(each, 0) for each in reach)
        high = 8 * offset + sum(max(each, 0) for each in reach) + bits
        fits = 0 <= offset <= 64 and (empty or (low >= 0 and -(-high // 8) <= 64))
        try:
            found = dlx.attach(create_handle(segment, ()))
        except errors.HandleError:
            assert not fits, (offset, bits, shape, strides)
            continue
        assert fits, (offset, bits, shape, strides)
        assert (found.shape, found.strides) == (shape, tuple(steps)) or empty
        if bits == 8 and strides is None and not empty:
            assert values(found) == data[offset : offset + math.prod(shape)]
        given += 1
    assert given > 200
