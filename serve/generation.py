"""From a request's tokens to text: what every surface asks of the executor, once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from types import TracebackType
from typing import Final

from .._core import FinishReason, GuidedDecodingParams, OutputConfig, Request, Result, SamplingConfig
from ..runtime.pooled import FloatArray
from ..runtime.text_stream import TextStream
from .adapters import ServedAdapters
from .async_executor import Generation
from .time_slices import TimeSlices
from .tokenizers_of_adapters import ServedTokenizers

_FINISH_REASONS: Final = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "abort",
    FinishReason.CANCELLED: "abort",
}
"""As OpenAI and vLLM name them."""


@dataclass(frozen=True)
class TextRequest:
    """What a surface wants generated."""

    prompt: Sequence[int]
    adapter: str | None
    """A name that ServedAdapters knows."""
    max_tokens: int
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Whether the answer's text leaves special tokens out."""
    embedding_bias: FloatArray | None = None
    """float32 [vocab_size], new tokens of the adapter included, added to the logits."""
    guided_decoding_params: GuidedDecodingParams | None = None
    """What the answer has to be like."""
    top_log_probs: int | None = None
    """None: no log probs; else how many of the most likely tokens beside the one that was drawn."""
    prompt_log_probs: bool = False
    priority: float = 0.5
    cache_salt_id: int | None = None
    num_answers: int = 1
    """That are generated from the prompt, each with a seed of its own."""


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Of one token: its own log prob, and the most likely ones there."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log prob), the likeliest first."""
    text_offset: int = 0
    """Where the token's text begins: characters from the beginning of the answer; 0 for a prompt's tokens."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What has come since the piece before."""

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...] = ()
    """One a token, where they were asked for."""
    prompt_log_probs: tuple[TokenLogProbs, ...] | None = None
    """Of the prompt's tokens from the second on; with each answer's first piece, where they were asked for."""
    finish_reason: str | None = None
    """With the last piece."""
    stop_reason: str | int | None = None
    """The stop text or the stop token that ended it, where one did."""
    index: int = 0
    """Of the request's answers."""


class TextGeneration:
    """A request's answers as they come. Leaving its `async with` early frees the request."""

    def __init__(self, request: TextRequest, generation: Generation, texts: Sequence[TextStream]) -> None:
        """For TextGenerator.start. One text an answer."""
        self.turn = asyncio.Lock()
        """Held while results become pieces; for requests that one client makes at once, the same one."""
        self._request = request
        self._generation = generation
        self._answers = [_Answer(request, index, text) for index, text in enumerate(texts)]
        self._num_running = len(self._answers)
        self._prompt_log_probs: tuple[TokenLogProbs, ...] | None = None
        self._pieces: deque[TextPiece] = deque()
        # A result has the log probs of all tokens so far: many of them would fill the memory where nobody reads.
        generation.on_backlog = self._make_pieces

    async def __aenter__(self) -> TextGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._generation.__aexit__(kind, error, traceback)

    @property
    def num_answers(self) -> int:
        """Each has pieces of its own."""
        return len(self._answers)

    async def __aiter__(self) -> AsyncIterator[TextPiece]:
        """The last piece of each answer says why it ended.

        Raises RequestError and ExecutorClosedError when the request fails.
        """
        slices = TimeSlices()
        while True:
            while self._pieces:
                yield self._pieces.popleft()
                if self._pieces:
                    await slices.pause()
            if not self._num_running:
                return
            if await self._generation.wait():
                slices.begin()
            else:
                await slices.pause()
            async with self.turn:
                # While others had their turn, on_backlog may have taken all results, and made no piece of them.
                self._make_pieces(self._generation.take_results())

    async def whole(self) -> list[TextPiece]:
        """Each whole answer as one piece."""
        pieces: list[list[TextPiece]] = [[] for _ in self._answers]
        async for piece in self:
            pieces[piece.index].append(piece)
        slices = TimeSlices()
        joined = []
        for answer, of_answer in zip(self._answers, pieces, strict=True):
            joined.append(answer.joined(of_answer))
            await slices.pause()
        return joined

    def _make_pieces(self, results: Sequence[Result]) -> None:
        by_answer: dict[int, list[Result]] = {}
        for result in results:
            by_answer.setdefault(result.sequence_index, []).append(result)
        for index in sorted(by_answer):
            answer, new = self._answers[index], by_answer[index]
            # An answer that a stop text has ended may go on in the executor until the others have ended.
            if answer.has_ended:
                continue
            if self._request.prompt_log_probs and index == 0 and not answer.has_begun:
                # They come with the first sequence's first result, which is before those of the others.
                self._prompt_log_probs = _prompt_log_probs(
                    new[0], self._request.prompt, self._generation.num_virtual_tokens
                )
            self._pieces.append(answer.piece(new, self._prompt_log_probs))
            self._num_running -= answer.has_ended


