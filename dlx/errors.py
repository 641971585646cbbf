"""What dlx raises: one family, one message template, no C.

Every error says what was asked, what was found, where, and one concrete fix, and is also the builtin that callers
already catch. Nothing else leaves `dlx.convert` but `TypeError` and `ValueError` for a wrong call, an ExceptionGroup of
these where errors are collected, `MemoryError`, and what is no `Exception`: interrupts and exits.

Errors hold data: the parameters of `DlxError` are its attributes, and every sentence is made of them when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = [
    "DlxError", "ConversionError", "CopyRequiredError", "ReadOnlyError", "LayoutError", "DTypeError", "DeviceError",
    "DeviceNameError", "StreamError", "ProtocolError", "ConsumedError", "FileError", "HandleError",
    "AdapterNotFoundError", "FrameworkNotInstalledError", "PluginError", "Attribute", "Member",
]  # fmt: skip

# ---- text of foreign objects -----------------------------------------------------------------------------------------

_name = type.__dict__["__name__"].__get__  # of `type` itself: a metaclass may answer anything, or raise


def class_name(kind: type) -> str:
    """Return the name of a class, without its module."""
    return str(_name(kind))


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters and, where it was longer, how much is missing."""
    length = str.__len__(text)
    kept: str = str.__getitem__(text, slice(0, most))  # of exactly this type, whatever the other one overrides
    return kept if length <= most else f"{kept}... ({length - most:,} more characters)"


def safe_repr(value: object, most: int = 60) -> str:
    """Return a value's repr, cut where it is long; one that has none is named by its class."""
    try:
        return cut(repr(value), most)
    except MemoryError:
        raise
    except Exception:
        return f"<{class_name(type(value))}>"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return ``"Did you mean 'torch'?"`` for the name that is most like a word, or nothing; capitals do not matter."""
    from difflib import get_close_matches

    found = get_close_matches(cut(word, 40).lower(), list(names), 1)
    return f"Did you mean {found[0]!r}?" if found else ""


# ---- paths -----------------------------------------------------------------------------------------------------------


class Attribute(str):
    """A step of `DlxError.path`: the name of a record's attribute, ``.x``."""

    def __repr__(self) -> str:
        return f"Attribute({str.__repr__(self)})"


class Member(int):
    """A step of `DlxError.path`: the number of a set's member in the order of iteration, ``{3}``."""

    def __repr__(self) -> str:
        return f"Member({int.__repr__(self)})"


class _KeyText(str):
    """A step of `DlxError.path`: the repr of a key that is not kept itself."""

    def __repr__(self) -> str:
        return str(self)


_KEPT = frozenset({str, bytes, int, float, bool, type(None), Attribute, Member, _KeyText})
MAX_KEY = 1000  # characters of a key's repr, and bytes of one that is kept


def _is_kept(key: Any, depth: int = 4) -> bool:
    """Return whether a key is plain, small data, which pickles and keeps nothing else alive."""
    kind = type(key)
    if kind is tuple:
        return depth > 0 and len(key) <= 16 and all(_is_kept(each, depth - 1) for each in key)
    if kind in (int, Member):
        return bool(key.bit_length() <= 2000)  # Python writes out as many digits, whatever its limit is set to
    return kind in _KEPT and (kind not in (str, bytes, Attribute) or len(key) <= MAX_KEY)


def _step_text(step: Any) -> str:
    if type(step) is Attribute:
        return f".{step}"
    text = safe_repr(step, MAX_KEY)
    text = text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}"
    return f"{{{int(step)}}}" if type(step) is Member else f"[{text}]"


PATH_ENDS = 32  # steps at each end of a path that are shown


def path_text(path: Iterable[Any], root: str = "obj") -> str:
    """Return a path as Python would write it, ``obj['a'][3].x``; one of more than 64 steps without its middle."""
    steps = list(path)
    if len(steps) <= 2 * PATH_ENDS:
        return root + "".join(map(_step_text, steps))
    return root + "".join([*map(_step_text, steps[:PATH_ENDS]), " ... ", *map(_step_text, steps[-PATH_ENDS:])])


