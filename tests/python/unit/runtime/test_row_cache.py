"""Rows of images: each is computed once, also for calls at the same time, and kept within a budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from adaptrt.runtime.images.row_cache import RowCache

Make = Callable[[Sequence[int]], Sequence[np.ndarray]]


def rows(number: float) -> np.ndarray:
    return np.full((2, 2), number, np.float32)  # 16 bytes


def never(places: Sequence[int]) -> Sequence[np.ndarray]:
    raise AssertionError("the rows are kept")


def made(*numbers: float) -> Make:
    """Makes the rows of the places that are asked for: each number is that of a key."""
    return lambda places: [rows(numbers[place]) for place in places]


def test_rows_are_computed_once() -> None:
    cache = RowCache(100)
    (first,) = cache.rows(["a"], made(1))
    assert cache.rows(["a"], never)[0] is first
    assert cache.rows(["b"], made(2))[0][0, 0] == 2
    assert (cache.num_hits, cache.num_misses, cache.num_bytes) == (1, 2, 32)


def test_missing_rows_are_computed_together() -> None:
    cache = RowCache(1000)
    cache.rows(["b"], made(2))
    asked: list[Sequence[int]] = []

    def make(places: Sequence[int]) -> Sequence[np.ndarray]:
        asked.append(places)
        return made(1, 2, 3, 1, 4)(places)

    found = cache.rows(["a", "b", "c", "a", "d"], make)
    assert asked == [(0, 2, 4)]
    assert [int(one[0, 0]) for one in found] == [1, 2, 3, 1, 4]
    assert (cache.num_hits, cache.num_misses, cache.num_bytes) == (2, 4, 64)
    assert cache.rows([], never) == []


def test_calls_at_the_same_time_share_one_computation() -> None:
    cache = RowCache(100)
    begun, go_on = threading.Event(), threading.Event()

    def slow(places: Sequence[int]) -> Sequence[np.ndarray]:
        begun.set()
        assert go_on.wait(20)
        return [rows(1)]

    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(cache.rows, ["a"], slow)
        assert begun.wait(20)
        others = [threads.submit(cache.rows, ["a"], never) for _ in range(2)]
        # Other rows do not wait.
        assert threads.submit(cache.rows, ["b"], made(2)).result(20)[0][0, 0] == 2
        go_on.set()
        (same,) = first.result(20)
        assert all(other.result(20)[0] is same for other in others)
    assert (cache.num_hits, cache.num_misses) == (2, 2)


def test_calls_that_wait_for_each_other_make_their_own_rows_first() -> None:
    """The second call makes what only it has while the first one still makes what both have."""
    cache = RowCache(100)
    first_begun, second_made = threading.Event(), threading.Event()

    def first_make(places: Sequence[int]) -> Sequence[np.ndarray]:
        first_begun.set()
        assert second_made.wait(20)
        return made(1)(places)

    def second_make(places: Sequence[int]) -> Sequence[np.ndarray]:
        second_made.set()
        return made(1, 2)(places)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.rows, ["a"], first_make)
        assert first_begun.wait(20)
        second = threads.submit(cache.rows, ["a", "b"], second_make)
        assert [[int(one[0, 0]) for one in each.result(20)] for each in (first, second)] == [[1], [1, 2]]
    assert (cache.num_hits, cache.num_misses) == (1, 2)


def test_a_failure_is_not_kept() -> None:
    cache = RowCache(100)
    begun, go_on = threading.Event(), threading.Event()

    def fails(places: Sequence[int]) -> Sequence[np.ndarray]:
        begun.set()
        assert go_on.wait(20)
        raise ValueError("broken")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.rows, ["a"], fails)
        assert begun.wait(20)
        other = threads.submit(cache.rows, ["b", "a"], made(2, 3))
        go_on.set()
        with pytest.raises(ValueError, match="broken"):
            first.result(20)
        assert [int(one[0, 0]) for one in other.result(20)] == [2, 3]
    assert cache.rows(["a"], never)[0][0, 0] == 3


def test_the_least_recently_used_rows_leave() -> None:
    cache = RowCache(32)
    for key in "ab":
        cache.rows([key], made(1))
    cache.rows(["a"], never)
    cache.rows(["c"], made(3))
    assert cache.num_bytes == 32
    for key in "ac":
        cache.rows([key], never)
    assert cache.rows(["b"], made(5))[0][0, 0] == 5
    # The newest rows are kept even if they are larger than the budget.
    cache.rows(["large"], lambda _: [np.zeros(100, np.float32)])
    assert cache.num_bytes == 400
    cache.rows(["large"], never)
    # All rows of a call are returned, also those that have left.
    assert [int(one[0, 0]) for one in cache.rows(list("defg"), made(1, 2, 3, 4))] == [1, 2, 3, 4]
