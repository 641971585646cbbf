"""`using`: the cost of a decorated call over the function itself and the necessary conversions."""

import dlx
from benchmarks.measure import peer, round_robin, verdict

# In calls of an empty Python function, measured in the same run: 30 take about a microsecond.
NOTHING, CONVERTED = 30.0, 60.0
CALLERS = {"torch": "t", "numpy": "a", "tvm_ffi": "v"}


def using(names, *, quick):
    """Measure decorated functions for callers of each framework, print them, and say which goals are met."""
    scene = {"dlx": dlx, "identity": lambda x: x, "t": names["t"], "a": names["a"]}
    tvm_ffi = peer("tvm_ffi")
    if tvm_ffi is not None:
        scene["v"] = tvm_ffi.from_dlpack(names["t"])
    callers = {name: code for name, code in CALLERS.items() if code in scene}
    cases = []
    for to in callers:
        made = dlx.convert(scene["t"], to=to)
        scene |= {f"made_{to}": made, f"use_{to}": dlx.using(to)(lambda x, made=made: made)}
        for caller, x in callers.items():
            parts = []
            if caller != to:
                parts = [f"dlx.convert({x}, to={to!r})", f"dlx.convert(made_{to}, to={caller!r})"]
            cases.append((to, caller, f"use_{to}({x})", parts))
    codes = dict.fromkeys(["identity(t)", *(code for *_, code, parts in cases for code in (code, *parts))])
    seconds, rounds = (0.0002, 40) if quick else (0.0002, 400)  # short rounds: only the minimum counts
    times = round_robin(codes, scene, seconds=seconds, rounds=rounds)
    least = {code: min(each) for code, each in times.items()}
    call = least["identity(t)"]
    print(f"\nusing, ns: minimum of {rounds} rounds; a call of a Python function takes {call:.0f}")
    found = []
    for to, caller, code, parts in cases:
        over, limit = least[code] - call - sum(least[part] for part in parts), CONVERTED if parts else NOTHING
        figure = {"to": to, "caller": caller, "ns": least[code], "over": over, "calls": over / call, "limit": limit}
        found.append(figure | {"met": figure["calls"] <= limit})
        what = f"{to} for {caller}" if parts else f"{to}, nothing to convert"
        print(
            f"{what:30}{least[code]:8.0f}, over function and conversions {over:6.0f}: {figure['calls']:4.0f} calls"
            f"  <= {limit:.0f}  {verdict(figure['calls'] <= limit)}"
        )
    return found
