"""Random lifetimes by rules: capsules, results, views, buffers, deleters and threads, compared with a model of holders.

After every step the live counter equals the model's, each memory has its value in all places, and an owner is gone
exactly if nothing holds it. `nox -s deep` draws 2,000 sequences of 40 steps.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from support.arrays.examples import EXAMPLES, examples
from support.processes.concurrent import at_once

import dlx
from dlx import errors
from dlx._core import native

NBYTES = 24
FLOAT32 = (2, 32, 1)
SHAPE = (2, 3)


class Group:
    """Managed tensors that one step created, and the memory behind them.

    The group lives while something holds it, or while a group derived from it lives.
    """

    def __init__(self, size, memory, parent=None):
        self.size, self.memory, self.parent = size, memory, parent
        self.holders = self.living = 0  # things, and live groups derived from it
        if parent is not None:
            parent.living += 1

    @property
    def is_alive(self):
        return self.holders > 0 or self.living > 0

    def hold(self):
        self.holders += 1

    def release(self):
        self.holders -= 1
        group = self
        while not group.is_alive and group.parent is not None:  # the last one releases its parent
            group.parent.living -= 1
            group = group.parent


class Memory:
    """Bytes with a value, and a test whether their owner is gone."""

    def __init__(self, value, gone=None, readonly=False):
        self.value, self.gone, self.readonly = value, gone, readonly


class Thing:
    """An object that a user holds: an array, a tensor, a capsule, a buffer, a view or a bare struct."""

    def __init__(self, kind, obj, groups, *, legacy=False, readonly=False):
        self.kind, self.obj, self.groups = kind, obj, list(groups)
        self.legacy, self.readonly = legacy, readonly
        self.is_fresh = True  # of capsules
        for group in self.groups:
            group.hold()

    @property
    def memory(self):
        return self.groups[0].memory

    def drop(self):
        self.obj = None
        groups, self.groups = self.groups, []
        for group in groups:
            group.release()


class Owner(bytearray):
    """Memory that supports weak references."""


def pattern(seed):
    """Return the bytes of six floats."""
    return bytes((seed * 37 + i * 11) % 100 for i in range(NBYTES))


def held_bytes(address):
    """Return the bytes of six floats at an address."""
    return ctypes.string_at(address, NBYTES)


def in_thread(action):
    """Run an action on a new thread and join it; return its result or raise its error."""
    (found,) = at_once(action)
    if isinstance(found, Exception):
        raise found
    return found


def claimed(action, count):
    """Run an action that consumes a capsule in several threads at once; return the only result."""
    found = at_once(*[action] * count)
    (got,) = (each for each in found if not isinstance(each, errors.ConsumedError))
    if isinstance(got, Exception):
        raise got
    return got


TARGETS = ["dlx", "numpy", "torch"]
targets = st.sampled_from(TARGETS)
threads = st.booleans()
together = st.sampled_from([1, 2, 4])  # threads at once


class Lifetimes(RuleBasedStateMachine):
    """The rules."""

    things = Bundle("things")
    capsules = Bundle("capsules")
    structs = Bundle("structs")
    views = Bundle("views")

    counting = None  # set by the test
    here = ("dlx",)

    def __init__(self):
        super().__init__()
        gc.collect()
        self.start, self.groups, self.alive_things = native.live(), [], []
        self.deleted, self.wanted_deletes = self.counting.deleted, 0
        self.seed = 0

    # ---- the model ---------------------------------------------------------------------------------------------------

    def new_group(self, size, memory, parent=None):
        group = Group(size, memory, parent)
        self.groups.append(group)
        return group

    def new_thing(self, kind, obj, groups, **facts):
        thing = Thing(kind, obj, groups, **facts)
        self.alive_things.append(thing)
        return thing

    def live(self):
        return native.live() - self.start

    def total(self):
        return sum(group.size for group in self.groups if group.is_alive)

    def run(self, action, thread):
        return in_thread(action) if thread else action()

    def forget(self, thing):
        """Drop a thing, here or on a thread."""
        if thing in self.alive_things:
            self.alive_things.remove(thing)
            thing.drop()

    def derived(self, kind, make, source, thread, *, copied=False, **facts):
        """Record the result of a step on a thing: new managed tensors over the same memory, or a copy."""
        before = self.live()
        obj = self.run(make, thread)
        size = self.live() - before
        assert 0 <= size <= 2, f"{kind} made {size} managed tensors"
        if copied:
            memory = Memory(source.memory.value)
            return self.new_thing(kind, obj, [self.new_group(size, memory)], **facts)
        if size == 0:
            return self.new_thing(kind, obj, source.groups, **facts)
        return self.new_thing(kind, obj, [self.new_group(size, source.memory, source.groups[0])], **facts)

    # ---- sources -----------------------------------------------------------------------------------------------------

    def next_value(self):
        self.seed += 1
        return pattern(self.seed)

    @initialize(target=things)
    def first(self):
        return self.make_tensor(False)

    def make_tensor(self, readonly):
        owner = Owner(self.next_value())
        released = []
        gone = weakref.ref(owner)
        address = native.buffer_address(memoryview(owner))
        tensor = dlx.from_pointer(
            address, SHAPE, "float32", owner=owner, readonly=readonly, release=lambda: released.append(1)
        )
        memory = Memory(bytes(owner), lambda: (gone() is None, len(released)) == (True, 1), readonly)
        memory.kept = lambda: (gone() is not None, len(released)) == (True, 0)
        return self.new_thing("dlx", tensor, [self.new_group(1, memory)], readonly=readonly)

    @rule(target=things, readonly=st.booleans())
    def tensor(self, readonly):
        """Create a dlx.Tensor over memory with an owner and a release function."""
        return self.make_tensor(readonly)

    @rule(target=things)
    def array(self):
        """Create a numpy array."""
        if "numpy" not in self.here:
            return multiple()
        import numpy as np

        array = np.frombuffer(bytearray(self.next_value()), "f4").reshape(SHAPE)
        gone = weakref.ref(array)
        memory = Memory(array.tobytes(), lambda: gone() is None)
        return self.new_thing("numpy", array, [self.new_group(0, memory)])

    @rule(target=things)
    def torch_tensor(self):
        """Create a torch tensor."""
        if "torch" not in self.here:
            return multiple()
        import torch

        tensor = torch.frombuffer(bytearray(self.next_value()), dtype=torch.float32).reshape(SHAPE)
        return self.new_thing("torch", tensor, [self.new_group(0, Memory(held_bytes(tensor.data_ptr())))])

    @rule(target=capsules, legacy=st.booleans(), readonly=st.booleans())
    def foreign_capsule(self, legacy, readonly):
        """Create a capsule of a foreign producer with a counting deleter."""
        readonly = readonly and not legacy
        capsule = self.counting.capsule(SHAPE, legacy=legacy, flags=int(readonly))
        address = native.capsule_peek(capsule).data_ptr
        memory = Memory(self.next_value(), readonly=readonly)
        ctypes.memmove(address, memory.value, NBYTES)
        memory.is_foreign = True
        return self.new_thing("capsule", capsule, [self.new_group(0, memory)], legacy=legacy, readonly=readonly)

    # ---- conversions -------------------------------------------------------------------------------------------------

    @rule(target=things, source=things, to=targets, thread=threads, copy=st.sampled_from([None, None, False, True]))
    def convert(self, source, to, thread, copy):
        """Convert an array, shared or copied like the plan says, here or on a new thread."""
        if source not in self.alive_things or to not in self.here:
            return multiple()
        plan = dlx.plan(source.obj, to=to, copy=copy)
        if plan.outcome == "refused":
            with pytest.raises(type(plan.error)):
                self.run(lambda: dlx.convert(source.obj, to=to, copy=copy), thread)
            assert source.readonly and to == "torch" and copy is False
            return multiple()
        copied = plan.outcome == "copied"
        assert copied == (copy is True or (source.readonly and to == "torch"))
        readonly = source.readonly and not copied
        make = lambda: dlx.convert(source.obj, to=to, copy=copy)  # noqa: E731
        return self.derived(to, make, source, thread, copied=copied, readonly=readonly)

    @rule(target=things, source=things, to=targets, count=together)
    def convert_together(self, source, to, count):
        """Convert the same array on several threads; each gets its own result over the same memory."""
        if source not in self.alive_things or to not in self.here or (source.readonly and to == "torch"):
            return multiple()
        size, before = self.size_of(source.obj, to), self.live()
        results = at_once(*[lambda: dlx.convert(source.obj, to=to)] * count)
        assert self.live() - before == size * count
        found = []
        for result in results:
            assert not isinstance(result, Exception), result
            group = self.new_group(size, source.memory, source.groups[0]) if size else source.groups[0]
            kind = "buffer" if isinstance(result, memoryview) else to if size else source.kind
            found.append(self.new_thing(kind, result, [group], readonly=source.readonly))
        return multiple(*found)

    @rule(target=things, sources=st.lists(things, min_size=1, max_size=3), to=targets)
    def tree(self, sources, to):
        """Convert containers: a repeated array is one result, and buffers pass through."""
        if to not in self.here or any(each not in self.alive_things for each in sources):
            return multiple()
        if any(each.readonly for each in sources) and to == "torch":
            return multiple()  # copies are tried one by one
        sizes = {id(each.obj): each.kind != "buffer" and self.size_of(each.obj, to) for each in sources}
        before = self.live()
        results = dlx.convert({"a": [each.obj for each in sources], "b": (sources[0].obj,)}, to=to)
        assert self.live() - before == sum(sizes.values()), (sizes, [(each.kind, each.readonly) for each in sources])
        assert results["b"][0] is results["a"][0]
        found = []
        unique = {}
        for each, result in zip(sources, results["a"], strict=True):
            if id(each.obj) in unique:
                assert unique[id(each.obj)] is result
                continue
            unique[id(each.obj)] = result
            size = sizes[id(each.obj)]
            assert (size == 0) is (result is each.obj)
            group = self.new_group(size, each.memory, each.groups[0]) if size else each.groups[0]
            found.append(self.new_thing(to if size else each.kind, result, [group], readonly=each.readonly))
        return multiple(*found)

    def size_of(self, obj, to):
        """Return the number of managed tensors that a conversion creates and drops."""
        before = self.live()
        result = dlx.convert(obj, to=to)
        made = self.live() - before
        del result
        assert self.live() == before
        return made

    @rule(sources=st.lists(things, min_size=1, max_size=3), capsule=capsules, to=targets)
    def tree_that_fails(self, sources, capsule, to):
        """Convert a tree with a capsule and an invalid object: nothing is created or consumed."""
        if to not in self.here or capsule not in self.alive_things:
            return
        before, name = self.live(), self.counting.name(capsule.obj)
        objs = [each.obj for each in sources if each in self.alive_things]
        with pytest.raises(errors.DlxError):
            dlx.convert([*objs, capsule.obj, object()], to=to, strict=True)
        assert (self.live(), self.counting.name(capsule.obj)) == (before, name)

    @rule(target=things, source=things)
    def buffer(self, source):
        """Create a buffer of a dlx.Tensor, and a slice of it."""
        if source not in self.alive_things or source.kind != "dlx":
            return multiple()
        return self.derived("buffer", lambda: memoryview(source.obj), source, False, readonly=source.readonly)

    @rule(target=things, source=things)
    def part(self, source):
        """Create the framework's view, which keeps the array's memory."""
        if source not in self.alive_things or source.kind not in ("numpy", "torch", "buffer"):
            return multiple()
        part = source.obj[:] if source.kind != "numpy" else source.obj[...]
        if source.memory.gone is not None and not hasattr(source.memory, "kept"):
            return multiple()  # the array itself is watched; its views keep the memory, but not the array
        return self.new_thing(source.kind, part, source.groups, readonly=source.readonly)

    # ---- capsules ----------------------------------------------------------------------------------------------------

    @rule(target=capsules, source=things, legacy=st.booleans(), copy=st.sampled_from([None, True]))
    def export(self, source, legacy, copy):
        """Create a capsule of a dlx.Tensor; read-only memory has no legacy capsule."""
        if source not in self.alive_things or source.kind != "dlx":
            return multiple()
        options = {} if legacy else {"max_version": (1, 3)}
        make = lambda: source.obj.__dlpack__(copy=copy, **options)  # noqa: E731
        if legacy and source.readonly and copy is None:
            with pytest.raises(errors.ReadOnlyError):
                make()
            return multiple()
        readonly = source.readonly and copy is None
        copied = copy is True
        return self.derived("capsule", make, source, False, copied=copied, legacy=legacy, readonly=readonly)

    @rule(target=things, capsule=capsules, to=targets, count=together, copy=st.sampled_from([None, None, True]))
    def consume(self, capsule, to, count, copy):
        """Convert a capsule, once; a used one is a ConsumedError and keeps nothing."""
        if capsule not in self.alive_things or to not in self.here:
            return multiple()
        make = lambda: dlx.convert(capsule.obj, to=to, copy=copy)  # noqa: E731
        if not capsule.is_fresh:
            before = self.live()
            assert all(isinstance(each, errors.ConsumedError) for each in at_once(*[make] * count))
            with pytest.raises(errors.ConsumedError):
                dlx.describe(capsule.obj)
            assert isinstance(dlx.plan(capsule.obj, to=to).error, errors.ConsumedError)
            assert self.live() == before
            return multiple()
        copied = dlx.plan(capsule.obj, to=to, copy=copy).outcome == "copied"
        readonly = capsule.readonly and not copied
        thing = self.taken(to, lambda: claimed(make, count), capsule, copied=copied, readonly=readonly)
        assert self.counting.name(capsule.obj).startswith("used_")
        return thing

    def taken(self, kind, make, capsule, *, copied, **facts):
        """Record that another thing holds a capsule's contents; a copy releases them."""
        group = capsule.groups[0]
        before = self.live()
        obj = make()
        capsule.is_fresh = False
        capsule.groups = []
        if copied:
            group.release()
            size, parent, memory = self.live() - self.total(), None, Memory(group.memory.value)
        else:
            size, parent, memory = self.live() - before, group, group.memory
        if size == 0:  # dlx's own tensor without other users moves out of the capsule
            assert kind == "dlx" and not copied
            thing = self.new_thing(kind, obj, [group], **facts)
            group.release()
            return thing
        assert size in (1, 2)
        made = self.new_group(size, memory, parent)
        if not copied:
            group.release()
        return self.new_thing(kind, obj, [made], **facts)

    @rule(capsule=capsules, to=targets)
    def refuse(self, capsule, to):
        """Refuse a capsule, which keeps its name and contents."""
        if capsule not in self.alive_things or not capsule.is_fresh or to not in self.here:
            return
        before, name = self.live(), self.counting.name(capsule.obj)
        with pytest.raises(errors.DlxError):
            dlx.convert(capsule.obj, to=to, device="cuda")
        if capsule.readonly and to == "torch":
            with pytest.raises(errors.ReadOnlyError):
                dlx.convert(capsule.obj, to=to, readonly="error")
        assert (self.live(), self.counting.name(capsule.obj)) == (before, name)

    @rule(capsule=capsules, to=targets)
    def look(self, capsule, to):
        """Describe, plan, stack and compare without consuming."""
        if capsule not in self.alive_things or not capsule.is_fresh or to not in self.here:
            return
        before, name = self.live(), self.counting.name(capsule.obj)
        assert dlx.describe(capsule.obj).shape == SHAPE
        assert dlx.shares_memory(capsule.obj, capsule.obj)
        whole = dlx.stack([capsule.obj, capsule.obj], to=to)
        assert tuple(whole.shape) == (2, *SHAPE)
        del whole
        assert (self.live(), self.counting.name(capsule.obj)) == (before, name)

    @rule(target=structs, capsule=capsules)
    def take_by_hand(self, capsule):
        """Take the pointer as a foreign consumer, and rename the capsule."""
        if capsule not in self.alive_things or not capsule.is_fresh:
            return multiple()
        address = self.counting.consume(capsule.obj, legacy=capsule.legacy)
        group = capsule.groups[0]
        thing = self.new_thing("struct", address, [group], legacy=capsule.legacy)
        capsule.is_fresh, capsule.groups = False, []
        group.release()
        return thing

    @rule(struct=consumes(structs), thread=threads)
    def delete_by_hand(self, struct, thread):
        """Call the deleter here, or without the GIL on a foreign thread."""
        if struct not in self.alive_things:
            return
        self.counting.delete(struct.obj, legacy=struct.legacy, thread=thread)
        self.forget(struct)

    @rule(some=st.lists(consumes(structs), min_size=2, max_size=4), thread=threads)
    def delete_together(self, some, thread):
        """Call several deleters at once, on Python's threads or on others."""
        some = [each for each in some if each in self.alive_things]
        delete = lambda each: self.counting.delete(each.obj, legacy=each.legacy, thread=thread)  # noqa: E731
        assert at_once(*(partial(delete, each) for each in some)) == [None] * len(some)
        for each in some:
            self.forget(each)

    @rule(target=things, struct=consumes(structs))
    def import_struct(self, struct):
        """Import a struct as a dlx.Tensor again."""
        if struct not in self.alive_things:
            return multiple()
        group, before = struct.groups[0], self.live()
        tensor = dlx.from_managed(struct.obj, legacy=struct.legacy)
        size = self.live() - before
        assert size == 2  # the tensor, and the wrapper with the foreign deleter
        made = self.new_group(size, group.memory, group)
        readonly = tensor.readonly
        self.forget(struct)
        return self.new_thing("dlx", tensor, [made], readonly=readonly)

    # ---- views -------------------------------------------------------------------------------------------------------

    @rule(target=views, sources=st.lists(things, min_size=1, max_size=3), to=targets)
    def view(self, sources, to):
        """Create a lazy view, which converts nothing until it is read."""
        if to not in self.here or any(each not in self.alive_things for each in sources):
            return multiple()
        before = self.live()
        objs = [each.obj for each in sources]
        view = dlx.convert(objs, to=to, lazy=True)
        assert self.live() == before
        thing = self.new_thing("view", view, [group for each in sources for group in each.groups])
        thing.sources, thing.results, thing.to = [(each.memory, each.groups[0]) for each in sources], {}, to
        thing.readonlies = [each.readonly for each in sources]
        return thing

    @rule(target=things, view=views, at=st.integers(0, 2), count=together)
    def read(self, view, at, count):
        """Read an element, which is converted once and then the same object for all threads."""
        if view not in self.alive_things or at >= len(view.sources):
            return multiple()
        memory, group = view.sources[at]
        before = self.live()
        results = at_once(*[lambda: view.obj[at]] * count)
        result = view.obj[at]
        assert all(each is result for each in results), results
        del results
        size = self.live() - before
        if at in view.results:
            assert size == 0
            return multiple()
        if size == 0:  # in the framework already, or converted at another place of the view
            made = next((each for other, each in view.results.items() if view.obj[other] is result), group)
            copied = False
        else:
            assert size in (1, 2)
            copied = view.readonlies[at] and view.to == "torch"
            made = self.new_group(size, Memory(memory.value) if copied else memory, None if copied else group)
            made.hold()  # the view holds it
            view.groups.append(made)
        view.results[at] = made
        kind = "buffer" if isinstance(result, memoryview) else view.to
        return self.new_thing(kind, result, [made], readonly=view.readonlies[at] and not copied)

    # ---- using and dropping ------------------------------------------------------------------------------------------

    @rule(source=things)
    def write(self, source):
        """Write through one thing; all things that share the memory see it."""
        if source not in self.alive_things or source.readonly or source.memory.readonly:
            return
        value = self.next_value()
        ctypes.memmove(self.address(source), value, NBYTES)
        source.memory.value = value

    @rule(source=things, thread=threads)
    def drop(self, source, thread):
        """Drop a thing, here or on a new thread."""
        if source in self.alive_things:
            self.run(lambda: self.forget(source), thread)

    @rule(sources=st.lists(st.one_of(things, capsules), min_size=2, max_size=4))
    def drop_together(self, sources):
        """Drop several things on one thread each, possibly of the same memory."""
        some = [each for i, each in enumerate(sources) if each in self.alive_things and each not in sources[:i]]
        at_once(*(partial(setattr, each, "obj", None) for each in some))
        for each in some:
            self.forget(each)

    @rule(source=capsules, thread=threads)
    def drop_capsule(self, source, thread):
        """Drop an unconsumed capsule, which releases its contents."""
        if source in self.alive_things:
            self.run(lambda: self.forget(source), thread)

    @rule(source=consumes(views))
    def drop_view(self, source):
        """Drop a view, which releases its results."""
        self.forget(source)

    @rule()
    def collect(self):
        """Run the collector, which finds nothing that is held."""
        gc.collect()

    # ---- invariants --------------------------------------------------------------------------------------------------

    def address(self, thing):
        if thing.kind == "numpy":
            return thing.obj.ctypes.data
        if thing.kind == "torch":
            return thing.obj.data_ptr()
        if thing.kind == "buffer":
            return native.buffer_address(thing.obj)
        return thing.obj.data_ptr

    @invariant()
    def every_value_is_there(self):
        for thing in self.alive_things:
            if thing.kind in ("dlx", "numpy", "torch", "buffer"):
                assert held_bytes(self.address(thing)) == thing.memory.value, thing.kind

    @invariant()
    def the_count_is_the_models(self):
        assert self.live() == self.total()

    @invariant()
    def owners_live_as_long_as_they_are_held(self):
        held = {id(group.memory) for group in self.groups if group.is_alive}
        dead = [group for group in self.groups if id(group.memory) not in held]
        for group in self.groups:
            memory = group.memory
            if id(memory) not in held:
                assert memory.gone is None or memory.gone(), "nothing holds it, but its owner lives"
            elif hasattr(memory, "kept"):
                assert memory.kept(), "it is held, but its owner is gone"
        gone = {id(each.memory) for each in dead if hasattr(each.memory, "is_foreign")}
        self.wanted_deletes += len(gone)
        self.groups = [group for group in self.groups if group not in dead]
        assert self.counting.deleted - self.deleted == self.wanted_deletes

    def teardown(self):
        for thing in list(self.alive_things):
            if thing.kind == "struct":
                self.counting.delete(thing.obj, legacy=thing.legacy)
            self.forget(thing)
        gc.collect()
        assert self.live() == 0


@pytest.mark.timeout(max(300, EXAMPLES // 10))
def test_lifetimes(counting, monkeypatch):
    """The model holds for any order of steps."""
    here = ["dlx"]
    for name in ("numpy", "torch"):
        try:
            __import__(name)
        except ImportError:
            continue
        here.append(name)
    monkeypatch.setattr(Lifetimes, "counting", counting)
    monkeypatch.setattr(Lifetimes, "here", tuple(here))
    chosen = settings(
        max_examples=examples(40),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    gc.collect()
    gc.freeze()  # collections need not scan imported objects
    try:
        run_state_machine_as_test(Lifetimes, settings=chosen)
    finally:
        gc.unfreeze()
