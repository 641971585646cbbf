"""`dlx.plan` predicts `dlx.convert` without converting; `dlx.describe` inspects without a change."""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import mmap
import pickle
import sys
import types
import weakref

import pytest
from support.plugins.mylib import Array, MyLib, plugin
from support.plugins.registries import use

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry import lookup
from dlx._registry.registry import Registry, registry
from dlx.adapter import Description


class Stranger:
    """An object with only DLPack, over private bytes."""

    def __init__(self, readonly=False):
        self.memory = b"abcdefgh" if readonly else bytearray(b"abcdefgh")
        self.tensor = dlx.convert(self.memory, to="dlx")
        self.calls = 0

    @property
    def address(self):
        return self.tensor.data_ptr

    def __dlpack__(self, *, stream=None, max_version=None):
        self.calls += 1
        return self.tensor.__dlpack__(max_version=max_version)


class Interface:
    """An object that only has an array interface."""

    def __init__(self, **entries):
        self.memory = bytearray(b"abcdefgh")
        self.__array_interface__ = {"shape": (8,), "typestr": "|u1", "data": self.memory} | entries


def device_of(kind, device):
    """A generic producer that says its memory is elsewhere."""

    class Elsewhere(kind):
        def __dlpack_device__(self):
            return device

    return Elsewhere


def failing(error):
    """A generic producer whose `__dlpack__` raises."""

    class Failing:
        def __dlpack__(self, **options):
            raise type(error)(*error.args)

    return Failing()


def odd_field(np):
    """A field whose byte stride is not a multiple of its size."""
    return np.zeros(3, [("tag", "u1"), ("value", "f4")])["value"]


def used(counting):
    """A capsule that was used before."""
    capsule = counting.capsule()
    native.capsule_claim(capsule)
    return capsule


SOURCES = {  # with numpy, torch and counting.c
    "array": lambda n, t, c: n.arange(6.0).reshape(2, 3),
    "0-d": lambda n, t, c: n.array(1.5),
    "empty": lambda n, t, c: n.empty((0, 3)),
    "F-order": lambda n, t, c: n.ones((2, 3), order="F"),
    "reversed": lambda n, t, c: n.arange(4.0)[::-1],
    "broadcast": lambda n, t, c: n.broadcast_to(n.arange(4.0), (3, 4)),
    "swapped": lambda n, t, c: n.arange(4, dtype=">f4"),
    "odd field": lambda n, t, c: odd_field(n),
    "misaligned": lambda n, t, c: n.zeros(33, "u1")[1:].view("f4"),
    "masked": lambda n, t, c: n.ma.array([1, 2], mask=[0, 1]),
    "dates": lambda n, t, c: n.zeros(2, "M8[s]"),
    "objects": lambda n, t, c: n.array([None]),
    "text": lambda n, t, c: n.array(["a"]),
    "longdouble": lambda n, t, c: n.ones(2, n.longdouble),
    "scalar": lambda n, t, c: n.float32(2),
    "date scalar": lambda n, t, c: n.datetime64("2020"),
    "tensor": lambda n, t, c: t.arange(6.0).reshape(2, 3),
    "expanded": lambda n, t, c: t.ones(3).expand(2, 3),
    "leaf": lambda n, t, c: t.ones(2, requires_grad=True),
    "conj": lambda n, t, c: t.tensor([1 + 2j]).conj(),
    "conj leaf": lambda n, t, c: t.tensor([1 + 2j], requires_grad=True).conj(),
    "neg": lambda n, t, c: t.tensor([1 + 2j]).conj().imag,
    "sparse": lambda n, t, c: t.eye(2).to_sparse(),
    "meta": lambda n, t, c: t.empty(2, device="meta"),
    "bfloat16": lambda n, t, c: t.ones(2, dtype=t.bfloat16),
    "two in a byte": lambda n, t, c: t.ones(2, dtype=t.uint8).view(t.float4_e2m1fn_x2),
    "uint4": lambda n, t, c: t.empty(2, dtype=t.uint4),
    "dlx.Tensor": lambda n, t, c: dlx.convert(bytearray(b"abc"), to="dlx"),
    "read-only dlx.Tensor": lambda n, t, c: dlx.convert(b"abc", to="dlx"),
    "bytes": lambda n, t, c: b"abc",
    "bytearray": lambda n, t, c: bytearray(b"abc"),
    "memoryview": lambda n, t, c: memoryview(bytearray(b"abc"))[::-1],
    "text buffer": lambda n, t, c: (ctypes.c_wchar * 1)("a"),
    "ctypes": lambda n, t, c: (ctypes.c_int * 2)(1, 2),
    "capsule": lambda n, t, c: c.capsule((3,)),
    "legacy capsule": lambda n, t, c: c.capsule((3,), legacy=True),
    "read-only capsule": lambda n, t, c: c.capsule((3,), flags=1),
    "cuda capsule": lambda n, t, c: c.capsule((3,), device=(2, 0)),
    "pinned capsule": lambda n, t, c: c.capsule((3,), device=(3, 0)),
    "null capsule": lambda n, t, c: c.capsule((3,), null_data=True),
    "capsule 2.0": lambda n, t, c: c.capsule(version=(2, 0)),
    "used capsule": lambda n, t, c: used(c),
    "generic_adapter": lambda n, t, c: Stranger(),
    "read-only generic producer": lambda n, t, c: Stranger(readonly=True),
    "cuda generic producer": lambda n, t, c: device_of(Stranger, (2, 0))(),
    "failing": lambda n, t, c: failing(ValueError("no")),
    "interface": lambda n, t, c: Interface(),
    "masked interface": lambda n, t, c: Interface(mask=b""),
    "number": lambda n, t, c: 1,
    "None": lambda n, t, c: None,
}

