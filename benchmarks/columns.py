"""Columns of numbers out of each library that is installed, and frames of them."""

import gc

import dlx
from benchmarks import floor
from benchmarks.measure import peer, round_robin, verdict

COLUMN_US = 1.5
ROWS = 1000
_ARRAY, _STREAM = "__arrow_c_array__", "__arrow_c_stream__"

# A column x of float64, a frame of three, what the library itself does to give the column out (an expression, or the
# method of Arrow's interface, read to its end by a program in C), and the fastest way by hand to an array of numpy.
_LIBRARIES = {
    "pyarrow": ("m.array(a)", "m.table(three)", _ARRAY, "x.to_numpy()"),
    "pandas": ("m.Series(a)", "m.DataFrame(three)", "x._values", "x.to_numpy()"),
    "polars": ("m.Series(a)", "m.DataFrame(three)", _STREAM, "x.to_numpy()"),
    "nanoarrow": ("m.Array(memoryview(a))", "", _STREAM, "np.frombuffer(x.buffers[1])"),
    "narwhals": ("m.from_native(polars.Series(a), series_only=True)", "", _STREAM, "x.to_numpy()"),
}
_CALL = "dlx.convert(x, to='numpy')"


def columns(*, quick):
    """Measure a column and a frame out of each library; print them, and say which goals are met."""
    np, found, built = peer("numpy"), [], floor.build()
    base = np.arange(float(ROWS))
    print(f"\nA column of {ROWS} float64 to numpy, us (goal: {COLUMN_US} over what the library does), and frames")
    print(f"{'':<12}{'dlx':>8}{'its own':>9}{'by hand':>9}{'frame':>8}")
    for name, (column, frame, asked, by_hand) in _LIBRARIES.items():
        module = peer(name)
        if module is None:
            continue
        names = {"m": module, "np": np, "dlx": dlx, "a": base, "three": dict.fromkeys("uvw", base)}
        names |= {"polars": peer("polars") if name == "narwhals" else None, "floor": built}
        names["x"] = eval(column, names)
        result, again = (dlx.convert(names["x"], to="numpy", copy=False) for _ in range(2))
        assert result.tolist() == base.tolist() and result.ctypes.data == again.ctypes.data
        own = asked if asked.startswith("x") else f"floor.read_arrow(x, {asked!r})" if built else f"x.{asked}()"
        figure = dict(zip(("us", "own_us", "by_hand_us"), _least([_CALL, own, by_hand], names, quick), strict=True))
        if frame:
            names["x"] = eval(frame, names)
            assert all(each.tolist() == base.tolist() for each in dlx.convert(names["x"], to="numpy").values())
            figure["frame_us"] = _least([_CALL], names, quick)[0]
        found.append({"library": name, **figure})
        met = figure["us"] - figure["own_us"] <= COLUMN_US
        print(f"{name:<12}{figure['us']:>8.2f}{figure['own_us']:>9.2f}{figure['by_hand_us']:>9.2f}"
              f"{figure.get('frame_us', 0):>8.0f}  {verdict(met)}")  # fmt: skip
    return found


def _least(codes, names, quick):
    """Return the least microseconds of each expression."""
    gc.collect()
    times = round_robin(codes, names, seconds=0.001, rounds=7 if quick else 200)
    return [min(times[code]) / 1e3 for code in codes]
