"""`dlx plan`, `dlx dtypes` and `dlx doctor` agree with the behaviour of dlx."""

import re
import runpy
import sys
import types
import xml.etree.ElementTree
from pathlib import Path

import pytest
from support.files.writers import npy, safetensors
from support.processes.command import dlx, document, here, refused

import dlx as package
from dlx._registry.modules import import_framework
from dlx._registry.registry import BUILT_IN, Registry, registry
from dlx.adapter.base import version_of
from dlx.cli import probe, targets
from dlx.cli.commands import doctor
from dlx.cli.model import Entry
from dlx.cli.targets import Planner, array_of, installed_targets

DTYPES = [dtype.name for dtype in package.DType.all()]


def plans(*words):
    """Plan, and return the path, outcome and error of each array."""
    return [
        (each["path"], each["outcome"], each["error"])
        for one in document("plan", *words)["plans"]
        for each in one["arrays"]
    ]


@pytest.fixture
def file(tmp_path):
    """Write a .npy file of float32."""
    path = tmp_path / "x.npy"
    path.write_bytes(npy("<f4", (2, 3), bytes(24)))
    return path


def test_abstract_tensors():
    """A dtype and a shape describe an array that need not exist."""
    assert plans("float32[3,4]", "--to", "dlx") == [("", "shared", "")]
    assert plans("bfloat16[]", "--to", "dlx", "--copy", "always") == [("", "copied", "")]
    for name in ("float32[1,,2]", "float32[,]", "float32[ ,1]"):
        assert "a shape consists of numbers and commas" in refused("plan", name, "--to", "dlx")
    for shape in (f"{1 << 62},2", f"0,{10**20}", "1," * 129):
        refused("plan", f"int8[{shape}]", "--to", "dlx")
    assert plans(f"int8[{','.join('1' * 128)}]", "--to", "dlx") == [("", "shared", "")]  # longer than a file's name
    assert "unknown dtype 'floaty'" in refused("plan", "floaty[2]", "--to", "dlx")
    for name in ("floaty", "float64=floaty", "floaty=float32"):
        assert "unknown dtype 'floaty'" in refused("plan", "float64[2]", "--to", "dlx", "--dtype", name)
    assert "its size is 2**63 bytes or more" in refused("plan", f"float32[{10**30}]", "--to", "dlx")


def test_plans_agree_with_dlx_plan(file, torch):
    """Outcomes and errors are the same as with `dlx.open`; see tests/files/test_plans_agree.py."""
    assert plans(file, "--to", "torch") == [("", "copied", "")]
    assert plans(file, "--to", "torch", "--copy", "never") == [("", "refused", "ReadOnlyError")]
    assert plans(file, "--to", "torch", "--readonly", "share") == [("", "shared", "")]
    assert plans("float6_e2m3fn[4]", "--to", "torch") == [("", "refused", "DTypeError")]
    assert package.plan(array_of("dlx", "float6_e2m3fn"), to="torch").outcome == "refused"


def unimported(name, monkeypatch):
    """Return the target of a framework as before its import."""
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, package.adapters()[name].package)
        return registry.find_unimported(name)


@pytest.mark.few(8)
@pytest.mark.parametrize("options", [{}, {"copy": False}, {"copy": True}, {"dtype": "float32"}, {"readonly": "share"}])
@pytest.mark.parametrize("name", installed_targets())
def test_plans_without_the_framework_are_the_same(name, options, file, np, monkeypatch):
    """Before its import, a framework's plans are those that it has afterwards, or it is imported."""
    adapter = package.adapters()[name]
    pytest.importorskip(adapter.package)
    target = unimported(name, monkeypatch)
    if target is None:
        pytest.skip("only the framework can tell")
    (mapped,) = package.open(file).values()
    shapes = (), (0, 2), (3, 4)
    entries = [Entry("", package.DType(dtype), dtype, shape, None) for dtype in DTYPES for shape in shapes]
    entries += [
        Entry("", mapped.dtype, "", mapped.shape, None, obj=obj) for obj in (mapped, np.asarray(mapped)[:, ::-1])
    ]
    with_it = Planner(name, **options)
    monkeypatch.setattr(targets, "find_unimported", lambda name: target)
    planner = Planner(name, **options)
    for entry in entries:
        assert planner.outcome(entry).document() == with_it.outcome(entry).document(), entry
    assert planner._plan_unimported(mapped) is not None or options == {"copy": False}


