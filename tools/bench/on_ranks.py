"""The bench over an engine of several ranks: rank 0 of those that MPI has started measures, and the others run the
engines that it makes; else this process does, and starts workers for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..._core import ExecutorConfig, serve_rank
from ...runtime.native_engine import NativeEngine
from ...runtime.ranks import is_started_by_mpi


def is_run_by_workers(engine: NativeEngine) -> bool:
    """Whether this process starts those that run the engine."""
    return engine.num_ranks > 1 and not is_started_by_mpi()


@contextmanager
def leading(engine: NativeEngine) -> Iterator[None]:
    """Within the with statement rank 0 makes executors; the other ranks, which are in follow(), end with it."""
    try:
        yield
    finally:
        if engine.num_ranks > 1 and not is_run_by_workers(engine):
            engine.ranks.tell(None)


def call_ranks(engine: NativeEngine, config: ExecutorConfig) -> None:
    """Has the other ranks start an engine together with rank 0's, which starts its own next, and learns its memory."""
    engine.ranks.tell((config.num_threads, config.kernels))


def follow(engine: NativeEngine) -> None:
    """Runs what rank 0 starts, one engine after another. Raises EngineError where a rank is lost."""
    while (called := engine.ranks.hear()) is not None:
        num_threads, kernels = called
        started = engine.start(ExecutorConfig(num_threads=num_threads, kernels=kernels))
        engine.available_memory()
        serve_rank(started, engine.ranks.communicator)
