"""Foreign exchange tables in the fast path: hostile tables do no harm, and changes of a type are noticed."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from dataclasses import replace

import pytest
from support.foreign.hostile import FLOAT32, MODES, NAME, OLD_NAME, Owner, tensor
from support.processes.calls import called

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry.registry import Registry
from dlx.adapter import Adapter, Capabilities, Guard, Layout


def guarded(mylib, *guards):
    """Give its arrays guards."""
    mylib.adapter.fast_path = replace(mylib.adapter.fast_path, guards=guards)


# ---- consumers that fail ---------------------------------------------------------------------------------------------

TABLE = pytest.mark.torch("2.10")  # tensors of older ones have no table, and take the Python path
FAILING = MODES[1:-1]
SILENT = ("fails silently", "silent after", "null result", "null after")


def test_a_good_consumer_takes_by_its_table(mylib, hostile):
    """If nothing fails, the table creates the result without Python, and the result keeps the memory alive."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    owner = Owner(64)
    dlx.convert(tensor(owner), to="mylib")
    hostile.set("takes")
    mylib.adapter.loads = 0
    before, live = sys.getrefcount(owner), native.live()
    for n in (1, 2):
        result = dlx.convert(tensor(owner), to="mylib")
        assert hostile.imports == n and mylib.adapter.loads == 0 and native.live() > live
        assert sys.getrefcount(owner) > before
        del result
        assert native.live() == live and sys.getrefcount(owner) == before


@pytest.mark.parametrize("copy", [None, False])
def test_pinned_memory_becomes_host_memory_where_it_is_asked_for(mylib, hostile, copy):
    """A table imports the tensor's device, so the Python path handles another requested device."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    accepted = Capabilities(dtypes=None, layouts=Layout.ANY, min_alignment=1, keeps_readonly=True, device_types=None)
    mylib.adapter.capabilities = lambda: accepted
    hostile.set("takes")
    owner = Owner(64)
    address = native.buffer_address(memoryview(owner))
    pinned = native.tensor_new(address, (2, 3), None, FLOAT32, (3, 0), 0, owner)
    for _ in range(3):
        dlx.convert(tensor(owner), to="mylib")
    imports = hostile.imports
    _, found = dlx.convert(pinned, to="mylib", copy=copy, device="cpu")
    assert imports and (found.device.name, found.data_ptr, hostile.imports) == ("cpu", address, imports)


@pytest.mark.parametrize("mode", FAILING)
def test_a_failing_consumer_is_final(mylib, hostile, mode):
    """Its failure is a ConversionError with its cause, if any; the consumer is called once, without the Python path."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    dlx.convert(tensor(Owner(64)), to="mylib")
    hostile.set(mode)
    with pytest.raises(errors.ConversionError, match="mylib refused it") as caught:
        dlx.convert(tensor(Owner(64)), to="mylib")
    assert (hostile.imports, mylib.adapter.loads) == (1, 0)
    assert type(caught.value.__cause__) is (type(None) if mode in SILENT else ValueError)
    assert caught.value.target == "mylib" and "float32[2, 3]" in caught.value.source
    if mode == "fails later":
        hostile.free.hostile_delete_kept(0)


@pytest.mark.parametrize("thread", [0, 1])
@pytest.mark.parametrize("mode", FAILING)
def test_a_failing_consumer_leaks_nothing_and_frees_nothing_twice(mylib, hostile, mode, thread):
    """A failure does not change the owner's reference count, and neither does a late deleter."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    owner = Owner(64)
    source = tensor(owner)
    hostile.set(mode)
    before, live = sys.getrefcount(owner), native.live()
    for _ in range(5):
        with pytest.raises(errors.ConversionError):
            dlx.convert(source, to="mylib")
        assert (sys.getrefcount(owner), native.live()) == (before, live)
        if mode == "fails later":
            assert hostile.free.hostile_delete_kept(thread) == 0
            assert (sys.getrefcount(owner), native.live()) == (before, live)
    assert source.shape == (2, 3)
    del source
    assert native.live() == live - 1 and sys.getrefcount(owner) == before - 1


@pytest.mark.parametrize("mode", FAILING)
@pytest.mark.parametrize("source", ["numpy", pytest.param("torch", marks=TABLE)])
def test_a_failing_consumer_of_other_frameworks(np, torch, mylib, hostile, mode, source):
    """The same for arrays of numpy and torch: nothing of them is kept, or freed twice."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    array = np.ones(1000) if source == "numpy" else torch.ones(1000)
    owner = array if source == "numpy" else array.untyped_storage()
    dlx.convert(array, to="mylib")
    hostile.set(mode)
    before, live = sys.getrefcount(owner), native.live()
    for _ in range(5):
        with pytest.raises(errors.ConversionError):
            dlx.convert(array, to="mylib")
        if mode == "fails later":
            hostile.free.hostile_delete_kept(1)
        assert hostile.imports and (sys.getrefcount(owner), native.live()) == (before, live)
    assert array.sum() == 1000


