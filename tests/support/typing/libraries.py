# ruff: noqa: E402, SIM115
"""Calls with objects of many libraries, each with its type beside it, at run time and for both checkers.

``# mypy: Any`` adds what mypy says instead, such as for libraries that it cannot read. A section runs if the libraries
that it imports are installed.
"""

# ---- numpy, torch, jax
import array as arrays
import collections
import functools
import io
import mmap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

import dlx

samples = np.zeros((2, 3), np.float32)
tensor = torch.zeros(3)
weights = torch.nn.Linear(3, 2).state_dict()
batch = {"x": samples, "y": np.zeros(2, np.int64)}
mine = dlx.empty(3, "int8")
np.save("x.npy", samples)

dlx.convert(samples, to="torch")  # Tensor
dlx.convert(samples[:1], to="torch")  # Tensor
dlx.convert(samples[0, 0], to="torch")  # Any
dlx.convert(samples.T, to="jax")  # Array
dlx.convert(samples > 0, to="torch")  # Tensor
dlx.convert(np.arange(3), to="torch")  # Tensor
dlx.convert(np.asarray([1.0, 2.0]), to="torch")  # Tensor
dlx.convert(memoryview(b"abc"), to="torch")  # Tensor
dlx.convert(bytearray(8), to="numpy")  # NDArray[Any]
dlx.convert(arrays.array("f", [1.0]), to="torch")  # Tensor
dlx.convert(tensor, to="numpy").mean()  # Any
dlx.convert(tensor * 2, to="numpy")  # NDArray[Any]
dlx.convert(torch.nn.Parameter(tensor), to="numpy", detach=True)  # NDArray[Any]
dlx.convert(jnp.ones(3), to="torch")  # Tensor
dlx.convert(jnp.ones(3) + 1, to=np)  # NDArray[Any]
dlx.convert(weights, to="numpy")  # dict[str, NDArray[Any]]  # mypy: Any
dlx.convert(weights, to="jax", copy=True)["bias"]  # Array  # mypy: Any
dlx.convert(batch, to="torch")  # dict[str, Tensor]  # mypy: dict[str, Any]
dlx.convert(batch, like=tensor)["x"]  # Tensor  # mypy: Any
dlx.convert(list(weights.values()), to="numpy")  # list[NDArray[Any]]  # mypy: Any
dlx.convert((tensor, tensor), to="jax")  # tuple[Array, ...]
dlx.convert([(tensor, 1)], to="numpy")  # list[Any]
dlx.convert([tensor, tensor], to="numpy", errors="pass")  # list[Any]
dlx.convert({"a": tensor}, to="numpy", dtype="float64", errors="collect")  # dict[str, NDArray[Any]]
dlx.convert({"a": tensor, "b": np.array(["x"])}, to="numpy", errors="pass")  # dict[str, Any]
dlx.convert({"a": [tensor]}, to="numpy")  # dict[str, Any]
dlx.convert(samples, like=tensor)  # Tensor
dlx.convert(tensor, like=jnp.ones(3))  # Array
dlx.convert(tensor, like=samples)  # NDArray[Any]
dlx.convert(samples, like=torch.nn.Parameter(tensor))  # Tensor
dlx.convert(samples, like=mine)  # Tensor
dlx.convert([samples, samples], like=tensor)  # list[Tensor]
dlx.convert(samples, to="torch", device=tensor.device)  # Tensor
dlx.convert(samples, to="torch", device=torch.device("cpu"))  # Tensor
dlx.convert(samples, to="jax", device=jax.devices()[0])  # Array
dlx.convert(samples, to="jax", device=jnp.ones(3).device)  # Array
dlx.convert(tensor, to="numpy", device=dlx.Device("cpu"))  # NDArray[Any]
dlx.convert(tensor, to="numpy", device="cpu")  # NDArray[Any]
dlx.convert(tensor, to="numpy", device=(1, 0))  # NDArray[Any]
dlx.convert(tensor, to="jax", readonly="copy", errors="collect", strict=True)  # Array
dlx.convert([tensor], to="numpy", lazy=True)  # MutableSequenceView[Any]
dlx.convert(weights, to="numpy", lazy=True)  # MutableMappingView[str, Any]  # mypy: Any
dlx.convert(samples, to="torch", dtype="float16")  # Tensor
dlx.convert(samples, to="torch", dtype={"float32": torch.bfloat16}, wait=False)  # Tensor
dlx.convert(samples[0], out=tensor)  # Tensor
dlx.convert({"a": samples[0]}, out={"a": tensor})  # dict[str, Tensor]
dlx.stack([samples[0], samples[1]], out=torch.zeros(2, 3), dtype="float32")  # Tensor
dlx.stack([samples, samples], to="torch", axis=1, dtype="float64", pad=0)  # Tensor
dlx.stack([1, 2, 3], to="numpy")  # NDArray[Any]
dlx.open("x.npy", "torch", only=[""], skip=lambda name: name == "y")[""]  # Tensor
dlx.attach(dlx.share(batch), to="torch")  # Any
dlx.attach(dlx.share({"a": samples, "b": samples}), to="torch")["b"]  # Tensor
dlx.attach(dlx.share(samples))  # Tensor
dlx.attach(dlx.share(tensor), to="numpy", writable=True)  # NDArray[Any]
dlx.attach(dlx.share([tensor, tensor]), to="jax", readonly="copy")  # list[Array]
dlx.attach(dlx.share({"a": tensor}), to=np)  # dict[str, NDArray[Any]]
dlx.attach(dlx.share({"a": [tensor], "lr": 0.1}), to=torch)  # Any
dlx.attach(dlx.share(like=tensor), to="numpy", writable=True)  # Any
dlx.stack([samples, samples], to="torch")  # Tensor
dlx.stack([tensor for _ in range(3)], "numpy")  # NDArray[Any]
dlx.stack((tensor for _ in range(3)), to=np, device="cpu")  # NDArray[Any]
dlx.stack([samples], to="jax", device=jax.devices()[0])  # Array
dlx.open("x.npy")[""]  # Tensor
dlx.open("x.npy", "torch", only="*", mmap=False)[""]  # Tensor
dlx.open(Path("x.npy").read_bytes(), "torch")[""]  # Tensor
dlx.open(Path("x.npy"), to="torch")[""]  # Tensor
dlx.open("x.npy", to="numpy", device="cpu").copy()  # dict[str, NDArray[Any]]
dlx.open("x.npy", to="numpy", device="cpu").get("")  # NDArray[Any] | None
dlx.plan(samples, to="torch", device=tensor.device).outcome  # Outcome
dlx.plan(batch, like=tensor).nbytes  # int
dlx.describe(weights["bias"]).shape  # tuple[int, ...] | None
dlx.shares_memory(samples, tensor)  # bool
dlx.from_dlpack(tensor)  # Tensor
dlx.array_namespace(tensor)  # Any
dlx.adapters()  # Adapters
functools.partial(dlx.convert, to="torch")(samples)  # Tensor  # mypy: Any
dlx.convert(mmap.mmap(-1, 16), to="numpy")  # NDArray[Any]
dlx.convert(arrays.array("d", [1.0]), to=torch.Tensor)  # Tensor
dlx.convert(collections.OrderedDict(a=samples), to="torch")["a"]  # Tensor
dlx.convert((samples, {"k": [tensor]}), to="torch", errors="pass")  # tuple[Any, ...]
dlx.convert(samples.__dlpack__(), to="torch")  # Tensor
dlx.open(io.BytesIO(Path("x.npy").read_bytes()), to=np)[""].mean()  # Any
dlx.open(Path("x.npy").open("rb"), to="torch", dtype="float64")[""].double()  # Tensor
dlx.empty((2, 3), torch.float32, device=tensor.device).nbytes  # int
dlx.parts(tensor.to_sparse(), to="numpy")  # dict[str, Any]
[record.outcome for record in dlx.trace().records]  # list[str]


