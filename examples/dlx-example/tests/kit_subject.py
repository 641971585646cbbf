"""examplearray for dlx's conformance kit: functions that create and read its arrays without DLPack.

Run it with::

    cd tests && python -m dlx.testing kit_subject:SUBJECT
    cd tests && python -m pytest -p dlx.testing --dlx-adapter=kit_subject:SUBJECT
"""

import ctypes

import examplearray as ea

from dlx.testing import Subject

WORDS = {
    "bool": ea.truth8,
    "uint8": ea.uint8,
    "int32": ea.int32,
    "int64": ea.int64,
    "float32": ea.float32,
    "float64": ea.float64,
    "bfloat16": ea.brain16,
    "code3_16bit": ea.posit16,
}
NAMES = {word: name for name, word in WORDS.items()}


def make(data, dtype, shape):
    """Return an array of these row-major bytes."""
    array = ea.empty(shape, WORDS[dtype])
    ctypes.memmove(array.address, data, len(data))
    return array


def negated():
    """Return a negated array, and its bytes after the negation."""
    return ea.array([1.0, -2.0]).negated(), ea.array([-1.0, 2.0]).tobytes()


SUBJECT = Subject(
    "examplearray",
    package="examplearray",
    adapter="examplearray",
    dtypes=tuple(WORDS),
    make=make,
    from_dlpack=ea.from_dlpack,
    views={
        "transposed": lambda a: a.T,
        "every other column": lambda a: a[:, ::2],
        "one row": lambda a: a[1],
        "backwards": lambda a: a[::-1],
        "one row for all": lambda a: a[0].broadcast(4),
        "no row": lambda a: a[:0],
        "no dimension": lambda a: a[1, 2],
    },
    readonly=lambda a: a.frozen(),
    writable=lambda a: not a.readonly,
    read=lambda a: a.tobytes(),
    describe=lambda a: (a.address, a.shape, NAMES[a.dtype]),
    unfit={"quarter8, which does not travel": lambda: ea.array([1, 2], ea.quarter8)},
    pending={"negated": negated},
    ndims=(0, 8),
    containers={"bundle": lambda a: ea.Bundle("b", {"x": a})},
    words={
        "imports": "import examplearray as ea",
        "take": "ea.from_dlpack",
        "array": "ea.array([1.0, 2.0, 3.0, 4.0])",
    },
)
