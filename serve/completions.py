"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ..runtime.adapter_tokenizers import TextTokenizer
from ..runtime.text_stream import TextStream, prompt_offsets
from ..runtime.token_log_probs import limited
from .errors import ApiError
from .generation import TextGeneration, TextPiece, TextRequest
from .http import EventStream, unless_disconnected
from .json_answer import Items, JsonAnswer
from .openai_answers import CompletionLogProbs, answer_id, events, merged, prompt_log_prob_entries, usage
from .openai_fields import CompletionRequest
from .openai_guides import guide_of
from .openai_requests import (
    adapter_of,
    answer_length,
    check_answer_limits,
    check_can_score_prompts,
    embedding_bias_of,
    longest_prompt,
    read_fields,
    start_all,
    text_request,
    truncation_of,
)
from .receipts import ReceiptMaker, receipt_field
from .service import Service
from .time_slices import TimeSlices
from .work import WorkKind

LONG_PROMPT: Final = 256
"""Tokens; a longer prompt is decoded in a thread, because the loop would be blocked."""


@dataclass(frozen=True)
class _Prompt:
    """One prompt of the request, and its echo."""

    token_ids: list[int]
    text: str = ""
    offsets: Sequence[int] = ()
    """Position in the text where each token's text begins."""


async def complete(service: Service, request: Request) -> Response:
    """Answers a request for completions. Each prompt is one executor request with n sequences."""
    fields = await read_fields(service, request, CompletionRequest)
    return await unless_disconnected(request, _answered(service, fields))


async def _answered(service: Service, fields: CompletionRequest) -> Response:
    limit = service.options.limits.max_prompts
    if len(fields.prompt) > limit:
        raise ApiError(f"prompt has {len(fields.prompt)} prompts; at most {limit} are accepted", param="prompt")
    check_can_score_prompts(service, fields.prompt_logprobs)
    if fields.echo and fields.logprobs is not None and service.decoder_start is not None:
        raise ApiError(
            "echo is given with logprobs; the model's encoder reads the prompt, whose tokens have no log probs",
            param="echo",
        )
    adapter = await adapter_of(service, fields)
    own = await service.tokenizers.of(adapter)
    slices = TimeSlices()
    prompts = []
    for prompt in fields.prompt:
        prompts.append(await _prompt(service, fields, adapter, own, prompt))
        await slices.pause()
    check_answer_limits(
        service.options.limits,
        fields.n,
        [len(prompt.token_ids) for prompt in prompts],
        [max(fields.max_tokens, 1)] * len(prompts),
        fields.logprobs,
        _prompt_log_probs(fields),
    )
    answer = _Answer(service, fields, adapter, own, prompts)
    requests = await answer.requests(await service.vocab_size_of(adapter))
    answer.receipt = await ReceiptMaker.of(service, fields, requests, own)
    async with AsyncExitStack() as stack:
        generations = await start_all(service, requests, stack)
        if fields.stream:
            kept = stack.pop_all()
            return EventStream(events(answer.chunks(merged(generations, kept))), kept)
        pieces = await _all(generations)
    return JsonAnswer(answer.whole(pieces))


async def _all(generations: Sequence[TextGeneration]) -> list[TextPiece]:
    # All generations run at the same time, so the order of waiting does not matter.
    slices = TimeSlices()
    pieces: list[TextPiece] = []
    first = 0
    for generation in generations:
        num_answers = generation.num_answers
        pieces += [replace(piece, index=first + piece.index) for piece in await generation.whole()]
        first += num_answers
        await slices.pause()
    return pieces


def _prompt_log_probs(fields: CompletionRequest) -> int | None:
    """Returns the number of most likely tokens at each position of the prompts; None: no log probs."""
    numbers = (fields.prompt_logprobs, fields.logprobs if fields.echo else None)
    return max((number for number in numbers if number is not None), default=None)


async def _prompt(
    service: Service, fields: CompletionRequest, adapter: str | None, own: TextTokenizer, prompt: str | list[int]
) -> _Prompt:
    # The executor always generates at least one token; without an answer it is thrown away.
    lengths = await service.lengths_of(adapter)
    num_tokens = max(fields.max_tokens, 1)
    truncation = truncation_of(fields, longest_prompt(service, lengths, num_tokens), "left")
    if isinstance(prompt, str):
        token_ids = await service.prompts.tokenize(
            prompt, adapter, add_special_tokens=fields.add_special_tokens, param="prompt", truncation=truncation
        )
    else:
        token_ids = prompt if truncation is None else truncation.cut(prompt)
    if truncation is not None:
        prompt = token_ids  # only the tokens that stay are echoed
    answer_length(service, len(token_ids), num_tokens, lengths=lengths, param="prompt")
    if not fields.echo:
        return _Prompt(token_ids)
    if len(token_ids) <= LONG_PROMPT:
        return _echoed(own, prompt, token_ids, fields)
    return await service.executor.work.run(WorkKind.TEXTS, _echoed, own, prompt, token_ids, fields)


def _echoed(own: TextTokenizer, prompt: str | list[int], token_ids: list[int], fields: CompletionRequest) -> _Prompt:
    """Returns the prompt with the text that is echoed and its tokens' places there."""
    if not isinstance(prompt, str):
        return _Prompt(token_ids, *_decoded(own, token_ids, fields.skip_special_tokens))
    if fields.logprobs is None:
        return _Prompt(token_ids, prompt)
    offsets = prompt_offsets(own.vocabulary, prompt, add_special_tokens=fields.add_special_tokens)
    return _Prompt(token_ids, prompt, offsets)


