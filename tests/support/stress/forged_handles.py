"""Attach handles with random changes: each is refused, or attaches the shared memory.

    python tests/support stress.forged_handles --count 100000

In half of the trials this process does not know the segments, as a process that did not share them. Only HandleError
may be raised, the attached values must be the shared ones, and no descriptor may be left. Otherwise the exit status is
1.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys

import dlx
from dlx._sharing import segment

ODD = [None, True, 0, -1, 1 << 31, 1 << 63, 1 << 64, 10**400, 1.0, float("nan"), "", "self", "../../x", "\0", "\udc80"]
ODD += [b"x", [], {}, [1], {"a": 1}, object()]


def changed(value: object, draw: random.Random, numbers: list[int], tokens: list[str]) -> object:
    """Return another value instead of this one."""
    way = draw.randrange(5)
    if type(value) is int and way:
        bits = draw.getrandbits(draw.choice((4, 8, 31, 63)))
        return [value ^ 1 << draw.randrange(70), value + draw.choice((-1, 1, 4096)), bits, draw.choice(numbers)][
            way - 1
        ]
    if type(value) is str and way:
        at = draw.randrange(len(value) + 1)
        other = value[:at] + draw.choice("09afG\0") + value[at + 1 :]
        return [value[:at], other, value.upper(), draw.choice(tokens)][way - 1]
    return draw.choice(ODD)


def forged(handle: dict[str, object], draw: random.Random, numbers: list[int], tokens: list[str]) -> dict[str, object]:
    """Return a handle with up to three fields changed, added or left out."""
    handle = dict(handle)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        name = draw.choice([*handle, "x"])
        handle[name] = changed(handle.get(name), draw, numbers, tokens)
        if draw.random() < 0.1:
            del handle[name]
    return handle


def near(value: object) -> list[object]:
    """Return every value that differs from a number in one bit or by one, or from a text in one character."""
    if type(value) is int:
        return [*(value ^ 1 << bit for bit in range(64)), value - 1, value + 1, -value]
    text = str(value)
    return [text[:i] + ("0" if text[i] != "0" else "1") + text[i + 1 :] for i in range(len(text))] + [text + "0"]


def refused(handle: dict[str, object], fd: object) -> bool:
    """Return True if a process that knows the segment, and one that does not, refuse the handle."""
    for known in (True, False):
        if not known:
            segment._held.clear()
        try:
            dlx.attach(handle, fd=fd)
        except dlx.errors.HandleError:
            continue
        return False
    return True


def main() -> int:
    """Forge handles; print the number of refusals, and the faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    tree = {"a": [dlx.from_dlpack(bytes(100))], "b": dlx.empty(50, "float32", shared=True)}
    held = [dlx.share(tree) for _ in range(3)]
    ends = [*os.pipe(), *(end.detach() for end in socket.socketpair())]
    files = [os.memfd_create("other"), os.open("/dev/zero", os.O_RDWR), os.open("/etc/passwd", os.O_RDONLY), *ends]
    os.write(files[0], bytes(5000))
    numbers = [os.getpid(), os.getppid(), 1, *files, *(each[name] for each in held for name in ("fd", "inode", "size"))]
    tokens = [each["token"] for each in held]
    before, attached = len(os.listdir("/proc/self/fd")), 0
    for name in ("size", "token", "dlx"):  # the other fields are only hints
        for value in near(held[0][name]):
            for fd in (None, held[0]["fd"]):
                assert refused({**held[0], name: value}, fd), (name, value, fd)
    for number in range(options.count):
        handle = forged(draw.choice(held), draw, numbers, tokens)
        fd = draw.choice([None, None, None, -1, 10**6, *files, [], files[:2], held[0]["fd"]])
        if number % 2:
            segment._held.clear()
        try:
            found = dlx.attach(handle, writable=bool(number & 4), fd=fd)
        except dlx.errors.HandleError:
            continue
        assert found["a"][0].tobytes() == bytes(100) and found["b"].shape == (50,), handle
        del found
        attached += 1
    segment._held.clear()
    left = len(os.listdir("/proc/self/fd")) - before
    print(f"{options.count - attached} refused by name, {attached} attached, {left} descriptors left")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
