"""The executor on an asyncio loop: responses arrive without polling, and whoever stops listening frees its request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Protocol

from .._core import AdaptrtError, ExecutorClosedError, GuidedDecodingParams, Request, RequestError, Response, Result
from ..runtime.executor import Executor
from .options import ServerLimits
from .time_slices import TimeSlices
from .work import Work, WorkKind

MANY_RESULTS: Final = 64


class Generation:
    """The results of one request as they arrive. Leaving its `async with` early cancels the request."""

    def __init__(self, owner: AsyncExecutor, request_id: int) -> None:
        """For AsyncExecutor.submit."""
        self.request_id: Final = request_id
        self.num_virtual_tokens = 0
        """Tokens that an adapter has put before the prompt."""
        self.on_backlog: Callable[[list[Result]], None] | None = None
        """Gets the results, on the loop, where MANY_RESULTS have come while nobody waits for them; None: they stay."""
        self._owner = owner
        self._results: deque[Result] = deque()
        self._failure: AdaptrtError | None = None
        self._is_final = False
        self._arrived = asyncio.Event()
        self._is_waited_for = False

    async def next_results(self) -> list[Result]:
        """Everything that has arrived since the last call, at least one result; empty after the final one.

        Raises RequestError when the request failed, ExecutorClosedError when the executor ended.
        """
        await self.wait()
        return self.take_results()

    async def wait(self) -> bool:
        """Returns when there are results, or when no more come. False: that was so already."""
        if self._results or self.is_over:
            return False
        self._arrived.clear()
        self._is_waited_for = True
        try:
            await self._arrived.wait()
        finally:
            self._is_waited_for = False
        return True

    def take_results(self) -> list[Result]:
        """Results that have arrived since the last call. Raises as next_results() does if there are none."""
        if not self._results and self._failure is not None:
            raise _copy_of(self._failure)
        results = list(self._results)
        self._results.clear()
        return results

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner.release(self)

    @property
    def is_over(self) -> bool:
        """Whether its last response is here."""
        return self._is_final or self._failure is not None

    def accept(self, response: Response) -> None:
        """On the loop: a response that has come."""
        if response.has_error():
            self.fail(RequestError(response.error_msg))
            return
        self._results.append(response.result)
        self._is_final = response.result.is_final
        self._arrived.set()
        if self.on_backlog is not None and not self._is_waited_for and len(self._results) >= MANY_RESULTS:
            self.on_backlog(self.take_results())

    def fail(self, error: AdaptrtError) -> None:
        """On the loop: no more will come."""
        self._failure = error
        self._arrived.set()


class GenerationObserver(Protocol):
    """Told, on the loop, of each request that the executor takes and of what becomes of it."""

    def on_start(self, request_id: int, request: Request, adapter: str | None) -> None:
        """It is queued. `adapter`: a name, or the digits of a task_id; None: the base."""

    def on_response(self, response: Response) -> None:
        """One has come."""

    def on_loss(self, request_id: int) -> None:
        """The executor ended before it."""


class AsyncExecutor:
    """An executor whose responses are taken by one thread and handed to the loop, however many requests there are.

    All methods but the constructor belong to the loop.
    """

    def __init__(
        self, executor: Executor, observer: GenerationObserver | None = None, limits: ServerLimits | None = None
    ) -> None:
        """Starts nothing yet. The executor is the caller's to shut down, after close().

        limits: those of slow work; None: the defaults.
        """
        self.executor: Final = executor
        self.work: Final = Work(ServerLimits() if limits is None else limits)
        """Everything that would keep the loop away runs there."""
        self._observer = observer
        self._generations: dict[int, Generation] = {}
        self._closed: AdaptrtError | None = None
        self._arrived: deque[Response] = deque()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to take responses, for the running loop."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._take_responses, args=(loop,), name="adaptrt-responses", daemon=True
        )
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Requests whose last response is still to come."""
        return len(self._generations)

    async def compile_guide(self, guide: GuidedDecodingParams) -> None:
        """Compiles a guide in its pool; does nothing for one that is compiled already.

        Raises as Executor.check_guide and Work.run.
        """
        if not self.executor.has_compiled_guide(guide):
            await self.work.run(WorkKind.GUIDES, self.executor.check_guide, guide)

    def submit(self, request: Request, adapter: str | None = None) -> Generation:
        """Queues a request, whose adapter has to be cached; `adapter` is what it is called to observers.

        Raises as Executor.enqueue_resolved_request.
        """
        if self._closed is not None:
            raise _copy_of(self._closed)
        # Responses are delivered by callbacks of this loop, so none can come before the request is known here.
        generation = Generation(self, self.executor.enqueue_resolved_request(request))
        self._generations[generation.request_id] = generation
        if self._observer is not None:
            self._observer.on_start(generation.request_id, request, adapter)
        return generation

    def release(self, generation: Generation) -> None:
        """Nobody listens to it any more; it is cancelled when it still runs."""
        if self._generations.get(generation.request_id) is not generation:
            return
        # It stays among those that run until its last response has come. It may have ended meanwhile, with that
        # response on its way, or with the executor.
        with contextlib.suppress(RequestError, ExecutorClosedError):
            self.executor.cancel_request(generation.request_id)

    async def close(self) -> None:
        """Shuts the executor down; requests that still run fail."""
        await asyncio.to_thread(self.executor.shutdown)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await self.work.close()

    def _take_responses(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread: until the executor ends."""
        try:
            while True:
                responses = self.executor.await_responses()
                loop.call_soon_threadsafe(self._take_in, loop, responses)
        except AdaptrtError as error:
            ended = _copy_of(error)
        # The loop may be gone when the process ends without close().
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._fail_all, ended)

    def _take_in(self, loop: asyncio.AbstractEventLoop, responses: Sequence[Response]) -> None:
        is_delivering = bool(self._arrived)
        self._arrived.extend(responses)
        if not is_delivering:
            self._deliver(loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hands over what has arrived, in slices of time: one step of an engine may have many sequences."""
        slices = TimeSlices()
        while self._arrived:
            if slices.is_over:
                loop.call_soon(self._deliver, loop)
                return
            self._hand_over(self._arrived.popleft())

    def _hand_over(self, response: Response) -> None:
        generation = self._generations[response.request_id]
        generation.accept(response)
        if self._observer is not None:
            self._observer.on_response(response)
        if generation.is_over:
            del self._generations[response.request_id]

    def _fail_all(self, error: AdaptrtError) -> None:
        self._closed = error
        while self._arrived:
            self._hand_over(self._arrived.popleft())
        for generation in self._generations.values():
            generation.fail(error)
            if self._observer is not None:
                self._observer.on_loss(generation.request_id)
        self._generations.clear()


def _copy_of(error: AdaptrtError) -> AdaptrtError:
    """An equal error without a traceback: the frames of one that is kept would keep the executor in memory."""
    return type(error)(*error.args)