CASES = [  # source, target, options, outcome or the error
    ("array", "torch", {}, "shared"),
    ("array", "torch", {"copy": False}, "shared"),
    ("array", "torch", {"copy": True}, "copied"),
    ("array", "torch", {"device": "cpu"}, "shared"),
    ("array", "torch", {"device": "cuda"}, "DeviceError"),
    ("array", "torch", {"device": "warp"}, "DeviceNameError"),
    ("array", "torch", {"stream": 5}, "StreamError"),
    ("array", "torch", {"stream": -1}, "shared"),
    ("array", "numpy", {}, "same"),
    ("array", "numpy", {"copy": True}, "copied"),
    ("array", "numpy", {"device": "cuda"}, "DeviceError"),
    ("array", "numpy", {"device": "cuda", "copy": False}, "DeviceError"),
    ("array", "dlx", {}, "shared"),
    ("array", "nosuch", {}, "AdapterNotFoundError"),
    ("0-d", "torch", {}, "shared"),
    ("empty", "torch", {"copy": False}, "shared"),
    ("F-order", "torch", {"copy": False}, "shared"),
    ("reversed", "torch", {}, "copied"),
    ("reversed", "torch", {"copy": False}, "CopyRequiredError"),
    ("reversed", "dlx", {"copy": False}, "shared"),
    ("broadcast", "torch", {}, "copied"),
    ("broadcast", "torch", {"readonly": "error"}, "ReadOnlyError"),
    ("broadcast", "torch", {"readonly": "share"}, "shared"),
    ("broadcast", "torch", {"copy": False}, "ReadOnlyError"),
    ("broadcast", "dlx", {"copy": False}, "shared"),
    ("swapped", "torch", {}, "copied"),
    ("swapped", "torch", {"copy": True}, "copied"),
    ("swapped", "torch", {"copy": False}, "CopyRequiredError"),
    ("odd field", "dlx", {}, "copied"),
    ("odd field", "dlx", {"copy": False}, "CopyRequiredError"),
    ("misaligned", "torch", {}, "copied"),
    ("misaligned", "torch", {"copy": False}, "CopyRequiredError"),
    ("misaligned", "dlx", {"copy": False}, "shared"),
    ("masked", "torch", {}, "LayoutError"),
    ("masked", "numpy", {}, "same"),
    ("dates", "torch", {}, "DTypeError"),
    ("objects", "dlx", {}, "DTypeError"),
    ("text", "torch", {"copy": True}, "DTypeError"),
    ("longdouble", "dlx", {}, "DTypeError"),
    ("scalar", "torch", {}, "copied"),
    ("scalar", "torch", {"copy": False}, "CopyRequiredError"),
    ("date scalar", "torch", {}, "DTypeError"),
    ("tensor", "numpy", {}, "shared"),
    ("tensor", "torch", {"detach": True}, "same"),
    ("expanded", "numpy", {"copy": False}, "shared"),
    ("expanded", "numpy", {"copy": True}, "copied"),
    ("leaf", "numpy", {}, "ConversionError"),
    ("leaf", "numpy", {"detach": True}, "shared"),
    ("leaf", "numpy", {"detach": True, "copy": True}, "copied"),
    ("leaf", "torch", {}, "same"),
    ("leaf", "torch", {"detach": True}, "shared"),
    ("conj", "numpy", {}, "copied"),
    ("conj", "numpy", {"copy": True}, "copied"),
    ("conj", "numpy", {"copy": False}, "CopyRequiredError"),
    ("conj leaf", "numpy", {}, "ConversionError"),
    ("conj leaf", "numpy", {"detach": True}, "copied"),
    ("neg", "dlx", {}, "copied"),
    ("sparse", "numpy", {}, "LayoutError"),
    ("sparse", "torch", {}, "same"),
    ("meta", "dlx", {}, "LayoutError"),
    ("two in a byte", "numpy", {}, "DTypeError"),
    ("bfloat16", "dlx", {}, "shared"),
    ("uint4", "dlx", {}, "DTypeError"),
    ("dlx.Tensor", "torch", {}, "shared"),
    ("dlx.Tensor", "dlx", {}, "same"),
    ("dlx.Tensor", "dlx", {"copy": True}, "copied"),
    ("read-only dlx.Tensor", "torch", {}, "copied"),
    ("read-only dlx.Tensor", "numpy", {"copy": False}, "shared"),
    ("bytes", "torch", {"copy": False}, "ReadOnlyError"),
    ("bytes", "dlx", {}, "shared"),
    ("bytearray", "torch", {"copy": False}, "shared"),
    ("memoryview", "torch", {}, "copied"),
    ("memoryview", "numpy", {}, "shared"),
    ("text buffer", "dlx", {}, "DTypeError"),
    ("ctypes", "torch", {}, "shared"),
    ("capsule", "torch", {}, "shared"),
    ("capsule", "dlx", {"copy": True}, "copied"),
    ("legacy capsule", "numpy", {"copy": False}, "shared"),
    ("read-only capsule", "torch", {}, "copied"),
    ("cuda capsule", "torch", {}, "DeviceError"),
    ("cuda capsule", "dlx", {"device": "cpu"}, "DeviceError"),
    ("pinned capsule", "torch", {}, "shared"),
    ("null capsule", "torch", {}, "LayoutError"),
    ("capsule 2.0", "torch", {}, "ProtocolError"),
    ("used capsule", "torch", {}, "ConsumedError"),
    ("generic_adapter", "torch", {"copy": False}, "shared"),
    ("generic_adapter", "dlx", {"copy": True}, "copied"),
    ("read-only generic producer", "torch", {}, "copied"),
    ("read-only generic producer", "torch", {"copy": False}, "ReadOnlyError"),
    ("cuda generic producer", "torch", {}, "DeviceError"),
    ("failing", "torch", {}, "ConversionError"),
    ("interface", "torch", {"copy": False}, "shared"),
    ("masked interface", "torch", {}, "LayoutError"),
    ("number", "torch", {}, "AdapterNotFoundError"),
    ("None", "torch", {}, "AdapterNotFoundError"),
]


