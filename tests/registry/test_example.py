"""The example distribution, built and installed like a third party's, without changes to dlx.

Its arrays have the same features as numpy's: the fast path, policies, plans, trees, the command.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.processes import command
from support.project import ROOT

import dlx
from dlx._core import native
from dlx._engine.fast_path import learn
from dlx._registry.registry import registry
from dlx.cli import probe
from dlx.errors import ConversionError, CopyRequiredError, DTypeError, ReadOnlyError

EXAMPLE = ROOT / "examples" / "dlx-example"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

if shutil.which(os.environ.get("CC", "cc")) is None:
    pytest.skip("the example has a core in C, and there is no compiler", allow_module_level=True)


def install(folder, *where):
    """Build the example from a copy, and install it into a folder."""
    source = folder / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT)])}
    done = subprocess.run(
        [*PIP, *where, str(source)], capture_output=True, text=True, env=env, timeout=240, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Return a folder where the example is installed, with its metadata."""
    folder = tmp_path_factory.mktemp("example")
    install(
        folder, "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", folder / "site"
    )
    return folder / "site"


@pytest.fixture
def ea(site, monkeypatch):
    """Return the framework, with its plugin found by its entry point, as if installed before the process started."""
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    monkeypatch.setattr(registry._loader, "plugins", dict(registry._loader.plugins))
    monkeypatch.setattr(registry._loader, "_scanned", False)
    registry._forget()
    yield importlib.import_module("examplearray")
    registry._forget()


@pytest.fixture
def fast_path(monkeypatch):
    """Return `convert` and a list of the calls that its Python path received."""
    slow = []
    python_road = dlx.convert.__wrapped__

    def counting(*args, **options):
        slow.append(args)
        return python_road(*args, **options)

    return native.FastPathFunction(counting, learn, None), slow


def outcome(obj, to, **options):
    """Return the plan's outcome and steps, or the class of the refusal; conversion and plan must agree."""
    plan = dlx.plan(obj, to=to, **options)
    try:
        result = dlx.convert(obj, to=to, **options)
    except ConversionError as error:
        assert type(plan.error) is type(error)
        return type(error).__name__
    assert plan.error is None
    if dlx.describe(obj).nbytes:
        assert dlx.shares_memory(obj, result) == (plan.outcome in ("shared", "same"))
    return plan.outcome, tuple(step.do for step in plan.steps)


# ---- a fresh environment ---------------------------------------------------------------------------------------------


