"""Arrays of a CUDA device between torch, cupy and dlx, one and a thousand, compared with the frameworks' functions.

It runs on a GPU, or on the recording driver (`nox -s bench-cuda`), whose calls have other costs. Times are this
thread's work on the host: waiting for a device or a busy machine is not counted.
"""

import time

from benchmarks.measure import compare, peer, race, ratio

MANY = 1000


def cuda(*, quick=False):
    """Return {"torch -> cupy, two streams": figure}; {} without a device or a framework."""
    torch, cupy = peer("torch"), peer("cupy")
    if torch is None or cupy is None or not torch.cuda.is_available():
        print("note: skipping arrays of CUDA devices, which need torch, cupy and a CUDA device")
        return {}
    import dlx

    found = {}
    ours, theirs = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    streams = {"one stream": cupy.cuda.Stream.from_external(ours), "two streams": theirs}
    for cases, number in ((_single, 200), (_moves, 50), (_stacks, 1), (_many, 1)):  # short cases first
        for name, stream in streams.items():
            with torch.cuda.stream(ours), stream:
                for what, both in cases(torch, cupy, dlx).items():
                    figure = compare(*race(*both, number=number, rounds=5 if quick else 9, clock=time.thread_time))
                    found[f"{what}, {name}"] = figure
                    print(f"cuda {what}, {name}: {figure['ours'] * 1e6:.2f} µs, ratio {ratio(figure)}")
                    torch.cuda.synchronize()
                    dlx.release_pending()
    return found


def _single(torch, cupy, dlx):
    """Return {name: (dlx's call, the frameworks' call)}."""
    convert = dlx.convert
    tensor, array = torch.zeros(16, device="cuda"), cupy.zeros(16)
    own = convert(tensor, to="dlx")
    return {
        "torch -> cupy": (lambda: convert(tensor, to="cupy"), lambda: cupy.from_dlpack(tensor)),
        "cupy -> torch": (lambda: convert(array, to="torch"), lambda: torch.from_dlpack(array)),
        "dlx -> torch": (lambda: convert(own, to="torch"), lambda: torch.from_dlpack(own)),
        "dlx -> cupy": (lambda: convert(own, to="cupy"), lambda: cupy.from_dlpack(own)),
    }


def _moves(torch, cupy, dlx):
    """Return the same for moves of 256 bytes between the host and the device."""
    import numpy as np

    host, tensor, there = np.zeros(64, "f4"), torch.zeros(64), torch.zeros(64, device="cuda")
    image = np.zeros((8, 8, 3), "u1")[..., ::-1]
    return {
        "numpy -> torch": (
            lambda: dlx.convert(host, to="torch", device="cuda"),
            lambda: torch.from_numpy(host).cuda(),
        ),
        "torch -> numpy": (lambda: dlx.convert(there, to="numpy"), lambda: there.cpu().numpy()),
        "numpy -> cupy": (lambda: dlx.convert(host, to="cupy"), lambda: cupy.asarray(host)),
        "torch on the host -> torch": (lambda: dlx.convert(tensor, to="torch", device="cuda"), tensor.cuda),
        "torch, copied": (lambda: dlx.convert(there, to="torch", copy=True), there.clone),
        "numpy -> torch, flipped channels": (
            lambda: dlx.convert(image, to="torch", device="cuda"),
            lambda: torch.from_numpy(np.ascontiguousarray(image)).cuda(),
        ),
    }


def _stacks(torch, cupy, dlx):
    """Return the same for stacks of 64 rows."""
    tensors, arrays = [torch.zeros(16, device="cuda") for _ in range(64)], [cupy.zeros(16) for _ in range(64)]
    mixed = [array if i % 2 else torch.as_tensor(array) for i, array in enumerate(arrays)]
    return {
        "stack of 64 torch": (lambda: dlx.stack(tensors, to="torch"), lambda: torch.stack(tensors)),
        "stack of 64 cupy": (lambda: dlx.stack(arrays, to="cupy"), lambda: cupy.stack(arrays)),
        "stack of 32 torch and 32 cupy": (
            lambda: dlx.stack(mixed, to="torch"),
            lambda: torch.stack([torch.as_tensor(each) for each in mixed]),
        ),
    }


def _many(torch, cupy, dlx):
    """Return the same for lists."""
    tensors, arrays = [torch.zeros(16, device="cuda") for _ in range(MANY)], [cupy.zeros(16) for _ in range(MANY)]
    return {
        f"{MANY} torch -> cupy": (
            lambda: dlx.convert(tensors, to="cupy"),
            lambda: [cupy.from_dlpack(each) for each in tensors],
        ),
        f"{MANY} cupy -> torch": (
            lambda: dlx.convert(arrays, to="torch"),
            lambda: [torch.from_dlpack(each) for each in arrays],
        ),
    }
