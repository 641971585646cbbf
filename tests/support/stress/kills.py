"""Kill processes that share or attach memory, at random: no memory is left, and no wrong value is read.

    python tests/support stress.kills --count 1000

In each round one process shares a tree and two others attach it; one of them passes it on. One, two or all of them are
killed (SIGKILL) after a random time. The survivors read the right values, or get an error by name. At the end no name
is in /dev/shm, no descriptor is left, and the memory of all segments is free. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter

import dlx
from dlx.errors import HandleError

MEGABYTES = 3  # of one segment: a huge page, and small ones


REFUSED = 3  # exit status after an error by name


def shared_memory() -> int:
    """Return the bytes of shared memory that the whole system uses."""
    with open("/proc/meminfo") as lines:
        (line,) = [line for line in lines if line.startswith("Shmem:")]
    return int(line.split()[1]) << 10


def attacher(channel: socket.socket, onwards: socket.socket | None, seed: int) -> None:
    """Attach a handle, pass it on, and read it until the channel is closed, or the process killed."""
    text = channel.recv(4096)
    if not text:
        return  # the sharer was killed before it shared
    try:
        found = dlx.attach(json.loads(text), writable=bool(seed & 1))
    except HandleError:  # the sharer was killed in between
        os._exit(REFUSED)
    if onwards is not None:
        second = dlx.share(found)  # a handle of this process: nothing is copied
        assert second["size"] < 2000
        onwards.send(json.dumps(second).encode())
    view = memoryview(found["a"][1])
    for _ in range(20):
        assert found["n"] == seed and view[0] == view[-1] == seed % 256 and view.nbytes == MEGABYTES << 20
        time.sleep(0.0005)
    channel.recv(1)  # until the other end is closed


def sharer(channel: socket.socket, seed: int) -> None:
    """Share a tree, and keep it until the channel is closed, or the process killed."""
    data = bytearray([seed % 256]) * (MEGABYTES << 20)
    with dlx.share({"a": [None, dlx.from_dlpack(data)], "n": seed}) as handle:
        channel.send(json.dumps(handle).encode())
        channel.recv(1)


def forked(work, *arguments) -> int:
    """Run a function in a child, which ends with status 0, or 1 if it raises; return its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(*arguments)
            status = 0
        except (ConnectionError, BrokenPipeError):
            status = 0  # the other side was killed
        except BaseException as error:
            print(f"{work.__name__}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return child


def round_of(seed: int, draw: random.Random) -> list[int]:
    """Kill at random once; return the three exit statuses."""
    one, two, three = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3))
    ends = [*one, *two, *three]

    def only(*mine):
        for end in ends:
            if end not in mine:
                end.close()

    def share():
        only(one[0])
        sharer(one[0], seed)

    def attach():
        only(one[1], two[0])
        attacher(one[1], two[0], seed)

    def last():
        only(two[1])
        attacher(two[1], None, seed)

    children = [forked(each) for each in (share, attach, last)]
    for end in (*one, *two):
        end.close()
    for child in draw.sample(children, draw.choice((1, 1, 1, 2, 3))):
        time.sleep(draw.random() * draw.choice((0.001, 0.01)))
        os.kill(child, signal.SIGKILL)
    for end in three:
        end.close()
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> int:
    """Kill; print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    round_of(0, draw)  # loads everything
    names, descriptors, before = os.listdir("/dev/shm"), os.listdir("/proc/self/fd"), shared_memory()
    found = Counter(status for i in range(options.count) for status in round_of(options.seed + i, draw))
    fine, killed, refused = (found.pop(status, 0) for status in (0, -signal.SIGKILL, REFUSED))
    wrong = sum(found.values())
    for _ in range(50):  # the kernel frees it when the last process is gone
        left = shared_memory() - before
        if left < MEGABYTES << 20:
            break
        time.sleep(0.1)
    clean = os.listdir("/dev/shm") == names and os.listdir("/proc/self/fd") == descriptors
    print(
        f"{options.count} rounds: {killed} killed, {fine} content, {refused} refused by name, {wrong} wrong; "
        f"{left >> 20} MiB left, {'no' if clean else 'a'} name or descriptor left"
    )
    return 0 if not wrong and clean and left < max(MEGABYTES, options.count // 10) << 20 else 1


if __name__ == "__main__":
    sys.exit(main())
