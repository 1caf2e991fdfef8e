"""Time slices for long work on the event loop, so that other tasks run in between."""

from __future__ import annotations

import asyncio
import time
from typing import Final

SLICE_SECONDS: Final = 0.002


class TimeSlices:
    """The slices of one task, or of successive callbacks."""

    def __init__(self) -> None:
        """Begins the first slice."""
        self.begin()

    def begin(self) -> None:
        """Begins a slice. Call it after the task has waited for something else."""
        self._end = time.perf_counter() + SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        """True if the slice has ended and others should run."""
        return time.perf_counter() >= self._end

    async def pause(self) -> None:
        """Returns at once within a slice; otherwise lets other tasks run first."""
        if self.is_over:
            await asyncio.sleep(0)
            self.begin()
