"""Sources without an adapter: objects with __dlpack__, raw capsules, buffers, array interfaces."""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import mmap
import pickle

import pytest

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry.registry import registry

# ---- objects with __dlpack__ -----------------------------------------------------------------------------------------


class Producer:
    """A generic producer that counts its calls and returns the result of `give`."""

    def __init__(self, give, device=(1, 0)):
        self.give, self.device, self.calls = give, device, []

    def answer(self, **options):
        self.calls.append(options)
        return self.give()


class Bare(Producer):
    def __dlpack__(self):
        return self.answer()


class StreamOnly(Producer):
    def __dlpack__(self, stream=None):
        return self.answer(stream=stream)


class Versioned(Producer):
    def __dlpack__(self, *, stream=None, max_version=None):
        return self.answer(stream=stream, max_version=max_version)


class Full(Producer):
    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.answer(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)


class Keywords(Producer):
    def __dlpack__(self, **options):
        return self.answer(**options)


class Unreadable(Producer):
    """A producer with an unreadable signature, like those of many extension types."""

    class Method:
        """The attribute `obj.__dlpack__`."""

        __signature__ = "none"  # inspect.signature raises TypeError

        def __init__(self, obj, known):
            self.obj, self.known = obj, known

        def __call__(self, **options):
            if not self.known.issuperset(options):
                raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
            return self.obj.answer(**options)

    class Descriptor:
        """The descriptor that `type.__dlpack__` is found through."""

        def __init__(self, *known):
            self.known = frozenset(known)

        def __get__(self, obj, kind):
            return Unreadable.Method(obj, self.known)

    __dlpack__ = Descriptor("stream", "max_version", "dl_device", "copy")


class UnreadableOld(Unreadable):
    __dlpack__ = Unreadable.Descriptor("stream")


SIGNATURES = [Bare, StreamOnly, Versioned, Full, Keywords, Unreadable, UnreadableOld]


def with_device(kind):
    """The same producer with __dlpack_device__."""

    class WithDevice(kind):
        def __dlpack_device__(self):
            return self.device

    return WithDevice


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
@pytest.mark.parametrize("device", [False, True], ids=["bare", "with device"])
@pytest.mark.parametrize("kind", SIGNATURES)
def test_every_signature_is_called_once(counting, kind, device, legacy):
    """A producer is called once per conversion, with keywords that it accepts, without a stream."""
    kind = with_device(kind) if device else kind
    before = counting.deleted
    producer = kind(lambda: counting.capsule((2, 3), legacy=legacy))
    for calls in (1, 2, 3):
        tensor = dlx.convert(producer, to="dlx", copy=False)
        assert len(producer.calls) == calls and tensor.shape == (2, 3) and not tensor.readonly
        assert producer.calls[-1].get("stream") is None
        if "max_version" in producer.calls[-1]:
            assert producer.calls[-1]["max_version"] == (1, 3)
        del tensor
        assert counting.deleted - before == calls


@pytest.mark.parametrize("kind", SIGNATURES)
def test_every_signature_reaches_the_frameworks(np, torch, counting, kind):
    """Numpy and torch get the producer's memory through dlx's capsule, with one call each."""
    before = counting.deleted
    producer = kind(lambda: counting.capsule((2, 3)))
    for target in ("numpy", "torch"):
        assert dlx.convert(producer, to=target, copy=False).tolist() == [[0.0] * 3] * 2
    assert len(producer.calls) == counting.deleted - before == 2


def test_keywords_without_a_default_are_given(counting):
    """A producer that requires `stream` gets None on the host."""

    class Insists:
        def __dlpack__(self, *, stream, max_version):
            assert stream is None
            return counting.capsule((3,))

    assert dlx.convert(Insists(), to="dlx").shape == (3,)


def test_signatures_are_learnt_once_per_type(counting):
    """With an unreadable signature only the very first call may be repeated."""

    class Counted(Unreadable):
        asked = 0

        class Descriptor(Unreadable.Descriptor):
            def __get__(self, obj, kind):
                Counted.asked += obj is not None
                return super().__get__(obj, kind)

        __dlpack__ = Descriptor("stream")

    for attempts in (2, 3, 4):
        dlx.convert(Counted(counting.capsule), to="dlx")
        assert Counted.asked == attempts


