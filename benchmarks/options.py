"""`out=`, `dtype=` and frames, against the best way by hand: the ratio of the minimums."""

import dlx
from benchmarks.measure import compare, peer, race, ratio, verdict


def options(np, *, quick=False):
    """Measure each case; print it and say whether its goal is met."""
    torch = peer("torch")
    if torch is None:
        return {}
    torch.set_num_threads(1)  # otherwise torch's idle threads take time from the next case
    found = {}
    print("\nOptions: dlx against the best way by hand")
    for name, goal, ours, theirs, number in (*_outputs(np, torch, quick), *_casts(np, torch), *_frames(np, torch)):
        figure = compare(*race(ours, theirs, number=number, rounds=7 if quick else 25))
        found[name] = figure
        met = verdict(figure["ratio"] <= goal)
        print(f"{name:<48}{figure['ours'] * 1e6:10.1f} µs  {ratio(figure):<26}<= {goal:<4}{met}")
    return found


def _outputs(np, torch, quick):
    for megabytes in (1, 16) if quick else (1, 16, 128):
        source, there = np.ones(megabytes * 250_000, "f4"), np.zeros(megabytes * 250_000, "f4")
        tensor, target = torch.from_numpy(source), torch.zeros(megabytes * 250_000)
        number = max(1, 100 // megabytes)
        yield (
            *(f"out=, numpy -> torch, {megabytes} MB, copy_", 1.1),
            *(lambda s=source, t=target: dlx.convert(s, out=t), lambda s=tensor, t=target: t.copy_(s), number),
        )
        yield (
            *(f"out=, numpy -> numpy, {megabytes} MB, np.copyto", 1.1),
            *(lambda s=source, t=there: dlx.convert(s, out=t), lambda s=source, t=there: np.copyto(t, s), number),
        )
    for count in (2, 100):
        tree = [np.ones(100, "f4") for _ in range(count)]
        there = [torch.zeros(100) for _ in range(count)]
        yield (
            *(
                f"out=, a list of {count} arrays, copy_",
                6 if count == 2 else 4,
                lambda s=tree, t=there: dlx.convert(s, out=t),
            ),
            *(lambda s=tree, t=there: [to.copy_(torch.from_numpy(x)) for x, to in zip(s, t, strict=True)], 100),
        )
    for shape in ((3, 8, 8), (3, 32, 32)):
        rows, batch = [np.ones(shape, "f4") for _ in range(64)], torch.zeros(64, *shape)
        array = batch.numpy()
        yield (
            *(f"stack(out=), 64 rows of {shape}, np.stack", 1.5),
            *(lambda r=rows, b=batch: dlx.stack(r, out=b), lambda r=rows, a=array: np.stack(r, out=a), 20),
        )


def _casts(np, torch):
    for count in (1_000, 1_000_000):
        wide = np.ones(count)
        kept = np.broadcast_to(1.0, count).copy()
        kept.flags.writeable = False
        number = max(1, 100_000 // count)
        yield (
            *(f"dtype=, numpy -> torch, {count:,}, astype", 1.5 if count > 1_000 else 10),
            *(lambda x=wide: dlx.convert(x, "torch", dtype="float32"), lambda x=wide: torch.from_numpy(x.astype("f4"))),
            number,
        )
        yield (
            *(f"dtype=, read-only -> torch, {count:,}, tensor", 1.5 if count > 1_000 else 10),
            *(
                lambda x=kept: dlx.convert(x, "torch", dtype="float32"),
                lambda x=kept: torch.tensor(x, dtype=torch.float32),
            ),
            number,
        )

    x, tensor = np.ones(1_000), torch.ones(1_000, dtype=torch.float64)
    for name, source, options in (
        ("like=", x, {"like": tensor}),
        ("device=", x, {"to": "torch", "device": "cpu"}),
        ("copy=", x, {"to": "torch", "copy": True}),
        ("torch -> torch", tensor, {"to": "torch"}),
    ):
        calls = lambda x=x: torch.from_numpy(x.astype("f4")), lambda t=tensor: t.to(torch.float32)
        yield (
            *(f"dtype=, {name}, 1,000", 10, lambda s=source, o=options: dlx.convert(s, dtype="float32", **o)),
            *(calls[source is tensor], 100),
        )
    yield (
        *("dtype= that it has, 1,000", 20, lambda x=x: dlx.convert(x, "torch", dtype="float64")),
        *(lambda x=x: torch.from_numpy(x), 100),
    )

    for old, new in _PAIRS:
        x, wanted = (np.arange(1_000_000) % 100).astype(old), getattr(torch, new)
        calls = (
            lambda x=x, new=new: torch.from_numpy(x.astype(new)),
            lambda x=x, wanted=wanted: torch.from_numpy(x).to(wanted),
        )
        least = [min(times) for times in race(*calls)]
        yield (
            *(f"dtype=, numpy {old} -> torch {new}, 1,000,000", 1.1),
            *(lambda x=x, d={old: new}: dlx.convert(x, "torch", dtype=d), calls[least[1] < least[0]], 5),
        )


_PAIRS = (
    *(("float64", "float32"), ("float32", "float64"), ("float32", "float16"), ("float16", "float32")),
    *(("int64", "int32"), ("int64", "float32"), ("uint8", "float32"), ("float32", "uint8"), ("float64", "int64")),
)
"""Dtypes of numpy and of torch; by hand, `astype` or `to`, whichever takes less time."""


_SHAPES = (100, 4), (1_000, 10), (100_000, 20), (1_000, 200), (1_000_000, 4)
_MIXED = "f8", "i8", "f4", "?"


def _frames(np, torch):
    """Short, long, wide and narrow frames of one dtype or several, against the frame's own copy."""
    polars, pandas, pyarrow = peer("polars"), peer("pandas"), peer("pyarrow")
    for rows, width in _SHAPES:
        number = max(1, 100_000 // (rows * width))
        values = np.random.default_rng(0).standard_normal((width, rows)) * 100
        many = {
            None: {f"c{i}": column for i, column in enumerate(values)},
            "float32": {f"c{i}": column.astype(_MIXED[i % 4]) for i, column in enumerate(values)},
        }
        for dtype, columns in many.items():
            label = f"stack {rows:,} x {width}, {dtype or 'as it is'}"
            if polars is not None:
                frame, native = polars.DataFrame(columns), polars.Float32 if dtype else polars.Float64
                yield (
                    *(f"{label}, polars' to_torch", 1.2),
                    lambda f=frame, d=dtype: dlx.stack(f, "torch", axis=1, dtype=d),
                    lambda f=frame, d=native: f.to_torch(dtype=d),
                    number,
                )
            if pandas is not None:
                frame = pandas.DataFrame(columns)
                yield (
                    *(f"{label}, pandas' to_numpy", 1.2),
                    lambda f=frame, d=dtype: dlx.stack(f, "torch", axis=1, dtype=d),
                    lambda f=frame, d=dtype: torch.from_numpy(f.to_numpy(dtype=d, copy=True)),
                    number,
                )
                frame = pandas.DataFrame(columns, copy=False)  # a block for each column
                yield (
                    *(f"{label}, pandas' to_numpy, many blocks", 1.2),
                    lambda f=frame, d=dtype: dlx.stack(f, "torch", axis=1, dtype=d),
                    lambda f=frame, d=dtype: torch.from_numpy(f.to_numpy(dtype=d, copy=True)),
                    number,
                )
            if pyarrow is not None and not dtype:
                frame = pyarrow.table(columns)
                yield (
                    *(f"{label}, pyarrow's columns", 1.2 if number == 1 else 2.5),
                    lambda f=frame: dlx.stack(f, "torch", axis=1),
                    lambda f=frame: torch.from_numpy(np.column_stack([each.to_numpy() for each in f.columns])),
                    number,
                )
