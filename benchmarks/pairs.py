"""Every pair of frameworks on the host, for several kinds of arrays: dlx, and the best way by hand.

The best way by hand is the fastest of the expressions below with the same class, dtype, shape and values. It need not
share memory or preserve read-only, so some of these expressions are unsafe. Expressions that fail for a kind are
skipped; pairs without an expression are not compared.
"""

import gc
import importlib.util
import math
import os
import statistics

import dlx
from benchmarks.measure import compare, peer, round_robin

SOURCES = ("numpy", "torch", "jax", "tvm_ffi", "pyarrow", "buffer", "producer", "dlx")
TARGETS = ("numpy", "torch", "jax", "tvm_ffi", "pyarrow", "dlx")
FURTHER = {"tensorflow": "tf", "paddle": "paddle", "mlx": "mx", "warp": "wp", "onnxruntime": "ort"}  # if installed
KINDS = ("float32", "bfloat16", "read-only", "transposed", "0-d")
MEAN, WORST = 1.0, 2.0
_ROUNDS = {True: 7, False: 60}

# Expressions that users write; x is the source, bf16 is ml_dtypes.bfloat16.
_BY_HAND = {
    "numpy": (
        "x.numpy()",
        "np.asarray(x)",
        "np.from_dlpack(x)",
        "x.to_numpy()",
        "np.frombuffer(x, dtype='u1')",
        "x.view(torch.uint16).numpy().view(bf16)",
        "torch.from_dlpack(x).view(torch.uint16).numpy().view(bf16)",
    ),
    "torch": (
        "torch.from_numpy(x)",
        "torch.from_dlpack(x)",
        "torch.frombuffer(x, dtype=torch.uint8)",
        "torch.frombuffer(bytearray(x), dtype=torch.uint8)",
        "torch.from_numpy(x.to_numpy())",
        "torch.from_numpy(x.view('u2')).view(torch.bfloat16)",
        "torch.tensor(x)",
        "torch.from_numpy(x.copy())",
        "torch.from_numpy(x.to_numpy().copy())",
    ),
    "jax": (
        "jnp.asarray(x)",
        "jnp.from_dlpack(x)",
        "jnp.asarray(np.frombuffer(x, dtype='u1'))",
        "jnp.asarray(x.numpy())",
    ),
    "tvm_ffi": (
        "tvm_ffi.from_dlpack(x)",
        "tvm_ffi.from_dlpack(x.to_numpy().copy())",
        "tvm_ffi.from_dlpack(np.frombuffer(x, dtype='u1'))",
        "tvm_ffi.from_dlpack(x.copy())",
        "tvm_ffi.from_dlpack(torch.from_numpy(x.view('u2')).view(torch.bfloat16))",
    ),
    "pyarrow": (
        "pa.array(x)",
        "pa.array(x.numpy())",
        "pa.array(np.from_dlpack(x))",
        "pa.array(np.frombuffer(x, dtype='u1'))",
        "pa.Tensor.from_numpy(x)",
        "pa.Tensor.from_numpy(x.numpy())",
        "pa.Tensor.from_numpy(np.asarray(x))",
        "pa.Tensor.from_numpy(np.from_dlpack(x))",
        "pa.Tensor.from_dlpack(x)",
    ),
    "tensorflow": ("tf.experimental.dlpack.from_dlpack(x.__dlpack__())", "tf.convert_to_tensor(x)", "tf.constant(x)"),
    "paddle": ("paddle.from_dlpack(x)", "paddle.to_tensor(x)", "paddle.from_dlpack(x.copy())"),
    "mlx": ("mx.array(x)", "mx.from_dlpack(x)", "mx.array(np.from_dlpack(x))"),
    "warp": ("wp.from_dlpack(x)", "wp.from_numpy(x)", "wp.array(x, copy=False)", "wp.array(x)"),
    "onnxruntime": ("ort.OrtValue.ortvalue_from_numpy(x)", "ort.OrtValue.from_dlpack(x)"),
    "dlx": ("dlx.from_dlpack(x)", "tvm_ffi.from_dlpack(x)", "torch.from_dlpack(x)", "np.from_dlpack(x)"),
}