ERRORS = [TypeError("boom"), ValueError("boom"), RuntimeError("boom"), BufferError("boom"), KeyError("boom")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_failing_producer_is_called_once(kind, error):
    """A producer's error is the cause of dlx's error, and the producer is not called again."""

    def fail():
        raise error

    producer = kind(fail)
    with pytest.raises(errors.ConversionError, match=rf"__dlpack__ raised {type(error).__name__}: .*boom") as caught:
        dlx.convert(producer, to="dlx")
    assert caught.value.__cause__ is error and len(producer.calls) == 1


def test_type_errors_about_keywords_come_from_inside_too():
    """With a readable signature, a TypeError about keywords does not cause a second call."""

    def fail():
        raise TypeError("helper() got an unexpected keyword argument 'x'")

    producer = Full(fail)
    with pytest.raises(errors.ConversionError, match="helper"):
        dlx.convert(producer, to="dlx")
    assert len(producer.calls) == 1


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_errors_that_are_not_the_producers_pass(error):
    """MemoryError and interrupts are not converted to dlx's errors."""

    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        dlx.convert(Full(fail), to="dlx")
    assert caught.value is error


@pytest.mark.parametrize(
    "answer", [None, 5, "capsule", b"bytes", [], object()], ids=lambda answer: type(answer).__name__
)
def test_answers_that_are_no_capsules(answer):
    """A result that is not a capsule is a ProtocolError with its type."""
    with pytest.raises(errors.ProtocolError, match=f"returned {type(answer).__name__}, not a DLPack capsule"):
        dlx.convert(Full(lambda: answer), to="dlx")


def test_a_used_capsule_as_the_answer(counting):
    """A producer that returns the same capsule twice is a ConsumedError."""
    capsule = counting.capsule()
    producer = Full(lambda: capsule)
    dlx.convert(producer, to="dlx")
    with pytest.raises(errors.ConsumedError, match="already consumed"):
        dlx.convert(producer, to="dlx")


def test_dlpack_on_the_instance_does_not_count():
    """Only the `__dlpack__` of the type counts."""

    class Plain:
        pass

    obj = Plain()
    obj.__dlpack__ = None
    with pytest.raises(errors.AdapterNotFoundError):
        dlx.convert(obj, to="dlx")


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"copy": True}, {"copy": False}, {"device": "cpu"}])
@pytest.mark.parametrize("device", [(2, 0), (2, 1), (8, 0), (10, 0), (13, 0), (99, 3)], ids=str)
def test_foreign_devices_are_refused_before_the_producer_is_asked(device, options):
    """Memory that the host cannot read is a DeviceError before the producer is called."""
    producer = with_device(Full)(pytest.fail, device)
    with pytest.raises(errors.DeviceError, match="its memory is on") as caught:
        dlx.convert(producer, to="dlx", **options)
    assert producer.calls == [] and str(dlx.Device(device)) in caught.value.reason
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("device", [(2, 0), (8, 0), (10, 0)], ids=str)
def test_capsules_from_foreign_devices_are_refused(np, torch, counting, device, target):
    """A raw capsule, or one without a correct __dlpack_device__, is refused after the export."""
    before = counting.deleted
    for source in (
        counting.capsule(device=device),
        Full(lambda: counting.capsule(device=device)),
        with_device(Full)(lambda: counting.capsule(device=device)),
    ):
        with pytest.raises(errors.DeviceError):
            dlx.convert(source, to=target)
    del source
    gc.collect(1)
    assert counting.deleted - before == 3


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("device", [(3, 0), (11, 1)], ids=str)
def test_pinned_memory_is_host_memory(np, torch, counting, device, target):
    """Pinned memory is shared with consumers of host memory, relabelled, and the plan says so."""
    producer = with_device(Full)(lambda: counting.capsule((3,), device=device), device)
    assert dlx.convert(producer, to=target, copy=False).tolist() == [0.0, 0.0, 0.0]
    plan = dlx.plan(producer, to=target)
    assert plan.outcome == "shared" and plan.device == (1, 0) and [step.do for step in plan.steps] == ["relabel"]


def test_pinned_memory_stays_pinned_in_dlx(counting):
    """A dlx.Tensor keeps the label unless the host is requested."""
    make = Full(lambda: counting.capsule(device=(3, 0)))
    assert dlx.convert(make, to="dlx").device == (3, 0)
    assert dlx.convert(make, to="dlx", device="cpu", copy=False).device == (1, 0)


@pytest.mark.parametrize("answer", [None, (1,), (1, 0, 0), ("cpu", 0), "warp", (1 << 40, 0), (1, 1 << 31)], ids=repr)
def test_broken_device_answers(answer):
    """A __dlpack_device__ that is not a pair of numbers is a ProtocolError."""
    with pytest.raises(errors.ProtocolError, match="__dlpack_device__"):
        dlx.convert(with_device(Full)(pytest.fail, answer), to="dlx")


# ---- capsules --------------------------------------------------------------------------------------------------------

NAMES = {False: "dltensor_versioned", True: "dltensor"}
both = pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])


@both
def test_capsules_are_single_use(counting, legacy):
    """A raw capsule converts once; the second use is a ConsumedError with the fix."""
    before = counting.deleted
    capsule = counting.capsule((3,), legacy=legacy)
    tensor = dlx.convert(capsule, to="dlx", copy=False)
    assert counting.name(capsule) == "used_" + NAMES[legacy]
    for _ in range(2):
        with pytest.raises(errors.ConsumedError, match="already consumed") as caught:
            dlx.convert(capsule, to="dlx")
        assert "not the capsule" in caught.value.fix
        assert type(dlx.plan(capsule, to="dlx").error) is errors.ConsumedError
    del capsule
    assert counting.deleted == before and tensor.shape == (3,)
    del tensor
    assert counting.deleted == before + 1


@both
def test_capsules_of_dlx_itself(legacy):
    """A capsule of dlx.Tensor is imported once, with the same memory."""
    tensor = dlx.convert(bytearray(b"abc"), to="dlx")
    capsule = tensor.__dlpack__(max_version=None if legacy else (1, 0))
    assert dlx.convert(capsule, to="dlx", copy=False).data_ptr == tensor.data_ptr
    with pytest.raises(errors.ConsumedError):
        dlx.convert(capsule, to="dlx")


REJECTED = {  # a function that creates an unusable capsule, options of convert, the error
    "dtype": ({"dtype": (2, 24, 1)}, {"to": "numpy"}, errors.DTypeError),
    "lanes": ({"dtype": (2, 32, 4)}, {"to": "numpy"}, errors.DTypeError),
    "device": ({"device": (2, 0)}, {"to": "numpy"}, errors.DeviceError),
    "null data": ({"null_data": True}, {"to": "dlx"}, errors.LayoutError),
    "overflow": ({"shape": (2**62, 4)}, {"to": "dlx"}, errors.LayoutError),
    "negative extent": ({"shape": (2, -1)}, {"to": "dlx"}, errors.ProtocolError),
    "rank": ({"shape": (), "ndim": 200}, {"to": "dlx"}, errors.LayoutError),
    "no bits": ({"dtype": (2, 0, 1)}, {"to": "dlx"}, errors.DTypeError),
    "option": ({}, {"to": "dlx", "stream": 5}, errors.StreamError),
    "move": ({}, {"to": "dlx", "device": "cuda"}, errors.DeviceError),
}


