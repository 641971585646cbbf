"""Gradients for the JAX adapter: functions of other frameworks in jax's traces, and jax functions for others."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import dlx
from dlx.adapter import Device, DType, DTypes, GradSupport, Tensor, over_memory
from dlx_adapters import dlx_jax_primitives as primitives

__all__ = ["is_tracing", "support"]

HOST = Device("cpu")


def is_tracing() -> bool:
    """Return whether jax traces what this thread computes."""
    try:
        return not sys.modules["jax"]._src.core.trace_state_clean()
    except AttributeError:  # unknown: traced arrays have a separate type
        return True


def _split_vjp(function: Any, arrays: Sequence[Any]) -> tuple[list[Any], list[bool], Any]:
    """Return the results, whether each is differentiable, and jax's pullback for these."""
    jax = sys.modules["jax"]
    which: list[bool] = []

    def split(*operands: Any) -> Any:
        results = primitives.as_arrays(function(*operands))
        which[:] = map(primitives.is_inexact, results)
        pairs = list(zip(results, which, strict=True))
        return [each for each, is_one in pairs if is_one], [each for each, is_one in pairs if not is_one]

    differentiable, pull, others = jax.vjp(split, *arrays, has_aux=True)
    parts = iter(differentiable), iter(others)
    return [next(parts[not is_one]) for is_one in which], which, pull


def _pull_back(pull: Any, results: Sequence[Any], which: Sequence[bool], gradients: Sequence[Any]) -> list[Any]:
    """Call jax's pullback and return gradients in the convention of `GradSupport`."""
    complete = [
        sys.modules["jax"].numpy.zeros(result.shape, result.dtype) if gradient is None else gradient
        for result, gradient, is_one in zip(results, gradients, which, strict=True)
        if is_one
    ]
    return primitives.conjugate(pull(primitives.conjugate(complete)))


def _vjp(function: Any, arrays: Sequence[Any]) -> tuple[Any, Any]:
    results, which, pull = _split_vjp(function, arrays)
    return results, lambda gradients: _pull_back(pull, results, which, gradients)


