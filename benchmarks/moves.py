"""Moves between the host and a CUDA device, copies on it, and strided host arrays, and the frameworks' functions."""

from benchmarks.measure import compare, peer, race, ratio

SMALL, LARGE = 64, 1 << 24  # float32: 256 bytes and 64 MiB


def _create_strided(np):
    """Return {name: host array that is not contiguous}."""
    cube = np.zeros((64, 64, 3), "u1")
    return {
        "flipped channels": cube[..., ::-1],
        "a broadcast column": np.broadcast_to(np.zeros((3000, 1), "f4"), (3000, 4)),
        "reversed rows": np.zeros((1000, 8), "f4")[::-1],
        "every second row and column": np.zeros((20, 20, 20), "f4")[:, ::2, ::2],
        "every second column": np.zeros((1000, 1000), "f4")[:, ::2],
        "transposed": np.zeros((1000, 1000), "f4").T,
    }


def moves(*, quick):
    """Measure and print moves; return {name: figure}, {} without a device."""
    torch, cupy = peer("torch"), peer("cupy")
    if torch is None or cupy is None or not torch.cuda.is_available():
        print("note: skipping moves, which need torch, cupy and a CUDA device")
        return {}
    import numpy as np

    import dlx

    rows = []
    for size, number in ((SMALL, 100), (LARGE, 3)):
        label = "256 bytes" if size == SMALL else "64 MiB"
        host, tensor = np.zeros(size, "f4"), torch.zeros(size)
        pinned, there, array = tensor.pin_memory(), tensor.cuda(), cupy.zeros(size, "f4")
        rows += [
            (f"numpy -> torch, {label}", _to(dlx, host, "torch"), lambda x=host: torch.from_numpy(x).cuda(), number),
            (f"torch -> numpy, {label}", _to(dlx, there, "numpy"), lambda x=there: x.cpu().numpy(), number),
            (f"numpy -> cupy, {label}", _to(dlx, host, "cupy"), lambda x=host: cupy.asarray(x), number),
            (f"cupy -> numpy, {label}", _to(dlx, array, "numpy"), lambda x=array: cupy.asnumpy(x), number),
            (f"torch on the host -> torch, {label}", _to(dlx, tensor, "torch"), tensor.cuda, number),
            (f"pinned torch -> torch, {label}", _to(dlx, pinned, "torch"), pinned.cuda, number),
            (f"torch, copied, {label}", _to(dlx, there, "torch", device=None, copy=True), there.clone, number),
        ]
    for name, x in _create_strided(np).items():
        by_hand = lambda x=x: torch.from_numpy(np.ascontiguousarray(x)).cuda()  # noqa: E731
        rows.append((f"numpy -> torch, {name}", _to(dlx, x, "torch"), by_hand, 3))
    images = list(torch.zeros(64, 1000, device="cuda"))
    rows.append(("stack of 64 rows", lambda: dlx.stack(images, to="torch"), lambda: torch.stack(images), 20))
    found = {}
    for name, ours, hand, number in rows:
        found[name] = figure = compare(
            *race(_synchronize(torch, ours), _synchronize(torch, hand), number=number, rounds=3 if quick else 7)
        )
        print(f"{name:45}{figure['ours'] * 1e6:10.1f} /{figure['theirs'] * 1e6:10.1f} µs  {ratio(figure)}")
    return found


def _to(dlx, x, to, device="cuda", copy=None):
    device = None if to in ("numpy", "cupy") else device
    return lambda: dlx.convert(x, to=to, device=device, copy=copy)


def _synchronize(torch, call):
    """Return a function that makes the call and then waits for the device."""

    def run():
        call()
        torch.cuda.synchronize()

    return run