@both
@pytest.mark.parametrize("why", REJECTED)
def test_rejected_capsules_stay_whole(np, counting, why, legacy):
    """A refused capsule keeps its name, and its own destructor frees it."""
    make, options, error = REJECTED[why]
    before = counting.deleted
    capsule = counting.capsule(legacy=legacy, **make)
    for _ in range(2):
        with pytest.raises(error):
            dlx.convert(capsule, **options)
        gc.collect(1)
        assert counting.name(capsule) == NAMES[legacy] and counting.deleted == before
    del capsule
    assert counting.deleted == before + 1


def test_read_only_capsules_that_may_not_be_copied_stay_whole(torch, counting):
    """A capsule refused for a policy can be converted under another one."""
    capsule = counting.capsule((3,), flags=1)
    with pytest.raises(errors.ReadOnlyError):
        dlx.convert(capsule, to="torch", copy=False)
    assert dlx.convert(capsule, to="torch").tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("version", [(0, 8), (2, 0), (99, 9)], ids=str)
def test_other_major_versions_are_refused(counting, version):
    """A capsule of another major version is refused with both numbers, unchanged, and freed by its owner once."""
    before = counting.deleted
    capsule = counting.capsule(version=version)
    for source in (capsule, Full(lambda: counting.capsule(version=version))):
        with pytest.raises(errors.ProtocolError, match=rf"DLPack {version[0]}\.{version[1]}, dlx reads 1\.x"):
            dlx.convert(source, to="dlx")
    del source
    gc.collect(1)
    assert counting.name(capsule) == "dltensor_versioned" and counting.deleted == before + 1
    del capsule
    assert counting.deleted == before + 2


def test_later_minor_versions_are_read(counting):
    """A capsule of a later minor version is read."""
    assert dlx.convert(counting.capsule((2,), version=(1, 77)), to="dlx").shape == (2,)


def test_other_capsules_are_no_arrays():
    """A capsule of another protocol is a ProtocolError with its name."""
    import datetime

    with pytest.raises(errors.ProtocolError, match=r"a capsule named 'datetime\.datetime_CAPI'"):
        dlx.convert(datetime.datetime_CAPI, to="dlx")


@pytest.mark.parametrize("flags", [2, 3], ids=["copied", "copied, read-only"])
def test_producers_that_copied(counting, flags):
    """A producer's copy is reported, refused with copy=False, and copied again only for a writable result."""
    producer = Full(lambda: counting.capsule((3,), flags=flags))
    assert dlx.plan(producer, to="dlx").outcome == "copied"
    with pytest.raises(errors.CopyRequiredError, match="its producer made a copy"):
        dlx.convert(producer, to="dlx", copy=False)
    before = counting.deleted
    tensor = dlx.convert(producer, to="dlx", copy=True)
    assert counting.deleted == before + (flags == 3) and tensor.flags == 0


def test_a_capsule_that_was_copied_earlier_is_just_memory(counting):
    """The copied flag of a raw capsule is about an earlier copy: the memory can be shared."""
    assert dlx.convert(counting.capsule((3,), flags=2), to="dlx", copy=False).flags == 0


@both
def test_copy_true_frees_the_capsule(counting, legacy):
    """copy=True consumes the capsule and releases its memory immediately."""
    before = counting.deleted
    capsule = counting.capsule((3,), legacy=legacy)
    tensor = dlx.convert(capsule, to="dlx", copy=True)
    gc.collect(1)
    assert counting.deleted == before + 1 and counting.name(capsule).startswith("used_")
    assert tensor.shape == (3,)


# ---- a consumer that fails -------------------------------------------------------------------------------------------

stash = []


def raise_at_once(tensor):
    """Fail before consuming anything."""
    raise RuntimeError("no")


def take_and_free(tensor):
    """Consume a capsule, free it, and fail."""
    native.capsule_claim(tensor.__dlpack__(max_version=(1, 0)))
    raise RuntimeError("no")


def take_and_keep(tensor):
    """Consume a capsule, fail, and free it much later."""
    stash.append(native.capsule_claim(tensor.__dlpack__(max_version=(1, 0))))
    raise RuntimeError("no")


def hold_the_capsule(tensor):
    """Fail with the capsule in a variable that outlives the call."""
    stash.append(tensor.__dlpack__())
    raise RuntimeError("no")


CONSUMERS = [raise_at_once, take_and_free, take_and_keep, hold_the_capsule]


@pytest.fixture
def failing(monkeypatch):
    """Return a target that fails in this way."""

    def fail(name, how):
        monkeypatch.setattr(registry.target(name).adapter, "load", how)

    yield fail
    stash.clear()


@both
@pytest.mark.parametrize("target", ["numpy", "torch", "dlx"])
@pytest.mark.parametrize("how", CONSUMERS)
def test_a_failing_consumer_gives_the_capsule_back(counting, failing, how, target, legacy):
    """The user's capsule gets its name back, even if its memory is still in use, and is released once."""
    if target != "dlx":
        pytest.importorskip(target)
    failing(target, how)
    before, live = counting.deleted, native.live()
    capsule = counting.capsule((3,), legacy=legacy)
    with pytest.raises(errors.ConversionError, match=f"{target} refused it: RuntimeError: no") as caught:
        dlx.convert(capsule, to=target)
    assert type(caught.value.__cause__) is RuntimeError
    del caught
    gc.collect(1)
    assert counting.deleted == before
    assert counting.name(capsule) == NAMES[legacy]
    del capsule
    stash.clear()
    assert (counting.deleted, native.live()) == (before + 1, live)