class _Answer:
    """One of a request's answers, as far as it has come."""

    def __init__(self, request: TextRequest, index: int, text: TextStream) -> None:
        self.index: Final = index
        self.has_begun = False
        self.has_ended = False
        self._request = request
        self._text = text

    def joined(self, pieces: Sequence[TextPiece]) -> TextPiece:
        """All of its pieces as one."""
        return replace(
            pieces[-1],
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            log_probs=self._with_final_offsets(entry for piece in pieces for entry in piece.log_probs),
            prompt_log_probs=pieces[0].prompt_log_probs,
        )

    def _with_final_offsets(self, entries: Iterable[TokenLogProbs]) -> tuple[TokenLogProbs, ...]:
        """The answer's log probs, where its whole text is known: some places of tokens were guesses before."""
        return tuple(
            entry if entry.text_offset == offset else replace(entry, text_offset=offset)
            for entry, offset in zip(entries, self._text.offsets, strict=False)
        )

    def piece(self, results: Sequence[Result], prompt_log_probs: tuple[TokenLogProbs, ...] | None) -> TextPiece:
        """What new results of its sequence make of it."""
        request, text, last = self._request, self._text, results[-1]
        tokens = [token for result in results for token in result.output_token_ids[0]]
        finish_reason = last.finish_reasons[0] if last.is_sequence_final else None
        stop_reason: str | int | None = None
        if finish_reason is FinishReason.STOP_WORDS:
            ended_by = tokens.pop()
            stop_reason = ended_by if ended_by in request.stop_token_ids else None
        num_before = len(text.offsets)
        shown = text.add(tokens)
        if text.stopped is None and last.is_sequence_final:
            shown += text.finish()
        reason = None if finish_reason is None else _FINISH_REASONS[finish_reason]
        if text.stopped is not None:
            reason, stop_reason = "stop", text.stopped
        self.has_ended = reason is not None
        # Those after a stop text may or may not be here yet: they are not part of the answer.
        offsets = text.offsets[num_before:]
        del tokens[len(offsets) :]
        log_probs = _log_probs(results, tokens, num_before, offsets) if request.top_log_probs is not None else ()
        of_prompt = None if self.has_begun else prompt_log_probs
        self.has_begun = True
        return TextPiece(shown, tuple(tokens), log_probs, of_prompt, reason, stop_reason, self.index)


class TextGenerator:
    """Starts text requests on the executor."""

    def __init__(
        self,
        adapters: ServedAdapters,
        tokenizers: ServedTokenizers,
        limit_seconds: float,
        decoder_start: Sequence[int] | None = None,
    ) -> None:
        """`tokenizers` say what ends an answer as well, unless its request ignores that.

        A request gets `limit_seconds` at most; 0: no limit. decoder_start: what the decoder begins with, of a model
        whose encoder is given the prompts; None: there is no encoder, it begins with the prompt.
        """
        self._adapters = adapters
        self._tokenizers = tokenizers
        self._limit_ms = limit_seconds * 1000 if limit_seconds > 0 else None
        self._decoder_start = decoder_start

    async def start(self, request: TextRequest) -> TextGeneration:
        """Queues the request. Raises ApiError, and AdaptrtError as Executor.enqueue_request does."""
        own = await self._tokenizers.of(request.adapter)
        slices = TimeSlices()
        texts = []
        for _ in range(request.num_answers):
            texts.append(TextStream(own.vocabulary, request.stop, skip_special_tokens=request.skip_special_tokens))
            await slices.pause()
        generation = await self._adapters.submit(self._executor_request(request, own.end_ids), request.adapter)
        return TextGeneration(request, generation, texts)

    def _executor_request(self, request: TextRequest, end_ids: tuple[int, ...]) -> Request:
        end_ids = () if request.ignore_eos else end_ids
        # A request has one end_id; other tokens that end it are stop words, cut off again in the output.
        stop_ids = (*end_ids[1:], *request.stop_token_ids)
        start = self._decoder_start
        return Request(
            list(request.prompt if start is None else start),
            request.max_tokens,
            encoder_input_token_ids=None if start is None else list(request.prompt),
            streaming=True,
            sampling_config=request.sampling,
            output_config=OutputConfig(
                return_log_probs=request.top_log_probs is not None,
                top_log_probs=request.top_log_probs or 0,
                return_prompt_log_probs=request.prompt_log_probs,
                exclude_input_from_output=True,
            ),
            end_id=end_ids[0] if end_ids else None,
            stop_words=[[token] for token in stop_ids] or None,
            embedding_bias=request.embedding_bias,
            guided_decoding_params=request.guided_decoding_params,
            allotted_time_ms=self._limit_ms,
            priority=request.priority,
            num_return_sequences=request.num_answers,
            cache_salt_id=request.cache_salt_id,
        )


def _log_probs(
    results: Sequence[Result], tokens: Sequence[int], num_before: int, offsets: Sequence[int]
) -> tuple[TokenLogProbs, ...]:
    """Of `tokens`, those that are new in results; there were `num_before` before."""
    # Each result has the log probs of all tokens so far, but the most likely tokens of its own alone.
    log_probs = (results[-1].log_probs or [[]])[0][num_before:]
    tops = [top for result in results for top in (result.top_log_probs or [[]])[0]]
    return tuple(
        TokenLogProbs(token, log_prob, tuple(top), offset)
        for token, log_prob, top, offset in zip(tokens, log_probs, tops or repeat(()), offsets, strict=False)
    )


def _prompt_log_probs(
    result: Result, prompt: Sequence[int], num_virtual_tokens: int
) -> tuple[TokenLogProbs, ...] | None:
    """Of the prompt's tokens from the second on; None when the request ended before they were computed.

    Virtual tokens before it have some in the result, and none here.
    """
    if result.prompt_log_probs is None:
        return None
    log_probs = result.prompt_log_probs[num_virtual_tokens:]
    tops = result.prompt_top_log_probs[num_virtual_tokens:] if result.prompt_top_log_probs else repeat(())
    return tuple(
        TokenLogProbs(token, log_prob, tuple(top))
        for token, log_prob, top in zip(prompt[1:], log_probs, tops, strict=False)
    )
