"""An executor on a rank other than 0 says which rank accepts requests, and follows that rank to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import adaptrt
from adaptrt._core import EngineError, RequestError
from adaptrt.runtime import rank_executor
from adaptrt.runtime.rank_executor import RankExecutor

SECONDS = 60.0


@pytest.fixture
def executor() -> Any:
    made = RankExecutor.__new__(RankExecutor)
    made._ranks = SimpleNamespace(rank=1, size=2)  # type: ignore[assignment]
    return made


def test_methods_of_executors_are_refused_with_the_rank(executor: Any) -> None:
    with pytest.raises(RequestError, match="enqueue_request is called on rank 1 of 2; accepted: on rank 0"):
        executor.enqueue_request(None)


@pytest.mark.parametrize("name", ["enqueue_requestz", "_engine", "__wrapped__"])
def test_unknown_names_are_attribute_errors(executor: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=f"'RankExecutor' object has no attribute '{name}'"):
        getattr(executor, name)
    assert not hasattr(executor, name)


Follow = Callable[[Callable[[Any, Any], None]], RankExecutor]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Follow:
    """Makes an executor that follows rank 0 with the given function."""

    def make(serve_rank: Callable[[Any, Any], None]) -> RankExecutor:
        monkeypatch.setattr(rank_executor, "_core", SimpleNamespace(serve_rank=serve_rank))
        ranks: Any = SimpleNamespace(rank=1, size=2, communicator="communicator")
        engine: Any = "engine"
        return RankExecutor(engine, ranks)

    return make


def leave(executor: RankExecutor) -> None:
    with executor as entered:
        assert entered is executor


@pytest.mark.parametrize("end", [leave, RankExecutor.shutdown])
def test_the_end_waits_for_rank_0(end: Callable[[RankExecutor], None], follow: Follow) -> None:
    is_over, given = threading.Event(), []

    def serve_rank(*arguments: Any) -> None:
        given.append(arguments)
        assert is_over.wait(SECONDS)

    executor = follow(serve_rank)
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(end, executor)
        assert executor.is_alive
        assert not executor.can_enqueue_requests()
        assert isinstance(executor, adaptrt.Executor)
        for name in ("enqueue_request", "adapters", "engine", "add_adapter", "engine_info"):
            with pytest.raises(RequestError, match=f"{name} is called on rank 1 of 2; accepted: on rank 0"):
                getattr(executor, name)
        with pytest.raises(TimeoutError):
            ended.result(0.2)
        is_over.set()
        assert ended.result(SECONDS) is None
    assert not executor.is_alive
    assert given == [("engine", "communicator")]


@pytest.mark.parametrize("end", [leave, RankExecutor.shutdown])
def test_the_end_raises_what_went_wrong(end: Callable[[RankExecutor], None], follow: Follow) -> None:
    def serve_rank(*_: Any) -> None:
        raise EngineError("rank 0 was lost")

    with pytest.raises(EngineError, match=r"^rank 0 was lost$"):
        end(follow(serve_rank))
