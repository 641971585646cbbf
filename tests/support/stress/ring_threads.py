"""A producer and two readers of a ring in threads of one process, over one mapping; for ThreadSanitizer.

    python tests/support stress.ring_threads --frames 1000

Each reader checks that frames are whole.
"""

from __future__ import annotations

import argparse
import sys
import threading

import dlx

SIZE, LIMIT = 4096, 60.0  # bytes of a frame; seconds that a thread waits


def fill(ring, frames: int) -> None:
    """Publish frames that begin and end with their number, by `put` and by `write` in turn."""
    data = bytearray(SIZE)
    for number in range(1, frames + 1):
        data[:8] = data[-8:] = number.to_bytes(8, "little")
        if number % 2:
            ring.put(data, timeout=LIMIT)
        else:
            with ring.write(timeout=LIMIT) as frame:
                dlx.convert(data, out=frame)
    ring.close()


def read(handle, newest: bool) -> list[int]:
    """Return the numbers of the frames of a reader."""
    own, numbers = bytearray(SIZE), []
    with dlx.attach(handle, writable=True) as reader:  # writable: the mapping of the producer
        while True:
            try:
                dlx.convert(reader.read(timeout=LIMIT, newest=newest), out=own)
            except EOFError:
                return numbers
            first, last = (int.from_bytes(part, "little") for part in (own[:8], own[-8:]))
            assert first == last == reader.number
            numbers.append(first)


def run(overwrite: bool, frames: int) -> list[list[int]]:
    """Return the numbers that both readers got; the second one skips frames if they may be overwritten."""
    found: list[list[int]] = []
    with dlx.ring(4, bytearray(SIZE), overwrite=overwrite, readers=2) as ring:
        threads = [
            threading.Thread(target=lambda newest=newest: found.append(read(ring.handle, newest)))
            for newest in (False, overwrite)
        ]
        threads.append(threading.Thread(target=fill, args=(ring, frames)))
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    return found


def main() -> int:
    """Run both kinds of rings; print the numbers of frames."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1000)
    options = parser.parse_args()
    for overwrite in (False, True):
        found = run(overwrite, options.frames)
        assert len(found) == 2, "a thread has raised an error"
        for numbers in found:
            assert numbers == sorted({*numbers}) and numbers[-1] == options.frames, numbers
            assert overwrite or len(numbers) == options.frames, numbers
        print(f"overwrite={overwrite}: {[*map(len, found)]} frames", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