def name_of(case):
    """The case in words."""
    return ", ".join([f"{case[0]} -> {case[1]}", *(f"{key}={value}" for key, value in case[2].items())])


def address(obj):
    """Return the address of an array of any kind; 0 if unknown."""
    return obj.address if isinstance(obj, Stranger) else dlx.describe(obj).address


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_plan_is_what_happens(np, torch, counting, case):
    """Outcome, error class, message and reason agree with the conversion of the same object."""
    source, to, options, expected = case
    obj = SOURCES[source](np, torch, counting)
    plan = dlx.plan(obj, to, **options)
    error = getattr(errors, expected, None)
    assert plan.outcome == ("refused" if error else expected)
    assert plan.target == to and (plan.error is None) == (error is None)
    if error:
        assert (plan.steps, plan.nbytes, plan.device) == ((), 0, None)
        with pytest.raises(errors.DlxError) as caught:
            dlx.convert(obj, to, **options)
        assert type(caught.value) is type(plan.error) is error
        assert (str(plan.error), plan.error.reason) == (str(caught.value), caught.value.reason)
        assert caught.value.fix or caught.value.__cause__
        return
    before = address(obj)
    result = dlx.convert(obj, to, **options)
    assert plan.device == dlx.describe(result).device
    assert (plan.outcome == "same") == (result is obj)
    if plan.outcome == "copied":
        assert address(result) != before and plan.nbytes == dlx.describe(result).nbytes and plan.steps
    elif dlx.describe(result).nbytes:
        assert address(result) == before and plan.nbytes == 0


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "None"])
def test_planning_changes_nothing(np, torch, counting, source):
    """Planning twice gives the same plan, and neither the object nor a capsule is used up."""
    obj = SOURCES[source](np, torch, counting)
    references = sys.getrefcount(obj)
    first, second = dlx.plan(obj, "torch"), dlx.plan(obj, "torch")
    assert (first.outcome, str(first)) == (second.outcome, str(second))
    if "capsule" in source and "used" not in source:
        assert not counting.name(obj).startswith("used")
    del first, second
    gc.collect(1)
    assert sys.getrefcount(obj) == references


