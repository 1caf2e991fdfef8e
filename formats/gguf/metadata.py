"""Reads metadata keys by type, and collects all problems before it raises an error.

Each key is used, known to have no effect, or refused by name: an unknown key may change what the model computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from ..._core import AdaptrtError, CheckpointError
from ...common.shown_value import shown
from .header import Value

ARCHITECTURE: Final = "general.architecture"
_HARMLESS: Final = re.compile(
    r"general\.(?!type$|architecture$|alignment$|sampling\.).*"  # names, authors, licences, the file's mix of types
    r"|general\.alignment|split\..*|quantize\..*|imatrix\..*"
)
_LARGEST: Final = 2**31 - 1


class Metadata:
    """The metadata of one model."""

    def __init__(self, values: Mapping[str, Value], subject: str, error: type[AdaptrtError] = CheckpointError) -> None:
        """subject: begins errors. error: class of the error that finish() raises."""
        self._values = values
        self._subject = subject
        self._error = error
        self._unused = {key for key in values if not _HARMLESS.fullmatch(key)}
        self.problems: Final[list[str]] = []
        self.architecture: Final = self.text(ARCHITECTURE) or ""

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._values

    def raw(self, key: str) -> Value | None:
        """A value of any type; None if it is missing. Keys that begin with a dot are the architecture's."""
        full = self._full(key)
        self._unused.discard(full)
        return self._values.get(full)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer from `minimum` to 2^31 - 1. An array counts if all its items are the same integer."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) > 0 and (value == value[0]).all():
            value = int(value[0])
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= _LARGEST:
            several = " (layers that differ are not supported)" if isinstance(value, np.ndarray) else ""
            self.problem(key, f"{_described(value)}; expected an integer from {minimum} on{several}")
            return max(minimum, 1)
        return value

    def optional_integer(self, key: str, *, minimum: int = 0) -> int | None:
        """An integer, or None if it is missing."""
        return None if self.raw(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, by default above 0."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        found = float(value) if isinstance(value, float | int) and not isinstance(value, bool) else math.nan
        if math.isfinite(found) and (found > 0 or not positive):
            return _shortest(found)
        self.problem(key, f"{_described(value)}; expected a number{' above 0' if positive else ''}")
        return 1.0

    def optional_number(self, key: str) -> float | None:
        """A number above 0; None if it is missing or 0."""
        value = self.raw(key)
        return None if value is None or value == 0 else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(key, f"{_described(value)}; expected a boolean")
        return bool(value)

    def text(self, key: str, *, choices: Iterable[str] | None = None) -> str | None:
        """A text, one of `choices` if they are given; None if it is missing."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, str) or (choices is not None and value not in choices):
            expected = "a text" if choices is None else f"one of {', '.join(choices)}"
            self.problem(key, f"{_described(value)}; expected {expected}")
            return None
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty if it is missing."""
        value = self.raw(key)
        if value is not None and not isinstance(value, list):
            self.problem(key, f"{_described(value)}; expected an array of texts")
        return value if isinstance(value, list) else []

    def numbers(self, key: str) -> np.ndarray[Any, np.dtype[Any]] | None:
        """An array of numbers; None if it is missing."""
        value = self.raw(key)
        if value is not None and not isinstance(value, np.ndarray):
            self.problem(key, f"{_described(value)}; expected an array of numbers")
        return value if isinstance(value, np.ndarray) else None

    def expect(self, key: str, accepted: Iterable[Value]) -> None:
        """Notes a problem if a key is there with another value than those at which it has no effect."""
        value = self.raw(key)
        if value is None or any(isinstance(each, type(value)) and each == value for each in accepted):
            return
        self.problem(key, f"{_described(value)}; only {' or '.join(map(shown, accepted))} is supported")

    def is_unused(self, key: str) -> bool:
        """True for a key that is there and that nothing has read."""
        return self._full(key) in self._unused

    def ignore(self, keys: Iterable[str]) -> None:
        """Marks keys as having no effect."""
        self._unused -= {self._full(key) for key in keys}

    def problem(self, key: str, text: str) -> None:
        """Notes a problem with a key."""
        self.problems.append(f"metadata key '{self._full(key)}' {text}")

    def finish(self) -> None:
        """Raises an error that lists all problems, and all keys that nothing has read."""
        for key in sorted(self._unused):
            self.problems.append(
                f"metadata key '{key}' is {shown(self._values[key])}: an unknown key, which may change what the model "
                "computes"
            )
        if self.problems:
            raise self._error(f"{self._subject}: " + "; ".join(self.problems))

    def _full(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key


def _described(value: Value | None) -> str:
    return "is missing" if value is None else f"is {shown(value)}"


def _shortest(value: float) -> float:
    """The number with the fewest digits that is the same float32: files store 1e-5 as 9.99999974e-06."""
    return float(str(np.float32(value))) if float(np.float32(value)) == value else value
