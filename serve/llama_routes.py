"""llama.cpp's routes: completions, adapters with their scales, and properties of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core import AdaptrtError
from .._version import __version__
from .conversation import Conversation
from .errors import ApiError
from .generation import TextGeneration
from .http import EventStream, parse_json, read_body, read_json, unless_disconnected, validation_error
from .json_answer import JsonAnswer, frame
from .llama_answer import LlamaAnswer
from .llama_fields import MEDIA_MARKER, LlamaCompletionRequest, LoraScales, MarkedPrompt, completion_of
from .openai_fields import LoraScale
from .openai_requests import adapter_of_scales
from .prompts import MarkedImages
from .service import Service
from .turns import image_of_base64
from .work import WorkKind

PATHS: Final = ("/completion", "/completions")
ADAPTERS_PATH: Final = "/lora-adapters"
PROPS_PATH: Final = "/props"
_NAMES: Final = ("model", "adapter_id", "lora_path", "lora_request", "lora")
"""Fields of a request that name its adapter."""


def routes(service: Service) -> APIRouter:
    """Makes all routes."""
    router = APIRouter()
    limits = service.options.limits
    scales: dict[str, float] = {}
    """Scales of adapters for completions that name no model; those that are not here are 0."""

    @router.post(PATHS[0])
    @router.post(PATHS[1])
    async def complete(request: Request) -> Response:
        fields = await read_json(request, LlamaCompletionRequest, limits, service.executor.work)
        if not any(getattr(fields, name) is not None for name in _NAMES):
            names = [adapter.name for adapter in service.adapters.list()]
            lora = [LoraScale(id=i, scale=scales[name]) for i, name in enumerate(names) if name in scales]
            fields = fields.model_copy(update={"lora": lora})
        return await unless_disconnected(request, _answered(service, fields))

    @router.get(ADAPTERS_PATH)
    async def adapters() -> Response:
        listed = enumerate(service.adapters.list())
        return JSONResponse(
            [
                {"id": i, "path": str(one.path), "name": one.name, "scale": scales.get(one.name, 0.0)}
                for i, one in listed
            ]
        )

    @router.post(ADAPTERS_PATH)
    async def set_scales(request: Request) -> Response:
        body = await read_body(request, limits, is_json=True)
        given = parse_json(b'{"adapters": %s}' % body, LoraScales, limits).adapters
        await adapter_of_scales(service, given)
        names = [adapter.name for adapter in service.adapters.list()]
        scales.clear()
        scales.update({names[one.id]: one.scale for one in given if one.scale})
        return JSONResponse({"success": True})

    @router.get(PROPS_PATH)
    async def props() -> Response:
        template = service.prompts.base_template_text if service.options.enable_tokenizer_info_endpoint else None
        return JSONResponse(
            {
                "default_generation_settings": {
                    "n_ctx": service.max_model_len,
                    "params": service.sampling_defaults.given(),
                },
                "total_slots": service.engine_info.max_batch_size,
                "model_alias": service.model_names[0],
                "model_path": str(service.engine_dir),
                "chat_template": template or "",
                "modalities": {"vision": service.vision.takes_images, "audio": False},
                "build_info": f"adaptrt {__version__}",
                "is_sleeping": False,
            }
        )

    @router.post(PROPS_PATH)
    async def set_props() -> Response:
        raise ApiError(
            "the server's properties are not changed at run time; start it with other flags",
            status=HTTPStatus.NOT_IMPLEMENTED,
        )

    return router


async def _answered(service: Service, fields: LlamaCompletionRequest) -> Response:
    try:
        completion = completion_of(fields)
    except ValidationError as error:
        raise validation_error(error) from error
    given, marked = fields.prompt, None
    if isinstance(given, MarkedPrompt) and given.images:
        marked = MarkedImages(MEDIA_MARKER, [image_of_base64(image).image_url.url for image in given.images])
    prompt = given.text if isinstance(given, MarkedPrompt) else given
    conversation = await Conversation.of_prompt(service, completion, fields.answer_tokens, marked)
    tokens = conversation.request.prompt
    if not isinstance(prompt, str):
        decode = conversation.tokenizer.tokenizer.decode_batch
        (prompt,) = await service.executor.work.run(WorkKind.TEXTS, decode, [prompt], skip_special_tokens=False)
    model = service.shown_model(conversation.adapter)
    answer = LlamaAnswer(model, prompt, len(tokens), conversation.tokenizer, with_tokens=fields.return_tokens)
    async with AsyncExitStack() as stack:
        generation = await conversation.start(service, stack)
        if fields.stream:
            kept = stack.pop_all()
            return EventStream(_frames(answer, generation), kept)
        (piece,) = await generation.whole()
    return JsonAnswer(answer.whole(piece))


async def _frames(answer: LlamaAnswer, generation: TextGeneration) -> AsyncIterator[bytes]:
    try:
        async for piece in generation:
            for event in answer.events(piece):
                yield await frame(event)
    except AdaptrtError as error:
        yield await frame(ApiError.of(error).body())
