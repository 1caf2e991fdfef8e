"""The executor on an asyncio loop. Responses arrive without polling; a client that disconnects frees its request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

from .._core import AdaptrtError, ExecutorClosedError, GuidedDecodingParams, Request, RequestError, Response, Result
from ..formats.adapter.proof import read_proof
from ..runtime.executor import Executor
from ..runtime.named_adapter import NamedAdapter
from .first_tokens import FirstTokens
from .options import ServerLimits
from .time_slices import TimeSlices
from .work import Work, WorkKind

if TYPE_CHECKING:
    from .tenant_gate import Admitted, TenantGate

MANY_RESULTS: Final = 64


class Generation:
    """Results of one request as they arrive. Leaving its `async with` early cancels the request."""

    def __init__(self, owner: AsyncExecutor, request_id: int) -> None:
        """Called only by AsyncExecutor.submit."""
        self.request_id: Final = request_id
        self.num_virtual_tokens = 0
        """Number of virtual tokens that the adapter puts before the prompt."""
        self.admitted: Admitted | None = None
        """The tenant's request that this is; None: the server has no tenants."""
        self.on_backlog: Callable[[list[Result]], None] | None = None
        """Called on the loop with the results if MANY_RESULTS have arrived and no task waits for them. None: they stay
        here.
        """
        self._owner = owner
        self._results: deque[Result] = deque()
        self._failure: AdaptrtError | None = None
        self._is_final = False
        self._arrived = asyncio.Event()
        self._is_waited_for = False

    async def next_results(self) -> list[Result]:
        """Returns all results since the last call, at least one. Empty after the final result.

        Raises RequestError when the request failed, ExecutorClosedError when the executor ended.
        """
        await self.wait()
        return self.take_results()

    async def wait(self) -> bool:
        """Waits until results arrive or no more will come. Returns False if it did not have to wait."""
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
        """Returns results since the last call without waiting. Raises like next_results() if there are none."""
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
        self.cancel()

    def cancel(self) -> None:
        """Cancels the request. Its results up to the final one still arrive."""
        self._owner.release(self)

    @property
    def is_over(self) -> bool:
        """True if the last response has arrived."""
        return self._is_final or self._failure is not None

    def accept(self, response: Response) -> None:
        """Takes in a response. Called on the loop."""
        if response.has_error():
            self.fail(RequestError(response.error_msg))
            return
        self._results.append(response.result)
        self._is_final = response.result.is_final
        self._arrived.set()
        if self.on_backlog is not None and not self._is_waited_for and len(self._results) >= MANY_RESULTS:
            self.on_backlog(self.take_results())

    def fail(self, error: AdaptrtError) -> None:
        """Ends the generation with an error. Called on the loop."""
        self._failure = error
        self._arrived.set()


class GenerationObserver(Protocol):
    """Methods that are called, on the loop, for each request that the executor accepts and each response."""

    def on_start(self, request_id: int, request: Request, adapter: str | None) -> None:
        """Called when a request was queued. `adapter`: a name, or the digits of a task_id; None: the base model."""

    def on_response(self, response: Response) -> None:
        """Called when a response has arrived."""

    def on_loss(self, request_id: int) -> None:
        """Called when the executor ended before the request did."""

    def on_adapter_load(self, seconds: float) -> None:
        """Called, in any thread, after an adapter was read and cached."""


