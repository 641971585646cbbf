"""Type errors: one on each line marked as an error, and none on other lines."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

import dlx

samples = np.zeros((2, 3), np.float32)
tensor = torch.zeros(3)
maybe = samples if Path("x").exists() else None

# the call
dlx.convert(samples)  # error: neither to nor like
dlx.convert(samples, to=3)  # error: a number is no target
dlx.convert(samples, to=None)  # error: neither to nor like
dlx.convert([samples])  # error: neither to nor like
dlx.convert(samples, to="torch", like=tensor)  # error: both to and like
dlx.convert([samples], to=3)  # error: a number is no target
dlx.stack([samples], to=3)  # error: a number is no target
dlx.open("x.npy", to=3)  # error: a number is no target
dlx.convert(samples, to="torch", copy="yes")  # error: copy is None, True or False
dlx.convert(samples, to="torch", readonly="never")  # error: no such word
dlx.convert(samples, to="torch", errors="ignore")  # error: no such word
dlx.convert(samples, to="torch", contiguous=True)  # error: no such option
dlx.convert([samples], to="torch", contiguous=True)  # error: no such option
dlx.plan(samples, "torch", readonly="never")  # error: no such word
dlx.plan(samples, "torch", prob=False)  # error: no such option
dlx.open(3)  # error: no path
dlx.open("x.npy", copy=True)  # error: no such option
dlx.stack([samples])  # error: no target
dlx.stack(3, to="torch")  # error: nothing to stack
dlx.stack([samples], to="torch", copy=True)  # error: no such option

dlx.convert(samples, to="torch", dtyp="float32")  # error: no such option
dlx.convert(samples, to="torch", out=tensor)  # error: no such option
dlx.convert({"a": samples}, like=tensor, error="pass")  # error: no such option
dlx.stack([samples], to="torch", outt=tensor)  # error: no such option
dlx.open("x.npy", onl="a")  # error: no such option
dlx.convert(samples, "torch", "cpu")  # error: options are named
dlx.convert([samples], "torch", "cpu")  # error: options are named
dlx.stack([samples], "torch", 1)  # error: options are named
dlx.open("x.npy", "torch", "weight")  # error: options are named
dlx.attach({}, "torch", True)  # error: options are named
dlx.save({"a": samples}, "x.npz", formt="npz")  # error: no such option
dlx.parts(tensor, "numpy", only="a")  # error: no such option
dlx.attach({}, to="torch", writeable=True)  # error: no such option
dlx.share({"a": samples}, detach_all=True)  # error: no such option
dlx.attach(dlx.share(samples), to=3)  # error: a number is no target
dlx.attach(3, to="torch")  # error: a number is no handle

dlx.convrt(samples, to="torch")  # error: no such name
dlx.typing.Optins  # error: no such name

# objects that are not arrays
dlx.convert(3, to="torch")  # error: a number
dlx.convert(None, to="torch")  # error: nothing
dlx.convert("text", to="torch")  # error: a text
dlx.convert(object(), to="torch")  # error: unknown object
dlx.convert(maybe, to="torch")  # error: may be nothing
dlx.convert((each for each in [samples]), to="torch")  # error: a generator
dlx.convert(torch.nn.Linear(1, 2), to="numpy")  # error: a module holds arrays, but is not one
number: dlx.SupportsDLPack = 3  # error: a number
numbers: dlx.SupportsDLPack = [1, 2]  # error: a list

# the result
wrong: torch.Tensor = dlx.convert(tensor, to="numpy")  # error: an array of numpy
wrong = dlx.convert(tensor, to=np)  # error: an array of numpy
wrong = dlx.convert(tensor, to=np.ndarray)  # error: an array of numpy
wrong = dlx.convert(tensor, like=samples)  # error: an array of numpy
wrong = dlx.convert([samples], to="torch")  # error: a list
wrong = dlx.convert({"a": samples}, to="torch")  # error: a dict
wrong = dlx.stack([samples], to="numpy")  # error: an array of numpy
wrong = dlx.attach(dlx.share(samples), to="numpy")  # error: an array of numpy
wrong = dlx.attach(dlx.share({"a": samples}), to="torch")  # error: a dict
dlx.convert(samples, to="torch").flags  # error: a tensor has none
dlx.convert([samples], to="torch")[0].flags  # error: a tensor has none
dlx.convert((samples,), to="torch", lazy=True).append(tensor)  # error: a tuple cannot grow
dlx.plan(samples, to="torch").outcom  # error: no such attribute
outcome: Literal["shard", "copied"] = dlx.plan(samples, to="torch").outcome  # error: unknown outcome
dlx.describe(samples).shape[0]  # error: the shape may be unknown


@dlx.using("torch")
def norm(x: dlx.SupportsDLPack, order: int = 2) -> float:
    """Any array is accepted."""
    return 0.0


norm(3)  # error: a number
norm(samples, order="two")  # error: a text
answer: str = norm(samples)  # error: a number


def unknown(anything: Any, numbers: NDArray[Any]) -> None:
    """Unknown types cause no errors."""
    dlx.convert(anything, to="torch").flags
    dlx.convert(numbers, to="mylib").flags
    dlx.convert([numbers, 3], to="torch")[0].flags
