"""Slow work next to the event loop: one bounded pool of threads for each kind, which clients share fairly.

Work of one kind never waits for work of another kind, and no work waits for a thread of its own pool, so that pools
cannot block each other. Queues belong to the loop; a thread is taken only for work that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Final, ParamSpec, TypeVar, cast

from .._core import ExecutorClosedError
from .errors import ApiError
from .fair_queue import FairQueue, Job
from .options import ServerLimits
from .records import current_request

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

NO_CLIENT: Final = ""
"""Client of work that no request asks for."""


class WorkKind(Enum):
    """Kinds of slow work; the values name them in errors."""

    ADAPTERS = "adapters"
    """Reading, converting, caching and removing adapters."""
    GUIDES = "guides"
    """Compiling guides of guided decoding."""
    TEXTS = "texts"
    """Tokenising and detokenising long texts, and reading large bodies."""
    TEMPLATES = "templates"
    """Rendering chat templates."""
    FILES = "files"
    """Looking for adapters, and reading their small files: tokenizers and chat templates."""


class Work:
    """The pools. All methods belong to the loop."""

    def __init__(self, limits: ServerLimits) -> None:
        """Starts no thread yet."""
        threads = {
            WorkKind.ADAPTERS: limits.adapter_threads,
            WorkKind.GUIDES: limits.guide_threads,
            WorkKind.TEXTS: limits.text_threads,
            WorkKind.TEMPLATES: limits.template_threads,
            WorkKind.FILES: limits.file_threads,
        }
        self._pools: Mapping[WorkKind, WorkPool] = {
            kind: WorkPool(kind.value, threads[kind], limits.max_waiting_work) for kind in WorkKind
        }

    async def run(
        self,
        kind: WorkKind,
        function: Callable[Parameters, Returned],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Returned:
        """Calls a function in a thread, for the client of the current request.

        A call that is cancelled before it has begun never begins. One that has begun goes on, and nobody gets its
        result. Raises what the function raises, ApiError (429) when too much work waits, ExecutorClosedError after
        close().
        """
        return cast(Returned, await self._pools[kind].run(_client(), lambda: function(*args, **kwargs)))

    async def run_alone(
        self,
        kind: WorkKind,
        lock: Hashable,
        function: Callable[Parameters, Returned],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Returned:
        """The same, while no other work of this kind with the same lock runs; others take no thread meanwhile."""
        return cast(Returned, await self._pools[kind].run(_client(), lambda: function(*args, **kwargs), lock=lock))

    async def run_shared(
        self, kind: WorkKind, lock: Hashable, function: Callable[..., Returned], *args: Hashable
    ) -> Returned:
        """Works like run_alone(), once for all callers whose call of the same function waits or runs at the same time.

        The call is cancelled when the last of them is.
        """
        pool = self._pools[kind]
        return cast(
            Returned, await pool.run(_client(), lambda: function(*args), lock=lock, call=(lock, function, args))
        )

    def counts(self, kind: WorkKind) -> tuple[int, int]:
        """Number of calls of a kind that wait, and of those that run."""
        return self._pools[kind].counts()

    def num_refused(self, kind: WorkKind) -> int:
        """Number of calls of a kind that got no place to wait in, or lost it to another client's, since the start."""
        return self._pools[kind].num_refused

    async def close(self) -> None:
        """Refuses what waits and what comes, and waits for what runs."""
        for pool in self._pools.values():
            pool.refuse()
        for pool in self._pools.values():
            await pool.join()


class _Call(Job):
    """A job, and those who wait for its result."""

    def __init__(self, function: Callable[[], Any], lock: Hashable | None, call: Hashable | None) -> None:
        super().__init__(lock)
        self.function: Final = function
        self.call: Final = call
        self.waiters: dict[str, set[asyncio.Future[Any]]] = {}

    def give_up(self, client: str) -> set[asyncio.Future[Any]]:
        """Removes the waiters of a client, and returns them."""
        return self.waiters.pop(client, set())


