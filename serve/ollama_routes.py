"""Ollama's API: chats, prompts, embeddings and the version, and the form of its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, Final, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core import AdaptrtError, PoolingParams
from .._version import __version__
from . import ollama_models
from .conversation import Conversation, SplitAnswer
from .embeddings import check_dimensions, cut, params_of
from .errors import ApiError
from .generation import TextGeneration
from .go_template import GoTemplate
from .http import LineStream, read_json, unless_disconnected, validation_error
from .json_answer import Items, JsonAnswer, line
from .ollama_answer import LoadTime, OllamaAnswer, Render, chat_fields, loaded_object, prompt_fields
from .ollama_create import translated
from .ollama_fields import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaGenerationFields,
    OllamaMessage,
    Preset,
    chat_of,
    chat_of_prompt,
    completion_of,
)
from .ollama_models import FoundModel, find_model
from .ollama_options import OllamaOptions
from .openai_fields import EmbeddingRequest
from .pooled import PooledTexts, check_can_pool, pool
from .service import Service
from .state_routes import STATE_PATH
from .work import WorkKind

Body = TypeVar("Body", bound=BaseModel)
Made = TypeVar("Made")
Generation = TypeVar("Generation", bound=OllamaGenerationFields)

CHAT_PATH: Final = "/api/chat"
GENERATE_PATH: Final = "/api/generate"
EMBED_PATH: Final = "/api/embed"
EMBEDDINGS_PATH: Final = "/api/embeddings"
VERSION_PATH: Final = "/api/version"
PULL_PATH: Final = "/api/pull"
PUSH_PATH: Final = "/api/push"
API_VERSION: Final = "0.34.1"
"""The version of Ollama whose API the routes follow. Clients compare it with the one that they need."""
MANY_MESSAGES: Final = 256
"""A longer conversation is translated in a thread, because all other requests wait for the loop."""


def is_ollama_path(path: str) -> bool:
    """True for paths whose errors have Ollama's form."""
    return path.startswith("/api/") and path != STATE_PATH


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns an error in Ollama's form."""
    return {"error": str(error)}


def error_response(error: ApiError) -> JSONResponse:
    """Makes an error response in Ollama's form."""
    return JSONResponse(error_body(error), status_code=int(error.status), headers=error.headers)


def routes(service: Service) -> APIRouter:
    """Makes all routes."""
    router = APIRouter()
    router.include_router(ollama_models.routes(service))

    async def read(request: Request, kind: type[Body]) -> Body:
        return await read_json(request, kind, service.options.limits, service.executor.work)

    @router.post(CHAT_PATH)
    async def chat(request: Request) -> Response:
        fields = await read(request, OllamaChatRequest)
        return await unless_disconnected(request, _chatted(service, fields))

    @router.post(GENERATE_PATH)
    async def generate(request: Request) -> Response:
        fields = await read(request, OllamaGenerateRequest)
        return await unless_disconnected(request, _generated(service, fields))

    @router.post(EMBED_PATH)
    async def embed(request: Request) -> Response:
        fields = await read(request, OllamaEmbedRequest)
        return await unless_disconnected(request, _embedded(service, fields))

    @router.post(EMBEDDINGS_PATH)
    async def embeddings(request: Request) -> Response:
        fields = await read(request, OllamaEmbeddingsRequest)
        return await unless_disconnected(request, _embedding(service, fields))

    @router.get(VERSION_PATH)
    async def version() -> Response:
        return JSONResponse({"version": API_VERSION, "adaptrt": __version__})

    @router.post(PULL_PATH)
    @router.post(PUSH_PATH)
    async def transfer(request: Request) -> Response:
        raise ApiError(
            f"{request.url.path} is not supported: the server neither downloads nor uploads models; start it with the "
            "model (adaptrt serve MODEL) and its adapters (--lora-modules, --adapter-root)",
            status=HTTPStatus.NOT_IMPLEMENTED,
        )

    return router


async def _chatted(service: Service, fields: OllamaChatRequest) -> Response:
    load_time = LoadTime()
    model = await _load(service, fields, load_time)
    if not fields.messages:
        return _only_loaded(fields, chat_fields)
    fields, preset = _with_settings(fields, model, model.go_template)
    if len(fields.messages) <= MANY_MESSAGES:
        chat = _translated(chat_of, fields, preset)
    else:
        chat = await service.executor.work.run(WorkKind.TEXTS, _translated, chat_of, fields, preset)
    conversation = await Conversation.of(service, chat, cuts_answer=True)
    return await _answered(service, fields, conversation, chat_fields, load_time)


