"""Exception classes and the one template of their messages.

Each class also derives from the builtin exception that callers already catch. `dlx.convert` raises these classes,
`TypeError` and `ValueError` for an invalid call, an ExceptionGroup if errors are collected, `MemoryError`, and
interrupts.

Errors store data; `str(error)` builds the message from it::

    cannot <action> <object> [to '<target>'] [at <path>]: <reason>. <fix>
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

_name = type.__dict__["__name__"].__get__  # a metaclass may override __name__, or raise


def class_name(kind: type) -> str:
    """Return the name of a class, without its module."""
    return str(_name(kind))


def truncate(text: str, limit: int) -> str:
    """Return the first `limit` characters and, if the text is longer, the number of missing ones."""
    length = str.__len__(text)
    start: str = str.__getitem__(text, slice(0, limit))  # subclasses may override __getitem__
    return start if length <= limit else f"{start}... ({length - limit:,} more characters)"


def safe_repr(value: object, limit: int = 60) -> str:
    """Return the truncated repr of a value, or its class name if `repr` fails."""
    try:
        return truncate(repr(value), limit)
    except MemoryError:
        raise
    except Exception:
        return f"<{class_name(type(value))}>"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return ``"Did you mean 'torch'?"`` with the closest name, or ``""``; case is ignored."""
    from difflib import get_close_matches

    closest = get_close_matches(truncate(word, 40).lower(), list(names), 1)
    return f"Did you mean {closest[0]!r}?" if closest else ""


# ---- paths -----------------------------------------------------------------------------------------------------------


class Attribute(str):
    """An attribute name in `DlxError.path`: ``.x``."""

    def __repr__(self) -> str:
        return f"Attribute({str.__repr__(self)})"


class Member(int):
    """The index of a set member, in iteration order, in `DlxError.path`: ``{3}``."""

    def __repr__(self) -> str:
        return f"Member({int.__repr__(self)})"


class _KeyText(str):
    """The repr of a key, in `DlxError.path`, if the error does not store the key itself."""

    def __repr__(self) -> str:
        return str(self)


_STORED_TYPES = frozenset({str, bytes, int, float, bool, type(None), Attribute, Member, _KeyText})
MAX_KEY = 1000  # characters of a key or its repr


def _is_small_data(key: Any, depth: int = 4) -> bool:
    """Return whether a key is small data that pickles and keeps no other object alive."""
    kind = type(key)
    if kind is tuple:
        return depth > 0 and len(key) <= 16 and all(_is_small_data(each, depth - 1) for each in key)
    if kind in (int, Member):
        return bool(key.bit_length() <= 2000)  # never above sys.get_int_max_str_digits
    return kind in _STORED_TYPES and (kind not in (str, bytes, Attribute) or len(key) <= MAX_KEY)


def _step_text(step: Any) -> str:
    if type(step) is Attribute:
        return f".{step}"
    text = safe_repr(step, MAX_KEY)
    text = text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}"
    return f"{{{int(step)}}}" if type(step) is Member else f"[{text}]"


PATH_ENDS = 32  # keys shown at each end of a long path


def path_text(path: Iterable[Any], root: str = "obj") -> str:
    """Return a path as Python code, ``obj['a'][3].x``; the middle of a path of more than 64 keys is left out."""
    steps = list(path)
    if len(steps) <= 2 * PATH_ENDS:
        return root + "".join(map(_step_text, steps))
    return root + "".join([*map(_step_text, steps[:PATH_ENDS]), " ... ", *map(_step_text, steps[-PATH_ENDS:])])


# ---- options ---------------------------------------------------------------------------------------------------------

_STRICTEST = {"copy": False, "strict": True}  # an error suggests dropping these values


def format_option(name: str, value: Any) -> str:
    """Return ``name=value``, or the name alone without a value."""
    return name if value is None else f"{name}={value!r}"


