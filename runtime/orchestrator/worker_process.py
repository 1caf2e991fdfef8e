"""A worker as the orchestrator sees it."""

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
"""That loading an engine raises, by their names."""


class WorkerProcess:
    """One that has connected, and what is known of it."""

    def __init__(self, connection: Connection, process: int) -> None:
        """`process`: its number."""
        self.connection: Final = connection
        self.process: Final = process
        self._handle: int | None = None  # not the number, which another process may have one day
        # Where it has ended, its connection tells; where the kernel has none of these, mpirun ends what it has started.
        with contextlib.suppress(OSError):
            self._handle = os.pidfd_open(process)
        self.rank: int | None = None
        self.memory = 0
        """Bytes that it may take, as LoadedEngine.available_memory."""
        self.error: AdaptrtError | None = None
        self.is_done = False
        """Whether it has said that it ends because it was told to."""

    @property
    def has_begun(self) -> bool:
        """Or has failed to."""
        return self.rank is not None

    def begin(self, message: dict[str, Any]) -> None:
        """How its start went, as it says."""
        self.rank = int(message["rank"])
        self.memory = int(message.get("memory", 0))
        if "error" in message:
            self.error = _ERRORS.get(message["error"], EngineError)(message["text"])

    def kill(self) -> None:
        """Ends it, also where it is stopped."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """Once it has ended."""
        self.connection.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
