# pyright: strict
"""If some frameworks are not installed, strict checkers report no errors for calls that do not name them."""

from functools import partial
from typing import assert_type

import dlx

tensor = dlx.convert(b"abc", to="dlx")
assert_type(tensor, dlx.Tensor)
assert_type(dlx.convert([tensor], to="dlx"), list[dlx.Tensor])
assert_type(dlx.convert(b"abc", like=tensor), dlx.Tensor)
assert_type(dlx.stack([b"abc", b"def"], "dlx"), dlx.Tensor)
to_dlx = partial(dlx.convert, to="dlx")
print(dlx.plan(tensor, to="numpy").outcome, dlx.describe(tensor).shape, to_dlx)


@dlx.using("numpy")
def total(x: dlx.SupportsDLPack, factor: float = 1) -> float:
    """Any array is accepted."""
    return factor


assert_type(total(tensor, factor=2), float)
