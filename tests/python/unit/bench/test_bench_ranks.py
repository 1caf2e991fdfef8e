"""Rank 0 of a bench under mpirun tells the other ranks when it ends; other benches send nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt.tools.bench import on_ranks


def engine_of(num_ranks: int, told: list[Any]) -> Any:
    return SimpleNamespace(num_ranks=num_ranks, ranks=SimpleNamespace(tell=told.append))


@pytest.mark.parametrize(
    ("num_ranks", "by_mpi", "by_workers", "expected"),
    [(1, False, False, []), (1, True, False, []), (2, False, True, []), (2, True, False, [None])],
)
def test_the_other_ranks_are_told_to_end(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, by_mpi: bool, by_workers: bool, expected: list[Any]
) -> None:
    monkeypatch.setattr(on_ranks, "is_started_by_mpi", lambda: by_mpi)
    told: list[Any] = []
    engine = engine_of(num_ranks, told)
    assert on_ranks.is_run_by_workers(engine) is by_workers
    with on_ranks.leading(engine):
        assert told == []
    assert told == expected


def test_they_are_told_when_the_bench_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ranks, "is_started_by_mpi", lambda: True)
    told: list[Any] = []
    with pytest.raises(KeyError), on_ranks.leading(engine_of(2, told)):
        raise KeyError("a measurement")
    assert told == [None]
