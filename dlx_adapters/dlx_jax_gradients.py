"""Gradients for the JAX adapter: functions of other frameworks in jax's traces, and jax functions for others."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dlx
from dlx.adapter import Device, DType, DTypes, GradSupport, Operation, Tensor, over_memory

__all__ = ["support"]

HOST = Device("cpu")


def _is_tracked(array: Any) -> bool:
    return isinstance(array, sys.modules["jax"].core.Tracer)


def _is_differentiable(array: Any) -> bool:
    numpy = sys.modules["jax"].numpy
    return bool(numpy.issubdtype(array.dtype, numpy.inexact))


def _arrays(objs: Iterable[Any]) -> list[Any]:
    """Return a function's arguments as arrays; jax may pass Python numbers."""
    jax = sys.modules["jax"]
    return [each if isinstance(each, jax.Array) else jax.numpy.asarray(each) for each in objs]


def _conjugates(arrays: Iterable[Any]) -> list[Any]:
    """Convert gradients between the conventions of `GradSupport` and jax."""
    return [each.conj() if each is not None and each.dtype.kind == "c" else each for each in arrays]


def _split_vjp(function: Any, arrays: Sequence[Any]) -> tuple[list[Any], list[bool], Any]:
    """Return the results, whether each is differentiable, and jax's pullback for these."""
    jax = sys.modules["jax"]
    which: list[bool] = []

    def split(*operands: Any) -> Any:
        results = _arrays(function(*operands))
        which[:] = map(_is_differentiable, results)
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
    return _conjugates(pull(_conjugates(complete)))


def _vjp(function: Any, arrays: Sequence[Any]) -> tuple[Any, Any]:
    results, which, pull = _split_vjp(function, arrays)
    return results, lambda gradients: _pull_back(pull, results, which, gradients)


