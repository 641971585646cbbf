"""Performance cliffs: the cost of a harmless detail of a call.

Each row is a ratio of two calls that a user would expect to cost nearly the same.
"""

import dataclasses
import datetime
import decimal
import enum
import fractions
import os
import pathlib
import subprocess
import sys
import time
import timeit
import types
import typing
import uuid

import dlx
from benchmarks.measure import compare, peer, ratio, verdict

ALONE, FEW, LIKE_ONE, TYPES, UNKNOWN = 1.5, 2.0, 1.15, 4.0, 3.0
# (limit in milliseconds for `import dlx` and a first call, frameworks already imported; the call)
FIRST = {
    "convert": (40, "dlx.convert(a, to='torch')"),
    "list": (45, "dlx.convert([a, a + 1], to='torch')"),
    "using": (60, "dlx.using('numpy')(lambda x: x)(t)"),
    "refusal": (60, "refused(lambda: dlx.convert(np.array(['text']), to='torch'))"),
}


class Colour(enum.Enum):
    """An enum; its member is one of the plain objects."""

    RED = 1


class Text(str):
    """A str subclass, like the labels of some libraries."""


class Sizes(typing.NamedTuple):
    """Numbers only."""

    height: int = 1
    width: int = 2


@dataclasses.dataclass
class Pair:
    """Two arrays, or two numbers."""

    a: object
    b: object


class Model:
    """A class with decorated functions."""

    def add(self, a, b):
        """Return the sum."""
        return a + b


def plain_objects(torch):
    """Return {name: object} with the values that batches hold in addition to arrays."""
    return {
        "date": datetime.date(2026, 1, 1),
        "timedelta": datetime.timedelta(1),
        "Path": pathlib.Path("a"),
        "Enum": Colour.RED,
        "Decimal": decimal.Decimal(1),
        "Fraction": fractions.Fraction(1, 2),
        "UUID": uuid.UUID(int=1),
        "torch.dtype": torch.float32,
        "torch.device": torch.device("cpu"),
        "function": plain_objects,
        "class": Pair,
        "module": types,
        "set": {1, 2},
        "frozenset": frozenset((1, 2)),
        "range": range(3),
        "slice": slice(3),
        "object": object(),
        "SimpleNamespace": types.SimpleNamespace(a=1),
        "str subclass": Text("a"),
        "tuple of ints": (1, 2),
        "list of ints": [1, 2],
        "named tuple of ints": Sizes(),
        "dataclass of ints": Pair(1, 2),
        "None": None,
        "bytes": b"ab",
    }


def _using_rows(scene, np, torch):
    """Return rows about arguments and results of decorated functions."""
    to_numpy = dlx.using("numpy")
    scene |= {
        "one": to_numpy(lambda a: a),
        "add": to_numpy(lambda a, b: a + b),
        "first": to_numpy(lambda a, *_, **__: a),
        "total": to_numpy(lambda a, axis=None: a.sum(axis)),
        "listed": to_numpy(lambda a: a[0] + a[1]),
        "named": to_numpy(lambda a: a["a"] + a["b"]),
        "paired": to_numpy(lambda a: a.a + a.b),
        "as_list": to_numpy(lambda a, b: [a, b]),
        "as_tuple": to_numpy(lambda a, b: (a, b)),
        "as_dict": to_numpy(lambda a, b: {"a": a, "b": b}),
        "model": Model(),
        "Pair": Pair,
        "object_": object(),
        "date": datetime.date(2026, 1, 1),
        "sizes": Sizes(),
        "path": pathlib.Path("a"),
        "m": torch.ones(2, 2),
    }
    Model.decorated = to_numpy(Model.add)
    both = "add(t, s)"
    rows = [
        ("the same array twice", "add(t, t)", both, ALONE),
        ("axis=(0,)", "total(m, axis=(0,))", "total(m, axis=0)", ALONE),
        ("a list of ints", "first(t, [1, 2])", "first(t, 1)", ALONE),
        ("a tuple of ints", "first(t, (1, 2))", "first(t, 1)", ALONE),
        ("a named tuple of ints", "first(t, sizes)", "first(t, 1)", ALONE),
        ("a dict of ints", "first(t, {'a': 1})", "first(t, 1)", ALONE),
        ("a date", "first(t, date)", "first(t, 1)", ALONE),
        ("a Path", "first(t, path)", "first(t, 1)", ALONE),
        ("a function", "first(t, len)", "first(t, 1)", ALONE),
        ("a dtype", "first(t, t.dtype)", "first(t, 1)", ALONE),
        ("an object", "first(t, object_)", "first(t, 1)", FEW),
        ("a keyword", "add(t, b=s)", both, ALONE),
        ("a default", "total(m)", "total(m, None)", ALONE),
        ("a method", "model.decorated(t, s)", both, ALONE),
        ("a list of two", "listed([t, s])", both, FEW),
        ("a tuple of two", "listed((t, s))", both, FEW),
        ("a dict of two", "named({'a': t, 'b': s})", both, FEW),
        ("a dataclass of two", "paired(Pair(t, s))", both, FEW),
        ("a list as result", "as_list(t, s)", "(one(t), one(s))", ALONE),
        ("a tuple as result", "as_tuple(t, s)", "(one(t), one(s))", ALONE),
        ("a dict as result", "as_dict(t, s)", "(one(t), one(s))", ALONE),
    ]
    return [(f"using: {name}", *row) for name, *row in rows]