@dlx.using("numpy", device=tensor.device)
def norm(x: dlx.SupportsDLPack, order: int = 2) -> float:
    """Any array."""
    return float(np.linalg.norm(dlx.convert(x, to="numpy")))


@dlx.using("numpy")
def center(x: dlx.typing.AnyArray) -> dlx.typing.AnyArray:
    """Any array, whose methods are used."""
    return x - x.mean(axis=0)


norm(tensor)  # float
norm(samples, order=2)  # float
center(tensor)  # Any

# ---- pyarrow, PIL, h5py
import h5py
import pyarrow as pa
from PIL import Image

table = pa.table({"a": [1.0], "b": [2.0]})
image = Image.new("RGB", (4, 4))
file = h5py.File("x.h5", "w")
file["a"] = samples
file["g/b"] = samples

dlx.convert(table, to="torch")  # Any
dlx.convert(table["a"], to="numpy")  # Any
dlx.convert(pa.array([1.0]), like=tensor)  # Any
dlx.stack(table, to="torch")  # Tensor  # mypy: Any
dlx.convert(image, to="torch")  # Tensor
dlx.convert(image.resize((2, 2)).convert("L"), to="numpy")  # NDArray[Any]
dlx.convert([image, image], to="torch")  # list[Any]
dlx.stack([image, image], to="torch")  # Tensor
dlx.describe(image).nbytes  # int | None
dlx.stack([image, image], to="torch").permute(0, 3, 1, 2)  # Tensor
dlx.convert(file, to="torch", lazy=True)["g"]  # Any
dlx.shares_memory(image, samples)  # bool
dlx.convert(file["a"], to="torch")  # Any
dlx.convert(file["g"], to="torch")  # Any
dlx.convert(file, to="torch")  # Any
dlx.stack([file["a"], file["g/b"]], to="torch")  # Tensor  # mypy: Any
dlx.to_capsule(file["a"])  # Any
dlx.plan(file["a"], to="torch").outcome  # Outcome