@pytest.mark.parametrize("mode", ["takes", *FAILING])
def test_what_somebody_else_holds_is_handed_over_as_well(mylib, hostile, mode):
    """A buffer of the very tensor that is handed over keeps its memory, whatever the consumer does."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    owner = Owner(64)
    source = tensor(owner)
    dlx.convert(source, to="mylib")
    hostile.set(mode)
    before, live = sys.getrefcount(owner), native.live()
    for _ in range(5):
        borrowed, result = dlx.convert._borrow(source, "mylib"), None
        buffer = memoryview(borrowed)
        with contextlib.suppress(errors.ConversionError):
            result = dlx.convert._load(borrowed, source, "mylib")
        if mode == "fails later":
            hostile.free.hostile_delete_kept(1)
        del borrowed
        assert hostile.imports and native.live() - live == 2 + (result is not None)  # the buffer has its own
        assert bytes(buffer) == bytes(owner)[:24]
        del result
        assert bytes(buffer) == bytes(owner)[:24]
        buffer.release()
        assert (sys.getrefcount(owner), native.live()) == (before, live)


def test_a_consumer_without_a_table_takes_a_tensor(mylib):
    """Its adapter's `load` is all of Python that is entered, for arrays, in trees and with options."""
    owner = Owner(64)
    source = tensor(owner)
    dlx.convert(source, to="mylib")
    results = []

    def convert():
        results[:] = dlx.convert(source, to="mylib"), dlx.convert(source, to="mylib", copy=True)
        results.append(dlx.convert({"a": [source]}, to="mylib"))

    before, live = sys.getrefcount(owner), native.live()
    called(convert)  # a route is learnt the first time
    assert called(convert) == ["convert"] + ["load"] * 3
    alone, copied, tree = results
    results.clear()
    assert alone[1].data_ptr == tree["a"][0][1].data_ptr == source.data_ptr != copied[1].data_ptr
    assert native.live() == live + 3
    del alone, copied, tree
    assert (sys.getrefcount(owner), native.live()) == (before, live)


@pytest.mark.parametrize("tree", [False, True])
def test_a_tensor_that_had_to_be_copied_is_not_pinned(torch, mylib, hostile, tree):
    """A copy that only the target needs does not pin torch's storage."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    mylib.adapter.capabilities = lambda: Capabilities(dtypes=None, min_alignment=1, keeps_readonly=True)
    hostile.set("takes")
    tensor = torch.arange(8.0)[::2]
    source = [tensor] if tree else tensor
    for _ in range(2):
        dlx.convert(source, to="mylib")
    if hasattr(torch.Tensor, NAME):  # not before 2.10
        assert hostile.imports and mylib.adapter.loads <= 1
    tensor.untyped_storage().resize_(64)


def test_a_consumer_that_checks_by_itself_is_asked(mylib):
    """A tensor that its variant refuses is never passed to it."""
    owner = Owner(64)
    address = native.buffer_address(memoryview(owner))
    source = native.tensor_new(address, (2, 3), (1, 2), FLOAT32, (1, 0), 0, owner)
    strict = type(mylib.adapter)()
    strict.capabilities = lambda: Capabilities(dtypes=None, min_alignment=1, keeps_readonly=True)
    type(mylib.adapter).variant = lambda self, wanted: strict
    for _ in range(3):
        _, taken = dlx.convert(source, to="mylib")
        assert taken.data_ptr != source.data_ptr


@pytest.mark.parametrize("error", [RuntimeError, errors.LayoutError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("tree", [False, True])
def test_a_consumer_without_a_table_may_fail(mylib, error, tree):
    """The slow path raises the same error, and nothing is kept alive."""

    def load(tensor):
        raise error("hostile")

    owner = Owner(64)
    source = tensor(owner)
    obj = [source, source] if tree else source
    dlx.convert(obj, to="mylib")
    dlx.convert(obj, to="mylib")
    mylib.adapter.load = load
    native.routes_clear()
    before, live = sys.getrefcount(owner), native.live()
    told = []
    for convert in (dlx.convert.__wrapped__, dlx.convert, dlx.convert):
        with pytest.raises(error if error is not RuntimeError else errors.ConversionError) as caught:
            convert(obj, to="mylib")
        told.append((type(caught.value), str(caught.value), type(caught.value.__cause__)))
        del caught
    assert told[0] == told[1] == told[2]
    assert (sys.getrefcount(owner), native.live()) == (before, live)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, SystemExit])
def test_what_is_no_refusal_goes_through(mylib, hostile, error):
    """MemoryError, KeyboardInterrupt and SystemExit of a consumer propagate unchanged, like on the slow path."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    hostile.set("raises", error)
    owner = Owner(64)
    source = tensor(owner)
    before, live = sys.getrefcount(owner), native.live()
    with pytest.raises(error):
        dlx.convert(source, to="mylib")
    assert hostile.imports == 1 and (sys.getrefcount(owner), native.live()) == (before, live)