def test_planning_frees_capsules_once(counting):
    """A planned capsule is freed by its owner, and a generic producer's capsule by its destructor."""
    before = counting.deleted
    capsule = counting.capsule((3,))
    dlx.plan(capsule, "dlx")
    gc.collect(1)
    assert counting.deleted == before
    del capsule
    assert counting.deleted == before + 1


class Plain:
    def __dlpack__(self):
        return dlx.convert(bytearray(3), to="dlx").__dlpack__()


def wrapper(torch):
    """A wrapper subclass."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(3), torch.ones(3))


HELD = {
    "shared": lambda n, t: n.ones(3),
    "copied": lambda n, t: n.ones(3)[::-1],
    "refused by a blocker": lambda n, t: t.ones(3, requires_grad=True),
    "refused by an incompatibility": lambda n, t: t.ones(3, dtype=t.uint8).view(t.float4_e2m1fn_x2),
    "refused by the export": lambda n, t: wrapper(t),
    "refused by the producer": lambda n, t: failing(ValueError("no")),
    "answered by the producer": lambda n, t: Plain(),
    "unknown": lambda n, t: type("Unknown", (), {})(),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_plan_holds_no_memory(np, torch, kind):
    """A plan, also one of a refusal, keeps neither the object nor its memory alive."""
    obj = HELD[kind](np, torch)
    alive = weakref.ref(obj)
    plan = dlx.plan(
        obj, "numpy" if kind.endswith("incompatibility") else "torch" if kind in ("shared", "copied") else "numpy"
    )
    del obj
    assert plan.outcome
    assert (held := alive()) is None, f"held by {[type(each) for each in gc.get_referrers(held)]}"


# ---- probe -----------------------------------------------------------------------------------------------------------


def test_probing_asks_a_generic_producer_once():
    """A plan for a generic producer asks for one capsule, which is dropped."""
    stranger = Stranger()
    assert dlx.plan(stranger, "dlx").outcome == "shared" and stranger.calls == 1


def test_without_probe_a_generic_producer_is_not_asked():
    """Without a probe the outcome is unknown instead of calling __dlpack__."""
    stranger = Stranger()
    plan = dlx.plan(stranger, "dlx", probe=False)
    assert (plan.outcome, plan.error, plan.steps, plan.device, stranger.calls) == ("unknown", None, (), None, 0)
    assert "unknown" in str(plan)


@pytest.mark.parametrize("source", [name for name in SOURCES if "generic" not in name and name != "failing"])
def test_probe_matters_to_generic_producers_only(np, torch, counting, source):
    """Arrays with a description have the same plan with and without a probe."""
    obj = SOURCES[source](np, torch, counting)
    assert str(dlx.plan(obj, "torch", probe=False)) == str(dlx.plan(obj, "torch"))


@pytest.mark.parametrize("answer", ["nonsense", None], ids=["nonsense", "raises"])
def test_nothing_is_said_of_the_device_of_a_producer_that_does_not_tell(answer):
    """The refusal says why, and no device is made up."""

    class Silent(Stranger):
        def __dlpack_device__(self):
            return answer or 1 // 0

    source = Silent()
    for options in ({}, {"probe": False}):
        plan = dlx.plan(source, to="numpy", **options)
        assert "its __dlpack_device__" in str(plan.error) and plan.source is None
        assert "Silent" in str(plan.error)
    assert source.calls == 0


def test_without_probe_known_refusals_are_still_said():
    """A device out of reach is refused without asking for a capsule."""
    assert type(dlx.plan(device_of(Stranger, (2, 0))(), "dlx", probe=False).error) is errors.DeviceError


@pytest.mark.parametrize("source", ["array", "tensor", "leaf", "conj", "swapped"])
def test_arrays_with_an_adapter_are_never_exported_by_a_plan(np, torch, monkeypatch, source):
    """A plan needs no capsule for arrays with an adapter."""
    obj = SOURCES[source](np, torch, None)
    monkeypatch.setattr(lookup.adapter_of(obj), "export", pytest.fail)
    assert dlx.plan(obj, "dlx", detach=True).outcome in ("shared", "copied")


# ---- wrong calls -----------------------------------------------------------------------------------------------------

WRONG = {
    "neither": ({}, TypeError, "to="),
    "both": ({"to": "dlx", "like": bytearray(1)}, TypeError, "not both"),
    "target is a number": ({"to": 3}, TypeError, "found int"),
    "target is an array": ({"to": bytearray(1)}, TypeError, "found bytearray"),
    "copy": ({"to": "dlx", "copy": "yes"}, ValueError, "'yes'"),
    "copy is a number": ({"to": "dlx", "copy": 2}, ValueError, "2"),
    "readonly": ({"to": "dlx", "readonly": "alias"}, ValueError, "'alias'"),
    "readonly is a flag": ({"to": "dlx", "readonly": True}, ValueError, "True"),
    "errors": ({"to": "dlx", "errors": "ignore"}, ValueError, "'ignore'"),
    "option": ({"to": "dlx", "writable": True}, TypeError, "writable"),
}


@pytest.mark.parametrize("verb", [dlx.convert, dlx.plan])
@pytest.mark.parametrize("why", WRONG)
def test_wrong_calls(verb, why):
    """An invalid call raises TypeError or ValueError with the argument, also from plan."""
    options, error, text = WRONG[why]
    with pytest.raises(error, match=text) as caught:
        verb(b"abc", **options)
    assert not isinstance(caught.value, errors.DlxError)


@pytest.mark.parametrize("like", [[1], None, 3, "text"], ids=repr)
def test_examples_that_are_no_target(like):
    """An example that is not an array of a target is refused by its type; None counts as omitted."""
    if like is None:
        with pytest.raises(TypeError, match="neither"):
            dlx.plan(b"abc", like=None)
        return
    plan = dlx.plan(b"abc", like=like)
    assert type(plan.error) is errors.AdapterNotFoundError and type(like).__name__ in str(plan)


@pytest.mark.parametrize("to", ["numpyy", "", "dlx_numpy", "builtins", "os", array, int, list, dict])
def test_targets_that_do_not_exist(to):
    """An unknown name, module or type is AdapterNotFoundError; known targets are listed."""
    plan = dlx.plan(b"abc", to=to)
    assert type(plan.error) is errors.AdapterNotFoundError
    assert {"dlx", "numpy", "torch"} <= set(plan.error.fix.removeprefix("Use one of: ").rstrip(".").split(", "))
    with pytest.raises(errors.AdapterNotFoundError):
        dlx.convert(b"abc", to=to)


@pytest.mark.parametrize(
    ("name", "target"), [("numpy.float32", "numpy"), ("numpy.ma.MaskedArray", "numpy"), ("torch.nn.Parameter", "torch")]
)
def test_types_that_are_no_target_name_one(np, torch, name, target):
    """A type that an adapter knows but does not list is refused, and the fix names a target that there is."""
    kind = functools.reduce(getattr, name.split(".")[1:], {"numpy": np, "torch": torch}[target])
    plan = dlx.plan(b"abc", to=kind)
    assert type(plan.error) is errors.AdapterNotFoundError and plan.error.fix == f"Pass to={target!r}."


# ---- how a plan reads ------------------------------------------------------------------------------------------------

READS = [
    (
        "reversed",
        {},
        "numpy.ndarray (float64[4], strides=(-1,)) -> torch: copied\n"
        "  copy: torch tensors cannot have negative strides, found (-1,) in elements (32 bytes)",
    ),
    (
        "reversed",
        {"copy": False},
        "numpy.ndarray (float64[4], strides=(-1,)) -> torch: refused\n"
        "  CopyRequiredError: cannot convert numpy.ndarray (float64[4], strides=(-1,)) to 'torch' without a copy: "
        "torch tensors cannot have negative strides, found (-1,) in elements. Drop copy=False.",
    ),
    ("array", {}, "numpy.ndarray (float64[2, 3]) -> torch: shared"),
    ("0-d", {}, "numpy.ndarray (float64[]) -> torch: shared"),
    ("array", {"copy": True}, "numpy.ndarray (float64[2, 3]) -> torch: copied\n  copy: copy=True (48 bytes)"),
    (
        "swapped",
        {},
        "numpy.ndarray (>f4[4]) -> torch: copied\n  resolve: its elements (>f4) are in the other byte order (16 bytes)",
    ),
    (
        "bytes",
        {},
        "bytes (uint8[3], read-only) -> torch: copied\n"
        "  copy: it is read-only, and torch tensors are always writable (3 bytes)",
    ),
    ("tensor", {}, "torch.Tensor (float32[2, 3]) -> torch: same"),
]


@pytest.mark.parametrize(("source", "options", "text"), READS, ids=lambda value: str(value)[:40])
def test_a_plan_reads_well(np, torch, source, options, text):
    """The text of a plan has the array, the steps, the reasons and the moved bytes."""
    assert str(dlx.plan(SOURCES[source](np, torch, None), "torch", **options)) == text


def test_all_reasons_of_a_copy_are_named(np, torch):
    """Several incompatibilities are cured by one copy, which names them all."""
    source = np.broadcast_to(np.arange(4.0)[::-1], (2, 4))
    (step,) = dlx.plan(source, "torch").steps
    assert "read-only" in step.why and "negative strides" in step.why


def test_bytes_are_counted_with_separators(torch):
    """Large numbers of bytes are readable."""
    assert "(4,000,000 bytes)" in str(dlx.plan(bytes(4_000_000), "torch"))


def test_plans_are_values(np, torch):
    """A plan cannot be changed, and its parts are there to be read by programs."""
    plan = dlx.plan(np.arange(3.0)[::-1], "torch")
    with pytest.raises(AttributeError):
        plan.outcome = "shared"
    assert plan.path == "" and plan.leaves == () and plan.device == dlx.Device("cpu")
    assert (plan.steps[0].do, plan.steps[0].nbytes, plan.nbytes) == ("copy", 24, 24)


# ---- describe --------------------------------------------------------------------------------------------------------

FACTS = {  # framework, type, dtype, shape, strides, read-only
    "array": ("numpy", "numpy.ndarray", "float64", (2, 3), (3, 1), False),
    "F-order": ("numpy", "numpy.ndarray", "float64", (2, 3), (1, 2), False),
    "broadcast": ("numpy", "numpy.ndarray", "float64", (3, 4), (0, 1), True),
    "swapped": ("numpy", "numpy.ndarray", ">f4", (4,), (1,), False),
    "odd field": ("numpy", "numpy.ndarray", "float32", (3,), None, False),
    "masked": ("numpy", "numpy.ma.MaskedArray", "int64", (2,), (1,), False),
    "dates": ("numpy", "numpy.ndarray", "datetime64[s]", (2,), (1,), False),
    "objects": ("numpy", "numpy.ndarray", "object", (1,), (1,), False),
    "scalar": ("numpy scalar", "numpy.float32", "float32", (), (), True),
    "tensor": ("torch", "torch.Tensor", "float32", (2, 3), (3, 1), False),
    "expanded": ("torch", "torch.Tensor", "float32", (2, 3), (0, 1), False),
    "leaf": ("torch", "torch.Tensor", "float32", (2,), (1,), False),
    "sparse": ("torch", "torch.Tensor", "float32", (2, 2), None, False),
    "meta": ("torch", "torch.Tensor", "float32", (2,), (1,), False),
    "bfloat16": ("torch", "torch.Tensor", "bfloat16", (2,), (1,), False),
    "uint4": ("torch", "torch.Tensor", "uint4", (2,), (1,), False),
    "dlx.Tensor": ("dlx", "dlx.Tensor", "uint8", (3,), (1,), False),
    "read-only dlx.Tensor": ("dlx", "dlx.Tensor", "uint8", (3,), (1,), True),
    "bytes": ("buffer", "bytes", "uint8", (3,), (1,), True),
    "bytearray": ("buffer", "bytearray", "uint8", (3,), (1,), False),
    "memoryview": ("buffer", "memoryview", "uint8", (3,), (-1,), False),
    "capsule": ("capsule", "PyCapsule", "float32", (3,), (1,), False),
    "read-only capsule": ("capsule", "PyCapsule", "float32", (3,), (1,), True),
    "interface": ("array_interface", "test_plan.Interface", "uint8", (8,), (1,), False),
    "generic_adapter": ("dlpack", "test_plan.Stranger", "", None, None, False),
}


@pytest.mark.parametrize("source", FACTS)
def test_describe(np, torch, counting, source):
    """A description has the facts of the array, and nothing is used up to learn them."""
    obj = SOURCES[source](np, torch, counting)
    info = dlx.describe(obj)
    found = (info.framework, info.type_name, info.dtype_name, info.shape, info.strides, info.readonly)
    assert found == FACTS[source]
    assert dlx.describe(obj) == info and info.type_name in str(info)
    assert not isinstance(obj, Stranger) or obj.calls == 0


def test_describe_says_where(np, torch):
    """A description has device, address, bytes and alignment."""
    block = np.zeros(256, "u1")
    obj = block[-block.__array_interface__["data"][0] % 64 :][:8].view("f4")
    info = dlx.describe(obj)
    assert (info.device, info.address, info.nbytes) == ((1, 0), obj.__array_interface__["data"][0], 8)
    assert info.alignment >= 64 and "__dlpack__" in info.protocols
    assert dlx.describe(obj[1:]).alignment == 4


def test_describe_notes_what_decides(torch):
    """The notes have the properties that block an unchanged export."""
    assert dlx.describe(torch.ones(1, requires_grad=True)).notes == ("requires_grad",)
    assert dlx.describe(torch.ones(1, dtype=torch.complex64).conj()).notes == ("is_conj",)


def test_describe_devices():
    """A generic producer's device is known without asking for a capsule."""
    assert dlx.describe(device_of(Stranger, (2, 1))()).device == dlx.Device("cuda:1")


