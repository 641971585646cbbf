"""The check of a pickle before another library reads it."""

from __future__ import annotations

import pickletools

MAX_DEPTH = 1000  # of tuples in tuples, which CPython hashes by recursion without a limit
MAX_TUPLES = 1 << 20  # in a tuple, each counted as often as it occurs: a pickle can share them exponentially
_LENGTHS = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT8U: 8}  # bytes; others have 4
_LEAF = 0, 0  # the depth of tuples, and their number
# The name of an opcode, the width of its argument, its effect on the stack: objects below its mark, or taken, and made.
_OPCODES = {
    ord(each.code): (
        each.name,
        getattr(each.arg, "n", 0),
        pickletools.markobject in each.stack_before,
        next((i for i, kind in enumerate(each.stack_before) if kind is pickletools.markobject), len(each.stack_before)),
        [_LEAF] * len(each.stack_after),
    )
    for each in pickletools.opcodes
    if each.name not in ("DUP", "EXT1", "EXT2", "EXT4", "GET", "POP", "PUT")  # unusual
}


def check_pickle(raw: bytes) -> None:
    """Raise an exception if a pickle is cut off, claims memory, or has nested tuples that take years to hash."""
    stack, marks, memo = [_LEAF], list[int](), dict[int, tuple[int, int]]()
    at, name = 0, ""
    while name != "STOP":
        name, width, to_mark, before, after = _OPCODES[raw[at]]
        start = at = at + 1
        if width > 0:
            at += width
        elif width == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if name in ("GLOBAL", "INST") else 1):
                at = raw.index(b"\n", at) + 1
        elif width:
            size = _LENGTHS.get(width, 4)
            at += size + int.from_bytes(raw[at : at + size], "little")
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = int.from_bytes(raw[start:at], "little") if width else len(memo)
            if place > len(raw):  # Python's reader allocates this many places
                raise ValueError("unusual place in the memo")
            memo[place] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo.get(int.from_bytes(raw[start:at], "little"), _LEAF))
        elif name == "MARK":
            marks.append(len(stack))
        else:
            cut = (marks.pop() if to_mark else len(stack)) - before
            items, stack[cut:] = stack[cut:], after
            if items and ("TUPLE" in name or name == "FROZENSET"):
                stack[-1] = depth, count = 1 + max(items)[0], 1 + sum([each[1] for each in items])
                if depth > MAX_DEPTH or count > MAX_TUPLES:
                    raise ValueError("too many tuples in tuples")