# ---- pandas
import pandas as pd

frame = pd.DataFrame({"a": [1.0, 3.0], "b": [2.0, 4.0]})

dlx.convert(frame, to="torch")  # dict[Any, Tensor]
dlx.convert(frame, to="torch")["a"]  # Tensor
dlx.convert(frame, to="torch", errors="pass")  # dict[Any, Any]
dlx.convert(frame, like=tensor)  # dict[Any, Tensor]
dlx.convert(pd.DataFrame({"a": [1.0]}), to=np)  # dict[Any, NDArray[Any]]
dlx.convert(frame["a"], to="torch")  # Tensor  # mypy: Any
dlx.convert(pd.Series([1.0], dtype="float32"), to="jax")  # Array
dlx.convert(frame["a"], like=samples)  # NDArray[Any]  # mypy: Any
dlx.convert(frame["a"].to_numpy(), to="torch")  # Any  # mypy: Tensor
dlx.convert({"x": frame["a"]}, to="torch")  # dict[str, Any]  # mypy: Any
dlx.stack(frame, to="torch")  # Tensor
dlx.stack([frame["a"], frame["b"]], to="torch")  # Tensor  # mypy: Any
dlx.plan(frame, to="torch").outcome  # Outcome
dlx.plan(frame, like=tensor, errors="collect").leaves[0].nbytes  # int
dlx.convert(frame.loc[:, ["a"]], to=torch)["a"].sum()  # Tensor
dlx.stack(frame, to="torch", axis=1, dtype=torch.float32).shape  # Size
dlx.describe(frame["a"]).readonly  # bool
dlx.shares_memory(frame["a"], frame["b"])  # bool
dlx.attach(dlx.share(frame["a"]), to="numpy")  # NDArray[Any]
dlx.attach(dlx.share(frame), to="torch")  # dict[Any, Tensor]  # mypy: Any

# ---- polars
import polars as pl

polar = pl.DataFrame({"a": [1.0, 3.0], "b": [2.0, 4.0]})

dlx.convert(polar, to="torch")  # dict[Any, Tensor]
dlx.convert(polar.select("a"), to="numpy")  # dict[Any, NDArray[Any]]
dlx.convert(polar["a"], to="torch")  # Tensor
dlx.convert(pl.Series([1.0]), to=torch)  # Tensor
dlx.convert(polar["a"].cast(pl.Float32), like=jnp.ones(3))  # Array
dlx.convert([polar["a"], polar["b"]], to="torch")  # list[Any]
dlx.stack(polar, to="torch")  # Tensor
dlx.stack(polar.get_columns(), to="numpy")  # NDArray[Any]
dlx.describe(polar["a"]).nbytes  # int | None
dlx.shares_memory(polar["a"], polar["a"])  # bool

# ---- xarray
import xarray as xr

labelled = xr.DataArray(np.ones((2, 3), np.float32), dims=("t", "x"))
dataset = xr.Dataset({"a": labelled})

dlx.convert(labelled, to="torch")  # Tensor  # mypy: Any
dlx.convert(labelled, to="jax")  # DataArray  # mypy: Any
dlx.convert(labelled.isel(t=0), to="numpy", copy=True)  # DataArray  # mypy: Any
dlx.convert(labelled, to=np)  # Any
dlx.convert(labelled.variable, to="torch")  # Tensor
dlx.convert(labelled.variable, to="jax")  # Variable
dlx.convert(labelled.values, to="torch")  # Tensor
dlx.convert(labelled.data, to="torch")  # Any
dlx.convert(dataset, to="torch")  # Any
dlx.convert(dataset, to="numpy")  # Dataset  # mypy: Any
dlx.convert(dataset["a"], like=tensor)  # Any
dlx.stack([labelled, labelled], to="torch")  # Tensor
dlx.describe(labelled).shape  # tuple[int, ...] | None
dlx.shares_memory(labelled, labelled.values)  # bool

# ---- dask
import dask.array as da

chunks: da.Array = da.from_array(samples)  # type: ignore[no-untyped-call]

dlx.convert(chunks, to="torch")  # Any | Array  # mypy: Array
dlx.stack([chunks[0].compute()], to="torch")  # Tensor  # mypy: Any
dlx.plan(chunks, to="torch").outcome  # Outcome
dlx.convert(chunks, like=tensor).chunks  # Any

# ---- datasets
import datasets

rows = datasets.Dataset.from_dict({"a": [[1.0, 2.0]], "n": [1]})

dlx.convert(rows.with_format("numpy")[:], to="torch")["a"]  # Tensor  # mypy: Any
dlx.stack(rows.with_format("numpy")[:1]["a"], to="torch")  # Tensor  # mypy: Any