def test_describe_of_a_used_capsule(counting):
    """A capsule that was used before cannot be described."""
    with pytest.raises(errors.ConsumedError):
        dlx.describe(used(counting))


def test_describe_holds_nothing():
    """A description keeps no buffer."""
    source, mapped = bytearray(3), mmap.mmap(-1, 8)
    infos = dlx.describe(source), dlx.describe(mapped)
    source.append(1)
    mapped.close()
    assert [info.nbytes for info in infos] == [3, 8]


def test_equal_plans_are_equal_and_pickle(np, torch):
    """The function of a step is not part of its value."""
    for obj, options in ((np.zeros(3, ">f8"), {}), (torch.zeros(3, requires_grad=True), {"detach": True})):
        plan = dlx.plan(obj, to="dlx", **options)
        assert plan.steps and plan == dlx.plan(obj, to="dlx", **options) == pickle.loads(pickle.dumps(plan))


def test_a_subclass_with_an_export_of_its_own_is_planned_as_it_is_converted(np, torch):
    """Only its export is used, not the array that numpy sees."""

    class Own(np.ndarray):
        def __dlpack__(self, **keywords):
            return (np.asarray(self) * 0 + 7).__dlpack__(**keywords)

    def made():
        array = np.zeros(3, "f4")
        array.flags.writeable = False
        return array.view(Own)

    assert dlx.plan(made(), to="torch", copy=False).outcome == "shared"
    assert dlx.plan(made(), to="torch", copy=False, probe=False).outcome == "unknown"
    for tree in ([made()], [made(), made()]):
        assert [tensor.tolist() for tensor in dlx.convert(tree, to="torch", copy=False)] == [[7, 7, 7]] * len(tree)


