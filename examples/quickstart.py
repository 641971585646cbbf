"""Convert real files between frameworks: a read-only .npy, a PNG, a saved torch module. Run by `make demo`.

Each conversion prints the plan of `dlx.plan`, whether memory is shared (judged by the addresses), and the time of
`dlx.convert`, best of five. numpy, pillow and torch are optional; notes name the missing ones.
"""

import importlib
import math
import mmap
import tempfile
import textwrap
import time
from pathlib import Path

import dlx


def have(name, called=None):
    """Return a module, or print a note and return None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"note: {called or name} is not installed; skipping its part")
        return None


def say(text, indent=2):
    """Print text, with long lines folded for a terminal of 80 columns."""
    for line in str(text).splitlines():
        inset = " " * (indent + len(line) - len(line.lstrip()))
        print(textwrap.fill(line.strip(), 80, initial_indent=inset, subsequent_indent=inset + "  "))


def show(name, obj, to, **options):
    """Print the plan of a conversion, run it, and print whether memory is shared; return None if refused."""
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    print(f"\ndlx.convert({name}, to={to!r}{arguments})")
    say(dlx.plan(obj, to=to, **options))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        try:
            result = dlx.convert(obj, to=to, **options)
        except dlx.errors.ConversionError as error:
            say(f"raised {type(error).__name__}, as planned")
            return None
        times.append(time.perf_counter() - start)
    before, after = dlx.describe(obj).address, dlx.describe(result).address
    verdict = "memory shared, both at" if before == after else f"memory not shared, {before:#x} and"
    micro = min(times) * 1e6
    say(f"{verdict} {after:#x}; {micro:,.1f} µs" if micro < 10 else f"{verdict} {after:#x}; {micro:,.0f} µs")
    return result


def source_text():
    """Return the standard library's top-level modules as one text."""
    return b"".join(path.read_bytes() for path in sorted(Path(tempfile.__file__).parent.glob("*.py")))


def buffers(folder):
    """Convert objects without a framework: a file mapped into memory, and a capsule."""
    print("\n== A text file, mapped read-only: the source code of Python's standard library")
    path = folder / "library.txt"
    path.write_bytes(source_text())
    with path.open("rb") as file:
        tensor = show("mmap", mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "dlx")
    capsule = tensor.__dlpack__(max_version=(1, 0))
    dlx.convert(capsule, to="dlx")
    print("\ndlx.plan(capsule, to='dlx')    # a capsule of that tensor, converted once")
    say(dlx.plan(capsule, to="dlx"))


def table(np, folder, to):
    """Convert a read-only .npy file; return its contents."""
    print("\n== counts.npy: how often each byte follows each other in Python's own source")
    text = np.frombuffer(source_text(), np.uint8)
    pairs = text[:-1].astype(np.int64) * 256 + text[1:]
    path = folder / "counts.npy"
    np.save(path, np.bincount(pairs, minlength=256 * 256).reshape(256, 256))
    counts = np.load(path, mmap_mode="r")
    tensor = show("counts", counts, "dlx")
    show("tensor", tensor, "numpy")
    if to == "torch":
        before = path.read_bytes()
        show("counts", counts, to).zero_()
        say(f"set to zero in torch afterwards; the file is {'unchanged' if path.read_bytes() == before else 'CHANGED'}")
    else:
        show("masked", np.ma.masked_equal(counts, 0), to)
    return counts


def picture(np, folder, to):
    """Draw a landscape, save and decode it, and convert the decoded picture."""
    from PIL import Image, ImageDraw

    print("\n== hills.png: a picture, decoded by pillow")
    draw = ImageDraw.Draw(drawn := Image.new("RGB", (320, 200)))
    for y in range(200):
        draw.line([(0, y), (320, y)], fill=(90 + y // 2, 140 + y // 3, 230))
    draw.ellipse([230, 30, 270, 70], fill=(255, 230, 120))
    for base, height, color in ((120, 30, (70, 120, 90)), (150, 18, (40, 90, 60))):
        ridge = [(x, base - height * math.sin(x / (30 + height))) for x in range(320)]
        draw.polygon([(0, 200), *ridge, (320, 200)], fill=color)
    draw.text((12, 12), "drawn for dlx", fill=(255, 255, 255))
    drawn.save(folder / "hills.png")

    with Image.open(folder / "hills.png") as image:
        show("image", image, to)
        say("pillow copies its pixels for every export")
        if np is not None:
            pixels = np.array(image)
            show("pixels", pixels, to)
            for options in ({}, {"copy": False}):
                show("pixels[:, ::-1]", pixels[:, ::-1], to, **options)


def module(torch, np, counts, folder):
    """Save and load a module that predicts the next byte, and convert its parameters."""
    print("\n== successor.pt: a torch module's state_dict, saved and loaded")
    known = dlx.convert(counts, to="torch").double() + 1
    successor = torch.nn.Embedding.from_pretrained((known / known.sum(1, keepdim=True)).float())
    plane = torch.nn.Linear(256, 2)  # the two directions in which bytes differ most
    with torch.no_grad():
        plane.weight.copy_(torch.linalg.svd(successor.weight - successor.weight.mean(0)).Vh[:2])
        plane.bias.copy_(-plane.weight @ successor.weight.mean(0))
    torch.save(torch.nn.Sequential(successor, plane).state_dict(), folder / "successor.pt")

    state = torch.load(folder / "successor.pt", weights_only=True)
    arrays = {name: show(f"state[{name!r}]", tensor, "numpy") for name, tensor in state.items()}
    best = chr(np.argmax(arrays["0.weight"][ord("q")]))
    say(f"numpy reads from it: after 'q' comes most often {best!r}")
    for options in ({}, {"detach": True}):
        show("plane.weight", plane.weight, "numpy", **options)

    print("\n== A tree: all of the above, and a view of it")
    everything = {"state": dict(state), "counts": [counts, counts[::-1]], "made of": "Python's standard library"}
    print("\ndlx.convert(everything, to='dlx')")
    say(dlx.plan(everything, to="dlx"))
    converted = dlx.convert(everything, to="dlx")
    shared = sum(dlx.shares_memory(converted["state"][name], tensor) for name, tensor in state.items())
    say(f"{shared} of {len(state)} tensors of the state share their memory with the result")
    view = dlx.convert(everything, to="numpy", lazy=True)
    print("\ndlx.convert(everything, to='numpy', lazy=True)['state']['1.bias']")
    say(view["state"]["1.bias"])
    touched = sum(name in repr(view["state"]) for name in state)
    say(f"{touched} of {len(state)} tensors of the state were converted for it")


def main():
    """Convert everything that the installed frameworks allow."""
    np, torch, pillow = have("numpy"), have("torch"), have("PIL", "pillow")
    to = "dlx" if torch is None else "torch"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        buffers(folder)
        counts = None if np is None else table(np, folder, to)
        if pillow is not None:
            picture(np, folder, to)
        if np is not None and torch is not None:
            module(torch, np, counts, folder)


if __name__ == "__main__":
    main()
