"""Processes that each keep one core busy, as others do on the machines that engines run on."""

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
    """Processes that are stopped, but while running() lets them."""

    processes: list[int]
    """Their ids."""

    @contextmanager
    def running(self, count: int) -> Iterator[None]:
        """`count` of them, at most as many as there are, run until the block ends."""
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
    """They live until the block ends."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
            os.kill(process.pid, signal.SIGSTOP)
        yield Competitors([process.pid for process in processes])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