class AsyncExecutor:
    """An executor for asyncio. A single thread takes the responses of all requests and hands them to the loop.

    Call all methods but the constructor on the loop.
    """

    def __init__(
        self, executor: Executor, observer: GenerationObserver | None = None, limits: ServerLimits | None = None
    ) -> None:
        """Starts no thread. The caller shuts the executor down after close().

        limits: limits of slow work; None: the defaults.
        """
        self.executor: Final = executor
        self._first_tokens = FirstTokens()
        self.work: Final = Work(ServerLimits() if limits is None else limits, self._first_tokens.pause)
        """Runs all work that would block the loop."""
        self.gate: TenantGate | None = None
        """Admits requests before submit(); None: there are no tenants, and all requests are admitted."""
        self.check_adapter: Callable[[NamedAdapter], None] | None = None
        """Checks an adapter that is cached, in the thread that adds it; None: adapters are not checked."""
        self._observer = observer
        self._generations: dict[int, Generation] = {}
        self._closed: AdaptrtError | None = None
        self._arrived: deque[Response] = deque()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts taking responses, for the running loop."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._take_responses, args=(loop,), name="adaptrt-responses", daemon=True
        )
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Number of requests whose last response has not arrived."""
        return len(self._generations)

    async def compile_guide(self, guide: GuidedDecodingParams) -> None:
        """Compiles a guide in the pool for guides; does nothing if it is compiled already.

        Raises the same errors as Executor.check_guide and Work.run.
        """
        if not self.executor.has_compiled_guide(guide):
            await self.work.run(WorkKind.GUIDES, self.executor.check_guide, guide)

    def add_adapter(self, name: str, directory: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Calls Executor.add_adapter, and tells the observer how long it took. Reads files: call it in a thread."""
        check = self.check_adapter
        self._timed(lambda: self.executor.add_adapter(name, directory, replace=replace, check=check))

    def check_carried(self, adapter: NamedAdapter) -> None:
        """Checks the proof of an adapter that the engine carries. Raises AdapterError. Reads files: call it in a
        thread.
        """
        adapter.facts.proof = read_proof(adapter.directory)
        if adapter.facts.proof is None or self.check_adapter is None:
            return
        self.executor.load_adapter(adapter.name)
        self.check_adapter(adapter)

    def try_adapter(self, name: str, directory: str | os.PathLike[str], *, replace: bool) -> None:
        """Calls Executor.try_adapter. Reads files: call it in a thread."""
        self.executor.try_adapter(name, directory, replace=replace, check=self.check_adapter)

    def load_adapter(self, name: str) -> None:
        """Calls Executor.load_adapter in the same way."""
        self._timed(lambda: self.executor.load_adapter(name))

    def _timed(self, load: Callable[[], object]) -> None:
        began = time.monotonic()
        load()
        if self._observer is not None:
            self._observer.on_adapter_load(time.monotonic() - began)

    def submit(self, request: Request, adapter: str | None = None) -> Generation:
        """Queues a request. Its adapter must be cached. `adapter`: the name that observers are told.

        Raises the same errors as Executor.enqueue_resolved_request.
        """
        if self._closed is not None:
            raise _copy_of(self._closed)
        # Responses are delivered by callbacks of this loop, so none can arrive before the request is registered here.
        generation = Generation(self, self.executor.enqueue_resolved_request(request))
        self._generations[generation.request_id] = generation
        if request.streaming or request.pooling_params is not None:  # others have no response before the last one
            self._first_tokens.begin(generation.request_id)
        if self._observer is not None:
            self._observer.on_start(generation.request_id, request, adapter)
        return generation

    def release(self, generation: Generation) -> None:
        """Ends listening to a generation: cancels the request if it still runs."""
        if self._generations.get(generation.request_id) is not generation:
            return
        # It stays registered until its last response arrives. It may have ended in the meantime, on its own or with the
        # executor.
        with contextlib.suppress(RequestError, ExecutorClosedError):
            self.executor.cancel_request(generation.request_id)

    async def close(self) -> None:
        """Shuts the executor down. Requests that still run fail."""
        await asyncio.to_thread(self.executor.shutdown)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await self.work.close()

    def _take_responses(self, loop: asyncio.AbstractEventLoop) -> None:
        """Takes responses until the executor ends. Runs in the thread."""
        try:
            while True:
                responses = self.executor.await_responses()
                loop.call_soon_threadsafe(self._take_in, loop, responses)
        except AdaptrtError as error:
            ended = _copy_of(error)
        # The loop may be closed if the process ends without close().
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._fail_all, ended)

    def _take_in(self, loop: asyncio.AbstractEventLoop, responses: Sequence[Response]) -> None:
        is_delivering = bool(self._arrived)
        self._arrived.extend(responses)
        if not is_delivering:
            self._deliver(loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hands over the responses in time slices, because one engine step may produce very many."""
        slices = TimeSlices()
        while self._arrived:
            if slices.is_over:
                loop.call_soon(self._deliver, loop)
                return
            self._hand_over(self._arrived.popleft())

    def _hand_over(self, response: Response) -> None:
        generation = self._generations[response.request_id]
        self._first_tokens.end(response.request_id)
        generation.accept(response)
        if generation.admitted is not None:
            generation.admitted.note(response)
        if self._observer is not None:
            self._observer.on_response(response)
        if generation.is_over:
            del self._generations[response.request_id]

    def _fail_all(self, error: AdaptrtError) -> None:
        self._closed = error
        while self._arrived:
            self._hand_over(self._arrived.popleft())
        for generation in self._generations.values():
            self._first_tokens.end(generation.request_id)
            generation.fail(error)
            if generation.admitted is not None:
                generation.admitted.end()
            if self._observer is not None:
                self._observer.on_loss(generation.request_id)
        self._generations.clear()


def _copy_of(error: AdaptrtError) -> AdaptrtError:
    """Returns an equal error without traceback: the frames of a stored traceback would keep the executor in memory."""
    return type(error)(*error.args)
