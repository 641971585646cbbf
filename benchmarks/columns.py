"""Columns of numbers, and frames, from each installed library."""

import gc

import dlx
from benchmarks import floor
from benchmarks.measure import peer, round_robin, verdict

COLUMN_US = 1.5
FRAME_RATIO = 1.5
ROWS = 1000
WIDTHS = (2, 20, 200)
_ARRAY, _STREAM = "__arrow_c_array__", "__arrow_c_stream__"

# A column x of float64; the library's own export (an expression, or the method of Arrow's interface, read to its end
# by a program in C); and the fastest manual conversion to a numpy array.
_LIBRARIES = {
    "pyarrow": ("m.array(a)", _ARRAY, "x.to_numpy()"),
    "pandas": ("m.Series(a)", "x._values", "x.to_numpy()"),
    "polars": ("m.Series(a)", _STREAM, "x.to_numpy()"),
    "nanoarrow": ("m.Array(memoryview(a))", _STREAM, "np.frombuffer(x.buffers[1])"),
    "narwhals": ("m.from_native(polars.Series(a), series_only=True)", _STREAM, "x.to_numpy()"),
}
# A frame x of such columns, and the manual conversion to a dict of numpy arrays.
_FRAMES = {
    "pyarrow.table": "{n: c.to_numpy() for n, c in zip(x.column_names, x.columns)}",
    "pyarrow.record_batch": "{n: c.to_numpy() for n, c in zip(x.column_names, x.columns)}",
    "pandas.DataFrame": "{n: c.to_numpy() for n, c in x.items()}",
    "polars.DataFrame": "{c.name: c.to_numpy() for c in x}",
}
_CALL = "dlx.convert(x, to='numpy')"


def columns(*, quick):
    """Measure a column and frames of each library; print them and say which goals are met."""
    return _columns(quick) + _frames(quick)


def _columns(quick):
    np, found, built = peer("numpy"), [], floor.build()
    base = np.arange(float(ROWS))
    print(f"\nA column of {ROWS} float64 to numpy, us (goal: {COLUMN_US} over the library's own export)")
    print(f"{'':<12}{'dlx':>8}{'its own':>9}{'by hand':>9}")
    for name, (column, asked, by_hand) in _LIBRARIES.items():
        modules = {"m": peer(name)} | ({"polars": peer("polars")} if "polars" in column else {})
        if None in modules.values():
            continue
        names = modules | {"np": np, "dlx": dlx, "a": base, "floor": built}
        names["x"] = eval(column, names)
        result, again = (dlx.convert(names["x"], to="numpy", copy=False) for _ in range(2))
        assert result.tolist() == base.tolist() and result.ctypes.data == again.ctypes.data
        own = asked if asked.startswith("x") else f"floor.read_arrow(x, {asked!r})" if built else f"x.{asked}()"
        figure = dict(zip(("us", "own_us", "by_hand_us"), _least([_CALL, own, by_hand], names, quick), strict=True))
        found.append({"library": name, **figure})
        met = figure["us"] - figure["own_us"] <= COLUMN_US
        print(f"{name:<12}{figure['us']:>8.2f}{figure['own_us']:>9.2f}{figure['by_hand_us']:>9.2f}  {verdict(met)}")
    return found


def _frames(quick):
    np, found = peer("numpy"), []
    print(f"\nFrames of such columns to numpy, us, and ns a column (goal: {FRAME_RATIO} of by hand)")
    print(f"{'':<22}{'columns':>7}{'dlx':>9}{'by hand':>9}{'ratio':>7}{'ns':>7}{'by hand':>9}")
    for name, by_hand in _FRAMES.items():
        library, _, make = name.partition(".")
        module = peer(library)
        for width in WIDTHS if module else ():
            many = {f"c{i}": np.arange(float(ROWS)) for i in range(width)}
            names = {"dlx": dlx, "x": getattr(module, make)(many)}
            ours, theirs = dlx.convert(names["x"], to="numpy"), eval(by_hand, names)
            assert all(ours[column].ctypes.data == theirs[column].ctypes.data for column in many)
            us, hand_us = _least([_CALL, by_hand], names, quick)
            each, hand_each = us / width * 1e3, hand_us / width * 1e3
            found.append({"frame": name, "columns": width, "us": us, "by_hand_us": hand_us})
            print(f"{name:<22}{width:>7}{us:>9.1f}{hand_us:>9.1f}{us / hand_us:>7.2f}{each:>7.0f}{hand_each:>9.0f}"
                  f"  {verdict(us / hand_us <= FRAME_RATIO)}")  # fmt: skip
    return found


def _least(codes, names, quick):
    """Return the minimum of each expression in microseconds."""
    gc.collect()
    times = round_robin(codes, names, seconds=0.001, rounds=7 if quick else 200)
    return [min(times[code]) / 1e3 for code in codes]