def test_other_byte_order_is_a_copy(tmp_path):
    """Elements must be swapped, as numpy does when it loads them."""
    path = tmp_path / "x.npy"
    path.write_bytes(npy(">f4", (2, 3), bytes(24)))
    assert plans(path, "--to", "dlx") == [("", "copied", "")]
    assert plans(path, "--to", "dlx", "--copy", "never") == [("", "refused", "CopyRequiredError")]


def test_alignment_is_that_of_the_mapping(tmp_path):
    """A tensor in the middle of a file has the alignment of its offset."""
    pytest.importorskip("jax")
    path = tmp_path / "x.npy"
    path.write_bytes(npy("<f4", (2, 3), bytes(24)))
    assert plans(path, "--to", "jax") == [("", "shared", "")]
    path = safetensors(tmp_path / "x.safetensors", {"a": ("F32", (4,))})
    (plan,) = document("plan", path, "--to", "jax")["plans"]
    assert plan["arrays"][0]["outcome"] == "copied"
    assert plan["arrays"][0]["why"] == "jax needs data aligned to 64 bytes, found 8"


def test_strict_turns_a_refusal_into_exit_status_1(file):
    """Without it the status is 0, since dlx explains the refusal."""
    words = ["plan", "float32[2]", "--to", "dlx", "--device", "cuda:0"]
    status, out, err = dlx(*words)
    assert (status, err) == (0, "")
    assert "refused" in out and "DeviceError" in out
    status, out, err = dlx(*words, "--strict")
    assert (status, err) == (1, "")
    assert dlx("plan", file, "--to", "dlx", "--strict")[0] == 0


def test_wrong_options_are_one_line(file):
    """Unknown devices and targets are invalid calls."""
    assert "unknown device 'moon'" in refused("plan", file, "--to", "dlx", "--device", "moon")
    assert "unknown target 'nothing'" in refused("plan", file, "--to", "nothing")
    for none in (",", ""):
        assert "no target: pass names" in refused("plan", file, "--to", none)
        assert "no target: pass names" in refused("dtypes", "--to", none)
    assert "unknown target 'none'" in refused("plan", file, "--to", "none")
    assert "unknown target 'none'" in refused("matrix", "--to", "none")


def test_several_targets(file, np):
    """One array is a row for each target; several arrays are a table for each."""
    _, out = here("plan", file, "--to", "dlx,numpy", "--copy", "always")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == [str(file), "float32[2,", "3],", "--copy", "always"]
    for name in ("dlx", "numpy"):
        assert [name, "copied", "24", "B", "--copy", "always"] in rows
    _, out = here("plan", file, "--to", "dlx,numpy")
    assert [line.split() for line in out.splitlines()[2:]] == [["dlx", "same"], ["numpy", "shared"]]
    _, out = here("plan", "float32[2,3]", "--to", "dlx,numpy")
    assert out.splitlines()[0] == "float32[2,3]  an abstract tensor"
    assert [(each["target"], len(each["arrays"])) for each in document("plan", file, "--to", "dlx,numpy")["plans"]] == [
        ("dlx", 1),
        ("numpy", 1),
    ]


def test_fixes_are_options_of_the_command(file, torch):
    """Fixes on the screen use options of the command; JSON has the options of `dlx.plan`."""
    words = ("plan", file, "--to", "torch", "--copy", "never")
    _, out = here(*words)
    assert "Drop --copy never, or pass --readonly share." in out and "copy=False" not in out
    assert "copy=False" in document(*words)["plans"][0]["arrays"][0]["fix"]


def test_a_long_reason_is_written_once(tmp_path):
    """Other rows refer to the first target with the same reason."""
    path = tmp_path / "x.npy"
    path.write_bytes(npy(">f4", (2, 3), bytes(24)))
    pytest.importorskip("torch")
    rows = [line.split() for line in here("plan", path, "--to", "dlx,torch")[1].splitlines()]
    assert ["dlx", "copied", "24", "B", *["it", "is", "in", "the", "other", "byte", "order"]] in rows
    assert ["torch", "copied", "24", "B", "as", "for", "dlx"] in rows


def test_reasons_are_brief_on_the_screen():
    """The screen omits a framework's list of dtypes; JSON has the full reason."""
    pytest.importorskip("pyarrow")
    _, out = here("plan", "bfloat16[2]", "--to", "pyarrow,dlx")
    assert "pyarrow has no dtype bfloat16. Pass --dtype float32" in out
    (plan, _) = document("plan", "bfloat16[2]", "--to", "pyarrow,dlx")["plans"]
    assert "it has bool, float16, float32" in plan["arrays"][0]["why"]