@pytest.mark.unsanitized("freed memory is kept for a while, so that resident memory grows")
@pytest.mark.slow
def test_it_installs_into_a_fresh_environment(tmp_path):
    """It builds next to an installed dlx, is found, used and listed; its tests and the kit pass."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=60)
    python = tmp_path / "env" / "bin" / "python"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}"  # 3.14t without the GIL
    packages = tmp_path / "env" / "lib" / version / "site-packages"
    # dlx and its requirements, like in an installation.
    there = [ROOT, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (packages / "dlx_and_its_needs.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(map(str, there))))
    install(tmp_path, "--python", python, "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    assert (packages / "dlx_example.py").exists()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins of this environment
    done = subprocess.run(
        [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests"],
        capture_output=True, text=True, env=env, cwd=tmp_path / "source", timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "examplearray::adapter-round-trips PASSED" in done.stdout and "test_memory_is_shared PASSED" in done.stdout
    code = "import dlx; print(type(dlx.convert(bytearray(3), to='examplearray')), dlx.adapters().broken)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.stdout == "<class 'examplearray.Array'> {}\n", done.stderr


def test_nothing_of_it_is_loaded_before_it_is_needed(python, site):
    """Other conversions load nothing; listings load only the plugin."""
    out = python(
        f"""
        import sys; sys.path.insert(0, {str(site)!r})
        import dlx
        def there(): return [name for name in ("dlx_example", "examplearray") if name in sys.modules]
        class Unknown: pass
        dlx.convert(bytearray(3), to="dlx"); dlx.plan(Unknown(), to="dlx"); dlx.plan(b"a", to="nowhere")
        print(there())
        found = dlx.adapters(); print(there(), found.notes, found.broken)
        """,
        args=(),
    )
    assert out.splitlines() == ["[]", "['dlx_example'] [] {}"]


# ---- the fast path ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["numpy", "torch", "dlx", "examplearray"])
def test_its_arrays_take_the_fast_path(ea, fast_path, to):
    """Exporting a normal array runs no Python; values, memory and type are correct."""
    if to not in ("dlx", "examplearray"):
        pytest.importorskip(to)
    convert, slow = fast_path
    array = ea.array([[1, 2, 3], [4, 5, 6]])
    for source in (array, array.T, array[:, 1:], array[::2], ea.array(7.0), ea.empty((0, 3))):
        result = convert(source, to=to)
        assert dlx.shares_memory(source, result) or not source.size
        assert dlx.convert(result, to="examplearray").tolist() == source.tolist()
    assert not slow


@pytest.mark.parametrize("origin", ["numpy", "torch", "dlx"])
def test_others_reach_it_by_the_fast_path(ea, fast_path, origin):
    """Importing a normal array of another framework runs no Python."""
    if origin != "dlx":
        pytest.importorskip(origin)
    convert, slow = fast_path
    other = dlx.convert(ea.array([[1, 2, 3], [4, 5, 6]], ea.int64), to=origin)
    result = convert(other, to="examplearray")
    assert type(result) is ea.Array and result.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert dlx.shares_memory(result, other) and not slow


@pytest.mark.parametrize("options", [{"copy": True}, {"copy": False}, {"readonly": "error"}, {"device": "cpu"}])
def test_options_take_the_fast_path_as_they_do_for_numpy(ea, fast_path, np, options):
    """Options are handled on the fast path, for imports and exports."""
    convert, slow = fast_path
    array, theirs = ea.array([1, 2, 3]), np.arange(1, 4, dtype="f4")
    for source, to in ((array, "dlx"), (array, "numpy"), (theirs, "dlx"), (theirs, "examplearray")):
        result = convert(source, to=to, **options)
        assert dlx.shares_memory(source, result) == ("copy" not in options or not options["copy"])
        assert dlx.convert(result, to="examplearray").tolist() == [1, 2, 3]
    assert not slow


def test_its_own_dtypes_take_the_fast_path(ea, fast_path):
    """They include bfloat16 under its own name, and a dtype without a standard DLPack code."""
    convert, slow = fast_path
    for dtype, values in ((ea.brain16, [1.5, -2.0]), (ea.posit16, [0x4000, 0xC000])):
        tensor = convert(ea.array(values, dtype), to="dlx")
        assert convert(tensor, to="examplearray").tolist() == values
    assert not slow


def test_trees_of_its_arrays_stay_in_c(ea, fast_path, np):
    """C walks lists, tuples and dicts of its arrays, also mixed with numpy's."""
    convert, slow = fast_path
    array = ea.array([1, 2])
    tree = {"a": [array, np.zeros(2, "f4")], "b": (array, 3)}
    result = convert(tree, to="dlx")
    assert result["a"][0] is result["b"][0] and not slow


def test_guards_send_an_array_to_python(ea, fast_path, np):
    """The adapter checks negated arrays and unsupported dtypes each time, but not read-only arrays."""
    convert, slow = fast_path
    array = ea.array([1, 2])
    odd = [array.negated(), array.frozen(), ea.array([1, 2], ea.quarter8)]
    for n in range(3):
        assert convert(odd[0], to="numpy").tolist() == [-1, -2]
        assert not convert(odd[1], to="numpy").flags.writeable
        assert convert(odd[2], to="dlx").dtype.name == "float8_e5m2"
        assert convert(array, to="numpy").tolist() == [1, 2]
        assert len(slow) == 2 * (n + 1)


