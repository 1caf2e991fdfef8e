"""Threads that load adapters pause while clients await first tokens, and never for long."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import adaptrt
from adaptrt.common.pauses import may_pause, pause_by
from adaptrt.runtime.adapter_store import AdapterStore
from adaptrt.serve import first_tokens
from adaptrt.serve.async_executor import AsyncExecutor
from adaptrt.serve.first_tokens import MAX_PAUSE_SECONDS, PAUSE_RATIO, FirstTokens
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.work import Work, WorkKind
from support.asynchronous import run
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine

SECONDS = 60.0


class Clock:
    """Stands in for the time, in which pauses take `takes` seconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.takes = 7.0, 0.0
        self.limits: list[float] = []
        """Limits of all waits."""
        patch.setattr(first_tokens.time, "monotonic", lambda: self.now)
        self.tokens = FirstTokens()
        patch.setattr(self.tokens._changed, "wait_for", self._wait_for)

    def _wait_for(self, predicate: object, limit: float) -> None:
        self.limits.append(limit)
        self.now += min(self.takes, limit)


def test_pauses_are_as_long_as_the_work_before_them_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    tokens = clock.tokens
    tokens.begin(1)
    tokens.pause()  # the thread's work before its first call does not count
    clock.now += 0.1
    clock.takes = 0.3
    tokens.pause()
    tokens.end(1)
    clock.now += 0.05
    tokens.pause()  # no first token is awaited
    tokens.begin(2)
    tokens.pause()
    tokens.pause()
    assert clock.limits == pytest.approx([0, 0.1 * PAUSE_RATIO, 0.15 * PAUSE_RATIO - 0.3, 0])
    clock.now += 100
    tokens.pause()
    tokens.pause()
    assert clock.limits[-2:] == pytest.approx([MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS - 0.3])


def test_a_pause_ends_with_the_last_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = FirstTokens()
    monkeypatch.setattr(first_tokens, "MAX_PAUSE_SECONDS", SECONDS)
    monkeypatch.setattr(first_tokens, "PAUSE_RATIO", 1e12)
    ended: list[int] = []

    def work() -> None:
        tokens.pause()  # its work begins
        tokens.pause()
        ended.append(len(tokens._awaited))

    for request_id in (1, 2):
        tokens.begin(request_id)
    thread = threading.Thread(target=work)
    thread.start()
    tokens.end(1)
    tokens.end(1)
    assert ended == []
    tokens.end(2)
    thread.join(SECONDS)
    assert ended == [0]


def test_only_loads_of_adapters_pause() -> None:
    threads: list[str] = []

    def pause() -> None:
        threads.append(threading.current_thread().name)

    async def body() -> None:
        work = Work(ServerLimits(), pause)
        for kind in WorkKind:
            await work.run(kind, may_pause)
        await work.close()

    asyncio.run(asyncio.wait_for(body(), SECONDS))
    assert [name.rpartition("_")[0] for name in threads] == ["adaptrt-adapters"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[adaptrt.LoadedEngine, Path]:
    base = tmp_path_factory.mktemp("first-tokens")
    model, engine = build_random_engine(ModelSpec(max_position_embeddings=16384), base, max_seq_len=16384)
    return adaptrt.load_engine(engine), save_adapter(model, base / "adapter", 1, r=4)


@pytest.fixture
def pauses() -> Iterator[Counter[str]]:
    """Counts the pauses that this thread, and threads that it starts, may make."""
    counts: Counter[str] = Counter()
    pause_by(lambda: counts.update([threading.current_thread().name]))
    yield counts
    pause_by(None)


def test_a_load_may_pause_between_all_its_pieces(
    place: tuple[adaptrt.LoadedEngine, Path], pauses: Counter[str]
) -> None:
    engine, directory = place
    _, config = AdapterStore(engine).read("it", directory, replace=False)
    assert config is not None
    assert config.config is not None
    (of_digests,) = (name for name in pauses if name.startswith("adaptrt-digests"))
    # Both threads read files of one piece. A row is made from A and B, which are checked before.
    assert pauses == {of_digests: 2, "MainThread": 1 + 3 * config.config.shape[-2]}


def test_requests_await_their_first_token_only(place: tuple[adaptrt.LoadedEngine, Path]) -> None:
    engine, _ = place

    async def body(asynchronous: AsyncExecutor) -> None:
        awaited = asynchronous._first_tokens._awaited
        streamed = asynchronous.submit(adaptrt.Request([3, 4, 5], 40, streaming=True))
        whole = asynchronous.submit(adaptrt.Request([3, 4, 5], 4))
        pooled = asynchronous.submit(adaptrt.Request([3, 4, 5], 0, pooling_params=adaptrt.PoolingParams()))
        assert awaited == {streamed.request_id, pooled.request_id}
        await streamed.wait()
        assert streamed.request_id not in awaited
        for one in (streamed, whole, pooled):
            async with one:
                while await one.next_results():
                    pass
        assert not awaited
        # The last one waits for the only place of the batch until the executor ends.
        running, lost = (asynchronous.submit(adaptrt.Request([3, 4, 5], 12000, streaming=True)) for _ in range(2))
        await running.wait()
        assert awaited == {lost.request_id}
        await asynchronous.close()
        assert lost.is_over
        assert not awaited

    config = adaptrt.ExecutorConfig(num_threads=1, max_batch_size=1)
    with adaptrt.Executor(engine, executor_config=config) as executor:
        run(executor, body)
