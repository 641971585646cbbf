"""Packages: the sdist is built from the sources, the wheel from the sdist, and the wheel works without both.

Everything is built without network: it uses the build tools and dependencies of this environment.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from support.project import FREE_THREADED, ROOT, SUPPORT
from support.repository.builds import run
from support.repository.pages import PAGES

import dlx
from dlx._support import installation

packaging = pytest.importorskip("packaging.requirements")

FRAMEWORKS = (
    *("numpy", "torch", "cupy", "jax", "tvm-ffi", "pyarrow"),
    *("tensorflow", "paddle", "mlx", "warp", "onnxruntime", "xarray", "pandas", "dask", "ray"),
)
TABLES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, GROUPS = TABLES["project"], TABLES["dependency-groups"]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """Return the Python of a new environment with the wheel, whose dependencies are linked from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    needed = [packaging.Requirement(each).name for each in PROJECT["dependencies"]]
    for name in [*needed, "pycparser", "markdown-it-py", "mdurl", "pygments", "numpy", "setuptools", "pip"]:
        link(name, packages)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], folder)
    return folder / "bin" / "python"


def link(name, packages):
    """Link an installed distribution into another environment, if it is there."""
    try:
        files = importlib.metadata.distribution(name).files
    except importlib.metadata.PackageNotFoundError:
        return
    for top in {file.parts[0] for file in files if file.parts[0] != ".."}:
        source = Path(files[0].locate()).parents[len(files[0].parts) - 1] / top
        if source.exists() and not (packages / top).exists():
            (packages / top).symlink_to(source)


def test_the_sdist_has_what_a_checkout_has(sdist):
    """Sources, tests, pages and recipes; nothing that was built."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("c_src", "dlx", "dlx_adapters", "tests", "docs", "examples", "benchmarks")
    expected = {path.relative_to(ROOT) for path in ROOT.glob("*.*") if path.is_file() and path.name[0] != "."}
    for folder in folders:
        expected |= {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
    built = re.compile(r"\.so$|\.o$|\.pyc$|\.egg-info|^dlx/_ffi\.c$")
    expected = {str(path) for path in expected if not built.search(str(path))}
    assert expected - names == set()
    assert not [name for name in names if re.search(r"\.so$|\.o$|\.pyc$|^dlx/_ffi\.c$|^build/|^dist/|^\.", name)]


def test_the_wheel_has_what_users_need_and_nothing_else(wheel):
    """Modules, stubs, headers, three extensions, the licence; no sources in C, no objects, tests or pages."""
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    info = {name for name in names if ".dist-info/" in name}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "dlx").rglob("*.py*") if path.suffix != ".pyc"}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "dlx" / "cli" / "templates").iterdir()}
    expected |= {f"dlx/include/{name}" for name in ("dlpack_abi.h", "dlx.h", "dlx_cuda.h")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "dlx_adapters").glob("*.py*")}
    expected |= {
        f"dlx/_ffi{SUFFIX}",
        f"dlx_adapters/_dlx_numpy{SUFFIX}",
        f"dlx_adapters/_dlx_torch{SUFFIX}",
        f"dlx_adapters/_dlx_tvm_ffi{SUFFIX}",
        "dlx/py.typed",
    }
    assert names - info == expected
    assert {name.partition("/")[0] for name in names - info} == {"dlx", "dlx_adapters"}  # all that site-packages gets
    found = {name.partition("/")[2] for name in info}
    assert found == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    assert "Requires-Python: >=3.11" in metadata
    assert "# dlx" in metadata  # the README


@pytest.fixture(scope="session")
def the_other(tmp_path_factory):
    """Return a wheel of another project with the distribution and package `dlx`."""
    path = tmp_path_factory.mktemp("other") / "dlx-1.0.4-py3-none-any.whl"
    files = {
        "dlx/__init__.py": "class DLX:\n    pass\n",
        "dlx-1.0.4.dist-info/METADATA": "Metadata-Version: 2.1\nName: dlx\nVersion: 1.0.4\n",
        "dlx-1.0.4.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "dlx-1.0.4.dist-info/RECORD"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, record: "".join(f"{name},,\n" for name in [*files, record])}.items():
            archive.writestr(name, text)
    return path


def doctor(python, folder, *words):
    """Run the installed command; return what it printed."""
    command = [str(python.parent / "dlx"), "doctor", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=250)
    return " ".join(done.stdout.split()), done


ORDERS = {
    "ours, other": "is installed, too",
    "other, ours": "is installed, too",
    "ours, other, ours": "is installed, too",
    "ours, other, -other": "dlx/__init__.py of dlxarray is missing",
    "other, ours, -other": "dlx/__init__.py of dlxarray is missing",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("order", ORDERS)
def test_the_other_project_is_noticed_and_the_command_repairs_it(installed, wheel, the_other, tmp_path, order):
    """In every order, and after `pip uninstall dlx`, doctor's first lines have the command, which works as it is."""
    pip = [installed, "-m", "pip"]
    options = ["install", "--quiet", "--no-compile", "--no-index", "--no-deps", "--force-reinstall"]
    run([*pip, "uninstall", "--yes", "dlxarray", "dlx"], tmp_path)
    for step in order.split(", "):
        if step == "-other":
            run([*pip, "uninstall", "--yes", "dlx"], tmp_path)
        else:
            run([*pip, *options, wheel if step == "ours" else the_other], tmp_path)
    said, done = doctor(installed, tmp_path, "--strict")
    assert done.returncode == 1, done.stderr
    assert ORDERS[order] in said.partition("Run:")[0], said
    used = "import dlx\ntry: dlx.{}\nexcept AttributeError as error: print(error)"
    if order.endswith("ours"):  # otherwise no file of dlx runs, so only the command can tell
        assert run([installed, "-c", used.format("convert")], tmp_path) == ""
        assert said.partition(" name ")[0] in run([installed, "-c", used.format("DLX")], tmp_path)
    else:
        assert "no attribute 'convert'" in run([installed, "-c", used.format("convert")], tmp_path)
    command = done.stdout.splitlines()[1]
    assert command == " && ".join(each for each in command.split(" && ") if each.startswith(f"{installed} -m pip "))
    run(["sh", "-c", command], tmp_path, PIP_NO_INDEX="1", PATH="/usr/bin:/bin")
    assert "Run:" not in doctor(installed, tmp_path)[0]
    assert run([installed, "-c", "import dlx; print(dlx.plan(b'a', to='dlx').outcome)"], tmp_path) == "shared\n"


