"""Random files of every format that `dlx.open` reads, written by the libraries of the formats."""

from __future__ import annotations

import importlib

from hypothesis import strategies as st

from support.files.writers import gguf, shards

DESCRS = ("?", "<i1", "<u2", "<i8", ">i4", "<f2", "<f4", ">f8", "<f8", "<c8", ">c16", "<g", "S3", "<U2", ">U2")
DESCRS += ("<M8[s]", "<m8[ns]", "V2", "<f4,<i4")
SHAPES = ((), (1,), (5,), (2, 3), (0, 4), (3, 0), (2, 1, 2), (64, 64))
TORCH = ("float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "int8", "int64", "uint8")
TORCH += ("float16", "complex64", "uint16")


def numpy_array(np, draw):
    """Draw a numpy array of any dtype, order and shape."""
    descr, shape = draw(st.sampled_from(DESCRS)), draw(st.sampled_from(SHAPES))
    array = np.zeros(shape, descr, draw(st.sampled_from("CF")))
    if array.dtype.kind in "iufc":
        array[...] = (np.arange(array.size) % 100).reshape(shape)
    return array


def torch_tensor(torch, draw):
    """Draw a torch tensor."""
    dtype, shape = getattr(torch, draw(st.sampled_from(TORCH))), draw(st.sampled_from(SHAPES))
    return torch.ones(shape).to(dtype)


def write_npy(path, draw):
    """Write one array, or pickled objects."""
    np = importlib.import_module("numpy")
    array = numpy_array(np, draw) if draw(st.integers(0, 20)) else np.array([None, "x"], object)
    np.save(path.open("wb"), array, allow_pickle=True)


def write_npz(path, draw):
    """Write up to four arrays, compressed or not."""
    np = importlib.import_module("numpy")
    save = draw(st.sampled_from([np.savez, np.savez_compressed]))
    arrays = {name: numpy_array(np, draw) for name in draw(names())}
    save(path.open("wb"), **arrays, o=np.array([None], object))


def write_safetensors(path, draw):
    """Write with safetensors; the header has any length, so tensors start at any byte."""
    torch = importlib.import_module("torch")
    written = importlib.import_module("safetensors.torch").save(
        {name: torch_tensor(torch, draw).contiguous() for name in draw(names())}, {"a": "b"}
    )
    length, pad = int.from_bytes(written[:8], "little"), draw(st.sampled_from([0, 1, 4, 56]))
    path.write_bytes(
        (length + pad).to_bytes(8, "little") + written[8 : 8 + length] + b" " * pad + written[8 + length :]
    )


def write_shards(path, draw):
    """Write a folder with an index and a file for each tensor."""
    path.mkdir()
    kinds = st.tuples(st.sampled_from(["F32", "BF16", "F8_E4M3", "I64", "F4"]), st.sampled_from([(2, 4), (8,), (0, 2)]))
    shards(path, {name: draw(kinds) for name in draw(names())})


def write_gguf(path, draw):
    """Write numbers and quantized blocks."""
    kinds = {0: ((3, 2), 24), 1: ((5,), 10), 2: ((32,), 18), 8: ((32,), 34), 24: ((4,), 4), 28: ((2,), 16), 30: ((), 2)}
    tensors = {}
    for name in draw(names()):
        extents, size = kinds[kind := draw(st.sampled_from([*kinds]))]
        tensors[name] = (kind, extents, bytes(size))
    path.write_bytes(gguf(tensors, alignment=draw(st.sampled_from([1, 8, 32, 64]))))


def write_pt(path, draw):
    """Write a tensor, or a tree of tensors and plain values."""
    torch = importlib.import_module("torch")

    def tensor():
        made = torch_tensor(torch, draw)
        made = made.t() if made.ndim == 2 and draw(st.booleans()) else made
        if made.dtype == torch.complex64 and draw(st.booleans()):
            made = made.conj()
        return made.requires_grad_() if made.is_floating_point() and draw(st.booleans()) else made

    made = tensor()
    tree = {"a": made, "again": made, "in": {"x": [tensor(), 1], "t": (tensor(),)}, "n": None, "s": "text"}
    if draw(st.booleans()):
        tree["sparse"] = torch.eye(3).to_sparse()
    torch.save(draw(st.sampled_from([made, [made, tensor()], tree])), path)


def write_hdf5(path, draw):
    """Write datasets: contiguous, chunked, compressed, null, text, structures, in groups."""
    np, h5py = importlib.import_module("numpy"), importlib.import_module("h5py")
    with h5py.File(path, "w") as file:
        for name in draw(names()):
            array = numpy_array(np, draw)
            if array.dtype.kind in "UMmV" and array.dtype.names is None:
                array = np.zeros(array.shape, "S4")
            whole = array.ndim == 0 or array.size == 0
            options = draw(
                st.sampled_from([{}, {} if whole else {"chunks": True}, {} if whole else {"compression": 3}])
            )
            file.create_dataset(f"group/{name}" if draw(st.booleans()) else name, data=array, **options)
        file.create_dataset("null", dtype="f4")
        file["text"] = ["x", "yz"]


def arrow_table(pa, draw):
    """Draw a table with nulls, packed, nested, encoded and extension types."""
    count = draw(st.integers(0, 5))
    nulls = draw(st.booleans())
    values = [None if nulls and i % 2 else i for i in range(count)]
    columns = {
        "numbers": pa.array(values, draw(st.sampled_from([pa.int8(), pa.uint32(), pa.float32(), pa.float64()]))),
        "half": pa.array(values, pa.float32()).cast(pa.float16()),
        "bools": pa.array([each if each is None else each > 1 for each in values], pa.bool_()),
        "text": pa.array([each if each is None else str(each) for each in values], pa.string()),
        "dates": pa.array(values, pa.int32()).cast(pa.date32()),
        "times": pa.array(values, pa.int64()).cast(pa.timestamp("ns", "UTC")),
        "decimals": pa.array(values, pa.int32()).cast(pa.decimal128(12, 2)),
        "lists": pa.array([each if each is None else [each] * each for each in values], pa.list_(pa.int16())),
        "pairs": pa.array([each if each is None else [each, 0] for each in values], pa.list_(pa.int16(), 2)),
        "holes": pa.array([[each, 0] for each in values], pa.list_(pa.int16(), 2)),
        "fields": pa.array([{"x": each} for each in values], pa.struct([("x", pa.int8())])),
        "words": pa.array([str(each) for each in values], pa.string()).dictionary_encode(),
        "nothing": pa.nulls(count),
        "tensors": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), (2, 1)),
            pa.array([[1.0, 2.0]] * count, pa.list_(pa.float32(), 2)),
        ),
    }
    kept = draw(st.lists(st.sampled_from([*columns]), min_size=1, max_size=5, unique=True))
    return pa.table({name: columns[name] for name in kept})


