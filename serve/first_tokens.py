"""The first tokens that clients await. Threads that load adapters give way to them."""

from __future__ import annotations

import threading
import time
from typing import Final

PAUSE_RATIO: Final = 4.0
"""Maximum time of all pauses, relative to the CPU time of the work. So a load takes at most 5 times as long."""
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
        PAUSE_RATIO times its CPU time.
        """
        work = self._work
        used_before, work.used = work.used, time.thread_time()
        work.pause_left = min(work.pause_left + PAUSE_RATIO * (work.used - used_before), MAX_PAUSE_SECONDS)
        if self._awaited:
            began = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: not self._awaited, work.pause_left)
            work.pause_left = max(0.0, work.pause_left - (time.monotonic() - began))


class _Work(threading.local):
    """The work of the current thread."""

    def __init__(self) -> None:
        self.used = time.thread_time()
        """CPU time at its last call of pause(), in seconds."""
        self.pause_left = 0.0
        """Seconds that it may pause."""
