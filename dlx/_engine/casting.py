"""The option `dtype`: which arrays of a call are cast, to which dtypes, and by which code."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dlx._core.extension import lib
from dlx._core.types import Device, DType, host_readable
from dlx.errors import CopyRequiredError, DTypeError

_REAL = {lib.kDLFloat, lib.kDLBfloat, *range(lib.kDLFloat8_e3m4, lib.kDLFloat4_e2m1fn + 1)}
_FLOATING = frozenset(each.name for each in DType.all() if each.code in _REAL and each.lanes == 1)


class Casts(NamedTuple):
    """The dtypes that a call changes."""

    dtypes: Mapping[str, DType]  # name of the present dtype -> the new one
    floating: DType | None = None  # the one dtype of all floating arrays
    at_root: bool = False  # whether an array that `floating` does not apply to is refused

    def find(self, dtype: DType) -> DType | None:
        """Return the new dtype of an array, or None if it stays; raise for a root that `floating` does not apply to."""
        found = self.dtypes.get(dtype.name)
        if found is None and self.at_root and self.floating is not None and dtype != self.floating:
            reason = f"dtype={self.floating.name!r} changes floating arrays only, and it is {dtype}"
            fix, option = suggest_cast(dtype, self.floating)
            raise DTypeError(reason, fix=fix, option=option)
        return found


def suggest_cast(old: DType, new: DType) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Return the fix and the option of an error: the mapping that changes a dtype, unless it is refused."""
    if old.code == lib.kDLComplex != new.code:
        return "Convert x.real and x.imag instead.", ()
    return "", (("dtype", {old.name: new.name}),)


def replace_cast(casts: Casts | None, old: DType, new: str, is_cast: bool) -> Any:
    """Return the option `dtype` that gives arrays `new` in place of `old`, and casts others as before."""
    if casts is None or casts.floating == old:
        return new if new in _FLOATING else {old.name: new}
    before = casts.dtypes if casts.floating is None else {"float64": casts.floating}
    changed = {name: new if each == old else each.name for name, each in before.items()}
    changed |= {} if is_cast else {old.name: new}
    return {name: each for name, each in changed.items() if name != each} or None


def read_casts(dtype: Any) -> Casts | None:
    """Return the option `dtype` of a call, checked."""
    if isinstance(dtype, Mapping):
        return _read_mapping(dtype)
    return None if dtype is None else _read_name(dtype if type(dtype) is str else DType(dtype).name)


def _read_mapping(dtype: Mapping[Any, Any]) -> Casts:
    pairs = [(read_dtype(old), read_dtype(new)) for old, new in dtype.items()]
    for old, new in pairs:
        fix, option = suggest_cast(old, new)
        if not option:
            raise DTypeError(f"dtype= changes {old} to {new}, which would drop the imaginary parts", fix=fix)
    return Casts({old.name: new for old, new in pairs if old != new})


_find_dtype = functools.lru_cache(maxsize=32)(DType)


def read_dtype(dtype: Any) -> DType:
    """Return a dtype, for a name in a tenth of the time."""
    return _find_dtype(dtype) if type(dtype) is str else DType(dtype)


@functools.lru_cache(maxsize=32)
def _read_name(dtype: str) -> Casts:
    wanted = DType(dtype)
    if wanted.name not in _FLOATING:
        reason = f"dtype={wanted.name!r} is not a floating dtype, and only a mapping changes others"
        names = ("complex128", "complex64") if wanted.code == lib.kDLComplex else ("int64", "int32")
        named = names[wanted.name == names[0]]
        fix = f"Name the dtypes of your arrays in place of {named!r}."
        raise DTypeError(reason, option=(("dtype", {named: wanted.name}),), fix=fix)
    return Casts({name: wanted for name in _FLOATING if name != wanted.name}, wanted)


def check_cast(old: DType, new: DType, shape: tuple[int, ...] | None, copy: bool | None) -> None:
    """Raise if ``copy=False`` forbids a cast; an array without elements is never copied."""
    if copy is False and (shape is None or 0 not in shape):
        raise CopyRequiredError(f"a cast from {old} to {new} makes a copy", option=(("copy", None),))


_FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}  # exponent, fraction
_INTEGERS = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("u", "")]
_COMMON = ("bool", *_INTEGERS, *_FORMATS, "complex64", "complex128")  # the smaller first


def _needs(dtype: DType) -> tuple[int, int, int, int] | None:
    """Return what the values of a dtype need: a sign, bits of integers, bits of the exponent, an imaginary part."""
    if dtype.code in (lib.kDLInt, lib.kDLUInt, lib.kDLBool):
        is_signed = dtype.code == lib.kDLInt
        return is_signed, 1 if dtype.code == lib.kDLBool else dtype.bits - is_signed, 0, False
    is_complex = dtype.code == lib.kDLComplex
    name = f"float{dtype.bits // 2}" if is_complex else dtype.name
    small = name.partition("_e")[2]  # "4m3fn"
    sizes = (int(small[0]), int(small[2])) if small else _FORMATS.get(name)
    return None if sizes is None or dtype.lanes != 1 else (True, sizes[1] + 1, sizes[0], is_complex)


def common_dtype(dtypes: Iterable[DType]) -> tuple[DType, bool] | None:
    """Return the smallest dtype for the values of several dtypes, and whether it is exact; None for other dtypes."""
    needs = [_needs(each) for each in dtypes]
    if None in needs:
        return None
    most = [*map(max, zip(*needs, strict=True))]
    for dtype in map(DType, _COMMON):
        if all(map(operator.ge, _needs(dtype), most)):  # type: ignore[arg-type]
            return dtype, True
    return DType("complex128" if most[3] else "float64"), False


@functools.lru_cache(maxsize=256)
def can_cast(old: DType, new: DType, device: Device | None) -> bool:
    """Return whether dlx casts between two dtypes in memory of a device."""
    structs = [dict(zip(("code", "bits", "lanes"), dtype, strict=True)) for dtype in (old, new)]
    return device is not None and host_readable(device) and bool(lib.dlx_can_cast(*structs))
