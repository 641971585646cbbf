from setuptools import setup

setup(cffi_modules=["build_ffi.py:ffibuilder"])  # forced: cffi has no pyproject spelling
