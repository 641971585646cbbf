"""Write docs/transforms.md, a table of the transformations of torch and jax that accept functions of the other.

python docs/tools/transforms.py
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.transforms import FUNCTIONS, JAX, REFUSED, TORCH, agree, transform  # noqa: E402

PAGE = ROOT / "docs" / "transforms.md"
HEAD = """\
# Transformations

A function under `dlx.using(..., grad=True)` can be compiled and transformed like a function of the caller's framework:

```python
import jax
import jax.numpy as jnp
import torch
import dlx


@dlx.using("torch", grad=True)
def gelu(x):
    return torch.nn.functional.gelu(x)


print(jax.jit(jax.hessian(lambda x: gelu(x).sum()))(jnp.zeros(2)))
```

```text
[[0.7978846 0.       ]
 [0.        0.7978846]]
```

The tables come from `python docs/tools/transforms.py`. It runs 20 functions in every transformation, and compares each
value in float64 with the same function written in the caller's own framework. ✓: equal to 1e-9. A number: refused, see
below the tables.
"""
TAIL = """
## What happens inside

- **torch** sees the operator `dlx::call`, with shapes, gradients and a rule for `vmap`. Under `torch.compile`
  the function is compiled by `jax.jit`, which keeps the values that it first read from `self` or globals. The backward
  pass runs it again. Results are tensors in lists, tuples and dicts.
- **jax** sees one primitive, which calls the host with numpy arrays. `vmap` calls the function for each element. jax
  raises a `JaxRuntimeError` that quotes the function's error.
- **Shapes** come from `jax.eval_shape` and torch's fake tensors, never from a run with data. Two compiled graphs serve
  all sizes, unless the function compares sizes or one is an argument, as in `f(x, len(x))`. Sizes that depend on data
  work if the result's shape follows for every size.
- **An exported program** names what it needs, such as `dlx, jax and model.layer`, and runs in the process that exported
  it. It can be compiled, differentiated and vectorized again.
- **Random numbers** of torch: derivatives run the function again with the random state of its call, so dropout uses the
  same mask, also under `torch.func`. Under `jax.vmap` each element draws its own numbers. A compiled program draws new
  numbers in each run. `jax.jit` would fix random numbers of numpy or Python in a jax function: pass them, or a key.

## Refused

- **A result whose shape depends on data**, in a compiled program: the function cannot be tried without data. Pass
  `result_like=`.
- **Sharded or replicated arrays of jax**: the program runs on several devices. Pass arrays on one device, as
  `jax.device_put(x, jax.devices()[0])`.
- **Results that jax would narrow**, such as int64 under `jax.jit` while x64 is off. Return a smaller dtype.
- **`torch.func.linearize`**: use `torch.func.jvp`, or `torch.func.vjp`.
- **`torch.autograd.functional.jacobian(vectorize=True)`**: use `torch.func.jacrev`.

## Functions without gradients

`dlx.using("numpy", result_like=...)` works in compiled programs, too. `result_like` declares the results, since numpy
cannot determine them without data:

```python
import numpy as np


@dlx.using("numpy", result_like=lambda x: x)
def rounded(x):
    print("called with", x.shape)
    return np.round(x, 1)


print(jax.jit(rounded)(jnp.full(2, 0.123)))
```

```text
called with (2,)
[0.1 0.1]
```

The function runs once in each run of the program, even if its result is unused, so its side effects happen. In jax the
order of two such calls is undefined. `writes=`, `lazy=`, `returns=` and `device=` are refused in compiled programs.
Differentiating it is refused unless you pass `detach=True`.
"""


def run(caller: str, names: tuple[str, ...], refusals: list[str]) -> list[str]:
    """Return the lines of one table."""
    rows = ["| | " + " | ".join(str(i + 1) for i in range(len(FUNCTIONS))) + " |", "|---" * (len(FUNCTIONS) + 1) + "|"]
    for name in names:
        cells = []
        for function in FUNCTIONS:
            try:
                found = agree(*transform(caller, function, name))
                cells.append("✓" if found else "wrong")
            except Exception as error:
                said = str(error).strip().split("\n")[0]
                if said not in refusals:
                    refusals.append(said)
                cells.append(f"[{refusals.index(said) + 1}]")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Write the page."""
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    warnings.simplefilter("ignore")
    refusals: list[str] = []
    legend = ", ".join(f"{i + 1} {name}" for i, name in enumerate(FUNCTIONS))
    tables = [
        ("jax transforms functions of torch", run("jax", JAX, refusals)),
        ("torch transforms functions of jax", run("torch", (*TORCH, *REFUSED), refusals)),
    ]
    parts = [HEAD]
    for title, rows in tables:
        parts.append(f"\n## {title}\n\n" + "\n".join(rows) + "\n")
    parts.append(f"\nFunctions: {legend}.\n\n")
    parts.append("\n".join(f"{i + 1}. {said}" for i, said in enumerate(refusals)) + "\n")
    PAGE.write_text("".join(parts) + TAIL, encoding="utf-8")


if __name__ == "__main__":
    main()
