from setuptools import Extension, setup

import dlx

setup(
    ext_modules=[
        Extension(
            "examplearray._core",
            ["src/examplearray/_core.c"],
            include_dirs=[dlx.get_include()],
            extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        )
    ]
)
