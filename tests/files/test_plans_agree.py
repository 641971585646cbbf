"""The command, `dlx.plan`, `dlx.open` and `dlx.convert` agree for files of every format and content."""

import contextlib
import io
import itertools
import json
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.arrays.examples import examples
from support.arrays.layouts import address
from support.files.samples import WRITERS

import dlx
from dlx.cli import main
from dlx.cli.targets import installed_targets
from dlx.errors import DlxError, path_text

COPY = {None: "auto", False: "never", True: "always"}
NUMBERS = itertools.count()


def command(*words):
    """Run the command in this process; return its exit status and JSON output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*map(str, words), "--json"])
    return status, json.loads(out.getvalue())


def told(error):
    """Return the class, reason and fix of an error, as in the JSON output."""
    return type(error).__name__, error.reason, error.fix


def of_command(path, to, copy, readonly, detach, device):
    """Return {name: facts} of `dlx plan`, or the error that it prints."""
    words = [
        "--copy",
        COPY[copy],
        "--readonly",
        readonly,
        *["--detach"] * detach,
        *["--device", device] * (device is not None),
    ]
    status, found = command("plan", path, "--to", to, *words)
    if status:
        return found["error"]["message"]
    (plan,) = found["plans"]
    assert plan["target"] == to
    return {
        each["path"]: (each["outcome"], each["nbytes"] or 0)
        if each["outcome"] != "refused"
        else (each["error"], each["why"], each["fix"])
        for each in plan["arrays"]
    }


def of_plan(view, to, **options):
    """Return {name: facts} of `dlx.plan`, and the plan."""
    plan = dlx.plan(view, to=to, errors="collect", **options)
    known = {}
    for leaf in plan.leaves:
        name = leaf.path.removeprefix("obj")
        known[name] = told(leaf.error) if leaf.error is not None else (leaf.outcome, leaf.nbytes)
    of_leaves = {id(leaf.error) for leaf in plan.leaves}  # the place of a ragged array's error is one of its parts
    for error in plan.error.exceptions if plan.error is not None else ():
        if id(error) not in of_leaves:
            known[path_text(error.path, "")] = told(error)
    return known, plan


def is_mapped(path, result):
    """Return whether an array's elements are in a mapping of a file, or of a file in a folder."""
    at = address(result)
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            if start <= at < end:
                return str(path) in line
    raise AssertionError("it has no memory")


def named(path, kind):
    """Return the name that the command shows for a key of a plan."""
    if kind == ".pt":
        parts = path.replace("['", ".").replace("']", "")
        return parts.removeprefix(".")
    return path.removeprefix("['").removesuffix("']").replace("']['", ".").removeprefix(".")  # a field of records


OPTIONS = st.sampled_from([
    (copy, readonly, detach, device)
    for copy in COPY
    for readonly in ("copy", "error", "share")
    for detach in (False, True)
    for device in (None, "cpu")
])  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
def test_the_command_plan_open_and_convert_agree(kind, tmp_path):
    """Arrays, outcomes, bytes, errors and reasons are the same in all four."""
    write, packages = WRITERS[kind]
    for package in packages:
        pytest.importorskip(package)
    targets = [name for name in [*installed_targets(), "arrow"] if name != "dask"]  # it converts chunks later

    @settings(
        max_examples=examples(160), deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(st.data(), st.sampled_from(targets), OPTIONS)
    def check(data, to, drawn):
        path = tmp_path / f"{next(NUMBERS)}{kind}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the writers
            write(path, data.draw)
        agree(path, kind, to, *drawn)

    check()


def agree(path, kind, to, copy, readonly, detach, device):
    """Compare all results for one file."""
    said = of_command(path, to, copy, readonly, detach, device)
    options = {"readonly": readonly, "detach": detach, "device": device}
    try:
        view = dlx.open(path, **options)
    except DlxError as error:
        if isinstance(said, str):
            assert error.reason in said and error.fix in said
        else:  # the columns are listed
            assert said and set(said.values()) == {told(error)}
        return
    planned, plan = of_plan(view, to, copy=copy, **options)
    if isinstance(said, str):
        assert "it contains no tensor" in said and not planned
        return
    assert said == {named(key, kind): facts for key, facts in planned.items()}
    converted(path, view, plan, to, copy, options)
    if kind != ".pt":
        opened(path, view, planned, to, copy, options)
        inspected(path, to, said, copy, options)


def converted(path, view, plan, to, copy, options):
    """`convert` of the whole file does what the plan says, and shares memory if the plan says so."""
    try:
        result = dlx.convert(view, to=to, copy=copy, errors="collect", **options)
    except ExceptionGroup as group:
        assert [*map(told, group.exceptions)] == [*map(told, plan.error.exceptions)]
    else:
        assert plan.error is None
        assert list(result) == list(view)


def opened(path, view, planned, to, copy, options):
    """Each array of `dlx.open(path, to)` has the planned outcome, and uses the file's memory unless it is copied."""
    lazy = dlx.open(path, to, **options)
    for name in view:
        if isinstance(view._source[name], dict):  # the fields of records
            continue
        facts = planned[path_text((name,), "")]
        if copy is None:
            try:
                result = lazy[name]
            except DlxError as error:
                assert told(error) == facts
            else:
                assert facts[0] in ("same", "shared", "copied")
                has_null_lists = getattr(result, "null_count", 0) and hasattr(result.type, "value_type")
                info = None if has_null_lists else dlx.describe(result)  # which refuses null rows
                if info and info.nbytes and info.address and not is_compressed(view._source[name], path):
                    assert is_mapped(path, result) == (facts[0] != "copied"), facts
        source = view._source[name]
        for each in (source, view[name]) if type(source) is dlx.Tensor else (source,):
            one = dlx.plan(each, to=to, copy=copy, **options)
            assert facts == (told(one.error) if one.error else (one.outcome, one.nbytes))


def is_compressed(source, path):
    """Return whether a column is compressed, so that its memory is not the file's."""
    chunk = source.chunks[0] if hasattr(source, "chunks") else source
    while hasattr(chunk, "offsets"):  # a list array has no memory of its own
        chunk = chunk.values
    return type(source).__module__.startswith("pyarrow") and not is_mapped(path, chunk)


def inspected(path, to, said, copy, options):
    """`dlx inspect --to` agrees with `dlx plan` without options."""
    if copy is None and options == {"readonly": "copy", "detach": False, "device": None}:
        status, found = command("inspect", path, "--to", to)
        assert status == 0
        (source,) = found["sources"]
        for each in source["arrays"]:
            (fate,) = each["targets"]
            known = (fate["outcome"], fate["nbytes"] or 0)
            known = known if fate["outcome"] != "refused" else (fate["error"], fate["why"], fate["fix"])
            assert known == said[each["path"]]