# ---- options ---------------------------------------------------------------------------------------------------------

_REFUSING = {"copy": False, "strict": True}  # values that refuse what goes through without the option


def written(name: str, value: Any) -> str:
    """Return an option as it is passed to `dlx.convert`; without a value its name."""
    return name if value is None else f"{name}={value!r}"


def option_text(option: tuple[tuple[str, Any], ...], write: Callable[[str, Any], str] = written, via: str = "") -> str:
    """Return the sentence for `DlxError.option`: ``"Drop copy=False, or pass readonly='share'."``."""
    drop = [write(name, _REFUSING[name]) for name, value in option if value is None and name in _REFUSING]
    leave = [write(name, None) for name, value in option if value is None and name not in _REFUSING]
    give = [write(name, value) for name, value in option if value is not None]
    parts = [("drop", drop, ""), ("leave", leave, " out"), ("pass", give, via and f" {via}")]
    said = [f"{verb} {' or '.join(words)}{end}" for verb, words, end in parts if words]
    text = ", or ".join(said)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def sentences(*parts: str) -> str:
    """Return the parts that are not empty as sentences one after the other; the last one ends as it is."""
    *first, last = [part for part in parts if part] or [""]
    return " ".join([*(part if part.endswith((".", "!", "?")) else f"{part}." for part in first), last])


# ---- the family ------------------------------------------------------------------------------------------------------

_VERBS = {"from_dlpack": "convert", "from_managed": "convert", "from_pointer": "convert"}
"""What functions do that are not named by a verb."""

_VERBS_WITHOUT_TARGET = {
    "array_namespace": "find the namespace of",
    "borrow": "borrow",
    "describe": "describe",
    "read": "read",
    "share": "share",
    "shares_memory": "compare the memory of",
    "to_capsule": "export",
}
"""What functions do that have no target. Messages do not show the one that they use inside."""


