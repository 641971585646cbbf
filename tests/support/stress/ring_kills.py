"""Kill the producer or readers of rings at random: no peer is stuck, no wrong frame is read, no memory is left.

    python tests/support stress.ring_kills --count 1000

In each round one process fills a ring and two others read it. One of them is killed (SIGKILL) after a random time. The
others finish: the producer publishes all its frames, readers get whole frames, and then the end or an error by name.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter

import dlx
from dlx.errors import HandleError
from support.stress.kills import shared_memory

WORDS, FRAMES, LIMIT = 1 << 15, 150, 20.0  # LIMIT: seconds in which each survivor must end
ENDED, DEAD = 0, 3  # exit statuses of readers


def fill(pipes, seed: int) -> None:
    """Publish frames whose words all have the frame's number."""
    faulthandler.dump_traceback_later(1.5 * LIMIT, exit=True)  # shows where it is stuck
    with dlx.ring(4, like=dlx.empty((WORDS,), "uint64"), overwrite=bool(seed & 1), readers=0) as ring:
        for pipe in pipes:
            pipe.send(dict(ring.handle))  # as a path: multiprocessing reports each connection that a kill cuts
        for number in range(1, FRAMES + 1):
            with ring.write(timeout=LIMIT) as frame:
                words = memoryview(frame)
                words[0] = words[1] = words[-1] = words[WORDS // 2] = number
            time.sleep(0.0001)
        time.sleep(0.05)  # readers attach


def read(pipe) -> None:
    """Read whole frames until the end of the ring."""
    faulthandler.dump_traceback_later(1.5 * LIMIT, exit=True)
    if not pipe.poll(1):  # the producer was killed; other processes hold copies of the pipe's ends
        os._exit(DEAD)
    try:
        reader = dlx.attach(pipe.recv())
    except (EOFError, HandleError, OSError):  # the producer was killed before it sent the handle, or ended
        os._exit(DEAD)
    last = 0
    try:
        while True:
            words = memoryview(reader.read(timeout=LIMIT))
            found = {words[0], words[1], words[-1], words[WORDS // 2]}
            assert len(found) == 1 and last < words[0] <= FRAMES, (found, last)
            last = words[0]
    except EOFError:
        os._exit(ENDED)
    except HandleError:
        os._exit(DEAD)


def play(seed: int, draw: random.Random) -> list[int]:
    """Kill one process at random; return the three exit statuses."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=fill, args=([sender for _, sender in pipes], seed))]
    children += [context.Process(target=read, args=(receiver,)) for receiver, _ in pipes]
    for each in children:
        each.start()
    for pair in pipes:
        for end in pair:
            end.close()
    time.sleep(draw.random() * draw.choice((0.01, 0.05, 0.1)))
    draw.choice(children).kill()
    for each in children:
        each.join(2 * LIMIT)
        if each.is_alive():
            each.kill()
            each.join()
            return [1]
    return [each.exitcode or 0 for each in children]


def main() -> int:
    """Kill; print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with dlx.ring(4, like=dlx.empty((WORDS,), "uint64"), readers=0) as ring:  # loads everything, for the forks
        dlx.attach(ring.handle).close()
    play(0, draw)
    descriptors, before = len(os.listdir("/proc/self/fd")), shared_memory()
    found = Counter(status for i in range(options.count) for status in play(options.seed + i, draw))
    ended, killed, dead = (found.pop(status, 0) for status in (ENDED, -signal.SIGKILL, DEAD))
    wrong = sum(found.values())
    left = (shared_memory() - before) >> 20
    names = [name for name in os.listdir("/dev/shm") if "dlx" in name]  # others are of other programs
    clean = not names and len(os.listdir("/proc/self/fd")) <= descriptors
    print(
        f"{options.count} rounds: {killed} killed, {ended} ended, {dead} refused by name, {wrong} wrong; "
        f"{left} MiB left, {'no' if clean else 'a'} name or descriptor left"
    )
    return 0 if not wrong and clean and left < max(8, options.count // 10) else 1


if __name__ == "__main__":
    sys.exit(main())
