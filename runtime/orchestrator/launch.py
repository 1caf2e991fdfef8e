"""Starts workers with mpirun in a session of their own, and keeps their output."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from ..._core import ConfigError

_KEPT_LINES: Final = 40
"""Number of output lines of workers that are kept, for the error when one of them ends."""
_BANNER: Final = "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
"""Line of MPICH's mpirun before the lines with the process and the signal. One more line precedes it."""
_SECONDS_TO_READ: Final = 1.0
"""Seconds to read the output from before mpirun's end."""


def find_mpirun(num_ranks: int) -> str:
    """Returns the mpirun of this Python's packages, or of the PATH. Raises ConfigError without mpirun or mpi4py."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpirun" if found is None else "mpi4py"
        raise ConfigError(f"the engine has {num_ranks} ranks, and there is no {missing}: pip install 'adaptrt[mpi]'")
    return found


class Launched:
    """An mpirun and its processes."""

    def __init__(self, num_ranks: int, interpreter: str, module: str, *arguments: str) -> None:
        """Runs a module with these arguments as `num_ranks` processes. interpreter: Python, or a program that runs it.

        Signals of a terminal do not reach the processes. Raises ConfigError if they cannot be started.
        """
        command = [find_mpirun(num_ranks), "-n", str(num_ranks), interpreter, "-m", module, *arguments]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{command[0]}: the workers cannot be started: {error}") from error
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._is_quiet = False
        self._reader = threading.Thread(target=self._read, name="adaptrt-workers-output", daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """True if mpirun has ended. It outlives its processes."""
        return self._process.poll() is not None

    def be_quiet(self) -> None:
        """Stops forwarding output, such as mpirun's messages about processes that were ended."""
        self._is_quiet = True

    def wait(self, seconds: float) -> bool:
        """Waits for mpirun. Returns True if it has ended in time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Makes mpirun end its processes and itself."""
        self._process.terminate()

    def kill(self) -> None:
        """Kills mpirun; its processes end with it."""
        self._process.kill()
        self._process.wait()

    def output(self) -> tuple[str, str]:
        """Returns the last lines that workers printed, and mpirun's message about their end."""
        self._reader.join(_SECONDS_TO_READ)
        lines = list(self._lines)
        begin = next((number for number, line in enumerate(lines) if _BANNER in line), None)
        if begin is None:
            return "\n".join(lines).strip(), ""
        return "\n".join(lines[: max(0, begin - 1)]).strip(), "\n".join(lines[begin:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                self._lines.append(text)
                if not self._is_quiet:
                    with contextlib.suppress(OSError, ValueError):  # stderr may be closed; keep reading
                        print(text, file=sys.stderr, flush=True)
