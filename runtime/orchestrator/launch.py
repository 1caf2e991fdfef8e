"""Starts workers with mpirun, as processes of a session of their own, and keeps what they print."""

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
"""Of what workers print, for the error when one of them ends."""
_BANNER: Final = "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
"""Of MPICH's mpirun, with a line before it; behind it are the process and the signal."""
_SECONDS_TO_READ: Final = 1.0
"""What was printed before mpirun ended."""


def find_mpirun(num_ranks: int) -> str:
    """That of this Python's packages, or else of the PATH. Raises ConfigError where there is none, or no mpi4py."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpirun" if found is None else "mpi4py"
        raise ConfigError(f"the engine has {num_ranks} ranks, and there is no {missing}: pip install 'adaptrt[mpi]'")
    return found


class Launched:
    """An mpirun and its processes."""

    def __init__(self, num_ranks: int, interpreter: str, module: str, *arguments: str) -> None:
        """Runs a module with these arguments as so many processes; `interpreter` is Python, or runs it.

        Signals of a terminal do not reach them. Raises ConfigError where they cannot be started.
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
        """Whether mpirun, which outlives the others, is no more."""
        return self._process.poll() is not None

    def be_quiet(self) -> None:
        """What is printed from now on is not passed on: mpirun's words on processes that were ended."""
        self._is_quiet = True

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Has mpirun end its processes and itself."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends mpirun; what it started ends with it."""
        self._process.kill()
        self._process.wait()

    def output(self) -> tuple[str, str]:
        """The last lines that workers have printed by now, and what mpirun has said of their end."""
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
                    with contextlib.suppress(OSError, ValueError):  # stderr is closed; workers must not wait for it
                        print(text, file=sys.stderr, flush=True)
