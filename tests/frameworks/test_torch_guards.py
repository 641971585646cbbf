"""The C guards of torch tensors: they agree with torch, are used only if they do, and are optional."""

from __future__ import annotations

import gc
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.arrays.agreement import agree, emptied
from support.foreign.exchange import Exchange
from support.project import compiled

import dlx
from dlx import errors
from dlx._core import native
from dlx._core.native import ffi
from dlx._registry.registry import registry

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")


@pytest.fixture
def guards(torch):
    """Return the compiled guards with torch's functions."""
    module = pytest.importorskip("dlx_adapters._dlx_torch")
    if module.guard_function() is None:
        pytest.skip("this torch lacks a function of the guards")
    return module


@pytest.fixture
def adapter(torch):
    """Return torch's adapter; its cached guards and all routes are cleared before and after."""
    found = registry.target("torch").adapter

    def forget():
        found.fast_path.guard_function.cache_clear()
        native.routes_clear()

    forget()
    yield found
    forget()


def tensors(torch):
    """Return tensors of every kind that the guards check, and ordinary ones."""
    base = torch.arange(24.0).reshape(2, 3, 4)
    grad = torch.ones(3, requires_grad=True)
    conj = torch.ones(2, 2, dtype=torch.complex64).conj()
    plain = [base, base[1:], base[..., ::2], base.mT, base[0, 0, 0], torch.empty(0, 3), torch.ones(3, dtype=torch.int8)]
    return [*plain, grad, grad * 2, grad.detach(), torch.nn.Parameter(base), conj, conj.imag, conj.real, conj.T]


@pytest.mark.torch("2.10")  # older versions store a tensor elsewhere
def test_answers_are_those_of_torch(torch, guards):
    """Gradient, neg bit, conj bit, storage bytes and offset agree for every kind of tensor."""
    for tensor in tensors(torch):
        assert guards.handle(tensor) == tensor._cdata
        bits = (tensor.requires_grad, tensor.is_neg(), tensor.is_conj())
        storage = tensor.untyped_storage().nbytes(), tensor.storage_offset()
        assert guards.read_facts(tensor) == (*bits, *storage)


@pytest.mark.torch("2.10")  # older versions store a tensor elsewhere
def test_they_are_used(torch, guards, adapter):
    """Correct guards are used; torch's methods are not called."""
    function, answered = adapter.fast_path.guard_function()
    assert "dlx_guard_function" in repr(function)
    assert answered == {"requires_grad", "is_neg", "is_conj", dlx.adapter.OWNER_BOUNDS}


@pytest.mark.parametrize("wrong", ["handle", "read_facts"])
def test_a_wrong_answer_is_noticed(torch, guards, adapter, monkeypatch, wrong):
    """Guards that differ from torch in any point are not used."""
    real = getattr(guards, wrong)
    spoilt = {
        "handle": lambda tensor: real(tensor) + 16,
        "read_facts": lambda tensor: (*real(tensor)[:1], not real(tensor)[1], *real(tensor)[2:]),
    }
    monkeypatch.setattr(guards, wrong, spoilt[wrong])
    assert adapter.fast_path.guard_function() is None


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("to", ["numpy", "dlx"])
def test_with_and_without_them_the_fast_path_is_right(np, torch, adapter, monkeypatch, to, in_c):
    """The fast path agrees with the slow path, with guards in C and in Python."""
    if not in_c:
        monkeypatch.setattr(adapter, "fast_path", replace(adapter.fast_path, guard_function=None))
    for i in range(len(tensors(torch))):
        agree(lambda i=i: tensors(torch)[i], to)
    for nbytes, frozen in [(0, False), (8, False), (0, True), (8, True)]:
        assert agree(lambda n=nbytes, f=frozen: emptied(torch, n, f), to)[0] is errors.LayoutError


@pytest.mark.torch("2.10")  # older versions store a tensor elsewhere
def test_first_learnt_inside_a_transform(np, torch, guards, adapter):
    """A route learnt inside a transform also has its guards in C."""
    outside = torch.ones(3)
    torch.func.vmap(lambda t: (dlx.convert(outside, to="numpy"), t)[1])(torch.ones(2, 3))
    learnt = adapter.fast_path.guard_function
    assert learnt.cache_info().currsize == 1 and learnt() is not None


def test_nothing_leaks_where_they_refuse(np, torch, guards, adapter):
    """A refused tensor, beyond its storage, leaks nothing after it was borrowed."""
    cut, before = emptied(torch, 8, True), native.live()
    for _ in range(100):
        with pytest.raises(errors.LayoutError):
            dlx.convert(cut, to="numpy")
    gc.collect()
    assert native.live() == before


def borrowed(program, tensor):
    """Return the result of a table's slot for a tensor, or its error."""
    try:
        t = program.borrow(tensor)
    except Exception as error:
        return type(error), str(error)
    numbers = [[each[i] for i in range(t.ndim)] for each in (t.shape, t.strides)]
    dtype = t.dtype.code, t.dtype.bits, t.dtype.lanes
    return int(ffi.cast("uintptr_t", t.data)), t.device.device_type, t.device.device_id, dtype, t.byte_offset, *numbers


