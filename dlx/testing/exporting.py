"""What a producer is held to: its capsules carry what its arrays hold, and say so."""

from __future__ import annotations

from dlx.testing.check import Broken, attempt, check, must, told
from dlx.testing.subject import Subject

__all__: list[str] = []


@check(
    "export-dtypes", "Every dtype leaves with its own name and every bit.",
    kind="producer", about="dtypes", severity="wrong",
)  # fmt: skip
def export_dtypes(lib: Subject) -> None:
    """Make, export and read each declared dtype."""
    for dtype in lib.dtypes:
        array, data = lib.array(dtype)
        taken = lib.versioned(array)
        must(taken.dtype.name == dtype, f"{dtype} left as {taken.dtype.name}")
        must(taken.elements() == data, f"the elements of {dtype} changed")


@check(
    "legacy-asked-for", "A consumer that asks for DLPack 0.8 is given a legacy capsule.",
    kind="producer", about="versions", severity="refuses",
    shows="""
{imports}
x = {array}
capsule = x.__dlpack__(max_version=(0, 8))
assert '"dltensor"' in repr(capsule), capsule
""",
)  # fmt: skip
def legacy_asked_for(lib: Subject) -> None:
    """Ask with a major version 0."""
    taken = lib.give(lib.array()[0], max_version=(0, 8))
    must(taken.legacy, "max_version=(0, 8) gave a versioned capsule")
    _ = Broken, attempt, told
