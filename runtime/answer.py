"""Answers to one prompt as text: complete, piece by piece, or on an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor as Workers
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

from .._core import ExecutorClosedError, FinishReason, RequestError, RequestPerfMetrics, Result
from .executor import Executor
from .text_stream import TextStream
from .token_log_probs import TokenLogProbs, answer_log_probs, limited, prompt_log_probs


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt."""

    text: str
    token_ids: tuple[int, ...]
    """Generated tokens; see SamplingParams.include_eos for the last one."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop text or the token of stop_token_ids that ended the text, if one did."""
    log_probs: tuple[TokenLogProbs, ...] | None = field(default=None, repr=False)
    """One entry per token of token_ids; None: SamplingParams.logprobs was not given."""
    prompt_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """Tokens of the prompt, without an adapter's virtual tokens."""
    prompt_log_probs: tuple[TokenLogProbs, ...] | None = field(default=None, repr=False)
    """Log probs of the prompt's tokens from the second on; None: SamplingParams.prompt_logprobs was not given."""
    adapter: str | None = None
    """Name of the adapter, or the weighted sum; None: the base model."""
    num_cached_tokens: int = field(default=0, compare=False, repr=False)
    """Number of the prompt's first tokens whose KV was reused instead of computed. It depends on earlier requests."""
    request_perf_metrics: RequestPerfMetrics | None = field(default=None, compare=False, repr=False)
    """Times and KV cache blocks of the request; None: SamplingParams.return_perf_metrics was not given."""

    @property
    def cumulative_log_prob(self) -> float | None:
        """Sum of the log probs; None without log probs."""
        return None if self.log_probs is None else sum(entry.log_prob for entry in self.log_probs)


@dataclass(frozen=True)
class AnswerForm:
    """The parts of results that an answer's completions have."""

    prompt: tuple[int, ...]
    adapter: str | None
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text."""
    stop_token_ids: tuple[int, ...] = ()
    """Other tokens that end a text."""
    include_end_in_tokens: bool = False
    """True: token_ids has the token that ended the text."""
    include_stop_in_text: bool = False
    """True: text and token_ids have the token of stop_token_ids that ended the text."""
    num_log_probs: int | None = None
    num_prompt_log_probs: int | None = None
    num_virtual_tokens: int = 0
    has_encoder: bool = False
    """True: an encoder reads the prompt, so none of its tokens is cached."""


class Answer:
    """A running request, and the texts of its sequences so far."""

    def __init__(self, executor: Executor, request_id: int, texts: Sequence[TextStream], form: AnswerForm) -> None:
        """texts: one stream per sequence or returned beam."""
        self._executor = executor
        self._request_id = request_id
        self._form = form
        self._sequences = [_SequenceText(text, form) for text in texts]
        self._prompt_log_probs: tuple[TokenLogProbs, ...] | None = None
        self._num_cached = 0
        self._metrics: RequestPerfMetrics | None = None
        self._is_running = True

    @property
    def is_final(self) -> bool:
        """True if all texts are complete."""
        return all(sequence.is_final for sequence in self._sequences)

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why the first sequence ended; NOT_FINISHED before its end."""
        return self._sequences[0].finish_reason

    def next_text(self) -> str:
        """Waits for the next tokens. Returns the new text of the first sequence that can be shown.

        Raises RequestError if the request failed.
        """
        text = ""
        for response in self._executor.await_responses(self._request_id):
            if response.has_error():
                self._is_running = False
                raise RequestError(f"request {response.request_id}: {response.error_msg}")
            result = response.result
            self._is_running = not result.is_final
            self._metrics = result.request_perf_metrics
            if not self._form.has_encoder:
                self._num_cached = max(result.num_cached_tokens - self._form.num_virtual_tokens, 0)
            if self._form.num_prompt_log_probs is not None and result.prompt_log_probs is not None:
                scored = prompt_log_probs(result, self._form.prompt, self._form.num_virtual_tokens)
                self._prompt_log_probs = limited(scored or (), self._form.num_prompt_log_probs)
            for beam, output in enumerate(result.output_token_ids):
                shown = self._sequences[result.sequence_index + beam].take(result, output, beam)
                if result.sequence_index + beam == 0:
                    text += shown
            if result.is_final and not self.is_final:
                # A beam search with few allowed tokens can return fewer beams than requested.
                del self._sequences[len(result.output_token_ids) :]
        if self.is_final:
            self.close()
        return text

    def completions(self) -> list[Completion]:
        """Returns all answers once they are complete."""
        return [
            replace(
                sequence.completion(self._prompt_log_probs),
                num_cached_tokens=self._num_cached,
                request_perf_metrics=self._metrics,
            )
            for sequence in self._sequences
        ]

    def cancel(self) -> None:
        """Ends the request; any thread may call it. Waiting callers get the text so far."""
        with contextlib.suppress(RequestError, ExecutorClosedError):
            self._executor.cancel_request(self._request_id)

    def close(self) -> None:
        """Cancels the request and takes its last response, so that nothing of it stays in the executor."""
        if not self._is_running:
            return
        self._is_running = False
        # The executor may be closed already.
        with contextlib.suppress(RequestError, ExecutorClosedError):
            self._executor.cancel_request(self._request_id)
            while not any(
                response.has_error() or response.result.is_final
                for response in self._executor.await_responses(self._request_id)
            ):
                pass