@pytest.mark.parametrize("error", [RuntimeError, BufferError, TypeError, StopIteration, OSError])
def test_any_refusal_has_its_cause(mylib, hostile, error):
    """Any exception of a consumer is the cause of the ConversionError."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    hostile.set("raises", error)
    with pytest.raises(errors.ConversionError, match=f"{error.__name__}: hostile") as caught:
        dlx.convert(tensor(Owner(64)), to="mylib")
    assert type(caught.value.__cause__) is error


# ---- producers that fail or lie --------------------------------------------------------------------------------------

BAD_LOANS = {
    "fails": {"rc": -1, "error": True},
    "fails silently": {"rc": -1},
    "odd return value": {"rc": 7, "error": True},
    "negative extent": {"shape": (2, -3)},
    "huge extents": {"shape": (2**40, 2**40)},
    "overflowing strides": {"shape": (2, 3), "strides": (2**62, 2**62)},
    "null data": {"address": 0},
    "null shape": {"shape": None, "ndim": 2},
    "negative ndim": {"ndim": -1},
    "huge ndim": {"ndim": 2**31 - 1},
    "no bits": {"dtype": (2, 0, 1)},
    "no lanes": {"dtype": (2, 32, 0)},
    "code 200": {"dtype": (200, 32, 1)},
    "code 32": {"dtype": (32, 32, 1)},
    "handle": {"dtype": (3, 64, 1)},
    "device 2": {"device": 2},
    "device -5": {"device": -5},
    "huge offset": {"offset": 2**64 - 1},
}


@pytest.mark.parametrize("target", ["numpy", "dlx"])
@pytest.mark.parametrize("loan", BAD_LOANS)
def test_a_bad_loan_falls_back_to_one_dlpack_call(np, mylib, hostile, loan, target):
    """If a borrow slot fails or returns garbage, `__dlpack__` exports the array in one call; nothing leaks."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    hostile.lend(**{"address": native.buffer_address(memoryview(hostile.memory)), **BAD_LOANS[loan]})
    source = mylib.Array()
    before, live = sys.getrefcount(source), native.live()
    for n in (1, 2):
        result = dlx.convert(source, to=target)
        if loan != "handle" or target == "numpy":
            assert (source.asked, hostile.borrows) == (n, n)
            assert result.shape == (2, 3) and native.live() > live
        del result
        assert (sys.getrefcount(source), native.live()) == (before, live)


def test_a_good_loan_needs_no_python(np, mylib, hostile):
    """A borrowed tensor is converted without `__dlpack__`, and the array is kept alive."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    source = mylib.Array()
    before = sys.getrefcount(source)
    result = dlx.convert(source, to="dlx")
    assert (source.asked, hostile.borrows) == (0, 1) and sys.getrefcount(source) == before + 1
    assert result.data_ptr == native.buffer_address(memoryview(hostile.memory)) and result.strides == (3, 1)
    del result
    assert sys.getrefcount(source) == before


@pytest.mark.parametrize("zero", [(0,), (0, 3), (2, 0)])
def test_a_loan_without_elements_needs_no_address(np, mylib, hostile, zero):
    """NULL data is valid for an array without elements."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    hostile.lend(0, zero)
    assert dlx.convert(mylib.Array(), to="dlx").shape == zero
    assert dlx.convert(mylib.Array(), to="numpy").shape == zero


