"""`stack` and `plan`, unusual arrays, and records of arrays: dlx, and the same by hand."""

import collections
import ctypes
import dataclasses
import time
import timeit

from benchmarks.measure import compare, peer, ratio, verdict
from dlx.adapter import buffer_exchange

N = 100
NAMES = [f"x{i}" for i in range(N)]
# (what, ours, theirs, at most)
GOALS = [
    ("stack of 2", 'dlx.stack(two, to="numpy")', "np.stack(two)", 1.0),
    ("stack of 1000", 'dlx.stack(many, to="numpy")', "np.stack(many)", 1.0),
    ("stack, jax", 'dlx.stack(in_jax, to="torch")', "torch.from_numpy(np.stack([np.asarray(x) for x in in_jax]))", 1.2),
    (
        "stack, pyarrow",
        'dlx.stack(arrow, to="torch")',
        "torch.from_numpy(np.stack([x.to_numpy() for x in arrow]))",
        1.2,
    ),
    ("stack, PIL", 'dlx.stack(images, to="torch")', "torch.from_numpy(np.stack([np.asarray(x) for x in images]))", 1.2),
    ("stack, mixed", 'dlx.stack(mixed, to="torch")', "torch.from_numpy(np.stack([np.asarray(x) for x in mixed]))", 1.1),
    ("ndarray's subclass", 'dlx.convert(noted, to="torch")', "torch.from_numpy(noted)", 2.0),
    (
        "bfloat16",
        'dlx.convert(bf16, to="torch")',
        'torch.from_numpy(bf16.view("u2")).view(torch.bfloat16)',
        1.0,
    ),
    (
        "float8",
        'dlx.convert(f8, to="torch")',
        'torch.from_numpy(f8.view("u1")).view(torch.float8_e4m3fn)',
        1.0,
    ),
    ("bfloat16, back", 'dlx.convert(t16, to="numpy")', "t16.view(torch.uint16).numpy().view(bf16.dtype)", 1.0),
    ("float8, back", 'dlx.convert(t8, to="numpy")', "t8.view(torch.uint8).numpy().view(f8.dtype)", 1.0),
    ("tensor's subclass", 'dlx.convert(image, to="numpy")', "image.numpy()", 2.0),
    ("a graph, detached", 'dlx.convert(grad, to="numpy", detach=True)', "grad.detach().numpy()", 1.0),
    ("conj bit", 'dlx.convert(conj, to="numpy")', "conj.resolve_conj().numpy()", 10.0),
    ("neg bit", 'dlx.convert(conj.imag, to="numpy")', "conj.imag.resolve_neg().numpy()", 10.0),
    ("other byte order", 'dlx.convert(swapped, to="torch")', 'torch.from_numpy(swapped.astype("f4"))', 10.0),
    ("Arrow's chunks", 'dlx.convert(chunks, to="numpy")', "chunks.to_numpy()", 4.0),
    ("like=", "dlx.convert(two[0], like=tensor)", 'dlx.convert(two[0], to="torch")', 1.3),
    ("from_dlpack", "dlx.from_dlpack(tensor)", 'dlx.convert(tensor, to="dlx")', 1.1),
    ("bytearray", 'dlx.convert(buffer, to="torch")', "torch.frombuffer(buffer, dtype=torch.uint8)", 1.5),
    ("bytes -> numpy", 'dlx.convert(fixed, to="numpy")', 'np.frombuffer(fixed, "u1")', 1.5),
    ("ctypes", 'dlx.convert(numbers, to="torch")', "torch.frombuffer(numbers, dtype=torch.float32)", 1.5),
    ("a table of its own", 'dlx.convert(tabled, to="torch")', "torch.frombuffer(tabled, dtype=torch.uint8)", 1.0),
    ("the same, numpy", 'dlx.convert(tabled, to="numpy")', 'np.frombuffer(tabled, "u1")', 1.0),
    ("numpy's scalar", 'dlx.convert(scalar, to="torch")', "torch.from_numpy(np.array(scalar))", 2.0),
    ("image -> numpy", 'dlx.convert(images[0], to="numpy")', "np.asarray(images[0])", 2.0),
    ("there already", 'dlx.convert(tensor, to="torch", device="cpu")', 'tensor.to("cpu")', 1.0),
    ("and by an object", 'dlx.convert(tensor, to="torch", device=cpu)', "tensor.to(cpu)", 1.0),
    ("a copy within dlx", 'dlx.convert(own_tensor, to="dlx", copy=True)', "np.copy(two[0])", 1.0),
    ("empty, torch", 'dlx.convert(empty, to="numpy")', "empty.numpy()", 1.0),
    (
        "dict, device=",
        'dlx.convert(batch, to="torch", device="cpu")',
        "{k: torch.from_numpy(x) for k, x in batch.items()}",
        1.5,
    ),
    ("read-only, shared", 'dlx.convert(in_jax[0], to="torch", readonly="share")', "torch.from_dlpack(in_jax[0])", 1.0),
    ("numpy -> jax", 'dlx.convert(aligned, to="jax")', "jnp.asarray(aligned)", 1.2),
    ("its floor", "jax_takes(own_tensor.__dlpack__())", "jnp.asarray(aligned)", 1.2),
    ("tvm Array of 10", 'dlx.convert(ten, to="torch")', "[torch.from_dlpack(x) for x in ten]", 0.6),
    ("__dlpack__ -> numpy", 'dlx.convert(own[0], to="numpy")', "np.from_dlpack(own[0])", 1.5),
    ("__dlpack__ only", 'dlx.convert(own[0], to="torch")', "torch.from_dlpack(own[0])", 1.5),
    (f"list of {N} such", 'dlx.convert(own, to="torch")', "[torch.from_dlpack(x) for x in own]", 1.5),
    ("namedtuple", 'dlx.convert(named, to="torch")', "type(named)(*[torch.from_numpy(x) for x in named])", 1.5),
    (
        "OrderedDict",
        'dlx.convert(ordered, to="torch")',
        "type(ordered)((k, torch.from_numpy(x)) for k, x in ordered.items())",
        1.5,
    ),
    (
        "dataclass",
        'dlx.convert(record, to="torch")',
        "type(record)(*[torch.from_numpy(getattr(record, k)) for k in names])",
        1.5,
    ),
    (
        "attrs",
        'dlx.convert(attrs, to="torch")',
        "type(attrs)(*[torch.from_numpy(getattr(attrs, k)) for k in names])",
        1.5,
    ),
]
_EACH = {
    "numpy": "two[0]",
    "torch": "tensor",
    "jax": "in_jax[0]",
    "tvm_ffi": "in_tvm_ffi",
    "pyarrow": "arrow[0]",
    "dlx": "own_tensor",
}
# (what, code, at most)
MICROSECONDS = [
    *((f"describe, {name}", f"dlx.describe({array})", 5.0) for name, array in _EACH.items()),
    *((f"plan, {name}", f'dlx.plan({array}, to="numpy")', 8.0) for name, array in _EACH.items() if name != "numpy"),
    *((f"plan, numpy -> {to}", f'dlx.plan(two[0], to="{to}")', 8.0) for to in _EACH if to != "numpy"),
    *((f"shares, {name}", f"dlx.shares_memory({array}, {array})", 1.0) for name, array in _EACH.items()),
]


