"""Saved files: opening a file of 2 GiB, its first array, and the memory used, compared with safetensors."""

import gc
import json
import os
import tempfile
import time
from pathlib import Path

import dlx
from benchmarks.measure import compare, peer, race, ratio, verdict

TENSORS, EACH = 300, 7 << 20  # 2.05 GiB of bfloat16 with a typical number of tensors
OPEN_MS, FIRST_US, GROWTH = 5.0, 50.0, 1 << 20


def checkpoint(path):
    """Write a sparse .safetensors file; return the size of its header in bytes."""
    header = {}
    for i in range(TENSORS):
        offsets = [i * EACH, (i + 1) * EACH]
        header[f"model.layers.{i}.weight"] = {"dtype": "BF16", "shape": [EACH // 2048, 1024], "data_offsets": offsets}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + TENSORS * EACH)
    return raw


def resident():
    """Return the bytes of files in this process's memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssFile", "RssAnon")))


def files(*, quick):
    """Measure opening and first access; print them and say which goals are met."""
    rounds = 7 if quick else 40
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        raw, name = checkpoint(path), "model.layers.7.weight"
        opened, parsed = race(lambda: dlx.open(path), lambda: json.loads(raw), rounds=rounds)
        over, first = (min(opened) - min(parsed)) * 1e3, min(_first(path, name) for _ in range(rounds)) * 1e6
        gc.collect()
        before = resident()
        file = dlx.open(path)
        tensor = file[name]
        growth = resident() - before
        print(f"\nA .safetensors file of {TENSORS} tensors, {TENSORS * EACH / (1 << 30):.2f} GiB")
        print(f"open: {min(opened) * 1e3:.2f} ms, json alone {min(parsed) * 1e3:.2f}, over it {over:.2f} ms"
              f"  {verdict(over <= OPEN_MS)}")  # fmt: skip
        print(f"first array: {first:.1f} us  {verdict(first <= FIRST_US)}")
        print(f"memory used by both: {growth >> 10} KiB  {verdict(growth <= GROWTH)}")
        found = [{"open_ms": min(opened) * 1e3, "json_ms": min(parsed) * 1e3, "first_us": first, "growth": growth}]
        del tensor, file
        found += _beside_safetensors(path, name, rounds)
    with tempfile.TemporaryDirectory() as folder:
        return [*found, *_many(Path(folder), rounds), *_saved(Path(folder), rounds)]


def _many(folder, rounds):
    """Open a file of 30,000 tensors and list their names, beside safetensors."""
    safetensors = peer("safetensors")
    if safetensors is None:
        return []
    header = {f"layers.{i}.weight": {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]}
              for i in range(30_000)}  # fmt: skip
    raw, path = json.dumps(header).encode(), folder / "many.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + 8 * len(header))

    def theirs():
        with safetensors.safe_open(path, "np") as file:
            return list(file.keys())

    figure = compare(*race(lambda: list(dlx.open(path)), theirs, rounds=max(rounds // 4, 3)))
    print(f"open 30,000 tensors and list their names, beside safe_open: {ratio(figure)}")
    return [{"what": "30,000 tensors", **figure}]


def _saved(folder, rounds):
    """Save 64 MiB, beside numpy and safetensors; each writes a new file."""
    np, library = peer("numpy"), peer("safetensors.numpy")
    if np is None or library is None:
        return []
    tree = {f"w{i}": np.random.default_rng(0).random(1 << 19) for i in range(16)}
    small = {f"layers.{i}.weight": np.ones((2, 1 + i % 5), "f4") for i in range(30_000)}
    numbers = iter(range(1 << 30))

    def fresh(suffix):
        for old in folder.glob(f"saved*{suffix}"):
            old.unlink()
        return folder / f"saved{next(numbers)}{suffix}"

    def renamed(path):
        """Save as `dlx.save` does: under another name first, so that no reader sees a part."""
        np.save(partial := path.with_name("partial.npy"), tree["w0"])
        partial.replace(path)

    found = []
    for what, suffix, ours, theirs in (
        ("64 MiB", ".safetensors", lambda path: dlx.save(tree, path), lambda path: library.save_file(tree, path)),
        (
            "30,000 arrays",
            ".safetensors",
            lambda path: dlx.save(small, path),
            lambda path: library.save_file(small, path),
        ),
        ("4 MiB", ".npy", lambda path: dlx.save(tree["w0"], path), lambda path: np.save(path, tree["w0"])),
        ("4 MiB, renamed", ".npy", lambda path: dlx.save(tree["w0"], path), renamed),
    ):
        mine, other = race(lambda: ours(fresh(suffix)), lambda: theirs(fresh(suffix)), rounds=rounds)  # noqa: B023
        figure = compare(mine, other)
        print(f"save {what} as {suffix}, beside the format's own library: {ratio(figure)}")
        found.append({"what": f"save {what} as {suffix}", **figure})
    return found


def _first(path, name):
    """Return the seconds of the first access to a file after opening it."""
    file = dlx.open(path)
    start = time.perf_counter()
    file[name]
    return time.perf_counter() - start


def _beside_safetensors(path, name, rounds):
    """Compare opening a file and one torch tensor with safetensors."""
    safetensors = peer("safetensors")
    if safetensors is None or peer("torch") is None:
        return []

    def theirs():
        with safetensors.safe_open(path, "pt") as file:
            return file.get_tensor(name)

    def ours():
        with dlx.open(path, "torch", readonly="share") as file:
            return file[name]

    mine, other = race(ours, theirs, rounds=rounds)
    figure = compare(mine, other)
    times = f"{min(mine) * 1e3:.2f} ms, safe_open {min(other) * 1e3:.2f} ms; {ratio(figure)}"
    print(f"open, one tensor for torch, close: {times}")
    return [{"what": "safe_open", **figure}]
