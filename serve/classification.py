"""POST /classify and POST /score, as vLLM has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..runtime.adapter_tokenizers import TokenTexts
from ..runtime.classifier import AdaptedClassifier, check_pairs, without_padding
from ..runtime.pooled import FloatArray
from .errors import ApiError
from .http import read_json
from .openai_answers import new_id
from .openai_fields import ClassificationRequest, ScoreRequest
from .openai_requests import adapter_of
from .pooled import check_can_pool, pool
from .service import Service


async def classify(service: Service, request: Request) -> Response:
    """Answers a request for classes: each text runs as a request of the executor's."""
    fields = await read_json(request, ClassificationRequest, service.options.limits)
    check_can_pool(service)
    adapter = await adapter_of(service, fields)
    executor = service.executor.executor
    # An adapter's head is read from its directory when it is first asked for.
    classifier = await service.executor.run(executor.adapters.classifier_for, adapter)
    change = partial(without_padding, engine=executor.engine, classifier=classifier)
    pooled = await pool(service, request, fields, fields.input, adapter, classifier.params, change)
    texts = (await service.tokenizers.of(adapter)).texts
    data = [
        {"index": i, **_classes(texts, classifier, prompt, rows)}
        for i, (prompt, rows) in enumerate(zip(pooled.prompts, pooled.rows, strict=True))
    ]
    return _answer(service, "classify", adapter, data, pooled.num_tokens)


async def score(service: Service, request: Request) -> Response:
    """Answers a request for how well pairs of texts match, with what a classifier of one class says of each."""
    fields = await read_json(request, ScoreRequest, service.options.limits)
    check_can_pool(service)
    adapter = await adapter_of(service, fields)
    executor = service.executor.executor
    classifier = await service.executor.run(executor.adapters.classifier_for, adapter)
    check_pairs(executor.engine)
    if classifier.per_token or len(classifier.labels) != 1:
        of = "tokens" if classifier.per_token else "texts"
        raise ApiError(
            f"/score is for classifiers of texts with one class; this one is of {of}, with {len(classifier.labels)}"
        )
    change = partial(without_padding, engine=executor.engine, classifier=classifier)
    pooled = await pool(service, request, fields, fields.pairs, adapter, classifier.params, change, param="text_2")
    data = [
        {"index": i, "object": "score", "score": float(classifier.classification(rows).probs[0])}
        for i, rows in enumerate(pooled.rows)
    ]
    return _answer(service, "score", adapter, data, pooled.num_tokens)


def _answer(
    service: Service, kind: str, adapter: str | None, data: list[dict[str, Any]], num_tokens: int
) -> JSONResponse:
    return JSONResponse(
        {
            "id": new_id(kind),
            "object": "list",
            "created": int(time.time()),
            "model": service.model_names[0] if adapter is None else adapter,
            "data": data,
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }
    )


def _classes(
    texts: TokenTexts, classifier: AdaptedClassifier, prompt: Sequence[int], rows: FloatArray
) -> dict[str, Any]:
    num_classes = len(classifier.labels)
    if not classifier.per_token:
        found = classifier.classification(rows)
        return {"label": found.label, "probs": found.probs.tolist(), "num_classes": num_classes}
    each = [classifier.classification(row) for row in rows]
    return {
        "tokens": [texts[token] for token in prompt],
        "labels": [found.label for found in each],
        "probs": [found.probs.tolist() for found in each],
        "num_classes": num_classes,
    }