@pytest.mark.parametrize("wrapped", [lambda x: x, lambda x: [x]], ids=["alone", "in a list"])
def test_a_failing_consumer_leaves_dtype_and_shape_in_the_error(failing, wrapped):
    """The error contains dtype and shape, also for a producer that only its export describes."""
    np = pytest.importorskip("numpy")
    array = np.zeros((2, 3), "float32")

    class Producer:
        def __dlpack__(self, **options):
            return array.__dlpack__()

        def __dlpack_device__(self):
            return array.__dlpack_device__()

    failing("numpy", raise_at_once)
    with pytest.raises(errors.ConversionError, match="numpy refused it: RuntimeError: no") as caught:
        dlx.convert.__wrapped__(wrapped(Producer()), to="numpy")
    assert caught.value.source.endswith("(float32[2, 3])")


VIEWED = {
    "relabelled": ({"device": (3, 0)}, {"device": "cpu"}, "dlx"),
    "relabelled for numpy": ({"device": (3, 0)}, {}, "numpy"),
    "shared as if writable": ({"flags": 1}, {"readonly": "share"}, "torch"),
    "of another dtype": ({"dtype": (4, 16, 1)}, {}, "numpy"),
    "without an element": ({"shape": (0, 3), "null_data": True}, {}, "numpy"),
}


@pytest.mark.parametrize("how", CONSUMERS)
@pytest.mark.parametrize("viewed", VIEWED)
def test_a_viewed_capsule_is_given_back(counting, failing, how, viewed):
    """The capsule is restored, even if the consumer received a view of it."""
    what, options, target = VIEWED[viewed]
    if target != "dlx":
        pytest.importorskip(target)
    pytest.importorskip("ml_dtypes")
    make = lambda: counting.capsule(**{"shape": (3,), **what})  # noqa: E731
    dlx.convert(make(), to=target, **options)
    gc.collect(1)
    failing(target, how)
    before, live = counting.deleted, native.live()
    capsule = make()
    with pytest.raises(errors.ConversionError, match="refused it: RuntimeError: no"):
        dlx.convert(capsule, to=target, **options)
    gc.collect(1)
    assert counting.deleted == before
    assert counting.name(capsule) == "dltensor_versioned"
    del capsule
    stash.clear()
    assert (counting.deleted, native.live()) == (before + 1, live)


@both
def test_a_capsule_is_given_back_where_it_cannot_even_be_described(counting, failing, monkeypatch, legacy):
    """The capsule is restored, even if the error message runs out of memory."""

    def no_memory(*args):
        raise MemoryError

    failing("dlx", raise_at_once)
    capsule = counting.capsule((3,), legacy=legacy)
    monkeypatch.setattr("dlx._engine.plan.ArrayInfo.of_tensor", no_memory)
    with pytest.raises(MemoryError):
        dlx.convert(capsule, to="dlx")
    gc.collect(1)
    assert counting.name(capsule) == NAMES[legacy]


@both
def test_a_capsule_given_back_can_be_used_again(counting, failing, monkeypatch, legacy):
    """The same capsule converts after the consumer's failure."""
    with monkeypatch.context() as patch:
        patch.setattr(registry.target("dlx").adapter, "load", take_and_free)
        capsule = counting.capsule((3,), legacy=legacy)
        with pytest.raises(errors.ConversionError):
            dlx.convert(capsule, to="dlx")
    before = counting.deleted
    assert dlx.convert(capsule, to="dlx").shape == (3,)
    assert counting.deleted == before + 1


@pytest.mark.parametrize("options", [{}, {"copy": True}])
@pytest.mark.parametrize("how", CONSUMERS)
def test_a_failing_consumer_leaks_nothing_of_a_producer(counting, failing, how, options):
    """A producer's export is released once after its consumer failed."""
    failing("dlx", how)
    before = counting.deleted
    with pytest.raises(errors.ConversionError):  # the fast path creates a dlx.Tensor without the adapter
        dlx.convert.__wrapped__(Full(lambda: counting.capsule((3,))), to="dlx", **options)
    stash.clear()
    gc.collect(1)
    assert counting.deleted == before + 1


def test_a_consumer_that_runs_out_of_memory(counting, monkeypatch):
    """A consumer's MemoryError propagates, and the capsule is restored."""

    def load(tensor):
        raise MemoryError

    monkeypatch.setattr(registry.target("dlx").adapter, "load", load)
    capsule = counting.capsule()
    with pytest.raises(MemoryError):
        dlx.convert(capsule, to="dlx")
    assert counting.name(capsule) == "dltensor_versioned"


def test_an_interrupted_consumer_leaks_nothing(counting, monkeypatch):
    """After KeyboardInterrupt, too, the memory is released exactly once."""

    def load(tensor):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry.target("dlx").adapter, "load", load)
    before = counting.deleted
    capsule = counting.capsule()
    with pytest.raises(KeyboardInterrupt):
        dlx.convert(capsule, to="dlx")
    del capsule
    gc.collect(1)
    assert counting.deleted == before + 1


# ---- buffers ---------------------------------------------------------------------------------------------------------

