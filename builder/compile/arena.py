"""Places buffers in one arena: those that live at the same time get disjoint bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ALIGNMENT: Final = 64


@dataclass(frozen=True)
class Lifetime:
    """A buffer of num_bytes that is written by op `first` and read by op `last` at the latest, both included."""

    name: str
    num_bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        """Whether there is an op during which both are needed."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """Where each buffer begins."""

    offsets: dict[str, int]
    num_bytes: int
    unshared_bytes: int
    """What the buffers would take if none shared bytes with another."""


def plan_arena(lifetimes: Sequence[Lifetime]) -> Arena:
    """Places the largest buffer first, each at the lowest offset that is free while it lives."""
    placed: list[tuple[Lifetime, int]] = []
    for lifetime in sorted(lifetimes, key=lambda item: (-item.num_bytes, item.first, item.name)):
        offset = 0
        for other, begin in sorted(placed, key=lambda item: item[1]):
            if lifetime.overlaps(other) and begin < offset + lifetime.num_bytes:
                offset = max(offset, _aligned(begin + other.num_bytes))
        placed.append((lifetime, offset))
    return Arena(
        offsets={lifetime.name: offset for lifetime, offset in placed},
        num_bytes=max((_aligned(offset + lifetime.num_bytes) for lifetime, offset in placed), default=0),
        unshared_bytes=sum(_aligned(lifetime.num_bytes) for lifetime in lifetimes),
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