def test_a_copy_of_a_subclass_with_an_export_of_its_own_is_not_foretold(torch):
    """Its resolved array is exported by its `__dlpack__`, whose result is unknown before the call."""

    class Own(torch.Tensor):
        def __dlpack__(self, *args, **keywords):
            return torch.full((3,), 7.0).__dlpack__(*args, **keywords)

    def made():
        return torch.zeros(3, dtype=torch.complex64).as_subclass(Own).conj()

    assert dlx.plan(made(), to="numpy").outcome == "unknown"
    for tree in ([made()], [made(), made()]):
        assert [array.tolist() for array in dlx.convert(tree, to="numpy")] == [[7, 7, 7]] * len(tree)


def test_managed_memory_as_that_of_a_device_needs_the_driver():
    """Without a driver, the plan has the error of the conversion."""
    memory = dlx.from_dlpack(bytearray(64))
    managed = dlx.from_pointer(memory.data_ptr, (8,), "float32", device="cuda_managed", owner=memory)
    plan = dlx.plan(managed, to="dlx", device="cuda")
    if plan.error is None:
        pytest.skip("there is a driver")
    with pytest.raises(errors.DeviceError) as caught:
        dlx.convert(managed, to="dlx", device="cuda")
    assert str(caught.value) == str(plan.error)