class Producer:
    """An object with only ``__dlpack__`` and ``__dlpack_device__``."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self._array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        return (1, 0)


def _arrays(np, names):
    """Return {(source, kind): array}, each 6 numbers or 1."""
    torch, jnp, tvm_ffi, pa, bf16 = (names.get(name) for name in ("torch", "jnp", "tvm_ffi", "pa", "bf16"))
    base = np.frombuffer(dlx.empty((6,), "float32"), "f4").reshape(2, 3)  # aligned for every framework
    base[:] = np.arange(6).reshape(2, 3)
    locked = base.view()
    locked.flags.writeable = False
    made = {
        ("numpy", "float32"): base,
        ("numpy", "read-only"): locked,
        ("numpy", "transposed"): base.T,
        ("numpy", "0-d"): base[0, 0:1].reshape(()),
        ("buffer", "float32"): bytearray(base.tobytes()),
        ("buffer", "read-only"): base.tobytes(),
    }
    if bf16 is not None:
        made["numpy", "bfloat16"] = base.astype(bf16)
    if torch is not None:
        made |= {("torch", kind): torch.from_numpy(made["numpy", kind]) for kind in ("float32", "transposed", "0-d")}
        made["torch", "bfloat16"] = made["torch", "float32"].to(torch.bfloat16)
    if jnp is not None:
        made["jax", "read-only"] = jnp.array(base)
        made["jax", "bfloat16"] = jnp.array(base, "bfloat16")
        made["jax", "0-d"] = jnp.float32(1)
    if tvm_ffi is not None:
        made |= {("tvm_ffi", kind): tvm_ffi.from_dlpack(made["torch", kind]) for _, kind in list(made) if _ == "torch"}
    if pa is not None:
        made["pyarrow", "read-only"] = pa.array(base.ravel())
    for name, code in {
        "tf": "tf.constant(x)", "paddle": "paddle.to_tensor(x)", "mx": "mx.array(x)", "wp": "wp.array(x, device='cpu')",
        "ort": "ort.OrtValue.ortvalue_from_numpy(x)",
    }.items():  # fmt: skip
        if name in names:
            kind = "read-only" if name == "tf" else "float32"  # its tensors are constant
            made[next(each for each in FURTHER if FURTHER[each] == name), kind] = eval(code, names | {"x": base})
    made |= {("producer", kind): Producer(made["numpy", kind]) for kind in ("float32", "transposed", "0-d")}
    made |= {("dlx", kind): dlx.convert(made["numpy", kind], to="dlx") for _, kind in list(made) if _ == "numpy"}
    return made


def pairs(*, quick):
    """Measure all pairs, print a table, and say which goals are met."""
    np = peer("numpy")
    names = {"dlx": dlx, "np": np, "torch": peer("torch"), "tvm_ffi": peer("tvm_ffi"), "pa": peer("pyarrow")}
    names["jnp"] = peer("jax.numpy")
    ml_dtypes = peer("ml_dtypes")
    names["bf16"] = ml_dtypes and ml_dtypes.bfloat16
    names |= {short: peer(_PACKAGES.get(name, name)) for name, short in FURTHER.items() if _is_installed(name)}
    names = {name: value for name, value in names.items() if value is not None}
    found, load = [], [os.getloadavg()[0]]
    for (source, kind), array in _arrays(np, names).items():
        for to in (*TARGETS, *FURTHER):
            if to == source or (to not in ("numpy", "dlx") and _module(to) not in names):
                continue
            figure = _pair(names | {"x": array}, to, quick=quick)
            if figure is not None:
                found.append({"source": source, "kind": kind, "to": to, **figure})
    load.append(os.getloadavg()[0])
    measured = {"pairs": found, "rounds": _ROUNDS[quick], "load": load, "cores": os.cpu_count()}
    _print(measured)
    return measured


def _module(to):
    return ({"jax": "jnp", "pyarrow": "pa"} | FURTHER).get(to, to)


_PACKAGES = {"mlx": "mlx.core"}


def _is_installed(name):
    """Return whether a further framework is installed, without a note."""
    return importlib.util.find_spec(name) is not None


def targets(measured):
    """Return the targets that have a column."""
    return [*TARGETS, *(each for each in FURTHER if any(each == pair["to"] for pair in measured["pairs"]))]


def _pair(scene, to, *, quick):
    """Measure one conversion and the fastest way by hand; return None if either is missing."""
    call = f"dlx.convert(x, to={to!r})"
    try:
        expected = eval(call, scene)
    except dlx.errors.DlxError:
        return None
    codes = [code for code in _BY_HAND[to] if _same(code, scene, expected)]
    if not codes:
        return None
    gc.collect()
    times = round_robin([call, *codes], scene, seconds=0.0005, rounds=_ROUNDS[quick])
    best = min(codes, key=lambda code: min(times[code]))
    return {"by_hand": best, **compare(times[call], times[best])}


def _same(code, scene, expected):
    """Return whether an expression works and has dlx's result; a `dlx.Tensor` equals any array."""
    try:
        made = eval(code, scene)
        if not isinstance(expected, dlx.Tensor) and type(made) is not type(expected):
            return False
        if code.startswith("dlx."):
            return False
        one, other = (dlx.convert(each, to="dlx", copy=True) for each in (made, expected))
        return (one.shape, one.dtype) == (other.shape, other.dtype) and _bytes(one) == _bytes(other)
    except Exception:
        return False


