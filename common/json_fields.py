"""Reads the fields of a JSON object, and collects all problems before it raises an error."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from .._core import AdaptrtError
from .regular_file import read_regular

T = TypeVar("T")

MAX_INTEGER: Final = 2**31 - 1
"""Default maximum of integers: sizes and token ids are int32 in the engine."""


_SURROGATE: Final = "\\ud"
"""Beginning of a surrogate's escape; two surrogates make one character."""

MAX_JSON_BYTES: Final = 256 << 20
"""Default maximum size of a JSON file: indexes and tokenizers of large models have some MB."""


def load_json_object(path: Path, error: type[AdaptrtError], *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a regular file of at most `max_bytes`.

    Raises `error` if the file cannot be read, is larger, or holds anything else.
    """
    try:
        text = read_regular(path, max_bytes).decode("utf-8")
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror}") from None
    except UnicodeDecodeError as reason:
        raise error(f"{path}: cannot be read: {reason}") from None
    return parse_json_object(text, str(path), error)


def parse_json_object(text: str, subject: str, error: type[AdaptrtError]) -> dict[str, Any]:
    """The JSON object in a text.

    Raises `error` for anything else, for a repeated key, and for a string with an unpaired surrogate.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = sorted(name for name, count in counts.items() if count > 1)
            raise error(f"{subject}: key {', '.join(map(repr, twice))} occurs more than once")
        return result

    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as reason:
        raise error(f"{subject}: not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise error(f"{subject}: expected a JSON object, found {describe(value)}")
    if _SURROGATE in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as reason:
            half = f"\\u{ord(reason.object[reason.start]):x}"
            raise error(f"{subject}: a string has {half}, half of a character; expected both halves") from None
    return value


def describe(value: object) -> str:
    """A value as JSON for an error message, shortened if it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


class JsonFields:
    """The fields of one JSON object.

    Each method takes one field. If a field is missing or invalid, the method notes the problem and returns a
    placeholder, so that reading continues. finish() raises all problems, including fields that were not taken.
    """

    def __init__(self, data: Mapping[str, Any], *, prefix: str = "", problems: list[str] | None = None) -> None:
        self._data = dict(data)
        self._places: dict[str, str] = {}
        self._taken: set[str] = set()
        self._prefix = prefix
        self._nested: list[JsonFields] = []
        self.problems: list[str] = [] if problems is None else problems

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def remaining(self) -> dict[str, Any]:
        """The fields that were not taken yet."""
        return {name: value for name, value in self._data.items() if name not in self._taken}

    def discard(self, names: Iterable[str]) -> None:
        """Takes fields whose values do not matter."""
        self._taken.update(names)

    def raw(self, name: str) -> Any:
        """Takes a field's value without checks; None if it is missing."""
        self._taken.add(name)
        return self._data.get(name)

    def problem(self, name: str, complaint: str) -> None:
        """Notes a problem of a field."""
        self.problems.append(f"{self._places.get(name, self._prefix)}{name} {complaint}")

    def inherit(self, outer: JsonFields) -> None:
        """Adds the remaining fields of the enclosing object. A field in both must have one value."""
        for name, value in outer.remaining().items():
            outer._taken.add(name)
            own = self._data.get(name)
            if own is None:
                self._data[name] = value
                self._places[name] = outer._prefix
            elif value is not None and (isinstance(own, bool) != isinstance(value, bool) or own != value):
                self.problem(name, f"is {describe(own)}, but {outer._prefix}{name} is {describe(value)}")

    def integer(self, name: str, *, minimum: int = 1, maximum: int = MAX_INTEGER, default: int | None = None) -> int:
        """An integer from `minimum` to `maximum`. Without a default the field is required."""
        value = self._take(name, is_integer, "an integer", default, minimum)
        if value < minimum:
            self.problem(name, f"is {value}; it must be at least {minimum}")
            return minimum
        if value > maximum:
            self.problem(name, f"is {describe(value)}; it must be at most {maximum}")
            return minimum
        return value

    def optional_integer(self, name: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int | None:
        """An integer from `minimum` to `maximum`, or None for null or a missing field."""
        return self.integer(name, minimum=minimum, maximum=maximum) if self._present(name) else None

    def number(self, name: str, *, minimum: float = 0.0, above: bool = False, default: float | None = None) -> float:
        """A finite number not below `minimum` (or above it). Without a default the field is required."""
        value = float(self._take(name, is_finite_number, "a finite number", default, minimum + 1.0))
        if value < minimum or (above and value == minimum):
            self.problem(name, f"is {value}; it must be {'above' if above else 'at least'} {minimum}")
            return minimum + 1.0
        return value

    def optional_number(self, name: str, *, minimum: float = 0.0, above: bool = False) -> float | None:
        """A finite number, or None for null or a missing field."""
        return self.number(name, minimum=minimum, above=above) if self._present(name) else None

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        """True or false. Without a default the field is required."""
        return self._take(name, lambda value: isinstance(value, bool), "true or false", default, False)

    def string(self, name: str, *, choices: Iterable[str] = (), default: str | None = None) -> str:
        """A string, one of `choices` if there are any. Without a default the field is required."""
        accepted = list(choices)
        value = self._take(name, lambda value: isinstance(value, str), "a string", default, "")
        if accepted and value not in accepted and name in self._data and isinstance(self._data[name], str):
            self.problem(name, f"is {describe(value)}; accepted: {', '.join(accepted)}")
            return accepted[0]
        return value

    def optional_string(self, name: str) -> str | None:
        """A string, or None for null or a missing field."""
        return self.string(name) if self._present(name) else None

    def integers(self, name: str, *, minimum: int = 0, scalar: bool = False) -> tuple[int, ...]:
        """Integers from `minimum` to MAX_INTEGER; () for null or a missing field. `scalar` also accepts one integer."""
        value = self.raw(name)
        if value is None:
            return ()
        values = [value] if scalar and is_integer(value) else value
        if not isinstance(values, list) or not all(
            is_integer(item) and minimum <= item <= MAX_INTEGER for item in values
        ):
            wanted = "an integer or a list of integers" if scalar else "a list of integers"
            self.problem(name, f"is {describe(value)}; expected {wanted} from {minimum} to {MAX_INTEGER}")
            return ()
        return tuple(values)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Finite numbers, not below 0; () for null or a missing field."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(is_finite_number(item) and item >= 0 for item in value):
            self.problem(name, f"is {describe(value)}; expected a list of finite numbers, at least 0")
            return ()
        return tuple(map(float, value))

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self.raw(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problem(name, f"is {describe(value)}; expected a list of strings")
            return ()
        return tuple(value)

    def object(self, name: str, *, optional: bool = False) -> JsonFields | None:
        """A nested object, which shares this one's problems; None if it is missing, null or something else."""
        value = self.raw(name)
        if value is None and optional:
            return None
        if not isinstance(value, dict):
            self.problem(name, "is missing" if value is None else f"is {describe(value)}; expected an object")
            return None
        nested = JsonFields(value, prefix=f"{self._prefix}{name}.", problems=self.problems)
        self._nested.append(nested)
        return nested

    def objects(self, name: str) -> list[JsonFields]:
        """A list of nested objects, which share this one's problems; [] if it is missing or something else."""
        value = self.raw(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.problem(name, f"is {describe(value)}; expected a list of objects")
            return []
        nested = [
            JsonFields(item, prefix=f"{self._prefix}{name}[{index}].", problems=self.problems)
            for index, item in enumerate(value)
        ]
        self._nested += nested
        return nested

    def refuse_remaining(self) -> None:
        """Notes every field that was not taken, here and in the nested objects that were taken."""
        for nested in self._nested:
            nested.refuse_remaining()
        for name, value in self.remaining().items():
            self.problem(name, f"is unknown (its value is {describe(value)})")
            self._taken.add(name)

    def finish(self, subject: str, error: type[AdaptrtError]) -> None:
        """Raises `error` with all problems, including fields that were not taken."""
        self.refuse_remaining()
        if self.problems:
            raise error(f"{subject}: " + "; ".join(self.problems))

    def _present(self, name: str) -> bool:
        self._taken.add(name)
        return self._data.get(name) is not None

    def _take(self, name: str, accepts: Callable[[Any], bool], wanted: str, default: T | None, stand_in: T) -> T:
        self._taken.add(name)
        value = self._data.get(name)
        if name not in self._data and default is not None:
            return default
        if name not in self._data:
            self.problem(name, f"is missing; expected {wanted}")
            return stand_in
        if not accepts(value):
            self.problem(name, f"is {describe(value)}; expected {wanted}")
            return stand_in
        return cast(T, value)


def is_integer(value: object) -> bool:
    """True if a JSON value is an integer; JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite_number(value: object) -> bool:
    """True if a JSON value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
