"""Reads the tables of a scenario file, and collects everything that is wrong with them, each with its line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ...builder.json_fields import describe
from .toml_places import Path, line_of

T = TypeVar("T")


class Place:
    """The file's problems so far, and where its keys stand."""

    def __init__(self, lines: dict[Path, int]) -> None:
        self.problems: list[str] = []
        self._lines = lines

    def complain(self, path: Path, complaint: str) -> None:
        """Note what is wrong with the key at `path`."""
        line = line_of(path, self._lines)
        where = "" if line is None else f"line {line}: "
        self.problems.append(f"{where}{_written(path)} {complaint}")


class Fields:
    """The keys of one table. Each method takes one; what nobody took is refused by refuse_remaining()."""

    def __init__(self, data: dict[str, Any], path: Path, place: Place) -> None:
        self._data = data
        self._path = path
        self._place = place
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def complain(self, name: str, complaint: str) -> None:
        """Note what is wrong with a key of this table."""
        self._place.complain((*self._path, name), complaint)

    def integer(self, name: str, *, default: int | None = None, minimum: int = 1, maximum: int = 1 << 31) -> int:
        """An integer in [minimum, maximum]."""
        value: int = self._take(
            name, default, minimum, f"an integer from {minimum} to {maximum}",
            lambda value: _is_integer(value) and minimum <= value <= maximum,
        )  # fmt: skip
        return value

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        """The same, or None when the key is not there."""
        return self.integer(name, minimum=minimum) if name in self._data else None

    def number(
        self, name: str, *, default: float | None = None, minimum: float = 0.0, maximum: float = math.inf,
        above: bool = False,
    ) -> float:  # fmt: skip
        """A finite number in [minimum, maximum], or above the minimum."""
        bounds = f"{'above' if above else 'of at least'} {minimum:g}"
        bounds += "" if maximum == math.inf else f" and at most {maximum:g}"
        value = self._take(
            name, default, max(minimum, 1.0) if maximum == math.inf else maximum, f"a finite number {bounds}",
            lambda value: _is_number(value)
            and (value > minimum if above else value >= minimum)
            and value <= maximum,
        )  # fmt: skip
        return float(value)

    def optional_number(self, name: str, *, minimum: float = 0.0, above: bool = False) -> float | None:
        """The same, or None when the key is not there."""
        return self.number(name, minimum=minimum, above=above) if name in self._data else None

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        """True or false."""
        value: bool = self._take(name, default, False, "true or false", lambda value: isinstance(value, bool))
        return value

    def text(self, name: str, *, default: str | None = None, choices: Iterable[str] = ()) -> str:
        """A string that is not empty, one of `choices` if there are any."""
        accepted = list(choices)
        wanted = "one of " + ", ".join(f'"{choice}"' for choice in accepted) if accepted else "a string with a letter"
        value: str = self._take(
            name, default, accepted[0] if accepted else "", wanted,
            lambda value: isinstance(value, str) and (value in accepted if accepted else bool(value.strip())),
        )  # fmt: skip
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; () when the key is not there."""
        values = self._take(
            name, [], [], "a list of strings",
            lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        )  # fmt: skip
        return tuple(values)

    def integers(self, name: str, *, default: list[int] | None = None, minimum: int = 1) -> tuple[int, ...]:
        """A list of integers with one or more of them; one integer stands for a list of one."""
        values = self._take(
            name, default, [minimum], f"an integer of at least {minimum}, or a list of such",
            lambda value: (_is_integer(value) and value >= minimum)
            or (isinstance(value, list) and bool(value) and all(_is_integer(v) and v >= minimum for v in value)),
        )  # fmt: skip
        return tuple(values) if isinstance(values, list) else (values,)

    def length(self, name: str, *, default: int | None = None) -> tuple[int, int]:
        """How many tokens: one number, or [low, high) to draw from. As (low, high), high = low + 1 for one number."""
        value = self._take(
            name, default, 1, "an integer of at least 1, or [low, high] with 1 <= low < high",
            lambda value: (_is_integer(value) and value >= 1)
            or (_is_pair(value) and 1 <= value[0] < value[1]),
        )  # fmt: skip
        return (value[0], value[1]) if isinstance(value, list) else (value, value + 1)

    def table(self, name: str) -> Fields | None:
        """A table within this one; None when the key is not there."""
        self._taken.add(name)
        if name not in self._data:
            return None
        value = self._data[name]
        if not isinstance(value, dict):
            self.complain(name, f"is {describe(value)}; expected a table")
            return None
        return Fields(value, (*self._path, name), self._place)

    def tables(self, name: str) -> Iterator[Fields]:
        """A list of tables; none when the key is not there."""
        self._taken.add(name)
        values = self._data.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            self.complain(name, f"is {describe(values)}; expected tables [[{name}]]")
            return
        for index, value in enumerate(values):
            yield Fields(value, (*self._path, name, index), self._place)

    def refuse_remaining(self, accepted_by: str) -> None:
        """Note every key that nobody took. `accepted_by` says what has no such key."""
        for name in self._data:
            if name not in self._taken:
                known = ", ".join(sorted(self._taken))
                self.complain(name, f"is unknown to {accepted_by}; it takes: {known}")

    def _take(self, name: str, default: T | None, stand_in: T, wanted: str, accepts: Callable[[Any], bool]) -> Any:
        self._taken.add(name)
        if name not in self._data:
            if default is not None:
                return default
            self._place.complain(self._path, f"has no {name}; expected {wanted}")
            return stand_in
        value = self._data[name]
        if accepts(value):
            return value
        self.complain(name, f"is {describe(value)}; expected {wanted}")
        return stand_in


def _written(path: Path) -> str:
    """scenario[3].adapters.count, lists counted from 1 as a reader counts."""
    text = ""
    for part in path:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_integer, value))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
