"""Threads that are let go together."""

from __future__ import annotations

import threading


def at_once(*functions):
    """Run each function in a thread of its own, all released together; return what each gave or raised."""
    barrier, found = threading.Barrier(len(functions) or 1), [None] * len(functions)

    def run(i, function):
        barrier.wait()
        try:
            found[i] = function()
        except Exception as error:
            error.__traceback__ = None  # its frames hold what the function held
            found[i] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
