"""Trees of 1000 small arrays: dlx, comprehensions and optree, and `stack` and torch.tensor."""

import timeit

from benchmarks.measure import compare, peer, ratio, round_robin, verdict

N = 1000
# (what, ours, theirs, at most)
GOALS = [
    ("list", 'dlx.convert(arrays, to="torch")', "[torch.from_numpy(a) for a in arrays]", 1.1),
    ("dict", 'dlx.convert(named, to="torch")', "{k: torch.from_numpy(a) for k, a in named.items()}", 1.1),
    ("nested", 'dlx.convert(nested, to="torch")', "optree.tree_map(torch.from_dlpack, nested)", 0.45),
    ("torch → numpy", 'dlx.convert(tensors, to="numpy")', "[t.numpy() for t in tensors]", 0.7),
    ("stack", 'dlx.stack(rows, to="torch")', "torch.tensor(rows)", 0.2),
]


def trees(names, *, quick):
    """Measure trees of 1000 arrays, print them, and say which goals are met."""
    np, torch = names["np"], names["torch"]
    arrays = [np.ones(4, "f4") for _ in range(N)]
    scene = {
        "dlx": names["dlx"],
        "torch": torch,
        "optree": peer("optree"),
        "arrays": arrays,
        "named": {f"k{i}": array for i, array in enumerate(arrays)},
        "nested": {
            f"layer{i}": {"w": [arrays[4 * i], arrays[4 * i + 1]], "b": (arrays[4 * i + 2], {"x": arrays[4 * i + 3]})}
            for i in range(N // 4)
        },
        "tensors": [torch.ones(4) for _ in range(N)],
        "rows": [np.ones(1000, "f4") for _ in range(N)],
    }
    wanted = [goal for goal in GOALS if "optree" not in goal[2] or scene["optree"] is not None]
    seconds, rounds = (0.002, 7) if quick else (0.01, 25)
    slow = [goal for goal in wanted if goal[0] == "stack"]
    times = round_robin([c for g in wanted if g not in slow for c in g[1:3]], scene, seconds=seconds, rounds=rounds)
    times |= _few([c for g in slow for c in g[1:3]], scene, 3 if quick else 7)
    print(f"\nTrees of {N} arrays: µs, minimum of {rounds} rounds; ratio of minimums [middle half]")
    found = []
    for what, ours, theirs, limit in wanted:
        figure = compare(times[ours], times[theirs])
        met = figure["ratio"] <= limit
        micros = f"{figure['ours'] / 1e3:8.0f} / {figure['theirs'] / 1e3:<8.0f}"
        print(f"{what:<15}{micros}{ours:<34}/ {theirs:<52}{ratio(figure):<20}<= {limit:<6}{verdict(met)}")
        found.append({"what": what, "of": ours, "over": theirs, "limit": limit, "met": met} | figure)
    return found


def _few(codes, scene, rounds):
    """Measure slow cases, one call per round; a first round warms up."""
    timers = {code: timeit.Timer(code, globals=scene) for code in codes}
    times = {code: [] for code in codes}
    for _ in range(rounds + 1):
        for code, timer in timers.items():
            times[code].append(timer.timeit(1) * 1e9)
    return {code: each[1:] for code, each in times.items()}
