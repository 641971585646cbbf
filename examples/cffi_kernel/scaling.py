"""Scale arrays of any framework in place, with a few lines of C."""

from typing import Any

from _scale import lib

import dlx


def scale(array: Any, factor: float) -> None:
    """Multiply an array of float32 or float64 in place, with any strides.

    Raises
    ------
    dlx.errors.ReadOnlyError
            If the array is read-only.
    TypeError
            If the dtype is not float32 or float64.
    """
    with dlx.borrow(array) as tensor:
        if lib.scale(tensor, factor) != 0:
            raise TypeError(f"scale supports float32 and float64, found {dlx.describe(array)}")


if __name__ == "__main__":
    from array import array

    samples = array("f", [1, 2, 3])
    scale(samples, 10)
    print(list(samples))
