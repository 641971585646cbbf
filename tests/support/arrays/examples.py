"""Numbers of examples for the property tests: a quarter in `make test`, more in `nox -s deep`.

Each run draws different examples. The cost of an example is mostly its draws, so a whole shape is one draw, and so are
all values that do not depend on another draw.
"""

from __future__ import annotations

import itertools
import os

from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("DLX_EXAMPLES", "2000"))


def examples(many):
    """Return the number of examples for a test that draws `many` when the round trips draw 2,000."""
    return max(1, many * EXAMPLES // 2000)


def product(*parts):
    """Return a strategy for all combinations, as one draw."""
    return st.sampled_from([*itertools.product(*parts)])


def shapes(extents, max_ndim):
    """Return strategies for all shapes of these extents, one for each number of dimensions."""
    return [product(*[extents] * ndim) for ndim in range(max_ndim + 1)]
