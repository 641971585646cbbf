"""What a consumer is held to: what comes in is what was given, or it is refused."""

from __future__ import annotations

from dlx.testing.check import check
from dlx.testing.subject import Subject

__all__: list[str] = []


@check(
    "import-dtypes", "Every dtype comes in with its own name and every bit.",
    kind="consumer", about="dtypes", severity="wrong",
)  # fmt: skip
def import_dtypes(lib: Subject) -> None:
    """Give each declared dtype."""
    for dtype in lib.dtypes:
        source = lib.source(dtype)
        lib.holds(lib.take(source), source)


@check(
    "import-negative-strides", "An array with negative strides comes in right, or is refused.",
    kind="consumer", about="layouts", severity="fatal", alone=True,
    shows="""
{imports}
from dlx.testing import Source
source = Source("float32", (4,), strides=(-1,))
try:
    result = {take}(source)  # must not kill the process
except Exception:
    pass
""",
)  # fmt: skip
def import_negative_strides(lib: Subject) -> str | None:
    """Give an array that runs backwards."""
    source = lib.source("float32", (4,), strides=(-1,))
    result, error = lib.tried(source)
    if error is not None:
        return f"refused: {type(error).__name__}"
    lib.holds(result, source)
    return None
