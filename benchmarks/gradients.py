"""One differentiable call across frameworks, forward and backward: dlx, the same by hand, and the frameworks' share.

The floor has no check, no lifetime and no second derivative: a node of torch, jax's two compiled functions, and the
private functions of both frameworks that import and export capsules.
"""

import sys

from benchmarks.measure import compare, peer, race, ratio, verdict

AT_MOST = 1.0  # goal: of the time by hand
BEYOND = 100  # goal: µs on top of jax's own two compiled functions
ARRAYS = 4


def gradients(*, quick):
    """Measure a call of a compiled jax function from torch, print it, and say whether the goals are met."""
    import torch

    import dlx

    jax = peer("jax")
    if jax is None:
        return None
    function = jax.jit(lambda a, b, c, d: a * b + c * d)
    decorated = dlx.using("jax", grad=True)(function)
    tensors = [torch.randn(64, requires_grad=True) for _ in range(ARRAYS)]
    arrays = [dlx.convert(each, to="jax", detach=True) for each in tensors]
    gradient = torch.ones(64)
    its = dlx.convert(gradient, to="jax")
    there, back = jax.jit(lambda *arrays: jax.vjp(function, *arrays)), jax.jit(lambda pull, its: pull(its))

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            result, ctx.pullback = there(*(jax.numpy.from_dlpack(each.detach()) for each in tensors))
            return torch.from_dlpack(result)

        @staticmethod
        def backward(ctx, gradient):
            return tuple(torch.from_dlpack(each) for each in back(ctx.pullback, jax.numpy.from_dlpack(gradient)))

    take, device = sys.modules["jaxlib"]._jax.dlpack_managed_tensor_to_buffer, jax.local_devices(backend="cpu")[0]

    class Floor(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            result, ctx.pullback = there(*(take(torch._C._to_dlpack(each), device, None, None) for each in tensors))
            return torch._C._from_dlpack(result.__dlpack__())

        @staticmethod
        def backward(ctx, gradient):
            found = back(ctx.pullback, take(torch._C._to_dlpack(gradient), device, None, None))
            return tuple(torch._C._from_dlpack(each.__dlpack__()) for each in found)

    def alone():
        result, pullback = there(*arrays)
        jax.block_until_ready((result, back(pullback, its)))

    times = race(
        lambda: torch.autograd.grad(decorated(*tensors), tensors, gradient),
        lambda: torch.autograd.grad(ByHand.apply(*tensors), tensors, gradient),
        lambda: torch.autograd.grad(Floor.apply(*tensors), tensors, gradient),
        alone,
        number=20,
        rounds=20 if quick else 100,
    )
    ours, hand, floor, own = ([each * 1e9 for each in part] for part in times)
    figure = compare(ours, hand)
    beyond = [(min(each) - min(own)) / 1e3 for each in (ours, hand, floor)]
    met = figure["ratio"] <= AT_MOST, beyond[0] <= BEYOND
    print(f"\nA call of jax from torch with {ARRAYS} arrays, forward and backward, µs")
    print(f"dlx {min(ours) / 1e3:.0f}, by hand {min(hand) / 1e3:.0f}, jax alone {min(own) / 1e3:.0f}")
    print(
        f"beyond jax: dlx {beyond[0]:.0f} <= {BEYOND} {verdict(met[1])}, by hand {beyond[1]:.0f}, floor {beyond[2]:.0f}"
    )
    print(f"ratio to by hand {ratio(figure)} <= {AT_MOST} {verdict(met[0])}")
    return figure | {"alone": min(own), "beyond": beyond[0], "floor": beyond[2], "met": all(met)}
