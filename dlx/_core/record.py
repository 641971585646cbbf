"""`Record`: classes like frozen dataclasses, but for what making them costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, dataclass_transform

from dlx._core.module import as_written

__all__ = ["Record"]


class _Made:
    """An attribute of a class, made when it is asked for: it imports what `import dlx` does without."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __get__(self, obj: object, cls: type) -> Any:
        return self._make(cls)


def _signature(cls: type[Record]) -> Any:
    from inspect import Parameter, Signature

    kind, defaults = Parameter.POSITIONAL_OR_KEYWORD, cls._defaults
    pairs = cls._annotations.items()
    return Signature(
        [
            Parameter(name, kind, default=defaults.get(name, Parameter.empty), annotation=as_written(of))
            for name, of in pairs
        ]
    )


def _dataclass(cls: type[Record]) -> Any:
    """Return a dataclass with the same fields."""
    from dataclasses import field, make_dataclass

    defaults = {name: field(default_factory=_giving(value)) for name, value in cls._defaults.items()}
    fields = [(name, of, defaults.get(name) or field()) for name, of in cls._annotations.items()]
    return make_dataclass(cls.__name__, fields, frozen=True)


def _giving(value: Any) -> Callable[[], Any]:
    return lambda: value


@dataclass_transform(frozen_default=True)
class Record:
    """A class whose annotations are its fields, after those of its bases, and whose attributes are their defaults.

    Fields cannot be set. Two of one class are equal where their fields are, but for those that the class calls hidden,
    which are not shown either: ``class Resolve(Step, hidden=("run",))``. `dataclasses.replace` and `fields` take them.
    A dataclass compiles six functions for each class: that was a third of the time of a first `dlx.convert`.
    """

    _annotations: ClassVar[dict[str, Any]] = {}
    _defaults: ClassVar[dict[str, Any]] = {}  # they are not copied
    _fields: ClassVar[tuple[str, ...]] = ()
    _shown: ClassVar[tuple[str, ...]] = ()

    __signature__ = _Made(_signature)
    __dataclass_fields__ = _Made(lambda cls: _dataclass(cls).__dataclass_fields__)
    __dataclass_params__ = _Made(lambda cls: _dataclass(cls).__dataclass_params__)

    def __init_subclass__(cls, hidden: tuple[str, ...] = ()) -> None:
        own, given = cls.__annotations__, vars(cls)
        cls._annotations = cls._annotations | own
        cls._defaults = cls._defaults | {name: given[name] for name in own if name in given}
        cls._fields = tuple(cls._annotations)
        cls._shown = (*cls._shown, *(name for name in own if name not in hidden))

    def __init__(self, *values: Any, **named: Any) -> None:
        fields, mine = self._fields, self.__dict__
        mine |= self._defaults
        mine |= zip(fields, values, strict=False)
        mine |= named
        is_twice = values and named and not named.keys().isdisjoint(fields[: len(values)])
        if is_twice or len(values) > len(fields) or mine.keys() != self._annotations.keys():
            try:
                self.__signature__.bind(*values, **named)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}() {error}") from None
        self.__post_init__()

    def __post_init__(self) -> None:
        """Raise where values are wrong."""

    def _replace(self, **changes: Any) -> Self:
        """Return one of the same class that differs in some fields."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **changes)
        if len(made.__dict__) > len(self._fields):
            raise TypeError(
                f"{type(self).__name__} has no such field: {', '.join(changes.keys() - self.__dict__.keys())}"
            )
        made.__post_init__()
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    def _key(self) -> tuple[Any, ...]:
        return tuple([self.__dict__[name] for name in self._shown])

    def __eq__(self, other: object) -> bool:
        return (
            self._key() == other._key() if isinstance(other, Record) and type(other) is type(self) else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        pairs = zip(self._shown, self._key(), strict=True)
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in pairs)})"
