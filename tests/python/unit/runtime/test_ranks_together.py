"""Ranks run an action together, and agree whether it failed and where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt._core import AdapterError, EngineError
from adaptrt.runtime import ranks
from adaptrt.runtime.ranks import Ranks


def rank_1_of_3(others: tuple[Any, Any]) -> tuple[Ranks, list[Any]]:
    """Returns rank 1 and the values that it tells the others. others: what ranks 0 and 2 tell."""
    told: list[Any] = []

    def allgather(value: Any) -> list[Any]:
        told.append(value)
        return [others[0], value, others[1]]

    made = Ranks.__new__(Ranks)
    made._world = SimpleNamespace(allgather=allgather)  # type: ignore[misc]
    made.rank, made.size = 1, 3  # type: ignore[misc]
    return made, told


def fail() -> None:
    raise AdapterError("own")


def test_an_action_that_succeeds_everywhere_has_its_own_result() -> None:
    rank, told = rank_1_of_3((None, None))
    assert rank.together(lambda: 5) == 5
    assert rank.together(lambda: 0) == 0
    assert told == [None, None]


@pytest.mark.parametrize("others", [(None, None), ("first", "third")])
def test_a_rank_that_fails_raises_its_own_error_and_tells_it(others: tuple[Any, Any]) -> None:
    rank, told = rank_1_of_3(others)
    with pytest.raises(AdapterError, match=r"^own$"):
        rank.together(fail)
    assert told == ["own"]


@pytest.mark.parametrize(
    ("others", "said"), [(("first", None), "rank 0 of 3: first"), ((None, "third"), "rank 2 of 3: third")]
)
def test_a_rank_that_succeeds_names_one_that_failed(others: tuple[Any, Any], said: str) -> None:
    rank, told = rank_1_of_3(others)
    with pytest.raises(EngineError, match=f"^{said}$"):
        rank.together(lambda: 5)
    assert told == [None]


def test_values_are_gathered_in_the_order_of_ranks() -> None:
    rank, _ = rank_1_of_3((7, 9))
    assert rank.gather(8) == [7, 8, 9]


def test_ranks_that_differ_from_rank_0_are_named() -> None:
    ours = {"layers": 2, "dtype": "float32"}
    rank_1_of_3((ours, ours))[0].require_same(ours)
    rank, _ = rank_1_of_3((ours, {**ours, "layers": 3}))
    with pytest.raises(EngineError) as raised:
        rank.require_same({**ours, "dtype": "bfloat16"})
    assert str(raised.value) == (
        "the ranks differ: dtype is 'bfloat16' on rank 1 and 'float32' on rank 0; layers is 3 on rank 2 and 2 on rank 0"
    )


def test_a_rank_sleeps_until_rank_0_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = iter([False, False, True])
    slept: list[float] = []
    rank, _ = rank_1_of_3((None, None))
    rank._world = SimpleNamespace(  # type: ignore[misc]
        iprobe=lambda source: next(arrived), recv=lambda source: ("from", source)
    )
    monkeypatch.setattr(ranks.time, "sleep", slept.append)
    assert rank.hear() == ("from", 0)
    assert slept == [0.01, 0.01]
