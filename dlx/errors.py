"""What dlx raises: one family, one message template, no C.

Every error says what was asked, what was found, where, and one concrete fix, and is also the builtin that callers
already catch. Nothing else leaves `dlx.convert` but `TypeError` and `ValueError` for a wrong call, an ExceptionGroup of
these where errors are collected, `MemoryError`, and what is no `Exception`: interrupts and exits.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "DlxError",
    "ConversionError",
    "CopyRequiredError",
    "ReadOnlyError",
    "LayoutError",
    "DTypeError",
    "DeviceError",
    "StreamError",
    "ProtocolError",
    "ConsumedError",
    "AdapterNotFoundError",
    "FrameworkNotInstalledError",
    "PluginError",
]


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
    where
        Place inside a container, ``"obj['a'][3]"``; empty at the root.
    fix
        One sentence that says what to do.
    sharing
        Whether sharing memory was demanded (``copy=False``).

    Attributes
    ----------
    reason, source, target, where, fix, sharing
        The parameters, to be read by programs. The message is made from them when it is shown.
    """

    def __init__(
        self,
        reason: str = "",
        *,
        source: str = "",
        target: str = "",
        where: str = "",
        fix: str = "",
        sharing: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source = source
        self.target = target
        self.where = where
        self.fix = fix
        self.sharing = sharing

    def __str__(self) -> str:
        asked = ""
        if self.source:
            asked = f"cannot convert {self.source}"
            if self.target:
                asked += f" to {self.target!r}"
            if self.sharing:
                asked += " without a copy"
        if self.where:
            asked += f" at {self.where}" if asked else f"at {self.where}"
        sentence = f"{asked}: {self.reason}" if asked else self.reason
        return f"{sentence}. {self.fix}" if self.fix else sentence

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason,), self.__dict__  # notes included

    def complete(self, **parts: Any) -> DlxError:
        """Fill in those parts that are still empty, and return the error.

        Used by outer layers, which know the source and the target, for errors of inner ones, which do not.
        """
        for name, value in parts.items():
            if not getattr(self, name):
                setattr(self, name, value)
        return self


class ConversionError(DlxError, BufferError):
    """Raised where data cannot cross; `BufferError` is the array API standard's word for it."""


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


class StreamError(ConversionError, ValueError):
    """A stream that has no meaning for this device."""


class ProtocolError(ConversionError, ValueError):
    """A producer broke the DLPack protocol, or speaks another major version of it."""


class ConsumedError(ProtocolError):
    """A capsule, or a tensor made from one, that was used before."""


class AdapterNotFoundError(DlxError, TypeError):
    """No adapter and no protocol for this type, or no framework of this name."""


class FrameworkNotInstalledError(DlxError, ImportError):
    """The target framework is not installed, or its import fails."""


class PluginError(DlxError, RuntimeError):
    """An adapter plugin is broken; the cause is attached."""