def _container_rows(scene, torch):
    """Return rows about tvm-ffi's containers, passed to a function and read, eager and lazy."""
    if peer("tvm_ffi") is None:
        return []
    import tvm_ffi

    scene["echo"] = tvm_ffi.get_global_func("testing.echo")
    scene["eager"] = dlx.using("tvm_ffi")(scene["echo"])
    scene["lazy"] = dlx.using("tvm_ffi", lazy=True)(scene["echo"])
    rows = []
    for n in (1, 10, 100, 1000):
        scene[f"ts{n}"] = [torch.ones(4) for _ in range(n)]
        hand, limit = f"list(echo(ts{n}))", FEW if n == 1 else 1.0
        rows.append((f"tvm_ffi: list of {n}, eager", f"list(eager(ts{n}))", hand, limit))
        rows.append((f"tvm_ffi: list of {n}, lazy", f"list(lazy(ts{n}))", hand, limit))
    return rows


def _tree_rows(scene, np, torch):
    """Return rows about one plain object, or 100 unknown ones, among 100 arrays."""
    scene["arrays"] = arrays = [np.ones(4, "f4") for _ in range(100)]
    hand, rows = "convert(arrays, to='torch')", []
    for i, (name, obj) in enumerate(plain_objects(torch).items()):
        scene[f"with{i}"] = [*arrays, obj]
        rows.append((f"100 arrays and one {name}", f"convert(with{i}, to='torch')", hand, LIKE_ONE))
    scene["unknown"] = [*arrays, *(type(f"Unknown{i}", (), {})() for i in range(100))]
    scene["twice"] = [*arrays, arrays[0]]
    scene["nested"] = [arrays[i : i + 10] for i in range(0, 100, 10)]
    rows.append(("100 arrays and 100 unknown classes", "convert(unknown, to='torch')", hand, UNKNOWN))
    rows.append(("100 arrays, one of them twice", "convert(twice, to='torch')", hand, LIKE_ONE))
    rows.append(("100 arrays in ten lists", "convert(nested, to='torch')", hand, ALONE))
    return rows


def _type_rows(scene, np, torch):
    """Return rows about new array types, a class that changes, and changing targets."""
    kinds = [type(f"Kind{i}", (np.ndarray,), {}) for i in range(1000)]
    counted = type("Counted", (np.ndarray,), {"n": 0})
    targets = [name for name in ("numpy", "torch", "dlx", "tvm_ffi", "pyarrow", "jax") if peer(name) is not None]
    scene |= {
        "subclassed": [np.ones(4, "f4").view(kind) for kind in kinds],
        "alike": [np.ones(4, "f4").view(kinds[0]) for _ in kinds],
        "Counted": counted,
        "counted": np.ones(4, "f4").view(counted),
        "big": np.ones(1000, ">f4"),
        "target": Text("torch"),
        "targets": targets,
        "j": dlx.convert(np.ones(4, "f4"), to="jax") if "jax" in targets else None,
    }
    return [
        (
            "1,000 array types in turn",
            "[convert(x, to='torch') for x in subclassed]",
            "[convert(x, to='torch') for x in alike]",
            TYPES,
        ),
        (
            "a class attribute written before each call",
            "setattr(Counted, 'n', Counted.n + 1); convert(counted, to='torch')",
            "convert(counted, to='torch')",
            TYPES,
        ),
        ("1,000 big-endian elements", "convert(big, to='torch')", "torch.from_numpy(big.astype('f4'))", ALONE),
        ("by position", "convert(a, 'torch')", "convert(a, to='torch')", ALONE),
        ("a str subclass as target", "convert(a, to=target)", "convert(a, to='torch')", ALONE),
        ("the module as target", "convert(a, to=torch)", "convert(a, to='torch')", ALONE),
        ("the type as target", "convert(a, to=torch.Tensor)", "convert(a, to='torch')", ALONE),
        ("like=", "convert(a, like=t)", "convert(a, to='torch')", ALONE),
        *([("like= a jax array", "convert(a, like=j)", "convert(a, to='jax')", ALONE)] if "jax" in targets else []),
        ("like=, a list of 100 arrays", "convert(arrays, like=t)", "convert(arrays, to='torch')", ALONE),
        ("device='cpu'", "convert(a, to='torch', device='cpu')", "convert(a, to='torch')", ALONE),
        ("copy=False", "convert(a, to='torch', copy=False)", "convert(a, to='torch')", ALONE),
        (
            "all targets in turn",
            "[convert(a, to=each) for each in targets]",
            f"[{', '.join(f'convert(a, to={name!r})' for name in targets)}]",
            ALONE,
        ),
    ]


