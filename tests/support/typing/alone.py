"""Without any framework installed, results are Any, and nothing is an error."""

from typing import assert_type

import dlx

tensor = dlx.convert(b"abc", to="torch")
print(tensor.anything)
array = dlx.convert({"a": tensor}, to="numpy")
print(array["a"].anything, dlx.stack([b"abc"], "jax").anything)
assert_type(dlx.convert(b"abc", to="dlx"), dlx.Tensor)
dlx.convert(3, to="torch")  # error: still not an array
