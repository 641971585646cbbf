"""Many arrays of a CUDA device in one call, compared with one call of the frameworks' functions for each array."""

from benchmarks.measure import compare, peer, race, ratio

COUNTS = (1, 10, 100, 1000)


def batch(counts=COUNTS):
    """Return {"torch -> cupy, 100": figure}; {} without a device or a framework.

    Producer and consumer work on two streams, which need ordering: dlx records and waits once per call, the frameworks
    once per array.
    """
    torch, cupy = peer("torch"), peer("cupy")
    if torch is None or cupy is None or not torch.cuda.is_available():
        print("note: skipping batch conversion, which needs torch, cupy and a CUDA device")
        return {}
    import dlx

    found = {}
    with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True):
        for count in counts:
            for name, figure in _both_ways(torch, cupy, dlx.convert, count).items():
                found[name] = figure
                print(f"batch {name} arrays: {figure['ours'] * 1e6:.1f} µs, ratio {ratio(figure)}")
            torch.cuda.synchronize()
            dlx.release_pending()
    return found


def _both_ways(torch, cupy, convert, count):
    tensors = [torch.zeros(16, device="cuda") for _ in range(count)]
    arrays = [cupy.zeros(16) for _ in range(count)]
    number = max(1, 100 // count)
    out = race(lambda: convert(tensors, to="cupy"), lambda: [*map(cupy.from_dlpack, tensors)], number=number)
    back = race(lambda: convert(arrays, to="torch"), lambda: [*map(torch.from_dlpack, arrays)], number=number)
    return {f"torch -> cupy, {count}": compare(*out), f"cupy -> torch, {count}": compare(*back)}
