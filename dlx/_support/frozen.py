"""A base of dataclasses that cannot be changed."""

from dataclasses import FrozenInstanceError


class Frozen:
    """Refuses changes. `dataclass(frozen=True)` would compile these methods for each class, at every import."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise FrozenInstanceError(f"cannot assign to {type(self).__name__}.{name}: use dataclasses.replace")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {type(self).__name__}.{name}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
