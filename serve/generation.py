"""Text generation for all APIs: from a request's tokens to text."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from types import TracebackType
from typing import Final

from .._core import FinishReason, GuidedDecodingParams, OutputConfig, Request, Result, SamplingConfig
from ..runtime.images.prompt import VirtualPrompt
from ..runtime.pooled import FloatArray
from ..runtime.text_stream import TextStream
from ..runtime.token_log_probs import TokenLogProbs, answer_log_probs, limited, prompt_log_probs
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
"""Names of the finish reasons in OpenAI's API and vLLM."""


@dataclass(frozen=True)
class TextRequest:
    """A request for generated text."""

    prompt: Sequence[int]
    adapter: str | None
    """Name of an adapter that ServedAdapters knows."""
    max_tokens: int
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    """True: the answer also has the stop text or the token of stop_token_ids that ended it."""
    ignore_eos: bool = False
    include_end: bool = False
    """True: the answer's tokens also have the end token or stop token that ended it. Its text does not."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are not generated."""
    skip_special_tokens: bool = True
    """True: the answer's text leaves special tokens out."""
    shown_special: tuple[str, ...] = ()
    """Special tokens that the text has nevertheless."""
    embedding_bias: FloatArray | None = None
    """float32 [vocab_size], including tokens that the adapter adds; added to the logits."""
    guided_decoding_params: GuidedDecodingParams | None = None
    """The guide that the answer must match."""
    top_log_probs: int | None = None
    """Number of most likely tokens to return in addition to the sampled one; None: no log probs."""
    prompt_log_probs: int | None = None
    """The same for the prompt's tokens."""
    priority: float = 0.5
    cache_salt_id: int | None = None
    num_answers: int = 1
    """Number of answers to generate from the prompt, each with its own seed. With beams: number of beams to return."""
    virtual_prompt: VirtualPrompt | None = None
    """Replaces `prompt`, which has image tokens, in the executor; None: the prompt has no images."""

    @property
    def has_beams(self) -> bool:
        """True for a beam search."""
        return self.sampling.beam_width > 1


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text and tokens of one answer since its previous piece."""

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...] = ()
    """One entry per token if they were requested."""
    prompt_log_probs: tuple[TokenLogProbs, ...] | None = None
    """Log probs of the prompt's tokens from the second on. Set in each answer's first piece if they were requested."""
    finish_reason: str | None = None
    """Set in the answer's last piece."""
    stop_reason: str | int | None = None
    """The stop text or stop token that ended the answer, if one did."""
    index: int = 0
    """Index of the answer among the request's answers."""
    offsets: tuple[int, ...] = ()
    """Position of each token's text in the answer's text, in characters."""
    num_cached_tokens: int = field(default=0, compare=False)
    """Number of the prompt's first tokens whose KV was reused instead of computed. It depends on earlier requests."""


