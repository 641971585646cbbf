"""`parts`: the dense arrays of a sparse or ragged array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlx._api.convert import convert
from dlx._core.public import public
from dlx._engine.compound import split
from dlx._engine.request import Request, request_of
from dlx._registry import lookup
from dlx._registry.compound import CompoundHandler, without_private
from dlx._registry.registry import registry
from dlx._support.reflect import type_name
from dlx.errors import LayoutError

if TYPE_CHECKING:
    from dlx.typing import Target


@public
def parts(obj: Any, to: Target | None = None) -> dict[str, Any]:
    """Return the dense arrays that a sparse or ragged array consists of.

    Memory is shared as in `convert`.

    Parameters
    ----------
    obj
        A sparse or ragged array of any framework: ``scipy.sparse``, a sparse or jagged torch tensor, ``jax.BCOO``, an
        Arrow list, an awkward array, ...
    to
        Target of the arrays, as in `convert`. None: the framework of `obj`, or "dlx" if it is not a target.

    Returns
    -------
    dict
        For csr, csc and bsr: ``data``, ``indices``, ``indptr`` and ``shape``. For coo: ``data``, ``coords`` of shape
        ``(ndim, count)``, and ``shape``. For a ragged array of n rows: ``values``, and ``offsets`` of shape
        ``(n + 1,)``; row i is ``values[offsets[i]:offsets[i + 1]]``. If the values are ragged, a dict of their parts.

    Raises
    ------
    LayoutError
        If `obj` is one dense array, or not an array.
    DlxError
        As `convert`, for each of the arrays.

    Examples
    --------
    >>> import dlx, numpy, scipy.sparse
    >>> found = dlx.parts(scipy.sparse.csr_array(numpy.eye(2)), to="dlx")
    >>> list(found), found["shape"], found["indptr"].shape
    (['data', 'indices', 'indptr', 'shape'], (2, 2), (3,))
    """
    inside, handler = lookup.unwrap(obj)
    if not isinstance(handler, CompoundHandler):
        fix = "Convert another format to csr in its own framework; dlx.convert takes dense arrays, and containers."
        raise LayoutError("it is not a sparse or ragged array of a known format", source=type_name(type(obj)), fix=fix)
    if to is None:
        target = None if handler.adapter is None else registry.ready(handler.adapter)
        to = "dlx" if target is None else target.name
    return convert(_split(inside, handler, request_of(to)), to)  # type: ignore[no-any-return]


def _split(obj: Any, handler: CompoundHandler, request: Request) -> dict[str, Any]:
    """Return the parts of an object; inner compound arrays become dicts of their parts."""
    found = without_private(split(obj, handler, request, joins=False))
    for name, part in found.items():
        inside, inner = lookup.unwrap(part)
        if isinstance(inner, CompoundHandler):
            found[name] = _split(inside, inner, request)
    return found
