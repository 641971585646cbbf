"""`GradSupport`: how a framework differentiates, and the objects that two frameworks exchange for gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dlx._core.types import DType
from dlx._support.frozen import Frozen
from dlx._support.locks import lock_of
from dlx.errors import ConversionError

__all__ = ["CompiledFunction", "GradSupport", "Operation", "alone"]


class Operation(Protocol):
    """A function of another framework, passed to `GradSupport.record`; arguments and results are arrays.

    All arrays belong to the recording framework. Gradients follow the convention of `GradSupport`. `needs` names the
    packages and the function that it calls, for programs that are printed or saved.
    """

    needs: str

    def __call__(self, arrays: Sequence[Any], to: str | None = None) -> list[Any]:
        """Return the results, as arrays of the framework `to` if it is given."""

    def vjp(
        self, arrays: Sequence[Any], wanted: Sequence[bool] | None = None
    ) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Return the results and a pullback from gradients of the results to gradients of `arrays` (None: no gradient).

        `wanted` selects the arrays whose gradients are needed; None: all. The pullback's results cannot be
        differentiated; the results of `derivative` can.
        """

    def derivative(
        self, gradients: Sequence[Any], wanted: Sequence[bool], state: Sequence[Any] = ()
    ) -> tuple[Operation, list[Any]]:
        """Return an operation for the pullback, and its arguments after the arrays.

        These are the `gradients` that are not None, and `state`, the last results of a `replayable` operation. The
        results are the gradients of the wanted, differentiable arrays; missing gradients are zeros. The operation runs
        the function again.
        """

    def pushforward(
        self, tangents: Sequence[Any], wanted: Sequence[bool], state: Sequence[Any] = ()
    ) -> tuple[Operation, list[Any]]:
        """Return the operation (arguments, tangents, state) -> tangents of the differentiable results, as `derivative`.

        `tangents` are those of the wanted, differentiable arrays.
        """

    def batch(self, axes: Sequence[int | None], size: int) -> Operation:
        """Return the operation over arrays with an additional axis each (None: without), the first of all results."""

    def compile(self) -> Operation:
        """Return an operation to run many times; the function's framework compiles it if it can."""

    def replayable(self) -> tuple[Operation, int]:
        """Return an operation whose last results are the random states before and after the call, and their number.

        Pass them to `derivative`, so that the second run draws the same random numbers (dropout).
        """

    def results_like(self, arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], DType]]:
        """Return shape and dtype of each result; only shape and dtype of `arrays` are known."""


class CompiledFunction(Protocol):
    """A compiled function, returned by `GradSupport.compile`."""

    def flatten(self, value: Any) -> tuple[list[Any], Any]:
        """Return the leaves of the framework's tree (none is None) and its hashable structure."""

    def unflatten(self, structure: Any, leaves: Sequence[Any]) -> Any:
        """Return the tree."""

    def vjp(self, structure: Any, leaves: Sequence[Any], chosen: Sequence[int]) -> Callable[..., Any]:
        """Return the derivative for calls with arguments of a structure, by some of their arrays.

        Parameters
        ----------
        structure, leaves
            Of ``(args, options)``, with None in place of each array.
        chosen
            Indices of the arrays to differentiate by.

        Returns
        -------
        vjp
            ``vjp(arrays)`` takes `dlx.Tensor` or the framework's arrays and returns ``(results, structure, pullback)``:
            the leaves of the result and their structure. ``pullback(gradients)`` takes a `dlx.Tensor` or None for each
            result, and returns a gradient for each chosen array and None for the others. Results and gradients may be
            writable `dlx.Tensor` objects if they are the only users of the memory. It traces only if jit would.
        """


