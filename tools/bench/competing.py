"""Processes that each keep one core busy, as others do on the machines that engines run on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROGRAM = "print(flush=True)\nwhile True: pass"


@contextmanager
def competing_processes(count: int) -> Iterator[list[int]]:
    """Their ids; they run until the block ends."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