def _commit_like(results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Return results, moved to the operands' device if an operand is committed."""
    devices = {each.device for each in operands if isinstance(each, sys.modules["jax"].Array) and _is_committed(each)}
    return sys.modules["jax"].device_put([*results], devices.pop()) if len(devices) == 1 else [*results]


def _commit_gradients(gradients: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Apply `_commit_like` to gradients, which may be None."""
    committed = iter(_commit_like([each for each in gradients if each is not None], operands))
    return [None if each is None else next(committed) for each in gradients]


def _is_committed(array: Any) -> bool:
    return not _is_tracked(array) and array.committed and len(array.sharding.device_set) == 1


def _record(dtypes: DTypes, operation: Operation, arrays: Sequence[Any]) -> Any:
    operation, states = operation.replayable()
    results = _create_function(dtypes, operation, states)(*arrays)
    return results[: len(results) - states]


def _create_function(dtypes: DTypes, operation: Operation, states: int) -> Any:
    """Return a differentiable jax function for a `replayable` operation; its last results are `states`."""
    jax = sys.modules["jax"]

    def run(*operands: Any) -> Any:
        if not any(map(_is_tracked, operands)):
            return _commit_like(operation(_arrays(operands)), operands)
        like = [
            jax.ShapeDtypeStruct(shape, dtypes.to_native(dtype)) for shape, dtype in operation.results_like(operands)
        ]
        # Only numpy arrays in the callback: jax arrays could deadlock.
        return jax.pure_callback(lambda *now: operation(now, "numpy"), like, *operands, vmap_method="sequential")

    def forward(*primals: Any) -> Any:
        operands, wanted = [each.value for each in primals], [each.perturbed for each in primals]
        if any(map(_is_tracked, operands)):  # there may be an outer derivative
            results, pullback = differentiable(*operands), None
        else:
            results, pullback = operation.vjp(_arrays(operands), wanted)
            results = _commit_like(results, operands)
        state = list(results[len(results) - states :])
        return results, (operands, state, jax.tree_util.Partial(lambda: (wanted, pullback)))

    def backward(saved: Any, gradients: Any) -> Any:
        operands, state, partial = saved
        wanted, pullback = partial.func()
        zero = jax.custom_derivatives.SymbolicZero
        own = _conjugates(each if type(each) is not zero and _is_differentiable(each) else None for each in gradients)
        if pullback is not None and not any(map(_is_tracked, own)):
            return tuple(_commit_gradients(_conjugates(pullback(own)), operands))
        derived, extra = operation.derivative(own, wanted, state)
        found = iter(_conjugates(_record(dtypes, derived, (*operands, *extra))))
        pairs = zip(operands, wanted, strict=True)
        return tuple(next(found) if is_wanted and _is_differentiable(each) else None for each, is_wanted in pairs)

    differentiable = jax.custom_vjp(run)
    differentiable.defvjp(forward, backward, symbolic_zeros=True)
    return differentiable


def _import_tensor(tensor: Any, import_tensor: Callable[[Tensor], Any], host: bool) -> Any:
    """Return a jax array for a tensor, shared if possible."""
    if not isinstance(tensor, Tensor):
        return tensor
    array = import_tensor(tensor) if host else None
    return dlx.convert(tensor, to="jax") if array is None else array


def _export_results(arrays: Sequence[Any], own: Sequence[Any], host: bool) -> list[Any]:
    """Return writable tensors over new results without other references; return others unchanged."""
    found = []
    for array, known in zip(arrays, own, strict=True):
        if known is None or not host or not array.size or _is_tracked(array):
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
        is_new = _is_tracked(each) and sum(each is other for other in arrays) == 1
        dtype = dtypes.from_native(each.dtype) if is_new else None
        own.append((each.shape, dtype) if dtype is not None and dtype.bits >= 8 else None)  # smaller ones are packed
    return own


class _Compiled:
    """A `CompiledFunction` over a function of `jax.jit`."""

    def __init__(self, dtypes: DTypes, import_tensor: Callable[[Tensor], Any], function: Any) -> None:
        self._dtypes, self._import_tensor = dtypes, import_tensor
        tree = sys.modules["jax"].tree_util
        self._function, self.flatten, self.unflatten = function, tree.tree_flatten, tree.tree_unflatten

    def vjp(self, structure: Any, leaves: Sequence[Any], chosen: Sequence[int]) -> Any:
        jax, function, dtypes, import_tensor = sys.modules["jax"], self._function, self._dtypes, self._import_tensor
        host = jax.default_backend() == "cpu" and len(jax.local_devices(backend="cpu")) == 1

        def forward(*arrays: Any) -> Any:
            structures: list[Any] = []

            def over(*some: Any) -> list[Any]:
                every = [*arrays]
                for i, each in zip(chosen, some, strict=True):
                    every[i] = each
                rest = iter(every)
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
            arrays = [_import_tensor(each, import_tensor, host) for each in arrays]
            results, pull = forward_jit(*arrays)
            trace = pull.func
            wanted = {slot for slot in trace.slots if slot is not None}
            known = [each if i in wanted else None for i, each in enumerate((*arrays, *results))]

            def pullback(gradients: Sequence[Any]) -> list[Any]:
                imported = [
                    _import_tensor(each, import_tensor, host) if each is not None and is_one else None
                    for each, is_one in zip(gradients, trace.which, strict=True)
                ]
                found, own = backward_jit(pull, known, imported)
                every: list[Any] = [None] * len(arrays)
                for i, each in zip(chosen, _export_results(found, own.func(), host), strict=True):
                    every[i] = each
                return every

            return _export_results(results, trace.own, host), trace.structure, pullback

        return run


def _compile(dtypes: DTypes, import_tensor: Callable[[Tensor], Any], function: Any) -> _Compiled | None:
    jitted = type(sys.modules["jax"].jit(lambda: None))
    return _Compiled(dtypes, import_tensor, function) if type(function) is jitted else None


def support(dtypes: DTypes, import_tensor: Callable[[Tensor], Any]) -> GradSupport:
    """Return jax's `GradSupport`; ``import_tensor(tensor)`` returns an array over a host tensor, or None."""
    return GradSupport(
        _is_tracked,
        _is_differentiable,
        _vjp,
        functools.partial(_record, dtypes),
        compile=functools.partial(_compile, dtypes, import_tensor),
        by_type=True,
    )
