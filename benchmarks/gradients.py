"""One differentiable call across frameworks, forward and backward: dlx, the same by hand, and jax alone."""

from benchmarks.measure import compare, peer, race, ratio, verdict

AT_MOST = 1.3  # goal: of the time by hand
ARRAYS = 4


def gradients(*, quick):
    """Measure a call of a compiled function of jax from torch, print it, and say whether the goal is met."""
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

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            result, ctx.pullback = jax.vjp(function, *(jax.numpy.from_dlpack(each.detach()) for each in given))
            return torch.from_dlpack(result)

        @staticmethod
        def backward(ctx, gradient):
            return tuple(torch.from_dlpack(each) for each in ctx.pullback(jax.numpy.from_dlpack(gradient)))

    def alone():
        _, pullback = jax.vjp(function, *arrays)
        jax.block_until_ready(pullback(its))

    times = race(
        lambda: torch.autograd.grad(decorated(*tensors), tensors, gradient),
        lambda: torch.autograd.grad(ByHand.apply(*tensors), tensors, gradient),
        alone,
        number=10,
        rounds=10 if quick else 60,
    )
    ours, hand, own = ([each * 1e9 for each in part] for part in times)
    figure = compare(ours, hand)
    met = figure["ratio"] <= AT_MOST
    beyond = [(min(each) - min(own)) / 1e3 for each in (ours, hand)]
    print(f"\nA call of jax from torch with {ARRAYS} arrays, forward and backward, µs")
    print(f"dlx {min(ours) / 1e3:.0f}, by hand {min(hand) / 1e3:.0f}, jax alone {min(own) / 1e3:.0f}")
    print(f"beyond jax: dlx {beyond[0]:.0f}, by hand {beyond[1]:.0f}")
    print(f"of by hand {ratio(figure)} <= {AT_MOST} {verdict(met)}")
    return figure | {"alone": min(own), "met": met}