def option_text(
    option: tuple[tuple[str, Any], ...], write: Callable[[str, Any], str] = format_option, via: str = ""
) -> str:
    """Return the sentence for `DlxError.option`: ``"Drop copy=False, or pass readonly='share'."``."""
    drop = [write(name, _STRICTEST[name]) for name, value in option if value is None and name in _STRICTEST]
    leave = [write(name, None) for name, value in option if value is None and name not in _STRICTEST]
    give = [write(name, value) for name, value in option if value is not None]
    parts = [("drop", drop, ""), ("leave", leave, " out"), ("pass", give, via and f" {via}")]
    clauses = [f"{verb} {' or '.join(words)}{end}" for verb, words, end in parts if words]
    text = ", or ".join(clauses)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def sentences(*parts: str) -> str:
    """Join the non-empty parts as sentences; the last one keeps its ending."""
    *first, last = [part for part in parts if part] or [""]
    return " ".join([*(part if part.endswith((".", "!", "?")) else f"{part}." for part in first), last])


# ---- the family ------------------------------------------------------------------------------------------------------

_VERBS = {"parts": "split", "from_dlpack": "convert", "from_managed": "convert", "from_pointer": "convert"}
"""Verbs for functions whose name is not a verb."""

_VERBS_WITHOUT_TARGET = {
    "array_namespace": "find the namespace of",
    "borrow": "borrow",
    "describe": "describe",
    "put": "put",
    "read": "read",
    "ring": "create a ring like",
    "share": "share",
    "shares_memory": "compare the memory of",
    "to_capsule": "export",
}
"""Verbs for functions without a target: their messages do not show the internal one."""


class DlxError(Exception):
    """Base class of dlx's exceptions.

    Parameters
    ----------
    reason
        Why the action failed, without a full stop.
    source
        Description of the object: ``"numpy.ndarray (float32[4])"``.
    target
        Name of the requested framework: ``"torch"``.
    path
        Keys from the root of the container to the array, ``("a", 3, Attribute("x"))``; empty at the root. Numbers and
        text are stored unchanged; other keys as their repr.
    root
        Name of the object where the path starts, such as a parameter; empty for the converted object.
    fix
        One sentence with a solution.
    option
        Options of `dlx.convert`, each of which would avoid the error, as pairs (name, value): ``(("detach", True),)``.
        A value of None means: leave the option out.
    via
        End of the sentence about `option` if the called function has no such option.
    details
        Parts of the reason that depend on the array or the framework's version, as pairs (topic, text):
        ``(("alignment", ", found 16"),)``.
    sharing
        Whether the caller passed ``copy=False``.

    Attributes
    ----------
    source, target, path, root, option, via, details, sharing
        The parameters, for programs.
    can_stay
        Whether ``errors="pass"`` of `dlx.convert` would leave the object as it is; the message says so.
    action
        Name of the called function of dlx: ``"convert"``, ``"open"``, ``"share"``; ``"read"`` for an open file.
    brief
        The reason without its details.
    reason
        The reason with its details.
    where
        The path as text: ``"obj['a'][3].x"``.
    fix
        The sentence about `option`, then the parameter `fix`; without both, `usual_fix`.
    usual_fix
        The usual solution for errors of this class; may be empty.
    """

    action = "convert"
    usual_fix = ""

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
        self.can_stay = False

    @property
    def reason(self) -> str:
        """Why the action failed, without a full stop."""
        return self.brief + "".join(text for _, text in self.details)

    @property
    def path(self) -> tuple[Any, ...]:
        """Keys from the root to the array; an attribute is an `Attribute`, a member of a set is a `Member`."""
        return self._path

    @path.setter
    def path(self, path: Iterable[Any]) -> None:
        self._path = tuple(key if _is_small_data(key) else _KeyText(safe_repr(key, MAX_KEY)) for key in path)

    @property
    def where(self) -> str:
        """The path as text, ``"obj['a'][3].x"``; empty at the root."""
        return path_text(self.path, self.root or "obj") if self.path or self.root else ""

    @property
    def fix(self) -> str:
        """The solution, in one or two sentences; empty if there is none."""
        return self.advice()

    @fix.setter
    def fix(self, fix: str) -> None:
        self._fix = fix

    def advice(self, write: Callable[[str, Any], str] = format_option) -> str:
        """Return `fix` with its options formatted by ``write(name, value)``; without a value, it gets the name."""
        return sentences(option_text(self.option, write, self.via), self._fix) or self.usual_fix

    def __str__(self) -> str:
        action = ""
        if self.source:
            verb = _VERBS_WITHOUT_TARGET.get(self.action)
            action = f"cannot {verb or _VERBS.get(self.action, self.action)} {self.source}"
            if self.target and verb is None:
                action += f" to {self.target!r}"
            if self.sharing:
                action += " without a copy"
        if self.where:
            action += f" at {self.where}" if action else f"at {self.where}"
        stay = "Pass errors='pass' to leave it as it is." if self.can_stay and self.action == "convert" else ""
        return sentences(f"{action}: {self.reason}" if action else self.reason, self.fix, stay)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.brief,), self.__dict__  # notes included

    def complete(self, *, path: Iterable[Any] = (), root: str = "", **parts: Any) -> DlxError:
        """Fill in the empty parts, which only outer layers know, and return the error."""
        if not (self.path or self.root):
            self.path, self.root = path, root
        for name, value in parts.items():
            if not ((self._fix or self.option) if name == "fix" else getattr(self, name)):
                setattr(self, name, value)
        return self


