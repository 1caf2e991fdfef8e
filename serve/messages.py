"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens, and the form of their errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core import AdaptrtError
from ..runtime.text_bound import max_prompt_tokens
from .conversation import Conversation, SplitAnswer
from .errors import ApiError
from .generation import TextGeneration
from .http import EventStream, read_json, unless_disconnected, validation_error
from .json_answer import JsonAnswer, frame
from .messages_answer import Event, MessageAnswer
from .messages_fields import CountRequest, MessagesRequest, chat_of
from .openai_chat_fields import ChatRequest
from .openai_requests import adapter_of
from .receipts import ReceiptMaker
from .records import current_request
from .service import Service
from .work import WorkKind

PATH: Final = "/v1/messages"
COUNT_PATH: Final = f"{PATH}/count_tokens"
MANY_MESSAGES: Final = 256
"""A longer conversation is translated in a thread, because all other requests wait for the loop."""
_ERROR_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
"""Anthropic's types of errors by status. The other statuses below 500 are those of invalid requests."""


def is_messages_path(path: str) -> bool:
    """True for paths whose errors have Anthropic's form."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns an error in Anthropic's form."""
    default = "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    body = {"type": "error", "error": {"type": _ERROR_TYPES.get(error.status, default), "message": str(error)}}
    record = current_request.get()
    return body if record is None else body | {"request_id": record.id}


def error_response(error: ApiError) -> JSONResponse:
    """Makes an error response in Anthropic's form."""
    return JSONResponse(error_body(error), status_code=int(error.status), headers=error.headers)


def routes(service: Service) -> APIRouter:
    """Makes all routes."""
    router = APIRouter()

    @router.post(PATH)
    async def create(request: Request) -> Response:
        fields = await read_json(request, MessagesRequest, service.options.limits, service.executor.work)
        return await unless_disconnected(request, _answered(service, fields))

    @router.post(COUNT_PATH)
    async def count_tokens(request: Request) -> Response:
        fields = await read_json(request, CountRequest, service.options.limits, service.executor.work)
        return await unless_disconnected(request, _counted(service, fields))

    return router


async def _answered(service: Service, fields: MessagesRequest) -> Response:
    chat = await _translated(service, fields)
    conversation = await Conversation.of(service, chat, cuts_answer=True, is_budget_target=True)
    request = conversation.request
    model = service.shown_model(conversation.adapter)
    answer = MessageAnswer(model, len(request.prompt), is_cut=request.max_tokens < fields.max_tokens)
    answer.receipt = await ReceiptMaker.of_chat(service, chat, conversation)
    split = SplitAnswer(conversation.make_splitter())
    async with AsyncExitStack() as stack:
        generation = await conversation.start(service, stack)
        if fields.stream:
            kept = stack.pop_all()
            return EventStream(_frames(answer, split, generation), kept)
        (piece,) = await generation.whole()
    await answer.add(piece, split)
    return JsonAnswer(answer.body())


async def _frames(answer: MessageAnswer, split: SplitAnswer, generation: TextGeneration) -> AsyncIterator[bytes]:
    yield await _joined(answer.begin())
    try:
        async for piece in generation:
            if events := await answer.add(piece, split):
                yield await _joined(events)
    except AdaptrtError as error:
        yield await _joined([error_body(ApiError.of(error))])


async def _counted(service: Service, fields: CountRequest) -> Response:
    """Answers with the number of tokens of the prompt that the same message would have."""
    chat = await _translated(service, fields)
    # The limit is higher than for a prompt: clients count a conversation's tokens before they cut it.
    max_tokens = max(service.options.limits.max_tokenize_tokens, max_prompt_tokens(service.engine_info))
    tools = [tool.for_template() for tool in chat.called_tools] or None
    adapter = await adapter_of(service, chat)
    tokens = await service.prompts.tokenize_chat(chat, adapter, tools, max_tokens=max_tokens, with_rows=False)
    if len(tokens.ids) > max_tokens:
        raise ApiError(f"messages have {len(tokens.ids)} tokens; expected at most {max_tokens}", param="messages")
    return JSONResponse({"input_tokens": len(tokens.ids)})


async def _translated(service: Service, fields: CountRequest) -> ChatRequest:
    if len(fields.messages) <= MANY_MESSAGES:
        return _chat(fields)
    return await service.executor.work.run(WorkKind.TEXTS, _chat, fields)


def _chat(fields: CountRequest) -> ChatRequest:
    try:
        return chat_of(fields)
    except ValidationError as error:
        raise validation_error(error) from error


async def _joined(events: Sequence[Event]) -> bytes:
    return b"".join([await frame(event, event=event["type"]) for event in events])