@pytest.mark.torch("2.10")  # older versions store a tensor elsewhere
@pytest.mark.filterwarnings("ignore:.*(sparse|nested|quantized|quantization|BComplex32).*:UserWarning")
def test_the_slot_that_borrows_says_what_torchs_own_does(torch, guards, adapter):
    """The slots agree for every kind and dtype, without memory, and for tensors that only torch's slot can read."""
    known = SimpleNamespace(__dlpack_c_exchange_api__=adapter.fast_path.exchange())
    ours, own = (Exchange(str(compiled("exchange")), holder) for holder in (known, torch.Tensor))
    assert ours.address != own.address
    ones, dtypes = torch.ones(2, 2), {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    odd = [ones.to_sparse(), ones.to("meta"), ones.to_mkldnn(), torch._efficientzerotensor(2, 2)]
    odd += [torch.nested.nested_tensor([ones, ones[:1]]), torch.ones(0).expand(3, 0)]
    each_dtype = [torch.empty(3, dtype=each) for each in sorted(dtypes, key=str) if "q" not in str(each)]
    whole = [*tensors(torch), *odd, *each_dtype]
    for tensor in whole:
        assert borrowed(ours, tensor) == borrowed(own, tensor)
    assert sum(isinstance(borrowed(ours, tensor)[0], int) for tensor in whole) > 20


@pytest.mark.torch("2.10")
@pytest.mark.native("torch reports that the emulator has no MIDR_EL1")
def test_tensors_without_memory_are_refused_without_a_word(torch, guards, python):
    """Torch's C functions, which write to stderr on failure, are not called for such tensors."""
    python(
        """
        import warnings
        import torch, dlx
        from dlx import errors
        warnings.simplefilter("ignore")
        dlx.convert(torch.ones(3), to="numpy")

        def refused(tensor):
            try:
                dlx.convert(tensor, to="numpy")
            except errors.DlxError:
                return tensor
            raise AssertionError(tensor)

        ones = torch.ones(2, 2)
        torch.func.vmap(refused)(ones)
        torch.func.functionalize(refused)(ones)
        for odd in (ones.to_sparse(), ones.to("meta"), ones.to_mkldnn(), torch.nested.nested_tensor([ones, ones[:1]])):
            refused(odd)
        """,
        imported=True,
    )


TABLES = """
import ctypes, torch
from dlx_adapters import _dlx_torch
from dlx._core.native import ffi

NAME = ctypes.create_string_buffer(b"dlpack_exchange_api")
pointer, make = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_void_p]
make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3

def table(capsule):
    return ffi.cast("DLPackExchangeAPI*", pointer(capsule, ctypes.addressof(NAME)))

def capsule(table):
    return make(int(ffi.cast("uintptr_t", table)), ctypes.addressof(NAME), None)

real = torch.Tensor.__dlpack_c_exchange_api__
known, samples = table(real), [torch.ones(2, 3)]
assert _dlx_torch.guard_function() is not None
"""


@pytest.mark.torch("2.10")
def test_a_slot_that_says_something_else_is_not_replaced(torch, guards, python):
    """Torch's own table is used if the fields of a tensor differ from its slot's result."""
    python(
        TABLES
        + textwrap.dedent("""
        slot = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        asked = slot(int(ffi.cast("uintptr_t", known.dltensor_from_py_object_no_sync)))

        @slot
        def otherwise(obj, out):
            rc = asked(obj, out)
            ffi.cast("DLTensor*", out).byte_offset = 4
            return rc

        copy = ffi.new("DLPackExchangeAPI*", known[0])
        address = ctypes.cast(otherwise, ctypes.c_void_p).value
        copy.dltensor_from_py_object_no_sync = ffi.cast(
            ffi.typeof(copy.dltensor_from_py_object_no_sync), address
        )
        lying = capsule(copy)
        assert _dlx_torch.exchange_table(lying, samples) is lying
        assert _dlx_torch.exchange_table(real, samples) is not real  # the real table needs no exception
        assert _dlx_torch.exchange_table(lying, samples) is lying
        """),
        imported=True,
    )


@pytest.mark.torch("2.10")
def test_only_tables_of_a_known_version_are_read(torch, guards, python):
    """Slots of another major version have other meanings: an older table behind it is used, if any."""
    python(
        TABLES
        + textwrap.dedent("""
        newer = ffi.new("DLPackExchangeAPI*")
        newer.header.version.major = known.header.version.major + 1
        newer.dltensor_from_py_object_no_sync = ffi.cast(
            ffi.typeof(newer.dltensor_from_py_object_no_sync), 8
        )
        given = capsule(newer)
        assert _dlx_torch.exchange_table(given, samples) is given
        newer.header.prev_api = ffi.addressof(known.header)
        found = _dlx_torch.exchange_table(given, samples)
        assert found is not given
        made = table(found)
        assert made.header.version.major == known.header.version.major
        """),
        imported=True,
    )
