"""`Subject`, the description of a library to grade; `find`; and the exceptions of checks."""

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
from dlx.testing.capsules import Source, Taken, pattern, spread


@set_module("dlx.testing")
class Broken(AssertionError):
    """A promise is broken; the text describes how."""


@set_module("dlx.testing")
class NotApplicable(Exception):
    """The promise does not apply to a subject; the text names the missing feature."""


def must(kept: Any, seen: str) -> None:
    """Raise `Broken` with the text unless the promise is kept."""
    if not kept:
        raise Broken(seen)


def attempt(do: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[Any, BaseException | None]:
    """Call a function of a library; return (result, None) or (None, exception)."""
    try:
        return do(*args, **keywords), None
    except (KeyboardInterrupt, SystemExit, NotApplicable, Broken):
        raise
    except BaseException as error:  # jax and pyo3 raise their own base classes
        return None, error.with_traceback(None)


def error_line(error: BaseException | None) -> str:
    """Return an exception in one line."""
    return "nothing" if error is None else " ".join(exception_text(error, 160).split())


@set_module("dlx.testing")
@dataclass(frozen=True)
class Subject:
    """A library to grade. Everything but the name is optional; missing features are not graded.

    Attributes
    ----------
    name
        Name in the table.
    package
        Importable name, for the version.
    adapter
        Name of the library's adapter in dlx; it is then graded, too.
    dtypes
        Names, as in dlx, of the dtypes that the library can export and import.
    make
        ``make(data, dtype, shape)`` returns an array with these row-major bytes, without DLPack.
    from_dlpack
        The consumer: ``from_dlpack(producer)``.
    takes_capsules, takes_copy
        Whether `from_dlpack` also accepts a raw capsule, and whether it has the parameter ``copy``.
    views
        Views that change the layout of a 4 by 6 array: names of `VIEWS` -> function of the array.
    readonly
        ``readonly(array)`` returns a read-only array of the same memory. None: unsupported.
    immutable
        Whether all arrays are read-only.
    writable
        ``writable(array)``; the default reads the flag of the array's ``__dlpack__``.
    write
        ``write(array)`` sets the elements to 0 in place, or raises if the array is read-only.
    read
        ``read(array)`` returns the row-major bytes as the library sees them; the default reads the export.
    describe
        ``describe(array)`` returns (address, shape, dtype name); the default reads the export.
    unfit
        Functions, by name, that return arrays which DLPack cannot describe; their export must fail.
    pending
        Functions, by name, that return (array with a pending operation, its bytes after the operation).
    reshape
        ``reshape(array)`` changes shape or strides of an array in place.
    ndims
        Minimum and maximum number of dimensions.
    containers
        For an adapter: functions ``make(array)``, by name, that return containers.
    exceptions
        Name of a check that the library is known to break -> the reason, which is required.
    words
        The library's code for reproductions: ``imports``, ``take`` (a callable), ``array`` (of four float32).
    spec
        Where a new process finds the subject: a known name, or ``module:attribute``.
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
            raise ValueError(f"a declared exception needs a reason: {', '.join(bare)}. Write NAME=reason.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of checks that apply to it."""
        has = {"producer": self.make, "consumer": self.from_dlpack, "adapter": self.adapter}
        return tuple(kind for kind, function in has.items() if function)

    def version(self) -> str:
        """Return the library's version, or nothing; raise ImportError if it is not installed."""
        return str(getattr(importlib.import_module(self.package), "__version__", "")) if self.package else ""

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def dtype(self, wanted: str = "float32") -> str:
        """Return the wanted dtype if the library has it, else its first."""
        return self.dtypes[0] if self.dtypes and wanted not in self.dtypes else wanted

    def shape(self, *wanted: int) -> tuple[int, ...]:
        """Return a shape with as many elements that has a supported number of dimensions."""
        low, high = self.ndims
        if len(wanted) > high:
            return (math.prod(wanted),)
        return (1,) * (low - len(wanted)) + wanted

    def array(self, dtype: str = "float32", *shape: int) -> tuple[Any, bytes]:
        """Return (an array of the library, its bytes); the default is 4 by 6 float32."""
        assert self.make is not None
        dtype, wanted = self.dtype(dtype), self.shape(*(shape or (4, 6)))
        count = math.prod(wanted)
        data = pattern(dtype, count)
        return self.make(data, dtype, wanted), spread(data, dtype, count)

    def source(
        self, dtype: str = "float32", shape: tuple[int, ...] = (4, 6), kind: Any = Source, **options: Any
    ) -> Any:
        """Return a producer of a dtype and a rank that the library can import."""
        return kind(self.dtype(dtype), self.shape(*shape) if options.get("strides") is None else shape, **options)

    # ---- its producer -----------------------------------------------------------------------------------------------

    def ask(self, array: Any, **keywords: Any) -> tuple[Any, BaseException | None]:
        """Call ``array.__dlpack__``; return (the capsule as a `Taken`, None) or (None, error)."""
        capsule, error = attempt(array.__dlpack__, **keywords)
        return Taken(capsule) if error is None else None, error

    def export(self, array: Any, **keywords: Any) -> Taken:
        """Call ``array.__dlpack__`` and return the capsule as a `Taken`; an exception breaks the promise."""
        taken, error = self.ask(array, **keywords)
        if error is not None:
            arguments = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
            raise Broken(f"__dlpack__({arguments}) raised {error_line(error)}") from error
        return taken  # type: ignore[no-any-return]

    def versioned(self, array: Any) -> Taken:
        """Return a versioned export, or a legacy one if the library has no other."""
        return self.export(array, **self.asking(array))

    def asking(self, array: Any) -> dict[str, Any]:
        """Return the keywords that request a versioned capsule, empty for a producer from before DLPack 1.0."""
        known = keywords_of(type(array))
        return {} if known is not None and "max_version" not in known else {"max_version": (1, 0)}

    # ---- its consumer -----------------------------------------------------------------------------------------------

    def take(self, source: Any, **keywords: Any) -> Any:
        """Import a producer with `from_dlpack`; an exception breaks the promise."""
        result, error = self.tried(source, **keywords)
        if error is not None:
            raise Broken(f"from_dlpack raised {error_line(error)}") from error
        return result

    def tried(self, source: Any, **keywords: Any) -> tuple[Any, BaseException | None]:
        """Import a producer; return (result, None) or (None, error)."""
        assert self.from_dlpack is not None
        return attempt(self.from_dlpack, source, **keywords)

    def raw(self, source: Source, **options: Any) -> Any:
        """Return the source's capsule if the library accepts raw ones, else the source."""
        return source.capsule(**options) if self.takes_capsules else source

    def seen(self, array: Any) -> tuple[int, tuple[int, ...], str, bytes]:
        """Return (address, shape, dtype, elements) of an array."""
        if self.describe is not None and self.read is not None:
            return (*self.describe(array), self.read(array))
        taken = self.versioned(array)
        address, shape, dtype = taken.address, taken.shape, taken.dtype.name
        if self.describe is not None:
            address, shape, dtype = self.describe(array)
        return address, shape, dtype, taken.elements() if self.read is None else self.read(array)

    def holds(self, array: Any, source: Source) -> None:
        """Raise `Broken` unless an array has the source's shape, dtype and bits."""
        _, shape, dtype, data = self.seen(array)
        must(dtype == source.dtype.name, f"{source.dtype.name} came in as {dtype}")
        must(shape == source.shape, f"shape {source.shape} came in as {shape}")
        if data != source.elements():
            raise Broken(f"the elements changed: {_differing(source.elements(), data)}")

    def settled(self, source: Source) -> None:
        """Raise `Broken` unless every export of the source was released once."""
        must(not (amiss := source.amiss()), amiss)

    def needs(self, what: Any, text: str) -> None:
        """Raise `NotApplicable` with the text unless a condition holds."""
        if not what:
            raise NotApplicable(text)


def _differing(expected: bytes, found: bytes) -> str:
    if len(expected) != len(found):
        return f"{len(expected)} bytes became {len(found)}"
    at = next(i for i in range(len(expected)) if expected[i] != found[i])
    start = at - at % 8
    return f"bytes {start} to {start + 8} are {found[start : start + 8].hex()}, not {expected[start : start + 8].hex()}"


# ---- known subjects --------------------------------------------------------------------------------------------------

LIBRARIES: dict[str, Callable[[], Subject]] = {}
"""Name -> function that imports the library and describes it."""


def library(name: str) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Register a function that returns a subject."""

    def register(make: Callable[[], Subject]) -> Callable[[], Subject]:
        LIBRARIES[name] = make
        return make

    return register


def adapter_of(name: str) -> Adapter | None:
    """Import the framework of this name or package, and return its adapter, even if it is not a target."""
    try:
        return registry.target(name).adapter
    except AdapterNotFoundError:
        found = next((each for each in adapters().values() if name in (each.name, each.package)), None)
    if found is not None:
        importlib.import_module(found.package)
    return found


@set_module("dlx.testing")
def find(spec: str) -> Subject:
    """Return a subject: a known library, an adapter's name, or ``module:attribute``.

    Raises
    ------
    LookupError
        If the subject is unknown.
    ImportError
        If the library is not installed.
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
        more = f"; other adapters of dlx: {others}" if others else ""
        known_names = f"It knows {', '.join(LIBRARIES)}{more}. Or pass module:attribute of a Subject."
        raise LookupError(f"unknown subject {spec!r}. {known_names}")
    return Subject(adapter.name, package=adapter.package, adapter=adapter.name, spec=spec)
