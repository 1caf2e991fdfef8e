"""Compiles guides in another process before the executor compiles them.

A guide may be hostile. llguidance recurses as deep as a guide is nested and limits neither time nor memory, so a guide
can crash its process. Here it crashes only a process that runs nothing else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from .._core import ConfigError, RequestError
from .guide_trial_process import framed, read_message

MAX_PROCESSES: Final = 2
"""Maximum number of guides that are tried at once; others wait."""
STACK_BYTES: Final = 4 << 20
"""Stack size of a trial: half of the executor's threads, so a guide that fits here fits there."""
_WALL_FACTOR: Final = 6
"""A trial may wait for a CPU, so its time limit is its CPU time limit times this factor."""
_SCRIPT: Final = Path(__file__).with_name("guide_trial_process.py")


@dataclass(frozen=True)
class GuideLimits:
    """Limits of compiling one guide."""

    max_guide_seconds: int = 10
    """CPU time, in seconds."""
    max_guide_bytes: int = 512 << 20
    """Memory in addition to the vocabulary's, in bytes."""
    max_guide_characters: int = 1 << 20
    """Number of characters of the grammar."""


class GuideTrial:
    """Compiles grammars for a vocabulary in child processes, which start on demand. Thread-safe."""

    def __init__(
        self, llguidance_file: str, tokens: Sequence[bytes], stop_token_ids: Sequence[int], limits: GuideLimits
    ) -> None:
        """llguidance_file: __file__ of the llguidance package. tokens: bytes of each token, from token_bytes()."""
        self.limits = limits
        self._package = str(Path(llguidance_file).parent.parent)
        vocabulary = {
            "tokens": [b64encode(token).decode() for token in tokens],
            "stop_token_ids": list(stop_token_ids),
            "max_seconds": limits.max_guide_seconds,
            "max_bytes": limits.max_guide_bytes,
        }
        self._vocabulary = framed(vocabulary)
        self._free = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[_Process] = []
        self._end = weakref.finalize(self, _end_all, self._idle)

    def compile(self, kind: str, text: str) -> int:
        """Compiles a grammar in one of llguidance's languages, and returns the bytes of memory that it holds.

        Raises RequestError with llguidance's reason for an invalid grammar, and for a grammar that exceeds the limits.
        """
        if len(text) > self.limits.max_guide_characters:
            raise RequestError(
                f"the guide has {len(text)} characters; expected at most {self.limits.max_guide_characters} "
                "(max_guide_characters)"
            )
        with self._free:
            process = self._take()
            try:
                answer = process.ask({"kind": kind, "text": text}, self.limits.max_guide_seconds * _WALL_FACTOR)
            except BaseException:
                process.end()
                raise
            if isinstance(answer, _Death):
                raise RequestError(f"the guide cannot be compiled: {self._reason(answer)}")
            self._idle.append(process)
        if "error" in answer:
            raise RequestError(f"the guide cannot be compiled: {answer['error']}")
        return int(answer["num_bytes"])

    def close(self) -> None:
        """Ends the processes."""
        self._end()

    def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive():
                return process
            process.end()
        if not sys.executable:
            raise ConfigError("guided decoding starts a Python process, and sys.executable is empty")
        return _Process([sys.executable, str(_SCRIPT), self._package, str(STACK_BYTES)], self._vocabulary)

    def _reason(self, death: _Death) -> str:
        seconds = f"it takes more than {self.limits.max_guide_seconds} s of CPU time (max_guide_seconds)"
        if death.is_late or death.status == -signal.SIGXCPU:
            return seconds
        return f"it is nested too deeply, or needs more than {self.limits.max_guide_bytes >> 20} MiB (max_guide_bytes)"


@dataclass(frozen=True)
class _Death:
    """How a trial ended without an answer."""

    status: int
    """Exit status in the form of subprocess.Popen.returncode."""
    is_late: bool


class _Process:
    """A child process that compiles. It ends with this process."""

    def __init__(self, command: Sequence[str], vocabulary: bytes) -> None:
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # mallinfo2 counts only the first arena
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C must end only the serving process
        )
        self._to = cast("BinaryIO", self._popen.stdin)
        self._from = cast("BinaryIO", self._popen.stdout)
        self._send(vocabulary)

    def is_alive(self) -> bool:
        """False if the process ended while it was idle."""
        return self._popen.poll() is None

    def ask(self, message: Any, timeout: float) -> Any:
        """Sends a message and returns the answer, or a _Death if the process has ended."""
        self._send(framed(message))
        is_late = not select.select([self._from], [], [], timeout)[0]
        answer = None if is_late else read_message(self._from)
        if answer is not None:
            return answer
        return _Death(self.end(kill=is_late), is_late)

    def end(self, *, kill: bool = True) -> int:
        """Ends the process, waits for it and returns its status."""
        if kill:
            self._popen.kill()
        self._from.close()
        with contextlib.suppress(BrokenPipeError):  # it died before it read all bytes
            self._to.close()
        return self._popen.wait()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died; the missing answer tells
            self._to.write(data)
            self._to.flush()


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()
