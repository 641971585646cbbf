"""How a library describes itself to the kit, where the kit finds it, and how a check says that it breaks a promise."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dlx._protocols.dlpack import keywords_of
from dlx._registry.listing import adapters
from dlx._registry.registry import registry
from dlx._support.module import set_module
from dlx._support.reflect import exception_text
from dlx.adapter.base import Adapter
from dlx.errors import AdapterNotFoundError
from dlx.testing.support.capsules import Taken
from dlx.testing.support.producers import Source, pattern, spread

__all__ = [
    *("LIBRARIES", "Broken", "NotApplicable", "Subject"),
    *("adapter_of", "attempt", "error_line", "find", "library", "must"),
]


@set_module("dlx.testing")
class Broken(AssertionError):
    """A promise is broken; the text says what was seen."""


@set_module("dlx.testing")
class NotApplicable(Exception):
    """A subject has nothing that the promise is about; the text says what is missing."""


def must(kept: Any, seen: str) -> None:
    """Raise `Broken` with what was seen, unless the promise is kept."""
    if not kept:
        raise Broken(seen)


def attempt(do: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[Any, BaseException | None]:
    """Call a library; return (result, None), or (None, what it raised)."""
    try:
        return do(*args, **keywords), None
    except (KeyboardInterrupt, SystemExit, NotApplicable, Broken):
        raise
    except BaseException as error:  # jax and pyo3 have errors of their own kind
        return None, error.with_traceback(None)


def error_line(error: BaseException | None) -> str:
    """Return an exception in one line."""
    return "nothing" if error is None else " ".join(exception_text(error, 160).split())


@set_module("dlx.testing")
@dataclass(frozen=True)
class Subject:
    """A library as the kit meets it. Everything but the name may be left out; what is missing is not graded.

    Attributes
    ----------
    name
        What the table calls it.
    package
        Importable name, for its version.
    adapter
        Name of its adapter in dlx; it is graded too then.
    dtypes
        Names of the dtypes (as dlx calls them) that it promises to give and take.
    make
        ``make(data, dtype, shape)``: an array of its own with these row-major bytes, made without DLPack.
    from_dlpack
        Its consumer: ``from_dlpack(producer)``.
    takes_capsules
        Whether `from_dlpack` takes a raw capsule as well.
    takes_copy
        Whether it knows ``copy=``.
    views
        What it can do to a 4 by 6 array that changes the layout: names of `VIEWS` -> function of the array.
    readonly
        ``readonly(array)``: a read-only array of the same memory. None: it has none.
    immutable
        Whether all of its arrays are read-only.
    writable
        ``writable(array)``; the default asks the array's own ``__dlpack__``.
    write
        ``write(array)`` sets its elements to 0 in place, or raises where they may not be written.
    read
        ``read(array)``: its row-major bytes as the library itself sees them; the default reads through its export.
    describe
        ``describe(array)``: (address, shape, dtype name); the default as above.
    unfit
        What it has that DLPack cannot tell, by name: makers of arrays that must be refused.
    pending
        Arrays with an operation pending (conj, neg), by name: functions that give (array, bytes it stands for).
    reshape
        ``reshape(array)`` changes shape or strides of an array in place.
    ndims
        Fewest and most dimensions.
    containers
        For an adapter: makers of containers, ``make(array)``, by name.
    exceptions
        Promises that it is known to break, by name of the check -> the reason. One without a reason is refused.
    words
        Its own code for reproductions: ``imports``, ``take`` (a callable), ``array`` (four float32 of its own).
    spec
        Where a fresh process finds it: a ready name, or ``module:attribute``.
    """

    name: str
    package: str = ""
    adapter: str = ""
    dtypes: tuple[str, ...] = ()
    make: Callable[[bytes, str, tuple[int, ...]], Any] | None = None
    from_dlpack: Callable[..., Any] | None = None
    takes_capsules: bool = False
    takes_copy: bool = False
    views: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    readonly: Callable[[Any], Any] | None = None
    immutable: bool = False
    writable: Callable[[Any], bool] | None = None
    write: Callable[[Any], Any] | None = None
    read: Callable[[Any], bytes] | None = None
    describe: Callable[[Any], tuple[int, tuple[int, ...], str]] | None = None
    unfit: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    pending: Mapping[str, Callable[[], tuple[Any, bytes]]] = field(default_factory=dict)
    reshape: Callable[[Any], Any] | None = None
    ndims: tuple[int, int] = (0, 64)
    containers: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    exceptions: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    spec: str = ""

    def __post_init__(self) -> None:
        bare = [name for name, reason in self.exceptions.items() if not reason.strip()]
        if bare:
            raise ValueError(f"a declared exception needs a reason, {', '.join(bare)} has none. Write NAME=reason.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of checks that apply to it."""
        has = {"producer": self.make, "consumer": self.from_dlpack, "adapter": self.adapter}
        return tuple(kind for kind, function in has.items() if function)

    def version(self) -> str:
        """Return the library's version, or nothing; ImportError where it is not installed."""
        if not self.package:
            return ""
        return str(getattr(importlib.import_module(self.package), "__version__", ""))

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def dtype(self, wanted: str = "float32") -> str:
        """Return a dtype that it has: the one wanted if it can be."""
        return self.dtypes[0] if self.dtypes and wanted not in self.dtypes else wanted

    def shape(self, *wanted: int) -> tuple[int, ...]:
        """Return a shape of that many elements in as many dimensions as it has."""
        low, high = self.ndims
        if len(wanted) > high:
            return (math.prod(wanted),)
        return (1,) * (low - len(wanted)) + wanted

    def array(self, dtype: str = "float32", *shape: int) -> tuple[Any, bytes]:
        """Return (an array of its own, its bytes); 4 by 6 float32 where nothing is said."""
        assert self.make is not None
        dtype = self.dtype(dtype)
        wanted = self.shape(*(shape or (4, 6)))
        count = math.prod(wanted)
        data = pattern(dtype, count)
        return self.make(data, dtype, wanted), spread(data, dtype, count)

    def source(
        self, dtype: str = "float32", shape: tuple[int, ...] = (4, 6), kind: Any = Source, **options: Any
    ) -> Any:
        """Return a producer for its consumer: of a dtype and a rank that it takes."""
        return kind(self.dtype(dtype), self.shape(*shape) if options.get("strides") is None else shape, **options)

    # ---- its producer -----------------------------------------------------------------------------------------------

    def export(self, array: Any, **keywords: Any) -> Taken:
        """Return what ``array.__dlpack__`` gives, read; an exception breaks the promise."""
        capsule, error = attempt(array.__dlpack__, **keywords)
        if error is not None:
            said = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
            raise Broken(f"__dlpack__({said}) raised {error_line(error)}") from error
        return Taken(capsule)

    def versioned(self, array: Any) -> Taken:
        """Return a versioned export, or a legacy one where it has no other."""
        return self.export(array, **self.asking(array))

    def asking(self, array: Any) -> dict[str, Any]:
        """Return the keywords that ask for a versioned capsule: none of a producer from before DLPack 1.0."""
        known = keywords_of(type(array))
        return {} if known is not None and "max_version" not in known else {"max_version": (1, 0)}

    # ---- its consumer -----------------------------------------------------------------------------------------------

    def take(self, source: Any, **keywords: Any) -> Any:
        """Return what `from_dlpack` makes of a producer; an exception breaks the promise."""
        result, error = self.tried(source, **keywords)
        if error is not None:
            raise Broken(f"from_dlpack raised {error_line(error)}") from error
        return result

    def tried(self, source: Any, **keywords: Any) -> tuple[Any, BaseException | None]:
        """Return (result, None), or (None, what `from_dlpack` raised)."""
        assert self.from_dlpack is not None
        return attempt(self.from_dlpack, source, **keywords)

    def raw(self, source: Source, **options: Any) -> Any:
        """Return the source's capsule where raw ones are taken, else an object that gives it whatever is asked."""
        if self.takes_capsules:
            return source.capsule(**options)
        return source

    def seen(self, array: Any) -> tuple[int, tuple[int, ...], str, bytes]:
        """Return (address, shape, dtype, elements) of one of its arrays."""
        if self.describe is not None and self.read is not None:
            return (*self.describe(array), self.read(array))
        taken = self.versioned(array)
        address, shape, dtype = taken.address, taken.shape, taken.dtype.name
        if self.describe is not None:
            address, shape, dtype = self.describe(array)
        return address, shape, dtype, taken.elements() if self.read is None else self.read(array)

    def may_write(self, array: Any) -> bool:
        """Return whether one of its arrays says that it may be written to."""
        if self.immutable:
            return False
        if self.writable is not None:
            return self.writable(array)
        return not self.versioned(array).readonly

    def holds(self, array: Any, source: Source) -> None:
        """Raise `Broken` unless an array shows what the source has: shape, dtype and every bit."""
        _, shape, dtype, data = self.seen(array)
        if dtype != source.dtype.name:
            raise Broken(f"{source.dtype.name} came in as {dtype}")
        if shape != source.shape:
            raise Broken(f"shape {source.shape} came in as {shape}")
        if data != source.elements():
            raise Broken(f"the elements changed: {_differing(source.elements(), data)}")

    def settled(self, source: Source) -> None:
        """Raise `Broken` unless everything that the source gave out was released once."""
        amiss = source.amiss()
        if amiss:
            raise Broken(amiss)

    def needs(self, what: Any, text: str) -> None:
        """Raise `NotApplicable` unless the subject has something."""
        if not what:
            raise NotApplicable(text)


