"""Fuzzing of the readers of files: `nox -s fuzz-files`.

Each file is a mutation of one that a format's own library wrote. It is opened, and all its members are read; the plan,
`dlx.save` and the command get some of them. Only errors of dlx and a lack of memory may come out, nothing in a file
may be run, and no file may take more than a few seconds. A process that is killed keeps its file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import mmap
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

import dlx
import dlx.cli
from support.files.samples import WRITERS, names, torch_tensor

BASES = 24  # files of each format that are mutated
BATCH = 5000  # files of one process: a fork with sanitizers takes as long as 50 files
SLOWEST = 10.0  # seconds of one file, of the processor
NUMBERS = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    65_535,
    1 << 31,
    (1 << 32) - 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
TEXTS = (b"0", b"-1", b"9223372036854775807", b"9223372036854775808", b"99999999999999999999", b"1.0", b"true", b"1e9",
         b"[]", b"{}", b"null", b'""', b"../x", b"/etc/passwd", b"\\ud800", b"\\u0000", b"O", b"|V0")  # fmt: skip
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")


def write_bins(path, draw):
    """Write an index of torch's files."""
    torch = importlib.import_module("torch")
    path.mkdir()
    tensors = {name: torch_tensor(torch, draw) for name in draw(names())}
    places = {name: f"m-{i}.bin" for i, name in enumerate(tensors)}
    for name, place in places.items():
        torch.save({name: tensors[name]}, path / place)
    (path / "m.bin.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")


def write_dcp(path, draw):
    """Write a checkpoint of torch.distributed."""
    torch, dcp = importlib.import_module("torch"), importlib.import_module("torch.distributed.checkpoint")
    tree = {name: torch_tensor(torch, draw) for name in draw(names())}
    dcp.save({**tree, "in": {"step": 3, "text": "x"}}, checkpoint_id=path, no_dist=True)


def write_records(path, draw):
    """Write records with fields of every kind."""
    np = importlib.import_module("numpy")
    inner = [("x", "<f4"), ("y", ">i2", (2,)), ("v", "V2"), ("t", "S3")]
    fields = draw(st.sampled_from([inner, [("a", "u1"), ("in", inner)], [("in", inner, (2,)), ("c", "<c8")]]))
    shape, order = draw(st.sampled_from([(), (3,), (2, 2)])), draw(st.sampled_from("CF"))
    array = np.zeros(shape, np.dtype(fields, align=draw(st.booleans())), order)
    draw(st.sampled_from([np.save, np.savez, np.savez_compressed]))(path.open("wb"), array)


def write_zarr(path, draw):
    """Write a group of one or two arrays, whose chunks are compressed or in shards."""
    np, zarr = importlib.import_module("numpy"), importlib.import_module("zarr")
    blosc = importlib.import_module("numcodecs").Blosc(), zarr.codecs.BloscCodec(typesize=4)
    version = draw(st.sampled_from([2, 3]))
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name in draw(names())[:2]:
        array = np.arange(24, dtype=draw(st.sampled_from(["u1", "<i4", "<f8"]))).reshape(2, 12)
        options = {"compressors": draw(st.sampled_from(["auto", None, blosc[version - 2]]))}
        options |= {"shards": (2, 12)} if version == 3 and draw(st.booleans()) else {}
        made = group.create_array(name.replace("/", "."), shape=(2, 12), dtype=array.dtype, chunks=(1, 12), **options)
        made[...] = array


ALL = {
    **WRITERS,
    ".records": (write_records, ("numpy",)),
    ".bins": (write_bins, ("torch",)),
    ".dcp": (write_dcp, ("torch.distributed.checkpoint",)),
    ".zarr": (write_zarr, ("numpy", "zarr")),
}


def write_bases(kind, folder, seed):
    """Write files of a format; return them, each as {name in its folder, or "": bytes}."""
    write, packages = ALL[kind]
    for package in packages:
        importlib.import_module(package)
    bases, tries = [], itertools.count()

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=BASES, database=None, deadline=None, phases=[hypothesis.Phase.generate],
                         suppress_health_check=list(hypothesis.HealthCheck))  # fmt: skip
    @hypothesis.given(st.data())
    def collect(data):
        path = folder / f"base{next(tries)}{kind}"
        write(path, data.draw)
        inside = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        bases.append({str(each.relative_to(path)) if path.is_dir() else "": each.read_bytes() for each in inside})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return bases


