"""Weighted sums of adapters as requests name them: "poet:0.7+shout:0.3"."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
    """The terms NAME:WEIGHT between plus signs; None for a text that is no such sum."""
    terms = []
    for term in text.split("+"):
        name, colon, number = term.rpartition(":")
        weight = _number(number)
        if not name or not colon or weight is None:
            return None
        terms.append((name, weight))
    return SumOfNames(tuple(terms))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