TYPECODES = [code for code in array.typecodes if code not in "uw"]
C_TYPES = {
    "c_bool": "bool",
    "c_char": "uint8",
    "c_byte": "int8",
    "c_ubyte": "uint8",
    "c_short": "int16",
    "c_ushort": "uint16",
    "c_int": "int32",
    "c_uint": "uint32",
    "c_long": f"int{8 * ctypes.sizeof(ctypes.c_long)}",
    "c_ulong": f"uint{8 * ctypes.sizeof(ctypes.c_long)}",
    "c_longlong": "int64",
    "c_size_t": f"uint{8 * ctypes.sizeof(ctypes.c_size_t)}",
    "c_float": "float32",
    "c_double": "float64",
}


@pytest.mark.parametrize("code", TYPECODES)
def test_array_array(np, torch, code):
    """Every numeric typecode is shared with its width."""
    source = array.array(code, [1, 2, 3])
    kind = "float" if code in "fd" else "int" if code.islower() else "uint"
    tensor = dlx.convert(source, to="dlx", copy=False)
    assert str(tensor.dtype) == f"{kind}{8 * source.itemsize}" and tensor.data_ptr == source.buffer_info()[0]
    for target in ("numpy", "torch"):
        result = dlx.convert(source, to=target, copy=False)
        result[1] = 7
        assert source.tolist() == [1, 7, 3] and result.tolist() == [1, 7, 3]
        result[1] = 2


@pytest.mark.filterwarnings("ignore:The 'u' type code:DeprecationWarning")
def test_array_of_characters():
    """Arrays of characters are refused."""
    with pytest.raises(errors.DTypeError):
        dlx.convert(array.array("u", "abc"), to="dlx")


@pytest.mark.parametrize("name", C_TYPES)
def test_ctypes_arrays(name):
    """Every numeric type of ctypes is shared, 1-d, 2-d and as a single value."""
    kind = getattr(ctypes, name)
    for source, shape in (((kind * 3)(), (3,)), (((kind * 3) * 2)(), (2, 3)), (kind(), ()), ((kind * 0)(), (0,))):
        tensor = dlx.convert(source, to="dlx", copy=False)
        assert (str(tensor.dtype), tensor.shape, tensor.readonly) == (C_TYPES[name], shape, False)
        assert tensor.data_ptr == ctypes.addressof(source) or shape == (0,)


def test_ctypes_long_is_64_bits_wide(np):
    """The format '<l' of c_long means 4 bytes in PEP 3118; the item size is used instead."""
    source = (ctypes.c_long * 2)(2**40 if ctypes.sizeof(ctypes.c_long) == 8 else 1, -1)
    assert dlx.convert(source, to="numpy").tolist() == list(source)


class Structure(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))


class Packed(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_int))


class Union(ctypes.Union):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))


NOT_NUMBERS = {
    "structure": Structure,
    "packed structure": Packed,
    "union": Union,
    "pointer": ctypes.POINTER(ctypes.c_int),
    "void *": ctypes.c_void_p,
    "char *": ctypes.c_char_p,
    "wchar": ctypes.c_wchar,
    "long double": ctypes.c_longdouble,
    "other byte order": ctypes.c_int.__ctype_be__,
}


@pytest.mark.parametrize("name", NOT_NUMBERS)
def test_ctypes_that_are_no_numbers(name):
    """Types other than one native number per element are refused and never read as one."""
    with pytest.raises(errors.DTypeError):
        dlx.convert((NOT_NUMBERS[name] * 2)(), to="dlx")


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, pickle.PickleBuffer], ids=lambda wrap: wrap.__name__)
def test_bytes_and_their_kin(np, torch, wrap):
    """Bytes are uint8, read-only if they are immutable."""
    source = wrap(b"abc")
    readonly = wrap is not bytearray
    tensor = dlx.convert(source, to="dlx", copy=False)
    assert (str(tensor.dtype), tensor.shape, tensor.readonly) == ("uint8", (3,), readonly)
    for target in ("numpy", "torch"):
        assert dlx.convert(source, to=target).tolist() == [97, 98, 99]


@pytest.mark.parametrize("source", [b"", bytearray(), memoryview(b"")[:0]], ids=lambda source: type(source).__name__)
def test_empty_buffers(np, torch, source):
    """A buffer without bytes is an empty array."""
    assert [dlx.convert(source, to=target).shape[0] for target in ("numpy", "torch", "dlx")] == [0, 0, 0]


@pytest.mark.parametrize("code", "bBhHiIlLqQnNfd?c")
def test_memoryview_formats(code):
    """Every format that a memoryview can be cast to is shared with its width."""
    view = memoryview(bytearray(48)).cast(code)
    kind = {"?": "bool", "c": "uint8", "f": "float32", "d": "float64"}.get(
        code, f"{'int' if code.islower() else 'uint'}{8 * view.itemsize}"
    )
    assert str(dlx.convert(view, to="dlx", copy=False).dtype) == kind