def _bytes(tensor):
    return bytes(dlx.ffi.buffer(dlx.ffi.cast("char *", tensor.data_ptr), tensor.nbytes))


def rows(measured):
    """Yield (name of a row, {target: figure of the pair})."""
    for source in (*SOURCES, *FURTHER):
        for kind in KINDS:
            row = {each["to"]: each for each in measured["pairs"] if (each["source"], each["kind"]) == (source, kind)}
            if row:
                yield f"{source}, {kind}", row


def summary(measured):
    """Return the geometric mean, the worst pair, and a description of the machine."""
    found = measured["pairs"]
    mean = math.exp(statistics.fmean(math.log(each["ratio"]) for each in found))
    load = " to ".join(f"{each:.1f}" for each in sorted(measured["load"]))
    words = f"{len(found)} pairs and kinds, minimum of {measured['rounds']} rounds, "
    return mean, max(found, key=lambda each: each["ratio"]), words + f"{measured['cores']} cores at a load of {load}"


def _print(measured):
    mean, worst, words = summary(measured)
    print(f"\nEvery pair on the host, ratio to the best way by hand ({words})")
    print(f"{'':22}" + "".join(f"{to:>12}" for to in targets(measured)))
    for name, row in rows(measured):
        cells = "".join(f"{row[to]['ratio']:12.2f}" if to in row else f"{'':>12}" for to in targets(measured))
        print(f"{name:22}{cells}")
    print(f"geometric mean {mean:.2f} (goal {MEAN}), worst {worst['ratio']:.2f} (goal {WORST}): ", end="")
    print(f"{worst['source']} -> {worst['to']}, {worst['kind']}, against {worst['by_hand']}")


BEGIN, END = "<!-- pairs: begin -->", "<!-- pairs: end -->"


def page(text, measured):
    """Return a Markdown page with a new table of pairs between its two marks."""
    mean, worst, words = summary(measured)
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"cannot update the page: the marks {BEGIN} and {END} are missing")
    lines = [
        f"{words[0].upper()}{words[1:]}. Geometric mean **{mean:.2f}** (goal {MEAN}); worst **{worst['ratio']:.2f}**",
        f"(goal {WORST}): {worst['source']} → {worst['to']}, {worst['kind']}, against `{worst['by_hand']}`.",
        "",
        f"| from | {' | '.join(targets(measured))} |",
        "|---|" + "---|" * len(targets(measured)),
    ]
    for name, row in rows(measured):
        cells = [f"{row[to]['ratio']:.2f}" if to in row else "" for to in targets(measured)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([before + BEGIN, "", *lines, "", END + after])