class DlxError(Exception):
    """Base of everything that dlx raises.

    Parameters
    ----------
    reason
        Why it cannot be done, without a full stop.
    source
        What was found, as text: ``"numpy.ndarray (float32[4])"``.
    target
        What was asked for: ``"torch"``.
    path
        Where in a container it is: the keys from the root to the array, ``("a", 3, Attribute("x"))``; empty at the
        root. Numbers and text are kept as they are; a key that is more than plain, small data is kept as its repr.
    root
        What the path begins at, such as a parameter's name; empty for the object that was passed.
    fix
        One sentence that says what to do.
    option
        Options of `dlx.convert` any one of which would let it through, as pairs (name, value): ``(("detach", True),)``.
        A value of None means to leave the option out.
    via
        Where the call that was made has no such option: how the sentence about `option` ends.
    details
        Ends of the reason that differ from one array, or from one version of a framework, to the next, as pairs (what
        it is, text): ``(("alignment", ", found 16"),)``.
    sharing
        Whether sharing memory was demanded (``copy=False``).

    Attributes
    ----------
    source, target, path, root, option, via, details, sharing
        The parameters, for programs. The message is made from them when it is read.
    action
        Name of the function of dlx that was called: ``"convert"``, ``"open"``, ``"share"``; ``"read"`` for a file that
        is open.
    brief
        The reason without its details.
    reason
        The reason with its details.
    where
        The path as text: ``"obj['a'][3].x"``.
    fix
        What to do: the sentence about `option`, then the parameter `fix`.
    """

    action = "convert"

    def __init__(
        self,
        reason: str = "",
        *,
        source: str = "",
        target: str = "",
        path: tuple[Any, ...] = (),
        root: str = "",
        fix: str = "",
        option: tuple[tuple[str, Any], ...] = (),
        via: str = "",
        details: tuple[tuple[str, str], ...] = (),
        sharing: bool = False,
    ) -> None:
        super().__init__(reason)
        self.brief = reason
        self.source = source
        self.target = target
        self.path = path
        self.root = root
        self.fix = fix
        self.option = option
        self.via = via
        self.details = details
        self.sharing = sharing

    @property
    def reason(self) -> str:
        """Why it cannot be done, without a full stop."""
        return self.brief + "".join(text for _, text in self.details)

    @property
    def path(self) -> tuple[Any, ...]:
        """Keys from the root to the array; an attribute is an `Attribute`, a member of a set is a `Member`."""
        return self._path

    @path.setter
    def path(self, path: Iterable[Any]) -> None:
        self._path = tuple(key if _is_kept(key) else _KeyText(safe_repr(key, MAX_KEY)) for key in path)

    @property
    def where(self) -> str:
        """The path as text, ``"obj['a'][3].x"``; empty at the root."""
        return path_text(self.path, self.root or "obj") if self.path or self.root else ""

    @property
    def fix(self) -> str:
        """What to do, one sentence or two; empty where nothing is known."""
        return self.advice()

    @fix.setter
    def fix(self, fix: str) -> None:
        self._fix = fix

    def advice(self, write: Callable[[str, Any], str] = written) -> str:
        """Return `fix`, options written by ``write(name, value)``; without a value it gives the name of an option."""
        return sentences(option_text(self.option, write, self.via), self._fix)

    def __str__(self) -> str:
        asked = ""
        if self.source:
            verb = _VERBS_WITHOUT_TARGET.get(self.action)
            asked = f"cannot {verb or _VERBS.get(self.action, self.action)} {self.source}"
            if self.target and verb is None:
                asked += f" to {self.target!r}"
            if self.sharing:
                asked += " without a copy"
        if self.where:
            asked += f" at {self.where}" if asked else f"at {self.where}"
        return sentences(f"{asked}: {self.reason}" if asked else self.reason, self.fix)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.brief,), self.__dict__  # notes included

    def complete(self, *, path: Iterable[Any] = (), root: str = "", **parts: Any) -> DlxError:
        """Fill in parts that are still empty, which outer layers know and inner ones do not; return the error."""
        if not (self.path or self.root):
            self.path, self.root = path, root
        for name, value in parts.items():
            if not getattr(self, name):
                setattr(self, name, value)
        return self


class ConversionError(DlxError, BufferError):
    """Raised where data cannot be converted; `BufferError` is the array API standard's word for it."""


class CopyRequiredError(ConversionError, ValueError):
    """Sharing was demanded (``copy=False``) where only a copy is possible."""


class ReadOnlyError(ConversionError, ValueError):
    """Read-only memory would reach a consumer that cannot say so."""


class LayoutError(ConversionError, ValueError):
    """The way the elements lie in memory cannot be expressed (sparse, masked, null data, size overflow)."""


class DTypeError(ConversionError, TypeError):
    """The dtype does not exist on the other side."""


class DeviceError(ConversionError, RuntimeError):
    """The device is unknown, absent, or out of the consumer's reach."""


class DeviceNameError(DeviceError, ValueError):
    """A name that no device has."""


class StreamError(ConversionError, ValueError):
    """A stream that has no meaning for this device."""


class ProtocolError(ConversionError, ValueError):
    """A producer broke the DLPack protocol, or uses another major version of it."""


class ConsumedError(ProtocolError):
    """A capsule, or a tensor made from one, that was used before."""


class FileError(DlxError, ValueError):
    """A file is of no kind that dlx reads, is damaged or cut off, describes what cannot be, or was closed."""

    action = "read"


class HandleError(DlxError, ValueError):
    """A handle of shared memory is forged, damaged or of another version, or what it stands for is gone."""


class AdapterNotFoundError(DlxError, TypeError):
    """No adapter and no protocol for this type, no array in a record, or no framework of this name."""


class FrameworkNotInstalledError(DlxError, ImportError):  # type: ignore[misc]  # whose `path` is another
    """The target framework is not installed, or its import fails."""


class PluginError(DlxError, RuntimeError):
    """An adapter plugin is broken; the cause is attached."""
