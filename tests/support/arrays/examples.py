"""How many examples the property tests draw: a quarter of them in `make test`, more in `nox -s deep`.

Each run draws other ones, so what one run leaves out another one has. What an example costs is mostly its draws: they
are few where a whole shape is one, and all that does not depend on another draw is one.
"""

from __future__ import annotations

import itertools
import os

from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("DLX_EXAMPLES", "2000"))


def examples(many):
    """Return how many examples a test draws that draws `many` where the round trips draw 2,000."""
    return max(1, many * EXAMPLES // 2000)


def product(*parts):
    """Return a strategy for all combinations, as one draw."""
    return st.sampled_from([*itertools.product(*parts)])


def shapes(extents, max_ndim):
    """Return strategies for all shapes of these extents, one for each number of dimensions."""
    return [product(*[extents] * ndim) for ndim in range(max_ndim + 1)]
