"""Pools of slow work: clients share threads, equal calls are merged, and remaining calls keep their results."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest
from starlette.responses import Response

import adaptrt
from adaptrt.serve.errors import ApiError
from adaptrt.serve.key_guard import KeyGuard
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.records import RequestRecord, current_request, peer_client
from adaptrt.serve.work import Work, WorkKind, WorkPool

SECONDS = 60.0


class Gate:
    """Work that begins and then waits until it is released."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self._open = threading.Event()

    def pass_through(self, name: Any = None) -> Any:
        self.begun.append(name)
        assert self._open.wait(SECONDS)
        return name

    def open(self) -> None:
        self._open.set()


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), SECONDS))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@contextmanager
def client(name: str) -> Iterator[None]:
    token = current_request.set(RequestRecord(client=name))
    try:
        yield
    finally:
        current_request.reset(token)


def start(pool: WorkPool, name: str, function: Callable[[], Any], **how: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(pool.run(name, function, **how))


def test_one_client_leaves_a_thread_to_others() -> None:
    async def body() -> None:
        pool, gate = WorkPool("files", 3, 100), Gate()
        slow = [start(pool, "many", gate.pass_through) for _ in range(20)]
        await until(lambda: len(gate.begun) == 2)
        assert await pool.run("one", lambda: 7) == 7
        assert len(gate.begun) == 2
        gate.open()
        await asyncio.gather(*slow)
        await pool.join()

    run(body)


def test_kinds_have_threads_of_their_own() -> None:
    async def body() -> None:
        work, gate = Work(ServerLimits()), Gate()
        waiting = [asyncio.create_task(work.run(WorkKind.GUIDES, gate.pass_through)) for _ in range(9)]
        for kind in set(WorkKind) - {WorkKind.GUIDES}:
            assert await work.run(kind, sum, [1, 2]) == 3
        gate.open()
        await asyncio.gather(*waiting)
        await work.close()

    run(body)


def test_the_client_is_that_of_the_request() -> None:
    async def body() -> None:
        work, gate = Work(ServerLimits(guide_threads=2)), Gate()
        with client("many"):
            slow = [asyncio.create_task(work.run(WorkKind.GUIDES, gate.pass_through)) for _ in range(4)]
        with client("one"):
            assert await work.run(WorkKind.GUIDES, sum, [1, 2]) == 3
        gate.open()
        await asyncio.gather(*slow)
        await work.close()

    run(body)


def test_work_that_is_cancelled_while_it_waits_never_begins() -> None:
    async def body() -> None:
        pool, gate, calls = WorkPool("files", 1, 100), Gate(), []
        first = start(pool, "a", gate.pass_through)
        await until(lambda: bool(gate.begun))
        left = start(pool, "a", lambda: calls.append("left"))
        stays = start(pool, "b", lambda: calls.append("stays"))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        gate.open()
        await asyncio.gather(first, stays)
        await pool.join()
        assert calls == ["stays"]

    run(body)


def test_work_that_is_cancelled_while_it_runs_holds_its_thread_until_it_ends() -> None:
    async def body() -> None:
        pool, gate, calls = WorkPool("files", 1, 100), Gate(), []
        left = start(pool, "a", gate.pass_through)
        await until(lambda: bool(gate.begun))
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        after = start(pool, "b", lambda: calls.append("after"))
        await asyncio.sleep(0.01)
        assert calls == []
        gate.open()
        await after
        await pool.join()

    run(body)


def test_a_full_queue_is_refused() -> None:
    async def body() -> None:
        pool, gate = WorkPool("guides", 1, 2), Gate()
        tasks = [start(pool, name, gate.pass_through) for name in "abc"]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=r"number of requests that wait for guides is 2; expected fewer") as refused:
            await pool.run("d", lambda: None)
        assert refused.value.status == HTTPStatus.TOO_MANY_REQUESTS
        assert refused.value.headers == {"Retry-After": "1"}
        assert pool.num_refused == 1
        gate.open()
        await asyncio.gather(*tasks)
        assert await pool.run("d", lambda: 7) == 7  # there is room again
        assert pool.num_refused == 1
        await pool.join()

    run(body)