# ---- valid and invalid tables ----------------------------------------------------------------------------------------

TABLES = {
    "capsule": (NAME, lambda hostile: hostile.capsule(), True),
    "newer with ours behind": (NAME, lambda hostile: hostile.capsule("newer"), True),
    "old name, int": (OLD_NAME, lambda hostile: hostile.table(), True),
    "old name, capsule": (OLD_NAME, lambda hostile: hostile.capsule(), True),
    "old name, newer": (OLD_NAME, lambda hostile: hostile.table("newer"), True),
    "int under the new name": (NAME, lambda hostile: hostile.table(), False),
    "other major version": (NAME, lambda hostile: hostile.capsule("foreign"), False),
    "NULL slots": (NAME, lambda hostile: hostile.capsule("empty"), False),
    "another capsule": (NAME, lambda hostile: hostile.capsule(misnamed=True), False),
    "old name, another capsule": (OLD_NAME, lambda hostile: hostile.capsule(misnamed=True), False),
    "old name, zero": (OLD_NAME, lambda hostile: 0, False),
    "old name, too big": (OLD_NAME, lambda hostile: 2**70, False),
    "None": (NAME, lambda hostile: None, False),
    "text": (NAME, lambda hostile: "table", False),
    "old name, text": (OLD_NAME, lambda hostile: "table", False),
    "old name, float": (OLD_NAME, lambda hostile: 1.5, False),
    "property": (NAME, lambda hostile: property(lambda self: 1 / 0), False),
}


@pytest.mark.parametrize("given", TABLES)
def test_what_is_a_table(mylib, hostile, given):
    """A capsule of that name with our major version is, an int under the old name too; anything else is ignored."""
    name, make, good = TABLES[given]
    setattr(mylib.Array, name, make(hostile))
    source = mylib.Array()
    for _ in range(2):
        assert dlx.convert(source, to="dlx").shape == (2, 3)
        dlx.convert(tensor(Owner(64)), to="mylib")
    assert (source.asked, mylib.adapter.loads) == ((0, 0) if good else (2, 2))
    assert (hostile.borrows, hostile.imports) == ((2, 2) if good else (0, 0))


def test_a_broken_new_name_leaves_the_old_one(mylib, hostile):
    """If the new attribute is not a table, the old one is used."""
    mylib.Array.__dlpack_c_exchange_api__ = "no table"
    mylib.Array.__c_dlpack_exchange_api__ = hostile.table()
    source = mylib.Array()
    dlx.convert(source, to="dlx")
    assert hostile.borrows == 1


@pytest.mark.parametrize("value", ["True", "False", "-1", "3"])
def test_bool_and_tiny_numbers_are_no_addresses(python, value):
    """A bool or a number that can be no address under the old name is ignored, not followed."""
    out = python(
        f"""
        import dlx
        from dlx._core import native
        class Array: pass
        Array.__c_dlpack_exchange_api__ = {value}
        native.routes_clear()
        native.Source(Array)
        print("alive")
        """,
        args=(),
    )
    assert out == "alive\n"


@pytest.mark.parametrize(("early", "late"), [(1, 1), (0, 1), (1, 0)])
def test_an_adapter_may_answer_its_guards_in_c(mylib, hostile, monkeypatch, early, late):
    """Its function is called without a tensor, then with the borrowed one; 0 leaves the array to Python."""
    asked = []

    def answer(array, borrowed):
        asked.append(bool(borrowed))
        return late if borrowed else early

    function = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(answer)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make(ctypes.cast(function, ctypes.c_void_p), b"dlx_guard_function", None)
    guards = (Guard("is_odd"),)  # Array has no such attribute
    found = replace(mylib.adapter.fast_path, guards=guards, guard_function=lambda: (capsule, frozenset({"is_odd"})))
    monkeypatch.setattr(mylib.adapter, "fast_path", found)
    mylib.Array.is_odd = False
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    source = mylib.Array()
    result = dlx.convert(source, to="dlx")
    assert asked == [False, True][: 1 + early]
    assert (source.asked, hostile.borrows) == ((0, 1) if early and late else (1, early))
    assert result.shape == (2, 3)


