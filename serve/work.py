"""Thread pools for slow work: one bounded pool per kind, shared fairly by clients.

Each kind has its own threads, so one kind never waits for another. Work must not wait for other work of its own kind,
so a pool cannot block itself. Queues belong to the loop; only running work takes a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Final, ParamSpec, TypeVar, cast

from .._core import ExecutorClosedError
from ..common.pauses import pause_by
from .errors import ApiError
from .fair_queue import FairQueue, Job
from .options import ServerLimits, num_adapter_threads
from .records import current_request

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

NO_CLIENT: Final = ""
"""Client of work without a request."""


class WorkKind(Enum):
    """Kinds of slow work. The values name them in errors."""

    ADAPTERS = "adapters"
    """Reading, converting, caching and removing adapters."""
    GUIDES = "guides"
    """Compiling guides of guided decoding."""
    TEXTS = "texts"
    """Tokenising and detokenising long texts, and reading large bodies."""
    TEMPLATES = "templates"
    """Rendering chat templates."""
    DOWNLOADS = "downloads"
    """Fetching adapters and images from other machines."""
    IMAGES = "images"
    """Decoding images, and running the vision tower."""
    FILES = "files"
    """Looking for adapters, and reading their small files: tokenizers and chat templates."""


class Work:
    """The pools. Call all methods on the event loop."""

    def __init__(self, limits: ServerLimits, pause_loads: Callable[[], None] | None = None) -> None:
        """Starts no thread until the first call. pause_loads: called between pieces of the work ADAPTERS."""
        threads = {
            WorkKind.ADAPTERS: num_adapter_threads(limits),
            WorkKind.GUIDES: limits.guide_threads,
            WorkKind.TEXTS: limits.text_threads,
            WorkKind.TEMPLATES: limits.template_threads,
            WorkKind.DOWNLOADS: limits.download_threads,
            WorkKind.IMAGES: limits.image_threads,
            WorkKind.FILES: limits.file_threads,
        }
        niceness = {WorkKind.ADAPTERS: limits.adapter_niceness}
        self._pools: Mapping[WorkKind, WorkPool] = {
            kind: WorkPool(
                kind.value,
                threads[kind],
                limits.max_waiting_work,
                niceness.get(kind, 0),
                pause_loads if kind is WorkKind.ADAPTERS else None,
            )
            for kind in WorkKind
        }

    async def run(
        self,
        kind: WorkKind,
        function: Callable[Parameters, Returned],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Returned:
        """Calls a function in a thread, for the client of the current request.

        A call that is cancelled before it begins never runs. One that has begun continues, and its result is dropped.
        Raises the function's errors, ApiError (429) if too much work waits, and ExecutorClosedError after close().
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
        """Like run(), but no other work of this kind with the same lock runs at the same time. Waiting for the lock
        takes no thread.
        """
        return cast(Returned, await self._pools[kind].run(_client(), lambda: function(*args, **kwargs), lock=lock))

    async def run_shared(
        self, kind: WorkKind, lock: Hashable, function: Callable[..., Returned], *args: Hashable
    ) -> Returned:
        """Like run_alone(), but equal calls that wait or run at the same time share one call and its result.

        The call is cancelled when its last caller is cancelled.
        """
        pool = self._pools[kind]
        return cast(
            Returned, await pool.run(_client(), lambda: function(*args), lock=lock, call=(lock, function, args))
        )

    async def run_stoppable(
        self, kind: WorkKind, lock: Hashable, function: Callable[..., Returned], *args: Hashable
    ) -> Returned:
        """Like run_shared(), but a call that has begun can be stopped. `function` gets an event as its last argument;
        it is set by close() and when the last caller is cancelled.
        """
        stop = threading.Event()
        call = self._pools[kind].run(
            _client(), lambda: function(*args, stop), lock=lock, call=(lock, function, args), stop=stop
        )
        return cast(Returned, await call)

    def counts(self, kind: WorkKind) -> tuple[int, int]:
        """Returns the numbers of waiting and of running calls of a kind."""
        return self._pools[kind].counts()

    def num_refused(self, kind: WorkKind) -> int:
        """Returns the number of calls of a kind that were refused: they got no place in the queue, or lost it to
        another client's call.
        """
        return self._pools[kind].num_refused

    async def close(self) -> None:
        """Rejects waiting and new calls, and waits for running ones."""
        for pool in self._pools.values():
            pool.refuse()
        for pool in self._pools.values():
            await pool.join()


