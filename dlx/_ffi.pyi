"""The compiled cffi module; `dlx._core.native` wraps it with names and types."""

from typing import Any

ffi: Any
lib: Any
