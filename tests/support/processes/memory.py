"""Resident memory of this process, from Linux's /proc; `getrusage` also counts the process that started this one."""

from __future__ import annotations

import os
import re


def resident():
    """Return the resident bytes, 0 if unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def most_resident():
    """Return the most bytes that were resident, 0 if unknown."""
    try:
        with open("/proc/self/status") as file:
            return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) << 10
    except OSError:
        return 0