def _decoded(own: TextTokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> tuple[str, Sequence[int]]:
    stream = TextStream(own.vocabulary, skip_special_tokens=skip_special_tokens)
    text = stream.add(token_ids) + stream.finish()
    return text, stream.offsets


class _Answer:
    """The answer to one request, whole or in chunks."""

    def __init__(
        self,
        service: Service,
        fields: CompletionRequest,
        adapter: str | None,
        own: TextTokenizer,
        prompts: Sequence[_Prompt],
    ) -> None:
        self._service = service
        self._fields = fields
        self._adapter = adapter
        self._own = own
        self._prompts = prompts
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.receipt: ReceiptMaker | None = None
        """Makes the receipt if the client asks for one."""
        self._cached: dict[int, int] = {}
        """Number of cached tokens of each prompt whose answers have begun."""
        self._head = {
            "id": answer_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.shown_model(adapter),
        }

    async def requests(self, vocab_size: int) -> list[TextRequest]:
        """Makes one request per prompt."""
        fields = self._fields
        guide = guide_of(fields)
        bias = embedding_bias_of(fields, vocab_size)
        slices = TimeSlices()
        requests = []
        for prompt in self._prompts:
            asked = text_request(
                self._service,
                fields,
                prompt=prompt.token_ids,
                adapter=self._adapter,
                own=self._own,
                embedding_bias=bias,
                max_tokens=max(fields.max_tokens, 1),
                top_log_probs=fields.logprobs,
                prompt_log_probs=_prompt_log_probs(fields),
                guide=guide,
            )
            requests.append(asked)
            await slices.pause()
        return requests

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """Returns the answer without streaming."""
        self._cached = {piece.index // self._fields.n: piece.num_cached_tokens for piece in pieces}
        choices = Items(self._choice(piece.index, piece, is_first=True) for piece in pieces)
        num_tokens = sum(len(piece.token_ids) for piece in pieces) if self._fields.max_tokens else 0
        return self._head | {"choices": choices, "usage": self._usage(num_tokens)} | receipt_field(self.receipt, pieces)

    async def chunks(self, pieces: AsyncIterator[tuple[int, TextPiece]]) -> AsyncIterator[dict[str, Any]]:
        """Yields one chunk per piece, and the token counts at the end."""
        options = self._fields.stream_options
        with_usage = options is not None and options.include_usage
        always = options is not None and options.include_usage and options.continuous_usage_stats
        begun = set()
        num_tokens = 0
        async for i, piece in pieces:
            num_tokens += len(piece.token_ids) if self._fields.max_tokens else 0
            self._cached[i // self._fields.n] = piece.num_cached_tokens
            if self.receipt is not None:
                self.receipt.add(i, piece)
            choice = self._choice(i, piece, is_first=i not in begun)
            begun.add(i)
            chunk = self._head | {"choices": [choice]}
            if always:
                chunk["usage"] = self._usage(num_tokens)
            yield chunk
        if self.receipt is not None:
            yield self._head | {"choices": []} | receipt_field(self.receipt)
        if with_usage:
            yield self._head | {"choices": [], "usage": self._usage(num_tokens)}

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        return usage(self._num_prompt_tokens, num_tokens, num_cached_tokens=sum(self._cached.values()))

    def _choice(self, index: int, piece: TextPiece, *, is_first: bool) -> dict[str, Any]:
        fields = self._fields
        prompt = self._prompts[index // fields.n]
        has_answer = fields.max_tokens > 0
        text = piece.text if has_answer else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt.text + text if is_first else text,
            "logprobs": self._log_probs(prompt, piece, is_first=is_first),
            "finish_reason": piece.finish_reason if has_answer or piece.finish_reason is None else "length",
            "stop_reason": piece.stop_reason if has_answer else None,
        }
        if fields.return_token_ids:
            choice["token_ids"] = list(piece.token_ids) if has_answer else []
            if is_first:
                choice["prompt_token_ids"] = prompt.token_ids
        if not fields.stream:
            # vLLM's clients read this field of every whole answer.
            choice["prompt_logprobs"] = None
        if fields.prompt_logprobs is not None:
            scored = limited(piece.prompt_log_probs or (), fields.prompt_logprobs)
            choice["prompt_logprobs"] = prompt_log_prob_entries(prompt.token_ids, scored, self._own.texts)
        return choice

    def _log_probs(self, prompt: _Prompt, piece: TextPiece, *, is_first: bool) -> dict[str, Any] | None:
        if self._fields.logprobs is None:
            return None
        listed = CompletionLogProbs(self._own.texts, as_ids=self._fields.return_tokens_as_token_ids)
        if is_first and self._fields.echo:
            scored = limited(piece.prompt_log_probs or (), self._fields.logprobs)
            num_unscored = len(prompt.token_ids) - len(scored)
            for token, offset in zip(prompt.token_ids[:num_unscored], prompt.offsets, strict=False):
                listed.add_unscored(token, offset)
            for entry, offset in zip(scored, prompt.offsets[num_unscored:], strict=True):
                listed.add(entry, offset)
        if self._fields.max_tokens:
            for entry in piece.log_probs:
                listed.add(entry, len(prompt.text) + entry.text_offset)
        return listed.content()
