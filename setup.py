import os
import shutil
import sys
import sysconfig
from pathlib import Path

# Checked first: errors of setuptools and cffi have forty lines.
compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
if not shutil.which(compiler):
    sys.exit(f"dlx needs a C compiler, and {compiler} is not installed: install gcc or clang, or name yours in CC.")
if not Path(sysconfig.get_path("include"), "Python.h").exists():
    sys.exit(
        f"dlx needs the C headers of this Python ({sys.executable}), and there is no Python.h: install python3-dev."
    )

from setuptools import setup  # noqa: E402

# DLX_SANITIZE=1 builds all extensions with the address and undefined-behaviour sanitizers; `make` runs them.
if os.environ.get("DLX_SANITIZE") == "1":
    flags = "-fsanitize=address,undefined -fno-omit-frame-pointer -g"
    os.environ["CFLAGS"] = f"{os.environ.get('CFLAGS', '')} {flags}"  # passed to the compiler and to the linker

# The project's address, such as https://host/owner/dlx. Each fork has another one, so no file contains it.
url = os.environ.get("DLX_PROJECT_URL")
urls = {"Source": url, "Issues": f"{url}/issues", "Changelog": f"{url}/blob/main/CHANGELOG.md"} if url else {}

setup(project_urls=urls, cffi_modules=["build_ffi.py:ffibuilder"])  # forced: cffi has no pyproject spelling
