"""The executor's account of its steps, read in one place: it tells each step once, to whoever asks first."""

from __future__ import annotations

from .._core import IterationStats
from .async_executor import AsyncExecutor


class ExecutorStatistics:
    """What the newest step says. Reads only when it is asked, on the loop."""

    def __init__(self, executor: AsyncExecutor) -> None:
        """Reads nothing yet."""
        self._executor = executor
        self._newest: IterationStats | None = None

    def newest(self) -> IterationStats | None:
        """Of the step that ended last; None before the first. Raises ExecutorClosedError."""
        steps = self._executor.executor.get_latest_iteration_stats()
        if steps:
            self._newest = steps[-1]
        return self._newest