def test_an_attribute_on_the_instance_is_no_table(mylib, hostile):
    """Only the type's attribute counts."""
    source = mylib.Array()
    source.__dlpack_c_exchange_api__ = hostile.capsule()
    dlx.convert(source, to="dlx")
    assert source.asked == 1 and hostile.borrows == 0


def test_subclasses_take_the_python_path(mylib, hostile):
    """A subclass inherits the table, but dlx calls it for listed types only."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    source = type("Special", (mylib.Array,), {"__module__": "mylib"})()
    dlx.convert(source, to="dlx")
    assert source.asked == 1 and hostile.borrows == 0


# ---- routes follow the type ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["Array", "Base"])
def test_a_table_that_comes_later_is_seen(mylib, hostile, on):
    """A table that is added later, to a type or its base, is found."""
    source = mylib.Array()
    dlx.convert(source, to="dlx")
    dlx.convert(source, to="dlx")
    assert (source.asked, hostile.borrows) == (2, 0)
    setattr(getattr(mylib, on), NAME, hostile.capsule())
    dlx.convert(source, to="dlx")
    dlx.convert(source, to="dlx")
    assert (source.asked, hostile.borrows) == (2, 2)


@pytest.mark.parametrize("on", ["Array", "Base"])
def test_a_table_that_goes_is_not_used(mylib, hostile, on):
    """A table that was taken away is not called any more."""
    cls, source = getattr(mylib, on), mylib.Array()
    setattr(cls, NAME, hostile.capsule())
    dlx.convert(source, to="dlx")
    delattr(cls, NAME)
    dlx.convert(source, to="dlx")
    assert (source.asked, hostile.borrows) == (1, 1)


@pytest.mark.parametrize("on", ["Array", "Base"])
def test_a_table_of_the_target_that_comes_later_is_seen(mylib, hostile, on):
    """That a target's type had no table is not remembered once it has one (torch is patched after import)."""
    source = tensor(Owner(64))
    dlx.convert(source, to="mylib")
    dlx.convert(source, to="mylib")
    assert (mylib.adapter.loads, hostile.imports) == (2, 0)
    setattr(getattr(mylib, on), NAME, hostile.capsule())
    dlx.convert(source, to="mylib")
    assert (mylib.adapter.loads, hostile.imports) == (2, 1)


def test_a_table_of_the_target_that_goes_is_not_used(mylib, hostile):
    """A target's table that was taken away, or replaced by another, is not called any more."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    source = tensor(Owner(64))
    dlx.convert(source, to="mylib")
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule("empty")
    dlx.convert(source, to="mylib")
    assert (mylib.adapter.loads, hostile.imports) == (1, 1)


@pytest.mark.parametrize("spell", ["name", "alias", "module", "type", "equal string", "string subclass"])
def test_every_spelling_of_a_target(mylib, hostile, spell):
    """A target's name, alias, module and type give the same result; so does a string that is equal, not the same."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    to = {
        "name": "mylib",
        "alias": "my",
        "module": mylib,
        "type": mylib.Array,
        "equal string": "".join(["my", "lib"]),
        "string subclass": type("Name", (str,), {})("mylib"),
    }[spell]
    for _ in range(3):
        dlx.convert(tensor(Owner(64)), to=to)
    assert (hostile.imports, mylib.adapter.loads) == (3, 0)


def counted(monkeypatch, fast_path):
    """A fast path that counts calls of `learn`, in a list of pairs."""
    from dlx._engine.fast_path import learn

    asked = []

    def counting(kind, to):
        asked.append((kind, to))
        learn(kind, to)

    return asked, native.FastPathFunction(fast_path.__wrapped__, counting, None)


def test_routes_are_remembered_by_type_and_target(monkeypatch, mylib, hostile):
    """A pair of exact type and target is looked at once, whether the fast path can run it or not."""
    asked, convert = counted(monkeypatch, dlx.convert)
    for _ in range(3):
        convert(mylib.Array(), to="dlx")
        convert(tensor(Owner(64)), to="dlx")
        convert(b"abc", to="dlx")
    assert asked == [(mylib.Array, "dlx"), (dlx.Tensor, "dlx"), (bytes, "dlx")]
    convert(tensor(Owner(64)), to="mylib")
    convert(tensor(Owner(64)), to=mylib)
    assert asked[3:] == [(dlx.Tensor, "mylib"), (dlx.Tensor, mylib)]