class _SequenceText:
    """The text of one sequence so far."""

    def __init__(self, stream: TextStream, form: AnswerForm) -> None:
        self._stream = stream
        self._form = form
        self._tokens: list[int] = []
        self._log_probs: list[TokenLogProbs] = []
        self._stop_reason: str | int | None = None
        self._text: list[str] = []
        self.finish_reason = FinishReason.NOT_FINISHED

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not FinishReason.NOT_FINISHED

    def completion(self, of_prompt: tuple[TokenLogProbs, ...] | None) -> Completion:
        form, text = self._form, "".join(self._text)
        log_probs: tuple[TokenLogProbs, ...] | None = None
        if form.num_log_probs is not None:
            # Some offsets were estimates before the text was complete. An end token is not part of the text.
            offsets = chain(self._stream.offsets, repeat(len(text)))
            log_probs = tuple(
                replace(entry, text_offset=offset) for entry, offset in zip(self._log_probs, offsets, strict=False)
            )
        return Completion(
            text,
            tuple(self._tokens),
            self.finish_reason,
            self._stop_reason,
            log_probs,
            form.prompt,
            of_prompt,
            form.adapter,
        )

    def take(self, result: Result, output: Sequence[int], beam: int) -> str:
        """Adds a result of the sequence and returns the new text that can be shown. output: tokens of the beam."""
        form, text, num_before = self._form, "", len(self._tokens)
        last: int | None = None
        for token in output:
            if self.is_final:
                break
            last = token
            is_end = token in form.end_ids or token in form.stop_token_ids
            is_shown = not is_end or (form.include_stop_in_text and token in form.stop_token_ids)
            if is_shown or form.include_end_in_tokens:
                self._tokens.append(token)
            if is_shown:
                text += self._stream.add([token])
            if self._stream.stopped is not None:
                self.finish_reason = FinishReason.STOP_WORDS
        if form.num_log_probs is not None:
            new = self._tokens[num_before:]
            entries = answer_log_probs([result], new, num_before, [0] * len(new), beam)
            self._log_probs += limited(entries, form.num_log_probs)
        if result.is_sequence_final and not self.is_final:
            text += self._stream.finish()
            is_stopped = self._stream.stopped is not None
            self.finish_reason = FinishReason.STOP_WORDS if is_stopped else result.finish_reasons[beam]
            if self.finish_reason is FinishReason.STOP_WORDS and not is_stopped:
                self._end_with(last)
        self._stop_reason = self._stop_reason if self._stream.stopped is None else self._stream.stopped
        self._text.append(text)
        return text

    def _end_with(self, token: int | None) -> None:
        """Notes the token that ended the sequence."""
        form = self._form
        if token in form.stop_token_ids and token not in form.end_ids:
            self._stop_reason = token
        elif form.include_end_in_tokens and token == form.end_ids[0]:
            # The request has it as a stop word then, so that it is part of the output.
            self.finish_reason = FinishReason.END_ID


class AnswerStream(Iterator[str]):
    """Iterates over the pieces of an answer's text as they arrive."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self._made: list[Answer] = []
        self._pieces = _pieces(ask, self._made)

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why the answer ended; NOT_FINISHED before its end."""
        return self._made[0].finish_reason if self._made else FinishReason.NOT_FINISHED

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the stream and cancels its request."""
        self._pieces.close()


# A function, not a method: a method's generator would hold a reference to the stream, so the stream would never be
# deleted.
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
    """An answer on an asyncio loop. Awaiting it returns its Completion; iterating over it returns the pieces of its
    text.

    The request is cancelled by cancel(), with the task that waits for it, and when the object is deleted.
    """

    def __init__(self, answer: Answer, workers: Workers) -> None:
        """Called by LLM.generate_async on a running loop. A thread of `workers` waits for the answer."""
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._cancel = weakref.finalize(self, answer.cancel)
        self._cancel.atexit = False
        self._completion = loop.run_in_executor(workers, _follow, answer, loop, self._pieces)

    def cancel(self) -> None:
        """Ends the request with the text so far, as FinishReason.CANCELLED. Does nothing if it has ended."""
        self._cancel()

    def __await__(self) -> Generator[None, None, Completion]:
        return self._wait().__await__()

    async def __anext__(self) -> str:
        with self._cancelling():
            piece = await self._pieces.get()
        if piece is None:
            self._pieces.put_nowait(None)  # for later calls
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


# A function, not a method: a method would hold a reference to the answer, so the answer would never be deleted and
# cancelled.
def _follow(answer: Answer, loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[str | None]) -> Completion:
    def put(piece: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    try:
        while not answer.is_final:
            if text := answer.next_text():
                put(text)
        return answer.completions()[0]
    finally:
        answer.close()
        put(None)
