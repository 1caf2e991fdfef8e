"""POST /classify and POST /score as in vLLM, and POST /rerank as in Jina, Cohere and vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..runtime.adapter_tokenizers import TokenTexts
from ..runtime.classifier import AdaptedClassifier, without_padding
from ..runtime.pooled import FloatArray
from .errors import ApiError
from .http import unless_disconnected
from .json_answer import Items, JsonAnswer
from .openai_answers import answer_id
from .openai_fields import ClassificationRequest, PooledFields, RerankRequest, ScoreRequest
from .openai_requests import adapter_of, read_fields
from .pooled import check_can_pool, pool
from .service import Service
from .time_slices import TimeSlices
from .work import WorkKind


async def classify(service: Service, request: Request) -> Response:
    """Answers a request for classes. Each text is one executor request."""
    fields = await read_fields(service, request, ClassificationRequest)
    return await unless_disconnected(request, _classify(service, fields))


async def _classify(service: Service, fields: ClassificationRequest) -> Response:
    check_can_pool(service)
    adapter = await adapter_of(service, fields)
    executor = service.executor.executor
    # An adapter's head is read from its directory on first use.
    classifier = await classifier_for(service, adapter)
    change = partial(without_padding, engine=executor.engine, classifier=classifier)
    pooled = await pool(service, fields, fields.input, adapter, classifier.params, change)
    texts = (await service.tokenizers.of(adapter)).texts
    slices = TimeSlices()
    data = []
    for i, (prompt, rows) in enumerate(zip(pooled.prompts, pooled.rows, strict=True)):
        data.append({"index": i, **await _classes(texts, classifier, prompt.ids, rows, slices)})
    return _answer(service, "classify", adapter, data, pooled.num_tokens)


async def score(service: Service, request: Request) -> Response:
    """Scores how well pairs of texts match, with a classifier of one class."""
    fields = await read_fields(service, request, ScoreRequest)
    return await unless_disconnected(request, _score(service, fields))


async def _score(service: Service, fields: ScoreRequest) -> Response:
    adapter, scores, num_tokens = await _scores(service, fields, fields.pairs, "text_2")
    data = ({"index": i, "object": "score", "score": score} for i, score in enumerate(scores))
    return _answer(service, "score", adapter, data, num_tokens)


async def rerank(service: Service, request: Request) -> Response:
    """Returns the documents that match a query best, the best first."""
    fields = await read_fields(service, request, RerankRequest)
    return await unless_disconnected(request, _rerank(service, fields))


async def _rerank(service: Service, fields: RerankRequest) -> Response:
    documents = fields.texts
    pairs = [(fields.query, document) for document in documents]
    adapter, scores, num_tokens = await _scores(service, fields, pairs, "documents")
    # Documents with equal scores keep their order.
    ranked = sorted(range(len(scores)), key=lambda i: -scores[i])[: fields.top_n]
    results = Items(
        {
            "index": i,
            "relevance_score": scores[i],
            **({"document": {"text": documents[i]}} if fields.return_documents else {}),
        }
        for i in ranked
    )
    return JsonAnswer(
        {
            "id": answer_id("rerank"),
            "model": _model(service, adapter),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "results": results,
        }
    )


async def _scores(
    service: Service, fields: PooledFields, pairs: list[tuple[str, str]], param: str
) -> tuple[str | None, list[float], int]:
    """Returns the adapter, the scores of the pairs, and the number of tokens. `param`: request field of the second
    texts.
    """
    check_can_pool(service)
    adapter = await adapter_of(service, fields)
    executor = service.executor.executor
    classifier = await classifier_for(service, adapter)
    if classifier.per_token or len(classifier.labels) != 1:
        of = "tokens" if classifier.per_token else "texts"
        raise ApiError(
            f"scores need a classifier of texts with one class; this one classifies {of} and has "
            f"{len(classifier.labels)} classes"
        )
    change = partial(without_padding, engine=executor.engine, classifier=classifier)
    pooled = await pool(service, fields, pairs, adapter, classifier.params, change, param=param)
    slices = TimeSlices()
    scores = []
    for rows in pooled.rows:
        scores.append(float(classifier.classification(rows).probs[0]))
        await slices.pause()
    return adapter, scores, pooled.num_tokens


async def classifier_for(service: Service, adapter: str | None) -> AdaptedClassifier:
    """Returns the classifier of AdapterStore.classifier_for. Reads files in a thread if it must."""
    store = service.executor.executor.adapters
    known = store.known_classifier(adapter)
    if known is not None:
        return known
    return await service.executor.work.run(WorkKind.ADAPTERS, store.classifier_for, adapter)


def _model(service: Service, adapter: str | None) -> str:
    return service.shown_model(adapter)


def _answer(
    service: Service, kind: str, adapter: str | None, data: Iterable[dict[str, Any]], num_tokens: int
) -> JsonAnswer:
    return JsonAnswer(
        {
            "id": answer_id(kind),
            "object": "list",
            "created": int(time.time()),
            "model": _model(service, adapter),
            "data": Items(data),
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }
    )


async def _classes(
    texts: TokenTexts, classifier: AdaptedClassifier, prompt: Sequence[int], rows: FloatArray, slices: TimeSlices
) -> dict[str, Any]:
    num_classes = len(classifier.labels)
    if not classifier.per_token:
        found = classifier.classification(rows)
        await slices.pause()
        return {"label": found.label, "probs": found.probs.tolist(), "num_classes": num_classes}
    each = []
    for row in rows:
        each.append(classifier.classification(row))
        await slices.pause()
    return {
        "tokens": Items(texts[token].text for token in prompt),
        "labels": Items(found.label for found in each),
        "probs": Items(found.probs.tolist() for found in each),
        "num_classes": num_classes,
    }
