"""Bridges in programs that torch compiles or jax jits: dlx, and the same by hand, in both directions.

By hand: a custom operator around two compiled functions of jax, and `jax.pure_callback` around torch. They know shape
and dtype beforehand, and have no second derivative, no random state and no check.
"""

import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.measure import compare, peer, race, ratio, verdict

AT_MOST = 1.0  # goal: of the time by hand
OVER_EAGER = 20  # goal: µs per operator under torch.compile over the eager bridge, without torch's own cost
OVER_CALLBACK = 30  # goal: µs under jax.jit over the callback by hand
FIRST = 1.2  # goal: first torch.compile with a function of numpy, of the same without it


def transforms(*, quick):
    """Measure bridges in transformed programs, print them, and say whether the goals are met."""
    if peer("jax") is None:
        return None
    number, rounds = 1, 200 if quick else 1000  # single calls: others seldom interrupt them
    found = [*_torch_calls_jax(number, rounds), *_jax_calls_torch(number, rounds)]
    return found if quick else [*found, _first_compile()]


def _show(title, ours, hand, limit=AT_MOST):
    """Print a row, and return it."""
    ours, hand = ([each * 1e6 for each in part] for part in (ours, hand))
    figure = compare(ours, hand)
    met = figure["ratio"] <= limit
    print(f"{title:44}{min(ours):8.0f}{min(hand):8.0f}  {ratio(figure)} <= {limit} {verdict(met)}")
    return figure | {"what": title, "met": met}


def _over(title, value, limit):
    print(f"{title:60}{value:8.0f} <= {limit} {verdict(value <= limit)}")
    return {"what": title, "over": value, "met": value <= limit}