def _differing(expected: bytes, found: bytes) -> str:
    if len(expected) != len(found):
        return f"{len(expected)} bytes became {len(found)}"
    at = next(i for i in range(len(expected)) if expected[i] != found[i])
    start = at - at % 8
    return f"bytes {start} to {start + 8} are {found[start : start + 8].hex()}, not {expected[start : start + 8].hex()}"


# ---- the subjects that the kit knows ---------------------------------------------------------------------------------

LIBRARIES: dict[str, Callable[[], Subject]] = {}
"""Name -> function that imports the library and describes it."""


def library(name: str) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Register a function that makes a subject."""

    def enter(make: Callable[[], Subject]) -> Callable[[], Subject]:
        LIBRARIES[name] = make
        return make

    return enter


def adapter_of(name: str) -> Adapter | None:
    """Return the adapter of a name or a package, its framework imported; it need not be a target."""
    try:
        return registry.target(name).adapter
    except AdapterNotFoundError:
        found = next((each for each in adapters().values() if name in (each.name, each.package)), None)
    if found is not None:
        importlib.import_module(found.package)
    return found


@set_module("dlx.testing")
def find(spec: str) -> Subject:
    """Return a subject: a library known here, an adapter's name, or ``module:attribute``.

    Raises
    ------
    LookupError
        If there is no such thing.
    ImportError
        If it is not installed.
    """
    if ":" in spec:
        module, _, attribute = spec.partition(":")
        found = getattr(importlib.import_module(module), attribute, None)
        found = found() if callable(found) and not isinstance(found, Subject) else found
        if not isinstance(found, Subject):
            raise LookupError(f"{spec} is {found!r}, not a dlx.testing.Subject")
        return replace(found, spec=spec)
    if spec in LIBRARIES:
        known = replace(LIBRARIES[spec](), spec=spec)
        own = adapter_of(spec) if not known.adapter else None  # a third party's
        return known if own is None else replace(known, adapter=own.name)
    adapter = adapter_of(spec)
    if adapter is None:
        others = ", ".join(name for name in adapters() if name not in LIBRARIES)
        more = f"; further adapters of dlx: {others}" if others else ""
        raise LookupError(
            f"the kit knows no {spec!r}. It knows {', '.join(LIBRARIES)}{more}; or give module:attribute of a Subject."
        )
    return Subject(adapter.name, package=adapter.package, adapter=adapter.name, spec=spec)
