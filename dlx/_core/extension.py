"""The compiled extension: cffi's `ffi` and `lib`. No other module imports `dlx._ffi`.

`lib` contains the C functions that use no Python objects, and the headers' constants. `dlx._core.native` contains the
builtins that use Python objects.
"""

import sys
from pathlib import Path

try:
    from dlx._ffi import ffi, lib
except ModuleNotFoundError as error:
    if error.name != "dlx._ffi":
        raise
    version = "Python {}.{}".format(*sys.version_info)
    source = Path(__file__).parents[2]
    if (source / "build_ffi.py").exists():
        raise ImportError(
            f"{source / 'dlx'} is dlx's source folder, and it is not built for {version}: run `make demo` there to "
            "build it, or start Python elsewhere to import an installed dlx",
            name=error.name,
        ) from None
    raise ImportError(
        f"dlx was installed for another Python than {version}, or in part: install dlxarray again", name=error.name
    ) from error

__all__ = ["ffi", "lib"]
