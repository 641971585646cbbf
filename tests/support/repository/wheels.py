"""Cross-compile the wheels of dlx for Linux, macOS and Windows with zig: `nox -s wheels`.

    python tests/support repository.wheels [--out FOLDER] [--only PATTERN ...]

A PATTERN is a glob of names such as ``cp313-macosx_11_0_arm64``; this script needs ziglang, cffi, setuptools and lief.
The headers of a Python for a target are, in this order:

1. `TARGET_PYTHONS`/NAME, a folder with the ``Python.h`` and ``pyconfig.h`` of that Python: the target's own;
2. those of a Python of this machine, for manylinux on this machine's processor: the target's own;
3. CPython's source in `CPYTHON_SOURCES`/3.13: its ``Include``; for Windows its own ``PC/pyconfig.h``, for Linux the
   ``pyconfig.h`` that CPython's ``configure`` writes with zig as the compiler;
4. those of manylinux for x86_64, found in one of these ways: a *check*, which compiles and links as the target does,
   and is not a wheel to publish.

Each wheel is inspected: its tag, its names, the format and processor of its extensions, the libraries that they need,
and every symbol that they import.
"""

from __future__ import annotations

import argparse
import base64
import fnmatch
import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock

from support.project import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlx" / "wheels"
SOURCES = Path(os.environ.get("CPYTHON_SOURCES") or CACHE / "cpython")
GIVEN = os.environ.get("TARGET_PYTHONS")
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
SYMBOLS = Path(__file__).with_name("symbols.toml")
FINDING = Lock()


@dataclass(frozen=True)
class Target:
    """A platform: its wheel tag, zig's name for it, and what its extensions look like."""

    tag: str
    zig: str
    suffix: str  # of extensions; {v} is a version such as 311
    host: str = ""  # CPython's name for configure; empty: it cannot be configured here

    @property
    def system(self) -> str:
        """Return `sys.platform` of the target."""
        return "win32" if "windows" in self.zig else "darwin" if "macos" in self.zig else "linux"

    @property
    def processor(self) -> str:
        """Return the processor, as zig calls it."""
        return self.zig.partition("-")[0]


TARGETS = (
    Target("manylinux_2_17_x86_64", "x86_64-linux-gnu.2.17", ".cpython-{v}-x86_64-linux-gnu.so", "x86_64-linux-gnu"),
    Target(
        "manylinux_2_17_aarch64", "aarch64-linux-gnu.2.17", ".cpython-{v}-aarch64-linux-gnu.so", "aarch64-linux-gnu"
    ),
    Target("musllinux_1_2_x86_64", "x86_64-linux-musl", ".cpython-{v}-x86_64-linux-musl.so", "x86_64-linux-musl"),
    Target("musllinux_1_2_aarch64", "aarch64-linux-musl", ".cpython-{v}-aarch64-linux-musl.so", "aarch64-linux-musl"),
    Target("macosx_11_0_arm64", "aarch64-macos.11.0", ".cpython-{v}-darwin.so"),
    Target("macosx_11_0_x86_64", "x86_64-macos.11.0", ".cpython-{v}-darwin.so"),
    Target("win_amd64", "x86_64-windows-gnu", ".cp{v}-win_amd64.pyd"),
)


class Failed(Exception):
    """A build or an inspection failed; its text is for the user."""