class TextGeneration:
    """Answers of one request as they arrive. Leaving its `async with` early cancels the request."""

    def __init__(
        self, request: TextRequest, generation: Generation, texts: Sequence[TextStream], *, has_encoder: bool = False
    ) -> None:
        """Called only by TextGenerator.start. `texts`: one text stream per answer. has_encoder: it reads the prompt."""
        self.turn = asyncio.Lock()
        """Held while results become pieces. Requests that one client makes at once share one lock."""
        self._request = request
        self._generation = generation
        self._answers = [_Answer(request, index, text) for index, text in enumerate(texts)]
        self._num_running = len(self._answers)
        self._has_encoder = has_encoder
        self._prompt_log_probs: tuple[TokenLogProbs, ...] | None = None
        self._pieces: deque[TextPiece] = deque()
        # A result has the log probs of all tokens so far: unread results would fill the memory.
        generation.on_backlog = self._make_pieces

    async def __aenter__(self) -> TextGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._generation.__aexit__(kind, error, traceback)

    def cancel(self) -> None:
        """Cancels the request. The pieces up to its end still arrive."""
        self._generation.cancel()

    @property
    def num_answers(self) -> int:
        """Number of answers; each has its own pieces."""
        return len(self._answers)

    async def __aiter__(self) -> AsyncIterator[TextPiece]:
        """Yields pieces. The last piece of each answer has its finish reason.

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
                # While other requests held the lock, on_backlog may have taken all results and made no piece of them.
                self._make_pieces(self._generation.take_results())

    async def whole(self) -> list[TextPiece]:
        """Returns each answer as one piece."""
        pieces: list[list[TextPiece]] = [[] for _ in self._answers]
        async for piece in self:
            pieces[piece.index].append(piece)
        slices = TimeSlices()
        joined = []
        for answer in self._answers:
            joined.append(answer.joined(pieces[answer.index]))
            await slices.pause()
        return joined

    def _make_pieces(self, results: Sequence[Result]) -> None:
        if self._request.has_beams:
            self._make_pieces_of_beams(results)
            return
        by_answer: dict[int, list[Result]] = {}
        for result in results:
            by_answer.setdefault(result.sequence_index, []).append(result)
        for index in sorted(by_answer):
            answer, new = self._answers[index], by_answer[index]
            # The executor may continue an answer that a stop text has ended, until the other answers end.
            if answer.has_ended:
                continue
            if index == 0 and not answer.has_begun:
                # They arrive with the first result of the first sequence, which precedes the results of the others.
                self._take_prompt_log_probs(new[0])
            self._pieces.append(answer.piece(new, self._prompt_log_probs, num_cached=self._num_cached(new[0])))
            self._num_running -= answer.has_ended

    def _make_pieces_of_beams(self, results: Sequence[Result]) -> None:
        """Makes one piece per beam: the executor returns all beams in one result."""
        for result in results:
            # A search with few allowed tokens can return fewer beams than requested.
            del self._answers[len(result.output_token_ids) :]
            self._take_prompt_log_probs(result)
            for beam, answer in enumerate(self._answers):
                num_cached = self._num_cached(result)
                self._pieces.append(answer.piece([result], self._prompt_log_probs, beam, num_cached=num_cached))
            self._num_running = 0

    def _num_cached(self, result: Result) -> int:
        if self._has_encoder:
            return 0  # the encoder's input is the prompt
        return max(result.num_cached_tokens - self._generation.num_virtual_tokens, 0)

    def _take_prompt_log_probs(self, result: Result) -> None:
        num_tops = self._request.prompt_log_probs
        if num_tops is not None:
            scored = prompt_log_probs(result, self._request.prompt, self._generation.num_virtual_tokens)
            self._prompt_log_probs = None if scored is None else limited(scored, num_tops)


class _Answer:
    """One answer, as far as it has arrived."""

    def __init__(self, request: TextRequest, index: int, text: TextStream) -> None:
        self.index: Final = index
        self.has_begun = False
        self.has_ended = False
        self._request = request
        self._text = text
        self._num_characters = 0

    def joined(self, pieces: Sequence[TextPiece]) -> TextPiece:
        """Joins the answer's pieces to one."""
        return replace(
            pieces[-1],
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            log_probs=self._with_final_offsets(entry for piece in pieces for entry in piece.log_probs),
            prompt_log_probs=pieces[0].prompt_log_probs,
            offsets=tuple(self._text.offsets),
        )

    def _with_final_offsets(self, entries: Iterable[TokenLogProbs]) -> tuple[TokenLogProbs, ...]:
        """Returns the log probs with their final offsets: some token positions were estimates before the text was
        complete.
        """
        # An end token is not part of the text.
        offsets = chain(self._text.offsets, repeat(self._num_characters))
        return tuple(
            entry if entry.text_offset == offset else replace(entry, text_offset=offset)
            for entry, offset in zip(entries, offsets, strict=False)
        )

    def piece(
        self,
        results: Sequence[Result],
        prompt_log_probs: tuple[TokenLogProbs, ...] | None,
        beam: int = 0,
        *,
        num_cached: int = 0,
    ) -> TextPiece:
        """Makes a piece of new results of the answer's sequence."""
        request, text, last = self._request, self._text, results[-1]
        tokens = [token for result in results for token in result.output_token_ids[beam]]
        finish_reason = last.finish_reasons[beam] if last.is_sequence_final else None
        stop_reason: str | int | None = None
        end: int | None = None
        if finish_reason is FinishReason.STOP_WORDS:
            stop_reason = tokens[-1] if tokens[-1] in request.stop_token_ids else None
            if not (request.include_stop and stop_reason is not None):
                end = tokens.pop()
        num_before = len(text.offsets)
        shown = text.add(tokens)
        if text.stopped is None and last.is_sequence_final:
            shown += text.finish()
        reason = None if finish_reason is None else _FINISH_REASONS[finish_reason]
        if text.stopped is not None:
            reason, stop_reason = "stop", text.stopped
        self.has_ended = reason is not None
        # Tokens after a stop text, which may have arrived, are not part of the answer.
        offsets = list(text.offsets[num_before:])
        del tokens[len(offsets) :]
        self._num_characters += len(shown)
        if end is not None and request.include_end and text.stopped is None:
            tokens.append(end)
            offsets.append(self._num_characters)
        log_probs: tuple[TokenLogProbs, ...] = ()
        if request.top_log_probs is not None:
            found = answer_log_probs(results, tokens, num_before, offsets, beam)
            log_probs = limited(found, request.top_log_probs)
        of_prompt = None if self.has_begun else prompt_log_probs
        self.has_begun = True
        return TextPiece(
            shown, tuple(tokens), log_probs, of_prompt, reason, stop_reason, self.index, tuple(offsets), num_cached
        )


