"""The first tokens that clients await. Threads that load adapters give way to them."""

from __future__ import annotations

import threading
import time
from typing import Final

PAUSE_RATIO: Final = 4.0
"""Maximum time of all pauses, relative to the time between them. So a load takes at most 5 times as long. CPU time
would allow too little: next to steps that use all CPUs, a load gets a tenth of one."""
MAX_PAUSE_SECONDS: Final = 1.0
"""Maximum time of one pause."""


class FirstTokens:
    """Counts the requests whose first token is awaited. Thread-safe."""

    def __init__(self) -> None:
        """No request yet."""
        self._changed = threading.Condition()
        self._awaited: set[int] = set()
        self._work = _Work()

    def begin(self, request_id: int) -> None:
        """Notes that a request awaits its first token."""
        with self._changed:
            self._awaited.add(request_id)

    def end(self, request_id: int) -> None:
        """Notes that a request has its first token, or has ended. May be called again."""
        if request_id not in self._awaited:
            return
        with self._changed:
            self._awaited.discard(request_id)
            if not self._awaited:
                self._changed.notify_all()

    def pause(self) -> None:
        """Waits until no first token is awaited, as long as the calling thread may: its work so far allows pauses of
        PAUSE_RATIO times the time that it took.
        """
        work = self._work
        allowed = work.pause_left + PAUSE_RATIO * (time.monotonic() - work.resumed)
        work.pause_left = min(allowed, MAX_PAUSE_SECONDS)
        if self._awaited:
            began = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: not self._awaited, work.pause_left)
            work.pause_left = max(0.0, work.pause_left - (time.monotonic() - began))
        work.resumed = time.monotonic()


class _Work(threading.local):
    """The work of the current thread."""

    def __init__(self) -> None:
        self.resumed = time.monotonic()
        """End of its last call of pause(), in seconds."""
        self.pause_left = 0.0
        """Seconds that it may pause."""
