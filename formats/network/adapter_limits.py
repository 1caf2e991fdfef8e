"""Limits that an engine sets to the adapters that it serves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..._core import LoraLayout


@dataclass(frozen=True, kw_only=True)
class AdapterLimits:
    """Limits of an adapter; None: no limit."""

    max_rank: int | None = None
    """Maximum rank of a module."""
    max_extra_tokens: int | None = None
    """Maximum number of tokens beyond the base's vocabulary."""
    rotary_factors: Collection[int] | None = None
    """Accepted divisors of rotary positions; None: any."""

    @classmethod
    def of_layout(cls, layout: LoraLayout) -> AdapterLimits:
        """Limits of an engine that is loaded."""
        return cls(
            max_rank=layout.max_rank,
            max_extra_tokens=layout.max_extra_tokens,
            rotary_factors=layout.rotary_factors,
        )
