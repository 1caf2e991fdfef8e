"""GET /openapi.json and GET /docs: the routes, and the fields of their bodies, from the models that check them."""

from __future__ import annotations

import ast
import asyncio
import html
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core.core_schema import ModelSchema
from starlette.responses import HTMLResponse, Response

from .adapter_routes import (
    LOAD_PATH,
    SGLANG_LOAD_PATH,
    SGLANG_UNLOAD_PATH,
    UNLOAD_PATH,
    LoadLoraAdapter,
    SglangLoad,
    SglangUnload,
    UnloadLoraAdapter,
)
from .batch_routes import BATCHES_PATH, BatchRequest
from .llama_fields import LlamaCompletionRequest
from .llama_routes import PATHS as COMPLETION_PATHS
from .messages_fields import CountRequest, MessagesRequest
from .ollama_create import COPY_PATH, CREATE_PATH, OllamaCopyRequest, OllamaCreateRequest
from .ollama_fields import OllamaChatRequest, OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaGenerateRequest
from .ollama_models import SHOW_PATH, OllamaShowRequest
from .ollama_routes import CHAT_PATH, EMBED_PATH, EMBEDDINGS_PATH, GENERATE_PATH
from .openai_chat_fields import ChatRequest, TokenizeRequest
from .openai_fields import (
    ClassificationRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from .page_routes import page_headers
from .responses_fields import ResponseRequest

SCHEMA_PATH: Final = "/openapi.json"
DOCS_PATH: Final = "/docs"
BODIES: Final[Mapping[str, type[BaseModel]]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    CHAT_PATH: OllamaChatRequest,
    GENERATE_PATH: OllamaGenerateRequest,
    EMBED_PATH: OllamaEmbedRequest,
    EMBEDDINGS_PATH: OllamaEmbeddingsRequest,
    SHOW_PATH: OllamaShowRequest,
    CREATE_PATH: OllamaCreateRequest,
    COPY_PATH: OllamaCopyRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/classify": ClassificationRequest,
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/pooling": PoolingRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    BATCHES_PATH: BatchRequest,
    **dict.fromkeys(COMPLETION_PATHS, LlamaCompletionRequest),
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    LOAD_PATH: LoadLoraAdapter,
    UNLOAD_PATH: UnloadLoraAdapter,
    SGLANG_LOAD_PATH: SglangLoad,
    SGLANG_UNLOAD_PATH: SglangUnload,
}
"""Bodies of POST by path. Triton's bodies are those of the KServe protocol, and depend on the model."""
_REFERENCE: Final = "#/components/schemas/{model}"
_ERROR: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;"
    "background:#fff}code{font:0.9em ui-monospace,monospace}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-top:1px solid #ddd}"
    "summary{cursor:pointer;padding:.3rem 0}@media(prefers-color-scheme:dark){body{color:#ddd;background:#151515}"
    "td,th{border-color:#333}a{color:#8bf}}"
)


class _Schema(GenerateJsonSchema):
    """Makes schemas. Some defaults, such as tool_choice, are objects that JSON cannot express."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}
        self._modules: dict[str, dict[str, dict[str, str]]] = {}

    def model_schema(self, schema: ModelSchema) -> dict[str, Any]:
        """Adds the docstrings of the model's fields."""
        made = super().model_schema(schema)
        texts: dict[str, str] = {}
        for base in reversed(schema["cls"].__mro__):
            if base.__module__.startswith(f"{__package__}."):
                texts |= self._texts_of(base)
        for name, field in made.get("properties", {}).items():
            if name in texts and "$ref" not in field:
                field.setdefault("description", texts[name])
        return made

    def _texts_of(self, model: type[Any]) -> dict[str, str]:
        """Returns the docstrings below the fields of a class. They are read on request, not at the start."""
        name = model.__module__
        if name not in self._modules:
            self._modules[name] = _docstrings(name)
        return self._modules[name].get(model.__name__, {})


def routes(app: FastAPI) -> APIRouter:
    """Makes the routes. Schema and page are made on the first request, because few servers are asked for them."""
    router = APIRouter()
    made: list[tuple[str, str]] = []
    making = asyncio.Lock()

    async def once() -> tuple[str, str]:
        async with making:
            if not made:
                schema = await asyncio.to_thread(openapi_schema, app)
                made.append((json.dumps(schema), docs_page(schema)))
        return made[0]

    @router.get(SCHEMA_PATH)
    async def openapi() -> Response:
        return Response((await once())[0], media_type="application/json")

    @router.get(DOCS_PATH)
    async def docs() -> Response:
        page = (await once())[1]
        return HTMLResponse(page, headers=page_headers(page))

    return router


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI schema of all routes."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = dict.fromkeys(BODIES.values())
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REFERENCE, schema_generator=_Schema
    )
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas.clear()
    schemas.update(definitions["$defs"], Error=_ERROR)
    refused = {"description": "An error", "content": {"application/json": {"schema": _reference("Error")}}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = {"200": {"description": "The answer"}, "default": refused}
            if method == "post" and path in BODIES:
                content = {"application/json": {"schema": _reference(BODIES[path].__name__)}}
                operation["requestBody"] = {"required": True, "content": content}
    return schema


def docs_page(schema: Mapping[str, Any]) -> str:
    """Returns a page with the routes of a schema and their fields. It has no script and loads nothing."""
    title = html.escape(f"{schema['info']['title']} {schema['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f'<p>The same as <a href="{SCHEMA_PATH}">{SCHEMA_PATH}</a>, which programs can read.</p>'
        f"{''.join(_operations(schema))}</body></html>"
    )


def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings below the fields of a module's classes, by class and field."""
    source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
    return {node.name: dict(_texts(node)) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            yield field.target.id, " ".join(str(ast.literal_eval(text.value)).split())


def _operations(schema: Mapping[str, Any]) -> Iterator[str]:
    schemas = schema["components"]["schemas"]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            name = f"<code>{method.upper()} {html.escape(path)}</code>"
            body = operation.get("requestBody")
            if body is None:
                yield f"<p>{name}</p>"
                continue
            model = schemas[body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
            rows = "".join(_rows(model))
            yield (
                f"<details><summary>{name}</summary><table><tr><th>field</th><th>type</th><th>default</th>"
                f"<th>meaning</th></tr>{rows}</table></details>"
            )


def _rows(model: Mapping[str, Any]) -> Iterator[str]:
    required = model.get("required", ())
    for name, field in model.get("properties", {}).items():
        default = "required" if name in required else repr(field["default"]) if "default" in field else ""
        cells = (name, _type(field), default, field.get("description", ""))
        yield "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _type(field: Mapping[str, Any]) -> str:
    """Returns a field's type in words."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in field:
            return " or ".join(name for name in dict.fromkeys(map(_type, field[choice])) if name != "null")
    if "enum" in field or "const" in field:
        return " or ".join(map(repr, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=name)}
