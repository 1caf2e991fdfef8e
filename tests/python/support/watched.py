"""Processes with a time limit: a process that does not end prints its stacks, and is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS_TO_END = 120.0
_SECONDS_TO_SAY = 2.0


class Watched:
    """A process and its children, with a time limit."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self.process = process
        self.was_late = False
        """True if it had to be killed. Then stderr has the stacks of its Python processes."""
        self._timer = threading.Timer(seconds, self._end)
        self._timer.start()

    def communicate(self) -> tuple[str, str]:
        """Returns stdout and stderr after all have ended. Raises an error with the stacks if that takes too long."""
        stdout, stderr = self.process.communicate()
        assert not self.was_late, f"{self.process.args} did not end; it said:\n{stdout}\n{stderr}"
        return stdout, stderr or ""

    def line(self) -> str:
        """Returns the next line of stdout."""
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        assert line, f"{self.process.args} has ended" + (" late" if self.was_late else "")
        return line

    def close(self) -> None:
        """Ends the remaining processes."""
        self._timer.cancel()
        self._signal(signal.SIGKILL)

    def _end(self) -> None:
        self.was_late = True
        self._signal(signal.SIGABRT, "python")  # Python's faulthandler prints the stacks
        time.sleep(_SECONDS_TO_SAY)
        self._signal(signal.SIGKILL)

    def _signal(self, how: signal.Signals, program: str = "") -> None:
        """Sends a signal to the processes that run this program. Children get it first, because mpirun ends when they
        end.
        """
        if self.process.poll() is not None:
            return  # the process id may have been reused
        for one in (*_below(self.process.pid), self.process.pid):
            if program in _program(one):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, how)


@contextlib.contextmanager
def watched(
    command: Sequence[object], seconds: float = SECONDS_TO_END, *, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[Watched]:
    """Runs a command and reads its stdout. env: added to this process's environment."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})}
    words = [str(word) for word in command]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True, **options) as process:
        started = Watched(process, seconds)
        try:
            yield started
        finally:
            started.close()


def _below(process: int) -> list[int]:
    """Returns the children of a process, and their children."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if directory.name.isdigit():
                parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(directory.name))
    found = list(children.get(process, []))
    for one in found:
        found += children.get(one, [])
    return found


def _program(process: int) -> str:
    try:
        return str(Path(f"/proc/{process}/exe").readlink())
    except OSError:  # the process has ended
        return ""
