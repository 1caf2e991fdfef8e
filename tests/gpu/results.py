"""Results of checks and timings, as JSON and as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """A property that holds or does not."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Timing:
    """A time, compared with the machine's limit for its bytes and operations, and with another implementation."""

    name: str
    microseconds: float
    bytes: float
    flops: float
    """`bytes` and `flops` are the minimum numbers of bytes to move and of operations."""
    limit_microseconds: float
    """Time for these bytes or operations, whichever is longer, at the rates measured in the same run."""
    other: str
    """Name of the other implementation."""
    other_microseconds: float


@dataclass
class Report:
    """All results of one run."""

    machine: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Results of the run's parts, and parts that could not run."""

    @property
    def failed(self) -> list[Check]:
        """Checks that do not hold."""
        return [check for check in self.checks if not check.passed]

    def write(self, path: Path) -> None:
        """Writes the report as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """Reads a report that write() wrote."""
        read = json.loads(path.read_text())
        read["checks"] = [Check(**check) for check in read["checks"]]
        read["timings"] = [Timing(**timing) for timing in read["timings"]]
        return cls(**read)

    def text(self) -> str:
        """Returns the report as text."""
        lines = [f"{name}: {value}" for name, value in {**self.machine, **self.rates}.items()]
        lines.append(f"\nchecks: {len(self.checks) - len(self.failed)} passed, {len(self.failed)} failed")
        lines += [f"  FAILED {check.name}: {check.detail}" for check in self.failed]
        if self.timings:
            lines += ["", *_table(_timing_rows(self.timings))]
        lines += ["", *self.notes]
        return "\n".join(lines)


def _timing_rows(timings: Iterable[Timing]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("case", "us", "limit us", "of limit", "GB/s", "TFLOP/s", "other", "other us", "faster")
    ]
    for timing in timings:
        seconds = timing.microseconds / 1e6
        rows.append(
            (
                timing.name,
                f"{timing.microseconds:.2f}",
                f"{timing.limit_microseconds:.2f}",
                f"{timing.limit_microseconds / timing.microseconds:.0%}",
                f"{timing.bytes / seconds / 1e9:.0f}",
                f"{timing.flops / seconds / 1e12:.2f}",
                timing.other,
                f"{timing.other_microseconds:.2f}",
                f"{timing.other_microseconds / timing.microseconds:.1f}x",
            )
        )
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