class TextGenerator:
    """Starts text requests on the executor."""

    def __init__(
        self,
        adapters: ServedAdapters,
        tokenizers: ServedTokenizers,
        limit_seconds: float,
        decoder_start: Sequence[int] | None = None,
    ) -> None:
        """tokenizers: also give the end tokens, unless a request ignores them.

        limit_seconds: time limit of each request; 0: no limit. decoder_start: tokens that the decoder begins with if
        the model has an encoder, which reads the prompt; None: no encoder.
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
            texts.append(
                TextStream(
                    own.vocabulary,
                    request.stop,
                    skip_special_tokens=request.skip_special_tokens,
                    include_stop=request.include_stop,
                    shown_special=request.shown_special,
                )
            )
            await slices.pause()
        generation = await self._adapters.submit(self.executor_request(request, own.end_ids), request.adapter)
        return TextGeneration(request, generation, texts, has_encoder=self._decoder_start is not None)

    def executor_request(self, request: TextRequest, end_ids: tuple[int, ...]) -> Request:
        """Returns the request for the executor. end_ids: tokens that end its tokenizer's texts."""
        end_ids = () if request.ignore_eos else end_ids
        # A request has only one end_id, which is not part of its output. Other end tokens become stop words, which
        # piece() removes from the output again.
        end_id = end_ids[0] if end_ids and not request.include_end else None
        stop_ids = [token for token in (*end_ids, *request.stop_token_ids) if token != end_id]
        start, virtual = self._decoder_start, request.virtual_prompt
        prompt = request.prompt if virtual is None else virtual.ids
        return Request(
            list(prompt if start is None else start),
            request.max_tokens,
            encoder_input_token_ids=None if start is None else list(request.prompt),
            streaming=not request.has_beams,  # beams end together
            sampling_config=request.sampling,
            output_config=OutputConfig(
                return_log_probs=request.top_log_probs is not None,
                top_log_probs=max(request.top_log_probs or 0, request.prompt_log_probs or 0),
                return_prompt_log_probs=request.prompt_log_probs is not None,
                exclude_input_from_output=True,
            ),
            end_id=end_id,
            stop_words=[[token] for token in dict.fromkeys(stop_ids)] or None,
            bad_words=[list(tokens) for tokens in request.bad_words] or None,
            embedding_bias=request.embedding_bias,
            guided_decoding_params=request.guided_decoding_params,
            allotted_time_ms=self._limit_ms,
            priority=request.priority,
            num_return_sequences=request.num_answers,
            cache_salt_id=request.cache_salt_id,
            prompt_tuning_config=None if virtual is None else virtual.rows,
        )