def test_a_patched_type_is_looked_at_anew(ea, fast_path, monkeypatch):
    """If a guard is replaced at run time, the new one is called."""
    convert, slow = fast_path
    array = ea.array([1, 2])
    convert(array, to="dlx")
    monkeypatch.setattr(ea.Array, "is_negated", property(lambda self: True), raising=False)
    with pytest.raises(ConversionError):
        dlx.convert(array, to="dlx", copy=False)
    convert(array, to="dlx")
    assert slow == [(array,)] or slow == [(array, "dlx")]


def test_nothing_leaks_by_the_fast_path(ea, np):
    """Arrays live exactly as long as the results that use them."""
    import weakref

    array = ea.array([1, 2, 3])
    gone = weakref.ref(array)
    result = dlx.convert(array, to="numpy")
    again = dlx.convert(result, to="examplearray")
    del array, result
    assert gone() is not None and again.tolist() == [1, 2, 3]
    del again
    assert gone() is None


# ---- policies, compared with numpy's ---------------------------------------------------------------------------------


def pair(ea, np, what):
    """Return the same array in the example and in numpy."""
    memory = np.zeros(64 + 12 * 4, "u1")
    start = -memory.ctypes.data % 64  # jax looks at addresses
    values = memory[start : start + 48].view("f4").reshape(3, 4)
    values[:] = np.arange(12).reshape(3, 4)
    array = ea.array(values.tolist())
    assert array.address % 64 == values.ctypes.data % 64 == 0
    views = {
        "plain": lambda a: a,
        "transposed": lambda a: a.T,
        "strided": lambda a: a[::2, 1:],
        "reversed": lambda a: a[::-1, ::-1],
        "scalar": lambda a: a[1, 2:3][0:1],
        "empty": lambda a: a[:0],
    }
    view = views[what.split()[0]]
    mine, theirs = view(array), view(values)
    if "read-only" in what:
        mine = mine.frozen()
        theirs = theirs.view()
        theirs.flags.writeable = False
    return mine, theirs


KINDS = [
    f"{kind}{flag}" for kind in ("plain", "transposed", "strided", "reversed", "empty") for flag in ("", " read-only")
]


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("to", ["torch", "dlx", "jax", "tvm_ffi"])
def test_policies_are_those_of_numpy(ea, np, what, to):
    """Read-only, copy and layout policies have the same results as for numpy, for all options."""
    if to != "dlx":
        pytest.importorskip(to)
    mine, theirs = pair(ea, np, what)
    for copy in (None, False, True):
        for readonly in ("copy", "error", "share"):
            options = {"copy": copy, "readonly": readonly}
            assert outcome(mine, to, **options) == outcome(theirs, to, **options), options


def test_read_only_is_kept(ea, np):
    """In both directions, and through dlx.Tensor; consumers without the flag get a copy."""
    torch = pytest.importorskip("torch")
    frozen = ea.array([1, 2, 3]).frozen()
    assert not dlx.convert(frozen, to="numpy").flags.writeable
    assert dlx.convert(frozen, to="dlx").readonly
    assert dlx.convert(dlx.convert(frozen, to="numpy"), to="examplearray").readonly
    assert dlx.convert(b"abc", to="examplearray").readonly
    copied = dlx.convert(frozen, to="torch")
    copied[0] = 9
    assert frozen.tolist() == [1, 2, 3] and isinstance(copied, torch.Tensor)
    with pytest.raises(ReadOnlyError, match=r"examplearray\.Array \(float32\[3\], read-only\)"):
        dlx.convert(frozen, to="torch", readonly="error")


