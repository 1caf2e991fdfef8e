"""Ollama's routes that change models: POST /api/create and /api/copy, DELETE /api/delete, and the files for them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter
from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core import ConfigError
from ..runtime.adapter_versions import parse_version, without_versions
from .adapter_names import name_problem
from .errors import FORBIDDEN, ApiError
from .go_template import GoTemplate, translate
from .http import LineStream, json_line, read_json
from .ollama_fields import ModelName, NamedModel, OllamaMessage, plain_name
from .ollama_options import OllamaOptions
from .ollama_store import CreatedModel, CreatedModels, check_files
from .openai_fields import Fields, only
from .service import Service
from .work import WorkKind

CREATE_PATH: Final = "/api/create"
COPY_PATH: Final = "/api/copy"
DELETE_PATH: Final = "/api/delete"
BLOBS_PREFIX: Final = "/api/blobs/"
_STEPS: Final = ("reading model metadata", "writing manifest", "success")


def changes_models(path: str) -> bool:
    """True for the paths of all routes that change models or store files for them."""
    return path in (CREATE_PATH, COPY_PATH, DELETE_PATH) or path.startswith(BLOBS_PREFIX)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class OllamaCreateRequest(NamedModel):
    """Body of POST /api/create."""

    from_: Annotated[ModelName, Field(alias="from")]
    """Name of the base model, of an adapter, or of a created model, whose settings the new one has then."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """Files of an adapter: digests of files that /api/blobs stored, by name."""
    files: Annotated[
        dict[str, str],
        only({}, "a server has one base model, which from names; start another server with the files"),
    ] = Field(default_factory=dict)
    template: str = ""
    """A Go template. It is translated to Jinja."""
    system: str = ""
    parameters: OllamaOptions = Field(default_factory=OllamaOptions)
    messages: list[OllamaMessage] = Field(default_factory=list)
    license: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=list)
    quantize: Annotated[str, only("", "the engine is built when the server starts, with --quantization")] = ""
    stream: bool = True

    @model_validator(mode="after")
    def _messages_are_texts(self) -> OllamaCreateRequest:
        for i, message in enumerate(self.messages):
            if message.images:
                raise ValueError(f"messages[{i}].images is given; expected none: a model's own messages are texts")
        return self


class OllamaCopyRequest(Fields):
    """Body of POST /api/copy."""

    source: ModelName
    destination: ModelName


class OllamaDeleteRequest(NamedModel):
    """Body of DELETE /api/delete."""


def routes(service: Service) -> APIRouter:
    """Makes the routes. They answer 403 unless the server was started with --ollama-models."""
    router = APIRouter()

    @router.post(CREATE_PATH)
    async def create(request: Request) -> Response:
        models = created_models(service)
        fields = await read_json(request, OllamaCreateRequest, service.options.limits, service.executor.work)
        await models.create(await _model(service, models, fields))
        if not fields.stream:
            return JSONResponse({"status": _STEPS[-1]})
        return LineStream(_progress(), AsyncExitStack())

    @router.post(COPY_PATH)
    async def copy(request: Request) -> Response:
        models = created_models(service)
        fields = await read_json(request, OllamaCopyRequest, service.options.limits, service.executor.work)
        name = _new_name(service, models, fields.destination)
        source = await _source(service, models, fields.source, "source")
        await models.create(replace(source, name=name, created=int(time.time())))
        return Response()

    @router.delete(DELETE_PATH)
    async def delete(request: Request) -> Response:
        models = created_models(service)
        fields = await read_json(request, OllamaDeleteRequest, service.options.limits, service.executor.work)
        await models.delete(plain_name(fields.asked))
        return Response()

    @router.head(f"{BLOBS_PREFIX}{{digest}}")
    async def find_blob(digest: str) -> Response:
        is_found = await created_models(service).has_blob(digest)
        return Response(status_code=HTTPStatus.OK if is_found else HTTPStatus.NOT_FOUND)

    @router.post(f"{BLOBS_PREFIX}{{digest}}")
    async def store_blob(request: Request, digest: str) -> Response:
        await created_models(service).store_blob(digest, request.stream())
        return Response(status_code=HTTPStatus.CREATED)

    return router


def created_models(service: Service) -> CreatedModels:
    """Returns the server's created models. Raises ApiError if it has none."""
    if service.created_models is None:
        raise ApiError(
            "models are neither created nor deleted: the server was started without --ollama-models DIR",
            status=HTTPStatus.FORBIDDEN,
            kind=FORBIDDEN,
        )
    return service.created_models


async def translated(service: Service, template: str) -> GoTemplate:
    """Translates a Go template in a thread. Raises ApiError."""
    try:
        return await service.executor.work.run(WorkKind.TEMPLATES, translate, template)
    except ConfigError as error:
        raise ApiError(str(error), param="template") from error


async def _model(service: Service, models: CreatedModels, fields: OllamaCreateRequest) -> CreatedModel:
    """Returns the model that a request describes. Raises ApiError."""
    name = _new_name(service, models, fields.asked)
    model = replace(await _source(service, models, fields.from_, "from"), name=name, created=int(time.time()))
    if fields.adapters:
        if model.adapter is not None:
            raise ApiError(
                f"adapters is given, but from is '{fields.from_}', which has an adapter; expected the base model, "
                f"'{service.model_names[0]}'",
                param="adapters",
            )
        check_files(fields.adapters)
        model = replace(model, files=fields.adapters)
    if fields.template:
        model = replace(model, template=fields.template, go_template=await translated(service, fields.template))
    fields.parameters.check_context(service.max_model_len)
    parameters = {**model.parameters, **fields.parameters.model_dump(exclude_unset=True)}
    messages = tuple(message.model_dump(exclude_unset=True) for message in fields.messages)
    return replace(
        model,
        system=fields.system or model.system,
        parameters=parameters,
        messages=messages or model.messages,
        license=tuple(fields.license) or model.license,
    )


def _new_name(service: Service, models: CreatedModels, given: str) -> str:
    """Returns the name of a model to create. Raises ApiError for a name that it cannot have."""
    name = plain_name(given)
    problem = name_problem(name, service.model_names)
    if problem is not None:
        raise ApiError(f"model {problem}", param="model")
    if models.find(name) is None and service.adapters.knows(name):
        raise ApiError(f"model is '{name}', which is a served adapter; expected another name", param="model")
    return name


async def _source(service: Service, models: CreatedModels, given: str, field: str) -> CreatedModel:
    """Returns the model that another one is made from; a served one as if it were created. Raises ApiError."""
    name = plain_name(given)
    found = models.find(name)
    if found is not None:
        return found
    try:
        adapter = await service.adapter_of(name)
    except ApiError as error:
        if error.status is not HTTPStatus.NOT_FOUND:
            raise
        raise ApiError.not_found(
            f"{field} is '{given}'; expected the base model, '{service.model_names[0]}', or one of its adapters",
            param=field,
        ) from error
    if adapter is not None and parse_version(name) is None:
        # Without a digest, the name means the version of the time of a request.
        adapter = without_versions(adapter)
    return CreatedModel(name, 0, parent=adapter)


async def _progress() -> AsyncIterator[bytes]:
    for step in _STEPS:
        yield json_line({"status": step})
