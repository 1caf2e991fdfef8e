"""Describes the served models in Ollama's form: GET /api/tags and /api/ps, POST /api/show."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core import DType, RequestError
from ..runtime.adapter_versions import without_versions
from .embeddings import params_of
from .http import read_json, unless_disconnected
from .json_answer import Items, JsonAnswer
from .ollama_answer import timestamp
from .ollama_fields import ModelName, plain_name
from .openai_fields import Fields
from .residency import Level
from .service import Service
from .state_routes import states_of
from .tools.forms import AUTO, NONE, form_of_template, reasoning_of_template
from .work import WorkKind

TAGS_PATH: Final = "/api/tags"
PS_PATH: Final = "/api/ps"
SHOW_PATH: Final = "/api/show"
FOREVER: Final = "9999-12-31T23:59:59Z"
"""Time at which a model leaves memory: never, while the server runs."""
_FORMAT: Final = "safetensors"
_CLASS_ENDING: Final = re.compile(r"(?:For[A-Z]\w*|Model)$")
_DTYPES: Final = {DType.FLOAT32: "F32", DType.FLOAT16: "F16", DType.BFLOAT16: "BF16"}


class OllamaShowRequest(Fields):
    """Body of POST /api/show."""

    model: ModelName | None = None
    name: ModelName | None = None
    """The older name of model."""
    verbose: bool = False
    """No effect: answers have no lists of tokens."""

    @model_validator(mode="after")
    def _names_a_model(self) -> OllamaShowRequest:
        if self.model is None and self.name is None:
            raise ValueError("model is not given; expected the name of a model")
        if None not in (self.model, self.name) and self.model != self.name:
            raise ValueError("model and name are given, and they differ; expected one of them")
        return self

    @property
    def asked(self) -> str:
        """Name of the model."""
        name = self.model or self.name
        assert name is not None
        return name


@dataclass(frozen=True)
class ServedModel:
    """A model in the lists: the base under one of its names, or an adapter."""

    name: str
    directory: Path
    created: int
    checksum: str
    parent: str
    """Name of the base of an adapter; empty for the base."""


async def find_model(service: Service, name: str) -> str | None:
    """Returns the adapter that a model's name means, with or without the tag `latest`; None: the base model.

    Raises ApiError for an unknown name.
    """
    return await service.adapter_of(plain_name(name))


def routes(service: Service) -> APIRouter:
    """Makes the routes."""
    router = APIRouter()

    @router.get(TAGS_PATH)
    async def tags() -> Response:
        models = list(_models(service))
        sizes = await _sizes(service, models)
        listed = (_card(service, model, size) for model, size in zip(models, sizes, strict=True))
        return JsonAnswer({"models": Items(listed)})

    @router.get(PS_PATH)
    async def running() -> Response:
        in_memory = {state.name for state in states_of(service) if state.level in (Level.DEVICE, Level.HOST)}
        models = [model for model in _models(service) if not model.parent or model.name in in_memory]
        sizes = await _sizes(service, models)
        is_on_device = not service.engine_info.kernels
        listed = (
            _card(service, model, size)
            | {
                "expires_at": FOREVER,
                "size_vram": size if is_on_device else 0,
                "context_length": service.max_model_len,
            }
            for model, size in zip(models, sizes, strict=True)
        )
        return JsonAnswer({"models": Items(listed)})

    @router.post(SHOW_PATH)
    async def show(request: Request) -> Response:
        fields = await read_json(request, OllamaShowRequest, service.options.limits, service.executor.work)
        return await unless_disconnected(request, shown_model(fields))

    async def shown_model(fields: OllamaShowRequest) -> Response:
        adapter = await find_model(service, fields.asked)
        return JSONResponse(await _facts(service, adapter))

    return router


def _models(service: Service) -> Iterator[ServedModel]:
    """Yields the base model under each of its names, then the adapters."""
    config = service.executor.executor.engine.config
    base = " ".join(config.engine_checksums) or service.engine_info.kv_identity
    for name in service.model_names:
        yield ServedModel(name, service.engine_dir, service.created, base, "")
    for adapter in service.executor.executor.adapters.list():
        yield ServedModel(adapter.name, adapter.directory, adapter.created, adapter.checksum, service.model_names[0])


async def _sizes(service: Service, models: Sequence[ServedModel]) -> list[int]:
    """Returns the bytes of the files of each model."""
    directories = [model.directory for model in models]
    return await service.executor.work.run(WorkKind.FILES, _bytes_below, directories)


def _bytes_below(directories: Sequence[Path]) -> list[int]:
    sizes: dict[Path, int] = {}
    for directory in directories:
        if directory not in sizes:
            try:
                sizes[directory] = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
            except OSError:  # an adapter stays in memory after its files are deleted
                sizes[directory] = 0
    return [sizes[directory] for directory in directories]


def _card(service: Service, model: ServedModel, size: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": timestamp(model.created),
        "size": size,
        "digest": hashlib.sha256(f"{model.name} {model.checksum}".encode()).hexdigest(),
        "details": _details(service, model.parent),
    }


def _details(service: Service, parent: str) -> dict[str, Any]:
    config = service.executor.executor.engine.config.pretrained_config
    family = _CLASS_ENDING.sub("", config.architecture).lower()
    quantization = config.quantization
    return {
        "parent_model": parent,
        "format": _FORMAT,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": _DTYPES[config.dtype] if quantization is None else quantization.quant_algo.value,
    }


async def _facts(service: Service, adapter: str | None) -> dict[str, Any]:
    """Returns the answer of /api/show."""
    directory, created, parent = service.engine_dir, service.created, ""
    for known in service.adapters.list():
        if adapter is not None and known.name == without_versions(adapter):
            directory, created, parent = known.path, known.created, service.model_names[0]
    template = await service.prompts.template_of(adapter)
    text = "" if template is None else template.text(with_tools=False)
    parameters = _parameters(service)
    return {
        "modelfile": _modelfile(service, directory if parent else None, parameters, text),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters),
        "template": text,
        "details": _details(service, parent),
        "model_info": _model_info(service),
        "capabilities": _capabilities(service, "" if template is None else template.text(with_tools=True)),
        "modified_at": timestamp(created),
    }


def _parameters(service: Service) -> list[tuple[str, Any]]:
    """Returns the sampling of requests that do not set it, in Ollama's names."""
    names = {"repetition_penalty": "repeat_penalty"}
    return [(names.get(name, name), value) for name, value in service.sampling_defaults.given().items()]


