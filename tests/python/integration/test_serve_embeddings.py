"""/v1/embeddings of a server process, called with the openai package: every answer equals the executor's."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import transformers

import adaptrt
from adaptrt import PoolingParams, PoolingType
from support.http_server import http_server
from support.models import ModelSpec, save_adapter
from support.pooled import run_pooled, save_random, save_sentence_transformer
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=270)
TOKENIZER = byte_level()
TEXTS = ["Say hello €", "a", "hello hello . . . " * 9]
MODELS = ["base", "first"]
STATED = PoolingParams(PoolingType.MEAN, normalize=True)


@dataclasses.dataclass
class Served:
    """A server, and an executor over the same engine and adapters."""

    address: str
    client: openai.OpenAI
    executor: adaptrt.Executor

    def rows(self, text: str | list[int], model: str) -> np.ndarray:
        prompt = TOKENIZER.encode(text).ids if isinstance(text, str) else text
        return run_pooled(self.executor, prompt, STATED, None if model == "base" else model)

    def post(self, body: Any) -> httpx.Response:
        return httpx.post(f"{self.address}/v1/embeddings", json=body, timeout=60)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served")
    model = save_random(transformers.AutoModelForCausalLM.from_config(SPEC.config()), directory / "model")
    save_tokenizer(TOKENIZER, model)
    save_sentence_transformer(model, "mean_tokens", normalize=True)
    save_adapter(model, directory / "first", 1, r=4, use_dora=True)
    build_engine(model, directory)
    return directory


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Served]:
    flags = ["--served_model_name", "base", "--lora_modules", f"first={root / 'first'}", "--cut_embeddings"]
    with (
        adaptrt.Executor(root / "engine") as executor,
        http_server(root / "engine", *flags) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        executor.add_adapter("first", root / "first")
        yield Served(address, client, executor)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.omit])
def test_embeddings_are_the_executors(served: Served, model: str, encoding_format: Any) -> None:
    answer = served.client.embeddings.create(model=model, input=TEXTS, encoding_format=encoding_format, user="me")
    num_tokens = sum(len(TOKENIZER.encode(text).ids) for text in TEXTS)
    assert (answer.object, answer.model) == ("list", model)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    for text, entry in zip(TEXTS, answer.data, strict=True):
        embedding = entry.embedding
        if isinstance(embedding, str):
            embedding = np.frombuffer(base64.b64decode(embedding), "<f4")
        assert np.asarray(embedding, np.float32).tobytes() == served.rows(text, model).tobytes()


@pytest.mark.parametrize(
    "given", [TEXTS[0], TOKENIZER.encode(TEXTS[0]).ids, [TEXTS[0]], [TOKENIZER.encode(TEXTS[0]).ids]]
)
def test_forms_of_inputs(served: Served, given: Any) -> None:
    (entry,) = served.client.embeddings.create(model="base", input=given).data
    assert np.asarray(entry.embedding, np.float32).tobytes() == served.rows(TEXTS[0], "base").tobytes()


def test_fewer_dimensions(served: Served) -> None:
    (entry,) = served.client.embeddings.create(model="base", input=TEXTS[0], dimensions=8).data
    first = served.rows(TEXTS[0], "base")[:8]
    np.testing.assert_allclose(entry.embedding, first / np.linalg.norm(first), rtol=1e-6)
    (whole,) = served.client.embeddings.create(model="base", input=TEXTS[0], dimensions=SPEC.hidden_size).data
    assert np.asarray(whole.embedding, np.float32).tobytes() == served.rows(TEXTS[0], "base").tobytes()
    with pytest.raises(openai.BadRequestError, match="dimensions is 37; the model's embeddings have 36"):
        served.client.embeddings.create(model="base", input="a", dimensions=37)


def test_beside_generation(served: Served) -> None:
    async def ask_all() -> tuple[list[str], list[list[float]]]:
        async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key="none") as client:
            made, embedded = [], []
            for number in range(24):
                model, text = MODELS[number % 2], TEXTS[number % 3]
                made.append(client.completions.create(model=model, prompt=text, max_tokens=12, temperature=0))
                embedded.append(client.embeddings.create(model=model, input=text))
            texts, answers = await asyncio.gather(asyncio.gather(*made), asyncio.gather(*embedded))
            return [text.choices[0].text for text in texts], [answer.data[0].embedding for answer in answers]

    texts, embeddings = asyncio.run(ask_all())
    for number, (text, embedding) in enumerate(zip(texts, embeddings, strict=True)):
        assert text == texts[number % 6]
        expected = served.rows(TEXTS[number % 3], MODELS[number % 2])
        assert np.asarray(embedding, np.float32).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input": ""}, 400, "input is empty; accepted: a text of one token or more"),
        ({"input": []}, 400, "is an empty list"),
        ({"input": ["a", []]}, 400, "input[1] is empty"),
        ({"input": ["a", 3]}, 400, "accepted: a text, or a list of token ids"),
        ({"input": [270]}, 400, "input_token_ids[0] is 270; the vocabulary is 0 to 269"),
        ({"input": [1, -1]}, 400, "accepted: a token id"),
        ({"input": "a " * 700}, 400, "maximum context length is 640 tokens; input has 1400"),
        ({"input": ["a", "a " * 20_000]}, 400, "input has 40000 characters; expected at most 30720"),
        ({"input": ["a"] * 1025}, 400, "input has 1025 texts; at most 1024 are accepted"),
        ({}, 400, "input"),
        ({"input": "a", "model": "nobody"}, 404, "The model 'nobody' does not exist."),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "max_tokens": 3}, 400, "max_tokens"),
        ({"input": "a", "stream": True}, 400, "stream"),
    ],
)
def test_invalid_requests_are_refused(served: Served, body: Any, status: int, said: str) -> None:
    answer = served.post(body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_metrics_count_embeddings_apart(served: Served) -> None:
    def count() -> tuple[float, float]:
        lines = httpx.get(f"{served.address}/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        pooled = values['adaptrt_generations_total{finish_reason="pooled"}']
        return float(pooled), float(values["adaptrt_generated_tokens_total"])

    before = count()
    served.client.embeddings.create(model="base", input=TEXTS)
    assert count() == (before[0] + 3, before[1])


def test_flags_say_what_the_model_does_not(root: Path, served: Served) -> None:
    flags = ["--served_model_name", "base", "--pooling_type", "last", "--normalize_embeddings", "false"]
    with (
        http_server(root / "engine", *flags) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        (entry,) = client.embeddings.create(model="base", input=TEXTS[0]).data
        expected = run_pooled(served.executor, TOKENIZER.encode(TEXTS[0]).ids, PoolingParams(PoolingType.LAST))
        assert np.asarray(entry.embedding, np.float32).tobytes() == expected.tobytes()
        with pytest.raises(openai.BadRequestError, match="was not started with --cut-embeddings"):
            client.embeddings.create(model="base", input="a", dimensions=8)
