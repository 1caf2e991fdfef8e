"""The answers to one prompt: their tokens as text, waited for at once, piece by piece, or on an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor as Workers
from dataclasses import dataclass

from .._core import ExecutorClosedError, FinishReason, RequestError, Result
from .executor import Executor
from .text_stream import TextStream


@dataclass(frozen=True)
class Completion:
    """What one prompt gave, or one of several things that it gave."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class Answer:
    """A request that runs, and the texts of its sequences so far."""

    def __init__(
        self, executor: Executor, request_id: int, texts: Sequence[TextStream], end_ids: Sequence[int]
    ) -> None:
        """One text a sequence, or beam that is returned. `end_ids` end one and are not part of it."""
        self._executor = executor
        self._request_id = request_id
        self._sequences = [_SequenceText(text, end_ids) for text in texts]
        self._is_running = True

    @property
    def is_final(self) -> bool:
        """Whether all of the texts are there."""
        return all(sequence.is_final for sequence in self._sequences)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sequence ended; NOT_FINISHED before that."""
        return self._sequences[0].finish_reason

    def next_text(self) -> str:
        """Waits for the next tokens and returns what may be shown of the first sequence with them.

        Raises RequestError if the request failed.
        """
        text = ""
        for response in self._executor.await_responses(self._request_id):
            if response.has_error():
                self._is_running = False
                raise RequestError(f"request {response.request_id}: {response.error_msg}")
            result = response.result
            self._is_running = not result.is_final
            for beam, output in enumerate(result.output_token_ids):
                shown = self._sequences[result.sequence_index + beam].take(result, output, beam)
                if result.sequence_index + beam == 0:
                    text += shown
            if result.is_final and not self.is_final:
                # A search in which few tokens are allowed can have fewer beams than were asked for.
                del self._sequences[len(result.output_token_ids) :]
        if self.is_final:
            self.close()
        return text

    def completions(self) -> list[Completion]:
        """All of them, when they are final."""
        return [sequence.completion() for sequence in self._sequences]

    def cancel(self) -> None:
        """Ends the request, from any thread; who waits for its text gets what there is."""
        with contextlib.suppress(RequestError, ExecutorClosedError):
            self._executor.cancel_request(self._request_id)

    def close(self) -> None:
        """Cancels the request and takes its last response, so that nothing of it stays behind."""
        if not self._is_running:
            return
        self._is_running = False
        # The executor may be closed: then there is nothing to do.
        with contextlib.suppress(RequestError, ExecutorClosedError):
            self._executor.cancel_request(self._request_id)
            while not any(
                response.has_error() or response.result.is_final
                for response in self._executor.await_responses(self._request_id)
            ):
                pass


class _SequenceText:
    """One sequence's text so far."""

    def __init__(self, stream: TextStream, end_ids: Sequence[int]) -> None:
        self._stream = stream
        self._end_ids = end_ids
        self._tokens: list[int] = []
        self._text: list[str] = []
        self.finish_reason = FinishReason.NOT_FINISHED

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not FinishReason.NOT_FINISHED

    def completion(self) -> Completion:
        return Completion("".join(self._text), tuple(self._tokens), self.finish_reason)

    def take(self, result: Result, output: Sequence[int], beam: int) -> str:
        """What may be shown with the sequence's next result, of which `output` are the beam's tokens."""
        text = ""
        for token in output:
            if self.is_final:
                break
            # The token that ends a text is not part of it.
            if token not in self._end_ids:
                self._tokens.append(token)
                text += self._stream.add([token])
            if self._stream.stopped is not None:
                self.finish_reason = FinishReason.STOP_WORDS
        if result.is_sequence_final and not self.is_final:
            text += self._stream.finish()
            is_stopped = self._stream.stopped is not None
            self.finish_reason = FinishReason.STOP_WORDS if is_stopped else result.finish_reasons[beam]
        self._text.append(text)
        return text


class AnswerStream(Iterator[str]):
    """The pieces of an answer's text, as they come."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self._made: list[Answer] = []
        self._pieces = _pieces(ask, self._made)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended; NOT_FINISHED before that."""
        return self._made[0].finish_reason if self._made else FinishReason.NOT_FINISHED

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the stream, and cancels its request."""
        self._pieces.close()


# A function, not a method: the stream is given up with the last reference to it, and a method's generator would be one.
def _pieces(ask: Callable[[], Answer], made: list[Answer]) -> Generator[str, None, None]:
    answer = ask()
    made.append(answer)
    try:
        while not answer.is_final:
            if text := answer.next_text():
                yield text
    finally:
        answer.close()


class AsyncAnswer(AsyncIterator[str]):
    """An answer on an asyncio loop: awaited, its Completion; iterated over, the pieces of its text as they come.

    It is cancelled with the task that waits for it, with cancel(), and when nobody refers to it any more.
    """

    def __init__(self, answer: Answer, workers: Workers) -> None:
        """For LLM.generate_async, on a running loop. A thread of `workers` waits for the answer to its end."""
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._cancel = weakref.finalize(self, answer.cancel)
        self._cancel.atexit = False
        self._completion = loop.run_in_executor(workers, _follow, answer, loop, self._pieces)

    def cancel(self) -> None:
        """Ends the request with what it has, as FinishReason.CANCELLED. Without effect when it has ended."""
        self._cancel()

    def __await__(self) -> Generator[None, None, Completion]:
        return self._wait().__await__()

    async def __anext__(self) -> str:
        with self._cancelling():
            piece = await self._pieces.get()
        if piece is None:
            self._pieces.put_nowait(None)  # for those who ask again
            await self._wait()
            raise StopAsyncIteration
        return piece

    async def _wait(self) -> Completion:
        with self._cancelling():
            return await asyncio.shield(self._completion)

    @contextlib.contextmanager
    def _cancelling(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            self.cancel()
            raise


# A function, not a method: an answer that nobody refers to is cancelled, and a method would refer to it.
def _follow(answer: Answer, loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[str | None]) -> Completion:
    def put(piece: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be gone
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    try:
        while not answer.is_final:
            if text := answer.next_text():
                put(text)
        return answer.completions()[0]
    finally:
        answer.close()
        put(None)
