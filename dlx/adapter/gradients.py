"""How a framework differentiates: `GradSupport`, and what is passed between two frameworks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dlx._core.types import DType
from dlx._support.locks import lock_of
from dlx.errors import ConversionError

__all__ = ["CompiledFunction", "GradSupport", "Operation", "alone"]


class Operation(Protocol):
    """A function of another framework, as `GradSupport.record` gets it: arrays in, arrays out, without containers.

    All arrays are those of the framework that records. Gradients follow the convention of `GradSupport`.
    """

    def __call__(self, arrays: Sequence[Any], to: str | None = None) -> list[Any]:
        """Return the results, as arrays of another framework if `to` names one."""

    def vjp(
        self, arrays: Sequence[Any], wanted: Sequence[bool] | None = None
    ) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Return the results and a pullback, from gradients of the results to those of `arrays`; None for no gradient.

        `wanted` says of each array whether its gradient is asked for; None: all are. The pullback's answer cannot be
        differentiated; that of `derivative` can.
        """

    def derivative(
        self, gradients: Sequence[Any], wanted: Sequence[bool] | None = None, state: Sequence[Any] = ()
    ) -> tuple[Operation, list[Any]]:
        """Return an operation for the pullback, and what follows the arrays as its arguments.

        Those are the `gradients` that there are, and `state`, the last results of a `replayable` operation. The results
        are the gradients of the arrays that are wanted and that `is_differentiable` is true of, zeros where there are
        none. The function is run again.
        """

    def replayable(self) -> tuple[Operation, int]:
        """Return an operation whose last results are the random states before and after it, and how many these are.

        A caller that runs the function again for its derivatives passes them to `derivative`: dropout drops the same.
        """

    def results_like(self, arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], DType]]:
        """Return shape and dtype of each result, where `arrays` are known by theirs only."""


class CompiledFunction(Protocol):
    """A function that its user had compiled, as `GradSupport.compile` gives it."""

    def flatten(self, value: Any) -> tuple[list[Any], Any]:
        """Return the leaves of a tree as the framework takes it apart, none of them None, and a hashable structure."""

    def unflatten(self, structure: Any, leaves: Sequence[Any]) -> Any:
        """Return the tree again."""

    def vjp(self, structure: Any, leaves: Sequence[Any], chosen: Sequence[int]) -> Callable[..., Any]:
        """Return the derivative for calls with ``(args, options)`` of a structure, by some of the arrays in there.

        Parameters
        ----------
        structure, leaves
            Of the arguments, with None in place of each array.
        chosen
            Numbers of the arrays to differentiate by.

        Returns
        -------
        vjp
            ``vjp(arrays)``, of `dlx.Tensor` and of the framework's arrays, gives ``(results, structure, pullback)``:
            the leaves of the result and their structure. ``pullback(gradients)`` takes a `dlx.Tensor` or None for each
            result, and gives a gradient for each chosen array, None for the others. What it gives, and results, may be
            a `dlx.Tensor`, writable, where nobody else has the memory. Traces only where jit would.
        """


@dataclass(frozen=True)
class GradSupport:
    """How a framework differentiates, for functions under `dlx.using` with ``grad=True``.

    Gradients of complex arrays follow torch's convention: for a holomorphic function with the Jacobian J, a gradient g
    of the results becomes ``J.conj().T @ g`` of the arguments. jax's are the conjugates of these.

    Attributes
    ----------
    is_tracked
        ``is_tracked(array)`` says whether what is computed from an array now is recorded, to be differentiated.
        `dlx.using` refuses such an argument, unless it is told what becomes of the gradients.
    is_differentiable
        ``is_differentiable(array)`` says whether arrays of its dtype have gradients: floating-point and complex ones.
        Asked where `vjp` or `record` is given.
    vjp
        ``vjp(function, arrays)`` calls ``function(*arrays)``, which returns a list of arrays, and gives ``(results,
        pullback)``. ``pullback(gradients)`` takes one for each result, None where there is none, and gives one for each
        of `arrays`, zeros for those that have no part in the results. Both are called inside of functions that are
        differentiated themselves. None: functions of the framework are not differentiated for others.
    record
        ``record(operation, arrays)`` gives the results of an `Operation` as arrays that the framework differentiates.
        None: it takes no functions of others.
    eval_shape
        ``eval_shape(function, specs)`` gives ``(shape, dtype)`` of each result of ``function(*arrays)`` without data,
        each array known by such a pair; for callers that compile. None: it cannot, and users declare the results.
    random_state, at_random_state
        ``random_state()`` gives the state of the framework's random numbers as one of its arrays, always of the same
        shape, and ``at_random_state(state)`` a context in which they go on from there; what was before comes back after
        it. Where that is one generator for all threads, others that draw within the context draw from it, too, and what
        they draw is drawn again later. It is entered only for functions that did draw, by one thread at a time. None:
        functions get their random numbers, or keys for them, as arguments.
    compile
        ``compile(function)`` gives a `CompiledFunction` where the function's user had it compiled, traced once for
        arguments of a kind, and None where not. None: such functions are not known.
    by_type
        Whether what is recorded has a type of its own, as tracers have: then `is_tracked` is not asked of other arrays
        in every call.
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
    random_state: Callable[[], Any] | None = None
    at_random_state: Callable[[Any], AbstractContextManager[Any]] | None = None
    compile: Callable[[Callable[..., Any]], CompiledFunction | None] | None = None
    by_type: bool = False

    @contextmanager
    def replayed(self, states: Sequence[Any]) -> Iterator[None]:
        """Let a function draw the random numbers that it drew before.

        An adapter inherits this method, and may call it when it runs a function again.

        Parameters
        ----------
        states
            Results of `random_state` before and after the function ran; empty for frameworks without it. Nothing is
            replayed if the two are equal.

        Raises
        ------
        ConversionError
            If the function drew other numbers, because another thread drew some in between.
        """
        if not states or _equal(*states):
            yield
            return
        before, after = states
        assert self.at_random_state is not None and self.random_state is not None
        with alone(), self.at_random_state(before):
            yield
            now = self.random_state()
            if not (_equal(now, after) or _equal(now, before)):  # before: it draws none, another thread did
                raise ConversionError(
                    "the function drew other random numbers on the way back, since another thread drew some meanwhile",
                    fix="Draw in one thread only, or pass random numbers as arguments.",
                )


class _Draws:
    """Holds the lock of functions that draw random numbers which are drawn again later."""

    _lock: threading.RLock | None = None


_DRAWS = _Draws()
MAX_WAIT = 5.0  # seconds: a function that holds the lock may wait for a thread that wants it


@contextmanager
def alone() -> Iterator[None]:
    """Let no other thread run such a function, unless it waits too long; `GradSupport.replayed` notices that."""
    lock = lock_of(_DRAWS)
    held = lock.acquire(timeout=MAX_WAIT)
    try:
        yield
    finally:
        if held:
            lock.release()


def _equal(one: Any, other: Any) -> bool:
    return bool((one == other).all())