def mutate(data, rng, others):
    """Return bytes with up to four changes."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        size = len(data)
        if not size:
            break
        ends = [rng.randrange(min(size, 400)), size - 1 - rng.randrange(min(size, 400)), rng.randrange(size)]
        at, change = rng.choice(ends), rng.randrange(8)
        if change == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            data[at] = rng.randrange(256)
        elif change == 2:
            width = rng.choice([1, 2, 4, 8])
            number = rng.choice([*NUMBERS, size, size - at]) & ((1 << 8 * width) - 1)
            data[at : at + width] = number.to_bytes(width, rng.choice(["little", "big"]))
        elif change == 3:
            found = [*re.finditer(rb"-?[0-9]+|\"[^\"]*\"|'[^']*'", data[:4096])]
            if found:
                data[slice(*rng.choice(found).span())] = rng.choice(TEXTS)
        elif change == 4:
            del data[at:]
        elif change == 5:
            del data[at : at + rng.choice([1, 2, 8, 64])]
        elif change == 6:
            data[at:at] = data[at : at + rng.choice([1, 8, 64, 512])]
        else:
            other = rng.choice(others)
            start = rng.randrange(len(other) or 1)
            data[at : at + 64] = other[start : start + rng.choice([8, 64, 512])]
    return bytes(data)


def mutate_zip(data, rng, others):
    """Return a zip file with a changed member, or a changed name, and the right checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as changed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two members of one name
        members = archive.infolist()
        chosen = rng.randrange(len(members) or 1)
        for i, member in enumerate(members):
            content, name = archive.read(member), member.filename
            if i == chosen and rng.randrange(8):
                content = mutate(content, rng, others)
            elif i == chosen:
                name = rng.choice([each.filename for each in members] + ["../x.npy", "/x.npy", "a/../b.npy", "ü.npy"])
            changed.writestr(name, content, rng.choice([member.compress_type, zipfile.ZIP_DEFLATED]))
    return out.getvalue()


def change(base, rng, bases):
    """Return a mutation of the files of a base."""
    name = rng.choice([*base])
    others = [each for files in bases for each in files.values()]
    data = base[name]
    is_zip = data[:2] == b"PK" and rng.randrange(2)
    return {**base, name: mutate_zip(data, rng, others) if is_zip else mutate(data, rng, others)}


def read(value, depth=0):
    """Read all values below a value; only errors of dlx may come out."""
    if isinstance(value, Mapping) and depth < 8:
        for key in value:
            try:
                inner = value[key]
            except dlx.errors.DlxError:
                continue
            read(inner, depth + 1)
    elif type(value) is dlx.Tensor or type(value).__module__ == "numpy":
        assert value.nbytes < 1 << 32
        with contextlib.suppress(BufferError, dlx.errors.DlxError, TypeError, ValueError):  # no format for its dtype
            bytes(memoryview(value))


def attempt(path, rng):
    """Open one file and use it in some ways; return the words for the outcome."""
    source = path if path.is_dir() or rng.randrange(4) else path.read_bytes()
    options = {"mmap": bool(rng.randrange(4)), "readonly": rng.choice(["copy", "copy", "share"])}
    options |= {"raw": "bfloat16"} if not rng.randrange(8) else {}
    try:
        if not rng.randrange(8):
            options[rng.choice(["only", "skip"])] = lambda name: len(name) % 2 == 0
        with dlx.open(source, rng.choice(["numpy", "dlx"]), **options) as file:
            read(file)
            len(list(file.metadata.items()))
            if not rng.randrange(8):
                plan = dlx.plan(file, to="numpy")
                str(plan)
            if not rng.randrange(16):
                dlx.save(file, path.with_name("saved.npz"))
            outcome = "read"
    except (dlx.errors.DlxError, FileNotFoundError) as error:
        assert len(str(error)) < 3000, len(str(error))
        outcome = "refused"
    if not rng.randrange(128):  # it imports and prints more than it reads
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            dlx.cli.main(["inspect", str(path)])
        assert "Traceback" not in said.getvalue(), said.getvalue()
    return outcome