def test_a_client_with_all_places_gives_up_the_last_one() -> None:
    async def body() -> None:
        pool, gate, calls = WorkPool("guides", 1, 3), Gate(), []
        running = start(pool, "many", gate.pass_through)
        many = [start(pool, "many", lambda i=i: calls.append(i)) for i in range(3)]  # type: ignore[misc]
        await asyncio.sleep(0)
        one = start(pool, "one", lambda: calls.append("one"))
        with pytest.raises(ApiError) as refused:
            await many[2]
        assert pool.num_refused == 1
        assert refused.value.status == HTTPStatus.TOO_MANY_REQUESTS
        gate.open()
        await asyncio.gather(running, one, *many[:2])
        assert sorted(map(str, calls)) == ["0", "1", "one"]
        await pool.join()

    run(body)


def test_equal_calls_share_one_until_the_last_leaves() -> None:
    async def body() -> None:
        pool, gate, calls = WorkPool("adapters", 1, 100), Gate(), []
        first = start(pool, "a", gate.pass_through)
        await until(lambda: bool(gate.begun))
        shared = [start(pool, name, lambda: calls.append(1) or len(calls), call="load") for name in "aabc"]
        dropped = [start(pool, name, lambda: calls.append(2), call="other") for name in "ab"]
        await asyncio.sleep(0)
        for task in (shared[0], shared[2], *dropped):
            task.cancel()
        gate.open()
        await first
        assert await asyncio.gather(shared[1], shared[3]) == [1, 1]
        await pool.join()
        assert calls == [1]

    run(body)


def test_a_shared_call_waits_in_the_line_of_each_of_its_clients() -> None:
    async def body() -> None:
        pool, gate, order = WorkPool("adapters", 1, 100), Gate(), []
        first = start(pool, "many", gate.pass_through)
        await until(lambda: bool(gate.begun))
        many = [start(pool, "many", lambda i=i: order.append(i)) for i in range(5)]  # type: ignore[misc]
        many.append(start(pool, "many", lambda: order.append("shared"), call="load"))
        one = start(pool, "one", lambda: order.append("never"), call="load")
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(first, one, *many)
        assert order.index("shared") <= 1
        await pool.join()

    run(body)


