"""Twenty functions in numpy's style, and every transformation of torch and jax: for a test and a page of the docs."""

import dlx


def _torch_like():
    import torch

    return torch


def _jax_like():
    import jax.numpy

    return jax.numpy


def _softmax(np, x):
    y = np.exp(x)
    return y / y.sum(0)


# name -> function of (torch or jax.numpy, x), from a vector to a vector of the same length
FUNCTIONS = {
    "sin": lambda np, x: np.sin(x),
    "product of two": lambda np, x: np.sin(x) * np.exp(x) * x,
    "power": lambda np, x: (x * x + 1) ** 1.5,
    "tanh": lambda np, x: np.tanh(x),
    "log": lambda np, x: np.log(x + 1),
    "square root": lambda np, x: np.sqrt(x + 1),
    "quotient": lambda np, x: x / (1 + x * x),
    "where": lambda np, x: np.where(x > 0.5, x * x, 0.5 * x),
    "absolute": lambda np, x: abs(x - 0.3),
    "clip": lambda np, x: np.clip(x, 0.23, 0.77) * x,
    "scale by sum": lambda np, x: x * x.sum(),
    "softmax": _softmax,
    "norm": lambda np, x: x / np.sqrt((x * x).sum() + 1),
    "cumulative sum": lambda np, x: np.cumsum(x * x, 0),
    "outer and sum": lambda np, x: (x.reshape(-1, 1) * x.reshape(1, -1)).sum(1),
    "matrix product": lambda np, x: np.outer(x, x) @ x,
    "maximum": lambda np, x: np.maximum(x, x * x),
    "flip": lambda np, x: np.flip(x, (0,)) * x,
    "concatenate": lambda np, x: np.concatenate([x[1:], x[:1]]) * x,
    "polynomial": lambda np, x: ((2 * x + 3) * x - 1) * x,
}


def _jax_transforms():
    import jax
    from jax import lax
    from jax.numpy import ones_like

    return {
        "jit": lambda f, x, t: jax.jit(f)(x),
        "grad": lambda f, x, t: jax.grad(lambda x: f(x).sum())(x),
        "jit grad": lambda f, x, t: jax.jit(jax.grad(lambda x: f(x).sum()))(x),
        "grad jit": lambda f, x, t: jax.grad(jax.jit(lambda x: f(x).sum()))(x),
        "vjp": lambda f, x, t: jax.vjp(f, x)[1](t)[0],
        "jvp": lambda f, x, t: jax.jvp(f, (x,), (t,)),
        "jit jvp": lambda f, x, t: jax.jit(lambda x, t: jax.jvp(f, (x,), (t,)))(x, t),
        "linearize": lambda f, x, t: jax.linearize(f, x)[1](t),
        "vmap": lambda f, x, t: jax.vmap(f)(x[None] * t[:2, None]),
        "jit vmap": lambda f, x, t: jax.jit(jax.vmap(f))(x[None] * t[:2, None]),
        "jacfwd": lambda f, x, t: jax.jacfwd(f)(x),
        "jacrev": lambda f, x, t: jax.jacrev(f)(x),
        "hessian": lambda f, x, t: jax.jit(jax.hessian(lambda x: f(x).sum()))(x),
        "third derivative": lambda f, x, t: jax.grad(
            lambda x: jax.jvp(jax.grad(lambda x: f(x).sum()), (x,), (t,))[1].sum()
        )(x),
        "scan": lambda f, x, t: lax.scan(lambda c, v: (f(c) * v, c), x, ones_like(t[:2]))[0],
        "grad scan": lambda f, x, t: jax.grad(lambda x: lax.scan(lambda c, v: (f(c), v), x, t[:2])[0].sum())(x),
        "cond": lambda f, x, t: jax.jit(lambda x: lax.cond(x[0] > 0, f, lambda x: x, x))(x),
        "remat": lambda f, x, t: jax.jit(jax.grad(lambda x: jax.checkpoint(f)(x).sum()))(x),
    }


