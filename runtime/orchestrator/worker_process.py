"""The orchestrator's view of a worker."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection
from typing import Any, Final

from ..._core import (
    AdapterError,
    AdaptrtError,
    CheckpointError,
    ConfigError,
    EngineError,
)

_ERRORS: Final = {error.__name__: error for error in (AdapterError, CheckpointError, ConfigError, EngineError)}
"""Errors that loading an engine raises, by name."""


class WorkerProcess:
    """A worker that has connected."""

    def __init__(self, connection: Connection, process: int) -> None:
        """process: id of its process."""
        self.connection: Final = connection
        self.process: Final = process
        self._handle: int | None = None  # a process id may be reused
        # If the system has no pidfd, mpirun ends its processes. If the worker has already ended, its connection tells.
        with contextlib.suppress(OSError, AttributeError):  # macOS has no such function
            self._handle = os.pidfd_open(process)
        self.rank: int | None = None
        self.memory = 0
        """Bytes that it may allocate; see LoadedEngine.available_memory."""
        self.error: AdaptrtError | None = None
        self.is_done = False
        """True if it has reported that it ends because it was told to."""

    @property
    def has_begun(self) -> bool:
        """True if it has started, or failed to start."""
        return self.rank is not None

    def begin(self, message: dict[str, Any]) -> None:
        """Reads the worker's message about its start."""
        self.rank = int(message["rank"])
        self.memory = int(message.get("memory", 0))
        if "error" in message:
            self.error = _ERRORS.get(message["error"], EngineError)(message["text"])

    def kill(self) -> None:
        """Kills it, even if it is stopped."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """Closes the connection to a worker that has ended."""
        self.connection.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