VIEWS = {
    "2-d": lambda view: view.cast("i", (2, 3)),
    "3-d": lambda view: view.cast("h", (2, 3, 2)),
    "0-d": lambda view: view[:4].cast("i", ()),
    "sliced": lambda view: view.cast("i")[1:5:2],
    "reversed": lambda view: view.cast("i")[::-1],
    "negative step": lambda view: view.cast("i")[4::-2],
    "sub-sliced": lambda view: view[8:].cast("i")[1:],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_memoryviews(np, torch, kind):
    """A memoryview keeps its shape and strides: shared if the target supports them."""
    view = VIEWS[kind](memoryview(bytearray(range(24))))
    tensor = dlx.convert(view, to="dlx", copy=False)
    assert tensor.shape == view.shape and tensor.strides == tuple(step // view.itemsize for step in view.strides)
    for target in ("numpy", "torch"):
        assert dlx.convert(view, to=target).tolist() == view.tolist()


def test_mmap(np):
    """A mapping is shared as uint8 and cannot be closed while a result lives."""
    with mmap.mmap(-1, 8) as mapped:
        result = dlx.convert(mapped, to="numpy", copy=False)
        result[:] = 5
        assert mapped[:] == b"\x05" * 8
        with pytest.raises(BufferError):
            mapped.close()
        del result


@pytest.mark.parametrize("target", ["numpy", "torch", "dlx"])
def test_buffers_are_held_until_release(target):
    """A bytearray cannot be resized while a result shares it, and can be afterwards."""
    if target != "dlx":
        pytest.importorskip(target)
    source = bytearray(8)
    result = dlx.convert(source, to=target, copy=False)
    with pytest.raises(BufferError, match="cannot be re-sized"):
        source.append(1)
    del result
    source.append(1)


@pytest.mark.parametrize("options", [{"copy": True}, {"device": "cuda"}])
def test_buffers_are_released_after_a_copy_or_a_refusal(options):
    """A conversion that did not share, a plan and a description release the buffer."""
    source = bytearray(8)
    dlx.plan(source, to="dlx")
    dlx.describe(source)
    with contextlib.suppress(errors.DeviceError):
        dlx.convert(source, to="dlx", **options)
    gc.collect(1)
    source.append(1)


def test_released_memoryviews():
    """A released memoryview is refused with Python's error as the cause."""
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(errors.ConversionError, match="released") as caught:
        dlx.convert(view, to="dlx")
    assert type(caught.value.__cause__) is ValueError
    assert caught.value.fix == "Convert it before it is released or closed."


def test_indirect_buffers():
    """A buffer of pointers to rows is refused."""
    testbuffer = pytest.importorskip("_testbuffer")
    rows = testbuffer.ndarray(list(range(6)), shape=[2, 3], format="i", flags=testbuffer.ND_PIL)
    with pytest.raises(errors.LayoutError, match="indirect"):
        dlx.convert(rows, to="dlx")


# ---- __array_interface__ ---------------------------------------------------------------------------------------------


class Interface:
    """An object with an array interface over eight int16 by default."""

    def __init__(self, **entries):
        self.memory = (ctypes.c_int16 * 8)(*range(8))
        self.address = ctypes.addressof(self.memory)
        defaults = {"version": 3, "shape": (8,), "typestr": "<i2", "data": (self.address, False)}
        self.__array_interface__ = {key: value for key, value in (defaults | entries).items() if value is not Interface}


@pytest.mark.parametrize("readonly", [False, True])
def test_array_interface(np, torch, readonly):
    """An array interface is shared with its address and its read-only bit."""
    source = Interface()
    source.__array_interface__["data"] = (source.address, readonly)
    tensor = dlx.convert(source, to="dlx", copy=False)
    assert (tensor.data_ptr, tensor.readonly, tensor.shape) == (source.address, readonly, (8,))
    assert dlx.convert(source, to="numpy", copy=False).flags.writeable is not readonly
    assert (dlx.convert(source, to="torch").data_ptr() == source.address) is not readonly


def test_array_interfaces_keep_their_owner():
    """The object with the interface lives as long as the result."""
    source = Interface()
    address = source.address
    tensor = dlx.convert(source, to="dlx")
    del source
    gc.collect(1)
    assert tensor.data_ptr == address
    assert list((ctypes.c_int16 * 8).from_address(address)) == list(range(8))


def test_array_interface_strides(np):
    """Strides are in bytes, also negative ones."""
    source = Interface(shape=(2, 3), strides=(4, 2))
    assert dlx.convert(source, to="numpy").tolist() == [[0, 1, 2], [2, 3, 4]]
    source = Interface(shape=(3,), strides=(-4,))
    source.__array_interface__["data"] = (source.address + 8, False)
    assert dlx.convert(source, to="numpy").tolist() == [4, 2, 0]


def test_array_interface_of_a_buffer(np):
    """The data may be a buffer with an offset; its read-only bit and its length count."""
    source = Interface(shape=(2,), data=b"\0\0\1\0\2\0", offset=2)
    result = dlx.convert(source, to="numpy")
    assert result.tolist() == [1, 2] and not result.flags.writeable
    block = bytearray(8)
    tensor = dlx.convert(Interface(shape=(4,), data=block), to="dlx")
    assert not tensor.readonly
    with pytest.raises(BufferError):
        block.append(0)
    strided = Interface(shape=(2, 2), data=b"\0\0\1\0\2\0\3\0", strides=(-4, 2), offset=4)
    assert dlx.convert(strided, to="numpy").tolist() == [[2, 3], [0, 1]]


def test_strides_of_empty_array_interfaces_have_no_meaning(np):
    """Nor has an offset; numpy accepts them, too."""
    for entries in ({"strides": (9, 5)}, {"data": b"", "offset": 8}, {"data": b"12", "strides": (400, -3)}):
        source = Interface(shape=(0, 2), **entries)
        assert dlx.convert(source, to="numpy").shape == np.asarray(source).shape == (0, 2)


def test_array_interface_of_the_object_itself(np):
    """Without data, the object is the buffer."""

    class Bytes(bytearray):
        __array_interface__ = {"version": 3, "shape": (2,), "typestr": "<u2"}  # noqa: RUF012

    assert dlx.convert(Bytes(b"\1\0\2\0"), to="numpy").tolist() == [1, 2]


@pytest.mark.parametrize("typestr", ["|b1", "|u1", "|i1", "<u2", "=i4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"])
def test_array_interface_types(typestr):
    """Every numeric type is shared with its kind and width."""
    kind = {"b": "bool", "u": "uint", "i": "int", "f": "float", "c": "complex"}[typestr[1]]
    name = kind if kind == "bool" else f"{kind}{8 * int(typestr[2:])}"
    assert str(dlx.convert(Interface(shape=(1,), typestr=typestr), to="dlx").dtype) == name


FOREIGN = [">f4", ">i2", "<M8[s]", "<M8[ns]", "<m8", "|O8", "|V4", "<U3", "|S4", "|t1"]


@pytest.mark.parametrize("typestr", [*FOREIGN, "<f16", "<f10", "<c32", "<i3", "|b2"])
def test_array_interface_types_that_are_no_numbers(typestr):
    """Dates, text, objects, the other byte order and unknown widths are DTypeErrors."""
    with pytest.raises(errors.DTypeError) as caught:
        dlx.convert(Interface(shape=(1,), typestr=typestr), to="dlx")
    assert caught.value.fix


BROKEN = {
    "mask": ({"mask": Interface()}, errors.LayoutError),
    "odd strides": ({"shape": (2,), "strides": (3,)}, errors.LayoutError),
    "null": ({"data": (0, False)}, errors.LayoutError),
    "overflow": ({"shape": (2**62, 4)}, errors.LayoutError),
    "beyond 64 bits": ({"shape": (2**70,)}, errors.ProtocolError),
    "negative": ({"shape": (-1,)}, errors.ProtocolError),
    "no shape": ({"shape": Interface}, errors.ProtocolError),
    "no type": ({"typestr": Interface}, errors.ProtocolError),
    "short type": ({"typestr": "f"}, errors.ProtocolError),
    "shape of text": ({"shape": ("a",)}, errors.ProtocolError),
    "data of one": ({"data": (5,)}, errors.ProtocolError),
    "too many strides": ({"strides": (2, 2)}, errors.ProtocolError),
    "buffer too short": ({"shape": (4,), "data": b"1234567"}, errors.ProtocolError),
    "offset too far": ({"shape": (4,), "data": b"12345678", "offset": 1}, errors.ProtocolError),
    "offset before": ({"shape": (1,), "data": b"12345678", "offset": -2}, errors.ProtocolError),
    "strides too far": ({"shape": (2,), "data": b"12345678", "strides": (8,)}, errors.ProtocolError),
    "strides before": ({"shape": (2,), "data": b"12345678", "strides": (-2,)}, errors.ProtocolError),
    "a buffer with gaps": ({"shape": (2,), "data": memoryview(b"12345678")[::2]}, errors.ProtocolError),
    "no buffer": ({"data": 5}, errors.ProtocolError),
    "no buffer either": ({"data": None}, errors.ProtocolError),
    "a fraction as address": ({"data": (1.5, False)}, errors.ProtocolError),
    "an address of text": ({"data": ("16", False)}, errors.ProtocolError),
    "an address below 0": ({"data": (-8, False)}, errors.ProtocolError),
    "an address beyond 64 bits": ({"data": (1 << 64, False)}, errors.ProtocolError),
    "a fraction as extent": ({"shape": (1.5,)}, errors.ProtocolError),
    "a number as shape": ({"shape": 1}, errors.ProtocolError),
    "strides of text": ({"shape": (2,), "strides": "a"}, errors.ProtocolError),
    "a number as strides": ({"shape": (2,), "strides": 2}, errors.ProtocolError),
    "strides beyond 64 bits": ({"shape": (2,), "strides": (1 << 70,)}, errors.ProtocolError),
    "an offset of text": ({"data": b"12", "offset": "0"}, errors.ProtocolError),
}


@pytest.mark.parametrize("why", BROKEN)
def test_broken_array_interfaces(why):
    """An invalid interface, or one that DLPack cannot represent, is refused before its memory is read."""
    entries, error = BROKEN[why]
    with pytest.raises(error, match="its __array_interface__|it |its byte|" if error is errors.LayoutError else "its "):
        dlx.convert(Interface(**entries), to="dlx")


@pytest.mark.parametrize("interface", [None, 5, [], [1, 0], "text", b"12", object()], ids=range(7))
def test_array_interfaces_that_are_no_dicts(interface):
    """An interface of another type is a ProtocolError."""

    class Producer:
        __array_interface__ = interface

    with pytest.raises(errors.ProtocolError, match="its __array_interface__ is"):
        dlx.convert(Producer(), to="dlx")


# ---- other objects ---------------------------------------------------------------------------------------------------


class OnlyArray:
    """An object that only has `__array__`, which dlx never calls."""

    def __array__(self, *args, **kwargs):
        raise AssertionError("__array__ was called")


class RaisingInterface:
    @property
    def __array_interface__(self):
        raise ValueError("no")


NO_ARRAYS = [1, 1.5, None, "text", object(), len, int, OnlyArray(), range(3)]
CONTAINERS = [[1, 2], (1,), {"a": 1}, {1}]


def test_an_interface_that_raises_is_the_cause():
    """A property that raises is read once, and its error is the cause."""
    with pytest.raises(errors.ConversionError, match="ValueError: no") as caught:
        dlx.convert(RaisingInterface(), to="dlx")
    assert type(caught.value.__cause__) is ValueError


@pytest.mark.parametrize("obj", [*NO_ARRAYS, dlx], ids=lambda obj: type(obj).__name__)
def test_what_is_no_array(obj):
    """Other objects are an AdapterNotFoundError, also a TypeError, with a fix; __array__ is never used."""
    with pytest.raises(errors.AdapterNotFoundError) as caught:
        dlx.convert(obj, to="dlx")
    assert isinstance(caught.value, TypeError) and caught.value.fix and caught.value.target == "dlx"
    with pytest.raises(errors.AdapterNotFoundError):
        dlx.describe(obj)


@pytest.mark.parametrize("obj", CONTAINERS, ids=lambda obj: type(obj).__name__)
def test_a_container_is_no_array(obj):
    """Functions of one array refuse a container, with a fix."""
    for call in (dlx.describe, dlx.from_dlpack, dlx.to_capsule):
        with pytest.raises(errors.AdapterNotFoundError, match="Pass one of its arrays"):
            call(obj)


@pytest.mark.parametrize("name", ["torch.Tensor", "numpy.ndarray", "numpy.float32"])
def test_types_are_no_arrays(name):
    """An array class is not an array."""
    module, _, attribute = name.partition(".")
    with pytest.raises(errors.AdapterNotFoundError):
        dlx.convert(getattr(pytest.importorskip(module), attribute), to="dlx")


def test_the_order_of_protocols(counting):
    """The order is __dlpack__, the array interface, the buffer."""

    class Both(bytearray):
        __array_interface__ = {"version": 3, "shape": (2,), "typestr": "<u2"}  # noqa: RUF012

    class All(Both):
        def __dlpack__(self):
            return counting.capsule((9,))

    assert dlx.convert(All(4), to="dlx").shape == (9,)
    assert dlx.convert(Both(4), to="dlx").shape == (2,)


# ---- devices and dtypes without an export ----------------------------------------------------------------------------

PADDLE = """
import dlx, numpy as np
class Lent:
    def __init__(self, kind, number): self.place = kind, number
    def __dlpack__(self, **options): return np.zeros(3).__dlpack__(**options)
    def __dlpack_device__(self): return self.place
"""


@pytest.mark.numpy("2.1")
@pytest.mark.parametrize("kind", [1, 3])
def test_host_memory_whose_device_has_no_number(kind, np):
    """Paddle returns ``(1, None)`` for the host and ``(3, None)`` for pinned memory; None is refused for devices."""
    names = {}
    exec(PADDLE, names)
    array = names["Lent"](kind, None)
    assert dlx.convert(array, to="numpy").shape == (3,)
    assert dlx.convert([array], to="dlx")[0].shape == (3,)
    assert dlx.plan(array, to="numpy").error is None
    assert dlx.describe(array).device == (kind, 0)
    refused = names["Lent"](2, None)
    with pytest.raises(errors.ProtocolError, match=r"\(2, None\) is not a device"):
        dlx.convert(refused, to="numpy")


def test_elements_that_are_no_numbers_are_refused_before_the_producer_is_called(python, tmp_path):
    """Tensorflow's ``__dlpack__`` ends the process for a tensor of strings: dlx never calls it."""
    (tmp_path / "shop.py").write_text(
        "import os\n"
        "SAID = ('string', 'resource', 'variant', 'object', 'string_ref', \"<dtype: 'string'>\")\n"
        "class Named:\n    def __init__(self, name): self.name = name\n"
        "class Shown:\n    def __init__(self, text): self.text = text\n    def __repr__(self): return self.text\n"
        "class Tensor:\n"
        "    def __init__(self, dtype): self.dtype = dtype\n"
        "    def __dlpack__(self, **options): os.abort()\n"
        "    def __dlpack_device__(self): return (1, 0)\n"
        "named = Tensor(Named('string'))\n"
    )
    python(
        f"""
        import contextlib, io, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import dlx, shop
        from dlx.cli import main
        for obj in (shop.Tensor(kind(said)) for said in shop.SAID for kind in (shop.Named, shop.Shown, str)):
            def borrowed():
                with dlx.borrow(obj): pass
            for call in (
                lambda: dlx.convert(obj, to="dlx"), lambda: dlx.convert({{"a": [obj]}}, to="dlx"),
                lambda: dlx.convert([obj], to="dlx", lazy=True)[0], lambda: dlx.from_dlpack(obj),
                lambda: dlx.convert(obj, to="dlx", copy=True), lambda: dlx.to_capsule(obj), borrowed,
                lambda: dlx.shares_memory(obj, b"abc"), lambda: dlx.stack([obj], "dlx"),
            ):
                try:
                    call()
                except dlx.errors.DTypeError as error:
                    assert "DLPack supports only numbers" in str(error), error
                else:
                    raise AssertionError("not refused")
            assert isinstance(dlx.plan(obj, to="dlx").error, dlx.errors.DTypeError)
            assert isinstance(dlx.plan([obj], to="dlx").error, dlx.errors.DTypeError)
            try:
                dlx.convert([obj, obj, shop.Tensor(shop.Named('string'))], to="dlx", errors="collect")
            except ExceptionGroup as group:
                assert len(group.exceptions) == 2
            dlx.describe(obj)
        for words in (["inspect", "shop:named"], ["plan", "shop:named", "--to", "dlx"]):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
                assert main(words) == 0
            assert "only numbers" in " ".join(out.getvalue().split())
        """,
        imported=True,  # inspect tries every target
    )


@pytest.mark.numpy("2.1")
def test_a_dtype_that_cannot_be_read_says_nothing(np):
    """The producer is called if its dtype cannot be read."""

    class Producer:
        @property
        def dtype(self):
            raise RuntimeError("no dtype")

        def __dlpack__(self, **options):
            return np.zeros(3).__dlpack__(**options)

        def __dlpack_device__(self):
            return (1, 0)

    class Numbers(Producer):
        dtype = np.float64

    for kind in (Producer, Numbers):
        assert dlx.convert(kind(), to="numpy").shape == (3,)