def test_plans_of_many_arrays_are_folded(tmp_path, torch):
    """Similar arrays are one row; each reason is listed once below the table."""
    tensors = {f"layers.{i}.w": ("BF16", (2, 2)) for i in range(30)} | {"n": ("F4", (2, 2))}
    path = safetensors(tmp_path / "x.safetensors", tensors)
    _, out = here("plan", path, "--to", "torch")
    rows = [line.split() for line in out.splitlines()]
    assert ["layers.#.w", "×30", "bfloat16", "[2,", "2]", "copied", "[1]"] in rows
    assert any(row[:2] == ["n", "float4_e2m1fn"] and row[-2:] == ["refused", "[2]"] for row in rows)
    assert "30 copied (240 B), 1 refused" in out


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def test_dtypes_have_dlpacks_numbers():
    """Every dtype is listed with code, bits and lanes of `DType`, and the adapters' names."""
    found = {each["name"]: each for each in document("dtypes")["dtypes"]}
    assert list(found) == list(DTYPES)
    assert all(tuple(found[name]["dlpack_dtype"]) == tuple(package.DType(name)) for name in DTYPES)
    assert found["bfloat16"]["words"]["numpy"] == "ml_dtypes.bfloat16"
    assert found["float4_e2m1fnx2"]["words"]["torch"] == "float4_e2m1fn_x2"
    assert found["int4"]["itemsize"] == 0.5


def test_words_are_those_that_the_framework_has(np, torch):
    """The adapters' names for dtypes are the frameworks' names."""
    for each in document("dtypes")["dtypes"]:
        for name, framework in (("numpy", np), ("torch", torch)):
            word = each["words"][name]
            if word.startswith("ml_dtypes."):
                framework = pytest.importorskip("ml_dtypes")
            word = word.removeprefix("ml_dtypes.")
            assert not word or hasattr(framework, word) or not hasattr(np, "bool")


def test_live_dtypes_agree_with_conversions(np, torch):
    """Each cell matches the result of convert."""
    cells = document("dtypes", "--from", "torch", "--to", "numpy,dlx")["cells"]
    found = {(each["dtype"], each["to"]): each["outcome"] for each in cells}
    assert found["float32", "numpy"] == "shared"
    assert found["float6_e2m3fn", "numpy"] == ""  # torch lacks the dtype
    for (dtype, goal), outcome in found.items():
        if not outcome:
            continue
        array = array_of("torch", dtype)
        try:
            result = package.convert(array, to=goal)
        except package.errors.DlxError:
            assert outcome == "refused", dtype
        else:
            shared = package.describe(result).address == package.describe(array).address
            assert outcome in (("shared", "viewed") if shared else ("copied",)), dtype


def test_dtypes_as_text():
    """One row per dtype; pairs have reasons, the full table has marks."""
    _, out = here("dtypes")
    assert [line.split()[0] for line in out.splitlines()[1 : len(DTYPES) + 1]] == list(DTYPES)
    _, out = here("dtypes", "--from", "dlx", "--to", "dlx")
    assert out.startswith("dlx → dlx\n") and "float32" in out
    assert "unknown target 'nothing'" in refused("dtypes", "--from", "nothing")


def test_the_matrix_is_what_dtypes_says(np):
    """Both commands have the same cells."""
    asked = ["--from", "numpy", "--to", "dlx,numpy"]
    cells = document("matrix", *asked)["cells"]
    assert cells == document("dtypes", *asked)["cells"]
    assert {(each["dtype"], each["to"]): each["outcome"] for each in cells}["float32", "dlx"] == "shared"
    assert here("matrix", *asked)[1].startswith("from numpy  to …\n")


def test_the_matrix_is_that_of_the_documentation(np):
    """docs/matrix.md was measured by converting and comparing bits; `dlx matrix` plans the same outcomes."""
    render = pytest.importorskip("matrix.render")
    page, versions = render.read_page((Path(__file__).parent.parent.parent / "docs" / "matrix.md").read_text())
    here_too = [each for each in ("numpy", "torch", "tvm_ffi") if _version(each) == versions.get(each)]
    names = ",".join(["dlx", *here_too])
    cells = document("matrix", "--from", names, "--to", names)["cells"]
    assert len(cells) == len(DTYPES) * (1 + len(here_too)) ** 2
    for each in cells:
        written = page.get((f"dtypes out of {each['from']}", each["dtype"], each["to"]))
        assert written in (each["outcome"] or "-", each.get("error"), None), each
    assert any(("dtypes out of dlx", each["dtype"], each["to"]) in page for each in cells)


