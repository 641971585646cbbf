"""Actions on a torch tensor after a conversion, each in a subprocess."""

from __future__ import annotations

PRELUDE = """
import gc
import sys
import torch
import dlx

N = 10_000_000  # float32: 40 MB, more than 32 MiB, so that glibc gives them back to the system at once
kept = []


def source():
    return torch.ones(5, 1, N // 5)


def watch(result, shape=(5, 1, N // 5), strides=(N // 5, N // 5, 1), value=1):
    kept.append((result, shape, strides, value))


def check():
    # Memory of the same size, filled with something else, lands where freed memory was.
    filler = torch.full((N,), 7.0)
    for result, shape, strides, value in kept:
        array = dlx.convert(result, to="numpy", copy=False)
        assert array.shape == shape, array.shape
        assert tuple(step // 4 for step in array.strides)[::2] == strides[::2], array.strides
        assert array.min() == array.max() == value, (array.min(), array.max())
    kept.clear()
    del filler
    gc.collect()


def refused(action):
    try:
        action()
    except RuntimeError as error:
        assert "not resizable" in str(error), error
    else:
        raise AssertionError("resized")
"""


ACTIONS = {
    "set_": "t = source(); watch(dlx.convert(t, to=target)); t.set_()",
    "data =": "t = source(); watch(dlx.convert(t, to=target)); t.data = torch.zeros(1)",
    "data = on a parameter": """
        t = torch.nn.Parameter(source())
        watch(dlx.convert(t, to=target, detach=True))
        t.data = torch.zeros(1)
    """,
    "module.half()": """
        module = torch.nn.Linear(N // 5, 5, bias=False)
        with torch.no_grad():
            module.weight.fill_(1)
        watch(dlx.convert(module.weight, to=target, detach=True)[:, None] if target == "numpy" else
              dlx.convert(module.weight.detach()[:, None], to=target))
        module.half()
    """,
    "swap_tensors": """
        t = source()
        watch(dlx.convert(t, to=target))
        other = torch.zeros(1)
        torch.utils.swap_tensors(t, other)
        del other
    """,
    "squeeze_, transpose_, unsqueeze_, as_strided_": """
        t = source()
        watch(dlx.convert(t, to=target))
        t.squeeze_().transpose_(0, 1)
        for _ in range(20):
            t.unsqueeze_(0)
        t.as_strided_((1,), (1,))
    """,
    "del": "t = source(); watch(dlx.convert(t, to=target)); del t",
    "subclass set_": """
        class Mine(torch.Tensor):
            pass
        t = torch.Tensor._make_subclass(Mine, source())
        watch(dlx.convert(t, to=target))
        t.set_()
    """,
    "view and base": "t = source(); watch(dlx.convert(t[:, :, :], to=target)); t.set_(); del t",
    "raw capsule": """
        t = source()
        watch(dlx.convert(t, to="dlx").__dlpack__(max_version=(1, 0)))
        t.set_()
    """,
    "resize_": """
        t = source()
        watch(dlx.convert(t, to=target))
        refused(lambda: t[1:].resize_(N + 1))
        refused(lambda: t.untyped_storage().resize_(0))
        refused(lambda: t.resize_(2 * N))
        del t
    """,
}


FORKS = """
import os
import traceback

for name, code in actions.items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for target in ("numpy", "dlx"):
                exec(code)
                check()
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(status)
    print(f"== {name}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
"""