def test_what_an_export_says_is_what_the_array_says(np, torch):
    """The description of an array that was exported already is the one that the array itself would give."""
    base = np.arange(24, dtype="f4").reshape(4, 6)
    locked = base.view()
    locked.flags.writeable = False
    arrays = [base, locked, base.T, base[::-1, ::2], base[:0], base[:0, ::2], base[0, :1].reshape(()), np.ones(3, "?")]
    arrays += [np.ones((2, 3), name) for name in ("i8", "u2", "f2", "c16", "q", "l")]
    tensors = [torch.from_numpy(base), torch.from_numpy(base).T, torch.ones(4, 6)[::2, ::3], torch.ones(0, 3).T]
    tensors += [torch.ones((), dtype=getattr(torch, name)) for name in ("bfloat16", "bool", "complex64", "int64")]
    tensors += [torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(3).expand(2, 3)]
    for obj in (*arrays, *tensors):
        adapter = lookup.adapter_of(obj)
        found = adapter.describe(obj)
        assert found.tensor is not None
        assert found.info() == adapter._info(obj)


def test_a_kept_decision_names_the_alignment_of_each_array(np, torch):
    """Arrays of one layout differ in their address only, and all of one alignment share a decision."""
    block = np.zeros(3 * 4096, "u1")
    start = -block.ctypes.data % 4096
    dlx.plan(block, to="torch")  # loading adapters clears the caches
    decisions = registry.target("torch").decisions
    decisions.clear()
    for offset, alignment in ((1, 1), (2, 2), (4097, 1), (3, 1), (6, 2)):
        array = block[start + offset :][:64].view("f4")
        (step,) = dlx.plan(array, to="torch").steps
        assert str(step) == f"copy: torch needs data aligned to 4 bytes, found {alignment} (64 bytes)"
        with pytest.raises(dlx.errors.CopyRequiredError, match=rf"4 bytes, found {alignment}\b"):
            dlx.convert(array, to="torch", copy=False)
    assert len(decisions) == 2


