"""The phases of a tree conversion: early refusals, paths of failures, and rollback."""

from __future__ import annotations

import collections
import gc
import sys
import types

import pytest

import dlx
from dlx import errors
from dlx._core import native

Point = collections.namedtuple("Point", "x y")


class Stranger:
    """A producer with only __dlpack__, which records each call."""

    def __init__(self, calls, name, error=None):
        self.calls, self.name, self.error = calls, name, error

    def __dlpack__(self, *, max_version=None):
        self.calls.append(self.name)
        if self.error is not None:
            raise self.error
        return dlx.convert(bytearray(8), to="dlx").__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        return 1, 0


def name_of(capsule):
    """Return a capsule's name."""
    return repr(capsule).split('"')[1]


# ---- places ----------------------------------------------------------------------------------------------------------

BAD = {  # arrays that torch refuses under copy=False, and words of the message
    "text": (lambda np, torch: np.array(["text"]), "torch", {}, errors.DTypeError, "<U4|str"),
    "objects": (lambda np, torch: np.array([object()]), "dlx", {}, errors.DTypeError, "object"),
    "negative strides": (
        lambda np, torch: np.arange(4.0)[::-1],
        "torch",
        {"copy": False},
        errors.CopyRequiredError,
        "negative",
    ),
    "read-only": (lambda np, torch: np.broadcast_to(1.0, (3,)), "torch", {"copy": False}, errors.ReadOnlyError, "read"),
    "gradient": (
        lambda np, torch: torch.ones(2, requires_grad=True),
        "numpy",
        {},
        errors.ConversionError,
        "requires_grad|grad",
    ),
    "conj": (
        lambda np, torch: torch.ones(2, dtype=torch.complex64).conj(),
        "numpy",
        {"copy": False},
        errors.CopyRequiredError,
        "conj",
    ),
    "neg": (
        lambda np, torch: torch.ones(2, dtype=torch.complex64).conj().imag,
        "numpy",
        {"copy": False},
        errors.CopyRequiredError,
        "neg",
    ),
    "sparse": (lambda np, torch: torch.eye(2).to_sparse(), "numpy", {}, errors.LayoutError, "numpy has no coo"),
    "meta": (lambda np, torch: torch.ones(2, device="meta"), "numpy", {}, errors.ConversionError, "meta|memory"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_names_its_path_and_what_was_asked(np, torch, name):
    """``cannot convert ... at obj['a'][3].x: ...`` for each kind of refusal, with a cause."""
    make, target, options, kind, words = BAD[name]
    bad = make(np, torch)
    tree = {"a": [1, np.ones(1), None, types.SimpleNamespace(x=bad)]}
    with pytest.raises(kind, match=rf"^cannot convert .* at obj\['a'\]\[3\]\.x: .*({words})") as caught:
        dlx.convert(tree, to=target, **options)
    assert caught.value.where == "obj['a'][3].x" and caught.value.target == target
    plan = dlx.plan(tree, to=target, **options)
    assert plan.outcome == "refused" and str(plan.error) == str(caught.value)
    assert [leaf.path for leaf in plan.leaves] == ["obj['a'][1]", "obj['a'][3].x"]
    with pytest.raises(kind) as alone:
        dlx.convert(bad, to=target, **options)
    assert type(alone.value) is type(caught.value) and alone.value.reason == caught.value.reason


def test_the_path_of_a_long_or_broken_key_can_be_read(np):
    """Long keys are truncated; a key whose repr fails is shown by its type."""

    class Mute:
        def __repr__(self):
            raise ValueError

    for key, text in (("k" * 500, "..."), (Mute(), "<Mute>"), (("t", 1), "('t', 1)"), (2, "[2]")):
        with pytest.raises(errors.DTypeError) as caught:
            dlx.convert({key: np.array(["x"])}, to="dlx")
        assert text in caught.value.where and len(caught.value.where) < 200


def test_the_frameworks_error_is_the_cause(np):
    """The producer's exception is the cause of the dlx error."""
    own = ValueError("not today")
    with pytest.raises(errors.ConversionError, match=r"at obj\[1\]: .*not today") as caught:
        dlx.convert([np.ones(1), Stranger([], "a", own)], to="dlx")
    assert caught.value.__cause__ is own


def test_a_container_that_raises_has_a_path():
    """A failure to flatten or rebuild is named with its path and cause."""

    class Broken(collections.abc.Sequence):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            raise OSError("gone")

    class Stiff:
        def __dlx_tree__(self):
            return [dlx.convert(b"a", to="dlx")], lambda children: 1 / 0

    with pytest.raises(errors.ConversionError, match=r"at obj\['k'\]: the container cannot be flattened.*gone") as one:
        dlx.convert({"k": Broken()}, to="dlx")
    assert isinstance(one.value.__cause__, OSError)
    with pytest.raises(errors.ConversionError, match=r"at obj\[0\]: the container cannot hold the result") as other:
        dlx.convert([Stiff()], to="dlx")
    assert isinstance(other.value.__cause__, ZeroDivisionError)


# ---- the order of things ---------------------------------------------------------------------------------------------


def test_what_can_be_refused_early_stops_before_any_producer_is_called(np):
    """Described arrays, interfaces and capsules are checked before __dlpack__ is called."""
    calls = []
    used = dlx.convert(bytearray(2), to="dlx").__dlpack__()
    dlx.convert(used, to="dlx")
    for bad in (np.array(["text"]), used):
        with pytest.raises(errors.DlxError):
            dlx.convert([Stranger(calls, "a"), bad], to="dlx")
        with pytest.raises(errors.DlxError):
            dlx.convert([bad, Stranger(calls, "a")], to="dlx")
    assert calls == []


def test_generic_producers_are_called_once_in_order_each():
    """A repeated producer is called once."""
    calls = []
    a, b = Stranger(calls, "a"), Stranger(calls, "b")
    result = dlx.convert([a, {"x": b, "y": a}, (b, a)], to="dlx")
    assert calls == ["a", "b"]
    assert result[0] is result[1]["y"] is result[2][1] and result[1]["x"] is result[2][0]


def test_nothing_is_imported_before_everything_is_exported(np, torch, monkeypatch):
    """If the last producer fails, nothing was imported and no consumer was called."""
    from dlx._registry.registry import registry

    target = type(registry.target("torch").adapter)
    loaded = []
    load = target.load
    monkeypatch.setattr(target, "load", lambda self, tensor: loaded.append(1) or load(self, tensor))
    calls = []
    tree = [Stranger(calls, "a"), np.arange(3, dtype=">f8"), Stranger(calls, "b", ValueError("no"))]
    python_path = dlx.convert.__wrapped__  # the fast path makes torch's tensors without the adapter
    with pytest.raises(errors.ConversionError):
        python_path(tree, to="torch")
    assert calls == ["a", "b"] and loaded == []
    python_path(tree[:2], to="torch")
    assert loaded == [1, 1]


# ---- undone ----------------------------------------------------------------------------------------------------------


def test_a_failure_consumes_nothing(np, torch):
    """A capsule before or after the failure keeps its name and stays usable."""
    source = dlx.convert(np.ones(3), to="dlx")
    bad = Stranger([], "bad", ValueError("no"))
    for shape in (lambda c: [c, bad], lambda c: [bad, c], lambda c: {"a": (c,), "b": Point(bad, c)}):
        capsule = source.__dlpack__(max_version=(1, 0))
        with pytest.raises(errors.ConversionError):
            dlx.convert(shape(capsule), to="torch")
        assert name_of(capsule) == "dltensor_versioned"
        assert torch.from_dlpack(capsule).shape == (3,)


class Failing:
    """A switch that makes the n-th import of a target fail."""

    def __init__(self, monkeypatch, target, after):
        from dlx._registry.registry import registry

        kind = type(registry.target(target).adapter)
        load = kind.load
        self.loads = 0

        def failing(adapter, tensor):
            self.loads += 1
            if self.loads > after:
                raise RuntimeError("no more room")
            return load(adapter, tensor)

        monkeypatch.setattr(kind, "load", failing)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("collect", [False, True])
def test_a_consumer_that_fails_gives_the_capsules_back(np, monkeypatch, after, collect):
    """Results are released and all capsules have their names again, after any number of imports."""
    owner = dlx.convert(np.ones(3), to="dlx")
    capsules = [owner.__dlpack__(max_version=(1, 0)) for _ in range(3)]
    Failing(monkeypatch, "numpy", after)
    if collect:
        with pytest.raises(ExceptionGroup) as group:
            dlx.convert([capsules[0], (capsules[1], {"c": capsules[2]})], to="numpy", errors="collect")
        places = [error.where for error in group.value.exceptions]
        assert places == ["obj[0]", "obj[1][0]", "obj[1][1]['c']"][after:]
        del group
    else:
        with pytest.raises(errors.ConversionError, match="no more room") as caught:
            dlx.convert([capsules[0], (capsules[1], {"c": capsules[2]})], to="numpy")
        assert caught.value.where == ["obj[0]", "obj[1][0]", "obj[1][1]['c']"][after]
        assert isinstance(caught.value.__cause__, RuntimeError)
        del caught
    assert [name_of(capsule) for capsule in capsules] == ["dltensor_versioned"] * 3
    monkeypatch.undo()
    assert [x.shape for x in dlx.convert(capsules, to="numpy")] == [(3,)] * 3


def test_a_container_that_cannot_be_rebuilt_gives_the_capsules_back(np):
    """A failure in the last phase also undoes everything."""

    class Stiff:
        def __init__(self, *children):
            self.children = children

        def __dlx_tree__(self):
            return list(self.children), lambda children: 1 / 0

    capsule = dlx.convert(np.ones(3), to="dlx").__dlpack__(max_version=(1, 0))
    with pytest.raises(errors.ConversionError, match="cannot hold"):
        dlx.convert([Stiff(capsule, np.ones(2))], to="numpy")
    assert name_of(capsule) == "dltensor_versioned"


def test_the_input_is_as_before_after_a_failure(np):
    """Containers and children are the same objects in the same order."""
    inner = [np.ones(1), np.array(["x"])]
    tree = {"b": inner, "a": np.ones(2)}
    before = [*tree.items(), *inner]
    with pytest.raises(errors.DTypeError):
        dlx.convert(tree, to="torch" if "torch" in sys.modules else "dlx")
    assert all(a is b or a == b for a, b in zip([*tree.items(), *inner], before, strict=True)) and tree["b"] is inner


def test_an_interrupt_undoes_everything(np, monkeypatch):
    """Other exceptions pass through unchanged, and leave nothing behind."""
    from dlx._registry.registry import registry

    capsule = dlx.convert(np.ones(3), to="dlx").__dlpack__(max_version=(1, 0))
    kind = type(registry.target("numpy").adapter)
    load, loads = kind.load, []

    def interrupted(adapter, tensor):
        loads.append(1)
        if len(loads) > 1:
            raise KeyboardInterrupt
        return load(adapter, tensor)

    monkeypatch.setattr(kind, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dlx.convert([capsule, Stranger([], "b")], to="numpy")
    gc.collect()
    assert name_of(capsule) == "dltensor_versioned"


# ---- all at once -----------------------------------------------------------------------------------------------------


def test_collect_reports_all_failing_leaves_in_one_group(np):
    """One ExceptionGroup has the failures of all phases, each with path and cause."""
    own = ValueError("no")
    ring: list = []
    loop = (ring,)
    ring.append(loop)
    tree = [np.array(["x"]), np.ones(1), {"k": Stranger([], "s", own), "loop": loop}, object(), np.array(["y"])]
    with pytest.raises(ExceptionGroup, match="5 places in the tree") as caught:
        dlx.convert(tree, to="dlx", errors="collect", strict=True)
    found = {error.where: error for error in caught.value.exceptions}
    assert set(found) == {"obj[0]", "obj[2]['k']", "obj[2]['loop'][0][0]", "obj[3]", "obj[4]"}
    assert found["obj[2]['k']"].__cause__ is own
    assert all(isinstance(error, errors.DlxError) for error in found.values())
    assert isinstance(found["obj[3]"], errors.AdapterNotFoundError)


def test_collect_of_one_is_still_a_group_and_of_none_is_the_result(np):
    """The type does not depend on the number of failures; a single array has no group."""
    with pytest.raises(ExceptionGroup, match="1 place in"):
        dlx.convert([np.array(["x"])], to="dlx", errors="collect")
    assert type(dlx.convert([np.ones(1)], to="dlx", errors="collect")[0]) is dlx.Tensor


def test_the_plan_of_a_tree_that_collects_holds_the_group(np):
    """`plan` never raises: `plan.error` is the exception of convert."""
    tree = [np.array(["x"]), {"k": np.array(["y"])}, np.ones(2)]
    plan = dlx.plan(tree, to="dlx", errors="collect")
    assert isinstance(plan.error, ExceptionGroup) and len(plan.error.exceptions) == 2
    assert [leaf.outcome for leaf in plan.leaves] == ["refused", "refused", "shared"]
    assert isinstance(dlx.plan(tree, to="dlx").error, errors.DTypeError)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_of_a_tree_has_a_leaf_for_each_array(np, torch):
    """Each array once, at its first path, with its outcome; bytes to copy are summed."""
    a, back = np.ones(4), np.arange(4.0)[::-1]
    plan = dlx.plan({"a": a, "b": [a, back, torch.ones(2)], "c": 3}, to="torch")
    assert {leaf.path: leaf.outcome for leaf in plan.leaves} == {
        "obj['a']": "shared",
        "obj['b'][1]": "copied",
        "obj['b'][2]": "same",
    }
    assert plan.outcome == "tree" and plan.nbytes == 32 and plan.error is None
    text = str(plan)
    assert "tree of 3 arrays -> torch" in text and "obj['b'][1]: " in text and "32 bytes copied" in text


def test_a_plan_and_the_conversion_agree(np, torch):
    """The planned outcome of each leaf is the actual one."""
    tree = [np.ones(4), np.arange(4.0)[::-1], np.broadcast_to(1.0, (2,)), torch.ones(2)]
    plan, result = dlx.plan(tree, to="torch"), dlx.convert(tree, to="torch")
    for leaf, old, new in zip(plan.leaves, tree, result, strict=True):
        assert dlx.shares_memory(old, new) is (leaf.outcome in ("shared", "same"))


def test_a_plan_of_a_view_agrees_with_what_each_element_becomes(np, torch):
    """Plans with lazy=True, and plans of views, have the leaves, outcomes and errors of the elements."""

    def facts(error):
        return type(error), error.source, error.target, error.reason, error.fix, error.path

    bad = np.array(["x"])
    tree = {"s": [np.ones(4), np.arange(4.0)[::-1]], "t": (torch.ones(2), np.broadcast_to(1.0, (2,))), "b": [bad]}
    view = dlx.convert(tree, to="torch", lazy=True)
    for plan in (dlx.plan(tree, to="torch", lazy=True), dlx.plan(view, to="torch"), dlx.plan(tree, to="torch")):
        seen = {}
        for leaf in plan.leaves:
            old, place = eval(leaf.path, {"obj": tree}), leaf.path
            try:
                new = eval(place, {"obj": view})
                seen[place] = "same" if new is old else "shared" if dlx.shares_memory(old, new) else "copied"
            except errors.DlxError as error:
                seen[place] = "refused"
                assert facts(error) == facts(leaf.error) == facts(plan.error) and error.where == place == "obj['b'][0]"
        assert seen == {leaf.path: leaf.outcome for leaf in plan.leaves} and len(seen) == 5
        assert set(seen.values()) == {"same", "shared", "copied", "refused"}


@pytest.mark.slow
def test_a_failure_at_the_bottom_of_100_000_levels(python):
    """Raised or collected, with a readable path; the process lives."""
    python(
        """
        import dlx
        deep = used = dlx.convert(bytearray(1), to="dlx").__dlpack__(max_version=(1, 0))
        dlx.convert(used, to="dlx")
        for _ in range(100_000):
            deep = [deep]
        for errors in ("raise", "collect"):
            try:
                dlx.convert(deep, to="dlx", errors=errors)
            except (dlx.errors.ConsumedError, ExceptionGroup) as error:
                first = error.exceptions[0] if errors == "collect" else error
                assert first.where.count("[0]") == 64 and " ... " in first.where
            else:
                raise SystemExit("no error")
        """
    )


def test_a_plan_uses_nothing_up(np):
    """Capsules keep their names, and generic producers are called only if necessary."""
    calls = []
    capsule = dlx.convert(np.ones(3), to="dlx").__dlpack__()
    plan = dlx.plan([capsule, Stranger(calls, "a")], to="dlx", probe=False)
    assert calls == [] and name_of(capsule).startswith("dltensor")
    assert [leaf.outcome for leaf in plan.leaves] == ["shared", "unknown"]


def test_a_tree_without_arrays_has_an_empty_plan():
    """It has no steps and no error."""
    plan = dlx.plan({"a": [1, "x"]}, to="dlx")
    assert plan.leaves == () and plan.error is None and "0 arrays" in str(plan)


@pytest.mark.parametrize("tree", [[], [1, "a"], {"k": (None, {})}, ()], ids=str)
def test_a_tree_without_arrays_still_has_its_target_checked(tree):
    """An unknown target is an error for any tree."""
    for convert in (dlx.convert, dlx.convert.__wrapped__):
        with pytest.raises(errors.AdapterNotFoundError, match="unknown target"):
            convert(tree, to="nosuch")


# ---- leaks -----------------------------------------------------------------------------------------------------------


def test_good_and_bad_trees_leave_nothing_behind(np, torch):
    """No managed tensor and no reference to a leaf or container is kept."""
    leaf, container = np.ones(3), [1]
    good = {"a": [leaf, (np.ones(2), Point(np.ones(1), container))]}
    odd = {**good, ("t",): collections.OrderedDict(x=np.arange(3.0)[::-1])}
    bad = {"a": [leaf, (np.array(["x"]), container)]}
    late = {"a": [leaf, np.ones(2)], "b": Stranger([], "s", ValueError("no")), "c": container}

    def once():
        dlx.convert(good, to="torch")
        dlx.convert(odd, to="torch")
        dlx.plan(odd, to="torch")
        for tree, options in ((bad, {}), (late, {}), (bad, {"errors": "collect"}), (late, {"errors": "collect"})):
            with pytest.raises((errors.DlxError, ExceptionGroup)):
                dlx.convert(tree, to="torch", **options)
            dlx.plan(tree, to="torch", **options)

    once()
    gc.collect()
    live, held = native.live(), (sys.getrefcount(leaf), sys.getrefcount(container))
    for _ in range(200):
        once()
    gc.collect()
    assert (native.live(), (sys.getrefcount(leaf), sys.getrefcount(container))) == (live, held)


def test_an_error_that_is_kept_keeps_no_array_alive(np):
    """After a failure the results are freed, even while the error is alive."""
    live = native.live()
    held = []
    for options in ({}, {"errors": "collect"}):
        try:
            dlx.convert([np.ones(3), Stranger([], "s", ValueError("no"))], to="dlx", **options)
        except (errors.DlxError, ExceptionGroup) as error:
            held.append(error)
    assert len(held) == 2 and native.live() == live


NO_MEMORY = """
    import gc
    import _testcapi
    import numpy as np
    import dlx
    from dlx._core import native

    a = [np.ones(3) for _ in range(40)]
    ring = {"x": a[0]}
    ring["me"] = [ring, (ring,)]
    deep = a[1]
    for _ in range(40):
        deep = [deep]
    trees = [a, {"k%d" % i: (x, [x]) for i, x in enumerate(a)}, ring, deep]
    for tree in trees:
        dlx.convert(tree, to="dlx")
    gc.collect()
    live, failed = native.live(), 0
    for tree in trees:
        for start in range(400):
            _testcapi.set_nomemory(start, start + 1)
            try:
                result = dlx.convert(tree, to="dlx")
            except MemoryError:
                result = None
                failed += 1
            finally:
                _testcapi.remove_mem_hooks()
            del result
            gc.collect() if start % 100 == 0 else None
    gc.collect()
    print(native.live() - live, failed > 100)
"""


@pytest.mark.gil("a plain PyList_New dies when memory runs out (3.14)")
def test_memory_that_runs_out_in_the_walk_is_a_memory_error(python):
    """After each failing allocation in C, the process lives and nothing leaks."""
    pytest.importorskip("_testcapi")
    pytest.importorskip("numpy")
    assert python(NO_MEMORY, args=()).split() == ["0", "True"]


def test_a_plan_has_the_error_that_convert_would_raise_first(np, torch):
    """Early refusals come before refusals by exports, in any order of leaves."""
    locked = np.zeros(3)
    locked.flags.writeable = False

    class Stranger:
        def __dlpack__(self, **options):
            raise KeyError("no")

        def __dlpack_device__(self):
            return 1, 0

    text = np.array(["s"])
    for tree in (
        [locked, text],
        [Stranger(), locked, text],
        [Stranger(), locked],
        [locked, torch.zeros(1, device="meta")],
    ):
        with pytest.raises(errors.DlxError) as caught:
            dlx.convert(tree, to="torch", copy=False)
        found = dlx.plan(tree, to="torch", copy=False).error
        assert str(found) == str(caught.value) and type(found) is type(caught.value)