def _version(name):
    """Return the version of a framework, None if it is not installed."""
    if name not in installed_targets():
        return None
    return version_of(registry.target(name).adapter)


def test_the_matrix_as_a_picture(tmp_path):
    """The picture is a well-formed SVG that loads nothing, drawn like docs/matrix.svg."""
    path = tmp_path / "x.svg"
    status, out = here("matrix", "--from", "dlx", "--to", "dlx", "--svg", path)
    assert (status, out) == (0, f"wrote {path}\n")
    text = path.read_text()
    root = xml.etree.ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "float32" in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    grounds = re.findall(r"^\.ground { fill: (#\w+); } svg { background: (#\w+); }", text, re.MULTILINE)
    assert grounds == [("#ffffff",) * 2, ("#0d1117",) * 2], "around it, too, if it is opened directly"
    docs = (Path(__file__).parent.parent.parent / "docs" / "matrix.svg").read_text()
    assert text.partition("</style>")[0].split("<title>")[1] == docs.partition("</style>")[0].split("<title>")[1]
    assert "x.svg: " in refused("matrix", "--from", "dlx", "--to", "dlx", "--svg", tmp_path / "no" / "x.svg")


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_lists_every_adapter():
    """Each adapter is a line with the framework's version, without importing it."""
    found = {each["name"]: each for each in document("doctor")["adapters"]}
    assert set(BUILT_IN.values()) <= {each["module"] for each in found.values()}
    for name, each in found.items():
        assert each["status"] in ("ready", "installed", "missing", "broken")
        if each["status"] == "missing":
            assert "pip install" in each["cause"]
        elif name in ("numpy", "torch"):
            version = __import__(name).__version__  # torch's version may include CUDA, pip's may not
            assert each["version"] in (version, version.partition("+")[0])


def test_doctor_tries_what_is_named(np):
    """--load imports a framework in a separate process and inspects a capsule."""
    (found,) = document("doctor", "numpy", "--load", "--strict")["adapters"]
    assert (found["status"], found["version"], found["facts"]["type"]) == ("ready", np.__version__, "numpy.ndarray")
    assert found["facts"]["in"] == found["facts"]["out"] == "shared"
    assert "there is no adapter 'nothing'" in refused("doctor", "nothing")


@pytest.fixture
def strangers(monkeypatch):
    """Return a registry with numpy's adapter, one whose import fails, and one whose framework is missing."""
    broken = types.ModuleType("dlx_gone")
    adapter = package.adapter.Adapter()
    adapter.name, adapter.package = "not_to_be_found_anywhere", "not_to_be_found_anywhere.core"
    broken.dlx_adapters = package.hookimpl(specname="dlx_adapters")(lambda: [adapter])
    monkeypatch.setitem(sys.modules, "dlx_gone", broken)
    registry = Registry({"broken": "dlx_that_is_not_there", "not_to_be_found_anywhere": "dlx_gone"})
    monkeypatch.setattr(doctor, "registry", registry)


def test_doctor_shows_what_is_broken(strangers):
    """The cause is one line; --verbose shows the traceback; the status is 1 only with --strict."""
    found = {each["module"]: each for each in document("doctor")["adapters"]}
    assert found["dlx_that_is_not_there"]["status"] == "broken"
    assert "names the module dlx_that_is_not_there, which does not exist" in found["dlx_that_is_not_there"]["cause"]
    assert found["dlx_gone"]["status"] == "missing"
    assert "Traceback" not in here("doctor")[1]
    assert "Traceback" in here("doctor", "--verbose")[1]
    assert here("doctor", "--strict")[0] == 1
    assert here("doctor", "not_to_be_found_anywhere", "--strict")[0] == 1


