"""Types of `dlx.convert` with every kind of target."""

import json
import pathlib
from types import ModuleType
from typing import Any, Unpack, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray

import dlx

samples = np.zeros((2, 3), np.float32)
mask = np.zeros(4, np.bool_)
tensor = torch.zeros(3)

# names
assert_type(dlx.convert(samples, to="torch"), torch.Tensor)
assert_type(dlx.convert(samples, "torch"), torch.Tensor)
assert_type(dlx.convert(samples, "pytorch"), torch.Tensor)
assert_type(dlx.convert(tensor, to="numpy"), NDArray[Any])
assert_type(dlx.convert(tensor, to="jax"), jax.Array)
assert_type(dlx.convert(tensor, to="dlx"), dlx.Tensor)

# sources of every kind
assert_type(dlx.convert(mask, to="torch"), torch.Tensor)
assert_type(dlx.convert(np.float32(1), to="torch"), torch.Tensor)
assert_type(dlx.convert(np.zeros(3)[::2], to="torch"), torch.Tensor)
assert_type(dlx.convert(torch.nn.Parameter(tensor), to="numpy", detach=True), NDArray[Any])
assert_type(dlx.convert(jnp.ones(3), to="torch"), torch.Tensor)
assert_type(dlx.convert(b"abc", to="torch"), torch.Tensor)
assert_type(dlx.convert(bytearray(3), to="torch"), torch.Tensor)
assert_type(dlx.convert(memoryview(b"abc"), to="dlx"), dlx.Tensor)
assert_type(dlx.convert(dlx.empty(3, "int8"), to="torch"), torch.Tensor)
assert_type(dlx.convert(dlx.to_capsule(b"abc"), to="torch"), Any)  # a capsule is Any: it might be a list


class Producer:
    """A class of the user."""

    def __dlpack__(self, stream: int | None = None) -> object:
        """Give a capsule."""
        return dlx.to_capsule(b"abc")


assert_type(dlx.convert(Producer(), to="torch"), torch.Tensor)

# modules
assert_type(dlx.convert(samples, to=torch), torch.Tensor)
array: NDArray[Any] = dlx.convert(tensor, to=np)
assert_type(dlx.convert(tensor, to=jax), jax.Array)

# array types
assert_type(dlx.convert(samples, to=torch.Tensor), torch.Tensor)
array = dlx.convert(tensor, to=np.ndarray)
assert_type(dlx.convert(tensor, to=jax.Array), jax.Array)
assert_type(dlx.convert(samples, to=dlx.Tensor), dlx.Tensor)

# an array as the example
assert_type(dlx.convert(samples, like=tensor), torch.Tensor)
assert_type(dlx.convert(tensor, like=samples), NDArray[Any])  # not of the dtype and shape of the example
assert_type(dlx.convert(tensor, like=jnp.ones(3)), jax.Array)
assert_type(dlx.convert(samples, like=torch.nn.Parameter(tensor)), torch.Tensor)
assert_type(dlx.convert(samples, like=dlx.empty(3, "int8")), dlx.Tensor)

# every option
assert_type(
    dlx.convert(
        samples,
        to="torch",
        device="cpu",
        copy=True,
        readonly="share",
        detach=False,
        stream=None,
        lazy=False,
        strict=True,
        errors="collect",
    ),
    torch.Tensor,
)
assert_type(dlx.convert(samples, to="torch", device=(1, 0)), torch.Tensor)
assert_type(dlx.convert(samples, to="torch", device=dlx.Device("cpu")), torch.Tensor)
assert_type(dlx.convert(samples, to="torch", lazy=True), torch.Tensor)  # of no effect on an array


def choose(name: str, module: ModuleType, anything: Any) -> None:
    """If the target is known only at run time, nothing is claimed."""
    assert_type(dlx.convert(samples, to=name), Any)
    assert_type(dlx.convert(samples, to="mylib"), Any)
    assert_type(dlx.convert(samples, to=module), Any)
    assert_type(dlx.convert(anything, to="torch"), Any)  # an array or a container of them
    found: torch.Tensor = dlx.convert(anything, to="torch")
    print(found)


def wrapper(x: dlx.SupportsDLPack, to: str | None = None, like: Any = None) -> Any:
    """Options may be passed on."""
    return dlx.convert(x, to, like=like)


def tensor_of(x: dlx.SupportsDLPack, **options: Unpack[dlx.typing.Options]) -> torch.Tensor:
    """Options that are passed on do not blur the result."""
    return dlx.convert(x, to="torch", **options)


def placed(x: list[torch.Tensor], where: dlx.typing.DeviceLike | None, stream: Any) -> list[NDArray[Any]]:
    """A device and a stream that are known only at run time claim nothing."""
    return dlx.convert(x, to="numpy", device=where, stream=stream)


tensor_of(samples, copy=True, readonly="share", stream=7)

# objects that support DLPack
producers: list[dlx.SupportsDLPack] = [samples, tensor, jnp.ones(3), dlx.empty(3, "int8"), Producer()]
wrapper(samples)

# open
assert_type(dlx.open("x.npy")[""], dlx.Tensor)
assert_type(dlx.open(pathlib.Path("x.npy"), "torch", readonly="share")[""], torch.Tensor)
array = dlx.open("x.npy", to=np)[""]
with dlx.open("model.safetensors", "jax", device="cpu") as opened:
    assert_type(opened["w"], jax.Array)
    assert_type(list(opened), list[str])

# stack
assert_type(dlx.stack([samples, samples], "torch"), torch.Tensor)
array = dlx.stack([samples, tensor], to=np)
assert_type(dlx.stack((b"abc", b"def"), to=torch.Tensor, device="cpu"), torch.Tensor)
assert_type(dlx.stack([samples], to="mylib"), Any)

# share and attach: a handle knows what was shared, until it is sent as a dict
with dlx.share(samples) as handle:
    assert_type(dlx.attach(handle), dlx.Tensor)
    assert_type(dlx.attach(handle, to="torch", writable=True), torch.Tensor)
assert_type(dlx.attach(dlx.share([tensor]), to="jax", readonly="share"), list[jax.Array])
assert_type(dlx.attach(dlx.share({1: tensor}), to=torch), dict[int, torch.Tensor])
assert_type(dlx.attach(json.loads(pathlib.Path("handle").read_text()), to="numpy"), Any)
with dlx.ring(4, like=samples) as ring:
    for frame in dlx.attach(ring.handle, to="torch"):
        assert_type(frame, Any)

# the other verbs
assert_type(dlx.plan(samples, to="torch"), dlx.Plan)
assert_type(dlx.plan(samples, like=tensor, probe=False).outcome, dlx.typing.Outcome)
assert_type(dlx.describe(samples), dlx.ArrayInfo)
assert_type(dlx.shares_memory(samples, tensor), bool)
assert_type(dlx.from_dlpack(samples), dlx.Tensor)
assert_type(dlx.empty((2, 3), "float32").shape, tuple[int, ...])
