"""POST /pooling as in vLLM: embeddings and classes as plain rows of numbers, of texts or of their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from .._core import PoolingParams, PoolingType
from ..runtime.classifier import without_padding
from ..runtime.pooled import FloatArray, PromptTokens
from .classification import classifier_for
from .embeddings import check_dimensions, cut, encoded, params_of
from .errors import ApiError
from .http import unless_disconnected
from .json_answer import Items, JsonAnswer
from .openai_answers import answer_id
from .openai_fields import PoolingRequest
from .openai_requests import adapter_of, read_fields
from .pooled import check_can_pool, pool
from .service import Service


@dataclass(frozen=True)
class _Task:
    """How a task turns prompts to rows, and rows to numbers of the answer."""

    params: PoolingParams
    numbers: Callable[[FloatArray], FloatArray]
    change: Callable[[PromptTokens], PromptTokens] = lambda prompt: prompt


async def pooling(service: Service, request: Request) -> Response:
    """Answers a request for rows. Each text is one executor request."""
    fields = await read_fields(service, request, PoolingRequest)
    return await unless_disconnected(request, _answered(service, fields))


async def _answered(service: Service, fields: PoolingRequest) -> Response:
    check_can_pool(service)
    adapter = await adapter_of(service, fields)
    task = await _task(service, fields, adapter)
    pooled = await pool(service, fields, fields.input, adapter, task.params, task.change)
    data = Items(
        {"index": i, "object": "pooling", "data": encoded(task.numbers(rows), fields)}
        for i, rows in enumerate(pooled.rows)
    )
    return JsonAnswer(
        {
            "id": answer_id("pool"),
            "object": "list",
            "created": int(time.time()),
            "model": service.shown_model(adapter),
            "data": data,
            "usage": {"prompt_tokens": pooled.num_tokens, "total_tokens": pooled.num_tokens},
        }
    )


async def _task(service: Service, fields: PoolingRequest, adapter: str | None) -> _Task:
    engine = service.executor.executor.engine
    name = fields.task
    if name is None:
        name = "embed" if engine.config.pretrained_config.classifier is None else "classify"
    if name in ("embed", "token_embed"):
        params = params_of(service)
        if name == "token_embed":
            return _Task(PoolingParams(PoolingType.ALL, params.layers, params.normalize), lambda rows: rows)
        check_dimensions(service, fields.dimensions, params)
        return _Task(params, lambda row: cut(row, fields.dimensions, params))
    if fields.dimensions is not None:
        raise ApiError("dimensions is given, and the model is a classifier; expected none", param="dimensions")
    classifier = await classifier_for(service, adapter)
    if fields.task is not None and classifier.per_token != (name == "token_classify"):
        accepted = "token_classify" if classifier.per_token else "classify"
        raise ApiError(f"task is '{name}'; expected '{accepted}', which this classifier is for", param="task")
    change = partial(without_padding, engine=engine, classifier=classifier)
    return _Task(classifier.params, classifier.probabilities, change)
