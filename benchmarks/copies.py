"""Copies that keep the order of dimensions, and the row-major copy that some consumers need."""

import dlx
from benchmarks.measure import compare, race, ratio, verdict
from dlx._core import native

SIZES = (1, 10, 100)  # megabytes
CONTIGUOUS, STRIDED = 1.1, 1.3  # goals: at most this multiple of numpy's time


def layouts(np, dtype, megabytes):
    """Yield (name, array, goal), each with `megabytes` of elements."""
    items = megabytes * 10**6 // np.dtype(dtype).itemsize
    rows = columns = int(items**0.5)
    twice = np.arange(rows * columns * 2).astype(dtype)
    whole = twice[: rows * columns].reshape(rows, columns)
    (readonly := whole.view()).flags.writeable = False
    yield "contiguous", whole, CONTIGUOUS
    yield "read-only", readonly, CONTIGUOUS
    yield "transposed", whole.T, CONTIGUOUS
    yield "F-order", np.asfortranarray(whole), CONTIGUOUS
    yield "[:, ::2]", twice.reshape(rows, columns * 2)[:, ::2], STRIDED
    yield "[::-1]", whole[::-1], STRIDED
    yield "[:, ::-1]", whole[:, ::-1], STRIDED
    yield "to rows", whole.T, STRIDED


def copies(np, sizes=SIZES):
    """Measure both kinds of copies; print them and say which goals are met."""
    print("\nCopies: time of dlx.convert(a, to='dlx', copy=True) over np.copy(a); then the C part alone.")
    print("to rows: the C part alone, for a consumer of row-major tensors, over np.ascontiguousarray(a)")
    print(f"{'layout':<12}{'dtype':<9}" + "".join(f"{f'{size} MB':<25}" for size in sizes) + "goal    result  C part")
    found = {}
    for dtype in ("float32", "uint8", "float64"):
        for size in sizes:
            for layout, array, goal in layouts(np, dtype, size):
                key = {"layout": layout, "dtype": dtype, "megabytes": size, "goal": goal}
                found[layout, dtype, size] = key | _copy(np, layout, array, rounds={1: 25, 10: 11, 100: 5}[size])
    for layout, dtype in dict.fromkeys((layout, dtype) for layout, dtype, _ in found):
        row = [found[layout, dtype, size] for size in sizes]
        met = [verdict(all(figure[key] <= figure["goal"] for figure in row)) for key in ("ratio", "core")]
        cells = "".join(f"{ratio(figure)} {figure['core']:.2f}".ljust(25) for figure in row)
        print(f"{layout:<12}{dtype:<9}{cells}<= {row[0]['goal']:<5}{met[0]:<8}{met[1]}")
    return list(found.values())


def _copy(np, layout, array, rounds):
    tensor = dlx.convert(array, to="dlx")
    if layout == "to rows":
        core, own = race(lambda: native.tensor_copy(tensor, False), lambda: np.ascontiguousarray(array), rounds=rounds)
        return compare(core, own) | {"core": min(core) / min(own)}
    whole, core, own = race(
        lambda: dlx.convert(array, to="dlx", copy=True),
        lambda: native.tensor_copy(tensor, True),
        lambda: np.copy(array),
        rounds=rounds,
    )
    return compare(whole, own) | {"core": min(core) / min(own)}
