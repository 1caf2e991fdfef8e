"""Measures the share of CPU time that other processes use during a sample, from /proc.

Without /proc, as on macOS, the shares are 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PROC = Path("/proc")
_CHECK_SECONDS = 0.5
# Field indices in the first line of /proc/stat, and in /proc/<pid>/stat after the command's name; see proc(5).
_IDLE, _IOWAIT, _STEAL, _GUEST = 3, 4, 7, 8
_UTIME, _STIME, _CHILD_UTIME, _CHILD_STIME = 11, 12, 13, 14


@dataclass(frozen=True)
class Noise:
    """Shares of the whole machine's CPU time, from 0 to 1."""

    foreign: float
    """Used by processes outside of the measurement."""
    stolen: float
    """Used by other virtual machines."""


class NoiseMeter:
    """Context manager around a sample; `noise` is set when it ends.

    This process, its ended children, and the running processes with ids `processes` belong to the measurement.
    """

    def __init__(self, processes: Iterable[int] = ()) -> None:
        self._processes = [os.getpid(), *processes]
        self.noise = Noise(0.0, 0.0)

    def __enter__(self) -> NoiseMeter:
        self._machine_before, self._own_before = _machine_ticks(), self._own_ticks()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        total, idle, stolen = (
            after - before for after, before in zip(_machine_ticks(), self._machine_before, strict=True)
        )
        own = self._own_ticks() - self._own_before
        if total > 0:
            self.noise = Noise(max(0.0, (total - idle - stolen - own) / total), stolen / total)

    def _own_ticks(self) -> int:
        return sum(_process_ticks(process) for process in self._processes)


def wait_until_quiet(share: float, seconds: float, processes: Iterable[int] = ()) -> None:
    """Waits until other processes use at most `share` of the CPUs, but no longer than `seconds`."""
    end = time.monotonic() + seconds
    others = list(processes)
    while time.monotonic() < end:
        with NoiseMeter(others) as meter:
            time.sleep(_CHECK_SECONDS)
        if meter.noise.foreign <= share:
            return


def _machine_ticks() -> tuple[int, int, int]:
    """Returns (all, idle, stolen) clock ticks of all CPUs so far; zeros without /proc."""
    machine = _PROC / "stat"
    if not machine.exists():
        return 0, 0, 0
    ticks = [int(text) for text in machine.read_text().splitlines()[0].split()[1:]]
    return sum(ticks[:_GUEST]), ticks[_IDLE] + ticks[_IOWAIT], ticks[_STEAL]


def _process_ticks(process: int) -> int:
    """Clock ticks of a process and its ended children; 0 if it has ended."""
    try:
        text = (_PROC / str(process) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = text.rsplit(")", 1)[1].split()
    return sum(int(fields[index]) for index in (_UTIME, _STIME, _CHILD_UTIME, _CHILD_STIME))
