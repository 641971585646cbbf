import os

from setuptools import setup

# DLX_SANITIZE=1 builds all extensions with the address and undefined-behaviour sanitizers; `make` runs them.
if os.environ.get("DLX_SANITIZE") == "1":
    flags = "-fsanitize=address,undefined -fno-omit-frame-pointer -g"
    os.environ["CFLAGS"] = f"{os.environ.get('CFLAGS', '')} {flags}"  # passed to the compiler and to the linker

setup(cffi_modules=["build_ffi.py:ffibuilder"])  # forced: cffi has no pyproject spelling