class Unsized(MyLib):
    """It copies its arrays itself, and does not know their bytes before they are exported."""

    def describe(self, obj):
        return Description(dlx.ArrayInfo("mylib", "mylib.Array", nbytes=None))

    def copy(self, obj, device=None):
        return Array(dlx.convert(obj.tensor, to="dlx", copy=True))


def test_a_copy_of_unknown_size_by_the_framework_itself(monkeypatch):
    """It is planned and made; its bytes count as none."""
    package = types.ModuleType("mylib")
    package.Array = type("Array", (Array,), {"__module__": "mylib"})
    monkeypatch.setitem(sys.modules, "mylib", package)
    plugin(monkeypatch, "dlx_mylib", lambda: [Unsized()])
    use(Registry({"mylib": "dlx_mylib"}), monkeypatch.setattr)
    source = package.Array(dlx.from_dlpack(b"abc"))
    found = dlx.plan(source, to="mylib", copy=True)
    assert found.outcome == "copied" and [(step.do, step.nbytes) for step in found.steps] == [("copy", 0)]
    copied = dlx.convert.__wrapped__(source, to="mylib", copy=True)
    assert copied.tensor.data_ptr != source.tensor.data_ptr and bytes(memoryview(copied.tensor)) == b"abc"


@pytest.mark.parametrize("call", [dlx.convert, dlx.convert.__wrapped__, dlx.plan], ids=["fast", "slow", "plan"])
@pytest.mark.parametrize("source", ["array", "list"])
@pytest.mark.parametrize("name", ["readonly", "errors"])
def test_an_array_is_no_word(np, name, source, call):
    """It is not compared with words, which raises for numpy arrays."""
    array = np.zeros(2)
    with pytest.raises(ValueError, match=rf"^{name} must be '(copy|raise)', '(error|collect)' or") as caught:
        call([array] if source == "list" else array, to="dlx", **{name: array})
    assert str(caught.value).endswith("found array([0., 0.])")