def test_capabilities_are_read(ea, np):
    """Unsupported arrays are refused or copied before the import, with the usual messages."""
    with pytest.raises(DTypeError, match="examplearray has no dtype complex64; it has bfloat16, bool, code3_16bit"):
        dlx.convert(np.zeros(3, "c8"), to="examplearray")
    with pytest.raises(ConversionError, match="examplearray cannot hold 9 dimensions"):
        dlx.convert(np.zeros((1,) * 9), to="examplearray")
    with pytest.raises(ConversionError, match="device"):
        dlx.convert(np.zeros(3), to="examplearray", device="cuda")
    with pytest.raises(CopyRequiredError, match="negatives of its values"):
        dlx.convert(ea.array([1]).negated(), to="numpy", copy=False)


def test_known_issues_are_read(ea, np, monkeypatch):
    """A known issue of an old version changes capabilities: read-only memory is copied."""
    frozen = np.arange(3, dtype="f4")
    frozen.flags.writeable = False
    assert dlx.plan(frozen, to="examplearray").outcome == "shared"
    adapter = registry.target("examplearray").adapter
    monkeypatch.setattr(ea, "__version__", "0.2.7")
    monkeypatch.delitem(adapter.__dict__, "lowered", raising=False)
    registry._forget()
    assert dlx.plan(frozen, to="examplearray").outcome == "copied"
    adapter.__dict__.pop("lowered", None)
    registry._forget()


