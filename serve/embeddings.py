"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from .._core import PoolingParams
from ..runtime.pooled import POOLING_TYPES, FloatArray, embedding_params, embedding_size
from .errors import ApiError
from .http import unless_disconnected
from .json_answer import Items, JsonAnswer
from .openai_fields import EmbeddingRequest
from .openai_requests import adapter_of, read_fields
from .pooled import check_can_pool, pool
from .service import Service

_BASE64: Final = "base64"


async def embed(service: Service, request: Request) -> Response:
    """Answers a request for embeddings. Each text is one executor request."""
    fields = await read_fields(service, request, EmbeddingRequest)
    return await unless_disconnected(request, _answered(service, fields))


async def _answered(service: Service, fields: EmbeddingRequest) -> Response:
    check_can_pool(service)
    params = params_of(service)
    check_dimensions(service, fields.dimensions, params)
    adapter = await adapter_of(service, fields)
    pooled = await pool(service, fields, fields.input, adapter, params)
    data = Items(
        {"object": "embedding", "index": i, "embedding": encoded(cut(row, fields.dimensions, params), fields)}
        for i, row in enumerate(pooled.rows)
    )
    return JsonAnswer(
        {
            "object": "list",
            "data": data,
            "model": service.shown_model(adapter),
            "usage": {"prompt_tokens": pooled.num_tokens, "total_tokens": pooled.num_tokens},
        }
    )


def params_of(service: Service) -> PoolingParams:
    """Returns how embeddings are made. Raises RequestError if neither the model nor a flag says it."""
    options = service.options
    pooling_type = None if options.pooling_type is None else POOLING_TYPES[options.pooling_type]
    return embedding_params(service.executor.executor.engine, pooling_type, options.normalize_embeddings)


def check_dimensions(service: Service, dimensions: int | None, params: PoolingParams) -> None:
    """Raises ApiError for dimensions that embeddings with `params` cannot have. None: all."""
    size = embedding_size(service.executor.executor.engine, params)
    if dimensions is None or dimensions == size:
        return
    if not service.options.cut_embeddings:
        raise ApiError(
            f"dimensions is {dimensions}; the model's embeddings have {size}, and the server was not started with "
            "--cut-embeddings",
            param="dimensions",
        )
    if dimensions > size:
        raise ApiError(
            f"dimensions is {dimensions}; the model's embeddings have {size}; expected at most as many",
            param="dimensions",
        )


def cut(row: FloatArray, dimensions: int | None, params: PoolingParams) -> FloatArray:
    """Returns the first dimensions, normalised again if embeddings are normalised."""
    if dimensions is None or dimensions == len(row):
        return row
    kept = row[:dimensions].astype(np.float64)
    if params.normalize:
        kept /= max(float(np.sqrt(np.square(kept).sum())), 1e-12)
    return kept.astype(np.float32)


def encoded(row: FloatArray, fields: EmbeddingRequest) -> Any:
    """Returns the numbers of a row, or of several rows, in the request's format."""
    if fields.encoding_format == _BASE64:
        return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
    return row.tolist()