def test_doctor_tells_missing_packages_without_an_import(strangers, monkeypatch, tmp_path):
    """As in a conversion, a package is missing if it or its parent is; if only an import can tell, it is installed."""
    for folder in ("half/whole", "names/spaced/whole"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "half" / "__init__.py").touch()
    (tmp_path / "half" / "needs.py").write_text("import not_to_be_found_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "half_blocked", None)
    (adapter,) = sys.modules["dlx_gone"].dlx_adapters()
    missing = ["half.gone", "half.gone.core", "names.gone", "names.gone.core", "half_blocked", "half_blocked.core"]
    for name in ["half", "half.whole", "half.needs.core", "names", "names.spaced", "names.spaced.whole", *missing]:
        adapter.package = name
        (found,) = (each for each in document("doctor")["adapters"] if each["module"] == "dlx_gone")
        assert found["status"] == ("missing" if name in missing else "installed"), name
    assert not {"half", "names"} & sys.modules.keys()
    for name in ["half.needs.core", *missing]:
        with pytest.raises(package.errors.FrameworkNotInstalledError) as caught:
            import_framework(name, "gone", "pip install gone")
        assert ("is not installed" in str(caught.value)) == (name in missing), name


def test_doctor_imports_no_framework(python):
    """It imports no parent of a framework either: dask of ``dask.array``."""
    code = """
        import sys
        from dlx._registry.plugin import FRAMEWORKS
        from dlx.cli import main

        assert main(["doctor"]) == 0
        print(sorted(FRAMEWORKS.keys() & sys.modules.keys()))
    """
    assert python(code).splitlines()[-1] == "[]"


@pytest.mark.unsanitized("a deadly signal is caught and reported")
def test_a_framework_that_dies_on_import(strangers, monkeypatch):
    """It crashes in a separate process, and doctor shows the signal."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    real = probe.subprocess.run
    monkeypatch.setattr(probe.subprocess, "run", lambda command, **kw: real([sys.executable, "-c", code], **kw))
    assert probe.ask("framework", "numpy")["broken"] == "it ended the process with SIGSEGV"


def test_the_block_to_paste_names_no_folder():
    """The block has versions and statuses, but no path of this machine."""
    _, out = here("doctor")
    block = out[out.index("for bug reports:") :]
    assert f"dlx {package.__version__}" in block and "/" not in block
    core = document("doctor")["core"]
    assert core["compiler"].split()[0] in ("gcc", "clang") and f"built with {core['compiler']}: " in block
    assert "-std=c11" in core["flags"].split() and not any(each.startswith("-W") for each in core["flags"].split())
    assert max(map(len, out.splitlines())) <= 100


def test_flags_in_a_report_hold_no_path(monkeypatch):
    """Flags have no warnings and nothing that a shell would have to quote."""
    monkeypatch.setenv("CFLAGS", '-O3 -I/usr/x -ffile-prefix-map=/a=b -Wall -march=native -DX="y z"')
    shown = runpy.run_path(str(Path(__file__).parent.parent.parent / "build_ffi.py"))["shown"]
    assert shown(["-std=c11", "-Wextra"]) == "-O3 -march=native -std=c11"


@pytest.mark.parametrize("command", [["inspect"], ["plan", "--to", "dlx"]])
def test_only_and_skip_select_arrays(tmp_path, command):
    """As in `dlx.open`: names and patterns; an unknown one is refused with the nearest name."""
    path = safetensors(tmp_path / "x.safetensors", dict.fromkeys(("a.w", "a.b", "c.w"), ("F32", (4,))))
    kind = "sources" if command == ["inspect"] else "plans"

    def names(*words):
        (found,) = document(*command, path, *words)[kind]
        return [each["path"] for each in found["arrays"]]

    assert names("--only", "a.*") == ["a.w", "a.b"]
    assert names("--only", "*.w", "--skip", "c.w") == ["a.w"]
    assert names("--skip", "a.w", "--skip", "c*") == ["a.b"]
    assert "which 'only' names. Did you mean 'a." in refused(*command, path, "--only", "a.v")


def test_dtype_is_part_of_the_plan(tmp_path):
    """The step and its bytes are those of ``dlx.plan(dtype=)``; a fix names the option of the command."""
    path = safetensors(tmp_path / "x.safetensors", {"w": ("F32", (4,)), "i": ("I64", (2,))})
    (plan,) = document("plan", path, "--to", "dlx", "--dtype", "float64")["plans"]
    assert {each["path"]: each["nbytes"] for each in plan["arrays"] if each["outcome"] == "copied"} == {"w": 32}
    assert "Pass --dtype int64=float32." in here("plan", "int64[3]", "--to", "dlx", "--dtype", "float32")[1]


def test_the_hint_appears_once(tmp_path):
    """Under the last of several sources, and not if targets were named."""
    paths = [safetensors(tmp_path / f"{name}.safetensors", {"w": ("F32", (4,))}) for name in "abc"]
    shown = here("inspect", *paths)[1]
    assert shown.count("--to torch,numpy") == 1 and shown.rstrip().endswith("(imports them)")
    assert "imports them" not in here("inspect", *paths, "--to", "dlx")[1]