def test_every_dtype_crosses_bit_by_bit(ea):
    """Each declared dtype is exported and imported without a copy or changed bits, under its own name."""
    dtypes = registry.target("examplearray").adapter.dtypes
    for name in sorted(dtypes.known()):
        native_dtype = dtypes.to_native(dlx.DType(name))
        assert dtypes.from_native(native_dtype) == dlx.DType(name)
        bits = bytes([0, 1] * 8) if name == "bool" else bytes(range(240, 256))
        tensor = dlx.from_pointer(_address(bits), (16 * 8 // native_dtype.bits,), name, owner=bits, readonly=True)
        array = dlx.convert(tensor, to="examplearray")
        assert array.dtype is native_dtype and array.tobytes() == bits and array.address == tensor.data_ptr
        back = dlx.convert(array, to="dlx")
        assert back.dtype.name == name and back.data_ptr == tensor.data_ptr


def _address(data):
    return int(native.ffi.cast("uintptr_t", native.ffi.from_buffer(data)))


def test_dtypes_of_others_have_its_words(ea):
    """bfloat16 and float8 convert to torch and back under each framework's name."""
    torch = pytest.importorskip("torch")
    tensor = dlx.convert(ea.array([1.5, -2.0], ea.brain16), to="torch")
    assert tensor.dtype is torch.bfloat16 and tensor.tolist() == [1.5, -2.0]
    assert dlx.convert(tensor, to="examplearray").dtype is ea.brain16
    eighths = torch.tensor([1.0, -2.0]).to(torch.float8_e5m2)
    array = dlx.convert(eighths, to="examplearray")
    assert array.dtype is ea.quarter8 and array.tobytes() == bytes([0x3C, 0xC0])
    assert "views it as float8_e5m2" in str(dlx.plan(eighths, to="examplearray"))


# ---- containers ------------------------------------------------------------------------------------------------------


def test_its_containers_are_trees(ea, np):
    """A bundle keeps its type and label, a repeated array is converted once, and the input is unchanged."""
    array = ea.array([1, 2])
    bundle = ea.Bundle("weights", {"a": array, "b": [array, "text"], "c": None})
    result = dlx.convert(bundle, to="numpy")
    assert type(result) is ea.Bundle and result.label == "weights" and list(result) == ["a", "b", "c"]
    assert result["a"] is result["b"][0] and result["b"][1] == "text" and bundle["a"] is array
    plan = dlx.plan(bundle, to="numpy")
    assert [leaf.path for leaf in plan.leaves] == ["obj['a']"]  # a repeated array is not another leaf
    with pytest.raises(ConversionError, match=r"at obj\['x'\]\['y'\]"):
        dlx.convert({"x": ea.Bundle("", {"y": array.negated()})}, to="numpy", copy=False)


def test_a_bundle_that_holds_itself(ea, np):
    """`new_empty` makes cycles possible."""
    bundle = ea.Bundle("loop", {"a": ea.array([1])})
    bundle.put("self", bundle)
    result = dlx.convert(bundle, to="numpy")
    assert result["self"] is result and result.label == "loop"


def test_a_bundle_lazily(ea, np):
    """A lazy view converts each accessed element once."""
    bundle = ea.Bundle("lazy", {"a": ea.array([1, 2]), "bad": ea.array([1]).negated()})
    view = dlx.convert({"x": bundle}, to="numpy", lazy=True, copy=False)
    assert view["x"]["a"] is view["x"]["a"] and view["x"]["a"].tolist() == [1, 2]
    with pytest.raises(CopyRequiredError):
        view["x"]["bad"]


# ---- streams, plans, descriptions, other verbs -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [None, -1, 0, 1, 7])
def test_stream_rules_are_inherited(ea, np, stream):
    """A stream for host memory is refused like for numpy, in both directions."""

    def answer(obj, to):
        try:
            dlx.convert(obj, to=to, stream=stream)
        except ConversionError as error:
            return type(error).__name__, error.reason
        return "converted"

    array, theirs = ea.array([1, 2]), np.zeros(2, "f4")
    assert answer(array, "dlx") == answer(theirs, "dlx")
    assert answer(array, "numpy") == answer(theirs, "examplearray")


def test_moves_to_a_device_wait_as_those_of_numpy(ea, np, monkeypatch, cuda):
    """Conversions to and from a device make the same driver calls as for numpy."""
    from support.cuda import gpulib

    other = gpulib.install(monkeypatch, "libgpu", cuda)
    dlx.convert(dlx.convert(bytearray(64), to="libgpu", device="cuda"), to="dlx", device="cpu")  # starts the driver
    calls = []
    for source, to in ((ea.array(list(range(64)), ea.uint8), "examplearray"), (np.arange(64, dtype="u1"), "numpy")):
        before = len(cuda.log)
        there = dlx.convert(source, to="libgpu", device="cuda")
        back = dlx.convert(there, to=to, device="cpu")
        assert type(back) is type(source) and back.tolist() == source.tolist()
        calls.append([call.split()[0] for call in cuda.log[before:]])
        del there, back
    assert calls[0] == calls[1] and calls[0]
    del other


def test_plans_and_descriptions(ea, np):
    """They have the same text as for numpy, with its names."""
    array = ea.array([[1, 2], [3, 4]], ea.int32)
    theirs = dlx.convert(array, to="numpy")
    info, other = dlx.describe(array), dlx.describe(theirs)
    for fact in ("dtype", "shape", "strides", "device", "nbytes", "readonly", "address"):
        assert getattr(info, fact) == getattr(other, fact)
    assert (info.framework, info.type_name, info.dtype_name) == ("examplearray", "examplearray.Array", "int32")
    assert dlx.describe(array.negated()).notes == ("is_negated",)
    for options in ({}, {"copy": True}, {"readonly": "share"}):
        mine = str(dlx.plan(array.frozen(), to="dlx", **options))
        frozen = dlx.convert(array.frozen(), to="numpy")
        assert mine.replace("examplearray.Array", "numpy.ndarray") == str(dlx.plan(frozen, to="dlx", **options))


def test_the_other_verbs(ea, np):
    """stack, shares_memory, borrow, from_dlpack, to_capsule, using, like and modules as targets work."""
    array = ea.array([1, 2, 3])
    assert dlx.stack([array, dlx.convert(array, to="numpy")], to="examplearray").tolist() == [[1, 2, 3]] * 2
    assert dlx.shares_memory(array, array[1:]) and not dlx.shares_memory(array, array.copy())
    with dlx.borrow(array) as tensor:
        assert int(native.ffi.cast("uintptr_t", tensor.data)) == array.address
    assert ea.from_dlpack(dlx.from_dlpack(array)).address == array.address
    assert np.from_dlpack(array).tolist() == [1, 2, 3] and ea.from_dlpack(np.arange(3.0)).tolist() == [0, 1, 2]
    numbers = np.zeros(3, "f4")
    for target in ({"to": ea}, {"to": ea.Array}, {"like": array}):
        assert type(dlx.convert(numbers, **target)) is ea.Array

    @dlx.using("numpy")
    def doubled(values):
        return values * 2

    assert type(doubled(array)) is ea.Array and doubled(array).tolist() == [2, 4, 6]


def test_copies_inside_the_framework_are_its_own(ea):
    """An array of the target is returned unchanged; copy=True calls `Adapter.copy`."""
    array = ea.array([1, 2]).negated()
    assert dlx.convert(array, to="examplearray") is array
    copied = dlx.convert(array, to="examplearray", copy=True)
    assert copied.is_negated and copied.address != array.address and copied.tolist() == [-1, -2]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_knows_it(ea, site):
    """doctor, dtypes, devices and plan work in new processes."""
    path = os.pathsep.join([str(site), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path}

    def document(*words):
        status, out, err = command.dlx(*words, "--json", env=env, memory=None)
        assert status == 0, err
        return json.loads(out)

    (row,) = document("doctor", "examplearray", "--load", "--strict")["adapters"]
    assert (row["status"], row["version"], row["distribution"], row["cause"]) == (
        "ready", "0.3.1", "dlx-example", None,
    )  # fmt: skip
    assert row["facts"]["in"] == row["facts"]["out"] == "shared" and row["facts"]["exchange_api"]
    dtypes = {each["name"]: each["words"].get("examplearray") for each in document("dtypes")["dtypes"]}
    assert dtypes["bfloat16"] == "brain16" and dtypes["complex64"] == "" and dtypes["code3_16bit"] == "posit16"
    cells = document("dtypes", "--from", "examplearray", "--to", "dlx,examplearray")["cells"]
    found = {(each["dtype"], each["to"]): each["outcome"] for each in cells}
    assert (
        found["bfloat16", "dlx"] == found["code3_16bit", "dlx"] == "shared"
        and found["float64", "examplearray"] == "same"
    )
    assert probe.ask("devices", "examplearray")["devices"][0]["device"] == "cpu"


def test_the_command_inspects_its_objects(site, tmp_path):
    """The command inspects and plans an expression of a module."""
    (tmp_path / "made.py").write_text("import examplearray as ea\nbundle = ea.Bundle('b', {'x': ea.array([1, 2])})\n")
    path = os.pathsep.join([str(site), str(ROOT), str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": path}
    status, out, err = command.dlx("plan", "made:bundle", "--to", "dlx,examplearray", "--json", env=env, memory=None)
    assert status == 0, err
    plans = json.loads(out)["plans"]
    assert [(plan["target"], each["path"], each["outcome"]) for plan in plans for each in plan["arrays"]] == [
        ("dlx", "['x']", "shared"),
        ("examplearray", "['x']", "same"),
    ]


def test_no_line_of_dlx_knows_it():
    """The example is not mentioned in dlx and its adapters."""
    for folder in ("dlx", "dlx_adapters", "c_src"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".c", ".h"}:
                assert "examplearray" not in path.read_text(encoding="utf-8"), path


def test_the_example_is_clean():
    """Its adapter uses only the public interface, and is at most one and a half screens long."""
    text = (EXAMPLE / "src" / "dlx_example.py").read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith(("import", "from"))]
    assert {line.split()[1].partition(".")[0] for line in imports} <= {"__future__", "collections", "typing", "dlx"}
    assert not any(
        "from dlx." in line and not line.startswith(("from dlx.adapter", "from dlx.errors")) for line in imports
    )
    assert len(text.splitlines()) < 200
    assert Path(EXAMPLE / "README.md").exists()
