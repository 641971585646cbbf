"""`dlx.plan` and `dlx.convert` of random trees: the same outcomes, and the same errors in the same order."""

import importlib
import importlib.util

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.arrays.examples import examples
from support.files.samples import arrow_table, numpy_array, torch_tensor

import dlx
from dlx._registry import lookup
from dlx._registry.compound import CompoundHandler
from dlx.cli.targets import installed_targets
from dlx.errors import DlxError


class Slice:
    """Refused by name: it has `__array__` and nothing else."""

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("nothing asks for it")


def leaf(draw):
    """Draw an array of any installed framework, or another object."""
    kinds = ["bytes", "dlx", "plain", "array-like"]
    kinds += [name for name in ("numpy", "torch", "pyarrow") if importlib.util.find_spec(name)]
    kind = draw(st.sampled_from(kinds))
    if kind == "numpy":
        np = importlib.import_module("numpy")
        array = numpy_array(np, draw)
        if draw(st.booleans()):
            array.flags.writeable = False
        return array[::-1] if array.ndim and draw(st.booleans()) else array
    if kind == "torch":
        torch = importlib.import_module("torch")
        made = torch_tensor(torch, draw)
        made = made.t() if made.ndim == 2 and draw(st.booleans()) else made
        made = made.conj() if made.is_complex() and draw(st.booleans()) else made
        if draw(st.integers(0, 5)) == 0:
            made = torch.eye(2).to_sparse()
        return made.requires_grad_() if made.is_floating_point() and draw(st.booleans()) else made
    if kind == "pyarrow":
        table = arrow_table(importlib.import_module("pyarrow"), draw)
        return table.column(0)
    if kind == "dlx":
        made = dlx.empty((2, 4), draw(st.sampled_from(["float32", "float4_e2m1fn", "int8", "bool", "uint64"])))
        return dlx.from_dlpack(bytes(8)) if draw(st.booleans()) else made
    return {"bytes": b"abc", "plain": 3, "array-like": Slice()}[kind]


def tree(draw):
    """Draw a list or dict of arrays, some of them repeated."""
    leaves = [leaf(draw) for _ in range(draw(st.integers(1, 4)))]
    leaves += [leaves[0]] * draw(st.integers(0, 1))
    return draw(st.sampled_from([leaves, {"a": leaves[0], "b": [*leaves, "text"]}, (leaves, {"x": leaves[-1]})]))


OPTIONS = st.fixed_dictionaries({
    "copy": st.sampled_from([None, False, True]),
    "readonly": st.sampled_from(["copy", "error", "share"]),
    "detach": st.booleans(),
    "strict": st.booleans(),
    "errors": st.sampled_from(["raise", "collect"]),
    "device": st.sampled_from([None, "cpu"]),
})  # fmt: skip


def told(error):
    """Return the properties of an error, or of each error in a group."""
    if isinstance(error, ExceptionGroup):
        return [*map(told, error.exceptions)]
    return type(error), error.reason, error.fix, error.path


def at(result, path):
    """Return the object at a path in a tree."""
    for key in path:
        result = result[key]
    return result


def paths(obj, path=()):
    """Give (path, element) of a tree of lists, tuples and dicts."""
    pairs = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, (list, tuple)) else None
    if pairs is None:
        yield path, obj
        return
    for key, each in pairs:
        yield from paths(each, (*path, key))


@pytest.mark.filterwarnings("ignore:os.fork")  # jax has threads, and libraries start processes when they are imported
@settings(max_examples=examples(1200), deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([*installed_targets(), "arrow"]), OPTIONS)
def test_plan_says_what_convert_does(data, to, options):
    """Plans agree with conversions of trees, eager and lazy, and of each element."""
    root = tree(data.draw)
    plan = dlx.plan(root, to, **options)
    error = None
    try:
        result = dlx.convert(root, to, **options)
    except (DlxError, ExceptionGroup) as raised:
        error = told(raised)
    assert error == (None if plan.error is None else told(plan.error))
    if error is None:
        known = {each.path: each for each in plan.leaves}
        for path, source in paths(root):
            name = dlx.errors.path_text(path)
            if name in known:
                check(known[name], source, at(result, path))
    lazy(root, to, options)


def check(plan, source, result):
    """Hold a result against its plan."""
    assert (plan.outcome == "same") == (result is source)
    try:
        shares = dlx.shares_memory(source, result)
        nbytes = dlx.describe(result).nbytes
    except DlxError:  # its own framework accepts arrays that no other does
        return
    if isinstance(lookup.kind_of(source).handler, CompoundHandler):  # copied: a part of it
        assert shares or plan.outcome == "copied" or nbytes <= 8  # the one offset of a list without rows
    elif nbytes and plan.outcome != "same":
        assert shares == (plan.outcome == "shared") and (plan.outcome == "copied") == (plan.nbytes > 0)


def lazy(root, to, options):
    """Each element of a view fares as by itself."""
    strict = options["strict"]
    view = dlx.convert(root, to, lazy=True, **options)
    for path, source in paths(root):
        if isinstance(source, int | str):  # passes, as in any container that holds an array
            assert at(view, path) is source
            continue
        one = dlx.plan([source], to, **{**options, "errors": "raise"})
        try:
            got = at(view, path)
        except DlxError as error:
            assert one.error is not None
            assert told(error)[:3] == told(one.error)[:3]
        else:
            assert one.error is None, (source, strict, got)
            if one.leaves:
                check(one.leaves[0], source, got)
