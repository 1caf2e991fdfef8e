"""Rows of images: each is computed once, also for calls at the same time, and kept within a budget."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from adaptrt.runtime.images.row_cache import RowCache


def rows(number: float) -> np.ndarray:
    return np.full((2, 2), number, np.float32)  # 16 bytes


def never() -> np.ndarray:
    raise AssertionError("the rows are kept")


def test_rows_are_computed_once() -> None:
    cache = RowCache(100)
    first = cache.rows("a", lambda: rows(1))
    assert cache.rows("a", never) is first
    assert cache.rows("b", lambda: rows(2))[0, 0] == 2
    assert (cache.num_hits, cache.num_misses, cache.num_bytes) == (1, 2, 32)


def test_calls_at_the_same_time_share_one_computation() -> None:
    cache = RowCache(100)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> np.ndarray:
        begun.set()
        assert go_on.wait(20)
        return rows(1)

    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(cache.rows, "a", slow)
        assert begun.wait(20)
        others = [threads.submit(cache.rows, "a", never) for _ in range(2)]
        # Other rows do not wait.
        assert threads.submit(cache.rows, "b", lambda: rows(2)).result(20)[0, 0] == 2
        go_on.set()
        made = first.result(20)
        assert all(other.result(20) is made for other in others)
    assert (cache.num_hits, cache.num_misses) == (2, 2)


def test_a_failure_is_not_kept() -> None:
    cache = RowCache(100)
    begun, go_on = threading.Event(), threading.Event()

    def fails() -> np.ndarray:
        begun.set()
        assert go_on.wait(20)
        raise ValueError("broken")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.rows, "a", fails)
        assert begun.wait(20)
        other = threads.submit(cache.rows, "a", lambda: rows(3))
        go_on.set()
        with pytest.raises(ValueError, match="broken"):
            first.result(20)
        assert other.result(20)[0, 0] == 3
    assert cache.rows("a", never)[0, 0] == 3


def test_the_least_recently_used_rows_leave() -> None:
    cache = RowCache(32)
    for key in "ab":
        cache.rows(key, lambda: rows(1))
    cache.rows("a", never)
    cache.rows("c", lambda: rows(3))
    assert cache.num_bytes == 32
    for key in "ac":
        cache.rows(key, never)
    assert cache.rows("b", lambda: rows(5))[0, 0] == 5
    # The newest rows are kept even if they are larger than the budget.
    cache.rows("large", lambda: np.zeros(100, np.float32))
    assert cache.num_bytes == 400
    cache.rows("large", never)