def _torch_transforms(eager=False):
    """Give the transformations; `eager`: without compilation and export, for the values that are expected."""
    import torch

    def compiled(make, requires_grad=False):
        def run(f, x, t):
            torch._dynamo.reset()
            x = x.clone().requires_grad_(requires_grad)
            call = make(f) if eager else torch.compile(lambda x: make(f)(x), backend="aot_eager", fullgraph=True)
            y = call(x)
            return (y, torch.autograd.grad(y.sum(), x)[0]) if requires_grad else y

        return run

    def exported(f, x, **options):
        return Module(f)(x) if eager else torch.export.export(Module(f), (x,), **options).module()(x)

    class Module(torch.nn.Module):
        def __init__(self, f):
            super().__init__()
            self.f = f

        def forward(self, x):
            return self.f(x * 2) + 1

    class Scale(torch.nn.Module):
        def __init__(self, f):
            super().__init__()
            self.f, self.weight = f, torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return self.f(x * self.weight).sum()

    def call_functional(f, x, t):
        module = Scale(f)
        return func.grad(lambda p: func.functional_call(module, p, (x,)))({"weight": t / 4})["weight"]

    def checkpointed(f, x, t):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(checkpoint(f, x, use_reentrant=False), x, t)[0]

    func, loss = torch.func, lambda f: lambda x: f(x).sum()
    checkpoint = torch.utils.checkpoint.checkpoint
    return {
        "compile": compiled(lambda f: lambda x: f(x * 2) + 1, requires_grad=True),
        "compile, no gradient": compiled(lambda f: lambda x: f(x * 2) + 1),
        "compile checkpoint": compiled(lambda f: lambda x: checkpoint(f, x, use_reentrant=False), requires_grad=True),
        "compile func.grad": compiled(lambda f: func.grad(loss(f))),
        "compile vmap": compiled(lambda f: lambda x: func.vmap(f)(torch.stack([x, 2 * x]))),
        "compile jvp": compiled(lambda f: lambda x: func.jvp(f, (x,), (x,))[1]),
        "func.grad": lambda f, x, t: func.grad(loss(f))(x),
        "vjp": lambda f, x, t: func.vjp(f, x)[1](t)[0],
        "jvp": lambda f, x, t: func.jvp(f, (x,), (t,)),
        "vmap": lambda f, x, t: func.vmap(f)(torch.stack([x, 2 * x])),
        "vmap func.grad": lambda f, x, t: func.vmap(func.grad(loss(f)))(torch.stack([x, 2 * x])),
        "jacfwd": lambda f, x, t: func.jacfwd(f)(x),
        "jacrev": lambda f, x, t: func.jacrev(f)(x),
        "hessian": lambda f, x, t: func.hessian(loss(f))(x),
        "linearize": lambda f, x, t: func.linearize(f, x)[1](t),
        "functional_call": call_functional,
        "checkpoint": checkpointed,
        "export": lambda f, x, t: exported(f, x),
        "export, strict": lambda f, x, t: exported(f, x, strict=True),
    }


JAX = (
    *("jit", "grad", "jit grad", "grad jit", "vjp", "jvp", "jit jvp", "linearize", "vmap", "jit vmap", "jacfwd"),
    *("jacrev", "hessian", "third derivative", "scan", "grad scan", "cond", "remat"),
)
TORCH = (
    *("compile", "compile, no gradient", "compile checkpoint", "compile func.grad", "compile vmap", "compile jvp"),
    *(
        "func.grad",
        "vjp",
        "jvp",
        "vmap",
        "vmap func.grad",
        "jacfwd",
        "jacrev",
        "hessian",
        "functional_call",
        "checkpoint",
    ),
    *("export", "export, strict"),
)
REFUSED = ("linearize",)  # by torch, of `_torch_transforms`


def transform(caller, function, name):
    """Return the result of a transformation of a function of the other framework, and of the caller's own.

    For torch, the latter is neither compiled nor exported: that takes a third of the time, and tests only torch.
    """
    own, other = (_jax_like(), _torch_like()) if caller == "jax" else (_torch_like(), _jax_like())
    body = FUNCTIONS[function]
    bridge = dlx.using("torch" if caller == "jax" else "jax", grad=True)(lambda x: body(other, x))
    x = own.linspace(0.1, 0.9, 3, dtype=own.float64)
    t = own.arange(3, dtype=own.float64) + 1
    runs = [_jax_transforms()] * 2 if caller == "jax" else [_torch_transforms(), _torch_transforms(eager=True)]
    return runs[0][name](bridge, x, t), runs[1][name](lambda x: body(own, x), x, t)


def agree(found, expected):
    """Return whether two results are equal to 1e-9."""
    import numpy

    pairs = zip(*([each] if hasattr(each, "shape") else list(each) for each in (found, expected)), strict=True)
    arrays = [[each.detach() if hasattr(each, "detach") else each for each in pair] for pair in pairs]
    return all(numpy.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in arrays)
