"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..runtime.adapter_tokenizers import TextTokenizer
from .answer_parts import AnswerPart, CallArguments, CallBegin, ReasoningPart, TextPart
from .conversation import Conversation, SplitAnswer
from .generation import TextPiece
from .http import EventStream, unless_disconnected
from .json_answer import Items, JsonAnswer
from .openai_answers import answer_id, chat_log_probs, events, merged, prompt_log_prob_entries, usage
from .openai_chat_fields import ChatRequest
from .openai_requests import read_fields
from .receipts import ReceiptMaker, receipt_field
from .service import Service
from .time_slices import TimeSlices


async def chat(service: Service, request: Request) -> Response:
    """Answers a conversation."""
    fields = await read_fields(service, request, ChatRequest)
    return await unless_disconnected(request, _answered(service, fields))


async def _answered(service: Service, fields: ChatRequest) -> Response:
    conversation = await Conversation.of(service, fields)
    answer = ChatAnswer(service, fields, conversation)
    answer.receipt = await ReceiptMaker.of_chat(service, fields, conversation)
    async with AsyncExitStack() as stack:
        generation = await conversation.start(service, stack)
        if fields.stream:
            kept = stack.pop_all()
            return EventStream(events(answer.chunks(merged([generation], kept))), kept)
        pieces = await generation.whole()
    return JsonAnswer(await answer.whole(pieces))


class ChatAnswer:
    """The answer to one request, whole or in chunks."""

    def __init__(self, service: Service, fields: ChatRequest, conversation: Conversation) -> None:
        self._fields = fields
        self._tokenizer = conversation.tokenizer
        self._prompt = conversation.request.prompt
        self._num_cached_tokens = 0
        self.receipt: ReceiptMaker | None = None
        """Makes the receipt if the client asks for one."""
        self._echo = _echo(fields)
        self._has_reasoning = conversation.has_reasoning
        self._choices = [
            _Choice(fields, index, conversation.tokenizer, SplitAnswer(conversation.make_splitter()))
            for index in range(fields.n)
        ]
        self._head = {
            "id": answer_id("chatcmpl"),
            "created": int(time.time()),
            "model": service.shown_model(conversation.adapter),
        }

    async def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """Returns the answer without streaming."""
        choices = []
        slices = TimeSlices()
        for piece in pieces:
            choices.append(await self._choices[piece.index].whole(piece))
            await slices.pause()
        self._num_cached_tokens = pieces[0].num_cached_tokens
        whole = {
            **self._head,
            "object": "chat.completion",
            "choices": Items(choices),
            "usage": self._usage(sum(len(piece.token_ids) for piece in pieces)),
        }
        # vLLM's clients read this field of every whole answer.
        whole["prompt_logprobs"] = None
        if self._fields.prompt_logprobs is not None:
            scored = pieces[0].prompt_log_probs
            whole["prompt_logprobs"] = prompt_log_prob_entries(self._prompt, scored, self._tokenizer.texts)
        return whole | self._prompt_ids() | receipt_field(self.receipt, pieces)

    async def chunks(self, pieces: AsyncIterator[tuple[int, TextPiece]]) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a streamed answer: each choice's role, then one chunk per piece, even if its text is
        still held back.

        The token counts come last.
        """
        head = {**self._head, "object": "chat.completion.chunk"}
        options = self._fields.stream_options
        with_usage = options is not None and options.include_usage
        always = options is not None and options.include_usage and options.continuous_usage_stats
        num_tokens = 0
        begun: set[int] = set()
        async for index, piece in pieces:
            self._num_cached_tokens = piece.num_cached_tokens
            if self.receipt is not None:
                self.receipt.add(index, piece)
            if index not in begun:
                opening = {"index": index, "delta": {"role": "assistant", "content": self._echo}, **_OPEN}
                counts = {"usage": self._usage(num_tokens)} if always else {}
                yield {**head, "choices": [opening], **counts, **({} if begun else self._prompt_ids())}
                begun.add(index)
            num_tokens += len(piece.token_ids)
            chunk = await self._choices[index].chunk(piece)
            counts = {"usage": self._usage(num_tokens)} if always else {}
            yield {**head, "choices": [chunk], **counts}
        if self.receipt is not None:
            yield {**head, "choices": [], **receipt_field(self.receipt)}
        if with_usage:
            yield {**head, "choices": [], "usage": self._usage(num_tokens)}

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        reasoning = sum(choice.num_reasoning_tokens for choice in self._choices) if self._has_reasoning else None
        return usage(len(self._prompt), num_tokens, reasoning, num_cached_tokens=self._num_cached_tokens)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prompt)} if self._fields.return_token_ids else {}


class _Choice:
    """One choice of the answer."""

    def __init__(self, fields: ChatRequest, index: int, tokenizer: TextTokenizer, answer: SplitAnswer) -> None:
        self._fields = fields
        self._index = index
        self._tokenizer = tokenizer
        self._answer = answer

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of the reasoning so far."""
        return self._answer.num_reasoning_tokens

    async def whole(self, piece: TextPiece) -> dict[str, Any]:
        """Returns the choice without streaming."""
        parts = await self._answer.parts(piece)
        text = _echo(self._fields) + _text(parts, TextPart)
        reasoning, calls = _text(parts, ReasoningPart), _calls(parts)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not (calls or reasoning) else None}
        message |= self._reasoning(reasoning)
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return {"index": self._index, "message": message, **self._end(piece)}

    async def chunk(self, piece: TextPiece) -> dict[str, Any]:
        """Returns a chunk of the choice."""
        parts = await self._answer.parts(piece)
        delta: dict[str, Any] = {}
        delta |= self._reasoning(_text(parts, ReasoningPart))
        if text := _text(parts, TextPart):
            delta["content"] = text
        if calls := _calls(parts):
            delta["tool_calls"] = calls
        return {"index": self._index, "delta": delta, **self._end(piece)}

    def _log_probs(self, piece: TextPiece) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        return chat_log_probs(piece.log_probs, self._tokenizer.texts, as_ids=self._fields.return_tokens_as_token_ids)

    def _reasoning(self, text: str) -> dict[str, str]:
        """Returns the fields of the reasoning: vLLM's name, and the older one that clients know."""
        return {"reasoning": text, "reasoning_content": text} if text and self._fields.include_reasoning else {}

    def _end(self, piece: TextPiece) -> dict[str, Any]:
        # OpenAI's API does not set the finish reason "tool_calls" for a call that the request forces by name.
        is_named = self._fields.tool_choice.name is not None
        has_calls = self._answer.num_calls > 0 and piece.finish_reason == "stop" and not is_named
        end: dict[str, Any] = {
            "logprobs": self._log_probs(piece),
            "finish_reason": "tool_calls" if has_calls else piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._fields.return_token_ids:
            end["token_ids"] = list(piece.token_ids)
        return end


def _echo(fields: ChatRequest) -> str:
    """Returns the last message's text if the request wants it before the answer and it is the assistant's."""
    last = fields.messages[-1]
    if not fields.echo or last.role != "assistant" or last.content is None:
        return ""
    return "\n".join(last.text_parts)


_OPEN = {"logprobs": None, "finish_reason": None}
"""The end fields of a choice that is not finished."""


def _text(parts: Sequence[AnswerPart], kind: type[TextPart] | type[ReasoningPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _calls(parts: Sequence[AnswerPart]) -> list[dict[str, Any]]:
    """Returns the calls in OpenAI's format for chunks. A call that has begun earlier has only its new arguments."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    return list(calls.values())
