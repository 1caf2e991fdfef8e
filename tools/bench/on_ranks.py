"""Benchmarks engines of several ranks. Under MPI, rank 0 measures and the other ranks run the engines that it starts.
Without MPI, this process starts workers for each engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..._core import ExecutorConfig, serve_rank
from ...runtime.native_engine import NativeEngine
from ...runtime.ranks import is_started_by_mpi


def is_run_by_workers(engine: NativeEngine) -> bool:
    """True if worker processes run the engine, which this process starts."""
    return engine.num_ranks > 1 and not is_started_by_mpi()


@contextmanager
def leading(engine: NativeEngine) -> Iterator[None]:
    """Rank 0 creates executors within the with statement. At its end, the other ranks return from follow()."""
    try:
        yield
    finally:
        if engine.num_ranks > 1 and not is_run_by_workers(engine):
            engine.ranks.tell(None)


def call_ranks(engine: NativeEngine, config: ExecutorConfig) -> None:
    """Tells the other ranks to start an engine. The caller starts rank 0's engine next, and queries its memory."""
    engine.ranks.tell((config.num_threads, config.kernels))


def follow(engine: NativeEngine) -> None:
    """Runs the engines that rank 0 starts, one after another. Raises EngineError if a rank is lost."""
    while (called := engine.ranks.hear()) is not None:
        num_threads, kernels = called
        started = engine.start(ExecutorConfig(num_threads=num_threads, kernels=kernels))
        engine.available_memory()
        serve_rank(started, engine.ranks.communicator)
