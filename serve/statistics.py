"""The executor's account of its steps, read in one place: it tells each step once, to whoever asks first."""

from __future__ import annotations

from .._core import IterationStats, KvCacheStats, SpeculationStats
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

    def num_requests(self) -> tuple[int, int]:
        """(running, waiting): those that the newest step left running; others have come since, or wait longer."""
        total = self._executor.num_running
        newest = self.newest()
        active = 0 if newest is None else newest.num_active_requests - newest.num_completed_requests
        running = min(total, max(0, active))
        return running, total - running

    def kv_cache(self) -> KvCacheStats | None:
        """After the newest step; None before the first."""
        newest = self.newest()
        return None if newest is None else newest.kv_cache_stats

    def cross_kv_cache(self) -> KvCacheStats | None:
        """Of encoder inputs, after the newest step; None before the first, and without an encoder."""
        newest = self.newest()
        return None if newest is None else newest.cross_kv_cache_stats

    def speculation(self) -> SpeculationStats:
        """All drafts so far."""
        newest = self.newest()
        return SpeculationStats() if newest is None else newest.speculation_stats

    def num_used_blocks(self) -> int:
        """KV blocks of requests now: what the newest step says of them holds only while there are requests."""
        kv_cache = self.kv_cache()
        return kv_cache.used_num_blocks if kv_cache and self._executor.num_running else 0
