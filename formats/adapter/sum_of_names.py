"""Weighted sums of adapters as requests name them: "poet:0.7+shout:0.3"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from ..._core import AdapterError

MAX_TERMS: Final = 64
"""Number of terms that a weighted sum may have: each is read and converted."""

_WEIGHT: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class SumOfNames:
    """A weighted sum of adapters by their names."""

    terms: tuple[tuple[str, float], ...]
    """Names and weights, in the order in which they were given."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapters."""
        return tuple(name for name, _ in self.terms)


def parse_sum(text: str) -> SumOfNames | None:
    """The terms NAME:WEIGHT between plus signs; None for a text that is no such sum.

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
    """Raises AdapterError for more than MAX_TERMS."""
    if num_terms > MAX_TERMS:
        raise AdapterError(f"the weighted sum has {num_terms} terms; expected at most {MAX_TERMS}")


def _number(text: str) -> float | None:
    # float() alone would take "1_0", spaces and the digits of other scripts.
    if _WEIGHT.fullmatch(text) is None:
        return None
    value = float(text)
    return value if math.isfinite(value) else None
