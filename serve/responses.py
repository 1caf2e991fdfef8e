"""OpenAI's Responses API: POST /v1/responses, and the routes of stored responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core import AdaptrtError
from .conversation import Conversation, SplitAnswer
from .errors import ApiError
from .generation import TextGeneration
from .http import LONG_BODY, EventStream, read_json, read_query, unless_disconnected, validation_error
from .json_answer import frame, json_parts
from .openai_chat_fields import ChatRequest, Message
from .openai_fields import Fields, only
from .receipts import ReceiptMaker
from .records import current_request
from .response_store import ResponseStore, StoredResponse
from .responses_answer import CANCELLED, Event, ResponseAnswer
from .responses_fields import ResponseRequest, chat_of, listed, tool_choice_echo
from .service import Service
from .work import WorkKind

MANY_MESSAGES: Final = 256
"""A longer conversation is translated and stored in a thread, because all other requests wait for the loop."""
LONG_PROMPT: Final = 1 << 14
"""Tokens; a response with a longer prompt is stored in a thread."""
MAX_LISTED: Final = 100
"""Maximum number of input items in one answer, as in OpenAI's API."""
_PARAMS: Final = {"messages": "input", "max_completion_tokens": "max_output_tokens", "logprobs": "include"}
"""Fields here by the names of the chat's fields that errors name."""


_MESSAGES: Final[TypeAdapter[list[Message]]] = TypeAdapter(list[Message])


def _flag(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value)


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


class _ReadQuery(Fields):
    """Query of GET /v1/responses/ID."""

    stream: Annotated[bool, only(False, "events are sent only while the answer is generated"),
                      BeforeValidator(_flag)] = False  # fmt: skip
    include_obfuscation: Annotated[bool, only(False, "events are not padded"), BeforeValidator(_flag)] = False


class _ListQuery(Fields):
    """Query of GET /v1/responses/ID/input_items."""

    after: str | None = None
    """The id of an item; the list begins after it."""
    limit: Annotated[int, BeforeValidator(_number), Field(ge=1, le=MAX_LISTED)] = 20
    order: Literal["asc", "desc"] = "desc"


@dataclass(frozen=True)
class _Running:
    """A response whose stream is being sent."""

    owner: str
    answer: ResponseAnswer
    generation: TextGeneration


def routes(service: Service) -> APIRouter:
    """Makes all routes."""
    router = APIRouter()
    responses = Responses(service)

    @router.post("/v1/responses")
    async def create(request: Request) -> Response:
        fields = await read_json(request, ResponseRequest, service.options.limits, service.executor.work)
        return await unless_disconnected(request, responses.create(fields))

    @router.get("/v1/responses/{response_id}")
    async def read(response_id: str, request: Request) -> Response:
        read_query(request, _ReadQuery)
        return await responses.read(response_id)

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        return await responses.cancel(response_id)

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        return responses.delete(response_id)

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> Response:
        return responses.list_input(response_id, read_query(request, _ListQuery))

    return router


