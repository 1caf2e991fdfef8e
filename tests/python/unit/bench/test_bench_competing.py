"""Processes that compete for the CPUs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from scenarios.competing import competing_processes

PATIENCE = 30.0


def state_of(process: int) -> str:
    """Returns the state letter of proc(5)."""
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_for(process: int, state: str) -> None:
    end = time.monotonic() + PATIENCE
    while state_of(process) != state:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_competing_processes_run_where_they_are_let_and_end_with_the_block() -> None:
    with competing_processes(2) as competitors:
        first, second = competitors.processes
        for process in competitors.processes:
            wait_for(process, "T")
        with competitors.running(1):
            wait_for(first, "R")
            assert state_of(second) == "T"
        wait_for(first, "T")
    for process in competitors.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
