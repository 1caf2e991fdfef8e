"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..runtime.adapter_tokenizers import TextTokenizer
from .generation import TextPiece
from .http import EventStream, read_json, unless_disconnected
from .json_answer import Items, JsonAnswer
from .openai_answers import chat_log_probs, events, merged, new_id, usage
from .openai_chat_fields import ChatRequest
from .openai_guides import guide_of
from .openai_requests import adapter_of, answer_length, check_answer_limits, embedding_bias_of, start_all, text_request
from .service import Service
from .tool_calls import FunctionCall, ToolCallParser
from .tool_use import tool_use_of


async def chat(service: Service, request: Request) -> Response:
    """Answers a conversation."""
    fields = await read_json(request, ChatRequest, service.options.limits, service.executor.work)
    return await unless_disconnected(request, _answered(service, fields))


async def _answered(service: Service, fields: ChatRequest) -> Response:
    adapter = await adapter_of(service, fields)
    tool_use = await tool_use_of(service, fields)
    make_parser = None if tool_use is None else tool_use.make_parser
    tools = None if tool_use is None else [tool.for_template() for tool in fields.tools or ()]
    prompt = await service.prompts.tokenize_chat(fields, adapter, tools)
    lengths = await service.lengths_of(adapter)
    max_tokens = answer_length(service, len(prompt), fields.answer_tokens, lengths=lengths, param="messages")
    top_log_probs = fields.top_logprobs if fields.logprobs else None
    check_answer_limits(service.options.limits, fields.n, [len(prompt)], [max_tokens], top_log_probs)
    asked = text_request(
        service,
        fields,
        prompt=prompt,
        adapter=adapter,
        embedding_bias=embedding_bias_of(fields.logit_bias, await service.vocab_size_of(adapter)),
        max_tokens=max_tokens,
        top_log_probs=top_log_probs,
        # The markers of calls are special tokens in some vocabularies.
        skip_special_tokens=make_parser is None,
        guide=guide_of(fields) if tool_use is None else tool_use.guide,
    )
    own = await service.tokenizers.of(adapter)
    answer = ChatAnswer(service, fields, adapter, own, prompt, make_parser)
    async with AsyncExitStack() as stack:
        generations = await start_all(service, [asked], stack)
        if fields.stream:
            kept = stack.pop_all()
            return EventStream(events(answer.chunks(merged(generations, kept))), kept)
        pieces = await generations[0].whole()
    return JsonAnswer(answer.whole(pieces))


class ChatAnswer:
    """The answer to one request, whole or in chunks."""

    def __init__(
        self,
        service: Service,
        fields: ChatRequest,
        adapter: str | None,
        own: TextTokenizer,
        prompt: Sequence[int],
        make_parser: Callable[[], ToolCallParser] | None,
    ) -> None:
        self._fields = fields
        self._prompt = prompt
        self._choices = [
            _Choice(own, fields, index, None if make_parser is None else make_parser()) for index in range(fields.n)
        ]
        self._head = {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
            "model": service.model_names[0] if adapter is None else adapter,
        }

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """Returns the answer without streaming."""
        whole = {
            **self._head,
            "object": "chat.completion",
            "choices": Items(self._choices[piece.index].whole(piece) for piece in pieces),
            "usage": usage(len(self._prompt), sum(len(piece.token_ids) for piece in pieces)),
        }
        return whole | self._prompt_ids()

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
            num_tokens += len(piece.token_ids)
            counts = {"usage": usage(len(self._prompt), num_tokens)} if always else {}
            if index not in begun:
                opening = {"index": index, "delta": {"role": "assistant", "content": ""}, **_OPEN}
                yield {**head, "choices": [opening], **counts, **({} if begun else self._prompt_ids())}
                begun.add(index)
            yield {**head, "choices": [self._choices[index].chunk(piece)], **counts}
        if with_usage:
            yield {**head, "choices": [], "usage": usage(len(self._prompt), num_tokens)}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prompt)} if self._fields.return_token_ids else {}


class _Choice:
    """One choice of the answer."""

    def __init__(self, own: TextTokenizer, fields: ChatRequest, index: int, parser: ToolCallParser | None) -> None:
        self._own = own
        self._fields = fields
        self._index = index
        self._parser = parser
        self._num_calls = 0

    def whole(self, piece: TextPiece) -> dict[str, Any]:
        """Returns the choice without streaming."""
        parts = self._parts(piece)
        calls = [part.content() for part in parts if isinstance(part, FunctionCall)]
        text = "".join(part for part in parts if isinstance(part, str))
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = calls
        return {"index": self._index, "message": message, **self._end(piece)}

    def chunk(self, piece: TextPiece) -> dict[str, Any]:
        """Returns a chunk of the choice."""
        return {"index": self._index, "delta": self._delta(self._parts(piece)), **self._end(piece)}

    def _parts(self, piece: TextPiece) -> list[str | FunctionCall]:
        """Returns the texts and function calls in a piece that are certain so far."""
        if self._parser is None:
            return [piece.text] if piece.text else []
        parts = self._parser.add(piece.text)
        if piece.finish_reason is not None:
            parts += self._parser.finish()
        self._num_calls += sum(isinstance(part, FunctionCall) for part in parts)
        return parts

    def _delta(self, parts: Sequence[str | FunctionCall]) -> dict[str, Any]:
        calls = [part for part in parts if isinstance(part, FunctionCall)]
        delta: dict[str, Any] = {}
        if text := "".join(part for part in parts if isinstance(part, str)):
            delta["content"] = text
        if calls:
            first = self._num_calls - len(calls)
            delta["tool_calls"] = [{"index": first + i, **call.content()} for i, call in enumerate(calls)]
        return delta

    def _end(self, piece: TextPiece) -> dict[str, Any]:
        # OpenAI's API does not set the finish reason "tool_calls" for a call that the request forces by name.
        is_named = self._fields.tool_choice.name is not None
        has_calls = self._num_calls > 0 and piece.finish_reason == "stop" and not is_named
        end: dict[str, Any] = {
            "logprobs": chat_log_probs(piece.log_probs, self._own.texts) if self._fields.logprobs else None,
            "finish_reason": "tool_calls" if has_calls else piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._fields.return_token_ids:
            end["token_ids"] = list(piece.token_ids)
        return end


_OPEN = {"logprobs": None, "finish_reason": None}
"""The end fields of a choice that is not finished."""
