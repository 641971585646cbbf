"""Writers of .npy, .safetensors and .gguf files without numpy."""

from __future__ import annotations

import json
import math
import struct


def npy(descr, shape, data, *, order=False, version=1):
    """Return the bytes of a .npy file."""
    header = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape!r}, }}".encode()
    width = 2 if version == 1 else 4
    header += b" " * (-(len(header) + 9 + width) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(width, "little") + header + data


def safetensors(path, tensors, *, metadata=None, cut=0):
    """Write a .safetensors file of zeros: {name: (dtype, shape)}."""
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8, "F4": 0.5}
    header, at = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + int(math.prod(shape) * sizes[dtype])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 16 or 16)  # data start at a multiple of 8, but not of 16
    whole = len(raw).to_bytes(8, "little") + raw + bytes(at)
    path.write_bytes(whole[: len(whole) - cut])
    return path


def gguf(tensors, *, values=(), version=3, alignment=32):
    """Return the bytes of a .gguf file: {name: (type number, extents in its order, data)}; values are packed."""
    infos, data = b"", b""
    for name, (kind, extents, raw) in tensors.items():
        data += bytes(-len(data) % alignment)
        head = struct.pack(f"<Q{len(name)}sI{len(extents)}Q", len(name), name.encode(), len(extents), *extents)
        infos += head + struct.pack("<IQ", kind, len(data))
        data += raw
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(values)) + b"".join(values) + infos
    return head + bytes(-len(head) % alignment) + data


def said(key, kind, packed):
    """Return one packed value of a .gguf file's metadata."""
    return struct.pack(f"<Q{len(key)}sI", len(key), key.encode(), kind) + packed


def shards(folder, tensors):
    """Write a checkpoint with one .safetensors file for each tensor: {name: (dtype, shape)}; return its index."""
    places = {}
    for number, (name, described) in enumerate(tensors.items(), 1):
        places[name] = f"model-{number:05}-of-{len(tensors):05}.safetensors"
        safetensors(folder / places[name], {name: described})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index
