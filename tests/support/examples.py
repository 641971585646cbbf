"""How many examples the property tests draw: enough for each kind to come up, and many more in `make test-deep`.

Each run draws other ones, so what one run leaves out another one has.
"""

from __future__ import annotations

import os

EXAMPLES = int(os.environ.get("DLX_EXAMPLES", "2000"))


def examples(many):
    """Return how many examples a test draws that draws `many` in `make test`, where the round trips draw 2,000."""
    return max(1, many * EXAMPLES // 2000)
