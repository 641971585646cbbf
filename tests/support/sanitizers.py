"""`SANITIZED`: True if the extensions are built with the sanitizers."""

from dlx._core import native

SANITIZED = b"-fsanitize=address" in native.ffi.string(native.lib.dlx_compile_flags())