class ConversionError(DlxError, BufferError):
    """The data cannot be converted. The array API standard requires `BufferError`."""


class CopyRequiredError(ConversionError, ValueError):
    """The caller passed ``copy=False``, but the conversion needs a copy."""

    usual_fix = "Drop copy=False."


class ReadOnlyError(ConversionError, ValueError):
    """The memory is read-only, and the consumer cannot represent that."""

    usual_fix = "Pass a writable copy."


class LayoutError(ConversionError, ValueError):
    """The consumer cannot represent the memory layout (sparse, masked, null data, size overflow)."""

    usual_fix = "Reshape or copy it in its own framework first."


class DTypeError(ConversionError, TypeError):
    """The consumer has no such dtype."""

    usual_fix = "Convert it to another dtype in its own framework first."


class DeviceError(ConversionError, RuntimeError):
    """The device is unknown, missing, or unsupported by the consumer."""

    usual_fix = "Move it to the host in its own framework first."


class DeviceNameError(DeviceError, ValueError):
    """The device name is invalid."""


class StreamError(ConversionError, ValueError):
    """The stream is invalid for this device."""

    usual_fix = "Leave stream out."


class ProtocolError(ConversionError, ValueError):
    """The producer violates the DLPack protocol, or uses another major version."""

    usual_fix = "Report it to the library that created the object."


class ConsumedError(ProtocolError):
    """The capsule, or the tensor made from it, has been used already."""

    usual_fix = "Export it again."


class FileError(DlxError, ValueError):
    """The file has an unsupported format, is damaged or truncated, or is closed."""

    action = "read"
    usual_fix = "Save or download it again."


class HandleError(DlxError, ValueError):
    """The handle of shared memory is invalid, has another version, or its memory no longer exists."""

    usual_fix = "Share it again, and attach the new handle."


class AdapterNotFoundError(DlxError, TypeError):
    """The type has no adapter and no protocol, a record holds no array, or the framework is unknown."""


class FrameworkNotInstalledError(DlxError, ImportError):  # type: ignore[misc]  # ImportError has another `path`
    """The framework is not installed, or its import fails."""


class PluginError(DlxError, RuntimeError):
    """An adapter plugin is broken; `__cause__` has the error."""

    usual_fix = "Repair or uninstall the plugin."


def __dir__() -> list[str]:
    return __all__