def run(*command: object, **options: object) -> str:
    """Run a command; return its output, or raise `Failed` with it, also for a compiler's warning."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode or ("cc" in words and "warning:" in done.stderr):
        raise Failed(f"{' '.join(words[:6])} ...: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    return str(done.stdout)


@dataclass(frozen=True)
class Headers:
    """The folder with the headers of one Python for one target, and where its pyconfig.h is from."""

    folder: Path
    origin: str  # "own", "configured" or "check"
    missing: str = ""  # the files that a real build needs


@dataclass(frozen=True)
class Build:
    """One wheel: a Python for a target."""

    python: str
    target: Target

    @property
    def digits(self) -> str:
        """Return the version as in file names: 311."""
        return self.python.replace(".", "")

    @property
    def name(self) -> str:
        """Return the name that patterns are compared with: cp311-win_amd64."""
        return f"cp{self.digits}-{self.target.tag}"

    @cached_property
    def headers(self) -> Headers:
        """Find the headers."""
        needed = f"Python.h and pyconfig.h of {self.name} in {GIVEN or '$TARGET_PYTHONS'}/{self.name}"
        found = self._find()
        like = found or Build(self.python, TARGETS[0])._find()
        if like is None:
            raise Failed(f"{self.name}: there are no headers of Python {self.python} here. Provide {needed}.")
        include, config, origin = like
        if not found and self.target.system == "win32":  # another version's is nearer than Linux' is
            others = [Build(each, self.target)._find() for each in PYTHONS]
            config = next((each[1] for each in reversed(others) if each), config)
        if config.parent != include or not found:
            folder = CACHE / "headers" / self.name
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(include, folder)
            shutil.copyfile(config, folder / "pyconfig.h")
            include = folder
        return Headers(include, origin) if found else Headers(include, "check", needed)

    def _find(self) -> tuple[Path, Path, str] | None:
        """Find the folder of headers, the target's pyconfig.h, and where that is from."""
        if GIVEN and Path(GIVEN, self.name, "Python.h").exists():
            return Path(GIVEN, self.name), Path(GIVEN, self.name, "pyconfig.h"), "own"
        here = include_of(self.python)
        is_own = self.target.tag.startswith("manylinux") and self.target.processor == platform.machine()
        if here and is_own and platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
            return here, here / "pyconfig.h", "own"
        source = SOURCES / self.python
        if self.target.system == "win32":  # the same file for every build of a version
            for config in source.glob("PC/pyconfig.h*"):
                return source / "Include", config, "own"
        elif self.target.host and (source / "configure").exists():
            return source / "Include", self._configure(source), "configured"
        return None

    def _configure(self, source: Path) -> Path:
        """Let CPython's configure write pyconfig.h, with zig as its cross compiler; minutes, once."""
        folder = CACHE / "configured" / self.name
        made = folder / "pyconfig.h"
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            print(f"note: configuring CPython {self.python} for {self.target.tag}, a few minutes", flush=True)
            build = run(
                sys.executable, "-c", "import sysconfig; print(sysconfig.get_config_var('BUILD_GNU_TYPE'))"
            ).strip()
            # It asks this machine's Python for its version alone, since nothing is built.
            python = folder / "python"
            python.write_text(f"#!/bin/sh\necho {self.python}\n", encoding="utf-8")
            python.chmod(0o755)
            # The results of one version hold for the others: they are about the C library and the compiler.
            environment = {
                **os.environ, "CC": f"{sys.executable} -m ziglang cc -target {self.target.zig}",
                "AR": f"{sys.executable} -m ziglang ar", "READELF": shutil.which("readelf") or "readelf",
                "ac_cv_file__dev_ptmx": "yes", "ac_cv_file__dev_ptc": "no", "ac_cv_buggy_getaddrinfo": "no",
            }  # fmt: skip
            # It refuses a cache of another compiler, so this environment has its own.
            cache = f"--cache-file={sys.prefix}/{self.target.tag}.cache"
            command = [source / "configure", cache, f"--host={self.target.host}", f"--build={build}"]
            log = folder / "configure.log"
            with log.open("w") as file:
                words = [*map(str, command), f"--with-build-python={python}", "--without-ensurepip"]
                done = subprocess.run(words, cwd=folder, env=environment, stdout=file, stderr=file, check=False)
            if done.returncode or not made.exists():
                raise Failed(f"{self.name}: CPython's configure failed, see {log}")
        return made