def test_all_who_share_a_call_get_its_error_and_the_next_call_is_a_new_one() -> None:
    async def body() -> None:
        pool = WorkPool("adapters", 2, 100)

        def fail() -> None:
            raise adaptrt.AdapterError("broken")

        outcomes = await asyncio.gather(*(pool.run("a", fail, call="x") for _ in range(3)), return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["broken"] * 3
        assert await pool.run("a", lambda: 7, call="x") == 7
        await pool.join()

    run(body)


def test_work_with_one_lock_never_runs_at_once() -> None:
    async def body() -> None:
        pool, running, most = WorkPool("adapters", 4, 1000), Counter[str](), Counter[str]()

        def change(name: str) -> None:
            running[name] += 1
            most[name] = max(most[name], running[name])
            threading.Event().wait(0.001)
            running[name] -= 1

        names = [random.Random(i).choice("xyz") for i in range(60)]
        await asyncio.gather(
            *(pool.run(f"{i % 3}", lambda name=name: change(name), lock=name) for i, name in enumerate(names))  # type: ignore[misc]
        )
        assert set(most.values()) == {1}
        await pool.join()

    run(body)


def test_close_refuses_what_waits_and_waits_for_what_runs() -> None:
    async def body() -> None:
        work, gate = Work(ServerLimits(guide_threads=1)), Gate()
        running = asyncio.create_task(work.run(WorkKind.GUIDES, gate.pass_through, 7))
        await until(lambda: bool(gate.begun))
        waiting = [asyncio.create_task(work.run(WorkKind.GUIDES, gate.pass_through)) for _ in range(3)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(work.close())
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, adaptrt.ExecutorClosedError)
        with pytest.raises(adaptrt.ExecutorClosedError):
            await work.run(WorkKind.GUIDES, gate.pass_through)
        assert not closing.done()
        gate.open()
        await closing
        assert await running == 7
        assert gate.begun == [7]

    run(body)


@pytest.mark.parametrize("seed", range(6))
def test_crowds_that_leave_at_random_lose_nothing(seed: int) -> None:
    """Every remaining call has its own result, and nothing waits or runs at the end."""
    draw = random.Random(seed)
    num_threads = draw.randint(1, 4)

    async def body() -> None:
        pool = WorkPool("files", num_threads, 40)
        refused = []

        async def ask(number: int) -> None:
            call = None if draw.random() < 0.5 else f"call {number % 5}"
            lock = draw.choice([None, "x", "y"]) if call is None else f"lock {number % 5}"
            expected = number if call is None else number % 5

            def work() -> int:
                threading.Event().wait(draw.random() * 0.002)
                if expected % 7 == 6:
                    raise adaptrt.AdapterError(str(expected))
                return expected

            await asyncio.sleep(draw.random() * 0.05)
            (outcome,) = await asyncio.gather(
                pool.run(f"client {number % 4}", work, lock=lock, call=call), return_exceptions=True
            )
            if isinstance(outcome, ApiError):
                refused.append(number)
            else:
                assert str(outcome) == str(expected)
                assert isinstance(outcome, adaptrt.AdapterError) == (expected % 7 == 6)

        tasks = [asyncio.create_task(ask(number)) for number in range(300)]
        for task in tasks:
            if draw.random() < 0.4:
                asyncio.get_running_loop().call_later(draw.random() * 0.1, task.cancel)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert len(refused) < 300
        # Calls whose clients left may still run.
        assert await asyncio.gather(*(pool.run(f"{i}", lambda: 7) for i in range(8))) == [7] * 8
        await pool.join()
        await asyncio.sleep(0)
        assert pool.counts() == (0, 0)

    run(body)


def test_a_client_with_a_key_is_that_key() -> None:
    named: list[str] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        record = current_request.get()
        named.append("" if record is None else record.client)

    guard = KeyGuard(note, keys=("one", "two"), open_paths=("/open",), respond=lambda *_: Response(status_code=401))

    async def ask(path: str, *headers: tuple[bytes, bytes]) -> None:
        with client("address 10.0.0.1"):
            await guard({"type": "http", "path": path, "headers": headers}, None, _drop)  # type: ignore[arg-type]

    def bearer(key: str) -> tuple[bytes, bytes]:
        return b"authorization", f"Bearer {key}".encode()

    for path, key in (("/v1", "two"), ("/v1", "one"), ("/v1", "three"), ("/open", "three")):
        asyncio.run(ask(path, bearer(key)))
    assert named == ["key 1", "key 0", "address 10.0.0.1"]
    named.clear()
    for given in (
        ((b"x-api-key", b"two"),),
        ((b"x-api-key", b"one"), bearer("three")),
        ((b"x-api-key", b"three"), bearer("two")),
        ((b"x-api-key", b"three"),),
        ((b"x-api-key", b""),),
        ((b"authorization", b"Basic two"),),
    ):
        asyncio.run(ask("/v1", *given))
    assert named == ["key 1", "key 0", "key 1"]


async def _drop(_: Any) -> None:
    """Drops a message that the test does not check."""


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.1.2.3", "address 10.1.2.3"),
        ("::ffff:10.1.2.3", "address 10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "address 2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "address 2001:db8:1:2::/64"),
        ("testclient", "address testclient"),
    ],
)
def test_a_client_without_a_key_is_its_address(host: str, name: str) -> None:
    assert peer_client(host) == name


def test_a_running_call_is_stopped_when_its_last_caller_leaves() -> None:
    async def body() -> None:
        work, begun, ended = Work(ServerLimits()), 0, 0

        def wait(name: str, stop: threading.Event) -> str:
            nonlocal begun, ended
            begun += 1
            assert stop.wait(SECONDS)
            ended += 1
            return name

        with client("a"):
            first = asyncio.create_task(work.run_stoppable(WorkKind.DOWNLOADS, "x", wait, "x"))
        with client("b"):
            second = asyncio.create_task(work.run_stoppable(WorkKind.DOWNLOADS, "x", wait, "x"))
        await until(lambda: begun == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert ended == 0
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        # A new call does not join the one that ends.
        third = asyncio.create_task(work.run_stoppable(WorkKind.DOWNLOADS, "x", wait, "x"))
        await until(lambda: begun == 2)
        assert ended == 1
        await work.close()
        with pytest.raises(adaptrt.ExecutorClosedError):
            await third
        assert ended == 2

    run(body)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one niceness per process")
def test_threads_of_adapters_leave_the_cpu_to_others() -> None:
    """Threads that they start, for example for digests, do so too."""

    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def of_a_thread() -> int:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(own).result()

    async def body() -> None:
        work, before = Work(ServerLimits(adapter_niceness=3)), own()
        expected = min(before + 3, 19)
        assert [await work.run(WorkKind.ADAPTERS, one) for one in (own, of_a_thread)] == [expected] * 2
        assert (await work.run(WorkKind.FILES, own), own()) == (before, before)
        plain = Work(ServerLimits(adapter_niceness=0))
        assert await plain.run(WorkKind.ADAPTERS, own) == before
        await work.close()
        await plain.close()

    run(body)
