"""Train a torch module whose middle layer is a function of jax, and the same module in torch alone.

Run ``python examples/train_across/torch_with_jax.py``. It needs torch, jax and scikit-learn (for the iris data set).
Both modules see the same data and start with the same parameters: their losses agree to rounding.
"""

import sys

import jax.numpy as jnp
import torch
from sklearn.datasets import load_iris

import dlx


@dlx.using("jax", grad=True)
def in_jax(x, weight, bias):
    """Return the middle layer's result, with torch's parameters."""
    return jnp.tanh(x @ weight.T + bias)


class Middle(torch.nn.Module):
    """A linear layer and a tanh, computed by jax or by torch."""

    def __init__(self, size, use_jax):
        super().__init__()
        self.linear, self.use_jax = torch.nn.Linear(size, size), use_jax

    def forward(self, x):
        """Return the layer's result."""
        if self.use_jax:
            return in_jax(x, self.linear.weight, self.linear.bias)
        return torch.tanh(self.linear(x))


def train(*, use_jax, steps=200):
    """Return the loss after each step."""
    torch.manual_seed(0)
    flowers = load_iris()
    x = torch.tensor(flowers.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(flowers.target)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), Middle(16, use_jax), torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    """Train both, and print their losses; return 1 if they differ."""
    across, twin = train(use_jax=True), train(use_jax=False)
    apart = max(abs(a - b) for a, b in zip(across, twin, strict=True))
    print(f"loss {across[0]:.4f} -> {across[-1]:.4f}, at most {apart:.1e} from the twin in torch alone")
    return apart > 1e-5


if __name__ == "__main__":
    sys.exit(main())