def _jvp(function: Any, arrays: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the results, and the tangents of the differentiable results."""
    results, moved = sys.modules["jax"].jvp(_flat(function), [*arrays], [*tangents])
    return results, [each for result, each in zip(results, moved, strict=True) if primitives.is_inexact(result)]


def _flat(function: Any) -> Callable[..., list[Any]]:
    return lambda *arrays: primitives.as_arrays(function(*arrays))


def _eval_shape(dtypes: DTypes, function: Any, specs: Sequence[tuple[tuple[Any, ...], DType]]) -> Any:
    """Return shape and dtype of each result; sizes that are symbols of torch stay symbols if jax can express them."""
    sizes = {str(n): n for shape, _ in specs for n in shape if type(n) is not int}
    if sizes:
        with contextlib.suppress(Exception):  # jax cannot decide a comparison, or the sizes' relation is unknown to it
            return _eval_symbols(dtypes, function, specs, sizes)
        specs = [(tuple(map(int, shape)), dtype) for shape, dtype in specs]
    return [(tuple(each.shape), dtypes.from_native(each.dtype)) for each in _eval(dtypes, function, specs)]


def _eval(dtypes: DTypes, function: Any, specs: Sequence[tuple[tuple[Any, ...], DType]]) -> Any:
    jax = sys.modules["jax"]
    like = [jax.ShapeDtypeStruct(shape, dtypes.to_native(dtype)) for shape, dtype in specs]
    return jax.eval_shape(_flat(function), *like)


def _eval_symbols(dtypes: DTypes, function: Any, specs: Any, sizes: dict[str, Any]) -> Any:
    """Apply `_eval_shape` for all sizes from 2, and check that the result is right for smaller ones."""
    from jax import export

    names = [f"n{i}" for i in range(len(sizes))]
    scope = export.SymbolicScope([f"{name} >= 2" for name in names])
    symbols = dict(zip(names, export.symbolic_shape(",".join(names), scope=scope), strict=True))
    places = dict(zip(sizes, names, strict=True))

    def evaluate(values: dict[str, Any]) -> Any:
        like = [(tuple(values.get(places.get(str(n), ""), n) for n in shape), dtype) for shape, dtype in specs]
        return _eval(dtypes, function, like)

    results = evaluate(symbols)
    small = [name for name, size in zip(names, sizes.values(), strict=True) if not _is_large(size)]
    for some in itertools.product((0, 1, None), repeat=len(small)):
        values = symbols | {name: n for name, n in zip(small, some, strict=True) if n is not None}
        for each, other in zip(results, evaluate(values) if small else results, strict=True):
            if tuple(_substitute(n, values) for n in each.shape) != other.shape or each.dtype != other.dtype:
                raise ValueError("sizes 0 and 1 have other results")
    env = {name: _Size(size) for name, size in zip(names, sizes.values(), strict=True)}
    found = [tuple(_unwrap(_substitute(n, env)) for n in each.shape) for each in results]
    return [(shape, dtypes.from_native(each.dtype)) for shape, each in zip(found, results, strict=True)]


def _is_large(size: Any) -> bool:
    """Return whether a size is 2 or more, as torch assumes of its symbols; sizes that depend on data are not."""
    try:
        return bool(size >= 2)
    except Exception:
        return False


def _substitute(size: Any, values: dict[str, Any]) -> Any:
    return size if type(size) is int else size._evaluate(values)


class _Size:
    """A size of torch that jax's arithmetic does not turn into a number."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __add__(self, other: Any) -> _Size:
        return _Size(self.value + _unwrap(other))

    def __mul__(self, other: Any) -> _Size:
        return _Size(self.value * _unwrap(other))

    def __divmod__(self, other: Any) -> tuple[_Size, _Size]:
        return _Size(self.value // _unwrap(other)), _Size(self.value % _unwrap(other))

    __radd__, __rmul__ = __add__, __mul__


def _unwrap(size: Any) -> Any:
    return size.value if isinstance(size, _Size) else int(size)


def _import(array: Any) -> Any:
    """Return a jax array for a tensor, shared if possible."""
    return dlx.convert(array, to="jax") if isinstance(array, Tensor) else array


def _export_results(arrays: Sequence[Any], own: Sequence[Any], host: bool) -> list[Any]:
    """Return writable tensors over new results without other references; return others unchanged."""
    found = []
    for array, known in zip(arrays, own, strict=True):
        if known is None or not host or not array.size or primitives.is_tracer(array):
            found.append(array)
            continue
        array.block_until_ready()
        found.append(over_memory(array.unsafe_buffer_pointer(), known[0], None, known[1], HOST, owner=array))
    return found


class _Trace:
    """A traced derivative. Calling it computes the gradients while jax traces the backward pass."""

    def __init__(
        self, dtypes: DTypes, structure: Any, pull: Any, slots: list[int | None], results: list[Any], which: list[bool]
    ) -> None:
        self._dtypes, self.structure = dtypes, structure
        self._pull = pull  # tree structure of jax's pullback
        self.slots = slots  # index of each pullback leaf in arrays and results, to avoid storing it twice; or None
        self.which = which
        self.own: list[Any] = []  # as `_own` returns, of the results
        self._results = [sys.modules["jax"].ShapeDtypeStruct(each.shape, each.dtype) for each in results]

    def __call__(self, *stored: Any, known: list[Any], gradients: list[Any]) -> Any:
        """Return the gradients, and their result of `_own`."""
        tree, rest = sys.modules["jax"].tree_util, iter(stored)
        leaves = [next(rest) if slot is None else known[slot] for slot in self.slots]
        pull = tree.tree_unflatten(self._pull, leaves)
        found = _pull_back(pull, self._results, self.which, gradients)
        own = _own(self._dtypes, found, [*stored, *known, *gradients])
        return found, tree.Partial(lambda: own)


def _own(dtypes: DTypes, results: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, DType] | None]:
    """Return shape and dtype of each result with its own memory, else None."""
    arrays = [*others, *results]
    own: list[tuple[Any, DType] | None] = []
    for each in results:
        is_new = primitives.is_tracer(each) and sum(each is other for other in arrays) == 1
        dtype = dtypes.from_native(each.dtype) if is_new else None
        own.append((each.shape, dtype) if dtype is not None and dtype.bits >= 8 else None)  # smaller ones are packed
    return own


class _Compiled:
    """A `CompiledFunction` over a function of `jax.jit`."""

    def __init__(self, dtypes: DTypes, function: Any) -> None:
        tree = sys.modules["jax"].tree_util
        self._dtypes, self._function = dtypes, function
        self.flatten, self.unflatten = tree.tree_flatten, tree.tree_unflatten

    def vjp(self, structure: Any, leaves: Sequence[Any], chosen: Sequence[int]) -> Any:
        jax, function, dtypes = sys.modules["jax"], self._function, self._dtypes
        host = jax.default_backend() == "cpu" and len(jax.local_devices(backend="cpu")) == 1

        def forward(*arrays: Any) -> Any:
            structures: list[Any] = []

            def over(*some: Any) -> list[Any]:
                rest = iter(primitives.fill(arrays, chosen, some))
                complete = [next(rest) if leaf is None else leaf for leaf in leaves]
                args, options = jax.tree_util.tree_unflatten(structure, complete)
                found, shape = jax.tree_util.tree_flatten(function(*args, **options))
                structures[:] = [shape]
                return list(found)

            results, which, pull = _split_vjp(over, [arrays[i] for i in chosen])
            pull_leaves, pull_structure = jax.tree_util.tree_flatten(pull)
            known = [*arrays, *results]
            slots = [next((i for i, each in enumerate(known) if each is leaf), None) for leaf in pull_leaves]
            trace = _Trace(dtypes, structures[0], pull_structure, slots, results, which)
            trace.own = _own(dtypes, results, arrays)
            rest = [leaf for leaf, slot in zip(pull_leaves, slots, strict=True) if slot is None]
            return results, jax.tree_util.Partial(trace, *rest)

        forward_jit = jax.jit(forward)
        backward_jit = jax.jit(lambda pull, known, gradients: pull(known=known, gradients=gradients))

        def run(arrays: Sequence[Any]) -> Any:
            arrays = [*map(_import, arrays)]
            results, pull = forward_jit(*arrays)
            trace = pull.func
            wanted = {slot for slot in trace.slots if slot is not None}
            known = [each if i in wanted else None for i, each in enumerate((*arrays, *results))]

            def pullback(gradients: Sequence[Any]) -> list[Any]:
                imported = [
                    _import(each) if each is not None and is_one else None
                    for each, is_one in zip(gradients, trace.which, strict=True)
                ]
                found, own = backward_jit(pull, known, imported)
                return primitives.fill([None] * len(arrays), chosen, _export_results(found, own.func(), host))

            return _export_results(results, trace.own, host), trace.structure, pullback

        return run


def _compile(dtypes: DTypes, function: Any) -> _Compiled | None:
    jitted = type(sys.modules["jax"].jit(lambda: None))
    return _Compiled(dtypes, function) if type(function) is jitted else None


def support(dtypes: DTypes) -> GradSupport:
    """Return jax's `GradSupport`, given the dtypes of its adapter."""
    return GradSupport(
        primitives.is_tracer,
        primitives.is_inexact,
        _vjp,
        functools.partial(primitives.record, dtypes),
        functools.partial(_eval_shape, dtypes),
        jvp=_jvp,
        vmap=lambda function, axes: sys.modules["jax"].vmap(_flat(function), tuple(axes)),
        jit=lambda function: sys.modules["jax"].jit(_flat(function)),
        call=functools.partial(primitives.call_once, dtypes),
        compile=functools.partial(_compile, dtypes),
        by_type=True,
    )
