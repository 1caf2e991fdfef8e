"""The default number of an engine's threads."""

from __future__ import annotations

from typing import Any, cast

import pytest

import adaptrt
from adaptrt.runtime.native_engine import NativeEngine


@pytest.mark.parametrize(("asked", "threads"), [(0, 3), (2, 2)])
def test_threads_are_the_cpus_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, asked: int, threads: int
) -> None:
    processes: list[int] = []

    def cpus(process: int) -> set[int]:
        processes.append(process)
        return {1, 5, 6}

    class Engine:
        num_ranks = 1
        config = cast(Any, type("Config", (), {"engine_checksums": []}))

        def _start(self, config: Any, num_threads: int, *_: Any) -> int:
            return num_threads

    monkeypatch.setattr("os.sched_getaffinity", cpus)
    config = adaptrt.ExecutorConfig(num_threads=asked)
    assert NativeEngine.start(cast(Any, Engine()), config) == threads
    assert set(processes) <= {0}  # 0 is this process; other CPUs do not count
