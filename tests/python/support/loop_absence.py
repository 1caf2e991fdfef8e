"""Measures how long an event loop is blocked."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

_TURN_SECONDS = 0.005


class LoopAbsence:
    """Measures the longest time between two turns of a task on the loop, within its `async with`."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        """CPU time of the loop's own thread. Other processes, and threads that hold the GIL, do not count."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopAbsence:
        self._task = asyncio.create_task(self._measure())
        await asyncio.sleep(_TURN_SECONDS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.sleep(2 * _TURN_SECONDS)  # the last turn may still be due
        assert self._task is not None
        self._task.cancel()

    async def _measure(self) -> None:
        while True:
            begin = time.thread_time()
            await asyncio.sleep(_TURN_SECONDS)
            self.cpu_seconds = max(self.cpu_seconds, time.thread_time() - begin)