class _Call(Job):
    """A job and the futures that wait for its result."""

    def __init__(
        self,
        function: Callable[[], Any],
        lock: Hashable | None,
        call: Hashable | None,
        stop: threading.Event | None,
    ) -> None:
        super().__init__(lock)
        self.function: Final = function
        self.stop: Final = stop
        self.call: Final = call
        self.waiters: dict[str, set[asyncio.Future[Any]]] = {}

    def give_up(self, client: str) -> set[asyncio.Future[Any]]:
        """Removes a client's futures and returns them."""
        return self.waiters.pop(client, set())


class WorkPool:
    """The threads of one kind of work. Call all methods on the event loop."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_waiting: int,
        niceness: int = 0,
        pause: Callable[[], None] | None = None,
    ) -> None:
        """name: for errors. max_waiting: maximum number of calls that wait for a thread. niceness: see
        ServerLimits.adapter_niceness. pause: for pause_by().
        """
        self.num_refused = 0
        """Number of calls that were answered with 429."""
        self._name = name
        self._max_waiting = max_waiting
        self._queue = FairQueue(num_threads, max_waiting)
        self._threads = ThreadPoolExecutor(
            num_threads, f"adaptrt-{name}", initializer=_begin_thread, initargs=(niceness, pause)
        )
        self._shared: dict[Hashable, _Call] = {}
        self._waiting: set[_Call] = set()
        self._stoppable: set[_Call] = set()
        self._is_closed = False

    async def run(
        self,
        client: str,
        function: Callable[[], Any],
        *,
        lock: Hashable | None = None,
        call: Hashable | None = None,
        stop: threading.Event | None = None,
    ) -> Any:
        """Calls `function` in a thread; see Work.

        lock: jobs with an equal lock never run at once. call: calls with an equal value that wait or run at the same
        time are merged. stop: set when nothing waits for the running call any more.
        """
        if self._is_closed:
            raise ExecutorClosedError("the server is shutting down")
        job = self._shared.get(call) if call is not None else None
        if job is None:
            job = _Call(function, lock, call, stop)
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
        """Returns the numbers of waiting and of running calls."""
        return self._queue.num_waiting, self._queue.num_running

    def refuse(self) -> None:
        """Ends waiting and new calls with ExecutorClosedError."""
        self._is_closed = True
        for job in tuple(self._waiting):
            for client in tuple(job.clients):
                self._drop(client, job, ExecutorClosedError("the server is shutting down"))
        for job in tuple(self._stoppable):
            for client in tuple(job.waiters):
                self._end_waiters(job.give_up(client), ExecutorClosedError("the server is shutting down"))
            self._stop(job)

    async def join(self) -> None:
        """Waits for running calls."""
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
        """Removes a future that has its result or was cancelled."""
        if future.done() and not future.cancelled():
            future.exception()  # a task cancelled at the same moment would never retrieve it
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
        elif job in self._stoppable and not job.waiters:
            self._stop(job)

    def _stop(self, job: _Call) -> None:
        """Asks a running job to end, and lets no new call join it."""
        assert job.stop is not None
        job.stop.set()
        self._forget(job)

    def _forget_unless_wanted(self, job: _Call) -> None:
        if not job.is_running and not job.clients:
            self._forget(job)

    def _forget(self, job: _Call) -> None:
        """Removes a job from the waiting and shared ones, so that no call can join it."""
        self._waiting.discard(job)
        if job.call is not None and self._shared.get(job.call) is job:
            del self._shared[job.call]

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while (job := self._queue.start()) is not None:
            assert isinstance(job, _Call)
            self._waiting.discard(job)
            if job.stop is not None:
                self._stoppable.add(job)
            self._threads.submit(self._work, job, loop)

    def _work(self, job: _Call, loop: asyncio.AbstractEventLoop) -> None:
        """Runs a job. Called in a thread."""
        result, error = None, None
        try:
            result = job.function()
        except BaseException as raised:
            error = raised
        # The loop is closed if the process ends without close().
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._finish, job, result, error)

    def _finish(self, job: _Call, result: Any, error: BaseException | None) -> None:
        self._queue.finish(job)
        self._stoppable.discard(job)
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


def _begin_thread(niceness: int, pause: Callable[[], None] | None) -> None:
    """Adds to the niceness of this thread and of threads that it starts, and sets how its work pauses."""
    pause_by(pause)
    if niceness and sys.platform == "linux":
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + niceness)


def _client() -> str:
    """Returns the client whose request this task answers."""
    record = current_request.get()
    return NO_CLIENT if record is None else record.client
