"""The compiled core, as cffi makes it; `dlx._core.native` gives it names and types."""

from typing import Any

ffi: Any
lib: Any
