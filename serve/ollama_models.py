"""Describes the served models in Ollama's form: GET /api/tags and /api/ps, POST /api/show."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core import DType, RequestError
from ..runtime.adapter_versions import without_versions
from .embeddings import params_of
from .go_template import GoTemplate
from .http import read_json, unless_disconnected
from .json_answer import Items, JsonAnswer
from .ollama_answer import timestamp
from .ollama_fields import NamedModel, plain_name
from .ollama_store import CreatedModel
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


class OllamaShowRequest(NamedModel):
    """Body of POST /api/show."""

    verbose: bool = False
    """No effect: answers have no lists of tokens."""


@dataclass(frozen=True)
class ServedModel:
    """A model in the lists: the base under one of its names, an adapter, or a created model."""

    name: str
    directory: Path
    created: int
    checksum: str
    parent: str = ""
    """Name of the model that it changes; empty for the base."""
    adapter: str | None = None
    """Name of the adapter that answers; None: the base model."""


@dataclass(frozen=True)
class FoundModel:
    """The meaning of a model's name."""

    adapter: str | None
    """The adapter that answers; None: the base model."""
    created: CreatedModel | None = None
    """The created model of this name; None: it is a served one."""

    @property
    def go_template(self) -> GoTemplate | None:
        """The model's own template; None: that of the adapter or of the base."""
        return None if self.created is None else self.created.go_template


async def find_model(service: Service, name: str) -> FoundModel:
    """Returns the meaning of a model's name, with or without the tag `latest`. Raises ApiError for an unknown name."""
    plain = plain_name(name)
    created = None if service.created_models is None else service.created_models.find(plain)
    if created is None:
        return FoundModel(await service.adapter_of(plain))
    return FoundModel(None if created.adapter is None else await service.adapter_of(created.adapter), created)


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
        models = [
            model for model in _models(service) if model.adapter is None or without_versions(model.adapter) in in_memory
        ]
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
        return JSONResponse(await _facts(service, fields.asked))

    return router


def _models(service: Service) -> Iterator[ServedModel]:
    """Yields the base model under each of its names, then the adapters, then the created models without own adapter."""
    config = service.executor.executor.engine.config
    base = service.model_names[0]
    checksum = " ".join(config.engine_checksums) or service.engine_info.kv_identity
    for name in service.model_names:
        yield ServedModel(name, service.engine_dir, service.created, checksum)
    adapters = {adapter.name: adapter for adapter in service.executor.executor.adapters.list()}
    for name, adapter in adapters.items():
        yield ServedModel(name, adapter.directory, adapter.created, adapter.checksum, base, name)
    for model in [] if service.created_models is None else service.created_models.list():
        if not model.files:
            known = None if model.parent is None else adapters.get(without_versions(model.parent))
            directory = service.engine_dir if known is None else known.directory
            facts = f"{checksum if known is None else known.checksum} {json.dumps(model.content())}"
            yield ServedModel(model.name, directory, model.created, facts, model.parent or base, model.parent)


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


async def _facts(service: Service, name: str) -> dict[str, Any]:
    """Returns the answer of /api/show. Raises ApiError for an unknown name."""
    found = await find_model(service, name)
    model = next((one for one in _models(service) if one.name == plain_name(name)), None)
    own = found.created or CreatedModel("", service.created)
    template = await service.prompts.template_of(found.adapter)
    text = own.template
    if not text and template is not None and service.options.enable_tokenizer_info_endpoint:
        text = template.text(with_tools=False)
    parameters = _parameters(service, own)
    with_tools = "" if template is None else template.text(with_tools=True)
    facts = {
        "modelfile": _modelfile(service, model, own, parameters, text),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters),
        "template": text,
        "details": _details(service, "" if model is None else model.parent),
        "model_info": _model_info(service),
        "capabilities": _capabilities(service, with_tools if found.go_template is None else found.go_template.jinja),
        "modified_at": timestamp(service.created if model is None else model.created),
    }
    more = {"system": own.system, "license": "\n".join(own.license), "messages": list(own.messages)}
    return facts | {name: value for name, value in more.items() if value}


def _parameters(service: Service, model: CreatedModel) -> list[tuple[str, Any]]:
    """Returns the options of requests that do not set them, in Ollama's names; each text of `stop` is one."""
    names = {"repetition_penalty": "repeat_penalty"}
    recommended = {names.get(name, name): value for name, value in service.sampling_defaults.given().items()}
    return [
        (name, json.dumps(one) if isinstance(one, str) else one)
        for name, value in {**recommended, **model.parameters}.items()
        for one in (value if isinstance(value, list) else [value])
    ]


def _modelfile(
    service: Service,
    model: ServedModel | None,
    own: CreatedModel,
    parameters: Sequence[tuple[str, Any]],
    template: str,
) -> str:
    """Returns the model as a Modelfile. A template in Jinja is a comment."""
    lines = [f"FROM {service.engine_dir}"]
    if model is not None and model.adapter is not None:
        lines.append(f"ADAPTER {model.directory}")
    lines += [f"PARAMETER {name} {value}" for name, value in parameters]
    if own.template:
        lines.append(f'TEMPLATE """{template}"""')
    elif template:
        lines += ["# The chat template is Jinja:", *(f"# {line}" for line in template.splitlines())]
    if own.system:
        lines.append(f'SYSTEM """{own.system}"""')
    lines += [f'MESSAGE {message["role"]} """{message.get("content", "")}"""' for message in own.messages]
    lines += [f'LICENSE """{text}"""' for text in own.license]
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
        "vision": service.vision.takes_images,
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