def write_arrow(path, draw):
    """Write a file or a stream of any number of record batches, compressed or not."""
    pa, ipc = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.ipc")
    table = arrow_table(pa, draw)
    codecs = [None, *(each for each in ("lz4", "zstd") if pa.Codec.is_available(each))]
    options = ipc.IpcWriteOptions(compression=draw(st.sampled_from(codecs)))
    new = draw(st.sampled_from([ipc.new_file, ipc.new_stream]))
    with new(path, table.schema, options=options) as writer:
        for start in range(draw(st.integers(0, 3))):
            writer.write_table(table.slice(start))


def write_parquet(path, draw):
    """Write row groups of any size."""
    parquet = importlib.import_module("pyarrow.parquet")
    table = arrow_table(importlib.import_module("pyarrow"), draw)
    parquet.write_table(table, path, row_group_size=draw(st.integers(1, 5)))


def names():
    """Return a strategy for the names of arrays."""
    return st.lists(st.sampled_from(["a", "b.weight", "layers.0.w", "ü", "x y"]), min_size=1, max_size=4, unique=True)


WRITERS = {
    ".npy": (write_npy, ("numpy",)),
    ".npz": (write_npz, ("numpy",)),
    ".safetensors": (write_safetensors, ("torch", "safetensors")),
    ".shards": (write_shards, ()),
    ".gguf": (write_gguf, ()),
    ".pt": (write_pt, ("torch",)),
    ".h5": (write_hdf5, ("numpy", "h5py")),
    ".arrow": (write_arrow, ("pyarrow",)),
    ".parquet": (write_parquet, ("pyarrow.parquet",)),  # which needs a Python with ssl
}
"""Suffix -> (writer of a random file, the packages that it needs)."""