def _torch_calls_jax(number, rounds):
    import jax
    import torch

    import dlx

    plain = lambda x: jax.numpy.sin(x) * x  # noqa: E731
    jitted = jax.jit(plain)
    there, back = jax.jit(lambda x: jax.vjp(jitted, x)), jax.jit(lambda pull, its: pull(its)[0])
    again = jax.jit(lambda x, its: jax.vjp(jitted, x)[1](its)[0])
    take, give = jax.numpy.from_dlpack, torch.from_dlpack

    def by_hand(forward, backward):
        class ByHand(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                result, ctx.pull = forward(take(x.detach()))
                return give(result)

            @staticmethod
            def backward(ctx, gradient):
                return give(backward(ctx.pull, take(gradient)))

        return ByHand.apply

    @torch.library.custom_op("dlx_benchmark::forward", mutates_args=())
    def forward(x: torch.Tensor) -> torch.Tensor:
        return give(jitted(take(x.detach()))).clone()

    @torch.library.custom_op("dlx_benchmark::backward", mutates_args=())
    def backward(x: torch.Tensor, its: torch.Tensor) -> torch.Tensor:
        return give(again(take(x.detach()), take(its))).clone()

    for each in (forward, backward):
        each.register_fake(lambda x, *its: torch.empty_like(x))
    keep = lambda ctx, inputs, output: ctx.save_for_backward(*inputs)  # noqa: E731
    forward.register_autograd(lambda ctx, its: backward(*ctx.saved_tensors, its), setup_context=keep)

    x, its = torch.linspace(0.1, 1, 64, requires_grad=True), torch.ones(64)
    within = lambda call: lambda x: call(x * 2) + 1  # noqa: E731
    both = lambda call: lambda: torch.autograd.grad(call(x), x, its)  # noqa: E731
    compiled = lambda call: both(torch.compile(within(call), backend="aot_eager", fullgraph=True))  # noqa: E731
    fast, slow = (dlx.using("jax", grad=True)(each) for each in (jitted, plain))
    nothing = lambda x: x  # noqa: E731
    times = race(
        *(both(within(call)) for call in (fast, by_hand(there, back), nothing)),
        *(compiled(call) for call in (fast, forward, nothing)),
        *(both(within(call)) for call in (slow, by_hand(lambda x: jax.vjp(plain, x), lambda pull, its: pull(its)[0]))),
        compiled(slow),
        number=number,
        rounds=rounds,
    )
    low = [min(each) * 1e6 for each in times]
    print(f"\n{'jax in torch, forward and backward, µs':44}{'dlx':>8}{'by hand':>8}  ratio")
    yield _show("eager, a function of jax.jit", *times[:2])
    yield _show("eager, a function that jax traces", *times[6:8])
    yield _show("torch.compile, a function of jax.jit", *times[3:5])
    own = low[5] - low[2]
    print(f"torch.compile costs {own:.0f} µs without a bridge")
    title = "torch.compile over eager, per operator, without torch's cost"
    yield _over(title, (low[3] - low[0] - own) / 2, OVER_EAGER)
    yield _over("the same, a function that jax traces when eager", (low[8] - low[6] - own) / 2, OVER_EAGER)


def _jax_calls_torch(number, rounds):
    import jax
    import numpy as np
    import torch
    from jax.experimental import io_callback

    import dlx

    x = jax.numpy.linspace(0.1, 1, 64)
    like, done = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.block_until_ready
    function = lambda x: torch.sin(x) * x  # noqa: E731

    def forward(x):
        return function(torch.from_numpy(np.array(x))).numpy()

    def backward(x, its):
        x = torch.from_numpy(np.array(x)).requires_grad_()
        return torch.autograd.grad(function(x), x, torch.from_numpy(np.array(its)))[0].numpy()

    by_hand = jax.custom_vjp(lambda x: jax.pure_callback(forward, like, x))
    by_hand.defvjp(lambda x: (by_hand(x), x), lambda x, its: (jax.pure_callback(backward, like, x, its),))
    bare = jax.jit(lambda x: jax.pure_callback(lambda x: x, like, x))
    bridge = dlx.using("torch", grad=True)(function)
    counted = dlx.using("numpy", result_like=lambda x: x)(np.sin)
    numpy_by_hand = jax.jit(lambda x: io_callback(lambda x: np.sin(np.asarray(x)), like, x))
    calls = [jax.jit(call) for call in (bridge, by_hand)]
    sums = [lambda x, call=call: call(x).sum() for call in (bridge, by_hand)]
    gradients, both = [*map(jax.grad, sums)], [jax.jit(jax.value_and_grad(each)) for each in sums]
    cases = [bare, *calls, *both, *gradients, jax.jit(counted), numpy_by_hand, *map(jax.jit, gradients)]
    times = race(*(lambda call=call: done(call(x)) for call in cases), number=number, rounds=rounds)
    print(f"\n{'torch in jax, µs':44}{'dlx':>8}{'by hand':>8}  ratio")
    yield _show("jax.jit", *times[1:3])
    yield _show("jax.jit(jax.value_and_grad)", *times[3:5])
    yield _show("jax.grad", *times[5:7])
    yield _show("jax.jit, numpy with side effects", *times[7:9])
    low = [min(each) * 1e6 for each in times]
    print(f"a callback that does nothing takes {low[0]:.0f} µs")
    yield _over("jax.jit over the callback by hand", low[1] - low[2], OVER_CALLBACK)
    # By hand, jax drops the forward call, whose result is unused; dlx keeps it, since it may draw random numbers.
    own = low[9] - low[10] - low[0]
    yield _over("jax.jit(jax.grad) over the one callback by hand and another that does nothing", own, OVER_CALLBACK)


_FIRST = """
import os, sys, numpy, torch, dlx
call = dlx.using("numpy", result_like=lambda x: x)(numpy.sin) if sys.argv[1] == "with" else lambda x: x
compiled, x = torch.compile(lambda x: (call(x * 2) + 1).cos() * x), torch.linspace(0.1, 1, 50)
start = sum(os.times()[:4])
compiled(x)
print(sum(os.times()[:4]) - start)
"""


def _first_compile(rounds=3):
    """Measure the first ``torch.compile`` in new processes with empty caches: processor time, with the C compiler's."""
    times = {"with": [], "without": []}
    for _ in range(rounds):
        for what, kept in times.items():
            with tempfile.TemporaryDirectory() as folder:
                env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
                done = subprocess.run([sys.executable, "-c", _FIRST, what], env=env, capture_output=True, check=True)
            kept.append(float(done.stdout))
    ours, without = (statistics.median(each) for each in times.values())
    met = ours / without <= FIRST
    print(f"\nfirst torch.compile with numpy {ours:.1f} s, without it {without:.1f} s of a processor: ", end="")
    print(f"{ours / without:.2f} <= {FIRST} {verdict(met)}")
    return {"what": "first torch.compile", "ours": ours, "theirs": without, "ratio": ours / without, "met": met}
