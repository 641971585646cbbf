import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Checked first, in one line each: errors of setuptools and cffi have forty.
if sys.implementation.name != "cpython" or sys.version_info < (3, 11):
    found = "{} {}.{}".format(sys.implementation.name, *sys.version_info[:2])
    sys.exit(f"dlx needs CPython 3.11 or later, and this is {found}: run a later CPython.")
if sys.platform not in ("linux", "darwin", "win32") or sys.maxsize < 2**32:
    bits = 64 if sys.maxsize > 2**32 else 32
    sys.exit(
        f"dlx supports 64-bit Linux, macOS and Windows, and this is {sys.platform} with {bits} bits: use one of them."
    )
compiler = "clang-cl" if sys.platform == "win32" else sysconfig.get_config_var("CC") or "cc"
compiler = (os.environ.get("CC") or compiler).split()[0]
if not shutil.which(compiler):
    fix = "install LLVM" if sys.platform == "win32" else "install gcc or clang, or name yours in CC"
    sys.exit(f"dlx needs a C compiler, and {compiler} is not installed: {fix}.")
if not Path(sysconfig.get_path("include"), "Python.h").exists():
    sys.exit(
        f"dlx needs the C headers of this Python ({sys.executable}), and there is no Python.h: install python3-dev."
    )

import runpy  # noqa: E402

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402


class BuildExtension(build_ext):
    """Compile files on all cores, on Windows with clang-cl: MSVC lacks parts of C11 and of GNU C that dlx uses."""

    def build_extensions(self) -> None:
        if self.compiler.compiler_type == "msvc":
            self.compiler.initialize()
            self.compiler.cc = shutil.which(compiler)
        compile_files = self.compiler.compile
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.compiler.compile = lambda sources, **options: [
                name for (name,) in pool.map(lambda each: compile_files([each], **options), sources)
            ]
            super().build_extensions()


# DLX_SANITIZE=1 builds all extensions with the address and undefined-behaviour sanitizers; `make` runs them.
if os.environ.get("DLX_SANITIZE") == "1":
    flags = "-fsanitize=address,undefined -fno-omit-frame-pointer -g"
    os.environ["CFLAGS"] = f"{os.environ.get('CFLAGS', '')} {flags}"  # passed to the compiler and to the linker

# The project's address, such as https://host/owner/dlx. Each fork has another one, so no file contains it.
url = os.environ.get("DLX_PROJECT_URL")
urls = {"Source": url, "Issues": f"{url}/issues", "Changelog": f"{url}/blob/main/CHANGELOG.md"} if url else {}

recipe = runpy.run_path(str(Path(__file__).with_name("build_ffi.py")))
setup(
    project_urls=urls,
    cffi_modules=["build_ffi.py:ffibuilder"],  # cffi has no pyproject spelling
    ext_modules=[Extension(name, **recipe["adapter_options"](name)) for name in recipe["ADAPTERS"]],
    cmdclass={"build_ext": BuildExtension},
)