def ask_python(version: str, code: str) -> str:
    """Return what an expression of this machine's Python with a version prints, or "": pyenv's shims may fail."""
    for name in (f"python{version}", *sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python{version}"))):
        try:
            return run(name, "-c", f"import sys, sysconfig; print({code})").strip()
        except (OSError, Failed):
            continue
    return ""


def include_of(version: str) -> Path | None:
    """Return the folder of the headers of this machine's Python with a version."""
    found = Path(ask_python(version, "sysconfig.get_path('include')") or "none")
    return found if (found / "Python.h").exists() and (found / "pyconfig.h").exists() else None


# ---- extensions ------------------------------------------------------------------------------------------------------


def compile_all(build: Build, folder: Path, generated: Path) -> list[Path]:
    """Compile and link the extensions of one wheel; a warning is an error."""
    recipe = runpy.run_path(str(ROOT / "build_ffi.py"))
    system, target = build.target.system, build.target
    style = "darwin" if system == "win32" else system  # zig takes gcc's flags for Windows, too
    core = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "c_src").rglob("*.c"))
    flags = recipe["core_flags"](style)
    text = f'-DDLX_COMPILE_FLAGS="{recipe["shown"](flags)}"'
    wanted = {"dlx._ffi": ([str(generated), *core], [*flags, text, "-DPyInit__ffi=dlx_cffi_module"])}
    for name in recipe["ADAPTERS"]:
        wanted[name] = (recipe["adapter_options"](name)["sources"], recipe["compile_flags"](style))
    link = {"linux": ["-ldl", "-lpthread"], "darwin": ["-Wl,-undefined,dynamic_lookup"], "win32": []}[system]
    link = [word for word in link if "musl" not in target.zig or not word.startswith("-l")]
    macros = ["-DMS_WIN64"] if system == "win32" else ["-fPIC"]
    made = []
    for name, (sources, options) in wanted.items():
        path = folder / f"{name.replace('.', '/')}{target.suffix.format(v=build.digits)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        libraries = [import_library(build, folder)] if system == "win32" else []
        if system == "darwin":
            libraries = [f"-Wl,-install_name,@rpath/{path.name}"]
        run(
            sys.executable, "-m", "ziglang", "cc", "-target", target.zig, "-shared", "-s", *options, *macros,
            "-DNDEBUG", "-Ic_src", "-Ic_src/include", "-isystem", build.headers.folder, *sources, *link, *libraries,
            "-o", path, cwd=ROOT,
        )  # fmt: skip
        for extra in path.parent.glob("*.lib"):  # an import library of the extension, which nobody links with
            extra.unlink()
        made.append(path)
    return made


def import_library(build: Build, folder: Path) -> Path:
    """Make the import library of python311.dll from the names that its headers declare."""
    path = folder.with_name(f"{build.name}-python.lib")
    if not path.exists():
        declared, data = python_names(build.headers.folder)
        lines = [f"{name} DATA" if name in data else name for name in sorted(declared)]
        definition = path.with_suffix(".def")
        definition.write_text(f"LIBRARY python{build.digits}.dll\nEXPORTS\n" + "\n".join(lines), encoding="ascii")
        run(sys.executable, "-m", "ziglang", "dlltool", "-m", "i386:x86-64", "-d", definition, "-l", path)
    return path


def python_names(include: Path) -> tuple[set[str], set[str]]:
    """Return the functions and data that CPython's headers declare as exported, and the data among them."""
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in include.rglob("*.h"))
    functions = set(re.findall(r"PyAPI_FUNC\([^)]*\)\s*(\w+)", text))
    data = set(re.findall(r"PyAPI_DATA\([^)]*\)\s*\*?\s*(\w+)", text))
    sized = {f"_{name}_SizeT" for name in functions}  # with PY_SSIZE_T_CLEAN
    return functions | data | sized, data


# ---- inspection ------------------------------------------------------------------------------------------------------


def allowed_symbols(build: Build) -> set[str]:
    """Return the names that extensions may import: CPython's, and those of symbols.toml for the system."""
    import tomllib

    table = tomllib.loads(SYMBOLS.read_text(encoding="utf-8"))
    system = build.target.system
    names = {*table["every system"], *table[system].get("names", ())}
    if system == "linux":
        names |= {*table["musl" if "musl" in build.target.zig else "glibc"]["names"]}
    return names | python_names(build.headers.folder)[0]


