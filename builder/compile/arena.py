"""Places buffers in one arena. Buffers whose lifetimes overlap get disjoint bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ALIGNMENT: Final = 64


@dataclass(frozen=True)
class Lifetime:
    """A buffer of num_bytes, live from op `first`, which writes it, to op `last`, its last reader, both included."""

    name: str
    num_bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        """True if some op needs both buffers."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """Offset of each buffer."""

    offsets: dict[str, int]
    num_bytes: int
    unshared_bytes: int
    """Total size of the buffers if none shared bytes."""


def plan_arena(lifetimes: Sequence[Lifetime]) -> Arena:
    """Places buffers from largest to smallest, each at the lowest offset that is free during its lifetime."""
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
