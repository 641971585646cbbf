"""Train in jax, with optax, through a layer of torch, and the same in jax alone.

Run ``python examples/train_across/jax_with_torch.py``. It needs torch, jax, optax and scikit-learn. The layer's
parameters are jax's: torch gets them as arguments, and optax updates them like all others. The step is compiled.
"""

import sys

import jax
import jax.numpy as jnp
import optax
import torch
from sklearn.datasets import load_iris

import dlx

LAYER = torch.nn.Linear(16, 16, device="meta")  # the layer's code; its parameters are passed


@dlx.using("torch", grad=True)
def in_torch(parameters, x):
    """Return the middle layer's result."""
    return torch.tanh(torch.func.functional_call(LAYER, parameters, (x,)))


def in_jax(parameters, x):
    """Return the middle layer's result."""
    return jnp.tanh(x @ parameters["weight"].T + parameters["bias"])


def train(middle, steps=200):
    """Return the loss after each step."""
    flowers = load_iris()
    x = jnp.asarray(flowers.data, "float32")
    x, y = (x - x.mean(0)) / x.std(0), jnp.asarray(flowers.target)
    keys = jax.random.split(jax.random.key(0), 3)
    parameters = {
        "first": jax.random.normal(keys[0], (4, 16)) * 0.5,
        "middle": {"weight": jax.random.normal(keys[1], (16, 16)) * 0.25, "bias": jnp.zeros(16)},
        "last": jax.random.normal(keys[2], (16, 3)) * 0.25,
    }
    optimizer = optax.adam(0.01)
    state = optimizer.init(parameters)

    def loss(parameters):
        found = middle(parameters["middle"], x @ parameters["first"]) @ parameters["last"]
        return optax.softmax_cross_entropy_with_integer_labels(found, y).mean()

    @jax.jit
    def step(parameters, state):
        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    losses = []
    for _ in range(steps):
        parameters, state, value = step(parameters, state)
        losses.append(value.item())
    return losses


def main():
    """Train both, and print their losses; return 1 if they differ."""
    across, twin = train(in_torch), train(in_jax)
    apart = max(abs(a - b) for a, b in zip(across, twin, strict=True))
    print(f"loss {across[0]:.4f} -> {across[-1]:.4f}, at most {apart:.1e} from the twin in jax alone")
    return apart > 1e-5


if __name__ == "__main__":
    sys.exit(main())
