"""Long work on the event loop in slices of time, between which others are served."""

from __future__ import annotations

import asyncio
import time
from typing import Final

SLICE_SECONDS: Final = 0.002


class TimeSlices:
    """The slices of one task, or of one callback after the other."""

    def __init__(self) -> None:
        """The first slice begins now."""
        self.begin()

    def begin(self) -> None:
        """A slice begins now: the task has just waited for something else."""
        self._end = time.perf_counter() + SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        """True if it is time for others."""
        return time.perf_counter() >= self._end

    async def pause(self) -> None:
        """Returns at once while a slice lasts, and otherwise after other tasks have had their turn."""
        if self.is_over:
            await asyncio.sleep(0)
            self.begin()
