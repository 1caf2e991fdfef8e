"""Base of value classes whose fields are checked whenever they are set, like those of the bindings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np


@dataclass(frozen=True)
class Kind:
    """Accepted values of a field."""

    accepted: str
    """Description for errors."""
    convert: Callable[[Any], Any]
    """Returns the value to store. Raises TypeError or ValueError for a value that is not accepted."""


class CheckedFields:
    """Base of dataclasses, declared with eq=False, whose fields are Annotated with their Kind.

    Setting a field raises TypeError with its name, its value and the accepted values. Arrays are equal if their shapes
    and values are.
    """

    # Values can change, so they have no hash; the other two need a dataclass, which subclasses are.
    __hash__ = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        kind = _kinds(type(self)).get(name)  # type: ignore[arg-type]
        if kind is None:
            raise AttributeError(f"{type(self).__name__} has no field {name!r} that can be set")
        try:
            converted = kind.convert(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"{type(self).__name__}.{name} is {value!r:.80} ({type(value).__name__}); accepted: {kind.accepted}"
            ) from None
        object.__setattr__(self, name, converted)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in names)


@functools.cache
def _kinds(cls: type) -> dict[str, Kind]:
    """Returns the kinds of a class's fields by name."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: kind for name, hint in hints.items() for kind in getattr(hint, "__metadata__", ())}


def _equal(a: Any, b: Any) -> bool:
    arrays = [hasattr(value, "__array__") for value in (a, b)]
    if all(arrays):
        return bool(np.array_equal(np.asarray(a), np.asarray(b)))
    return not any(arrays) and bool(a == b)


def _only(*types: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError
        return value

    return convert


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError
    return int(value.__index__())


def _real(value: Any) -> float:
    if isinstance(value, (bool, str)):
        raise TypeError
    return float(value)


def _tensor(value: Any) -> Any:
    if not hasattr(value, "__array__") and not hasattr(value, "__dlpack__"):
        raise TypeError
    return value


def instance_of(cls: type) -> Kind:
    """Accepts an object of a class."""
    return Kind(cls.__name__, _only(cls))


def integer(least: int, most: int | None = None) -> Kind:
    """Accepts an integer from `least` to `most`."""

    def convert(value: Any) -> int:
        number = _integer(value)
        if number < least or (most is not None and number > most):
            raise ValueError
        return number

    return Kind(f"int, {least} or more" if most is None else f"int from {least} to {most}", convert)


def optional(kind: Kind) -> Kind:
    """Accepts the same, or None."""
    return Kind(f"None, {kind.accepted}", lambda value: None if value is None else kind.convert(value))


def list_of(kind: Kind) -> Kind:
    """Accepts any sequence or array except text, and stores a list."""

    def convert(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes, set, frozenset, dict)):
            raise TypeError
        return [kind.convert(each) for each in value]

    return Kind(f"list of ({kind.accepted})", convert)


BOOL = Kind("bool", _only(bool))
TEXT = Kind("str", _only(str))
TOKEN = integer(-(2**31), 2**31 - 1)
FLOAT = Kind("float", _real)
TENSOR = Kind("array or tensor", _tensor)
ANYTHING = Kind("object", lambda value: value)
