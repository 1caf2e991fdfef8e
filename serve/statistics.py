"""The only reader of the executor's statistics, because the executor reports each step only once."""

from __future__ import annotations

from .._core import IterationStats, KvCacheStats, SpeculationStats, StatePoolStats
from .async_executor import AsyncExecutor


class ExecutorStatistics:
    """Statistics of the newest step. Reads them on request, on the loop."""

    def __init__(self, executor: AsyncExecutor) -> None:
        """Reads nothing until it is asked."""
        self._executor = executor
        self._newest: IterationStats | None = None

    def newest(self) -> IterationStats | None:
        """Returns the statistics of the last finished step; None before the first. Raises ExecutorClosedError."""
        steps = self._executor.executor.get_latest_iteration_stats()
        if steps:
            self._newest = steps[-1]
        return self._newest

    def num_requests(self) -> tuple[int, int]:
        """Returns (running, waiting). Requests count as running if they were still running after the newest step."""
        total = self._executor.num_running
        newest = self.newest()
        active = 0 if newest is None else newest.num_active_requests - newest.num_completed_requests
        running = min(total, max(0, active))
        return running, total - running

    def kv_cache(self) -> KvCacheStats | None:
        """Returns the statistics after the newest step; None before the first."""
        newest = self.newest()
        return None if newest is None else newest.kv_cache_stats

    def cross_kv_cache(self) -> KvCacheStats | None:
        """Returns the statistics of encoder inputs after the newest step; None before the first, and without an
        encoder.
        """
        newest = self.newest()
        return None if newest is None else newest.cross_kv_cache_stats

    def states(self) -> StatePoolStats | None:
        """Returns the statistics after the newest step; None before the first, and for engines without states."""
        newest = self.newest()
        return None if newest is None else newest.state_stats

    def speculation(self) -> SpeculationStats:
        """Returns the statistics of all drafts so far."""
        newest = self.newest()
        return SpeculationStats() if newest is None else newest.speculation_stats

    def num_used_blocks(self) -> int:
        """Returns the number of KV blocks that requests use now: the newest step's number, or 0 if no request runs."""
        kv_cache = self.kv_cache()
        return kv_cache.used_num_blocks if kv_cache and self._executor.num_running else 0
