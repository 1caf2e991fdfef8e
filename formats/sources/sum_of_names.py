"""Weighted sums of adapters, as requests name them: "poet:0.7+shout:0.3"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from ..._core import AdapterError

MAX_TERMS: Final = 64
"""Maximum number of terms in a weighted sum; each term is read and converted."""

_WEIGHT: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class SumOfNames:
    """A weighted sum of adapters by their names."""

    terms: tuple[tuple[str, float], ...]
    """Names and weights, in the given order."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(name for name, _ in self.terms)


def parse_sum(text: str) -> SumOfNames | None:
    """Parses terms NAME:WEIGHT joined by plus signs; returns None if the text is not such a sum.

    Raises AdapterError for more than MAX_TERMS terms.
    """
    terms = []
    for term in text.split("+"):
        name, colon, number = term.rpartition(":")
        weight = _number(number)
        if not name or not colon or weight is None:
            return None
        terms.append((name, weight))
    check_num_terms(len(terms))
    return SumOfNames(tuple(terms))


def check_num_terms(num_terms: int) -> None:
    """Raises AdapterError for more than MAX_TERMS terms."""
    if num_terms > MAX_TERMS:
        raise AdapterError(f"the weighted sum has {num_terms} terms; expected at most {MAX_TERMS}")


def _number(text: str) -> float | None:
    # float() would also accept "1_0", spaces and digits of other scripts.
    if _WEIGHT.fullmatch(text) is None:
        return None
    value = float(text)
    return value if math.isfinite(value) else None