def _modelfile(service: Service, adapter: Path | None, parameters: Sequence[tuple[str, Any]], template: str) -> str:
    """Returns the model as a Modelfile. Its template is Jinja, so it is a comment."""
    lines = [f"FROM {service.engine_dir}"]
    if adapter is not None:
        lines.append(f"ADAPTER {adapter}")
    lines += [f"PARAMETER {name} {value}" for name, value in parameters]
    if template:
        lines += ["# The chat template is Jinja:", *(f"# {line}" for line in template.splitlines())]
    return "\n".join(lines)


def _model_info(service: Service) -> dict[str, Any]:
    config = service.executor.executor.engine.config.pretrained_config
    family = _CLASS_ENDING.sub("", config.architecture).lower()
    return {
        "general.architecture": family,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.key_length": config.head_size,
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": service.max_model_len,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.vocab_size": config.vocab_size,
    }


def _capabilities(service: Service, template: str) -> list[str]:
    """Returns what the model can do. template: its source for conversations with tools."""
    options = service.options
    calls = form_of_template(template) if options.tool_call_parser == AUTO else options.tool_call_parser
    reasoning = reasoning_of_template(template) if options.reasoning_parser == AUTO else options.reasoning_parser
    can = {
        "completion": service.engine_info.has_logits,
        "tools": template and calls is not None,
        "thinking": template and reasoning not in (None, NONE),
        "embedding": _can_embed(service),
    }
    return [name for name, is_possible in can.items() if is_possible]


def _can_embed(service: Service) -> bool:
    if service.decoder_start is not None:
        return False
    try:
        params_of(service)
    except RequestError:
        return False
    return True
