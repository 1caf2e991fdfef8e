"""The watch over connections: which connections it ends, in which order, and how often it checks."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import pytest

from adaptrt.serve.connections import ConnectionWatch, Phase
from adaptrt.serve.options import ServerLimits


class Connection:
    phase = Phase.HEAD
    phase_since = 0.0
    is_paused = False
    num_bytes = 0

    def __init__(self, name: str, ended: list[str]) -> None:
        self._name, self._ended = name, ended

    def is_reading_paused(self) -> bool:
        return self.is_paused

    def num_stalled_bytes(self) -> int:
        return self.num_bytes

    def refuse_late(self) -> None:
        self._ended.append(f"{self._name} is late")

    def abort(self) -> None:
        self._ended.append(self._name)


def run(limits: ServerLimits, max_connections: int, body: Callable[[ConnectionWatch], None]) -> None:
    async def main() -> None:
        body(ConnectionWatch(limits, max_connections))

    asyncio.run(main())


def test_connections_that_come_at_once_end_one_other_each() -> None:
    ended: list[str] = []

    def body(watch: ConnectionWatch) -> None:
        a, b, c, d, e, f = (Connection(name, ended) for name in "abcdef")
        assert all(watch.admit(one) for one in (a, b, c))
        watch.enter(b, Phase.BODY)
        # The loop reports ended connections later than new ones.
        assert watch.admit(d)
        assert ended == ["a"]
        assert watch.admit(e)
        assert ended == ["a", "c"]
        watch.enter(d, Phase.ANSWER)
        watch.enter(e, Phase.BODY)
        assert not watch.admit(f)
        watch.enter(f, Phase.IDLE)  # it was rejected, so like an ended one it does not count
        assert not watch.admit(f)
        watch.enter(b, Phase.IDLE)
        for one in (a, c):
            watch.forget(one)
        assert watch.admit(f)
        assert ended == ["a", "c", "b"]

    run(ServerLimits(), 3, body)


@pytest.mark.parametrize(
    ("limits", "interval"),
    [
        (ServerLimits(), 5.0),
        (ServerLimits(header_seconds=8), 2.0),
        (ServerLimits(body_seconds=8), 2.0),
        (ServerLimits(keep_alive_seconds=8), 2.0),
        (ServerLimits(write_seconds=8), 2.0),
    ],
)
def test_the_watch_looks_four_times_within_the_shortest_limit(
    limits: ServerLimits, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(watch: ConnectionWatch) -> None:
        loop, delays = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def call_later_noted(delay: float, look: Callable[[], None]) -> asyncio.TimerHandle:
            delays.append(delay)
            return call_later(delay, look)

        monkeypatch.setattr(loop, "call_later", call_later_noted)
        watch.admit(Connection("a", []))
        watch.admit(Connection("b", []))
        assert delays == [interval]

    run(limits, 3, body)


class Clock:
    """A clock for the loop that tests advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead = 0.0
        loop = asyncio.get_running_loop()
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + self._ahead)

    async def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self._ahead += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)


@pytest.mark.parametrize(("phase", "limit"), [(Phase.HEAD, 30), (Phase.BODY, 300), (Phase.IDLE, 75)])
def test_a_phase_ends_at_its_limit_and_not_before(phase: Phase, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def main() -> None:
        clock, watch, late = Clock(monkeypatch), ConnectionWatch(ServerLimits(), 9), Connection("a", ended)
        watch.admit(late)
        for _ in range(2):  # each phase has the full time
            watch.enter(late, Phase.ANSWER)
            await clock.wait(1000)
            watch.enter(late, phase)
            await clock.wait(limit - 2)
        late.is_paused = True  # the server does not read, so the client is not late
        await clock.wait(limit)
        late.is_paused = False
        await clock.wait(limit - 7)
        assert ended == []
        await clock.wait(14)
        assert set(ended) == {"a is late"}

    asyncio.run(main())


def test_a_client_that_reads_nothing_is_ended_and_one_that_reads_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def main() -> None:
        clock, watch = Clock(monkeypatch), ConnectionWatch(ServerLimits(), 9)
        reader, again, stalled = (Connection(name, ended) for name in "abc")
        for one in (reader, again, stalled):
            watch.admit(one)
            watch.enter(one, Phase.ANSWER)
            one.num_bytes = 1000
        for i in range(5):
            await clock.wait(40)
            reader.num_bytes -= 1
            watch.note_progress(again)
            again.num_bytes += 1
            if i == 0:
                assert ended == []
        assert set(ended) == {"c"}

    asyncio.run(main())


def test_a_client_that_has_read_all_has_the_whole_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def main() -> None:
        clock, watch, one = Clock(monkeypatch), ConnectionWatch(ServerLimits(), 9), Connection("a", ended)
        watch.admit(one)
        watch.enter(one, Phase.ANSWER)
        for num_bytes in (1000, 0, 1000):
            one.num_bytes = num_bytes
            await clock.wait(50)
        assert ended == []

    asyncio.run(main())


def test_nothing_is_kept_of_connections_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        clock, watch, ended = Clock(monkeypatch), ConnectionWatch(ServerLimits(), 1), list[str]()
        for _ in range(3):  # the timer stops with the last connection and starts again with the next one
            one = Connection("a", ended)
            assert watch.admit(one)
            watch.enter(one, Phase.BODY)
            one.num_bytes = 1000
            await clock.wait(10)
            await clock.wait(295)
            assert "a" in ended
            assert not watch.admit(Connection("b", ended))
            watch.forget(one)
            gone = weakref.ref(one)
            del one
            assert gone() is None
            ended.clear()
            await clock.wait(100)
            assert ended == []

    asyncio.run(main())
