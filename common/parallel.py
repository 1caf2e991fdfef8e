"""Splits long work among threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Final, TypeVar

from .usable_cpus import num_usable_cpus

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_num_threads: Final[ContextVar[int]] = ContextVar("num_threads", default=1)
_BATCHES_OF_A_THREAD: Final = 4
_MAX_PART_THREADS: Final = 8


def num_part_threads() -> int:
    """Number of threads for work that only few others share the CPUs with: half of the CPUs, but no more than memory
    bandwidth needs.
    """
    return min(max(num_usable_cpus() // 2, 1), _MAX_PART_THREADS)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Lets in_threads() use up to `count` threads, the calling one included, within the with statement."""
    token = _num_threads.set(count)
    try:
        yield
    finally:
        _num_threads.reset(token)


def in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Returns the function's results for all items, in their order.

    Without use_threads() it runs in the calling thread. With several threads, only functions that release the
    interpreter's lock are faster. Each thread runs in a copy of the caller's context, so work pauses there as it does
    here. Raises what the function raises for the first item for which it raises.
    """
    count = min(_num_threads.get(), len(items))
    if count <= 1:
        return [function(item) for item in items]
    size = -(-len(items) // (count * _BATCHES_OF_A_THREAD))
    batches = [items[first : first + size] for first in range(0, len(items), size)]

    def run(batch: Sequence[_Item]) -> list[_Result]:
        return [function(item) for item in batch]

    with ThreadPoolExecutor(count, "adaptrt-part") as pool:
        futures = [pool.submit(copy_context().run, run, batch) for batch in batches]
        return [result for future in futures for result in future.result()]