async def _generated(service: Service, fields: OllamaGenerateRequest) -> Response:
    load_time = LoadTime()
    model = await _load(service, fields, load_time)
    if not fields.prompt:
        return _only_loaded(fields, prompt_fields)
    template = await translated(service, fields.template) if fields.template else model.go_template
    if fields.suffix and (template is None or not template.has_suffix):
        raise ApiError("suffix is given, but the model has no Go template with .Suffix", param="suffix")
    fields, preset = _with_settings(fields, model, template)
    if fields.raw or (template is None and await service.prompts.template_of(model.adapter) is None):
        if not fields.raw and (fields.system or preset.system or preset.messages):
            raise _needs_template("a system message", "system")
        if fields.images:
            raise _needs_template("images", "images")
        completion = _translated(completion_of, fields, preset)
        conversation = await Conversation.of_prompt(service, completion, fields.options.answer_tokens)
    else:
        conversation = await Conversation.of(service, _translated(chat_of_prompt, fields, preset), cuts_answer=True)
    return await _answered(service, fields, conversation, prompt_fields, load_time)


def _needs_template(part: str, param: str) -> ApiError:
    return ApiError(f"the prompt has {part}, but neither the model nor the adapter has a chat template", param=param)


async def _load(service: Service, fields: OllamaFields, load_time: LoadTime) -> FoundModel:
    """Returns the model of a request; its adapter is in memory then. Raises ApiError."""
    model = await find_model(service, fields.model)
    fields.options.check_context((await service.lengths_of(model.adapter)).whole)
    load_time.end()
    return model


def _with_settings(fields: Generation, model: FoundModel, template: GoTemplate | None) -> tuple[Generation, Preset]:
    """Returns a request with the options of a created model, and what else the model adds to it."""
    jinja = None if template is None else template.jinja
    if model.created is None:
        return fields, Preset(model.adapter, jinja)
    own = model.created
    options = OllamaOptions.model_validate({**own.parameters, **fields.options.model_dump(exclude_unset=True)})
    messages = tuple(OllamaMessage.model_validate(message) for message in own.messages)
    return fields.model_copy(update={"options": options}), Preset(model.adapter, jinja, own.system, messages)


def _only_loaded(fields: OllamaFields, render: Render) -> Response:
    if fields.unloads:
        raise ApiError(
            "keep_alive is 0 without a prompt, which asks to unload the model; it stays loaded until the server ends",
            param="keep_alive",
        )
    return JSONResponse(loaded_object(render, fields.model))


def _translated(translate: Callable[[Any, Preset], Made], fields: Any, preset: Preset) -> Made:
    try:
        return translate(fields, preset)
    except ValidationError as error:
        raise validation_error(error) from error


async def _answered(
    service: Service,
    fields: OllamaGenerationFields,
    conversation: Conversation,
    render: Render,
    load_time: LoadTime,
) -> Response:
    if fields.think and not conversation.has_reasoning:
        raise ApiError(
            f"think is {fields.think}, but neither the chat template nor --reasoning-parser shows how the model "
            "reasons; leave it out",
            param="think",
        )
    answer = OllamaAnswer(
        render,
        fields.model,
        len(conversation.request.prompt),
        conversation.tokenizer,
        load_time,
        with_log_probs=fields.logprobs,
    )
    split = SplitAnswer(conversation.make_splitter())
    async with AsyncExitStack() as stack:
        generation = await conversation.start(service, stack)
        if fields.stream:
            kept = stack.pop_all()
            return LineStream(_lines(answer, split, generation), kept)
        (piece,) = await generation.whole()
    return JsonAnswer(await answer.whole(piece, split))


async def _lines(answer: OllamaAnswer, split: SplitAnswer, generation: TextGeneration) -> AsyncIterator[bytes]:
    try:
        async for piece in generation:
            if chunks := await answer.chunks(piece, split):
                yield b"".join([await line(chunk) for chunk in chunks])
    except AdaptrtError as error:
        yield await line(error_body(ApiError.of(error)))


async def _embedded(service: Service, fields: OllamaEmbedRequest) -> Response:
    load_time = LoadTime()
    adapter = (await _load(service, fields, load_time)).adapter
    check_can_pool(service)
    params = params_of(service)
    check_dimensions(service, fields.dimensions, params)
    params.normalize = True  # Ollama's embeddings have length 1
    pooled = await _pooled(service, fields.input, adapter, params, truncates=fields.truncate)
    rows = Items(cut(row, fields.dimensions, params).tolist() for row in pooled.rows)
    counts = {**load_time.fields(), "prompt_eval_count": pooled.num_tokens}
    return JsonAnswer({"model": fields.model, "embeddings": rows, **counts})


async def _embedding(service: Service, fields: OllamaEmbeddingsRequest) -> Response:
    adapter = (await _load(service, fields, LoadTime())).adapter
    check_can_pool(service)
    pooled = await _pooled(service, [fields.prompt] if fields.prompt else [], adapter, params_of(service))
    return JsonAnswer({"embedding": pooled.rows[0].tolist() if pooled.rows else []})


async def _pooled(
    service: Service, texts: list[str], adapter: str | None, params: PoolingParams, *, truncates: bool = True
) -> PooledTexts:
    """Runs one request for each text. truncates: True: a text that is too long loses its end."""
    if not texts:
        return PooledTexts([], [])
    fields = EmbeddingRequest(input=[*texts], truncate_prompt_tokens=-1 if truncates else None)
    return await pool(service, fields, texts, adapter, params)
