"""The Python functions that a call runs."""

import gc
import sys


def called(function, *arguments):
    """Return the names of the Python functions that a call runs, the function itself first.

    The collector is off during the call: jax and others put functions into `gc.callbacks`.
    """
    names = []
    enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
        if enabled:
            gc.enable()
    return names