def test_a_type_that_nobody_has_looked_at_has_a_route_at_once(python):
    """The first call creates a route, even for a type to which CPython has not assigned a version."""
    out = python(
        """
        import dlx
        from dlx._core import native
        from dlx._engine import fast_path as routes
        asked = []
        def learn(kind, to):
            asked.append(kind)
            routes.learn(kind, to)
        convert = native.FastPathFunction(dlx.convert.__wrapped__, learn, None)
        tensor = native.tensor_new(0, (0,), None, (2, 32, 1), (1, 0), 0, None)
        for _ in range(3):
            assert convert(tensor, to="dlx") is tensor
        print(len(asked))
        """
    )
    assert out == "1\n"


def test_loading_a_plugin_clears_the_routes(monkeypatch, mylib):
    """Loading a plugin drops every pair."""
    asked, convert = counted(monkeypatch, dlx.convert)
    convert(b"abc", to="dlx")
    convert(b"abc", to="dlx")
    assert len(asked) == 1
    plugin = types.ModuleType("dlx_other")
    plugin.dlx_adapters = dlx.hookimpl(specname="dlx_adapters")(
        lambda: [type("Other", (Adapter,), {"name": "other", "package": "other"})()]
    )
    monkeypatch.setitem(sys.modules, "dlx_other", plugin)
    assert Registry({"other": "dlx_other"})._loader.load("other").broken is None
    convert(b"abc", to="dlx")
    assert len(asked) == 2


def test_many_types_do_not_close_the_fast_path(monkeypatch, mylib, hostile):
    """Short-lived types and new target spellings leave room for new pairs."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    dlx.convert(b"abc", to="mylib")  # the plugin is loaded, and clears the routes, before they are many
    for n in range(400):
        dlx.convert(type(f"Bytes{n}", (bytes,), {})(b"abc"), to="dlx")
    source = mylib.Array()
    dlx.convert(source, to="dlx")
    assert hostile.borrows == 1 and source.asked == 0


def test_a_route_that_changes_while_it_runs(np, mylib, hostile):
    """Routes may be cleared while a call is running on one of them."""

    class Clears(mylib.Array):
        @property
        def nasty(self):
            native.routes_clear()
            return False

    Clears.__module__ = "mylib"
    mylib.Array = Clears
    guarded(mylib, Guard("nasty"), Guard("nasty"), Guard("nasty"))
    Clears.__dlpack_c_exchange_api__ = hostile.capsule()
    for _ in range(3):
        assert dlx.convert(Clears(), to="dlx").shape == (2, 3)
        assert dlx.convert(Clears(), to="numpy").shape == (2, 3)
    assert hostile.borrows == 6


@pytest.mark.parametrize("answer", [True, 1, "yes", [0], None, 0, "", False])
def test_guards(mylib, hostile, answer):
    """A guard accepts false values, and leaves all others to Python."""
    guarded(mylib, Guard("nasty"))
    mylib.Array.nasty = answer
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    source = mylib.Array()
    dlx.convert(source, to="dlx")
    assert source.asked == (1 if answer else 0)


def test_a_guard_whose_answer_has_no_truth(mylib, hostile):
    """An answer whose `bool()` raises is not false: Python converts, and no exception remains."""

    class Neither:
        def __bool__(self):
            raise ValueError("neither true nor false")

    guarded(mylib, Guard("nasty"))
    mylib.Array.nasty = Neither()
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    source = mylib.Array()
    before, live = sys.getrefcount(source), native.live()
    assert dlx.convert.__wrapped__(source, to="dlx").shape == dlx.convert(source, to="dlx").shape == (2, 3)
    assert (source.asked, hostile.borrows) == (2, 0)
    assert (sys.getrefcount(source), native.live()) == (before, live)


def test_a_guard_that_raises(mylib, hostile):
    """A guard that raises leaves the array to Python, which raises the reason; nothing leaks."""
    guarded(mylib, Guard("nasty"))
    mylib.Array.nasty = property(lambda self: 1 / 0)
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    source = mylib.Array()
    before, live = sys.getrefcount(source), native.live()
    dlx.convert(source, to="dlx")
    assert source.asked == 1 and (sys.getrefcount(source), native.live()) == (before, live)
