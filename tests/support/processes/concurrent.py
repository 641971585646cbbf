"""Threads that start at the same time."""

from __future__ import annotations

import threading


def at_once(*functions):
    """Run each function in its own thread, all released together; return each result or exception."""
    barrier, found = threading.Barrier(len(functions) or 1), [None] * len(functions)

    def run(i, function):
        barrier.wait()
        try:
            found[i] = function()
        except Exception as error:
            error.__traceback__ = None  # its frames keep the function's objects alive
            found[i] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
