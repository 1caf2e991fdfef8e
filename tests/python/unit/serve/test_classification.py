"""Every field of the answers to requests that classify, score and rank texts."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt.serve import classification
from adaptrt.serve.json_answer import JsonAnswer, json_parts
from adaptrt.serve.openai_fields import RerankRequest, ScoreRequest

SERVICE: Any = SimpleNamespace(shown_model=lambda adapter: adapter or "base")


@pytest.fixture(autouse=True)
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts get these scores, by an adapter if the request names one, from prompts of 7 tokens together."""

    async def scores(_service: Any, fields: Any, *_: Any) -> Any:
        return None if fields.model == "base" else fields.model, [0.25, 0.75, 0.25], 7

    monkeypatch.setattr(classification, "_scores", scores)
    monkeypatch.setattr(classification, "answer_id", lambda kind: f"{kind}-1")
    monkeypatch.setattr(classification, "time", SimpleNamespace(time=lambda: 12.5))


async def written(answer: Any) -> Any:
    assert isinstance(answer, JsonAnswer)
    return json.loads(b"".join(await json_parts(answer._content)))


@pytest.mark.parametrize("model", ["base", "poet"])
def test_scores(model: str) -> None:
    fields = ScoreRequest.model_validate({"model": model, "text_1": "q", "text_2": ["a", "b", "c"]})

    async def main() -> Any:
        return await written(await classification._score(SERVICE, fields))

    assert asyncio.run(main()) == {
        "id": "score-1", "object": "list", "created": 12, "model": model,
        "data": [
            {"index": 0, "object": "score", "score": 0.25},
            {"index": 1, "object": "score", "score": 0.75},
            {"index": 2, "object": "score", "score": 0.25},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0, "prompt_tokens_details": None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "order"), [({}, [1, 0, 2]), ({"top_n": 2}, [1, 0]), ({"return_documents": False}, [1, 0, 2])]
)
def test_ranks(asked: dict[str, Any], order: list[int]) -> None:
    documents = ["a", "b", "c"]
    fields = RerankRequest.model_validate({"model": "poet", "query": "q", "documents": documents, **asked})

    async def main() -> Any:
        return await written(await classification._rerank(SERVICE, fields))

    shown = fields.return_documents
    assert asyncio.run(main()) == {
        "id": "rerank-1", "model": "poet", "usage": {"prompt_tokens": 7, "total_tokens": 7},
        "results": [
            {
                "index": i, "relevance_score": [0.25, 0.75, 0.25][i],
                **({"document": {"text": documents[i]}} if shown else {}),
            }
            for i in order
        ],
    }  # fmt: skip
