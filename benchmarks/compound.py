"""Sparse and ragged arrays, against the fastest way by hand, which checks nothing."""

import warnings

import dlx
from benchmarks.measure import peer, race, verdict

GOALS_US = {10_000: 300, 1_000_000: 1000}
"""Rows -> microseconds for a ragged array whose parts are shared."""

_BY_HAND = {
    "list -> torch": lambda names: names["join"](
        names["asarray"](names["x"].values), names["asarray"](names["x"].offsets)
    ),
    "torch -> list": lambda names: names["pa"].ListArray.from_arrays(
        names["pa"].array(names["made"].offsets().numpy()), names["pa"].array(names["made"].values().numpy())
    ),
}


def compound(*, quick):
    """Measure lists of varying length and csr matrices, in both directions; print them and the goals."""
    np, torch, pa, sparse = map(peer, ("numpy", "torch", "pyarrow", "scipy.sparse"))
    if None in (np, torch, pa, sparse):
        return []
    warnings.filterwarnings(
        "ignore", "Sparse |The PyTorch API of nested|The given NumPy array is not writable", UserWarning
    )
    found, rounds = [], 5 if quick else 20
    print("\nRagged arrays and csr matrices, us")
    print(f"{'':<16}{'rows':>10}{'dlx':>10}{'by hand':>10}")
    for rows, goal in GOALS_US.items():
        lengths = np.random.default_rng(0).integers(0, 10, rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
        x = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.arange(offsets[-1], dtype="float32")))
        made = dlx.convert(x, "torch")
        names = {"pa": pa, "x": x, "made": made, "join": torch.nested.nested_tensor_from_jagged}
        names["asarray"] = lambda array: torch.from_numpy(np.asarray(array))
        calls = {
            "list -> torch": lambda x=x: dlx.convert(x, "torch", readonly="share", copy=False),
            "torch -> list": lambda made=made: dlx.convert(made, "pyarrow", copy=False),
        }
        for name, call in calls.items():
            us, hand_us = _least(call, lambda name=name, names=names: _BY_HAND[name](names), rounds)
            found.append({"what": name, "rows": rows, "us": us, "by_hand_us": hand_us})
            print(f"{name:<16}{rows:>10}{us:>10.0f}{hand_us:>10.0f}  {verdict(us <= goal)} (goal: {goal})")
        matrix = sparse.random_array((rows, 1000), density=0.01, format="csr", rng=np.random.default_rng(0))
        parts = [torch.from_numpy(part) for part in (matrix.indptr, matrix.indices, matrix.data)]
        by_hand = lambda parts=parts, matrix=matrix: torch.sparse_csr_tensor(  # noqa: E731
            *parts, matrix.shape, check_invariants=False
        )
        us, hand_us = _least(lambda matrix=matrix: dlx.convert(matrix, "torch", copy=False), by_hand, rounds)
        found.append({"what": "csr -> torch", "rows": rows, "stored": matrix.nnz, "us": us, "by_hand_us": hand_us})
        print(f"{'csr -> torch':<16}{rows:>10}{us:>10.0f}{hand_us:>10.0f}  ({matrix.nnz} elements are checked)")
    return found


def _least(ours, theirs, rounds):
    return [min(times) * 1e6 for times in race(ours, theirs, rounds=rounds)]
