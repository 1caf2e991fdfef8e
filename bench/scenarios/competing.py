"""Processes that each keep one core busy, to emulate a shared machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PROGRAM = "print(flush=True)\nwhile True: pass"


@dataclass(frozen=True)
class Competitors:
    """Processes that are stopped except during running()."""

    processes: list[int]
    """Process ids."""

    @contextmanager
    def running(self, count: int) -> Iterator[None]:
        """Runs `count` of the processes, at most all, during the with statement."""
        assert count <= len(self.processes)
        for process in self.processes[:count]:
            os.kill(process, signal.SIGCONT)
        try:
            yield
        finally:
            for process in self.processes[:count]:
                os.kill(process, signal.SIGSTOP)


@contextmanager
def competing_processes(count: int) -> Iterator[Competitors]:
    """Processes that exist during the with statement."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # Wait until it has started.
            os.kill(process.pid, signal.SIGSTOP)
        yield Competitors([process.pid for process in processes])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