def inspect(build: Build, path: Path) -> int:
    """Check one extension; return the number of symbols that it imports."""
    import lief

    lief.logging.disable()  # it warns of each Mach-O
    target = build.target
    binary = lief.parse(str(path))
    kind = {"linux": lief.ELF.Binary, "darwin": lief.MachO.Binary, "win32": lief.PE.Binary}[target.system]
    if not isinstance(binary, kind):
        raise Failed(f"{path.name}: it is no {kind.__name__} of {target.system}")
    table = __import__("tomllib").loads(SYMBOLS.read_text(encoding="utf-8"))[target.system]
    if target.system == "win32":
        libraries = {each.name.lower() for each in binary.imports}
        symbols = {entry.name for each in binary.imports for entry in each.entries}
        exported = {each.name for each in binary.get_export().entries}
        processor = str(binary.header.machine).rpartition(".")[2]
    else:
        # Without the name of the library itself, which Mach-O lists, too.
        libraries = {str(getattr(each, "name", each)) for each in binary.libraries} - {f"@rpath/{path.name}"}
        symbols = {each.name for each in binary.imported_symbols if each.name}
        exported = {each.name for each in binary.exported_symbols}
        header = binary.header
        processor = str(getattr(header, "machine_type", None) or header.cpu_type).rpartition(".")[2]
    if target.system == "darwin":
        symbols, exported = ({name.removeprefix("_") for name in names} for names in (symbols, exported))
    if processor.upper() not in {"x86_64": ("X86_64", "AMD64"), "aarch64": ("AARCH64", "ARM64")}[target.processor]:
        raise Failed(f"{path.name}: it is for {processor}, not for {target.processor}")
    entry = f"PyInit_{path.name.partition('.')[0]}"
    if entry not in exported:
        raise Failed(f"{path.name}: it does not export {entry}")
    own = [re.compile(pattern) for pattern in table["libraries"]] + [re.compile(rf"python{build.digits}\.dll")]
    foreign = [name for name in libraries if not any(pattern.fullmatch(name) for pattern in own)]
    unknown = symbols - allowed_symbols(build)
    if foreign or unknown:
        raise Failed(f"{path.name}: it needs {sorted(foreign)} and imports {sorted(unknown)}, see {SYMBOLS.name}")
    check_versions(binary, target, path)
    return len(symbols)


def check_versions(binary: object, target: Target, path: Path) -> None:
    """Check that no symbol is newer than the C library, or the system than the one that the tag names."""
    if "gnu." in target.zig and target.system == "linux":
        oldest = tuple(map(int, target.zig.partition("gnu.")[2].split(".")))
        for each in binary.symbols_version_requirement:  # type: ignore[attr-defined]
            for auxiliary in each.get_auxiliary_symbols():
                found = re.fullmatch(r"GLIBC_([\d.]+)", auxiliary.name)
                if found is None or tuple(map(int, found[1].split("."))) > oldest:
                    raise Failed(f"{path.name}: it needs {auxiliary.name}")
    if target.system == "darwin":
        minimum = binary.build_version.minos  # type: ignore[attr-defined]
        wanted = [int(word) for word in target.tag.split("_")[1:3]]
        if list(minimum)[:2] > wanted:
            raise Failed(f"{path.name}: it needs macOS {minimum}")


# ---- wheels ----------------------------------------------------------------------------------------------------------


def build_pure(folder: Path) -> Path:
    """Build what all wheels share: the modules, and the folder of metadata."""
    lib = folder / "lib"
    setup = [sys.executable, "-W", "ignore", "setup.py", "-q"]
    run(*setup, "build_py", "--build-lib", lib, cwd=ROOT)
    run(*setup, "dist_info", "--output-dir", folder, cwd=ROOT)
    (info,) = folder.glob("*.dist-info")
    shutil.move(info, lib / info.name)
    return lib


def write_wheel(build: Build, pure: Path, folder: Path, out: Path) -> Path:
    """Write a wheel of the modules, the extensions and the metadata; the same input gives the same bytes."""
    (info,) = pure.glob("*.dist-info")
    tag = build.target.tag
    tag += {"manylinux_2_17_x86_64": ".manylinux2014_x86_64", "manylinux_2_17_aarch64": ".manylinux2014_aarch64"}.get(
        tag, ""
    )
    python = f"cp{build.digits}-cp{build.digits}"
    tags = "".join(f"Tag: {python}-{each}\n" for each in tag.split("."))
    files = {}
    for root in (pure, folder):
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files[path.relative_to(root).as_posix()] = path.read_bytes()
    text = f"Wheel-Version: 1.0\nGenerator: dlx\nRoot-Is-Purelib: false\n{tags}\n"
    files[f"{info.name}/WHEEL"] = text.encode()
    rows = []
    for name, data in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    files[f"{info.name}/RECORD"] = ("".join(rows) + f"{info.name}/RECORD,,\n").encode()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{info.name.removesuffix('.dist-info')}-{python}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name)  # a fixed date, 1980
            member.external_attr = 0o100644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data)
    return path


