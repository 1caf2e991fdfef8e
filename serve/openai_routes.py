"""OpenAI's routes and vLLM's additional ones: models, completions, chats, embeddings, classes, and the tokenizer."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core import ConfigError
from ..common.json_fields import load_json_object
from ..formats.adapter.adapter_copy import TOKENIZER_CONFIG_FILE
from ..runtime.adapter_tokenizers import TextTokenizer
from .chat import chat
from .classification import classify, rerank, score
from .completions import complete
from .embeddings import embed
from .errors import FORBIDDEN, ApiError
from .http import read_json, unless_disconnected
from .json_answer import Items, JsonAnswer
from .openai_answers import new_id
from .openai_chat_fields import TokenizeRequest
from .openai_fields import DetokenizeRequest
from .openai_requests import adapter_of
from .pooling import pooling
from .service import Service
from .work import WorkKind

OWNER: Final = "adaptrt"


def routes(service: Service) -> APIRouter:
    """Makes all routes."""
    router = APIRouter()
    limits = service.options.limits

    @router.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": _cards(service)})

    # An adapter's name may be a path.
    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        for card in _cards(service):
            if card["id"] == model:
                return JSONResponse(card)
        raise ApiError.not_found(f"The model '{model}' does not exist.", param="model")

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(service, request)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await chat(service, request)

    @router.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        return await embed(service, request)

    @router.post("/classify")
    async def classifications(request: Request) -> Response:
        return await classify(service, request)

    @router.post("/score")
    @router.post("/v1/score")
    async def scores(request: Request) -> Response:
        return await score(service, request)

    @router.post("/pooling")
    async def pooled(request: Request) -> Response:
        return await pooling(service, request)

    @router.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": service.executor.num_running})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        if not service.options.enable_tokenizer_info_endpoint:
            raise ApiError(
                "the tokenizer's files are not shown: the server was started without --enable-tokenizer-info-endpoint",
                status=HTTPStatus.FORBIDDEN,
                kind=FORBIDDEN,
            )
        content = await service.executor.work.run(WorkKind.FILES, tokenizer_files_info, service.engine_dir)
        return JSONResponse({**content, "chat_template": service.prompts.base_template_text})

    # Jina's and Cohere's clients use one of these paths each.
    @router.post("/rerank")
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def ranks(request: Request) -> Response:
        return await rerank(service, request)

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = await read_json(request, TokenizeRequest, limits, service.executor.work)
        return await unless_disconnected(request, tokenized(fields))

    async def tokenized(fields: TokenizeRequest) -> Response:
        adapter = await adapter_of(service, fields)
        # The limit is higher than for a prompt: clients count a text's tokens before they cut it.
        max_tokens = service.prompts.max_text_tokens
        text = fields.prompt if fields.content is None else fields.content
        if text is not None:
            adds_tokens = fields.adds_special_tokens_to_text if fields.content is None else fields.add_special
            tokens = await service.prompts.tokenize(
                text,
                adapter,
                add_special_tokens=adds_tokens,
                param="prompt" if fields.content is None else "content",
                max_tokens=max_tokens,
            )
        else:
            tools = [tool.model_dump(exclude_unset=True) for tool in fields.tools or ()]
            rendered = await service.prompts.tokenize_chat(
                fields, adapter, tools, max_tokens=max_tokens, with_rows=False
            )
            tokens = rendered.ids
        if len(tokens) > max_tokens:
            raise ApiError(
                f"the text has {len(tokens)} tokens; expected at most {max_tokens}",
                param="messages" if text is None else "prompt" if fields.content is None else "content",
            )
        own = await service.tokenizers.of(adapter)
        if fields.content is not None:
            pieces = ({"id": token, "piece": _piece(own, token)} for token in tokens)
            return JsonAnswer({"tokens": Items(pieces if fields.with_pieces else tokens)})
        return _tokens_answer(service, own, tokens, with_texts=fields.return_token_strs)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        fields = await read_json(request, DetokenizeRequest, limits, service.executor.work)
        return await unless_disconnected(request, detokenized(fields))

    async def detokenized(fields: DetokenizeRequest) -> Response:
        adapter = await adapter_of(service, fields)
        _check_vocabulary(await service.vocab_size_of(adapter), fields.tokens)
        tokenizer = (await service.tokenizers.of(adapter)).tokenizer
        # Unlike decode(), this releases the GIL.
        decode = tokenizer.decode_batch
        (text,) = await service.executor.work.run(WorkKind.TEXTS, decode, [fields.tokens], skip_special_tokens=False)
        return JSONResponse({"prompt": text, "content": text})  # vLLM's name and llama.cpp's

    return router


def tokenizer_files_info(directory: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json of a directory, with the kind of tokenizer if it does not name one.

    Raises ConfigError for a file that cannot be read.
    """
    path = directory / TOKENIZER_CONFIG_FILE
    content = load_json_object(path, ConfigError) if path.is_file() else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **content}


def _cards(service: Service) -> list[dict[str, Any]]:
    """Lists the base model under each of its names, then the adapters, in vLLM's format."""
    base = service.model_names[0]
    max_model_len = service.max_model_len
    return [
        *(
            _card(name, service.created, root=service.engine_dir, parent=None, max_model_len=max_model_len)
            for name in service.model_names
        ),
        *(
            _card(adapter.name, adapter.created, root=adapter.path, parent=base, max_model_len=None)
            for adapter in service.adapters.list()
        ),
    ]


def _card(name: str, created: int, *, root: Path, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": str(root),
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [
            {
                "id": new_id("modelperm"),
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def _tokens_answer(service: Service, own: TextTokenizer, tokens: list[int], *, with_texts: bool) -> Response:
    """Answers in vLLM's format."""
    texts = Items(own.tokenizer.id_to_token(token) for token in tokens) if with_texts else None
    return JsonAnswer(
        {
            "count": len(tokens),
            "max_model_len": service.max_model_len,
            "tokens": Items(tokens),
            "token_strs": texts,
        }
    )


def _piece(own: TextTokenizer, token: int) -> str | list[int]:
    """Returns a token's text, or its bytes if they are a part of a character."""
    text = own.texts[token]
    try:
        return text.text if text.data is None else text.data.decode("utf-8")
    except UnicodeDecodeError:
        return list(text.data or b"")


def _check_vocabulary(vocab_size: int, tokens: list[int]) -> None:
    for i, token in enumerate(tokens):
        if token >= vocab_size:
            raise ApiError(f"tokens[{i}] is {token}; the vocabulary is 0 to {vocab_size - 1}", param="tokens")
