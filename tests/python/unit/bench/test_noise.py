"""Shares of the machine's time, counted from a fake /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from adaptrt.tools.bench import noise

FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
OTHER = 4321


class Machine:
    """A fake /proc directory with the ticks of the machine and of two processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.set({}, {})

    def set(self, ticks: Mapping[str, int], processes: Mapping[int, tuple[int, int, int, int]]) -> None:
        """Sets ticks since the start: of the machine, and of processes (user, system, and both of ended children)."""
        line = " ".join(str(ticks.get(name, 0)) for name in FIELDS)
        (self.directory / "stat").write_text(f"cpu  {line}\ncpu0 9 9 9 9 9 9 9 9 9 9\nintr 5\n")
        for process in (os.getpid(), OTHER):
            place = self.directory / str(process)
            place.mkdir(exist_ok=True)
            times = " ".join(map(str, processes.get(process, (0, 0, 0, 0))))
            (place / "stat").write_text(f"{process} (a) name) S 1 2 3 4 5 6 7 8 9 10 {times} 20 0 1 0\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(noise, "_PROC", tmp_path)
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("ticks", "own", "foreign", "stolen"),
    [
        ({"user": 60, "idle": 40}, (60, 0, 0, 0), 0.0, 0.0),
        ({"user": 60, "idle": 40}, (25, 5, 3, 2), 0.25, 0.0),
        ({"user": 40, "idle": 30, "steal": 30}, (40, 0, 0, 0), 0.0, 0.3),
        ({"user": 50, "idle": 20, "steal": 30}, (40, 0, 0, 0), 0.1, 0.3),
        ({"user": 50, "idle": 20, "iowait": 30}, (50, 0, 0, 0), 0.0, 0.0),
        ({"nice": 10, "system": 10, "irq": 10, "softirq": 10, "idle": 60}, (0, 0, 0, 0), 0.4, 0.0),
        # The user's time already includes guest time.
        ({"user": 60, "idle": 40, "guest": 50, "guest_nice": 50}, (60, 0, 0, 0), 0.0, 0.0),
        # Processes' clocks may run ahead of the machine's clock.
        ({"user": 10, "idle": 90}, (12, 0, 0, 0), 0.0, 0.0),
        ({}, (0, 0, 0, 0), 0.0, 0.0),
    ],
)
def test_time_is_the_measurements_or_others_or_stolen(
    machine: Machine, ticks: dict[str, int], own: tuple[int, int, int, int], foreign: float, stolen: float
) -> None:
    before = {name: 1000 for name in FIELDS}
    machine.set(before, {os.getpid(): (7, 7, 7, 7)})
    with noise.NoiseMeter() as meter:
        machine.set(
            {name: before[name] + ticks.get(name, 0) for name in FIELDS},
            {os.getpid(): tuple(7 + part for part in own)},  # type: ignore[dict-item]
        )
    assert meter.noise == noise.Noise(pytest.approx(foreign), pytest.approx(stolen))


def test_other_processes_may_belong_to_the_measurement(machine: Machine) -> None:
    for processes, foreign in (([OTHER], 0.0), ([], 0.5), ([OTHER, 99], 0.0)):
        machine.set({}, {})
        with noise.NoiseMeter(processes) as meter:
            machine.set({"user": 100}, {os.getpid(): (50, 0, 0, 0), OTHER: (0, 50, 0, 0)})
        assert meter.noise.foreign == pytest.approx(foreign)