def work(numbers, seed, kind, bases, folder, state):
    """Try the mutations with some numbers, in this process; return the counts of outcomes."""
    counts = Counter()
    for number in numbers:
        state[:8] = number.to_bytes(8, "little")
        rng = random.Random(f"{seed} {kind} {number}")
        files, path = change(rng.choice(bases), rng, bases), folder / f"x{kind}"
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for name, data in files.items():
            place = path / name if name else path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        start = time.process_time()
        try:
            outcome = attempt(path, rng)
        except MemoryError:
            outcome = "memory"
        except BaseException:
            print(f"{kind} number {number}: an error that is not dlx's", file=sys.stderr)
            traceback.print_exc()
            keep(path, folder, kind, number)
            outcome = "FAILED"
        if time.process_time() - start > SLOWEST:
            print(f"{kind} number {number}: {time.process_time() - start:.0f} s", file=sys.stderr)
            keep(path, folder, kind, number)
            outcome = "FAILED"
        counts[outcome] += 1
    return counts


def keep(path, folder, kind, number):
    """Keep a file for the report."""
    target = folder.parent / f"{number}{kind}"
    shutil.copytree(path, target, dirs_exist_ok=True) if path.is_dir() else shutil.copy(path, target)


def watch(event, arguments):
    """End the process if something is run, or a pickle's class is looked up."""
    if event in FORBIDDEN:
        os.write(2, f"it ran {event} {arguments!r}\n".encode())
        os._exit(99)


def run_batch(numbers, seed, kind, bases, folder, limit):
    """Try some mutations in a forked process; return the counts, and the number at which it was killed or None."""
    state = mmap.mmap(-1, 4096)
    child = os.fork()
    if not child:
        status = 1
        try:
            if limit:
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            sys.addaudithook(watch)
            counts = work(numbers, seed, kind, bases, folder, state)
            said = json.dumps(counts).encode()
            state[8 : 8 + len(said)] = said
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    number = int.from_bytes(state[:8], "little")
    if status:
        print(f"{kind} number {number}: the process ended with {status}", file=sys.stderr)
        return Counter(FAILED=1, tried=number - numbers[0]), number
    return Counter(json.loads(bytes(state[8:]).rstrip(b"\0"))), None


def fuzz(kind, start, count, seed, folder, limit):
    """Fuzz one format; return the counts of outcomes."""
    shutil.rmtree(folder / "bases", ignore_errors=True)
    (folder / "bases").mkdir(parents=True)
    (folder / "work").mkdir(exist_ok=True)
    bases = write_bases(kind, folder / "bases", seed)
    for base in bases[:2]:  # imports, before the forks
        path = folder / "work" / f"x{kind}"
        work(range(2), seed, kind, [base], folder / "work", bytearray(8))
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    counts, at = Counter(), start
    while at < start + count:
        numbers = range(at, min(at + BATCH, start + count))
        found, killed = run_batch(numbers, seed, kind, bases, folder / "work", limit)
        counts += found
        if killed is not None:
            keep(folder / "work" / f"x{kind}", folder / "work", kind, killed)
        at = numbers[-1] + 1 if killed is None else killed + 1
    return counts


def main():
    """Fuzz the formats; exit with 1 if a file did something that it may not do."""
    parser = argparse.ArgumentParser(prog="files.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="files of each format")
    parser.add_argument("--start", type=int, default=0, help="number of the first one, to repeat it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=[*ALL], default=[*ALL], metavar="FORMAT", help=", ".join(ALL))
    parser.add_argument("--folder", type=Path, help="where files are kept that failed")
    parser.add_argument("--limit", type=int, default=0, help="GiB of addresses of a process; 0: no limit")
    given = parser.parse_args()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fuzz-files-", dir=memory))
    failed = 0
    for kind in given.only:
        begun = time.time()
        try:
            counts = fuzz(kind, given.start, given.count, given.seed, folder, given.limit << 30)
        except ImportError as error:
            print(f"{kind}: skipped, {error}")
            continue
        failed += counts["FAILED"]
        text = ", ".join(f"{number:,} {word}" for word, number in sorted(counts.items()))
        print(f"{kind}: {text}; {time.time() - begun:.0f} s", flush=True)
    if not failed and given.folder is None:
        shutil.rmtree(folder)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
