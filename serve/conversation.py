"""From conversations to the parts of answers. Each API translates its fields to a ChatRequest and renders the parts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from ..runtime.adapter_tokenizers import TextTokenizer
from .answer_form import answer_form_of
from .answer_parts import AnswerPart, AnswerSplitter, CallBegin, PlainText
from .generation import TextGeneration, TextPiece, TextRequest
from .openai_chat_fields import ChatRequest
from .openai_fields import CompletionRequest
from .openai_guides import guide_of
from .openai_requests import (
    adapter_of,
    answer_length,
    check_answer_limits,
    check_can_score_prompts,
    embedding_bias_of,
    longest_prompt,
    start_all,
    text_request,
    truncation_of,
)
from .prompts import MarkedImages
from .service import Service
from .time_slices import TimeSlices

_PROMPT_END: Final = 16
"""Number of tokens at the end of a prompt that may begin the answer's reasoning."""

_SLICE_LENGTH: Final = 1024
"""Number of characters that are split at once. If all of them begin calls, this takes some milliseconds."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as a request for text, with what its answers need."""

    adapter: str | None
    """The adapter that answers; None: the base model."""
    tokenizer: TextTokenizer
    """The adapter's tokenizer, or else the model's."""
    request: TextRequest
    make_splitter: Callable[[], AnswerSplitter]
    """Makes the splitter of one answer."""
    has_reasoning: bool = False
    """True: the splitter finds the model's reasoning."""

    @classmethod
    async def of(
        cls, service: Service, fields: ChatRequest, *, cuts_answer: bool = False, is_budget_target: bool = False
    ) -> Conversation:
        """Renders and checks a conversation. Raises ApiError and AdaptrtError for fields that cannot be used.

        cuts_answer: True: an answer that does not fit in the context is shortened. False: it is refused.
        is_budget_target: True: a budget of reasoning that cannot be enforced has no effect. False: it is refused.
        """
        adapter = await adapter_of(service, fields)
        tools = [tool.for_template() for tool in fields.called_tools]
        check_can_score_prompts(service, fields.prompt_logprobs)
        lengths = await service.lengths_of(adapter)
        truncation = truncation_of(fields, longest_prompt(service, lengths, fields.answer_tokens or 1), "left")
        rendered = await service.prompts.tokenize_chat(
            fields, adapter, tools or None, truncation=truncation, with_digests=fields.return_receipt
        )
        prompt, images = rendered.ids, rendered.images
        asked = fields.answer_tokens
        if cuts_answer and asked is not None:
            asked = min(asked, max(1, service.room_for_answer(lengths, len(prompt))))
        max_tokens = answer_length(service, len(prompt), asked, lengths=lengths, param="messages")
        top_log_probs = fields.top_logprobs if fields.logprobs else None
        check_answer_limits(
            service.options.limits, fields.n, [len(prompt)], [max_tokens], top_log_probs, fields.prompt_logprobs
        )
        tokenizer = await service.tokenizers.of(adapter)
        prompt_end = str(tokenizer.tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False))
        form = await answer_form_of(
            service, fields, adapter, prompt_end, max_tokens=max_tokens, is_budget_target=is_budget_target
        )
        request = text_request(
            service,
            fields,
            prompt=prompt,
            adapter=adapter,
            own=tokenizer,
            embedding_bias=embedding_bias_of(fields, await service.vocab_size_of(adapter)),
            max_tokens=max_tokens,
            top_log_probs=top_log_probs,
            prompt_log_probs=fields.prompt_logprobs,
            shown_special=form.marks,
            guide=form.guide,
            virtual_prompt=None if images is None else images.within(prompt, await service.vocab_size_of(adapter)),
        )
        return cls(adapter, tokenizer, request, form.make_splitter, form.has_reasoning)

    @classmethod
    async def of_prompt(
        cls,
        service: Service,
        fields: CompletionRequest,
        max_tokens: int | None,
        images: MarkedImages | None = None,
    ) -> Conversation:
        """Makes a conversation of the only prompt of a completion, which no template writes. Raises like of().

        max_tokens: of the answer, cut to the context; None: the rest of the context. images: in the prompt's text.
        """
        adapter = await adapter_of(service, fields)
        own = await service.tokenizers.of(adapter)
        (prompt,) = fields.prompt
        rows = None
        if isinstance(prompt, str) and images is not None:
            rendered = await service.prompts.tokenize_marked(
                prompt,
                images,
                adapter,
                add_special_tokens=fields.add_special_tokens,
                param="prompt",
                with_digests=fields.return_receipt,
            )
            prompt, rows = rendered.ids, rendered.images
        elif isinstance(prompt, str):
            prompt = await service.prompts.tokenize(
                prompt, adapter, add_special_tokens=fields.add_special_tokens, param="prompt"
            )
        lengths = await service.lengths_of(adapter)
        if max_tokens is not None:
            max_tokens = min(max_tokens, max(1, service.room_for_answer(lengths, len(prompt))))
        request = text_request(
            service,
            fields,
            prompt=prompt,
            adapter=adapter,
            own=own,
            embedding_bias=embedding_bias_of(fields, await service.vocab_size_of(adapter)),
            max_tokens=answer_length(service, len(prompt), max_tokens, lengths=lengths, param="prompt"),
            top_log_probs=fields.logprobs,
            guide=guide_of(fields),
            virtual_prompt=None if rows is None else rows.within(prompt, await service.vocab_size_of(adapter)),
        )
        return cls(adapter, own, request, PlainText)

    async def start(self, service: Service, stack: AsyncExitStack) -> TextGeneration:
        """Queues the request; `stack` ends it. Raises the same errors as start_all."""
        (generation,) = await start_all(service, [self.request], stack)
        return generation


class SplitAnswer:
    """One answer, split into parts as its pieces arrive."""

    def __init__(self, splitter: AnswerSplitter) -> None:
        self.num_calls = 0
        """Number of calls that have begun."""
        self._splitter = splitter
        self._offsets: list[int] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of the reasoning so far, with the one that ends it."""
        spans = self._splitter.reasoning_spans
        return sum(bisect_left(self._offsets, end) - bisect_left(self._offsets, begin) for begin, end in spans)

    async def parts(self, piece: TextPiece) -> Sequence[AnswerPart]:
        """Returns the parts that are certain after a further piece. Lets other tasks run while it splits a long one."""
        self._offsets += piece.offsets
        parts: list[AnswerPart] = []
        slices = TimeSlices()
        for begin in range(0, len(piece.text) or 1, _SLICE_LENGTH):
            parts += self._splitter.add(piece.text[begin : begin + _SLICE_LENGTH])
            await slices.pause()
        if piece.finish_reason is not None:
            parts += self._splitter.finish()
        self.num_calls += sum(isinstance(part, CallBegin) for part in parts)
        return parts