def _duration(timer):
    """Return the seconds of one call after warm-up calls."""
    found = min(timer.repeat(3, 1))
    return found if found > 1e-3 else min(timer.repeat(20, 1))


def _in_turn(codes, scene, seconds, rounds):
    """Return {code: nanoseconds per call in every round}; a slow call runs once per round."""
    timers = {code: timeit.Timer(code, timer=time.thread_time, globals=scene) for code in codes}
    numbers = {code: max(1, int(seconds / _duration(timer))) for code, timer in timers.items()}
    times = {code: [] for code in codes}
    for _ in range(rounds):
        for code, timer in timers.items():
            timer.timeit(1)  # else the first of two calls that run the same code pays for the processor's caches
            times[code].append(timer.timeit(numbers[code]) / numbers[code] * 1e9)
    return times


def _first_calls(rounds):
    """Return {name: milliseconds} of `import dlx` and a first call, in processes that have imported the frameworks."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # compile once
    times = {name: [] for name in FIRST}
    for _ in range(rounds):
        for name, (_, call) in FIRST.items():
            code = f"""
import time, numpy as np, torch
a, t = np.ones(4, "f4"), torch.ones(4)
def refused(call):
    try:
        call()
    except Exception as error:
        str(error)
start = time.thread_time()
import dlx
{call}
print((time.thread_time() - start) * 1e3)
"""
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
            times[name].append(float(done.stdout))
    return {name: min(each) for name, each in times.items()}


def cliffs(names, *, quick):
    """Measure and print each row; say which goals are met."""
    np, torch = names["np"], names["torch"]
    scene = {"convert": dlx.convert, "torch": torch, "np": np, "dlx": dlx}
    scene |= {"a": np.ones(4, "f4"), "t": torch.ones(4), "s": torch.zeros(4)}
    rows = [
        *_using_rows(scene, np, torch),
        *_container_rows(scene, torch),
        *_tree_rows(scene, np, torch),
        *_type_rows(scene, np, torch),
    ]
    seconds, rounds = (0.0005, 10) if quick else (0.001, 60)
    times = _in_turn(dict.fromkeys(code for row in rows for code in row[1:3]), scene, seconds, rounds)
    print(f"\nCliffs: a call, and the call without the detail, µs, minimum of {rounds} rounds; ratio [middle half]")
    found = []
    for name, ours, hand, limit in rows:
        figure = compare(times[ours], times[hand])
        met = figure["ratio"] <= limit
        print(
            f"{name:45}{figure['ours'] / 1e3:9.1f} /{figure['theirs'] / 1e3:9.1f}  {ratio(figure):24}"
            f"<= {limit:<5}{verdict(met)}"
        )
        found.append({"what": name, "of": ours, "over": hand, "limit": limit, "met": met} | figure)
    print("\n`import dlx` and a first call in a new process with the frameworks imported, ms of CPU")
    for name, ms in _first_calls(2 if quick else 7).items():
        limit = FIRST[name][0]
        print(f"first {name:39}{ms:9.1f}  <= {limit:<5}{verdict(ms <= limit)}")
        found.append({"what": f"first {name}", "ms": ms, "limit": limit, "met": ms <= limit})
    missed = sum(not each["met"] for each in found)
    print(f"{missed} of {len(found)} rows missed")
    return found