def test_the_command_is_of_uv_where_the_environment_has_no_pip(monkeypatch):
    """An environment that uv made has no pip."""
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    monkeypatch.setattr(installation.shutil, "which", lambda name: f"/bin/{name}")
    assert installation._pip("install") == f"uv pip install --python {sys.executable}"


def test_one_wheel_per_python_version(wheel):
    """It is for this Python and platform only, not abi3 and not pure."""
    version = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    abi = version + ("t" if FREE_THREADED else "")
    assert re.fullmatch(rf"dlxarray-[^-]+-{version}-{abi}-linux_\w+\.whl", wheel.name)


def test_the_wheel_works_without_sources_and_compiler(installed, tmp_path):
    """tests/support/repository/smoke.py runs in an empty folder, with only its environment on the path."""
    shutil.copy(SUPPORT / "repository" / "smoke.py", tmp_path)
    printed = run([str(installed), "smoke.py"], tmp_path, PATH=str(installed.parent))
    assert printed.startswith("dlx ")
    assert "works as installed" in printed


def test_type_checkers_read_the_installed_package(installed, tmp_path):
    """A user's mypy reads the types of the wheel, and finds no error in the wheel."""
    pytest.importorskip("mypy")
    (tmp_path / "mine.py").write_text(
        "import dlx\nreveal_type(dlx.convert(b'abc', to='dlx'))\ndlx.convert(b'abc', to='dlx', copy='yes')\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed), "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    lines = [line for line in done.stdout.splitlines() if "note:  " not in line and "Possible overload" not in line]
    assert lines[0] == 'mine.py:2: note: Revealed type is "dlx._core.native.Tensor"'
    assert lines[1].startswith('mine.py:3: error: Argument "copy" to "__call__" of "Convert"')
    assert lines[2:] == ["Found 1 error in 1 file (checked 1 source file)"]


def test_nobody_is_led_to_the_other_dlx():
    """On PyPI that name is another project: commands and requirements name dlxarray, or a file."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for before, after in re.findall(r"(.{0,20})pip3? install (?:-\S+ )*\"?dlx(?![\w./-])(.{0,20})", text):
            assert before.lower().endswith("do not `") or "brings Dancing" in after, f"{page}: {before}... dlx{after}"
        assert not re.findall(r"[\"`]dlx(?:\[[\w,-]+\])?[<>=][^\"`]*[\"`]", text), page
    example = tomllib.loads((ROOT / "examples" / "dlx-example" / "pyproject.toml").read_text(encoding="utf-8"))
    found = [packaging.Requirement(each) for each in example["project"]["dependencies"]]
    found += [each for each in map(packaging.Requirement, example["build-system"]["requires"]) if "dlx" in each.name]
    assert [each.name for each in found] == [PROJECT["name"]] * 2
    assert all(each.specifier.contains(dlx.__version__, prereleases=True) for each in found)


def test_the_address_of_the_project_is_one_variable(tmp_path):
    """The metadata link to DLX_PROJECT_URL if it is set, and have no link otherwise."""
    for url, links in (("https://example.org/them/dlx", 3), ("", 0)):
        out = tmp_path / str(links)
        out.mkdir()
        code = f"from setuptools.build_meta import *; prepare_metadata_for_build_wheel({str(out)!r})"
        run([sys.executable, "-c", code], ROOT, DLX_PROJECT_URL=url)
        (metadata,) = out.glob("*/METADATA")
        shown = re.findall("^Project-URL: .*", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(shown) == links and all(f", {url}" in each for each in shown)


def test_citations_say_what_the_metadata_say():
    """CITATION.cff has the metadata's authors and licence, but no version: users cite the version that they used."""
    cited = pytest.importorskip("yaml").safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["cff-version"], cited["type"], cited["title"]) == ("1.2.0", "software", dlx.__name__)
    assert {"message", "authors"} <= {*cited} and not {"version", "url", "repository-code"} & {*cited}
    names = {"abstract": "description", "authors": "authors", "license": "license", "keywords": "keywords"}
    assert {name: cited[name] for name in names} == {name: PROJECT[ours] for name, ours in names.items()}


