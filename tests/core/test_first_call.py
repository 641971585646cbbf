"""Dtypes and devices of frameworks work in the first call of a process."""

import pytest

CALLS = {
    "convert": "dlx.convert(x, to='numpy', device=d, dtype=t)",
    "mapping": "dlx.convert(x, to='numpy', dtype={np.dtype('f8'): t})",
    "plan": "assert dlx.plan(x, to='numpy', device=d, dtype=t).outcome == 'copied'",
    "stack": "dlx.stack([x], to='numpy', device=d, dtype=t)",
    "using": "dlx.using('numpy', device=d)(lambda a: a)(x)",
    "empty": "dlx.empty(3, t, device=d)",
    "from_pointer": "dlx.from_pointer(x.ctypes.data, (2,), t, device=d, owner=x)",
    "open": "np.save('x.npy', x); dlx.open('x.npy', to='numpy', device=d, dtype=t)['']",
}


@pytest.mark.parametrize("call", CALLS)
def test_the_first_call_takes_a_framework_s_dtype_and_device(np, torch, python, call, tmp_path):
    """The module that knows them is loaded when it is needed, not only by `dlx.Device`."""
    python(
        f"""
        import os
        import numpy as np
        import torch
        import dlx

        os.chdir({str(tmp_path)!r})
        x, d, t = np.ones(2), torch.device("cpu"), torch.float32
        {CALLS[call]}
        """,
        imported=True,
    )


def test_threads_read_a_name_for_the_first_time(python):
    """A name that two threads load at the same time is an attribute for both."""
    out = python("""
        import sys, threading, dlx
        sys.setswitchinterval(1e-6)
        kind, first, failed = type(dlx), vars(type(dlx))["share"], []

        def reset():
            vars(dlx).pop("share", None)
            kind.share = first

        barrier = threading.Barrier(4, action=reset)

        def work():
            for _ in range(300):
                barrier.wait()
                try:
                    dlx.share
                except AttributeError as error:
                    failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        [each.start() for each in threads]
        [each.join() for each in threads]
        print(failed)
    """)
    assert out == "[]\n"