class WorkPool:
    """The threads of one kind of work. All methods belong to the loop."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        """`name` stands in errors. max_waiting: number of calls that may wait for a thread."""
        self.num_refused = 0
        """Number of calls that were answered with 429."""
        self._name = name
        self._max_waiting = max_waiting
        self._queue = FairQueue(num_threads, max_waiting)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"adaptrt-{name}")
        self._shared: dict[Hashable, _Call] = {}
        self._waiting: set[_Call] = set()
        self._is_closed = False

    async def run(
        self,
        client: str,
        function: Callable[[], Any],
        *,
        lock: Hashable | None = None,
        call: Hashable | None = None,
    ) -> Any:
        """Calls `function` in a thread; see Work.

        lock: equal ones never run at once. call: calls with an equal one that waits or runs share it.
        """
        if self._is_closed:
            raise ExecutorClosedError("the server is about to end")
        job = self._shared.get(call) if call is not None else None
        if job is None:
            job = _Call(function, lock, call)
        if not job.is_running and client not in job.clients:
            self._put(client, job)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        job.waiters.setdefault(client, set()).add(future)
        self._start()
        try:
            return await future
        finally:
            self._leave(client, job, future)

    def counts(self) -> tuple[int, int]:
        """Number of places that are taken, and of threads that are."""
        return self._queue.num_waiting, self._queue.num_running

    def refuse(self) -> None:
        """Ends what waits, and what comes from now on, with ExecutorClosedError."""
        self._is_closed = True
        for job in tuple(self._waiting):
            for client in tuple(job.clients):
                self._drop(client, job, ExecutorClosedError("the server is about to end"))

    async def join(self) -> None:
        """Waits for what runs."""
        await asyncio.to_thread(self._threads.shutdown)

    def _put(self, client: str, job: _Call) -> None:
        displaced = self._queue.put(client, job)
        self.num_refused += displaced is not None
        if displaced == (client, job):
            raise self._full()
        self._waiting.add(job)
        if job.call is not None:
            self._shared[job.call] = job
        if displaced is not None:
            other, last = displaced
            assert isinstance(last, _Call)
            self._end_waiters(last.give_up(other), self._full())
            self._forget_unless_wanted(last)

    def _full(self) -> ApiError:
        return ApiError.overloaded(
            f"number of requests that wait for {self._name} is {self._max_waiting}; expected fewer: try again later"
        )

    def _drop(self, client: str, job: _Call, error: Exception) -> None:
        self._queue.leave(client, job)
        self._end_waiters(job.give_up(client), error)
        self._forget_unless_wanted(job)

    def _leave(self, client: str, job: _Call, future: asyncio.Future[Any]) -> None:
        """One of those who wait has its result, or waits no more."""
        if future.done() and not future.cancelled():
            future.exception()  # which a task that was cancelled at the same moment never looks at
        waiters = job.waiters.get(client)
        if waiters is None:
            return
        waiters.discard(future)
        if waiters:
            return
        job.give_up(client)
        if client in job.clients:
            self._queue.leave(client, job)
            self._forget_unless_wanted(job)

    def _forget_unless_wanted(self, job: _Call) -> None:
        if not job.is_running and not job.clients:
            self._forget(job)

    def _forget(self, job: _Call) -> None:
        """From now on nobody can join it."""
        self._waiting.discard(job)
        if job.call is not None and self._shared.get(job.call) is job:
            del self._shared[job.call]

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while (job := self._queue.start()) is not None:
            assert isinstance(job, _Call)
            self._waiting.discard(job)
            self._threads.submit(self._work, job, loop)

    def _work(self, job: _Call, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread."""
        result, error = None, None
        try:
            result = job.function()
        except BaseException as raised:
            error = raised
        # The loop is gone when the process ends without close().
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._finish, job, result, error)

    def _finish(self, job: _Call, result: Any, error: BaseException | None) -> None:
        self._queue.finish(job)
        self._forget(job)
        for client in tuple(job.waiters):
            self._end_waiters(job.give_up(client), error, result)
        self._start()

    def _end_waiters(self, waiters: set[asyncio.Future[Any]], error: BaseException | None, result: Any = None) -> None:
        for future in waiters:
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _client() -> str:
    """The client whose request this task answers."""
    record = current_request.get()
    return NO_CLIENT if record is None else record.client
