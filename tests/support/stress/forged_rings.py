"""Write random words to the description and the control block of rings: calls return, or raise errors by name.

python tests/support stress.forged_rings --count 100000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
from collections import Counter

import dlx
from dlx import errors
from dlx._core.extension import ffi, lib

SLOTS = 4
LIKE = [dlx.from_dlpack(bytearray(4)), dlx.from_dlpack(bytearray(4))]


def forge(draw: random.Random, has_new_description: bool) -> str:
    """Change the memory of a ring, and use it; return the outcome."""
    with dlx.ring(SLOTS, like=LIKE, readers=0, overwrite=draw.random() < 0.5) as own:
        handle = json.loads(json.dumps(own.handle))
        control = handle["size"] - SLOTS * 512 - lib.DLX_RING_BYTES
        early = dlx.attach(handle) if draw.random() < 0.5 else None
        for _ in range(draw.choice((1, 8, 64))):
            if has_new_description:
                os.pwrite(own.handle.fileno(), bytes([draw.randrange(256)]), draw.randrange(256, control))
            else:
                word = draw.choice((b"\0", b"\1", b"\2", b"\xff", b"\x7f")) * 8
                os.pwrite(own.handle.fileno(), word, control + draw.randrange(lib.DLX_RING_BYTES // 8) * 8)
        try:
            reader = early or dlx.attach(handle)
        except errors.HandleError:
            return "refused"
        if not hasattr(reader, "read"):
            return "no ring any more"
        for number in range(6):
            with contextlib.suppress(TimeoutError, EOFError):
                own.put(LIKE, timeout=0)
            with contextlib.suppress(TimeoutError, EOFError):
                for each in reader.read(timeout=0, newest=number == 3):
                    bytes(memoryview(each)) if isinstance(each, dlx.Tensor) else each
            assert reader.number >= 0
        reader.close()
        return "used"


def call(draw: random.Random, memory: object, words: object) -> None:
    """Call the functions in C with random memory; they return numbers of slots only."""
    for _ in range(draw.choice((1, 20, 300))):
        words[draw.randrange(lib.DLX_RING_BYTES // 8)] = draw.choice((0, 1, 2, 2**64 - 1, draw.getrandbits(64)))
    slots = draw.choice((2, 7, lib.DLX_RING_SLOTS))
    slot = lib.dlx_ring_claim(memory, slots, draw.randrange(2), draw.randrange(3), draw.choice((0, 1000)))
    assert -1 <= slot < slots
    if slot >= 0:
        lib.dlx_ring_publish(memory, slot)
    number = draw.randrange(lib.DLX_RING_READERS)
    if draw.random() < 0.1:
        lib.dlx_ring_join(memory, number)
    slot = lib.dlx_ring_next(memory, slots, number, draw.randrange(2), draw.choice((0, 1000)))
    assert slot in (-1, lib.DLX_RING_ENDED) or 0 <= slot < slots
    lib.dlx_ring_held(memory, number)
    (lib.dlx_ring_release if draw.random() < 0.9 else lib.dlx_ring_leave)(memory, number)


def main() -> int:
    """Forge rings, and call the functions in C as often; print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    block = ffi.new("uint64_t[]", lib.DLX_RING_BYTES // 8 + 8)
    start = int(ffi.cast("uintptr_t", block))
    memory = ffi.cast("void *", start + -start % 64)
    for _ in range(options.count):
        call(draw, memory, ffi.cast("uint64_t *", memory))
    before = len(os.listdir("/proc/self/fd"))
    found = Counter(forge(draw, number % 3 == 0) for number in range(options.count))
    left = len(os.listdir("/proc/self/fd")) - before
    print(f"{options.count} rings: {dict(sorted(found.items()))}; {left} descriptors left")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
