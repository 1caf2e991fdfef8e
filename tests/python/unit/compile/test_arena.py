"""The arena's plan: buffers that live together are disjoint, and sharing saves bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adaptrt.builder.compile.arena import ALIGNMENT, Lifetime, plan_arena


def lifetimes() -> st.SearchStrategy[list[Lifetime]]:
    one = st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 10))
    return st.lists(one, max_size=40).map(
        lambda items: [Lifetime(f"b{i}", size, first, first + length) for i, (size, first, length) in enumerate(items)]
    )


@given(lifetimes())
def test_no_two_live_buffers_overlap(items: list[Lifetime]) -> None:
    arena = plan_arena(items)
    at_a_time = [0] * 50
    for index, item in enumerate(items):
        begin = arena.offsets[item.name]
        assert begin % ALIGNMENT == 0
        assert begin + item.num_bytes <= arena.num_bytes <= arena.unshared_bytes
        for other in items[:index]:
            if item.first <= other.last and other.first <= item.last:
                start = arena.offsets[other.name]
                assert begin + item.num_bytes <= start or start + other.num_bytes <= begin
        for op in range(item.first, item.last + 1):
            at_a_time[op] += item.num_bytes
    assert arena.num_bytes >= max(at_a_time)


def test_buffers_that_follow_one_another_share_bytes() -> None:
    arena = plan_arena([Lifetime("a", 640, 0, 1), Lifetime("b", 640, 1, 2), Lifetime("c", 640, 2, 3)])
    assert arena.offsets["a"] == arena.offsets["c"] != arena.offsets["b"]
    assert (arena.num_bytes, arena.unshared_bytes) == (1280, 1920)


def test_an_empty_arena_takes_nothing() -> None:
    assert plan_arena([]).num_bytes == 0
