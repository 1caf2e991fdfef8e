"""An executor on a rank other than 0 says which rank accepts requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt._core import RequestError
from adaptrt.runtime.rank_executor import RankExecutor


@pytest.fixture
def executor() -> Any:
    made = RankExecutor.__new__(RankExecutor)
    made._ranks = SimpleNamespace(rank=1, size=2)  # type: ignore[assignment]
    return made


def test_what_executors_do_is_refused_with_the_rank(executor: Any) -> None:
    with pytest.raises(RequestError, match="enqueue_request is called on rank 1 of 2; accepted: on rank 0"):
        executor.enqueue_request(None)


@pytest.mark.parametrize("name", ["enqueue_requestz", "_engine", "__wrapped__"])
def test_what_no_executor_has_is_an_attribute_error(executor: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=f"'RankExecutor' object has no attribute '{name}'"):
        getattr(executor, name)
    assert not hasattr(executor, name)
