"""A base of dataclasses that cannot be changed."""

from dataclasses import FrozenInstanceError, fields
from typing import Any


class Frozen:
    """Refuses changes. `dataclass(frozen=True)` would compile these methods for each class, at every import."""

    _is_complete = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_is_complete", True)

    def __setattr__(self, name: str, value: object) -> None:
        if self._is_complete:  # vars(self) would make reading attributes slower
            raise FrozenInstanceError(f"cannot assign to {type(self).__name__}.{name}: use dataclasses.replace")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {type(self).__name__}.{name}")

    def __repr__(self: Any) -> str:
        values = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{type(self).__name__}({', '.join(values)})"