def check_contents(path: Path) -> None:
    """Check the top-level names of a wheel, and that it has no sources and no paths of this machine."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        top = {name.partition("/")[0] for name in names}
        if {name for name in top if not name.endswith(".dist-info")} != {"dlx", "dlx_adapters"}:
            raise Failed(f"{path.name}: it adds {sorted(top)}")
        for name in names:
            if name.endswith((".c", ".o", ".a", ".lib", ".pdb")):
                raise Failed(f"{path.name}: it has {name}")
            if str(ROOT).encode() in archive.read(name):
                raise Failed(f"{path.name}: {name} contains the path of this checkout")


def make(build: Build, pure: Path, folder: Path, generated: Path, out: Path) -> str:
    """Build and inspect one wheel; return a line about it."""
    with FINDING:  # two builds may need the same ones
        headers = build.headers
    made = compile_all(build, folder / build.name, generated)
    imported = sum(inspect(build, path) for path in made)
    is_check = headers.origin == "check"
    path = write_wheel(build, pure, folder / build.name, out / "checks" if is_check else out)
    check_contents(path)
    kind = {"own": "the target's own headers", "configured": "pyconfig.h by CPython's configure"}.get(headers.origin)
    note = kind or f"CHECK ONLY, not to be published; a wheel needs {headers.missing}"
    return (
        f"{build.name:<28} {len(made)} extensions, {imported} imported symbols, {path.stat().st_size:,} bytes: {note}"
    )


def check_cibuildwheel() -> int:
    """Check that [tool.cibuildwheel] of pyproject.toml covers the same matrix; return its number of wheels."""
    systems = {"linux": ("linux", ""), "darwin": ("macos", "macosx_"), "win32": ("windows", "win_")}
    found: set[str] = set()
    wanted: set[str] = set()
    for target in TARGETS:
        name, prefix = systems[target.system]
        processor = target.tag.rpartition("_")[2] if target.system != "linux" else target.processor
        processor = {"64": "x86_64"}.get(processor, processor)
        asked = "AMD64" if target.system == "win32" else processor
        command = ["-m", "cibuildwheel", "--print-build-identifiers", "--platform", name, "--archs", asked]
        found |= {*run(sys.executable, *command, cwd=ROOT).split()}
        ending = prefix or f"{target.tag.partition('_')[0]}_"
        wanted |= {
            f"cp{each.replace('.', '')}-{ending}{'amd64' if name == 'windows' else processor}" for each in PYTHONS
        }
    if wanted - found:
        raise Failed(f"cibuildwheel's configuration lacks {sorted(wanted - found)}")
    return len(found)


def main(arguments: list[str]) -> int:
    """Build the wheels; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="repository.wheels")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", nargs="*", default=["*"], help="globs of names, such as cp313-macosx*")
    options = parser.parse_args(arguments)
    builds = [Build(version, target) for target in TARGETS for version in PYTHONS]
    builds = [each for each in builds if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in options.only)]
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(CACHE / "zig"))
    os.environ.setdefault("ZIG_LOCAL_CACHE_DIR", str(CACHE / "zig"))
    failed = 0
    print(f"cibuildwheel's configuration covers this matrix: {check_cibuildwheel()} wheels")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = Path.cwd()
        os.chdir(ROOT)
        recipe = runpy.run_path(str(ROOT / "build_ffi.py"), run_name="recipe")
        generated = (folder / "_ffi").with_suffix(".c")
        recipe["ffibuilder"].emit_c_code(str(generated))
        os.chdir(before)
        pure = build_pure(folder / "pure")

        def attempt(build: Build) -> str | Failed:
            try:
                return make(build, pure, folder, generated, options.out)
            except Failed as error:
                return error

        with ThreadPoolExecutor(int(os.environ.get("JOBS", "1"))) as pool:
            for build, result in zip(builds, pool.map(attempt, builds), strict=True):
                print(result if isinstance(result, str) else f"{build.name:<28} FAILED: {result}", flush=True)
                failed += not isinstance(result, str)
    print(f"{len(builds)} wheels, {failed} failed")
    return 1 if failed or not builds else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
