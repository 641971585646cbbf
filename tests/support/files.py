"""Files as others write them: .npy and .safetensors, made without numpy."""

from __future__ import annotations

import json
import math


def npy(descr, shape, data, *, order=False, version=1):
    """Return the bytes of a .npy file, made without numpy."""
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
    raw += b" " * (-len(raw) % 16 or 16)  # so that data begin at a multiple of 8, and of no more
    whole = len(raw).to_bytes(8, "little") + raw + bytes(at)
    path.write_bytes(whole[: len(whole) - cut])
    return path