class Responses:
    """Responses that are generated, and those that are stored."""

    def __init__(self, service: Service) -> None:
        limits = service.options.limits
        self._service = service
        self._store = ResponseStore(limits.max_stored_responses, limits.max_stored_response_bytes)
        self._running: dict[str, _Running] = {}
        """Streams whose responses will be stored, by id."""

    async def create(self, fields: ResponseRequest) -> Response:
        """Answers a request, whole or as a stream. Raises ApiError and AdaptrtError."""
        try:
            return await self._create(fields)
        except ApiError as error:
            error.param = None if error.param is None else _PARAMS.get(error.param, error.param)
            raise

    async def _create(self, fields: ResponseRequest) -> Response:
        service = self._service
        if fields.store and not self._store.is_on:
            raise ApiError("store is true; expected false: this server stores no responses", param="store")
        previous = self._find_previous(fields.previous_response_id)
        chat = await self._translated(fields, b"[]" if previous is None else previous.messages)
        conversation = await Conversation.of(service, chat)
        texts = conversation.tokenizer.texts if fields.has_log_probs else None
        is_stored = self._store.is_on and fields.store is not False
        echo = self._echo(fields, conversation, is_stored)
        answer = ResponseAnswer(echo, len(conversation.request.prompt), texts, service.options.response_home)
        answer.receipt = await ReceiptMaker.of_chat(service, chat, conversation)
        made = _Made(self._owner, fields, chat, answer, len(conversation.request.prompt), is_stored)
        split = SplitAnswer(conversation.make_splitter())
        async with AsyncExitStack() as stack:
            generation = await conversation.start(service, stack)
            if fields.stream:
                if is_stored:
                    response_id = answer.response_id
                    self._running[response_id] = _Running(made.owner, answer, generation)
                    stack.callback(self._running.pop, response_id, None)
                kept = stack.pop_all()
                return EventStream(self._frames(made, split, generation), kept)
            (piece,) = await generation.whole()
        await answer.add(piece, split)
        return Response(await self._kept(made), media_type="application/json")

    async def read(self, response_id: str) -> Response:
        """Returns a response, as far as it is generated. Raises ApiError for an unknown id."""
        running = self._find_running(response_id)
        if running is not None:
            return Response(b"".join(await json_parts(running.answer.body())), media_type="application/json")
        return Response(self._find(response_id).body, media_type="application/json")

    async def cancel(self, response_id: str) -> Response:
        """Ends a response that is being generated. Raises ApiError for one that has ended otherwise."""
        running = self._find_running(response_id)
        if running is not None:
            running.answer.cancel()
            running.generation.cancel()
        elif (status := self._find(response_id).status) != CANCELLED:
            raise ApiError(f"response '{response_id}' is {status}; expected one that is being generated")
        return await self.read(response_id)

    def delete(self, response_id: str) -> Response:
        """Forgets a response that has ended. Raises ApiError for another id."""
        if self._find_running(response_id) is not None:
            raise ApiError(f"response '{response_id}' is being generated; expected one that has ended: cancel it first")
        if not self._store.remove(response_id, self._owner):
            raise _unknown(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def list_input(self, response_id: str, query: _ListQuery) -> Response:
        """Returns a page of a request's own input items. Raises ApiError for an unknown id."""
        items: list[dict[str, Any]] = json.loads(self._find(response_id).input_items)
        if query.order == "desc":
            items.reverse()
        first = 0
        if query.after is not None:
            ids = [item["id"] for item in items]
            if query.after not in ids:
                raise ApiError(f"after is '{query.after}'; expected the id of an input item", param="after")
            first = ids.index(query.after) + 1
        page = items[first : first + query.limit]
        return JSONResponse(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": first + query.limit < len(items),
            }
        )

    async def _frames(self, made: _Made, split: SplitAnswer, generation: TextGeneration) -> AsyncIterator[bytes]:
        answer = made.answer
        yield await _joined(answer.begin())
        try:
            async for piece in generation:
                events = await answer.add(piece, split)
                # Clients may continue a response as soon as they have its last event.
                if piece.finish_reason is not None and made.is_stored:
                    await self._kept(made)
                if events:
                    yield await _joined(events)
        except AdaptrtError as error:
            events = answer.fail(ApiError.of(error))
            if made.is_stored:
                await self._kept(made)
            yield await _joined(events)

    async def _kept(self, made: _Made) -> bytes:
        """Stores a response that has ended if it should be. Returns its body."""
        body = b"".join(await json_parts(made.answer.body()))
        if made.is_stored:
            messages = made.chat.messages
            is_long = made.num_prompt_tokens > LONG_PROMPT or len(messages) > MANY_MESSAGES
            is_long = is_long or any(message.image_urls for message in messages)  # files in base64
            stored = await asyncio.to_thread(made.stored, body) if is_long else made.stored(body)
            self._store.put(made.answer.response_id, stored)
            self._running.pop(made.answer.response_id, None)
        return body

    async def _translated(self, fields: ResponseRequest, history: bytes) -> ChatRequest:
        if len(fields.input) <= MANY_MESSAGES and len(history) <= LONG_BODY:
            return _chat(fields, history)
        return await self._service.executor.work.run(WorkKind.TEXTS, _chat, fields, history)

    def _echo(self, fields: ResponseRequest, conversation: Conversation, is_stored: bool) -> dict[str, Any]:
        """Returns the fields of a body that repeat the request."""
        sampling = {"temperature": fields.temperature, "top_p": fields.top_p}
        recommended = self._service.sampling_defaults.given()
        for name in sampling.keys() & recommended.keys():
            if name not in fields.model_fields_set:
                sampling[name] = recommended[name]
        form = fields.text.format
        return {
            "model": self._service.shown_model(conversation.adapter),
            "background": False,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": fields.previous_response_id,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {"effort": fields.reasoning.effort, "summary": fields.reasoning.summary},
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",
            "store": is_stored,
            **sampling,
            "text": {
                "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True),
                "verbosity": fields.text.verbosity,
            },
            "tool_choice": tool_choice_echo(fields.tool_choice),
            "tools": [tool.model_dump(exclude={"defer_loading"}) for tool in fields.tools],
            "top_logprobs": fields.top_logprobs,
            "truncation": fields.truncation,
            "user": fields.user,
        }

    @property
    def _owner(self) -> str:
        """The key of the request that is being answered; empty: the server has no keys."""
        record = current_request.get()
        return record.client if record is not None and self._service.options.api_keys else ""

    def _find_previous(self, response_id: str | None) -> StoredResponse | None:
        if response_id is None:
            return None
        if not self._store.is_on:
            raise ApiError(
                "previous_response_id is given; expected the whole conversation in input: this server stores no "
                "responses",
                param="previous_response_id",
            )
        found = self._store.find(response_id, self._owner)
        if found is None:
            raise _unknown(response_id, param="previous_response_id")
        return found

    def _find_running(self, response_id: str) -> _Running | None:
        running = self._running.get(response_id)
        return running if running is not None and running.owner == self._owner else None

    def _find(self, response_id: str) -> StoredResponse:
        found = self._store.find(response_id, self._owner)
        if found is None:
            raise _unknown(response_id)
        return found


@dataclass(frozen=True)
class _Made:
    """A response and its request."""

    owner: str
    fields: ResponseRequest
    chat: ChatRequest
    answer: ResponseAnswer
    num_prompt_tokens: int
    is_stored: bool

    def stored(self, body: bytes) -> StoredResponse:
        """Returns the response for the store. body: the answer's."""
        items = [listed(item) for item in self.fields.input]
        num_instructions = 0 if self.fields.instructions is None else 1
        messages = [*self.chat.messages[num_instructions:], *self.answer.messages()]
        return StoredResponse(
            self.owner,
            self.answer.status,
            body,
            json.dumps(items, ensure_ascii=False).encode(),
            _MESSAGES.dump_json(messages, exclude_defaults=True),
        )


def _chat(fields: ResponseRequest, history: bytes) -> ChatRequest:
    try:
        return chat_of(fields, _MESSAGES.validate_json(history))
    except ValidationError as error:
        raise validation_error(error) from error


def _unknown(response_id: str, param: str | None = None) -> ApiError:
    return ApiError.not_found(f"The response '{response_id}' is not stored here.", param=param)


async def _joined(events: Sequence[Event]) -> bytes:
    return b"".join([await frame(event, event=event["type"]) for event in events])