@dataclass(eq=False, repr=False)
class GradSupport(Frozen):
    """How a framework differentiates functions under `dlx.using` with ``grad=True``.

    Gradients of complex arrays follow torch's convention: for a holomorphic function with the Jacobian J, the gradient
    g of the results becomes ``J.conj().T @ g`` for the arguments. jax uses the conjugates.

    Attributes
    ----------
    is_tracked
        ``is_tracked(array)`` returns whether computations with an array are recorded for gradients. `dlx.using` refuses
        such an argument unless the call says how to handle its gradients.
    is_differentiable
        ``is_differentiable(array)`` returns whether arrays of its dtype have gradients: floating-point and complex
        arrays. Used with `vjp` and `record`.
    vjp
        ``vjp(function, arrays)`` calls ``function(*arrays)``, which returns a list of arrays, and returns ``(results,
        pullback)``. ``pullback(gradients)`` takes a gradient or None for each result, and returns one for each of
        `arrays` (zeros if the results do not depend on it). Both may be called while a function is differentiated.
        None: other frameworks cannot differentiate functions of this one.
    record
        ``record(operation, arrays)`` returns the results of an `Operation` as arrays that the framework differentiates.
        None: it cannot differentiate functions of other frameworks.
    eval_shape
        ``eval_shape(function, specs)`` returns ``(shape, dtype)`` of each result of ``function(*arrays)`` without data;
        `specs` has such a pair for each array. For compiled callers. None: users declare the results.
    jvp
        ``jvp(function, arrays, tangents)`` returns the results of ``function(*arrays)``, a list, and the tangents of
        the differentiable results. None: no forward mode.
    vmap
        ``vmap(function, axes)`` returns a function over arrays with an additional axis each (None: without), and adds
        a first axis to every result. None: other frameworks call the function for each element.
    jit
        ``jit(function)`` compiles a function from arrays to a list of arrays. None: functions run as they are.
    call
        ``call(operation, arrays, detach)`` returns the results of an `Operation` in a program that the framework
        traces. The operation runs once per run of the program, and has no derivatives: differentiating raises an error
        unless `detach` is true. None: traced programs cannot call functions of other frameworks.
    random_state, at_random_state
        ``random_state()`` returns the state of the framework's random generator as an array of fixed shape.
        ``at_random_state(state)`` returns a context with that state, and restores the previous state at its end. If all
        threads share a generator, other threads draw from the same state within the context. dlx enters it only for
        functions that drew random numbers, in one thread at a time. None: functions take random numbers, or keys for
        them, as arguments.
    compile
        ``compile(function)`` returns a `CompiledFunction` for a compiled function, which is traced once per kind of
        arguments, and None for others. None: the framework has no compiled functions.
    by_type
        Whether tracked arrays have a separate type (tracers): dlx then does not call `is_tracked` for other arrays.
    """

    is_tracked: Callable[[Any], bool]
    is_differentiable: Callable[[Any], bool] = lambda array: False
    vjp: Callable[[Callable[..., Any], Sequence[Any]], tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]] | None = (
        None
    )
    record: Callable[[Operation, Sequence[Any]], Sequence[Any]] | None = None
    eval_shape: (
        Callable[[Callable[..., Any], Sequence[tuple[tuple[int, ...], DType]]], list[tuple[tuple[int, ...], DType]]]
        | None
    ) = None
    jvp: Callable[[Callable[..., Any], Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]] | None = None
    vmap: Callable[[Callable[..., Any], Sequence[int | None]], Callable[..., Any]] | None = None
    jit: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    call: Callable[[Operation, Sequence[Any], bool], Sequence[Any]] | None = None
    random_state: Callable[[], Any] | None = None
    at_random_state: Callable[[Any], AbstractContextManager[Any]] | None = None
    compile: Callable[[Callable[..., Any]], CompiledFunction | None] | None = None
    by_type: bool = False

    @contextmanager
    def replayed(self, states: Sequence[Any]) -> Iterator[None]:
        """Return a context in which a function draws the same random numbers as before.

        An adapter can call this method when it runs a function again.

        Parameters
        ----------
        states
            Results of `random_state` before and after the first run; empty for frameworks without it. The context does
            nothing if they are equal.

        Raises
        ------
        ConversionError
            If the function drew other numbers because another thread drew some in between.
        """
        if not states or _equal(*states):
            yield
            return
        before, after = states
        assert self.at_random_state is not None and self.random_state is not None
        with alone(), self.at_random_state(before):
            yield
            now = self.random_state()
            if not (_equal(now, after) or _equal(now, before)):  # before: only another thread drew
                raise ConversionError(
                    "the function drew other random numbers in the backward pass because another thread drew some",
                    fix="Draw random numbers in one thread only, or pass them as arguments.",
                )


class _Draws:
    """Holder of the lock for functions that replay random numbers."""

    _lock: threading.RLock | None = None


_DRAWS = _Draws()
MAX_WAIT = 5.0  # seconds: the holder of the lock may wait for a thread that needs it


@contextmanager
def alone() -> Iterator[None]:
    """Hold the lock within the context; other threads wait at most `MAX_WAIT` (`GradSupport.replayed` checks)."""
    lock = lock_of(_DRAWS)
    held = lock.acquire(timeout=MAX_WAIT)
    try:
        yield
    finally:
        if held:
            lock.release()


def _equal(one: Any, other: Any) -> bool:
    return bool((one == other).all())