class Own:
    """An array of a framework without an adapter."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def verbs(names, *, quick):
    """Measure the goals above, print them, and say which are met; skip cases of missing frameworks."""
    scene = _scene(names)
    wanted = [goal for goal in GOALS if all(_works(code, scene) for code in goal[1:3])]
    alone = [goal for goal in MICROSECONDS if _works(goal[1], scene)]
    codes = [code for goal in wanted for code in goal[1:3]] + [code for _, code, _ in alone]
    rounds = 15 if quick else 150
    times = _short(codes, scene, rounds)
    print(f"\nOther verbs, other arrays: µs, minimum of {rounds} rounds; ratio of minimums [middle half]")
    found = []
    for what, ours, theirs, limit in wanted:
        figure = compare(times[ours], times[theirs])
        met = figure["ratio"] <= limit
        micros = f"{figure['ours'] / 1e3:8.1f} / {figure['theirs'] / 1e3:<8.1f}"
        print(f"{what:<20}{micros}{ratio(figure):<20}<= {limit:<6}{verdict(met):<8}{theirs}")
        found.append({"what": what, "of": ours, "over": theirs, "limit": limit, "met": met} | figure)
    for what, code, limit in alone:
        micros = min(times[code]) / 1e3
        print(f"{what:<24}{micros:8.2f} µs  <= {limit:<6}{verdict(micros <= limit)}")
        found.append({"what": what, "of": code, "µs": micros, "limit": limit, "met": micros <= limit})
    return found


def _scene(names):
    np, torch = names["np"], names["torch"]
    many = [np.ones(3, "f4") for _ in range(1000)]
    arrays, rows = many[:N], [np.ones(64, "f4") for _ in range(16)]
    scene = {"dlx": names["dlx"], "np": np, "torch": torch, "names": NAMES, "two": many[:2], "many": many}
    scene["own"] = [Own(array) for array in arrays]
    scene["named"] = collections.namedtuple("Named", NAMES)(*arrays)
    scene["ordered"] = collections.OrderedDict(zip(NAMES, arrays, strict=True))
    scene["record"] = dataclasses.make_dataclass("Record", NAMES)(*arrays)
    if attr := peer("attr"):
        scene["attrs"] = attr.make_class("Attrs", NAMES)(*arrays)
    scene |= {
        "tensor": torch.ones(2, 3),
        "empty": torch.empty(0, 3),
        "own_tensor": names["dlx"].convert(many[0], to="dlx"),
    }
    scene["noted"] = many[0].view(type("Noted", (np.ndarray,), {}))
    scene |= {"image": torch.ones(2, 3).as_subclass(type("Image", (torch.Tensor,), {})), "cpu": torch.device("cpu")}
    scene |= {"grad": torch.ones(2, 3, requires_grad=True), "t16": torch.ones(6, dtype=torch.bfloat16)}
    scene |= {
        "t8": torch.ones(6).to(torch.float8_e4m3fn),
        "scalar": np.float32(1),
        "batch": dict(zip("abcd", arrays, strict=False)),
    }
    scene |= {"conj": torch.ones(6, dtype=torch.complex64).conj(), "swapped": np.ones(6, ">f4")}
    scene |= {"buffer": bytearray(24), "fixed": bytes(24), "numbers": (ctypes.c_float * 6)()}
    scene["tabled"] = type("Tabled", (bytearray,), {"__dlpack_c_exchange_api__": buffer_exchange()})(24)
    scene["aligned"] = np.asarray(names["dlx"].empty(6, "float32"))
    if ml_dtypes := peer("ml_dtypes"):
        scene |= {"bf16": many[0].astype(ml_dtypes.bfloat16), "f8": many[0].astype(ml_dtypes.float8_e4m3fn)}
    if tvm_ffi := peer("tvm_ffi"):
        scene["in_tvm_ffi"] = tvm_ffi.from_dlpack(many[0])
        scene["ten"] = tvm_ffi.convert([tvm_ffi.from_dlpack(array) for array in many[:10]])
    if jnp := peer("jax.numpy"):
        scene |= {"jnp": jnp, "in_jax": [jnp.asarray(row) for row in rows]}
        scene["own_tensor"] = names["dlx"].empty(6, "float32")
        scene["jax_takes"] = _jax_import()
    if pyarrow := peer("pyarrow"):
        scene["arrow"] = [pyarrow.array(row) for row in rows]
        scene["chunks"] = pyarrow.chunked_array(scene["arrow"][:2])
    if image := peer("PIL.Image"):
        scene["images"] = [image.fromarray(np.ones((16, 16), "u1")) for _ in rows]
    if "in_jax" in scene and "arrow" in scene:
        samples = zip(rows, scene["in_jax"], scene["arrow"], strict=True)
        scene["mixed"] = [row for sample in samples for row in sample][:15]
    return scene


def _jax_import():
    """Return jaxlib's function from a capsule to an array, which `jax.dlpack.from_dlpack` ends in."""
    (device,) = peer("jax").local_devices(backend="cpu")
    function = peer("jaxlib._jax").dlpack_managed_tensor_to_buffer
    return lambda capsule: function(capsule, device, None, None)


def _works(code, scene):
    try:
        eval(code, scene)
    except (NameError, ImportError):  # a framework is missing
        return False
    return True


def _short(codes, scene, rounds):
    """Return the CPU nanoseconds of each code in every round, at most 0.4 ms each: few are interrupted."""
    timers = {code: timeit.Timer(code, timer=time.thread_time, globals=scene) for code in codes}
    numbers = {code: max(1, int(4e-4 / min(timer.repeat(20, 1)))) for code, timer in timers.items()}
    times = {code: [] for code in timers}
    for _ in range(rounds):
        for code, timer in timers.items():
            timer.timeit(1)  # a single call per round would find cold caches
            times[code].append(timer.timeit(numbers[code]) / numbers[code] * 1e9)
    return times