def pins():
    """Give name -> version of constraints.txt, for this Python."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [packaging.Requirement(line) for line in lines if line and line[0] != "#"]
    return {canonical(each.name): next(iter(each.specifier)).version for each in found if holds(each)}


def holds(requirement):
    """Tell whether a requirement is one for this Python."""
    return requirement.marker is None or requirement.marker.evaluate()


def canonical(name):
    """Give a distribution's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_extra_is_there():
    """`all` is every framework that tests run side by side; what only developers need is no extra, but a group."""
    extras = PROJECT["optional-dependencies"]
    assert {*extras} == {*FRAMEWORKS, "all", "completion"}
    (everything,) = [packaging.Requirement(each) for each in extras["all"] if each.startswith("dlx")]
    assert everything.extras == {"numpy", "torch", "jax", "tvm-ffi", "pyarrow"}
    assert [each["include-group"] for each in GROUPS["dev"] if isinstance(each, dict)] == [
        "test",
        "lint",
        "docs",
        "dist",
    ]
    assert not {*GROUPS} & {*extras}


def test_every_requirement_is_pinned_by_a_version_that_it_allows():
    """constraints.txt names each package of an extra or group, except for cupy, which is never installed here."""
    pinned = pins()
    tables = [*PROJECT["optional-dependencies"].values(), *GROUPS.values()]
    asked = [*PROJECT["dependencies"], *(each for table in tables for each in table if isinstance(each, str))]
    for each in map(packaging.Requirement, asked):
        if each.name not in ("dlxarray", "cupy-cuda12x") and holds(each):
            assert each.specifier.contains(pinned[canonical(each.name)]), each


def test_extras_ask_for_the_oldest_versions_that_adapters_serve():
    """An extra's lower bound is a version, not a wish: each framework has one."""
    for name in FRAMEWORKS:
        (each,) = PROJECT["optional-dependencies"][name]
        assert [bound.operator for bound in packaging.Requirement(each).specifier] == [">="]


def test_the_page_on_installing_lists_the_extras_as_they_are():
    """Each extra for users has a row in docs/install.md with its required version; other extras have no row."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page, re.MULTILINE))
    others = {"all", "completion"}
    assert {*rows} == {*FRAMEWORKS, *others}
    for name in {*rows} - others:
        (each,) = PROJECT["optional-dependencies"][name]
        (bound,) = packaging.Requirement(each).specifier
        assert f" {bound.version} or later" in rows[name]
