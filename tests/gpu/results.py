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


@dataclass(frozen=True)
class Row:
    """A figure of a whole engine, and what it is compared with."""

    name: str
    value: float
    unit: str
    limit: float = 0.0
    """The machine's limit, or the figure that this one is compared with, in the same unit; 0: neither."""
    share: float = 0.0
    """How much of the limit is reached; 0: there is none."""
    target: float = 0.0
    """Minimum share; 0: there is no target."""
    note: str = ""


@dataclass(frozen=True)
class KernelTime:
    """Time of a kernel, or a kind of copy, in steps that were profiled."""

    of: str
    """The steps."""
    name: str
    per_step: float
    """Launches in a step."""
    microseconds: float
    """Mean time of a launch."""
    share: float
    """Share of the time of all kernels and copies."""


@dataclass
class Report:
    """All results of one run."""

    machine: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    kernels: list[KernelTime] = field(default_factory=list)
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
        read["rows"] = [Row(**row) for row in read["rows"]]
        read["kernels"] = [KernelTime(**kernel) for kernel in read["kernels"]]
        return cls(**read)

    def add(self, other: Report) -> None:
        """Adds the results of another part of the same run."""
        self.machine = {**self.machine, **other.machine}
        self.rates = {**self.rates, **other.rates}
        self.checks += other.checks
        self.timings += other.timings
        self.rows += other.rows
        self.kernels += other.kernels
        self.notes += other.notes

    def text(self) -> str:
        """Returns the report as text."""
        lines = [f"{name}: {value}" for name, value in {**self.machine, **self.rates}.items()]
        lines.append(f"\nchecks: {len(self.checks) - len(self.failed)} passed, {len(self.failed)} failed")
        lines += [f"  FAILED {check.name}: {check.detail}" for check in self.failed]
        if self.timings:
            lines += ["", *_table(_timing_rows(self.timings))]
        if self.rows:
            lines += ["", *_table([_ROW_HEADINGS, *map(row_cells, self.rows)])]
        for of in dict.fromkeys(kernel.of for kernel in self.kernels):
            lines += ["", f"kernels of {of}", *_table(_kernel_rows([one for one in self.kernels if one.of == of]))]
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


_ROW_HEADINGS = ("row", "figure", "unit", "limit", "share", "target", "", "note")


def row_cells(row: Row) -> tuple[str, ...]:
    """Returns a row's cells as text."""
    has_target = row.target > 0
    met = "" if not has_target else "met" if row.share >= row.target else "MISSED"
    return (
        row.name,
        f"{row.value:.1f}",
        row.unit,
        f"{row.limit:.1f}" if row.limit else "",
        f"{row.share:.1%}" if row.share else "",
        f"{row.target:.1%}" if has_target else "",
        met,
        row.note,
    )


def _kernel_rows(kernels: Iterable[KernelTime]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("kernel", "per step", "mean us", "us per step", "share")]
    for kernel in kernels:
        each = f"{kernel.microseconds:.2f}"
        step = f"{kernel.microseconds * kernel.per_step:.1f}"
        rows.append((kernel.name, f"{kernel.per_step:.1f}", each, step, f"{kernel.share:.1%}"))
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
